"""``benchmarks.all``: pieces that run once a commit, files of subjects, and commands that their programs accept."""

import json
import shlex
from pathlib import Path

import pytest

from benchmarks import all as command
from benchmarks import train
from benchmarks.programme import Piece, programme
from kos.bench import options
from kos.errors import ConfigError

FAKE = """
import json, os, sys, time
mark, *more, _, file = sys.argv[1:]
open(mark, "a").write("x")
if "fails" in more: sys.exit(3)
if "waits" in more: time.sleep(600)
about = {"hardware": "a machine", "driver": os.environ.get("LD_PRELOAD"), "commit": os.environ["KOS_COMMIT"]}
about["date"] = mark[-1]
about["command"] = f"fake --json {file}"
json.dump({**about, "rows": [{"op": mark[-1]}]}, open(file, "w"))
"""


@pytest.fixture
def begin(tmp_path, monkeypatch, capsys):
    """Measures a programme, of pieces of a fake program: the exit code, and what was printed."""
    (tmp_path / "fake.py").write_text(FAKE)
    monkeypatch.setenv("KOS_COMMIT", "abc")

    def run(wanted, *flags):
        paths = ["--json", str(tmp_path / "out"), "--parts", str(tmp_path / "parts")]
        return command.main(["--gpus", "0", *paths, *flags], lambda *_: wanted), capsys.readouterr().out

    return run


def piece(folder: Path, mark: str, *more: str, seconds: int = 1) -> Piece:
    return Piece(shlex.join(["python", str(folder / "fake.py"), str(folder / mark), *more]), seconds)


def test_a_subject_is_measured_once_a_commit(begin, tmp_path, monkeypatch):
    wanted = {"calls": [piece(tmp_path, "a"), piece(tmp_path, "b")]}
    (code, shown), again = begin(wanted), begin(wanted)
    assert code == 0 and shown.count("calls 1/2: python ") == 1 and again == (0, "")
    result = json.loads((tmp_path / "out" / "calls.json").read_text())
    assert result["rows"] == [{"op": "a"}, {"op": "b"}] and result["date"] == "b"
    assert result["command"].count("calls.json") == 2 and " && " in result["command"]
    assert (tmp_path / "a").read_text() == (tmp_path / "b").read_text() == "x"
    monkeypatch.setenv("KOS_COMMIT", "another")
    assert begin(wanted)[0] == 0 and (tmp_path / "a").read_text() == "xx"


def test_what_fails_is_measured_again(begin, tmp_path):
    """And a piece that would end late is not begun."""
    a, b, c, e = (piece(tmp_path, mark, seconds=3) for mark in "abce")
    late = [piece(tmp_path, "d", seconds=60), e]
    c = c._replace(preload="/no/such.so")  # the loader warns of it
    wanted = {"calls": [piece(tmp_path, "a", "fails"), b], "others": [c], "late": late, "none": [Piece("/no/such", 1)]}
    code, shown = begin(wanted, "--minutes", "0.5")
    assert code == 1 and "failed: exit code 3; see " in shown and "failed: [Errno 2]" in shown
    assert "not begun: expected 60 s, which --minutes 0.5 does not leave" in shown
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["others.json"]
    assert json.loads((tmp_path / "out" / "others.json").read_text())["driver"] == "/no/such.so"
    assert begin({"calls": [a, b], "others": [c]})[0] == 0
    assert [(tmp_path / mark).read_text() for mark in "abce"] == ["xx", "x", "x", "x"]
    assert not (tmp_path / "d").exists()


def test_a_piece_ends_with_its_ranks(begin, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "LONGEST", 1)
    code, shown = begin({"calls": [piece(tmp_path, "a", "waits")]})  # which would take 600 s
    assert code == 1 and "failed: expected its end within 1 s; see " in shown


EVERY = [
    pytest.param(piece, id=f"{subject}-{number}")
    for gpus in (0, 1, 2)
    for subject, pieces in programme(gpus, "h100", "/tmp/libnccl.so.2").items()
    for number, piece in enumerate(pieces)
]


@pytest.mark.parametrize("piece", EVERY)
def test_commands_are_accepted(piece, program):
    """Each is shorter than a piece may be, and its program knows the flags."""
    assert 0 < piece.seconds < command.LONGEST
    words = shlex.split(piece.command)
    at = words.index("-m")
    module, flags = words[at + 1], words[at + 2 :]
    if module == "kos.bench":
        options.parse(flags)
    elif module == "benchmarks.train":
        train.read_arguments(flags)
    else:
        if module == "benchmarks.torch_backend":
            pytest.importorskip("torch")
        try:
            said = program(module, shlex.join([*flags, "--no-such-flag"])).err
        except ConfigError as error:  # of the flags of the trainer
            said = str(error)
        unknown = ("unrecognized arguments: --no-such-flag", "a flag that --help lists, got '--no-such-flag'")
        assert said.rstrip().endswith(unknown)
