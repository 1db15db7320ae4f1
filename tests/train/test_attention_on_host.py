"""The attention kernels of every set on machines without a GPU: tensor cores, TMA and its barriers are emulated.

The checks are those of ``test_attention_cuda`` and ``test_attention_masks_cuda``, on few shapes.  What the GPU does
beside a thread is done at once here: arithmetic, indexing and the order of barriers are checked, not what only a race
shows.
"""

from __future__ import annotations

import numpy as np
import pytest

from kos.errors import InvalidArgument
from kos.train.ops.cuda import attention
from tests.train import attention_cases as cases
from tests.train import test_attention_cuda as on_device
from tests.train import test_attention_masks_cuda as on_masks
from tests.train.host_kernels import emulator
from tests.train.host_kernels.ops import needs_compiler

pytestmark = needs_compiler

KERNEL_SETS = ["mma", "hopper"]


@pytest.fixture(autouse=True)
def host(monkeypatch):
    emulator.host_memory(monkeypatch)

    def launcher(stream, kernels="simple"):
        ops = emulator.HostOps()
        ops.shared_memory, ops.multiprocessors, ops.attention_kernels = 227 << 10, 2, kernels
        return ops

    monkeypatch.setattr(attention, "_tensor_map", emulator.HostMap.of)
    monkeypatch.setattr(cases, "launcher", launcher)
    monkeypatch.setattr(cases, "device_arena", lambda stream: launcher(stream).make_arena())


def test_heads_that_no_kernel_takes_are_refused(rng):
    case = cases.make_case(rng, None, (1, 8, 1, 1, 258), "bfloat16")
    with pytest.raises(InvalidArgument, match="expected heads of at most 256 elements, got 258"):
        attention.attention(case.attend, emulator.HostOps())


def test_masks_that_do_not_fit_are_refused(rng):
    case, ops = cases.make_case(rng, None, (2, 8, 1, 1, 64), "bfloat16"), emulator.HostOps()
    mask, _ = cases.make_mask(None, None, None, 2, np.arange(9), np.arange(9))
    with pytest.raises(InvalidArgument, match="expected a mask of 2 x 8 tokens, as qkv has, got one of 2 x 9"):
        attention.attention(case.masked(mask).attend, ops)
    with pytest.raises(InvalidArgument, match="expected a window of at least 1 token, got 0"):
        ops.attention_mask(None, 0, mask)


@pytest.mark.parametrize(
    ("kernels", "shape"),
    [
        ("mma", (2, 77, 4, 2, 64)),
        ("hopper", (1, 130, 1, 1, 128)),
        pytest.param("mma", (1, 130, 1, 1, 128), marks=pytest.mark.slow),
        pytest.param("hopper", (2, 77, 4, 2, 64), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_causal(rng, kernels, shape):
    on_device.test_tensor_cores(rng, None, kernels, "bfloat16", shape)


@pytest.mark.parametrize(
    ("kernels", "shape"),
    [
        pytest.param(kernels, shape, id=f"{kernels}-{shape}", marks=() if kernels in quick else pytest.mark.slow)
        for shape, quick in {
            (2, 150, 2, 1, 64, (75, 150), (0, 150)): (),
            (1, 140, 1, 1, 128, (0, 140), (0, 70)): ("mma",),
            (2, 140, 1, 1, 64, (3, 140), (131, 132)): KERNEL_SETS,
            (1, 256, 2, 1, 64, (0, 128), (0, 256)): ("hopper",),
        }.items()
        for kernels in KERNEL_SETS
    ],
)
def test_to_others(rng, kernels, shape):
    on_device.test_to_others(rng, None, kernels, "bfloat16", shape)


@pytest.mark.parametrize("kernels", [*KERNEL_SETS, "simple"])
def test_to_others_unlike(rng, kernels):
    shape = (2, 10, 4, 2, 40, (5, 10), (0, 9)) if kernels == "simple" else (1, 150, 2, 1, 64, (75, 150), (0, 150))
    on_device.test_to_others_unlike(rng, None, kernels, shape)


@pytest.mark.parametrize("kernels", KERNEL_SETS)
def test_the_largest_sums_of_others(rng, kernels):
    on_device.test_the_largest_sums_of_others(rng, None, kernels, 64)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_simple(rng, dtype):
    on_device.test_simple(rng, None, dtype, (2, 9, 4, 2, 40))
    on_device.test_to_others(rng, None, "simple", dtype, (2, 10, 4, 2, 40, (5, 10), (0, 9)))


@pytest.mark.parametrize("kernels", [*KERNEL_SETS, "simple"])
def test_others_that_matter_alone_or_not_at_all(rng, kernels):
    on_device.test_others_that_matter_alone_or_not_at_all(rng, None, kernels)


QUICK_MASKS = {"random documents", "both"}
MASKS = [pytest.param(kind, id=kind, marks=() if kind in QUICK_MASKS else pytest.mark.slow) for kind in on_masks.MASKS]


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("kernels", KERNEL_SETS)
def test_masks(rng, kernels, kind):
    shape = (2, 140, 2, 1, 64) if kernels == "mma" else (1, 270, 1, 1, 64)
    on_masks.test_masks(rng, None, kernels, "bfloat16", shape, kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", on_masks.MASKS)
@pytest.mark.parametrize("kernels", KERNEL_SETS)
def test_masks_of_large_heads(rng, kernels, kind):
    on_masks.test_masks(rng, None, kernels, "bfloat16", (2, 140, 2, 1, 128), kind)


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_simple_masks(rng, dtype, kind):
    on_masks.test_masks(rng, None, "simple", dtype, (2, 20, 4, 2, 40), kind)


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("kernels", [*KERNEL_SETS, "simple"])
def test_masks_of_zigzag_parts(rng, kernels, kind):
    chunk = 5 if kernels == "simple" else 70
    on_masks.test_masks_of_zigzag_parts(rng, None, kernels, (2, 1, chunk, 1, 1, 64), kind)


@pytest.mark.parametrize("kind", ["window of 1", pytest.param("window of 64", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kernels", KERNEL_SETS)
def test_masks_of_which_whole_blocks_see_nothing(rng, kernels, kind):
    on_masks.test_masks_of_zigzag_parts(rng, None, kernels, (2, 1, 128, 1, 1, 64), kind)


@pytest.mark.parametrize("kernels", KERNEL_SETS)
def test_other_documents_do_not_matter(rng, kernels):
    on_masks.test_other_documents_do_not_matter(rng, None, kernels, 64)


@pytest.mark.parametrize("kernels", KERNEL_SETS)
def test_a_mask_of_everything_changes_no_bit(rng, kernels):
    on_masks.test_a_mask_of_everything_changes_no_bit(rng, None, kernels)


@pytest.mark.parametrize("kernels", [*KERNEL_SETS, "simple"])
@pytest.mark.parametrize("parts", [((70, 150), (3, 140)), ((0, 1), (130, 131))], ids=str)
def test_masks_to_others(rng, kernels, parts):
    shape = (2, 20, 4, 2, 40, (5, 18), (3, 20)) if kernels == "simple" else (1, 150, 2, 1, 64, *parts)
    for window in (1, 40, 300):
        on_masks.test_masks_to_others(rng, None, kernels, window, shape)
