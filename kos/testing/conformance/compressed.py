"""Compressed operations: the bits that ``kos.comm.compression`` gives in rank order, and errors within its bounds."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np

from kos.comm import Communicator, ReduceOp
from kos.comm import compressed as on_host
from kos.comm.compression import BLOCK, FORMATS, Format
from kos.testing.conformance.values import assert_bits, poison

SIZES = (0, 1, 63, 64, 65, 1000, 20_011)


def compressed(comm: Communicator, seed: int, name: str, dtype: Any) -> None:
    """Every operation that can be compressed, by the format ``name``, on hostile values among others."""
    rng = np.random.default_rng(seed)
    for count in SIZES:
        xs = [_hostile(rng, count * comm.size, dtype) for _ in range(comm.size)]
        _reductions(comm, FORMATS[name], [x[:count] for x in xs])
        _equal_parts(comm, FORMATS[name], xs)
        counts = [count + 3 * rank for rank in range(comm.size)]
        _uneven_parts(comm, FORMATS[name], counts, [_hostile(rng, sum(counts), dtype) for _ in range(comm.size)])


def _reductions(comm: Communicator, form: Format, xs: Sequence[Any]) -> None:
    x, what = xs[comm.rank], f"all_reduce of {xs[0].size}"
    for op in (ReduceOp.SUM, ReduceOp.AVG):
        out = poison(x.size, x.dtype)
        assert comm.all_reduce(x, op, out=out, compress=form.name) is out
        _compare(comm, out, _reduced(form, xs, op), f"{what} by {op}")
    y = x.copy()
    assert comm.all_reduce(y, compress=form.name) is y
    _compare(comm, y, _reduced(form, xs, ReduceOp.SUM), f"{what} in place")


def _equal_parts(comm: Communicator, form: Format, xs: Sequence[Any]) -> None:
    n, me = comm.size, comm.rank
    mine = [x.reshape(n, -1)[me] for x in xs]
    what = f"of {xs[0].size}"
    _compare(comm, comm.reduce_scatter(xs[me], compress=form.name), _sum(form, mine), f"reduce_scatter {what}")
    _compare(comm, comm.all_to_all(xs[me], compress=form.name), _moved(form, mine), f"all_to_all {what}")
    _compare(comm, comm.all_gather(xs[me], compress=form.name).reshape(-1), _moved(form, xs), f"all_gather {what}")
    whole = np.concatenate(xs).reshape(n, -1)
    comm.all_gather(whole[me], whole, compress=form.name)
    _compare(comm, whole.reshape(-1), _moved(form, xs), f"all_gather in place {what}")
    whole = xs[me].reshape(n, -1).copy()
    comm.reduce_scatter(whole, whole[me], compress=form.name)
    _compare(comm, whole[me], _sum(form, mine), f"reduce_scatter in place {what}")


def _uneven_parts(comm: Communicator, form: Format, counts: list[int], xs: Sequence[Any]) -> None:
    n, me, what = comm.size, comm.rank, f"of {counts}"
    parts = [[x[a:b] for a, b in pairwise(np.cumsum([0, *counts]))] for x in xs]
    mine, own = [row[me] for row in parts], [row[rank] for rank, row in enumerate(parts)]
    got = comm.reduce_scatter_v(xs[me], counts, compress=form.name)
    _compare(comm, got, _sum(form, mine), f"reduce_scatter_v {what}")
    _compare(comm, comm.all_gather_v(own[me], counts, compress=form.name), _moved(form, own), f"all_gather_v {what}")
    part = slice(sum(counts[:me]), sum(counts[: me + 1]))
    x, whole = xs[me].copy(), np.concatenate(own)
    comm.reduce_scatter_v(x, counts, x[part], compress=form.name)
    _compare(comm, x[part], _sum(form, mine), f"reduce_scatter_v in place {what}")
    comm.all_gather_v(whole[part], counts, whole, compress=form.name)
    _compare(comm, whole, _moved(form, own), f"all_gather_v in place {what}")
    got = comm.all_to_all_v(xs[me], counts, [counts[me]] * n, compress=form.name)
    _compare(comm, got, _moved(form, mine), f"all_to_all_v {what}")


def compressed_between_groups(comm: Communicator, seed: int, dtype: Any, local: int = 2) -> None:
    """Exact sums of ``local`` neighbours, then compressed ones between these groups (docs/guides/collectives.md)."""
    local, rng = 1 if comm.size % local else local, np.random.default_rng(seed)
    host, rail = comm.split(comm.rank // local), comm.split(comm.rank % local)
    assert host is not None and rail is not None
    for form, count in ((form, local * count) for form in FORMATS.values() for count in SIZES[1:]):
        xs = [_hostile(rng, count, dtype) for _ in range(comm.size)]
        x, what = xs[comm.rank].copy(), f"all_reduce of {count} between groups"
        part = host.reduce_scatter(x, deterministic=True)
        rail.all_reduce(part, compress=form.name)
        host.all_gather(part, x)
        with np.errstate(all="ignore"):
            wide = [each.astype(np.float32) for each in xs]  # no 0 is added to the first: it makes 0 of -0
            sums = [reduce(np.add, wide[at : at + local]) for at in range(0, comm.size, local)]
            sums = [np.split(total.astype(dtype), local) for total in sums]
        parts = zip(*sums, strict=True)
        _compare(comm, x, np.concatenate([_reduced(form, part, ReduceOp.SUM) for part in parts]), what)
    host.close()
    rail.close()


def compressed_sums_are_near(comm: Communicator, seed: int) -> None:
    """The relative error of a sum of normal vectors is within the one that is published."""
    rng = np.random.default_rng(seed)
    xs = [rng.standard_normal(100_003).astype(np.float32) for _ in range(comm.size)]
    exact = np.sum([x.astype(np.float64) for x in xs], axis=0)
    for name, bound in (("fp8", 0.037), ("int8", 0.01), ("int4", 0.17)):
        error = np.linalg.norm(comm.all_reduce(xs[comm.rank].copy(), compress=name) - exact) / np.linalg.norm(exact)
        assert error <= bound, f"{name}: {error}"
        assert comm.size == 1 or error > bound / 10, f"{name}: {error}, was it compressed?"


def feedback_keeps_what_is_lost(comm: Communicator, seed: int, name: str, dtype: Any) -> None:
    """The sum of what was sent, and the residual, are the sum of all vectors, up to rounding; infinities are not kept.

    Every backend computes the same bits.  A group of one, which compresses nothing, loses nothing.
    """
    if comm.size == 1:
        x, nothing = np.arange(5).astype(dtype), np.zeros(5, dtype)
        comm.feed_back(x, nothing, name)
        return assert_bits(x, np.arange(5).astype(dtype), "fed back")
    rng, form = np.random.default_rng(seed + comm.rank), FORMATS[name]
    residual, given, sent = np.zeros(1000, dtype), np.zeros(1000), np.zeros(1000)
    for _ in range(20):
        x = rng.standard_normal(1000).astype(dtype)
        given += x.astype(np.float64)
        y, kept = x.copy(), residual.copy()
        comm.feed_back(x, residual, name)
        on_host.feed_back(y, kept, name)
        assert_bits(x, y, "fed back")
        assert_bits(residual, kept, "residual")
        sent += _decoded(form, x)
    lost = np.linalg.norm(given - sent - residual.astype(np.float64)) / np.linalg.norm(given)
    assert lost < 20 * float(ml_dtypes.finfo(dtype).eps), f"{lost} of the sum"
    x[::7] = np.inf, np.nan, -np.inf, *x[21::7]
    largest = ml_dtypes.finfo(dtype).max
    x[1::7], residual[1::7] = largest, largest / dtype.type(64)
    y, kept = x.copy(), residual.copy()
    comm.feed_back(x, residual, name)
    on_host.feed_back(y, kept, name)
    assert_bits(residual, kept, "residual of the largest")
    assert (x[1::7] == largest).all(), "a finite number became infinite"
    assert np.isfinite(residual.astype(np.float32)).all() and not np.isfinite(x[:21:7].astype(np.float32)).any()


def _hostile(rng: np.random.Generator, count: int, dtype: Any) -> Any:
    """Normal numbers; blocks of zeros, with an outlier, of one sign, of tiny and huge ones, the largest; inf, NaN."""
    x = rng.standard_normal(count)
    largest = float(ml_dtypes.finfo(dtype).max)
    for start in range(0, count, 5 * BLOCK):
        x[start : start + 1] = rng.choice([1e4, -1e4, np.inf, -np.inf, np.nan, 0.0])
        x[start + BLOCK : start + 2 * BLOCK] *= rng.choice([0, 1e-7, 1e-40, 3e4])
        x[start + 2 * BLOCK : start + 3 * BLOCK] = abs(x[start + 2 * BLOCK : start + 3 * BLOCK])
        x[start + 3 * BLOCK : start + 3 * BLOCK + 2] = largest * rng.uniform(0.98, 1) * rng.choice([1, -1, 0.5])
    with np.errstate(over="ignore"):
        return x.astype(dtype)


def _decoded(form: Format, x: Any) -> Any:
    out = np.empty(x.size, np.float32)
    form.decode(form.encode(np.ascontiguousarray(x)), out)
    return out


def _added(form: Format, xs: Sequence[Any], op: ReduceOp = ReduceOp.SUM) -> Any:
    """The sum of what arrives, in rank order, in float32, rounded to the dtype."""
    total = _decoded(form, xs[0])
    with np.errstate(all="ignore"):
        for x in xs[1:]:
            total = total + _decoded(form, x)
        return (total / np.float32(len(xs)) if op is ReduceOp.AVG else total).astype(xs[0].dtype)


def _sum(form: Format, xs: Sequence[Any]) -> Any:
    return xs[0] if len(xs) == 1 else _added(form, xs)


def _reduced(form: Format, xs: Sequence[Any], op: ReduceOp) -> Any:
    """All_reduce: each rank's part is added, encoded again, and decoded everywhere."""
    if len(xs) == 1:
        return xs[0]
    part = -(-xs[0].size // (len(xs) * BLOCK)) * BLOCK
    parts = [_decoded(form, _added(form, [x[a : a + part] for x in xs], op)) for a in range(0, xs[0].size, part or 1)]
    with np.errstate(all="ignore"):
        return np.concatenate([np.empty(0, np.float32), *parts]).astype(xs[0].dtype)


def _moved(form: Format, xs: Sequence[Any]) -> Any:
    dtype = xs[0].dtype
    with np.errstate(all="ignore"):
        return np.concatenate([x if len(xs) == 1 else _decoded(form, x).astype(dtype) for x in xs])


def _compare(comm: Communicator, got: Any, expected: Any, what: str) -> None:
    """Equal bits; a NaN is any NaN."""
    numbers = ~np.isnan(expected.astype(np.float32))
    assert got.shape == expected.shape, f"{what}: {got.shape} instead of {expected.shape}"
    assert (np.isnan(got.astype(np.float32)) == ~numbers).all(), f"{what}: NaN elsewhere"
    assert_bits(got[numbers], expected[numbers], f"compressed {what}, {comm.size} ranks")
