"""Random programs of operations on GPU arrays, compared with the model of the conformance suite.

    mpirun -n 2 python -m tests.comm.gpu_programs BACKEND --seed S --programs 2000 --seconds 300

A program makes up to 12 calls on the world or on a duplicate: alone, in flight at the same time, or in a batch.  Rank 0
prints a JSON object with the numbers of programs and calls.  A wrong result ends the run.
"""

import argparse
import json
import time
from typing import Any

import ml_dtypes
import numpy as np

import kos
from kos import ReduceOp
from kos.testing.conformance.model import EXCHANGING, MOVING, REDUCING, SUMS_IN_16_BITS, Step, Trial
from kos.testing.conformance.on_gpu import OnGPU

DTYPES = (np.float32, np.float16, np.float64, np.int32, np.int64, np.int8, np.uint8, ml_dtypes.bfloat16)
OPS = (ReduceOp.SUM, ReduceOp.MAX, ReduceOp.MIN, ReduceOp.PROD, ReduceOp.AVG)
AVERAGING = ("all_reduce", "reduce_scatter", "reduce")
COUNTS = (1, 2, 5, 64, 1000, 9001, 70_001, 1 << 20)
MOST_CALLS = 12


def step(rng: np.random.Generator, size: int) -> Step:
    name = str(rng.choice([*REDUCING, *MOVING]))
    dtype, op = np.dtype(DTYPES[rng.integers(len(DTYPES))]), OPS[rng.integers(len(OPS))]
    if op is ReduceOp.AVG and (dtype.kind in "iu" or name not in AVERAGING):
        op = ReduceOp.SUM
    return Step(
        name, int(rng.choice(COUNTS)), dtype=dtype, op=op, root=int(rng.integers(size)),
        deterministic=bool(rng.random() < 0.3) and name in ("all_reduce", "reduce_scatter"),
        in_place=bool(rng.random() < 0.3) and name not in (*EXCHANGING, "send_recv"),
    )  # fmt: skip


def run_program(comm: OnGPU, rng: np.random.Generator) -> int:
    """Run one random program.  Returns the number of its calls."""
    trials = [Trial(comm, step(rng, comm.size), int(rng.integers(1 << 30))) for _ in range(rng.integers(1, MOST_CALLS))]
    if rng.random() < 0.2:
        with comm.batch():
            results = [trial.start() for trial in trials]
        for trial, result in zip(trials, results, strict=True):
            check(trial, result)
        return len(trials)
    waiting = []
    for trial in trials:
        if rng.random() < 0.4:
            waiting.append((trial, trial.start(async_op=True)))
        else:
            check(trial, trial.start())
        if waiting and rng.random() < 0.3:
            first, work = waiting.pop(rng.integers(len(waiting)))
            check(first, work.wait())
    for trial, work in reversed(waiting):
        check(trial, work.wait())
    return len(trials)


def check(trial: Trial, result: Any) -> None:
    """Check a result.  NCCL rounds its own sums of 16-bit floats at every rank."""
    token = SUMS_IN_16_BITS.set(trial.comm.backend_name != "peer" and not trial.step.deterministic)
    try:
        trial.check(result)
    finally:
        SUMS_IN_16_BITS.reset(token)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backend")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--programs", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=300)
    options = parser.parse_args()
    programs = calls = 0
    with kos.init(options.backend, timeout=60) as world:
        kos.cuda.set_device(world.device)
        rng, groups, end = np.random.default_rng(options.seed), [OnGPU(world)], time.monotonic() + options.seconds
        while programs < options.programs and b"0" not in world.all_gather_bytes(b"%d" % (time.monotonic() < end)):
            if rng.random() < 0.03:
                if len(groups) > 1:
                    groups.pop().comm.close()
                groups.append(groups[0].duplicate())
            calls += run_program(groups[rng.integers(len(groups))], rng)
            programs += 1
        if world.rank == 0:
            print(json.dumps({"backend": options.backend, "seed": options.seed, "programs": programs, "calls": calls}))


if __name__ == "__main__":
    main()
