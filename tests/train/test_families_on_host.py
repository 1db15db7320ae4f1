"""Every family of models on an emulated GPU, with layers unlike the first two, trains as on the CPU."""

from typing import Any

import numpy as np
import pytest

from kos.errors import ConfigError
from kos.train.model.families import FAMILIES
from kos.train.model.llama import FULL, SLIDING
from tests.train.emulated_runs import SMALL, column, text, train
from tests.train.sharded import tensors_of_run

__all__ = ["text"]

GPT2 = {"intermediate_size": 48, "num_key_value_heads": 4, "tie_word_embeddings": True}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4}
PADDED = {"pad_token_id": 100}  # one of the letters of the text
MIXED: dict[str, Any] = {**PADDED, "sliding_window": 3, "layer_types": [FULL, FULL, SLIDING, FULL]}
CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("llama", {**PADDED, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}, {}),
    ("llama", {"num_attention_heads": 3, "num_key_value_heads": 1, "rope_scaling": YARN}, {"cp": 2, "zero": 1}),
    ("qwen2", MIXED, {"tp": 2, "recompute": "norms"}),
    ("qwen3", {**MIXED, "attention_bias": True, "head_dim": 10}, {"pp": 2, "pp_schedule": "zero-bubble-v"}),
    ("mistral", {"sliding_window": 3, "num_key_value_heads": 1}, {"tp": 2, "recompute": "block"}),
    ("olmo2", {**PADDED, "attention_bias": True}, {"pp": 2, "recompute": "norms"}),
    ("smollm3", {**PADDED, "tie_word_embeddings": True}, {"dp": 2, "zero": 1}),
    ("smollm3", {**MIXED, "no_rope_layers": [1, 1, 0, 0], "mlp_bias": True}, {"cp": 2, "recompute": "block"}),
    ("gpt2", GPT2, {"dp": 2, "optimizer": "muon"}),
]


@pytest.mark.parametrize(("family", "changes", "layout"), CASES)
def test_a_family_is_that_of_the_cpu(emulated, text, tmp_path, family, changes, layout):
    """Losses, norms of gradients and weights; four layers, of which the search for algorithms takes two."""
    shape = {**SMALL["model"], "model_type": family, "num_hidden_layers": 4, "intermediate_size": 30, **changes}
    settings = {"model": shape, "steps": 2, "eps": 1e-3, "eval_batches": 1, "save_every": 0}
    settings |= {key: layout[key] for key in layout.keys() & {"optimizer"}}
    ranks = np.prod([layout.get(axis, 1) for axis in ("dp", "tp", "pp", "cp")])
    cpu = train(text, tmp_path / "cpu", "cpu", **settings)
    gpu = train(text, tmp_path / "gpu", ranks=int(ranks), **settings | layout)
    for name in ("loss", "grad_norm", "val_loss"):
        np.testing.assert_allclose(column(gpu, name), column(cpu, name), rtol=1e-5, err_msg=name)
    found, expected = (
        {name: np.frombuffer(held, np.float32) for name, held in tensors_of_run(tmp_path / device).items()}
        for device in ("gpu", "cpu")
    )
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-4, atol=2e-5, err_msg=name)


def test_every_family_is_run():
    assert {family for family, *_ in CASES} == {*FAMILIES}


def test_heads_that_no_kernel_takes_are_refused(emulated, text, tmp_path):
    with pytest.raises(ConfigError, match="--head-dim: expected at most 256 on GPUs, got 258"):
        train(text, tmp_path, model={**SMALL["model"], "head_dim": 258})
