"""The nccl backend without a GPU: ranks are threads, device memory is the host's, NCCL is what stands here.

What NCCL and the driver do is done at once and on the host, so the backend's own work is tested: addresses,
counts, groups, parts, splits, failures of waits.  Streams and time are not.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import os
import queue
import struct
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial, reduce
from operator import index
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import kos
from kos.comm import contract, watchdog
from kos.comm.contract import Resolved
from kos.comm.control.base import Rendezvous
from kos.comm.control.thread_rendezvous import ThreadGroup, ThreadRendezvous
from kos.comm.gpu import backend as device
from kos.comm.gpu import compressed, devices, memory, nccl, nccl_binding, nccl_staging, routes, shared, works
from kos.comm.gpu.backend import GPUBackend
from kos.comm.gpu.nccl import NCCLBackend
from kos.comm.host.host_backend import HostBackend
from kos.comm.reduction import ReduceOp
from kos.comm.work import Engine
from kos.cuda import driver, graphs, kernels, streams
from kos.cuda.kernels import BoundKernel
from kos.dtypes import DTYPES
from kos.memory import array, windows
from kos.testing.conformance.model import in_rank_order
from tests.comm import fake_driver
from tests.comm.gpu_ranks import OnGPU
from tests.comm.host_kernel import HostKernel
from tests.comm.ranks import on_threads

WAIT = 20.0  # seconds
DTYPE_OF = {code: dtype for dtype, code in nccl_binding.CODE_OF.items()}
OPS = {nccl_binding.SUM: ReduceOp.SUM, nccl_binding.PROD: ReduceOp.PROD, nccl_binding.MAX: ReduceOp.MAX,
       nccl_binding.MIN: ReduceOp.MIN, nccl_binding.AVG: ReduceOp.AVG}  # fmt: skip


def at(pointer: int, count: int, dtype: np.dtype) -> np.ndarray:
    """The host memory at an address, as it is."""
    if count == 0:
        return np.empty(0, dtype)
    assert pointer % dtype.itemsize == 0, "misaligned"
    memory = (ctypes.c_byte * (count * dtype.itemsize)).from_address(pointer)
    return np.frombuffer(memory, np.uint8).view(dtype)


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


class FakeNCCL:
    """The functions of ``nccl.bindings.nccl`` that kos calls."""

    Config = Config

    def __init__(self) -> None:
        self.driver = fake_driver.FakeDriver(lambda: hasattr(_capturing, "graph"))
        self._local = threading.local()
        self._joined: dict[bytes, Group] = {}
        self._memory: dict[int, Memory] = {}
        self.groups = 0
        self.ended: list[tuple[str, int, int]] = []  # "abort", of which rank of how many
        self.windows: list[tuple[str, int]] = []  # what was done with memory, and its address
        self.virtual: set[int] = set()  # addresses of memory of cuMemCreate, which NCCL registers in a capture

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
        return window or (hasattr(_capturing, "graph") and pointer in self.virtual)

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

    def _reduced(
        self, comm: Comm, pointer: int, count: int, code: int, op: int, factor: float | None = None
    ) -> np.ndarray:
        dtype = DTYPE_OF[code]
        data = at(pointer, count, dtype.numpy).copy()
        if factor is None:
            factor = comm.premultiplied.get(op, 1)
        data *= dtype.numpy.type(factor)
        xs = comm.group.swap(comm.rank, data)
        if lossy := {nccl_binding.MIN: np.fmin, nccl_binding.MAX: np.fmax}.get(op):  # as NCCL's, which lose a NaN
            return reduce(lossy, xs)
        return in_rank_order(xs, OPS.get(op, ReduceOp.SUM))

    def all_reduce(self, send: int, recv: int, count: int, code: int, op: int, comm: Comm, stream: int) -> None:
        factor = comm.premultiplied.get(op)  # NCCL reads it now, though the call may be one of a group
        run = partial(self.reduce, send, recv, count, code, op, comm.rank, comm, stream, factor)
        self._do("collective", run)

    def reduce(
        self, send: int, recv: int, count: int, code: int, op: int, root: int, comm: Comm, stream: int,
        factor: float | None = None,
    ) -> None:  # fmt: skip
        got = self._reduced(comm, send, count, code, op, factor)
        if comm.rank == root:
            at(recv, count, DTYPE_OF[code].numpy)[:] = got
        else:
            index(recv)  # nccl4py takes an integer

    def reduce_scatter(self, send: int, recv: int, count: int, code: int, op: int, comm: Comm, stream: int) -> None:
        got = self._reduced(comm, send, count * comm.group.size, code, op)
        at(recv, count, DTYPE_OF[code].numpy)[:] = got[comm.rank * count : (comm.rank + 1) * count]

    def broadcast(self, send: int, recv: int, count: int, code: int, root: int, comm: Comm, stream: int) -> None:
        at(recv, count, DTYPE_OF[code].numpy)[:] = self._gathered(comm, send, count, code)[root]

    def all_gather(self, send: int, recv: int, count: int, code: int, comm: Comm, stream: int) -> None:
        self.gather(send, recv, count, code, comm.rank, comm, stream)

    def allto_all(self, send: int, recv: int, count: int, code: int, comm: Comm, stream: int) -> None:
        self._check_messages(comm, send, recv)
        n, me = comm.group.size, comm.rank
        got = [x[me * count : (me + 1) * count] for x in self._gathered(comm, send, count * n, code)]
        at(recv, count * n, DTYPE_OF[code].numpy)[:] = np.concatenate(got)

    def gather(self, send: int, recv: int, count: int, code: int, root: int, comm: Comm, stream: int) -> None:
        self._check_messages(comm, send, recv)
        got = np.concatenate(self._gathered(comm, send, count, code))
        if comm.rank == root:
            at(recv, got.size, DTYPE_OF[code].numpy)[:] = got
        else:
            index(recv)  # nccl4py takes an integer

    def scatter(self, send: int, recv: int, count: int, code: int, root: int, comm: Comm, stream: int) -> None:
        self._check_messages(comm, send, recv)
        source = send if comm.rank == root else 0 * index(send)
        whole = self._gathered(comm, source, count * comm.group.size, code)[root]
        at(recv, count, DTYPE_OF[code].numpy)[:] = whole[comm.rank * count : (comm.rank + 1) * count]

    def red_op_create_pre_mul_sum(self, address: int, code: int, residence: int, comm: Comm) -> int:
        op = 100 + len(comm.premultiplied)
        comm.premultiplied[op] = at(address, 1, DTYPE_OF[code].numpy)[0]
        return op

    def red_op_destroy(self, op: int, comm: Comm) -> None:
        del comm.premultiplied[op]


class FakeKernel:
    """What the kernels of ``reduce_ordered.cu`` compute, on the host."""

    def __init__(self, name: str, DTYPE: str, RESULT: str, OP: str, RANKS: int) -> None:
        self.name, self.ranks = name, RANKS
        self.dtype, self.result = DTYPES[DTYPE], DTYPES[RESULT]
        self.op, self._function = ReduceOp[OP], fake_driver.number(self)

    def bind(self, grid: int, block: int, *arguments: Any) -> BoundKernel:
        assert 0 < grid <= 1024
        self._count = len(arguments)
        return BoundKernel(self, fake_driver.Config(grid, block), arguments)

    def run(self, config: fake_driver.Config, parameters: int) -> None:
        """Run it; ``parameters`` is the address of the addresses of its parameters."""
        places = (ctypes.c_uint64 * self._count).from_address(parameters)
        words = [ctypes.c_uint64.from_address(place).value for place in places]
        factor = [struct.unpack("=d", struct.pack("=Q", words.pop()))[0]] if self.name == "scale" else []
        self._run(*words, *factor)

    def _run(self, source: int, *rest: Any) -> None:
        if self.name == "scale":
            target, count, factor = rest
            carrier = self.result.numpy
            with np.errstate(all="ignore"):
                x = at(source, count, self.dtype.numpy).astype(carrier) * carrier.type(factor)
            at(target, count, carrier)[:] = x
            return
        stride, target, count, *_ = rest
        xs = [at(source + r * stride * self.dtype.itemsize, count, self.dtype.numpy) for r in range(self.ranks)]
        first, last = (rest[-1], self.ranks) if self.name == "scan_ordered" else (0, 1)
        terms = [xs[: 1 + row - first] if self.name == "scan_ordered" else xs for row in range(first, last)]
        sums = [in_rank_order(each, self.op) for each in terms]  # before any is written
        with np.errstate(all="ignore"):
            for row, out in enumerate(sums, first):
                place = target + row * stride * self.result.itemsize
                at(place, count, self.result.numpy)[:] = out.astype(self.result.numpy)


class Memory:
    """Host memory that says it is a GPU's; poisoned, as fresh memory of a GPU may be."""

    __slots__ = ("__dict__", "__weakref__", "closed")

    def __init__(self, nbytes: int, device: int = 0) -> None:
        self.nbytes = nbytes
        self._bytes = np.full(nbytes + 256, 0xFF, np.uint8)
        start = self._bytes.__array_interface__["data"][0]
        self.pointer = start + -start % 256
        self.closed = False

    def close(self) -> None:
        self.closed = True


