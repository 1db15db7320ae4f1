"""Analysis of the dumps of a job's ranks: finds ranks that did not arrive, and ranks that made another call."""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kos.comm.operation import ANY
from kos.errors import DataError, ranks_in_words

# An operation on a stream of a GPU stays "scheduled" until the host has waited for it.
_UNDONE = ("started", "failed")
_LONG_SCHEDULED = 1e9  # nanoseconds after which a "scheduled" operation is assumed to wait
_DIFFER, _ELSEWHERE = ": they differ in ", " did not arrive: waiting elsewhere"
_COMPARED = ("operation", "dtype", "elements", "op", "root")


class Call:
    """One entry of a dump."""

    def __init__(self, entry: Mapping[str, Any]) -> None:
        """Raises KeyError, TypeError or ValueError for an invalid entry."""
        self.entry = entry
        self.group, _ = entry["process_group"]
        self.operation: str = entry["profiling_name"].partition(":")[2]  # all_reduce, or send 0->1
        self.is_message = bool(entry["is_p2p"])
        self.number = int(entry["p2p_seq_id" if self.is_message else "collective_seq_id"])
        self.state: str = entry["state"]
        self.created = int(entry["time_created_ns"])
        self.completed = int(entry.get("time_discovered_completed_ns") or 0)
        timed_out = str(entry.get("error")).startswith("CollectiveTimeout")
        self.timed_out = self.completed if timed_out else math.inf
        self.where = "".join(f" at {frame['filename']}:{frame['line']}" for frame in (entry.get("frames") or [])[:1])
        shapes, dtypes = (entry[f"input_{what}"] or entry[f"output_{what}"] for what in ("sizes", "dtypes"))
        self.dtype, self.shape = dtypes[0] if dtypes else None, shapes[0] if shapes else None
        # The element count that is equal on all ranks.
        common = entry["output_sizes"] if self.operation in ("scatter", "reduce_scatter") else shapes
        self.elements = math.prod(common[0]) if common and not self.operation.endswith("_v") else None
        hash((self.signature, self.end(0) if self.is_message else ()))  # raises TypeError if a value is not hashable

    @property
    def signature(self) -> tuple[Any, ...]:
        """The values that must be equal on all ranks, in the order of ``_COMPARED``."""
        return self.operation, self.dtype, self.elements, self.entry.get("reduce_op"), self.entry.get("root")

    def end(self, rank: int) -> tuple[str, int, int, Any]:
        """("send", "recv" or "probe", source or ANY, destination, tag) of a message, with ranks of the group."""
        kind, pair = self.operation.split(" ")
        other = pair.replace("<-", "->").partition("->")[2]
        peer = ANY if other == "any" else int(other)
        return kind, *((rank, peer) if kind == "send" else (peer, rank)), self.entry.get("tag")

    def __str__(self) -> str:
        """``all_reduce #5 of float32[4] by SUM``."""
        shape = "" if self.shape is None else f" of {self.dtype}{self.shape}"
        op = f" by {self.entry['reduce_op']}" if self.entry.get("reduce_op") else ""
        root = "" if self.entry.get("root") is None else f", root {self.entry['root']}"
        return f"{self.operation} #{self.number}{shape}{op}{root}"


@dataclass(frozen=True)
class Dump:
    """One rank's record."""

    rank: int
    size: int
    job: str  # empty if unknown
    groups: dict[str, list[int]]
    calls: list[Call]
    time: int  # nanoseconds
    reason: str = ""  # why the dump was written; empty if unknown

    def waits_outside(self, group: str) -> bool:
        """Whether the rank waits in a message, or in a collective of another group."""
        return any(self.waits(call) for call in self.calls if call.is_message or call.group != group)

    def waits(self, call: Call) -> bool:
        """Whether other ranks may wait for that call of this rank."""
        return call.state in _UNDONE or (call.state == "scheduled" and self.time - call.created > _LONG_SCHEDULED)

    def last_operation(self) -> str:
        """The rank's last operation, or the first that it did not complete: failed ones before those in progress.

        If an exception of the program ended the rank between operations, the text ends with it.
        """
        if not self.calls:
            return f"rank {self.rank}: no operation"
        call = min((call for call in self.calls if call.state in _UNDONE), key=lambda call: call.state,
                   default=self.calls[-1])  # fmt: skip
        when = f", {(self.time - call.created) / 1e9:.3g} s before the dump" if self.time else ""
        why = f"; {self.reason}" if self.reason.startswith("aborted: ") and call.state != "failed" else ""
        return f"rank {self.rank}: {call.group}: {call}: {call.state}, called{call.where}{when}{why}"


