"""A trained model in Python: what ``kos.train.load`` takes, and what it computes."""

import os
import shutil
import subprocess
from typing import Any

import numpy as np
import pytest

import kos.train
from kos.errors import CheckpointError, InvalidArgument
from kos.train import checkpoint
from kos.train.parallel.mesh import Layout
from kos.train.tools.metrics import read_metrics
from tests.forked import python
from tests.train.models import small
from tests.train.runs import SMALL, _train
from tests.train.sharded import save_in, whole_state

PROMPT = "one ring"


@pytest.fixture(scope="module")
def run(text, tmp_path_factory):
    out = tmp_path_factory.mktemp("run") / "out"
    _train(text, out, steps=3, eval_batches=1, tokenizer="chars")
    return out


def test_loss_logits_and_text_of_a_run(run, text):
    model = kos.train.load(run)
    assert model.config.hidden_size == SMALL["model"]["hidden_size"] and model.tokenizer.kind == "chars"
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
    command = [*python(), "-m", "kos.train.sample", str(run), "--prompt", PROMPT, "--tokens", "9", "--seed", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.stdout == model.generate(PROMPT, 9, seed=3) + "\n"
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


def test_what_several_ranks_have_saved(tmp_path):
    """Weights alone are read, and what is damaged of them is found."""
    shape = small(tie_word_embeddings=True)
    whole = whole_state(shape)
    path = save_in(Layout(dp=2, pp=2), tmp_path, 1, shape, whole)
    (path / "optimizer-00002-of-00004.safetensors").unlink()
    model = kos.train.load(path)
    assert all(np.array_equal(model.weights[name], whole[name]) for name in model.weights)
    (path / "model-00003-of-00004.safetensors").unlink()
    with pytest.raises(CheckpointError, match="expected a complete checkpoint, got .*model-00003-of-00004"):
        kos.train.load(path)


@pytest.mark.parametrize(
    ("tokens", "got"),
    [("", r"T from 1 to 32, got \w+ \(0,\)"), ([1.5], r"float64 \(1,\)"), ([[[1]]], r"\(1, 1, 1\)"),
     ([0] * 33, r"\(33,\)"), ([1, -1], "got -1 to 1"), ([99], "got 99 to 99"), ([1 << 32], "got 4294967296 to")],
)  # fmt: skip
def test_wrong_tokens_are_named(run, tokens, got):
    with pytest.raises(InvalidArgument, match=f"expected .*{got}"):
        kos.train.load(run).logits(tokens)


def test_wrong_targets_are_named(run):
    model = kos.train.load(run)
    with pytest.raises(InvalidArgument, match="expected at least two tokens, got one"):
        model.loss([1])
    for targets in ([1, 2, 3], [1, -2], [1, 99], [], [1.5, 2], [1 << 32, 1]):
        with pytest.raises(InvalidArgument, match=r"expected integer targets of shape \(1, 2\) from -1 to \d+, got "):
            model.loss([1, 2], targets)
    with pytest.raises(InvalidArgument, match="temperature: expected 0 or more, got -1"):
        model.generate(temperature=-1)
    with pytest.raises(AttributeError, match=r"module 'kos.train' has no attribute 'lode'"):
        kos.train.lode  # noqa: B018


def test_metrics_are_read_from_what_open_takes(run):
    path = run / "metrics.jsonl"
    rows = read_metrics(path)
    assert len(rows) == 3
    for given in (str(path), bytes(path), run, str(run), bytes(run), os.open(path, os.O_RDONLY)):
        assert kos.train.read_metrics(given) == rows, given
    reader, writer = os.pipe()
    os.write(writer, path.read_bytes())
    os.close(writer)
    assert kos.train.read_metrics(reader) == rows
    assert kos.train.read_metrics(bytes(run / "nothing")) == []
