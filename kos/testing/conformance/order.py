"""Concurrent and repeated operations: groups, batches, messages, progress."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from kos.comm import Communicator, ReduceOp
from kos.errors import BackendUnavailable, CollectiveError, CollectiveMismatch, CollectiveTimeout, InvalidArgument
from kos.testing.conformance.failures import GRACE
from kos.testing.conformance.model import MOVING, REDUCING, Step, Trial
from kos.testing.conformance.values import LARGE, SIZES, assert_bits, poison, raises, vector

POLL_SECONDS = 0.1  # within which a send that copies its message is done
PROGRESS_CONTRACT = "done(): expected to advance all messages of its rank"
SEND_CONTRACT = "done() of a send: expected True only if the message arrives without further calls of its rank"


def sends_need_no_further_call(comm: Communicator) -> None:
    """If ``done()`` of a send is True, its message arrives without further calls of the sender.

    Some of the messages are too long for the buffers of a network.
    """
    for count in (1, 1000, LARGE, 1 << 21):
        x, out = np.arange(count, dtype=np.float32), np.zeros(count, np.float32)
        work = comm.send(x, 1, async_op=True) if comm.rank == 0 else None
        deadline = time.monotonic() + POLL_SECONDS
        while work is not None and not work.done() and time.monotonic() < deadline:
            time.sleep(0.001)
        comm.rendezvous.barrier()  # moves no message, nor does the next one
        if work is not None:
            work.wait()  # does nothing if it is done
        elif comm.rank == 1:
            try:
                comm.recv(out, 0, timeout=min(GRACE, comm.timeout / 2))
            except CollectiveTimeout as error:
                raise AssertionError(f"{SEND_CONTRACT}, got one that needs its sender: {error}") from error
            assert_bits(out, x, "a message whose sender makes no further call")
        comm.rendezvous.barrier()


def one_poll_advances_all_messages(comm: Communicator) -> None:
    """A rank that polls its receive from one rank also continues its send to another."""
    right, left = ((comm.rank + step) % comm.size for step in (1, -1))
    x, out = np.full(1 << 21, comm.rank, np.float32), np.empty(1 << 21, np.float32)
    try:
        comm.send_recv(x, out, right, left, timeout=min(GRACE, comm.timeout / 2))
    except CollectiveTimeout as error:
        raise AssertionError(f"{PROGRESS_CONTRACT}, got one that advances its own: {error}") from error
    assert (out == left).all(), out


def barrier_waits_for_all_ranks(comm: Communicator) -> None:
    # In each round one rank is last: no other may return before it has called the barrier.
    for last in range(comm.size):
        work = None if comm.rank == last else comm.barrier(async_op=True)
        if work is not None:
            assert not work.done()
        comm.rendezvous.barrier()
        if work is None:
            comm.barrier()
        else:
            work.wait()


def waiting_for_one_advances_the_other_across_groups(comm: Communicator) -> None:
    """Rank 0 waits for a message while its all_reduce, which the sender needs, is in flight elsewhere."""
    other = comm.duplicate()
    x, token = np.full(100_003, comm.rank, np.float32), np.zeros(1, np.int32)
    if comm.rank == 0:
        work = comm.all_reduce(x, algorithm="ring", async_op=True)
        other.recv(token, comm.size - 1)
        work.wait()
    else:
        comm.all_reduce(x, algorithm="ring")
        if comm.rank == comm.size - 1:
            token[:] = 7
            other.send(token, 0)
    assert (x == sum(range(comm.size))).all()
    assert token[0] == 7 or comm.rank not in (0, comm.size - 1)


def split_of_a_split(comm: Communicator) -> None:
    """Tests of random programs split the world."""
    part = comm.split(comm.rank % 2, key=-comm.rank)
    members = [r for r in reversed(range(comm.size)) if r % 2 == comm.rank % 2]
    assert part is not None and part.rank == members.index(comm.rank)
    half = part.split(part.rank // 2, key=-part.rank)
    assert half is not None
    same = members[part.rank // 2 * 2 :][:2][::-1]
    assert half.all_gather(np.array(comm.rank)).tolist() == same


def messages_keep_their_order(
    comm: Communicator, seed: int, dtype: Any, counts: Sequence[int] = (*SIZES, 70_001)
) -> None:  # fmt: skip
    """Messages of these sizes with one tag keep their order; those of another tag or communicator are received first.

    The ranks post some receives before the messages arrive, and others after.
    """
    n, me = comm.size, comm.rank
    with comm.duplicate() as other:
        channels = [(comm, 1), (comm, 2), (comm, 1), (other, 1)]
        sent = [(*channel, count) for count in counts for channel in channels]
        mine, theirs = ([vector([seed, number, rank % n], count, dtype) for number, (*_, count) in enumerate(sent)]
                        for rank in (me, me - 1))  # fmt: skip
        for early in (False, True):
            got = [poison(x.size, dtype) for x in mine]
            receives = [
                partial(on.recv, x, (me - 1) % n, tag, async_op=True) for first in reversed(channels[1:])
                for x, (on, tag, _) in zip(got, sent, strict=True) if (on, tag) == first
            ]  # fmt: skip
            works: list[Any] = [receive() for receive in receives] if early else []
            works += [on.send(x, (me + 1) % n, tag, async_op=True) for x, (on, tag, _) in zip(mine, sent, strict=True)]
            comm.barrier()  # in which all have arrived that can
            for work in [receive() for receive in receives if not early] + works:
                work.wait()
            for x, expected in zip(got, theirs, strict=True):
                assert_bits(x, expected, "messages of one tag")


def messages_from_any_rank(comm: Communicator) -> None:
    """A server receives arrays and bytes of any length from any rank, with one tag; each sender's keep their order."""
    sizes = (0, 5, 70_001, 3)
    for server in range(comm.size):
        if comm.rank != server:
            works = [comm.send(np.full(n, comm.rank), server, async_op=True) for n in sizes]
            works += [comm.send_bytes(b"k" * n, server, async_op=True) for n in sizes]
            works += [comm.send(np.full(2, comm.rank), server, 1, async_op=True) for _ in range(2)]
            for work in works:
                work.wait()
            continue
        seen: dict[int, list[int]] = {rank: [] for rank in range(comm.size) if rank != server}
        for _ in range(2 * len(sizes) * len(seen)):
            envelope = comm.probe()
            if envelope.dtype == np.uint8:
                assert comm.recv_bytes(envelope.src) == b"k" * envelope.size
            else:
                x = comm.recv(np.empty(envelope.size, envelope.dtype), envelope.src)
                assert (x == envelope.src).all()
            seen[envelope.src].append(envelope.size)
        assert all(each == [*sizes, *sizes] for each in seen.values()), f"messages of one sender: {seen}"
        waiting: list[Any] = [comm.recv(np.zeros(2, int), tag=1, async_op=True) for _ in range(2 * len(seen))]
        sources = [work.wait()[1] for work in waiting]
        assert sorted(sources) == sorted([*seen, *seen]), f"several receives from any rank: {sources}"


