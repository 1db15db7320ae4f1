"""The engine of CPUs: the numpy dialect, one step at a time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kos.comm.reduction import ReduceOp
from kos.memory.arena import Arena
from kos.train.checkpoint.shards import Shards
from kos.train.config.options import TrainConfig
from kos.train.data.batches import Dataset, eval_shape
from kos.train.data.corpus import Show
from kos.train.engine.base import Engine
from kos.train.engine.machine import free_memory
from kos.train.engine.memory_plan import GIB, MemoryPlan, Rehearsal, plan_buckets
from kos.train.model.llama_config import LlamaConfig
from kos.train.model.parameters import Parameters
from kos.train.ops import numpy as numpy_ops
from kos.train.ops.optimizer import AdamW, clip_coefficient
from kos.train.parallel.failures import together
from kos.train.parallel.mesh import Mesh
from kos.train.parallel.schedules import Schedule
from kos.train.parallel.tree_sum import waiting_subtrees
from kos.train.train import StepResult

_WARM_SECONDS = 1.0  # of work, after which a step takes as long as later ones


def plan_memory(config: TrainConfig, model: LlamaConfig, mesh: Mesh, schedule: Schedule, ranks: int) -> MemoryPlan:
    """What a rank of ``mesh``, a silent one, will need of its memory, one of ``ranks`` on this host.

    What is small is left out.
    """
    rehearsal = Rehearsal(config, model, mesh, schedule, Sizing())
    scratch, slot = rehearsal.peaks()
    activations = scratch + slot * len(rehearsal.slots)
    count, shards = model.num_parameters(*rehearsal.parts), mesh.gradients.size if rehearsal.sharded else 1
    waiting = waiting_subtrees(mesh.dp.rank, schedule.micro_batches) if config.deterministic else 0
    saved = Shards(model, mesh.layout, schedule.stages_of_ranks).host_bytes(mesh.world.rank, config.save_async)
    uses = {
        "weights, gradients, both Adam moments": 8 * count + 8 * count // shards,
        "gradients summed in order": 4 * count * waiting,
        "activations": activations,
        "tensors to be saved": saved,
    }
    free = free_memory() // ranks
    assert config.micro_batch_size is not None
    savings = {
        "fewer ranks on this machine": ranks > 1,
        f"a --micro-batch-size below {config.micro_batch_size}": config.micro_batch_size > 1,
        "--recompute block": config.recompute != "block",
    }
    where = "this machine" + f" for each of {ranks} ranks" * (ranks > 1)
    uses = {use: size for use, size in uses.items() if size}
    return MemoryPlan(uses, uses["activations"], free, where, [*filter(savings.get, savings)])


class Sizing:
    """Operations that do nothing, on arrays without memory: what they are given from the arena is counted."""

    dtype, overlap_rows = np.dtype, None

    def make_arena(self) -> Arena:
        return Arena(0, lambda nbytes: None, lambda slab, offset, shape, dtype: self.zeros(shape, dtype))

    def zeros(self, shape: Any, dtype: Any) -> np.ndarray:
        return np.broadcast_to(np.zeros((), dtype), shape)

    def rope_tables(self, frequencies: Sequence[float], positions: Sequence[int], dtype: Any) -> Any:
        return (self.zeros((len(positions), len(frequencies)), dtype),) * 2

    step, statistics_dtype = staticmethod(numpy_ops.step), staticmethod(numpy_ops.statistics_dtype)
    indices, empty_columns = staticmethod(numpy_ops.indices), staticmethod(numpy_ops.empty_columns)
    keys_and_values = staticmethod(numpy_ops.keys_and_values)

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *operands: None


class CpuEngine(Engine):
    """Weights and moments are fp32 arrays of the host; with ``--zero 1`` a rank holds its shard of the moments."""

    lag, place, dtype = 0, "the CPU", np.dtype(np.float32)

    def __init__(self, config: TrainConfig, model: LlamaConfig, data: Dataset, mesh: Mesh, show: Show) -> None:
        super().__init__(config, model, data, mesh, show)
        parts, schedule = self.parts, self.pipeline.schedule
        silent = Mesh.silent(mesh.layout, mesh.world.rank)
        self.plan = together(self.comm, plan_memory(config, model, silent, schedule, self.comm.local_size).check)
        buckets = plan_buckets(config, model, parts, mesh, reaches=False)
        shapes, groups = model.parameter_shapes(*parts), model.fused_groups(*parts)
        self.weights = Parameters(shapes, self.dtype, groups, multiple=buckets.multiple)
        self.build(model, numpy_ops, self.weights.like(), self.dtype, buckets)
        self.optimizer = AdamW(
            self.weights, betas=(config.beta1, config.beta2), eps=config.eps, weight_decay=config.weight_decay,
            parts=self.parallel.parts() if self.sharded else None,
        )  # fmt: skip
        self.learning_rate = config.learning_rate()
        self.count, self.report = np.zeros(1, self.dtype), np.zeros(1 + self.accumulation_steps)
        self.reports = self.report[None] if self.comm.size == 1 else np.zeros((self.comm.size, self.report.size))

    def describe(self) -> str:
        return f"about {self.plan.total / GIB:.2f} GiB of memory a rank"

    def trial(self) -> tuple[float, float]:
        trained = self.config.batch_size * self.config.seq_len
        self._try_step()  # the first takes longer
        # So do the steps of the first second of work, while processors raise their clock.  All ranks try equally many.
        took = float(self.comm.all_reduce(np.array([self._try_step()]), ReduceOp.MAX)[0])
        seconds = min([took, *(self._try_step() for _ in range(min(4, int(_WARM_SECONDS / took))))])
        self.optimizer.step_count = 0
        tokens = math.prod(eval_shape(self.config)) * len(self.data.val_starts())
        return seconds, seconds * tokens / trained / 3  # a backward is two forwards

    def _try_step(self) -> float:
        """Seconds that a step takes, with weights of zeros."""
        for array in (self.weights.flat, self.optimizer.exp_avg.flat, self.optimizer.exp_avg_sq.flat):
            array[:] = 0
        self.start_step(0, False)
        return self._result.seconds

    def start_step(self, step: int, stop: bool) -> None:
        """All of it."""
        began, self._step = time.perf_counter(), step
        self.report[0] = stop
        self.count[0] = self.data.targets_per_micro_batch(step, len(self.micro_batches[0]))
        self.queue_step()
        self._result = self.result(self.reports, self._norm, self._lr, time.perf_counter() - began)

    def queue_gradients(self) -> None:
        super().queue_gradients()
        self.report[0] = self.report[0] or self.asked()  # meanwhile

    def micro_batch(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        self.show(f"step {self._step + 1}", index / self.accumulation_steps)
        tokens, targets = self.data.rows(self._step, self.micro_batches[index])
        return self.context.take(tokens), self.context.take(targets)

    def queue_norm(self) -> None:
        if self.config.deterministic:
            self._norm = self._exact_norm() / self.micro_batches_of_all
            return
        sums = self.optimizer.squares(self.gradients, self.counted())
        if self.parallel.sharded:
            self.parallel.axis.comm.all_reduce(sums)
        total = math.fsum(sums)
        if self.mesh.model.size > 1:
            total = math.fsum(self.mesh.model.comm.all_gather(np.array(total)))
        self._norm = math.sqrt(total) / self.micro_batches_of_all

    def _exact_norm(self) -> float:
        """The norm by sums without rounding: the same bits for every split of the tensors."""
        counted, model = self.counted(), self.mesh.model
        largest = np.array([self.optimizer.largest(self.gradients, counted)])
        if self.comm.size > 1:
            self.comm.all_reduce(largest, ReduceOp.MAX)
        if not 0 < largest[0] < math.inf:
            return float(largest[0])
        sums = self.optimizer.exact_squares(
            self.gradients, counted, float(largest[0]), self.model.config.num_parameters()
        )
        if self.parallel.sharded:
            self.parallel.axis.comm.all_reduce(sums)
        if model.size > 1:
            model.comm.all_reduce(sums)
        return math.sqrt(math.fsum(sums))

    def queue_update(self) -> None:
        config, norm = self.config, self._norm
        self._lr = self.learning_rate(self._step)
        if not math.isfinite(norm) or (config.skip_outliers and norm > config.skip_outliers):
            self.optimizer.step_count += 1
        else:
            scale = clip_coefficient(norm, config.grad_clip) / self.micro_batches_of_all
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
