"""Runs with ``--dtype fp8``: on CPUs, and on an emulated GPU, where the products are the CPU's emulation."""

import gc
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kos.errors import ConfigError, TrainingError
from kos.testing import spawn
from kos.train.config.options import TrainConfig
from kos.train.device import cuda as engine_module
from kos.train.device.cpu import CpuDevice
from kos.train.device.cuda import CudaDevice
from kos.train.evaluate import SETTINGS
from kos.train.evaluator import evaluate
from kos.train.model.llama import LlamaConfig
from kos.train.ops import numpy as reference
from kos.train.ops.fp8 import Fp8Ops, check_sizes
from kos.train.ops.linear import LinearOps
from kos.train.parallel.fixed_order import FixedOrder, Split
from kos.train.parallel.mesh import ALONE, Layout
from kos.train.step import Step
from tests.train import layouts as on_cpus
from tests.train import layouts_on_host as layouts
from tests.train.emulated_runs import SMALL, column, text, train
from tests.train.emulated_runs import emulated as emulated_runs
from tests.train.host_kernels.engine import QueuedOps, on_host
from tests.train.layouts import named
from tests.train.layouts_on_host import HEAD_ALONE, emulated
from tests.train.sharded import tensors_of_run

__all__ = ["emulated", "emulated_runs", "text"]

MODEL: dict[str, Any] = {**SMALL["model"], "hidden_size": 32, "intermediate_size": 48, "head_dim": 8}
RUN: dict[str, Any] = {"model": MODEL, "seq_len": 16, "dtype": "fp8", "lr": 1e-3}
NEAR = 5e-3
"""Relative difference of losses of a few steps that are quantized otherwise, or not at all."""

GPT2: dict[str, Any] = {
    "model_type": "gpt2", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
    "vocab_size": 256, "tie_word_embeddings": True, "num_key_value_heads": 4,
}  # fmt: skip


IN_8: dict[str, Any] = {"dtype": "fp8", "seq_len": 64, "intermediate_size": 32}
"""Of the tests of layouts: sizes that cuBLASLt takes."""


@pytest.fixture
def scales(monkeypatch, one):
    """With ``one``, a tensor has one scale, as on GPUs other than Hopper's."""
    for ops in (QueuedOps, reference):
        monkeypatch.setattr(ops, "one_scale", one)


@pytest.fixture
def gather_in_16_bits(monkeypatch):
    """A function: from its call on, weights are gathered as they are, and quantized afterwards."""
    return lambda: monkeypatch.setattr(Step, "gather", lambda step: step.as_read(step.parallel.gather(step.weights)))


@pytest.mark.parametrize(("shape", "one"), [(MODEL, False), (GPT2, True)], ids=["llama-blocks", "gpt2-one"])
def test_steps_are_those_of_the_cpu(emulated_runs, text, tmp_path, shape, capsys, one, scales):
    """Which rounds activations not to bfloat16; and not those of float32. With one scale a tensor, too."""
    settings = {**RUN, "model": shape}
    cpu, gpu = (train(text, tmp_path / device, device, **settings) for device in ("cpu", "cuda"))
    exact = train(text, tmp_path / "float32", "cpu", **settings | {"dtype": "float32"})
    for name in ("loss", "val_loss"):
        np.testing.assert_allclose(column(gpu, name), column(cpu, name), rtol=1e-3)
        np.testing.assert_allclose(column(cpu, name), column(exact, name), rtol=NEAR)
        assert not set(column(cpu, name)) & set(column(exact, name))
    np.testing.assert_allclose(column(gpu, "grad_norm"), column(cpu, "grad_norm"), rtol=0.05)
    said = capsys.readouterr().out
    assert "weights of layers, fp8, and transposed" in said
    assert said.count("about 0.00 GiB of memory a rank; products in 8 bits are emulated, slower than float32") == 1


@pytest.mark.parametrize("tied", [True, False])
def test_the_head_in_8_bits(emulated_runs, text, tmp_path, tied):
    """Alone and on two stages of a pipeline; on the emulated GPU too."""
    settings = {**RUN, "model": {**MODEL, "tie_word_embeddings": tied}}
    without = train(text, tmp_path / "without", "cpu", **settings)
    settings["fp8_head"] = True
    cpu, gpu = (train(text, tmp_path / device, device, **settings) for device in ("cpu", "cuda"))
    stages = train(text, tmp_path / "stages", "cpu", **settings, ranks=2, pp=2, micro_batch_size=2)
    for name in ("loss", "val_loss"):
        np.testing.assert_allclose(column(gpu, name), column(cpu, name), rtol=1e-3)
        np.testing.assert_allclose(column(stages, name), column(cpu, name), rtol=1e-3)
        np.testing.assert_allclose(column(cpu, name), column(without, name), rtol=NEAR)
        assert not set(column(cpu, name)) & set(column(without, name))


