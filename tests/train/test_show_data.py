"""``--show-data``: sequences as text, with marks around what the loss counts."""

import re
from pathlib import Path

import pytest

from kos.errors import CheckpointError
from kos.train.__main__ import main
from kos.train.config.flags import parse
from kos.train.data.batches import load_data
from kos.train.tokenize import tokenize
from kos.train.tools import show
from tests.train.chat_templates import QWEN, bare
from tests.train.refusal import refused
from tests.train.runs import _config, run
from tests.train.test_chats import ANSWER, TOOL, USER, calling, folder_of
from tests.train.test_loss_masks import write_lines

CALL = '«\n<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call><|im_end|>\n»'
ASKED = "<|im_start|>system\nYou help.<|im_end|>\n<|im_start|>user\nrain today?<|im_end|>\n<|im_start|>assistant\n"
REPLY = "<|im_start|>user\n<tool_response>\nRESULT 12 mm\n</tool_response><|im_end|>\n"


@pytest.fixture
def chats(tmp_path):
    """The flags of a run on chats with calls of tools."""
    pytest.importorskip("jinja2", reason="needs the extra 'chat'")
    folder = folder_of(tmp_path, bare(QWEN))
    path = write_lines(tmp_path / "chats.jsonl", [{"messages": [USER, calling(None), TOOL]}] * 40)
    return ["--data", str(path), "--tokenizer", str(folder), "--seq-len", "400", "--batch-size", "2"]


