"""The operations of the compiled core against those of NumPy in float64, which the core leaves to NumPy."""

import os
import subprocess
import sys
import threading

import numpy as np
import pytest

from kos.memory.arena import Arena
from kos.train.ops import Attend, Mask, Normalize, compiled
from kos.train.ops import numpy as ops
from kos.train.optim.adamw import AdamW
from tests.train.cpu_ops import columns, poisoned_slab
from tests.train.masks import random_starts

pytestmark = pytest.mark.skipif(not compiled.native, reason="needs the compiled core")

RELATIVE = 3e-6  # of the largest number of an output


EACH = [(kernels, threads) for kernels in compiled.KERNELS for threads in (1, 3)]


@pytest.fixture(params=EACH, ids=str, autouse=True)
def _kernels(request):
    """Each instruction set that this CPU has, on one thread and on several."""
    kernels, threads = request.param
    compiled.native.kernels(kernels)
    compiled.use_threads(threads)
    yield
    compiled.native.kernels(compiled.KERNELS[-1])
    compiled.use_threads(1)


def both(compute, *inputs):
    """What ``compute`` returns of float32 inputs, on poisoned memory, and that of the same numbers in float64."""
    narrow = [x.astype(np.float32, order="K") for x in inputs]
    wide = [x.astype(np.float64, order="K") for x in narrow]
    return compute(Arena(0, poisoned_slab), *narrow), compute(Arena(0, poisoned_slab), *wide)


def check(results, expected):
    for got, reference in zip(results, expected, strict=True):
        assert got.dtype == np.float32 and reference.dtype == np.float64, "not by the compiled core"
        np.testing.assert_allclose(got, reference, rtol=0, atol=RELATIVE * max(1, np.abs(reference).max()))


def only_compiled(monkeypatch, *names):
    """Fail if the core leaves float32 to NumPy."""
    for name in names:
        real = getattr(compiled, name)

        def taken(*arguments, real=real, name=name):
            done = real(*arguments)
            arrays = [x for x in (arguments[0], getattr(arguments[0], "qkv", None)) if isinstance(x, np.ndarray)]
            assert done == (arrays[0].dtype == np.float32), name
            return done

        monkeypatch.setattr(compiled, name, taken)


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (70, 48), (257, 100), (130, 256)])
@pytest.mark.parametrize("accumulate", [False, True])
def test_rms_norm(rng, monkeypatch, shape, accumulate):
    only_compiled(monkeypatch, "normalize", "normalize_backward")

    def compute(arena, x, weight, d_out, dx, d_weight):
        out, rstd = np.full_like(x, np.nan), np.full_like(x, np.nan, shape=len(x))
        ops.normalize(x, Normalize(weight, 1e-5), out, rstd)
        results = dx.copy(), d_weight.copy() if accumulate else np.full_like(d_weight, np.nan)
        ops.normalize_backward(d_out.copy(), x, Normalize(weight, 1e-5), rstd, *results, accumulate, arena)
        return out, rstd, *results

    x, weight, d_out, dx = (rng.normal(size=size) for size in (shape, shape[1], shape, shape))
    check(*both(compute, x, weight, d_out, dx, weight))


@pytest.mark.parametrize("shape", [(1, 1), (5, 3), (40, 31), (333, 100)])
def test_swiglu(rng, monkeypatch, shape):
    only_compiled(monkeypatch, "swiglu", "swiglu_backward")
    gate_up, d_out = (columns(rng.normal(size=(shape[0], factor * shape[1])) * 4) for factor in (2, 1))
    gate_up.flat[:2] = [-95, 95]  # where exp overflows float32

    def compute(arena, gate_up, d_out):
        out, d_gate_up = np.full_like(d_out, np.nan), np.full_like(gate_up, np.nan)
        ops.swiglu(gate_up, out, arena)
        ops.swiglu_backward(d_out, gate_up, None, d_gate_up, arena)
        return out, d_gate_up

    check(*both(compute, gate_up, d_out))