def test_a_run_with_a_head_in_8_bits_is_resumed_and_evaluated(text, tmp_path, caplog):
    """A run resumed without it is warned; ``kos eval`` with it has the validation loss of the run."""
    (val := tmp_path / "val.txt").write_text(text.read_text()[: 8 * 16 + 1])
    settings = {**RUN, "val_data": str(val), "eval_batches": 99, "steps": 2, "seed": 3}
    rows = train(text, tmp_path / "run", "cpu", **settings, fp8_head=True)
    flags = {"device": "cpu", "dtype": "fp8", "seq_len": 16, "fp8_head": True}
    ((row,),) = spawn(lambda comm: evaluate(tmp_path / "run", [str(val)], [], flags, comm), 1, timeout=100)
    assert row["loss"] == pytest.approx(rows[-1]["val_loss"], rel=1e-5) and set(flags) <= set(SETTINGS)
    for head, warned in ((True, []), (False, ["resuming with another fp8_head"])):
        caplog.clear()
        settings["steps"] += 1
        train(text, tmp_path / "run", "cpu", **settings, fp8_head=head, resume="auto")
        assert [line.partition(":")[0] for line in caplog.messages] == warned


@pytest.mark.parametrize(("settings", "said"), [
    ({"dtype": "float32"}, "--fp8-head: expected --dtype fp8, got float32"),
    ({"dtype": "fp8", "lora": 4}, "--fp8-head: expected no --lora, which freezes the head, got --lora 4"),
])  # fmt: skip
def test_a_head_in_8_bits_is_for_fp8(settings, said):
    with pytest.raises(ConfigError, match=said):
        TrainConfig.from_preset(**settings, fp8_head=True).for_world(1)


@pytest.mark.parametrize(
    ("broken", "value", "first", "device", "ranks"),
    [
        ("model.layers.1.mlp.down_proj", np.inf, "the weights of model.layers.1.mlp.down_proj", "cuda", 2),
        ("model.layers.1.input_layernorm", 3e38, "the input of model.layers.1.self_attn.qkv_proj", "cuda", 1),
        ("lm_head", np.inf, "the weights of lm_head", "cuda", 2),
        ("lm_head", np.inf, "the weights of lm_head", "cpu", 1),
    ],
)
def test_a_value_that_is_not_finite_stops_the_run(
    emulated_runs, text, tmp_path, before_call, broken, value, first, device, ranks
):
    """Saturating would hide it. The first tensor with one is named, with the step."""
    kind = CudaDevice if device == "cuda" else CpuDevice
    name = f"{broken}.weight"

    def started(self, step, stop):
        if step == 2 and name in self.step.weights:
            weights = self.step.weights[name]
            (on_host(weights) if device == "cuda" else weights).reshape(-1)[0] = value

    before_call(kind, "start_step", started)
    settings = {**RUN, "eval_every": 0, "save_every": 0, "ranks": ranks, "pp": ranks}
    settings |= {"fp8_head": True, "model": {**MODEL, "tie_word_embeddings": False}}
    if ranks > 1:  # a rank has several models
        settings |= {"pp_schedule": "zero-bubble-v", "model": {**settings["model"], "num_hidden_layers": 3}}
    with pytest.raises(TrainingError, match=rf"step 3: expected a finite loss, got nan \(first in {first}.weight\);"):
        train(text, tmp_path, device, **settings)


@pytest.mark.parametrize(("device", "recompute"), [("cpu", "none"), ("cuda", "norms")])
def test_norms_and_swiglu_that_are_not_written_have_the_same_bits(
    emulated_runs, text, tmp_path, monkeypatch, before_call, device, recompute
):
    shape = {**MODEL, "intermediate_size": 128}  # the gradient, too, if blocks are of gate or of up
    settings = {**RUN, "model": shape, "recompute": recompute}
    calls = Counter[str]()
    for name in ("rms_norm", "swiglu", "swiglu_backward"):
        before_call(reference, f"quantize_{name}", lambda *_, name=name: calls.update([name]))
    fused = train(text, tmp_path / "fused", device, **settings)
    assert len(calls) == 3
    calls.clear()
    for name in ("normed", "gated"):
        monkeypatch.setattr(Fp8Ops, name, lambda self, *operands: None)
    written = train(text, tmp_path / "written", device, **settings)
    assert not calls
    assert column(fused) == column(written)
    assert tensors_of_run(tmp_path / "fused") == tensors_of_run(tmp_path / "written")


