"""``--tracker``: TensorBoard, Weights & Biases and Trackio, beside ``metrics.jsonl``.

A tracker is two functions: ``log(values, step=)`` for each row, and ``close()``. They run in a process of their own, to
which the run sends rows. So imports, threads, signal and exit handlers, and the network neither delay nor end the run.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import importlib.util
import json
import logging
import os
import queue
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kos.errors import ConfigError, install
from kos.files import replace_file
from kos.train.tools.metrics import as_line

PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb", "trackio": "trackio"}
"""Trackers and what they import. tensorboardX writes the files; unlike tensorboard it needs no web server to do so."""

ID = ".tracker-id"
CLOSE_SECONDS = 20.0
"""How long the end of a run waits for its trackers."""
ORPHAN_SECONDS = 60.0
"""How long a tracker continues after its input has ended: a run that failed does not wait for its tracker."""

PIPE_BYTES = 1 << 20
"""Of rows that a tracker has not taken yet; it takes them from its start on."""

_log = logging.getLogger(__name__)


def tensorboard(name: str, out: Path, about: Mapping[str, Any]) -> tuple[Callable[..., Any], Callable[[], Any]]:
    """Event files in ``tensorboard`` of the run's folder. A resumed run hides the steps that it repeats."""
    from tensorboardX import SummaryWriter

    start, own = about["start"], f".{time.time_ns()}"  # else a run within a second writes into the same file
    writer = SummaryWriter(str(out / name), purge_step=start + 1, flush_secs=5, filename_suffix=own)
    writer.add_text("config", f"```json\n{json.dumps(about['config'], indent=2)}\n```", start)
    return lambda values, step: [writer.add_scalar(key, value, step) for key, value in values.items()], writer.close


def wandb(name: str, out: Path, about: Mapping[str, Any]) -> tuple[Callable[..., Any], Callable[[], Any]]:
    """A run of wandb, or of trackio, which has wandb's functions. Their environment variables say where and how."""
    options: dict[str, Any] = {"project": os.environ.get(f"{name.upper()}_PROJECT", "kos"), "config": about["config"]}
    options["name"] = f"{out.name}-{about['id']}"  # by which trackio finds a run again
    if name == "wandb":
        options |= {"name": os.environ.get("WANDB_NAME", out.name), "id": about["id"], "allow_val_change": True}
        options["dir"] = os.environ.get("WANDB_DIR", str(out))
    run = importlib.import_module(name).init(resume="allow", **options)
    return run.log, run.finish


class Tracker:
    """The trainer's end of a tracker. A failure there causes one warning."""

    def __init__(self, name: str, out: Path, about: Mapping[str, Any]) -> None:
        self._name, self._messages, self._failed = name, out / f"{name}.log", False
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        words = [sys.executable, "-P", "-m", __name__, name, str(out), json.dumps(about)]
        with self._messages.open("wb") as log:
            self._process = subprocess.Popen(words, 0, None, subprocess.PIPE, log, log, env=env, start_new_session=True)
        assert self._process.stdin is not None
        self.rows = self._process.stdin
        with contextlib.suppress(AttributeError, OSError):  # not Linux, or a user with many pipes: it holds less
            fcntl.fcntl(self.rows, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        os.set_blocking(self.rows.fileno(), False)  # a tracker that is stopped delays no step

    def log(self, row: Mapping[str, Any]) -> None:
        try:
            os.write(self.rows.fileno(), b"" if self._failed else as_line(row).encode())
        except OSError as error:
            self._fail(f"takes no rows: {error.strerror}")

    def wait(self, limit: float) -> None:
        """Until the tracker has ended. ``limit`` is the time of ``time.monotonic`` at which it is killed."""
        try:
            if (status := self._process.wait(max(0, limit - time.monotonic()))) and not self._failed:
                self._fail(f"ended with status {status}")
        except subprocess.TimeoutExpired:
            self._fail(f"not finished {CLOSE_SECONDS:g} s after the last step")

    def _fail(self, what: str) -> None:
        self._failed = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # with the processes that it started
        _log.warning("--tracker %s: %s; see %s; metrics.jsonl has every step", self._name, what, self._messages)


def check(names: Sequence[str]) -> None:
    """ConfigError if the package of a tracker is not installed."""
    for name in names:
        found = importlib.util.find_spec(PACKAGES[name])
        if found is None or found.origin is None:  # as of a folder of that name, which wandb makes for its files
            raise ConfigError(f"--tracker {name}: expected the package {PACKAGES[name]} ({install(name)}), got none")


def start(names: Sequence[str], out: Path, start: int, description: Mapping[str, Any]) -> list[Tracker]:
    """The trackers of the run in ``out``, which begins after step ``start``: the same run again where that is not 0."""
    path = out / ID
    if names and (start == 0 or not path.exists()):
        replace_file(path, secrets.token_hex(4).encode())
    config = {**description["config"], **{key: value for key, value in description.items() if key != "config"}}
    return [Tracker(name, out, {"id": path.read_text(), "start": start, "config": config}) for name in names]


def close(trackers: Sequence[Tracker], wait: bool = True) -> None:
    """End the rows of all trackers. ``wait``: wait until they have ended, at most ``CLOSE_SECONDS``."""
    limit = time.monotonic() + CLOSE_SECONDS
    for tracker in trackers:
        tracker.rows.close()
    for tracker in trackers if wait else ():
        tracker.wait(limit)


def _read(rows: queue.SimpleQueue[str]) -> None:
    """Take rows even while the tracker starts or hangs, and end this process some time after the last one."""
    for line in sys.stdin:
        rows.put(line)
    rows.put("")
    time.sleep(ORPHAN_SECONDS)
    os.killpg(0, signal.SIGKILL)  # with the processes that the tracker started


def main(name: str, folder: str, settings: str) -> None:
    """The process of a tracker, until its input ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):  # these stop the run, which still sends rows
        signal.signal(number, signal.SIG_IGN)
    rows = queue.SimpleQueue[str]()
    threading.Thread(target=_read, args=[rows], daemon=True).start()
    log, close = (tensorboard if name == "tensorboard" else wandb)(name, Path(folder), json.loads(settings))
    for row in map(json.loads, iter(rows.get, "")):
        step = row.pop("step")
        log({key: float(value) for key, value in row.items() if value is not None}, step=step)
    close()


if __name__ == "__main__":
    main(*sys.argv[1:])
