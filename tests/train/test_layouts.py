"""Every layout of a job gives the run of one rank: losses, norms of gradients, weights, validation and text.

In float64 they are near. With ``--deterministic`` they have the same bits, in float32.
"""

from collections.abc import Sequence
from typing import Any

import pytest

from kos.train.device.cpu import CpuDevice
from kos.train.parallel.mesh import Layout
from kos.train.parallel.schedules import SCHEDULES
from tests.train.layouts import AXES, STEPS, Precise, check, check_bits, layouts_with, length, named, serial, train

V, TWO = "zero-bubble-v", Layout(pp=2)
SLIDES, FULL = "sliding_attention", "full_attention"
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {}, "olmo2": {}, "qwen3": {"attention_bias": True, "sliding_window": 7, "layer_types": (SLIDES, FULL)},
    "smollm3": {"no_rope_layers": (1, 0), "sliding_window": 4, "mlp_bias": True, "layer_types": (FULL, SLIDES)},
}  # fmt: skip
"""Settings of models.  A tuple has a value for each layer in turn; it is repeated for more layers."""
TRAINED: dict[str, dict[str, Any]] = {
    "adamw": {}, "muon": {"optimizer": "muon", "muon_lr": 4e-3}, "lora": {"lora": 4, "lr": 3e-2}
}  # fmt: skip
VALUES: dict[str, Sequence[Any]] = {
    **dict.fromkeys(AXES, (1, 2)), "pp_schedule": tuple(SCHEDULES), "zero": (0, 1),
    "recompute": ("none", "norms", "block"), "documents": ("cross", "pack"), "micro_batch_size": (1, 2),
    "tied": (False, True), "pad_token_id": (None, 21), "family": tuple(FAMILIES), "trained": tuple(TRAINED),
}  # fmt: skip
COPIES = {"copies": (1, 2)}
"""How many ranks of tp have a copy of the same kv head."""


def run(layout: Layout, family: str = "llama", trained: str = "adamw", copies: int = 1, **changes: Any) -> Any:
    """A test case; the stages of its pipeline have different numbers of layers."""
    layers = 2 if layout.pp == 1 else 5 if changes.get("pp_schedule") == V else layout.pp + 1
    of_model = {key: (value * 3)[:layers] if isinstance(value, tuple) else value
                for key, value in FAMILIES[family].items()}  # fmt: skip
    how = {"layers": layers, "tied": False, **of_model, **TRAINED[trained], **changes}
    if family != "llama":
        how["model_type"] = family
    if copies > 1:
        how["num_key_value_heads"] = layout.tp // copies
    named_values = [f"{key}={value}" for key, value in changes.items()]
    name = "-".join([named(layout), family, trained, *["copies"] * (copies > 1), *named_values])
    return pytest.param(layout, how, id=name)


def drawn(**values: Sequence[Any]) -> list[Any]:
    """Few cases: any two values that may be combined are together in one of them."""
    every = layouts_with(4, lambda row: row["tp"] % row.get("copies", 1) == 0, **values)
    return [run(layout, **how) for layout, how in every]


NEAR = [
    *drawn(**VALUES, **COPIES), run(Layout(dp=2, tp=2, pp=2), zero=1, tied=True),
    run(Layout(pp=2, cp=2, tp=2), pp_schedule=V, tied=True, recompute="block"),
    run(Layout(tp=4), trained="muon", copies=2, tied=True), run(Layout(dp=4), family="qwen3", zero=1),
    run(Layout(dp=2, cp=2, tp=2), trained="lora", zero=1), run(Layout(tp=8), copies=8), run(Layout(pp=4)),
    run(Layout(pp=3), pp_schedule=V, tied=True),  # a stage has no layer
    run(Layout(cp=3), family="smollm3", seq_len=30, documents="pack"),
    run(Layout(tp=2), trained="lora", lora_targets=("q_proj", "down_proj"), batch_size=8),
    run(Layout(pp=2, tp=2), trained="lora", lora_targets=(r".*[.]1[.].*(q|o|up)_proj",), recompute="block"),
    run(TWO, layers=1, tied=True), run(TWO, layers=3, tied=True, pp_schedule=V),  # the last stage has only the head
]  # fmt: skip


@pytest.mark.parametrize(("layout", "changes"), NEAR)
def test_layout(layout, changes):
    """Ranks of tp with copies of a kv head count its gradient once, and their copies have the same bits."""
    ranks = check(layout, Precise, **changes)
    held = dict[Any, bytes]()
    for rank, got in enumerate(ranks):
        heads = min(layout.tp, got["model"].num_key_value_heads)
        for name, value in got["weights"].items():
            if name.endswith(("k_proj.weight", "v_proj.weight")):
                at = name, layout.coordinates(rank)["tp"] * heads // layout.tp
                assert held.setdefault(at, value.tobytes()) == value.tobytes(), f"{name} of rank {rank}"
    assert held


BITS = [
    *drawn(**VALUES),
    run(Layout(dp=2, pp=3), batch_size=12),  # six micro-batches a rank: subtrees of several sizes
    # The first and the last stage of a pipeline shard the tied matrix differently.
    run(Layout(dp=2, tp=2, pp=2), tied=True, zero=1, vocab_size=400),
    run(Layout(tp=4), trained="muon", family="qwen3"), run(Layout(tp=8)), run(Layout(cp=8)), run(Layout(dp=4), zero=1),
    run(Layout(pp=3), pp_schedule=V, tied=True, zero=0),
    run(Layout(dp=3), batch_size=18, micro_batch_size=2),  # micro-batches that are no power of two
    run(Layout(dp=2, tp=2, cp=2), seq_len=2 * length(2)),  # more chunks than ranks
    *(run(each, tied=True, dtype="fp8", intermediate_size=32, seq_len=64)
      for each in (TWO, Layout(dp=2, cp=2))),
]  # fmt: skip


@pytest.mark.parametrize(("layout", "changes"), BITS)
def test_deterministic(layout, changes):
    check_bits(layout, **{"seq_len": length(layout.cp), **changes})


def test_float32():
    """At a learning rate at which rounding does not grow from step to step. The run learns."""
    losses = check(Layout(pp=2, tp=2), CpuDevice, 3, True, 6, lr=2e-3)[0]["rows"][:, 0]
    assert losses[-1] < losses[0] - 0.02


def test_a_head_in_several_chunks(request):
    """Of rows and of the vocabulary's parts; one rank has a single chunk."""
    serial(Precise, 3, True, STEPS, documents="pack")
    request.getfixturevalue("small_blocks")
    check(Layout(tp=2), Precise, 3, True, documents="pack")


@pytest.mark.parametrize(
    ("layers", "schedule", "how"),
    [(2, "1f1b", {"micro_batch_size": 4, "seq_len": 160}), (5, "zero-bubble-v", {"batch_size": 1, "seq_len": 32})],
)
def test_validation_batches_of_a_pipeline(layers, schedule, how):
    """Which micro-batches do not divide: the last message of a batch is shorter. Or which has more micro-batches in
    flight than a step, which has one: where the V turns, a validation has one for each rank."""
    (alone,) = train(Layout(), Precise, layers, True, 1, **how)
    both = train(Layout(pp=2), Precise, layers, True, 1, pp_schedule=schedule, **how)
    assert [rank["loss"] for rank in both] == pytest.approx([alone["loss"]] * 2, rel=1e-10)
    assert {str(rank["text"]) for rank in both} == {str(alone["text"])}
