"""The tools in tests/: lines, stubs, and how tests are run."""

import fcntl
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from itertools import chain

import numpy as np
import pytest

from kos.comm.collectives import Operations
from kos.comm.control.identity import process
from tests import goldens, lines, stubs
from tests import run as stages
from tests.gpu_turns import turn
from tests.run import ROOT, costly


def test_bounds(capsys):
    """Prints every bound and its value. None may be exceeded."""
    counted = list(lines.files())
    assert {file.folder for file in counted} <= set(lines.FOLDERS)
    lines.main(counted)
    printed = capsys.readouterr().out
    for bound in lines.bounds(counted):
        assert f"{bound.value:>8,}{bound.most:>9,}" in printed
        assert bound.value <= bound.most, bound
    assert "exceeded" not in printed
    print(printed)


def test_recorded_results(monkeypatch, tmp_path):
    """A small difference is found, in numbers, names and lists, and within a large array."""
    recorded = {"loss": 0.5, "texts": ["a", 3, None], "arrays": {"w": [1.0, 2.0]}}
    goldens.compare({"loss": 0.5 + 1e-12, "texts": ["a", 3, None], "arrays": {"w": [1.0, 2.0]}}, recorded, 1e-9, "x")
    for change in ({"loss": 0.5001}, {"texts": ["a", 4, None]}, {"texts": ["a", 3]}, {"arrays": {"w": [1.0, 2.1]}},
                   {"arrays": {"v": [1.0, 2.0]}}):  # fmt: skip
        with pytest.raises(AssertionError, match="x.*expected"):
            goldens.compare({**recorded, **change}, recorded, 1e-9, "x")
    array = np.random.default_rng(0).normal(size=(50, 40))
    other = array.copy()
    other[7, 9] += 1
    assert goldens.distance(array, goldens.sketch(array)) < 1e-14
    true = 1 / np.linalg.norm(array)
    assert true / 2 < goldens.distance(other, goldens.sketch(array)) < 2 * true
    monkeypatch.setattr(goldens.Goldens, "made", {tmp_path / "a.json": {"x": [1.5, "b"]}})
    goldens.write(keeps=False)
    goldens.Goldens.made[tmp_path / "a.json"] = {"y": 2}
    goldens.write(keeps=True)
    assert goldens.read(tmp_path / "a.json") == {"x": [1.5, "b"], "y": 2}
    assert sum(path.stat().st_size for path in goldens.FOLDER.iterdir() if path.is_file()) < 1_000_000


def test_the_table_of_costly_tests_names_tests():
    for row in costly():
        file, test = row.split("::")
        written = f"\ndef {test}(" in (ROOT / file).read_text()
        assert written or hasattr(import_module(file.removesuffix(".py").replace("/", ".")), test), row


def test_the_table_of_mended_defects_names_tests():
    """Each entry of "Fixed" since the first release has a row, in the same order."""
    table = (ROOT / "tests" / "defects.txt").read_text()
    pages = [(ROOT / page).read_text() for page in ("CHANGELOG.md", "docs/releases/0.3.0.md")]
    sections = chain(*(re.findall(r"^(##+) Fixed$(.*?)(?=^(?:\1|##) |\Z)", page, re.M | re.S) for page in pages))
    fixed = [" ".join(entry.split()) for _, section in sections for entry in section.split("\n- ")[1:]]
    rows = re.findall(r"^(?!#)(\S.*)\n(?: {4}.+\n)+", table, re.M)
    assert len(fixed) > 100 and [row for row, entry in zip(rows, fixed, strict=True) if not entry.startswith(row)] == []
    for test in re.findall(r"^ {4}(?!no test: )(.+)", table, re.M):
        file, name, case = re.fullmatch(r"(tests/\S+\.py)::(\w+)(?:\[(.+)\])?", test).groups()
        written = (ROOT / file).read_text()
        assert f"\ndef {name}(" in written and (case or "") in written, test


def test_the_stub_is_current():
    """Else: ``python tests/stubs.py``."""
    assert stubs.TARGET.read_text() == stubs.generate(stubs.SOURCE.read_text())


def test_every_operation_has_overloads():
    public = {name for name, value in vars(Operations).items() if callable(value) and not name.startswith("_")}
    assert public - {"exact_group_size", "probe"} == {*stubs.RESULTS}


SECONDS = 60

WAITS = """
import subprocess, sys
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
try:
    open(sys.argv[1], "w").write(str(child.pid))
    child.wait()
finally:
    child.kill()
    child.wait()
"""


def until(reached: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + SECONDS
    while not reached():
        if time.monotonic() > deadline:
            pytest.fail(f"expected {what} within {SECONDS} s")
        time.sleep(0.05)


def test_a_stage_that_is_terminated_ends_its_processes(tmp_path):
    """SIGTERM ends a stage and its processes, even if they ignore SIGINT.

    A shell without job control starts programs in the background with SIGINT ignored.
    """
    children = tmp_path / "children"
    command = [sys.executable, "-c", WAITS, str(children)]
    run_stage = [sys.executable, "-c", f"from tests import run; run.run_once({command}, 600)"]
    ignore = partial(signal.signal, signal.SIGINT, signal.SIG_IGN)
    with subprocess.Popen(run_stage, cwd=ROOT, stderr=subprocess.DEVNULL, preexec_fn=ignore) as run:
        try:
            until(lambda: children.exists() and children.read_text() != "", "the start of the program")
            run.terminate()
            assert run.wait(SECONDS) != 0
        finally:
            run.kill()
    child = int(children.read_text())
    until(lambda: process(child)[0] in "ZX", "the end of the child of the program")


@pytest.mark.parametrize(
    ("passed", "code"), [((True, None, True), 0), ((None, None, None), 5), ((True, False, None), 1)]
)
def test_a_selection_without_a_test_fails(passed, code, tmp_path, monkeypatch):
    """A misspelt ``-k`` is no success; a stage alone may be empty."""
    left = iter(passed)
    monkeypatch.setattr(stages, "REPORTS", tmp_path / "reports")
    monkeypatch.setattr(stages, "run_stage", lambda *_: next(left))
    assert stages.main(False, [], ["-k", "name"]) == code
    assert next(left, "all ran") == "all ran"


ALONE = """
import sys
from pathlib import Path
from tests.gpu_turns import turn
with turn(folder := Path(sys.argv[1]), True):
    (folder / "begun").touch()
"""
LOCK = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'a+'), int(sys.argv[2]) | fcntl.LOCK_NB)"


def test_a_test_that_is_alone_shares_the_gpus_with_no_other(tmp_path):
    gpus, later, begun = (tmp_path / name for name in ("gpus", "next", "begun"))

    def is_locked(file, kind):
        command = [sys.executable, "-c", LOCK, str(file), str(kind)]
        return subprocess.run(command, stderr=subprocess.DEVNULL).returncode != 0

    with turn(tmp_path, False):
        assert is_locked(gpus, fcntl.LOCK_EX) and not is_locked(gpus, fcntl.LOCK_SH)
        other = subprocess.Popen([sys.executable, "-c", ALONE, str(tmp_path)], cwd=ROOT)
        until(lambda: is_locked(later, fcntl.LOCK_EX), "the wait of the other test, before all later ones")
        assert not begun.exists()
    assert other.wait(SECONDS) == 0 and begun.exists()
    with turn(tmp_path, True):
        assert is_locked(gpus, fcntl.LOCK_SH) and not is_locked(later, fcntl.LOCK_EX)
