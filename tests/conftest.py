"""What all tests share."""

from __future__ import annotations

import gc

import pytest

from kos import cuda
from tests.run import ROOT, WITH_GPUS, WITH_MPI, heed_sigint

heed_sigint()  # for the tests that send it to programs that they start


def mentions_torch(item: pytest.Item) -> bool:
    code = getattr(getattr(item, "function", None), "__code__", None)
    names = (item.path.name, *((*code.co_names, *code.co_varnames, *code.co_consts) if code else ()))
    return any("torch" in name for name in names if isinstance(name, str))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    known = {ROOT / file for file in WITH_MPI + WITH_GPUS}
    elsewhere = {i.path for i in items if i.get_closest_marker("mpi")} - known
    if elsewhere:
        raise pytest.UsageError(f"expected tests marked mpi in the files that tests/run.py lists, got {min(elsewhere)}")
    on_gpus = [item for item in items if item.get_closest_marker("gpu")]
    if on_gpus and (reason := cuda.unavailable()):
        for item in on_gpus:
            item.add_marker(pytest.mark.skip(reason=f"needs a GPU: {reason}"))
    items.sort(key=lambda item: not mentions_torch(item))  # first: one worker takes them all, and imports it


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # thousands of tests and what they import: a collection that a test asks for passes them over
