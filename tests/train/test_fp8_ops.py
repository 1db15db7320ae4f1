"""The emulation of products in 8 bits, against the formats' own definitions and float64."""

import ml_dtypes
import numpy as np
import pytest

from kos.train.ops import Scaled, scales_shape
from kos.train.ops import numpy as ops
from kos.train.ops.fp8 import WEIGHTS, Quantized, fp8_weights
from tests.train.cpu_ops import arena
from tests.train.fp8_inputs import FORMATS, KINDS, matrix, nearest

__all__ = ["arena"]  # a fixture


def empty(shape, form, first=False, parts=1, one=False):
    """A copy in which every byte is 255."""
    scales = np.full(scales_shape(*shape, first, parts, one), np.nan, np.float32)
    return Scaled(np.full(shape, 255, np.uint8).view(getattr(ml_dtypes, form)), scales)


def same(a, b):
    return a.values.tobytes() == b.values.tobytes() and a.scales.tobytes() == b.scales.tobytes()


def quantized(x, form, arena):
    """``x`` as both copies have it in a format, widened, and the scale of each number."""
    rows, columns = empty(x.shape, form, first=True), empty(x.shape[::-1], form)
    ops.quantize(x, rows, columns, arena)
    assert rows.values.tobytes() == np.ascontiguousarray(columns.values.T).tobytes()
    for first in (True, False):
        for transposed, numbers in enumerate((x, x.T)):
            alone, again = empty(numbers.shape, form, first), empty(numbers.shape, form, first)
            ops.quantize(x, *((None, alone) if transposed else (alone, None)), arena)
            ops.quantize(numbers, again, None, arena)
            assert same(alone, again)
    along = -(-len(x) // 128)
    assert (columns.scales[:, along:] == 1).all()  # to a multiple of 4
    of_blocks = columns.scales[:, :along].T
    each = np.repeat(np.repeat(of_blocks, 128, 0), 128, 1)[: x.shape[0], : x.shape[1]]
    np.testing.assert_array_equal(rows.scales, np.repeat(of_blocks, 128, 0)[: len(x)].T)
    return rows.values.astype(np.float64), each.astype(np.float64), of_blocks


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(37, 29), (300, 140)])
def test_quantize(form, kind, shape, rng, arena):
    """Scales are powers of two, and with half of one its block's largest number would not fit; to nearest even."""
    x = matrix(kind, shape, rng)
    for order in ("C", "F"):
        got, scale, of_blocks = quantized(np.array(x, order=order), form, arena)
        assert (np.frexp(of_blocks)[0] == 0.5).all()
        for i, j in np.ndindex(*of_blocks.shape):
            block = x[128 * i : 128 * i + 128, 128 * j : 128 * j + 128]
            largest = float(np.abs(block).max())
            if largest == 0:
                assert of_blocks[i, j] == 1
            elif kind != "denormals":
                assert largest / of_blocks[i, j] <= FORMATS[form] < 2 * largest / of_blocks[i, j]
        np.testing.assert_array_equal(got, nearest(x / scale, form))


@pytest.mark.parametrize("kind", ["normal", "outliers", "spread", "zeros"])
def test_one_scale_for_all(kind, rng, arena):
    """The largest of those of the blocks; the products are of these numbers."""
    x, form = matrix(kind, (300, 140), rng), "float8_e4m3fn"
    of_blocks, whole = empty(x.shape, form, first=True), empty(x.shape, form, one=True)
    columns, product = empty(x.shape[::-1], form, one=True), np.full((300, 300), np.nan, np.float32)
    ops.quantize(x, of_blocks, None, arena)
    ops.quantize(x, whole, columns, arena)
    assert whole.scales == columns.scales == (of_blocks.scales.max() if kind != "zeros" else 1)
    wide = nearest(x / np.float64(whole.scales[0]), form)
    np.testing.assert_array_equal(whole.values.astype(np.float64), wide)
    np.testing.assert_array_equal(columns.values.T.astype(np.float64), wide)
    ops.scaled_product(whole, whole, product, None, None, arena, False)
    wide *= whole.scales[0]
    np.testing.assert_allclose(product, wide @ wide.T, rtol=1e-4, atol=1e-5 * np.abs(wide).max() ** 2)


def test_parts_have_their_own_scales(rng, arena):
    """Of rows that are multiplied apart, in memory of their own; the same numbers."""
    x = matrix("spread", (512, 140), rng)
    whole, parts = empty(x.shape, "float8_e5m2", first=True), empty(x.shape, "float8_e5m2", first=True, parts=2)
    for made in (whole, parts):
        ops.quantize(x, made, None, arena)
    assert parts.scales.shape == (2, 2, 256) and parts.values.tobytes() == whole.values.tobytes()
    quantized = Quantized(parts, None)
    for half in (slice(0, 256), slice(256, 512)):
        taken = quantized[half].rows
        np.testing.assert_array_equal(taken.scales, whole.scales[:, half])
        assert taken.values.tobytes() == whole.values[half].tobytes()


