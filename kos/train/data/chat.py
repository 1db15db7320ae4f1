"""Chats as text: their messages, rendered by the chat template in the folder of a tokenizer.

Templates are Jinja, in the dialect of transformers (src/transformers/utils/chat_template_utils.py), but without
``strftime_now``: data must not depend on the day.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from itertools import chain
from os.path import commonprefix
from pathlib import Path
from typing import Any, NoReturn

from kos.errors import ConfigError, DataError, install

ROLES = ("system", "developer", "user", "assistant", "tool")

MARK = "\ue000"
"""A private character, which no text has: a text and the same with this at its end have the text in common."""


class ChatTemplate:
    """The Jinja ``source`` of a template, from the file ``path``, and the special tokens by which it calls them."""

    def __init__(self, source: str, special: Mapping[str, str], path: Path) -> None:
        self.source, self.special, self.path = source, special, path

    def parts(self, line: Mapping[str, Any], where: str) -> list[tuple[str, bool]]:
        """The text of the chat ``line["messages"]``, in parts, and whether the loss counts each.

        An assistant's part begins after what the template adds to ask for it, and ends with the turn: what the template
        adds for the message, whichever of its fields that comes from. It counts, unless the message has the ``weight``
        0.  The template also gets ``tools`` and ``chat_template_kwargs`` of the line.
        DataError, which begins with ``where``: no list of messages with a role and text or calls of tools, or none that
        the template renders; a template that changes what comes before an answer.
        """
        messages = _checked(line["messages"], where)
        render = partial(self._render, _options(line, where), where)
        whole, parts, done = render(messages), [], 0
        for number, message in enumerate(messages, 1):
            if message["role"] != "assistant":
                continue
            before = ""
            if number == 1:  # a template may not render the chat before it, which is empty
                asked = render([{"role": "assistant", "content": MARK}, *messages[1:]])
            else:
                before = render(messages[: number - 1])
                asked = render(messages[: number - 1], add_generation_prompt=True)
            start, stop = _common(whole, asked), _end_of_turn(render, whole, messages, number)
            if stop is None or not max(done, len(before)) <= start <= stop:
                expected = "a chat template that does not change a turn for those after it"
                raise DataError(f"{where}: expected {expected} ({self.path}), got another text up to message {number}")
            parts += [(whole[done:start], False), (whole[start:stop], message.get("weight") != 0)]
            done = stop
        return [*parts, (whole[done:], False)]

    def _render(
        self, options: Mapping[str, Any], where: str, messages: Sequence[Any], add_generation_prompt: bool = False
    ) -> str:
        try:
            values = {"messages": messages, "add_generation_prompt": add_generation_prompt}
            return str(self._template.render({**self.special, **options, **values}))
        except (ConfigError, DataError):
            raise
        except Exception as error:  # a template is a program
            raise DataError(f"{where}: expected a chat that {self.path} renders, got {error}") from None

    @cached_property
    def _template(self) -> Any:
        try:
            from jinja2 import TemplateError, ext, sandbox
        except ImportError:
            how = install("chat")
            raise ConfigError(f"chat data: expected the package jinja2 for {self.path}, got none ({how})") from None

        class Generation(ext.Extension):
            """``{% generation %}``: marks what an assistant says, where a template has it."""

            tags = {"generation"}  # noqa: RUF012

            def parse(self, parser: Any) -> Any:
                next(parser.stream)
                return parser.parse_statements(("name:endgeneration",), drop_needle=True)

        def fail(message: str) -> NoReturn:
            raise TemplateError(message)

        extensions = [Generation, ext.loopcontrols]
        made = sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        made.filters["tojson"] = lambda x, **options: json.dumps(x, **{"ensure_ascii": False, **options})
        made.globals["raise_exception"] = fail
        try:
            return made.from_string(self.source)
        except TemplateError as error:
            raise DataError(f"{self.path}: expected a chat template, got {error}") from None


def _end_of_turn(
    render: Callable[[Sequence[Any]], str], whole: str, messages: Sequence[Any], number: int
) -> int | None:
    """Where the turn of a message, counted from 1, ends in ``whole``, the text of all; None if that is not known."""
    so_far = render(messages[:number])
    if whole.startswith(so_far):
        return len(so_far)
    after, end = _end_of_content(render, so_far, messages[:number], number), None
    if after is not None:  # a template that writes the last turn in another way: what follows the content is the same
        ending, end = so_far[after:], _end_of_content(render, whole, messages, number)
        end = None if end is None or not whole.startswith(ending, end) else end + len(ending)
    return end


def _end_of_content(
    render: Callable[[Sequence[Any]], str], text: str, messages: Sequence[Any], number: int
) -> int | None:
    """Where the content of a message, counted from 1, ends in ``text``, which is that of ``messages``.

    None if the template leaves the content out.
    """
    message = messages[number - 1]
    marked = {**message, "content": (message.get("content") or "") + MARK}
    other = render([*messages[: number - 1], marked, *messages[number:]])
    return None if other == text else _common(text, other)


def _common(a: str, b: str) -> int:
    """How many characters two texts have in common, from their start on."""
    return len(commonprefix([a, b]))  # noqa: RUF071


def _checked(messages: Any, where: str) -> list[dict[str, Any]]:
    """``messages``, if each has a role and text, or an assistant's calls of tools, and a weight of 0 or 1 if any."""
    if not isinstance(messages, list) or not messages:
        raise DataError(f"{where}: expected a list of messages, got {reprlib.repr(messages)}")
    for message in messages:
        known = isinstance(message, dict) and "role" in message
        text = message.get("content") if known else None
        calls = message.get("tool_calls") if known and text is None and message["role"] == "assistant" else None
        if not isinstance(text, str) and not (isinstance(calls, list) and calls):
            raise DataError(f"{where}: expected messages with role and content, got {reprlib.repr(message)}")
        if message["role"] not in ROLES:
            raise DataError(f"{where}: expected a role of {', '.join(ROLES)}, got {message['role']!r}")
        if message.get("weight") not in (None, 0, 1):
            raise DataError(f"{where}: expected a weight of 0 or 1, got {reprlib.repr(message['weight'])}")
    return messages


