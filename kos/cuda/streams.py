"""Streams and events: handles, order between streams, timing.

``stream=None`` means the legacy default stream.  Other frameworks use it by default too, so work is ordered with
theirs.  Graph capture needs a stream of its own.
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
PER_THREAD = 2
"""Handle of the per-thread default stream.  Both default streams are streams of the current device."""


def create_stream(device: int, *, urgent: bool = False) -> Stream:
    """A new non-blocking stream on ``device``; an ``urgent`` one has high priority."""
    driver.require()
    from cuda.core import Device, StreamOptions

    with driver.on_device(device):
        owner = Device(device)
        owner.set_current()  # cuda.core needs its own call, once on each thread
        return owner.create_stream(options=StreamOptions(nonblocking=True, priority=-1 if urgent else 0))


def as_stream(stream: Any) -> Stream:
    """``None``, an integer handle, or any object with ``__cuda_stream__`` (torch's, CuPy's) as a Stream."""
    driver.require()
    from cuda.core import LEGACY_DEFAULT_STREAM, Stream

    if isinstance(stream, Stream):
        return stream
    return LEGACY_DEFAULT_STREAM if stream is None else Stream.from_handle(handle(stream))


def handle(stream: Any) -> int:
    """The driver's handle of ``stream``: 1 for the legacy default stream."""
    if stream is None:
        return LEGACY
    if isinstance(stream, int) and not isinstance(stream, bool) and stream >= 0:
        return stream or LEGACY
    if not hasattr(stream, "__cuda_stream__"):
        raise InvalidArgument(f"stream: expected a handle, or an object with __cuda_stream__, got {stream!r}")
    return int(stream.__cuda_stream__()[1]) or LEGACY


def owner(stream: Any) -> Any:
    """The object that keeps ``stream`` alive; its handle if none is known; None for the legacy stream.

    An external stream of torch or CuPy belongs to another library, which may destroy it.
    """
    number = handle(stream)
    if number == LEGACY:
        return None
    external = type(stream).__name__ == "ExternalStream" or getattr(stream, "stream_id", None) == number
    return number if external or isinstance(stream, int) else stream


def is_captured(stream: int) -> bool:
    """Whether what is queued on the stream of this handle goes into a graph.  Errors are left to the launch."""
    return stream > LEGACY and bool(cu.cuStreamIsCapturing(stream)[1])


def capture_of(stream: int) -> int:
    """The number of the capture that records the stream of this handle; 0 if there is none."""
    if stream <= LEGACY or not int(call(cu.cuStreamIsCapturing, stream)):
        return 0
    return int(call(cu.cuStreamGetCaptureInfo, stream)[1])


def order(before: Any, after: Any, device: int) -> None:
    """Make ``after`` wait, on the device, for the work queued on ``before`` now."""
    if handle(before) != handle(after):
        with driver.on_device(device):
            Event(device).order(before, after)


def is_idle(stream: int) -> bool:
    """Whether everything queued on the stream of this handle has run."""
    (status,) = cu.cuStreamQuery(stream)
    return is_over("cuStreamQuery", status)


def is_over(query: str, status: Any) -> bool:
    """Whether a query of a stream or an event found its work done."""
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
    """Milliseconds of the work that ``run`` queues on ``stream`` of the current device; waits for it."""
    begin, end = (Event(int(call(cu.cuCtxGetDevice)), timed=True) for _ in range(2))
    begin.record(stream)
    run()
    end.record(stream)
    end.synchronize()
    return 1e3 * end.seconds_since(begin)


class Event:
    """A CUDA event, which the host or another stream can wait for; ``timed`` ones measure time.

    ``Event`` of cuda.core cannot replace this class.  It is recorded on a ``Stream`` of cuda.core, but kos often has
    only the handle of a stream.  ``Stream.from_handle`` is slow, because it defines a new class in every call.
    """

    _handle: Any = None

    def __init__(self, device: int, *, timed: bool = False) -> None:
        with driver.on_device(device):
            self._handle = call(cu.cuEventCreate, 0 if timed else cu.CUevent_flags.CU_EVENT_DISABLE_TIMING)
        self._destroy = cu.cuEventDestroy  # of the driver that made it

    def record(self, stream: Any) -> None:
        """Record the event behind the work queued on ``stream`` now."""
        call(cu.cuEventRecord, self._handle, handle(stream))

    def hold(self, stream: Any) -> None:
        """Make work queued on ``stream`` from now on wait for the event."""
        call(cu.cuStreamWaitEvent, handle(stream), self._handle, 0)

    def order(self, before: Any, after: Any) -> None:
        """Make work queued on ``after`` from now on wait for the work queued on ``before`` now."""
        self.record(before)
        self.hold(after)

    def done(self) -> bool:
        """Whether the device has passed the event (or it was never recorded)."""
        (status,) = cu.cuEventQuery(self._handle)
        return is_over("cuEventQuery", status)

    def seconds_since(self, before: Event) -> float:
        """Seconds from ``before`` to this event; the device has passed both, and both are ``timed``."""
        return 1e-3 * float(call(cu.cuEventElapsedTime, before._handle, self._handle))

    def synchronize(self) -> None:
        """Wait for the event on the host."""
        call(cu.cuEventSynchronize, self._handle)

    def __del__(self) -> None:
        if self._handle is not None and not sys.is_finalizing():
            self._destroy(self._handle)
