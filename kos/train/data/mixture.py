"""Data mixtures (``--data PATH:WEIGHT``, repeated): which source each sequence of a step comes from.

The interval [0, 1) is divided among the sources, in proportion to their shares of the sequences. The n-th sequence of a
run comes from the source whose part contains the n-th term of the van der Corput sequence in base 2. These terms are
spread evenly: after n sequences, each source is within about log2(n) sequences of its share. The counts depend on n
alone (Niederreiter, "Random Number Generation and Quasi-Monte Carlo Methods", 1992, chapter 3).

Within a step, the sequences of one source are next to each other. The sequences of a source come in the order of
``--epochs``: each one once, in random order, then each one again in another order.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from kos.errors import DataError, plural
from kos.train.data import Tokens
from kos.train.ops import Batch


class Source(Protocol):
    """What ``Mixture`` needs of the dataset of a source."""

    @property
    def seq_len(self) -> int: ...
    @property
    def train(self) -> Tokens: ...
    @property
    def share_in_loss(self) -> float: ...
    def sequences_in(self, tokens: Tokens) -> int: ...
    def in_order(self, numbers: NDArray[np.int64]) -> Batch: ...


D = TypeVar("D", bound=Source)


def terms_below(count: int, limit: float) -> int:
    """How many of the first ``count`` terms of the van der Corput sequence are below ``limit``.

    Terms are numbered from 0. Term 2k is half of term k, and term 2k + 1 is larger than term 2k by one half.
    """
    total = 0
    while count and 0 < limit < 1:
        even = (count + 1) // 2
        if limit <= 0.5:
            count, limit = even, 2 * limit
        else:
            total, count, limit = total + even, count // 2, 2 * limit - 1
    return total + (count if limit >= 1 else 0)


def describe_passes(count: int, draws: float) -> str:
    """How often each of ``count`` sequences is seen, if ``draws`` sequences are drawn."""
    passes = draws / count
    return f"each of {plural(count, 'sequence')} {passes:{'.2g' if passes < 10 else ',.0f'}} times"


class Mixture(Generic[D]):
    """The order in which the sequences of several sources come.  ``parts`` maps the name of a source to its dataset.

    ``weights`` are shares of the tokens, without padding.  A source with much padding has fewer tokens per sequence, so
    it gets more sequences.
    """

    def __init__(self, sources: Mapping[str, float], parts: Sequence[D]) -> None:
        self.parts = dict(zip(sources, parts, strict=True))
        self.weights = np.array([*sources.values()]) / sum(sources.values())
        self.lengths = [part.seq_len * part.train.fill for part in parts]  # mean number of tokens per sequence
        shares = np.cumsum(self.weights / self.lengths)
        self._limits = (shares / shares[-1]).tolist()

    def sequences(self, count: int) -> NDArray[np.int64]:
        """How many of the first ``count`` sequences come from each source."""
        return np.diff([terms_below(count, limit) for limit in self._limits], prepend=0)

    def steps_of(self, epochs: int, batch_size: int) -> int:
        """The steps in which each sequence of the first source is used ``epochs`` times."""
        first = next(iter(self.parts.values()))
        count = epochs * first.sequences_in(first.train)
        most = 2 * math.ceil(count / self._limits[0])
        draws = bisect_left(range(most), count, key=lambda n: terms_below(n, self._limits[0]))
        return -(-draws // batch_size)

    def tokens(self, count: int) -> dict[str, int]:
        """Estimated tokens of each source in the first ``count`` sequences, from the mean length of its sequences."""
        return dict(zip(self.parts, map(round, self.sequences(count) * self.lengths), strict=True))

    def describe(self, steps: int, batch_size: int) -> str:
        """One line per source for the log: its tokens, and how often it is seen, in the first ``steps`` batches.

        If the loss does not count all tokens, the lines also have the share of each source in those that it counts.
        """
        tokens, times = self.tokens(steps * batch_size), self.sequences(steps * batch_size)
        in_loss = self.weights * [part.share_in_loss for part in self.parts.values()]
        masked, shares = any(part.train.masked for part in self.parts.values()), in_loss / (in_loss.sum() or 1)
        counts = [f", {share:.1%} of what the loss counts" * masked for share in shares]
        return "\n".join(
            f"{name}: {self.weights[n]:.1%} of the tokens{counts[n]}, {tokens[name]:,} in {plural(steps, 'step')}; "
            f"{describe_passes(part.sequences_in(part.train), times[n])}"
            for n, (name, part) in enumerate(self.parts.items())
        )

    def place(self, first: int, size: int, row: int) -> tuple[str, int]:
        """The source of a row of a batch of ``size`` sequences, and the number of the sequence in this source.

        Sequence ``first`` of the run is the first one of the batch.
        """
        sources, places = self._places(first, size, np.array([row]))
        return [*self.parts][int(sources[0])], int(places[0])

    def _places(self, first: int, size: int, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        before = self.sequences(first)
        ends = np.cumsum(self.sequences(first + size) - before)
        sources = np.searchsorted(ends, rows, side="right")
        return sources, before[sources] + rows - np.append(0, ends)[sources]

    def rows(self, first: int, size: int, rows: Sequence[int]) -> Batch:
        """These ``rows`` of a batch of ``size`` sequences, the first of which is sequence ``first`` of the run."""
        (sources, places), parts = self._places(first, size, np.asarray(rows)), [*self.parts.values()]
        each = [parts[source].in_order(places[sources == source]) for source in np.unique(sources)]
        order = np.argsort(np.argsort(sources, kind="stable"))
        return Batch(*(None if of[0] is None else np.concatenate(of)[order] for of in zip(*each, strict=True)))


def mix(sources: Mapping[str, float], parts: Sequence[Any]) -> Any:
    """One ``Dataset`` (``kos.train.data.batches``) that mixes several.  ``parts`` are the datasets of ``sources``.

    Raises DataError if their tokenizers differ.
    """
    first, names = parts[0], [*sources]
    for part, name in zip(parts, names, strict=True):
        # Bare numbers are like any tokenizer, but their text may be of another.
        if part.tokenizer.kind != first.tokenizer.kind or not part.tokenizer.is_like(first.tokenizer):
            said = f"expected the tokenizer of {names[0]}, {first.tokenizer.name}, got {part.tokenizer.name}"
            raise DataError(f"--data {name}: {said}; --tokenizer names that of all").about("data", "tokenizer")
    packs = any(part.packs for part in parts)
    mixture = Mixture(sources, [dataclasses.replace(part, packs=packs) for part in parts])
    about = json.dumps([*zip(mixture.weights, (part.fingerprint for part in parts), strict=True)])
    validated = parts if first.sources[0] == first.sources[1] else parts[:1]
    train, val = (
        Tokens([shard for tokens in of for shard in tokens.shards])
        for of in ([part.train for part in parts], [part.val for part in validated])
    )

    def lines(key: str) -> str:
        return "; ".join(f"{name}: {text}" for name, part in mixture.parts.items() if (text := getattr(part, key)))

    return dataclasses.replace(
        first, name=" + ".join(f"{part.name}:{sources[name]:g}" for name, part in mixture.parts.items()),
        train=train, val=val, eval_batches=max(part.eval_batches for part in validated), packs=packs,
        packing=None, mixture=mixture, trained_on=lines("trained_on"),
        held_out=lines("held_out"), note=lines("note"), fingerprint=hashlib.sha256(about.encode()).hexdigest(),
    )  # fmt: skip


ROUNDS = 8


def permuted(indices: NDArray[np.int64], size: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Where the permutation of range(``size``) that belongs to ``seed`` and ``epoch`` sends ``indices``."""
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)
    keys = np.random.Philox(key=np.array([seed, epoch], np.uint64)).random_raw(ROUNDS)
    x = np.array(indices, np.uint64)
    beyond = np.ones(len(x), np.bool_)
    while beyond.any():
        left, right = x[beyond] >> half, x[beyond] & mask
        for key in keys:
            left, right = right, left ^ (_mixed(right + key) & mask)
        x[beyond] = left << half | right
        beyond = x >= size
    return x.astype(np.int64)


def _mixed(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), modulo 2**64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
