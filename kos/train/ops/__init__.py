"""The vocabulary that the model is written in.

It is the public functions of ``kos.train.ops.numpy``, whose docstrings say what each computes. A *dialect* is that
module, or an object with methods of these names and parameters (``kos.train.ops.cuda.dialect.CudaOps``).  Every
operation writes into arrays that it is given.  It takes scratch memory from the given arena, and frees it
before it returns.  Its backward is written by hand beside it.

Shapes: N tokens of a micro-batch (B samples of T), D hidden, F features out of a linear, V vocabulary,
H query heads, K key/value heads, d head size, W = (H + 2K) d.  Linears are (out, in) as in Hugging Face.
Arrays are C-contiguous, except those of ``empty_columns``: their memory order is the dialect's own.

``accumulate`` adds to a weight's gradient instead of writing it.  Nothing reads an output before it is
written, so outputs may start as NaN.
"""

from typing import Any

Array = Any  # a dialect's own: numpy's ndarray, a device tensor
Ops = Any  # a dialect
