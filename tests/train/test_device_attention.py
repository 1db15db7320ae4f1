"""Attention on GPUs, also emulated, against NumPy's in float64: values, gradients, odd sizes, equal bits, graphs."""

from itertools import product

import numpy as np
import pytest

from kos.dtypes import DTYPES
from kos.memory.arena import Arena
from kos.memory.array import Array
from kos.train.ops import Attend
from kos.train.ops import numpy as reference
from kos.train.ops.cuda import attention as ops
from tests.train import attention_cases as cases
from tests.train.attention_cases import EMULATED, SETS, on_devices, stream

__all__ = ["stream"]

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


EMULATED_SHAPES = {"mma": (2, 77, 4, 2, 64), "hopper": (1, 130, 1, 1, 128)}


@on_devices("kernels dtype shape", product(SETS, ["bfloat16", "float16"], SHAPES),
            [(kernels, "bfloat16", shape) for kernels, shape in EMULATED_SHAPES.items()],
            [(kernels, "bfloat16", EMULATED_SHAPES[other]) for kernels, other in (EMULATED, EMULATED[::-1])])
def test_tensor_cores(rng, stream, kernels, dtype, shape):
    case = cases.make_case(rng, stream, shape, dtype)
    cases.assert_close(case, case.run(stream, cases.device_arena(stream), kernels=kernels), dtype, shape[-1])


OTHER_SIZES = [each for each in product(SETS, (16, 48, 80, 96, 112, 160, 256)) if each[1] <= ops.MOST_HEAD_DIM[each[0]]]
"""The sets of kernels, and head sizes other than 64 and 128."""
EMULATED_SIZES = [("mma", 80), ("hopper", 80), ("mma", 256)]
MORE_SIZES = [("hopper", 16), ("hopper", 48), ("hopper", 112), ("mma", 48), ("mma", 160)]


@on_devices("kernels d", OTHER_SIZES, EMULATED_SIZES, MORE_SIZES)
def test_other_head_sizes(rng, stream, kernels, d):
    case = cases.make_case(rng, stream, (2 if stream else 1, 150, 2, 1, d), "bfloat16")
    cases.assert_close(case, case.run(stream, cases.device_arena(stream), kernels=kernels), "bfloat16", d)


@on_devices("kernels d windows", [(*each, (None, 40)) for each in OTHER_SIZES], (), [
    ("mma", 80, (40,)), ("mma", 256, (None,)), ("hopper", 16, (40,)), ("hopper", 80, (None,)), ("hopper", 112, (40,)),
])  # fmt: skip
def test_other_head_sizes_to_others(rng, stream, kernels, d, windows):
    """Of documents in a window, too."""
    samples = 2 if stream else 1
    for window in windows:
        shape = (samples, 150, 2, 1, d, (70, 150), (3, 140))
        cases.check_to_others(rng, stream, kernels, "bfloat16", shape, window=window)


@on_devices("d", product([128, 256]), (), product([128, 256]))
def test_tiles_of_gpus_with_little_shared_memory(rng, stream, d, monkeypatch):
    monkeypatch.setattr(ops, "MMA", 2 * ops.MMA[-1:])
    test_other_head_sizes(rng, stream, "mma", d)


def test_tiles_fit_into_shared_memory():
    """Of Ampere's and Ada's small GPUs, an A100 and a Hopper."""
    for memory, (warps, step) in {99 << 10: (4, 16), 163 << 10: (8, 16), 227 << 10: (8, 32)}.items():
        for d in range(16, 257, 16):
            tiles, shared = ops.mma_tiles(d, memory)
            assert 0 < max(shared) <= memory, (d, tiles)
        assert (tiles["WARPS"], tiles["STEP"]) == (warps, step)


