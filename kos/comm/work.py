"""Work: one start of a Prepared.  Engine: advances all operations of a rank together."""

from __future__ import annotations

import ctypes
import math
import threading
import time
from collections.abc import Callable, Collection, Generator, Iterator
from contextlib import contextmanager
from os.path import dirname, sep
from sys import _getframe
from time import time_ns
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

from kos._core import native
from kos.comm.arguments import check_timeout
from kos.comm.operation import CORE_OPERATIONS, Operation
from kos.comm.progress import ProgressThread, completed, watch
from kos.comm.recorder import COMPLETED, ERROR, LAST_SLOT, SEQUENCE, call_site
from kos.comm.waits import wait
from kos.errors import CollectiveError, KosError, by_handler

T = TypeVar("T")
_REPORT_EVERY = 0.02  # seconds of waiting after which a rank posts the ranks that it waits for

LONG_WAIT, LONG_SLEEP = 10.0, 0.005
"""After ``LONG_WAIT`` seconds of waiting for a rank that has not begun, polls are ``LONG_SLEEP`` seconds apart."""

Steps = Generator[None, None, None]


class Engine:
    """All operations in flight of one rank, across a communicator and its splits.

    Every poll advances every operation, so that waiting for one while others are outstanding cannot deadlock.
    """

    def __init__(self) -> None:
        self.active: list[Work[Any]] = []
        self.unreported: list[Work[Any]] = []  # failed messages whose error was not raised yet
        self.lock = threading.RLock()  # held while operations advance
        self.thread: ProgressThread | None = None
        self.wake: Callable[[], None] = lambda: None  # wakes the rank's waits; see ``Backend.waiter``

    def begin(self, work: Work[Any], steps: Steps) -> None:
        """Run the first of ``steps``, which carry ``work``: messages that need no waiting are posted on return."""
        with self.lock:
            work.steps = steps
            self.active.append(work)  # before its first step: if a signal's handler raises, the abort ends the work
            if work.advance():
                self.remove_active(work)
            else:
                work.record_end(0)
                if (thread := self.thread) is not None:
                    thread.wake()

    def poll(self) -> bool:
        """Advance every operation without waiting; whether some are still in flight."""
        with self.lock:
            for work in list(self.active):
                if work.advance():
                    self.remove_active(work)
            return bool(self.active)

    def remove_active(self, work: Work[Any]) -> None:
        """Remove a Work that is over, unless the core has done so.  The caller holds the lock."""
        if work in self.active:
            self.active.remove(work)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the progress thread, if there is one: the caller polls itself, or changes resources of operations."""
        token, thread = object(), self.thread  # a local: another thread of the program may close it
        try:
            if thread is not None:
                with self.lock:
                    thread.paused.add(token)
            yield
        finally:
            if thread is not None:
                with self.lock:
                    thread.paused.discard(token)
                    if self.active:
                        thread.wake()

    def remove(self, work: Work[Any]) -> None:
        """Remove an operation that was cancelled, or whose failure was raised."""
        with self.lock:
            for works in (self.active, self.unreported):
                if work in works:
                    works.remove(work)

    def expire(self, seconds: float) -> bool:
        """Fail all operations in flight by a timeout of ``seconds``; whether there were any."""
        with self.lock:
            works = self.outstanding()
            for work in works:
                work.expire(seconds)
            return bool(works)

    def disown(self) -> None:
        """Fail all operations in flight in a forked process.  They continue in the process of the rank."""
        self.lock, self.thread = threading.RLock(), None  # another thread of the rank may hold the lock
        for work in self.active:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(work._steps))  # never freed, which would cancel messages
            work._error = CollectiveError(forked_from(work.backend.rank), call=work)
            work._steps = None
        self.active.clear()

    def works_of(self, backends: Collection[Any]) -> list[Work[Any]]:
        """The operations of ``backends`` that the program has not waited for: failed messages, then those in flight."""
        with self.lock:
            return [work for work in [*self.unreported, *self.active] if work.backend in backends]

    def outstanding(self) -> list[Work[Any]]:
        """The operations in flight, in the order of their launch."""
        with self.lock:
            return list(self.active)


def forked_from(rank: int) -> str:
    """Why a process that a rank has forked cannot communicate."""
    return f"this process was forked from rank {rank}; a forked process is not a rank"


_Base: Any = type("State", (), {}) if native is None else native.State
"""The base of Work.  With the core, it is a C struct, so that calls that run no Python code can make Works."""


class _Documented(type):
    """Has ``help`` and ``dir`` list only the public names of a class; private names of the core have no underscore."""

    def __dir__(cls) -> list[str]:
        return ["add_done_callback", "done", "result", "synchronize", "wait"]


class Work(_Base, Generic[T], metaclass=_Documented):
    """An operation in flight, which a call with ``async_op=True`` returns.

    Its methods raise what the operation raises: InvalidArgument, CollectiveMismatch, CollectiveTimeout, RankLost, or
    CollectiveError for other errors of the backend.
    """

    if TYPE_CHECKING or native is None:  # else fields of the base
        sequence = -1  # the number of the call: of a collective, equal on all ranks; messages have their own
        record: list[Any] | None = None  # the call's entry in the flight recorder
        convert: Callable[[Any], Any] | None = None  # turns ``array``, which holds the result, into what a call returns
        reported = False  # whether ``wait`` or ``done`` has returned or raised the outcome
        core_work: Any = None  # the part that the compiled core has begun
        steps: Steps | None = None  # None: complete, queued or not started, or only the core has advanced it
        _error: KosError | None = None

        def __init__(self, prepared: Any, send: Any = None, recv: Any = None, array: Any = None) -> None:
            self.prepared, self.array, self.send, self.recv = prepared, array, send, recv  # 1-D, or addresses on a GPU

    stream: int = 0  # on a GPU, the handle of the stream of the arrays
    stream_owner: Any = None  # the object that keeps that stream alive
    held: Any = None
    """The array that is read, which must live until the GPU has done so."""
    residual: Any = None
    """The array for the error feedback of a compressed reduction; in host memory it is 1-D."""
    polled_at: float | None = None
    """Monotonic time of the first ``done`` that found it in flight."""
    _report_at: float | None = None  # when ``done`` next posts the ranks that it waits for

    def unstarted_copy(self) -> Work[T]:
        """A Work of the same call on the same arrays, which is not started."""
        work: Work[T] = type(self)(self.prepared, self.send, self.recv, self.array)
        work.stream, work.stream_owner, work.convert = self.stream, self.stream_owner, self.convert
        work.held, work.residual = self.held, self.residual
        return work

    def __str__(self) -> str:
        return f"{self.group}: {self.text}" if self.group else self.text

    def __repr__(self) -> str:
        return f"<Work {self}: {self.state}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"the Work of {self} cannot be copied or pickled: wait for it")

    @property
    def _steps(self) -> Steps | None:
        """The steps that remain; None if the operation is complete, queued or not started."""
        if self.steps is None and (left := self.core_work) is not None:
            steps = self.backend.steps_of(self, left)
            if self.core_work is left:  # else another thread that waits for it has completed it meanwhile
                self.steps = steps
        return self.steps

    @_steps.setter
    def _steps(self, steps: Steps | None) -> None:
        self.steps = steps
        if steps is None:
            self.core_work = None

    @property
    def operation(self) -> Operation:
        """The request, without memory."""
        operation: Operation = self.prepared.operation
        return operation

    @property
    def name(self) -> str:
        """The operation's name, such as "all_reduce"."""
        name: str = self.prepared.name
        return name

    @property
    def collective(self) -> bool:
        """Whether all ranks take part; False for messages."""
        collective: bool = self.prepared.collective
        return collective

    @property
    def backend(self) -> Any:
        """The HostBackend or GPUBackend that runs it."""
        return self.prepared.backend

    @property
    def group(self) -> str:
        """The name of the communicator."""
        group = self.prepared.description[0]
        return "" if group is None else str(group.name)

    @property
    def text(self) -> str:
        """``all_reduce #5 of float32[4] by SUM``: the text without the communicator."""
        return f"{self.name} #{self.sequence}{self.arguments}"

    @property
    def arguments(self) -> str:
        """`` of float32[4], root 1 of the group``: what follows the number."""
        text: str = self.prepared.arguments
        return text

    def fingerprint(self) -> dict[str, Any]:
        """All properties of the call that must be equal on all ranks."""
        values: dict[str, Any] = self.prepared.values
        return values

    @property
    def state(self) -> str:
        """``in flight``, ``complete``, or ``failed`` with the error's class.  Does not poll."""
        if self._steps is not None:
            return "in flight"
        return "complete" if self._error is None else f"failed: {type(self._error).__name__}"

    def advance(self) -> bool:
        """Run until the operation has to wait (False) or is over (True).  ``wait`` raises its errors."""
        steps = self.steps or self._steps
        if steps is None:
            return True
        if getattr(steps, "gi_running", False):  # Python code that a step of it runs makes another call
            return False
        try:
            next(steps)
            return False
        except StopIteration:
            self._steps = None
        except BaseException as error:
            if not isinstance(error, Exception) or by_handler(error):
                self._steps = raising(CollectiveError(f"interrupted by {type(error).__name__}", call=self))
                self.backend.failures.cut_short()
                raise
            self._fail(error)
            if self.backend.failures.first is None:
                self.backend.engine.unreported.append(self)
            return True
        self.record_end(time_ns())
        return True

    def done(self) -> bool:
        """Whether the operation is complete; makes progress without waiting.

        Raises if it failed; CollectiveTimeout if its timeout has passed since the first call of ``done``.
        """
        try:
            if self._steps is not None:
                self._poll()
            if self._steps is not None:
                return False
            if self._report_at is not None:
                self.backend.failures.show_wait(None)
                self._report_at = None
            self.reported = True
            if self._error is not None:
                self._raise(self._error)
            return True
        except BaseException as error:
            self._interrupted(error)
            raise

    def _interrupted(self, error: BaseException) -> None:
        """Abort the communicator if the handler of a signal raised ``error`` in a method of this Work."""
        if (comm := self.backend.failures.owner()) is not None:
            purpose, is_core = self.operation.options.purpose, self.operation.name in CORE_OPERATIONS
            comm._interrupted(purpose if purpose and is_core else self.name, error)

    def _poll(self) -> None:
        self.backend.engine.poll()
        now = self.check_timeout()
        if self._steps is not None and now > (self._report_at or (self.polled_at or now) + _REPORT_EVERY):
            with self.backend.engine.lock:
                self.backend.failures.show_wait(self.backend.late(self))  # a program that polls waits
            self._report_at = now + _REPORT_EVERY

    def check_timeout(self) -> float:
        """Expire if the timeout has passed since the first check; returns the time."""
        now, timeout = time.monotonic(), self.operation.options.timeout
        began = self.polled_at = self.polled_at or now
        if self._steps is not None and timeout is not None and now - began > timeout:
            self.expire(timeout)
        return now

    def add_done_callback(self, call: Callable[[Work[T]], object]) -> None:
        """Have ``call(work)`` made once the operation is complete or has failed.

        A thread of kos makes the call, which is the same for all Works of the process.  It also advances the operation,
        and ends it at its timeout.  ``call`` should return soon.  Its exceptions are logged.  Raises BackendUnavailable
        for an MPI without THREAD_MULTIPLE, as ``await`` does.

            work.add_done_callback(lambda work: inbox.put(work.wait()))
        """
        watch(self, call)

    def __await__(self) -> Generator[Any, None, T]:
        """Wait in asyncio without blocking its loop; returns what ``wait`` returns.

        One thread watches all awaited Works.  If the task is cancelled, the operation goes on.

            data, src = await comm.recv_bytes(async_op=True)
        """
        if not completed([self]):
            from asyncio import get_running_loop

            loop = get_running_loop()
            over = loop.create_future()

            def end() -> None:
                if not over.done():  # else the task was cancelled
                    over.set_result(None)

            watch(self, lambda _: loop.is_closed() or loop.call_soon_threadsafe(end))
            yield from over
        return self.wait()

    def wait(self, timeout: float | None = None) -> T:
        """Wait for the operation; returns its output array (None where this rank has none).

        ``timeout`` is in seconds from this call; None is the operation's own.  A timeout ends the operation: later
        waits raise the same error.  A receive in host memory is then withdrawn, and its array does not change any more.
        Raises CollectiveTimeout, CollectiveMismatch, RankLost, or CollectiveError for other errors of the backend;
        InvalidArgument for a timeout that is not positive.
        """
        try:
            if timeout is not None:
                timeout = check_timeout(timeout)
            if self._steps is not None:
                self._wait(self.operation.options.timeout if timeout is None else timeout)
            self.reported = True
            if self._error is not None:
                self._raise(self._error)
            return self.result
        except BaseException as error:
            self._interrupted(error)
            raise

    def synchronize(self, timeout: float | None = None) -> T:
        """Wait on the host, where ``wait`` without a timeout may only order work on a GPU."""
        return self.wait(timeout)

    @property
    def result(self) -> T:
        """The output array, whose contents are valid once the operation is done."""
        result: T = self.array if self.convert is None else self.convert(self.array)
        return result

    def refuse(self) -> NoReturn:
        """Raise the first failure of its communicator in this call, which is recorded already."""
        try:
            self.backend.failures.refuse(self.name)
        except KosError as error:
            self.record_failure(error)
            raise
        raise AssertionError(f"{self}: refused without a reason")

    def cancel(self, error: KosError) -> None:
        """End the operation; ``wait`` raises ``error``."""
        with self.backend.engine.lock:
            self.backend.engine.remove(self)
            if self._steps is not None:
                self._steps.close()
                if self.core_work is not None:  # its steps had not begun
                    self.core_work.cancel()
                self._fail(error)
                self.backend.engine.wake()  # another thread may wait for it

    def expire(self, seconds: float | None) -> None:
        """End the operation because its timeout of ``seconds`` has passed: ``wait`` raises CollectiveTimeout."""
        with self.backend.engine.lock:
            self.cancel(self.backend.failures.timeout_error(self.backend.late(self), self, seconds))

    def _raise(self, error: KosError) -> NoReturn:
        self.backend.engine.remove(self)
        raise error

    def _wait(self, timeout: float | None) -> None:
        backend, began = self.backend, time.monotonic()
        waiter, engine = backend.waiter(), backend.engine
        reported = sleeps = False

        def is_over() -> bool:
            if sleeps:
                time.sleep(LONG_SLEEP)
            engine.poll()
            return self._steps is None

        def report() -> bool:
            nonlocal reported, sleeps
            reported = True
            with engine.lock:
                backend.failures.show_wait(backend.late(self))
                # It does not sleep while another operation is in flight, which only polls advance.
                alone = time.monotonic() - began > LONG_WAIT and engine.outstanding() == [self]
                sleeps = alone and backend.may_sleep(self)
            return False

        with engine.paused():
            try:
                deadline = math.inf if timeout is None else began + timeout
                if not wait(is_over, deadline, report, waiter, _REPORT_EVERY):
                    self.expire(timeout)
            finally:
                if reported:
                    backend.failures.show_wait(None)

    def _fail(self, error: Exception) -> None:
        self._error = self.backend.to_error(self, error)
        self._steps = None  # after the error: the program may look while the progress thread is here
        self.record_failure(self._error)

    # Entries of the flight recorder.  A later call may have overwritten the slot.

    @property
    def _is_recorded(self) -> bool:
        record = self.record
        return record is not None and record[0] is self.prepared.description and record[SEQUENCE] == self.sequence

    def record_end(self, when: int) -> None:
        """Record when the call was complete, in nanoseconds since 1970; 0: it is in progress, and has to wait."""
        if self._is_recorded:
            self.record[COMPLETED] = when  # type: ignore[index]

    def record_failure(self, error: Exception) -> None:
        """Record that the call failed with ``error``; dumps if dumps are enabled."""
        record = self.record
        if record is None:
            return
        mine = self._is_recorded
        if not mine or record[ERROR] is None:
            if mine:
                record[COMPLETED], record[ERROR] = time_ns(), f"{type(error).__name__}: {error}"
            self.prepared.description[0].recorder.fail(error)

    @property
    def call_site(self) -> str:
        """``file:line`` of the launch."""
        return call_site(*self.record[2:4]) if self._is_recorded else "an unknown line"  # type: ignore[index]


if not TYPE_CHECKING and native is not None:
    Work._wait_in_python, Work.wait = Work.wait, native.State.wait


def record_start(comm: Any, work: Work[Any]) -> None:
    """Number ``work`` and record its launch.  Its call site is the innermost frame outside ``kos.comm``."""
    prepared = work.prepared
    work.sequence = sequence = next(comm._collectives if prepared.collective else comm._messages)
    try:
        frame = _getframe(3)  # in most calls, that of the program
    except ValueError:  # called from C
        frame = _getframe(2)
    while frame.f_code.co_filename.startswith(_HERE) and frame.f_back is not None:
        frame = frame.f_back
    recorder = comm.recorder
    count = recorder.counter[0]
    work.record = record = recorder.slots[count & LAST_SLOT]  # a new list would be one more cache miss
    record[:] = prepared.description, time_ns(), frame.f_code, frame.f_lasti, sequence, None, None
    recorder.counter[0] = count + 1


_HERE = dirname(__file__) + sep  # as code objects have it


def raising(error: BaseException) -> Steps:
    """Steps that fail: ``Work.wait`` raises the error."""
    raise error
    yield
