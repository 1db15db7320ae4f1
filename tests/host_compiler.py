"""Kernels are compiled once for each text in tests without a GPU: kept in build/, which ``make clean`` removes."""

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from kos.cuda.kernels import KernelCache

COMPILER = shutil.which("g++") or shutil.which("clang++")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler: g++ or clang++")
FOLDER = Path(__file__).resolve().parent.parent / "build" / "kernels"
KEPT = KernelCache(FOLDER)  # of those that NVRTC compiles
# Hidden: else g++ gives static variables of inline functions and templates, __shared__ memory too, one place in the
# process (STB_GNU_UNIQUE), as large as the first library wants it, and others write behind it.
PYTHON_HEADERS = (Path(sysconfig.get_path("include")) / "Python.h").exists()
OPTIONS = ["-std=c++20", "-O1", "-w", "-fno-strict-aliasing", "-fPIC", "-shared", "-fvisibility=hidden"]
if platform.machine() == "x86_64" and "g++" in (COMPILER or ""):
    OPTIONS += ["-mtls-dialect=gnu2"]  # what a thread has of its own is reached without a call
OPTIONS += ["-D_GLIBCXX_INCLUDE_NEXT_C_HEADERS"]  # C's math.h: C++'s takes longer to compile than a kernel
OPTIONS += ["-U_FORTIFY_SOURCE"]  # some distributions' default: it takes a longjmp to another stack for an attack
LIMIT = 120  # seconds for one kernel
QUOTED = re.compile(r'#include "(/[^"]+)"')  # of a file that is not among those given


@functools.cache
def _compiler() -> str:
    return subprocess.run([str(COMPILER), "--version"], capture_output=True, text=True, timeout=60, check=True).stdout


def compiled(files: Mapping[str, str], options: Sequence[str]) -> ctypes.CDLL:
    """``kernels.cc`` of the files as a library; compiled unless the same text was, by this compiler."""
    others = [Path(name).read_text() for text in files.values() for name in QUOTED.findall(text)]
    command = [str(COMPILER), *OPTIONS, *options]
    key = hashlib.sha256(repr((_compiler(), command, sorted(files.items()), others)).encode()).hexdigest()
    kept = FOLDER / f"{key[:32]}.so"
    if not kept.exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        with _alone(kept):
            if not kept.exists():
                _compile(files, command, kept)
    return ctypes.CDLL(str(kept))


def _compile(files: Mapping[str, str], command: Sequence[str], kept: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="kos-host-kernels-", dir=FOLDER) as folder:
        for name, text in files.items():
            (Path(folder) / name).write_text(text)
        made = Path(folder) / "kernels.so"
        command = [*command, f"{folder}/kernels.cc", "-o", str(made)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
        assert done.returncode == 0, done.stderr[:3000]
        os.replace(made, kept)


@contextlib.contextmanager
def _alone(kept: Path) -> Iterator[None]:
    """No other thread or process compiles the same text meanwhile."""
    with open(kept.with_suffix(".lock"), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