def test_biases(emulated_runs, text, tmp_path):
    """Of all matrices: the gradient of the first product of an MLP is written then, for its bias."""
    shape = {**MODEL, "model_type": "llama", "attention_bias": True, "mlp_bias": True}
    cpu, gpu = (train(text, tmp_path / device, device, **RUN | {"model": shape}) for device in ("cpu", "cuda"))
    np.testing.assert_allclose(column(gpu), column(cpu), rtol=1e-3)


def test_a_gradient_that_is_not_finite_is_named(emulated_runs, text, tmp_path, monkeypatch):
    """Both stages have such a gradient. The last stage is named, because the backward begins there."""
    real = reference.swiglu_backward

    def broken(d_out, gate_up, out, d_gate_up, arena):
        real(d_out, gate_up, out, d_gate_up, arena)
        d_gate_up[3, 5] = np.inf

    monkeypatch.setattr(reference, "swiglu_backward", broken)
    expected = "the gradient of the output of model.layers.1.mlp.gate_up_proj.weight"
    with pytest.raises(TrainingError, match=rf"step 1: .* gradient norm, got nan \(first in {expected}\);"):
        train(text, tmp_path, **RUN, ranks=2, pp=2)


LAYOUTS = [
    (Layout(dp=2, tp=2), {"family": "qwen3", "recompute": "block", "zero": 1, "graph": False}),
    (Layout(pp=2), {"pp_schedule": "zero-bubble-v", "family": "olmo2", "recompute": "norms", "layers": HEAD_ALONE}),
    (Layout(cp=2, tp=2), {"seq_len": 128, "documents": "pack", "tied": True, "recompute": "norms"}),
]


@pytest.mark.parametrize(("layout", "changes"), LAYOUTS, ids=lambda x: named(x) if isinstance(x, Layout) else str(x))
def test_layout(emulated, layout, changes):
    """Near one rank's: ranks of tp have scales of their own, and other sums round weights otherwise."""
    how = {**IN_8, "batch_size": 4, "lr": 1e-3, **changes}
    layers = how.pop("layers", layouts.layers_of(layout))
    of_one = {"documents", "family", "batch_size", "lr", "tied", *IN_8}
    (expected,) = layouts.train(Layout(), layers, **{key: how[key] for key in of_one & how.keys()})
    for rank, got in enumerate(layouts.train(layout, layers, **how)):
        np.testing.assert_allclose(got["rows"][:, 0], expected["rows"][:, 0], rtol=NEAR, err_msg=f"rank {rank}")
        np.testing.assert_allclose(got["rows"][:, 1], expected["rows"][:, 1], rtol=0.05, err_msg=f"rank {rank}")
        assert got["loss"] == pytest.approx(expected["loss"], rel=NEAR)


GATHERED = [
    (Layout(dp=2, tp=2), {"family": "qwen3", "tied": True}, True),
    (Layout(pp=2, dp=2), {"pp_schedule": "zero-bubble-v", "layers": HEAD_ALONE, "graph": False}, False),
    (Layout(dp=2), {"optimizer": "muon", "lr": 1e-3}, False), (Layout(cp=2), {"master_weights": "none"}, False),
]


@pytest.mark.parametrize(
    ("layout", "changes", "one"), GATHERED,
    ids=lambda x: named(x) if isinstance(x, Layout) else str(x),
)  # fmt: skip
def test_zero_gathers_in_8_bits(emulated, layout, changes, scales, gather_in_16_bits):
    """With the bits of a gather in 16 bits."""
    how = {**IN_8, "batch_size": 4, "zero": 1, "layers": 2, **changes}
    check_gathered(lambda: layouts.train(layout, **how), gather_in_16_bits)


@pytest.mark.parametrize("elastic", [None, "2"])
def test_zero_gathers_in_8_bits_on_cpus(elastic, gather_in_16_bits):
    how = {**IN_8, "lr": 1e-3, "zero": 1, "elastic": elastic}
    check_gathered(lambda: on_cpus.train(Layout(dp=2), CpuDevice, 2, False, **how), gather_in_16_bits)


def check_gathered(train: Callable[[], list[dict[str, Any]]], gather_in_16_bits: Callable[[], None]) -> None:
    ours = train()
    gather_in_16_bits()
    for got, expected in zip(ours, train(), strict=True):
        assert got["rows"].tobytes() == expected["rows"].tobytes() and got["loss"] == expected["loss"]
        assert all(value.tobytes() == expected["weights"][name].tobytes() for name, value in got["weights"].items())


def test_the_rows_of_logits_in_a_fixed_order_are_a_multiple_of_16():
    """This holds if the head is in 8 bits. Otherwise they are the largest divisor of a micro-batch: 3 x 4,112."""
    base = LinearOps(reference)
    for head, rows in ((True, 4112), (False, 6168)):
        ops = FixedOrder(Fp8Ops(base, reference.make_arena(), True, head), None, Split(1, 1), ALONE, ALONE, {})
        assert ops.head_rows(3 * 4112, 8192) == rows and ops.head_rows(24, 16) == (8 if head else 12)


