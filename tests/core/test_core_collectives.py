"""Collectives of the compiled core that move data: every one, of every size, through slots and in one copy."""

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tests.core.core_ranks import groups, needs_core, on_processes, run_threads, together
from tests.core.group import CoreError, CoreGroup

pytestmark = needs_core
Array = np.ndarray[Any, Any]
MOVES = ("broadcast", "all_gather", "gather", "scatter", "all_to_all")
V_FORMS = ("all_gather", "gather", "scatter", "all_to_all", "reduce_scatter")
COUNTS = (0, 1, 2, 5, 6, 7, 12, 13, 100, 1000, 16_384, 20_000, 70_000, 200_000)  # elements of 4 bytes; one copy at last


def connected(made: Sequence[CoreGroup]) -> None:
    assert run_threads(*[group.connect for group in made]) == [True] * len(made)


@pytest.fixture(params=[(1, False), (2, False), (2, True), (3, False), (3, True), (5, True)], ids=str)
def made(request):
    size, direct = request.param
    with groups(size) as ranks:
        if direct:
            connected(ranks)
        yield ranks


class Call:
    """A call with random data: the arrays of every rank, and what must be in them afterwards."""

    def __init__(self, operation: str, size: int, root: int, counts: Any, seed: int) -> None:
        """``counts``: elements of each part, or, in v-forms, a row for each sender with a column for each receiver."""
        self.operation, self.size, self.root, self.counts = operation, size, root, counts
        self.varies = not isinstance(counts, int)
        rng = np.random.default_rng(seed)
        table = counts if self.varies else [[counts] * size] * size
        # parts[s][r]: what rank s gives to rank r
        self.parts = [[rng.integers(0, 1 << 30, n, np.uint32) for n in row] for row in table]
        if operation in ("broadcast", "all_gather", "gather"):
            self.parts = [[row[0]] * size for row in self.parts]

    def prepare(self, group: CoreGroup) -> Any:
        r, size, operation = group.rank, self.size, self.operation
        count, sent, received = self.counts, None, None
        if self.varies:
            count = len(self.parts[r][0] if operation in ("all_gather", "gather") else self.parts[self.root][r])
            if operation in ("scatter", "reduce_scatter", "all_to_all"):
                sent = [len(x) for x in self.parts[self.root if operation == "scatter" else r]]
            if operation in ("all_gather", "gather", "all_to_all"):
                received = [len(self.parts[s][r]) for s in range(size)]
            if operation == "reduce_scatter":
                count = len(self.parts[r][r])
        return group.prepare(
            operation, "uint32", count, root=self.root, varies=self.varies, send_counts=sent, recv_counts=received
        )

    def arrays(self, rank: int) -> tuple[Array | None, Array | None]:
        """What the rank gives, and memory for what it gets."""
        everything = np.concatenate(self.parts[rank])
        expected = self.expected(rank)
        gives = {
            "broadcast": self.parts[rank][0] if rank == self.root else None, "all_gather": self.parts[rank][0],
            "gather": self.parts[rank][0], "scatter": everything if rank == self.root else None,
        }.get(self.operation, everything)  # fmt: skip
        return gives, None if expected is None else np.full(expected.size, 77, np.uint32)

    def expected(self, rank: int) -> Array | None:
        column = [row[rank] for row in self.parts]
        if self.operation in ("broadcast", "scatter"):
            return column[self.root]
        if self.operation == "reduce_scatter":
            return np.sum(column, axis=0, dtype=np.uint32)
        return None if self.operation == "gather" and rank != self.root else np.concatenate(column)

    def __str__(self) -> str:
        return f"{self.operation} of {self.counts} from {self.root} on {self.size} ranks"


def check(made: Sequence[CoreGroup], call: Call) -> None:
    arrays = [call.arrays(rank) for rank in range(call.size)]
    together([call.prepare(group) for group in made], arrays)
    for rank, (_, out) in enumerate(arrays):
        expected = call.expected(rank)
        if expected is not None and out is not None:
            assert out.tobytes() == expected.tobytes(), f"{call}: rank {rank}"


