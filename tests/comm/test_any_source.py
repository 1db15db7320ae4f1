"""Messages from any rank and of any length, and probes: on threads, on tcp and MPI with the core and without."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from contextlib import suppress
from math import inf
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import kos
from kos import _core
from kos.comm.contract import Backend
from kos.comm.host.mpi import MPITransport
from kos.comm.host.threads import ThreadTransport
from kos.comm.matching import Expected
from kos.errors import (
    BackendUnavailable,
    CollectiveError,
    CollectiveMismatch,
    CollectiveTimeout,
    InvalidArgument,
    RankLost,
)
from kos.testing import Fault, spawn
from tests.comm.conftest import UNDER_MPIRUN
from tests.comm.ranks import MockRanks, MPIRanks, on_each_rank
from tests.comm.tcp_ranks import TIMEOUT, TCPRanks, run_processes, run_ranks

SIZE, LONG = 3, 5 << 20
ON_MPI = [pytest.param(name, marks=pytest.mark.mpi) for name in ("mpi", "mpi apart")]


@pytest.fixture(params=[*(() if UNDER_MPIRUN else ("mock", "tcp", "tcp apart")), *ON_MPI])
def kind(request: pytest.FixtureRequest) -> str:
    if request.param.endswith("apart"):
        request.getfixturevalue("apart")
    elif request.param != "mock" and _core.native is None:
        pytest.skip(str(_core.unavailable))
    return request.param


@pytest.fixture
def run(kind: str, request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Runs a function of a communicator on three ranks, or under mpirun on all of them."""
    if "mpi" in kind:
        world = request.getfixturevalue("mpi_world")
        if world.size == 1:
            pytest.skip("needs mpirun with two ranks or more")
        return MPIRanks(world).run
    if kind == "mock":
        return lambda fn: spawn(fn, SIZE, timeout=TIMEOUT, buffer_bytes=1 << 16)  # as processes of one host
    return TCPRanks(SIZE).run


@pytest.fixture
def meet(kind: str) -> Callable[[kos.Communicator], Any]:
    """Waits for all ranks, outside of kos where ranks are threads: a rank that waits in kos is not named as late."""
    barrier = threading.Barrier(SIZE)
    return (lambda comm: comm.rendezvous.barrier()) if "mpi" in kind else (lambda comm: barrier.wait(TIMEOUT))


def wait_for_marks(comm: kos.Communicator, tag: int = 99) -> None:
    """Rank 0 waits until what the others have sent before has arrived."""
    if comm.rank:
        comm.send(np.zeros(0), 0, tag)
        return
    for rank in range(1, comm.size):
        comm.recv(np.zeros(0), rank, tag)


@on_each_rank("run")
def test_a_receive_from_any_rank_fixes_no_size(comm: kos.Communicator, /) -> None:
    """A parameter server, and then another exchange with the same tag."""
    if comm.rank == 0:
        for _ in range(2):
            got = [comm.recv(np.zeros(1)) for _ in range(comm.size - 1)]
            assert sorted(source for _, source in got) == list(range(1, comm.size))
            assert all(x[0] == source for x, source in got)
            comm.barrier()
        for rank in range(1, comm.size):
            assert (comm.recv(np.zeros(4, np.int32), rank) == rank).all()
    else:
        for _ in range(2):
            comm.send(np.full(1, float(comm.rank)), 0)
            comm.barrier()
        comm.send(np.full(4, comm.rank, np.int32), 0)


