"""Reads the tokens of a corpus: encodes text, checks token files, or takes the tokens that ``kos tokenize`` wrote.

What is read is kept beside the data: computed once on each machine, used by all later ranks and runs.  A folder under
``.kos`` beside the files (where that cannot be written, in the user's cache) is good as long as the files have the
sizes and times of change that they had.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kos.errors import DataError, SettingError
from kos.files import cache_folder, sync
from kos.train.config import by_source
from kos.train.config.options import TrainConfig
from kos.train.data import BEGINS, Separator, Shard, Tokens, beyond_vocabulary, check_mask
from kos.train.data.chat import read_chat_template
from kos.train.data.corpus import Corpus, Show
from kos.train.data.documents import Lines
from kos.train.data.tokenized import check_shards, fingerprint, read_manifest, read_rows, tokenize
from kos.train.data.tokenizers import (
    NumberTokenizer,
    Tokenizer,
    has_tokenizer,
    how_to_make,
    make_tokenizer,
    tokenizer_from_json,
)

TOKENS_VERSION = 2
"""Increase this number if the same text and settings give other tokens, other pieces or another split than before."""

_BEGINS = ("train.npy", "val.npy")
"""The files in what is kept of token files that hold where documents begin."""


def lines_of(config: TrainConfig, weights: str | None = None) -> Lines:
    """How files are read with these settings."""
    template = functools.cache(lambda: read_chat_template(_tokenizer_of_text(config, weights), date_of(config)))
    fields, renamed = by_source(config.text_field), dict(each.split("=", 1) for each in config.fields)
    renamed |= {"completion": renamed.pop("response")} if "response" in renamed else {}
    return Lines(
        fields.get(""), template, config.split_turns, config.token_dtype, config.allow_lost_content, fields, renamed
    )  # fmt: skip


def date_of(config: TrainConfig) -> date:
    """The date that chat templates write."""
    return date.today() if config.template_date is None else date.fromisoformat(config.template_date)


def load_tokens(
    corpus: Corpus, config: TrainConfig, weights: str | None, show: Show, given: Tokenizer | None
) -> tuple[Tokens, Tokens, Tokenizer, dict[str, Any]]:
    """Training and validation tokens, in files, their tokenizer, and the JSON that ``prepared`` keeps.

    The tokenizer is the one that is ``given``, or else that of the settings.
    """
    load = _load_tokenized if corpus.tokenized else _load_text if corpus.vocab_size is None else _load_tokens
    return load(corpus, config, weights, show, given)


def _load_tokens(
    corpus: Corpus, config: TrainConfig, weights: str | None, show: Show, given: Tokenizer | None
) -> tuple[Tokens, Tokens, Tokenizer, dict[str, Any]]:
    """``load_tokens`` of token files."""
    tokenizer = given or _tokenizer_of_tokens(config, corpus)
    separator = _separator_of_tokens(tokenizer, corpus)
    shards, val_shards, _, trained_on, _ = corpus.splits
    masked = any(shard.mask is not None for shard in (*shards, *val_shards))
    if config.loss_on == "all":
        shards, val_shards = ([Shard(shard.tokens) for shard in each] for each in (shards, val_shards))

    def make(folder: Path) -> dict[str, Any]:
        every, counts = [*shards, *val_shards], 0
        flags = [corpus.flags[number >= len(shards)][0] for number in range(len(every))]
        for flag, shard in zip(flags, every, strict=True):
            check_mask(flag, shard)
        at, begins = [0, 0], [[np.zeros(1, np.int64)], [np.zeros(1, np.int64)]]  # of train and val
        for number, (tokens, mask) in _pieces(every, show):
            of = int(number >= len(shards))
            if tokens.max() >= tokenizer.vocab_size:
                raise beyond_vocabulary(flags[number], every[number], tokenizer.vocab_size)
            if separator is not None:
                begins[of].append(np.flatnonzero(tokens == separator.token) + at[of] + separator.ends)
            at[of] += len(tokens)
            counts += int(mask.sum()) if masked and not of else 0
        found = any(map(len, (*begins[0][1:], *begins[1][1:])))
        for of, name in enumerate(_BEGINS):
            places = np.unique(np.concatenate(begins[of]))
            np.save(folder / name, places[places < at[of]])
        between = "; no documents are marked"
        if separator is not None and found:
            between = f"; documents {'end' if separator.ends else 'begin'} with token {separator.token}"
        about = {"held_out": corpus.splits.describe(*at), "trained_on": trained_on, "several": found}
        rows = [(shard.tokens.dtype if shard.mask is None else np.dtype(np.int64), [shard]) for shard in every]
        return about | {"sha256": fingerprint(rows), "masked": masked, "counted": counts, "between": between}

    how = ["tokens", tokenizer.vocab_size, separator, config.loss_on, corpus.below, config.token_dtype]
    how += corpus.split_by
    with prepared(corpus.files, how, make, corpus.val_files) as (folder, about):
        whole = config.fit == "whole"  # else places are not needed in memory
        documents: list[Any] = [np.load(folder / name) if whole else separator for name in _BEGINS]
    none = [(shards or val_shards)[0][:0]]
    return Tokens(shards or none, documents[0]), Tokens(val_shards or none, documents[1]), tokenizer, about


def _tokenizer_of_tokens(config: TrainConfig, corpus: Corpus) -> Tokenizer:
    if config.tokenizer == "auto":
        return NumberTokenizer(config.model.vocab_size or corpus.vocab_size or 0)
    return make_tokenizer(config.tokenizer)


def _separator_of_tokens(tokenizer: Tokenizer, corpus: Corpus) -> Separator | None:
    """What is between documents of token files: what the tokenizer adds; of bare numbers what llm.c writes."""
    before, after = tokenizer.document_affixes
    if before or after:
        return Separator(before[0], False) if before else Separator(after[-1], True)
    size = corpus.vocab_size or 0
    padded = range(size, -(-size // 128) * 128 + 1)  # rows of an embedding, of which some are no tokens
    return Separator(BEGINS[size], False) if size in BEGINS and tokenizer.vocab_size in padded else None


def _pieces(shards: Sequence[Shard], show: Show) -> Iterator[tuple[int, tuple[NDArray[Any], NDArray[np.uint8]]]]:
    """The number of the shard, and as many of its tokens and of its mask as fit in memory, one after another."""
    for number, shard in enumerate(shards):
        show("reading the data", number / len(shards))
        yield from ((number, piece) for piece in shard.pieces())


def _tokenizer_of_text(config: TrainConfig, folder: str | None) -> str:
    """The tokenizer that ``--tokenizer`` names.  ``auto`` is that of the weights in ``folder``, or ``bytes``."""
    if config.tokenizer != "auto":
        return config.tokenizer
    if folder is not None and not has_tokenizer(Path(folder)):
        expected = f"bytes or the PATH of a tokenizer.json, as {folder} has none"
        raise SettingError("--tokenizer", expected, f"auto{how_to_make(Path(folder))}")
    return folder or "bytes"


def _load_text(
    corpus: Corpus, config: TrainConfig, weights: str | None, show: Show, given: Tokenizer | None
) -> tuple[Tokens, Tokens, Tokenizer, dict[str, Any]]:
    """``load_tokens`` of text."""
    how, make = tokenizing(corpus, config, weights, show, given)
    with prepared(corpus.files, [how, corpus.below], make, corpus.val_files) as (folder, about):
        return *read_rows(folder, about), given or _tokenizer_of(about), about


def _tokenizer_of(about: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer that encoded the tokens which ``about`` describes."""
    tokenizer = tokenizer_from_json(about["tokenizer"])
    tokenizer.rules = about.get("rules", "")
    return tokenizer


