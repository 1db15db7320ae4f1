"""What the dumps of a job's ranks say together: who did not come, and who came with another call."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kos.errors import DataError

Entry = dict[str, Any]

# What a stream of a GPU holds stays "scheduled", for nobody looks whether it has run.
_UNDONE = ("started", "failed")
_LONG_SCHEDULED = 1e9  # nanoseconds after which a stream that has not moved on is taken to wait
_ENTRY_KEYS = (
    *("process_group", "profiling_name", "state", "is_p2p", "collective_seq_id", "p2p_seq_id", "record_id"),
    *("input_sizes", "input_dtypes", "output_sizes", "output_dtypes", "time_created_ns"),
)


@dataclass
class Dump:
    """One rank's record."""

    rank: int
    size: int
    groups: dict[str, list[int]]
    entries: list[Entry]
    reason: str = ""
    dumped_ns: int = 0


@dataclass
class Report:
    """What was found; empty ``findings`` say that the ranks agree and nothing is left undone."""

    ranks: int
    size: int
    compared: int = 0  # collectives that every rank made alike
    findings: list[str] = field(default_factory=list)
    standing: list[str] = field(default_factory=list)  # one line a rank


def load(paths: Iterable[str | Path]) -> list[Dump]:
    """Read dumps, in the order of their ranks; a folder stands for the ``*.json`` in it.

    Raises DataError for a file that cannot be read or is no flight record, and for two of the same rank.
    """
    dumps: dict[int, Dump] = {}
    for given in map(Path, paths):
        files = sorted(given.glob("*.json")) if given.is_dir() else [given]
        if not files:
            raise DataError(f"{given}: expected dumps (*.json) in the folder, got none")
        for file in files:
            dump = _load(file)
            if dump.rank in dumps:
                raise DataError(f"{file}: expected one dump a rank, got a second one of rank {dump.rank}")
            dumps[dump.rank] = dump
    return [dumps[rank] for rank in sorted(dumps)]


