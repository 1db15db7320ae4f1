"""No call enters more functions and files of kos than ``tests/paths.py`` allows."""

import pytest

from tests import paths
from tests.comm import shared_ranks


@pytest.fixture(scope="module")
def measured():
    return paths.measure()


@shared_ranks.needs_core
@pytest.mark.parametrize("name", paths.BOUNDS)
def test_bound(measured, name):
    path, functions = measured[name]
    most = paths.BOUNDS[name]
    assert all(got <= bound for got, bound in zip(path, most, strict=True)), (path, most, functions)
