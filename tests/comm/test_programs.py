"""Random programs against a serial model: operations on random groups, alone, in flight, in batches."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kos
from kos.comm.host.mpi import MPITransport
from kos.testing import spawn
from kos.testing.conformance.model import Trial
from tests.comm.model import NAMES, OPS, Step

FROM_ANY = ("recv from any", "recv_bytes from any", "probe")
"""Steps in which all others send to a root, which does not know from whom the next message comes."""
DTYPES = (np.int32, np.int64, np.float32, np.float16, ml_dtypes.bfloat16)


@dataclass(frozen=True)
class Program:
    """``splits`` have a (color, key) for each rank; group 0 is all ranks, group k the k-th split."""

    size: int
    splits: list[list[tuple[int | None, int]]]
    steps: list[Step]
    seed: int


steps = st.builds(
    Step,
    name=st.sampled_from([*NAMES, *FROM_ANY]),
    group=st.integers(0, 2),
    count=st.sampled_from([0, 1, 2, 5, 64, 9001, 70_001]),
    dtype=st.sampled_from(DTYPES),
    op=st.sampled_from(list(OPS)),
    root=st.integers(0, 4),
    algorithm=st.sampled_from([0, 0, 0, 1, 2, 3, 4, 5, 6, 7]),
    deterministic=st.booleans(),
    in_place=st.booleans(),
    mode=st.sampled_from(["call", "async", "async", "batch", "batch"]),
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


def messages(comm: kos.Communicator, step: Step, tag: int, seed: int) -> tuple[list[Any], Callable[[], None]]:
    """All others send to the root at once, bytes of lengths of their own or arrays; the Works, and a check."""
    root, size = step.root % comm.size, comm.size
    lengths = [step.count + (rank if step.name != "recv from any" else 0) for rank in range(size)]
    kind = np.dtype(np.uint8 if step.name == "recv_bytes from any" else step.dtype)
    sent = [np.random.default_rng([seed, tag, r]).integers(0, 5, n).astype(kind) for r, n in enumerate(lengths)]
    if comm.rank != root:
        send: Any = comm.send_bytes if step.name == "recv_bytes from any" else comm.send
        mine = sent[comm.rank].tobytes() if step.name == "recv_bytes from any" else sent[comm.rank]
        return [send(mine, root, tag, async_op=True)], lambda: None
    got: dict[int, bytes] = {}
    if step.name == "probe":
        for _ in range(size - 1):
            envelope = comm.probe(tag=tag)
            x = comm.recv(np.empty(envelope.size, envelope.dtype), envelope.src, tag)
            got[envelope.src] = x.tobytes()
    works: list[Any] = []
    for _ in range(size - 1 if step.name != "probe" else 0):
        if step.name == "recv_bytes from any":
            works.append(comm.recv_bytes(tag=tag, async_op=True))
        else:
            works.append(comm.recv(np.empty(step.count, step.dtype), tag=tag, async_op=True))

    def check() -> None:
        arrived = (work.wait() for work in works)
        found = got | {source: x if isinstance(x, bytes) else x.tobytes() for x, source in arrived}
        assert found == {rank: x.tobytes() for rank, x in enumerate(sent) if rank != root}, str(step)

    return works, check


def with_long_parts(step: Step, size: int, seed: int) -> Step:
    """The v-form with parts of any lengths up to ``count``, each empty now and then."""
    rng = np.random.default_rng([seed, step.count])
    rows = [tuple((rng.integers(0, step.count, size) * (rng.random(size) < 0.8)).tolist()) for _ in range(size)]
    return replace(step, counts=tuple(rows) if step.name == "all_to_all_v" else rows[0])


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
        if part is None or (step.name in ("send_recv", *FROM_ANY) and part.size == 1):
            continue
        assert (part.size, part.rank) == (len(members), members.index(comm.rank))
        if step.mode != "batch":
            launch(group)  # operations of a group keep their order
        if step.name in FROM_ANY:
            begun, check = messages(part, step, number + 1, program.seed)  # send_recv takes tag 0
            works += begun
            checks.append(check)
            continue
        if step.name.endswith("_v") and step.count > 1000:
            step = with_long_parts(step, part.size, program.seed)
        trial = Trial(part, step, program.seed + 1000 * number)
        checks.append(trial.check)
        if step.mode == "call":
            trial.start()
        elif step.mode == "async":
            works.append(trial.start(async_op=True))
        else:
            batches.setdefault(group, []).append(trial.start)
    for group in sorted(batches):
        launch(group)
    finish()
    for part, _ in groups[1:]:
        if part is not None:
            part.close()


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
@given(program=programs())
def test_on_threads(program):
    spawn(lambda comm: execute(comm, program), program.size, timeout=10)


@pytest.mark.mpi
@pytest.mark.parametrize("native", [True, False])
def test_on_mpi(ranks_of_mpi, seed, request, native):
    """Programs are drawn from the seed, the same on all ranks; also without MPI's collectives and shared memory."""
    if not native:
        request.getfixturevalue("monkeypatch").setattr(MPITransport, "native", lambda *_: None)
        request.getfixturevalue("apart")
    rng = np.random.default_rng(seed)

    def one_of(choices):
        return choices[rng.integers(len(choices))]

    def drawn(size):
        splits = [[(one_of([None, 0, 0, 1]), int(rng.integers(-2, 3))) for _ in range(size)] for _ in range(2)]
        drawn_steps = [
            Step(
                name, one_of([0, 1, 5, 64, 9001, 300_000]), one_of(DTYPES), one_of(list(OPS)),
                int(rng.integers(5)), one_of([0, 0, 0, 1, 2, 3, 4, 5]), bool(rng.integers(2)), bool(rng.integers(2)),
                group=int(rng.integers(3)), mode=one_of(["call", "async", "batch"]),
            )
            for name in rng.permutation([*NAMES, *FROM_ANY]).tolist()
        ]  # fmt: skip
        return Program(size, splits, drawn_steps, int(rng.integers(1 << 30)))

    for _ in range(5):
        program = drawn(ranks_of_mpi.size)
        print(program)
        ranks_of_mpi.run(lambda comm, program=program: execute(comm, program))
