"""The engine of CPUs: numpy's dialect, a step at a time."""

from __future__ import annotations

import math
import time

import numpy as np

from kos.train.config.options import TrainConfig
from kos.train.data.batches import Dataset, eval_shape
from kos.train.engine.machine import free_memory
from kos.train.engine.memory_plan import GIB, MemoryPlan
from kos.train.engine.protocol import Between, StepResult
from kos.train.model.gpt2 import TRANSPOSED, make_model
from kos.train.model.llama import HEAD_ROWS, Llama, Weights
from kos.train.model.llama_config import LlamaConfig
from kos.train.model.parameters import Parameters
from kos.train.model.shapes import Local
from kos.train.ops import numpy as numpy_ops
from kos.train.ops.optimizer import AdamW, clip_coefficient, global_norm
from kos.train.parallel.data import DataParallel, deal
from kos.train.parallel.failures import together
from kos.train.parallel.mesh import Mesh

LONG = 1e10
"""Flops of a layer, forward and backward, from which on a stop is asked for between layers: some tenths of a second."""


def plan_memory(config: TrainConfig, model: LlamaConfig, local: Local, ranks: int, first: bool) -> MemoryPlan:
    """What a rank, one of ``ranks`` on this host, will need of its memory; what is small is left out.

    The ``first`` of those that hold the same weights sums gradients in order and saves.
    """
    layers, D, up = len(local.layers), model.hidden_size, local.intermediate + local.up
    attended = (2 * local.heads + 2 * local.kv_heads) * model.head_dim + D + local.up
    normed = local.intermediate + D
    kept = {"none": attended + normed + 2 * D, "norms": attended + D, "block": D}[config.recompute]
    again = {"none": 0, "norms": normed, "block": attended + normed}[config.recompute]
    assert config.micro_batch_size is not None
    tokens = config.micro_batch_size * config.seq_len
    head = 2 * tokens * D + min(tokens, HEAD_ROWS) * len(local.vocabulary)
    trained = tokens * (layers * kept + 2 * D) + max(tokens * (again + up + D), head)
    evaluated = math.prod(eval_shape(config)) * (attended + normed + (3 * D if config.recompute == "none" else D))
    count = model.num_parameters(local)
    turned = sum(math.prod(x) for name, x in model.parameter_shapes(local).items() if name.endswith(TRANSPOSED))
    uses = {
        "weights, gradients, both Adam moments": 16 * count,
        "gradients summed in order": 4 * count * (config.deterministic and first),
        "activations": 4 * max(trained, evaluated),
        "matrices as they are saved": 4 * turned * first,
    }
    free = free_memory() // ranks
    knobs = {"fewer ranks on this machine": free * (ranks - 1)} if ranks > 1 else {}
    if config.micro_batch_size > 1:
        knobs[f"a --micro-batch-size below {config.micro_batch_size}"] = 0
    if config.recompute != "block":
        knobs["--recompute block"] = 0
    where = "this machine" + f" for each of {ranks} ranks" * (ranks > 1)
    uses = {use: size for use, size in uses.items() if size}
    return MemoryPlan(uses, uses["activations"], free, where, knobs)


