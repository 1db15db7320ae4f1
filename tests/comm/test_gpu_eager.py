"""Calls on GPUs that the compiled core makes: they are as those through Python, and Python makes all others.

The driver, NCCL and memory are stand-ins; kernels of peer run on the host.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kos
from kos import ReduceOp
from kos.comm import watchdog
from kos.comm.gpu import nccl_binding
from kos.comm.gpu.auto import AutoBackend
from kos.comm.gpu.nccl import NCCLBackend
from kos.comm.gpu.peer.backend import PeerBackend
from kos.comm.gpu.peer.launches import Occupancy
from kos.comm.host.backend import HostBackend
from kos.comm.host.threads import ThreadTransport
from kos.comm.operation import EAGER
from kos.cuda import driver
from kos.errors import CollectiveError, CollectiveMismatch, CudaError, InvalidArgument, KosError
from kos.memory.array import Array
from tests.comm import fake_peer
from tests.comm.fake_nccl import WAIT, Comm, FakeNCCL, FakeRanks, Group, Stream, captures, no_gpu
from tests.comm.fake_peer import ThreadRanks, no_gpus
from tests.comm.ranks import on_threads
from tests.comm.shared_ranks import needs_core
from tests.host_compiler import COMPILER
from tests.launcher import OUTSIDE, run_program

pytestmark = needs_core
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")

ROOT = Path(__file__).parents[2]
Body = Callable[[Any], None]


def hits(comm: Any) -> int:
    return int(comm._eager.hits)


def on_gpu(values: Any, stream: Any = None) -> Array:
    return Array.from_numpy(np.array(values), 0, stream=stream)


@contextmanager
def by(comm: Any, core: int) -> Iterator[None]:
    """The core makes so many of the calls meanwhile."""
    before = hits(comm)
    yield
    assert hits(comm) - before == core


@pytest.fixture(autouse=True)
def _no_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watchdog, after whose looks Python marks a call of NCCL, looks at nothing."""
    monkeypatch.setattr(watchdog, "TICK", 1000.0)


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNCCL]:
    with no_gpu(monkeypatch) as fake:
        yield fake


@pytest.fixture(params=["nccl", pytest.param("peer", marks=needs_compiler)])
def run(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Body], None]]:
    """Runs a function of a communicator on two ranks."""
    ranks: Any = FakeRanks(2) if request.param == "nccl" else ThreadRanks(2)
    with no_gpu(monkeypatch) if request.param == "nccl" else no_gpus(monkeypatch, 2):
        yield lambda body: ranks.run(lambda gpu: body(gpu.comm))


def own(comm: kos.Communicator, y: Array) -> Array:
    """This rank's half."""
    half = y.size // 2
    return y[comm.rank * half : (comm.rank + 1) * half]


CALLS: dict[str, Callable[..., Any]] = {
    "all_reduce": lambda c, x, y: c.all_reduce(x),
    "all_reduce out": lambda c, x, y: c.all_reduce(x, ReduceOp.MAX, out=y[: x.size]),
    "reduce": lambda c, x, y: c.reduce(x, 1),
    "broadcast": lambda c, x, y: c.broadcast(x, 0),
    "all_gather": lambda c, x, y: c.all_gather(x, y),
    "all_gather in place": lambda c, x, y: c.all_gather(own(c, y), y.reshape(2, -1)),
    "reduce_scatter in place": lambda c, x, y: c.reduce_scatter(y.reshape(2, -1), own(c, y)),
    "reduce_scatter": lambda c, x, y: c.reduce_scatter(y, x),
    "gather": lambda c, x, y: c.gather(x, 1, out=y if c.rank == 1 else None),
    "scatter": lambda c, x, y: c.scatter(y if c.rank == 1 else None, x, 1),
}
BY_PEER = {
    "all_to_all": lambda c, x, y: c.all_to_all(y, on_gpu(np.zeros(2 * x.size, np.int32))),
    "scan": lambda c, x, y: c.scan(x),
    "exscan": lambda c, x, y: c.exscan(x),
    "send_recv": lambda c, x, y: c.send_recv(x, y[: x.size], 1 - c.rank, 1 - c.rank),
    "all_gather_v": lambda c, x, y: c.all_gather_v(x, [x.size, x.size], y),
    "reduce_scatter_v": lambda c, x, y: c.reduce_scatter_v(y, (x.size, x.size), x),
}


