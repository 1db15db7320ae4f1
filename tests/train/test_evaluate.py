"""``kos eval``: the losses of transformers and the accuracies of lm-evaluation-harness, in any layout."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kos.train
from kos.errors import DataError, KosError
from kos.testing import spawn
from kos.train import evaluate as command
from kos.train import evaluator
from kos.train.checkpoint import adapter
from kos.train.data.choices import read_questions
from kos.train.data.tokenizers import ByteTokenizer, HuggingFaceTokenizer, NumberTokenizer
from tests.forked import python
from tests.launcher import MPIRUN, OUTSIDE, needs_mpirun, run_program
from tests.train.evaluation_cases import FORMS, questions, write_llmc, write_model, write_questions
from tests.train.host_kernels.communicator import DeviceComm
from tests.train.runs import _train
from tests.train.test_loss_masks import write_lines
from tests.train.tokenizer_files import byte_level_bpe

LOSSES = {64: 6.669540956946722, 32: 6.640006680250871}
"""Of the model and the contexts of ``evaluation_cases``, by the tokens of a window: transformers 5.24 in float64."""

ACCURACIES = {"plain": (9, 10), "hellaswag": (10, 11), "arc": (9, 10)}
"""acc and acc_norm of the 24 questions, in questions: lm-evaluation-harness 0.4.13."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model, a text, and questions in all forms."""
    folder = tmp_path_factory.mktemp("evaluation")
    write_model(folder / "model")
    (folder / "text.txt").write_text(" ".join(each["ctx"] for each in questions()))
    for form in FORMS:
        write_questions(folder / f"{form}.jsonl", form)
    return folder


TASKS = [f"{form}.jsonl" for form in FORMS]


def rows_of(
    folder: Path, ranks: int = 1, data: Any = ("text.txt",), choices: Any = TASKS, model: str = "model", **flags: Any
) -> list[Any]:
    """The rows of ``kos eval`` for the model, data and questions in ``folder``. All ranks must return the same rows."""
    sources, tasks = [str(folder / name) for name in data], [folder / name for name in choices]

    def run(comm: Any) -> Any:
        device = DeviceComm(comm) if flags.get("device") == "cuda" else comm
        return evaluator.evaluate(folder / model, sources, tasks, flags, device)

    first, *others = spawn(run, ranks, timeout=200)
    assert all(rows == first for rows in others)
    return first


def check(rows: list[Any], seq_len: int = 64, rel: float = 1e-5) -> None:
    loss, *accuracies = rows
    assert loss["tokens"] == 1284 and loss["seq_len"] == seq_len
    assert loss["loss"] == pytest.approx(LOSSES[seq_len], rel=rel)
    assert loss["perplexity"] == pytest.approx(math.exp(loss["loss"]))
    assert loss["bits_per_byte"] == pytest.approx(loss["loss"] / math.log(2)), "a token of this tokenizer is a byte"
    assert accuracies
    for row in accuracies:
        acc, acc_norm = ACCURACIES[Path(row["data"]).stem]
        got = row["acc"], row["acc_norm"], row["questions"]
        assert got == (pytest.approx(acc / 24), pytest.approx(acc_norm / 24), 24), row["data"]


LAYOUTS = [(3, {}), (4, {"cp": 2}), (4, {"tp": 2, "pp": 2})]


def test_one_rank_has_the_numbers_of_the_references(folder):
    check(rows := rows_of(folder))
    check(rows_of(folder, seq_len=32), 32)
    assert [row["cut"] for row in rows[1:]] == [16, 20, 21]


@pytest.mark.parametrize(("ranks", "layout"), LAYOUTS)
def test_any_layout_has_the_same_numbers(folder, ranks, layout):
    check(rows_of(folder, ranks, choices=TASKS[:1], **layout))


@pytest.mark.parametrize(("ranks", "layout"), [(1, {}), (2, {"tp": 2})])
def test_an_emulated_gpu_has_the_same_numbers(emulated, folder, ranks, layout):
    check(rows_of(folder, ranks, choices=TASKS[:1], device="cuda", dtype="float32", **layout))