class CpuEngine:
    """Weights and moments are fp32 arrays of the host, on every rank."""

    lag, place = 0, "the CPU"

    def __init__(
        self, config: TrainConfig, model: LlamaConfig, data: Dataset, mesh: Mesh, between: Between
    ) -> None:
        self.config, self.data, self.mesh, self.comm, self.between = config, data, mesh, mesh.world, between
        self.chosen: dict[str, str] = {}
        local = model.local(mesh.tp.rank, mesh.tp.size, mesh.pp.rank, mesh.pp.size)
        plan = plan_memory(config, model, local, self.comm.local_size, mesh.gradients.rank == 0)
        self.plan = together(self.comm, plan.check)
        self.model = make_model(model, numpy_ops, recompute=config.recompute, local=local)
        self.weights = Parameters(model.parameter_shapes(local), groups=model.fused_groups(local))
        self.gradients = self.weights.like()
        betas = (config.beta1, config.beta2)
        self.optimizer = AdamW(self.weights, betas=betas, eps=config.eps, weight_decay=config.weight_decay)
        self.schedule = config.make_schedule()
        self.parallel = DataParallel(mesh.gradients, self.gradients, deterministic=config.deterministic)
        assert config.micro_batch_size is not None  # for_world has chosen it
        self.rounds = deal(config.batch_size, config.micro_batch_size, mesh.dp.rank, mesh.dp.size)
        self._tokens = config.micro_batch_size * config.seq_len
        self._flops = model.flops_per_token(config.seq_len).causal
        self._has_long_layers = self._flops * self._tokens / model.num_hidden_layers > LONG

    def describe(self) -> str:
        return f"about {self.plan.total / GIB:.2f} GiB of memory a rank"

    def trial(self) -> tuple[float, float]:
        rounds, state = self.rounds, (self.weights.flat, self.optimizer.exp_avg.flat, self.optimizer.exp_avg_sq.flat)
        self.rounds = rounds[:1]
        for _ in range(1 if self._has_long_layers else 2):  # the first takes longer
            for array in state:
                array[:] = 0
            self.start_step(0, False)
        self.rounds, self.optimizer.step_count = rounds, 0
        evaluated = math.prod(eval_shape(self.config)) * -(-len(self.data.val_batches()) // self.mesh.dp.size)
        seconds = self._result.seconds
        return seconds * len(rounds), seconds * evaluated / self._tokens / 3  # a backward is two forwards

    def measures(self, tokens_per_second: float) -> dict[str, float]:
        return {}

    def new_state(self) -> AdamW:
        return self.optimizer

    def draw_weights(self) -> None:
        if self.comm.rank == 0:
            self.model.config.init_weights(self.weights, self.config.seed)

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
        count = np.array([self.data.targets_per_micro_batch(step, len(self.rounds[0]))], self.weights.flat.dtype)
        losses = [self._round(step, index, count) for index in range(len(self.rounds))]
        answers = self.comm.all_gather(np.array([stop, *losses], np.float64))
        of_all = answers[self.mesh.reporters(), 1:]
        micro_batches = of_all.size
        loss = math.fsum(of_all.flat) / micro_batches
        norm = global_norm(self.gradients.flat) / micro_batches
        lr = self.schedule(step)
        if not math.isfinite(norm) or (config.skip_outliers and norm > config.skip_outliers):
            self.optimizer.step_count += 1
        else:
            self.optimizer.step(self.gradients, lr, clip_coefficient(norm, config.grad_clip) / micro_batches)
        self._result = StepResult(loss, norm, lr, time.perf_counter() - began, bool(answers[:, 0].any()))

    def finish_step(self, step: int) -> StepResult:
        return self._result

    def _round(self, step: int, index: int, count: np.ndarray) -> float:
        """Forward and backward of this rank's micro-batch of round ``index``; its loss over ``count`` targets."""
        last = index + 1 == len(self.rounds)
        layers, chunks = len(self.model.local.layers), -(-self._tokens // HEAD_ROWS)
        self._tell(f"step {step + 1}", index, len(self.rounds), 2 * layers + chunks)
        tokens, targets = self.data.rows(step, self.rounds[index])
        loss = self.model.loss_and_gradients(
            self.weights, tokens, targets, self.gradients, accumulate=self.parallel.accumulates(index),
            on_gradient=self.parallel.gradient_ready if last else None, count=count,
        )  # fmt: skip
        self.parallel.finish_round(index, len(self.rounds))
        return loss

    def _tell(self, what: str, index: int, count: int, parts: int) -> None:
        """Part ``index`` of ``count`` begins: say so, and where its layers take long at each of its own ``parts``."""
        passed = 0

        def pause() -> None:
            nonlocal passed
            self.between(what, (index + passed / parts) / count)
            passed += 1

        if self._has_long_layers:
            self.model.pause = pause
        elif index:
            pause()

    def not_finite(self, step: int) -> str | None:
        return next((name for name, value in self.gradients.items() if not np.isfinite(value).all()), None)

    def evaluate(self) -> float:
        batches, dp = self.data.val_batches(), self.mesh.dp
        mine = np.full(-(-len(batches) // dp.size), np.nan)
        layers = len(self.model.local.layers)
        for slot in range(len(mine)):
            self._tell("validation", slot, len(mine), layers)
            if (index := slot * dp.size + dp.rank) < len(batches):
                mine[slot] = self.model.loss(self.weights, *batches[index]())
            else:  # the others ask between layers whether to stop
                for _ in range(layers):
                    self.model.pause()
        everyone = self.comm.all_gather(mine)[self.mesh.reporters()].T.ravel()[: len(batches)]
        return math.fsum(everyone) / len(batches)

    def sampler(self) -> tuple[Llama, Weights]:
        self.model.pause = lambda: None
        return self.model, self.weights

    def close(self) -> None:
        pass
