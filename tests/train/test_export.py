"""``kos export``: a Hugging Face folder from a checkpoint, which transformers loads with the weights of the run."""

import json
import os
import shutil

import numpy as np
import pytest

import kos.train
from kos.train import checkpoint, export
from kos.train.checkpoint import saving
from tests.train.runs import _train

KEPT = {"chat_template.jinja": "{{ messages }}", "LICENSE": "as you like", "modelcard.md": "a model"}


@pytest.fixture(scope="module")
def run(text, tmp_path_factory):
    """A run of two ranks that write, which began with a folder that has other files."""
    folder = tmp_path_factory.mktemp("run")
    _train(text, folder / "first", steps=1)
    for name, content in KEPT.items():
        (folder / "first/checkpoints/step-1" / name).write_text(content)
    _train(text, folder / "out", 2, steps=3, init_from=str(folder / "first/checkpoints/step-1"))
    return folder / "out"


@pytest.fixture(scope="module")
def folders(run, tmp_path_factory):
    made = {dtype: tmp_path_factory.mktemp("exported") / "deep" / dtype for dtype in ("bfloat16", "float32")}
    for dtype, folder in made.items():
        assert export.main([str(run), str(folder), "--dtype", dtype]) == 0
    return made


def test_it_has_the_files_of_the_run_without_those_of_training(run, folders):
    found = checkpoint.find(run).path
    names = {path.name for path in found.iterdir() if not path.name.startswith("optimizer")} - {"manifest.json"}
    assert {*KEPT, "tokenizer.json", "kos_tokenizer.json", "model.safetensors.index.json"} <= names
    for dtype, folder in folders.items():
        assert {path.name for path in folder.iterdir()} == names and {*folder.parent.iterdir()} == {folder}
        for name in names - {"config.json", "model.safetensors.index.json"}:
            if not name.endswith(".safetensors"):
                assert (folder / name).read_bytes() == (found / name).read_bytes(), name
        settings, before = (json.loads((each / "config.json").read_text()) for each in (folder, found))
        assert settings == before | {"dtype": dtype, "torch_dtype": dtype}
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        weights = kos.train.load(run).weights
        assert index["metadata"]["total_size"] == weights.flat.size * {"bfloat16": 2, "float32": 4}[dtype]
        assert {*index["weight_map"]} == {*weights}


def test_weights_are_those_of_the_run_or_rounded(run, folders):
    expected = kos.train.load(run).weights.flat
    assert np.array_equal(kos.train.load(folders["float32"]).weights.flat, expected)
    rounded = kos.train.load(folders["bfloat16"]).weights.flat
    bits = expected.view(np.uint32)
    nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000  # to the nearest, ties to even
    assert np.array_equal(rounded.view(np.uint32), nearest) and not np.array_equal(rounded, expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_transformers_computes_the_logits_of_the_checkpoint(run, folders, dtype):
    """In the same dtype, bit for bit; by default transformers loads the dtype of config.json."""
    reason = "the reference needs transformers and torch (pip install transformers torch)"
    transformers, torch = (pytest.importorskip(name, reason=reason) for name in ("transformers", "torch"))
    load = transformers.AutoModelForCausalLM.from_pretrained
    ours, theirs = load(folders[dtype], dtype="auto"), load(checkpoint.find(run).path, dtype=getattr(torch, dtype))
    assert ours.dtype == theirs.dtype == getattr(torch, dtype)
    tokens = torch.arange(60).reshape(2, 30)
    assert torch.equal(ours(tokens).logits, theirs(tokens).logits)
    if dtype == "float32":
        np.testing.assert_allclose(ours(tokens).logits.detach(), kos.train.load(run).logits(tokens), atol=1e-5)


def test_a_gpt2_and_one_file(text, tmp_path):
    """Its matrices are turned around in files; one rank writes no index."""
    model = {
        "model_type": "gpt2", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 2, "intermediate_size": 24,
    }  # fmt: skip
    _train(text, tmp_path / "run", steps=1, model=model)
    assert export.main([str(tmp_path / "run/checkpoints/step-1"), str(tmp_path / "out"), "--dtype", "float32"]) == 0
    assert (tmp_path / "out/model.safetensors").exists() and not [*tmp_path.glob("out/*.index.json")]
    flat = (kos.train.load(tmp_path / name).weights.flat for name in ("run", "out"))
    assert np.array_equal(*flat)


def test_what_is_refused_in_one_line(run, tmp_path, capsys, before_call):
    def refused(source, out, expected, code=1):
        capsys.readouterr()
        assert export.main([str(source), str(out)]) == code
        said = capsys.readouterr()
        assert said.out == "" and said.err.count("\n") == 1
        assert said.err.startswith("kos: error: ") and expected in said.err, said.err

    full = tmp_path / "full"
    full.mkdir()
    (full / "x").touch()
    refused(run, full, f"{full}: expected a new or an empty folder, got one with x")
    refused(run, full / "x", f"{full / 'x'}: expected a new or an empty folder, got a file")
    refused(tmp_path / "none", tmp_path / "out", "expected a checkpoint or a run with one under checkpoints/", code=2)
    shutil.copytree(checkpoint.find(run).path, tmp_path / "step-3")
    os.truncate(next((tmp_path / "step-3").glob("model*.safetensors")), 100)
    refused(tmp_path / "step-3", tmp_path / "out", "expected bytes")

    def no_space(*_):
        raise OSError(28, "No space left on device")

    before_call(saving, "write_tensors", no_space)
    refused(run, tmp_path / "out", f"{tmp_path / 'out'}: expected to write a folder, got [Errno 28] No space")
    assert {path.name for path in tmp_path.iterdir()} == {"full", "step-3"} and [*full.iterdir()] == [full / "x"]
