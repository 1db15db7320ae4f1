"""DLPack capsules, written and read without an array library, for every dtype of kos.

Layout and protocol: dlpack.h 1.1 and the Python specification of DLPack (data-apis array API).
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kos.dtypes import DTYPES, DType
from kos.errors import InvalidArgument

CPU, CUDA = 1, 2
ON_GPU = (CUDA, 13)
"""Devices whose memory a GPU of CUDA reaches: its own, and managed memory."""
_VERSION = (1, 1)
_READ_ONLY = 1
_USED = {b"dltensor": b"used_dltensor", b"dltensor_versioned": b"used_dltensor_versioned"}  # kept
_TYPES = {(x.dlpack, 8 * x.itemsize): x for x in DTYPES.values()}


_Sizes = ctypes.POINTER(ctypes.c_int64)


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", _Sizes),
        ("strides", _Sizes),
        ("byte_offset", ctypes.c_uint64),
    ]


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _Managed(ctypes.Structure):  # DLManagedTensor, the capsule "dltensor"
    _fields_ = [("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", _Deleter)]


class _Versioned(ctypes.Structure):  # DLManagedTensorVersioned, the capsule "dltensor_versioned"
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", _Deleter),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    ]


_api = ctypes.pythonapi
_new, _is_valid = _api.PyCapsule_New, _api.PyCapsule_IsValid
_pointer, _rename = _api.PyCapsule_GetPointer, _api.PyCapsule_SetName
_new.restype, _new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
for _function, _result in ((_is_valid, ctypes.c_int), (_pointer, ctypes.c_void_p), (_rename, ctypes.c_int)):
    _function.restype, _function.argtypes = _result, [ctypes.py_object, ctypes.c_char_p]

# The targets of exported capsules: address -> (structure, its shape and strides, the owner of the memory).
_exported: dict[int, tuple[Any, ...]] = {}


@_Deleter
def _release(address: int) -> None:
    _exported.pop(address, None)


# A destructor receives a dying capsule by address, because a reference would revive it.
_raw = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)
_valid_raw, _pointer_raw = _raw(("PyCapsule_IsValid", _api)), _raw(("PyCapsule_GetPointer", _api))


@ctypes.PYFUNCTYPE(None, ctypes.c_void_p)
def _drop_unused(capsule: int) -> None:
    for name in (b"dltensor", b"dltensor_versioned"):
        if _valid_raw(capsule, name):
            _exported.pop(_pointer_raw(capsule, name), None)


def check_contiguous(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int = 1) -> None:
    """InvalidArgument unless ``strides``, in units of ``1 / itemsize`` elements, are those of a C-contiguous array."""
    if 0 in shape:
        return
    expected = itemsize
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size > 1 and stride != expected:
            raise InvalidArgument(f"DLPack: expected C-contiguous, got shape {shape}, strides {strides}")
        expected *= size


def export_capsule(
    pointer: int, shape: tuple[int, ...], dtype: DType, device: int, owner: Any, *, readonly: bool, versioned: bool,
    kind: int = CUDA,
) -> Any:  # fmt: skip
    """A capsule of C-contiguous memory, which keeps ``owner`` alive until its consumer is done."""
    if readonly and not versioned:
        raise BufferError("read-only memory needs a consumer of DLPack 1.0 or newer")
    ndim = len(shape)
    sizes = (ctypes.c_int64 * ndim)(*shape)
    strides = (ctypes.c_int64 * ndim)(*(math.prod(shape[axis + 1 :]) for axis in range(ndim)))
    tensor = _Tensor(
        pointer, kind, device, ndim, dtype.dlpack, 8 * dtype.itemsize, 1,
        ctypes.cast(sizes, _Sizes), ctypes.cast(strides, _Sizes), 0,
    )  # fmt: skip
    managed: Any = _Managed(tensor, None, _release)
    if versioned:
        managed = _Versioned(*_VERSION, None, _release, _READ_ONLY * readonly, tensor)
    address = ctypes.addressof(managed)
    _exported[address] = managed, sizes, strides, owner
    name = b"dltensor_versioned" if versioned else b"dltensor"
    return _new(address, name, ctypes.cast(_drop_unused, ctypes.c_void_p))


@dataclass
class ImportedTensor:
    """Memory that another library shares; released when this object is collected."""

    pointer: int
    shape: tuple[int, ...]
    dtype: DType
    device: int
    readonly: bool
    _managed: Any

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """Of memory on the host; elements as bytes, for NumPy has no names of the short floats."""
        # Empty memory may have no address. NumPy would treat a null pointer as None, and 1 is Open MPI's MPI_IN_PLACE.
        place = self.pointer or ctypes.addressof(self._managed), self.readonly
        return {"version": 3, "data": place, "shape": self.shape, "typestr": f"|V{self.dtype.itemsize}"}

    def __del__(self) -> None:
        if self._managed.deleter:
            self._managed.deleter(ctypes.addressof(self._managed))


def import_capsule(capsule: Any, kinds: Sequence[int] = ON_GPU) -> ImportedTensor:
    """Take ownership of a DLPack capsule of contiguous memory on CUDA, or on devices of other ``kinds``.

    Raises InvalidArgument for memory elsewhere, for none at all, for strides that are not C-contiguous and for
    unsupported dtypes; the producer then keeps the capsule.
    """
    versioned = bool(_is_valid(capsule, b"dltensor_versioned"))
    name, structure = (b"dltensor_versioned", _Versioned) if versioned else (b"dltensor", _Managed)
    if not _is_valid(capsule, name):
        raise InvalidArgument(f"DLPack: expected an unused capsule, got {capsule!r}")
    managed: Any = structure.from_address(_pointer(capsule, name))
    if versioned and managed.major != _VERSION[0]:
        raise InvalidArgument(f"DLPack: expected version {_VERSION[0]}, got {managed.major}")
    tensor = managed.tensor
    if tensor.device_type not in kinds:
        raise InvalidArgument(f"DLPack: expected a CUDA device, got device type {tensor.device_type}")
    dtype = _TYPES.get((tensor.code, tensor.bits))
    if dtype is None or tensor.lanes != 1:
        got = f"code {tensor.code}, {tensor.bits} bits, {tensor.lanes} lanes"
        raise InvalidArgument(f"DLPack: expected one of {', '.join(DTYPES)}; got {got}")
    shape = tuple(tensor.shape[: tensor.ndim])
    if not tensor.data and 0 not in shape:
        raise InvalidArgument(f"DLPack: expected an array with memory, got none for shape {shape}")
    if tensor.strides:
        check_contiguous(shape, tuple(tensor.strides[: tensor.ndim]))
    readonly = versioned and bool(managed.flags & _READ_ONLY)
    _rename(capsule, _USED[name])
    pointer = (tensor.data or 0) + tensor.byte_offset
    return ImportedTensor(pointer, shape, dtype, tensor.device, readonly, managed)


def request_capsule(source: Any, **options: Any) -> Any:
    """``source``'s capsule, versioned unless its library is older than DLPack 1.0."""
    try:
        return source.__dlpack__(**options, max_version=_VERSION)
    except TypeError:
        return source.__dlpack__(**options)


def host_array(source: Any) -> np.ndarray[Any, Any]:
    """The memory of ``source``, on the host, as an ndarray.

    ``np.from_dlpack`` refuses 16- and 8-bit floats, and treats unversioned capsules as read-only.
    """
    tensor = import_capsule(request_capsule(source), (CPU,))
    return np.asarray(tensor).view(tensor.dtype.numpy)
