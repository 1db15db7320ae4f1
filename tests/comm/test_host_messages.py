"""Messages over sockets and through shared memory: unexpected messages, wrong sizes, credits, ranks that abort."""

import json
from typing import Any

import numpy as np
import pytest

import kos
from kos.comm.host import tcp_messages
from kos.testing.conformance.order import messages_keep_their_order
from tests.comm.ranks import on_each_rank
from tests.comm.shared_ranks import needs_core
from tests.comm.tcp_ranks import TCPRanks

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
    if backend.shared is not None:
        assert backend.calls.core.held() == (0, 0, 0)
        return
    for end in backend.transport.peers.values():
        link = end.link
        assert not (end.posted or end._arrived or link.incoming or [*link.sending()])
        known = comm.rendezvous.allgather(json.dumps([end.credits, end.freed]).encode())
        (credits, _), (_, freed) = (json.loads(known[rank]) for rank in (comm.rank, 1 - comm.rank))
        assert credits + freed == tcp_messages.CREDIT_BYTES, "some are lost"


@pytest.mark.parametrize("count", [0, 1, EAGER // 2, EAGER // 2 + 1, EAGER, EAGER + 1, LONG])
@on_each_rank("run")
def test_messages_that_arrive_before_their_receive(comm, /, count):
    messages_keep_their_order(comm, 0, np.uint8, [count])
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
            lengths = [len(data) for queue in end._arrived.values() for _, (_, _, data, _) in queue if data is not None]
            assert number > len(lengths) > number // 8
            assert sum(lengths) + len(lengths) * tcp_messages.OVERHEAD_BYTES <= credit
            for i in range(number):
                assert (comm.recv(np.zeros(count, np.uint8), 0, i % 3) == i % 251).all(), i
        assert_nothing_is_left(comm)

    TCPRanks(2).run(body)
