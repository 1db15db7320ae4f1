"""LLaMA, forward and backward by hand, over the vocabulary of ``kos.train.ops``.

The model is a row of stages: ``embed``, ``block`` 0 … L-1, ``head``; each has a forward and a backward,
and what a block's forward keeps for its backward is one named tuple.  Parallelism cuts between the stages
and inside the blocks.

Suffixes name dimensions: N = B T tokens, D hidden, F intermediate, V vocabulary, H query heads, K kv
heads, d head_dim, A = H d, W = (H + 2K) d.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from kos.errors import InvalidArgument
from kos.memory.arena import Arena
from kos.train.model.llama_config import LlamaConfig
from kos.train.model.shapes import Local
from kos.train.ops import Array, Ops

HEAD_ROWS = 1024  # tokens whose logits are in memory at once, unless the model is told otherwise

Weights = Mapping[str, Array]
Lookups = Callable[[Array, Array], tuple[Array, Array]]


class Gradients(NamedTuple):
    """Where a backward puts the gradients of weights, whether it adds to them, and whom it tells.

    ``lookups(tokens_N, d_rows_ND)`` gives those of all ranks, where every rank works out for all what the embedding
    gets from its lookups: a few rows, of which the sum over ranks would be the whole table.
    """

    of: Weights
    accumulate: bool
    final: Callable[[str], object]
    lookups: Lookups | None = None


class BlockActivations(NamedTuple):
    """What a block's forward keeps for its backward; None is computed again there."""

    x_ND: Array
    rstd_in_N: Array
    normed_in_ND: Array | None
    qkv_NW: Array
    lse_BHT: Array
    heads_NA: Array
    mid_ND: Array
    rstd_mid_N: Array
    normed_mid_ND: Array | None
    gate_up_N2F: Array
    hidden_NF: Array | None


