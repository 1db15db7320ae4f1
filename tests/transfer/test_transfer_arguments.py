"""Weights from M ranks to N: arguments that are refused, by the text that says what was expected and got."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from kos.errors import KosError
from kos.testing import spawn
from kos.transfer import Placement, Publisher

Arrays = Mapping[str, tuple[Any, Placement]]


def make_on_all(*arrays: Arrays, **options: list[Any]) -> list[str]:
    """Make a Publisher with a rank for each of ``arrays``; the class and the text of each rank's error."""

    def make(comm):
        mine = {name: values[comm.rank] for name, values in options.items()}
        with pytest.raises(KosError) as raised:
            Publisher(comm, arrays[comm.rank], **mine)
        return f"{type(raised.value).__name__}: {raised.value}"

    return spawn(make, len(arrays))


def one(shape: tuple[int, ...] = (2, 3), dtype: Any = np.float32, name: str = "w", tensor: str = "") -> Arrays:
    return {name: (np.zeros(shape, dtype), Placement.whole(shape, tensor))}


@pytest.mark.parametrize(
    ("arrays", "got"),
    [
        pytest.param([one(), one(), one((2, 4))], "float32 of shape (2, 3) (array w of rank 0) and "
                     "float32 of shape (2, 4) (array w of rank 2)", id="shapes"),
        pytest.param([one(), one(name="v", dtype=np.int32, tensor="w")], "float32 of shape (2, 3) (array w of rank 0) "
                     "and int32 of shape (2, 3) (array v of rank 1)", id="dtypes"),
        pytest.param([one(), one((6, 2), name="v") | one((2, 6), name="u", tensor="v")], "float32 of shape (6, 2) "
                     "(array v of rank 1) and float32 of shape (2, 6) (array u of rank 1)", id="arrays of one rank"),
    ],
)  # fmt: skip
def test_ranks_that_differ_in_a_tensor(arrays, got):
    """All raise the same error when they make the publisher, and not only their subscribers."""
    tensor = "v" if "array u" in got else "w"
    text = f"InvalidArgument: {tensor}: expected one dtype and one shape of the whole tensor on all ranks, got {got}"
    assert make_on_all(*arrays) == [text] * len(arrays)
