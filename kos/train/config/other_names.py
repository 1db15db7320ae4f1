"""What other trainers call a setting: the names of ``other_names.toml``, for the suggestions in errors."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path

from kos.train.config.optimizers import OPTIMIZERS

WITHOUT = "docs/guides/not-in-the-trainer.md"


def suggestion(word: str, known: Iterable[str]) -> str:
    """What an error adds about an unknown flag or key: what it is called here, that there is none, or the closest."""
    table = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
    name = word.rpartition(".")[2].lstrip("-").replace("_", "-").lower()
    if here := next((here for here, names in table["here"].items() if name in names), None):
        return f" (here: {here})"
    if name in OPTIMIZERS:
        return f" (here: --optimizer {name})"
    if any(f"{name}-".startswith(f"{none}-") for none in table["none"]["names"]):
        return f" (the trainer has none: {WITHOUT})"
    return closest(word, known, 0.75)


def closest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """`` (closest: X)``, or nothing if the similarity of all, from 0 to 1, is below ``cutoff``."""
    near = get_close_matches(word, known, n=1, cutoff=cutoff)
    return f" (closest: {near[0]})" if near else ""
