"""Reads the documents in a file: a text file is one document, other files have one in each of their records.

A record is a line of JSON Lines (https://jsonlines.org), an item of a JSON list, or a row of a table. It has text, a
prompt and its completion, or a chat: OpenAI's ``messages``, ShareGPT's ``conversations`` or Alpaca's ``instruction``.
All files are read in pieces, never as a whole.
"""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import itertools
import json
import logging
import lzma
import re
import reprlib
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from kos.commands import python_code
from kos.errors import ConfigError, DataError, KosError, install
from kos.train.config import KINDS
from kos.train.data import has_magic
from kos.train.data.chat import ChatTemplate
from kos.train.data.messages import CHATS, FORMS, JSON, check_refused, counts, encodable, messages_of, renamed, text_of

_log = logging.getLogger(__name__)

READ = 1 << 20  # characters that are read at once
SHOWN = 10  # kinds of errors in the records of a file that are shown, at most
ROWS = 1 << 10  # rows of a Parquet file that are read at once

ZSTD = f"{'compression' if sys.version_info >= (3, 14) else 'backports'}.zstd"
OPENERS: dict[str, Callable[[Path], Any]] = {
    ".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open, ".zst": lambda path: _library(ZSTD, "zstd", path).open(path),
}  # fmt: skip
"""How compressed files are opened, by their last suffix."""


@dataclass(frozen=True)
class Document:
    """A document in parts, and whether the loss counts each.  A plain ``str`` is one that it counts as a whole."""

    parts: tuple[tuple[str, bool], ...]
    rendered: bool = False
    """Whether a chat template has written it: with all special tokens, which are then not read as text."""
    last: bool = True
    """Whether it is the last document of its record, which has several with ``split_turns``."""
    text_field: str | None = None
    """The ``--text-field`` that has the chat; None: another field."""
    lost: int = 0
    """The number of messages of which the chat template left out a part."""
    lacking: Sequence[str] = ()
    """The missing end of the generation prompt, for each counted answer that does not begin with the whole prompt."""

    def __len__(self) -> int:
        return sum(len(text) for text, _ in self.parts)

    def __str__(self) -> str:
        return "".join(text for text, _ in self.parts)


class Lines(NamedTuple):
    """How files become documents: the field of a text or a chat, what gives the template of chats, whether each answer
    is a document, the dtype of token files, and whether a template may leave out content.

    Without ``text_field``, a record has one of ``FORMS``.  ``of_source`` has the fields of single sources.
    """

    text_field: str | None = None
    chat_template: Callable[[], ChatTemplate | None] = lambda: None
    split_turns: bool = False
    token_dtype: str | None = None
    allow_lost_content: bool = False
    of_source: Mapping[str, str] = MappingProxyType({})
    names: Mapping[str, str] = MappingProxyType({})
    """The fields in the data of the names of kos (``--fields``)."""

    def of(self, source: str) -> Lines:
        """Those of one source."""
        return self._replace(text_field=self.of_source.get(source, self.text_field))


TEXT = Lines()

@dataclass(frozen=True)
class Text:
    """The characters ``start`` to ``stop`` of a text file as one document.  Iterating reads them, in parts."""

    path: Path
    lines: Lines
    start: int
    stop: int

    def __iter__(self) -> Iterator[str]:
        at = 0
        for _, part in _read(self.path, self.lines, _text):
            yield part[max(0, self.start - at) : max(0, self.stop - at)]
            at += len(part)

    def __len__(self) -> int:
        return self.stop - self.start

    def __getitem__(self, at: slice) -> Text:
        start, stop, _ = at.indices(len(self))
        return replace(self, start=self.start + start, stop=self.start + stop)


