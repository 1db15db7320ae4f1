"""Tracing of launches, on request of the environment: NVTX ranges, and durations on the GPU in the flight recorder.

KOS_NVTX=1: a range of NVTX around the launch of every operation, for Nsight Systems.
KOS_RECORDER_TIMING=1: entries of the recorder have ``duration_ms`` for operations on a GPU, by events around them.

Both replace methods of a backend when its communicator is made.  Without them nothing is executed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any, TypeVar

from kos.comm.backend import Backend
from kos.comm.operation import Call
from kos.comm.recorder import Recorder
from kos.comm.work import Work
from kos.cuda import driver
from kos.cuda.streams import Event, capture_of
from kos.errors import BackendUnavailable, KosError, install

T = TypeVar("T")


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

    def within(text: str, launch: Callable[[], T]) -> T:
        nvtx.push_range(message=text, domain="kos")
        try:
            return launch()
        finally:
            nvtx.pop_range(domain="kos")

    def start_marked(call: Call) -> Work[Any] | None:
        return within(f"{call.group}: {call.name}{call.operation}", lambda: start(call))

    def start_all_marked(calls: Sequence[Call], overlap: bool) -> list[Work[Any]]:
        return within(f"{calls[0].group}: batch of {len(calls)}", lambda: start_all(calls, overlap))

    backend.start, backend.start_all = start_marked, start_all_marked


def _time(part: Any, recorder: Recorder) -> None:
    """Record events around each operation on the GPU of ``part``; the calls of a batch have the batch's duration."""
    start, start_all, queue = part.start, part.start_all, part.queue
    overlaps = False

    def measured(calls: Sequence[Call], stream: int, launch: Callable[[], T]) -> T:
        if capture_of(stream):  # it runs when the graph is replayed
            return launch()
        with driver.on_device(part.device):
            begin, end = Event(part.device, timed=True), Event(part.device, timed=True)
            begin.record(stream)
            result = launch()
            end.record(stream)

        def milliseconds() -> float | None:
            with suppress(KosError), driver.on_device(part.device):
                return 1e3 * end.seconds_since(begin) if end.done() else None
            return None  # the GPU has failed

        for each in calls:
            if each.record is not None and each.stream == calls[0].stream:
                recorder.durations[id(each.record)] = each.record[1], milliseconds
        return result

    def beside(launch: Callable[[], T]) -> T:
        """``launch``, which calls ``queue`` on the communicator's own stream, behind what it waits for."""
        nonlocal overlaps
        overlaps = True
        try:
            return launch()
        finally:
            overlaps = False

    def start_timed(call: Call) -> Work[Any] | None:
        launch: Callable[[], Work[Any] | None] = lambda: start(call)  # noqa: E731
        return beside(launch) if call.route.overlap else measured((call,), call.stream, launch)  # type: ignore[union-attr]

    def start_all_timed(calls: Sequence[Call], overlap: bool) -> list[Work[Any]]:
        launch: Callable[[], list[Work[Any]]] = lambda: start_all(calls, overlap)  # noqa: E731
        return beside(launch) if overlap else measured(calls, calls[0].stream, launch)

    def queue_timed(calls: Sequence[Call], stream: int | None) -> None:
        if overlaps and stream is not None:
            measured(calls, stream, lambda: queue(calls, stream))
        else:
            queue(calls, stream)

    part.start, part.start_all, part.queue = start_timed, start_all_timed, queue_timed
