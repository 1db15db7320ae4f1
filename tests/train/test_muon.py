"""Muon: against torch's and a plain one in float64, in every layout, in checkpoints and plans."""

import math
from typing import Any

import numpy as np
import pytest

from kos.errors import CheckpointError
from kos.memory.arena import Arena
from kos.memory.sharded import Sharded
from kos.testing import spawn
from kos.train import checkpoint, optim
from kos.train.config.flags import parse
from kos.train.device.dry_run import DryRun
from kos.train.model import huggingface
from kos.train.model.families import GPT2Config
from kos.train.model.llama import LlamaConfig
from kos.train.ops import NEWTON_SCHULZ
from kos.train.ops import numpy as numpy_ops
from kos.train.ops.parameters import OwnedSlices, Parameters
from kos.train.optim import Group, Optimizer, decay_matrices
from kos.train.optim.adamw import AdamW
from kos.train.optim.muon import Muon
from kos.train.parallel.mesh import Layout
from kos.train.tools.plan import make_job
from kos.train.trainer import Trainer
from tests.train.dry_runs import SHAPE as PLANNED
from tests.train.dry_runs import SLOW as SLOW_RATES
from tests.train.models import small
from tests.train.of_transformers import torch
from tests.train.refusal import refused
from tests.train.runs import _config, _train
from tests.train.sharded import tensors_of_run
from tests.train.updates import step_of_host

MUON: dict[str, Any] = {"optimizer": "muon"}
SHAPES = {
    "head": (50, 12), "norm": (12,), "wide": (12, 40), "q": (12, 12), "tall": (31, 12), "stacked.c_attn": (36, 12),
}  # fmt: skip
HIDDEN = {name: Sharded(SHAPES[name]) for name in ("wide", "q", "tall", "stacked.c_attn")}


def exact(x: np.ndarray) -> np.ndarray:
    """What the steps make of a matrix, by its singular values: an odd polynomial of a matrix is one of those."""
    u, values, v = np.linalg.svd(x.astype(np.float64), full_matrices=False)
    values /= np.linalg.norm(values)
    for a, b, c in NEWTON_SCHULZ:
        values = a * values + b * values**3 + c * values**5
    return (u * values) @ v


def groups(rule: Muon, decay: float = 0.1, lr_scale: float = 1.0) -> list[Group]:
    return [Group(["head"], decay), Group(["norm"]), Group(rule.placements, decay, lr_scale, rule)]


def test_a_matrix_of_zeros_stays_zero():
    zero = np.zeros((1, 7, 31))
    numpy_ops.orthogonalize(zero, Arena())
    assert not zero.any()


def plain(w: np.ndarray, g: np.ndarray, m: np.ndarray, lr: float, decay: float, mu: float) -> None:
    """A step in float64, as the paper has it, with torch's mean of momentum; w and m are changed."""
    m[...] = mu * m + (1 - mu) * g
    w[...] = (1 - lr * decay) * w - lr * 0.2 * math.sqrt(max(w.shape)) * exact((1 - mu) * g + mu * m)


def test_an_update_is_a_plain_one(rng):
    """Each of the stacked matrices by itself; the others are AdamW's, to the last bit."""
    rule = Muon(HIDDEN, (".c_attn",), 0.9)
    weights = Parameters(SHAPES, np.float64)
    weights.flat[:] = rng.normal(size=weights.flat.size)
    other = weights.like()
    other.flat[:] = weights.flat
    ours, adamw = (
        Optimizer(AdamW(), held, groups=each)
        for held, each in ((weights, groups(rule, 0.3, 0.5)), (other, decay_matrices(SHAPES, 0.3)))
    )
    rows = {"stacked.c_attn": (slice(0, 12), slice(12, 24), slice(24, 36))}
    expected = {name: weights[name].copy() for name in HIDDEN}
    momentum = {name: np.zeros(SHAPES[name]) for name in HIDDEN}
    assert {name: kept.flat.size for name, kept in ours.state.items()} == {
        "exp_avg": 612, "exp_avg_sq": 612, "momentum": weights.flat.size - 612
    }  # fmt: skip
    for step in range(4):
        gradients, again = weights.like(), weights.like()
        gradients.flat[:] = again.flat[:] = rng.normal(size=weights.flat.size)
        lr = 0.02 / (step + 1)
        for name in HIDDEN:
            for part in rows.get(name, (slice(None),)):
                g = 0.25 * gradients[name][part]
                plain(expected[name][part], g, momentum[name][part], 0.5 * lr, 0.3, 0.9)
        step_of_host(ours, gradients, lr, 0.25)
        step_of_host(adamw, again, lr, 0.25)
    for name in HIDDEN:
        np.testing.assert_allclose(weights[name], expected[name], rtol=1e-10, atol=1e-12, err_msg=name)
    for name in ("head", "norm"):
        assert weights[name].tobytes() == other[name].tobytes()
    assert abs(weights["wide"] - other["wide"]).max() > 1e-3


