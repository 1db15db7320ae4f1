"""Each operation of the cuda dialect against the numpy one in float64, on odd and even shapes, on GPUs and emulated."""

from itertools import pairwise

import numpy as np
import pytest

from kos.memory.arena import Arena
from kos.train.ops import Normalize
from kos.train.ops import numpy as reference
from kos.train.ops.cuda import CudaOps, cublaslt
from kos.train.parallel.fixed_order import equal_parts
from tests.train.ops_cases import DTYPES, UNIT, Side, arena, columns, on_gpu, ops, side, sides, weight_gradients

__all__ = ["arena", "ops", "side"]


@sides("n vocabulary width", [(1, 3, 8), (23, 11, 7), (700, 65, 40), (5000, 3000, 24), (4099, 300_000, 8)],
       turns=[(1100, 1500, 7), (1100, 1500, 24)])
def test_embedding(ops, side, rng, arena, n, vocabulary, width):
    tokens = (vocabulary * rng.random(n) ** 3).astype(np.int32)  # low tokens are frequent
    table, table64 = side.put(rng.normal(size=(vocabulary, width)))
    out = side.nan(n, width)
    ops.embedding(side.ints(tokens), table, out)
    assert np.array_equal(side.get(out), table64[tokens])
    d_out, d_out64 = side.put(rng.normal(size=(n, width)))
    expected = np.full(table64.shape, np.nan)
    reference.embedding_backward(d_out64, tokens, expected, False, Arena())

    def backward(d, add):
        ops.embedding_backward(d_out, side.ints(tokens), d, add, arena)

    weight_gradients(side, rng, table64.shape, expected, backward, 40)


@sides("n", [(n,) for n in (1, 31, 32, 33, 1025, 4096)], [(n,) for n in (1, 32, 33, 1025)])
def test_embedding_of_one_token_only(ops, side, arena, n):
    """All rows in one run, over many blocks: each counts once."""
    d_out, _ = side.put(np.ones((n, 8)))
    d_table = side.nan(5, 8)
    ops.embedding_backward(d_out, side.ints(np.full(n, 3)), d_table, False, arena)
    got = side.get(d_table)
    assert not got[[0, 1, 2, 4]].any()
    np.testing.assert_allclose(got[3], n, rtol=UNIT[side.dtype])


@sides()
def test_embedding_of_a_token_outside_is_nan(ops, side):
    table, _ = side.put(np.ones((4, 8)))
    out = side.nan(3, 8)
    ops.embedding(side.ints([1, 4, -1]), table, out)
    got = side.get(out)
    assert (got[0] == 1).all() and np.isnan(got[1:]).all()


@sides("n bounds width", [(23, (0, 2, 11), 7), (1100, (0, 700, 701, 1500), 24), (4099, (0, 512, 300_000), 8)],
       turns=[(1100, (0, 512, 1403), 24), (1100, (0, 2, 11), 7)])
def test_embedding_of_parts(ops, side, rng, arena, n, bounds, width):
    """Each part has its own tokens' rows and their gradients, and zeros for those of all others."""
    tokens = rng.integers(0, bounds[-1], n).astype(np.int32)
    tokens[:8] = [*bounds[:-1], *(end - 1 for end in bounds[1:]), *range(8)][:8]
    _, table64 = side.put(rng.normal(size=(bounds[-1], width)))
    d_out, d_out64 = side.put(rng.normal(size=(n, width)))
    whole64 = np.full(table64.shape, np.nan)
    reference.embedding_backward(d_out64, tokens, whole64, False, Arena())
    whole = side.nan(*table64.shape, dtype="float32")
    ops.embedding_backward(d_out, side.ints(tokens), whole, False, arena)
    for first, end in pairwise(bounds):
        here, out = (first <= tokens) & (tokens < end), side.nan(n, width)
        ops.embedding(side.ints(tokens), side.put(table64[first:end])[0], out, first)
        assert np.array_equal(side.get(out), table64[tokens] * here[:, None])

        def backward(d, add, first=first):
            ops.embedding_backward(d_out, side.ints(tokens), d, add, arena, first)

        weight_gradients(side, rng, (end - first, width), whole64[first:end], backward, 40)
        part = side.nan(end - first, width, dtype="float32")
        backward(part, False)
        assert np.array_equal(side.get(part), side.get(whole)[first:end]), "the bits of the whole table"


@sides("n bounds padding", [(23, (0, 2, 11), 1), (1100, (0, 700, 1500), 3), (4099, (0, 512, 300_000), 299_999)],
       turns=[(1100, (0, 512, 1403), 3)])
