"""Batches for the GPU: read and copied one step ahead, during the current step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kos.cuda.streams import Event, create_stream
from kos.memory.array import Array
from kos.memory.pool import pinned_empty
from kos.train.data.batches import Dataset
from kos.train.ops.cuda.dialect import CudaOps
from kos.train.parallel.context import ContextParallel


class _Slot(NamedTuple):
    """A batch and its count in pinned memory, their copies on the device, and when each may be written again."""

    host: np.ndarray
    device: Array
    host_count: np.ndarray
    device_count: Array
    copied: Event
    taken: Event


class Feed:
    """This rank's rows of a step: ``batch`` (micro_batches, 2, B, T), tokens and targets, where it reads them.

    ``count`` (1,) is the divisor of a micro-batch's sums (``Dataset.targets_per_micro_batch``).
    """

    def __init__(self, data: Dataset, micro_batches: Sequence[range], context: ContextParallel, ops: CudaOps) -> None:
        self._data, self._micro_batches, self._context, self._ops = data, micro_batches, context, ops
        pieces = context.pieces  # as samples of their own
        shape = (len(micro_batches), 2, len(micro_batches[0]) * pieces, data.seq_len // (context.size * pieces))
        self.batch, self.count = ops.zeros(shape, np.int32), ops.zeros(1, np.float32)
        self._stream, device = create_stream(ops.device), ops.device
        self._slots = [
            _Slot(
                pinned_empty(shape, np.int32, device), ops.zeros(shape, np.int32),
                pinned_empty(1, np.float32, device), ops.zeros(1, np.float32), Event(device), Event(device),
            )
            for _ in range(2)
        ]
        for slot in self._slots:
            slot.taken.record(ops.stream)  # the zeros are there before they are written over
        self._fetched: set[int] = set()

    def fetch(self, step: int) -> None:
        """Read the rows of ``step`` and start to copy them; does not wait for the current step."""
        slot = self._slots[step % 2]
        slot.copied.synchronize()  # of the step before the last
        for index, rows in enumerate(self._micro_batches):
            slot.host[index] = [self._context.take(tokens) for tokens in self._data.rows(step, rows)]
        slot.host_count[0] = self._data.targets_per_micro_batch(step, len(self._micro_batches[0]))
        slot.taken.hold(self._stream)
        slot.device.copy_from(slot.host, self._stream)
        slot.device_count.copy_from(slot.host_count, self._stream)
        slot.copied.record(self._stream)
        self._fetched.add(step)

    def take(self, step: int) -> None:
        """Queue the rows of ``step`` into ``batch``, and ``count``."""
        if step not in self._fetched:
            self.fetch(step)
        slot = self._slots[step % 2]
        slot.copied.hold(self._ops.stream)
        self.batch.copy_from(slot.device, self._ops.stream)
        self.count.copy_from(slot.device_count, self._ops.stream)
        slot.taken.record(self._ops.stream)
        self._fetched.discard(step)
