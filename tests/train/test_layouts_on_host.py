"""Layouts on the emulated GPU give the run of one rank, as ``test_layouts.py`` has it of CPUs."""

from __future__ import annotations

import functools
import gc
import threading
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kos.errors import OutOfMemory
from kos.memory import array as array_module
from kos.memory.arena import ALIGNMENT
from kos.testing import spawn
from kos.train.config.optimizers import not_of
from kos.train.config.options import TrainConfig
from kos.train.device import cuda as engine_module
from kos.train.device import memory_plan
from kos.train.device.cuda import CudaDevice
from kos.train.model.initial import init_weights
from kos.train.model.parameters import Parameters
from kos.train.ops import Attend, fixed_order
from kos.train.ops.cuda import CudaOps, cublaslt
from kos.train.optim import cuda as cuda_optimizer
from kos.train.optim.cuda import CHUNK
from kos.train.parallel.mesh import Layout, Mesh
from kos.train.parallel.schedules import SCHEDULES
from tests.train.host_kernels import engine as host_kernels
from tests.train.host_kernels.engine import DeviceComm, host_engine, on_host
from tests.train.test_layouts import SHAPE, make_data, named, run_to_its_end
from tests.train.test_tensor_parallel import part_of

STEPS = 3
RUN: dict[str, Any] = {
    "batch_size": 8, "micro_batch_size": 1, "seq_len": 8, "lr": 1e-2, "eps": 1e-3, "warmup_steps": 2, "steps": STEPS,
    "dtype": "float32", "documents": "cross",
}  # fmt: skip


@pytest.fixture
def emulated(monkeypatch):
    host_engine(monkeypatch)
    monkeypatch.setattr(memory_plan, "BUCKET_BYTES", 4 * CHUNK)
    monkeypatch.setattr(CudaOps, "overlap_rows", 4)  # a micro-batch of 8 tokens has two halves


def layers_of(layout: Layout) -> int:
    """Stages of unequal length in pipelines; elsewhere few, for they are emulated one after another."""
    return 5 if layout.pp > 1 else 2


HEAD_ALONE = 3  # layers, with which the last of 4 stages has none


def make_device(
    comm: Any, layout: Layout, layers: int, *, tied: bool = False, family: str = "llama",
    kv_heads: int = SHAPE["num_key_value_heads"], local: int = 1, **changes: Any,
) -> CudaDevice:  # fmt: skip
    """The device of a rank, with the same weights in every layout."""
    axes = {axis: getattr(layout, axis) for axis in ("dp", "tp", "pp", "cp")}
    shape = {**SHAPE, "num_hidden_layers": layers, "tie_word_embeddings": tied, "model_type": family,
             "num_key_value_heads": kv_heads}  # fmt: skip
    shape["attention_bias"] = family == "qwen3"
    run = {key: value for key, value in RUN.items() if key not in not_of(changes.get("optimizer", "adamw"))}
    asked = TrainConfig.from_preset("tiny", **{**run, **changes}, model=shape, **axes)
    mesh, config = Mesh(DeviceComm(comm), layout, local), asked.for_world(layout.dp, "cuda")
    model = config.model_config_for(40)
    whole = Parameters(model.parameter_shapes())
    init_weights(model, whole, 3)
    device = CudaDevice(config, model, make_data(config), mesh, lambda what, share: None)
    held, gradients = device.step.optimizer.weights, device.step.gradients
    parts = Parameters(gradients.shapes, multiple=gradients.multiple, counts=gradients.counts)
    for name in parts:
        parts[name][...] = part_of(name, whole[name], model, layout.tp, mesh.tp.rank)
    for part, local in held.parts():
        on_host(held.flat[local])[...] = parts.flat[part]
    device.step.optimizer.refresh_copy()
    for name, weight in device.step.frozen.items():
        on_host(weight)[...] = part_of(name, whole[name], model, layout.tp, mesh.tp.rank)
    return device


def train(layout: Layout, layers: int, **changes: Any) -> list[dict[str, Any]]:
    """What each rank of a run knows at its end."""

    def run(comm: Any) -> dict[str, Any]:
        device = make_device(comm, layout, layers, **changes)
        return run_to_its_end(device, STEPS, lambda array: on_host(array).copy(), context=5)

    return spawn(run, layout.ranks, timeout=100)


@functools.cache
def serial(layers: int, tied: bool, **changes: Any) -> dict[str, Any]:
    (alone,) = train(Layout(), layers, tied=tied, **changes)
    assert alone["rows"][0, 0] > alone["rows"][-1, 0], "it learns"
    return alone