@dataclass(frozen=True)
class Records:
    """The documents in the records ``start`` to ``stop`` of a file, without empty ones.  Iterating reads them.

    A record without documents does not count, and a slice has the documents of whole records.  Raises DataError if
    records are broken or lack the fields of a document, or if there is no document.  Warnings before it show up to
    SHOWN kinds of wrong records.
    """

    path: Path
    lines: Lines
    start: int = 0
    stop: int | None = None

    def __iter__(self) -> Iterator[str | Document]:
        return itertools.chain.from_iterable(itertools.islice(self._all(), self.start, self.stop))

    def _all(self) -> Iterator[list[str | Document]]:
        """The documents of each record."""
        where, none, wrong, bad = f"--data {self.path}", True, dict[str, tuple[str, int]](), 0
        for place, value in _read(self.path, self.lines, _reader(self.path)):
            try:
                documents = _documents_of(value, self.lines, f"{where}, {place}")
            except DataError as error:
                if error.settings:  # it is about a setting, not about this record
                    raise
                text, bad = f"{error}".removeprefix(f"{where}, {place}: "), bad + 1
                first, count = wrong.get(text, (place, 0))
                if count or len(wrong) < SHOWN:
                    wrong[text] = first, count + 1
                continue
            if not bad and (found := [document for document in documents if document]):
                none = False
                yield found
        if bad:
            raise _wrong(where, wrong, bad)
        if none:
            raise DataError(f"{where}: expected lines with text, got none")

    def __len__(self) -> int:
        return sum(1 for _ in itertools.islice(self._all(), self.start, self.stop))

    def __getitem__(self, at: slice) -> Records:
        return replace(self, start=at.start or 0, stop=at.stop)


def _wrong(where: str, wrong: Mapping[str, tuple[str, int]], bad: int) -> DataError:
    """The error about a file with ``bad`` wrong records.  If there are several kinds, a warning shows each kind first.

    ``wrong`` has the text of each kind, with the place of its first record and the number of its records.
    """
    each = [f"{where}, {place}: {text}{f' ({n - 1:,} more like it)' * (n > 1)}" for text, (place, n) in wrong.items()]
    if len(each) == 1:
        return DataError(each[0])
    for text in each:
        _log.warning("%s", text.removeprefix("--data "))  # it may be a file of another flag
    kinds = f" (the first {SHOWN} kinds)" * (len(each) == SHOWN)
    return DataError(f"{where}: expected records to train on, got {bad:,} wrong ones, shown above{kinds}")


def open_documents(path: Path, lines: Lines = TEXT) -> Text | Records:
    """The documents in a file.  The whole of a text file is read, to count its characters.

    DataError: the file is empty, or its bytes are not text in UTF-8.
    """
    if has_records(path, lines):
        return Records(path, lines)
    if not (size := sum(len(part) for _, part in _read(path, lines, _text))):
        raise DataError(f"--data {path}: expected text, got an empty file")
    return Text(path, lines, 0, size)


def kind_of(path: Path, token_dtype: str | None = None) -> str:
    """``tokens`` for a token file, with a dtype also any ``.bin``; else its suffix, without that of its compression."""
    last = path.suffix.lower()
    if last in OPENERS:
        return path.with_suffix("").suffix.lower()
    is_tokens = last == ".npy" or (last == ".bin" and token_dtype) or (last not in READERS and has_magic(path))
    return "tokens" if is_tokens else last


def has_records(path: Path, lines: Lines = TEXT) -> bool:
    """Whether a file has records: by its suffix, or a ``.json`` file by its beginning."""
    kind = kind_of(path)
    return kind in READERS and (kind != ".json" or _kind_of_json(path, lines) != "text")


def check_kind(path: Path) -> None:
    """DataError for a data file that kos does not read, with the command that converts it."""
    suffix = path.suffix.lower()
    if suffix == ".bin":
        expected = "llm.c's header, or --token-dtype for numbers without one (uint16 for nanoGPT's files)"
        raise DataError(f"--data {path}: expected {expected}, got none").about("data", "token_dtype")
    code = "import datasets, sys; datasets.Dataset.from_file(sys.argv[1]).to_parquet(sys.argv[2])"
    to_parquet = python_code(code, path, path.with_suffix(".parquet"))
    if how := {".arrow": to_parquet, ".zip": f"unzip {shlex.quote(str(path))}"}.get(suffix):
        raise DataError(f"--data {path}: expected {KINDS}, got {suffix}; run: {how}")


