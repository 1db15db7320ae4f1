"""Arrays on GPUs for tests of transfer, and what tests on GPUs and on an emulated one do alike."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kos import cuda
from kos.memory import Array
from kos.transfer import Placement
from kos.transfer.gpu import Copier, whole
from tests.transfer.publishing import SHAPES

WHOLE = {name: Placement.whole(shape) for name, shape in SHAPES.items()}
A, B = (12, 8), (6, 6)
WANTED: Mapping[str, tuple[Any, Placement]] = {
    "a.weight": (np.float32, WHOLE["a.weight"]),
    "rows": (np.float32, Placement.cut(A, 0, 3, 6, "a.weight")),
    "columns": (np.float32, Placement.cut(A, 1, 1, 5, "a.weight")),
    "turned": (np.float32, Placement.whole(A, "a.weight").transposed),
    "bfloat16": (ml_dtypes.bfloat16, Placement.whole(A, "a.weight").transposed),
    "float16": (np.float16, Placement.cut(B, 1, 2, 4, "b.weight")),
    "float64": (np.float64, Placement.whole(B, "b.weight")),
    "flat": (np.float32, Placement.whole(B, "b.weight").flat(5, 29)),
    "fused": (np.float32, Placement.joined([Placement.cut(A, 0, 0, 6, "a.weight"), Placement.cut(A, 0, 2, 4,
              "a.weight")])),
    "scale": (np.float32, WHOLE["scale"]),
    "norm": (np.float32, WHOLE["norm"]),  # from the host to a GPU
}  # fmt: skip


def on_gpu(device: int, wanted: Mapping[str, tuple[Any, Placement]] = WANTED) -> dict[str, tuple[Any, Placement]]:
    return {name: (Array.zeros(placed.shape, dtype, device), placed) for name, (dtype, placed) in wanted.items()}


def on_host() -> dict[str, tuple[Any, Placement]]:
    return {name: (np.zeros(placed.shape, dtype), placed) for name, (dtype, placed) in WANTED.items()}


@contextmanager
def before_copies(act: Callable[[], object]) -> Iterator[None]:
    """Call ``act`` once, between the lease and the first copy from mapped memory."""
    queue, acts = Copier.queue, [act]

    def slow(copier: Copier, copies: Any) -> None:
        if acts:
            acts.pop()()
        queue(copier, copies)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Copier, "queue", slow)
        yield


NAMES = ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]


def check_conversions(source: str, target: str) -> None:
    """As NumPy and ml_dtypes have them, but from float64 by way of float32; also of what is not finite."""
    rng = np.random.default_rng(0)
    types = {name: np.dtype(getattr(ml_dtypes, name, name)) for name in NAMES}
    normal, others = rng.normal(size=500), [0, -0.0, np.inf, -np.inf, np.nan, 448, 464, 465, 61439, 61440, 65504]
    with np.errstate(all="ignore"):
        x = np.concatenate([normal, normal * 1e-6, normal * 500, others]).astype(np.float32).astype(types[source])
        right = x.astype(np.float32).astype(types[target])
    y, given, copier = Array.zeros(x.shape, target, 0), Array.from_numpy(x, 0), Copier(0)
    cuda.synchronize(0)
    copier.copy(whole(y), whole(given))
    copier.wait()
    assert np.array_equal(y.numpy().astype(np.float64), right.astype(np.float64), equal_nan=True)
