"""Packages that take seconds to import: the first test that needs one imports it, and not the collection of tests."""

import importlib
from importlib.util import find_spec
from typing import Any

import pytest


class Package:
    """A package that the first use of one of its public names imports."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # of which pytest asks any object of a module
            raise AttributeError(name)
        return getattr(importlib.import_module(self._name), name)


def needs(*names: str) -> pytest.MarkDecorator:
    """Skips the tests that it marks, without importing anything, if one of these packages is not installed."""
    reason = f"the reference needs {' and '.join(names)} (pip install {' '.join(names)})"
    return pytest.mark.skipif(not all(map(find_spec, names)), reason=reason)
