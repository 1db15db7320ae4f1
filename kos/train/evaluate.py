"""Evaluate checkpoints on text, tokens and multiple-choice questions: ``python -m kos.train.evaluate CHECKPOINT…``.

CHECKPOINT is the folder of a run, of a checkpoint, or of a Hugging Face model. In the folder of a run, the newest
complete checkpoint is evaluated. Under mpirun, several ranks evaluate a checkpoint together, in any layout.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import kos
from kos.commands import program
from kos.errors import ConfigError, KosError, debugging
from kos.files import PALETTE, check_picture, printing
from kos.launcher import launched_place
from kos.reporting import Parser, aligned, end_command
from kos.train import missing

SETTINGS = (
    *("text_field", "token_dtype", "loss_on", "split_turns", "split_special_tokens", "documents", "fit"),
    *("long_documents", "seq_len", "device", "dp", "tp", "pp", "cp", "backend", "dtype", "fp8_head"),
    *("micro_batch_size", "debug", "timeout", "allow_lost_content", "fields", "template_date"),
)
"""The settings of ``kos train`` that this command also has."""

COLUMNS = ("checkpoint", "data", "tokens", "loss", "perplexity", "bits_per_byte", "questions", "acc", "acc_norm")


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Format the rows as text, in columns."""
    names = [name for name in COLUMNS if any(name in row for row in rows)]
    shown = [[name.replace("_per_", "/") for name in names]]
    for row in rows:
        values = (row.get(name, "") for name in names)
        shown.append([f"{x:.4f}" if isinstance(x, float) else f"{x:,}" if isinstance(x, int) else x for x in values])
    cut = [f"{row['data']}: {row['cut']:,} contexts are longer than the model's and lack their beginning"
           for row in rows if row.get("cut")]  # fmt: skip
    return "\n".join([*aligned(shown, left=2), *cut])


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Plot a panel for each metric, with the checkpoints in the order given and a line for each source or task."""
    from matplotlib.figure import Figure

    metrics = [name for name in ("loss", "bits_per_byte", "acc", "acc_norm") if any(name in row for row in rows)]
    checkpoints = [*dict.fromkeys(row["checkpoint"] for row in rows)]
    figure = Figure(figsize=(4.5 * len(metrics), 4.5), layout="constrained")
    for number, metric in enumerate(metrics, 1):
        axes = figure.add_subplot(1, len(metrics), number)
        of = [row for row in rows if metric in row]
        for source, name in enumerate(dict.fromkeys(row["data"] for row in of)):
            points = [(checkpoints.index(row["checkpoint"]), row[metric]) for row in of if row["data"] == name]
            axes.plot(*zip(*points, strict=True), marker="o", color=PALETTE[source % len(PALETTE)], label=name)
        axes.set_title(metric.replace("_per_", "/"), fontsize=11, loc="left")
        axes.set_xticks(range(len(checkpoints)), checkpoints, rotation=30, ha="right", fontsize=8)
        axes.grid(color="#dddddd", linewidth=0.7)
        axes.legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=130)


def make_parser() -> argparse.ArgumentParser:
    from kos.train.config.flags import add_flag
    from kos.train.config.options import KEYS

    name = program("kos.train.evaluate")
    parser = Parser(
        prog=name, usage=f"[mpirun -n RANKS] {name} CHECKPOINT… [--data NAME|PATH]… [--choices FILE]… [flags]",
        description="Evaluate checkpoints on text, tokens and multiple-choice questions.",
        argument_default=argparse.SUPPRESS, allow_abbrev=False,
    )  # fmt: skip
    about = "The folder of a run, of a checkpoint, or of a Hugging Face model."
    parser.add_argument("checkpoints", nargs="+", type=Path, metavar="CHECKPOINT", help=about)
    about = "Compute the loss on this data, named as for --val-data of kos train. Can be repeated. Default: none."
    parser.add_argument("--data", action="append", default=[], metavar="NAME|PATH", help=about)
    about = "Compute the accuracy on the questions of this .jsonl or llm.c file. Can be repeated. Default: none."
    parser.add_argument("--choices", action="append", default=[], type=Path, metavar="FILE", help=about)
    about = "Plot the table to this file, .png or .svg. Default: none."
    parser.add_argument("--plot", type=Path, default=None, metavar="FILE", help=about)
    for key in SETTINGS:
        add_flag(parser, key, "the model's context, up to 1024" if key == "seq_len" else KEYS[key].default)
    return parser


def run(options: dict[str, Any], console: Any) -> None:
    """Evaluate all checkpoints.  Rank 0 prints the rows, and plots them if asked."""
    from kos.train.evaluator import evaluate
    from kos.train.parallel.failures import same_on_all

    flags = {key: value for key, value in options.items() if key in SETTINGS}
    with kos.init(flags.get("backend", "auto"), timeout=flags.get("timeout", 300.0)) as comm:
        same_on_all(comm, {key: str(value) for key, value in options.items()})
        rows = [
            row for folder in options["checkpoints"]
            for row in evaluate(folder, options["data"], options["choices"], flags, comm, console.progress)
        ]  # fmt: skip
        console.close()
        if comm.rank > 0:
            return
    with printing():
        print(table(rows))
    if options["plot"]:
        draw(rows, options["plot"])


def main(argv: Sequence[str] | None = None) -> int:
    """Evaluate, print a table on rank 0 and return the exit status.  With several ranks, a failure ends the job."""
    (rank, ranks), options = launched_place(), dict[str, Any]()
    arguments = sys.argv[1:] if argv is None else [*argv]
    if rank != 0 and {"-h", "--help"} & {*arguments}:
        return 0
    try:
        try:
            from kos.train.tools.console import Console

            options = vars(make_parser().parse_args(arguments))
        except ImportError as error:
            raise missing(error) from error
        if not options["data"] and not options["choices"]:
            raise ConfigError("--data: expected --data or --choices to evaluate on, got neither")
        if options["plot"] is not None and rank == 0:
            check_picture(options["plot"])
        run(options, Console(rank, 0))
    except (KosError, OSError, MemoryError) as error:
        inputs = all(map(Path.exists, options.get("checkpoints", ())))
        return end_command(error, rank, ranks, inputs, "--debug" in arguments or debugging())
    return 0


if __name__ == "__main__":
    sys.exit(main())
