"""The CUDA driver behind two helpers: ``call`` checks every return code, ``on_device`` sets the context.

Importing this needs no GPU, driver or CUDA packages; ``require`` raises an error that names the missing one.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kos.errors import BackendUnavailable, CudaError, install


class _Driver:
    """``cuda.bindings.driver``, imported at its first use, since the import takes a tenth of a second."""

    def __getattr__(self, name: str) -> Any:
        try:
            from cuda.bindings import __version__, driver
        except ImportError as error:
            raise BackendUnavailable(f"CUDA: the CUDA packages are not installed: {install('cuda')}") from error
        if int(__version__.partition(".")[0]) < 13:  # kos has not run on an older one
            got = f"got cuda-bindings {__version__}"
            raise BackendUnavailable(f"CUDA: expected the packages of CUDA 13, {got}: {install('cuda')}")
        if importlib.util.find_spec("cuda.core") is None:  # torch requires the bindings only
            raise BackendUnavailable(f"CUDA: the package cuda-core is not installed: {install('cuda')}")
        self.__dict__.update(vars(driver))
        return getattr(driver, name)


cu: Any = _Driver()
starting = threading.RLock()
"""Held while a thread imports the packages: a second thread would find them half imported."""


@functools.cache
def unavailable() -> str | None:
    """Why CUDA cannot be used in this process, or None if it can."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    with starting:
        if _not_loadable() is None and visible is not None and visible.split(",")[0].strip() in ("", "-1"):
            # cuInit would fail too. It crashes in a process that was forked after another library had called it.
            return f"no GPU is visible (CUDA_VISIBLE_DEVICES={visible!r})"
        try:
            status, *_ = cu.cuInit(0)
        except BackendUnavailable as error:
            return _not_loadable() or str(error).removeprefix("CUDA: ")
        except RuntimeError as error:  # of cuda.pathfinder, or of the bindings to an old driver
            return _not_loadable() or f"the CUDA driver (libcuda.so.1) does not work: {error}"
        hidden = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible!r})"
        if status != cu.CUresult.CUDA_SUCCESS:
            return f"the CUDA driver found no usable GPU{hidden}: {_describe(status)}"
        _, version = cu.cuDriverGetVersion()
        if version < 13000:
            got = f"{version // 1000}.{version % 1000 // 10}"
            return f"expected a driver of CUDA 13 (580 or newer), got one of CUDA {got}"
        _, count = cu.cuDeviceGetCount()
        if not count:
            return f"no GPU is visible{hidden}"
        importlib.import_module("cuda.core")
        return None


def _not_loadable() -> str | None:
    """Why the driver's library does not load: cuda.pathfinder reports every such library as missing."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        if str(error).startswith("libcuda.so.1: cannot open shared object file: No such file"):
            return "no CUDA driver (libcuda.so.1) on this machine"
        return f"the CUDA driver does not load: {error}"
    return None


def require() -> None:
    """Raise BackendUnavailable with the reason if CUDA cannot be used here."""
    reason = unavailable()
    if reason is not None:
        raise BackendUnavailable(f"CUDA: {reason}")


def call(function: Any, *arguments: Any) -> Any:
    """Call a function of ``cuda.bindings.driver``; returns its value(s), raises CudaError."""
    try:
        result = function(*arguments)
    except RuntimeError:  # the bindings have no library to call
        require()
        raise
    if result[0]:
        if result[0] == cu.CUresult.CUDA_ERROR_NOT_INITIALIZED:
            require()
        raise error_of(function.__name__, result[0])
    return result[1] if len(result) == 2 else result[1:] or None


def error_of(name: str, status: Any) -> CudaError:
    """The exception for a failed call of the driver."""
    return CudaError(f"{name} failed: {_describe(status)}")


def library_error(what: str, error: Exception) -> CudaError:
    """The exception for a failed call of a library, with the driver's error where the context is broken."""
    status = broken()
    return CudaError(f"{what} failed: {error}{f'; {_describe(status)}' if status else ''}")


def broken() -> Any:
    """The error that has made this thread's context unusable, or None."""
    status, *_ = cu.cuMemGetInfo()  # reports earlier errors, and is allowed during a capture
    return status if status and status.name != "CUDA_ERROR_INVALID_CONTEXT" else None


def _describe(status: Any) -> str:
    _, text = cu.cuGetErrorString(status)
    return f"{status.name} ({(text or b'unknown').decode()})"


@functools.cache
def primary_context(device: int) -> Any:
    """The primary context of ``device``, which the CUDA runtime and every framework use."""
    require()
    return call(cu.cuDevicePrimaryCtxRetain, call(cu.cuDeviceGet, device))


def is_current(device: int) -> bool:
    """Whether kernels of this thread are launched on ``device``."""
    return bool(primary_context(device) == cu.cuCtxGetCurrent()[1])


def device_of(pointer: int) -> int:
    """The device of memory at an address, by the driver's own function.

    Some releases of cuda.bindings report 0 for memory of any device (NVIDIA/cuda-python, issue 2928).
    """
    require()
    device, ordinal = ctypes.c_int(-1), cu.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    function = library().cuPointerGetAttribute
    status = function(ctypes.byref(device), ctypes.c_int(int(ordinal)), ctypes.c_uint64(pointer))
    if status:
        raise error_of("cuPointerGetAttribute", cu.CUresult(status))
    return device.value


@functools.cache
def library() -> ctypes.CDLL:
    """The driver's library, for what the bindings do not give."""
    return ctypes.CDLL("libcuda.so.1")


def address(name: str) -> int:
    """The address of a function of the driver."""
    return ctypes.cast(getattr(library(), name), ctypes.c_void_p).value or 0


class on_device:
    """Make ``device`` current on this thread in a ``with`` block, then restore the former one.  Not reusable."""

    __slots__ = ("_device", "_pushed")

    def __init__(self, device: int) -> None:
        self._device = device

    def __enter__(self) -> None:
        self._pushed = not is_current(self._device)  # a query costs a third of a change
        if self._pushed:
            call(cu.cuCtxPushCurrent, primary_context(self._device))

    def __exit__(self, *_: object) -> None:
        if self._pushed:
            call(cu.cuCtxPopCurrent)


def set_device(device: int) -> None:
    """Make ``device`` current on this thread from now on; kernels are launched on the current device."""
    call(cu.cuCtxSetCurrent, primary_context(device))


def synchronize(device: int) -> None:
    """Wait until everything queued on ``device`` by this process has run.

    CUDA refuses it while any thread of the process captures a graph there: wait for a stream then.
    """
    with on_device(device):
        call(cu.cuCtxSynchronize)


@contextmanager
def relaxed_capture() -> Iterator[None]:
    """Allow a thread that captures a graph to allocate, free and load kernels."""
    former = call(cu.cuThreadExchangeStreamCaptureMode, cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)
    try:
        yield
    finally:
        call(cu.cuThreadExchangeStreamCaptureMode, former)
