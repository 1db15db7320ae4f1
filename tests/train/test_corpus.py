"""What --data may name: text, folders, token files, and the standard library."""

import gzip
import itertools
import json
import logging
import os
import re
from collections import Counter
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from kos.errors import ConfigError, DataError
from kos.train.config.flags import parse
from kos.train.data import FileArray
from kos.train.data.batches import load_data
from kos.train.data.chat import ChatTemplate
from kos.train.data.corpus import read_corpus
from kos.train.data.documents import Lines
from tests.train.corpora import documents, jsonl, refusal, token_bytes
from tests.train.refusal import refused

# Text files and folders


@pytest.mark.parametrize(("sizes", "share"), [((100, 900), "90%"), ((900, 101), None), ((790, 210), "21%")])
def test_much_that_is_held_out_is_said(tmp_path, sizes, share):
    """Of two files, one is held out as a whole, however large it is."""
    a, b = (tmp_path / name for name in ("a.txt", "b.txt"))
    a.write_text("x" * sizes[0]), b.write_text("x" * sizes[1])
    said = load_data(parse([f"--data={tmp_path}", "--seq-len=9"])).held_out
    how = f", which is {share} of the tokens (--val-data, or a file with val in its name, replaces it)"
    assert f"validation: b.txt (of 2 files){how if share else ''}; " in said
    assert "b.txt (--val-data); " in load_data(parse([f"--data={a}", f"--val-data={b}", "--seq-len=9"])).held_out


def numbered(path: Path, count: int) -> Path:
    path.write_bytes(jsonl(*(f"{path.stem} {number}" for number in range(count))))
    return path


@pytest.mark.parametrize(
    ("hold_out", "held"), [("0.1", range(18, 20)), ("0.25", range(15, 20)), ("0.01", range(19, 20)), ("0", range(0))]
)
def test_a_fraction_is_held_out_of_a_file(tmp_path, hold_out, held):
    lines = [f"a {number}" for number in range(20)]
    corpus = read_corpus(str(numbered(tmp_path / "a.jsonl", 20)), hold_out=float(hold_out))
    got = [[*chain(*part)] for part in corpus.splits[:2]]
    assert got == [lines[: 20 - len(held)], lines[20 - len(held) :]]
    share = {"0.1": "the last tenth of a.jsonl", "0": "nothing (--hold-out)"}
    assert corpus.splits.held_out == share.get(hold_out, f"the last {float(hold_out):.0%} of a.jsonl")


def test_a_fraction_is_held_out_of_a_folder(tmp_path):
    """As many files as fit into the fraction, spread over the folder, at least one."""
    for number in range(20):
        numbered(tmp_path / f"{chr(97 + number)}.jsonl", 1)
    for hold_out, held in ((0.1, "jt"), (0.25, "dhlpt"), (0.3, "dgjnqt"), (0.01, "t"), (0.0, "")):
        splits = read_corpus(str(tmp_path), hold_out=hold_out).splits
        train, val = ("".join(text[0] for text in chain(*part)) for part in splits[:2])
        assert (val, train) == (held, "".join(chr(97 + n) for n in range(20) if chr(97 + n) not in held))


def test_a_part_of_each_source_is_held_out(tmp_path):
    """Of several sources that become one, none is held out as a whole, unless its name says so."""
    a, b = (str(numbered(tmp_path / f"{name}.jsonl", 20)) for name in "ab")
    splits = read_corpus([a, b]).splits
    assert [*chain(*splits.val)] == ["a 18", "a 19", "b 18", "b 19"] and len([*chain(*splits.train)]) == 36
    assert splits.held_out == "the last tenth of a.jsonl and the last tenth of b.jsonl"
    val = str(numbered(tmp_path / "val.jsonl", 3))
    splits = read_corpus([a, val]).splits
    assert [*chain(*splits.val)] == ["val 0", "val 1", "val 2"] and len([*chain(*splits.train)]) == 20


