"""SymmetricMemory between processes and between threads, all on one GPU or on one each."""

import ctypes
import gc
import os
import signal
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cuda_ranks import run_processes

from kos import cuda
from kos.cuda.driver import call, cu
from kos.errors import CudaError, InvalidArgument, KosError, OutOfMemory, PeerMemoryError
from kos.memory import symmetric
from kos.memory.array import Array
from kos.memory.symmetric import SymmetricMemory
from kos.testing import spawn
from tests.comm.fake_gpu import Status, driver_functions
from tests.fake_cuda import CONTEXT, GPU, ThreadContexts, installed


class Machine:
    """A driver whose GPUs have memory on the host.  GPU 1 cannot do what is ``broken``."""

    def __init__(self, broken: str) -> None:
        self.broken = broken
        self.cu, self._contexts = driver_functions(set()), ThreadContexts()
        self._contexts.install(self.cu)
        self._allocate, self._copy = self.cu.cuMemAlloc, self.cu.cuMemcpyHtoD
        vars(self.cu).update({name: getattr(self, name) for name in dir(Machine) if name.startswith("cu")})
        self._memory: dict[int, tuple[int, int]] = {}  # by address: the size, and the GPU
        self.library = SimpleNamespace(cuPointerGetAttribute=self._get_device)

    def add(self, address: int, nbytes: int, device: int) -> int:
        self._memory[address] = nbytes, device
        return address

    def _device_at(self, pointer: int) -> int:
        return self._memory[max(start for start in self._memory if start <= pointer)][1]

    def _get_device(self, found: Any, attribute: Any, pointer: Any) -> int:
        found._obj.value = self._device_at(pointer.value)
        return 0

    def _fails(self, step: str) -> bool:
        return self.broken == step and self._contexts.stack[-1] == 1

    def cuMemAlloc(self, nbytes: int) -> tuple[int, int]:
        if self._fails("allocate"):
            return Status.CUDA_ERROR_OUT_OF_MEMORY, 0
        return 0, self.add(self._allocate(nbytes)[1], nbytes, self._contexts.stack[-1])

    def cuMemGetAddressRange(self, pointer: int) -> tuple[int, int, int]:
        return 0, pointer, self._memory[pointer][0]

    def cuPointerGetAttribute(self, attribute: str, pointer: int) -> tuple[int, int]:
        return 0, int(attribute == "IPC" and not self._fails("export"))

    def cuIpcGetMemHandle(self, pointer: int) -> tuple[int, Any]:
        handle = ctypes.create_string_buffer(64)
        return 0, SimpleNamespace(getPtr=lambda: ctypes.addressof(handle))

    def cuCtxEnablePeerAccess(self, context: int, flags: int) -> tuple[int]:
        return (Status(217 if self._fails("map") and context == CONTEXT + 2 else 0),)

    def cuMemcpyHtoD(self, target: int, data: bytes, nbytes: int) -> tuple[int]:
        lost = self._fails("bytes") and self._device_at(target) == 0
        return (0,) if lost else self._copy(target, data, nbytes)


@pytest.fixture
def machine(request, monkeypatch):
    """Three GPUs, of which one cannot do the fixture's parameter."""
    machine = Machine(getattr(request, "param", ""))
    monkeypatch.setattr(symmetric, "Array", SimpleNamespace(from_numpy=lambda table, device, label: table))
    with installed(monkeypatch, machine.cu, (GPU(),) * 3, machine.library):
        yield machine
        gc.collect()  # memory in cycles is freed by this driver


def create(comm: Any, nbytes: int) -> SymmetricMemory:
    """Memory of this rank on the GPU of its number."""
    rounds: list[bytes] = []
    rank, exchange = comm.rank, comm.rendezvous
    counted = SimpleNamespace(
        rank=rank, size=comm.size, barrier=lambda: rounds.append(b"") or exchange.barrier(),
        allgather=lambda data: rounds.append(data) or exchange.allgather(data),
    )  # fmt: skip
    memory = SymmetricMemory(counted, nbytes, rank)
    assert len(rounds) == 4, "each waits for the slowest rank"
    return memory


@pytest.mark.usefixtures("machine")
def test_bytes_move_before_memory_is_used():
    def run(comm):
        memory = create(comm, 1000)
        assert tuple(memory.peer_pointers) == memory.pointers and len(set(memory.pointers)) == comm.size
        assert all(ctypes.string_at(pointer, memory.nbytes) == bytes(memory.nbytes) for pointer in memory.pointers)
        comm.barrier()
        memory.close()

    spawn(run, 3, timeout=30)


