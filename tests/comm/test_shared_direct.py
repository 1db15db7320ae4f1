"""Collectives in one copy: numbers of ranks, memory that cannot be read, lost ranks."""

from __future__ import annotations

import ctypes
import errno
import itertools
import mmap
import os
import threading
from typing import Any

import numpy as np
import pytest

import kos
from kos.comm.host.shared import direct
from kos.comm.host.shared.segment import DEPTH, MAIL_HEAD, _Layout
from kos.errors import CollectiveError, CollectiveMismatch, CollectiveTimeout, RankLost
from tests.comm.ranks import on_each_rank
from tests.comm.shared_ranks import end_process, run
from tests.comm.tcp_ranks import TCPRanks

COUNT = 16384  # elements of float64
SLOW = 32  # bytes above the source's place in a page, to which an EPYC 7003 copies slowly


@pytest.fixture(autouse=True)
def one_copy_at_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "DIRECT_BYTES", 0)


def contributions(comm: kos.Communicator) -> np.ndarray:
    return np.full(COUNT, 1.0 + comm.rank)


@pytest.mark.parametrize("most", [0, 13_000, 1 << 18])
@pytest.mark.parametrize("size", [2, 3])
def test_counts_of_each_rank(size: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of up to ``most`` bytes lie in the slot."""
    monkeypatch.setattr(direct, "DIRECT_BYTES", most)

    def body(comm: kos.Communicator) -> None:
        rank, counts = comm.rank, [1500 * r for r in range(size)]  # rank 0 has none
        starts = np.cumsum([0, *counts])
        whole = np.concatenate([np.full(count, r) for r, count in enumerate(counts)])
        mine = np.full(counts[rank], rank)
        for _ in range(4):  # the later ones are cached
            assert comm.all_gather_v(mine, counts, np.empty_like(whole)).tolist() == whole.tolist()
            gathered = comm.gather_v(mine, counts, 1)
            assert (gathered.tolist() == whole.tolist()) if rank == 1 else gathered is None
            part = comm.scatter_v(whole if rank == 1 else None, counts, np.empty_like(mine), 1)
            assert part.tolist() == mine.tolist()
            total = comm.reduce_scatter_v(whole + rank, counts, np.empty_like(mine))
            assert total.tolist() == (size * mine + sum(range(size))).tolist()
            to_each = [1500 * (rank + r) for r in range(size)]
            got = comm.all_to_all_v(np.full(sum(to_each), rank), to_each, to_each)
            assert got.tolist() == [r for r in range(size) for _ in range(1500 * (rank + r))]
        assert starts[-1] == whole.size

    run(body, size)


def test_an_operation_in_flight_waits_for_no_late_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kos.comm.host.shared.collectives.ONE_COPY_SPINS", 400_000_000)  # 20 seconds
    begun = threading.Event()

    def body(comm: kos.Communicator) -> None:
        if comm.rank == 1:
            assert begun.wait(10.0)
        work = comm.all_gather(contributions(comm), async_op=True)
        begun.set()
        assert (work.wait() == np.repeat([[1.0], [2.0]], COUNT, axis=1)).all()

    run(body, 2)


@on_each_rank(run, 2)
def test_a_list_of_counts_that_has_changed_is_another_call(comm: kos.Communicator, /) -> None:
    counts, x, out = [1, 1], np.full(1, comm.rank), np.empty(2, int)
    for _ in range(4):
        assert comm.all_gather_v(x, counts, out).tolist() == [0, 1]
    counts[0] = 2
    with pytest.raises(kos.errors.InvalidArgument, match="expected" if comm.rank else "counts"):
        comm.all_gather_v(x, counts, out)


@on_each_rank(run, 3)
def test_counts_that_two_ranks_see_differently(comm: kos.Communicator, /) -> None:
    x = np.zeros(6)
    expected = [2, 1, 2] if comm.rank == 2 else [2, 2, 2]  # rank 1 sends it 2
    with pytest.raises(CollectiveMismatch, match="rank 2 expected 1 elements of float64 from rank 1, got 2 ele"):
        comm.all_to_all_v(x, [2, 2, 2], expected)


def test_no_memory_of_copies_lies_where_those_to_arrays_of_numpy_are_slow() -> None:
    """Large ones lie 16 bytes above a page's start."""
    for size in range(2, 10):
        layout = _Layout(size)
        starts = [layout.data + turn * layout.block for turn in range(DEPTH * size)]
        starts += [layout.mail + layout.mailbox(*pair) + MAIL_HEAD for pair in itertools.permutations(range(size), 2)]
        assert all((16 - start) % 4096 >= SLOW and (start - 16) % 4096 >= SLOW for start in starts), size


CALLS = {
    "broadcast": lambda comm, x: comm.broadcast(x, 1).tolist() == [2.0] * COUNT,
    "all_gather": lambda comm, x: comm.all_gather(x)[1].tolist() == [2.0] * COUNT,
    "reduce_scatter": lambda comm, x: (comm.reduce_scatter(x[:6]) == 6).all(),
}


@pytest.mark.parametrize("name", CALLS)
def test_memory_that_cannot_be_read_goes_by_messages(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Such as that of a device.  The operations before and after it are in flight at the same time."""

    def unreadable(address: int, nbytes: int) -> None:
        raise OSError(errno.EFAULT, "Bad address")

    def body(comm: kos.Communicator) -> None:
        ours = comm.backend._shared.direct
        before = comm.all_gather(contributions(comm), async_op=True)
        reader = ours.reader
        ours.reader = lambda rank, to: unreadable if rank == 1 else reader(rank, to)
        assert CALLS[name](comm, contributions(comm))
        work = comm.all_reduce(contributions(comm), async_op=True)
        assert CALLS[name](comm, contributions(comm))
        del ours.reader
        assert CALLS[name](comm, contributions(comm))
        assert (work.wait() == 6).all() and before.wait()[2, 0] == 3

    TCPRanks(3).run(body)


@pytest.mark.parametrize("found", [b"", bytes(16)], ids=["not permitted", "another process has its number"])
def test_ranks_that_may_not_read_each_other_use_slots(monkeypatch: pytest.MonkeyPatch, found: bytes) -> None:
    """The second: in containers with PID namespaces of their own, where a number names another process."""
    read = direct.Direct._read_token

    def read_token(self: Any, rank: int, address: int, nbytes: int) -> bytes:
        return found if (self.rank, rank) == (1, 0) else read(self, rank, address, nbytes)

    monkeypatch.setattr(direct.Direct, "_read_token", read_token)

    def body(comm: kos.Communicator) -> bool:
        assert all(call(comm, contributions(comm)) for call in CALLS.values())
        return "process_vm_readv is not permitted" in comm.explain()

    assert run(body, 3) == [True] * 3


@pytest.mark.parametrize("ended", [True, False])
@pytest.mark.parametrize("how", ["message", "collective"])
@on_each_rank(run, 2, close=False)
def test_a_read_that_fails(comm: kos.Communicator, /, how: str, ended: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("messages", "collectives"):
        monkeypatch.setattr(f"kos.comm.host.shared.{module}.ENDING_SECONDS", 0.2)
    comm.barrier()
    if comm.rank == 0:
        number = comm.backend._shared.direct._pids[1] = (1 << 22) + 1  # of no process
        assert not os.path.exists(f"/proc/{number}")
    elif ended:
        end_process(comm)
    comm.rendezvous.barrier()
    text = "rank 1 is gone: its process" if ended else rf"Errno {errno.ESRCH}\] process_vm_readv of rank 1"
    if how == "message" and comm.rank == 1:
        comm.send(contributions(comm), 0, async_op=True)
    else:
        with pytest.raises(RankLost if ended else CollectiveError, match=text):
            comm.recv(contributions(comm), 1) if how == "message" else comm.all_gather(contributions(comm))
    comm.rendezvous.barrier()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("send", "send #0 .*: not complete after 0.3 s; rank 1 did not receive"),
        ("broadcast", r"ranks \[1\] went no further"),
    ],
)
def test_data_of_a_rank_that_has_failed_is_no_result(monkeypatch: pytest.MonkeyPatch, how: str, message: str) -> None:
    """The program of that rank may change its array as soon as the call has failed."""
    given_up, reader = threading.Event(), direct.Direct.reader

    def slow(self: Any, rank: int, to: int) -> Any:
        read = reader(self, rank, to)

        def later(address: int, nbytes: int) -> None:
            if nbytes > 16:  # not the token of the start
                assert given_up.wait(20)
            read(address, nbytes)

        return later

    monkeypatch.setattr(direct.Direct, "reader", slow)

    def body(comm: kos.Communicator) -> None:
        x = contributions(comm)
        options: Any = {"timeout": 0.3} if comm.rank == 0 else {}
        call = getattr(comm, "recv" if how == "send" and comm.rank == 1 else how)
        with pytest.raises(CollectiveTimeout, match=message):
            call(x, 1 - comm.rank if how == "send" else 0, **options)
        x[:] = 7
        given_up.set()

    run(body, 2)


def test_memory_freed_after_a_failure_does_not_hide_it() -> None:
    """The reader comes after the timeout of the rank whose memory it would read."""
    given_up, memory = threading.Event(), mmap.mmap(-1, 1 << 20)
    protect = ctypes.CDLL(None).mprotect
    protect.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int

    def body(comm: kos.Communicator) -> None:
        if comm.rank == 0:
            x = np.frombuffer(memory, np.uint8)
            with pytest.raises(CollectiveTimeout, match=r"ranks \[1\] did not arrive"):
                comm.broadcast(x, timeout=0.3)
            assert protect(x.ctypes.data, x.nbytes, 0) == 0  # as if it had been freed
            given_up.set()
        else:
            assert given_up.wait(20)
            with pytest.raises(CollectiveTimeout, match=r"ranks \[1\] did not arrive"):
                comm.broadcast(np.empty(1 << 20, np.uint8))

    run(body, 2, close=False)
