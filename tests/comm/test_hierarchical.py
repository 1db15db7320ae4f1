"""Collectives between hosts in phases, without a GPU.

Ranks are threads. ``fake_nccl`` and ``fake_peer`` stand in for NCCL and run the kernels of ``peer`` on the host.
"""

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import kos
from kos import ReduceOp
from kos.bench import tables as tune
from kos.comm.compression import FORMATS, IN_PHASES
from kos.comm.control.base import ControlPlane
from kos.comm.gpu import hierarchical
from kos.comm.gpu.backend import GPUBackend
from kos.comm.gpu.devices import NETWORK, network_rate, predicted
from kos.comm.gpu.hierarchical import CARRIED, HierarchicalBackend
from kos.comm.gpu.nccl import NCCLBackend
from kos.comm.gpu.order import Streams
from kos.comm.gpu.peer.backend import PeerBackend
from kos.comm.gpu.routes import PHASES
from kos.comm.host.host_backend import HostBackend
from kos.comm.host.threads import ThreadTransport
from kos.comm.tuning import DEFAULT, Table, key, parse, user_path
from kos.errors import CollectiveTimeout, InvalidArgument
from kos.memory.array import Array
from kos.testing.conformance import results
from kos.testing.conformance.model import Step
from kos.testing.conformance.values import ALL_DTYPES, REDUCTIONS, SIZES
from tests.comm import test_conformance as conformance
from tests.comm import test_nccl
from tests.comm.fake_gpu import captures
from tests.comm.fake_nccl import DTYPE_OF, WAIT, Comm, Group, of_nccl, waits_that_are_bounded
from tests.comm.fake_peer import ThreadRanks, no_gpus
from tests.comm.gpu_ranks import OnGPU, noting_who_adds
from tests.comm.ranks import host_names, on_each_rank
from tests.comm.test_tuning import measure_quickly
from tests.host_compiler import COMPILER

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler (g++ or clang++)")

BF16 = np.dtype(ml_dtypes.bfloat16)
LAYOUTS = [(2, 2), "another"]
OTHERS = [(2, 2, 2), (3, 3)]
ALWAYS = {key(name, False, False, True): ((None, PHASES),) for name in CARRIED}


class HostRanks(ThreadRanks):
    """Ranks that are threads, so many on each pretended host, with a stand-in for a GPU each."""

    pool = ThreadPoolExecutor(6)

    def __init__(self, hosts: Sequence[int], routes: Any = ALWAYS) -> None:
        super().__init__(sum(hosts))
        self.names = host_names(hosts)
        self.routes, self.flat = routes, Group(self.size)

    def run(self, fn: Callable[[Any], Any], timeout: float = 3 * WAIT) -> list[Any]:
        """Six ranks on two cores take 0.4 s where nothing else runs, and 20 times as long beside other tests."""
        return super().run(fn, timeout)

    def run_bare(self, fn: Callable[[ControlPlane], Any], timeout: float = WAIT) -> list[Any]:
        self.flat = Group(self.size)
        names = self.names

        def named(rendezvous: Any) -> Any:
            rendezvous.host = names[rendezvous.rank]
            return fn(rendezvous)

        return super().run_bare(named, timeout)

    def _with_communicator(self, fn: Any, rendezvous: Any, timeout: float) -> Any:
        comm = communicator(rendezvous, HostBackend(rendezvous, ThreadTransport), self.flat, timeout, self.routes)
        with noting_who_adds(comm):
            result = fn(OnGPU(comm))
        comm.close()
        return result


def communicator(
    rendezvous: ControlPlane, host: HostBackend, flat: Group, timeout: float = WAIT, routes: Any = ALWAYS
) -> kos.Communicator:
    """That of ``auto`` between hosts; ``routes`` None are those that it predicts."""
    nccl = NCCLBackend(rendezvous, host.engine, 0, Comm(flat, rendezvous.rank))
    phases = HierarchicalBackend(rendezvous, host.engine, 0)
    backend = GPUBackend(rendezvous, [nccl, phases], host)
    if routes is not None and phases.table is not None:
        backend.use(replace(phases.table, routes=routes))
    return kos.Communicator(backend, rendezvous, {}, timeout, host=host)


@pytest.fixture
def no_gpu(monkeypatch):
    with no_gpus(monkeypatch, 3) as fake:
        yield fake


