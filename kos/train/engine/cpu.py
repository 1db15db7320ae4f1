"""The engine of CPUs: numpy's dialect, a step at a time."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from kos.train.config.options import TrainConfig
from kos.train.data.batches import Dataset, eval_shape
from kos.train.engine.machine import free_memory
from kos.train.engine.memory_plan import GIB, MemoryPlan
from kos.train.engine.protocol import Show, StepResult
from kos.train.engine.step import StepProgram
from kos.train.model.gpt2 import TRANSPOSED
from kos.train.model.llama import HEAD_ROWS
from kos.train.model.llama_config import LlamaConfig
from kos.train.model.parameters import Parameters
from kos.train.model.shapes import Local
from kos.train.ops import numpy as numpy_ops
from kos.train.ops.optimizer import BLOCK, AdamW, clip_coefficient
from kos.train.parallel import schedules
from kos.train.parallel.data import DataParallel, deal
from kos.train.parallel.failures import together
from kos.train.parallel.mesh import Mesh
from kos.train.parallel.pipeline import Pipeline


def plan_memory(
    config: TrainConfig, model: LlamaConfig, locals: Sequence[Local], ranks: int, first: bool, shards: int = 1,
    mesh: Mesh | None = None, slots: int = 1,
) -> MemoryPlan:  # fmt: skip
    """What a rank, one of ``ranks`` on this host, will need of its memory; what is small is left out.

    The ``first`` of those that hold the same weights sums gradients in order and saves. With ZeRO-1 the moments are
    in ``shards``, and whole on the first where they are saved. ``slots`` micro-batches are in flight in each of
    ``locals``, the rank's stages.
    """
    local, D = locals[0], model.hidden_size
    tp, cp, pp = (1, 1, 1) if mesh is None else (mesh.tp.size, mesh.cp.size, mesh.pp.size)
    layers, up = max(len(each.layers) for each in locals), local.intermediate + local.up
    attended = (2 * local.heads + 2 * local.kv_heads) * model.head_dim + D // tp + local.up
    normed = local.intermediate + D // tp
    kept = {"none": attended + normed + 2 * D // tp, "norms": attended + D // tp, "block": D // tp}[config.recompute]
    again = {"none": 0, "norms": normed, "block": attended + normed}[config.recompute]
    assert config.micro_batch_size is not None
    tokens = config.micro_batch_size * config.seq_len // cp
    head = 2 * tokens * D + min(tokens, HEAD_ROWS) * len(local.vocabulary)
    in_flight = slots * tokens * (layers * kept + D // tp)
    backward = tokens * (again + up + D + D // tp) + 2 * tokens * D * (tp > 1)
    activations = in_flight + max(backward, head) + tokens * D // tp * (1 if pp == 1 else 5)
    count = model.num_parameters(*locals)
    shapes = model.parameter_shapes(*locals)
    turned = sum(math.prod(x) for name, x in shapes.items() if name.endswith(TRANSPOSED))
    uses = {
        "weights, gradients, both Adam moments": 8 * count + 8 * count // shards,
        "weights and both Adam moments, to be saved": 12 * count * (shards > 1 and first),
        "gradients summed in order": 4 * count * (config.deterministic and first),
        "activations": 4 * activations,
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


class CpuEngine(StepProgram):
    """Weights and moments are fp32 arrays of the host; with ``--zero 1`` a rank holds its share of the moments."""

    lag, place = 0, "the CPU"

    def __init__(self, config: TrainConfig, model: LlamaConfig, data: Dataset, mesh: Mesh, show: Show) -> None:
        self.config, self.data, self.mesh, self.comm, self.show = config, data, mesh, mesh.world, show
        self.chosen: dict[str, str] = {}
        assert config.micro_batch_size is not None  # for_world has chosen it
        self.rounds = deal(config.batch_size, config.micro_batch_size, mesh.dp.rank, mesh.dp.size)
        self.accumulation_steps, self._micro_batches = len(self.rounds), mesh.dp.size * len(self.rounds)
        schedule = schedules.build(config.pp_schedule, mesh.pp.size, self.accumulation_steps, config.pp_chunks)
        self.pipeline = Pipeline(mesh.pp, schedule)
        locals = self.locals(model)
        group, sharded = mesh.gradients, config.zero == 1 and mesh.gradients.size > 1
        shards = group.size if sharded else 1
        slots = self.pipeline.schedule.slots[mesh.pp.rank]
        plan = plan_memory(config, model, locals, self.comm.local_size, group.rank == 0, shards, mesh, slots)
        self.plan = together(self.comm, plan.check)
        shapes, groups = model.parameter_shapes(*locals), model.fused_groups(*locals)
        self.weights = Parameters(shapes, groups=groups, multiple=BLOCK * shards if sharded else 1)
        self.gradients = self.weights.like()
        self.build_models(model, numpy_ops, np.dtype(np.float32), recompute=config.recompute)
        self.parallel = DataParallel(group, self.gradients, deterministic=config.deterministic, sharded=sharded)
        self.optimizer = AdamW(
            self.weights, betas=(config.beta1, config.beta2), eps=config.eps, weight_decay=config.weight_decay,
            parts=self.parallel.parts() if sharded else None,
        )  # fmt: skip
        self.schedule = config.make_schedule()
        self.count, self.known = np.zeros(1, np.float32), np.zeros(1 + self.accumulation_steps)
        self.known_of_all = self.known[None] if self.comm.size == 1 else np.zeros((self.comm.size, self.known.size))

    def describe(self) -> str:
        return f"about {self.plan.total / GIB:.2f} GiB of memory a rank"

    def trial(self) -> tuple[float, float]:
        state = self.weights.flat, self.optimizer.exp_avg.flat, self.optimizer.exp_avg_sq.flat
        for _ in range(2):  # the first takes longer
            for array in state:
                array[:] = 0
            self.start_step(0, False)
        self.optimizer.step_count = 0
        tokens = math.prod(eval_shape(self.config)) * len(self.data.val_batches())
        seconds, trained = self._result.seconds, self.config.batch_size * self.config.seq_len
        return seconds, seconds * tokens / trained / 3  # a backward is two forwards

    def measures(self, tokens_per_second: float) -> dict[str, float]:
        return {}

    def new_state(self) -> AdamW:
        return super().new_state() if self.parallel.sharded else self.optimizer

    def draw_weights(self) -> None:
        if self.comm.rank == 0:
            self.model.config.init_weights(self.weights, self.config.seed)

    def load(self, state: AdamW | None) -> None:
        super().load(self.optimizer if state is None and self.comm.rank == 0 else state)  # which has the drawn weights

    def state(self) -> AdamW | None:
        if not self.parallel.sharded:
            return self.optimizer
        self.whole_weights()
        return super().state()

    def start_step(self, step: int, stop: bool) -> None:
        """All of it."""
        began, self._step = time.perf_counter(), step
        self.known[0] = stop
        self.count[0] = self.data.targets_per_micro_batch(step, len(self.rounds[0]))
        self.queue_step()
        losses = self.known_of_all[self.reporters(), 1:]
        loss = math.fsum(losses.flat) / self._micro_batches
        stopped = bool(self.known_of_all[:, 0].any())
        self._result = StepResult(loss, self._norm, self._lr, time.perf_counter() - began, stopped)

    def make_array(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        return np.zeros(shape, dtype)

    def micro_batch(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        self.show(f"step {self._step + 1}", index / self.accumulation_steps)
        tokens, targets = self.data.rows(self._step, self.rounds[index])
        return self.context.take(tokens), self.context.take(targets)

    def queue_norm(self) -> None:
        sums = self.optimizer.squares(self.gradients, self.counted())
        if self.parallel.sharded:
            self.parallel.axis.comm.all_reduce(sums)
        total = math.fsum(sums)
        if self.mesh.model.size > 1:
            total = math.fsum(self.mesh.model.comm.all_gather(np.array(total)))
        self._norm = math.sqrt(total) / self._micro_batches

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

    def not_finite(self, step: int) -> str | None:
        spans, parts = self.gradients.spans, self.optimizer.exp_avg.parts()
        bad = [np.flatnonzero(~np.isfinite(self.gradients.flat[part])) + part.start for part, _ in parts]
        at = min((int(where[0]) for where in bad if where.size), default=-1)
        return self.first_of_all(next((name for name, span in spans.items() if span.start <= at < span.stop), None))

    def sampling_ops(self) -> Any:
        return numpy_ops

    def close(self) -> None:
        self.pipeline.close()
