"""Attention on a GPU against the numpy dialect in float64: values, gradients, odd sizes, equal bits, graphs."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from kos import cuda
from kos.cuda.devices import device_info
from kos.dtypes import DTYPES
from kos.memory.arena import Arena
from kos.memory.array import Array
from kos.train.ops import Mask
from kos.train.ops import numpy as reference
from kos.train.ops.cuda import attention as ops
from kos.train.ops.cuda.dialect import CudaOps
from kos.train.parallel import context
from tests.train import masks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(cuda.unavailable() is not None, reason=f"needs a GPU: {cuda.unavailable()}"),
]

# samples, T, heads, kv_heads, head_dim
SHAPES = [
    (1, 1, 1, 1, 128),
    (2, 77, 4, 4, 64),
    (2, 128, 4, 1, 128),
    (1, 333, 8, 2, 128),
    (3, 257, 8, 1, 64),
    (1, 640, 8, 2, 128),
    (2, 512, 3, 3, 64),
]
SMALL = [(2, 65, 4, 2, 48), (1, 130, 4, 1, 128), (1, 40, 2, 2, 200)]
# samples, T, heads, kv_heads, head_dim, the queries of each sample, and the keys of another rank that they all see
TO_OTHERS = [
    (2, 256, 4, 2, 64, (0, 256), (0, 128)),
    (1, 256, 4, 1, 128, (128, 256), (0, 256)),
    (2, 170, 3, 3, 128, (0, 170), (0, 85)),
    (2, 170, 4, 1, 64, (85, 170), (0, 170)),
    (3, 333, 2, 1, 64, (300, 301), (130, 333)),
    (2, 333, 2, 2, 128, (1, 333), (332, 333)),
]
EPSILON = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24}


@pytest.fixture
def stream() -> Any:
    cuda.set_device(0)
    return cuda.create_stream(0)


def launcher(stream: Any) -> CudaOps:
    """Operations that have made nothing that a captured stream may not."""
    ops = CudaOps.__new__(CudaOps)
    ops.__dict__.update(device=0, stream=stream, multiprocessors=device_info(0).multiprocessors, _kernels={})
    return ops


@dataclass
class Case:
    """Random operands on the device, and what they should give, from float64."""

    heads: int
    kv_heads: int
    qkv: Array
    d_out: Array
    out: Array
    log_sum_exp: Array
    d_qkv: Array
    expected: dict[str, np.ndarray]
    mask: Mask | None = None

    def run(self, stream: Any, arena: Arena, **options: Any) -> dict[str, np.ndarray]:
        """All outputs, poisoned beforehand."""
        for array in (self.out, self.log_sum_exp, self.d_qkv):
            array.fill_bytes(255, stream)
        self.launch(stream, arena, **options)
        return self.results(stream)

    def launch(self, stream: Any, arena: Arena, **options: Any) -> None:
        operands, launch = (self.qkv, self.heads, self.kv_heads, self.out, self.log_sum_exp), launcher(stream)
        options["mask"] = self.mask
        ops.attention(*operands, launch, **options)
        ops.attention_backward(
            self.d_out, self.qkv, self.out, self.log_sum_exp, self.heads, self.kv_heads, self.d_qkv, arena, launch,
            **options,
        )  # fmt: skip

    def results(self, stream: Any) -> dict[str, np.ndarray]:
        names = {"out": self.out, "log_sum_exp": self.log_sum_exp, "d_qkv": self.d_qkv}
        return {name: array.numpy(stream) for name, array in names.items()}


def upload(x: np.ndarray, stream: Any) -> Array:
    """``x`` on the device.  Kernels on another stream could run before the copy, even of pageable memory, has ended."""
    return Array.from_numpy(x, 0, stream=stream)


def device_arena(stream: Any) -> Arena:
    return Arena(
        allocate=lambda nbytes: Array.empty(max(nbytes, 1), "uint8", 0, stream=stream),
        view=lambda slab, offset, shape, dtype: Array(slab.pointer + offset, shape, dtype, 0, owner=slab),
    )


def make_case(rng: np.random.Generator, stream: Any, shape: tuple[int, ...], dtype: str, spread: float = 1.0) -> Case:
    samples, length, heads, kv_heads, d = shape
    tokens, width = samples * length, (heads + 2 * kv_heads) * d
    kind = DTYPES[dtype].numpy
    qkv = (rng.standard_normal((tokens, width)) * spread).astype(kind)
    d_out = rng.standard_normal((tokens, heads * d)).astype(kind)
    expected = expect(qkv, d_out, samples, length, heads, kv_heads)
    empty = [Array.empty(s, t, 0, stream=stream) for s, t in (
        ((tokens, heads * d), dtype), ((samples, heads, length), "float32"), ((tokens, width), dtype))]  # fmt: skip
    return Case(heads, kv_heads, upload(qkv, stream), upload(d_out, stream), *empty, expected)


def expect(
    qkv: np.ndarray, d_out: np.ndarray, samples: int, length: int, heads: int, kv_heads: int,
    out: np.ndarray | None = None,
) -> dict[str, np.ndarray]:  # fmt: skip
    """``out``: what the backward pass is given, unless it is the forward's of here, rounded."""
    arena = Arena()
    x, dy, y, dx = (reference.empty_columns(arena, len(qkv), n, np.float64)
                    for n in (qkv.shape[1], d_out.shape[1], d_out.shape[1], qkv.shape[1]))  # fmt: skip
    x[...], dy[...] = qkv.astype(np.float64), d_out.astype(np.float64)
    log_sum_exp = np.empty((samples, heads, length))
    reference.attention(x, heads, kv_heads, y, log_sum_exp, arena)
    stored = reference.empty_columns(arena, *y.shape, np.float64)
    stored[...] = y.astype(qkv.dtype) if out is None else out
    reference.attention_backward(dy, x, stored, log_sum_exp, heads, kv_heads, dx, arena)
    return {"out": y, "log_sum_exp": log_sum_exp, "d_qkv": dx}


