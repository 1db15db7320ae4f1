"""``--deterministic``: losses, norms, weights, moments and validation have the bits of one rank in every layout."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from kos.errors import ConfigError
from kos.train.engine.cpu import CpuEngine
from kos.train.model.llama_config import LlamaConfig
from kos.train.parallel.fixed import Cut
from kos.train.parallel.mesh import Layout
from kos.train.parallel.schedules import SCHEDULES
from tests.train.test_layouts import layouts, named, train
from tests.train.test_tensor_parallel import part_of

RUN: dict[str, Any] = {"seq_len": 32, "batch_size": 16, "micro_batch_size": 1, "steps": 3, "deterministic": True}


@functools.cache
def serial(layers: int, tied: bool, **changes: Any) -> dict[str, Any]:
    (alone,) = train(Layout(), CpuEngine, layers, tied, **changes)
    return alone


def differs(layout: Layout, layers: int, tied: bool, **changes: Any) -> list[str]:
    """What of a run has other bits than on one rank."""
    changes = RUN | changes
    expected = serial(layers, tied, **{key: value for key, value in changes.items() if key not in ("pp_schedule", "zero")})
    ranks, found, held = train(layout, CpuEngine, layers, tied, **changes), [], set()
    model: LlamaConfig = expected["model"]
    for rank, got in enumerate(ranks):
        if got["rows"].tobytes() != expected["rows"].tobytes():
            found.append(f"losses and norms of rank {rank}")
        if got["loss"] != expected["loss"]:
            found.append(f"validation of rank {rank}")
        for name, value in got["weights"].items():
            wanted = part_of(name, expected["weights"][name], model, layout.tp, layout.coordinates(rank)["tp"])
            if value.tobytes() != np.ascontiguousarray(wanted).tobytes():
                found.append(f"{name} of rank {rank}")
            held.add(name)
    assert held == set(expected["weights"])
    return found


def length(cp: int) -> int:
    return 32 if cp == 1 else 64 * cp


EVERY = [layout for ranks in (2, 4, 6, 8) for layout in layouts(ranks)]
QUICK = [Layout(dp=2), Layout(tp=2), Layout(cp=2), Layout(pp=2), Layout(tp=4), Layout(dp=2, tp=2), Layout(pp=2, cp=2),
         Layout(tp=2, cp=2)]  # fmt: skip


@pytest.mark.parametrize(
    "layout",
    [pytest.param(each, marks=() if each in QUICK else pytest.mark.slow, id=named(each)) for each in EVERY],
)
def test_layout(layout: Layout) -> None:
    tied = layout.dp % 2 == 0 or layout.pp % 2 == 0
    assert differs(layout, max(2, layout.pp + layout.pp // 2), tied, seq_len=length(layout.cp)) == []
