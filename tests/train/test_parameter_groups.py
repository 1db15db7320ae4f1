"""Parameter groups: tensors that are frozen, and groups that cannot be trained.

A group comes from an entry of ``OPTIMIZERS``, whose ``groups`` every part of the trainer asks.
"""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from kos.errors import CheckpointError, ConfigError
from kos.train import checkpoint
from kos.train.config import OPTIMIZERS
from kos.train.config.options import TrainConfig
from kos.train.device.costs import cpu_rates
from kos.train.device.dry_run import DryOps, plan_memory
from kos.train.model.llama import LlamaConfig
from kos.train.ops import numpy as numpy_ops
from kos.train.optim import Group
from kos.train.parallel import schedules
from kos.train.parallel.mesh import Layout, Mesh
from kos.train.tools.plan import make_job, predict
from tests.train import layouts, layouts_on_host, runs
from tests.train.layouts import Precise, compare
from tests.train.layouts_on_host import HEAD_ALONE, emulated
from tests.train.models import part_of
from tests.train.sharded import tensors_of_run

__all__ = ["emulated"]

Kind = Callable[[str], dict[str, Any]]
"""The fields of the group of a tensor; those with equal ones are one group."""


def by_tensor(kind: Kind) -> Callable[[TrainConfig, LlamaConfig, Any], list[Group]]:
    def groups(config: TrainConfig, model: LlamaConfig, parts: Any) -> list[Group]:
        found: dict[str, tuple[dict[str, Any], list[str]]] = {}
        for name in model.parameter_shapes():
            found.setdefault(repr(kind(name)), (kind(name), []))
        for name in model.parameter_shapes(*parts):
            found[repr(kind(name))][1].append(name)
        return [Group(names, **fields) for fields, names in found.values()]

    return groups


@pytest.fixture
def use(monkeypatch):
    def use_groups(kind):
        monkeypatch.setitem(OPTIMIZERS, "adamw", OPTIMIZERS["adamw"]._replace(groups=by_tensor(kind)))

    return use_groups


def matrices_of_attention(name: str) -> dict[str, Any]:
    """As when adapters train the MLPs: the tables, one norm of each layer and attention are frozen."""
    frozen = "self_attn" in name or "embed" in name or "lm_head" in name or "input_layernorm" in name
    return {"frozen": True} if frozen else {"decay": 0.1 * ("norm" not in name)}


def all_but_the_mlp_of_one_layer(name: str) -> dict[str, Any]:
    """Most stages of a pipeline have nothing to train."""
    return {} if name.startswith("model.layers.0.mlp") else {"frozen": True}


def biases_alone(name: str) -> dict[str, Any]:
    return {} if name.endswith("bias") else {"frozen": True}


def named(x: Any) -> str:
    """The same in every process: a function's text has its address."""
    return str(getattr(x, "__name__", x))


V_BLOCK = {"pp_schedule": "zero-bubble-v", "recompute": "block"}
FREEZING = [
    (Layout(pp=2), V_BLOCK, matrices_of_attention), (Layout(cp=2), {}, matrices_of_attention),
    (Layout(tp=2), {"deterministic": True, "recompute": "block"}, matrices_of_attention),
    (Layout(pp=2), V_BLOCK, all_but_the_mlp_of_one_layer),
    (Layout(pp=3), {}, all_but_the_mlp_of_one_layer), (Layout(dp=2), {"zero": 1}, all_but_the_mlp_of_one_layer),
    (Layout(dp=2, tp=2), {"zero": 1}, matrices_of_attention),
]  # fmt: skip


@pytest.mark.parametrize(
    ("layout", "changes", "kind"),
    [pytest.param(*case, id="-".join(map(named, case)))
     for case in FREEZING],
)  # fmt: skip
def test_frozen_tensors(layout, changes, kind, use):
    """They stay as they are. The others are trained as where the frozen ones have a learning rate of 0."""
    check_frozen(layout, changes, kind, use)


@pytest.mark.parametrize(
    ("layout", "changes"), [(Layout(tp=2), {}), (Layout(pp=2), {"pp_schedule": "zero-bubble-v"})], ids=str
)
def test_biases_of_frozen_matrices(layout, changes, use):
    check_frozen(layout, {**changes, "attention_bias": True}, biases_alone, use)