def test_there_are_no_gradients_of_matrices(folder):
    def shapes(comm):
        model, weights = adapter.whole_model(folder / "model")
        config = evaluator.settings_of(folder / "model", model, {}, comm.size)
        held = evaluator.Evaluator(model, weights, config, 64, comm, lambda what, share: None)
        found = {name: x.shape for name, x in held.device.step.gradients.items()}
        held.close()
        return found

    found = spawn(shapes, 2, timeout=100)[0]
    assert found and all(len(shape) == 1 for shape in found.values())


def test_a_run_has_its_own_validation_loss(text, tmp_path):
    """Of as much data as a validation has, from the newest checkpoint; of masked data too."""
    pairs = [{"prompt": "one ring", "completion": f" {word}"} for word in ("tree", "barrier", "rank " * 9)] * 8
    for name in ("pairs.jsonl", "train.jsonl"):
        write_lines(tmp_path / name, pairs)
    (tmp_path / "val.txt").write_text(text.read_text()[: 8 * 32 + 1])
    for name, how in (("val.txt", {}), ("pairs.jsonl", {"fit": "whole"})):
        val = str(tmp_path / name)
        data = tmp_path / "train.jsonl" if name == "pairs.jsonl" else text
        rows = _train(data, tmp_path / f"run {name}", steps=3, val_data=val, eval_batches=99, **how)
        [row] = rows_of(tmp_path, data=[name], choices=(), model=f"run {name}")
        assert row["checkpoint"] == str(tmp_path / f"run {name}" / "checkpoints" / "step-3")
        assert row["loss"] == pytest.approx(rows[-1]["val_loss"], rel=1e-5), name
    assert row["tokens"] == 8 * sum(len(each["completion"]) for each in pairs[:3])


def test_a_file_for_validation_is_evaluated_alone(folder, tmp_path):
    for name in ("train.txt", "val.txt"):
        (tmp_path / name).write_text("one ring " * (9 if name == "val.txt" else 50))
    rows = rows_of(folder, data=[tmp_path, tmp_path / "train.txt"], choices=())
    assert [row["tokens"] for row in rows] == [9 * 9 - 1, 50 * 9 - 1]


# --- questions --------------------------------------------------------------------------------------------------


def likelihoods(model: Any, context: list[int], ending: list[int]) -> float:
    """Of an ending, token by token."""
    ids = [*context, *ending][-model.config.max_position_embeddings - 1 :]
    logits = model.logits(ids[:-1]).astype(np.float64)
    odds = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return float(sum(odds[at - 1, ids[at]] for at in range(len(ids) - len(ending), len(ids))))


def test_questions_of_llmc(folder, tmp_path):
    """acc_norm divides by tokens, as llm.c does."""
    rng, made = np.random.default_rng(4), []
    for number in range(20):
        lengths = rng.integers(1, 9, 4)
        made.append((rng.integers(0, 256, 1 + 4 * number).tolist(),
                     [rng.integers(0, 256, length).tolist() for length in lengths], number % 4))  # fmt: skip
    model, right = kos.train.load(folder / "model"), [0, 0]
    for context, endings, label in made:
        scores = [likelihoods(model, context, ending) for ending in endings]
        by_length = [score / len(ending) for score, ending in zip(scores, endings, strict=True)]
        right = [n + (int(np.argmax(x)) == label) for n, x in zip(right, (scores, by_length), strict=True)]
    assert right[0] != right[1]
    path = write_llmc(tmp_path / "hellaswag.bin", made)
    [row] = rows_of(folder, 2, data=(), choices=[path])
    assert [row["acc"] * 20, row["acc_norm"] * 20] == pytest.approx(right)


