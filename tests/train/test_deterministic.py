"""``--deterministic``: orders of sums, and runs and checkpoints of commands that have the bits of one rank."""

import math
from typing import Any

import numpy as np
import pytest

from kos.errors import ConfigError
from kos.train.device.cpu import CpuDevice
from kos.train.ops.numpy_optimizer import CHUNKS, reproducible_squares
from kos.train.parallel.fixed_order import Split, most_parts
from kos.train.parallel.mesh import Layout
from tests.train.layouts import BITS, train


def runs(layout: Layout, **changes: Any) -> list[list[dict[str, Any]]]:
    """On one rank and in that layout, of a model that no other test has."""
    return [train(each, CpuDevice, 2, False, **BITS | changes) for each in (Layout(), layout)]


@pytest.mark.parametrize(
    ("sizes", "seq_len", "split"),
    [
        ((16, 8, 24, 40), 32, Split(8, 1)), ((16, 4, 24, 40), 1024, Split(4, 8)),
        ((12, 6, 24, 50257), 512, Split(1, 4)), ((6, 6, 24, 512), 1000, Split(2, 4)),
    ],
)  # fmt: skip
def test_the_split_depends_on_the_model_alone(sizes, seq_len, split):
    assert Split.of(most_parts(sizes), seq_len) == split
    split.check(split.features, split.tokens, seq_len)


@pytest.mark.parametrize(
    ("layout", "changes", "error"),
    [
        (Layout(tp=4), {"num_key_value_heads": 4, "intermediate_size": 36, "vocab_size": 52}, None),
        (Layout(tp=3), {"num_key_value_heads": 3, "num_attention_heads": 6, "vocab_size": 42, "intermediate_size": 24},
         "--deterministic --tp 3: expected a divisor of 1, .* got 3"),
        (Layout(tp=2), {"deterministic_parts": 2}, None),
        (Layout(tp=4), {"deterministic_parts": 2, "seq_len": 32},
         "--deterministic --tp 4: expected --deterministic-parts to be a multiple of 4, got 2"),
        (Layout(), {"deterministic_parts": 3}, "--deterministic-parts: expected a divisor of 8, the largest .* got 3"),
        (Layout(cp=2), {}, "--deterministic --cp 2: expected --seq-len to be a multiple of 4 and at least 32, got 24"),
        (Layout(cp=3), {}, "--deterministic --cp 3: expected --cp 1, 2, 4 or 8, got 3"),
    ],
)  # fmt: skip
def test_what_cannot_be_cut_is_refused(layout, changes, error):
    """A model whose sizes are no multiples of 8, and layouts in which a rank has no whole subtrees."""
    if error is None:
        (alone,), ranks = runs(layout, **changes)
        assert all(got["rows"].tobytes() == alone["rows"].tobytes() for got in ranks)
        return
    with pytest.raises(ConfigError, match=error):
        runs(layout, **{"seq_len": 24, **changes})


def test_sums_of_squares_are_exact(rng):
    """In any order and in any parts; of numbers of very different magnitudes."""
    values = (rng.standard_normal(50_000) * 10.0 ** rng.integers(-12, 3, 50_000)).astype(np.float32)
    most, found = np.abs(values).max(keepdims=True).view(np.int32), set()
    for order in (values, values[::-1], rng.permutation(values)):
        total = np.zeros(2)
        for part in np.split(order, [7, 20_000, 20_001]):
            chunk = np.zeros(1, CHUNKS)
            chunk["length"], partial = part.size, np.zeros((2, 1))
            reproducible_squares(part, chunk, partial, 1, most, values.size.bit_length())
            total += partial[:, 0]
        found.add(tuple(total))
    assert len(found) == 1
    exact = math.fsum(float(value) ** 2 for value in values)
    assert math.fsum(found.pop()) == pytest.approx(exact, rel=1e-14)
