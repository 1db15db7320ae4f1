"""Failures of the peer backend without a GPU: ranks that do not arrive, timeouts, aborts, and the errors of each."""

import re
import threading
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from kos import ReduceOp
from kos.comm import timeouts, tuning
from kos.comm.control.threads import ThreadControlPlane, ThreadGroup
from kos.comm.failures import EndedEarly
from kos.comm.gpu.peer import record as peer_record
from kos.comm.gpu.peer.engine import PeerEngine
from kos.comm.gpu.peer.record import CAUSE, FAILED, PEER
from kos.comm.tuning import KernelConfig
from kos.errors import (
    BackendUnavailable,
    CollectiveError,
    CollectiveMismatch,
    CollectiveTimeout,
    CompileError,
    CudaError,
    InvalidArgument,
    KosError,
    OutOfMemory,
    RankLost,
)
from kos.memory.array import Array
from tests.comm.fake_gpu import Status
from tests.comm.fake_peer import HostMemory, ThreadRanks, communicator, meet, no_gpus, of_peer
from tests.comm.gpu_ranks import Prepared, engine_of
from tests.comm.peer_storm import FLOAT
from tests.comm.ranks import on_each_rank, until
from tests.comm.shared_ranks import needs_core
from tests.comm.works import work_of
from tests.fake_cuda import GPU, installed
from tests.host_compiler import COMPILER

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler (g++ or clang++)")

SIZE = 3


@pytest.fixture
def no_gpu(monkeypatch):
    with no_gpus(monkeypatch, SIZE) as fake:
        yield fake


@pytest.fixture
def ranks(no_gpu):
    return ThreadRanks(SIZE)


def test_messages_that_do_not_match(ranks):
    """A message has another length, is sent in another way, or arrives where a collective expects its own data.

    No rank waits for long.
    """

    def body(gpu, mixed, more=0):
        comm, rank = gpu.comm, gpu.rank
        x, out = (Array.zeros(100 + rank * more, np.float32, 0) for _ in range(2))
        other = 400 + 4 * more

        def call():
            comm.all_gather(x) if mixed else comm.send_recv(x, out, 1 - rank, 1 - rank)
            comm.synchronize()

        if rank == 0 and mixed:
            comm.send(x, 1)
        text = b""
        if rank < 2 or mixed:
            try:
                call()  # of ranks that can be done before another finds out
            except (CollectiveMismatch, RankLost) as error:
                text = str(error).encode()
        texts = b" ".join(comm.rendezvous.allgather(text))
        expected = [
            b"expected 400 bytes of a message from rank 1, got %d bytes of a message" % other,
            b"expected %d bytes of a message from rank 0, got 400 bytes of a message" % other,
        ]
        if mixed:
            expected = [b"expected 400 bytes of a collective from rank 0, got 400 bytes of a message"]
        assert (b"all_gather #0" if mixed else b"send_recv #0") + b" of float32" in texts, texts
        assert any(each in texts for each in expected), texts
        comm.abort()

    limit = 60.0  # seconds: on a machine with ten busy programs the emulated kernels look a thousand times in 20
    for more in (1, 10_000):
        ranks.run(lambda gpu, more=more: body(gpu, False, more), limit)
    ranks.run(lambda gpu: body(gpu, True), limit)


@on_each_rank("ranks.run")
def test_cached_calls_of_all_to_all_v_whose_counts_disagree(gpu, /):
    """A rank knows only its own counts, so the sizes of the pieces are compared at every call."""
    comm, calls = gpu.comm, []
    for count in (3, 4):
        x, out = (Array.zeros(SIZE * count, np.float32, 0) for _ in range(2))
        calls.append(partial(comm.all_to_all_v, x, [count] * SIZE, [count] * SIZE, out))
    for call in calls:
        for _ in range(3):
            call()
    prepared, text = Prepared(comm), ""
    try:
        assert not prepared.by(calls[1 if comm.rank == 0 else 0])
        comm.synchronize()
    except (CollectiveMismatch, RankLost) as error:
        text = str(error)
    texts = [data.decode() for data in comm.rendezvous.allgather(text.encode())]
    assert all("all_to_all_v" in each for each in texts), texts
    sizes = "expected 12 bytes .* from rank 0, got 16 bytes|expected 16 bytes .* from rank [12], got 12 bytes"
    assert any(re.search(sizes, each) for each in texts), texts
    assert not prepared
    comm.abort()


