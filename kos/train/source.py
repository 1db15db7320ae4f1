"""Where a run begins: at one of its checkpoints, at a folder of weights, or at weights that are drawn."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kos.errors import CheckpointError
from kos.train import checkpoint
from kos.train.checkpoint import adapter, huggingface, resume
from kos.train.checkpoint.resume import Residuals, saved_residuals, warn_of_residuals
from kos.train.parallel.failures import together
from kos.train.run_context import RunContext, check_free, check_unlocked, read_kept_files
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


def find_source(run: RunContext) -> Source:
    """Where the run begins.

    Settings that the checkpoint alone shows to be wrong are refused here, before any data are read.
    """
    config = run.config
    check_unlocked(run.out)
    trackers.check(config.tracker)
    run.found = resume.find(config, run.checkpoints, run.console.progress)
    if run.found is None and config.resume:
        run.console.say(f"no checkpoint in {run.checkpoints}: starting a new run")
    if run.found is None:
        check_free(run, 0, -1)
        if config.init_from is not None:
            huggingface.check_weights(base := adapter.base_of(Path(config.init_from)))
            for folder in {Path(config.init_from): None, base: None}:
                checkpoint.compare_weights(folder, run.console.progress)
        return Source(config.init_from)
    path, step, _, updates = run.found
    saved_step = step if path.parent.resolve() == run.checkpoints.resolve() else -1
    check_free(run, step, saved_step)
    resume.check_optimizer(run.found, config)
    resume.check_order(run.found, config)
    theirs = huggingface.read_config(path)
    resume.check_model(path, theirs, config.model.resolve(theirs.vocab_size, config.seq_len))
    updates = resume.warn_of_updates(run.found) if updates is None else updates
    return Source(str(path), step, saved_step, True, resume.data_settings(run.found.config), updates)


def check_source(run: RunContext) -> None:
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
    resume.check_model(of_model, huggingface.read_config(of_model), run.model_config.base)
    if run.found is not None:
        warn_of_residuals(source, _residuals(run, source), run.config, run.mesh.replicas.size)


def load_weights(run: RunContext) -> None:
    """Give the device its weights: of the ``source`` each rank reads its part; or all draw them together."""

    @run.stop.at_once()
    def begin() -> None:
        if run.source is None:
            return run.device.draw_weights()
        path, model = Path(run.source), run.model_config
        if run.base is not None and not adapter.is_folder(path):
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


def _residuals(run: RunContext, path: Path) -> Residuals | None:
    """What this rank gets of the residuals in a checkpoint."""
    replicas, every = run.mesh.replicas, run.model_config.parameter_shapes()
    shapes = {name: every[name] for group in run.config.trained_groups(run.model_config) for name in group.names}
    return saved_residuals(path, shapes, run.config, replicas.rank, replicas.size, run.mesh.exact(run.config.device))
