"""``python -m kos.train.parallel.schedules``: draw a pipeline schedule and its idle time."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence

from kos.errors import ConfigError, KosError
from kos.files import printing
from kos.train.parallel.schedules import SCHEDULES, build, verify
from kos.train.parallel.schedules.timeline import draw, simulate


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m kos.train.parallel.schedules", description=__doc__)
    parser.add_argument("name", help=", ".join(SCHEDULES))
    parser.add_argument("--stages", type=int, default=4, help="ranks of the pipeline; default: 4")
    parser.add_argument("--micro-batches", type=int, default=8, help="default: 8")
    parser.add_argument("--costs", type=float, nargs=3, metavar=("F", "I", "W"), default=(1.0, 1.0, 1.0),
                        help="times of one chunk's passes; default: 1 1 1")  # fmt: skip
    parser.add_argument("--message", type=float, default=0.0, help="time of a message, in the same unit; default: 0")
    arguments = parser.parse_args(argv)
    times = [*arguments.costs, arguments.message]
    try:
        if not math.isfinite(sum(times)) or min(arguments.costs) <= 0 or arguments.message < 0:
            got = " ".join(f"{time:g}" for time in times)
            raise ConfigError(f"expected --costs above 0 and a --message of at least 0, got {got}")
        schedule = build(arguments.name, arguments.stages, arguments.micro_batches)
        verify(schedule)
        timeline = simulate(schedule, dict(zip("FIW", arguments.costs, strict=True)), arguments.message)
    except KosError as error:
        print(f"kos: error: {error}", file=sys.stderr)
        return 2
    with printing():
        print(draw(schedule, timeline))
        print(f"most activations kept by each rank: {', '.join(map(str, schedule.slots))} micro-batches"
              + f" of a chunk, 1/{schedule.chunks} of a rank's layers" * (schedule.chunks > 1))  # fmt: skip
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