def torchs(weights: Parameters, gradients: list[Parameters]) -> list[np.ndarray]:
    """The weights after a step for each of the gradients.  Products are in float64, where torch has bfloat16."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "bfloat16", lambda self: self.clone())
        theirs = {name: torch.tensor(weights[name].copy(), requires_grad=True) for name in weights}
        reference = torch.optim.Muon(
            theirs.values(), lr=0.02, weight_decay=0.2, momentum=0.93, adjust_lr_fn="match_rms_adamw"
        )
        for each in gradients:
            for name, tensor in theirs.items():
                tensor.grad = torch.tensor(each[name].copy())
            reference.step()
        return [tensor.detach().numpy().ravel() for tensor in theirs.values()]


def test_muon_is_torchs(golden):
    rng = np.random.default_rng(4)
    hidden = {name: HIDDEN[name] for name in ("wide", "q", "tall")}
    weights = Parameters({name: SHAPES[name] for name in hidden}, np.float64)
    weights.flat[:] = rng.normal(size=weights.flat.size)
    start = weights.flat.copy()
    gradients = [weights.like() for _ in range(5)]
    for each in gradients:
        each.flat[:] = rng.normal(size=weights.flat.size)
    expected = np.concatenate(golden("muon", lambda: torchs(weights, gradients)))
    ours = Optimizer(AdamW(), weights, groups=[Group(hidden, 0.2, 1.0, Muon(hidden, (), 0.93))])
    for each in gradients:
        step_of_host(ours, each, 0.02)
    assert np.linalg.norm(weights.flat - expected) < 1e-12 * np.linalg.norm(weights.flat - start)


def test_which_matrices_are_muons():
    """All of layers, by LLaMA and GPT-2; no embedding, head, norm or bias. GPT-2's q, k and v are three."""
    config = parse(["--optimizer", "muon", "--lr", "1e-3", "--muon-lr", "4e-3", "--weight-decay", "0.2"])
    for model, left in (
        (small(), {"model.embed_tokens.weight", "lm_head.weight"}),
        (small(tie_word_embeddings=True), {"model.embed_tokens.weight"}),
        (gpt2(), {"transformer.wte.weight", "transformer.wpe.weight"}),
    ):
        shapes = model.parameter_shapes()
        hidden, others, vectors = config.trained_groups(model)
        assert set(others.names) == left and (others.decay, others.lr_scale, others.rule) == (0.2, 1.0, None)
        assert all(len(shapes[name]) == 1 for name in vectors.names) and vectors.decay == 0
        assert {*hidden.names, *others.names, *vectors.names} == set(shapes)
        assert (hidden.decay, hidden.lr_scale) == (0.2, pytest.approx(4))
    assert hidden.rule is not None
    held = OwnedSlices(Parameters(shapes), [slice(0, sum(map(math.prod, shapes.values())))])
    found = [each for each in hidden.rule.matrices(held) if "c_attn" in each.name]
    assert len(found) == 3 * model.num_hidden_layers and {each.shape for each in found} == {(24, 24)}
    assert parse([]).trained_groups(small()) == optim.decay_matrices(small().parameter_shapes(), 0.1)


def gpt2() -> LlamaConfig:
    shape = dict(small(num_attention_heads=4, num_key_value_heads=4, tie_word_embeddings=True))
    return GPT2Config(**shape)


# --- runs --------------------------------------------------------------------------------------------

