"""Stand-ins for functions of the driver and of NCCL, at addresses that the compiled core can call."""

import ctypes
import functools
import itertools
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from tests.fake_cuda import CONTEXT

_LAUNCH = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_uint64] * 4)
_GET = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_uint64))
_ASK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64, ctypes.POINTER(ctypes.c_int))
_COPY = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_uint64] * 4)
_POINTER = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_int), ctypes.c_int, ctypes.c_uint64)
_NCCL = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_uint64] * 8)
_numbers = itertools.count(1)
numbered: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""Objects that C knows by a number: kernels, and communicators of NCCL."""


def number(x: Any) -> int:
    """A new number of ``x``."""
    n = next(_numbers)
    numbered[n] = x
    return n


class Config(ctypes.Structure):
    """A CUlaunchConfig as the bindings give it."""

    _fields_ = (
        ("grid", ctypes.c_uint32 * 3), ("block", ctypes.c_uint32 * 3), ("shared", ctypes.c_uint64),
        ("hStream", ctypes.c_uint64), ("attrs", ctypes.c_uint64), ("count", ctypes.c_uint64),
    )  # fmt: skip

    def __init__(self, blocks: int, threads: int) -> None:
        super().__init__((blocks, 1, 1), (threads, 1, 1))

    def getPtr(self) -> int:
        return ctypes.addressof(self)


def launch(config: int, kernel: int, parameters: int, extra: int) -> int:
    """cuLaunchKernelEx: the kernel has run when this returns."""
    given = Config.from_address(config)
    numbered[kernel].run(given, parameters)
    return 0


class FakeDriver:
    """What the core calls; ``launches`` counts its launches.  A function that is set in ``instead`` stands for one."""

    def __init__(self, capturing: Callable[[], bool]) -> None:
        self.launches, self.current, self.capturing = 0, CONTEXT, capturing
        self.device = 0  # of all memory
        self.bindings: Any = None  # the functions that Python calls
        self.instead: dict[str, Callable[..., int]] = {}
        self._functions = {
            "cuLaunchKernelEx": _LAUNCH(self._launch),
            "cuMemcpyDtoDAsync_v2": _COPY(self._copy),
            "cuCtxGetCurrent": _GET(self._get_current),
            "cuStreamIsCapturing": _ASK(self._is_capturing),
            "cuPointerGetAttribute": _POINTER(self._get_attribute),
        }
        self.library = SimpleNamespace(**self._functions)

    def _launch(self, *arguments: int) -> int:
        self.launches += 1
        return self.instead.get("cuLaunchKernelEx", launch)(*arguments)

    def _copy(self, target: int, source: int, nbytes: int, stream: int) -> int:
        self.launches += 1
        if "cuMemcpyDtoDAsync_v2" in self.instead:
            return self.instead["cuMemcpyDtoDAsync_v2"](target, source, nbytes, stream)
        ctypes.memmove(target, source, nbytes)
        return 0

    def _get_current(self, context: Any) -> int:
        context[0] = self.current
        return 0

    def _is_capturing(self, stream: int, captured: Any) -> int:
        captured[0] = self.capturing()
        return 0

    def _get_attribute(self, device: Any, attribute: int, pointer: int) -> int:
        device[0] = self.device
        return 0

    def nccl(self, operation: str, function: Callable[..., None]) -> int:
        """The address of a function of NCCL that does what the binding's ``function`` does."""
        if operation not in self._functions:
            self._functions[operation] = _NCCL(functools.partial(self._call, operation, function))
        return ctypes.cast(self._functions[operation], ctypes.c_void_p).value or 0

    def _call(self, operation: str, function: Callable[..., None], *words: int) -> int:
        self.launches += 1
        if operation in self.instead:
            return self.instead[operation](*words)
        if operation in ("group_start", "group_end"):
            function()
            return 0
        count = {"reduce": 8, "all_gather": 6, "all_to_all": 6, "send": 6, "recv": 6}.get(operation, 7)
        *arguments, comm, stream = words[:count]
        function(*arguments, numbered[comm], stream)
        return 0
