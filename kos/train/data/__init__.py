"""Files of tokens, and a row of tokens over the files that hold them.

A token file is in llm.c's format, NumPy's ``.npy``, or numbers without a header (``--token-dtype``).

llm.c's have a header of 256 little-endian int32 (magic, version, count of tokens, zeros) and the tokens, uint16 for
GPT-2's vocabulary, uint32 for LLaMA-3's.  Source: karpathy/llm.c, dev/data/data_common.py.

A file ``X.mask`` beside ``X.bin`` has a byte for each of its tokens: 1 if the loss counts it, else 0.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kos.errors import DataError, in_words
from kos.files import OpenFile

HEADER_BYTES = 256 * 4
FORMATS = {20240520: (1, np.uint16), 20240801: (7, np.uint32)}  # magic -> version, what a token is
VOCAB_SIZES = {1: 256, 2: 50_257, 4: 128_256}  # by the bytes of a token
BEGINS = {50_257: 50_256, 128_256: 128_000}
"""The token that begins a document, by the vocabulary: <|endoftext|> of GPT-2, <|begin_of_text|> of LLaMA-3."""


def has_magic(path: Path) -> bool:
    """Whether a file starts with one of the format's magic numbers."""
    with path.open("rb") as file:
        return int.from_bytes(file.read(4), "little") in FORMATS


MANIFEST = "manifest.json"
FORMAT = "kos tokens 1"
"""The ``format`` in the manifest of a folder that ``kos tokenize`` has written."""


def is_tokenized(folder: Path) -> bool:
    """Whether ``kos tokenize`` has begun to write a folder."""
    try:
        with (folder / MANIFEST).open(encoding="utf-8") as file:
            return file.read(64).startswith(json.dumps({"format": FORMAT})[:-1])
    except (OSError, ValueError):
        return False


SCANNED = 1 << 22  # tokens that are read at once at the start


class FileArray:
    """``length`` numbers of a file from byte ``start`` on, as an array whose slices are read where they are used.

    The array is unsigned and has at most 4 bytes per number: what is negative or too large becomes a number of at least
    2**31, which is no token. A DataError names a file that another program has changed meanwhile.
    """

    def __init__(self, file: OpenFile, stored: Any, start: int, length: int, first: int = 0) -> None:
        self._file, self._start, self._length, self._stored = file, start, length, np.dtype(stored)
        self.path, self.first = file.path, first  # its number in the file
        self.itemsize = min(4, self._stored.itemsize)
        self.dtype = np.dtype(f"u{self.itemsize}")

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, at: slice) -> FileArray:
        start, stop, _ = at.indices(self._length)
        begin = self._start + start * self._stored.itemsize
        return FileArray(self._file, self._stored, begin, max(0, stop - start), self.first + start)

    def read(self) -> NDArray[Any]:
        """The numbers as they are in the file."""
        numbers = np.empty(self._length, self._stored)
        try:
            self._file.read(self._start, numbers.view(np.uint8).data)
        except OSError as error:
            raise DataError(f"{self.path}: {error.strerror}") from error
        return numbers

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        numbers = self.read()
        if numbers.itemsize > 4:
            numbers = np.minimum(numbers.astype(np.uint64), np.uint64(2**32 - 1))
        return numbers.astype(self.dtype, copy=False).astype(dtype or self.dtype, copy=False)


@dataclass(frozen=True)
class Shard:
    """Tokens, and a mask of as many bytes, 1 if the loss counts the token. Without a mask, it counts all of them."""

    tokens: NDArray[Any] | FileArray
    mask: NDArray[np.uint8] | FileArray | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, at: slice) -> Shard:
        return Shard(self.tokens[at], None if self.mask is None else self.mask[at])

    def arrays(self) -> tuple[NDArray[Any], NDArray[np.uint8]]:
        """The tokens and the mask, read."""
        mask = np.ones(len(self), np.uint8) if self.mask is None else np.asarray(self.mask, np.uint8)
        return np.asarray(self.tokens), mask

    def pieces(self) -> Iterator[tuple[NDArray[Any], NDArray[np.uint8]]]:
        """``arrays`` in pieces that fit in memory, one after another."""
        return (self[at : at + SCANNED].arrays() for at in range(0, len(self), SCANNED))


def mask_of(path: Path) -> Path:
    """Where the mask of a token file is, if it has one."""
    return path.with_suffix(".mask")


def open_tokens(path: Path, token_dtype: str | None = None) -> Shard:
    """The tokens of a file, with its mask if there is one; ``token_dtype`` is that of a ``.bin`` file without a header.

    DataError: another version, empty, not as long as its header says; no array of integers; a mask of another length.
    """
    if path.suffix.lower() == ".npy":
        dtype, start, count = _read_npy(path)
    elif has_magic(path):
        dtype, start, count = _read_header(path)
    else:
        dtype, start = np.dtype(token_dtype).newbyteorder("<"), 0
        count, over = divmod(size := path.stat().st_size, dtype.itemsize)
        if over or not count:
            expected = f"a whole number of tokens of {dtype.itemsize} bytes (--token-dtype {token_dtype})"
            raise DataError(f"--data {path}: expected {expected}, got {size} bytes").about("data", "token_dtype")
    tokens = FileArray(OpenFile(path), dtype, start, count)
    if not (beside := mask_of(path)).is_file():
        return Shard(tokens)
    if (size := beside.stat().st_size) != count:
        raise DataError(f"--data {beside}: expected {count} bytes, one for each token of {path.name}, got {size}")
    return Shard(tokens, FileArray(OpenFile(beside), np.uint8, 0, count))