@pytest.mark.parametrize(("samples", "length", "heads", "head_dim"), [(1, 1, 1, 2), (3, 37, 3, 6), (2, 64, 4, 32)])
def test_rope(rng, monkeypatch, samples, length, heads, head_dim):
    only_compiled(monkeypatch, "rope")
    frequencies = 10_000 ** -np.linspace(0, 1, head_dim // 2)

    def compute(arena, qkv):
        tables = ops.rope_tables(frequencies, range(length), qkv.dtype)
        forward, back = qkv.copy(order="K"), qkv.copy(order="K")
        ops.rope(forward, tables, head_dim, heads, arena)
        ops.rope_backward(back, tables, head_dim, heads, arena)
        return forward, back

    check(*both(compute, columns(rng.normal(size=(samples * length, (heads + 1) * head_dim)))))


@pytest.mark.parametrize("shape", [(1, 1), (7, 3), (65, 100), (130, 1000)])
@pytest.mark.parametrize("backward", [False, True])
def test_cross_entropy(rng, monkeypatch, shape, backward):
    only_compiled(monkeypatch, "cross_entropy")
    targets = rng.integers(-1, shape[1], shape[0]).astype(np.int32)

    def compute(arena, logits):
        losses, count = np.full_like(logits, np.nan, shape=shape[0]), np.array([3], logits.dtype)
        gradient = logits.copy()
        ops.cross_entropy(gradient, targets, count if backward else None, losses, arena)
        return (losses, gradient) if backward else (losses,)

    logits = rng.normal(size=shape) * 20
    check(*both(compute, logits))


def test_cross_entropy_of_what_is_not_finite(rng):
    for bad in (np.nan, np.inf):
        logits, losses = np.ones((2, 40), np.float32), np.zeros(2, np.float32)
        logits[1, 37] = bad
        ops.cross_entropy(logits, np.array([3, 3], np.int32), np.ones(1, np.float32), losses, Arena())
        assert np.isfinite(losses[0]) and np.isfinite(logits[0]).all()
        assert np.isnan(losses[1])


@pytest.mark.parametrize("size", [1, 50, 40_001])
def test_adamw(rng, monkeypatch, size):
    only_compiled(monkeypatch, "adamw")
    rule = AdamW((0.9, 0.95), 1e-8)

    def compute(arena, w, g, m, v):
        results = w.copy(), m.copy(), v.copy()
        rule.step(3, 1e-2, 0.1)(results[0], g.copy(), results[1:], np.full_like(g, np.nan))
        return results

    w, g, m = (rng.normal(size=size) for _ in range(3))
    check(*both(compute, w, g, m, rng.random(size)))


SHAPES = [  # samples, tokens, heads, kv_heads, head_dim
    (1, 1, 1, 1, 2), (2, 5, 2, 1, 4), (3, 64, 4, 2, 16), (2, 65, 2, 2, 20), (1, 130, 6, 2, 32), (2, 200, 3, 1, 48),
]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("masked", ["no mask", "documents", "window"])
def test_attention(rng, monkeypatch, shape, masked):
    only_compiled(monkeypatch, "attention", "attention_backward")
    samples, length, heads, kv_heads, d = shape
    mask = None
    if masked != "no mask":
        mask = Mask(*(np.zeros((samples, length), np.int32) for _ in range(2)))
        starts = random_starts(rng, samples, length) if masked == "documents" else None
        ops.attention_mask(starts, None if starts is not None else 7, mask)

    def compute(arena, qkv, d_out):
        out, d_qkv = np.full_like(d_out, np.nan), np.full_like(qkv, np.nan)
        lse = np.full_like(qkv, np.nan, shape=(samples, heads, length))
        attend = Attend(qkv, heads, kv_heads, out, lse, mask)
        ops.attention(attend, arena)
        ops.attention_backward(attend, d_out.copy(order="K"), d_qkv, arena)
        return out, lse, d_qkv

    qkv = columns(2 * rng.normal(size=(samples * length, (heads + 2 * kv_heads) * d)))
    check(*both(compute, qkv, columns(rng.normal(size=(samples * length, heads * d)))))


def test_attention_of_some_samples_writes_theirs_alone(rng):
    """``Attend.of`` is a view: its rows are contiguous, and others lie between them."""
    samples, length, heads, d = 3, 33, 2, 8
    qkv = columns(rng.normal(size=(samples * length, 3 * heads * d)).astype(np.float32))
    outs = [np.full_like(qkv, np.nan, shape=(len(qkv), heads * d)) for _ in range(2)]
    lses = [np.full((samples, heads, length), np.nan, np.float32) for _ in range(2)]
    whole, part = (Attend(qkv, heads, heads, out, lse) for out, lse in zip(outs, lses, strict=True))
    assert compiled.attention(whole)
    assert compiled.attention(part.of(slice(length, 2 * length), slice(1, 2)))
    np.testing.assert_array_equal(outs[1][length : 2 * length], outs[0][length : 2 * length])
    np.testing.assert_array_equal(lses[1][1], lses[0][1])
    assert np.isnan(outs[1][:length]).all() and np.isnan(outs[1][2 * length :]).all() and np.isnan(lses[1][::2]).all()


def test_the_number_of_threads_changes_no_bit(rng):
    samples, length, heads, d = 4, 70, 4, 16
    qkv = columns(rng.normal(size=(samples * length, 3 * heads * d)).astype(np.float32))
    x, weight = qkv.copy(), rng.normal(size=qkv.shape[1]).astype(np.float32)
    found = []
    for threads in (1, 2, 5):
        compiled.use_threads(threads)
        out, d_qkv, lse = (np.empty_like(qkv, shape=s) for s in ((len(qkv), heads * d), qkv.shape, (4, heads, length)))
        attend = Attend(qkv, heads, heads, out, lse)
        ops.attention(attend, Arena())
        ops.attention_backward(attend, out, d_qkv, Arena())
        dx, d_weight = np.zeros(x.shape, np.float32), np.empty_like(weight)
        rstd = np.ones(len(x), np.float32)
        compiled.normalize_backward(x, x, Normalize(weight, 1e-5), rstd, dx, d_weight, False, Arena())
        found.append([out, d_qkv, lse, dx, d_weight])
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            np.testing.assert_array_equal(a, b)


def test_arrays_that_do_not_fit_are_left_to_numpy_or_refused_there(rng):
    a, b = (np.zeros(size, np.float32) for size in (4, 5))
    assert not compiled.swiglu(a, a, b)
    assert not compiled.swiglu(a[::2], a[::2], a[:2].copy())
    assert not compiled.swiglu(a, a.astype(np.float64), a)
    a.flags.writeable = False
    assert not compiled.swiglu(a, a, a)
    logits, losses = np.zeros((2, 3), np.float32), np.zeros(2, np.float32)
    assert not compiled.cross_entropy(logits, np.array([0, 3], np.int32), None, losses)
    assert not compiled.cross_entropy(logits, np.array([0, 1]), None, losses)  # int64


def test_threads_of_a_program_compute_at_once(rng):
    """One of them has the pool, the others compute alone."""
    compiled.use_threads(2)
    gates = rng.normal(size=100_000).astype(np.float32)
    outs = [np.empty_like(gates) for _ in range(4)]

    def compute(out):
        for _ in range(20):
            assert compiled.swiglu(gates, gates, out)

    threads = [threading.Thread(target=compute, args=(out,)) for out in outs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for out in outs[1:]:
        np.testing.assert_array_equal(out, outs[0])


def test_a_forked_process_computes_too(rng):
    compiled.use_threads(3)
    gates = rng.normal(size=100_000).astype(np.float32)
    out, again = np.empty_like(gates), np.empty_like(gates)
    assert compiled.swiglu(gates, gates, out)
    if (child := os.fork()) == 0:
        compiled.swiglu(gates, gates, again)
        os._exit(0 if (again == out).all() else 1)
    assert os.waitpid(child, 0)[1] == 0


WITHOUT_MEMORY = """
import resource, numpy as np
from kos._core import native
tokens = 1 << 21  # whose keys and values take 1 GiB
qkv, out, lse = (np.zeros(shape, np.float32) for shape in ((192, tokens), (64, tokens), (1, 1, tokens)))
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), resource.RLIM_INFINITY))
try:
    native.attention(qkv, out, lse, np.empty(0, np.int32), 1, 1, 0.1)
except MemoryError:
    print("refused", end="")
"""


def test_attention_without_memory():
    done = subprocess.run([sys.executable, "-c", WITHOUT_MEMORY], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == ("refused", 0), done.stderr
