"""Graphs: recorded work runs on replay and only then, on the data of that moment, and keeps its operands."""

import gc
import weakref

import numpy as np
import pytest
from cuda_ranks import KERNELS

from kos import cuda
from kos.cuda import driver
from kos.cuda.graphs import kernel_blocks
from kos.errors import CudaError, InvalidArgument
from kos.memory.array import Array
from kos.memory.pool import pool_of

pytestmark = pytest.mark.gpu


@pytest.fixture
def saxpy(device):
    return cuda.load_kernel(KERNELS / "saxpy.cu", "saxpy", device, DTYPE="float", OP="sum")


def test_replay(device, stream, saxpy, rng):
    x = Array.zeros(1000, np.float32, device, stream=stream)
    y = Array.zeros(1000, np.float32, device, stream=stream)
    with cuda.capture(stream, keep=[x, y]) as graph:
        for _ in range(3):
            saxpy(stream, 8, 128, x.pointer, y.pointer, np.float32(0.5), x.size)
    assert not y.numpy(stream).any()
    expected = np.zeros(1000, np.float32)
    for _ in range(5):
        values = rng.integers(-8, 8, 1000).astype(np.float32)
        x.copy_from(values, stream)
        graph.replay(stream)
        expected += 3 * (values / 2)
        np.testing.assert_array_equal(y.numpy(stream), expected)


def test_blocks_of_the_largest_kernel(device, stream, saxpy):
    x = Array.zeros(100, np.float32, device, stream=stream)
    with cuda.capture(stream):
        assert kernel_blocks(stream) == 0
        for blocks in (3, 7, 5):
            saxpy(stream, blocks, 32, x.pointer, x.pointer, np.float32(1), x.size)
        assert kernel_blocks(stream) == 7


def test_operands_live_as_long_as_the_graph(device, stream, saxpy):
    x = Array.zeros(100, np.float32, device, stream=stream)
    alive = weakref.ref(x)
    with cuda.capture(stream) as graph:
        saxpy(stream, 1, 32, x.pointer, x.pointer, np.float32(1), x.size)
        graph.keep(x)
    del x
    gc.collect()
    assert alive() is not None
    graph.replay(stream)
    graph.close()
    gc.collect()
    assert alive() is None
    with pytest.raises(InvalidArgument, match="closed"):
        graph.replay(stream)


def test_exceptions_end_the_capture(device, stream, saxpy):
    x = Array.zeros(100, np.float32, device, stream=stream)
    with pytest.raises(InvalidArgument), cuda.capture(stream):
        x.reshape(7)
    with pytest.raises(CudaError), cuda.capture(stream):
        cuda.streams.synchronize(stream, device)
    x.fill_bytes(0, stream)
    assert not x.numpy(stream).any()


def test_default_stream_is_refused(device):
    with pytest.raises(InvalidArgument, match="a stream of its own"), cuda.capture(None):
        pass


@pytest.mark.parametrize("legacy", [False, True])
def test_memory_let_go_of_during_a_capture_is_freed_after_it(device, stream, legacy):
    """On the captured stream; or on the legacy stream, while one is captured that it would have to wait for."""
    pool, nbytes, rounds = pool_of(device), 64 << 20, 6
    captured = stream if not legacy else int(driver.call(driver.cu.cuStreamCreate, 0))  # which blocks
    x = Array.empty(100, np.uint8, device, stream=captured)
    gc.collect()
    pool.trim()
    before = pool.statistics()
    for turn in range(rounds):
        memory = Array.zeros(nbytes, np.uint8, device, stream=None if legacy else stream).owner
        with cuda.capture(captured, keep=[x]) as graph:
            x.fill_bytes(turn + 1, captured)
            memory.close()
        assert pool.statistics().current == before.current
        for _ in range(2):
            graph.replay(captured)
        assert (x.numpy(captured) == turn + 1).all()
        assert pool.statistics().reserved < before.reserved + rounds * nbytes / 2, "not freed"
    pool.trim()
    assert pool.statistics().reserved <= before.reserved
