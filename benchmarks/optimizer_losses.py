"""Validation losses by AdamW and Muon, on text that is not seen twice: ``python -m benchmarks.optimizer_losses``.

    python -m benchmarks.wheel_corpus --out build/corpus.jsonl.xz
    python -m benchmarks.optimizer_losses --corpus build/corpus.jsonl.xz --json FILE --preset 124m --minutes 9

Both optimizers are first tuned over the same ``--rates``, on ``--tune-tokens``: AdamW's, then Muon's for the hidden
matrices (``--muon-lr``), beside AdamW's best for all else (``--lr``).  With the best rates, runs follow in pairs: with
a seed both begin with the same weights and see the same tokens in the same order.  AdamW's has ``--tokens``, Muon's
only ``--share`` of them, and a learning rate that decays within these.

FILE has each run as soon as it is over.  The same command goes on with those that are missing, and begins none that
would end after ``--minutes``.  Flags of the trainer say which model, batch, layout and device.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from benchmarks import paired_losses
from benchmarks.optimizers import OPTIMIZERS
from benchmarks.paired_losses import Row, shown

RATES = (3e-4, 6e-4, 1.2e-3, 2.4e-3, 4.8e-3)


class Wanted(NamedTuple):
    """A run."""

    optimizer: str
    lr: float
    muon_lr: float | None
    seed: int
    steps: int


class Plan(paired_losses.Plan):
    name, run = "benchmarks.optimizer_losses", Wanted

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--tune-tokens", type=float, default=12e6, metavar="N", help="of a rate's run (default: 12e6)"
        )
        parser.add_argument("--rates", type=float, nargs="+", default=RATES, metavar="LR", help=f"default: {RATES}")
        parser.add_argument("--share", type=float, default=0.8, metavar="X", help="of Muon's runs (default: 0.8)")

    @property
    def short_steps(self) -> int:
        """The steps of Muon's runs."""
        return max(1, round(self.arguments.share * self.steps))

    def tuning(self) -> list[Wanted]:
        """The runs by each rate; those of Muon once AdamW's best is known."""
        steps = self.steps_of(self.arguments.tune_tokens)
        adamw = [Wanted("adamw", lr, None, 0, steps) for lr in self.arguments.rates]
        found = self._best(adamw)
        muon = [Wanted("muon", found.lr, rate, 0, steps) for rate in self.arguments.rates] if found else []
        return adamw + muon

    def _best(self, tuning: Sequence[Wanted]) -> Wanted | None:
        """That of the lowest loss; None: not all have run."""
        rows = [self.find(wanted) for wanted in tuning]
        losses = [math.inf if row["val_loss"] is None else row["val_loss"] for row in rows if row]
        return tuning[losses.index(min(losses))] if 0 < len(losses) == len(rows) else None

    def best(self) -> dict[str, Wanted | None]:
        """The best of each optimizer; None: not all of its runs are there."""
        tuning = self.tuning()
        return {name: self._best([wanted for wanted in tuning if wanted.optimizer == name]) for name in OPTIMIZERS}

    def of_seed(self, seed: int) -> dict[str, Wanted]:
        found, steps = self.best(), dict(zip(OPTIMIZERS, (self.steps, self.short_steps), strict=True))
        if None in found.values():
            return {}
        return {name: each._replace(seed=seed, steps=steps[name]) for name, each in found.items() if each}

    def summary(self) -> list[Row]:
        """Also Muon's share of the tokens."""
        return [{**row, "share": self.short_steps / self.steps} for row in super().summary()]

    def __str__(self) -> str:
        """The tables: of the learning rates, and of the seeds."""
        lines = [f"{'lr':<10}" + "".join(f"{name:>10}" for name in OPTIMIZERS)]
        tuning = {(each.optimizer, each.muon_lr or each.lr): each for each in self.tuning()}
        for lr in self.arguments.rates:
            each = (tuning.get((name, lr)) for name in OPTIMIZERS)
            losses = ((self.find(wanted) or {}).get("val_loss") if wanted else None for wanted in each)
            lines.append(f"{lr:<10g}" + "".join(map(shown, losses)))
        best = {each.muon_lr or each.lr for each in self.best().values() if each}
        if {min(self.arguments.rates), max(self.arguments.rates)} & best:
            lines.append("the best of these is the lowest or the highest: --rates may need others")
        lines.append(f"\n{'seed':<10}{'adamw':>10}{f'muon, {self.arguments.share:g}':>12}")
        lines += [f"{row['seed']:<10}{shown(row['adamw'])}  {shown(row['muon'])}" for row in self.summary()]
        return "\n".join(lines)


main = partial(paired_losses.main, Plan, __doc__)

if __name__ == "__main__":
    main()