class Slot:
    """A micro-batch in flight: what its forward keeps for its backward, in ``arena``.

    Several in flight have an arena each and share the model's scratch memory.  One alone may keep in that: a backward
    gives back nothing before its end, so that what is kept lies below all scratch.
    """

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.inputs: list[Array] = []  # of each block
        self.kept: list[BlockActivations] = []  # of each block; none where whole blocks are computed again


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
        local: Local | None = None,
    ) -> None:  # fmt: skip
        self.config = config
        self.local = local or config.local()
        self.ops = ops
        self.recompute = recompute
        self.head_rows = head_rows or HEAD_ROWS
        self.arena = ops.make_arena()
        self.pause: Callable[[], None] = lambda: None  # called between the parts of a pass, which it may end by raising
        self._layers = [config.layer_names(layer) for layer in range(config.num_hidden_layers)]
        self._groups = config.fused_groups(self.local)
        self._tables: dict[tuple[int, Any], tuple[Array, Array]] = {}

    # --- whole passes --------------------------------------------------------------------------------

    def loss_and_gradients(
        self, weights: Weights, tokens: Array, targets: Array, gradients: Weights, *, accumulate: bool,
        on_gradient: Callable[[str], object] | None = None, count: Array | None = None,
    ) -> float:  # fmt: skip
        """The mean loss over the targets, its gradients written to (``accumulate``: added to) ``gradients``.

        ``count`` (1,), of ``ops.statistics_dtype``, is what sums over targets are divided by; default: their number.
        ``on_gradient(name)`` is called when a gradient is final, in the order of ``parameter_shapes``.
        A loss that is not finite is returned as it is.
        """
        with self.ops.step(self.arena):
            loss = self.arena.take((1,), np.dtype(np.float64))
            self.queue_loss_and_gradients(
                weights, tokens, targets, gradients, loss, accumulate=accumulate, on_gradient=on_gradient, count=count
            )
            return float(self.ops.to_host(loss)[0])

    def queue_loss_and_gradients(
        self, weights: Weights, tokens: Array, targets: Array, gradients: Weights, loss: Array, *, accumulate: bool,
        on_gradient: Callable[[str], object] | None = None, lookups: Lookups | None = None, count: Array | None = None,
    ) -> None:  # fmt: skip
        """As ``loss_and_gradients``, inside ``ops.step`` of the caller: the loss goes to ``loss`` (1,), float64.

        With ``lookups`` (see ``Gradients``) a tied embedding is final once the head has put its share there, and one
        that is not tied never is: what follows is no longer this rank's alone.

        Waits for nothing, so that a dialect that queues its work may have the pass captured.
        """
        into = Gradients(gradients, accumulate, on_gradient or (lambda name: None), lookups)
        with self.arena.scope():
            slot, seq_len = Slot(self.arena), tokens.shape[1]
            tokens_N, targets_N = self._flatten(tokens, targets)
            x_ND = self.forward(weights, slot, self.embed(weights, tokens_N, seq_len, slot.arena), seq_len)
            losses_N, count = self._loss_arrays(x_ND, targets_N, count)
            dx_ND = self.arena.take(x_ND.shape, x_ND.dtype)
            self.head_loss_and_gradients(weights, x_ND, targets_N, count, losses_N, dx_ND, into)
            self.backward(weights, slot, dx_ND, seq_len, into)
            self.embed_backward(tokens_N, seq_len, dx_ND, into)
            self.ops.mean_loss(losses_N, count, loss)

    def forward(self, weights: Weights, slot: Slot, x_ND: Array, seq_len: int) -> Array:
        """The output of this rank's blocks; ``slot`` keeps what ``backward`` needs."""
        for layer in self.local.layers:
            self.pause()
            slot.inputs.append(x_ND)
            out_ND = slot.arena.take(x_ND.shape, x_ND.dtype)
            if self.recompute == "block":
                with self.arena.scope():
                    self.block(layer, weights, x_ND, seq_len, out_ND, self.arena)
            else:
                slot.kept.append(self.block(layer, weights, x_ND, seq_len, out_ND, slot.arena))
            x_ND = out_ND
        return x_ND

    def backward(self, weights: Weights, slot: Slot, dx_ND: Array, seq_len: int, into: Gradients) -> None:
        """``dx_ND`` comes as the gradient of ``forward``'s output and goes as that of its input; empties ``slot``."""
        for layer in reversed(self.local.layers):
            self.pause()
            x_ND = slot.inputs.pop()
            with self.arena.scope():
                kept = slot.kept.pop() if slot.kept else self._activations(layer, weights, x_ND, seq_len, self.arena)
                self.block_backward(layer, weights, kept, dx_ND, into)

    def loss(self, weights: Weights, tokens: Array, targets: Array) -> float:
        """The mean loss over the targets; keeps no activations."""
        with self.ops.step(self.arena):
            loss = self.arena.take((1,), np.dtype(np.float64))
            _, targets_N = self._flatten(tokens, targets)
            normed_ND = self._final_states(weights, tokens)
            losses_N, count = self._loss_arrays(normed_ND, targets_N)
            for rows in self._chunks(len(targets_N)):
                with self.arena.scope():
                    logits = self._logits(weights, normed_ND[rows])
                    self.ops.cross_entropy(logits, targets_N[rows], losses_N[rows], self.arena)
            self.ops.mean_loss(losses_N, count, loss)
            return float(self.ops.to_host(loss)[0])

    def logits(self, weights: Weights, tokens: Array) -> Array:
        """The logits (B, T, V), on the host."""
        with self.ops.step(self.arena):
            normed_ND = self._final_states(weights, tokens)
            return self.ops.to_host(self._logits(weights, normed_ND)).reshape(*tokens.shape, -1)

    def next_logits(self, weights: Weights, tokens: Array) -> Array:
        """The logits (V,) of what follows ``tokens`` (1, T), on the host."""
        with self.ops.step(self.arena):
            normed_ND = self._final_states(weights, tokens)
            return self.ops.to_host(self._logits(weights, normed_ND[-1:]))[0]

    def _final_states(self, weights: Weights, tokens: Array) -> Array:
        """The normed output of the last block; each block's memory is given back at its end."""
        tokens_N, _ = self._flatten(tokens, tokens)
        x_ND = self.embed(weights, tokens_N, tokens.shape[1], self.arena)
        for layer in self.local.layers:
            self.pause()
            with self.arena.scope():
                out_ND = self.arena.take(x_ND.shape, x_ND.dtype)
                self.block(layer, weights, x_ND, tokens.shape[1], out_ND, self.arena)
                self.ops.copy(out_ND, x_ND)
        return self._norm(weights, self.config.final_norm, x_ND, self._norm_statistics(x_ND, self.arena), self.arena)

    # --- stages --------------------------------------------------------------------------------------

    def embed(self, weights: Weights, tokens_N: Array, seq_len: int, keep: Arena) -> Array:
        table_VD = weights[self.config.embedding]
        x_ND = keep.take((len(tokens_N), self.config.hidden_size), table_VD.dtype)
        self.ops.embedding(tokens_N, table_VD, x_ND)
        return x_ND

    def embed_backward(self, tokens_N: Array, seq_len: int, dx_ND: Array, into: Gradients) -> None:
        """The last of all; a tied head has already put its share there."""
        name = self.config.embedding
        accumulate = into.accumulate or (self.config.tie_word_embeddings and self.local.last)
        with self.arena.scope():
            if into.lookups is not None:
                tokens_N, dx_ND = into.lookups(tokens_N, dx_ND)
            self.ops.embedding_backward(dx_ND, tokens_N, into.of[name], accumulate, self.arena)
        if into.lookups is None:
            into.final(name)

    def block(
        self, layer: int, weights: Weights, x_ND: Array, seq_len: int, out_ND: Array, keep: Arena
    ) -> BlockActivations:
        """out_ND = x + attention(norm(x)), then the same with the MLP; what the backward needs lies in ``keep``."""
        kept = self._activations(layer, weights, x_ND, seq_len, keep)
        with self.arena.scope():
            self._linear(weights, self._layers[layer].down, self._hidden(kept, self.arena), out_ND, kept.mid_ND)
        return kept

    def _activations(self, layer: int, weights: Weights, x_ND: Array, seq_len: int, keep: Arena) -> BlockActivations:
        """A block's forward but for its last matrix product."""
        ops, config, names = self.ops, self.config, self._layers[layer]
        N, (B, T) = len(x_ND), (len(x_ND) // seq_len, seq_len)
        H, K, d = self.local.heads, self.local.kv_heads, config.head_dim

        def normed_linear(x: Array, norm: str, weight: str, out: Array) -> tuple[Array | None, Array]:
            rstd_N = self._norm_statistics(x, keep)
            if self.recompute == "none":
                normed_ND = self._norm(weights, norm, x, rstd_N, keep)
                self._linear(weights, weight, normed_ND, out)
                return normed_ND, rstd_N
            with self.arena.scope():
                self._linear(weights, weight, self._norm(weights, norm, x, rstd_N, self.arena), out)
            return None, rstd_N

        qkv_NW = ops.empty_columns(keep, N, (H + 2 * K) * d, x_ND.dtype)
        normed_in_ND, rstd_in_N = normed_linear(x_ND, names.input_norm, names.qkv, qkv_NW)
        self._apply_rope(ops.rope, qkv_NW, T)
        heads_NA = ops.empty_columns(keep, N, H * d, x_ND.dtype)
        lse_BHT = keep.take((B, H, T), ops.statistics_dtype(x_ND.dtype))
        ops.attention(qkv_NW, H, K, heads_NA, lse_BHT, self.arena)
        mid_ND = keep.take(x_ND.shape, x_ND.dtype)
        self._linear(weights, names.o, heads_NA, mid_ND, x_ND)

        gate_up_N2F = ops.empty_columns(keep, N, self.local.up, x_ND.dtype)
        normed_mid_ND, rstd_mid_N = normed_linear(mid_ND, names.post_attention_norm, names.gate_up, gate_up_N2F)
        kept = BlockActivations(
            x_ND, rstd_in_N, normed_in_ND, qkv_NW, lse_BHT, heads_NA, mid_ND, rstd_mid_N, normed_mid_ND, gate_up_N2F,
            None,
        )  # fmt: skip
        return kept._replace(hidden_NF=self._hidden(kept, keep)) if self.recompute == "none" else kept

    def _hidden(self, kept: BlockActivations, arena: Arena) -> Array:
        if kept.hidden_NF is not None:
            return kept.hidden_NF
        rows, up = len(kept.gate_up_N2F), kept.gate_up_N2F
        hidden_NF = self.ops.empty_columns(arena, rows, self.local.intermediate, up.dtype)
        self._activate(up, hidden_NF)
        return hidden_NF

    def block_backward(
        self, layer: int, weights: Weights, kept: BlockActivations, dx_ND: Array, into: Gradients
    ) -> None:
        """``dx_ND`` comes as the gradient of the block's output and goes as that of its input."""
        ops, arena, config, names = self.ops, self.arena, self.config, self._layers[layer]
        H, K, d = self.local.heads, self.local.kv_heads, config.head_dim
        T, (N, D), F = kept.lse_BHT.shape[-1], dx_ND.shape, self.local.intermediate

        def normed(kept_ND: Array | None, x: Array, name: str) -> Array:
            if kept_ND is not None:
                return kept_ND
            return self._norm(weights, name, x, self._norm_statistics(x, arena), arena)

        with arena.scope():
            hidden_NF = self._hidden(kept, arena)
            d_hidden_NF = ops.empty_columns(arena, N, F, dx_ND.dtype)
            self._linear_backward(weights, names.down, dx_ND, hidden_NF, d_hidden_NF, into)
            d_gate_up_N2F = ops.empty_columns(arena, N, self.local.up, dx_ND.dtype)
            self._activate_backward(d_hidden_NF, kept.gate_up_N2F, hidden_NF, d_gate_up_N2F)
            normed_mid_ND = normed(kept.normed_mid_ND, kept.mid_ND, names.post_attention_norm)
            d_normed_ND = arena.take((N, D), dx_ND.dtype)
            self._linear_backward(weights, names.gate_up, d_gate_up_N2F, normed_mid_ND, d_normed_ND, into)
            norm = names.post_attention_norm
            self._norm_backward(weights, norm, d_normed_ND, kept.mid_ND, kept.rstd_mid_N, dx_ND, into)

        with arena.scope():
            d_heads_NA = ops.empty_columns(arena, N, H * d, dx_ND.dtype)
            self._linear_backward(weights, names.o, dx_ND, kept.heads_NA, d_heads_NA, into)
            d_qkv_NW = ops.empty_columns(arena, N, (H + 2 * K) * d, dx_ND.dtype)
            ops.attention_backward(d_heads_NA, kept.qkv_NW, kept.heads_NA, kept.lse_BHT, H, K, d_qkv_NW, arena)
            self._apply_rope(ops.rope_backward, d_qkv_NW, T)
            normed_in_ND = normed(kept.normed_in_ND, kept.x_ND, names.input_norm)
            d_normed_ND = arena.take((N, D), dx_ND.dtype)
            self._linear_backward(weights, names.qkv, d_qkv_NW, normed_in_ND, d_normed_ND, into)
            self._norm_backward(weights, names.input_norm, d_normed_ND, kept.x_ND, kept.rstd_in_N, dx_ND, into)

    def head_loss_and_gradients(
        self, weights: Weights, x_ND: Array, targets_N: Array, count: Array, losses_N: Array, dx_ND: Array,
        into: Gradients,
    ) -> None:  # fmt: skip
        """Forward and backward in one, so that only ``head_rows`` rows of logits exist.  Writes ``dx_ND``."""
        ops, arena, name, norm = self.ops, self.arena, self.config.head, self.config.final_norm
        with arena.scope():
            rstd_N = self._norm_statistics(x_ND, arena)
            normed_ND = self._norm(weights, norm, x_ND, rstd_N, arena)
            d_normed_ND = arena.take(x_ND.shape, x_ND.dtype)
            chunks, d_weight = self._chunks(len(targets_N)), into.of[name]
            wide = ops.statistics_dtype(x_ND.dtype)
            in_place = len(chunks) == 1 or d_weight.dtype == wide
            sum_VD = d_weight if in_place else arena.take(d_weight.shape, wide)  # rounded once, not once a chunk
            if into.accumulate and not in_place:
                ops.copy(d_weight, sum_VD)
            for rows in chunks:
                self.pause()
                with arena.scope():
                    logits_NV = self._logits(weights, normed_ND[rows])
                    ops.cross_entropy_with_gradient(logits_NV, targets_N[rows], count, losses_N[rows], arena)
                    ops.linear_input_gradient(logits_NV, weights[name], d_normed_ND[rows])
                    add = into.accumulate or rows.start > 0
                    ops.linear_weight_gradient(logits_NV, normed_ND[rows], sum_VD, add, arena)
            if not in_place:
                ops.copy(sum_VD, d_weight)
            if into.lookups is not None or not self.config.tie_word_embeddings:
                into.final(name)
            ops.zero(dx_ND)
            self._norm_backward(weights, norm, d_normed_ND, x_ND, rstd_N, dx_ND, into)

    # --- what makes it a LLaMA: RMSNorm, RoPE, SwiGLU, no biases ---------------------------------------

    def _norm_statistics(self, x_ND: Array, arena: Arena) -> Array:
        return arena.take((len(x_ND),), self.ops.statistics_dtype(x_ND.dtype))

    def _norm(self, weights: Weights, name: str, x_ND: Array, rstd_N: Array, arena: Arena) -> Array:
        normed_ND = arena.take(x_ND.shape, x_ND.dtype)
        self.ops.rms_norm(x_ND, weights[name], self.config.rms_norm_eps, normed_ND, rstd_N)
        return normed_ND

    def _norm_backward(
        self, weights: Weights, name: str, d_out: Array, x: Array, rstd: Array, dx: Array, into: Gradients
    ) -> None:
        self.ops.rms_norm_backward(d_out, x, weights[name], rstd, dx, into.of[name], into.accumulate, self.arena)
        into.final(name)

    def _linear(self, weights: Weights, name: str, x: Array, out: Array, residual: Array | None = None) -> None:
        self.ops.linear(x, weights[name], out, residual)

    def _linear_backward(self, weights: Weights, name: str, d_out: Array, x: Array, dx: Array, into: Gradients) -> None:
        self.ops.linear_input_gradient(d_out, weights[name], dx)
        self.ops.linear_weight_gradient(d_out, x, into.of[name], into.accumulate, self.arena)
        for part in self._groups.get(name, (name,)):
            into.final(part)

    def _apply_rope(self, rope: Callable[..., None], qkv_NW: Array, seq_len: int) -> None:
        """``rope`` is forward or backward."""
        heads = self.local.heads + self.local.kv_heads
        rope(qkv_NW, self._rope_tables(seq_len, qkv_NW.dtype), self.config.head_dim, heads, self.arena)

    def _activate(self, gate_up_N2F: Array, hidden_NF: Array) -> None:
        self.ops.swiglu(gate_up_N2F, hidden_NF, self.arena)

    def _activate_backward(self, d_hidden: Array, gate_up: Array, hidden: Array, d_gate_up: Array) -> None:
        self.ops.swiglu_backward(d_hidden, gate_up, hidden, d_gate_up, self.arena)

    # --- small things --------------------------------------------------------------------------------

    def _flatten(self, tokens: Array, targets: Array) -> tuple[Array, Array]:
        if len(tokens.shape) != 2 or tokens.shape != targets.shape:
            raise InvalidArgument(
                f"expected tokens and targets of one shape (B, T), got {tokens.shape} and {targets.shape}"
            )
        return self.ops.indices(tokens.reshape(-1), self.arena), self.ops.indices(targets.reshape(-1), self.arena)

    def _loss_arrays(self, x_ND: Array, targets_N: Array, count: Array | None = None) -> tuple[Array, Array]:
        wide = self.ops.statistics_dtype(x_ND.dtype)
        losses_N = self.arena.take((len(targets_N),), wide)
        if count is None:
            count = self.arena.take((1,), wide)
            self.ops.count_targets(targets_N, count)
        return losses_N, count

    def _logits(self, weights: Weights, normed_ND: Array) -> Array:
        logits_NV = self.arena.take((len(normed_ND), len(self.local.vocabulary)), normed_ND.dtype)
        self.ops.linear(normed_ND, weights[self.config.head], logits_NV)
        return logits_NV

    def _rope_tables(self, seq_len: int, dtype: Any) -> tuple[Array, Array]:
        """Rows of a longer table: sampling asks for every length, a captured pass goes on reading the one it saw."""
        key = (1 << (seq_len - 1).bit_length(), dtype)
        if key not in self._tables:
            self._tables[key] = self.ops.rope_tables(self.config.rope_frequencies(), range(key[0]), dtype)
        cos, sin = self._tables[key]
        return cos[:seq_len], sin[:seq_len]

    def _chunks(self, rows: int) -> list[slice]:
        return [slice(start, min(start + self.head_rows, rows)) for start in range(0, rows, self.head_rows)]
