"""The trainer as a user starts it: under mpirun, in a program, from pasted commands; what goes wrong; exit codes."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

import kos.train
from kos.errors import ConfigError, KosError, SettingError, install
from kos.testing import spawn
from kos.train import checkpoint
from kos.train.checkpoint import huggingface
from kos.train.data.tokenizers import make_tokenizer
from kos.train.parallel.failures import together
from kos.train.tools import read_metrics
from tests.comm.shared_ranks import needs_core
from tests.forked import python
from tests.launcher import MPIRUN, SECONDS, run_program, running_program
from tests.train.commands import ENVIRONMENT, SHAPE, _command


def _run(*flags: str | Path, ranks: int = 2, fresh: bool = False) -> subprocess.CompletedProcess[str]:
    return run_program(*_command(*flags, ranks=ranks, fresh=fresh), env=ENVIRONMENT)


def _errors(done: subprocess.CompletedProcess[str]) -> list[str]:
    """What kos said on stderr; mpirun's own box is none of it."""
    return [line for line in done.stderr.splitlines() if line.startswith("kos: error:")]


@pytest.mark.parametrize(
    ("flags", "out", "expected"),
    [(["--stepz", "3"], "run", "--steps"), ([], "file/run", "expected a folder that can be written")],
)
def test_bad_input_is_one_line_and_ends_the_job(text, tmp_path, flags, out, expected):
    """Either every rank finds the value, or only one does. Other texts of the line are tested in other files."""
    (tmp_path / "file").write_text("")
    done = _run("--data", text, "--out", tmp_path / out, *flags)
    assert done.returncode != 0 and "Traceback" not in done.stderr
    assert len(_errors(done)) == 1, f"exit status {done.returncode}: {done.stderr}"
    (error,) = _errors(done)
    assert "expected" in error and expected in error


def test_the_settings_of_an_error_reach_every_rank():
    def run(comm):
        def fail():
            if comm.rank == 1:
                raise SettingError("--batch-size", "1", 2, also=["micro_batch_size"])

        with pytest.raises(ConfigError, match="^--batch-size: expected 1, got 2$") as caught:
            together(comm, fail)
        return caught.value.settings

    assert spawn(run, 2, timeout=60) == [("batch_size", "micro_batch_size")] * 2


@pytest.mark.parametrize("key", ["data", "resume"])
def test_a_missing_path_that_nobody_typed_is_of_the_file(text, tmp_path, key):
    file, nowhere = tmp_path / "settings.json", str(tmp_path / "nowhere")
    file.write_text(json.dumps({"data": str(text), key: nowhere}))
    done = _run("--config", file, "--out", tmp_path / "run", ranks=1)
    said = f"; {file} sets --{key}: type --{key} … to override it\n"
    assert done.stderr.startswith(f"kos: error: --{key}: ") and nowhere in done.stderr and done.stderr.endswith(said)


@pytest.mark.parametrize(("package", "module", "arguments"), [
    ("threadpoolctl", "__main__", []), ("pydantic", "sample", ["folder"]),
])  # fmt: skip
def test_a_package_that_is_missing_is_named_with_what_brings_it(package, module, arguments):
    begin = f"import sys\nsys.modules[{package!r}] = None\n"
    code = begin + f"from kos.train.{module} import main\nsys.exit(main({arguments}))"
    done = run_program(sys.executable, "-c", code, env=ENVIRONMENT)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith(f"kos: error: expected the trainer's packages ({install('train')}), got: ")


def _running(*flags: str | Path, ranks: int = 2, fresh: bool = True) -> AbstractContextManager[subprocess.Popen[str]]:
    """A long run, once it has made a few steps."""
    command = _command(*flags, "--steps=1000000", "--save-every=5", "--eval-every=0", ranks=ranks, fresh=fresh)
    return running_program(lambda line: line.startswith("step") and " 7/" in line, *command, env=ENVIRONMENT)


