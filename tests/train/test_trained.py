"""A trained model in Python: what ``kos.train.load`` takes, what it computes, and the texts that it samples."""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kos.cuda
import kos.train
from kos.errors import BackendUnavailable, CheckpointError, InvalidArgument, TrainingError
from kos.train import checkpoint, sample
from kos.train.data.tokenizers import HuggingFaceTokenizer, NumberTokenizer
from kos.train.generate import Sampling, Uncached, continue_texts, generate, prompt_ids
from kos.train.tools import read_metrics
from tests.train.runs import SMALL, _train

PROMPT = "one ring"


@pytest.fixture(scope="module")
def run(text, tmp_path_factory):
    """A model that was trained for three steps. Its text is noise, but it depends on the weights."""
    out = tmp_path_factory.mktemp("run") / "out"
    _train(text, out, steps=3, eval_batches=1, save_every=1)
    return out


@pytest.mark.parametrize("device", ["cuda", "cuda:3"])
def test_a_model_is_loaded_on_the_gpu_that_is_named(run, device, before_call):
    asked = list[int]()

    def none(index):
        asked.append(index)
        raise BackendUnavailable("CUDA: no GPU")

    before_call(kos.cuda, "device_info", none)
    with pytest.raises(BackendUnavailable, match="no GPU"):
        kos.train.load(run, device)
    assert asked == [3 if device == "cuda:3" else 0]


