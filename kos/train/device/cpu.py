"""CPUs: the operations of numpy, one step at a time."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from kos.train.device import Device
from kos.train.device.dry_run import GIB, DryOps, plan_buckets, plan_memory
from kos.train.model.llama import LlamaConfig
from kos.train.ops import Batch, Loss
from kos.train.ops import numpy as numpy_ops
from kos.train.parallel.failures import together
from kos.train.parallel.mesh import Mesh
from kos.train.step import STATUS_FIELDS, Step, StepResult


class CpuDevice(Device):
    """Weights and state are fp32 arrays of the host; with ``--zero 1`` a rank holds its shard of the state."""

    place, dtype = "the CPU", np.dtype(np.float32)

    def make_step(self, model: LlamaConfig, loss: Loss | None, stop_request: Callable[[], int] | None) -> Step:
        config, mesh = self.config, self.mesh
        dry = Mesh.dry(mesh.layout, mesh.world.rank, mesh.exact("cpu"))
        plan = plan_memory(config, model, DryOps(), dry, self.pipeline.schedule, sharing=self.comm.local_size)
        self.plan = together(self.comm, plan.check)
        buckets, dtypes = plan_buckets(config, model, self.parts, mesh, reaches=False), (self.dtype,) * 3
        return Step(
            config, model, self.parts, mesh, self.pipeline, numpy_ops, buckets, self.micro_batch, dtypes=dtypes,
            loss=loss, stop_request=stop_request,
        )  # fmt: skip

    def describe(self) -> str:
        emulated = "; products in 8 bits are emulated, slower than float32" * (self.config.dtype == "fp8")
        return f"about {self.plan.total / GIB:.2f} GiB of memory a rank{emulated}"

    def start_step(self, step: int, stop_request: int) -> None:
        """All of it."""
        began, self._number, program = time.perf_counter(), step, self.step
        program.report[:STATUS_FIELDS] = stop_request, self.epoch, step + 1, self.newcomers
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
