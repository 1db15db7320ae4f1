"""Validation losses by AdamW and Muon, on text that is not seen twice: ``python -m benchmarks.optimizer_losses``.

    python -m benchmarks.wheel_corpus --out build/corpus.jsonl.xz
    python -m benchmarks.optimizer_losses --corpus build/corpus.jsonl.xz --json FILE --preset 124m --minutes 9

Both optimizers are first tuned over the same ``--rates``, on ``--tune-tokens``.  With the best rate of each, runs of
``--tokens`` follow in pairs: with a seed both begin with the same weights and see the same tokens in the same order.
A third run of each seed, by Muon, has only ``--share`` of the tokens, and a learning rate that decays within them.

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
        return [Wanted(name, lr, 0, self.tune_steps) for lr in self.arguments.rates for name in OPTIMIZERS]

    def best(self, optimizer: str) -> float | None:
        """The best learning rate; None: not all are there."""
        rows = [self.find(wanted) for wanted in self.tuning() if wanted.optimizer == optimizer]
        losses = [(math.inf if row["val_loss"] is None else row["val_loss"], row["lr"]) for row in rows if row]
        return min(losses)[1] if len(losses) == len(rows) else None

    def of_seed(self, seed: int) -> dict[str, Wanted] | None:
        """The runs that are compared; None: the learning rates are not known yet."""
        adamw, muon = map(self.best, OPTIMIZERS)
        if adamw is None or muon is None:
            return None
        return {
            "adamw": Wanted("adamw", adamw, seed, self.steps), "muon": Wanted("muon", muon, seed, self.steps),
            "short": Wanted("muon", muon, seed, self.short_steps),
        }  # fmt: skip

    def missing(self) -> Iterator[Wanted]:
        yield from (wanted for wanted in self.tuning() if self.find(wanted) is None)
        for seed in range(1, self.arguments.seeds + 1):
            runs = self.of_seed(seed) or {}
            yield from (wanted for wanted in runs.values() if self.find(wanted) is None)

    def seconds(self, wanted: Wanted) -> float:
        return seconds(self.rows, wanted, "optimizer")

    def summary(self) -> list[Row]:
        """Of each seed: AdamW's last loss, the share of its tokens after which Muon's is not higher, and the shorter
        run's loss. None: not reached."""
        found = []
        for seed in range(1, self.arguments.seeds + 1):
            rows = {name: self.find(wanted) for name, wanted in (self.of_seed(seed) or {}).items()}
            adamw, muon, short = (rows.get(name) for name in ("adamw", "muon", "short"))
            if adamw and muon and short:
                reached = [tokens for tokens, loss in muon["curve"] if loss <= (adamw["val_loss"] or math.inf)]
                found.append({
                    "seed": seed, "adamw": adamw["val_loss"], "muon": muon["val_loss"],
                    "reached_at": reached[0] / adamw["tokens"] if reached else None,
                    "share": short["tokens"] / adamw["tokens"], "muon_of_share": short["val_loss"],
                })  # fmt: skip
        return found

    def __str__(self) -> str:
        """The tables: of the learning rates, and of the seeds."""

        def shown(value: float | None) -> str:
            return f"{'-':>10}" if value is None else f"{value:>10.4f}"

        tuned, best = [f"{'lr':<10}" + "".join(f"{name:>10}" for name in OPTIMIZERS)], map(self.best, OPTIMIZERS)
        for lr in self.arguments.rates:
            losses = ((self.find(Wanted(name, lr, 0, self.tune_steps)) or {}).get("val_loss") for name in OPTIMIZERS)
            tuned.append(f"{lr:<10g}" + "".join(map(shown, losses)))
        if {min(self.arguments.rates), max(self.arguments.rates)} & {*best}:
            tuned.append("the best of these is the lowest or the highest: --rates may need others")
        columns = ("adamw", "muon", "reached_at", "muon_of_share")
        short = f"muon, {self.arguments.share:g}"
        tuned.append(f"\n{'seed':<10}{'adamw':>10}{'muon':>10}{'reached at':>14}{short:>14}")
        for row in self.summary():
            wide = zip(columns, (10, 10, 14, 14), strict=True)
            tuned.append(f"{row['seed']:<10}" + "".join(f"{shown(row[name]).strip():>{width}}" for name, width in wide))
        return "\n".join(tuned)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        program("benchmarks.optimizer_losses"), description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add_arguments(parser)
    parser.add_argument("--tune-tokens", type=float, default=12e6, metavar="N", help="of a rate's run (default: 12e6)")
    parser.add_argument("--rates", type=float, nargs="+", default=RATES, metavar="LR", help=f"default: {RATES}")
    parser.add_argument("--share", type=float, default=0.8, metavar="X", help="of Muon's shorter run (default: 0.8)")
    arguments, flags = parser.parse_known_args(argv)
    thread_pools()  # before other threads import
    with kos.init() as comm:
        say = print if comm.rank == 0 else lambda line: None
        name, compared = "benchmarks.optimizer_losses", ("optimizer", "lr")
        work(name, compared, partial(Plan, arguments), arguments, flags, comm, say)


if __name__ == "__main__":
    main()
