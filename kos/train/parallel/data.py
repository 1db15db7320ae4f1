"""Data parallelism: every rank holds the whole model and works on its shard of the batch.

A step's batch is split into micro-batches, and each rank works on consecutive ones. Every rank has the same number of
them if the number of ranks divides the batch. At the start of a run it must; with ``--elastic``, some ranks may later
have one more than others.

*Default*: a rank adds up its own gradients over its micro-batches. During the backward of the last micro-batch, buckets
of the flat gradient are summed over the ranks as soon as they are complete.

*Compressed*: buckets are sent in fewer bits (``kos.comm.compression``).  A rank keeps the compression error of its
gradients, the residual, and adds it to its gradients of the next step (error feedback).  On several hosts, the ranks of
each host first add exactly (``Communicator.exact_group_size``).  The residual then covers only the shard of this rank.

*Deterministic*: gradients are summed after the backward, in one order for any number of ranks (``TreeSum``).

*ZeRO-1* (Rajbhandari et al. 2020, arXiv:1910.02054): each bucket is reduce-scattered, and a rank updates its part with
its shard of the optimizer's state. The new weights are gathered while the next step begins, bucket by bucket in the
order of the forward.

*Held twice* (``--elastic``): the next rank also receives a rank's reduced part, and computes the same update. So no
part of the optimizer's state is lost when a rank is lost.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from itertools import accumulate
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kos.train.ops import Array
from kos.train.ops import numpy as numpy_ops
from kos.train.ops.parameters import OnFirstRead, OwnedSlices, Parameters, Shape
from kos.train.parallel.mesh import Axis, Reduction

if TYPE_CHECKING:
    from kos.comm.work import Work


def run_of(total: int, rank: int, size: int) -> range:
    """The consecutive micro-batches of ``rank``, of ``total``.  The numbers of two ranks differ by at most one."""
    return range(rank * total // size, (rank + 1) * total // size)


def subtrees(first: int, count: int) -> tuple[list[int], list[tuple[int, int]]]:
    """The largest subtrees of a binary tree that consist of the ``count`` leaves from ``first`` on.

    Returns (number of subtrees that each leaf completes, subtrees), each subtree as (first leaf, number of leaves).
    """
    completes, stack = [], []
    for leaf in range(first, first + count):
        stack.append((leaf, 1))
        before = len(stack)
        _join(stack)
        completes.append(before - len(stack))
    return completes, stack


def _join(stack: list[tuple[int, int]]) -> None:
    """Join the last two subtrees while they are halves of one."""
    while len(stack) > 1 and stack[-2][1] == stack[-1][1] and stack[-2][0] % (2 * stack[-1][1]) == 0:
        stack[-2:] = [(stack[-2][0], 2 * stack[-1][1])]


def places(completes: Sequence[int]) -> list[int]:
    """Number of subtrees that wait for their neighbour before each leaf, given the first result of ``subtrees``."""
    return [leaf - done for leaf, done in enumerate(accumulate(completes[:-1], initial=0))]


def waiting_subtrees(run: range) -> int:
    """Number of copies of the gradients that ``TreeSum`` needs on a rank with this run of micro-batches."""
    return max(places(subtrees(run.start, len(run))[0]))


class TreeSum:
    """Sums ``gradients`` over the ``total`` micro-batches of all ranks of ``axis``, as one binary tree.

    With ``--deterministic``, the sum ``((g0 + g1) + (g2 + g3)) + …`` has the same bits for any number of ranks. A rank
    adds up the subtrees whose leaves it has, tensor by tensor. Once per step, the ranks exchange these sums and add up
    the rest of the tree. A subtree needs memory until its neighbour is complete, in all log2(micro-batches of a rank)
    copies of the gradients. The exchange does not overlap the backward.

    Each rank has consecutive micro-batches (``run_of``).  The lengths of ``gradients.flat`` and of each bucket must be
    multiples of the number of ranks.
    """

    def __init__(
        self, axis: Axis, total: int, gradients: Parameters, buckets: Sequence[slice], ops: Any = numpy_ops
    ) -> None:
        self.axis, self.total, self.gradients, self.buckets, self.ops = axis, total, gradients, buckets, ops
        runs = [run_of(total, rank, axis.size) for rank in range(axis.size)]
        self._roots = [subtrees(run.start, len(run))[1] for run in runs]
        self._completes, _ = subtrees(runs[axis.rank].start, len(runs[axis.rank]))
        self._places = places(self._completes)  # of each micro-batch in ``_sums``
        self._sums = [gradients, *(gradients.like() for _ in range(max(self._places)))]
        longest, most = max(b.stop - b.start for b in buckets), max(len(each) for each in self._roots)
        zeros, dtype = gradients.zeros, gradients.flat.dtype
        self._received = [zeros(longest, dtype) for _ in range(most if axis.size > 1 else 0)]

    def target(self, micro_batch: int) -> Parameters:
        """Memory for the gradients of this rank's micro-batch ``micro_batch``.  No waiting sum uses this memory."""
        return self._sums[self._places[micro_batch]]

    def add(self, name: str, micro_batch: int) -> None:
        """Add the gradient of ``name``, which the backward has written to ``target``. Micro-batches come in order."""
        last = self._places[micro_batch]
        for index in range(last, last - self._completes[micro_batch], -1):
            before = self._sums[index - 1][name]
            self.ops.add(before, self._sums[index][name], before)

    def finish(self, *, whole: bool = True) -> None:
        """Write the sum over all ranks to ``gradients``, or only this rank's part of each bucket if not ``whole``."""
        axis, roots = self.axis, self._roots[self.axis.rank]
        mine = [each.flat for each in self._sums[: len(roots)]]
        if axis.size == 1:
            for bucket in self.buckets:
                self._add([(*root, x[bucket]) for root, x in zip(roots, mine, strict=True)])
            return
        for bucket in self.buckets:
            length = (bucket.stop - bucket.start) // axis.size
            for index, of_all in enumerate(self._received):  # a rank with fewer subtrees sends its last one again
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
        """The sum, in the memory of the first term.  Halves of subtrees are added first, then the rest from the end."""
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


