"""Chats with calls of tools: which tokens count, beside transformers' recorded marks, and what is refused."""

import json
import re
from datetime import date
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kos.errors import ConfigError, DataError
from kos.train import fit
from kos.train import source as source_of_runs
from kos.train.config.flags import parse
from kos.train.data import Tokens
from kos.train.data.batches import load_data
from kos.train.data.chat import ChatTemplate, read_chat_template
from tests.train.chat_templates import CHATML, GEMMA, LLAMA, MISTRAL, MISTRAL_LAST, QWEN, SPECIAL, THINKING, bare
from tests.train.of_transformers import transformers
from tests.train.refusal import refused
from tests.train.test_loss_masks import CHATML as NO_TOOLS
from tests.train.test_loss_masks import data_text, read, write_lines
from tests.train.tokenizer_files import byte_level_bpe

CALL = "CALL {{ m.tool_calls[0].function.name }} {{ m.tool_calls[0].function.arguments | tojson }}"
OPEN = "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}{% generation %}"
REST = "<|end|>{% endgeneration %}{% else %}{{ m.content | trim }}<|end|>{% endif %}{% endfor %}"
ASK = "{% if add_generation_prompt %}<|assistant|>{% endif %}"

IGNORES = OPEN + "{% if m.tool_calls %}" + CALL + "{% else %}{{ m.content | trim }}{% endif %}" + REST + ASK
"""Does not write the content beside calls."""

BOTH = OPEN + "{{ m.content or '' }}{% if m.tool_calls %}" + CALL + "{% endif %}" + REST + ASK
"""Writes content and calls."""

CHANGES = BOTH.replace("{% generation %}", "{% generation %}{% if loop.last %}<think></think>{% endif %}")
"""As Qwen3's: another text of the turn if it is the last one."""

REASONING = BOTH.replace("{% generation %}", "{% generation %}{% if m.reasoning %}({{ m.reasoning }}){% endif %}")
"""Writes another field before the content."""

USER = {"role": "user", "content": "rain today?"}
CALLS = [{"type": "function", "function": {"name": "weather", "arguments": {"city": "Ulm"}}}]
TOOL = {"role": "tool", "content": "RESULT 12 mm"}
ANSWER = {"role": "assistant", "content": "take an umbrella"}


def calling(content: str | None = "", **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, "tool_calls": CALLS, **fields}


CHATS = {
    "ordinary": [USER, ANSWER, {"role": "user", "content": "sure?"}, {"role": "assistant", "content": " yes "}],
    "counted": [USER, calling(), TOOL, {"role": "user", "content": "NEXT QUESTION"}],
    "answered": [USER, calling(), TOOL, ANSWER],
    "null": [USER, calling(None), TOOL, ANSWER],
    "spoken": [USER, calling("I look."), TOOL, calling("again"), TOOL, ANSWER],
    "first": [calling(), TOOL, ANSWER, USER, calling()],
    "last": [USER, calling("so")],
}


def folder_of(tmp_path: Path, template: str) -> Path:
    """A tokenizer with this chat template."""
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    text = [json.dumps([*CHATS["spoken"], *CHATS["ordinary"]]) * 9]
    bpe = byte_level_bpe(text, 330, [])
    bpe.add_special_tokens(["<|user|>", "<|assistant|>", "<|tool|>", *SPECIAL])
    bpe.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(template)
    return folder


@pytest.fixture
def marked_by_transformers(golden, request):
    """The tokens of a chat, and which of them its template marks."""

    def of(folder: Path, chat: list[dict[str, Any]], **options: Any) -> tuple[list[int], list[bool]]:
        def mark() -> list[list[int]]:
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
            how = {"return_dict": True, "return_assistant_tokens_mask": True, "tokenize": True}
            marked = tokenizer.apply_chat_template(chat, **how, **options)
            return [[*marked["input_ids"]], [*marked["assistant_masks"]]]

        tokens, marks = golden(request.node.name, mark)
        return tokens, [bool(mark) for mark in marks]

    return of


def counted_in(tmp_path: Path, folder: Path, lines: list[dict[str, Any]], *flags: str) -> tuple[list[int], list[bool]]:
    path = write_lines(tmp_path / "chats.jsonl", [*lines, {"text": "val"}])
    tokens, counted, _ = read(path, "--tokenizer", str(folder), *flags)
    return tokens, counted


def texts_that_count(tmp_path: Path, folder: Path, lines: list[dict[str, Any]], *flags: str) -> str:
    tokens, counted = counted_in(tmp_path, folder, lines, *flags)
    return data_text(folder, [token for token, count in zip(tokens, counted, strict=True) if count])


