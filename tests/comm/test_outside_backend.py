"""A backend of another package, ``kos_relay`` in the folder ``outside``, found by its entry point.

It keeps the promises of the conformance suite in host memory and on GPUs, which are stand-ins here.
"""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kos
from kos.comm import create
from kos.comm.contract import Backend, Probe, lacking
from kos.comm.control.threads import ThreadControlPlane
from kos.comm.gpu.nccl import NCCLBackend
from kos.comm.operation import Operation
from kos.errors import BackendUnavailable, InvalidArgument
from kos.memory.array import Array
from kos.testing.conformance import cases, run
from kos.testing.conformance.model import Step, Trial
from kos.testing.conformance.on_gpu import OnGPU
from tests.comm.fake_nccl import Comm
from tests.comm.fake_nccl import Group as FakeGroup
from tests.comm.outside.kos_relay import Relay
from tests.comm.ranks import on_each_rank, on_threads
from tests.comm.shared_ranks import needs_core
from tests.comm.test_tuning import tuned
from tests.fake_cuda import ThreadContexts
from tests.host_compiler import needs_compiler

OUTSIDE = Path(__file__).parent / "outside"
SIZE = 3


@pytest.fixture
def installed(monkeypatch):
    """Its folder and its metadata are on ``sys.path``, and the entry point is registered."""
    before = dict(create.BACKENDS)
    monkeypatch.syspath_prepend(str(OUTSIDE))
    (entry,) = entry_points(group=create.GROUP, name="relay")
    kos.register_backend(entry.name, entry.load())
    yield
    create.BACKENDS.clear()
    create.BACKENDS.update(before)


def test_kos_finds_it_by_its_entry_point():
    """As after ``pip install kos-relay``, in a process that imports only kos."""
    program = "import kos, numpy as np; print(kos.init('relay').all_reduce(np.ones(2)), kos.init().backend_name)"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(OUTSIDE), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("[1. 1.]") and "relay" not in done.stdout, done.stderr


@pytest.fixture
def gpus(installed, fake):
    """Each rank is a thread with a GPU that is a stand-in."""
    return fake


def on_ranks(
    body: Callable[[kos.Communicator], Any], backend: str = "relay", size: int = SIZE, device: int | None = None
) -> list[Any]:
    def rank(rendezvous: ThreadControlPlane) -> Any:
        with kos.init(backend, rendezvous=rendezvous, timeout=20.0, device=device) as comm:
            return body(comm)

    return on_threads(size, rank, 90.0)  # whose limit is twice that: a busy machine takes 60 s for the whole suite


def test_host_memory(installed):
    """One operation is enough, because all are made of the same messages.

    Another such backend runs the whole suite.
    """

    def body(comm):
        assert comm.backend_name == "relay" and "relay    in use" in comm.explain()
        return run(comm, only="all_reduce")

    assert on_ranks(body) == [{}] * SIZE


ON_GPU = cases(gpu=True)
FAILURES = [case for case in ON_GPU if ", " in case.name]
SOME = re.compile(r"\w+ float32( PREMUL_SUM| SUM( deterministic| in rank order)?)?|compressed int8 bfloat16|shapes.*")
"""Matches the names of one promise of each kind.  Others differ only in their kernels, which are those of nccl."""


@pytest.mark.parametrize("group", [
    pytest.param([case for case in ON_GPU if SOME.fullmatch(case.name)], marks=needs_compiler, id="some"),
    pytest.param(FAILURES, marks=needs_core, id="failures"),
])  # fmt: skip
@on_each_rank(on_ranks)
def test_gpu_memory(comm, /, gpus, group):
    assert (comm.device, comm.backend_name) == (0, "relay")
    for case in group:
        case.call(OnGPU(comm))


@needs_core
def test_run_on_gpu_memory(gpus):
    assert on_ranks(lambda comm: run(comm, gpu=True, only="op, calls differ")) == [{}] * SIZE


@needs_core
def test_auto_compares_calls_of_mock_with_calls_on_gpus(gpus, monkeypatch):
    """A barrier on hosts is compared with an all_reduce on GPUs, also if ranks are threads and share no ring buffer."""
    tuned(monkeypatch, None)

    def body(comm):
        return comm.backend_name, run(comm, gpu=True, only="operation, calls differ")

    assert on_ranks(body, "auto") == [("relay+mock", {})] * SIZE


