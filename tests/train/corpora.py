"""Files of data for tests, what is read of them, and what is refused."""

import itertools
import json
import os
import struct
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from kos.errors import DataError, KosError
from kos.train.data import Tokens
from kos.train.data.corpus import read_corpus
from kos.train.data.documents import TEXT, Lines
from kos.train.data.tokenized import read_rows, tokenize
from kos.train.data.tokenizers import ByteTokenizer
from tests.train.refusal import refused


def documents(data: Any, val_data: Any = None, lines: Lines = TEXT) -> tuple[list[str], list[str]]:
    """The texts of the documents to train and to validate on, read and written as bytes."""
    corpus = read_corpus(str(data), val_data=val_data and str(val_data), lines=lines)
    with tempfile.TemporaryDirectory() as folder:
        about = tokenize(Path(folder), corpus, ByteTokenizer(), split_special_tokens=True, loss_on="completion")
        train, val = map(_texts, read_rows(Path(folder), about))
    return train, val


def _texts(row: Tokens) -> list[str]:
    whole = row.window(0, len(row))[0].astype(np.uint8).tobytes()
    bounds = [*row.begins.tolist(), len(whole)]
    return [whole[start:stop].decode() for start, stop in itertools.pairwise(bounds)]


def refusal(data: Any, *parts: str, error: type[KosError] = DataError, lines: Lines = TEXT) -> None:
    with refused(error, *parts):
        documents(data, lines=lines)


def token_bytes(tokens: list[int], magic: int = 20240520, version: int = 1, count: int | None = None) -> bytes:
    """A token file as llm.c's dev/data/data_common.py writes it, by struct."""
    header = struct.pack("<256i", magic, version, len(tokens) if count is None else count, *[0] * 253)
    return header + struct.pack(f"<{len(tokens)}{'H' if magic == 20240520 else 'I'}", *tokens)


def jsonl(*texts: str, field: str = "text") -> bytes:
    return b"".join(json.dumps({"id": 1, field: text}).encode() + b"\n" for text in texts)


def overwrite(path: Path, content: bytes) -> None:
    """With other content of the same size, at the same time as before."""
    before = path.stat()
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size
