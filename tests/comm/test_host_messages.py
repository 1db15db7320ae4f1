"""Messages over sockets and through shared memory: unexpected messages, wrong sizes, credits, ranks that abort."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kos
from kos.comm.host import tcp_messages
from kos.comm.host.shared import direct
from kos.comm.host.shared import messages as shared_messages
from kos.comm.host.shared.segment import ANSWERS
from kos.errors import CollectiveError, CollectiveMismatch, RankLost
from tests.comm.ranks import on_each_rank, receive_in_another_order
from tests.comm.tcp_ranks import TIMEOUT, TCPRanks
from tests.comm.test_jobs import mpirun, program
from tests.comm.test_shared_failures import job
from tests.launcher import needs_mpirun

EAGER, LONG = 256 << 10, 3 << 20  # bytes; the room of a mailbox is smaller than LONG
MODULES = {"tcp": tcp_messages, "shared": shared_messages}


@pytest.fixture(params=MODULES)
def kind(request: pytest.FixtureRequest) -> str:
    if request.param == "tcp":
        request.getfixturevalue("apart")
    return request.param


@pytest.fixture
def run(kind: str) -> Callable[..., Any]:
    return TCPRanks(2).run


def ends(comm: kos.Communicator) -> list[Any]:
    """The connection or mailbox to each other rank."""
    transport: Any = comm.backend.transport  # type: ignore[attr-defined]
    return list(transport._boxes.values() if hasattr(transport, "_boxes") else transport.peers.values())


def kept(comm: kos.Communicator) -> list[bytes]:
    """The data of messages that arrived before their receive."""
    [end] = ends(comm)
    if hasattr(end, "arrived"):
        return [data for what, _, data, _ in end.arrived if what < shared_messages._RTS]
    return [each.data for queue in end._arrived.values() for each in queue if each.data is not None]


def assert_nothing_is_left(comm: kos.Communicator) -> None:
    comm.barrier()
    for end in ends(comm):
        if hasattr(end, "arrived"):
            assert not (end.arrived or any(end.messages()))
            assert len(end.free) == ANSWERS and end.words[end.into] == end.taken
        else:
            assert not (end._posted or end._arrived or end._announced or end._incoming or end._outgoing)
            known = comm.rendezvous.allgather(json.dumps([end._credits, end._freed]).encode())
            (credits, _), (_, freed) = (json.loads(known[rank]) for rank in (comm.rank, 1 - comm.rank))
            assert credits + freed == tcp_messages.CREDIT_BYTES, "some are lost"


@pytest.mark.parametrize("count", [0, 1, EAGER // 2, EAGER // 2 + 1, EAGER, EAGER + 1, LONG])
@on_each_rank("run")
def test_messages_that_arrive_before_their_receive(comm: kos.Communicator, /, count: int) -> None:
    receive_in_another_order(comm, count)
    assert_nothing_is_left(comm)


@pytest.mark.parametrize("count", [1, EAGER + 1, LONG])
def test_messages_if_the_senders_memory_cannot_be_read(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(direct.Direct, "_read_token", lambda *_: b"")
    TCPRanks(2).run(lambda comm: (receive_in_another_order(comm, count), assert_nothing_is_left(comm)))


@needs_mpirun
@pytest.mark.parametrize("given_up", [False, True])
@pytest.mark.parametrize("count", [1, EAGER])
def test_a_message_that_is_not_received_while_its_number_comes_round(
    tmp_path: Path, count: int, given_up: bool
) -> None:
    """MPI would give its data to the receive of a later message with that number."""
    text = f"""
import itertools
from kos.comm.host.shared import direct, messages
direct.Direct._read_token, messages.CREDIT_BYTES = lambda *_: b"", 0  # all messages are sent over MPI
comm = kos.init("mpi", timeout=60)
part = comm.duplicate()  # whose messages have the same numbers
if comm.rank == 0:
    works = [part.send(np.full({count}, 1.0), 1, tag=1, async_op=True)]
    if {given_up}:
        try:
            works.pop().wait(0.01)
        except kos.errors.CollectiveTimeout:
            pass
    shared = comm.rendezvous.shared
    shared.numbers = itertools.count(next(shared.numbers) - 1 + 2**20)
    works.append(comm.send(np.full({count}, 2.0), 1, tag=2, async_op=True))
    for work in works:
        work.wait()
else:
    got = [comm.recv(np.zeros({count}), 0, tag=2)]
    if not {given_up}:
        got.append(part.recv(np.zeros({count}), 0, tag=1))
    print([int(x[-1]) for x in got], flush=True)
comm.barrier()
os._exit(0)
"""
    assert job(tmp_path, 2, text) == ["[2]" if given_up else "[2, 1]"]


@needs_mpirun
def test_a_message_that_nobody_receives_before_the_program_ends(tmp_path: Path) -> None:
    """Its Work is freed after MPI_Finalize, where a test of its request would end the job with an error."""
    text = f"""
