"""How fast data is read, tokenized and packed: python -m benchmarks.data [--json FILE]

The text is JSON Lines of this Python's sources of up to 200 kB, repeated; the tokenizer is BPE, trained on some of it.

- tokenize: ``kos tokenize`` beside ``tokenizers``, which encodes the same file on as many threads: it reads the lines,
  calls ``encode_batch``, and writes nothing. Both run in turns. ``mb_s`` are megabytes of the file per second of the
  whole command, start included, and ``ratio`` is that of both; medians over the turns. ``peak_mb`` is the largest
  resident memory of ``kos tokenize`` (VmHWM). With the tokenizer ``bytes`` there is nothing to compare with.
- read: documents of each kind of file, of the same text; ``mb_s`` are megabytes of the JSON Lines per second.
- pack: the plan of documents of log-normal length in sequences of 2,048 tokens; ``fill`` is their share of tokens.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import math
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from kos.bench.report import provenance, to_json
from kos.commands import program
from kos.files import check_writable
from kos.train.data import Tokens
from kos.train.data.documents import ZSTD, open_documents
from kos.train.data.packing import PackedTokens, make_plan

SECONDS = 3600.0
VOCABULARY = 16_000
TRAINED_ON = 300  # documents
BATCH = 512
LONGEST = 200_000  # bytes of a document
READ_MEGABYTES = 50
DOCUMENTS, SEQ_LEN = 1_000_000, 2048

BASELINE = f"""
import itertools, json, sys
from tokenizers import Tokenizer
tokenizer, tokens = Tokenizer.from_file(sys.argv[1]), 0
with open(sys.argv[2], "rb") as file:
    while lines := [*itertools.islice(file, {BATCH})]:
        texts = [json.loads(line)["text"] for line in lines]
        tokens += sum(len(each.ids) for each in tokenizer.encode_batch(texts, add_special_tokens=False))
