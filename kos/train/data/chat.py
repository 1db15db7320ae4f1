"""Renders chats as text with the chat template in the folder of a tokenizer.

Templates are written in Jinja, with the extensions of transformers (src/transformers/utils/chat_template_utils.py). The
function ``strftime_now`` gives the date of the run (``--template-date``), at midnight.
"""

from __future__ import annotations

import json
import re
import reprlib
from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from datetime import date, datetime, time
from functools import cached_property, partial
from itertools import accumulate, chain, pairwise
from os.path import commonprefix
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from kos.errors import ConfigError, DataError, install
from kos.train.data.messages import COUNTING, JSON, REASONING, Span, check_arguments, checked, counts, lost

MARK = "\ud800"
"""Half of a surrogate pair, which no valid text contains.

A message with this content shows where the template writes the content: the rendered texts differ from there on.
"""

PLACE = "\ud801"
"""Another half. Around the number of a message, in place of its content, it shows where the template writes it."""

LAYOUTS = 1024
"""Layouts of chats that a template keeps."""


class Parts(list[tuple[str, bool]]):
    """The parts of a document that a template has rendered: (text, whether the loss counts it)."""

    lost = 0
    """The number of messages of which the template left out a part."""

    lacking: Sequence[str] = ()
    """The missing end of the generation prompt, for each answer that does not begin with the whole prompt."""


_Rendered = tuple[str, list[Span]]
"""A rendered text, and the (start, stop) of each ``{% generation %}`` block in it."""

_Render = partial[_Rendered]


class _Layout(NamedTuple):
    """How a template writes all chats whose messages differ in their contents alone.

    ``lost`` are the numbers of the messages whose content the template does not write. ``texts`` are the texts before,
    between and after the contents. ``turns`` maps the number of an answer to the start and stop of its turn: each is a
    number of a text and a place in it.  ``turns`` is None if one rendering of such a chat does not show its turns.
    ``prompted`` tells whether each answer begins with the whole generation prompt, whatever the contents are.
    """

    lost: list[int]
    texts: list[str]
    turns: dict[int, tuple[tuple[int, int], tuple[int, int]]] | None
    prompted: bool

    def turns_in(self, whole: str, contents: Sequence[str]) -> dict[int, tuple[int, int]] | None:
        """The (start, stop) of the turns in ``whole``, the text of a chat with these contents.

        None if ``turns`` is None, or if ``whole`` has other texts around the contents, with or without the spaces at
        their ends, or has these texts with and without the spaces.
        """
        starts, at = [0], len(self.texts[0])
        if self.turns is None or not whole.startswith(self.texts[0]):
            return None
        for content, text in zip(contents, self.texts[1:], strict=True):
            fits = {len(each) for each in (content, content.strip()) if whole.startswith(each + text, at)}
            if len(fits) != 1:
                return None
            starts.append(at + fits.pop())
            at = starts[-1] + len(text)
        if at != len(whole):
            return None
        return {number: (starts[a] + b, starts[c] + d) for number, ((a, b), (c, d)) in self.turns.items()}


