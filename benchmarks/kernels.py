"""The kernel zoo: each operation's naive and fast version side by side, checked, then timed.

usage: python -m benchmarks.kernels [--preset 1b] [--tokens 8192] [--dtype bfloat16] [--only rms_norm …]
                                    [--compile] [--json FILE]

Checked: both versions, on a few tokens, against the numpy dialect in float64; the error is told in rounding
units of the dtype.  Timed: replays of a CUDA graph over several sets of inputs, larger together than the L2
cache; the median, against the time that the bytes which must move take at the speed of a large device copy
measured in the same run, and against torch, eager and (with ``--compile``) compiled too.
"""

from __future__ import annotations

import argparse
import functools
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

try:
    import torch
    import torch.nn.functional as F
except ImportError:  # told of once the arguments are known to be right
    torch = F = None

from benchmarks.collectives import report
from kos import cuda
from kos.cuda import streams
from kos.cuda.kernels import load_kernel
from kos.files import check_writable
from kos.memory.arena import Arena
from kos.memory.array import Array
from kos.train.machine import peak_flops
from kos.train.model_section import ModelSection
from kos.train.ops import numpy as reference
from kos.train.ops.adamw import CudaAdamW
from kos.train.ops.cuda import CudaOps
from kos.train.ops.cudnn import CudnnAttention
from kos.train.optimizer import Schedule
from kos.train.parameters import Parameters
from kos.train.presets import PRESETS

DEVICE = "cuda"
NAIVE = Path(__file__).parent / "naive_kernels.cu"
UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8} if torch else {}
CHECKED_TOKENS = 96
ROTATED = 256 << 20  # bytes of inputs in rotation


EAGER: dict[str, Callable[..., torch.Tensor]] = {
    "rms_norm": lambda x, w: F.rms_norm(x, w.shape, w, 1e-5),
    "swiglu": lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
    "cross_entropy": lambda x, t: F.cross_entropy(x.float(), t),
    "embedding": lambda tokens, table: F.embedding(tokens, table),
    "rope": lambda x, cos, sin: (x * cos + torch.cat((-x.chunk(2, -1)[1], x.chunk(2, -1)[0]), -1) * sin).to(x.dtype),
}


class Case(NamedTuple):
    """One operation on one set of inputs."""

    nbytes: int  # that must move: each input read once, each output written once
    fast: Callable[[], None]
    torch: Callable[[], Any]
    writes: Sequence[torch.Tensor]  # by the fast and the naive version
    expected: Callable[[], list[np.ndarray]]  # in float64; to be asked before they run
    naive: Callable[[], None] | None = None
    flops: float = 0


