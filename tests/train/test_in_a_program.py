"""The trainer in a program of the user: in a thread, and its metrics."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import kos.train
from tests.forked import python
from tests.launcher import run_program
from tests.train.test_cli import ENVIRONMENT, SHAPE

THREAD = """
import signal, sys, threading
from kos.train.__main__ import main
before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
codes = []
thread = threading.Thread(target=lambda: codes.append(main(sys.argv[1:])))
thread.start()
thread.join()
assert {number: signal.getsignal(number) for number in before} == before, "signals are the program's"
print("exit codes", codes)
"""


def test_a_run_in_a_thread_leaves_signals_to_the_program(text: Path, tmp_path: Path) -> None:
    flags = [*SHAPE, "--data", text, "--out", tmp_path / "run", "--steps=2", "--eval-batches=0", "--sample-tokens=0"]
    done = run_program(*map(str, [*python(), "-c", THREAD, *flags]), env=ENVIRONMENT)
    assert done.returncode == 0 and done.stdout.endswith("exit codes [0]\n"), (done.stdout, done.stderr)
    assert [row["step"] for row in kos.train.read_metrics(tmp_path / "run")] == [1, 2]


def test_an_error_in_a_thread_is_one_line(tmp_path: Path) -> None:
    flags = ["--data", tmp_path / "nowhere", "--out", tmp_path / "run"]
    done = run_program(*map(str, [*python(), "-c", THREAD, *flags]), env=ENVIRONMENT)
    assert done.returncode == 2 and done.stderr.startswith("kos: error: --data: expected "), done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("kind", [Path, str], ids=["path", "str"])
def test_metrics_of_a_file_or_of_the_folder_of_a_run(tmp_path: Path, kind: type) -> None:
    rows = [{"step": 1, "loss": 2.5}, {"step": 2, "loss": 2.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 3')
    for place in (tmp_path / "metrics.jsonl", tmp_path):
        assert kos.train.read_metrics(kind(place)) == rows
    assert kos.train.read_metrics(kind(tmp_path / "missing")) == []