@pytest.mark.parametrize("operation", [*MOVES, "reduce_scatter"])
def test_every_count(made, operation):
    for seed, count in enumerate(COUNTS):
        check(made, Call(operation, len(made), (len(made) - 1) * (seed % 2), count, seed))


def random_counts(operation: str, size: int, draw: random.Random) -> list[list[int]]:
    def one() -> int:
        return draw.choice((0, *(draw.randrange(most) for most in (10, 300, 30_000, 200_000))))

    alike = [one() for _ in range(size)]
    if operation == "reduce_scatter":
        return [alike] * size
    if operation in ("all_gather", "gather"):
        return [[n] * size for n in alike]
    return [[one() for _ in range(size)] for _ in range(size)]


@pytest.mark.parametrize("operation", V_FORMS)
def test_v_forms(made, operation):
    seed = random.randrange(1 << 20)
    print(f"seed {seed}")
    draw = random.Random(seed)
    for each in range(30):
        counts = random_counts(operation, len(made), draw)
        check(made, Call(operation, len(made), draw.randrange(len(made)), counts, each))


def test_in_place(made):
    size = len(made)
    for count in (1, 3, 1000, 100_000):
        x = [np.full(count, rank + 5, np.uint32) for rank in range(size)]
        together([g.prepare("broadcast", "uint32", count, root=size - 1) for g in made], [(each,) for each in x])
        assert all((each == size + 4).all() for each in x)
        whole = [np.zeros(count * size, np.uint32) for _ in range(size)]
        mine = [whole[r][r * count : (r + 1) * count] for r in range(size)]
        for rank, each in enumerate(mine):
            each[...] = rank + 1
        together([g.prepare("all_gather", "uint32", count) for g in made], list(zip(mine, whole, strict=True)))
        expected = np.repeat(np.arange(1, size + 1), count)
        assert all((each == expected).all() for each in whole)


def test_barriers_and_other_calls_in_one_queue(made):
    """Works of all kinds, started at once and ended in order."""
    size, draw = len(made), random.Random(3)
    calls = [Call(draw.choice(MOVES), size, 0, draw.choice((0, 1, 50, 9000, 140_000)), seed) for seed in range(40)]
    barriers = [group.prepare("barrier") for group in made]
    works, arrays = list[Any](), list[Any]()
    for call in calls:
        arrays.append([call.arrays(rank) for rank in range(size)])
        for group, each, barrier in zip(made, arrays[-1], barriers, strict=True):
            works += [call.prepare(group).start(*each), barrier.start()]
    while works:
        works = [work for work in works if not work.done()]
    for call, each in zip(calls, arrays, strict=True):
        for rank, (_, out) in enumerate(each):
            assert out is None or out.tobytes() == np.asarray(call.expected(rank)).tobytes()


def random_program(group: CoreGroup, seed: int, calls: int, direct: bool) -> int:
    """Blocking calls, and Works that are waited for in any order; the number of wrong results."""
    if direct and not group.connect():
        raise AssertionError
    shared, mine = random.Random(seed), random.Random(seed * 31 + group.rank)
    if direct:
        group.core.direct = shared.choice((1, 100 << 10, 512 << 10))
    group.core.marks = mine.randrange(2)
    outstanding: list[tuple[Any, ...]] = []
    wrong = 0

    def count_wrong(out: Array | None, expected: Array | None) -> int:
        return int(out is not None and expected is not None and out.tobytes() != expected.tobytes())

    for number in range(calls):
        operation = shared.choice((*MOVES, "reduce_scatter"))
        counts: Any = shared.choice((0, 1, 2, 6, 7, 100, 1000, 8000, 140_000))
        if operation in V_FORMS and shared.random() < 0.3:
            counts = random_counts(operation, group.size, shared)
        call = Call(operation, group.size, shared.randrange(group.size), counts, number)
        prepared, (x, out) = call.prepare(group), call.arrays(group.rank)
        for _ in range(mine.choice((0, 0, 100, 10_000))):  # ranks are out of step
            pass
        if mine.random() < 0.5:
            prepared.run(x, out)
            wrong += count_wrong(out, call.expected(group.rank))
        else:
            outstanding.append((prepared.start(x, out), out, call.expected(group.rank)))
        while outstanding and mine.random() < 0.4:
            work, out, expected = outstanding.pop(mine.randrange(len(outstanding)))
            work.wait()
            wrong += count_wrong(out, expected)
    for work, out, expected in outstanding:
        work.wait()
        wrong += count_wrong(out, expected)
    return wrong