def load(paths: Iterable[str | Path], unread: list[str] | None = None) -> list[Dump]:
    """Read dumps, in rank order; a folder stands for its ``*.json`` files, else for those of its last job.

    Raises DataError for a file that does not exist or is no flight record, for two dumps of one rank, and for a dump
    of another job.  Dumps of other tools carry no job: their groups are compared.  With ``unread``, files that are no
    flight records, such as truncated ones, are left out: their errors are appended to it.  If none is left, the first
    one is raised.
    """
    dumps: dict[int, Dump] = {}
    damaged: list[DataError] = []
    for given in map(Path, paths):
        files = sorted(given.glob("*.json")) if given.is_dir() else [given]
        if not files and (jobs := sorted({file.parent for file in given.glob("*/*.json")})):
            files = sorted(jobs[-1].glob("*.json"))  # a job's name begins with the time
        if not files:
            raise DataError(f"{given}: expected dumps (*.json) in the folder, got none")
        for file in files:
            try:
                dump = _load(file)
            except DataError as error:
                if unread is None or not file.exists():
                    raise
                damaged.append(error)
                continue
            if dump.rank in dumps:
                raise DataError(f"{file}: expected one dump for each rank, got a second one of rank {dump.rank}")
            other = next(iter(dumps.values()), dump)
            alike = all(dump.groups.get(name, of) == of for name, of in other.groups.items())
            if (dump.size, dump.job) != (other.size, other.job) or not alike:
                job, another = (f" ({each.job})" if each.job else "" for each in (other, dump))
                expected = f"expected a dump of the job of rank {other.rank}'s{job}, got one of another job{another}"
                raise DataError(f"{file}: {expected}: give each job a folder of its own")
            dumps[dump.rank] = dump
    if damaged and not dumps:
        raise damaged[0]
    if unread is not None:
        unread += map(str, damaged)
    return [dumps[rank] for rank in sorted(dumps)]