@pytest.mark.parametrize("hold_out", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("answers", [[3], [1, 4], [5, 1, 1], [1] * 9 + [6, 2], [2, 0, 3] * 5], ids=str)
def test_a_chat_whose_turns_are_split_is_held_out_as_a_whole(tmp_path, answers, hold_out):
    """The chats that are held out are the same as without --split-turns, if each of them has an answer."""
    pytest.importorskip("jinja2", reason="needs the extra 'chat'")
    source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    template = ChatTemplate(source + "{% if add_generation_prompt %}<assistant>{% endif %}", {}, tmp_path)
    chats = [[{"role": "user", "content": f"chat {number};"}] for number in range(len(answers))]
    for chat, count in zip(chats, answers, strict=True):
        chat += [{"role": role, "content": "x"} for _ in range(count) for role in ("assistant", "user")]
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    parts = {}
    for split_turns in (False, True):
        lines = Lines(chat_template=lambda: template, split_turns=split_turns)
        splits = read_corpus(str(path), lines=lines, hold_out=hold_out).splits
        parts[split_turns] = [re.findall(r"chat (\d+);", "".join(map(str, chain(*part)))) for part in splits[:2]]
    train, val = parts[True]
    assert not {*train} & {*val} and Counter(train + val) == {str(n): count for n, count in enumerate(answers) if count}
    if all(answers):
        assert [[*dict.fromkeys(part)] for part in parts[True]] == parts[False]


def test_nothing_is_held_out_of_a_run_without_validation(tmp_path):
    """``--eval-batches 0`` trains on all, and ``--hold-out 0`` validates on nothing."""
    flags = [f"--data={numbered(tmp_path / 'a.jsonl', 20)}", "--seq-len=3", "--tokenizer=bytes"]
    sizes = {}
    for more in ("--eval-batches=0", "--hold-out=0", "--eval-batches=1", "--eval-batches=0 --hold-out=0.1"):
        data = load_data(parse([*flags, *more.split()]))
        sizes[more] = (data.train.size == 70, data.val.size > 0, data.eval_batches)
    none = (True, False, 0)
    assert [*sizes.values()] == [none, none, (False, True, 1), (False, True, 0)]
    named = [f"--data={tmp_path / 'a.jsonl'}", f"--val-data={numbered(tmp_path / 'b.jsonl', 9)}", "--seq-len=9"]
    data = load_data(parse([*named, "--hold-out=0"]))
    assert data.eval_batches == 8 and data.val.size and data.train.size == 70
    other = f"--eval-data=b={tmp_path / 'b.jsonl'}"
    for needing in (["--patience=1"], ["--keep-best=val_loss"], ["--patience=1", other]):
        with refused(ConfigError, "--hold-out: expected above 0, or --val-data, for val_loss (--", "), got 0"):
            load_data(parse([*flags, "--hold-out=0", *needing]))
    data = load_data(parse([*flags, "--hold-out=0", "--keep-best=val_loss/b", other]))
    assert data.losses == ["val_loss/b"] and data.train.size == 70 and data.others["b"].val_starts().size
    for wrong in ("1", "-0.1", "x"):
        with refused(ConfigError, "--hold-out: expected"):
            parse([f"--hold-out={wrong}"])


def test_files_named_for_validation_are_that_of_any_fraction(tmp_path):
    """``--hold-out 0`` takes nothing else: in a mixture, the sources that have such a file are validated on."""
    (folder := tmp_path / "named").mkdir()
    for name in ("train", "val"):
        numbered(folder / f"{name}.jsonl", 20)
    plain = numbered(tmp_path / "a.jsonl", 20)
    flags = ["--seq-len=3", "--tokenizer=bytes", "--hold-out=0"]
    data = load_data(parse([*flags, f"--data={folder}", "--keep-best=val_loss", "--patience=1"]))
    assert data.losses == ["val_loss"] and data.eval_batches == 8
    for names in ([folder, plain], [plain, folder]):
        sources = [f"--data={name}:1" for name in names]
        data = load_data(parse([*flags, *sources, f"--keep-best=val_loss/{folder}"]))
        assert data.losses == ["val_loss", f"val_loss/{folder}"] and data.eval_batches == 8
        with refused(ConfigError, f"--hold-out: expected above 0, or --val-data, for val_loss/{plain} (--keep-best)"):
            load_data(parse([*flags, *sources, f"--keep-best=val_loss/{plain}"]))


def test_text_is_read_as_it_is(tmp_path):
    path = tmp_path / "dos.txt"
    path.write_bytes(b"\xef\xbb\xbfa\r\nb\rc\n")
    assert "".join(itertools.chain(*documents(path))) == "a\r\nb\rc\n"


def test_hidden_files_are_skipped_and_binary_ones_with_a_note(tmp_path, caplog):
    for name, content in {
        "a.txt": b"a", "b.txt": b"b", ".hidden": b"h", ".git/config": b"g",
        "image.png": b"\x89PNG\0", "latin1.txt": b"caf\xe9", "empty": b"",
    }.items():  # fmt: skip
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    os.mkfifo(tmp_path / "pipe")
    with caplog.at_level(logging.WARNING):
        assert documents(tmp_path) == (["a"], ["b"])
    noted = " ".join(record.getMessage() for record in caplog.records)
    assert all(name in noted for name in ("image.png", "latin1.txt", "empty")) and ".hidden" not in noted


def test_runs_and_checkpoints_in_the_folder_are_skipped(tmp_path, caplog):
    """Also where the folder is that of the run; a ``config.json`` or ``manifest.json`` of others is data."""
    files = [
        "run/config.json", "run/metrics.jsonl", "run/checkpoints/step-1/manifest.json", "begun/config.json",
        "begun/metrics.jsonl", "saved/manifest.json", "saved/kos_tokenizer.json", "saved/config.json", "config.json",
        "metrics.jsonl", "checkpoints/step-2/manifest.json", "checkpoints/step-2/kos_tokenizer.json",
    ]  # fmt: skip
    for name in (*files, "a.txt", "b.txt", "site/manifest.json", "site/config.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    with caplog.at_level(logging.WARNING):
        assert [*itertools.chain(*documents(tmp_path))] == ["a.txt", "b.txt", "site/config.json", "site/manifest.json"]
    (said,) = (record.getMessage() for record in caplog.records)
    skipped = ("begun", "checkpoints", "config.json", "metrics.jsonl", "run", "saved")
    paths = ", ".join(str(tmp_path / name) for name in skipped)
    assert said == f"skipped, as parts of runs, checkpoints or tokenized data: {paths}"


def test_what_is_no_text_is_refused(tmp_path):
    refusal(tmp_path / "nothing.txt", "nothing.txt", "no such file", error=ConfigError)
    refusal("stdlip", "stdlib", "'stdlip'", error=ConfigError)
    refusal(tmp_path / "*.bin", "*.bin", "no such file", error=ConfigError)
    refusal(tmp_path, str(tmp_path), "text files", "none of them text")
    path = tmp_path / "file"
    for content, parts in {
        b"": ("empty",),
        b"text\0text": ("NUL at character 4",),
        b"caf\xe9 au lait": ("byte 0xe9 at 3", "UTF-8"),
    }.items():
        path.write_bytes(content)
        refusal(path, str(path), *parts)
    refusal("/dev/zero", "/dev/zero", "regular file")
    refusal("/proc/self/mem", "--data /proc/self/mem: expected readable files, got /proc/self/mem: Input/output error")


# JSON Lines


@pytest.mark.parametrize("name", ["docs.jsonl", "docs.jsonl.gz", "DOCS.JSONL"])
def test_a_line_of_json_is_a_document(tmp_path, name):
    texts = [f"document {i}\u2028of\ntwo lines é" for i in range(25)]
    content = b"\xef\xbb\xbf" + jsonl(*texts[:9]) + b"\n  \n" + jsonl("", *texts[9:]).rstrip(b"\n")
    content = content.replace(b"\\u2028", "\u2028".encode())
    path = tmp_path / name
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    got = read_corpus(str(path))
    assert documents(path) == (texts[:22], texts[22:]) and got.vocab_size is None
    assert got.splits.held_out == f"the last tenth of {name}"
    (tmp_path / "one.jsonl").write_bytes(jsonl("0123456789", field="content"))
    assert documents(tmp_path / "one.jsonl", lines=Lines("content")) == (["012345678"], ["9"])


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        (b'{"content": "x", "url": ""}', ["'text'", "--text-field", "the fields content, url"]),
        (b'{"id": 1, "messages": [{}]}', ["with a chat template for messages (--tok", "none; put a file chat_"]),
        (b'{"dialogue": []}', ["'text'", "or messages, got the fields dialogue"]),
        (b'{"text": null}', ["'text'", "got text: None"]),
        (b'{"prompt": "x", "text2": ""}', ["text in the field 'completion', got the fields prompt, text2"]),
        (b'{"prompt": 5, "completion": "x"}', ["text in the field 'prompt', got prompt: 5"]),
        (b'{"prompt": "a\\ud800", "completion": "x"}', ["in the field 'prompt', got '\\ud800' at character 1"]),
        (b'["x"]', ["got ['x']"]),
        (b'{"text": "x"', ["expected JSON", "at column 13)"]),
        (b'{"text": "caf\xe9"}', ["expected UTF-8", "0xe9", "iconv"]),
        (b"[" * 100_000, ["expected JSON"]),
        (b'{"text": "x\\ud800"}', ["'\\ud800' at character 1"]),
    ],
)
def test_a_wrong_line_is_named(tmp_path, line, parts):
    path = tmp_path / "docs.jsonl"
    path.write_bytes(jsonl("a", "b") + b"\n" + line + b"\n" + jsonl("c"))
    (tmp_path / "a.txt").write_text("text")
    for data in (path, tmp_path):
        refusal(data, f"--data {path}, line 4: expected", *parts)