@pytest.mark.parametrize(("size", "direct"), [(2, True), (3, True), (4, False)])
def test_random_programs_of_processes(size, direct, tmp_path):
    seed = random.randrange(1 << 20)
    print(f"seed {seed}")
    assert on_processes(size, random_program, tmp_path, seed, 200, direct) == [0] * size


def test_counts_that_differ_raise_on_every_rank():
    with groups(2) as made:
        counts = [([1, 2], [1, 3]), ([4, 5], [2, 5])]  # rank 1 sends 4 elements to rank 0, which expects 3
        calls = [
            group.prepare("all_to_all", "uint32", varies=True, send_counts=sent, recv_counts=received)
            for group, (sent, received) in zip(made, counts, strict=True)
        ]
        arrays = [(np.ones(sum(sent), np.uint32), np.ones(sum(received), np.uint32)) for sent, received in counts]
        errors = run_threads(*[lambda c=c, a=a: c.run(*a) for c, a in zip(calls, arrays, strict=True)])
        for error in errors:
            assert isinstance(error, CoreError) and (error.kind, error.rank) == ("COUNTS", 1)
            assert error.counts == (0, 12, 16)  # the receiver, the bytes that it expects, and those sent


def test_all_ranks_find_the_same_counts_that_differ():
    """Those of two other ranks too, and before any data is read."""
    with groups(3) as made:
        rows = [[4, 4, 4], [4, 4, 5], [4, 6, 4]]  # rank 1 sends rank 2 one element more, rank 2 sends rank 1 two more
        calls = [
            group.prepare("all_to_all", "uint32", varies=True, send_counts=sent, recv_counts=[4, 4, 4])
            for group, sent in zip(made, rows, strict=True)
        ]
        arrays = [(np.ones(sum(sent), np.uint32), np.zeros(12, np.uint32)) for sent in rows]
        first, second = (call.start(*each) for call, each in zip(calls[:2], arrays[:2], strict=True))
        for step in (lambda: calls[2].start(*arrays[2]), second.done, first.done):
            with pytest.raises(CoreError, match="^COUNTS of rank 1, 0, by rank 2") as found:
                step()
            assert found.value.counts == (2, 16, 20)
        assert not any(out.any() for _, out in arrays)


def test_a_rank_s_counts_of_its_own_part_that_differ_are_found():
    with groups(2) as made:
        calls, arrays = list[Any](), list[Any]()
        for rank, group in enumerate(made):
            sent, received = ([5, 4] if rank == 0 else [4, 4]), [4, 4]  # rank 0 gives itself 5 elements, and expects 4
            calls.append(group.prepare("all_to_all", "uint8", varies=True, send_counts=sent, recv_counts=received))
            arrays.append((np.ones(sum(sent), np.uint8), np.ones(8, np.uint8)))
        errors = run_threads(*[lambda c=c, a=a: c.run(*a) for c, a in zip(calls, arrays, strict=True)])
        for error in errors:
            assert error.kind == "COUNTS" and error.rank == 0 and error.counts == (0, 4, 5)


