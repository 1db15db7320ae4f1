"""Calls that the compiled core makes by itself equal those through Python, and detect whatever has changed.

Works and tensors of torch need no Python either, once the core has cached such calls. Python code
that runs within a call may itself make calls, set timeouts, or clear the cache of the core. Finalizers are an example:
they run in a garbage collection, or when an object is freed.
"""

import gc
import sys
import threading
import time
import weakref
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

import kos
from kos.comm.communicator import Communicator
from kos.comm.recorder import SLOTS
from kos.errors import CollectiveError, CollectiveMismatch, CollectiveTimeout, InvalidArgument
from tests.comm.gpu_eager import call_during_start, hits
from tests.comm.ranks import on_each_rank
from tests.comm.shared_ranks import needs_core
from tests.comm.tcp_ranks import TCPRanks, both_ranks, run_ranks
from tests.core.reentering import Cycle

pytestmark = needs_core
needs_torch = pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")  # in a rank it is too late to skip


@pytest.fixture
def run():
    return TCPRanks(2).run


@on_each_rank("run")
def test_nothing_holds_the_arrays_or_the_communicator(comm, /):
    x = np.ones(1000)
    seen = weakref.ref(x)
    for _ in range(3):
        comm.all_reduce(x)
    del x
    assert seen() is None
    part = comm.duplicate()
    for _ in range(3):
        part.barrier()
    part.close()
    gone = weakref.ref(part)
    del part
    until = time.monotonic() + 10
    while gone() is not None and time.monotonic() < until:
        gc.collect()  # another rank, a thread of this process, may be collecting
        time.sleep(0.01)
    assert gone() is None


@on_each_rank(TCPRanks(3).run)
def test_a_call_is_never_kept_as_another(comm, /):
    """Between a cached call and its arguments come calls of batches, calls with a schedule, and calls that raise."""
    x, y = np.ones(4), np.empty(4)
    if comm.rank == 0:
        for dst in (1, 2):
            with comm.batch():
                comm.send(x, dst)
                comm.recv(y, dst)
        with pytest.raises(InvalidArgument):
            comm.send(x, 3)
        for value, dst in ((42.0, 2), (43.0, 1), (44.0, 2)):
            comm.send(np.full(4, value), dst)
    else:
        with comm.batch():
            comm.recv(y, 0)
            comm.send(x, 0)
        for value in {1: (43.0,), 2: (42.0, 44.0)}[comm.rank]:
            assert comm.recv(y, 0).tolist() == [value] * 4
    for _ in range(3):
        z = comm.all_reduce(x.copy(), algorithm="ring")
        before = hits(comm)
        z = comm.all_reduce(z, algorithm="ring")
        assert hits(comm) == before, "a call by a schedule ran in the core"


@on_each_rank(TCPRanks(3).run)
def test_threads_do_not_keep_each_others_calls(comm, /):
    """While one thread waits in a send, another thread sends the same array to another rank."""
    x = np.zeros(1_000_000)  # each send waits for its receive
    if comm.rank == 0:
        other = threading.Thread(target=lambda: (time.sleep(0.1), comm.send(x, 2)))
        other.start()
        comm.send(x, 1)
        other.join()
        comm.send(x + 1, 1)
        comm.send(x + 2, 2)
    else:
        time.sleep(0.3 * comm.rank)
        assert [comm.recv(x, 0)[0] for _ in range(2)] == [0.0, comm.rank]


@on_each_rank(TCPRanks(2).run)
def test_a_call_beside_others_is_kept_once(comm, /):
    """The cache is full.  Then one cached call and a new one alternate many times, while a Work is outstanding."""
    arrays = [np.ones(n) for n in range(1, 32)]  # with the one that is outstanding
    for x in arrays[1:] * 2:
        comm.all_reduce(x)
    work = comm.all_reduce(np.ones(3), async_op=True)
    for _ in range(40):
        comm.all_reduce(arrays[0])
        comm.all_reduce(arrays[1])
    work.wait()
    before = hits(comm)
    for x in arrays:
        comm.all_reduce(x)
    assert hits(comm) - before == len(arrays)


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
    """The recorder keeps 1,024 entries.  While a receive is in flight, another call takes over its entry."""
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
def test_a_receive_that_fails_at_once_raises_in_wait(comm, /):
    x, other = np.ones(3), np.ones(4)
    for _ in range(2):
        if comm.rank == 0:
            for message in (x, x, x, other):
                comm.send(message, 1)
        comm.barrier()
    if comm.rank == 1:
        for _ in range(2):
            for _ in range(3):
                comm.recv(x, 0, async_op=True).wait()
            work = comm.recv(x, 0, async_op=True)  # its message has arrived
            with pytest.raises(CollectiveMismatch, match="expected 3 elements .* got 4"):
                work.wait()
    comm.barrier()


@on_each_rank(TCPRanks(2).run)
def test_calls_of_a_closed_communicator_are_refused(comm, /):
    closed, aborted = comm.duplicate(), comm.duplicate()
    for call in (closed.barrier, aborted.barrier):
        for _ in range(3):
            call()
    closed.close()
    aborted.abort()
    for call in (closed.barrier, aborted.barrier):
        with pytest.raises(CollectiveError, match="closed"):
            call()
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
    """Also if the core has cached such calls."""
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
    """The call is not in the queue yet.

    A thread that ran now would queue its messages where no rank looks for them.
    """
    import torch

    x, left = torch.ones(4), (comm.rank - 1) % comm.size
    for turn in range(6):
        if turn == 3:
            monkeypatch.setattr(torch.Tensor, "detach", lambda tensor: pytest.fail("called amid a call"))
        received = comm.recv(x.fill_(9), left, async_op=True)  # is not there yet
        comm.barrier()
        comm.send(torch.full((4,), float(comm.rank)), (comm.rank + 1) % comm.size)
        assert (received.wait() == left).all()