class ChatTemplate:
    """A chat template: its Jinja ``source``, read from the file ``path``.  It writes ``date``, by default today's.

    ``special`` maps the names that the template may use, such as ``eos_token``, to special tokens.
    """

    def __init__(self, source: str, special: Mapping[str, str], path: Path, date: date | None = None) -> None:
        self.source, self.special, self.path = source, special, path
        self.date = date or datetime.now().date()
        self._written: list[str] = []  # the pieces of the text that is being rendered
        self._spans: list[tuple[int, int]] = []
        self._layouts: dict[str, _Layout] = {}

    def documents(
        self, line: Mapping[str, Any], messages: Any, where: str, split_turns: bool = False, allow_lost: bool = False
    ) -> list[Parts]:
        """Render a chat.  Returns a list of documents.

        There is one document, or with ``split_turns`` one for each answer that counts.  Such a document ends with its
        answer, and only this answer counts in it.

        If the template has ``{% generation %}`` blocks, the text in these blocks counts.  Otherwise the turns of the
        assistant count.  To find a turn, the template renders the messages before it with the generation prompt, and
        then the messages up to and including it.  What the second text adds to the first is the turn, whichever fields
        of the message it comes from.  If the second text does not begin with the first, the turn begins after the part
        of the generation prompt that all answers have.  An answer does not count if its message or ``line`` has
        ``weight`` 0 or ``train`` false.  The template also receives the fields ``tools`` and ``chat_template_kwargs``
        of ``line``.

        Raises DataError, whose text begins with ``where``, if

        - ``messages`` is not a list of messages, each with a role and either text or tool calls,
        - the template cannot render them, or does not use one of their keys or the tools,
        - the template leaves out a message, such as one with a role that it does not know, or leaves out content of a
          message without tool calls, unless ``allow_lost`` is set, or
        - the template has no blocks and renders a turn differently once later messages follow.
        """
        render = self._renderer(line, where)
        if not isinstance(messages, list) or not messages:
            raise DataError(f"{where}: expected a list of messages, got {reprlib.repr(messages)}")
        chat = _with_tables(render, self._checked(messages, where), where)
        counted = [number for number in _answers(chat) if all(counts(each, where) for each in (line, chat[number - 1]))]
        if split_turns:
            return [self._parts(render, chat[:number], [number], where, allow_lost) for number in counted]
        return [self._parts(render, chat, counted, where, allow_lost)]

    def prompt(
        self, messages: Sequence[Mapping[str, Any]], where: str, tools: Sequence[Any] | None = None
    ) -> tuple[str, str]:
        """The text that the assistant continues, and what the template writes after an answer.

        Raises DataError as ``documents`` does.
        """
        render = self._renderer({"tools": tools}, where)
        chat = _with_tables(render, self._checked(messages, where), where)
        self._unwritten(render, chat, where, add_generation_prompt=True)
        prompt, _ = render(chat, add_generation_prompt=True)
        answered, _ = render([*chat, {"role": "assistant", "content": MARK}])
        return prompt, answered.rpartition(MARK)[2]

    def _renderer(self, line: Mapping[str, Any], where: str) -> _Render:
        """What renders messages with the tools and options of ``line``."""
        options = _options(line, where)
        if options["tools"] and not self.uses("tools"):
            raise DataError(f"{where}: expected a chat template that uses tools, got one that does not, of {self.path}")
        return partial(self._render, options, where)

    def uses(self, key: str) -> bool:
        return any(re.search(rf"\b{re.escape(name)}\b", self.source) for name in (key, *REASONING * (key in REASONING)))

    def _checked(self, messages: Sequence[Any], where: str) -> list[dict[str, Any]]:
        return [checked(number, each, where, self.uses, self.path) for number, each in enumerate(messages, 1)]

    def _parts(
        self, render: _Render, messages: Sequence[Any], counted: Collection[int], where: str, allow_lost: bool
    ) -> Parts:
        """The text of ``messages`` in parts.  The answers in the messages with the numbers ``counted`` count."""
        unwritten = self._unwritten(render, messages, where, allow_lost)
        layout, (whole, turns), lacking = self._layout(render, messages), render(messages), list[str]()
        if self._has_spans:
            turns = self._counted_spans(render, messages, counted, turns, where)
            unsure = counted if not layout.prompted else ()
            lacking = [self._start(render, whole, messages, number)[1] for number in unsure]
        else:
            known = layout.turns_in(whole, [each.get("content", "") for each in messages]) or {}
            unsure = counted if known and not self._asks_alike else ()
            asked = ((number, render(messages[: number - 1], add_generation_prompt=True)[0]) for number in unsure)
            if any(text != whole[: known[number][0]] for number, text in asked):
                known = {}
            turns = []
            for number in counted:
                done = turns[-1][1] if turns else 0
                turn, rest = (
                    (known[number], "") if known else self._turn(render, whole, messages, number, done, where)
                )
                turns.append(turn)
                lacking.append(rest)
        parts, done = Parts(), 0
        for start, stop in turns:
            parts += [(whole[done:start], False), (whole[start:stop], True)]
            done = stop
        parts.append((whole[done:], False))
        parts.lacking = [*filter(None, lacking)]
        parts.lost = len(unwritten | self._incomplete(whole, messages, counted, turns, where, allow_lost))
        return parts

    def _counted_spans(
        self, render: _Render, messages: Sequence[Any], counted: Collection[int], spans: list[Span], where: str
    ) -> list[Span]:
        """The ``{% generation %}`` blocks that belong to the answers ``counted``; ``spans`` are all blocks."""
        answers = _answers(messages)
        if len(counted) == len(answers):
            return spans
        ends = [len(render(messages[:number])[1]) for number in answers]  # blocks are in the order of messages
        if sorted(ends) != ends or ends[-1] != len(spans):
            expected = f"{{% generation %}} blocks that no later message changes ({self.path})"
            raise DataError(f"{where}: expected {expected}, got {len(spans)} of {ends}")
        return [span for at, span in enumerate(spans) if answers[bisect_right(ends, at)] in counted]

    def _incomplete(
        self, whole: str, messages: Sequence[Any], counted: Collection[int], turns: Sequence[Span], where: str,
        allowed: bool,
    ) -> set[int]:  # fmt: skip
        """The numbers of the messages of which the template left out a part in ``whole``.

        Unless this is ``allowed``, raises DataError if it left out content of a message without tool calls.
        """
        stops = [stop for _, stop in turns] if len(turns) == len(counted) else []
        places = [*pairwise([0, *stops])] if stops else [(0, len(whole)) for _ in counted]
        found = lost(whole, messages, dict(zip(counted, places, strict=True)))
        for number, key in found.items():
            if key == "content" and not messages[number - 1].get("tool_calls") and not allowed:
                expected = f"a chat template that writes the whole content of a message ({self.path})"
                got = f"message {number} without a part of {reprlib.repr(messages[number - 1]['content'])}"
                raise DataError(f"{where}: expected {expected}, got {got}; --allow-lost-content accepts this")
        return {*found}

    def _turn(
        self, render: _Render, whole: str, messages: Sequence[Any], number: int, done: int, where: str
    ) -> tuple[Span, str]:
        """The (start, stop) of an assistant's turn in ``whole``, the text of all messages, and what it lacks.

        ``number`` is that of the message, and ``done`` is where the turn before it ends.
        """
        start, lacking = self._start(render, whole, messages, number)
        upto = render(messages[:number])[0] if number < len(messages) else whole
        if lacking or number == 1:
            done = max(done, len(render(messages[: number - 1])[0]) if number > 1 else 0)
        if whole.startswith(upto) and done <= start <= len(upto):
            return (start, len(upto)), lacking
        expected = f"a chat template that does not change a turn for those after it ({self.path})"
        how = "add {% generation %} blocks to the template"
        if len(messages) > number:
            how = f"--split-turns makes a text for each answer, or {how}"
        raise DataError(f"{where}: expected {expected}, got another text up to message {number}; {how}")

    def _start(self, render: _Render, whole: str, messages: Sequence[Any], number: int) -> tuple[int, str]:
        """Where an answer begins in ``whole``, and the missing end of the generation prompt before it ("" if complete).

        The first characters of an answer may happen to equal the rest of the prompt.  So other answers to the same
        messages, whose text is MARK, show which part of the prompt all answers have.
        """
        earlier, message = messages[: number - 1], messages[number - 1]
        asked = render(earlier, add_generation_prompt=True)[0] if earlier else whole
        if earlier and whole.startswith(asked):
            return len(asked), ""
        marked = {key: MARK if value and key in ("content", *REASONING) else value for key, value in message.items()}
        texts = [whole, asked]
        for answer in ({"role": "assistant", "content": MARK}, marked):
            with suppress(DataError):  # of a template that looks into contents
                texts.append(render([*earlier, answer, *([] if earlier else messages[1:])])[0])
        start = len(commonprefix(texts))  # noqa: RUF071
        return start, asked[start:] if earlier else ""

    def _layout(self, render: _Render, messages: Sequence[Any], **how: bool) -> _Layout:
        """The layout of a chat; ``how`` is how it is rendered."""
        left_out = {"content", *COUNTING}
        others = [{name: each[name] for name in each if name not in left_out} for each in messages]
        key = json.dumps([render.args[0], how, others, ["content" in each for each in messages]], default=repr)
        if key not in self._layouts:
            if len(self._layouts) == LAYOUTS:
                self._layouts.clear()
            self._layouts[key] = self._make_layout(render, messages, how)
        return self._layouts[key]

    def _unwritten(
        self, render: _Render, messages: Sequence[Any], where: str, allowed: bool = False, **how: bool
    ) -> set[int]:
        """The numbers of the messages that the template leaves out; raises DataError unless this is ``allowed``.

        A message with tool calls may be written without its content, as in LLaMA 3.1's template.
        """
        found = set[int]()
        for number in self._layout(render, messages, **how).lost:
            message = messages[number - 1]
            role, content = message["role"], message.get("content", "")
            if not content.strip() or message.get("tool_calls"):
                continue
            other = [*messages[: number - 1], {**message, "content": content + PLACE}, *messages[number:]]
            if render(other, **how) == render(messages, **how):
                found.add(number)
                system = "; write the role 'system' instead" * (role == "developer")
                got = f"the role {role!r} in message {number}, whose content would be lost{system}"
                if not allowed:
                    raise DataError(f"{where}: expected roles that {self.path} writes, got {got}")
        return found

    def _make_layout(self, render: _Render, messages: Sequence[Any], how: Mapping[str, bool]) -> _Layout:
        places = [f"{PLACE}{number}{PLACE}" for number in range(1, len(messages) + 1)]
        marked = [
            {**each, "content": place} if "content" in each else each
            for each, place in zip(messages, places, strict=True)
        ]
        lost, texts, turns, done = list[int](), [""], dict[int, Any](), 0
        with suppress(DataError):  # of a template that looks into contents
            whole, _ = render(marked, **how)
            lost = [number for number, place in enumerate(places, 1) if place not in whole]
            texts = re.split(f"{PLACE}[0-9]+{PLACE}", whole)
            known = not (self._has_spans or how) and re.findall(f"{PLACE}[0-9]+{PLACE}", whole) == places
            starts = [*accumulate(map(len, chain.from_iterable(zip(texts, places, strict=False))), initial=0)][::2]
            answers = _answers(messages) if not how else []
            for number in answers if known else answers[-1:] * self._has_spans:
                asked = render(marked[: number - 1], add_generation_prompt=True)[0] if number > 1 else ""
                upto, _ = render(marked[:number])
                if not upto.startswith(asked):
                    return _Layout(lost, texts, None, False)
                if known and (number == 1 or len(asked) < done or not whole.startswith(upto)):
                    known = False
                if known:
                    done, at = len(upto), [bisect_right(starts, len(each)) - 1 for each in (asked, upto)]
                    turns[number] = (at[0], len(asked) - starts[at[0]]), (at[1], done - starts[at[1]])
            return _Layout(lost, texts, turns if known else None, True)
        return _Layout(lost, texts, None, False)

    def _render(
        self, options: Mapping[str, Any], where: str, messages: Sequence[Any], add_generation_prompt: bool = False
    ) -> _Rendered:
        values = {"messages": messages, "add_generation_prompt": add_generation_prompt}
        self._written.clear()
        self._spans.clear()
        try:
            for text in self._template.generate({**self.special, **options, **values}):
                self._written.append(text)
        except (ConfigError, DataError):
            raise
        except Exception as error:  # a template is a program
            raise DataError(f"{where}: expected a chat that {self.path} renders, got {error}") from None
        return "".join(self._written), [*self._spans]

    @cached_property
    def _has_spans(self) -> bool:
        return re.search(r"\{%-?\s*generation\s*-?%\}", self.source) is not None

    @cached_property
    def _asks_alike(self) -> bool:
        """Whether the generation prompt is certain to be the same after all messages.

        It is if ``add_generation_prompt`` is used only as the test of an ``if`` outside of loops and other tests, and
        if this ``if`` uses only constants and options.
        """
        from jinja2 import nodes

        def names(tree: nodes.Node) -> list[str]:
            return [each.name for each in tree.find_all(nodes.Name)]

        whole, flag = self._template.environment.parse(self.source), nodes.Name("add_generation_prompt", "load")
        asks = [each for each in whole.body if isinstance(each, nodes.If) and each.test == flag]
        used = [name for each in asks for name in names(each)]
        made = {"messages", *(each.name for each in whole.find_all(nodes.Name) if each.ctx == "store")}
        alone = names(whole).count(flag.name) == used.count(flag.name) == len(asks)
        return alone and not made & {*used} and not any(each.find(nodes.Call) for each in asks)

    @cached_property
    def _template(self) -> Any:
        try:
            from jinja2 import TemplateError, ext, nodes, sandbox
        except ImportError:
            how = install("chat")
            raise ConfigError(f"chat data: expected the package jinja2 for {self.path}, got none ({how})") from None

        class Generation(ext.Extension):
            """The tag ``{% generation %}``, by which a template marks what the assistant says."""

            tags = {"generation"}  # noqa: RUF012

            def parse(self, parser: Any) -> Any:
                line = next(parser.stream).lineno
                body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
                return nodes.CallBlock(self.call_method("mark"), [], [], body).set_lineno(line)

            def mark(self, caller: Callable[[], str]) -> str:
                text, start = caller(), sum(map(len, written))
                spans.append((start, start + len(text)))
                return text

        def fail(message: str) -> NoReturn:
            raise TemplateError(message)

        written, spans = self._written, self._spans
        extensions = [Generation, ext.loopcontrols]
        made = sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        made.filters["tojson"] = lambda x, **options: json.dumps(x, **{"ensure_ascii": False, **options})
        made.globals["raise_exception"] = fail
        made.globals["strftime_now"] = datetime.combine(self.date, time()).strftime
        try:
            return made.from_string(self.source)
        except TemplateError as error:
            raise DataError(f"{self.path}: expected a chat template, got {error}").about("tokenizer") from None


