"""Operations of the CPU on memory that starts as NaN, and gradients against finite differences."""

import numpy as np
import pytest

from kos.memory.arena import Arena


def poisoned_slab(nbytes):
    return np.full(-(-nbytes // 8), np.nan).view(np.uint8)


@pytest.fixture
def arena():
    return Arena(0, poisoned_slab)


def nan(*shape):
    return np.full(shape, np.nan)


def columns(array):
    """``array`` in the memory order of ``empty_columns``."""
    return np.asfortranarray(array)


def nan_columns(*shape):
    return columns(nan(*shape))


def check_gradients(rng, function, inputs, gradients, d_out, h=1e-6):
    """``function(*inputs) -> out`` against ``gradients`` of sum(d_out * out), in three directions each."""
    for index, gradient in enumerate(gradients):
        assert np.isfinite(gradient).all()
        for _ in range(3):
            direction = rng.normal(size=gradient.shape)
            moved = [list(inputs), list(inputs)]
            moved[0][index] = inputs[index] + h * direction
            moved[1][index] = inputs[index] - h * direction
            slope = np.sum(d_out * (function(*moved[0]) - function(*moved[1]))) / (2 * h)
            assert np.sum(gradient * direction) == pytest.approx(slope, rel=1e-5, abs=1e-7), f"input {index}"
