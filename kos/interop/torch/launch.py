"""Launches the operations of one call, and caches calls: a call repeated on the same memory skips its checks.

The cache key has everything that a call depends on: operation, arguments, stream, and the device, address, shape and
dtype of each tensor.  A cached call holds addresses and no tensor.  So memory that was freed and allocated again is
used in the same way, or has another key.  The first call with a key marks it, the second one is prepared for the next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

import kos
from kos.comm.persistent import Persistent
from kos.interop.torch.tensors import Arrays, Memory, Tensor
from kos.memory.array import Array
from kos.memory.libraries import plain_array

MOST_CACHED = 1024
"""The most calls that a process group caches; one more clears its cache."""
Prepared = list[Persistent[Any]]
Cache = dict[tuple[Any, ...] | None, Prepared | None]
"""The operations of each call, ready to start; None for a call that was made once, empty for one never to prepare."""


_KNOWN, _STRIDED = (Tensor, torch.nn.Parameter), torch.strided


class Launch(Arrays):
    """One launch: ``launch(name, ...)`` calls that operation of the communicator."""

    def __init__(self, comm: kos.Communicator, options: dict[str, Any]) -> None:
        super().__init__()
        self._comm, self._options, self.works = comm, options, list[Any]()
        self._calls: list[tuple[str, tuple[Any, ...]]] = []

    def __call__(self, name: str, *args: Any) -> None:
        self.works.append(getattr(self._comm, name)(*args, **self._options))
        self._calls.append((name, args))

    def prepare(self, key: tuple[Any, ...]) -> Prepared:
        """The same operations for later calls; none if one used memory that is not in the key, as a temporary tensor's.

        A result that is copied from a temporary tensor is such a call.
        """
        options = {name: value for name, value in self._options.items() if name != "async_op"}
        calls = [(name, [_memory_of(arg, key) for arg in args]) for name, args in self._calls]
        if any(arg is _UNKNOWN for _, args in calls for arg in args):
            return []
        return [getattr(self._comm, f"{name}_init")(*args, **options) for name, args in calls]


_UNKNOWN: Any = object()
"""The memory of an argument that cannot be cached."""


def _memory_of(arg: Any, key: tuple[Any, ...]) -> Any:
    """An array at the address of ``arg`` that does not keep its memory alive; other arguments as they are."""
    if isinstance(arg, np.ndarray):
        known = arg.nbytes and arg.__array_interface__["data"][0] in key
        return np.asarray(Memory(arg.__array_interface__)) if known else _UNKNOWN
    if not isinstance(arg, torch.Tensor):
        return arg
    array = plain_array(arg) if arg.data_ptr() in key else None
    if array is None:
        return _UNKNOWN
    return Array(array.pointer, array.shape, array.dtype, array.device, stream=array.stream)


def cache_key(call: tuple[Any, ...], tensors: Sequence[Tensor]) -> tuple[Any, ...] | None:
    """The key of ``call``, which is all but the tensors; None if kos copies a tensor, or does not know its kind."""
    for x in tensors:
        if type(x) not in _KNOWN or x.layout is not _STRIDED or not x.is_contiguous() or x.is_neg() or x.is_conj():
            return None
        call += (x.get_device(), x.data_ptr(), x.shape, x.dtype)
    return call


def run(
    call: Callable[[Launch], None], comm: kos.Communicator, options: dict[str, Any], asynchronous: bool, batch: bool
) -> Launch:
    """Run ``call``, whose operations a ``batch`` launches together."""
    if not batch:
        launch = Launch(comm, {**options, "async_op": True} if asynchronous else options)
        call(launch)
        return launch
    launch = Launch(comm, options)
    with comm.batch(async_op=asynchronous) as operations:
        call(launch)
    launch.works = operations.works
    return launch


def start(comm: Any, prepared: Prepared) -> None:
    """Start the operations of a cached call on a GPU."""
    if len(prepared) == 1:
        prepared[0].start()
    else:
        with comm.batch():
            for each in prepared:
                each.start()


def add(cache: Cache, key: tuple[Any, ...] | None, launch: Launch) -> None:
    """Mark a call that was launched, or prepare it if it is marked."""
    if key is None:
        return
    if key in cache:
        if cache[key] is None:
            cache[key] = launch.prepare(key)
        return
    if len(cache) >= MOST_CACHED:
        cache.clear()
    cache[key] = None
