"""The vocabulary that the model is written in.

A *dialect* is a module (or object) with these functions: ``kos.train.ops.numpy`` is the first.  Every operation writes
into arrays that it is given.  It takes scratch memory from the given arena, and frees it before it returns.  Its
backward is written by hand beside it.

Shapes: N tokens of a micro-batch (B samples of T), D hidden, F features out of a linear, V vocabulary, H query heads, K
key/value heads, d head size, W = (H + 2K) d.  Linears are (out, in) as in Hugging Face.  Arrays are C-contiguous,
except those of ``empty_columns``: their memory order is the dialect's own.  ``accumulate`` adds to a weight's gradient
instead of writing it.  Nothing reads an output before it is written, so outputs may start as NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np

from kos.memory.arena import Arena
from kos.train.ops import Array, Attend, Batch, Mask, Normalize, Scaled


class Ops(Protocol):
    """What a dialect offers."""

    one_scale: bool
    """Whether products take one scale for a whole matrix in 8 bits, and not one for each block."""

    few_rows: int
    """Up to so many rows ``linear_few`` computes. On CPUs 1: a product's bits depend on its number of rows."""

    overlap_rows: int | None
    """The fewest rows of a product for which it pays to split one in two, so that collectives overlap. None: never."""

    matrix_batch: int
    """Up to so many elements of small matrices Muon orthogonalises together: each alone leaves a GPU idle. 0: one."""

    multiprocessors: int
    """How many run blocks of threads. On CPUs 1."""

    def make_arena(self) -> Arena:
        """An empty arena over the dialect's memory."""

    def zeros(self, shape: Any, dtype: Any) -> Array:
        """A new array outside of any arena."""

    def step(self, arena: Arena) -> AbstractContextManager[None]:
        """A context for one pass: frees all of ``arena`` at its end, and suppresses warnings of inf and nan."""

    def statistics_dtype(self, dtype: Any) -> Any:
        """The dtype of ``rstd``, ``log_sum_exp``, losses and counts where activations are of ``dtype``."""

    def indices(self, source: Array, arena: Arena) -> Array:
        """A field of a ``Batch``, of the host or the dialect's own, as the operations take it."""

    def empty_columns(self, arena: Arena, rows: int, columns: int, dtype: Any) -> Array:
        """An uninitialised array, in the memory order that ``rope``, ``attention`` and ``swiglu`` require."""

    def copy(self, source: Array, out: Array) -> None:
        """out = source; either may be in host memory."""

    def to_host(self, array: Array) -> np.ndarray:
        """A new copy in host memory."""

    def zero(self, out: Array) -> None:
        """out = 0."""

    def add(self, a: Array, b: Array, out: Array) -> None:
        """out = a + b; ``out`` may be one of them."""

    def add_tree(self, terms: Array, out: Array) -> None:
        """out = ((t0 + t1) + (t2 + t3)) + …, of as many ``terms`` as a power of two, which are overwritten."""

    def embedding(self, tokens: Array, table: Array, out: Array, first: int | None = None) -> None:
        """out (N, D) = rows ``tokens`` (N,) of ``table`` (V, D).

        A token outside is refused by InvalidArgument, or, where the host cannot look, gives a row of NaN.  ``first``
        says that the table is a part of a vocabulary, from that row on: a token outside of it gives zeros.
        """

    def embedding_backward(
        self, d_out: Array, tokens: Array, d_table: Array, accumulate: bool, arena: Arena, first: int | None = None,
        padding: int | None = None,
    ) -> None:  # fmt: skip
        """d_table (V, D): sums of the rows of ``d_out`` (N, D) by token, but not of ``padding``; ``first`` as above."""

    def linear(
        self, x: Array, weight: Array, out: Array, residual: Array | None = None, bias: Array | None = None
    ) -> None:
        """out (N, F) = x (N, D) weight^T + residual (N, F) + bias (F,), weight (F, D)."""

    def linear_input_gradient(self, d_out: Array, weight: Array, dx: Array) -> None:
        """dx (N, D) = d_out (N, F) weight, from which the backward continues."""

    def linear_weight_gradient(
        self, d_out: Array, x: Array, d_weight: Array, accumulate: bool, arena: Arena, outputs: int | None = None
    ) -> None:
        """d_weight (F, D) = d_out^T x, for which nothing waits but the optimizer.  If ``outputs`` is given, a sum over
        many tokens may be split into parts, the same in every layout. It is the size of d_weight on all ranks of tp."""

    def bits_of_parts(self, dtype: Any) -> bool:
        """Whether a matmul of arrays of ``dtype`` gives the same bits when it is computed part by part.  The parts are
        blocks of its output, so they do not split its sums."""

    def product_of_parts(
        self, x: Array, weight: Array, out: Array, transposed: bool, parts: Sequence[Sequence[slice]], arena: Arena
    ) -> bool:
        """out = x weight, or x weight^T if ``transposed``. Its sums are added as a binary tree over ``parts``.

        Each part is a list of slices of the columns of ``x``, and all parts have the same sizes of slices. ``out`` may
        be of ``statistics_dtype``. Returns False if the dialect has no kernel for these arrays, and computes nothing.
        """

    def columns_of(self, x: Array, columns: slice) -> Array:
        """A view of some columns of x (N, F), as ``low_rank`` and ``linear_weight_gradient`` take it."""

    def low_rank(
        self, x: Array, weight: Array, out: Array, transposed: bool, factor: float, accumulate: bool, arena: Arena
    ) -> None:
        """out = factor x weight, or factor x weight^T if ``transposed``; added to ``out`` if ``accumulate``.

        A product with A or B of an adapter. x (N, K) and out (N, F) may be of ``columns_of``.
        """

    def quantize(self, x: Array, rows: Scaled | None, columns: Scaled | None, arena: Arena) -> None:
        """rows (N, F) = x in 8 bits, of x (N, F), and columns (F, N) the same transposed; either may be None.

        Their dtype is float8_e4m3fn or float8_e5m2. The scale of each block of 128 x 128, or of all, becomes the
        smallest power of two with which every number of it, rounded to bfloat16, is in the format's range: none is
        saturated. It is at least 2^-100. If one of these numbers is not finite, the scale becomes NaN, and so does all
        that is computed with it. If all are 0, it is 1.
        """

    def quantize_rms_norm(
        self, x: Array, norm: Normalize, rstd: Array, rows: Scaled | None, columns: Scaled | None, arena: Arena
    ) -> None:
        """RMSNorm of ``normalize``, whose output is quantized and not written."""

    def quantize_swiglu(self, gate_up: Array, rows: Scaled | None, columns: Scaled | None, arena: Arena) -> None:
        """``quantize`` of what ``swiglu`` writes."""

    def quantize_swiglu_backward(
        self, d_out: Array, gate_up: Array, rows: Scaled | None, columns: Scaled | None, arena: Arena
    ) -> None:
        """``quantize`` of what ``swiglu_backward`` writes: rows (N, 2F), columns (2F, N). F is a multiple of 128."""

    def scaled_product(
        self, a: Scaled, b: Scaled, out: Array, residual: Array | None, bias: Array | None, arena: Arena,
        rounded: bool = True,
    ) -> None:  # fmt: skip
        """out (M, N) = a (M, K) b (N, K)^T + residual (M, N) + bias (N,), of 8-bit a and b: a first, a second operand.

        ``residual`` may be ``out``. If ``rounded``, ``out`` is an activation: in bfloat16, and where its dtype is
        wider, of numbers of bfloat16. On a GPU sizes are multiples of 16, and a and b are not both float8_e5m2.
        """

    def sum_rows(self, x: Array, out: Array, accumulate: bool, arena: Arena) -> None:
        """out (F,) = sum of the rows of x (N, F): a bias's gradient."""

    def normalize(self, x: Array, norm: Normalize, out: Array, statistics: Array) -> None:
        """RMSNorm: out (N, D) = x rstd weight.  With a bias LayerNorm: out = (x - mean) rstd weight + bias.

        ``statistics`` are kept for the backward: rstd (N,) = 1 /
        sqrt(mean(x^2) + eps), or those of LayerNorm, (2, N): rstd of x - mean, and mean.
        """

    def normalize_backward(
        self, d_out: Array, x: Array, norm: Normalize, statistics: Array, dx: Array, d_weight: Array, accumulate: bool,
        arena: Arena, d_bias: Array | None = None,
    ) -> None:  # fmt: skip
        """ADDS to dx (N, D), the gradient of the residual stream; d_weight, d_bias (D,).  Overwrites ``d_out``."""

    def head_norm(self, x: Array, norm: Normalize, heads: slice, raw: Array) -> None:
        """Each of ``heads`` of x (N, W), of the size d of the norm's weight (d,), becomes its RMS norm times the scale.

        What it was goes to the same heads of ``raw`` (N, R), for the backward. Both are of ``empty_columns``.
        """

    def head_norm_backward(
        self, raw: Array, norm: Normalize, heads: slice, dx: Array, d_weight: Array, accumulate: bool, arena: Arena
    ) -> None:
        """Replaces the gradient of the normed ``heads`` in dx (N, W) by that of ``raw``; d_weight (d,)."""

    def rope_tables(
        self, frequencies: Sequence[float], positions: Sequence[int], dtype: Any, length: float = 1.0
    ) -> tuple[Array, Array]:
        """cos and sin (T, d / 2) of position x frequency, in radians a token; ``rope`` takes the first T rows.

        Both are multiplied by ``length``.
        """

    def rope(self, qkv: Array, tables: tuple[Array, Array], head_dim: int, heads: int, arena: Arena) -> None:
        """Rotate the first ``heads`` heads of ``qkv`` (N, W) in place, by halves (Hugging Face's order)."""

    def rope_backward(self, d_qkv: Array, tables: tuple[Array, Array], head_dim: int, heads: int, arena: Arena) -> None:
        """Rotate back, in place."""

    def attention_mask(
        self, document_starts: Array | None, window: int | None, mask: Mask, positions: Array | None = None,
        key_positions: Array | None = None,
    ) -> None:  # fmt: skip
        """Write ``mask``: a query sees keys of its document, and of the last ``window`` positions, its own included.

        ``document_starts`` (B, T), int32, are a ``Batch``'s: where each query's document begins in the sequence, which
        must not decrease along a sample; None: one document.  ``window``, in tokens, is Hugging Face's
        ``sliding_window``; None: no window.  ``positions`` and ``key_positions`` (T,), int32, increasing: of the
        queries and the keys of every sample, where those are parts of a sequence; the keys' are by default the
        queries', and those 0 to T - 1.  InvalidArgument if the window is below 1.  The starts are not looked at
        (``Batch.check`` does that); a query that does not see itself has no result.
        """

    def attention(self, attend: Attend, arena: Arena) -> None:
        """Write ``out`` and ``log_sum_exp``; to others, merge with the attention to other keys that both hold.

        l = log(exp(l0) + exp(l1)), out = exp(l0 - l) out0 + exp(l1 - l) out1; both are of the statistics' dtype then.
        Tokens that are no queries stay, and so do queries that see none of the keys. Time and work are those of the
        blocks that the mask leaves.
        """

    def attention_backward(
        self, attend: Attend, d_out: Array, d_qkv: Array, arena: Arena, d_kv: Array | None = None
    ) -> None:
        """d_qkv (N, W) from d_out (N, H d) and the forward's record; probabilities are computed again, not kept.

        To others: ADDS to the heads of q in ``d_qkv``; writes ``d_kv``, of the shape of ``kv``, 0 outside of the keys.
        ``out`` and ``log_sum_exp`` are merged over all keys; ``d_qkv`` and ``d_kv`` are of the statistics' dtype.
        """

    def empty_cache(self, sequences: int, kv_heads: int, head_dim: int, capacity: int, dtype: Any) -> Array:
        """Memory for the keys and values of a layer, in the dialect's own order; the first dimension is ``sequences``.

        A sequence has up to ``capacity`` tokens.
        """

    def append_to_cache(self, attend: Attend, cache: Array, positions: Array) -> None:
        """Write k and v of ``attend.qkv`` to ``cache``: a sequence's first token to its place in ``positions`` (B,)."""

    def attention_to_cache(
        self, attend: Attend, cache: Array, positions: Array, window: int | None, arena: Arena
    ) -> None:
        """Write ``out``: attention of one query a sequence, that at ``positions``, to the cached keys up to its own.

        With a ``window`` to the last ``window`` keys. ``log_sum_exp`` is not written. A result has the same bits
        whatever the other sequences are.
        """

    def linear_few(
        self, x: Array, weight: Array, out: Array, residual: Array | None = None, bias: Array | None = None
    ) -> None:
        """``linear`` of up to ``few_rows`` rows: a row's result has the same bits whatever the other rows are."""

    def replayable(self, work: Callable[[], None]) -> Callable[[], None]:
        """A function that does ``work`` again, on the same arrays: on a GPU one CUDA graph.  Does it once."""

    def keys_and_values(self, attend: Attend, arena: Arena) -> Array:
        """k and v of ``qkv``, contiguous, N x 2 K d in the dialect's own order: what a rank sends to another.

        A view of ``qkv``, or a copy in ``arena``.
        """

    def add_keys_and_values(self, d_kv: Array, d_qkv: Array) -> None:
        """ADDS ``d_kv`` to the heads of k and v in ``d_qkv`` (N, W), of the same dtype."""

    def swiglu(self, gate_up: Array, out: Array, arena: Arena) -> None:
        """out (N, F) = silu(gate) up; ``gate_up`` (N, 2F) holds gate, then up."""

    def swiglu_backward(self, d_out: Array, gate_up: Array, out: Array | None, d_gate_up: Array, arena: Arena) -> None:
        """d_gate_up (N, 2F) from d_out (N, F); ``out`` is what the forward wrote, if that was saved."""

    def fuses_swiglu(self, d_out: Any, weight: Any, gate_up: Array, arena: Arena) -> bool:
        """Whether ``linear_swiglu_backward`` takes these operands, and is faster than the two operations.

        If this is not known yet, it may be measured, with memory of ``arena``.
        """

    def linear_swiglu_backward(
        self, d_out: Array, weight: Array, gate_up: Array, d_gate_up: Array, arena: Arena
    ) -> None:
        """``swiglu_backward`` of the result of ``linear_input_gradient``, which a GPU does not write to memory.

        A GPU supports only operands for which ``fuses_swiglu`` is true.
        """

    def gelu(self, x: Array, out: Array, arena: Arena) -> None:
        """out (N, F) = x sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3): GPT-2's approximation by tanh."""

    def gelu_backward(self, d_out: Array, x: Array, dx: Array, arena: Arena) -> None:
        """dx (N, F) from d_out (N, F), which is overwritten."""

    def count_targets(self, targets: Array, out: Array) -> None:
        """out (1,) = how many of ``targets`` (N,) are not ignored (-1), at least 1."""

    def cross_entropy(self, logits: Array, targets: Array, count: Array | None, losses: Array, arena: Arena) -> None:
        """losses (N,) = -log softmax(logits (N, V))[target], 0 where ignored.  Overwrites ``logits``.

        With ``count`` (1,) they become the gradient of sum(losses) / count.
        """

    def scale_rows(self, x: Array, targets: Array, weights: Array | None, count: Array | None) -> None:
        """x[i] *= weights[i] / count, of x (N, C); 0 where the target is ignored. None stands for ones."""

    def custom_loss(self, loss: Any, logits: Array, batch: Batch, losses: Array, backward: bool) -> None:
        """losses (N,), those of a ``Loss``; if ``backward``, ``logits`` become the gradient of their sum."""

    def logit_statistics(self, logits: Array, targets: Array, first: int, out: Array, arena: Arena) -> None:
        """Of ``logits`` (N, v), a part of a vocabulary from row ``first`` on: what a loss needs of it.

        out (3, N), of the statistics' dtype: the maximum, the sum of exp(logit - maximum), and the target's logit, 0
        where it is not in this part.
        """

    def cross_entropy_of_parts(
        self, logits: Array, targets: Array, first: int, statistics: Array, count: Array | None, losses: Array,
        arena: Arena,
    ) -> None:  # fmt: skip
        """``cross_entropy`` of a vocabulary in parts; ``logits`` (N, v) is the part that begins at ``first``.

        ``statistics`` (parts, 3, N) are those of all parts.
        """

    def orthogonalize(self, x: Array, arena: Arena) -> None:
        """Bring the singular values of each of the matrices x (n, R, C) into about 0.7 to 1.2, in place.

        Five Newton-Schulz steps from x / |x|, in the dtype of ``x``: for U S V^T, about U V^T (Muon's).
        """

    def mean_loss(self, losses: Array, count: Array, out: Array) -> None:
        """out (1,), float64, = sum(losses) / count."""