@on_devices("kernels", product(SETS), product(EMULATED))
def test_large_scores(rng, stream, kernels):
    """Scores of hundreds, in several blocks of keys: only the shift by the largest so far keeps them finite."""
    case = cases.make_case(rng, stream, (1, 200, 1, 1, 64), "bfloat16", spread=16.0)
    ops.attention(case.attend, cases.launcher(stream, kernels))
    got, expected = case.attend.out.numpy(stream).astype(np.float64), case.expected["out"]
    assert np.linalg.norm(got - expected) < 2 * cases.EPSILON["bfloat16"] * np.linalg.norm(expected)


@pytest.mark.skipif("hopper" not in SETS, reason="needs a Hopper GPU")
@on_devices("consumers", [(2,), (3,)])
def test_blocks_that_stay(rng, stream, consumers, monkeypatch):
    """More tiles than the GPU has multiprocessors: every block works on several."""
    case = cases.make_case(rng, stream, (3, 300, 32, 4, 64), "bfloat16")
    for array in (case.attend.out, case.attend.log_sum_exp):
        array.fill_bytes(255, stream)
    monkeypatch.setitem(ops.FORWARD, "CONSUMERS", consumers)
    ops.attention(case.attend, cases.launcher(stream, "hopper"))
    cases.assert_close(case, {**case.results(stream), "d_qkv": case.expected["d_qkv"]}, "bfloat16", 64)


@on_devices("dtype shape", *(product(["float32", "bfloat16"], shapes) for shapes in (cases.SMALL, [(2, 9, 4, 2, 40)])))
def test_simple(rng, stream, dtype, shape):
    case = cases.make_case(rng, stream, shape, dtype)
    cases.assert_close(case, case.run(stream, cases.device_arena(stream), kernels="simple"), dtype, shape[-1])


TO_OTHERS = {  # the sets of kernels that are quick enough
    (2, 150, 2, 1, 64, (75, 150), (0, 150)): (),
    (1, 140, 1, 1, 128, (0, 140), (0, 70)): ("mma",),
    (2, 140, 1, 1, 64, (3, 140), (131, 132)): EMULATED,
    (1, 256, 2, 1, 64, (0, 128), (0, 256)): ("hopper",),
}


@on_devices("kernels dtype shape", product(SETS, ["bfloat16", "float16"], cases.TO_OTHERS), *(
    [(each, "bfloat16", shape) for shape, sets in TO_OTHERS.items() for each in EMULATED if (each in sets) is quick]
    for quick in (True, False)
))
def test_to_others(rng, stream, kernels, dtype, shape):
    """Attention to keys of another rank is merged with what is there, and its gradients are added, there alone."""
    cases.check_to_others(rng, stream, kernels, dtype, shape)


@on_devices("dtype shape", *(product(["float32", "bfloat16"], shapes) for shapes in (
    [(2, 65, 4, 2, 48, (0, 65), (0, 33)), (1, 40, 2, 2, 200, (20, 40), (0, 40))], [(2, 10, 4, 2, 40, (5, 10), (0, 9))],
)))
def test_simple_to_others(rng, stream, dtype, shape):
    test_to_others(rng, stream, "simple", dtype, shape)


@on_devices(
    "kernels shape", product(SETS, [(1, 170, 2, 1, 64, (85, 170), (0, 170)), (2, 200, 2, 2, 128, (0, 200), (0, 150))]),
    [*product(EMULATED, [(1, 150, 2, 1, 64, (75, 150), (0, 150))]), ("simple", (2, 10, 4, 2, 40, (5, 10), (0, 9)))],
)
def test_to_others_unlike(rng, stream, kernels, shape):
    """Keys that do not exist have no part, though all scores are lower; any block may have the largest value."""
    cases.check_to_others(rng, stream, kernels, "bfloat16", shape, unlike=True)


