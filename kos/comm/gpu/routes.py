"""How calls of one signature run on a GPU, and those of a group of one rank on any backend."""

from __future__ import annotations

from functools import partial

from kos.comm.operation import AUTO, Operation
from kos.comm.reduction import ReduceOp
from kos.cuda import driver, streams
from kos.cuda.driver import call, cu
from kos.memory.windows import InWindows, Run, in_windows

Route = tuple[Run, str | None, bool]
"""How a backend for GPUs runs calls of one signature: what queues one; the kernel, if it depends on more than the
arguments and must be the same on all ranks; whether later calls may use it."""


def nothing(stream: int, send: int = 0, recv: int = 0) -> None:
    """The launch of an operation that moves no elements."""


def alone(o: Operation, device: int) -> Route | None:
    """In a group of one: a copy, or nothing.  None for an operation with a factor or a chosen algorithm: it runs as
    in other groups."""
    send, recv, reduction = o.send, o.recv, o.reduction
    if (reduction is not None and reduction.op is ReduceOp.PREMUL_SUM) or o.options.algorithm != AUTO:
        return None
    if send is None or recv is None or send is recv:
        return partial(_copy, device, 0), None, True
    return in_windows(partial(_copy, device, recv.nbytes), [send.pointer, recv.pointer]), None, True


def _copy(device: int, nbytes: int, stream: int, send: int, recv: int) -> None:
    if send == recv or not nbytes:
        return
    if stream > streams.PER_THREAD and cu.cuMemcpyDtoDAsync(recv, send, nbytes, stream) == (0,):
        return  # on the stream's device; the call fails if the thread has no current device
    with driver.on_device(device):
        call(cu.cuMemcpyDtoDAsync, recv, send, nbytes, stream)


def is_copy(route: Run) -> bool:
    """Whether calls of ``route``, in a group of one, only copy or do nothing."""
    return getattr(route.launch if isinstance(route, InWindows) else route, "func", None) is _copy
