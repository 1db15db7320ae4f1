"""The CUDA packages and the driver's library as stand-ins, where kos imports them.

The code of kos runs unchanged on them: it finds GPUs, makes contexts current and creates streams.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kos.cuda import devices, driver, kernels

CONTEXT = 7
"""The handle of the context of every GPU, which is always current."""
CREATED = range(99, 999)
"""The handles of the streams that kos creates, in this order."""

_CACHED = (
    driver.unavailable, driver.primary_context, devices.visible_devices, devices.nvlinks, kernels.nvrtc_version,
)  # fmt: skip


@dataclass(frozen=True)
class GPU:
    """What the packages report of a GPU."""

    name: str = "a stand-in"
    uuid: str = "GPU"
    compute_capability: tuple[int, int] = (9, 0)
    multiprocessors: int = 132
    nvlinks: int | None = None


class Contexts:
    """The stack of current contexts, one for each GPU.  ``queries`` counts how often it was read."""

    def __init__(self, current: int = 0) -> None:
        self.stack, self.queries = [current], 0  # the indices of GPUs

    def install(self, functions: Any) -> None:
        """Make a driver's functions keep this stack."""
        functions.cuDevicePrimaryCtxRetain = lambda device: (0, CONTEXT + device)
        functions.cuCtxGetCurrent, functions.cuCtxPushCurrent = self._current, self._push
        functions.cuCtxPopCurrent = self._pop

    def _current(self) -> tuple[int, int]:
        self.queries += 1
        return 0, CONTEXT + self.stack[-1]

    def _push(self, context: int) -> tuple[int]:
        self.stack.append(context - CONTEXT)
        return (0,)

    def _pop(self) -> tuple[int, int]:
        return 0, CONTEXT + self.stack.pop()


class ThreadContexts(Contexts, threading.local):
    """A stack for each thread."""


class Stream:
    """A stream of a handle."""

    def __init__(self, handle: int) -> None:
        self.handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle


class NVMLError(Exception):
    """What NVML raises where it does not report NVLinks."""


class Core(ModuleType):
    """The package ``cuda.core`` of a machine with these GPUs.  What it compiles is nothing, which it also loads."""

    def __init__(self, gpus: tuple[GPU, ...]) -> None:
        super().__init__("cuda.core")
        self.__spec__ = ModuleSpec("cuda.core", None)
        self.system = SimpleNamespace(NvmlError=NVMLError)
        self.StreamOptions, self.Stream = SimpleNamespace, Stream
        self.LaunchConfig = self.launch = None
        self.ProgramOptions = lambda **options: SimpleNamespace(as_bytes=lambda backend: [])
        self.Program = lambda *_: SimpleNamespace(compile=lambda target: SimpleNamespace(code=b"no code"))
        self.ObjectCode = SimpleNamespace(from_cubin=lambda cubin: self)
        self.get_kernel = lambda name: SimpleNamespace(handle=1)
        handles = iter(CREATED)

        class Device:
            def __init__(self, index: int) -> None:
                gpu = self._gpu = gpus[index]
                self.name, self.uuid = gpu.name, gpu.uuid
                self.compute_capability = SimpleNamespace(
                    major=gpu.compute_capability[0], minor=gpu.compute_capability[1]
                )
                self.properties = SimpleNamespace(multiprocessor_count=gpu.multiprocessors)

            def set_current(self) -> None:
                pass

            def create_stream(self, options: Any) -> Any:
                return Stream(next(handles))

            def to_system_device(self) -> Any:
                return self

            def get_nvlinks(self) -> list[Any]:
                if self._gpu.nvlinks is None:
                    raise NVMLError
                return [SimpleNamespace(state=1)] * self._gpu.nvlinks

        self.Device = Device


def _machine(gpus: tuple[GPU, ...]) -> dict[str, Any]:
    """The functions that find the GPUs."""
    return {
        "cuInit": lambda flags: (0,), "cuDriverGetVersion": lambda: (0, 13000),
        "cuDeviceGetCount": lambda: (0, len(gpus)), "cuDeviceGet": lambda index: (0, index),
        "cuDeviceGetPCIBusId": lambda length, index: (0, b"0000:%02x:00.0\0" % index),
        "cuDeviceTotalMem": lambda index: (0, 1 << 30),
        "cuDevicePrimaryCtxRetain": lambda device: (0, CONTEXT), "cuCtxSetCurrent": lambda context: (0,),
        "cuCtxGetCurrent": lambda: (0, CONTEXT),
        "CUresult": SimpleNamespace(CUDA_SUCCESS=0),
    }  # fmt: skip


@contextlib.contextmanager
def installed(
    monkeypatch: pytest.MonkeyPatch, functions: Any, gpus: tuple[GPU, ...] = (GPU(),), library: Any = None
) -> Iterator[Core]:
    """In this block, kos finds a driver with these functions and GPUs, and the packages of CUDA 13.

    ``functions`` are what ``cuda.bindings.driver`` has.  A test may add some, or replace them, at any time.
    ``library`` has those that kos calls without the bindings.  Gives ``cuda.core``, whose parts it may replace too.
    """
    usual = _machine(gpus)

    class Bindings:
        def __getattr__(self, name: str) -> Any:
            return getattr(functions, name) if hasattr(functions, name) else usual[name]

    def forget() -> None:
        """What kos has found out about the machine."""
        vars(driver.cu).clear()
        for function in _CACHED:
            function.cache_clear()

    with monkeypatch.context() as patch:
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        nvrtc = SimpleNamespace(nvrtcVersion=lambda: (0, 13, 0))
        bindings = SimpleNamespace(__version__="13.0.0", driver=Bindings(), nvrtc=nvrtc)
        patch.setitem(sys.modules, "cuda.bindings", bindings)
        patch.setitem(sys.modules, "cuda.core", core := Core(gpus))
        patch.setattr(driver, "library", lambda: library)
        forget()
        try:
            yield core
        finally:
            forget()
