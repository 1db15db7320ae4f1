"""GPT-2: its initial weights, its size, and its files in Hugging Face's layout."""

import math

import numpy as np
import pytest

from kos.errors import ConfigError
from kos.train.config.options import TrainConfig
from kos.train.model import huggingface
from kos.train.model.families import GPT2Config
from kos.train.model.initial import init_weights
from kos.train.ops.parameters import Parameters
from tests.train.models import random_weights, read_weights, sizes, tensors_of

CONFIG = GPT2Config(**sizes(37, 24, 29, 3, 4, 4, 6, 20), rms_norm_eps=1e-3, tie_word_embeddings=True)


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
    config = config.replace(vocab_size=50_257)
    assert config.num_parameters() == 124_439_808
    multiplied = 12 * 12 * 768**2 + 50_257 * 768
    assert config.flops_per_token(1024).causal == 6 * (multiplied + 12 * 768 * 1024)


def test_hub_files_are_read(tmp_path, rng):
    """As on the hub: Conv1D's matrices (in, out), no prefix, masks among the weights."""
    from safetensors.numpy import save_file

    weights = random_weights(CONFIG, rng)
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
    with pytest.raises(ConfigError, match="num_key_value_heads: expected 4 in a GPT-2, got 2"):
        CONFIG.replace(num_key_value_heads=2)
