"""kos/comm/collectives.pyi is what ``tests/stubs.py`` writes, and has every operation."""

from __future__ import annotations

from kos.comm.collectives import Operations
from tests import stubs


def test_the_stub_is_current() -> None:
    """Else: ``python tests/stubs.py``."""
    assert stubs.TARGET.read_text() == stubs.generate(stubs.SOURCE.read_text())


def test_every_operation_has_overloads() -> None:
    public = {name for name, value in vars(Operations).items() if callable(value) and not name.startswith("_")}
    persistent = {f"{name}_init" for name in {*stubs.RESULTS} - {"send_bytes", "recv_bytes"}}
    assert public - {"feed_back", "probe"} == {*stubs.RESULTS, *persistent}
