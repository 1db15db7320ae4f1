"""Run the tests stage by stage and print totals (``make test``, ``make test-all``).

usage: python tests/run.py [--all] [--stage NAME]... [pytest arguments]

First the tests of one process and then the emulated kernels, each spread over the cores by pytest-xdist.  Then those
marked `mpi`, under mpirun on several numbers of ranks.  Tests marked `slow`, and 3 ranks, run with --all only.

With --all, a last stage runs those marked `mpi` without the compiled core.

--stage runs one stage alone: serial, or a part of it (comm, train, libraries, pages), kernels, mpi-2, mpi-3, mpi-4, or
no-core.  The stage libraries calls the libraries whose results are recorded (tests/goldens), and compares.

Each stage has a deadline, so a hang fails instead of lasting.  Rank 0's output is shown; the other ranks'
lies in build/test/ and its end is shown when they fail.
"""

import argparse
import functools
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from kos import cuda

# As root, and with more ranks than cores: what a user of the Makefile gets, for whatever here starts mpirun.
for name, value in {
    "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe", "OMPI_MCA_rmaps_base_oversubscribe": "1",
}.items():  # fmt: skip
    os.environ.setdefault(name, value)

ROOT = Path(__file__).resolve().parent.parent
# The user's cache folder may be read-only and may have tuning tables, and no test may write there.
os.environ["XDG_CACHE_HOME"] = str(ROOT / "build" / "cache")
REPORTS = ROOT / "build" / "test"
# Seconds: more than three times what 2 busy cores take. With --all, the limit of a stage is doubled.
SERIAL_LIMIT, MPI_LIMIT, MPI_TEST_LIMIT = 2400, 900, 180
WAITING = 4  # workers in addition to one per core, because many tests wait for a process or a timeout
MOST_WITH_A_GPU = 4  # workers: their tests share the GPU, and with more of them, ranks arrive too late
NEVER_STARTED = 213  # Open MPI 5 found files of a killed mpirun with the same process id; no rank has run
MPI_SIZES = (2, 4)
MORE_MPI_SIZES = (2, 3, 4)  # with --all
# All files with tests marked `mpi`, because each rank collects them. The files of WITH_GPUS contain only such tests,
# and all of these need GPUs.
WITH_MPI = (
    "tests/comm/test_any_source.py",
    "tests/comm/test_buffers.py",
    "tests/comm/test_completion.py",
    "tests/comm/test_conformance.py",
    "tests/comm/test_failures.py",
    "tests/comm/test_handlers.py",
    "tests/comm/test_long_waits.py",
    "tests/comm/test_message_failures.py",
    "tests/comm/test_neighbours.py", "tests/comm/test_store.py",
    "tests/comm/test_operations.py",
    "tests/comm/test_pretended_hosts.py",
    "tests/comm/test_programs.py",
    "tests/comm/test_progress_thread.py",
    "tests/comm/test_scenarios.py",
    "tests/comm/test_shared_failures.py",
    "tests/comm/test_shrink.py",
    "tests/comm/test_two_threads.py",
)
WITH_GPUS = (
    "tests/comm/test_auto_gpu.py",
    "tests/comm/test_client_arrays_gpu.py",
    "tests/comm/test_gpu_calls.py",
    "tests/comm/test_register_gpu.py",
    "tests/comm/test_side_by_side_gpu.py",
    "tests/comm/test_nccl.py",
    "tests/comm/test_nccl_windows.py",
    "tests/comm/test_peer.py",
    "tests/comm/test_peer_soak.py",
    "tests/interop/test_arrays_gpu.py",
)
# Kernels compiled for the host write where they are told to: in processes of their own, so that nothing else suffers.
EMULATED = (
    "tests/comm/test_hierarchical.py",
    "tests/comm/test_hierarchical_failures.py",
    "tests/comm/test_nccl_kernels.py",
    "tests/comm/test_peer_compressed.py",
    "tests/comm/test_peer_failures.py",
    "tests/comm/test_peer_logic.py",
    "tests/comm/test_peer_memory.py",
    "tests/comm/test_scenarios_on_fakes.py",
    "tests/train/test_device_loss.py",
    "tests/train/test_device_ops.py",
    "tests/train/test_engine_choice_on_host.py",
    "tests/train/test_engine_failures_on_host.py",
    "tests/train/test_engine_on_host.py",
    "tests/train/test_kernels_on_host.py",
    "tests/train/test_matmul_search_on_host.py",
)
PARTS = {
    "comm": ("tests/comm", "tests/core", "tests/cuda", "tests/transfer"),
    "train": ("tests/train",),
    "libraries": (
        "tests/interop",
        *(f"tests/train/test_{path.stem}.py" for path in sorted((ROOT / "tests/goldens").glob("*.json"))),
    ),
    "pages": tuple(f"tests/{path.name}" for path in sorted((ROOT / "tests").glob("test_*.py"))),
}  # fmt: skip
"""Parts of the stage `serial`, which can be run alone."""
HALVES = (["tests/comm"], ["--ignore=tests/comm"])  # of the tests: each takes about as long to compile
RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK")
COUNTS = ("tests", "failures", "errors", "skipped")