@pytest.mark.parametrize("template", [IGNORES, BOTH, CHANGES, REASONING], ids=["ignores", "both", "changes", "reasons"])
@pytest.mark.parametrize("chat", CHATS)
def test_turns_are_those_that_transformers_marks(tmp_path, chat, template, marked_by_transformers):
    folder, messages = folder_of(tmp_path, template), [dict(message) for message in CHATS[chat]]
    if template == REASONING:
        messages = [{**each, "reasoning": "hm"} if each["role"] == "assistant" else each for each in messages]
    tokens, marks = marked_by_transformers(folder, messages)
    if template in (IGNORES, BOTH) and chat == "null":
        assert "None" not in data_text(folder, tokens)
    assert (tokens, marks) == counted_in(tmp_path, folder, [{"messages": messages}]) and 0 < sum(marks) < len(marks)
    if template != CHANGES:
        (folder / "chat_template.jinja").write_text(bare(template))
        assert (tokens, marks) == counted_in(tmp_path, folder, [{"messages": messages}])


TOOLS = [{"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": {}}}]
SYSTEM = {"role": "system", "content": "Be brief."}
AGAIN = [{"role": "user", "content": "and there?"}, {"role": "assistant", "content": "  no\n"}]
TEMPLATES = {
    "chatml": (CHATML, ["ordinary", "system"]),
    "qwen": (QWEN, ["ordinary", "counted", "answered", "null", "spoken", "last", "system", "tools", "twice"]),
    "llama": (LLAMA, ["ordinary", "counted", "answered", "null", "spoken", "last", "system", "tools"]),
    "mistral": (MISTRAL, ["ordinary", "answered", "null", "system", "twice"]),
    "gemma": (GEMMA, ["ordinary"]),
}
USED = {
    **CHATS,
    "system": [SYSTEM, USER, ANSWER, *AGAIN],
    "tools": [SYSTEM, USER, calling(None), TOOL, ANSWER, *AGAIN],
    "twice": [USER, calling(None) | {"tool_calls": CALLS * 2}, TOOL, TOOL, ANSWER, *AGAIN, USER, calling(None)],
}


@pytest.mark.parametrize(("name", "chat"), [(name, chat) for name, (_, chats) in TEMPLATES.items() for chat in chats])
def test_templates_in_use(tmp_path, name, chat, marked_by_transformers):
    """By the marks of the template, and the same without them: by what the text of each message adds."""
    template, options = TEMPLATES[name][0], {"tools": TOOLS} if chat == "tools" else {}
    folder, line = folder_of(tmp_path, template), {"messages": USED[chat], **options}
    expected = marked_by_transformers(folder, USED[chat], **options)
    assert counted_in(tmp_path, folder, [line]) == expected and 0 < sum(expected[1]) < len(expected[1])
    (folder / "chat_template.jinja").write_text(bare(template))
    assert counted_in(tmp_path, folder, [line]) == expected


@pytest.mark.parametrize("marked", [True, False])
def test_a_template_that_drops_the_thinking_of_earlier_turns(tmp_path, marked, marked_by_transformers):
    """Without marks it is refused, and the way out is named: a text for each answer, which has its thinking."""
    thinking = {"role": "assistant", "content": "four", "reasoning_content": "two and two"}
    chat = [USER, thinking, USER, {**thinking, "content": "yes", "reasoning_content": "four"}]
    folder = folder_of(tmp_path, THINKING if marked else bare(THINKING))
    if marked:
        assert counted_in(tmp_path, folder, [{"messages": chat}]) == marked_by_transformers(folder, chat)
    else:
        told = "got another text up to message 2; --split-turns makes a text for each answer, or add {% generation %}"
        with refused(DataError, f"--data {tmp_path / 'chats.jsonl'}, line 1: expected a chat template that", told):
            counted_in(tmp_path, folder, [{"messages": chat}])
    turns = ["<think>\ntwo and two\n</think>\n\nfour<|im_end|>\n", "<think>\nfour\n</think>\n\nyes<|im_end|>\n"]
    assert texts_that_count(tmp_path, folder, [{"messages": chat}], "--split-turns") == "".join(turns)
    path = write_lines(tmp_path / "chats.jsonl", [{"messages": chat}, {"text": "val"}])
    tokens, _, data = read(path, "--tokenizer", str(folder), "--split-turns")
    asked = "<|im_start|>user\nrain today?<|im_end|>\n<|im_start|>assistant\n"
    first, second = asked + turns[0], asked + "four<|im_end|>\n" + asked + turns[1]
    assert data_text(folder, tokens) == first + second
    times = (len(first) + len(second)) / len(second)
    assert f"; --split-turns makes 1 chat into 2 documents, with {times:.1f} times the text" in data.held_out
    begins = np.asarray(data.train.documents).tolist()
    assert len(begins) == 2 and data_text(folder, tokens[begins[1] :]) == second


@pytest.mark.parametrize("marked", [True, False])
def test_answers_of_no_weight_are_no_texts_of_their_own(tmp_path, marked):
    folder = folder_of(tmp_path, QWEN if marked else bare(QWEN))
    chat = [USER, {**ANSWER, "weight": 0}, *AGAIN]
    assert texts_that_count(tmp_path, folder, [{"messages": chat}], "--split-turns") == "  no\n<|im_end|>\n"


