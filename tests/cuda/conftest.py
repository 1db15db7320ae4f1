"""What the CUDA tests share: a seed that is printed, a device, a stream."""

import os
import secrets

import numpy as np
import pytest

from kos import cuda


@pytest.fixture
def rng():
    seed = int(os.environ.get("KOS_TEST_SEED") or secrets.randbits(32))
    print(f"KOS_TEST_SEED={seed}")
    return np.random.default_rng(seed)


@pytest.fixture
def device():
    """The GPU of single-rank tests, current on this thread."""
    cuda.set_device(0)
    return 0


@pytest.fixture
def stream(device):
    return cuda.create_stream(device)
