"""Named starting points of a run: what ``--preset`` may say.

A preset gives the fields of ``TrainConfig`` that have no default of their own (steps, batch, sequence
length, learning rate, model shape) and those it wants otherwise.  Files and flags override it.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Preset(NamedTuple):
    """One line for ``--help``, and the configuration keys with their values."""

    about: str
    values: dict[str, Any]


_GPT2_RUN: dict[str, Any] = {"steps": 20_000, "batch_size": 32, "seq_len": 1024, "lr": 6e-4, "warmup_steps": 700}
_GPT2: dict[str, Any] = {
    "vocab_size": 50_304, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
    "tie_word_embeddings": True,
}  # fmt: skip
_LLAMA3_RUN: dict[str, Any] = {"steps": 20_000, "batch_size": 16, "lr": 3e-4, "warmup_steps": 1000}
_LLAMA3: dict[str, Any] = {
    "vocab_size": 128_256, "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131_072,
    "rope_theta": 500_000.0,
}  # fmt: skip

PRESETS: dict[str, Preset] = {
    "tiny": Preset(
        "the default: about a minute on two cores",
        {
            "steps": 600, "batch_size": 16, "seq_len": 128, "lr": 3e-3, "warmup_steps": 30,
            "model": {
                "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
                "intermediate_size": 384, "tie_word_embeddings": True, "initializer_range": 0.06,
            },
        },
    ),
    "baby": Preset(
        "nanoGPT's shakespeare_char setting in LLaMA's shape; downloads tinyshakespeare",
        {
            "data": "tinyshakespeare", "tokenizer": "chars", "steps": 5000, "batch_size": 64, "seq_len": 256,
            "lr": 1e-3, "warmup_steps": 100, "beta2": 0.99, "eval_every": 250, "save_every": 1000,
            "weight_decay": 20.0,  # in place of nanoGPT's dropout of 0.2, which kos has not
            "model": {
                "hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 6, "intermediate_size": 1024,
                "tie_word_embeddings": True,
            },
        },
    ),
    "124m": Preset(
        "GPT-2 small's size, for GPT-2 token files",
        {**_GPT2_RUN, "model": {**_GPT2, "intermediate_size": 2048}},
    ),
    "gpt2-124m": Preset(
        "GPT-2 small itself, for GPT-2 token files",
        {
            **_GPT2_RUN,
            "model": {**_GPT2, "model_type": "gpt2", "intermediate_size": 3072, "max_position_embeddings": 1024},
        },
    ),
    "1b": Preset(
        "LLaMA-3.2-1B",
        {
            **_LLAMA3_RUN, "seq_len": 4096,
            "model": {
                **_LLAMA3, "hidden_size": 2048, "num_hidden_layers": 16, "intermediate_size": 8192,
                "rope_scaling": {"factor": 32.0}, "tie_word_embeddings": True,
            },
        },
    ),
    "8b": Preset(
        "LLaMA-3.1-8B",
        {
            **_LLAMA3_RUN, "seq_len": 8192,
            "model": {
                **_LLAMA3, "hidden_size": 4096, "num_hidden_layers": 32, "intermediate_size": 14_336,
                "rope_scaling": {"factor": 8.0}, "tie_word_embeddings": False,
            },
        },
    ),
}  # fmt: skip
