"""Layouts on the emulated GPU give the run of one rank, as ``test_layouts.py`` has it of CPUs."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from kos.errors import ConfigError
from kos.train.ops import Attend
from kos.train.parallel import fixed_order
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
NO_MASTER_WEIGHTS = "bfloat16 without master weights"
VALUES: dict[str, Sequence[Any]] = {
    "deterministic": (False, True), **dict.fromkeys(AXES, (1, 2)), "zero": (0, 1), "pp_schedule": tuple(SCHEDULES),
    "layers": (2, HEAD_ALONE, 5), "recompute": ("none", "norms", "block"), "graph": (True, False),
    "micro_batch_size": (1, 2), "tied": (False, True), "pad_token_id": (None, 21), "documents": ("cross", "pack"),
    "family": ("llama", "qwen3", "olmo2"), "trained": tuple(TRAINED),
    "dtype": ("float32", "bfloat16", NO_MASTER_WEIGHTS),
}  # fmt: skip


def possible(row: dict[str, Any]) -> bool:
    """Whether the settings of a row may be combined.  Runs in bfloat16 are compared with ``deterministic`` only."""
    return (
        (row["layers"] > 2 if row["pp"] > 1 else row["layers"] == 2)
        and (row["layers"] < 5 or row["pp_schedule"] == V)
        and (row["tp"] == 1 or row["dtype"] != NO_MASTER_WEIGHTS)
        and (row["deterministic"] or row["dtype"] == "float32")
    )


NEAR = [
    (Layout(tp=4), {"micro_batch_size": 4}), (Layout(tp=4), {"kv_heads": 2, **TRAINED["muon"]}),
    (Layout(cp=4), {"documents": "pack"}), (Layout(pp=4), {}), (Layout(pp=2, dp=2, tp=2), {"zero": 1}),
]  # fmt: skip
FIXED = [
    *((layout, {"dtype": "fp8", "intermediate_size": 32, "seq_len": 32 * layout.cp, "tied": True, **how})
      for layout, how in (
          (Layout(dp=2), {"zero": 1}),
          (Layout(pp=2, cp=2), {"layers": HEAD_ALONE, "zero": 1, "pp_schedule": V, "recompute": "norms"}),
      )),
    (Layout(tp=2, dp=2), {"deterministic_parts": 2, "dtype": "bfloat16", "zero": 1, "tied": True}),
]  # fmt: skip
for chosen, how in layouts_with(4, possible, **VALUES):
    how |= TRAINED[how.pop("trained")]
    if how["dtype"] == NO_MASTER_WEIGHTS:
        how |= {"dtype": "bfloat16", "master_weights": "none"}
    if how.pop("deterministic"):
        how |= {"seq_len": 8 * chosen.cp, **({"deterministic_parts": 4} if chosen.tp > 1 else {})}
        FIXED.append((chosen, how))
    else:
        NEAR.append((chosen, how))


@cases(NEAR)
def test_layout(emulated, layout, changes):
    """In a graph and not: no memory is allocated in a capture, no arena outgrows its plan, every work is joined."""
    check(layout, changes)


def test_validation_batches_that_micro_batches_do_not_divide(emulated):
    """The last message of a batch between two stages is shorter than the others."""
    how = {"seq_len": 160, "micro_batch_size": 4, "recompute": "norms"}
    (alone,), both = train(Layout(), 2, **how), train(Layout(pp=2), 2, **how)
    assert [rank["loss"] for rank in both] == pytest.approx([alone["loss"]] * 2, rel=2e-5)


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
    (Layout(), {"pad_token_id": 21}), (Layout(tp=2), {}), (Layout(cp=2), {"compress": "int8"}),
    (Layout(dp=4), {"compress": "int8", "hosts": (2, 2), "zero": 1}),
    (Layout(tp=2), {"deterministic": True, "deterministic_parts": 4}),
    (Layout(pp=2), {"tied": True, "deterministic": True}), (Layout(cp=2), {"deterministic": True}),
    (Layout(pp=2), {"pp_schedule": V, "recompute": "norms", "tied": True}),
    (Layout(pp=2, tp=2), {"pp_schedule": V, "recompute": "block"}),
]  # fmt: skip


@cases(PLANNED)
def test_allocated_memory_is_within_the_plan(emulated, layout, changes, monkeypatch):
    hosts = changes.get("hosts", ())
    check_memory(layout, {key: value for key, value in changes.items() if key != "hosts"}, monkeypatch, hosts)