def test_endings_of_a_context(tmp_path):
    """A token of a context and an ending is the ending's; an empty context begins with the tokenizer's first token."""
    bpe = byte_level_bpe(["ring tree ring tree\n" * 50], 290, ["<|begin|>"])
    tokenizer = HuggingFaceTokenizer(json.loads(bpe.to_str()), "x", bos="<|begin|>")
    lines = [{"ctx": ctx, "endings": ["tree", "ring tree"], "label": "1"} for ctx in ("ring", "ring ", "")]
    path = write_lines(tmp_path / "q.jsonl", lines)
    for line, question in zip(lines, read_questions(path, tokenizer, 99), strict=True):
        for ending, ids, count in zip(line["endings"], question.sequences, question.counts, strict=True):
            assert list(ids) == bpe.encode(f"{line['ctx']} {ending}").ids
            assert count == len(ids) - len(bpe.encode(line["ctx"].rstrip()).ids)
        assert (question.lengths, question.label) == ([4, 9], 1)
    question = read_questions(path, ByteTokenizer(), 99)[2]
    assert list(question.sequences[0]) == [10, *b" tree"] and question.counts == [5, 10]
    assert [each.cut for each in read_questions(path, ByteTokenizer(), 11)] == [True, True, False]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("[1]", "expected ctx and endings, or question, choices and answerKey, with texts, got [1]"),
        ('{"ctx": "a", "endings": ["b"]}', "expected the label of one of 1 endings, got None"),
        ('{"ctx": "a", "endings": ["b"], "label": 1}', "expected the label of one of 1 endings, got 1"),
        ('{"ctx": "a", "endings": ["b"], "label": true}', "expected the label of one of 1 endings, got True"),
        ('{"question": "a", "choices": {"text": ["b"], "label": ["A"]}, "answerKey": "B"}', "endings, got 'B'"),
        ("{", "expected JSON, got"),
        (json.dumps({"ctx": "a", "endings": ["b" * 99], "label": 0}), "expected endings of up to 64 tokens"),
    ],
)
def test_wrong_questions_are_named(tmp_path, line, expected):
    path = tmp_path / "q.jsonl"
    path.write_text(f'{{"ctx": "a", "endings": ["b"], "label": 0}}\n\n{line}\n')
    with pytest.raises(DataError) as raised:
        read_questions(path, ByteTokenizer(), 64)
    assert str(raised.value).startswith(f"--choices {path}") and expected in str(raised.value)
    assert "line 3: " in str(raised.value) or "up to" in expected


def test_wrong_files_of_questions_are_named(tmp_path):
    path = write_llmc(tmp_path / "q.bin", [([1, 2], [[3], [4, 5]], 1)] * 2)
    assert len(read_questions(path, NumberTokenizer(6), 64)) == 2
    whole = path.read_bytes()
    for content, expected in (
        (whole[:-2], "question 1: expected a whole question, got ["),
        (whole[:4] + b"\2" + whole[5:], "expected questions of version 1, got a header of [20240522, 2, 2]"),
        (whole[:1030] + b"\2" + whole[1031:], "question 0: expected a whole question"),
        (whole[:8], "expected questions of version 1, got a header of [20240522, 1, 0]"),
    ):
        path.write_bytes(content)
        with pytest.raises(DataError) as raised:
            read_questions(path, NumberTokenizer(6), 64)
        assert f"--choices {path}" in str(raised.value) and expected in str(raised.value)
    path.write_bytes(whole)
    with pytest.raises(DataError, match="question 0: expected tokens below the vocabulary's 5, got 5"):
        read_questions(path, NumberTokenizer(5), 64)
    for nothing in (tmp_path / "no.jsonl", tmp_path):
        with pytest.raises(DataError, match="expected readable files, got"):
            read_questions(nothing, ByteTokenizer(), 64)
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(DataError, match="expected lines with questions, got none"):
        read_questions(tmp_path / "empty.jsonl", ByteTokenizer(), 64)


# --- bytes ------------------------------------------------------------------------------------------------------


def test_the_bytes_of_tokens():
    said = "one ring, été — 環\n  two"
    library = pytest.importorskip("tokenizers", reason="needs the extra 'tokenizers'")
    byte_level = byte_level_bpe([said * 9], 290, ["<|begin|>"])
    spaces = library.Tokenizer(library.models.BPE(
        {"▁": 0, "o": 1, "n": 2, "e": 3, "▁o": 4, **{f"<0x{n:02X}>": 5 + n for n in range(256)}}, [("▁", "o")],
        byte_fallback=True,
    ))  # fmt: skip
    spaces.normalizer = library.normalizers.Replace(" ", "▁")
    spaces.decoder = library.decoders.Sequence([library.decoders.Replace("▁", " "), library.decoders.ByteFallback()])
    spaces.add_special_tokens(["<s>"])
    spaces.add_tokens(["ring"])
    for tokenizer in (
        ByteTokenizer(), HuggingFaceTokenizer(json.loads(byte_level.to_str()), "x"),
        HuggingFaceTokenizer(json.loads(spaces.to_str()), "y"),
    ):  # fmt: skip
        counts = tokenizer.token_bytes()
        assert counts is not None and counts.shape == (tokenizer.vocab_size,)
        assert counts[tokenizer.encode(said)].sum() == len(said.encode())
    assert counts[tokenizer.encode("<s>")].sum() == 0
    assert NumberTokenizer(9).token_bytes() is None


