"""Sequence packing (``--fit whole``): best-fit bin packing of whole documents into sequences.

A plan says which documents each sequence holds. It is a function of the lengths of the documents and of the seed, so
every rank of a new run computes the same plan. It is stored in the folder of the run, and a resumed run reads it. A
document that is longer than a sequence is split into pieces of the length of a sequence, or left out. The last piece,
which may be shorter, is packed like any other document (Ding et al. 2024, "Fewer truncations improve language
modeling", arXiv:2404.10830). Documents and pieces of which the loss counts no token are left out.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import zipfile
from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kos.errors import plural
from kos.files import replace_file
from kos.train.data import Tokens
from kos.train.data.mixture import permuted

_log = logging.getLogger(__name__)

FILE = "packing.npy"
"""The name of the file, in the folder of a run, that holds the plans of its training and validation data."""

CHUNK = 1 << 16
"""How many documents are packed together: enough for full sequences, and few enough to need little memory."""

ORDER = 2**64 - 1
"""The number of an epoch that no run reaches.  Its permutation is the order in which documents are packed."""


class PackedTokens(Tokens):
    """Sequences of ``seq_len`` tokens.  Each holds whole documents of ``tokens`` side by side, and then padding.

    The sequences follow one another, so each starts at a multiple of ``seq_len``. ``plan`` lists where each piece of a
    document begins in ``tokens``, in the order of the sequences. The first piece of a sequence is stored as ~begin, the
    bitwise complement. With ``skips``, the plan leaves out the documents that are longer than a sequence.
    """

    def __init__(self, tokens: Tokens, seq_len: int, plan: NDArray[np.int64], skips: bool) -> None:
        super().__init__(tokens.shards, tokens.documents)
        self.seq_len, self.stride, self.plan, self.skips = seq_len, seq_len, plan, skips
        self._first = np.append(np.flatnonzero(plan < 0), len(plan))  # where each sequence starts in the plan
        self._bounds = np.append(tokens.begins, self.size)
        begins = np.where(plan < 0, ~plan, plan)
        self._documents = np.searchsorted(self._bounds, begins, side="right")  # that of each piece, counted from 1
        left = self._bounds[self._documents] - begins
        self._lengths = np.where(left > seq_len + 1, seq_len, left)  # with a document's last target
        self.fill = int(self._lengths.sum()) / max(1, (len(self._first) - 1) * seq_len)

    def __len__(self) -> int:
        """The number of tokens of all sequences, plus one for the last target; 0 if there are no sequences."""
        return (len(self._first) - 1) * self.seq_len + 1 if len(self.plan) else 0

    masked = True

    def _pieces(self, start: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Where in the tokens the pieces of the sequence at ``start`` begin, and where their documents end."""
        number = start // self.seq_len
        begins = self.plan[self._first[number] : self._first[number + 1]]
        begins = np.where(begins < 0, ~begins, begins)
        return begins, self._bounds[np.searchsorted(self._bounds, begins, side="right")]

    def window(self, start: int, length: int) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
        """The tokens of the sequence at ``start``. The first token of a document is not a target, nor is padding."""
        window, mask, at = np.zeros(length, np.int64), np.zeros(length, np.uint8), 0
        for begin, end in zip(*self._pieces(start), strict=True):
            inside = slice(at, at + min(end - begin, length - at))
            window[inside], mask[inside] = super().window(begin, inside.stop - at)
            mask[at] = 0
            at = inside.stop
        return window, mask

    def padding(self, start: int, length: int) -> int:
        begins, ends = self._pieces(start)
        return max(0, length - int((ends - begins).sum()))

    def document_starts(self, start: int, window: NDArray[Any]) -> NDArray[np.int32]:
        """See ``Tokens``.  Padding counts as a document of its own."""
        begins, ends = self._pieces(start)
        lengths = np.minimum(ends - begins, len(window))
        starts = np.cumsum([0, *lengths])
        return np.repeat(starts, [*lengths, len(window) - starts[-1]]).astype(np.int32)

    @cached_property
    def counts(self) -> tuple[int, int]:
        """The number of counted tokens, and how many of them are in a piece without the beginning of their document."""
        begins = np.where(self.plan < 0, ~self.plan, self.plan)
        stops = np.minimum(begins + self.seq_len + 1, self._bounds[self._documents])
        each = counted(self, begins + 1, stops)
        return int(each.sum()), int(each[begins > self._bounds[self._documents - 1]].sum())

    def describe(self, what: str) -> str:
        """A summary of the sequences for the log.  ``what`` is the word for a document, such as "chat"."""
        lengths, sequences, packed = np.diff(self._bounds), len(self._first) - 1, len(np.unique(self._documents))
        longer = lengths > self.seq_len
        kept, (counts, lack) = ~longer | (not self.skips), self.counts
        text = (
            f"{plural(packed, what)} of {int(self._lengths.sum()):,} tokens, of which the loss counts "
            f"{counts:,}, in {plural(sequences, 'sequence')} of {self.seq_len:,}, {min(1.0, self.fill):.1%} full"
        )
        pieces = np.where(longer, -(-(lengths - 1) // self.seq_len), 1)
        if longer.any() and self.skips:
            left_out = f"left out, with {int(lengths[longer].sum()):,} tokens"
            text += f"; {plural(int(longer.sum()), what)} longer than --seq-len {left_out} (--long-documents)"
        elif longer.any():
            share = f"{lack / max(1, counts):.0%} of the counted tokens lack the beginning of their {what}"
            cut = f"cut into {int(pieces[longer].sum()):,} pieces: {share}"
            text += f"; {plural(int(longer.sum()), what)} longer than --seq-len {cut} (--long-documents)"
        if without := int(pieces[kept].sum()) - len(self.plan):
            whole = int(kept.sum()) - packed
            each = [plural(whole, what)] * bool(whole) + [plural(without - whole, "piece")] * (without > whole)
            text += f"; left out, because the loss counts none of their tokens: {' and '.join(each)}"
        return text if longer.any() else f"{text} (--fit whole)"


def counted(tokens: Tokens, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> NDArray[np.int64]:
    """How many tokens the loss counts in each of the ranges from ``starts`` to ``stops``."""
    places, inverse = np.unique(np.concatenate([starts, np.maximum(starts, stops)]), return_inverse=True)
    before, at, total = places.copy(), 0, 0  # ``before``: the number of counted tokens before each place
    for shard in tokens.shards:
        for _, mask in shard.pieces() if shard.mask is not None else ():
            inside = slice(*np.searchsorted(places, [at, at + len(mask)], "right"))
            ends = np.cumsum(mask == 0)
            before[inside] -= total + ends[places[inside] - at - 1]
            total, at = total + int(ends[-1]), at + len(mask)
        if shard.mask is None:  # all tokens count
            before[slice(*np.searchsorted(places, [at, at + len(shard)], "right"))] -= total
            at += len(shard)
    first, last = np.split(before[inverse], 2)
    return last - first


def make_plan(tokens: Tokens, seq_len: int, seed: int, skips: bool) -> NDArray[np.int64]:
    """The ``plan`` of ``PackedTokens``.

    Documents are put into random order and packed in groups of ``CHUNK``. Within a group, best fit takes the longest
    document first. The plan depends on the arguments alone, and is computed in integers, so it is the same on every
    machine.
    """
    begins, plans = tokens.begins, [np.zeros(0, np.int64)]
    ends = np.append(begins[1:], tokens.size)[: len(begins)]
    lengths = ends - begins
    filled = lengths // seq_len  # how many sequences each document fills by itself
    before, rest = np.cumsum(filled) - filled, begins + filled * seq_len
    full = np.repeat(begins, filled) + seq_len * (np.arange(filled.sum()) - np.repeat(before, filled))
    full_has_target = counted(tokens, full + 1, np.minimum(full + seq_len + 1, np.repeat(ends, filled))) > 0
    rest_has_target = counted(tokens, rest + 1, ends) > 0  # a rest of 1 token is only a target
    for at in range(0, len(begins), CHUNK):
        of_chunk = permuted(np.arange(at, min(at + CHUNK, len(begins))), len(begins), seed, ORDER)
        if skips:
            of_chunk = of_chunk[lengths[of_chunk] <= seq_len]
        each = filled[of_chunk]
        numbers = np.arange(each.sum()) + np.repeat(before[of_chunk] - (np.cumsum(each) - each), each)
        plans.append(~full[numbers[full_has_target[numbers]]])
        of_chunk = of_chunk[rest_has_target[of_chunk]]
        rests = ends[of_chunk] - rest[of_chunk]
        order = np.argsort(-rests, kind="stable")
        sequences = best_fit(rests[order].tolist(), seq_len)
        packed = rest[of_chunk[order[[*chain.from_iterable(sequences)]]]]
        packed[np.cumsum([0, *map(len, sequences)])[:-1]] ^= -1
        plans.append(packed)
    return np.concatenate(plans)


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """The indices of the ``lengths`` in each sequence.  Each length goes where it leaves the fewest tokens free."""
    sequences, with_free, free = list[list[int]](), defaultdict[int, list[int]](list), 0  # bit n: a sequence has n free
    for number, length in enumerate(lengths):
        room, fitting = capacity, free >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            sequence = with_free[room].pop()
            if not with_free[room]:
                free ^= 1 << room
            sequences[sequence].append(number)
        else:
            sequence = len(sequences)
            sequences.append([number])
        if room > length:
            with_free[room - length].append(sequence)
            free |= 1 << (room - length)
    return sequences


class Packing:
    """The plans of a run's training and validation data.  ``key`` identifies the data and settings behind them."""

    def __init__(self, key: Sequence[Any], plans: Sequence[NDArray[np.int64]]) -> None:
        self.key, self.plans = json.dumps(key), plans

    def array(self) -> NDArray[np.int64]:
        """The content of the file: a SHA-256 of the key and of what follows, the size of the first plan, both plans."""
        rest = np.concatenate([[len(self.plans[0])], *self.plans]).astype("<i8")
        digest = hashlib.sha256(self.key.encode() + rest.tobytes()).digest()
        return np.concatenate([np.frombuffer(digest, "<i8"), rest])

    @property
    def digest(self) -> str:
        return bytes(self.array()[:4]).hex()

    @property
    def order(self) -> str:
        """The SHA-256 of the plan of the training data."""
        return hashlib.sha256(self.plans[0].astype("<i8").tobytes()).hexdigest()

    def write(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        np.save(file := io.BytesIO(), self.array(), allow_pickle=False)
        replace_file(folder / FILE, file.getvalue())

    @classmethod
    def read(cls, folder: Path, key: Sequence[Any]) -> Packing | None:
        """The packing stored in ``folder``, or None if there is none.

        It also returns None, and logs a warning, if the file is damaged or belongs to other data or settings.
        """
        path = folder / FILE
        try:
            found = np.load(path, allow_pickle=False)
            packing = cls(key, np.split(found[5:], [int(found[4])]))
            if np.array_equal(packing.array(), found):
                return packing
            got = "that of other data or settings, or a damaged file"
        except FileNotFoundError:
            return None
        except (OSError, ValueError, IndexError, TypeError, EOFError, OverflowError, zipfile.BadZipFile) as error:
            got = str(error)
        _log.warning("%s: expected the packing plan of this run, got %s; it is made again", path, got)
        return None


def pack(
    train: Tokens, val: Tokens, fingerprint: str, seq_len: int, seed: int, skips: bool, folders: Sequence[Path]
) -> tuple[Tokens, Tokens, Packing]:
    """Pack the training and the validation data.

    The plan is read from the first of ``folders`` that has it.  If none has it, a new plan is made.
    """
    both = (train, val)
    key = [fingerprint, seq_len, seed, skips, *(hashlib.sha256(each.begins.data).hexdigest() for each in both)]
    found = next((each for folder in folders if (each := Packing.read(folder, key))), None)
    packing = found or Packing(key, [make_plan(each, seq_len, seed, skips) for each in both])
    train, val = (PackedTokens(each, seq_len, plan, skips) for each, plan in zip(both, packing.plans, strict=True))
    return train, val, packing
