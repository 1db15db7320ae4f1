"""Calls like earlier ones: prepared once, for any ndarrays, and again where anything about them has changed."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import kos
from kos import PremulSum, ReduceOp
from kos.comm.prepared import MOST_STORED
from kos.errors import CollectiveError, CollectiveMismatch, InvalidArgument
from kos.testing import spawn
from kos.testing.conformance import model as promised
from tests.comm import model, shared_ranks
from tests.comm.gpu_ranks import Prepared
from tests.comm.model import NAMES, Step
from tests.comm.ranks import assert_bits, on_each_rank
from tests.comm.tcp_ranks import TCPRanks

CASES = [Step(name, root=1, in_place=name == "broadcast") for name in sorted(NAMES)]
CASES += [Step("all_reduce", in_place=True), Step("all_reduce", op=ReduceOp.MAX), Step("broadcast", root=2)]


def check_cached(
    comm: kos.Communicator,
    step: Step,
    seed: int,
    new: Callable[[int, Any], Any] = np.zeros,
    fill: Callable[[Any, np.ndarray], Any] = lambda array, values: np.copyto(array, values),
    read: Callable[[Any], np.ndarray] = np.asarray,
    connects: int = 0,
) -> None:
    """The first call is prepared, and later ones on any arrays use that and give what is right for what these hold.

    Before the first calls, ``connects`` of them, the ranks have to connect.
    """
    everyone, prepared = list(range(comm.size)), Prepared(comm)
    xs = model.inputs(seed, 0, step, everyone)
    expected = model.result(step, xs, comm.rank)
    for turn in range(6):
        if turn in (0, 3, 4):
            x = new(xs[comm.rank].size, step.dtype)
            out = None if expected is None else new(expected.size, step.dtype)
        xs = model.inputs(seed, turn, step, everyone)
        fill(x, xs[comm.rank])
        if out is not None:
            fill(out, np.full(out.size, 99, step.dtype))
        found = not prepared.by(lambda x=x, out=out: promised.call(comm, step, x, out))  # type: ignore[misc]
        assert found == (turn > connects), turn
        if (expected := model.result(step, xs, comm.rank)) is not None:
            assert_bits(read(x if step.in_place else out), expected, f"turn {turn}")


@pytest.mark.parametrize("run", [spawn, shared_ranks.run], ids=["mock", "shared"])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize(
    ("size", "step"), [(n, step) for n in (1, 2, 3) for step in CASES if n > 1 or step.name != "send_recv"], ids=str
)
def test_a_repeated_call_gives_what_a_new_one_gives(run: Any, size: int, step: Step, dtype: Any, seed: int) -> None:
    if step.name == "send_recv" or (step.name.endswith("_v") and (size == 1 or dtype is np.float16)):
        run = spawn  # these use messages, which the other backend does not have
    run(lambda comm: check_cached(comm, replace(step, dtype=dtype), seed), size)


@pytest.mark.parametrize("run", [spawn, TCPRanks(2).run], ids=["mock", "tcp"])
def test_repeated_messages_to_other_ranks_and_of_other_tags(run: Any) -> None:
    def body(comm: kos.Communicator) -> None:
        x, y, other, prepared = np.empty(3), np.empty(3), 1 - comm.rank, Prepared(comm)

        def sends(turn: int, tag: int) -> bool:
            x[:], y[:] = 10 * comm.rank + turn, -1
            found = not prepared.by(lambda: comm.send_recv(x, y, other, other, tag))
            assert y.tolist() == [10 * other + turn] * 3
            return found

        assert [sends(turn, 0) for turn in range(4)] == [False, True, True, True]
        assert [sends(turn, 5) for turn in range(4)] == [False, True, True, True]
        for turn in range(4):
            x[:] = 100 * comm.rank + turn
            comm.send(x, other, 7) if comm.rank else comm.recv(y, other, 7)
            comm.recv(y, other, 8) if comm.rank else comm.send(x, other, 8)
            assert y.tolist() == [100 * other + turn] * 3

    run(body, 2) if run is spawn else run(body)


@pytest.fixture
def alone() -> kos.Communicator:
    """A group of one."""
    return kos.init("mock")


def test_what_has_changed_is_another_call(alone: kos.Communicator) -> None:
    x, out, prepared = np.ones(6, np.float32), np.empty(6, np.float32), Prepared(alone)

    def repeat() -> None:
        for _ in range(3):
            alone.all_reduce(x, out=out)
        assert not prepared.by(lambda: alone.all_reduce(x, out=out))

    def change(what: Any, name: str, value: Any) -> None:
        repeat()
        setattr(what, name, value)

    repeat()
    for options in ({"op": ReduceOp.MAX}, {"timeout": 5.0}, {"deterministic": True}, {"async_op": True}):
        for first in (True, False):
            assert prepared.by(lambda options=options: alone.all_reduce(x, **{"out": out, **options})) == first
    assert not prepared.by(lambda: alone.all_reduce(np.ones(6, np.float32), out=np.empty(6, np.float32)))
    assert prepared.by(lambda: alone.all_gather(x, out)) and prepared.by(lambda: alone.broadcast(x, out=out))
    scaled = np.ones(6, np.float32)
    for factor in (2.0, 3.0):
        assert (alone.all_reduce(scaled, PremulSum(factor), out=out) == factor).all()
    with pytest.raises(InvalidArgument, match="alone"):
        alone.all_reduce(scaled, ReduceOp.PREMUL_SUM, out=out)
    change(x, "shape", (2, 3))
    with pytest.raises(InvalidArgument, match=r"out: expected shape \(2, 3\), got \(6,\)"):
        alone.all_reduce(x, out=out)
    out.shape = (2, 3)
    change(out, "shape", (3, 2))
    with pytest.raises(InvalidArgument, match=r"out: expected shape \(2, 3\), got \(3, 2\)"):
        alone.all_reduce(x, out=out)
    out.shape = (2, 3)
    repeat()
    out.flags.writeable = False
    with pytest.raises(InvalidArgument, match="out: expected a writable array"):
        alone.all_reduce(x, out=out)
    out.flags.writeable = True
    with alone.batch():
        assert not prepared.by(lambda: alone.all_reduce(x, out=out))
    alone.timeout = 7.0
    assert prepared.by(lambda: alone.all_reduce(x, out=out))
    repeat()
    alone.close()
    with pytest.raises(CollectiveError, match="is closed"):
        alone.all_reduce(x, out=out)


@on_each_rank(shared_ranks.run, 2)
def test_hundreds_of_signatures_stay_cached(comm: kos.Communicator, /) -> None:
    """A model may have as many bucket sizes, or windows."""
    arrays, prepared, node = [np.ones(count) for count in range(1, 601)], Prepared(comm), comm.backend.messages
    for x in arrays:
        comm.all_reduce(x)
    node.remember = lambda *_: pytest.fail("the core dropped a cached call")
    assert not any(prepared.by(lambda x=x: comm.all_reduce(x)) for x in arrays)


def test_arrays_are_not_held_and_the_cache_is_bounded(alone: kos.Communicator) -> None:
    arrays = []
    for count in range(2 * MOST_STORED):
        alone.all_reduce(x := np.ones(count))
        arrays.append(weakref.ref(x))
    del x
    gc.collect()
    assert {each() for each in arrays} == {None} and 0 < len(alone.backend.store) <= MOST_STORED


IN_PLACE: dict[str, Callable[[kos.Communicator, Any, Any, tuple[int, int]], Any]] = {
    "all_gather": lambda comm, part, whole, counts: comm.all_gather(part, whole),
    "gather": lambda comm, part, whole, counts: comm.gather(part, 1, whole if comm.rank == 1 else None),
    "scatter": lambda comm, part, whole, counts: comm.scatter(whole if comm.rank == 1 else None, part, 1),
    "reduce_scatter": lambda comm, part, whole, counts: comm.reduce_scatter(whole, part),
    "all_gather_v": lambda comm, part, whole, counts: comm.all_gather_v(part, counts, whole),
    "gather_v": lambda comm, part, whole, counts: comm.gather_v(part, counts, 1, whole if comm.rank == 1 else None),
    "scatter_v": lambda comm, part, whole, counts: comm.scatter_v(whole if comm.rank == 1 else None, counts, part, 1),
    "reduce_scatter_v": lambda comm, part, whole, counts: comm.reduce_scatter_v(whole, counts, part),
}


@pytest.mark.parametrize("run", [lambda body: spawn(body, 2), TCPRanks(2).run], ids=["mock", "tcp"])
@pytest.mark.parametrize("name", IN_PLACE)
def test_arrays_that_overlap_otherwise_are_another_call(name: str, run: Any) -> None:
    """This rank's shard may lie in the larger array, and no other part of it; each kind of call is cached."""

    def body(comm: kos.Communicator) -> None:
        counts, gathers = (2, 4) if name.endswith("_v") else (4, 4), "gather" in name
        start, count, total = comm.rank * counts[0], counts[comm.rank], sum(counts)
        has_whole = comm.rank == 1 or name.startswith(("all", "reduce"))
        call = IN_PLACE[name]
        for _ in range(3):
            for apart in (False, True):
                whole = np.full(total, 10.0 * comm.rank) + np.arange(total)
                mine = whole[start : start + count]
                part = mine.copy() if apart or not has_whole else mine
                if gathers and apart:
                    whole[:] = -1
                call(comm, part, whole, counts)
                given = np.arange(total) + np.repeat([0.0, 10.0], counts)  # what each rank's shard held
                if gathers and has_whole:
                    assert whole.tolist() == given.tolist()
                elif not gathers:
                    expected = np.arange(total) * (1 + ("reduce" in name)) + 10
                    assert part.tolist() == expected[start : start + count].tolist()
            if has_whole:
                other = whole[1 : 1 + count]  # neither rank's shard
                with pytest.raises(InvalidArgument, match=f"or a part that begins at element {start} of the larger"):
                    call(comm, other, whole, counts)
        prepared = Prepared(comm)
        assert not prepared.by(lambda: call(comm, part, whole, counts))
        inside = whole[start : start + count] if has_whole else part
        assert not prepared.by(lambda: call(comm, inside, whole, counts))

    run(body)


