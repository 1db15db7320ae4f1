"""Adapters (LoRA), frozen weights and settings by pattern: layouts, dtypes, plans, and what is refused."""

from typing import Any

import numpy as np
import pytest

from kos.errors import ConfigError
from kos.train.config.flags import parse
from kos.train.config.options import TrainConfig
from kos.train.layers.lora import A, B, is_adapter
from kos.train.model.initial import init_weights
from kos.train.model.llama import LlamaConfig
from kos.train.model.model import Model
from kos.train.model.parameters import Parameters
from kos.train.ops import numpy as numpy_ops
from kos.train.parallel.mesh import Layout
from tests.train import layouts, layouts_on_host
from tests.train.layouts import CpuDevice, Precise
from tests.train.layouts_on_host import emulated
from tests.train.models import part_of, small
from tests.train.test_parameter_groups import plan_of

__all__ = ["emulated"]

LORA: dict[str, Any] = {"lora": 4, "lr": 3e-2}

QUICK: list[tuple[Layout, dict[str, Any]]] = [
    (Layout(tp=2), {}), (Layout(tp=2), {"recompute": "norms", "lora_targets": ["q_proj", "down_proj"]}),
    (Layout(dp=2), {"zero": 1}), (Layout(cp=2), {"recompute": "block"}), (Layout(tp=4), {"kv_heads": 2}),
    (Layout(pp=2), {"pp_schedule": "zero-bubble-v", "recompute": "block"}), (Layout(pp=2), {}),
]  # fmt: skip
SLOW: list[tuple[Layout, dict[str, Any]]] = [
    (Layout(dp=2, cp=2, tp=2), {"documents": "pack", "zero": 1}), (Layout(pp=2, tp=2, dp=2), {"zero": 1}),
    (Layout(pp=2, tp=4), {"pp_schedule": "zero-bubble-v", "kv_heads": 2}), (Layout(tp=8), {"recompute": "block"}),
    (Layout(pp=4, cp=2), {"recompute": "norms"}), (Layout(dp=8), {"zero": 1}), (Layout(cp=8), {"seq_len": 64}),
]  # fmt: skip


@layouts.cases(QUICK, SLOW)
def test_layouts_agree(layout, changes):
    """Losses, norms, adapters and text are those of one rank."""
    changes = {**changes, **({"lora_targets": (*changes["lora_targets"],)} if "lora_targets" in changes else {})}
    layouts.check(layout, Precise, 5 if layout.pp > 1 else 2, False, 4, batch_size=8, **LORA, **changes)


IN_ORDER: list[tuple[Layout, dict[str, Any]]] = [
    (Layout(tp=2), {}), (Layout(cp=2), {"recompute": "block"}), (Layout(pp=2), {"pp_schedule": "zero-bubble-v"}),
    (Layout(dp=2, cp=2, tp=2), {}), (Layout(tp=8), {}), (Layout(dp=4, tp=2), {"zero": 1}),
]  # fmt: skip


@layouts.cases(IN_ORDER[:3], IN_ORDER[3:])
def test_deterministic(layout, changes):
    """The same bits as one rank, of two adapters of one matrix too."""
    layouts.check_bits(layout, 3, False, seq_len=layouts.length(layout.cp), **LORA, **changes)


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        (Layout(tp=2), {"micro_batch_size": 2, "recompute": "norms"}), (Layout(dp=2), {"zero": 1, "dtype": "bfloat16"}),
        (Layout(pp=2), {"pp_schedule": "zero-bubble-v"}), (Layout(cp=2), {"recompute": "block", "graph": False}),
        pytest.param(Layout(dp=2, tp=2), {"zero": 1}, marks=pytest.mark.slow),
    ],
    ids=str,
)  # fmt: skip
def test_layouts_on_an_emulated_gpu(layout, changes):
    """Where arrays are contiguous, and a matrix's part of stacked features is a view that only products take."""
    layers = 5 if layout.pp > 1 else 2
    alike = {name: value for name, value in changes.items() if name in ("micro_batch_size", "dtype")}
    (alone,) = layouts_on_host.train(Layout(), layers, lora=4, **alike)
    close = 2e-2 if changes.get("dtype") == "bfloat16" else 3e-5
    for rank, got in enumerate(layouts_on_host.train(layout, layers, lora=4, **changes)):
        np.testing.assert_allclose(got["rows"], alone["rows"], rtol=close, err_msg=f"rank {rank}")
        moved = [np.abs(value).max() for name, value in got["weights"].items() if name.endswith(B)]
        assert min(moved) > 0


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_deterministic_on_an_emulated_gpu(dtype):
    how = {"lora": 4, "dtype": dtype, "deterministic": True, "deterministic_parts": 2}
    (alone,) = layouts_on_host.train(Layout(), 2, **how)
    for got in layouts_on_host.train(Layout(tp=2), 2, **how):
        assert got["rows"].tobytes() == alone["rows"].tobytes()


