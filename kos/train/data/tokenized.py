"""The tokens of text in a folder: what ``kos tokenize`` writes, and what a run without it keeps of its text.

A shard ``00000.bin`` is a token file in llm.c's format. If the loss does not count all of its tokens, ``00000.mask`` is
its mask. ``00000.documents`` has the places in it where documents begin, as little-endian int64. ``manifest.json`` has
the tokenizer, the shards with their counts and checksums, and how many of the tokens are for training. The others are
for validation.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from kos.errors import ConfigError, DataError, plural
from kos.files import replace_file
from kos.train.data import FORMAT, FORMATS, HEADER_BYTES, MANIFEST, Shard, Tokens, is_tokenized, open_tokens
from kos.train.data.corpus import Corpus, Show, errors_with
from kos.train.data.documents import Document, Records, Text
from kos.train.data.tokenizers import Encoded, Tokenizer

_log = logging.getLogger(__name__)

SHARD_TOKENS = 1 << 24
"""A shard is complete when it has at least this many tokens."""


LAST = "the last argument of kos tokenize is the folder that it writes"


class CorpusDocuments:
    """The documents of a corpus: those for training, of which there are ``train``, then those for validation.

    ``kinds`` has the kinds of those for training and for validation: text, parts, or parts that a template rendered.
    ``rendered`` has the numbers of documents and of characters that a template rendered.  ``once`` has the same numbers
    for the last document of each chat alone.  ``fields`` has each ``--text-field`` that a record has.  ``lost`` and
    ``lacking`` are the sums of those of the documents.
    """

    def __init__(self, corpus: Corpus) -> None:
        self.corpus, self.splits = corpus, corpus.splits
        self.train, self.kinds = 0, (set[str](), set[str]())
        self.fields = set[str | None]()
        self.rendered, self.once = np.zeros(2, np.int64), np.zeros(2, np.int64)
        self.lost, self.lacking = 0, Counter[str]()

    def __iter__(self) -> Iterator[str | Document | Text]:
        for of_val, contents in enumerate(self.splits[:2]):
            for content in contents:
                with errors_with(*self.corpus.flags[of_val]):
                    for document in content if isinstance(content, Records) else [content]:
                        in_parts = isinstance(document, Document) and ("rendered" if document.rendered else "parts")
                        self.kinds[of_val].add(in_parts or "text")
                        if isinstance(content, Records):
                            of_text = content.lines.text_field
                            self.fields.add(document.text_field if isinstance(document, Document) else of_text)
                        self.train += not of_val
                        if isinstance(document, Document) and document.rendered:
                            self.rendered += (1, len(document))
                            self.once += (document.last, len(document) * document.last)
                            self.lost += document.lost
                            self.lacking.update(document.lacking)
                        yield document


def tokenize(
    folder: Path, corpus: Corpus, tokenizer: Tokenizer, *, split_special_tokens: bool, loss_on: str, key: str = "",
    show: Show = lambda what, share: None,
) -> dict[str, Any]:  # fmt: skip
    """Write the tokens of a corpus to ``folder``, after the shards that are there; returns the manifest.

    ``key`` identifies the settings and, after a space, the state of the data.  ConfigError if the folder has other
    files than those of an earlier call with this ``key``.  If that call did not finish, and the data has changed since
    or no shard is complete, its files are removed first.
    """
    manifest = _begun(folder, key)
    if manifest["complete"]:
        return manifest
    documents, shards, held = CorpusDocuments(corpus), manifest["shards"], list[Encoded]()
    total = sum(path.stat().st_size for path in (*corpus.files, *corpus.val_files)) or 1
    done = sum(shard["characters"] for shard in shards)
    masked, skip = loss_on == "completion", sum(shard["pieces"] for shard in shards)
    show("tokenizing the data", min(1.0, done / total))
    encoded = tokenizer.encode_documents(documents, split_special_tokens, skip)
    for part in chain(encoded, [None]):
        if held and (part is None or sum(len(each.tokens) for each in held) >= SHARD_TOKENS):
            shards.append(_write_shard(folder, len(shards), held, tokenizer, masked))
            held = []
            _save(folder, manifest)
        if part is not None:
            held.append(part)
            done += part.characters
            show("tokenizing the data", min(1.0, done / total))
    manifest |= _about(folder, documents, shards, tokenizer, masked)
    return _save(folder, manifest | {"loss_on": loss_on, "complete": True})


def _begun(folder: Path, key: str) -> dict[str, Any]:
    """The manifest in ``folder``, or the first one of an empty folder."""
    if is_tokenized(folder):
        manifest = read_manifest(folder, complete=False)
        if manifest["key"] == key:
            return manifest
        settings, shards = (each.partition(" ")[0] for each in (key, manifest["key"])), len(manifest["shards"])
        if manifest["complete"] or (shards and len({*settings}) > 1):
            raise ConfigError(f"{folder}: expected a new folder, got one with tokens of other data or settings")
        if shards:
            text = "%s: the data has changed since %s of an interrupted kos tokenize; it begins again"
            _log.warning(text, folder, plural(shards, "shard"))
        for path in folder.iterdir():
            if re.fullmatch(r"\d{5,}\.(bin|documents|mask)", path.name):
                path.unlink()
        (folder / MANIFEST).unlink()
    if others := sorted(folder.iterdir()):
        raise ConfigError(f"{folder}: expected a new or an empty folder, got one with {others[0].name}; {LAST}")
    return _save(folder, {"format": FORMAT, "key": key, "complete": False, "shards": []})


def _save(folder: Path, manifest: dict[str, Any]) -> dict[str, Any]:
    replace_file(folder / MANIFEST, json.dumps(manifest).encode())
    return manifest


def _write_shard(
    folder: Path, number: int, parts: Sequence[Encoded], tokenizer: Tokenizer, masked: bool
) -> dict[str, Any]:
    """Write the files of a shard; its entry in the manifest."""
    offsets = np.cumsum([0, *(len(part.tokens) for part in parts)])
    itemsize = 2 if tokenizer.vocab_size <= 1 << 16 else 4
    magic, (version, dtype) = next(each for each in FORMATS.items() if np.dtype(each[1][1]).itemsize == itemsize)
    header = np.array([magic, version, offsets[-1], *[0] * (HEADER_BYTES // 4 - 3)], "<i4")
    begins = [(part.begins + at).astype("<i8") for part, at in zip(parts, offsets, strict=False)]
    files = {"bin": [header, *(part.tokens.astype(dtype) for part in parts)], "documents": begins}
    if masked and not all(part.mask.all() for part in parts):
        files["mask"] = [part.mask for part in parts]
    name, digests = f"{number:05}", {}
    (folder / f"{name}.mask").unlink(missing_ok=True)  # of an interrupted call
    for suffix, arrays in files.items():
        digest = hashlib.sha256()
        with (folder / f"{name}.{suffix}").open("wb") as file:
            for array in arrays:
                file.write(array.data)
                digest.update(array.data)
        digests[suffix] = digest.hexdigest()
    return {
        "name": name, "tokens": int(offsets[-1]), "documents": sum(map(len, begins)), "sha256": digests,
        "pieces": sum(part.pieces for part in parts), "characters": sum(part.characters for part in parts),
        "spelled_out": sum((part.spelled_out for part in parts), Counter[str]()),
    }  # fmt: skip


def _about(
    folder: Path, documents: CorpusDocuments, shards: Sequence[dict[str, Any]], tokenizer: Tokenizer, masked: bool
) -> dict[str, Any]:
    """What the manifest says of all shards."""
    row, splits = _row(folder, shards), documents.splits
    at = int(np.append(row.begins, row.size)[documents.train])
    parts, (of_train, of_val) = (row.part(0, at), row.part(at, row.size)), documents.kinds
    kinds = of_train | of_val
    in_parts, rendered = kinds != {"text"}, kinds == {"rendered"}
    between = "; chats as their template writes them" if rendered else f"; {tokenizer.separators()}"
    (answers, every), (chats, once) = documents.rendered.tolist(), documents.once.tolist()
    if answers > chats:
        cost = f"{plural(answers, 'document')}, with {every / max(1, once):.1f} times the text"
        between += f"; --split-turns makes {plural(chats, 'chat')} into {cost}"
    if documents.lost:
        between += f"; the chat template leaves out text of {plural(documents.lost, 'message')}"
    for prompt, count in documents.lacking.most_common():
        between += f"; {plural(count, 'answer')} without {prompt!r}, with which the generation prompt ends"
    identity = json.dumps(tokenizer.to_json(), sort_keys=True).encode()
    dtype = np.min_scalar_type(-tokenizer.vocab_size) if masked and in_parts else tokenizer.dtype
    return {
        "tokenizer": tokenizer.to_json(), "tokenizer_sha256": hashlib.sha256(identity).hexdigest(),
        "rules": tokenizer.rules, "train_tokens": at, "masked": in_parts, "what": "chat" if rendered else "document",
        # Other validation data does not decide how the training data is read.
        "fit": "cut" if "text" in (of_train if documents.corpus.other_val else kinds) else "whole",
        "between": between,
        "held_out": splits.describe(at, row.size - at), "trained_on": splits.trained_on,
        "spelled_out": sum((Counter(shard["spelled_out"]) for shard in shards), Counter[str]()),
        "unused": sorted({name for each in documents.corpus.lines if (name := each.text_field)} - documents.fields),
        "several": max(len(part.begins) for part in parts) > 1,
        "counted": sum(int(mask.sum()) for shard in parts[0].shards for _, mask in shard.pieces()),
        "sha256": fingerprint((dtype, part.shards) for part in parts),
    }  # fmt: skip


def fingerprint(rows: Iterable[tuple[np.dtype[Any], Sequence[Shard]]]) -> str:
    """SHA-256 of rows of tokens, each as numbers of a dtype, however they lie in shards.

    Checkpoints have it, so it is that of kos 0.3: if a dtype is signed, a token t that the loss does not count is ~t.
    """
    digest = hashlib.sha256()
    for dtype, row in rows:
        digest.update(f"{dtype.str} {sum(map(len, row))} ".encode())
        for tokens, mask in chain.from_iterable(shard.pieces() for shard in row):
            numbers = np.ascontiguousarray(tokens, dtype)
            digest.update((np.where(mask, numbers, ~numbers) if dtype.kind == "i" else numbers).data)
    return digest.hexdigest()


def _row(folder: Path, shards: Sequence[dict[str, Any]]) -> Tokens:
    """All tokens of a folder."""
    begins = [np.fromfile(folder / f"{shard['name']}.documents", "<i8") for shard in shards]
    offsets = np.cumsum([0, *(shard["tokens"] for shard in shards)])
    places = [each + at for each, at in zip(begins, offsets, strict=False)]
    return Tokens([open_tokens(folder / f"{shard['name']}.bin") for shard in shards], np.concatenate(places))


def read_rows(folder: Path, manifest: dict[str, Any]) -> tuple[Tokens, Tokens]:
    """The tokens for training and for validation, which stay in their files."""
    row, at = _row(folder, manifest["shards"]), manifest["train_tokens"]
    return row.part(0, at), row.part(at, row.size)


def read_manifest(folder: Path, complete: bool = True) -> dict[str, Any]:
    """The manifest of ``kos tokenize`` in a folder.  DataError if it is damaged, or ``complete`` and not finished."""
    path = folder / MANIFEST
    try:
        manifest: dict[str, Any] = json.loads(path.read_text("utf-8"))
        needed = {"format", "key", "shards", "complete", *["tokenizer", "train_tokens", "sha256"] * complete}
        done = manifest["complete"] or not complete
        if missing := needed - manifest.keys() if done else ():
            raise ValueError(f"none of {', '.join(sorted(missing))}")
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: expected a manifest of kos tokenize, got {error!r}").about("data") from None
    if not done:
        got = f"{len(manifest['shards'])} of an interrupted kos tokenize, which goes on if it is run again"
        raise DataError(f"--data {folder}: expected all shards, got {got}").about("data")
    return manifest


def check_shards(folder: Path, shards: Sequence[dict[str, Any]], show: Show) -> None:
    """DataError if a file of the shards is missing or has another checksum."""
    for number, shard in enumerate(shards):
        show("reading the data", number / len(shards))
        for suffix, expected in shard["sha256"].items():
            path = folder / f"{shard['name']}.{suffix}"
            try:
                with path.open("rb") as file:
                    got = hashlib.file_digest(file, "sha256").hexdigest()
            except FileNotFoundError:
                raise DataError(f"--data {path}: expected this file of kos tokenize, got none") from None
            if got != expected:
                raise DataError(f"--data {path}: expected SHA-256 {expected}, as in {MANIFEST}, got {got}")
