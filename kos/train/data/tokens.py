"""A row of tokens over the files that hold them, and where documents begin in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kos.train.data.token_files import Shard


class Separator(NamedTuple):
    """A token that begins documents, or that ``ends`` them."""

    token: int
    ends: bool


class Tokens:
    """A row of tokens and their mask over one or more shards, which stay where they are, in files or in memory.

    An array as a shard is one whose tokens all count in the loss.  ``documents`` are the places where
    documents begin, from 0 on and increasing, or the token between them.
    """

    stride = 1
    """Sequences that are drawn start at multiples of this."""

    fill = 1.0
    """The share of sequences that is tokens; the rest is padding."""

    def __init__(
        self, shards: Sequence[Shard | NDArray[Any]], documents: NDArray[np.int64] | Separator | None = None
    ) -> None:
        self.shards, self.documents = [x if isinstance(x, Shard) else Shard(x) for x in shards], documents
        self._ends = np.cumsum([len(shard) for shard in self.shards])

    @property
    def size(self) -> int:
        """The tokens of all shards."""
        return int(self._ends[-1])

    def __len__(self) -> int:
        return self.size

    @property
    def masked(self) -> bool:
        """Whether there may be tokens that the loss does not count."""
        return any(shard.mask is not None for shard in self.shards)

    @property
    def begins(self) -> NDArray[np.int64]:
        """``documents`` that are places."""
        assert isinstance(self.documents, np.ndarray)
        return self.documents

    def window(self, start: int, length: int) -> tuple[NDArray[Any], NDArray[np.uint8]]:
        """The tokens ``start`` to ``start + length``, and their mask: 1 if the loss counts the token."""
        parts = [shard.arrays() for shard in self._slices(start, length) or [self.shards[0][:0]]]
        tokens, masks = zip(*parts, strict=True)
        return parts[0] if len(parts) == 1 else (np.concatenate(tokens), np.concatenate(masks))

    def _slices(self, start: int, length: int) -> list[Shard]:
        parts = list[Shard]()
        shard = int(np.searchsorted(self._ends, start, side="right"))
        start -= int(self._ends[shard - 1]) if shard else 0
        while length > 0:
            parts.append(self.shards[shard][start : start + length])
            length -= len(parts[-1])
            shard, start = shard + 1, 0
        return parts

    def part(self, start: int, stop: int) -> Tokens:
        """The tokens ``start`` to ``stop``, which are whole documents."""
        inside = slice(*np.searchsorted(self.begins, [start, stop]))
        return Tokens(self._slices(start, stop - start) or [self.shards[0][:0]], np.unique(self.begins[inside] - start))

    def padding(self, start: int, length: int) -> int:
        """How many of the last tokens of ``window`` are padding."""
        return 0

    def document_starts(self, start: int, window: NDArray[Any]) -> NDArray[np.int32]:
        """Where the document of each token of ``window``, from ``start`` on, begins in it: 0 if it began before."""
        if isinstance(self.documents, Separator):
            at = np.arange(len(window), dtype=np.int32)
            begins = window == self.documents.token
            if self.documents.ends:
                begins[1:] = begins[:-1]
            return np.maximum.accumulate(np.where(begins, at, 0), dtype=np.int32)
        if self.documents is None:
            return np.zeros(len(window), np.int32)
        places = np.arange(start, start + len(window))
        begun = self.documents[np.searchsorted(self.documents, places, side="right") - 1]
        return np.maximum(begun - start, 0).astype(np.int32)
