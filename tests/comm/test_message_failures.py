"""Messages that do not fit or are cancelled: both ends get an error, and no rank gets a message that is not for it."""

import re
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

import kos
from kos.comm.host import mpi
from kos.comm.transport import ScheduledCalls
from kos.errors import (
    CollectiveError,
    CollectiveMismatch,
    CollectiveTimeout,
    CudaError,
    KosError,
    OutOfMemory,
    RankLost,
)
from tests.comm.ranks import MockRanks, on_each_rank
from tests.comm.tcp_ranks import TCPRanks
from tests.comm.test_failures import F4


@on_each_rank("several.run")
def test_which_ranks_are_of_the_group_and_which_of_the_world(comm, /):
    """Failed ranks are numbered as in the world, and arguments as in the group.

    The text says which numbering it uses.
    """
    last, group = comm.size - 1, comm.group(range(comm.size)[::-1])
    assert group is not None
    if comm.rank == 0:
        with pytest.raises(CollectiveTimeout) as late:
            group.recv(F4(), 0, timeout=0.1)
        text = str(late.value)
        assert late.value.call.startswith(f"{group.name}: recv #0 ") and text.startswith(late.value.call)
        assert ", from rank 0 of the group with tag 0: " in text and f"rank {last} of world sent nothing" in text
    comm.barrier()

    def calls():
        group.broadcast(F4(), int(comm.rank == 0))
        group.barrier()  # a broadcast's root, which only gives data, raises in its next call

    with pytest.raises(CollectiveMismatch) as differs:
        calls()
    assert differs.value.call.partition(": ")[0] == group.name
    for rank, call in zip(differs.value.ranks, (differs.value.expected, differs.value.got), strict=True):
        assert re.fullmatch(rf"broadcast #\d+ of float32\[4\], root {int(rank == 0)} of the group", call)
        assert f"rank {rank} of world called {call}" in str(differs.value)
    with pytest.raises(KosError):
        group.barrier()


def pass_a_failure_on(comm: kos.Communicator) -> list[str]:
    """A send of rank 1 fails, and so a call of rank 0, which has begun fewer collectives; rank 2 gets both failures."""
    large, small, texts = np.ones(1 << 20), np.ones(3), list[str]()
    comm.barrier()

    def learn(call: Callable[[], Any]) -> None:
        with pytest.raises(CollectiveTimeout) as caught:
            call()
        texts.append(str(caught.value))

    if comm.rank == 1:
        work = comm.all_reduce(small, async_op=True)
        learn(lambda: comm.send(large, 2, timeout=0.2))
        learn(work.wait)
    elif comm.rank == 0:
        learn(lambda: comm.send_recv(large, small, 1, 1))
    else:
        learn(lambda: comm.recv(small, 0))
        learn(lambda: comm.all_reduce(small))
    return texts


@pytest.mark.parametrize("on", [MockRanks, TCPRanks])
def test_a_failure_that_is_passed_on_names_its_rank_once(on):
    (passed,), (own, _), learned = on(3).run(pass_a_failure_on)
    assert own.startswith("world: send #0 ")
    for text, call in zip((passed, *learned), ("send_recv #0", "recv #0", "all_reduce #1"), strict=True):
        assert re.fullmatch(rf"(world: {call} [^:]*: )?rank 1: {re.escape(own)}", text), text


@pytest.mark.parametrize(
    ("error", "raised", "told"),
    [
        (MemoryError(), OutOfMemory, ".*rank 1: out of host memory"),
        (KeyboardInterrupt(), KeyboardInterrupt, ".*rank 1 is gone: all_reduce was interrupted by KeyboardInterrupt"),
    ],
    ids=["MemoryError", "KeyboardInterrupt"],
)
@on_each_rank("several.run")
def test_an_error_of_one_rank(comm, /, error, raised, told):
    """The errors of the other ranks name the rank that raised."""
    if comm.rank == 1:
        comm.backend.scheduled.irecv = Mock(side_effect=error)
    with pytest.raises(raised if comm.rank == 1 or raised is OutOfMemory else CollectiveError) as caught:
        comm.all_reduce(np.ones(4), algorithm="ring")
    if raised is OutOfMemory:
        assert str(caught.value).startswith(f"{caught.value.call}: rank 1: out of host memory")
    if comm.rank != 1:
        assert re.match(told, str(caught.value))
        assert caught.value.ranks == (1,)


