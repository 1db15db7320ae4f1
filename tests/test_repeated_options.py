"""Every command says which value counts if an option that takes one value is given twice."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import kos
from kos.reporting import ArgumentParser, Parser


def parser(kind: type[ArgumentParser]) -> ArgumentParser:
    made = kind()
    made.add_argument("--one", f"--first-{kind.__name__}", type=int)
    made.add_argument("--several", action="append")
    made.add_argument("--on", action="store_true")
    return made


@pytest.mark.parametrize("kind", [ArgumentParser, Parser])
def test_the_last_value_counts_and_this_is_said(kind: type[ArgumentParser], caplog: pytest.LogCaptureFixture) -> None:
    made = parser(kind)
    name = f"--first-{kind.__name__}"  # each warning is given once in a process
    assert [made.parse_args(["--one=1", name, "2"]).one for _ in range(2)] == [2, 2]
    assert [record.getMessage() for record in caplog.records] == [f"{name} is given twice: 2 counts, not 1"]


@pytest.mark.parametrize("kind", [ArgumentParser, Parser])
def test_nothing_is_said_of_equal_values_and_of_options_of_several(
    kind: type[ArgumentParser], caplog: pytest.LogCaptureFixture
) -> None:
    made = parser(kind)
    for _ in range(2):  # a parser may be used again
        found = made.parse_args(["--one", "1", "--one", "1", "--several", "a", "--several", "b", "--on", "--on"])
        assert (found.one, found.several, found.on) == (1, ["a", "b"], True)
    assert not made.parse_args(["--one", "3"]).on and not caplog.records


def test_the_trainer_says_it_once_for_all_ranks(tmp_path: Path) -> None:
    pytest.importorskip("pydantic", reason="needs the extra 'train'")
    command = [sys.executable, "-m", "kos.train", "--steps", "4", "--steps=3", "--plan", "--ranks=1"]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr.count("--steps is given twice: 3 counts, not 4") == 1


def test_every_command_has_such_a_parser() -> None:
    folder = Path(kos.__path__[0])
    others = [path for path in folder.rglob("*.py") if re.search(r"argparse\.ArgumentParser\(\w", path.read_text())]
    assert others == []
