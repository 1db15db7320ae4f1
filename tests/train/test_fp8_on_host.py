"""The kernels of ``test_fp8_cuda.py`` on machines without a GPU, where their threads run as fibers."""

from __future__ import annotations

import numpy as np
import pytest

from kos.train.ops.cuda import cublaslt
from tests.train import test_fp8_cuda as on_gpus
from tests.train.fp8_inputs import FORMATS, KINDS, matrix
from tests.train.host_kernels.ops import arena, needs_compiler, ops

__all__ = ["arena", "ops"]


@needs_compiler
class TestKernels:
    @pytest.mark.parametrize("form", FORMATS)
    @pytest.mark.parametrize("kind", KINDS)
    def test_quantize(self, ops, arena, rng, kind, form):
        for shape in on_gpus.SHAPES[: 3 if kind == "normal" else 2]:
            on_gpus.check_quantize(ops, arena, matrix(kind, shape, rng), form)

    @pytest.mark.parametrize("kind", ["normal", "outliers", "zeros", "huge"])
    def test_swiglu(self, ops, arena, rng, kind):
        for n, f in on_gpus.SHAPES[1:3]:
            on_gpus.check_swiglu(ops, arena, matrix(kind, (n, 2 * f), rng), matrix("normal", (n, f), rng))

    @pytest.mark.parametrize("kind", ["normal", "outliers", "zeros", "huge"])
    def test_rms_norm(self, ops, arena, rng, kind):
        for n, f in on_gpus.SHAPES[:3]:
            on_gpus.check_rms_norm(ops, arena, matrix(kind, (n, f), rng), rng.normal(size=f))

    @pytest.mark.parametrize("value", [np.nan, -np.inf, np.inf])
    def test_one_value_that_is_not_finite(self, ops, arena, value):
        on_gpus.check_not_finite(ops, arena, value)

    def test_what_is_refused(self, ops, arena):
        on_gpus.test_what_is_refused(ops, arena)


def test_data_types_are_those_of_cuda():
    nvmath = pytest.importorskip("nvmath")
    names = {"float32": "R_32F", "bfloat16": "R_16BF", "float8_e4m3fn": "R_8F_E4M3", "float8_e5m2": "R_8F_E5M2"}
    assert {name: int(nvmath.CudaDataType[f"CUDA_{cuda}"]) for name, cuda in names.items()} == cublaslt._DATA_TYPES