def test_wrong_files_of_json_lines(tmp_path):
    path = tmp_path / "docs.jsonl.gz"
    for content in (b"text", gzip.compress(jsonl("a" * 999))[:-9], b""):
        path.write_bytes(content)
        refusal(path, f"--data {path}", "expected")
    (tmp_path / "docs.jsonl").write_bytes(b"\n" + jsonl(""))
    refusal(tmp_path / "docs.jsonl", "docs.jsonl: expected lines with text, got none")


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("x.arrow", ".to_parquet(sys.argv[2])\" {folder}/x.arrow {folder}/x.parquet"),
        ("x.zip", "unzip {folder}/x.zip"),
    ],
)
def test_files_of_data_that_are_not_read(tmp_path, name, command):
    path = tmp_path / name
    path.write_bytes(jsonl("text"))
    (tmp_path / "README.md").write_text("more text")
    for data in (path, tmp_path):
        refusal(data, f"--data {path}: expected text, .jsonl, ", f"got .{name.split('.')[-1].lower()}; run: ")
        refusal(data, command.format(folder=tmp_path))


def test_a_bin_file_without_a_header(tmp_path):
    """nanoGPT's data/*/prepare.py writes uint16 tokens and nothing else."""
    for name, tokens in {"train": [*range(50)], "val": [7, 8, 9]}.items():
        path = tmp_path / f"{name}.bin"
        np.array(tokens, np.uint16).tofile(path)
        for data in (path, tmp_path):
            refusal(data, f"--data {path if data == path else tmp_path}", "expected llm.c's header, or --token-dtype")
    lines = Lines(token_dtype="uint16")
    got = read_corpus(str(tmp_path), lines=lines)
    tokens = [[np.asarray(shard.tokens).tolist() for shard in part] for part in got.splits[:2]]
    assert tokens == [[[*range(50)]], [[7, 8, 9]]]
    (tmp_path / "val.bin").write_bytes(b"123")
    refusal(tmp_path, "val.bin: expected a whole number of tokens of 2", "got 3 bytes", lines=lines)


