"""What attention is asked for: by each family of models, and of which kernels."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kos.errors import InvalidArgument
from kos.train.layers.attention import Attention
from kos.train.model.families import FAMILIES
from kos.train.model.llama import LlamaConfig
from kos.train.ops import Attend
from kos.train.ops.cuda.attention import KERNEL_SETS, kernel_set, unsupported

SHAPE: dict[str, Any] = {
    "vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 8, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_a_setting_of_attention_reaches_all_layers_of_every_family(
    family: type[LlamaConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A family that makes its attention elsewhere than in ``LlamaConfig.attention`` would leave the setting out."""
    make, asked = LlamaConfig.attention, slice(3, 5)
    monkeypatch.setattr(LlamaConfig, "attention", lambda *operands, **more: make(*operands, **more, queries=asked))
    found = [each for layer in family(**SHAPE).layers(range(4)) for each in layer if isinstance(each, Attention)]
    assert [each.attend((4, 4), *[np.zeros(1)] * 3).queries for each in found] == [asked] * 4


def attend(dtype: Any, head_dim: int) -> Attend:
    """Of 2 query heads and a kv head."""
    return Attend(np.zeros((1, 4 * head_dim), dtype), 2, 1, *[np.zeros(1)] * 2)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "chosen"),
    [
        (ml_dtypes.bfloat16, 64, {"hopper": "hopper", "mma": "mma", "simple": "simple"}),
        (np.float16, 128, {"hopper": "hopper", "mma": "mma", "simple": "simple"}),
        (ml_dtypes.bfloat16, 96, dict.fromkeys(KERNEL_SETS, "simple")),
        (np.float32, 64, dict.fromkeys(KERNEL_SETS, "simple")),
        (np.float32, 256, dict.fromkeys(KERNEL_SETS, "simple")),
    ],
)
def test_the_fastest_kernels_that_compute_an_attention(dtype: Any, head_dim: int, chosen: dict[str, str]) -> None:
    """``chosen``: by the fastest kernels that the GPU has."""
    assert {fastest: kernel_set(attend(dtype, head_dim), fastest) for fastest in KERNEL_SETS} == chosen


def test_what_kernels_do_not_compute_is_named() -> None:
    for kernels in ("hopper", "mma"):
        assert unsupported(kernels, attend(np.float32, 64)) == "bfloat16 or float16, got float32"
        assert unsupported(kernels, attend(np.float16, 96)) == "heads of 64 or 128 elements, got 96"
    for fastest in KERNEL_SETS:
        with pytest.raises(InvalidArgument, match="attention: expected heads of at most 256 elements, got 258"):
            kernel_set(attend(np.float32, 258), fastest)