def test_the_padding_token_has_no_gradient(ops, side, rng, arena, n, bounds, padding):
    """Neither in a whole table nor in its parts, which have the bits of the whole."""
    tokens = np.where(rng.random(n) < 0.3, padding, (bounds[-1] * rng.random(n) ** 3).astype(np.int32))
    d_out, d_out64 = side.put(rng.normal(size=(n, 8)))
    expected = np.full((bounds[-1], 8), np.nan)
    reference.embedding_backward(d_out64 * (tokens != padding)[:, None], tokens, expected, False, Arena())
    whole = side.nan(*expected.shape, dtype="float32")
    ops.embedding_backward(d_out, side.ints(tokens), whole, False, arena, None, padding)
    for first, end in ((None, bounds[-1]), *pairwise(bounds)):
        shape = (end - (first or 0), 8)

        def backward(d, add, first=first):
            ops.embedding_backward(d_out, side.ints(tokens), d, add, arena, first, padding)

        weight_gradients(side, rng, shape, expected[first:end], backward, 40)
        part = side.nan(*shape, dtype="float32")
        backward(part, False)
        assert np.array_equal(side.get(part), side.get(whole)[first:end]), "the bits of the whole table"


@sides("n d f", [
    (13, 5, 9), (64, 128, 72), (257, 96, 520), (1, 16, 8),
    (257, 683, 64), (33, 64, 12_565), (4096, 8, 264), (2048, 171, 1),  # parts of a layer: of any size
], [(13, 5, 9)])  # fmt: skip
def test_linear(ops, side, rng, arena, n, d, f):
    x, x64 = side.put(rng.normal(size=(n, d)))
    weight, weight64 = side.put(rng.normal(size=(f, d)))
    residual, residual64 = side.put(rng.normal(size=(n, f)))
    out = side.nan(n, f)
    ops.linear(x, weight, out)
    side.close(out, x64 @ weight64.T, 4)
    ops.linear(x, weight, out, residual)
    side.close(out, x64 @ weight64.T + residual64, 4)
    for _ in range(2):  # a plan is used again with another bias
        bias, bias64 = side.put(3 * rng.normal(size=f))
        ops.linear(x, weight, out, residual, bias)
        side.close(out, x64 @ weight64.T + residual64 + bias64, 4)
    d_out, d_out64 = side.put(rng.normal(size=(n, f)))
    dx = side.nan(n, d)

    def backward(d_weight, add):
        ops.linear_weight_gradient(d_out, x, d_weight, add, arena)

    # Sums in fp32 lose more the longer they are: tensor cores cut off what they add.
    weight_gradients(side, rng, (f, d), d_out64.T @ x64, backward, max(8, n / 100))
    ops.linear_input_gradient(d_out, weight, dx)
    side.close(dx, d_out64 @ weight64, max(4, f / 1000))