def test_results_are_those_of_calls_through_python(run: Callable[[Body], None], seed: int) -> None:
    """On fresh arrays, of two sizes, all of which the core knows after a call or two."""

    def body(comm: kos.Communicator) -> None:
        plain = comm.duplicate()
        for name in EAGER:
            plain.__dict__.pop(name, None)  # the method of the class
        random = np.random.default_rng(seed + comm.rank)
        for name, call in (CALLS | (BY_PEER if comm.backend_name == "peer" else {})).items():
            for count in (3, 400):
                before = hits(comm)
                for _ in range(5):
                    values = [random.integers(0, 99, n).astype(np.int32) for n in (count, 2 * count)]
                    mine, others = ([on_gpu(each) for each in values] for _ in range(2))
                    got, expected = call(comm, *mine), call(plain, *others)
                    for a, b in zip(mine, others, strict=True):
                        np.testing.assert_array_equal(a.numpy(), b.numpy(), name)
                    assert (got is None) == (expected is None), name
                    if got is not None:
                        np.testing.assert_array_equal(got.numpy(), expected.numpy(), name)
                assert hits(comm) - before >= 2, name
        assert hits(plain) == 0
        plain.close()

    run(body)


def test_the_recorder_has_them(run: Callable[[Body], None]) -> None:
    def body(comm: kos.Communicator) -> None:
        for _ in range(4):
            comm.all_reduce(on_gpu([1.0, 2.0]))  # this line
        entries = comm.recorder.entries()[-4:]
        assert [entry["collective_seq_id"] for entry in entries] == [0, 1, 2, 3]
        assert len({entry["frames"][0]["line"] for entry in entries}) == 1
        assert "test_gpu_eager.py" in entries[-1]["frames"][0]["filename"]
        assert "all_reduce #3 at" in comm.recorder.last_call() and hits(comm) >= 2
        last = comm.backend._last
        assert last is comm.backend.shared.last and last.sequence == 3 and last.record[4] == 3

    run(body)


def known(comm: kos.Communicator, x: Array, **options: Any) -> None:
    """Make the core know all_reduces like that of ``x``."""
    for _ in range(3):
        comm.all_reduce(x, **options)
    with by(comm, 1):
        comm.all_reduce(x, **options)


def test_other_calls_are_made_by_python(run: Callable[[Body], None]) -> None:
    """Of another shape, alignment, dtype, stream or option; once, if the core can make them."""

    def body(comm: kos.Communicator) -> None:
        x, whole = on_gpu(np.ones(4, np.float32)), on_gpu(np.ones(64, np.float32))
        known(comm, x)
        others = [on_gpu(np.ones(5, np.float32)), on_gpu(np.ones((2, 2), np.float32)), on_gpu(np.ones(4)), whole[1:5]]
        for other in others:
            with by(comm, 0):
                comm.all_reduce(other)
            known(comm, other)
        with by(comm, len(others)):
            for other in others:
                comm.all_reduce(other)
        for options in ({"async_op": True}, {"timeout": 9.0, "async_op": True}):
            with by(comm, 0):
                for _ in range(3):
                    comm.all_reduce(x, **options).wait()
        comm.all_reduce(x)  # follows the last one, on another stream
        with by(comm, 1):
            comm.all_reduce(x)

    run(body)


def test_wrong_arrays_are_refused(run: Callable[[Body], None]) -> None:
    def body(comm: kos.Communicator) -> None:
        x, y = on_gpu(np.ones(8, np.float32)), on_gpu(np.ones(8, np.float32))
        known(comm, x[:4], out=None)
        known(comm, x[:4], out=y[:4])
        frozen = Array(x.pointer, (4,), "float32", 0, owner=x, readonly=True)
        freed = on_gpu(np.ones(4, np.float32))
        freed.owner.close()
        for wrong, out in ((frozen, None), (freed, None), (x[:4], x[2:6])):
            with pytest.raises(InvalidArgument), by(comm, 0):
                comm.all_reduce(wrong, out=out)
        with by(comm, 0):
            comm.all_reduce(x[:4], out=x[:4])

    run(body)