@on_devices("kernels d", product(SETS, [64, 128]), product(EMULATED, [64]))
def test_the_largest_sums_of_others(rng, stream, kernels, d):
    """Those of ``test_the_largest_sums``, in the last keys alone."""
    length, small = 256, slice(0, 128)
    sign = np.where(rng.random((length, 1)) < 0.5, -1.0, 1.0)
    kv = np.hstack([3 * sign * np.ones((length, d)), 5 * sign * np.ones((length, d))])
    kv[small] /= 64
    qkv, d_out, out = np.zeros((length, 3 * d)), np.full((length, d), 7.0), np.tile(kv[:, d:].mean(0), (length, 1))
    lse, d_qkv64, d_kv64 = np.full((1, 1, length), np.log(length)), np.zeros(qkv.shape, order="F"), np.empty(kv.T.shape)
    kind, every = DTYPES["bfloat16"].numpy, slice(0, length)
    d_out, out = (x.astype(kind) for x in (d_out, out))
    d_out64, qkv64, out64 = (np.asfortranarray(x.astype(np.float64)) for x in (d_out, qkv, out))
    attend64 = Attend(qkv64, 1, 1, out64, lse).to(np.ascontiguousarray(kv.T), every, every)
    reference.attention_backward(attend64, d_out64, d_qkv64, Arena(), d_kv64)
    d_out_, qkv_, out_, kv_ = (cases.upload(x.astype(kind), stream) for x in (d_out, qkv, out, kv))
    lse_, d_qkv, d_kv = (cases.upload(x.astype(np.float32), stream) for x in (lse, 0 * qkv, 0 * kv))
    attend, arena = Attend(qkv_, 1, 1, out_, lse_).to(kv_, every, every), cases.device_arena(stream)
    ops.attention_backward(attend, d_out_, d_qkv, arena, cases.launcher(stream, kernels), d_kv)
    error = np.linalg.norm(d_qkv.numpy(stream) - d_qkv64) / np.linalg.norm(d_qkv64)
    assert error < 2 * cases.EPSILON["bfloat16"], f"{error / cases.EPSILON['bfloat16']:.2f} epsilon"


@on_devices("kernels", product(SETS), product([*EMULATED, "simple"]))
def test_others_that_matter_alone_or_not_at_all(rng, stream, kernels):
    """Their scores are larger, or smaller, than all others' by hundreds: the merge forgets the one or the other."""
    qkv, kv = np.ones((64, 3 * 64)), np.ones((64, 2 * 64))
    kv[:, 64:] = 3
    for size, before, expected in ((1.0, -500.0, 3.0), (1.0, 500.0, 7.0), (16.0, 0.0, 3.0), (-16.0, 0.0, 7.0)):
        kv[:, :64] = size
        on_device = [cases.upload(x.astype(DTYPES["bfloat16"].numpy), stream) for x in (qkv, kv)]
        out, lse = (cases.upload(np.full(s, x, np.float32), stream) for s, x in (((64, 64), 7), ((1, 1, 64), before)))
        attend = Attend(on_device[0], 1, 1, out, lse).to(on_device[1], slice(0, 64), slice(0, 64))
        ops.attention(attend, cases.launcher(stream, kernels))
        np.testing.assert_allclose(out.numpy(stream), np.full((64, 64), expected, np.float32), rtol=1e-5)
        want = max(before, 8 * size + np.log(64))
        np.testing.assert_allclose(lse.numpy(stream), np.full((1, 1, 64), want, np.float32), rtol=1e-6)


