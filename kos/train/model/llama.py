"""LLaMA, forward and backward by hand, over the vocabulary of ``kos.train.ops``.

The model is a row of stages: ``embed``, ``block`` 0 … L-1, ``head``; each has a forward and a backward,
and what a block's forward keeps for its backward is one named tuple.  Parallelism splits between the stages
(``queue_forward`` and ``queue_backward`` are those of a rank's part) and inside the blocks, where
``kos.train.parallel.tensor`` and ``kos.train.parallel.context`` have the operations that are split over ranks.

Suffixes name dimensions: N = B T tokens, n those of them in this rank's residual stream (all, but for tensor
parallelism), D hidden, F intermediate, V vocabulary, H query heads, K kv heads, d head_dim, A = H d, W = (H + 2K) d;
T, H, K, F and V count what this rank computes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from kos.memory.arena import Arena
from kos.train.model.llama_config import LlamaConfig
from kos.train.model.shapes import Local
from kos.train.ops import Array, Ops
from kos.train.parallel.context import ContextParallel
from kos.train.parallel.tensor import Half, TensorParallel

HEAD_ROWS = 1024  # tokens whose logits are in memory at once, by default

LOOKUPS = "lookups"
"""The name of the gradient of a tied embedding's lookups; ``--deterministic`` sums it apart from the head's."""

Weights = Mapping[str, Array]


class Gradients(NamedTuple):
    """Where a backward puts the gradients of weights, whether it adds to them, and what it calls when one is final.

    ``final`` takes the name of a tensor or of a group.  ``deferred`` takes the matrices' gradients that are left for
    later, by name: the two arrays that each is the product of, in the slot's memory
    (``Llama.queue_weight_gradients``).
    """

    of: Weights
    accumulate: bool
    final: Callable[[str], object]
    deferred: list[tuple[str, Array, Array]] | None = None


class BlockActivations(NamedTuple):
    """The arrays that a block's forward writes and its backward reads. The backward recomputes those that are None."""

    x_nD: Array
    rstd_in_n: Array
    normed_in_nD: Array | None
    qkv_NW: Array
    lse_BHT: Array
    heads_NA: Array
    mid_nD: Array
    rstd_mid_n: Array
    normed_mid_nD: Array | None
    gate_up_N2F: Array
    hidden_NF: Array | None


class Block(NamedTuple):
    """A layer's forward: the arrays of its activations and its output. Without an output it ends at ``gate_up_N2F``."""

    layer: int
    kept: BlockActivations
    out_nD: Array | None


class Slot:
    """A micro-batch in flight: what its forward keeps for its backward, in ``arena``.

    Several in flight have an arena each and share the model's scratch memory.  One alone may keep in that: a backward
    gives back nothing before its end, so that what is kept lies below all scratch.
    """

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.tokens_N: Array | None = None
        self.seq_len = 0
        self.inputs: list[Array] = []  # of each block
        self.kept: list[BlockActivations] = []  # of each block; none where whole blocks are computed again
        self.out_nD: Array | None = None
        self.deferred: list[tuple[str, Array, Array]] = []  # see ``Gradients``
        self.d_out_nD: Array | None = None  # where another stage of this rank has left it
        self.sent: Any = None  # the send of ``out_nD``

    def clear(self) -> None:
        """Prepare for another micro-batch; the data of this one is no longer needed."""
        self.arena.release(0)
        self.__init__(self.arena)  # type: ignore[misc]


