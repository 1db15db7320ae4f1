"""The CPU time of an eager call on GPUs, beside that of its launch from C: mpirun -n 2 python -m benchmarks.gpu_calls

Four variants of the same call are timed in turns:

- ``core_us``: the compiled core;
- ``python_us``: Python, with the core off;
- ``c_us``: a loop in C that only makes the launches;
- ``bare_us``: a loop in Python that calls a function in C which only makes the launches.

For peer, the C variants launch the same kernel with the same attributes.  For nccl, they call NCCL's own function, or a
group of sends and receives, which kernels of kos may follow.  A figure is the time in microseconds until a call
returns, when calls follow each other without a pause.  It is the median of all turns on the slowest rank.  The ranks
wait for the GPU after each turn, so the launch queue is never full.  ``launches`` is the number of functions that a
call uses to queue its work.  It is 0 if the core does not make the call; then only Python is timed.

One GPU for two ranks serves peer alone, whose kernels take turns of a millisecond there: a few calls and turns will do.
Arrays of torch are on its current stream, those of kos on a stream of their own and on the legacy default stream.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import kos
from kos.bench.report import provenance, to_json
from kos.comm.gpu.eager import pack
from kos.commands import program
from kos.cuda import create_stream, driver
from kos.cuda.kernels import Launch
from kos.errors import BackendUnavailable, KosError
from kos.files import check_writable
from kos.memory import Array

HERE = Path(__file__).parent
Call = Callable[[], Any]
OPERATIONS: dict[str, Callable[[Any, Any, Any, Any], Call]] = {
    "all_reduce": lambda c, x, y, z: partial(c.all_reduce, x),
    "reduce": lambda c, x, y, z: partial(c.reduce, x, 0),
    "broadcast": lambda c, x, y, z: partial(c.broadcast, x, 0),
    "all_gather": lambda c, x, y, z: partial(c.all_gather, x, y),
    "reduce_scatter": lambda c, x, y, z: partial(c.reduce_scatter, y, x),
    "all_to_all": lambda c, x, y, z: partial(c.all_to_all, y, z),
    "gather": lambda c, x, y, z: partial(c.gather, x, 0, y if c.rank == 0 else None),
    "scatter": lambda c, x, y, z: partial(c.scatter, y if c.rank == 0 else None, x, 0),
    "scan": lambda c, x, y, z: partial(c.scan, x),
    "send_recv": lambda c, x, y, z: partial(c.send_recv, x, z[: x.shape[0]], 1 - c.rank, 1 - c.rank),
    "all_gather_v": lambda c, x, y, z: partial(c.all_gather_v, x, [*x.shape] * c.size, y),
    "all_to_all_v": lambda c, x, y, z: partial(c.all_to_all_v, y, [*x.shape] * c.size, [*x.shape] * c.size, z),
    "gather_v": lambda c, x, y, z: partial(c.gather_v, x, [*x.shape] * c.size, 0, y if c.rank == 0 else None),
    "scatter_v": lambda c, x, y, z: partial(c.scatter_v, y if c.rank == 0 else None, [*x.shape] * c.size, x, 0),
    "reduce_scatter_v": lambda c, x, y, z: partial(c.reduce_scatter_v, y, [*x.shape] * c.size, x),
}
"""By name, of x with a part of each rank, and y and z with the parts of all."""


def build() -> ctypes.CDLL:
    """The loop in C.  Raises BackendUnavailable without a compiler."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise BackendUnavailable("gpu_calls: needs a C compiler")
    with tempfile.TemporaryDirectory() as folder:
        library = f"{folder}/launches.so"
        include = HERE.parent / "kos" / "_core"
        command = [compiler, "-O2", "-w", "-shared", "-fPIC", f"-I{include}", str(HERE / "launches.c"), "-o", library]
        subprocess.run(command, check=True, timeout=60)
        loaded = ctypes.PyDLL(library)
    loaded.time_launches.restype, loaded.launch_function.restype = ctypes.c_double, ctypes.py_object
    return loaded


def allocators(device: int) -> Iterator[tuple[str, Callable[[int], Any]]]:
    """Kinds of arrays, with a function that makes one of so many float32."""
    stream = create_stream(device)
    yield "kos", lambda n: Array.zeros(n, "float32", device, stream=stream)
    yield "kos, default stream", lambda n: Array.zeros(n, "float32", device)
    try:
        import torch
    except ImportError:
        return
    torch.cuda.set_device(device)
    yield "torch", lambda n: torch.zeros(n, device=f"cuda:{device}")


