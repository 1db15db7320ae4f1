"""Results of other libraries, recorded so that tests compare with them where these libraries are not installed.

    python -m tests.goldens [pytest arguments]           # make them again, with transformers, torch, peft and lm_eval
    python -m tests.goldens --check [pytest arguments]   # make them again, and compare with the recorded ones

A test takes the fixture ``golden`` and calls ``golden(key, reference)``.  ``reference`` is a function that uses the
library; its result is numbers, texts, lists and tables of them, and arrays.  The recorded result is returned, as JSON
has it.  ``.ci/run`` checks the recorded results: ``reference`` is called too, and both have to agree.

Large arrays are recorded as sketches.
"""

import importlib.metadata
import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar
from zlib import crc32

import numpy as np
import pytest

FOLDER = Path(__file__).parent
MODE = "GOLDENS"
"""The environment variable that is ``check`` or ``make`` if the results are made again."""
LIBRARIES = ("lm_eval", "peft", "tokenizers", "torch", "transformers")


def sketch(array: np.ndarray, size: int = 6, digits: int = 15) -> list[float]:
    """The norm of an array, and ``size`` sums of all elements, each with a random sign.

    ``distance`` of two sketches is, on average, the norm of the difference of their arrays, divided by that of the
    second one.
    """
    flat = np.asarray(array, np.float64).ravel()
    signs = np.random.RandomState(flat.size).randint(0, 2, (size, flat.size)) * 2 - 1  # a frozen stream
    return [float(f"{value:.{digits}g}") for value in (np.linalg.norm(flat), *signs @ flat / math.sqrt(size))]


def distance(got: np.ndarray, expected: list[float]) -> float:
    """Of an array from the array of which ``expected`` is the sketch."""
    found = sketch(got, len(expected) - 1)
    return float(np.linalg.norm(np.subtract(found[1:], expected[1:]))) / max(expected[0], 1e-3)


def shortened(values: Sequence[Any], most: int = 40) -> Sequence[Any]:
    """A text or a list as it is recorded: if it has more than ``most`` elements, its length and a checksum."""
    return values if len(values) <= most else [len(values), crc32(json.dumps(values).encode())]


class Goldens:
    """The recorded results of the tests of one file."""

    made: ClassVar[dict[Path, dict[str, Any]]] = {}
    """By mode ``make``, of all files."""

    def __init__(self, module: Path) -> None:
        self.path = FOLDER / f"{module.stem.removeprefix('test_')}.json"
        self.results = read(self.path)

    def __call__(self, key: str, reference: Callable[[], Any], rtol: float = 1e-9) -> Any:
        """The recorded result; ``rtol``: how much results of different machines may differ, relative to their norm."""
        if (mode := os.environ.get(MODE)) == "make":
            result = json.loads(json.dumps(reference(), default=np.ndarray.tolist))
            made = Goldens.made.setdefault(self.path, {})
            assert made.setdefault(key, result) == result, f"expected one golden for each key, got two for {key!r}"
            return result
        if key not in self.results:
            pytest.fail(f"expected a golden {key!r} in {self.path}, got none; make it: python -m tests.goldens")
        if mode == "check":
            compare(json.loads(json.dumps(reference(), default=np.ndarray.tolist)), self.results[key], rtol, key)
        return self.results[key]


def compare(got: Any, recorded: Any, rtol: float, where: str) -> None:
    """Raise if a result is not the recorded one.  Lists of numbers are compared by their norms."""
    if isinstance(recorded, dict) and isinstance(got, dict):
        assert got.keys() == recorded.keys(), f"{where}: expected the keys {[*recorded]}, got {[*got]}"
        for key, value in recorded.items():
            compare(got[key], value, rtol, f"{where}, {key}")
    elif isinstance(recorded, list) and any(isinstance(each, float) for each in recorded):
        error = np.linalg.norm(np.subtract(got, recorded))
        assert error <= rtol * np.linalg.norm(recorded), f"{where}: expected {recorded}, got {got}"
    elif isinstance(recorded, list) and isinstance(got, list):
        assert len(got) == len(recorded), f"{where}: expected {len(recorded)} elements, got {len(got)}"
        for number, value in enumerate(recorded):
            compare(got[number], value, rtol, f"{where}, {number}")
    elif isinstance(recorded, float):
        assert math.isclose(got, recorded, rel_tol=rtol), f"{where}: expected {recorded}, got {got}"
    else:
        assert got == recorded, f"{where}: expected {recorded!r}, got {got!r}"


def read(path: Path) -> dict[str, Any]:
    """The recorded results of a file, by key."""
    return dict(json.loads(path.read_text())["results"]) if path.exists() else {}


def write(keeps: bool) -> None:
    """Write what tests have made.  ``keeps``: some tests did not run, so other recorded results stay."""
    for path, made in Goldens.made.items():
        results = {**(read(path) if keeps else {}), **made}
        there = [name for name in LIBRARIES if name in sys.modules]
        about = {"made_with": {name: importlib.metadata.version(name) for name in there}}
        lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(results[key], sort_keys=True)}" for key in sorted(results))
        path.write_text(f'{{"about": {json.dumps(about)},\n"results": {{\n{lines}\n}}}}\n')
