"""Cases: AdamW's parts, over as many elements as the tokens' hidden states have."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from benchmarks.kernels.zoo import Case, Zoo, as_array, to_host
from kos.train.ops.parameters import Parameters
from kos.train.optim import LearningRate
from kos.train.optim.adamw import AdamW
from kos.train.optim.cuda import SCALARS, CudaOptimizer


class Setting(NamedTuple):
    """fp32 weights, state and gradients, a 16-bit copy of the weights; values of weights and gradients as tensors."""

    optimizer: CudaOptimizer
    copy: Parameters
    gradients: Parameters
    w: torch.Tensor
    g: torch.Tensor


def _setting(zoo: Zoo, n: int) -> Setting:
    weights = Parameters({"w": (n, zoo.hidden)}, "float32", None, zoo.ops.zeros)
    copy, gradients = weights.like("bfloat16"), weights.like()
    w, g = (zoo.random(n * zoo.hidden, dtype=torch.float32) for _ in range(2))
    torch.cuda.synchronize()
    weights.flat.copy_from(as_array(w), zoo.ops.stream)
    gradients.flat.copy_from(as_array(g), zoo.ops.stream)
    optimizer = CudaOptimizer(AdamW(), zoo.ops, weights, copy, LearningRate("constant", 1e-3, 0, 10, 1))
    return Setting(optimizer, copy, gradients, w, g)


def gradient_norm(zoo: Zoo, n: int) -> Case:
    """The sum of squares."""
    optimizer, _, gradients, _, g = _setting(zoo, n)
    state, at = torch.from_dlpack(optimizer.scalars), SCALARS.index("sum_of_squares")
    result = state[at : at + 1]
    return Case(
        nbytes=4 * g.numel(),
        fast=lambda: optimizer.norm(gradients),
        naive=zoo.naive("gradient_norm", g.numel(), g, result, g.numel()),
        torch=lambda: torch.linalg.vector_norm(g),
        writes=[result],
        expected=lambda: [np.square(to_host(g)).sum(keepdims=True)],
    )


def adamw(zoo: Zoo, n: int) -> Case:
    """The update alone."""
    optimizer, copy, gradients, w, g = _setting(zoo, n)
    optimizer.norm(gradients)
    parameter = torch.nn.Parameter(w.clone())
    parameter.grad = g
    theirs = torch.optim.AdamW([parameter], lr=1e-3, weight_decay=0.1, fused=True)
    weights, size = optimizer.weights.flat, g.numel()
    state = (weights, gradients.flat, *(kept.flat for kept in optimizer.state.values()), copy.flat)
    scalars = [np.float32(x) for x in (1e-3, 1e-3 / 0.1, 1 / np.sqrt(0.05), 0.1, 0.9, 0.95, 1e-8)]
    return Case(
        nbytes=30 * size,
        fast=lambda: optimizer.update(gradients),
        naive=zoo.naive("adamw", size, *state, *scalars, size) if zoo.dtype == torch.bfloat16 else None,
        torch=theirs.step,
        writes=[torch.from_dlpack(weights)],
        expected=lambda: [to_host(w) * (1 - 1e-4) - 1e-3 * to_host(g) / (np.abs(to_host(g)) + 1e-8)],
    )
