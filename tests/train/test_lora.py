"""Adapters (LoRA), frozen weights and settings by pattern: dtypes, plans, and what is refused."""

from typing import Any

import numpy as np
import pytest

from kos.errors import ConfigError
from kos.train.config.flags import parse
from kos.train.config.options import TrainConfig
from kos.train.layers.lora import A, B
from kos.train.model.initial import init_weights
from kos.train.model.llama import LlamaConfig
from kos.train.model.model import Model
from kos.train.ops import numpy as numpy_ops
from kos.train.ops.parameters import Parameters
from kos.train.parallel.mesh import Layout
from tests.train import layouts
from tests.train.layouts import CpuDevice
from tests.train.models import part_of, small

LORA: dict[str, Any] = {"lora": 4, "lr": 3e-2}


@pytest.mark.parametrize(("targets", "layers"), [
    ((), ()), (("q_proj",), ()), (("o_proj", "down_proj"), ()), (("gate_proj",), ()), (("up_proj", "o_proj"), (1,)),
], ids=str)  # fmt: skip
def test_products_in_8_bits(targets, layers):
    """Adapters read inputs and gradients in 16 bits, whichever others are in 8 bits, saved or computed again."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 8}
    how = {**LORA, "lora_targets": targets, "lora_layers": layers, "batch_size": 2, **sizes}
    (wide,) = layouts.train(Layout(), CpuDevice, 2, False, 3, **how)
    (saved,) = layouts.train(Layout(), CpuDevice, 2, False, 3, dtype="fp8", **how)
    np.testing.assert_allclose(saved["rows"][:, 0], wide["rows"][:, 0], rtol=0.05)
    for recompute in ("norms", "block"):
        (again,) = layouts.train(Layout(), CpuDevice, 2, False, 3, dtype="fp8", recompute=recompute, **how)
        assert again["rows"].tobytes() == saved["rows"].tobytes()


def test_initial_adapters_change_nothing():
    """A is drawn as torch's nn.Linear, from -1 / sqrt(in) to 1 / sqrt(in); B is 0."""
    model, tokens = small().adapted(4, 8.0), np.arange(20, dtype=np.int32)[None]
    weights = initial(model)
    logits = Model(model, numpy_ops).logits(weights, tokens)
    assert logits.tobytes() == Model(model.base, numpy_ops).logits(weights, tokens).tobytes()
    for name, value in weights.items():
        if name.endswith(B):
            assert not value.any()
        if name.endswith(A):
            limit = value.shape[1] ** -0.5
            assert 0.5 * limit < np.abs(value).max() <= limit and abs(value.mean()) < 0.5 * limit


def initial(model: LlamaConfig) -> Parameters:
    weights = Parameters(model.parameter_shapes(), np.float32, model.fused_groups())
    init_weights(model, weights, 3)
    return weights


# --- frozen weights, and settings by pattern -----------------------------------------------------------


@pytest.mark.parametrize("changes", [{"tp": 2}, {"optimizer": "muon"}, {"deterministic": True}], ids=str)
def test_frozen_by_pattern(changes, small_buckets):
    layout = Layout(tp=changes.get("tp", 1))
    more = {name: value for name, value in changes.items() if name != "tp"}
    frozen = ("model.layers.0.*", "*embed_tokens*")
    for rank, got in enumerate(layouts.train(layout, CpuDevice, 2, False, 2, freeze=frozen, **more)):
        for name, value in got["weights"].items():
            before = part_of(name, initial(got["model"])[name], got["model"], layout.tp, rank)
            still = name.startswith("model.layers.0.") or "embed_tokens" in name
            assert np.array_equal(value, before) == still, name


TABLES = """
[[groups]]
pattern = "*.layers.1.mlp.*"
lr = 1e-9
[[groups]]
pattern = "*.mlp.up_proj.weight"
lr = 6e-4
weight_decay = 0.0
"""


def test_learning_rates_and_decay_by_pattern(tmp_path):
    """The first table that a tensor matches counts; what it leaves out is as of other tensors."""
    path = tmp_path / "groups.toml"
    path.write_text(TABLES)
    config = parse(["--config", str(path), "--lr", "3e-4", "--weight-decay", "0.2"])
    of = {name: group for group in config.all_groups(small()) for name in group.names}
    slow, up, other, norm = (
        of[f"model.layers.{name}.weight"]
        for name in ("1.mlp.up_proj", "0.mlp.up_proj", "0.mlp.down_proj", "0.input_layernorm")
    )
    assert (slow.lr_scale, slow.decay) == (1e-9 / 3e-4, 0.2)
    assert (up.lr_scale, up.decay) == (pytest.approx(2.0), 0.0)
    assert (other.lr_scale, other.decay, norm.decay) == (1.0, 0.2, 0.0)
    assert sorted(of) == sorted(small().parameter_shapes())
    (again := tmp_path / "config.json").write_text(config.model_dump_json())
    assert parse(["--config", str(again)]).groups == config.groups


def test_a_table_trains_its_tensors_at_its_rate():
    """Half the rate of all is the rate of all tensors in a table of half the rate, to the bit."""
    (whole,) = layouts.train(Layout(), CpuDevice, 2, False, 3, lr=4e-3, schedule="constant")
    tables = [{"pattern": "*", "lr": 4e-3}]
    (tabled,) = layouts.train(Layout(), CpuDevice, 2, False, 3, lr=8e-3, schedule="constant", groups=tables)
    assert whole["rows"].tobytes() == tabled["rows"].tobytes()
    (two,) = layouts.train(Layout(tp=2), CpuDevice, 2, False, 3, lr=8e-3, schedule="constant", groups=tables)[:1]
    np.testing.assert_allclose(two["rows"], whole["rows"], rtol=1e-5)


# --- what is refused -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"lora": 4, "lora_targets": ("lm_head",)}, "--lora-targets: expected some of q_proj, .*, got lm_head"),
        ({"lora": 4, "lora_targets": ("x.*",)}, r"--lora-targets: expected a regular expression that .*, got x\.\*"),
        ({"lora": 4, "lora_targets": ("x(",)}, r"argument: lora_targets: expected names .*, got x\( \(missing \)"),
        ({"lora": 4, "lora_targets": ("x.*", "q_proj")}, "expected names of .*, or one regular expression, got x.*"),
        ({"lora": 4, "lora_layers": (4,)}, "--lora-layers: expected numbers from 0 to 3, got 4"),
        ({"lora": 4, "lora_layers": ("a",)}, "lora_layers.*: expected a valid integer, got 'a'"),
        ({"rslora": True}, "rslora: expected none without adapters"),
        ({"freeze": ("*.attention.*",)}, r"--freeze: expected a pattern that matches a tensor, .*got \*.attention"),
        ({"groups": [{"pattern": "x*"}]}, r"groups: expected a pattern that matches a tensor, .*got x\*"),
        *(({"groups": [table]}, "groups")
          for table in ({"lr": 1e-3}, {"pattern": "*", "lr": 0.0}, {"pattern": "*", "rate": 1.0})),
    ],
    ids=str,
)  # fmt: skip
def test_names_that_match_nothing_and_wrong_tables_are_refused(changes, said):
    with pytest.raises(ConfigError, match=said):
        TrainConfig.from_preset("tiny", **changes).model_config_for(40)


def test_all_that_is_frozen_is_refused():
    with pytest.raises(ConfigError, match="and a tensor to train"):
        layouts.train(Layout(), CpuDevice, 2, False, 1, freeze=("*",))