def _read_header(path: Path) -> tuple[np.dtype[Any], int, int]:
    """The dtype of a file in llm.c's format, where its tokens begin, and their number."""
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
    return np.dtype(dtype).newbyteorder("<"), HEADER_BYTES, count


def _read_npy(path: Path) -> tuple[np.dtype[Any], int, int]:
    """As ``_read_header``."""
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise DataError(f"--data {path}: expected an array of NumPy, got {in_words(error)}") from None
    if array.dtype.str[1:] not in ("u1", "u2", "u4", "u8", "i4", "i8") or array.ndim != 1 or not array.size:
        got = f"{array.dtype} of shape {array.shape}"
        raise DataError(f"--data {path}: expected one row of uint8, uint16 or larger integers, got {got}")
    return array.dtype, array.offset, array.size


def check_mask(flag: str, shard: Shard) -> None:
    """DataError if the mask of a token file of ``flag`` has other bytes than 0 and 1, such as text."""
    if isinstance(shard.mask, FileArray) and (largest := max(int(mask.max()) for _, mask in shard.pieces())) > 1:
        raise DataError(f"{flag} {shard.mask.path}: expected bytes of 0 and 1, got {largest}")


def beyond_vocabulary(flag: str, shard: Shard, vocab_size: int) -> DataError:
    """The error for the first token of ``shard``, of a file, that is not below ``vocab_size``."""
    tokens, at = shard.tokens, 0
    assert isinstance(tokens, FileArray)
    for piece, _ in shard.pieces():
        if (beyond := piece >= vocab_size).any():
            at += int(beyond.argmax())
            break
        at += len(piece)
    got = f"{tokens[at : at + 1].read()[0]} at token {tokens.first + at}"
    return DataError(f"{flag} {tokens.path}: expected tokens below the vocabulary's {vocab_size}, got {got}")


class Separator(NamedTuple):
    """A token that begins documents, or that ``ends`` them."""

    token: int
    ends: bool


class Tokens:
    """A row of tokens and their mask over one or more shards, which stay where they are, in files or in memory.

    An array as a shard is one whose tokens all count in the loss.  ``documents`` are the places where
    documents begin, from 0 on and increasing, or the token between them.
    """

    stride = 1
    """Sequences that are drawn start at multiples of this."""

    fill = 1.0
    """The share of sequences that is tokens; the rest is padding."""

    def __init__(
        self, shards: Sequence[Shard | NDArray[Any]], documents: NDArray[np.int64] | Separator | None = None
    ) -> None:
        self.shards, self.documents = [x if isinstance(x, Shard) else Shard(x) for x in shards], documents
        self._ends = np.cumsum([len(shard) for shard in self.shards])

    @property
    def size(self) -> int:
        """The tokens of all shards."""
        return int(self._ends[-1])

    def __len__(self) -> int:
        return self.size

    @property
    def masked(self) -> bool:
        """Whether there may be tokens that the loss does not count."""
        return any(shard.mask is not None for shard in self.shards)

    @property
    def begins(self) -> NDArray[np.int64]:
        """``documents`` that are places."""
        assert isinstance(self.documents, np.ndarray)
        return self.documents

    def window(self, start: int, length: int) -> tuple[NDArray[Any], NDArray[np.uint8]]:
        """The tokens ``start`` to ``start + length``, and their mask: 1 if the loss counts the token."""
        parts = [shard.arrays() for shard in self._slices(start, length) or [self.shards[0][:0]]]
        tokens, masks = zip(*parts, strict=True)
        return parts[0] if len(parts) == 1 else (np.concatenate(tokens), np.concatenate(masks))

    def _slices(self, start: int, length: int) -> list[Shard]:
        parts = list[Shard]()
        shard = int(np.searchsorted(self._ends, start, side="right"))
        start -= int(self._ends[shard - 1]) if shard else 0
        while length > 0:
            parts.append(self.shards[shard][start : start + length])
            length -= len(parts[-1])
            shard, start = shard + 1, 0
        return parts

    def part(self, start: int, stop: int) -> Tokens:
        """The tokens ``start`` to ``stop``, which are whole documents."""
        inside = slice(*np.searchsorted(self.begins, [start, stop]))
        return Tokens(self._slices(start, stop - start) or [self.shards[0][:0]], np.unique(self.begins[inside] - start))

    def padding(self, start: int, length: int) -> int:
        """How many of the last tokens of ``window`` are padding."""
        return 0

    def document_starts(self, start: int, window: NDArray[Any]) -> NDArray[np.int32]:
        """Where the document of each token of ``window``, from ``start`` on, begins in it: 0 if it began before."""
        if isinstance(self.documents, Separator):
            at = np.arange(len(window), dtype=np.int32)
            begins = window == self.documents.token
            if self.documents.ends:
                begins[1:] = begins[:-1]
            return np.maximum.accumulate(np.where(begins, at, 0), dtype=np.int32)
        if self.documents is None:
            return np.zeros(len(window), np.int32)
        places = np.arange(start, start + len(window))
        begun = self.documents[np.searchsorted(self.documents, places, side="right") - 1]
        return np.maximum(begun - start, 0).astype(np.int32)
