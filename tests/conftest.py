"""What all tests share."""

from __future__ import annotations

import os

import pytest

from tests.run import ROOT, WITH_MPI

# As root, and with more ranks than cores: what a user of the Makefile gets, for tests that start mpirun.
os.environ.setdefault("OMPI_ALLOW_RUN_AS_ROOT", "1")
os.environ.setdefault("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
os.environ.setdefault("PRTE_MCA_rmaps_default_mapping_policy", ":oversubscribe")
os.environ.setdefault("OMPI_MCA_rmaps_base_oversubscribe", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    elsewhere = [i.nodeid for i in items if i.get_closest_marker("mpi") and not i.path.is_relative_to(ROOT / WITH_MPI)]
    if elsewhere:
        raise pytest.UsageError(f"tests/run.py expects tests marked mpi in {WITH_MPI}, got {elsewhere[0]}")
