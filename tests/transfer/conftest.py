"""Fixtures: the secret of publishers and subscribers, and GPUs that are emulated."""

import gc

import pytest


@pytest.fixture(autouse=True)
def _secret(monkeypatch):
    monkeypatch.setenv("KOS_SECRET", "of the tests")


@pytest.fixture
def memory():
    """Every GPU of this process is emulated.  A test may assign to ``cu`` of memory other functions of the driver."""
    from tests.transfer.emulated_gpu import emulated_gpu  # which needs the stand-ins of tests/comm

    gc.collect()  # what tests before have left, which would be freed here
    with emulated_gpu() as memory:
        yield memory