@needs_core
@on_each_rank("ranks.run_bare")
def test_ranks_wait_for_one_another_at_the_first_call_of_a_kernel(rendezvous, /):
    """A rank may have several communicators, and CUDA loads a kernel only when running kernels have ended."""
    comms = [communicator(rendezvous, 20.0), communicator(rendezvous, 20.0)]
    x = Array.from_numpy(np.ones(5, np.float32), 0)
    for comm in comms:
        assert (comm.all_reduce(x).numpy() == SIZE ** (1 + comms.index(comm))).all()
    meet(rendezvous)
    comms[1].timeout = rendezvous.timeout = 0.5
    if rendezvous.rank < SIZE - 1:
        backend = comms[1].backend
        route = backend.routes[0]
        route.invalidate_order()
        order = route._concurrent.order = Mock(side_effect=route._concurrent.order)
        with pytest.raises(CollectiveTimeout, match=rf"not complete after 0.5 s; .*\b{SIZE - 1}\b.* did not arrive"):
            comms[1].all_reduce(x, ReduceOp.MAX)
        assert not order.called, "it would be taken for idle while it waits"
    meet(rendezvous)
    for comm in comms:
        comm.abort()


@on_each_rank("ranks.run_bare")
def test_a_communicator_that_has_failed_is_in_the_way_of_no_other(rendezvous, /):
    """The program may still refer to it when it makes the next one."""
    failed = communicator(rendezvous, 20.0)
    meet(rendezvous)
    failed.backend.failures.first = CollectiveError("a failure")
    other = communicator(rendezvous.split(0, rendezvous.rank), 20.0)
    assert (other.all_reduce(Array.from_numpy(np.ones(5, np.float32), 0)).numpy() == SIZE).all()
    meet(rendezvous)
    for comm in (failed, other):
        comm.abort()


@pytest.mark.parametrize("kind", ["all_reduce", "reduce"])  # by a kernel that is bound beforehand, and at its launch
@pytest.mark.parametrize(("usual", "own", "late"), [(0.3, 20.0, None), (20.0, 0.3, 0.3)])
@on_each_rank("ranks.run_bare")
def test_a_timeout_of_one_call_is_that_call_s_alone(rendezvous, /, kind, usual, own, late):
    comm, rank = communicator(rendezvous, 20.0), rendezvous.rank
    x = Array.zeros(4 * SIZE, np.float32, 0)
    comm.all_reduce(x)
    meet(rendezvous)
    comm.timeout = usual
    rendezvous.timeout = 20.0
    if late is None:
        meet(rendezvous)
        getattr(comm, kind)(x, timeout=own)
        meet(rendezvous)
    if rank < SIZE - 1:
        getattr(comm, kind)(x, timeout=None if late is None else own)
        with pytest.raises((CollectiveTimeout, RankLost), match=r"within 0.3 s|ended early|is gone"):
            comm.synchronize(20.0)
    meet(rendezvous)
    comm.abort()


