"""The cost of a call in two source trees: python -m benchmarks.compare OLD NEW [--ranks N] [--backend B] [--graph]

OLD and NEW are folders that each hold a package `kos`.  Each round starts, for each backend and tree, a job of that
many ranks (mpirun; `tcp` by environment).  It times an all_reduce of 1 KB, in loops of 100 calls: eager and, on GPUs,
eager in the memory of ``Communicator.allocate``.  On GPUs that is the time until the call returns, on hosts until its
result is there.  A loop's figure is the mean of its calls, a job's the lower quartile of its loops,
averaged over the ranks, a tree's the median of its jobs.  ``--graph`` adds all_reduces captured in a graph, by each
tree's own `kos bench`.  Nanoseconds.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

LOOPS, CALLS, BYTES = 60, 100, 1024
GPU_BACKENDS = ("nccl", "peer", "auto")
SECONDS = 120  # of one job
Figures = dict[tuple[str, ...], dict[str, list[float]]]
"""By what is called: each tree's figures, one of a job."""


def loop(call: Callable[[], object]) -> float:
    began = time.perf_counter_ns()
    for _ in range(CALLS):
        call()
    return (time.perf_counter_ns() - began) / CALLS


def measure(backend: str) -> None:
    """One rank: rank 0 prints a JSON object of nanoseconds by kind of call."""
    import numpy as np

    import kos

    with kos.init(backend, timeout=60) as comm:
        count, kinds = BYTES // 4, dict[str, Callable[[], object]]()
        if comm.device is None:
            x: Any = np.zeros(count, np.float32)
        else:
            from kos.cuda import set_device
            from kos.memory.array import Array

            set_device(comm.device)
            x, window = Array.zeros(count, np.float32, comm.device), comm.allocate(count, np.float32)
            kinds["eager in a window"] = lambda: comm.all_reduce(window)
        figures = {}
        for kind, call in {"eager": lambda: comm.all_reduce(x), **kinds}.items():
            loop(call)
            comm.synchronize()
            gc.collect()
            gc.disable()
            loops = []
            for _ in range(LOOPS):
                comm.barrier()
                loops.append(loop(call))
                comm.synchronize()
            gc.enable()
            mine = statistics.quantiles(loops, n=4)[0]
            figures[kind] = statistics.mean(map(float, comm.all_gather_bytes(str(mine).encode())))
        if comm.rank == 0:
            print(json.dumps(figures), flush=True)


def job(tree: Path, ranks: int, command: list[str], *, by_environment: bool = False) -> str:
    """The output of all ranks of a job on that tree."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tree), os.environ.get("PYTHONPATH", "")])}
    env |= {"OPENBLAS_NUM_THREADS": "1", "KOS_SECRET": "of a benchmark"}
    jobs: list[tuple[list[str], dict[str, str]]] = []
    if by_environment:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(sock.getsockname()[1])}
        env |= {"WORLD_SIZE": str(ranks), **where}
        jobs = [(command, {**env, "RANK": str(rank)}) for rank in range(ranks)]
    else:
        beside = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        mpirun = shutil.which(os.environ.get("MPIRUN") or "mpirun", path=beside)
        if mpirun is None:
            raise SystemExit("kos: error: expected mpirun beside Python or in PATH")
        jobs = [([mpirun, "-n", str(ranks), *command], env)]
    with tempfile.TemporaryFile("w+") as errors, contextlib.ExitStack() as stack:
        processes = []
        for each, environment in jobs:
            process = subprocess.Popen(
                each, env=environment, cwd=tree, text=True, stdout=subprocess.PIPE, stderr=errors,
                start_new_session=True,
            )  # fmt: skip
            stack.callback(end, process)
            processes.append(process)
        output = "".join(process.communicate(timeout=SECONDS)[0] for process in processes)
        if code := max(abs(process.returncode) for process in processes):
            errors.seek(0)
            raise SystemExit(f"kos: error: {tree}: {' '.join(command)} ended with {code}:\n{errors.read()[-2000:]}")
    return output


def end(process: subprocess.Popen[str]) -> None:
    """Nothing of a job outlives it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def calls(tree: Path, ranks: int, backend: str) -> dict[tuple[str, ...], float]:
    command = [sys.executable, str(Path(__file__).resolve()), "--measure", backend]
    output = job(tree, ranks, command, by_environment=backend == "tcp")
    figures = json.loads(next(line for line in output.splitlines() if line.startswith("{")))
    return {(backend, kind): figure for kind, figure in figures.items()}


