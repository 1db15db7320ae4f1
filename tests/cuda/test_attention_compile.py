"""The attention kernels compile for every architecture, without a GPU."""

from __future__ import annotations

import pytest

from kos.cuda import kernels
from kos.cuda.kernels import compile_kernels
from kos.errors import BackendUnavailable, CompileError
from kos.train.ops.cuda import attention
from kos.train.ops.cuda.attention import KERNELS, macros
from tests.host_compiler import KEPT

try:
    kernels.nvrtc_version()
except BackendUnavailable as error:
    pytestmark = pytest.mark.skip(reason=str(error))

FORWARD, BACKWARD = [b"attention_forward"], [b"attention_backward_q", b"attention_backward_kv"]
ONE_PASS = [b"attention_backward", b"attention_finish"]
PORTABLE = [
    ("mma", "bfloat16", 128, FORWARD + BACKWARD),
    ("mma", "float16", 64, FORWARD + BACKWARD),
    ("simple", "float32", 48, FORWARD + BACKWARD),
    ("simple", "bfloat16", 256, FORWARD + BACKWARD),
    ("statistics", "bfloat16", 64, [b"attention_statistics", b"attention_bounds"]),
    ("mask", "bfloat16", 64, [b"attention_mask"]),
]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100"])
@pytest.mark.parametrize(("file", "dtype", "head_dim", "names"), PORTABLE)
def test_compiles_everywhere(
    arch: str, file: str, dtype: str, head_dim: int, names: list[bytes], causal: bool, masked: bool
) -> None:
    cubin = compile_kernels(KERNELS / f"attention_{file}.cu", arch, macros(dtype, head_dim, causal, masked), KEPT)
    assert all(b".text." + name in cubin for name in names)


@pytest.mark.parametrize(
    ("dtype", "stages", "masked"),
    [("bfloat16", 2, False), ("bfloat16", 3, False), ("float16", 2, False), ("bfloat16", 2, True)],
)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("file", "names"), [("forward_hopper", FORWARD), ("backward_hopper", ONE_PASS)])
def test_compiles_for_hopper(
    file: str, head_dim: int, names: list[bytes], dtype: str, stages: int, causal: bool, masked: bool
) -> None:
    tiles = attention.FORWARD if file == "forward_hopper" else attention.BACKWARD
    defines = {**macros(dtype, head_dim, causal, masked), **tiles, "STAGES": stages}
    cubin = compile_kernels(KERNELS / f"attention_{file}.cu", "sm_90a", defines, KEPT)
    assert all(b".text." + name in cubin for name in names)
    with pytest.raises(CompileError):  # these instructions are Hopper's alone
        compile_kernels(KERNELS / f"attention_{file}.cu", "sm_80", defines, KEPT)