def test_what_is_not_bfloat16_is_rounded_to_it_first(rng, arena):
    x = rng.normal(size=(8, 8))
    exact = x.astype(ml_dtypes.bfloat16).astype(np.float32)
    for ours, theirs in zip(*(quantized(each, "float8_e4m3fn", arena) for each in (x, exact)), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf, 3.4e38])
def test_one_value_that_is_not_finite_is_in_all_results(value, rng, arena):
    """Of its block. One that bfloat16 rounds to infinity too."""
    x = np.float32(rng.normal(size=(256, 160)))
    x[130, 7] = value
    a, b, out = empty(x.shape, "float8_e4m3fn", first=True), empty((16, 160), "float8_e4m3fn"), np.zeros((256, 16))
    with np.errstate(all="ignore"):
        ops.quantize(x, a, None, arena)
        ops.quantize(np.ones((16, 160), np.float32), b, None, arena)
        ops.scaled_product(a, b, out, None, None, arena)
    assert np.isnan(a.scales[0, 128:]).all() and np.isfinite(a.scales[0, :128]).all() and np.isfinite(a.scales[1]).all()
    assert np.isnan(out[128:]).all() and np.isfinite(out[:128]).all()


@pytest.mark.parametrize("more", [(), ("bias",), ("residual",), ("bias", "residual"), ("out",)], ids=str)
def test_scaled_product(more, rng, arena):
    a, b = empty((19, 300), "float8_e5m2", first=True), empty((150, 300), "float8_e4m3fn")
    wide = []
    for x in (a, b):
        x.values[...] = rng.normal(size=x.values.shape)
        x.scales[...] = 2.0 ** rng.integers(-7, 5, x.scales.shape)
        n, k = np.indices(x.values.shape)
        each = x.scales[k // 128, n] if x is a else x.scales[n // 128, k // 128]
        wide.append(x.values.astype(np.float64) * each)
    out, bias, residual = (np.float32(rng.normal(size=shape)) for shape in ((19, 150), (150,), (19, 150)))
    expected = wide[0] @ wide[1].T
    expected += ("bias" in more) * bias + ("residual" in more) * residual + ("out" in more) * out
    results = []
    for rounded in (False, True):
        result = out.copy()
        added = result if "out" in more else residual if "residual" in more else None
        with_bias = bias if "bias" in more else None
        ops.scaled_product(a, b, result, added, with_bias, arena, rounded)
        results.append(result)
    magnitude = np.abs(wide[0]) @ np.abs(wide[1]).T + 1
    assert (np.abs(results[0] - expected) <= 1e-6 * magnitude).all()
    np.testing.assert_array_equal(results[1], results[0].astype(ml_dtypes.bfloat16).astype(np.float32))
    assert arena.in_use == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_product_is_that_of_the_numbers_it_is_given(kind, rng, arena):
    """Near the exact one, as far as quantizing both operands allows: half a unit in the last place of each number."""
    a, b = matrix(kind, (24, 40), rng), matrix("normal", (33, 40), rng)
    units, made = (2.0**-3, 2.0**-4), []
    for x, form, first in ((a, "float8_e5m2", True), (b, "float8_e4m3fn", False)):
        made.append(empty(x.shape, form, first))
        ops.quantize(x, made[-1], None, arena)
    out = np.full((24, 33), np.nan, np.float32)
    ops.scaled_product(*made, out, None, None, arena)
    exact, magnitude = a.astype(np.float64) @ b.T.astype(np.float64), np.abs(a).astype(np.float64) @ np.abs(b).T
    lost = float(made[0].scales[0, 0]) * 2.0**-16 * np.abs(b).sum(axis=1)  # of numbers near the end of the range
    assert (np.abs(out - exact) <= 1.01 * (units[0] + units[1] + units[0] * units[1]) * magnitude + lost + 1e-36).all()


def test_weights_are_quantized_once_for_a_step(rng, arena):
    """When they are first read; the next step reads the new ones, in the same memory."""
    weights = {name: np.float32(rng.normal(size=(16, 32))) for name in ("a", "b", "norm")}
    store = {name: Quantized.empty((16, 32), WEIGHTS, ops, np.zeros, np.zeros, name=name) for name in ("a", "b")}

    def widened(found):
        return found.rows.values.astype(np.float32) * found.rows.scales[0, 0]

    def near(found, weight):  # half a unit in the last place of 4 bits, or of the smallest numbers
        return (np.abs(widened(found) - weight) <= 0.066 * np.abs(weight) + found.rows.scales[0, 0] * 2.0**-10).all()

    first = fp8_weights(weights, store, ops, arena)
    assert list(first) == list(weights) and first["norm"] is weights["norm"] and first["a"] is store["a"]
    assert store["b"].rows.scales[0, 0] == 0 and near(first["a"], weights["a"])
    before = widened(first["a"])
    weights["a"] += 1
    np.testing.assert_array_equal(widened(first["a"]), before)
    following = fp8_weights(weights, store, ops, arena)
    assert near(following["a"], weights["a"])
    rows, columns = following["a"].rows.values, following["a"].columns.values
    np.testing.assert_array_equal(columns.view(np.uint8), rows.T.view(np.uint8))
