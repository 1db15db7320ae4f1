"""Tracing of launches, on request of the environment: NVTX ranges, and durations on the GPU in the flight recorder.

KOS_NVTX=1: a range of NVTX around the launch of every operation, for Nsight Systems.
KOS_RECORDER_TIMING=1: entries of the recorder have ``duration_ms`` for operations on a GPU, by events around them.

``Operations._start_work`` and ``Communicator._start_all`` launch within the context that ``tracing`` makes, if any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from importlib import import_module
from typing import Any

from kos.comm.recorder import Recorder
from kos.comm.work import Work
from kos.cuda import driver
from kos.cuda.streams import Event, capture_of
from kos.environment import KOS_NVTX, KOS_RECORDER_TIMING
from kos.errors import BackendUnavailable, KosError, install, is_on

Tracer = Callable[[Sequence[Work[Any]], bool, bool], AbstractContextManager[Any]]
"""A ``with`` block around the launch of Works; whether they are a batch, and whether with ``async_op``."""


def tracing(recorder: Recorder, on_gpu: bool) -> Tracer | None:
    """The tracer of the launches of a communicator that the environment requests; None if it requests none.

    Raises BackendUnavailable for KOS_NVTX without the package nvtx, and InvalidArgument for values other than 0 and 1.
    """
    tracers: list[Tracer] = []
    if is_on(KOS_NVTX):
        tracers.append(_ranges())
    if is_on(KOS_RECORDER_TIMING) and on_gpu:
        tracers.append(partial(_timed, recorder))
    if not tracers:
        return None

    @contextmanager
    def trace(works: Sequence[Work[Any]], batch: bool, overlap: bool) -> Iterator[None]:
        with ExitStack() as stack:
            for tracer in tracers:
                stack.enter_context(tracer(works, batch, overlap))
            yield

    return trace


def _ranges() -> Tracer:
    """Puts a range of NVTX around each launch."""
    try:
        nvtx = import_module("nvtx")
    except ImportError as error:
        raise BackendUnavailable(f"KOS_NVTX: expected the package nvtx ({install('nvtx')}), got: {error}") from error

    def marked(works: Sequence[Work[Any]], batch: bool, _: bool) -> AbstractContextManager[Any]:
        first = works[0]
        text = f"batch of {len(works)}" if batch else f"{first.name}{first.arguments}"
        annotated: AbstractContextManager[Any] = nvtx.annotate(f"{first.group}: {text}", domain="kos")
        return annotated

    return marked


@contextmanager
def _timed(recorder: Recorder, launched: Sequence[Work[Any]], _: bool, overlap: bool) -> Iterator[None]:
    """Record events around the operations on a GPU; the calls of a batch have the batch's duration."""
    works = [work for work in launched if work.backend.device is not None]
    streams = {work.stream for work in works}
    if not works or any(map(capture_of, streams)):  # a captured operation runs when the graph is replayed
        yield
        return
    part = works[0].backend
    stream = part.side if overlap else works[0].stream
    with driver.on_device(part.device):
        begin, end = Event(part.device, timed=True), Event(part.device, timed=True)
        for waited in streams if overlap else ():  # what an overlapped operation waits for does not count
            begin.order(waited, stream)
        begin.record(stream)
        yield
        end.record(stream)

    def milliseconds() -> float | None:
        with suppress(KosError), driver.on_device(part.device):
            return 1e3 * end.seconds_since(begin) if end.done() else None
        return None  # the GPU has failed

    for each in works:
        if each.record is not None and (overlap or each.stream == stream):
            recorder.durations[id(each.record)] = each.record[1], milliseconds
