"""Flash attention on a GPU: which kernel, with what tiles, for which shape.

Three families of kernels compute the same function (``kos/train/kernels/attention_*.cu``): ``hopper`` (wgmma and
TMA, sm_90a), ``mma`` (tensor cores of every GPU since Ampere) and ``simple`` (any dtype, any head size up to 256:
fp32 checks).  The first two take bfloat16 and float16 and head sizes 64 and 128.

Nothing is allocated and nothing waits, so both calls can be captured in a CUDA graph; scratch memory of the
backward comes from the arena.  No sum depends on the order in which blocks run: equal inputs, equal bits.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from kos.cuda.devices import device_info
from kos.cuda.kernels import Define
from kos.errors import InvalidArgument
from kos.memory.arena import Arena
from kos.memory.array import Array

KERNELS = Path(__file__).parent / "kernels"
FAMILIES = ("hopper", "mma", "simple")
_TENSOR_CORE_HEAD_DIMS = (64, 128)
_PAD = 128  # tokens: PAD of attention.cuh
_BLOCK = 128  # rows that a block of threads owns
_ALIGNMENT = 1024  # bytes: what a swizzled tile starts on
_CACHED = 24 << 20  # bytes of keys and values (or queries) in use at once: half of an H200's L2

# Macros of the Hopper kernels, by head size: the fastest of those tried.
Tiles = dict[str, Define]
_FORWARD: dict[int, Tiles] = {
    64: {"KEYS": 128, "STAGES": 2, "CONSUMERS": 2},
    128: {"KEYS": 128, "STAGES": 2, "CONSUMERS": 2},
}
_BACKWARD: dict[int, Tiles] = {64: {"STAGES": 2}, 128: {"STAGES": 2}}


def attention(
    qkv: Array,
    heads: int,
    kv_heads: int,
    out: Array,
    log_sum_exp: Array,
    launch: Callable[..., None],
    *,
    family: str | None = None,
    tiles: Tiles | None = None,
) -> None:
    """Causal attention, scores scaled by 1 / sqrt(d); query head h reads kv head h // (H / K).

    ``qkv`` (N, W), W = (H + 2K) d: the heads of q, then k, then v.  ``out`` (N, H d).  ``log_sum_exp`` (B, H, T),
    fp32, of the scaled scores, is kept for the backward.  ``launch`` is that of CudaOps; ``family`` and ``tiles`` are
    for measurements.
    """
    samples, length, head_dim = check(qkv, heads, kv_heads, out, log_sum_exp)
    family = family or family_for(qkv.device, qkv.dtype.name, head_dim)
    size, defines = (samples, length, heads, kv_heads), macros(qkv.dtype.name, head_dim)
    if family == "simple":
        rows = _rows(samples * length * heads)
        launch("attention_simple.cu", "attention_forward", rows, 256, qkv, out, log_sum_exp, *size, **defines)
        return
    tiles = _FORWARD[head_dim] | (tiles or {}) if family == "hopper" else tiles or {}
    keys, row = int(tiles.get("KEYS", 64)), head_dim * 2
    rows = 64 * int(tiles.get("CONSUMERS", 2))
    grid = samples * heads * -(-length // rows)
    section = _section(samples * heads, heads // kv_heads, length, head_dim)
    if family == "mma":
        launch(
            "attention_mma.cu", "attention_forward", grid, 256, qkv, out, log_sum_exp, *size, section,
            shared=(_BLOCK + 4 * keys) * row, **defines, **tiles,
        )  # fmt: skip
        return
    shared = (2 * rows + 2 * int(tiles["STAGES"]) * keys) * row + _ALIGNMENT + 256
    maps = (_map(qkv, samples, length), _map(out, samples, length))
    staying = min(grid, device_info(qkv.device).multiprocessors)
    launch(
        "attention_forward_hopper.cu", "attention_forward", staying, 128 + 2 * rows, *maps, log_sum_exp, *size, section,
        shared=shared, **defines, **tiles,
    )  # fmt: skip


def attention_backward(
    d_out: Array,
    qkv: Array,
    out: Array,
    log_sum_exp: Array,
    heads: int,
    kv_heads: int,
    d_qkv: Array,
    arena: Arena,
    launch: Callable[..., None],
    *,
    family: str | None = None,
    tiles: Tiles | None = None,
) -> None:
    """d_qkv (N, W) from d_out (N, H d) and what the forward read and wrote.

    Takes ``take_scratch`` from ``arena``, whose arrays are of ``kos.memory.array``: 3 B H T floats (none in the simple
    family) and on Hopper B H T d integers, where blocks add up dQ, and B K T / 64 floats more; T rounded up to 128.
    """
    samples, length, head_dim = check(qkv, heads, kv_heads, out, log_sum_exp)
    expect("d_out", d_out, out.shape, out.dtype)
    expect("d_qkv", d_qkv, qkv.shape, qkv.dtype)
    family = family or family_for(qkv.device, qkv.dtype.name, head_dim)
    size, defines = (samples, length, heads, kv_heads), macros(qkv.dtype.name, head_dim)
    if family == "simple":
        arguments = (qkv, d_out, out, log_sum_exp, d_qkv, *size)
        for name, of in (("attention_backward_q", heads), ("attention_backward_kv", kv_heads)):
            launch("attention_simple.cu", name, _rows(samples * length * of), 256, *arguments, **defines)
        return
    padded, row = -(-length // _PAD) * _PAD, head_dim * 2
    blocks, group = -(-length // _BLOCK), heads // kv_heads
    section_kv = _section(samples * kv_heads, 1, length, head_dim * group)
    threads = samples * padded * heads * (head_dim // 8)
    with arena.scope():
        statistics, bounds, sums = take_scratch(log_sum_exp, kv_heads, head_dim, family, arena)
        if bounds is not None:
            launch(
                "attention_statistics.cu", "attention_bounds", bounds.size // 2, 256, qkv, bounds, length, heads,
                kv_heads, **defines,
            )  # fmt: skip
        scratch = (statistics, *(0 if x is None else x for x in (bounds, sums)))
        launch(
            "attention_statistics.cu", "attention_statistics", -(-threads // 256), 256, d_out, out, log_sum_exp,
            *scratch, *size, **defines,
        )  # fmt: skip
        if sums is not None:
            defines |= _BACKWARD[head_dim] | (tiles or {})
            step, turns = 8192 // head_dim, 3 if head_dim == 128 else 2  # STEP and TURNS
            own, slopes = 2 * _BLOCK * row, turns * _BLOCK * step * 2
            shared = own + int(defines["STAGES"]) * step * (2 * row + 12) + slopes + _ALIGNMENT + 256
            maps = tuple(_map(x, samples, length) for x in (qkv, d_out, d_qkv))
            launch(
                "attention_backward_hopper.cu", "attention_backward", samples * kv_heads * blocks, 384,
                *maps, statistics, sums, *size, section_kv, shared=shared, **defines,
            )  # fmt: skip
            launch(
                "attention_backward_hopper.cu", "attention_finish", sums.size // 4096, 256,
                sums, statistics, d_qkv, length, heads, qkv.shape[1], **defines,
            )  # fmt: skip
            return
        defines |= tiles or {}
        section_q = _section(samples * heads, group, length, head_dim)
        operands = (qkv, d_out, d_qkv, statistics, *size)
        shared = (2 * _BLOCK + 4 * (64 if head_dim == 64 else 32)) * row
        for name, of, section in (
            ("attention_backward_kv", kv_heads, section_kv), ("attention_backward_q", heads, section_q),
        ):  # fmt: skip
            launch("attention_mma.cu", name, samples * of * blocks, 256, *operands, section, shared=shared, **defines)


def take_scratch(
    log_sum_exp: Array, kv_heads: int, head_dim: int, family: str, arena: Arena
) -> tuple[Array, Array | None, Array | None]:
    """What the backward takes: statistics, and where dQ is added up in integers, bounds of keys and values and dQ."""
    samples, heads, length = log_sum_exp.shape
    padded = -(-length // _PAD) * _PAD
    statistics = arena.take((3 * samples * heads * padded,), np.float32)
    if family != "hopper":
        return statistics, None, None
    bounds = arena.take((2 * samples * kv_heads * padded // _PAD,), np.float32)
    return statistics, bounds, arena.take((samples * heads * padded * head_dim,), np.int32)


@functools.cache
def family_for(device: int, dtype: str, head_dim: int) -> str:
    """The fastest of FAMILIES that takes this dtype and head size on this GPU."""
    info = device_info(device)
    if dtype == "float32" or head_dim not in _TENSOR_CORE_HEAD_DIMS or info.compute_capability < (8, 0):
        return "simple"
    return "hopper" if info.arch == "sm_90a" else "mma"


def expect(name: str, array: Array, shape: tuple[int, ...], dtype: Any) -> None:
    if (array.shape, str(array.dtype)) != (shape, str(dtype)):
        raise InvalidArgument(f"attention: expected {name} {dtype}{shape}, got {array.dtype}{array.shape}")


def check(qkv: Array, heads: int, kv_heads: int, out: Array, log_sum_exp: Array) -> tuple[int, int, int]:
    """B, T and d, of operands that fit together."""
    if kv_heads < 1 or heads % kv_heads:
        raise InvalidArgument(f"attention: expected heads to be a multiple of kv_heads, got {heads} and {kv_heads}")
    if qkv.dtype.name not in ("bfloat16", "float16", "float32"):
        raise InvalidArgument(f"attention: expected bfloat16, float16 or float32, got {qkv.dtype}")
    if len(log_sum_exp.shape) != 3 or log_sum_exp.shape[1] != heads:
        raise InvalidArgument(f"attention: expected log_sum_exp (B, {heads}, T), got {log_sum_exp.shape}")
    samples, _, length = log_sum_exp.shape
    head_dim, rest = divmod(qkv.shape[-1], heads + 2 * kv_heads)
    if rest or not 1 <= head_dim <= 256:
        raise InvalidArgument(
            f"attention: expected {heads + 2 * kv_heads} heads of 1 to 256 elements in qkv, got {qkv.shape[-1]}"
        )
    tokens = samples * length
    expect("qkv", qkv, (tokens, (heads + 2 * kv_heads) * head_dim), qkv.dtype)
    expect("out", out, (tokens, heads * head_dim), qkv.dtype)
    expect("log_sum_exp", log_sum_exp, log_sum_exp.shape, "float32")
    return samples, length, head_dim


def _rows(count: int) -> int:
    """Blocks of ``attention_simple.cu``: a warp a row, 8 warps a block."""
    return -(-count // 8)


def _section(heads: int, group: int, length: int, head_dim: int) -> int:
    """How many heads to work on at once: whole groups, whose other side fits the cache."""
    groups = max(1, _CACHED // (4 * length * head_dim))
    return min(heads, group * groups)


def macros(dtype: str, head_dim: int) -> dict[str, Define]:
    """What every file of kernels needs to be told."""
    return {"DTYPE": dtype, "HEAD_DIM": head_dim, "SCALE": f"{1 / math.sqrt(head_dim):.9e}f"}


class _Words:
    """Device memory as (B, T, columns) 16-bit words, for the tensor map: it only moves them."""

    def __init__(self, pointer: int, shape: tuple[int, int, int]) -> None:
        self.__cuda_array_interface__ = {
            "shape": shape, "typestr": "<u2", "data": (pointer, False), "strides": None, "version": 3,
        }  # fmt: skip


def _map(array: Array, samples: int, length: int) -> Any:
    return _tensor_map(array.pointer, samples, length, array.shape[-1])


@functools.lru_cache(maxsize=1024)
def _tensor_map(pointer: int, samples: int, length: int, columns: int) -> Any:
    """A TMA descriptor for boxes of 64 tokens and 64 columns.

    Tokens beyond a sample's end are read as zeros and not written.
    """
    from cuda.core._tensor_map import TensorMapL2Promotion, TensorMapSwizzle
    from cuda.core.utils import StridedMemoryView

    words = StridedMemoryView.from_cuda_array_interface(_Words(pointer, (samples, length, columns)), -1)
    return words.as_tensor_map(
        (1, 64, 64), swizzle=TensorMapSwizzle.SWIZZLE_128B, l2_promotion=TensorMapL2Promotion.L2_256B
    )