class Zoo:
    """Makes the cases of one model shape."""

    def __init__(self, shape: ModelSection, seq_len: int, dtype: torch.dtype) -> None:
        self.ops = CudaOps(0)
        self.arena = self.ops.make_arena()
        self.stream = torch.cuda.ExternalStream(int(self.ops.stream.handle))
        self.shape, self.seq_len, self.dtype = shape, seq_len, dtype
        self.functions: dict[str, Callable[..., torch.Tensor]] = dict(EAGER)  # or compiled, by ``time``

    def random(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.float32, device=DEVICE).to(dtype or self.dtype)

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.full(shape, float("nan"), dtype=dtype or self.dtype, device=DEVICE)

    def naive(self, name: str, items: int, *arguments: Any, block: int = 256) -> Callable[[], None]:
        """A launch of a naive kernel, one thread an item."""
        kernel = load_kernel(NAIVE, name, 0, DTYPE=str(self.dtype).removeprefix("torch."))
        values = [getattr(_array(x), "pointer", x) for x in arguments]
        return lambda: kernel(self.ops.stream, -(-items // 256) if block == 256 else items, block, *values)

    def case(self, name: str, *arguments: Any, writes: Sequence[torch.Tensor], **more: Any) -> Case:
        """Of an operation of both dialects: ours on the GPU is the fast one, numpy's in float64 what is expected."""

        def expected() -> list[np.ndarray]:
            host = [_host(x, name == "swiglu") if isinstance(x, torch.Tensor) else x for x in arguments]
            getattr(reference, name)(*(Arena() if x is self.arena else x for x in host))
            return [x for x, there in zip(host, arguments, strict=True) if any(there is out for out in writes)]

        fast = functools.partial(getattr(self.ops, name), *map(_array, arguments))
        return Case(**{"fast": fast, "writes": writes, "expected": expected, **more})

    # --- the operations ------------------------------------------------------------------------------

    def add(self, n: int) -> Case:
        d = self.shape.hidden_size
        a, b, out = self.random(n, d), self.random(n, d), self.empty(n, d)
        return self.case(
            "add", a, b, out, writes=[out], nbytes=_bytes(a, b, out),
            naive=self.naive("add", a.numel(), a, b, out, a.numel()),
            torch=lambda: torch.add(a, b, out=out),
        )  # fmt: skip

    def rms_norm(self, n: int) -> Case:
        d = self.shape.hidden_size
        x, w, out, rstd = self.random(n, d), self.random(d), self.empty(n, d), self.empty(n, dtype=torch.float32)
        return self.case(
            "rms_norm", x, w, 1e-5, out, rstd, writes=[out, rstd], nbytes=_bytes(x, w, out, rstd),
            naive=self.naive("rms_norm", n, x, w, np.float32(1e-5), out, rstd, n, d),
            torch=lambda: self.functions["rms_norm"](x, w),
        )  # fmt: skip

    def rms_norm_backward(self, n: int) -> Case:
        d = self.shape.hidden_size
        d_out, x, w, dx = self.random(n, d), self.random(n, d), self.random(d), self.random(n, d)
        dw = torch.zeros(d, dtype=torch.float32, device=DEVICE)
        rstd = x.float().square().mean(-1).add(1e-5).rsqrt()
        leaves = [x.clone().requires_grad_(), w.clone().requires_grad_()]
        y = self.functions["rms_norm"](*leaves)
        return self.case(
            "rms_norm_backward", d_out, x, w, rstd, dx, dw, False, self.arena, writes=[dx, dw],
            nbytes=_bytes(d_out, x, w, rstd, dx, dx, dw),
            naive=self.naive("rms_norm_backward", n, d_out, x, w, rstd, dx, dw, n, d),
            torch=lambda: torch.autograd.grad(y, leaves, d_out, retain_graph=True),
        )  # fmt: skip

    def rope(self, n: int) -> Case:
        heads, others, head_dim = self._heads()
        length = min(n, 1024)
        qkv = self.random(n, (heads + others) * head_dim)
        frequencies = 10_000.0 ** (-np.arange(head_dim // 2) / (head_dim // 2))
        tables = self.ops.rope_tables(frequencies, range(length), None)
        cos, sin = (torch.tensor(self.ops.to_host(t), device=DEVICE)[:, None].repeat(1, 1, 2) for t in tables)
        turned = qkv[:, : heads * head_dim].view(-1, length, heads, head_dim)

        def expected() -> list[np.ndarray]:
            x, tables64 = _host(qkv, columns=True), reference.rope_tables(frequencies, range(length), np.float64)
            reference.rope(x, tables64, head_dim, heads, Arena())
            return [x]

        row, items = qkv.shape[1], turned.numel() // 2
        return self.case(
            "rope", qkv, tables, head_dim, heads, self.arena, writes=[qkv], expected=expected,
            nbytes=2 * _bytes(turned),
            naive=self.naive("rope", items, qkv, np.float32(10_000), length, head_dim // 2, heads, row, items),
            torch=lambda: self.functions["rope"](turned, cos, sin),
        )  # fmt: skip

    def swiglu(self, n: int) -> Case:
        f = self.shape.intermediate_size
        gate_up, out = self.random(n, 2 * f), self.empty(n, f)
        return self.case(
            "swiglu", gate_up, out, self.arena, writes=[out], nbytes=_bytes(gate_up, out),
            naive=self.naive("swiglu", out.numel(), gate_up, out, f, out.numel()),
            torch=lambda: self.functions["swiglu"](gate_up),
        )  # fmt: skip

    def swiglu_backward(self, n: int) -> Case:
        f = self.shape.intermediate_size
        d_out, gate_up, d_gate_up = self.random(n, f), self.random(n, 2 * f), self.empty(n, 2 * f)

        def expected() -> list[np.ndarray]:
            dy, x, dx = (_host(tensor, columns=True) for tensor in (d_out, gate_up, d_gate_up))
            y = np.empty_like(dy)
            reference.swiglu(x, y, Arena())
            reference.swiglu_backward(dy, x, y, dx, Arena())
            return [dx]

        leaf = gate_up.clone().requires_grad_()
        y = self.functions["swiglu"](leaf)
        return self.case(
            "swiglu_backward", d_out, gate_up, d_out, d_gate_up, self.arena, writes=[d_gate_up], expected=expected,
            nbytes=_bytes(d_out, gate_up, d_gate_up),
            naive=self.naive("swiglu_backward", d_out.numel(), d_out, gate_up, d_gate_up, f, d_out.numel()),
            torch=lambda: torch.autograd.grad(y, leaf, d_out, retain_graph=True),
        )  # fmt: skip

    def cross_entropy(self, n: int) -> Case:
        """Forward and backward, of at most 2,048 tokens."""
        n, vocabulary = min(n, 2048), self._vocabulary()
        logits, losses = self.random(n, vocabulary), self.empty(n, dtype=torch.float32)
        targets = torch.randint(0, vocabulary, (n,), device=DEVICE)
        narrow, count = targets.int(), torch.tensor([float(n)], device=DEVICE)

        def both() -> None:
            leaf = logits.detach().requires_grad_()
            self.functions["cross_entropy"](leaf, targets).backward()

        return self.case(
            "cross_entropy_with_gradient", logits, narrow, count, losses, self.arena, writes=[logits, losses],
            nbytes=2 * _bytes(logits),
            naive=self.naive("cross_entropy", n, logits, narrow, count, losses, vocabulary, block=1024),
            torch=both,
        )  # fmt: skip

    def embedding(self, n: int) -> Case:
        table, tokens = self.random(self._vocabulary(), self.shape.hidden_size), self._tokens(n)
        out = self.empty(n, self.shape.hidden_size)
        return self.case(
            "embedding", tokens, table, out, writes=[out], nbytes=2 * _bytes(out),
            torch=lambda: self.functions["embedding"](tokens, table),
        )  # fmt: skip

    def embedding_backward(self, n: int) -> Case:
        """Added to an fp32 table, as a tied head's gradient is; torch writes a table of the dtype."""
        d, vocabulary = self.shape.hidden_size, self._vocabulary()
        d_out, tokens = self.random(n, d), self._tokens(n)
        d_table = torch.zeros(vocabulary, d, dtype=torch.float32, device=DEVICE)
        leaf = self.random(vocabulary, d).requires_grad_()
        y = self.functions["embedding"](tokens, leaf)
        return self.case(
            "embedding_backward", d_out, tokens, d_table, True, self.arena, writes=[d_table],
            nbytes=_bytes(d_out) + 2 * len(torch.unique(tokens)) * d * 4,
            naive=self.naive("embedding_backward", d_out.numel(), d_out, tokens, d_table, d, d_out.numel()),
            torch=lambda: torch.autograd.grad(y, leaf, d_out, retain_graph=True),
        )  # fmt: skip

    def adamw(self, n: int) -> Case:
        """The update alone, of n x hidden elements: fp32 state and gradients, a 16-bit copy of the weights."""
        size = n * self.shape.hidden_size
        weights = Parameters({"w": (n, self.shape.hidden_size)}, "float32", None, self.ops.zeros)
        copy, gradients = weights.like("bfloat16"), weights.like()
        w, g = self.random(size, dtype=torch.float32), self.random(size, dtype=torch.float32)
        torch.cuda.synchronize()
        weights.flat.copy_from(_array(w), self.ops.stream)
        gradients.flat.copy_from(_array(g), self.ops.stream)
        optimizer = CudaAdamW(self.ops, weights, copy, Schedule("constant", 1e-3, 0, 10, 1))
        optimizer.queue_norm(gradients)
        parameter = torch.nn.Parameter(w.clone())
        parameter.grad = g
        theirs = torch.optim.AdamW([parameter], lr=1e-3, weight_decay=0.1, fused=True)
        scalars = [np.float32(x) for x in (1e-3, 1e-3 / 0.1, 1 / np.sqrt(0.05), 0.1, 0.9, 0.95, 1e-8)]
        state = (weights.flat, gradients.flat, optimizer.exp_avg.flat, optimizer.exp_avg_sq.flat, copy.flat)
        return Case(
            nbytes=30 * size,
            fast=lambda: optimizer.queue_update(gradients),
            naive=self.naive("adamw", size, *state, *scalars, size) if self.dtype == torch.bfloat16 else None,
            torch=theirs.step,
            writes=[torch.from_dlpack(weights.flat)],
            expected=lambda: [_host(w) * (1 - 1e-4) - 1e-3 * _host(g) / (np.abs(_host(g)) + 1e-8)],
        )

    def linear(self, n: int) -> Case:
        """The MLP's first product, by cuBLASLt's first choice: its limit is arithmetic."""
        d, f = self.shape.hidden_size, 2 * self.shape.intermediate_size
        x, w, out = self.random(n, d), self.random(f, d), self.empty(n, f)
        return self.case(
            "linear", x, w, out, writes=[out], nbytes=_bytes(x, w, out), flops=2.0 * n * d * f,
            torch=lambda: torch.mm(x, w.T, out=out),
        )  # fmt: skip

    def attention(self, n: int, backward: bool = False, by_cudnn: bool = False) -> Case:
        """Causal, of samples as long as the preset's; without a naive version, whose scores would not fit."""
        both, kv_heads, d = self._heads()
        heads, length = both - kv_heads, min(n, self.seq_len)
        qkv, d_out = self.random(n, (both + kv_heads) * d), self.random(n, heads * d)
        out, d_qkv = self.empty(*d_out.shape), self.empty(*qkv.shape)
        lse = self.empty(n // length, heads, length, dtype=torch.float32)
        a_qkv, a_d_out, a_out, a_d_qkv, a_lse = map(_array, (qkv, d_out, out, d_qkv, lse))

        def run(backward: bool) -> None:
            self.ops.cudnn = self.cudnn if by_cudnn else None
            if backward:
                self.ops.attention_backward(a_d_out, a_qkv, a_out, a_lse, heads, kv_heads, a_d_qkv, self.arena)
            else:
                self.ops.attention(a_qkv, heads, kv_heads, a_out, a_lse, self.arena)

        def expected() -> list[np.ndarray]:
            x, dy = _host(qkv, columns=True), _host(d_out, columns=True)
            y, dx, lse64 = np.empty_like(dy), np.empty_like(x), np.empty(lse.shape)
            reference.attention(x, heads, kv_heads, y, lse64, Arena())
            reference.attention_backward(dy, x, y, lse64, heads, kv_heads, dx, Arena())
            return [dx] if backward else [y, lse64]

        if backward:
            torch.cuda.synchronize()
            run(False)
            torch.cuda.synchronize()
        parts = qkv.view(-1, length, both + kv_heads, d).transpose(1, 2).split([heads, kv_heads, kv_heads], 1)
        leaves = [part.detach().requires_grad_(backward) for part in parts]
        theirs = functools.partial(F.scaled_dot_product_attention, *leaves, is_causal=True, enable_gqa=True)
        y, dy = theirs() if backward else None, d_out.view(-1, length, heads, d).transpose(1, 2)
        return Case(
            nbytes=_bytes(qkv, d_out, out, d_qkv, lse) if backward else _bytes(qkv, out, lse),
            fast=lambda: run(backward),
            torch=(lambda: torch.autograd.grad(y, leaves, dy, retain_graph=True)) if backward else theirs,
            writes=[d_qkv] if backward else [out, lse],
            expected=expected,
            flops=2.0 * n * length * heads * d * (2.5 if backward else 1),
        )

    @functools.cached_property
    def cudnn(self) -> CudnnAttention:
        return CudnnAttention(0, self.ops.stream)

    attention_backward = functools.partialmethod(attention, backward=True)
    attention_cudnn = functools.partialmethod(attention, by_cudnn=True)
    attention_cudnn_backward = functools.partialmethod(attention, backward=True, by_cudnn=True)

    def _heads(self) -> tuple[int, int, int]:
        heads = self.shape.num_attention_heads
        kv_heads = self.shape.num_key_value_heads or heads
        return heads + kv_heads, kv_heads, self.shape.hidden_size // heads

    def _vocabulary(self) -> int:
        return self.shape.vocab_size or 50_304

    def _tokens(self, n: int) -> torch.Tensor:
        """Low tokens are frequent, as in text."""
        return (self._vocabulary() * torch.rand(n, device=DEVICE) ** 4).int()

    # --- checks and times ----------------------------------------------------------------------------

    def check(self, name: str) -> dict[str, float]:
        """The errors of both versions in rounding units, the worst of all outputs."""
        errors = {}
        for version in ("fast", "naive"):
            case = getattr(self, name)(CHECKED_TOKENS)
            torch.cuda.synchronize()
            run = getattr(case, version)
            if run is None:
                continue
            expected = case.expected()
            run()
            torch.cuda.synchronize()
            errors[version] = max(
                float(np.linalg.norm((_host(got) - right).ravel()) / np.linalg.norm(right)) / UNIT[got.dtype]
                for got, right in zip(case.writes, expected, strict=True)
            )
        return errors

    def time(self, name: str, tokens: int, compiled: bool) -> dict[str, Any]:
        """Microseconds of one call of each version."""
        self.functions = dict(EAGER)
        cases = self._cases(name, tokens)
        row: dict[str, Any] = {"op": name, "bytes": cases[0].nbytes, "flops": cases[0].flops}
        with torch.cuda.stream(self.stream):
            for version in ("fast", "naive"):
                runs = [getattr(case, version) for case in cases]
                if runs[0] is not None:
                    row[f"{version}_us"] = self._time_graph(runs)
            row["torch_us"] = self._time_eager([case.torch for case in cases])
        if compiled and (function := name.removesuffix("_backward")) in EAGER:
            self.functions[function] = torch.compile(EAGER[function])
            torch._functorch.config.donated_buffer = False  # a backward is run many times
            cases = self._cases(name, tokens)
            with torch.cuda.stream(self.stream):
                row["torch_compiled_us"] = self._time_eager([case.torch for case in cases])
        return row

    def _cases(self, name: str, tokens: int) -> list[Case]:
        """As many as are larger than the cache together, and at most 4."""
        first = getattr(self, name)(tokens)
        cases = [first, *(getattr(self, name)(tokens) for _ in range(min(3, ROTATED // first.nbytes)))]
        torch.cuda.synchronize()
        return cases

    def _time_graph(self, runs: list[Callable[[], None]]) -> float:
        for run in runs:
            run()
        with cuda.capture(self.ops.stream) as graph:
            for run in runs:
                run()
        times = [self._time(lambda: graph.replay(self.ops.stream)) for _ in range(9)]
        graph.close()
        return statistics.median(times[2:]) / len(runs)

    def _time_eager(self, runs: list[Callable[[], Any]]) -> float:
        def all_of_them() -> None:
            for _ in range(4):
                for run in runs:
                    run()

        times = [self._time(all_of_them) for _ in range(7)]
        return statistics.median(times[2:]) / (4 * len(runs))

    def _time(self, run: Callable[[], object]) -> float:
        return 1e3 * streams.milliseconds(run, self.ops.stream)


def _array(x: Any) -> Any:
    """A tensor as the operations take it; anything else as it is."""
    return Array.from_dlpack(x) if isinstance(x, torch.Tensor) else x


def _host(tensor: torch.Tensor, columns: bool = False) -> np.ndarray:
    """In float64, integers as they are; ``columns``: matrices in the memory order of numpy's ``empty_columns``."""
    array = (tensor.detach().double() if tensor.is_floating_point() else tensor).cpu().numpy()
    return np.asfortranarray(array) if columns and array.ndim == 2 else array


def _bytes(*tensors: torch.Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def copy_speed(zoo: Zoo) -> float:
    """Bytes a second, read and written, of a large copy."""
    source = torch.randn(1 << 29, device=DEVICE)
    target = torch.empty_like(source)
    with torch.cuda.stream(zoo.stream):
        times = [zoo._time(lambda: target.copy_(source)) for _ in range(5)]
    return 2 * _bytes(source) / (statistics.median(times) * 1e-6)


OPERATIONS = [
    "add", "rms_norm", "rms_norm_backward", "rope", "swiglu", "swiglu_backward", "cross_entropy",
    "embedding", "embedding_backward", "adamw", "linear", "attention", "attention_backward",
]  # fmt: skip
CUDNN = ["attention_cudnn", "attention_cudnn_backward"]  # need the extra


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="1b", choices=PRESETS)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--only", nargs="+", default=OPERATIONS, choices=[*OPERATIONS, *CUDNN])
    parser.add_argument("--compile", action="store_true", help="time torch compiled, too")
    parser.add_argument("--json", type=Path, help="write all rows to this file")
    arguments = parser.parse_args()
    if torch is None:
        raise SystemExit("kos: error: benchmarks.kernels: expected PyTorch (pip install torch), got none")
    if why := cuda.unavailable():
        raise SystemExit(f"kos: error: benchmarks.kernels: expected a GPU, got none: {why}")
    if arguments.json:
        check_writable(arguments.json)
    torch.manual_seed(0)
    preset = PRESETS[arguments.preset].values
    zoo = Zoo(ModelSection(**preset["model"]), preset["seq_len"], getattr(torch, arguments.dtype))
    speed = copy_speed(zoo)
    peak = peak_flops(torch.cuda.get_device_name()) if arguments.dtype == "bfloat16" else None
    print(f"{torch.cuda.get_device_name()}, {arguments.preset}, {arguments.tokens} tokens, {arguments.dtype}; "
          f"copy {speed / 1e12:.2f} TB/s; errors in rounding units")  # fmt: skip
    print(f"{'operation':<26}" + "".join(f"{title:>12}" for title in (
        "naive us", "fast us", "limit us", "of limit", "torch us", "compiled us", "error fast", "naive")))  # fmt: skip
    rows = []
    for name in arguments.only:
        errors = zoo.check(name)
        row = zoo.time(name, arguments.tokens, arguments.compile)
        limit = max(row["bytes"] / speed, row["flops"] / peak if peak else 0) * 1e6
        rows.append({**row, "limit_us": limit, "of_limit": limit / row["fast_us"], "errors": errors})
        numbers = (row.get("naive_us"), row["fast_us"], limit, 100 * limit / row["fast_us"], row["torch_us"],
                   row.get("torch_compiled_us"), errors["fast"], errors.get("naive"))  # fmt: skip
        print(f"{name:<26}" + "".join(f"{'-':>12}" if x is None else f"{x:>12.2f}" for x in numbers), flush=True)
        torch.cuda.empty_cache()
    if arguments.json:
        arguments.json.write_text(report.to_json({
            **report.provenance("benchmarks.kernels", 0, 1), "preset": arguments.preset, "tokens": arguments.tokens,
            "dtype": arguments.dtype, "limits": {"copy_bytes_per_second": speed, "flops_per_second": peak},
            "rows": rows,
        }))  # fmt: skip


if __name__ == "__main__":
    main()
