"""An emulated GPU's operations, the fixtures ``ops`` and ``arena``, and the mark of tests that compile kernels."""

import pytest

from tests.host_compiler import needs_compiler as needs_compiler
from tests.train.host_kernels import emulator


@pytest.fixture
def ops(monkeypatch):
    emulator.host_memory(monkeypatch)
    return emulator.HostOps()


@pytest.fixture
def arena(ops):
    made = ops.make_arena()
    return made
