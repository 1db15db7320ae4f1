"""Token files in llm.c's format.

A header of 256 little-endian int32 (magic, version, count of tokens, zeros) and the tokens, uint16 for GPT-2's
vocabulary, uint32 for LLaMA-3's.  Source: karpathy/llm.c, dev/data/data_common.py.

A file ``X.mask`` beside ``X.bin`` has a byte for each of its tokens: 1 if the loss counts it, else 0.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kos.commands import python_code
from kos.errors import DataError
from kos.files import OpenFile

KINDS = "text, .jsonl, .jsonl.gz or llm.c's token files"
"""The kinds of data that kos reads, for help and errors."""

HEADER_BYTES = 256 * 4
FORMATS = {20240520: (1, np.uint16), 20240801: (7, np.uint32)}  # magic -> version, what a token is
VOCAB_SIZES = {2: 50_257, 4: 128_256}  # by the bytes of a token
BEGINS = {50_257: 50_256, 128_256: 128_000}
"""The token that begins a document, by the vocabulary: <|endoftext|> of GPT-2, <|begin_of_text|> of LLaMA-3."""


def is_token_file(path: Path) -> bool:
    """Whether a file starts with one of the format's magic numbers."""
    with path.open("rb") as file:
        return int.from_bytes(file.read(4), "little") in FORMATS


SCANNED = 1 << 24  # tokens that are read at once at the start


class FileArray:
    """``length`` numbers of a file from byte ``start`` on, as an array whose slices are read where they are used.

    A DataError names a file that another program has changed meanwhile.
    """

    def __init__(self, file: OpenFile, dtype: Any, start: int, length: int) -> None:
        self._file, self._start, self._length, self.dtype = file, start, length, np.dtype(dtype)
        self.path, self.itemsize = file.path, self.dtype.itemsize

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, at: slice) -> FileArray:
        start, stop, _ = at.indices(self._length)
        return FileArray(self._file, self.dtype, self._start + start * self.itemsize, max(0, stop - start))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        numbers = np.empty(self._length, self.dtype)
        try:
            self._file.read(self._start, numbers.view(np.uint8).data)
        except OSError as error:
            raise DataError(f"{self.path}: {error.strerror}") from error
        return numbers if dtype is None else numbers.astype(dtype, copy=False)


class MaskedTokens:
    """Tokens and their mask as an array that is made where it is read: a token t not counted is ~t, in int64."""

    dtype = np.dtype(np.int64)

    def __init__(self, tokens: FileArray, mask: FileArray) -> None:
        self.tokens, self.mask, self.itemsize = tokens, mask, tokens.itemsize

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, at: slice) -> MaskedTokens:
        return MaskedTokens(self.tokens[at], self.mask[at])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        tokens = np.asarray(self.tokens, dtype or self.dtype)
        return np.where(np.asarray(self.mask), tokens, ~tokens)


def mask_of(path: Path) -> Path:
    """Where the mask of a token file is, if it has one."""
    return path.with_suffix(".mask")


def open_tokens(path: Path) -> FileArray | MaskedTokens:
    """The tokens of a file, with its mask if there is one.

    Unsigned numbers are tokens that the loss counts. Where the dtype is signed, a token t that it does not count is ~t
    (``Tokens.masked``, ``unmasked``): no other negative number may be there.

    DataError: another version, empty, not as long as its header says; a mask of another length.
    """
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
    tokens = FileArray(OpenFile(path), np.dtype(dtype).newbyteorder("<"), HEADER_BYTES, count)
    if not (beside := mask_of(path)).is_file():
        return tokens
    if (size := beside.stat().st_size) != count:
        raise DataError(f"--data {beside}: expected {count} bytes, one for each token of {path.name}, got {size}")
    return MaskedTokens(tokens, FileArray(OpenFile(beside), np.uint8, 0, count))


def pieces(array: Any) -> Iterator[NDArray[Any]]:
    """An array in pieces that fit in memory, one after another."""
    return (np.asarray(array[at : at + SCANNED]) for at in range(0, len(array), SCANNED))


def check_mask(flag: str, shard: Any) -> None:
    """DataError if the mask of a token file of ``flag`` has other bytes than 0 and 1, such as text."""
    mask = getattr(shard, "mask", None)
    if mask is not None and (largest := max((int(piece.max()) for piece in pieces(mask)), default=0)) > 1:
        raise DataError(f"{flag} {mask.path}: expected bytes of 0 and 1, got {largest}")


def beyond_vocabulary(flag: str, shard: Any, vocab_size: int) -> DataError:
    """The error for the file of which ``shard`` is a part, with its first token that is not below ``vocab_size``."""
    path, begin = getattr(shard, "tokens", shard).path, 0
    whole = open_tokens(path)
    for piece in pieces(whole.tokens if isinstance(whole, MaskedTokens) else whole):
        if (beyond := piece >= vocab_size).any():
            at = int(beyond.argmax())
            break
        begin += len(piece)
    got = f"{piece[at]} at token {begin + at}"
    return DataError(f"{flag} {path}: expected tokens below the vocabulary's {vocab_size}, got {got}")


def header_missing(path: Path) -> DataError:
    """The error for a ``.bin`` file without a header, with the command that adds one to nanoGPT's files."""
    magic, (version, _) = next(iter(FORMATS.items()))
    lines = (
        "import numpy as np, sys",
        "tokens = np.fromfile(sys.argv[1], '<u2')",
        f"np.append(np.array([{magic}, {version}, len(tokens)] + [0] * 253, '<i4').view('<u2'), tokens)"
        ".tofile(sys.argv[2])",
    )
    got = "none, as in nanoGPT's files"
    how = python_code("; ".join(lines), path, path.with_name(f"llmc_{path.name}"))
    return DataError(f"--data {path}: expected llm.c's header, got {got}; to add one, run: {how}")
