"""Failures as ranks keep them and send them to each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kos.errors import CollectiveError, CollectiveMismatch, CollectiveTimeout, KosError, RankLost, RendezvousError

_CLASSES = {kind.__name__: kind for kind in (CollectiveMismatch, CollectiveTimeout, RankLost, RendezvousError)}


def to_record(error: KosError, length: int | None = None) -> list[Any]:
    """A failure in the form in which ranks send it to each other, with at most ``length`` characters of each text."""
    parts = ((each and each[:length]) for each in (error.call, error.expected, error.got))
    return [type(error).__name__, str(error)[:length], list(error.ranks), *parts]


def from_record(record: Sequence[Any]) -> KosError:
    """The failure of another rank; an unknown class becomes CollectiveError."""
    kind, text, ranks, *parts = record
    error = _CLASSES.get(kind, CollectiveError)(text, ranks=ranks)
    if parts:
        error.call, error.expected, error.got = parts
    return error