def graphs(tree: Path, ranks: int, sizes: str, backend: str) -> dict[tuple[str, ...], float]:
    """Graph times of one backend.  With two communicators of ``peer`` in a job, their launches would not overlap."""
    with tempfile.TemporaryDirectory(prefix="kos-compare-") as folder:
        rows = Path(folder) / "rows.json"
        options = ["--mode", "graph", "--dtype", "bfloat16", "--place", "in", "--backend", backend]
        module = "kos.bench" if (tree / "kos" / "bench").exists() else "benchmarks.collectives"  # its former place
        command = [sys.executable, "-m", module, *options, "--sizes", sizes, "--json", str(rows)]
        job(tree, ranks, command)
        return {
            (row["backend"], "graph", row["call"], f"{row['bytes']} bytes"): 1000 * row["time_us"]
            for row in json.loads(rows.read_text())["rows"]
            if row["algorithm"] == "auto"
        }


def table(figures: Figures) -> list[str]:
    """A line for each kind of call: the medians, their ratio and how far apart the jobs of one tree were."""
    lines = [f"{'call':<44} {'old':>10} {'new':>10} {'new/old':>8}  of one tree's jobs, most/least"]
    for key, trees in figures.items():
        old, new = (statistics.median(trees[name]) for name in ("old", "new"))
        apart = ", ".join(f"{max(trees[name]) / min(trees[name]):.3f}" for name in ("old", "new"))
        lines.append(f"{' '.join(key):<44} {old:10.0f} {new:10.0f} {new / old:8.3f}  {apart}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", type=Path, nargs="?", help="the tree before")
    parser.add_argument("new", type=Path, nargs="?", help="the tree after")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--backend", default="mpi,tcp", help="nccl, peer, auto, mpi, tcp, with commas (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="jobs of each tree and backend (%(default)s)")
    parser.add_argument("--graph", metavar="SIZES", nargs="?", const="1K,64K,1M,16M", help="graph rows as well")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write all figures")
    parser.add_argument("--measure", metavar="BACKEND", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        return measure(options.measure)
    if options.new is None:
        parser.error("expected two trees")
    trees = {"old": options.old.resolve(), "new": options.new.resolve()}
    figures: Figures = {}
    for turn in range(options.rounds):
        order = list(trees.items())[:: -1 if turn % 2 else 1]  # neither tree is always the first on a cold machine
        steps: list[Callable[[Path], dict[tuple[str, ...], float]]] = [
            lambda tree, backend=backend: calls(tree, options.ranks, backend)  # type: ignore[misc]
            for backend in options.backend.split(",")
        ]
        steps += [
            lambda tree, backend=backend: graphs(tree, options.ranks, options.graph, backend)  # type: ignore[misc]
            for backend in ("kos-nccl", "peer", "auto")
            if options.graph
        ]
        for step in steps:
            for name, tree in order:
                for key, figure in step(tree).items():
                    figures.setdefault(key, {"old": [], "new": []})[name].append(figure)
        print(f"round {turn + 1} of {options.rounds}", *table(figures), sep="\n", flush=True)
        if options.json:
            rows = [{"call": " ".join(key), **of_trees} for key, of_trees in figures.items()]
            result = {"ranks": options.ranks, "trees": {n: str(t) for n, t in trees.items()}, "rows": rows}
            options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