def receives_keep_their_order(comm: Communicator) -> None:
    """One from any rank, one of bytes and one of an array from one rank get its messages in the order of the calls."""
    if comm.rank == 0:
        x, y = np.zeros(3), np.zeros(3)
        works: list[Any] = [comm.recv(x, async_op=True), comm.recv_bytes(1, async_op=True)]
        works.append(comm.recv(y, 1, async_op=True))
        comm.rendezvous.barrier()
        got = [work.wait() for work in reversed(works)][::-1]
        assert (x == 1).all() and got[0][1] == 1 and got[1] == b"second" and (y == 3).all(), got
    else:
        comm.rendezvous.barrier()
        if comm.rank == 1:
            comm.send(np.full(3, 1.0), 0)
            comm.send_bytes(b"second", 0)
            comm.send(np.full(3, 3.0), 0)
    comm.barrier()


def views_put_and_get(comm: Communicator) -> None:
    """If ranks share host memory, each rank reads and writes the arrays of all ranks."""
    n, me = comm.size, comm.rank
    x, other = (comm.allocate((n, 3), np.float32) for _ in range(2))
    x[:] = -1.0
    other[:] = 9.0
    if comm.local_size < n:
        with raises(BackendUnavailable, "views: expected ranks that share memory, got .* on several hosts"):
            comm.views(x)
        return
    views = comm.views(x)
    assert [view.shape for view in views] == [(n, 3)] * n and all(view.dtype == x.dtype for view in views)
    comm.barrier()
    for view in views:
        view[me] = me
    comm.barrier()
    assert (x == np.arange(n)[:, None]).all() and (other == 9).all()
    x[0] = me
    comm.barrier()
    firsts = comm.views(x[0, 1:])  # parts at their place
    assert [first.tolist() for first in firsts] == [[rank] * 2 for rank in range(n)]
    comm.barrier()
    with raises(InvalidArgument, "x: expected an array of allocate, or a part of one, got float32"):
        comm.views(x.copy())
    for empty in (comm.allocate((0, 3), np.float32), x[:0], x[n:]):
        assert [view.shape for view in comm.views(empty)] == [(0, 3)] * n
    with raises(InvalidArgument, r"x: expected an array of allocate, .*, got float32\[0\] in other memory"):
        comm.views(np.empty(0, np.float32))
    del x, other, empty  # views keep the memory
    views[(me + 1) % n][:] = me
    comm.barrier()
    assert (views[me] == (me - 1) % n).all()
    if n > 1:
        part = comm.duplicate()
        with raises(CollectiveMismatch, r"for allocate of int32\[4\]"):
            part.allocate(4 + (me == n - 1), np.int32)
        part.abort()
        comm.barrier()


