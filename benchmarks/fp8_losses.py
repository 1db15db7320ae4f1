"""Validation losses with and without ``--dtype fp8``, on text not seen twice: ``python -m benchmarks.fp8_losses``.

    python -m benchmarks.wheel_corpus --out build/corpus.jsonl.xz
    python -m benchmarks.fp8_losses --corpus build/corpus.jsonl.xz --json FILE --preset 124m --minutes 9

Runs of ``--tokens`` come in pairs: with a seed both begin with the same weights and see the same tokens in the same
order. With ``--again`` each first run is repeated in micro-batches of half the size, whose sums are rounded otherwise:
a difference is to be compared with that of these two.  With ``--dtype fp8 --fp8-head`` the pairs are runs in 8 bits
without and with the matmuls of the head in 8 bits.

FILE has each run as soon as it is over.  The same command goes on with those that are missing, and begins none that
would end after ``--minutes``.  Flags of the trainer say which model, batch, learning rate, layout and device.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import NamedTuple

from benchmarks import paired_losses
from benchmarks.paired_losses import Row
from kos.errors import ConfigError
from kos.train.config.options import TrainConfig


class Wanted(NamedTuple):
    """A run."""

    dtype: str
    fp8_head: bool
    micro_batch_size: int
    seed: int
    steps: int


class Plan(paired_losses.BaselinePlan):
    name, run = "benchmarks.fp8_losses", Wanted

    def __init__(self, arguments: argparse.Namespace, config: TrainConfig, rows: list[Row]) -> None:
        super().__init__(arguments, config, rows)
        self.dtype, self.micro = config.dtype, config.micro_batch_size or 1
        if arguments.again and self.micro < 2:
            raise ConfigError(f"--again: expected a --micro-batch-size of at least 2, got {self.micro}")

    @property
    def baseline(self) -> str:
        return self.dtype

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--again", action="store_true", help="repeat the first run of each seed, rounded otherwise")

    def of_seed(self, seed: int) -> dict[str, Wanted]:
        name = "fp8-head" if self.config.fp8_head else "fp8"
        runs = {self.dtype: Wanted(self.dtype, False, self.micro, seed, self.steps)}
        runs[name] = Wanted("fp8", self.config.fp8_head, self.micro, seed, self.steps)
        again = {"again": runs[self.dtype]._replace(micro_batch_size=self.micro // 2)}
        return runs | (again if self.arguments.again else {})


main = partial(paired_losses.main, Plan, __doc__)

if __name__ == "__main__":
    main()