# What is held out


def write_documents(path: Path, kind: str, number: int) -> None:
    path.parent.mkdir(exist_ok=True)
    content = {"txt": str(number).encode(), "jsonl": jsonl(str(number)), "bin": token_bytes([number])}
    path.with_name(f"{path.name}.{kind}").write_bytes(content[kind])


def numbers(data: Path, val_data: Path | None = None) -> tuple[list[int], list[int]]:
    """The number in each document, or at the beginning of each token file."""
    corpus = read_corpus(str(data), val_data=val_data and str(val_data))
    if corpus.vocab_size is None:
        train, val = ([*map(int, part)] for part in documents(data, val_data))
    else:
        train, val = ([int(np.asarray(each.tokens)[0]) for each in part] for part in corpus.splits[:2])
    return sorted(train), val


@pytest.mark.parametrize("kind", ["txt", "jsonl", "bin"])
@pytest.mark.parametrize(
    ("names", "train", "val", "left"),
    [
        (["a", "b", "c", "d", "e", "f", "g", "h", "i", "train"], [0, 1, 2, 3, 4, 5, 6, 7, 9], [8], []),
        (["en/train", "en/validation", "extra"], [0, 2], [1], []),
        (["wiki.train", "wiki.valid"], [0], [1], []),
        (["a_train_000", "a_train_001", "a_val_000", "test-00000-of-00001"], [0, 1], [2], [3]),
        (["TEST", "Train"], [1], [0], []),
        (["train/0", "valid/1", "test/2"], [1 - 1], [1], [2]),
        (["contest", "interval", "valley"], [0, 1], [2], []),
    ],
)
def test_names_mean_the_same_for_every_kind_of_file(tmp_path, kind, names, train, val, left):
    for number, name in enumerate(names):
        write_documents(tmp_path / name, kind, number)
    got = read_corpus(str(tmp_path))
    assert numbers(tmp_path) == (train, val)
    said = got.splits.held_out
    assert all(f"{names[i]}.{kind}" in said.partition("; left out: ")[0] for i in val)
    assert all(f"{names[i]}.{kind}" in said.partition("; left out: ")[2] for i in left)


