"""Layouts on the emulated GPU give the run of one rank, as ``test_layouts.py`` has it of CPUs."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from kos.errors import ConfigError
from kos.train.ops import Attend, fixed_order
from kos.train.parallel.mesh import Layout
from kos.train.parallel.schedules import SCHEDULES
from tests.train.host_kernels import engine as host_kernels
from tests.train.layouts import AXES, cases, layouts_with
from tests.train.layouts_on_host import HEAD_ALONE, check, check_bits, check_memory, emulated, train

__all__ = ["emulated"]

V = "zero-bubble-v"
TRAINED: dict[str, dict[str, Any]] = {
    "adamw": {}, "muon": {"optimizer": "muon", "muon_lr": 0.05}, "lora": {"lora": 4, "lr": 2e-3}
}  # fmt: skip
VALUES: dict[str, Sequence[Any]] = {
    **dict.fromkeys(AXES, (1, 2)), "zero": (0, 1), "pp_schedule": tuple(SCHEDULES), "layers": (2, HEAD_ALONE, 5),
    "recompute": ("none", "norms", "block"), "graph": (True, False), "micro_batch_size": (1, 2), "tied": (False, True),
    "documents": ("cross", "pack"), "family": ("llama", "qwen3", "olmo2"), "trained": tuple(TRAINED),
}  # fmt: skip
WITHOUT = "bfloat16 without master weights"
KV_HEADS, DTYPES = {"kv_heads": (8, 1)}, {"dtype": ("float32", "bfloat16", WITHOUT)}


def possible(row: dict[str, Any]) -> bool:
    return (
        (row["pp"] > 1) == (row["layers"] > 2)
        and (row["tp"] == 1 or row.get("dtype") != WITHOUT)
        and row["tp"] % (8 // row.get("kv_heads", 8)) == 0
    )


def drawn(**values: Sequence[Any]) -> list[tuple[Layout, dict[str, Any]]]:
    """Cases in which any two values are together, of those that are allowed together."""
    found = []
    for layout, how in layouts_with(4, possible, **values):
        how |= TRAINED[how.pop("trained")]
        if how.get("dtype") == WITHOUT:
            how |= {"dtype": "bfloat16", "master_weights": "none"}
        found.append((layout, how))
    return found


NEAR = [
    *drawn(**VALUES, **KV_HEADS), (Layout(tp=4), {"micro_batch_size": 4}), (Layout(tp=4), {"kv_heads": 2}),
    (Layout(cp=4), {"documents": "pack"}), (Layout(pp=4), {}), (Layout(pp=2, dp=2, tp=2), {"zero": 1}),
]  # fmt: skip


@cases(NEAR)
def test_layout(emulated, layout, changes):
    """In a graph and not: no memory is allocated in a capture, no arena outgrows its plan, every work is joined."""
    check(layout, changes)


def test_validation_batches_that_micro_batches_do_not_divide(emulated):
    """The last message of a batch between two stages is shorter than the others."""
    how = {"seq_len": 160, "micro_batch_size": 4, "recompute": "norms"}
    (alone,), both = train(Layout(), 2, **how), train(Layout(pp=2), 2, **how)
    assert [rank["loss"] for rank in both] == pytest.approx([alone["loss"]] * 2, rel=2e-5)


FIXED = [
    *((layout, {"seq_len": 8 * layout.cp, **({"deterministic_parts": 4} if layout.tp > 1 else {}), **how})
      for layout, how in drawn(**VALUES, **DTYPES)),
    *((layout, {"dtype": "fp8", "intermediate_size": 32, "seq_len": 32 * layout.cp, "tied": True, **how})
      for layout, how in (
          (Layout(dp=2), {"zero": 1}), (Layout(cp=2), {}),
          (Layout(pp=2), {"pp_schedule": V, "recompute": "norms", "tied": False, "graph": False}),
          (Layout(pp=2, cp=2), {"zero": 1, "pp_schedule": V}),
      )),
    (Layout(tp=2, dp=2), {"deterministic_parts": 2, "dtype": "bfloat16", "zero": 1, "tied": True}),
    (Layout(cp=4, dp=2), {"seq_len": 32, "recompute": "block"}),
    (Layout(cp=8), {"tied": True, "seq_len": 32, "micro_batch_size": 2, "zero": 1}),
]  # fmt: skip


@cases(FIXED)
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


def test_deterministic_is_the_same_up_to_rounding(emulated, monkeypatch):
    monkeypatch.setattr(fixed_order, "LEAST_CHUNK_ON_GPUS", 2)
    (near,), (fixed,) = (
        train(Layout(), 2, seq_len=16, **how) for how in ({}, {"deterministic": True, "deterministic_parts": 4})
    )
    np.testing.assert_allclose(fixed["rows"], near["rows"], rtol=2e-5)


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
    (Layout(dp=2), {"zero": 1}), (Layout(), {}), (Layout(tp=2), {}), (Layout(cp=2), {"compress": "int8"}),
    (Layout(dp=4), {"compress": "int8", "hosts": (2, 2), "zero": 1}),
    *((layout, {"deterministic": True, "deterministic_parts": 4}) for layout in (Layout(tp=2), Layout())),
    (Layout(pp=2), {"tied": True, "deterministic": True}), (Layout(cp=2), {"deterministic": True}),
    (Layout(pp=2), {"pp_schedule": V, "recompute": "norms", "tied": True}),
    (Layout(pp=2, tp=2), {"pp_schedule": V, "recompute": "block"}),
]  # fmt: skip


@cases(PLANNED)
def test_allocated_memory_is_within_the_plan(emulated, layout, changes, monkeypatch):
    hosts = changes.get("hosts", ())
    check_memory(layout, {key: value for key, value in changes.items() if key != "hosts"}, monkeypatch, hosts)
