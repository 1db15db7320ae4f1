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
"""Characters that a Hugging Face tokenizer is given at once: longer text is split, at a line's end."""

PORTION = PIECE * len(os.sched_getaffinity(0))
"""Characters that it encodes at once, on all cores: each needs some 50 bytes."""


class Piece(NamedTuple):
    """A piece of a document: its share of the document's parts, and whether it is its first and its last."""

    parts: Parts
    first: bool
    last: bool
    rendered: bool



def cut(texts: Iterable[str]) -> Iterator[str]:
    """One text, which comes in parts of any length, in pieces of up to PIECE characters.

    They end with lines, if possible where no space is on either side: pre-tokenizers combine several spaces.
    """
    up_to = rf".{{0,{PIECE - 1}}}"
    piece = re.compile(rf"(?s){up_to}(?:(?<=\S)\n(?=\S)|\Z)|{up_to}\n|.{{{PIECE}}}")
    rest = ""
    for text in texts:
        rest, at = rest + text, 0
        while len(rest) - at > PIECE and (match := piece.match(rest, at)):  # what follows does not change it
            yield match[0]
            at = match.end()
        rest = rest[at:]
    yield from (match[0] for match in piece.finditer(rest) if match[0])



def pieces_of(documents: Documents) -> Iterator[Piece]:
    """The pieces of documents, of each at least one."""
    for document in documents:
        parts = document.parts if isinstance(document, Document) else ()
        bounds = [0, *itertools.accumulate(len(text) for text, _ in parts)]
        texts = cut(document if isinstance(document, Text) else [str(document)])
        start, text = 0, cast(str | None, next(texts, ""))
        while text is not None:
            following, stop = next(texts, None), start + len(text)
            within = [
                (text[max(0, begin - start) : max(0, end - start)], counted)
                for begin, end, (_, counted) in zip(bounds, bounds[1:], parts, strict=False)
                if begin <= stop and start <= end
            ]
            rendered = isinstance(document, Document) and document.rendered
            yield Piece(within or [(text, True)], start == 0, following is None, rendered)
            text, start = following, stop



def portions(documents: Documents, skip: int) -> Iterator[list[Piece]]:
    """Pieces that are encoded at once: either all of chats, or none."""
    portion, size = list[Piece](), 0
    for piece in itertools.islice(pieces_of(documents), skip, None):
        if portion and (size >= PORTION or piece.rendered != portion[0].rendered):
            yield portion
            portion, size = [], 0
        portion.append(piece)
        size += sum(len(text) for text, _ in piece.parts)
    if portion:
        yield portion
