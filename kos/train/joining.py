"""``kos train --join``: a process that joins an elastic run, with weights and state from its ranks.

It reads the settings and the data as the run did, before it calls: the ranks wait for what is left alone. At the
boundary of a step they admit it, and tell it of the run (``Trainer.facts``).
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import kos
from kos.comm.communicator import Communicator
from kos.errors import RendezvousError
from kos.train.config.options import TrainConfig, flag_of, flatten
from kos.train.data.batches import load_data
from kos.train.parallel.failures import PATIENCE
from kos.train.parallel.stopping import Left, Stop, Stopped
from kos.train.run import PATHS, Trainer
from kos.train.tools.console import Console

LOOK_EVERY = 0.05  # seconds between two looks for the file of a run that has not begun

CHOSEN = {"micro_batch_size", "device", "dtype", "grad_dtype", "elastic", "steps"}
"""Settings that the run has chosen, and a newcomer takes."""

NO_NUMBERS = {
    "preset", "backend", "sample_tokens", "prompt", "temperature", "top_k", "save_every", "keep", "save_async",
    "log_every", "tracker", "recompute", "graph", "debug", "timeout",
}  # fmt: skip
"""Settings that do not affect results: a newcomer takes them from the run too."""


class Newcomer(Trainer):
    """The run of ``config`` that this process joins, at ``config.join``. What it makes is known to the run's ranks.

    ConfigError if its settings or data are others than those of the run; RendezvousError if the run does not admit it;
    Left if it was asked to stop before.
    """

    def __init__(self, config: TrainConfig, stop: Stop | None = None) -> None:
        self.prepare(config, stop)
        self.console, self.epoch, self.step, self._trains = Console(0, config.steps), -1, 0, True
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
        self._held.push(self._close_groups)
        self._held.callback(lambda: self.console.close())

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

    def misfit(self, facts: dict[str, Any]) -> str:
        mine, theirs = flatten("", self._asked), flatten("", facts["settings"])
        mine["data in words"], theirs["data in words"] = self.data_in_words, facts["data"]
        for name in mine:
            if name not in PATHS | CHOSEN | NO_NUMBERS and mine[name] != theirs.get(name):
                flag = flag_of(name.partition(" ")[0])
                return f"{flag}: expected {theirs.get(name)}, which the run has, got {mine[name]}"
        return ""

    def take(self, facts: dict[str, Any]) -> None:
        self._asked, chosen = facts["settings"], facts["chosen"]
        chosen["tracker"] = tuple(chosen["tracker"])  # JSON has only lists
        self.config = self.config.model_copy(update={name: chosen[name] for name in CHOSEN | NO_NUMBERS})
        self.out, self.source, self.name, self.row = Path(facts["out"]), facts["source"], facts["name"], facts["row"]
        self.start, self.skipped, self.last_finite = facts["start"], set(facts["skipped"]), facts["last_finite"]
        vars(self)["description"] = facts["description"]
        self.console = Console(self.comm.rank, self.config.steps)
