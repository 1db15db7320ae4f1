"""The routes that ``auto`` chooses, without a GPU: two backends that log their calls, on stand-ins of ``fake_nccl``."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import kos
from kos.bench import tables as tune
from kos.comm import create
from kos.comm.contract import Backend, Probe
from kos.comm.control.threads import ThreadControlPlane
from kos.comm.gpu import gpu_work
from kos.comm.gpu.backend import GPUBackend
from kos.comm.gpu.nccl import NCCLBackend
from kos.comm.host.host_backend import HostBackend
from kos.comm.host.threads import ThreadTransport
from kos.comm.operation import Operation, Options
from kos.comm.tuning import parse, read
from kos.comm.work import Engine
from kos.cuda.kernels import Plan
from kos.errors import BackendUnavailable, CollectiveError, CollectiveTimeout, InvalidArgument, PeerMemoryError
from kos.memory import as_buffer
from kos.memory.array import Array
from tests import fake_cuda
from tests.comm.fake_gpu import captures
from tests.comm.fake_nccl import Comm, Group
from tests.comm.ranks import on_each_rank, on_threads
from tests.comm.shared_ranks import SharedOnly, needs_core, skip_without_core
from tests.comm.test_tuning import GPU, LINK, changed, measure_quickly, tuned
from tests.fake_cuda import installed

pytestmark = pytest.mark.usefixtures("fake")
SIZE = 2
ROUTES = {
    "all_reduce 16-bit ordinary graph": [[4096, "peer"], [None, "nccl"]],
    "all_reduce 32-bit ordinary graph": [[1024, "peer"], [None, "nccl"]],
    "all_gather 16-bit ordinary graph": [[1024, "peer"], [None, "nccl"]],
    "scatter 16-bit ordinary graph": [[1024, "peer"], [None, "nccl"]],
    "send_recv 16-bit ordinary graph": [[1 << 21, "peer"], [None, "nccl"]],
    "broadcast 16-bit ordinary graph": [[1030, "peer"], [4096, "nccl"], [None, "peer"]],
    "broadcast 16-bit symmetric graph": [[None, "peer"]],
    "all_to_all 32-bit ordinary graph": [[1 << 20, "nccl"], [None, "peer"]],
    "all_to_all 32-bit symmetric graph": [[None, "peer"]],
    "reduce 16-bit ordinary graph": [[None, "peer"]],
    "reduce 16-bit ordinary eager": [[None, "nccl"]],
}


class Peer(NCCLBackend):
    """Stands for ``peer``."""

    name = "peer"
    table = parse(changed("routes", to=ROUTES), "the test")
    symmetric = False

    def is_symmetric(self, o: Operation) -> bool:
        return self.symmetric

    def resolve(self, o: Operation) -> Plan:
        return replace(super().resolve(o), name="a kernel")


KINDS: dict[str, type[NCCLBackend]] = {"nccl": NCCLBackend, "peer": Peer}


class Log(list[str]):
    """The route of each operation that a rank started."""

    def __init__(self, comm: kos.Communicator) -> None:
        comm._tracing = self._noting

    def _noting(self, works: Sequence[Any], batch: bool, _: bool) -> AbstractContextManager[None]:
        self.extend(work.prepared.route.name for work in works if not batch)
        return nullcontext()


def run(
    body: Callable[[kos.Communicator, Log], None],
    parts: str = "nccl peer",
    timeout: float = 20.0,
    host: type[Backend] = ThreadTransport,
    size: int = SIZE,
) -> None:
    """Run ``body`` on every rank, with these parts.  Skips the test where ``host`` cannot be used."""
    if host is SharedOnly:
        skip_without_core()
    groups = {name: Group(size) for name in parts.split()}

    def rank(rendezvous: ThreadControlPlane) -> None:
        memory = HostBackend(rendezvous, host)
        made = [
            KINDS[name](rendezvous, memory.engine, 0, Comm(group, rendezvous.rank)) for name, group in groups.items()
        ]
        comm = kos.Communicator(GPUBackend(rendezvous, made, memory), rendezvous, {}, timeout, host=memory)
        body(comm, Log(comm))

    on_threads(size, rank, timeout, lambda: [group.barrier.abort() for group in groups.values()])


def run_alone(body: Callable[[kos.Communicator, Log], None]) -> None:
    """Run ``body`` on one rank, whose calls are ordered as those of several."""

    def ordered(comm: kos.Communicator, log: Log) -> None:
        comm.backend.size = 2
        body(comm, log)
        comm.backend.size = 1

    run(ordered, size=1)


def zeros(count: int, dtype: Any = np.float16, stream: Any = None) -> Array:
    return Array.zeros(count, dtype, 0, stream=stream)


def ones(count: int, dtype: Any = np.float16) -> Array:
    return Array.from_numpy(np.ones(count, dtype), 0)


@on_each_rank(run)
def test_routes_by_operation_size_and_dtype(comm, log, /):
    f2, f4 = np.float16, np.float32
    for count, dtype in ((1, f2), (2048, f2), (2049, f2), (256, f4), (257, f4)):
        x = Array.from_numpy(np.full(count, comm.rank + 1, dtype), 0)
        assert (comm.all_reduce(x).numpy() == 3).all()
    assert log == ["peer", "peer", "nccl", "peer", "nccl"]
    log.clear()
    for count in (512, 513):  # a rank's part decides; of a scatter, what comes out
        comm.all_gather(zeros(count), zeros(count * SIZE))
        comm.all_gather_v(zeros(count), [count] * SIZE, zeros(count * SIZE))
        comm.scatter(zeros(count * SIZE) if comm.rank == 0 else None, zeros(count))
    assert log == ["peer", "nccl", "peer", "nccl", "nccl", "nccl"]
    log.clear()
    for count in (1, 2000):  # sizes differ between ranks: one route, and the host carries them
        comm.gather_v(zeros(count + comm.rank))
        comm.scatter_v(zeros(2 * count) if comm.rank == 0 else None, None, zeros(count))
    assert log == ["mock", "nccl", "mock", "nccl"] * 2
    log.clear()
    comm.barrier(stream=5)
    comm.all_reduce(np.zeros(9, np.float32))  # host memory
    comm.barrier()
    assert log == ["peer", "mock", "mock"]


def test_a_call_of_peer_waits_until_nccl_is_connected(fake):
    """NCCL waits for running kernels while it connects, and other calls of the driver wait for NCCL."""
    never, group = Event(), Group(SIZE)
    fake.comm_init_rank_scalable = lambda *arguments: never.wait(1e4) and None

    def rank(rendezvous):
        memory = HostBackend(rendezvous, ThreadTransport)
        nccl, ready = NCCLBackend(rendezvous, memory.engine, 0), Comm(group, rendezvous.rank)
        routes = [nccl, Peer(rendezvous, memory.engine, 0, ready)]
        comm = kos.Communicator(GPUBackend(rendezvous, routes, memory), rendezvous, {}, 20.0, host=memory)
        log = Log(comm)
        comm.all_reduce(np.zeros(9, np.float32))
        comm.backend.set_timeout(0.1)
        with pytest.raises(CollectiveTimeout, match=r"nccl: init: not begun by all ranks after 0\.1 s"):
            comm.all_reduce(ones(1))
        assert log == ["mock"]
        comm.backend.abort("enough")  # ends without NCCL

    on_threads(SIZE, rank, 20.0, group.barrier.abort)
    never.set()


def way(comm: kos.Communicator, name: str, count: int, stream: Any = None, **options: Any) -> str:
    """The route of an operation in place."""
    x = comm_buffer(zeros(count, stream=stream))
    return comm.backend.choices.of(Operation(name, comm.rank, Options(**options), x, x))[0].name


@on_each_rank(run)
def test_routes_of_deterministic_calls_and_named_algorithms(comm, log, /):
    ways = [way(comm, "all_reduce", 1 << 20, **of) for of in ({}, {"deterministic": True}, {"algorithm": "ring"})]
    assert ways == ["nccl", "peer", "peer"]


def comm_buffer(x: Array) -> Any:
    return as_buffer(x, "x", writable=True)


@on_each_rank(run)
def test_operations_whose_bytes_differ_between_ranks_have_one_route(comm, log, /):
    """Rank 0 sends little and receives much.  By their own sizes, the ranks would choose different routes."""
    mine, theirs = (8, 1 << 21) if comm.rank == 0 else (1 << 21, 8)
    comm.send_recv(zeros(mine), zeros(theirs), 1 - comm.rank, 1 - comm.rank)
    assert log == ["peer"]


def test_routes_of_symmetric_buffers_and_graphs(fake):
    """Buffers and captures are queried only for the calls whose route depends on them."""
    state = SimpleNamespace(captured=False, asked=0)

    def is_capturing(stream):
        state.asked += stream == 5
        return 0, int(state.captured)

    fake.cu.cuStreamIsCapturing = is_capturing

    def body(comm, log):
        if comm.rank:
            return
        ways = [way(comm, "broadcast", count, 5) for count in (8, 1 << 20, 1024)]
        assert ways == ["peer", "peer", "nccl"] and state.asked == 0
        comm.backend.routes[1].symmetric = True
        assert way(comm, "broadcast", 1024, 5) == "peer" and state.asked == 0
        assert way(comm, "reduce", 8, 5) == "nccl" and state.asked == 1
        state.captured = True
        assert way(comm, "reduce", 8, 5) == "peer"

    run(body)


@on_each_rank(run)
def test_register_uses_the_first_backend_that_accepts_the_memory(comm, log, /):
    """``peer`` accepts memory of cudaMalloc, and ``nccl`` that of the driver.  If both refuse, the error names both."""
    refused, found = list[type](), list[str]()

    def register(part, buffer):
        if type(part) in refused:
            raise (InvalidArgument if type(part) is NCCLBackend else PeerMemoryError)(f"not of {part.name}")
        return part.name

    for route in comm.backend.routes:
        route.register = partial(register, route)
    for kind in (None, Peer, NCCLBackend):
        refused.append(kind)
        try:
            found.append(comm.register(zeros(8)))
        except InvalidArgument as error:
            found.append(str(error))
    assert found == ["peer", "nccl", "peer: not of peer; nccl: not of nccl"]


@needs_core
@on_each_rank(run, host=SharedOnly)
def test_a_batch_starts_its_backends_in_one_order(comm, log, /):
    """Calls start in the order of their numbers, whichever backend runs them, because ranks compare their progress."""
    calls, shared = comm.host.calls, comm.host.shared
    assert comm.backend.shared.calls is calls
    begun = []
    announce, core = calls.announce, shared._core
    calls.announce = lambda o: (begun.append(o.sequence), announce(o))[1]
    shared._core = SimpleNamespace(
        prepare=core.prepare, start=lambda *call: (begun.append(call[1]), core.start(*call))[1], spin_ns=0
    )
    arrays = ones(8), np.ones(3), ones(5000), ones(8)
    for turn in range(3):
        with comm.batch() as batch:
            for array in arrays:
                comm.all_reduce(array)
        assert [work.prepared.route.name for work in batch.works] == ["peer", "shared-only", "nccl", "peer"]
        assert [work.operation.send.count for work in batch.works] == [8, 3, 5000, 8]
        assert begun == list(range(4 * turn + 4))
    assert all(((x.numpy() if isinstance(x, Array) else x) == SIZE**3).all() for x in arrays)


@pytest.mark.parametrize("overlap", [False, True])
@on_each_rank(run_alone)
def test_the_deadline_of_a_call_begins_behind_the_call_that_it_follows(comm, log, /, overlap, monkeypatch):
    """The earlier call has another route and another stream, on which much of the program's own work may be queued."""
    done, streams = list[str](), comm.backend.streams
    queue, follow = gpu_work.Marks.queue, streams.follow
    monkeypatch.setattr(gpu_work.Marks, "queue", lambda *given: (done.append("begin"), queue(*given)))
    comm.all_reduce(zeros(8), stream=5)
    done.clear()
    streams.follow = lambda *given: (done.append("follow"), follow(*given))
    comm.all_reduce(zeros(5000), stream=6, async_op=overlap)
    assert done == ["follow", "begin"] and log == ["peer", "nccl"]


