"""An emulated GPU's operations, the fixtures ``ops`` and ``arena``, and the mark of tests that compile kernels."""

from __future__ import annotations

from typing import Any

import pytest

from kos.memory.arena import Arena
from tests.host_compiler import needs_compiler as needs_compiler
from tests.train.host_kernels import emulator


@pytest.fixture
def ops(monkeypatch: pytest.MonkeyPatch) -> Any:
    emulator.host_memory(monkeypatch)
    return emulator.HostOps()


@pytest.fixture
def arena(ops: Any) -> Arena:
    made: Arena = ops.make_arena()
    return made
