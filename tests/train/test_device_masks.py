"""Attention on GPUs, also emulated, with masks of documents and windows, against NumPy in float64."""

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np

from kos import cuda
from kos.dtypes import DTYPES
from kos.train.ops.cuda import attention as ops
from tests.train import attention_cases as cases
from tests.train import masks
from tests.train.attention_cases import EMULATED, SETS, on_devices, stream

__all__ = ["stream"]

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


QUICK = ("random documents", "both")
OTHERS = [kind for kind in MASKS if kind not in QUICK]
OF_KERNELS = {"mma": (2, 140, 2, 1, 64), "hopper": (1, 270, 1, 1, 64)}
WIDE = (2, 140, 2, 1, 128)
EMULATED_MASKS = [  # each mask once, the sets of kernels and both head sizes in turn
    (kernels := EMULATED[number % len(EMULATED)], "bfloat16", WIDE if number % 4 > 1 else OF_KERNELS[kernels], kind)
    for number, kind in enumerate(OTHERS)
]  # fmt: skip


def make_starts(rng: np.random.Generator, documents: Any, samples: int, length: int) -> np.ndarray | None:
    if documents is None:
        return None
    if documents == "random":
        return masks.random_starts(rng, samples, length)
    return masks.starts_of(documents, samples, length)


def make_masked(
    rng: np.random.Generator, stream: Any, shape: tuple[int, ...], dtype: str, starts: np.ndarray | None,
    window: int | None,
) -> cases.Case:  # fmt: skip
    samples, length, heads, kv_heads, _ = shape
    case, at = cases.make_case(rng, stream, shape, dtype), np.arange(length)
    mask, _ = cases.make_mask(stream, starts, window, samples, at, at)
    qkv, d_out = (x.numpy(stream).astype(np.float64) for x in (case.attend.qkv, case.d_out))
    seen = masks.visible(starts, window, at)
    out, lse, _ = masks.dense_packed(qkv, d_out, samples, heads, kv_heads, seen)
    rounded = out.astype(DTYPES[dtype].numpy).astype(np.float64)
    d_qkv = masks.dense_packed(qkv, d_out, samples, heads, kv_heads, seen, rounded)[2]
    return replace(case.masked(mask), expected={"out": out, "log_sum_exp": lse, "d_qkv": d_qkv})


@on_devices(
    "kernels dtype shape kind",
    product(SETS, ["bfloat16", "float16"], [(2, 77, 4, 4, 64), (1, 333, 8, 2, 128), (2, 640, 4, 1, 64)], MASKS),
    [(kernels, "bfloat16", OF_KERNELS[kernels], kind) for kernels, kind in product(EMULATED, QUICK)],
    EMULATED_MASKS + [(kernels, "bfloat16", WIDE, "both") for kernels in EMULATED],
)
def test_masks(rng, stream, kernels, dtype, shape, kind):
    documents, window = MASKS[kind]
    starts = make_starts(rng, documents, *shape[:2])
    case = make_masked(rng, stream, shape, dtype, starts, window)
    cases.assert_close(case, case.run(stream, cases.device_arena(stream), kernels=kernels), dtype, shape[-1])


@on_devices("dtype shape kind", product(["float32", "bfloat16"], cases.SMALL, MASKS), *(
    [(("float32", "bfloat16")[number % 2], (2, 20, 4, 2, 40), kind) for number, kind in enumerate(kinds)]
    for kinds in (QUICK, OTHERS)
))
def test_simple_masks(rng, stream, dtype, shape, kind):
    test_masks(rng, stream, "simple", dtype, shape, kind)


@on_devices("d kernels", product([64, 128], SETS))
def test_random_masks(rng, stream, kernels, d):
    for _ in range(8):
        kv_heads, group = (int(x) for x in rng.integers(1, 4, 2))
        shape = (int(rng.integers(1, 4)), int(rng.integers(1, 700)), kv_heads * group, kv_heads, d)
        starts = masks.random_starts(rng, *shape[:2]) if rng.random() < 0.7 else None
        window = int(rng.integers(1, 300)) if rng.random() < 0.7 else None
        print(shape, window, starts is None)
        case = make_masked(rng, stream, shape, "bfloat16", starts, window)
        cases.assert_close(case, case.run(stream, cases.device_arena(stream), kernels=kernels), "bfloat16", d)


@on_devices("kernels window shape", product(SETS, [1, 100, 1000], cases.TO_OTHERS), [
    *product(EMULATED, [1, 40, 300], [(1, 150, 2, 1, 64, (70, 150), (3, 140)), (1, 150, 2, 1, 64, (0, 1), (130, 131))]),
    *product(["simple"], [1, 40, 300], [(2, 20, 4, 2, 40, (5, 18), (3, 20))]),
])
def test_masks_to_others(rng, stream, kernels, window, shape):
    """Any queries and keys of two ranks; many queries see none of the keys."""
    cases.check_to_others(rng, stream, kernels, "bfloat16", shape, window=window)


@on_devices("kernels", product(SETS))
def test_one_graph_for_all_masks(rng, stream, kernels):
    """Replayed after new starts of documents are in device memory: equal bits with a launch of its own."""
    samples, length = shape = (2, 520)
    case = cases.make_case(rng, stream, (*shape, 4, 2, 64), "bfloat16")
    starts = [masks.random_starts(rng, *shape) for _ in range(3)]
    mask, of_device = cases.make_mask(stream, starts[0], 200, samples, np.arange(length), np.arange(length))
    case, arena = case.masked(mask), cases.device_arena(stream)
    case.run(stream, arena, kernels=kernels)
    with cuda.capture(stream, keep=[case, arena, of_device]) as graph:
        ops.attention_mask(of_device, 200, mask, None, None, cases.launcher(stream))
        case.launch(stream, arena, kernels=kernels)
    for changed in starts:
        of_device.copy_from(changed, stream)
        graph.replay(stream)
        replayed = case.results(stream)
        other, _ = cases.make_mask(stream, changed, 200, samples, np.arange(length), np.arange(length))
        again = case.masked(other).run(stream, arena, kernels=kernels)
        for name, array in replayed.items():
            np.testing.assert_array_equal(array.view(np.uint8), again[name].view(np.uint8))


@on_devices("kernels d", product(SETS, [64, 128]), product(EMULATED, [64]))
def test_other_documents_do_not_matter(rng, stream, kernels, d):
    """Not by a bit, however large and not finite they are: the documents are whole blocks."""
    length, document = 384, slice(128, 256)
    starts = masks.starts_of([128], 1, length)
    case = make_masked(rng, stream, (1, length, 2, 1, d), "bfloat16", starts, None)
    first = case.run(stream, cases.device_arena(stream), kernels=kernels)
    for value in (4096.0, np.nan):
        huge = case.attend.qkv.numpy(stream)
        huge[document] *= DTYPES["bfloat16"].numpy.type(value) if value == value else np.nan
        case.attend.qkv.copy_from(huge, stream)
        second = case.run(stream, cases.device_arena(stream), kernels=kernels)
        for name in ("out", "d_qkv"):
            others = [np.delete(x[name].view(np.uint16), document, axis=0) for x in (first, second)]
            np.testing.assert_array_equal(*others)
        others = [np.delete(x["log_sum_exp"], document, axis=2) for x in (first, second)]
        np.testing.assert_array_equal(*others)
