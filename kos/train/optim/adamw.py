"""AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101) with torch's conventions: decoupled weight decay, bias-corrected
moments, ``eps`` outside the square root."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

import numpy as np

from kos.train.ops import compiled
from kos.train.optim import Update, UpdateRule


@dataclass
class AdamW(UpdateRule):
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8

    options: ClassVar[tuple[str, ...]] = ("beta1", "beta2", "eps")
    kernel: ClassVar[str] = "adamw"
    about: ClassVar[str] = "both Adam moments"
    state: ClassVar[Mapping[str, str]] = MappingProxyType({"exp_avg": "float32", "exp_avg_sq": "float32"})

    def __post_init__(self) -> None:
        self.operands = [np.float32(x) for x in (*self.betas, self.eps)]
        self.bias_correction = self.betas

    def step(self, number: int, lr: float, decay: float) -> Update:
        beta1, beta2 = self.betas
        step_size = lr / (1 - beta1**number)
        root = 1 / math.sqrt(1 - beta2**number)
        shrink = 1 - lr * decay
        factors = beta1, beta2, step_size, root, self.eps, shrink

        def update(w: np.ndarray, g: np.ndarray, state: Sequence[np.ndarray], out: np.ndarray) -> None:
            if compiled.adamw(w, g, state, factors):
                return
            m, v = state
            m *= beta1
            m += np.multiply(g, 1 - beta1, out=out)
            v *= beta2
            np.multiply(g, g, out=out)
            out *= 1 - beta2
            v += out
            np.sqrt(v, out=out)
            out *= root
            out += self.eps
            np.divide(m, out, out=out)
            out *= step_size
            if shrink != 1.0:
                w *= shrink
            w -= out

        return update
