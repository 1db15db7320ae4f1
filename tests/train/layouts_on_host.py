"""Runs of every layout on the emulated GPU, as ``layouts.py`` has them of CPUs."""

import functools
import gc
import threading
import weakref
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from kos.errors import OutOfMemory
from kos.memory import array as array_module
from kos.memory.arena import ALIGNMENT
from kos.testing import spawn
from kos.train import optim
from kos.train.config import not_of
from kos.train.device import cuda as engine_module
from kos.train.device import dry_run
from kos.train.device.cuda import CudaDevice
from kos.train.model.initial import init_weights
from kos.train.ops.cuda import cublaslt
from kos.train.ops.parameters import Parameters
from kos.train.parallel import fixed_order
from kos.train.parallel.mesh import Layout, Mesh
from tests.train.host_kernels.communicator import DeviceComm
from tests.train.host_kernels.engine import host_engine, on_host
from tests.train.layouts import OF_LAYOUTS, SHAPE, compare, make_data, run_to_its_end, settings
from tests.train.models import InMemory

STEPS = 2
RUN: dict[str, Any] = {
    "batch_size": 4, "micro_batch_size": 1, "seq_len": 8, "lr": 1e-2, "eps": 1e-3, "warmup_steps": 2, "steps": STEPS,
    "dtype": "float32", "documents": "cross",
}  # fmt: skip


@pytest.fixture
def emulated(monkeypatch):
    host_engine(monkeypatch)


def layers_of(layout: Layout) -> int:
    """Stages of unequal length in pipelines; elsewhere few, for they are emulated one after another."""
    return 5 if layout.pp > 1 else 2


HEAD_ALONE = 3  # layers, with which the last of 4 stages has none


def make_device(
    comm: Any, layout: Layout, layers: int, *, tied: bool = False, family: str = "llama",
    kv_heads: int = SHAPE["num_key_value_heads"], **changes: Any,
) -> CudaDevice:  # fmt: skip
    """The device of a rank, with the same weights in every layout."""
    shape = {"num_hidden_layers": layers, "tie_word_embeddings": tied, "model_type": family,
             "num_key_value_heads": kv_heads, "attention_bias": family == "qwen3"}  # fmt: skip
    run = {key: value for key, value in RUN.items() if key not in not_of(changes.get("optimizer", "adamw"))}
    asked = settings(layout, **{**run, **shape, **changes})
    mesh, config = Mesh(DeviceComm(comm), layout), asked.for_world(layout.dp, "cuda")
    model = config.model_config_for(40)
    whole = Parameters(model.parameter_shapes())
    init_weights(model, whole, 3)
    device = CudaDevice(config, model, make_data(config), mesh, lambda what, share: None)
    device.read(InMemory(whole))
    return device


def train(layout: Layout, layers: int, hosts: Sequence[int] = (), **changes: Any) -> list[dict[str, Any]]:
    """What each rank of a run knows at its end."""

    def run(comm: Any) -> dict[str, Any]:
        device = make_device(comm, layout, layers, **changes)
        return run_to_its_end(device, STEPS, lambda array: on_host(array).copy(), context=5)

    return spawn(run, layout.ranks, timeout=100, hosts=hosts)


@functools.cache
def serial(layers: int, tied: bool, **changes: Any) -> dict[str, Any]:
    (alone,) = train(Layout(), layers, tied=tied, **changes)
    return alone


def check(layout: Layout, changes: dict[str, Any]) -> None:
    changes = {"layers": layers_of(layout), **changes}
    layers, of_layouts = changes.pop("layers"), OF_LAYOUTS | {"graph", "micro_batch_size", "tied"}
    alone = {key: value for key, value in changes.items() if key not in of_layouts}
    ranks = train(layout, layers, **changes)
    compare(ranks, serial(layers, changes.get("tied", False), **alone), layout, 2e-5)


def check_bits(layout: Layout, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """With ``--deterministic``, whose pieces of a sequence have at least 2 tokens, or 8 where cuBLASLt needs many."""
    least = 8 if changes.get("dtype") == "fp8" else 2
    chunks = (optim, "CHUNK", 256), (dry_run, "CHUNK", 256), (dry_run, "BUCKET_BYTES", 4 * 1024)
    for module, name, size in (*chunks, (fixed_order, "LEAST_CHUNK_ON_GPUS", least)):
        monkeypatch.setattr(module, name, size)
    changes = {"deterministic": True, "grad_clip": 1.0, "tied": False, "layers": layers_of(layout), **changes}
    layers = changes.pop("layers")
    alone = {key: value for key, value in changes.items() if key not in OF_LAYOUTS | {"graph"}}
    ranks, expected = train(layout, layers, **changes), serial(layers, **alone)
    if layout.tp > 1 and changes.get("dtype") == "bfloat16":
        # The text may differ: it is sampled from logits of a sharded model, whose bits are not promised.
        expected = {**expected, "text": ranks[0]["text"]}
    compare(ranks, expected, layout)


def check_memory(
    layout: Layout, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch, hosts: Sequence[int] = ()
) -> None:
    """Allocated memory is within the plan, and not much less; a micro-batch in flight takes all that is planned for
    it, on some rank."""
    small = (fixed_order, "LEAST_CHUNK_ON_GPUS", 16), (dry_run, "RESERVE", 1 << 16), (cublaslt, "WORKSPACE", 0)
    for module, name, size in small:
        monkeypatch.setattr(module, name, size)
    held, real, plan = threading.local(), array_module.pool_of(0).allocate, engine_module.plan_memory
    one_at_a_time = threading.RLock()
    changes = {"seq_len": 128, "dtype": "bfloat16", "documents": "pack", **changes}

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
    plans = spawn(run, layout.ranks, timeout=100, hosts=hosts)
    assert all(0.7 * (total - dry_run.RESERVE) < got <= total for got, total in plans), plans

    def less(*arguments, **options):
        planned = plan(*arguments, **options)
        return planned._replace(slot=planned.slot - ALIGNMENT)

    monkeypatch.setattr(engine_module, "plan_memory", less)
    with pytest.raises(OutOfMemory, match="arena: expected at most"):
        spawn(run, layout.ranks, timeout=100, hosts=hosts)
