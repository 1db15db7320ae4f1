"""Random programs of all operations of the compiled core: collectives, v-forms and messages, of every size.

Ranks are processes or threads, out of step with one another.  Calls are blocking, or Works that are waited for in any
order.  Large data goes through slots and mailboxes, or in one copy.
"""

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tests.core.core_ranks import groups, needs_core, on_processes, on_threads, run_threads, together
from tests.core.group import CoreGroup

pytestmark = needs_core
Array = np.ndarray[Any, Any]
MOVES = ("broadcast", "all_gather", "gather", "scatter", "all_to_all")
REDUCES = ("all_reduce", "reduce", "reduce_scatter", "scan", "exscan")
V_FORMS = ("all_gather", "gather", "scatter", "all_to_all", "reduce_scatter")
PARTED = ("scatter", "all_to_all", "reduce_scatter")
"""In which a rank gives each rank a part of its own."""
COUNTS = (0, 1, 2, 5, 6, 7, 12, 13, 100, 1000, 16_384, 20_000, 70_000, 200_000)  # elements of 4 bytes; one copy at last
MESSAGES = (0, 1, 40, 41, 64, 1000, 65_536, 65_537, 300_000)  # bytes


class Call:
    """A collective with random data: the arrays of every rank, and what must be in them afterwards."""

    def __init__(self, operation: str, size: int, root: int, counts: Any, seed: int, in_place: bool = False) -> None:
        """``counts``: elements of each part, or, in v-forms, a row for each sender with a column for each receiver."""
        self.operation, self.size, self.root, self.counts = operation, size, root, counts
        self.varies, self.in_place = not isinstance(counts, int), in_place
        rng = np.random.default_rng(seed)
        table = counts if self.varies else [[counts] * size] * size
        # parts[s][r]: what rank s gives to rank r
        self.parts = [[rng.integers(0, 1 << 30, n, np.uint32) for n in row] for row in table]
        if operation not in PARTED:
            self.parts = [[row[0]] * size for row in self.parts]

    def prepare(self, group: CoreGroup) -> Any:
        r, size, operation = group.rank, self.size, self.operation
        count, sent, received = self.counts, None, None
        if self.varies:
            count = len(self.parts[r][0] if operation in ("all_gather", "gather") else self.parts[self.root][r])
            if operation in PARTED:
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
        gives: Array | None = np.concatenate(self.parts[rank]) if self.operation in PARTED else self.parts[rank][0]
        if self.operation in ("broadcast", "scatter") and rank != self.root:
            gives = None
        expected = self.expected(rank)
        out = None if expected is None else np.full(expected.size, 77, np.uint32)
        if self.in_place and out is not None and self.operation in ("broadcast", "all_reduce", "scan", "all_gather"):
            place = out
            if self.operation == "all_gather":
                place = out[sum(len(row[rank]) for row in self.parts[:rank]) :][: len(self.parts[rank][rank])]
            if gives is not None:
                place[...] = gives
            gives = place
        return gives, out

    def expected(self, rank: int) -> Array | None:
        column = [row[rank] for row in self.parts]
        if self.operation in ("gather", "reduce") and rank != self.root:
            return None
        if self.operation in ("broadcast", "scatter"):
            return column[self.root]
        if self.operation in REDUCES:
            terms = {"scan": column[: rank + 1], "exscan": column[:rank]}.get(self.operation, column)
            return np.sum(terms, axis=0, dtype=np.uint32) if terms else None
        return np.concatenate(column)

    def __str__(self) -> str:
        return f"{self.operation} of {self.counts} from {self.root} on {self.size} ranks"


@pytest.fixture(params=[(1, False), (2, False), (2, True), (3, False), (3, True), (5, True)], ids=str)
def made(request):
    size, direct = request.param
    with groups(size) as ranks:
        if direct:
            assert run_threads(*[group.connect for group in ranks]) == [True] * size
        yield ranks


def check(made: Sequence[CoreGroup], call: Call) -> None:
    arrays = [call.arrays(rank) for rank in range(call.size)]
    together([call.prepare(group) for group in made], arrays)
    for rank, (_, out) in enumerate(arrays):
        expected = call.expected(rank)
        if expected is not None and out is not None:
            assert out.tobytes() == expected.tobytes(), f"{call}: rank {rank}"


