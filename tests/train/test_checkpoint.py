"""Checkpoints come back whole, or are refused; nothing in between."""

import itertools
import json
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from kos.errors import CheckpointError
from kos.train import checkpoint
from kos.train.checkpoint import huggingface
from kos.train.optim.adamw import AdamW
from tests.train.models import small
from tests.train.refusal import refused
from tests.train.sharded import save_alone

MODEL = small(tie_word_embeddings=True)


def _save(folder: Path, step: int, seed: int = 0, **options: Any) -> Path:
    return save_alone(folder, MODEL, step, seed, **options)


def test_keep_deletes_the_oldest_and_what_the_run_went_back_behind(tmp_path):
    def kept():
        return sorted(path.name for path in tmp_path.iterdir())

    for step in (1, 2, 10):
        saved = _save(tmp_path, step, keep=2)
    assert len({file.stat().st_mode for file in saved.iterdir()}) == 1, "the mode that the umask gives"
    assert kept() == ["step-10", "step-2"]
    _save(tmp_path, 9, keep=2)
    assert kept() == ["step-2", "step-9"]
    _save(tmp_path, 11, keep=1)
    assert kept() == ["step-11"]
    (tmp_path / "step-11" / "model.safetensors").write_bytes(b"")
    assert checkpoint.find(_save(tmp_path, 10, keep=1)).step == 10
    assert kept() == ["step-10"]
    for step in (11, 12, 13):
        _save(tmp_path, step)
    assert kept() == ["step-10", "step-11", "step-12", "step-13"]


def test_a_manifest_must_be_of_this_checkpoint(tmp_path):
    path = _save(tmp_path, 3)
    with pytest.raises(CheckpointError, match="expected the checkpoint of step 7, got step 3"):
        checkpoint.verify(path.rename(tmp_path / "step-7"))
    path = _save(tmp_path, 3)
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps({**manifest, "files": {}}))
    with pytest.raises(CheckpointError, match="expected the files"):
        checkpoint.verify(path)


