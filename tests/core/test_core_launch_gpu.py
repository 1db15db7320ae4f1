"""A launch through the compiled core on a GPU."""

from __future__ import annotations

import ctypes
import struct
from pathlib import Path

import numpy as np
import pytest

from kos import cuda
from kos._core.kernel import pack_kernel
from kos.cuda import driver
from kos.memory.array import Array
from tests.core.core_ranks import groups, needs_core
from tests.core.group import CoreError

pytestmark = [pytest.mark.gpu, needs_core, pytest.mark.skipif(bool(cuda.unavailable()), reason="needs a GPU")]

SOURCE = """
extern "C" __global__ void fill(float* x, unsigned n, float value) {
    if (threadIdx.x < n) x[threadIdx.x] = value;
}
"""


def test_a_kernel_is_launched_on_a_stream(tmp_path: Path) -> None:
    """With a parameter replaced at the start, and an error of the driver for a function that is none."""
    path = tmp_path / "fill.cu"
    path.write_text(SOURCE)
    kernel, stream = cuda.load_kernel(path, "fill", 0), cuda.create_stream(0)
    address = ctypes.cast(ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx, ctypes.c_void_p).value or 0
    first, second = (Array.from_numpy(np.full(64, -1, np.float32), 0, stream=stream) for _ in range(2))
    parameters = struct.pack("=QIf", first.pointer, 50, 2.5)
    with groups(1) as [group], driver.on_device(0):
        packed = pack_kernel(address, int(kernel._function), (1, 1, 1), (64, 1, 1), parameters, 7)
        handle = cuda.streams.handle(stream)
        for sequence, words in enumerate([(), (second.pointer,)]):
            group.core.launch(packed, sequence, handle, *words)
        for x in (first, second):
            assert x.numpy(stream).tolist() == [2.5] * 50 + [-1.0] * 14
        too_wide = pack_kernel(address, int(kernel._function), (1, 1, 1), (4096, 1, 1), parameters, 7)
        with pytest.raises(CoreError, match="^DRIVER of rank 0, 1,"):
            group.core.launch(too_wide, 2, handle)
