"""Layouts on the emulated GPU engine give the run of one rank, as ``test_layouts.py`` has it of the CPU engine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kos.testing import spawn
from kos.train.config.options import TrainConfig
from kos.train.engine import cuda as engine_module
from kos.train.engine.cuda import CudaEngine
from kos.train.model.generate import generate
from kos.train.model.parameters import Parameters
from kos.train.ops.cuda.adamw import CHUNK
from kos.train.parallel.mesh import Layout, Mesh
from tests.train.host_kernels.engine import DeviceComm, host_engine, on_host
from tests.train.test_layouts import SHAPE, compare, make_data
from tests.train.test_tensor_parallel import part_of

STEPS = 3
RUN = {
    "batch_size": 8, "micro_batch_size": 1, "seq_len": 8, "lr": 1e-2, "eps": 1e-3, "warmup_steps": 2, "steps": STEPS,
    "dtype": "float32",
}  # fmt: skip


@pytest.fixture
def emulated(monkeypatch):
    host_engine(monkeypatch)
    monkeypatch.setattr(engine_module, "BUCKET_BYTES", 4 * CHUNK)


def train(layout: Layout, *, tied: bool = False, **changes: Any) -> dict[str, Any]:
    """What a run comes to, as rank 0 knows it, and the weights and peaks of arenas of each rank."""
    axes = {axis: getattr(layout, axis) for axis in ("dp", "tp", "pp", "cp")}
    asked = TrainConfig.from_preset(
        "tiny", **{**RUN, **changes}, model={**SHAPE, "tie_word_embeddings": tied}, **axes
    )  # fmt: skip

    def run(own_comm: Any) -> dict[str, Any]:
        mesh = Mesh(DeviceComm(own_comm), layout)
        config = asked.for_world(layout.dp, "cuda")
        model = config.model_config_for(40)
        whole = Parameters(model.parameter_shapes())
        model.init_weights(whole, 3)
        engine = CudaEngine(config, model, make_data(config), mesh, lambda what, share: None)
        held, parts = engine.optimizer.weights, engine.gradients.like()
        for name in parts:
            on_host(parts[name])[...] = part_of(name, whole[name], model, layout.tp, mesh.tp.rank)
        for part, local in held.parts():
            on_host(held.flat[local])[...] = on_host(parts.flat[part])
        engine.optimizer.refresh_copy()
        rows = []
        for step in range(STEPS):
            engine.start_step(step, False)
            result = engine.finish_step(step)
            rows.append((result.loss, result.norm))
        loss, next_logits = engine.evaluate(), engine.sampler()
        text = [] if next_logits is None else [*generate(next_logits, 5, [1, 2, 3], 8, seed=1)]
        weights = engine.whole_weights()
        weights = {name: on_host(weights[name]).copy() for name in engine.gradients}
        engine.close()
        mesh.close()
        return {"rows": np.array(rows), "loss": loss, "text": text, "weights": weights}

    ranks = spawn(run, layout.ranks, timeout=100)
    return {**ranks[0], "ranks": ranks}


@pytest.fixture(scope="module")
def one_rank():
    """The run of one rank, tied or not; made once."""
    runs: dict[bool, dict[str, Any]] = {}

    def of(tied: bool) -> dict[str, Any]:
        if tied not in runs:
            runs[tied] = train(Layout(), tied=tied)
        return runs[tied]

    return of


SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble", "zero-bubble-v")


@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        (Layout(tp=2), {}),
        (Layout(tp=2), {"tied": True, "recompute": "norms", "graph": False}),
        (Layout(tp=4), {"recompute": "block"}),
        (Layout(dp=2, tp=2), {"zero": 1}),
        (Layout(dp=2, tp=2), {"tied": True}),
        *((Layout(pp=2), {"pp_schedule": name, "tied": number % 2 == 0}) for number, name in enumerate(SCHEDULES)),
        *((Layout(pp=2), {"pp_schedule": name, "graph": False, "recompute": "block"}) for name in SCHEDULES[3:]),
        (Layout(pp=4), {"pp_schedule": "zero-bubble", "recompute": "norms"}),
        (Layout(pp=2, tp=2), {"pp_schedule": "zero-bubble-v", "tied": True}),
        (Layout(pp=2, tp=2), {"recompute": "norms"}),
        (Layout(pp=2, dp=2), {"pp_schedule": "interleaved", "zero": 1, "tied": True}),
        (Layout(pp=2, dp=2), {"pp_schedule": "zero-bubble", "tied": True}),
        (Layout(pp=2, dp=2, tp=2), {"zero": 1}),
    ],
    ids=str,
)  # fmt: skip
def test_layout(emulated, one_rank, layout: Layout, changes: dict[str, Any]) -> None:
    expected = one_rank(changes.get("tied", False))
    assert expected["rows"][0, 0] > expected["rows"][-1, 0]
    compare(train(layout, **changes), expected, layout, 2e-5, changes.get("tied", False))
