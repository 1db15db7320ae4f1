"""Compression: the 8-bit and 4-bit formats of compressed collectives, their codec, and the collectives in host memory.

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

In *compressed collectives* each contribution is encoded once, for the rank that adds it.  That rank adds in float32, in
rank order.  The sum is rounded to the dtype and encoded once, for all ranks.  Every rank decodes the same bytes, also
for its own part, so the result is the same on every rank, in every run and on every backend.  The vector of an
all_reduce has a part for each rank, which consists of whole blocks.  ``gpu/composed.py`` does the same in kernels.

*Between hosts* of several ranks each, an all_reduce and a reduce_scatter run in three phases:

1. The ranks of each host add exactly, in rank order.  The sum is rounded to the dtype.  Each rank gets a shard of it.
2. The ranks that have the same shard, one on each host, add it with compression, as above.
3. In an all_reduce, the ranks of each host then gather the shards without compression.

So only the sums of hosts are compressed.  With l ranks on each host, each rank compresses 1/l of the array.
``gpu/hierarchical.py`` does the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from typing import Any

import ml_dtypes
import numpy as np

from kos._core import native
from kos.comm.operation import Operation
from kos.comm.reduction import ReduceOp, Reduction
from kos.comm.work import Steps, Work
from kos.errors import CollectiveMismatch, InvalidArgument

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


IN_PHASES = ("all_reduce", "reduce_scatter")
"""Operations that sum exactly within each host before they compress."""
SEGMENT, MOST_SEGMENTS = 2048 * BLOCK, 32
"""Elements of a segment, the unit of encoding, sending and adding; more if a part would have over ``MOST_SEGMENTS``."""


def check(o: Operation) -> None:
    """Raises InvalidArgument for a dtype or a reduce operation that cannot be compressed."""
    assert o.send is not None
    if o.send.dtype.name not in CARRIED:
        raise InvalidArgument(f"x: expected {', '.join(CARRIED)} with compress, got {o.send.dtype}")
    if o.reduction is not None and o.reduction.op not in (ReduceOp.SUM, ReduceOp.AVG):
        raise InvalidArgument(f"op: expected SUM or AVG with compress, got {o.reduction.op.name}")


def parts(o: Operation, size: int) -> tuple[Sequence[int], Sequence[int]]:
    """The elements that this rank sends to each rank, and the elements that each rank sends in the last exchange."""
    assert o.send is not None
    count = o.send.count
    if o.name == "all_reduce":
        counts = shards(count, size)
        return counts, counts
    even = [count // size] * size
    if o.name.startswith("all_gather"):
        return (), o.recv_counts or [count] * size
    return o.send_counts or even, o.recv_counts or even


def steps(work: Work[Any], calls: Any) -> Steps:
    """The steps of a compressed operation over the messages of ``calls``, the ``ScheduledCalls`` of this rank."""
    o = work.operation
    form = FORMATS[o.options.compress]
    counts, last = parts(o, calls.size)
    out = work.send if o.recv is None else work.recv
    if o.reduction is None and counts:
        yield from _all_to_all(work, calls, form)
    elif o.reduction is None:
        yield from _to_all(work, calls, form, map(form.encode, _segments(work.send)), out, last)
    elif calls.local > 1 and o.name in IN_PHASES and not o.options.deterministic:
        yield from _in_phases(work, calls, form, out)
    else:
        if work.residual is not None:
            feed_back(work.send, work.residual, form)
        yield from _reduce(work, calls, form, work.send, out, o.reduction, counts)


def _to_all(
    work: Work[Any], calls: Any, form: Format, mine: Iterator[Array | None], out: Array, counts: Sequence[int]
) -> Steps:  # fmt: skip
    """Send the encoded segments ``mine`` to all ranks, and decode the segments of all ranks into ``out``."""
    targets = [_segments(part) for part in split(out, counts)]
    arrived = [[_encoded_buffer(form, each.size) for each in target] for target in targets]
    yield from calls.send_to_all(work, mine, arrived)
    for data, part in zip(chain(*arrived), chain(*targets), strict=True):
        form.decode(data, part)


def _in_phases(work: Work[Any], calls: Any, form: Format, out: Array) -> Steps:
    """Add exactly within the host, add shards with compression between hosts, and gather exactly within the host."""
    o, x, (node, rail) = work.operation, work.send, calls.phases()
    assert o.reduction is not None
    of_host, between = (replace(o.reduction, size=part.size) for part in (node, rail))
    counts = shards(x.size, node.size)
    pieces = split(x, counts)
    if o.name == "reduce_scatter":
        parts = x.reshape(rail.size, node.size, out.size)
        pieces = [np.ascontiguousarray(parts[:, rank]).reshape(-1) for rank in range(node.size)]
    shard = np.empty_like(pieces[node.rank])
    received = [np.empty_like(shard) for _ in range(node.size)]
    yield from node.send_pieces(work, pieces.__getitem__, received)
    total = received[0].astype(np.float32)
    for term in received[1:]:
        of_host.combine(total, term.astype(np.float32, copy=False))
    of_host.finish(total, shard)
    if work.residual is not None:
        feed_back(shard, work.residual, form)
    if o.name == "reduce_scatter":
        yield from _reduce(work, rail, form, shard, out, between, [out.size] * rail.size)
        return
    yield from _reduce(work, rail, form, shard, shard, between, shards(shard.size, rail.size))
    yield from node.send_to_all(work, [shard], [[part] for part in split(out, counts)])


def _reduce(
    work: Work[Any], calls: Any, form: Format, x: Array, out: Array, reduction: Reduction, counts: Sequence[int]
) -> Steps:  # fmt: skip
    """A compressed sum.  ``out`` gets all of it in an all_reduce, and this rank's part in other reductions."""
    sums = _sums(work, calls, form, x, reduction, counts)
    if work.operation.name == "all_reduce":
        encoded = (None if each is None else form.encode(each) for each in sums)
        yield from _to_all(work, calls, form, encoded, out, counts)
        return
    segments = iter(_segments(out))
    for total in sums:
        if total is None:
            yield
        else:
            next(segments)[...] = total


