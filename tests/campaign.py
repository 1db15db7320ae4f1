"""What the fault campaigns share: processes and reports of ranks, calls with known results, the loop over trials."""

import argparse
import json
import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

import kos
from kos.errors import KosError
from kos.memory import Array
from kos.testing.conformance import model
from tests.comm.model import ramps
from tests.forked import PATHS

START_SECONDS = 60.0  # for a rank to come, with a GPU to connect and compile
MARGIN = 15.0  # seconds beyond the timeout in which every survivor ends; a busy machine takes some
LAUNCHERS = (
    "OMPI_COMM_", "PMIX_", "PMI_", "MPI_LOCALNRANKS", "RANK", "WORLD_SIZE", "MASTER_", "SLURM_", "KOS_HOST", "KOS_JOIN",
)  # fmt: skip
RIGHT, HUNG = "right", "hung"


def environment(**more: str) -> dict[str, str]:
    """The environment of a rank, without variables that a launcher has set for this process."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    return {**env, "PYTHONPATH": PATHS, "OPENBLAS_NUM_THREADS": "1", "KOS_SECRET": "of the tests", **more}


def write(path: Path, report: dict[str, Any]) -> None:
    """Write a report atomically: no reader sees a part of it."""
    path.with_suffix(".tmp").write_text(json.dumps(report))
    path.with_suffix(".tmp").rename(path)


def described(error: BaseException, step: str) -> dict[str, Any]:
    """A rank's report of an error that was raised in this step."""
    return {"kind": type(error).__name__, "text": str(error), "ranks": list(getattr(error, "ranks", ())), "step": step}


def on_device(comm: kos.Communicator, value: np.ndarray) -> Any:
    """``value`` where the communicator takes it."""
    return value if comm.device is None else Array.from_numpy(value, comm.device)


def call(comm: kos.Communicator, step: model.Step, start: int = 0, **options: Any) -> tuple[Any, Any]:
    """Make a call on ``ramps``: what it returned, and what it gives this rank (None: nothing)."""
    xs = ramps(step, comm.size, start)
    out = on_device(comm, np.empty_like(xs[0])) if step.name == "send_recv" else None
    expected = model.result(step, xs, comm.rank)  # before the call, which may write to its input
    return model.call(comm, step, on_device(comm, xs[comm.rank]), out, **options), expected


def is_right(got: Any, expected: Any) -> bool:
    """Whether a call gave what it should."""
    found = got.numpy() if isinstance(got, Array) else got
    return expected is None or np.array_equal(found.reshape(-1), expected)


def until(holds: Callable[[], bool], seconds: float) -> bool:
    """Wait until ``holds()`` is true, for at most ``seconds``.  Returns whether it became true."""
    deadline = time.monotonic() + seconds
    while not (held := holds()) and time.monotonic() < deadline:
        time.sleep(0.005)
    return held


def campaign(
    head: dict[str, Any],
    trials: Sequence[Any],
    run: Callable[[Any], tuple[str, str]],
    *,
    jobs: int = 1,
    out: Path | None = None,
    first: Sequence[Any] = (),
) -> int:
    """Run the trials, print failed trials and the counts, and return the number of failed trials.

    ``run`` gives a trial's verdict and the story.  ``trial.kind`` is a key of the summary.  The trials ``first`` have
    no fault; they are not counted.
    """
    began, wrong, verdicts = time.monotonic(), list[dict[str, str]](), defaultdict[str, Counter[str]](Counter)
    print(f"{len(trials)} trials, {jobs} at a time: {json.dumps(head)}", flush=True)

    def summary() -> dict[str, Any]:
        summed = sum(verdicts.values(), Counter[str]())
        return {
            **head, "of": len(trials), "trials": summed.total(), "right": summed[RIGHT], "verdicts": dict(summed),
            "by fault": {kind: dict(each) for kind, each in sorted(verdicts.items())},
            "seconds": round(time.monotonic() - began, 1), "wrong": wrong,
        }  # fmt: skip

    with ThreadPoolExecutor(jobs) as pool:
        for part in (first, trials):
            for trial, (became, story) in zip(part, pool.map(run, part), strict=True):
                if became != RIGHT:
                    wrong.append({"trial": str(trial), "verdict": became, "story": story})
                    print(f"WRONG {trial}: {became}\n      {story}", flush=True)
                if part is trials:
                    verdicts[trial.kind][became] += 1
                if out is not None:  # at each trial: what was seen stays if the run is ended
                    out.write_text(json.dumps(summary(), indent=1) + "\n")
    total = summary()
    print(f"{total['right']} of {len(trials)} right in {total['seconds']:.0f} s: {json.dumps(total['by fault'])}")
    return len(wrong)


class Arguments(argparse.ArgumentParser):
    """The arguments of a campaign; ``--as-rank JSON`` starts a rank of a trial."""

    def __init__(self, words: str, description: str) -> None:
        super().__init__(prog=f"python -m tests.faults {words}".rstrip(), description=description)
        self.add_argument("--trials", type=int, default=20)
        self.add_argument("--seed", type=int, default=int(np.random.SeedSequence().generate_state(1)[0]),
                          help="of the first trial; the next ones follow it")  # fmt: skip
        self.add_argument("--timeout", type=float, help="of the ranks, in seconds (3; on GPUs 5)")
        self.add_argument("--out", type=Path, help="where to write the summary, as JSON")
        self.add_argument("--as-rank", metavar="JSON", help=argparse.SUPPRESS)

    def refuse(self, reason: str | KosError) -> None:
        self.exit(2, f"{self.prog}: {reason}\n")
