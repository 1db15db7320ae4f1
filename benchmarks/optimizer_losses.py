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
import dataclasses
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import kos
from benchmarks.optimizers import OPTIMIZERS, gpu_of, release
from benchmarks.wheel_corpus import unpack
from kos.bench import report
from kos.comm.communicator import Communicator
from kos.commands import program
from kos.errors import ConfigError
from kos.train.config.flags import parse
from kos.train.config.options import TrainConfig
from kos.train.data.batches import Dataset, load_data
from kos.train.device.base import Device
from kos.train.device.choose import layout_of, make_device
from kos.train.device.machine import limit_threads, thread_pools
from kos.train.parallel.failures import together
from kos.train.parallel.mesh import Mesh
from kos.train.parallel.stopping import Stop
from kos.train.train import StepResult, train

RATES = (3e-4, 6e-4, 1.2e-3, 2.4e-3, 4.8e-3)
WARM_UP = 0.05  # of the steps of a run
VARIED = ("optimizer", "lr", "seed", "steps", "warmup_steps", "eval_every")
"""The settings that differ between runs of one file."""

Row = dict[str, Any]


class Wanted(NamedTuple):
    """A run."""

    optimizer: str
    lr: float
    seed: int
    steps: int

    def is_row(self, row: Row) -> bool:
        return all(row[name] == value for name, value in self._asdict().items())


class Curve:
    """What the trainer's loop reports to (``kos.train.train.Run``): the losses of a run, which it stops if they end."""

    def __init__(self, device: Device) -> None:
        self.device, self.step, self.stop = device, 0, Stop()
        self.speeds: list[float] = []
        self.losses: list[tuple[int, float]] = []
        """Tokens, and the validation loss after them."""

    def measure(self, result: StepResult) -> Row:
        config = self.device.config
        self.speeds.append(config.batch_size * config.seq_len / result.seconds)
        self.stop.asked = self.stop.asked or not math.isfinite(result.loss + result.norm)
        return {}

    def validate(self) -> float:
        return self.device.evaluate()

    def log(self, row: Row, last: bool) -> None:
        config = self.device.config
        if "val_loss" in row:
            self.losses.append((self.step * config.batch_size * config.seq_len, row["val_loss"]))

    def save(self) -> None:
        """Nothing: the weights are of no use."""


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
    last = curve.losses[-1][1] if curve.step == steps else math.inf
    return {
        **wanted._asdict(), "tokens": steps * config.batch_size * config.seq_len,
        "val_loss": last if math.isfinite(last) else None, "tokens_per_second": round(median(curve.speeds)),
        "seconds": round(time.perf_counter() - began, 1), "curve": curve.losses,
    }  # fmt: skip


class Plan:
    """The runs of a file: which are there, and which come next."""

    def __init__(self, arguments: argparse.Namespace, tokens_of_a_step: int, rows: list[Row]) -> None:
        self.arguments, self.rows = arguments, rows
        self.steps = max(1, round(arguments.tokens / tokens_of_a_step))
        self.tune_steps = max(1, round(arguments.tune_tokens / tokens_of_a_step))
        self.short_steps = max(1, round(arguments.share * self.steps))

    def find(self, wanted: Wanted) -> Row | None:
        return next((row for row in self.rows if wanted.is_row(row)), None)

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
        """The runs that are not there yet, in order."""
        yield from (wanted for wanted in self.tuning() if self.find(wanted) is None)
        for seed in range(1, self.arguments.seeds + 1):
            runs = self.of_seed(seed) or {}
            yield from (wanted for wanted in runs.values() if self.find(wanted) is None)

    def seconds(self, wanted: Wanted) -> float:
        """About how long a run takes, by those of its optimizer that there are; 0: it is not known."""
        each = [row["seconds"] / row["steps"] for row in self.rows if row["optimizer"] == wanted.optimizer]
        return wanted.steps * max(each, default=0.0)

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


def work(arguments: argparse.Namespace, flags: Sequence[str], comm: Communicator, say: Callable[[str], object]) -> None:
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
    about = {name: value for name, value in config.to_json().items() if name not in (*VARIED, "data", "epochs")}
    head = {
        **report.provenance("benchmarks.optimizer_losses", gpu, comm.size), "fingerprint": data.fingerprint,
        "settings": about,
    }  # fmt: skip
    plan = Plan(arguments, size, _earlier(arguments.json, head))
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
        say(", ".join(f"{name} {row[name]}" for name in (*Wanted._fields, "val_loss", "tokens_per_second", "seconds")))
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


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        program("benchmarks.optimizer_losses"), description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--corpus", type=Path, required=True, metavar="FILE", help="text, JSON Lines, or that in .xz")
    parser.add_argument("--json", type=Path, required=True, metavar="FILE", help="the results, and those of before")
    parser.add_argument("--tokens", type=float, default=60e6, metavar="N", help="of a run (default: 60e6)")
    parser.add_argument("--tune-tokens", type=float, default=12e6, metavar="N", help="of a rate's run (default: 12e6)")
    parser.add_argument("--rates", type=float, nargs="+", default=RATES, metavar="LR", help=f"default: {RATES}")
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="pairs of runs (default: 3)")
    parser.add_argument("--share", type=float, default=0.8, metavar="X", help="of Muon's shorter run (default: 0.8)")
    parser.add_argument("--evaluations", type=int, default=20, metavar="N", help="of a run (default: 20)")
    parser.add_argument("--minutes", type=float, default=0, metavar="M", help="begin no run that ends later")
    arguments, flags = parser.parse_known_args(argv)
    thread_pools()  # before other threads import
    with kos.init() as comm:
        work(arguments, flags, comm, print if comm.rank == 0 else lambda line: None)


if __name__ == "__main__":
    main()
