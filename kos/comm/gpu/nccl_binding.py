"""The raw binding of NCCL: the only file that uses ``nccl.bindings``, whose functions change between versions.

Most are called as they are (0.1 us a call); wrapped are those that need more than a call.  ``error_of`` converts
errors of NCCL to errors of kos.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from kos.comm.failures import EndedEarly
from kos.comm.reduction import ReduceOp
from kos.cuda.driver import call, cu
from kos.cuda.kernels import STREAM, Launch
from kos.dtypes import DTYPES, DType
from kos.errors import BackendUnavailable, CollectiveError, CudaError, InvalidArgument, KosError, install

_CUDA_ERROR, _SYSTEM_ERROR, _INTERNAL_ERROR, _INVALID_ARGUMENT = range(1, 5)
_INVALID_USAGE, _REMOTE_ERROR, _IN_PROGRESS = range(5, 8)
_NO_COLOR = -1
_BLOCKING = 1
_SYMMETRIC = 1  # NCCL_WIN_COLL_SYMMETRIC
WINDOW_ALIGNMENT = 4096  # NCCL_WIN_REQUIRED_ALIGNMENT
_HOST_IMMEDIATE = 1
_FIRST_WITH_WINDOWS = 22700  # NCCL 2.27
_FIRST_TO_SHARE_GPUS = 23000  # NCCL 2.30

SUM, PROD, MAX, MIN, AVG = range(5)
BYTE = 1
"""ncclUint8, the type of data movement."""
CODE_OF: dict[DType, int] = {dtype: dtype.nccl for dtype in DTYPES.values() if dtype.nccl is not None}
"""ncclDataType_t of the types that NCCL can add."""
Call = tuple[Any, ...]
"""The name of one of NCCL's functions, and its arguments except the last one, which is the stream.  The address of an
array may be an ``Address``."""

_OPS = {
    ReduceOp.SUM: SUM, ReduceOp.PROD: PROD, ReduceOp.AVG: AVG, ReduceOp.PREMUL_SUM: -1,
    ReduceOp.MIN: MIN, ReduceOp.MAX: MAX,
}  # fmt: skip
_NARROW = (DTYPES["float16"], DTYPES["bfloat16"])

_NAMES: dict[Any, str] = {"all_to_all": "allto_all"}
"""Operations whose functions in the binding have other names."""


@functools.cache
def library() -> Any:
    """The module of the raw functions, with libnccl loaded.  Raises BackendUnavailable, naming the missing package."""
    try:
        from nccl.bindings import nccl
    except ImportError as error:
        raise BackendUnavailable(f"nccl4py is not installed: {install('cuda')} ({error})") from error
    try:
        nccl.get_version()
    except RuntimeError as error:  # cuda.pathfinder's DynamicLibNotFoundError
        raise BackendUnavailable(f"libnccl.so.2 was not found: {str(error).splitlines()[0]}") from error
    return nccl


def version() -> str:
    """The version of libnccl, as "2.28.9"."""
    number = library().get_version()
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def ranks_may_share_a_gpu() -> bool:
    """Whether processes may share a GPU, which NCCL allows from 2.30 on, with ``NCCL_MULTI_RANK_GPU_ENABLE=1``."""
    asked = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
    return asked and library().get_version() >= _FIRST_TO_SHARE_GPUS


def unique_id() -> bytes:
    """The identity that rank 0 creates and every rank uses to join one communicator."""
    return bytes(library().get_unique_id())


def join(size: int, identity: bytes, rank: int, name: str, options: Mapping[str, Any]) -> Any:
    """The communicator of ``size`` ranks with the same ``identity``.  Waits for all of them."""
    config = _config(name, options)
    return library().comm_init_rank_scalable(size, rank, 1, bytearray(identity), config.ptr)


def split(comm: Any, color: int | None, key: int, name: str, options: Mapping[str, Any]) -> Any:
    """The communicator of the ranks of ``comm`` with this ``color``; None for color None.  Collective."""
    config = _config(name, options)
    part = library().comm_split(comm, _NO_COLOR if color is None else color, key, config.ptr)
    return None if color is None else part


def async_error(comm: Any) -> str | None:
    """The asynchronous error of ``comm``, or None."""
    code = int(library().comm_get_async_error(comm))
    return None if code in (0, _IN_PROGRESS) else f"NCCL: {library().get_error_string(code)}"


def premultiplied_sum(comm: Any, factor: float, dtype: DType) -> int:
    """A reduce operation of ``comm`` that multiplies this rank's input by ``factor`` first."""
    scalar = np.array(factor, dtype.numpy)
    address = scalar.__array_interface__["data"][0]
    operation: int = library().red_op_create_pre_mul_sum(address, CODE_OF[dtype], _HOST_IMMEDIATE, comm)
    return operation


