"""Two threads that call one communicator at the same time: the error shows both lines.  Ordered calls are allowed."""

import queue
import re
import signal
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import kos
from kos.errors import CollectiveError, CollectiveTimeout, KosError
from kos.testing import spawn
from tests.comm import shared_ranks
from tests.comm.ranks import on_each_rank, until
from tests.comm.tcp_ranks import TIMEOUT, run_ranks

HERE = __file__.replace(".", r"\.")
CALL = r"(all_reduce #\d+ of float64\[\d\] by SUM|barrier #0)"
AT_ONCE = rf"rank \d: two threads call world\S* at once: {CALL} at {HERE}:\d+ and (all_reduce|barrier).* at {HERE}:\d+;"


def outcomes(*calls: Callable[[], Any]) -> list[BaseException | None]:
    """The error of each call, or None; each call is made by its own thread, all at once."""
    raised: list[BaseException | None] = [None] * len(calls)

    def run(number: int) -> None:
        try:
            calls[number]()
        except KosError as error:
            raised[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


def at_once(comm: kos.Communicator) -> None:
    """On rank 0, a second thread makes a call while the first one is in a collective, for which rank 1 is late."""
    for _ in range(3):  # the compiled core knows both calls
        comm.all_reduce(np.ones(2))
        comm.barrier()
    comm.rendezvous.barrier()
    if comm.rank == 0:
        begun = list[BaseException | None]()
        first = threading.Thread(target=lambda: begun.extend(outcomes(lambda: comm.all_reduce(np.ones(2)))))
        first.start()
        until(lambda: comm._active)
        errors = outcomes(comm.barrier)
        comm.rendezvous.barrier()
        first.join()
        errors += begun
    else:
        comm.rendezvous.barrier()
        errors = outcomes(lambda: comm.all_reduce(np.ones(2)))
    errors += outcomes(comm.barrier)
    for error in errors:
        assert re.search(AT_ONCE, str(error)), error


def raise_at_once(comm: kos.Communicator) -> None:
    at_once(comm)
    comm.barrier()


def test_threads():
    with pytest.raises(CollectiveError, match=AT_ONCE):
        spawn(raise_at_once, 2)


@on_each_rank(spawn, 2)
def test_a_call_into_the_batch_of_another_thread(comm, /):
    with comm.batch():
        comm.all_reduce(np.ones(2))
        (error,) = outcomes(lambda: comm.all_reduce(np.ones(3)))
    assert re.search(rf"two threads call world at once: a batch at {HERE}:\d+ and all_reduce", str(error))


def joined(comm: kos.Communicator) -> None:
    for _ in range(3):
        assert outcomes(lambda: comm.all_reduce(np.ones(2))) == [None]
        comm.all_reduce(np.ones(2))


def locked(comm: kos.Communicator) -> None:
    lock, x = threading.Lock(), np.ones(2)

    def call() -> None:
        with lock:
            comm.all_reduce(x)

    assert outcomes(*[call] * 4) == [None] * 4


def queued(comm: kos.Communicator) -> None:
    works: queue.Queue[Any] = queue.Queue()

    def wait() -> None:
        while (work := works.get(timeout=60)) is not None:
            work.wait()

    def launch() -> None:
        for _ in range(20):
            works.put(comm.all_reduce(np.ones(2), async_op=True))
        works.put(None)

    assert outcomes(launch, wait) == [None, None]


def messages_beside_collectives(comm: kos.Communicator) -> None:
    """Messages in host memory are matched by rank and tag, not by the order of the calls."""
    peer = 1 - comm.rank

    def receive() -> None:
        for tag in range(5):
            comm.recv(np.empty(1), peer, tag)

    def send() -> None:
        for tag in range(5):
            comm.send(np.ones(1), peer, tag)
            comm.all_reduce(np.ones(2))

    assert outcomes(receive, send) == [None, None]


def groups_of_their_own(comm: kos.Communicator) -> None:
    one, other = comm.duplicate(), comm.duplicate()
    assert outcomes(lambda: one.all_reduce(np.ones(2)), other.barrier) == [None, None]


LEGAL = [joined, locked, queued, messages_beside_collectives, groups_of_their_own]


@pytest.mark.parametrize("program", LEGAL)
def test_allowed_programs(program):
    spawn(program, 2)


@pytest.mark.parametrize("how", ["timeout", "abort"])
def test_another_thread_ends_the_operation_of_a_sleeping_wait(how, monkeypatch):
    """The wait sleeps until an event, and no other rank causes one."""
    over, sleeps = threading.Event(), threading.Semaphore(0)

    def body(comm: kos.Communicator) -> None:
        if comm.rank:
            assert over.wait(TIMEOUT)
            return
        backend, work, raised = comm.backend, comm.recv(np.empty(1), 1, async_op=True), list[Any]()
        pause, abort = backend.transport.pause, backend.abort

        def sleep(mark: int, seconds: float) -> None:
            if seconds > 1:  # not the first sleep, after which a wait shows for whom it waits
                sleeps.release()
            pause(mark, seconds)

        def report(reason: str) -> None:
            """The report wakes the wait, which finds its operation still in flight and sleeps again."""
            while sleeps.acquire(blocking=False):
                pass
            abort(reason)
            assert sleeps.acquire(timeout=TIMEOUT)

        backend.transport.pause, backend.abort = sleep, report
        waiting = threading.Thread(target=lambda: raised.extend(outcomes(work.wait)), daemon=True)
        waiting.start()
        assert sleeps.acquire(timeout=TIMEOUT)
        if how == "abort":
            comm.abort()
        else:
            with pytest.raises(CollectiveTimeout, match="not complete after 0.1 s"):
                work.wait(0.1)
        waiting.join(TIMEOUT)
        over.set()
        assert isinstance(raised[0], CollectiveError)

    spawn(body, 2, 2 * TIMEOUT)


def test_a_signal_handler_is_the_same_thread():
    with kos.init("mock") as comm:
        former = signal.signal(signal.SIGUSR1, lambda *_: comm.all_reduce(np.ones(2)))
        begin = comm.backend.scheduled.start

        def launch(work):
            if work.name == "barrier":
                signal.raise_signal(signal.SIGUSR1)
            return begin(work)

        try:
            comm.backend.scheduled.start = launch
            comm.barrier()
        finally:
            signal.signal(signal.SIGUSR1, former)


def test_ranks_that_share_memory():
    shared_ranks.run(at_once, 2, close=False)


def test_ranks_of_tcp(memory):
    def body(rendezvous):
        comm = kos.init("tcp", rendezvous=rendezvous, timeout=TIMEOUT)
        at_once(comm)
        comm.abort()

    run_ranks(2, body)


@pytest.mark.mpi
def test_processes(mpi_world):
    for program in LEGAL if mpi_world.size == 2 else []:
        with mpi_world.duplicate() as comm:
            program(comm)
    if mpi_world.size > 1:
        comm = mpi_world.duplicate()
        at_once(comm)
        comm.abort()
