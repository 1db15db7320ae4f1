"""Compression: the 8-bit and 4-bit formats in which compressed collectives send floats, and their codec.

A vector is cut into blocks of 64 elements.  A block is sent as 64 codes and a scale, a bfloat16.  A value is its code
times the scale.  The kernels that include ``gpu/kernels/codec.cuh`` make and read the same bits, and so does the
compiled core (``_core/codec.c``), which is much faster than NumPy here.

======  ==========================  ==============  ====================================
name    code                        bytes by block  largest error e of a finite x
======  ==========================  ==============  ====================================
fp8     E4M3, up to 256             66              \\|x\\| / 16 + max(m / 2**18, 2**-136)
int8    -127 to 127                 66              max(m / 250, 2**-127)
int4    -7 to 7, two in a byte      34              max(m / 13, 2**-127)
======  ==========================  ==============  ====================================

m is the largest finite number of the block.  The error of int8 and int4 is half of a scale.  The scale is m / 127 or
m / 7, which a bfloat16 rounds by up to 2**-8 of it, and at least 2**-126: smaller numbers may arrive as 0, as -0 does.
E4M3 rounds by up to x / 17, and below 2**-6 of a scale by 2**-10 of it.  Two cases are worse.  In a block with
infinities or NaN, which arrive as such, int4 has one code less: m / 11.  Finite numbers stay finite, and for that
scales of int8 are smaller where m is above 65,000 in float16: m / 134.

What arrives is rounded to the dtype of the array.  This adds at most (\\|x\\| + e) / 2**11 + 2**-25 in float16,
(\\|x\\| + e) / 2**8 + 2**-134 in bfloat16, and nothing in float32.  In a sum the e of all contributions add up, beside
the rounding of additions in float32.  The sum is rounded to the dtype.  An all_reduce sends that sum, which has an e of
its own, and rounds once more.  ``tests/comm/compression_bounds.py`` computes these bounds.

``fp8``: a power of two as scale, as MXFP8 has it (OCP Microscaling Formats 1.0), loses more: 3.8% instead of 3.5% for
a sum of four normal vectors.  A value is rounded to float16 first.  The codes 0x7f, 0xff and 0x80 are inf, -inf, NaN.
``int8``, ``int4``: in a block with infinities or NaN the sign of the scale is set, and the largest code, its negative
and the one below are inf, -inf and NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from kos._core import native
from kos.errors import InvalidArgument

Array = np.ndarray[Any, Any]

CARRIED = ("float32", "float16", "bfloat16")
"""The dtypes of arrays that can be compressed."""
BLOCK = 64
"""Elements with one scale."""
_SCALE_BYTES = 2
_LEAST_SCALE = np.float32(2.0**-126)
_BFLOAT16 = np.uint32(0xFFFF0000)  # the bits of a float32 that a bfloat16 has
_SPECIAL = [np.float32(each) for each in ("inf", "-inf", "nan")]


@dataclass(frozen=True, slots=True)
class Format:
    """A format of compressed vectors, whose codes have ``bits`` bits and, for finite values, magnitudes to ``top``."""

    name: str
    bits: int
    top: int

    def nbytes(self, count: int) -> int:
        """Bytes of a vector of ``count`` elements: the codes of whole blocks, then their scales."""
        return -(-count // BLOCK) * (BLOCK * self.bits // 8 + _SCALE_BYTES)

    def encode(self, x: Array) -> Array:
        """The 1-D ``x`` as bytes (uint8), by float32."""
        out = np.empty(self.nbytes(x.size), np.uint8)
        if native is not None:
            x = np.ascontiguousarray(x)
            native.encode(self.bits, self.top, CARRIED.index(x.dtype.name), x.view(np.uint8), out)
            return out
        blocks = np.zeros((-(-x.size // BLOCK), BLOCK), np.float32)
        blocks.reshape(-1)[: x.size] = x
        with np.errstate(all="ignore"):
            self._encode(blocks, *self._parts(out, x.size), float(ml_dtypes.finfo(x.dtype).max))
        return out

    def decode(self, data: Array, out: Array, add: bool = False) -> None:
        """Write the vector of ``encode`` to the contiguous ``out``, rounded once to its dtype.

        ``add``: add it to ``out``, which is of float32.
        """
        if native is not None:
            native.decode(self.bits, self.top, CARRIED.index(out.dtype.name), data, out.view(np.uint8), add)
            return
        with np.errstate(all="ignore"):
            values = self._decode(*self._parts(data, out.size)).reshape(-1)[: out.size]
            out[...] = out + values if add else values

    # The codec without the compiled core, which must have the same bits.

    def _parts(self, data: Array, count: int) -> tuple[Array, Array]:
        """The codes of an encoded vector, a row for each block, and its scales."""
        blocks, width = -(-count // BLOCK), BLOCK * self.bits // 8
        return data[: blocks * width].reshape(blocks, width), data[blocks * width :].view(np.uint16)

    def _encode(self, x: Array, codes: Array, scales: Array, dtype_max: float) -> None:
        finite = np.isfinite(x)
        special = np.asarray(~finite.all(1, keepdims=True))
        levels = np.float32(self.top) - (special & (self.name != "fp8"))
        largest = np.where(finite, abs(x), np.float32(0)).max(1, keepdims=True)
        limit = (np.float32(dtype_max) / levels).view(np.uint32) & _BFLOAT16  # with the largest code it is finite
        scale = (largest / levels).astype(ml_dtypes.bfloat16).astype(np.float32)
        scale = np.clip(scale, _LEAST_SCALE, limit.view(np.float32))
        scales[:] = scale.view(np.uint32)[:, 0] >> 16
        q = x * (1 / scale)
        if self.name == "fp8":
            q = q.astype(np.float16).astype(np.float32)
            codes[:] = q.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
            codes[codes == 0x80] = 0
            for bits, named in ((0x7F, np.isposinf(q)), (0xFF, np.isneginf(q)), (0x80, np.isnan(q))):
                codes[named] = bits
            return
        scales |= special[:, 0].astype(np.uint16) << 15
        q = np.where(finite, np.clip(np.rint(q), -levels, levels), np.where(x > 0, self.top, -self.top))
        code = np.where(np.isnan(x), -self.top - 1, q).astype(np.int8).view(np.uint8)
        codes[:] = code if self.bits == 8 else code[:, ::2] & 15 | code[:, 1::2] << 4

    def _decode(self, codes: Array, scales: Array) -> Array:
        scale = (scales.astype(np.uint32) << 16).view(np.float32)[:, None]
        if self.name == "fp8":
            named = [codes == each for each in (0x7F, 0xFF, 0x80)]
            return np.select(named, _SPECIAL, codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)) * scale
        code = codes.view(np.int8)
        if self.bits == 4:
            code = np.stack([(codes << 4).view(np.int8) >> 4, code >> 4], 2).reshape(-1, BLOCK)
        top, special = self.top, np.signbit(scale)
        named = [special & (code == each) for each in (top, -top, -top - 1)]
        return np.select(named, _SPECIAL, code * abs(scale))


FORMATS = {each.name: each for each in (Format("fp8", 8, 256), Format("int8", 8, 127), Format("int4", 4, 7))}
"""All formats by name."""


def shards(count: int, size: int) -> list[int]:
    """The number of elements of each of ``size`` shards of a vector.

    Shards are whole blocks and equally large, but the last ones may be smaller or empty.
    """
    shard = -(-count // (size * BLOCK)) * BLOCK
    return [max(0, min(shard, count - rank * shard)) for rank in range(size)]


def check_compress(compress: Any) -> str:
    """The name of a format, or "" for None; raises InvalidArgument for anything else."""
    if compress is None:
        return ""
    if type(compress) is not str or compress not in FORMATS:
        raise InvalidArgument(f"compress: expected None, {', '.join(map(repr, FORMATS))}, got {compress!r:.40}")
    return compress
