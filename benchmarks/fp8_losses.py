"""Validation losses with and without ``--dtype fp8``, on text not seen twice: ``python -m benchmarks.fp8_losses``.

    python -m benchmarks.wheel_corpus --out build/corpus.jsonl.xz
    python -m benchmarks.fp8_losses --corpus build/corpus.jsonl.xz --json FILE --preset 124m --minutes 9

Runs of ``--tokens`` come in pairs: with a seed both begin with the same weights and see the same tokens in the same
order. With ``--again`` each first run is repeated in micro-batches of half the size, whose sums are rounded otherwise:
a difference is to be compared with that of these two.

FILE has each run as soon as it is over.  The same command goes on with those that are missing, and begins none that
would end after ``--minutes``.  Flags of the trainer say which model, batch, learning rate, layout and device.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from functools import partial
from statistics import mean, stdev
from typing import NamedTuple

import kos
from benchmarks.paired_losses import Row, add_arguments, find, seconds, work
from kos.commands import program
from kos.errors import ConfigError
from kos.train.config.options import TrainConfig
from kos.train.device.machine import thread_pools


class Wanted(NamedTuple):
    """A run."""

    dtype: str
    micro_batch_size: int
    seed: int
    steps: int


class Plan:
    """The runs of a file: which are there, and which come next."""

    def __init__(self, arguments: argparse.Namespace, config: TrainConfig, rows: list[Row]) -> None:
        self.arguments, self.rows, self.dtype = arguments, rows, config.dtype
        self.micro = config.micro_batch_size or 1
        if arguments.again and self.micro < 2:
            raise ConfigError(f"--again: expected a --micro-batch-size of at least 2, got {self.micro}")
        self.steps = max(1, round(arguments.tokens / (config.batch_size * config.seq_len)))

    def of_seed(self, seed: int) -> dict[str, Wanted]:
        """The runs that are compared, in their order."""
        runs = {name: Wanted(name, self.micro, seed, self.steps) for name in (self.dtype, "fp8")}
        again = {"again": Wanted(self.dtype, self.micro // 2, seed, self.steps)}
        return runs | (again if self.arguments.again else {})

    def missing(self) -> Iterator[Wanted]:
        for seed in range(1, self.arguments.seeds + 1):
            yield from (wanted for wanted in self.of_seed(seed).values() if find(self.rows, wanted) is None)

    def seconds(self, wanted: Wanted) -> float:
        return seconds(self.rows, wanted, "dtype")

    def summary(self) -> list[Row]:
        """Of each seed the last losses, and the relative difference of fp8's and of the repetition's from the first."""
        found = []
        for seed in range(1, self.arguments.seeds + 1):
            rows = {name: find(self.rows, wanted) for name, wanted in self.of_seed(seed).items()}
            losses = {name: row["val_loss"] for name, row in rows.items() if row and row["val_loss"] is not None}
            if not {self.dtype, "fp8"} <= losses.keys():
                continue
            one = losses[self.dtype]
            differences = {f"{name} differs": losses[name] / one - 1 for name in losses if name != self.dtype}
            found.append({"seed": seed, **losses, **differences})
        return found

    def __str__(self) -> str:
        """The table of the seeds, and the mean of differences with its standard error."""
        rows, names = self.summary(), [name for name in self.of_seed(1) if name != self.dtype]
        lines = [f"{'seed':<6}{self.dtype:>10}" + "".join(f"{name:>10}{'differs':>10}" for name in names)]
        for row in rows:
            each = (f"{row[name]:>10.4f}{row[f'{name} differs']:>+10.3%}" for name in names if name in row)
            lines.append(f"{row['seed']:<6}{row[self.dtype]:>10.4f}" + "".join(each))
        for name in names:
            differences = [row[f"{name} differs"] for row in rows if name in row]
            if len(differences) > 1:
                error = stdev(differences) / math.sqrt(len(differences))
                lines.append(f"{name} differs by {mean(differences):+.3%} +- {error:.3%}, {len(differences)} seeds")
        return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        program("benchmarks.fp8_losses"), description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add_arguments(parser)
    parser.add_argument("--again", action="store_true", help="repeat the first run of each seed, rounded otherwise")
    arguments, flags = parser.parse_known_args(argv)
    thread_pools()  # before other threads import
    with kos.init() as comm:
        say = print if comm.rank == 0 else lambda line: None
        name, compared = "benchmarks.fp8_losses", ("dtype", "micro_batch_size")
        work(name, compared, partial(Plan, arguments), arguments, flags, comm, say)


if __name__ == "__main__":
    main()