@sides("n f rank", [(13, 9, 3), (257, 512, 16), (1024, 683, 8)], turns=[(13, 9, 3), (57, 32, 16)])
def test_low_rank(ops, side, rng, arena, n, f, rank):
    """Products with an adapter's matrices, also of some columns and rows of what they read and add to."""
    x, x64 = side.put(rng.normal(size=(n, 2 * f)))
    weight, weight64 = side.put(rng.normal(size=(rank, f)))
    rows, part = slice(n // 3, n), slice(f, 2 * f)
    low = side.nan(n, rank)
    ops.low_rank(ops.columns_of(x, part)[rows], weight, low[rows], True, 0.25, False, arena)
    expected = 0.25 * x64[rows, part] @ weight64.T
    side.close(low[rows], expected, 4)
    expected = side.get(low[rows]) @ weight64
    out, out64 = side.put(rng.normal(size=(n, 2 * f)))
    ops.low_rank(low[rows], weight, ops.columns_of(out, part)[rows], False, 1.0, True, arena)
    got = side.get(out)
    np.testing.assert_allclose(got[rows, part], out64[rows, part] + expected, rtol=8 * UNIT[side.dtype],
                               atol=8 * UNIT[side.dtype] * np.abs(expected).max())  # fmt: skip
    got[rows, part] = out64[rows, part]
    assert np.array_equal(got, out64), "all other columns and rows are as they were"


@sides("count", [(1,), (2,), (8,), (32,)], [(2,), (8,), (16,)])
def test_add_tree(ops, side, rng, count):
    """Neighbours are added first, in float32, and the sum is rounded once to the dtype of the output."""
    values = rng.normal(size=(count, 13, 24)) * 10.0 ** rng.integers(-3, 4, (count, 1, 1))
    (terms, _), out = side.put(values, "float32"), side.nan(13, 24)
    expected = side.get(terms).astype(np.float32)
    while len(expected) > 1:
        expected = expected[::2] + expected[1::2]
    ops.add_tree(terms, out)
    assert np.array_equal(side.get(out), side.put(expected[0])[1])


@sides("rows columns parts", [(64, 768, 4), (33, 40, 8), (257, 50_304, 4)], [(33, 40, 8)])
def test_sums_of_columns_have_the_bits_of_an_array_of_their_own(ops, side, rng, arena, rows, columns, parts):
    x, x64 = side.put(rng.normal(size=(rows, columns)))
    targets = side.ints(rng.integers(0, columns, rows))
    for part in equal_parts(slice(0, columns), parts):
        own, found = side.put(x64[:, part])[0], list[np.ndarray]()
        for each in (ops.columns_of(x, part), own):
            sums, statistics = side.nan(own.shape[1], dtype="float32"), side.nan(3, rows, dtype="float32")
            ops.sum_rows(each, sums, False, arena)
            ops.logit_statistics(each, targets, part.start, statistics, arena)
            found.append(np.concatenate([side.get(sums), side.get(statistics).reshape(-1)]))
        assert np.array_equal(*found)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "inner", "columns", "parts"),
    [(4096, 768, 2304, 4), (4096, 768, 768, 4), (8192, 2048, 3072, 8), (1024, 2048, 32_768, 8), (8192, 2048, 8192, 2)],
)
def test_parts_of_a_product_have_the_bits_of_the_whole(rng, rows, inner, columns, parts):
    """Of each kind that a layer has, where no part cuts the sum: ``Ops.bits_of_parts``."""
    ops = CudaOps(0, multiple=256, sequential=True)
    side, arena = Side(ops, "bfloat16"), ops.make_arena()
    x, w, d = (side.put(rng.normal(size=shape))[0] for shape in ((rows, inner), (columns, inner), (rows, columns)))
    of, k_of = (equal_parts(slice(0, size), parts) for size in (columns, inner))

    def same(shape, dtype, whole, part, pieces):
        outs = [side.nan(*shape, dtype=dtype) for _ in range(2)]
        whole(outs[0])
        for each in pieces:
            part(each, outs[1])
        assert np.array_equal(*map(side.get, outs))

    pick, n_of = ops.columns_of, equal_parts(slice(0, rows), 2)
    same((rows, columns), "float32", lambda out: ops.linear(x, w, out),
         lambda n, out: ops.linear(x[n], w, out[n]), n_of)
    same((rows, inner), "bfloat16", lambda out: ops.linear_input_gradient(d, w, out),
         lambda n, out: ops.linear_input_gradient(d[n], w, out[n]), n_of)
    same((rows, columns), "bfloat16", lambda out: ops.linear(x, w, out),
         lambda f, out: ops.linear(x, w[f], pick(out, f)), of)
    same((rows, inner), "bfloat16", lambda out: ops.linear_input_gradient(d, w, out),
         lambda k, out: ops.linear_input_gradient(d, pick(w, k), pick(out, k)), k_of)
    same((columns, inner), "float32", lambda out: ops.linear_weight_gradient(d, x, out, False, arena),
         lambda f, out: ops.linear_weight_gradient(pick(d, f), x, out[f], False, arena), of)
    same((columns, inner), "float32", lambda out: ops.linear_weight_gradient(d, x, out, False, arena),
         lambda k, out: ops.linear_weight_gradient(d, pick(x, k), pick(out, k), False, arena), k_of)


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "d", "f"), [(16_384, 64, 72), (8192, 256, 128), (30_000, 40, 768), (8191, 341, 171)])
def test_bfloat16_products_are_rounded_once(rng, n, d, f, monkeypatch):
    """A weight's gradient by each algorithm that may be chosen: long sums, cut among blocks, add up in fp32."""
    side = Side(on_gpu(0), "bfloat16")
    (d_out, d_out64), (x, x64) = side.put(rng.normal(size=(n, f))), side.put(rng.normal(size=(n, d)))
    out = side.nan(f, d)
    for number in range(cublaslt.CANDIDATES):
        monkeypatch.setattr(cublaslt, "fastest", lambda runs, stream, number=number: number % len(runs))
        out.fill_bytes(255, side.ops.stream)
        cublaslt.Matmul(0, side.ops.stream, search=True)(d_out, x, out, transpose_a=True)
        side.close(out, d_out64.T @ x64, 0.47)  # normal numbers: 0.425, rounded more than once 0.5 or more


