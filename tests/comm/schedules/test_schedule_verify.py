"""The prover accepts every schedule that is built and rejects wrong ones."""

import contextlib
import itertools

import fake_world
import numpy as np
import pytest

from kos.comm.schedules import Schedule, ScheduleError, Step, algorithms, build, collectives
from kos.comm.schedules.registry import algorithm
from kos.comm.schedules.schedule import ROOTED, Moves, Repeat
from kos.comm.schedules.verify import verify
from kos.errors import InvalidArgument

CASES = [(c, a) for c in collectives() for a in algorithms(c)]


@pytest.mark.parametrize(("collective", "algorithm"), CASES)
def test_proved_for_up_to_64_ranks(collective, algorithm):
    for ranks in (*range(1, 21), 24, 27, 31, 32, 33, 48, 64):
        roots = range(ranks) if ranks <= 9 else {0, ranks - 1, ranks // 3} if ranks <= 24 else {ranks // 3}
        for root in roots if collective in ROOTED else (0,):
            verify(build.__wrapped__(collective, algorithm, ranks, 1, root))  # uncached: they are large
        for chunks in (2, 5) if ranks <= 9 else (3,) if ranks == 16 else ():
            verify(build.__wrapped__(collective, algorithm, ranks, chunks, ranks // 2))


@pytest.mark.parametrize(("collective", "algorithm"), [c for c in CASES if c[1] == "hierarchical"])
def test_hierarchical_proved_for_every_node_size(collective, algorithm):
    for nodes, local in itertools.product((1, 2, 3, 4, 7), (1, 2, 3, 5, 8)):
        ranks = nodes * local
        verify(build(collective, algorithm, ranks, 2, ranks - 1, ranks_per_node=local))


@pytest.mark.parametrize(("rounds", "message"), [
    *([[[Moves(src, dst, 0)]], "round 0: expected ranks from 0 to 1, got .* to "]
      for src, dst in ((0, 4), (4, 0), (-1, 0), (0, -1), (0, [1, 9]))),
    ([[Moves(1, 0, 0.5)]], r"round 0: expected whole numbers in Moves, got float64"),
    ([[Moves("1", 0, 0), Moves(1, True, 0)]], r"round 0: expected whole numbers in Moves, got <U1"),
    (None, r"wrong on 2 ranks, .*: expected rounds of Moves, got NoneType"),
    (3, r"expected rounds of Moves, got int"),
    ([Moves(0, 1, 0)], r"round 0: expected a list of Moves, got Moves"),
    ([[], [Moves(0, 1, 0), 3]], r"round 1: expected Moves, got int"),
    ([Repeat(2, lambda k: Moves(0, 1, k))], r"wrong on 2 ranks, .*: expected rounds of Moves, got Moves"),
    ([Repeat(2, lambda k: [Moves(0, 1, k)])], r"round 0: expected a list of Moves, got Moves"),
    ([[Repeat(2, lambda k: [[Moves(0, 1, k)]])]], r"round 0: expected Moves, got Repeat"),
])
def test_what_is_no_moves(rounds, message):
    with pytest.raises(ScheduleError, match=message):
        verify(Schedule("all_reduce", "wrong", 2, 1, 0, False, lambda: rounds))


@pytest.mark.parametrize(("times", "chunk"), [(3, 0), (2, 0), (4, 0), (3, 1)])
def test_all_rounds_of_a_repeat_are_proved(times, chunk):
    r = np.arange(4)
    rounds = [Repeat(times, lambda k: [[Moves(r, (r + 1) % 4, (r + chunk - k) % 4, reduce=True)]]),
              Repeat(3, lambda k: [[Moves(r, (r + 1) % 4, (r + 1 - k) % 4)]])]
    with contextlib.nullcontext() if (times, chunk) == (3, 0) else pytest.raises(ScheduleError, match="rank 0, "):
        verify(Schedule("all_reduce", "own", 4, 4, 0, False, lambda: rounds))


@pytest.mark.parametrize(("collective", "name", "message"), [
    ("all_reduce", "ring", "expected a name other than auto, ring, .*, got 'ring'"),
    ("all_reduce", "auto", "expected a name other than auto, .*, got 'auto'"),
    ("all_reduce", "", "expected a name other than auto, .*, got ''"),
    ("foo", "own", "unknown collective 'foo', expected one of .*all_reduce"),
])
def test_names_that_no_own_schedule_may_have(collective, name, message):
    known = {each: algorithms(each) for each in collectives()}
    with pytest.raises(InvalidArgument, match=message):
        algorithm(collective, name)(lambda n, c: [])
    with pytest.raises(InvalidArgument, match="own: expected a function of n, c, root and local, got one of ranks"):
        algorithm("all_reduce", "own")(lambda ranks, c: [])
    assert {each: algorithms(each) for each in collectives()} == known


def one_rank_all_reduce(*steps):
    return fake_world.with_rounds(build("all_reduce", "tree", 2), steps)


send, recv = Step("send", "data", 0, 1, 1), Step("recv", "data", 0, 1, 0)
add = Step("recv_reduce", "data", 0, 1, 0)
back = Step("send", "data", 0, 1, 0), Step("recv", "data", 0, 1, 1)


@pytest.mark.parametrize(("rounds", "message"), [
    ([((send,), (recv,))], "rank 0, after the last round, data chunk 0 holds chunk 0 of rank 0, exp.* 0,1"),
    ([((send,), (add,))], "rank 0, after the last round, data chunk 0 holds chunk 0 of rank 0"),
    ([((send,), ())], "rank 0, round 0, send of data chunk 0: rank 1 does not receive it"),
    ([((), (recv,))], "rank 1, round 0, recv of data chunk 0: rank 0 sends nothing to it"),
    ([((send, back[1]), (add, back[0]))], "rank 0, round 0, recv of data chunk 0: writes chunk 0 while"),
    ([((send,), (add,)), ((send,), (add,))], "rank 1, round 1, recv_reduce .*: adds .* of rank 0 a second"),
    ([((send._replace(space="scratch"),), (add,))], "rank 0, round 0, send of scratch chunk 0: .* is empty"),
    ([((send._replace(peer=2),), (add,))], "rank 0, round 0, send of data chunk 0: 2 is no peer"),
    ([((send._replace(peer=0),), (add,))], "rank 0, round 0, send of data chunk 0: 0 is no peer"),
    ([((send._replace(span=2),), (add,))], "reads data chunk 1, it is empty"),
])
def test_the_message_names_rank_round_and_chunk(rounds, message):
    with pytest.raises(ScheduleError, match=message):
        verify(one_rank_all_reduce(*rounds))


@pytest.mark.parametrize(("collective", "chunks", "steps", "message"), [
    ("all_reduce", 1, ((add._replace(peer=1), send), (send._replace(peer=0), add)),
     "rank 0, round 0, send of data chunk 0: reads data chunk 0 in flight"),
    ("all_reduce", 1, ((back[1], add._replace(peer=1)), (back[0], back[0])),
     "rank 0, round 0, recv_reduce of data chunk 0: writes chunk 0 while it is in flight"),
    ("all_gather", 1, ((Step("recv", "input", 0, 1, 1),), (Step("send", "input", 0, 1, 0),)),
     "rank 0, round 0, recv of input chunk 0: writes an input"),
    ("all_gather", 2, ((Step("copy", "output", 0, 1, -1, "input", 1),), ()),
     "rank 0, round 0, copy of output chunk 0: input chunk 1 .* has another length"),
    ("gather", 1, ((), (Step("copy", "output", 0, 1, -1, "input", 0),)), "rank 1, .* which has 0 chunks"),
    ("all_gather", 1, ((Step("reduce", "output", 0, 1, -1, "input", 0),), ()),
     "rank 0, round 0, reduce of output chunk 0: adds to chunk 0, which is empty"),
    *(("all_gather", 1, ((Step("copy", "output", at, span, -1, "input", 0),), ()), "outside 'output', .* 2 chunks")
      for at, span in ((2, 1), (-1, 1), (0, 0))),
    ("all_reduce", 2, ((add._replace(peer=1, span=2),), (back[0],)), r"data chunk 0 \(span 1\) .* has another length"),
    ("all_to_all", 1, ((Step("copy", "output", 0, 1, -1, "input", 1),), ()), "chunk 0 holds chunk 1 of rank 0, exp.*"),
    ("scan", 1, ((send,), (add,)), "rank 1, .*: adds rank 0 to rank 1, not in rank order"),
])
def test_what_no_round_may_do(collective, chunks, steps, message):
    with pytest.raises(ScheduleError, match=message):
        verify(fake_world.with_rounds(build(collective, algorithms(collective)[-1], 2, chunks), (steps,)))


def test_different_chunks_are_not_added_to_each_other():
    rounds = [((Step(kind, "output", 0, 1, -1, "input", at),), ()) for at, kind in enumerate(("copy", "reduce"))]
    with pytest.raises(ScheduleError, match="round 1, .* adds what began as chunk 1 to what began as chunk 0"):
        verify(fake_world.with_rounds(build("reduce_scatter", "ring", 2), rounds))


def test_ranks_that_add_in_another_order_are_rejected():
    """Three ranks, (0+1)+2 on one and 0+(1+2) on another: right to rounding, not bit for bit."""
    with pytest.raises(ScheduleError, match="added in another order"):
        verify(fake_world.with_rounds(build("all_reduce", "tree", 3), (
            tuple(tuple(Step(kind, space, chunk, 1, peer) for peer in range(3) if peer != r
                        for kind, space, chunk in (("send", "data", 0), ("recv", "scratch", peer)))
                  for r in range(3)),
            *(tuple((Step("reduce", "data", 0, 1, -1, "scratch", (r + k) % 3),) for r in range(3))
              for k in (1, 2)),
        )))
