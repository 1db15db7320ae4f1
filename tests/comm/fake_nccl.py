"""Stand-ins that run the nccl backend without a GPU: ranks are threads, and device memory is memory of the host.

The stand-ins for NCCL and for the driver complete every call at once, on the host. Tests that use them check the work
of the backend itself: addresses, counts, groups, parts, splits, and failures of waits. They check neither streams nor
timing.
"""

from __future__ import annotations

import contextlib
import gc
import os
import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial, reduce
from operator import index
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import kos
from kos.comm import contract, watchdog
from kos.comm.contract import Backend, Probe
from kos.comm.control.base import ControlPlane
from kos.comm.control.threads import ThreadControlPlane, ThreadGroup
from kos.comm.gpu import backend as device
from kos.comm.gpu import gpu_work, nccl_binding, shared
from kos.comm.gpu.backend import GPUBackend
from kos.comm.gpu.nccl import NCCLBackend
from kos.comm.gpu.peer import engine, record
from kos.comm.host.host_backend import HostBackend
from kos.comm.reduction import ReduceOp
from kos.comm.work import Engine
from kos.cuda.kernels import NOTHING
from kos.memory import array, windows
from kos.testing.conformance.model import in_rank_order
from tests.comm import fake_driver
from tests.comm.fake_gpu import Memory, at, driver_functions, is_capturing, load_kernel
from tests.comm.gpu_ranks import OnGPU
from tests.comm.ranks import on_threads
from tests.fake_cuda import GPU, installed

WAIT = 20.0  # seconds
DTYPE_OF = {code: dtype for dtype, code in nccl_binding.CODE_OF.items()}
OPS = {nccl_binding.SUM: ReduceOp.SUM, nccl_binding.PROD: ReduceOp.PROD, nccl_binding.MAX: ReduceOp.MAX,
       nccl_binding.MIN: ReduceOp.MIN, nccl_binding.AVG: ReduceOp.AVG}  # fmt: skip


class Group:
    """What the ranks of one communicator share."""

    seconds = WAIT  # in which all ranks call

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size)
        self.slots: list[Any] = [None] * size
        self.messages = {(i, j): queue.Queue() for i in range(size) for j in range(size)}
        self.children: dict[Any, Group] = {}
        self.lock = threading.Lock()

    def child(self, key: Any, size: int) -> Group:
        with self.lock:
            return self.children.setdefault(key, Group(size))

    def swap(self, rank: int, value: Any) -> list[Any]:
        self.slots[rank] = value
        self.barrier.wait(self.seconds)
        values = list(self.slots)
        self.barrier.wait(self.seconds)
        return values


class Comm:
    def __init__(self, group: Group, rank: int, options: dict[str, Any] | None = None) -> None:
        self.group, self.rank, self.splits, self.options = group, rank, 0, options
        self.premultiplied: dict[int, float] = {}
        self.registered: dict[int, int] = {}  # bytes by address
        self._number = fake_driver.number(self)

    def __int__(self) -> int:
        return self._number


class Config(SimpleNamespace):
    """Options of a communicator."""

    @property
    def ptr(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("blocking", "comm_name")}


def _write(pointer: int, count: int, code: int, values: np.ndarray) -> None:
    """Write the first ``count`` of ``values``."""
    at(pointer, count, DTYPE_OF[code].numpy)[:] = values[:count]


def _at_the_end(run: Callable[..., None]) -> Callable[..., None]:
    """Decorates a collective: within a group, it runs at the end of the group, as in NCCL."""
    return lambda nccl, *arguments: nccl._do("collective", partial(run, nccl, *arguments))


class NCCLError(Exception):
    """The error of a function of NCCL."""

    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.status = status


