"""Flash attention on a GPU: which kernel, with what tiles, for which shape.

Causal, within a rank's tokens; or of some of them to all others that another rank has sent.  A ``Mask`` in device
memory restricts both to documents and a sliding window, and one CUDA graph serves all batches.  Kernels are compiled
with the macro MASKED then, and skip the blocks of keys that no query of a block sees, and those of queries.

Three sets of kernels compute the same function (``kernels/attention_*.cu``): ``hopper`` (wgmma and TMA, sm_90a),
``mma`` (tensor cores of every GPU since Ampere) and ``simple`` (any dtype: fp32 checks).  ``kernel_set`` chooses one,
and ``unsupported`` says what a set does not compute.

Nothing is allocated and nothing waits, so both calls can be captured in a CUDA graph; scratch memory of the
backward comes from the arena.  No sum depends on the order in which blocks run: equal inputs, equal bits.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kos.cuda.devices import device_info
from kos.cuda.kernels import Define
from kos.errors import InvalidArgument
from kos.memory.arena import Arena
from kos.memory.array import Array
from kos.train.ops import Attend, Mask

KERNELS = Path(__file__).parent / "kernels"
KERNEL_SETS = ("hopper", "mma", "simple")  # the fastest first
_MULTIPLE = 16  # of head sizes: the inner dimension of a tensor core instruction
MOST_HEAD_DIM = {"hopper": 128, "mma": 256, "simple": 256}
CHUNK = 128  # keys of a block of cache.cu
_PAD = 128  # tokens: PAD of attention.cuh
_BLOCK = 128  # rows that a block of threads owns, on Hopper
_ALIGNMENT = 1024  # bytes: what a swizzled tile starts on
_CACHED = 24 << 20  # bytes of keys and values (or queries) in use at once: half of an H200's L2

_LONG = 16384  # tokens from which a tile of queries takes so long that the work before and after it is negligible

# These are the macros of the Hopper kernels. They were the fastest of those tried for head sizes 64 and 128.
FORWARD = {"KEYS": 128, "STAGES": 2, "CONSUMERS": 2}
BACKWARD = {"STAGES": 2}
# These are the macros of the mma kernels. kos uses the first ones that fit into registers and shared memory
# (``mma_tiles``). With a STEP of 64, only heads of up to 64 elements fit into the registers.
MMA = [dict(zip(("WARPS", "KEYS", "STEP"), each, strict=True))
       for each in ((8, 64, 64), (8, 64, 32), (8, 32, 16), (4, 32, 16))]  # fmt: skip


@dataclass(frozen=True)
class _Task:
    """What the kernels of a call have in common: sizes, and the arguments and macros that say which keys are seen."""

    length: int  # of a sample
    head_dim: int
    queries: slice
    keys: slice
    kernels: str  # of KERNEL_SETS
    size: tuple[int, int, int, int]  # of which queries there are: samples, T, H, K
    others: tuple[int, ...]  # without causality: where the keys are, their number, and ``length``
    mask: tuple[int, ...]
    defines: dict[str, Define]

    @classmethod
    def of(cls, attend: Attend, fastest: str) -> _Task:
        """InvalidArgument if no kernels from ``fastest`` on compute this attention."""
        (samples, _, length), head_dim, mask = attend.log_sum_exp.shape, attend.head_dim, attend.mask
        others, bounds, kernels = tuple[int, ...](), tuple[int, ...](), kernel_set(attend, fastest)
        queries = keys = slice(0, length)
        if attend.kv is not None:
            queries, keys = attend.queries, attend.keys
            others = (_row(attend.kv, keys), keys.stop - keys.start, length)
        if mask is not None:
            mask.check(samples, length)
            firsts, lasts = mask.first_key.pointer + 4 * queries.start, mask.last_query.pointer + 4 * keys.start
            bounds = (firsts, lasts, queries.start, keys.start)
        size = (samples, queries.stop - queries.start, attend.heads, attend.kv_heads)
        return cls(length, head_dim, queries, keys, kernels, size, others, bounds, macros_of(attend))

    @property
    def key_count(self) -> int:
        return self.keys.stop - self.keys.start

    def statistics(self, attend: Attend) -> int:
        """The address of those of the first query."""
        return attend.log_sum_exp.pointer + 4 * self.queries.start

    def tokens(self, array: Array, tokens: slice) -> Tokens:
        return Tokens(array, self.size[0], self.length, tokens, self.head_dim)


def attention_mask(
    document_starts: Array | None, window: int | None, mask: Mask, positions: Array | None,
    key_positions: Array | None, ops: Any,
) -> None:  # fmt: skip
    """``Ops.attention_mask``."""
    mask.check_sources(document_starts, window, positions, key_positions)
    (samples, queries), keys = mask.first_key.shape, mask.last_query.shape[1]
    key_positions = positions if key_positions is None else key_positions
    operands = (0 if x is None else x for x in (document_starts, positions, key_positions))
    grid = (-(-max(queries, keys) // 256), samples)
    ops.launch(
        "attention_mask.cu", "attention_mask", grid, 256, *operands, mask.first_key, mask.last_query, queries, keys,
        window or 0,
    )  # fmt: skip


def attention(attend: Attend, ops: Any) -> None:
    """``Ops.attention``. ``ops`` is a CudaOps."""
    task, qkv, out, kv = _Task.of(attend, ops.attention_kernels), attend.qkv, attend.out, attend.kv
    samples, T, heads, kv_heads = size = task.size
    head_dim, seen, defines = task.head_dim, task.key_count, task.defines
    (q, merged), lse = (_row(x, task.queries) for x in (qkv, out)), task.statistics(attend)
    if task.kernels == "simple":
        operands = (q, merged, lse, *size, *task.others, *task.mask)
        ops.launch("attention_simple.cu", "attention_forward", _rows(samples * T * heads), 256, *operands, **defines)
        return
    section = _section(samples * heads, heads // kv_heads, seen, head_dim)
    if task.kernels == "mma":
        tiles, (shared, _) = mma_tiles(head_dim, ops.shared_memory)
        rows = 16 * tiles["WARPS"]
        ops.launch(
            "attention_mma.cu", "attention_forward", samples * heads * -(-T // rows), 2 * rows, q, merged, lse, *size,
            section, *task.others, *task.mask, shared=shared, **defines, **tiles,
        )  # fmt: skip
        return
    row, rows = _padded_dim(head_dim) * 2, 64 * FORWARD["CONSUMERS"]
    grid = samples * heads * -(-T // rows)
    shared = (2 * rows + 2 * FORWARD["STAGES"] * FORWARD["KEYS"]) * row + _ALIGNMENT + 256
    other = task.tokens(out, task.queries) if kv is None else task.tokens(kv, task.keys)
    # A block that stays for many tiles loads the next while it finishes the last. For long tiles that gains nothing,
    # and a multiprocessor that is still busy with communication would delay all of its tiles.
    staying = min(grid, ops.multiprocessors) if kv is not None or seen < _LONG else grid
    if kv is not None:  # tiles of equal work: a multiprocessor that would shorten nothing is left to communication
        staying = -(-grid // -(-grid // staying))
    more = (merged, *task.others[1:]) if kv is not None else ()
    ops.launch(
        "attention_forward_hopper.cu", "attention_forward", staying, 128 + 2 * rows, task.tokens(qkv, task.queries),
        other, lse, *size, section, *more, *task.mask, shared=shared, **defines, **FORWARD,
    )  # fmt: skip


def attention_backward(
    attend: Attend, d_out: Array, d_qkv: Array, arena: Arena, ops: Any, d_kv: Array | None = None
) -> None:
    """``Ops.attention_backward``, except that only the ``keys`` of ``d_kv`` are written.

    Takes ``take_scratch`` from ``arena``, whose arrays are of ``kos.memory.array``: 3 B H T floats (none if ``simple``)
    and on Hopper B H T d integers, where blocks add up dQ, and B K T / 64 floats more. T is rounded up to a multiple of
    128, and d to 64 or 128.
    """
    task, qkv, kv = _Task.of(attend, ops.attention_kernels), attend.qkv, attend.kv
    samples, T, heads, kv_heads = size = task.size
    length, head_dim, seen, defines = task.length, task.head_dim, task.key_count, task.defines
    if kv is None:
        first_key, kv_width = qkv.pointer + heads * head_dim * qkv.dtype.itemsize, heads + 2 * kv_heads
        d_keys = d_qkv.pointer
    else:
        assert d_kv is not None, "attention to others: the gradient of their keys and values"
        first_key, kv_width, d_keys = task.others[0], 2 * kv_heads, _row(d_kv, task.keys)
    q, dq, d, o = (_row(x, task.queries) for x in (qkv, d_qkv, d_out, attend.out))
    lse = task.statistics(attend)
    if task.kernels == "simple":
        for name, count, target in (
            ("attention_backward_q", T * heads, dq), ("attention_backward_kv", seen * kv_heads, d_keys),
        ):  # fmt: skip
            operands = (q, d, o, lse, target, *size, *task.others, *task.mask)
            ops.launch("attention_simple.cu", name, _rows(samples * count), 256, *operands, **defines)
        return
    threads = samples * _padded(T) * heads * (_padded_dim(head_dim) // 8)
    with arena.scope():
        statistics, bounds, sums = take_scratch(task, arena)
        if bounds is not None:
            ops.launch(
                "attention_statistics.cu", "attention_bounds", bounds.size // 2, 256, first_key, bounds, seen, length,
                kv_width, kv_heads, **defines,
            )  # fmt: skip
        scratch = (statistics, *(0 if x is None else x for x in (bounds, sums)))
        ops.launch(
            "attention_statistics.cu", "attention_statistics", -(-threads // 256), 256, d, o, lse, *scratch, *size,
            seen, length, *task.mask, **defines,
        )  # fmt: skip
        if sums is None:
            _backward_mma(task, (q, d), d_keys, dq, statistics, ops)
            return
        other = task.tokens(d_qkv, task.queries) if kv is None else task.tokens(kv, task.keys)
        maps = (task.tokens(qkv, task.queries), task.tokens(d_out, task.queries), other)
        _backward_hopper(task, maps, (d_keys, *task.others[1:]) if kv is not None else (), statistics, sums, ops)
        ops.launch(
            "attention_backward_hopper.cu", "attention_finish", sums.size // 4096, 256, sums, statistics, dq, T, heads,
            qkv.shape[1], length, **defines, **BACKWARD,
        )  # fmt: skip


def _backward_hopper(
    task: _Task, maps: tuple[Tokens, ...], others: tuple[int, ...], statistics: Array, sums: Array, ops: Any
) -> None:
    samples, T, heads, kv_heads = task.size
    columns = _padded_dim(task.head_dim)
    step, turns, row = 8192 // columns, 3 if columns == 128 else 2, columns * 2  # STEP, TURNS, bytes
    own, slopes = 2 * _BLOCK * row, turns * _BLOCK * step * 2
    shared = own + BACKWARD["STAGES"] * step * (2 * row + 12) + slopes + _ALIGNMENT + 256
    section = _section(samples * kv_heads, 1, T, task.head_dim * (heads // kv_heads))
    ops.launch(
        "attention_backward_hopper.cu", "attention_backward", samples * kv_heads * -(-task.key_count // _BLOCK), 384,
        *maps, statistics, sums, *task.size, section, *others, *task.mask, shared=shared, **task.defines, **BACKWARD,
    )  # fmt: skip


def _backward_mma(task: _Task, operands: tuple[int, int], d_keys: int, dq: int, statistics: Array, ops: Any) -> None:
    (samples, T, heads, kv_heads), head_dim, seen = task.size, task.head_dim, task.key_count
    group, parts, (tiles, (_, shared)) = heads // kv_heads, -(-head_dim // 128), mma_tiles(head_dim, ops.shared_memory)
    own = 16 * tiles["WARPS"]
    for name, blocks, rows, target, section in (
        ("attention_backward_kv", parts * kv_heads, seen, d_keys, _section(samples * kv_heads, 1, T, head_dim * group)),
        ("attention_backward_q", heads, T, dq, _section(samples * heads, group, seen, head_dim)),
    ):
        ops.launch(
            "attention_mma.cu", name, samples * blocks * -(-rows // own), 2 * own, *operands, target, statistics,
            *task.size, section, *task.others, *task.mask, shared=shared, **task.defines, **tiles,
        )  # fmt: skip


def mma_tiles(head_dim: int, memory: int) -> tuple[dict[str, int], tuple[int, int]]:
    """The macros of ``attention_mma.cu``, and the shared memory of its forward and its backward, in bytes.

    ``memory`` is the shared memory that a block may use, in bytes. It must be at least 96 KiB.
    """
    chunks = head_dim // 8
    row = 16 * (chunks if chunks % 8 == 0 else chunks + 1)  # ROW_BYTES
    for tiles in MMA[head_dim > 64 :]:
        own = 16 * tiles["WARPS"]
        shared = (own + 4 * tiles["KEYS"]) * row, (2 * own + 4 * tiles["STEP"]) * row
        if max(shared) <= memory:
            break
    return tiles, shared


def take_scratch(task: _Task, arena: Arena) -> tuple[Array, Array | None, Array | None]:
    """Memory of the backward: statistics and, if dQ is added up in integers, the bounds of keys and values, and dQ."""
    samples, queries, heads, kv_heads = task.size
    rows = samples * heads * _padded(queries)
    statistics = arena.take((3 * rows,), np.float32)
    if task.kernels != "hopper":
        return statistics, None, None
    bounds = arena.take((2 * samples * kv_heads * _padded(task.key_count) // _PAD,), np.float32)
    return statistics, bounds, arena.take((rows * _padded_dim(task.head_dim),), np.int32)


def _padded(tokens: int) -> int:
    return -(-tokens // _PAD) * _PAD


def _padded_dim(head_dim: int) -> int:
    """The columns of a tile on Hopper: PADDED_DIM in ``attention.cuh``."""
    return next(columns for columns in (64, 128, 256) if head_dim <= columns)


def _row(array: Array, tokens: slice) -> int:
    """The address of the first of ``tokens`` in an array with a row for each."""
    return array.pointer + tokens.start * array.shape[1] * array.dtype.itemsize


def fastest_kernels(device: int) -> str:
    """The fastest of KERNEL_SETS that this GPU runs."""
    info = device_info(device)
    return "hopper" if info.arch == "sm_90a" else "mma" if info.compute_capability >= (8, 0) else "simple"


def unsupported(kernels: str, attend: Attend) -> str | None:
    """Why a set of ``kernels`` cannot compute an attention: what it expects, and what it got. None if it can."""
    head_dim, most = attend.head_dim, MOST_HEAD_DIM[kernels]
    if head_dim > most:
        return f"a head size of at most {most}, got {head_dim}"
    if kernels == "simple":
        return None
    if attend.qkv.dtype.name == "float32":
        return "bfloat16 or float16, got float32"
    return f"a head size that is a multiple of {_MULTIPLE}, got {head_dim}" if head_dim % _MULTIPLE else None


def kernel_set(attend: Attend, fastest: str) -> str:
    """The first of KERNEL_SETS, from ``fastest`` on, that computes this attention.

    InvalidArgument if none does: what the simple kernels do not compute, no others do.
    """
    if why := unsupported("simple", attend):
        raise InvalidArgument(f"attention: expected {why}")
    return next(each for each in KERNEL_SETS[KERNEL_SETS.index(fastest) :] if not unsupported(each, attend))


def _rows(count: int) -> int:
    """Blocks of ``attention_simple.cu``: a warp a row, 8 warps a block."""
    return -(-count // 8)


def _section(heads: int, group: int, length: int, head_dim: int) -> int:
    """The number of heads to compute at once: whole groups, whose other operands fit the cache."""
    groups = max(1, _CACHED // (4 * length * head_dim))
    return min(heads, group * groups)


def macros(dtype: str, head_dim: int, causal: bool = True, masked: bool = False) -> dict[str, Define]:
    """The macros of every file of kernels."""
    defines: dict[str, Define] = {"DTYPE": dtype, "HEAD_DIM": head_dim, "SCALE": f"{1 / math.sqrt(head_dim):.9e}f"}
    return defines | ({} if causal else {"CAUSAL": 0}) | ({"MASKED": 1} if masked else {})


def macros_of(attend: Attend) -> dict[str, Define]:
    """The macros of an attention, also of ``cache.cu``."""
    return macros(attend.qkv.dtype.name, attend.head_dim, attend.kv is None, attend.mask is not None)


class _Words:
    """Device memory as an array (B, T, heads, head_dim) of 16-bit words: a tensor map moves it, whatever its dtype."""

    def __init__(self, pointer: int, shape: tuple[int, ...], strides: tuple[int, ...] | None) -> None:
        self.__cuda_array_interface__ = {
            "shape": shape, "typestr": "<u2", "data": (pointer, False), "strides": strides, "version": 3,
        }  # fmt: skip


class Tokens(NamedTuple):
    """What a kernel accesses by TMA: the ``tokens`` of each sample in an array of ``samples`` of ``length`` tokens.

    Each row of the array has heads of ``head_dim`` columns. If this is None, the row is one head.
    """

    array: Array
    samples: int
    length: int
    tokens: slice | None = None
    head_dim: int | None = None

    def encode(self) -> Any:
        tokens = self.tokens or slice(0, self.length)
        size, columns = tokens.stop - tokens.start, self.array.shape[1]
        return tensor_map(_row(self.array, tokens), self.samples, size, self.length, columns, self.head_dim or columns)


@functools.lru_cache(maxsize=1024)
def tensor_map(pointer: int, samples: int, tokens: int, length: int, columns: int, head_dim: int) -> Any:
    """A TMA descriptor for boxes of 64 tokens and 64 columns of one of the heads in a row of ``columns``.

    Elements beyond the ``tokens`` of a sample, or beyond a head, are read as zeros and not written.
    """
    from cuda.core._tensor_map import TensorMapL2Promotion, TensorMapSwizzle
    from cuda.core.utils import StridedMemoryView

    strides = None if tokens == length else (2 * length * columns, 2 * columns, 2 * head_dim, 2)  # bytes
    words = _Words(pointer, (samples, tokens, columns // head_dim, head_dim), strides)
    return StridedMemoryView.from_cuda_array_interface(words, -1).as_tensor_map(
        (1, 64, 1, 64), swizzle=TensorMapSwizzle.SWIZZLE_128B, l2_promotion=TensorMapL2Promotion.L2_256B
    )
