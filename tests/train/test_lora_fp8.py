"""Adapters with ``--dtype fp8``: the matrices of the base are held in 8 bits alone."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kos.memory.arena import Arena
from kos.testing import spawn
from kos.train.device import Piece
from kos.train.layers.lora import is_adapter
from kos.train.model.model import Model
from kos.train.ops import Batch
from kos.train.ops import numpy as numpy_ops
from kos.train.ops.fp8 import MULTIPLE, linears, weight_store
from kos.train.parallel.mesh import Layout, Mesh
from tests.train import layouts, layouts_on_host
from tests.train.host_kernels.engine import on_host
from tests.train.layouts import CpuDevice, named
from tests.train.layouts_on_host import emulated, make_device
from tests.train.models import part_of
from tests.train.test_lora import initial
from tests.train.test_parameter_groups import plan_of

__all__ = ["emulated"]

FP8: dict[str, Any] = {
    "dtype": "fp8", "lora": 4, "seq_len": 64, "batch_size": 4, "lr": 1e-3, "intermediate_size": 160,
}  # fmt: skip
"""With sizes that cuBLASLt takes; gate and up share a block of scales."""
LAYOUTS = [Layout(), Layout(tp=2), Layout(pp=2), Layout(dp=2)]


def cpu_device(comm: Any, layout: Layout, layers: int, **changes: Any) -> CpuDevice:
    asked = {**layouts.RUN, **FP8, "seed": 3, "num_hidden_layers": layers, **changes}
    config = layouts.settings(layout, **asked).for_world(layout.dp)
    device = CpuDevice(config, config.model_config_for(40), layouts.make_data(config), Mesh(comm, layout),
                       lambda what, share: None)  # fmt: skip
    device.draw_weights()
    return device


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("layout", LAYOUTS, ids=named)
@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_the_copies_are_those_that_a_step_makes_of_weights_in_16_bits(kind, layout):
    """So are the losses. Nothing holds these matrices in 16 bits."""

    def bytes_of(made):
        arrays = [x for copy in (made.rows, made.columns) if copy for x in copy]
        return [(x if isinstance(x, np.ndarray) else on_host(x)).tobytes() for x in arrays]

    def check(comm):
        layers = layouts_on_host.layers_of(layout)
        of_kind = cpu_device if kind == "cpu" else lambda comm, *how: make_device(comm, *how, **FP8)
        device = of_kind(comm, layout, layers)
        step, tp, model = device.step, device.mesh.tp, device.step.models[0].config
        whole, members = initial(model), set[str]()
        for name, made in step.quantized.items():
            mine = np.concatenate([part_of(x, whole[x], model, tp.size, tp.rank) for x in made.members])
            shapes = {name: mine.shape}
            expected = weight_store([name], shapes, {}, numpy_ops)[name]
            numpy_ops.quantize(mine.astype(ml_dtypes.bfloat16), expected.rows, expected.columns, Arena())
            assert bytes_of(made) == bytes_of(expected), name
            members |= {*made.members}
        every = set(model.parameter_shapes(*device.parts))
        assert {*step.frozen} == {x for x in every if "norm" in x or x.endswith(("embed_tokens.weight", model.head))}
        assert not step.store and every - members - {*step.frozen} == {x for x in every if is_adapter(x)}
        device.close()
        device.mesh.close()
        return members

    held = set[str]().union(*spawn(check, layout.ranks, timeout=100))
    assert len(held) == 7 * layouts_on_host.layers_of(layout)


CHANGES: list[dict[str, Any]] = [{"recompute": "norms"}, {"pp_schedule": "zero-bubble-v"}, {"zero": 1}]


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize(("layout", "changes"), [*zip(LAYOUTS[1:], CHANGES, strict=True)], ids=str)
def test_layouts(layout, changes):
    """Losses, validation and text on an emulated GPU.  Ranks of tp have scales of their own."""
    layers = layouts_on_host.layers_of(layout)
    (alone,) = layouts_on_host.train(Layout(), layers, **FP8)
    for got in layouts_on_host.train(layout, layers, **FP8, **changes):
        np.testing.assert_allclose(got["rows"][:, 0], alone["rows"][:, 0], rtol=5e-3)
        assert got["loss"] == pytest.approx(alone["loss"], rel=5e-3) and alone["text"]


@pytest.mark.usefixtures("emulated")
def test_the_sampler_computes_as_validation_does():
    """The same logits, to the bit."""
    tokens = np.arange(64, dtype=np.int32)[None] % 40

    def check(comm):
        device = make_device(comm, Layout(), 2, **FP8)
        weights, decoder = device.step.as_read(device.whole_weights()), device.decoder(1, 64)
        assert decoder is not None
        batch, last = Batch(tokens, tokens), partial(Model.logits_of, rows=slice(63, 64))
        ((_, _, expected),) = device.forwards(weights, [Piece([0], 64, lambda: batch)], last)
        assert decoder.prefill(0, tokens[0]).tobytes() == expected.astype(np.float32).tobytes()
        device.close()
        device.mesh.close()

    spawn(check, 1, timeout=100)


def check_sample(ranks: int, make: Callable[[Any], Any], tokens: int) -> None:
    """The sampler of a device computes finite logits of so many tokens."""

    def sample(comm: Any) -> None:
        device = make(comm)
        decoder = device.decoder(1, tokens + 2)
        assert decoder is not None and np.isfinite(decoder.prefill(0, range(tokens))).all()
        assert np.isfinite(decoder.step({0: 1})[0]).all()
        device.close()
        device.mesh.close()

    spawn(sample, ranks, timeout=100)


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("layout", LAYOUTS[:2], ids=named)
def test_a_sample_has_sizes_that_cublaslt_takes(layout, before_call):
    """A sequence is padded."""
    rows = list[int]()
    before_call(numpy_ops, "scaled_product", lambda a, *_: rows.append(len(a.values)))
    check_sample(layout.ranks, lambda comm: make_device(comm, layout, 2, **FP8), 21)
    assert len(rows) >= 8 * layout.tp and not any(count % MULTIPLE for count in rows)


def test_a_sample_on_a_cpu_is_not_longer_than_the_context():
    """A CPU takes all sizes; GPT-2 has no more positions."""
    gpt2 = {"model_type": "gpt2", "max_position_embeddings": 8, "num_attention_heads": 8, "num_key_value_heads": 8}
    how = {"seq_len": 8, "device": "cpu", "intermediate_size": 24, **gpt2}
    check_sample(1, lambda comm: cpu_device(comm, Layout(), 1, **how), 5)


def test_the_plan_counts_the_matrices_once():
    """Both copies in 8 bits, and of the other frozen weights, those in full."""
    config = layouts.settings(Layout(), **{**layouts.RUN, **FP8, "device": "cpu", "intermediate_size": 24}).for_world(1)
    model = config.model_config_for(40)
    shapes = {name: shape for name, shape in model.parameter_shapes().items() if not is_adapter(name)}
    matrices = {name: shape for name, shape in shapes.items() if "_proj." in name}
    names = [linear.name for linear in linears(model.layers(range(model.num_hidden_layers)))]
    in_8 = weight_store(names, shapes, model.fused_groups(), numpy_ops)
    uses = plan_of(config, Layout()).uses
    found = uses["weights of layers, fp8, and transposed"], uses["frozen weights, float32"]
    both, rest = (sum(map(math.prod, x)) for x in (matrices.values(), (shapes[y] for y in shapes.keys() - matrices)))
    assert found == (sum(each.nbytes for each in in_8.values()), 4 * rest) and 2 * both < found[0] < 2.1 * both


def test_allocated_memory_is_within_the_plan(emulated, monkeypatch):
    layouts_on_host.check_memory(Layout(), {"dtype": "fp8", "lora": 4, "intermediate_size": 160}, monkeypatch)


def test_a_matrix_larger_than_the_activations_is_loaded(emulated):
    """The plan has memory for the largest matrix in 16 bits, which it takes to quantize it."""
    large = {"hidden_size": 256, "intermediate_size": 512}
    (got,) = layouts_on_host.train(Layout(), 1, **{**FP8, **large, "seq_len": 16})
    assert np.isfinite(got["rows"]).all()
