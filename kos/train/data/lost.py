"""Finds content of messages that a chat template leaves out."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

Span = tuple[int, int]


def lost(whole: str, messages: Sequence[Mapping[str, Any]], turns: Mapping[int, Span]) -> dict[int, str]:
    """Compare the messages of a chat with ``whole``, the text that the template makes of them.

    Returns the incomplete messages: the number of each, and the field of which ``whole`` lacks a part.  ``turns`` maps
    the number of each answer to check to the (start, stop) of its text in ``whole``.  Messages of all other roles are
    checked too.  Answers that are not in ``turns`` are not checked: a template may leave out their text.
    """
    found = dict[int, str]()
    for number, message in enumerate(messages, 1):
        answer = message["role"] == "assistant"
        if answer and number not in turns:
            continue
        text = whole[slice(*turns[number])] if answer else whole
        for key in ("content", *["reasoning_content"] * answer):
            if not _has(text, message.get(key) or ""):
                found.setdefault(number, key)
    return found


def _has(text: str, content: str) -> bool:
    """Whether ``content`` is in ``text``, either unchanged or escaped as in a JSON string.  Spaces are ignored."""
    content = content.strip()
    if content in text:
        return True
    forms = content, *(json.dumps(content, ensure_ascii=ascii)[1:-1] for ascii in (True, False))
    kept = "".join(text.split())
    return any("".join(form.split()) in kept for form in forms)