@on_each_rank(run_alone)
def test_a_finalizer_may_make_a_call_while_another_one_is_ordered(comm, log, /):
    streams, followed = comm.backend.streams, list[tuple[int, int]]()
    follow = streams.follow

    def finalizing(stream, before, capture):
        followed.append((stream, before))
        if len(followed) == 1:
            comm.all_reduce(zeros(8), stream=7)
        follow(stream, before, capture)

    comm.all_reduce(zeros(8), stream=5)
    streams.follow = finalizing
    thread = Thread(target=comm.all_reduce, args=(zeros(5000),), kwargs={"stream": 6}, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive() and followed[-1] == (6, 7)


@pytest.mark.parametrize("operation", ["all_reduce", "reduce", "send_recv"])
@on_each_rank(run_alone)
def test_a_route_that_does_not_carry_an_operation_is_not_chosen(comm, log, /, operation):
    """Also if a table chooses this route for graphs only, or for an operation whose sizes differ between ranks."""
    before = way(comm, operation, 5000)
    for route in comm.backend.routes:
        route.carries = lambda o, route=route: type(route) is Peer
    assert (before, way(comm, operation, 5000)) == (before, "peer")


@needs_core
@on_each_rank(run, host=SharedOnly)
def test_host_arrays_go_through_the_core(comm, log, /):
    """They use no messages, and the calls on the GPUs are checked first."""
    backend = comm.backend
    comm.host.scheduled.start = None
    confirmed = []
    confirm = backend.confirm
    backend.confirm = lambda work: (confirmed.append(work.sequence), confirm(work))[1]
    x = np.full(3, comm.rank + 1.0)
    assert (comm.all_reduce(x) == 3).all() and (comm.all_reduce(x, async_op=True).wait() == 6).all()
    comm.barrier()
    with comm.batch():
        comm.all_reduce(x)
    assert (x == 12).all() and list(dict.fromkeys(confirmed)) == [0, 1, 2, 3]
    backend.failures.first = CollectiveError("all_reduce #9: rank 1 did not arrive")
    with pytest.raises(CollectiveError, match="rank 1 did not arrive"):
        comm.all_reduce(x)


@on_each_rank(run)
def test_a_batch_has_the_route_of_other_calls_in_a_graph(comm, log, /):
    x = zeros(8, stream=5)
    for graph in (nullcontext, captures, nullcontext):
        with graph():
            comm.reduce(x)
            with comm.batch() as batch:
                comm.reduce(x)
            assert batch.works[0].prepared.route.name == ("peer" if graph is captures else "nccl")
    assert log == ["nccl", "peer", "nccl"]  # batches are not logged


@needs_core
@on_each_rank(run, host=SharedOnly)
def test_a_call_in_a_graph_does_not_change_the_eager_route(comm, log, /):
    """Ranks may pass different arrays to the eager calls before it."""
    x, y = zeros(8, stream=5), zeros(8, stream=5)
    comm.reduce(y)
    comm.reduce(x if comm.rank else y)
    with captures():
        comm.reduce(x)
    comm.reduce(x)
    comm.synchronize()
    assert [part for part in log if part != "shared-only"] == ["nccl", "nccl", "peer", "nccl"]


@on_each_rank(run)
def test_splits_use_both_backends(comm, log, /):
    backend = comm.backend
    for route in backend.routes:
        route.split = lambda *_, kind=KINDS[route.name]: partial(kind, comm=Comm(Group(1), 0))
    child = comm.split(comm.rank)
    assert child is not None and child.backend_name == "nccl+peer+mock"
    assert child.all_reduce(Array.from_numpy(np.ones(5000, np.float16), 0)).numpy().tolist() == [1] * 5000


@on_each_rank(run)
def test_calls_with_different_routes_are_a_mismatch(comm, log, /):
    with comm.batch() as batch:
        for count in (5000, 8):
            comm.all_reduce(zeros(count))
    operations = [work.operation for work in batch.works]
    assert [comm.backend.prepare(o).values["backend"] for o in operations] == ["nccl", "peer"]


ON_GPU_0 = {"device": 0, "place_on_machine": 0, "on_machine": []}


@pytest.mark.parametrize(
    ("routes", "broken", "taken", "why"),
    [
        (ROUTES, "", ["nccl", "peer"], "peer works"),
        ({}, "", ["nccl"], "peer works; auto uses it once it was measured here: kos bench --write-table"),
        (ROUTES, "rank 1 reads other bytes than rank 0 wrote", ["nccl"], "rank 1 reads other bytes than rank 0 wrote"),
    ],
    ids=["measured", "not measured", "does not work"],
)
def test_peer_takes_part_where_it_was_measured(monkeypatch, routes, broken, taken, why):
    class Some(NCCLBackend):
        def __init__(self, rendezvous, engine, device):
            if self.name == "peer" and broken:
                raise BackendUnavailable(broken)

    kinds = {name: type(name, (Some,), {"name": name}) for name in ("nccl", "peer")}
    monkeypatch.setattr(create, "BACKENDS", {"mock": ThreadTransport, **kinds})
    tuned(monkeypatch, routes)
    probes = {name: Probe(True, f"{name} works") for name in ("mock", "nccl", "peer")}
    ranks = SimpleNamespace(size=2, local_size=2, **ON_GPU_0)
    assert [gpu.name for gpu in create._for_gpus(ranks, probes, None, ExitStack())] == taken
    assert probes["peer"] == Probe(not broken, why)


@pytest.mark.parametrize("local_size", [1, 2, 4])
def test_between_hosts_calls_may_go_in_phases(monkeypatch, local_size):
    class Made(NCCLBackend):
        def __init__(self, rendezvous, engine, device): ...

    phases = type("Phases", (Made,), {})
    monkeypatch.setattr(create, "BACKENDS", {"mock": ThreadTransport, "nccl": Made})
    monkeypatch.setattr(create, "HierarchicalBackend", phases)
    probes = {"mock": Probe(True, ""), "nccl": Probe(True, "")}
    ranks = SimpleNamespace(size=4, local_size=local_size, **ON_GPU_0)
    made = create._for_gpus(ranks, probes, None, ExitStack())
    assert [*map(type, made)] == [Made, phases][: 1 + (local_size < 4)]


def test_tuning_measures_every_operation(monkeypatch, tmp_path, fake):
    """Each operation is measured by both backends.  With the stand-ins, a graph is a plain call."""
    launched = []

    class Measured(Peer):
        def use(self, launches):
            launched.append(launches)

        def allocate(self, shape, dtype):
            return zeros(shape, dtype)

    monkeypatch.setattr(tune, "PeerBackend", Measured)
    measure_quickly(monkeypatch)
    groups = {name: Group(SIZE) for name in KINDS}

    def rank(rendezvous):
        nccl, peer = (
            kos.Communicator(GPUBackend(rendezvous, [route]), rendezvous, {}, 20)
            for name, kind in {**KINDS, "peer": Measured}.items()
            for route in [kind(rendezvous, Engine(), 0, Comm(groups[name], rendezvous.rank))]
        )
        log = Log(nccl)
        tuner = tune.Tuner(peer, nccl, 4096)
        assert log == ["nccl"]  # it is connected before anything is measured
        return tuner.table(lambda text: None), tuner.measured

    with installed(monkeypatch, fake.cu, (fake_cuda.GPU(GPU, nvlinks=18),)):
        (table, measured), (other, _) = on_threads(SIZE, rank)
    assert table == other  # the slowest rank's time, on all of them
    assert {name.split()[0] for name in table.routes} == {"all_reduce", *tune.OTHERS}
    assert {row["bytes"] for row in measured if row["route"].startswith("all_reduce")} == {1024, 2048, 4096}
    assert {row["bytes"] for row in measured if row["route"].startswith("all_gather")} == {1024, 2048}
    assert launched[-1] == table.launches
    tune.write(tmp_path / "table.json", {**table.to_json(), "measured": measured})
    assert read(tmp_path / "table.json", GPU, LINK, SIZE).to_json() == table.to_json()