@pytest.mark.parametrize("run", [spawn, shared_ranks.run], ids=["mock", "shared"])
@on_each_rank("run", 2)
def test_a_read_only_array_may_be_sent_and_not_written(comm: kos.Communicator, /) -> None:
    x = np.full(3, comm.rank)
    x.flags.writeable = False
    for _ in range(2):
        assert comm.broadcast(x if comm.rank == 0 else np.empty(3, int)).tolist() == [0] * 3
        with pytest.raises(InvalidArgument, match="writable"):
            comm.all_reduce(x)
        comm.all_reduce(np.ones(3, int))


@pytest.mark.parametrize("run", [spawn, shared_ranks.run], ids=["mock", "shared"])
@on_each_rank("run", 3)
def test_a_repeated_call_is_compared_with_the_other_ranks(comm: kos.Communicator, /) -> None:
    x = np.ones(4)
    for _ in range(4):
        comm.all_reduce(x)
    with pytest.raises(CollectiveMismatch, match="rank 1 called broadcast #4"):
        comm.broadcast(x) if comm.rank == 1 else comm.all_reduce(x)
    with pytest.raises(CollectiveError, match="failed before"):
        comm.all_reduce(x)


def test_a_slot_is_not_filled_before_every_rank_has_read_it() -> None:
    launched = [threading.Event(), threading.Event()]

    def body(comm: kos.Communicator) -> None:
        x, values = np.ones(4), [np.zeros(4) for _ in range(5)]
        for _ in range(4):
            comm.all_reduce(x)
        if comm.rank == 0:
            assert launched[1].wait(10)
            for turn, value in enumerate(values):
                value[:] = turn
        works = [comm.broadcast(value, 0, async_op=True) for value in values]  # rank 1 has read nothing yet
        launched[comm.rank].set()
        assert launched[0].wait(10)
        for work in works:
            work.wait()
        assert [value.tolist() for value in values] == [[turn] * 4 for turn in range(5)]

    shared_ranks.run(body, 2)


