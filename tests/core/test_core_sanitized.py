"""The C part of the core, with ranks as threads, under the sanitizers, and for aarch64 in an emulator.

The emulator runs on the memory of this machine, so it proves no order of loads and stores.
"""

from __future__ import annotations

import random
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = ("call", "prepare", "slots", "direct", "mailbox", "reduce", "segment")
SOURCES = [ROOT / "tests/core/core_threads.c", *(ROOT / "kos/_core" / f"{name}.c" for name in FILES)]
COMPILER = shutil.which("gcc") or shutil.which("clang")


@pytest.mark.skipif(COMPILER is None, reason="needs a C compiler")
@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_random_programs_under_a_sanitizer(sanitizer: str, tmp_path: Path) -> None:
    program, include = tmp_path / "core_threads", ROOT / "kos/_core"
    options = ["-std=gnu11", "-O1", "-g", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all", "-I", include]
    command = [COMPILER, *options, *SOURCES, "-lm", "-lpthread", "-o", program]
    built = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=120)
    if "cannot find" in built.stderr:
        pytest.skip(f"needs the library of -fsanitize={sanitizer}")
    assert built.returncode == 0 and not built.stderr, built.stderr
    seed = random.randrange(1 << 20)
    print(f"seed {seed}")
    for ranks, direct in ((2, 0), (2, 1), (3, 0), (4, 1)):
        command = [program, str(ranks), "500", str(seed), str(direct)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        if "unexpected memory mapping" in done.stderr:
            pytest.skip("ThreadSanitizer does not know this kernel's layout of memory")
        assert done.returncode == 0, done.stderr


CROSS, EMULATOR = shutil.which("aarch64-linux-gnu-gcc"), shutil.which("qemu-aarch64")


@pytest.mark.skipif(CROSS is None or EMULATOR is None, reason="needs aarch64-linux-gnu-gcc and qemu-aarch64")
@pytest.mark.parametrize(("ranks", "direct"), [(2, 0), (3, 1)])
def test_random_programs_on_aarch64(ranks: int, direct: int, tmp_path: Path) -> None:
    program = tmp_path / "core_threads"
    options = ["-std=gnu11", "-O3", "-ffp-contract=off", "-static", "-I", ROOT / "kos/_core"]
    command = [CROSS, *options, *SOURCES, "-lm", "-lpthread", "-o", program]
    subprocess.run(list(map(str, command)), check=True, timeout=120)
    seed = random.randrange(1 << 20)
    print(f"seed {seed}")
    run = [str(EMULATOR), program, str(ranks), "200", str(seed), str(direct)]
    done = subprocess.run(run, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
