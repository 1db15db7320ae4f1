"""Host collectives between two hosts on a cable of a set rate: ``python -m benchmarks.between_hosts [--json FILE]``.

    python -m benchmarks.between_hosts --rate 1gbit --rate 10gbit --sizes 8 64K 1M 16M --json FILE

The hosts are network namespaces of this machine (benchmarks/two_hosts.py: root, Linux), joined by a virtual cable that
``tc`` slows down to ``--rate``, each way.  Each has ``--ranks`` ranks.  In turns, in the same processes: kos (``tcp``,
with shared memory within a host), kos with ``compress=``, an all_reduce also with exact sums within each host and
compressed ones between them ("hosts"), Open MPI (``btl tcp``) through mpi4py, and Gloo through torch.distributed, if
torch is there.  An all_reduce of kos without compression is in place, as Gloo's.  The slowest
rank of a turn counts; the figure is the median of the turns, in microseconds.  ``limit_us``: the time in which the
bytes that have to leave a host cross the cable.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import kos
from benchmarks.two_hosts import ADDRESSES, CABLE, Impossible, two_hosts
from kos.bench.options import parse_size
from kos.bench.report import provenance, to_json
from kos.commands import program

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all")
COMPRESSED = ("fp8", "int8")
TURNS, SECONDS, PORT = 9, 0.3, 29517
ROOT = Path(__file__).resolve().parents[1]
UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
Call = Callable[[], Any]


def between_hosts(host: kos.Communicator, rail: kos.Communicator, x: np.ndarray, form: str) -> None:
    """An all_reduce of ``x``, of which a rail compresses a piece of each host's sum (docs/guides/collectives.md)."""
    piece = x.reshape(host.size, -1)[host.rank]
    host.reduce_scatter(x, piece, deterministic=True)
    rail.all_reduce(piece, compress=form)
    host.all_gather(piece, x)


def kos_calls(
    comm: kos.Communicator, groups: tuple[kos.Communicator, kos.Communicator], name: str, x: np.ndarray, out: np.ndarray
) -> dict[str, Call]:
    """kos without compression and with each format that the operation has; ``groups``: of each host, and its rail."""
    if name == "broadcast":
        return {"kos": lambda: comm.broadcast(x, root=0)}
    call = getattr(comm, name)
    calls: dict[str, Call] = {"kos": lambda: call(x, out=out)}
    if name == "all_reduce":
        y = x.copy()
        calls["kos"] = lambda: comm.all_reduce(y)
    for form in COMPRESSED:
        calls[f"kos {form}"] = functools.partial(call, x, out=out, compress=form)
        if name == "all_reduce" and x.size % groups[0].size == 0:
            calls[f"kos {form} hosts"] = functools.partial(between_hosts, *groups, x.copy(), form)
    return calls


def mpi_call(name: str, x: np.ndarray, out: np.ndarray) -> Call:
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    return {
        "all_reduce": lambda: world.Allreduce(x, out), "all_gather": lambda: world.Allgather(x, out),
        "reduce_scatter": lambda: world.Reduce_scatter_block(x, out), "broadcast": lambda: world.Bcast(x, 0),
        "all_to_all": lambda: world.Alltoall(x, out),
    }[name]  # fmt: skip


def gloo_call(dist: Any, name: str, x: np.ndarray, out: np.ndarray) -> Call | None:
    """None: Gloo has no such operation."""
    import torch

    source, target = torch.from_numpy(x), torch.from_numpy(out)
    return {
        "all_reduce": lambda: dist.all_reduce(source), "broadcast": lambda: dist.broadcast(source, 0),
        "all_gather": lambda: dist.all_gather_into_tensor(target, source),
        "all_to_all": lambda: dist.all_to_all_single(target, source), "reduce_scatter": None,
    }[name]  # fmt: skip


def measure(comm: kos.Communicator, calls: dict[str, Call]) -> dict[str, float]:
    """Microseconds of each call, in turns."""
    slowest = {}
    for key, call in calls.items():
        call()
        comm.barrier()
        began = time.perf_counter()
        call()
        slowest[key] = float(comm.all_reduce(np.array([time.perf_counter() - began]), kos.ReduceOp.MAX)[0])
    found: dict[str, list[float]] = {key: [] for key in calls}
    for _ in range(TURNS):
        for key, call in calls.items():
            count = max(1, min(300, int(SECONDS / TURNS / slowest[key])))
            comm.barrier()
            began = time.perf_counter()
            for _ in range(count):
                call()
            taken = (time.perf_counter() - began) / count
            found[key].append(float(comm.all_reduce(np.array([taken]), kos.ReduceOp.MAX)[0]))
    return {key: statistics.median(values) * 1e6 for key, values in found.items()}


