"""Matmuls whose sums are added part by part, on a Hopper GPU or on the host, where tensor cores are emulated."""

import ml_dtypes
import numpy as np
import pytest

from kos.dtypes import DTYPES
from kos.errors import InvalidArgument
from kos.memory.array import Array
from tests.host_compiler import needs_compiler
from tests.train.ops_cases import hopper_ops, on_hopper

CASES = [  # rows, columns, sizes of the members of a part, parts, transposed, dtype of the output
    (128, 128, (64,), 1, True, "bfloat16"), (200, 136, (128,), 2, True, "float32"),
    (72, 264, (64,), 4, True, "bfloat16"), (136, 200, (128, 64, 64), 2, False, "bfloat16"),
    (130, 128, (64, 64), 4, False, "float32"), (64, 72, (64,), 8, False, "bfloat16"),
    (128, 136, (64,), 8, True, "float32"), (300, 264, (64,), 8, True, "bfloat16"),
]  # fmt: skip
LARGE = [(5000, 2048, (256,), 8, True, "bfloat16"), (4096, 2048, (128, 64, 64), 8, False, "float32"),
         (4096, 2048, (128, 64, 64), 4, False, "bfloat16"), (8192, 768, (512, 512), 2, False, "bfloat16"),
         (8192, 2048, (1024,), 1, False, "float32")]  # fmt: skip


@pytest.fixture
def ops(request, monkeypatch):
    made = hopper_ops(request, monkeypatch, sequential=True, multiple=64)
    made.multiprocessors = 2  # blocks have several tiles, and outputs of one tile are computed part by part
    return made


def operands(rng, ops, case):
    rows, columns, sizes, parts, transposed, dtype = case
    inner = sum(sizes) * parts
    x, weight = (rng.standard_normal(shape).astype(ml_dtypes.bfloat16) for shape in ((rows, inner), (inner, columns)))
    starts = np.cumsum([0, *(size * parts for size in sizes)])
    spans = [[slice(at + i * size, at + (i + 1) * size) for at, size in zip(starts, sizes, strict=False)]
             for i in range(parts)]  # fmt: skip
    given = [Array.from_numpy(np.ascontiguousarray(each), 0, stream=ops.stream)
             for each in (x, weight.T if transposed else weight)]  # fmt: skip
    out = np.full((rows + 1, columns), np.nan, np.float32).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    return x.astype(np.float64), weight.astype(np.float64), spans, given, Array.from_numpy(out, 0, stream=ops.stream)


@on_hopper("case", CASES, LARGE)
def test_it_is_the_product_and_half_of_the_parts_has_the_bits_of_a_subtree(rng, ops, case):
    x64, weight64, parts, (x, weight), out = operands(rng, ops, case)
    rows, transposed, narrow = case[0], case[4], case[5] == "bfloat16"
    arena = ops.make_arena()
    assert ops.product_of_parts(x, weight, out[:rows], transposed, parts, arena)
    got = np.asarray(ops.to_host(out)).astype(np.float64)
    assert np.isnan(got[rows]).all(), "nothing is written behind the output"
    error = np.linalg.norm(got[:rows] - x64 @ weight64) / np.linalg.norm(x64 @ weight64)
    assert error < (2.0**-8 if narrow else 1e-6)
    if len(parts) == 1:
        return
    half, terms = len(parts) // 2, ops.zeros((2, rows, case[1]), "float32")
    for term, some in zip(terms, (parts[:half], parts[half:]), strict=True):
        assert ops.product_of_parts(x, weight, term, transposed, some, arena)
    one, other = np.asarray(ops.to_host(terms))
    whole = (one + other).astype(ml_dtypes.bfloat16 if narrow else np.float32)
    assert np.array_equal(whole.astype(np.float64), got[:rows])


@needs_compiler
def test_what_the_kernel_does_not_take_is_left_to_others(rng, ops):
    for case in ((128, 128, (96,), 2, True, "bfloat16"), (128, 12, (64,), 2, True, "bfloat16"),
                 (128, 128, (64, 64, 64, 64), 2, False, "bfloat16")):  # fmt: skip
        _, _, parts, (x, weight), out = operands(rng, ops, case)
        assert not ops.product_of_parts(x, weight, out[:128], case[4], parts, ops.make_arena()), case


