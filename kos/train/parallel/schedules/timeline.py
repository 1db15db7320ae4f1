"""When the actions of a pipeline schedule run: predicted from their costs, and drawn as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kos.train.parallel.schedules import Action, Result, Schedule

LEGEND = "F forward, B backward, I gradient of the input, W gradient of the weights; number: micro-batch; blank: idle"


WIDEST = 10_000  # the width of a drawing is at most so many of the shortest actions


class Timeline(NamedTuple):
    """(action, start, end) of each rank's actions, in the unit of the costs."""

    passes: tuple[tuple[tuple[Action, float, float], ...], ...]

    @property
    def makespan(self) -> float:
        return max(end for actions in self.passes for _, _, end in actions)

    @property
    def idle(self) -> tuple[float, ...]:
        """The fraction of the makespan in which each rank waits."""
        return tuple(1 - sum(end - start for _, start, end in actions) / self.makespan for actions in self.passes)

    @property
    def idle_of_all(self) -> float:
        return sum(self.idle) / len(self.idle)


def simulate(
    schedule: Schedule, costs: Mapping[str, float | Sequence[float]] | None = None, message: float = 0.0
) -> Timeline:
    """Run each action as soon as its rank is free and its input is there.

    ``costs``: the times of F, I and W, each a number or one for every stage of the model; without them all are 1.
    A B takes as long as I and W. ``message``: the time between two ranks.
    """
    costs = costs or {"F": 1.0, "I": 1.0, "W": 1.0}

    def cost(kind: str, stage: int) -> float:
        if kind == "B":
            return cost("I", stage) + cost("W", stage)
        each = costs[kind]
        return each[stage] if isinstance(each, Sequence) else each

    passes: list[list[tuple[Action, float, float]]] = [[] for _ in schedule.actions]
    ended: dict[Result, float] = {}
    for rank, action, result, needs in schedule.run():
        start = passes[rank][-1][2] if passes[rank] else 0.0
        for need in needs:
            start = max(start, ended[need] + message * (schedule.place(need.stage).rank != rank))
        ended[result] = start + cost(action.kind, result.stage)
        passes[rank].append((action, start, ended[result]))
    return Timeline(tuple(map(tuple, passes)))


def draw(schedule: Schedule, timeline: Timeline | None = None) -> str:
    """A row a rank, time to the right; ``F3`` is the forward of micro-batch 3, ``F3b`` that of the rank's chunk 1."""
    timeline = timeline or simulate(schedule)
    shortest = min((end - start for actions in timeline.passes for _, start, end in actions if end > start), default=1)
    shortest = max(shortest, timeline.makespan / WIDEST)
    width = max(len(_label(schedule, action)) for actions in schedule.actions for action in actions) + 1
    lines = [f"{schedule}: {timeline.idle_of_all:.1%} idle", LEGEND + "; a, b, ...: chunk" * (schedule.chunks > 1)]
    for rank, (actions, idle) in enumerate(zip(timeline.passes, timeline.idle, strict=True)):
        row = ""
        for action, start, end in actions:
            first, last = (round(time / shortest * width) for time in (start, end))
            row = row.ljust(first) + _label(schedule, action).ljust(last - first - 1, "-")[:last - first]
        lines.append(f"rank {rank} {idle:6.1%} |{row}")
    return "\n".join(lines)


def _label(schedule: Schedule, action: Action) -> str:
    chunk = chr(ord("a") + action.chunk) if schedule.chunks > 1 else ""
    return f"{action.kind}{action.micro_batch}{chunk}"