def test_a_system_prompt_that_is_written_into_the_last_message(tmp_path):
    """As in templates of Mistral: a chat that ends with an answer is written without its system prompt."""
    template = read_chat_template(str(folder := folder_of(tmp_path, MISTRAL_LAST)))
    assert template is not None and "Be brief." in template.prompt([SYSTEM, USER], "chat")[0]
    for text in (MISTRAL_LAST, bare(MISTRAL_LAST)):
        (folder / "chat_template.jinja").write_text(text)
        with refused(DataError, "line 1: expected roles that ", "got the role 'system' in message 1, whose content"):
            counted_in(tmp_path, folder, [{"messages": USED["system"]}])
        tokens, marks = counted_in(tmp_path, folder, [{"messages": USED["system"][1:]}])
        assert 0 < sum(marks) < len(tokens)


ROLES = "{% for m in messages %}{% if m.role in ('user', 'assistant') %}<|{{ m.role }}|>{% generation %}"
ROLES += "{{ m.content | tojson(ensure_ascii=True) }}{% endgeneration %}{% endif %}{% endfor %}"
"""Writes two roles, and content only as escapes."""


@pytest.mark.parametrize("template", [QWEN, bare(QWEN), bare(ROLES) + ASK], ids=["marked", "bare", "escaped"])
def test_a_message_that_the_template_does_not_write(tmp_path, template):
    """Also in a later chat of the same roles; a message without content may be missing."""
    folder = folder_of(tmp_path, template)
    other = {"role": "developer", "content": ""}
    path = write_lines(tmp_path / "chats.jsonl", [{"messages": [other, USER, ANSWER]}] * 3)
    read(path, "--tokenizer", str(folder))
    chat = [USER, {**other, "content": "rain"}, ANSWER]
    path = write_lines(tmp_path / "chats.jsonl", [{"messages": [USER, other, ANSWER]}] * 2 + [{"messages": chat}] * 2)
    got = "got the role 'developer' in message 2, whose content would be lost; write the role 'system' instead"
    with refused(DataError, f"--data {path}, line 3: expected roles that {folder / 'chat_template.jinja'} writes", got):
        read(path, "--tokenizer", str(folder))
    found = read_chat_template(str(folder))
    assert found is not None
    with refused(DataError, "chat: expected roles that ", got):
        found.prompt([*chat, USER], "chat")


@pytest.mark.parametrize("template", [CHATML, LLAMA, MISTRAL, QWEN], ids=["chatml", "llama", "mistral", "qwen"])
def test_chats_of_one_layout_have_the_turns_of_each(tmp_path, template):
    """A template is rendered once for each of them; the turns are those of its marks, whatever the contents are."""
    texts = ["", " a ", "<|im_end|>", "<tool_response>x", "assistant\n", "\n\nb", "a" * 300, "[/INST]"]
    chats = [
        [{"role": role, "content": texts[(n * number + place) % len(texts)]} for place, role in enumerate(roles)]
        for roles in (["user", "assistant"] * 2, ["system", "user", "assistant", "user", "assistant", "user"])
        for n in range(len(texts)) for number in (1, 3)
    ]  # fmt: skip
    marked = ChatTemplate(template, {"bos_token": "<s>", "eos_token": "</s>"}, tmp_path)
    without = ChatTemplate(bare(template), marked.special, tmp_path)
    for number, chat in enumerate(chats):
        if not all(each["content"].strip() for each in chat if each["role"] == "system"):
            continue
        weights = [{**each, "weight": number % 2} if each["role"] == "assistant" else each for each in chat]
        for messages in (chat, weights):
            expected, got = (each.documents({}, messages, "here") for each in (marked, without))
            assert [part for part in got[0] if part[0]] == [part for part in expected[0] if part[0]], messages


def test_the_turns_of_a_layout_are_found_by_one_rendering(tmp_path):
    """Of each chat but the first, however many turns it has; by one more a turn if its prompt may be another."""
    renderings = 0

    class Counting(str):
        def __str__(self):
            nonlocal renderings
            renderings += 1
            return ""

    unsure = bare(QWEN).replace("{%- if add_generation_prompt %}", "{%- if messages and add_generation_prompt %}")
    for source, expected in ((bare(QWEN), 1), (unsure, 1 + 9)):
        template = ChatTemplate("{{ bos_token }}" + source, {"bos_token": Counting()}, tmp_path)
        for number in range(5):
            renderings = 0
            chat = [{"role": role, "content": f"{role} {number}"} for role in ["user", "assistant"] * 9]
            assert sum(counts for _, counts in template.documents({}, chat, "here")[0]) == 9
        assert renderings == expected