class FakeNCCL:
    """The functions of ``nccl.bindings.nccl`` that kos calls, and of the driver, ``cu``; and what loads kernels.

    Each test has its own: it may assign others to them.
    """

    Config, NCCLError = Config, NCCLError

    def __init__(self) -> None:
        self.driver = fake_driver.FakeDriver(is_capturing)
        self._local = threading.local()
        self._joined: dict[bytes, Group] = {}
        self._memory: dict[int, Memory] = {}
        self.load_kernel: Callable[..., Any] = load_kernel
        self.groups = 0
        self.ended: list[tuple[str, int, int]] = []  # "abort", of which rank of how many
        self.windows: list[tuple[str, int]] = []  # what was done with memory, and its address
        self.virtual: set[int] = set()  # addresses of memory of cuMemCreate, which NCCL registers in a capture
        self.cu = self.driver.bindings = driver_functions(self.virtual)

    def get_version(self) -> int:
        return 22809

    def address_of(self, operation: str) -> int:
        return self.driver.nccl(operation, getattr(self, nccl_binding._NAMES.get(operation, operation)))

    def get_unique_id(self) -> bytes:
        return os.urandom(128)

    def comm_init_rank_scalable(self, size: int, rank: int, _: int, identity: bytearray, options: Any) -> Comm:
        return Comm(self._joined.setdefault(bytes(identity), Group(size)), rank, options)

    def comm_split(self, comm: Comm, color: int, key: int, options: Any) -> Comm | None:
        comm.splits += 1
        wishes = comm.group.swap(comm.rank, (color, key))
        if color < 0:
            return None
        ranks = sorted((r for r in range(comm.group.size) if wishes[r][0] == color), key=lambda r: (wishes[r][1], r))
        return Comm(comm.group.child((comm.splits, color), len(ranks)), ranks.index(comm.rank), options)

    def comm_get_async_error(self, comm: Comm) -> int:
        return 0

    def get_error_string(self, code: int) -> str:
        return "a remote process exited"

    def comm_destroy(self, comm: Comm) -> None:
        comm.group.barrier.wait(WAIT)

    def comm_abort(self, comm: Comm) -> None:
        self.ended.append(("abort", comm.rank, comm.group.size))
        comm.group.barrier.abort()

    def mem_alloc(self, nbytes: int) -> int:
        memory = Memory(nbytes)
        self._memory[memory.pointer] = memory
        return memory.pointer

    def mem_free(self, address: int) -> None:
        self.windows.append(("free", address))

    def comm_window_register(self, comm: Comm, address: int, nbytes: int, flags: int) -> int:
        self.windows.append(("register", address))
        comm.registered[address] = nbytes
        return address

    def comm_window_deregister(self, comm: Comm, window: int) -> None:
        self.windows.append(("deregister", window))
        del comm.registered[window]

    def group_start(self) -> None:
        """Groups nest: what is called in them runs at the end of the outermost."""
        depth = self._local.depth = getattr(self._local, "depth", 0) + 1
        if depth == 1:
            self._local.pending = []
            self.groups += 1

    def group_end(self) -> None:
        self._local.depth -= 1
        if self._local.depth:
            return
        pending, self._local.pending = self._local.pending, None
        for kind in ("send", "recv", "collective"):
            for each, run in pending:
                if each == kind:
                    run()

    def _do(self, kind: str, run: Callable[[], None]) -> None:
        pending = getattr(self._local, "pending", None)
        if pending is None and kind != "collective":
            assert kind == "send", "a receive outside a group may wait for ever"
        if pending is None:
            run()
        else:
            pending.append((kind, run))

    def send(self, pointer: int, count: int, code: int, peer: int, comm: Comm, stream: int) -> None:
        assert stream, "no stream"
        self._check_memory(pointer, peer, comm)
        data = bytes(at(pointer, count, DTYPE_OF[code].numpy).view(np.uint8))
        self._do("send", lambda: comm.group.messages[comm.rank, peer].put(data))

    def _check_memory(self, pointer: int, peer: int, comm: Comm) -> None:
        """NCCL hangs, or loses data, if only one end is registered."""
        assert not self._is_registered(pointer, comm) or peer == comm.rank, "the other end may not be registered"

    def _is_registered(self, pointer: int, comm: Comm) -> bool:
        window = any(0 <= pointer - start < nbytes for start, nbytes in comm.registered.items())
        return window or (is_capturing() and pointer in self.virtual)

    def _check_messages(self, comm: Comm, *pointers: int) -> None:
        """A collective made of sends and receives needs both arrays registered, or neither."""
        registered = {self._is_registered(pointer, comm) for pointer in pointers}
        assert len(registered) == 1, "messages between registered and other memory"

    def recv(self, pointer: int, count: int, code: int, peer: int, comm: Comm, stream: int) -> None:
        self._check_memory(pointer, peer, comm)

        def run() -> None:
            data = comm.group.messages[peer, comm.rank].get(timeout=WAIT)
            target = at(pointer, count, DTYPE_OF[code].numpy).view(np.uint8)
            assert len(data) == target.size, f"{len(data)} bytes sent, {target.size} expected"
            target[:] = np.frombuffer(data, np.uint8)

        self._do("recv", run)

    def _gathered(self, comm: Comm, pointer: int, count: int, code: int) -> list[np.ndarray]:
        data = at(pointer, count, DTYPE_OF[code].numpy).copy() if pointer else np.empty(0)
        return comm.group.swap(comm.rank, data)

    def _reduce(self, comm: Comm, pointer: int, count: int, code: int, op: int, end: Callable[[Any], None]) -> None:
        """Call ``end`` with the result."""
        dtype = DTYPE_OF[code].numpy
        factor = comm.premultiplied.get(op, 1)  # NCCL reads it now, though the call may be one of a group

        def run() -> None:
            xs = comm.group.swap(comm.rank, at(pointer, count, dtype) * dtype.type(factor))
            lossy = {nccl_binding.MIN: np.fmin, nccl_binding.MAX: np.fmax}.get(op)  # as NCCL's, which lose a NaN
            end(reduce(lossy, xs) if lossy else in_rank_order(xs, OPS.get(op, ReduceOp.SUM)))

        self._do("collective", run)

    def all_reduce(self, send: int, recv: int, count: int, code: int, op: int, comm: Comm, stream: int) -> None:
        self.reduce(send, recv, count, code, op, comm.rank, comm, stream)

    def reduce(
        self, send: int, recv: int, count: int, code: int, op: int, root: int, comm: Comm, stream: int
    ) -> None:
        index(recv)  # nccl4py takes an integer
        gets = count if comm.rank == root else 0
        self._reduce(comm, send, count, code, op, partial(_write, recv, gets, code))

    def reduce_scatter(self, send: int, recv: int, count: int, code: int, op: int, comm: Comm, stream: int) -> None:
        def end(got: np.ndarray) -> None:
            _write(recv, count, code, got[comm.rank * count :])

        self._reduce(comm, send, count * comm.group.size, code, op, end)

    @_at_the_end
    def broadcast(self, send: int, recv: int, count: int, code: int, root: int, comm: Comm, stream: int) -> None:
        _write(recv, count, code, self._gathered(comm, send, count, code)[root])

    def all_gather(self, send: int, recv: int, count: int, code: int, comm: Comm, stream: int) -> None:
        self.gather(send, recv, count, code, comm.rank, comm, stream)

    @_at_the_end
    def allto_all(self, send: int, recv: int, count: int, code: int, comm: Comm, stream: int) -> None:
        self._check_messages(comm, send, recv)
        n, me = comm.group.size, comm.rank
        got = [x[me * count : (me + 1) * count] for x in self._gathered(comm, send, count * n, code)]
        _write(recv, count * n, code, np.concatenate(got))

    @_at_the_end
    def gather(self, send: int, recv: int, count: int, code: int, root: int, comm: Comm, stream: int) -> None:
        self._check_messages(comm, send, recv)
        got = np.concatenate(self._gathered(comm, send, count, code))
        _write(index(recv), got.size if comm.rank == root else 0, code, got)  # nccl4py takes an integer

    @_at_the_end
    def scatter(self, send: int, recv: int, count: int, code: int, root: int, comm: Comm, stream: int) -> None:
        self._check_messages(comm, send, recv)
        source = send if comm.rank == root else 0 * index(send)
        whole = self._gathered(comm, source, count * comm.group.size, code)[root]
        _write(recv, count, code, whole[comm.rank * count :])

    def red_op_create_pre_mul_sum(self, address: int, code: int, residence: int, comm: Comm) -> int:
        op = 100 + len(comm.premultiplied)
        comm.premultiplied[op] = at(address, 1, DTYPE_OF[code].numpy)[0]
        return op

    def red_op_destroy(self, op: int, comm: Comm) -> None:
        del comm.premultiplied[op]