class Llama:
    """The model in one dialect of ``ops``.  Holds no weights: only their shapes, and scratch memory.

    ``weights`` and ``gradients`` are mappings from names to arrays that also know the names of
    ``config.fused_groups()`` (``kos.train.model.parameters.Parameters``).  ``tokens`` and ``targets`` are int32
    (B, T), on the host or where ``ops`` has its arrays; a target of -1 is left out of the loss.

    ``recompute`` saves memory for the same numbers: "norms" keeps no outputs of norms and SwiGLU for the backward
    (a third of the activations, cheap to make again), "block" only each block's input (a second forward).
    """

    def __init__(
        self, config: LlamaConfig, ops: Ops, *, head_rows: int | None = None, recompute: str = "none",
        local: Local | None = None, tensor: TensorParallel | None = None, context: ContextParallel | None = None,
        arena: Arena | None = None,
    ) -> None:  # fmt: skip
        self.config = config
        self.local = local or config.local()
        self.ops = ops
        self.tensor, self.context = tensor or TensorParallel(ops), context or ContextParallel(ops)
        self.recompute = recompute
        self.head_rows = head_rows or HEAD_ROWS
        self.arena = arena or ops.make_arena()
        self.holds_first, self.holds_last = self.local.first, self.local.last  # or another stage of this rank is that
        self._layers = [config.layer_names(layer) for layer in range(config.num_hidden_layers)]
        self._tables: dict[tuple[int, Any], tuple[Array, Array]] = {}

    # --- the part of a rank: its stage of the pipeline -------------------------------------------------

    def queue_forward(self, weights: Weights, slot: Slot, tokens: Array, x_nD: Array | None = None) -> Array:
        """The output of this rank's stage for a micro-batch, whose ``tokens`` (B, T) the first stage looks up.

        ``x_nD`` is what the stage before gave, in memory of ``slot``, which keeps what ``queue_backward`` needs.
        """
        slot.tokens_N, slot.seq_len = self._flatten(tokens, slot.arena), tokens.shape[1]
        if x_nD is None:
            x_nD = self.embed(weights, slot.tokens_N, slot.seq_len, slot.arena)
        after = [slot.arena.take(x_nD.shape, x_nD.dtype) for _ in self.local.layers]
        *slot.inputs, slot.out_nD = x_nD, *after
        if self.recompute != "block":
            slot.kept = [self._empty_activations(x, slot.seq_len, slot.arena) for x in slot.inputs]
        with self.arena.scope():
            kept = slot.kept
            if slot.inputs and not kept:  # nothing is kept, so all blocks use the same memory
                one = self._empty_activations(x_nD, slot.seq_len, self.arena)
                kept = [one._replace(x_nD=x) for x in slot.inputs]
            if kept:
                self._forward(weights, [*map(Block, self.local.layers, kept, after)])
        return slot.out_nD

    def queue_backward(
        self, weights: Weights, slot: Slot, into: Gradients, dx_nD: Array, *, targets: Array | None = None,
        loss: Array | None = None, count: Array | None = None,
    ) -> None:  # fmt: skip
        """The gradients of this rank's stage for the micro-batch in ``slot``.

        ``dx_nD`` enters as the gradient of the stage's output and leaves as that of its input.  The last stage only
        writes it. Its mean loss over ``targets`` goes to ``loss`` (1,), float64.  Sums over targets are divided by
        ``count`` (1,), of ``ops.statistics_dtype``; default: the number of targets.
        """
        assert slot.tokens_N is not None and slot.out_nD is not None  # there was a forward
        if self.local.last:
            assert targets is not None and loss is not None
            with self.arena.scope():
                targets_N = self._flatten(targets)
                losses_N, count = self._loss_arrays(slot.out_nD, targets_N, count)
                self.head_loss_and_gradients(weights, slot.out_nD, targets_N, count, losses_N, dx_nD, into)
                self.context.mean_loss(losses_N, count, loss, self.arena)
        keep = self.arena if into.deferred is None else slot.arena
        with self.arena.scope():
            if slot.inputs or self.local.first:
                d_out_ND = self.tensor.gather(dx_nD, keep)
            for layer in reversed(self.local.layers):
                x_nD, more = slot.inputs.pop(), self.local.first or layer > self.local.layers.start
                with self.arena.scope():
                    if slot.kept:
                        kept = slot.kept.pop()
                    else:
                        kept = self._empty_activations(x_nD, slot.seq_len, keep)
                        self._forward(weights, [Block(layer, kept, None)])
                    d_out_ND = self.block_backward(layer, weights, kept, dx_nD, d_out_ND, into, keep, more)
            if self.local.first:
                self.embed_backward(slot.tokens_N, slot.seq_len, d_out_ND, into)

    def queue_weight_gradients(self, into: Gradients) -> None:
        """Those that a backward has left in ``into.deferred``; empties it."""
        assert into.deferred is not None
        for name, d_out, x in into.deferred:
            self._weight_gradient(name, d_out, x, into._replace(deferred=None))
        into.deferred.clear()

    # --- whole passes without a backward ---------------------------------------------------------------

    def loss(self, weights: Weights, tokens: Array, targets: Array) -> float:
        """The mean loss over the targets; keeps no activations."""
        with self.ops.step(self.arena):
            loss = self.arena.take((1,), np.dtype(np.float64))
            x_nD = self.evaluate_stage(weights, tokens)
            self.evaluate_loss(weights, x_nD, targets, loss)
            return float(self.ops.to_host(loss)[0])

    def evaluate_stage(self, weights: Weights, tokens: Array, x_nD: Array | None = None) -> Array:
        """``queue_forward`` without a backward: all blocks use the same memory, and overwrite ``x_nD``."""
        if x_nD is None:
            x_nD = self.embed(weights, self._flatten(tokens), tokens.shape[1], self.arena)
        with self.arena.scope():
            if self.local.layers:
                kept = self._empty_activations(x_nD, tokens.shape[1], self.arena)
                self._forward(weights, [Block(layer, kept, x_nD) for layer in self.local.layers])
        return x_nD

    def evaluate_loss(
        self, weights: Weights, x_nD: Array, targets: Array, loss: Array, count: Array | None = None
    ) -> None:
        """The mean loss of ``evaluate_stage``'s output, on the last stage, to ``loss`` (1,), float64."""
        targets_N, normed_ND = self._flatten(targets), self._final_norm(weights, x_nD)
        losses_N, count = self._loss_arrays(normed_ND, targets_N, count)
        for rows in self._chunks(len(targets_N)):
            with self.arena.scope():
                logits_NV = self._logits(weights, normed_ND[rows])
                self.tensor.cross_entropy(logits_NV, targets_N[rows], losses_N[rows], self.arena)
        self.context.mean_loss(losses_N, count, loss, self.arena)

    def logits(self, weights: Weights, tokens: Array) -> Array:
        """The logits (B, T, V), on the host; of the whole model."""
        with self.ops.step(self.arena):
            normed_ND = self._final_norm(weights, self.evaluate_stage(weights, tokens))
            return self.ops.to_host(self._logits(weights, normed_ND)).reshape(*tokens.shape, -1)

    def next_logits(self, weights: Weights, tokens: Array) -> Array:
        """The logits (V,) of the token that follows ``tokens`` (1, T), on the host; of the whole model."""
        with self.ops.step(self.arena):
            return self.logits_of(weights, self.evaluate_stage(weights, tokens), tokens.shape[1] - 1)

    def logits_of(self, weights: Weights, x_nD: Array, row: int) -> Array:
        """This rank's part of the logits of one row of ``evaluate_stage``'s output, on the host."""
        return self.ops.to_host(self._logits(weights, self._final_norm(weights, x_nD)[row : row + 1]))[0]

    def _final_norm(self, weights: Weights, x_nD: Array) -> Array:
        """The head's input, of all ranks' rows."""
        return self.tensor.gather(self._normed(weights, self.config.final_norm, x_nD, self.arena), self.arena)

    # --- stages --------------------------------------------------------------------------------------

    def embed(self, weights: Weights, tokens_N: Array, seq_len: int, keep: Arena) -> Array:
        table_VD = weights[self.config.embedding]
        x_nD = keep.take((self.tensor.rows(len(tokens_N)), self.config.hidden_size), table_VD.dtype)
        self.tensor.embedding(tokens_N, table_VD, x_nD, self.arena)
        return x_nD

    def embed_backward(self, tokens_N: Array, seq_len: int, dx_ND: Array, into: Gradients) -> None:
        """The last gradient; a tied head has already written its term there, unless lookups are summed apart."""
        name = LOOKUPS if LOOKUPS in into.of else self.config.embedding
        adds = name != LOOKUPS and self.config.tie_word_embeddings and self.holds_last
        accumulate = into.accumulate or adds
        self.tensor.embedding_backward(dx_ND, tokens_N, into.of[name], accumulate, self.arena)
        into.final(name)

    def _empty_activations(self, x_nD: Array, seq_len: int, keep: Arena) -> BlockActivations:
        """Memory in ``keep`` for what ``_forward`` writes of a block with the input ``x_nD``."""
        N, dtype, local, d = len(x_nD) * self.tensor.size, x_nD.dtype, self.local, self.config.head_dim

        def columns(count: int) -> Array:
            return self.ops.empty_columns(keep, N, count, dtype)

        def normed() -> Array | None:
            return keep.take(x_nD.shape, dtype) if self.recompute == "none" else None

        lse = (N // seq_len, local.heads, seq_len), self.ops.statistics_dtype(dtype)
        return BlockActivations(
            x_nD, self._norm_statistics(x_nD, keep), normed(), columns((local.heads + 2 * local.kv_heads) * d),
            keep.take(*lse), columns(local.heads * d), keep.take(x_nD.shape, dtype), self._norm_statistics(x_nD, keep),
            normed(), columns(local.up), columns(local.intermediate) if self.recompute == "none" else None,
        )  # fmt: skip

    def _forward(self, weights: Weights, blocks: Sequence[Block]) -> None:
        """The forward of these blocks, one after another. The halves of the tokens take turns.

        A turn ends where a half waits for a collective, or where the other half can start one. The second half is one
        turn behind::

            half 0: gather | qkv |        | attention, o, sum |     | add, gather |                   | gate_up |
            half 1:              | gather |                   | qkv |             | attention, o, sum |         | …

        So each collective overlaps a matrix product of the other half, except at the first and last of ``blocks``.
        """
        kept = blocks[0].kept
        with self.arena.scope():
            exchange_ND = self.tensor.empty_rows(kept.x_nD, self.arena)
            if kept.hidden_NF is None:
                normed_nD = self.arena.take(kept.x_nD.shape, kept.x_nD.dtype)
                up = kept.gate_up_N2F
                hidden_NF = self.ops.empty_columns(self.arena, len(up), self.local.intermediate, up.dtype)
                scratch = {"normed_in_nD": normed_nD, "normed_mid_nD": normed_nD, "hidden_NF": hidden_NF}
                blocks = [block._replace(kept=block.kept._replace(**scratch)) for block in blocks]
            halves = self.tensor.halves(len(kept.qkv_NW))
            turns = [self._forward_half(weights, blocks, exchange_ND, half, half is halves[-1]) for half in halves]
            next(turns[0])
            for _ in itertools.zip_longest(*turns):
                pass

    def _forward_half(
        self, weights: Weights, blocks: Sequence[Block], exchange_ND: Array, half: Half, last: bool
    ) -> Iterator[None]:
        """Yields at the end of each turn. ``exchange_ND``: memory for gathered rows and for the terms of sums."""
        (rows, own), tensor = half, self.tensor
        for layer, kept, out_nD in blocks:
            names, qkv_NW, heads_NA, lse_BHT = self._layers[layer], kept.qkv_NW, kept.heads_NA, kept.lse_BHT
            start, stop = (row // lse_BHT.shape[-1] for row in (rows.start, rows.stop))  # samples
            apart = (stop - start) * lse_BHT.shape[-1] == rows.stop - rows.start  # no sample is in both halves

            def start_gather(norm: str, x: Array, rstd: Array, normed: Array) -> Callable[[], Array]:
                self._norm(weights, norm, x, normed, rstd, own)
                return tensor.start_gather(normed, exchange_ND, [half])

            gathered = start_gather(names.input_norm, kept.x_nD, kept.rstd_in_n, kept.normed_in_nD)
            yield
            tensor.column_linear(weights, names.qkv, gathered()[rows], qkv_NW[rows])
            if not apart:
                if last:
                    self._attention(qkv_NW, lse_BHT, heads_NA)
                yield
            yield
            if apart:
                self._attention(qkv_NW[rows], lse_BHT[start:stop], heads_NA[rows])
            operands = exchange_ND, kept.mid_nD, kept.x_nD, half, self.arena
            complete = tensor.row_linear(weights, names.o, heads_NA, *operands)
            yield
            complete()
            gathered = start_gather(names.post_attention_norm, kept.mid_nD, kept.rstd_mid_n, kept.normed_mid_nD)
            yield
            tensor.column_linear(weights, names.gate_up, gathered()[rows], kept.gate_up_N2F[rows])
            hidden_NF = kept.hidden_NF
            if out_nD is None or hidden_NF is None:
                return
            self._activate(kept.gate_up_N2F[rows], hidden_NF[rows])
            yield
            operands = exchange_ND, out_nD, kept.mid_nD, half, self.arena
            complete = tensor.row_linear(weights, names.down, hidden_NF, *operands)
            yield
            complete()

    def _attention(self, qkv_NW: Array, lse_BHT: Array, heads_NA: Array) -> None:
        self._apply_rope(self.ops.rope, qkv_NW, lse_BHT.shape[-1])
        self.context.attention(qkv_NW, self.local.heads, self.local.kv_heads, heads_NA, lse_BHT, self.arena)

    def block_backward(
        self, layer: int, weights: Weights, kept: BlockActivations, dx_nD: Array, d_out_ND: Array, into: Gradients,
        keep: Arena, more: bool,
    ) -> Array:  # fmt: skip
        """Replaces the gradient of the block's output in ``dx_nD`` by the gradient of its input.

        ``d_out_ND`` is the gradient of the output for all ranks' rows. Returns the gradient of the input for all ranks'
        rows if ``more`` of the backward needs it. What the gradients of weights need lies in ``keep``: ``self.arena``,
        or if they are deferred the slot's arena.

        A gradient of weights is computed when it can overlap a collective. In a pair of matrices, that of the second
        overlaps the sum of the first's input gradient. That of the first overlaps the gather of ``dx_nD``.
        """
        ops, arena, config, names = self.ops, self.arena, self.config, self._layers[layer]
        H, K, d = self.local.heads, self.local.kv_heads, config.head_dim
        N, F, deferred = len(kept.qkv_NW), self.local.intermediate, into.deferred is not None

        def start_gather(norm: str, x: Array, normed: Array | None) -> Callable[[], Array]:
            normed = self._normed(weights, norm, x, keep) if normed is None else normed
            return self.tensor.start_gather(normed, self.tensor.empty_rows(normed, keep))

        def row_linear_backward(name: str, x_NF: Array, dx_NF: Array) -> Callable[[], None]:
            """Returns a function that computes the gradient of the weights."""
            d_out = d_out_ND
            if deferred and d_out is dx_nD:  # the rest of the backward adds to dx_nD
                d_out = keep.take(dx_nD.shape, dx_nD.dtype)
                ops.copy(dx_nD, d_out)
            self.tensor.row_linear_backward(weights, name, d_out, dx_NF)
            return lambda: self._weight_gradient(name, d_out, x_NF, into)

        def through_norm(
            d_out_NF: Array, name: str, gathered: Callable[[], Array], beside: Callable[[], None], norm: str, x: Array,
            rstd: Array, more: bool = True,
        ) -> Array:  # fmt: skip
            finished: list[str] = []
            with arena.scope():
                d_normed_nD = arena.take(dx_nD.shape, dx_nD.dtype)
                self.tensor.column_linear_backward(weights, name, d_out_NF, d_normed_nD, arena, beside)
                of_norm = into._replace(final=finished.append)  # final after the matrix, in their order in memory
                self._norm_backward(weights, norm, d_normed_nD, x, rstd, dx_nD, of_norm)
            dx_ND = self.tensor.empty_rows(dx_nD, keep) if deferred and more else d_out_ND
            wait = self.tensor.start_gather(dx_nD, dx_ND, None if more else [])
            self._weight_gradient(name, d_out_NF, gathered(), into)
            for weight in finished:
                into.final(weight)
            return wait()

        with arena.scope():
            norm = names.post_attention_norm
            gathered = start_gather(norm, kept.mid_nD, kept.normed_mid_nD)
            hidden_NF = kept.hidden_NF
            if hidden_NF is None:
                hidden_NF = ops.empty_columns(keep, N, F, dx_nD.dtype)
                self._activate(kept.gate_up_N2F, hidden_NF)
            d_hidden_NF = ops.empty_columns(arena, N, F, dx_nD.dtype)
            weight_gradient = row_linear_backward(names.down, hidden_NF, d_hidden_NF)
            d_gate_up_N2F = ops.empty_columns(keep, N, self.local.up, dx_nD.dtype)
            self._activate_backward(d_hidden_NF, kept.gate_up_N2F, hidden_NF, d_gate_up_N2F)
            d_out_ND = through_norm(
                d_gate_up_N2F, names.gate_up, gathered, weight_gradient, norm, kept.mid_nD, kept.rstd_mid_n
            )

        with arena.scope():
            gathered = start_gather(names.input_norm, kept.x_nD, kept.normed_in_nD)
            d_heads_NA = ops.empty_columns(arena, N, H * d, dx_nD.dtype)
            weight_gradient = row_linear_backward(names.o, kept.heads_NA, d_heads_NA)
            d_qkv_NW = ops.empty_columns(keep, N, (H + 2 * K) * d, dx_nD.dtype)
            self.context.attention_backward(
                d_heads_NA, kept.qkv_NW, kept.heads_NA, kept.lse_BHT, H, K, d_qkv_NW, arena
            )
            self._apply_rope(ops.rope_backward, d_qkv_NW, kept.lse_BHT.shape[-1])
            return through_norm(
                d_qkv_NW, names.qkv, gathered, weight_gradient, names.input_norm, kept.x_nD, kept.rstd_in_n, more
            )

    def head_loss_and_gradients(
        self, weights: Weights, x_nD: Array, targets_N: Array, count: Array, losses_N: Array, dx_nD: Array,
        into: Gradients,
    ) -> None:  # fmt: skip
        """Forward and backward in one, so that only ``head_rows`` rows of logits exist.  Writes ``dx_nD``."""
        arena, norm = self.arena, self.config.final_norm
        with arena.scope():
            rstd_n = self._norm_statistics(x_nD, arena)
            normed_ND = self.tensor.gather(self._normed(weights, norm, x_nD, arena, rstd_n), arena)
            d_normed_ND = arena.take(normed_ND.shape, x_nD.dtype)
            self._head_gradients(weights, normed_ND, targets_N, count, losses_N, d_normed_ND, into)
            if not self.config.tie_word_embeddings or not self.holds_first or LOOKUPS in into.of:
                into.final(self.config.head)
            self.ops.zero(dx_nD)
            d_normed_nD = d_normed_ND
            if self.tensor.size > 1:
                d_normed_nD = arena.take(x_nD.shape, x_nD.dtype)
                self.tensor.scatter_sum(d_normed_ND, d_normed_nD, arena)
            self._norm_backward(weights, norm, d_normed_nD, x_nD, rstd_n, dx_nD, into)

    def _head_gradients(
        self, weights: Weights, normed_ND: Array, targets_N: Array, count: Array, losses_N: Array, d_normed_ND: Array,
        into: Gradients,
    ) -> None:  # fmt: skip
        """Compute the losses, and the gradients of the head's matrix and of its input, chunk by chunk."""
        ops, arena, name = self.ops, self.arena, self.config.head
        chunks, d_weight = self._chunks(len(targets_N)), into.of[name]
        wide = ops.statistics_dtype(normed_ND.dtype)
        in_place = len(chunks) == 1 or d_weight.dtype == wide
        sum_VD = d_weight if in_place else arena.take(d_weight.shape, wide)  # rounded once, not for each chunk
        if into.accumulate and not in_place:
            ops.copy(d_weight, sum_VD)
        for rows in chunks:
            with arena.scope():
                logits_NV = self._logits(weights, normed_ND[rows])
                self.tensor.cross_entropy(logits_NV, targets_N[rows], losses_N[rows], arena, count)
                ops.linear_input_gradient(logits_NV, weights[name], d_normed_ND[rows])
                add = into.accumulate or rows.start > 0
                ops.linear_weight_gradient(logits_NV, normed_ND[rows], sum_VD, add, arena)
        if not in_place:
            ops.copy(sum_VD, d_weight)

    # --- what makes it a LLaMA: RMSNorm, RoPE, SwiGLU --------------------------------------------------

    def _norm_statistics(self, x_ND: Array, arena: Arena) -> Array:
        return arena.take((len(x_ND),), self.ops.statistics_dtype(x_ND.dtype))

    def _norm(self, weights: Weights, name: str, x_nD: Array, out_nD: Array, rstd_n: Array, rows: slice) -> None:
        """Write ``rows`` of ``out_nD`` and ``rstd_n``."""
        self.ops.rms_norm(x_nD[rows], weights[name], self.config.rms_norm_eps, out_nD[rows], rstd_n[rows])

    def _normed(self, weights: Weights, name: str, x_nD: Array, arena: Arena, rstd_n: Array | None = None) -> Array:
        """The normed rows of ``x_nD``, in ``arena``."""
        rstd_n = self._norm_statistics(x_nD, self.arena) if rstd_n is None else rstd_n
        normed_nD = arena.take(x_nD.shape, x_nD.dtype)
        self._norm(weights, name, x_nD, normed_nD, rstd_n, slice(0, len(x_nD)))
        return normed_nD

    def _norm_backward(
        self, weights: Weights, name: str, d_out: Array, x: Array, rstd: Array, dx: Array, into: Gradients
    ) -> None:
        self.ops.rms_norm_backward(d_out, x, weights[name], rstd, dx, into.of[name], into.accumulate, self.arena)
        into.final(name)

    def _weight_gradient(self, name: str, d_out: Array, x: Array, into: Gradients) -> None:
        if into.deferred is not None:
            into.deferred.append((name, d_out, x))
        else:
            self.tensor.weight_gradient(name, d_out, x, into, self.arena)

    def _apply_rope(self, rope: Callable[..., None], qkv_NW: Array, seq_len: int) -> None:
        """``rope`` is forward or backward."""
        heads = self.local.heads + self.local.kv_heads
        rope(qkv_NW, self._rope_tables(seq_len, qkv_NW.dtype), self.config.head_dim, heads, self.arena)

    def _activate(self, gate_up_N2F: Array, hidden_NF: Array) -> None:
        self.ops.swiglu(gate_up_N2F, hidden_NF, self.arena)

    def _activate_backward(self, d_hidden: Array, gate_up: Array, hidden: Array, d_gate_up: Array) -> None:
        self.ops.swiglu_backward(d_hidden, gate_up, hidden, d_gate_up, self.arena)

    # --- small things --------------------------------------------------------------------------------

    def _flatten(self, numbers: Array, arena: Arena | None = None) -> Array:
        """Tokens or targets (B, T), as (N,) where ``ops`` has its arrays."""
        return self.ops.indices(numbers.reshape(-1), arena or self.arena)

    def _loss_arrays(self, x_ND: Array, targets_N: Array, count: Array | None) -> tuple[Array, Array]:
        wide = self.ops.statistics_dtype(x_ND.dtype)
        losses_N = self.arena.take((len(targets_N),), wide)
        if count is None:
            count = self.arena.take((1,), wide)
            self.ops.count_targets(targets_N, count)
        return losses_N, count

    def _logits(self, weights: Weights, normed_ND: Array) -> Array:
        logits_NV = self.arena.take((len(normed_ND), len(self.local.vocabulary)), normed_ND.dtype)
        self.tensor.logits(normed_ND, weights[self.config.head], logits_NV)
        return logits_NV

    def _rope_tables(self, seq_len: int, dtype: Any) -> tuple[Array, Array]:
        """Rows of a longer table: sampling uses every length, a captured pass keeps reading the table it captured."""
        length = seq_len if self.context.size > 1 else 1 << (seq_len - 1).bit_length()
        if (length, dtype) not in self._tables:
            positions = self.context.positions(length)
            self._tables[length, dtype] = self.ops.rope_tables(self.config.rope_frequencies(), positions, dtype)
        cos, sin = self._tables[length, dtype]
        return cos[:seq_len], sin[:seq_len]

    def _chunks(self, rows: int) -> list[slice]:
        return [slice(start, min(start + self.head_rows, rows)) for start in range(0, rows, self.head_rows)]
