"""A run as its parts know it: settings, ranks, data, device, folder, and how far it is."""

from __future__ import annotations

import contextlib
import os
from functools import cached_property
from pathlib import Path
from typing import Any

from kos.comm.communicator import Communicator
from kos.train.checkpoint.extra_files import Extra
from kos.train.checkpoint.saving import Saving
from kos.train.config.options import TrainConfig
from kos.train.data.batches import Dataset
from kos.train.device.base import Device
from kos.train.device.machine import provenance
from kos.train.model.llama import LlamaConfig
from kos.train.ops.fixed_order import ORDER
from kos.train.parallel.mesh import Mesh
from kos.train.parallel.stopping import Stop
from kos.train.tools.console import Console
from kos.train.tools.metrics import MetricsLog
from kos.train.train import Runner


class RunContext:
    """The state of a run of ``config``. ``kos.train.run.Trainer`` begins one, and ``Newcomer`` joins one.

    ``held`` is what the end of the run closes. ``asked`` are the settings as they were given.
    """

    comm: Communicator
    mesh: Mesh
    device: Device
    data: Dataset
    model_config: LlamaConfig
    console: Console
    out: Path
    source: str | None
    """The folder of the weights from which the run began."""
    name: str
    """That no other run on ``out`` has."""
    start: int
    step: int
    saved_step: int
    """Steps that are done at the start, now, and in the last checkpoint (-1: none)."""
    trains: bool
    """Whether there are steps to train."""

    def __init__(self, config: TrainConfig, stop: Stop | None) -> None:
        self.config, self.asked = config, config.to_json()
        self.stop: Stop = stop or Stop()
        self.metrics: MetricsLog | None = None  # on rank 0
        self.extra: Extra = {}
        self.skipped: set[int] = set()  # steps left out, of those of this run
        self.without_targets = 0  # steps of this run in which the loss counted nothing
        self.last_finite: int | None = None  # the last step whose gradients were finite
        self.row: dict[str, Any] | None = None  # the last that was written
        self.epoch = 0
        """How often the ranks have changed (``--elastic``); -1: this rank has not joined them."""
        self.untrained: float | None = None  # validation loss before training
        self.saving: Saving | None = None
        self.held: contextlib.ExitStack = contextlib.ExitStack()
        self.held.callback(lambda: self.drop_save())

    @property
    def checkpoints(self) -> Path:
        return self.out / "checkpoints"

    @property
    def data_in_words(self) -> str:
        packed = f", packed {self.data.packing.digest[:12]}" if self.data.packing else ""
        return f"{self.data.name} ({self.data.fingerprint[:12]}{packed})"

    @cached_property
    def description(self) -> dict[str, Any]:
        """The settings as given, the derived values and the machine of the run, for config.json and checkpoints."""
        derived = {name: value for name, value in self.config.to_json().items() if value != self.asked[name]}
        config = {**self.asked, "out": str(self.out)}
        about = {"cwd": os.getcwd(), "data_fingerprint": self.data.fingerprint, "local_replicas": self.mesh.local}
        about |= {"order_of_sums": ORDER} if self.config.deterministic else {}
        return {"config": config, "derived": derived, **about, **provenance(self.comm)}

    def train(self, device: Runner) -> bool:
        """Train on the device from the current step; returns whether a stop was requested. Collective."""
        raise NotImplementedError

    def log(self, row: dict[str, Any], last: bool) -> None:
        """Print and write the metrics of a step."""
        if self.row is not None and self.row["step"] == row["step"]:
            return  # before the ranks changed
        self.row = row
        self.console.step(row, log=self.step % self.config.log_every == 0 or last)
        if self.metrics is not None:
            self.metrics.write(row)

    def save(self) -> None:
        """Save this step after the previous checkpoint is complete. Collective."""
        raise NotImplementedError

    def finish_save(self) -> None:
        """Wait for the checkpoint that is being written; the error of one rank is raised on all. Collective."""
        if self.saving is not None:
            self.saving.finish()
            self.saved_step, self.saving = self.saving.step, None

    def drop_save(self) -> None:
        """End the checkpoint that is being written; it is either complete or absent."""
        if self.saving is not None:
            self.saving.cancel()
        self.saving = None
