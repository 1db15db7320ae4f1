"""Random faults on both sides: no update hangs, no version is torn, errors name what failed, all go on."""

import pytest

from kos import cuda
from tests.transfer.faults import KINDS, run

TWICE = 2 * len(KINDS)
ON_GPUS = [pytest.mark.gpu, pytest.mark.timeout(600)]


@pytest.mark.parametrize(
    ("faults", "seed", "gpus"),
    [
        (len(KINDS), 1, False), pytest.param(TWICE, 1, True, marks=ON_GPUS),
        pytest.param(TWICE, 3, False, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_random_faults(faults, seed, gpus):
    """Each kind once or more; ``python -m tests.transfer.faults --gpus 2 --faults 50`` runs others."""
    assert run(faults, seed, gpus=len(cuda.visible_devices()) if gpus else 0) == 0
