"""Kernels that are loaded, without a GPU: in which mode of captures, and what waits meanwhile."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kos.cuda import driver, kernels


class Loads:
    """Loads kernels of a file, each of which is what ``make`` returns.  ``log`` has the changes of the mode."""

    def __init__(self, path: Path) -> None:
        self._path, self.log = path, list[str]()
        self.make: Callable[[str, int], Any] = lambda name, device: (name, device)

    def __call__(self, name: str, device: int) -> Any:
        return kernels.load_kernel(self._path, name, device)

    @contextmanager
    def relaxed(self) -> Iterator[None]:
        self.log.append("relaxed")
        yield
        self.log.append("as before")


@pytest.fixture
def load(monkeypatch, tmp_path):
    load = Loads(tmp_path / "x.cu")
    monkeypatch.setattr(kernels, "relaxed_capture", load.relaxed)
    monkeypatch.setattr(kernels, "Kernel", lambda cubin, name, device: load.make(name, device))
    monkeypatch.setattr(kernels, "compile_kernels", lambda *_: b"")
    monkeypatch.setattr(kernels, "device_info", lambda device: SimpleNamespace(arch="sm_90a"))
    monkeypatch.setattr(driver, "require", lambda: None)
    return load


def test_kernels_are_loaded_in_relaxed_capture_mode(load):
    """Any call may be the first that needs a kernel, also one that a thread captures."""
    load.make = lambda *_: load.log.append("loads")
    load("saxpy", 0)
    assert load.log == ["relaxed", "loads", "as before"]


def test_a_thread_that_loads_a_kernel_delays_only_loads_on_its_gpu(load):
    """Its load ends when running kernels do, and those may wait for what another thread launches."""
    begun, free = threading.Event(), threading.Event()

    def make(name, device):
        if (name, device) == ("slow", 0):
            begun.set()
            assert free.wait(20)
        return name, device

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
