"""The memory of inputs and outputs: a slot for each call of a batch, written before the batch and checked after it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kos.bench.cases import PERIOD, PLACES, Case, Data
from kos.dtypes import DType

ALIGNMENT = 256  # bytes, of each input and each output
_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}

Allocate = Callable[[int, DType], Any]
"""A 1-D array of so many elements, whose slices are views."""


class HostMemory:
    """Memory of NumPy: moves tables to inputs and compares outputs with them."""

    def __init__(self) -> None:
        self._wrong = 0

    def empty(self, count: int, dtype: DType) -> Any:
        return np.empty(count, dtype.numpy)

    def load(self, period: Any, length: int) -> Any:
        """The table of ``length`` elements that repeats ``period``, as the other methods read it."""
        return np.resize(period, length)

    def poison(self, array: Any) -> None:
        """All bits of ``array`` set: NaN for floats, -1 or the largest number for integers."""
        array.view(np.uint8).fill(255)

    def write(self, array: Any, table: Any, start: int) -> None:
        """``array`` becomes the elements of ``table`` from ``start`` on."""
        array[:] = table[start : start + array.size]

    def check(self, array: Any, table: Any, start: int) -> None:
        """Count the elements of ``array`` whose bits are not those of ``table`` from ``start`` on."""
        words = _WORDS[array.dtype.itemsize]
        expected = table[start : start + array.size]
        self._wrong += int(np.count_nonzero(array.view(words) != expected.view(words)))

    def wrong(self) -> int:
        """Elements that differed since this was asked last."""
        wrong, self._wrong = self._wrong, 0
        return wrong


class DeviceMemory:
    """The same of a GPU.  All is queued on ``stream``, ``wrong`` waits for it; kernels repeat a table of one period."""

    def __init__(self, device: int, stream: Any) -> None:
        from kos.cuda import load_kernel
        from kos.memory.array import Array

        self.device, self.stream = device, stream
        self._array = Array
        source = Path(__file__).with_name("device.cu")
        self._repeat, self._check = (load_kernel(source, name, device) for name in ("repeat", "count_wrong"))
        self._counter = Array.zeros(1, "uint64", device, stream=stream)

    def empty(self, count: int, dtype: DType) -> Any:
        return self._array.empty(count, dtype, self.device, stream=self.stream)

    def load(self, period: Any, length: int) -> Any:
        return self._array.from_numpy(period, self.device, stream=self.stream)

    def poison(self, array: Any) -> None:
        array.fill_bytes(255, self.stream)

    def write(self, array: Any, table: Any, start: int) -> None:
        self._launch(self._repeat, array, table, start)

    def check(self, array: Any, table: Any, start: int) -> None:
        self._launch(self._check, array, table, start, self._counter.pointer)

    def _launch(self, kernel: Any, array: Any, table: Any, start: int, *more: int) -> None:
        blocks, size = min(2048, -(-array.size // 512)), array.dtype.itemsize
        kernel(self.stream, blocks, 512, array.pointer, table.pointer, array.size, size, start, PERIOD, *more)

    def wrong(self) -> int:
        wrong = int(self._counter.numpy(self.stream)[0])
        self._counter.fill_bytes(0, self.stream)
        return wrong


Memory = HostMemory | DeviceMemory


class Slot(NamedTuple):
    """The input and the output of one call; None where the rank has none."""

    send: Any
    recv: Any


class Space:
    """``slots`` slots of a case in one allocation, and one more that is neither timed nor checked."""

    def __init__(self, case: Case, data: Data, memory: Memory, allocate: Allocate, slots: int) -> None:
        self.case, self._data, self._memory = case, data, memory
        self._tables = {key: memory.load(period, data.lengths[key]) for key, period in data.tables.items()}
        step = ALIGNMENT // case.dtype.itemsize
        rank = data.input.table
        sends, receives = (-(-elements // step) * step for elements in case.largest)  # equal windows on all ranks
        stride = max(sends, receives) if case.in_place else sends + receives
        slab = allocate((slots + 1) * stride, case.dtype)
        self.slots: list[Slot] = []
        for first in range(0, (slots + 1) * stride, stride):
            if case.in_place:
                whole = slab[first : first + case.count]
                mine = sum(case.parts[:rank])
                part = whole[mine : mine + case.parts[rank]]
                self.slots.append(Slot(*(whole if all_of_it else part for all_of_it in PLACES[case.op])))
            else:
                send = slab[first : first + case.sends(rank)]
                recv = slab[first + sends : first + sends + case.receives(rank)]
                self.slots.append(Slot(send, recv))
        for slot in self.slots:
            self._memory.poison(slot.recv)
        self.fill(slots, 0)

    def fill(self, slot: int, iteration: int) -> None:
        """Poison the output, then write the input, which may be a part of it or hold it."""
        send, recv = self.slots[slot]
        self._memory.poison(recv)
        source = self._data.input
        self._memory.write(send, self._tables[source.table], source.start(iteration))

    def check(self, slot: int, iteration: int) -> None:
        """Compare the output with what the iteration must give."""
        recv, first = self.slots[slot].recv, 0
        for segment in self._data.output:
            self._memory.check(
                recv[first : first + segment.length], self._tables[segment.table], segment.start(iteration)
            )
            first += segment.length

    def wrong(self) -> int:
        return self._memory.wrong()
