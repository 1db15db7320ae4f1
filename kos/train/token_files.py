"""Token files in llm.c's format, memory-mapped.

A header of 256 little-endian int32 (magic, version, count of tokens, zeros) and the tokens: uint16 for
GPT-2's vocabulary, uint32 for LLaMA-3's.  Source: karpathy/llm.c, dev/data/data_common.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kos.errors import DataError

HEADER_BYTES = 256 * 4


class Format(NamedTuple):
    """What a magic number stands for."""

    version: int
    dtype: str
    vocab_size: int


FORMATS = {20240520: Format(1, "<u2", 50_257), 20240801: Format(7, "<u4", 128_256)}


def is_token_file(path: Path) -> bool:
    """Whether a file starts with one of the format's magic numbers; False where it cannot be read."""
    try:
        with path.open("rb") as file:
            return int.from_bytes(file.read(4), "little") in FORMATS
    except OSError:
        return False


def format_of(path: Path) -> Format:
    """The format of a token file.  Raises DataError if its header is not whole or of another version."""
    with path.open("rb") as file:
        header = np.frombuffer(file.read(HEADER_BYTES).ljust(HEADER_BYTES, b"\0"), "<i4")
    layout = FORMATS[int(header[0])]
    if header[1] != layout.version:
        raise DataError(
            f"{path}: expected version {layout.version} of token file {header[0]}, got {header[1]}"
        )
    return layout


def map_tokens(path: Path) -> NDArray[Any]:
    """The tokens of a file, not read before they are used.

    Raises:
        DataError: unreadable, of an unknown version, empty, or not as long as its header says.
    """
    try:
        layout = format_of(path)
        with path.open("rb") as file:
            file.seek(8)
            count = int.from_bytes(file.read(4), "little", signed=True)
        size = path.stat().st_size
        expected = HEADER_BYTES + count * np.dtype(layout.dtype).itemsize
        if count < 1:
            raise DataError(f"{path}: expected a token file with tokens, got a count of {count}")
        if size != expected:
            raise DataError(
                f"{path}: expected {expected} bytes ({count} tokens after the header), got {size}"
            )
        return np.memmap(path, layout.dtype, "r", offset=HEADER_BYTES, shape=(count,))
    except OSError as error:
        raise DataError(f"{path}: expected a readable token file, got {error.strerror}") from None
