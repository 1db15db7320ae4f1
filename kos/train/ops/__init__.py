"""What the model and the operations exchange: batches, attentions, norms, matrices in 8 bits, losses.

The operations themselves are those of ``kos.train.ops.protocol``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from kos.errors import DataError, InvalidArgument

Array = Any  # a dialect's own: numpy's ndarray, a device tensor
NEWTON_SCHULZ = 5 * ((3.4445, -4.7750, 2.0315),)
"""Of each step of ``orthogonalize``: these times x, (x x^T) x and (x x^T)^2 x (Jordan et al. 2024)."""
LEAST_NORM = 1e-7  # of a matrix that is divided by it
SCALE_BLOCK = 128
"""Rows and columns of a matrix in 8 bits that share a scale."""


class Batch(NamedTuple):
    """Arrays of one shape, (sequences, tokens), on the host or on a device; None: the data has no such field.

    ``targets`` are the tokens that follow; the loss leaves out -1.  ``document_starts`` are where each token's document
    begins in the sequence, of which a rank may hold some tokens only.  The loss of each target is multiplied by its
    weight in ``weights``, float32; the other fields are int32.
    """

    tokens: Any
    targets: Any = None
    document_starts: Any = None
    weights: Any = None

    def __repr__(self) -> str:
        """The dtype and shape of each field that is present."""
        present = ((name, field) for name, field in self._asdict().items() if field is not None)
        return f"Batch({', '.join(f'{name}={field.dtype} {tuple(field.shape)}' for name, field in present)})"

    def check(self) -> None:
        """DataError unless ``document_starts``, of whole sequences on the host, are what attention expects."""
        if (starts := self.document_starts) is None:
            return
        wrong = (starts < 0) | (starts > np.arange(starts.shape[1]))
        wrong[:, 1:] |= np.diff(starts) < 0
        if wrong.any():
            row, at = np.argwhere(wrong)[0]
            expected = f"from {starts[row, at - 1] if at else 0}, the start before it, to {at}"
            raise DataError(f"document start of token {at} of a sequence: expected {expected}, got {starts[row, at]}")

    def map(self, function: Callable[[Any], Any]) -> Batch:
        """``function`` of each field that is present."""
        return Batch(*(None if field is None else function(field) for field in self))

    def rows(self, rows: slice) -> Batch:
        """Views of some rows of each field."""
        return self.map(lambda field: field[rows])

    @classmethod
    def of_memory(cls, memory: Any, present: Collection[str]) -> Batch:
        """Views of int32 ``memory`` (fields, ...), in which the fields that are ``present`` lie one after another."""
        fields = dict(zip((name for name in cls._fields if name in present), memory, strict=True))
        if "weights" in fields:
            fields["weights"] = fields["weights"].view(np.float32)
        return cls(**fields)


class Normalize(NamedTuple):
    """A norm: its weights, and the settings that say how it computes.

    RMSNorm, LayerNorm, the norms of heads and the norms in 8 bits take this record, on CPUs and GPUs.
    """

    weight: Any
    """(D,), an array of the dialect."""

    eps: float
    bias: Any = None
    """(D,), of LayerNorm."""


def attended_pairs(tokens: float, window: int | None = None, offset: float = 0) -> float:
    """The pairs of query and key in causal attention: T²/2, or T W - W²/2 in a sliding window of W <= T tokens.

    They are between ``tokens`` consecutive queries and as many consecutive keys.  The first query is ``offset`` tokens
    after the first key; the formulas are for an offset of 0.  Pairs on the borders of the mask count half.
    """

    def within(distance: float) -> float:
        """The pairs whose query is at most ``distance`` tokens after the key."""
        near = max(-tokens, min(distance, tokens))
        return tokens * tokens / 2 + near * (tokens - abs(near) / 2)

    return within((window or math.inf) - offset) - within(-offset)


class Mask(NamedTuple):
    """Which keys queries see in attention, as ``attention_mask`` writes it: two arrays of int32, in tokens of a sample.

    A query sees no key before its first one. Of causal attention it sees those up to itself.  Neither array decreases
    along a sample: what queries see moves on with them.  So a block of queries has the first key of its first query,
    and a block of keys the last query of its last key; kernels skip all other blocks.
    """

    first_key: Array  # (B, T), of each query: 0 to T
    last_query: Array  # (B, T), of each key: the last query whose first key is not after it, or -1
    pairs: float | None = None  # of a sample, by ``attended_pairs``; None: there is no window

    def of_samples(self, samples: slice) -> Mask:
        """The mask of these samples."""
        return self._replace(first_key=self.first_key[samples], last_query=self.last_query[samples])

    def check(self, samples: int, length: int) -> None:
        """InvalidArgument unless this is of ``samples`` of ``length`` tokens."""
        if tuple(self.first_key.shape) != (samples, length):
            raise InvalidArgument(
                f"attention: expected a mask of {samples} x {length} tokens, as qkv has, "
                f"got one of {' x '.join(map(str, self.first_key.shape))}"
            )

    def check_sources(self, document_starts: Array | None, window: int | None, *positions: Array | None) -> None:
        """InvalidArgument if this cannot be written from these arguments of ``attention_mask``."""
        if window is not None and window < 1:
            raise InvalidArgument(f"attention_mask: expected a window of at least 1 token, got {window}")
        names = ("document_starts", "positions", "key_positions")
        shapes = (self.first_key.shape, self.first_key.shape[1:], self.last_query.shape[1:])
        for name, array, shape in zip(names, (document_starts, *positions), shapes, strict=True):
            if array is not None and tuple(array.shape) != tuple(shape):
                raise InvalidArgument(
                    f"attention_mask: expected {name} of shape {tuple(shape)}, got {tuple(array.shape)}"
                )


@dataclass(frozen=True, slots=True)
class Attend:
    """An attention: its arrays, its heads, and which keys queries see. Query head h reads kv head h // (H / K).

    By default it is causal: queries see keys of their own tokens. With ``kv`` it is attention *to others*, not causal:
    the tokens ``queries`` of each sample see the tokens ``keys`` of another rank's, both slices with start and stop.
    """

    qkv: Array  # (N, W): the heads of q, then k, then v
    heads: int
    kv_heads: int
    out: Array  # (N, H d), of ``empty_columns``
    log_sum_exp: Array  # (B, H, T), of the scaled scores: kept for the backward
    mask: Mask | None = None  # of all T queries and keys; of causal attention, each query must see itself
    kv: Array | None = None  # of ``keys_and_values``: as many samples and tokens as qkv has
    queries: slice = field(default_factory=lambda: slice(0, 0))
    keys: slice = field(default_factory=lambda: slice(0, 0))

    @property
    def shape(self) -> tuple[int, int]:
        """H and K."""
        return self.heads, self.kv_heads

    @property
    def head_dim(self) -> int:
        return int(self.qkv.shape[1]) // (self.heads + 2 * self.kv_heads)

    @property
    def length(self) -> int:
        """T, the tokens of a sample."""
        return int(self.log_sum_exp.shape[-1])

    @property
    def scale(self) -> float:
        """What multiplies scores."""
        return 1 / math.sqrt(self.head_dim)

    def of(self, rows: slice, samples: slice, mask: Mask | None = None) -> Attend:
        """The same of some samples, which have these ``rows``."""
        part = {"qkv": self.qkv[rows], "out": self.out[rows], "log_sum_exp": self.log_sum_exp[samples]}
        return replace(self, **part, mask=mask)

    def to(self, kv: Array, queries: slice, keys: slice, mask: Mask | None = None) -> Attend:
        """The same queries' attention to others."""
        return replace(self, kv=kv, queries=queries, keys=keys, mask=mask)


