"""Data is tokenised and fingerprinted once a machine: what that comes to is kept beside it while it is the same."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kos.errors import DataError
from kos.testing import spawn
from kos.train.config.options import TrainConfig
from kos.train.data import tokenizers
from kos.train.data.batches import Dataset, load_data
from kos.train.trainer import Trainer
from tests.train.corpora import overwrite, token_bytes
from tests.train.runs import SMALL

TEXT = "one ring, two rings\nand a tree of é\n" * 200


@pytest.fixture(autouse=True)
def _cache(monkeypatch, tmp_path, all_is_kept):
    """The user's cache is in here."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def encoded(before_call):
    """How many characters were encoded, a call each."""
    seen = []
    before_call(tokenizers.ByteTokenizer, "encode", lambda tokenizer, text: seen.extend([len(text)] * bool(text)))
    return seen


@pytest.fixture
def folder(tmp_path):
    """Two files of text."""
    data = tmp_path / "data"
    data.mkdir()
    for name in ("a.txt", "b.txt"):
        (data / name).write_text(name + TEXT)
    return data


def _load(data: Path, **changes: Any) -> Dataset:
    return load_data(TrainConfig.from_preset("tiny", data=str(data), **{**SMALL, **changes}))


def _tokens(data: Dataset) -> tuple[bytes, bytes, str, dict[str, Any]]:
    train, val = (each.window(0, each.size)[0].astype(np.uint8).tobytes() for each in (data.train, data.val))
    return train, val, data.fingerprint, data.tokenizer.to_json()


def test_text_is_tokenised_once(folder, tmp_path, encoded):
    places = folder / ".kos", tmp_path / "cache"
    for place in places:
        place.write_text("a file, so that nothing can be kept there")
    plain = _tokens(_load(folder))
    for place in places:
        place.unlink()
    encoded.clear()
    assert _tokens(_load(folder)) == plain and sum(encoded) == 2 * (5 + len(TEXT))
    encoded.clear()
    for path in folder.glob("*.txt"):  # nor is text read
        overwrite(path, b"x" * path.stat().st_size)
    assert _tokens(_load(folder)) == plain and encoded == []
    moved = folder.rename(folder.with_name("moved"))
    assert _tokens(_load(moved)) == plain and encoded == []


def test_what_changed_is_tokenised_again(folder, encoded):
    """Also if it has the size that it had."""
    first = _tokens(_load(folder))
    (folder / "a.txt").write_text("A.txt" + TEXT)
    os.utime(folder / "a.txt", (1, 1))
    second = _tokens(_load(folder))
    assert second[2] != first[2] and second[0].startswith(b"A")
    (folder / "c.txt").write_text("x" * 99)
    assert _tokens(_load(folder))[2] not in (first[2], second[2])
    encoded.clear()
    assert _load(folder, split_special_tokens=False).tokenizer.kind == "bytes" and encoded
    shutil.rmtree(folder / ".kos")
    encoded.clear()
    _load(folder)
    assert encoded


@pytest.mark.parametrize("tokens", [False, True])
def test_what_the_path_of_data_tells_of_a_split_is_part_of_it(tmp_path, tokens):
    """Files below ``--data`` are split by their paths, and these differ between a folder and the one above it."""
    inner = tmp_path / "data" / "train_part"
    inner.mkdir(parents=True)
    for name, text in (("a", TEXT), ("b", TEXT + TEXT)):
        path = inner / f"{name}.{'bin' if tokens else 'txt'}"
        path.write_bytes(token_bytes([*range(len(text))]) if tokens else text.encode())
    said = [(data.held_out, *map(len, (data.train, data.val))) for data in map(_load, [inner, inner.parent])]
    shutil.rmtree(inner / ".kos")
    assert _load(inner.parent).held_out == said[1][0] != said[0][0] and said[0][1:] != said[1][1:]


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: os.truncate(path, 9)])
def test_what_is_kept_in_part_is_made_again(folder, encoded, damage):
    whole = _tokens(_load(folder))
    damage(next((folder / ".kos").glob("*/00000.bin")))
    encoded.clear()
    assert _tokens(_load(folder)) == whole and sum(encoded) == 2 * (5 + len(TEXT))


def test_once_a_machine(folder, tmp_path, encoded):
    config = TrainConfig.from_preset("tiny", data=str(folder), out=tmp_path / "run", **{**SMALL, "steps": 1})

    def run(comm):
        with Trainer(config, comm) as trainer:
            return trainer.data.fingerprint

    assert len(set(spawn(run, 4, timeout=100))) == 1
    assert sum(encoded) == 2 * (5 + len(TEXT))


@pytest.mark.parametrize("where", ["cache", "nowhere"])
def test_data_in_a_folder_that_cannot_be_written(folder, tmp_path, encoded, where):
    (folder / ".kos").write_text("")  # as good as no permission, which root has anyhow
    if where == "nowhere":
        (tmp_path / "cache").write_text("")
    first = _tokens(_load(folder))
    encoded.clear()
    assert _tokens(_load(folder)) == first and bool(encoded) == (where == "nowhere")
    other = shutil.copytree(folder, tmp_path / "other")
    assert _tokens(_load(other)) == first


def test_other_settings_of_the_data_prepare_it_again(folder, tmp_path):
    """With other validation data, another field, and another treatment of special tokens."""
    other = tmp_path / "other.txt"
    other.write_text("other" + TEXT)
    (folder / "c.jsonl").write_text(json.dumps({"text": 50 * "one", "body": 50 * "another"}))
    changes = [{}, {"val_data": str(other)}, {"text_field": "body"}, {"val_data": "stdlib"}]
    first = [_tokens(_load(folder, **each)) for each in changes]
    assert len({tokens[2] for tokens in first}) == 4
    assert [_tokens(_load(folder, **each)) for each in changes] == first
    assert not (tmp_path / ".kos").exists() and len(list((folder / ".kos").iterdir())) == 4
    other.write_text(TEXT[:99])
    assert _tokens(_load(folder, **changes[1]))[1] == TEXT[:99].encode()


def test_token_files_are_fingerprinted_once(tmp_path):
    for name in ("train_0", "train_1", "val_0"):
        (tmp_path / f"{name}.bin").write_bytes(token_bytes([*range(400)]))
    first = _tokens(_load(tmp_path))
    overwrite(tmp_path / "train_1.bin", token_bytes([*range(1, 401)]))
    assert _tokens(_load(tmp_path))[2] == first[2]
    (tmp_path / "train_1.bin").write_bytes(token_bytes([*range(401)]))
    assert _tokens(_load(tmp_path))[2] != first[2]


def test_text_that_cannot_be_read_leaves_nothing(folder, tmp_path):
    (folder / "a.txt").write_bytes(b"\xff")
    (folder / "b.txt").write_bytes(b"\xff")
    with pytest.raises(DataError, match="none of them text"):
        _load(folder)
    assert not list(folder.glob(".kos/*")) and not list(tmp_path.glob("cache/*"))
