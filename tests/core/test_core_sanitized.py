"""The core under the sanitizers: its C part with ranks as threads, and all of it; and for aarch64 in an emulator.

The emulator runs on the memory of this machine, so it proves no order of loads and stores.
"""

import os
import random
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.core.core_ranks import needs_core

ROOT = Path(__file__).resolve().parents[2]
FILES = ("call", "prepare", "slots", "direct", "mailbox", "reduce", "segment")
SOURCES = [ROOT / "tests/core/core_threads.c", *(ROOT / "kos/_core" / f"{name}.c" for name in FILES)]
COMPILER = shutil.which("gcc") or shutil.which("clang")


@pytest.mark.skipif(COMPILER is None, reason="needs a C compiler")
@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_random_programs_under_a_sanitizer(sanitizer, tmp_path):
    program, include = tmp_path / "core_threads", ROOT / "kos/_core"
    options = ["-std=gnu11", "-O1", "-g", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all", "-I", include]
    command = [COMPILER, *options, *SOURCES, "-lm", "-lpthread", "-o", program]
    built = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=120)
    if "cannot find" in built.stderr:
        pytest.skip(f"needs the library of -fsanitize={sanitizer}")
    assert built.returncode == 0 and not built.stderr, built.stderr
    seed = random.randrange(1 << 20)
    print(f"seed {seed}")
    for ranks, direct in ((2, 1), (3, 0), (4, 1)):
        command = [program, str(ranks), "250", str(seed), str(direct)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        if "unexpected memory mapping" in done.stderr:
            pytest.skip("ThreadSanitizer does not know this kernel's layout of memory")
        assert done.returncode == 0, done.stderr


GCC, HEADERS = shutil.which("gcc"), Path(sysconfig.get_path("include"))


@needs_core
@pytest.mark.skipif(GCC is None or not (HEADERS / "Python.h").exists(), reason="needs gcc and Python.h")
def test_random_programs_within_whose_calls_python_runs(tmp_path):
    """The whole extension module, under ASan and UBSan."""
    module, include = tmp_path / "native.so", ROOT / "kos/_core"
    options = ["-std=c11", "-O1", "-g", "-shared", "-fPIC", "-fsanitize=address,undefined"]
    options += ["-fno-sanitize-recover=all", "-I", HEADERS, "-I", include]
    command = [GCC, *options, *include.glob("*.c"), "-lm", "-lpthread", "-o", module]
    built = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=120)
    if "cannot find" in built.stderr:
        pytest.skip("needs the library of -fsanitize=address,undefined")
    assert built.returncode == 0, built.stderr
    find = [str(GCC), "-print-file-name=libasan.so"]
    library = subprocess.run(find, check=True, capture_output=True, text=True, timeout=60).stdout.strip()
    seed = random.randrange(1 << 20)
    print(f"seed {seed}")
    env = os.environ | {"LD_PRELOAD": library, "ASAN_OPTIONS": "detect_leaks=0", "PYTHONMALLOC": "malloc"}
    command = [sys.executable, "-m", "tests.core.reentering", str(seed), "1000", str(module)]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300, env=env, cwd=ROOT)
    assert done.returncode == 0 and "calls of the core" in done.stdout, done.stderr


CROSS, EMULATOR = shutil.which("aarch64-linux-gnu-gcc"), shutil.which("qemu-aarch64")


@pytest.mark.skipif(CROSS is None or EMULATOR is None, reason="needs aarch64-linux-gnu-gcc and qemu-aarch64")
@pytest.mark.parametrize(("ranks", "direct"), [(2, 0), (3, 1)])
def test_random_programs_on_aarch64(ranks, direct, tmp_path):
    program = tmp_path / "core_threads"
    options = ["-std=gnu11", "-O3", "-ffp-contract=off", "-static", "-I", ROOT / "kos/_core"]
    command = [CROSS, *options, *SOURCES, "-lm", "-lpthread", "-o", program]
    subprocess.run(list(map(str, command)), check=True, timeout=120)
    seed = random.randrange(1 << 20)
    print(f"seed {seed}")
    run = [str(EMULATOR), program, str(ranks), "200", str(seed), str(direct)]
    done = subprocess.run(run, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
