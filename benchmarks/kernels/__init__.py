"""The kernel zoo: each operation's naive and fast version side by side, checked, then timed.

usage: python -m benchmarks.kernels [--preset 1b] [--tokens 8192] [--seq-len 4096] [--dtype bfloat16]
                                    [--only rms_norm …] [--compile] [--json FILE]

Checked: both versions, on a few tokens, against the numpy dialect in float64; the error is told in rounding
units of the dtype.  Timed: replays of a CUDA graph over several sets of inputs, larger together than the L2
cache; the median, against the time that the bytes which must move take at the speed of a large device copy
measured in the same run, and against torch, eager and (with ``--compile``) compiled too.

Fast are the operations of the cuda dialect that a step runs (``kos/train/ops/cuda``), naive
those of ``naive.cu``.  ``repeat_kv`` has no fast version: attention reads K and V where they lie.  The residual is
added by the product before a norm (``linear_residual``), its gradient by the norm's backward; learned positions are
``add``, their gradient ``sum_rows``.  RoPE's tables have no row: they are made once, on the host.  The naive products
run on 512 tokens at most, and their times are scaled to all.

On request: attention with a mask of 8 equal documents a sample, or of a window of an eighth.  Torch is its
``varlen_attn`` then, and compiled its FlexAttention; flops are those of full causal attention times what is seen of it.
For T 8,192: ``--preset 8b --seq-len 8192 --only attention attention_backward attention_documents
attention_documents_backward attention_window attention_window_backward --compile``.
"""

from __future__ import annotations

OPERATIONS = {  # by the module that makes their cases
    "elementwise": ["add", "cast", "zero", "swiglu", "swiglu_backward", "gelu", "gelu_backward"],
    "norms": ["rms_norm", "rms_norm_backward", "layer_norm", "layer_norm_backward", "sum_rows"],
    "linear": ["linear", "linear_residual", "linear_input_gradient", "linear_weight_gradient"],
    "attention": [
        "rope", "rope_backward", "repeat_kv", "repeat_kv_backward", "attention", "attention_backward",
    ],
    "embedding": ["embedding", "embedding_backward"],
    "loss": ["count_targets", "cross_entropy", "mean_loss"],
    "optimizer": ["gradient_norm", "adamw"],
}  # fmt: skip
ON_REQUEST = [  # context parallelism's, and those of masks
    "attention_to", "attention_to_backward", "attention_documents", "attention_documents_backward",
    "attention_window", "attention_window_backward",
]  # fmt: skip
