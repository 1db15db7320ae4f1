"""What rank 0 writes to the folder of a run, besides checkpoints: settings, metrics, trackers, the address to join."""

from __future__ import annotations

import contextlib
import math
import shutil
from pathlib import Path

from kos.errors import ConfigError, SettingError
from kos.files import replace_file
from kos.train.checkpoint import checkpoint
from kos.train.checkpoint.extra_files import read_extra, read_tokenizer_settings
from kos.train.checkpoint.saving import write_json
from kos.train.checkpoint.write_plan import state_shapes
from kos.train.data.tokenizers import HuggingFaceTokenizer
from kos.train.run_context import RunContext
from kos.train.tools import trackers
from kos.train.tools.console import Console
from kos.train.tools.folders import lock_folder, unwritable
from kos.train.tools.metrics import METRICS, MetricsLog, read_metrics

ADDRESS = "address"
"""The file in the folder of an elastic run with the address for ``--join``."""


def check_free(run: RunContext, start: int, saved_step: int) -> None:
    """ConfigError if the folder holds another run than the one that continues from ``start``."""
    left = ["checkpoints"] * bool(checkpoint.steps_in(run.checkpoints))
    left += ["metrics"] * bool(start and read_metrics(run.out / METRICS))
    if left and saved_step < 0:
        expected = "an empty folder, or --resume auto to continue from the checkpoints in it"
        raise SettingError(f"--out {run.out}", expected, f"the {left[0]} of another run", also=["resume"])


def open_output(run: RunContext) -> None:
    """Take the folder for a run that begins. On rank 0."""
    config, out = run.config, run.out
    try:
        check_free(run, run.start, run.saved_step)  # a run may have ended here since the first check
        out.mkdir(parents=True, exist_ok=True)
        lock_folder(out, run.held)
        checkpoint.remove_unfinished(run.checkpoints)
        shapes = run.model_config.parameter_shapes()
        files = [*shapes.values(), *state_shapes(config.state_of(run.model_config), shapes).values()]
        if run.device.step.parallel.residual is not None:
            files += [*shapes.values()] * run.mesh.replicas.size
        needed = sum(4 * math.prod(shape) for shape in files)
        if run.trains and (free := shutil.disk_usage(out).free) < needed:
            run.console.say(f"the first checkpoint does not fit: {out} has {free:,} bytes free of {needed:,}")
        if run.trains or not (out / "config.json").exists():
            write_json(out / "config.json", run.description)
        if config.profile:
            return
        if run.data.packing:
            run.data.packing.write(out)
        if config.elastic is not None:
            publish_address(run)
        _open_metrics(run, run.start)
    except OSError as error:
        raise unwritable(out, error) from error


def take_output(run: RunContext) -> None:
    """Write metrics and checkpoints instead of the rank that was the first; its last row may be missing."""
    run.console = Console(0, run.config.steps)
    with contextlib.suppress(ConfigError):  # it may be stopped, and hold the lock
        lock_folder(run.out, run.held, run.name)
    row, run.row = run.row, None
    _open_metrics(run, run.start if row is None else row["step"] - 1)
    read_kept_files(run)
    if row is not None:
        run.log(row, last=True)


def _open_metrics(run: RunContext, after: int) -> None:
    """Write rows, after those up to step ``after``."""
    run.metrics = MetricsLog(run.out / METRICS, after)
    run.held.callback(run.metrics.close)
    started = trackers.start(run.config.tracker, run.out, after, run.description)

    def close(failed: type[BaseException] | None, *_: object) -> None:
        """A run that failed waits for no tracker: its error comes first."""
        run.stop.plan = "waiting for the trackers, all steps are saved"
        trackers.close(started, wait=failed is None)

    run.held.push(close)


def read_kept_files(run: RunContext) -> None:
    """Read the files that checkpoints keep of the source and of the tokenizer."""
    if run.data.tokenizer.kind == HuggingFaceTokenizer.kind and run.config.tokenizer != "auto":
        run.extra = read_tokenizer_settings(run.config.tokenizer)
    if run.source is not None:
        run.extra = {**run.extra, **read_extra(Path(run.source))}


def publish_address(run: RunContext) -> None:
    """Write where others can join this run to the file ``ADDRESS``, which is there as long as the run."""
    if run.comm.address:
        replace_file(run.out / ADDRESS, run.comm.address.encode())


def remove_address(run: RunContext) -> None:
    """Remove what ``publish_address`` has written, unless others have written theirs."""
    with contextlib.suppress(OSError):
        if (run.out / ADDRESS).read_bytes() == run.comm.address.encode():
            (run.out / ADDRESS).unlink()
