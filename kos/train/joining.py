"""``kos train --join``: a process that joins an elastic run, with weights and state from its ranks.

It reads the settings and the data as the run did, before it calls: the ranks wait for what is left alone. At the
boundary of a step they admit it, and tell it of the run (``kos.train.membership``).
"""

from __future__ import annotations

import os
import time

import kos
from kos.comm.communicator import Communicator
from kos.errors import KosError, RendezvousError
from kos.train.config.options import TrainConfig
from kos.train.data.batches import load_data
from kos.train.parallel.failures import PATIENCE
from kos.train.parallel.stopping import Left, Stop, Stopped
from kos.train.run import Trainer
from kos.train.run_context import RunContext
from kos.train.tools.console import Console

LOOK_EVERY = 0.05  # seconds between two looks for the file of a run that has not begun


class Newcomer(Trainer):
    """The run of ``config`` that this process joins, at ``config.join``. What it makes is known to the run's ranks.

    ConfigError if its settings or data are others than those of the run; RendezvousError if the run does not admit it;
    Left if it was asked to stop before.
    """

    def __init__(self, config: TrainConfig, stop: Stop | None = None) -> None:
        RunContext.__init__(self, config, stop)
        self.console, self.epoch, self.step, self.trains = Console(0, config.steps), -1, 0, True
        self.stop.announce(lambda text: self.console.warn(text))
        self.start = 0
        try:
            with self.stop.at_once():
                self.data = load_data(config, self.console.progress)
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
        failure.on_every_rank = error.on_every_rank
        return failure

    def _join(self) -> Communicator:
        """Wait until the run admits this rank, or is over: a run writes the address file, and removes it at its end."""
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