# --- the command ------------------------------------------------------------------------------------------------


def test_a_table_and_a_picture(folder, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    other, words = tmp_path / "other", ["--data", str(folder / "text.txt"), "--choices", str(folder / "plain.jsonl")]
    write_model(other, num_hidden_layers=1)
    words += ["--plot", str(tmp_path / "rows.png"), "--seq-len", "32"]
    assert command.main([str(folder / "model"), str(other), *words]) == 0
    header, *lines = capsys.readouterr().out.splitlines()
    names = ["checkpoint", "data", "tokens", "loss", "perplexity", "bits/byte", "questions", "acc", "acc_norm"]
    assert header.split() == names and [line.split()[0] for line in lines[:4]] == [str(folder / "model")] * 2 + [
        str(other)
    ] * 2
    assert lines[0].split()[2:4] == ["1,284", "6.6400"] and lines[1].split()[2:] == ["24", "0.3750", "0.4167"]
    assert lines[4:] == [f"{folder}/plain.jsonl: 16 contexts are longer than the model's and lack their beginning"] * 2
    assert lines[0].split()[3] != lines[2].split()[3]
    assert (tmp_path / "rows.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "expected", "status"),
    [
        ("{model}", "--data: expected --data or --choices to evaluate on, got neither", 2),
        ("{model} --data no", "--data: expected stdlib, or the path of a file or folder, got 'no'", 2),
        ("no --data {text}", "no: expected a checkpoint or a run with one under checkpoints/, got no such folder", 2),
        ("{model} --data {text} --seq-len 65", "--seq-len: expected at most 64", 2),
        ("{model} --data {text} --plot no/x.png", "no/x.png: expected a file to write, got no such folder", 2),
        ("{text} --data {text}", "expected a checkpoint or a run", 1),
    ],
)
def test_what_it_refuses(folder, tmp_path, monkeypatch, capsys, words, expected, status):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    given = [word.format(model=folder / "model", text=folder / "text.txt") for word in words.split()]
    assert command.main(given) == status
    said = capsys.readouterr()
    assert expected in said.err and said.err.startswith("kos: error: ") and said.err.count("\n") == 1, said.err
    assert not said.out


def test_tokens_without_a_header(folder, tmp_path, capsys):
    np.array([1, 2, 3], "<u2").tofile(path := tmp_path / "tokens.bin")
    assert command.main([str(folder / "model"), "--data", str(path), "--token-dtype", "uint16"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[2] == "2"


def test_short_texts(folder, tmp_path):
    """They need not fill a window, but have a target."""
    model = kos.train.load(folder / "model")
    for words in ("ab", "one ring"):
        (tmp_path / "short.txt").write_text(words)
        [row] = rows_of(folder, data=[tmp_path / "short.txt"], choices=())
        assert (row["tokens"], row["loss"]) == (len(words) - 1, pytest.approx(model.loss(words), rel=1e-5))
    (tmp_path / "one.txt").write_text("a")
    with pytest.raises(KosError, match=r"--data .*one.txt: expected a target that the loss counts, got none"):
        rows_of(folder, data=[tmp_path / "one.txt"], choices=())


@needs_mpirun
def test_ranks_of_mpirun(folder):
    """One table, and one line of an error with its exit status."""
    words = [MPIRUN, "-n", "2", *python(), "-m", "kos.train.evaluate", str(folder / "model")]
    done = run_program(*words, "--data", str(folder / "text.txt"), "--tp", "2", env=OUTSIDE)
    assert (done.returncode, done.stdout.count("6.6695")) == (0, 1), done.stderr
    done = run_program(*words, "--choices", "no", env=OUTSIDE)
    assert done.returncode == 2 and done.stderr.count("kos: error: ") == 1
