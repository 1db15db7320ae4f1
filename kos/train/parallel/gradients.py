"""The sums of a rank's gradients, between the backward and the optimizer.

A gradient is summed over the micro-batches of a rank, and over dp and cp (``kos.train.parallel.data``). Some tensors
have copies on several ranks of tp or of a pipeline. Their gradients are then summed over these ranks. Such tensors are:

- tensors that every rank of tp holds whole, if each rank has only the terms of its own rows;
- key/value heads, if there are fewer heads than ranks of tp;
- a tied embedding, on the first and the last stage of a pipeline.

The order of these sums matters, because all copies must have the same bits. In the sum over dp, the order of additions
depends on the place of an element in its bucket and on the hosts of the ranks. Both may differ between dp groups. So
the ranks of one dp group have equal sums, but two dp groups may not. The sum over copies therefore comes last, and adds
in rank order. Compressed gradients are summed over copies first, so that all copies have equal compression residuals.
After the sum over dp, the first rank then broadcasts its result to the other holders.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from kos.train.ops import Array
from kos.train.ops.parameters import Parameters, overlap
from kos.train.parallel.data import DataParallel, TreeSum, make_buckets
from kos.train.parallel.mesh import ALONE, Axis
from kos.train.parallel.pipeline import Pipeline

if TYPE_CHECKING:
    from kos.comm.communicator import Communicator

Weights = Mapping[str, Array]

LOOKUPS = "lookups"
"""The name of the gradient of a tied embedding's lookups; ``--deterministic`` sums it apart from the head's."""


class Gradients(NamedTuple):
    """Where a backward puts the gradients of weights, whether it adds to them, and what it calls when one is final.

    ``of`` has the gradients of all weights except the frozen ones. ``final`` is called with the name of each tensor or
    group of tensors, in the order in which their gradients lie in memory. Tensors that every rank of tp holds whole are
    an exception: they lie last.
    """

    of: Weights
    accumulate: bool
    final: Callable[[str], object]


class GradientSums:
    """The sums of a rank whose first stage is ``model``."""

    def __init__(self, model: Any, parallel: DataParallel, pipeline: Pipeline) -> None:
        config, tensor, gradients = model.config, model.tensor, parallel.gradients
        self.model, self.parallel, self.gradients = model, parallel, gradients
        self.micro_batches, embedding = pipeline.schedule.micro_batches, config.embedding
        copies, placements = dict[str, Axis](), config.placements(config.local(0, tensor.size))
        for name in gradients:  # by tensor, the ranks of tp that hold the same part, if there are several
            if (split := placements[name].along("tp")) is None or split.copies > 1:
                copies[name] = tensor.axis if split is None else tensor.copies
        self._holders: dict[str, Communicator] = {}
        """For each tensor with copies outside the ranks of ``parallel``: the communicator of its holders."""
        if tensor.size > 1 and parallel.tree is None:
            self._holders |= {name: axis.comm for name, axis in copies.items()}
        self.normed = {name for name in gradients if copies.get(name, ALONE).rank == 0}
        """The tensors that count in the norm of the gradient on this rank: each part on one of those that hold it."""
        if config.tie_word_embeddings and model.holds_first != model.holds_last:  # tied across stages
            if pipeline.ends is not None and embedding in gradients:
                self._holders[embedding] = pipeline.ends
            self.normed -= {embedding} if model.holds_last else set()
        self.lookups: TreeSum | None = None
        """With ``--deterministic``, the sum of the gradients of a tied embedding's lookups."""
        if (tree := parallel.tree) and config.tie_word_embeddings and model.holds_first and embedding in gradients:
            table, multiple = {LOOKUPS: gradients[embedding].shape}, gradients.multiple
            apart = Parameters(table, gradients.flat.dtype, None, gradients.zeros, multiple)
            longest = max(bucket.stop - bucket.start for bucket in parallel.buckets)
            buckets = make_buckets(apart.flat.size, multiple, longest, longest)
            self.lookups = TreeSum(tree.axis, tree.total, apart, buckets, parallel.ops)

    def of(self, micro_batch: int) -> Gradients:
        """Where a backward writes gradients, and the function to call when one is complete."""
        if self.parallel.tree is not None:
            into: Weights = self.parallel.tree.target(micro_batch)
            if self.lookups is not None:
                into = ChainMap[str, Any](self.lookups.target(micro_batch), into)  # type: ignore[arg-type]
            return Gradients(into, False, partial(self._add_to_tree, micro_batch))
        final = self._complete if micro_batch + 1 == self.micro_batches else lambda name: None
        return Gradients(self.gradients, micro_batch > 0, final)

    def _add_to_tree(self, micro_batch: int, name: str) -> None:
        tree = self.lookups if name == LOOKUPS else self.parallel.tree
        assert tree is not None
        if name in tree.gradients:  # else it is frozen
            tree.add(name, micro_batch)

    def _complete(self, name: str) -> None:
        """This rank's gradient of a tensor or a group is complete: the sums over other ranks begin."""
        for part in self.gradients.groups.get(name, (name,)):
            if part not in self._holders or self.parallel.compress == "none":
                self.parallel.gradient_ready(part)

    def finish(self) -> None:
        """Complete all sums, after the last backward."""
        compressed, flat = self.parallel.compress != "none", self.gradients.flat
        if compressed:
            for span, holders in self._spans():
                holders.all_reduce(flat[span])
            for name in self._holders:
                self.parallel.gradient_ready(name)
        self.parallel.finish()
        if self.lookups is not None:
            self._add_lookups(self.lookups)
        parts = self.parallel.parts()
        pieces = [(both, holders) for span, holders in self._spans() for part in parts if (both := overlap(part, span))]
        for piece, holders in pieces:
            if compressed:
                holders.broadcast(flat[piece], 0)
            else:  # of two terms, the order is the same
                holders.all_reduce(flat[piece], deterministic=holders.size > 2)

    def _spans(self) -> Iterator[tuple[slice, Communicator]]:
        """The spans of the tensors of ``_holders``.  Neighbours with the same holders are joined (``plan_buckets``)."""
        last, of_last = slice(0, 0), None
        for name, span in self.gradients.spans.items():
            holders = self._holders.get(name)
            if holders is of_last and span.start == last.stop:
                last = slice(last.start, span.stop)
                continue
            if of_last is not None:
                yield last, of_last
            last, of_last = span, holders
        if of_last is not None:
            yield last, of_last

    def _add_lookups(self, lookups: TreeSum) -> None:
        """Add the gradients of a tied embedding's lookups to that of the head, if this rank has the head."""
        lookups.finish()
        embedding, term = self.gradients[self.model.config.embedding], lookups.gradients[LOOKUPS]
        if self.model.holds_last:
            self.model.ops.add(embedding, term, embedding)
        else:
            self.model.ops.copy(term, embedding)
