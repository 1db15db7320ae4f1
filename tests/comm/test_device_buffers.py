"""Arrays on a GPU: what becomes a Buffer, and what backends for host memory refuse."""

from typing import Any

import numpy as np
import pytest

import kos
from kos import ReduceOp
from kos.cuda import streams
from kos.cuda.kernels import Address
from kos.errors import InvalidArgument
from kos.memory import as_buffer
from kos.memory.array import Array
from tests.fake_cuda import Stream


def described(
    pointer: int = 4096, shape: tuple[int, ...] = (2, 3), dtype: Any = np.float32, device: int = 0, **more: Any
) -> Array:
    """An Array without memory: enough for what only looks at it."""
    return Array(pointer, shape, dtype, device, **more)


def test_array_becomes_a_buffer():
    x = described(stream=77)
    buffer = as_buffer(x, "x", writable=True)
    assert buffer.array is x
    assert (buffer.pointer, buffer.count, buffer.nbytes, buffer.device, buffer.stream) == (4096, 6, 24, 0, 77)
    assert (str(buffer), buffer.place) == ("float32[2, 3]", "cuda:0")
    assert as_buffer(x, "x", writable=True, stream=5).stream == 5
    assert as_buffer(described(), "x", writable=True).stream == streams.LEGACY


def test_a_stream_that_its_owner_closed_is_not_used():
    """Its handle is then that of the legacy stream."""
    stream = Stream(40)
    x = described()
    assert as_buffer(x, "x", writable=True, stream=stream).stream == 40
    stream.handle = 0
    buffer = as_buffer(x, "x", writable=True, stream=stream)
    assert (buffer.stream, buffer.queue) == (streams.LEGACY, None)


def test_the_alignment_of_an_address_of_a_launch():
    send, recv = Address(0, 0, 4), Address(1, 0, 8)
    assert (send % 8, (send + 4) % 8, recv % 16) == (4, 0, 8)


def test_overlap_of_gpu_memory():
    def buffer(start, count, device=0):
        return as_buffer(described(start, (count,), np.uint8, device), "x", writable=True)

    assert buffer(100, 10).overlaps(buffer(109, 1))
    assert not buffer(100, 10).overlaps(buffer(110, 1))
    assert not buffer(100, 10).overlaps(buffer(90, 10))
    assert not buffer(100, 10).overlaps(buffer(100, 10, device=1))
    assert not buffer(100, 10).overlaps(as_buffer(np.zeros(10, np.uint8), "x", writable=True))


def test_refused_before_anything_is_sent():
    class Owner:
        closed = True

    comm = kos.init("mock")
    x, y = described(shape=(4,)), np.zeros(4, np.float32)
    for message, call in {
        "x: expected a writable array, got a read-only Array": lambda: comm.all_reduce(described(readonly=True)),
        "x: expected an array with memory, got one that was freed": lambda: comm.all_reduce(described(owner=Owner())),
        "out: expected memory of cuda:0, got memory of the host": lambda: comm.all_reduce(x, out=y),
        "out: expected memory of the host, got memory of cuda:0": lambda: comm.all_reduce(y, out=x),
        "out: expected memory of cuda:0, got memory of cuda:1": lambda: comm.all_gather(
            x, described(shape=(4,), device=1)
        ),
        "out: expected dtype float32, got int8": lambda: comm.all_reduce(x, out=described(8192, (4,), np.int8)),
        "out: expected memory that does not overlap x": lambda: comm.all_reduce(x, out=described(4100, (4,))),
        "op: expected one of SUM, .* for float32, got BAND": lambda: comm.all_reduce(x, ReduceOp.BAND),
        "x: expected memory of the host .backend mock., got Array in memory of cuda:0; nccl, peer and auto": lambda: (
            comm.all_reduce(x)
        ),
    }.items():
        with pytest.raises(InvalidArgument, match=message):
            call()
    comm.close()
