"""Messages over sockets and through shared memory: unexpected messages, wrong sizes, credits, ranks that abort."""

import json
import threading
from typing import Any

import numpy as np
import pytest

import kos
from kos.comm.host import tcp_messages
from kos.errors import CollectiveError, CollectiveMismatch, RankLost
from kos.testing.conformance.order import messages_keep_their_order
from tests.comm.ranks import on_each_rank
from tests.comm.shared_ranks import needs_core
from tests.comm.tcp_ranks import TIMEOUT, TCPRanks

pytestmark = needs_core

EAGER, LONG = 256 << 10, 3 << 20  # bytes; the room of a mailbox is smaller than LONG


@pytest.fixture(params=["tcp", "shared"])
def kind(request):
    if request.param == "tcp":
        request.getfixturevalue("apart")
    return request.param


@pytest.fixture
def run(kind):
    return TCPRanks(2).run


def assert_nothing_is_left(comm: kos.Communicator) -> None:
    comm.barrier()
    backend: Any = comm.backend
    if backend.node is not None:
        assert backend.calls.core.held() == (0, 0, 0)
        return
    for end in backend.transport.peers.values():
        assert not (end._posted or end._arrived or end._announced or end._incoming or end._outgoing)
        known = comm.rendezvous.allgather(json.dumps([end._credits, end._freed]).encode())
        (credits, _), (_, freed) = (json.loads(known[rank]) for rank in (comm.rank, 1 - comm.rank))
        assert credits + freed == tcp_messages.CREDIT_BYTES, "some are lost"


@pytest.mark.parametrize("count", [0, 1, EAGER // 2, EAGER // 2 + 1, EAGER, EAGER + 1, LONG])
@on_each_rank("run")
def test_messages_that_arrive_before_their_receive(comm, /, count):
    messages_keep_their_order(comm, 0, np.uint8, [count])
    assert_nothing_is_left(comm)


@pytest.mark.parametrize(
    ("count", "dtype"), [(0, np.uint8), (4, np.uint8), (LONG, np.uint8), (3, np.int8), (LONG, np.float32)]
)
@pytest.mark.parametrize("posted", ["before", "after"])
@on_each_rank("run")
def test_message_of_another_size_or_dtype(comm, /, count, dtype, posted):
    """The receiver raises.  The sender of a long message, which was not read, raises too."""
    bytes_alike = count * np.dtype(dtype).itemsize == 3  # as if it were received by recv_bytes
    wanted = "elements of uint8" if bytes_alike else "3 elements of uint8"
    message = f"#0 .*: rank 1 expected {wanted} from rank 0, got {count} elements of {np.dtype(dtype).name}"
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
def test_a_sender_that_runs_ahead_does_not_fill_the_receivers_memory(count, monkeypatch, apart):
    monkeypatch.setattr(tcp_messages, "CREDIT_BYTES", credit := 1 << 19 if count == EAGER // 2 else 1 << 16)
    number = 3 * credit // (count + tcp_messages.OVERHEAD_BYTES)

    def body(comm):
        if comm.rank == 0:
            works = [comm.send(np.full(count, i % 251, np.uint8), 1, i % 3, async_op=True) for i in range(number)]
            comm.send(np.ones(1), 1, 3)
            for work in works:
                work.wait()
        else:
            comm.recv(np.ones(1), 0, 3)  # all messages that can arrive have arrived
            transport = comm.backend.transport
            [end] = transport.peers.values()
            lengths = [len(data) for queue in end._arrived.values() for _, _, data, _ in queue if data is not None]
            assert number > len(lengths) > number // 8
            assert sum(lengths) + len(lengths) * tcp_messages.OVERHEAD_BYTES <= credit
            for i in range(number):
                assert (comm.recv(np.zeros(count, np.uint8), 0, i % 3) == i % 251).all(), i
        assert_nothing_is_left(comm)

    TCPRanks(2).run(body)


def test_an_announced_message_of_a_rank_that_aborts(run):
    """Its data was never sent.  The receive names the rank, as for a message that was not announced."""
    gone = threading.Event()

    def body(comm):
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
