"""Reads the documents in a file: a text file is one document, a JSON Lines file has one document per line.

JSON Lines (https://jsonlines.org) are files named ``.jsonl`` or ``.jsonl.gz``.  A line has text, a prompt and its
completion, or a chat: OpenAI's ``messages``, ShareGPT's ``conversations`` or Alpaca's ``instruction``.
"""

from __future__ import annotations

import gzip
import json
import reprlib
import shlex
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from kos.errors import DataError
from kos.train.data.chat import ChatTemplate
from kos.train.data.token_files import KINDS, header_missing

_PYTHON = 'python -c "import {}" {{quoted}}'  # which reads sys.argv: the path may have quotes of any kind
_ROWS = (
    "csv, json, sys; csv.field_size_limit(sys.maxsize); [print(json.dumps(row)) for row in "
    "csv.DictReader(open(sys.argv[1], encoding='utf-8-sig', newline=''), dialect='{}')]"
)
_CONVERTED_BY = {
    ".csv": _PYTHON.format(_ROWS.format("excel")) + " > {quoted_stem}.jsonl",
    ".tsv": _PYTHON.format(_ROWS.format("excel-tab")) + " > {quoted_stem}.jsonl",
    ".parquet": _PYTHON.format(
        "pandas, sys; pandas.read_parquet(sys.argv[1]).to_json(sys.argv[2] + '.jsonl', orient='records', lines=True)"
    ) + " {quoted_stem}",
    ".arrow": _PYTHON.format(
        "datasets, sys; datasets.Dataset.from_file(sys.argv[1]).to_json(sys.argv[2] + '.jsonl')"
    ) + " {quoted_stem}",
    ".ndjson": "mv {quoted} {quoted_stem}.jsonl",
    ".zst": "zstd -d {quoted}",
    ".gz": "gunzip {quoted}",
    ".bz2": "bunzip2 {quoted}",
    ".xz": "unxz {quoted}",
    ".zip": "unzip {quoted}",
}
"""Data files that kos does not read, by suffix, each with the command that converts it."""

_JSON_LIST = _PYTHON.format("json, sys; [print(json.dumps(each)) for each in json.load(open(sys.argv[1]))]")
_HEAD_BYTES = 1 << 20


@dataclass(frozen=True)
class Document:
    """A document in parts, and whether the loss counts each.  A plain ``str`` is one that it counts as a whole."""

    parts: tuple[tuple[str, bool], ...]
    rendered: bool = False
    """Whether a chat template has written it: with all special tokens, which are then not read as text."""

    def __len__(self) -> int:
        return sum(len(text) for text, _ in self.parts)

    def __str__(self) -> str:
        return "".join(text for text, _ in self.parts)


class Lines(NamedTuple):
    """How lines of JSON become documents: the field of plain text, what gives the template of chats, and whether each
    answer of a chat is a document of its own."""

    text_field: str = "text"
    chat_template: Callable[[], ChatTemplate | None] = lambda: None
    split_turns: bool = False


TEXT = Lines()


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
    how = command.format(quoted=shlex.quote(str(path)), quoted_stem=shlex.quote(stem))
    raise DataError(f"--data {path}: expected {KINDS}, got {got}; run: {how}")


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


def read_documents(path: Path, lines: Lines = TEXT) -> list[str | Document]:
    """The documents in a file of text or of JSON Lines; at least one.

    DataError: empty, not text, or a line without the fields of a document, with the number of the line.
    """
    return _read_jsonl(path, lines) if is_jsonl(path) else [_read_text(path)]


def _read_text(path: Path) -> str:
    try:
        content = path.read_bytes()
    except OSError as error:  # of which that of a read has no name
        raise OSError(error.errno, error.strerror, str(path)) from None
    if not content:
        raise DataError(f"--data {path}: expected text, got an empty file")
    if (nul := content.find(b"\0")) >= 0:
        raise DataError(f"--data {path}: expected UTF-8 {KINDS}, got a NUL at byte {nul}")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        got = f"byte 0x{content[error.start]:02x} at {error.start}"
        raise DataError(f"--data {path}: expected UTF-8 {KINDS}, got {got}") from None


