"""Collectives through shared memory: random programs, ranks out of step, and what must not be left behind.

The core's results for every reduce operation and dtype are checked in ``tests/core``.
"""

import contextlib
import os
from collections import Counter
from functools import partial

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from kos import PremulSum, ReduceOp
from kos.comm.host.shared import segment as segments
from kos.testing.conformance.model import Trial
from tests.comm.model import NAMES, Step
from tests.comm.ranks import no_file_may_be_opened, on_each_rank
from tests.comm.shared_ranks import needs_core, run, through_slots
from tests.comm.tcp_ranks import TCPRanks
from tests.comm.test_programs import execute, programs, with_long_parts

pytestmark = needs_core


@pytest.fixture(params=["slots", "direct"])
def large(monkeypatch, request):
    """Large parts take several stages in slots; then they take one copy, where that is possible.

    Each on a CPU of its own, as the core takes them apart.
    """
    monkeypatch.setenv("KOS_CPU_VENDOR", "other" if request.param == "slots" else "intel")
    if request.param == "slots":
        through_slots(monkeypatch)


@on_each_rank(run, 2)
def test_overflow_is_a_result_whatever_errors_numpy_is_set_to_raise(comm, /):
    with np.errstate(all="raise"):
        for op in (ReduceOp.SUM, ReduceOp.AVG, PremulSum(2.0)):
            assert np.isinf(comm.all_reduce(np.full(5, 3e38, np.float32), op)).all()
        assert (comm.all_reduce(np.full(5, 1e-45, np.float32), ReduceOp.AVG) > 0).all()
        assert np.isnan(comm.all_reduce(np.full(5, np.inf, np.float16), PremulSum(0.0))).all()
        with pytest.raises(FloatingPointError):
            np.full(5, 3e38, np.float32) * np.float32(10)


@on_each_rank(run, 2)
def test_a_factor_of_minus_zero_is_another_one(comm, /):
    for factor in (0.0, -0.0, 0.0):
        x = comm.all_reduce(np.ones(5, np.float32), PremulSum(factor))
        assert (x == 0).all() and (np.signbit(x) == np.signbit(factor)).all()


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
@given(program=programs())
@pytest.mark.usefixtures("large")
def test_random_programs(program):
    """Operations and messages share slots and mailboxes; ranks are out of step, and waits are in any order."""
    TCPRanks(program.size).run(lambda comm: execute(comm, program))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", [name for name in NAMES if name.endswith("_v")])
@pytest.mark.usefixtures("large")
def test_parts_of_any_lengths(name, size, seed):
    def body(comm):
        for number, count in enumerate((10, 300, 30_000, 200_000) * 5):
            step = with_long_parts(Step(name, count=count, root=number), size, seed + number)
            Trial(comm, step, seed + number).run()

    TCPRanks(size).run(body)


@on_each_rank(run, 2)
def test_a_slot_is_not_filled_before_its_reader_has_it(comm, /):
    x, y = np.full(5, 1.0 + comm.rank), np.full(5, 3.0 + comm.rank)
    if comm.rank == 0:
        comm.rendezvous.barrier()
        comm.broadcast(x)
        comm.broadcast(y)
        work = comm.all_reduce(np.full(5, 5.0), async_op=True)
        comm.rendezvous.barrier()
        assert (work.wait() == 6).all()
    else:
        works = [comm.broadcast(x, async_op=True), comm.broadcast(y, async_op=True)]
        comm.rendezvous.barrier()
        comm.rendezvous.barrier()  # it has begun both but read neither, and the root goes on
        assert [work.wait()[0] for work in works] == [1, 3]
        assert (comm.all_reduce(np.full(5, 1.0)) == 6).all()


def test_a_rank_far_ahead_of_the_others():
    """More calls are in flight than fingerprints are kept.  An overwritten fingerprint is not treated as a mismatch."""
    count = segments.RING + 50

    def body(comm):
        if comm.rank == 0:
            works = [comm.all_reduce(np.full(1 + i % 3, i), async_op=True) for i in range(count)]
            comm.rendezvous.barrier()
            assert [int(work.wait()[0]) for work in works] == [2 * i for i in range(count)]
        else:
            comm.rendezvous.barrier()
            for i in range(count):
                assert comm.all_reduce(np.full(1 + i % 3, i))[0] == 2 * i

    run(body, 2)


def test_a_rank_that_can_open_no_file_reports_no_death():
    def body(comm):
        comm.barrier()
        if comm.rank == 0:
            with no_file_may_be_opened():
                assert comm.backend.calls.killed() is None
        comm.barrier()

    run(body, size=2)


@pytest.mark.parametrize("ranks", [partial(run, size=3), TCPRanks(3).run], ids=["shared", "tcp"])
def test_nothing_is_left_behind(ranks):
    def held():
        """Segments by their numbers, for those of earlier tests may go, and other threads open files, meanwhile."""
        with open("/proc/self/maps") as maps:
            found = Counter(("mapped", int(line.split()[4])) for line in maps if "memfd:kos" in line)
        for file in map("/proc/self/fd/{}".format, os.listdir("/proc/self/fd")):
            with contextlib.suppress(FileNotFoundError):
                found["open", os.stat(file).st_ino] += "memfd:kos" in os.readlink(file)
        return +found

    def body(comm):
        comm.all_reduce(np.ones(3))
        part = comm.duplicate()
        part.all_reduce(np.ones(3))
        part.close()
        comm.rendezvous.barrier()
        if comm.rank == 0:
            inside.append(held())
        comm.rendezvous.barrier()
        return comm, part

    inside = []
    before = held()
    closed = ranks(body)  # closing is enough, they need not be forgotten
    assert len(closed) == 3
    used = {number for _, number in inside[0] - before}
    assert len(used) == 1, "the segment in use is held, that of the closed part is not"
    assert inside[0]["mapped", used.pop()] == 3
    assert not held() - before


def test_without_the_core_ranks_of_a_host_share_no_memory(monkeypatch):
    monkeypatch.setattr(segments, "unavailable", "no compiler")

    def body(comm):
        assert (comm.all_reduce(np.ones(9)) == 2).all()
        return comm.explain()

    assert all("no compiler" in text for text in TCPRanks(2).run(body))


def test_memory_that_a_rank_cannot_map(monkeypatch):
    opened = os.open

    def refuse(path, flags, *rest):
        if str(path).startswith("/proc/"):
            raise PermissionError(1, "Operation not permitted")
        return opened(path, flags, *rest)

    monkeypatch.setattr("os.open", refuse)
    for reason in run(lambda comm: comm.backend.shared_memory, 2):
        assert "rank 0 cannot map the memory of rank 0: [Errno 1] Operation not permitted" in reason


@on_each_rank(run, 2)
def test_a_rank_that_reads_its_own_slot_leaves_it_to_the_other(comm, /):
    """Scaled contributions are in the slots of both ranks, and the next rank may arrive later."""
    for i in range(6):
        x = np.full(4096, (1.0 + comm.rank + i) / 3)  # no byte is 0
        if comm.rank == 1:
            comm.recv(np.empty(1), 0)
        work = comm.scan(x, PremulSum(2.0), async_op=True)
        if comm.rank == 0:
            work.done()
            comm.send(np.zeros(1), 1)
        assert (work.wait() == sum(2 * ((1.0 + rank + i) / 3) for rank in range(comm.rank + 1))).all()
