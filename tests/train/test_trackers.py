"""Trackers get what metrics.jsonl gets, and whatever fails in one ends no run."""

import json
import logging
import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kos.errors import ConfigError, install
from kos.train.tools import METRICS, MetricsLog, trackers
from tests.launcher import MPIRUN, needs_mpirun, run_program, skip_without_semaphores
from tests.train.commands import ENVIRONMENT, SHAPE
from tests.train.refusal import refused
from tests.train.runs import _train

RUN: dict[str, Any] = {"steps": 6, "save_every": 3, "eval_every": 3, "sample_tokens": 0}


@pytest.fixture
def close_seconds():
    return 100.0


@pytest.fixture(autouse=True)
def _offline(monkeypatch, tmp_path, close_seconds):
    """No test needs a network, or writes into the user's folders."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "settings"))
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setattr(trackers, "CLOSE_SECONDS", close_seconds)


def _interrupted_and_resumed(text: Path, out: Path, tracker: str) -> list[dict[str, Any]]:
    """The metrics of a run that was killed after step 6, when step 3 was the last that it had saved."""
    _train(text, out, tracker=(tracker,), **RUN)
    (out / "checkpoints" / "step-6").rename(out / "gone")
    return _train(text, out, 2, tracker=(tracker,), resume="auto", **RUN | {"steps": 8})


def _events(folder: Path) -> Iterator[Any]:
    """The records of event files: length, checksum, content, checksum (TensorFlow, core/lib/io/record_writer.h)."""
    from tensorboardX.proto.event_pb2 import Event

    for path in sorted(folder.iterdir()):
        content, at = path.read_bytes(), 0
        while at < len(content):
            size = int.from_bytes(content[at : at + 8], "little")
            yield Event.FromString(content[at + 12 : at + 12 + size])
            at += size + 16


@pytest.fixture
def without_torch(monkeypatch, tmp_path):
    """tensorboardX imports torch if it is installed, which takes long."""
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "torch.py").write_text("raise ImportError('torch is left out')")
    monkeypatch.syspath_prepend(tmp_path / "path")


@pytest.mark.usefixtures("without_torch")
def test_tensorboard_has_the_values_of_metrics_jsonl(text, tmp_path):
    """Those of a step that is repeated replace the first: a mark in the file says so. The same holds for a run
    that begins again in the folder."""
    pytest.importorskip("tensorboardX", reason="needs the extra tensorboard")
    skip_without_semaphores()  # tensorboardX writes in another process
    rows = _interrupted_and_resumed(text, tmp_path / "run", "tensorboard")
    assert len(rows) == 8
    texts = _check_events(tmp_path / "run" / "tensorboard", rows, kept=[0, 3])
    assert len(texts) == 2 and json.loads(texts[1].strip("`json\n"))["steps"] == 8
    shutil.rmtree(tmp_path / "run" / "checkpoints")  # as one that was killed before its first checkpoint
    rows = _train(text, tmp_path / "run", tracker=("tensorboard",), **RUN | {"steps": 4})
    _check_events(tmp_path / "run" / "tensorboard", rows, kept=[0, 3, 0])


def _check_events(folder: Path, rows: list[dict[str, Any]], kept: list[int]) -> list[str]:
    """That TensorBoard shows these rows, and so many before each part of the run. The texts that it shows."""
    seen: dict[int, dict[str, float]] = {}
    texts, steps = [], []
    for event in _events(folder):
        if event.session_log.status == 1:  # START: later steps are void
            seen = {step: values for step, values in seen.items() if step < event.step}
            steps.append(len(seen))
        for value in event.summary.value:
            if value.HasField("tensor"):
                texts.append(value.tensor.string_val[0].decode())
            else:
                assert value.tag not in seen.setdefault(event.step, {})
                seen[event.step][value.tag] = value.simple_value
    assert steps == kept and list(seen) == [row["step"] for row in rows]
    for row in rows:
        assert seen[row.pop("step")] == pytest.approx(row, rel=1e-6)
    return texts


@pytest.mark.parametrize("folder", [False, True])
def test_a_package_that_is_missing_is_refused_with_what_installs_it(text, tmp_path, monkeypatch, folder):
    """Also where a folder has its name, as wandb's own files have."""
    if folder:
        (tmp_path / "not_there").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(trackers.PACKAGES, "wandb", "not_there")
    with refused(ConfigError, "--tracker wandb", "package not_there", install("wandb")):
        _train(text, tmp_path / "run", 2, tracker=("wandb",), **RUN)
    assert not (tmp_path / "run").exists(), "refused before anything is written"


SIGNATURES = {"__init__": "self, **options", "log": "self, values, step", "finish": "self"}


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Makes a tracker's package of what it does when it is imported, and in each function; it runs in ``tmp_path``."""
    monkeypatch.syspath_prepend(tmp_path)

    def make(package="wandb", begin="", **does):
        functions = (f"    def {name}({taken}): {does.get(name, 'pass')}" for name, taken in SIGNATURES.items())
        lines = ["import json, os, signal, threading", f"os.chdir({str(tmp_path)!r})", begin, "class init:", *functions]
        (tmp_path / f"{package}.py").write_text("\n".join(lines))

    return make


