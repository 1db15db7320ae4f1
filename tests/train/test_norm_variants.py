"""A variant of the norms reaches all of them: only ``Normalize`` and the kernels' header know how a norm scales."""

from typing import Any

import numpy as np
import pytest

from kos.train.config.flags import parse
from kos.train.device import dry_run
from kos.train.device.costs import GPUS
from kos.train.layers import Gradients
from kos.train.model.families import FAMILIES
from kos.train.model.initial import init_weights
from kos.train.model.llama import LlamaConfig
from kos.train.model.model import InFlight, Model
from kos.train.model.parameters import Parameters
from kos.train.ops import numpy as ops
from kos.train.ops.batch import Batch
from kos.train.ops.norm import Normalize
from kos.train.parallel import schedules
from kos.train.parallel.mesh import Layout, Mesh

SHAPE: dict[str, Any] = {
    "vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 8, "tie_word_embeddings": True,
}  # fmt: skip
NORMED = {"llama": 5, "mistral": 5, "qwen2": 5, "qwen3": 9, "olmo2": 9, "smollm3": 5, "gpt2": 5}
"""The weights of norms in two layers and a head."""


def gradients_of(config: LlamaConfig, weights: Parameters) -> tuple[np.ndarray, np.ndarray]:
    """The output before the head, and all gradients of the loss."""
    batch = Batch(*np.random.default_rng(1).integers(40, size=(2, 2, 8)).astype(np.int32))
    model, into = Model(config, ops), weights.like()
    flight = InFlight(model.arena)
    out_nD = model.forward(weights, flight, batch)
    dx_nD, loss = np.empty_like(out_nD), np.zeros(1)
    model.backward(weights, flight, Gradients(into, False, lambda name: None), dx_nD, loss=loss)
    return out_nD.copy(), np.append(into.flat, loss)


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_a_scale_of_1_plus_weight_has_the_bits_of_a_scale(family, monkeypatch):
    """In every family, forward and backward; new weights get the value that the variant gives them."""
    config = family(**SHAPE)
    weights = Parameters(config.parameter_shapes(), np.float32, config.fused_groups())
    weights.flat[:] = np.random.default_rng(0).integers(1, 16, weights.flat.size) / 16  # 1 + (w - 1) is exact
    expected = gradients_of(config, weights)
    variant = {"scale": property(lambda self: 1 + self.weight), "initial": property(lambda self: 0.5)}
    for name, value in variant.items():
        monkeypatch.setattr(Normalize, name, value)
    drawn = weights.like()
    init_weights(config, drawn, 0)
    names = [name for name, weight in drawn.items() if (weight == 0.5).all()]
    assert len(names) == NORMED[config.model_type]
    assert not any((gradients_of(config, weights)[n] == expected[n]).all() for n in (0, 1))
    for name in names:
        weights[name][...] -= 1
    for got, wanted in zip(gradients_of(config, weights), expected, strict=True):
        assert got.tobytes() == wanted.tobytes()


@pytest.mark.parametrize(
    ("model_type", "dtype", "kernels"),
    [
        ("gpt2", "bfloat16", {"norm_forward", "norm_backward"}),
        ("qwen3", "bfloat16", {"norm_forward", "norm_backward", "head_norm", "head_norm_backward"}),
        ("qwen3", "fp8", {"norm_forward", "norm_backward", "head_norm", "head_norm_backward", "quantize"}),
    ],
)
def test_macros_of_a_variant_reach_all_kernels(model_type, dtype, kernels, monkeypatch):
    launched = {True: set(), False: set()}

    def launch(self, file, name, *operands, **defines):
        if file in ("norms.cu", "head_norm.cu") or defines.get("SOURCE") == 3:
            launched["VARIANT" in defines].add(name)

    monkeypatch.setattr(Normalize, "macros", lambda self: {"VARIANT": 1})
    monkeypatch.setattr(dry_run.DryCudaOps, "launch", launch)
    preset = "gpt2-124m" if model_type == "gpt2" else "124m"
    config = parse(["--preset", preset, "--model-type", model_type, "--dtype", dtype]).for_world(1, "cuda")
    model = config.model_config_for(256)
    gpu = GPUS["H100"]
    dry_run.plan_memory(config, model, gpu, Mesh.dry(Layout()), schedules.build("1f1b", 1, 2), free=1 << 40)
    assert launched == {True: kernels, False: set()}
