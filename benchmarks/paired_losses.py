"""The common parts of benchmarks that compare validation losses of runs, on text that is not seen twice.

A ``Plan`` lists the runs of a benchmark. ``main`` makes those that the results file lacks. All runs of one seed begin
with the same weights and see the same tokens in the same order. Each run is written to the file when it ends.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any, ClassVar

import kos
from benchmarks.optimizers import gpu_of, release
from benchmarks.wheel_corpus import unpack
from kos.bench import report
from kos.comm.communicator import Communicator
from kos.commands import program
from kos.errors import ConfigError
from kos.train.config.flags import parse
from kos.train.config.options import TrainConfig
from kos.train.data.batches import Dataset, load_data
from kos.train.device import Device
from kos.train.device.choose import layout_of, make_device
from kos.train.machine import limit_threads, thread_pools
from kos.train.parallel.failures import Stop, together
from kos.train.parallel.mesh import Mesh
from kos.train.step import StepResult, train

WARM_UP = 0.05  # fraction of the steps of a run
VARIED = ("seed", "steps", "warmup_steps", "eval_every")
"""The settings that differ between runs of one file, besides those that a benchmark compares."""

Row = dict[str, Any]
Wanted = Any
"""A run: a NamedTuple of settings, ``seed`` and ``steps`` among them. The losses of seed 0 are those of its end."""


class Plan:
    """The runs of a file: which it has, and which come next."""

    name: ClassVar[str]
    """The name of the benchmark."""

    run: ClassVar[type[Wanted]]
    """The fields before ``seed`` and ``steps`` are the compared settings; the time of a step depends on the first."""

    def __init__(self, arguments: argparse.Namespace, config: TrainConfig, rows: list[Row]) -> None:
        self.arguments, self.rows, self.config = arguments, rows, config
        self.steps = self.steps_of(arguments.tokens)
        """The steps of the longest run."""

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        """Add the flags of this benchmark alone."""

    def tuning(self) -> list[Wanted]:
        """The runs that precede the compared ones, to choose settings."""
        return []

    def of_seed(self, seed: int) -> dict[str, Wanted]:
        """The compared runs by name, in order; empty until their settings are known."""
        raise NotImplementedError

    def steps_of(self, tokens: float) -> int:
        return max(1, round(tokens / (self.config.batch_size * self.config.seq_len)))

    def find(self, wanted: Wanted) -> Row | None:
        """The row of a run."""
        names = wanted._asdict().items()
        return next((row for row in self.rows if all(row[name] == value for name, value in names)), None)

    def missing(self) -> Iterator[Wanted]:
        """The runs that the file lacks, in order."""
        yield from (wanted for wanted in self.tuning() if self.find(wanted) is None)
        for seed in range(1, self.arguments.seeds + 1):
            yield from (wanted for wanted in self.of_seed(seed).values() if self.find(wanted) is None)

    def seconds(self, wanted: Wanted) -> float:
        """The expected seconds of a run; 0 if unknown."""
        kind = wanted._fields[0]
        each = [row["seconds"] / row["steps"] for row in self.rows if row[kind] == getattr(wanted, kind)]
        return float(wanted.steps * max(each, default=0.0))

    def summary(self) -> list[Row]:
        """The last losses of each seed whose runs are complete; None for a run that diverged."""
        found = []
        for seed in range(1, self.arguments.seeds + 1):
            rows = {name: self.find(wanted) for name, wanted in self.of_seed(seed).items()}
            if rows and all(rows.values()):
                found.append({"seed": seed, **{name: row["val_loss"] for name, row in rows.items() if row}})
        return found


def shown(value: float | None, form: str = ".4f") -> str:
    """A column of a table; ``-`` for None."""
    return f"{'-' if value is None else format(value, form):>10}"


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """The mean of two or more values, and its standard error."""
    return mean(values), stdev(values) / math.sqrt(len(values))


class BaselinePlan(Plan):
    """A plan that compares the losses of a seed's runs with those of one of them, the ``baseline``."""

    @property
    def baseline(self) -> str:
        """The name of that run in ``of_seed``."""
        raise NotImplementedError

    def summary(self) -> list[Row]:
        """Also the relative differences from the loss of the baseline."""
        found = super().summary()
        for row in found:
            base, others = row[self.baseline], [name for name in row if name not in ("seed", self.baseline)]
            row.update({f"{name} differs": row[name] / base - 1 if base and row[name] else None for name in others})
        return found

    def __str__(self) -> str:
        """A table of the seeds, and the mean difference of each run with its standard error."""
        rows, names = self.summary(), [name for name in self.of_seed(1) if name != self.baseline]
        lines = [f"{'seed':<6}{self.baseline:>10}" + "".join(f"{name:>10}{'differs':>10}" for name in names)]
        for row in rows:
            each = (shown(row[name]) + shown(row[f"{name} differs"], "+.3%") for name in names)
            lines.append(f"{row['seed']:<6}{shown(row[self.baseline])}" + "".join(each))
        for name in names:
            differences = [found for row in rows if (found := row[f"{name} differs"]) is not None]
            if len(differences) > 1:
                mean, error = mean_and_error(differences)
                lines.append(f"{name} differs by {mean:+.3%} +- {error:.3%}, {len(differences)} seeds")
        return "\n".join(lines)


