"""Other libraries for host memory: Open MPI called through mpi4py, and Gloo through torch.distributed."""

from __future__ import annotations

import socket
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np

from kos.bench.cases import ROOT, Case
from kos.bench.implementations import Call, Implementation
from kos.comm import Communicator

_TIMEOUT = timedelta(seconds=120)


class OpenMPI(Implementation):
    """The MPI library's blocking calls."""

    backend = "mpi-native"

    def __init__(self, again: bool = False) -> None:
        from mpi4py import MPI

        self._MPI: Any = MPI
        if again:  # the same: how much its rows differ is noise
            self.backend = "mpi-again"
        self._comm = MPI.COMM_WORLD.Dup()

    def bind(self, case: Case, send: Any, recv: Any) -> Call | None:
        MPI, comm, op = self._MPI, self._comm, case.function
        if case.redop == "avg" or (case.redop != "none" and not case.dtype.mpi):
            return None
        kind = getattr(MPI, case.dtype.mpi) if case.dtype.mpi else MPI.BYTE
        x, out = ([array if case.dtype.mpi else array.view(np.uint8), kind] for array in (send, recv))
        redop: Any = getattr(MPI, case.redop.upper(), None)
        source = MPI.IN_PLACE if case.in_place else x
        root = comm.rank == ROOT
        if case.in_place == (op == "reduce_scatter") and op in ("reduce_scatter", "broadcast"):
            return None
        left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size

        def by_rank(array: list[Any], counts: list[int]) -> list[Any]:
            scale = 1 if case.dtype.mpi else case.dtype.itemsize
            return [array[0], [scale * count for count in counts], kind]

        to, of = case.counts(comm.rank)
        calls: dict[str, tuple[Any, ...]] = {
            "barrier": (comm.Barrier,),
            "all_reduce": (comm.Allreduce, source, out, redop),
            "reduce": (comm.Reduce, source if root else x, out if root else None, redop, ROOT),
            "broadcast": (comm.Bcast, x, ROOT),
            "all_gather": (comm.Allgather, source, out),
            "reduce_scatter": (comm.Reduce_scatter_block, x, out, redop),
            "all_to_all": (comm.Alltoall, x, out),
            "gather": (comm.Gather, x, out if root else None, ROOT),
            "scatter": (comm.Scatter, x if root else None, out, ROOT),
            "send_recv": (comm.Sendrecv, x, right, 0, out, left, 0),
            "all_gather_v": (comm.Allgatherv, x, by_rank(out, case.parts)),
            "reduce_scatter_v": (comm.Reduce_scatter, x, out, case.parts, redop),
            "all_to_all_v": (comm.Alltoallv, by_rank(x, to), by_rank(out, of)),
            "gather_v": (comm.Gatherv, x, by_rank(out, case.parts) if root else None, ROOT),
            "scatter_v": (comm.Scatterv, by_rank(x, case.parts) if root else None, out, ROOT),
            "scan": (comm.Scan, source, out, redop),
            "exscan": (comm.Exscan, source, out, redop),
        }
        function, *arguments = calls[op]
        return partial(function, *arguments)

    def close(self) -> None:
        self._comm.Free()


class Torch(Implementation):
    """torch.distributed on one of its backends."""

    def __init__(self, backend: str, group: Any) -> None:
        import torch.distributed as dist

        self.backend, self._group, self._dist = backend, group, dist

    def bind(self, case: Case, send: Any, recv: Any) -> Call | None:
        dist, op = self._dist, case.function
        # torch's all_reduce, reduce and broadcast are in place; the others have their own output.
        if case.in_place != (op in ("all_reduce", "reduce", "broadcast")):
            return None
        x, out = tensor(send), tensor(recv)
        reducing: dict[str, Any] = {"group": self._group}
        if case.redop != "none":
            if case.redop == "avg" and self.backend == "gloo":
                return None
            reducing["op"] = getattr(dist.ReduceOp, case.redop.upper())
        if op == "barrier":  # on NCCL it waits on the host
            return partial(dist.barrier, group=self._group) if self.backend == "gloo" else None
        if op == "all_reduce":
            return partial(dist.all_reduce, x, **reducing)
        if op == "reduce":
            return partial(dist.reduce, x, ROOT, **reducing)
        if op == "broadcast":
            return partial(dist.broadcast, x, ROOT, group=self._group)
        if op == "all_gather":
            gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # torch 2.13 renames both
            return partial(gather, out, x, group=self._group)
        if op == "reduce_scatter":
            reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
            return partial(reduce_scatter, out, x, **reducing)
        if op == "all_to_all":
            return partial(dist.all_to_all_single, out, x, group=self._group)
        if op == "all_to_all_v":
            to, of = case.counts(dist.get_rank(self._group))
            return partial(dist.all_to_all_single, out, x, of, to, group=self._group)
        return None

    def close(self) -> None:
        if self._group is not None:
            self._dist.destroy_process_group(self._group)


def tensor(array: Any) -> Any:
    """The memory of an ndarray or of an Array on a GPU as a torch tensor."""
    import torch

    if not isinstance(array, np.ndarray):
        return torch.utils.dlpack.from_dlpack(array)
    if array.dtype.kind != "V":
        return torch.from_numpy(array)
    words = {1: np.uint8, 2: np.int16}[array.dtype.itemsize]  # types that NumPy has by name only
    return torch.from_numpy(array.view(words)).view(getattr(torch, array.dtype.name))


def torch_world(comm: Communicator) -> Any:
    """torch.distributed among the ranks of ``comm``, on Gloo; its store is a server of rank 0 on this machine.

    Raises ImportError without torch.  Collective.
    """
    from torch import distributed

    dist: Any = distributed
    if not dist.is_available():
        raise ImportError("torch has no torch.distributed")
    server = comm.rank == 0
    port = b""
    if server:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1]).encode()
    number = int(comm.all_gather_bytes(port)[0])
    store = dist.TCPStore("127.0.0.1", number, comm.size, server, timeout=_TIMEOUT)
    dist.init_process_group("gloo", store=store, rank=comm.rank, world_size=comm.size, timeout=_TIMEOUT)
    return dist
