"""What the reports of all ranks show: ranks that can never continue, and what is left over at the end."""

from __future__ import annotations

import linecache
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

_SHOWN = 16  # ranks in a message
_EACH = 3  # findings of one kind
ENDED = ("returned", "failed", "dead", "crash", "stall")
"""The states of ranks that make no more calls."""

State = Mapping[str, Any]
Ranks = Mapping[int, tuple[str, State, str]]
"""For each rank: whether it runs, waits or has ended; its last report; and why it has ended."""


def _missing(call: State, ranks: Ranks) -> tuple[bool, list[int]]:
    """The ranks that have not made their part of ``call``, and whether one of them is enough.

    Ranks that have reported nothing since they went on count as missing.
    """
    key, number = call["key"], call["number"]

    def count(rank: int | str, key: str) -> int:
        return int(ranks[int(rank)][1].get("counts", {}).get(key, 0))

    if call["kind"] in ("collective", "group"):
        return False, [rank for rank in call["ranks"] if count(rank, key) <= number]
    group, kind, src, dst, tag = key.rsplit(" ", 4)
    if src == "-1":
        return True, [rank for rank in call["ranks"] if rank != int(dst)]
    if kind == "recv":
        return False, [] if count(src, f"{group} send {src} {dst} {tag}") > number else [int(src)]
    open_to_any = count(dst, f"{group} recv -1 {dst} {tag}") > count(dst, f"{group} any {dst} {tag}")
    arrived = open_to_any or count(dst, f"{group} recv {src} {dst} {tag}") > number
    return False, [] if arrived else [int(dst)]


def stuck(ranks: Ranks) -> dict[int, list[int]]:
    """The ranks that can never continue, with the ranks that each waits for; empty if there are none.

    A rank that waits for a dead one continues: its wait raises.  A rank that waits for one of several futures continues
    when one of them is complete.  A call is never complete if one of its ranks has returned, or can never continue,
    before it has made its part.  Reported waits of ranks that only wait for one another are final, so no time has to
    pass.
    """
    over = {rank for rank, (status, _, _) in ranks.items() if status in ("returned", "stall")}  # kos sees dead ones
    waits = {
        rank: [_missing(call, ranks) for calls in state["wait"] for call in calls]
        for rank, (status, state, _) in ranks.items() if status == "wait"
    }  # fmt: skip
    one_is_enough = {rank: len(ranks[rank][1]["wait"]) > 1 for rank in waits}
    found = set(waits)
    while True:
        dead = found | over
        left = {
            rank for rank in found if (all if one_is_enough[rank] else any)(
                (all if either else any)(other in dead for other in others) for either, others in waits[rank]
            )
        }  # fmt: skip
        if left == found:
            return {rank: sorted({o for _, others in waits[rank] for o in others if o in dead}) for rank in found}
        found = left


def place(line: str) -> str:
    """``file:line: source``."""
    file, _, number = line.rpartition(":")
    source = linecache.getline(file, int(number)).strip() if number.isdecimal() else ""
    return f"{line}: {source}" if source else line


def _at(call: State) -> str:
    group = f" of group {call['ranks'][:_SHOWN]}" if call["group"] not in ("", "0") else ""
    return f"{call['what']}{group} at {place(call['line'])}"


def _names(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:_SHOWN]))}{', …' * (len(ranks) > _SHOWN)}"


