"""Where the turns of chats begin and end, and what of their content is lost, if generation prompts write thinking."""

from pathlib import Path
from typing import Any

import pytest

from kos.errors import DataError
from kos.train.data.chat import ChatTemplate
from kos.train.tokenize import tokenize
from tests.goldens import shortened
from tests.train.chat_templates import THINKING as OF_LAST
from tests.train.chat_templates import bare
from tests.train.of_transformers import transformers
from tests.train.refusal import refused
from tests.train.test_chats import USER, calling, folder_of
from tests.train.test_loss_masks import read, write_lines

jinja2 = pytest.importorskip("jinja2", reason="needs the extra 'chat'")

LOOP = "{% for m in messages %}{% if m.role == 'assistant' %}HEADER{% generation %}TURN{% endgeneration %}{% else %}"
LOOP += "<|user|>{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}HEADER"
AFTER = "{{ m.content.split('</think>')[-1] }}</s>"
WITH_REASONING = "<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n{{ m.content | trim }}</s>"
FORMS = {
    "r1": ("<|assistant|>", AFTER, "<think>\n"),
    "r1, trimmed": ("<|assistant|>", AFTER.replace("[-1]", "[-1] | trim"), "<think>\n"),
    "qwq": ("<|im_start|>assistant\n", AFTER, "<think>\n"),
    "qwen": ("<|im_start|>assistant\n", WITH_REASONING, "<think>\n"),
    "no thinking": ("<|im_start|>assistant\n", "{{ m.content }}</s>", "<think>\n\n</think>\n\n"),
    "raw": ("<|assistant|>", "{{ m.content }}</s>", "<think>"),
    "words": ("Assistant: ", "{{ m.content }}\n", "Answer: "),
    "lines": ("Assistant: ", "{{ m.content }}\n", "\n"),
    "plain": ("<|assistant|>", "{{ m.content }}</s>", ""),
}
CONTENTS = [
    "", " ", "\n", "x", "<", "<t", "<think>", "<think>\n", "<think>\n\n</think>\n\n", "</think>", "<table>4</table>",
    "<|assistant|>", "A", "Answer", "Answer: 4", "\n4", "4 ", "<think>\ntwo\n</think>\n\n4", "<think>two</think>4",
    "\U0001f600",
]  # fmt: skip


def source_of(form: str) -> str:
    header, turn, prompt = FORMS[form]
    return LOOP.replace("HEADER", header).replace("TURN", turn) + prompt + "{% endif %}"


def without_spaces(text: str) -> str:
    return "".join(text.split())


@pytest.mark.parametrize("form", FORMS)
def test_a_turn_begins_where_the_prompt_ends_that_inference_has(tmp_path, form, golden):
    """Whatever its first characters are.  Without such a prefix, it begins after the header, and this is said."""
    source, (header, turn, prompt) = source_of(form), FORMS[form]
    asked, texts = list[tuple[Any, dict[str, bool]]](), list[str]()
    plain = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(bare(source))

    def render(chat: Any, **options: bool) -> str:
        asked.append((chat, options))
        texts.append(plain.render(messages=chat, **options))
        return texts[-1]

    for first, second in zip(CONTENTS * 2, [*CONTENTS[3:], *CONTENTS[:3], *reversed(CONTENTS)], strict=True):
        chat = [USER, {"role": "assistant", "content": first}, USER, {"role": "assistant", "content": second}]
        if "reasoning" in turn:
            chat[1]["reasoning_content"], chat[3]["reasoning_content"] = second, first
        whole = render(chat)
        for marked in (True, False):
            template = ChatTemplate(source if marked else bare(source), {}, tmp_path)
            done, expected, lacking, lost = 0, [], [], 0
            for number in (1, 3):
                begun = render(chat[:number], add_generation_prompt=True)
                stop = len(render(chat[: number + 1]))
                after = len(render(chat[:number])) + len(header)
                known = whole.startswith(begun)
                start = len(begun) if known and not marked else after
                expected += [(whole[done:start], False), (whole[start:stop], True)]
                lacking += [] if known else [begun[len(begun) - len(prompt) :]]
                kept = without_spaces(whole[done:stop])
                fields = [chat[number]["content"], chat[number].get("reasoning_content", "")]
                lost += not all(without_spaces(field) in kept for field in fields)
                done = stop
            (parts,) = template.documents({}, chat, "here", allow_lost=True)
            assert [*parts] == [*expected, (whole[done:], False)], chat
            assert [*parts.lacking] == lacking and parts.lost == lost, chat
            if lost and "reasoning" not in turn:
                with refused(DataError, "here: expected a chat template that writes the whole content", "message "):
                    template.documents({}, chat, "here")

    def by_transformers() -> Any:
        theirs = transformers.AutoTokenizer.from_pretrained(folder_of(tmp_path, source))
        return shortened([theirs.apply_chat_template(chat, tokenize=False, **options) for chat, options in asked])

    assert golden(form, by_transformers) == shortened(texts)