class FakeGraph:
    """What a stream captures: reports its end as the driver does."""

    def __init__(self) -> None:
        self.number = next(_numbers)
        self._reports: list[tuple[int, int]] = []

    def retain(self, report: tuple[int, int]) -> None:
        self._reports.append(report)

    def destroy(self) -> None:
        for pointer, function in self._reports:
            ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)(pointer)


_numbers = itertools.count(1)
_capturing = threading.local()


@contextlib.contextmanager
def captures() -> Iterator[FakeGraph]:
    """What this thread queues meanwhile is captured, and done nevertheless."""
    _capturing.graph = FakeGraph()
    try:
        yield _capturing.graph
    finally:
        del _capturing.graph


@contextlib.contextmanager
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNCCL]:
    """Everything that would reach for the driver, a GPU or libnccl finds a stand-in."""
    fake = FakeNCCL()

    def copy(target: int, source: int, nbytes: int, stream: int) -> tuple[int]:
        ctypes.memmove(target, source, nbytes)
        return (0,)

    def fill(target: int, value: int, nbytes: int, stream: int) -> tuple[int]:
        ctypes.memset(target, value, nbytes)
        return (0,)

    def nothing(*arguments: Any) -> tuple[int]:
        return (0,)

    cu = SimpleNamespace(
        cuMemcpyAsync=copy, cuMemcpyDtoDAsync=copy, cuMemsetD8Async=fill,
        cuStreamSynchronize=nothing, cuEventRecord=nothing,
        cuStreamWaitEvent=nothing, cuEventQuery=nothing, cuStreamQuery=nothing, cuEventDestroy=nothing,
        cuCtxSynchronize=nothing,
        cuLaunchKernelEx=lambda config, *rest: (fake_driver.launch(config.getPtr(), *rest),),
        cuStreamIsCapturing=lambda stream: (0, int(hasattr(_capturing, "graph"))),
        cuStreamGetCaptureInfo=lambda stream: (0, 1, _capturing.graph.number, _capturing.graph, [], [], 0),
        cuUserObjectCreate=lambda pointer, function, count, flags: (0, (pointer, function)),
        cuGraphRetainUserObject=lambda graph, report, count, flags: graph.retain(report) or (0,),
        CUuserObject_flags=SimpleNamespace(CU_USER_OBJECT_NO_DESTRUCTOR_SYNC=1),
        CUuserObjectRetain_flags=SimpleNamespace(CU_GRAPH_USER_OBJECT_MOVE=1),
        CUstreamCaptureStatus=SimpleNamespace(CU_STREAM_CAPTURE_STATUS_ACTIVE=1),
        cuEventCreate=lambda flags: (0, object()), CUevent_flags=SimpleNamespace(CU_EVENT_DISABLE_TIMING=2),
        CUresult=SimpleNamespace(CUDA_SUCCESS=0, CUDA_ERROR_NOT_READY=600),
        cuThreadExchangeStreamCaptureMode=lambda mode: (0, mode), cuCtxGetDevice=lambda: (0, 0),
        cuMemRetainAllocationHandle=lambda address: (int(address not in fake.virtual), None),
        cuMemRelease=lambda handle: (0,),
        CUstreamCaptureMode=SimpleNamespace(CU_STREAM_CAPTURE_MODE_RELAXED=2),
    )  # fmt: skip
    of_nccl = nccl_binding, nccl_staging
    for module in (array, streams, device, driver, graphs, kernels, memory, *of_nccl, routes, windows, works):
        monkeypatch.setattr(module, "cu", cu)
    monkeypatch.setattr(driver, "address", fake.driver.address)
    monkeypatch.setattr(driver, "primary_context", lambda index: fake_driver.CONTEXT)
    monkeypatch.setattr(driver, "unavailable", lambda: "a stand-in")
    monkeypatch.setattr(driver, "is_current", lambda index: True)
    monkeypatch.setattr(driver, "on_device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(array, "pool_of", lambda index: SimpleNamespace(allocate=lambda n, stream, label: Memory(n)))
    monkeypatch.setattr(device, "create_stream", lambda index, **_: SimpleNamespace(handle=99))
    for module in (nccl, memory):
        monkeypatch.setattr(module, "Scratch", Memory)
    monkeypatch.setattr(contract, "load_kernel", _load_kernel)
    info = SimpleNamespace(compute_capability=(9, 0), name="a stand-in")
    for module in (compressed, devices):
        monkeypatch.setattr(module, "device_info", lambda index: info)
    monkeypatch.setattr(nccl_binding, "library", lambda: fake)
    monkeypatch.setattr(nccl_binding, "_address_of", fake.address_of)
    monkeypatch.setattr(watchdog, "_watched", weakref.WeakSet())
    monkeypatch.setattr(windows, "memories", {})
    try:
        yield fake
    finally:  # what is left open must not be looked at without the stand-ins, nor freed by the collector
        watchdog._end()
        if windows.memories:
            gc.collect()


@contextlib.contextmanager
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNCCL]:
    """As ``no_gpu``: calls queue nothing, the GPU ends nothing of it, and the watchdog looks often."""

    def nothing(route: NCCLBackend, o: Any) -> Resolved:
        return routes.nothing, None, True

    monkeypatch.setattr(watchdog, "TICK", 0.01)
    monkeypatch.setattr(shared, "_DEAD_SECONDS", 0.05)
    with no_gpu(monkeypatch) as fake:
        monkeypatch.setattr(NCCLBackend, "resolve", nothing)
        monkeypatch.setattr(works._Mark, "ended", lambda mark: False)
        yield fake