SHOWN = "{% for m in messages %}{% if not m.hidden %}<{{ m.role }}>{% if m.reasoning and loop.last %}"
SHOWN += "({{ m.reasoning }}){% endif %}{{ m.content }}<|end|>{% endif %}{% endfor %}"
SHOWN += "{% if add_generation_prompt %}<assistant>{% endif %}"
"""Writes no hidden message, and the reasoning of the last one."""


@pytest.mark.parametrize(("key", "values"), [("reasoning", ["", "because"]), ("hidden", [False, True])])
def test_a_layout_is_that_of_the_values_of_other_keys(tmp_path, key, values):
    """What is refused does not depend on the order of the chats."""
    good, wrong = ([{**USER, key: value}, {**ANSWER, key: values[0]}] for value in values)
    if key == "reasoning":
        good, wrong = ([USER, {**ANSWER, key: value}, *AGAIN] for value in values)
    told = "expected a chat template that does not change" if key == "reasoning" else "expected roles that "
    for order in ([wrong, good], [good, wrong]):
        template = ChatTemplate(SHOWN, {}, tmp_path)
        for chat in order:
            if chat is good:
                ((*parts, _),) = template.documents({}, chat, "here")
                assert parts[:2] == [("<user>rain today?<|end|><assistant>", False), ("take an umbrella<|end|>", True)]
            else:
                with refused(DataError, "here: ", told):
                    template.documents({}, chat, "here")


@pytest.mark.parametrize("kind", range(5))
def test_a_generation_prompt_that_depends_on_contents(tmp_path, kind):
    """As Qwen3's: what it writes is no part of the answer, in the first turn or in a later one."""
    prompt = "{% if '/no_think' in messages[-1].content %}<think></think>{% endif %}"
    ask, later = "{% if add_generation_prompt %}", prompt.replace("messages[-1].content", "last")
    sources = [
        f"{SHOWN}{ask}{prompt}{{% endif %}}",
        f"{{% set last = messages[-1].content %}}{SHOWN}{ask}{later}{{% endif %}}",
        f"{SHOWN}{{% if add_generation_prompt and true %}}{prompt}{{% endif %}}",
        SHOWN + prompt.replace("<think></think>", ask + "<think></think>{% endif %}"),
        f"{{% macro think() %}}{prompt}{{% endmacro %}}{SHOWN}{ask}{{{{ think() }}}}{{% endif %}}",
    ]
    template = ChatTemplate(sources[kind], {}, tmp_path)
    asked = {"role": "user", "content": "2 + 2? /no_think"}
    plain, quick = [USER, ANSWER], [asked, {"role": "assistant", "content": "<think></think>4"}]
    for chat in ([*plain, *plain], [*plain, *quick], [*quick, *plain], [*quick, *quick]):
        (parts,) = template.documents({}, chat, "here")
        expected = [("4" if each[0] is asked else ANSWER["content"]) + "<|end|>" for each in (chat[:2], chat[2:])]
        assert [text for text, counts in parts if counts] == expected


def test_content_that_may_end_in_two_places(tmp_path):
    """With its spaces or without them: what follows it begins with a space, too."""
    source = "{% for m in messages %}{{ m.content | trim if m.role == 'user' else m.content }}\n{% endfor %}"
    chat = [{"role": "user", "content": "hi\n"}, {"role": "assistant", "content": "\nanswer"}]
    ((first, turn, _),) = ChatTemplate(source, {}, tmp_path).documents({}, chat, "here")
    assert (first, turn) == (("hi\n", False), ("\nanswer\n", True))


def test_a_token_of_two_parts_counts_if_one_of_them_does(tmp_path, marked_by_transformers):
    """As in transformers: whether the answer begins in it or ends in it."""
    folder = folder_of(tmp_path, BOTH.replace("<|end|>{% endgeneration %}", "{% endgeneration %}ay?"))
    chat = [USER, {"role": "assistant", "content": "no rain tod"}] * 2
    tokens, marks = marked_by_transformers(folder, chat)
    text = data_text(folder, [token for token, mark in zip(tokens, marks, strict=True) if mark])
    assert text == "no rain today" * 2, "a token ends after the answer"
    assert counted_in(tmp_path, folder, [{"messages": chat}]) == (tokens, marks)


@pytest.mark.parametrize("marked", [True, False])
def test_an_answer_that_is_not_trained(tmp_path, marked):
    """``train`` of axolotl, ``weight`` of OpenAI, of which either may exclude it."""
    folder = folder_of(tmp_path, QWEN if marked else bare(QWEN))
    no = [{"train": False}, {"weight": 0}, {"train": True, "weight": 0}]
    yes = [{"train": True}, {"weight": 1}, {}, {"train": None, "weight": None}]
    given = [{"role": "assistant", "content": str(number), **keys} for number, keys in enumerate([*no, *yes])]
    chat = [{**USER, "train": False, "weight": 0}, calling(None, train=False), TOOL]
    chat += [each for answer in given for each in (USER, answer)]
    counts = texts_that_count(tmp_path, folder, [{"messages": chat}])
    assert counts == "".join(f"{number}<|im_end|>\n" for number in range(len(no), len(given)))