@functools.cache
def costly() -> dict[str, int]:
    """How many cases `make test` runs of each test in the table of costly ones."""
    rows = [line.split() for line in (ROOT / "tests" / "costly.txt").read_text().splitlines() if line[0] != "#"]
    return {f"tests/{name}": int(count) for count, name in rows}


def report_name(stage: str, rank: int) -> str:
    return f"{stage}.rank{rank}"


def junit(report: str) -> str:
    return f"--junitxml={REPORTS / report}.xml"


class TellAtOnce:
    """A pytest plugin: a failure is told when it happens, for a rank that it leaves waiting ends the whole run."""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            print(f"\n{report.nodeid} ({report.when})\n{report.longreprtext}", flush=True)


def run_rank(stage: str, arguments: list[str]) -> int:
    """One rank's tests, under mpirun; all ranks but 0 write to a file."""
    rank = int(next(os.environ[name] for name in RANK_VARIABLES if name in os.environ))
    report = report_name(stage, rank)
    REPORTS.mkdir(parents=True, exist_ok=True)
    if rank:
        log = os.open(f"{REPORTS / report}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
    os.chdir(ROOT)
    # Ranks share one cache folder; mpirun's pipe looks like a terminal; failures have been told already.
    options = ["-p", "no:cacheprovider", "--color=no", "--tb=no", f"--timeout={MPI_TEST_LIMIT}"]
    options += ["-p", "no:anyio", "-p", "no:xdist", "-p", "no:hypothesispytest"]  # which take long to import
    code = pytest.main(["--with-mpi", junit(report), *options, *arguments], [TellAtOnce()])
    if code == pytest.ExitCode.NO_TESTS_COLLECTED:  # not that of mpirun, which would call it an error
        (REPORTS / f"{report}.xml").unlink()
        return 0
    return int(code)


def heed_sigint() -> None:
    """Make SIGINT interrupt this process, and those that it starts, even if a shell began it in the background.

    A shell without job control starts jobs in the background with SIGINT ignored, which their children inherit.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def run_once(command: list[str], limit: float) -> int | str:
    """The command's exit code, or why it has none.  SIGTERM ends the command too, as Ctrl-C does."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True, preexec_fn=heed_sigint)
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        return f"no end within {limit} s"
    finally:
        end_session(process)


def run_stage(stage: str, size: int, limit: float, command: list[str], may_be_empty: bool) -> bool | None:
    """Run one stage and note how it went; True when it passed on every rank, None when it had no test, if it may."""
    print(f"\n== {stage}: {' '.join(command)}", flush=True)
    began, cpu_began = time.monotonic(), cpu_seconds()
    for _ in range(3):
        code = run_once(command, limit)
        if code != NEVER_STARTED:
            break
    seconds, cpu = time.monotonic() - began, cpu_seconds() - cpu_began

    reports = [REPORTS / f"{report_name(stage, rank)}.xml" for rank in range(size)]
    without_mpi = code == pytest.ExitCode.NO_TESTS_COLLECTED
    if may_be_empty and (without_mpi or (code == 0 and not any(report.exists() for report in reports))):
        totals.append(f"{stage:<7} no test selected")
        return None
    failed_ranks = []
    counts = None
    for rank, report in enumerate(reports):
        got = read_counts(report)
        if got is None or got["failures"] or got["errors"]:
            failed_ranks.append(rank)
        if rank == 0:
            counts = got
    ok = code == 0 and not failed_ranks
    for rank in failed_ranks:
        log = REPORTS / f"{report_name(stage, rank)}.log"
        if log.exists():
            print(f"\n-- {stage}: the end of rank {rank}'s output ({log.relative_to(ROOT)})")
            print("\n".join(log.read_text(errors="replace").splitlines()[-60:]))
    if counts is None:
        line = f"{stage:<7} ended before its totals"
    else:
        failed = counts["failures"] + counts["errors"]
        passed = counts["tests"] - counts["skipped"] - failed
        line = f"{stage:<7} {passed:5} passed {counts['skipped']:4} skipped {failed:4} failed"
    line += f"  in {seconds:.0f} s, {cpu:.0f} s of CPU"
    if not ok:
        where = f" on ranks {failed_ranks}" if size > 1 and failed_ranks else ""
        line += f"  FAILED{where} (exit: {code})"
    totals.append(line)
    return ok


def cpu_seconds() -> float:
    """What the stages so far, and all they started and waited for, have computed."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def end_session(process: subprocess.Popen[bytes]) -> None:
    """End whatever the stage left running, itself included; pytest's tests end what they have started at SIGINT."""
    for last in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, last)
            process.wait(5)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def read_counts(path: Path) -> dict[str, int] | None:
    """The totals of a JUnit report; None where pytest did not live to write it."""
    try:
        suites = list(ElementTree.parse(path).getroot().iter("testsuite"))
        return {name: sum(int(suite.get(name, 0)) for suite in suites) for name in COUNTS}
    except (OSError, ElementTree.ParseError):
        return None


