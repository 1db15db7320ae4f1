"""FlashInfer: the control plane of its communication workspaces (``flashinfer.comm.abstractions.CommBackend``).

    SymmDeviceMemory(size, comm.size, comm.rank, comm.device, comm_backend_for_handle_transfer=CommBackend(comm))

FlashInfer exchanges handles of memory, sizes and names of hosts by it, and moves tensors by its own kernels.
"""

from __future__ import annotations

import ast
from typing import Any

import kos
from kos.errors import InvalidArgument


class CommBackend:
    """The methods that FlashInfer calls, on ``comm``; all are collective.

    ``data`` is None, a bool, a number, a str, bytes, or a tuple, list or dict of them: what a Python literal can write.
    Anything else raises InvalidArgument, as kos does not pickle.  Failures raise the other classes of KosError.
    """

    def __init__(self, comm: kos.Communicator) -> None:
        self.comm = comm

    def Get_rank(self) -> int:
        """This rank, from 0."""
        return self.comm.rank

    def Get_size(self) -> int:
        """The number of ranks."""
        return self.comm.size

    def allgather(self, data: Any) -> tuple[Any, ...]:
        """Every rank's ``data``, in rank order.  Raises KosError."""
        return tuple(ast.literal_eval(each.decode()) for each in self.comm.all_gather_bytes(_literal(data)))

    def bcast(self, data: Any, root: int) -> Any:
        """The ``data`` of rank ``root``; that of other ranks is ignored.  Raises KosError."""
        return self.allgather(data if self.comm.rank == root else None)[root]

    def barrier(self) -> None:
        """Return once every rank has called it.  Raises KosError."""
        self.comm.barrier()

    def Split(self, color: int, key: int) -> CommBackend:
        """The group of the ranks of the same ``color``, ordered by ``key``.  Raises KosError."""
        group = self.comm.split(color, key)
        assert group is not None
        return CommBackend(group)


def _literal(data: Any) -> bytes:
    text = repr(data)
    try:
        same = ast.literal_eval(text) == data
    except (SyntaxError, ValueError):
        same = False
    if not same:
        raise InvalidArgument(f"data: expected numbers, text, bytes, or tuples, lists, dicts of them, got {text:.80}")
    return text.encode()