QUICK = [
    (Layout(tp=2), {"tied": True, "recompute": "norms", "graph": False}),
    (Layout(tp=2), {"recompute": "block", "micro_batch_size": 2}),
    (Layout(tp=4), {"micro_batch_size": 4}),
    (Layout(cp=2), {"zero": 1}),
    (Layout(dp=2, tp=2), {"zero": 1}),
    (Layout(pp=2), {"pp_schedule": "1f1b", "tied": True}),
    (Layout(pp=2), {"pp_schedule": "zero-bubble-v", "recompute": "block", "graph": False}),
    (Layout(pp=2), {"pp_schedule": "zero-bubble-v", "recompute": "norms", "micro_batch_size": 8}),
    (Layout(pp=2), {"pp_schedule": "zero-bubble-v", "tied": True, "layers": HEAD_ALONE}),
    (Layout(pp=2, dp=2), {"pp_schedule": "zero-bubble-v", "zero": 1, "tied": True}),
    (Layout(tp=2), {"micro_batch_size": 2, "documents": "pack"}),
    (Layout(cp=2), {"documents": "pack"}),
    (Layout(tp=2), {"family": "qwen3", "micro_batch_size": 2}),
    (Layout(tp=4), {"family": "qwen3", "kv_heads": 2}),
    (Layout(cp=2), {"family": "olmo2", "recompute": "block"}),
    (Layout(pp=2), {"pp_schedule": "zero-bubble-v", "family": "olmo2", "recompute": "norms"}),
]
SLOW = [
    (Layout(dp=2, tp=2), {"kv_heads": 1, "zero": 1, "micro_batch_size": 2}),
    (Layout(cp=2, tp=2), {"family": "qwen3"}),
    (Layout(pp=2), {"pp_schedule": "zero-bubble-v", "family": "qwen3"}),
    (Layout(pp=2, cp=2), {"family": "olmo2", "zero": 1, "graph": False}),
    (Layout(pp=2), {"pp_schedule": "zero-bubble-v", "documents": "pack"}),
    (Layout(cp=2, tp=2), {"micro_batch_size": 2, "documents": "pack"}),
    *((Layout(pp=2), {"pp_schedule": name, "tied": number % 2 == 0}) for number, name in enumerate(SCHEDULES)),
    (Layout(pp=4), {"pp_schedule": "1f1b", "recompute": "norms"}),
    (Layout(pp=2, dp=2), {"pp_schedule": "zero-bubble-v", "tied": True}),
    (Layout(pp=2, dp=2, tp=2), {"zero": 1}),
    (Layout(tp=2), {}),
    (Layout(tp=2), {"recompute": "norms", "micro_batch_size": 2}),
    (Layout(tp=4), {"recompute": "block"}),
    (Layout(cp=2, tp=2), {"micro_batch_size": 2}),
    (Layout(pp=2, tp=2), {"pp_schedule": "zero-bubble-v", "micro_batch_size": 2}),
    (Layout(cp=4), {"recompute": "block"}),
    (Layout(cp=2, tp=2), {"graph": False}),
    (Layout(dp=2, tp=2), {"tied": True}),
    (Layout(pp=2, tp=2), {"pp_schedule": "zero-bubble-v", "tied": True}),
    (Layout(pp=2, tp=2), {"recompute": "norms", "graph": False}),
    (Layout(cp=2), {"recompute": "norms"}),
    (Layout(cp=2, tp=2), {"tied": True, "graph": False}),
    (Layout(dp=2, cp=2), {"zero": 1}),
    (Layout(pp=2, cp=2), {"pp_schedule": "zero-bubble-v"}),
]