def is_converted(path: Path) -> bool:
    """Whether the data of ``path`` is beside it in another form: decompressed, as JSON Lines or as Parquet."""
    stem, suffix = path.with_suffix(""), path.suffix.lower()
    others = [stem] if suffix in (*OPENERS, ".zip") else []
    if suffix in {*READERS, ".arrow"} - {".jsonl"}:
        others += [stem.with_name(f"{stem.name}.jsonl")]
    if suffix == ".arrow":
        others += [stem.with_name(f"{stem.name}.parquet")]
    return any(other.is_file() for other in others)


# --- readers: each yields where a record is, and its fields -------------------------------------------

Reader = Callable[[Path, Lines], Iterator[tuple[str, Any]]]


def _read(path: Path, lines: Lines, reader: Reader) -> Iterator[tuple[str, Any]]:
    """What ``reader`` yields.  Errors of the libraries that it uses become a DataError with the last good place."""
    place = ""
    try:
        for place, value in reader(path, lines):
            yield place, value
    except KosError:
        raise
    except Exception as error:  # each library of a format has its own
        if isinstance(error, OSError) and error.errno is not None:
            raise OSError(error.errno, error.strerror, str(path)) from None  # that of a read has no name
        after = f", after {place}" * bool(place)
        got = str(error).partition("\n")[0] or type(error).__name__
        raise DataError(f"--data {path}{after}: expected a whole {path.suffix} file, got {got}") from None


def _library(name: str, extra: str, path: Path) -> Any:
    try:
        return import_module(name)
    except ImportError:
        raise ConfigError(f"--data {path}: expected the module {name}, got none ({install(extra)})") from None


def _decoded(path: Path, newline: str | None = None) -> Iterator[str]:
    """The text of a file, in parts of READ characters; in lines if ``newline`` says, as for ``open``, how they end."""
    kinds = "text" if kind_of(path) in READERS else KINDS

    def wrong(expected: str, got: str, likely: str) -> DataError:
        home = path.with_suffix("") if (suffix := path.suffix.lower()) in OPENERS else path
        new, old = (shlex.quote(str(each)) for each in (home.with_name(f"{home.stem}-utf-8{home.suffix}"), path))
        tools = {".gz": "gzip", ".bz2": "bzip2", ".xz": "xz", ".zst": "zstd"}
        command = f"{tools[suffix]} -dc {old} | iconv" if suffix in tools else f"iconv {old}"
        how = f"if it is {likely}, run: {command} -f {likely} -t utf-8 > {new}"
        return DataError(f"--data {path}{where}: expected {expected}, got {got}; {how}").about("data")

    where = ""
    with OPENERS.get(path.suffix.lower(), lambda path: path.open("rb"))(path) as raw:
        file, at = io.TextIOWrapper(raw, "utf-8-sig", newline=newline or ""), 0
        try:
            for number, part in enumerate(file if newline is not None else iter(lambda: file.read(READ), ""), 1):
                if (nul := part.find("\0")) >= 0:
                    where = f", line {number}" * (newline is not None)
                    raise wrong(kinds, f"a NUL at character {at + nul}", "utf-16")
                at += len(part)
                yield part
        except UnicodeDecodeError as error:
            place = raw.tell() - len(error.object) + error.start
            byte = error.object[error.start]
            raw.seek(0)
            lines = 1 + sum(raw.read(min(READ, place - at)).count(b"\n") for at in range(0, place, READ))
            where = f", line {lines}" * (newline is not None)
            likely = "utf-16" if not place and byte in (0xFE, 0xFF) else "latin1"
            raise wrong(f"UTF-8 {kinds}", f"byte 0x{byte:02x} at {place}", likely) from None


def _text(path: Path, lines: Lines) -> Iterator[tuple[str, str]]:
    at = 0
    for part in _decoded(path):
        at += len(part)
        yield f"character {at}", part