def test_arguments_as_text_are_not_quoted(tmp_path):
    """OpenAI's calls have JSON as text. A template that writes text as it is gets it; others get the table."""
    arguments = '{"city":"Ulm"}'
    calls = [{"id": "1", "type": "function", "function": {"name": "weather", "arguments": arguments}}]
    chat = [USER, {"role": "assistant", "content": None, "refusal": None, "tool_calls": calls}]
    chat += [{"role": "tool", "tool_call_id": "1", "content": "12 mm"}]
    folder = folder_of(tmp_path, bare(QWEN))
    expected = '\n<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call><|im_end|>\n'
    assert texts_that_count(tmp_path, folder, [{"messages": chat}]) == expected
    template = read_chat_template(str(folder))
    assert template is not None and expected in template.prompt([*chat, USER], "chat")[0], "as it is trained on"
    items = "{% for name, value in call.arguments | items %}{{ name }}={{ value }}{% endfor %}"
    (folder / "chat_template.jinja").write_text(bare(QWEN).replace("{{- call.arguments | tojson }}", items))
    assert "city=Ulm" in texts_that_count(tmp_path, folder, [{"messages": chat}])
    (folder / "chat_template.jinja").write_text(bare(QWEN).replace("call.arguments | tojson", "call.arguments"))
    assert arguments in texts_that_count(tmp_path, folder, [{"messages": chat}])


