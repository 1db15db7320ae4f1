"""Matrices in 8 bits: quantized on GPUs, also emulated, to NumPy's bits; products and runs near NumPy's on a GPU."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kos import cuda
from kos.cuda.devices import device_info
from kos.dtypes import DTYPES
from kos.memory.arena import Arena
from kos.memory.array import Array
from kos.train.ops import Normalize, Scaled, scales_shape
from kos.train.ops import numpy as reference
from kos.train.ops.cuda import cublaslt
from kos.train.ops.cuda.fp8 import LEAST_CAPABILITY
from kos.train.ops.numpy_blocks import widen
from tests.host_compiler import needs_compiler
from tests.train.fp8_inputs import FORMATS, KINDS, matrix
from tests.train.host_kernels.emulator import HostOps, host_memory
from tests.train.ops_cases import on_gpu
from tests.train.test_engine_cuda import column, run, text

__all__ = ["text"]


def _missing() -> str | None:
    if why := cuda.unavailable():
        return why
    got = device_info(0).compute_capability
    return None if got >= LEAST_CAPABILITY else f"compute capability {got}, not {LEAST_CAPABILITY}"


ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(_missing() is not None, reason=f"needs a GPU: {_missing()}")]
on_gpus = pytest.mark.parametrize("ops", [pytest.param("gpu", marks=ON_GPU)], indirect=True)
on_devices = pytest.mark.parametrize(
    "ops", [pytest.param("gpu", marks=ON_GPU), pytest.param("host", marks=needs_compiler)], indirect=True
)

SHAPES = [(16, 16), (272, 144), (256, 128), (2048, 4096)]
PRODUCTS = [(16, 32, 48), (144, 272, 400), (256, 512, 1024), (512, 384, 8192)]


@pytest.fixture
def ops(request, monkeypatch):
    if request.param == "gpu":
        return on_gpu(0)
    host_memory(monkeypatch)
    return HostOps()


@pytest.fixture
def shapes(ops):
    return SHAPES[: 3 if isinstance(ops, HostOps) else 4]


@pytest.fixture
def arena(ops):
    return ops.make_arena()


def _put(ops: Any, x: np.ndarray, dtype: str) -> Array:
    return Array.from_numpy(np.ascontiguousarray(x.astype(DTYPES[dtype].numpy)), 0, stream=ops.stream)


def empty(
    ops: Any, shape: tuple[int, int], form: str, first: bool = False, parts: int = 1, one: bool = False
) -> Scaled:
    """A copy in which every byte is 255."""
    made = Scaled(ops.zeros(shape, form), ops.zeros(scales_shape(*shape, first, parts, one), "float32"))
    for array in made:
        array.fill_bytes(255, ops.stream)
    return made


def bits(ops: Any, made: Scaled | None) -> list[bytes] | None:
    return made and [ops.to_host(array).tobytes() for array in made]


COPIES = [((True, 1), (False, 1)), ((True, 1, True),) * 2, ((False, 1), (False, 1)), ((True, 2), (True, 1)),
          ((True, 1), None), (None, (False, 1)), (None, (True, 1)), (None, (True, 1, True))]  # fmt: skip
"""Of rows and of columns: whether they are a first operand, the parts, whether they have one scale."""


def kinds_of_copies(ops: Any, kind: str) -> list[Any]:
    """All of ``COPIES``; on an emulated GPU, which is slow, only the first two if ``kind`` is not "normal"."""
    return COPIES[: 2 if isinstance(ops, HostOps) and kind != "normal" else None]


def new_copies(ops: Any, shape: tuple[int, int], form: str, kinds: Any) -> list[Scaled | None]:
    """Copies of a matrix of that shape, by rows and by columns, of these kinds."""
    return [kind and empty(ops, of, form, *kind) for of, kind in zip((shape, shape[::-1]), kinds, strict=True)]


def check_alike(
    ops: Any, arena: Arena, copies: list[Any], x: Array, form: str, fused: Callable[..., None], *given: Any
) -> None:
    """``fused``, which quantizes ``x`` without writing it in 16 bits, gives the bits of ``quantize``."""
    for kinds in copies:
        expected, made = (new_copies(ops, x.shape, form, kinds) for _ in range(2))
        ops.quantize(x, *expected, arena)
        fused(*given, *made, arena)
        assert [bits(ops, each) for each in made] == [bits(ops, each) for each in expected], (form, kinds)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("kind", KINDS)
@on_devices
def test_quantize(ops, arena, rng, shapes, kind, form):
    """Both copies, and each alone, and their scales have the bits of the reference in NumPy."""
    for shape in shapes if kind == "normal" else shapes[1:2]:
        x = matrix(kind, shape, rng)
        given = _put(ops, x, "bfloat16")
        for kinds in kinds_of_copies(ops, kind):
            ours = new_copies(ops, shape, form, kinds)
            expected = [each and Scaled(*map(np.zeros_like, map(ops.to_host, each))) for each in ours]
            ops.quantize(given, *ours, arena)
            reference.quantize(x, *expected, Arena())
            for got, wanted, which in zip(ours, expected, ("rows", "columns"), strict=True):
                assert bits(ops, got) == (wanted and [array.tobytes() for array in wanted]), (which, kinds)


@pytest.mark.parametrize("kind", ["normal", "outliers", "zeros", "huge"])
@on_devices
def test_swiglu(ops, arena, rng, shapes, kind):
    copies = kinds_of_copies(ops, kind)
    for n, f in shapes if kind == "normal" else shapes[1:3]:  # one of both is quantized within the backward, too
        given, d = (_put(ops, matrix(*each, rng), "bfloat16") for each in ((kind, (n, 2 * f)), ("normal", (n, f))))
        out, d_gate_up = ops.zeros((n, f), "bfloat16"), ops.zeros((n, 2 * f), "bfloat16")
        ops.swiglu(given, out, arena)
        check_alike(ops, arena, copies, out, "float8_e4m3fn", ops.quantize_swiglu, given)
        if f % 128 == 0:
            ops.swiglu_backward(d, given, None, d_gate_up, arena)
            check_alike(ops, arena, copies, d_gate_up, "float8_e5m2", ops.quantize_swiglu_backward, d, given)


@pytest.mark.parametrize("kind", ["normal", "outliers", "zeros", "huge"])
@on_devices
def test_rms_norm(ops, arena, rng, shapes, kind):
    """The statistics have the same bits, too."""
    for n, f in shapes if kind == "normal" else shapes[1:2]:
        given, weight = (_put(ops, x, "bfloat16") for x in (matrix(kind, (n, f), rng), rng.normal(size=f)))
        norm, copies = Normalize(weight, 1e-5), kinds_of_copies(ops, kind)
        out, rstd, again = ops.zeros((n, f), "bfloat16"), ops.zeros((n,), "float32"), ops.zeros((n,), "float32")
        ops.normalize(given, norm, out, rstd)
        check_alike(ops, arena, copies, out, "float8_e4m3fn", ops.quantize_rms_norm, given, norm, again)
        assert ops.to_host(again).tobytes() == ops.to_host(rstd).tobytes()


@pytest.mark.parametrize("value", [np.nan, -np.inf, np.inf])
@on_devices
def test_one_value_that_is_not_finite(ops, arena, value):
    """The scale of its block is NaN; no other scale is."""
    for i, j in ((0, 0), (271, 143), (130, 70)):
        broken = np.ones((272, 144), np.float32)
        broken[i, j] = value
        rows = empty(ops, broken.shape, "float8_e4m3fn", first=True)
        ops.quantize(_put(ops, broken, "bfloat16"), rows, None, arena)
        expected = np.zeros(rows.scales.shape, bool)
        expected[j // 128, i // 128 * 128 : i // 128 * 128 + 128] = True
        np.testing.assert_array_equal(np.isnan(ops.to_host(rows.scales)), expected)


def _largest_of_32(x):
    """The largest magnitude of each 32 columns of a row."""
    padded = np.pad(np.abs(x.astype(np.float64)), ((0, 0), (0, -x.shape[1] % 32)))
    return padded.reshape(len(x), -1, 32).max(2)


@pytest.mark.parametrize(("m", "n", "k"), PRODUCTS)
@pytest.mark.parametrize("kind", ["normal", "outliers", "one sign", "zeros", "denormals"])
@pytest.mark.parametrize(("of_a", "out"), [
    ("float8_e4m3fn", "bfloat16"), ("float8_e5m2", "bfloat16"), ("float8_e5m2", "float32"),
])  # fmt: skip
@pytest.mark.parametrize("one", [False, True], ids=["blocks", "one"])
@on_gpus
def test_scaled_product(ops, arena, rng, m, n, k, kind, of_a, out, one):
    """Against float64 of the same 8-bit numbers, relative to the sums of magnitudes; alone, added to, with a bias."""
    a64, b64 = (matrix(each, shape, rng) for each, shape in ((kind, (m, k)), ("normal", (n, k))))
    operands = []
    for x, form, first in ((a64, of_a, True), (b64, "float8_e4m3fn", False)):
        operands.append(empty(ops, x.shape, form, first, one=one))
        ops.quantize(_put(ops, x, "bfloat16"), operands[-1], None, arena)
        widen(Scaled(*map(ops.to_host, operands[-1])), x)
    exact, magnitude = (x.astype(np.float64) @ y.astype(np.float64).T for x, y in ((a64, b64), map(np.abs, (a64, b64))))
    # Hopper aligns 32 products at a time to the exponent of the largest, and keeps 14 bits of each (DeepSeek-V3,
    # arXiv:2412.19437, 3.3.2): beside an outlier the others lose 2**-12 of it each.  Else 2**-13 of the magnitudes.
    unit, lost = (2.0**-8, 0.0) if out == "bfloat16" else (2.0**-13, 0.0)
    if kind == "outliers" and out == "float32":
        lost = 32 * 2.0**-12 * _largest_of_32(a64) @ _largest_of_32(b64).T
    result, more, bias = ops.zeros((m, n), out), rng.normal(size=(m, n)), rng.normal(size=n)
    added, of_bias = _put(ops, more, out), _put(ops, bias, out)
    cases = [(None, None, 0.0), (added, None, ops.to_host(added).astype(np.float64))]
    if out == "bfloat16":
        cases.append((added, of_bias, cases[1][2] + ops.to_host(of_bias).astype(np.float64)))
    for residual, with_bias, plus in cases:
        ops.scaled_product(*operands, result, residual, with_bias, arena)
        error = np.abs(ops.to_host(result).astype(np.float64) - exact - plus)
        assert (error <= unit * (magnitude + np.abs(plus) + np.abs(exact)) + lost + 1e-37).all()
    ops.copy(added, result)
    ops.scaled_product(*operands, result, result, None, arena)
    error = np.abs(ops.to_host(result).astype(np.float64) - exact - cases[1][2])
    assert (error <= unit * (magnitude + np.abs(cases[1][2]) + np.abs(exact)) + lost + 1e-37).all()


@on_gpus
def test_a_product_of_what_is_not_finite(ops, arena):
    x, out = np.ones((160, 144), np.float32), ops.zeros((160, 160), "bfloat16")
    x[3, 3] = np.inf
    operands = [empty(ops, x.shape, "float8_e4m3fn", first) for first in (True, False)]
    for values, made in zip((x, np.ones_like(x)), operands, strict=True):
        ops.quantize(_put(ops, values, "bfloat16"), made, None, arena)
    ops.scaled_product(*operands, out, None, None, arena)
    got = ops.to_host(out).astype(np.float32)
    assert np.isnan(got[:128]).all() and (got[128:] == 144).all()


@pytest.mark.gpu
def test_data_types_are_those_of_cuda():
    nvmath = pytest.importorskip("nvmath")
    names = {"float32": "R_32F", "bfloat16": "R_16BF", "float8_e4m3fn": "R_8F_E4M3", "float8_e5m2": "R_8F_E5M2"}
    assert {name: int(nvmath.CudaDataType[f"CUDA_{cuda}"]) for name, cuda in names.items()} == cublaslt._DATA_TYPES


# --- runs ------------------------------------------------------------------------------------------------

FP8 = ["--dtype", "fp8", "--lr", "1e-4"]  # faster, the losses of any two roundings part


class TestRuns:
    pytestmark = ON_GPU

    @pytest.mark.parametrize("head", [[], ["--fp8-head"]], ids=["layers", "head"])
    def test_losses_are_those_of_the_emulation(self, text, tmp_path, head):
        """Their mean; a single one, of 1,024 tokens, differs more: norms and attention are not in bfloat16 there."""
        for device in ("cuda", "cpu"):
            run(text, tmp_path / device, *FP8, *head, "--device", device)
        ours, emulated = (np.array(column(tmp_path / device)) for device in ("cuda", "cpu"))
        assert np.mean(ours) == pytest.approx(np.mean(emulated), rel=1e-3)
        np.testing.assert_allclose(ours, emulated, rtol=5e-3)
        norms = [column(tmp_path / device, "grad_norm") for device in ("cuda", "cpu")]
        np.testing.assert_allclose(*norms, rtol=0.05)

    def test_a_captured_step_has_the_bits_of_an_eager_one(self, text, tmp_path):
        """Recomputed and resumed, too."""
        run(text, tmp_path / "whole", *FP8)
        cases = {name: ["--recompute", name] for name in ("norms", "block")}
        cases |= {"eager": ["--no-graph"], "rest": ["--resume", tmp_path / "whole" / "checkpoints" / "step-10"]}
        for name, flags in cases.items():
            run(text, tmp_path / name, *FP8, *flags)
            losses = column(tmp_path / name)
            assert losses == column(tmp_path / "whole")[-len(losses) :], name

    def test_a_value_that_is_not_finite_is_named(self, text, tmp_path):
        error = "expected a finite "
        said = run(text, tmp_path, *FP8, "--lr", "1e30", "--min-lr", "1", error=error)
        assert " (first in the " in said and ".weight);" in said