NORMED = [(1, 8), (13, 11), (67, 384), (300, 768), (5, 4096), (600, 4097), (9, 8192)]
NORM_SHAPES = [(*shape, centered) for shape in NORMED for centered in (False, True)]
NORM_SHAPES += [(1030, 2048, False), (3, 20_000, False), (1030, 1600, True)]


@sides("n d centered", NORM_SHAPES, slow=[(2, 5120, False), (2, 4104, True)],
       turns=[(26, 768, False), (13, 11, False), (13, 11, True), (26, 768, True)])
def test_norms(ops, side, rng, arena, n, d, centered):
    """RMSNorm, and LayerNorm, which is centered and has a bias."""
    x, x64 = side.put(2 * centered + rng.normal(size=(n, d)))
    (weight, weight64), (bias, bias64) = side.put(1 + rng.normal(size=d)), side.put(rng.normal(size=d))
    d_out, d_out64 = side.put(rng.normal(size=(n, d)))
    start, start64 = side.put(rng.normal(size=(n, d)))
    of_rows = (2, n) if centered else (n,)
    out, statistics, dx = side.nan(n, d), side.nan(*of_rows, dtype="float32"), side.nan(n, d)
    norm, norm64 = Normalize(weight, 0.1, *[bias] * centered), Normalize(weight64, 0.1, *[bias64] * centered)
    ops.normalize(x, norm, out, statistics)
    expected, statistics64 = np.full((n, d), np.nan), np.full(of_rows, np.nan)
    reference.normalize(x64, norm64, expected, statistics64)
    # The sum of d numbers around 2 rounds as each warp is added: the mean is off by 2.7 units (1 sigma, d = 4104), and
    # with it a whole row of the output.
    side.close(out, expected, 8 if centered else 4)
    side.close(statistics, statistics64, 8 if centered else 6, "float32")
    both64, dx64 = np.full((1 + centered, d), np.nan), start64.copy()
    reference.normalize_backward(
        d_out64.copy(), x64, norm64, statistics64, dx64, both64[0], False, Arena(), *both64[1:]
    )  # fmt: skip

    def backward(d_both, add):
        ops.copy(start, dx)
        of_bias = [d_both[1]] if centered else []
        ops.normalize_backward(d_out, x, norm, statistics, dx, d_both[0], add, arena, *of_bias)

    weight_gradients(side, rng, both64.shape, both64, backward, 16 if centered else 12)
    side.close(dx, dx64, 6 if centered else 4)


@sides("n heads others head_dim",
       [(1, 1, 0, 64), (37, 3, 2, 80), (515, 8, 3, 128), (9, 5, 1, 10), (9, 1, 0, 513), (1033, 1, 1, 4096)],
       turns=[(29, 3, 1, 64), (17, 2, 1, 80), (11, 5, 2, 128), (9, 4, 0, 10), (7, 1, 1, 600)])
def test_head_norm(ops, side, rng, arena, n, heads, others, head_dim):
    """Of heads after and before ``others``, which stay as they are; the heads that are kept are of fewer columns."""
    of, d = slice(others, others + heads), head_dim
    own = (slice(None), slice(others * d, (others + heads) * d))
    x, x64 = side.put(rng.normal(size=(n, (heads + 2 * others) * d)))
    weight, weight64 = side.put(1 + rng.normal(size=d))
    d_out, d_out64 = side.put(rng.normal(size=x64.shape))
    raw, dx = side.nan(n, (heads + others) * d), side.nan(*x64.shape)
    out64, raw64, dx64 = columns(x64.copy()), columns(np.full(raw.shape, np.nan)), columns(d_out64.copy())
    d_weight64 = np.full(d, np.nan)
    norm, norm64 = Normalize(weight, 0.1), Normalize(weight64, 0.1)
    ops.head_norm(x, norm, of, raw)
    reference.head_norm(out64, norm64, of, raw64)
    side.close(x, out64, 4)
    np.testing.assert_array_equal(side.get(raw), raw64)
    reference.head_norm_backward(raw64, norm64, of, dx64, d_weight64, False, Arena())

    def backward(d_weight, add):
        ops.copy(d_out, dx)
        ops.head_norm_backward(raw, norm, of, dx, d_weight, add, arena)

    weight_gradients(side, rng, (d,), d_weight64, backward, 12)
    side.close(dx, dx64, 4)
    for got, before in ((side.get(x), x64), (side.get(dx), d_out64)):
        got[own] = before[own]
        np.testing.assert_array_equal(got, before)