FAULTS: dict[str, tuple[dict[str, str], str, str]] = {
    "import": ({"begin": "raise ImportError('no libfoo')"}, "ended with status 1", "ImportError: no libfoo"),
    "log": ({"log": "1 / 0"}, "ended with status 1", "ZeroDivisionError: division by zero"),
    "finish": ({"finish": "print('no disk'); raise SystemExit(3)"}, "ended with status 3", "no disk"),
    "hangs": (
        {"begin": "import subprocess",
         "__init__": "print(subprocess.Popen(['sleep', '1000']).pid, file=open('started', 'w'), flush=True)",
         "finish": "print('waiting', flush=True); threading.Event().wait()"},
        "not finished 5 s after the last step", "waiting",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("fault", "close_seconds"), [(fault, 5.0 if fault == "hangs" else 100.0) for fault in FAULTS])
def test_a_tracker_that_fails_is_one_warning(text, tmp_path, fault, fake, caplog):
    how, expected, last = FAULTS[fault]
    fake(**how)
    began = time.monotonic()
    with caplog.at_level(logging.WARNING, trackers.__name__):
        rows = _train(text, tmp_path / "run", 2, tracker=("wandb",), **RUN)
    assert len(rows) == 6 and time.monotonic() - began < 60
    (warning,) = [record.getMessage() for record in caplog.records if record.name == trackers.__name__]
    if fault == "hangs":
        _wait_for_end(int((tmp_path / "started").read_text()))
    said = tmp_path / "run" / "wandb.log"
    assert said.read_text().splitlines()[-1] == last
    assert warning == f"--tracker wandb: {expected}; see {said}; metrics.jsonl has every step"


@pytest.fixture
def hanging(tmp_path, fake):
    """A pipe that a wandb writes its process id to, which does not come back from its end."""
    orphan = "import __main__; __main__.ORPHAN_SECONDS = 2.0"  # of the process of the tracker
    told = "print(os.getpid(), file=open('pid', 'w'), flush=True)"
    fake(begin=orphan, __init__=told, finish="threading.Event().wait()")
    os.mkfifo(tmp_path / "pid")
    pipe = os.open(tmp_path / "pid", os.O_RDONLY | os.O_NONBLOCK)
    yield pipe
    os.close(pipe)


def _tracker(pipe: int) -> int:
    assert select.select([pipe], [], [], 60)[0], "the tracker has not begun"
    return int(os.read(pipe, 100))


@needs_mpirun
def test_a_tracker_that_hangs_does_not_delay_an_error(text, tmp_path, hanging):
    """It is said before the other ranks, which leave that to rank 0, end the job."""
    flags = ["--data", text, "--out", tmp_path / "run", "--steps=50", "--eval-every=0", "--tracker=wandb"]
    command = [MPIRUN, "-n", "2", sys.executable, "-m", "kos.train", *SHAPE, *flags, "--lr=1e30", "--grad-clip=0"]
    env = ENVIRONMENT | {"PYTHONPATH": f"{tmp_path}:{ENVIRONMENT['PYTHONPATH']}"}
    done = run_program(*map(str, command), env=env)
    os.kill(_tracker(hanging), signal.SIGKILL)
    assert "kos: error: step " in done.stderr and "expected a finite" in done.stderr, done.stderr


def test_a_tracker_that_nobody_waits_for_ends(tmp_path, hanging):
    (tmp_path / METRICS).touch()
    started = trackers.start(["wandb"], tmp_path, 0, {"config": {}})
    tracker = _tracker(hanging)
    trackers.close(started, wait=False)
    _wait_for_end(tracker)


def _wait_for_end(pid: int) -> None:
    limit = time.monotonic() + 60
    while _runs(pid):
        assert time.monotonic() < limit, os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    """Whether a process is there, other than as a zombie that nobody reaps."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("close_seconds", [5.0])
def test_trackers_are_waited_for_together(tmp_path, fake, caplog):
    """One that hangs takes no time from another."""
    fake(begin="threading.Event().wait()")
    fake("other", finish="open('done', 'w').close()")
    (tmp_path / METRICS).touch()
    trackers.close(trackers.start(["wandb", "other"], tmp_path, 0, {"config": {}}))
    assert (tmp_path / "done").exists()
    assert [record.getMessage().split(";")[0] for record in caplog.records] == [
        "--tracker wandb: not finished 5 s after the last step"
    ]


def test_only_numbers_that_are_there_go_to_a_tracker(tmp_path, fake):
    """Of steps after the start, as soon as their lines are whole. A norm that is not finite is left out; a signal to
    the whole job does not end the tracker."""
    note = "os.kill(os.getpid(), signal.SIGTERM); print(step, values, file=self.file)"
    fake("wandb", __init__="self.file = open('said', 'w')", log=note, finish="self.file.close()")
    first = MetricsLog(tmp_path / METRICS)
    first.write({"step": 6, "loss": 2.5})
    started = trackers.start(["wandb"], tmp_path, 6, {"config": {}})
    first.write({"step": 7, "loss": 1.5, "grad_norm": float("inf"), "skipped": True})
    with first.path.open("a") as file:
        file.write('{"step": 8, "lo')
        file.flush()
        time.sleep(2 * trackers.LOOK_EVERY)
        file.write('ss": 0.5}\n')
    trackers.close(started)
    assert (tmp_path / "said").read_text() == "7 {'loss': 1.5, 'skipped': 1.0}\n8 {'loss': 0.5}\n"


def test_what_wandb_is_told(tmp_path, fake):
    """A run that goes on has its id and name again; a new one in its folder has another id."""
    fake("wandb", __init__="print(json.dumps(options), file=open('told', 'a'))")
    (tmp_path / METRICS).touch()
    for start in (0, 3, 0):
        trackers.close(trackers.start(["wandb"], tmp_path, start, {"config": {"steps": 9}, "gpus": []}))
    first, again, new = map(json.loads, (tmp_path / "told").read_text().splitlines())
    assert first == again and first["config"] == {"steps": 9, "gpus": []}
    assert (first["project"], first["resume"]) == ("kos", "allow")
    assert (first["name"], first["dir"], first["allow_val_change"]) == (tmp_path.name, str(tmp_path), True)
    assert first["id"] != new["id"] and len(first["id"]) == 8