NAMED = CALLS[0]["function"]
ALPACA = {"instruction": "Add.", "input": "1 2", "output": "3"}
SAME: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "sharegpt": (
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}], "id": "x"},
        [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}],
    ),
    "sharegpt-system": (
        {"conversations": [{"from": "user", "value": "hi"}, {"from": "model", "value": "a"}], "system": "Be brief."},
        [SYSTEM, {"role": "user", "content": "hi"}, {"role": "assistant", "content": "a"}],
    ),
    "sharegpt-tool": (
        {"conversations": [{"from": "human", "value": "a"}, {"from": "observation", "value": "b"},
                           {"from": "gpt", "value": "c", "train": True}]},
        [{"role": "user", "content": "a"}, {"role": "tool", "content": "b"}, {"role": "assistant", "content": "c"}],
    ),
    "sharegpt-call": (
        {"conversations": [{"from": "human", "value": "a"}, {"from": "function_call", "value": json.dumps(NAMED)},
                           {"from": "observation", "value": "b"},
                           {"from": "function_call", "value": json.dumps([NAMED, NAMED])}]},
        [{"role": "user", "content": "a"}, calling(None), {"role": "tool", "content": "b"},
         calling(None) | {"tool_calls": CALLS * 2}],
    ),
    "conversations-of-roles": ({"conversations": [USER, ANSWER]}, [USER, ANSWER]),
    "alpaca": (ALPACA, [{"role": "user", "content": "Add.\n1 2"}, {"role": "assistant", "content": "3"}]),
    "alpaca-no-input": (
        {**ALPACA, "input": "", "system": "Be brief."},
        [SYSTEM, {"role": "user", "content": "Add."}, {"role": "assistant", "content": "3"}],
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", SAME)
def test_chats_by_other_names_are_the_same(tmp_path, kind):
    folder, (line, messages) = folder_of(tmp_path, bare(QWEN)), SAME[kind]
    got = counted_in(tmp_path, folder, [line])
    assert got == counted_in(tmp_path, folder, [{"messages": messages}]) and any(got[1])


def test_only_the_call_counts_where_a_template_leaves_the_content_out(tmp_path):
    """Neither the result of the tool nor what the user says next."""
    folder = folder_of(tmp_path, IGNORES)
    assert texts_that_count(tmp_path, folder, [{"messages": CHATS["counted"]}]) == 'CALL weather {"city": "Ulm"}<|end|>'
    chat = [USER, calling(weight=0), TOOL, ANSWER]
    assert texts_that_count(tmp_path, folder, [{"messages": chat}]) == "take an umbrella<|end|>"


CHANGING = bare(IGNORES).replace("<|end|>{%", "{% if loop.last %}!{% endif %}<|end|>{%")
"""Writes a turn in another way if it is the last one."""

DEEP = "[" * 100_000
"""Nested more deeply than Python's json reads."""


def of(*messages: Any, **more: Any) -> dict[str, Any]:
    return {"messages": [*messages], **more}


def called(arguments: Any) -> dict[str, Any]:
    return of(USER, calling(None, tool_calls=[{"function": {"name": "a", "arguments": arguments}}]))


def value_of_call(text: str) -> dict[str, Any]:
    return {"conversations": [{"from": "function_call", "value": text}]}


OLD_CALL = {"role": "assistant", "content": None, "function_call": {"name": "a", "arguments": ""}}
PARTS = [{"type": "text", "text": "hi"}, {"type": "image", "url": "x"}]
JSON, OBJECT = (f"{what} as the arguments of a tool call, got " for what in ("JSON", "a JSON object"))
WRONG: list[tuple[dict[str, Any], str]] = [
    (of(), "a list of messages, got []"),
    (of({"content": "x"}), "messages with role and content, got {'content': 'x'}"),
    (of({"role": "bot", "content": "x"}), "a role of system, developer, user, assistant, tool"),
    (of({**USER, "weight": 0.5}), "a weight of 0 or 1, got 0.5"),
    (of(USER, ANSWER, tools={"a": 1}), "a list of tools and a table of chat_template_kwargs, got {'"),
    (of({**USER, "content": "a\ud800"}), "text in the field 'messages', got '\\ud800' at"),
    (of(USER, calling(None, tool_calls=[])), "content or tool_calls in message 2, got neither"),
    (of(USER, calling(None, tool_calls=["x"])), "a list of tables as the tool_calls of message 2, got ['x']"),
    (of(calling(None, role="user")), "content in message 1, got none"),
    (of(USER, {**ANSWER, "content": None}), "content or tool_calls in message 2, got n"),
    (of(USER, {"role": "tool", "content": {"a": 1}}),
     "text as the content of message 2, got {'a': 1}; write it as a string of JSON"),
    (of(USER, OLD_CALL),
     "tool_calls in message 2, got their earlier form 'function_call'; write \"tool_calls\": [{\"type\": "),
    (of(USER, {"role": "function", "content": "1"}), "; write the role 'tool'"),
    (of(USER, {**ANSWER, "content": None, "refusal": "no"}),
     "content in message 2, got a refusal, which templates do not write; put its text into content"),
    (of(USER, ANSWER, weight=0.5), "a weight of 0 or 1, got 0.5"),
    (of(USER, ANSWER, rejected=[USER, ANSWER]),
     "without the field 'rejected', which the trainer does not read, got [{"),
    (of(USER, {**ANSWER, "label": 3}), "content, weight, train, name, tool_call_id, got 'label' in message 2"),
    (of(USER, {**ANSWER, "reasoning": "hm"}), "got 'reasoning' in message 2"),
    (of(USER, {**ANSWER, "train": "no"}), "expected train true or false, got 'no'"),
    (of({**USER, "train": True}), "train only in messages of assistants, got True with the role user"),
    (of(USER, ANSWER, functions=[{"name": "weather"}]),
     "the field 'tools', got its earlier name 'functions'; write each of them into \"tools\", as "),
    (of({**USER, "content": PARTS}, ANSWER), "text, or a list of parts of text, as the content of message 1, got [{"),
    (of(USER, ANSWER, system=3), "text in the field 'system', got system: 3"),
    (of(USER, ANSWER, tools=DEEP), "JSON in the field 'tools', got "),
    ({"prompt": "x", "completion": "y", "train": "no"}, "train true or false, got 'no'"),
    ({"prompt": "x", "completion": "y", "label": False}, "without the field 'label', which the trainer d"),
    ({"conversations": [{"from": "robot", "value": "x"}]}, "tool, got 'robot'"),
    (value_of_call("x"), "JSON as the value from function_call, got 'x' (Expecting value: "),
    (value_of_call('{"name": "a", "name": "b"}'), "JSON as the value from function_call, got "),
    (value_of_call(DEEP), "JSON as the value from function_call, got '[[["),
    ({"instruction": "x", "input": "y"}, "text in the field 'output', got the fields instruction, input"),
    ({**ALPACA, "history": [["a", "b"]]}, "messages for a chat of several turns, got the field 'history'"),
]  # fmt: skip
WRONG_IN_TEMPLATES: list[tuple[dict[str, Any], str, str]] = [
    (of(*CHATS["answered"]), "does not change a turn for those after it", CHANGING),
    (of(USER, calling("x")), "got 'tool_calls' in message 2", CHATML),
    (of(TOOL), "chat_template.jinja renders, got no tools", NO_TOOLS),
    (of(USER, ANSWER, tools=TOOLS), "a chat template that uses tools, got one that does not, of /", CHATML),
    *((called(arguments), said, bare(QWEN)) for arguments, said in (
        ("{not", f"{JSON}'{{not' ("), ('{"city": NaN}', JSON), ({"city": float("nan")}, JSON),
        ('{"a": {"b": 1, "b": 2}}', JSON), (DEEP, f"{JSON}'[[["),
        ('"\\"a\\""', OBJECT), ([1], OBJECT), ("null", OBJECT),
    )),
]  # fmt: skip


@pytest.mark.parametrize(
    ("line", "said", "template"), [*((*case, BOTH) for case in WRONG), *WRONG_IN_TEMPLATES], ids=lambda x: str(x)[:40]
)
def test_refused(tmp_path, line, said, template):
    folder = folder_of(tmp_path, template)
    path = write_lines(tmp_path / "chats.jsonl", [{"text": "x"}, line, {"text": "val"}])
    with refused(DataError, f"--data {path}, line 2: expected ", said):
        read(path, "--tokenizer", str(folder))


@pytest.mark.parametrize("suffix", ["jsonl", "json"])
def test_a_key_twice_in_a_record_is_refused(tmp_path, suffix):
    """Its first value would be lost."""
    path = tmp_path / f"chats.{suffix}"
    lines = ['{"text": "x"}', '{"text": "y", "more": {"b": 1, "c": 2, "b": 3}}', '{"text": "val"}']
    path.write_text("\n".join(lines) if suffix == "jsonl" else f"[{','.join(lines)}]")
    place = "line" if suffix == "jsonl" else "item"
    with refused(DataError, f"--data {path}, {place} 2: expected JSON, got ", "the key 'b' twice"):
        read(path)


@pytest.mark.parametrize("arguments", ["", "  \n", None])
def test_what_openai_writes_is_read(tmp_path, arguments):
    """A text in one part, arguments that are null or blank, and weights of users are as if written otherwise."""
    folder = folder_of(tmp_path, bare(QWEN))
    call = {"id": "1", "type": "function", "function": {"name": "now", "arguments": arguments}}
    calls = [{"role": "assistant", "content": [part], "tool_calls": [call]}
                                   for part in ({"type": "text"}, {"type": "text", "text": None})]  # fmt: skip
    chats = [
        *([USER, each] for each in calls),
        [{**USER, "weight": 1, "refusal": None}, {"role": "assistant", "content": None, "tool_calls": [call]}],
        [{**USER, "content": [{"type": "text", "text": part} for part in ("h", "i")]}, {**ANSWER, "weight": 1}],
    ]
    given = f'"arguments": {json.dumps(arguments)}'
    plain = json.loads(json.dumps(chats).replace(given, '"arguments": {}'))
    del plain[0][1]["content"], plain[1][1]["content"], plain[2][0]["weight"]
    plain[3][0]["content"] = "hi"
    both = [
        read(write_lines(tmp_path / name, [*({"messages": chat} for chat in each), {"text": "val"}]),
             "--tokenizer", str(folder))
        for name, each in (("theirs.jsonl", chats), ("plain.jsonl", plain))
    ]  # fmt: skip
    assert both[0][:2] == both[1][:2] and sum(both[0][1]) > 0


@pytest.mark.parametrize("fit", ["whole", "cut"])
def test_a_record_may_not_count(tmp_path, fit):
    """By the keys that also messages have.  The first lines say how many chats have nothing to learn."""
    folder, silent = folder_of(tmp_path, BOTH), {"messages": [USER]}
    lines = [{"messages": [USER, ANSWER], **more} for more in ({}, {"weight": 0}, {"train": False}, {"weight": 1})]
    path = write_lines(tmp_path / "chats.jsonl", [*lines, silent])
    flags = ["--tokenizer", str(folder), "--hold-out", "0", "--seq-len", "40", "--fit", fit]
    data = load_data(parse(["--data", str(path), *flags]))
    whole = Tokens(data.train.shards, data.train.documents)
    masks = [whole.window(a, b - a)[1] for a, b in pairwise([*whole.begins.tolist(), whole.size])]
    assert [bool(mask.any()) for mask in masks] == [True, False, False, True, False]
    left_out = "; left out, because the loss counts none of their tokens: 3 chats"
    assert (left_out in data.describe_fit()) == (fit == "whole")
    pairs = [{"prompt": "a", "completion": "b" * 50, "weight": n % 2} for n in range(4)]
    data = load_data(parse(["--data", str(write_lines(tmp_path / "pairs.jsonl", pairs)), *flags]))
    assert 98 <= int(Tokens(data.train.shards).window(0, data.train.size)[1].sum()) < 110


def test_prompts_and_completions_of_messages(tmp_path):
    """As TRL has them: the loss counts no answer of the prompt."""
    folder, flags = folder_of(tmp_path, BOTH), ["--hold-out", "0", "--seq-len", "4", "--fit", "cut"]
    chat, seen = [USER, ANSWER, USER, ANSWER], []
    lines = {"messages": [*chat[:1], {**ANSWER, "weight": 0}, *chat[2:]]}, {"prompt": chat[:3], "completion": chat[3:]}
    for number, line in enumerate(lines):
        path = write_lines(tmp_path / f"{number}.jsonl", [line])
        data = load_data(parse(["--data", str(path), "--tokenizer", str(folder), *flags]))
        seen.append([each.tolist() for each in data.train.window(0, data.train.size)])
    assert seen[0] == seen[1] and 0 < sum(seen[0][1]) < len(seen[0][1]) / 2
    with refused(DataError, "expected text in the field 'prompt', got prompt: ["):
        load_data(parse(["--data", str(write_lines(path, [{"prompt": [USER], "completion": "b"}])), *flags]))


def test_messages_of_another_name(tmp_path):
    folder, flags = folder_of(tmp_path, BOTH), ["--hold-out", "0", "--seq-len", "4", "--fit", "cut"]
    seen = []
    for name, more in (("messages", []), ("dialog", ["--fields", "messages=dialog"])):
        path = write_lines(tmp_path / f"{name}.jsonl", [{name: [USER, ANSWER]}])
        data = load_data(parse(["--data", str(path), "--tokenizer", str(folder), *flags, *more]))
        seen.append([each.tolist() for each in data.train.window(0, data.train.size)])
    assert seen[0] == seen[1]


def test_a_template_writes_a_date(tmp_path):
    """That of ``--template-date``, on which the tokens depend; else today's.  The log has it."""
    folder, path = folder_of(tmp_path, "{{ strftime_now('%d %b %Y') }}|" + BOTH), tmp_path / "chats.jsonl"
    write_lines(path, [{"messages": [USER, ANSWER]}] * 2)
    for day, written in (("2026-02-03", "03 Feb 2026"), ("2025-12-31", "31 Dec 2025")):
        tokens, _, data = read(path, "--tokenizer", str(folder), "--template-date", day)
        assert f"; the chat template writes the date {day} (--template-date)" in data.held_out
        assert data_text(folder, tokens).startswith(f"{written}|")
    (rendered,) = ChatTemplate("{{ strftime_now('%Y-%m-%d %H:%M') }}" + BOTH, {}, path).prompt([USER], "here")[:1]
    assert re.match(r"\d{4}-\d\d-\d\d 00:00<", rendered)
    for given in ("2026-02-30", "today"):
        with refused(ConfigError, "--template-date: expected a date ("):
            parse(["--template-date", given])


def test_a_resumed_run_keeps_the_date(tmp_path, monkeypatch):
    """Else its data would be others on another day."""
    folder = folder_of(tmp_path, "{{ strftime_now('%d %b %Y') }}|" + BOTH)
    path, out = write_lines(tmp_path / "chats.jsonl", [{"messages": [USER, ANSWER]}] * 30), tmp_path / "run"
    flags = ["--data", str(path), "--tokenizer", str(folder), "--seq-len", "32", "--batch-size", "2", "--device", "cpu",
             "--out", str(out), "--sample-tokens", "0", "--eval-batches", "0", "--num-hidden-layers", "1"]  # fmt: skip
    for day, more in ((date(2026, 2, 3), ["--steps", "1"]), (date(2026, 2, 4), ["--steps", "2", "--resume", "auto"])):
        today = type("Today", (), {"today": lambda day=day: day, "fromisoformat": date.fromisoformat})
        monkeypatch.setattr(source_of_runs, "date", today)
        fit(parse([*flags, *more]))
        assert json.loads((out / "config.json").read_text())["derived"]["template_date"] == "2026-02-03"


def test_all_wrong_records_of_a_file_are_counted(tmp_path, caplog):
    """Ten kinds of them are shown, each with its first place."""
    folder, path = folder_of(tmp_path, BOTH), tmp_path / "chats.jsonl"
    good, wrong = json.dumps({"messages": [USER, ANSWER]}), [json.dumps({"messages": [{"role": "user"}]})] * 3
    path.write_text("\n".join([good, *wrong[:1], good, *wrong[1:], "{", *(f'{{"a{n}": 1}}' for n in range(12)), good]))
    with refused(DataError, f"--data {path}: expected records to train on, got 16 wrong ones, shown above (the first"):
        read(path, "--tokenizer", str(folder))
    assert all(record.getMessage().startswith(f"{path}, line ") for record in caplog.records)  # of --val-data too
    each = [record.getMessage().removeprefix(f"{path}, ") for record in caplog.records]
    assert each[0] == "line 2: expected content in message 1, got none (2 more like it)" and len(each) == 10
    assert each[1].startswith("line 6: expected JSON, got ") and each[2].startswith("line 7: expected the field 'text'")
    caplog.clear()
    path.write_text("\n".join([good, *wrong]))
    with refused(DataError, f"--data {path}, line 2: expected content in message 1, got none (2 more like it)"):
        read(path, "--tokenizer", str(folder))
    assert not caplog.records
    (tmp_path / "a.csv").write_text("prompt,completion\na,b\nc\nd,e,f\ng,h\n")
    with refused(DataError, f"--data {tmp_path / 'a.csv'}: expected records to train on, got 2 wrong ones, shown"):
        read(tmp_path / "a.csv")
    assert re.search("(?s)line 3: expected 2 columns, .*got 1.*line 4: expected 2 columns.*got 3", caplog.text)
