"""Where a run lives: ``--out``, or a folder under ``runs/`` that no other run has."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

from kos.errors import ConfigError
from kos.train.config import TrainConfig

RUNS = Path("runs")


def run_folder(config: TrainConfig) -> Path:
    """``config.out``, or the first free of ``runs/PRESET``, ``runs/PRESET-2``, …, which is then made.

    With ``--resume auto`` the last that has checkpoints. To be called on one rank.
    """
    if config.out is not None:
        return config.out
    try:
        if config.resume == "auto":
            return _last(config.preset)
        return _claim(config.preset)
    except OSError as error:
        raise ConfigError(f"--out {RUNS}: expected a folder that can be written, got {error}") from error


def _folders(preset: str) -> Iterator[Path]:
    return (RUNS / (preset if number == 1 else f"{preset}-{number}") for number in itertools.count(1))


def _claim(preset: str) -> Path:
    for folder in _folders(preset):
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        return folder
    raise AssertionError("itertools.count ended")


def _last(preset: str) -> Path:
    taken = list(itertools.takewhile(Path.exists, _folders(preset)))
    begun = [folder for folder in taken if (folder / "checkpoints").is_dir()]
    return (begun or taken or [next(_folders(preset))])[-1]
