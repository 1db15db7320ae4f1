"""Read flight records: python -m kos.comm.recorder DUMP… [--trace OUT.json]

Joins the dumps of a job's ranks (files, or folders of them) and says which rank did not arrive at which
operation, which ranks called different operations, and where each rank stands.  Exit status: 0 where all
ranks agree and nothing is left undone, 1 where something was found, 2 for dumps that cannot be read.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from kos.comm.recorder.analysis import absent, analyze, counted, load
from kos.comm.recorder.trace import to_trace
from kos.errors import DataError


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m kos.comm.recorder", description=(__doc__ or "").partition("\n")[2])
    parser.add_argument("dumps", nargs="+", metavar="DUMP", help="a rank's dump, or a folder of them")
    parser.add_argument("--trace", type=Path, metavar="OUT.json", help="also write a trace for ui.perfetto.dev")
    options = parser.parse_args(arguments)
    try:
        dumps = load(options.dumps)
        if options.trace:
            options.trace.write_text(json.dumps(to_trace(dumps)))
    except (DataError, OSError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    alike, findings = analyze(dumps)
    of = f"{counted(len(dumps), 'dump')} of {counted(dumps[0].size, 'rank')}"
    print(f"{of}; {counted(alike, 'collective')} that all ranks made alike")
    missing = f" in these; no dump of {missing}" if (missing := absent(dumps)) else ""
    wrong = "where each rank stands:" if findings else f"nothing is wrong{missing}; the last operation of each rank:"
    print(*findings, wrong, *(f"  {dump.standing()}" for dump in dumps), sep="\n")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