# What Python runs within a call.


@pytest.fixture
def pair():
    """Both ranks in one thread: rank 1 begins its calls first."""
    with both_ranks() as made:
        gc.collect()
        gc.freeze()  # collections are then quick
        yield made


def begin(other: Any, *arrays: Any, **options: Any) -> Callable[[], None]:
    """Rank 1 begins an all_reduce of each array; returns what waits for them."""
    works = [type(other).all_reduce(other, each, async_op=True, **options) for each in arrays]

    def finish() -> None:
        while works:
            works[:] = [work for work in works if not work.done()]

    return finish


def make_known(pair: list[Any], *shapes: Any, **options: Any) -> None:
    for shape in shapes:
        for _ in range(3):
            finish = begin(pair[1], np.ones(shape), **options)
            pair[0].all_reduce(np.ones(shape), **options)
            finish()


def collect_within(call: Callable[..., Any], x: Any, at_end: Callable[[], Any]) -> None:
    """Make a call in which garbage is collected, whose finalizer runs ``at_end``."""
    threshold = gc.get_threshold()
    gc.collect()
    gc.disable()
    try:
        Cycle(at_end)
        gc.set_threshold(1)
        gc.enable()
        call(x)
    finally:
        gc.set_threshold(*threshold)
        gc.enable()


def call_from_code_that_ends(comm: Any, x: Any, at_end: Callable[[], Any]) -> weakref.ref[Any]:
    """Make a call from a line of code that only the recorder keeps; ``at_end`` runs once it does not."""
    code = compile("call(x)", "a line", "exec")
    exec(code, {"call": comm.all_reduce, "x": x})
    return weakref.ref(code, lambda _: at_end())


def fill_recorder(pair: list[Any], shape: Any, count: int = SLOTS - 1) -> None:
    for _ in range(count):
        finish = begin(pair[1], np.ones(shape))
        pair[0].all_reduce(np.ones(shape))
        finish()


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="garbage is collected between two instructions")
def test_a_finalizer_sets_the_timeout_and_makes_a_call_of_the_same_operation(pair):
    """This clears the cache of the core, which holds the call that the core is about to make."""
    one, other = pair
    make_known(pair, 3, 5)
    for _ in range(20):
        x, y = np.full(3, 2.0), np.full(3, 5.0)
        within, theirs = ([np.ones(5) for _ in range(4)] for _ in range(2))
        finish = begin(other, *theirs, y)

        def again(within=within):
            one.timeout = one.timeout
            for each in within:
                one.all_reduce(each)

        collect_within(one.all_reduce, x, again)
        finish()
        assert x.tolist() == y.tolist() == [7.0] * 3
        assert all((each == 2).all() for each in within + theirs)


def test_a_call_within_the_record_of_another_is_the_next_one(pair):
    """Overwriting an entry of the recorder frees the object that it kept.

    The finalizer of that object makes the call.
    """
    one, other = pair
    make_known(pair, 3, 5)
    within, outer, x, y = np.ones(5), np.ones(3), np.ones(3), np.ones(3)
    finish = begin(other, x)
    kept = call_from_code_that_ends(one, y, lambda: (setattr(one, "timeout", one.timeout), one.all_reduce(within)))
    finish()
    fill_recorder(pair, 3)
    assert kept() is not None
    before, theirs = hits(one), [np.full(3, 2.0), np.full(5, 3.0)]
    finish = begin(other, *theirs)
    one.all_reduce(outer)
    finish()
    assert kept() is None and hits(one) == before + 1
    assert outer.tolist() == theirs[0].tolist() == [3.0] * 3
    assert within.tolist() == theirs[1].tolist() == [4.0] * 5


def test_a_call_with_wrong_arguments_hides_nothing(pair):
    one, other = pair
    x = np.zeros(3)
    for count in range(6):
        if count == 4:
            with pytest.raises(TypeError):
                one.all_reduce(x, 1, 2)
        finish, before = begin(other, np.ones(3)), hits(one)
        one.all_reduce(x)
        finish()
        assert hits(one) == before + (count > 0)
    assert x.tolist() == [6.0] * 3


def test_a_call_within_the_first_one_of_a_signature_is_not_taken_for_it(pair):
    """For example, a trace function makes it, through the method of the class, on the same array."""
    one, other = pair
    x, theirs = np.full(3, 2.0), [np.full(3, 5.0), np.full(3, 5.0)]
    finish = begin(other, theirs[0], op=kos.ReduceOp.MAX), begin(other, theirs[1])

    call_during_start(one, x, "call", lambda: Communicator.all_reduce(one, x, kos.ReduceOp.MAX))
    for each in finish:
        each()
    assert x.tolist() == theirs[1].tolist() == [10.0] * 3
    for _ in range(3):
        x[:], theirs[0][:] = 2, 5
        last = begin(other, theirs[0])
        one.all_reduce(x)
        last()
        assert x.tolist() == theirs[0].tolist() == [7.0] * 3