def test_loss_logits_and_text_of_a_run(run, text, capsys):
    model = kos.train.load(run)
    assert model.config.hidden_size == SMALL["model"]["hidden_size"] and model.tokenizer.kind == "bytes"
    assert f"hidden_size={model.config.hidden_size}, " in repr(model) and " parameters, " in repr(model)
    held_out = text.read_text()[int(len(text.read_text()) * 0.9) :]
    ids = model.tokenizer.encode(held_out)
    windows = (len(ids) - 1) // 32
    starts = [number * windows // 8 * 32 for number in range(8)]
    batch = np.stack([ids[start : start + 33] for start in starts])
    assert model.loss(batch) == pytest.approx(read_metrics(run / "metrics.jsonl")[-1]["val_loss"], rel=1e-5)
    logits = model.logits(PROMPT)
    assert logits.shape == (len(PROMPT), model.config.vocab_size) and logits.dtype == np.float32
    two = model.logits([model.tokenizer.encode(PROMPT).tolist()] * 2)
    np.testing.assert_allclose(two, [logits, logits], atol=1e-5)
    odds = logits - np.log(np.exp(logits.astype(np.float64)).sum(-1, keepdims=True))
    targets = np.roll(model.tokenizer.encode(PROMPT).astype(int), -1)
    targets[[2, -1]] = -1
    expected = -np.mean([row[target] for row, target in zip(odds, targets, strict=True) if target >= 0])
    assert model.loss(PROMPT, targets) == pytest.approx(expected, rel=1e-5)
    capsys.readouterr()
    said = _say(capsys, run, "--prompt", PROMPT, "--tokens", "9", "--seed", "3")
    assert said == model.generate(PROMPT, 9, seed=3) + "\n"
    assert model.generate(PROMPT, 9, temperature=0) == PROMPT + model.tokenizer.decode(_likeliest(model, 9))


def _likeliest(model: Any, count: int) -> list[int]:
    ids = model.tokenizer.encode(PROMPT).tolist()
    for _ in range(count):
        ids.append(int(model.logits(ids[-32:])[-1].argmax()))
    return ids[len(PROMPT) :]


def test_what_it_is_loaded_from(run, tmp_path):
    newest = checkpoint.find(run).path
    expected = kos.train.load(run).logits(PROMPT)
    folder = shutil.copytree(newest, tmp_path / "hugging face")
    for name in ("manifest.json", "kos_tokenizer.json", "optimizer.safetensors"):
        (folder / name).unlink()
    for source in (newest, str(folder)):
        np.testing.assert_array_equal(kos.train.load(source).logits(PROMPT), expected)
    (folder / "tokenizer.json").unlink()
    assert kos.train.load(folder).tokenizer.kind == "numbers"
    for nothing in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(CheckpointError, match="expected a checkpoint or a run"):
            kos.train.load(nothing)


@pytest.mark.parametrize(
    ("tokens", "got"),
    [("", r"T from 1 to 32, got \w+ \(0,\)"), ([1.5], r"float64 \(1,\)"), ([[[1]]], r"\(1, 1, 1\)"),
     ([0] * 33, r"\(33,\)"), ([1, -1], "got -1 to 1"), ([999], "got 999 to 999"), ([1 << 32], "got 4294967296 to")],
)  # fmt: skip
def test_wrong_tokens_are_named(run, tokens, got):
    with pytest.raises(InvalidArgument, match=f"expected .*{got}"):
        kos.train.load(run).logits(tokens)


def test_wrong_targets_are_named(run):
    model = kos.train.load(run)
    with pytest.raises(InvalidArgument, match="expected at least two tokens, got one"):
        model.loss([1])
    for targets in ([1, 2, 3], [1, -2], [1, 999], [], [1.5, 2], [1 << 32, 1]):
        with pytest.raises(InvalidArgument, match=r"expected integer targets of shape \(1, 2\) from -1 to \d+, got "):
            model.loss([1, 2], targets)
    with pytest.raises(InvalidArgument, match="temperature: expected 0 or more, got -1"):
        model.generate(temperature=-1)
    with pytest.raises(AttributeError, match=r"module 'kos.train' has no attribute 'lode'"):
        kos.train.lode  # noqa: B018


def test_metrics_are_read_from_what_open_takes(run):
    path = run / "metrics.jsonl"
    rows = read_metrics(path)
    path.write_text(path.read_text() + '{"step": 4')  # as a run that was killed left it
    assert len(rows) == 3
    for given in (str(path), bytes(path), run, str(run), bytes(run), os.open(path, os.O_RDONLY)):
        assert kos.train.read_metrics(given) == rows, given
    reader, writer = os.pipe()
    os.write(writer, path.read_bytes())
    os.close(writer)
    assert kos.train.read_metrics(reader) == rows
    assert kos.train.read_metrics(bytes(run / "nothing")) == []


# --- samples --------------------------------------------------------------------------------------------------

LOGITS = np.array([1.5, -0.5, 3.0, 2.0, 0.0, 2.5, -np.inf, 1.0], np.float32)
LONGEST = 5


class Fixed:
    """A model whose next token does not depend on the context. It records the context."""

    def __init__(self, logits: np.ndarray = LOGITS) -> None:
        self.logits = logits
        self.contexts: list[list[int]] = []

    def next_logits(self, tokens: np.ndarray) -> np.ndarray:
        assert tokens.shape[0] == 1
        self.contexts.append(tokens[0].tolist())
        return self.logits.copy()


def _draw(count: int, logits: np.ndarray = LOGITS, seed: int = 11, **settings: Any) -> list[int]:
    return _generated(Fixed(logits), [0], count, seed=seed, **settings)


def _generated(model: Any, prompt: list[int], count: int, stop: int | None = None, **settings: Any) -> list[int]:
    ends, sampling = () if stop is None else (stop,), Sampling(**{"top_k": 0, **settings})
    source = Uncached(model.next_logits)
    return [token for _, token in generate(source, LONGEST, [prompt], count, sampling, ends=ends)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_logits_that_are_not_finite(temperature, bad):
    with pytest.raises(TrainingError, match=f"expected finite logits, got {bad}"):
        _draw(1, np.full(LOGITS.size, bad, np.float32), temperature=temperature)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("temperature", [0.0, 5e-324, 1e-320, 1e-300, 1e-3])
@pytest.mark.parametrize("top_k", [0, 1, 3])
@pytest.mark.parametrize("scale", [1.0, -1.0, 1e30])
def test_a_temperature_near_zero_takes_the_likeliest(temperature, top_k, scale):
    logits = np.array([1, 2, 4, 3, -5, 0], np.float32) * np.float32(scale)
    assert _draw(5, logits, temperature=temperature, top_k=top_k) == [int(np.argmax(logits))] * 5


@pytest.mark.parametrize("length", [4, 9])
def test_a_text_that_outgrows_the_context_goes_on_from_its_last_half(length, caplog):
    """This is reported once, also if the prompt alone is too long."""
    model = Fixed()
    prompt = [7, 6, 5, 4, 3, 2, 1, 0, 7][:length]
    whole = prompt + _generated(model, prompt, 9, seed=0)
    starts = {4: [0, 0, 4, 4, 4, 4, 8, 8, 8], 9: [7, 7, 7, 7, 11, 11, 11, 11, 15]}[length]
    assert model.contexts == [whole[start:end] for start, end in zip(starts, range(length, length + 9), strict=True)]
    said = "the text is longer than the context of 5 tokens: the model sees the last 2, then more"
    assert caplog.messages == [said]


def _say(capsys: Any, *flags: str | Path) -> str:
    assert sample.main([*map(str, flags)]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    return said.out


def test_only_the_weights_are_needed(run, tmp_path, capsys):
    """A checkpoint whose optimizer's state is cut or gone gives the same text; with other weights it is refused."""
    shutil.copytree(run, tmp_path / "copy")
    capsys.readouterr()
    said = _say(capsys, run, "--tokens", "9")
    newest = tmp_path / "copy" / "checkpoints" / "step-3"
    os.truncate(newest / "optimizer.safetensors", 100)
    for damaged in (tmp_path / "copy", newest):
        assert _say(capsys, damaged, "--tokens", "9") == said
    (newest / "optimizer.safetensors").unlink()
    assert _say(capsys, newest, "--tokens", "9") == said
    with pytest.raises(CheckpointError):
        checkpoint.find(newest)
    os.truncate(newest / "model.safetensors", 100)
    assert sample.main([str(newest)]) == 1 and "model.safetensors: expected bytes" in capsys.readouterr().err


def test_a_long_text_is_decoded_in_pieces():
    """The decoder gets a few tokens for each new one.  Characters of several tokens come out whole."""
    library = pytest.importorskip("tokenizers", reason="needs the extra 'tokenizers'")
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"\u2581": 256, "a": 257, "\u2581b": 258}
    model = library.models.BPE(vocab=vocab, merges=[], byte_fallback=True)
    words, steps = library.Tokenizer(model), library.decoders
    replaced = steps.Replace("\u2581", " ")
    words.decoder = steps.Sequence([replaced, steps.ByteFallback(), steps.Fuse(), steps.Strip(" ", 1, 0)])
    decoded = 0

    class Counting(HuggingFaceTokenizer):
        def decode(self, ids):
            nonlocal decoded
            decoded += len([*ids])
            return super().decode(ids)

    tokenizer = Counting(json.loads(words.to_str()), "words")
    texts = ["\u4e2d\u6587" * 5, "\U0001f600" * 7, "a b", "\xe9\u4e2d a", " b" * 9, "?"]
    rng = np.random.default_rng(0)
    for prompt in ("", "a b", "\u4e2d"):
        text = "".join(rng.choice(texts, 150))
        ids, given = _spelled(text), _spelled(prompt)
        follow = iter([*ids, 0, 0])
        whole = tokenizer.decode([*given, *ids])
        decoded = 0
        next_logits = lambda tokens, follow=follow: np.eye(300)[next(follow)]  # noqa: E731
        more = continue_texts(Uncached(next_logits), 10_000, tokenizer, [given], len(ids), Sampling(temperature=0))
        assert tokenizer.decode(given) + "".join(piece for _, piece in more) == whole
        assert decoded < 30 * len(ids), (len(ids), decoded)


def _spelled(text: str) -> list[int]:
    """The bytes of a text, except that " b" and "a" are one token each."""
    words = {" b": [258], "a": [257]}
    return [token for part in re.findall(" b|a|.", text, re.DOTALL) for token in words.get(part, part.encode())]


def test_a_sample_keeps_the_space_after_the_prompt():
    """For token numbers, and for a tokenizer that drops the space before a text's first word."""

    def next_logits(tokens):
        return np.eye(9)[(tokens[0, -1] + 1) % 9]

    def sample(tokenizer, prompt):
        ids, how = prompt_ids(tokenizer, prompt), Sampling(temperature=0)
        texts = continue_texts(Uncached(next_logits), 8, tokenizer, [ids], 2, how)
        return prompt + "".join(piece for _, piece in texts)

    assert sample(NumberTokenizer(9), "5 6") == "5 6 7 8"
    assert sample(NumberTokenizer(9), "") == "1 2"
    library = pytest.importorskip("tokenizers", reason="needs the extra 'tokenizers'")
    words = library.Tokenizer(library.models.WordLevel({f"\u2581w{n}": n for n in range(9)}, "\u2581w0"))
    words.pre_tokenizer, words.decoder = library.pre_tokenizers.Metaspace(), library.decoders.Metaspace()
    assert sample(HuggingFaceTokenizer(json.loads(words.to_str()), "words"), "w3 w4") == "w3 w4 w5 w6"
