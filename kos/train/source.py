"""Where a run begins: at one of its checkpoints, at a folder of weights, or at weights that are drawn."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import kos
from kos.comm.communicator import Communicator
from kos.errors import CheckpointError, RendezvousError
from kos.train import checkpoint
from kos.train.checkpoint import adapter, huggingface, resume
from kos.train.checkpoint.resume import Residuals, data_settings, saved_residuals, warn_of_residuals
from kos.train.config.options import TrainConfig
from kos.train.data.batches import Dataset, load_data
from kos.train.data.own import own_data
from kos.train.folder import check_free, check_unlocked, read_kept_files
from kos.train.model import peft
from kos.train.model.families import resolve
from kos.train.model.huggingface import read_config
from kos.train.parallel.failures import PATIENCE, Left, Stopped, alone, gather_json, together
from kos.train.tools import trackers


class Source(NamedTuple):
    """Where a run begins.  Without a ``path``, its weights are drawn."""

    path: str | None
    """The folder of a checkpoint, or one in Hugging Face's format."""
    step: int = 0
    """The step of the checkpoint."""
    saved_step: int = -1
    """``step`` if the checkpoint is in the run's own folder, else -1."""
    is_checkpoint: bool = False
    data_settings: Mapping[str, Any] | None = None
    """The settings by which the run that saved the checkpoint reads its data."""
    updates: int = 0
    """How many of these steps were not skipped."""


def find_source(run: Any) -> Source:
    """Where the run begins.

    Settings that the checkpoint alone shows to be wrong are refused here, before any data are read.
    """
    config = run.config
    check_unlocked(run.out)
    trackers.check(config.tracker)
    run.found = resume.find(config, run.checkpoints, run.console.progress)
    if run.found is None and config.resume:
        run.console.say(f"no checkpoint in {run.checkpoints}: starting a new run")
    today = {"template_date": f"{date.today()}"}
    if run.found is None:
        check_free(run, 0, -1)
        if config.init_from is not None:
            huggingface.check_weights(base := peft.base_of(Path(config.init_from)))
            for folder in {Path(config.init_from): None, base: None}:
                checkpoint.compare_weights(folder, run.console.progress)
        return Source(config.init_from, data_settings=today)
    path, step, _, updates = run.found
    saved_step = step if path.parent.resolve() == run.checkpoints.resolve() else -1
    check_free(run, step, saved_step)
    resume.check_optimizer(run.found, config)
    resume.check_order(run.found, config)
    theirs = read_config(path)
    resume.check_model(path, theirs, resolve(config.model, theirs.vocab_size, config.seq_len))
    updates = resume.warn_of_updates(run.found) if updates is None else updates
    return Source(str(path), step, saved_step, True, today | resume.data_settings(run.found.config), updates)


def check_source(run: Any) -> None:
    """Check that the weights fit the run, and read the files that checkpoints keep."""
    read_kept_files(run)
    if run.source is None:
        return
    source = Path(run.source)
    resume.check_tokenizer(source, run.data.tokenizer)
    if run.found is not None:
        resume.check_data(run.found, run.config, run.data.fingerprint)
        resume.check_packing(run.found, run.config, run.description)
        resume.check_adapters(run.found, run.config, run.model_config, run.base)
        resume.check_frozen(run.found, run.config, run.model_config)
        resume.warn_of_changes(run.found, run.config, run.description)
    of_model = source if run.base is None else Path(run.base["path"])
    resume.check_model(of_model, read_config(of_model), run.model_config.base)
    if run.found is not None:
        warn_of_residuals(source, _residuals(run, source), run.config, run.mesh.replicas.size)


def load_weights(run: Any) -> None:
    """Give the device its weights: of the ``source`` each rank reads its part; or all draw them together."""

    @run.stop.at_once()
    def begin() -> None:
        if run.source is None:
            return run.device.draw_weights()
        path, model = Path(run.source), run.model_config
        if run.base is not None and not peft.is_folder(path):
            return run.device.draw_weights(run.base_weights())
        shapes, kept = model.parameter_shapes(), run.config.state_of(model)
        if not path.is_dir():
            got = f"got none on rank {run.comm.rank}"
            raise CheckpointError(f"{path}: expected a folder that all ranks see, {got}")
        state = checkpoint.state_files(path, shapes, kept) if run.resumes else None
        residual = _residuals(run, path) if run.resumes else None
        weights: Any = adapter.files_of(path, model) if run.base else huggingface.weight_files(path, shapes)
        weights = adapter.Joined(run.base_weights(), weights) if run.base else weights
        run.device.read(weights, state, run.start, residual, run.updates)

    together(run.comm, begin)
    run.console.close()


