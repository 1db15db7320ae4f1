"""Cases: add, cast, zero, SwiGLU, GELU."""

from __future__ import annotations

import numpy as np
import torch

from benchmarks.kernels.zoo import Case, Zoo, backward_of, to_host
from kos.memory.arena import Arena
from kos.train.ops import numpy as reference


def add(zoo: Zoo, n: int) -> Case:
    a, b, out = zoo.random(n, zoo.hidden), zoo.random(n, zoo.hidden), zoo.empty(n, zoo.hidden)
    return zoo.case(
        "add", a, b, out, writes=[out],
        naive=zoo.naive("add", a.numel(), a, b, out, a.numel()),
        torch=lambda: torch.add(a, b, out=out),
    )  # fmt: skip


def cast(zoo: Zoo, n: int) -> Case:
    """float32 to bfloat16."""
    source = zoo.random(n, zoo.hidden, dtype=torch.float32)
    out = zoo.empty(n, zoo.hidden, dtype=torch.bfloat16)
    return zoo.case(
        "copy", source, out, writes=[out],
        naive=zoo.naive("cast", out.numel(), source, out, out.numel()),
        torch=lambda: zoo.functions["cast"](source),
    )  # fmt: skip


def zero(zoo: Zoo, n: int) -> Case:
    out = zoo.empty(n, zoo.hidden)
    return zoo.case(
        "zero", out, writes=[out],
        naive=zoo.naive("zero", out.numel(), out, out.numel()),
        torch=out.zero_,
    )  # fmt: skip


def swiglu(zoo: Zoo, n: int) -> Case:
    f = zoo.intermediate
    gate_up, out = zoo.random(n, 2 * f), zoo.empty(n, f)
    return zoo.case(
        "swiglu", gate_up, out, zoo.arena, writes=[out], columns=True,
        naive=zoo.naive("swiglu", out.numel(), gate_up, out, f, out.numel()),
        torch=lambda: zoo.functions["swiglu"](gate_up),
    )  # fmt: skip


def swiglu_backward(zoo: Zoo, n: int) -> Case:
    f = zoo.intermediate
    d_out, gate_up, d_gate_up = zoo.random(n, f), zoo.random(n, 2 * f), zoo.empty(n, 2 * f)

    def expected() -> list[np.ndarray]:
        dy, x, dx = (to_host(tensor, columns=True) for tensor in (d_out, gate_up, d_gate_up))
        y = np.empty_like(dy)
        reference.swiglu(x, y, Arena())
        reference.swiglu_backward(dy, x, y, dx, Arena())
        return [dx]

    leaf = gate_up.clone().requires_grad_()
    return zoo.case(
        "swiglu_backward", d_out, gate_up, d_out, d_gate_up, zoo.arena, writes=[d_gate_up], expected=expected,
        naive=zoo.naive("swiglu_backward", d_out.numel(), d_out, gate_up, d_gate_up, f, d_out.numel()),
        torch=backward_of(zoo.functions["swiglu"](leaf), [leaf], d_out),
    )  # fmt: skip


def gelu(zoo: Zoo, n: int) -> Case:
    x, out = zoo.random(n, zoo.intermediate), zoo.empty(n, zoo.intermediate)
    return zoo.case(
        "gelu", x, out, zoo.arena, writes=[out], columns=True,
        naive=zoo.naive("gelu", x.numel(), x, out, x.numel()),
        torch=lambda: zoo.functions["gelu"](x),
    )  # fmt: skip


def gelu_backward(zoo: Zoo, n: int) -> Case:
    d_out, x, dx = zoo.random(n, zoo.intermediate), zoo.random(n, zoo.intermediate), zoo.empty(n, zoo.intermediate)
    leaf = x.clone().requires_grad_()
    return zoo.case(
        "gelu_backward", d_out, x, dx, zoo.arena, writes=[dx], columns=True,
        naive=zoo.naive("gelu_backward", x.numel(), d_out, x, dx, x.numel()),
        torch=backward_of(zoo.functions["gelu"](leaf), [leaf], d_out),
    )  # fmt: skip
