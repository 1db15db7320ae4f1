"""Adapters beside the library peft, in float32 on CPUs: logits, the gradients of a step, and folders both ways."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kos.train import load
from kos.train.checkpoint import adapter, huggingface
from kos.train.config.flags import parse
from kos.train.layers.lora import is_adapter
from kos.train.model.model import Model
from kos.train.model.peft import CONFIG, model_of
from kos.train.ops import numpy as numpy_ops
from kos.train.ops.parameters import Parameters
from tests.packages import Package, needs
from tests.train.models import loss_and_gradients
from tests.train.of_transformers import needs_transformers, save_random, torch, transformers
from tests.train.runs import run

pytestmark = [needs_transformers, needs("peft")]
peft = Package("peft")

SHAPE: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {**SHAPE, "tie_word_embeddings": True},
    "qwen2": {**SHAPE, "tie_word_embeddings": False},
    "qwen3": {**SHAPE, "head_dim": 16, "tie_word_embeddings": True},
    "olmo2": {**SHAPE, "tie_word_embeddings": False},
    "gpt2": {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "resid_pdrop": 0.0,
             "embd_pdrop": 0.0, "attn_pdrop": 0.0},
}  # fmt: skip
TARGETS = {"gpt2": (["c_attn", "c_proj", "c_fc"], ["c_attn"])}
LLAMAS = (["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"], ["q_proj", "v_proj"])


@pytest.fixture(scope="module", params=FAMILIES)
def base(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / request.param
    save_random(transformers.AutoConfig.for_model(request.param, **FAMILIES[request.param]), folder)
    return Path(folder)


def adapted(base: Path, targets: list[str] | str) -> Any:
    """The model of peft, with adapters of which none is 0."""
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    settings = peft.LoraConfig(r=5, lora_alpha=8, target_modules=targets, task_type="CAUSAL_LM")
    model = peft.get_peft_model(model, settings)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora" in name:
                weight.copy_(torch.randn_like(weight) * 0.2)
    return model


@pytest.mark.parametrize("every", [0, 1], ids=["all-matrices", "some-matrices"])
def test_logits_and_gradients_of_a_folder_of_peft(base, every, tmp_path):
    theirs = adapted(base, TARGETS.get(base.name, LLAMAS)[every])
    theirs.save_pretrained(tmp_path)
    tokens, targets = np.random.default_rng(2).integers(0, 97, (2, 3, 40), dtype=np.int32)
    logits = theirs(torch.tensor(tokens)).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.tensor(targets).flatten().long())
    loss.backward()
    expected = logits.detach().numpy()
    np.testing.assert_allclose(load(tmp_path).logits(tokens), expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())

    config = model_of(tmp_path)
    weights = Parameters(config.parameter_shapes(), np.float32, config.fused_groups())
    files = adapter.Joined(huggingface.weight_files(base, config.base.parameter_shapes()),
                           adapter.files_of(tmp_path, config))  # fmt: skip
    for name, weight in weights.items():
        weight[...] = files.read(name)
    gradients = Parameters({name: shape for name, shape in weights.shapes.items() if is_adapter(name)})
    got = loss_and_gradients(Model(config, numpy_ops), weights, tokens, targets, gradients, accumulate=False)
    assert got == pytest.approx(loss.item(), rel=1e-5)
    of_theirs = {name.replace(".default", ""): weight.grad for name, weight in theirs.named_parameters() if
                 weight.grad is not None}  # fmt: skip
    assert len(of_theirs) == len(gradients) > 0
    for name, gradient in gradients.items():
        wanted = of_theirs[huggingface.name_as_saved(name)].numpy()
        np.testing.assert_allclose(gradient, wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max(), err_msg=name)


def test_all_linear(base, tmp_path):
    """peft writes the full name of each matrix."""
    theirs = adapted(base, "all-linear")
    theirs.save_pretrained(tmp_path)
    targets = json.loads((tmp_path / CONFIG).read_text())["target_modules"]
    assert all(".0." in name or ".1." in name for name in targets)
    tokens = np.random.default_rng(2).integers(0, 97, (2, 20))
    with torch.no_grad():
        expected = theirs(torch.tensor(tokens)).logits.numpy()
    np.testing.assert_allclose(load(tmp_path).logits(tokens), expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


def test_peft_loads_what_a_run_has_saved(base, tmp_path):
    """The checkpoint is a folder of peft, and the logits are those of kos, merged or not; a run goes on from it."""
    data, numbers = tmp_path / "numbers.bin", np.random.default_rng(3).integers(0, 97, 4000).astype("<u2")
    np.append(np.array([20240520, 1, len(numbers)] + [0] * 253, "<i4").view("<u2"), numbers).tofile(data)  # llm.c's
    flags = [f"--init-from={base}", f"--data={data}", "--lora=3", "--steps=3", "--batch-size=4", "--seq-len=32",
             "--lr=1e-2", "--eval-batches=0", "--sample-tokens=0", "--device=cpu"]  # fmt: skip
    out = tmp_path / "run"
    config = parse([*flags, f"--out={out}", "--dp=2" if base.name == "gpt2" else "--pp=2"])
    run(config, 2)
    saved = out / "checkpoints" / "step-3"
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(model, saved)
    assert any(weight.abs().max() > 0 for name, weight in theirs.named_parameters() if "lora_B" in name)
    tokens = np.random.default_rng(4).integers(0, 97, (2, 20))
    with torch.no_grad():
        expected = theirs(torch.tensor(tokens)).logits.numpy()
    np.testing.assert_allclose(load(out).logits(tokens), expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())
    again = tmp_path / "again"
    theirs.save_pretrained(again)
    more = [*flags[1:2], *flags[3:-4], "--lr=1e-9", *flags[-3:], f"--init-from={again}", f"--out={tmp_path / 'more'}"]
    run(parse(more))
    close = {"rtol": 1e-4, "atol": 1e-4 * np.abs(expected).max()}
    np.testing.assert_allclose(load(tmp_path / "more").logits(tokens), expected, **close)