@pytest.mark.parametrize("where", ["head", "full", "closed", "ascii"])
def test_output_that_nobody_takes_does_not_end_a_run(text, tmp_path, where):
    flags = ["--data", text, "--out", tmp_path, "--steps", "8", "--sample-tokens", "5", "--prompt", "Ä"]
    command = " ".join(_command(*flags, ranks=1, fresh=where in ("closed", "ascii")))
    command += {"head": " | head -n 2", "full": " >/dev/full", "closed": " >&-", "ascii": ""}[where]
    environment = {**ENVIRONMENT, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(command, shell=True, env=environment, capture_output=True, text=True, timeout=SECONDS)
    assert done.stderr == ""
    assert checkpoint.find(tmp_path).step == 8


def _ranks_of(process: subprocess.Popen[str]) -> list[int]:
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [int(child) for child in children if b"kos.train" in Path(f"/proc/{child}/cmdline").read_bytes()]


@pytest.mark.parametrize("victim", [pytest.param("rank", marks=needs_core), "mpirun"])
def test_kill_leaves_a_checkpoint_to_resume(text, tmp_path, victim):
    flags = ["--data", text, "--out", tmp_path, "--sample-tokens", "0", "--pp", "2"]
    with _running(*flags) as process:
        ranks = _ranks_of(process)
        assert len(ranks) == 2
        os.kill(ranks[1] if victim == "rank" else process.pid, signal.SIGKILL)
        said = process.communicate()[0]
        assert process.returncode != 0
        if victim == "rank":  # mpirun kills the other rank half a second later; without the core it needs a second
            (line,) = (line for line in said.splitlines() if line.startswith("kos: error: "))
            assert re.search(rf"after step \d+: .* is gone: its process {ranks[1]} ended; the last checkpoint, ", line)
            assert said.count("resume with: ") == 1, said
        deadline = time.monotonic() + 60
        while any(Path(f"/proc/{pid}/fd").exists() and os.path.exists(f"/proc/{pid}/exe") for pid in ranks):
            assert time.monotonic() < deadline, "a rank outlived its job"
            time.sleep(0.05)
    found = checkpoint.latest(tmp_path / "checkpoints")
    assert found is not None
    done = _run(*flags, "--steps", str(found.step + 2), "--resume", "auto")
    assert done.returncode == 0, done.stderr
    steps = [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")]
    assert steps == list(range(1, found.step + 3))


def test_a_file_that_one_machine_lacks(text, tmp_path):
    """Rank 0 has nothing to say, and the other does not leave it at that."""
    first = _command("--data", text, "--out", tmp_path / "run", "--steps", "2", ranks=2)
    at = first.index(sys.executable)
    second = [*first[at:], "--config", str(tmp_path / "nowhere.toml")]
    done = run_program(MPIRUN, "-n", "1", *first[at:], ":", "-n", "1", *second, env=ENVIRONMENT)
    assert done.returncode != 0 and len(_errors(done)) == 1, done.stderr
    assert re.match(r"kos: error: rank 1: .*nowhere\.toml", _errors(done)[0])


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
def test_the_exit_code_of_what_is_missing(words, code, tmp_path):
    (tmp_path / "empty").mkdir()
    places = {name: str(tmp_path / name) for name in ("missing", "empty", "out")}
    done = run_program(*python(), "-m", *(word.format(**places) for word in words), env=ENVIRONMENT)
    assert done.returncode == code and done.stderr.startswith("kos: error: "), done.stderr
    assert len(done.stderr.splitlines()) == 1


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


def test_a_run_in_a_thread_leaves_signals_to_the_program(text, tmp_path):
    flags = [*SHAPE, "--data", text, "--out", tmp_path / "run", "--steps=2", "--eval-batches=0", "--sample-tokens=0"]
    done = run_program(*map(str, [*python(), "-c", THREAD, *flags]), env=ENVIRONMENT)
    assert done.returncode == 0 and done.stdout.endswith("exit codes [0]\n"), (done.stdout, done.stderr)
    assert [row["step"] for row in kos.train.read_metrics(tmp_path / "run")] == [1, 2]


def test_an_error_in_a_thread_is_one_line(tmp_path):
    flags = ["--data", tmp_path / "nowhere", "--out", tmp_path / "run"]
    done = run_program(*map(str, [*python(), "-c", THREAD, *flags]), env=ENVIRONMENT)
    assert done.returncode == 2 and done.stderr.startswith("kos: error: --data: expected "), done.stderr
    assert len(done.stderr.splitlines()) == 1


FOLDERS = ["plain", "it's", 'a "quoted" one', "$HOME `date` \\ *", "é %s {0} !x"]

TRANSFORMERS = """
import pathlib
class AutoTokenizer:
    @classmethod
    def from_pretrained(cls, folder):
        made = cls()
        made.folder = folder
        return made
    def save_pretrained(self, folder):
        assert self.folder == folder
        pathlib.Path(folder, "saved").write_text(type(self).__name__)
class AutoModelForCausalLM(AutoTokenizer):
    pass
"""


def paste(error: Callable[[], object]) -> None:
    """Run what follows ``run: `` in the error, in this folder."""
    with pytest.raises(KosError) as caught:
        error()
    command = str(caught.value).partition("run: ")[2]
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, f"{command}\n{done.stderr}"


@pytest.mark.parametrize("name", FOLDERS)
def test_of_transformers(tmp_path, name, monkeypatch):
    (tmp_path / "transformers.py").write_text(TRANSFORMERS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (folder := tmp_path / name).mkdir()
    (folder / "vocab.json").write_text("{}")
    paste(lambda: make_tokenizer(str(folder)))
    assert (folder / "saved").read_text() == "AutoTokenizer"
    (folder / "pytorch_model.bin").write_bytes(b"x")
    paste(lambda: huggingface.check_weights(folder))
    assert (folder / "saved").read_text() == "AutoModelForCausalLM"