def tokenizing(
    corpus: Corpus, config: TrainConfig, weights: str | None, show: Show, given: Tokenizer | None = None
) -> tuple[list[Any], Callable[..., dict[str, Any]]]:
    """What the tokens of text depend on, and ``make(folder, key)``, which writes them to a folder.

    They also depend on the files and on ``corpus.below``.
    """
    spec = _tokenizer_of_text(config, weights)
    tokenizer = given or make_tokenizer(spec)
    how: list[Any] = [{**tokenizer.to_json(), "name": ""}]
    template = read_chat_template(spec, date_of(config))
    how += [TOKENS_VERSION, config.split_special_tokens, config.loss_on, config.split_turns, *corpus.split_by]
    how += [[each.text_field for each in corpus.lines]]
    how += ["lost content"] * config.allow_lost_content
    how += [list(config.fields)] * bool(config.fields)
    how += [template.source, template.special] if template else []
    dated = {"template_date": str(template.date)} if template and template.uses("strftime_now") else {}
    how += [*dated.values()]
    sources = (config.data, corpus.files), (config.val_data, corpus.val_files)
    how += [name for name, files in sources if not files]  # others are known by their files

    def make(folder: Path, key: str = "") -> dict[str, Any]:
        about = tokenize(
            folder, corpus, tokenizer, key=key, show=show, split_special_tokens=config.split_special_tokens,
            loss_on=config.loss_on,
        )  # fmt: skip
        return about | dated

    return how, make


