"""Small models of random weights, and the tokens that they generate."""

from typing import Any

import numpy as np

from kos.train.generate import Decoder, Sampling, generate
from kos.train.model.families import GPT2Config, MistralConfig, Olmo2Config, Qwen2Config, Qwen3Config, SmolLM3Config
from kos.train.model.llama import FULL, SLIDING, LlamaConfig
from kos.train.ops import numpy as numpy_ops
from kos.train.ops.parameters import Parameters
from tests.train import models
from tests.train.models import SCALING

SHAPE: dict[str, Any] = {
    "vocab_size": 41, "hidden_size": 24, "intermediate_size": 29, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 6, "max_position_embeddings": 48,
}  # fmt: skip
MIXED = {"sliding_window": 4, "layer_types": (FULL, SLIDING, FULL)}
CASES: dict[str, LlamaConfig] = {
    "llama": LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True),
    "llama3": LlamaConfig(**SHAPE, rope_scaling=SCALING, tie_word_embeddings=True),
    "multi-query": LlamaConfig(**{**SHAPE, "num_key_value_heads": 1, "head_dim": 10}),
    "mistral": MistralConfig(**SHAPE, sliding_window=5),
    "qwen2": Qwen2Config(**SHAPE, **MIXED),
    "qwen3": Qwen3Config(**SHAPE, **MIXED),
    "olmo2": Olmo2Config(**SHAPE),
    "smollm3": SmolLM3Config(**SHAPE, no_rope_layers=(1, 0, 1)),
    "gpt2": GPT2Config(**{**SHAPE, "num_key_value_heads": 4, "tie_word_embeddings": True}),
}
PROMPTS = [[3, 1, 4], [1], [5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9], [2, 7]]
GREEDY = Sampling(temperature=0)


def random_weights(config: LlamaConfig, seed: int = 5) -> Parameters:
    return models.random_weights(config, np.random.default_rng(seed), spread=0.3)


def tokens_of(source: Any, config: LlamaConfig, prompts: Any, count: int, sampling: Sampling, **more: Any) -> Any:
    found: list[list[int]] = [[] for _ in prompts]
    for index, token in generate(source, config.max_position_embeddings, prompts, count, sampling, **more):
        found[index].append(token)
    return found


def decoder(config: LlamaConfig, weights: Any, sequences: int) -> Decoder:
    return Decoder(config, numpy_ops, weights, sequences, config.max_position_embeddings)