@functools.cache
def of_one_rank(kind: Kind, freezes: bool, layers: int, **how: Any) -> dict[str, Any]:
    """What ``kind`` freezes is frozen, or has a learning rate of 0."""

    def fields(name: str) -> dict[str, Any]:
        if "frozen" in kind(name):
            return {"frozen": True} if freezes else {"lr_scale": 0.0}
        return {"decay": kind(name).get("decay", 0.0)}

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(OPTIMIZERS, "adamw", OPTIMIZERS["adamw"]._replace(groups=by_tensor(fields)))
        (alone,) = layouts.train(Layout(), Precise, layers, True, **how)
    return alone


def check_frozen(layout: Layout, changes: dict[str, Any], kind: Kind, use: Callable[[Kind], None]) -> None:
    layers = layout.pp + 1
    of_one_rank_too = "deterministic", "attention_bias"
    alike = {name: value for name, value in changes.items() if name in of_one_rank_too}
    how: dict[str, Any] = {"lr": 3e-3, "grad_clip": 0.0, **alike}
    expected, alone = (of_one_rank(kind, freezes, layers, **how) for freezes in (False, True))
    use(kind)
    for rank, got in enumerate(layouts.train(layout, Precise, layers, True, **{**how, **changes})):
        np.testing.assert_allclose(got["rows"], alone["rows"], rtol=1e-10)
        np.testing.assert_allclose(got["rows"][:, 0], expected["rows"][:, 0], rtol=1e-10)
        assert got["loss"] == pytest.approx(expected["loss"], rel=1e-10)
        for name, value in got["weights"].items():
            place = layout.tp, layout.coordinates(rank)["tp"]
            wanted = part_of(name, expected["weights"][name], expected["model"], *place)
            np.testing.assert_allclose(value, wanted, rtol=1e-9, atol=1e-9, err_msg=name)
    assert (alone["rows"][:, 1] < expected["rows"][:, 1]).all(), "the norm is that of trained tensors alone"


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble-v"])
def test_no_product_for_the_gradient_of_a_frozen_matrix(schedule, use, before_call):
    """Of each of 3 layers gate_up and down are trained; a pipeline's W computes these alone."""
    shapes = list[tuple[int, ...]]()
    before_call(numpy_ops, "linear_weight_gradient", lambda d_out, x, d_weight, *_: shapes.append(d_weight.shape))
    use(matrices_of_attention)
    layouts.train(Layout(pp=2), Precise, 3, True, 1, pp_schedule=schedule)
    assert sorted(shapes) == sorted(3 * 4 * [(48, 16), (16, 24)])  # of 4 micro-batches


def steps(text: Path, out: Path, ranks: int = 1, **changes: Any) -> np.ndarray:
    how: dict[str, Any] = {"steps": 6, "eval_batches": 0, "sample_tokens": 0, "save_every": 3, "batch_size": 8}
    rows = runs._train(text, out, ranks, **{**how, **changes})
    return np.array([[row["loss"], row["grad_norm"]] for row in rows])


RESHARDS = [
    (matrices_of_attention, {"tp": 2, "zero": 1}, {"pp": 2}),
    (matrices_of_attention, {"zero": 1, "compress": "int8"}, {"zero": 0, "compress": "int8"}),
    (matrices_of_attention, {"tp": 2, "dp": 2, "zero": 1}, {"cp": 2, "zero": 1}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "before", "after"), RESHARDS, ids=named)
def test_a_checkpoint_resumes_in_another_layout(kind, before, after, text, tmp_path, use):
    use(kind)
    whole = steps(text, tmp_path / "whole", 2, **after)
    first = {"ranks": before.get("dp", 1) * before.get("tp", 1) if "dp" in before else 2, **before}
    steps(text, tmp_path / "first", **first, steps=3)
    resumed = steps(text, tmp_path / "second", 2, resume=str(tmp_path / "first"), **after)
    np.testing.assert_allclose(resumed, whole[-len(resumed) :], rtol=2e-2 if "compress" in after else 1e-4)
    found = checkpoint.find(tmp_path / "second")
    assert found.step == 6
    trained, frozen = (each["tensors"] for each in found.config["groups"])
    files = json.loads((found.path / "manifest.json").read_text())["files"]
    state = {name for file in files if file.startswith("optimizer") for name in load_file(found.path / file)}
    assert {name.partition(".")[2] for name in state} == {*trained}
    assert not any(each.endswith(name) for each in state for name in frozen)
    start, end = (tensors_of_run(tmp_path / run) for run in ("first", "second"))
    assert frozen
    for name in frozen:
        (key,) = (key for key in end if key.endswith(name))
        assert end[key] == start[key]


