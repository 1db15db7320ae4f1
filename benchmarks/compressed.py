"""Compressed collectives beside exact ones: mpirun -n 2 python -m benchmarks.compressed [--backend auto] [--json FILE]

For each operation and size: the time of a call without compression and with each format, taken in turns, in one run.
On GPUs each is a batch of calls in a CUDA graph, which is replayed; ``auto`` also measures nccl's exact call.  On
hosts each call is timed alone, from the call to its result.  The slowest rank of a turn counts; the figure is the
median of the turns, in microseconds.  ``error`` is that of the result, as a part of the norm of the exact result, on
normal values.  ``limit_us`` is the time in which the bytes of the fastest format that leave a rank cross the link, by
the exact call's own rate at that size.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import kos
from kos import cuda
from kos.bench.options import parse_size
from kos.bench.report import provenance, to_json
from kos.comm.compression import FORMATS
from kos.commands import program
from kos.dtypes import DTYPES
from kos.memory.array import Array

OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")
CALLS, TURNS, SECONDS = 20, 15, 0.4


def operation(comm: kos.Communicator, name: str, x: Any, compress: str | None) -> Callable[[], Any]:
    """A call of ``name`` on the input ``x``; its result is new at the first call, and the same array afterwards."""
    call = getattr(comm, name)
    if name == "all_reduce":
        out = type(x).empty(x.shape, x.dtype, comm.device, stream=x.stream) if comm.device is not None else x.copy()
    else:
        out = call(x, compress=compress)
    return lambda: call(x, out=out, compress=compress)


def times(comm: kos.Communicator, calls: dict[str, Callable[[], Any]], stream: Any) -> dict[str, float]:
    """Microseconds of each call, in turns."""
    runs, found = dict[str, Callable[[], float]](), dict[str, list[float]]()
    for key, call in calls.items():
        call()
        comm.synchronize()
        if stream is None:
            began = time.perf_counter()
            call()
            slowest = _slowest(comm, time.perf_counter() - began)
            runs[key] = _on_host(call, max(1, min(200, int(SECONDS / TURNS / slowest))))
        else:
            runs[key] = _in_graph(comm, call, stream)
    for _ in range(TURNS):
        for key, run in runs.items():
            comm.barrier()
            found.setdefault(key, []).append(_slowest(comm, run()))
    return {key: statistics.median(values) for key, values in found.items()}


def _slowest(comm: kos.Communicator, value: float) -> float:
    """The maximum of ``value`` over the ranks, sent as bytes: a backend may take arrays on a GPU only."""
    return max(float(each) for each in comm.all_gather_bytes(repr(value).encode()))


def _on_host(call: Callable[[], Any], count: int) -> Callable[[], float]:
    def run() -> float:
        began = time.perf_counter()
        for _ in range(count):
            call()
        return (time.perf_counter() - began) / count * 1e6

    return run


def _in_graph(comm: kos.Communicator, call: Callable[[], Any], stream: Any) -> Callable[[], float]:
    from kos.cuda.streams import milliseconds

    with cuda.capture(stream) as graph:
        for _ in range(CALLS):
            call()
    graph.replay(stream)
    comm.synchronize(stream=stream)
    return lambda: milliseconds(lambda: graph.replay(stream), stream) / CALLS * 1e3


def measure(comms: dict[str, kos.Communicator], name: str, dtype: str, nbytes: int) -> dict[str, Any]:
    """The row of an operation of ``nbytes`` of input on each rank."""
    comm, kind = next(iter(comms.values())), DTYPES[dtype]
    count = nbytes // kind.itemsize
    rng = np.random.default_rng(comm.rank)
    host = rng.standard_normal(count, np.float32).astype(kind.numpy)
    stream = None if comm.device is None else cuda.create_stream(comm.device)
    x = host if comm.device is None else Array.from_numpy(host, comm.device, stream=stream)
    calls = {"exact": operation(comm, name, x, None)}
    calls |= {form: operation(comm, name, x, form) for form in FORMATS}
    calls |= {f"exact {each}": operation(other, name, x, None) for each, other in list(comms.items())[1:]}
    taken = times(comm, calls, stream)
    results = {key: _numbers(calls[key]()) for key in ("exact", *FORMATS)}
    size = np.linalg.norm(results["exact"])
    row: dict[str, Any] = {"operation": name, "dtype": dtype, "bytes": nbytes}
    row |= {f"{key} us": round(value, 2) for key, value in taken.items()}
    row |= {f"{form} / exact": round(taken[form] / taken["exact"], 3) for form in FORMATS}
    errors = {form: float(np.linalg.norm(results[form] - results["exact"]) / size) for form in FORMATS}
    row |= {f"{form} error": round(error, 5) for form, error in errors.items()}
    wire = min(form.nbytes(1 << 16) for form in FORMATS.values()) / (kind.itemsize << 16)
    return row | {"limit_us": round(wire * taken["exact"], 2)}


def _numbers(x: Any) -> np.ndarray:
    return np.asarray(x.numpy() if isinstance(x, Array) else x).astype(np.float64).reshape(-1)


def main() -> None:
    form: Any = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(program("benchmarks.compressed"), description=__doc__, formatter_class=form)
    parser.add_argument("--backend", default="auto", help="of kos (default %(default)s)")
    parser.add_argument("--operations", nargs="+", default=OPERATIONS, choices=OPERATIONS)
    parser.add_argument("--sizes", nargs="+", default=["64K", "1M", "16M", "64M"], help="bytes of each rank's input")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "float16", "bfloat16"))
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    asked = parser.parse_args()
    names = [asked.backend, *(["nccl"] if asked.backend == "auto" and cuda.unavailable() is None else [])]
    comms = {name: kos.init(name) for name in names}
    comm = next(iter(comms.values()))
    if comm.device is not None:
        cuda.set_device(comm.device)
    rows = []
    for name in asked.operations:
        for size in asked.sizes:
            rows.append(measure(comms, name, asked.dtype, parse_size(size)))
            if comm.rank == 0:
                print(" ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
    if asked.json and comm.rank == 0:
        asked.json.write_text(to_json({**provenance("benchmarks.compressed", comm.device, comm.size), "rows": rows}))
    for each in comms.values():
        each.close()


if __name__ == "__main__":
    main()
