"""A signal's handler raises within a call: what it raises leaves the call, and the communicator is aborted."""

import ctypes
import gc
import itertools
import linecache
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from types import CodeType, FrameType
from typing import Any

import numpy as np
import pytest

import kos
from kos.comm.control.place import env_rendezvous
from kos.comm.control.threads import ThreadControlPlane, ThreadGroup
from kos.comm.host import tcp_messages
from kos.comm.recorder.on_signal import dump_on_signal
from kos.errors import InvalidArgument, RankLost
from tests.comm.ranks import SIZE, TIMEOUT
from tests.comm.tcp_ranks import both_ranks, environment, free_port, run_processes

_KOS = f"{os.sep}kos{os.sep}comm{os.sep}"
WAITS = 4  # how often a line has run when the other rank begins: the call waits then


def _keeps_locks(code: CodeType, line: int) -> bool:
    return linecache.getline(code.co_filename, line).lstrip().startswith(("try:", "with "))


class Deadline(Exception):
    """What the program's handler raises."""


@pytest.fixture(params=[Deadline])
def alarm(request):
    """A function that interrupts its caller, by a handler that raises the parameter."""

    def handler(*_):
        raise request.param("of the program")

    before = signal.signal(signal.SIGALRM, handler)
    gc.collect()
    gc.disable()  # Python discards what a handler raises in a finalizer
    yield partial(signal.raise_signal, signal.SIGALRM)
    gc.enable()
    signal.signal(signal.SIGALRM, before)


class Interrupt:
    """Calls ``alarm`` once in each call, at the first line of kos that no earlier call has reached.

    Lines with ``try`` or ``with`` are left out: Python runs no handler there, and a tracer that raises keeps locks.
    ``begin`` lets the other rank begin the operation: at the interrupt, or when this rank has waited for a while.
    """

    def __init__(self, alarm: Callable[[], None]) -> None:
        self._alarm, self._reached = alarm, set[tuple[CodeType, int]]()

    def __call__(self, call: Callable[[], Any], begin: Callable[[], None] = lambda: None) -> int | None:
        """Make the call; returns the number of frames of kos at its interrupt, None if no line was left."""
        lines, begun, sent = dict[tuple[CodeType, int], int](), False, False

        def trace(frame: FrameType, event: str, _: object) -> Any:
            nonlocal begun, sent
            if event == "line" and _KOS in frame.f_code.co_filename:
                line = frame.f_code, frame.f_lineno
                lines[line] = lines.get(line, 0) + 1
                new = not sent and line not in self._reached and not _keeps_locks(*line)
                if not begun and (new or lines[line] == WAITS):
                    begun = True
                    begin()
                if new:
                    sent = True
                    self._reached.add(line)
                    self._alarm()
            return trace

        raised: BaseException | None = None
        sys.settrace(trace)
        try:
            call()
        except Deadline as error:
            raised = error
        finally:
            sys.settrace(None)
        assert (raised is not None) == sent, "what the handler raised was lost"
        if not begun:
            begin()
        frames, at = 0, raised and raised.__traceback__
        while at is not None:
            frames, at = frames + (_KOS in at.tb_frame.f_code.co_filename), at.tb_next
        return frames if sent else None


def _receive(comm: kos.Communicator, of: Callable[[kos.Communicator, Any], Any]) -> Any:
    """Rank 0 makes the call ``of``, which receives from rank 1."""
    x = np.zeros(5, np.uint8)
    return comm.send(x, dst=0) if comm.rank else of(comm, x)


def _send(comm: kos.Communicator) -> Any:
    x = np.zeros(1 << 19)
    return comm.recv(x, src=0) if comm.rank else comm.send(x, dst=1)


def _poll(comm: kos.Communicator) -> None:
    work = comm.all_reduce(np.ones(5), async_op=True)
    while not work.done():
        pass


def _batch(comm: kos.Communicator) -> None:
    with comm.batch():
        comm.all_reduce(np.ones(5))
        comm.all_reduce(np.ones(5))