@pytest.mark.parametrize(
    ("layout", "changes"),
    [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
    ids=["-".join([named(layout), *map(str, x.values())]) for layout, x in QUICK + SLOW],
)
def test_layout(emulated, layout: Layout, changes: dict[str, Any]) -> None:
    """In a graph and not: no memory is allocated in a capture, no arena outgrows its plan, every work is joined."""
    check_layout(layout, changes)


def check_layout(layout: Layout, changes: dict[str, Any]) -> None:
    changes = {"layers": layers_of(layout), **changes}
    layers, tolerance, held = changes.pop("layers"), 2e-5, set()
    of_layouts = {"pp_schedule", "zero", "recompute", "graph", "micro_batch_size", "tied"}
    alone = {key: value for key, value in changes.items() if key not in of_layouts}
    expected, ranks = serial(layers, changes.get("tied", False), **alone), train(layout, layers, **changes)
    for rank, got in enumerate(ranks):
        np.testing.assert_allclose(got["rows"], expected["rows"], rtol=tolerance, err_msg=f"rank {rank}")
        assert got["loss"] == pytest.approx(expected["loss"], rel=tolerance)
        assert got["text"] in (None, expected["text"])
        for name, value in got["weights"].items():
            tp = layout.coordinates(rank)["tp"]
            wanted = part_of(name, expected["weights"][name], expected["model"], layout.tp, tp)
            np.testing.assert_allclose(value, wanted, rtol=tolerance, atol=tolerance, err_msg=f"{name} of rank {rank}")
            held.add(name)
    assert held == set(expected["weights"]) and ranks[0]["text"] == expected["text"]


def test_validation_batches_that_micro_batches_do_not_divide(emulated) -> None:
    """The last message of a batch between two stages is shorter than the others."""
    how: dict[str, Any] = {"seq_len": 160, "micro_batch_size": 4, "recompute": "norms"}
    (alone,), both = train(Layout(), 2, **how), train(Layout(pp=2), 2, **how)
    assert [rank["loss"] for rank in both] == pytest.approx([alone["loss"]] * 2, rel=2e-5)


FIXED = [
    (Layout(pp=2), {"pp_schedule": "1f1b", "tied": True}),
    (Layout(pp=2), {"pp_schedule": "zero-bubble-v", "recompute": "norms", "tied": False, "graph": False}),
    (Layout(pp=2, dp=2), {"pp_schedule": "zero-bubble-v", "zero": 1, "tied": True}),
    (Layout(pp=2, dp=2), {"pp_schedule": "zero-bubble-v", "master_weights": "none", "tied": False, "zero": 1}),
    (Layout(pp=2), {"pp_schedule": "zero-bubble-v", "tied": True, "layers": HEAD_ALONE}),
]
FIXED += [
    (Layout(cp=2), {"tied": True, "seq_len": 16}),
    (Layout(pp=2, cp=2), {"tied": True, "seq_len": 16, "zero": 1, "pp_schedule": "zero-bubble-v", "dtype": "bfloat16"}),
]
FIXED_SLOW = [
    (Layout(cp=4, dp=2), {"tied": False, "seq_len": 32, "recompute": "block", "graph": False}),
    (Layout(cp=8), {"tied": True, "seq_len": 32, "micro_batch_size": 2, "zero": 1}),
    *((Layout(pp=2), {"pp_schedule": name, "tied": True}) for name in SCHEDULES if name != "1f1b"),
    (Layout(pp=4), {"pp_schedule": "1f1b", "recompute": "block", "tied": True}),
    (Layout(pp=2, dp=4), {"pp_schedule": "1f1b", "tied": True}),
    *((Layout(pp=2), {"pp_schedule": name, "tied": False, "micro_batch_size": 2}) for name in SCHEDULES),
]


@pytest.mark.parametrize(
    ("layout", "changes"),
    [*FIXED, *(pytest.param(*case, marks=pytest.mark.slow) for case in FIXED_SLOW)],
    ids=["-".join([named(layout), *map(str, x.values())]) for layout, x in FIXED + FIXED_SLOW],
)
def test_deterministic(emulated, layout: Layout, changes: dict[str, Any], monkeypatch) -> None:
    """The bits of one rank, although a rank's chunks of the norm and positions in the layout differ."""
    check_deterministic(layout, changes, monkeypatch)


def check_deterministic(layout: Layout, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fixed_order, "LEAST_CHUNK_ON_GPUS", 2)
    monkeypatch.setattr(cuda_optimizer, "CHUNK", 256)
    monkeypatch.setattr(memory_plan, "CHUNK", 256)
    monkeypatch.setattr(memory_plan, "BUCKET_BYTES", 4 * 1024)
    changes = {"deterministic": True, "grad_clip": 1.0, "layers": layers_of(layout), **changes}
    layers = changes.pop("layers")
    if "master_weights" in changes:
        changes["dtype"] = "bfloat16"
    alone = {key: value for key, value in changes.items() if key not in ("pp_schedule", "zero", "recompute", "graph")}
    expected, held = serial(layers, **alone), set()
    if "seq_len" in changes and "dtype" not in changes:
        near = serial(layers, **{**alone, "deterministic": False})
        np.testing.assert_allclose(expected["rows"], near["rows"], rtol=2e-5)
    for rank, got in enumerate(train(layout, layers, **changes)):
        assert got["rows"].tobytes() == expected["rows"].tobytes(), f"rank {rank}"
        assert got["loss"] == expected["loss"] and got["text"] in (None, expected["text"])
        for name, value in got["weights"].items():
            assert value.tobytes() == expected["weights"][name].tobytes(), f"{name} of rank {rank}"
            held.add(name)
    assert held == set(expected["weights"])


def test_deterministic_products_have_the_shapes_of_one_rank(emulated, monkeypatch) -> None:
    """On a GPU the bits of a product depend on its shape."""
    monkeypatch.setattr(fixed_order, "LEAST_CHUNK_ON_GPUS", 2)
    real, found = host_kernels._numpy, set()

    def note(name: str, arguments: Any) -> None:
        if name.startswith(("linear", "attention")) or name == "rms_norm_backward":
            attend = arguments[0] if isinstance(arguments[0], Attend) else None
            arrays = (attend.qkv, attend.out, attend.kv, *arguments[1:]) if attend else arguments
            sliced = (attend.queries, attend.keys) if attend else ()
            found.add((name, *map(str, sliced), *(x.shape for x in arrays if hasattr(x, "pointer"))))
        real(name, arguments)

    def shapes(layout: Layout) -> set[Any]:
        found.clear()
        train(layout, 2, deterministic=True, seq_len=16)
        return set(found)

    monkeypatch.setattr(host_kernels, "_numpy", note)
    alone = shapes(Layout())
    assert len(alone) > 20 and shapes(Layout(cp=2, pp=2)) == alone


PLANNED = [
    pytest.param(Layout(tp=2), {}, marks=pytest.mark.slow),
    (Layout(cp=2), {}),
    (Layout(cp=2), {"compress": "int8"}),
    (Layout(dp=4), {"compress": "int8", "compress_scope": "hosts", "local": 2, "zero": 1}),
    (Layout(pp=2), {"pp_schedule": "zero-bubble-v", "tied": True}),
    pytest.param(Layout(pp=2), {"tied": True, "deterministic": True}, marks=pytest.mark.slow),
    pytest.param(Layout(cp=2), {"deterministic": True}, marks=pytest.mark.slow),
    pytest.param(Layout(pp=2), {"pp_schedule": "zero-bubble-v", "recompute": "norms"}, marks=pytest.mark.slow),
    pytest.param(Layout(pp=2, tp=2), {"pp_schedule": "zero-bubble-v", "recompute": "block"}, marks=pytest.mark.slow),
]


PLANS = ["tp2", "cp2", "cp2-int8", "hosts-int8", "pp2-v", "fixed", "fixed-cp2", "pp2", "tp2-pp2"]


@pytest.mark.parametrize(("layout", "changes"), PLANNED, ids=PLANS)
def test_allocated_memory_is_within_the_plan(emulated, layout, changes, monkeypatch) -> None:
    """And not much less than it; a micro-batch in flight takes all that is planned for it, on some rank."""
    monkeypatch.setattr(fixed_order, "LEAST_CHUNK_ON_GPUS", 16)
    monkeypatch.setattr(memory_plan, "RESERVE", 1 << 16)
    monkeypatch.setattr(cublaslt, "WORKSPACE", 0)
    held, real, plan = threading.local(), array_module.pool_of(0).allocate, engine_module.plan_memory
    one_at_a_time = threading.RLock()
    changes = {**changes, "seq_len": 128, "dtype": "bfloat16", "documents": "pack"}

    def allocate(nbytes, *arguments, **options):
        memory = real(nbytes, *arguments, **options)
        with one_at_a_time:
            held.bytes = getattr(held, "bytes", 0) + nbytes
        weakref.finalize(memory.raw, freed, held.__dict__, nbytes)
        return memory

    def freed(mine, nbytes):
        with one_at_a_time:
            mine["bytes"] -= nbytes

    def run(comm):
        device = make_device(comm, layout, layers_of(layout), **changes)
        device.start_step(0, False)
        device.finish_step(0)
        device.evaluate()
        with one_at_a_time:
            gc.collect()  # the emulated operations hold their arrays in cycles
        device.close()
        device.mesh.close()
        return held.bytes, device.plan.total

    monkeypatch.setattr(array_module, "pool_of", lambda device: SimpleNamespace(allocate=allocate))
    plans = spawn(run, layout.ranks, timeout=100)
    assert all(0.7 * (total - memory_plan.RESERVE) < got <= total for got, total in plans), plans

    def less(*arguments, **options):
        planned = plan(*arguments, **options)
        return planned._replace(slot=planned.slot - ALIGNMENT)

    monkeypatch.setattr(engine_module, "plan_memory", less)
    with pytest.raises(OutOfMemory, match="arena: expected at most"):
        spawn(run, layout.ranks, timeout=100)
