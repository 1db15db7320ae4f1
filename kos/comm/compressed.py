"""Compressed collectives on host memory: what travels is encoded (``compression``), sums are in float32, in rank order.

A contribution is encoded once on its way to the rank that adds it, and the sum once on its way to all ranks.  Every
rank decodes the same bytes, its own too, so that a result is the same on every rank, in every run and on every backend.
A vector of an all_reduce has a part for each rank, of whole blocks.  ``gpu/compressed.py`` does the same in kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from kos.comm.compression import BLOCK, CARRIED, FORMATS, Format
from kos.comm.operation import Operation
from kos.comm.reduction import ReduceOp
from kos.comm.work import Steps, Work
from kos.errors import CollectiveMismatch, InvalidArgument

Array = np.ndarray[Any, Any]
SendPieces = Callable[..., Steps]
"""Sends piece j to rank j and receives piece j from it: takes what makes a piece, the list, and its check."""
Share = Callable[[Array, Sequence[Array]], Steps]
"""Sends an array to all ranks, and receives theirs into the list."""


def check(o: Operation) -> None:
    """Raises InvalidArgument for a dtype or a reduce operation that cannot be compressed."""
    assert o.send is not None
    if o.send.dtype.name not in CARRIED:
        raise InvalidArgument(f"x: expected {', '.join(CARRIED)} with compress, got {o.send.dtype}")
    if o.reduction is not None and o.reduction.op not in (ReduceOp.SUM, ReduceOp.AVG):
        raise InvalidArgument(f"op: expected SUM or AVG with compress, got {o.reduction.op.name}")


def parts(o: Operation, size: int) -> tuple[Sequence[int], Sequence[int]]:
    """Elements that each rank gets from this one, and that each sends in the last exchange, after sums or without."""
    assert o.send is not None
    count = o.send.count
    if o.name == "all_reduce":
        part = -(-count // (size * BLOCK)) * BLOCK
        counts: Sequence[int] = [max(0, min(part, count - rank * part)) for rank in range(size)]
        return counts, counts
    even = [count // size] * size
    if o.name.startswith("all_gather"):
        return (), o.recv_counts or [count] * size
    return o.send_counts or even, o.recv_counts or even


def steps(work: Work[Any], rank: int, size: int, send_pieces: SendPieces, share: Share) -> Steps:
    """The steps of a compressed operation."""
    o = work.operation
    form = FORMATS[o.options.compress]
    counts, last = parts(o, size)
    x, out = work.send, work.send if o.recv is None else work.recv
    if o.reduction is None and counts:
        yield from _all_to_all(work, rank, size, form, send_pieces)
        return
    if o.reduction is not None:
        pieces, arrived = split(x, counts), _room(form, [counts[rank]] * size)
        yield from send_pieces(lambda peer: form.encode(pieces[peer]), arrived)
        x = _sum(form, arrived, counts[rank])
        o.reduction.finish(x, x)
        if o.name != "all_reduce":
            with np.errstate(over="ignore"):
                out[...] = x
            return
    arrived = _room(form, last)
    yield from share(form.encode(x), arrived)
    for data, part in zip(arrived, split(out, last), strict=True):
        form.decode(data, part)


def _all_to_all(work: Work[Any], rank: int, size: int, form: Format, send_pieces: SendPieces) -> Steps:
    """Also all_to_all_v, where a count follows each piece, which only its two ranks know: 60 elements are encoded as
    long as 64."""
    counts, last = parts(work.operation, size)
    pieces, varies = split(work.send, counts), work.operation.name == "all_to_all_v"

    def piece(peer: int) -> Array:
        data = form.encode(pieces[peer])
        return np.append(data, np.array([counts[peer]], np.int64).view(np.uint8)) if varies else data

    def check() -> None:
        for sender, (data, count) in enumerate(zip(arrived, last, strict=True)):
            if varies and (sent := int(data[-8:].view(np.int64)[0])) != count:
                raise CollectiveMismatch(f"rank {rank} expected {count} elements from rank {sender}, got {sent}")

    arrived = _room(form, last, 8 * varies)
    yield from send_pieces(piece, arrived, check)
    for data, part in zip(arrived, split(work.recv, last), strict=True):
        form.decode(data[: form.nbytes(part.size)], part)


def feed_back(x: Array, residual: Array, compress: str) -> None:
    """See ``Communicator.feed_back``; both arrays have one dimension."""
    form, lost = FORMATS[compress], np.empty(x.size, np.float32)
    with np.errstate(all="ignore"):
        x[...] = x.astype(np.float32) + residual.astype(np.float32)
        form.decode(form.encode(x), lost)
        np.subtract(x.astype(np.float32), lost, out=lost)
        lost[~np.isfinite(lost)] = 0
        residual[...] = lost


def split(x: Array, counts: Sequence[int]) -> list[Array]:
    """So many elements of ``x`` for each rank, one after another."""
    return [x[end - count : end] for count, end in zip(counts, accumulate(counts), strict=True)]


def _room(form: Format, counts: Sequence[int], more: int = 0) -> list[Array]:
    """Memory for an encoded vector of each count, and ``more`` bytes."""
    return [np.empty(form.nbytes(count) + more, np.uint8) for count in counts]


def _sum(form: Format, encoded: Sequence[Array], count: int) -> Array:
    total = np.empty(count, np.float32)
    for number, data in enumerate(encoded):
        form.decode(data, total, add=number > 0)
    return total
