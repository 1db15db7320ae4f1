"""Every layout of a job gives the run of one rank: losses, norms of gradients, weights, validation and text.

In float64 they are near. With ``--deterministic`` they have the same bits, in float32.
"""

from typing import Any

import pytest

from kos.train.device.cpu import CpuDevice
from kos.train.parallel.mesh import Layout
from kos.train.parallel.schedules import SCHEDULES
from tests.train.layouts import STEPS, Precise, cases, check, check_bits, layouts, length, named, serial, train


def run(layout: Layout, layers: int = 2, tied: bool = False, slow: bool = False, **changes: Any) -> Any:
    name = "-".join([named(layout), str(layers), *["tied"] * tied, *map(str, changes.values())])
    return pytest.param(layout, layers, tied, changes, id=name, marks=pytest.mark.slow if slow else ())


def stages(layout: Layout) -> int:
    """Layers with which the stages of a pipeline are uneven."""
    return max(2, layout.pp + layout.pp // 2)


TWO, V = Layout(pp=2), "zero-bubble-v"
QUICK = Layout(dp=2), Layout(tp=2), Layout(dp=2, tp=2), Layout(pp=3), Layout(pp=2), Layout(cp=2)
EVERY = [layout for ranks in (2, 4, 8) for layout in layouts(ranks)] + [Layout(pp=3, tp=2), Layout(pp=6), Layout(pp=3)]
MUON: dict[str, Any] = {"optimizer": "muon"}
LORA: dict[str, Any] = {"lora": 4, "lr": 3e-2}
LARGE = Layout(tp=4), Layout(dp=4), Layout(dp=2, tp=2, pp=2)
SOME: list[tuple[Layout, dict[str, Any]]] = [
    (Layout(dp=2), {}), (Layout(tp=2), {}), (TWO, {"pp_schedule": V}), (Layout(cp=2), {}), (Layout(tp=4), {}),
    *((each, {"zero": 1}) for each in (Layout(dp=2), Layout(cp=2), Layout(dp=2, tp=2), Layout(dp=2, pp=2))),
    (Layout(dp=4), {"zero": 1}), (LARGE[-1], {"zero": 1}),
]  # fmt: skip
NEAR = [
    *(run(each, stages(each), each.dp % 2 == 0 or each.pp % 3 == 0, each not in QUICK) for each in EVERY),
    run(Layout(dp=2), documents="pack"), run(Layout(tp=2), documents="pack", recompute="norms"),
    run(TWO, 5, documents="pack", pp_schedule=V), run(Layout(cp=2), documents="pack", recompute="block"),
    run(Layout(cp=4), slow=True, documents="pack"), run(Layout(cp=2, tp=2), slow=True, documents="pack"),
    run(Layout(pp=2, cp=2), 5, slow=True, documents="pack", pp_schedule=V),
    *(run(TWO, 5, tied, tied == (number % 2 == 0), pp_schedule=name)  # the last of 2 chunks a rank has fewer layers
      for number, name in enumerate(SCHEDULES) for tied in (False, True)),
    run(TWO, 1, slow=True, pp_schedule="1f1b"), run(TWO, 1, True, pp_schedule="1f1b"),
    run(TWO, 3, True, pp_schedule=V),  # a head
    *(run(Layout(pp=2, tp=2), 4, True, how != "norms", pp_schedule=V, recompute=how)
      for how in ("norms", "none", "block")),
    run(Layout(dp=2, tp=2), 3, True, zero=1), run(Layout(pp=2, dp=2), 3, True, zero=1),
    run(Layout(dp=4, tp=2), 3, True, slow=True, zero=1),
    *(run(each, 4, each.dp % 2 == 0, each in LARGE, **more, **how)
      for each, how in SOME for more in ({**MUON, "muon_lr": 4e-3}, LORA)),
    run(Layout(tp=2), **LORA, recompute="norms", lora_targets=("q_proj", "down_proj")),
    run(TWO, 5, **LORA, pp_schedule=V, recompute="block"), run(Layout(cp=2), **LORA, recompute="block"),
    run(Layout(dp=2, cp=2, tp=2), slow=True, **LORA, documents="pack", zero=1),
]  # fmt: skip


@pytest.mark.parametrize(("layout", "layers", "tied", "changes"), NEAR)
def test_layout(layout, layers, tied, changes):
    check(layout, Precise, layers, tied, **changes)


SLIDES, FULL = "sliding_attention", "full_attention"
FAMILIES: list[tuple[Layout, dict[str, Any]]] = [  # of which the layout is the one that is quick
    (Layout(tp=2), {"model_type": "qwen3", "attention_bias": True, "sliding_window": 7,
                    "layer_types": (SLIDES, FULL, SLIDES)}),
    (Layout(dp=2), {"model_type": "olmo2"}),
    (Layout(cp=2), {"model_type": "smollm3", "no_rope_layers": (1, 0, 0), "sliding_window": 4, "mlp_bias": True,
                    "layer_types": (FULL, SLIDES, FULL)}),
]  # fmt: skip
FIXED = Layout(dp=2), Layout(tp=2), Layout(cp=2), Layout(dp=2, tp=2), Layout(pp=2, cp=2)
BITS = [
    *(run(each, stages(each), each.dp % 2 == 0 or each.pp % 2 == 0, each not in FIXED, seq_len=length(each.cp),
          batch_size=12 if ranks == 6 else 8)  # six micro-batches a rank: subtrees of several sizes
      for ranks in (2, 4, 6, 8) for each in layouts(ranks)),
    *(run(each, 3, slow=each not in FIXED[:3:2], seq_len=length(each.cp), documents="pack")
      for each in FIXED if each != Layout(dp=2, tp=2)),
    *(run(Layout(pp=2, dp=2, tp=1 + tied), 4, tied, tied or name != V, pp_schedule=name, batch_size=16)
      for name in SCHEDULES for tied in (False, True)),
    run(Layout(dp=2), 3, zero=1), run(Layout(dp=2, pp=2), 3, True, zero=1),
    run(Layout(dp=2, pp=2), 3, True, zero=1, vocab_size=400),  # the ends of a pipeline hold different parts of it
    *(run(each, seq_len=length(each.cp), attention_bias=True, mlp_bias=True)  # of the first part of a product
      for each in (Layout(tp=2), Layout(cp=2, tp=2))),
    *(run(each, 3, slow=each != quick, seq_len=length(each.cp), **how)
      for quick, how in FAMILIES for each in FIXED if each.tp == 1 or how["model_type"] != "olmo2"),
    *(run(each, 4, each.dp % 2 == 0, each in LARGE, seq_len=length(each.cp), **more, **how)
      for each, how in SOME for more in (MUON, LORA)),
    *(run(each, 2, True, dtype="fp8", intermediate_size=32, seq_len=length(2), batch_size=4)
      for each in (Layout(dp=2), TWO, Layout(cp=2), Layout(dp=2, cp=2))),
    run(Layout(dp=4, tp=2), 3, slow=True, zero=1), run(Layout(cp=2, dp=2), 3, slow=True, zero=1, seq_len=length(2)),
    run(Layout(tp=4, dp=2), 3, slow=True, micro_batch_size=4),
    run(Layout(dp=3), 3, slow=True, batch_size=18, micro_batch_size=2),  # micro-batches that are no power of two
    run(Layout(tp=2, pp=2), 3, True, slow=True, recompute="block"),
    run(Layout(tp=2, cp=2), 3, slow=True, seq_len=2 * length(2)),  # more pieces than ranks
]  # fmt: skip


@pytest.mark.parametrize(("layout", "layers", "tied", "changes"), BITS)
def test_deterministic(layout, layers, tied, changes):
    check_bits(layout, layers, tied, **changes)


@pytest.mark.parametrize("layout", [Layout(pp=2, tp=2), Layout(dp=2, tp=4)], ids=named)
def test_float32(layout):
    """At a learning rate at which rounding does not grow from step to step."""
    check(layout, CpuDevice, 3, True, 10, lr=2e-3)


def test_a_head_in_several_chunks(request):
    """Of rows and of the vocabulary's parts; one rank has a single chunk."""
    serial(Precise, 3, True, STEPS, documents="pack")
    request.getfixturevalue("small_blocks")
    check(Layout(tp=2), Precise, 3, True, documents="pack")


COPIES = [
    (Layout(tp=4), {"kv_heads": 2}), (Layout(tp=2), {"kv_heads": 1, "recompute": "block", "zero": 1}),
    (Layout(tp=4), {"kv_heads": 2, **LORA}), (Layout(dp=2, tp=4), {"kv_heads": 2, "zero": 1, **MUON}),
]  # fmt: skip
SLOW_COPIES = [
    (Layout(tp=2), {"kv_heads": 1}), (Layout(dp=2, tp=4), {"kv_heads": 2, "zero": 1}),
    (Layout(pp=2, tp=4), {"kv_heads": 2}), (Layout(cp=2, tp=4), {"kv_heads": 2, "documents": "pack"}),
    (Layout(tp=8), {"kv_heads": 2}), (Layout(tp=8), {"kv_heads": 1}),
    (Layout(pp=2, tp=2), {"kv_heads": 1, "pp_schedule": "zero-bubble-v"}),
    (Layout(dp=2, cp=2, tp=2), {"kv_heads": 1, "zero": 1}),
]  # fmt: skip


@cases(COPIES, SLOW_COPIES)
def test_more_ranks_than_kv_heads(layout, changes):
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
