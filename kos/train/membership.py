"""What an elastic run is to its ranks: what a newcomer must have and takes, and what is made again for other ranks."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

from kos.comm.communicator import Communicator
from kos.train.config.options import flag_of, flatten
from kos.train.device.choose import make_device
from kos.train.device.machine import limit_threads
from kos.train.output import publish_address, take_output
from kos.train.parallel.mesh import Mesh
from kos.train.run_context import RunContext
from kos.train.tools.console import Console
from kos.train.tools.metrics import METRICS, read_metrics

PATHS = {"out", "resume", "init_from", "data", "val_data", "tokenizer", "join"}
"""Settings that may differ between ranks."""

CHOSEN = {"micro_batch_size", "device", "dtype", "grad_dtype", "elastic", "steps", "fit"}
"""Settings that the run has chosen, and a newcomer takes."""

NO_NUMBERS = {
    "preset", "backend", "sample_tokens", "prompt", "temperature", "top_k", "save_every", "keep", "save_async",
    "log_every", "tracker", "recompute", "graph", "debug", "timeout",
}  # fmt: skip
"""Settings that do not affect results: a newcomer takes them from the run too."""


def facts_of(run: RunContext) -> dict[str, Any]:
    """What a newcomer is told of the run, of JSON's types."""
    return {
        "settings": run.asked, "chosen": run.config.to_json(), "out": str(run.out), "source": run.source,
        "data": run.data_in_words, "name": run.name, "row": run.row,
        "start": run.start, "skipped": sorted(run.skipped), "last_finite": run.last_finite,
        "description": run.description,
    }  # fmt: skip


def misfit(newcomer: RunContext, facts: dict[str, Any]) -> str:
    """Why a newcomer's settings or data differ from the run's ``facts``, or ""."""
    mine, theirs = flatten("", newcomer.asked), flatten("", facts["settings"])
    mine["data in words"], theirs["data in words"] = newcomer.data_in_words, facts["data"]
    for name in mine:
        if name not in PATHS | CHOSEN | NO_NUMBERS and mine[name] != theirs.get(name):
            flag = flag_of(name.partition(" ")[0])
            return f"{flag}: expected {theirs.get(name)}, which the run has, got {mine[name]}"
    return ""


def take_facts(newcomer: RunContext, facts: dict[str, Any]) -> None:
    """Use the settings in ``facts``."""
    newcomer.asked, chosen = facts["settings"], facts["chosen"]
    chosen["tracker"] = tuple(chosen["tracker"])  # JSON has only lists
    newcomer.config = newcomer.config.model_copy(update={name: chosen[name] for name in CHOSEN | NO_NUMBERS})
    newcomer.out, newcomer.skipped = Path(facts["out"]), set(facts["skipped"])
    for name in ("source", "name", "row", "start", "last_finite", "description"):
        setattr(newcomer, name, facts[name])
    newcomer.console = Console(newcomer.comm.rank, newcomer.config.steps)


def move_to(run: RunContext, comm: Communicator, epoch: int) -> None:
    """Make again what depends on the ranks, which are those of ``comm`` now; weights come later. Collective."""
    if hasattr(run, "device"):  # else a rank was lost while it was made
        run.device.close(failed=True)
        del run.device
        if run.config.device == "cuda":  # whose memory is too small for two
            gc.collect()
    before, run.config = run.config, run.config.for_world(comm.size, run.config.device)
    if run.config.grad_dtype != before.grad_dtype:
        run.console.say(f"gradients are {run.config.grad_dtype} from now on: ranks add up several micro-batches")
    run.mesh = Mesh(comm)
    limit_threads(comm, 1 if run.config.deterministic else None)
    if comm.rank == 0:
        publish_address(run)
        if run.metrics is None:
            take_output(run)
    run.device = make_device(run.config, run.model_config, run.data, run.mesh, run.console.progress)
    run.device.epoch = epoch
    run.device.check_stop(lambda: run.stop.wish)


def logged_epoch(run: RunContext) -> int:
    """The epoch of the last step in metrics.jsonl if this run has trained it, else 0."""
    rows = read_metrics(run.out / METRICS, last=1 << 16)
    return int(rows[-1].get("epoch", 0)) if rows and rows[-1]["step"] > run.start else 0