HOW: dict[str, Any] = {
    **MUON, "deterministic": True, "batch_size": 16, "schedule": "constant", "lr": 0.01, "save_every": 2,
    "eval_batches": 0, "sample_tokens": 0, "keep": 9,
    "model": {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
        "intermediate_size": 48, "tie_word_embeddings": False,
    },
}  # fmt: skip


def test_its_state_is_saved_by_name_and_resumed_in_other_layouts(text, tmp_path, small_buckets):
    """Bit for bit: on one rank, from two of ZeRO-1 to four of tp and dp, and on to a pipeline."""
    whole = _train(text, tmp_path / "whole", steps=6, **HOW)
    _train(text, tmp_path / "on", 2, steps=2, zero=1, **HOW)
    path = checkpoint.find(tmp_path / "on").path
    shapes = huggingface.read_config(path).parameter_shapes()
    hidden = {name for name in shapes if ".layers." in name and "norm" not in name}
    others = set(shapes) - hidden
    assert {name for name in tensors_of_run(tmp_path / "on") if name not in shapes} == {
        *(f"momentum.{name}" for name in hidden), *(f"exp_avg.{name}" for name in others),
        *(f"exp_avg_sq.{name}" for name in others),
    }  # fmt: skip
    files = checkpoint.state_files(path, shapes, {"momentum": hidden, "exp_avg": others, "exp_avg_sq": others})
    assert all(abs(files.read(f"momentum.{name}")).max() > 0 for name in hidden)
    _train(text, tmp_path / "on", 4, steps=4, resume="auto", tp=2, zero=1, **HOW)
    rows = _train(text, tmp_path / "on", 2, steps=6, resume="auto", pp=2, **HOW)
    for key in ("loss", "grad_norm"):
        assert [row[key] for row in rows] == [row[key] for row in whole]
    assert whole[-1]["loss"] < whole[0]["loss"]
    assert tensors_of_run(tmp_path / "on") == tensors_of_run(tmp_path / "whole")


@pytest.mark.parametrize(("ranks", "before", "now"), [(1, "adamw", "muon"), (4, "muon", "adamw")])
def test_another_optimizers_state_is_refused(text, tmp_path, ranks, before, now):
    _train(text, tmp_path, ranks, steps=2, **{**HOW, "optimizer": before})
    errors = []

    def resume(comm):
        with refused(CheckpointError, f"--optimizer {now}, got that of {before}"):
            try:
                Trainer(_config(text, tmp_path, steps=4, resume="auto", **{**HOW, "optimizer": now}), comm)
            except CheckpointError as error:
                errors.append(error)
                raise

    spawn(resume, ranks, timeout=100)
    assert len(errors) == ranks and len({*map(str, errors)}) == 1
    assert {error.settings for error in errors} == {("optimizer",)}  # an --init-from of the run's file is fine
    weights = {**HOW, "optimizer": now, "init_from": str(checkpoint.find(tmp_path).path)}
    assert len(_train(text, tmp_path / "new", steps=1, **weights)) == 1


def test_plans_count_its_state_and_its_work(text, tmp_path, small_buckets):
    """What a rank of ZeRO-1 will hold is what it does hold; a step's time has the products."""

    def look(comm):
        device = Trainer(_config(text, tmp_path, **{**HOW, "zero": 1, "deterministic": False}), comm).device
        uses, held = device.plan.uses, sum(kept.flat.nbytes for kept in device.step.optimizer.state.values())
        assert uses["both Adam moments and Muon's momentum, float32, 1/2 (ZeRO-1)"] == held
        assert uses["weights, float32"] == uses["gradients, float32"] == device.step.weights.flat.nbytes

    spawn(look, 2, timeout=100)
    spent = {}
    for optimizer in ("adamw", "muon"):
        config = parse([*PLANNED, "--optimizer", optimizer])
        job = make_job(config, config.model_config_for(256), Layout(), SLOW_RATES)
        spent[optimizer] = DryRun.timed(job, 0).clock.spent["seconds"]
    D, F, W = 32, 48, 32
    flops = sum(
        5 * 2 * (2 * least * least * most + least**3)
        for rows, columns, count in ((W, D, 2), (16, D, 2), (F, D, 3))
        for least, most in [sorted((rows, columns))] * (4 * count)
    )
    assert spent["muon"] - spent["adamw"] > 0.9 * flops / SLOW_RATES.linear
