"""Random programs: operations on random groups, alone, in flight, in batches, persistent, against a serial model.

Numbers are small and whole, so that every order of additions gives the same bits in every dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kos
from kos import ReduceOp
from kos.comm.schedules import algorithms, collectives
from kos.testing import spawn
from tests.comm.ranks import assert_bits

DTYPES = (np.int32, np.int64, np.float32, np.float16, ml_dtypes.bfloat16)
OPS: dict[ReduceOp, Callable[[Any, Any], Any]] = {
    ReduceOp.SUM: np.add, ReduceOp.PROD: np.multiply, ReduceOp.MIN: np.minimum, ReduceOp.MAX: np.maximum
}  # fmt: skip
NAMES = (
    "all_reduce", "reduce", "reduce_scatter", "reduce_scatter_v", "broadcast", "all_gather", "all_gather_v",
    "all_to_all", "all_to_all_v", "gather", "scatter", "barrier", "send_recv",
)  # fmt: skip
REDUCING = NAMES[:3]


@dataclass(frozen=True)
class Step:
    """One operation; what depends on the size of its group is taken modulo that."""

    name: str
    group: int
    count: int
    dtype: Any
    op: ReduceOp
    root: int
    algorithm: int  # 0: auto
    deterministic: bool
    in_place: bool
    mode: str  # call, async, batch or persistent


@dataclass(frozen=True)
class Program:
    """``splits`` have a (color, key) for each rank; group 0 is all ranks, group k the k-th split."""

    size: int
    splits: list[list[tuple[int | None, int]]]
    steps: list[Step]
    seed: int


steps = st.builds(
    Step,
    name=st.sampled_from(NAMES),
    group=st.integers(0, 2),
    count=st.sampled_from([0, 1, 2, 5, 64, 9001]),
    dtype=st.sampled_from(DTYPES),
    op=st.sampled_from(list(OPS)),
    root=st.integers(0, 4),
    algorithm=st.sampled_from([0, 0, 0, 1, 2, 3, 4, 5, 6, 7]),
    deterministic=st.booleans(),
    in_place=st.booleans(),
    mode=st.sampled_from(["call", "async", "async", "batch", "batch", "persistent"]),
)


@st.composite
def programs(draw: st.DrawFn, size: int | None = None) -> Program:
    size = draw(st.integers(1, 5)) if size is None else size
    split = st.lists(st.tuples(st.sampled_from([None, 0, 0, 1]), st.integers(-2, 2)), min_size=size, max_size=size)
    return Program(
        size,
        draw(st.lists(split, max_size=2)),
        draw(st.lists(steps, min_size=1, max_size=12)),
        draw(st.integers(0, 1 << 30)),
    )


def inputs(program: Program, number: int, step: Step, members: list[int]) -> list[np.ndarray]:
    """What each member of the group gives."""
    n, count = len(members), step.count
    lengths = {
        "reduce_scatter": [count * n] * n, "all_to_all": [count * n] * n, "scatter": [count * n] * n,
        "reduce_scatter_v": [sum(uneven(step, n))] * n, "all_gather_v": uneven(step, n),
        "all_to_all_v": [sum(pairs(step, n)[i]) for i in range(n)],
    }.get(step.name, [count] * n)  # fmt: skip
    return [
        np.random.default_rng([program.seed, number, rank]).integers(0, 5, length).astype(step.dtype)
        for rank, length in zip(members, lengths, strict=True)
    ]


def uneven(step: Step, n: int) -> list[int]:
    return [(step.count + i) % 4 for i in range(n)]


def pairs(step: Step, n: int) -> list[list[int]]:
    return [[(step.count + 2 * i + j) % 3 for j in range(n)] for i in range(n)]


def model(step: Step, xs: list[np.ndarray], me: int) -> np.ndarray | None:
    """What member ``me`` gets."""
    n, root = len(xs), step.root % len(xs)
    total = reduce(OPS[step.op], xs) if step.name.startswith(("all_reduce", "reduce")) else None
    cuts = np.cumsum(uneven(step, n))[:-1]
    if step.name == "all_reduce":
        return total
    if step.name == "reduce":
        return total if me == root else None
    if step.name == "reduce_scatter":
        return total.reshape(n, -1)[me]
    if step.name == "reduce_scatter_v":
        return np.split(total, cuts)[me]
    if step.name == "broadcast":
        return xs[root]
    if step.name in ("all_gather", "all_gather_v"):
        return np.concatenate(xs)
    if step.name == "all_to_all":
        return np.concatenate([x.reshape(n, -1)[me] for x in xs])
    if step.name == "all_to_all_v":
        return np.concatenate([np.split(x, np.cumsum(pairs(step, n)[i])[:-1])[me] for i, x in enumerate(xs)])
    if step.name == "gather":
        return np.concatenate(xs) if me == root else None
    if step.name == "scatter":
        return xs[root].reshape(n, -1)[me]
    return xs[(me - 1) % n] if step.name == "send_recv" else None


def arguments(comm: kos.Communicator, step: Step, x: np.ndarray, out: np.ndarray) -> tuple[list[Any], dict[str, Any]]:
    n, me, root = comm.size, comm.rank, step.root % comm.size
    options: dict[str, Any] = {}
    if step.name in REDUCING:
        options = {"op": step.op, "deterministic": step.deterministic}
    if step.name in collectives() and step.algorithm:
        known = algorithms(step.name, ordered=True if options.get("deterministic") else None)
        options["algorithm"] = known[step.algorithm % len(known)]
    if step.name in ("all_reduce", "reduce", "broadcast") and not step.in_place:
        options["out"] = out
    return {
        "all_reduce": [x], "reduce": [x, root], "reduce_scatter": [x, out], "broadcast": [x, root],
        "reduce_scatter_v": [x, uneven(step, n), out, step.op], "all_gather": [x, out],
        "all_gather_v": [x, uneven(step, n), out], "all_to_all": [x, out],
        "all_to_all_v": [x, pairs(step, n)[me], [pairs(step, n)[i][me] for i in range(n)], out],
        "gather": [x, root, out if me == root else None], "scatter": [x if me == root else None, out, root],
        "barrier": [], "send_recv": [x, out, (me + 1) % n, (me - 1) % n],
    }[step.name], options  # fmt: skip


def execute(comm: kos.Communicator, program: Program) -> None:
    groups: list[tuple[kos.Communicator | None, list[int]]] = [(comm, list(range(comm.size)))]
    for split in program.splits:
        color, key = split[comm.rank]
        members = [r for r in range(comm.size) if split[r][0] == color]
        groups.append((comm.split(color, key), sorted(members, key=lambda r: (split[r][1], r))))
    rng = np.random.default_rng([program.seed, comm.rank])
    works: list[Any] = []
    checks: list[Callable[[], None]] = []

    def finish() -> None:
        for i in rng.permutation(len(works)):  # every rank in an order of its own
            works[i].wait()
        for check in checks:
            check()
        works.clear()
        checks.clear()

    batches: dict[int, list[Callable[[], Any]]] = {}

    def launch(group: int) -> None:
        """Together, what was kept for a batch on that group."""
        part = groups[group][0]
        calls = batches.pop(group, [])
        if part is not None and calls:
            with part.batch(async_op=True) as batch:
                for call in calls:
                    call()
            works.append(batch)

    for number, step in enumerate(program.steps):
        group = step.group % len(groups)
        part, members = groups[group]
        if part is None or (step.name == "send_recv" and part.size == 1):
            continue
        assert (part.size, part.rank) == (len(members), members.index(comm.rank))
        if step.mode not in ("batch", "persistent"):
            launch(group)  # operations of a group keep their order
        xs = inputs(program, number, step, members)
        x, expected = xs[part.rank].copy(), model(step, xs, part.rank)
        in_place = step.in_place and step.name in ("all_reduce", "reduce", "broadcast")
        out = x if in_place or expected is None else np.full(expected.size, 99, step.dtype)
        given, options = arguments(part, step, x, out)

        def check(
            step: Step = step, x: Any = x, before: Any = xs[part.rank], out: Any = out, expected: Any = expected
        ) -> None:
            if expected is not None:
                assert_bits(out.reshape(-1), expected, str(step))
            if out is not x or expected is None:
                assert_bits(x, before, f"the input of {step}")

        checks.append(check)
        call = getattr(part, step.name if step.mode != "persistent" else f"{step.name}_init")
        if step.mode == "call":
            call(*given, **options)
        elif step.mode == "async":
            works.append(call(*given, **options, async_op=True))
        elif step.mode == "batch":
            batches.setdefault(group, []).append(
                lambda call=call, given=given, options=options: call(*given, **options)
            )
        else:
            batches.setdefault(group, []).append(call(*given, **options).start)
    for group in sorted(batches):
        launch(group)
    finish()
    for part, _ in groups[1:]:
        if part is not None:
            part.close()


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
@given(program=programs())
def test_on_threads(program: Program) -> None:
    spawn(lambda comm: execute(comm, program), program.size, timeout=10)


@pytest.mark.mpi
def test_on_mpi(ranks_of_mpi: Any, seed: int) -> None:
    """Programs drawn from the seed, the same on all ranks."""
    rng = np.random.default_rng(seed)

    def one_of(choices: Any) -> Any:
        return choices[rng.integers(len(choices))]

    def drawn(size: int) -> Program:
        splits = [[(one_of([None, 0, 0, 1]), int(rng.integers(-2, 3))) for _ in range(size)] for _ in range(2)]
        return Program(
            size,
            splits,
            [
                Step(
                    one_of(NAMES), int(rng.integers(3)), one_of([0, 1, 5, 64, 9001, 300_000]), one_of(DTYPES),
                    one_of(list(OPS)), int(rng.integers(5)), one_of([0, 0, 0, 1, 2, 3, 4, 5]),
                    bool(rng.integers(2)), bool(rng.integers(2)), one_of(["call", "async", "batch", "persistent"]),
                )
                for _ in range(10)
            ],
            int(rng.integers(1 << 30)),
        )  # fmt: skip

    for _ in range(6):
        program = drawn(ranks_of_mpi.size)
        print(program)
        ranks_of_mpi.run(lambda comm, program=program: execute(comm, program))