CALLS: dict[str, Callable[[kos.Communicator], Any]] = {
    "all_reduce": lambda comm: comm.all_reduce(np.ones(5)),
    "recv": partial(_receive, of=lambda comm, x: comm.recv(x, src=1)),
    "recv from any": partial(_receive, of=lambda comm, x: comm.recv(x)),
    "probe": partial(_receive, of=lambda comm, x: comm.probe(src=1)),
    "send": _send,
    "wait": lambda comm: comm.all_reduce(np.ones(5), async_op=True).wait(),
    "poll": _poll,
    "batch": _batch,
    "bytes": lambda comm: comm.all_gather_bytes(b"x"),
}


def _interrupt_all(
    world: kos.Communicator, alarm: Callable[[], None], call: Callable[[kos.Communicator], Any],
    begin: Callable[[], None],
) -> int:  # fmt: skip
    """Rank 0: interrupts calls until no line is left; returns how many.  ``begin`` lets the other rank begin one.

    The communicator is aborted, unless the frame that began the call is interrupted: then no other has run.
    """
    interrupt = Interrupt(alarm)
    for count in itertools.count():
        comm = world.duplicate()
        frames = interrupt(partial(call, comm), begin)
        assert world.failure is None
        if frames is None:
            comm.barrier()
            return count
        assert comm.failure is not None or frames == 1
        comm.abort(reason="was interrupted")
    raise AssertionError


def _take_part(world: kos.Communicator, call: Callable[[kos.Communicator], Any], begin: Callable[[], Any]) -> None:
    """The other rank: a call for each of rank 0, once ``begin`` returns."""
    while True:
        comm = world.duplicate()
        begin()
        try:
            call(comm)
            return comm.barrier()
        except RankLost as error:
            lost = error
        assert lost.ranks == (0,) and "was interrupted" in str(lost), lost
        comm.abort()


def _places(backend: str) -> list[Callable[[], Any]]:
    if backend == "mock":
        group = ThreadGroup(2)
        return [lambda rank=rank: ThreadControlPlane(group, rank, TIMEOUT) for rank in range(2)]
    port = free_port()
    return [lambda rank=rank: env_rendezvous(TIMEOUT, environment(rank, 2, port)) for rank in range(2)]


OF_TRANSPORTS = ("all_reduce", "recv")
"""The calls whose code depends on the transport; that of a ``Work`` is the same on all transports."""


@pytest.mark.parametrize(("backend", "name"), [
    *(("tcp", name) for name in CALLS), *((each, name) for each in ("mock", "tcp apart") for name in OF_TRANSPORTS),
])  # fmt: skip
def test_at_any_line_of_a_call(alarm, backend, name, request):
    backend, _, apart = backend.partition(" ")
    if apart:
        request.getfixturevalue("apart")
    places, begins, errors = _places(backend), queue.SimpleQueue[None](), list[BaseException]()

    def second():
        try:
            with kos.init(backend, rendezvous=places[1](), timeout=TIMEOUT) as world:
                _take_part(world, CALLS[name], lambda: begins.get(timeout=TIMEOUT))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=second, daemon=True)
    thread.start()
    with kos.init(backend, rendezvous=places[0](), timeout=TIMEOUT) as world:
        count = _interrupt_all(world, alarm, CALLS[name], lambda: begins.put(None))
    thread.join(TIMEOUT)
    assert not thread.is_alive() and not errors, errors
    assert count > 20


def test_a_group_of_one_goes_on(alarm):
    with kos.init(timeout=TIMEOUT) as comm:
        interrupt, count = Interrupt(alarm), 0
        while interrupt(lambda: CALLS["wait"](comm)) is not None:
            assert comm.failure is None and comm.all_reduce(np.ones(3), op=kos.ReduceOp.MAX).tolist() == [1] * 3
            count += 1
    assert count > 20


OWN = [TimeoutError, ValueError, InvalidArgument, RankLost, SystemExit]
"""Errors that kos itself catches within a call."""


