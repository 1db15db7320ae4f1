"""Every layout of a job gives the run of one rank: losses, norms of gradients, weights, validation and text."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from kos.testing import spawn
from kos.train.config.options import TrainConfig
from kos.train.data.batches import Dataset, Tokens
from kos.train.data.tokenizers import NumberTokenizer
from kos.train.engine.cpu import CpuEngine
from kos.train.model.generate import generate
from kos.train.parallel.mesh import Layout, Mesh
from tests.train.test_tensor_parallel import part_of

STEPS = 20
SHAPE = {
    "hidden_size": 16, "num_hidden_layers": 5, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 4,
    "intermediate_size": 24, "vocab_size": 40, "initializer_range": 0.3,
}  # fmt: skip
RUN = {"batch_size": 24, "micro_batch_size": 2, "seq_len": 24, "lr": 1e-2, "warmup_steps": 2, "steps": STEPS}


class Precise(CpuEngine):
    """In float64, where what differs between layouts is seen."""

    dtype = np.dtype(np.float64)


def make_data(config: TrainConfig) -> Dataset:
    rng = np.random.default_rng(1)
    train, val = (Tokens([rng.integers(0, 40, size).astype(np.uint16)]) for size in (3000, 900))
    sizes = config.seed, config.batch_size, config.seq_len, 4
    return Dataset("numbers", train, val, NumberTokenizer(40), *sizes, "")


def train(layout: Layout, engine: type[CpuEngine], steps: int = STEPS, **changes: Any) -> dict[str, Any]:
    """What a run of ``layout`` comes to, as rank 0 knows it, and the parts of the weights of each rank."""
    tied = changes.pop("tied", False)
    asked = TrainConfig.from_preset(
        "tiny", **{**RUN, **changes}, model={**SHAPE, "tie_word_embeddings": tied}, dp=layout.dp, tp=layout.tp,
        pp=layout.pp, cp=layout.cp,
    )  # fmt: skip

    def run(comm: Any) -> dict[str, Any]:
        mesh = Mesh(comm, layout)
        config = asked.for_world(layout.dp)
        model = config.model_config_for(40)
        from kos.train.model.parameters import Parameters

        whole = Parameters(model.parameter_shapes(), np.float32)
        model.init_weights(whole, 3)
        own = engine(config, model, make_data(config), mesh, lambda what, share: None)
        own.gradients.flat[:] = np.nan
        for name in own.weights:
            own.weights[name][...] = part_of(name, whole[name], model, layout.tp, mesh.tp.rank)
        rows = []
        for step in range(steps):
            own.start_step(step, False)
            result = own.finish_step(step)
            rows.append((result.loss, result.norm))
        loss, next_logits = own.evaluate(), own.sampler()
        text = [] if next_logits is None else [*generate(next_logits, 20, [1, 2, 3], 8, seed=1)]
        weights = {name: value.copy() for name, value in own.whole_weights().items()}
        own.close()
        mesh.close()
        return {"rows": np.array(rows), "loss": loss, "text": text, "weights": weights}

    ranks = spawn(run, layout.ranks, timeout=120)
    return {**ranks[0], "ranks": ranks}


def compare(got: dict[str, Any], expected: dict[str, Any], layout: Layout, tolerance: float, tied: bool) -> None:
    np.testing.assert_allclose(got["rows"], expected["rows"], rtol=tolerance)
    assert got["loss"] == pytest.approx(expected["loss"], rel=tolerance)
    model = TrainConfig.from_preset("tiny", **RUN, model={**SHAPE, "tie_word_embeddings": tied}).model_config_for(40)
    seen = set()
    for rank, each in enumerate(got["ranks"]):
        np.testing.assert_array_equal(each["rows"], got["rows"])
        tp = layout.coordinates(rank)["tp"]
        for name, value in each["weights"].items():
            wanted = part_of(name, expected["weights"][name], model, layout.tp, tp)
            np.testing.assert_allclose(value, wanted, rtol=tolerance, atol=tolerance, err_msg=f"{name} of rank {rank}")
            seen.add(name)
    assert seen == set(expected["weights"])
    assert got["text"] == expected["text"]


def layouts(ranks: int) -> list[Layout]:
    axes = itertools.product((1, 2, 3, 4, 6, 8), repeat=4)
    return [Layout(*axis) for axis in axes if np.prod(axis) == ranks and Layout(*axis).tp in (1, 2, 4)
            and Layout(*axis).pp <= 5]  # fmt: skip


@pytest.mark.parametrize("layout", [x for n in (2, 4) for x in layouts(n) if x.cp == 1], ids=str)
def test_layout(layout: Layout) -> None:
    tied = layout.pp % 2 == 0
    expected = train(Layout(), Precise, tied=tied)
    assert expected["rows"][0, 0] > expected["rows"][-1, 0] + 0.05
    compare(train(layout, Precise, tied=tied), expected, layout, 1e-10, tied)