def close(comm: Communicator) -> None:
    x = np.ones(1000, np.float32)
    with comm.duplicate() as other:
        other.all_reduce(x, async_op=True)
    assert (x == comm.size).all(), "close waits for what is in flight"
    other.close()
    with raises(CollectiveError, "closed"):
        other.barrier()


def _trials(comm: Communicator, seed: int) -> list[Trial]:
    """One of each operation, of sizes that differ."""
    names = [*REDUCING, *MOVING][: None if comm.size > 1 else -1]
    steps = [Step(name, 1 + number**4, root=number, op=ReduceOp.MAX) for number, name in enumerate(names)]
    return [Trial(comm, step, seed) for step in steps]


def several_in_flight(comm: Communicator, seed: int) -> None:
    """Every operation, all in flight at once: they are waited for in reverse order.  Then all in a batch."""
    trials = _trials(comm, seed)
    works = [trial.start(async_op=True) for trial in trials]
    comm.barrier(async_op=True).wait()
    for trial, work in reversed(list(zip(trials, works, strict=True))):
        trial.check(work.wait())
    trials, me = _trials(comm, seed + 1), comm.rank
    inbox = {peer: np.zeros(3) for peer in range(comm.size) if peer != me}
    with comm.batch() as batch:
        for peer, x in inbox.items():
            comm.send(np.full(3, 10.0 * me + peer), peer)
            comm.recv(x, peer)
        results = [trial.start() for trial in trials]
        assert batch.works == []
    assert len(batch.works) == len(trials) + 2 * len(inbox)
    assert all((x == 10 * peer + me).all() for peer, x in inbox.items()), inbox
    for trial, got in zip(trials, results, strict=True):
        trial.check(got)


def repeated(comm: Communicator, seed: int) -> None:
    """Every operation again and again on the same arrays, with changing data, in flight together and in a batch."""
    trials = _trials(comm, seed)
    for number in range(6):
        for trial in trials:
            trial.fill(seed + number)
        if number % 2:
            with comm.batch():
                got = [trial.start() for trial in trials]
        else:
            works = [trial.start(async_op=True) for trial in trials]
            got = [work.wait() for work in works]
        for trial, result in zip(trials, got, strict=True):
            trial.check(result)
