"""A launch through the compiled core: here cuLaunchKernelEx is a function of the test."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kos._core.kernel import pack_kernel
from tests.core.core_ranks import groups, needs_core
from tests.core.group import CoreError, CoreGroup

pytestmark = needs_core


class Config(ctypes.Structure):
    """CUlaunchConfig of cuda.h."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p), ("attributes", ctypes.c_void_p), ("attribute_count", ctypes.c_uint),
    )  # fmt: skip


LAUNCH = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.POINTER(Config), ctypes.c_void_p, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p)
)


class Driver:
    """A cuLaunchKernelEx that keeps what it is given and returns ``status``."""

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []
        self.status = 0
        self._function = LAUNCH(self._launch)
        self.address = ctypes.cast(self._function, ctypes.c_void_p).value or 0

    def _launch(self, config: Any, function: int, parameters: int | None, extra: Any) -> int:
        c, data = config.contents, b""
        if extra:
            assert (extra[0], extra[2], extra[4]) == (1, 2, None)  # BUFFER_POINTER, BUFFER_SIZE, END
            data = ctypes.string_at(extra[1], ctypes.c_size_t.from_address(extra[3]).value)
        fields = (c.shared, c.stream, c.attributes, c.attribute_count)
        self.launches.append((function, tuple(c.grid), tuple(c.block), *fields, parameters, data))
        return self.status


@pytest.fixture
def driver() -> Driver:
    return Driver()


@pytest.fixture
def pair() -> Iterator[list[CoreGroup]]:
    with groups(2) as made:
        yield made


def test_the_driver_gets_function_configuration_and_parameters(driver: Driver, pair: list[CoreGroup]) -> None:
    parameters = struct.pack("=QQIf", 1, 2, 3, 0.5)
    kernel = pack_kernel(driver.address, 0xF00, (5, 6, 7), (32, 2, 1), parameters, 99, 1024, (0xA77, 2))
    assert pair[0].core.launch(kernel, 0, 0x57) is None and pair[0].begun == 1
    assert pair[0].core.launch(kernel, 1, 0x58, 1 << 63, 20) is None and pair[0].begun == 2
    first, second = driver.launches
    assert first == (0xF00, (5, 6, 7), (32, 2, 1), 1024, 0x57, 0xA77, 2, None, parameters)
    assert second[4] == 0x58 and second[-1] == struct.pack("=QQIf", 1 << 63, 20, 3, 0.5)


def test_a_kernel_without_parameters(driver: Driver, pair: list[CoreGroup]) -> None:
    pair[1].core.launch(pack_kernel(driver.address, 1, (1, 1, 1), (1, 1, 1), b"", 5), 0, 0)
    assert driver.launches == [(1, (1, 1, 1), (1, 1, 1), 0, None, None, 0, None, b"")]


def test_a_status_of_the_driver_is_an_error(driver: Driver, pair: list[CoreGroup]) -> None:
    driver.status = 700
    with pytest.raises(CoreError, match="^DRIVER of rank 0, 700"):
        pair[0].core.launch(pack_kernel(driver.address, 1, (1, 1, 1), (1, 1, 1), b"", 5), 0, 0)


def test_bytes_that_are_not_a_packed_kernel_are_refused(driver: Driver, pair: list[CoreGroup]) -> None:
    kernel = pack_kernel(driver.address, 1, (1, 1, 1), (1, 1, 1), bytes(16), 5)
    for wrong in (b"", kernel[:-1], kernel + b"x"):
        with pytest.raises(ValueError, match="expected a packed kernel"):
            pair[0].core.launch(wrong, 0, 0)
    for arguments in ((kernel,), (kernel, 0), (kernel, 0, 0, *range(17)), (1, 2, 3), (kernel, "0", 0)):
        with pytest.raises(TypeError):
            pair[0].core.launch(*arguments)
    with pytest.raises(ValueError, match="at least 3 words"):
        pair[0].core.launch(kernel, 0, 0, 1, 2, 3)
    assert not driver.launches and pair[0].begun == 0


def test_a_launch_is_compared_as_any_call(driver: Driver, pair: list[CoreGroup]) -> None:
    kernel = pack_kernel(driver.address, 1, (1, 1, 1), (1, 1, 1), b"", 5)
    pair[0].core.launch(kernel, 0, 0)
    with pytest.raises(CoreError, match="^MISMATCH of rank 0, 0, by rank 1"):
        pair[1].all_reduce(np.ones(2))
    with pytest.raises(CoreError, match="^MISMATCH of rank 0, 0, by rank 1"):
        pair[0].core.launch(kernel, 1, 0)
    pair[0].close()
    with pytest.raises(CoreError, match="^CLOSED"):
        pair[0].core.launch(kernel, 1, 0)
    assert len(driver.launches) == 1
