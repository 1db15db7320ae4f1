"""Matrices in 8 bits with scales for blocks or rows, on the host and on an emulated GPU."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kos.comm.gpu import devices
from kos.errors import InvalidArgument
from kos.memory import Array
from kos.transfer import BlockScales, Placement, Publisher, Subscriber, placements
from tests.train.host_kernels.ops import needs_compiler
from tests.transfer.publishing import held

SHAPE, FP8 = (300, 200), ml_dtypes.float8_e4m3fn
PLACED = {
    "whole": Placement.whole(SHAPE, "w"), "rows of a rank": Placement.shard(SHAPE, 0, 1, 2, "w"),
    "columns of a rank": Placement.shard(SHAPE, 1, 1, 2, "w"), "turned": Placement.whole(SHAPE, "w").transposed,
    "fused": Placement.joined([Placement.cut(SHAPE, 0, 256, 44, "w"), Placement.cut(SHAPE, 0, 0, 130, "w")]),
}  # fmt: skip
BLOCKS = {"blocks": (128, 128), "rows": (1, 1000), "odd": (70, 33)}
TRANSPORT_AND_STAGED = [("shared", True), ("tcp", True), ("shared", False), ("tcp", False)]
CASES = pytest.mark.parametrize(
    ("placed", "block", "transport", "staged"),
    [
        pytest.param(PLACED[placed], BLOCKS[block], *TRANSPORT_AND_STAGED[(i + j) % 4], id=f"{placed}-{block}")
        for i, placed in enumerate(PLACED) for j, block in enumerate(BLOCKS)
    ],
)  # fmt: skip
"""Each placement with each block; the transports, with and without staging memory, alternate from case to case."""


def tensor(version: int) -> np.ndarray:
    """With blocks of very different sizes, one of zeros, one with NaN and one with an infinity."""
    rng = np.random.default_rng(version)
    x = (rng.normal(size=SHAPE) * 10.0 ** rng.integers(-30, 5, (SHAPE[0], 1))).astype(np.float32)
    x[:128, :128], x[130, 3], x[299, 199] = 0, np.nan, -np.inf
    return x


def expect(matrix: np.ndarray, scales: np.ndarray, x: np.ndarray, block: tuple[int, int]) -> None:
    """Each block is scaled so that its largest element becomes 448, and rounded to the nearest number."""
    rounded = x.astype(ml_dtypes.bfloat16).astype(np.float32)
    for row, column in np.ndindex(*scales.shape):
        index = tuple(slice(at * n, (at + 1) * n) for at, n in zip((row, column), block, strict=True))
        part = rounded[index]
        largest = np.nanmax(np.abs(part))
        assert scales[row, column] == (largest / np.float32(448) if largest else 1)
        with np.errstate(invalid="ignore"):
            right = (part / scales[row, column]).astype(FP8)
        assert np.array_equal(matrix[index].astype(np.float32), right.astype(np.float32), equal_nan=True)
    good = np.isfinite(matrix.astype(np.float32))
    assert good.mean() > 0.7
    of_each = np.repeat(np.repeat(scales, block[0], axis=0)[: len(x)], block[1], axis=1)[:, : x.shape[1]]
    with np.errstate(invalid="ignore"):
        error = np.abs(matrix.astype(np.float32) * of_each - x)
    assert (error <= np.abs(x) * 0.07 + of_each * 2.0**-9)[good & np.isfinite(of_each)].all()


def check(
    placed: Placement, block: tuple[int, int], dtype: Any, transport: Any, staged: bool,
    on_device: Callable[[np.ndarray], Any] = lambda x: x,
) -> None:  # fmt: skip
    block = block[0], min(block[1], placed.shape[1])
    x = np.zeros(SHAPE, dtype)
    kept = BlockScales("q", block)
    matrix, scales = on_device(np.zeros(placed.shape, FP8)), on_device(np.zeros(kept.shape(placed.shape), np.float32))
    with Publisher(None, {"w": (x, Placement.whole(SHAPE))}) as publisher:
        arrays = {"scales": (scales, kept), "q": (matrix, placed)}
        with Subscriber(publisher.address, arrays, transport=transport, staged=staged) as subscriber:
            for version in (1, 2):
                x[...] = tensor(version)
                publisher.publish(version)
                update = subscriber.update(30, verify=version == 2 and transport == "tcp")
                right = held(placed, {"w": x.astype(np.float32)}).reshape(placed.shape)
                got = [each.numpy() if isinstance(each, Array) else each for each in (matrix, scales)]
                expect(*got, right, block)
                if transport == "tcp":
                    assert update.nbytes == 2 * placed.count  # as bfloat16


@CASES
def test_on_the_host(placed, block, transport, staged):
    check(placed, block, np.float32, transport, staged)


def test_many_rows_on_the_host(monkeypatch):
    """They are quantized in several parts."""
    monkeypatch.setattr("kos.transfer.scales.AT_ONCE", 1000)
    check(PLACED["whole"], (7, 64), ml_dtypes.bfloat16, "shared", True)


@needs_compiler
@CASES
def test_on_a_gpu(memory, placed, block, transport, staged):
    check(placed, block, np.float32, transport, staged, lambda x: Array.from_numpy(x, 0))


@needs_compiler
def test_a_gpu_without_8_bits_is_refused(memory, monkeypatch):
    """Before anything is read."""
    old = SimpleNamespace(compute_capability=(8, 0), name="an old GPU")
    monkeypatch.setattr(devices, "device_info", lambda device: old)
    arrays = {"q": (Array.zeros((4, 6), "float8_e4m3fn", 0), Placement.whole((4, 6))),
              "s": (Array.zeros((1, 1), np.float32, 0), BlockScales("q"))}  # fmt: skip
    with pytest.raises(InvalidArgument, match="q: expected a GPU of compute capability 8.9 for float8_e4m3fn, got an "):
        Subscriber("127.0.0.1:1", arrays)


def test_the_names_of_a_model():
    """``X_scale_inv`` beside X, unless the publisher has it: of blocks, or of rows if that is its shape."""
    shapes = {
        "l.qkv_proj.weight": (384, 256), "l.qkv_proj.weight_scale_inv": (3, 2), "l.o_proj.weight": (256, 128),
        "l.o_proj.weight_scale_inv": (256, 1), "l.down_proj.weight": (8, 8), "l.down_proj.weight_scale_inv": (1, 1),
    }  # fmt: skip
    tensors = {f"l.{name}.weight": (128, 256) for name in ("q_proj", "k_proj", "v_proj")} | {
        "l.o_proj.weight": (256, 128), "l.down_proj.weight": (8, 8), "l.down_proj.weight_scale_inv": (1, 1)
    }  # fmt: skip
    found = placements(shapes, tensors, "vllm")
    assert found["l.qkv_proj.weight_scale_inv"] == BlockScales("l.qkv_proj.weight", (128, 128))
    assert found["l.o_proj.weight_scale_inv"] == BlockScales("l.o_proj.weight", (1, 128))
    assert found["l.down_proj.weight_scale_inv"] == Placement.whole((1, 1), "l.down_proj.weight_scale_inv")