def shard_batch(batch_size: int, micro_batch_size: int, rank: int, size: int) -> list[range]:
    """The rows that ``rank`` works on, a range per micro-batch.  ``micro_batch_size`` must divide ``batch_size``."""
    numbers = run_of(batch_size // micro_batch_size, rank, size)
    return [range(micro_batch_size * number, micro_batch_size * (number + 1)) for number in numbers]


def make_buckets(
    total: int, multiple: int, largest: int, least: int, start: int = 0, last: int | None = None
) -> list[slice]:
    """Split the elements from ``start`` to ``total`` into buckets of about ``largest`` elements.

    Sizes are rounded to ``multiple``.  Towards the end, a bucket has a quarter of the remaining elements, but not less
    than ``least``.  The backward finishes the last bucket last, so its sum overlaps no computation and should be short.

    ``last`` is where the last tensor begins.  If this tensor has at least ``least`` elements, it has buckets of its
    own, of ``largest`` elements: all of it is complete at once, and fewer sums take less time.  If the last of these
    buckets would have fewer than ``least`` elements, they are part of the bucket before it.
    """
    buckets, end = [], total if last is None or total - last < least else last // multiple * multiple
    while start < end:
        size = max(min(largest, (end - start) // 4), least)
        stop = min(start + max(1, size // multiple) * multiple, end)
        buckets.append(slice(start, stop))
        start = stop
    starts = range(end, total - max(1, least) + 1, max(1, largest // multiple) * multiple)
    return buckets + [slice(*ends) for ends in itertools.pairwise([*starts, total])]


def buckets_of(region: slice, layout: Parameters, largest: int, least: int) -> list[slice]:
    """The buckets of a region of a layout.  Their sizes depend only on the region."""
    begins = (span.start for span in layout.spans.values() if region.start <= span.start < region.stop)
    return make_buckets(region.stop, layout.multiple, largest, least, region.start, max(begins, default=region.start))


def cut_around(unsplittable: Set[str], layout: Parameters, buckets: Sequence[slice], step: int) -> list[slice]:
    """``buckets`` with their ends moved a little, so that none splits a tensor of ``unsplittable``.

    A bucket ends at a multiple of ``step`` or where a tensor begins.
    """
    first = buckets[0].start
    ends = np.union1d(range(0, layout.flat.size + 1, step), [span.start for span in layout.spans.values()])
    for name in unsplittable & layout.spans.keys():
        span = layout.spans[name]
        ends = ends[(ends <= span.start) | (span.stop <= ends)]
    stops = dict.fromkeys(int(ends[np.abs(ends - bucket.stop).argmin()]) for bucket in buckets)
    return [slice(start, stop) for start, stop in itertools.pairwise([first, *stops]) if start < stop]


def share_out(buckets: Sequence[slice], ranks: int) -> dict[int, int]:
    """Start of each bucket -> the rank that holds it.  A bucket goes to the rank that holds the least so far."""
    owners, given = dict[int, int](), [0] * ranks
    for bucket in buckets:
        owners[bucket.start] = rank = given.index(min(given))
        given[rank] += bucket.stop - bucket.start
    return owners


class Buckets(NamedTuple):
    """How the gradients of a rank lie in memory, and how they are summed over ranks."""

    multiple: int = 1  # elements
    nbytes: int = 4 << 20  # of a bucket
    least: int = 4 << 20  # bytes of the last buckets
    sharded: bool = False  # ZeRO-1: each rank holds the sum and the state of its parts of the buckets only
    unsplittable: frozenset[str] = frozenset()  # tensors that one rank holds whole; its parts are then whole buckets
    mirrored_shards: bool = False  # whether a rank also holds the parts of the rank before it
    shapes: Mapping[str, Shape] = MappingProxyType({})  # of the trained tensors, in memory order
    stacked: Mapping[str, Sequence[str]] = MappingProxyType({})  # name -> the tensors that are read as one
    regions: Sequence[Collection[str]] = ()  # the tensors of each region
    staging: int = 0  # bytes of buffers that a sum needs, for copy engines or for compressed terms

    def zeros(self, dtype: Any, zeros: Callable[[int, Any], Any] = np.zeros) -> Parameters:
        """Allocate memory in this layout."""
        counts = [len(self.shapes.keys() & names) for names in self.regions]
        return Parameters(self.shapes, dtype, self.stacked, zeros, self.multiple, counts)


class DataParallel:
    """Sums gradients over micro-batches and ranks, in place, in ``gradients.flat``.

    - ``reduction``: the ranks over which gradients are summed.
    - ``gradients``: a tensor that another stage of a pipeline holds too has a region of its own, so that its buckets
      and parts are the same on both stages.
    - ``ops``: the operations on the arrays of ``gradients``, such as those of NumPy.
    - ``buckets``: if ``sharded``, the length of ``gradients.flat`` must be a multiple of the number of ranks.
    - ``compress``: the format in which buckets are sent.  ``residual`` then holds the compression error of this rank
      so far.  ``exact`` ranks of ``reduction.replicas`` with consecutive numbers add exactly before they compress.
    - ``in_order``: the number of micro-batches of all ranks, for a deterministic sum.  The caller then calls ``add`` of
      ``tree`` in place of ``gradient_ready``.
    """

    def __init__(
        self, reduction: Reduction, gradients: Parameters, buckets: Buckets, ops: Any = numpy_ops, *,
        in_order: int | None = None, compress: str = "none", exact: int = 1,
    ) -> None:  # fmt: skip
        self.replicas, batch, self.others = reduction
        self.gradients, self.ops, self.exact, unsplittable = gradients, ops, exact, buckets.unsplittable
        self.sharded, self.mirrored_shards = buckets.sharded, buckets.mirrored_shards
        sizes = [size // gradients.flat.dtype.itemsize for size in (buckets.nbytes, buckets.least)]
        even = [buckets_of(region, gradients, *sizes) for region in gradients.regions]
        self._owners: dict[int, int] = {}  # start of a whole bucket -> its rank
        if self.sharded and unsplittable:
            ranks = self.replicas.size
            small = [buckets_of(region, gradients, *(size // ranks for size in sizes)) for region in gradients.regions]
            every = [cut_around(unsplittable, gradients, each, gradients.multiple // ranks) for each in small]
            # The last region comes first, so that its owners do not depend on the other regions.
            self._owners = share_out([bucket for buckets in reversed(every) for bucket in buckets], ranks)
        else:
            every = even
        self.buckets = [bucket for buckets in every for bucket in buckets]
        self._members = [
            {name for name, span in gradients.spans.items() if span.start < bucket.stop and bucket.start < span.stop}
            for bucket in self.buckets
        ]
        self.compress = "none" if self.replicas.size == 1 else compress
        self.residual: OwnedSlices | None = None
        if self.compress != "none":
            places = [place for bucket in self.buckets for place in self._compressed(bucket)]
            self.residual = OwnedSlices(gradients, places, gradients.flat.dtype)
        in_all = [bucket for buckets in even for bucket in buckets]
        self.tree = None if in_order is None else TreeSum(batch, in_order, gradients, in_all, ops)
        self._missing: list[set[str]] = []  # tensors without gradient, per bucket, in the last micro-batch
        self._in_flight: list[Work] = []

    def gradient_ready(self, name: str) -> None:
        """Called in the last micro-batch when a gradient is final.  Starts to sum each bucket that is now complete."""
        if self.replicas.size == 1:
            return
        self._missing = self._missing or [set(names) for names in self._members]
        for bucket, missing in zip(self.buckets, self._missing, strict=True):
            if name in missing:
                missing.remove(name)
                if not missing:
                    self._in_flight.append(self._sum(bucket))

    def _sum(self, bucket: slice) -> Any:
        """Start to sum a bucket over the ranks."""
        comm, x, how = self.replicas.comm, self.gradients.flat[bucket], dict[str, Any](async_op=True)
        if self._owners:
            return comm.reduce(x, self._owners[bucket.start], **how)
        if self.compress != "none":
            how["compress"] = self.compress
        if self.residual is not None:
            how["residual"] = self.residual.flat[bucket.start // self.exact : bucket.stop // self.exact]
        if self.sharded:
            return comm.reduce_scatter(x, self.gradients.flat[self._part(bucket)], **how)
        return comm.all_reduce(x, **how)

    def _compressed(self, bucket: slice) -> list[slice]:
        """The slices of a bucket that this rank compresses: one, or with ZeRO-1 the parts of all ranks of its rail."""
        place = self.replicas.rank % self.exact
        if not self.sharded or self.exact == 1:
            return [self.part(bucket, place, self.exact)]
        return [self.part(bucket, rank) for rank in range(place, self.replicas.size, self.exact)]

    def _wait(self) -> None:
        """Wait for the sums in flight."""
        for work in self._in_flight:
            work.wait()
        self._in_flight.clear()

    @contextmanager
    def dry_run(self) -> Iterator[None]:
        """A context for a step that only warms up.  It keeps the residual, and loads the kernel that adds it."""
        kept, self.residual = self.residual, None
        if kept is not None:
            from kos.comm.compression import BLOCK

            one, other = (self.gradients.zeros(BLOCK * self.exact, self.gradients.flat.dtype) for _ in range(2))
            self.replicas.comm.all_reduce(one, compress=self.compress, residual=other)
        try:
            yield
        finally:
            self.residual = kept

    def finish(self) -> None:
        """Called after the last backward.  Afterwards, ``gradients`` hold the sum over all micro-batches."""
        if self.tree is not None:
            self.tree.finish(whole=not self.sharded or bool(self._owners))
        self._wait()
        self._missing = []
        if self.mirrored_shards:
            comm, rank, size, flat = self.replicas.comm, self.replicas.rank, self.replicas.size, self.gradients.flat
            after, before = (rank + 1) % size, (rank - 1) % size
            for bucket in self.buckets:
                comm.send_recv(flat[self.part(bucket, rank)], flat[self.part(bucket, before)], after, before)

    def sum_shards(self, squares: Array) -> None:
        """Add up the squares of the shards over ``replicas``."""
        if self.sharded:
            self.replicas.comm.all_reduce(squares)

    def normed(self) -> list[slice] | None:
        """The slices whose squares this rank adds to the norm, so that each counts once; None: all of ``parts()``."""
        return self.own() if self.mirrored_shards else None

    def synchronize(self) -> None:
        """Wait for all gathers."""
        if self.replicas.size > 1:
            self.replicas.comm.synchronize()

    # ZeRO-1.

    def parts(self) -> list[slice]:
        """The slices that this rank updates: all, or its part of each bucket, and any that it mirrors."""
        if not self.sharded:
            return [slice(0, self.gradients.flat.size)]
        if not self.mirrored_shards:
            return self.own()
        ranks = sorted({self.replicas.rank, (self.replicas.rank - 1) % self.replicas.size})
        return [self.part(bucket, rank) for bucket in self.buckets for rank in ranks]

    def own(self) -> list[slice]:
        """This rank's part of each bucket, without those that it holds for another rank."""
        if self._owners:
            return [bucket for bucket in self.buckets if self._owners[bucket.start] == self.replicas.rank]
        return [*map(self._part, self.buckets)]

    def gather(self, weights: Parameters) -> Mapping[str, Array]:
        """Start to gather ``weights`` from all ranks.  The first read of a tensor waits until it is complete."""
        in_flight = [
            (bucket, self.all_gather(bucket, weights.flat[bucket], async_op=True))
            for bucket in reversed(self.buckets) if self.replicas.size > 1  # the forward reads them in this order
        ]  # fmt: skip

        def first(name: str) -> Array:
            members = weights.groups.get(name, (name,))
            start, stop = weights.spans[members[0]].start, weights.spans[members[-1]].stop
            for bucket, work in [*in_flight]:
                if bucket.start < stop and start < bucket.stop:
                    work.wait()
                    in_flight.remove((bucket, work))
            return weights[name]

        return OnFirstRead(weights, first)

    def all_gather(self, bucket: slice, values: Array, async_op: bool = False) -> Any:
        """Gather the ``values`` of a bucket, of which each rank has its part."""
        if self.replicas.size == 1:
            return None
        comm = self.replicas.comm
        if self._owners:
            return comm.broadcast(values, self._owners[bucket.start], async_op=async_op)
        part = self._part(bucket)
        mine = values[part.start - bucket.start : part.stop - bucket.start]
        return comm.all_gather(mine, values, async_op=async_op)

    def part(self, bucket: slice, rank: int, ranks: int = 0) -> slice:
        """The part of a bucket that ``rank`` updates.  ``ranks`` replaces the number of ranks that share it."""
        length = (bucket.stop - bucket.start) // (ranks or self.replicas.size)
        return slice(bucket.start + rank * length, bucket.start + (rank + 1) * length)

    def _part(self, bucket: slice) -> slice:
        return self.part(bucket, self.replicas.rank)