def _json_lines(path: Path, lines: Lines) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(_decoded(path, "\n"), 1):
        # Without the line's end, a line that is cut is wrong at its own end, and not at column 1 after it.
        if not (line := line.rstrip("\r\n")).strip():
            continue
        try:
            yield f"line {number}", JSON.decode(line.removeprefix("\ufeff"))
        except (ValueError, RecursionError) as error:
            at = f"{error}"
            if isinstance(error, json.JSONDecodeError):
                at = f"{error.msg.removesuffix(' at')} at column {error.colno}"
            got = f"{reprlib.repr(line)} ({at})"
            yield f"line {number}", DataError(f"--data {path}, line {number}: expected JSON, got {got}")


def _table(path: Path, lines: Lines) -> Iterator[tuple[str, Any]]:
    csv.field_size_limit(sys.maxsize)
    dialect = "excel-tab" if kind_of(path) == ".tsv" else "excel"
    rows = csv.reader(_decoded(path, ""), dialect, strict=True)
    names: list[str] | None = None
    row: list[str] | None = []
    while row is not None:
        place = f"line {rows.line_num + 1}"  # where the row begins
        try:
            row = next(rows, None)
        except csv.Error as error:
            raise DataError(f"--data {path}, {place}: expected a whole row of a table, got {error}") from None
        if names is not None and row and len(row) != len(names):
            expected = f"{len(names)} columns, as in the first line"
            yield place, DataError(f"--data {path}, {place}: expected {expected}, got {len(row)}")
        elif names is not None and row:
            yield place, dict(zip(names, row, strict=True))
        names = row if names is None else names


def _parquet(path: Path, lines: Lines) -> Iterator[tuple[str, Any]]:
    with _library("pyarrow.parquet", "parquet", path).ParquetFile(path) as file:
        schema, field = file.schema_arrow, lines.text_field or "text"
        others = {*FORMS} & {*schema.names} - {field} if lines.text_field is None else ()
        is_text = not lines.names and field in schema.names and not others and not schema.field(field).type.num_fields
        columns = [field] if is_text else None
        batches = file.iter_batches(ROWS, columns=columns)
        rows = itertools.chain.from_iterable(batch.to_pylist() for batch in batches)
        for number, row in enumerate(rows, 1):
            yield f"row {number}", {name: _without_nulls(value) for name, value in row.items()}


def _without_nulls(value: Any) -> Any:
    """``value`` without the fields of tables that are null: Arrow gives every table of a column the fields of all."""
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return [*map(_without_nulls, value)] if isinstance(value, list) else value


def _kind_of_json(path: Path, lines: Lines) -> str:
    """The kind of data in a ``.json`` file: list, lines or, as of one object, text."""
    _, text = next(_read(path, lines, _text), ("", ""))
    first, _, rest = text.lstrip().partition("\n")
    return "list" if first[:1] == "[" else "lines" if first.rstrip()[-1:] == "}" and rest[:1] == "{" else "text"


def _json(path: Path, lines: Lines) -> Iterator[tuple[str, Any]]:
    return (_json_list if _kind_of_json(path, lines) == "list" else _json_lines)(path, lines)


def _json_list(path: Path, lines: Lines) -> Iterator[tuple[str, Any]]:
    """The items of a list, of which one at a time is in memory."""
    decode, text, number = JSON.raw_decode, "", 1
    for part in itertools.chain(_decoded(path), [""]):  # the last is the end of the file
        text, at = text + part, 0
        while found := re.compile(r"\s*,\s*" if number > 1 else r"\s*\[\s*(?!\s|\])").match(text, at):
            try:
                value, stop = decode(text, found.end())
            except (ValueError, RecursionError) as error:
                if part and _may_go_on(error, len(text)):
                    break
                raise DataError(f"--data {path}, item {number}: expected JSON, got {error}") from None
            yield f"item {number}", value
            at, number = stop, number + 1
        text = text[at:]
        end = r"\s*(\]\s*)?" if number > 1 else r"\s*(\[\s*\]\s*)?"
        if (found is None and not re.fullmatch(end, text)) or not (part or "]" in text):
            got = reprlib.repr(text) if text.strip() else "the end of the file"
            raise DataError(f"--data {path}, item {number}: expected ',' or ']' at the end of the list, got {got}")


