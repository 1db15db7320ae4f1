"""The model: what it computes however it is asked, what it counts, and its initial weights."""

import math
import zlib
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from kos.train.config.options import TrainConfig
from kos.train.model import initial
from kos.train.model.families import Qwen2Config
from kos.train.model.initial import init_weights
from kos.train.model.model import Model
from kos.train.ops import numpy as numpy_ops
from kos.train.ops.parameters import Parameters
from tests.train.models import loss_and_gradients, make, make_batch, small


@pytest.mark.parametrize("recompute", ["none", "block"])
def test_swiglu_within_a_product_gives_the_bits_of_both(recompute):
    """A model asks for each MLP."""
    asked = []

    def fuses(d_out, weight, gate_up, arena):
        asked.append((d_out.shape, weight.shape, gate_up.shape))
        return True

    config, _, weights, expected = make("tied", np.float32)
    batch, gradients = make_batch(config, 2, 9, seed=4), weights.like()
    fused = SimpleNamespace(**vars(numpy_ops) | {"fuses_swiglu": fuses})
    for ops, of in ((numpy_ops, expected), (fused, gradients)):
        loss_and_gradients(Model(config, ops, recompute=recompute), weights, *batch, of, accumulate=False)
    assert asked == [((18, 24), (24, 29), (18, 58))] * config.num_hidden_layers
    assert gradients.flat.tobytes() == expected.flat.tobytes()


def test_rope_tables_serve_all_lengths(before_call):
    config, model, weights, _ = make("llama3", np.float64)
    tokens, _ = make_batch(config, 1, 70, seed=12)
    whole, made = model.logits(weights, tokens), []
    tables = numpy_ops.rope_tables
    before_call(numpy_ops, "rope_tables", lambda *given: made.append(tables(*given)))
    _, fresh, _, _ = make("llama3", np.float64)
    for length in range(1, 71):
        logits = fresh.next_logits(weights, tokens[:, :length])
        np.testing.assert_allclose(logits, whole[0, length - 1], rtol=1e-9, atol=1e-12)
    assert sum(cos.nbytes + sin.nbytes for cos, sin in made) <= 2 * 8 * (config.head_dim // 2) * 4 * 70


def test_counts_of_llama_3_8b():
    config = TrainConfig.from_preset("8b").model_config_for(256)
    assert config.num_parameters() == 8_030_261_248  # as published
    matmul = 8_030_261_248 - 128256 * 4096 - 65 * 4096
    attention = 32 * 32 * 128 * 8192
    assert config.flops_per_token(8192) == (6 * matmul + 6 * attention, 6 * matmul + 12 * attention)


def test_attention_in_a_window_counts_what_it_sees():
    """With a window of 4 tokens, a query of 8 sees 4 (1 - 4 / 16) = 3 keys on average; without a window, 4."""
    shape = {"vocab_size": 37, "hidden_size": 24, "intermediate_size": 40, "num_key_value_heads": 2}
    build = partial(Qwen2Config, num_hidden_layers=3, num_attention_heads=4, head_dim=6, **shape)
    full, width = build(), 4 * 6
    mixed = build(sliding_window=4, layer_types=["sliding_attention", "full_attention", "sliding_attention"])
    saved = [a - b for a, b in zip(full.flops_per_token(8), mixed.flops_per_token(8), strict=True)]
    assert saved == [6 * width * 2 * (8 - 4 * 1.5), 12 * width * 2 * (8 - 4)]
    assert build(sliding_window=8).flops_per_token(8) == full.flops_per_token(8)


def test_a_tied_head_counts_once():
    tied = small(tie_word_embeddings=True)
    untied = small()
    assert untied.num_parameters() - tied.num_parameters() == 37 * 24
    assert untied.flops_per_token(8) == tied.flops_per_token(8)


def test_init_weights():
    config = small(hidden_size=64, intermediate_size=128, initializer_range=0.05)
    weights, again, other = (Parameters(config.parameter_shapes()) for _ in range(3))
    for parameters, seed in ((weights, 1), (again, 1), (other, 2)):
        parameters.flat[:] = np.nan
        init_weights(config, parameters, seed)
    assert np.array_equal(weights.flat, again.flat)
    for name, shape in weights.shapes.items():
        if len(shape) == 1:
            assert (weights[name] == 1).all()
            continue
        scaled = name.endswith(("o_proj.weight", "down_proj.weight"))
        std = 0.05 / math.sqrt(6) if scaled else 0.05
        assert weights[name].std() == pytest.approx(std, rel=0.15), name
        assert not np.array_equal(weights[name], other[name])
    names = [name for name, shape in weights.shapes.items() if len(shape) == 2]
    assert len({float(weights[name].flat[0]) for name in names}) == len(names)


def test_init_weights_draws_large_tensors_in_blocks(request):
    """Each by a generator that is keyed by seed, name and number of the block."""
    config = small(hidden_size=64, intermediate_size=128, tie_word_embeddings=True)
    weights, blocks = (Parameters(config.parameter_shapes()) for _ in range(2))
    init_weights(config, weights, 2**62 + 5)
    request.getfixturevalue("small_buckets")
    blocks.flat[:] = np.nan
    init_weights(config, blocks, 2**62 + 5)
    name = config.embedding  # 37 x 64
    key = [2**62 + 5, zlib.crc32(name.encode())]
    expected = [np.random.default_rng([*key, n]).standard_normal(500, np.float32) for n in range(5)]
    assert np.array_equal(blocks[name].ravel(), np.concatenate(expected)[: 37 * 64] * np.float32(0.02))
    whole = np.random.default_rng(key).standard_normal((37, 64), np.float32) * np.float32(0.02)
    assert np.array_equal(weights[name], whole), "a first block is drawn as a whole tensor was before there were blocks"


@pytest.mark.parametrize("threads", [1, 3])
def test_initial_weights_are_drawn_ahead_but_not_all_at_once(threads, small_buckets, before_call):
    config = small(hidden_size=64, intermediate_size=128)
    whole = Parameters(config.parameter_shapes())
    init_weights(config, whole, 5)
    begun = []
    before_call(np.random, "default_rng", begun.append)
    drawn = initial.InitialWeights(config, 5, whole, threads)
    names = list(whole)
    assert np.array_equal(drawn.read(names[0], (slice(3, 9),)), whole[names[0]][3:9])
    assert np.array_equal(drawn.read(names[2]), whole[names[2]])
    drawn.close()
    ahead = {key[1] for key in begun}
    assert len(ahead) <= 3 + 2 * threads < len(names), "drawing stops when it is closed"
