"""Tracing of launches, on request of the environment: NVTX ranges, and durations on the GPU in the flight recorder.

KOS_NVTX=1: a range of NVTX around the launch of every operation, for Nsight Systems.
KOS_RECORDER_TIMING=1: entries of the recorder have ``duration_ms`` for operations on a GPU, by events around them.

Both replace methods of a backend when its communicator is made.  Without them nothing is executed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from importlib import import_module
from typing import Any

from kos.comm.backend import Backend
from kos.comm.operation import Call
from kos.comm.recorder import Recorder
from kos.comm.work import Work
from kos.cuda import driver
from kos.cuda.streams import Event, capture_of
from kos.errors import BackendUnavailable, KosError, install


def trace(backend: Backend, recorder: Recorder) -> None:
    """Trace the launches of ``backend`` as the environment requests.

    Raises BackendUnavailable for KOS_NVTX without the package nvtx.
    """
    if _requested("KOS_RECORDER_TIMING"):
        for part in backend.parts:
            if part.device is not None:
                _time(part, recorder)
    if _requested("KOS_NVTX"):
        _mark(backend)


def _requested(name: str) -> bool:
    return os.environ.get(name, "0") not in ("", "0")


def _mark(backend: Any) -> None:
    """Put a range of NVTX around each launch."""
    try:
        nvtx = import_module("nvtx")
    except ImportError as error:
        raise BackendUnavailable(f"KOS_NVTX: expected the package nvtx ({install('nvtx')}), got: {error}") from error
    start, start_all = backend.start, backend.start_all

    def start_marked(call: Call) -> Work[Any] | None:
        with nvtx.annotate(f"{call.group}: {call.name}{call.operation}", domain="kos"):
            return start(call)

    def start_all_marked(calls: Sequence[Call], overlap: bool) -> list[Work[Any]]:
        with nvtx.annotate(f"{calls[0].group}: batch of {len(calls)}", domain="kos"):
            return start_all(calls, overlap)

    backend.start, backend.start_all = start_marked, start_all_marked


def _time(part: Any, recorder: Recorder) -> None:
    """Record events around each operation on the GPU of ``part``; the calls of a batch have the batch's duration."""
    start, start_all, queue = part.start, part.start_all, part.queue
    overlaps = False

    @contextmanager
    def measured(calls: Sequence[Call], stream: int) -> Iterator[None]:
        if capture_of(stream):  # it runs when the graph is replayed
            yield
            return
        with driver.on_device(part.device):
            begin, end = Event(part.device, timed=True), Event(part.device, timed=True)
            begin.record(stream)
            yield
            end.record(stream)

        def milliseconds() -> float | None:
            with suppress(KosError), driver.on_device(part.device):
                return 1e3 * end.seconds_since(begin) if end.done() else None
            return None  # the GPU has failed

        for each in calls:
            if each.record is not None and each.stream == calls[0].stream:
                recorder.durations[id(each.record)] = each.record[1], milliseconds

    @contextmanager
    def beside() -> Iterator[None]:
        """The block calls ``queue`` on the communicator's own stream, after the work that it waits for."""
        nonlocal overlaps
        overlaps = True
        try:
            yield
        finally:
            overlaps = False

    def start_timed(call: Call) -> Work[Any] | None:
        assert call.route is not None
        with beside() if call.route.overlap else measured((call,), call.stream):
            return start(call)

    def start_all_timed(calls: Sequence[Call], overlap: bool) -> list[Work[Any]]:
        with beside() if overlap else measured(calls, calls[0].stream):
            return start_all(calls, overlap)

    def queue_timed(calls: Sequence[Call], stream: int | None) -> None:
        with measured(calls, stream) if overlaps and stream is not None else nullcontext():
            queue(calls, stream)

    part.start, part.start_all, part.queue = start_timed, start_all_timed, queue_timed
