"""The model and the optimizer on a GPU against those of numpy: loss, every gradient, updates of a captured graph."""

import math
import os
from functools import partial

import numpy as np
import pytest

from kos.train.model.families import GPT2Config
from kos.train.model.llama import LlamaConfig
from kos.train.model.model import Model
from kos.train.ops import Batch
from kos.train.ops import numpy as numpy_ops
from kos.train.ops.cuda import CudaOps
from kos.train.ops.numpy_optimizer import LearningRate
from kos.train.ops.parameters import Parameters
from kos.train.optim import Optimizer
from kos.train.optim.adamw import AdamW
from tests.train.beside_torch import torch_llama
from tests.train.host_kernels.engine import rounded_at_random
from tests.train.models import SCALING, loss_and_gradients, queue, sizes
from tests.train.updates import check_skipped, check_updates, each_kind

pytestmark = pytest.mark.gpu

SEED = int(os.environ.get("KOS_TEST_SEED", "0")) or int.from_bytes(os.urandom(4), "little")
SHAPES = {
    "odd": LlamaConfig(**sizes(37, 24, 29, 3, 4, 2, 6), max_position_embeddings=512),
    "tied": LlamaConfig(**sizes(200, 256, 344, 2, 4, 1, 64), tie_word_embeddings=True, rope_scaling=SCALING),
    "wide": LlamaConfig(**sizes(1000, 256, 512, 2, 4, 4, 128)),
}
GPT2 = {
    "gpt2": GPT2Config(**sizes(200, 256, 344, 2, 4, 4, 64, 40), tie_word_embeddings=True),
    "odd gpt2": GPT2Config(**sizes(37, 24, 29, 2, 4, 4, 6, 33), tie_word_embeddings=True),
}


@pytest.fixture(scope="module")
def ops():
    return CudaOps(0)


class Pair:
    """One model in float64 and on the device, with the same rounded weights."""

    def __init__(self, ops, config, dtype, gradient_dtype="float32"):
        print(f"KOS_TEST_SEED={SEED}")
        rng = np.random.default_rng(SEED)
        self.config, self.ops = config, ops
        shapes, groups = config.parameter_shapes(), config.fused_groups()
        self.weights = Parameters(shapes, dtype, groups, ops.zeros)
        self.gradients = self.weights.like(gradient_dtype)
        self.gradients.flat.fill_bytes(255, ops.stream)
        values = rng.normal(0, 0.15, self.weights.flat.size)
        self.weights64 = Parameters(shapes, np.float64, groups)
        self.weights64.flat[:] = values
        for name, shape in shapes.items():
            if len(shape) == 1 and name.endswith(".weight"):
                self.weights64[name][:] += 1
        rounded = self.weights64.flat.astype(self.weights.flat.dtype.numpy)
        self.weights.flat.copy_from(rounded, ops.stream)
        self.weights64.flat[:] = rounded
        self.gradients64 = self.weights64.like()
        self.model, self.model64 = Model(config, ops, head_rows=40), Model(config, numpy_ops)
        self.tokens, self.targets = rng.integers(0, config.vocab_size, (2, 3, 33), dtype=np.int32)
        self.targets[rng.random(self.targets.shape) < 0.2] = -1

    def run(self):
        batch = self.tokens, self.targets
        return loss_and_gradients(self.model, self.weights, *batch, self.gradients, accumulate=False)

    def errors(self, gradients):
        """By name, of the gradients in an array of their layout, relative to float64's."""
        flat = gradients.flat if isinstance(gradients.flat, np.ndarray) else gradients.flat.numpy(self.ops.stream)
        return {
            name: np.linalg.norm(flat[span] - self.gradients64.flat[span]) / np.linalg.norm(self.gradients64.flat[span])
            for name, span in self.gradients64.spans.items()
        }

    def error32(self):
        """The largest relative error of numpy's float32, on the same weights and tokens."""
        weights = self.weights64.like(np.float32)
        weights.flat[:] = self.weights64.flat
        gradients = weights.like()
        model = Model(self.config, numpy_ops, head_rows=40)
        loss_and_gradients(model, weights, self.tokens, self.targets, gradients, accumulate=False)
        return max(self.errors(gradients).values())

    def run64(self):
        batch = self.tokens, self.targets
        return loss_and_gradients(self.model64, self.weights64, *batch, self.gradients64, accumulate=False)


@pytest.mark.parametrize("shape", [*SHAPES, *GPT2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_loss_and_gradients(ops, shape, dtype):
    """fp32: within 1e-5, or twice the error of numpy's float32, which some weights bring to as much."""
    pair = Pair(ops, (SHAPES | GPT2)[shape], dtype)
    loss, expected = pair.run(), pair.run64()
    tolerance = max(1e-5, 2 * pair.error32()) if dtype == "float32" else 0.15
    assert loss == pytest.approx(expected, rel=1e-5 / 4 if dtype == "float32" else tolerance / 4)
    errors = pair.errors(pair.gradients)
    worst = max(errors, key=lambda name: errors[name])
    print(f"{shape} {dtype}: loss {loss} ({expected}), worst gradient {worst}: {errors[worst]:.2e}")
    assert not any(np.isnan(error) for error in errors.values()) and errors[worst] < tolerance, worst
    assert pair.model.loss(pair.weights, Batch(pair.tokens, pair.targets)) == pytest.approx(loss, rel=1e-6)
    logits, logits64 = (
        m.logits(w, pair.tokens) for m, w in ((pair.model, pair.weights), (pair.model64, pair.weights64))
    )
    assert np.linalg.norm(logits.astype(np.float64) - logits64) < tolerance * np.linalg.norm(logits64)


@pytest.mark.parametrize("shape", SHAPES)
def test_bfloat16_is_as_near_to_float64_as_torch(ops, shape):
    """The error of all gradients is at most that of the same model in PyTorch's bf16, and none stands out."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs torch with CUDA")
    total = np.zeros(3)
    for _ in range(8 if shape == "odd" else 1):  # so small a model has few errors to average over
        pair = Pair(ops, SHAPES[shape], "bfloat16")
        pair.run(), pair.run64()
        with torch.device("cuda"):
            tensors = {name: torch.tensor(array).bfloat16().requires_grad_() for name, array in pair.weights64.items()}
            logits = torch_llama(torch, pair.config, tensors, torch.tensor(pair.tokens, dtype=torch.int64))
            targets = torch.tensor(pair.targets, dtype=torch.int64).flatten()
            torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets, ignore_index=-1).backward()
        squares = []
        for name, want in pair.gradients64.items():
            ours = pair.gradients[name].numpy(ops.stream) - want
            theirs = tensors[name].grad.double().cpu().numpy() - want
            squares.append([np.sum(ours**2), np.sum(theirs**2), np.sum(want**2)])
            print(name, *np.sqrt(np.divide(squares[-1][:2], squares[-1][2])))
            assert squares[-1][0] <= 4 * squares[-1][1], name
        total += np.sum(squares, axis=0)
    assert total[0] <= total[1]


@pytest.mark.parametrize("shape", ["tied", "wide", "gpt2"])
def test_bfloat16_gradients_are_rounded_once(ops, shape):
    """Of the same pass with fp32 gradients, though the head adds up chunks; lookups come on top of a tied table."""
    single = Pair(ops, (SHAPES | GPT2)[shape], "bfloat16")
    short = Pair(ops, single.config, "bfloat16", "bfloat16")
    for pair in (single, short):
        pair.tokens[:, :9] = 7  # each token occurs once, so gradients of lookups are not sums: exact
    assert -(-short.tokens.size // short.model.head.rows) == 3 and short.run() == single.run()
    for name, gradient in single.gradients.items():
        want, got = (array.numpy(ops.stream).astype(np.float64) for array in (gradient, short.gradients[name]))
        rms = np.linalg.norm(got - want) / np.linalg.norm(want) / 2.0**-8
        print(f"{shape} {name}: {rms:.3f} units")
        # Normal numbers are off by 0.425 units, their root mean square; rounded after each of three chunks, by 0.6.
        twice = math.sqrt(2) if name == single.config.embedding and single.config.tie_word_embeddings else 1
        assert 0 < rms < (0.47 * twice if got.size > 10_000 else 0.6), name


@each_kind
def test_updates(ops, name, master, copy, gradient, kind):
    """As a graph: several matrices of a shape at once, wide, tall and stacked ones; most tensors begin where wide
    accesses may not."""
    print(f"KOS_TEST_SEED={SEED}")
    shapes = {"odd": (3,), "head": (501, 256), "norm": (999,), "wide": (256, 768), "q": (256, 256), "tall": (1024, 256)}
    shapes["stacked.c_attn"] = (768, 256)
    check_updates(ops, np.random.default_rng(SEED), name, master, copy, gradient, kind, shapes, graph=name == "adamw")


@pytest.mark.parametrize("graph", [False, True])
def test_skipped_steps_are_no_updates(ops, graph):
    check_skipped(ops, Parameters({"a": (60, 5)}, "float32", None, ops.zeros), partial(on_gpu, ops), graph)


def on_gpu(ops, rule, weights, schedule, groups, skip):
    return Optimizer(rule, weights, schedule, ops=ops, groups=groups, skip_outliers=skip)


def test_weights_are_rounded_at_random(ops):
    """Steps that only decay, which have one answer: its bits are NumPy's, and over many seeds their mean is right."""
    print(f"KOS_TEST_SEED={SEED}")
    rng, shapes = np.random.default_rng(SEED), {"norm": (5,), "a": (3, 701), "b": (130, 128)}
    weights = Parameters(shapes, "bfloat16", None, ops.zeros)
    gradients = weights.like("float32")
    start = rng.normal(size=weights.flat.size).astype(weights.flat.dtype.numpy)
    places = np.arange(start.size)
    schedule, seeds = LearningRate("constant", 0.01, 0, 9, 0), rng.integers(2**63, size=64)
    exact = start.astype(np.float32)
    exact[5:] *= np.float32(1 - 0.01 * 0.1)
    total = np.zeros(start.size)
    for seed in map(int, seeds):
        weights.flat.copy_from(start, ops.stream)
        optimizer = Optimizer(AdamW(), weights, schedule, ops=ops, seed=seed)
        optimizer.continue_after(7, 7)
        queue(optimizer, gradients)
        got = weights.flat.numpy(ops.stream)
        assert np.array_equal(got, rounded_at_random(exact, seed, 8, places)), f"seed {seed}"
        total += got.astype(np.float64)
    spacing = 2.0 ** (np.floor(np.log2(np.abs(exact))) - 7)
    error = (total / len(seeds) - exact) / spacing  # of what has a spread of at most half a spacing
    assert np.abs(error).max() < 6 * 0.5 / 8 and abs(error[5:].mean()) < 5 * 0.5 / math.sqrt(64 * (start.size - 5))
    assert np.array_equal(got[:5], start[:5]), "what bfloat16 has is not rounded"


def test_weights_that_are_lost_stay_so(ops):
    """A NaN is none of the numbers that its bits and random ones add up to: the GPU's own would be -0."""
    weights = Parameters({"vector": (300,)}, "bfloat16", None, ops.zeros)
    optimizer = Optimizer(AdamW(), weights, LearningRate("constant", 1.0, 0, 9, 0), ops=ops)
    lost = np.full(300, 0x7FFFFFFF, np.uint32).view(np.float32)
    lost[100:200], lost[200:] = np.inf, -np.inf
    optimizer.state["exp_avg"].flat.copy_from(lost, ops.stream)
    queue(optimizer, weights.like("float32"))
    got = weights.flat.numpy(ops.stream).astype(np.float32)
    assert np.isnan(got[:100]).all() and (got[100:200] == -np.inf).all() and (got[200:] == np.inf).all()