def _load_kernel(path: Path, name: str, index: int, **defines: Any) -> Any:
    """A stand-in for the kernel, or itself, compiled for the host."""
    assert path.exists()
    return FakeKernel(name, **defines) if path.name == "reduce_ordered.cu" else HostKernel(path, name, index, **defines)


def communicator(rendezvous: ThreadRendezvous, group: Group, timeout: float = WAIT) -> kos.Communicator:
    """A communicator of the nccl backend whose ranks are threads."""
    return kos.Communicator(of_nccl(rendezvous, Comm(group, rendezvous.rank)), rendezvous, {}, timeout)


def of_nccl(rendezvous: Rendezvous, comm: Any = None, host: HostBackend | None = None, device: int = 0) -> GPUBackend:
    """A backend whose route is ``nccl``, with this communicator of NCCL if it has one already."""
    return GPUBackend(rendezvous, [NCCLBackend(rendezvous, Engine(), device, comm)], host)


def launching_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a group of one launch its operations by Python, as larger groups do; else they are copies, or nothing."""
    monkeypatch.setattr(device, "single_rank_route", lambda o, index: None)
    monkeypatch.setattr(shared.CommState, "core_calls", lambda *_: (None, None))


def alone() -> kos.Communicator:
    """A group of one."""
    return communicator(ThreadRendezvous(ThreadGroup(1), 0, WAIT), Group(1))


class FakeRanks:
    """Ranks that are threads, each with a GPU that is a stand-in."""

    def __init__(self, size: int) -> None:
        self.size = size

    def run(self, fn: Callable[[Any], Any], timeout: float = WAIT) -> None:
        """Run ``fn(gpu)``; ``gpu`` takes ndarrays, ``gpu.comm`` is the communicator."""
        group = Group(self.size)

        def rank(rendezvous: ThreadRendezvous) -> None:
            comm = communicator(rendezvous, group, timeout)
            fn(OnGPU(comm))
            comm.close()

        on_threads(self.size, rank, timeout, group.barrier.abort)


class Stream:
    """A stream of the caller's."""

    def __init__(self, handle: int) -> None:
        self.handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle
