"""The errors of compressed operations are within the bounds of ``kos.comm.compression``."""

from itertools import product
from typing import Any

import ml_dtypes
import numpy as np

from kos.comm import Communicator, ReduceOp
from kos.comm.compression import BLOCK, FORMATS, Format
from kos.testing.conformance.values import near_the_bounds

FLOAT32_MAX = float(np.finfo(np.float32).max)


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
    """Of data that is sent once, of sums, and of sums that are sent again; on hostile values and tiny ones.

    Between hosts, the sums of hosts are sent, which are rounded to the dtype.
    """
    rng, n, me, local = np.random.default_rng(seed), comm.size, comm.rank, comm.exact_group_size()
    for form, op in product(FORMATS.values(), (ReduceOp.SUM, ReduceOp.AVG)):
        xs = np.stack([near_the_bounds(rng, 6 * n, dtype) for _ in range(n)])
        wide, float32 = xs.astype(np.float64), 2.0**-24 * (n + 1)
        errors = [largest_errors(form, abs(x), dtype) for x in wide]
        with np.errstate(all="ignore"):
            sums, before, in_host = wide, 0 * wide, abs(wide)
            if local > 1:
                ranks, part = wide.reshape(n // local, local, -1), local if op is ReduceOp.AVG else 1
                in_host = abs(ranks).sum(1)  # in float32, where it may become inf although the average would not
                sums, before = ranks.sum(1) / part, float32 * in_host / part + 2.0**-149
                before += rounding(abs(sums) + before, dtype)
            sent = abs(sums) + before
            exact, first = sums.sum(0), before.sum(0) + sum(largest_errors(form, x, dtype)[0] for x in sent)
            added = sent.sum(0) + first
            near_maximum = (added > 0.99 * float(ml_dtypes.finfo(dtype).max)) | (in_host > 0.99 * FLOAT32_MAX).any(0)
            near_maximum &= np.isfinite(added)
            exact[near_maximum.reshape(-1, BLOCK).any(1).repeat(BLOCK)] = np.nan
            first += float32 * added
            if op is ReduceOp.AVG:
                exact, first = exact / len(sums), first / len(sums) + 2.0**-149
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


def compressed_sums_are_near(comm: Communicator, seed: int) -> None:
    """The relative error of a sum of normal vectors is within the one that is published."""
    rng = np.random.default_rng(seed)
    xs = [rng.standard_normal(100_003).astype(np.float32) for _ in range(comm.size)]
    exact = np.sum([x.astype(np.float64) for x in xs], axis=0)
    for name, bound in (("fp8", 0.037), ("int8", 0.01), ("int4", 0.17)):
        error = np.linalg.norm(comm.all_reduce(xs[comm.rank].copy(), compress=name) - exact) / np.linalg.norm(exact)
        assert error <= bound, f"{name}: {error}"
        assert comm.size == 1 or error > bound / 10, f"{name}: {error}, was it compressed?"
