"""The default corpus: sources of Python's own standard library, real text that every Python ships.

``stdlib.toml`` names the files.  Their text differs between versions of Python, and so does the fingerprint of the
data.
"""

from __future__ import annotations

import sysconfig
import tomllib
from pathlib import Path

from kos.errors import DataError

_FILES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
TRAIN, VAL = tuple(_FILES["train"]), tuple(_FILES["val"])


def read_stdlib(root: Path | None = None) -> tuple[list[str], list[str]]:
    """The training and the held-out files, as text, in a fixed order.  DataError if this Python lacks them."""
    root = root or Path(sysconfig.get_paths()["stdlib"])
    try:
        train, val = ([(root / f"{name}.py").read_text("utf-8") for name in names] for names in (TRAIN, VAL))
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"--data stdlib: expected this Python to ship its sources, got {error}; give --data PATH"
        ) from None
    return train, val
