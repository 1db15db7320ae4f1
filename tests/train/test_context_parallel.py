"""Attention split over ranks gives what one rank gives: outputs, loss and every gradient, in float64."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from kos.errors import ConfigError
from kos.memory.arena import Arena
from kos.testing import spawn
from kos.train.model.llama import Llama
from kos.train.model.parameters import Parameters
from kos.train.ops import numpy as numpy_ops
from kos.train.parallel.context import ContextParallel, check
from kos.train.parallel.mesh import Axis, Layout, Mesh
from kos.train.parallel.tensor import TensorParallel
from tests.train.models import make, make_batch
from tests.train.test_ops import columns, nan, nan_columns, poisoned_slab
from tests.train.test_tensor_parallel import part_of

ROUTES = ("ring", "gather")


class Late:
    """A communicator whose exchanges happen when they are waited for; ``lost`` of rank 0 brings zeros.

    So an array that is read too early or written too early shows.
    """

    def __init__(self, comm, lost=None):
        self.comm, self.rank, self.exchanges = comm, comm.rank, 0
        self.lost = lost if comm.rank == 0 else None

    def __getattr__(self, name):
        def exchange(x, out, *others, async_op=False):
            out.fill(np.nan)
            number, self.exchanges = self.exchanges, self.exchanges + 1

            def wait():
                getattr(self.comm, name)(x, out, *others)
                if number == self.lost:
                    out.fill(0)

            return SimpleNamespace(wait=wait) if async_op else wait()

        return exchange


def attention_of_ranks(size, route, samples=2, chunk=3, group=None, ops=numpy_ops, dtype=np.float64, rtol=1e-10):
    """``ContextParallel`` of ``size`` ranks against the plain attention of whole sequences; exchanges of each rank."""
    rng, heads, kv_heads, d, length = np.random.default_rng(7), 4, 2, 3, 2 * size * chunk
    width, wide = (heads + 2 * kv_heads) * d, ops.statistics_dtype(dtype)
    qkv, d_out = rng.normal(size=(samples * length, width)), rng.normal(size=(samples * length, heads * d))
    out, lse = nan_columns(*d_out.shape), nan(samples, heads, length)
    numpy_ops.attention(columns(qkv), heads, kv_heads, out, lse, Arena())
    d_qkv = nan_columns(*qkv.shape)
    numpy_ops.attention_backward(columns(d_out), columns(qkv), out, lse, heads, kv_heads, d_qkv, Arena())

    def run(comm):
        comm = group(comm) if group else comm
        context, arena = ContextParallel(ops, Axis(comm.rank, size, comm), route), Arena(0, poisoned_slab)
        positions = context.positions(2 * chunk)

        def mine(x):
            x = x.reshape(samples, length, -1)[:, positions]
            return columns(x.reshape(samples * len(positions), -1).astype(dtype))

        got, got_lse = nan_columns(*mine(out).shape).astype(dtype), nan(samples, heads, 2 * chunk).astype(wide)
        got_d = nan_columns(*mine(qkv).shape).astype(dtype)
        context.attention(mine(qkv), heads, kv_heads, got, got_lse, arena)
        np.testing.assert_allclose(got, mine(out), rtol, atol=rtol)
        np.testing.assert_allclose(got_lse, lse[..., positions], rtol, atol=rtol)
        context.attention_backward(mine(d_out), mine(qkv), got, got_lse, heads, kv_heads, got_d, arena)
        np.testing.assert_allclose(got_d, mine(d_qkv), rtol, atol=rtol)
        return getattr(comm, "exchanges", None)

    return spawn(run, size)


@pytest.mark.parametrize("chunk", [1, 3, 40])
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_attention(size, route, chunk, monkeypatch):
    monkeypatch.setattr(numpy_ops, "QUERY_BLOCK", 32)
    attention_of_ranks(size, route, chunk=chunk)
    attention_of_ranks(size, route, samples=1, chunk=chunk, group=Late)


@pytest.mark.parametrize("route", ROUTES)
def test_statistics_of_another_dtype(route):
    """As on a GPU: sums are wider than activations, which are rounded once."""
    ops = SimpleNamespace(**vars(numpy_ops) | {"statistics_dtype": lambda dtype: np.dtype(np.float64)})
    attention_of_ranks(4, route, ops=ops, dtype=np.dtype(np.float32), rtol=2e-6)


@pytest.mark.parametrize(("route", "size"), [("ring", 2), ("ring", 4), ("gather", 3)])
def test_every_exchange_counts(route, size):
    count = attention_of_ranks(size, route, group=Late)[0]
    assert count == (3 * (size - 1) if route == "ring" else 3)
    for lost in range(count):
        with pytest.raises(AssertionError, match="Not equal to tolerance"):
            attention_of_ranks(size, route, group=lambda comm, lost=lost: Late(comm, lost))


def compare(layout, kind="untied", samples=3, recompute="none", route="ring"):
    """Loss and gradients of a layout of cp and tp against the whole model's."""
    config, whole, weights, expected = make(kind, np.float64, vocab_size=40, intermediate_size=28)
    tokens, targets = make_batch(config, samples, 24, seed=3)
    targets[0, :5] = -1
    count = np.array([np.count_nonzero(targets >= 0)], np.float64)
    loss = whole.loss_and_gradients(weights, tokens, targets, expected, accumulate=False)

    def run(comm):
        mesh = Mesh(comm, layout)
        local = config.local(mesh.tp.rank, layout.tp)
        own = Parameters(config.parameter_shapes(local), np.float64, config.fused_groups(local))
        for name in own:
            own[name][...] = part_of(name, weights[name], config, layout.tp, mesh.tp.rank)
        gradients = own.like()
        gradients.flat[:] = np.nan
        model = Llama(
            config, numpy_ops, recompute=recompute, local=local,
            tensor=(tensor := TensorParallel(numpy_ops, mesh.tp, local.vocabulary.start)),
            context=(context := ContextParallel(numpy_ops, mesh.cp, route)),
        )  # fmt: skip
        for accumulate in (False, True):
            got = model.loss_and_gradients(
                own, context.take(tokens), context.take(targets), gradients, accumulate=accumulate, count=count
            )
            assert mesh.gradients.comm.all_reduce(np.array([got])) == pytest.approx(loss, rel=1e-12)
        mesh.gradients.comm.all_reduce(gradients.flat)
        for name, value in gradients.items():
            if value.ndim == 1:
                tensor.sum_replicated(value)
            wanted = 2 * part_of(name, expected[name], config, layout.tp, mesh.tp.rank)
            np.testing.assert_allclose(value, wanted, rtol=1e-9, atol=1e-12, err_msg=name)

    spawn(run, layout.ranks)