def _load(file: Path) -> Dump:
    try:
        data = json.loads(file.read_text())
        if not str(data["version"]).startswith("2."):
            raise ValueError(f"version {data['version']!r}")
        groups = {name: [int(r) for r in json.loads(g["ranks"])] for name, g in data["pg_config"].items()}
        calls = [Call(entry) for entry in data["entries"]]
        rank, size, job = int(data["rank"]), int(data["world_size"]), str(data.get("job", ""))
        if not 0 <= rank < size:
            raise ValueError(f"rank {rank} of {size}")
        time, reason = int(data.get("time_dumped_ns", 0)), " ".join(str(data.get("reason", "")).split())
        return Dump(rank, size, job, groups, calls, time, reason)
    except FileNotFoundError as error:
        raise DataError(f"{file}: expected a dump or a folder of dumps, got no such file or folder") from error
    except (OSError, AttributeError, KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        got = f"one without {error}" if isinstance(error, KeyError) else f"{type(error).__name__}: {error}"
        raise DataError(f"{file}: expected a flight record of version 2, got {got}") from error


def absent(dumps: list[Dump]) -> str:
    """The ranks of the job without a dump, as text; empty if there are none."""
    ranks = sorted(set(range(dumps[0].size)) - {dump.rank for dump in dumps})
    return ranks_in_words(ranks) if ranks else ""


def analyze(dumps: list[Dump], unread: Sequence[str] = ()) -> tuple[int, list[str]]:
    """Join the dumps: (number of collectives that agree on all ranks, findings).

    For each group it reports the first wrong collective, and each rank's first incomplete message.  ``unread``: the
    errors of files that ``load`` left out, which may be the dumps that are missing.
    """
    alike, findings = 0, []
    groups: dict[str, list[int]] = {}
    for dump in dumps:
        groups.update(dump.groups)
    for name, ranks in groups.items():
        number, finding = _first_wrong(name, ranks, dumps)
        alike += number
        findings += [finding] if finding else []
        findings += _messages(name, ranks, dumps)
    findings.sort(key=lambda text: (_DIFFER not in text, _ELSEWHERE in text))  # causes before their consequences
    if findings and (missing := absent(dumps)):
        findings.append(f"no dump of {missing}: lost, killed, or stuck{', or not read' if unread else ''}")
    return alike, findings


def _first_wrong(name: str, ranks: list[int], dumps: list[Dump]) -> tuple[int, str | None]:
    """The finding on a group: the first collective that differs between ranks, else the first incomplete one.

    Returns (number of collectives before it that agree, text or None).  A collective that differs comes first: its
    failure may leave earlier collectives incomplete on other ranks.
    """
    mine = {dump.rank: dump for dump in dumps if dump.rank in ranks}
    calls = {rank: {call.number: call for call in dump.calls if call.group == name and not call.is_message}
             for rank, dump in mine.items()}  # fmt: skip
    without_dump = [rank for rank in ranks if rank not in calls]
    # Rings may have overwritten earlier collectives.
    first = max((min(numbers) for numbers in calls.values() if numbers), default=0)
    anybody_waits = any(mine[rank].waits(call) for rank, numbers in calls.items() for call in numbers.values())
    alike, incomplete = 0, None
    for number in sorted({number for numbers in calls.values() for number in numbers if number >= first}):
        here = {rank: numbers[number] for rank, numbers in calls.items() if number in numbers}
        if len({call.signature for call in here.values()}) > 1:
            return alike, _differ(name, here)
        if incomplete is not None:
            continue
        # Dumps may be from different times: a record that ends earlier is no fault while no rank waits.
        began = min((call.created for call in here.values()), default=0)
        late = [rank for rank in calls if rank not in here] if anybody_waits else []
        older = [rank for rank in late if 0 < mine[rank].time < began]  # they may have called it since
        if not any(mine[rank].waits(call) for rank, call in here.items()):
            late, older = [rank for rank in late if rank not in older], []
        undone = [rank for rank, call in here.items() if call.state in _UNDONE]
        timed_out = min((call.timed_out for call in here.values()), default=math.inf)
        too_late = [rank for rank, call in here.items() if call.created > timed_out]
        idle = [rank for rank in late if not mine[rank].waits_outside(name)]
        waiting = [rank for rank in late if rank not in idle]
        others = f", {ranks_in_words(waiting)} {'wait' if waiting[1:] else 'waits'} elsewhere" if waiting else ""
        problem = (
            f"{ranks_in_words(late)}{_ELSEWHERE}" if late and not idle
            else f"{ranks_in_words(idle)} did not arrive{others}" if late
            else f"{ranks_in_words(too_late)} arrived after the timeout of others" if too_late
            else f"{ranks_in_words(without_dump)} wrote no dump" if undone and without_dump
            else f"all ranks arrived, {ranks_in_words(undone)} did not complete it" if undone
            else None
        )  # fmt: skip
        if problem:
            sites = defaultdict(list)
            for rank, call in here.items():
                sites[call.where].append(rank)
            callers = ", ".join(f"{ranks_in_words(ranks)} called it{site}" for site, ranks in sites.items())
            age = f"; older than that: the dump of {ranks_in_words(older)}" if older else ""
            incomplete = f"{name}: {next(iter(here.values()))}: {problem}; {callers}{age}"
            continue
        alike += len(here) == len(calls)
    return alike, incomplete


def _differ(name: str, here: dict[int, Call]) -> str:
    """A text of the differing calls, the most frequent first."""
    kinds = Counter(call.signature for call in here.values())
    parts = []
    for kind, _ in kinds.most_common():
        ranks = [rank for rank, call in here.items() if call.signature == kind]
        parts.append(f"{ranks_in_words(ranks)} called {here[ranks[0]]}{here[ranks[0]].where}")
    pairs = zip(_COMPARED, zip(*kinds, strict=True), strict=True)
    differences = [what for what, values in pairs if len(set(values)) > 1]
    differences = differences[:1] if "operation" in differences else differences  # other differences follow from it
    return f"{name}: {' but '.join(parts)}{_DIFFER}{', '.join(differences)}"


def _messages(name: str, ranks: list[int], dumps: list[Dump]) -> list[str]:
    """The first incomplete message of each rank, and the matching call of its peer."""
    ends: dict[tuple[Any, ...], list[Call]] = defaultdict(list)
    mine = {dump.rank: [call for call in dump.calls if call.group == name and call.is_message] for dump in dumps}
    for rank, calls in mine.items():
        for call in calls:
            ends[call.end(ranks.index(rank))].append(call)
    known = {dump.rank: dump for dump in dumps}
    findings = []
    for rank, calls in mine.items():
        undone = next((call for call in calls if call.state in _UNDONE), None)
        if undone is None:
            continue
        kind, src, dst, tag = end = undone.end(ranks.index(rank))
        if kind == "probe" or src == ANY or ("recv", ANY, dst, tag) in ends:  # which message is whose is not recorded
            findings.append(f"{name}: rank {rank} did not complete {undone}{undone.where}")
            continue
        peer = ranks[src if kind == "recv" else dst]
        theirs = ends["send" if kind == "recv" else "recv", src, dst, tag]
        position = ends[end].index(undone)  # messages of one pair and tag match in their order
        other = ""
        if peer not in mine:
            other = f"; rank {peer} wrote no dump"
        elif any(known[each].calls and known[each].calls[0].entry["record_id"] for each in (rank, peer)):
            other = f"; rank {peer}'s call is not known: one of the two records has overwritten earlier messages"
        elif position >= len(theirs) and 0 < known[peer].time < undone.created:
            other = f"; rank {peer}'s call is not known: its dump is older"
        elif position >= len(theirs):
            other = f"; rank {peer} {'sent nothing for it' if kind == 'recv' else 'did not receive it'}"
        elif theirs[position].elements != undone.elements:
            other = f"; rank {peer} called {theirs[position]}{theirs[position].where}"
        findings.append(f"{name}: rank {rank} did not complete {undone}{undone.where}{other}")
    return findings