def test_another_stream_is_ordered_by_python(run: Callable[[Body], None]) -> None:
    def body(comm: kos.Communicator) -> None:
        streams = Stream(40), Stream(41)
        arrays = [on_gpu(np.ones(4, np.float32), stream) for stream in streams]
        for x in arrays:
            known(comm, x)
        for x in arrays:
            with by(comm, 0):
                comm.all_reduce(x)
            with by(comm, 2):
                comm.all_reduce(x)
                comm.all_reduce(x)
        known(comm, arrays[0], stream=streams[1])
        with by(comm, 0):  # of a handle nobody keeps the stream
            for _ in range(3):
                comm.all_reduce(arrays[0], stream=40)

    run(body)


def test_a_stream_that_its_owner_closes(run: Callable[[Body], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its handle is then that of the legacy stream, as Python reads it."""

    def body(comm: kos.Communicator) -> None:
        stream = Stream(40)
        x, y = on_gpu(np.ones(4, np.float32), stream), on_gpu(np.ones(4, np.float32))
        known(comm, x)
        known(comm, y, stream=stream)
        known(comm, x)
        comm.rendezvous.barrier()
        stream.handle = 0
        with by(comm, 0):
            comm.all_reduce(x)
        with by(comm, 0):
            comm.all_reduce(y, stream=stream)

    run(body)


def test_a_batch_gets_them(run: Callable[[Body], None]) -> None:
    def body(comm: kos.Communicator) -> None:
        x, y = on_gpu(np.ones(4, np.float32)), on_gpu(np.ones(4, np.float32))
        known(comm, x)
        with by(comm, 0), comm.batch():
            comm.all_reduce(x)
            comm.all_reduce(y)
        assert (y.numpy() == 2).all()

    run(body)


def test_whatever_a_launch_depends_on(run: Callable[[Body], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """One by one, the core finds what Python would find; the next call after that is the core's again."""

    def body(comm: kos.Communicator) -> None:
        x, backend = on_gpu(np.ones(4, np.float32)), comm.backend
        known(comm, x)
        changes: list[tuple[Any, str, Any]] = [(backend.shared.streams, "current", backend.shared.streams.NONE)]
        if backend.name == "peer":
            changes.append((backend, "_at", -1))
        for where, name, value in changes:
            setattr(where, name, value)
            with by(comm, 0):
                comm.all_reduce(x)
            with by(comm, 1):
                comm.all_reduce(x)
        backend.shared.calls.core.fail(10**6)  # another rank reports that a later call fails
        with by(comm, 0):
            comm.all_reduce(x)
        comm.timeout = 19.0  # the Prepared are other ones
        with by(comm, 0):
            comm.all_reduce(x)

    run(body)


@needs_compiler
def test_other_communicators_leave_too_little_room(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(gpu: Any) -> None:
        comm = gpu.comm
        other = comm.duplicate()
        x = on_gpu(np.ones(4, np.float32))
        for _ in range(3):
            other.all_reduce(x)
        known(comm, x)
        room = comm.backend._occupancy
        for less in (Occupancy(room.blocks - 1, room.blocks_per_sm), Occupancy(room.blocks, room.blocks_per_sm + 1)):
            comm.backend._occupancy = less
            with by(comm, 0):
                comm.all_reduce(x)
        comm.backend._occupancy = Occupancy(room.blocks + 1, room.blocks_per_sm - 1)
        with by(comm, 1):
            comm.all_reduce(x)
        other.close()

    with no_gpus(monkeypatch, 2):
        ThreadRanks(2).run(body)


@needs_compiler
def test_the_legacy_stream_is_that_of_the_current_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(gpu: Any) -> None:
        comm, x = gpu.comm, on_gpu(np.ones(4, np.float32))
        known(comm, x)
        fake.driver.current += 1
        with by(comm, 0):
            comm.all_reduce(x)
        comm.rendezvous.barrier()
        fake.driver.current -= 1

    with no_gpus(monkeypatch, 2) as fake:
        ThreadRanks(2).run(body)


def test_every_64th_call_compares(nccl: FakeNCCL) -> None:
    def body(gpu: Any) -> None:
        comm, x = gpu.comm, on_gpu([1.0])
        known(comm, x)
        for _ in range(400):
            comm.all_reduce(x)
        at = comm.backend.shared.calls.core.compare_at
        assert at > 300 and 390 <= hits(comm) <= 403
        assert comm.backend.shared._confirmed > 300

    FakeRanks(2).run(body)


def test_calls_that_differ_are_named(nccl: FakeNCCL, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks never wait for one another here."""
    monkeypatch.setattr(FakeNCCL, "all_reduce", lambda *_: None)
    failures: list[Exception] = []

    def body(gpu: Any) -> None:
        comm, x = gpu.comm, on_gpu([1])
        known(comm, x)
        known(comm, x, op=ReduceOp.MAX)
        comm.rendezvous.barrier()

        def call(number: int) -> None:
            comm.all_reduce(x, op=ReduceOp.MAX if number == 50 and comm.rank else ReduceOp.SUM)
            time.sleep(0.001 * (number > 100))  # ranks compare the last 1,024

        with pytest.raises(CollectiveMismatch) as found:
            deque(map(call, range(5000)), 0)
        failures.append(found.value)
        assert hits(comm) > 45

    FakeRanks(2).run(body)
    assert len(failures) == 2
    for error in failures:
        assert "rank 0 called all_reduce #58 of int64[1] by SUM but rank 1 called all_reduce #58" in str(error)


def test_graphs_keep_windows(nccl: FakeNCCL) -> None:
    """A captured call goes through Python, which keeps the memory of windows for the graph."""

    def body(gpu: Any) -> None:
        comm = gpu.comm
        x, y = comm.allocate(4, np.float32), comm.allocate(4, np.float32)
        stream = Stream(40)
        known(comm, x, stream=stream)
        with captures() as graph, by(comm, 0):
            comm.all_reduce(x, stream=stream)
        with by(comm, 1):
            comm.all_reduce(x, stream=stream)
        with by(comm, 0):  # in another window
            comm.all_reduce(y, stream=stream)
        graph.destroy()

    FakeRanks(2).run(body)


def test_a_captured_call_says_nothing_of_eager_ones(nccl: FakeNCCL) -> None:
    """Whose route may be another one."""

    def body(gpu: Any) -> None:
        comm, x, stream = gpu.comm, on_gpu([1.0]), Stream(40)
        known(comm, x)
        with captures(), by(comm, 0):
            for _ in range(3):
                comm.all_reduce(x, stream=stream)
        with by(comm, 0):
            comm.all_reduce(x, stream=stream)
        with by(comm, 1):
            comm.all_reduce(x, stream=stream)

    FakeRanks(2).run(body)


def test_an_early_end_of_a_kernel_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(gpu: Any) -> None:
        comm, x = gpu.comm, on_gpu([1.0])
        known(comm, x)
        comm.rendezvous.barrier()
        comm.backend._engine.record.words[fake_peer.record.FAILED] = 1
        with pytest.raises(CollectiveError), by(comm, 0):
            comm.all_reduce(x)

    if COMPILER is None:
        pytest.skip("needs a C++ compiler")
    with no_gpus(monkeypatch, 2):
        ranks = ThreadRanks(2)
        monkeypatch.setattr(ThreadRanks, "_with_communicator", staticmethod(_left_open))
        ranks.run(body)


def _left_open(fn: Body, rendezvous: Any, timeout: float) -> None:
    comm = fake_peer.communicator(rendezvous, timeout)
    fn(fake_peer.OnGPU(comm))
    comm.abort()


def test_a_launch_that_is_refused(nccl: FakeNCCL) -> None:
    class NCCLError(Exception):
        def __init__(self, status: int) -> None:
            super().__init__(f"status {status}")
            self.status = status

    nccl.NCCLError = NCCLError  # type: ignore[attr-defined]
    failed = threading.Event()

    def body(gpu: Any) -> None:
        comm, x = gpu.comm, on_gpu([1.0])
        known(comm, x)
        comm.rendezvous.barrier()
        driver.cu.cuMemGetInfo = lambda: (0,)
        nccl.driver.instead["all_reduce"] = lambda *words: 1
        before = hits(comm)
        if comm.rank == 1:
            failed.wait(10.0)
            with pytest.raises(KosError):
                comm.all_reduce(x)
            return
        with pytest.raises(CudaError, match=r"all_reduce #4 .*status 1"):
            comm.all_reduce(x)
        failed.set()
        assert hits(comm) == before + 1 and comm._active is None
        with pytest.raises(CudaError, match="failed before"):
            comm.all_reduce(x)
        assert hits(comm) == before + 1

    FakeRanks(2).run(body)


SLEEP = "all_reduce"


def sleeping(monkeypatch: pytest.MonkeyPatch) -> None:
    """An all_reduce by the core reads at its first address how long it blocks: nanosleep."""
    nanosleep = ctypes.cast(ctypes.CDLL(None).nanosleep, ctypes.c_void_p).value
    monkeypatch.setattr(nccl_binding, "_address_of", lambda operation: nanosleep)
    monkeypatch.setattr(FakeNCCL, "all_reduce", lambda *_: None)


def test_other_threads_run_while_a_launch_blocks(nccl: FakeNCCL, monkeypatch: pytest.MonkeyPatch) -> None:
    sleeping(monkeypatch)

    def body(gpu: Any) -> None:
        comm, x = gpu.comm, on_gpu(np.array([0, 200_000_000], np.int64))
        ticks, over = [], threading.Event()

        def tick() -> None:
            while not over.wait(0.002):
                ticks.append(time.monotonic())

        known(comm, x)
        thread = threading.Thread(target=tick)
        thread.start()
        began = time.monotonic()
        with by(comm, 1):
            comm.all_reduce(x)
        ended = time.monotonic()
        over.set()
        thread.join()
        assert ended - began >= 0.2
        assert len([each for each in ticks if began < each < ended]) > 10

    FakeRanks(2).run(body)


def test_two_threads_are_found_while_a_launch_blocks(nccl: FakeNCCL, monkeypatch: pytest.MonkeyPatch) -> None:
    sleeping(monkeypatch)
    found = threading.Event()

    def body(gpu: Any) -> None:
        comm, x, y = gpu.comm, on_gpu(np.array([0, 500_000_000], np.int64)), on_gpu(np.array([0, 0], np.int64))
        known(comm, y)
        comm.rendezvous.barrier()
        if comm.rank == 1:
            found.wait(10.0)
            comm.all_reduce(y)  # the one that the other rank has begun
            comm.all_reduce(y)
            with pytest.raises(CollectiveError, match="two threads"):
                comm.synchronize()
            return
        first = threading.Thread(target=lambda: comm.all_reduce(x))
        first.start()
        while comm._active is None:
            time.sleep(0.001)
        with pytest.raises(CollectiveError, match=r"two threads call .*all_reduce #4 .* and all_reduce"):
            comm.all_reduce(y)
        found.set()
        first.join()

    FakeRanks(2).run(body)


@needs_compiler
def test_of_two_backends_python_orders_each_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deterministic calls go by peer, others by NCCL."""
    group = Group(2)

    def rank(rendezvous: Any) -> None:
        host = HostBackend(rendezvous, ThreadTransport)
        gpus = [NCCLBackend(rendezvous, 0, Comm(group, rendezvous.rank), host), PeerBackend(rendezvous, 0, host)]
        with kos.Communicator(AutoBackend(rendezvous, host, gpus), rendezvous, {}, WAIT) as comm:
            x, ways = on_gpu(np.ones(4, np.float32)), [{}, {"deterministic": True}]
            parts = set()
            for options in ways:
                known(comm, x, **options)
                parts.add(comm.backend._last_part.name)
            assert parts == {"nccl", "peer"}
            for options in (*ways, *ways):
                with by(comm, 0):
                    comm.all_reduce(x, **options)
                with by(comm, 1):
                    comm.all_reduce(x, **options)
            assert comm.all_reduce(np.ones(3)).sum() == 6  # of host memory, by Python

    with no_gpus(monkeypatch, 2):
        on_threads(2, rank, WAIT, group.barrier.abort)


TORCH = """
import ctypes, sys, types
import numpy as np
import pytest

class Tensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("device", ctypes.c_int32), ("index", ctypes.c_int32),
                ("nd", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
                ("shape", ctypes.c_void_p), ("strides", ctypes.c_void_p), ("offset", ctypes.c_uint64)]

now = {"stream": 0}

@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(Tensor))
def read(x, out):
    out[0] = Tensor(x.data_ptr(), 2, 0, 1, 2, 32, 1, x.sizes.ctypes.data, x.steps.ctypes.data, 0)
    return 0

@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int32, ctypes.c_int32, ctypes.POINTER(ctypes.c_uint64))
def stream(device, index, out):
    out[0] = now["stream"]
    return 0

class API(ctypes.Structure):
    _fields_ = [("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("former", ctypes.c_void_p * 4),
                ("read", type(read)), ("stream", type(stream))]

api = API(1, 3, (ctypes.c_void_p * 4)(), read, stream)
capsule = ctypes.pythonapi.PyCapsule_New
capsule.restype, capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]

class FakeTensor:
    __dlpack_c_exchange_api__ = capsule(ctypes.addressof(api), b"dlpack_exchange_api", None)
    is_cuda, layout, requires_grad, dtype, negated = True, "strided", False, "torch.float32", False
    def __init__(self, values, stride=1):
        self.values = np.array(values, np.float32)
        self.sizes, self.steps = np.array([self.values.size], np.int64), np.array([stride], np.int64)
        self.shape = (self.values.size,)
    def data_ptr(self): return self.values.ctypes.data
    def get_device(self): return 0
    def is_contiguous(self): return True
    def is_neg(self): return self.negated

FakeTensor.__module__, FakeTensor.__name__ = "torch", "Tensor"
class CurrentStream:
    stream_id = -1
torch = types.ModuleType("torch")
torch.Tensor, torch.strided = FakeTensor, "strided"
torch._C = types.SimpleNamespace(_cuda_getCurrentRawStream=lambda device: now["stream"])
torch.cuda = types.SimpleNamespace(current_stream=lambda device: CurrentStream)
sys.modules["torch"] = torch

from kos.comm import watchdog
from kos.comm.gpu import eager
from tests.comm.fake_nccl import FakeRanks, no_gpu
from tests.comm.test_gpu_eager import by, known

assert eager._address(type("Parameter", (FakeTensor,), {"__module__": "torch"})([1])) is None

def body(gpu):
    comm = gpu.comm
    def meet(): comm.rendezvous.barrier()
    x, y = FakeTensor([1, 2]), FakeTensor([3, 4])
    known(comm, x)
    with by(comm, 1):
        assert comm.all_reduce(y) is y
    assert (y.values == [6, 8]).all()
    meet()
    now["stream"] = 80
    meet()
    with by(comm, 0):
        comm.all_reduce(y)
    with by(comm, 1):
        comm.all_reduce(y)
    for strange in ("negated", "requires_grad", "strided"):
        tensor = FakeTensor([1, 2], stride=2 if strange == "strided" else 1)
        setattr(tensor, strange, True)
        with by(comm, 0):
            try:
                comm.all_reduce(tensor)
            except Exception as error:  # a stand-in has no __dlpack__
                print(error, file=sys.stderr)
    with by(comm, 1):
        comm.all_reduce(FakeTensor([5, 6]))
    print("done", flush=True)

with pytest.MonkeyPatch.context() as patch, no_gpu(patch):
    patch.setattr(watchdog, "TICK", 1000.0)
    FakeRanks(2).run(body)
"""


def test_tensors_of_torch_and_its_stream(tmp_path: Path) -> None:
    """In a process of its own: the core reads the tensors of one type."""
    program = tmp_path / "program.py"
    program.write_text(TORCH)
    done = run_program(sys.executable, str(program), env={**OUTSIDE, "PYTHONPATH": str(ROOT)}, cwd=ROOT)
    assert done.returncode == 0 and done.stdout.count("done") == 2, done.stderr


def test_objects_that_are_new_each_time_are_not_kept(nccl: FakeNCCL) -> None:
    """They would push out calls that the core knows."""

    def body(gpu: Any) -> None:
        comm, x = gpu.comm, on_gpu([1.0])
        known(comm, x)
        fresh = type("ExternalStream", (Stream,), {"__module__": "torch.cuda"})
        for number in range(40):
            comm.all_reduce(x, timeout=10.0 + number)
            comm.all_reduce(x, stream=fresh(40))
        comm.all_reduce(x)
        with by(comm, 1):
            comm.all_reduce(x)

    FakeRanks(2).run(body)


@needs_compiler
def test_sizes_that_travel_do_so_at_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(gpu: Any) -> None:
        comm = gpu.comm
        for size in (2, 2, 2, 3):
            mine = 2 if comm.rank else size
            x, out = on_gpu(np.full(mine, comm.rank)), on_gpu(np.zeros(2 + size, np.int64))
            with by(comm, 0):
                comm.all_gather_v(x, out=out)
            assert out.numpy().tolist() == [0] * size + [1, 1]

    with no_gpus(monkeypatch, 2):
        ThreadRanks(2).run(body)
