"""tests/run.py ends what it has started when it is ended itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kos.comm.control.identity import process
from tests import run as stages
from tests.run import ROOT

SECONDS = 60

WAITS = """
import subprocess
from pathlib import Path

def test_waits():
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    try:
        Path("children").write_text(str(child.pid))
        child.wait()
    finally:
        child.kill()
        child.wait()
"""
RUN = "import sys; from tests import run; run.run_once([sys.executable, '-m', 'pytest', *sys.argv[1:]], 600)"


def until(reached: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + SECONDS
    while not reached():
        if time.monotonic() > deadline:
            pytest.fail(f"expected {what} within {SECONDS} s")
        time.sleep(0.05)


def ignore_sigint() -> None:
    """As a shell without job control does for its jobs in the background."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@pytest.mark.parametrize(
    ("number", "start"),
    [(signal.SIGTERM, None), (signal.SIGINT, None), (signal.SIGTERM, ignore_sigint)],
    ids=["SIGTERM", "SIGINT", "SIGTERM, SIGINT ignored"],
)
def test_a_test_under_way_ends_what_it_started(
    tmp_path: Path, number: signal.Signals, start: Callable[[], None] | None
) -> None:
    file, children = tmp_path / "test_waits.py", tmp_path / "children"
    file.write_text(WAITS.replace('"children"', repr(str(children))))
    options = ["-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(tmp_path)]
    command = [sys.executable, "-c", RUN, *options, str(file)]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, cwd=ROOT, preexec_fn=start, **quiet) as run:
        try:
            until(lambda: children.exists() and children.read_text() != "", "the test")
            run.send_signal(number)
            assert run.wait(SECONDS) != 0
        finally:
            run.kill()
    child = int(children.read_text())
    until(lambda: process(child)[0] in "ZX", "the end of what the test started")


def test_what_tests_start_heeds_sigint() -> None:
    ignored = "import signal; print(signal.getsignal(signal.SIGINT) is signal.SIG_IGN)"
    done = subprocess.run([sys.executable, "-c", ignored], capture_output=True, text=True, timeout=SECONDS)
    assert done.stdout == "False\n"


def test_tests_that_a_shell_began_in_the_background() -> None:
    """There SIGINT is ignored, by all children too."""
    this = f"{__file__}::{test_what_tests_start_heeds_sigint.__name__}"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", this]
    done = subprocess.run(
        command, cwd=ROOT, preexec_fn=ignore_sigint, capture_output=True, text=True, timeout=2 * SECONDS
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("passed", "code"), [((True, None, True), 0), ((None, None, None), 5), ((True, False, None), 1)]
)
def test_a_selection_without_a_test_fails(
    passed: tuple[bool | None, ...], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A misspelt ``-k`` is no success; a stage alone may be empty."""
    left = iter(passed)
    monkeypatch.setattr(stages, "REPORTS", tmp_path / "reports")
    monkeypatch.setattr(stages, "run_stage", lambda *_: next(left))
    assert stages.main(False, ["-k", "name"]) == code
    assert next(left, "all ran") == "all ran"
