"""Buffer: what any array becomes before a backend sees it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kos.dtypes import DType, dtype_of
from kos.errors import InvalidArgument

_DLPACK_CPU = 1


@dataclass(slots=True)
class Buffer:
    """A contiguous run of elements in host memory.

    ``array`` is what the caller gave (and gets back), ``flat`` a 1-D view of the same memory.
    """

    array: np.ndarray[Any, Any]
    flat: np.ndarray[Any, Any]
    dtype: DType

    @property
    def count(self) -> int:
        """Number of elements."""
        return self.flat.size

    @property
    def nbytes(self) -> int:
        return self.flat.nbytes

    def overlaps(self, other: Buffer) -> bool:
        """Whether the two share any byte."""
        return np.may_share_memory(self.flat, other.flat)

    def same_memory(self, other: Buffer) -> bool:
        """Whether the two are exactly the same run of elements."""
        return (
            self.flat.size == other.flat.size
            and self.flat.dtype == other.flat.dtype
            and self.flat.__array_interface__["data"][0] == other.flat.__array_interface__["data"][0]
        )

    def __str__(self) -> str:
        return f"{self.dtype.name}{list(self.array.shape)}"


def as_buffer(x: Any, what: str, *, writable: bool) -> Buffer:
    """Take ``x`` (an ndarray, or CPU memory behind DLPack) as a Buffer without copying.

    ``what`` names the argument in errors.  Raises InvalidArgument if ``x`` is not an array, lives on a
    device, is not C-contiguous, has a dtype that kos does not move, or must be written but is read-only.
    """
    array = x if type(x) is np.ndarray else _import_array(x, what)
    flags = array.flags
    if not flags.c_contiguous:
        raise InvalidArgument(
            f"{what}: expected a C-contiguous array, got shape {array.shape} with strides {array.strides}"
        )
    if writable and not flags.writeable:
        raise InvalidArgument(f"{what}: expected a writable array, got a read-only one")
    return Buffer(array, array.reshape(-1), dtype_of(array.dtype))


def _import_array(x: Any, what: str) -> np.ndarray[Any, Any]:
    if isinstance(x, np.ndarray):
        return x.view(np.ndarray)
    if hasattr(x, "__cuda_array_interface__"):
        raise InvalidArgument(f"{what}: expected memory of the host, got {type(x).__name__} on a GPU")
    if hasattr(x, "__dlpack_device__"):
        device, index = x.__dlpack_device__()
        if device != _DLPACK_CPU:
            where = f"DLPack device {device}:{index}"
            raise InvalidArgument(f"{what}: expected memory of the host, got {type(x).__name__} on {where}")
        try:
            return np.from_dlpack(x)
        except (BufferError, RuntimeError, TypeError) as error:
            raise InvalidArgument(
                f"{what}: expected an array that DLPack can share, got {type(x).__name__}: {error}"
            ) from error
    raise InvalidArgument(f"{what}: expected an array, got {type(x).__name__}")