@on_each_rank("run")
def test_sizes_and_dtypes_of_one_tag_keep_the_order_of_each_sender(comm: kos.Communicator, /) -> None:
    kinds = [(3, np.float32), (0, np.int8), (70_001, np.float64), (LONG, np.uint8), (5, np.int16), (1, np.float32)]
    if comm.rank:
        works = [comm.send(np.full(n, comm.rank, kind), 0, 7, async_op=True) for n, kind in kinds]
        for work in works:
            work.wait()
        return
    seen = {rank: list[Any]() for rank in range(1, comm.size)}
    for _ in range(len(kinds) * (comm.size - 1)):
        envelope = comm.probe(tag=7)
        x = comm.recv(np.empty(envelope.size, envelope.dtype), envelope.src, 7)
        assert x.nbytes == envelope.nbytes and (x == envelope.src).all()
        seen[envelope.src].append((x.size, x.dtype.type))
    assert all(each == kinds for each in seen.values()), seen


@on_each_rank("run")
def test_receives_match_in_the_order_in_which_they_were_posted(comm: kos.Communicator, /) -> None:
    """From any rank or from one, of arrays or of bytes, cached calls of the core and send_recv."""
    if comm.rank == 1:
        comm.send(np.full(2, -1.0), 0)
        comm.recv(np.zeros(2), 0)  # the core of rank 0 knows both calls from now on
        comm.barrier()
        for number in range(4):
            comm.send(np.full(2, float(number)), 0)
        comm.send_bytes(b"four", 0)
        comm.send_recv(np.full(2, 5.0), np.zeros(2), 0, 0)
    elif comm.rank == 0:
        x = np.zeros(2)
        comm.recv(x, 1)
        comm.send(x, 1)
        first = comm.recv(np.zeros(2), 1, async_op=True)
        wild = [comm.recv(np.zeros(2), async_op=True) for _ in range(2)]
        named = comm.recv(x, 1, async_op=True)
        data = comm.recv_bytes(1, async_op=True)
        both = comm.send_recv(np.ones(2), np.zeros(2), 1, 1, async_op=True)
        comm.barrier()
        assert both.wait()[0] == 5 and data.wait() == b"four" and named.wait()[0] == 3
        assert [work.wait()[0][0] for work in wild] == [1, 2] and first.wait()[0] == 0
        assert all(work.wait()[1] == 1 for work in wild)
    else:
        comm.barrier()


@on_each_rank("run")
def test_a_receive_of_bytes_holds_up_no_other_sender(comm: kos.Communicator, /) -> None:
    if comm.size < 3:
        return
    if comm.rank == 0:
        data = comm.recv_bytes(1, async_op=True)
        assert comm.recv(np.zeros(2), 2, timeout=20)[0] == 2
        assert comm.recv(np.zeros(2), timeout=20)[1] == 2
        comm.send(np.zeros(1), 1, 5)
        assert data.wait() == b"late"
    elif comm.rank == 1:
        comm.recv(np.zeros(1), 0, 5)
        comm.send_bytes(b"late", 0)
    elif comm.rank == 2:
        comm.send(np.full(2, 2.0), 0)
        comm.send(np.full(2, 2.0), 0)


@pytest.mark.parametrize("posted", ["before", "after"])
@on_each_rank("run")
def test_a_message_of_another_size_raises_and_spoils_nothing(comm: kos.Communicator, /, posted: str) -> None:
    """The receive that it is for raises, and names its sender; another one that waits gets the next message."""
    if comm.rank == 0:
        x, y = np.full(2, 7.0), np.zeros(3, np.float32)
        if posted == "after":
            comm.barrier()
            wait_for_marks(comm)
        works: list[Any] = [comm.recv(x, async_op=True), comm.recv(y, async_op=True)]
        if posted == "before":
            comm.barrier()
        assert (works[1].wait()[0] == 2).all()
        with pytest.raises(CollectiveMismatch, match=r"recv #\d+ .*, from any rank.* with tag 0: rank 0 expected 2 "
                           "elements of float64 from rank 1, got 100000 elements of float64") as caught:  # fmt: skip
            works[0].wait()
        assert caught.value.ranks == (0, 1) and (x == 7).all()
    else:
        comm.barrier()
        sent = comm.send(np.ones(100_000), 0, async_op=True) if comm.rank == 1 else None
        if comm.rank == 1:
            comm.send(np.full(3, 2, np.float32), 0)
        if posted == "after":
            wait_for_marks(comm)
        if sent is not None:
            with suppress(CollectiveMismatch):  # a long message was refused
                sent.wait()
    comm.barrier()