@on_devices("kernels", product(SETS))
def test_equal_bits_to_others(rng, stream, kernels):
    """Run after run, with many blocks at work."""
    samples, length, heads, kv_heads, d = 1, 1000, 16, 4, 64
    tokens, kind = samples * length, DTYPES["bfloat16"].numpy
    counts = (heads + 2 * kv_heads, 2 * kv_heads, heads, heads)
    qkv, kv, d_out, out = (cases.upload(rng.standard_normal((tokens, n * d)).astype(kind), stream) for n in counts)
    lse = cases.upload(np.full((samples, heads, length), 8, np.float32), stream)
    attend = Attend(qkv, heads, kv_heads, out, lse).to(kv, slice(500, 1000), slice(0, 1000))
    d_qkv, d_kv = (Array.empty(shape, "float32", 0, stream=stream) for shape in (qkv.shape, kv.shape))
    first, arena = None, cases.device_arena(stream)
    for _ in range(20):
        d_qkv.fill_bytes(0, stream), d_kv.fill_bytes(0, stream)
        ops.attention_backward(attend, d_out, d_qkv, arena, cases.launcher(stream, kernels), d_kv)
        bits = [x.numpy(stream).view(np.uint32) for x in (d_qkv, d_kv)]
        first = first or bits
        for one, other in zip(first, bits, strict=True):
            np.testing.assert_array_equal(one, other)


@on_devices("d", product([64, 80, 128, 256]))
def test_equal_bits_many_times(rng, stream, d):
    """With many blocks at work; a race once showed in one of a hundred runs."""
    samples, length, heads, kv_heads = 2, 2048, 32, 8
    shapes, kind = [(samples * length, n * d) for n in (heads + 2 * kv_heads, heads)], DTYPES["bfloat16"].numpy
    qkv, d_out = (rng.standard_normal(shape, np.float32).astype(kind) for shape in shapes)
    case = cases.on_device(stream, cases.on_host(qkv, samples, heads, kv_heads), d_out, {})
    arena = cases.device_arena(stream)
    first = {name: array.view(np.uint16) for name, array in case.run(stream, arena).items()}
    for _ in range(300):
        for name, array in case.run(stream, arena).items():
            assert np.array_equal(array.view(np.uint16), first[name]), name


@on_devices("kernels d", product(SETS, [64, 80, 128]))
def test_the_size_of_gradients_does_not_matter(rng, stream, kernels, d):
    """dQ is added up relative to what it can be at most: powers of two less leave the same bits."""
    case = cases.make_case(rng, stream, (1, 300, 4, 2, d), "bfloat16")
    first = case.run(stream, cases.device_arena(stream), kernels=kernels)["d_qkv"].astype(np.float32)
    d_out = case.d_out.numpy(stream).astype(np.float32)
    for power in (-100 if kernels == "hopper" else -60, -20, 40):
        case.d_out.copy_from((d_out * 2.0**power).astype(DTYPES["bfloat16"].numpy), stream)
        scaled = case.run(stream, cases.device_arena(stream), kernels=kernels)["d_qkv"].astype(np.float32)
        np.testing.assert_array_equal(scaled, first * np.float32(2.0**power))
    case.d_out.fill_bytes(0, stream)
    assert not case.run(stream, cases.device_arena(stream), kernels=kernels)["d_qkv"].astype(np.float32).any()


@on_devices("kernels d", product(SETS, [64, 80, 128]))
def test_the_largest_sums(rng, stream, kernels, d):
    """Values, keys and d_out of one direction each, so that a query's dQ is half of what it can be at most."""
    length = 640
    sign = np.where(rng.random((length, 1)) < 0.5, -1.0, 1.0)
    q, k, v = np.zeros((length, d)), 3 * sign * np.ones((length, d)), 5 * sign * np.ones((length, d))
    qkv, d_out = np.hstack([q, k, v]).astype(DTYPES["bfloat16"].numpy), np.full((length, d), 7.0)
    d_out = d_out.astype(DTYPES["bfloat16"].numpy)
    expected = cases.expect(attend := cases.on_host(qkv, 1, 1, 1), d_out)
    assert np.abs(expected["d_qkv"][-1, :d]).min() * np.sqrt(d) > 0.4 * 2 * 7 * 5 * d * 3  # scores are scaled
    case = cases.on_device(stream, attend, d_out, expected)
    cases.assert_close(case, case.run(stream, cases.device_arena(stream), kernels=kernels), "bfloat16", d)


