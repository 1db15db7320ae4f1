"""Buffer: the description of an array, on the host or on a GPU, that backends receive."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from kos.cuda import streams
from kos.dtypes import BY_NUMPY, DType, dtype_of
from kos.errors import BackendUnavailable, InvalidArgument, KosError
from kos.memory.array import Array
from kos.memory.dlpack import CPU, ON_GPU, host_array
from kos.memory.libraries import current_stream, immutable, library_of, negated, plain_array

_IN_ORDER = -1  # DLPack's stream for memory that needs no waiting


@dataclass(slots=True, eq=False)
class Buffer:
    """A contiguous run of elements in host memory, or in the memory of one GPU.

    ``array`` is the caller's array, which the call returns.  In host memory ``device`` is None and ``flat`` a 1-D view.
    On a GPU there is no view: ``pointer`` is the address, and ``stream`` the handle of the stream that orders the use
    of the memory.
    """

    array: Any
    flat: np.ndarray[Any, Any]
    dtype: DType
    count: int  # elements
    shape: tuple[int, ...]
    device: int | None = None
    pointer: int = 0
    stream: int = streams.LEGACY
    stream_owner: Any = None  # the object that keeps that stream alive; the handle if none is known
    convert: Callable[[Any], Any] | None = None  # makes the result of ``array``, once the work is queued or done
    readonly: bool = False  # on a GPU

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.count * self.dtype.itemsize

    @property
    def address(self) -> int:
        """The address of the first element."""
        return address_of(self.flat) if self.device is None else self.pointer

    @property
    def place(self) -> str:
        """The name of its memory, for errors."""
        return "the host" if self.device is None else f"cuda:{self.device}"

    def overlaps(self, other: Buffer) -> bool:
        """Whether the two share any byte."""
        if self.device is None:
            return other.device is None and np.may_share_memory(self.flat, other.flat)
        return (
            self.device == other.device
            and self.pointer < other.pointer + other.nbytes
            and other.pointer < self.pointer + self.nbytes
        )

    def __str__(self) -> str:
        return f"{self.dtype.name}{list(self.shape)}"


_NO_VIEW: Any = None  # ``flat`` of GPU memory


def as_buffer(x: Any, what: str, writable: bool, stream: Any = None) -> Buffer:
    """Take ``x`` as a Buffer without copying.

    On the host: an ndarray, CPU memory with DLPack, or a buffer such as a bytearray.  On a GPU: a
    ``kos.memory.Array``, or memory with DLPack or ``__cuda_array_interface__``.  GPU memory is used in the order of
    ``stream``, else of its library's current stream, else of the legacy default stream.  ``what`` names the
    argument in errors.  Raises InvalidArgument if ``x`` is not an array, was freed, is not C-contiguous or aligned,
    has an unsupported dtype, or must be written but is read-only.
    """
    if type(x) is Array:
        return _of_device(x, x, what, writable, stream)
    if type(x) is not np.ndarray and (plain := plain_array(x)) is not None:
        return _of_device(x, plain, what, writable, stream)
    array = x if type(x) is np.ndarray else _host_array(x, what)
    if array is None:
        buffer = _of_device(x, _shared_array(x, what, stream), what, writable, stream)
        if immutable(x):
            buffer.stream_owner = buffer.stream  # an event must hold ``x``: its library does not know the stream
        return buffer
    if stream is not None:
        raise InvalidArgument(f"stream: expected None, as {what} is in memory of the host, got {stream!r}")
    flags = array.flags
    if not flags.c_contiguous:
        raise InvalidArgument(
            f"{what}: expected a C-contiguous array, got shape {array.shape} with strides {array.strides}"
        )
    if writable and not flags.writeable:
        raise InvalidArgument(f"{what}: expected a writable array, got a read-only one{_instead(x)}")
    if not flags.aligned and array.size:
        raise InvalidArgument(f"{what}: expected memory aligned for {array.dtype}, got address {array.ctypes.data:#x}")
    dtype = BY_NUMPY.get(array.dtype) or dtype_of(array.dtype, what)  # which raises
    return Buffer(x, array.reshape(-1), dtype, array.size, array.shape)


def _instead(x: Any) -> str:
    return "; for arrays of JAX use kos.interop.jax" if library_of(x) == "jax" else ""


def _of_device(given: Any, array: Array, what: str, writable: bool, stream: Any) -> Buffer:
    """The Buffer of ``given``, the caller's array, whose memory is ``array``."""
    if writable and array.readonly:
        got = f"a read-only {type(given).__name__}{_instead(given)}"
        raise InvalidArgument(f"{what}: expected a writable array, got {got}")
    if getattr(array.owner, "closed", False):
        raise InvalidArgument(f"{what}: expected an array with memory, got one that was freed, {array!r}")
    if stream is None:
        stream = array.stream
    handle, owner = handle_and_owner(stream)
    shape = array.shape
    count = shape[0] if len(shape) == 1 else math.prod(shape)
    where = array.device, array.pointer, handle, owner
    return Buffer(given, _NO_VIEW, array.dtype, count, shape, *where, readonly=array.readonly)