def describe_deadlock(ranks: Ranks, found: Mapping[int, list[int]]) -> str:
    """The text of a deadlock: what each rank waits for, and the cycle, or the ranks that have ended too early."""
    ended = sorted({other for others in found.values() for other in others if other not in found})
    head = "every rank waits" if len(found) == len(ranks) else f"{_names(sorted(found))} can never continue"
    lines = []
    for rank in ended[:_SHOWN]:
        _, state, why = ranks[rank]
        last = "".join(f"; its last call was {_at(call)}" for call in state.get("calls", [])[-1:])
        lines.append(f"rank {rank} has ended: {why or 'its function returned'}{last}")
    for rank in sorted(found)[:_SHOWN]:
        state = ranks[rank][1]
        for call in [call for calls in state["wait"] for call in calls][:_EACH]:
            waits = "" if state["at"] == call["line"] else f" (waits at {place(state['at'])})"
            lines.append(f"rank {rank} waits for {_names(found[rank])} in {_at(call)}{waits}")
            mine, line = state["lines"].get(call["line"], 0), call["line"]
            fewer = {other: ranks[other][1].get("lines", {}).get(line, 0) for other in ended}
            lines += [f"  {mine} calls at this line on rank {rank}, {times} on rank {other}: uneven numbers of batches?"
                      for other, times in fewer.items() if 0 < times < mine]  # fmt: skip
    path = [min(found)]
    while path[-1] not in path[:-1] and (following := [other for other in found[path[-1]] if other in found]):
        path.append(following[0])
    if path[-1] in path[:-1]:
        lines.append("the cycle: " + " -> ".join(f"rank {rank}" for rank in path[path.index(path[-1]) :]))
    return f"deadlock: {head}:\n  " + "\n  ".join(lines)


def differing(mismatch: Sequence[Any], states: Sequence[State]) -> list[str]:
    """The lines of the calls that differ: of a collective, by its number in kos; of a message, by its key."""
    (group, sequence, message), lines = mismatch, []
    for rank, state in enumerate(states):
        calls = state.get("calls", ())
        if message:
            mine = [c for c in calls if [c["key"].replace(" recv ", " send "), c["number"]] == message]
        else:
            ours = [c for c in calls if c["kind"] == "collective" and c["group"] == group]
            mine = [c for c in ours if c["sequence"] == sequence] or [c for c in ours[-1:] if c["sequence"] < 0]
        lines += [f"rank {rank} called {_at(c)}" for c in mine[-1:]]
    return lines


def leftovers(job: Any, states: Sequence[State]) -> str:
    """What is wrong although every rank has returned; empty if nothing is."""
    if not job.plan.harmless:
        return ""
    found: list[str] = []
    for rank, state in enumerate(states if job.strict else ()):
        unwaited = [call for call in state["calls"] if not call["waited"]][:_EACH]
        found += [f"rank {rank} never waited for the Work of {_at(call)}" for call in unwaited]
    received = Counter[str]()
    for state in states:
        received.update({key.replace(" recv ", " send "): n for key, n in state["counts"].items() if " recv " in key})
    for rank, state in enumerate(states if job.messages else ()):
        lost = [c for c in state["calls"] if c["kind"] == "send" and c["number"] >= received[c["key"]]][:_EACH]
        found += [f"rank {rank} sent a message that no rank received: {_at(call)}" for call in lost]
    return "\n".join(found + (_unordered(states) if job.strict else []))


def _unordered(states: Sequence[State]) -> list[str]:
    """Collectives that two ranks began in different orders in two groups, or with different roots or reductions.

    With NCCL, two groups can wait for each other.  A broadcast does not wait on its root, so kos may not see two roots.
    """
    orders = [[call for call in state["calls"] if call["kind"] == "collective"] for state in states]
    members = {call["group"]: call["ranks"] for calls in orders for call in calls}
    for pair in [*combinations(members, 2), *((group,) for group in members)]:
        both = [rank for rank in members[pair[0]] if rank in members[pair[-1]]]
        theirs = {rank: [call for call in orders[rank] if call["group"] in pair] for rank in both}
        for rank in both[1:]:
            for mine, other in zip(theirs[both[0]], theirs[rank], strict=False):
                rooted = mine["what"].startswith(("broadcast", "reduce of")) and mine["what"] != other["what"]
                if mine["group"] != other["group"] or rooted:
                    what = "calls differ" if rooted else "two groups are used in different orders"
                    return [f"{what}: rank {both[0]} calls {_at(mine)}, where rank {rank} calls {_at(other)}"]
    return []
