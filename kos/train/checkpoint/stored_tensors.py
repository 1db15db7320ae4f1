"""Tensors in a safetensors file (https://github.com/huggingface/safetensors), of which slices are read.

The library safetensors maps files into memory. One that another program makes shorter would end the process by SIGBUS.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np

from kos.files import OpenFile
from kos.train.model.parameters import Shape

DTYPES = {
    "F64": np.dtype("<f8"), "F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype(ml_dtypes.bfloat16),
}  # fmt: skip
"""Safetensors' names of the dtypes that can be read, and NumPy's."""

READ = 4 << 20  # bytes of a tensor that are read at once, if its rows are not needed as a whole


class StoredTensor(NamedTuple):
    """A tensor whose data lie in ``file`` from byte ``start`` on."""

    file: OpenFile
    dtype: str
    shape: Shape
    start: int

    def read(self, index: tuple[slice, ...] = ()) -> np.ndarray:
        """The tensor, or a slice of it.  OSError: the file cannot be read, or another program has changed it."""
        length, *row = self.shape
        rows, *columns = index or (slice(None),)
        start, stop, _ = rows.indices(length)
        dtype, whole = DTYPES[self.dtype], all(x.indices(n)[:2] == (0, n) for x, n in zip(columns, row, strict=False))
        size = dtype.itemsize * math.prod(row)
        step = max(1, stop - start if whole else READ // size)
        parts = []
        for at in range(start, max(stop, start + 1), step):
            part = np.empty((max(0, min(at + step, stop) - at), *row), dtype)
            self.file.read(self.start + at * size, part.reshape(-1).view(np.uint8).data)
            parts.append(part[(slice(None), *columns)])
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


def stored_tensors(path: Path) -> dict[str, StoredTensor]:
    """The tensors in a file whose header has been checked."""
    file, first = OpenFile(path), bytearray(8)
    file.read(0, memoryview(first))
    header = bytearray(int.from_bytes(first, "little"))
    file.read(8, memoryview(header))
    tensors = json.loads(header)
    tensors.pop("__metadata__", None)
    return {
        name: StoredTensor(file, each["dtype"], tuple(each["shape"]), 8 + len(header) + each["data_offsets"][0])
        for name, each in tensors.items()
    }
