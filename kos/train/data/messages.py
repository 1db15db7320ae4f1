"""Checks records and the messages of chats, gives them kos's names, and finds what a template leaves out."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kos.errors import DataError
from kos.train.config import WITHOUT, unique_keys

CHATS = ("messages", "conversations", "instruction")
FORMS = ("text", "completion", *CHATS)
"""The fields by which a record is a text, a prompt with its completion, or a chat.  It may have one of them."""

OPTIONAL = ("input", "system", "tools")
"""Fields that only some records of a file may have."""

REFUSED = ("rejected", "label", "sample_weight", "loss_weight")
"""Fields of preference data, and weights of records.  ``label`` is refused only if it is true or false (TRL's KTO)."""

ROLES = ("system", "developer", "user", "assistant", "tool")
SHAREGPT = {"human": "user", "gpt": "assistant", "model": "assistant", "observation": "tool", "function": "tool"}
"""ShareGPT's names of roles, and the names of kos.  ShareGPT's messages have the keys ``from`` and ``value``.

A message from ``function_call`` has the tool calls of an assistant as JSON: one, or a list.
"""

KNOWN = ("role", "content", "weight", "train", "name", "tool_call_id")
"""Keys that a message may have even if the template does not use them."""

COUNTING = {"weight": "a weight of 0 or 1", "train": "train true or false"}
"""Keys of a message or of a record, and their values.  If a value is 0 or false, the loss does not count the text."""

REASONING = ("reasoning_content", "thinking", "reasoning")
"""Synonyms of one key.  A template may use any of them."""

JSON = json.JSONDecoder(object_pairs_hook=unique_keys)
"""Reads JSON; ValueError also for a duplicate key."""


def counts(given: Mapping[str, Any], where: str) -> bool:
    """Whether the loss counts a message or a record.  DataError for values of COUNTING other than 0 and 1."""
    for key, values in COUNTING.items():
        if (got := given.get(key)) not in (None, 0, 1):
            raise DataError(f"{where}: expected {values}, got {reprlib.repr(got)}")
    return all(given.get(key) in (None, 1) for key in COUNTING)


def checked(number: int, given: Any, where: str, uses: Callable[[str], bool], path: Path) -> dict[str, Any]:
    """Check one message.  Returns it with kos's names of keys and roles, without keys whose value is None.

    ``uses`` tells whether the chat template, which is in ``path``, uses a key.
    """
    if isinstance(given, dict) and "from" in given and "role" not in given:
        given = {{"from": "role", "value": "content"}.get(key, key): value for key, value in given.items()}
        if given["role"] == "function_call":
            given = _calling(given, where)
        given["role"] = SHAREGPT.get(str(given["role"]), given["role"])
    message = {key: value for key, value in given.items() if value is not None} if isinstance(given, dict) else {}
    role, content = message.get("role"), message.get("content")
    if role is None:
        raise DataError(f"{where}: expected messages with role and content, got {reprlib.repr(given)}")
    if role not in ROLES:
        how = "; write the role 'tool'" * (role == "function")
        raise DataError(f"{where}: expected a role of {', '.join(ROLES)}, got {role!r}{how}")
    parts = content if isinstance(content, list) else []
    texts = [each.get("text") for each in parts if isinstance(each, dict) and each.get("type") == "text"]
    if texts and len(texts) == len(parts):
        if texts == [None]:
            del message["content"]
        elif all(isinstance(each, str) for each in texts):
            message["content"] = "".join(map(str, texts))
    if wrong := _wrong_content(message, number):
        raise DataError(f"{where}: expected {wrong}")
    if counts(message, where) and message.get("train") and role != "assistant":  # axolotl would train on it
        raise DataError(f"{where}: expected train only in messages of assistants, got True with the role {role}")
    if calls := message.get("tool_calls"):
        message["tool_calls"] = [*map(_with_arguments, calls)]
    for key, value in message.items():
        if value and key not in KNOWN and not uses(key):
            expected = f"keys of a message that {path} uses, or {', '.join(KNOWN)}"
            raise DataError(f"{where}: expected {expected}, got {key!r} in message {number}")
    reasoning = next((message[key] for key in REASONING if key in message), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _wrong_content(message: Mapping[str, Any], number: int) -> str:
    """The error about the content or the tool calls of a message (expected, got, remedy), or "" if they are right."""
    content, calls, assistant = message.get("content"), message.get("tool_calls"), message["role"] == "assistant"
    if "function_call" in message:
        how = 'write "tool_calls": [{"type": "function", "function": …}]'
        return f"tool_calls in message {number}, got their earlier form 'function_call'; {how}"
    if message.get("refusal"):
        how = "put its text into content to train on it, or remove the line"
        return f"content in message {number}, got a refusal, which templates do not write; {how}"
    if not (isinstance(calls or [], list) and all(isinstance(call, dict) for call in calls or ())):
        return f"a list of tables as the tool_calls of message {number}, got {reprlib.repr(calls)}"
    if isinstance(content, str) or (content is None and assistant and calls):
        return ""
    if content is None:
        return f"content{' or tool_calls' * assistant} in message {number}, got {'neither' if assistant else 'none'}"
    if isinstance(content, list):
        return f"text, or a list of parts of text, as the content of message {number}, got {reprlib.repr(content)}"
    return f"text as the content of message {number}, got {reprlib.repr(content)}; write it as a string of JSON"


def _with_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    """The tool call, in which arguments that are null or a blank string become "{}": a call without arguments."""
    if isinstance(call.get("function"), dict):
        return {**call, "function": _with_arguments(call["function"])}
    given = call.get("arguments", {})
    empty = given is None or (isinstance(given, str) and not given.strip())
    return {**call, "arguments": "{}"} if empty else {**call}


def check_arguments(given: Any, where: str) -> None:
    """DataError unless the arguments of a tool call are an object, or a string of JSON with one."""
    try:
        table = JSON.decode(given) if isinstance(given, str) else given
        json.dumps(table, allow_nan=False, default=repr)  # JSON has no NaN
    except (ValueError, RecursionError) as error:
        got = f"{reprlib.repr(given)} ({error})"
        raise DataError(f"{where}: expected JSON as the arguments of a tool call, got {got}") from None
    if not isinstance(table, dict):
        got = reprlib.repr(given)
        raise DataError(f"{where}: expected a JSON object as the arguments of a tool call, got {got}")


def _calling(given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """ShareGPT's message with tool calls, in OpenAI's form."""
    try:
        calls = JSON.decode(given["content"])
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        got = f"{reprlib.repr(given.get('content'))} ({error})"
        raise DataError(f"{where}: expected JSON as the value from function_call, got {got}") from None
    functions = [{"type": "function", "function": call} for call in (calls if isinstance(calls, list) else [calls])]
    return {**given, "role": "assistant", "content": None, "tool_calls": functions}


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


# --- the fields of records ------------------------------------------------------------------------------


def renamed(fields: Mapping[str, Any], names: Mapping[str, str], where: str) -> dict[str, Any]:
    """A record with the names of kos.  If ``names`` has a form, fields of other forms are ignored."""
    missing = [name for name, field in names.items() if field not in fields and name not in OPTIONAL]
    if missing:
        wanted = f"{names[missing[0]]!r} (--fields {missing[0]}={names[missing[0]]})"
        raise DataError(f"{where}: expected the field {wanted}, got the fields {', '.join(fields)}")
    forms = {**{name: name for name in FORMS}, "prompt": "completion", "output": "instruction"}
    form = next((forms[name] for name in names if name in forms), None)
    others = {
        name: value for name, value in fields.items()
        if name not in names.values() and (form is None or forms.get(name, form) == form)
    }  # fmt: skip
    return others | {name: fields[field] for name, field in names.items() if field in fields}


def check_refused(fields: Mapping[str, Any], where: str) -> None:
    """DataError for a field that would change what a chat or a completion teaches, and that kos does not read."""
    for name in REFUSED:
        if (got := fields.get(name)) is not None and (name != "label" or isinstance(got, bool)):
            expected = f"a chat or a completion without the field {name!r}, which the trainer does not read"
            raise DataError(f"{where}: expected {expected}, got {reprlib.repr(got)} (see {WITHOUT})")


def messages_of(fields: Mapping[str, Any], name: str, where: str) -> Any:
    """The messages in the field ``name`` of a record, with its ``system`` prompt first."""
    messages = fields[name]
    if name == "instruction":
        asked = "\n".join(text_of(fields, each, where) for each in ("instruction", "input") if fields.get(each))
        answer = text_of(fields, "output", where)
        messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
        if fields.get("history"):
            raise DataError(f"{where}: expected messages for a chat of several turns, got the field 'history'")
    if not isinstance(messages, list) or not fields.get("system"):
        return messages
    return [{"role": "system", "content": text_of(fields, "system", where)}, *messages]


def text_of(fields: Mapping[str, Any], name: str, where: str) -> str:
    text = fields.get(name)
    if not isinstance(text, str):
        got = f"{name}: {reprlib.repr(text)}" if name in fields else f"the fields {', '.join(fields)}"
        raise DataError(f"{where}: expected text in the field {name!r}, got {got}")
    return encodable(text, name, where)


def encodable(text: str, name: str, where: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        got = f"{text[error.start]!r} at character {error.start}"
        raise DataError(f"{where}: expected text in the field {name!r}, got {got}") from None
    return text
