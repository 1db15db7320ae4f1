"""A rank on a GPU is killed or stopped while graphs replay: nothing wrong is logged or saved, and a run can resume."""

import functools
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kos.train import checkpoint
from kos.train.tools import read_metrics
from tests.launcher import MPIRUN, OUTSIDE, SECONDS, nccl_ranks

STEPS, SAVES = 600, 100
ENOUGH = SAVES + 10  # steps before a rank is killed or stopped; within a checkpoint, the others would wait much longer
TIMEOUT = 10  # seconds that a rank waits for the others, including their start
FLAGS = f"""
--preset tiny --device cuda --steps {STEPS} --schedule constant --eval-every 0 --eval-batches 1 --save-every {SAVES}
--sample-tokens 0 --hidden-size 512 --intermediate-size 1408 --num-hidden-layers 4 --vocab-size 8192
--num-attention-heads 8 --batch-size 8 --seq-len 64 --lr 5e-4 --warmup-steps 5
""".split()
two = pytest.mark.skipif(nccl_ranks() < 2, reason="nccl needs 2 GPUs")

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not MPIRUN, reason="needs mpirun")]


def command(text: Path, out: Path, backend: str, *flags: str, timeout: float = TIMEOUT) -> list[str]:
    run = [sys.executable, "-m", "kos.train", *FLAGS, "--data", str(text), "--out", str(out), "--backend", backend]
    return [MPIRUN, "-n", "2", *run, "--timeout", str(timeout), *flags]


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory):
    """Kernels are chosen by measuring: tests that run beside these would change the choice, and with it the bits."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(OUTSIDE, "XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def finish(text: Path, out: Path, backend: str, *flags: str, timeout: float = TIMEOUT) -> list[float]:
    """The losses of all steps, of a run that comes to its end."""
    job = command(text, out, backend, *flags, timeout=timeout)
    done = subprocess.run(job, env=OUTSIDE, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr[-1500:]
    return losses(out)


def losses(out: Path) -> list[float]:
    rows = read_metrics(out / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    return [row["loss"] for row in rows]


@pytest.fixture(scope="module")
def undisturbed(text, tmp_path_factory):
    """What both backends sum alike: of two ranks there is one order.

    This run may compile kernels, for longer than ``TIMEOUT``.
    """

    @functools.cache
    def run(layout):
        return finish(text, tmp_path_factory.mktemp("undisturbed"), "peer", *layout.split(), timeout=SECONDS)

    return run


@pytest.mark.timeout(4 * SECONDS)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("backend", ["peer", pytest.param("nccl", marks=two), pytest.param("auto", marks=two)])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_is_lost_in_a_step(text, undisturbed, tmp_path, backend, number, victim):
    lose(text, undisturbed, tmp_path, backend, number, victim, "--zero 1")


@pytest.mark.timeout(4 * SECONDS)
@pytest.mark.parametrize(
    ("layout", "backend", "number", "victim"),
    [
        ("--tp 2", "peer", signal.SIGSTOP, 1),
        pytest.param("--tp 2", "nccl", signal.SIGSTOP, 0, marks=two),
        ("--cp 2", "peer", signal.SIGKILL, 0),
        pytest.param("--cp 2", "nccl", signal.SIGSTOP, 1, marks=two),
        ("--pp 2 --pp-schedule zero-bubble-v", "peer", signal.SIGSTOP, 0),
        ("--pp 2 --pp-schedule 1f1b --no-graph", "peer", signal.SIGSTOP, 1),
        pytest.param("--pp 2 --pp-schedule zero-bubble-v", "nccl", signal.SIGKILL, 1, marks=two),
        pytest.param("--pp 2 --pp-schedule zero-bubble-v", "nccl", signal.SIGSTOP, 0, marks=two),
        pytest.param("--pp 2 --pp-schedule 1f1b --no-graph", "nccl", signal.SIGSTOP, 1, marks=two),
    ],
)
def test_a_rank_of_a_layout_is_lost(text, undisturbed, tmp_path, layout, backend, number, victim):
    lose(text, undisturbed, tmp_path, backend, number, victim, layout)


def lose(
    text: Path, undisturbed: Callable[[str], list[float]], tmp_path: Path, backend: str, number: signal.Signals,
    victim: int, layout: str,
) -> None:  # fmt: skip
    """Strike a rank amid the steps, then go on from the last checkpoint."""
    expected = undisturbed(layout)
    with (tmp_path / "said").open("w") as said:
        job = command(text, tmp_path, backend, *layout.split())
        process = subprocess.Popen(job, env=OUTSIDE, stdout=subprocess.DEVNULL, stderr=said, start_new_session=True)
        try:
            deadline = time.monotonic() + SECONDS
            while len(read_metrics(tmp_path / "metrics.jsonl")) < ENOUGH:
                assert process.poll() is None and time.monotonic() < deadline, (tmp_path / "said").read_text()
                time.sleep(0.01)
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            ranks = [int(c) for c in children if b"kos.train" in Path(f"/proc/{c}/cmdline").read_bytes()]
            os.kill(ranks[victim], number)
            struck = time.monotonic()
            process.wait(timeout=TIMEOUT + 30)
            took = time.monotonic() - struck
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    errors = [line for line in (tmp_path / "said").read_text().splitlines() if line.startswith("kos: error:")]
    print(f"over after {took:.1f} s: {errors}")
    assert process.returncode != 0
    if number == signal.SIGSTOP:  # otherwise mpirun ends the other rank, perhaps before it reports anything
        # mpirun may wake the stopped rank to end it, and that rank then reports itself: the same cause.
        assert any(line.startswith(f"kos: error: rank {1 - victim}:") for line in errors) and len(errors) <= 2
        victim_is_named = rf"(rank {victim}|ranks \[{victim}\]) did not arrive"
        assert all(re.search(victim_is_named, line) for line in errors), errors
    got = losses(tmp_path)
    assert ENOUGH <= len(got) < STEPS and got == expected[: len(got)]
    found = checkpoint.latest(tmp_path / "checkpoints")
    assert found is not None and found.step <= len(got)
    assert finish(text, tmp_path, backend, "--resume", "auto", *layout.split()) == expected
