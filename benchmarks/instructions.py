"""How many instructions a call takes that the compiled core knows: python -m benchmarks.instructions

callgrind counts them, so the figures have no noise: those of the core itself, of the C library (malloc, memcpy), whose
code differs between CPUs, and of all else, which is Python.  Rank 1 has begun each call before rank 0 makes it, so that
nothing waits.  Both ranks are in one process, on float32.  The core has settings by the vendor of the CPU: calls are
counted with each of them, on any CPU.  Calls on GPUs are those of ``instructions_gpu``, without the driver, NCCL and
the GPU.  The figures depend on the compiler, on Python and, for tensors, on torch; the results record the versions.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import instructions_gpu
from kos.bench.report import provenance, to_json
from kos.commands import program
from kos.errors import BackendUnavailable
from kos.files import check_writable

CALLS, ROUNDS, TRIES = 8, 3, 20
"""The figure of a call is the least mean of the rounds: Python at times grows a dict, or collects garbage."""
SIZES = {"intel": (8, 4096, 65536), "other": (65536,)}
"""Bytes, by the value of KOS_CPU_VENDOR: beside the stamp, in a slot, and where an all_reduce is still reduced by each
rank.  The vendor matters for large calls only."""
HOST_OPERATIONS = (
    "all_reduce", "all_reduce, async_op", "reduce", "broadcast", "all_gather", "gather",
    "scatter", "all_to_all", "reduce_scatter", "scan", "exscan", "send", "recv", "send_recv", "barrier",
    "all_gather_v", "gather_v", "scatter_v", "all_to_all_v", "reduce_scatter_v",
)  # fmt: skip
OPERATIONS = (*HOST_OPERATIONS, *instructions_gpu.OPERATIONS)
_REQUESTS = """#include <valgrind/callgrind.h>
void zero(void) { CALLGRIND_START_INSTRUMENTATION; CALLGRIND_ZERO_STATS; }
void dump(const char *name) { CALLGRIND_DUMP_STATS_AT(name); }
"""
_COUNTED = ("call", "state_wait")
"""Functions of the core in which instructions count: the operations, and Work.wait."""


def unavailable() -> str | None:
    """Why instructions cannot be counted; None if they can."""
    from kos import _core

    missing = [name for name in ("valgrind", "gcc") if shutil.which(name) is None]
    return f"needs {' and '.join(missing)}" if missing else _core.unavailable


def toolchain() -> dict[str, str]:
    """What the figures depend on: of the compiler and Python, those that build a core here.

    The core reduces by AVX2 where the CPU has it.
    """
    gcc = subprocess.run(["gcc", "-dumpfullversion"], check=True, capture_output=True, text=True, timeout=10)
    python = f"{platform.python_version()}, {platform.python_compiler()}"
    libc = " ".join(platform.libc_ver())
    with open("/proc/cpuinfo") as cpus:
        machine = platform.machine() + (" with AVX2" if re.search(r"\bavx2\b", cpus.read()) else "")
    return {"gcc": gcc.stdout.strip(), "python": python, "numpy": np.__version__, "libc": libc, "machine": machine}


def ranks() -> list[Any]:
    """Two communicators, of ranks of this process that share a segment."""
    import kos
    from kos.comm.control.place import env_rendezvous

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    made: list[Any] = [None, None]
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "KOS_SECRET": "0" * 64}

    def join(rank: int) -> None:
        made[rank] = kos.init("tcp", rendezvous=env_rendezvous(600.0, common | {"RANK": str(rank)}), timeout=600.0)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return made


def calls(name: str, nbytes: int, comms: list[Any]) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """The call of rank 0, and one of rank 1 that matches it and returns a Work."""
    x, y = (np.ones(max(1, nbytes // 4), np.float32) for _ in range(2))
    wide, wider = (np.ones(2 * x.size, np.float32) for _ in range(2))
    op, _, form = name.partition(", ")
    counts = [x.size] * 2
    arguments: dict[str, tuple[tuple[Any, ...], tuple[Any, ...]]] = {
        "all_reduce": ((x,), (y,)), "scan": ((x,), (y,)), "exscan": ((x,), (y,)), "barrier": ((), ()),
        "reduce": ((x, 0), (y, 0)), "broadcast": ((x, 1), (y, 1)),
        "all_gather": ((x, wide), (y, wider)), "gather": ((x, 0, wide), (y, 0, None)),
        "scatter": ((None, x, 1), (wide, y, 1)), "all_to_all": ((wide, wider), (wide.copy(), wider.copy())),
        "reduce_scatter": ((wide, x), (wider, y)), "send": ((x, 1), (y, 0)), "recv": ((x, 1), (y, 0)),
        "send_recv": ((x, wide[: x.size], 1, 1), (y, wider[: y.size], 0, 0)),
        "all_gather_v": ((x, counts, wide), (y, counts, wider)),
        "gather_v": ((x, counts, 0, wide), (y, counts, 0, None)),
        "scatter_v": ((None, counts, x, 1), (wide, counts, y, 1)),
        "all_to_all_v": ((wide, counts, counts, wider), (wide.copy(), counts, counts, wider.copy())),
        "reduce_scatter_v": ((wide, counts, x), (wider, counts, y)),
    }  # fmt: skip
    mine, theirs = arguments[op]
    one, other = comms
    method = getattr(type(other), {"send": "recv", "recv": "send"}.get(op, op))  # through Python, which is not counted
    peer = lambda: method(other, *theirs, async_op=True)  # noqa: E731
    call = getattr(one, op)
    return (lambda: call(*mine, async_op=True).wait()) if form else (lambda: call(*mine)), peer


def run_calls(requests: Any) -> None:
    """Make every call, and let callgrind write a file for each."""

    def run(name: str, nbytes: int, comm: Any, call: Callable[[], Any], cpu: str = "any") -> None:
        comm._core_group.compare_at = 1 << 62  # else Python makes every 64th collective on a GPU
        for _ in range(4):
            call()
        requests.dump(b"warm-up")  # of all threads; zero() alone leaves what other threads have counted
        for _ in range(ROUNDS):
            for _ in range(TRIES):  # on a busy machine Python may take over a call that the core has begun
                begun = comm._core_group.hits
                requests.zero()
                for _ in range(CALLS):
                    call()
                if (hits := comm._core_group.hits - begun) == CALLS:
                    break
                requests.dump(b"warm-up")
            else:
                raise AssertionError(f"{name} of {nbytes} bytes: expected {CALLS} calls by the core, got {hits}")
            requests.dump(f"{cpu} {name} {nbytes}".encode())

    with suppress(ImportError):
        import_module("torch")  # now, as imports are slow while instructions are counted
    for cpu, sizes in SIZES.items():
        os.environ["KOS_CPU_VENDOR"] = cpu
        comms = ranks()
        for name, nbytes in itertools.product(HOST_OPERATIONS, sizes):
            if name == "barrier" and nbytes > 8:
                continue
            call, peer = calls(name, nbytes, comms)

            def matched(call: Callable[[], Any] = call, peer: Callable[[], Any] = peer) -> None:
                work = peer()
                call()
                while not work.done():  # in Python, where its wait() would begin in the core
                    pass

            run(name, nbytes, comms[0], matched, cpu)
    instructions_gpu.run_calls(requests, run)


def counted(text: str) -> dict[str, int]:
    """Instructions in the core, in the C library and in all else, of a file of callgrind."""
    names: dict[str, str] = {}
    taken = {"core": 0, "python": 0, "libc": 0}
    where, skip = "", False
    for line in text.splitlines():
        if found := re.match(r"ob=(\(\d+\))(?: (.*))?", line):
            where = names.setdefault(found[1], found[2] or "")
        elif line.startswith("calls="):
            skip = True  # the next line is what the callee took
        elif re.match(r"[+*\d-]", line):
            if not skip:
                library = where.rpartition("/")[2]
                owners = {"native": "core", "libc": "libc"}  # native.abi3.so, libc.so.6
                taken[owners.get(library.partition(".")[0], "python")] += int(line.split()[1])
            skip = False
        elif found := re.match(r"cob=(\(\d+\))(?: (.*))?", line):
            names.setdefault(found[1], found[2] or "")
    return taken


def count() -> Iterator[dict[str, Any]]:
    """A row for each operation and size: instructions of a call.  Raises BackendUnavailable without valgrind."""
    if (why := unavailable()) is not None:
        raise BackendUnavailable(f"instructions: {why}")
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "requests.c"), f"{folder}/requests.so"
        source.write_text(_REQUESTS + instructions_gpu.FUNCTIONS)
        subprocess.run(["gcc", "-shared", "-fPIC", str(source), "-o", library], check=True, timeout=60)
        options = ["--tool=callgrind", f"--callgrind-out-file={folder}/out"]
        options += [f"--{what}=no" for what in ("instr-atstart", "collect-atstart", "dump-line")]
        options += [f"--toggle-collect={name}" for name in _COUNTED]
        command = ["valgrind", *options, sys.executable, "-m", "benchmarks.instructions", "--under-valgrind", library]
        done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
        if done.returncode:
            said = [line for line in done.stderr.splitlines() if not line.startswith("==")]  # valgrind's lines do
            raise BackendUnavailable(f"instructions: {said[-1] if said else f'exit status {done.returncode}'}")
        least: dict[tuple[str, str, int], dict[str, int]] = {}
        for file in sorted(Path(folder).glob("out.*"), key=lambda path: int(path.suffix[1:])):
            text = file.read_text()
            if found := re.search(r"^desc: Trigger: Client Request: (\w+) (.+) (\d+)$", text, re.M):
                taken = {what: number // CALLS for what, number in counted(text).items()}
                known = least.setdefault((found[1], found[2], int(found[3])), taken)
                known.update({what: min(number, known[what]) for what, number in taken.items()})
    for (cpu, name, nbytes), taken in least.items():
        yield {"op": name, "bytes": nbytes, "cpu": cpu} | taken


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    parser = argparse.ArgumentParser(prog=program("benchmarks.instructions"), description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows, with what they were counted on")
    parser.add_argument("--under-valgrind", metavar="LIBRARY", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.under_valgrind:
        run_calls(ctypes.CDLL(options.under_valgrind))
        return 0
    if options.json:
        check_writable(options.json)
    rows = list(count())
    for row in rows:
        print(json.dumps(row))
    if options.json:
        result = provenance("benchmarks.instructions", None, 2) | {"toolchain": toolchain(), "rows": rows}
        options.json.write_text(to_json(result))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
