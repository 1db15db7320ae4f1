"""What the trainer's tests share."""

from __future__ import annotations

import os

import numpy as np
import pytest

SEED = int(os.environ.get("KOS_TEST_SEED", "0")) or int.from_bytes(os.urandom(4), "little")


@pytest.fixture
def rng() -> np.random.Generator:
    print(f"KOS_TEST_SEED={SEED}")
    return np.random.default_rng(SEED)
