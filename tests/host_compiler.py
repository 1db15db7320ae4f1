"""Kernels are compiled once for each text in tests without a GPU: kept in build/, which ``make clean`` removes."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from kos.cuda.kernels import KernelCache

COMPILER = shutil.which("g++") or shutil.which("clang++")
FOLDER = Path(__file__).resolve().parent.parent / "build" / "kernels"
KEPT = KernelCache(FOLDER)  # of those that NVRTC compiles
# Hidden: else g++ gives static variables of inline functions and templates, __shared__ memory too, one place in the
# process (STB_GNU_UNIQUE), as large as the first library wants it, and others write behind it.
OPTIONS = ["-std=c++20", "-O1", "-w", "-fno-strict-aliasing", "-fPIC", "-shared", "-fvisibility=hidden"]
if platform.machine() == "x86_64" and "g++" in (COMPILER or ""):
    OPTIONS += ["-mtls-dialect=gnu2"]  # what a thread has of its own is reached without a call
OPTIONS += ["-D_GLIBCXX_INCLUDE_NEXT_C_HEADERS"]  # C's math.h: C++'s takes longer to compile than a kernel
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
        with tempfile.TemporaryDirectory(prefix="kos-host-kernels-", dir=FOLDER) as folder:
            for name, text in files.items():
                (Path(folder) / name).write_text(text)
            made = Path(folder) / "kernels.so"
            command += [f"{folder}/kernels.cc", "-o", str(made)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=120)
            assert done.returncode == 0, done.stderr[:3000]
            os.replace(made, kept)
    return ctypes.CDLL(str(kept))
