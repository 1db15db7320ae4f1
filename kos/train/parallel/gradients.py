"""The sums of a rank's gradients, between the backward and the optimizer.

A gradient is summed over the micro-batches of a rank, and over dp and cp (``kos.train.parallel.data``). It is also
summed over tp, if each rank has the term of its own rows, or over the ranks of tp with the same kv head. That of an
embedding tied to the head is also summed over both ends of the pipeline.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Container
from functools import partial
from typing import Any

from kos.train.layers import LOOKUPS, Gradients, Weights
from kos.train.model.model import Model
from kos.train.parallel.data import DataParallel, TreeSum
from kos.train.parallel.pipeline import Pipeline


class GradientSums:
    """The sums of a rank whose first stage is ``model``, with ``micro_batches`` per step.

    ``tied_apart``: this rank holds only one of a tied embedding and its head. ``lookups``: with ``--deterministic``,
    the sum of the gradients of a tied embedding's lookups.  ``over_tp``: tensors that ``parallel`` sums over tp.
    """

    def __init__(
        self, model: Model, parallel: DataParallel, pipeline: Pipeline, micro_batches: int, tied_apart: bool,
        lookups: TreeSum | None = None, over_tp: Container[str] = (),
    ) -> None:  # fmt: skip
        self.model, self.parallel, self.pipeline, self.micro_batches = model, parallel, pipeline, micro_batches
        self.gradients, self.tied_apart, self.lookups = parallel.gradients, tied_apart, lookups
        placements = model.config.placements(model.config.local(0, model.tensor.size))
        whole = {name for name in self.gradients if placements[name].dim is None}
        self.replicated = {name for name in whole if name not in over_tp}
        """Tensors that all ranks of tp hold whole; ``copied``: those of which several hold the same part."""
        self.copied = {name for name in self.gradients if placements[name].copies > 1}

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
        if self.tied_apart and name == self.model.config.embedding:
            return  # in ``finish``: both ends of the pipeline in the same order
        if name in self.replicated and self.model.tensor.size > 1:
            return  # ``finish`` sums all of these in one call
        parts = self.gradients.groups.get(name, (name,))
        if copied := [self.gradients.spans[part] for part in parts if part in self.copied]:  # neighbours: k and v
            self.model.tensor.sum_copies(self.gradients.flat[copied[0].start : copied[-1].stop])
        for part in parts:
            self.parallel.gradient_ready(part)

    def _sum_replicated(self) -> None:
        """Sum the gradients of weights that every rank of tp holds whole: neighbours in memory (``plan_buckets``)."""
        names = [name for name in self.gradients if name in self.replicated]
        if names:
            first, last = (self.gradients.spans[name] for name in (names[0], names[-1]))
            self.model.tensor.sum_replicated(self.gradients.flat[first.start : last.stop])
        for name in names:
            self.parallel.gradient_ready(name)

    def finish(self) -> None:
        """Complete all sums, after the last backward."""
        name, in_order = self.model.config.embedding, self.parallel.tree is not None
        embedding = self.gradients.get(name)
        if self.model.tensor.size > 1 and not in_order:
            self._sum_replicated()
        if self.tied_apart and embedding is not None and not in_order:
            self.pipeline.sum_tied(embedding)
            self.parallel.gradient_ready(name)
        self.parallel.finish(whole=self.tied_apart)  # the other end of the pipeline may update other parts of it
        if embedding is None or not in_order:
            return
        if self.lookups is not None:  # the head's term is in the embedding's gradient, if this rank has the head
            self.lookups.finish()
            term = self.lookups.gradients[LOOKUPS]
            if self.model.holds_last:
                self.model.ops.add(embedding, term, embedding)
            else:
                self.model.ops.copy(term, embedding)
        if self.tied_apart:
            self.pipeline.sum_tied(embedding)
