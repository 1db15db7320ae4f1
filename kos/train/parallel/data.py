"""Data parallelism: every rank holds the whole model and works on its share of the batch.

A step's batch is cut into micro-batches; micro-batch ``i`` goes to rank ``i mod size``, so that in
round ``j`` the ranks together work on micro-batches ``j*size … j*size + size-1``.

*Default*: a rank adds up its own gradients over the rounds, and in the last round buckets of the flat
gradient are summed over the ranks as the backward finishes them.

*Deterministic*: after each round the ranks' gradients are added in rank order, with rank 0 carrying the
sum of the rounds before. That is the sum ``((g0 + g1) + g2) + …`` in micro-batch order for any number of
ranks: losses and weights do not depend on it by a single bit. The price is one all-reduce a round.

*ZeRO-1* (Rajbhandari et al. 2020, arXiv:1910.02054): a bucket is reduce-scattered, a rank updates its part
of each with its share of the optimizer's state, and the parts of the new weights are gathered, bucket by
bucket in the order of the forward, while the next step begins.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kos.comm.work import Work
from kos.train.model.parameters import Parameters
from kos.train.ops import Array
from kos.train.ops import numpy as numpy_ops
from kos.train.parallel.mesh import Axis


def deal(batch_size: int, micro_batch_size: int, rank: int, size: int) -> list[range]:
    """The rows of the batch that ``rank`` works on, a range a round; ``batch_size`` is cut evenly."""
    starts = range(rank * micro_batch_size, batch_size, size * micro_batch_size)
    return [range(start, start + micro_batch_size) for start in starts]


def cut(end: int, total: int, multiple: int, largest: int, least: int) -> list[slice]:
    """``total`` elements in buckets of ``largest``, rounded to ``multiple``; towards ``end``, where the backward ends,
    of a quarter of what is left, down to ``least``: the sum of the last one overlaps nothing."""
    buckets, start = [], 0
    while start < total:
        size = largest if start >= end else max(min(largest, (end - start) // 4), least)
        stop = min(start + max(1, size // multiple) * multiple, total)
        buckets.append(slice(start, stop))
        start = stop
    return buckets


class DataParallel:
    """Sums gradients over micro-batches and ranks, in place, in ``gradients.flat``.

    ``axis`` joins the ranks that hold the same weights, ``ops`` is the dialect whose arrays they are.  With ``sharded``
    (ZeRO-1) only this rank's parts of the buckets, ``parts()``, hold the sum; ``gradients.flat`` is then a multiple of
    the ranks.  ``lookups`` names the embedding whose lookups are gathered: its sum over the ranks begins early, if it
    is ``tied``, or not at all.
    """

    def __init__(
        self,
        axis: Axis,
        gradients: Parameters,
        ops: Any = numpy_ops,
        *,
        deterministic: bool = False,
        bucket_bytes: int = 4 << 20,
        sharded: bool = False,
        least_bytes: int | None = None,
        lookups: str | None = None,
        tied: bool = False,
    ) -> None:
        self.axis, self.gradients, self.ops = axis, gradients, ops
        self.deterministic, self.sharded = deterministic, sharded
        self._carry = gradients.like().flat if deterministic and axis.rank == 0 else None
        total, spans = gradients.flat.size, gradients.spans
        sizes = (size // gradients.flat.dtype.itemsize for size in (bucket_bytes, least_bytes or bucket_bytes))
        self.buckets = cut(spans[lookups].start if lookups else total, total, gradients.multiple, *sizes)
        self._members = [
            {
                name
                for name, span in spans.items()
                if span.start < b.stop and b.start < span.stop and (tied or name != lookups)
            }
            for b in self.buckets
        ]
        self._missing: list[set[str]] = []  # of each bucket, in the last round
        self._in_flight: list[Work] = []

    def accumulates(self, round_index: int) -> bool:
        """Whether the backward of this round adds to ``gradients`` rather than writing them."""
        return round_index > 0 and not self.deterministic

    def gradient_ready(self, name: str) -> None:
        """Called in the last round as the backward finishes each gradient: starts the buckets it completes."""
        if self.axis.size == 1 or self.deterministic:
            return
        flat = self.gradients.flat
        self._missing = self._missing or [set(names) for names in self._members]
        for bucket, missing in zip(self.buckets, self._missing, strict=True):
            if name in missing:
                missing.remove(name)
                if missing:
                    continue
                x = flat[bucket]
                work = (
                    self.axis.comm.reduce_scatter(x, flat[self._part(bucket)], async_op=True)
                    if self.sharded
                    else self.axis.comm.all_reduce(x, async_op=True)
                )
                self._in_flight.append(work)

    def gather_lookups(self, arena: Any, tokens_N: Array, d_rows_ND: Array) -> tuple[Array, Array]:
        """Those of all ranks, in memory of ``arena``; all gradients that were begun have come then."""
        both = []
        for mine in (tokens_N, d_rows_ND):
            of_all = arena.take((self.axis.size, *mine.shape), mine.dtype)
            self._in_flight.append(self.axis.comm.all_gather(mine, of_all, async_op=True))
            both.append(of_all.reshape(-1, *mine.shape[1:]))
        self._await()
        return both[0], both[1]

    def finish_round(self, round_index: int, rounds: int) -> None:
        """Called after each backward; after the last, ``gradients`` hold the sum over all micro-batches."""
        if self.deterministic:
            flat = self.gradients.flat
            if self._carry is not None and round_index > 0:
                self.ops.add(self._carry, flat, flat)
            if self.axis.size > 1:
                for bucket in self.buckets:  # not all at once: a backend may need as much memory again
                    self.axis.comm.all_reduce(flat[bucket], deterministic=True)
            if self._carry is not None and round_index + 1 < rounds:
                self.ops.copy(flat, self._carry)
        elif round_index + 1 == rounds:
            self._await()
            self._missing = []

    def _await(self) -> None:
        for work in self._in_flight:
            work.wait()
        self._in_flight.clear()

    # ZeRO-1.

    def parts(self) -> list[slice]:
        """This rank's part of each bucket."""
        return [self._part(bucket) for bucket in self.buckets]

    def gather(self, weights: Parameters) -> Arriving:
        """Start to gather the parts of ``weights``, which the first look at a tensor then waits for."""
        works = {}
        for bucket in reversed(self.buckets):  # the forward goes through the layout from its end
            part = weights.flat[self._part(bucket)]
            works[bucket.start] = bucket, self.axis.comm.all_gather(part, weights.flat[bucket], async_op=True)
        return Arriving(weights, works)

    def _part(self, bucket: slice) -> slice:
        length = (bucket.stop - bucket.start) // self.axis.size
        start = bucket.start + self.axis.rank * length
        return slice(start, start + length)


class Arriving(Mapping[str, Array]):
    """Weights whose buckets are being gathered, by the names of ``Parameters``."""

    def __init__(self, weights: Parameters, works: dict[int, tuple[slice, Work]]) -> None:
        self._weights, self._works = weights, works

    def __getitem__(self, name: str) -> Array:
        if self._works:
            members = self._weights.groups.get(name, (name,))
            start, stop = self._weights.spans[members[0]].start, self._weights.spans[members[-1]].stop
            for key, (bucket, work) in list(self._works.items()):
                if bucket.start < stop and start < bucket.stop:
                    work.wait()
                    del self._works[key]
        return self._weights[name]

    def wait(self) -> None:
        """For all of them."""
        for name in self._weights:
            self[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)