@pytest.mark.parametrize("operation", MOVES)
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


class Program:
    """One rank's part of a random program; ``wrong`` are the calls with wrong results."""

    def __init__(self, group: CoreGroup, seed: int) -> None:
        self.group, self.shared, self.mine = group, random.Random(seed), random.Random(seed * 31 + group.rank)
        self.outstanding: list[tuple[Any, str, Any, Any]] = []  # a Work, its name, its array and what that must hold
        self.wrong: list[str] = []

    def check(self, name: str, out: Array | None, expected: Array | None) -> None:
        if out is not None and expected is not None and out.tobytes() != expected.tobytes():
            self.wrong.append(name)

    def call(self, number: int) -> None:
        group, shared = self.group, self.shared
        operation = shared.choice((*MOVES, *REDUCES))
        counts: Any = shared.choice((0, 1, 2, 6, 7, 100, 1000, 8000, 140_000))
        if operation in V_FORMS and shared.random() < 0.3:
            counts = random_counts(operation, group.size, shared)
        call = Call(operation, group.size, shared.randrange(group.size), counts, number, shared.random() < 0.5)
        prepared, (x, out), expected = call.prepare(group), call.arrays(group.rank), call.expected(group.rank)
        if self.mine.random() < 0.5:
            prepared.run(x, out)
            self.check(str(call), out, expected)
        else:
            self.outstanding.append((prepared.start(x, out), str(call), out, expected))

    def message(self, number: int) -> None:
        """From a rank to another one or itself, or round the ranks."""
        group, shared = self.group, self.shared
        src, dst = shared.randrange(group.size), shared.randrange(group.size)
        tag, nbytes = shared.randrange(3), shared.choice(MESSAGES)
        x = np.random.default_rng(number).integers(0, 256, nbytes, np.uint8)
        y, name = np.zeros_like(x), f"{nbytes} bytes from {src} to {dst}"
        if group.size > 1 and shared.random() < 0.3:
            right = shared.randrange(1, group.size)
            to, source = (group.rank + right) % group.size, (group.rank - right) % group.size
            group.prepare("send_recv", "uint8", nbytes, dst=to, src=source, tag=9).run(x, y)
            self.check(f"{nbytes} bytes around", y, x)
            return
        if group.rank == src:
            self.outstanding.append((group.prepare("send", "uint8", nbytes, dst=dst, tag=tag).start(x), name, x, x))
        if group.rank == dst:
            self.outstanding.append((group.prepare("recv", "uint8", nbytes, src=src, tag=tag).start(y), name, y, x))

    def finish(self, entry: tuple[Any, str, Any, Any]) -> None:
        work, *rest = entry
        work.wait()
        self.check(*rest)


def random_program(group: CoreGroup, seed: int, calls: int, direct: bool) -> list[str]:
    """Of one rank; the calls with wrong results."""
    if direct and not group.connect():
        raise AssertionError
    program = Program(group, seed)
    shared, mine = program.shared, program.mine
    if direct:
        group.core.direct = shared.choice((1, 100 << 10, 512 << 10))
    group.core.marks = mine.randrange(2)
    for number in range(calls):
        for _ in range(mine.choice((0, 0, 100, 10_000))):  # ranks are out of step
            pass
        shared.choice((program.call, program.message))(number)
        if shared.random() < 0.2:
            group.prepare("barrier").run()
        for entry in [each for each in program.outstanding if mine.random() < 0.3 and each[0].done()]:
            program.outstanding = [each for each in program.outstanding if each is not entry]
            program.finish(entry)
    for entry in program.outstanding:
        program.finish(entry)
    group.prepare("barrier").run()
    return program.wrong


@pytest.mark.parametrize(("size", "direct"), [(2, True), (3, True), (2, False), (4, False)])
def test_random_programs_of_processes(size, direct, tmp_path):
    seed = random.randrange(1 << 20)
    print(f"seed {seed}")
    assert on_processes(size, random_program, tmp_path, seed, 400, direct) == [[]] * size


def test_random_programs_of_threads():
    seed = random.randrange(1 << 20)
    print(f"seed {seed}")
    assert on_threads(3, lambda group: random_program(group, seed, 300, False)) == [[]] * 3