def _load(file: Path) -> Dump:
    try:
        data = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise DataError(f"{file}: expected a flight record, got {type(error).__name__}: {error}") from None
    try:
        if str(data["version"]).partition(".")[0] != "2":
            raise DataError(f"{file}: expected a flight record of version 2, got {data['version']!r}")
        groups = {name: [int(r) for r in json.loads(g["ranks"])] for name, g in data["pg_config"].items()}
        for entry in data["entries"]:
            missing = [key for key in _ENTRY_KEYS if key not in entry]
            if missing or len(entry["process_group"]) != 2:
                raise DataError(f"{file}: expected {missing or 'a group of two names'} in every entry")
        return Dump(
            rank=int(data["rank"]),
            size=int(data["world_size"]),
            groups=groups,
            entries=data["entries"],
            reason=str(data.get("reason", "")),
            dumped_ns=int(data.get("time_dumped_ns", 0)),
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{file}: expected a flight record, got {type(error).__name__}: {error}") from None


def analyze(dumps: list[Dump]) -> Report:
    """Join the dumps.  In each group the first thing that went wrong is told: the rest follows from it."""
    size = max(dump.size for dump in dumps)
    report = Report(len(dumps), size)
    absent = sorted(set(range(size)) - {dump.rank for dump in dumps})
    groups: dict[str, list[int]] = {}
    for dump in dumps:
        groups.update(dump.groups)
    for name, ranks in groups.items():
        calls = {dump.rank: _collectives(dump, name) for dump in dumps if dump.rank in ranks}
        # Dumps may be from different times: a record that only ends earlier is no fault while nobody waits.
        anybody_waits = any(_waits(e, dump) for dump in dumps for e in calls.get(dump.rank, {}).values())
        finding = _first_wrong(name, ranks, calls, anybody_waits, report)
        if finding:
            report.findings.append(finding)
        report.findings += _messages(name, ranks, dumps)
    if absent and report.findings:
        report.findings.append(
            f"no dump of {_ranks(absent)}: lost, killed, or stuck since before the others gave up"
        )
    report.standing = [_standing(dump) for dump in dumps]
    return report


def _collectives(dump: Dump, group: str) -> dict[int, Entry]:
    return {
        entry["collective_seq_id"]: entry
        for entry in dump.entries
        if entry["process_group"][0] == group and not entry["is_p2p"]
    }


def _waits(entry: Entry, dump: Dump) -> bool:
    queued = entry["state"] == "scheduled" and dump.dumped_ns - entry["time_created_ns"] > _LONG_SCHEDULED
    return queued or entry["state"] in _UNDONE


def _first_wrong(
    name: str, ranks: list[int], calls: dict[int, dict[int, Entry]], anybody_waits: bool, report: Report
) -> str | None:
    """The first collective of a group that not all its ranks made alike and completed."""
    made = [numbers for numbers in calls.values() if numbers]
    if not made:
        return None
    without_dump = [rank for rank in ranks if rank not in calls]
    # Older ones may have left the ring of one rank or another.
    first, last = max(min(numbers) for numbers in made), max(max(numbers) for numbers in made)
    for number in range(first, last + 1):
        here = {rank: numbers[number] for rank, numbers in calls.items() if number in numbers}
        kinds = Counter(_signature(entry) for entry in here.values())
        if len(kinds) > 1:
            return _differ(name, number, here, kinds, calls)
        late = [rank for rank in ranks if rank in calls and rank not in here]
        undone = [rank for rank, entry in here.items() if entry["state"] in _UNDONE]
        what = f"{name}: {_what(next(iter(here.values())))}"
        if late and anybody_waits:
            return f"{what}: {_ranks(late)} did not arrive; {_callers(here)}"
        if undone and without_dump:
            return f"{what}: {_ranks(without_dump)} left no dump; {_callers(here)}"
        if undone:
            return f"{what}: all ranks arrived, {_ranks(undone)} did not complete it; {_callers(here)}"
        report.compared += len(here) == len(ranks)
    return None


def _differ(
    name: str, number: int, here: dict[int, Entry], kinds: Counter[Any], calls: dict[int, dict[int, Entry]]
) -> str:
    """Who called something else: the few against the many."""
    usual = kinds.most_common(1)[0][0]
    parts = []
    for kind, _ in kinds.most_common():
        ranks = [rank for rank, entry in here.items() if _signature(entry) == kind]
        parts.append(f"{_ranks(ranks)} called {_what(here[ranks[0]])}{_at(here[ranks[0]])}")
    keys = ("operation", "dtype", "elements", "op", "root")
    differences = [key for i, key in enumerate(keys) if len({kind[i] for kind in kinds}) > 1]
    text = f"{name}: {' but '.join(parts)}: they differ in {', '.join(differences)}"
    few = [rank for rank, entry in here.items() if _signature(entry) != usual]
    for rank in few if len(few) * 2 < len(here) else ():
        entry = here[rank]
        following = [c[number + 1] for r, c in calls.items() if r != rank and number + 1 in c]
        if any(_signature(other) == _signature(entry) for other in following):
            text += f"; rank {rank} may have left out {_what(here[next(r for r in here if r != rank)])}"
            break
    return text


def _messages(name: str, ranks: list[int], dumps: list[Dump]) -> list[str]:
    """The first message of each rank that was not completed, and what its other end did."""
    sent: dict[tuple[Any, ...], list[Entry]] = {}
    for dump in dumps:
        for entry in dump.entries:
            if entry["is_p2p"] and entry["process_group"][0] == name:
                sent.setdefault(_end(entry, ranks.index(dump.rank)), []).append(entry)
    by_rank = {dump.rank: dump for dump in dumps}
    findings = []
    for dump in dumps:
        mine = (e for e in dump.entries if e["is_p2p"] and e["process_group"][0] == name)
        undone = [e for e in mine if e["state"] in _UNDONE]
        if not undone:
            continue
        entry = undone[0]
        kind, src, dst, tag = end = _end(entry, ranks.index(dump.rank))
        receiving = kind == "recv"
        peer = ranks[src if receiving else dst]
        theirs = sent.get(("send" if receiving else "recv", src, dst, tag), [])
        turn = sent[end].index(entry)  # messages of one pair and tag match in their order
        text = f"{name}: rank {dump.rank} did not complete {_what(entry)}{_at(entry)}"
        if peer not in by_rank:
            text += f"; rank {peer} left no dump"
        elif any(record[:1] and record[0]["record_id"] for record in (dump.entries, by_rank[peer].entries)):
            text += f"; what rank {peer} did is not known: older messages have left its record or this one"
        elif turn >= len(theirs):
            text += f"; rank {peer} {'sent nothing for it' if receiving else 'did not receive it'}"
        elif _elements(theirs[turn]) != _elements(entry):
            text += f"; rank {peer} called {_what(theirs[turn])}{_at(theirs[turn])}"
        findings.append(text)
    return findings


def _end(entry: Entry, rank: int) -> tuple[str, int, int, Any]:
    """("send" or "recv", source, destination, tag), with ranks of the group."""
    kind, pair = entry["profiling_name"].partition(":")[2].split(" ")
    peer = int(pair.replace("<-", "->").partition("->")[2])
    return kind, *((rank, peer) if kind == "send" else (peer, rank)), entry.get("tag")


def _signature(entry: Entry) -> tuple[Any, ...]:
    """What must be equal on all ranks."""
    operation = entry["profiling_name"].partition(":")[2]
    dtypes = entry["input_dtypes"] or entry["output_dtypes"]
    return operation, dtypes[0] if dtypes else None, _count(entry), entry.get("reduce_op"), entry.get("root")


def _count(entry: Entry) -> int | None:
    """Elements that are common to all ranks: those that each contributes, or gets."""
    operation = entry["profiling_name"].partition(":")[2]
    if operation.endswith("_v"):
        return None
    if operation in ("scatter", "reduce_scatter"):
        return math.prod(entry["output_sizes"][0]) if entry["output_sizes"] else None
    return _elements(entry)


def _elements(entry: Entry) -> int | None:
    sizes = entry["input_sizes"] or entry["output_sizes"]
    return math.prod(sizes[0]) if sizes else None


def _what(entry: Entry) -> str:
    """``all_reduce #5 of float32[4] by SUM``."""
    number = entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"]
    text = f"{entry['profiling_name'].partition(':')[2]} #{number}"
    sizes, dtypes = (
        entry["input_sizes"] or entry["output_sizes"],
        entry["input_dtypes"] or entry["output_dtypes"],
    )
    if sizes and dtypes:
        text += f" of {dtypes[0]}{sizes[0]}"
    if entry.get("reduce_op"):
        text += f" by {entry['reduce_op']}"
    if entry.get("root") is not None:
        text += f", root {entry['root']}"
    return text


def _at(entry: Entry) -> str:
    frames = entry.get("frames") or []
    return f" at {frames[0]['filename']}:{frames[0]['line']}" if frames else ""


def _callers(here: dict[int, Entry]) -> str:
    """Where those stand that came."""
    sites: dict[str, list[int]] = {}
    for rank, entry in here.items():
        sites.setdefault(_at(entry), []).append(rank)
    return ", ".join(f"{_ranks(ranks)} called it{site}" for site, ranks in sites.items())


def _standing(dump: Dump) -> str:
    """A rank's last operation, or the first that it did not complete."""
    if not dump.entries:
        return f"rank {dump.rank}: no operation"
    undone = sorted((e for e in dump.entries if e["state"] in _UNDONE), key=lambda e: str(e["state"]))
    entry = undone[0] if undone else dump.entries[-1]  # one that failed before one that is under way
    group = entry["process_group"][0]
    seconds = (dump.dumped_ns - entry["time_created_ns"]) / 1e9
    when = f", {seconds:.3g} s before the dump" if dump.dumped_ns else ""
    return f"rank {dump.rank}: {group}: {_what(entry)}: {entry['state']}, called{_at(entry)}{when}"


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, sorted(ranks)))}"
