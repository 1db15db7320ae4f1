"""Other libraries for GPUs: NCCL, on plain memory and in symmetric windows; NCCL and symmetric memory through torch.

The environment decides whether NVLink multicast is used; the kernels of torch's symmetric memory that run here do not
use it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from kos.bench.cases import ROOT, Case
from kos.bench.implementations import Call, Implementation
from kos.bench.peers import Torch
from kos.comm import Communicator
from kos.dtypes import DType

_REDUCE_CODES = {"sum": 0, "prod": 1, "max": 2, "min": 3, "avg": 4, "none": 0}


class RawNCCL(Implementation):
    """The functions of nccl4py's raw binding on addresses: NCCL and nothing else."""

    backend = "nccl"

    def __init__(self, control: Communicator, device: int, stream: Any) -> None:
        from kos.comm.gpu import nccl_binding

        self._binding, self._nccl = nccl_binding, nccl_binding.library()
        self._device, self._rank, self._stream = device, control.rank, int(stream.handle)
        self.stream = stream
        identity = control.rendezvous.allgather(nccl_binding.unique_id() if control.rank == 0 else b"")[0]
        self._comm = nccl_binding.join(control.size, identity, control.rank, "benchmark", {})

    def bind(self, case: Case, send: Any, recv: Any) -> Call | None:
        codes = self._binding.CODE_OF
        if case.dtype not in codes:
            return None
        nccl, op = self._nccl, case.function
        ends = send.pointer, recv.pointer
        kind, redop, last = codes[case.dtype], _REDUCE_CODES[case.redop], (self._comm, self._stream)
        if op == "all_reduce":
            return partial(nccl.all_reduce, *ends, case.count, kind, redop, *last)
        if op == "reduce":
            return partial(nccl.reduce, *ends, case.count, kind, redop, ROOT, *last)
        if op == "reduce_scatter":
            return partial(nccl.reduce_scatter, *ends, case.parts[0], kind, redop, *last)
        if op == "broadcast":
            return partial(nccl.broadcast, *ends, case.count, kind, ROOT, *last)
        if op == "all_gather":
            return partial(nccl.all_gather, *ends, case.parts[0], kind, *last)
        if op == "all_to_all":
            return partial(nccl.allto_all, *ends, case.parts[0], kind, *last)
        if op in ("scan", "exscan", "barrier"):
            return None
        if op in ("gather", "scatter"):
            return partial(getattr(nccl, op), *ends, case.parts[0], kind, ROOT, *last)
        return partial(self._grouped, [partial(function, *arguments, *last)
                                       for function, *arguments in self._group_of(case, *ends, kind)])  # fmt: skip

    def _group_of(self, case: Case, send: int, recv: int, kind: int) -> Iterator[tuple[Any, ...]]:
        """The calls of the group for an operation that NCCL lacks: reduces, or sends and receives."""
        nccl, me, size = self._nccl, self._rank, case.dtype.itemsize
        if case.op == "reduce_scatter_v":
            for root, part in enumerate(case.parts):
                start, redop = sum(case.parts[:root]), _REDUCE_CODES[case.redop]
                yield nccl.reduce, send + start * size, recv, part, kind, redop, root
            return
        received = 0
        for peer in range(case.ranks):
            if count := case.pieces[me][peer]:
                yield nccl.send, send + case.start(me, peer) * size, count, kind, peer
            if count := case.pieces[peer][me]:
                yield nccl.recv, recv + received * size, count, kind, peer
                received += count

    def _grouped(self, calls: list[Call]) -> None:
        self._nccl.group_start()
        for call in calls:
            call()
        self._nccl.group_end()

    def close(self) -> None:
        self._nccl.comm_destroy(self._comm)


class NCCLWindows(RawNCCL):
    """The same, on memory that all ranks have registered as one symmetric window."""

    backend = "nccl-window"
    space = "nccl window"

    def __init__(self, control: Communicator, device: int, stream: Any) -> None:
        super().__init__(control, device, stream)
        self._windows: list[tuple[Any, int]] = []

    def allocate(self) -> Callable[[int, DType], Any]:
        from kos.cuda import on_device
        from kos.memory.array import Array

        def allocate(count: int, dtype: DType) -> Any:
            nbytes = count * dtype.itemsize
            with on_device(self._device):
                pointer = self._nccl.mem_alloc(nbytes)
            self._windows.append((self._binding.register(self._comm, pointer, nbytes), pointer))
            return Array(pointer, (count,), dtype, self._device, stream=self.stream)

        return allocate

    def release(self) -> None:
        from kos.cuda import on_device

        while self._windows:
            window, pointer = self._windows.pop()
            self._nccl.comm_window_deregister(self._comm, window)
            with on_device(self._device):
                self._binding.free(pointer)


class TorchSymmetric(Implementation):
    """torch's one-shot and two-shot all_reduce over symmetric memory."""

    backend = "torch-symm"

    def __init__(self, group: Any, algorithm: str, stream: Any) -> None:
        import torch
        import torch.distributed._symmetric_memory as symmetric

        if not hasattr(torch.ops.symm_mem, f"{algorithm}_all_reduce{'_out' if algorithm == 'one_shot' else '_'}"):
            raise ImportError(f"this torch has no {algorithm} all_reduce over symmetric memory")
        self.algorithm, self.space = algorithm, f"torch-symm {algorithm}"
        self._torch, self._symmetric, self._group, self.stream = torch, symmetric, group, stream
        self._slab: Any = None

    def allocate(self) -> Callable[[int, DType], Any]:
        from kos.memory.array import Array

        torch, symmetric = self._torch, self._symmetric

        def allocate(count: int, dtype: DType) -> Any:
            device = torch.device("cuda", torch.cuda.current_device())
            slab = symmetric.empty(count, dtype=getattr(torch, dtype.name), device=device)
            symmetric.rendezvous(slab, self._group.group_name)
            self._slab = slab
            return Array(slab.data_ptr(), (count,), dtype, device.index, owner=slab, stream=self.stream)

        return allocate

    def offers(self, case: Case) -> bool:
        known = case.op == "all_reduce" and case.redop == "sum" and case.dtype.name in ("float32", "bfloat16")
        return known and case.nbytes % 16 == 0 and case.in_place == (self.algorithm == "two_shot")

    def bind(self, case: Case, send: Any, recv: Any) -> Call | None:
        operations, name = self._torch.ops.symm_mem, self._group.group_name
        x = self._view(send)
        if self.algorithm == "one_shot":
            return partial(operations.one_shot_all_reduce_out, x, "sum", name, self._view(recv))
        return partial(operations.two_shot_all_reduce_, x, "sum", name)

    def _view(self, array: Any) -> Any:
        """The part of the slab that ``array`` is: torch finds the peers' parts by its storage."""
        first = (array.pointer - self._slab.data_ptr()) // array.dtype.itemsize
        return self._slab[first : first + array.size]

    def release(self) -> None:
        self._slab = None


def torch_gpu_group(dist: Any, device: int, stream: Any) -> Any:
    """A group on NCCL of torch's own; torch works on ``device`` and ``stream`` from now on."""
    import torch

    torch.cuda.set_device(device)
    torch.cuda.set_stream(torch.cuda.ExternalStream(int(stream.handle), torch.device("cuda", device)))
    return dist.new_group(backend="nccl")


def torch_nccl(group: Any) -> Implementation:
    return Torch("torch-nccl", group)
