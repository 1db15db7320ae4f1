"""Attention split over ranks gives what one rank gives: outputs and every gradient, in float64."""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from kos.memory.arena import Arena
from kos.testing import spawn
from kos.train.data.batch import Batch
from kos.train.ops import Attend
from kos.train.ops import numpy as numpy_ops
from kos.train.ops.fixed_order import Split
from kos.train.parallel.context import ContextParallel, FixedContext
from kos.train.parallel.mesh import Axis
from tests.train.cpu_ops import columns, nan, nan_columns, poisoned_slab


class Deferred:
    """A communicator whose exchanges happen when they are waited for: what is read or written too early shows."""

    def __init__(self, comm):
        self.comm, self.rank = comm, comm.rank

    def __getattr__(self, name):
        def exchange(x, out, *others, async_op=False):
            out.fill(np.nan)
            wait = partial(getattr(self.comm, name), x, out, *others)
            return SimpleNamespace(wait=wait) if async_op else wait()

        return exchange


class Whole:
    """Random sequences, their plain attention, and what a rank has of each array."""

    heads, kv_heads, d = 4, 2, 3

    def __init__(self, samples, length):
        rng, self.samples, self.length = np.random.default_rng(7), samples, length
        self.qkv, self.d_out = (
            rng.normal(size=(samples * length, n * self.d)) for n in (self.heads + 2 * self.kv_heads, self.heads)
        )
        self.out, self.lse = nan_columns(*self.d_out.shape), nan(samples, self.heads, length)
        self.d_qkv = nan_columns(*self.qkv.shape)
        attend = Attend(columns(self.qkv), self.heads, self.kv_heads, self.out, self.lse)
        numpy_ops.attention(attend, Arena())
        numpy_ops.attention_backward(attend, columns(self.d_out), self.d_qkv, Arena())

    def part(self, name, positions):
        """Rows of tokens; of ``lse`` (B, H, T)."""
        x = getattr(self, name)
        if name == "lse":
            return x[..., positions]
        return x.reshape(self.samples, self.length, -1)[:, positions].reshape(self.samples * len(positions), -1)


def attention_of_ranks(
    size, samples=2, chunk=3, group=None, ops=numpy_ops, dtype=np.float64, rtol=1e-10, pieces=0
):  # fmt: skip
    """``ContextParallel`` of ``size`` ranks against the plain attention of whole sequences.

    With ``pieces`` of a rank: ``FixedContext``.
    """
    whole, wide = Whole(samples, 2 * size * chunk * max(1, pieces)), ops.statistics_dtype(dtype)

    def run(comm):
        comm = group(comm) if group else comm
        axis = Axis(comm.rank, size, comm)
        context = FixedContext(ops, axis, Split(1, pieces * size)) if pieces else ContextParallel(ops, axis)
        arena = Arena(0, poisoned_slab)
        positions = np.split(np.array(context.positions(2 * chunk * context.pieces)), context.pieces)

        def part_of(name):
            return np.concatenate([whole.part(name, of_piece) for of_piece in positions])

        def mine(name, dtype=dtype, poison=1.0):
            part = part_of(name) * poison
            return (part if name == "lse" else columns(part)).astype(dtype)

        qkv, d_out = mine("qkv"), mine("d_out")
        out, lse, d_qkv = mine("out", poison=np.nan), mine("lse", wide, np.nan), mine("d_qkv", poison=np.nan)
        attend = Attend(qkv, whole.heads, whole.kv_heads, out, lse)
        context.attention(attend, arena)
        context.attention_backward(attend, d_out, d_qkv, arena)
        for name, got in (("out", out), ("lse", lse), ("d_qkv", d_qkv)):
            np.testing.assert_allclose(got, part_of(name), rtol, atol=rtol, err_msg=name)

    spawn(run, size)


@pytest.mark.parametrize("chunk", [1, 3, 70])
@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_attention(size, chunk):
    """70 tokens are two blocks of queries."""
    attention_of_ranks(size, chunk=chunk)
    attention_of_ranks(size, samples=1, chunk=chunk, group=Deferred)


@pytest.mark.parametrize(("size", "pieces"), [(1, 1), (1, 4), (2, 1), (2, 2), (4, 2)])
def test_attention_in_a_fixed_order(size, pieces):
    """Piece by piece, each of which lies in consecutive rows."""
    attention_of_ranks(size, pieces=pieces)
    attention_of_ranks(size, samples=1, chunk=5, pieces=pieces, group=Deferred)


def test_statistics_of_another_dtype():
    """As on a GPU: sums are wider than activations, which are rounded once."""
    ops = SimpleNamespace(**vars(numpy_ops) | {"statistics_dtype": lambda dtype: np.dtype(np.float64)})
    attention_of_ranks(4, ops=ops, dtype=np.dtype(np.float32), rtol=2e-6)


def test_positions_and_columns():
    axes = [ContextParallel(numpy_ops, Axis(rank, 3, None)) for rank in range(3)]
    assert [list(axis.positions(4)) for axis in axes] == [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]
    batch = Batch(np.arange(24).reshape(2, 12))
    assert axes[1].take(batch).tokens.tolist() == [[2, 3, 8, 9], [14, 15, 20, 21]]
    alone = ContextParallel(numpy_ops)
    assert list(alone.positions(3)) == [0, 1, 2]
    assert alone.take(batch) is batch
