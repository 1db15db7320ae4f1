"""What every collective promises: order, precision, progress, groups, batches, persistent operations."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import kos
from kos import PremulSum, ReduceOp
from kos.comm.schedules import algorithms
from kos.errors import CollectiveError
from kos.testing import spawn
from tests.comm.ranks import TIMEOUT, assert_bits, inputs, poison

COUNTS = (1, 2, 7, 997, 70_001)


def in_rank_order(xs: list[np.ndarray]) -> np.ndarray:
    """((x0 + x1) + x2) + ... in fp32 or wider, rounded once: written out, as the reference."""
    wide = xs[0].dtype if xs[0].dtype.itemsize >= 4 else np.float32
    total = xs[0].astype(wide)
    for x in xs[1:]:
        total = total + x.astype(wide)
    return total.astype(xs[0].dtype)


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16], ids=str)
def test_deterministic_adds_in_rank_order(ranks: Any, seed: int, dtype: Any) -> None:
    def body(comm: kos.Communicator) -> None:
        for count in COUNTS:
            xs = inputs(seed, comm.size, count, dtype)
            # Far apart in size, so that any other order of additions rounds differently.
            xs = [(x.astype(np.float64) * 16.0 ** (r % 3)).astype(dtype) for r, x in enumerate(xs)]
            for algorithm in ("auto", *algorithms("all_reduce", ordered=True)):
                x = xs[comm.rank].copy()
                comm.all_reduce(x, algorithm=algorithm, deterministic=True)
                assert_bits(x, in_rank_order(xs), f"{algorithm}, {count} elements")
            for root in range(comm.size):
                out = poison(count, dtype)
                comm.reduce(xs[comm.rank], root, out=out, deterministic=True)
                if comm.rank == root:
                    assert_bits(out, in_rank_order(xs), f"reduce, {count} elements")
            if count % comm.size == 0:
                part = comm.reduce_scatter(xs[comm.rank], deterministic=True)
                whole = in_rank_order(xs).reshape(comm.size, -1)
                assert_bits(part, whole[comm.rank], f"reduce_scatter, {count} elements")

    ranks.run(body)


@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PROD, PremulSum(0.3)], ids=str)
@pytest.mark.mpi
def test_deterministic_is_the_same_on_mock_and_mpi(mpi_world: kos.Communicator, seed: int, op: Any) -> None:
    for dtype in (np.float32, ml_dtypes.bfloat16):
        xs = inputs(seed, mpi_world.size, 1003, dtype)

        def reduce(comm: kos.Communicator, xs: list[np.ndarray] = xs) -> np.ndarray:
            return comm.all_reduce(xs[comm.rank].copy(), op, deterministic=True)

        mine = reduce(mpi_world)
        for other in spawn(reduce, mpi_world.size, timeout=TIMEOUT):
            assert_bits(mine, other, f"{dtype}")


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=str)
def test_16_bit_floats_accumulate_in_fp32(ranks: Any, dtype: Any) -> None:
    def body(comm: kos.Communicator) -> None:
        # The first number's neighbours are 2 apart: 16-bit additions of 0.75 are lost or round up.
        base = 1 / float(ml_dtypes.finfo(dtype).eps) * 2
        xs = np.array([base] + [0.75] * (comm.size - 1))
        expected = np.array([xs.sum()], np.float32).astype(dtype)
        for algorithm in ("auto", *algorithms("all_reduce")):
            x = xs[comm.rank : comm.rank + 1].astype(dtype)
            comm.all_reduce(x, algorithm=algorithm)
            assert_bits(x, expected, algorithm)
        # An average of large numbers whose sum does not fit.
        x = np.full(3, 60000 if dtype == np.float16 else 3e38).astype(dtype)
        assert_bits(comm.all_reduce(x.copy(), ReduceOp.MAX), x, "max")
        if dtype == np.float16:
            assert_bits(comm.all_reduce(x.copy(), ReduceOp.AVG), x, "average")

    ranks.run(body)


def test_nan_wins_min_and_max_on_every_rank(ranks: Any) -> None:
    def body(comm: kos.Communicator) -> None:
        for dtype in (np.float32, np.float16, ml_dtypes.bfloat16):
            for op in (ReduceOp.MIN, ReduceOp.MAX, ReduceOp.SUM):
                for bad in range(comm.size):
                    x = np.full(5, np.nan if comm.rank == bad else comm.rank).astype(dtype)
                    comm.all_reduce(x, op)
                    assert np.isnan(x.astype(np.float32)).all(), f"{op} of {dtype}: {x}"

    ranks.run(body)


def test_waiting_for_one_moves_the_other_across_groups(ranks: Any) -> None:
    """Rank 0 waits for a message while its all_reduce, which the sender needs, is in flight elsewhere."""

    def body(comm: kos.Communicator) -> None:
        other = comm.duplicate()
        if comm.size == 1:
            return
        x, token = np.full(100_003, comm.rank, np.float32), np.zeros(1, np.int32)
        if comm.rank == 0:
            work = comm.all_reduce(x, algorithm="ring", async_op=True)
            other.recv(token, comm.size - 1)
            work.wait()
        else:
            comm.all_reduce(x, algorithm="ring")
            if comm.rank == comm.size - 1:
                token[:] = 7
                other.send(token, 0)
        assert (x == sum(range(comm.size))).all()
        assert token[0] == 7 or comm.rank not in (0, comm.size - 1)

    ranks.run(body)


def test_a_part_of_a_part(ranks: Any) -> None:
    """Tests of random programs split the world."""

    def body(comm: kos.Communicator) -> None:
        part = comm.split(comm.rank % 2, key=-comm.rank)
        members = [r for r in reversed(range(comm.size)) if r % 2 == comm.rank % 2]
        half = part.split(part.rank // 2, key=-part.rank)
        same = members[part.rank // 2 * 2 :][:2][::-1]
        assert half.all_gather(np.array(comm.rank)).tolist() == same

    ranks.run(body)


def test_messages_of_duplicates_do_not_meet(ranks: Any) -> None:
    def body(comm: kos.Communicator) -> None:
        if comm.size == 1:
            return
        other = comm.duplicate()
        if comm.rank == 0:
            comm.send(np.array(1), 1, async_op=True)
            other.send(np.array(2), 1, async_op=True)
        elif comm.rank == 1:
            x = np.array(0)
            assert other.recv(x, 0) == 2
            assert comm.recv(x, 0) == 1
        comm.barrier()

    ranks.run(body)


def test_batch(ranks: Any) -> None:
    def body(comm: kos.Communicator) -> None:
        n, me = comm.size, comm.rank
        peers = [r for r in range(n) if r != me]
        inbox = {peer: np.zeros(3) for peer in peers}
        with comm.batch() as batch:
            for peer in peers:
                comm.send(np.full(3, 10.0 * me + peer), peer)
                comm.recv(inbox[peer], peer)
            assert batch.works == []
            total = comm.all_reduce(np.array(float(me)))
        assert total == sum(range(n))
        assert len(batch.works) == 2 * len(peers) + 1
        for peer in peers:
            assert (inbox[peer] == 10 * peer + me).all()

    ranks.run(body)


def test_close(ranks: Any) -> None:
    def body(comm: kos.Communicator) -> None:
        x = np.ones(1000, np.float32)
        with comm.duplicate() as other:
            other.all_reduce(x, async_op=True)
        assert (x == comm.size).all(), "close waits for what is in flight"
        other.close()
        with pytest.raises(CollectiveError, match="closed"):
            other.barrier()

    ranks.run(body)
