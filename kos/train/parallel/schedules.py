"""Pipeline schedules: the order in which each rank of a pipeline runs its forwards and backwards.

The layers of a model are split into stages, in a row. A micro-batch goes forward through all of them, and its gradients
come back through all. So ranks wait for one another at the start and at the end of a step: the *bubble*. With p ranks,
m micro-batches, and the times F of a rank's forward, I and W of its backward's two halves, a step takes
m (F + I + W) and the bubble:

=================  ============================  ======================  =========================================
schedule           bubble                        activations of rank r   what is new
=================  ============================  ======================  =========================================
``1f1b``           (p - 1) (F + I + W)           p - r                   a backward as soon as its gradient comes
``zero-bubble-v``  (p - 1) F / 2 if F = I = W    p                       two chunks a rank; W where it would wait
=================  ============================  ======================  =========================================

A schedule is data: a list of actions for each rank. ``verify`` proves it, ``simulate`` predicts its times, and
``python -m kos.train.parallel.schedules 1f1b --stages 4 --micro-batches 8`` draws it.

Sources: 1F1B (PipeDream-flush, Narayanan et al. 2021, arXiv:2006.09503); zero bubble, ZB-V (Qi et al. 2023,
arXiv:2401.10241, section 6). The letters of actions are those of torch.distributed.pipelining.
"""

from __future__ import annotations

import math
import sys
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, count, islice, pairwise
from typing import NamedTuple

from kos.errors import ConfigError, InvalidArgument, KosError, plural
from kos.files import printing
from kos.reporting import ArgumentParser


class Action(NamedTuple):
    """A forward (F) or a backward (B) of one micro-batch through one of the rank's chunks of layers.

    A backward may be split: I, the gradient of the input, for which the stage before waits, and W, the gradients of
    the weights, for which no stage waits.
    """

    kind: str
    micro_batch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind}{self.micro_batch}" + (f" of chunk {self.chunk}" if self.chunk else "")


class Place(NamedTuple):
    """The place of a stage of the model."""

    rank: int
    chunk: int


class Result(NamedTuple):
    """What an action computes: an activation (F), the gradient of an input (I; a B's too), gradients of weights (W)."""

    kind: str
    micro_batch: int
    stage: int