def test_a_checkpoint_with_other_frozen_tensors_is_refused(text, tmp_path, use):
    use(matrices_of_attention)
    steps(text, tmp_path / "first", steps=3)
    use(lambda name: {})
    trained = "expected a run in which .*weight is trained, got one in which it is frozen"
    with pytest.raises(CheckpointError, match=trained):
        steps(text, tmp_path / "second", resume=str(tmp_path / "first"))
    use(all_but_the_mlp_of_one_layer)
    with pytest.raises(CheckpointError, match="is frozen, got one in which it is trained"):
        steps(text, tmp_path / "third", resume=str(tmp_path / "first"))


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize(
    ("layout", "changes", "kind"),
    [
        (Layout(), {"dtype": "bfloat16"}, matrices_of_attention),
        (Layout(pp=2), {"pp_schedule": "zero-bubble-v", "layers": HEAD_ALONE}, matrices_of_attention),
        (Layout(dp=2, tp=2), {"zero": 1, "graph": False}, matrices_of_attention),
        (Layout(pp=2), {"layers": 3}, all_but_the_mlp_of_one_layer),
    ],
    ids=named,
)  # fmt: skip
def test_groups_on_an_emulated_gpu(layout, changes, kind, use):
    """As the CPU of one rank has it: the norm of all that is trained, the weights, and what is frozen as it was."""
    layers = changes.pop("layers", 5 if layout.pp > 1 else 2)
    alike = {name: value for name, value in changes.items() if name == "dtype"}
    use(kind)
    (alone,) = layouts_on_host.train(Layout(), layers, tied=False, **alike)
    compare(layouts_on_host.train(layout, layers, tied=False, **changes), alone, layout, 3e-5, 1e-4)


def plan_of(config: TrainConfig, layout: Layout) -> Any:
    model = config.model_config_for(40)
    schedule = schedules.build(config.pp_schedule, layout.pp, 4)
    return plan_memory(config, model, DryOps(), Mesh.dry(layout), schedule)


def test_plans_count_groups(use):
    """Frozen weights have no gradient and no moments, and nothing is sent for them."""
    layout = Layout(dp=2, tp=2)
    axes = {"dp": 2, "tp": 2}
    config = TrainConfig.from_preset("tiny", **layouts.RUN, model={**layouts.SHAPE, "num_hidden_layers": 2},
                                     device="cpu", **axes).for_world(2)  # fmt: skip
    rates, model = cpu_rates(4), config.model_config_for(40)
    plain, job = plan_of(config, layout), make_job(config, model, layout, rates)
    sent = predict(job, plain).sent
    sizes = {name: 4 * int(np.prod(shape)) for name, shape in model.parameter_shapes(model.local(0, 2)).items()}

    use(matrices_of_attention)
    frozen = sum(size for name, size in sizes.items() if "frozen" in matrices_of_attention(name))
    some = plan_of(config, layout)
    uses = {name.partition(",")[0]: size for name, size in some.uses.items()}
    before = {name.partition(",")[0]: size for name, size in plain.uses.items()}
    assert uses["frozen weights"] == frozen
    assert before["weights"] - uses["weights"] == before["gradients"] - uses["gradients"] == frozen
    assert before["both Adam moments"] - uses["both Adam moments"] == 2 * frozen
    got = predict(make_job(config, model, layout, rates), some).sent
    assert sent["gradients"] - got["gradients"] == frozen  # 2 (n - 1) / n of it, n = 2


BAD: dict[str, Kind] = {
    "expected each tensor in one, and a tensor to train": lambda name: {"frozen": True},
    "expected .*q_proj.*, which are one matrix, all frozen or all trained": lambda name: {"frozen": "q_proj" in name},
}


@pytest.mark.parametrize("said", BAD)
def test_groups_that_cannot_be_are_refused(said, text, tmp_path, use):
    use(BAD[said])
    with pytest.raises(ConfigError, match=f"parameter groups: {said}"):
        steps(text, tmp_path)