def test_a_call_within_hosts_waits_until_all_phases_are_connected(no_gpu):
    never = threading.Event()
    no_gpu.comm_init_rank_scalable = lambda *arguments: never.wait(1e4) and None  # of the ranks between hosts

    def body(gpu):
        gpu.comm.backend.set_timeout(0.1)
        with pytest.raises(CollectiveTimeout, match=r"nccl: init: not begun by all ranks after 0\.1 s"):
            gpu.comm.all_reduce(Array.zeros(3, np.float32, 0), deterministic=True)  # by another route
        gpu.comm.backend.abort("enough")

    HostRanks((2, 2)).run(body)
    never.set()


@pytest.fixture(params=LAYOUTS, ids=str)
def ranks(no_gpu, request, seed):
    """2 hosts of 2 ranks, or another layout, which the seed chooses."""
    return HostRanks(OTHERS[seed % len(OTHERS)] if request.param == "another" else request.param)


FEW = (  # of each way in which phases treat a type
    (np.dtype(np.float32), ReduceOp.SUM), (BF16, ReduceOp.AVG), (np.dtype(np.float64), ReduceOp.PREMUL_SUM),
    (np.dtype(np.int16), ReduceOp.BXOR), (np.dtype(np.complex64), ReduceOp.PROD), (np.dtype(np.float16), ReduceOp.MAX),
)  # fmt: skip
MOVED = (BF16, np.dtype(np.int64), np.dtype(np.int8))


def suite() -> Iterator[Any]:
    """The dtypes and reduce operations of ``FEW`` and ``MOVED``, each with every operation, layout and size.

    Each of the others runs with one operation in one layout, in turn.  That is enough, because both operations that
    reduce use the same kernel within a host.
    """
    for names, pairs in ((CARRIED[:2], REDUCTIONS), (CARRIED[2:], [(dtype, None) for dtype in ALL_DTYPES])):
        for turn, (dtype, op) in enumerate(pairs):
            few = (dtype, op) in FEW if op else dtype in MOVED
            one = [(names[turn % len(names)], LAYOUTS[turn % len(LAYOUTS)])]
            for name, layout in product(names, LAYOUTS) if few else one:
                words = [str(layout), name, dtype.name, *([] if op is None else [op.name])]
                sizes, marks = (SIZES, ()) if few else ((7, 997), pytest.mark.slow)
                yield pytest.param(layout, name, dtype, op, sizes, id="-".join(words), marks=marks)


@pytest.mark.parametrize(("ranks", "name", "dtype", "op", "sizes"), [*suite()], indirect=["ranks"])
def test_results(ranks, seed, name, dtype, op, sizes):
    ranks.run(lambda comm: results.correct(comm, seed, Step(name, dtype=dtype, op=op or ReduceOp.SUM), sizes))


def in_turn(names: str, cases: Iterable[tuple[Any, ...]]) -> pytest.MarkDecorator:
    """Run a test with each case in one layout, which differs from one case to the next."""
    rows = [(LAYOUTS[turn % len(LAYOUTS)], *case) for turn, case in enumerate(cases)]
    ids = ["-".join(map(str, row)) for row in rows]
    return pytest.mark.parametrize(f"ranks {names}".split(), rows, indirect=["ranks"], ids=ids)


@in_turn("name", [
    ("split_of_a_split",), ("close",), ("several_in_flight",), ("repeated",),
    *((f"all_reduce {dtype} {op} with NaN and zeros",) for dtype in ("float32", "bfloat16") for op in ("MIN", "MAX")),
])  # fmt: skip
def test_promises(ranks, seed, name):
    conformance.check(ranks, seed, name)


@in_turn("form dtype", product(FORMATS, (np.dtype(np.float32), BF16)))
@on_each_rank("ranks.run")
def test_compressed_between_hosts(comm, /, seed, form, dtype):
    """Exact sums by peer within a host and compressed sums by NCCL on its rails have the bits of ranks on CPUs."""
    assert comm.exact_group_size() == comm.local_size
    for name in IN_PHASES:
        step = Step(name, dtype=dtype, compress=form, values="hostile")
        results.correct(comm, seed, step, (1, 65, 5011))
        results.correct(comm, seed, replace(step, op=ReduceOp.AVG), (1000,))


@in_turn("form dtype", [("fp8", np.dtype(np.float32)), ("int8", BF16), ("int4", np.dtype(np.float16))])
@on_each_rank("ranks.run")
def test_error_feedback(comm, /, seed, form, dtype):
    results.feedback_keeps_what_is_lost(comm, seed, form, dtype)