@pytest.mark.parametrize("kind", ["txt", "jsonl", "bin"])
def test_the_last_tenth_of_files_named_train_is_held_out(tmp_path, kind):
    texts = [str(number % 10) for number in range(100)]
    for name in ("train_0", "train_1"):
        content = {"txt": "".join(texts).encode(), "jsonl": jsonl(*texts), "bin": token_bytes([*map(int, texts)])}
        (tmp_path / f"{name}.{kind}").write_bytes(content[kind])
    got = read_corpus(str(tmp_path))
    parts = documents(tmp_path) if kind == "jsonl" else got.splits[:2]
    assert [sum(map(len, part)) for part in parts] == [180, 20]
    assert got.splits.held_out == f"the last tenth of train_0.{kind}, train_1.{kind}"
    (tmp_path / f"train_0.{kind}").rename(tmp_path / f"val_0.{kind}")
    (tmp_path / f"train_1.{kind}").rename(tmp_path / f"val_1.{kind}")
    refusal(tmp_path, "expected files to train on", f"val_0.{kind}, val_1.{kind}")


@pytest.mark.parametrize("kind", ["txt", "jsonl", "bin"])
def test_val_data_names_the_validation_data(tmp_path, kind):
    data, other = tmp_path / "data", tmp_path / "other"
    for number, name in enumerate(["a", "b", "train", "val"]):
        write_documents(data / name, kind, number)
    for number, name in enumerate(["train", "validation"]):
        write_documents(other / name, kind, 10 + number)
    for val_data, train, val in ((other, [0, 1, 2], [11]), (data / f"b.{kind}", [0, 2], [1])):
        got = read_corpus(str(data), val_data=str(val_data))
        assert numbers(data, val_data) == (train, val)
        assert got.splits.held_out == f"{val_data} (--val-data); left out: val.{kind}"
    one = data / f"a.{kind}"
    assert numbers(one, other / f"train.{kind}") == ([0], [10])
    with refused(DataError, f"--data {one}: expected files to train on"):
        read_corpus(str(one), val_data=str(one)).splits  # noqa: B018
    with refused(ConfigError, "--val-data: expected stdlib", "'nothing'"):
        read_corpus(str(one), val_data="nothing")
    (tmp_path / "image.txt").write_bytes(b"\0")
    with refused(DataError, "--val-data", "expected"):
        read_corpus(str(one), val_data=str(tmp_path / "image.txt")).splits  # noqa: B018


