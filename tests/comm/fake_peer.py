"""Stand-ins that run the peer backend without a GPU: ranks are threads, and device memory is memory of the host.

The kernels are the real ones, compiled by the host's C++ compiler. They run on a machine that reorders what they store
(``ptx_host.h``). Tests that use them check what the kernels compute, and how they split data, wait, count and order.
They check neither hardware nor timing.
"""

import contextlib
import mmap
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import kos
from kos.comm.control.base import ControlPlane
from kos.comm.control.threads import ThreadControlPlane, ThreadGroup
from kos.comm.gpu.backend import GPUBackend
from kos.comm.gpu.peer import backend as peer
from kos.comm.gpu.peer import engine, exchange
from kos.comm.gpu.peer.backend import PeerBackend
from kos.comm.host.host_backend import HostBackend
from kos.comm.work import Engine
from kos.errors import RankLost
from kos.memory.array import Array
from tests.comm.fake_nccl import WAIT, FakeNCCL, no_gpu
from tests.comm.gpu_ranks import OnGPU
from tests.comm.ranks import HANG
from tests.fake_cuda import GPU


class HostMemory:
    """SymmetricMemory among threads."""

    def __init__(self, rendezvous: ControlPlane, nbytes: int, device: int, pointer: int = 0) -> None:
        self._rendezvous, self.nbytes, self.pointer = rendezvous, nbytes, pointer
        if not pointer:
            self._own = np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)  # zeros, not there before they are used
            self.pointer = self._own.ctypes.data
        self.pointers = tuple(int(data) for data in rendezvous.allgather(str(self.pointer).encode()))
        self.peer_pointers = Array.from_numpy(np.array(self.pointers, np.uint64), device)

    def offset_of(self, pointer: int, nbytes: int) -> int | None:
        offset = pointer - self.pointer
        return offset if 0 <= offset <= self.nbytes - nbytes else None

    def close(self) -> None:
        self.unmap()

    def unmap(self) -> None:
        self._rendezvous.barrier()
        self.pointers = ()

    def abort(self) -> None:
        self.pointers = ()


@contextlib.contextmanager
def no_gpus(monkeypatch: pytest.MonkeyPatch, ranks: int, multiprocessors: int = 7) -> Iterator[FakeNCCL]:
    """Everything that would reach for the driver or a GPU finds a stand-in; a rank's GPU has few multiprocessors."""
    gpu = GPU(compute_capability=(8, 9), multiprocessors=ranks * multiprocessors)
    with no_gpu(monkeypatch, (gpu, gpu)) as fake:
        for module in (engine, peer):
            monkeypatch.setattr(module, "SymmetricMemory", HostMemory)
        monkeypatch.setattr(exchange, "PACKET_THREADS", 64)  # as many as a stand-in's block has
        monkeypatch.setattr(peer, "concurrent_kernels", ConcurrentKernelsOfThreads())
        yield fake


class ConcurrentKernelsOfThreads:
    """For each rank, which is a thread with a GPU of its own, the communicators on it."""

    def __init__(self) -> None:
        self._concurrent: dict[tuple[int, int], Any] = {}

    def setdefault(self, device: int, concurrent: Any) -> Any:
        return self._concurrent.setdefault((threading.get_ident(), device), concurrent)


def communicator(rendezvous: ControlPlane, timeout: float = WAIT) -> kos.Communicator:
    """A communicator of the peer backend whose ranks are threads."""
    return kos.Communicator(of_peer(rendezvous), rendezvous, {}, timeout)


def of_peer(rendezvous: ControlPlane, host: HostBackend | None = None, device: int = 0) -> GPUBackend:
    """A backend whose route is ``peer``."""
    return GPUBackend(rendezvous, [PeerBackend(rendezvous, Engine(), device)], host)


def meet(rendezvous: ThreadControlPlane) -> None:
    """Wait for all ranks outside of kos, which blames no rank that waits in its own barrier."""
    rendezvous.threads.shared("meeting", lambda: threading.Barrier(rendezvous.size)).wait(3 * WAIT)


class ThreadRanks:
    """Ranks on threads that live as long as the tests, each with a GPU that is a stand-in."""

    pool = ThreadPoolExecutor(4)

    def __init__(self, size: int, fake: FakeNCCL | None = None) -> None:
        self.size, self.fake = size, fake

    def run(self, fn: Callable[[Any], Any], timeout: float = 20.0) -> list[Any]:
        return self.run_bare(lambda rendezvous: self._with_communicator(fn, rendezvous, timeout), timeout)

    @staticmethod
    def _with_communicator(fn: Callable[[Any], Any], rendezvous: ControlPlane, timeout: float) -> Any:
        comm = communicator(rendezvous, timeout)
        result = fn(OnGPU(comm))
        comm.close()
        return result

    def run_bare(self, fn: Callable[[ControlPlane], Any], timeout: float = 20.0) -> list[Any]:
        threads, failures = ThreadGroup(self.size), []

        def rank(index: int) -> Any:
            try:
                return fn(ThreadControlPlane(threads, index, timeout))
            except BaseException as error:  # its frames keep the memory that kernels of other ranks may write to
                failures.append((index, error))
                threads.fail(RankLost("another rank failed"))

        running = [self.pool.submit(rank, i) for i in range(self.size)]
        results = [each.result(HANG) for each in running]
        told = [f"rank {index} failed:\n{''.join(traceback.format_exception(error))}" for index, error in failures]
        failures.clear()
        assert not told, told[0]
        return results
