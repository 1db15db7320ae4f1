"""Works, persistent starts and tensors of torch: calls that the compiled core knows need no Python here either."""

import gc
import threading
import weakref
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

import kos
from kos.errors import CollectiveError, CollectiveMismatch, CollectiveTimeout, InvalidArgument
from tests.comm.gpu_eager import hits
from tests.comm.ranks import on_each_rank
from tests.comm.shared_ranks import needs_core
from tests.comm.tcp_ranks import TCPRanks, run_ranks

pytestmark = needs_core

needs_torch = pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")  # in a rank it is too late to skip


@pytest.fixture
def run():
    return TCPRanks(2).run


def settle(comm: Any) -> None:
    """Nothing is in flight."""
    assert not comm.backend.engine.active and comm.backend.calls.core.held() == (0, 0, False)


@on_each_rank("run")
def test_a_work_in_flight_is_advanced_by_other_waits(comm, /):
    x, y = np.ones(3), np.ones(5)
    for _ in range(3):
        comm.all_reduce(x, async_op=True).wait()
        comm.all_reduce(y)
    x[:] = y[:] = 1
    first = comm.all_reduce(x, async_op=True)  # by the core
    second = comm.all_reduce(y, async_op=True)  # by Python, as another one is in flight
    assert second.wait() is y and first.wait() is x
    assert (x == comm.size).all() and (y == comm.size).all()
    first = comm.all_reduce(x, async_op=True)
    comm.synchronize()
    assert first.done() and (x == comm.size**2).all()
    work = comm.all_reduce(x, async_op=True)
    while not work.done():
        pass
    assert "complete" in repr(work)
    settle(comm)


@on_each_rank("run")
def test_a_message_in_flight_is_cancelled_at_its_timeout(comm, /):
    x, peer = np.zeros(4), 1 - comm.rank
    for _ in range(3):
        work = comm.recv(x, peer, async_op=True)
        comm.send(np.ones(4), peer)
        work.wait()
    before = hits(comm)
    late = comm.recv(x, peer, async_op=True)
    assert hits(comm) == before + 1
    with pytest.raises(CollectiveTimeout, match="recv #"):
        late.wait(0.2)
    x[:] = 0
    comm.rendezvous.barrier()
    comm.send(np.full(4, 7.0), peer)  # for the next receive
    assert (comm.recv(np.zeros(4), peer) == 7).all() and (x == 0).all()
    settle(comm)


@on_each_rank("run")
def test_a_work_leaves_the_record_of_a_later_call(comm, /):
    """The recorder keeps 1,024: while a receive is in flight, its entry becomes that of another call."""
    x, y, peer = np.zeros(4), np.ones(2), 1 - comm.rank
    for _ in range(3):
        work = comm.recv(x, peer, async_op=True)
        comm.send(np.ones(4), peer)
        work.wait()
    work = comm.recv(x, peer, async_op=True)
    for _ in range(20):  # none of these waits, so that nothing advances the receive
        for _ in range(30):
            comm.send(y, peer, tag=1)
        comm.rendezvous.barrier()
        for _ in range(30):
            comm.recv(y, peer, tag=1)
    slot = work.record
    assert slot is not None and slot[0] is not work.prepared.description
    completed = slot[-2]
    comm.rendezvous.barrier()
    comm.send(np.ones(4), peer)
    work.wait()
    assert slot[-2] == completed
    settle(comm)


@on_each_rank("run")
def test_a_failure_ends_a_work_in_flight(comm, /):
    part, x = comm.duplicate(), np.ones(3)
    for _ in range(3):
        part.all_reduce(x, async_op=True).wait()
    work = part.all_reduce(x if comm.rank == 0 else np.ones(4), async_op=True)
    with pytest.raises(CollectiveError, match="all_reduce #3"):
        work.wait()
    with pytest.raises(CollectiveError):
        work.wait()
    part.abort()
    comm.barrier()


@on_each_rank("run")
def test_a_persistent_start_must_be_waited_for(comm, /):
    x = np.ones(3)
    persistent = comm.all_reduce_init(x)
    for _ in range(3):
        persistent.start().wait()
    work = persistent.start()
    with pytest.raises(InvalidArgument, match="expected the previous start to be waited for"):
        persistent.start()
    comm.synchronize()
    again = persistent.start()
    assert again is not work  # somebody has the first one
    again.wait()
    assert (x == comm.size**5).all()
    with comm.batch():
        persistent.start()
        with pytest.raises(InvalidArgument, match="one start in a batch"):
            persistent.start()
    assert (x == comm.size**6).all()
    settle(comm)


@on_each_rank("run")
def test_a_persistent_start_that_fails_at_once_raises_in_wait(comm, /):
    x, other = np.ones(3), np.ones(4)
    for _ in range(2):
        if comm.rank == 0:
            for message in (x, x, x, other):
                comm.send(message, 1)
        comm.barrier()
    if comm.rank == 1:
        persistent = comm.recv_init(x, 0)
        for _ in range(2):
            for _ in range(3):
                persistent.start().wait()
            work = persistent.start()  # its message has arrived
            with pytest.raises(InvalidArgument, match="expected the previous start to be waited for"):
                persistent.start()
            with pytest.raises(CollectiveMismatch, match="expected 3 elements .* got 4"):
                work.wait()
    comm.barrier()


