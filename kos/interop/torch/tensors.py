"""Tensors of torch as arrays of kos: contiguous, and several as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.distributed as dist

import kos
from kos._core import native
from kos.errors import InvalidArgument

Tensor: TypeAlias = torch.Tensor

_OF_NUMPY = {
    getattr(torch, name): np.dtype(name).str
    for name in (
        "float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint8", "bool", "complex64", "complex128",
    )
}  # fmt: skip
_OPS = "SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"
_BY_HASH = {hash(getattr(dist.ReduceOp, name)): kos.ReduceOp[name] for name in _OPS}
"""Keyed by the hash of torch's operation, which is that of its kind: reading the kind takes three times as long."""
_OF_BOOL = {kos.ReduceOp.SUM: kos.ReduceOp.MAX, kos.ReduceOp.PRODUCT: kos.ReduceOp.MIN}
"""The sum of truth values is "or", as in NCCL, and their product "and"."""


def reduce_op(op: Any, tensor: Tensor) -> Any:
    """The operation of kos for torch's; raises InvalidArgument if kos has none."""
    if (found := _BY_HASH.get(hash(op))) is not None:
        return found if tensor.dtype is not torch.bool else _OF_BOOL.get(found, found)
    if op == dist.ReduceOp.PREMUL_SUM:
        return kos.PremulSum(float(op.__getstate__()[1]))  # torch 2.11 has no other access to the factor
    raise InvalidArgument(f"op: expected PREMUL_SUM or one of {', '.join(_OPS)}, got {getattr(op, 'op', op)}")


def check_dense(tensors: Sequence[Tensor], what: str) -> None:
    """Raise InvalidArgument unless all tensors are dense and on one device that kos supports."""
    device = tensors[0].device
    for tensor in tensors:
        if tensor.device != device or tensor.layout is not torch.strided:
            got = f"{tensor.layout} on {tensor.device}"
            raise InvalidArgument(f"{what}: expected dense tensors, all on {device}, got one of {got}")
        if device.type not in ("cpu", "cuda") or (not tensor.data_ptr() and tensor.numel()):
            got = f"{type(tensor).__name__} on {tensor.device}"
            raise InvalidArgument(f"{what}: expected tensors in host or GPU memory, got {got}")


def check_parts(parts: Sequence[Tensor], size: int, what: str) -> None:
    """Raise InvalidArgument unless there is a tensor for each of ``size`` ranks."""
    if len(parts) != size:
        raise InvalidArgument(f"{what}: expected a list of {size} tensors, one for each rank, got {len(parts)}")


def split_counts(tensor: Tensor, splits: Sequence[int], size: int) -> list[int]:
    """The elements for each of ``size`` ranks; ``splits`` are rows of the first dimension, none: equal ones."""
    rows = tensor.shape[0] if tensor.ndim else 1
    if not splits and rows % size:
        raise InvalidArgument(f"splits: expected rows that {size} ranks can share equally, got {rows}")
    splits = splits or [rows // size] * size
    if sum(splits) != rows:
        raise InvalidArgument(f"splits: expected a sum of {rows}, the rows of the tensor, got {list(splits)}")
    width = tensor.numel() // rows if rows else 0
    return [split * width for split in splits]


def in_memory(tensor: Tensor) -> bool:
    """Whether the memory of a dense tensor is its elements in order, with no sign or conjugation to be applied."""
    return tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj()


_readable = native.readable if native is not None and native.tensors(Tensor) else lambda tensor: False


def is_plain(tensor: Tensor, index: int) -> bool:
    """Whether kos takes a tensor on GPU ``index`` without conversion: nothing to refuse, to detach or to copy."""
    return tensor.get_device() == index and _readable(tensor)


def as_array(tensor: Tensor) -> Any:
    """What kos reads: a contiguous tensor, in host memory as an array of NumPy if that has its dtype."""
    tensor = tensor.detach()
    if not in_memory(tensor):
        tensor = tensor.contiguous().resolve_conj().resolve_neg()
    if tensor.is_cuda or tensor.dtype not in _OF_NUMPY:
        return tensor
    interface = {
        "data": (tensor.data_ptr(), False), "shape": tuple(tensor.shape), "typestr": _OF_NUMPY[tensor.dtype],
        "version": 3,
    }  # fmt: skip
    return np.asarray(Memory(interface, tensor))  # after ``Tensor.numpy`` its storage could not be resized


class Memory:
    """Memory of the host for NumPy, which ``owner`` keeps alive."""

    def __init__(self, interface: dict[str, Any], owner: Any = None) -> None:
        self.__array_interface__, self._owner = interface, owner


def _adjacent(parts: Sequence[Tensor]) -> Tensor | None:
    """The tensors as one of one dimension, if they follow each other in one storage."""
    first = parts[0].detach()
    place, storage = first.data_ptr(), first.untyped_storage().data_ptr()
    for part in parts:
        if not part.is_contiguous() or part.data_ptr() != place or part.untyped_storage().data_ptr() != storage:
            return None
        place += part.numel() * part.element_size()
    return first.as_strided((sum(part.numel() for part in parts),), (1,))


class Arrays:
    """The arrays of one operation, and the copies that follow it where a result went through a temporary tensor."""

    def __init__(self) -> None:
        self._copies: list[tuple[Tensor, Tensor]] = []

    def output(self, tensor: Tensor) -> Any:
        """What kos writes in place of ``tensor``."""
        if in_memory(tensor):
            return as_array(tensor)
        temporary = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        self.add_copy(tensor, temporary)
        return as_array(temporary)

    def in_place(self, tensor: Tensor) -> Any:
        """What kos reads and writes in place of ``tensor``."""
        array = as_array(tensor)
        if not in_memory(tensor):
            self.add_copy(tensor, torch.as_tensor(array))
        return array

    def joined(self, parts: Sequence[Tensor]) -> Any:
        """What kos reads in place of several tensors."""
        joined = _adjacent(parts)
        return as_array(torch.cat([part.detach().reshape(-1) for part in parts]) if joined is None else joined)

    def joined_output(self, parts: Sequence[Tensor]) -> Any:
        """What kos writes in place of several tensors."""
        joined = _adjacent(parts)
        if joined is None:
            sizes = [part.numel() for part in parts]
            joined = parts[0].new_empty(sum(sizes))
            for part, piece in zip(parts, joined.split(sizes), strict=True):
                self.add_copy(part, piece.view(part.shape))
        return as_array(joined)

    def add_copy(self, destination: Tensor, source: Tensor) -> None:
        """Copy ``source`` after the operation.  Raises InvalidArgument if elements of ``destination`` share memory."""
        if torch._debug_has_internal_overlap(destination) == 1:
            got = f"strides {destination.stride()}"
            raise InvalidArgument(f"tensors: expected a result whose elements do not share memory, got {got}")
        self._copies.append((destination, source))

    def copy(self) -> None:
        """Copy the results, on the current stream."""
        copies, self._copies = self._copies, []
        for destination, source in copies:
            destination.detach().copy_(source)