@pytest.mark.parametrize("count", [0, 1, 1 << 16, LONG])
@on_each_rank("run")
def test_bytes_of_any_length(comm: kos.Communicator, /, count: int) -> None:
    data = bytes(range(256)) * (count // 256 + 1)
    if comm.rank:
        mine = data[: count + comm.rank * (count > 0)]
        spread = memoryview(np.repeat(np.frombuffer(mine, np.uint8), 2))[::2]
        for each in (mine, bytearray(mine), memoryview(mine), spread):
            comm.send_bytes(each, 0, 3)
        comm.send_bytes(mine, 0, 4, async_op=True).wait()
        return
    for rank in range(1, comm.size):
        for _ in range(4):
            got = comm.recv_bytes(rank, 3)
            assert type(got) is bytes and got == data[: count + rank * (count > 0)]
    for _ in range(1, comm.size):
        got, source = comm.recv_bytes(tag=4)
        assert type(got) is bytes and got == data[: count + source * (count > 0)]


@on_each_rank("run")
def test_bytes_are_arrays_of_uint8(comm: kos.Communicator, /) -> None:
    if comm.rank == 0:
        assert comm.recv(np.zeros(3, np.uint8), 1).tobytes() == b"abc"
        assert comm.recv_bytes(1) == b"\1\2"
        expected = "recv_bytes #2, from rank 1.* with tag 0: rank 0 expected elements of uint8 from rank 1, got 2 "
        with pytest.raises(CollectiveMismatch, match=f"{expected}elements of float64"):
            comm.recv_bytes(1)
        assert comm.recv_bytes(1) == b"next"
    elif comm.rank == 1:
        comm.send_bytes(b"abc", 0)
        comm.send(np.array([1, 2], np.uint8), 0)
        comm.send(np.zeros(2), 0)
        comm.send_bytes(b"next", 0)
    comm.barrier()


@on_each_rank("run")
def test_a_probe_takes_nothing(comm: kos.Communicator, /) -> None:
    if comm.rank == 0:
        assert comm.probe(tag=6, wait=False) is None
        comm.barrier()
        for source in (1, None):
            for _ in range(2):
                envelope = comm.probe(source, 6)
                assert envelope == comm.probe(source, 6, wait=False) == (1, np.int32, 5) and envelope.nbytes == 20
        assert comm.probe(tag=5, wait=False) is None
        assert comm.recv(np.zeros(5, np.int32), tag=6)[1] == 1
        assert comm.probe(tag=6, wait=False) is None
        waiting = comm.recv(np.zeros(1), tag=6, async_op=True)
        comm.barrier()
        wait_for_marks(comm)
        assert comm.probe(tag=6, wait=False) is None, "its message is for the receive that waits"
        assert waiting.wait()[0][0] == 8
        comm.barrier()
    else:
        comm.barrier()
        if comm.rank == 1:
            comm.send(np.ones(5, np.int32), 0, 6)
        comm.barrier()
        if comm.rank == 1:
            comm.send(np.full(1, 8.0), 0, 6)
        wait_for_marks(comm)
        comm.barrier()


@on_each_rank("run")
def test_no_sender_is_served_alone(comm: kos.Communicator, /) -> None:
    if comm.rank:
        for _ in range(4):
            comm.send(np.zeros(1), 0)
    wait_for_marks(comm)
    if comm.rank == 0:
        for _ in range(4):
            sources = [comm.recv(np.zeros(1))[1] for _ in range(comm.size - 1)]
            assert sorted(sources) == list(range(1, comm.size))


def poll_for_ever(comm: kos.Communicator, src: int | None) -> None:
    while comm.probe(src, 2, wait=False) is None:
        pass


WAITS: dict[str, Callable[..., Any]] = {
    "recv": lambda comm, src, **options: comm.recv(np.zeros(1), src, 2, **options),
    "recv_bytes": lambda comm, src, **options: comm.recv_bytes(src, 2, **options),
    "probe": lambda comm, src, **options: comm.probe(src, 2, **options),
}


@pytest.mark.parametrize("source", [None, 1])
@pytest.mark.parametrize("name", WAITS)
@on_each_rank("run")
def test_a_timeout_names_those_that_sent_nothing(
    comm: kos.Communicator, /, name: str, source: int | None, meet: Any, kind: str
) -> None:
    late = [1] if source else list(range(1, comm.size))
    if comm.rank == 0:
        names = f"ranks {late}" if len(late) > 1 else "rank 1"
        with pytest.raises(CollectiveTimeout, match=f"{name} #0.* with tag 2: not complete after 0.2 s; ") as caught:
            WAITS[name](comm, source, timeout=0.2)
        if "mpi" not in kind:
            assert f"; {names} sent nothing with tag 2" in str(caught.value), caught.value
        named = {*caught.value.ranks}
        assert named == {*late} or ("mpi" in kind and named and named <= {*range(1, comm.size)})
    meet(comm)
    if comm.rank == 1:
        comm.send(np.ones(1), 0, 2)
    if comm.rank == 0:
        assert comm.recv(np.zeros(1), tag=2)[1] == 1, "a receive that timed out took a later message"
    comm.barrier()


@pytest.mark.parametrize("memory", ["shared", "none"], indirect=True)
@pytest.mark.parametrize("source", [None, 1])
def test_a_wait_reports_late_ranks_while_another_thread_aborts(memory: str, source: int | None) -> None:
    """Between the release of shared memory and the end of the operations, which the abort cancels then."""

    def body(comm: kos.Communicator) -> None:
        part = comm.duplicate()
        if comm.rank == 0:
            waiting = part.recv(np.zeros(1), source, async_op=True)
            part.backend.abort("as by another thread")
            assert not part.backend.late(waiting).ranks
        comm.rendezvous.barrier()
        part.abort()
        if comm.rank == 0:
            with pytest.raises(CollectiveError, match="the communicator was aborted"):
                waiting.wait()

    TCPRanks(2).run(body)


@pytest.mark.parametrize("source", [None, 1])
@pytest.mark.parametrize("name", [*WAITS, "polled"])
@on_each_rank("run")
def test_a_rank_that_aborts_is_named(comm: kos.Communicator, /, name: str, source: int | None) -> None:
    part = comm.duplicate()
    if comm.rank == 1:
        part.send_bytes(b"last", 0, 2)
        part.abort(reason="it had enough")
    elif comm.rank == 0:
        assert part.recv_bytes(source, 2) in (b"last", (b"last", 1)), "it was sent before"
        call = (lambda: poll_for_ever(part, source)) if name == "polled" else lambda: WAITS[name](part, source)
        with pytest.raises(RankLost, match="rank 1 is gone: .*it had enough") as caught:
            call()
        assert caught.value.ranks == (1,)
        part.abort()
    comm.rendezvous.barrier()
    part.abort()
    comm.barrier()


@on_each_rank("run")
def test_a_rank_that_has_closed_ends_no_receive_from_others(comm: kos.Communicator, /) -> None:
    part, last = comm.duplicate(), comm.size - 1
    if comm.rank == 0:
        for rank in range(1, last):
            comm.recv_bytes(rank)  # it has closed
        comm.send_bytes(b"", last)
        assert part.recv_bytes() == (b"x", last)
        gone = "ranks .* are gone: they closed their" if last > 1 else "rank 1 is gone: it closed its"
        with pytest.raises(RankLost, match=rf"recv #\d of .*{gone} communicator") as caught:
            part.recv(np.zeros(1))
        assert caught.value.ranks == tuple(range(1, comm.size))
    elif comm.rank < last:
        part.close()
        comm.send_bytes(b"", 0)
    else:
        comm.recv_bytes(0)
        part.send_bytes(b"x", 0)
        part.close()
    comm.barrier()


@on_each_rank("run")
def test_wrong_arguments_raise_before_anything_is_sent(comm: kos.Communicator, /) -> None:
    other = (comm.rank + 1) % comm.size
    wrong: dict[str, Callable[[], Any]] = {
        "data: expected bytes, got str": lambda: comm.send_bytes("text", other),  # type: ignore[arg-type]
        "data: expected bytes, got ndarray": lambda: comm.send_bytes(np.zeros(3), other),  # type: ignore[arg-type]
        f"dst: expected a rank from 0 to {comm.size - 1}": lambda: comm.send_bytes(b"", comm.size),
        "dst: expected another rank": lambda: comm.send_bytes(b"", comm.rank),
        "tag: expected a number from 0": lambda: comm.recv_bytes(other, 1 << 20),
        "tag: expected a number from": lambda: comm.probe(tag=-1),
        "src: expected a rank from 0": lambda: comm.recv(np.zeros(1), -1, 1, async_op=True),
        "src: expected a rank": lambda: comm.recv_bytes(-1),
        "src: expected another rank": lambda: comm.probe(comm.rank),
        "timeout: expected a positive number": lambda: comm.probe(timeout=0),
        "wait: expected True or False": lambda: comm.probe(wait="no"),  # type: ignore[call-overload]
        "x: expected": lambda: comm.recv(np.zeros((4, 4))[:, 1]),
    }
    receive = comm.recv(np.zeros(1), tag=1, async_op=True)  # from any rank: -1 must not find it
    for text, call in wrong.items():
        with pytest.raises(InvalidArgument, match=text):
            call()
    for name, call in {"recv_bytes": comm.recv_bytes, "probe": comm.probe}.items():
        with pytest.raises(InvalidArgument, match=f"{name}: expected a call outside of a batch"), comm.batch():
            call()
    comm.send(np.full(1, 4.0), other, 1)
    assert receive.wait()[0][0] == 4
    comm.barrier()


def test_a_group_of_one_has_no_other_rank() -> None:
    def body(comm: kos.Communicator) -> None:
        for call in (lambda: comm.recv(np.zeros(1)), comm.recv_bytes, comm.probe):
            with pytest.raises(InvalidArgument, match="src: expected another rank, got None in a group of one"):
                call()

    spawn(body, 1)


@on_each_rank("run")
def test_groups_in_batches_and_persistent(comm: kos.Communicator, /) -> None:
    """In a group whose ranks are in reverse, beside messages of the world with the same tag."""
    group, last, x = comm.split(0, -comm.rank), comm.size - 1, np.zeros(2)
    assert group is not None
    if comm.rank == last:  # rank 0 of the group
        receive = group.recv_init(x)
        for _ in range(last):
            got, source = receive.start().wait()
            assert got is x and (x == last - source).all()
        group.send(np.zeros(1), last, 1)
        with group.batch() as batch:
            assert group.recv(x) is x
        assert batch.works[0].wait() == (x, last) and (x == 9).all()
        assert comm.recv(x)[1] == 0 and (x == 7).all()
        with pytest.raises(CollectiveTimeout, match="from any rank of the group with tag 3: not complete"):
            group.recv(x, tag=3, timeout=0.1)
    else:
        if comm.rank == 0:
            comm.send(np.full(2, 7.0), last)
        group.send(np.full(2, float(comm.rank)), 0)
        if comm.rank == 0:
            group.recv(np.zeros(1), 0, 1)
            group.send(np.full(2, 9.0), 0)
    comm.rendezvous.barrier()
    group.close()


DEAD = """
import os, sys
import numpy as np, kos
comm = kos.init("tcp", timeout=30)
if comm.rank == 1:
    comm.send_bytes(b"last", 0, 2)
    comm.barrier()
    os._exit(7)
comm.barrier()
if comm.rank == 2:
    try:
        comm.recv(np.zeros(1), 0)
    except kos.errors.CollectiveError as error:
        print(error)
    os._exit(0)
try:
    print(comm.recv_bytes(tag=2))
    {call}
except kos.errors.RankLost as error:
    print(error.ranks, error, flush=True)
os._exit(0)
"""
CALLS = ["comm.recv(np.zeros(1))", "comm.recv_bytes()", "comm.probe()", "while True: comm.probe(wait=False)"]


@pytest.mark.parametrize("core", ["1", "0"])
@pytest.mark.parametrize("call", CALLS)
def test_a_rank_whose_process_ends_is_named(call: str, core: str) -> None:
    (code, output), _, _ = run_processes(DEAD.replace("{call}", call), 3, KOS_CORE=core)
    assert code == 0 and "(b'last', 1)" in output, output
    assert "(1,) " in output and "rank 1 is gone" in output, output


@pytest.mark.parametrize("kind", ["drop", "crash", "error", "stall"])
def test_faults_of_a_sender_name_it(kind: str) -> None:
    def body(comm: kos.Communicator) -> None:
        if comm.rank == 0:
            comm.recv_bytes(tag=4)
            comm.recv_bytes(tag=4)
        elif comm.rank == 1:
            comm.send_bytes(b"x" * 100, 0, 4)
        else:
            comm.send_bytes(b"y", 0, 4)
            comm.recv(np.zeros(1), 0)

    with pytest.raises(CollectiveError) as caught:
        spawn(body, 3, faults=[Fault(kind, 1, call="send")], timeout=20)
    assert caught.value.ranks == (1,), caught.value


@pytest.mark.parametrize("memory", ["shared", "none"], indirect=True)
def test_a_receive_behind_another_is_named_at_its_timeout(memory: str) -> None:
    """Of a send_recv whose receive has not begun, since it comes after one from any rank."""

    def body(comm: kos.Communicator) -> None:
        if comm.rank == 0:
            wild = comm.recv(np.zeros(1), async_op=True, timeout=20)
            with pytest.raises(CollectiveTimeout, match="rank 1 sent nothing with tag 0") as caught:
                comm.send_recv(np.zeros(1), np.zeros(1), 1, 1, timeout=0.3)
            assert caught.value.ranks == (1,)
            wild.cancel(CollectiveError("not needed"))
        else:
            comm.recv(np.zeros(1), 0)
        comm.rendezvous.barrier()
        comm.abort()

    TCPRanks(2).run(body)


@pytest.mark.skipif(_core.native is None, reason=str(_core.unavailable))
def test_a_message_whose_sender_has_cancelled_it_is_passed() -> None:
    """Not as a probe's, and not by a receive of bytes, whose length would be that of the cancelled one."""

    def body(comm: kos.Communicator) -> None:
        if comm.rank == 1:
            work = comm.send_bytes(b"x" * LONG, 0, async_op=True)
            comm.rendezvous.barrier()
            comm.rendezvous.barrier()
            work.cancel(CollectiveMismatch("cancelled, as after the loss of another rank"))
            comm.rendezvous.barrier()
            comm.rendezvous.barrier()
            comm.send_bytes(b"next", 0)
        else:
            comm.rendezvous.barrier()
            assert comm.probe() == (1, np.uint8, LONG)
            comm.rendezvous.barrier()
            comm.rendezvous.barrier()
            assert comm.probe(wait=False) is None
            waiting = comm.recv_bytes(async_op=True)
            comm.rendezvous.barrier()
            assert waiting.wait() == (b"next", 1)
        comm.barrier()

    TCPRanks(2).run(body)


def test_mpi_shows_no_more_messages_than_are_taken() -> None:
    """Messages that no receive takes yet stay in MPI."""
    shown = list[int]()

    def probe(source: int) -> Any:
        shown.append(source)
        rank, tag = (2, 3) if len(shown) == 2 else (1, 3 if len(shown) > 2 else 4)
        return None if len(shown) > 100 else ((rank, tag), (object(), 8, tag))

    mpi = SimpleNamespace(next_check=inf, _arrived={}, _posted={}, _probe=probe, _MPI=SimpleNamespace(ANY_SOURCE=-1))
    for _ in range(2):  # the second time it is known
        assert MPITransport.arrived(mpi, [1, 2], 3)[:1] == (2,)  # type: ignore[arg-type, index]
        assert shown == [-1, -1]


@pytest.mark.parametrize("on", [MockRanks, TCPRanks])
def test_polls_of_many_tags_leave_nothing_behind(on: Any) -> None:
    def body(comm: kos.Communicator) -> int:
        comm.barrier()
        if comm.rank == 0:
            for tag in range(500):
                assert comm.probe(tag=tag, wait=False) is None
        left = sum(isinstance(each, Expected) for each in gc.get_objects())
        comm.barrier()
        return left

    assert max(on(2).run(body)) < 10


@pytest.mark.parametrize("on", [MockRanks, TCPRanks])
def test_a_failure_with_the_text_of_an_orderly_end(on: Any) -> None:
    """It ends a receive from any rank, though another rank could still send."""
    raised, left = threading.Event(), threading.Barrier(3, timeout=TIMEOUT)

    def body(comm: kos.Communicator) -> None:
        comm.barrier()
        left.wait()  # over messages, a rank may still be in the barrier when another has left it
        if comm.rank == 1:
            comm.abort(reason="ValueError: it closed its communicator")
        elif comm.rank == 2:
            assert raised.wait(TIMEOUT)
        else:
            with pytest.raises(RankLost, match="rank 1 is gone: .*ValueError: it closed its communicator"):
                comm.recv(np.zeros(1), timeout=10)
            raised.set()

    on(3).run(body)


def test_a_progress_thread_receives_from_any_rank() -> None:
    def body(comm: kos.Communicator) -> None:
        if comm.rank == 0:
            works = [comm.recv_bytes(async_op=True) for _ in range(2)]
            comm.rendezvous.barrier()
            while any(work.state == "in flight" for work in works):  # no call of kos
                threading.Event().wait(0.001)
            assert sorted(work.wait() for work in works) == [(b"1", 1), (b"2", 2)]
        else:
            comm.rendezvous.barrier()
            comm.send_bytes(b"%d" % comm.rank, 0)

    def rank(rendezvous: Any) -> None:
        with kos.init("tcp", rendezvous=rendezvous, timeout=TIMEOUT, progress_thread=True) as comm:
            body(comm)

    run_ranks(3, rank)


def test_a_transport_without_envelopes_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ThreadTransport, "arrived", Backend.arrived)

    def body(comm: kos.Communicator) -> None:
        calls: dict[str, Callable[[], Any]] = {
            "recv from any rank": lambda: comm.recv(np.zeros(1)), "recv_bytes": lambda: comm.recv_bytes(0),
            "probe": comm.probe, "send_bytes": lambda: comm.send_bytes(b"", 1),
        }  # fmt: skip
        for name, call in calls.items():
            with pytest.raises(BackendUnavailable, match=f"{name}: expected a backend .*, got mock"):
                call()

    spawn(body, 2)


def test_backends_for_gpus_refuse(gpu_run: Any) -> None:
    def body(comm: kos.Communicator) -> None:
        x, name = comm.allocate(3, np.float32), comm.backend_name
        for what, call in {
            "recv from any rank": lambda: comm.recv(x), "recv_bytes": comm.recv_bytes, "probe": comm.probe,
            "send_bytes": lambda: comm.send_bytes(b"", 1 - comm.rank),
        }.items():  # fmt: skip
            with pytest.raises(BackendUnavailable, match=f"{what}: expected a backend for host memory.*, got {name}"):
                call()
        comm.barrier()

    gpu_run(body)
