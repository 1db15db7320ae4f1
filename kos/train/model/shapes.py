"""Local: the part of a model that one rank holds and computes."""

from __future__ import annotations

from typing import NamedTuple


class Local(NamedTuple):
    """Shapes of one rank's part: its stage's layers, and of each layer its tensor-parallel part.

    ``up`` counts the columns that the activation function takes. ``vocabulary`` are rows of the embedding and the head.
    """

    layers: range
    heads: int
    kv_heads: int
    intermediate: int
    up: int
    vocabulary: range
    first: bool = True
    """Whether this stage looks up the tokens."""

    last: bool = True
    """Whether this stage makes the logits."""


def split_layers(layers: int, stages: int, stage: int) -> range:
    """The layers of a pipeline stage; earlier stages take one more where they do not divide, the last has the head."""
    each, more = divmod(layers, stages)
    start = stage * each + min(stage, more)
    return range(start, start + each + (stage < more))