@dataclass(frozen=True)
class Schedule:
    """The actions of each rank, in order, and the rank of each stage of the model.

    Chunk c of rank r is stage ``c * ranks + r`` of the model: activations go from the last rank back to rank 0. With
    ``v_shape`` chunk 1 runs from the last rank up to rank 0, which holds both ends of the model.
    """

    name: str
    micro_batches: int
    actions: tuple[tuple[Action, ...], ...]
    chunks: int = 1
    v_shape: bool = False
    training: bool = True
    """False: forwards alone."""

    @property
    def ranks(self) -> int:
        return len(self.actions)

    @property
    def stages(self) -> int:
        """Stages of the model: chunks of all ranks."""
        return self.ranks * self.chunks

    def stage(self, rank: int, chunk: int) -> int:
        upwards = self.v_shape and chunk % 2
        return chunk * self.ranks + (self.ranks - 1 - rank if upwards else rank)

    @property
    def stages_of_ranks(self) -> tuple[tuple[int, ...], ...]:
        """Each rank's stages, one a chunk."""
        return tuple(tuple(self.stage(rank, chunk) for chunk in range(self.chunks)) for rank in range(self.ranks))

    def place(self, stage: int) -> Place:
        chunk, position = divmod(stage, self.ranks)
        upwards = self.v_shape and chunk % 2
        return Place(self.ranks - 1 - position if upwards else position, chunk)

    def source(self, rank: int, action: Action) -> Place | None:
        """Where ``action``'s input comes from: an activation (F) or the gradient of its output (B, I).

        None: W, and the ends of the model. The same rank: another chunk's result, without a message.
        """
        return self._neighbour(rank, action, -1)

    def destination(self, rank: int, action: Action) -> Place | None:
        """Where ``action``'s output goes: an activation (F) or the gradient of its input (B, I). None: nowhere."""
        return self._neighbour(rank, action, 1)

    def _neighbour(self, rank: int, action: Action, step: int) -> Place | None:
        stage = self.stage(rank, action.chunk) + (step if action.kind == "F" else -step)
        return self.place(stage) if action.kind != "W" and 0 <= stage < self.stages else None

    @cached_property
    def slots(self) -> tuple[int, ...]:
        """The most activations that each rank keeps: of a chunk and micro-batch each, from F to the end of B or W."""
        change = {"F": 1, "I": 0, "B": -1, "W": -1}
        return tuple(max(accumulate(change[action.kind] for action in actions)) if self.training else 1
                     for actions in self.actions)  # fmt: skip

    def run(self) -> Iterator[tuple[int, Action, Result, list[Result]]]:
        """Rank, action, its result and the results that it needs, in an order in which actions can run.

        Each rank runs its list in order. It waits for messages, but sends without waiting. InvalidArgument: a deadlock.
        """
        left = [deque(actions) for actions in self.actions]
        done: set[Result] = set()
        moved = True
        while moved:
            moved = False
            for rank, queue in enumerate(left):
                while queue and done.issuperset(needs := self._needs(rank, queue[0])):
                    action, moved = queue.popleft(), True
                    kind = "I" if action.kind == "B" else action.kind
                    result = Result(kind, action.micro_batch, self.stage(rank, action.chunk))
                    done.add(result)
                    yield rank, action, result, needs
        if any(left):
            waits = [f"rank {rank} in {queue[0]} for {need.kind}{need.micro_batch} of stage {need.stage}"
                     for rank, queue in enumerate(left) if queue
                     for need in self._needs(rank, queue[0]) if need not in done]  # fmt: skip
            raise InvalidArgument(f"{self}: expected every action to run, got ranks that wait: {', '.join(waits)}")

    def _needs(self, rank: int, action: Action) -> list[Result]:
        stage = self.stage(rank, action.chunk)
        needs = {"F": [("F", stage - 1)], "W": [("I", stage)]}.get(action.kind, [("F", stage), ("I", stage + 1)])
        return [Result(kind, action.micro_batch, at) for kind, at in needs if 0 <= at < self.stages]

    def __str__(self) -> str:
        chunks = f" of {self.chunks} chunks" if self.chunks > 1 else ""
        return f"{self.name}, {plural(self.ranks, 'rank')}{chunks}, {self.micro_batches} micro-batches"


# --- the schedules: `stages` is the number of ranks ------------------------------------------------------


def one_f_one_b(stages: int, micro_batches: int) -> Schedule:
    """1F1B: each rank runs ahead until its first gradient can be back, then takes a forward and a backward in turn.

    What rank r keeps does not grow with the micro-batches: ``stages - r`` activations.
    """
    every = [0] * micro_batches
    return _schedule("1f1b", stages, micro_batches, lambda rank: _alternate(every, every, ahead=stages - 1 - rank))


def zero_bubble_v(stages: int, micro_batches: int) -> Schedule:
    """ZB-V: chunk 0 goes down the ranks, chunk 1 comes back up, and backwards are split.

    The stage before waits for I only, and W fills the time of waiting. The last rank turns around without a message and
    rank 0 computes the loss, so gradients start early. Each rank keeps the activations of ``2 * stages`` chunks, as
    much as rank 0 of 1F1B. From I to W the gradients of each layer's outputs are kept as well.
    """

    def actions(rank: int) -> Iterator[Action]:
        down, up, steady = 2 * (stages - rank) - 1, stages - rank, max(0, micro_batches - stages)
        # Down alone until micro-batch 0 comes back up; down and up; up alone for the first gradients; all in turn.
        forwards = [0] * down + [1, 0] * rank + [1] * up + [0, 1] * steady
        backwards = [1] * up + [0, 1] * micro_batches
        ahead = down + 2 * rank
        order = list(_alternate(forwards, backwards, ahead))
        tail = 2 * len(forwards) - ahead  # backwards alone: W waits for the time between them
        yield from _split_backwards(order[:tail], late=0)
        yield from _split_backwards(order[tail:], late=2 * rank)

    return _schedule("zero-bubble-v", stages, micro_batches, actions, chunks=2, v_shape=True)


