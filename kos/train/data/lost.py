"""What of the messages of a chat is not in the text that a chat template makes of it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

Span = tuple[int, int]


def lost(whole: str, messages: Sequence[Mapping[str, Any]], turns: Mapping[int, Span]) -> dict[int, str]:
    """The fields of messages of which ``whole``, the text of the chat, lacks a part, by the number of the message.

    ``turns`` are the numbers of the answers to check, and where the text of each is.  All other messages are checked
    too, except other answers, whose text a template may leave out.
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
    """Whether ``content`` is in ``text``: apart from spaces, as it is or escaped as in JSON."""
    content = content.strip()
    if content in text:
        return True
    forms = content, *(json.dumps(content, ensure_ascii=ascii)[1:-1] for ascii in (True, False))
    kept = "".join(text.split())
    return any("".join(form.split()) in kept for form in forms)