def _load_tokenized(
    corpus: Corpus, config: TrainConfig, weights: str | None, show: Show, given: Tokenizer | None
) -> tuple[Tokens, Tokens, Tokenizer, dict[str, Any]]:
    """``load_tokens`` of a folder of ``kos tokenize``, whose checksums are compared once."""
    source = corpus.tokenized
    assert source is not None
    about = read_manifest(source)
    tokenizer = _tokenizer_of(about)
    if given is not None and not tokenizer.is_like(given):
        raise DataError(f"--data {source}: expected tokens of the tokenizer {given.name}, got {tokenizer.name}")
    named = given is None and config.tokenizer != "auto" and make_tokenizer(config.tokenizer)
    if named and not tokenizer.is_like(named):
        raise SettingError("--tokenizer", f"{tokenizer.name}, that of {source}, or auto", named.name)
    if about["masked"] and config.loss_on != about["loss_on"]:
        expected = f"{about['loss_on']}, with which {source} was written"
        raise SettingError("--loss-on", expected, config.loss_on)

    def make(folder: Path) -> dict[str, Any]:
        check_shards(source, about["shards"], show)
        return {}

    with prepared(corpus.files, ["tokenized"], make, corpus.val_files):
        train, val = read_rows(source, about)
    if given is not None:  # all is to validate on, or only what the folder holds out
        train, val = train.part(0, 0), val if val.size else train
    return train, val, given or tokenizer, about


KEPT_FORMAT = 13
ABOUT = "about.json"
LEAST = 1 << 20  # bytes of files; less is read again faster than it is looked up


@contextmanager
def prepared(
    files: Sequence[Path], how: Any, make: Callable[[Path], dict[str, Any]], val_files: Sequence[Path] = ()
) -> Iterator[tuple[Path, Any]]:
    """The folder that ``make(folder)`` fills, and the JSON that it returns: kept for these files, read ``how``.

    It is kept beside ``files``, or beside ``val_files`` if ``files`` is empty.  Open its files before the context ends:
    a folder that cannot be kept is deleted then.
    """
    status = [file.stat() for file in (*files, *val_files)]
    state = [[each.st_size, each.st_mtime_ns] for each in status]
    places = _places(files, val_files, how) if status and sum(each.st_size for each in status) >= LEAST else []
    found = next((place for place in places if _state_of(place) == state), None)
    found = found or next((place for place in places if _keep(place, state, make)), None)
    with tempfile.TemporaryDirectory() as temporary:
        folder = found or Path(temporary)
        yield folder, json.loads((folder / ABOUT).read_text())["about"] if found else make(folder)


def _state_of(place: Path) -> Any:
    """The sizes and times of the files that this was made of; None if it is missing or incomplete."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        kept = json.loads((place / ABOUT).read_text())
        return kept["files"] if kept["sizes"] == _sizes(place) else None
    return None


def _sizes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in folder.iterdir() if path.name != ABOUT}


def _keep(place: Path, state: Any, make: Callable[[Path], dict[str, Any]]) -> bool:
    """Whether it is there now, whole: under a temporary name until then."""
    with suppress(OSError):
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=place.parent, ignore_cleanup_errors=True) as temporary:
            made = Path(temporary, "made")
            made.mkdir()
            about = make(made)
            (made / ABOUT).write_text(json.dumps({"about": about, "files": state, "sizes": _sizes(made)}))
            for path in made.iterdir():
                sync(path)
            with suppress(OSError):
                place.rename(Path(temporary, "old"))
            made.rename(place)
        return True
    return False


def _places(files: Sequence[Path], val_files: Sequence[Path], how: Any) -> list[Path]:
    """A folder beside the files, which may be moved together with them, and one in the user's cache."""
    home = Path(os.path.commonpath([file.absolute().parent for file in files or val_files]))
    names = [[os.path.relpath(file, home) for file in each] for each in (files, val_files)]
    key = hashlib.sha256(json.dumps([KEPT_FORMAT, how, names]).encode()).hexdigest()[:24]
    return [home / ".kos" / key, cache_folder() / "data" / hashlib.sha256(os.fsencode(home)).hexdigest()[:24] / key]
