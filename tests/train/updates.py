"""An optimizer of a GPU, real or emulated, beside the host's in float64."""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from kos import cuda
from kos.memory.sharded import Sharded
from kos.train.config import OPTIMIZERS
from kos.train.config.options import TrainConfig
from kos.train.ops.numpy_optimizer import SCALARS, LearningRate, clip_coefficient
from kos.train.ops.parameters import Parameters
from kos.train.optim import CHUNK, Group, Optimizer
from kos.train.optim.adamw import AdamW
from kos.train.optim.muon import Muon
from tests.train.models import queue

SHAPES = {
    "head": (50, 12), "norm": (999,), "wide": (12, 40), "q": (12, 12), "tall": (31, 12), "stacked.c_attn": (36, 12),
    "large": (3, CHUNK // 2),
}  # fmt: skip
PLAIN = "odd", "head", "norm", "large"
"""What no optimizer takes for a matrix of a layer."""
each_kind = pytest.mark.parametrize(
    ("name", "master", "copy", "gradient", "kind"),
    [
        (name, *kind)
        for name in OPTIMIZERS
        for kind in (
            ("float32", "bfloat16", "bfloat16", "cosine"), ("float32", None, "float32", "wsd"),
            ("bfloat16", None, "float32", "constant"),
        )
    ],
)  # fmt: skip


def step_of_host(optimizer: Optimizer, gradients: Parameters, lr: float, scale: float = 1.0) -> None:
    """One update on a host with ``scale * gradients``."""
    optimizer.learning_rate = LearningRate("constant", lr, 0, 1, 0)
    optimizer.scalars[SCALARS.index("sum_of_squares")] = 0
    optimizer.update(gradients, 1 / scale)


def check_updates(
    ops: Any, rng: np.random.Generator, name: str, master: str, copy: str | None, gradient: str, kind: str,
    shapes: Mapping[str, tuple[int, ...]] = SHAPES, graph: bool = False,
) -> Optimizer:
    """Updates with warm-up, clipping and each group's options; a gradient of NaN changes nothing.

    ``graph``: they are replayed.
    """  # fmt: skip
    hidden = {each: Sharded(shape) for each, shape in shapes.items() if each not in PLAIN}
    matrices = Muon(hidden, (".c_attn",), 0.9) if name == "muon" else None
    decays = [each for each in shapes if each in PLAIN and each != "norm"]
    groups = [Group(decays, 0.1), Group(["norm"]), Group(hidden, 0.3, 0.5, matrices)]
    rule = TrainConfig.from_preset(optimizer=name).update_rule()
    weights, weights64 = Parameters(shapes, master, None, ops.zeros), Parameters(shapes, np.float64)
    start = rng.normal(size=weights.flat.size).astype(weights.flat.dtype.numpy)
    weights.flat.copy_from(start, ops.stream)
    weights64.flat[:] = start
    gradients, gradients64 = weights.like(gradient), weights64.like()
    rounded, schedule = None if copy is None else weights.like(copy), LearningRate(kind, 1e-2, 1e-3, 6, 2, 2)
    ours = Optimizer(rule, weights, schedule, ops=ops, copy=rounded, groups=groups, grad_clip=1.0, seed=7)
    theirs = Optimizer(rule, weights64, groups=groups)

    def update() -> None:
        queue(ours, gradients, average=0.25)

    act: Callable[[], object] = update
    if graph:
        ours.norm(gradients)  # kernels are loaded outside the capture
        with cuda.capture(ops.stream) as captured:
            update()
        act = lambda: captured.replay(ops.stream)  # noqa: E731
    steps = 4 if master == "bfloat16" else 6
    for step in range(steps):
        gradients64.flat[:] = rng.normal(0, 0.5 if step % 2 else 1e-3, start.size).astype(gradients.flat.dtype.numpy)
        gradients.flat.copy_from(gradients64.flat.astype(gradients.flat.dtype.numpy), ops.stream)
        norm = float(np.linalg.norm(gradients64.flat)) / 4
        act()
        step_of_host(theirs, gradients64, schedule(step), clip_coefficient(norm, 1.0) / 4)
        state = ours.read()
        assert (state["norm"], state["lr"]) == (pytest.approx(norm, rel=1e-6), pytest.approx(schedule(step), rel=1e-12))
        assert (ours.step_count, state["finite"]) == (step + 1, 1)
    got, kept = weights.flat.numpy(ops.stream), {key: x.flat.numpy(ops.stream) for key, x in ours.state.items()}
    for each, span in weights.spans.items():
        first, right, found = (x[span].astype(np.float64) for x in (start, weights64.flat, got))
        of_products = 1e-5
        if matrices and each in hidden:  # each of the five iterations multiplies an error by up to 3.4445
            of_products = 3.4445**5 * 2.0**-23 if copy is None and master == "float32" else 0.03
        else:
            tolerance = 4 * 2.0**-7 if master == "bfloat16" else 1e-5  # each step rounds by less than a spacing
            np.testing.assert_allclose(found, right, rtol=tolerance, atol=tolerance / 10, err_msg=each)
        rounding = 2.0**-7 * np.linalg.norm(first) if master == "bfloat16" else 0.0
        moved = np.linalg.norm(right - first)
        assert moved > 0 and np.linalg.norm(found - right) < of_products * moved + 1e-6 + rounding, each
    for key, value in kept.items():
        assert np.linalg.norm(value - theirs.state[key].flat) < 2e-6 * np.linalg.norm(theirs.state[key].flat), key
        np.testing.assert_allclose(value, theirs.state[key].flat, rtol=1e-5, atol=1e-6, err_msg=key)
    if rounded is not None:
        assert np.array_equal(rounded.flat.numpy(ops.stream), got.astype(rounded.flat.dtype.numpy))
    gradients.flat.fill_bytes(255, ops.stream)  # NaN
    act()
    assert ours.read()["finite"] == 0 and ours.step_count == steps
    assert np.array_equal(weights.flat.numpy(ops.stream), got)
    assert all(np.array_equal(x.flat.numpy(ops.stream), kept[key]) for key, x in ours.state.items())
    if graph:
        captured.close()
    return ours


def check_skipped(ops: Any, weights: Parameters, make: Callable[..., Any], graph: bool = False) -> None:
    """AdamW in float64, in which skipped steps have a learning rate but are no updates.

    ``make(rule, weights, schedule, groups, skip)`` is the optimizer of these ``weights``, on a host or on a GPU.
    ``graph``: the updates are replayed.
    """
    schedule, groups = LearningRate("cosine", 1e-2, 1e-3, 8, 2), [Group(["a"], 0.1)]
    optimizer, gradients = make(AdamW((0.9, 0.95), 1e-8), weights, schedule, groups, 2.0), weights.like()
    count, rng = ops.zeros(1, np.float32), np.random.default_rng(2)
    start = rng.normal(size=weights.flat.size)
    ops.copy(start.astype(np.float32), weights.flat)
    w, m, v, updates = start.astype(np.float32).astype(np.float64), 0.0, 0.0, 0

    def update() -> None:
        optimizer.norm(gradients)
        optimizer.update(gradients, 1, count)

    with contextlib.ExitStack() as held:
        if graph:
            optimizer.norm(gradients)  # kernels are loaded outside the capture
            with cuda.capture(ops.stream) as captured:
                update()
            held.callback(captured.close)
            update = lambda: captured.replay(ops.stream)  # noqa: E731
        for step, skipped in enumerate(("not finite", "", "outlier", "no targets", "", "")):
            g = rng.normal(0, 0.02, start.size).astype(np.float32)
            g *= {"not finite": np.nan, "outlier": 1e3}.get(skipped, 1)
            ops.copy(g, gradients.flat)
            ops.copy(np.array([np.inf if skipped == "no targets" else 1], np.float32), count)
            update()
            if not skipped:
                updates += 1
                m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g.astype(np.float64) ** 2
                corrected = m / (1 - 0.9**updates) / (np.sqrt(v / (1 - 0.95**updates)) + 1e-8)
                w -= schedule(step) * (0.1 * w + corrected)
            assert (optimizer.step_count, optimizer.updates) == (step + 1, updates)
            np.testing.assert_allclose(ops.to_host(weights.flat), w, rtol=1e-5, atol=1e-6, err_msg=f"step {step}")