def _options(line: Mapping[str, Any], where: str) -> dict[str, Any]:
    """What a template gets beside the messages: as from transformers and, of the fields of a line, from TRL."""
    tools, others = line.get("tools"), line.get("chat_template_kwargs") or {}
    try:
        tools = json.loads(tools) if isinstance(tools, str) else tools
    except ValueError as error:
        raise DataError(f"{where}: expected JSON in the field 'tools', got {error}") from None
    if not isinstance(tools, list | None) or not isinstance(others, dict):
        got = reprlib.repr({"tools": tools, "chat_template_kwargs": others})
        raise DataError(f"{where}: expected a list of tools and a table of chat_template_kwargs, got {got}")
    return {"tools": tools, "documents": None, **others}


def read_chat_template(tokenizer: str) -> ChatTemplate | None:
    """The template in the folder of ``tokenizer``, as ``--tokenizer`` names it; None if there is none."""
    folder = Path(tokenizer) if Path(tokenizer).is_dir() else Path(tokenizer).parent
    path, alone = folder / "tokenizer_config.json", folder / "chat_template.jinja"  # transformers writes the latter
    if tokenizer in ("bytes", "chars"):
        return None
    try:
        found = [each for each in (folder / "special_tokens_map.json", path) if each.is_file()]
        settings = dict(chain.from_iterable(json.loads(each.read_text("utf-8")).items() for each in found))
        source = alone.read_text("utf-8") if alone.is_file() else settings.get("chat_template")
        if isinstance(source, list):  # several, by name
            source = {each["name"]: each["template"] for each in source}.get("default")
        named = {key: token for key, token in settings.items() if key.endswith("_token") and token}
        special = {key: token["content"] if isinstance(token, dict) else token for key, token in named.items()}
    except (OSError, ValueError, AttributeError, KeyError, TypeError) as error:
        raise DataError(f"{path}: expected JSON with a chat_template, got {error!r}") from None
    return ChatTemplate(source, special, alone if alone.is_file() else path) if isinstance(source, str) else None
