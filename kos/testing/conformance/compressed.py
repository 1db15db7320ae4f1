"""Compressed operations: the bits that ``kos.comm.compression`` gives in rank order, and errors within its bounds."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from itertools import pairwise, product
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


def largest_errors(form: Format, x: Any, dtype: Any) -> tuple[Any, Any]:
    """The largest errors of magnitudes ``x`` (float64, whole blocks) that are sent once: before they are rounded to
    ``dtype``, and after it.  They are derived in ``kos.comm.compression``."""
    blocks = np.where(np.isfinite(x), x, 0).reshape(-1, BLOCK)
    largest, whole = blocks.max(1, keepdims=True), np.isfinite(x).reshape(-1, BLOCK).all(1, keepdims=True)
    if form.name == "fp8":
        error = blocks / 16 + np.maximum(largest * 2.0**-18, 2.0**-136)
    else:
        part = np.where(whole, 13, 11) if form.name == "int4" else 250
        smaller = (dtype == np.float16) & (form.name == "int8") & (largest > 65_000)
        error = np.maximum(largest / np.where(smaller, 134, part), 2.0**-127) + 0 * blocks
    error = error.reshape(-1)
    return error, error + rounding(blocks.reshape(-1) + error, dtype)


def rounding(x: Any, dtype: Any) -> Any:
    """The most that numbers of up to ``x``, of few digits, change if they are rounded to ``dtype``."""
    unit, least = {"float32": (0, 0), "float16": (2.0**-11, 2.0**-25), "bfloat16": (2.0**-8, 2.0**-134)}[dtype.name]
    return unit * x + least


def errors_are_within_the_bounds(comm: Communicator, seed: int, dtype: Any) -> None:
    """Of data that is sent once, of sums, and of sums that are sent again; on hostile values and tiny ones."""
    rng, n, me = np.random.default_rng(seed), comm.size, comm.rank
    for form, op in product(FORMATS.values(), (ReduceOp.SUM, ReduceOp.AVG)):
        xs = np.stack([near_the_bounds(rng, 6 * n, dtype) for _ in range(n)])
        wide, float32 = xs.astype(np.float64), 2.0**-24 * (n + 1)
        errors = [largest_errors(form, abs(x), dtype) for x in wide]
        with np.errstate(all="ignore"):
            exact, first = wide.sum(0), np.sum([error for error, _ in errors], 0)
            added = abs(wide).sum(0) + first
            near_maximum = np.isfinite(added) & (added > 0.99 * float(ml_dtypes.finfo(dtype).max))
            exact[near_maximum.reshape(-1, BLOCK).any(1).repeat(BLOCK)] = np.nan
            first += float32 * added
            if op is ReduceOp.AVG:
                exact, first = exact / n, first / n + 2.0**-149
            first += rounding(abs(exact) + first, dtype)
            again = first + largest_errors(form, abs(exact) + first, dtype)[1]
        part = slice(me * (exact.size // n), (me + 1) * (exact.size // n))
        moved = comm.all_gather(xs[me], compress=form.name)
        for rank in range(n):
            _check_errors(moved[rank], wide[rank], errors[rank][1], f"all_gather by {form.name}")
        got = comm.reduce_scatter(xs[me], op=op, compress=form.name)
        _check_errors(got, exact[part], first[part], f"reduce_scatter by {form.name}")
        got = comm.all_reduce(xs[me].copy(), op, compress=form.name)
        _check_errors(got, exact, again, f"all_reduce by {form.name}")


def _check_errors(got: Any, exact: Any, bound: Any, what: str) -> None:
    """Where the result is sure to be finite."""
    sure = np.isfinite(exact) & (abs(exact) + bound < float(ml_dtypes.finfo(got.dtype).max))
    ratio = abs(got[sure].astype(np.float64) - exact[sure]) / bound[sure]
    assert (ratio <= 1).all(), f"{what} of {got.dtype}: an error of {ratio.max()} times the bound"


def near_the_bounds(rng: np.random.Generator, blocks: int, dtype: Any) -> Any:
    """Blocks of the dtype whose errors are near the bounds, of every size and with special values."""
    info = ml_dtypes.finfo(dtype)
    low, high = (np.log2(float(x)) for x in (info.smallest_subnormal, info.max))
    largest = 2.0 ** rng.uniform(low, high, (6, blocks, 1))
    x = rng.uniform(-1, 1, (6, blocks, BLOCK)) * largest
    levels = rng.choice([6, 7, 126, 127], (blocks, 1))
    x[1] = (rng.integers(-levels, levels, (blocks, BLOCK)) + 0.5) * largest[1] / levels  # between two codes
    x[2] = 2.0 ** rng.integers(-18, 0, (blocks, BLOCK)) * (1 + rng.integers(0, 17, (blocks, BLOCK)) / 16) * largest[2]
    x[3] = rng.choice([1, 3, 100], (blocks, 1)) * rng.integers(-3, 4, (blocks, BLOCK)) * float(info.smallest_subnormal)
    x[4] = float(info.max) * rng.uniform(0.9, 1, (blocks, BLOCK))
    x[5] = np.exp(rng.normal(-14, 3, (blocks, BLOCK)))  # in float16 mostly subnormal
    x[0, 0], x[1:3, :, :1] = 1e-38, largest[1:3]
    x = np.clip(x, -float(info.max), float(info.max))
    x[:, ::4, 1] = rng.choice([np.inf, -np.inf, np.nan, 0], x[:, ::4, 1].shape)
    with np.errstate(all="ignore"):
        return x.astype(dtype).reshape(-1)


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
