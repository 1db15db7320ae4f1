"""Layouts on the emulated GPU give the run of one rank, as ``test_layouts.py`` has it of CPUs."""

import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest

from kos.errors import ConfigError
from kos.train.ops import Attend, fixed_order
from kos.train.parallel.mesh import Layout
from kos.train.parallel.schedules import SCHEDULES
from tests.train.host_kernels import engine as host_kernels
from tests.train.layouts import cases, layouts
from tests.train.layouts_on_host import HEAD_ALONE, check, check_bits, check_memory, emulated, train

__all__ = ["emulated"]

V = "zero-bubble-v"
MUON: dict[str, Any] = {"optimizer": "muon", "muon_lr": 0.05}
LORA: dict[str, Any] = {"lora": 4, "lr": 3e-2}
QUICK = [
    (Layout(tp=2), {"tied": True, "recompute": "norms", "graph": False}),
    (Layout(tp=4), {"micro_batch_size": 4}),
    (Layout(cp=2), {"zero": 1}),
    (Layout(pp=2), {"pp_schedule": "1f1b", "tied": True}),
    (Layout(pp=2), {"pp_schedule": V, "recompute": "norms", "micro_batch_size": 8}),
    (Layout(pp=2), {"pp_schedule": V, "tied": True, "layers": HEAD_ALONE}),
    (Layout(pp=2, dp=2), {"pp_schedule": V, "zero": 1, "tied": True}),
    (Layout(tp=2), {"micro_batch_size": 2, "documents": "pack"}),
    (Layout(cp=2), {"documents": "pack"}),
    (Layout(tp=2), {"family": "qwen3", "micro_batch_size": 2}),
    (Layout(cp=2), {"family": "olmo2", "recompute": "block"}),
    (Layout(tp=2), {**MUON, "graph": False}),
    (Layout(dp=2, tp=2), {**MUON, "zero": 1}),
    (Layout(pp=2, dp=2), {**MUON, "pp_schedule": V, "zero": 1, "tied": True}),
    (Layout(tp=2), {**LORA, "micro_batch_size": 2, "recompute": "norms"}),
    (Layout(dp=2), {**LORA, "zero": 1}),
    (Layout(pp=2), {**LORA, "pp_schedule": V}),
    (Layout(cp=2), {**LORA, "recompute": "block", "graph": False}),
]


def drawn(**of: Sequence[Any]) -> list[tuple[Layout, dict[str, Any]]]:
    """Every layout of 2 and of 4 ranks: half of the settings have values, which are drawn from those of ``of``.

    Two stages of a pipeline have each schedule in turn.
    """
    draw, schedules, found = random.Random(0), itertools.cycle(SCHEDULES), []
    for layout in [*layouts(2), *layouts(4)]:
        how = {name: draw.choice(values) for name, values in of.items() if draw.random() < 0.5}
        if layout.dp * layout.cp == 1:
            how.pop("zero", None)
        if layout.pp > 1:
            how["pp_schedule"] = next(schedules) if layout.pp == 2 else "1f1b"
        found.append((layout, how))
    return found


SLOW = [
    *drawn(tied=[True], zero=[1], recompute=["norms", "block"], graph=[False], micro_batch_size=[2],
           documents=["pack"]),
    *((Layout(pp=2), {"pp_schedule": name, "tied": name == V}) for name in SCHEDULES),
    (Layout(pp=2), {"pp_schedule": V, "recompute": "block", "graph": False}),
    (Layout(pp=2), {"pp_schedule": V, "documents": "pack"}),
    (Layout(tp=4), {"family": "qwen3", "kv_heads": 2}),
    (Layout(pp=2), {"pp_schedule": V, "family": "olmo2", "recompute": "norms"}),
    (Layout(dp=2, tp=2), {"kv_heads": 1, "zero": 1, "micro_batch_size": 2}),
    (Layout(cp=2, tp=2), {"family": "qwen3"}),
    (Layout(pp=2), {"pp_schedule": V, "family": "qwen3"}),
    (Layout(pp=2, cp=2), {"family": "olmo2", "zero": 1, "graph": False}),
    (Layout(pp=2, dp=2, tp=2), {"zero": 1}),
]  # fmt: skip


@cases(QUICK, SLOW)
def test_layout(emulated, layout, changes):
    """In a graph and not: no memory is allocated in a capture, no arena outgrows its plan, every work is joined."""
    check(layout, changes)


def test_validation_batches_that_micro_batches_do_not_divide(emulated):
    """The last message of a batch between two stages is shorter than the others."""
    how = {"seq_len": 160, "micro_batch_size": 4, "recompute": "norms"}
    (alone,), both = train(Layout(), 2, **how), train(Layout(pp=2), 2, **how)
    assert [rank["loss"] for rank in both] == pytest.approx([alone["loss"]] * 2, rel=2e-5)


