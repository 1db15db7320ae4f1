"""The fault campaign of threads: random programs on ``mock`` with one fault of ``kos.testing.spawn`` each.

usage: python -m tests.faults threads --trials N [--seed S]

A trial has 2 to 4 ranks, which are threads of this process.  It is right if each survivor ends with an error that names
the rank of the fault, and that rank alone; after a crash the survivors also go on by ``shrink``.  A delay changes no
result.  Each wrong trial gets a line with its seed, which ``--trials 1 --seed S`` repeats.
"""

import argparse
import random
import time
from collections import Counter
from typing import Any

import numpy as np

import kos
from kos.errors import InvalidArgument, KosError
from kos.testing import Fault, spawn
from kos.testing.conformance.model import Trial
from kos.testing.faults import KINDS
from tests.comm.model import Step

TIMEOUT, LONGEST = 60.0, 30.0
"""Seconds of a trial: a deadlock is found long before them."""
RIGHT = "right"


NAMES = ("all_reduce", "a schedule", "in flight", "reduce_scatter", "scan", "broadcast", "all_gather", "all_to_all",
         "barrier", "send_recv")  # fmt: skip


def _call(comm: kos.Communicator, name: str, n: int, tag: int) -> None:
    """Call an operation on ``n`` elements of each rank, and check its result."""
    kind, later = "all_reduce" if name in ("a schedule", "in flight") else name, name == "in flight"
    trial = Trial(comm, Step(kind, n, root=n, algorithm=int(name == "a schedule")), tag)
    # With its own tag: the next message must not take the place of one that is lost.
    got = trial.start(**({"tag": tag} if name == "send_recv" else {"async_op": True} if later else {}))
    trial.check(got.wait() if later else got)


def run_trial(seed: int) -> tuple[str, str]:
    """The kind of its fault, and RIGHT or what was wrong."""
    rng = random.Random(seed)
    size, length = rng.randint(2, 4), rng.randint(3, 9)
    steps = [(rng.choice(NAMES), rng.choice((1, 2, 64, 3000))) for _ in range(length)]
    fault = Fault(rng.choice(KINDS), rng.randrange(size), rng.randrange(length))
    ended: list[Any] = [None] * size

    def body(comm: kos.Communicator) -> None:
        try:
            for tag, (name, n) in enumerate(steps):
                _call(comm, name, n, tag)
            comm.barrier()
            ended[comm.rank] = RIGHT
        except KosError as error:
            ended[comm.rank] = error.ranks or error
            if fault.kind == "crash":
                with comm.shrink() as rest:
                    assert rest.size == rest.all_reduce(np.ones(1))[0] == size - 1

    began, raised = time.monotonic(), ""
    try:
        spawn(body, size, TIMEOUT, faults=[fault])
    except InvalidArgument as error:  # a broadcast from another root: no message could be dropped
        raised = "" if fault.kind == "drop" else f"{error}"
        ended = [(fault.rank,)] * size if fault.kind == "drop" else ended
    except KosError as error:
        raised = f"{error}" if error.ranks != (fault.rank,) else ""
    wanted = RIGHT if fault.kind == "delay" else (fault.rank,)
    wrong = [rank for rank in range(size) if ended[rank] != wanted and (rank != fault.rank or fault.kind == "delay")]
    if raised or wrong or time.monotonic() - began > LONGEST:
        return fault.kind, f"{fault} of {size} in {steps}: {ended} {raised} {time.monotonic() - began:.1f} s"
    return fault.kind, RIGHT


def campaign(trials: int, seed: int) -> int:
    """Run the trials, print what was wrong and the counts; the number of wrong ones."""
    print(f"seed {seed}: {trials} trials of threads", flush=True)
    counts, wrong = Counter[str](), 0
    for each in range(seed, seed + trials):
        kind, became = run_trial(each)
        counts[kind] += 1
        if became != RIGHT:
            wrong += 1
            print(f"WRONG seed {each}: {became}", flush=True)
    print(f"{trials - wrong} of {trials} right ({', '.join(f'{n} {kind}' for kind, n in sorted(counts.items()))})")
    return wrong


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults threads", description="Faults of ranks as threads.")
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--seed", type=int, default=None, help="of the first trial; the next ones follow it")
    options = parser.parse_args(arguments)
    seed = random.SystemRandom().randrange(1 << 31) if options.seed is None else options.seed
    return int(campaign(options.trials, seed) > 0)
