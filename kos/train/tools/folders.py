"""Where a run lives: ``--out``, or a folder under ``runs/`` that no other run has."""

from __future__ import annotations

import contextlib
import itertools
import os
from pathlib import Path

from kos.errors import ConfigError
from kos.train.config.options import TrainConfig

RUNS = Path("runs")


def run_folder(config: TrainConfig) -> Path:
    """``config.out``, or the first free of ``runs/PRESET``, ``runs/PRESET-2``, …, which is then made.

    With ``--resume auto`` the last that has checkpoints. To be called on one rank.
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
        raise ConfigError(f"--out {RUNS}: expected a folder that can be written, got {error}") from error


def check_folder(out: Path, rank: int) -> None:
    """ConfigError if ``rank`` can neither write into ``out`` and its ``checkpoints`` nor make them. Creates none."""
    places = out / "checkpoints", out, *out.absolute().parents
    existing = next(folder for folder in places if os.path.lexists(folder))
    if not existing.is_dir():
        got = f"{existing}, which is not a folder"
    elif not os.access(existing, os.W_OK | os.X_OK):
        got = f"no permission to write into {existing}"
    else:
        return
    where = f" on rank {rank}" if rank else ""
    raise ConfigError(f"--out {out}: expected a folder that can be written, got {got}{where}")
