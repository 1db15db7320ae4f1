"""Operations in flight as Works of torch: on host memory, on a GPU, and several together."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import kos
from kos.comm.operation import ANY
from kos.interop.torch.tensors import Arrays, Tensor

_C: Any = torch._C
_jit_internal: Any = torch._jit_internal
NONE = timedelta(0)
POLL_SECONDS = 50e-6

_torch_extract_tensors: Any = getattr(_jit_internal, "_extract_tensors", None)


def _extract_tensors(value: Any) -> Any:
    """The tensors in a Future's value: replaces torch's function, which pickles the value to find them (15 us, cold).

    A list of one tensor needs no search.  C++ calls this when a GPU Future completes and when DDP reads its value.
    """
    if type(value) is list and len(value) == 1 and type(value[0]) is Tensor:
        return value
    if isinstance(value, Exception):  # of a Future that failed, where DDP would crash
        raise value
    return _torch_extract_tensors(value)


if getattr(_torch_extract_tensors, "__module__", __name__) != __name__:  # it is torch's
    _jit_internal._extract_tensors = _extract_tensors  # C++ looks it up on first use and caches it


class _Work(dist.Work):
    """What all Works share."""

    __slots__ = ("tensors",)

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self.tensors = list(tensors)

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def synchronize(self) -> None:
        self.wait()

    block_current_stream = synchronize

    def result(self) -> list[Tensor]:
        return self.tensors


class HostWork(_Work):
    """An operation on host memory."""

    def __init__(self, group: Any, works: Sequence[kos.Work[Any]], arrays: Arrays, tensors: Sequence[Tensor]) -> None:
        super().__init__(tensors)
        self._group, self._works, self._arrays = group, works, arrays
        self._failure: Exception | None = None
        self._future: Any = None
        self._settled = False
        self._lock = threading.Lock()

    def wait(self, timeout: timedelta = NONE) -> bool:
        """Wait for the result, at most ``timeout``; 0: the timeout of the operation."""
        if self._failure is None:
            try:
                self._finish(timeout.total_seconds())
            except Exception as error:
                self._failure = self._group.translated(error)
        if self._failure is not None:
            raise self._failure
        return True

    def _finish(self, seconds: float) -> None:
        for work in self._works:
            work.wait(seconds if seconds > 0 else None)
        with self._lock:
            self._arrays.copy()

    def _done(self) -> bool:
        return all(work.done() for work in self._works)

    def is_completed(self) -> bool:
        try:
            return self._failure is not None or (self._done() and self.wait())
        except Exception as error:  # of kos, or of torch's copy of a result
            self._failure = self._failure or self._group.translated(error)
            return True

    def exception(self) -> Exception | None:
        return self._failure

    def source_rank(self) -> int:
        """The rank that sends the message of a receive; -1 while it is not known."""
        work = self._works[0]
        source = work.operation.message.src
        assert source is not None
        return int(work.result[1]) if source == ANY and work.state == "complete" else source

    _source_rank = source_rank

    def get_future(self) -> Any:
        """A Future of the tensors.  It is complete if the operation is; otherwise a thread completes it."""
        with self._lock:
            first = self._future is None
            if first:
                self._future = HostFuture(self)
        if self.is_completed():
            self.settle()
        elif first:
            _futures.add(self)
        return self._future

    def settle(self) -> None:
        """Complete the future, once: the operation is over."""
        with self._lock:
            first, self._settled = not self._settled, True
        if first and self._failure is None:
            self._future.set_result(self.tensors)
        elif first:
            self._future.set_exception(self._failure)


_Future: Any = torch.futures.Future


class HostFuture(_Future):
    """The Future of a HostWork.

    A callback may wait for another one, on the thread that completes them: so a wait completes it itself.
    """

    def __init__(self, work: HostWork) -> None:
        super().__init__()
        self._work = work

    def wait(self) -> Any:
        with contextlib.suppress(RuntimeError):  # which the future raises
            self._work.wait()
        self._work.settle()
        return super().wait()


class _Futures:
    """Completes the futures of operations on host memory, on one thread of the process."""

    def __init__(self) -> None:
        self._pending: list[HostWork] = []
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, work: HostWork) -> None:
        self._pending.append(work)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kos-futures", daemon=True)
            self._thread.start()
        self._wake.set()

    def _run(self) -> None:
        while True:
            self._wake.wait()
            self._wake.clear()
            while self._pending:
                for work in list(self._pending):
                    if work.is_completed():
                        self._pending.remove(work)
                        work.settle()
                time.sleep(POLL_SECONDS)


_futures = _Futures()


class PooledEvent:
    """An event of torch on ``stream``, from the pool ``free``, which gets it back from the last work that holds it."""

    __slots__ = ("_event", "_free", "query", "wait")

    def __init__(self, free: list[Any], stream: Any) -> None:
        event = free.pop() if free else torch.cuda.Event()
        event.record(stream)
        self._event, self._free, self.query, self.wait = event, free, event.query, event.wait

    def __del__(self) -> None:
        if hasattr(self, "_event"):  # it was recorded
            self._free.append(self._event)


class DeviceWork(_Work):
    """An operation on the group's stream of a GPU, ordered after the work queued on ``caller_stream`` at its launch.

    It keeps its tensors alive.  Once ``caller_stream`` has waited for the operation, they can be freed like any tensor
    used on that stream.  Otherwise ``__del__`` calls ``Tensor.record_stream``, after which torch reuses memory later.
    """

    __slots__ = "_caller_stream", "_group", "event"

    def __init__(self, group: Any, tensors: Sequence[Tensor], caller_stream: Any) -> None:
        dist.Work.__init__(self)
        self.tensors, self._group, self._caller_stream = [*tensors], group, caller_stream
        self.event: PooledEvent | None = None

    def __del__(self) -> None:
        if self._caller_stream is not None:
            with _C._DisableTorchDispatch():  # torch.compile may have a FakeTensorMode active
                for tensor in self.tensors:
                    tensor.record_stream(self._group.side)

    def launch(self) -> None:
        """Nothing: it is launched."""

    def recorded(self) -> PooledEvent:
        """An event after the operation, recorded when first needed, or before the next one on the group's stream."""
        group = self._group
        with group.lock:
            if self.event is None:
                self.event = PooledEvent(group.events, group.side)
            return self.event

    def wait(self, timeout: timedelta = NONE) -> bool:
        """Make the current stream wait for the result; with a ``timeout`` the host waits."""
        self.launch()
        self._group.check()
        if timeout > NONE:
            self._group.wait_on_host(self.recorded(), timeout.total_seconds())
        if self._group.follow(self) is self._caller_stream:
            self._caller_stream = None
        return True

    def is_completed(self) -> bool:
        self.launch()
        return self.exception() is not None or bool(self.recorded().query())

    def exception(self) -> Exception | None:
        try:
            self._group.check()
        except RuntimeError as error:
            return error
        return None

    def get_future(self) -> Any:
        """A Future of the tensors that is complete on the stream of the operation; the host does not wait."""
        self.launch()
        future = _C.Future([self._group.device])  # the class that ProcessGroupNCCL returns
        self._group.complete_aside(future, self.tensors)
        return future


class DeviceMessage(DeviceWork):
    """A message between GPUs, which the first wait for any message of its group launches."""

    def __init__(self, group: Any, tensors: Sequence[Tensor], caller_stream: Any, name: str, peer: int) -> None:
        super().__init__(group, tensors, caller_stream)
        self.name, self.peer = name, peer

    def launch(self) -> None:
        if self.event is None:
            self._group.send_all()
            if self.event is None:
                raise dist.DistBackendError(f"kos: {self.name}: not launched, because messages of its group failed")


class CoalescedWork(_Work):
    """The Works of a coalescing context."""

    def __init__(self, works: Sequence[Any]) -> None:
        super().__init__([tensor for work in works for tensor in work.result()])
        self._works = works

    def wait(self, timeout: timedelta = NONE) -> bool:
        for work in self._works:
            work.wait(timeout)
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def exception(self) -> Exception | None:
        return next((failure for work in self._works if (failure := work.exception()) is not None), None)

    def get_future(self) -> Any:
        futures = [work.get_future() for work in self._works]
        return torch.futures.collect_all(futures).then(lambda done: [t for each in done.value() for t in each.value()])