def test_tokens_are_not_validated_on_text(tmp_path, caplog):
    write_documents(tmp_path / "tokens", "bin", 1)
    write_documents(tmp_path / "text", "txt", 1)
    with refused(DataError, "--val-data", "text.txt: expected tokens below 50257", "got text"):
        read_corpus(str(tmp_path / "tokens.bin"), val_data=str(tmp_path / "text.txt"))
    with caplog.at_level(logging.WARNING):
        assert read_corpus(str(tmp_path)).vocab_size == 50_257
    assert re.search(r"skipped, since there are token files: .*text\.txt", caplog.text)


# Token files


@pytest.mark.parametrize(
    ("magic", "version", "vocab_size", "dtype"),
    [(20240520, 1, 50_257, np.uint16), (20240801, 7, 128_256, np.uint32)],
)
def test_token_files_are_left_on_disk(tmp_path, magic, version, vocab_size, dtype):
    rng = np.random.default_rng(7)
    tokens = rng.integers(0, vocab_size, 1001).tolist()
    path = tmp_path / "tokens.bin"
    path.write_bytes(token_bytes(tokens, magic, version))
    got = read_corpus(str(path))
    assert got.vocab_size == vocab_size
    assert [len(got.train[0]), len(got.val[0])] == [900, 101]
    held = [shard.tokens for shard in (*got.train, *got.val)]
    assert held[0].dtype == dtype and isinstance(held[0], FileArray)
    assert np.concatenate(held).tolist() == tokens


@pytest.mark.parametrize("pattern", ["", "*.bin", "shakes_*", "**/*.bin"])
def test_a_folder_or_pattern_of_token_files(tmp_path, pattern):
    for name, tokens in {"shakes_train_001": [1, 2], "shakes_train_000": [0], "shakes_val_000": [9, 8]}.items():
        folder = tmp_path / "deep/er" if pattern.startswith("**") and "000" in name else tmp_path
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.bin").write_bytes(token_bytes(tokens))
    got = read_corpus(str(tmp_path / pattern) if pattern else str(tmp_path))
    assert got.vocab_size == 50_257
    assert [np.asarray(shard.tokens).tolist() for shard in got.train] == [[0], [1, 2]]
    assert [np.asarray(shard.tokens).tolist() for shard in got.val] == [[9, 8]]


def test_wrong_token_files(tmp_path):
    path = tmp_path / "tokens.bin"
    good = token_bytes([1, 2, 3])
    for content, parts in {
        good[:-1]: ("1030 bytes", "3 tokens", "got 1029"),
        good + b"\0": ("1030 bytes", "got 1031"),
        good[:500]: ("1030 bytes", "got 500"),
        good[:4]: ("version 1", "got 0"),
        token_bytes([1], version=2): ("version 1", "20240520", "got 2"),
        token_bytes([1], magic=20240801): ("version 7", "20240801", "got 1"),
        token_bytes([]): ("count of 0",),
        token_bytes([1], count=-1): ("count of -1",),
        token_bytes([1], magic=20240522): ("llm.c's header",),
    }.items():
        path.write_bytes(content)
        refusal(path, str(path), *parts)
    path.unlink()
    (tmp_path / "a_train.bin").write_bytes(good)
    (tmp_path / "a_val.bin").write_bytes(token_bytes([1], 20240801, 7))
    refusal(tmp_path, "a_val.bin", "format of a_train.bin")
