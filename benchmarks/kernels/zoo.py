"""The building blocks of cases: tensors, launches of naive kernels, results of the numpy dialect."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from kos.cuda.kernels import load_kernel
from kos.memory.arena import Arena
from kos.memory.array import Array
from kos.train.device.costs import cost
from kos.train.model.shape import ModelShape
from kos.train.ops import Normalize
from kos.train.ops import numpy as reference
from kos.train.ops.cuda import CudaOps

DEVICE = "cuda"
NAIVE = Path(__file__).parent / "naive.cu"

EAGER: dict[str, Callable[..., torch.Tensor]] = {
    "cast": lambda x: x.bfloat16(),
    "swiglu": lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "rms_norm": lambda x, w: F.rms_norm(x, w.shape, w, 1e-5),
    "layer_norm": lambda x, w, b: F.layer_norm(x, w.shape, w, b, 1e-5),
    "sum_rows": lambda x: x.sum(0),
    "rope": lambda x, cos, sin: (x * cos + torch.cat((-x.chunk(2, -1)[1], x.chunk(2, -1)[0]), -1) * sin).to(x.dtype),
    "repeat_kv": lambda kv, group: kv.repeat_interleave(group, 1),
    "repeat_kv_backward": lambda d, group, dtype: d.unflatten(1, (-1, group)).sum(2).to(dtype),
    "embedding": lambda tokens, table: F.embedding(tokens, table),
    "cross_entropy": lambda x, t: F.cross_entropy(x.float(), t),
}


class Case(NamedTuple):
    """One operation on one set of inputs."""

    nbytes: int  # that must move: each input read once, each output written once
    torch: Callable[[], Any]
    writes: Sequence[torch.Tensor]  # by the fast and the naive version
    expected: Callable[[], list[np.ndarray]]  # in float64; to be asked before they run
    fast: Callable[[], None] | None = None  # None: what training does without
    naive: Callable[[], None] | None = None
    naive_share: float = 1  # of the work that ``naive`` does, where all of it would take too long
    flops: float = 0
    compiled: Callable[[], Any] | None = None  # torch's, where it is another function


class Zoo:
    """One model shape, on the device."""

    def __init__(self, shape: ModelShape, seq_len: int, dtype: torch.dtype) -> None:
        self.ops = CudaOps(0)
        self.arena = self.ops.make_arena()
        self.stream = torch.cuda.ExternalStream(int(self.ops.stream.handle))
        self.seq_len, self.dtype = seq_len, dtype
        self.hidden, self.intermediate = shape.hidden_size, shape.intermediate_size
        self.vocabulary = shape.vocab_size or 50_304
        self.heads = shape.num_attention_heads
        self.kv_heads = shape.num_key_value_heads or self.heads
        self.head_dim = self.hidden // self.heads
        self.functions = dict(EAGER)  # torch's, or compiled

    def random(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.float32, device=DEVICE).to(dtype or self.dtype)

    def integers(self, low: int, high: int, n: int) -> torch.Tensor:
        return torch.randint(low, high, (n,), dtype=torch.int32, device=DEVICE)

    def tokens(self, n: int) -> torch.Tensor:
        """Low tokens are frequent, as in text."""
        return (self.vocabulary * torch.rand(n, device=DEVICE) ** 4).int()

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.full(shape, float("nan"), dtype=dtype or self.dtype, device=DEVICE)

    def zeros(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=DEVICE)

    def constant(self, value: float) -> torch.Tensor:
        return torch.full((1,), value, dtype=torch.float32, device=DEVICE)

    def naive(self, name: str, items: int, *arguments: Any, block: int | None = None) -> Callable[[], None]:
        """A launch of a naive kernel, one thread an item, or a block of ``block``."""
        kernel = load_kernel(NAIVE, name, 0, DTYPE=str(self.dtype).removeprefix("torch."))
        operands = [as_array(x) for x in arguments]  # which keep the tensors
        grid, threads = (-(-items // 256), 256) if block is None else (items, block)
        return lambda: kernel(self.ops.stream, grid, threads, *(getattr(x, "pointer", x) for x in operands))

    def case(
        self, name: str, *arguments: Any, writes: Sequence[torch.Tensor], columns: bool = False, **more: Any
    ) -> Case:
        """The case of an operation that both dialects have: the GPU's is timed, NumPy's in float64 is the reference.

        Bytes and flops are those that the trainer's ``--profile`` counts, unless given.
        """

        def expected() -> list[np.ndarray]:
            host = [each_tensor(lambda x: to_host(x, columns), x) for x in arguments]
            getattr(reference, name)(*(Arena() if x is self.arena else x for x in host))
            return [x for x, there in zip(host, arguments, strict=True) if any(there is out for out in writes)]

        fast = functools.partial(getattr(self.ops, name), *map(as_array, arguments))
        nbytes, flops = cost(name, fast.args)
        return Case(**{"fast": fast, "writes": writes, "expected": expected, "nbytes": nbytes, "flops": flops, **more})


def in_order(*runs: Callable[[], object]) -> Callable[[], None]:
    def run_all() -> None:
        for run in runs:
            run()

    return run_all


def backward_of(output: torch.Tensor, leaves: Sequence[torch.Tensor], d_output: torch.Tensor) -> Callable[[], Any]:
    """torch's."""
    return lambda: torch.autograd.grad(output, leaves, d_output, retain_graph=True)


def as_array(x: Any) -> Any:
    """A tensor, or each of a record, as the operations take it; anything else as it is."""
    return each_tensor(Array.from_dlpack, x)


def each_tensor(convert: Callable[[torch.Tensor], Any], x: Any) -> Any:
    """A tensor, or each of a ``Normalize``, converted; anything else as it is."""
    if isinstance(x, Normalize):
        return x._make(each_tensor(convert, each) for each in x)
    return convert(x) if isinstance(x, torch.Tensor) else x


def to_host(tensor: torch.Tensor, columns: bool = False) -> np.ndarray:
    """A copy in float64, integers as they are; ``columns``: matrices in the order of numpy's ``empty_columns``."""
    dtype = torch.float64 if tensor.is_floating_point() else tensor.dtype
    array = tensor.detach().to(dtype, copy=True).cpu().numpy()
    return np.asfortranarray(array) if columns and array.ndim == 2 else array


def size_of(*tensors: torch.Tensor) -> int:
    """Bytes."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
