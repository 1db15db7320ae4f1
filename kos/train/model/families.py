"""The families of models, by the ``model_type`` of their configurations."""

from __future__ import annotations

from kos.train.model.gpt2 import GPT2Config
from kos.train.model.llama import LlamaConfig
from kos.train.model.mistral import MistralConfig
from kos.train.model.olmo2 import Olmo2Config
from kos.train.model.qwen import Qwen2Config, Qwen3Config
from kos.train.model.smollm3 import SmolLM3Config

FAMILIES: dict[str, type[LlamaConfig]] = {
    family.model_type: family
    for family in (LlamaConfig, GPT2Config, MistralConfig, Olmo2Config, Qwen2Config, Qwen3Config, SmolLM3Config)
}
