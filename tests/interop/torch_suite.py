"""PyTorch's own suite over kos, beside gloo's result: ``python -m tests.interop.torch_suite [--ranks 2 3 4]``.

Writes tests/interop/torch_suite.json: of each test, for each number of ranks, what it did on each backend.  "kos as
gloo" and "kos as mpi" are the tests of these backends with groups of kos: the suite runs many tests only for backends
that it names.  It runs those of all_to_all on CPUs only for MPI, which PyTorch's wheel does not have.  On GPUs:
``--ranks 2 4 --backends nccl "kos as nccl" --jobs 4 --output tests/interop/torch_suite_cuda.json``.  A run with the
same torch replaces the ranks that it runs and keeps the others.
"""

import argparse
import faulthandler
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
import unittest
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.forked import PATHS

ROOT = Path(__file__).resolve().parents[2]
EXCEPT = {
    "test_monitored_barrier_gloo": "dist.monitored_barrier refuses every backend but gloo by its name",
    "test_monitored_barrier_gloo_subgroup": "dist.monitored_barrier refuses every backend but gloo by its name",
    "test_sparse_all_reduce_sum": "kos has no all-reduce of sparse tensors",
}
"""The tests that gloo passes and kos does not, and why."""
EXCEPT_CUDA = {
    "test_get_backend": "expects the name nccl",
    "test_monitored_barrier_allreduce_hang": "expects the texts of gloo's and ProcessGroupNCCL's timeouts",
    "test_monitored_barrier_allreduce_hang_wait_all_ranks": "expects the texts of gloo's and NCCL's timeouts",
}
"""The tests that ProcessGroupNCCL passes and kos does not, and why."""
RESULT, RESULT_CUDA = (Path(__file__).with_name(f"{name}.json") for name in ("torch_suite", "torch_suite_cuda"))


class Outcomes(unittest.TestResult):
    """The outcome of each test by name: passed, failed with the last line of the error, or skipped with the reason."""

    def __init__(self) -> None:
        super().__init__()
        self.outcomes: dict[str, str] = {}

    def startTest(self, test: unittest.TestCase) -> None:
        super().startTest(test)
        self._began = time.monotonic()

    def _note(self, test: unittest.TestCase, outcome: str) -> None:
        name = test.id().rpartition(".")[2]
        self.outcomes.setdefault(name, outcome)
        print(f"{time.monotonic() - self._began:6.1f} s  {name}: {outcome}", file=sys.stderr, flush=True)

    def addSuccess(self, test: unittest.TestCase) -> None:
        self._note(test, "passed")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        self._note(test, f"skipped: {reason}")

    def addError(self, test: unittest.TestCase, err: Any) -> None:
        lines = [line for line in str(err[1]).splitlines() if line and not line[0].isspace()]
        causes = [line for line in lines if "Error" in line.partition(":")[0]]
        self._note(test, f"failed: {(causes or lines or [repr(err[1])])[-1]:.300}")
        if os.environ.get("TORCH_SUITE_TRACES"):
            print(err[1], file=sys.stderr, flush=True)

    addFailure = addError


def missed(tests: dict[str, dict[str, str]], other: str = "gloo") -> list[str]:
    """The tests that ``other`` (gloo or nccl) passes and kos does not, except those that EXCEPT explains."""
    passed = {name for name, row in tests.items() if row[other] == "passed"}
    ours = {name for name in passed if "passed" in (tests[name].get("kos"), tests[name].get(f"kos as {other}"))}
    return sorted(passed - ours - (EXCEPT if other == "gloo" else EXCEPT_CUDA).keys())


def run_here(pattern: str, part: int = 0, parts: int = 1) -> dict[str, str]:
    """Run one of ``parts`` parts of the tests that ``pattern`` names in this process.

    Its words are names, or texts that names contain; without words it names all tests.
    """
    from tests.interop.torch_cases import TorchSuite

    names = unittest.TestLoader().getTestCaseNames(TorchSuite)
    words = pattern.split()
    parts_of_names = [word for word in words if word not in names]
    chosen = [name for name in names if not words or name in words or any(word in name for word in parts_of_names)]
    suite = unittest.TestSuite(TorchSuite(name) for name in chosen[part::parts])
    result = Outcomes()
    suite.run(result)
    return result.outcomes


