"""Kinds of files that --data reads: tables, JSON lists, compressed files, other encodings, arrays of tokens."""

import bz2
import csv
import gzip
import io
import json
import logging
import lzma
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kos.errors import DataError, KosError
from kos.train.config.flags import parse
from kos.train.data import documents as kos_documents
from kos.train.data.batches import load_data
from kos.train.data.chat import ChatTemplate
from kos.train.data.corpus import read_corpus
from kos.train.data.documents import Lines
from kos.train.tokenize import tokenize
from tests.train.corpora import documents, jsonl, refusal
from tests.train.refusal import refused

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
zstd = pytest.importorskip(kos_documents.ZSTD)

TEXTS = ["a, b", 'say "x"', "two\nlines", "tab\there", "é \u2028 \U0001f600", "b" * 200_000, " x "]
ROWS = [{"id": number, "text": text} for number, text in enumerate(TEXTS)]


def table(rows: list[dict[str, Any]], dialect: str) -> bytes:
    file = io.StringIO(newline="")
    writer = csv.DictWriter(file, [*rows[0]], dialect=dialect)
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue().encode()


def rows_of_parquet(rows: list[dict[str, Any]], **options: Any) -> bytes:
    sink = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist(rows), sink, **options)
    return sink.getvalue()


LINES = jsonl(*TEXTS)
FILES: dict[str, bytes] = {
    "a.csv": table(ROWS, "excel"),
    "a.tsv": table(ROWS, "excel-tab"),
    "with a mark.csv": b"\xef\xbb\xbf" + table(ROWS, "unix"),
    "A.CSV.GZ": gzip.compress(table(ROWS, "excel")),
    "a.parquet": rows_of_parquet(ROWS),
    "groups.parquet": rows_of_parquet(ROWS, row_group_size=2),
    "a.jsonl.zst": zstd.compress(LINES),
    "frames.jsonl.zst": zstd.compress(LINES[:100]) + zstd.compress(LINES[100:]),
    "a.jsonl.bz2": bz2.compress(LINES),
    "a.jsonl.xz": lzma.compress(LINES),
    "a.ndjson": LINES,
    "lines.json": LINES,
    "a.json": json.dumps(ROWS).encode(),
    "indented.json": json.dumps(ROWS, indent=2, ensure_ascii=False).encode(),
    "a.json.gz": gzip.compress(json.dumps(ROWS).encode()),
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("read", [7, 1000, 1 << 20])
def test_rows_and_items_are_documents(tmp_path, name, read, monkeypatch):
    if read == 7 and name.endswith((".json", ".json.gz")):
        read = 300  # the kind of a .json file is that of its first bytes
    for size, value in {"READ": read, "ROWS": 3}.items():
        monkeypatch.setattr(kos_documents, size, value)
    path = tmp_path / name
    path.write_bytes(FILES[name])
    assert documents(path) == (TEXTS[:6], TEXTS[6:])


@pytest.mark.parametrize("kind", ["parquet", "json", "jsonl.zst"])
def test_prompts_and_completions_of_any_file(tmp_path, kind):
    rows = [{"prompt": f"what is {i}? ", "completion": "it is " + "x" * i} for i in range(40)]
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    content = {"parquet": rows_of_parquet(rows), "json": json.dumps(rows).encode(), "jsonl.zst": zstd.compress(lines)}
    (tmp_path / f"a.{kind}").write_bytes(content[kind])
    (tmp_path / "b.jsonl").write_bytes(lines)
    flags = ["--seq-len", "64"]
    got, expected = (load_data(parse(["--data", str(tmp_path / each), *flags])) for each in (f"a.{kind}", "b.jsonl"))
    assert got.fingerprint == expected.fingerprint and got.packing and got.in_parts
    assert (got.batch(0).targets == expected.batch(0).targets).all()


def test_tables_of_parquet_lack_the_fields_of_others(tmp_path):
    """Arrow gives each table of a column the fields of all, as null: a chat's calls would have arguments of others."""
    calls = [{"city": "Ulm"}, {"a": 1, "b": [{"c": 2}, {"d": 3}]}]
    (tmp_path / "a.parquet").write_bytes(rows_of_parquet([{"calls": [call], "note": None} for call in calls]))
    found = [row for _, row in kos_documents.READERS[".parquet"](tmp_path / "a.parquet", Lines("text"))]
    assert found == [{"calls": [call], "note": None} for call in calls]


def test_a_column_by_another_name(tmp_path):
    for name in ("a.csv", "a.parquet"):
        rows = [{"text": "no", "body": f"yes {number}"} for number in range(3)]
        content = table(rows, "excel") if name == "a.csv" else rows_of_parquet(rows)
        (tmp_path / name).write_bytes(content)
        assert documents(tmp_path / name, lines=Lines("body")) == (["yes 0", "yes 1"], ["yes 2"])
        with refused(DataError, "expected the field 'boddy' (--text-field), prompt and completion, or messages, got"):
            documents(tmp_path / name, lines=Lines("boddy"))


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_row_of_two_forms_is_what_the_field_names(tmp_path, kind):
    """A text, or the messages of a chat, which may have any name."""
    pytest.importorskip("jinja2", reason="needs the extra 'chat'")
    source = "{{ tools[0] }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    template = ChatTemplate(source + "{% if add_generation_prompt %}<assistant>{% endif %}", {}, tmp_path)
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rows = [{"text": "t", "messages": chat, "talk": [chat[0], *chat], "tools": ["x"]}] * 3
    lines = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
    (path := tmp_path / f"a.{kind}").write_bytes(lines if kind == "jsonl" else rows_of_parquet(rows))
    expected = {"text": "t", "messages": "x<user>a<assistant>b", "talk": "x<user>a<user>a<assistant>b"}
    for name, text in expected.items():
        train, val = documents(path, lines=Lines(name, lambda: template))
        assert [*map(str, (*train, *val))] == [text] * 3


def test_each_source_has_its_field(tmp_path):
    """By flags, by a file of settings, and for the data that is validated on."""
    (tmp_path / "a.parquet").write_bytes(rows_of_parquet([{"text": "no", "body": f"é{n}"} for n in range(99)]))
    content = table([{"text": "no", "inhalt": f"ü{number}"} for number in range(99)], "excel")
    (tmp_path / "b.csv").write_bytes(content)
    a, b = str(tmp_path / "a.parquet"), str(tmp_path / "b.csv")
    flags = ["--text-field", "body", "--text-field", f"{b}=inhalt", "--seq-len", "9"]
    values = {"data": [f"{a}:0.5", f"{b}:0.5"], "text_field": [f"{a}=body", f"{b}=inhalt"]}
    (tmp_path / "c.json").write_text(json.dumps({**values, "seq_len": 9}))
    for given in (["--data", f"{a}:0.5", "--data", f"{b}:0.5", *flags], ["--config", str(tmp_path / "c.json")]):
        parts = load_data(parse(given)).parts
        texts = [bytes(part.train.window(0, len(part.train))[0].tolist()).decode() for part in parts]
        assert [text[:4] for text in texts] == ["é0é1", "ü0ü1"]
    data = load_data(parse(["--data", a, "--val-data", b, "--eval-data", f"b={b}", *flags]))
    for val in (data.val, data.others["b"].val):
        assert bytes(val.window(0, len(val))[0].tolist()).decode().startswith("ü0ü1")
    manifest = tokenize(tmp_path / "out", [a, b], text_field=("body", f"{b}=inhalt"))
    assert manifest["train_tokens"] > 0
    for wrong in ("x.csv=inhalt", "body=x"):
        with refused(KosError, f"--text-field: expected SOURCE=VALUE of {a}, got "):
            load_data(parse(["--data", a, "--seq-len", "9", "--text-field", wrong]))
    for empty in ("=inhalt", f"{a}="):
        with refused(KosError, f"--text-field: expected a value or SOURCE=VALUE, neither of them empty, got '{empty}'"):
            parse(["--data", a, "--text-field", empty])
    for twice in (["body", "inhalt"], [f"{a}=body", f"{a}=inhalt"]):
        with refused(KosError, "--text-field: expected one value, or SOURCE=VALUE once a source, got ", " and "):
            parse(["--data", a, "--text-field", twice[0], "--text-field", twice[1]])


def test_what_is_kept_of_a_source_does_not_depend_on_fields_of_others(tmp_path, monkeypatch, all_is_kept):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name, field in (("a", "body"), ("b", "inhalt")):
        write = [json.dumps({field: f"{name} {number} " * 9, "other": "x" * 99}) for number in range(9)]
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.jsonl").write_text("\n".join(write))
    a, b = (str(tmp_path / name / "a.jsonl") for name in "ab")
    for fields in (["body"], [f"{a}=body"], ["body", f"{b}=inhalt"], [f"{b}=inhalt", f"{a}=body"]):
        named = [word for field in fields for word in ("--text-field", field)]
        flags = ["--data", a, "--eval-data", f"b={b}", "--seq-len", "9", "--eval-batches", "0", *named]
        if len(fields) == 1:
            flags[2:4] = []
        load_data(parse(flags))
        assert len([*(tmp_path / "a" / ".kos").iterdir()]) == 1
    load_data(parse(["--data", a, "--seq-len", "9", "--text-field", "other"]))
    assert len([*(tmp_path / "a" / ".kos").iterdir()]) == 2


def test_a_text_file_that_is_compressed(tmp_path):
    for name, pack in {"a.txt.gz": gzip.compress, "a.txt.xz": lzma.compress, "a.txt.zst": zstd.compress}.items():
        (tmp_path / name).write_bytes(pack("é0123456789".encode() * 10))
        assert [len(each) for (each,) in documents(tmp_path / name)] == [99, 11]


def test_files_of_several_kinds_in_a_folder(tmp_path, caplog):
    """Empty ones, of any kind, and those whose data is there in another form are left out, which is said."""
    (tmp_path / "a.csv").write_bytes(table([{"text": "a1"}, {"text": "a2"}], "excel"))
    (tmp_path / "b.parquet").write_bytes(rows_of_parquet([{"text": "b1"}]))
    (tmp_path / "c.txt").write_text("c")
    (tmp_path / "d.json").write_text('[{"text": "d1"}]')
    empty = ["e.jsonl", "f.txt", "g.csv", "h.parquet", "i.json", "j.jsonl.zst"]
    for name in empty:
        (tmp_path / name).touch()
    (tmp_path / "a.jsonl").write_bytes(jsonl("a1", "a2"))
    with caplog.at_level(logging.WARNING):
        assert documents(tmp_path) == (["a1", "a2", "b1", "c"], ["d1"])
    for name in empty:
        assert f"skipped: --data {tmp_path / name}: expected documents, got an empty file" in caplog.text
    assert f"skipped, since their converted files are there: {tmp_path / 'a.csv'}" in caplog.text


IN_A_LIST = "expected ',' or ']' at the end of the list"
CUT = FILES["a.parquet"][:-9]
BROKEN: dict[str, tuple[bytes, list[str]]] = {
    "header.csv": (b"text,label\n", ["expected lines with text, got none"]),
    "columns.csv": (b"text,label\na,1\nb\n", ["line 3: expected 2 columns, as in the first line, got 1"]),
    "quote.csv": (b'text\na\n"b\n', [", line 3: expected a whole row of a table, got unexpected end of data"]),
    "lines.csv": (b'text,label\n"a\nb",1\n\n"c\n"\n', ["line 5: expected 2 columns, as in the first line, got 1"]),
    "string.jsonl": (b'{"text": "a', ["line 1: expected JSON, got", "(Unterminated string starting at column 10)"]),
    "end.jsonl": (b'{"text": "a"\r\n', ["got '{\"text\": \"a\"' (Expecting ',' delimiter at column 13)"]),
    "two forms.jsonl": (
        b'{"text": "a", "messages": []}\n{"text": "a", "messages": [{}]}\n',
        ["line 2: expected one of the fields text, completion, messages, conversations, instruction, got text and "
         "messages; name the text or the chat to train on, as --text-field text, or remove the others"],
    ),
    "two forms.parquet": (
        rows_of_parquet([{"text": None, "completion": "b", "prompt": "c"}, {"text": "a", "completion": "b"}]),
        ["row 2: expected one of the fields text, ", "got text and completion; "],
    ),
    "other.csv": (b"body\nx\n", ["line 2: expected the field 'text' (--text-field)", "got the fields body"]),
    "binary.csv": (b"text\nx\0\n", ["line 2: expected text, got a NUL at character 6; if it is utf-16, run: "]),
    "latin.csv": (b"text\ncaf\xe9\n", ["line 2: expected UTF-8 text, got byte 0xe9 at 8; if it is latin1, run: "]),
    "cut.parquet": (CUT, ["expected a whole .parquet file, got "]),
    "other.parquet": (rows_of_parquet([{"body": "x"}]), ["row 1: expected the field 'text'", "got the fields body"]),
    "null.parquet": (rows_of_parquet([{"text": "x"}, {"text": None}]), ["row 2: expected text in the field"]),
    "cut.jsonl.zst": (zstd.compress(LINES)[:-20], ["expected a whole .zst file, got"]),
    "cut.jsonl.xz": (lzma.compress(LINES)[:-20], ["expected a whole .xz file, got"]),
    "text.jsonl.zst": (b"text", ["expected a whole .zst file, got"]),
    "text.jsonl.xz": (b"text", ["expected a whole .xz file, got"]),
    "text.jsonl.bz2": (b"text", ["expected a whole .bz2 file, got"]),
    "cut.json": (json.dumps(ROWS).encode()[:-1], [f"item 8: {IN_A_LIST}, got the end of the file"]),
    "within.json": (b'[{"text": "a"}, {"text": "b', ["item 2: expected JSON, got Unterminated string"]),
    "comma.json": (b'[{"text": "a"} {"text": "b"}]', [f"item 2: {IN_A_LIST}, got ' {{\"text"]),
    "word.json": (b'[{"text": "a"}, {text: 1}, ' + b"1, " * 99 + b"1]", ["item 2: expected JSON, got Expecting prop"]),
    "after.json": (b'[{"text": "a"}] x', [f"item 2: {IN_A_LIST}, got '] x'"]),
    "none.json": (b" [ ] ", ["expected lines with text, got none"]),
    "wide.txt": ("text".encode("utf-16"), ["expected UTF-8", "got byte 0xff at 0; if it is utf-16, run: iconv "]),
    "objects.npy": (b"", ["expected an array of NumPy"]),
    "float.npy": (b"", ["expected one row of uint8, uint16 or larger integers, got float64 of shape (3,)"]),
    "matrix.npy": (b"", ["got int64 of shape (2, 2)"]),
    "cut.npy": (b"", ["expected an array of NumPy"]),
}  # fmt: skip
ARRAYS: dict[str, Any] = {
    "objects.npy": np.array([{}, {}]), "float.npy": np.zeros(3), "matrix.npy": np.zeros((2, 2), np.int64),
    "cut.npy": np.zeros(99, np.int64),
}  # fmt: skip


def write_broken(folder: Path, name: str) -> Path:
    path = folder / name
    path.write_bytes(BROKEN[name][0])
    if name in ARRAYS:
        np.save(path, ARRAYS[name], allow_pickle=True)
        path.write_bytes(path.read_bytes()[: -9 if name.startswith("cut") else None])
    return path


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_named_with_the_place(tmp_path, name):
    path = write_broken(tmp_path, name)
    refusal(path, f"--data {path}", *BROKEN[name][1])
    if not name.endswith((".npy", ".txt")):
        (tmp_path / "other.txt").write_text("text")
        refusal(tmp_path, f"--data {path}", *BROKEN[name][1])


@pytest.mark.parametrize("encoding", ["utf-16", "latin1"])
@pytest.mark.parametrize("name", ["a.txt", "a file.csv", "a.txt.gz", "a.jsonl.xz"])
def test_the_command_of_the_error_converts_other_encodings(tmp_path, name, encoding):
    if shutil.which("iconv") is None or (name.endswith(".xz") and shutil.which("xz") is None):
        pytest.skip("needs iconv and xz")
    rows = [{"text": f"caf\u00e9 {n}"} for n in range(3)]
    content = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode(encoding)
    if name == "a file.csv":
        content = table(rows, "excel").decode().encode(encoding)
    pack = {".gz": gzip.compress, ".xz": lzma.compress}.get((path := tmp_path / name).suffix, lambda raw: raw)
    path.write_bytes(pack(content))
    with pytest.raises(DataError, match=f"expected UTF-8 .*; if it is {encoding}, run: ") as refused_with:
        documents(path)
    command = str(refused_with.value).partition(", run: ")[2]
    subprocess.run(command, shell=True, check=True, timeout=60)
    (converted,) = (each for each in tmp_path.iterdir() if each != path)
    assert converted.read_bytes().decode("utf-8") == content.decode(encoding) and "utf-8" in converted.name
    assert documents(converted)


SAVED: dict[str, Callable[[Path], object]] = {
    "u2.npy": lambda path: np.save(path, np.arange(500, dtype="<u2")),
    "i8.npy": lambda path: np.save(path, np.arange(500)),
    "big-endian.npy": lambda path: np.save(path, np.arange(500, dtype=">i4")),
    "u2.bin": lambda path: np.arange(500, dtype="<u2").tofile(path),
    "i4.bin": lambda path: np.arange(500, dtype="<i4").tofile(path),
}


@pytest.mark.parametrize("name", SAVED)
def test_arrays_of_tokens(tmp_path, name):
    path = tmp_path / name
    SAVED[name](path)
    flags = ["--seq-len", "4"]
    flags += ["--token-dtype", {"u2.bin": "uint16", "i4.bin": "int32"}[name]] if name.endswith(".bin") else []
    for data in (path, tmp_path):
        got = load_data(parse(["--data", str(data), *flags, "--vocab-size", "500"]))
        assert got.train.window(0, 450)[0].tolist() == [*range(450)]
        assert got.val.window(0, 50)[0].tolist() == [*range(450, 500)]
        assert not got.masks_targets
    with refused(DataError, f"--data {path}: expected tokens below the vocabulary's 499, got 499 at token 499"):
        load_data(parse(["--data", str(path), *flags, "--vocab-size", "499"]))


def test_negative_numbers_are_no_tokens(tmp_path):
    np.save(tmp_path / "a.npy", np.array([1, 2, -100, 3] * 9))
    with refused(DataError, "expected tokens below the vocabulary's 128256, got -100 at token 2"):
        load_data(parse(["--data", str(tmp_path / "a.npy"), "--seq-len", "4"]))


def test_bytes_as_tokens_without_a_header(tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(bytes(range(256)))
    assert read_corpus(str(path), lines=Lines(token_dtype="uint8")).vocab_size == 256
    got = load_data(parse(["--data", str(path), "--token-dtype", "uint8", "--seq-len", "4"]))
    assert got.train.window(0, 3)[0].tolist() == [0, 1, 2]


def test_packages_that_are_missing_are_named(tmp_path, monkeypatch):
    kinds = [("a.parquet", "pyarrow.parquet", "parquet"), ("a.jsonl.zst", kos_documents.ZSTD, "zstd")]
    for name, module, extra in kinds:
        (tmp_path / name).write_bytes(FILES[name])
        monkeypatch.setitem(sys.modules, module, None)
        expected = f"--data {tmp_path / name}: expected the module {module}, got none"
        refusal(tmp_path / name, expected, f"[{extra}]", error=KosError)