class Interrupted:
    """A counter that raises KeyboardInterrupt after it has counted: the number is lost."""

    def __init__(self, numbers: Iterator[int]) -> None:
        self.numbers, self.over = numbers, False

    def __next__(self) -> int:
        number = next(self.numbers)
        if not self.over:
            self.over = True
            raise KeyboardInterrupt
        return number


CALLS: dict[str, Callable[[kos.Communicator, Any], Any]] = {
    "all_reduce": lambda comm, x: comm.all_reduce(np.ones(5)),
    "cached": lambda comm, x: comm.all_reduce(x),
    "batch": lambda comm, x: batch(comm, x),
    "split": lambda comm, x: comm.split(0),
    "recv": lambda comm, x: comm.recv(x, 1) if comm.rank != 1 else comm.send(x, 0),
}


REASONS = {"cached": "all_reduce", "recv": "send"}
"""The names of calls in the reason of the abort, where it is not that of ``CALLS``."""


def batch(comm: kos.Communicator, x: Any) -> None:
    with comm.batch():
        comm.all_reduce(x)
        comm.all_reduce(np.ones(3))


@pytest.mark.parametrize("name", CALLS)
@on_each_rank("several.run")
def test_a_call_that_is_interrupted_before_it_starts(comm, /, name):
    """All ranks raise at once if Ctrl-C interrupts the start of a call on rank 1."""
    call, x = CALLS[name], np.ones(4)
    vars(comm).pop("all_reduce", None)  # Python handles no signal where the core starts a call
    for _ in range(3):
        comm.all_reduce(x)
    comm.rendezvous.barrier()
    if comm.rank == 1:
        kind = "_messages" if name == "recv" else "_collectives"
        setattr(comm, kind, Interrupted(getattr(comm, kind)))
    with pytest.raises(KeyboardInterrupt if comm.rank == 1 else RankLost) as caught:
        call(comm, x)
    told = f"{REASONS.get(name, name)} was interrupted"
    if comm.rank == 1:
        with pytest.raises(CollectiveError, match="is closed"):
            comm.barrier()
        assert str(comm.failure) == f"{told} by KeyboardInterrupt"
    else:
        assert f"rank 1 is gone: {told} by KeyboardInterrupt" in str(caught.value), caught.value
        assert caught.value.ranks == (1,)


@pytest.mark.parametrize("error", [MemoryError("all is used"), CudaError("all is used")], ids=repr)
@on_each_rank("several.run")
def test_a_rank_that_cannot_make_its_part_of_a_group(comm, /, error):
    """The others do not wait for a rank that cannot make its part of a new group's backend."""
    usual = comm.backend.split
    if comm.rank == 1:
        comm.backend.split = Mock(side_effect=error)
    with pytest.raises(type(error) if comm.rank == 1 else KosError) as caught:
        comm.split(0).rendezvous.barrier()
    if comm.rank != 1:
        assert f"was interrupted on rank 1 by {type(error).__name__}: all is used" in str(caught.value)
        assert caught.value.ranks == (1,)
    comm.backend.split = usual
    assert comm.all_reduce(np.ones(2)).tolist() == [comm.size] * 2