@pytest.mark.parametrize("broken", [OutOfMemory("cuMemHostAlloc: out of memory"), KeyboardInterrupt()], ids=repr)
def test_a_rank_that_cannot_prepare_its_kernels(ranks, monkeypatch, broken):
    """Without memory, all ranks refuse the backend, and may continue with another one.

    After Ctrl-C, no rank continues.
    """
    here = threading.local()

    def pinned_empty(count, dtype, device):
        if here.rank == 1:
            raise broken
        return np.zeros(count, dtype)

    monkeypatch.setattr(peer_record, "pinned_empty", pinned_empty)

    def body(rendezvous):
        rank = here.rank = rendezvous.rank
        kind = BackendUnavailable
        told = "peer: " + "a rank could not prepare .*: rank 1: " * (rank != 1) + str(broken)
        if isinstance(broken, KeyboardInterrupt):
            kind, told = (KeyboardInterrupt, "^$") if rank == 1 else (RankLost, "rank 1 by KeyboardInterrupt")
        with pytest.raises(kind, match=told), rendezvous.reporting():
            of_peer(rendezvous)
        if kind is BackendUnavailable:
            here.rank = -1
            comm = communicator(rendezvous, 20.0)
            assert (comm.all_reduce(Array.from_numpy(np.ones(5, np.float32), 0)).numpy() == SIZE).all()
            comm.close()

    ranks.run_bare(body)


@pytest.mark.parametrize(
    ("name", "failing", "what", "why"),
    [
        ("", 1, "identify its GPU", "CUDA: expected a device in 0..2, got 3"),
        ("load", 0, "choose the tuning table", "format: expected 1, got 2"),
        ("parse", 2, "use the tuning table of rank 0", "format: expected 1, got 2"),
    ],
)
def test_a_rank_that_cannot_take_the_tuning_table(ranks, no_gpu, monkeypatch, name, failing, what, why):
    """All ranks refuse the backend, and continue together."""
    here, usual = threading.local(), getattr(tuning, name, None)

    def broken(*arguments):
        if here.rank == failing:
            raise InvalidArgument(why)
        return usual(*arguments)

    if name:
        monkeypatch.setattr(tuning, name, broken)

    def body(rendezvous):
        rank = here.rank = rendezvous.rank
        told = f"a rank could not {what}: rank {failing}: " * (rank != failing) + why
        with pytest.raises(BackendUnavailable, match=f"^peer: {told}$"), rendezvous.reporting():
            of_peer(rendezvous, device=SIZE if not name and rank == failing else rank)
        rendezvous.barrier()

    own = [GPU(uuid=str(rank)) for rank in range(SIZE)]  # ranks that share a GPU take no table
    with installed(monkeypatch, no_gpu.cu, own, no_gpu.driver.library):
        ranks.run_bare(body)


@pytest.mark.parametrize("how", ["timeout", "abort"])
@on_each_rank("ranks.run_bare")
def test_blocks_of_one_role_each_do_not_wait_for_ever(rendezvous, /, how):
    """Whichever of a rank's blocks times out first, it names the missing rank."""
    engine = PeerEngine(rendezvous, 0, timeout=20.0)
    memory, count = HostMemory(rendezvous, 1 << 17, 0), 16 * SIZE * 99
    engine.register(memory)
    assert engine._roles(4 * count)
    for turn in range(2):
        if turn == 0 or rendezvous.rank < SIZE - 1:
            if turn and how == "abort":
                threading.Timer(0.2, engine.record.abort).start()
            launch = KernelConfig("specialized", tile=512)
            engine.bind_all_reduce(memory.pointer, memory.pointer, count, FLOAT, ReduceOp.SUM, launch=launch)(0)
            if turn == 0:
                engine.record.check("x")
                engine.record.timeout = 0.3 if how == "timeout" else 20.0
        meet(rendezvous)
    if rendezvous.rank < SIZE - 1:
        timed_out = rf"rank {SIZE - 1} {timeouts.GO_ON} within 0.3 s \(channel \d+, phase [13]"
        why = timed_out if how == "timeout" else "aborted while it waited for rank"
        with pytest.raises(CollectiveError, match=f"{why}|kernel of rank [01] ended early"):
            engine.record.check("x")
        assert "the GPU waited for rank" in engine.record.last_wait(0)
    meet(rendezvous)


