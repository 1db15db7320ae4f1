"""Every layout of a job gives the run of one rank: losses, norms of gradients, weights, validation and text."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kos.testing import spawn
from kos.train.config.options import TrainConfig
from kos.train.data.batches import Dataset, Tokens
from kos.train.data.tokenizers import NumberTokenizer
from kos.train.device.cpu import CpuDevice
from kos.train.generate import Sampling, Uncached, generate
from kos.train.model.initial import init_weights
from kos.train.model.llama import LlamaConfig
from kos.train.model.parameters import Parameters
from kos.train.parallel.mesh import Layout, Mesh
from kos.train.parallel.schedules import SCHEDULES
from tests.train.test_tensor_parallel import part_of

STEPS = 5
SHAPE: dict[str, Any] = {
    "hidden_size": 16, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 2, "intermediate_size": 24,
    "vocab_size": 40, "initializer_range": 0.3,
}  # fmt: skip
RUN: dict[str, Any] = {"batch_size": 8, "micro_batch_size": 1, "seq_len": 32, "lr": 1e-2, "warmup_steps": 2,
                       "documents": "cross"}  # fmt: skip


class Precise(CpuDevice):
    """In float64, where what differs between layouts is seen."""

    dtype = np.dtype(np.float64)


DEVICES: dict[type[CpuDevice], float] = {Precise: 1e-10, CpuDevice: 1e-5}


def make_data(config: TrainConfig) -> Dataset:
    """Numbers of which the next often follows from the last; some targets of the validation are left over.

    Documents of 9 tokens, on average, begin among them.
    """
    rng = np.random.default_rng(1)
    steps = rng.choice([1, 1, 1, 7, 11], max(4000, 8 * config.seq_len)).cumsum() % 40
    cut = len(steps) * 3 // 4
    sizes = config.seed, config.batch_size, config.seq_len, 3
    places = [np.unique([0, *rng.integers(0, len(part), len(part) // 9)]) for part in (steps[:cut], steps[cut:])]
    parts = zip((steps[:cut], steps[cut:]), places, strict=True)
    train, val = (Tokens([part.astype(np.uint16)], begins) for part, begins in parts)
    return Dataset("numbers", train, val, NumberTokenizer(40), *sizes, "", packs=config.documents == "pack")


def run_to_its_end(device: Any, steps: int, to_host: Callable[[Any], np.ndarray], context: int) -> dict[str, Any]:
    """What a rank knows after these steps; its device is closed."""
    rows = []
    for step in range(steps):
        device.start_step(step, False)
        result = device.finish_step(step)
        rows.append((result.loss, result.norm))
    loss, next_logits = device.evaluate()["val_loss"], device.sampler()
    text = None
    if next_logits is not None:
        text = [*generate(Uncached(next_logits), context, [[1, 2, 3]], 8, Sampling(top_k=0, seed=1))]
    weights = device.whole_weights()
    weights = {name: to_host(array) for name, array in weights.items()}
    device.close()
    device.mesh.close()
    model = device.step.models[0].config
    return {"rows": np.array(rows), "loss": loss, "text": text, "weights": weights, "model": model}


def train(
    layout: Layout, kind: type[CpuDevice], layers: int, tied: bool, steps: int = STEPS, kv_heads: int = 0,
    local: int = 1, **changes: Any,
) -> list[dict[str, Any]]:  # fmt: skip
    """What each rank of a run knows at its end."""
    shape = {**SHAPE, "num_hidden_layers": layers, "tie_word_embeddings": tied}
    if kv_heads:
        shape |= {"num_key_value_heads": kv_heads}
    asked = TrainConfig.from_preset(
        "tiny", **{**RUN, "steps": steps, **changes},
        model=shape,
        dp=layout.dp, tp=layout.tp, pp=layout.pp, cp=layout.cp,
    )  # fmt: skip

    def run(comm: Any) -> dict[str, Any]:
        mesh, config = Mesh(comm, layout, local), asked.for_world(layout.dp)
        model = config.model_config_for(40)
        whole = Parameters(model.parameter_shapes(), np.float32)
        init_weights(model, whole, 3)
        own = kind(config, model, make_data(config), mesh, lambda what, share: None)
        own.step.gradients.flat[:] = np.nan
        for name, weight in own.step.with_frozen(own.step.weights).items():
            weight[...] = part_of(name, whole[name], model, layout.tp, mesh.tp.rank)
        return run_to_its_end(own, steps, np.copy, context=20)

    return spawn(run, layout.ranks, timeout=200)


@functools.cache
def serial(kind: type[CpuDevice], layers: int, tied: bool, steps: int, **changes: Any) -> dict[str, Any]:
    (alone,) = train(Layout(), kind, layers, tied, steps, **changes)
    assert alone["rows"][0, 0] > alone["rows"][-1, 0] + 0.02, "it learns"
    return alone


def check(layout: Layout, kind: type[CpuDevice], layers: int, tied: bool, steps: int = STEPS, **changes: Any) -> None:
    of_layouts = {"pp_schedule", "zero", "recompute"}
    alone = {name: value for name, value in changes.items() if name not in of_layouts}
    expected, tolerance = serial(kind, layers, tied, steps, **alone), DEVICES[kind]
    ranks, held = train(layout, kind, layers, tied, steps, **changes), set()
    model: LlamaConfig = expected["model"]
    for rank, got in enumerate(ranks):
        np.testing.assert_allclose(got["rows"], expected["rows"], rtol=tolerance, err_msg=f"rank {rank}")
        assert got["loss"] == pytest.approx(expected["loss"], rel=tolerance)
        assert got["text"] in (None, expected["text"])
        for name, value in got["weights"].items():
            wanted = part_of(name, expected["weights"][name], model, layout.tp, layout.coordinates(rank)["tp"])
            np.testing.assert_allclose(value, wanted, rtol=tolerance, atol=tolerance, err_msg=f"{name} of rank {rank}")
            held.add(name)
    assert held == set(expected["weights"]) and ranks[0]["text"] == expected["text"]


def test_validation_batches_that_micro_batches_do_not_divide() -> None:
    """The last message of a batch between two stages is shorter than the others."""
    how: dict[str, Any] = {"micro_batch_size": 4, "seq_len": 160}
    (alone,) = train(Layout(), Precise, 2, True, 1, **how)
    both = train(Layout(pp=2), Precise, 2, True, 1, **how)
    assert [rank["loss"] for rank in both] == pytest.approx([alone["loss"]] * 2, rel=1e-10)


def test_validation_has_more_micro_batches_in_flight_than_a_step() -> None:
    """A step has one; where the V turns, a validation has one for each rank."""
    how: dict[str, Any] = {"batch_size": 1, "seq_len": 32}
    (alone,) = train(Layout(), Precise, 5, True, 1, **how)
    both = train(Layout(pp=2), Precise, 5, True, 1, pp_schedule="zero-bubble-v", **how)
    assert [rank["loss"] for rank in both] == pytest.approx([alone["loss"]] * 2, rel=1e-10)
    assert {str(rank["text"]) for rank in both} == {str(alone["text"])}


def layouts(ranks: int) -> list[Layout]:
    axes = itertools.product(range(1, ranks + 1), repeat=4)
    return [Layout(*sizes) for sizes in axes if math.prod(sizes) == ranks and 8 % sizes[3] == 0 and 8 % sizes[1] == 0
            and 16 % sizes[2] == 0]  # fmt: skip


def named(layout: Layout) -> str:
    return "-".join(f"{axis}{getattr(layout, axis)}" for axis in ("dp", "tp", "pp", "cp") if getattr(layout, axis) > 1)


EVERY = [layout for ranks in (2, 4, 8) for layout in layouts(ranks)] + [Layout(pp=3, tp=2), Layout(pp=6), Layout(pp=3)]
QUICK = [*layouts(2), Layout(dp=2, tp=2), Layout(pp=3)]


@pytest.mark.parametrize(
    "layout",
    [pytest.param(each, marks=() if each in QUICK else pytest.mark.slow, id=named(each)) for each in EVERY],
)
def test_layout(layout: Layout) -> None:
    """With uneven stages, heads tied in every other."""
    check(layout, Precise, max(2, layout.pp + layout.pp // 2), layout.dp % 2 == 0 or layout.pp % 3 == 0)


COPIES = [
    (Layout(tp=2), {"kv_heads": 1}), (Layout(tp=4), {"kv_heads": 2}), (Layout(dp=2, tp=4), {"kv_heads": 2, "zero": 1}),
    (Layout(tp=2), {"kv_heads": 1, "recompute": "block", "zero": 1}),
]  # fmt: skip
SLOW_COPIES = [
    (Layout(pp=2, tp=4), {"kv_heads": 2}), (Layout(cp=2, tp=4), {"kv_heads": 2, "documents": "pack"}),
    (Layout(tp=8), {"kv_heads": 2}), (Layout(tp=8), {"kv_heads": 1}),
    (Layout(pp=2, tp=2), {"kv_heads": 1, "pp_schedule": "zero-bubble-v"}),
    (Layout(dp=2, cp=2, tp=2), {"kv_heads": 1, "zero": 1}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("layout", "changes"),
    [*COPIES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW_COPIES)],
    ids=["-".join([named(layout), *map(str, changes.values())]) for layout, changes in COPIES + SLOW_COPIES],
)
def test_more_ranks_than_kv_heads(layout: Layout, changes: dict[str, Any]) -> None:
    """Neighbours along tp hold copies of a kv head, with the same bits, and count its gradient once."""
    check(layout, Precise, 5 if layout.pp > 1 else 2, layout.dp % 2 == 0, **changes)
    ranks = train(layout, CpuDevice, 5 if layout.pp > 1 else 2, layout.dp % 2 == 0, **changes)
    count = layout.tp // changes["kv_heads"]
    for neighbours in (ranks[at : at + count] for at in range(0, layout.ranks, count)):
        copied = [name for name in neighbours[0]["weights"] if name.endswith(("k_proj.weight", "v_proj.weight"))]
        assert copied or layout.pp > 1
        for name in copied:
            assert len({each["weights"][name].tobytes() for each in neighbours}) == 1


@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        (Layout(dp=2), {}),
        (Layout(tp=2), {"recompute": "norms"}),
        (Layout(pp=2), {"pp_schedule": "zero-bubble-v"}),
        (Layout(cp=2), {"recompute": "block"}),
        (Layout(cp=4), {}),
        pytest.param(Layout(cp=2, tp=2), {}, marks=pytest.mark.slow),
        pytest.param(Layout(pp=2, cp=2), {"pp_schedule": "zero-bubble-v"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_documents(layout: Layout, changes: dict[str, Any]) -> None:
    """Attention stays within documents, which changes the losses."""
    check(layout, Precise, 5 if layout.pp > 1 else 2, False, documents="pack", **changes)
    packed, crossing = (serial(Precise, 2, False, STEPS, documents=name) for name in ("pack", "cross"))
    assert abs(packed["rows"][-1, 0] / crossing["rows"][-1, 0] - 1) > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("layout", [Layout(pp=2, tp=2), Layout(dp=2, tp=4)], ids=named)
def test_float32(layout: Layout) -> None:
    """At a learning rate at which rounding does not grow from step to step."""
    check(layout, CpuDevice, 3, True, 10, lr=2e-3)


@pytest.mark.parametrize(
    ("schedule", "tied"),
    [  # each tied or not
        pytest.param(name, tied, marks=pytest.mark.slow if tied == (number % 2 == 0) else (), id=f"{name}-{how}")
        for number, name in enumerate(SCHEDULES)
        for tied, how in ((False, "untied"), (True, "tied"))
    ],
)
def test_schedule(schedule: str, tied: bool) -> None:
    """Two ranks of 2 chunks, of which the last has fewer layers."""
    check(Layout(pp=2), Precise, 5, tied, pp_schedule=schedule)


@pytest.mark.parametrize(
    ("schedule", "layers", "tied"),
    [("1f1b", 1, False), ("1f1b", 1, True), ("zero-bubble-v", 3, True)],
)
def test_a_stage_may_be_the_head_alone(schedule: str, layers: int, tied: bool) -> None:
    check(Layout(pp=2), Precise, layers, tied, pp_schedule=schedule)


@pytest.mark.parametrize(
    "recompute", ["norms", *(pytest.param(how, marks=pytest.mark.slow) for how in ("none", "block"))]
)
def test_split_backward(recompute: str) -> None:
    check(Layout(pp=2, tp=2), Precise, 4, True, pp_schedule="zero-bubble-v", recompute=recompute)


@pytest.mark.parametrize(
    "layout",
    [Layout(dp=2, tp=2), Layout(pp=2, dp=2), pytest.param(Layout(dp=4, tp=2), marks=pytest.mark.slow)],
    ids=named,
)
def test_zero(layout: Layout) -> None:
    check(layout, Precise, 3, True, zero=1)
