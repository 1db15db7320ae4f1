"""Validation losses with and without ``--compress``, on text not seen twice: ``python -m benchmarks.compress_losses``.

    python -m benchmarks.wheel_corpus --out build/corpus.jsonl.xz
    mpirun -n 2 python -m benchmarks.compress_losses --corpus build/corpus.jsonl.xz --json FILE --preset 124m

With a seed all runs begin with the same weights and see the same tokens in the same order; the first sends gradients
between ranks as they are. FILE has each run as soon as it is over, and the same command goes on with those that are
missing. Flags of the trainer say which model, batch, learning rate and layout.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import NamedTuple

from benchmarks import paired_losses
from kos.comm.compression import FORMATS

NONE = "none"


class Wanted(NamedTuple):
    """A run."""

    compress: str
    seed: int
    steps: int


class Plan(paired_losses.Differences):
    name, run = "benchmarks.compress_losses", Wanted

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        formats, default = (NONE, *FORMATS), (NONE, "fp8", "int8")
        parser.add_argument("--formats", nargs="+", default=default, choices=formats, help="to compare with the first")

    @property
    def first(self) -> str:
        return str(self.arguments.formats[0])

    def of_seed(self, seed: int) -> dict[str, Wanted]:
        return {name: Wanted(name, seed, self.steps) for name in self.arguments.formats}


main = partial(paired_losses.main, Plan, __doc__)

if __name__ == "__main__":
    main()
