"""The part of a model that one rank holds and computes."""

from __future__ import annotations

from functools import cache
from itertools import accumulate
from typing import NamedTuple

Stages = tuple[tuple[int, ...], ...]
"""Of each rank of a pipeline, the stages of the model that it holds."""


class Local(NamedTuple):
    """One rank's part: its stage's layers, and of each layer its tensor-parallel part.

    ``vocabulary`` are rows of the embedding and the head.
    """

    layers: range
    vocabulary: range
    first: bool = True
    """Whether this stage looks up the tokens."""

    last: bool = True
    """Whether this stage makes the logits."""

    shard: int = 0
    """Which of the ``shards``, the tensor-parallel parts, this is."""

    shards: int = 1


@cache
def split_layers(layers: int, stages: Stages, head: float = 0.0) -> tuple[range, ...]:
    """The layers of each stage of a pipeline, such that the busiest rank has as little work as possible.

    ``stages``: the stages of each rank. The last stage also has the head, which takes as long as ``head`` layers. It
    may have no layer; every other stage has at least one. Each layer in turn goes to the rank that has the least work,
    and there to the shortest stage. Among equals, the last stage comes first, then the others in order.
    """
    ranks = {stage: held for held in stages for stage in held}
    last = len(ranks) - 1
    sizes, costs = [1] * last + [0], [1.0] * last + [head]

    def load(stage: int) -> tuple[float, float, bool, int]:
        return sum(costs[each] for each in ranks[stage]), costs[stage], stage < last, stage

    for _ in range(layers - last):
        shortest = min(ranks, key=load)
        sizes[shortest] += 1
        costs[shortest] += 1
    return tuple(range(end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True))
