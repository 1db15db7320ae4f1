"""``wait_any``, ``as_completed``, callbacks of Works and ``await``, on threads, over ``tcp`` and ``mpi``."""

import asyncio
import os
import queue
import sys
import threading

import numpy as np
import pytest

import kos
from kos.errors import CollectiveTimeout, InvalidArgument, RankLost
from kos.testing import spawn
from tests.comm.ranks import TIMEOUT, on_each_rank, until
from tests.comm.test_neighbours import ranks  # noqa: F401


def last_of(comm):
    """The other ranks, in the order in which they send: one after another, each when the one before has been heard."""
    return [*range(comm.size - 1, 0, -1)]


@on_each_rank("ranks")
def test_works_are_returned_as_they_end(comm, /):
    if comm.rank:
        comm.recv(go := np.zeros(1), 0)
        comm.send(go + comm.rank, 0)
    else:
        works = {comm.recv(np.zeros(1), rank, async_op=True): rank for rank in range(1, comm.size)}
        order = last_of(comm)
        assert kos.wait_any(works, timeout=0.01) is None
        comm.send(np.zeros(1), order[0])
        assert works[work := kos.wait_any(works)] == work.wait() == order[0] and kos.wait_any(works) is work
        ended = kos.as_completed(works)
        assert next(ended) is work
        for rank in order[1:]:
            comm.send(np.zeros(1), rank)
            assert works[work := next(ended)] == rank and work.wait() == rank
        assert next(ended, None) is None
    comm.barrier()


@on_each_rank("ranks")
def test_callbacks_run_without_a_call_of_the_program(comm, /):
    if comm.rank:
        comm.recv(go := np.zeros(1), 0)
        comm.send(go, 0)
    else:
        ended = queue.SimpleQueue()
        for rank in range(1, comm.size):
            comm.recv(np.zeros(1), rank, async_op=True).add_done_callback(lambda work: {}[work.wait()[0]])  # logged
        for rank in range(1, comm.size):
            comm.send(np.zeros(1), rank)
        until(lambda: comm.backend.engine.outstanding() == [])
        works = [comm.send(np.zeros(1), kos.NOBODY, async_op=True) for _ in range(3)]
        for work in works:
            work.add_done_callback(lambda work: ended.put((work, threading.current_thread().name)))
        assert [ended.get(timeout=TIMEOUT) for _ in works] == [(work, "kos-watcher") for work in works]
    comm.barrier()


@on_each_rank("ranks")
def test_a_service_of_asyncio_has_many_receives_in_flight(comm, /):
    """They end in another order than they were called in, while the loop does other things, and collectives run."""
    many = 100

    async def serve():
        before = threading.active_count()
        tasks = [asyncio.ensure_future(wait(tag, rank)) for tag in range(many) for rank in range(1, comm.size)]
        ticks = 0
        while not all(task.done() for task in tasks):
            ticks += 1
            await asyncio.sleep(0)
        assert threading.active_count() <= before + 1
        return [await task for task in tasks], ticks

    async def wait(tag, rank):
        return (await comm.recv(np.zeros(4), rank, tag, async_op=True))[0]

    comm.barrier()
    if comm.rank == 0:
        found, ticks = asyncio.run(asyncio.wait_for(serve(), TIMEOUT))
        assert found == [1000 * tag + rank for tag in range(many) for rank in range(1, comm.size)] and ticks
    else:
        for tag in np.random.default_rng(comm.rank).permutation(many):
            comm.send(np.full(4, 1000.0 * tag + comm.rank), 0, int(tag))
    assert comm.all_reduce(np.ones(1)) == comm.size


@on_each_rank("ranks")
def test_await_raises_what_wait_raises(comm, /):
    async def fails():
        work = comm.recv(np.zeros(1), 1 - comm.rank, tag=5, async_op=True, timeout=0.1)
        with pytest.raises(CollectiveTimeout):
            await work
        with pytest.raises(CollectiveTimeout):
            work.wait()
        work = comm.recv(np.zeros(1), 1 - comm.rank, tag=6, async_op=True)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(wait(work), 0.05)
        assert work.state == "in flight"  # a task that ends does not end the operation
        return work

    async def wait(work):
        return await work

    work = asyncio.run(fails()) if comm.rank < 2 else None
    comm.barrier()
    if work is not None:
        comm.send(np.full(1, 3.0), 1 - comm.rank, 6)
        assert work.wait() == 3
    comm.barrier()


@on_each_rank("ranks")
def test_works_that_fail_are_over(comm, /):
    part = comm.duplicate()
    if comm.rank == 0:
        ended = queue.SimpleQueue()
        work = part.recv(np.zeros(1), 1, async_op=True)
        late = comm.recv(np.zeros(1), 1, tag=9, async_op=True, timeout=0.2)
        work.add_done_callback(ended.put)
        comm.barrier()
        assert ended.get(timeout=TIMEOUT) is work
        assert kos.wait_any([work]) is work
        with pytest.raises(RankLost, match="a test"):
            work.wait()
        assert list(kos.as_completed([work, late])) == [work, late]
        with pytest.raises(CollectiveTimeout):
            late.wait()
    else:
        comm.barrier()
        part.abort(reason="a test")
    comm.barrier()


def test_wrong_works():
    for wrong in (lambda: kos.wait_any([]), lambda: kos.wait_any([None], timeout=0)):
        with pytest.raises(InvalidArgument):
            wrong()
    assert list(kos.as_completed([])) == []


def test_a_wait_for_several_is_reported_and_the_late_rank_named():
    def body(comm):
        if comm.rank == 1:
            text = r"ranks \[2\] did not arrive or went no further, for which ranks \[0\] wait"
            with pytest.raises(CollectiveTimeout, match=text):
                comm.recv(np.zeros(1), 0, timeout=0.6)
        elif comm.rank == 0:
            works = [comm.recv(np.zeros(1), 2, async_op=True)]
            assert kos.wait_any(works, timeout=1.2) is None
            comm.recv(np.zeros(1), 2)
            assert kos.wait_any(works) is works[0] and works[0].wait() == 0
        else:
            threading.Event().wait(1.3)
            comm.send(np.zeros(1), 0)
            comm.send(np.zeros(1), 0)
        comm.barrier()

    spawn(body, 3, timeout=TIMEOUT)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_has_a_watcher_of_its_own():
    def body(comm):
        done = threading.Event()
        comm.send(np.zeros(1), kos.NOBODY, async_op=True).add_done_callback(lambda work: done.set())
        assert done.wait(TIMEOUT)

    spawn(body, 1, timeout=TIMEOUT)
    if (child := os.fork()) == 0:
        try:
            spawn(body, 1, timeout=TIMEOUT)
        finally:
            os._exit(0 if sys.exc_info()[0] is None else 1)
    assert os.waitpid(child, 0)[1] == 0