REASONED = {"role": "assistant", "content": "<think>\ntwo and two is four\n</think>\n\n4"}
ANSWERED = {"role": "assistant", "content": "4"}


def lines_of(*chats: list[dict[str, object]], folder: Path) -> str:
    return str(write_lines(folder / "chats.jsonl", [{"messages": chat} for chat in chats]))


@pytest.mark.parametrize("marked", [True, False])
def test_content_that_the_template_leaves_out_is_refused_or_counted(tmp_path, marked, all_is_kept):
    """Per line, with the flag that accepts it.  What is kept of an accepted file is not used without the flag."""
    source = source_of("r1")
    folder = folder_of(tmp_path, source if marked else bare(source))
    path = lines_of([USER, ANSWERED], [USER, REASONED], [USER, ANSWERED, USER, REASONED], folder=tmp_path)
    flags = ["--tokenizer", str(folder), "--eval-batches", "0"]
    said = f"line 2: expected a chat template that writes the whole content of a message ({folder}/chat_template.jinja)"
    for _ in range(2):
        with refused(DataError, "expected records to train on, got 2 wrong ones"):
            read(Path(path), *flags)
        *_, data = read(Path(path), *flags, "--allow-lost-content")
        assert "; the chat template leaves out text of 2 messages" in data.held_out
    assert "; 4 answers without '<think>\\n', with which the generation prompt ends" in data.held_out
    path = lines_of([USER, ANSWERED], [USER, REASONED], folder=tmp_path)
    with refused(DataError, said, "got message 2 without a part of '<think>\\ntwo", "; --allow-lost-content accepts"):
        read(Path(path), *flags)
    with refused(DataError, said):
        tokenize(tmp_path / "out", [path], tokenizer=str(folder))
    about = tokenize(tmp_path / "out", [path], tokenizer=str(folder), allow_lost_content=True)
    assert "; the chat template leaves out text of 1 message;" in about["between"]


def test_content_that_is_written_in_another_form_is_not_lost(tmp_path):
    """With other spaces or as JSON; and answers that do not count may be lost."""
    source = "{% for m in messages %}<{{ m.role }}>{% if m.role == 'tool' %}{{ m.content | tojson }}"
    source += "{% elif m.role == 'user' %}{{ m.content.split('#')[0] | trim }}"
    source += "{% else %}{% set parts = m.content.split('</think>') %}{% if parts | length > 1 and loop.last %}"
    source += "<think>\n{{ parts[0].split('<think>')[-1] | trim }}\n</think>\n\n{% endif %}{{ parts[-1] | trim }}"
    source += "{% endif %}<|end|>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    template = ChatTemplate(source, {}, tmp_path)
    tool, thought = {"role": "tool", "content": 'a "q"\n\u00e9'}, {"role": "assistant", "content": "<think>b</think>c"}
    (parts,) = template.documents({}, [USER, thought], "here")
    assert [text for text, counts in parts if counts] == ["<think>\nb\n</think>\n\nc<|end|>"] and not parts.lost
    documents = template.documents({}, [USER, thought, tool, thought], "here", split_turns=True)
    assert [parts.lost for parts in documents] == [0, 0], "the first answer is whole in its own document"
    skipped = {**thought, "weight": 0}
    (parts,) = template.documents({}, [USER, skipped, tool, ANSWERED], "here")
    assert not parts.lost and not parts.lacking
    with refused(DataError, "here: expected a chat template that writes the whole content", "got message 1 without"):
        template.documents({}, [{"role": "user", "content": "2 + 2? # a note"}, ANSWERED], "here")


def test_content_beside_calls_and_thinking_of_earlier_turns_are_counted(tmp_path):
    """Templates in use leave them out."""
    source = "{% for m in messages %}<{{ m.role }}>{{ 'CALL' if m.tool_calls else m.content }}{% endfor %}"
    (parts,) = ChatTemplate(source, {}, tmp_path).documents({}, [USER, calling("I look.")], "here")
    assert parts.lost == 1
    chat = [USER, {**ANSWERED, "reasoning_content": "two"}] * 2
    (parts,) = ChatTemplate(OF_LAST, {}, tmp_path).documents({}, chat, "here")
    assert parts.lost == 1 and not parts.lacking


def test_a_message_of_which_nothing_is_written_may_be_accepted_too(tmp_path):
    source = "{% for m in messages %}{% if m.role != 'developer' %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
    template, chat = ChatTemplate(source, {}, tmp_path), [{"role": "developer", "content": "rain"}, USER, ANSWERED]
    with refused(DataError, "here: expected roles that ", "whose content would be lost"):
        template.documents({}, chat, "here")
    (parts,) = template.documents({}, chat, "here", allow_lost=True)
    assert parts.lost == 1