@on_each_rank("ranks.run_bare")
def test_what_a_replayed_graph_met_is_raised_where_its_end_is_waited_for(rendezvous, /):
    """The communicator knows nothing of the calls in the graph, which runs to its end."""
    comm, rank = communicator(rendezvous, 20.0), rendezvous.rank
    looks, engine = iter((False, True)), engine_of(comm)
    x = Array.zeros(4, np.float32, 0)
    comm.all_reduce(x)
    comm.synchronize(until=lambda: next(looks))
    assert not list(looks), "asked until it was over"
    engine.record.timeout = 0.3
    if rank < SIZE - 1:
        engine.bind_all_reduce(x.pointer, x.pointer, 4, FLOAT, ReduceOp.SUM)(0)
        late = rf"rank {SIZE - 1} {timeouts.GO_ON} within 0.3 s|the kernel of rank [01] ended early"
        with pytest.raises(CollectiveError, match=f"all_reduce #0 .*: ({late})"):
            comm.synchronize(until=lambda: True)
        with pytest.raises(CollectiveError, match="failed before"):
            comm.synchronize(until=lambda: True)
    meet(rendezvous)
    comm.abort()


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_broken_gpu_is_the_loss_of_its_rank(no_gpu):
    """It is reported to the other ranks as a loss.  Closing and aborting raise nothing more, on any thread."""
    reported = []
    backend = communicator(ThreadControlPlane(ThreadGroup(1), 0, 20.0)).backend
    no_gpu.cu.cuCtxSynchronize = lambda: (Status(700),)
    no_gpu.cu.cuMemGetInfo = lambda: (Status(700), 0, 0)
    late = CollectiveTimeout("all_reduce #7: ranks [1] did not arrive")
    calls = _silent(check=Mock(side_effect=late), report_failure=lambda error, sequence: reported.append(error))
    backend.unwatch()
    backend.shared.calls, backend.failures.reporters = calls, [calls]
    error = CudaError("cuEventQuery failed: CUDA_ERROR_ILLEGAL_ADDRESS (why)")
    assert backend.to_error(work_of("all_reduce", backend, 7), error) is error
    assert type(backend.failures.first) is CudaError
    assert [(type(each), str(each)) for each in reported] == [(RankLost, f"rank 0 is gone: {error}")]
    no_gpu.cu.cuMemGetInfo = lambda: (0, 0, 0)  # the GPU works: other ranks may know the cause
    reported.clear()
    for known in (None, late):
        calls.check.side_effect, backend.shared.ended, backend.failures.first = known, False, None
        backend.failures.earliest = backend.failures._sent = None
        refused = CompileError("sum.cu:3: undefined")
        assert backend.to_error(work_of("all_reduce", backend, 7), refused) is (known or refused)
    assert [(type(each), str(each)) for each in reported] == [
        (CollectiveError, "rank 0: sum.cu:3: undefined"),
        (CollectiveTimeout, "all_reduce #7: ranks [1] did not arrive"),
    ]


def _silent(**more: Any) -> Any:
    """The calls of ranks that report nothing."""
    nothing = lambda *arguments: None  # noqa: E731
    known = {"raise_failure": nothing, "killed": nothing, "missing": lambda work: [], "begun": 8}
    return SimpleNamespace(**known | more)


@pytest.mark.parametrize("reported", [True, False])
def test_the_cause_is_that_of_the_rank_that_failed_first(no_gpu, reported):
    """A kernel ended because another rank's kernel did.

    Its rank waits for that rank's report, which may be late or missing.
    """
    backend = communicator(ThreadControlPlane(ThreadGroup(1), 0, 20.0)).backend
    first = CollectiveTimeout("all_reduce #7: rank 2 did not arrive within 0.3 s")
    reports = iter([None, None, first] if reported else [])
    backend.unwatch()
    backend.failures.world = [0, 1, 2]
    backend.shared.calls = _silent(check=lambda call: _raise(next(reports, None)))
    failure = backend.to_error(work_of("all_reduce", backend, 7), EndedEarly("rank 1 ended early", ranks=[1]))
    assert failure is first if reported else type(failure) is RankLost and "rank 1 ended early" in str(failure)


