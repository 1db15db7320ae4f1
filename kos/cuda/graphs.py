"""CUDA graphs: record what is queued on a stream once, then replay it with a single launch.

with capture(stream, keep=[x, y]) as graph:
    kernel(stream, grid, block, x.pointer, y.pointer)
graph.replay(stream)
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from kos.cuda import driver, streams
from kos.cuda.driver import call, cu
from kos.errors import InvalidArgument


class Graph:
    """A captured sequence of device work and the operands it reads and writes.

    CUDA's graphs hold bare addresses: what they touch must outlive them, so it is handed to ``keep``.
    """

    def __init__(self, device: int) -> None:
        self.device = device
        self.operands: list[Any] = []
        self._executable: Any = None

    def keep(self, *operands: Any) -> None:
        """Keep ``operands`` alive as long as this graph."""
        self.operands.extend(operands)

    def replay(self, stream: Any) -> None:
        """Queue the whole graph on ``stream``; the device must be current on this thread."""
        if self._executable is None:
            raise InvalidArgument("graph: expected a captured graph, got one that is unfinished or closed")
        call(cu.cuGraphLaunch, self._executable, streams.handle(stream))

    def close(self) -> None:
        """Free the graph and let its operands go; waits for replays still running."""
        if self._executable is not None:
            driver.synchronize(self.device)
        self.__del__()
        self.operands.clear()

    def __del__(self) -> None:
        # No wait here: the collector may run during a capture. The driver frees a running graph when it ends.
        executable, self._executable = self._executable, None
        if executable is not None and not sys.is_finalizing():
            with relaxed_capture():
                cu.cuGraphExecDestroy(executable)


@contextmanager
def capture(stream: Any, *, keep: Iterable[Any] = ()) -> Iterator[Graph]:
    """Record the work queued on ``stream`` in a ``with`` block as a Graph, without running it.

    Only calls of this thread are recorded, so other ranks in this process may work on.  An exception
    in the block ends the capture and is raised as it is.  Garbage is not collected meanwhile: what it frees may
    belong to libraries that know nothing of captures.
    """
    handle = streams.handle(stream)
    if handle == streams.LEGACY:
        raise InvalidArgument("capture: expected a stream of its own, got the legacy default stream")
    collects = gc.isenabled()
    gc.disable()
    try:
        call(cu.cuStreamBeginCapture, handle, cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
    except BaseException:
        if collects:
            gc.enable()
        raise
    try:
        graph = Graph(int(call(cu.cuCtxGetDevice)))
        graph.keep(stream, *keep)
        yield graph
    except BaseException:
        status, recorded = cu.cuStreamEndCapture(handle)
        if not status:
            call(cu.cuGraphDestroy, recorded)
        raise
    else:
        recorded = call(cu.cuStreamEndCapture, handle)
    finally:
        if collects:
            gc.enable()
    try:
        graph._executable = call(cu.cuGraphInstantiate, recorded, 0)
    finally:
        call(cu.cuGraphDestroy, recorded)


@contextmanager
def relaxed_capture() -> Iterator[None]:
    """Allow what a thread that captures a graph must not do otherwise: allocate, free, load kernels."""
    former = call(cu.cuThreadExchangeStreamCaptureMode, cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)
    try:
        yield
    finally:
        call(cu.cuThreadExchangeStreamCaptureMode, former)
