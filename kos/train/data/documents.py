"""Reads the documents in a file: a text file is one document, a JSON Lines file has one document per line.

JSON Lines (https://jsonlines.org) are files named ``.jsonl`` or ``.jsonl.gz``.
"""

from __future__ import annotations

import gzip
import json
import reprlib
import shlex
import zlib
from pathlib import Path
from typing import Any

from kos.errors import DataError
from kos.train.data.token_files import header_missing

_PYTHON = 'python -c "{}"'
_CONVERTED_BY = {
    ".parquet": _PYTHON.format(
        "import pandas; pandas.read_parquet({path!r}).to_json({stem!r} + '.jsonl', orient='records', lines=True)"
    ),
    ".arrow": _PYTHON.format("import datasets; datasets.Dataset.from_file({path!r}).to_json({stem!r} + '.jsonl')"),
    ".ndjson": "mv {quoted} {quoted_stem}.jsonl",
    ".zst": "zstd -d {quoted}",
    ".gz": "gunzip {quoted}",
    ".bz2": "bunzip2 {quoted}",
    ".xz": "unxz {quoted}",
    ".zip": "unzip {quoted}",
}
"""Data files that kos does not read, by suffix, each with the command that converts it."""

_JSON_LIST = _PYTHON.format("import json; [print(json.dumps(each)) for each in json.load(open({path!r}))]")
_CHAT = ("messages", "conversations")
_HEAD_BYTES = 1 << 20


def is_jsonl(path: Path) -> bool:
    return path.name.lower().endswith((".jsonl", ".jsonl.gz"))


def check_kind(path: Path) -> None:
    """DataError, with the command that converts it, for a data file that is neither text nor JSON Lines."""
    suffix = path.suffix.lower()
    if suffix == ".bin":
        raise header_missing(path)
    got, command = _kind_of_json(path) if suffix == ".json" else (suffix, _CONVERTED_BY.get(suffix))
    if command is None or is_jsonl(path):
        return
    stem = str(path.with_suffix(""))
    how = command.format(path=str(path), stem=stem, quoted=shlex.quote(str(path)), quoted_stem=shlex.quote(stem))
    raise DataError(f"--data {path}: expected text, .jsonl, .jsonl.gz or llm.c's token files, got {got}; run: {how}")


def is_converted(path: Path) -> bool:
    """Whether the file that the command of ``check_kind`` makes is beside ``path``."""
    stem = path.with_suffix("")
    return path.suffix.lower() in (*_CONVERTED_BY, ".json") and (
        stem.is_file() or stem.with_name(f"{stem.name}.jsonl").is_file()
    )


def _kind_of_json(path: Path) -> tuple[str, str | None]:
    """The kind of data in a ``.json`` file, and the command that converts it.  One object is read as text."""
    with path.open("rb") as file:
        first, second = file.readline(_HEAD_BYTES), file.readline(_HEAD_BYTES)
    if first.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
        return "a JSON list", f"{_JSON_LIST} > {{quoted_stem}}.jsonl"
    if first.rstrip().endswith(b"}") and second.startswith(b"{"):
        return "JSON Lines named .json", "mv {quoted} {quoted_stem}.jsonl"
    return "", None


def read_documents(path: Path, field: str = "text") -> list[str]:
    """The documents in a file of text or of JSON Lines with the text in ``field``; at least one.

    DataError: empty, not text, or a line without text in that field, with the number of the line.
    """
    return _read_jsonl(path, field) if is_jsonl(path) else [_read_text(path)]


def _read_text(path: Path) -> str:
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


def _read_jsonl(path: Path, field: str) -> list[str]:
    """The texts of a JSON Lines file, without blank lines and empty texts."""
    texts = []
    try:
        with gzip.open(path) if path.suffix.lower() == ".gz" else path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    texts.append(_text_of(line, field, f"--data {path}, line {number}"))
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"--data {path}: expected a whole gzip file, got {error}") from None
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    if not any(texts):
        raise DataError(f"--data {path}: expected lines with text, got none")
    return [*filter(None, texts)]


def _text_of(line: bytes, field: str, where: str) -> str:
    try:
        value: Any = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        at = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else error
        raise DataError(f"{where}: expected JSON, got {reprlib.repr(line)} ({at})") from None
    text = value.get(field) if isinstance(value, dict) else None
    if not isinstance(text, str):
        got = reprlib.repr(value)
        if isinstance(value, dict):
            got = f"{field}: {reprlib.repr(text)}" if field in value else f"the fields {', '.join(value) or 'none'}"
            if field not in value and (chat := next((name for name in _CHAT if name in value), None)):
                got = f"chat data ({chat}), which is not supported: put each chat into one field, as text"
        raise DataError(f"{where}: expected text in the field {field!r} (--text-field), got {got}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        got = f"{text[error.start]!r} at character {error.start}"
        raise DataError(f"{where}: expected text in the field {field!r}, got {got}") from None
    return text
