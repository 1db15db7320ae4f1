"""Validation losses with and without ``--compress``, on text not seen twice: ``python -m benchmarks.compress_losses``.

    python -m benchmarks.wheel_corpus --out build/corpus.jsonl.xz
    mpirun -n 2 python -m benchmarks.compress_losses --corpus build/corpus.jsonl.xz --json FILE --preset 124m

All runs of a seed begin with the same weights and see the same tokens in the same order. The first of ``--formats``
is the baseline; ``none`` sends gradients without compression. Each run is written to FILE when it ends. The same
command continues with the missing runs. Flags of the trainer set the model, batch, learning rate and layout.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import NamedTuple

from benchmarks import paired_losses
from kos.comm.compression import FORMATS

NONE = "none"


class Wanted(NamedTuple):
    """The settings of a run."""

    compress: str
    seed: int
    steps: int


class Plan(paired_losses.BaselinePlan):
    name, run = "benchmarks.compress_losses", Wanted

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        formats, default = (NONE, *FORMATS), (NONE, "fp8", "int8")
        parser.add_argument("--formats", nargs="+", default=default, choices=formats, help="the first is the baseline")

    @property
    def baseline(self) -> str:
        return str(self.arguments.formats[0])

    def of_seed(self, seed: int) -> dict[str, Wanted]:
        return {name: Wanted(name, seed, self.steps) for name in self.arguments.formats}


main = partial(paired_losses.main, Plan, __doc__)

if __name__ == "__main__":
    main()
