"""A process that joins a run (``kos train --join``)."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Unpack

import kos
from kos.comm.communicator import Communicator
from kos.errors import KosError, RendezvousError
from kos.train.checkpoint import adapter
from kos.train.checkpoint.resume import data_settings
from kos.train.config.options import TrainConfig
from kos.train.data.batches import load_data
from kos.train.data.own import own_data
from kos.train.parallel.failures import PATIENCE, Left, Stop, Stopped
from kos.train.program import Program
from kos.train.run import Trainer
from kos.train.run_context import RunContext
from kos.train.tools.console import Console

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


class Newcomer(Trainer):
    """``kos train --join``: the run of ``config`` that this process joins, at ``config.join``.

    Weights and state come from the run's ranks.

    The process reads the settings and the data before it calls the run, so that the ranks of the run wait as short as
    possible. They admit it between two steps, and send it the state of the run (``kos.train.elastic``).
    Raises ConfigError if its settings or data differ from those of the run, RendezvousError if the run does not admit
    it, and Left if it was asked to stop before.
    """

    def __init__(self, config: TrainConfig, stop: Stop | None = None, **program: Unpack[Program]) -> None:
        RunContext.__init__(self, config, stop, **program)
        self.console, self.epoch, self.steps_done, self.trains = Console(self.verbose - 1, config.steps), -1, 0, True
        self.stop.announce(lambda text: self.console.warn(text))
        self.start = 0
        try:
            with self.stop.at_once():
                weights = adapter.tokenizer_folder(config.init_from)
                self.config, runs = _as_the_run_reads(config)
                if self.brings_batches:
                    self.data = own_data(config, weights)
                else:
                    self.data = load_data(self.config, self.console.progress, weights, runs)
                self.base = adapter.find_base(config.lora, config.init_from)
            self.model_config = config.model_config_for(self.data.tokenizer.vocab_size)
            self.console.close()
            self.comm = self._join()
        except Stopped as stopped:
            raise Left("left before it joined the run, as asked") from stopped
        self.stop.leaves = True
        self.held.push(self._close_groups)
        self.held.callback(lambda: self.console.close())

    def _interrupted(self, error: KosError) -> KosError:
        if self.epoch >= 0:
            return super()._interrupted(error)
        failure = type(error)(f"while joining the run at {self.config.join}: {error}")  # of which nothing is known yet
        vars(failure).update(vars(error))  # such as ``ranks``
        return failure

    def _join(self) -> Communicator:
        """Wait until the run admits this rank, or ends.  The address file exists as long as the run."""
        where, timeout, limit = str(self.config.join), self.config.timeout, time.monotonic() + PATIENCE
        if os.sep in where and not os.path.isfile(where):
            self.console.say(f"waiting for {where}, which a run with --elastic writes")
            with self.stop.at_once():
                while not os.path.isfile(where) and time.monotonic() < limit:
                    time.sleep(LOOK_EVERY)
        while True:
            began = time.monotonic()
            try:
                with self.stop.at_once():
                    return kos.join(where, timeout=timeout)
            except RendezvousError:
                refused = time.monotonic() - began < timeout  # else nobody has answered
                if refused or not os.path.isfile(where) or time.monotonic() > limit:
                    raise