@pytest.mark.parametrize(
    ("machine", "kind", "here", "elsewhere"),
    [
        ("allocate", OutOfMemory, "^out of memory on cuda:1 .*1,024 bytes to share", "its slab: rank 1: out of memory"),
        ("map", PeerMemoryError, "^the slab of rank 2: cuda:1 has no peer access to", "rank 1: the slab of rank 2"),
        ("bytes", PeerMemoryError, "^the bytes that rank 1 wrote to rank 0 differ here$", "rank 0 differ here$"),
        ("size", InvalidArgument, r"expected one size on all ranks, got \[1024, 2048, 3072\]", "expected one size"),
    ],
    indirect=["machine"],
)
def test_what_fails_on_one_rank_fails_on_all(machine, kind, here, elsewhere):
    def run(comm):
        with pytest.raises(kind if comm.rank == 1 else KosError, match=here if comm.rank == 1 else elsewhere):
            create(comm, 1000 + 1000 * (machine.broken == "size") * comm.rank)

    spawn(run, 3, timeout=30)


def test_memory_of_the_program_is_mapped_and_not_changed(machine):
    def run(comm):
        x = np.full(100, comm.rank + 1, np.uint8)
        memory = SymmetricMemory(comm.rendezvous, 100, comm.rank, machine.add(x.ctypes.data, x.size, comm.rank))
        assert memory.nbytes == 100 and memory.pointer == x.ctypes.data
        assert [ctypes.string_at(pointer, 1)[0] for pointer in memory.pointers] == [1, 2, 3]
        assert memory.offset_of(x.ctypes.data + 90, 10) == 90 and memory.offset_of(x.ctypes.data + 91, 10) is None
        assert memory.offset_of(x.ctypes.data - 1, 1) is None
        comm.barrier()
        memory.close()
        assert memory.pointers == () and (x == comm.rank + 1).all()

    spawn(run, 3, timeout=30)


@pytest.mark.parametrize("machine", ["export"], indirect=True)
def test_memory_that_ipc_does_not_share_is_refused_on_all_ranks(machine):
    def run(comm):
        x = np.zeros(100, np.uint8)
        with pytest.raises(PeerMemoryError, match="IPC: expected memory of cuMemAlloc") as caught:
            SymmetricMemory(comm.rendezvous, 100, comm.rank, machine.add(x.ctypes.data, x.size, comm.rank))
        assert comm.rank == 1 or "could not share its memory: rank 1" in str(caught.value)

    spawn(run, 3, timeout=30)


def test_sizes_that_are_refused():
    alone = SimpleNamespace(rank=0, size=1, allgather=lambda data: [data], barrier=lambda: None)
    with pytest.raises(InvalidArgument, match="^SymmetricMemory: expected 16 bytes or more, got -1$"):
        SymmetricMemory(alone, -1, 0)


def are_unmapped(pointers: list[int], device: int) -> None:
    for pointer in pointers:
        with cuda.on_device(device), pytest.raises(CudaError, match="cuMemGetAddressRange"):
            call(cu.cuMemGetAddressRange, pointer)


def misuse(exchange: Any, devices: int) -> None:
    """Wrong calls raise on every rank, and the memory works after them."""
    rank, size = exchange.rank, exchange.size
    device = rank % devices
    cuda.set_device(device)
    with pytest.raises(InvalidArgument, match=r"one size on all ranks, got \[\d+, "):
        SymmetricMemory(exchange, 4096 * (rank + 1), device)
    with pytest.raises((PeerMemoryError, OutOfMemory), match="out of memory"):
        SymmetricMemory(exchange, 1 << 50 if rank == size - 1 else 1 << 20, device)
    memory = SymmetricMemory(exchange, 4096, device)
    peers = [mapping.pointer for mapping in memory._mappings]
    memory.close()
    memory.close()
    SymmetricMemory(exchange, 4096, device).close()
    exchange.barrier()  # on threads, another rank's new memory may have the old address until it is closed
    are_unmapped(peers, device)


def killed_peer(exchange: Any) -> None:
    """A rank is killed; the other frees its side and the device works on."""
    memory = SymmetricMemory(exchange, 1 << 20, 0)
    if exchange.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    exchange.barrier()
    peers = [mapping.pointer for mapping in memory._mappings]
    memory.abort()
    assert peers and not memory.pointers
    are_unmapped(peers, 0)
    array = Array.zeros(100, np.float32, 0)
    assert not array.numpy().any()


def run_threads(function: Any, size: int, *arguments: Any) -> None:
    """``function(exchange, *arguments)`` on threads."""
    spawn(lambda comm: function(comm.rendezvous, *arguments), size, timeout=60)


@pytest.mark.gpu
@pytest.mark.parametrize("run", [run_processes, run_threads])
@pytest.mark.parametrize("own", [False, True])
def test_misuse(run, own):
    """Of ranks that share a GPU, and of ranks with a GPU each."""
    devices = len(cuda.visible_devices()) if own else 1
    if own and devices < 2:
        pytest.skip("needs 2 GPUs")
    run(misuse, max(devices, 2), devices)


@pytest.mark.gpu
def test_killed_peer():
    run_processes(killed_peer, 2, killed={1: -signal.SIGKILL})
