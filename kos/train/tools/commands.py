"""Commands that a run prints, to be run in the folder where it was started."""

from __future__ import annotations

import importlib.util
import os
import shlex
import sys
from pathlib import Path

from kos.comm.control import mpi_job
from kos.comm.control.identity import under_mpirun
from kos.commands import mpirun, near, python, several_programs
from kos.train.config.options import TrainConfig, flag_of


def resume(out: Path, ranks: int, *flags: str) -> str:
    """The command that continues from the newest checkpoint in ``out``, whose ``config.json`` has the settings.

    It is the command of each rank if mpirun has not started the ranks, or has started them as several programs.
    """
    words = [python(), "-m", "kos.train", "--config", str(out / "config.json"), "--resume", "auto", *flags]
    if _by_mpirun() and not several_programs():
        words = [*mpirun(ranks), *words]
    elif ranks > 1:
        return f"start the {ranks} ranks as before, with: {shlex.join(words)}"
    return shlex.join(words)


def mpirun_ends_all() -> bool:
    """Whether mpirun has started this rank, and ends all ranks when one is lost."""
    return _by_mpirun() and not mpi_job.fault_tolerant() and "--enable-recovery" not in mpirun(1)


def _by_mpirun() -> bool:
    by_srun = "SLURM_PROCID" in os.environ and "OMPI_COMM_WORLD_SIZE" not in os.environ
    return under_mpirun() and not by_srun


def more_steps(out: Path, ranks: int, config: TrainConfig) -> str:
    """The command for as many steps again. A learning rate that has decayed stays where it is. A warm-up continues."""
    rate, flags = config.learning_rate(), ["--steps", str(2 * config.steps)]
    if config.epochs is not None:
        flags = ["--epochs", str(2 * config.epochs)]
    if 0 < (last := rate(config.steps)) < config.lr and config.steps >= rate.warmup_steps:
        flags += ["--schedule", "constant", "--lr", f"{last:g}", "--warmup-steps", "0"]
    return resume(out, ranks, *flags)


def sample(out: Path, config: TrainConfig) -> str:
    """The command that samples text from the run in ``out``, with the settings of this run."""
    asked = {name: getattr(config, name) for name in ("prompt", "temperature", "top_k")}  # whose defaults are the same
    given = [(name, value) for name, value in asked.items() if value != TrainConfig.model_fields[name].default]
    flags = [f"{flag_of(name)}={value}" for name, value in given]  # the value may begin with a dash
    return shlex.join([*_kos_command(), "sample", str(out), *flags])


def plot(out: Path) -> str | None:
    """The command that plots the metrics of the run in ``out``; None without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        return None
    return shlex.join([*_kos_command(), "plot", str(out)])


def _kos_command() -> list[str]:
    """The command ``kos``: its script beside this Python, or the module if no script is installed."""
    script = Path(sys.executable).with_name("kos")
    return [near(script)] if sys.executable and script.exists() else [python(), "-m", "kos"]