def test_only_hopper_is_trusted_to_have_the_bits_of_parts(ops):
    """Other GPUs' algorithms may add up the terms of an element in several warps."""
    assert ops.bits_of_parts(DTYPES["bfloat16"]) and not ops.bits_of_parts(DTYPES["float32"])
    ops.hopper = False
    assert not ops.bits_of_parts(DTYPES["bfloat16"])


def weight_gradient(ops, d_out, x, some, outputs):
    """Of ``some`` columns of ``d_out``, which is a view of them if they are not all."""
    d_out, x = (Array.from_numpy(np.ascontiguousarray(each), 0, stream=ops.stream) for each in (d_out, x))
    mine = d_out if some == slice(0, d_out.shape[1]) else ops.columns_of(d_out, some)
    out = Array.from_numpy(np.full((some.stop - some.start, x.shape[1]), np.nan, np.float32), 0, stream=ops.stream)
    ops.linear_weight_gradient(mine, x, out, False, ops.make_arena(), outputs)
    return np.asarray(ops.to_host(out)).copy()


@on_hopper("case", [(16_384, 16, 8), (32_768, 8, 24)], [(32_768, 768, 768), (65_536, 768, 256), (16_384, 256, 8)])
def test_a_weight_gradient_over_many_tokens_is_a_sum_over_parts_of_them(request, rng, ops, case):
    tokens, rows, columns = case
    on_gpu = request.node.get_closest_marker("gpu")
    # Tensor cores truncate.  If they do so after every 16 products, a sum over the 8,192 tokens of a part has an error
    # of about 1.1e-5, and one sum over 16,384 tokens 2.4e-5.
    most = 2e-5 if on_gpu else 1e-5
    assert ops.parts_of_tokens(tokens, DTYPES["bfloat16"], rows * columns) == tokens // 8192
    d_out, x = (rng.standard_normal((tokens, size)).astype(ml_dtypes.bfloat16) for size in (rows, columns))
    expected = d_out.astype(np.float64).T @ x.astype(np.float64)
    whole = weight_gradient(ops, d_out, x, slice(0, rows), rows * columns)
    assert np.linalg.norm(whole - expected) < most * np.linalg.norm(expected)
    half = slice(rows // 2, rows)
    of_half = weight_gradient(ops, d_out, x, half, rows * columns)
    assert np.linalg.norm(of_half - expected[half]) < most * np.linalg.norm(expected[half])
    if on_gpu:  # where a product has the bits of its parts
        apart = weight_gradient(ops, d_out[:, half], x, slice(0, rows // 2), rows * columns)
        of_columns = weight_gradient(ops, d_out, x[:, : columns // 2], slice(0, rows), rows * columns)
        assert np.array_equal(of_half, whole[half]) and np.array_equal(apart, whole[half])
        assert np.array_equal(of_columns, whole[:, : columns // 2])


@needs_compiler
def test_columns_of_a_matrix_have_no_other_shape(ops):
    """They are not one run of memory: a view of another shape would be of other elements."""
    with pytest.raises(InvalidArgument, match="reshape: expected rows that follow one another"):
        ops.columns_of(ops.zeros((8, 16), "bfloat16"), slice(0, 8)).reshape(4, 16)


@needs_compiler
@pytest.mark.parametrize(
    ("tokens", "outputs", "dtype"), [(8192, 128, "bfloat16"), (16_384, 1 << 24, "bfloat16"), (16_384, 128, "float32")]
)
def test_a_weight_gradient_that_is_fast_as_one_sum_stays_one(ops, tokens, outputs, dtype):
    """Of few tokens, or of many outputs on all ranks; or no Hopper matmul in bfloat16 computes it."""
    assert ops.parts_of_tokens(tokens, DTYPES[dtype], outputs) == 1
