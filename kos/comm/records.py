"""Failures as ranks keep them and send them to each other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from kos.errors import CollectiveError, CollectiveMismatch, CollectiveTimeout, KosError, RankLost, RendezvousError

Error = TypeVar("Error", bound=KosError)
_CLASSES = {kind.__name__: kind for kind in (CollectiveMismatch, CollectiveTimeout, RankLost, RendezvousError)}


def again(error: Error, text: object = None) -> Error:
    """A copy of the error without its traceback, whose frames hold arrays."""
    new = type(error)(str(error) if text is None else str(text))
    new.ranks, new.orderly = error.ranks, error.orderly
    return new


def blaming(error: Error, ranks: Iterable[int]) -> Error:
    """``error`` with these ranks of the world."""
    error.ranks = tuple(ranks)
    return error


def to_record(error: KosError, length: int | None = None) -> list[Any]:
    """A failure in the form in which ranks send it to each other, with at most ``length`` characters of its text."""
    return [type(error).__name__, str(error)[:length], list(error.ranks)]


def from_record(record: Sequence[Any]) -> KosError:
    """The failure of another rank; an unknown class becomes CollectiveError."""
    kind, text, ranks = record
    return blaming(_CLASSES.get(kind, CollectiveError)(text), ranks)