from kos.comm.host.shared import direct, messages
direct.Direct._read_token, messages.CREDIT_BYTES = lambda *_: b"", 0  # all messages are sent over MPI
comm = kos.init("mpi", timeout=60)
part = comm.duplicate()
if comm.rank == 0:
    work = part.send(np.ones({EAGER}), 1, async_op=True)
comm.barrier()
"""
    done = mpirun(2, program(tmp_path, text), fresh=True)  # a forked one frees nothing at its end
    assert done.returncode == 0 and "MPI_FINALIZE" not in done.stderr, done.stderr


@needs_mpirun
def test_empty_messages_over_mpi(tmp_path: Path) -> None:
    """Those with which all_to_all_v ends: a send is complete once received, so no rank waits for its send first."""
    text = """
from kos.comm.host.shared import direct, messages
direct.Direct._read_token, messages.CREDIT_BYTES = lambda *_: b"", 0  # all messages are sent over MPI
with kos.init("mpi", timeout=60) as comm:
    x = np.full(comm.size, float(comm.rank))
    with comm.batch():
        out = comm.all_to_all_v(x, [1] * comm.size, [1] * comm.size)
    print(out.tolist(), flush=True)
"""
    assert job(tmp_path, 3, text) == ["[0.0, 1.0, 2.0]"] * 3


@pytest.mark.parametrize(
    ("count", "dtype"), [(0, np.uint8), (4, np.uint8), (LONG, np.uint8), (3, np.int8), (LONG, np.float32)]
)
@pytest.mark.parametrize("posted", ["before", "after"])
@on_each_rank("run")
def test_message_of_another_size_or_dtype(comm: kos.Communicator, /, count: int, dtype: Any, posted: str) -> None:
    """The receiver raises.  The sender of a long message, which was not read, raises too."""
    message = f"#0 .*: rank 1 expected 3 elements of uint8 from rank 0, got {count} elements of {np.dtype(dtype).name}"
    expected = np.full(3, 7, np.uint8)
    if comm.rank == 1 and posted == "before":
        work = comm.recv(expected, 0, 7, async_op=True)
    comm.rendezvous.barrier()
    if comm.rank == 0:
        work = comm.send(np.zeros(count, dtype), 1, 7, async_op=True)
    comm.barrier()
    if comm.rank == 1 and posted == "after":
        work = comm.recv(expected, 0, 7, async_op=True)
    if comm.rank == 0 and count < LONG:
        work.wait()
    else:
        with pytest.raises(CollectiveMismatch, match=message):
            work.wait()
    assert (expected == 7).all()
    swapped = comm.send_recv(np.full(2, comm.rank), np.zeros(2, int), 1 - comm.rank, 1 - comm.rank)
    assert (swapped == 1 - comm.rank).all(), "the connection is not fit any more"
    assert_nothing_is_left(comm)


@pytest.mark.parametrize("count", [0, 1000, EAGER // 2])
def test_a_sender_that_runs_ahead_does_not_fill_the_receivers_memory(
    kind: str, run: Any, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    module: Any = MODULES[kind]
    monkeypatch.setattr(module, "CREDIT_BYTES", credit := 1 << 19 if count == EAGER // 2 else 1 << 16)
    number = 3 * credit // (count + module.OVERHEAD_BYTES)

    def body(comm: kos.Communicator) -> None:
        if comm.rank == 0:
            works = [comm.send(np.full(count, i % 251, np.uint8), 1, i % 3, async_op=True) for i in range(number)]
            comm.send(np.ones(1), 1, 3)
            for work in works:
                work.wait()
        else:
            comm.recv(np.ones(1), 0, 3)  # all messages that can arrive have arrived
            lengths = [len(data) for data in kept(comm)]
            assert number > len(lengths) > number // 8
            assert sum(lengths) + len(lengths) * module.OVERHEAD_BYTES <= credit
            for i in range(number):
                assert (comm.recv(np.zeros(count, np.uint8), 0, i % 3) == i % 251).all(), i
        assert_nothing_is_left(comm)

    run(body)


def test_an_announced_message_of_a_rank_that_aborts(run: Any) -> None:
    """Its data was never sent.  The receive names the rank, as for a message that was not announced."""
    gone = threading.Event()

    def body(comm: kos.Communicator) -> None:
        part, x = comm.duplicate(), np.ones(LONG, np.uint8)
        if comm.rank == 1:
            work = part.send(x, 0, async_op=True)
            part.abort(reason="it had enough")
            with pytest.raises(CollectiveError, match="send #0 .*: the communicator was aborted"):
                work.wait()
            x[:] = 7
            gone.set()
        else:
            assert gone.wait(TIMEOUT)
            for count in (1, LONG):  # the first one reads the announcement
                with pytest.raises(RankLost, match="recv #. .* rank 1 is gone: it had enough"):
                    part.recv(np.zeros(count, np.uint8), 1, tag=int(count == 1))
        comm.barrier()

    run(body)
