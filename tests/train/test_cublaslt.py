"""Which algorithm of a matrix product the search chooses, on a GPU whose clock a power limit holds down."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np
import pytest

from kos.cuda import driver
from kos.dtypes import DTYPES
from kos.errors import CudaError
from kos.train.ops import cublaslt
from kos.train.ops.cublaslt import Matmul


class Gpu:
    """A run takes the ``brief`` milliseconds of its algorithm, but the ``lasting`` where half of SETTLE went before."""

    def __init__(self, brief, lasting):
        self.times, self.now, self.since = list(zip(brief, lasting, strict=True)), 0.0, (None, 0.0)
        self.candidates = [np.full(cublaslt.ALGORITHM_BYTES, index, np.uint8) for index in range(len(brief))]

    def run(self, plan, algorithm, a, b, c, out):
        (which,) = (index for index, x in enumerate(self.candidates) if x.ctypes.data == algorithm)
        if self.since[0] != which:
            self.since = which, self.now
        self.now += self.times[which][self.now - self.since[1] >= cublaslt.SETTLE / 2]

    def milliseconds(self, run, stream):
        began = self.now
        run()
        return self.now - began


@pytest.fixture
def search(monkeypatch):
    """Which the search takes on a Gpu, and for how many milliseconds it runs."""

    def search(brief, lasting):
        gpu = Gpu(brief, lasting)
        monkeypatch.setattr(cublaslt, "streams", gpu)
        monkeypatch.setattr(cublaslt, "Array", SimpleNamespace(empty=lambda *_, **__: None))
        matmul = object.__new__(Matmul)
        matmul.device, matmul.stream, matmul._run = 0, 0, gpu.run
        best = matmul._fastest(None, gpu.candidates, None, None, None, SimpleNamespace(shape=(1, 1), dtype="float32"))
        return best[0], gpu.now

    return search


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_the_fastest_when_it_lasts(search, order):
    """Not in brief, nor on the way there, wherever it stands in the order."""
    times = np.array([[1.0, 1.13, 1.1], [1.3, 1.25, 1.4]])
    assert search(*times[:, order].tolist())[0] == order.index(1)


def test_short_ones_run_briefly(search):
    """Whatever they would take when they last: the host could not queue enough of them."""
    which, took = search([0.012, 0.011, 0.013], [0.012, 0.022, 0.013])
    assert which == 1 and took < 1


def test_a_search_takes_less_than_a_second(search):
    """However many are near; and where none is near the fastest it lasts only as long as brief runs do."""
    _, took = search([1.0] * 12, [1.3] * 12)
    assert took < 1000
    which, took = search([9.0, 1.0, 2.0], [9.0, 5.0, 2.0])
    assert which == 1 and took == 12 * (1 + cublaslt.REPEATS)


@pytest.mark.parametrize("planned", [True, False])
def test_what_fails_is_an_error_of_kos(monkeypatch, planned):
    """With the driver's word for it, where it has one."""
    cuBLASLtError = type("cuBLASLtError", (Exception,), {})

    def fail(*arguments):
        raise cuBLASLtError("EXECUTION_FAILED (13)")

    matmul = object.__new__(Matmul)
    matmul.lt, matmul._plans, matmul._run = SimpleNamespace(cuBLASLtError=cuBLASLtError), {}, fail
    matmul._plan = (lambda *arguments: SimpleNamespace(algorithm=np.zeros(1))) if planned else fail
    x = SimpleNamespace(size=4, shape=(2, 2), dtype=DTYPES["float32"], pointer=256)
    broken = SimpleNamespace(name="CUDA_ERROR_ILLEGAL_ADDRESS")
    for status, said in ((0, r"EXECUTION_FAILED \(13\)$"), (broken, r"\(13\); CUDA_ERROR_ILLEGAL_ADDRESS \(why\)$")):
        cu = SimpleNamespace(cuMemGetInfo=lambda s=status: (s, 0, 0), cuGetErrorString=lambda status: (0, b"why"))
        monkeypatch.setattr(driver, "cu", cu)
        with pytest.raises(CudaError, match=f"^a matrix product by cuBLASLt failed: .*{said}"):
            matmul(x, x, x)
