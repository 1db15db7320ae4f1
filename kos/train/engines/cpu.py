"""The engine of CPUs: numpy's dialect, a step at a time."""

from __future__ import annotations

import math
import time

import numpy as np

from kos.comm.communicator import Communicator
from kos.train.config import TrainConfig
from kos.train.data import Dataset
from kos.train.engines import StepResult
from kos.train.gpt2 import make_model
from kos.train.llama_config import LlamaConfig
from kos.train.model import Llama, Weights
from kos.train.ops import numpy as numpy_ops
from kos.train.optimizer import AdamW, clip_coefficient, global_norm
from kos.train.parallel.data import DataParallel, deal
from kos.train.parameters import Parameters


class CpuEngine:
    """Weights and moments are fp32 arrays of the host, on every rank."""

    lag = 0

    def __init__(self, config: TrainConfig, model: LlamaConfig, data: Dataset, comm: Communicator) -> None:
        self.config, self.data, self.comm = config, data, comm
        self.model = make_model(model, numpy_ops, recompute=config.recompute)
        self.weights = Parameters(model.parameter_shapes(), groups=model.fused_groups())
        self.gradients = self.weights.like()
        self.optimizer = AdamW(
            self.weights, betas=(config.beta1, config.beta2), eps=config.eps, weight_decay=config.weight_decay
        )
        self.schedule = config.make_schedule()
        self.parallel = DataParallel(comm, self.gradients, deterministic=config.deterministic)
        assert config.micro_batch_size is not None  # for_world has chosen it
        self.rounds = deal(config.batch_size, config.micro_batch_size, comm.rank, comm.size)

    def describe(self) -> str:
        return ""

    def measures(self, tokens_per_second: float) -> dict[str, float]:
        return {}

    def new_state(self) -> AdamW:
        return self.optimizer

    def load(self, state: AdamW | None) -> None:
        steps = self.comm.all_gather(np.array(self.optimizer.step_count))
        self.optimizer.step_count = int(steps[0])
        for part in (self.weights, self.optimizer.exp_avg, self.optimizer.exp_avg_sq):
            self.comm.broadcast(part.flat, 0)

    def state(self) -> AdamW | None:
        return self.optimizer

    def start_step(self, step: int, stop: bool) -> None:
        """All of it."""
        began = time.perf_counter()
        config = self.config
        losses = [self._round(step, index) for index in range(len(self.rounds))]
        answers = self.comm.all_gather(np.array([stop, *losses], np.float64))
        micro_batches = answers[:, 1:].size
        loss = math.fsum(answers[:, 1:].flat) / micro_batches
        norm = global_norm(self.gradients.flat) / micro_batches
        lr = self.schedule(step)
        if not math.isfinite(norm) or (config.skip_outliers and norm > config.skip_outliers):
            self.optimizer.step_count += 1
        else:
            self.optimizer.step(self.gradients, lr, clip_coefficient(norm, config.grad_clip) / micro_batches)
        self._result = StepResult(loss, norm, lr, time.perf_counter() - began, bool(answers[:, 0].any()))

    def finish_step(self, step: int) -> StepResult:
        return self._result

    def _round(self, step: int, index: int) -> float:
        """Forward and backward of this rank's micro-batch of round ``index``; its mean loss."""
        last = index + 1 == len(self.rounds)
        tokens, targets = self.data.rows(step, self.rounds[index])
        loss = self.model.loss_and_gradients(
            self.weights,
            tokens,
            targets,
            self.gradients,
            accumulate=self.parallel.accumulates(index),
            on_gradient=self.parallel.gradient_ready if last else None,
        )
        self.parallel.finish_round(index, len(self.rounds))
        return loss

    def not_finite(self, step: int) -> str | None:
        return next((name for name, value in self.gradients.items() if not np.isfinite(value).all()), None)

    def evaluate(self) -> float:
        batches = self.data.val_batches()
        mine = np.full(-(-len(batches) // self.comm.size), np.nan)
        for slot, index in enumerate(range(self.comm.rank, len(batches), self.comm.size)):
            mine[slot] = self.model.loss(self.weights, *batches[index])
        everyone = self.comm.all_gather(mine).T.ravel()[: len(batches)]
        return math.fsum(everyone) / len(batches)

    def sampler(self) -> tuple[Llama, Weights]:
        return self.model, self.weights

    def close(self) -> None:
        pass
