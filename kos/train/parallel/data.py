"""Data parallelism: every rank holds the whole model and works on its share of the batch.

A step's batch is split into micro-batches, of which each rank works on a run of equal length.

*Default*: a rank adds up its own gradients over its micro-batches, and during the last one buckets of the flat
gradient are summed over the ranks as the backward finishes them.

*Deterministic*: gradients are summed as a binary tree over all micro-batches of the step, ``((g0 + g1) + (g2 + g3)) +
…``. A rank adds up the subtrees that it has whole, tensor by tensor; the ranks exchange these once a step and add the
rest of the tree. So losses and weights have the same bits for any number of ranks. The cost is memory for subtrees that
wait for their neighbour, as many as the logarithm of the micro-batches. Sums do not overlap the backward.

*ZeRO-1* (Rajbhandari et al. 2020, arXiv:1910.02054): each bucket is reduce-scattered, and a rank updates its part with
its shard of the optimizer's state. The new weights are gathered while the next step begins, bucket by bucket in the
order of the forward.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kos.comm.work import Work
from kos.train.model.parameters import Parameters
from kos.train.ops import Array
from kos.train.ops import numpy as numpy_ops
from kos.train.parallel.mesh import Axis


def shard_batch(batch_size: int, micro_batch_size: int, rank: int, size: int) -> list[range]:
    """The rows of the batch that ``rank`` works on, a range a micro-batch; ``batch_size`` is divided evenly."""
    rows = batch_size // size
    starts = range(rank * rows, (rank + 1) * rows, micro_batch_size)
    return [range(start, start + micro_batch_size) for start in starts]


def make_buckets(total: int, multiple: int, largest: int, least: int) -> list[slice]:
    """``total`` elements in buckets of ``largest``, rounded to ``multiple``; towards the end, where the backward ends,
    of a quarter of what is left, down to ``least``: the sum of the last one overlaps nothing."""
    buckets, start = [], 0
    while start < total:
        size = max(min(largest, (total - start) // 4), least)
        stop = min(start + max(1, size // multiple) * multiple, total)
        buckets.append(slice(start, stop))
        start = stop
    return buckets


def subtrees(first: int, count: int) -> tuple[list[int], list[tuple[int, int]]]:
    """``count`` leaves of a binary tree from ``first`` on, and what can be summed of them alone.

    How many subtrees each leaf completes, and the subtrees at the end: the first leaf of each and how many it has.
    """
    completes, stack = [], []
    for leaf in range(first, first + count):
        stack.append((leaf, 1))
        before = len(stack)
        _join(stack)
        completes.append(before - len(stack))
    return completes, stack


def _join(stack: list[tuple[int, int]]) -> None:
    """Make one subtree of the last two while they are the halves of one."""
    while len(stack) > 1 and stack[-2][1] == stack[-1][1] and stack[-2][0] % (2 * stack[-1][1]) == 0:
        stack[-2:] = [(stack[-2][0], 2 * stack[-1][1])]


class TreeSum:
    """Sums ``gradients`` over the micro-batches of all ranks of ``axis``, ``count`` on each, as one binary tree.

    Needs ``gradients.flat`` to be a multiple of the ranks, and so its buckets.
    """

    def __init__(
        self, axis: Axis, count: int, gradients: Parameters, buckets: Sequence[slice], ops: Any = numpy_ops
    ) -> None:
        self.axis, self.gradients, self.buckets, self.ops, self.count = axis, gradients, buckets, ops, count
        self._roots = [subtrees(rank * count, count)[1] for rank in range(axis.size)]
        self._completes, _ = subtrees(axis.rank * count, count)
        self._places = [n - sum(self._completes[:n]) for n in range(count)]  # of each micro-batch in ``_sums``
        self._sums = [gradients, *(gradients.like() for _ in range(waiting_subtrees(axis.rank, count)))]
        longest, most = max(b.stop - b.start for b in buckets), max(len(each) for each in self._roots)
        zeros, dtype = gradients.zeros, gradients.flat.dtype
        self._received = [zeros(longest, dtype) for _ in range(most if axis.size > 1 else 0)]

    def target(self, micro_batch: int) -> Parameters:
        """Memory for the gradients of a micro-batch (its number on this rank), which no waiting sum uses."""
        return self._sums[self._places[micro_batch]]

    def add(self, name: str, micro_batch: int) -> None:
        """Add the gradient of ``name``, which the backward has written to ``target``; micro-batches come in order."""
        last = self._places[micro_batch]
        for index in range(last, last - self._completes[micro_batch], -1):
            before = self._sums[index - 1][name]
            self.ops.add(before, self._sums[index][name], before)

    def finish(self, *, whole: bool = True) -> None:
        """The sum of all, in ``gradients``; unless ``whole`` only this rank's part of each bucket."""
        axis, roots = self.axis, self._roots[self.axis.rank]
        mine = [each.flat for each in self._sums[: len(roots)]]
        if axis.size == 1:
            for bucket in self.buckets:
                self._add([(*root, x[bucket]) for root, x in zip(roots, mine, strict=True)])
            return
        for bucket in self.buckets:
            length = (bucket.stop - bucket.start) // axis.size
            for index, of_all in enumerate(self._received):  # a rank of fewer subtrees sends the last again
                x = mine[min(index, len(mine) - 1)][bucket]
                axis.comm.all_to_all(x, of_all[: axis.size * length])
            total = self._add([
                (*root, self._received[index][rank * length : (rank + 1) * length])
                for rank, of_rank in enumerate(self._roots) for index, root in enumerate(of_rank)
            ])  # fmt: skip
            start = bucket.start + axis.rank * length
            part = self.gradients.flat[start : start + length]
            self.ops.copy(total, part)
            if whole:
                axis.comm.all_gather(part, self.gradients.flat[bucket])

    def _add(self, terms: list[tuple[int, int, Array]]) -> Array:
        """The sum, in the memory of the first term: halves of a subtree first, then the others from the last on."""
        stack: list[tuple[int, int]] = []
        arrays: list[Array] = []
        for first, size, x in terms:
            stack.append((first, size))
            arrays.append(x)
            _join(stack)
            self._add_last(arrays, len(stack))
        self._add_last(arrays, 1)
        return arrays[0]

    def _add_last(self, arrays: list[Array], left: int) -> None:
        while len(arrays) > left:
            last = arrays.pop()
            self.ops.add(arrays[-1], last, arrays[-1])


