"""The folder of a run, and its lock: ``--out``, or a folder under ``runs/`` that no other run uses."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import secrets
import tempfile
import time
from pathlib import Path
from typing import TextIO

from kos.comm.communicator import Communicator
from kos.errors import ConfigError, SettingError
from kos.train.config.options import TrainConfig
from kos.train.parallel.failures import alone, together

RUNS = Path("runs")
LOCK = ".lock"
SEEN_SECONDS = 5.0
"""How long a rank waits for a file that rank 0 has written: a network file system may show it late."""


def run_folder(config: TrainConfig) -> Path:
    """``config.out``, or the first free of ``runs/PRESET``, ``runs/PRESET-2``, …, which is then made.

    With ``--resume auto`` it is the last one that has checkpoints. Call it on one rank.
    """
    if config.out is not None:
        return config.out
    first = RUNS / config.preset
    folders = itertools.chain([first], (RUNS / f"{config.preset}-{number}" for number in itertools.count(2)))
    try:
        if config.resume == "auto":
            taken = list(itertools.takewhile(Path.exists, folders)) or [first]
            return next((folder for folder in reversed(taken) if (folder / "checkpoints").is_dir()), taken[-1])
        while True:
            folder = next(folders)
            with contextlib.suppress(FileExistsError):
                folder.mkdir(parents=True)
                return folder
    except OSError as error:
        raise unwritable(RUNS, error) from error


def unwritable(out: Path, got: object) -> ConfigError:
    return SettingError(f"--out {out}", "a folder that can be written", got)


def check_folder(out: Path, rank: int) -> None:
    """ConfigError if ``rank`` cannot write to ``out`` and ``out/checkpoints``, or create them. Leaves no files there.

    It tries to write: for root, on a network file system or in /proc, ``os.access`` may be wrong.
    """
    places = out / "checkpoints", out, *out.absolute().parents
    present = (folder for folder in places if os.path.lexists(folder))
    for folder in itertools.islice(present, 1 + os.path.lexists(places[0])):
        try:
            with tempfile.TemporaryFile(dir=folder):
                continue
        except OSError as error:
            refused = f"no new file in {folder} ({error.strerror})"
            got = refused if folder.is_dir() else f"{folder}, which is not a folder"
            where = f" on rank {rank}" if rank else ""
            raise unwritable(out, f"{got}{where}") from error


def lock_folder(out: Path, held: contextlib.ExitStack, name: str = "") -> None:
    """Lock ``out`` until ``held`` closes, and write the name of this run to the lock file, by default a random one.

    Raises ConfigError if another run holds the lock.
    """
    lock = held.enter_context((out / LOCK).open("a"))
    _take(lock, out)
    lock.truncate(0)
    lock.write(name or secrets.token_hex(8))
    lock.flush()


def check_unlocked(out: Path) -> None:
    """ConfigError if another run holds the lock of ``out``, without taking it."""
    with contextlib.suppress(OSError), (out / LOCK).open("r+") as lock:
        _take(lock, out)


def _take(lock: TextIO, out: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        busy = f"--out {out}: expected a free folder, got one that a run is writing to"
        raise ConfigError(busy).about("out") from error


def check_shared(out: Path, comm: Communicator) -> str:
    """The run's name in the lock file. Raises ConfigError on all ranks if one of them sees another folder, or none."""
    name = alone(comm, (out / LOCK).read_text)

    def check() -> None:
        limit, got = time.monotonic() + SEEN_SECONDS, ""
        while got != name:
            try:
                got = (out / LOCK).read_text()
            except OSError as error:
                got = str(error)
            time.sleep(0.01)
            if got != name and time.monotonic() > limit:
                expected = "expected a folder that all ranks share: each writes its part of a checkpoint"
                raise ConfigError(f"--out {out}: {expected}; on rank {comm.rank} got {got or 'another'}").about("out")

    together(comm, check)
    return name
