"""Read flight records: python -m kos.comm.recorder DUMP… [--trace OUT.json]

Joins the dumps of a job's ranks (files, or folders of them) and says which rank did not arrive at which
operation, which ranks called different operations, and where each rank stands.  Exit status: 0 where all
ranks agree and nothing is left undone, 1 where something was found, 2 for dumps that cannot be read.
"""

from __future__ import annotations

import argparse
import json
import sys

from kos.comm.recorder.analysis import analyze, load
from kos.comm.recorder.trace import to_trace
from kos.errors import DataError


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    lines = (__doc__ or "").splitlines()
    parser = argparse.ArgumentParser(
        prog="python -m kos.comm.recorder",
        description=" ".join(lines[2:]),
    )
    parser.add_argument("dumps", nargs="+", metavar="DUMP", help="a rank's dump, or a folder of them")
    parser.add_argument("--trace", metavar="OUT.json", help="also write them as a trace for ui.perfetto.dev")
    options = parser.parse_args(arguments)
    try:
        dumps = load(options.dumps)
        if options.trace:
            with open(options.trace, "w") as file:
                json.dump(to_trace(dumps), file)
    except (DataError, OSError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    report = analyze(dumps)
    print(
        f"{report.ranks} dumps of {report.size} ranks; {report.compared} collectives that all ranks made alike"
    )
    for finding in report.findings:
        print(finding)
    print(
        "where each rank stands:" if report.findings else "nothing is wrong; the last operation of each rank:"
    )
    for line in report.standing:
        print(f"  {line}")
    return 1 if report.findings else 0


if __name__ == "__main__":
    sys.exit(main())
