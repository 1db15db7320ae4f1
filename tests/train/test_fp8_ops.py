"""The emulation of products in 8 bits, against the formats' own definitions and float64."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from kos.errors import ConfigError
from kos.memory.arena import Arena
from kos.train.config.options import TrainConfig
from kos.train.layers.fp8 import FORWARD, Fp8Weights, Quantized, check_sizes, first_of
from kos.train.ops import numpy as ops
from tests.train.fp8_inputs import FORMATS, KINDS, matrix, nearest
from tests.train.test_ops import poisoned_slab


@pytest.fixture
def arena():
    return Arena(0, poisoned_slab)


def quantized(x, form, arena):
    """``x`` as both copies have it in a format, widened, and the scale."""
    dtype, scale = np.dtype(getattr(ml_dtypes, form)), np.full(1, np.nan, np.float32)
    rows, columns = (np.full(shape, 255, np.uint8).view(dtype) for shape in (x.shape, x.shape[::-1]))
    ops.quantize(x, rows, columns, scale, arena)
    assert rows.tobytes() == np.ascontiguousarray(columns.T).tobytes()
    alone = np.empty_like(columns), np.empty_like(scale)
    ops.quantize(x, None, *alone, arena)
    assert alone[0].tobytes() == columns.tobytes() and alone[1] == scale
    return rows.astype(np.float64), float(scale[0])


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("kind", KINDS)
def test_quantize(form, kind, rng, arena):
    """A scale that is a power of two, and with half of it the largest number would not fit; rounded to nearest even."""
    x = matrix(kind, (37, 29), rng)
    for order in ("C", "F"):
        got, scale = quantized(np.array(x, order=order), form, arena)
        assert np.frexp(scale)[0] == 0.5
        largest = float(np.abs(x).max())
        if largest == 0:
            assert scale == 1
        elif kind != "denormals":
            assert largest / scale <= FORMATS[form] < 2 * largest / scale
        np.testing.assert_array_equal(got, nearest(x / np.float64(scale), form))


def test_what_is_not_bfloat16_is_rounded_to_it_first(rng, arena):
    x = rng.normal(size=(8, 8))
    exact = x.astype(ml_dtypes.bfloat16).astype(np.float32)
    for ours, theirs in zip(*(quantized(each, "float8_e4m3fn", arena) for each in (x, exact)), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf, 3.4e38])
def test_one_value_that_is_not_finite_is_in_all_results(value, rng, arena):
    """One that bfloat16 rounds to infinity too."""
    x = np.float32(rng.normal(size=(16, 32)))
    x[3, 7] = value
    dtype, scales = np.dtype(ml_dtypes.float8_e4m3fn), np.ones((2, 1), np.float32)
    a, out = np.zeros((16, 32), dtype), np.zeros((16, 16), np.float32)
    with np.errstate(all="ignore"):
        ops.quantize(x, a, None, scales[0], arena)
        ops.scaled_product(a, scales[0], np.ones((16, 32), dtype), scales[1], out, None, None, arena)
    assert np.isnan(scales[0]) and np.isnan(out).all()


@pytest.mark.parametrize("more", [(), ("bias",), ("residual",), ("bias", "residual"), ("out",)], ids=str)
def test_scaled_product(more, rng, arena):
    a = rng.normal(size=(19, 40)).astype(ml_dtypes.float8_e5m2)
    b = rng.normal(size=(23, 40)).astype(ml_dtypes.float8_e4m3fn)
    scales = np.array([[2.0**-7], [2.0**5]], np.float32)
    out, bias, residual = (np.float32(rng.normal(size=shape)) for shape in ((19, 23), (23,), (19, 23)))
    expected = a.astype(np.float64) @ b.astype(np.float64).T / 4
    expected += ("bias" in more) * bias + ("residual" in more) * residual + ("out" in more) * out
    results = []
    for rounded in (False, True):
        result = out.copy()
        added = result if "out" in more else residual if "residual" in more else None
        with_bias = bias if "bias" in more else None
        ops.scaled_product(a, scales[0], b, scales[1], result, added, with_bias, arena, rounded)
        results.append(result)
    np.testing.assert_allclose(results[0], expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(results[1], results[0].astype(ml_dtypes.bfloat16).astype(np.float32))
    assert arena.in_use == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_product_is_that_of_the_numbers_it_is_given(kind, rng, arena):
    """Near the exact one, as far as quantizing both operands allows: half a unit in the last place of each number."""
    a, b = matrix(kind, (24, 40), rng), matrix("normal", (33, 40), rng)
    forms, units = ("float8_e5m2", "float8_e4m3fn"), (2.0**-3, 2.0**-4)
    made = []
    for x, form in zip((a, b), forms, strict=True):
        rows, scale = np.empty(x.shape, getattr(ml_dtypes, form)), np.empty(1, np.float32)
        ops.quantize(x, rows, None, scale, arena)
        made.append((rows, scale))
    out = np.full((24, 33), np.nan, np.float32)
    ops.scaled_product(*made[0], *made[1], out, None, None, arena)
    exact, magnitude = a.astype(np.float64) @ b.T.astype(np.float64), np.abs(a).astype(np.float64) @ np.abs(b).T
    lost = float(made[0][1][0]) * 2.0**-16 * np.abs(b).sum(axis=1)  # of numbers near the end of the range
    assert (np.abs(out - exact) <= 1.01 * (units[0] + units[1] + units[0] * units[1]) * magnitude + lost + 1e-36).all()


@pytest.mark.parametrize("shape", [(11, 14)])
def test_swiglu_in_8_bits(shape, rng, arena):
    """The bits of its output, and of its gradient, quantized."""
    n, f = shape[0], shape[1] // 2
    gate_up, d_out = (np.asfortranarray(rng.normal(size=(n, columns)), np.float32) for columns in (2 * f, f))
    out, d_gate_up = (np.asfortranarray(np.empty((n, columns), np.float32)) for columns in (f, 2 * f))
    ops.swiglu(gate_up, out, arena)
    ops.swiglu_backward(d_out, gate_up, out, d_gate_up, arena)
    for x, write in (
        (out, lambda *made: ops.quantize_swiglu(gate_up, *made, arena)),
        (d_gate_up, lambda *made: ops.quantize_swiglu_backward(d_out, gate_up, *made, arena)),
    ):
        both = []
        for each in (lambda *made, x=x: ops.quantize(x, *made, arena), write):
            made = [np.zeros(size, ml_dtypes.float8_e4m3fn) for size in (x.shape, x.shape[::-1])]
            each(*made, scale := np.zeros(1, np.float32))
            both.append([*(array.tobytes() for array in made), scale[0]])
        assert both[0] == both[1]


def test_swiglu_backward_without_the_output(rng, arena):
    def columns(n):
        return np.asfortranarray(rng.normal(size=(11, n)))

    gate_up, d_out, out = columns(14), columns(7), columns(7)
    ops.swiglu(gate_up, out, arena)
    with_it, without = (np.asfortranarray(np.full((11, 14), np.nan)) for _ in range(2))
    ops.swiglu_backward(d_out, gate_up, out, with_it, arena)
    ops.swiglu_backward(d_out, gate_up, None, without, arena)
    np.testing.assert_array_equal(with_it, without)


def test_weights_are_quantized_once_for_a_step(rng, arena):
    """When they are first read; the next step reads the new ones, in the same memory."""
    weights = {name: np.float32(rng.normal(size=(16, 32))) for name in ("a", "b", "norm")}
    store = {
        name: Quantized(np.zeros((16, 32), FORWARD), np.zeros((32, 16), FORWARD), np.zeros(1, np.float32), name=name)
        for name in ("a", "b")
    }

    def widened(found):
        return found.rows.astype(np.float32) * found.scale

    def near(found, weight):  # half a unit in the last place of 4 bits, or of the smallest numbers
        return (np.abs(widened(found) - weight) <= 0.066 * np.abs(weight) + found.scale * 2.0**-10).all()

    first = Fp8Weights(weights, store, ops, arena)
    assert list(first) == list(weights) and first["norm"] is weights["norm"] and first["a"] is store["a"]
    assert store["b"].scale == 0 and near(first["a"], weights["a"])
    before = widened(first["a"])
    weights["a"] += 1
    np.testing.assert_array_equal(widened(first["a"]), before)
    following = Fp8Weights(weights, store, ops, arena)
    assert near(following["a"], weights["a"])
    np.testing.assert_array_equal(following["a"].columns.view(np.uint8), following["a"].rows.T.view(np.uint8))


def test_sizes_that_cublaslt_does_not_take():
    model = TrainConfig.from_preset("tiny", model={"intermediate_size": 344}).model_config_for(256)
    layers = model.layers([1])
    check_sizes(layers[0:0], 1, {"tokens": 32})
    with pytest.raises(ConfigError, match="expected tokens to be a multiple of 16, got 40"):
        check_sizes(layers, 1, {"tokens": 40})
    with pytest.raises(ConfigError, match=r"the columns of model.layers.1.mlp.down_proj.weight to be .* 16, got 344"):
        check_sizes(layers, 1, {"tokens": 32})


def test_the_first_of_all_ranks():
    """In the order of a step: forward, then backward."""
    layers = TrainConfig.from_preset("tiny").model_config_for(256).layers(range(3))
    qkv, down = "model.layers.{}.self_attn.qkv_proj.weight", "model.layers.{}.mlp.down_proj.weight"
    d = "the gradient of the output of "
    assert first_of(["", d + qkv.format(1), f"the input of {down.format(2)}", ""], layers).endswith(down.format(2))
    assert first_of([d + qkv.format(1), d + down.format(1), d + down.format(0)], layers) == d + down.format(1)
    found = first_of([f"the weights of {down.format(0)}", f"the input of {qkv.format(0)}"], layers)
    assert found == f"the input of {qkv.format(0)}"
    assert first_of(["", ""], layers) is None
