"""Each checkpoint has the other files in the folder of --init-from: chat template, special tokens, generation."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from kos.errors import CheckpointError
from kos.train import checkpoint
from kos.train.data.chat import read_chat_template
from kos.train.data.tokenizers import ByteTokenizer, NumberTokenizer
from tests.train.runs import _train

EXTRA = {
    "chat_template.jinja": "{{ messages }}",
    "generation_config.json": '{"eos_token_id": [1, 7], "temperature": 0.6}',
    "LICENSE": "as you like",
    "special_tokens_map.json": '{"pad_token": "<|end|>"}',
}
LEFT = (".gitattributes", "optimizer.pt", "pytorch_model.bin", "consolidated.00.pth", "model-q4.gguf", "weights.npz",
        "large.txt")  # fmt: skip
SETTINGS = {"pad_token": "<|end|>", "model_max_length": 99, "chat_template": "{{ messages }}", "tokenizer_class": "Own"}


@pytest.fixture(scope="module")
def first(text, huggingface_file, tmp_path_factory):
    """A checkpoint of weights and their tokenizer."""
    out = tmp_path_factory.mktemp("first")
    _train(text, out, steps=1, tokenizer=str(huggingface_file))
    return checkpoint.find(out).path


@pytest.fixture
def folder(first, tmp_path):
    """A Hugging Face folder with all files that may be beside the weights."""
    folder = shutil.copytree(first, tmp_path / "weights")
    for name in ("kos_tokenizer.json", "manifest.json", "optimizer.safetensors"):
        (folder / name).unlink()
    for name, content in {**EXTRA, **dict.fromkeys(LEFT, "x")}.items():
        (folder / name).write_text(content)
    (folder / "original").mkdir()
    _change(folder / "config.json", pad_token_id=1, eos_token_id=[1, 7], quantization_config={"bits": 8})
    _change(folder / "config.json", attention_dropout=0.1, embd_pdrop=0.2, resid_pdrop=0.0, attn_pdrop=None)
    _change(folder / "tokenizer_config.json", **SETTINGS)
    return folder


def test_a_huge_folder_goes_along_in_part(tmp_path):
    """The smallest files: rank 0 holds them in memory, and each checkpoint writes them."""
    for name, size in {"a.log": 90, "b.log": 80, "c.json": 101, "d.log": 100, "e.json": 5}.items():
        (tmp_path / name).write_bytes(b"x" * size)
    assert sorted(checkpoint.read_extra(tmp_path, 100, 250)) == ["a.log", "b.log", "e.json"]


def _change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(_read(path) | values))


def _read(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text()))


def test_a_checkpoint_has_the_other_files_of_the_folder(text, tmp_path, first, folder, capsys):
    """Also if the run continues after the folder was deleted. The first lines of the run name these files."""
    os.truncate(folder / "large.txt", checkpoint.LARGEST + 1)  # of which the disk has nothing
    started = sorted(path.name for path in first.iterdir())
    capsys.readouterr()
    _train(text, tmp_path / "run", 2, steps=1, init_from=str(folder))
    said = capsys.readouterr().out
    rates = "learning rate 0.003 after a warm-up of 5 steps, 32 of at most 32 tokens a sequence"
    assert f"from the weights in {folder}: 1 step (each of " in said
    assert f" times), {rates} (--epochs, --lr, --warmup-steps, --seq-len)\n" in said
    assert f"checkpoints also keep these files of {folder}: {', '.join(sorted(EXTRA))}\n" in said
    assert f"training is without the dropout of {folder}: attention_dropout 0.1, embd_pdrop 0.2\n" in said
    shutil.rmtree(folder)
    _train(text, tmp_path / "run", steps=2, init_from=str(folder), resume="auto", tokenizer="auto")
    assert "checkpoints will hold" not in capsys.readouterr().out
    found = checkpoint.find(tmp_path / "run").path
    assert found.name == "step-2" and sorted(path.name for path in found.iterdir()) == sorted([*started, *EXTRA])
    assert {name: (found / name).read_text() for name in EXTRA} == EXTRA
    assert _read(found / "tokenizer_config.json") == {
        "bos_token": "<|begin|>", "eos_token": "<|end|>", "clean_up_tokenization_spaces": False, **SETTINGS
    }  # fmt: skip
    config = _read(found / "config.json")
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (0, [1, 7], 1)
    assert config["dtype"] == "float32" and "quantization_config" not in config
    (found / "LICENSE").write_text("as I like!!")
    with pytest.raises(CheckpointError, match="LICENSE: expected sha256"):
        checkpoint.verify(found)


def test_a_run_on_token_files_keeps_the_tokenizer_of_the_weights(text, tmp_path, folder):
    """Token files have no tokenizer, so the model's own tokenizer is kept."""
    extra, numbers = checkpoint.read_extra(folder), NumberTokenizer(330)
    written = {"config.json": {"bos_token_id": None, "eos_token_id": None}, **numbers.files()}
    files = checkpoint.merge_extra(written, extra, numbers)
    assert files["tokenizer.json"] == (folder / "tokenizer.json").read_bytes()
    assert json.loads(files["tokenizer_config.json"])["pad_token"] == "<|end|>"
    assert files["kos_tokenizer.json"] == numbers.to_json() and files["config.json"]["bos_token_id"] == 0
    del extra["tokenizer.json"]  # the numbers are still those of the model
    files = checkpoint.merge_extra(written, extra, numbers)
    assert files["tokenizer.json"] == numbers.huggingface() and files["config.json"]["eos_token_id"] == [1, 7]


