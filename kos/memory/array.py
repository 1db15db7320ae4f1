"""Array: a C-contiguous tensor in the memory of one GPU.

It describes memory; kernels do arithmetic.  NumPy arrays are copied in and out.  Other array libraries share the
memory, by DLPack or ``__cuda_array_interface__``.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import numpy as np

from kos.cuda import driver, streams
from kos.cuda.driver import call, cu
from kos.dtypes import DTYPES, DType, dtype_of
from kos.errors import InvalidArgument
from kos.memory.dlpack import CUDA, ON_GPU, check_contiguous, export_capsule, import_capsule, request_capsule
from kos.memory.pool import pool_of

Shape = int | tuple[int, ...]


def as_dtype(dtype: Any) -> DType:
    """A DType, its name ("bfloat16"), or a dtype of NumPy or torch, as the table's entry."""
    if isinstance(dtype, DType):
        return dtype
    if type(dtype).__module__ == "torch":
        dtype = str(dtype).removeprefix("torch.")
    if isinstance(dtype, str) and dtype in DTYPES:
        return DTYPES[dtype]
    try:
        of_numpy = np.dtype("None" if dtype is None else dtype)  # NumPy's None is float64
    except (TypeError, ValueError):
        raise InvalidArgument(f"dtype: expected one of the dtypes {', '.join(DTYPES)}; got {dtype!r}") from None
    return dtype_of(of_numpy)