class Timer:
    """Times the calls of one communicator."""

    def __init__(self, comm: Any, loop: ctypes.CDLL, calls: int, turns: int) -> None:
        self._comm, self._loop, self._calls, self._turns = comm, loop, calls, turns

    def _settle(self) -> None:
        self._comm.synchronize()
        driver.synchronize(self._comm.device)
        self._comm.rendezvous.barrier()

    def _time(self, run: Call) -> float:
        self._settle()
        run()  # orders the stream
        began = time.perf_counter_ns()
        for _ in range(self._calls):
            run()
        return (time.perf_counter_ns() - began) / self._calls / 1e3

    def _launches(self, run: Call) -> tuple[list[Launch], Any] | None:
        """The launches of a call that Python makes, and its Work, which has the addresses and the stream."""
        backend = self._comm.backend
        backend._last = None
        run()
        work = backend._last
        known = self._comm._core_group is not None and work.prepared.plan.launches(work.stream)
        return (known, work) if known else None

    def row(self, make: Callable[..., Call], *arrays: Any) -> dict[str, Any]:
        """The figures of one call.  Collective."""
        comm, eager = self._comm, self._comm._core_group
        run = make(comm, *arrays)
        for _ in range(8):
            run()
        self._settle()
        if eager is not None:
            eager.off = True
        found = self._launches(run)
        if b"" in comm.rendezvous.allgather(b"" if found is None else b"1"):
            found = None
        launches, work = ([], None) if found is None else found
        sources = struct.pack("=3Q", *(getattr(work, name, 0) or 0 for name in ("send", "recv", "stream")))
        packed = b"".join(map(pack, launches))
        times: dict[str, list[float]] = {"python_us": [], "core_us": [], "c_us": [], "bare_us": []}
        hits = 0
        for _ in range(self._turns):
            times["python_us"].append(self._time(run))
            if found is None:
                continue
            eager.off, before = False, eager.hits
            times["core_us"].append(self._time(run))
            hits += eager.hits - before
            eager.off = True
            self._settle()
            self._loop.prepare_launches(packed, len(launches), sources)
            times["c_us"].append(self._loop.time_launches(self._calls))
            times["bare_us"].append(self._time(self._loop.launch_function()))
        if eager is not None:
            eager.off = False
        self._settle()
        mine = {name: statistics.median(each) for name, each in times.items() if each}
        mine |= {"launches": len(launches), "by_core": hits / self._turns / (self._calls + 1)}
        everyone = [json.loads(text) for text in comm.rendezvous.allgather(json.dumps(mine).encode())]
        return {name: round(max(each.get(name, 0) for each in everyone), 3) for name in mine}


def measure(backend: str, options: argparse.Namespace, loop: ctypes.CDLL) -> Iterator[dict[str, Any]]:
    """A row for each operation, kind of array and size on ``backend``.  Collective."""
    with kos.init(backend, timeout=60.0) as comm:
        assert comm.device is not None
        driver.set_device(comm.device)  # launches on a default stream go to the current device
        timer = Timer(comm, loop, options.calls, options.turns)
        for kind, make in allocators(comm.device):
            for nbytes in options.sizes:
                count = max(nbytes // 4, 1)
                arrays = make(count), make(count * comm.size), make(count * comm.size)
                for name in options.operations:
                    row = {"backend": backend, "op": name, "arrays": kind, "bytes": nbytes, "ranks": comm.size}
                    row["rank"] = comm.rank  # that has the row
                    row |= timer.row(OPERATIONS[name], *arrays)
                    if row.get("c_us"):
                        row |= {"ratio": round(row["core_us"] / row["c_us"], 3),
                                "over_us": round(row["core_us"] - row["c_us"], 3),
                                "bare_ratio": round(row["core_us"] / row["bare_us"], 3)}  # fmt: skip
                    yield row


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    parser = argparse.ArgumentParser(prog=program("benchmarks.gpu_calls"), description=__doc__)
    parser.add_argument("--backends", nargs="+", default=["peer", "nccl"], help="of kos, one after the other")
    parser.add_argument("--operations", nargs="+", default=list(OPERATIONS), choices=OPERATIONS)
    parser.add_argument("--sizes", nargs="+", type=int, default=[1024, 131072], help="bytes of one rank's part")
    parser.add_argument("--calls", type=int, default=100, help="in a turn; fewer than a launch queue holds")
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows, with what they were measured on")
    options = parser.parse_args(arguments)
    if options.json:
        check_writable(options.json)
    loop, rows = build(), []
    gc.disable()
    for backend in options.backends:
        try:
            for row in measure(backend, options, loop):
                rows.append(row)
                if row["rank"] == 0:
                    print(json.dumps(row), flush=True)
        except KosError as error:
            print(f"{backend}: {error}", file=sys.stderr)
    if options.json and rows and rows[0]["rank"] == 0:
        options.json.write_text(to_json(provenance("benchmarks.gpu_calls", 0, 2) | {"rows": rows}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
