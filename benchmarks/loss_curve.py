"""A trainer's run as a file of results: ``python -m benchmarks.loss_curve RUN --command COMMAND --json FILE``.

Losses of every step and validation come from the run's ``metrics.jsonl``.  ``--log`` names a file with what the run
printed.  Its lines are kept, of the steps only the first and those with a validation, for pages that quote them.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from statistics import median

from kos.bench import report
from kos.commands import program
from kos.train.tools import read_metrics


def main() -> None:
    parser = argparse.ArgumentParser(
        program("benchmarks.loss_curve"), description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="the run's folder")
    parser.add_argument("--command", required=True, help="how the run was started")
    parser.add_argument("--log", type=Path, help="what the run printed")
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    arguments = parser.parse_args()
    steps = read_metrics(arguments.run / "metrics.jsonl")
    rows = [{key: step[key] for key in ("step", "loss", "val_loss", "lr") if key in step} for step in steps]
    result = {
        **report.provenance("benchmarks.loss_curve", None, 1),
        "command": arguments.command,
        "val_loss_before": rounded(steps[0].get("val_loss_before")),
        "tokens_per_second": round(median(step["tokens_per_second"] for step in steps)),
        "output": quotable(arguments.log.read_text().splitlines()) if arguments.log else [],
        "rows": [{key: value if key == "step" else rounded(value) for key, value in row.items()} for row in rows],
    }
    arguments.json.write_text(report.to_json(result))


def quotable(lines: list[str]) -> list[str]:
    return [line for line in lines if not re.match(r"step +([2-9]|1\d)", line) or "val_loss" in line]


def rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}")


if __name__ == "__main__":
    main()