@functools.cache
def native(op: ReduceOp, dtype: DType) -> tuple[int, int, int] | None:
    """NCCL's dtype, its op (-1: created at the call), and how many of its elements one is; None: a kernel of kos
    reduces."""
    if dtype.kind == "complex":
        return None if op is ReduceOp.PROD else (CODE_OF[real_type(dtype)], _OPS[op], 2)
    if dtype not in CODE_OF or op not in _OPS:
        return None
    if dtype.is_float and op in (ReduceOp.MIN, ReduceOp.MAX):
        return None  # NCCL's minimum and maximum ignore NaN
    if dtype in _NARROW and op is ReduceOp.PREMUL_SUM:
        return None  # NCCL's factor would be rounded to 16 bits
    return CODE_OF[dtype], _OPS[op], 1


def real_type(dtype: DType) -> DType:
    """The real type of a complex dtype; other dtypes themselves."""
    return DTYPES[f"float{4 * dtype.itemsize}"] if dtype.kind == "complex" else dtype


def launch_of(call: Call, closes: int = 0) -> Launch:
    """The launch of a call of NCCL."""
    name, *arguments = call
    error: Callable[[int], Exception] = lambda status: library().NCCLError(status)  # noqa: E731
    words = (*arguments, STREAM) if arguments else ()
    function: Callable[..., Any] = getattr(library(), _NAMES.get(name) or name)
    return Launch(function, address_of(name), words, error, closes=closes)


def launches_in_group(calls: Sequence[Call]) -> list[Launch]:
    """The launches of calls of NCCL in one group."""
    return [launch_of(("group_start",)), *map(launch_of, calls), launch_of(("group_end",), closes=len(calls))]


@functools.cache
def address_of(operation: str) -> int:
    """The address of a function of the library that the binding has loaded: a process may have loaded several."""
    from nccl.bindings._internal import nccl

    return int(nccl._inspect_function_pointer(f"__{function_name(operation)}"))


def function_name(operation: str) -> str:
    """The name of its function in NCCL."""
    return "ncclAlltoAll" if operation == "all_to_all" else f"nccl{operation.title().replace('_', '')}"


def free(address: int) -> None:
    """Free memory of ncclMemAlloc, but keep its address range reserved: this process never uses it again.

    NCCL finds a registration by its address alone.  It keeps that of a captured call until a later call collects
    destroyed graphs (one in eleven does; seen in 2.28.3 and 2.28.9, the same in the source of 2.30.7).  Until then it
    mistakes other memory at that address for the old memory, and ranks keep writing to that: a broadcast in a new
    window reached no receiver, without an error.
    """
    status, handle = cu.cuMemRetainAllocationHandle(address)
    if status:  # not of cuMemCreate: NCCL_CUMEM_ENABLE=0
        library().mem_free(address)
        return
    _, nbytes = call(cu.cuMemGetAddressRange, address)
    call(cu.cuMemUnmap, address, nbytes)
    for _ in ("retained here", "created by NCCL"):
        call(cu.cuMemRelease, handle)


def is_virtual(address: int) -> bool:
    """Whether the memory is of cuMemCreate, the driver's virtual memory management, as NCCL's own is."""
    status, handle = cu.cuMemRetainAllocationHandle(address)
    if status == 0:
        call(cu.cuMemRelease, handle)
    return bool(status == 0)


def register(comm: Any, address: int, nbytes: int) -> Any:
    """Make memory a symmetric window of ``comm``; false if NCCL has none here.  Collective, with the same ``nbytes``.

    BackendUnavailable with NCCL older than 2.27.
    """
    if library().get_version() < _FIRST_WITH_WINDOWS:
        raise BackendUnavailable(f"nccl: windows: expected NCCL 2.27 or newer, got {version()}")
    return library().comm_window_register(comm, address, nbytes, _SYMMETRIC)


def error_of(error: Exception, what: str) -> KosError | None:
    """An exception of the binding as an error of kos; None for other exceptions."""
    status = getattr(error, "status", None)
    if type(error).__name__ != "NCCLError" or status is None:
        return None
    kind: type[KosError] = CollectiveError
    if status in (_SYSTEM_ERROR, _INTERNAL_ERROR, _REMOTE_ERROR):  # in most cases another rank is gone
        kind = EndedEarly
    elif status == _CUDA_ERROR:
        kind = CudaError
    elif status in (_INVALID_ARGUMENT, _INVALID_USAGE):
        kind = InvalidArgument
    named = kind(f"{what}: NCCL {version()}: {error}; set NCCL_DEBUG=WARN for more")
    if isinstance(named, EndedEarly) and status != _REMOTE_ERROR:
        named.unexplained = CollectiveError
    return named


def _config(name: str, options: Mapping[str, Any]) -> Any:
    """``options`` are those of ``kos.comm.arguments``."""
    config = library().Config()
    for option, value in options.items():
        setattr(config, option, value)
    # Blocking: else every call starts a thread, and returns before its work is on the stream.
    config.blocking = _BLOCKING
    config.comm_name = name
    return config
