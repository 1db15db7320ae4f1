"""Streams: whatever names a CUDA stream becomes a ``cuda.core.Stream``.

Where kos takes ``stream=None`` it means the legacy default stream, which other frameworks use when
nothing else is said, so that work is ordered with theirs.  Graph capture needs a stream of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kos.cuda import driver
from kos.cuda.driver import call, cu
from kos.errors import InvalidArgument

if TYPE_CHECKING:
    from cuda.core import Stream

LEGACY = 1
"""Handle of the legacy default stream (CU_STREAM_LEGACY), as in DLPack and ``__cuda_array_interface__``."""


def create_stream(device: int, *, urgent: bool = False) -> Stream:
    """A new non-blocking stream on ``device``; blocks of an ``urgent`` one's kernels begin before those of others."""
    driver.require()
    from cuda.core import Device, StreamOptions

    with driver.on_device(device):
        owner = Device(device)
        owner.set_current()  # cuda.core wants it said by itself, once on each thread
        return owner.create_stream(options=StreamOptions(nonblocking=True, priority=-1 if urgent else 0))


def as_stream(stream: Any) -> Stream:
    """``None``, an integer handle, or any object with ``__cuda_stream__`` (torch's, CuPy's) as a Stream."""
    driver.require()
    from cuda.core import LEGACY_DEFAULT_STREAM, Stream

    if isinstance(stream, Stream):
        return stream
    if stream is None:
        return LEGACY_DEFAULT_STREAM
    return Stream.from_handle(handle(stream))


def handle(stream: Any) -> int:
    """The driver's handle of ``stream``: 1 for the legacy default stream."""
    if stream is None:
        return LEGACY
    if isinstance(stream, int) and not isinstance(stream, bool) and stream >= 0:
        return stream or LEGACY
    if not hasattr(stream, "__cuda_stream__"):
        raise InvalidArgument(f"stream: expected a handle, or an object with __cuda_stream__, got {stream!r}")
    return int(stream.__cuda_stream__()[1]) or LEGACY


def keeper(stream: Any) -> Any:
    """The object that keeps ``stream`` alive; its handle where nothing is known to; None for the legacy stream.

    A stream that torch or CuPy calls external belongs to another library, which may destroy it.
    """
    number = handle(stream)
    if number == LEGACY:
        return None
    external = type(stream).__name__ == "ExternalStream" or getattr(stream, "stream_id", None) == number
    return number if external or isinstance(stream, int) else stream


def capture_of(stream: int) -> int:
    """The number of the capture that takes what is queued on the stream of this handle; 0 where it runs."""
    if stream <= LEGACY or not int(call(cu.cuStreamIsCapturing, stream)):
        return 0
    return int(call(cu.cuStreamGetCaptureInfo, stream)[1])


def order(before: Any, after: Any, device: int) -> None:
    """Let ``after`` wait, on the device, for what is queued on ``before`` now."""
    if handle(before) != handle(after):
        with driver.on_device(device):
            event = Event(device)
            event.record(before)
            event.hold(after)


def is_idle(stream: int) -> bool:
    """Whether everything queued on the stream of this handle has run."""
    (status,) = cu.cuStreamQuery(stream)
    return is_over("cuStreamQuery", status)


def is_over(query: str, status: Any) -> bool:
    """What a query of a stream or an event found."""
    if status == cu.CUresult.CUDA_ERROR_NOT_READY:
        return False
    if status:
        raise driver.error_of(query, status)
    return True


def synchronize(stream: Any, device: int) -> None:
    """Wait on the host until everything queued on ``stream`` has run."""
    with driver.on_device(device):
        call(cu.cuStreamSynchronize, handle(stream))


def milliseconds(run: Callable[[], object], stream: Any) -> float:
    """How long the current device takes for the work that ``run`` queues on ``stream``; waits for it."""
    device = int(call(cu.cuCtxGetDevice))
    begin, end = Event(device, timed=True), Event(device, timed=True)
    begin.record(stream)
    run()
    end.record(stream)
    end.synchronize()
    return 1e3 * end.seconds_since(begin)


class Event:
    """A mark in the order of a stream, which the host or another stream can wait for; ``timed``: it knows when."""

    _handle: Any = None

    def __init__(self, device: int, *, timed: bool = False) -> None:
        with driver.on_device(device):
            self._handle = call(cu.cuEventCreate, 0 if timed else cu.CUevent_flags.CU_EVENT_DISABLE_TIMING)
        self._destroy = cu.cuEventDestroy  # of the driver that made it

    def record(self, stream: Any) -> None:
        """Stand behind what is queued on ``stream`` now."""
        call(cu.cuEventRecord, self._handle, handle(stream))

    def hold(self, stream: Any) -> None:
        """Let what is queued on ``stream`` from now on come after it."""
        call(cu.cuStreamWaitEvent, handle(stream), self._handle, 0)

    def done(self) -> bool:
        """Whether the device has passed it (or it was never recorded)."""
        (status,) = cu.cuEventQuery(self._handle)
        return is_over("cuEventQuery", status)

    def seconds_since(self, before: Event) -> float:
        """From ``before`` to this on the device, which has passed both; both are ``timed``."""
        return 1e-3 * float(call(cu.cuEventElapsedTime, before._handle, self._handle))

    def synchronize(self) -> None:
        """Wait for it on the host."""
        call(cu.cuEventSynchronize, self._handle)

    def __del__(self) -> None:
        if self._handle is not None and not sys.is_finalizing():
            self._destroy(self._handle)