@on_each_rank("ranks.run")
def test_compressed_sums_go_in_phases_and_all_else_does_not(gpu, /):
    comm, ways = gpu.comm, Ways(gpu.comm)
    residual = filled(comm, 600)
    assert ways.of(comm.all_reduce, filled(comm, 600), compress="int8") == PHASES
    assert ways.of(comm.all_reduce, filled(comm, 600), compress="int8", residual=residual) == PHASES
    assert ways.of(comm.reduce_scatter, filled(comm, 600), compress="int8") == PHASES
    assert ways.of(comm.all_reduce, filled(comm, 600), compress="int8", deterministic=True) == "nccl"
    assert ways.of(comm.all_gather, filled(comm, 600), compress="int8") == "nccl"
    assert ways.of(comm.all_to_all, filled(comm, 600), compress="int8") == "nccl"


test_several_communicators = test_nccl.test_several_communicators


def filled(comm: Any, count: int, dtype: Any = np.float32) -> Array:
    return Array.from_numpy(np.full(count, comm.rank + 1, dtype), 0)


class Ways(list[str]):
    """The route of each call of ``comm``."""

    def __init__(self, comm: kos.Communicator) -> None:
        backend: Any = comm.backend
        self._store = backend.store
        for route in backend.routes:
            route.resolve = partial(self._resolve, route.name, route.resolve)

    def _resolve(self, name: str, resolve: Callable[[Any], Any], o: Any) -> Any:
        self.append(name)
        return resolve(o)

    def of(self, call: Callable[..., Any], *arguments: Any, **options: Any) -> str:
        """How that call goes, on a communicator that forgets the calls before."""
        self._store.clear()
        self.clear()
        call(*arguments, **options)
        (way,) = self
        return way


@on_each_rank("ranks.run")
def test_in_a_capture_and_on_several_streams(gpu, /):
    comm, total = gpu.comm, gpu.size * (gpu.size + 1) // 2
    ways = Ways(comm)
    for turn in range(3):
        with captures():
            for stream, count in ((5, 1000), (5, 1001), (6, 1000)):
                assert (comm.all_reduce(filled(comm, count), stream=stream).numpy() == total).all()
        xs = [filled(comm, 10 + i + turn) for i in range(3)]
        works = [comm.all_reduce(x, stream=5 + i, async_op=i == 2) for i, x in enumerate(xs)]
        works[2].wait()
        assert all((x.numpy() == total).all() for x in xs)
    assert set(ways) == {PHASES}


@pytest.mark.parametrize("before", [0, 3])
def test_an_all_to_all_in_a_capture(monkeypatch, before):
    """On the rails, kos sends the messages itself, whatever eager calls did.  NCCL registers memory of a graph."""
    with no_gpus(monkeypatch, 3) as fake:

        def body(gpu):
            comm, size = gpu.comm, gpu.size
            x = Array.from_numpy(np.arange(2 * size) + 100 * comm.rank, 0)
            out = Array.zeros(2 * size, x.dtype, 0)
            fake.virtual.add(out.pointer)
            for _ in range(before):
                comm.all_to_all(x, out, stream=5)
            with captures():
                comm.all_to_all(x, out, stream=5)
            mine = 2 * comm.rank + np.arange(2)
            assert out.numpy().tolist() == [*(100 * np.arange(size)[:, None] + mine).ravel()]

        HostRanks((2, 2)).run(body)


@on_each_rank(HostRanks((2, 2)).run)
def test_memory_that_nccl_refuses(gpu, /, no_gpu):
    with pytest.raises(InvalidArgument, match="expected memory of ncclMemAlloc or cuMemCreate, got memory of cuda"):
        gpu.comm.register(Array.zeros(64, np.float32, 0))


def sent(name: str, size: int, nbytes: int) -> float:
    """Bytes that each rank of a ring sends; ``nbytes`` are those of the call of NCCL."""
    return {"all_reduce": 2 * (size - 1) / size, "reduce_scatter": size - 1, "all_gather": size - 1, "send": 1,
            "broadcast": 1, "allto_all": size - 1}[name] * nbytes  # fmt: skip