def _answers(messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """The numbers of the assistant's messages, counted from 1."""
    return [number for number, each in enumerate(messages, 1) if each["role"] == "assistant"]


def _with_tables(render: _Render, chat: list[dict[str, Any]], where: str) -> list[dict[str, Any]]:
    """``chat`` with the arguments of tool calls in the form that the template expects.

    OpenAI's format has them as a string of JSON.  If the template would write this string in quotes, the calls get the
    parsed object instead.  Raises DataError if the arguments are no JSON object.
    """
    calls = [call.get("function", call) for message in chat for call in message.get("tool_calls", ())]
    texts = [call["arguments"] for call in calls if isinstance(call, dict) and isinstance(call.get("arguments"), str)]
    for call in calls:
        if isinstance(call, dict) and "arguments" in call:
            check_arguments(call["arguments"], where)
    with suppress(DataError):  # a template may expect a table
        whole = render(chat)[0] if texts else ""
        if not any(json.dumps(text, ensure_ascii=False) in whole for text in texts):
            return chat

    def read(call: Mapping[str, Any]) -> dict[str, Any]:
        changed = {"function": read(call["function"])} if isinstance(call.get("function"), dict) else {}
        changed |= {"arguments": json.loads(call["arguments"])} if call.get("arguments") in texts else {}
        return {**call, **changed}

    return [{**each, "tool_calls": [*map(read, each["tool_calls"])]} if "tool_calls" in each else each for each in chat]


def _options(line: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The variables of a template other than the messages.  The fields of the line have the names that TRL uses."""
    tools, others = line.get("tools"), line.get("chat_template_kwargs") or {}
    if line.get("functions"):
        how = 'write each of them into "tools", as {"type": "function", "function": …}'
        raise DataError(f"{where}: expected the field 'tools', got its earlier name 'functions'; {how}")
    try:
        tools = JSON.decode(tools) if isinstance(tools, str) else tools
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: expected JSON in the field 'tools', got {error}") from None
    if not isinstance(tools, list | None) or not isinstance(others, dict):
        got = reprlib.repr({"tools": tools, "chat_template_kwargs": others})
        raise DataError(f"{where}: expected a list of tools and a table of chat_template_kwargs, got {got}")
    return {"tools": tools, "documents": None, **others}


def read_chat_template(tokenizer: str, date: date | None = None) -> ChatTemplate | None:
    """The chat template in the folder that ``tokenizer``, a value of ``--tokenizer``, names; None if it has none.

    It writes the ``date``, by default that of today.
    """
    folder = Path(tokenizer) if Path(tokenizer).is_dir() else Path(tokenizer).parent
    path, alone = folder / "tokenizer_config.json", folder / "chat_template.jinja"  # transformers writes the latter
    if tokenizer == "bytes":
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
    path = alone if alone.is_file() else path
    return ChatTemplate(source, special, path, date) if isinstance(source, str) else None