def _read_jsonl(path: Path, lines: Lines) -> list[str | Document]:
    """The documents of a JSON Lines file, without blank lines and empty ones."""
    texts: list[str | Document] = []
    for value, where in read_lines(path, f"--data {path}"):
        texts.extend(_documents_of(value, lines, where))
    if not any(texts):
        raise DataError(f"--data {path}: expected lines with text, got none")
    return [text for text in texts if text]


def read_lines(path: Path, flag: str) -> Iterator[tuple[Any, str]]:
    """The JSON of each line of a JSON Lines file that is not blank, and where it is, for errors.

    DataError: a line that is no JSON, or a damaged gzip file.
    """
    try:
        with gzip.open(path) if path.suffix.lower() == ".gz" else path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield _json_of(line, where := f"{flag}, line {number}"), where
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{flag}: expected a whole gzip file, got {error}") from None
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def _json_of(line: bytes, where: str) -> Any:
    try:
        return json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        at = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else error
        raise DataError(f"{where}: expected JSON, got {reprlib.repr(line)} ({at})") from None


def _documents_of(value: Any, lines: Lines, where: str) -> Sequence[str | Document]:
    fields: Mapping[str, Any] = value if isinstance(value, dict) else {}
    if lines.text_field in fields:
        return [_text_of(fields, lines.text_field, where)]
    if "completion" in fields or ("prompt" in fields and "messages" not in fields):
        prompt, completion = (_text_of(fields, name, where) for name in ("prompt", "completion"))
        return [Document(((prompt, False), (completion, True)))]
    if (messages := _messages_of(fields, where)) is not None:
        if (template := lines.chat_template()) is None:
            expected = "a tokenizer with a chat template for messages (--tokenizer, --init-from)"
            how = "add chat_template to its tokenizer_config.json, or put each chat into one field, as text"
            raise DataError(f"{where}: expected {expected}, got none; {how}")
        chats = template.documents(fields, messages, where, lines.split_turns)
        rows = [[(_encodable(text, "messages", where), counted) for text, counted in parts] for parts in chats]
        return [Document(tuple(parts), rendered=True) for parts in rows]
    got = f"the fields {', '.join(fields) or 'none'}" if isinstance(value, dict) else reprlib.repr(value)
    kinds = f"the field {lines.text_field!r} (--text-field), prompt and completion, or messages"
    raise DataError(f"{where}: expected {kinds}, got {got}")


def _messages_of(fields: Mapping[str, Any], where: str) -> Any:
    """The messages of a line, with its ``system`` prompt first; None if it has no chat."""
    name = next((name for name in ("messages", "conversations", "instruction") if fields.get(name) is not None), None)
    messages = fields.get(str(name))
    if name == "instruction":
        asked = "\n".join(_text_of(fields, each, where) for each in ("instruction", "input") if fields.get(each))
        answer = _text_of(fields, "output", where)
        messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
        if fields.get("history"):
            raise DataError(f"{where}: expected messages for a chat of several turns, got the field 'history'")
    if not isinstance(messages, list) or not fields.get("system"):
        return messages
    return [{"role": "system", "content": _text_of(fields, "system", where)}, *messages]


def _text_of(fields: Mapping[str, Any], name: str, where: str) -> str:
    text = fields.get(name)
    if not isinstance(text, str):
        got = f"{name}: {reprlib.repr(text)}" if name in fields else f"the fields {', '.join(fields)}"
        raise DataError(f"{where}: expected text in the field {name!r}, got {got}")
    return _encodable(text, name, where)


def _encodable(text: str, name: str, where: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        got = f"{text[error.start]!r} at character {error.start}"
        raise DataError(f"{where}: expected text in the field {name!r}, got {got}") from None
    return text
