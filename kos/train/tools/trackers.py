"""``--tracker``: TensorBoard, Weights & Biases and Trackio, beside ``metrics.jsonl``.

Each tracker runs in a process of its own, which reads the rows that the run adds to ``metrics.jsonl``. So its imports,
threads, signal handlers and network neither delay nor end the run. The end of its standard input is the end of the run.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import os
import secrets
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kos.errors import ConfigError, install
from kos.files import replace_file
from kos.train.tools.metrics import METRICS

PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb", "trackio": "trackio"}
"""Trackers and what they import. tensorboardX writes the files; unlike tensorboard it needs no web server to do so."""

ID = ".tracker-id"
LOOK_SECONDS = 0.5
"""How often a tracker looks for new rows."""
CLOSE_SECONDS = 20.0
"""How long the end of a run waits for its trackers."""
ORPHAN_SECONDS = 60.0
"""How long a tracker continues after its input has ended: a run that failed does not wait for its tracker."""

_log = logging.getLogger(__name__)


class TensorBoard:
    """Event files in ``tensorboard`` of the run's folder. A resumed run hides the steps that it repeats."""

    def __init__(self, out: Path, about: Mapping[str, Any]) -> None:
        from tensorboardX import SummaryWriter

        start = about["start"]
        own = f".{time.time_ns()}"  # else a run that starts within a second writes into the same file
        self._writer = SummaryWriter(str(out / "tensorboard"), purge_step=start + 1, flush_secs=5, filename_suffix=own)
        self._writer.add_text("config", f"```json\n{json.dumps(about['config'], indent=2)}\n```", start)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class Service:
    """A run of wandb or trackio, whose calls are alike. Their environment variables choose mode, project and place."""

    def __init__(self, name: str, out: Path, about: Mapping[str, Any]) -> None:
        options: dict[str, Any] = {"config": about["config"], "resume": "allow"}
        if name == "wandb":
            options |= {"id": about["id"], "name": os.environ.get("WANDB_NAME", out.name), "allow_val_change": True}
            options["dir"] = os.environ.get("WANDB_DIR", str(out))
        else:  # trackio finds a run again by its name
            options["name"] = f"{out.name}-{about['id']}"
        project = os.environ.get(f"{name.upper()}_PROJECT", "kos")
        self._run = importlib.import_module(name).init(project=project, **options)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


def check(names: Sequence[str]) -> None:
    """ConfigError if the package of a tracker is not installed."""
    for name in names:
        found = importlib.util.find_spec(PACKAGES[name])
        if found is None or found.origin is None:  # as of a folder of that name, which wandb makes for its files
            raise ConfigError(f"--tracker {name}: expected the package {PACKAGES[name]} ({install(name)}), got none")


def start(names: Sequence[str], out: Path, start: int, description: Mapping[str, Any]) -> list[TrackerProcess]:
    """The trackers of the run in ``out``, which begins after step ``start``: the same run again where that is not 0."""
    if not names:
        return []
    path = out / ID
    if start == 0 or not path.exists():
        replace_file(path, secrets.token_hex(4).encode())
    config = {**description["config"], **{key: value for key, value in description.items() if key != "config"}}
    about = {"id": path.read_text(), "start": start, "config": config, "bytes": (out / METRICS).stat().st_size}
    return [TrackerProcess(name, out, about) for name in names]


def close(processes: Sequence[TrackerProcess], wait: bool = True) -> None:
    """Notify all trackers that no more rows follow. ``wait``: wait until they have ended, at most ``CLOSE_SECONDS``."""
    limit = time.monotonic() + CLOSE_SECONDS
    for process in processes:
        process.end_rows()
    for process in processes if wait else ():
        process.wait(limit)


class TrackerProcess:
    """The trainer's end of a tracker. A failure there causes one warning."""

    def __init__(self, name: str, out: Path, about: Mapping[str, Any]) -> None:
        self._name, self._messages = name, out / f"{name}.log"
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, "-P", "-m", __name__, name, str(out), json.dumps(about)]
        self._process: subprocess.Popen[bytes] | None = None
        try:
            with open(self._messages, "wb") as messages:
                self._process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=messages, stderr=messages, env=env, start_new_session=True
                )
        except OSError as error:
            self._fail(f"cannot start: {error}")

    def check(self) -> None:
        """Warn if the tracker has ended."""
        if self._process is not None and self._process.poll() is not None:
            self._fail("has ended")

    def end_rows(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()

    def wait(self, limit: float) -> None:
        """Until the tracker has ended. ``limit`` is the time of ``time.monotonic`` at which it is killed."""
        if self._process is None:
            return
        try:
            if self._process.wait(max(0, limit - time.monotonic())):
                self._fail(f"ended with status {self._process.returncode}")
        except subprocess.TimeoutExpired:
            self._fail(f"not finished {CLOSE_SECONDS:g} s after the last step")

    def _fail(self, what: str) -> None:
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with the processes that it started
            process.communicate()
        lines: list[str] = []
        with contextlib.suppress(OSError):
            lines = self._messages.read_text(errors="replace").split("\n")
        last = next((f": {line.strip()[:200]}" for line in reversed(lines) if line.strip()), "")
        _log.warning("--tracker %s: %s%s; see %s; metrics.jsonl has every step", self._name, what, last, self._messages)


def _exit(args: Any) -> None:
    """A thread that fails ends the process: a tracker without its writer would wait forever."""
    sys.__excepthook__(*args[:3])
    os._exit(1)


def _end_in_time() -> None:
    """Kill this process, and those that it started, ``ORPHAN_SECONDS`` after its input ended."""
    end = select.poll()
    end.register(sys.stdin, 0)
    end.poll()
    time.sleep(ORPHAN_SECONDS)
    os.killpg(0, signal.SIGKILL)


def _rows(path: Path, start: int) -> Iterator[dict[str, Any]]:
    """The rows behind byte ``start`` of a file that grows, until this process's input has ended."""
    ended, rest = False, b""
    with path.open("rb") as file:
        file.seek(start)
        while not ended:
            ended = bool(select.select([sys.stdin], [], [], LOOK_SECONDS)[0])
            *lines, rest = (rest + file.read()).split(b"\n")
            yield from map(json.loads, lines)


def main(name: str, folder: str, settings: str) -> None:
    """The process of a tracker, until its input ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):  # these stop the run, which still writes rows
        signal.signal(number, signal.SIG_IGN)
    threading.excepthook = _exit
    threading.Thread(target=_end_in_time, daemon=True).start()
    out, about = Path(folder), json.loads(settings)
    tracker = TensorBoard(out, about) if name == "tensorboard" else Service(name, out, about)
    for row in _rows(out / METRICS, about["bytes"]):
        values = {key: float(value) for key, value in row.items() if key != "step" and value is not None}
        tracker.log(row["step"], values)
    tracker.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
