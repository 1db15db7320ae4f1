"""Ctrl-C at every point of a call that starts or waits: the communicator stays usable.

A receive has the message in its array, or the next receive gets it; any other call stays in flight.
"""

import gc
import os
import queue
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from types import CodeType, FrameType
from typing import Any

import numpy as np
import pytest

import kos
from kos.comm import interrupts
from kos.comm.control.env import env_rendezvous
from kos.comm.control.thread_rendezvous import ThreadGroup, ThreadRendezvous
from kos.comm.work import Engine
from kos.errors import InvalidArgument
from tests.comm.ranks import SIZE, TIMEOUT
from tests.comm.tcp_ranks import both_ranks, environment, free_port, run_processes
from tests.core.core_ranks import needs_core

_KOS = f"{os.sep}kos{os.sep}comm{os.sep}"
WAITS = 4  # how often a line has run when the other rank begins: the call waits then


@pytest.fixture(autouse=True)
def _interrupts():
    """SIGINT raises KeyboardInterrupt, also where this process has inherited that it is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.collect()
    gc.disable()  # a finalizer of an earlier test's garbage would swallow the interrupt
    yield
    gc.enable()
    signal.signal(signal.SIGINT, before)


class Interrupt:
    """Sends SIGINT once in each call, at the first line of it that no earlier call has reached.

    ``begin`` lets the other rank begin the operation: at the interrupt, or when this rank has waited for a while.
    """

    def __init__(self) -> None:
        self._reached = set[tuple[CodeType, int]]()

    def __call__(self, call: Callable[[], Any], begin: Callable[[], None]) -> bool:
        """Make the call; returns whether it was interrupted."""
        lines, begun, sent = Counter[tuple[CodeType, int]](), False, False

        def trace(frame: FrameType, event: str, _: object) -> Any:
            nonlocal begun, sent
            if event == "line" and _KOS in frame.f_code.co_filename:
                line = frame.f_code, frame.f_lineno
                lines[line] += 1
                new = not sent and line not in self._reached
                if not begun and (new or lines[line] == WAITS):
                    begun = True
                    begin()
                if new:
                    sent = True
                    self._reached.add(line)
                    signal.raise_signal(signal.SIGINT)
            return trace

        interrupted = False
        sys.settrace(trace)
        try:
            call()
        except KeyboardInterrupt:
            interrupted = True
        finally:
            sys.settrace(None)
        assert interrupted == sent, "an interrupt was lost"
        if not begun:
            begin()
        return interrupted


def _all_reduce(comm: kos.Communicator) -> tuple[Any, Callable[[], Any]]:
    x = np.ones(5)
    return x, lambda: comm.all_reduce(x)


def _receive(comm: kos.Communicator, of: Callable[[kos.Communicator, Any], Any]) -> tuple[Any, Callable[[], Any]]:
    """Rank 0 makes the call ``of``, which receives from rank 1."""
    x = np.full(5, 2 * comm.rank, np.uint8)
    return x, lambda: comm.send(x, dst=0) if comm.rank else of(comm, x)


def _send(comm: kos.Communicator) -> tuple[Any, Callable[[], Any]]:
    x = np.full(1 << 19, 0.0 if comm.rank else 2.0)
    return x, lambda: comm.recv(x, src=0) if comm.rank else comm.send(x, dst=1)


def _wait(comm: kos.Communicator) -> tuple[Any, Callable[[], Any]]:
    x = np.ones(5)
    return x, lambda: comm.all_reduce(x, async_op=True).wait()


def _poll(comm: kos.Communicator) -> tuple[Any, Callable[[], Any]]:
    x = np.ones(5)

    def call() -> None:
        work = comm.all_reduce(x, async_op=True)
        while not work.done():
            pass

    return x, call


CALLS: dict[str, Callable[[kos.Communicator], tuple[Any, Callable[[], Any]]]] = {
    "all_reduce": _all_reduce,
    "recv": partial(_receive, of=lambda comm, x: comm.recv(x, src=1)),
    "recv from any": partial(_receive, of=lambda comm, x: comm.recv(x)),
    "recv_async": partial(_receive, of=lambda comm, x: comm.recv(x, src=1, async_op=True).wait()),
    "probe": partial(_receive, of=lambda comm, x: comm.probe(src=1)),  # the message is received after the call
    "send": _send, "wait": _wait, "poll": _poll,
}  # fmt: skip


def _interrupt_all(comm: kos.Communicator, name: str, begin: Callable[[bool], None]) -> int:
    """Rank 0: interrupts calls until no line is left; returns how many.  ``begin(False)``: there is no call left."""
    interrupt, count, interrupted = Interrupt(), 0, True
    while interrupted:
        x, call = CALLS[name](comm)
        before = comm.recorder.count
        interrupted = interrupt(call, lambda: begin(True))
        assert comm.failure is None, comm.failure
        if name == "recv_async":
            comm.synchronize()  # a Work that was returned stays in flight
        if comm.recorder.count == before or (name.startswith("recv") and not x.any()):
            call()  # it was interrupted before it began, or was withdrawn
        if name == "probe":
            comm.recv(x, src=1)
        _check(comm, x)
        count += 1
    begin(False)
    return count


def _take_part(comm: kos.Communicator, name: str, order: Callable[[], bool]) -> None:
    """The other ranks: a call for each of rank 0, which ``order`` awaits."""
    while order():
        x, call = CALLS[name](comm)
        call()
        _check(comm, x)


def _check(comm: kos.Communicator, x: Any) -> None:
    comm.synchronize()
    np.testing.assert_array_equal(x, 2)
    comm.barrier()


def _places(backend: str) -> list[Callable[[], Any]]:
    if backend == "mock":
        group = ThreadGroup(2)
        return [lambda rank=rank: ThreadRendezvous(group, rank, TIMEOUT) for rank in range(2)]
    port = free_port()
    return [lambda rank=rank: env_rendezvous(TIMEOUT, environment(rank, 2, port)) for rank in range(2)]


OF_TRANSPORTS = ("all_reduce", "recv", "recv from any", "probe", "send")
"""The calls whose code depends on the transport; that of a ``Work`` is the same on all transports."""


@pytest.mark.parametrize(("backend", "name"), [
    *(("tcp", name) for name in CALLS),
    *((backend, name) for backend in ("mock", "tcp apart") for name in OF_TRANSPORTS if name != "recv from any"),
])  # fmt: skip
def test_ctrl_c_at_any_line_of_a_call(backend, name, request):
    backend, _, apart = backend.partition(" ")
    if apart:
        request.getfixturevalue("apart")
    places, orders, errors = _places(backend), queue.SimpleQueue[bool](), list[BaseException]()

    def second():
        try:
            with kos.init(backend, rendezvous=places[1](), timeout=TIMEOUT) as comm:
                _take_part(comm, name, lambda: orders.get(timeout=TIMEOUT))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=second, daemon=True)
    thread.start()
    with kos.init(backend, rendezvous=places[0](), timeout=TIMEOUT) as comm:
        count = _interrupt_all(comm, name, orders.put)
    thread.join(TIMEOUT)
    assert not thread.is_alive() and not errors, errors
    assert count > 20


@pytest.mark.mpi
@pytest.mark.skipif(SIZE not in (None, "2"), reason="only two ranks take part")
@pytest.mark.parametrize("name", OF_TRANSPORTS)
def test_ctrl_c_on_mpi(memory, ranks_of_mpi, name):
    from mpi4py import MPI

    def body(comm):
        orders = MPI.COMM_WORLD.Dup()  # which kos does not use
        if comm.rank > 0:
            _take_part(comm, name, lambda: orders.recv(source=0))
        else:
            assert _interrupt_all(comm, name, lambda more: orders.send(more, 1)) > 20
        orders.Free()

    ranks_of_mpi.run(body)


@pytest.mark.parametrize(("source", "raised"), [(None, KeyboardInterrupt), (1, ZeroDivisionError)])
def test_a_wait_for_bytes_that_ctrl_c_ends_takes_none(before_call, source, raised):
    """Whatever the program's handler of SIGINT raises.  Otherwise the message and its sender would be lost."""

    def handler(*_):
        raise raised

    signal.signal(signal.SIGINT, handler)
    armed = list[Callable[[], None]]()
    before_call(Engine, "poll", lambda engine: armed and armed.pop()())
    with both_ranks() as (one, other):
        armed.append(lambda: signal.raise_signal(signal.SIGINT))
        with pytest.raises(raised):
            one.recv_bytes(source)
        other.send_bytes(b"later", 0)
        assert not armed and one.recv_bytes(timeout=5) == (b"later", 1)