def compile_tests() -> None:
    """Have Python compile the tests here once, and not in each worker of a stage: a fresh clone has none compiled."""
    collect = [sys.executable, "-m", "pytest", "--collect-only", "-qq"]
    files, compiled = (len(list((ROOT / "tests").rglob(name))) for name in ("test_*.py", "test_*-pytest-*.pyc"))
    parts = HALVES if compiled < 0.9 * files else ()
    for half in [subprocess.Popen([*collect, *half], cwd=ROOT, stdout=subprocess.DEVNULL) for half in parts]:
        half.wait(SERIAL_LIMIT)


def of_one_process(with_gpu: bool) -> dict[str, tuple[int, list[str]]]:
    """The stages without mpirun: how many workers each has, and its files."""
    cores = len(os.sched_getaffinity(0))
    most = min(cores + WAITING, MOST_WITH_A_GPU) if with_gpu else cores + WAITING
    others = [f"--ignore={file}" for file in EMULATED + WITH_GPUS]
    stages = {"serial": (most, others), "kernels": (cores + 1, list(EMULATED))}
    return stages | {name: (most, [*folders, *others]) for name, folders in PARTS.items()}


def main(everything: bool, asked: list[str], arguments: list[str]) -> int:
    shutil.rmtree(REPORTS, ignore_errors=True)
    REPORTS.mkdir(parents=True)
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
        os.environ.setdefault(name, "1")  # with more threads than cores every rank crawls
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # hundreds of processes import kos: it compiles once, not each time
    mpirun = os.environ.get("MPIRUN") or str(Path(sys.executable).with_name("mpirun"))
    mpirun = os.environ["MPIRUN"] = os.path.abspath(shutil.which(mpirun) or mpirun)  # tests start it elsewhere
    quick, times = ("", 2) if everything else (" and not slow", 1)
    without = cuda.unavailable()
    one, files = of_one_process(not without), WITH_MPI if without else WITH_MPI + WITH_GPUS
    sizes = {f"mpi-{size}": size for size in MORE_MPI_SIZES} | {"no-core": 2}
    named = bool(asked)
    if not named and everything:
        asked = [stage for stage in (*one, *sizes) if stage not in PARTS]
    elif not named:
        asked = ["serial", "kernels", *(f"mpi-{size}" for size in MPI_SIZES)]
    if arguments and not named:  # they choose the files
        asked = [stage for stage in asked if stage not in ("kernels", "no-core")]
        one, files = {"serial": (one["serial"][0], [])}, ()
    if unknown := sorted({*asked} - {*one, *sizes}):
        sys.exit(f"tests/run.py: --stage: expected one of {', '.join((*one, *sizes))}, got {', '.join(unknown)}")
    if not arguments and {*asked} & {*one}:
        compile_tests()
    passed = []
    for stage in asked:
        with pytest.MonkeyPatch.context() as patch:
            if stage in one:
                workers, chosen = one[stage]
                options = ["-n", str(workers), "--dist", "worksteal", "-m", f"not mpi{quick}"]
                command = [sys.executable, "-m", "pytest", *options, junit(report_name(stage, 0)), *chosen, *arguments]
                if stage == "libraries":
                    patch.setenv("GOLDENS", "check")
                passed.append(run_stage(stage, 1, times * SERIAL_LIMIT, command, bool(arguments)))
            else:
                chosen = ["-m", f"mpi{quick}", *files, *arguments]
                ranks = [mpirun, "-n", str(sizes[stage])]
                command = [*ranks, sys.executable, __file__, "--as-rank-of", stage, *chosen]
                if stage == "no-core":
                    patch.setenv("KOS_CORE", "0")
                passed.append(run_stage(stage, sizes[stage], times * MPI_LIMIT, command, bool(arguments)))
    if without and not arguments and {*asked} & {*sizes}:
        totals.append(f"without a GPU ({without}): no {', '.join(WITH_GPUS)} under mpirun")
    print("\n== totals", *totals, sep="\n", flush=True)
    if not any(each is not None for each in passed):
        return int(pytest.ExitCode.NO_TESTS_COLLECTED)
    return 1 if False in passed else 0


totals: list[str] = []

if __name__ == "__main__":
    if sys.argv[1:2] == ["--as-rank-of"]:
        sys.exit(run_rank(sys.argv[2], sys.argv[3:]))
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--stage", action="append", default=[])
    own, others = parser.parse_known_args()
    sys.exit(main(own.all, own.stage, others))
