"""The reference: each public name is on one page of docs/reference.  Other pages and pictures are those of the code."""

import importlib
import pkgutil
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import kos
import kos.errors
from docs.drawings import IMAGES, pictures
from kos.dtypes import DTYPES
from tests.literals import literals

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "reference"
PAGES = sorted(FOLDER.glob("*.md"))
SHOWN = [each for page in PAGES for each in re.findall(r"^- `(kos[\w.]*)`$", page.read_text(), re.M)]
"""The names of all pages, which the site shows with their docstrings."""

MODULES = ("kos", "kos.comm", "kos.testing", "kos.testing.conformance", "kos.memory", "kos.cuda", "kos.train",
           "kos.comm.schedules", "kos.interop.ray", "kos.interop.jax", "kos.interop.flashinfer")  # fmt: skip


def resolve(name: str) -> Any:
    """The object of that name; None for an attribute of instances alone."""
    try:
        return pkgutil.resolve_name(name)
    except AttributeError:
        return None


def public_names(module: str) -> list[str]:
    """Its ``__all__``; else the classes and functions that it defines."""
    loaded = importlib.import_module(module)
    names = getattr(loaded, "__all__", None) or [
        name for name, value in vars(loaded).items()
        if getattr(value, "__module__", None) == module and hasattr(value, "__qualname__")
    ]  # fmt: skip
    return [name for name in names if not name.startswith("_") and (module, name) != ("kos", "errors")]


@pytest.mark.parametrize("module", MODULES)
def test_each_public_name_is_shown_once(module):
    shown = Counter(id(resolve(name)) for name in SHOWN if not name.startswith("kos.interop.torch"))
    times = {name: shown[id(getattr(importlib.import_module(module), name))] for name in public_names(module)}
    assert times and set(times.values()) == {1}, f"docs/reference: expected each name of {module} once, got {times}"


def test_each_member_of_the_communicator_is_shown_once():
    members = {name for name, value in vars_of(kos.Communicator) if callable(value) or isinstance(value, property)}
    shown = Counter(name.rpartition(".")[2] for name in SHOWN if name.startswith("kos.Communicator."))
    assert members - {*shown} == set() and set(shown.values()) == {1}, (members - {*shown}, shown)
    assert len(SHOWN) == len(set(SHOWN)), Counter(SHOWN).most_common(3)


def vars_of(kind: type) -> list[tuple[str, Any]]:
    return [(name, getattr(kind, name)) for name in dir(kind) if not name.startswith("_")]


def test_the_pictures_are_those_drawn_today():
    committed = {file.stem: file.read_text() for file in IMAGES.glob("*")}
    stale = [name for name, svg in pictures().items() if committed.pop(name, None) != svg]
    assert not stale and not committed, f"{[*stale, *committed]}: run python -m docs.drawings, and remove others"


STEP = re.compile(r"((?:`\w+`(?:, )?)+) → `([\w/]+\.\w+)`")
"""Functions or classes, and their file in kos: `` `make_key`, `cache_find` → `_core/module_cache.c` ``."""


def test_the_functions_of_the_architecture_are_in_their_files():
    steps = STEP.findall((ROOT / "docs" / "architecture.md").read_text())
    found = [(name, file) for names, file in steps for name in re.findall(r"`(\w+)`", names)]
    assert len(found) > 50
    for name, file in found:
        defined = rf"^ *(?:def|class) {name}\b" if file.endswith(".py") else rf"^\w.*\b{name}\("
        assert re.search(defined, (ROOT / "kos" / file).read_text(), re.M), f"{name}: not defined in {file}"


def test_each_class_of_errors_is_shown():
    kinds = {f"kos.errors.{name}" for name, kind in vars(kos.errors).items()
             if isinstance(kind, type) and issubclass(kind, kos.errors.KosError)}  # fmt: skip
    assert kinds == {each for each in SHOWN if each in kinds}, kinds - {*SHOWN}


def test_the_api_page_names_every_dtype():
    api = (FOLDER / "api.md").read_text()
    assert [name for name in DTYPES if f"`{name}`" not in api] == []


def test_the_findings_of_the_doctor_are_its_own():
    table = (FOLDER / "errors.md").read_text().partition("| the doctor prints |")[2].partition("\n\n")[0]
    quoted = re.findall(r"`(?:no|bad) ([^`]+)`", table)
    sources = literals(ROOT / "kos" / "doctor")
    parts = [part.strip() for each in quoted for part in re.split(r"[…()]|(?<=kos) |(?<=pid) |(?<=ipc) ", each)]
    missing = [part for part in parts if part and part not in sources]
    assert len(quoted) > 8 and not missing, f"errors.md: kos/doctor does not print {missing}"
