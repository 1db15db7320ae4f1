"""Environment variables that switch something on or off."""

import os

from kos.errors import InvalidArgument


def is_on(name: str, default: bool = False) -> bool:
    """Whether the environment variable ``name`` is 1; ``default`` if it is unset or empty.

    Raises InvalidArgument for a value other than 0 and 1.
    """
    value = os.environ.get(name, "")
    if value not in ("", "0", "1"):
        raise InvalidArgument(f"{name}: expected 0 or 1 in the environment, got {value!r}")
    return value == "1" if value else default