@pytest.mark.parametrize("kind", ["tied", "untied", "llama3", "multi-query", "multi-head"])
@pytest.mark.parametrize("cp", [2, 3, 4])
def test_gradients(cp, kind):
    compare(Layout(cp=cp), kind)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("recompute", ["none", "norms", "block"])
def test_recompute(recompute, route):
    compare(Layout(cp=2), samples=1, recompute=recompute, route=route)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("cp", [2, 3])
def test_gradients_beside_tensor_parallelism(cp, route):
    compare(Layout(cp=cp, tp=2), samples=3, route=route)
    compare(Layout(cp=cp, tp=2), "tied", samples=1, recompute="block", route=route)


def test_positions_and_columns():
    axes = [ContextParallel(numpy_ops, Axis(rank, 3, None)) for rank in range(3)]
    assert [list(axis.positions(4)) for axis in axes] == [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]
    tokens = np.arange(24).reshape(2, 12)
    assert axes[1].take(tokens).tolist() == [[2, 3, 8, 9], [14, 15, 20, 21]]
    alone = ContextParallel(numpy_ops)
    assert list(alone.positions(3)) == [0, 1, 2]
    assert alone.take(tokens) is tokens


def test_check():
    check(7, 1)
    check(24, 3)
    for length in (8, 9):
        with pytest.raises(ConfigError, match=f"--seq-len: expected a multiple of 2 x --cp = 6, got {length}"):
            check(length, 3)
