"""Random faults on both sides: no update hangs, no version is torn, errors name what failed, all go on."""

import pytest

from tests.transfer.faults import KINDS, campaign


@pytest.mark.parametrize("seed", [1, 2])
def test_random_faults(seed):
    """Each kind twice with each seed; ``python -m tests.transfer.faults`` runs more."""
    assert campaign(2 * len(KINDS), seed) == []


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_many_random_faults():
    assert campaign(200, 3) == []