@contextlib.contextmanager
def no_gpu(monkeypatch: pytest.MonkeyPatch, gpus: tuple[GPU, ...] = (GPU(),)) -> Iterator[FakeNCCL]:
    """Everything that would reach for the driver, a GPU or libnccl finds a stand-in."""
    fake = FakeNCCL()
    monkeypatch.setattr(array, "pool_of", lambda index: SimpleNamespace(allocate=lambda n, stream, label: Memory(n)))
    for module in (shared, record):
        monkeypatch.setattr(module, "pinned_empty", lambda count, dtype, device: np.zeros(count, dtype))
    for module in (contract, engine):
        monkeypatch.setattr(module, "load_kernel", lambda *about, **defines: fake.load_kernel(*about, **defines))
    monkeypatch.setattr(nccl_binding, "library", lambda: fake)
    monkeypatch.setattr(nccl_binding, "address_of", lambda operation: fake.address_of(operation))
    monkeypatch.setattr(watchdog, "watched", weakref.WeakSet())
    monkeypatch.setattr(windows, "memories", {})
    with installed(monkeypatch, fake.cu, gpus, fake.driver.library):
        try:
            yield fake
        finally:  # what is left open must not be looked at without the stand-ins, nor freed by the collector
            watchdog._end()
            if windows.memories:
                gc.collect()