def crossing(name: str, nbytes: int, hosts: int, local: int) -> float:
    """Bytes that have to leave a host, of ``nbytes`` of input a rank (broadcast: of all), without compression."""
    return {
        "all_reduce": nbytes * 2 * (hosts - 1) / hosts, "reduce_scatter": nbytes * (hosts - 1) / hosts,
        "all_gather": nbytes * local * (hosts - 1), "broadcast": nbytes,
        "all_to_all": nbytes * local * (hosts - 1) / hosts,
    }[name]  # fmt: skip


def rank(asked: argparse.Namespace) -> None:
    """One of the ranks that mpirun starts: print a row for each operation and size, as JSON, on rank 0."""
    comm = kos.init("tcp", timeout=120)
    groups = comm.split("host"), comm.split(comm.local_rank)
    try:
        import torch.distributed as dist

        dist.init_process_group(
            "gloo", init_method=f"tcp://{ADDRESSES[0]}:{PORT}", rank=comm.rank, world_size=comm.size
        )
    except ImportError:
        dist = None  # type: ignore[assignment]
    for name in asked.operations:
        for size in asked.sizes:
            nbytes = parse_size(size)
            count = (
                max(1, nbytes // 4 // comm.size) * comm.size if "scatter" in name or "to_all" in name else nbytes // 4
            )
            x = np.random.default_rng(comm.rank).standard_normal(count).astype(np.float32)
            shape = {"all_gather": count * comm.size, "reduce_scatter": count // comm.size}.get(name, count)
            out = np.empty(shape, np.float32)
            calls = kos_calls(comm, groups, name, x, out) | {"Open MPI": mpi_call(name, x, out)}
            if dist is not None and (gloo := gloo_call(dist, name, x.copy(), out)) is not None:
                calls["Gloo"] = gloo
            with np.errstate(over="ignore"):  # sums in place grow
                taken = measure(comm, calls)
            limit = crossing(name, 4 * count, 2, comm.local_size) / (asked.bytes_per_second / 1e6)
            row = {"operation": name, "bytes": 4 * count, **{f"{key} us": round(us, 1) for key, us in taken.items()}}
            if comm.rank == 0:
                print("row", json.dumps(row | {"limit_us": round(limit, 1)}), flush=True)
    if dist is not None:
        dist.destroy_process_group()
    for each in (*groups, comm):
        each.close()


def run(rate: str, asked: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of a rate."""
    mpirun = shutil.which("mpirun", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
    if mpirun is None:
        raise Impossible("needs Open MPI 5's mpirun")
    bits = float(rate[:-4]) * UNITS[rate[-4:]]
    with tempfile.TemporaryDirectory() as folder, two_hosts(Path(folder), rate) as hosts:
        command = [sys.executable, "-m", "benchmarks.between_hosts", "--bytes-per-second", str(bits / 8)]
        command += ["--sizes", *asked.sizes, "--operations", *asked.operations]
        options = ("--mca", "btl", "self,sm,tcp", "--mca", "pml", "ob1")
        launch = hosts.mpirun(mpirun, Path(folder), 2 * asked.ranks, *command, options=options, map_by="slot")
        env = os.environ | {"PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": CABLE}
        env |= {"KOS_SECRET": "of this benchmark"}
        rows = []
        with subprocess.Popen(launch, env=env, cwd=ROOT, text=True, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith("row "):
                    rows.append({"rate": rate, "ranks": [asked.ranks] * 2} | json.loads(line[4:]))
                    print(" ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
        if process.returncode:
            raise SystemExit(process.returncode)
    return rows


def main() -> None:
    form: Any = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(program("benchmarks.between_hosts"), description=__doc__, formatter_class=form)
    parser.add_argument(
        "--rate", action="append", help="of the cable, such as 500mbit (default 1gbit); may be repeated"
    )
    parser.add_argument("--ranks", type=int, default=2, help="of each host (default %(default)s)")
    parser.add_argument("--operations", nargs="+", default=OPERATIONS, choices=OPERATIONS)
    parser.add_argument("--sizes", nargs="+", default=["8", "64K", "1M", "16M"], help="bytes of each rank's input")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--bytes-per-second", type=float, help=argparse.SUPPRESS)  # of a rank that this has started
    asked = parser.parse_args()
    if asked.bytes_per_second:
        rank(asked)
        return
    load = os.getloadavg()[0]
    try:
        rows = [row for rate in asked.rate or ["1gbit"] for row in run(rate, asked)]
    except Impossible as why:
        parser.error(str(why))
    if asked.json:
        facts = {**provenance("benchmarks.between_hosts", None, 2 * asked.ranks), "load_before": load}
        asked.json.write_text(to_json({**facts, "rows": rows}))


if __name__ == "__main__":
    main()
