"""One table of element types: NumPy / ml_dtypes <-> DLPack <-> MPI <-> NCCL <-> the core and the kernels.

A new type is a row here, one in ``kos/_core/reduce.c`` at the same place, and a struct of its name in
``kos/comm/gpu/kernels/types.cuh``.  A new ``kind`` needs ``kos/comm/reduction.py`` (the reduce operations that it
allows).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from kos.errors import InvalidArgument


@dataclass(frozen=True, slots=True, eq=False)
class DType:
    """One element type under all its names; an empty one: that library does not add such elements."""

    name: str
    """The name in kos, which is NumPy's or that of ml_dtypes."""
    numpy: np.dtype[Any]
    """The dtype of NumPy."""
    kind: str
    """"float", "int", "uint", "bool" or "complex"."""
    mpi: str
    """The attribute of mpi4py.MPI."""
    nccl: int | None
    """The ncclDataType_t as which NCCL adds it; None if it does not."""
    dlpack: int
    """The DLDataTypeCode of DLPack."""
    accumulate: np.dtype[Any]
    """The type in which sums and products are computed."""
    itemsize: int
    """Bytes of one element."""

    @property
    def is_float(self) -> bool:
        """Whether it is a floating-point type, of any width."""
        return self.kind == "float"

    def __str__(self) -> str:
        return self.name


def _entry(numpy: Any, kind: str, mpi: str, nccl: int | None, dlpack: int) -> DType:
    dtype = np.dtype(numpy)
    accumulate = np.dtype(np.float32) if kind == "float" and dtype.itemsize < 4 else dtype
    return DType(dtype.name, dtype, kind, mpi, nccl, dlpack, accumulate, dtype.itemsize)


DTYPES: dict[str, DType] = {
    entry.name: entry
    for entry in (
        _entry(np.float64, "float", "DOUBLE", 8, 2),
        _entry(np.float32, "float", "FLOAT", 7, 2),
        _entry(np.float16, "float", "", 6, 2),
        _entry(ml_dtypes.bfloat16, "float", "", 9, 4),
        _entry(ml_dtypes.float8_e4m3fn, "float", "", None, 10),
        _entry(ml_dtypes.float8_e5m2, "float", "", None, 12),
        _entry(np.int8, "int", "INT8_T", 0, 0),
        _entry(np.int16, "int", "INT16_T", None, 0),
        _entry(np.int32, "int", "INT32_T", 2, 0),
        _entry(np.int64, "int", "INT64_T", 4, 0),
        _entry(np.uint8, "uint", "UINT8_T", 1, 1),
        _entry(np.uint16, "uint", "UINT16_T", None, 1),
        _entry(np.uint32, "uint", "UINT32_T", 3, 1),
        _entry(np.uint64, "uint", "UINT64_T", 5, 1),
        _entry(np.bool_, "bool", "", None, 6),
        _entry(np.complex64, "complex", "C_FLOAT_COMPLEX", None, 5),
        _entry(np.complex128, "complex", "C_DOUBLE_COMPLEX", None, 5),
    )
}
"""All element types by name."""

DTYPE_CODES = {entry.numpy: code for code, entry in enumerate(DTYPES.values())}
"""The number that stands for a dtype in a message."""

BY_NUMPY: dict[np.dtype[Any], DType] = {entry.numpy: entry for entry in DTYPES.values()}
dtype_of_code = (list(BY_NUMPY) * 256)[:256].__getitem__
"""The dtype that a message names by a number below 256."""


def dtype_of(numpy_dtype: np.dtype[Any], what: str = "dtype") -> DType:
    """The table's entry for the NumPy dtype of the argument ``what``.

    Raises InvalidArgument for types that no backend moves: objects, strings, dates, records and
    non-native byte order.
    """
    entry = BY_NUMPY.get(numpy_dtype)
    if entry is None:
        native = numpy_dtype.newbyteorder("=")
        if native in BY_NUMPY:
            order = f"{native} in the byte order of this machine, which is {sys.byteorder}-endian"
            raise InvalidArgument(f"{what}: expected {order}, got {numpy_dtype!r}: use astype({str(native)!r})")
        raise InvalidArgument(f"{what}: expected one of the dtypes {', '.join(DTYPES)}; got {numpy_dtype!r}")
    return entry