def test_bytes_out_of_a_host(ranks, no_gpu):
    """h hosts send 2(h-1)/h of the data.  A ring of all n ranks sends 2(n-1)/n over the edge between two hosts."""
    out = Counter()  # by the size of NCCL's communicator, a rail's, and the rank in it, which is the host's number
    lock = threading.Lock()

    def counting(name, at):
        run = getattr(no_gpu, name)

        def count(*arguments):
            comm = next(each for each in arguments if isinstance(each, Comm))
            nbytes = arguments[at] * DTYPE_OF[arguments[at + 1]].numpy.itemsize
            with lock:
                out[comm.group.size, comm.rank] += round(sent(name, comm.group.size, nbytes))
            run(*arguments)

        return count

    for name, at in (("all_reduce", 2), ("reduce_scatter", 2), ("all_gather", 2), ("send", 1), ("allto_all", 2)):
        setattr(no_gpu, name, counting(name, at))
    hosts, n = len(set(ranks.names)), ranks.size
    local, part = n // hosts, 4 * 5040  # elements that a rank gets in all; every number of ranks divides them
    expected = {
        "all_reduce": 2 * (hosts - 1) / hosts, "reduce_scatter": (hosts - 1) / hosts, "all_gather": (n - local) / n,
        "all_to_all": local * (hosts - 1) / hosts,
    }  # fmt: skip
    for name, share in expected.items():
        out.clear()
        given = part // n if name == "all_gather" else part
        ranks.run(lambda gpu, name=name, given=given: getattr(gpu.comm, name)(filled(gpu, given)))
        assert out == {(hosts, host): round(share * part * 4) for host in range(hosts)}, name


@on_each_rank("ranks.run")
def test_what_stays_with_nccl(gpu, /):
    """Sums in rank order, sums of 8-bit floats, and calls for which the table has NCCL as the faster route."""
    comm = gpu.comm
    backend, ways = comm.backend, Ways(comm)
    assert ways.of(comm.all_reduce, filled(comm, 600)) == PHASES
    assert ways.of(comm.all_reduce, filled(comm, 600), algorithm=PHASES) == PHASES
    for call in (comm.all_reduce, comm.reduce_scatter, comm.reduce):
        assert ways.of(call, filled(comm, 600), deterministic=True) == "nccl"
    assert ways.of(comm.all_reduce, filled(comm, 600, ml_dtypes.float8_e4m3fn)) == "nccl"
    assert ways.of(comm.reduce, filled(comm, 600)) == "nccl"
    routes = {key("all_reduce", False, False, True): ((4000, "nccl"), (None, PHASES))}
    backend.use(replace(backend.choices.table, routes=routes))
    assert ways.of(comm.all_reduce, filled(comm, 1000)) == "nccl"
    assert ways.of(comm.all_reduce, filled(comm, 1000), algorithm=PHASES) == PHASES
    assert ways.of(comm.all_reduce, filled(comm, 1001)) == PHASES
    assert [backend.route_of("all_reduce", nbytes) for nbytes in (4000, 4004)] == ["nccl", PHASES]


@pytest.mark.parametrize(
    ("hosts", "reason"),
    [((4,), "the ranks are on one host"), ((1, 1), r"got [0]; [1]"), ((3, 1), r"got [0, 1, 2]; [3]")], ids=str,
)
def test_hosts_that_are_not_alike(no_gpu, hosts, reason):
    def body(gpu):
        x, ways = filled(gpu, 100), Ways(gpu.comm)
        assert ways.of(gpu.comm.all_reduce, x) == "nccl" and reason in gpu.comm.explain()
        assert (x.numpy() == gpu.size * (gpu.size + 1) / 2).all()
        assert not any(each.kernel_waits() for each in gpu.comm.backend.routes)

    HostRanks(hosts).run(body)


def test_a_host_whose_memory_cannot_be_mapped(no_gpu, monkeypatch):
    """Then no host works in phases, and every host gives the reason."""
    usual = PeerBackend

    def refuses(rendezvous, *arguments, **options):
        if rendezvous.failures.world[0] == 2:
            raise kos.errors.BackendUnavailable("peer: no bytes moved")
        return usual(rendezvous, *arguments, **options)

    monkeypatch.setattr(hierarchical, "PeerBackend", refuses)

    def body(gpu):
        assert Ways(gpu.comm).of(gpu.comm.all_reduce, filled(gpu, 100)) == "nccl"
        assert "peer: no bytes moved" in gpu.comm.explain()

    HostRanks((2, 2)).run(body)


# Which calls go in phases.


def test_the_prediction():
    """Phases are predicted if they send fewer bytes and the links within a host are faster by enough.

    The test compares them with hand-made figures.
    """
    routes = predicted(2, 8, 50e9, 450e9)
    gain = (2 * 15 / 16 - 1) / 50e9 - 2 * 7 / 8 / 450e9
    assert routes[key("all_reduce", False, False, True)] == ((round(20e-6 / gain), "nccl"), (None, PHASES))
    assert predicted(2, 2, 50e9, 20e9)[key("all_reduce", False, False, True)] == ((None, "nccl"),)
    slow = predicted(4, 8, 1.25e9, 450e9)
    for name in ("all_reduce", "reduce_scatter", "all_gather"):
        limits = [each[key(name, False, False, True)][0][0] for each in (slow, routes)]
        assert limits[0] is not None and (limits[1] is None or limits[0] < limits[1]), name


