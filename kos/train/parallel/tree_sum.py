"""``--deterministic``: a sum over all micro-batches of a step, with the same bits for any number of ranks.

The gradients are summed as a binary tree, ``((g0 + g1) + (g2 + g3)) + …``. A rank adds up the subtrees whose
leaves it has, tensor by tensor. Once a step the ranks exchange these sums, and add the rest of the tree. A subtree
needs memory until its neighbour is complete: log2(micro-batches of a rank) copies of the gradients. The exchange does
not overlap the backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from kos.train.model.parameters import Parameters
from kos.train.ops import Array
from kos.train.ops import numpy as numpy_ops
from kos.train.parallel.mesh import Axis


def run_of(total: int, rank: int, size: int) -> range:
    """The micro-batches of ``rank``, of ``total``: a run, as long as any other or one longer or shorter."""
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

    Ranks have a run of them each (``run_of``).  The lengths of ``gradients.flat`` and of each bucket must be multiples
    of the number of ranks.
    """

    def __init__(
        self, axis: Axis, total: int, gradients: Parameters, buckets: Sequence[slice], ops: Any = numpy_ops
    ) -> None:
        self.axis, self.gradients, self.buckets, self.ops = axis, gradients, buckets, ops
        runs = [run_of(total, rank, axis.size) for rank in range(axis.size)]
        self._roots = [subtrees(run.start, len(run))[1] for run in runs]
        self._completes, _ = subtrees(runs[axis.rank].start, len(runs[axis.rank]))
        self._places = places(self._completes)  # of each micro-batch in ``_sums``
        self._sums = [gradients, *(gradients.like() for _ in range(max(self._places)))]
        longest, most = max(b.stop - b.start for b in buckets), max(len(each) for each in self._roots)
        zeros, dtype = gradients.zeros, gradients.flat.dtype
        self._received = [zeros(longest, dtype) for _ in range(most if axis.size > 1 else 0)]

    def target(self, micro_batch: int) -> Parameters:
        """Memory for the gradients of this rank's micro-batch of that number, which no waiting sum uses."""
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
        """The sum, in the memory of the first term: first the halves of subtrees, then the rest from the last on."""
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
