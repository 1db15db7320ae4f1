"""Kernels that are loaded, without a GPU: in which mode of captures, what waits meanwhile, and one launch."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kos.cuda import load_kernel
from tests.fake_cuda import GPU, installed


class Loads:
    """Loads kernels of a file by their names; ``make`` is called meanwhile.  ``log`` has modes and launches."""

    def __init__(self, path: Path) -> None:
        self._path, self.log = path, list[Any]()
        self.make: Callable[[str, int], None] = lambda name, device: None
        self._devices = threading.local()

    def __call__(self, name: str, device: int) -> tuple[str, int]:
        self._devices.loading = device
        kernel = load_kernel(self._path, name, device)
        return kernel.name, kernel.device

    def get_kernel(self, name: str) -> Any:
        self.make(name, self._devices.loading)
        return SimpleNamespace(handle=1)


@pytest.fixture
def load(monkeypatch, tmp_path):
    load = Loads(tmp_path / "x.cu")
    (tmp_path / "x.cu").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    functions = SimpleNamespace(
        cuThreadExchangeStreamCaptureMode=lambda mode: (load.log.append(mode) or 0, "as before"),
        CUfunction=int, cuFuncLoad=lambda function: (0,), cuKernelGetFunction=lambda kernel: (0, kernel),
        CUstreamCaptureMode=SimpleNamespace(CU_STREAM_CAPTURE_MODE_RELAXED="relaxed"), CUlaunchConfig=SimpleNamespace,
        cuLaunchKernelEx=lambda config, kernel, parameters, extra: load.log.append((config.numAttrs, extra)) or (0,),
    )  # fmt: skip
    with installed(monkeypatch, functions, (GPU(), GPU())) as core:
        core.get_kernel = load.get_kernel
        yield load


def test_kernels_are_loaded_in_relaxed_capture_mode(load, tmp_path):
    """Any call may be the first that needs a kernel, also one that a thread captures.  A launch has no attributes."""
    load.make = lambda *_: load.log.append("loads")
    load("saxpy", 0)
    load_kernel(tmp_path / "x.cu", "saxpy", 0).bind(1, 32)(None)
    assert load.log == ["relaxed", "loads", "as before", (0, 0)]


def test_a_thread_that_loads_a_kernel_delays_only_loads_on_its_gpu(load):
    """Its load ends when running kernels do, and those may wait for what another thread launches."""
    begun, free = threading.Event(), threading.Event()

    def make(name, device):
        if (name, device) == ("slow", 0):
            begun.set()
            assert free.wait(20)

    load.make = make
    assert load("saxpy", 0) == ("saxpy", 0)
    with ThreadPoolExecutor(2) as pool:
        slow = pool.submit(load, "slow", 0)
        try:
            assert begun.wait(20)
            others = [("saxpy", 0), ("slow", 1)]
            done = [pool.submit(load, *each) for each in others]
            assert [each.result(5) for each in done] == others
        finally:
            free.set()
        assert slow.result(20) == ("slow", 0)