def _residuals(run: Any, path: Path) -> Residuals | None:
    """What this rank gets of the residuals in a checkpoint."""
    replicas, every = run.mesh.replicas, run.model_config.parameter_shapes()
    shapes = {name: every[name] for group in run.config.trained_groups(run.model_config) for name in group.names}
    return saved_residuals(path, shapes, run.config, replicas.rank, replicas.size, run.mesh.exact(run.config.device))


def read_data(run: Any) -> Dataset:
    """Read the data.  One rank of each machine prepares it, and the others read the result."""
    # Of a resumed run the checkpoint's: the folder of ``init_from`` may be gone.
    initialized = run.resumes and (run.custom_batches or run.config.init_from is not None)
    weights = run.source if initialized else adapter.tokenizer_folder(run.config.init_from)
    if run.custom_batches:
        return together(run.comm, lambda: own_data(run.config, weights))
    first = run.comm.local_rank == 0
    runs = [Path(str(run.source)).parent.parent] if run.resumes else []  # with the plan that it began with

    @run.stop.at_once()
    def load() -> Dataset:
        return load_data(run.config, run.console.progress, weights, runs)

    try:
        data = together(run.comm, lambda: load() if first else None)
    finally:
        run.console.close()
    return together(run.comm, lambda: data or load())


def state_of_batches(run: Any) -> dict[str, Any]:
    """What a checkpoint keeps of the program's batches: ``OwnBatches.rows``, and a state for each rank of dp."""
    if not run.custom_batches or (mine := run.own.state()) is None:
        return {}
    every, layout = gather_json(run.comm, mine), run.mesh.layout
    return {"batches": [run.own.rows, [every[layout.rank({"dp": dp})] for dp in range(layout.dp)]]}


def load_state_of_batches(run: Any) -> None:
    """Continue with the batches after those of the checkpoint."""
    if run.custom_batches and run.resumes:
        saved = alone(run.comm, lambda: run.found and run.found.config.get("batches"))
        together(run.comm, lambda: run.own.load_state(saved, run.mesh.dp.rank, run.mesh.dp.size))


# --- a process that joins a run (``kos train --join``) ----------------------------------------------------

LOOK_EVERY = 0.05  # seconds between two looks for the file of a run that has not begun


def _as_the_run_reads(config: TrainConfig) -> tuple[TrainConfig, list[Path]]:
    """The settings with those by which the run reads its data, and its folder, if ``--join`` names a file in there.

    A run that was resumed may read them otherwise than one that begins with the same flags.
    """
    where, about = Path(str(config.join)), None
    runs = [where.parent] if os.sep in str(config.join) or where.is_file() else []
    for folder in runs:
        with suppress(OSError, ValueError):  # the run has not begun
            about = json.loads((folder / "config.json").read_text("utf-8"))
    return config.with_data_settings(about and data_settings(about)), runs


def join_run(run: Any) -> None:
    """Join the run at ``config.join``, whose ranks have the weights and the state.

    The process reads the settings and the data before it calls the run, so that the ranks of the run wait as short as
    possible. They admit it between two steps, and send it the state of the run (``kos.train.elastic``).
    Raises ConfigError if its settings or data differ from those of the run, RendezvousError if the run does not admit
    it, and Left if it was asked to stop before.
    """
    config = run.config
    try:
        with run.stop.at_once():
            weights = adapter.tokenizer_folder(config.init_from)
            run.config, runs = _as_the_run_reads(config)
            if run.custom_batches:
                run.data = own_data(config, weights)
            else:
                run.data = load_data(run.config, run.console.progress, weights, runs)
            run.base = adapter.find_base(config.lora, config.init_from)
        run.model_config = config.model_config_for(run.data.tokenizer.vocab_size)
        run.console.close()
        run.comm = _call(run)
    except Stopped as stopped:
        raise Left("left before it joined the run, as asked") from stopped
    run.stop.leaves = True


def _call(run: Any) -> Communicator:
    """Wait until the run admits this rank, or ends.  The address file exists as long as the run."""
    where, timeout, limit = str(run.config.join), run.config.timeout, time.monotonic() + PATIENCE
    if os.sep in where and not os.path.isfile(where):
        run.console.say(f"waiting for {where}, which a run with --elastic writes")
        with run.stop.at_once():
            while not os.path.isfile(where) and time.monotonic() < limit:
                time.sleep(LOOK_EVERY)
    while True:
        began = time.monotonic()
        try:
            with run.stop.at_once():
                return kos.join(where, timeout=timeout)
        except RendezvousError:
            refused = time.monotonic() - began < timeout  # else nobody has answered
            if refused or not os.path.isfile(where) or time.monotonic() > limit:
                raise
