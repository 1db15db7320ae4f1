"""Flight records as a trace for Perfetto (ui.perfetto.dev) and chrome://tracing: one track per rank.

Format: "Trace Event Format", complete events (``X``), times in microseconds.
"""

from __future__ import annotations

from typing import Any

from kos.comm.recorder.analysis import Dump


def to_trace(dumps: list[Dump]) -> dict[str, Any]:
    """The trace, ready for ``json.dump``.

    Operations of a rank that overlap in time lie in lanes below each other; one that was not completed lasts
    until the dump.
    """
    start = min((e["time_created_ns"] for dump in dumps for e in dump.entries), default=0)
    events: list[dict[str, Any]] = []
    for dump in dumps:
        events.append(_name("process_name", dump.rank, 0, f"rank {dump.rank}"))
        events.append(
            {"ph": "M", "name": "process_sort_index", "pid": dump.rank, "args": {"sort_index": dump.rank}}
        )
        lanes: list[int] = []  # when the last operation of each lane ended
        for entry in dump.entries:
            began = entry["time_created_ns"]
            ended = max(began, entry.get("time_discovered_completed_ns") or dump.dumped_ns)
            lane = next((i for i, free in enumerate(lanes) if free <= began), len(lanes))
            lanes[lane : lane + 1] = [ended]
            events.append(
                {
                    "ph": "X",
                    "name": entry["profiling_name"].partition(":")[2],
                    "cat": entry["process_group"][0],
                    "pid": dump.rank,
                    "tid": lane,
                    "ts": (began - start) / 1000,
                    "dur": (ended - began) / 1000,
                    "args": _arguments(entry),
                }
            )
        events += [_name("thread_name", dump.rank, lane, "operations") for lane in range(len(lanes))]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _name(what: str, rank: int, lane: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": rank, "tid": lane, "args": {"name": name}}


def _arguments(entry: dict[str, Any]) -> dict[str, Any]:
    keys = ("collective_seq_id", "p2p_seq_id", "state", "input_sizes", "input_dtypes", "output_sizes")
    frames = entry.get("frames") or []
    where = {"at": f"{frames[0]['filename']}:{frames[0]['line']}"} if frames else {}
    optional = {
        key: entry[key] for key in ("reduce_op", "root", "tag", "error") if entry.get(key) is not None
    }
    return {key: entry[key] for key in keys} | optional | where