def _raise(error: Exception | None) -> None:
    if error is not None:
        raise error


@on_each_rank("ranks.run_bare")
def test_errors_of_kernels_name_ranks_of_the_world(rendezvous, /):
    """Rank 0 of a group, which is rank 2 of the world."""
    rank = rendezvous.rank
    part = rendezvous.split(0, -rank)
    comm = communicator(part, 20.0)
    x, y = Array.zeros(4, np.float32, 0), Array.zeros(4, np.float32, 0)
    comm.send_recv(x, y, (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size)  # all compile what recv runs
    meet(rendezvous)
    comm.timeout, part.timeout = 0.3, 20.0
    if rank == 1:
        comm.recv(x, 0)  # returns when its kernel has given up
        with pytest.raises(CollectiveTimeout) as raised:
            comm.synchronize()
        assert f"rank 2 of world {timeouts.GO_ON} within 0.3 s (channel 0" in str(raised.value)
        assert raised.value.ranks == (2,)
    meet(rendezvous)
    comm.abort()


@needs_core
@pytest.mark.usefixtures("frequent_looks")
def test_whom_a_kernel_waits_for_is_shown(ranks):
    """Also while the program is outside of kos: here it is in the launch, which would return on a GPU."""
    shown = threading.Event()

    def body(rendezvous):
        comm, rank = communicator(rendezvous, 20.0), rendezvous.rank
        x, status = Array.zeros(4, np.float32, 0), rendezvous.failures.status
        rendezvous.barrier()
        if rank == 1:  # announced, and not launched
            call = work_of("barrier", comm.backend, 0, comm._group)
            comm.backend.shared.calls.announce(call)
            until(lambda: status.awaited(0) == (1,), 15)
            shown.set()
            comm.send(x, 0)
        elif rank == 0:
            comm.recv(x, 1)
        else:
            assert shown.wait(20)
        comm.synchronize()
        rendezvous.barrier()
        comm.abort()

    ranks.run_bare(body)


@on_each_rank("ranks.run_bare")
def test_a_kernel_that_ended_early_fails_the_next_call(rendezvous, /):
    """Also a cached call, before it launches anything."""
    comm = communicator(rendezvous, 20.0)
    backend, x = comm.backend, Array.zeros(9, np.float32, 0)
    backend.unwatch()
    for _ in range(3):
        comm.all_reduce(x)
    rendezvous.barrier()
    before, peer = x.numpy().copy(), (rendezvous.rank + 1) % SIZE
    backend.routes[0]._engine.record.words[[CAUSE, PEER, FAILED]] = 3, peer, 1  # the kernel of the peer ended
    with pytest.raises(KosError, match="all_reduce #3"):
        comm.all_reduce(x)
    assert backend.failures.first is not None and (x.numpy() == before).all()
    rendezvous.barrier()
    comm.abort()


def test_the_rank_waited_for_is_blamed_only_if_it_is_late(no_gpu):
    backend = communicator(ThreadControlPlane(ThreadGroup(1), 0, 20.0)).backend
    backend.unwatch()
    shared, nothing = backend.shared, lambda rank: None
    status = Mock(awaited=nothing, failure=nothing, cause=nothing, hosts={})
    status.last_call = lambda rank: ""
    shared.failures.world, shared.failures.status, halted = [0, 3], status, set[int]()
    status.halted = status.ended = lambda rank: rank in halted
    status.runs = lambda rank: rank not in halted
    ended = EndedEarly("all_reduce #7: aborted while it waited for rank 3 of world", ranks=[3])
    error = shared.cause(work_of("all_reduce", backend, 7), ended)
    assert type(error) is RankLost and error.ranks == () and str(error) == str(ended)
    halted.add(3)
    error = shared.cause(work_of("all_reduce", backend, 7), ended)
    assert error.ranks == (3,) and str(error) == f"{ended}: ranks [3] of world {timeouts.GO_ON}"
