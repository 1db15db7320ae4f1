"""Cases: RMSNorm, LayerNorm, and the sum of rows, a bias's gradient."""

from __future__ import annotations

import numpy as np
import torch

from benchmarks.kernels.zoo import Case, Zoo, backward_of
from kos.train.ops import Normalize

EPS = 1e-5


def rms_norm(zoo: Zoo, n: int) -> Case:
    d = zoo.hidden
    x, w, out, rstd = zoo.random(n, d), zoo.random(d), zoo.empty(n, d), zoo.empty(n, dtype=torch.float32)
    return zoo.case(
        "normalize", x, Normalize(w, EPS), out, rstd, writes=[out, rstd],
        naive=zoo.naive("rms_norm", n, x, w, np.float32(EPS), out, rstd, n, d),
        torch=lambda: zoo.functions["rms_norm"](x, w),
    )  # fmt: skip


def rms_norm_backward(zoo: Zoo, n: int) -> Case:
    d = zoo.hidden
    d_out, x, w, dx, dw = zoo.random(n, d), zoo.random(n, d), zoo.random(d), zoo.random(n, d), zoo.zeros(d)
    rstd = x.float().square().mean(-1).add(1e-5).rsqrt()
    leaves = [x.clone().requires_grad_(), w.clone().requires_grad_()]
    return zoo.case(
        "normalize_backward", d_out, x, Normalize(w, EPS), rstd, dx, dw, False, zoo.arena, writes=[dx, dw],
        naive=zoo.naive("rms_norm_backward", n, d_out, x, w, rstd, dx, dw, n, d),
        torch=backward_of(zoo.functions["rms_norm"](*leaves), leaves, d_out),
    )  # fmt: skip


def layer_norm(zoo: Zoo, n: int) -> Case:
    d = zoo.hidden
    x, w, b, out = zoo.random(n, d), zoo.random(d), zoo.random(d), zoo.empty(n, d)
    statistics = zoo.empty(2, n, dtype=torch.float32)
    return zoo.case(
        "normalize", x, Normalize(w, EPS, b), out, statistics, writes=[out, statistics],
        naive=zoo.naive("layer_norm", n, x, w, b, np.float32(EPS), out, statistics, n, d),
        torch=lambda: zoo.functions["layer_norm"](x, w, b),
    )  # fmt: skip


def layer_norm_backward(zoo: Zoo, n: int) -> Case:
    d = zoo.hidden
    d_out, x, w, b, dx = zoo.random(n, d), zoo.random(n, d), zoo.random(d), zoo.random(d), zoo.random(n, d)
    dw, db = zoo.zeros(d), zoo.zeros(d)
    mean, variance = x.float().mean(-1), x.float().var(-1, correction=0)
    statistics = torch.stack([variance.add(1e-5).rsqrt(), mean])
    leaves = [tensor.clone().requires_grad_() for tensor in (x, w, b)]
    return zoo.case(
        "normalize_backward", d_out, x, Normalize(w, EPS, b), statistics, dx, dw, False, zoo.arena, db,
        writes=[dx, dw, db],
        naive=zoo.naive("layer_norm_backward", n, d_out, x, w, statistics, dx, dw, db, n, d),
        torch=backward_of(zoo.functions["layer_norm"](*leaves), leaves, d_out),
    )  # fmt: skip


def sum_rows(zoo: Zoo, n: int) -> Case:
    x, out = zoo.random(n, zoo.hidden), zoo.empty(zoo.hidden, dtype=torch.float32)
    return zoo.case(
        "sum_rows", x, out, False, zoo.arena, writes=[out],
        naive=zoo.naive("sum_rows", zoo.hidden, x, out, n, zoo.hidden),
        torch=lambda: zoo.functions["sum_rows"](x),
    )  # fmt: skip
