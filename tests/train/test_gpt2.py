"""GPT-2 against an independent PyTorch implementation, and its files in Hugging Face's layout."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from kos.errors import CheckpointError, ConfigError
from kos.train.checkpoint import huggingface
from kos.train.config.options import TrainConfig
from kos.train.data.batch import Batch
from kos.train.model.gpt2 import POSITIONS, GPT2Config
from kos.train.model.initial import init_weights
from kos.train.model.model import Model
from kos.train.model.parameters import Parameters
from kos.train.ops import numpy as numpy_ops
from tests.train.models import loss_and_gradients, read_weights, tensors_of

CONFIG = GPT2Config(37, 24, 29, 3, 4, 4, 6, 20, 1e-3, tie_word_embeddings=True)


def make_weights(rng: np.random.Generator, dtype: Any = np.float64) -> Parameters:
    weights = Parameters(CONFIG.parameter_shapes(), dtype)
    weights.flat[:] = rng.normal(0, 0.2, weights.flat.size)
    for name, array in weights.items():
        if array.ndim == 1 and name.endswith(".weight"):
            array += 1
    return weights


def torch_gpt2(torch: Any, w: dict[str, Any], tokens: Any) -> Any:
    """The logits, by the book."""
    F = torch.nn.functional
    (B, T), H, D = tokens.shape, CONFIG.num_attention_heads, CONFIG.hidden_size

    def norm(x: Any, name: str) -> Any:
        return F.layer_norm(x, (D,), w[f"{name}.weight"], w[f"{name}.bias"], CONFIG.rms_norm_eps)

    def linear(x: Any, name: str) -> Any:
        return F.linear(x, w[f"{name}.weight"], w[f"{name}.bias"])

    x = w["transformer.wte.weight"][tokens] + w[POSITIONS][:T]
    mask = torch.full((T, T), -torch.inf, dtype=x.dtype).triu(1)
    for layer in range(CONFIG.num_hidden_layers):
        at = f"transformer.h.{layer}."
        q, k, v = (
            y.view(B, T, H, D // H).transpose(1, 2)
            for y in linear(norm(x, at + "ln_1"), at + "attn.c_attn").split(D, -1)
        )
        p = (q @ k.mT / math.sqrt(D // H) + mask).softmax(-1)
        x = x + linear((p @ v).transpose(1, 2).reshape(B, T, D), at + "attn.c_proj")
        y = F.gelu(linear(norm(x, at + "ln_2"), at + "mlp.c_fc"), approximate="tanh")
        x = x + linear(y, at + "mlp.c_proj")
    return norm(x, "transformer.ln_f") @ w["transformer.wte.weight"].T


@pytest.mark.parametrize("recompute", ["none", "norms", "block"])
@pytest.mark.parametrize("length", [7, 20])
def test_logits_loss_and_gradients(rng, length, recompute):
    torch = pytest.importorskip("torch", reason="the reference needs torch (pip install torch)")
    weights = make_weights(rng)
    tokens, targets = rng.integers(0, CONFIG.vocab_size, (2, 3, length), dtype=np.int32)
    targets[rng.random(targets.shape) < 0.2] = -1
    tensors = {name: torch.tensor(array).requires_grad_() for name, array in weights.items()}
    logits = torch_gpt2(torch, tensors, torch.tensor(tokens, dtype=torch.int64))
    expected = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), torch.tensor(targets, dtype=torch.int64).flatten(), ignore_index=-1
    )
    expected.backward()

    model, gradients = Model(CONFIG, numpy_ops, head_rows=8, recompute=recompute), weights.like()
    gradients.flat[:] = np.nan
    np.testing.assert_allclose(model.logits(weights, tokens), logits.detach().numpy(), rtol=1e-9, atol=1e-9)
    finished = []
    loss = loss_and_gradients(model, weights, tokens, targets, gradients, accumulate=False, on_gradient=finished.append)
    assert loss == pytest.approx(expected.item(), rel=1e-10)
    assert loss == pytest.approx(model.loss(weights, Batch(tokens, targets)), rel=1e-12)
    assert finished == list(CONFIG.parameter_shapes())
    for name, tensor in tensors.items():
        np.testing.assert_allclose(gradients[name], tensor.grad.numpy(), rtol=1e-8, atol=1e-10, err_msg=name)
    once = gradients.flat.copy()
    loss_and_gradients(model, weights, tokens, targets, gradients, accumulate=True)
    np.testing.assert_allclose(gradients.flat, 2 * once, rtol=1e-8, atol=1e-10)


def test_initial_weights():
    weights = Parameters(CONFIG.parameter_shapes())
    weights.flat[:] = np.nan
    init_weights(CONFIG, weights, 1)
    for name, array in weights.items():
        if array.ndim == 1:
            assert (array == name.endswith(".weight")).all(), name
        else:
            std = 0.02 / math.sqrt(6) if name.endswith("c_proj.weight") else 0.02
            assert array.std() == pytest.approx(std, rel=0.2), name


def test_the_real_one():
    """OpenAI's 124,439,808 parameters; flops by what multiplies."""
    config = TrainConfig.from_preset("gpt2-124m").model_config_for(50_257)
    assert isinstance(config, GPT2Config)
    config = dataclasses.replace(config, vocab_size=50_257)
    assert config.num_parameters() == 124_439_808
    multiplied = 12 * 12 * 768**2 + 50_257 * 768
    assert config.flops_per_token(1024).causal == 6 * (multiplied + 12 * 768 * 1024)


def test_hub_files_are_read(tmp_path, rng):
    """As on the hub: Conv1D's matrices (in, out), no prefix, masks among the weights."""
    from safetensors.numpy import save_file

    weights = make_weights(rng, np.float32)
    tensors = {name.removeprefix("transformer."): x for name, x in tensors_of(weights).items()}
    for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"):
        assert np.array_equal(tensors[f"h.1.{name}.weight"], weights[f"transformer.h.1.{name}.weight"].T)
    save_file({**tensors, "h.0.attn.bias": np.ones((1, 1, 20, 20), np.float32)}, tmp_path / "model.safetensors")
    again = weights.like()
    read_weights(tmp_path, again)
    assert np.array_equal(again.flat, weights.flat)


def test_settings():
    settings = huggingface.to_huggingface(CONFIG)
    assert huggingface.from_huggingface(settings) == CONFIG
    assert huggingface.from_huggingface({**settings, "n_inner": None}).intermediate_size == 4 * 24
    with pytest.raises(CheckpointError, match="expected activation_function 'gelu_new', got 'relu'"):
        huggingface.from_huggingface({**settings, "activation_function": "relu"})
    for setting, other in (("scale_attn_weights", False), ("scale_attn_by_inverse_layer_idx", True)):
        with pytest.raises(CheckpointError, match=f"expected {setting} {not other}, got {other}"):
            huggingface.from_huggingface({**settings, setting: other})
    with pytest.raises(CheckpointError, match="expected an integer n_head, got None"):
        huggingface.from_huggingface({**settings, "n_head": None})
    with pytest.raises(ConfigError, match="num_key_value_heads: expected 4 in a GPT-2, got 2"):
        dataclasses.replace(CONFIG, num_key_value_heads=2)
