"""How fast ranks of torch.distributed begin: python -m benchmarks.testing_torch [--ranks 2 8 64] [--json FILE]

Seconds from the call of ``kos.testing.torch.spawn`` until the last rank has done its first all_reduce, and the same
from the start of torchrun, over kos and over gloo.  Spawn and torchrun alternate; each row has the medians.  Each
process of torchrun imports torch, so that many take minutes on few cores: ``--torchrun`` is the largest number of them.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from kos.bench.report import provenance, to_json
from kos.commands import program
from kos.files import check_writable
from kos.testing.torch import spawn

ROOT = Path(__file__).resolve().parent.parent


def first_all_reduce() -> float:
    """The time after one all_reduce."""
    x = torch.ones(1)
    dist.all_reduce(x)
    assert x == dist.get_world_size()
    return time.time()


def by_spawn(ranks: int, backend: str) -> float:
    began = time.time()
    return max(spawn(first_all_reduce, ranks, 300, backend=backend)) - began


def by_torchrun(ranks: int, backend: str) -> float:
    with tempfile.TemporaryDirectory() as folder:
        run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
        began = time.time()
        subprocess.run([*run, "-m", "benchmarks.testing_torch", "--rank", backend, folder], check=True, env=env)
        return max(float(each.read_text()) for each in Path(folder).iterdir()) - began


def main() -> None:
    parser = argparse.ArgumentParser(prog=program("benchmarks.testing_torch"), description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8, 64])
    parser.add_argument("--torchrun", type=int, default=8, help="the most processes of torchrun")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        import kos.interop.torch  # noqa: F401 -- registers the backend

        dist.init_process_group(options.rank[0])
        Path(options.rank[1], str(dist.get_rank())).write_text(str(first_all_reduce()))
        dist.destroy_process_group()
        return
    if options.json:
        check_writable(options.json)
    by_spawn(2, "kos")
    rows = []
    for ranks in options.ranks:
        times: dict[str, list[float]] = {}
        for _ in range(options.repeats):
            for backend in ("kos", "gloo"):
                times.setdefault(f"spawn, {backend}", []).append(by_spawn(ranks, backend))
                if ranks <= options.torchrun:
                    times.setdefault(f"torchrun, {backend}", []).append(by_torchrun(ranks, backend))
        row: dict[str, Any] = {"ranks": ranks, **{name: round(median(found), 3) for name, found in times.items()}}
        print(row, flush=True)
        rows.append(row)
    if options.json:
        options.json.write_text(to_json({**provenance("benchmarks.testing_torch", None, 1), "rows": rows}))


if __name__ == "__main__":
    main()