def test_the_settings_of_a_tokenizer_are_kept(text, tmp_path, huggingface_file, folder):
    """Those beside the tokenizer that --tokenizer names, as those of --init-from. The run may go on without them."""
    theirs = shutil.copytree(huggingface_file.parent, tmp_path / "theirs")
    _change(theirs / "tokenizer_config.json", **SETTINGS)
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    for name, how in {"new": {}, "tuned": {"init_from": str(folder)}}.items():
        _train(text, tmp_path / name, steps=1, tokenizer=str(theirs), **how)
        _train(text, tmp_path / name, steps=2, tokenizer=str(theirs), resume="auto", **how)
        found = _read(tmp_path / name / "checkpoints/step-2/tokenizer_config.json")
        assert found == _read(theirs / "tokenizer_config.json") | {
            "bos_token": "<|begin|>", "clean_up_tokenization_spaces": False,
            "tokenizer_class": "PreTrainedTokenizerFast",
        }  # fmt: skip


@pytest.mark.parametrize(
    ("ours", "theirs"), [("a file", "settings"), ("settings", "a file"), ("a file", "none"), ("settings", "none")]
)
def test_the_chat_template_is_that_of_the_tokenizer(ours, theirs, text, tmp_path, huggingface_file, folder):
    """Of --tokenizer, if it has one, and else that of --init-from; also after the run has continued."""
    (folder / "chat_template.jinja").unlink()
    named = shutil.copytree(huggingface_file.parent, tmp_path / "named")
    for place, how, template in ((folder, ours, "ours"), (named, theirs, "theirs")):
        _change(place / "tokenizer_config.json", **{**SETTINGS, "chat_template": template})
        if how != "settings":
            settings = _read(place / "tokenizer_config.json")
            del settings["chat_template"]
            (place / "tokenizer_config.json").write_text(json.dumps(settings))
        if how == "a file":
            (place / "chat_template.jinja").write_text(template)
    how = {"init_from": str(folder), "tokenizer": str(named)}
    for steps, resume in ((1, None), (2, "auto")):
        _train(text, tmp_path / "run", steps=steps, resume=resume, **how)
        found = tmp_path / f"run/checkpoints/step-{steps}"
        template = read_chat_template(str(found))
        assert template is not None and template.source == ("ours" if theirs == "none" else "theirs")
        assert _read(found / "tokenizer_config.json")["model_max_length"] == 99


def test_special_tokens_of_a_folder_without_a_tokenizer_are_those_of_the_run():
    """transformers writes ids 1 and 2 for a LLaMA that has none."""
    extra = {"config.json": b'{"eos_token_id": 2, "use_cache": true}', "tokenizer_config.json": b"[]"}
    ours = ByteTokenizer()
    files = checkpoint.merge_extra({"config.json": {"eos_token_id": 9}, **ours.files()}, extra, ours)
    assert files["config.json"] == {"eos_token_id": 9, "use_cache": True}
    assert files["tokenizer_config.json"] == ours.files()["tokenizer_config.json"]
    assert sorted(ours.files()["tokenizer.json"]["model"]["vocab"].values()) == [*range(256)]
