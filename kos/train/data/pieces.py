"""Cuts long texts into pieces, which a tokenizer encodes one by one, and portions, which it encodes at once.

A cut is allowed only if the tokens of the pieces are the tokens of the whole text.  This module knows this for
tokenizers that consist of certain components.  All other tokenizers receive whole documents.  Some of these components
add something to the start of a text: Metaspace of Llama 2 adds ▁. With such a tokenizer, each piece except the first is
encoded together with the character before it, and the tokens of this character are then removed.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

from kos.train.data.documents import Document, Text

ANYWHERE = re.compile(r"(?s)(?<=.)")
_WORDS = re.compile(r"(?<=\S)\n(?=[^\W_])|(?<=[0-9A-Za-z])(?=\r\n)")
"""Where pre-tokenizers that match words always split: after a line end ``\n``, or before ``\r\n``.

The pre-tokenizer of GPT-2 splits ``\r`` from ``\n`` before a letter, but not at the end of a text.
"""
_LINES = re.compile(r"\n(?=[^\W_])")
"""Where a tokenizer splits if no token of its vocabulary spans two lines."""

_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SHORT, _SPACES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)", r"\s*[\r\n]+|\s+(?!\S)|\s+"
_PATTERNS = {
    f"{words}|{digits}| ?[^\\s\\p{{L}}\\p{{N}}]+{ends}*|{_SPACES}"
    for words, ends in (
        (rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+", r"[\r\n]"),
        *(("|".join(rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}{upper}{_LOWER}{lower}{short}" for upper, lower in ("*+", "+*")),
           r"[\r\n/]") for short in ("", f"{_SHORT}?")),
    )
    for digits in (r"\p{N}", r"\p{N}{1,3}")
}  # fmt: skip
"""Regular expressions of Split that match words.

They are those of Qwen 2 and 3, of Llama 3, OLMo 2 and SmolLM3, of Mistral Nemo, and of o200k of tiktoken.  They split
at ``_WORDS``, and what they match does not depend on earlier matches.
"""

_NORMALIZERS = ("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "Prepend")
_WITHIN_LINES = ("Digits", "Punctuation", "Metaspace")
"""Pre-tokenizers that split only at certain characters, which are neither line ends nor letters."""


def where_to_cut(tokenizer: Mapping[str, Any]) -> re.Pattern[str] | None:
    """A pattern whose matches end where a text may be cut, for the content of a ``tokenizer.json``; None: nowhere."""
    added, steps = tokenizer.get("added_tokens") or (), _steps(tokenizer.get("pre_tokenizer"), "pretokenizers")
    local = all(map(_is_local, _steps(tokenizer.get("normalizer"), "normalizers")))
    if not local or any(token.get("lstrip") or {*"\r\n"} & {*token["content"]} for token in added):
        return None
    kinds = [_kind(step) for step in steps]
    if None in kinds:
        return None
    levels = [number for number, step in enumerate(steps) if step["type"] == "ByteLevel"]
    if "words" in (kinds[: levels[0] + 1] if levels else kinds):  # after ByteLevel, no character ends a line
        return None if added and adds_to_start(tokenizer) else _WORDS  # a space may come before "\n" after a token
    return _LINES if _splits_at_lines(tokenizer["model"], bool(levels)) else None


def adds_to_start(tokenizer: Mapping[str, Any]) -> bool:
    """Whether a tokenizer may add something to the start of a text.  Valid if ``where_to_cut`` is not None."""
    steps = _steps(tokenizer.get("pre_tokenizer"), "pretokenizers")
    adds = {"ByteLevel": ("add_prefix_space", False), "Metaspace": ("prepend_scheme", "never")}
    options = [(step, *adds[step["type"]]) for step in steps if step["type"] in adds]
    normalizers = _steps(tokenizer.get("normalizer"), "normalizers")
    return any(step.get(key) != no for step, key, no in options) or any(x["type"] == "Prepend" for x in normalizers)


def _steps(part: Mapping[str, Any] | None, key: str) -> Sequence[Mapping[str, Any]]:
    """The steps of a normalizer or of a pre-tokenizer: those in ``key`` of a Sequence, or itself."""

    def flat(part: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
        for each in part[key] if part["type"] == "Sequence" else ():
            yield from flat(each)
        if part["type"] != "Sequence":
            yield part

    return [*flat(part)] if part else []


def _is_local(normalizer: Mapping[str, Any]) -> bool:
    """Whether a normalizer changes each line independently of the others, apart from a prefix of the text."""
    replaced = normalizer.get("pattern", {}).get("String", "\n")
    return normalizer["type"] in _NORMALIZERS or (normalizer["type"] == "Replace" and not {*"\r\n"} & {*replaced})


def _kind(step: Mapping[str, Any]) -> str | None:
    """``words``: this pre-tokenizer splits at ``_WORDS``.  ``lines``: it treats each line alone.  None: unknown."""
    kind, pattern = step["type"], step.get("pattern", {})
    if kind == "Split" and "Regex" in pattern:
        isolates = (step["behavior"], step["invert"]) in (("Isolated", False), ("Removed", True))
        return "words" if isolates and pattern["Regex"] in _PATTERNS else None
    if kind in ("Whitespace", "WhitespaceSplit") or (kind == "ByteLevel" and step.get("use_regex", True)):
        return "words"
    in_line = kind == "Split" and not {*"\r\n"} & {*pattern.get("String", "\n")}
    return "lines" if in_line or kind in (*_WITHIN_LINES, "ByteLevel") else None


def _splits_at_lines(model: Mapping[str, Any], byte_level: bool) -> bool:
    """Whether the model is BPE, and no token has a letter or digit after a line end."""
    vocab, end = model["vocab"], "Ċ" if byte_level else "\n"
    if end not in vocab and model.get("byte_fallback"):
        end = "<0x0A>"
    two_lines = re.compile(rf"(?s){re.escape(end)}(?!\Z|[\s▁ĊĠčĉ]|{re.escape(end)})")
    other = any(model.get(key) for key in ("continuing_subword_prefix", "end_of_word_suffix", "dropout"))
    is_bpe = model["type"] == "BPE" and end in vocab  # a character that is not in the vocabulary may vanish
    return is_bpe and not other and not any(map(two_lines.search, vocab))


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