print(tokens)
"""


def write_text(folder: Path, megabytes: int) -> Path:
    """A file of so many million bytes."""
    root, path, size = Path(sysconfig.get_paths()["stdlib"]), folder / f"{megabytes}.jsonl", 0
    files = sorted(each for each in root.rglob("*.py") if "site-packages" not in each.parts)
    files = [each for each in files if each.stat().st_size <= LONGEST]
    lines = [json.dumps({"text": each.read_text("utf-8", "replace").replace("\0", " ")}) for each in files]
    with path.open("w", encoding="utf-8") as file:
        for line in itertools.cycle(lines):
            size += file.write(f"{line}\n")
            if size >= megabytes * 1_000_000:
                return path
    raise AssertionError("cycle ended")


def texts_of(path: Path) -> list[str]:
    with path.open("rb") as file:
        return [text for line in file if (text := json.loads(line)["text"])]


def train_tokenizer(path: Path, out: Path) -> None:
    import tokenizers

    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=VOCABULARY, show_progress=False)
    with path.open("rb") as file:
        made.train_from_iterator([json.loads(line)["text"] for line in itertools.islice(file, TRAINED_ON)], trainer)
    made.save(str(out))


def measure(command: list[str]) -> tuple[float, int]:
    """Seconds of a command, and the largest resident memory of its process, in bytes."""
    begin, most = time.monotonic(), 0
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    while process.poll() is None:
        if time.monotonic() - begin > SECONDS:
            process.kill()
            raise SystemExit(f"{command[:4]}: took more than {SECONDS} s")
        try:
            most = 1024 * int(Path(f"/proc/{process.pid}/status").read_text().partition("VmHWM:")[2].split()[0])
        except (OSError, IndexError):
            pass  # it has just ended
        time.sleep(0.1)
    if process.returncode:
        raise SystemExit(f"{command[:4]}: exit status {process.returncode}")
    return time.monotonic() - begin, most


def tokenizing(folder: Path, megabytes: int, turns: int, kind: str) -> dict[str, Any]:
    text, tokenizer, out = write_text(folder, megabytes), folder / "tokenizer.json", folder / "out"
    if not tokenizer.exists():
        train_tokenizer(text, tokenizer)
    ours = [sys.executable, "-m", "kos", "tokenize", str(text), str(out)]
    ours += ["--tokenizer", str(tokenizer) if kind == "bpe" else kind]
    theirs = [sys.executable, "-c", BASELINE, str(tokenizer), str(text)]
    found = []
    for _ in range(turns):
        found.append((measure(ours), measure(theirs)[0] if kind == "bpe" else math.nan))
        shutil.rmtree(out)
    size = text.stat().st_size / 1e6
    text.unlink()
    beside = {
        "tokenizers_mb_s": round(median(size / theirs for _, theirs in found), 2),
        "ratio": round(median(theirs / ours for (ours, _), theirs in found), 3),
    }  # fmt: skip
    return {
        "what": "tokenize", "tokenizer": kind, "megabytes": megabytes, "threads": len(os.sched_getaffinity(0)),
        "turns": turns, "mb_s": round(median(size / ours for (ours, _), _ in found), 2),
        "peak_mb": round(max(peak for (_, peak), _ in found) / 1e6), **(beside if kind == "bpe" else {}),
    }  # fmt: skip


def _write_csv(path: Path, texts: list[str]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, "excel-tab" if path.suffix == ".tsv" else "excel").writerows([["text"], *([t] for t in texts)])


def _write_parquet(path: Path, texts: list[str]) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), path, row_group_size=1000)


WRITERS: dict[str, Callable[[Path, list[str]], Any]] = {
    "a.jsonl": lambda path, texts: path.write_text("".join(f"{json.dumps({'text': text})}\n" for text in texts)),
    "a.jsonl.zst": lambda path, texts: path.write_bytes(import_module(ZSTD).compress(
        "".join(f"{json.dumps({'text': text})}\n" for text in texts).encode())),
    "a.json": lambda path, texts: path.write_text(json.dumps([{"text": text} for text in texts])),
    "a.csv": _write_csv, "a.tsv": _write_csv, "a.parquet": _write_parquet,
}  # fmt: skip


def reading(folder: Path) -> list[dict[str, Any]]:
    text = write_text(folder, READ_MEGABYTES)
    texts, rows = texts_of(text), []
    for name, write in WRITERS.items():
        write(folder / name, texts)
        begin = time.monotonic()
        assert sum(len(document) for document in open_documents(folder / name)) == sum(map(len, texts)), name
        rows.append({"what": "read", "kind": name.removeprefix("a"), "megabytes": READ_MEGABYTES,
                     "mb_s": round(text.stat().st_size / 1e6 / (time.monotonic() - begin), 1)})  # fmt: skip
        (folder / name).unlink()
    text.unlink()
    return rows


def packing() -> dict[str, Any]:
    lengths = np.random.default_rng(0).lognormal(6, 1, DOCUMENTS).astype(np.int64) + 1
    row = Tokens([np.zeros(lengths.sum(), np.uint8)], np.cumsum(lengths) - lengths)
    begin = time.monotonic()
    plan = make_plan(row, SEQ_LEN, 0, False)
    seconds = time.monotonic() - begin
    fill = PackedTokens(row, SEQ_LEN, plan, False).fill
    return {"what": "pack", "documents": DOCUMENTS, "tokens": row.size, "seq_len": SEQ_LEN,
            "seconds": round(seconds, 2), "fill": round(fill, 5)}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(prog=program("benchmarks.data"), description=(__doc__ or "").partition(":")[0])
    parser.add_argument("--megabytes", type=int, nargs="+", default=[200, 2000], help="sizes of the text")
    parser.add_argument("--bytes", type=int, nargs="*", default=[200, 2000], help="the same, for the tokenizer bytes")
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--json", type=Path, help="also write a file")
    arguments = parser.parse_args()
    if arguments.json:
        check_writable(arguments.json)
    with tempfile.TemporaryDirectory() as folder:
        rows = [packing(), *reading(Path(folder))]
        print(*rows, sep="\n", flush=True)
        for kind, sizes in (("bytes", arguments.bytes), ("bpe", arguments.megabytes)):
            for megabytes in sizes:
                rows.append(tokenizing(Path(folder), megabytes, arguments.turns, kind))
                print(rows[-1], flush=True)
    if arguments.json:
        import tokenizers

        about = provenance("benchmarks.data", None, 1)
        about["versions"]["tokenizers"] = tokenizers.__version__
        arguments.json.write_text(to_json({**about, "load": os.getloadavg()[2], "rows": rows}))


if __name__ == "__main__":
    main()
