"""What the flight recorder and the comparison of calls cost per call: python -m benchmarks.recorder

Times apart from everything else, as the communicator makes them: the flight recorder's record of a launched call
and of its completion; and on a host the fingerprint of a call, its publication
and its comparison with the other ranks' calls, which have arrived.  Nanoseconds per call, the best of many runs.
"""

from __future__ import annotations

import argparse
import itertools
import timeit
from collections.abc import Callable
from pathlib import Path
from time import time_ns
from types import SimpleNamespace
from typing import Any

import numpy as np

from kos import _core
from kos.bench.report import provenance, to_json
from kos.comm.failures import FailureLog
from kos.comm.host.shared import FingerprintRing, open_segment
from kos.comm.host.shared.segment import ARRIVED, RING
from kos.comm.operation import Operation, Options
from kos.comm.prepared import Prepared, without_memory
from kos.comm.recorder import COMPLETED, Group, Recorder
from kos.comm.reduction import ReduceOp, resolve
from kos.comm.work import Work, record_start
from kos.commands import program
from kos.dtypes import dtype_of
from kos.errors import InvalidArgument
from kos.files import check_writable
from kos.memory import as_buffer
from kos.testing import spawn

CALLS = 2_000


def best(call: Callable[[], object], runs: int) -> float:
    return min(timeit.repeat(call, number=CALLS, repeat=runs)) / CALLS * 1e9


def example(group: Group) -> Work[Any]:
    buffer = as_buffer(np.zeros((4, 4), np.float32), "x", writable=True)
    reduction = resolve(ReduceOp.SUM, dtype_of(buffer.dtype.numpy), 1)
    o = without_memory(Operation("all_reduce", 0, Options(timeout=120.0), buffer, buffer, reduction))
    backend = SimpleNamespace(name="mock", work=Work, group_suffix="")
    prepared = Prepared(o, backend, lambda work: None)
    prepared.description = group, o
    return Work(prepared)


def calls_beside_others(ranks: int, work: Work[Any]) -> tuple[FingerprintRing, Callable[[], None]]:
    """Rank 0 of a host, and a function by which all other ranks begin the next call, which is ``work`` too."""
    segment, *_ = spawn(lambda comm: open_segment(comm.rendezvous)[0], ranks)
    assert segment is not None
    calls = FingerprintRing(segment, FailureLog(range(ranks), 0))
    calls.add(work.prepared)
    words, others = segment.words, [(segment.line(rank), segment.ring(rank)) for rank in range(1, ranks)]
    work.sequence = -1

    def begin() -> None:
        work.sequence = sequence = work.sequence + 1
        for line, ring in others:
            words[ring + sequence % RING] = work.prepared.fingerprint + sequence
            words[line + ARRIVED] = sequence + 1

    return calls, begin


def main() -> None:
    parser = argparse.ArgumentParser(
        program("benchmarks.recorder"), description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results and their provenance")
    parser.add_argument("--runs", type=int, default=300, help="runs of each call, of which the best counts [300]")
    args = parser.parse_args()
    if args.json:
        try:
            check_writable(args.json)
        except InvalidArgument as error:
            raise SystemExit(f"kos: error: --json {error}") from None
    if _core.unavailable:
        raise SystemExit(f"kos: error: {_core.unavailable}")
    rows: list[dict[str, Any]] = []
    group = Group(Recorder(0, 1), "world", [0], 0, "mock")
    work = example(group)
    comm: Any = SimpleNamespace(_collectives=itertools.count(), recorder=group.recorder)

    def empty() -> None:
        pass

    def complete() -> None:
        record = work.record
        if record is not None:
            record[COMPLETED] = time_ns()

    nothing = best(empty, args.runs)
    launch = best(lambda: record_start(comm, work), args.runs) - nothing
    over = best(complete, args.runs) - nothing
    print(f"recorder: launch {launch:.0f} ns + completion {over:.0f} ns = {launch + over:.0f} ns a call")
    rows.append({"what": "recorder", "launch_ns": launch, "completion_ns": over})
    for ranks in (2, 4, 8):
        calls, begin = calls_beside_others(ranks, work)

        def all_reduce(calls: FingerprintRing = calls, begin: Callable[[], None] = begin) -> None:
            begin()
            calls.announce(work)
            calls.check(work)

        def other(calls: FingerprintRing = calls, begin: Callable[[], None] = begin) -> None:
            begin()
            calls.publish(work)()

        sums, others = (best(call, args.runs) for call in (all_reduce, other))
        alone = best(begin, args.runs)
        sums, others = sums - alone, others - alone
        print(f"comparison of calls, {ranks} ranks: all_reduce {sums:.0f}, other collectives {others:.0f} ns a call")
        rows.append({"what": "comparison of calls", "ranks": ranks, "all_reduce_ns": sums, "others_ns": others})
    if args.json:
        rows = [{k: round(v) if isinstance(v, float) else v for k, v in row.items()} for row in rows]
        args.json.write_text(to_json(provenance("benchmarks.recorder", None, 1) | {"rows": rows}))


if __name__ == "__main__":
    main()
