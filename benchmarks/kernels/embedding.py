"""Cases: the embedding."""

from __future__ import annotations

import torch

from benchmarks.kernels.zoo import Case, Zoo, backward_of, size_of


def embedding(zoo: Zoo, n: int) -> Case:
    table, tokens, out = zoo.random(zoo.vocabulary, zoo.hidden), zoo.tokens(n), zoo.empty(n, zoo.hidden)
    return zoo.case(
        "embedding", tokens, table, out, writes=[out], nbytes=2 * size_of(out),
        naive=zoo.naive("embedding", out.numel(), tokens, table, out, zoo.hidden, out.numel()),
        torch=lambda: zoo.functions["embedding"](tokens, table),
    )  # fmt: skip


def embedding_backward(zoo: Zoo, n: int) -> Case:
    """Added to an fp32 table, as a tied head's gradient is; torch writes a table of the dtype."""
    d_out, tokens, d_table = zoo.random(n, zoo.hidden), zoo.tokens(n), zoo.zeros(zoo.vocabulary, zoo.hidden)
    leaf = zoo.random(zoo.vocabulary, zoo.hidden).requires_grad_()
    return zoo.case(
        "embedding_backward", d_out, tokens, d_table, True, zoo.arena, writes=[d_table],
        nbytes=size_of(d_out) + 2 * len(torch.unique(tokens)) * zoo.hidden * 4,
        naive=zoo.naive("embedding_backward", d_out.numel(), d_out, tokens, d_table, zoo.hidden, d_out.numel()),
        torch=backward_of(zoo.functions["embedding"](tokens, leaf), [leaf], d_out),
    )  # fmt: skip