@pytest.mark.parametrize("raised", [ValueError, InvalidArgument, TimeoutError])
def test_what_the_handler_of_another_signal_raises_ends_a_call(raised, monkeypatch):
    """``signal.signal`` runs the handlers of pending signals before it installs a new handler."""
    install = interrupts.signal

    def interrupted(*arguments):
        signal.raise_signal(signal.SIGALRM)
        return install(*arguments)

    def handler(*_):
        raise raised("of the program")

    before = signal.signal(signal.SIGALRM, handler)
    try:
        with kos.init(timeout=TIMEOUT) as comm:
            x = np.ones(3)
            comm.all_reduce(x)
            with monkeypatch.context() as patch:
                patch.setattr(interrupts, "signal", interrupted)
                with pytest.raises(raised, match="of the program"):
                    comm.all_reduce(np.ones(4))
            assert (comm.all_reduce(x) == 1).all()
    finally:
        signal.signal(signal.SIGALRM, before)


@needs_core
def test_a_receive_that_ctrl_c_ends_before_it_is_returned():
    """The interrupt comes while the first call of its kind is cached for later calls of the core."""
    text = """import numpy as np, pytest, kos
from kos.comm.host.shared.node import Node
keep, armed = Node.describe, []
def interrupted(*args):
    if armed:
        raise armed.pop()
    return keep(*args)
Node.describe = interrupted
with kos.init(timeout=60) as comm:
    lost, x = np.zeros(4), np.zeros(4)
    if comm.rank:
        comm.barrier()
        comm.send(np.ones(4), 0)
    else:
        armed.append(KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            comm.recv(lost, 1, async_op=True)
        comm.barrier()
        assert not armed and comm.recv(x, 1)[0].all() and not lost.any()
"""
    assert run_processes(text, 2) == [(0, "")] * 2