FIXED = [
    (Layout(dp=2), {"tied": True, "zero": 1}),
    (Layout(pp=2), {"pp_schedule": "1f1b", "tied": True}),
    (Layout(pp=2, dp=2), {"pp_schedule": V, "zero": 1, "tied": True}),
    (Layout(cp=2), {"tied": True, "seq_len": 16}),
    (Layout(tp=2), {"tied": True, "deterministic_parts": 4}),
    *((Layout(tp=2), {**LORA, "deterministic_parts": 2, "dtype": dtype, "tied": True})
      for dtype in ("bfloat16", "float32")),
    (Layout(dp=2), {**MUON, "zero": 1, "dtype": "bfloat16", "tied": True}),
    (Layout(pp=2, dp=2), {**MUON, "zero": 1, "master_weights": "none", "tied": True}),
    *((layout, {"dtype": "fp8", "intermediate_size": 32, "seq_len": 32 * layout.cp, "tied": True, **how})
      for layout, how in (
          (Layout(dp=2), {"zero": 1}), (Layout(cp=2), {}), (Layout(pp=2, dp=2), {"pp_schedule": V, "zero": 1}),
          (Layout(pp=2), {"pp_schedule": V, "recompute": "norms", "tied": False, "graph": False}),
          (Layout(pp=2, cp=2), {"zero": 1, "pp_schedule": V}),
      )),
]  # fmt: skip
FIXED_SLOW = [
    (Layout(pp=2), {"pp_schedule": V, "tied": True, "layers": HEAD_ALONE}),
    (Layout(pp=2, dp=2), {"pp_schedule": V, "master_weights": "none", "tied": False, "zero": 1}),
    (Layout(cp=4, dp=2), {"tied": False, "seq_len": 32, "recompute": "block", "graph": False}),
    (Layout(cp=8), {"tied": True, "seq_len": 32, "micro_batch_size": 2, "zero": 1}),
    (Layout(tp=2), {"deterministic_parts": 2, "family": "qwen3", "tied": True, "recompute": "norms", "graph": False}),
    *((Layout(pp=2), {"pp_schedule": name, "tied": name == V, "micro_batch_size": 2}) for name in SCHEDULES),
    *((layout, {"tied": False, **({"seq_len": 8 * layout.cp} if layout.cp > 1 else {}),
                **({"deterministic_parts": 4} if layout.tp > 1 else {}), **how})
      for layout, how in drawn(tied=[True], zero=[1], recompute=["norms", "block"], graph=[False],
                               micro_batch_size=[2], dtype=["bfloat16"])),
]  # fmt: skip


@cases(FIXED, FIXED_SLOW)
def test_deterministic(emulated, layout, changes, monkeypatch):
    """The bits of one rank, although a rank's chunks of the norm and positions in the layout differ."""
    check_bits(layout, changes, monkeypatch)


def test_deterministic_settings_that_are_refused(emulated):
    for layout, changes, expected in (
        (Layout(tp=2), {}, "--deterministic --tp 2: expected --deterministic-parts to be a multiple of 2, got 1"),
        (Layout(tp=2), {"deterministic_parts": 2, "dtype": "bfloat16", "master_weights": "none"},
         "--master-weights: expected float32 with --deterministic --tp 2, got none"),
        (Layout(), {"deterministic_parts": 2, "deterministic": False},
         "--deterministic-parts: expected --deterministic, got 2"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=expected):
            train(layout, 1, **{"deterministic": True, **changes})


def test_deterministic_products_have_the_shapes_of_one_rank(emulated, monkeypatch, before_call):
    """On a GPU the bits of a product depend on its shape."""
    monkeypatch.setattr(fixed_order, "LEAST_CHUNK_ON_GPUS", 2)
    found = set()

    def note(name, arguments, operations):
        if name.startswith(("linear", "attention")) or name == "normalize_backward":
            attend = arguments[0] if isinstance(arguments[0], Attend) else None
            arrays = (attend.qkv, attend.out, attend.kv, *arguments[1:]) if attend else arguments
            sliced = (attend.queries, attend.keys) if attend else ()
            found.add((name, *map(str, sliced), *(x.shape for x in arrays if hasattr(x, "pointer"))))

    def shapes(layout):
        found.clear()
        train(layout, 2, deterministic=True, seq_len=16)
        return set(found)

    before_call(host_kernels, "_numpy", note)
    alone = shapes(Layout())
    assert len(alone) > 20 and shapes(Layout(cp=2, pp=2)) == alone


PLANNED = [
    (Layout(dp=2), {"zero": 1}), (Layout(cp=2), {}),
    (Layout(dp=4), {"compress": "int8", "hosts": (2, 2), "zero": 1}),
    (Layout(pp=2), {"pp_schedule": V, "tied": True}),
]  # fmt: skip
PLANNED_SLOW = [
    (Layout(dp=2), {"deterministic": True}), (Layout(), {}), (Layout(tp=2), {}),
    *((layout, {"deterministic": True, "deterministic_parts": 4}) for layout in (Layout(tp=2), Layout())),
    (Layout(cp=2), {"compress": "int8"}),
    (Layout(pp=2), {"tied": True, "deterministic": True}), (Layout(cp=2), {"deterministic": True}),
    (Layout(pp=2), {"pp_schedule": V, "recompute": "norms"}),
    (Layout(pp=2, tp=2), {"pp_schedule": V, "recompute": "block"}),
]  # fmt: skip


@cases(PLANNED, PLANNED_SLOW)
def test_allocated_memory_is_within_the_plan(emulated, layout, changes, monkeypatch):
    hosts = changes.get("hosts", ())
    check_memory(layout, {key: value for key, value in changes.items() if key != "hosts"}, monkeypatch, hosts)
