"""Collectives by copy engines, between symmetric buffers: they move larger packets than kernels, and leave the
multiprocessors free for other kernels.

At each step all ranks copy from (or to) the rank at the same distance, so that no link is used twice.  The barriers are
kernels: they wait with a deadline, and order the copies of all ranks.  Copies behind a barrier that ended early still
run: their results are undefined, as after any failure.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from kos.comm.gpu.memory import Scratch
from kos.comm.tuning import KernelConfig
from kos.cuda import create_stream, driver, streams
from kos.cuda.driver import call, cu, relaxed_capture
from kos.cuda.kernels import resolved
from kos.cuda.streams import Event, capture_of
from kos.memory.windows import Run

OVERLAPPED = KernelConfig("copies", blocks=32)
"""The launch for overlap: few blocks, which find free multiprocessors soon."""
OVERLAPPED_REDUCE_SCATTER = KernelConfig("copies", blocks=96)
"""The same for a reduce-scatter.  It adds once, and more blocks end sooner."""
_BLOCKS = 132


class Copies:
    """The streams of one rank's copies, and their staging memory."""

    def __init__(self, rank: int, size: int, device: int) -> None:
        self._rank, self._size, self._device = rank, size, device
        self._others = [(rank + k) % size for k in range(1, size)]
        self._streams: list[Any] = []
        self._staging: list[Scratch] = []  # graphs may use an older one

    def all_reduce(
        self, kernel: Any, barrier: Run, launch: KernelConfig, itemsize: int, count: int,
        inputs: Sequence[int], outputs: Sequence[int],
    ) -> Run:  # fmt: skip
        """``inputs[r]`` and ``outputs[r]`` are rank r's buffers of ``count`` elements, as this rank sees them.

        Copy engines pull and push, and ``kernel`` adds a piece while the next one is pulled.  Pulls and pushes share
        one stream because they are slower at the same time.
        """
        rank, size = self._rank, self._size
        chunk = -(-count // size // 128) * 128
        begin, end = min(rank * chunk, count), min((rank + 1) * chunk, count)
        step = -(-chunk // launch.pieces // 128) * 128
        cuts = [(at * itemsize, (min(at + step, end) - at) * itemsize) for at in range(begin, end, step)]
        stride = step * itemsize
        start = self._staging_memory(min(launch.pieces, 2) * size * stride)
        staging = [start + half * size * stride for half in range(2)]
        events, others = [Event(self._device) for _ in range(2 * len(cuts) + 2)], self._others
        add = partial(kernel.bind, launch.blocks or _BLOCKS, launch.threads, rank)
        sums = [
            add(inputs[rank] + at, staging[i % 2], stride, outputs[rank] + at, nbytes // itemsize)
            for i, (at, nbytes) in enumerate(cuts)
        ]

        def pull(i: int, copy: int) -> None:
            at, nbytes = cuts[i]
            for peer in others:
                call(cu.cuMemcpyDtoDAsync, staging[i % 2] + peer * stride, inputs[peer] + at, nbytes, copy)

        def push(i: int, copy: int) -> None:
            at, nbytes = cuts[i]
            for peer in others:
                call(cu.cuMemcpyDtoDAsync, outputs[peer] + at, outputs[rank] + at, nbytes, copy)

        def run(stream: Any, *arrays: int) -> None:
            main = streams.handle(stream)
            copy = self._second_stream(main)
            barrier(stream)
            events[-1].order(main, copy)
            for i in range(len(cuts) + 1):
                if i < len(cuts):
                    pull(i, copy)
                    events[2 * i].order(copy, main)
                    sums[i](stream)
                    events[2 * i + 1].record(main)
                if i > 0:
                    events[2 * i - 1].hold(copy)
                    push(i - 1, copy)
            events[-2].order(copy, main)
            barrier(stream)

        return partial(run_on_device, self._device, run)

    def reduce_scatter(
        self, kernel: Any, barrier: Run, launch: KernelConfig, itemsize: int, count: int, inputs: Sequence[int],
        recv: Any,
    ) -> Run:  # fmt: skip
        """``inputs[r]`` is rank r's buffer of ``count`` elements for each rank, as this rank sees it.

        The sum goes to ``recv``, which may be this rank's shard of its own input."""
        rank, nbytes = self._rank, count * itemsize
        stride = -(-nbytes // 128) * 128
        staging, own = self._staging_memory(self._size * stride), inputs[rank] + rank * nbytes
        add = kernel.bind(launch.blocks or _BLOCKS, launch.threads, rank, own, staging, stride, recv, count)

        def run(stream: Any, *arrays: int) -> None:
            barrier(stream)
            for peer in self._others:
                source = inputs[peer] + rank * nbytes
                call(cu.cuMemcpyDtoDAsync, staging + peer * stride, source, nbytes, streams.handle(stream))
            add(stream, *arrays)
            barrier(stream)

        return partial(run_on_device, self._device, run)

    def move(self, barrier: Run, nbytes: int, places: Sequence[tuple[int, Any]]) -> Run:
        """Copy ``nbytes`` to each rank r.  ``places[r]``: pointers of target and source, as this rank sees them.

        This rank's copy to itself runs beside the others on a second stream, unless its target is its source.
        """
        rank, events = self._rank, (Event(self._device), Event(self._device))
        own = [] if places[rank][0] == places[rank][1] else [places[rank]]
        pushes = [places[peer] for peer in self._others]

        def run(stream: Any, *arrays: int) -> None:
            main = streams.handle(stream)
            if own:
                copy = self._second_stream(main)
                events[0].order(main, copy)
                call(cu.cuMemcpyDtoDAsync, own[0][0], resolved(own[0][1], arrays), nbytes, copy)
            barrier(stream)
            for target, source in pushes:
                call(cu.cuMemcpyDtoDAsync, target, resolved(source, arrays), nbytes, main)
            if own:
                events[1].order(copy, main)
            barrier(stream)

        return partial(run_on_device, self._device, run)

    def _second_stream(self, main: int) -> int:
        """Handle of a stream for copies that run beside ``main``; the stream is not part of another capture."""
        capture = capture_of(main)
        for stream in self._streams:
            if capture_of(handle := streams.handle(stream)) in (0, capture):
                return handle
        with relaxed_capture():
            self._streams.append(create_stream(self._device))
        return streams.handle(self._streams[-1])

    def _staging_memory(self, nbytes: int) -> int:
        if not self._staging or self._staging[-1].nbytes < nbytes:
            self._staging.append(Scratch(nbytes, self._device))
        return self._staging[-1].pointer

    def close(self) -> None:
        while self._staging:
            self._staging.pop().close()


def run_on_device(device: int, run: Run, stream: Any, *arrays: int) -> None:
    """Run with ``device`` current.  Unlike kernels, copies need a current device on any stream."""
    with driver.on_device(device):
        run(stream, *arrays)
