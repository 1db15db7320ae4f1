"""Planned scratch memory: a stack allocator over one slab.

A training step takes and releases the same arrays in the same order every time.  So the arena has one slab and one
offset, and allocates nothing in the steady state.  The first pass may outgrow the slab: arrays that do not fit get
their own memory, and once the arena is empty a slab of the needed size replaces the old one.  ``fix()`` forbids that,
for a captured CUDA graph, whose addresses must not move.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from kos.dtypes import DType
from kos.errors import InvalidArgument, OutOfMemory

ALIGNMENT = 256  # bytes: the most that cuBLASLt requires; several cache lines of a CPU


def allocate_host(nbytes: int) -> np.ndarray:
    """``nbytes`` of host memory starting on an ``ALIGNMENT`` boundary, as uint8."""
    raw = np.empty(nbytes + ALIGNMENT, np.uint8)
    skip = -raw.ctypes.data % ALIGNMENT
    return raw[skip : skip + nbytes]


def view_host(slab: np.ndarray, offset: int, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """The array of ``shape`` and ``dtype`` that lies ``offset`` bytes into ``slab``."""
    return np.ndarray(shape, dtype, buffer=slab, offset=offset)


class Arena:
    """Stack allocator over memory of any kind: ``allocate(nbytes)`` makes a slab, ``view`` an array in it.

    An array is uninitialised, and valid until an older mark is released.  ``capacity`` is the bytes of the slab,
    ``in_use`` the bytes taken and not released, ``peak`` the maximum of ``in_use``.
    """

    def __init__(
        self, nbytes: int = 0, allocate: Callable[[int], Any] = allocate_host,
        view: Callable[[Any, int, tuple[int, ...], Any], Any] = view_host,
    ) -> None:  # fmt: skip
        self._allocate, self._view = allocate, view
        self._fixed = False
        self.in_use = 0
        self._overflow: list[tuple[int, Any]] = []
        self.peak = nbytes
        self._replace_slab()

    def take(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """An uninitialised, ``ALIGNMENT``-aligned, C-contiguous array.

        Raises ``OutOfMemory`` when it does not fit and the arena is fixed.
        """
        key = (self.in_use, shape, dtype)
        known = self._views.get(key)
        if known is not None:
            array, self.in_use = known
            return array
        start = self.in_use
        nbytes = math.prod(shape) * (dtype if isinstance(dtype, DType) else np.dtype(dtype)).itemsize
        end = start + -(-nbytes // ALIGNMENT) * ALIGNMENT
        if end <= self.capacity:
            array = self._view(self._slab, start, shape, dtype)
            self._views[key] = (array, end)
        elif self._fixed:
            raise OutOfMemory(f"arena: expected at most {self.capacity} bytes in use, got {end}")
        else:
            slab = self._allocate(end - start)
            self._overflow.append((start, slab))
            array = self._view(slab, 0, shape, dtype)
        self.in_use = end
        self.peak = max(self.peak, end)
        return array

    def mark(self) -> int:
        """The position of the stack, for ``release``."""
        return self.in_use

    def release(self, mark: int) -> None:
        """Free everything taken since ``mark``."""
        if not 0 <= mark <= self.in_use:
            raise InvalidArgument(f"arena: expected a mark between 0 and {self.in_use}, got {mark}")
        self.in_use = mark
        while self._overflow and self._overflow[-1][0] >= mark:
            self._overflow.pop()
        if mark == 0 and self.peak > self.capacity:
            self._replace_slab()

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Free everything taken inside at the end."""
        mark = self.in_use
        try:
            yield
        finally:
            self.release(mark)

    def reserve(self, nbytes: int, allocate: Callable[[int], Any] | None = None) -> None:
        """Make the slab at least ``nbytes``, by ``allocate`` if it is given.  Needs an empty arena."""
        if self.in_use or self._fixed:
            raise InvalidArgument(f"arena: expected an empty arena that is not fixed, got {self.in_use} bytes in use")
        self._allocate = allocate or self._allocate
        self.peak = max(self.peak, nbytes)
        if self.peak > self.capacity:
            self._replace_slab()

    def fix(self) -> None:
        """Fix the slab's address: outgrowing it is an error from now on.  Needs an empty arena."""
        if self.in_use:
            raise InvalidArgument(f"arena: expected an empty arena to fix, got {self.in_use} bytes in use")
        self._fixed = True

    def _replace_slab(self) -> None:
        self._views: dict[tuple[int, tuple[int, ...], Any], tuple[Any, int]] = {}
        self._slab: Any = None  # freed before its successor is allocated
        self._slab = self._allocate(self.peak)
        self.capacity = self.peak
