"""Other array libraries: their current stream, and new arrays of their type.

This file imports none of them: the program that passes an array has loaded its library.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from kos.cuda import driver, streams
from kos.dtypes import BY_NUMPY, DTYPES, DType
from kos.errors import ignored
from kos.memory.array import Array

_LIBRARIES = {"torch": "torch", "cupy": "cupy", "jax": "jax", "jaxlib": "jax", "tensorflow": "tensorflow"}
_IMMUTABLE = ("jax", "tensorflow")  # their arrays never change, but their DLPack capsules are not read-only


@functools.lru_cache(maxsize=256)
def _library(kind: Any) -> str | None:
    roots = (base.__module__.partition(".")[0] for base in kind.__mro__)
    return next((_LIBRARIES[root] for root in roots if root in _LIBRARIES), None)


def library_of(x: Any) -> str | None:
    """The library whose array ``x`` is: torch, cupy, jax or tensorflow; None for any other."""
    kind: Any = type(x)
    return _library(kind)


def immutable(x: Any) -> bool:
    """Whether the library of ``x`` assumes that its memory never changes."""
    return (library_of(x) or "") in _IMMUTABLE


class _Stream:
    """A stream of another library: its handle, and the object that keeps it alive."""

    __slots__ = ("_handle", "_owner")

    def __init__(self, handle: int, owner: Any = None) -> None:
        self._handle, self._owner = handle, owner

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle


def may_close(stream: Any) -> bool:
    """Whether the owner of a stream, as an object, may close it, after which that object has no handle."""
    return type(stream) is not _Stream


def may_die(stream: Any) -> bool:
    """Whether a stream lives as long as that object, which is not so for handles and streams of torch."""
    if type(stream) is _Stream:
        return stream._owner is not None
    return stream is not None and type(stream) is not int and library_of(stream) != "torch"


_pooled: dict[int, _Stream] = {}
"""The streams of torch's pool by handle; torch never destroys them."""


def torch_stream(device: int) -> Any:
    """torch's current stream on that GPU as the object that keeps it; None for the default stream.

    The handle if the stream is an external one.
    """
    torch: Any = sys.modules["torch"]
    raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    handle = int(raw(device) if raw is not None else torch.cuda.current_stream(device).cuda_stream)
    if not handle:
        return None
    stream = _pooled.get(handle)
    if stream is None:
        current = torch.cuda.current_stream(device)
        if current.stream_id == handle:  # an ExternalStream: its owner may destroy it
            return handle
        stream = _pooled[handle] = _Stream(handle)
    return stream


def _cupy_stream(device: int) -> Any:
    stream = sys.modules["cupy"].cuda.get_current_stream(device)
    return stream if stream.ptr else None


def current_stream(x: Any) -> Any:
    """The current stream of the library of ``x`` on its GPU; None for the legacy default stream.

    torch and CuPy report it, JAX does not; for other libraries ``__cuda_array_interface__`` may.
    """
    library = library_of(x)
    if library == "torch":
        return torch_stream(x.get_device())
    if library == "cupy":
        return _cupy_stream(x.device.id)
    with ignored(Exception):  # absent, or refused for this array
        return None if library else x.__cuda_array_interface__.get("stream")
    return None


def kept_stream(x: Any) -> Any:
    """The stream that ``x`` exports, for memory of kos that is freed in its order, perhaps after ``x``.

    ``__cuda_array_interface__`` gives a handle, which is valid while ``x`` lives.  So the handle is kept with the
    stream object of ``x``, which Numba's arrays have, or else with ``x``.
    """
    stream = current_stream(x)
    if type(stream) is not int:
        return stream
    owner = getattr(x, "stream", None)
    return _Stream(stream, x if owner is None or isinstance(owner, int) else owner)


@functools.cache
def _torch_dtype(dtype: Any) -> DType | None:
    found = DTYPES.get(str(dtype).removeprefix("torch."))
    return None if found is None or found.kind == "complex" else found  # complex tensors may be lazily conjugated


def negated(x: Any) -> bool:
    """Whether ``x`` is a torch tensor that stores its values negated, which DLPack does not report."""
    return library_of(x) == "torch" and bool(x.is_neg())


def plain_array(x: Any) -> Array | None:
    """The GPU memory of a contiguous torch or CuPy array, on the current stream of its library.

    None for every other array, which uses DLPack and takes 20 us longer.
    """
    library = library_of(x)
    if library == "torch":
        torch: Any = sys.modules["torch"]
        if type(x) is torch.Tensor and x.is_cuda and x.layout is torch.strided and not x.requires_grad:
            dtype, device = _torch_dtype(x.dtype), x.get_device()
            if dtype is not None and x.is_contiguous() and not x.is_neg():
                return Array(x.data_ptr(), tuple(x.shape), dtype, device, owner=x, stream=torch_stream(device))
    elif library == "cupy" and type(x) is sys.modules["cupy"].ndarray and x.flags.c_contiguous:
        dtype = BY_NUMPY.get(x.dtype)
        if dtype is not None:
            return Array(x.data.ptr, x.shape, dtype, x.device.id, owner=x, stream=_cupy_stream(x.device.id))
    return None


def expandable(x: Any) -> bool:
    """Whether ``x`` is a torch tensor in an expandable segment, whose addresses torch maps and unmaps as it needs."""
    if library_of(x) != "torch":
        return False
    for segment in sys.modules["torch"].cuda.memory_snapshot():
        if 0 <= x.data_ptr() - segment["address"] < segment["total_size"]:
            return bool(segment.get("is_expandable"))
    return False


def empty_like(x: Any, shape: tuple[int, ...], stream: Any) -> Any:
    """An uninitialised array of ``shape`` like ``x``, ordered on ``stream`` (None: that of its library).

    None if the library of ``x`` is neither torch nor CuPy.
    """
    library = library_of(x)
    if library == "torch":
        if stream is None or not x.is_cuda or streams.handle(stream) == streams.handle(torch_stream(x.get_device())):
            return x.new_empty(shape)
        cuda: Any = sys.modules["torch"].cuda
        with cuda.stream(cuda.ExternalStream(streams.handle(stream), x.device)):
            return x.new_empty(shape)
    if library == "cupy":
        cupy: Any = sys.modules["cupy"]
        with x.device:
            if stream is None or streams.handle(stream) == streams.handle(_cupy_stream(x.device.id)):
                return cupy.empty(shape, x.dtype)
            with cupy.cuda.ExternalStream(streams.handle(stream), x.device.id):
                return cupy.empty(shape, x.dtype)
    return None


def converter(x: Any) -> Callable[[Any], Any] | None:
    """A function that turns a result into an array of the library of ``x``; for JAX, whose arrays cannot be written."""
    return as_jax if library_of(x) == "jax" else None


def as_jax(array: Any) -> Any:
    """An ndarray, an Array, or another object with DLPack as an array of JAX."""
    jax: Any = sys.modules["jax"]
    if isinstance(array, np.ndarray):
        return jax.numpy.asarray(array)
    if not isinstance(array, Array):
        return jax.dlpack.from_dlpack(array)
    with driver.on_device(array.device):  # XLA leaves it current
        return jax.dlpack.from_dlpack(array)
