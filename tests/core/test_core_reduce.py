"""Reductions of the compiled core: the bits of ``kos.comm.reduction`` for every dtype and operation, on every path."""

import random
import warnings
from typing import Any

import numpy as np
import pytest

from kos.comm.reduction import ReduceOp, resolve
from kos.dtypes import DTYPES
from kos.errors import InvalidArgument
from tests.core.core_ranks import groups, needs_core, together
from tests.core.group import OPS

pytestmark = needs_core
Array = np.ndarray[Any, Any]
OPERATIONS = {op: ReduceOp[op.upper()] for op in OPS}


def allowed(dtype: str, op: str) -> bool:
    try:
        resolve(OPERATIONS[op], DTYPES[dtype], 2)
    except InvalidArgument:
        return False
    return True


def random_bits(rng: np.random.Generator, dtype: str, count: int) -> Array:
    """Every kind of number: NaNs, infinities, zeros of both signs, subnormals; half of them are moderate."""
    kind = DTYPES[dtype].numpy
    if dtype == "bool":
        return rng.choice([0, 1, 2, 255], count).astype(np.uint8).view(kind)
    wild = np.frombuffer(rng.bytes(count * kind.itemsize), kind).copy()
    if DTYPES[dtype].kind in ("int", "uint"):
        return wild
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tame = (rng.standard_normal(count) * 2.0 ** rng.integers(-12, 12, count)).astype(kind)
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan], np.float64).astype(kind)
    return np.where(rng.random(count) < 0.4, wild, np.where(rng.random(count) < 0.9, tame, rng.choice(special, count)))


def reduced(arrays: list[Array], dtype: str, op: str, size: int) -> Array:
    """The reduction of the arrays in order, as the Python of kos computes it."""
    reduction = resolve(OPERATIONS[op], DTYPES[dtype], size)
    total = reduction.stage(arrays[0], None)
    for x in arrays[1:]:
        reduction.combine(total, reduction.stage(x, None))
    out = np.empty_like(arrays[0])
    reduction.finish(total, out)
    return out


def bits(x: Array, op: str) -> bytes:
    """The bits; NaNs of sums and products are all the same, because their payload depends on the order of operands."""
    if x.dtype.kind in "biu" or op in ("min", "max"):
        return x.tobytes()
    parts = x.view(x.real.dtype) if x.dtype.kind == "c" else x
    return np.where(np.isnan(parts), np.array(1, parts.dtype), parts).tobytes() + np.isnan(parts).tobytes()


CASES = [(dtype, op) for dtype in DTYPES for op in OPS if allowed(dtype, op)]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_fuzz_of_starts():
    """4,000 calls of random operations, dtypes, sizes and alignments, in place or not."""
    seed = random.randrange(1 << 20)
    print(f"seed {seed}")
    rng, draw = np.random.default_rng(seed), random.Random(seed)
    for size, calls in ((1, 200), (2, 2000), (3, 1000), (4, 800)):
        with groups(size) as made:
            for _ in range(calls):
                one_call(made, rng, draw)


def placed(x: Array, draw: random.Random) -> tuple[Array, Array]:
    """A copy of the array somewhere in memory, aligned to its dtype, and all of that memory."""
    whole = np.full(x.nbytes + 160, 0xA5, np.uint8)
    to_line = -whole.ctypes.data % 64
    at = to_line + draw.randrange(0, 64, max(x.dtype.alignment, x.itemsize if x.dtype.kind != "c" else x.itemsize // 2))
    inner = whole[at : at + x.nbytes].view(x.dtype)
    inner[...] = x
    return inner, whole


def one_call(made: list[Any], rng: np.random.Generator, draw: random.Random) -> None:
    size = len(made)
    dtype, op = draw.choice(CASES)
    operation = draw.choice(("all_reduce", "reduce", "reduce_scatter", "scan", "exscan"))
    count = draw.randrange(draw.choice((20, 20, 300, 300, 6000)))
    root, in_place = draw.randrange(size), draw.random() < 0.5 and operation not in ("reduce_scatter",)
    total = count * size if operation == "reduce_scatter" else count
    inputs = [random_bits(rng, dtype, total) for _ in range(size)]
    alike = dict.fromkeys(range(size), inputs)
    if operation == "scan":
        alike = {rank: inputs[: rank + 1] for rank in range(size)}
    elif operation == "exscan":
        alike = {rank: inputs[:rank] for rank in range(1, size)}
    elif operation == "reduce":
        alike = {root: inputs}
    x = [placed(each, draw) for each in inputs]
    out = x if in_place else [placed(np.zeros(count, each.dtype), draw) for each in inputs]
    arrays = [(x[rank][0], out[rank][0]) if rank in alike else (x[rank][0], None) for rank in range(size)]
    together([g.prepare(operation, dtype, count, op=op, root=root) for g in made], arrays)
    for rank, terms in alike.items():
        expected = reduced(terms, dtype, op, size)
        if operation == "reduce_scatter":
            expected = expected[rank * count : (rank + 1) * count]
        said = f"{operation} of {dtype}[{count}] by {op}, {size} ranks, root {root}, in place {in_place}"
        assert bits(out[rank][0], op) == bits(expected, op), f"{said}: rank {rank}"
        if operation == "all_reduce":
            assert out[rank][0].tobytes() == out[0][0].tobytes(), f"{said}: ranks 0 and {rank} differ"
        around = out[rank][1].copy()
        at = out[rank][0].ctypes.data - out[rank][1].ctypes.data
        around[at : at + out[rank][0].nbytes] = 0xA5
        assert (around == 0xA5).all(), f"{said}: rank {rank} wrote beside its array"
