"""What a run decides by looking at the machine."""

from __future__ import annotations

from unittest.mock import MagicMock

import pytest

from kos.testing import spawn
from kos.train.machine import limit_threads


def test_ranks_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr("kos.train.machine.thread_pools", MagicMock())
    assert spawn(limit_threads, 1) == [8]
    assert spawn(limit_threads, 3) == [2, 2, 2]
    assert spawn(limit_threads, 16) == [1] * 16
    assert spawn(lambda comm: limit_threads(comm, 1), 2) == [1, 1]
