"""``--tracker``: TensorBoard and Weights & Biases, beside ``metrics.jsonl``.

A tracker is two functions: ``log(values, step=)`` for each row, and ``close()``. They run in a process of their own,
which reads that file. So imports, threads, signal and exit handlers, and the network neither delay nor end the run.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import logging
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kos.errors import SettingError, install
from kos.files import replace_file
from kos.train.tools import METRICS

PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb"}
"""Trackers and what they import. tensorboardX writes the files; unlike tensorboard it needs no web server to do so."""

ID = ".tracker-id"
CLOSE_SECONDS = 20.0
"""How long the end of a run waits for its trackers."""
ORPHAN_SECONDS = 60.0
"""How long a tracker continues after its input has ended: a run that failed does not wait for its tracker."""

LOOK_EVERY = 0.5  # seconds between two looks for rows

_log = logging.getLogger(__name__)


def tensorboard(name: str, out: Path, about: Mapping[str, Any]) -> tuple[Callable[..., Any], Callable[[], Any]]:
    """Event files in ``tensorboard`` of the run's folder. A resumed run hides the steps that it repeats."""
    from tensorboardX import SummaryWriter

    start, own = about["start"], f".{time.time_ns()}"  # else a run within a second writes into the same file
    writer = SummaryWriter(str(out / name), purge_step=start + 1, flush_secs=5, filename_suffix=own)
    writer.add_text("config", f"```json\n{json.dumps(about['config'], indent=2)}\n```", start)
    return lambda values, step: [writer.add_scalar(key, value, step) for key, value in values.items()], writer.close


def wandb(name: str, out: Path, about: Mapping[str, Any]) -> tuple[Callable[..., Any], Callable[[], Any]]:
    """A run of wandb. Its environment variables say where and how."""
    run = importlib.import_module(name).init(
        project=os.environ.get("WANDB_PROJECT", "kos"), name=os.environ.get("WANDB_NAME", out.name), id=about["id"],
        config=about["config"], dir=os.environ.get("WANDB_DIR", str(out)), resume="allow", allow_val_change=True,
    )  # fmt: skip
    return run.log, run.finish


class Tracker(NamedTuple):
    """The process of a tracker, whose input ends when there are no more rows, and the file of what it prints."""

    name: str
    messages: Path
    process: subprocess.Popen[bytes]


def check(names: Sequence[str]) -> None:
    """ConfigError if the package of a tracker is not installed."""
    for name in names:
        found = importlib.util.find_spec(PACKAGES[name])
        if found is None or found.origin is None:  # as of a folder of that name, which wandb makes for its files
            raise SettingError(f"--tracker {name}", f"the package {PACKAGES[name]} ({install(name)})", "none")


def start(names: Sequence[str], out: Path, start: int, description: Mapping[str, Any]) -> list[Tracker]:
    """The trackers of the run in ``out``, which begins after step ``start``: the same run again where that is not 0."""
    path = out / ID
    if names and (start == 0 or not path.exists()):
        replace_file(path, secrets.token_hex(4).encode())
    config = {**description["config"], **{key: value for key, value in description.items() if key != "config"}}
    env, started = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}, list[Tracker]()
    for name in names:
        about = json.dumps({"id": path.read_text(), "start": start, "config": config})
        words, messages = [sys.executable, "-P", "-m", __name__, name, str(out), about], out / f"{name}.log"
        with messages.open("wb") as log:
            process = subprocess.Popen(words, 0, None, subprocess.PIPE, log, log, env=env, start_new_session=True)
        started.append(Tracker(name, messages, process))
    return started


def close(trackers: Sequence[Tracker], wait: bool = True) -> None:
    """End the rows of all trackers. ``wait``: wait until they have ended, at most ``CLOSE_SECONDS``.

    One that fails is killed, with one warning.
    """
    limit = time.monotonic() + CLOSE_SECONDS
    for _, _, process in trackers:
        process.stdin.close()  # type: ignore[union-attr]
    for name, messages, process in trackers if wait else ():
        failure = f"not finished {CLOSE_SECONDS:g} s after the last step"
        with contextlib.suppress(subprocess.TimeoutExpired):
            if not (status := process.wait(max(0, limit - time.monotonic()))):
                continue
            failure = f"ended with status {status}"
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # with the processes that it started
        _log.warning("--tracker %s: %s; see %s; metrics.jsonl has every step", name, failure, messages)


def _wait_for_end(over: threading.Event) -> None:
    """Set ``over`` when the input of this process ends, and end the process some time later."""
    sys.stdin.read()
    over.set()
    time.sleep(ORPHAN_SECONDS)
    os.killpg(0, signal.SIGKILL)  # with the processes that the tracker started


def _rows(path: Path, over: threading.Event) -> Iterator[dict[str, Any]]:
    """The rows of a metrics file, with those that are written until ``over``."""
    text, last = "", False
    with path.open() as file:
        while not last:
            last = over.wait(LOOK_EVERY)
            *lines, text = (text + file.read()).split("\n")
            yield from map(json.loads, lines)


def main(name: str, folder: str, settings: str) -> None:
    """The process of a tracker, until its input ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):  # these stop the run, which still writes rows
        signal.signal(number, signal.SIG_IGN)
    about, over = json.loads(settings), threading.Event()
    threading.Thread(target=_wait_for_end, args=[over], daemon=True).start()
    log, close = (tensorboard if name == "tensorboard" else wandb)(name, Path(folder), about)
    for row in _rows(Path(folder, METRICS), over):
        if (step := row.pop("step")) > about["start"]:
            log({key: float(value) for key, value in row.items() if value is not None}, step=step)
    close()


if __name__ == "__main__":
    main(*sys.argv[1:])