@pytest.mark.parametrize("alarm", OWN, indirect=True)
@pytest.mark.parametrize("within", ["reading", "sending"])
def test_errors_that_kos_catches_leave_the_call_too(alarm, apart, within, before_call, request):
    raised = request.node.callspec.params["alarm"]
    with both_ranks() as (one, other):
        other.send_bytes(b"", 0)
        one.recv_bytes(1)
        armed = [one]
        if within == "reading":
            other.send_bytes(b"later", 0)
        where = (tcp_messages.Link, "progress") if within == "reading" else (tcp_messages, "islice")
        before_call(*where, lambda *_: armed and armed.pop() and alarm())
        with pytest.raises(raised, match="of the program") as caught:
            one.recv_bytes(1) if within == "reading" else one.send_bytes(b"x", 1)
        assert caught.type is raised and not armed
        told = f"rank 0 is gone: (recv_bytes|send_bytes) was interrupted by {raised.__name__}: of the program"
        with pytest.raises(RankLost, match=told):
            other.recv_bytes(0, tag=1)


def _raises(*_: Any) -> None:
    raise Deadline("of the program")


def _forgets(number: int, frame: FrameType | None) -> None:
    del frame
    raise Deadline("of the program")


class _Handler:
    def __call__(self, number: int, frame: FrameType | None) -> None:
        del frame
        raise Deadline("of the program")

    def method(self, number: int, frame: FrameType | None) -> None:
        del frame
        raise Deadline("of the program")


@pytest.mark.parametrize(
    "handler",
    [_forgets, _Handler(), _Handler().method, partial(_forgets), pytest.param(_raises, id="after the recorder")],
)
def test_handlers_of_every_form_abort(handler, apart, before_call, monkeypatch, tmp_path):
    """Also those that do not keep the frame that they interrupt, and that which the recorder's handler calls."""
    monkeypatch.chdir(tmp_path)  # the recorder writes its files there
    before = signal.signal(signal.SIGALRM, handler)
    if handler is _raises:
        dump_on_signal(signal.SIGALRM)
    try:
        with both_ranks() as (one, other):
            armed = [one]
            where = tcp_messages.Link, "progress"
            before_call(*where, lambda *_: armed and armed.pop() and signal.raise_signal(signal.SIGALRM))
            other.send_bytes(b"later", 0)
            with pytest.raises(Deadline):
                one.recv_bytes(1)
            assert one.failure is not None and not armed
            with pytest.raises(RankLost, match="rank 0 is gone: recv_bytes was interrupted by Deadline"):
                other.recv_bytes(0, tag=1)
    finally:
        signal.signal(signal.SIGALRM, before)


def test_errors_that_cause_each_other():
    """``raise ... from`` of errors that were kept; the call that they leave ends."""
    first, second = ValueError("1"), ValueError("2")
    first.__cause__, second.__cause__ = second, first

    class Root:
        def __index__(self):
            raise first

    with kos.init(timeout=TIMEOUT) as comm, pytest.raises(ValueError, match="1"):
        comm.broadcast(np.ones(1), Root())


def test_what_the_program_handles_is_no_interrupt(alarm):
    """It calls kos while it handles what its handler has raised, and that call raises an error of kos."""
    with both_ranks() as (one, other):
        try:
            alarm()
        except Deadline:
            with pytest.raises(InvalidArgument):
                one.send(np.ones(2), 7)
        assert one.failure is None
        other.send(np.ones(2), 0)
        assert one.recv(np.zeros(2), 1)[0] == 1


class _SigAction(ctypes.Structure):
    _fields_ = (
        ("handler", ctypes.c_void_p), ("mask", ctypes.c_ulong * 16), ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )  # fmt: skip


