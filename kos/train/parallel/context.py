"""Context parallelism: the tokens of a sequence split over ranks; only attention needs the tokens of other ranks.

A sequence is split into 2 cp chunks of c tokens; rank r holds chunks r and 2 cp - 1 - r, one after the other (zigzag:
Llama 3, arXiv:2407.21783; the balance: Brandon et al. 2023, arXiv:2311.09431). A rank's attention is then

- to its own keys: causal, as of one sequence of 2c tokens;
- to those of a rank before it: of all queries to the first chunk;
- to those of a rank after it: of the second chunk's queries to all.

Only the first is causal, and the others cost the same on every rank. Documents and windows restrict each of them by a
mask of its own, made of the positions of queries and keys. Their results are merged by the logarithms of
their sums of exponentials, exactly. Keys and values go round a ring (Liu et al. 2023, arXiv:2310.01889), from neighbour
to neighbour, while a rank works with those that it has. In the backward their gradients follow and end at their owner.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from kos.memory.arena import Arena
from kos.train.ops import Array, Attend, Batch, Mask, attended_pairs
from kos.train.ops.protocol import Ops
from kos.train.parallel.fixed_order import Split, equal_parts, scatter_sum, sum_tree
from kos.train.parallel.mesh import ALONE, Axis

Parts = Iterator[tuple[int, Array, Array | None]]

Masks = Sequence[Sequence[Mask]] | None
"""Of each piece of a rank, the mask for the keys of each piece of the sequence. None: plain causal attention."""


def seen(owner: int, rank: int, length: int) -> tuple[slice, slice]:
    """The queries of ``rank`` and the keys of another, ``owner``, that they attend to; both have ``length`` tokens."""
    half, every = length // 2, slice(0, length)
    return (every, slice(0, half)) if owner < rank else (slice(half, length), every)


class ContextParallel:
    """Attention of the tokens that this rank of ``axis`` holds. With one rank: the plain operations.

    A piece of a sequence is its chunks p and last - p. ``mine`` are this rank's ``pieces``: one, but for a fixed order.
    """

    def __init__(self, ops: Ops, axis: Axis = ALONE, pieces: int = 1) -> None:
        self.ops, self.axis, self.size, self.pieces = ops, axis, axis.size, pieces
        self.chunks = 2 * pieces * axis.size
        self.mine = range(pieces * axis.rank, pieces * (axis.rank + 1))
        self._places: dict[tuple[int, int], Array] = {}

    def positions(self, tokens: int) -> Sequence[int]:
        """The positions of this rank's ``tokens`` in the whole sequence, piece by piece."""
        if self.chunks == 2:
            return range(tokens)
        return [at for piece in self.mine for at in self._positions_of(piece, tokens // self.pieces)]

    def _positions_of(self, piece: int, length: int) -> Sequence[int]:
        """Those of a piece of ``length`` tokens."""
        c = length // 2
        return [at for chunk in (piece, self.chunks - 1 - piece) for at in range(chunk * c, (chunk + 1) * c)]

    def places(self, piece: int, length: int) -> Array:
        """The same as an array of ``ops``, which stays: a captured pass keeps reading it."""
        if (piece, length) not in self._places:
            self._places[piece, length] = array = self.ops.zeros((length,), np.dtype(np.int32))
            self.ops.copy(np.array(self._positions_of(piece, length), np.int32), array)
        return self._places[piece, length]

    def masks(
        self, document_starts: Array | None, window: int | None, samples: int, length: int, arena: Arena
    ) -> Masks:
        """The masks, in ``arena``, of this rank's ``samples`` of ``length`` tokens, a piece's samples after another's.

        ``document_starts`` (samples length,) are a batch's; ``window`` is in tokens. None: there is no such limit.
        """
        if document_starts is None and (window is None or window >= length * self.chunks // 2):
            return None
        return self._masks(document_starts, window, samples // self.pieces, length, arena)

    def _masks(self, starts: Array | None, window: int | None, samples: int, length: int, arena: Arena) -> Masks:
        by_piece = [None] * self.pieces if starts is None else starts.reshape(self.pieces, samples, length)

        def mask(index: int, keys: int) -> Mask:
            first_key, last_query = arena.take((2, samples, length), np.dtype(np.int32))
            made = Mask(first_key, last_query, self._pairs(self.mine[index], keys, length, window))
            places = [self.places(piece, length) for piece in (self.mine[index], keys)] if self.chunks > 2 else []
            self.ops.attention_mask(by_piece[index], window, made, *places)
            return made

        return [[mask(index, keys) for keys in range(self.chunks // 2)] for index in range(self.pieces)]

    def _pairs(self, queries: int, keys: int, length: int, window: int | None) -> float:
        """The attended pairs of a sample between the pieces ``queries`` and ``keys``, of ``length`` tokens each."""
        chunks = ((piece, self.chunks - 1 - piece) for piece in (queries, keys))
        return sum(attended_pairs(length / 2, window, (q - k) * length / 2) for q, k in itertools.product(*chunks))

    def positions_of_rows(self, seq_len: int, samples: int) -> Sequence[int]:
        """The positions of tokens that lie piece by piece, each of ``samples`` samples of ``seq_len`` tokens."""
        positions = [*self.positions(seq_len * self.pieces)]
        starts = range(0, len(positions), seq_len)
        return [at for start in starts for at in positions[start : start + seq_len] * samples]

    def take(self, batch: Batch) -> Batch:
        """This rank's columns of a batch (B, T), on the host: each piece as a sample, (pieces B, 2 chunk).

        DataError if its documents begin where they cannot: what attention is given is looked at here only.
        """
        batch.check()
        return batch if self.chunks == 2 else batch.map(self._columns)

    def _columns(self, field: np.ndarray) -> np.ndarray:
        samples, length = field.shape
        mine = field[:, self.positions(length // self.size)].reshape(samples, self.pieces, -1)
        return np.ascontiguousarray(mine.swapaxes(0, 1)).reshape(samples * self.pieces, -1)

    def mean_loss(self, losses: Array, count: Array, out: Array, arena: Arena) -> None:
        """out (1,), float64, = the sum of this rank's ``losses`` / ``count``."""
        self.ops.mean_loss(losses, count, out)

    def attention(self, attend: Attend, arena: Arena, masks: Masks = None) -> None:
        """As ``Ops.attention``, over the keys and values of all ranks."""
        ops, own, merged, of_keys = self.ops, self.axis.rank, attend, masks[0] if masks else [None] * self.size
        if self.size == 1:
            ops.attention(replace(attend, mask=of_keys[0]), arena)
            return
        with arena.scope():
            for owner, kv, _ in self._ring(ops.keys_and_values(attend, arena), None, arena):
                if owner == own:
                    ops.attention(replace(attend, mask=of_keys[own]), arena)
                    merged = replace(attend, out=self._widen(attend.out, arena))
                else:
                    ops.attention(merged.to(kv, *seen(owner, own, attend.length), of_keys[owner]), arena)
            if merged.out is not attend.out:
                ops.copy(merged.out, attend.out)

    def attention_backward(
        self, attend: Attend, d_out: Array, d_qkv: Array, arena: Arena, masks: Masks = None
    ) -> None:
        """As ``Ops.attention_backward``."""
        ops, own, total, of_keys = self.ops, self.axis.rank, d_qkv, masks[0] if masks else [None] * self.size
        if self.size == 1:
            ops.attention_backward(replace(attend, mask=of_keys[0]), d_out, d_qkv, arena)
            return
        with arena.scope():
            mine = ops.keys_and_values(attend, arena)
            d_mine = arena.take(mine.shape, ops.statistics_dtype(mine.dtype))
            for owner, kv, d_kv in self._ring(mine, d_mine, arena):
                if owner == own:
                    ops.attention_backward(replace(attend, mask=of_keys[own]), d_out, d_qkv, arena)
                    total = self._widen(d_qkv, arena)
                else:
                    to_others = attend.to(kv, *seen(owner, own, attend.length), of_keys[owner])
                    ops.attention_backward(to_others, d_out, total, arena, d_kv)
            ops.add_keys_and_values(d_mine, total)
            if total is not d_qkv:
                ops.copy(total, d_qkv)

    def _widen(self, x: Array, arena: Arena) -> Array:
        """``x`` in the statistics' dtype, to add to."""
        wide = self.ops.statistics_dtype(x.dtype)
        if x.dtype == wide:
            return x
        rows, columns = x.shape
        copy = self.ops.empty_columns(arena, rows, columns, wide)
        self.ops.copy(x, copy)
        return copy

    def _ring(self, kv: Array, d_mine: Array | None, arena: Arena) -> Parts:
        """Of each rank, this one first: the rank, its keys and values, and, with ``d_mine``, where their gradient goes.

        It is to be written before the next ones are asked for. At the end ``d_mine`` has that of this rank's keys and
        values, the sum of what the other ranks wrote.
        """
        comm, rank, size = self.axis.comm, self.axis.rank, self.size
        after, before = (rank + 1) % size, (rank - 1) % size
        buffers = min(2, size - 1)
        spare = [arena.take(kv.shape, kv.dtype) for _ in range(buffers)]
        d_spare = [] if d_mine is None else [arena.take(kv.shape, d_mine.dtype) for _ in range(buffers)]
        arriving = d_arriving = None
        for step in range(size):
            if arriving is not None:
                arriving.wait()
                kv = spare[step % buffers]
            if step + 1 < size:
                arriving = comm.send_recv(kv, spare[(step + 1) % buffers], after, before, async_op=True)
            d_kv = d_spare[step % buffers] if d_spare and step else None
            yield (rank - step) % size, kv, d_kv
            if d_kv is None:
                continue
            if d_arriving is not None:
                d_arriving.wait()
                self.ops.add(d_kv, d_mine, d_kv)
            if step + 1 < size:
                d_arriving = comm.send_recv(d_kv, d_mine, after, before, async_op=True)
            else:
                comm.send_recv(d_kv, d_mine, after, before)  # nothing runs beside it: it may use the whole GPU


class FixedContext(ContextParallel):
    """``ContextParallel`` with ``--deterministic``: attention of this rank's pieces to the pieces of all ranks.

    A piece of a sequence in the order of ``split`` (``fixed_order.py``) takes the place of a rank. Attention is to its
    own keys with the causal mask, then to those of every other piece, in a fixed order, with the same shapes in every
    layout. The gradients of keys and values are a tree over the pieces.
    """

    def __init__(self, ops: object, axis: Axis, split: Split) -> None:
        super().__init__(ops, axis, split.tokens // axis.size)  # type: ignore[arg-type]

    def mean_loss(self, losses: Array, count: Array, out: Array, arena: Arena) -> None:
        """Of the tokens of all ranks, on the first; 0 on the others."""
        with arena.scope():
            of_all = losses
            if self.size > 1:
                of_all = arena.take((self.size * len(losses),), losses.dtype)
                self.axis.comm.all_gather(losses, of_all)
            self.ops.mean_loss(of_all, count, out)
        if self.axis.rank > 0:
            self.ops.zero(out)

    def attention(self, attend: Attend, arena: Arena, masks: Masks = None) -> None:
        ops, pieces = self.ops, self._pieces(attend)
        with arena.scope():
            kv = self._keys_and_values(pieces, arena)
            for piece, of_piece in zip(self.mine, pieces, strict=True):
                ops.attention(replace(of_piece, mask=self._mask(masks, piece, piece)), arena)
            merged = replace(attend, out=self._widen(attend.out, arena))
            for piece, of_piece in zip(self.mine, self._pieces(merged), strict=True):
                for _, to_others in self._others(piece, of_piece, kv, masks):
                    ops.attention(to_others, arena)
            if merged.out is not attend.out:
                ops.copy(merged.out, attend.out)

    def attention_backward(
        self, attend: Attend, d_out: Array, d_qkv: Array, arena: Arena, masks: Masks = None
    ) -> None:
        ops, pieces, rows = self.ops, self._pieces(attend), equal_parts(slice(0, len(d_out)), self.pieces)
        with arena.scope():
            kv = self._keys_and_values(pieces, arena)
            for piece, of_piece, n in zip(self.mine, pieces, rows, strict=True):
                ops.attention_backward(
                    replace(of_piece, mask=self._mask(masks, piece, piece)), d_out[n], d_qkv[n], arena
                )
            total = self._widen(d_qkv, arena)

            def term(index: int, d_kv: Array) -> None:
                piece, n = self.mine[index], rows[index]
                ops.zero(d_kv[self._place(piece)])
                for owner, to_others in self._others(piece, pieces[index], kv, masks):
                    ops.attention_backward(to_others, d_out[n], total[n], arena, d_kv[self._place(owner)])

            d_kv = arena.take((len(kv), *kv[0].shape), ops.statistics_dtype(d_qkv.dtype))
            sum_tree(ops, arena, term, d_kv, self.pieces)
            for index, n in enumerate(rows):
                d_mine, of_ranks = d_kv[index * self.size], d_kv[index * self.size : (index + 1) * self.size]
                if self.size > 1:
                    d_mine = arena.take(d_mine.shape, d_kv.dtype)
                    scatter_sum(ops, arena, self.axis, of_ranks, d_mine)
                ops.add_keys_and_values(d_mine, total[n])
            if total is not d_qkv:
                ops.copy(total, d_qkv)

    def _keys_and_values(self, pieces: Sequence[Attend], arena: Arena) -> list[Array]:
        """Those of all pieces, by ``_place``."""
        found = []
        for of_piece in pieces:
            mine = self.ops.keys_and_values(of_piece, arena)
            of_ranks = [mine] if self.size == 1 else arena.take((self.size, *mine.shape), mine.dtype)
            if self.size > 1:
                self.axis.comm.all_gather(mine, of_ranks)
            found += [of_ranks[rank] for rank in range(self.size)]
        return found

    def _place(self, piece: int) -> int:
        """Where a piece lies: the first of each rank, then the second of each."""
        rank, index = divmod(piece, self.pieces)
        return index * self.size + rank

    def _mask(self, masks: Masks, piece: int, owner: int) -> Mask | None:
        """For the queries of ``piece``, one of this rank's, and the keys of another."""
        return None if masks is None else masks[piece - self.mine[0]][owner]

    def _pieces(self, attend: Attend) -> list[Attend]:
        """The attention of each of this rank's pieces to its own keys."""
        rows, samples = (equal_parts(slice(0, len(x)), self.pieces) for x in (attend.qkv, attend.log_sum_exp))
        return [attend.of(*each) for each in zip(rows, samples, strict=True)]

    def _others(
        self, piece: int, of_piece: Attend, kv: Sequence[Array], masks: Masks
    ) -> Iterator[tuple[int, Attend]]:
        """Every other piece, with the attention of ``piece`` to its keys."""
        for owner in range(self.chunks // 2):
            if owner != piece:
                where = seen(owner, piece, of_piece.length)
                yield owner, of_piece.to(kv[self._place(owner)], *where, self._mask(masks, piece, owner))
