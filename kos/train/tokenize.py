"""Write text as tokens to a folder that ``kos train --data OUT`` reads: ``python -m kos.train.tokenize SOURCE… OUT``.

A SOURCE is anything that ``--data`` of ``kos train`` accepts as text. A part of each source is held out for
validation, unless the name of a file says that it is for validation. If the command is interrupted, the same command
continues after the last complete shard.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import logging
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from kos.commands import program
from kos.errors import ConfigError, KosError, plural
from kos.files import printing
from kos.reporting import ArgumentParser, end_command
from kos.train import missing

SETTINGS = (
    "tokenizer", "val_data", "hold_out", "text_field", "loss_on", "split_turns", "split_special_tokens",
    "allow_lost_content", "fields", "template_date",
)  # fmt: skip
"""The settings of ``kos train`` that this command also has."""

HELP = {
    "tokenizer": "Split text into bytes, or the tokens of a Hugging Face tokenizer.json at PATH. Default: bytes.",
    "val_data": "Validate on other data: the same NAMEs and PATHs as SOURCE. Default: a part of each SOURCE.",
    "hold_out": "Fraction of each SOURCE that is held out for validation: the end of a file, or some files of a "
    "folder. It has no effect if the names of files say what is held out. Default: 0.1.",
}
"""The help of the settings that ``kos train`` describes by flags that this command lacks."""


def tokenize(out: Path, sources: Sequence[str], **settings: Any) -> dict[str, Any]:
    """Write the tokens of ``sources`` to ``out``, a new, empty or unfinished folder, and return its manifest.

    ``settings`` are those of ``kos train``.  Raises ConfigError if ``out`` holds anything else or is named as a file of
    data, if another process writes to it, or if a source has tokens, and the errors of
    ``kos.train.data.batches.load_data``.
    """
    from kos.train.config.options import TrainConfig
    from kos.train.data.corpus import read_corpus
    from kos.train.data.documents import OPENERS, READERS
    from kos.train.data.loading import lines_of, tokenizing
    from kos.train.data.tokenized import LAST

    if not out.exists() and out.suffix.lower() in (".txt", ".bin", ".npy", ".arrow", ".zip", *READERS, *OPENERS):
        raise ConfigError(f"{out}: expected a folder as OUT, got the name of a file of data (no such file); {LAST}")
    config = TrainConfig.from_preset(data=sources[0], **settings)
    config.check_sources([*sources, *filter(None, [config.val_data])])
    corpus = read_corpus(sources, val_data=config.val_data, lines=lines_of(config), hold_out=config.held_out)
    if corpus.vocab_size is not None or corpus.tokenized:
        raise ConfigError(f"{sources[0]}: expected text, got tokens")
    how, make = tokenizing(corpus, config, None, lambda what, share: None)
    status = [(str(path), path.stat()) for path in (*corpus.files, *corpus.val_files)]
    files = [[path, each.st_size, each.st_mtime_ns] for path, each in status]
    parts = [how, [*sources], config.val_data], [corpus.below, files]
    key = " ".join(hashlib.sha256(json.dumps(each).encode()).hexdigest() for each in parts)
    if out.exists() and not out.is_dir():
        raise ConfigError(f"{out}: expected a new or an empty folder, got a file; {LAST}")
    out.mkdir(parents=True, exist_ok=True)
    with _alone(out):
        return make(out, key)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """ConfigError if another process writes to the folder in such a context."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # of a file system without locks
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                got = "one to which another kos tokenize writes"
                raise ConfigError(f"{folder}: expected a folder of its own, got {got}") from None
        yield
    finally:
        os.close(handle)


def _parser() -> argparse.ArgumentParser:
    from kos.train.config.flags import add_flag
    from kos.train.config.options import KEYS

    description = (__doc__ or "").partition("\n")[0]
    parser = ArgumentParser(
        prog=program("kos.train.tokenize"), description=description, argument_default=argparse.SUPPRESS
    )
    parser.add_argument("sources", nargs="+", metavar="SOURCE", help="text, named as for --data of kos train")
    parser.add_argument("out", type=Path, metavar="OUT", help="the folder to write; new, empty or unfinished")
    for name in SETTINGS:
        add_flag(parser, name, KEYS[name].default, HELP.get(name))
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    begin = time.monotonic()
    logging.basicConfig(format="kos: %(message)s", level=logging.WARNING, stream=sys.stderr)
    try:
        settings = vars(_parser().parse_args(argv))
        manifest = tokenize(out := settings.pop("out"), settings.pop("sources"), **settings)
    except (KosError, ImportError, OSError) as error:
        return end_command(missing(error) if isinstance(error, ImportError) else error)
    shards = manifest["shards"]
    tokens, documents = (sum(shard[name] for shard in shards) for name in ("tokens", "documents"))
    size = f"{tokens:,} tokens of {plural(documents, 'document')} in {plural(len(shards), 'shard')}"
    from kos.train.data.tokenizers import tokenizer_from_json

    with printing():
        size += f" ({tokenizer_from_json(manifest['tokenizer']).name})"
        print(f"{out}: {size}, {time.monotonic() - begin:.1f} s; held out for validation: {manifest['held_out']}")
        if written := manifest.get("template_date"):
            print(f"the chat template writes the date {written} (--template-date)")
        if unused := manifest.get("unused"):
            print(f"without effect: --text-field (no record has the field {' or '.join(unused)})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
