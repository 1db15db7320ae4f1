"""CPUs: the operations of numpy, one step at a time."""

from __future__ import annotations

import time

import numpy as np

from kos.train.config.options import TrainConfig
from kos.train.data.batches import Dataset
from kos.train.data.corpus import Show
from kos.train.device import Device
from kos.train.device.dry_run import DryOps, plan_memory
from kos.train.device.memory_plan import GIB, plan_buckets
from kos.train.model.llama import LlamaConfig
from kos.train.ops import numpy as numpy_ops
from kos.train.ops.batch import Batch
from kos.train.optim import Optimizer
from kos.train.parallel.failures import together
from kos.train.parallel.mesh import Mesh
from kos.train.train import REPORT, Step, StepResult


class CpuDevice(Device):
    """Weights and state are fp32 arrays of the host; with ``--zero 1`` a rank holds its shard of the state."""

    lag, place, dtype = 0, "the CPU", np.dtype(np.float32)

    def __init__(self, config: TrainConfig, model: LlamaConfig, data: Dataset, mesh: Mesh, show: Show) -> None:
        super().__init__(config, model, data, mesh, show)
        parts, schedule = self.parts, self.pipeline.schedule
        dry = Mesh.dry(mesh.layout, mesh.world.rank, mesh.exact("cpu"))
        plan = plan_memory(config, model, DryOps(), dry, schedule, sharing=self.comm.local_size)
        self.plan = together(self.comm, plan.check)
        buckets = plan_buckets(config, model, parts, mesh, reaches=False)
        weights, gradients = (buckets.zeros(self.dtype) for _ in range(2))
        self.step = step = Step(
            config, model, parts, mesh, self.pipeline, numpy_ops, gradients, self.dtype, buckets
        )
        reports = np.zeros((self.comm.size, self.report_size))
        step.weights, step.count, step.micro_batch = weights, np.zeros(1, self.dtype), self.micro_batch
        step.reports, step.report = reports, reports[0] if self.comm.size == 1 else np.zeros(reports.shape[1])
        step.optimizer = Optimizer(
            config.update_rule(), weights, config.learning_rate(), groups=config.trained_groups(model, *parts),
            parts=step.parallel.parts(), normed=step.parallel.normed(),
            grad_clip=config.grad_clip, skip_outliers=config.skip_outliers, counted=step.counted(),
            exact=model.num_parameters() if config.deterministic else 0, tp=mesh.tp, arena=step.models[0].arena,
        )  # fmt: skip

    def describe(self) -> str:
        emulated = "; products in 8 bits are emulated, slower than float32" * (self.config.dtype == "fp8")
        return f"about {self.plan.total / GIB:.2f} GiB of memory a rank{emulated}"

    def start_step(self, step: int, wish: int) -> None:
        """All of it."""
        began, self._number, program = time.perf_counter(), step, self.step
        program.report[:REPORT] = wish, self.epoch, step + 1, self.newcomers
        whole, program.count[0] = self.source.micro_batches(step, self.micro_batches, self.mesh.dp)
        self._batches = [*map(program.models[0].context.take, whole)]
        program.run()
        after = program.optimizer.read()
        took = time.perf_counter() - began
        self._result = self.result(program.reports, after["norm"], after["lr"], took, program.count[0])

    def micro_batch(self, index: int) -> Batch:
        self.show(f"step {self._number + 1}", index / len(self.micro_batches))
        return self._batches[index]

    def finish_step(self, step: int) -> StepResult:
        return self._result

    def result_of(self, step: int) -> StepResult:
        return self._result

    def gradient_not_finite(self, step: int) -> str | None:
        if self.config.dtype == "fp8":
            self.step.passes()
            self.step.norm()
        return self.first_of_all(self.step.optimizer.not_finite())
