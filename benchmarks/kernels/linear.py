"""Cases: matrix products of the MLP, by cuBLASLt's first choice; their limit is arithmetic."""

from __future__ import annotations

import torch

from benchmarks.kernels.zoo import Case, Zoo

NAIVE_TOKENS = 512


def linear(zoo: Zoo, n: int) -> Case:
    """The first product."""
    d, f, some = zoo.hidden, 2 * zoo.intermediate, min(n, NAIVE_TOKENS)
    x, w, out = zoo.random(n, d), zoo.random(f, d), zoo.empty(n, f)
    return zoo.case(
        "linear", x, w, out, writes=[out],
        naive=zoo.naive("matmul", some * f, x, w, 0, out, some, f, d, d, 1, 1, d), naive_share=some / n,
        torch=lambda: torch.mm(x, w.T, out=out),
    )  # fmt: skip


def linear_residual(zoo: Zoo, n: int) -> Case:
    """The last product and the residual stream, which it adds."""
    d, f, some = zoo.hidden, zoo.intermediate, min(n, NAIVE_TOKENS)
    x, w, residual, out = zoo.random(n, f), zoo.random(d, f), zoo.random(n, d), zoo.empty(n, d)
    return zoo.case(
        "linear", x, w, out, residual, writes=[out],
        naive=zoo.naive("matmul", some * d, x, w, residual, out, some, d, f, f, 1, 1, f), naive_share=some / n,
        torch=lambda: torch.addmm(residual, x, w.T, out=out),
    )  # fmt: skip


def linear_input_gradient(zoo: Zoo, n: int) -> Case:
    """Of the first product."""
    d, f, some = zoo.hidden, 2 * zoo.intermediate, min(n, NAIVE_TOKENS)
    d_out, w, dx = zoo.random(n, f), zoo.random(f, d), zoo.empty(n, d)
    return zoo.case(
        "linear_input_gradient", d_out, w, dx, writes=[dx],
        naive=zoo.naive("matmul", some * d, d_out, w, 0, dx, some, d, f, f, 1, d, 1), naive_share=some / n,
        torch=lambda: torch.mm(d_out, w, out=dx),
    )  # fmt: skip


def linear_weight_gradient(zoo: Zoo, n: int) -> Case:
    """Of the first product, in the dtype."""
    d, f, some = zoo.hidden, 2 * zoo.intermediate, min(n, NAIVE_TOKENS)
    d_out, x, dw = zoo.random(n, f), zoo.random(n, d), zoo.empty(f, d)
    return zoo.case(
        "linear_weight_gradient", d_out, x, dw, False, zoo.arena, writes=[dw],
        naive=zoo.naive("matmul", f * d, d_out, x, 0, dw, f, d, some, 1, f, d, 1), naive_share=some / n,
        torch=lambda: torch.mm(d_out.T, x, out=dw),
    )  # fmt: skip
