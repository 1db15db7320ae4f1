"""Messages of bytes, probes, and waits of every kind, from one rank or from any."""

import gc

import numpy as np
import pytest

from kos import _core
from kos.comm.contract import Backend
from kos.comm.host.threads import ThreadTransport
from kos.comm.matching import Expected
from kos.errors import BackendUnavailable, CollectiveMismatch, InvalidArgument
from kos.testing import spawn
from tests.comm.any_source import LONG, kind, run, wait_for_marks
from tests.comm.ranks import MockRanks, on_each_rank
from tests.comm.tcp_ranks import TCPRanks, run_processes

__all__ = ["kind", "run"]  # fixtures


@on_each_rank("run")
def test_a_receive_of_bytes_holds_up_no_other_sender(comm, /):
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


@pytest.mark.parametrize("count", [0, 1, 1 << 16, LONG])
@on_each_rank("run")
def test_bytes_of_any_length(comm, /, count):
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
def test_bytes_are_arrays_of_uint8(comm, /):
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
def test_a_probe_takes_nothing(comm, /):
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
def test_a_rank_of_minus_one_is_not_any_rank(comm, /):
    """Also while a receive from any rank waits."""
    receive = comm.recv(np.zeros(1), tag=1, async_op=True)
    with pytest.raises(InvalidArgument, match="src: expected a rank from 0"):
        comm.recv(np.zeros(1), -1, 1, async_op=True)
    comm.send(np.full(1, 4.0), (comm.rank + 1) % comm.size, 1)
    assert receive.wait()[0][0] == 4
    comm.barrier()


@on_each_rank(spawn, 1)
def test_a_group_of_one_has_no_other_rank(comm, /):
    for call in (lambda: comm.recv(np.zeros(1)), comm.recv_bytes, comm.probe):
        with pytest.raises(InvalidArgument, match="src: expected another rank, got None in a group of one"):
            call()


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
def test_a_rank_whose_process_ends_is_named(call, core):
    (code, output), _, _ = run_processes(DEAD.replace("{call}", call), 3, KOS_CORE=core)
    assert code == 0 and "(b'last', 1)" in output, output
    assert "(1,) " in output and "rank 1 is gone" in output, output


@pytest.mark.skipif(_core.native is None, reason=str(_core.unavailable))
@on_each_rank(TCPRanks(2).run)
def test_a_message_whose_sender_has_cancelled_it_is_passed(comm, /):
    """Not as a probe's, and not by a receive of bytes, whose length would be that of the cancelled one."""
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


@pytest.mark.parametrize("on", [MockRanks, TCPRanks])
def test_polls_of_many_tags_leave_nothing_behind(on):
    def body(comm):
        comm.barrier()
        if comm.rank == 0:
            for tag in range(500):
                assert comm.probe(tag=tag, wait=False) is None
        left = sum(isinstance(each, Expected) for each in gc.get_objects())
        comm.barrier()
        return left

    assert max(on(2).run(body)) < 10


def test_a_transport_without_envelopes_refuses(monkeypatch):
    monkeypatch.setattr(ThreadTransport, "arrived", Backend.arrived)

    def body(comm):
        calls = {
            "recv from any rank": lambda: comm.recv(np.zeros(1)), "recv_bytes": lambda: comm.recv_bytes(0),
            "probe": comm.probe, "send_bytes": lambda: comm.send_bytes(b"", 1),
        }  # fmt: skip
        for name, call in calls.items():
            with pytest.raises(BackendUnavailable, match=f"{name}: expected a backend .*, got mock"):
                call()

    spawn(body, 2)


@on_each_rank("gpu_run")
def test_backends_for_gpus_refuse(comm, /):
    x, name = comm.allocate(3, np.float32), comm.backend_name
    for what, call in {
        "recv from any rank": lambda: comm.recv(x), "recv_bytes": comm.recv_bytes, "probe": comm.probe,
        "send_bytes": lambda: comm.send_bytes(b"", 1 - comm.rank),
    }.items():  # fmt: skip
        with pytest.raises(BackendUnavailable, match=f"{what}: expected a backend for host memory.*, got {name}"):
            call()
    comm.barrier()
