"""The engine of CPUs: numpy's dialect, a step at a time."""

from __future__ import annotations

import math
import time

import numpy as np

from kos.train.checkpoint.shards import Shards
from kos.train.config.options import TrainConfig
from kos.train.data.batches import Dataset, eval_shape
from kos.train.engine.machine import free_memory
from kos.train.engine.memory_plan import GIB, MemoryPlan
from kos.train.engine.protocol import Between, StepResult
from kos.train.engine.step import StepProgram
from kos.train.model.gpt2 import make_model
from kos.train.model.llama import HEAD_ROWS, Llama, Weights
from kos.train.model.llama_config import LlamaConfig
from kos.train.model.parameters import Parameters
from kos.train.model.shapes import Local
from kos.train.ops import numpy as numpy_ops
from kos.train.ops.optimizer import BLOCK, AdamW, clip_coefficient, root_of_sum, squares
from kos.train.parallel.data import DataParallel, deal
from kos.train.parallel.failures import together
from kos.train.parallel.mesh import Mesh

LONG = 1e10
"""Flops of a layer, forward and backward, from which on a stop is asked for between layers: some tenths of a second."""


def plan_memory(
    config: TrainConfig, model: LlamaConfig, local: Local, ranks: int, first: bool, shards: int = 1, saved: int = 0
) -> MemoryPlan:
    """What a rank, one of ``ranks`` on this host, will need of its memory; what is small is left out.

    The ``first`` of those that hold the same weights sums gradients in order. With ZeRO-1 the moments are in
    ``shards``. ``saved`` bytes are on their way to files at once.
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
    uses = {
        "weights, gradients, both Adam moments": 8 * count + 8 * count // shards,
        "gradients summed in order": 4 * count * (config.deterministic and first),
        "activations": 4 * max(trained, evaluated),
        "tensors to be saved": saved,
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


class CpuEngine(StepProgram):
    """Weights and moments are fp32 arrays of the host; with ``--zero 1`` a rank holds its share of the moments."""

    lag, place = 0, "the CPU"

    def __init__(
        self, config: TrainConfig, model: LlamaConfig, data: Dataset, mesh: Mesh, between: Between
    ) -> None:
        self.config, self.data, self.mesh, self.comm, self.between = config, data, mesh, mesh.world, between
        self.chosen: dict[str, str] = {}
        local = model.local(mesh.tp.rank, mesh.tp.size, mesh.pp.rank, mesh.pp.size)
        group, sharded = mesh.gradients, config.zero == 1 and mesh.gradients.size > 1
        shards = group.size if sharded else 1
        saved = Shards(model, mesh.layout).host_bytes(self.comm.rank, config.save_async)
        plan = plan_memory(config, model, local, self.comm.local_size, group.rank == 0, shards, saved)
        self.plan = together(self.comm, plan.check)
        self.model = make_model(model, numpy_ops, recompute=config.recompute, local=local)
        shapes, groups = model.parameter_shapes(local), model.fused_groups(local)
        self.weights = Parameters(shapes, groups=groups, multiple=BLOCK * shards if sharded else 1)
        self.gradients = self.weights.like()
        self.parallel = DataParallel(group, self.gradients, deterministic=config.deterministic, sharded=sharded)
        self.optimizer = AdamW(
            self.weights, betas=(config.beta1, config.beta2), eps=config.eps, weight_decay=config.weight_decay,
            parts=self.parallel.parts() if sharded else None,
        )  # fmt: skip
        self.state = self.make_state((local,))
        self.schedule = config.make_schedule()
        assert config.micro_batch_size is not None  # for_world has chosen it
        self.rounds = deal(config.batch_size, config.micro_batch_size, mesh.dp.rank, mesh.dp.size)
        self.accumulation_steps, self._micro_batches = len(self.rounds), mesh.dp.size * len(self.rounds)
        self.count, self.known = np.zeros(1, np.float32), np.zeros(1 + self.accumulation_steps)
        self.known_of_all = self.known[None] if self.comm.size == 1 else np.zeros((self.comm.size, self.known.size))
        self._tokens, self._end = config.micro_batch_size * config.seq_len, model.num_parameters(local)
        self._flops = model.flops_per_token(config.seq_len).causal
        self._has_long_layers = self._flops * self._tokens / model.num_hidden_layers > LONG

    def describe(self) -> str:
        return f"about {self.plan.total / GIB:.2f} GiB of memory a rank"

    def trial(self) -> tuple[float, float]:
        rounds, self.accumulation_steps = self.accumulation_steps, 1
        state = self.weights.flat, self.optimizer.exp_avg.flat, self.optimizer.exp_avg_sq.flat
        for _ in range(1 if self._has_long_layers else 2):  # the first takes longer
            for array in state:
                array[:] = 0
            self.start_step(0, False)
        self.accumulation_steps, self.optimizer.step_count = rounds, 0
        evaluated = math.prod(eval_shape(self.config)) * -(-len(self.data.val_batches()) // self.mesh.dp.size)
        seconds = self._result.seconds
        return seconds * rounds, seconds * evaluated / self._tokens / 3  # a backward is two forwards

    def measures(self, tokens_per_second: float) -> dict[str, float]:
        return {}

    def draw_weights(self) -> None:
        if self.mesh.layout.ranks > self.mesh.layout.pp:
            super().draw_weights()
        else:  # the whole stage is this rank's
            self.model.config.init_weights(self.weights, self.config.seed, *self.state.parts)

    def start_step(self, step: int, stop: bool) -> None:
        """All of it."""
        began, self._step = time.perf_counter(), step
        self.known[0] = stop
        self.count[0] = self.data.targets_per_micro_batch(step, len(self.rounds[0]))
        self.queue_step()
        losses = self.known_of_all[self.mesh.reporters(), 1:]
        loss = math.fsum(losses.flat) / losses.size
        stopped = bool(self.known_of_all[:, 0].any())
        self._result = StepResult(loss, self._norm, self._lr, time.perf_counter() - began, stopped)

    def micro_batch(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        layers, chunks = len(self.model.local.layers), -(-self._tokens // HEAD_ROWS)
        self._tell(f"step {self._step + 1}", index, self.accumulation_steps, 2 * layers + chunks)
        return self.data.rows(self._step, self.rounds[index])

    def queue_norm(self) -> None:
        parallel, flat = self.parallel, self.gradients.flat[: self._end]  # what is beyond pads the parts
        sums = squares(flat, parallel.parts() if parallel.sharded else [slice(0, flat.size)])
        if parallel.sharded:
            parallel.axis.comm.all_reduce(sums)
        self._norm = root_of_sum(sums) / self._micro_batches

    def queue_update(self) -> None:
        config, norm = self.config, self._norm
        self._lr = self.schedule(self._step)
        if not math.isfinite(norm) or (config.skip_outliers and norm > config.skip_outliers):
            self.optimizer.step_count += 1
        else:
            scale = clip_coefficient(norm, config.grad_clip) / self._micro_batches
            self.optimizer.step(self.gradients, self._lr, scale)

    def finish_step(self, step: int) -> StepResult:
        return self._result

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
        spans, parts = self.gradients.spans, self.optimizer.exp_avg.parts()
        bad = [np.flatnonzero(~np.isfinite(self.gradients.flat[part])) + part.start for part, _ in parts]
        first = np.array(min((int(where[0]) for where in bad if where.size), default=self._end))
        at = int(self.comm.all_gather(first).min())
        return next((name for name, span in spans.items() if span.start <= at < span.stop), None)

    def evaluate(self) -> float:
        batches, dp, weights = self.data.val_batches(), self.mesh.dp, self.whole_weights()
        mine = np.full(-(-len(batches) // dp.size), np.nan)
        layers = len(self.model.local.layers)
        for slot in range(len(mine)):
            self._tell("validation", slot, len(mine), layers)
            if (index := slot * dp.size + dp.rank) < len(batches):
                mine[slot] = self.model.loss(weights, *batches[index]())
            else:  # the others ask between layers whether to stop
                for _ in range(layers):
                    self.model.pause()
        everyone = self.comm.all_gather(mine)[self.mesh.reporters()].T.ravel()[: len(batches)]
        return math.fsum(everyone) / len(batches)

    def sampler(self) -> tuple[Llama, Weights]:
        self.model.pause = lambda: None
        return self.model, self.whole_weights()

    def close(self) -> None:
        pass
