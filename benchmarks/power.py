"""Power and clock of a GPU beside what runs on it: python -m benchmarks.power [--json FILE] [-- COMMAND …]

usage: python -m benchmarks.power -- python -m kos.train --preset 1b --batch-size 2 --steps 200
       python -m benchmarks.power --product 8192 16384 2048

Samples of nvidia-smi, one each 100 ms, of which those count in which the GPU took over half of its power limit.
``--product`` runs out (M, N) = x (M, K) w (N, K)^T in bfloat16, of normal numbers, for some seconds: its TFLOP/s while
the GPU is cool, and at last (its samples are also of the search for its algorithm).  A row a command, added to FILE's.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np

from kos import cuda
from kos.bench import report
from kos.commands import program
from kos.cuda import streams
from kos.dtypes import DTYPES
from kos.errors import KosError
from kos.files import check_writable, replace_file
from kos.memory.array import Array
from kos.train.ops.cuda import CudaOps

QUERY = ("clocks.sm", "power.draw.instant", "power.limit", "clocks_event_reasons.sw_power_cap")
SMI = ["nvidia-smi", f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits", "-lms", "100"]
REST, SECONDS, BATCH = 3.0, 4.0, 10.0  # seconds before a product and of it; milliseconds timed together


def summarize(lines: list[str]) -> dict[str, Any]:
    """Of nvidia-smi's lines: percentiles 5, 50 and 95 of power and clock, and how often power was the limit."""
    rows = [line.split(", ") for line in lines if line.count(",") == len(QUERY) - 1 and "[" not in line]
    busy = [row for row in rows if float(row[1]) > float(row[2]) / 2]
    if not busy:
        return {"samples": 0}

    def percentiles(column: int) -> list[float]:
        return [round(float(x), 1) for x in np.percentile([float(row[column]) for row in busy], (5, 50, 95))]

    capped = sum(row[3].strip() == "Active" for row in busy) / len(busy)
    return {
        "samples": len(busy), "power_limit_watts": float(busy[0][2]), "watts": percentiles(1),
        "sm_mhz": percentiles(0), "at_power_limit": round(capped, 3),
    }  # fmt: skip


def product(m: int, n: int, k: int) -> dict[str, float]:
    """TFLOP/s of the first 50 ms and of the last second, by the algorithm that kos' search finds."""
    ops, rng = CudaOps(0, search=True), np.random.default_rng(0)
    x, w = (Array.from_numpy(rng.standard_normal(s, np.float32).astype(DTYPES["bfloat16"].numpy), 0)
            for s in ((m, k), (n, k)))  # fmt: skip
    out = ops.zeros((m, n), "bfloat16")

    def run(times: int) -> float:
        return streams.milliseconds(lambda: [ops.linear(x, w, out) for _ in range(times)], ops.stream)

    run(3)
    times = max(1, round(BATCH / (run(3) / 3)))
    time.sleep(REST)
    batches, until = [], time.monotonic() + SECONDS
    while time.monotonic() < until:
        batches.append(run(times))

    def rate(some: list[float]) -> float:
        return round(2e-9 * m * n * k * times / statistics.mean(some), 1)

    return {
        "tflops_first_50ms": rate(batches[: round(50 / BATCH)]),
        "tflops_last_second": rate(batches[-round(1e3 / BATCH) :]),
    }


def main() -> int:
    ours, theirs = sys.argv[1:], []
    if "--" in ours:
        ours, theirs = ours[: ours.index("--")], ours[ours.index("--") + 1 :]
    parser = argparse.ArgumentParser(
        program("benchmarks.power"), description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--product", type=int, nargs=3, metavar=("M", "N", "K"), help="what to run, in place of COMMAND"
    )
    parser.add_argument("--json", type=Path, help="where to add the row")
    arguments = parser.parse_args(ours)
    if (arguments.product is None) is not bool(theirs):
        parser.error("expected either --product M N K or a COMMAND after --")
    if why := cuda.unavailable():
        raise SystemExit(f"kos: error: benchmarks.power: expected a GPU, got none: {why}")
    before: list[Any] = []
    if arguments.json:
        try:
            check_writable(arguments.json)
            before = report.read(arguments.json, "rows")["rows"] if arguments.json.exists() else []
        except KosError as error:
            raise SystemExit(f"kos: error: {error}") from error
    header = report.provenance("benchmarks.power", 0, 1)
    gpu = f"GPU-{UUID(cuda.device_info(0).uuid)}"  # nvidia-smi's numbers are not CUDA's
    with tempfile.TemporaryFile("w+") as samples, subprocess.Popen([*SMI, "-i", gpu], stdout=samples) as sampler:
        try:
            row: dict[str, Any] = {"command": shlex.join(theirs), "exit": 0}
            if theirs:
                row["exit"] = subprocess.run(theirs, check=False).returncode
            else:
                row = {"product": arguments.product, "exit": 0, **product(*arguments.product)}
        finally:
            sampler.terminate()
            sampler.wait()
        samples.seek(0)
        row |= {"commit": header["commit"], **summarize(samples.read().splitlines())}
    print(json.dumps(row))
    if arguments.json:
        replace_file(arguments.json, report.to_json({**header, "rows": [*before, row]}).encode())
    return int(row["exit"])


if __name__ == "__main__":
    raise SystemExit(main())