def _sums(
    work: Work[Any], calls: Any, form: Format, x: Array, reduction: Reduction, counts: Sequence[int]
) -> Iterator[Array | None]:  # fmt: skip
    """Encode and send all parts of this rank's input; returns an iterator over the sums of its own part by segment.

    A sum is rounded to the dtype, where it may become inf, before it is encoded again.  The iterator yields None while
    it waits for messages.
    """
    pieces = [_segments(part) for part in split(x, counts)]
    arrived = [[_encoded_buffer(form, segment.size) for _ in counts] for segment in pieces[calls.rank]]
    tag = calls.tag(work)
    receives = [[calls.irecv(data[peer], peer, tag) for peer in calls.peers] for data in arrived]
    sends = [
        calls.isend(form.encode(pieces[peer][number]), peer, tag)
        for number in range(max(map(len, pieces))) for peer in calls.peers if number < len(pieces[peer])
    ]  # fmt: skip
    for data, segment in zip(arrived, pieces[calls.rank], strict=True):
        data[calls.rank] = form.encode(segment)

    sending = calls.wait_for(*sends)

    def added() -> Iterator[Array | None]:
        for data, requests, segment in zip(arrived, receives, pieces[calls.rank], strict=True):
            for _ in calls.wait_for(*requests):
                next(sending, None)  # other ranks may wait for these messages
                yield None
            total = np.empty(segment.size, np.float32)
            for rank, contribution in enumerate(data):
                form.decode(contribution, total, add=rank > 0)
            reduction.finish(total, total)
            with np.errstate(over="ignore"):
                total = total.astype(x.dtype, copy=False)
            yield total
        yield from sending

    return added()


def _all_to_all(work: Work[Any], calls: Any, form: Format) -> Steps:
    """all_to_all and all_to_all_v.  In the latter a count follows each piece: only its two ranks know it, and the codes
    of 60 and of 64 elements have equal length."""
    counts, last = parts(work.operation, calls.size)
    pieces, varies = split(work.send, counts), work.operation.name == "all_to_all_v"

    def piece(peer: int) -> Array:
        data = form.encode(pieces[peer])
        return np.append(data, np.array([counts[peer]], np.int64).view(np.uint8)) if varies else data

    def check() -> None:
        for sender, (data, count) in enumerate(zip(arrived, last, strict=True)):
            if varies and (sent := int(data[-8:].view(np.int64)[0])) != count:
                log, ranks = work.backend.failures, (calls.rank, sender)
                me, other = (log.names([rank], False) for rank in ranks)
                text, got = f"{me} expected {count} elements from {other}, got {sent}", f"{sent} elements"
                raise CollectiveMismatch(text, ranks=sorted(log.in_world(ranks)), expected=f"{count} elements", got=got)

    arrived = [_encoded_buffer(form, count, 8 * varies) for count in last]
    yield from calls.send_pieces(work, piece, arrived, check)
    for data, part in zip(arrived, split(work.recv, last), strict=True):
        form.decode(data[: form.nbytes(part.size)], part)


def feed_back(x: Array, residual: Array, form: Format) -> None:
    """Error feedback: add ``residual`` to ``x``, and store in it the rounding errors that sending ``x`` will have.

    Both arrays have one dimension.  The residual is 0 where ``x`` has infinities or NaN.
    """
    lost = np.empty(x.size, np.float32)
    dtype_max = float(ml_dtypes.finfo(x.dtype).max)
    with np.errstate(all="ignore"):
        total = x.astype(np.float32) + residual.astype(np.float32)
        x[...] = np.where(np.isfinite(x), np.clip(total, -dtype_max, dtype_max), total)
        form.decode(form.encode(x), lost)
        np.subtract(x.astype(np.float32), lost, out=lost)
        lost[~np.isfinite(lost)] = 0
        residual[...] = lost


def split(x: Array, counts: Sequence[int]) -> list[Array]:
    """``x`` in consecutive parts of ``counts`` elements."""
    return [x[end - count : end] for count, end in zip(counts, accumulate(counts), strict=True)]


def _segments(part: Array) -> list[Array]:
    """A part of a vector in segments of whole blocks.  They depend only on its size, so they are equal on all ranks."""
    size = max(SEGMENT, -(-part.size // (MOST_SEGMENTS * BLOCK)) * BLOCK)
    return [part[at : at + size] for at in range(0, part.size, size)]


def _encoded_buffer(form: Format, count: int, more: int = 0) -> Array:
    """Memory for an encoded vector of ``count`` elements, and ``more`` bytes."""
    return np.empty(form.nbytes(count) + more, np.uint8)