@on_each_rank(on_ranks, size=1)
def test_a_run_on_gpu_memory_needs_a_gpu(comm, /, installed):
    assert comm.device is None
    with pytest.raises(InvalidArgument, match="gpu: expected a communicator that uses a GPU, got <Communicator"):
        run(comm, gpu=True)


@on_each_rank(on_ranks)
def test_a_batch_has_collectives_and_other_messages_on_each_rank(comm, /, gpus):
    """All messages are sent at once.  With one exchange after another, the ranks would wait for each other.

    The library matches messages by their order, which must not depend on the number of messages of a rank.
    """
    to = [rank for rank in range(SIZE) if rank != comm.rank and (comm.rank, rank) != (0, 2)]
    of = [rank for rank in range(SIZE) if rank != comm.rank and (rank, comm.rank) != (0, 2)]
    sent = [Array.from_numpy(np.full(3, 10 * comm.rank + rank), 0) for rank in to]
    got = [Array.zeros(3, np.int64, 0) for _ in of]
    total = Array.from_numpy(np.ones(2), 0)
    with comm.batch():
        for rank, x in zip(of, got, strict=True):
            comm.recv(x, rank)
        comm.all_reduce(total)
        for rank, x in zip(to, sent, strict=True):
            comm.send(x, rank)
    assert [x.numpy().tolist() for x in got] == [[10 * rank + comm.rank] * 3 for rank in of]
    assert total.numpy().tolist() == [SIZE, SIZE]


@pytest.mark.parametrize("call", ["all_gather", "all_reduce", "broadcast", "batch"])
def test_the_gpu_is_current_in_the_thread_that_calls_exchange(gpus, call):
    """On a default stream too: copies and events of the driver need a current device."""
    contexts, seen = ThreadContexts(1), list[int]()
    contexts.install(gpus.cu)

    class Notes(Relay):
        name = "notes"

        def exchange(self, *arguments):
            seen.append(contexts.stack[-1])
            super().exchange(*arguments)

    kos.register_backend("notes", Notes)

    def body(comm):
        x, y = (Array.from_numpy(np.ones(4, np.float32), 0) for _ in range(2))
        for _ in range(2):
            with comm.batch() if call == "batch" else nullcontext():
                if call == "all_gather":
                    comm.all_gather(x)
                elif call == "broadcast":
                    comm.broadcast(x, 0)
                else:
                    comm.all_reduce(x, out=y)

    on_ranks(body, "notes")
    assert seen == [0] * len(seen) and len(seen) >= 2 * SIZE


@pytest.mark.parametrize("name", [name for name, kind in create.BACKENDS.items() if kind.on_gpu])
def test_the_backends_of_kos_for_gpus_are_of_the_contract(name):
    kind = create.BACKENDS[name]
    assert issubclass(kind, Backend) and not lacking(kind) and not kind.on_host


def test_an_abort_reaches_the_library_once_with_its_reason(gpus):
    reasons = []

    class Ends(Relay):
        name = "ends"

        def abort(self, reason):
            reasons.extend([reason] * (self.device is not None))
            return super().abort(reason)

    def body(comm):
        comm.all_reduce(Array.from_numpy(np.ones(4, np.float32), 0))
        comm.abort(reason="enough")

    kos.register_backend("ends", Ends)
    on_ranks(body, "ends", size=1)
    assert len(reasons) == 1 and "enough" in reasons[0]


@on_each_rank(on_ranks, size=1)
def test_what_the_contract_lacks_is_named(comm, /, gpus):
    x = comm.allocate(3, np.float32)
    for method, call in (("views", comm.views), ("register", comm.register)):
        with pytest.raises(BackendUnavailable, match=f"{method}: expected a backend that defines it, got relay"):
            call(x)
    with pytest.raises(InvalidArgument, match="algorithm: expected 'auto' on relay, got 'ring'"):
        comm.all_reduce(x, algorithm="ring")


class Native(Relay):
    """It has a call of its own for an all_gather."""

    name = "native"

    def native_on_gpu(self, o: Operation) -> Any:
        if o.name != "all_gather" or o.send is None:
            return None
        nbytes = o.send.nbytes

        def launch(stream: int, send: int, recv: int) -> None:
            called.append(nbytes)
            self.collect(send, recv, nbytes, stream)

        return launch


called: list[int] = []


