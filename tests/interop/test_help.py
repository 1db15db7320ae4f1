"""``help()`` of what users of other frameworks call says what it raises."""

import importlib
import inspect

import pytest

MODULES = {
    "kos.interop.jax": {}, "kos.interop.ray": {"Collectives": ()}, "kos.interop.flashinfer": {"CommBackend": ("Get_",)},
}  # fmt: skip
"""The classes of each module, and how the names of methods begin that raise nothing."""


def public(holder):
    """The functions and classes that the module or class defines, by name."""
    module = getattr(holder, "__module__", holder.__name__)
    mine = {name: value for name, value in vars(holder).items() if getattr(value, "__module__", "") == module}
    return {name: value for name, value in mine.items() if not name.startswith("_") and hasattr(value, "__qualname__")}


@pytest.mark.parametrize("module", MODULES)
def test_each_function_and_method(module):
    found = public(importlib.import_module(module))
    for name, quiet in MODULES[module].items():
        found |= {each: value for each, value in public(found[name]).items() if not each.startswith(quiet or "?")}
    assert len(found) > 3 and [name for name, value in found.items() if "aises" not in value.__doc__] == []


def test_each_operation_of_a_process_group():
    dist = pytest.importorskip("torch.distributed")
    from kos.interop.torch import Options, ProcessGroupKos
    from kos.interop.torch.operations import Operations

    names = {n for n, x in inspect.getmembers(dist.ProcessGroup) if "c10d::Work" in (x.__doc__ or "") and n[0] != "_"}
    called = names - {"reconfigure"} | {"monitored_barrier", "split_group", "set_timeout", "shutdown", "abort"}
    assert len(names) > 15
    mine = vars(Operations) | vars(ProcessGroupKos)
    for value in (Options, ProcessGroupKos, *(mine[name] for name in called)):
        assert "aises" in value.__doc__ or "raise " in value.__doc__, value