def _may_go_on(error: ValueError | RecursionError, length: int) -> bool:
    """Whether JSON of this length may be broken only because it ends early: a string, or a word such as false."""
    return isinstance(error, json.JSONDecodeError) and (error.pos > length - 8 or error.msg.startswith("Unterminated"))


READERS: dict[str, Reader] = {
    ".jsonl": _json_lines, ".ndjson": _json_lines, ".json": _json, ".csv": _table, ".tsv": _table, ".parquet": _parquet,
}  # fmt: skip
"""The readers of files with records, by suffix."""


def read_records(path: Path, lines: Lines = TEXT) -> Iterator[tuple[str, Any]]:
    """Where each record of a file is, and its fields.  Raises DataError for one that is broken."""
    for place, value in _read(path, lines, _reader(path)):
        if isinstance(value, DataError):
            raise value
        yield place, value


def _reader(path: Path) -> Reader:
    """The reader of a file with records.  In place of a broken record, it yields a DataError, and continues."""
    return READERS.get(kind_of(path), _json_lines)  # a file whose suffix is unknown is read as JSON Lines


# --- records to documents -----------------------------------------------------------------------------


def _documents_of(value: Any, lines: Lines, where: str) -> Sequence[str | Document]:
    if isinstance(value, DataError):
        raise value
    fields: Mapping[str, Any] = value if isinstance(value, dict) else {}
    if lines.names and fields:
        fields = renamed(fields, lines.names, where)
    if (field := lines.text_field) not in fields:
        forms = FORMS if field is None else FORMS[1:]
        given = [name for name in forms if fields.get(name)]
        if len(given) > 1:
            how = f"name the text or the chat to train on, as --text-field {given[0]}, or remove the others"
            raise DataError(f"{where}: expected one of the fields {', '.join(forms)}, got {' and '.join(given)}; {how}")
        field = next((name for name in (*given, *forms, "prompt") if name in fields), None)
    parts = [fields.get(name) for name in ("prompt", "completion")]
    if field != lines.text_field and field in ("prompt", "completion") and all(isinstance(x, list) for x in parts):
        asked = [{**each, "weight": 0} if isinstance(each, dict) else each for each in fields["prompt"]]
        fields, field = {**fields, "messages": [*asked, *fields["completion"]]}, "messages"  # as TRL has them
    if field in ("prompt", "completion") and field != lines.text_field:
        prompt, completion = (text_of(fields, name, where) for name in ("prompt", "completion"))
        check_refused(fields, where)
        return [Document(((prompt, False), (completion, counts(fields, where))))]
    if field is not None and (isinstance(fields[field], list) if field == lines.text_field else field in CHATS):
        messages = messages_of(fields, field, where)
        if field != lines.text_field:  # else the user has chosen among the fields
            check_refused(fields, where)
        if (template := lines.chat_template()) is None:
            expected = "a tokenizer with a chat template for messages (--tokenizer, --init-from)"
            how = "put a file chat_template.jinja into its folder, or put each chat into one field, as text"
            raise DataError(f"{where}: expected {expected}, got none; {how}").about("tokenizer")
        chats = template.documents(fields, messages, where, lines.split_turns, lines.allow_lost_content)
        for text, _ in itertools.chain.from_iterable(chats):
            encodable(text, "messages", where)
        named = lines.text_field if field == lines.text_field else None
        return [Document(tuple(each), True, each is chats[-1], named, each.lost, each.lacking) for each in chats]
    if field is not None:
        return [text_of(fields, field, where)]
    got = f"the fields {', '.join(fields) or 'none'}" if isinstance(value, dict) else reprlib.repr(value)
    kinds = f"the field {lines.text_field or 'text'!r} (--text-field), prompt and completion, or messages"
    raise DataError(f"{where}: expected {kinds}, got {got}")