@pytest.mark.parametrize(("key", "value"), [(30, 1e-3), (8, 8)])
@on_devices("kernels d", product(SETS, [64, 128]))
def test_a_token_unlike_the_others(rng, stream, kernels, d, key, value):
    """A first token that attracts attention and has little to say, and one that is large altogether."""
    case = cases.make_case(rng, stream, (1, 1500, 4, 2, d), "bfloat16")
    qkv = case.attend.qkv.numpy(stream).astype(np.float64)
    qkv[0, 4 * d : 6 * d] *= key
    qkv[0, 6 * d :] *= value
    qkv = qkv.astype(DTYPES["bfloat16"].numpy)
    case.attend.qkv.copy_from(qkv, stream)
    results = case.run(stream, cases.device_arena(stream), kernels=kernels)
    # One rounding is much in dQ.
    case.expected = cases.expect(cases.on_host(qkv, 1, 4, 2), case.d_out.numpy(stream), results["out"])
    lse = case.expected["log_sum_exp"]
    np.testing.assert_allclose(results["log_sum_exp"], lse, rtol=1e-5, atol=1e-4)  # scores are larger than elsewhere
    cases.assert_close(case, {**results, "log_sum_exp": lse}, "bfloat16", d)


@on_devices("kernels d", product(SETS, [64, 80, 128]))
def test_later_tokens_do_not_matter(rng, stream, kernels, d):
    """Not by a bit: neither as keys whose values are huge, nor in what dQ can be at most."""
    case = cases.make_case(rng, stream, (1, 512, 4, 2, d), "bfloat16")
    first = case.run(stream, cases.device_arena(stream), kernels=kernels)["d_qkv"].view(np.uint16)
    huge = case.attend.qkv.numpy(stream)
    huge[384:, 6 * d :] *= 4096
    case.attend.qkv.copy_from(huge, stream)
    second = case.run(stream, cases.device_arena(stream), kernels=kernels)["d_qkv"].view(np.uint16)
    np.testing.assert_array_equal(second[:384, : 4 * d], first[:384, : 4 * d])
    assert (second[384:, : 4 * d] != first[384:, : 4 * d]).any(axis=1).all()


@pytest.mark.parametrize(
    ("where", "value"), [*product(["q", "k", "v", "d_out", "out"], [np.nan, np.inf]), ("log_sum_exp", np.nan)]
)
@on_devices("kernels d", product(SETS, [64, 128]))
def test_what_is_not_finite_stays_so(rng, stream, kernels, where, value, d):
    """In dQ too, which is added up in integers: of the queries that see it none is finite, of others all are."""
    length, at = 300, 200
    case = cases.make_case(rng, stream, (1, length, 2, 2, d), "bfloat16")
    target = getattr(case if where == "d_out" else case.attend, "qkv" if where in "qkv" else where)
    from_forward = where in ("out", "log_sum_exp")  # as it left them, but for this
    if from_forward:
        case.run(stream, cases.device_arena(stream), kernels=kernels)
    poisoned = target.numpy(stream)
    place = (0, 0, at) if where == "log_sum_exp" else (at, {"q": 0, "k": 2, "v": 4}.get(where, 0) * d + 3)
    poisoned[place] = value
    target.copy_from(poisoned, stream)
    arena = cases.device_arena(stream)
    if not from_forward:
        ops.attention(case.attend, cases.launcher(stream, kernels))
    case.d_qkv.fill_bytes(0, stream)
    ops.attention_backward(case.attend, case.d_out, case.d_qkv, arena, cases.launcher(stream, kernels))
    finite = np.isfinite(case.d_qkv.numpy(stream).astype(np.float32))
    sees = np.arange(length) >= at if where in "kv" else np.arange(length) == at
    assert finite[:128, :d].all() and finite[:, d : 2 * d].all()  # the keys' block of 128 may share one maximum
    assert not finite[sees, :d].all(axis=1).any()
