"""Pieces of documents, which a tokenizer encodes one by one, and portions of pieces, which it encodes at once."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple, cast

from kos.train.data.documents import Document, Text

Documents = Iterable[str | Document | Text]
Parts = list[tuple[str, bool]]  # of a text, and whether the loss counts each

PIECE = 1 << 20
"""The most characters of a piece for a Hugging Face tokenizer.  Longer text is cut where this changes no token."""

PORTION = PIECE * len(os.sched_getaffinity(0))
"""Characters that it encodes at once, on all cores: each needs some 50 bytes."""


class Piece(NamedTuple):
    """A piece of a document.  ``parts`` are the document's parts within it.  ``last``: it is the last piece."""

    parts: Parts
    before: str
    """The character before the piece; empty if it is the first one."""
    last: bool
    rendered: bool


def cut(texts: Iterable[str], where: re.Pattern[str]) -> Iterator[str]:
    """Cut one text into pieces.  ``texts`` are consecutive parts of it, of any length.

    Each piece ends where a match of ``where`` ends: at the last one within PIECE characters, or else at the first one
    after them.
    """
    rest, at, searched = "", 0, 0
    for text in texts:
        rest, at, searched = rest[at:] + text, 0, max(0, searched - at - 1)
        while len(rest) - at > PIECE:
            stop = _last(where, rest, at + 1, at + PIECE) if searched < at + PIECE else None
            if stop is None:
                found = where.search(rest, max(at + PIECE, searched))
                searched = len(rest)
                if found is None:
                    break
                stop = found.end()
            yield rest[at:stop]
            at = searched = stop
    if at < len(rest):
        yield rest[at:]


def _last(where: re.Pattern[str], text: str, start: int, stop: int) -> int | None:
    """The end of the last match in ``text[start:stop]``."""
    first = stop
    while first > start:
        first = max(start, stop - 8 * (stop - first + 50))
        if found := [match.end() for match in where.finditer(text, first, stop)]:
            return found[-1]
    return None


def pieces_of(documents: Documents, where: re.Pattern[str] | None) -> Iterator[Piece]:
    """The pieces of documents, at least one of each.  They are cut at ``where``; None: each document is one piece."""
    for document in documents:
        parts = document.parts if isinstance(document, Document) else ()
        bounds = [0, *itertools.accumulate(len(text) for text, _ in parts)]
        given = document if isinstance(document, Text) else [str(document)]
        texts = iter(["".join(given)]) if where is None else cut(given, where)
        start, text, before = 0, cast(str | None, next(texts, "")), ""
        while text is not None:
            following, stop = next(texts, None), start + len(text)
            within = [
                (text[max(0, begin - start) : max(0, end - start)], counted)
                for begin, end, (_, counted) in zip(bounds, bounds[1:], parts, strict=False)
                if begin <= stop and start <= end
            ]
            rendered = isinstance(document, Document) and document.rendered
            yield Piece(within or [(text, True)], before, following is None, rendered)
            before, text, start = text[-1:], following, stop


def portions(documents: Documents, where: re.Pattern[str] | None, skip: int) -> Iterator[list[Piece]]:
    """Pieces that are encoded at once: either all of chats, or none."""
    portion, size = list[Piece](), 0
    for piece in itertools.islice(pieces_of(documents, where), skip, None):
        if portion and (size >= PORTION or piece.rendered != portion[0].rendered):
            yield portion
            portion, size = [], 0
        portion.append(piece)
        size += sum(len(text) for text, _ in piece.parts)
    if portion:
        yield portion