@on_each_rank("run")
def test_persistents_end_with_their_last_reference(comm, /):
    """Nothing refers to them in a circle."""
    persistent = comm.all_reduce_init(np.ones(3))
    alive = weakref.ref(persistent)
    for _ in range(3):
        persistent.start().wait()
    gc.disable()
    try:
        del persistent
        assert alive() is None
    finally:
        gc.enable()
    comm.all_reduce_init(np.ones(2)).start().wait()


@on_each_rank(TCPRanks(2).run)
def test_a_persistent_of_a_closed_communicator_is_refused(comm, /):
    part = comm.duplicate()
    persistent = part.barrier_init()
    for _ in range(3):
        persistent.start().wait()
    part.close()
    with pytest.raises(CollectiveError, match="closed"):
        persistent.start()
    comm.barrier()


def test_a_progress_thread_gets_the_works():
    def body(rendezvous):
        with kos.init("tcp", rendezvous=rendezvous, progress_thread=True) as comm:
            x, y = np.ones(3), np.ones(1 << 20)
            for _ in range(3):
                comm.all_reduce(x, async_op=True).wait()
            assert hits(comm) == 0
            work, pause = comm.all_reduce(y, async_op=True), threading.Event()
            while work._steps is not None:
                pause.wait(0.001)
            assert (work.wait() == comm.size).all()

    run_ranks(2, body)


@needs_torch
@on_each_rank("run")
def test_tensors_of_torch_hit(comm, /):
    import torch

    if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        pytest.skip("needs a torch with DLPack's C exchange API")
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        x, out = torch.ones(2, 3, dtype=dtype), torch.zeros(2, 3, dtype=dtype)
        for turn in range(5):
            before = hits(comm)
            x[:] = turn + comm.rank
            total = sum(turn + rank for rank in range(comm.size))
            assert comm.all_reduce(x, out=out) is out and (out == total).all() and (x == turn + comm.rank).all()
            assert comm.all_reduce(x, async_op=True).wait() is x and (x == total).all()
            assert turn < 2 or hits(comm) - before == 2
    part = torch.ones(6, dtype=torch.int64)[2:4]
    for _ in range(4):
        part.fill_(1)
        assert (comm.all_reduce(part) == comm.size).all()


@needs_torch
@on_each_rank("run")
def test_other_tensors_are_other_calls(comm, /):
    import torch

    x = torch.ones(4)
    for _ in range(4):
        comm.all_reduce(x)
    x.requires_grad_()
    with pytest.raises(InvalidArgument, match="grad"):
        comm.all_reduce(x)
    with pytest.raises(InvalidArgument, match="contiguous"):
        comm.all_reduce(torch.ones(8)[::2])
    with pytest.raises(InvalidArgument, match="negative bit"):
        comm.all_reduce(torch._neg_view(torch.ones(4)))
    for other in (torch.ones(4, dtype=torch.float64), torch.ones(2, 2), torch.ones(4, dtype=torch.int32)):
        assert (comm.all_reduce(other) == comm.size).all()
    assert (comm.all_reduce(np.ones(4, np.float32)) == comm.size).all()
    z = torch.tensor([1 + 2j, 3 - 4j])
    for _ in range(4):
        comm.broadcast(z.clone(), 0)
    with pytest.raises(InvalidArgument, match="conj"):
        comm.broadcast(z.conj(), 0)


@needs_torch
@on_each_rank("run")
def test_misaligned_tensors_are_refused(comm, /):
    """Also if the core knows such calls."""
    import torch

    memory = bytearray(8 * 4 + 1)
    for _ in range(4):
        comm.all_reduce(torch.ones(8))
    with pytest.raises(InvalidArgument, match="x: expected memory aligned for float32"):
        comm.all_reduce(torch.frombuffer(memory, dtype=torch.float32, count=8, offset=1))
    assert (comm.all_reduce(torch.ones(8)) == comm.size).all()


@needs_torch
@on_each_rank("run")
def test_a_call_that_has_begun_runs_no_python(comm, /, monkeypatch):
    """It is not in the queue yet: a thread that ran now would put its messages where nobody looks for them."""
    import torch

    x, left = torch.ones(4), (comm.rank - 1) % comm.size
    for turn in range(6):
        if turn == 3:
            monkeypatch.setattr(torch.Tensor, "detach", lambda tensor: pytest.fail("called amid a call"))
        received = comm.recv(x.fill_(9), left, async_op=True)  # is not there yet
        comm.barrier()
        comm.send(torch.full((4,), float(comm.rank)), (comm.rank + 1) % comm.size)
        assert (received.wait() == left).all()