class Curve:
    """What ``kos.train.step.train`` reports to: the losses of a run, which it stops if they end."""

    exhausted = improved = False

    def __init__(self, device: Device) -> None:
        self.device, self.steps_done, self.stop, self.ended, self.validates = device, 0, Stop(), False, True
        self.speeds: list[float] = []
        self.losses: list[tuple[int, float]] = []
        """Tokens, and the validation loss after them."""

    def measure(self, result: StepResult) -> Row:
        config = self.device.config
        self.speeds.append(config.batch_size * config.seq_len / result.seconds)
        self.stop.requested = self.stop.requested or not math.isfinite(result.loss + result.norm)
        return {}

    def validate(self) -> dict[str, float]:
        return self.device.evaluate()

    def log(self, row: Row, last: bool) -> None:
        config = self.device.config
        if "val_loss" in row:
            self.losses.append((self.steps_done * config.batch_size * config.seq_len, row["val_loss"]))

    def after_step(self, row: Row) -> bool:
        return False

    def save(self) -> None:
        """Do nothing: the weights are not used."""


def run(config: TrainConfig, data: Dataset, comm: Communicator, wanted: Wanted, evaluations: int) -> Row:
    """Train as ``wanted``: a row of the results. Collective."""
    began, layout, steps = time.perf_counter(), layout_of(config, comm.size), wanted.steps
    changes = {"warmup_steps": max(1, round(WARM_UP * steps)), "eval_every": max(1, steps // evaluations)}
    config = config.model_copy(update={**wanted._asdict(), **changes})
    data, mesh = dataclasses.replace(data, seed=wanted.seed), Mesh(comm, layout)
    device = make_device(config, config.model_config_for(data.tokenizer.vocab_size), data, mesh)
    device.draw_weights()
    curve = Curve(device)
    train(device, config, curve)
    device.close()
    mesh.close()
    last = curve.losses[-1][1] if curve.steps_done == steps else math.inf
    return {
        **wanted._asdict(), "tokens": steps * config.batch_size * config.seq_len,
        "val_loss": last if math.isfinite(last) else None, "tokens_per_second": round(median(curve.speeds)),
        "seconds": round(time.perf_counter() - began, 1), "curve": curve.losses,
    }  # fmt: skip


def main(kind: type[Plan], about: str | None, argv: Sequence[str] | None = None) -> None:
    """The command of a benchmark."""
    parser = argparse.ArgumentParser(
        program(kind.name), description=about, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    _add_arguments(parser)
    kind.add_arguments(parser)
    arguments, flags = parser.parse_known_args(argv)
    thread_pools()  # before other threads import
    with kos.init() as comm:
        _work(kind, arguments, flags, comm, print if comm.rank == 0 else lambda line: None)


def _work(
    kind: type[Plan], arguments: argparse.Namespace, flags: Sequence[str], comm: Communicator,
    say: Callable[[str], object],
) -> None:  # fmt: skip
    """All runs for which there is time. Collective."""
    began = time.monotonic()
    path = together(comm, lambda: unpack(arguments.corpus) if comm.rank == 0 else None)
    given = ["--data", str(path or unpack(arguments.corpus)), "--eval-batches", "32", *flags, "--epochs", "1"]
    asked = parse(given)
    gpu = gpu_of(asked, comm)
    config = asked.for_world(layout_of(asked, comm.size).dp, "cpu" if gpu is None else "cuda")
    limit_threads(comm)
    data = together(comm, lambda: load_data(config))
    size = config.batch_size * config.seq_len
    other = {*kind.run._fields, *VARIED, "data", "epochs"}
    about = {key: value for key, value in config.to_json().items() if key not in other}
    head = {**report.provenance(kind.name, gpu, comm.size), "fingerprint": data.fingerprint, "settings": about}
    plan = kind(arguments, config, _earlier(arguments.json, head))
    if plan.steps > data.steps_per_epoch:
        most = data.steps_per_epoch * size
        raise ConfigError(f"--tokens: expected at most {most:,}, which are seen once, got {arguments.tokens:,.0f}")
    config = config.model_copy(update={"epochs": None})  # the order of ``data`` stays that of an epoch
    while (wanted := next(plan.missing(), None)) is not None:
        ends = (time.monotonic() - began + plan.seconds(wanted)) / 60
        if b"1" in comm.all_gather_bytes(b"1" if arguments.minutes and ends > arguments.minutes else b"0"):
            say("more runs are missing: the same command goes on")
            break
        evaluations = arguments.evaluations if wanted.seed else 1  # of tuning the last loss counts
        plan.rows.append(row := run(config, data, comm, wanted, evaluations))
        say(", ".join(f"{key} {row[key]}" for key in (*wanted._fields, "val_loss", "tokens_per_second", "seconds")))
        release(gpu)
        if comm.rank == 0:
            _write(arguments.json, {**head, "summary": plan.summary(), "rows": plan.rows})
    say(str(plan))


def _earlier(path: Path, head: Row) -> list[Row]:
    """The runs that a file has; ConfigError if they are of other settings or other data."""
    if not path.exists():
        return []
    found = report.read(path, "fingerprint", "settings", "rows")
    for name in ("fingerprint", "settings", "hardware"):
        if found[name] != head[name]:
            differ = found[name], head[name]
            if name == "settings":
                key = next(key for key in head[name] if found[name].get(key) != head[name][key])
                name, differ = key, (found[name].get(key), head[name][key])
            raise ConfigError(f"--json {path}: expected runs of {name} {differ[1]}, got those of {differ[0]}")
    return list(found["rows"])


def _write(path: Path, result: Row) -> None:
    beside = path.with_name(f"{path.name}.new")
    beside.write_text(report.to_json(result))
    os.replace(beside, path)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--corpus", type=Path, required=True, metavar="FILE", help="text, JSON Lines, or that in .xz")
    parser.add_argument("--json", type=Path, required=True, metavar="FILE", help="the results, and those of before")
    parser.add_argument("--tokens", type=float, default=60e6, metavar="N", help="of a run (default: 60e6)")
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="pairs of runs (default: 3)")
    parser.add_argument("--evaluations", type=int, default=20, metavar="N", help="of a run (default: 20)")
    parser.add_argument("--minutes", type=float, default=0, metavar="M", help="begin no run that ends later")