def test_who_only_gives_data_is_ahead_of_the_others():
    """By 64 calls whose data is beside the stamps, by 2 of larger ones.  Then it waits, until half of the 64 are read,
    and names who is behind."""
    for count, ahead, read in ((6, 64, 33), (7, 2, 1), (1000, 2, 1)):
        with groups(3) as made:
            calls = [group.prepare("broadcast", "float64", count, root=1) for group in made]
            works = [calls[1].start(np.full(count, float(number))) for number in range(ahead + 1)]
            assert [work.done() for work in works] == [True] * ahead + [False]
            got = np.zeros(count)
            for number in range(ahead + 1):
                for rank in (0, 2):
                    last = works[-1]
                    assert last.done() == (number >= read)
                    assert [last.missing(r) for r in range(3)] == [number + (rank == 2) < read, 0, number < read]
                    assert calls[rank].start(got).done() and (got == number).all()


@pytest.mark.parametrize("operation", ["reduce", "gather", "scatter", "scan", "exscan"])
def test_who_needs_no_data_of_others_does_not_wait_for_them(operation):
    with groups(3) as made:
        for count in (2, 5000):
            calls = [group.prepare(operation, "float64", count) for group in made]
            takes = {"reduce": (1, 0, 0), "gather": (3, 0, 0), "exscan": (0, 1, 1)}.get(operation, (1, 1, 1))
            gives = (3, 0, 0) if operation == "scatter" else (1, 1, 1)
            order = (1, 2, 0) if operation in ("reduce", "gather") else (0, 1, 2)
            for rank in order:
                ends = [np.ones(parts * count) if parts else None for parts in (gives[rank], takes[rank])]
                assert calls[rank].start(*ends).done(), rank


def test_calls_that_differ_between_ranks_that_do_not_wait_are_found_later():
    """Both calls are over when the next one, which is the same, begins: its stamps tell the difference."""
    with groups(2) as (a, b):
        for group in (a, b):
            group.core.publish(0, 5)
        assert a.prepare("broadcast", "float64", 2).start(np.ones(2)).done()
        assert b.prepare("reduce", "float64", 2).start(np.ones(2)).done()
        works = [a.start(np.ones(3)), b.start(np.ones(3))]
        for work in works:
            with pytest.raises(CoreError, match="^MISMATCH of rank [01], 1, by rank 0"):
                work.wait()


def test_arrays_that_do_not_fit_are_refused():
    read_only = np.ones(3)
    read_only.flags.writeable = False
    with groups(2) as (group, _):
        call = group.prepare("reduce", "float64", 3, root=1)
        gather = group.prepare("all_gather", "float64", 3)
        unaligned = np.frombuffer(bytearray(25), np.uint8)[1:].view(np.float64)
        for run, given, text in (
            (call.run, (np.ones(4),), "x: expected 24 contiguous bytes aligned to 8, got 32 at"),
            (call.run, (unaligned,), "aligned to 8, got 24"), (call.run, (np.ones(6)[::2],), "not C-contiguous"),
            (call.run, ([1, 2, 3],), "bytes-like"), (gather.run, (np.ones(3), None), "bytes-like"),
            (gather.run, (np.ones(3),), "x: expected 48"), (gather.run, (np.ones(3), np.ones(5)), "out: expected 48"),
            (gather.run, (np.ones(6),), "x: expected 24"), (gather.run, (), "bytes-like"),
            (group.prepare("all_reduce", "float64", 3).run, (read_only,), "read-only"),
        ):  # fmt: skip
            with pytest.raises((ValueError, TypeError, BufferError), match=text):
                run(*given)
        assert group.begun == 0


def test_counts_of_another_number_of_ranks_are_refused():
    with groups(2) as (group, _):
        for counts in ({"send_counts": [1]}, {"recv_counts": [1, 2, 3]}):
            with pytest.raises(ValueError, match="^expected counts of 16 bytes or None, got (8 and 0|0 and 24)$"):
                group.prepare("all_to_all", "uint8", varies=True, **counts)