def test_no_call_touches_the_handler_of_sigint():
    """Neither that of Python, nor that of a C library, nor what ``siginterrupt`` has set."""
    libc, now = ctypes.CDLL(None), _SigAction()

    def state() -> tuple[Any, int]:
        libc.sigaction(signal.SIGINT, None, ctypes.byref(now))
        return now.handler, now.flags

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        signal.siginterrupt(signal.SIGINT, False)
        restarts = state()
        with both_ranks() as (one, other):
            for name in ("from Python", "from C"):
                if name == "from C":
                    libc.signal.argtypes = ctypes.c_int, ctypes.c_void_p
                    libc.signal(signal.SIGINT, ctypes.cast(libc.abs, ctypes.c_void_p))
                    restarts = state()
                for _ in range(3):
                    other.send_bytes(b"x", 0)
                    one.recv_bytes(1)
                    work = one.all_reduce(np.ones(3), async_op=True)
                    other.all_reduce(np.ones(3))
                    assert work.wait()[0] == 2 and work.done()
                assert state() == restarts, name
    finally:
        signal.signal(signal.SIGINT, before)


RANDOM = """import random, signal, sys
import numpy as np, kos
from kos.errors import RankLost
KINDS = [type("Deadline", (Exception,), {}), KeyboardInterrupt, TimeoutError, kos.errors.InvalidArgument, SystemExit]
def handler(*_):
    raise kind("mine")
signal.signal(signal.SIGALRM, handler)
sigint, seed = signal.getsignal(signal.SIGINT), SEED
def make(comm, rng):
    x, peer, name = np.ones(rng.choice((3, 3000, 200000))), 1 - comm.rank, rng.randrange(7)
    if name < 2:
        comm.all_reduce(x, async_op=True).wait() if name else comm.all_reduce(x)
    elif name == 2:
        comm.send_recv(x, np.zeros_like(x), peer, peer)
    elif name == 3:
        comm.all_gather_bytes(b"x" * rng.choice((1, 1000)))
    elif name == 4:
        for n in range(3):
            comm.all_reduce(x[n:])
    elif name == 5:
        with comm.batch():
            comm.all_reduce(x)
            comm.send(x.copy(), peer)
            comm.recv(np.zeros_like(x), peer)
    else:
        comm.send_bytes(b"1", peer) if comm.rank == 0 else comm.recv_bytes()
        comm.send_bytes(b"1", peer) if comm.rank == 1 else comm.recv_bytes()
rng, inside = random.Random(seed), 0
with kos.init(timeout=60) as world:
    for _ in range(ROUNDS):
        comm, calls, raised = world.duplicate(), random.Random(rng.random()), None
        kind, seconds = rng.choice(KINDS), 10 ** rng.uniform(-5, -2.3)
        try:
            if comm.rank == 0:
                signal.setitimer(signal.ITIMER_REAL, seconds)
            while True:
                make(comm, calls)
        except BaseException as error:
            raised = error
        if comm.rank == 0:
            assert type(raised) is kind and str(raised) == "mine", raised
            inside += comm.failure is not None
            comm.abort(reason="was interrupted")
        else:
            assert type(raised) is RankLost and raised.ranks == (0,) and "interrupted" in str(raised), raised
        assert world.failure is None and signal.getsignal(signal.SIGINT) is sigint
    assert world.rank or inside > 0
"""


@pytest.mark.parametrize("hosts", ["one", "two"])
def test_at_random_moments_of_random_calls(hosts, seed, request):
    """Rank 1 raises RankLost with the reason.  Exceptions between two calls are the program's own."""
    if hosts == "two":
        request.getfixturevalue("apart")
    text = RANDOM.replace("SEED", str(seed)).replace("ROUNDS", "30")
    assert run_processes(text, 2) == [(0, "")] * 2


@pytest.mark.mpi
@pytest.mark.skipif(SIZE not in (None, "2"), reason="only two ranks take part")
@pytest.mark.parametrize("name", OF_TRANSPORTS)
def test_on_mpi(alarm, memory, ranks_of_mpi, name):
    from mpi4py import MPI

    def body(world):
        orders = MPI.COMM_WORLD.Dup()  # which kos does not use
        if world.rank > 0:
            _take_part(world, CALLS[name], lambda: orders.recv(source=0))
        else:
            assert _interrupt_all(world, alarm, CALLS[name], lambda: orders.send(None, 1)) > 20
        orders.Free()

    ranks_of_mpi.run(body)