@sides("n d", [(1, 8), (13, 11), (100, 257), (4099, 768), (3, 70_000)], [(13, 11), (300, 520)])
def test_sum_rows(ops, side, rng, arena, n, d):
    x, x64 = side.put(rng.normal(size=(n, d)))
    weight_gradients(side, rng, (d,), x64.sum(0), lambda out, add: ops.sum_rows(x, out, add, arena), 16)


@sides("head_dim heads others length", [(6, 3, 1, 5), (64, 5, 2, 33), (128, 4, 1, 9)], [(6, 3, 1, 5), (64, 5, 2, 33)])
def test_rope(ops, side, rng, arena, head_dim, heads, others, length):
    x = rng.normal(size=(3 * length, (heads + others) * head_dim))
    frequencies = 10_000.0 ** (-np.arange(head_dim // 2) / head_dim)
    tables = ops.rope_tables(frequencies, range(length), None)
    tables64 = reference.rope_tables(frequencies, range(length), np.float64)
    for name in ("rope", "rope_backward"):
        array, array64 = side.put(x)
        array64 = columns(array64)
        getattr(ops, name)(array, tables, head_dim, heads, arena)
        getattr(reference, name)(array64, tables64, head_dim, heads, Arena())
        side.close(array, array64, 2)


@sides("n f", [(13, 7), (5, 2048), (200, 344)], [(13, 7), (20, 344)])
def test_swiglu(ops, side, rng, arena, n, f):
    gate_up, gate_up64 = side.put(3 * rng.normal(size=(n, 2 * f)))
    d_out, d_out64 = side.put(rng.normal(size=(n, f)))
    out, d_gate_up = side.nan(n, f), side.nan(n, 2 * f)
    ops.swiglu(gate_up, out, arena)
    ops.swiglu_backward(d_out, gate_up, out, d_gate_up, arena)
    out64, d_gate_up64 = columns(np.empty((n, f))), columns(np.empty((n, 2 * f)))
    reference.swiglu(columns(gate_up64), out64, Arena())
    reference.swiglu_backward(columns(d_out64), columns(gate_up64), out64, d_gate_up64, Arena())
    side.close(out, out64, 3)
    side.close(d_gate_up, d_gate_up64, 6)  # of few elements: one in 300 draws of 13 x 7 is beyond 3 in fp32


@sides("n f", [(13, 7), (200, 344)], [(13, 7)])
def test_gelu(ops, side, rng, arena, n, f):
    (x, x64), (d_out, d_out64) = side.put(2 * rng.normal(size=(n, f))), side.put(rng.normal(size=(n, f)))
    out, dx = side.nan(n, f), side.nan(n, f)
    ops.gelu(x, out, arena)
    ops.gelu_backward(d_out, x, dx, arena)
    out64, dx64 = columns(np.empty((n, f))), columns(np.empty((n, f)))
    reference.gelu(columns(x64), out64, Arena())
    reference.gelu_backward(columns(d_out64), columns(x64), dx64, Arena())
    side.close(out, out64, 3)
    side.close(dx, dx64, 20 if side.dtype == "float32" else 3)  # 2 u' multiplies what 1 - s has lost where s is near 1


@sides()
def test_gelu_stands_large_inputs(ops, side, arena):
    x, _ = side.put([[-1e4, -300.0], [300.0, 1e4]])
    ones, _ = side.put(np.ones((2, 2)))
    out, dx = side.nan(2, 2), side.nan(2, 2)
    ops.gelu(x, out, arena)
    ops.gelu_backward(ones, x, dx, arena)
    assert np.array_equal(side.get(out), [[0, 0], side.get(x)[1]])
    assert np.array_equal(side.get(dx), [[0, 0], [1, 1]])


@sides()
def test_swiglu_stands_large_gates(ops, side, arena):
    gate_up, _ = side.put([[-1e4, 2.0], [1e4, 2.0]])
    ones, _ = side.put([[1.0], [1.0]])
    out, d_gate_up = side.nan(2, 1), side.nan(2, 2)
    ops.swiglu(gate_up, out, arena)
    ops.swiglu_backward(ones, gate_up, out, d_gate_up, arena)
    large = side.get(gate_up)[1, 0]
    assert np.array_equal(side.get(out), [[0], [2 * large]])
    assert np.array_equal(side.get(d_gate_up), [[0, 0], [2, large]])


@sides("shape", *[[((5, 3),), ((64, 40),)]] * 2)
def test_small_things(ops, side, rng, shape):
    (a, a64), (b, b64) = side.put(rng.normal(size=shape)), side.put(rng.normal(size=shape))
    out = side.nan(*shape)
    ops.add(a, b, out)
    side.close(out, a64 + b64, 1)
    ops.copy(a, out)
    assert np.array_equal(side.get(out), a64)
    for dtype in DTYPES:
        other = side.nan(*shape, dtype=dtype)
        ops.cast(a, other)
        assert np.array_equal(side.get(other), side.put(a64, dtype)[1])
    ops.zero(out)
    assert not side.get(out).any()


def rms_norm(*given):
    test_norms(*given, False)


def layer_norm(*given):
    test_norms(*given, True)


def _few_widths(draw):
    """Kernels are compiled for each."""
    return draw(20, 90), (21, 32, 46, 60, 77, 88)[draw(0, 6)]


@sides("check shape", [
    (test_embedding, lambda draw: (draw(1, 5000), draw(2, 9000), draw(1, 300))),
    (test_linear, lambda draw: (draw(1, 130), draw(8, 130), draw(8, 130))),
    (rms_norm, lambda draw: (draw(8, 1500), draw(8, 5000))),
    (layer_norm, lambda draw: (draw(8, 1500), draw(8, 4100))),
    (test_sum_rows, lambda draw: (draw(8, 5000), draw(8, 2000))),
    (test_rope, lambda draw: (2 * draw(4, 128), draw(1, 20), draw(1, 6), draw(1, 200))),
    (test_swiglu, lambda draw: (draw(20, 400), draw(20, 3000))),
    (test_gelu, lambda draw: (draw(20, 400), draw(20, 3000))),
], turns=[(check, _few_widths) for check in (rms_norm, test_embedding, test_swiglu, test_gelu)],
   slow=[(layer_norm, _few_widths)])  # fmt: skip
def test_random_shapes(ops, side, rng, arena, check, shape):
    drawn = shape(lambda low, high: int(rng.integers(low, high)))
    if shape is _few_widths and check is test_embedding:
        drawn = (int(rng.integers(20, 90)), *drawn)
    print(drawn)
    check(ops, side, rng, arena, *drawn)


@sides()
def test_views_at_odd_addresses(ops, side, rng, arena):
    """Rows of an odd length start where wide accesses may not."""
    whole, whole64 = side.put(rng.normal(size=(9, 24)))
    flat, flat64 = whole.reshape(-1), whole64.reshape(-1)
    a, b, out = flat[1:97].reshape(4, 24), flat[97:193].reshape(4, 24), side.nan(4, 24)
    ops.add(a, b, out)
    side.close(out, (flat64[1:97] + flat64[97:193]).reshape(4, 24), 1)
    weight, weight64 = flat[3:27], flat64[3:27]
    rstd = side.nan(4, dtype="float32")
    ops.normalize(a, Normalize(weight, 0.1), out, rstd)
    expected, rstd64 = np.empty((4, 24)), np.empty(4)
    reference.normalize(flat64[1:97].reshape(4, 24), Normalize(weight64, 0.1), expected, rstd64)
    side.close(out, expected, 4)
    x, x64 = flat[1:25].reshape(3, 8), flat64[1:25].reshape(3, 8)
    product = side.nan(3, 3)
    ops.linear(x, flat[25:49].reshape(3, 8), product)
    side.close(product, x64 @ flat64[25:49].reshape(3, 8).T, 4)


@sides("count rows columns", [(1, 768, 768), (7, 768, 2048), (3, 2048, 768), (2, 37, 13), (1, 4096, 1024)],
       turns=[(2, 40, 24), (3, 13, 37)])
def test_orthogonalize(ops, side, rng, arena, count, rows, columns):
    """Matrices of any norm, several at once; what is left is in the dtype's rounding near float64's."""
    x, x64 = side.put(rng.normal(size=(count, rows, columns)) * 10.0 ** rng.integers(-3, 4, (count, 1, 1)))
    ops.orthogonalize(x, arena)
    reference.orthogonalize(x64, Arena())
    for ours, expected in zip(side.get(x), x64, strict=True):
        error = np.linalg.norm(ours - expected) / np.linalg.norm(expected)
        assert error < (1e-5 if side.dtype == "float32" else 0.03)
