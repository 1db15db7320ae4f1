"""A GPU whose memory is that of the host: files of their own, so that other processes can map it by CUDA's IPC.

Its kernels are the real ones, compiled by the host's compiler.  Copies have ended when they return.
``python -m tests.transfer.emulated_gpu MODULE ARGUMENTS`` runs a program on it.
"""

import ctypes
import gc
import mmap
import os
import runpy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import pytest

from kos.cuda import driver
from kos.memory import Array, array
from kos.transfer import Placement, Publisher, Subscriber, gpu, scales
from tests.comm.fake_driver import Config
from tests.comm.fake_gpu import Memory
from tests.comm.fake_nccl import no_gpu
from tests.comm.host_kernel import HostKernel
from tests.fake_cuda import GPU

GPUS = tuple(GPU("emulated", f"emulated {n}") for n in range(8))


class EmulatedMemory:
    """What cuMemAlloc and cuIpcOpenMemHandle give.  ``cu`` are the functions of the driver.

    ``queue`` gets the handle of a stream and the work of each kernel that is launched on it, and runs the work.
    """

    def __init__(self, cu: Any) -> None:
        self.cu = cu
        self.queue: Callable[[int, Callable[[], None]], None] = lambda stream, work: work()
        self.held: dict[int, tuple[int, Any, int]] = {}  # address -> file, mapping, size
        self.opened = 0
        self.pooled = WeakValueDictionary[int, Memory]()  # of the usual arrays, by address

    def _map(self, file: int, nbytes: int) -> int:
        mapped = mmap.mmap(file, nbytes)
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        self.held[address] = file, mapped, nbytes
        return address

    def allocate(self, nbytes: int) -> tuple[int, int]:
        file = os.memfd_create("emulated")
        os.ftruncate(file, nbytes)
        return 0, self._map(file, nbytes)

    def free(self, address: int) -> tuple[int]:
        if address in self.held:  # else that of a test before, which has failed
            os.close(self.held.pop(address)[0])
        return (0,)

    def from_pool(self, nbytes: int, stream: Any, label: str) -> Memory:
        made = Memory(nbytes)
        self.pooled[made.pointer] = made
        return made

    def range_of(self, pointer: int) -> tuple[int, int, int]:
        sizes = {at: n for at, (_, _, n) in self.held.items()} | {at: each.nbytes for at, each in self.pooled.items()}
        return next(((0, at, n) for at, n in sizes.items() if at <= pointer < at + n), (1, 0, 0))

    def export(self, address: int) -> tuple[int, Any]:
        file, _, nbytes = self.held[address]
        record = f"{os.getpid()} {file} {nbytes}".encode().ljust(64)
        held = ctypes.create_string_buffer(record, 64)
        return 0, SimpleNamespace(getPtr=lambda: ctypes.addressof(held))

    def open(self, handle: Any, flags: int) -> tuple[int, int]:
        pid, number, nbytes = ctypes.string_at(handle.getPtr(), 64).split()
        self.opened += 1
        return 0, self._map(os.open(f"/proc/{int(pid)}/fd/{int(number)}", os.O_RDWR), int(nbytes))


class Kernel(HostKernel):
    """A kernel whose parameters are copied when it is launched: it may run later."""

    def __init__(self, memory: EmulatedMemory, path: Path, name: str, device: int, **defines: Any) -> None:
        super().__init__(path, name, device, **defines)
        self._memory = memory

    def run(self, config: Config, parameters: int) -> None:
        words = ctypes.c_uint64 * self._parameters
        values = words(*(ctypes.c_uint64.from_address(at).value for at in words.from_address(parameters)))
        places = words(*(ctypes.addressof(values) + 8 * index for index in range(self._parameters)))
        given, run = Config.from_buffer_copy(config), super().run

        def work() -> None:
            assert len(values) == len(places)  # which are alive
            run(given, ctypes.addressof(places))

        self._memory.queue(int(config.hStream), work)


def _handle() -> Any:
    held = ctypes.create_string_buffer(64)
    return SimpleNamespace(getPtr=lambda: ctypes.addressof(held))


WHOLE = Placement.whole((4,))


def of(value: float) -> Array:
    return Array.from_numpy(np.full(4, value, np.float32), 0)


@contextmanager
def both(source: Array, into: Any, **options: Any) -> Iterator[tuple[Publisher, Subscriber]]:
    """A publisher that has published ``source``, and a subscriber with these options."""
    with (
        Publisher(None, {"w": (source, WHOLE)}) as publisher,
        Subscriber(publisher.address, {"w": (into, WHOLE)}, **options) as subscriber,
    ):
        publisher.publish(1)
        yield publisher, subscriber


@contextmanager
def emulated_gpu() -> Iterator[EmulatedMemory]:
    """Every GPU of this process is one of these meanwhile."""
    kernels = dict[Any, HostKernel]()

    def load(path: Path, name: str, device: int, **defines: Any) -> HostKernel:
        key = path, name, tuple(defines.items())
        if key not in kernels:
            kernels[key] = Kernel(memory, path, name, device, **defines)
        return kernels[key]

    def fill(pointer: int, value: int, nbytes: int) -> tuple[int]:
        ctypes.memset(pointer, value, nbytes)
        return (0,)

    with pytest.MonkeyPatch.context() as patch, no_gpu(patch, GPUS) as fake:
        memory = EmulatedMemory(fake.cu)
        more: dict[str, Any] = {
            "cuMemAlloc": memory.allocate, "cuMemFree": memory.free, "cuMemsetD8": fill,
            "cuMemHostRegister": lambda *_: (0,), "cuMemHostUnregister": lambda *_: (0,),
            "CU_MEMHOSTREGISTER_PORTABLE": 1,
            "cuMemGetAddressRange": memory.range_of, "cuPointerGetAttribute": lambda *_: (0, 1),
            "CUpointer_attribute": SimpleNamespace(CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE=1),
            "cuIpcGetMemHandle": memory.export, "cuIpcOpenMemHandle": memory.open, "cuIpcCloseMemHandle": memory.free,
            "CUipcMemHandle": _handle, "CUipcMem_flags": SimpleNamespace(CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS=1),
        }  # fmt: skip
        vars(fake.cu).update(more)
        patch.setattr(array, "pool_of", lambda device: SimpleNamespace(allocate=memory.from_pool))
        patch.setattr(driver, "device_of", lambda pointer: 0)
        for module in (gpu, scales):
            patch.setattr(module, "load_kernel", load)
        patch.setattr(gpu, "pinned_empty", lambda shape, dtype, device: np.empty(shape, dtype))
        yield memory
        gc.collect()  # objects in cycles free their memory now, and not in a later test that has the same addresses


if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    with emulated_gpu():
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
