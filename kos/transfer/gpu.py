"""Copies of boxes (rectangular slices of arrays) to, from and between GPUs.

A box that is contiguous on both sides and keeps its dtype is a run of bytes.  One kernel copies all runs of a version
(``copy_runs.cu``), because a copy engine pauses between two runs.  A copy engine copies a run that ``Copier.copy``
queues alone.  Another kernel copies all other boxes (``copy_box.cu``).  Data between a GPU and pageable host memory
passes through pinned memory.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from kos.cuda import driver, streams
from kos.cuda.driver import call, cu, relaxed_capture
from kos.cuda.kernels import load_kernel
from kos.dtypes import BY_NUMPY, DType
from kos.errors import TransferTimeout
from kos.memory.array import Array
from kos.memory.pool import pinned_empty
from kos.transfer.placement import Box, Flat, aligned, box, c_strides

_COPY_BOX, _COPY_RUNS = (Path(__file__).parents[1] / f"comm/gpu/kernels/copy_{name}.cu" for name in ("box", "runs"))
_AXES = 4  # of a box that one launch of the kernel copies, at most
_THREADS, _MOST_BLOCKS = 256, 2048
_RUN_THREADS, _RUN_BLOCKS = 512, 64  # the fewest blocks that reach the full rate within a GPU; between GPUs 16 do
_LABEL = "table of kos.transfer"
_RUN_PIECE = 256 << 10  # bytes of a run that one block copies at a time
_UNITS = {1: "uint8", 2: "uint16", 4: "uint32", 8: "uint64", 16: "bytes16"}
_SPINS, _POLL_SECONDS = 50, 2e-5  # no sleep at first, as Linux sleeps 5e-5 s longer than asked
PIECE = 8 << 20  # bytes that are copied to the host at once
K = TypeVar("K")
Launch = Callable[[int], object]
"""A function that queues a copy or a kernel on the stream with the given handle."""


@dataclass(frozen=True, slots=True)
class Run:
    """A Launch that copies consecutive bytes, by a copy engine."""

    target: int
    source: int
    nbytes: int

    def __call__(self, stream: int) -> None:
        call(cu.cuMemcpyAsync, self.target, self.source, self.nbytes, stream)


class Runs:
    """A Launch that copies several runs, by a kernel.  ``stream`` is the one on which it will be queued."""

    def __init__(self, runs: Sequence[Run], device: int, stream: Any) -> None:
        pieces = [
            (run.target + start, run.source + start, min(_RUN_PIECE, run.nbytes - start))
            for run in runs for start in range(0, run.nbytes, _RUN_PIECE)
        ]  # fmt: skip
        self._table = Array.from_numpy(np.array(pieces, np.uint64), device, stream=stream, label=_LABEL)
        kernel = load_kernel(_COPY_RUNS, "copy_runs", device)
        blocks = min(len(pieces), _RUN_BLOCKS)
        self._launch = kernel.bind(blocks, _RUN_THREADS, self._table.pointer, len(pieces))

    def __call__(self, stream: int) -> None:
        self._launch(stream)


def whole(memory: Flat) -> Box:
    """The box that contains all of a contiguous array, which is on a GPU or in pinned memory."""
    if isinstance(memory, Array):
        return Box(memory.pointer, memory.dtype, memory.shape, c_strides(memory.shape))
    return Box(memory.__array_interface__["data"][0], BY_NUMPY[memory.dtype], memory.shape, c_strides(memory.shape))


def launches(target: Box, source: Box, device: int) -> Iterator[Launch]:
    """The launches on ``device`` that copy ``source`` to ``target``.  Both boxes have the same size."""
    if 0 in target.size:
        return
    same = target.dtype is source.dtype
    width = source.dtype.itemsize if same else 1  # without a conversion, the bytes of an element are one more axis
    axes = [(width, 1, 1)] * same  # size, and the strides of target and source
    steps = sorted(zip(target.strides, source.strides, target.size, strict=True))
    for to_step, from_step, count in ((t * width, s * width, count) for t, s, count in steps if count > 1):
        if axes and (to_step, from_step) == (axes[-1][0] * axes[-1][1], axes[-1][0] * axes[-1][2]):
            axes[-1] = axes[-1][0] * count, *axes[-1][1:]  # this axis continues the one before
        else:
            axes.append((count, to_step, from_step))
    if same and len(axes) == 1:
        yield Run(target.pointer, source.pointer, axes[0][0])
        return
    kinds, widths = (source.dtype.name, target.dtype.name), (target.dtype.itemsize, source.dtype.itemsize)
    if same:  # copy the largest units to which both boxes are aligned
        (run, *_), *others = axes
        unit = math.gcd(16, target.pointer, source.pointer, run, *(step for _, *by in others for step in by))
        axes = [(count, to_step // unit, from_step // unit) for count, to_step, from_step in others]
        axes = [(run // unit, 1, 1)] * (run > unit) + axes
        kinds, widths = (_UNITS[unit],) * 2, (unit,) * 2
    yield from _kernel_launches(target.pointer, source.pointer, axes, kinds, widths, device)


def _kernel_launches(
    target: int, source: int, axes: Sequence[tuple[int, int, int]], kinds: tuple[str, str], widths: tuple[int, int],
    device: int,
) -> Iterator[Launch]:  # fmt: skip
    """The launches of the kernel.  If the box has more than ``_AXES`` axes, there is a launch for each outer index."""
    if len(axes) > _AXES:
        count, *by = axes[-1]
        for index in range(count):
            places = target + index * by[0] * widths[0], source + index * by[1] * widths[1]
            yield from _kernel_launches(*places, axes[:-1], kinds, widths, device)
        return
    count, padded = math.prod(n for n, *_ in axes), [*axes, *[(1, 0, 0)] * (_AXES - len(axes))]
    sizes, to_steps, from_steps = zip(*padded, strict=True)
    kernel = load_kernel(_COPY_BOX, "copy_box", device, FROM=kinds[0], TO=kinds[1], AXES=max(1, len(axes)))
    blocks = min(-(-count // _THREADS), _MOST_BLOCKS)
    yield kernel.bind(blocks, _THREADS, target, source, count, *sizes[:3], *to_steps, *from_steps)


class Copier:
    """Copies to, from and between GPUs on a stream of its own.  One thread may use it at a time.  Raises CudaError."""

    def __init__(self, device: int) -> None:
        self.device, self.deadline, self._pinned = device, math.inf, np.empty(0, np.uint8)
        self.uses: Any = None
        """Memory of the queued copies, which is kept alive until ``wait`` has seen their end."""
        with self._relaxed():
            self._stream = streams.create_stream(device)
            load_kernel(_COPY_RUNS, "copy_runs", device)  # a later load would wait for the kernels that run then

    @contextmanager
    def _relaxed(self) -> Iterator[None]:
        """A context in which the GPU is current, and in which CUDA calls do not disturb captures of other threads."""
        with driver.on_device(self.device), relaxed_capture():
            yield

    def follow(self, stream: int) -> None:
        """Order the next copies behind the work that is queued on ``stream``."""
        with self._relaxed():
            streams.order(stream, self._stream, self.device)

    def queue(self, copies: Sequence[Launch]) -> None:
        """Queue the results of ``launches``."""
        handle = streams.handle(self._stream)
        with self._relaxed():
            for each in copies:
                each(handle)

    def wait(self) -> None:
        """Wait on the host until all queued copies are complete.  Raises TransferTimeout after ``deadline``."""
        handle, queries = streams.handle(self._stream), 0
        with self._relaxed():
            while not streams.is_idle(handle):
                if time.monotonic() > self.deadline:
                    expected = "expected the end of the queued work before the deadline"
                    raise TransferTimeout(f"cuda:{self.device}: {expected}, got none")
                if (queries := queries + 1) > _SPINS:
                    time.sleep(_POLL_SECONDS)
        self.uses = None

    def copy(self, target: Box, source: Box) -> None:
        """Queue a copy between two boxes in memory that the GPU can access."""
        self.queue([*launches(target, source, self.device)])

    def copy_all(self, pairs: Iterable[tuple[Box, Box]], prepared: dict[K, list[Launch]], key: K) -> None:
        """Queue copies between boxes (target, source).

        ``prepared`` stores the launches under ``key``, and later calls use them again.
        """
        if key not in prepared:
            with self._relaxed():
                found = [launch for pair in pairs for launch in launches(*pair, self.device)]
                runs = [each for each in found if isinstance(each, Run)]
                others = [each for each in found if not isinstance(each, Run)]
                prepared[key] = [*others, *([Runs(runs, self.device, self._stream)] if runs else [])]
        self.queue(prepared[key])

    def scratch(self, nbytes: int) -> np.ndarray:
        """Pinned memory, which the next call of ``scratch`` uses again."""
        if self._pinned.size < nbytes:
            with self._relaxed():
                self._pinned = pinned_empty(max(nbytes, PIECE), np.uint8, self.device)
        return self._pinned[:nbytes]

    def put(self, target: Box, source: np.ndarray) -> None:
        """Copy a host array to a box, and wait for the copy.  The array may be in ``scratch`` memory."""
        if not np.may_share_memory(source, self._pinned):
            staged = self.scratch(source.nbytes).view(source.dtype).reshape(source.shape)
            np.copyto(staged, source)
            source = staged
        self.copy(target, whole(source))
        self.wait()

    def get(self, boxes: Sequence[tuple[Box, DType]]) -> list[np.ndarray]:
        """Copy boxes to the host, each converted to the dtype beside it.  The results are in ``scratch`` memory."""
        sizes = [math.prod(each.size) * dtype.itemsize for each, dtype in boxes]
        ends = [*accumulate((aligned(nbytes) for nbytes in sizes), initial=0)]
        memory = self.scratch(ends[-1])
        found = list[np.ndarray]()
        for (each, dtype), start, nbytes in zip(boxes, ends, sizes, strict=False):
            found.append(memory[start : start + nbytes].view(dtype.numpy).reshape(each.size))
            self.copy(whole(found[-1]), each)
        self.wait()
        return found

    def pieces(self, array: Array) -> Iterator[np.ndarray]:
        """Copy a flattened array to the host in pieces.  A piece is valid until the next one is yielded."""
        step = PIECE // array.dtype.itemsize
        for start in range(0, array.size, step):
            size = (min(step, array.size - start),)
            yield from self.get([(box(array, start, size, (1,)), array.dtype)])


class Copiers(dict[int, Copier]):
    """The copiers of a thread by their GPU."""

    def of(self, device: int, deadline: float = math.inf) -> Copier:
        """The copier of a GPU.  The first call makes it."""
        if device not in self:
            self[device] = Copier(device)
        self[device].deadline = deadline
        return self[device]

    def wait(self, deadline: float) -> None:
        """Wait for all queued copies.  Raises TransferTimeout."""
        for device in self:
            self.of(device, deadline).wait()
