"""Batches for the GPU: read and copied one step ahead, during the current step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kos.cuda.streams import Event, create_stream
from kos.memory.array import Array
from kos.memory.pool import pinned_empty
from kos.train.data.batch import Batch
from kos.train.data.batches import Dataset
from kos.train.ops.cuda.dialect import CudaOps
from kos.train.parallel.context import ContextParallel
from kos.train.parallel.mesh import Axis


class _Staging(NamedTuple):
    """A batch and its count in pinned memory, their copies on the device, and when each may be written again."""

    batch: Batch  # of views of ``host``
    host: np.ndarray
    device: Array
    host_count: np.ndarray
    device_count: Array
    copied: Event
    taken: Event


class Feed:
    """This rank's rows of a step: the fields of ``batch`` are (micro_batches, B, T), where it reads them.

    ``count`` (1,) is the divisor of a micro-batch's sums (``Dataset.micro_batches``).
    """

    def __init__(
        self, data: Dataset, micro_batches: Sequence[range], dp: Axis, context: ContextParallel, ops: CudaOps
    ) -> None:
        self._data, self._micro_batches, self._dp, self._context, self._ops = data, micro_batches, dp, context, ops
        pieces = context.pieces  # as samples of their own
        rows, columns = len(micro_batches[0]) * pieces, data.seq_len // (context.size * pieces)
        shape = len(data.fields), len(micro_batches), rows, columns  # in one piece, for one copy
        self._rows, self.count = ops.zeros(shape, np.int32), ops.zeros(1, np.float32)
        self.batch = Batch.of_memory(self._rows, data.fields)
        self._stream, device = create_stream(ops.device), ops.device
        self._staging = [
            _Staging(
                Batch.of_memory(host, data.fields), host, ops.zeros(shape, np.int32),
                pinned_empty(1, np.float32, device), ops.zeros(1, np.float32), Event(device), Event(device),
            )
            for host in (pinned_empty(shape, np.int32, device) for _ in range(2))
        ]
        for staging in self._staging:
            staging.taken.record(ops.stream)  # the zeros are there before they are written over
        self._fetched: set[int] = set()

    def fetch(self, step: int) -> None:
        """Read the rows of ``step`` and start to copy them; does not wait for the current step."""
        staging = self._staging[step % 2]
        staging.copied.synchronize()  # of the step before the last
        micro_batches, staging.host_count[0] = self._data.micro_batches(step, self._micro_batches, self._dp)
        for index, whole in enumerate(micro_batches):
            for field, out in zip(self._context.take(whole), staging.batch, strict=True):
                if out is not field:  # both absent
                    out[index] = field
        staging.taken.hold(self._stream)
        staging.device.copy_from(staging.host, self._stream)
        staging.device_count.copy_from(staging.host_count, self._stream)
        staging.copied.record(self._stream)
        self._fetched.add(step)

    def count_of(self, step: int) -> float:
        """``count`` of a step that was fetched, on the host; the next but one takes its place."""
        return float(self._staging[step % 2].host_count[0])

    def micro_batch(self, index: int) -> Batch:
        """A micro-batch of ``batch``."""
        return self.batch.map(lambda field: field[index])

    def take(self, step: int) -> None:
        """Queue the rows of ``step`` into ``batch``, and ``count``."""
        if step not in self._fetched:
            self.fetch(step)
        staging = self._staging[step % 2]
        staging.copied.hold(self._ops.stream)
        self._rows.copy_from(staging.device, self._ops.stream)
        self.count.copy_from(staging.device_count, self._ops.stream)
        staging.taken.record(self._ops.stream)
        self._fetched.discard(step)
