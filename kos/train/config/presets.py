"""Named starting points of a run: the tables of ``presets.toml``, by the names that ``--preset`` takes."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, NamedTuple


class Preset(NamedTuple):
    """One line for ``--help``, and the configuration keys with their values."""

    about: str
    values: dict[str, Any]


_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
PRESETS = {name: Preset(table.pop("about"), table) for name, table in _TABLES.items()}
