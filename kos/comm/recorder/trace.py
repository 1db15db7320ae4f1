"""Flight records as a trace for Perfetto (ui.perfetto.dev) and chrome://tracing: one track per rank.

Format: "Trace Event Format", complete events (``X``), times in microseconds.
"""

from __future__ import annotations

from typing import Any

from kos.comm.recorder.analysis import Dump

_ARGUMENTS = ("collective_seq_id", "p2p_seq_id", "state", "input_sizes", "input_dtypes", "output_sizes",
              "reduce_op", "root", "tag", "error")  # fmt: skip


def to_trace(dumps: list[Dump]) -> dict[str, Any]:
    """The trace, ready for ``json.dump``.

    Operations of a rank that overlap in time lie in lanes below each other; one that was not completed lasts
    until the dump.
    """
    start = min((call.created for dump in dumps for call in dump.calls), default=0)
    events: list[dict[str, Any]] = []
    for dump in dumps:
        events.append({"ph": "M", "name": "process_name", "pid": dump.rank, "args": {"name": f"rank {dump.rank}"}})
        lanes: list[int] = []  # when the last operation of each lane ended
        for call in dump.calls:
            ended = max(call.created, call.entry.get("time_discovered_completed_ns") or dump.time)
            lane = next((i for i, free in enumerate(lanes) if free <= call.created), len(lanes))
            lanes[lane : lane + 1] = [ended]
            arguments = {key: call.entry[key] for key in _ARGUMENTS if call.entry.get(key) is not None}
            events.append({
                "ph": "X", "name": call.operation, "cat": call.group, "pid": dump.rank, "tid": lane,
                "ts": (call.created - start) / 1000, "dur": (ended - call.created) / 1000,
                "args": arguments | {"called": call.where.strip()},
            })  # fmt: skip
    return {"traceEvents": events, "displayTimeUnit": "ms"}
