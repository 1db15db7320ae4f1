"""Matrix products whose parts several threads compute."""

import os
import threading

import numpy as np
import pytest

from kos.train.ops.threads import LEAST_FLOPS, THREADS, matmul, parts_of


@pytest.fixture(autouse=True, params=[1, 2, 5])
def _threads(request, monkeypatch):
    monkeypatch.setattr(THREADS, "count", request.param)


@pytest.mark.parametrize(("rows", "depth", "columns"), [(3, 5, 7), (700, 100, 130), (65, 90, 1500), (1, 8192, 1100)])
@pytest.mark.parametrize("transposed", [False, True])
def test_products_are_those_of_numpy(rng, rows, depth, columns, transposed):
    a, b, out = rng.normal(size=(rows, depth)), rng.normal(size=(depth, columns)), np.full((rows, columns), np.nan)
    if transposed:
        a, b, out = (np.asfortranarray(x) for x in (a, b, out))
    matmul(a, b, out)
    np.testing.assert_allclose(out, a @ b, rtol=1e-10, atol=1e-10)


def test_a_product_with_a_vector(rng):
    a, b, out = rng.normal(size=40_000), rng.normal(size=(40_000, 500)), np.full(500, np.nan)
    matmul(a, b, out)
    np.testing.assert_allclose(out, a @ b, rtol=1e-10, atol=1e-8)


def test_parts_cover_every_row_once():
    for size in (1, 127, 128, 300, 2048, 50_304):
        for threads in (1, 2, 3, 64):
            parts = parts_of(size, threads)
            assert not parts or [i for part in parts for i in range(size)[part]] == [*range(size)]
            assert len(parts) <= 2 * threads


def test_an_error_of_any_thread_is_raised(rng):
    def fail(part):
        if part.start == 64:
            raise ArithmeticError("of a part")

    with pytest.raises(ArithmeticError, match="of a part"):
        THREADS.run(fail, [slice(at, at + 1) for at in range(100)])
    found = []
    assert THREADS.run(found.append, [slice(0, 1), slice(1, 2)])  # and the next product is computed
    assert sorted(part.start for part in found) == [0, 1]


def test_numbers_that_are_not_finite_warn_in_no_thread(recwarn):
    a = np.full((1024, 256), np.inf, np.float32)
    out = np.empty((1024, 256), np.float32)
    with np.errstate(all="ignore"):
        matmul(a, np.zeros((256, 256), np.float32), out)
    assert np.isnan(out).all() and not recwarn.list


def test_threads_of_a_program_and_a_forked_process_compute(rng):
    size = 512
    assert 2 * size**3 >= LEAST_FLOPS
    a = rng.normal(size=(size, size))
    expected, outs = a @ a, [np.empty_like(a) for _ in range(3)]

    def compute(out):
        for _ in range(5):
            matmul(a, a, out)

    threads = [threading.Thread(target=compute, args=(out,)) for out in outs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for out in outs:
        np.testing.assert_allclose(out, expected, rtol=1e-10, atol=1e-10)
    if (child := os.fork()) == 0:
        matmul(a, a, outs[0])
        os._exit(0 if np.allclose(outs[0], expected) else 1)
    assert os.waitpid(child, 0)[1] == 0