def handle_and_owner(stream: Any) -> tuple[int, Any]:
    """Handle and owner of ``stream``; caches the last one, as consecutive calls mostly use one stream."""
    global _last_stream
    known, handle, owner = _last_stream
    # The owner of a stream may have closed it.
    if known is not stream or (stream is owner is not None and streams.handle(stream) != handle):
        handle, owner = streams.handle(stream), streams.owner(stream)
        _last_stream = stream, handle, owner
    return handle, owner


_last_stream: tuple[Any, int, Any] = None, streams.LEGACY, None


def _shared_array(x: Any, what: str, stream: Any) -> Array:
    """GPU memory of another library as an Array on ``stream``, or that library's; ``x`` itself keeps the memory alive.

    No stream waits if the caller or the library names the stream, so that the work can be captured.
    """
    own = current_stream(x)
    waits = own if stream is None or not immutable(x) else stream
    named = library_of(x) in ("torch", "cupy")  # by ``current_stream``
    if hasattr(x, "__dlpack__") and (named or (stream is not None and not immutable(x))):
        waits = _IN_ORDER
    try:
        array = Array.from_dlpack(x, stream=waits)
    except BackendUnavailable as error:
        kind = type(x).__name__
        raise InvalidArgument(f"{what}: expected memory of the host, got {kind} on a GPU; {error}") from error
    except KosError as error:
        raise InvalidArgument(f"{what}: {str(error).removeprefix('from_dlpack: ')}") from error
    array.stream = own
    array.readonly |= immutable(x)
    return array


def _host_array(x: Any, what: str) -> np.ndarray[Any, Any] | None:
    """Host memory of ``x`` as an ndarray; None for memory on a GPU."""
    if isinstance(x, np.ndarray):
        if isinstance(x, np.ma.MaskedArray):
            raise InvalidArgument(f"{what}: expected an array without a mask, got {type(x).__name__}")
        return x.view(np.ndarray)
    if hasattr(x, "__dlpack_device__"):
        if negated(x):
            raise InvalidArgument(f"{what}: expected a tensor of resolve_neg(), got one with torch's negative bit")
        try:
            device, index = x.__dlpack_device__()
            if device == CPU:
                array = host_array(x)
                if immutable(x):
                    array.flags.writeable = False
                return array
        except Exception as error:  # libraries raise different types, such as torch ValueError for meta tensors
            raise InvalidArgument(
                f"{what}: expected an array that DLPack can share, got {type(x).__name__}: {error}"
            ) from error
        if device in ON_GPU:
            return None
        where = f"DLPack device {device}:{index}"
        raise InvalidArgument(
            f"{what}: expected memory of the host or of a CUDA GPU, got {type(x).__name__} on {where}"
        )
    if hasattr(x, "__cuda_array_interface__"):
        return None
    if not isinstance(x, np.generic):  # the buffer protocol: memoryview, bytearray, array.array; read-only: bytes
        try:
            return np.asarray(memoryview(x))
        except TypeError:
            pass
        except ValueError as error:
            raise InvalidArgument(f"{what}: expected a buffer of numbers, got {type(x).__name__}: {error}") from error
    raise InvalidArgument(f"{what}: expected an array, got {type(x).__name__}")


def address_of(memory: Any) -> int:
    """The address of a 1-D ndarray; an address is itself."""
    if isinstance(memory, int):
        return memory
    start: int = memory.__array_interface__["data"][0]
    return start