def test_the_rate_of_the_network(tmp_path):
    def write(place, **files):
        (tmp_path / place).mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (tmp_path / place / name).write_text(text)

    assert network_rate(tmp_path) == NETWORK
    write("net/lo", speed="-1", operstate="unknown")
    write("net/eth0", speed="25000\n", operstate="up\n")
    write("net/eth1", speed="100000", operstate="down")
    assert network_rate(tmp_path) == 25e9 / 8
    for number, state in enumerate(("4: ACTIVE", "4: ACTIVE", "1: DOWN")):
        write(f"infiniband/mlx5_{number}/ports/1", rate="400 Gb/sec (4X NDR)\n", state=state)
    assert network_rate(tmp_path) == 2 * 400e9 / 8


@pytest.mark.parametrize("measured", [False, True])
def test_a_measured_table_is_preferred(no_gpu, measured, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = user_path("a stand-in", 4, 2)
    if measured:
        path.parent.mkdir(parents=True)
        table = Table("a stand-in", "unknown links", 4, "", DEFAULT, ALWAYS, 2)
        path.write_text(json.dumps(table.to_json()))

    def body(gpu):
        text = gpu.comm.explain()
        assert (str(path) if measured else "predicted: 3 GB/s out of a host, 20 GB/s of each GPU") in text
        assert "2 hosts of 2 ranks" in text
        rows = [line.split() for line in text.splitlines() if line.startswith("all_reduce ")]
        assert rows[0][1:] == ([PHASES] * 5 if measured else ["nccl"] * 2 + [PHASES] * 3)

    HostRanks((2, 2), None).run(body)


def test_calls_of_a_batch_on_other_streams_follow(no_gpu, monkeypatch):
    """Also a call that ends or begins on a rail: the end of the call before it has been recorded by then."""
    rank = threading.local()

    def noting(name, usual):
        def noted(*given):
            rank.done = [*getattr(rank, "done", ()), (name, *[each for each in given if type(each) is int])]
            usual(*given)

        return noted

    for name in ("reduce_scatter", "all_gather"):
        setattr(no_gpu, name, noting(name, getattr(no_gpu, name)))
    for name in ("mark", "follow"):
        monkeypatch.setattr(Streams, name, noting(name, getattr(Streams, name)))

    def body(gpu):
        comm = gpu.comm
        x, y = filled(comm, 100), filled(comm, 9)
        for _ in range(2):  # first the ranks connect
            rank.done = []
            with comm.batch():
                comm.reduce_scatter(x, stream=5)
                comm.all_gather(y, stream=6)
        names = [name for name, *_ in rank.done]
        between = rank.done[names.index("reduce_scatter") : names.index("all_gather")]
        assert between.index(("mark", 5)) < between.index(("follow", 6, 5, 0)), rank.done

    HostRanks((2, 2)).run(body)


@on_each_rank(HostRanks((2, 2)).run)
def test_first_calls_are_bounded_and_name_the_call(gpu, /, no_gpu):
    """NCCL connects the ranks of a rail at their first call."""
    comm = gpu.comm
    found = waits_that_are_bounded(comm.backend.routes[0].rail)
    for _ in range(3):
        comm.all_reduce(filled(comm, 100))
    assert [text[:20] for text in found] == ["world: all_reduce #0"]


def test_tuning_measures_phases(no_gpu, monkeypatch):
    """Every operation and size is measured in phases and by NCCL alone, and the table is for these hosts."""
    measure_quickly(monkeypatch)

    def body(rendezvous):
        flat = rendezvous.threads.shared("groups", lambda: [Group(4), Group(4)])
        phases = communicator(rendezvous, HostBackend(rendezvous, ThreadTransport), flat[0], routes=None)
        nccl = kos.Communicator(of_nccl(rendezvous, Comm(flat[1], rendezvous.rank)), rendezvous, {}, WAIT)
        ways, tuner = Ways(phases), tune.TunerBetweenHosts(phases, nccl, 4096)
        table = tuner.table(lambda text: None)
        assert set(ways) == {PHASES}
        return table, tuner.measured

    found = HostRanks((2, 2)).run_bare(body)
    table, measured = found[0]
    assert all(each == table for each, _ in found) and table.hosts == 2 and table.ranks == 4
    assert {name.split()[0] for name in table.routes} == set(CARRIED)
    assert all({"hierarchical", "nccl"} < row.keys() for row in measured)
    assert parse(table.to_json(), "measured now") == table


# Failures.  Each rank has a rendezvous of its own, over sockets, and shares memory with the ranks of its host alone.
