"""Where training data comes from: what ``--data`` names, as texts or as token files.

Token files are llm.c's: a header of 256 little-endian int32 (magic, version, count of tokens, zeros) and the tokens,
uint16 for GPT-2's vocabulary, uint32 for LLaMA-3's.  Source: karpathy/llm.c, dev/data/data_common.py.
"""

from __future__ import annotations

import glob
import logging
import os
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from kos.errors import DataError
from kos.train.data import download
from kos.train.data.stdlib import read_stdlib

_log = logging.getLogger(__name__)

HELD_OUT = 10
"""One part in this many is for validation: of a text or a token file, of the files of a folder."""

Splits = tuple[Sequence[Any], Sequence[Any]]
Show = Callable[[str, float], object]
"""Called now and then, with what is being done and the share that is done."""
T = TypeVar("T")

HEADER_BYTES = 256 * 4
FORMATS = {20240520: (1, np.uint16), 20240801: (7, np.uint32)}  # magic -> version, what a token is
VOCAB_SIZES = {2: 50_257, 4: 128_256}  # by the bytes of a token


@dataclass(frozen=True)
class Corpus:
    """The data for training, and the data held out for validation: texts, or memory-mapped arrays of tokens."""

    name: str
    files: Sequence[Path]  # that it is read from; none of what comes with a program
    read: Callable[[], Splits]
    vocab_size: int | None = None  # of tokens; None: text

    @cached_property
    def splits(self) -> Splits:
        """``train`` and ``val``, read when they are first asked for.  Raises DataError as ``read_corpus``."""
        return self.read()

    train = property(lambda self: self.splits[0])
    val = property(lambda self: self.splits[1])


def read_corpus(data: str, show: Show = lambda what, share: None) -> Corpus:
    """The corpus that ``--data`` names.

    ``stdlib``, ``tinyshakespeare``, or a path: a text or token file (its last tenth is held out), a folder of
    text files (every tenth is held out, in the order of their names, at least one), or a folder or glob pattern
    of token files (those named ``*val*`` are held out).

    DataError: missing, unreadable, empty or binary.
    """
    corpus = _readable(data, lambda: _read(data, show))
    return replace(corpus, read=lambda: _readable(data, corpus.read))


def _readable(data: str, action: Callable[[], T]) -> T:
    try:
        return action()
    except OSError as error:
        got = f"{error.filename or data}: {error.strerror}"
        raise DataError(f"--data {data}: expected readable files, got {got}") from None


def _read(data: str, show: Show) -> Corpus:
    if data == "stdlib":
        return Corpus(data, [], read_stdlib)
    if data == download.NAME:
        return Corpus(data, [], lambda: _cut(_read_text(download.tinyshakespeare())))
    path = Path(data)
    if path.is_dir():
        return _read_folder(path, show)
    if path.is_file():
        if not _is_token_file(path):
            return Corpus(path.name, [path], lambda: _cut(_read_text(path)))
        tokens = _map_tokens(path)
        return Corpus(path.name, [path], lambda: _cut(tokens), VOCAB_SIZES[tokens.itemsize])
    if path.exists():
        raise DataError(f"--data: expected a regular file or a folder, got {data!r} (a device, pipe or socket)")
    matches = [Path(match) for match in sorted(glob.glob(data))] if glob.has_magic(data) else []
    if not matches:
        names = f"stdlib, {download.NAME}, or the path of a file or folder"
        raise DataError(f"--data: expected {names}, got {data!r} (no such file)")
    if other := next((match for match in matches if not _is_token_file(match)), None):
        raise DataError(f"--data: expected a pattern of token files, got {data!r} ({other} is none)")
    return _token_corpus(data, matches)


def _cut(whole: Any) -> Splits:
    """The first nine tenths of a text or of tokens, and the rest (nanoGPT's data/shakespeare_char/prepare.py)."""
    at = int(len(whole) * (1 - 1 / HELD_OUT))
    return [whole[:at]], [whole[at:]]


