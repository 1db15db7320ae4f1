"""A progress thread: operations in flight proceed while the program is outside of kos."""

import subprocess
import sys
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kos
from kos.comm.control.base import ControlPlane
from kos.comm.control.threads import ThreadControlPlane, ThreadGroup
from kos.errors import RankLost
from tests.comm.ranks import TIMEOUT
from tests.comm.tcp_ranks import run_ranks, run_threads

COUNT = 300_007  # elements: several segments


def moves_alone(comm: kos.Communicator) -> None:
    """Rank 0 is in no call of the communicator until every other rank has completed its own, which need it."""
    part, x = comm.split(0), np.full(COUNT, comm.rank + 1.0, np.float32)
    for paused in (False, False, True):  # the second one wakes the thread, and the end of the pause in the third
        if comm.rank == 0:
            with part.backend.engine.paused() if paused else nullcontext():
                work = part.all_reduce(x, algorithm="ring", async_op=True)
            comm.rendezvous.barrier()
            assert work.wait() is x
        else:
            part.all_reduce(x, algorithm="ring")
            comm.rendezvous.barrier()
    assert (x == comm.size**3 * (comm.size + 1) / 2).all()
    part.close()


def reports_failures(comm: kos.Communicator) -> None:
    """An operation fails while the program computes: it learns of that at once, and ``wait`` raises it."""
    part, failed = comm.duplicate(), threading.Event()
    if comm.rank == 0:
        part.on_failure(lambda error: failed.set())
        work = part.all_reduce(np.ones(COUNT), algorithm="ring", async_op=True)
        comm.rendezvous.barrier()
        assert failed.wait(TIMEOUT)
        with pytest.raises(RankLost, match=r"rank \d is gone: a test"):
            work.wait()
    else:
        comm.rendezvous.barrier()
        part.abort(reason="a test")
    comm.rendezvous.barrier()
    part.abort()


def stops(comm: kos.Communicator) -> None:
    thread: Any = comm.backend.engine.thread
    comm.close() if comm.size > 1 else comm.abort()
    assert not thread._thread.is_alive() and comm.backend.engine.thread is None


def check(backend: str, rendezvous: ControlPlane | None) -> None:
    comm = kos.init(backend, rendezvous=rendezvous, timeout=TIMEOUT, progress_thread=True)
    moves_alone(comm)
    if comm.size > 1:
        reports_failures(comm)
    stops(comm)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_threads(size):
    group = ThreadGroup(size)

    def body(rank):
        check("mock", ThreadControlPlane(group, rank, TIMEOUT))

    results = run_threads(*(lambda rank=rank: body(rank) for rank in range(size)))
    assert results == [None] * size, results


def pair() -> list[kos.Communicator]:
    """The communicators of two ranks.  The first has a progress thread."""
    group = ThreadGroup(2)
    return run_threads(*(
        lambda rank=rank: kos.init(
            "mock", rendezvous=ThreadControlPlane(group, rank, TIMEOUT), progress_thread=rank == 0
        )
        for rank in range(2)
    ))  # fmt: skip


def wakes(thread: threading.Thread) -> int:
    """How often the thread has slept so far."""
    lines = Path(f"/proc/self/task/{thread.native_id}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("voluntary_ctxt_switches")).split()[1])


def test_a_failure_that_is_being_recorded():
    """The thread has found the failure but not yet recorded it.  ``wait`` does not treat this as success."""
    (comm, other), begun, waits = pair(), threading.Event(), threading.Event()
    backend, to_error, waiter = comm.backend, comm.backend.to_error, comm.backend.waiter

    def record(*of):
        begun.set()
        assert waits.wait(TIMEOUT)
        return to_error(*of)

    backend.to_error = record
    backend.waiter = lambda: (waits.set(), waiter())[1]
    work = comm.recv(np.ones(3), 1, async_op=True)
    other.abort(reason="a test")
    assert begun.wait(TIMEOUT)
    try:
        with pytest.raises(RankLost, match="rank 1 is gone: a test"):
            work.wait()
    finally:
        waits.set()
        comm.abort()


def test_tcp(memory):
    run_ranks(2, lambda rendezvous: check("tcp", rendezvous))


@pytest.mark.mpi
def test_mpi(mpi_world, memory):
    mpi_world.barrier()
    check("mpi", None)


PROGRAM = """
import threading, numpy as np, kos
from kos.comm.control.threads import ThreadGroup, ThreadControlPlane
group = ThreadGroup(2)
def rank(number):
    comms[number] = kos.init("mock", rendezvous=ThreadControlPlane(group, number), progress_thread=True)
comms = {}
ranks = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
[thread.start() for thread in ranks], [thread.join() for thread in ranks]
work = comms[0].recv(np.ones(3), 1, async_op=True)
print("in flight", work.done())
"""
SERIALIZED = """
import mpi4py
mpi4py.rc.thread_level = "serialized"
import kos
try:
    kos.init("mpi", progress_thread=True)
except kos.errors.BackendUnavailable as error:
    print(error)
try:
    kos.init("mpi").barrier(async_op=True).add_done_callback(print)
except kos.errors.BackendUnavailable as error:
    print("expected MPI_THREAD_MULTIPLE" in str(error))
"""


FORKS = """
import os, select, signal, sys, threading, kos
comm = kos.init(progress_thread=True)
lock = comm.backend.engine.thread._event._cond  # its thread holds the lock briefly each time it wakes
holder = threading.Thread(target=lock.acquire)
holder.start(), holder.join()
child = os.fork()
if not child:
    sys.exit(7)
lock.release()
if not select.select([os.pidfd_open(child)], [], [], 20)[0]:
    os.kill(child, signal.SIGKILL)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.parametrize(("program", "said"), [
    (PROGRAM, "in flight False"),
    (FORKS, "7"),
    (SERIALIZED, "mpi: progress_thread, await, add_done_callback: expected MPI_THREAD_MULTIPLE, got "
                 "MPI_THREAD_SERIALIZED\nTrue"),
], ids=["an open communicator", "a fork", "too few threads"])  # fmt: skip
def test_a_program_ends(program, said):
    if "mpi4py" in program:
        pytest.importorskip("mpi4py")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=TIMEOUT)
    assert (done.returncode, done.stdout.strip()) == (0, said), done.stderr