def run(backend: str, ranks: int, pattern: str = "", jobs: int = 1) -> dict[str, str]:
    """The outcomes of the suite on ``backend``, in as many processes as ``jobs``."""
    with ThreadPoolExecutor(jobs) as pool:
        parts = pool.map(lambda part: run_part(backend, ranks, pattern, part, jobs), range(jobs))
        return {name: outcome for outcomes in parts for name, outcome in outcomes.items()}


def run_part(backend: str, ranks: int, pattern: str, part: int, parts: int) -> dict[str, str]:
    """The outcomes of one part of the suite, in a process of its own."""
    with tempfile.NamedTemporaryFile() as file:
        command = [sys.executable, "-m", "tests.interop.torch_suite", "--only", pattern]
        command += ["--here", file.name, "--part", str(part), str(parts)]
        subprocess.run(command, env=environment(backend, ranks), cwd=ROOT, check=True)
        outcomes: dict[str, str] = json.loads(Path(file.name).read_text())
    return outcomes


def run_forked(backend: str, ranks: int, pattern: str) -> dict[str, str]:
    """As ``run``, but in this process, which ``tests.interop.ranks`` has forked."""
    env = environment(backend, ranks)
    os.environ.clear()
    os.environ.update(env)
    tempfile.tempdir = None
    faulthandler.enable()  # as PYTHONFAULTHANDLER does in a new process
    try:
        return run_here(pattern)
    finally:
        for process in multiprocessing.active_children():  # the ranks, which would outlive this process
            process.kill()
            process.join()


def environment(backend: str, ranks: int) -> dict[str, str]:
    env = os.environ | {
        "BACKEND": backend.removeprefix("kos as "), "WORLD_SIZE": str(ranks), "PYTHONPATH": PATHS,
        "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONHASHSEED": "0",  # reasons contain sets of names; a repeated run writes the same file
        "PYTHONFAULTHANDLER": "1",  # a rank that crashes prints where
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # else torch initializes the driver, which a forked rank may not use
        "TMPDIR": "/tmp",  # for sockets of multiprocessing: their paths have at most 107 characters
    }  # fmt: skip
    if backend.startswith("kos as "):
        env["TORCH_SUITE_ON_KOS"] = "1"
    for name in ("RANK", "LOCAL_RANK", "MASTER_PORT", "TEMP_DIR"):
        env.pop(name, None)
    return env


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--backends", nargs="+", default=["gloo", "kos", "kos as gloo", "kos as mpi"])
    parser.add_argument("--only", default="", help="words of which a test's name contains one")
    parser.add_argument("--here", help="run in this process and write the outcomes to this file")
    parser.add_argument("--jobs", type=int, default=1, help="processes side by side, each with its part of the tests")
    parser.add_argument("--part", type=int, nargs=2, default=(0, 1), help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, default=RESULT)
    arguments = parser.parse_args()
    if arguments.here:
        Path(arguments.here).write_text(json.dumps(run_here(arguments.only, *arguments.part)))
        return
    import torch

    table: dict[str, Any] = {"torch": torch.__version__, "ranks": {}}
    if arguments.output.exists() and (written := json.loads(arguments.output.read_text()))["torch"] == table["torch"]:
        table = written
    for ranks in arguments.ranks:
        outcomes = {backend: run(backend, ranks, arguments.only, arguments.jobs) for backend in arguments.backends}
        names = sorted({name for each in outcomes.values() for name in each})
        rows = {name: {backend: each.get(name, "absent") for backend, each in outcomes.items()} for name in names}
        counts = {
            backend: {kind: sum(o.startswith(kind) for o in each.values()) for kind in ("passed", "failed", "skipped")}
            for backend, each in outcomes.items()
        }
        other = "gloo" if "gloo" in outcomes else "nccl"
        for name, why in (EXCEPT if other == "gloo" else EXCEPT_CUDA).items():
            if name in rows:
                rows[name]["why"] = why
        table["ranks"][str(ranks)] = {"counts": counts, "tests": rows}
        arguments.output.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")
        print(ranks, "ranks:", json.dumps(counts), flush=True)
        if other in outcomes:
            print(f"passed by {other} and not by kos, unexplained:", missed(rows, other) or "none", flush=True)


if __name__ == "__main__":
    main()