def _whole(what: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise InvalidArgument(f"{what}: expected a whole number, got {value!r:.80}") from None


def _sizes(what: str, shape: Any) -> tuple[int, ...]:
    """The sizes of a shape, any sequence of them; a number is a shape of one dimension."""
    return tuple(_whole(what, size) for size in (shape if np.iterable(shape) else (shape,)))


class Array:
    """Shape, dtype and address of device memory, and the object that keeps it alive.

    The memory is used and freed in the order of ``stream`` (None: the legacy default stream); other libraries wait for
    it.  A stream that is given as a handle must outlive the array; a stream object is kept alive.
    Copies are asynchronous, and run on that stream unless the call names another one.  The caller orders them against
    work on other streams, for example on the stream of the array that is read.  When a copy from pageable host
    memory returns, that memory may change, but the bytes may not have reached the GPU; with ``pinned_empty`` neither
    has happened.  An array does not change: a view is another array.
    Methods raise InvalidArgument for shapes and dtypes that do not fit, OutOfMemory, and CudaError.
    """

    __slots__ = ("__weakref__", "device", "dtype", "owner", "pointer", "readonly", "shape", "stream")

    def __init__(
        self, pointer: int, shape: tuple[int, ...], dtype: Any, device: int, *, owner: Any = None, stream: Any = None,
        readonly: bool = False,
    ) -> None:  # fmt: skip
        """Describe existing memory; the array and its views keep ``owner`` alive."""
        self.pointer, self.shape, self.dtype, self.device = pointer, shape, as_dtype(dtype), device
        self.owner, self.stream, self.readonly = owner, stream, readonly

    @classmethod
    def empty(cls, shape: Shape, dtype: Any, device: int, *, stream: Any = None, label: str = "") -> Array:
        """Uninitialised memory from the pool of ``device``; ``label`` names its holder in errors.

        ``shape`` is in elements of ``dtype``, which is NumPy's, a DType or its name.
        """
        shape = _sizes("Array.empty", shape)
        if any(size < 0 for size in shape):
            raise InvalidArgument(f"Array.empty: expected sizes of 0 or more, got shape {shape}")
        dtype = as_dtype(dtype)
        memory = pool_of(device).allocate(math.prod(shape) * dtype.itemsize, stream, label=label)
        return cls(memory.pointer, shape, dtype, device, owner=memory, stream=stream)

    @classmethod
    def zeros(cls, shape: Shape, dtype: Any, device: int, *, stream: Any = None) -> Array:
        """As ``empty``, with every element 0 once ``stream`` has run."""
        array = cls.empty(shape, dtype, device, stream=stream)
        array.fill_bytes(0, stream)
        return array

    @classmethod
    def from_numpy(cls, source: np.ndarray, device: int, *, stream: Any = None, label: str = "") -> Array:
        """A copy of ``source`` on ``device``; ``label`` as in ``empty``."""
        source = np.ascontiguousarray(source).reshape(source.shape)
        array = cls.empty(source.shape, source.dtype, device, stream=stream, label=label)
        return array.copy_from(source, stream)

    @classmethod
    def from_dlpack(cls, source: Any, *, stream: Any = None) -> Array:
        """The memory of ``source``, shared: an object with ``__dlpack__`` or ``__cuda_array_interface__``.

        ``stream`` waits for the work that the other library has queued on that memory; -1 (DLPack's) waits for nothing.
        Managed memory counts as a GPU's.  Raises InvalidArgument for memory of the host, strides that are not
        C-contiguous and unknown dtypes.
        """
        driver.require()
        if isinstance(source, Array):
            return source
        waits = not (isinstance(stream, int) and stream == -1)
        own = stream if waits else None
        if not hasattr(source, "__dlpack__"):
            return cls._from_cuda_array_interface(source, own, waits)
        kind, device = source.__dlpack_device__()
        if kind not in ON_GPU:
            raise InvalidArgument(f"from_dlpack: expected a CUDA device, got DLPack device {kind}:{device}")
        handle = streams.handle(stream) if waits else -1
        try:
            with driver.on_device(device):  # a library may take that stream for one of the current device
                capsule = request_capsule(source, stream=handle)
        except BufferError as error:
            raise InvalidArgument(f"from_dlpack: refused by {type(source).__name__}: {error}") from error
        tensor = import_capsule(capsule)
        place = tensor.pointer, tensor.shape, tensor.dtype, tensor.device
        return cls(*place, owner=tensor, stream=own, readonly=tensor.readonly)

    @classmethod
    def _from_cuda_array_interface(cls, source: Any, stream: Any, waits: bool) -> Array:
        interface = getattr(source, "__cuda_array_interface__", None)
        if interface is None:
            raise InvalidArgument(f"from_dlpack: expected an array on a GPU, got {type(source).__name__}")
        shape, dtype = tuple(interface["shape"]), dtype_of(np.dtype(interface["typestr"]), "from_dlpack")
        pointer, readonly = interface["data"]
        if (strides := interface.get("strides")) is not None:
            check_contiguous(shape, tuple(strides), dtype.itemsize)
        device = driver.device_of(pointer) if pointer else 0
        if waits and interface.get("stream") is not None:
            streams.order(interface["stream"], stream, device)
        return cls(pointer, shape, dtype, device, owner=source, stream=stream, readonly=readonly)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.size * self.dtype.itemsize

    def reshape(self, *shape: Any) -> Array:
        """A view of another shape with as many elements; one size may be -1."""
        sizes = _sizes("reshape", shape[0] if len(shape) == 1 else shape)
        if sizes.count(-1) == 1:
            rest = -math.prod(sizes)
            sizes = tuple(self.size // rest if size == -1 and rest else size for size in sizes)
        if any(size < 0 for size in sizes) or math.prod(sizes) != self.size:
            raise InvalidArgument(f"reshape: expected {self.size} elements, got shape {shape}")
        return self._view(self.pointer, sizes, self.dtype)

    def view(self, dtype: Any) -> Array:
        """The same bytes as elements of another dtype of the same size."""
        dtype = as_dtype(dtype)
        if dtype.itemsize != self.dtype.itemsize:
            raise InvalidArgument(f"view: expected a dtype of {self.dtype.itemsize} bytes, got {dtype}")
        return self._view(self.pointer, self.shape, dtype)

    def __getitem__(self, index: int | slice) -> Array:
        """A contiguous view along the first axis: one row, or a slice of rows with step 1."""
        if not self.shape:
            raise InvalidArgument("index: expected at least one axis, got an array without any")
        rows = self.shape[0]
        row_bytes = math.prod(self.shape[1:]) * self.dtype.itemsize
        if isinstance(index, slice):
            start, stop, step = index.indices(rows)
            if step != 1:
                raise InvalidArgument(f"slice: expected step 1 (a contiguous view), got {step}")
            count = max(stop - start, 0)
            return self._view(self.pointer + start * row_bytes, (count, *self.shape[1:]), self.dtype)
        index = _whole("index", index)
        if not -rows <= index < rows:
            raise IndexError(f"index: expected {-rows}..{rows - 1}, got {index}")
        return self._view(self.pointer + index % rows * row_bytes, self.shape[1:], self.dtype)

    def __len__(self) -> int:
        return self.shape[0]

    def _view(self, pointer: int, shape: tuple[int, ...], dtype: DType) -> Array:
        return Array(pointer, shape, dtype, self.device, owner=self.owner, stream=self.stream, readonly=self.readonly)

    def copy_from(self, source: Any, stream: Any = None) -> Array:
        """Queue a copy of ``source``, an Array on any device or an ndarray, into this array; returns this array."""
        if self.readonly:
            raise InvalidArgument("copy_from: expected a writable array, got a read-only one")
        pointer = self._other(source, "copy_from")
        self._copy(self.pointer, pointer, stream)
        return self

    def copy_to(self, target: np.ndarray[Any, Any], stream: Any = None) -> None:
        """Queue a copy of this array into ``target``; with pinned memory, synchronise before reading it."""
        pointer = self._other(target, "copy_to")
        if not target.flags.writeable:
            raise InvalidArgument("copy_to: expected a writable ndarray, got a read-only one")
        self._copy(pointer, self.pointer, stream)

    def _other(self, other: Any, what: str) -> int:
        """The address of ``other`` if it matches this array."""
        if isinstance(other, Array):
            dtype, pointer = other.dtype, other.pointer
        elif isinstance(other, np.ndarray) and other.flags.c_contiguous:
            dtype, pointer = dtype_of(other.dtype, what), other.ctypes.data
        else:
            got = type(other).__name__ + (f" with strides {other.strides}" if isinstance(other, np.ndarray) else "")
            raise InvalidArgument(f"{what}: expected an Array or a C-contiguous ndarray, got {got}")
        if (dtype, other.shape) != (self.dtype, self.shape):
            raise InvalidArgument(f"{what}: expected {self.dtype}{self.shape}, got {dtype}{other.shape}")
        return pointer

    def _copy(self, target: int, source: int, stream: Any) -> None:
        if self.nbytes:
            with driver.on_device(self.device):
                call(cu.cuMemcpyAsync, target, source, self.nbytes, self._handle(stream))

    def _handle(self, stream: Any) -> int:
        """The handle of ``stream``; None: the array's own."""
        return streams.handle(self.stream if stream is None else stream)

    def fill_bytes(self, value: int, stream: Any = None) -> None:
        """Queue a fill of every byte with ``value`` (0..255): 0 clears, 255 turns floats into NaN."""
        if self.nbytes:
            with driver.on_device(self.device):
                call(cu.cuMemsetD8Async, self.pointer, value, self.nbytes, self._handle(stream))

    def numpy(self, stream: Any = None) -> np.ndarray[Any, Any]:
        """A copy on the host; waits for it, and for the work queued before it on ``stream`` (None: the array's own)."""
        result = np.empty(self.shape, self.dtype.numpy)
        self.copy_to(result, stream)
        streams.synchronize(self._handle(stream), self.device)
        return result

    def __dlpack_device__(self) -> tuple[int, int]:
        return CUDA, self.device

    def __dlpack__(
        self, *, stream: Any = None, max_version: Any = None, dl_device: Any = None, copy: bool | None = None
    ) -> Any:
        """A capsule that shares this memory; the consumer's ``stream`` waits for this array's (-1: it does not)."""
        if dl_device not in (None, self.__dlpack_device__()) or copy:
            raise BufferError(f"Array can only share its memory on cuda:{self.device}")
        if stream != -1:
            streams.order(self.stream, stream, self.device)
        versioned = max_version is not None and max_version[0] >= 1
        return export_capsule(
            self.pointer, self.shape, self.dtype, self.device, self, readonly=self.readonly, versioned=versioned
        )

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Version 3.  Not available for bfloat16 and float8, which it cannot name; use DLPack."""
        if self.dtype.numpy.kind == "V" or self.dtype.numpy.char not in np.typecodes["All"]:
            raise AttributeError(f"__cuda_array_interface__ has no name for {self.dtype}; use DLPack")
        data, kind = (self.pointer, self.readonly), self.dtype.numpy.str
        stream = streams.handle(self.stream)
        return {"version": 3, "shape": self.shape, "typestr": kind, "data": data, "strides": None, "stream": stream}

    def __repr__(self) -> str:
        return f"Array({self.dtype}{list(self.shape)}, cuda:{self.device}, 0x{self.pointer:x})"