SCHEDULES: dict[str, Callable[[int, int], Schedule]] = {
    "1f1b": one_f_one_b,
    "zero-bubble-v": zero_bubble_v,
}


def build(name: str, stages: int, micro_batches: int) -> Schedule:
    """The schedule of this name. ConfigError for unknown names."""
    if name not in SCHEDULES:
        raise ConfigError(f"expected one of the pipeline schedules {', '.join(SCHEDULES)}, got {name!r}")
    return SCHEDULES[name](stages, micro_batches)


def forward_only(schedule: Schedule, micro_batches: int) -> Schedule:
    """Forwards alone, for validation, with the stages where ``schedule`` has them."""
    every, chunks, ranks = range(micro_batches), range(schedule.chunks), schedule.ranks
    groups = [every[first : first + ranks] for first in every[::ranks]]  # each goes through all chunks
    order = tuple(Action("F", number, chunk) for group in groups for chunk in chunks for number in group)
    return replace(schedule, name="forward-only", micro_batches=micro_batches, actions=(order,) * ranks, training=False)


def _schedule(name: str, stages: int, micro_batches: int, actions: Callable[[int], Iterable[Action]],
              chunks: int = 1, v_shape: bool = False) -> Schedule:  # fmt: skip
    if stages < 1 or micro_batches < 1:
        raise ConfigError(f"{name}: expected at least 1 stage and 1 micro-batch, got {stages} and {micro_batches}")
    if stages == 1:  # nobody to wait for: micro-batch after micro-batch keeps the least
        every = [0] * micro_batches
        return Schedule(name, micro_batches, (tuple(_alternate(every, every, ahead=0)),))
    of_ranks = tuple(_existing(actions(rank), micro_batches) for rank in range(stages))
    return Schedule(name, micro_batches, of_ranks, chunks, v_shape)


def _existing(actions: Iterable[Action], micro_batches: int) -> tuple[Action, ...]:
    """The actions without those of padding, which are micro-batches that fill up the last phase."""
    return tuple(action for action in actions if action.micro_batch < micro_batches)


def _alternate(forwards: Iterable[int], backwards: Iterable[int], ahead: int) -> Iterator[Action]:
    """``ahead`` forwards, then one forward and one backward in turn, then the other backwards.

    The passes are given by their chunks. Each chunk takes its micro-batches in order.
    """
    next_of: dict[tuple[str, int], Iterator[int]] = defaultdict(count)
    forward = (Action("F", next(next_of["F", chunk]), chunk) for chunk in forwards)
    yield from islice(forward, ahead)
    for chunk in backwards:
        yield from islice(forward, 1)
        yield Action("B", next(next_of["B", chunk]), chunk)


def _split_backwards(actions: Iterable[Action], late: int) -> Iterator[Action]:
    """I in place of each B, and its W after the I's of ``late`` more, or at the end."""
    weights: deque[Action] = deque()
    for action in actions:
        yield action if action.kind == "F" else action._replace(kind="I")
        if action.kind == "B":
            weights.append(action._replace(kind="W"))
            if len(weights) > late:
                yield weights.popleft()
    yield from weights


