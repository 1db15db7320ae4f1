"""Pipeline schedules: right, no idler than their papers say, and drawn."""

import random
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kos.errors import InvalidArgument
from kos.train.parallel.schedules import (
    SCHEDULES,
    Action,
    Schedule,
    build,
    draw,
    forward_only,
    main,
    one_f_one_b,
    simulate,
    verify,
    zero_bubble_v,
)

COSTS = [{"F": 1, "I": 1, "W": 1}, {"F": 1.25, "I": 1.5, "W": 1}, {"F": 3, "I": 4, "W": 2}]


def sizes() -> Iterator[tuple[int, int]]:
    """Ranks and micro-batches that a schedule takes."""
    for ranks in range(1, 9):
        for micro_batches in range(1, 17):
            yield ranks, micro_batches


def changed(schedule: Schedule, rank: int, actions: list[Action]) -> Schedule:
    of_ranks = list(schedule.actions)
    of_ranks[rank] = tuple(actions)
    return replace(schedule, actions=tuple(of_ranks))


def letters(actions: tuple[Action, ...]) -> str:
    return " ".join(f"{kind}{micro_batch}{('', 'b', 'c', 'd')[chunk]}" for kind, micro_batch, chunk in actions)


def execute(schedule: Schedule) -> None:
    """Run the actions of all ranks.  Messages go through plain queues, which do not know what a message holds.

    Raises AssertionError if a rank receives the message of a wrong stage or micro-batch, if it adds the gradients of
    weights in another order than that of the micro-batches, or if it waits forever.
    """
    channels: dict[tuple[bool, int, int], deque[tuple[int, int]]] = defaultdict(deque)
    added = Counter[int]()
    left, done = [deque(actions) for actions in schedule.actions], set[tuple[str, int, int]]()

    def try_to_run(rank: int, action: Action) -> bool:  # False: it has to wait
        stage, forward, micro_batch = schedule.stage(rank, action.chunk), action.kind == "F", action.micro_batch
        source, to = schedule.source(rank, action), schedule.destination(rank, action)
        received = micro_batch, stage - 1 if forward else stage + 1
        if source is not None and source.rank == rank:  # from chunk to chunk on one rank
            if ("F" if forward else "I", *received) not in done:
                return False
        elif source is not None:
            if not (channel := channels[forward, source.rank, rank]):
                return False
            assert channel.popleft() == received
        if action.kind in "BW":
            assert micro_batch == added[stage]
            added[stage] += 1
        earlier = {"F": "", "W": "I"}.get(action.kind, "F")
        assert not earlier or (earlier, micro_batch, stage) in done
        if to is not None and to.rank != rank:
            channels[forward, rank, to.rank].append((micro_batch, stage))
        done.update((kind, micro_batch, stage) for kind in ("IW" if action.kind == "B" else action.kind))
        return True

    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(left):
            while actions and try_to_run(rank, actions[0]):
                actions.popleft()
                moved = True
    assert not any(left) and not any(channels.values())
    assert len(done) == 3 * schedule.stages * schedule.micro_batches


# --- every schedule --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_is_right(name):
    for ranks, micro_batches in sizes():
        schedule = build(name, ranks, micro_batches)
        verify(schedule)
        execute(schedule)
        validation = forward_only(schedule, micro_batches + 1)
        verify(validation)
        assert validation.slots == (1,) * ranks


@pytest.mark.parametrize("name", SCHEDULES)
def test_one_stage_takes_micro_batch_after_micro_batch(name):
    schedule = build(name, 1, 3)
    assert [letters(actions) for actions in schedule.actions] == ["F0 B0 F1 B1 F2 B2"]
    assert schedule.slots == (1,) and schedule.stages == 1


def test_the_orders_of_the_papers():
    assert list(map(letters, one_f_one_b(2, 3).actions)) == ["F0 F1 B0 F2 B1 B2", "F0 B0 F1 B1 F2 B2"]
    assert list(map(letters, zero_bubble_v(2, 3).actions)) == [
        "F0 F1 F2 F0b I0b W0b F1b I1b W1b I0 W0 F2b I2b W2b I1 W1 I2 W2",
        "F0 F0b F1 F1b I0b W0b F2 I0 W0 F2b I1b W1b I1 I2b I2 W1 W2b W2",
    ]


# --- time ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("costs", [*COSTS[:1], *(pytest.param(x, marks=pytest.mark.slow) for x in COSTS[1:])], ids=str)
def test_idle_time_is_that_of_the_papers(costs):
    f, i, w = costs.values()
    for ranks, m in sizes():
        timeline = simulate(one_f_one_b(ranks, m), costs)
        assert timeline.makespan == pytest.approx((m + ranks - 1) * (f + i + w))
        assert timeline.idle == pytest.approx([(ranks - 1) / (m + ranks - 1)] * ranks)