@on_each_rank("several.run")
def test_a_message_that_times_out_gives_up_no_other(comm, /):
    """Other messages stay in flight, whatever their tags and their ranks."""
    x, y, given_up, much = np.zeros(4), np.zeros(70000), np.zeros(4), np.arange(70000.0)
    if comm.rank == 0:
        works = [
            comm.recv(x, 1, 0, async_op=True),
            comm.recv(y, 1, 3, async_op=True),
            comm.send(much, 1, 0, async_op=True),
        ]
        for tag in (5, 0, 3):
            with pytest.raises(CollectiveTimeout, match=f"from rank 1 with .* rank 1 sent nothing with tag {tag}\\b"):
                comm.recv(given_up, 1, tag, timeout=0.05)
        comm.send(given_up, 1, 9)
    if comm.rank == 1:
        z = np.zeros(70000)
        comm.recv(z[:4], 0, 9)  # in a barrier, it could wait for a third rank, and the error would name that one
        comm.send(np.ones(4), 0, 0)
        comm.send(much, 0, 3)
        assert (comm.recv(z, 0, 0) == much).all()
    if comm.rank == 0:
        for work in works:
            work.wait()
        assert (x == 1).all() and (y == much).all() and (given_up == 0).all()
    comm.barrier()


@on_each_rank("several.run")
def test_a_receive_that_does_not_fit_gives_up_no_send_beside_it(comm, /):
    x, y = np.full(1 << 18, float(comm.rank)), np.zeros(1 << 18)
    if comm.rank == 0:
        with pytest.raises(CollectiveMismatch, match="send_recv #0 .* to and from rank 1 .* got 3 elements of int8"):
            comm.send_recv(x, y, 1, 1)
        x[:] = -7
    elif comm.rank == 1:
        comm.send(np.zeros(3, np.int8), 0)
        comm.recv(y, 0)
        assert (y == 0).all()
    comm.barrier()


def test_requests_that_are_ready_at_one_poll():
    """If several are ready, the rank must not wait any more: no further event would wake it."""
    wrong: list[CollectiveMismatch] = []
    does_not_fit = Mock(within_host=False, done=Mock(side_effect=CollectiveMismatch("got 3 elements")))
    complete = [Mock(within_host=within, done=Mock(return_value=True)) for within in (False, True)]
    assert list(ScheduledCalls.wait_for(does_not_fit, *complete, mismatches=wrong)) == []
    assert len(wrong) == 1


@pytest.mark.mpi
@pytest.mark.parametrize("elements", [65_536, 200_003])
def test_messages_longer_than_mpi_counts(ranks_of_mpi, apart, monkeypatch, elements):
    """With a limit of 1000 bytes instead of 2 GiB."""
    monkeypatch.setattr("kos.comm.host.mpi.LARGEST", 1000)
    long, known = set(), mpi.as_bytes

    def as_bytes(array, MPI):
        memory, *count, kind = known(array, MPI)
        long.update([memory.nbytes] * len(count))  # MPI counts the bytes of a message that is not long
        return [memory, *count, kind]

    monkeypatch.setattr("kos.comm.host.mpi.as_bytes", as_bytes)

    def body(world):
        comm = world.duplicate()
        me, n = comm.rank, comm.size
        x = np.random.default_rng(elements + me).integers(0, 256, elements, np.uint8)
        rows = np.stack([np.random.default_rng(elements + r).integers(0, 256, elements, np.uint8) for r in range(n)])
        before = (me - 1) % n
        y = np.full_like(x, 99)
        comm.send_recv(x, y, (me + 1) % n, before)
        assert (y == rows[before]).all() and elements in long
        assert (comm.all_gather(x) == rows).all()
        assert (comm.broadcast(x.copy(), 1) == rows[1]).all()
        assert (comm.all_gather_v(x, [elements] * n) == rows.reshape(-1)).all()
        if me == 0:
            comm.send(x, 1)
        elif me == 1:
            z = np.zeros(elements + 1, np.uint8)
            with pytest.raises(CollectiveMismatch, match=f"expected {elements + 1} .* got {elements} elements"):
                comm.recv(z, 0)
            assert not z.any()
        comm.close()

    ranks_of_mpi.run(body)