def assert_close(case: Case, results: dict[str, np.ndarray], dtype: str, d: int) -> None:
    """Errors as multiples of the dtype's rounding: of every part as a whole, and of each head of each token."""
    epsilon = EPSILON[dtype]
    np.testing.assert_allclose(results["log_sum_exp"], case.expected["log_sum_exp"], rtol=0, atol=2e-5)
    q_end, k_end = case.heads * d, (case.heads + case.kv_heads) * d
    parts = {"out": ("out", slice(None)), "dq": ("d_qkv", slice(0, q_end)),
             "dk": ("d_qkv", slice(q_end, k_end)), "dv": ("d_qkv", slice(k_end, None))}  # fmt: skip
    for name, (array, columns) in parts.items():
        got = results[array][:, columns].astype(np.float64)
        want = np.ascontiguousarray(case.expected[array][:, columns])
        assert np.isfinite(got).all(), f"{name}: not all written"
        size = np.linalg.norm(want)
        if size < 1e-12:  # one token: its q and k have no gradient
            assert np.abs(got).max() < 1e-2
            continue
        error = np.linalg.norm(got - want) / size
        assert error < (2 if dtype != "float32" else 16) * epsilon, f"{name}: {error / epsilon:.2f} epsilon"
        rows = want.reshape(-1, d)
        floor = np.sqrt((rows**2).mean()) * np.sqrt(d)
        worst = (np.linalg.norm(got.reshape(-1, d) - rows, axis=1) / (np.linalg.norm(rows, axis=1) + floor)).max()
        assert worst < (8 if dtype != "float32" else 64) * epsilon, f"{name}: a row with {worst / epsilon:.2f} epsilon"


def families() -> list[str]:
    if cuda.unavailable() is not None:
        return ["mma"]
    return ["mma", "hopper"] if device_info(0).arch == "sm_90a" else ["mma"]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", families())
def test_tensor_cores(rng: np.random.Generator, stream: Any, family: str, dtype: str, shape: tuple[int, ...]) -> None:
    case = make_case(rng, stream, shape, dtype)
    assert_close(case, case.run(stream, device_arena(stream), family=family), dtype, shape[-1])


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("family", families())
def test_random_shapes(rng: np.random.Generator, stream: Any, family: str, d: int) -> None:
    kv_heads, group = (int(x) for x in rng.integers(1, 5, 2))
    shape = (int(rng.integers(1, 4)), int(rng.integers(1, 900)), kv_heads * group, kv_heads, d)
    print(shape)
    test_tensor_cores(rng, stream, family, "bfloat16", shape)


