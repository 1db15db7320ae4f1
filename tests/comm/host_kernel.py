"""Kernels of kos on the host: the real ones, compiled by the host's C++ compiler (``ptx_host.h``)."""

import ctypes
import functools
import itertools
import threading
from pathlib import Path
from typing import Any

from kos.cuda.kernels import BoundKernel, read_sources
from tests.comm import fake_driver
from tests.host_compiler import compiled

HERE = Path(__file__).parent
SIMT = HERE.parent / "train/host_kernels/simt.h"

NAMES = {  # the kernels of a file, all compiled at once unless ONLY names one
    "all_gather": ("all_gather", "all_to_all"),
    "all_reduce_direct": ("direct",),
    "all_reduce_specialized": ("specialized",),
    "all_reduce_copies": ("copies",),
    "compressed": ("encode", "decode", "add_encoded", "feed_back"),
    "reduce_ordered": ("reduce_ordered", "scan_ordered", "scale"),
}  # fmt: skip
THREADS = {
    "all_reduce_push": 32,
    "all_reduce_direct": 32,
    "all_gather": 32,
    "all_reduce_copies": 32,
    "all_reduce_specialized": 64,
    "all_reduce_compressed": 128,
}  # others take any number


@functools.cache
def library(path: Path, defines: tuple[tuple[str, Any], ...]) -> Any:
    """C functions ``run_<kernel>`` that run the kernels of a file: (blocks, threads, seed, arguments)."""
    source, headers = read_sources(path)
    headers["ptx.cuh"] = f'#pragma once\n#include "{SIMT}"\n#include "{HERE / "ptx_host.h"}"\n'
    only = [str(value).lower() for name, value in defines if name == "ONLY"]
    source += "\n".join(f"RUN({name})" for name in only or NAMES.get(path.stem, (path.stem,)))
    defines += (("AT_ONCE", path.stem == "all_reduce_specialized"),)
    options = [f"-D{name}={int(value) if isinstance(value, bool) else value}" for name, value in defines]
    return compiled({**headers, "kernels.cc": source}, ["-ffp-contract=off", *options])


_compiling = threading.Lock()


class HostKernel:
    """A kernel whose launch returns when it has run."""

    def __init__(self, path: Path, name: str, device: int, **defines: Any) -> None:
        defines.pop("THREADS", None)
        self._threads = THREADS.get(path.stem, 0)
        if self._threads:
            defines["THREADS"] = self._threads
        self._parts = 2 if path.stem == "all_reduce_push" and name != "push" else 1  # of THREADS each
        with _compiling:
            code = library(path, tuple(sorted(defines.items())))
        self._run = getattr(code, f"run_{name}")
        self._parameters = ctypes.c_int.in_dll(code, f"parameters_{name}").value
        self._function, self._seeds = fake_driver.number(self), itertools.count(threading.get_ident() % 99_991)
        self.name = name

    def max_active_blocks(self, threads: int) -> int:
        return 2

    def bind(self, blocks: int, threads: int, *arguments: Any, **_: Any) -> BoundKernel:
        assert blocks > 0 and threads > 0
        assert len(arguments) == self._parameters, f"expected {self._parameters} arguments, got {len(arguments)}"
        return BoundKernel(self, fake_driver.Config(blocks, threads), arguments)

    def run(self, config: fake_driver.Config, parameters: int) -> None:
        """Run it; ``parameters`` is the address of the addresses of its parameters."""
        threads = self._parts * self._threads or min(config.block[0], 64)
        places = (ctypes.c_uint64 * self._parameters).from_address(parameters)
        words = (ctypes.c_uint64 * self._parameters)(*(ctypes.c_uint64.from_address(at).value for at in places))
        self._run(config.grid[0], threads, ctypes.c_uint(next(self._seeds) * 2_654_435_761 % (1 << 32)), words)


class NoKernel(HostKernel):
    """A kernel that computes nothing."""

    def __init__(self, *_: Any, **defines: Any) -> None:
        self._function = fake_driver.number(self)

    def bind(self, blocks: int, threads: int, *arguments: Any, **_: Any) -> BoundKernel:
        return NoLaunch(self, fake_driver.Config(blocks, threads), arguments)

    def run(self, config: Any, parameters: int) -> None: ...


class NoLaunch(BoundKernel):
    def __call__(self, stream: Any, *arrays: int) -> None: ...
