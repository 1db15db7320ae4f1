"""Arguments by the buffer protocol, on threads, over ``tcp`` and ``mpi``."""

import array
import ctypes
import mmap

import numpy as np
import pytest

from kos.errors import InvalidArgument
from kos.memory import as_buffer
from tests.comm.ranks import on_each_rank
from tests.comm.test_neighbours import ranks  # noqa: F401


@on_each_rank("ranks")
def test_every_operation_takes_buffers(comm, /):
    size, last = comm.size, comm.size - 1
    for step in range(4):  # also as cached calls
        x = array.array("f", [comm.rank, step])
        assert comm.all_reduce(x) is x and x.tolist() == [size * last / 2, size * step]
        data = bytearray(b"\0" * (3 + step))
        assert comm.broadcast(b"%d" % step * (3 + step) if comm.rank == 0 else data) is not None
        assert comm.rank == 0 or data == b"%d" % step * (3 + step)
        view = memoryview(bytearray(8 * size)).cast("q")
        assert comm.all_gather(np.array([comm.rank + step]), view) is view
        assert view.tolist() == [rank + step for rank in range(size)]
        rows = comm.all_gather(b"%d" % comm.rank * (1 + step))
        assert type(rows) is np.ndarray and rows.tobytes() == b"".join(b"%d" % r * (1 + step) for r in range(size))
        if comm.rank == 0:
            for rank in range(1, size):
                comm.send(b"x" * (5 + step), rank)
                comm.send(memoryview(b"abcd")[1:3], rank)
        else:
            got, part = bytearray(5 + step), memoryview(bytearray(4))
            assert comm.recv(got, 0) is got and got == b"x" * (5 + step)
            work = comm.recv(part[2:], 0, async_op=True)
            assert bytes(work.wait()) == b"bc" and bytes(part) == b"\0\0bc"


def test_what_is_taken():
    for x, dtype in (
        (bytearray(3), "uint8"), (b"abc", "uint8"), (array.array("d", [1]), "float64"), (mmap.mmap(-1, 16), "uint8"),
        ((ctypes.c_int32 * 3)(), "int32"), (memoryview(np.ones(2, np.float16)), "float16"), (bytearray(), "uint8"),
    ):  # fmt: skip
        buffer = as_buffer(x, "x", writable=type(x) is not bytes)
        assert buffer.dtype.name == dtype and buffer.array is x and buffer.nbytes == memoryview(x).nbytes


@pytest.mark.parametrize(
    ("x", "got"),
    [
        (b"abc", "a writable array, got a read-only one"), (memoryview(b"abc"), "a writable array, got a read-only"),
        (memoryview(bytearray(8))[::2], "a C-contiguous array"), (array.array("u", "ab"), "one of the dtypes float64"),
        ("abc", "an array, got str"), ([1.0], "an array, got list"), (np.float32(1), "an array, got float32"),
    ],
)  # fmt: skip
def test_what_is_refused(x, got):
    with pytest.raises(InvalidArgument, match=f"x: expected {got}"):
        as_buffer(x, "x", writable=True)
