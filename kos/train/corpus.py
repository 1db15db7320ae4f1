"""Where training data comes from: what ``--data`` names, as documents of text or as token files.

A source says which documents are for training and which are held out for validation.
"""

from __future__ import annotations

import glob
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from kos.errors import DataError
from kos.train.download import TINYSHAKESPEARE, cached
from kos.train.stdlib import read_stdlib
from kos.train.token_files import format_of, is_token_file, map_tokens

_log = logging.getLogger(__name__)

HELD_OUT = 10
"""One part in this many is for validation: of the characters of a text, of the files of a folder."""


@dataclass(frozen=True)
class TextCorpus:
    """Documents of text."""

    name: str
    train: Sequence[str]
    val: Sequence[str]


@dataclass(frozen=True)
class TokenCorpus:
    """Arrays of tokens, memory-mapped; ``vocab_size`` is that of the format."""

    name: str
    train: Sequence[NDArray[Any]]
    val: Sequence[NDArray[Any]]
    vocab_size: int


def read_corpus(data: str) -> TextCorpus | TokenCorpus:
    """The corpus that ``--data`` names.

    ``stdlib``, ``tinyshakespeare``, or a path: a text file (its last tenth is held out), a folder of text
    files (every tenth is held out, in the order of their names, at least one), a token file (its last
    tenth is held out), or a folder or glob pattern of token files (those named ``*val*`` are held out).

    Raises:
        DataError: missing, unreadable, empty or binary.
    """
    if data == "stdlib":
        return TextCorpus(data, *read_stdlib())
    if data == TINYSHAKESPEARE.name:
        return TextCorpus(data, *_cut(_read_text(cached(TINYSHAKESPEARE))))
    path = Path(data)
    if path.is_dir():
        return _read_folder(path)
    if path.is_file():
        return _read_file(path)
    if path.exists():
        raise DataError(
            f"--data: expected a regular file or a folder, got {data!r} (a device, pipe or socket)"
        )
    matches = [Path(match) for match in sorted(glob.glob(data))] if glob.has_magic(data) else []
    if not matches:
        raise DataError(
            f"--data: expected stdlib, {TINYSHAKESPEARE.name}, or the path of a file or folder, got {data!r} "
            "(no such file)"
        )
    if other := next((match for match in matches if not is_token_file(match)), None):
        raise DataError(f"--data: expected a pattern of token files, got {data!r} ({other} is none)")
    return _token_corpus(data, matches)


def _read_file(path: Path) -> TextCorpus | TokenCorpus:
    if not is_token_file(path):
        return TextCorpus(path.name, *_cut(_read_text(path)))
    tokens = map_tokens(path)
    at = len(tokens) - len(tokens) // HELD_OUT
    return TokenCorpus(path.name, [tokens[:at]], [tokens[at:]], format_of(path).vocab_size)


def _read_folder(folder: Path) -> TextCorpus | TokenCorpus:
    paths = sorted(_visible_files(folder))
    if tokens := [path for path in paths if path.suffix == ".bin" and is_token_file(path)]:
        return _token_corpus(str(folder), tokens)
    texts = []
    for path in paths:
        try:
            texts.append(_read_text(path))
        except _NotText as error:
            _log.warning("skipped: %s", error)
    if not texts:
        raise DataError(
            f"{folder}: expected a folder with text files, got {len(paths)} files, none of them text"
        )
    if len(texts) == 1:
        return TextCorpus(folder.name, *_cut(texts[0]))
    val = texts[HELD_OUT - 1 :: HELD_OUT] or texts[-1:]
    train = [text for i, text in enumerate(texts) if i % HELD_OUT != HELD_OUT - 1][: len(texts) - len(val)]
    return TextCorpus(folder.name, train, val)


def _visible_files(folder: Path) -> list[Path]:
    found = []
    for where, folders, files in os.walk(folder, onerror=_unreadable_folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(where, name) for name in files if not name.startswith(".")]
    return [path for path in found if path.is_file()]


def _unreadable_folder(error: OSError) -> None:
    raise DataError(f"{error.filename}: expected a readable folder, got {error.strerror}")


def _token_corpus(name: str, paths: Sequence[Path]) -> TokenCorpus:
    """Token files, those for validation told by their names."""
    val = [path for path in paths if "val" in path.name]
    train = [path for path in paths if "train" in path.name and path not in val]
    if not train or not val:
        names = ", ".join(path.name for path in paths[:4])
        raise DataError(f"{name}: expected token files named *train* and *val*, got {names}")
    for path in (*train, *val):
        if format_of(path) != format_of(train[0]):
            raise DataError(f"{path}: expected the token format of {train[0].name}, got another")
    return TokenCorpus(
        name, [map_tokens(p) for p in train], [map_tokens(p) for p in val], format_of(train[0]).vocab_size
    )


class _NotText(DataError):
    """A file that is readable and not text: skipped in a folder, refused by name."""


def _read_text(path: Path) -> str:
    """A UTF-8 file that is not empty."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: expected a readable text file, got {error.strerror}") from None
    if not content:
        raise _NotText(f"{path}: expected text, got an empty file")
    if (nul := content.find(b"\0")) >= 0:
        raise _NotText(f"{path}: expected UTF-8 text or an llm.c token file, got a NUL at byte {nul}")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _NotText(
            f"{path}: expected UTF-8 text or an llm.c token file, got byte 0x{content[error.start]:02x} "
            f"at {error.start}"
        ) from None


def _cut(text: str) -> tuple[list[str], list[str]]:
    """The first nine tenths of the characters, and the rest (nanoGPT's data/shakespeare_char/prepare.py)."""
    at = int(len(text) * (1 - 1 / HELD_OUT))
    return [text[:at]], [text[at:]]