@contextlib.contextmanager
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNCCL]:
    """As ``no_gpu``: calls queue nothing, the GPU ends nothing of it, and the watchdog looks often."""

    monkeypatch.setattr(watchdog, "TICK", 0.01)
    monkeypatch.setattr(shared, "_DEAD_SECONDS", 0.05)
    with no_gpu(monkeypatch) as fake:
        monkeypatch.setattr(NCCLBackend, "resolve", lambda route, o: NOTHING)
        monkeypatch.setattr(gpu_work.Mark, "ended", lambda mark: False)
        yield fake


def communicator(rendezvous: ThreadControlPlane, group: Group, timeout: float = WAIT) -> kos.Communicator:
    """A communicator of the nccl backend whose ranks are threads."""
    return kos.Communicator(of_nccl(rendezvous, Comm(group, rendezvous.rank)), rendezvous, {}, timeout)


def of_nccl(rendezvous: ControlPlane, comm: Any = None, host: HostBackend | None = None, device: int = 0) -> GPUBackend:
    """A backend whose route is ``nccl``, with this communicator of NCCL if it has one already."""
    return GPUBackend(rendezvous, [NCCLBackend(rendezvous, Engine(), device, comm)], host)


def usable(monkeypatch: pytest.MonkeyPatch, kind: type[Backend] = NCCLBackend) -> None:
    """Let ``kos.init`` find that a backend can be used."""
    monkeypatch.setattr(kind, "probe", classmethod(lambda kind, rendezvous: Probe(True, "a stand-in")))


def launching_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a group of one launch its operations by Python, as larger groups do; else they are copies, or nothing."""
    monkeypatch.setattr(device, "single_rank_plan", lambda o, index: None)
    monkeypatch.setattr(GPUBackend, "core_calls", lambda _: (None, None))


def waits_that_are_bounded(nccl: Any) -> list[str]:
    """Record the launches made on a thread with a timeout, since they may wait for other ranks."""
    found, usual = list[str](), nccl.bounded
    nccl.bounded = lambda run, timeout, what: (found.append(what), usual(run, timeout, what))[1]
    return found


def alone() -> kos.Communicator:
    """A group of one."""
    return communicator(ThreadControlPlane(ThreadGroup(1), 0, WAIT), Group(1))


class FakeRanks:
    """Ranks that are threads, each with a GPU that is a stand-in."""

    def __init__(self, size: int) -> None:
        self.size = size

    def run(self, fn: Callable[[Any], Any], timeout: float = WAIT) -> None:
        """Run ``fn(gpu)``; ``gpu`` takes ndarrays, ``gpu.comm`` is the communicator."""
        group = Group(self.size)

        def rank(rendezvous: ThreadControlPlane) -> None:
            comm = communicator(rendezvous, group, timeout)
            fn(OnGPU(comm))
            comm.close()

        on_threads(self.size, rank, timeout, group.barrier.abort)
