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
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import kos
from benchmarks.optimizers import OPTIMIZERS
from benchmarks.paired_losses import Row, add_arguments, find, seconds, work
from kos.commands import program
from kos.train.config.options import TrainConfig
from kos.train.device.machine import thread_pools

RATES = (3e-4, 6e-4, 1.2e-3, 2.4e-3, 4.8e-3)


class Wanted(NamedTuple):
    """A run."""

    optimizer: str
    lr: float
    muon_lr: float | None
    seed: int
    steps: int


class Plan:
    """The runs of a file: which are there, and which come next."""

    def __init__(self, arguments: argparse.Namespace, config: TrainConfig, rows: list[Row]) -> None:
        self.arguments, self.rows, tokens_of_a_step = arguments, rows, config.batch_size * config.seq_len
        self.steps = max(1, round(arguments.tokens / tokens_of_a_step))
        self.tune_steps = max(1, round(arguments.tune_tokens / tokens_of_a_step))
        self.short_steps = max(1, round(arguments.share * self.steps))

    def find(self, wanted: Wanted) -> Row | None:
        return find(self.rows, wanted)

    def tuning(self) -> list[Wanted]:
        """The runs by each rate; those of Muon once AdamW's best is known."""
        adamw = [Wanted("adamw", lr, None, 0, self.tune_steps) for lr in self.arguments.rates]
        found = self._best(adamw)
        muon = [Wanted("muon", found.lr, rate, 0, self.tune_steps) for rate in self.arguments.rates] if found else []
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
        """The runs that are compared; none while rates are not known."""
        found, steps = self.best(), dict(zip(OPTIMIZERS, (self.steps, self.short_steps), strict=True))
        if None in found.values():
            return {}
        return {name: each._replace(seed=seed, steps=steps[name]) for name, each in found.items() if each}

    def missing(self) -> Iterator[Wanted]:
        yield from (wanted for wanted in self.tuning() if self.find(wanted) is None)
        for seed in range(1, self.arguments.seeds + 1):
            yield from (wanted for wanted in self.of_seed(seed).values() if self.find(wanted) is None)

    def seconds(self, wanted: Wanted) -> float:
        return seconds(self.rows, wanted, "optimizer")

    def summary(self) -> list[Row]:
        """Of each seed the last losses: AdamW's, and Muon's of its share of the tokens."""
        found = []
        for seed in range(1, self.arguments.seeds + 1):
            rows = {name: self.find(wanted) for name, wanted in self.of_seed(seed).items()}
            if rows and all(rows.values()):
                losses = {name: row["val_loss"] for name, row in rows.items() if row}
                found.append({"seed": seed, **losses, "share": self.short_steps / self.steps})
        return found

    def __str__(self) -> str:
        """The tables: of the learning rates, and of the seeds."""

        def shown(value: float | None) -> str:
            return f"{'-':>10}" if value is None else f"{value:>10.4f}"

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


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        program("benchmarks.optimizer_losses"), description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add_arguments(parser)
    parser.add_argument("--tune-tokens", type=float, default=12e6, metavar="N", help="of a rate's run (default: 12e6)")
    parser.add_argument("--rates", type=float, nargs="+", default=RATES, metavar="LR", help=f"default: {RATES}")
    parser.add_argument("--share", type=float, default=0.8, metavar="X", help="of Muon's runs (default: 0.8)")
    arguments, flags = parser.parse_known_args(argv)
    thread_pools()  # before other threads import
    with kos.init() as comm:
        say = print if comm.rank == 0 else lambda line: None
        name, compared = "benchmarks.optimizer_losses", ("optimizer", "lr", "muon_lr")
        work(name, compared, partial(Plan, arguments), arguments, flags, comm, say)


if __name__ == "__main__":
    main()
