"""Muon on an emulated GPU: matrices of a shape together, and memory."""

import numpy as np

from kos.memory.sharded import Sharded
from kos.train.ops.numpy_optimizer import LearningRate
from kos.train.ops.parameters import OwnedSlices, Parameters
from kos.train.optim import Group, Optimizer
from kos.train.optim.adamw import AdamW
from kos.train.optim.muon import Muon
from tests.train.host_kernels import emulator
from tests.train.host_kernels.ops import needs_compiler, ops
from tests.train.models import queue

__all__ = ["ops"]


@needs_compiler
def test_batches_are_single_matrices_together(ops, rng):
    """And with --deterministic one at a time, as their number differs between layouts."""
    shapes = {f"{name}{i}": (16, 24) for i in range(5) for name in "ab"}
    rule, calls = Muon({name: Sharded(shape) for name, shape in shapes.items()}), []
    gradients = Parameters(shapes, "float32", None, ops.zeros)
    gradients.flat.copy_from(rng.normal(size=gradients.flat.size).astype(np.float32))
    real = ops.orthogonalize
    ops.orthogonalize = lambda x, arena: (calls.append(len(x)), real(x, arena))
    results = []
    for exact_count in (0, gradients.flat.size):
        weights = gradients.like()
        how = {"groups": [Group(shapes, 0.0, 1.0, rule)], "exact": exact_count}
        optimizer = Optimizer(AdamW(), weights, LearningRate("constant", 1e-2, 0, 9, 0), ops=ops, **how)
        queue(optimizer, gradients)
        results.append(weights.flat.numpy())
    assert calls == [10] + [1] * 10
    assert abs(results[0]).max() > 0 and results[0].tobytes() == results[1].tobytes()


def test_an_update_takes_the_memory_that_was_planned(monkeypatch):
    """A run's arena is of that size, and raises if more is asked of it."""
    emulator.host_memory(monkeypatch)
    rule = Muon({name: Sharded(shape) for name, shape in (("a", (96, 160)), ("b", (96, 160)), ("c", (64, 64)))})
    weights = Parameters({"a": (96, 160), "b": (96, 160), "c": (64, 64)}, "float32", None, emulator.HostOps().zeros)
    ops = emulator.HostOps()
    held = OwnedSlices(weights, [slice(0, weights.flat.size)])
    arena = ops.make_arena()
    optimizer = Optimizer(
        AdamW(), weights, LearningRate("constant", 1e-2, 0, 9, 0), ops=ops,
        groups=[Group(weights, 0.0, 1.0, rule)], arena=arena,
    )  # fmt: skip
    ops.launch = lambda *arguments, **options: None
    rule.update_matrices(optimizer, weights.like(), 1.0, 0.0)
    planned = rule.scratch_bytes(held, 4, 1 << 25)
    assert 0.9 * planned < arena.peak <= planned