FILES = ["model.safetensors", "optimizer.safetensors", "config.json", "kos_tokenizer.json", "manifest.json"]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["truncate", "flip", "delete"])
def test_damage_is_found_and_passed_over(tmp_path, name, damage):
    _save(tmp_path, 1)
    bad = _save(tmp_path, 2)
    path = bad / name
    content = bytearray(path.read_bytes())
    if damage == "truncate":
        path.write_bytes(content[: len(content) // 2])
    elif damage == "flip":
        middle = len(content) // 2 if name != "manifest.json" else content.index(b'"format": 2') + 10
        content[middle] ^= 1
        path.write_bytes(content)
    else:
        path.unlink()
    with pytest.raises(CheckpointError, match="expected"):
        checkpoint.find(bad)
    found = checkpoint.latest(tmp_path)
    assert found is not None and found.step == 1
    replaced = _save(tmp_path, 2, seed=5)  # a run that resumed from 1 reaches 2 again
    assert checkpoint.find(replaced).config == {"seed": 5}


def test_find_names_what_is_missing(tmp_path):
    with pytest.raises(CheckpointError, match="expected a checkpoint or a run"):
        checkpoint.find(tmp_path)
    with pytest.raises(CheckpointError, match="expected a checkpoint or a run .* got no such folder"):
        checkpoint.find(tmp_path / "step-3")
    (tmp_path / "step-3").mkdir()
    with pytest.raises(CheckpointError, match="expected a complete checkpoint"):
        checkpoint.find(tmp_path / "step-3")
    assert checkpoint.latest(tmp_path / "nowhere") is None


def test_a_manifest_that_is_none(tmp_path):
    path = _save(tmp_path, 3) / "manifest.json"
    whole = json.loads(path.read_text())
    for change in ({"step": "3"}, {"step": True}, {"config": []}, {"config": {"config": [1]}}):
        path.write_text(json.dumps({**whole, **change}))
        with refused(CheckpointError, f"{path}: expected an integer step and a config, got"):
            checkpoint.verify(path.parent)
    path.write_text("[" * 100_000)
    with refused(CheckpointError, f"{path.parent}: expected a complete checkpoint, got RecursionError"):
        checkpoint.verify(path.parent)


def test_what_cannot_be_read_is_named(tmp_path, before_call):
    with refused(CheckpointError, f"{'x' * 300}: expected a checkpoint or a run with one under checkpoints/, got"):
        checkpoint.find(Path("x" * 300))
    (tmp_path / "checkpoints").mkdir()

    def closed(path):
        raise PermissionError(13, "Permission denied", str(path))

    for step in (1, 2):  # an older one is no remedy
        _save(tmp_path / "checkpoints", step)
    before_call(huggingface, "fingerprint", closed)
    with refused(CheckpointError, f"{tmp_path}/checkpoints/step-2: expected files that can be read, got Perm"):
        checkpoint.find(tmp_path)
    before_call(Path, "iterdir", closed)
    with refused(CheckpointError, f"{tmp_path}/checkpoints: expected a folder that can be read, got", "denied"):
        checkpoint.find(tmp_path)


def test_another_model_is_refused(tmp_path):
    found = checkpoint.verify(_save(tmp_path, 1))
    shapes = dict(MODEL.parameter_shapes())
    name = "model.norm.weight"
    shapes[name] = (17,)
    with pytest.raises(CheckpointError, match=r"model.norm.weight: expected shape \(17,\), got \(24,\)"):
        huggingface.weight_files(found.path, shapes)
    with pytest.raises(CheckpointError, match=r"exp_avg.model.norm.weight: expected shape \(17,\), got \(24,\)"):
        checkpoint.state_files(found.path, shapes, dict.fromkeys(AdamW.state, shapes))
    with pytest.raises(CheckpointError, match="got none named 'extra'$"):
        huggingface.weight_files(found.path, {**MODEL.parameter_shapes(), "extra": (1,)})
    for layers in (MODEL.num_hidden_layers - 1, MODEL.num_hidden_layers + 1):
        shapes = MODEL.replace(num_hidden_layers=layers).parameter_shapes()
        with pytest.raises(CheckpointError, match=r"'model\.layers\..* \(check num_hidden_layers of config\.json\)$"):
            huggingface.weight_files(found.path, shapes)
    with pytest.raises(CheckpointError, match="expected the tensors of this model, got an unknown 'model"):
        huggingface.weight_files(found.path, {name: (24,)})


def _whole(folder: Path) -> dict[str, int]:
    return {path.name: checkpoint.verify(path).config["seed"] for _, path in checkpoint.steps_in(folder)}


def test_a_kill_at_any_moment_loses_nothing(tmp_path, monkeypatch):
    """Before each call that changes what is where, while a step is replaced and an older one is deleted: what was whole
    is found, and the next save keeps it and removes what was under way."""
    folder, killed, lock, copying = tmp_path / "folder", list[Path](), threading.RLock(), list[bool]()

    def watched(call):
        def run(*given, **options):
            with lock:
                if not copying:
                    copying.append(True)
                    killed.append(shutil.copytree(folder, tmp_path / f"{len(killed)}", symlinks=True))
                    copying.clear()
                return call(*given, **options)

        return run

    _save(folder, 1)
    _save(folder, 5, seed=1)
    with monkeypatch.context() as patch:
        for name in ("rename", "replace", "symlink", "unlink", "rmdir"):
            patch.setattr(os, name, watched(getattr(os, name)))
        _save(folder, 5, seed=2, best={"val_loss": 1.0})
        _save(folder, 6, seed=3, keep=1)
    assert _whole(folder) == {"step-5": 2, "step-6": 3} and len(killed) > 20
    seen, names = [], list[str]()
    for state in killed:
        before, names = names, sorted(path.name for path in state.iterdir())
        if names == before:
            continue
        there = _whole(state)
        found = checkpoint.latest(state)
        seen.append(found and found.config["seed"])
        _save(state, 7, seed=4)
        assert _whole(state) == there | {"step-7": 4}, names
        assert not [path.name for path in state.iterdir() if path.name.startswith(".")], names
    assert [seed for seed, _ in itertools.groupby(seen)] == [1, 2, 3]