def test_zero_bubble_v_waits_for_the_first_forward_alone():
    for ranks, m in sizes():
        makespan = simulate(zero_bubble_v(ranks, m)).makespan
        assert makespan <= 2 * simulate(one_f_one_b(ranks, m)).makespan
        if ranks > 1 and m >= 2 * ranks - 1:
            assert makespan == 6 * m + ranks - 1


# --- verify finds what is wrong --------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_lost_or_repeated_or_foreign_action_is_named(name):
    schedule = build(name, 3, 6)
    for rank, actions in enumerate(map(list, schedule.actions)):
        for at, action in enumerate(actions):
            for wrong, message in (
                (actions[:at] + actions[at + 1 :], rf"rank {rank}: expected \w{action.micro_batch}.* 1 times, got 0"),
                ([*actions, action], f"rank {rank}: expected {action} 1 times, got 2"),
                ([*actions, Action("F", 6)], f"rank {rank}: expected F6 0 times, got 1"),
                ([*actions, Action("F", 0, 2)], f"rank {rank}: expected F0 of chunk 2 0 times, got 1"),
                ([*actions, Action("X", 0)], f"rank {rank}: expected X0 0 times, got 1"),
            ):
                with pytest.raises(InvalidArgument, match=message):
                    verify(changed(schedule, rank, wrong))


@settings(deadline=None, max_examples=300)
@given(name=st.sampled_from(list(SCHEDULES)), ranks=st.integers(2, 4), groups=st.integers(1, 2), seed=st.integers(0))
def test_what_verify_accepts_an_executor_can_run(name, ranks, groups, seed):
    """Two actions of one rank change places: ``verify`` refuses the schedule, or ``execute`` runs it."""
    schedule, draws = build(name, ranks, groups * ranks), random.Random(seed)
    rank = draws.randrange(ranks)
    actions = list(schedule.actions[rank])
    a = draws.randrange(len(actions) - 1)
    b = min(len(actions) - 1, a + draws.choice((1, 1, 1, 2, 3, 8)))
    actions[a], actions[b] = actions[b], actions[a]
    mutant = changed(schedule, rank, actions)
    try:
        verify(mutant)
    except InvalidArgument:
        return
    execute(mutant)


# --- bad input, and the command --------------------------------------------------------------------------


def test_a_drawing_shows_who_waits_when():
    assert draw(one_f_one_b(2, 3)).splitlines()[0] == "1f1b, 2 ranks, 3 micro-batches: 25.0% idle"
    assert draw(one_f_one_b(2, 3)).splitlines()[2:] == [
        "rank 0  25.0% |F0 F1       B0--- F2 B1---    B2---",
        "rank 1  25.0% |   F0 B0--- F1 B1--- F2 B2---",
    ]
    assert draw(zero_bubble_v(2, 1)).splitlines()[2:] == [
        "rank 0  40.0% |F0a         F0b I0b W0b         I0a W0a",
        "rank 1  40.0% |    F0a F0b         I0b W0b I0a W0a",
    ]
    uneven = draw(one_f_one_b(2, 1), simulate(one_f_one_b(2, 1), {"F": (1, 2), "I": 1.5, "W": 0.5}, message=0.25))
    assert uneven.startswith("1f1b, 2 ranks, 1 micro-batches: 53.3% idle\n")
    assert uneven.splitlines()[2:] == ["rank 0  60.0% |F0              B0---", "rank 1  46.7% |    F0--- B0---"]


def test_the_command_draws(capsys):
    assert main(["zero-bubble-v", "--stages", "2", "--micro-batches", "4"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(draw(zero_bubble_v(2, 4)))
    assert out.endswith("most activations kept by each rank: 4, 4 micro-batches of a chunk, 1/2 of a rank's layers\n")
    assert main(["1f1b", "--stages", "2", "--costs", "1.25", "1.5", "1", "--message", "0.5"]) == 0
    timeline = simulate(one_f_one_b(2, 8), {"F": 1.25, "I": 1.5, "W": 1}, 0.5)
    assert capsys.readouterr().out.startswith(draw(one_f_one_b(2, 8), timeline))
    assert main(["1f1b", "--stages", "0"]) == 2
    assert capsys.readouterr().err == "kos: error: 1f1b: expected at least 1 stage and 1 micro-batch, got 0 and 8\n"
    for costs, message in (("0 0 0", "0"), ("1 nan 1", "0"), ("-1 2 2", "0"), ("1 1 1", "-5")):
        assert main(["1f1b", "--costs", *costs.split(), "--message", message]) == 2
        assert capsys.readouterr().err.startswith("kos: error: expected --costs above 0 and a --message of at least 0")


def test_a_pass_of_almost_no_time_leaves_the_drawing_its_width():
    lines = draw(one_f_one_b(2, 4), simulate(one_f_one_b(2, 4), {"F": 1e-9, "I": 1.0, "W": 1.0})).splitlines()
    assert 1_000 < max(map(len, lines)) < 100_000