@pytest.mark.skipif("hopper" not in families(), reason="needs a Hopper GPU")
@pytest.mark.parametrize("consumers", [2, 3])
def test_blocks_that_stay(
    rng: np.random.Generator, stream: Any, consumers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More tiles than the GPU has multiprocessors: every block works on several."""
    case = make_case(rng, stream, (3, 300, 32, 4, 64), "bfloat16")
    for array in (case.out, case.log_sum_exp):
        array.fill_bytes(255, stream)
    operands = (case.qkv, case.heads, case.kv_heads, case.out, case.log_sum_exp, launcher(stream))
    monkeypatch.setitem(ops.FORWARD, "CONSUMERS", consumers)
    ops.attention(*operands, family="hopper")
    assert_close(case, {**case.results(stream), "d_qkv": case.expected["d_qkv"]}, "bfloat16", 64)


@pytest.mark.parametrize("shape", SMALL, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_simple(rng: np.random.Generator, stream: Any, dtype: str, shape: tuple[int, ...]) -> None:
    case = make_case(rng, stream, shape, dtype)
    assert_close(case, case.run(stream, device_arena(stream), family="simple"), dtype, shape[-1])


@pytest.mark.parametrize("shape", TO_OTHERS, ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", families())
def test_to_others(rng: np.random.Generator, stream: Any, family: str, dtype: str, shape: tuple[Any, ...]) -> None:
    """Attention to keys of another rank is merged with what is there, and its gradients are added, there alone."""
    check_to_others(rng, stream, family, dtype, shape)


def check_to_others(
    rng: np.random.Generator, stream: Any, family: str, dtype: str, shape: tuple[Any, ...], unlike: bool = False,
    window: int | None = None,
) -> None:  # fmt: skip
    """``unlike``: all scores are far below 0, and the last keys' values far above all others.

    With ``window`` queries and keys are at random positions of a sequence of documents.
    """
    samples, length, heads, kv_heads, d, *parts = shape
    queries, keys = (slice(*part) for part in parts)
    tokens, kind, width = samples * length, DTYPES[dtype].numpy, (heads + 2 * kv_heads) * d

    def some(*shape: int, kind: Any = kind) -> np.ndarray:
        return rng.standard_normal(shape).astype(kind)

    def columns(x: np.ndarray) -> np.ndarray:
        return np.asfortranarray(x.astype(np.float64))

    qkv, kv, d_out = some(tokens, width), some(tokens, 2 * kv_heads * d), some(tokens, heads * d)
    out, lse = some(tokens, heads * d, kind="float32"), 5 + some(samples, heads, length, kind="float32")
    d_qkv, launch = some(tokens, width, kind="float32"), launcher(stream)
    if unlike:
        qkv[:, : heads * d], lse = 1, lse - 300
        kv[:, : kv_heads * d] -= 200 / np.sqrt(d)
        kv.reshape(samples, length, -1)[:, keys][:, -9:, kv_heads * d :] *= 1000
    mask = mask64 = None
    if window is not None:
        positions = masks.random_positions(rng, length)
        starts = masks.random_starts(rng, samples, length, positions[0])
        mask, _ = make_mask(stream, starts, window, samples, *positions)
        mask64 = Mask(*(x.numpy(stream) for x in mask))
    out64, lse64, d_qkv64, kv64 = columns(out), lse.astype(np.float64), columns(d_qkv), columns(kv).T
    with np.errstate(divide="ignore"):
        reference.attention_to(columns(qkv), kv64, heads, kv_heads, queries, keys, out64, lse64, Arena(), mask64)
    on_device = [upload(x, stream) for x in (qkv, kv, out, lse, d_out, d_qkv)]
    qkv_, kv_, out_, lse_, d_out_, d_qkv_ = on_device
    to = ops.Others(kv_, queries, keys)
    ops.attention(qkv_, heads, kv_heads, out_, lse_, launch, mask=mask, to=to, family=family)

    def close(name: str, got: np.ndarray, want: np.ndarray, units: float) -> None:
        error, size = np.linalg.norm(got - want), np.linalg.norm(want)
        print(name, error, size, EPSILON[dtype])
        assert error <= units * EPSILON[dtype] * size, f"{name}: {error / size / EPSILON[dtype]:.2f} epsilon"

    def of(x: np.ndarray, part: slice) -> np.ndarray:
        return x.reshape(samples, length, -1)[:, part]

    units, merged = 16 if dtype == "float32" else 2, out_.numpy(stream)
    np.testing.assert_allclose(lse_.numpy(stream), lse64, rtol=0, atol=1e-3 if unlike else 2e-5)
    close("out", of(merged, queries), of(out64, queries), units)
    merged_kind, d_kv_ = merged.astype(kind), upload(np.zeros(kv.shape, np.float32), stream)
    ops.attention_backward(
        d_out_, qkv_, upload(merged_kind, stream), lse_, heads, kv_heads, d_qkv_, device_arena(stream), launch,
        mask=mask, to=to, d_kv=d_kv_, family=family,
    )  # fmt: skip
    d_kv64 = np.empty(kv64.shape)
    reference.attention_to_backward(
        columns(d_out), columns(qkv), kv64, columns(merged_kind), lse64, heads, kv_heads, queries, keys, d_qkv64,
        d_kv64, Arena(), mask64,
    )  # fmt: skip
    added, d_kv = d_qkv_.numpy(stream), d_kv_.numpy(stream)
    units *= 8 if unlike else 1  # what all keys have in common is not in dq: slopes add up to 0, but for their rounding
    close("dq", of(added - d_qkv, queries)[..., : heads * d], of(d_qkv64 - d_qkv, queries)[..., : heads * d], units)
    for name, half in (("dk", slice(0, kv_heads * d)), ("dv", slice(kv_heads * d, None))):
        close(name, of(d_kv, keys)[..., half], of(d_kv64.T, keys)[..., half], units)
    assert not np.delete(of(d_kv, slice(None)), np.r_[keys], axis=1).any()
    for before, after in ((out, merged), (d_qkv, added)):
        unseen = [np.delete(of(x, slice(None)), np.r_[queries], axis=1) for x in (before, after)]
        np.testing.assert_array_equal(*unseen)
    np.testing.assert_array_equal(added[:, heads * d :], d_qkv[:, heads * d :])


@pytest.mark.parametrize("shape", [(2, 65, 4, 2, 48, (0, 65), (0, 33)), (1, 40, 2, 2, 200, (20, 40), (0, 40))], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_simple_to_others(rng: np.random.Generator, stream: Any, dtype: str, shape: tuple[Any, ...]) -> None:
    test_to_others(rng, stream, "simple", dtype, shape)


@pytest.mark.parametrize("shape", [(1, 170, 2, 1, 64, (85, 170), (0, 170)), (2, 200, 2, 2, 128, (0, 200), (0, 150))])
@pytest.mark.parametrize("family", families())
def test_to_others_unlike(rng: np.random.Generator, stream: Any, family: str, shape: tuple[Any, ...]) -> None:
    """Keys that do not exist have no part, though all scores are lower; any block may have the largest value."""
    check_to_others(rng, stream, family, "bfloat16", shape, unlike=True)


@pytest.mark.parametrize("family", families())
@pytest.mark.parametrize("d", [64, 128])
def test_the_largest_sums_of_others(rng: np.random.Generator, stream: Any, family: str, d: int) -> None:
    """Those of ``test_the_largest_sums``, in the last keys alone."""
    length, small = 256, slice(0, 128)
    sign = np.where(rng.random((length, 1)) < 0.5, -1.0, 1.0)
    kv = np.hstack([3 * sign * np.ones((length, d)), 5 * sign * np.ones((length, d))])
    kv[small] /= 64
    qkv, d_out, out = np.zeros((length, 3 * d)), np.full((length, d), 7.0), np.tile(kv[:, d:].mean(0), (length, 1))
    lse, d_qkv64, d_kv64 = np.full((1, 1, length), np.log(length)), np.zeros(qkv.shape, order="F"), np.empty(kv.T.shape)
    kind, every = DTYPES["bfloat16"].numpy, slice(0, length)
    d_out, out = (x.astype(kind) for x in (d_out, out))
    reference.attention_to_backward(
        *(np.asfortranarray(x.astype(np.float64)) for x in (d_out, qkv)), np.ascontiguousarray(kv.T),
        np.asfortranarray(out.astype(np.float64)), lse, 1, 1, every, every, d_qkv64, d_kv64, Arena(),
    )  # fmt: skip
    of_kind = [upload(x.astype(kind), stream) for x in (d_out, qkv, out, kv)]
    wide = [upload(x.astype(np.float32), stream) for x in (lse, 0 * qkv, 0 * kv)]
    ops.attention_backward(
        *of_kind[:3], wide[0], 1, 1, wide[1], device_arena(stream), launcher(stream),
        to=ops.Others(of_kind[3], every, every), d_kv=wide[2], family=family,
    )  # fmt: skip
    error = np.linalg.norm(wide[1].numpy(stream) - d_qkv64) / np.linalg.norm(d_qkv64)
    assert error < 2 * EPSILON["bfloat16"], f"{error / EPSILON['bfloat16']:.2f} epsilon"


@pytest.mark.parametrize("family", families())
def test_others_that_matter_alone_or_not_at_all(rng: np.random.Generator, stream: Any, family: str) -> None:
    """Their scores are larger, or smaller, than all others' by hundreds: the merge forgets the one or the other."""
    qkv, kv = np.ones((64, 3 * 64)), np.ones((64, 2 * 64))
    kv[:, 64:] = 3
    for size, before, expected in ((1.0, -500.0, 3.0), (1.0, 500.0, 7.0), (16.0, 0.0, 3.0), (-16.0, 0.0, 7.0)):
        kv[:, :64] = size
        on_device = [upload(x.astype(DTYPES["bfloat16"].numpy), stream) for x in (qkv, kv)]
        out, lse = (upload(np.full(s, x, np.float32), stream) for s, x in (((64, 64), 7), ((1, 1, 64), before)))
        to = ops.Others(on_device[1], slice(0, 64), slice(0, 64))
        ops.attention(on_device[0], 1, 1, out, lse, launcher(stream), to=to, family=family)
        np.testing.assert_allclose(out.numpy(stream), np.full((64, 64), expected, np.float32), rtol=1e-5)
        want = max(before, 8 * size + np.log(64))
        np.testing.assert_allclose(lse.numpy(stream), np.full((1, 1, 64), want, np.float32), rtol=1e-6)


@pytest.mark.parametrize("family", families())
def test_equal_bits_to_others(rng: np.random.Generator, stream: Any, family: str) -> None:
    """Run after run, with many blocks at work."""
    samples, length, heads, kv_heads, d = 1, 1000, 16, 4, 64
    tokens, kind = samples * length, DTYPES["bfloat16"].numpy
    counts = (heads + 2 * kv_heads, 2 * kv_heads, heads, heads)
    qkv, kv, d_out, out = (upload(rng.standard_normal((tokens, n * d)).astype(kind), stream) for n in counts)
    lse = upload(np.full((samples, heads, length), 8, np.float32), stream)
    to = ops.Others(kv, slice(500, 1000), slice(0, 1000))
    d_qkv, d_kv = (Array.empty(shape, "float32", 0, stream=stream) for shape in (qkv.shape, kv.shape))
    first, arena = None, device_arena(stream)
    for _ in range(20):
        d_qkv.fill_bytes(0, stream), d_kv.fill_bytes(0, stream)
        ops.attention_backward(
            d_out, qkv, out, lse, heads, kv_heads, d_qkv, arena, launcher(stream), to=to, d_kv=d_kv, family=family
        )
        bits = [x.numpy(stream).view(np.uint32) for x in (d_qkv, d_kv)]
        first = first or bits
        for one, other in zip(first, bits, strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("family", families())
def test_large_scores(rng: np.random.Generator, stream: Any, family: str) -> None:
    """Scores of hundreds: only the shift by the maximum keeps them finite."""
    case = make_case(rng, stream, (1, 200, 2, 2, 64), "bfloat16", spread=8.0)
    results = case.run(stream, device_arena(stream), family=family)
    assert all(np.isfinite(x.astype(np.float32)).all() for x in results.values())
    error = np.linalg.norm(results["out"].astype(np.float64) - case.expected["out"])
    assert error < 2 * EPSILON["bfloat16"] * np.linalg.norm(case.expected["out"])


@pytest.mark.parametrize("family", families())
def test_equal_bits_and_graph(rng: np.random.Generator, stream: Any, family: str) -> None:
    """Run after run, and replayed from a graph, on operands that change between replays."""
    shape = (2, 777, 8, 2, 128)
    case, other = make_case(rng, stream, shape, "bfloat16"), make_case(rng, stream, shape, "bfloat16")
    arena = device_arena(stream)
    first = case.run(stream, arena, family=family)
    second = case.run(stream, arena, family=family)
    with cuda.capture(stream, keep=[case, arena]) as graph:
        case.launch(stream, arena, family=family)
    case.qkv.copy_from(other.qkv, stream)
    graph.replay(stream)
    assert not np.array_equal(case.results(stream)["out"].view(np.uint16), first["out"].view(np.uint16))
    case.qkv.copy_from(upload(case.qkv.numpy(stream), stream), stream)
    replayed, again = case.results(stream), case.run(stream, arena, family=family)
    for a, b in ((first, second), (replayed, again)):
        for name in a:
            np.testing.assert_array_equal(a[name].view(np.uint8), b[name].view(np.uint8))


@pytest.mark.parametrize("d", [64, 128])
def test_equal_bits_many_times(rng: np.random.Generator, stream: Any, d: int) -> None:
    """With many blocks at work; a race once showed in one of a hundred runs."""
    samples, length, heads, kv_heads = 2, 2048, 32, 8
    shapes, kind = [(samples * length, n * d) for n in (heads + 2 * kv_heads, heads)], DTYPES["bfloat16"].numpy
    qkv, d_out = (rng.standard_normal(shape, np.float32).astype(kind) for shape in shapes)
    empty = [Array.empty(s, t, 0, stream=stream) for s, t in (
        (d_out.shape, "bfloat16"), ((samples, heads, length), "float32"), (qkv.shape, "bfloat16"))]  # fmt: skip
    case = Case(heads, kv_heads, upload(qkv, stream), upload(d_out, stream), *empty, {})
    arena = device_arena(stream)
    first = {name: array.view(np.uint16) for name, array in case.run(stream, arena).items()}
    for _ in range(300):
        for name, array in case.run(stream, arena).items():
            assert np.array_equal(array.view(np.uint16), first[name]), name


def test_samples_and_heads_do_not_mix(rng: np.random.Generator, stream: Any) -> None:
    """NaN in one sample and one kv head stays there."""
    case = make_case(rng, stream, (2, 150, 4, 2, 64), "bfloat16")
    clean = case.run(stream, device_arena(stream))
    poisoned = case.qkv.numpy(stream)
    poisoned[150:, 4 * 64 : 5 * 64] = np.nan  # keys of the second sample's first kv head
    case.qkv.copy_from(poisoned, stream)
    results = case.run(stream, device_arena(stream))
    bits = {name: x.view(np.uint16) for name, x in (("new", results["out"]), ("old", clean["out"]))}
    np.testing.assert_array_equal(bits["new"][:150], bits["old"][:150])
    np.testing.assert_array_equal(bits["new"][:, 2 * 64 :], bits["old"][:, 2 * 64 :])
    assert np.isnan(results["out"][150:, : 2 * 64].astype(np.float32)).all()


@pytest.mark.parametrize("family", families())
@pytest.mark.parametrize("d", [64, 128])
def test_the_size_of_gradients_does_not_matter(rng: np.random.Generator, stream: Any, family: str, d: int) -> None:
    """dQ is added up relative to what it can be at most: powers of two less leave the same bits."""
    case = make_case(rng, stream, (1, 300, 4, 2, d), "bfloat16")
    first = case.run(stream, device_arena(stream), family=family)["d_qkv"].astype(np.float32)
    d_out = case.d_out.numpy(stream).astype(np.float32)
    for power in (-100 if family == "hopper" else -60, -20, 40):
        case.d_out.copy_from((d_out * 2.0**power).astype(DTYPES["bfloat16"].numpy), stream)
        scaled = case.run(stream, device_arena(stream), family=family)["d_qkv"].astype(np.float32)
        np.testing.assert_array_equal(scaled, first * np.float32(2.0**power))
    case.d_out.fill_bytes(0, stream)
    assert not case.run(stream, device_arena(stream), family=family)["d_qkv"].astype(np.float32).any()


@pytest.mark.parametrize("family", families())
@pytest.mark.parametrize("d", [64, 128])
def test_the_largest_sums(rng: np.random.Generator, stream: Any, family: str, d: int) -> None:
    """Values, keys and d_out of one direction each, so that a query's dQ is half of what it can be at most."""
    length = 640
    sign = np.where(rng.random((length, 1)) < 0.5, -1.0, 1.0)
    q, k, v = np.zeros((length, d)), 3 * sign * np.ones((length, d)), 5 * sign * np.ones((length, d))
    qkv, d_out = np.hstack([q, k, v]).astype(DTYPES["bfloat16"].numpy), np.full((length, d), 7.0)
    d_out = d_out.astype(DTYPES["bfloat16"].numpy)
    expected = expect(qkv, d_out, 1, length, 1, 1)
    assert np.abs(expected["d_qkv"][-1, :d]).min() * np.sqrt(d) > 0.4 * 2 * 7 * 5 * d * 3  # scores are scaled
    empty = [Array.empty(s, t, 0, stream=stream) for s, t in (
        (d_out.shape, "bfloat16"), ((1, 1, length), "float32"), (qkv.shape, "bfloat16"))]  # fmt: skip
    case = Case(1, 1, upload(qkv, stream), upload(d_out, stream), *empty, expected)
    assert_close(case, case.run(stream, device_arena(stream), family=family), "bfloat16", d)


@pytest.mark.parametrize("family", families())
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize(("key", "value"), [(30, 1e-3), (8, 8)])
def test_a_token_unlike_the_others(
    rng: np.random.Generator, stream: Any, family: str, d: int, key: float, value: float
) -> None:
    """A first token that attracts attention and has little to say, and one that is large altogether."""
    case = make_case(rng, stream, (1, 1500, 4, 2, d), "bfloat16")
    qkv = case.qkv.numpy(stream).astype(np.float64)
    qkv[0, 4 * d : 6 * d] *= key
    qkv[0, 6 * d :] *= value
    qkv = qkv.astype(DTYPES["bfloat16"].numpy)
    case.qkv.copy_from(qkv, stream)
    results = case.run(stream, device_arena(stream), family=family)
    case.expected = expect(qkv, case.d_out.numpy(stream), 1, 1500, 4, 2, results["out"])  # one rounding is much in dQ
    lse = case.expected["log_sum_exp"]
    np.testing.assert_allclose(results["log_sum_exp"], lse, rtol=1e-5, atol=1e-4)  # scores are larger than elsewhere
    assert_close(case, {**results, "log_sum_exp": lse}, "bfloat16", d)


@pytest.mark.parametrize("family", families())
@pytest.mark.parametrize("d", [64, 128])
def test_later_tokens_do_not_matter(rng: np.random.Generator, stream: Any, family: str, d: int) -> None:
    """Not by a bit: neither as keys whose values are huge, nor in what dQ can be at most."""
    case = make_case(rng, stream, (1, 512, 4, 2, d), "bfloat16")
    first = case.run(stream, device_arena(stream), family=family)["d_qkv"].view(np.uint16)
    huge = case.qkv.numpy(stream)
    huge[384:, 6 * d :] *= 4096
    case.qkv.copy_from(huge, stream)
    second = case.run(stream, device_arena(stream), family=family)["d_qkv"].view(np.uint16)
    np.testing.assert_array_equal(second[:384, : 4 * d], first[:384, : 4 * d])
    assert (second[384:, : 4 * d] != first[384:, : 4 * d]).any(axis=1).all()


@pytest.mark.parametrize("family", families())
@pytest.mark.parametrize(
    ("where", "value"), [*itertools.product(["q", "k", "v", "d_out", "out"], [np.nan, np.inf]), ("log_sum_exp", np.nan)]
)
@pytest.mark.parametrize("d", [64, 128])
def test_what_is_not_finite_stays_so(
    rng: np.random.Generator, stream: Any, family: str, where: str, value: float, d: int
) -> None:
    """In dQ too, which is added up in integers: of the queries that see it none is finite, of others all are."""
    length, at = 300, 200
    case = make_case(rng, stream, (1, length, 2, 2, d), "bfloat16")
    target = case.qkv if where in "qkv" else getattr(case, where)
    from_forward = where in ("out", "log_sum_exp")  # as it left them, but for this
    if from_forward:
        case.run(stream, device_arena(stream), family=family)
    poisoned = target.numpy(stream)
    place = (0, 0, at) if where == "log_sum_exp" else (at, {"q": 0, "k": 2, "v": 4}.get(where, 0) * d + 3)
    poisoned[place] = value
    target.copy_from(poisoned, stream)
    arena = device_arena(stream)
    if not from_forward:
        ops.attention(case.qkv, 2, 2, case.out, case.log_sum_exp, launcher(stream), family=family)
    case.d_qkv.fill_bytes(0, stream)
    ops.attention_backward(
        case.d_out, case.qkv, case.out, case.log_sum_exp, 2, 2, case.d_qkv, arena, launcher(stream), family=family
    )
    finite = np.isfinite(case.d_qkv.numpy(stream).astype(np.float32))
    sees = np.arange(length) >= at if where in "kv" else np.arange(length) == at
    assert finite[:128, :d].all() and finite[:, d : 2 * d].all()  # the keys' block of 128 may share one maximum
    assert not finite[sees, :d].all(axis=1).any()


# --- masks -------------------------------------------------------------------------------------------

MASKS = {  # lengths of documents, and the window
    "random documents": ("random", None),
    "documents of one token": ([1], None),
    "documents that end around blocks of 128": ([127, 129, 128, 1], None),
    "documents that end around blocks of 64": ([63, 65, 64, 1, 127, 65], None),
    "one document": ([10_000], None),
    "window of 1": (None, 1),
    "window of 63": (None, 63),
    "window of 64": (None, 64),
    "window of 65": (None, 65),
    "window of 127": (None, 127),
    "window of 128": (None, 128),
    "window of 129": (None, 129),
    "window that is longer than the sample": (None, 10_000),
    "both": ("random", 50),
    "a window across long documents": ([150, 90], 128),
}


def make_starts(rng: np.random.Generator, documents: Any, samples: int, length: int) -> np.ndarray | None:
    if documents is None:
        return None
    if documents == "random":
        return masks.random_starts(rng, samples, length)
    return masks.starts_of(documents, samples, length)


def make_mask(
    stream: Any, starts: np.ndarray | None, window: int | None, samples: int, *positions: np.ndarray
) -> tuple[Mask, Any]:
    """A mask on the device, which is that of NumPy, and the device's starts of documents.

    ``positions``: of the queries and of the keys.
    """
    poison = [np.full((samples, len(at)), -9, np.int32) for at in positions]
    mask, want = Mask(*(upload(x, stream) for x in poison)), Mask(*poison)
    on_device = None if starts is None else upload(starts, stream)
    of_device = [upload(at.astype(np.int32), stream) for at in positions]
    ops.attention_mask(on_device, window, mask, *of_device, launcher(stream))
    reference.attention_mask(starts, window, want, *positions)
    for got, expected in zip(mask, want, strict=True):
        np.testing.assert_array_equal(got.numpy(stream), expected)
    return mask, on_device


def make_masked(
    rng: np.random.Generator, stream: Any, shape: tuple[int, ...], dtype: str, starts: np.ndarray | None,
    window: int | None,
) -> Case:  # fmt: skip
    samples, length, heads, kv_heads, _ = shape
    case, at = make_case(rng, stream, shape, dtype), np.arange(length)
    mask, _ = make_mask(stream, starts, window, samples, at, at)
    qkv, d_out = (x.numpy(stream).astype(np.float64) for x in (case.qkv, case.d_out))
    seen = masks.visible(starts, window, at)
    out, lse, _ = masks.dense_packed(qkv, d_out, samples, heads, kv_heads, seen)
    rounded = out.astype(DTYPES[dtype].numpy).astype(np.float64)
    d_qkv = masks.dense_packed(qkv, d_out, samples, heads, kv_heads, seen, rounded)[2]
    return replace(case, mask=mask, expected={"out": out, "log_sum_exp": lse, "d_qkv": d_qkv})


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("shape", [(2, 77, 4, 4, 64), (1, 333, 8, 2, 128), (2, 640, 4, 1, 64)], ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", families())
def test_masks(
    rng: np.random.Generator, stream: Any, family: str, dtype: str, shape: tuple[int, ...], kind: str
) -> None:
    documents, window = MASKS[kind]
    starts = make_starts(rng, documents, *shape[:2])
    case = make_masked(rng, stream, shape, dtype, starts, window)
    assert_close(case, case.run(stream, device_arena(stream), family=family), dtype, shape[-1])


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_simple_masks(rng: np.random.Generator, stream: Any, dtype: str, kind: str) -> None:
    for shape in SMALL:
        test_masks(rng, stream, "simple", dtype, shape, kind)


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("family", families())
def test_random_masks(rng: np.random.Generator, stream: Any, family: str, d: int) -> None:
    for _ in range(8):
        kv_heads, group = (int(x) for x in rng.integers(1, 4, 2))
        shape = (int(rng.integers(1, 4)), int(rng.integers(1, 700)), kv_heads * group, kv_heads, d)
        starts = masks.random_starts(rng, *shape[:2]) if rng.random() < 0.7 else None
        window = int(rng.integers(1, 300)) if rng.random() < 0.7 else None
        print(shape, window, starts is None)
        case = make_masked(rng, stream, shape, "bfloat16", starts, window)
        assert_close(case, case.run(stream, device_arena(stream), family=family), "bfloat16", d)


# ranks, samples, tokens of a chunk, heads, kv_heads, head_dim
RANKS = [(2, 2, 40, 4, 2, 64), (3, 1, 65, 2, 2, 128), (2, 1, 160, 4, 1, 64), (4, 1, 128, 2, 1, 128)]


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("shape", RANKS, ids=str)
@pytest.mark.parametrize("family", families())
def test_masks_of_zigzag_parts(
    rng: np.random.Generator, stream: Any, family: str, shape: tuple[int, ...], kind: str
) -> None:
    """Each rank's attention to its own keys and to others', with masks of positions, is that of whole sequences."""
    ranks, samples, chunk, heads, kv_heads, d = shape
    (documents, window), length, n, dtype = MASKS[kind], 2 * ranks * chunk, 2 * samples * chunk, "bfloat16"
    starts, kind_of = make_starts(rng, documents, samples, length), DTYPES[dtype].numpy
    places = [np.r_[r * chunk : (r + 1) * chunk, length - (r + 1) * chunk : length - r * chunk] for r in range(ranks)]
    qkv, d_out = (rng.standard_normal((samples, length, m * d)).astype(kind_of) for m in (heads + 2 * kv_heads, heads))
    whole, seen = (samples, heads, kv_heads), masks.visible(starts, window, np.arange(length))
    wide = [x.reshape(samples * length, -1).astype(np.float64) for x in (qkv, d_out)]
    out64, lse64, _ = masks.dense_packed(*wide, *whole, seen)
    d_qkv64 = masks.dense_packed(*wide, *whole, seen, out64.astype(kind_of))[2]

    def of_rank(x: np.ndarray, at: np.ndarray) -> np.ndarray:
        return x.reshape(samples, length, -1)[:, at].reshape(n, -1)

    gradients = [np.zeros((n, qkv.shape[2]), np.float32) for _ in places]
    for rank, at in enumerate(places):
        mine, d_mine = (upload(of_rank(x, at), stream) for x in (qkv, d_out))
        arena, launch = device_arena(stream), launcher(stream)
        of_owner = [make_mask(stream, None if starts is None else starts[:, at], window, samples, at, keys)[0]
                    for keys in places]  # fmt: skip
        empty = [Array.empty(s, t, 0, stream=stream) for s, t in (
            (d_mine.shape, dtype), ((samples, heads, 2 * chunk), "float32"), (mine.shape, dtype))]  # fmt: skip
        case = Case(heads, kv_heads, mine, d_mine, *empty, {}, of_owner[rank])
        for array in empty:
            array.fill_bytes(255, stream)
        ops.attention(mine, heads, kv_heads, case.out, case.log_sum_exp, launch, mask=case.mask, family=family)
        merged, others = upload(case.out.numpy(stream).astype(np.float32), stream), []
        for owner, keys in enumerate(places):
            if owner != rank:
                kv = of_rank(qkv, keys)[:, heads * d :]
                others.append((owner, ops.Others(upload(kv, stream), *context.seen(owner, rank, 2 * chunk))))
        for owner, to in others:
            ops.attention(
                mine, heads, kv_heads, merged, case.log_sum_exp, launch, mask=of_owner[owner], to=to, family=family
            )
        case.out.copy_from(merged.numpy(stream).astype(kind_of), stream)
        got, want = case.out.numpy(stream).astype(np.float64), of_rank(out64, at)
        assert np.linalg.norm(got - want) < 4 * EPSILON[dtype] * np.linalg.norm(want)
        np.testing.assert_allclose(case.log_sum_exp.numpy(stream), lse64[..., at], rtol=0, atol=2e-5)
        forward = (case.d_out, mine, case.out, case.log_sum_exp, heads, kv_heads)
        ops.attention_backward(*forward, case.d_qkv, arena, launch, mask=case.mask, family=family)
        total = upload(case.d_qkv.numpy(stream).astype(np.float32), stream)
        for owner, to in others:
            d_kv = upload(np.zeros(to.kv.shape, np.float32), stream)
            ops.attention_backward(
                *forward, total, arena, launch, mask=of_owner[owner], to=to, d_kv=d_kv, family=family
            )
            gradients[owner][:, heads * d :] += d_kv.numpy(stream)
        gradients[rank] += total.numpy(stream)
    ends = (heads * d, (heads + kv_heads) * d)
    both = (gradients, [of_rank(d_qkv64, at) for at in places])
    for got, want in zip(*(np.split(np.concatenate(x), ends, axis=1) for x in both), strict=True):
        assert np.isfinite(got).all()
        assert np.linalg.norm(got - want) <= 4 * EPSILON[dtype] * np.linalg.norm(want) + 1e-2


@pytest.mark.parametrize("shape", TO_OTHERS, ids=str)
@pytest.mark.parametrize("window", [1, 100, 1000])
@pytest.mark.parametrize("family", families())
def test_masks_to_others(
    rng: np.random.Generator, stream: Any, family: str, window: int, shape: tuple[Any, ...]
) -> None:
    """Any queries and keys of two ranks; many queries see none of the keys."""
    check_to_others(rng, stream, family, "bfloat16", shape, window=window)


@pytest.mark.parametrize("family", families())
def test_one_graph_for_all_masks(rng: np.random.Generator, stream: Any, family: str) -> None:
    """Replayed after new starts of documents are in device memory: equal bits with a launch of its own."""
    samples, length = shape = (2, 520)
    case = make_case(rng, stream, (*shape, 4, 2, 64), "bfloat16")
    starts = [masks.random_starts(rng, *shape) for _ in range(3)]
    mask, of_device = make_mask(stream, starts[0], 200, samples, np.arange(length), np.arange(length))
    case, arena = replace(case, mask=mask), device_arena(stream)
    case.run(stream, arena, family=family)
    with cuda.capture(stream, keep=[case, arena, of_device]) as graph:
        ops.attention_mask(of_device, 200, mask, None, None, launcher(stream))
        case.launch(stream, arena, family=family)
    for changed in starts:
        of_device.copy_from(changed, stream)
        graph.replay(stream)
        replayed = case.results(stream)
        other, _ = make_mask(stream, changed, 200, samples, np.arange(length), np.arange(length))
        again = replace(case, mask=other).run(stream, arena, family=family)
        for name, array in replayed.items():
            np.testing.assert_array_equal(array.view(np.uint8), again[name].view(np.uint8))


@pytest.mark.parametrize("family", families())
@pytest.mark.parametrize("d", [64, 128])
def test_other_documents_do_not_matter(rng: np.random.Generator, stream: Any, family: str, d: int) -> None:
    """Not by a bit, however large and not finite they are: the documents are whole blocks."""
    length, document = 384, slice(128, 256)
    starts = masks.starts_of([128], 1, length)
    case = make_masked(rng, stream, (1, length, 2, 1, d), "bfloat16", starts, None)
    first = case.run(stream, device_arena(stream), family=family)
    for value in (4096.0, np.nan):
        huge = case.qkv.numpy(stream)
        huge[document] *= DTYPES["bfloat16"].numpy.type(value) if value == value else np.nan
        case.qkv.copy_from(huge, stream)
        second = case.run(stream, device_arena(stream), family=family)
        for name in ("out", "d_qkv"):
            others = [np.delete(x[name].view(np.uint16), document, axis=0) for x in (first, second)]
            np.testing.assert_array_equal(*others)
        others = [np.delete(x["log_sum_exp"], document, axis=2) for x in (first, second)]
        np.testing.assert_array_equal(*others)


@pytest.mark.parametrize("family", families())
def test_a_mask_of_everything_changes_no_bit(rng: np.random.Generator, stream: Any, family: str) -> None:
    case = make_case(rng, stream, (1, 150, 2, 1, 64), "bfloat16")
    arena, at = device_arena(stream), np.arange(150)
    plain = case.run(stream, arena, family=family)
    mask, _ = make_mask(stream, None, 10_000, 1, at, at)
    masked = replace(case, mask=mask).run(stream, arena, family=family)
    for name, array in plain.items():
        np.testing.assert_array_equal(array.view(np.uint8), masked[name].view(np.uint8))
