"""Calls that the compiled core makes by itself are as those through Python, and notice whatever has changed."""

import gc
import itertools
import threading
import time
import weakref

import numpy as np
import pytest

from kos.comm.communicator import Communicator
from kos.errors import CollectiveError, CollectiveMismatch, CollectiveTimeout, InvalidArgument
from tests.comm.gpu_eager import hits
from tests.comm.ranks import on_each_rank
from tests.comm.shared_ranks import needs_core
from tests.comm.tcp_ranks import TCPRanks

pytestmark = needs_core


@pytest.fixture
def run():
    return TCPRanks(2).run


@on_each_rank("run")
def test_a_new_timeout_counts(comm, /):
    x = np.ones(3)
    for _ in range(3):
        comm.all_reduce(x)
    comm.timeout = 0.2
    if comm.rank == 0:
        with pytest.raises(CollectiveTimeout, match="all_reduce #3 .*not complete after 0.2 s"):
            comm.all_reduce(x)
    comm.rendezvous.timeout = 30.0
    comm.rendezvous.barrier()


@on_each_rank(TCPRanks(2).run)
def test_a_closed_communicator_refuses_them(comm, /):
    part, aborted = comm.duplicate(), comm.duplicate()
    for each in (part, aborted):
        for _ in range(3):
            each.barrier()
    part.close()
    aborted.abort()
    for each in (part, aborted):
        with pytest.raises(CollectiveError, match="closed"):
            each.barrier()
    comm.barrier()


@on_each_rank("run")
def test_messages_that_differ_are_named(comm, /):
    x, y = np.ones(3), np.ones(4)
    for _ in range(3):
        comm.send(x, 1) if comm.rank == 0 else comm.recv(x, 0)
        comm.send(y, 1) if comm.rank == 0 else comm.recv(y, 0)
    if comm.rank == 0:
        comm.send(x, 1)
    else:
        with pytest.raises(CollectiveMismatch, match="recv #6 .*: rank 1 expected 4 elements .* got 3 elements"):
            comm.recv(y, 0)
    comm.barrier()


def test_a_subclass_keeps_its_methods():
    class Counting(Communicator):
        calls = 0

        def all_reduce(self, x, *args, **options):
            self.calls += 1
            return super().all_reduce(x, *args, **options)

    def body(comm):
        other = Counting(comm.backend, comm.rendezvous, comm.probes, 30.0)
        other._collectives = comm._collectives  # one backend, one order
        for _ in range(3):
            other.all_reduce(np.ones(2))
        assert other.calls == 3
        for _ in range(3):
            comm.barrier()
        assert hits(comm) == 2 and other._core_group is None  # the core has those of one communicator
        assert comm.recorder.last_call() != other.recorder.last_call()

    TCPRanks(2).run(body)


@on_each_rank("run")
def test_nothing_holds_the_arrays_or_the_communicator(comm, /):
    x = np.ones(1000)
    seen = weakref.ref(x)
    for _ in range(3):
        comm.all_reduce(x)
    del x
    assert seen() is None
    part = comm.duplicate()
    for _ in range(3):
        part.barrier()
    part.close()
    gone = weakref.ref(part)
    del part
    until = time.monotonic() + 10
    while gone() is not None and time.monotonic() < until:
        gc.collect()  # another rank, a thread of this process, may be collecting
        time.sleep(0.01)
    assert gone() is None


@on_each_rank("run")
def test_more_calls_than_are_kept(comm, /):
    for _, count in itertools.product(range(3), range(1, 100)):
        assert (comm.all_reduce(np.ones(count)) == comm.size).all()


@on_each_rank(TCPRanks(3).run)
def test_a_call_is_never_kept_as_another(comm, /):
    """Calls of batches, by a schedule, and that raise come between a call that is kept and its arguments."""
    x, y = np.ones(4), np.empty(4)
    if comm.rank == 0:
        for dst in (1, 2):
            with comm.batch():
                comm.send(x, dst)
                comm.recv(y, dst)
        with pytest.raises(InvalidArgument):
            comm.send(x, 3)
        for value, dst in ((42.0, 2), (43.0, 1), (44.0, 2)):
            comm.send(np.full(4, value), dst)
    else:
        with comm.batch():
            comm.recv(y, 0)
            comm.send(x, 0)
        for value in {1: (43.0,), 2: (42.0, 44.0)}[comm.rank]:
            assert comm.recv(y, 0).tolist() == [value] * 4
    for _ in range(3):
        z = comm.all_reduce(x.copy(), algorithm="ring")
        comm.all_reduce_init(x.copy()).start().wait()
        before = hits(comm)
        z = comm.all_reduce(z, algorithm="ring")
        assert hits(comm) == before, "a call by a schedule ran in the core"


@on_each_rank(TCPRanks(3).run)
def test_threads_do_not_keep_each_others_calls(comm, /):
    """While a thread waits in a send, another one sends the same array to another rank."""
    x = np.zeros(1_000_000)  # each send waits for its receive
    if comm.rank == 0:
        other = threading.Thread(target=lambda: (time.sleep(0.1), comm.send(x, 2)))
        other.start()
        comm.send(x, 1)
        other.join()
        comm.send(x + 1, 1)
        comm.send(x + 2, 2)
    else:
        time.sleep(0.3 * comm.rank)
        assert [comm.recv(x, 0)[0] for _ in range(2)] == [0.0, comm.rank]


@on_each_rank(TCPRanks(2).run)
def test_a_call_beside_others_is_kept_once(comm, /):
    """As many signatures as are kept; then one of them and a new one many times, beside an outstanding Work."""
    arrays = [np.ones(n) for n in range(1, 32)]  # with the one that is outstanding
    for x in arrays[1:] * 2:
        comm.all_reduce(x)
    work = comm.all_reduce(np.ones(3), async_op=True)
    for _ in range(40):
        comm.all_reduce(arrays[0])
        comm.all_reduce(arrays[1])
    work.wait()
    before = hits(comm)
    for x in arrays:
        comm.all_reduce(x)
    assert hits(comm) - before == len(arrays)
