"""Where the text before a tokenizer may be cut: only where the tokens of the pieces are those of the whole text.

This is known of tokenizers that consist of certain parts.  All other tokenizers are given whole documents.  Some of the
known parts add something to the start of a text, as Metaspace of Llama 2 adds ▁.  With such a tokenizer, each piece but
the first is encoded together with the character before it, whose tokens are then left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

ANYWHERE = re.compile(r"(?s)(?<=.)")
_WORDS = re.compile(r"(?<=\S)\n(?=[^\W_])|(?<=[0-9A-Za-z])(?=\r\n)")
"""Where pre-tokenizers of words split: after a line's end, or before one of two characters.

GPT-2's splits ``\r`` from ``\n`` before a letter, but not at the end of a text.
"""
_LINES = re.compile(r"\n(?=[^\W_])")
"""Where a vocabulary without tokens of two lines splits."""

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
_IN_LINES = ("Digits", "Punctuation", "Metaspace")
"""Pre-tokenizers that split only at certain characters: none of them ends a line or is a letter."""


def where_to_cut(tokenizer: Mapping[str, Any]) -> re.Pattern[str] | None:
    """The pattern that matches before each place for a cut, for the content of a ``tokenizer.json``; None: no place."""
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
    return _LINES if _is_of_lines(tokenizer["model"], bool(levels)) else None


def adds_to_start(tokenizer: Mapping[str, Any]) -> bool:
    """Whether a tokenizer for which there is a place to cut may add something to the start of a text."""
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
    """Whether a normalizer changes each line alone, except for a prefix of the text."""
    replaced = normalizer.get("pattern", {}).get("String", "\n")
    return normalizer["type"] in _NORMALIZERS or (normalizer["type"] == "Replace" and not {*"\r\n"} & {*replaced})


def _kind(step: Mapping[str, Any]) -> str | None:
    """``words``: a pre-tokenizer that splits at ``_WORDS``; ``lines``: one that needs only one line.  None: unknown."""
    kind, pattern = step["type"], step.get("pattern", {})
    if kind == "Split" and "Regex" in pattern:
        isolates = (step["behavior"], step["invert"]) in (("Isolated", False), ("Removed", True))
        return "words" if isolates and pattern["Regex"] in _PATTERNS else None
    if kind in ("Whitespace", "WhitespaceSplit") or (kind == "ByteLevel" and step.get("use_regex", True)):
        return "words"
    in_line = kind == "Split" and not {*"\r\n"} & {*pattern.get("String", "\n")}
    return "lines" if in_line or kind in (*_IN_LINES, "ByteLevel") else None


def _is_of_lines(model: Mapping[str, Any], byte_level: bool) -> bool:
    """Whether the model is BPE, and no token has the end of a line and then a letter or digit."""
    vocab, end = model["vocab"], "Ċ" if byte_level else "\n"
    if end not in vocab and model.get("byte_fallback"):
        end = "<0x0A>"
    two_lines = re.compile(rf"(?s){re.escape(end)}(?!\Z|[\s▁ĊĠčĉ]|{re.escape(end)})")
    other = any(model.get(key) for key in ("continuing_subword_prefix", "end_of_word_suffix", "dropout"))
    is_bpe = model["type"] == "BPE" and end in vocab  # a character that the vocabulary has not may vanish
    return is_bpe and not other and not any(map(two_lines.search, vocab))
