"""Cases: the loss over the tokens, and its gradient."""

from __future__ import annotations

import torch

from benchmarks.kernels.zoo import Case, Zoo, size_of


def count_targets(zoo: Zoo, n: int) -> Case:
    targets, count = zoo.integers(-1, 3, n), zoo.zeros(1)
    return zoo.case(
        "count_targets", targets, count, writes=[count],
        naive=zoo.naive("count_targets", n, targets, count, n),
        torch=lambda: torch.count_nonzero(targets >= 0),
    )  # fmt: skip


def cross_entropy(zoo: Zoo, n: int) -> Case:
    """Forward and backward, of at most 2,048 tokens."""
    n = min(n, 2048)
    logits, losses = zoo.random(n, zoo.vocabulary), zoo.empty(n, dtype=torch.float32)
    targets, count = zoo.integers(0, zoo.vocabulary, n), zoo.constant(n)
    wide = targets.long()

    def both() -> None:
        leaf = logits.detach().requires_grad_()
        zoo.functions["cross_entropy"](leaf, wide).backward()

    return zoo.case(
        "cross_entropy", logits, targets, count, losses, zoo.arena, writes=[logits, losses],
        nbytes=2 * size_of(logits),
        naive=zoo.naive("cross_entropy", n, logits, targets, count, losses, zoo.vocabulary, block=1024),
        torch=both,
    )  # fmt: skip


def mean_loss(zoo: Zoo, n: int) -> Case:
    losses, count, mean = zoo.random(n, dtype=torch.float32).abs(), zoo.constant(n), zoo.zeros(1, dtype=torch.float64)
    return zoo.case(
        "mean_loss", losses, count, mean, writes=[mean],
        naive=zoo.naive("mean_loss", n, losses, count, mean, n),
        torch=lambda: losses.sum() / count,
    )  # fmt: skip