def test_sequences_are_printed_and_nothing_is_trained(chats, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main([*chats, "--show-data", "3", "--epochs", "1"]) == 0
    printed = capsys.readouterr().out
    first, *others = printed.split("--- step ")[1:]
    places = [each.partition(":")[0] for each in (first, *others)]
    assert places == ["1, sequence 1", "1, sequence 2", "2, sequence 1"]
    assert ASKED + CALL + REPLY in printed and printed.count("the loss counts") == 2
    shown = sum(len(part.partition("»")[0]) for part in first.split("«")[1:])
    counts = int(first.partition(": ")[2].partition(" of 400 tokens count")[0])
    assert 0 < counts < shown, "a token has at least a character"
    assert not (tmp_path / "runs").exists()


def test_padding_is_no_text_and_sequences_name_their_source(tmp_path, capsys):
    """Also with --fit cut, which has no padding.  The number of documents that are cut is shown."""
    pairs = write_lines(tmp_path / "pairs.jsonl", [{"prompt": "x" * n, "completion": "yes."} for n in range(1, 40)])
    text = write_lines(tmp_path / "text.jsonl", [{"text": "the text, " * 9}] * 9)
    flags = ["--batch-size", "4", "--show-data", "12", "--tokenizer", "bytes", "--seq-len", "24"]
    flags += ["--eval-batches", "0", "--hold-out", "0.1"]
    assert main([*flags, "--data", str(pairs)]) == 0
    *shown, last = capsys.readouterr().out.split("\n--- ")
    assert len(shown) == 14 and "\0" not in "".join(shown)
    for each in shown[:12]:
        about, _, content = each.partition("\n")
        padding = re.search(r" of 24 tokens count, (\d+) are padding$", about)
        size = len(content.replace("«", "").replace("»", ""))
        assert size == 24 - int(padding[1]) if padding else 24 <= size <= 25
    assert any("padding" in each for each in shown[:12]) and shown[13].startswith("validation: ")
    assert shown[12].startswith("training: 35 documents of ") and "longer than --seq-len cut into" in shown[12]
    assert "the loss counts" not in last, "the line before says how much, of what is in the sequences"
    assert main([*flags, "--data", f"{pairs}:0.5", "--data", f"{text}:0.5", "--long-documents", "skip"]) == 0
    *shown, last = capsys.readouterr().out.split("\n--- ")
    for each in shown[:24]:
        about, _, content = each.partition("\n")
        assert f", of {pairs}: " in about if "yes" in content else f", of {text}: 24 of 24 tokens count" in about
    assert sum("yes" in each for each in shown[:24]) == 12
    assert f"{pairs}: training: " in shown[24]


@pytest.mark.parametrize("prompt", ["xxxxx", "xxxxxx"])
def test_no_character_is_cut_in_half(tmp_path, prompt):
    """Marks are between characters: the first token of a piece, which may be half of one, is no target."""
    path = write_lines(tmp_path / "pairs.jsonl", [{"prompt": prompt, "completion": "Ä" * 30}] * 4)
    flags = ["--tokenizer", "bytes", "--seq-len", "12", "--batch-size", "1", "--steps", "30", "--hold-out", "0"]
    data, pieces = load_data(parse(["--data", str(path), *flags])), set[str]()
    for step in range(30):
        text, counts = show.sequence(data, step, 0)
        pieces.add(text)
        assert re.fullmatch(r"\ufffd?(x*«\ufffd?Ä+\ufffd?»)+", text) and 0 < counts <= 12, text
        excerpt = show.first_line(data, step).partition("in «»: ")[2]
        assert "\ufffd" not in excerpt and "Ä" in excerpt
    assert any("\ufffd" in text for text in pieces), "sequences cut characters"


def test_a_run_that_resumes_is_shown_from_its_next_step(chats, tmp_path, capsys):
    """With the fit of that run."""
    out = tmp_path / "out"
    how = {"tokenizer": chats[3], "seq_len": 400, "steps": 2, "eval_batches": 0, "batch_size": 2}
    config = _config(Path(chats[1]), out, **how, fit="cut").model_copy(update={"sample_tokens": 0, "epochs": None})
    run(config)
    expected = [show.sequence(load_data(config), step, row)[0] for step, row in ((2, 0), (2, 1), (3, 0))]
    for resume in ("auto", str(out / "checkpoints" / "step-2")):
        capsys.readouterr()
        assert main([*chats, "--show-data", "3", "--steps", "9", "--eval-batches", "0", "--seed", str(config.seed),
                     "--out", str(out), "--resume", resume]) == 0  # fmt: skip
        printed = capsys.readouterr().out
        assert printed.startswith("--- step 3, sequence 1: ") and all(text in printed for text in expected)


def test_a_run_on_chats_answers_a_question_at_its_end(chats, tmp_path, capsys):
    """Of a chat that is held out, or else trained on; the last line says how to chat.  Other data has no question."""
    how = {"tokenizer": chats[3], "seq_len": 400, "steps": 1, "eval_batches": 0}
    for out, changes in (("a", {}), ("b", {"prompt": "rain"}), ("c", {"loss_on": "all"})):
        config = _config(Path(chats[1]), tmp_path / out, **how).model_copy(update={"sample_tokens": 3, **changes})
        run(config, 2)
        printed = capsys.readouterr().out
        sample = printed.partition("--- a sample ---\n")[2]
        assert sample.startswith(ASKED) == (out == "a") and sample.startswith("rain") == (out == "b")
        assert "more text:" not in printed and printed.count(f" chat {tmp_path / out}") == 1
    data = load_data(_config(Path(chats[1]), tmp_path, **how))
    ids = data.question(400)
    assert data.tokenizer.decode(ids) == ASKED and data.question(len(ids) - 1) == []
    none = {"messages": [USER, {**ANSWER, "weight": 0}]}
    late = write_lines(tmp_path / "late.jsonl", [none] * 100 + [{"messages": [USER, ANSWER]}] * 30)
    of_val = {**how, "eval_batches": 1}
    data = load_data(_config(Path(chats[1]), tmp_path, **of_val).model_copy(update={"val_data": str(late)}))
    assert data.question(400) == ids, "of the hundredth chat there is no more than this chat"
    lines = write_lines(tmp_path / "pairs.jsonl", [{"prompt": "a", "completion": "b"}] * 400)
    assert load_data(_config(lines, tmp_path, **how)).question(400) == []


def test_rows_that_fill_the_last_batch_of_an_epoch_are_not_shown(tmp_path, capsys):
    """Eight sequences are two batches of five, without two rows."""
    (tmp_path / "a.txt").write_text("x" * 81)
    flags = [f"--data={tmp_path / 'a.txt'}", "--seq-len=10", "--batch-size=5", "--epochs=2", "--hold-out=0"]
    assert main([*flags, "--eval-batches=0", "--show-data=9"]) == 0
    places = [each.partition(":")[0] for each in capsys.readouterr().out.split("--- step ")[1:]]
    rows = [(1, 1), (1, 2), (1, 3), (1, 4), (1, 5), (2, 1), (2, 2), (2, 3), (3, 1)]
    assert places == [f"{step}, sequence {row}" for step, row in rows]


def test_tokens_of_another_tokenizer_than_the_models_are_refused(chats, tmp_path):
    """As the run refuses them."""
    (tmp_path / "a.txt").write_text("x" * 99)
    tokenize(tmp_path / "tokens", [str(tmp_path / "a.txt")])
    config = parse([f"--data={tmp_path / 'tokens'}", "--seq-len=8", "--show-data=1"])
    assert "(bytes)" in show.report(config)
    with refused(CheckpointError, f"{chats[3]}: expected the tokenizer of this run, bytes, got "):
        show.report(config.model_copy(update={"init_from": chats[3]}))
