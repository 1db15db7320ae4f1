"""Batches: which tokens each step sees, and which of them the loss counts.

The batch of a step is a pure function of (seed, step). With ``--steps`` it is windows of ``seq_len + 1`` tokens at
random places, as nanoGPT draws them, from a Philox generator keyed by both (Salmon et al., "Parallel random numbers: as
easy as 1, 2, 3", SC11). With ``--epochs`` windows lie side by side, and each epoch has them in an order of its own.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kos.errors import DataError, plural
from kos.train.config import weighted
from kos.train.config.options import TrainConfig
from kos.train.data import Tokens
from kos.train.data.corpus import Corpus, Show, errors_with, read_corpus
from kos.train.data.loading import lines_of, load_tokens
from kos.train.data.mixture import Mixture, mix, permuted
from kos.train.data.packing import PackedTokens, Packing, pack
from kos.train.data.tokenizers import Tokenizer
from kos.train.ops import Batch
from kos.train.parallel.mesh import Axis

EVAL_BATCH_TOKENS = 16_384
"""Most tokens in a validation batch."""

LEFT_OUT = -1  # a target that no loss counts

QUESTIONS = 100
"""Chats among which one is found for the sample at the end of a run."""

SAMPLED = 256
"""Sequences in which tokens are counted that lack the beginning of their document."""


class Batches(Protocol):
    """Where a device takes the batches of its steps from: a ``Dataset``, or ``OwnBatches`` of the program."""

    @property
    def ahead(self) -> bool:
        """Whether the batch of the next step may be read before a step is over."""
        ...

    def read(self, step: int) -> tuple[str, ...]:
        """Get the batch of ``step`` ready.  Returns the fields of ``Batch`` that all batches have.  Collective."""
        ...

    def micro_batches(self, step: int, rows_of_each: Sequence[range], dp: Axis) -> tuple[list[Batch], float]:
        """This rank's micro-batches of a step, and what sums of losses and gradients in each are divided by.

        That is the mean count of targets that are not left out (-1), over all micro-batches of the batch on all ranks,
        so that their mean is the step's.  It is infinite if all targets are left out: gradients are then
        0, and optimizers make no update. With ``compress``, what such a step sends of the residuals is lost. Collective
        over ``dp`` if targets are masked.
        """
        ...


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
    """SHA-256 of the tokens, compared when resuming."""
    held_out: str = ""
    """A line for the log: which data is held out for validation, and the special tokens between documents."""
    trained_on: str = ""
    """A phrase for the same line: the files of the training data."""
    note: str = ""
    """A line for the log on special tokens that are spelled out in the text, if there are any."""
    sources: tuple[str, str] = ("--data", "--data")
    """The flags and paths, as typed, of ``train`` and ``val``, for errors."""

    epochs: int | None = None
    """How often each window is seen; None: windows are drawn at random."""

    packs: bool = False
    """Whether batches say where documents begin, so that attention stays within them."""

    packing: Packing | None = None
    """How whole documents are packed into sequences (``--fit whole``); None: sequences cut documents."""

    what: str = "document"
    """What a document is, for the log."""

    mixture: Mixture[Dataset] | None = None
    """The sources and the order of their sequences; None: one source."""

    others: Mapping[str, Dataset] = field(default_factory=dict)
    """More data to validate on (``--eval-data``), by name."""

    trains: bool = True
    """Whether there is training data."""

    ahead = True

    in_parts: bool = False
    """Whether documents have parts that the loss need not count: chats, prompts and completions, tokens with a mask."""

    in_loss: int = 0
    """How many of the training tokens the loss counts, if ``in_parts``."""

    ignored: Mapping[str, str] = field(default_factory=dict)
    """Settings that do not apply to data of this kind, each with the reason."""

    def __post_init__(self) -> None:
        if self.mixture is not None:
            return  # each source has been checked
        least = self.seq_len + 1
        uses = ((self.train, "train"), (self.val, "validate"))
        for tokens, use in uses[not self.trains : 2 if self.eval_batches else 1]:
            if len(tokens) < least and isinstance(tokens, PackedTokens) and tokens.size:
                most = f" of at most --seq-len = {self.seq_len} tokens" * tokens.skips
                how = " (--long-documents cut takes pieces of longer ones)" * tokens.skips
                expected = f"a document{most} to {use} on, with a token that the loss counts"
                raise self._error(tokens, expected, f"none{how}")
            if len(tokens) < least:
                raise self._error(tokens, f"at least --seq-len + 1 = {least} tokens to {use} on", len(tokens))
        counts = (counted(self.windows(self.val, starts)) for starts in self.val_starts())
        if self.val.masked and self.eval_batches and not any(counts):
            raise self._error(self.val, "validation windows in which the loss counts a target", "none")

    @property
    def parts(self) -> list[Dataset]:
        """The data of each source."""
        return [self] if self.mixture is None else [*self.mixture.parts.values()]

    @property
    def unused_settings(self) -> dict[str, str]:
        """The settings that do not apply to the data, each with a reason.

        Those are the settings that apply to no source and to no other validation data, and those of text that do not
        apply to the tokens of some source.
        """
        every = [part.ignored for part in [*self.parts, *self.others.values()]]
        found = {name: reason for name, reason in every[0].items() if all(name in each for each in every)}
        for part in self.parts if self.mixture is not None else ():
            for name in part.ignored.keys() - found.keys() - {"token_dtype"}:
                found[name] = f"for one of the sources: {part.ignored[name]}"
        return dict(sorted(found.items()))

    @property
    def share_in_loss(self) -> float:
        """The share of the training tokens, without padding, that the loss counts."""
        if isinstance(self.train, PackedTokens):
            return self.train.counts[0] / max(1, round(self.train.fill * (len(self.train) - 1)))
        return self.in_loss / max(1, self.train.size) if self.train.masked else 1.0

    @property
    def packed(self) -> bool:
        """Whether whole documents are packed into sequences, of any source."""
        return any(part.packing is not None for part in self.parts)

    @property
    def validated(self) -> list[Dataset]:
        """The data of each source that has validation data of its own; ``--val-data`` is that of the first."""
        return [part for part in self.parts if part.eval_batches]

    @property
    def evaluated(self) -> dict[str, Dataset]:
        """The data of every validation loss that is computed, by the name of the loss."""
        named = {f"val_loss/{name}": each for name, each in self.others.items() if each.eval_batches}
        if self.mixture is None or self.sources[0] != self.sources[1]:  # --val-data is that of all sources
            return dict(zip(["val_loss"], self.validated, strict=False)) | named
        return {f"val_loss/{name}": part for name, part in self.mixture.parts.items() if part.eval_batches} | named

    @property
    def losses(self) -> list[str]:
        """The names of all validation losses.  That of a mixture is computed from those of its sources."""
        return [*dict.fromkeys([*["val_loss"] * bool(self.validated), *self.evaluated])]

    def read(self, step: int) -> tuple[str, ...]:
        """See ``Batches``.  Any batch can be read at any time."""
        return ("tokens", "targets", *["document_starts"] * self.packs)

    @property
    def masks_targets(self) -> bool:
        """Whether targets may be masked with -1: then ranks exchange the counts of the others before each step."""
        return any(each.train.masked or each.val.masked for each in self.parts)

    def batch(self, step: int) -> Batch:
        """The whole batch of ``step`` (counted from 0)."""
        return self.rows(step, range(self.batch_size))

    def rows(self, step: int, indices: Iterable[int]) -> Batch:
        """Some rows of ``batch(step)``."""
        if self.mixture is not None:
            return self.mixture.rows(step * self.batch_size, self.batch_size, [*indices])
        starts, fills = self._starts(step, np.array([*indices], np.int64))
        got = self.windows(self.train, starts)
        return got._replace(targets=np.where(fills[:, None], np.int32(LEFT_OUT), got.targets)) if fills.any() else got

    def place(self, step: int, row: int) -> tuple[str, Dataset, int]:
        """The source of a row of ``batch(step)`` ("" if there is one), its data, and where the row starts in it."""
        if self.mixture is None:
            return "", self, int(self._starts(step, np.array([row]))[0][0])
        name, number = self.mixture.place(step * self.batch_size, self.batch_size, row)
        part = self.mixture.parts[name]
        return name, part, int(part._starts_in_order(np.array([number]))[0])

    def in_order(self, numbers: NDArray[np.int64]) -> Batch:
        """The training sequences of these numbers if each comes once, in random order, and then each again."""
        return self.windows(self.train, self._starts_in_order(numbers))

    def _starts_in_order(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        epochs, places = np.divmod(numbers, count := self.sequences_in(self.train))
        for epoch in np.unique(epochs):
            places[epochs == epoch] = permuted(places[epochs == epoch], count, self.seed, int(epoch))
        return places * self.seq_len

    def _starts(self, step: int, rows: NDArray[np.int64]) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        """Where the sequences of some rows start, and which of them only fill the last batch of an epoch."""
        if self.epochs is None:
            draws = np.random.Philox(key=np.array([self.seed, step], np.uint64)).random_raw(self.batch_size)
            stride = self.train.stride
            starts = draws % np.uint64((len(self.train) - self.seq_len - 1) // stride + 1) * np.uint64(stride)
            return starts[rows], np.zeros(len(rows), np.bool_)
        epoch, batch = divmod(step, self.steps_per_epoch)
        places, last = batch * self.batch_size + rows, self.sequences_in(self.train) - 1
        return permuted(places.clip(max=last), last + 1, self.seed, epoch) * self.seq_len, places > last

    def question(self, most: int) -> list[int]:
        """The tokens of a chat before its first answer, at most ``most``; none if there is no such chat.

        It is one of the first chats to validate on, or else to train on.
        """
        for row in (each for part in self.parts if part.what == "chat" for each in (part.val, part.train)):
            if not (row.masked and row.size):
                continue
            whole, bounds = Tokens(row.shards, row.documents), [*row.begins[: QUESTIONS + 1].tolist(), row.size]
            for start, stop in pairwise(bounds[: QUESTIONS + 1]):
                tokens, mask = whole.window(start, min(stop - start, most + 1))
                if (counted := np.flatnonzero(mask)).size and counted[0]:
                    return [*map(int, tokens[: counted[0]])]
        return []

    @property
    def without_beginning(self) -> float:
        """The share of the counted tokens that lack the beginning of their document in their sequence.

        Without packing, it is the share in the first SAMPLED sequences.  Later tokens of a text do not need its
        beginning, so the share of text is 0.
        """
        if isinstance(self.train, PackedTokens):
            counts, lack = self.train.counts
            return lack / max(1, counts) * self.in_parts
        lack, counts, rows = 0, 0, np.arange(min(self.batch_size, SAMPLED))
        for step in range(-(-SAMPLED // len(rows)) if self.in_parts and self.train.documents is not None else 0):
            starts, fills = self._starts(step, rows)
            for start in map(int, starts[~fills]):
                before = min(start, 1)  # one token more shows whether a document begins with the sequence
                window, mask = self.train.window(start - before, before + self.seq_len + 1)
                counted = mask[before + 1 :] > 0
                begun = self.train.document_starts(start - before, window)[before + 1 :]
                lack, counts = lack + int((counted & (begun < before)).sum()), counts + int(counted.sum())
        return lack / max(1, counts)

    def describe_fit(self) -> str:
        """Lines for the log on how documents fit into sequences; "" if sequences cut text, or no document."""
        if self.mixture is not None:
            texts = ((name, part.describe_fit()) for name, part in self.mixture.parts.items())
            return "\n".join(f"{name}: {line}" for name, text in texts for line in text.splitlines())
        packed = {"training": self.train, "validation": self.val}
        if self.packing:
            lines = {use: each.describe(self.what) for use, each in packed.items() if isinstance(each, PackedTokens)}
            return "\n".join(f"{use}: {line}" for use, line in lines.items() if packed[use].size)
        if not (lack := self.without_beginning):
            return ""
        share = f"about {lack:.0%} of the counted tokens lack the beginning of their document"
        if self.epochs is None or not isinstance(self.train.documents, np.ndarray):
            return f"sequences of {self.seq_len:,} tokens cut documents: {share} (--seq-len)"
        begins = self.train.documents
        last = np.maximum(np.append(begins[1:], len(self.train)) - 2, begins)  # whose target is the document's last
        cut = int(np.count_nonzero(begins // self.seq_len != last // self.seq_len))
        what = f"{cut:,} of {plural(len(begins), 'document')}"
        return f"sequences of {self.seq_len:,} tokens cut {what}: {share} (--seq-len)"

    @property
    def steps_per_epoch(self) -> int:
        """The batches with all windows of the training tokens.  The last has those that are left, and else no targets.

        Tokens at the end that fill no window are left out.
        """
        return -(-self.sequences_in(self.train) // self.batch_size)

    def steps_of(self, epochs: int) -> int:
        """The number of steps of ``epochs``.  In a mixture, they are epochs of the first source."""
        if self.mixture is not None:
            return self.mixture.steps_of(epochs, self.batch_size)
        return epochs * self.steps_per_epoch

    def passes(self, steps: int) -> float:
        """How often each sequence is seen in ``steps``, on average.  In a mixture: the maximum over the sources."""
        if self.mixture is None:
            return steps * self.batch_size / self.sequences_in(self.train)
        times = self.mixture.sequences(steps * self.batch_size)
        return max(n / part.sequences_in(part.train) for n, part in zip(times, self.parts, strict=True))

    def tokens_in(self, steps: int) -> int:
        """The tokens of the first ``steps`` batches, without the rows that only fill the last batch of an epoch."""
        rows = steps * self.batch_size
        if self.epochs is not None:
            epochs, rest = divmod(steps, self.steps_per_epoch)
            windows = self.sequences_in(self.train)
            rows = epochs * windows + min(rest * self.batch_size, windows)
        return rows * self.seq_len

    def sequences_in(self, tokens: Tokens) -> int:
        """How many sequences with their targets lie side by side in ``tokens``."""
        return (len(tokens) - 1) // self.seq_len

    def micro_batches(self, step: int, rows_of_each: Sequence[range], dp: Axis) -> tuple[list[Batch], float]:
        """See ``Batches``."""
        own = [self.rows(step, each) for each in rows_of_each]
        count: float = self.tokens_in(step + 1) - self.tokens_in(step)
        if self.masks_targets:
            count = sum_over(dp, sum(map(counted, own))) or math.inf
        return own, count * len(rows_of_each[0]) / self.batch_size

    def val_starts(self) -> NDArray[np.int64]:
        """The starts of the windows of each validation batch in ``val``, (batches, sequences); the same on all ranks.

        The windows are evenly spread over the validation tokens and do not overlap.  Every batch has ``eval_shape``, or
        as many sequences as there are windows.
        """
        windows = max(1, self.sequences_in(self.val))  # of which none may be needed
        rows = min(eval_shape(self)[0], windows)
        batches = min(self.eval_batches, windows // rows)
        count = rows * batches
        return (np.arange(count) * windows // count * self.seq_len).reshape(batches, rows)

    def describe(self) -> str:
        """One phrase for the log."""
        if not (self.train.size or self.val.size):
            return f"{self.name} ({self.tokenizer.name})"
        return f"{self.train.size:,} + {self.val.size:,} tokens of {self.name} ({self.tokenizer.name})"

    def _error(self, tokens: Tokens, expected: str, got: object) -> DataError:
        held_out = f" ({self.held_out.partition(';')[0]}); --eval-batches 0 turns validation off" * (tokens is self.val)
        if tokens is self.val and "hold_out" in self.ignored:
            held_out += "; kos tokenize chose what is held out: its --hold-out counts, not that of the run"
        error = DataError(f"{self.sources[tokens is self.val]}: expected {expected}, got {got}{held_out}")
        return error.about(*["val_data"] * (tokens is self.val), "data")

    def windows(self, tokens: Tokens, starts: Iterable[int]) -> Batch:
        """The sequences that start at ``starts``."""
        starts = [*map(int, starts)]
        windows, masks = map(np.stack, zip(*(tokens.window(start, self.seq_len + 1) for start in starts), strict=True))
        targets, documents = np.where(masks[:, 1:], windows[:, 1:], np.int32(LEFT_OUT)), None
        if self.packs:
            each = zip(starts, windows[:, :-1], strict=True)
            documents = np.stack([tokens.document_starts(start, window) for start, window in each])
        batch = Batch(windows[:, :-1], targets, document_starts=documents)
        return batch.map(lambda field: np.ascontiguousarray(field, np.int32))


def counted(batch: Batch) -> int:
    """How many targets the loss counts."""
    return int(np.count_nonzero(batch.targets != LEFT_OUT))


def sum_over(axis: Axis, count: int) -> int:
    """The sum of a number of the host over the ranks of an axis. Collective."""
    return count if axis.size == 1 else sum(map(int, axis.comm.all_gather_bytes(b"%d" % count)))


def eval_shape(settings: TrainConfig | Dataset) -> tuple[int, int]:
    """The sequences of a validation batch, if there are enough, and tokens of each: at most ``EVAL_BATCH_TOKENS``."""
    return max(1, min(settings.batch_size, EVAL_BATCH_TOKENS // settings.seq_len)), settings.seq_len


def load_data(
    config: TrainConfig, show: Show = lambda what, share: None, weights: str | None = None, runs: Sequence[Path] = (),
    reads_val: bool = True,
) -> Dataset:  # fmt: skip
    """Read the data that ``config.data`` names, and encode text; or use the tokens of an earlier run.

    For text, ``--tokenizer auto`` is the tokenizer in the folder ``weights``, by default ``config.init_from``.  Whole
    documents are packed as in the first of the folders ``runs`` that has a plan for them.  Without ``reads_val``, there
    is no validation data.

    DataError: data or tokenizer unreadable, empty, binary, or shorter than a sequence; a token beyond the vocabulary;
    no target that counts; a prompt that the tokenizer cannot encode.  ConfigError: data or tokenizer missing; a
    tokenizer that does not fit the data.
    """
    config.check_sources([*weighted(config.data), *filter(None, [config.val_data]), *config.eval_sources.values()])
    if not isinstance(config.data, str):
        sources, parts = weighted(config.data), list[Dataset]()
        for number, name in enumerate(sources, 1):
            folders = [run / f"source-{number}" for run in runs]
            own_val = config.val_data is None or number == 1  # --val-data is that of all sources
            changes = {"data": name, "eval_batches": config.eval_batches if own_val else 0, "eval_data": ()}
            changes |= {"epochs": None, "keep_best": None, "patience": 0}  # the mixture counts them
            changes |= config.of_sources(name, config.val_data)
            parts.append(load_data(config.model_copy(update=changes), show, weights, folders, own_val))
        data = mix(sources, parts)
    else:
        weights = weights or config.init_from
        how: dict[str, Any] = {"lines": lines_of(config, weights), "hold_out": config.held_out}
        corpus = read_corpus(config.data, show, val_data=config.val_data, **how)
        if not reads_val:
            whole = corpus
            corpus = replace(whole, read=lambda: whole.splits._replace(val=[]), flags=[whole.flags[0]] * 2)
        data = _load(corpus, config, show, weights, runs)
    own, others = data.tokenizer, config.eval_sources.items()
    each = {name: load_held_out(config, "--eval-data", path, own, show, weights) for name, path in others}
    data = replace(data, others=each) if each else data
    config.check_losses(data.losses)
    return data


def load_held_out(
    config: TrainConfig, flag: str, path: str, tokenizer: Tokenizer, show: Show, weights: str | None
) -> Dataset:
    """Read the data that ``flag`` names by ``path``, all of it to validate on.  Raises as ``load_data``."""
    weights = weights or config.init_from
    with errors_with(flag, path):
        corpus = read_corpus((), show, val_data=path, val_flag=flag, lines=lines_of(config, weights))
        return _load(corpus, config.model_copy(update={"val_data": path}), show, weights, (), tokenizer)


def _load(
    corpus: Corpus, config: TrainConfig, show: Show, weights: str | None, runs: Sequence[Path],
    given: Tokenizer | None = None,
) -> Dataset:  # fmt: skip
    """The data of one source, encoded by the tokenizer that is ``given``, or else by that of the settings."""
    train, val, tokenizer, about = load_tokens(corpus, config, weights, show, given)
    between, several = about["between"], about["several"]
    if tokenizer.rules:
        between += f"; encoded by the rules of {tokenizer.rules}, as transformers does, not by those of tokenizer.json"
    if several:
        stays = config.documents == "pack"
        between += f"; attention {'stays within a document' if stays else 'crosses documents'} (--documents)"
    if written := about.get("template_date"):
        between += f"; the chat template writes the date {written} (--template-date)"
    if about["masked"] and given is None:
        if not about["counted"]:
            expected = "expected completions or answers to train on"
            raise DataError(f"--data {config.data}: {expected}, got none").about("data")
        if (config.fit or about.get("fit")) != "whole":  # else a line on the sequences says what they count
            counts = f"{about['counted']:,} of {len(train):,} tokens"
            between += f"; the loss counts {counts} (--loss-on {config.loss_on})"
    tokenizer.encode(config.prompt)
    packing = None
    if (config.fit or about.get("fit", "cut")) == "whole":
        skips = config.long_documents == "skip"
        train, val, packing = pack(train, val, about["sha256"], config.seq_len, config.seed, skips, runs)
    return Dataset(
        name=corpus.name, train=train, val=val, tokenizer=tokenizer, seed=config.seed,
        batch_size=config.batch_size, seq_len=config.seq_len, epochs=config.epochs,
        eval_batches=config.eval_batches if val.size or config.held_out else 0,
        fingerprint=about["sha256"], held_out=f"held out for validation: {about['held_out']}{between}",
        trained_on=f"trained on: {about['trained_on']}", note=_note(about.get("spelled_out", {})),
        sources=(" ".join(corpus.flags[0]), " ".join(corpus.flags[1])),
        packs=(several or packing is not None) and config.documents == "pack", in_parts=about["masked"],
        packing=packing, ignored=_ignored(corpus, config, about), what=about.get("what", "document"),
        trains=given is None, in_loss=about.get("counted", 0),
    )  # fmt: skip


def _ignored(corpus: Corpus, config: TrainConfig, about: Mapping[str, Any]) -> dict[str, str]:
    """``Dataset.ignored`` of a corpus."""
    if corpus.vocab_size is None and not corpus.tokenized:
        found = {"token_dtype": f"{corpus.name} is text"}
        if unused := about.get("unused"):
            found["text_field"] = f"no record of {corpus.name} has the field {' or '.join(unused)}"
        return found
    names = ("text_field", "fields", "template_date", "split_turns", "split_special_tokens", "allow_lost_content")
    of_text = [name for name in names if getattr(config, name) != ()]  # those of other sources alone
    written = ("token_dtype", "hold_out") if corpus.tokenized else ()
    found = dict.fromkeys(of_text, f"{corpus.name} has tokens")
    return found | dict.fromkeys(written, f"{corpus.name} is a folder of kos tokenize")


def _note(spelled_out: dict[str, int]) -> str:
    if not spelled_out:
        return ""
    most = [f"{token} {count:,}" for token, count in Counter(spelled_out).most_common(3)]
    found = f"special tokens spelled out in the text and read as text: {sum(spelled_out.values()):,} ({', '.join(most)}"
    return f"{found}{', …' * (len(spelled_out) > 3)}); --no-split-special-tokens reads them as special tokens"
