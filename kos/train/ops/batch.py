"""The sequences of a step, or some of them, as they go from the data to the model."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import numpy as np

from kos.errors import DataError


class Batch(NamedTuple):
    """Arrays of one shape, (sequences, tokens), on the host or on a device; None: the data has no such field.

    ``targets`` are the tokens that follow; the loss leaves out -1.  ``document_starts`` are where each token's document
    begins in the sequence, of which a rank may hold some tokens only.  The loss of each target is multiplied by its
    weight in ``weights``, float32; the other fields are int32.
    """

    tokens: Any
    targets: Any = None
    document_starts: Any = None
    weights: Any = None

    def __repr__(self) -> str:
        """The dtype and shape of each field that is present."""
        present = ((name, field) for name, field in self._asdict().items() if field is not None)
        return f"Batch({', '.join(f'{name}={field.dtype} {tuple(field.shape)}' for name, field in present)})"

    def check(self) -> None:
        """DataError unless ``document_starts``, of whole sequences on the host, are what attention expects."""
        if (starts := self.document_starts) is None:
            return
        wrong = (starts < 0) | (starts > np.arange(starts.shape[1]))
        wrong[:, 1:] |= np.diff(starts) < 0
        if wrong.any():
            row, at = np.argwhere(wrong)[0]
            expected = f"from {starts[row, at - 1] if at else 0}, the start before it, to {at}"
            raise DataError(f"document start of token {at} of a sequence: expected {expected}, got {starts[row, at]}")

    def map(self, function: Callable[[Any], Any]) -> Batch:
        """``function`` of each field that is present."""
        return Batch(*(None if field is None else function(field) for field in self))

    def rows(self, rows: slice) -> Batch:
        """Views of some rows of each field."""
        return self.map(lambda field: field[rows])

    @classmethod
    def of_memory(cls, memory: Any, present: Collection[str]) -> Batch:
        """Views of int32 ``memory`` (fields, ...), in which the fields that are ``present`` lie one after another."""
        fields = dict(zip((name for name in cls._fields if name in present), memory, strict=True))
        if "weights" in fields:
            fields["weights"] = fields["weights"].view(np.float32)
        return cls(**fields)
