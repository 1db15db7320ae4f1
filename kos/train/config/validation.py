"""What pydantic refuses, as one line."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping
from types import MappingProxyType

from pydantic import ValidationError


def one_line(error: ValidationError, label: Mapping[str, str] = MappingProxyType({})) -> str:
    """The first of pydantic's complaints as ``where: expected X, got Y``."""
    first = error.errors()[0]
    path = [str(part) for part in first["loc"]]
    key = ".".join(path[: 2 if path[:1] == ["model"] else 1])
    if first["type"] == "value_error":  # of several values: the message names them
        return str(first["ctx"]["error"])
    where = ".".join([label.get(key, key), *path[key.count(".") + 1 :]])
    if first["type"] == "missing":
        return f"{where}: expected a value, got none"
    if first["type"] == "extra_forbidden":
        return f"{where}: expected a known key, got {path[-1]!r}"
    expected = re.sub(r"^(Input|String) should (be |have )?", "", first["msg"])
    expected = re.sub(r"^Input is not a valid path.*", "a path", expected)
    expected = re.sub(r"valid dictionary or instance of \w+", "table of keys", expected)
    number = "a number " if expected.startswith(("greater", "less")) else ""
    return f"{where}: expected {number}{expected}, got {reprlib.repr(first['input'])}"
