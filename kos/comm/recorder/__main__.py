"""Read flight records: python -m kos.comm.recorder DUMP… [--trace OUT.json]

Joins the dumps of a job's ranks (files, or folders of them).  Reports which rank did not arrive at which operation,
which ranks called different operations, and the last operation of each rank.  A file that is no dump, such as a
truncated one, is named and left out.  Exit status: 0 if all ranks agree and all operations are complete, 1 if a problem
was found or a file was left out, 2 if there is no dump or the dumps are of several jobs.  The trace is for Perfetto
and chrome://tracing: one track per rank.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from kos.comm.recorder.analysis import Dump, absent, analyze, load
from kos.commands import program
from kos.errors import DataError, plural
from kos.files import printing
from kos.reporting import ArgumentParser

_TRACED = ("collective_seq_id", "p2p_seq_id", "state", "input_sizes", "input_dtypes", "output_sizes", "reduce_op",
           "root", "tag", "error")  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    parser = ArgumentParser(prog=program("kos.comm.recorder"), description=(__doc__ or "").partition("\n")[2])
    parser.add_argument("dumps", nargs="+", metavar="DUMP", help="a rank's dump, or a folder of them")
    parser.add_argument("--trace", type=Path, metavar="OUT.json", help="also write a trace for ui.perfetto.dev")
    options = parser.parse_args(arguments)
    unread: list[str] = []
    try:
        dumps = load(options.dumps, unread)
        if options.trace:
            options.trace.write_text(json.dumps(to_trace(dumps)))
    except (DataError, OSError) as error:
        print(f"kos: error: {error}", file=sys.stderr)
        return 2
    alike, findings = analyze(dumps, unread)
    of = f"{plural(len(dumps), 'dump')} of {plural(dumps[0].size, 'rank')}"
    missing = f" in these; no dump of {missing}" if (missing := absent(dumps)) else ""
    wrong = "where each rank stands:" if findings else f"nothing is wrong{missing}; the last operation of each rank:"
    with printing():
        print(f"{of}; {plural(alike, 'collective')} that {'these' if missing else 'all'} ranks made alike")
        damaged = (f"not read: {error}" for error in unread)
        print(*damaged, *findings, wrong, *(f"  {dump.last_operation()}" for dump in dumps), sep="\n")
    return 1 if findings or unread else 0


def to_trace(dumps: list[Dump]) -> dict[str, Any]:
    """Complete events of the "Trace Event Format", in microseconds.

    Operations of a rank that overlap in time have separate lanes.  An incomplete operation lasts until the dump.
    """
    start = min((call.created for dump in dumps for call in dump.calls), default=0)
    events: list[dict[str, Any]] = []
    for dump in dumps:
        events.append({"ph": "M", "name": "process_name", "pid": dump.rank, "args": {"name": f"rank {dump.rank}"}})
        lanes: list[int] = []  # when the last operation of each lane ended
        for call in dump.calls:
            ended = max(call.created, call.completed or dump.time)
            lane = next((i for i, free in enumerate(lanes) if free <= call.created), len(lanes))
            lanes[lane : lane + 1] = [ended]
            arguments = {key: call.entry[key] for key in _TRACED if call.entry.get(key) is not None}
            events.append({
                "ph": "X", "name": call.operation, "cat": call.group, "pid": dump.rank, "tid": lane,
                "ts": (call.created - start) / 1000, "dur": (ended - call.created) / 1000,
                "args": arguments | {"called": call.where.strip()},
            })  # fmt: skip
    return {"traceEvents": events, "displayTimeUnit": "ms"}


if __name__ == "__main__":
    sys.exit(main())
