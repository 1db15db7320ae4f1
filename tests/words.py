"""The words of a command that a test makes of defaults and of what differs from them."""

from __future__ import annotations

from collections.abc import Iterable

REPEATED = ("--data", "--eval-data", "--text-field", "--encoding", "--tracker", "--lora-targets", "--freeze")
"""Flags of ``kos train`` that take several values."""


def merged(words: Iterable[object]) -> list[str]:
    """The words, with only the last of each flag: a command refuses a flag that is given twice."""
    groups = list[list[str]]()
    for word in map(str, words):
        if word.startswith("--") or not groups:
            groups.append([word])
        else:
            groups[-1].append(word)
    names = [group[0].partition("=")[0].replace("--no-", "--", 1) for group in groups]
    last = {name: number for number, name in enumerate(names)}
    kept = (name in REPEATED or last[name] == number for number, name in enumerate(names))
    return [word for group, keep in zip(groups, kept, strict=True) if keep for word in group]