def test_a_call_of_the_library(gpus):
    kos.register_backend("native", Native)
    called.clear()
    on_ranks(lambda comm: Trial(OnGPU(comm), Step("all_gather", 5), 0).run(), "native")
    assert called == [20] * SIZE


# Under ``auto``.

ROUTES = {"all_reduce 32-bit ordinary eager": [[1024, "relay"], [None, "nccl"]]}


def beside_nccl(monkeypatch: pytest.MonkeyPatch, routes: dict[str, Any], nccl: bool = True) -> None:
    """Let ranks find a table with these routes, and NCCL, which they can use or not."""
    group = FakeGroup(SIZE)

    class NCCL(NCCLBackend):
        def __init__(self, rendezvous: Any, engine: Any, device: int, comm: Any = None) -> None:
            super().__init__(rendezvous, engine, device, comm or Comm(group, rendezvous.rank))

        @classmethod
        def probe(cls, rendezvous: Any) -> Probe:
            return Probe(nccl, "a stand-in")

    create.BACKENDS["nccl"] = NCCL  # ``installed`` restores it
    tuned(monkeypatch, routes)


def auto(monkeypatch: pytest.MonkeyPatch, routes: dict[str, Any], nccl: bool) -> list[Any]:
    """The backend of each of two calls, small and large, and the reason of the probe; by rank."""
    beside_nccl(monkeypatch, routes, nccl)

    def body(comm: kos.Communicator) -> Any:
        used = []
        for count in (8, 4096):
            x = Array.from_numpy(np.ones(count, np.float32), 0)
            work = comm.all_reduce(x, async_op=True)
            used.append(work.prepared.route.name)
            work.synchronize()
            assert (x.numpy() == SIZE).all()
        return used, comm.backend_name, comm.probes["relay"].reason

    return on_ranks(body, "auto")


@pytest.mark.parametrize(("routes", "nccl", "used", "name"), [
    (ROUTES, True, ["relay", "nccl"], "nccl+relay+mock"),
    ({}, True, ["nccl", "nccl"], "nccl+mock"),
    ({}, False, ["relay", "relay"], "relay+mock"),
])  # fmt: skip
def test_auto_takes_it_where_a_table_prefers_it(gpus, monkeypatch, routes, nccl, used, name):
    for calls, backend_name, reason in auto(monkeypatch, routes, nccl):
        assert (calls, backend_name) == (used, name)
        unmeasured = "; auto uses it once it was measured here: kos bench --write-table --with relay"
        assert reason == "queues and copies of one process" + unmeasured * ("relay" not in name)


def test_a_split_chooses_by_a_table_too(gpus, monkeypatch):
    beside_nccl(monkeypatch, ROUTES)

    def body(comm):
        split = comm.split(0)
        assert split is not None
        several = comm, split, split.split(0)
        works = [each.all_reduce(Array.zeros(8, np.float32, 0), async_op=True) for each in several if each is not None]
        for work in works:
            work.synchronize()
        return [work.prepared.route.name for work in works]

    assert on_ranks(body, "auto") == [["relay"] * 3] * SIZE


def test_auto_warns_of_a_table_that_names_no_backend(gpus, monkeypatch, caplog):
    routes = {"all_reduce 32-bit ordinary eager": [[1024, "gloo"], [None, "nccl"]]}
    assert [used for used, *_ in auto(monkeypatch, routes, True)] == [["nccl", "nccl"]] * SIZE
    assert "the tuning table a test names backends that are not registered: gloo" in caplog.text


@pytest.mark.parametrize(("text", "name", "warning"), [
    ('{"format": 1, "backend": "relay"}', "relay", ""),
    ('{"format": 1, "backend": "nowhere"}', "mock", ""),
    ('{"format": 2}', "mock", "ValueError: expected format 1 and the name of a backend"),
    ("[", "mock", "JSONDecodeError"),
])  # fmt: skip
def test_auto_takes_it_for_host_memory(installed, monkeypatch, tmp_path, caplog, text, name, warning):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = tmp_path / "kos" / "tuning" / "host-memory-3.json"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert on_ranks(lambda comm: comm.backend_name, "auto") == [name] * SIZE
    assert warning in caplog.text


@pytest.mark.gpu
@on_each_rank(on_ranks, size=2, device=0)
def test_on_one_gpu(comm, /, installed):
    """Two ranks, which are threads, and share a GPU."""
    assert comm.device is not None and comm.backend_name == "relay"
    for case in ON_GPU:
        case.call(OnGPU(comm))