def _read_folder(folder: Path, show: Show) -> Corpus:
    paths = _visible_files(folder)
    if tokens := [path for path in paths if path.suffix == ".bin" and _is_token_file(path)]:
        return _token_corpus(str(folder), tokens)
    return Corpus(folder.name, paths, lambda: _read_texts(folder, paths, show))


def _read_texts(folder: Path, paths: Sequence[Path], show: Show) -> Splits:
    texts = []
    for number, path in enumerate(paths):
        show("reading the data", number / len(paths))
        try:
            texts.append(_read_text(path))
        except DataError as error:
            _log.warning("skipped: %s", error)
    if not texts:
        raise DataError(
            f"--data {folder}: expected a folder with text files, got {len(paths)} files, none of them text"
        )
    if len(texts) == 1:
        return _cut(texts[0])
    val = texts[HELD_OUT - 1 :: HELD_OUT] or texts[-1:]
    train = [text for i, text in enumerate(texts) if i % HELD_OUT != HELD_OUT - 1][: len(texts) - len(val)]
    return train, val


def _visible_files(folder: Path) -> list[Path]:
    def fail(error: OSError) -> None:
        raise error

    found = []
    for where, folders, files in os.walk(folder, onerror=fail):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(where, name) for name in files if not name.startswith(".")]
    return sorted(path for path in found if path.is_file())


def _token_corpus(name: str, paths: Sequence[Path]) -> Corpus:
    """Token files; their names say which are for validation."""
    val = [path for path in paths if "val" in path.name]
    train = [path for path in paths if "train" in path.name and path not in val]
    if not train or not val:
        names = ", ".join(path.name for path in paths[:4])
        raise DataError(f"--data {name}: expected token files named *train* and *val*, got {names}")
    shards = {path: _map_tokens(path) for path in (*train, *val)}
    size = shards[train[0]].itemsize
    if other := next((path for path, tokens in shards.items() if tokens.itemsize != size), None):
        raise DataError(f"--data {other}: expected the token format of {train[0].name}, got another")
    splits = [shards[path] for path in train], [shards[path] for path in val]
    return Corpus(name, [*train, *val], lambda: splits, VOCAB_SIZES[size])


def _read_text(path: Path) -> str:
    """A UTF-8 file.  DataError where it is empty or no text."""
    try:
        content = path.read_bytes()
    except OSError as error:  # of which that of a read has no name
        raise OSError(error.errno, error.strerror, str(path)) from None
    if not content:
        raise DataError(f"--data {path}: expected text, got an empty file")
    if (nul := content.find(b"\0")) >= 0:
        raise DataError(f"--data {path}: expected UTF-8 text or an llm.c token file, got a NUL at byte {nul}")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        got = f"byte 0x{content[error.start]:02x} at {error.start}"
        raise DataError(f"--data {path}: expected UTF-8 text or an llm.c token file, got {got}") from None


def _is_token_file(path: Path) -> bool:
    """Whether a file starts with one of the format's magic numbers."""
    with path.open("rb") as file:
        return int.from_bytes(file.read(4), "little") in FORMATS


def _map_tokens(path: Path) -> NDArray[Any]:
    """The tokens of a file, memory-mapped.  DataError: another version, empty, not as long as its header says."""
    with path.open("rb") as file:
        magic, version, count = struct.unpack("<3i", file.read(12).ljust(12, b"\0"))
    known, dtype = FORMATS[magic]
    if version != known:
        raise DataError(f"--data {path}: expected version {known} of token file {magic}, got {version}")
    if count < 1:
        raise DataError(f"--data {path}: expected a token file with tokens, got a count of {count}")
    expected = HEADER_BYTES + count * np.dtype(dtype).itemsize
    if (size := path.stat().st_size) != expected:
        raise DataError(f"--data {path}: expected {expected} bytes ({count} tokens after the header), got {size}")
    return np.memmap(path, np.dtype(dtype).newbyteorder("<"), "r", offset=HEADER_BYTES, shape=(count,))
