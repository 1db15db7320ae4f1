"""Chats with calls of tools: which tokens count, beside transformers' marks, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from kos.errors import DataError
from kos.testing import spawn
from kos.train.config.flags import parse
from kos.train.data.batches import load_data
from kos.train.run import Trainer
from tests.train.refusal import refused
from tests.train.test_corpus import token_bytes
from tests.train.test_loop import _config
from tests.train.test_loss_masks import data_text, read, write_lines
from tests.train.test_tokenizers import byte_level_bpe

CALL = "CALL {{ m.tool_calls[0].function.name }} {{ m.tool_calls[0].function.arguments | tojson }}"
OPEN = "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}{% generation %}"
REST = "<|end|>{% endgeneration %}{% else %}{{ m.content | trim }}<|end|>{% endif %}{% endfor %}"
ASK = "{% if add_generation_prompt %}<|assistant|>{% endif %}"

IGNORES = OPEN + "{% if m.tool_calls %}" + CALL + "{% else %}{{ m.content | trim }}{% endif %}" + REST + ASK
"""Does not write the content beside calls."""

BOTH = OPEN + "{{ m.content or '' }}{% if m.tool_calls %}" + CALL + "{% endif %}" + REST + ASK
"""Writes content and calls."""

THINKING = BOTH.replace("{% generation %}", "{% generation %}{% if loop.last %}<think></think>{% endif %}")
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
    bpe.add_special_tokens(["<|user|>", "<|assistant|>", "<|tool|>"])
    bpe.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(template)
    return folder


@pytest.mark.parametrize("template", [IGNORES, BOTH, THINKING, REASONING], ids=["ignores", "both", "thinks", "reasons"])
@pytest.mark.parametrize("chat", CHATS)
def test_turns_are_those_that_transformers_marks(tmp_path: Path, chat: str, template: str) -> None:
    transformers = pytest.importorskip("transformers", reason="compares with transformers")
    folder, messages = folder_of(tmp_path, template), [dict(message) for message in CHATS[chat]]
    if template == REASONING:
        messages = [{**each, "reasoning": "hm"} if each["role"] == "assistant" else each for each in messages]
    marked = transformers.AutoTokenizer.from_pretrained(folder).apply_chat_template(
        messages, return_dict=True, return_assistant_tokens_mask=True, tokenize=True
    )
    if template in (IGNORES, BOTH) and chat == "null":
        assert "None" not in data_text(folder, marked["input_ids"])
    lines = [{"messages": messages}, {"text": "val"}]
    tokens, counted, _ = read(write_lines(tmp_path / "chats.jsonl", lines), "--tokenizer", str(folder))
    assert tokens == marked["input_ids"]
    assert counted == [bool(mark) for mark in marked["assistant_masks"]] and 0 < sum(counted) < len(counted)


def test_only_the_call_counts_where_a_template_leaves_the_content_out(tmp_path: Path) -> None:
    """Neither the result of the tool nor what the user says next."""
    folder = folder_of(tmp_path, IGNORES)
    path = write_lines(tmp_path / "chats.jsonl", [{"messages": CHATS["counted"]}, {"text": "val"}])
    tokens, counted, _ = read(path, "--tokenizer", str(folder))
    ones = [token for token, count in zip(tokens, counted, strict=True) if count]
    assert data_text(folder, ones) == 'CALL weather {"city": "Ulm"}<|end|>'


def test_an_answer_of_no_weight_and_a_call_of_weight(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, IGNORES)
    chat = [USER, calling(weight=0), TOOL, ANSWER]
    path = write_lines(tmp_path / "chats.jsonl", [{"messages": chat}, {"text": "val"}])
    tokens, counted, _ = read(path, "--tokenizer", str(folder))
    ones = [token for token, count in zip(tokens, counted, strict=True) if count]
    assert data_text(folder, ones) == "take an umbrella<|end|>"


CHANGING = IGNORES.replace("<|end|>{% endgeneration %}", "{% if loop.last %}!{% endif %}<|end|>{% endgeneration %}")
"""Writes a turn in another way if it is the last one, and leaves the content of a call out."""


@pytest.mark.parametrize(
    ("template", "chat", "said"),
    [
        (CHANGING, CHATS["answered"], "does not change a turn for those after it"),
        (IGNORES, [USER, {"role": "assistant", "content": None}], "expected messages with role and content, got {"),
        (IGNORES, [USER, calling(None) | {"tool_calls": []}], "expected messages with role and content, got {"),
        (IGNORES, [USER, calling(None) | {"tool_calls": "x"}], "expected messages with role and content, got {"),
        (IGNORES, [{"role": "user", "content": None, "tool_calls": CALLS}], "expected messages with role and content"),
    ],
    ids=["changing", "nothing", "no-calls", "text", "user"],
)
def test_refused(tmp_path: Path, template: str, chat: list[dict[str, Any]], said: str) -> None:
    folder = folder_of(tmp_path, template)
    path = write_lines(tmp_path / "chats.jsonl", [{"messages": chat}, {"text": "val"}])
    with refused(DataError, f"--data {path}, line 1: expected ", said):
        read(path, "--tokenizer", str(folder))


def cuts(path: Path, *flags: str) -> str:
    return load_data(parse(["--data", str(path), "--eval-batches", "0", *flags])).fit_in_words()


def test_documents_that_sequences_cut_are_counted(tmp_path: Path) -> None:
    """A prompt of 8 tokens and a completion of 4: sequences of 12 tokens have each whole."""
    path = write_lines(tmp_path / "a.jsonl", [{"prompt": "x" * 8, "completion": "yes."}] * 50)
    trained = ["--fit", "cut", "--epochs", "1", "--batch-size", "5", "--seq-len"]
    assert cuts(path, *trained, "12") == ""
    all_lack = "about 100% of the counted tokens lack the beginning of their document (--seq-len)"
    assert cuts(path, *trained, "6") == f"sequences of 6 tokens cut 45 of 45 documents: {all_lack}"
    some = cuts(path, *trained, "18")
    assert some == f"sequences of 18 tokens cut 15 of 45 documents: {all_lack.replace('100%', '32%')}", some
    drawn = cuts(path, "--fit", "cut", "--steps", "9", "--batch-size", "5", "--seq-len", "12")
    share = re.fullmatch(r"sequences of 12 tokens cut documents: about (\d+)% of the counted tokens lack.*", drawn)
    assert share and 65 < int(share[1]) < 90, "a completion's last token is 11 places after the first: 79% on average"
    text = write_lines(tmp_path / "text.jsonl", [{"text": "x" * 12}] * 50)
    assert cuts(text, *trained, "6") == "", "text is cut as it comes"


def test_documents_of_token_files_that_sequences_cut_are_counted(tmp_path: Path) -> None:
    document = [50256, *range(11)]
    (tmp_path / "a_train.bin").write_bytes(token_bytes(document * 50))
    (tmp_path / "a_train.mask").write_bytes(bytes([0] * 8 + [1] * 4) * 50)
    (tmp_path / "a_val.bin").write_bytes(token_bytes(document * 50))
    trained = ["--epochs", "1", "--batch-size", "5", "--seq-len"]
    assert cuts(tmp_path, *trained, "12") == ""
    assert cuts(tmp_path, *trained, "6").startswith("sequences of 6 tokens cut documents: about 100% of the counted")


def test_the_first_lines_say_what_is_cut(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"prompt": "x" * 8, "completion": "yes."}] * 50)
    config = _config(path, tmp_path / "out", seq_len=6, fit="cut", steps=1, eval_batches=0, sample_tokens=0)
    spawn(lambda comm: Trainer(config, comm).run(), 2, timeout=100)
    assert capsys.readouterr().out.count("\nsequences of 6 tokens cut documents: about ") == 1