@pytest.mark.parametrize("targets", [(), ("q_proj",), ("o_proj", "down_proj"), ("gate_proj",)], ids=str)
def test_products_in_8_bits(targets):
    """Adapters read inputs and gradients in 16 bits, whichever others are in 8 bits, saved or computed again."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 8}
    how = {**LORA, "lora_targets": targets, "batch_size": 2, **sizes}
    (wide,) = layouts.train(Layout(), CpuDevice, 2, False, 3, **how)
    (saved,) = layouts.train(Layout(), CpuDevice, 2, False, 3, dtype="fp8", **how)
    np.testing.assert_allclose(saved["rows"][:, 0], wide["rows"][:, 0], rtol=0.05)
    for recompute in ("norms", "block"):
        (again,) = layouts.train(Layout(), CpuDevice, 2, False, 3, dtype="fp8", recompute=recompute, **how)
        assert again["rows"].tobytes() == saved["rows"].tobytes()


def test_a_plan_counts_adapters_alone():
    """The base has no gradient and no moments, and is not held twice."""
    settings = {**layouts.RUN, "device": "cpu", "model": {**layouts.SHAPE, "num_hidden_layers": 2}}
    config = TrainConfig.from_preset("tiny", **{**settings, **LORA}).for_world(1)
    sizes = {name: 4 * int(np.prod(shape)) for name, shape in config.model_config_for(40).parameter_shapes().items()}
    adapters = sum(size for name, size in sizes.items() if is_adapter(name))
    uses = {name.partition(",")[0]: size for name, size in plan_of(config, Layout()).uses.items()}
    assert uses["frozen weights"] == sum(sizes.values()) - adapters
    assert uses["weights"] == uses["gradients"] == adapters and uses["both Adam moments"] == 2 * adapters


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
def test_frozen_by_pattern(changes):
    layout = Layout(tp=changes.get("tp", 1))
    more = {name: value for name, value in changes.items() if name != "tp"}
    frozen = ("model.layers.0.*", "*embed_tokens*")
    for rank, got in enumerate(layouts.train(layout, CpuDevice, 2, False, 2, freeze=frozen, **more)):
        for name, value in got["weights"].items():
            before = part_of(name, initial(got["model"])[name], got["model"], layout.tp, rank)
            still = name.startswith("model.layers.0.") or "embed_tokens" in name
            assert np.array_equal(value, before) == still, name


def test_a_run_without_patterns_has_the_groups_that_it_had():
    for optimizer in ("adamw", "muon"):
        plain = TrainConfig.from_preset(optimizer=optimizer)
        groups = plain.all_groups(small())
        assert len(groups) == (2 if optimizer == "adamw" else 3) and not any(group.frozen for group in groups)


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
    again = parse(["--config", str(write_json(tmp_path / "config.json", config))])
    assert again.groups == config.groups


def write_json(path: Any, config: TrainConfig) -> Any:
    path.write_text(config.model_dump_json())
    return path


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
    ("flags", "said"),
    [
        (["--lora-alpha", "8"], "--lora-alpha: expected none without adapters"),
        (["--lora-targets", "q_proj"], "--lora-targets: expected none without adapters"),
        (["--lora", "0"], "--lora: expected a number greater than or equal to 1"),
        (["--lora", "4", "--optimizer", "muon"], "--optimizer: expected adamw with adapters"),
        (["--lora-dropout", "0.1"], "has none: docs/guides/not-in-the-trainer.md"),
        (["--lora-r", "8"], "here: --lora"),
    ],
    ids=str,
)
def test_flags_that_are_refused(flags, said):
    with pytest.raises(ConfigError) as caught:
        parse(flags)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"lora": 4, "lora_targets": ("lm_head",)}, "--lora-targets: expected some of q_proj, .*, got lm_head"),
        ({"freeze": ("*.attention.*",)}, r"--freeze: expected a pattern that matches a tensor, .*got \*.attention"),
        ({"groups": [{"pattern": "x*"}]}, r"groups: expected a pattern that matches a tensor, .*got x\*"),
    ],
    ids=str,
)
def test_names_that_match_nothing_are_refused(changes, said):
    with pytest.raises(ConfigError, match=said):
        TrainConfig.from_preset("tiny", **changes).model_config_for(40)


@pytest.mark.parametrize("table", [{"lr": 1e-3}, {"pattern": "*", "lr": 0.0}, {"pattern": "*", "rate": 1.0}], ids=str)
def test_tables_that_are_refused(table):
    with pytest.raises(ConfigError, match="groups"):
        TrainConfig.from_preset("tiny", groups=[table])


def test_all_that_is_frozen_is_refused():
    with pytest.raises(ConfigError, match="and a tensor to train"):
        layouts.train(Layout(), CpuDevice, 2, False, 1, freeze=("*",))