def verify(schedule: Schedule) -> None:
    """Prove that a schedule is right. InvalidArgument names the action that is wrong.

    - A rank runs F and B, or F, I and W, once for each micro-batch and chunk (F alone if it is not ``training``).
    - The gradients of a weight are added in the order of micro-batches, so all schedules give the same bits.
    - What one rank sends to another arrives in the order in which it is taken; activations and gradients are apart.
    - Every action can run: no deadlock.
    """
    sent, taken = defaultdict(list), defaultdict(list)
    for rank, actions in enumerate(schedule.actions):
        _verify_actions(schedule, rank)
        for action in actions:
            what = "activations" if action.kind == "F" else "gradients"
            if (to := schedule.destination(rank, action)) and to.rank != rank:
                sent[what, rank, to.rank].append(action._replace(chunk=to.chunk))
            if (source := schedule.source(rank, action)) and source.rank != rank:
                taken[what, source.rank, rank].append(action)
    for channel in sent:
        for arrived, action in zip(sent[channel], taken[channel], strict=True):
            if arrived[1:] != action[1:]:
                what, sender, receiver = channel
                raise InvalidArgument(f"{schedule}: {what} from rank {sender} to rank {receiver}: "
                                      f"expected the input of {action} next, got that of {arrived}")  # fmt: skip
    for _ in schedule.run():
        pass


def _verify_actions(schedule: Schedule, rank: int) -> None:
    actions = schedule.actions[rank]
    whole = "FB" if schedule.training else "F"
    split = {action[1:] for action in actions if action.kind in ("I", "W")}
    expected = {Action(kind, micro_batch, chunk)
                for micro_batch in range(schedule.micro_batches) for chunk in range(schedule.chunks)
                for kind in ("FIW" if schedule.training and (micro_batch, chunk) in split else whole)}  # fmt: skip
    counts = Counter(actions)
    for action in sorted(expected | counts.keys()):
        if counts[action] != (times := int(action in expected)):
            raise InvalidArgument(f"{schedule}: rank {rank}: expected {action} {times} times, got {counts[action]}")
    for chunk in range(schedule.chunks):
        for before, after in pairwise(a for a in actions if a.chunk == chunk and a.kind in ("B", "W")):
            if before.micro_batch > after.micro_batch:
                raise InvalidArgument(f"{schedule}: rank {rank}: expected gradients in the order of micro-batches, "
                                      f"got {after} after {before}")  # fmt: skip


# --- when the actions run: predicted from their costs, and drawn as text --------------------------------

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


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    parser = ArgumentParser(
        prog="python -m kos.train.parallel.schedules", description="Draw a pipeline schedule and its idle time."
    )
    parser.add_argument("name", help=", ".join(SCHEDULES))
    parser.add_argument("--stages", type=int, default=4, help="ranks of the pipeline; default: 4")
    parser.add_argument("--micro-batches", type=int, default=8, help="default: 8")
    parser.add_argument("--costs", type=float, nargs=3, metavar=("F", "I", "W"), default=(1.0, 1.0, 1.0),
                        help="times of one chunk's passes; default: 1 1 1")  # fmt: skip
    parser.add_argument("--message", type=float, default=0.0, help="time of a message, in the same unit; default: 0")
    arguments = parser.parse_args(argv)
    times = [*arguments.costs, arguments.message]
    try:
        if not math.isfinite(sum(times)) or min(arguments.costs) <= 0 or arguments.message < 0:
            got = " ".join(f"{time:g}" for time in times)
            raise ConfigError(f"expected --costs above 0 and a --message of at least 0, got {got}")
        schedule = build(arguments.name, arguments.stages, arguments.micro_batches)
        verify(schedule)
        timeline = simulate(schedule, dict(zip("FIW", arguments.costs, strict=True)), arguments.message)
    except KosError as error:
        print(f"kos: error: {error}", file=sys.stderr)
        return 2
    with printing():
        print(draw(schedule, timeline))
        print(f"most activations kept by each rank: {', '.join(map(str, schedule.slots))} micro-batches"
              + f" of a chunk, 1/{schedule.chunks} of a rank's layers" * (schedule.chunks > 1))  # fmt: skip
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