class Scaled(NamedTuple):
    """A matrix (N, K) in 8 bits: ``values`` times ``scales``, a float32 for each block of ``SCALE_BLOCK`` squared.

    Their shape is that of ``scales_shape``. Products take one a row of a block for the first operand, and one a
    block for the second (cuBLASLt's 1 x 128 and 128 x 128).
    """

    values: Array
    scales: Array


def scales_shape(rows: int, columns: int, first: bool, parts: int = 1, one: bool = False) -> tuple[int, ...]:
    """Of a matrix (rows, columns) of which blocks along the columns are added up.

    ``first`` operand: (blocks along, rows). With ``parts`` of its rows, multiplied apart: (parts, blocks along, rows of
    a part). Second: (blocks of rows, blocks along), the latter rounded up to a multiple of 4, and the rest of them 1.
    ``one``, for all: (1,).
    """
    if one:
        return (1,)
    along, across = -(-columns // SCALE_BLOCK), -(-rows // SCALE_BLOCK)
    if not first:
        return across, -(-along // 4) * 4
    return (along, rows) if parts == 1 else (parts, along, rows // parts)


class CudaLoss(NamedTuple):
    """A loss of one's own for GPUs, as a kernel in CUDA C++.  It runs within the step's CUDA graph.

    ``source`` defines ``extern "C" __global__ void loss(DTYPE* logits, const int* targets, const float* weights,
    float* losses, int vocabulary)``.  Block i, of ``threads`` threads, computes token i: it writes ``losses[i]``, and
    overwrites the ``vocabulary`` logits from ``logits[i * vocabulary]`` on with the gradient of ``losses[i]``.
    ``weights`` is null if the batch has none.  ``DTYPE`` is ``float32`` or ``bfloat16``, as activations are:
    ``widen(x)`` is an element as a float, and ``narrow(value, x)`` stores one.

    The first step compiles the kernel, and raises CompileError with the compiler's messages.
    """

    source: str
    threads: int = 256


Loss = Callable[[Any, Batch], tuple[Any, Any]] | CudaLoss
"""A loss of one's own: a ``CudaLoss``, or a function ``(losses, gradient) = loss(logits, batch)``.

``logits`` (n, V) and the fields of ``batch``, (n,) each, are those of any n tokens of a micro-batch: NumPy's arrays on
CPUs, ``kos.memory.Array`` on GPUs.  ``losses`` (n,) are the losses of these tokens, and ``gradient`` (n, V) is that of
their sum; it may be ``logits``, overwritten.  On GPUs both are arrays with ``__dlpack__``.  What a loss gives for a
target of -1 counts as 0.
"""


def of_function(own: Any, losses: Array, gradient: Array) -> tuple[Any, Any]:
    """What a loss of one's own returned.

    Raises InvalidArgument unless these are arrays of the shapes of ``losses`` and ``gradient``, and the gradient has a
    floating-point dtype.
    """
    got: Any = type(own).__name__
    if isinstance(own, tuple):
        got = [tuple(each.shape) if hasattr(each, "shape") else type(each).__name__ for each in own]
    if got != (both := [tuple(losses.shape), tuple(gradient.shape)]):
        raise InvalidArgument(f"loss: expected losses and their gradient, of shapes {both}, got {got}".replace("'", ""))
    if "float" not in (dtype := f"{getattr(own[1], 'dtype', 'float')}"):
        raise InvalidArgument(f"loss: expected a floating-point gradient, got {dtype}")
    return own
