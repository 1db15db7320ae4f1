"""What tests of generation on a GPU and on an emulated one share: operations of the cache, and whole models."""

from typing import Any

import numpy as np

from kos.train.generate import Decoder
from kos.train.ops import Attend
from kos.train.ops import numpy as reference
from kos.train.ops.parameters import Parameters
from kos.train.parallel.mesh import ALONE, Axis
from tests.train.generation import CASES, PROMPTS, random_weights

ATTENTIONS = [  # heads, kv heads, head size, capacity, window, positions
    (4, 2, 8, 300, None, [0, 127, 128, 299]),
    (3, 1, 10, 140, 5, [2, 130]),
    (2, 2, 64, 400, 200, [399, 199, 200, 5]),
    (1, 1, 130, 129, 128, [128]),
]


def check_attention(ops: Any, side: Any, rng: Any, arena: Any, case: tuple[Any, ...]) -> None:
    """Keys and values that are appended in two calls, and one query a sequence that attends to them."""
    heads, kv_heads, d, capacity, window, positions = case
    columns, count, most = (heads + 2 * kv_heads) * d, len(positions), max(positions)
    cache = ops.empty_cache(count, kv_heads, d, capacity, side.put([0])[0].dtype)
    cache64 = reference.empty_cache(count, kv_heads, d, capacity, np.float64)
    cache.fill_bytes(255, ops.stream)
    start, at = (ops.indices(np.array(x, np.int32), arena) for x in ([0] * count, positions))
    got = None
    for places, where, length in ((start, [0] * count, most), (at, positions, 1)):
        if not length:
            continue
        qkv, qkv64 = side.put(rng.normal(size=(count * length, columns)))
        out, _ = side.put(np.full((count * length, heads * d), np.nan))
        lse = ops.zeros((count, heads, length), np.float32)
        attend = Attend(qkv, heads, kv_heads, out, lse)
        out64 = np.empty((heads * d, count * length)).T
        attend64 = Attend(np.asfortranarray(qkv64), heads, kv_heads, out64, np.empty(lse.shape))
        ops.append_to_cache(attend, cache, places)
        reference.append_to_cache(attend64, cache64, np.array(where))
        if length == 1:
            ops.attention_to_cache(attend, cache, at, window, arena)
            reference.attention_to_cache(attend64, cache64, np.array(positions), window, arena)
            got = side.get(out)
    error = np.linalg.norm(got - out64) / np.linalg.norm(out64)
    assert error < (2e-6 if side.dtype == "float32" else 3e-3), (case, error)


def check_linear(ops: Any, side: Any, rng: Any, rows: int, columns: int, features: int) -> None:
    """Against float64; each row has the bits that it has alone."""
    (x, x64), (w, w64) = side.put(rng.normal(size=(rows, columns))), side.put(rng.normal(size=(features, columns)))
    (bias, b64), (residual, r64) = side.put(rng.normal(size=features)), side.put(rng.normal(size=(rows, features)))
    for bias_or_not, residual_or_not, more in ((bias, residual, b64 + r64), (None, None, 0), (bias, None, b64)):
        out, _ = side.put(np.full((rows, features), np.nan))
        ops.linear_few(x, w, out, residual_or_not, bias_or_not)
        expected, got = x64 @ w64.T + more, side.get(out)
        error = np.linalg.norm(got - expected) / np.linalg.norm(expected)
        assert error < (2e-6 if side.dtype == "float32" else 3e-3), error
        for n in range(rows):
            alone, _ = side.put(np.full((1, features), np.nan))
            ops.linear_few(x[n : n + 1], w, alone, residual_or_not and residual[n : n + 1], bias_or_not)
            np.testing.assert_array_equal(side.get(alone)[0], got[n])


def part_of(weights: Any, config: Any, tp: Axis) -> Parameters:
    """A rank's part of weights in host memory."""
    part = config.local(tp.rank, tp.size)
    made = Parameters(config.parameter_shapes(part), np.float32, config.fused_groups(part))
    for name, place in config.placements(part).items():
        made[name][...] = weights[name][place.rows(0, place.local[0])]
    return made


def weights_on(ops: Any, weights: Any, config: Any, dtype: Any, tp: Axis = ALONE) -> Parameters:
    """``weights``, a rank's part, on the device of ``ops``."""
    part = config.local(tp.rank, tp.size)
    made = Parameters(config.parameter_shapes(part), dtype, config.fused_groups(part), ops.zeros)
    for name, array in weights.items():
        ops.copy(np.ascontiguousarray(array, dtype), made[name])
    return made


def logits_of(
    config: Any, ops: Any, weights: Any, prompts: Any, steps: int, tp: Axis = ALONE
) -> list[list[np.ndarray]]:
    """Of each prompt, and of the tokens 0, 1, … after it."""
    source = Decoder(config, ops, weights, len(prompts), config.max_position_embeddings, tp)
    found = [[source.prefill(index, prompt)] for index, prompt in enumerate(prompts)]
    for token in range(steps):
        for index, logits in source.step(dict.fromkeys(range(len(prompts)), token)).items():
            found[index].append(np.array(logits))
    return found


def check_model(ops: Any, name: str, dtype: Any, bound: float, steps: int = 3) -> None:
    """Logits of prompts and steps are the CPU's within ``bound``, of the largest; in any batch they are the same."""
    config = CASES[name].replace(num_hidden_layers=2, layer_types=CASES[name].layer_types[:2],
                                 no_rope_layers=CASES[name].no_rope_layers[:2])  # fmt: skip
    weights = random_weights(config)
    if dtype != np.float32:
        weights.flat[:] = weights.flat.astype(dtype)
    expected = logits_of(config, reference, weights, PROMPTS, steps)
    there = weights_on(ops, weights, config, dtype)
    found = logits_of(config, ops, there, PROMPTS, steps)
    for ours, theirs in zip(found, expected, strict=True):
        assert np.abs(np.array(ours) - theirs).max() < bound * np.abs(theirs).max()
    for number in (0, 2):
        np.testing.assert_array_equal(logits_of(config, ops, there, [PROMPTS[number]], steps)[0], found[number])