def test_tensor_parallel_on_cpus():
    """Near one rank.  Other layouts have the bits of one rank with ``deterministic``: see ``test_layouts.py``."""
    how = {**IN_8, "lr": 1e-3}
    (alone,) = on_cpus.train(Layout(), CpuDevice, 2, True, **how)
    for got in on_cpus.train(Layout(tp=2), CpuDevice, 2, True, **how):
        np.testing.assert_allclose(got["rows"][:, 0], alone["rows"][:, 0], rtol=NEAR)
        assert got["loss"] == pytest.approx(alone["loss"], rel=NEAR)


@pytest.mark.parametrize(
    "changes",
    [{"optimizer": "muon"}, {"grad_dtype": "bfloat16", "micro_batch_size": None}, {"master_weights": "none"}],
    ids=str,
)
def test_other_settings(emulated_runs, text, tmp_path, changes):
    """Of GPUs alone near the same without; Muon's matrices as in bfloat16."""
    near = train(text, tmp_path / "bfloat16", **RUN | changes | {"dtype": "bfloat16"})
    rows = train(text, tmp_path / "fp8", **RUN | changes)
    np.testing.assert_allclose(column(rows), column(near), rtol=NEAR)
    assert column(rows) != column(near)


def test_what_is_refused(emulated):
    """By name, on every rank."""

    def refused(expected, layout, **changes):
        with pytest.raises(ConfigError, match=expected):
            layouts.train(layout, 1, **{**IN_8, **changes})

    refused(r"--dtype fp8: expected --seq-len 40 / 1 to be a multiple of 16, got 40", Layout(), seq_len=40)
    refused(r"expected --seq-len 32 / 4 to be a multiple of 16, got 8", Layout(tp=2), seq_len=32)
    refused(r"--tp: expected 1 with --deterministic in fp8, .* got 2", Layout(tp=2), deterministic=True)
    columns = "the columns of model.layers.0.self_attn.o_proj.weight on a rank of --tp 4 to be .* got 8"
    refused(columns, Layout(tp=4), seq_len=128)
    about = engine_module.device_info(0)
    about.compute_capability, about.name = (8, 0), "A100"
    refused(r"--dtype fp8: expected a GPU of compute capability 8.9 or more, got 8.0 \(A100\)", Layout(dp=2))


def test_sizes_of_copied_kv_heads():
    """A rank of 16 has the rows of a head of queries, of keys and of values: 192, not 1,152 / 16."""
    model = LlamaConfig(
        vocab_size=256, hidden_size=1024, intermediate_size=4096, num_hidden_layers=1, num_attention_heads=16,
        num_key_value_heads=1, head_dim=64,
    )  # fmt: skip
    check_sizes(model.layers(range(1)), 16, {})


def test_the_operations_of_a_search_are_freed_at_once():
    """And with them their arena, before the memory of a run is allocated: not by the garbage collector."""
    in_8 = Fp8Ops(LinearOps(reference), object(), True)
    ops = FixedOrder(in_8, in_8.arena, Split(), ALONE, ALONE, {})
    assert ops.of_head.innermost().inner is ops.innermost().inner is reference
    freed = weakref.ref(in_8)
    gc.disable()
    try:
        del in_8, ops
        assert freed() is None
    finally:
        gc.enable()


def test_an_untried_gpu_is_allowed(emulated_runs, text, tmp_path, caplog):
    engine_module.device_info(0).compute_capability = (8, 9)
    train(text, tmp_path, **RUN | {"steps": 1, "eval_batches": 0})
    assert "--dtype fp8 has not been tried on GPUs of compute capability 8.9" in caplog.text


def test_settings():
    config = TrainConfig.from_preset("tiny", dtype="fp8")
    on_cpu, on_gpu = config.for_world(1), config.for_world(1, "cuda")
    assert [on_cpu.compute_dtype, on_gpu.compute_dtype, on_gpu.master_dtype] == ["float32", "bfloat16", "float32"]
    narrow = TrainConfig.from_preset("tiny", dtype="fp8", master_weights="none")
    assert narrow.for_world(1, "cuda").master_dtype == "bfloat16"
    with pytest.raises(ConfigError, match="--master-weights: expected float32 with --dtype fp8 on the CPU, got none"):
        narrow.for_world(1)


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(pp=2)], ids=named)
def test_the_plan_counts_all(emulated, layout, monkeypatch):
    layouts.check_memory(layout, IN_8, monkeypatch)
