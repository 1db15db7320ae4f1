"""Exit statuses of the commands: 2 for what does not exist and for a wrong argument, on one line that names it."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

from kos import errors, reporting
from kos.__main__ import COMMANDS

MISSING = {
    "kos.bench": ["--json no/x.json", "--plot no/x.png", "--ranks 0"],
    "kos.bench.join": ["no.json --json x.json", "result.json --json no/x.json", "other.json --json x.json"],
    "kos.bench.plot": ["no.json x.png", "result.json no/x.png", "other.json x.png", "broken.json x.png"],
    "kos.comm.recorder": ["no", "empty", "no.json", "broken.json", "other.json"],
    "kos.comm.schedules": ["no", "ring --draw no/x.svg", "ring --import no", "ring --predict --topology no"],
    "kos.doctor": ["--timeout 0", "no"],
    "kos.testing.conformance": ["--backend no", "--ranks 0"],
    "kos.train.parallel.schedules": ["no"],
    "kos.train.tools.plot": ["no", "empty", "empty -o no/x.png"],
    "kos.tune": ["--out no/x.json", "--largest no"],
}
"""Arguments by command, each with one thing that does not exist or is something else."""
TRAINING = {f"kos.train{name}" for name in ("", ".sample", ".chat", ".evaluate", ".export", ".tokenize")}  # tests/train


def test_every_command_is_here() -> None:
    assert {module for module, _ in COMMANDS.values()} <= MISSING.keys() | TRAINING


@pytest.mark.parametrize(
    ("module", "words"), [(module, words) for module, several in MISSING.items() for words in several]
)
@pytest.mark.filterwarnings("ignore:.*found in sys.modules")
def test_what_does_not_exist_is_refused_with_status_2(
    module: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "result.json").write_text(json.dumps({"rows": []}))
    (tmp_path / "other.json").write_text("[]")
    (tmp_path / "broken.json").write_text('{"rows": [')
    monkeypatch.setattr(sys, "argv", [module, *words.split()])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    said = capsys.readouterr()
    assert (ended.value.code, said.out) == (2, "")
    assert "error: " in said.err.splitlines()[-1] and "Traceback" not in said.err, said.err


def test_what_is_refused_and_what_has_failed() -> None:
    """The rule of the page."""
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.KosError)]
    status = {kind: reporting.exit_status(kind("x")) for kind in kinds if kind is not errors.SettingError}
    refused = {errors.ConfigError, errors.InvalidArgument, errors.DataError, errors.BackendUnavailable}
    assert {kind for kind, code in status.items() if code == 2} >= refused
    assert {kind for kind, code in status.items() if code == 1} >= {errors.RankLost, errors.CudaError}
    assert set(status.values()) == {1, 2}
