"""Process groups of torch whose membership changes, by ``torch.distributed._reconfigure`` and by torchft."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.interop.ranks import run

pytestmark = pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")
PROGRAMS = "tests.interop.torch_reconfigure_programs"
needs_torchft = pytest.mark.skipif(find_spec("torchft") is None, reason="torchft is not installed")


def test_a_group_goes_on_without_a_rank_and_with_a_newcomer(tmp_path: Path) -> None:
    first, killed, last, newcomer = run(f"{PROGRAMS}:changes", 4, "kos", str(tmp_path))
    assert killed is None
    assert first[:2] == [[0, 3, 3.0, 1.0], [1, 2, 1.0, 0.5]]
    assert last[:2] == [[2, 3, 3.0, 1.0], [0, 2, 1.0, 0.5]]
    assert sorted([first[2], last[2], *newcomer]) == [[rank, 3, 3.0, 1.0] for rank in range(3)]


@needs_torchft
def test_a_group_of_torchft_goes_on_without_a_replica(tmp_path: Path) -> None:
    first, killed, last = run(f"{PROGRAMS}:torchft_group", 3, "kos", str(tmp_path))
    assert killed is None
    assert first == last == [2, "torchft-kos", True]


@needs_torchft
def test_a_manager_of_torchft_goes_on_without_a_replica(tmp_path: Path) -> None:
    first, killed, last = run(f"{PROGRAMS}:torchft_manager", 3, "kos", str(tmp_path))
    assert killed is None
    assert first == last == [6.0, 2]