def waiting_subtrees(rank: int, count: int) -> int:
    """Copies of the gradients that ``TreeSum`` needs on a rank."""
    completes, _ = subtrees(rank * count, count)
    return max(n - sum(completes[:n]) for n in range(count))


class DataParallel:
    """Sums gradients over micro-batches and ranks, in place, in ``gradients.flat``.

    ``axis`` joins the ranks that hold the same weights, ``ops`` is the dialect whose arrays they are.  With ``sharded``
    (ZeRO-1) only this rank's parts of the buckets, ``parts()``, hold the sum; ``gradients.flat`` is then a multiple of
    the ranks.  ``in_order``, the axis dp and the number of this rank's micro-batches, makes ``tree``, whose ``add`` is
    then called in place of ``gradient_ready``.
    """

    def __init__(
        self, axis: Axis, gradients: Parameters, ops: Any = numpy_ops, *, in_order: tuple[Axis, int] | None = None,
        bucket_bytes: int = 4 << 20, least_bytes: int | None = None, sharded: bool = False,
    ) -> None:  # fmt: skip
        self.axis, self.gradients, self.ops = axis, gradients, ops
        self.sharded = sharded
        total, spans = gradients.flat.size, gradients.spans
        sizes = (size // gradients.flat.dtype.itemsize for size in (bucket_bytes, least_bytes or bucket_bytes))
        self.buckets = make_buckets(total, gradients.multiple, *sizes)
        self._members = [
            {name for name, span in spans.items() if span.start < bucket.stop and bucket.start < span.stop}
            for bucket in self.buckets
        ]
        self.tree = None if in_order is None else TreeSum(*in_order, gradients, self.buckets, ops)
        self._missing: list[set[str]] = []  # of each bucket, in the last micro-batch
        self._in_flight: list[Work] = []

    def gradient_ready(self, name: str) -> None:
        """Called in the last micro-batch as the backward finishes each gradient: sums the buckets it completes."""
        if self.axis.size == 1:
            return
        flat = self.gradients.flat
        self._missing = self._missing or [set(names) for names in self._members]
        for bucket, missing in zip(self.buckets, self._missing, strict=True):
            if name in missing:
                missing.remove(name)
                if missing:
                    continue
                x, comm = flat[bucket], self.axis.comm
                if self.sharded:
                    work: Work = comm.reduce_scatter(x, flat[self._part(bucket)], async_op=True)
                else:
                    work = comm.all_reduce(x, async_op=True)
                self._in_flight.append(work)

    def finish(self, *, whole: bool = False) -> None:
        """Called after the last backward: now ``gradients`` hold the sum over all micro-batches.

        With ``whole`` the sums of a ``tree`` are whole even if they are ``sharded``.
        """
        if self.tree is not None:
            self.tree.finish(whole=whole or not self.sharded)
        for work in self._in_flight:
            work.wait()
        self._in_flight, self._missing = [], []

    # ZeRO-1.

    def parts(self) -> list[slice]:
        """This rank's part of each bucket."""
        return [self._part(bucket) for bucket in self.buckets]

    def gather(self, weights: Parameters) -> GatheredWeights:
        """Start to gather the parts of ``weights``, which the first look at a tensor then waits for."""
        works = {}
        for bucket in reversed(self.buckets):  # the forward goes through the layout from its end
            part = weights.flat[self._part(bucket)]
            works[bucket.start] = bucket, self.axis.comm.all_gather(part, weights.flat[bucket], async_op=True)
        return GatheredWeights(weights, works)

    def _part(self, bucket: slice) -> slice:
        length = (bucket.stop - bucket.start) // self.axis.size
        start = bucket.start + self.axis.rank * length
        return slice(start, start + length)


class GatheredWeights(Mapping[str, Array]):
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
