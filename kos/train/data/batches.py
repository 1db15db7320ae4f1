"""Batches: which tokens each step sees.

The batch of a step is a pure function of (seed, step): windows of ``seq_len + 1`` tokens at random places,
as nanoGPT draws them, from a Philox generator keyed by both (Salmon et al., "Parallel random numbers: as
easy as 1, 2, 3", SC11).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kos.errors import ConfigError, DataError
from kos.train.config.options import TrainConfig
from kos.train.data.corpus import Corpus, Show, read_corpus
from kos.train.data.prepared import prepared
from kos.train.data.tokenizers import (
    NumberTokenizer,
    Tokenizer,
    has_tokenizer,
    make_tokenizer,
    portions,
    tokenizer_from_json,
)

EVAL_BATCH_TOKENS = 16_384
"""Most tokens in a validation batch."""

HASHED_BYTES = 64 << 20
"""Larger shards are fingerprinted by this many bytes of each end."""

LEFT_OUT = -1  # a target that no loss counts

Batch = tuple[NDArray[np.int32], NDArray[np.int32]]
"""Tokens and targets, both (sequences, seq_len): the target of a token is the one that follows it."""


Shards = Sequence[NDArray[Any]]


class Tokens:
    """A row of tokens over one or more arrays (shards), which stay where they are, mapped or in memory."""

    def __init__(self, shards: Shards) -> None:
        self.shards = shards
        self._ends = np.cumsum([len(shard) for shard in self.shards])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def window(self, start: int, length: int) -> NDArray[Any]:
        """The tokens ``start`` to ``start + length``."""
        parts = []
        shard = int(np.searchsorted(self._ends, start, side="right"))
        start -= int(self._ends[shard - 1]) if shard else 0
        while length > 0:
            parts.append(self.shards[shard][start : start + length])
            length -= len(parts[-1])
            shard, start = shard + 1, 0
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


@dataclass(frozen=True)
class Dataset:
    """Training and validation tokens of one run, and the order in which they are seen."""

    name: str
    train: Tokens
    val: Tokens
    tokenizer: Tokenizer
    seed: int
    batch_size: int
    seq_len: int
    eval_batches: int
    fingerprint: str
    """SHA-256 of the tokens (of very large shards: of their ends), compared when resuming."""

    def __post_init__(self) -> None:
        least = self.seq_len + 1
        for tokens, use in ((self.train, "train"), (self.val, "validate")):
            if len(tokens) < least:
                expected = f"at least --seq-len + 1 = {least} tokens to {use} on"
                raise DataError(f"--data {self.name}: expected {expected}, got {len(tokens)}")

    def batch(self, step: int) -> Batch:
        """The whole batch of ``step`` (counted from 0)."""
        return self.rows(step, range(self.batch_size))

    def rows(self, step: int, indices: Iterable[int]) -> Batch:
        """Some rows of ``batch(step)``.  Raises DataError for a token beyond the tokenizer's vocabulary."""
        draws = np.random.Philox(key=np.array([self.seed, step], np.uint64)).random_raw(self.batch_size)
        starts = draws % np.uint64(len(self.train) - self.seq_len)
        return self.windows(self.train, starts[list(indices)])

    def targets_per_micro_batch(self, step: int, micro_batch_size: int) -> float:
        """What the sums of a micro-batch's losses and gradients are divided by, so that their mean is the step's.

        It is the mean count of targets that are not left out (-1), over all micro-batches of the batch on all ranks.
        """
        counted = int(np.count_nonzero(self.batch(step)[1] != LEFT_OUT))
        return max(1, counted) * micro_batch_size / self.batch_size

    def val_starts(self) -> NDArray[np.int64]:
        """The starts of the windows of each validation batch in ``val``, (batches, sequences); the same on all ranks.

        The windows are evenly spread over the validation tokens and do not overlap.  Every batch has ``eval_shape``, or
        as many sequences as there are windows.
        """
        windows = (len(self.val) - 1) // self.seq_len
        rows = min(eval_shape(self)[0], windows)
        batches = min(self.eval_batches, windows // rows)
        count = rows * batches
        return (np.arange(count) * windows // count * self.seq_len).reshape(batches, rows)

    def describe(self) -> str:
        """One phrase for the log."""
        return f"{len(self.train):,} + {len(self.val):,} tokens of {self.name} ({self.tokenizer.name})"

    def windows(self, tokens: Tokens, starts: Iterable[int]) -> Batch:
        """The sequences that start at ``starts``."""
        windows = np.stack([tokens.window(int(start), self.seq_len + 1) for start in starts])
        if (largest := int(windows.max())) >= self.tokenizer.vocab_size:
            expected = f"tokens below the vocabulary's {self.tokenizer.vocab_size}"
            raise DataError(f"--data {self.name}: expected {expected}, got {largest}")
        windows = windows.astype(np.int32)
        return np.ascontiguousarray(windows[:, :-1]), np.ascontiguousarray(windows[:, 1:])


def eval_shape(settings: TrainConfig | Dataset) -> tuple[int, int]:
    """The sequences of a validation batch, if there are enough, and tokens of each: at most ``EVAL_BATCH_TOKENS``."""
    return max(1, min(settings.batch_size, EVAL_BATCH_TOKENS // settings.seq_len)), settings.seq_len


def load_data(config: TrainConfig, show: Show = lambda what, share: None, weights: str | None = None) -> Dataset:
    """Read the data that ``config.data`` names, and encode text; or use the tokens of an earlier run.

    For text, ``--tokenizer auto`` is the tokenizer in the folder ``weights``, by default ``config.init_from``.
    DataError: data or tokenizer missing, unreadable, empty, binary, or shorter than a sequence; a prompt that the
    tokenizer cannot encode.  ConfigError: a tokenizer that does not fit the data.
    """
    corpus = read_corpus(config.data, show)
    if corpus.vocab_size is None:
        spec = _tokenizer_of_text(config, weights or config.init_from)
        train, val, tokenizer, fingerprint = _load_text(corpus, spec, show)
    else:
        tokenizer = _tokenizer_of_tokens(config, corpus)
        train, val = corpus.splits
        with prepared(corpus.files, "tokens", lambda folder: {"sha256": _fingerprint([*train, *val], show)}) as found:
            fingerprint = found[1]["sha256"]
    tokenizer.encode(config.prompt)
    return Dataset(
        name=corpus.name, train=Tokens(train), val=Tokens(val), tokenizer=tokenizer, seed=config.seed,
        batch_size=config.batch_size, seq_len=config.seq_len, eval_batches=config.eval_batches, fingerprint=fingerprint,
    )  # fmt: skip


def _tokenizer_of_tokens(config: TrainConfig, corpus: Corpus) -> Tokenizer:
    if config.tokenizer == "auto":
        return NumberTokenizer(config.model.vocab_size or corpus.vocab_size or 0)
    if config.tokenizer == "chars":
        expected = f"auto, bytes or a tokenizer.json for the token files {corpus.name}"
        raise ConfigError(f"--tokenizer: expected {expected}, got 'chars'")
    return make_tokenizer(config.tokenizer)


def _tokenizer_of_text(config: TrainConfig, folder: str | None) -> str:
    """The tokenizer that ``--tokenizer`` names.  ``auto`` is that of the weights in ``folder``, or ``bytes``."""
    if config.tokenizer != "auto":
        return config.tokenizer
    if folder is not None and not has_tokenizer(Path(folder)):
        raise ConfigError(f"--tokenizer: expected the one of the weights in {folder}, which holds none, got none")
    return folder or "bytes"


def _load_text(corpus: Corpus, spec: str, show: Show) -> tuple[Shards, Shards, Tokenizer, str]:
    """Tokens of ``corpus``, mapped from files, with their tokenizer and fingerprint."""
    tokenizer = None if spec == "chars" else make_tokenizer(spec)
    how = "chars" if tokenizer is None else {**tokenizer.to_json(), "name": ""}

    def make(folder: Path) -> dict[str, Any]:
        encoder = tokenizer or make_tokenizer(spec, text=[*corpus.train, *corpus.val])
        total, done = sum(map(len, (*corpus.train, *corpus.val))), 0
        for name, texts in zip(("train", "val"), corpus.splits, strict=True):
            with (folder / name).open("wb") as file:
                for text in texts:
                    for portion in portions(text):
                        show("tokenizing the data", done / total)
                        file.write(encoder.encode(portion).data)
                        done += len(portion)
                    if encoder.eos is not None:  # ends each text
                        file.write(np.array([encoder.eos], encoder.dtype).data)
        shards = [_map(folder / name, encoder.dtype) for name in ("train", "val")]
        return {"tokenizer": encoder.to_json(), "sha256": _fingerprint(shards)}

    with prepared(corpus.files, how, make) as (folder, about):
        tokenizer = tokenizer or tokenizer_from_json(about["tokenizer"])
        train, val = (_map(folder / name, tokenizer.dtype) for name in ("train", "val"))
    return [train], [val], tokenizer, about["sha256"]


def _map(path: Path, dtype: np.dtype[Any]) -> NDArray[Any]:
    return np.memmap(path, dtype, "r") if path.stat().st_size else np.empty(0, dtype)


def _fingerprint(shards: Shards, show: Show = lambda what, share: None) -> str:
    digest = hashlib.sha256()
    for number, shard in enumerate(shards):
        show("reading the data", number / len(shards))
        digest.update(f"{shard.dtype.str} {len(shard)} ".encode())
        half = HASHED_BYTES // shard.itemsize
        ends = [shard] if len(shard) <= 2 * half else [shard[:half], shard[-half:]]
        for end in ends:
            digest.update(np.ascontiguousarray(end).data)
    return digest.hexdigest()
