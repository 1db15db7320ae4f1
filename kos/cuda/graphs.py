"""CUDA graphs: record the work queued on a stream once, then replay it with a single launch.

with capture(stream, keep=[x, y]) as graph:
    kernel(stream, grid, block, x.pointer, y.pointer)
graph.replay(stream)
"""

from __future__ import annotations

import ctypes
import functools
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

    CUDA graphs hold bare addresses.  Memory that they use must outlive them: pass its owner to ``keep``.  ``Graph`` of
    cuda.core cannot replace this class: it does not accept stream handles, and raises errors of a private class.
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
        """Free the graph and drop its operands; waits for replays still running."""
        if self._executable is not None:
            driver.synchronize(self.device)
        self.__del__()
        self.operands.clear()

    def __del__(self) -> None:
        # No wait here: the collector may run during a capture. The driver frees a running graph when it ends.
        executable, self._executable = self._executable, None
        if executable is not None and not sys.is_finalizing():
            with driver.relaxed_capture():
                cu.cuGraphExecDestroy(executable)


@contextmanager
def capture(stream: Any, *, keep: Iterable[Any] = ()) -> Iterator[Graph]:
    """Record the work queued on ``stream`` in a ``with`` block as a Graph, without running it.

    Only calls of this thread are recorded, so other ranks in this process may continue.  An exception in the block
    ends the capture and is re-raised.  The garbage collector is disabled during a capture: it might free memory of a
    library that does not support captures.
    """
    handle = streams.handle(stream)
    if handle == streams.LEGACY:
        raise InvalidArgument("capture: expected a stream of its own, got the legacy default stream")
    device = int(call(cu.cuCtxGetDevice))  # before the capture: raises where CUDA cannot be used
    with _no_collection():
        call(cu.cuStreamBeginCapture, handle, cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
        try:
            graph = Graph(device)
            graph.keep(stream, *keep)
            yield graph
        except BaseException:
            status, recorded = cu.cuStreamEndCapture(handle)
            if not status:
                call(cu.cuGraphDestroy, recorded)
            raise
        recorded = call(cu.cuStreamEndCapture, handle)
    try:
        # Each node keeps the priority of its stream: a collective's few blocks go before those of matrix products.
        flag = cu.CUgraphInstantiate_flags.CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY
        graph._executable = call(cu.cuGraphInstantiate, recorded, int(flag))
    finally:
        call(cu.cuGraphDestroy, recorded)


@contextmanager
def _no_collection() -> Iterator[None]:
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


class CapturedGraph:
    """A graph that a stream is capturing, in whatever library, and the executable graphs made from it.

    ``alive()`` is true until all of them are destroyed and their replays have ended.  The driver reports that on a
    thread of its own, by a call to C's ``sem_post``: Python code could not run there.
    """

    def __init__(self, graph: Any) -> None:
        self._semaphore = ctypes.create_string_buffer(_SEMAPHORE_BYTES)
        library = _c_library()
        library.sem_init(self._semaphore, 0, 0)
        post = ctypes.cast(library.sem_post, ctypes.c_void_p).value
        once = cu.CUuserObject_flags.CU_USER_OBJECT_NO_DESTRUCTOR_SYNC
        report = call(cu.cuUserObjectCreate, ctypes.addressof(self._semaphore), post, 1, int(once))
        moved = cu.CUuserObjectRetain_flags.CU_GRAPH_USER_OBJECT_MOVE
        call(cu.cuGraphRetainUserObject, graph, report, 1, int(moved))

    def alive(self) -> bool:
        value = ctypes.c_int()
        _c_library().sem_getvalue(self._semaphore, ctypes.byref(value))
        return value.value == 0


_SEMAPHORE_BYTES = 64  # a sem_t takes 32 on 64-bit Linux
_captured: dict[int, CapturedGraph] = {}
"""Live graphs by the driver's number of their capture; the driver holds the addresses of their semaphores."""


@functools.cache
def _c_library() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def kernel_blocks(stream: Any) -> int:
    """Thread blocks of the largest kernel in the graph that ``stream`` is capturing, in whatever library; or 0."""
    graph = call(cu.cuStreamGetCaptureInfo, streams.handle(stream))[2]
    _, count = call(cu.cuGraphGetNodes, graph)
    nodes, _ = call(cu.cuGraphGetNodes, graph, count)
    kernel = cu.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL
    kernels = (each for each in nodes if call(cu.cuGraphNodeGetType, each) == kernel)
    launches = (call(cu.cuGraphKernelNodeGetParams, each) for each in kernels)
    return max((int(each.gridDimX * each.gridDimY * each.gridDimZ) for each in launches), default=0)


def captured_graph(stream: int) -> CapturedGraph | None:
    """The graph that ``stream``, which is not the legacy default stream, is capturing, or None."""
    status, capture, graph, *_ = call(cu.cuStreamGetCaptureInfo, stream)
    if status != cu.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE:
        return None
    number = int(capture)
    if number not in _captured:
        for former in [each for each, one in list(_captured.items()) if not one.alive()]:
            _captured.pop(former, None)  # another thread may have removed it
        _captured[number] = CapturedGraph(graph)
    return _captured[number]