def test_a_call_interrupted_in_flight_is_not_started_again() -> None:
    """By Ctrl-C, or a handler of a signal that raises.  The next call on the same arrays is another one."""
    interrupted = threading.Event()

    class Interrupting:
        """What a rank waits by."""

        def mark(self) -> int:
            return 0

        def pause(self, mark: int = 0, seconds: float | None = None) -> None:
            raise KeyboardInterrupt

    def body(comm: kos.Communicator) -> None:
        x, out = np.full(1 << 18, comm.rank, np.uint8), np.empty(1 << 19, np.uint8)
        for _ in range(3):
            comm.all_gather(x, out)
        if comm.rank == 0:
            backend: Any = comm.backend
            backend.idle = Interrupting
            with pytest.raises(KeyboardInterrupt):
                comm.all_gather(x, out)
            del backend.idle
            interrupted.set()
        else:
            assert interrupted.wait(20)
            x[:] = 2
            comm.all_gather(x, out)
        comm.all_gather(x, out)
        assert out.reshape(2, -1)[:, -1].tolist() == [0, 2]

    shared_ranks.run(body, 2)


@on_each_rank(shared_ranks.run, 2)
def test_a_cached_scatter_takes_no_input_of_another_rank_than_the_root(comm: kos.Communicator, /) -> None:
    x, out = np.ones(2), np.empty(1)
    for name, counts in (("scatter", ()), ("scatter_v", ([1, 1],))):
        call = getattr(comm, name)
        for _ in range(3):
            call(None if comm.rank else x, *counts, out)
        if comm.rank:
            with pytest.raises(InvalidArgument, match="x: expected None on rank 1"):
                call(out, *counts, out)


@on_each_rank(shared_ranks.run, 2)
def test_a_cached_gather_takes_no_output_of_another_rank_than_the_root(comm: kos.Communicator, /) -> None:
    x, out = np.ones(1), np.empty(2)
    for name, counts in (("gather", ()), ("gather_v", ([1, 1],))):
        call = getattr(comm, name)
        for _ in range(3):
            call(x, *counts, out=None if comm.rank else out)
        if comm.rank:
            with pytest.raises(InvalidArgument, match="out: expected None on rank 1"):
                call(x, *counts, out=x)
