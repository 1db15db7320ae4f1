"""The exit code of the trainer's commands: 2 where a file or folder that they name does not exist, 1 elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.forked import python
from tests.launcher import run_program
from tests.train.test_cli import ENVIRONMENT

TRAIN = ["kos.train", "--out", "{out}"]
MISSING = {
    "data": [*TRAIN, "--data", "{missing}"],
    "val_data": [*TRAIN, "--val-data", "{missing}"],
    "tokenizer": [*TRAIN, "--tokenizer", "{missing}"],
    "resume": [*TRAIN, "--resume", "{missing}"],
    "init_from": [*TRAIN, "--init-from", "{missing}"],
    "config": [*TRAIN, "--config", "{missing}.toml"],
    "sample": ["kos.train.sample", "{missing}"],
    "export": ["kos.train.export", "{missing}", "{out}"],
    "tokenize": ["kos.train.tokenize", "{missing}", "{out}"],
    "plot": ["kos.train.tools.plot", "{missing}"],
}
EMPTY = [[word.replace("{missing}", "{empty}") for word in MISSING[name]] for name in ("data", "resume", "sample")]


@pytest.mark.parametrize(
    ("words", "code"), [*((each, 2) for each in [*MISSING.values(), EMPTY[0]]), *((each, 1) for each in EMPTY[1:])]
)
def test_the_exit_code_of_what_is_missing(words: list[str], code: int, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    places = {name: str(tmp_path / name) for name in ("missing", "empty", "out")}
    done = run_program(*python(), "-m", *(word.format(**places) for word in words), env=ENVIRONMENT)
    assert done.returncode == code and done.stderr.startswith("kos: error: "), done.stderr
    assert len(done.stderr.splitlines()) == 1
