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
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

try:
    import torch
    import torch.nn.functional as F
except ImportError:
    raise SystemExit("kos: error: benchmarks.kernels: expected PyTorch (pip install torch), got none") from None

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

NAIVE = Path(__file__).parent / "naive_kernels.cu"
UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}
CHECKED_TOKENS = 96
ROTATED = 256 << 20  # bytes of inputs in rotation


EAGER: dict[str, Callable[..., torch.Tensor]] = {
    "rms_norm": lambda x, w: F.rms_norm(x, w.shape, w, 1e-5),
    "swiglu": lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
    "cross_entropy": lambda x, t: F.cross_entropy(x.float(), t),
    "embedding": F.embedding,
    "rope": lambda x, cos, sin: (x * cos + torch.cat((-x.chunk(2, -1)[1], x.chunk(2, -1)[0]), -1) * sin).to(x.dtype),
}


class Case(NamedTuple):
    """One operation on one set of inputs."""

    nbytes: int  # that must move: each input read once, each output written once
    fast: Callable[[], None]
    naive: Callable[[], None] | None
    torch: Callable[[], Any]
    outputs: dict[str, torch.Tensor]
    expected: Callable[[], dict[str, np.ndarray]]
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
        return torch.randn(shape, dtype=torch.float32, device="cuda").to(dtype or self.dtype)

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.full(shape, float("nan"), dtype=dtype or self.dtype, device="cuda")

    def naive(self, name: str, items: int, *arguments: Any, block: int = 256) -> Callable[[], None]:
        """A launch of a naive kernel, one thread an item."""
        kernel = load_kernel(NAIVE, name, 0, DTYPE=str(self.dtype).removeprefix("torch."))
        values = [x.data_ptr() if isinstance(x, torch.Tensor) else x for x in arguments]
        return lambda: kernel(self.ops.stream, -(-items // 256) if block == 256 else items, block, *values)

    # --- the operations ------------------------------------------------------------------------------

    def add(self, n: int) -> Case:
        d = self.shape.hidden_size
        a, b, out = self.random(n, d), self.random(n, d), self.empty(n, d)
        arrays = _arrays(a, b, out)
        return Case(
            _bytes(a, b, out),
            lambda: self.ops.add(*arrays),
            self.naive("add", a.numel(), a, b, out, a.numel()),
            lambda: torch.add(a, b, out=out),
            {"out": out},
            lambda: {"out": _host(a) + _host(b)},
        )

    def rms_norm(self, n: int) -> Case:
        d = self.shape.hidden_size
        x, w, out, rstd = self.random(n, d), self.random(d), self.empty(n, d), self.empty(n, dtype=torch.float32)
        ax, aw, aout, arstd = _arrays(x, w, out, rstd)

        def expected() -> dict[str, np.ndarray]:
            out64, rstd64 = np.empty((n, d)), np.empty(n)
            reference.rms_norm(_host(x), _host(w), 1e-5, out64, rstd64)
            return {"out": out64, "rstd": rstd64}

        return Case(
            _bytes(x, w, out, rstd),
            lambda: self.ops.rms_norm(ax, aw, 1e-5, aout, arstd),
            self.naive("rms_norm", n, x, w, np.float32(1e-5), out, rstd, n, d),
            lambda: self.functions["rms_norm"](x, w),
            {"out": out, "rstd": rstd},
            expected,
        )

    def rms_norm_backward(self, n: int) -> Case:
        d = self.shape.hidden_size
        d_out, x, w, start = self.random(n, d), self.random(n, d), self.random(d), self.random(n, d)
        dx, dw = start.clone(), torch.zeros(d, dtype=torch.float32, device="cuda")
        rstd = x.float().square().mean(-1).add(1e-5).rsqrt()
        arrays = _arrays(d_out, x, w, rstd, dx, dw)

        def expected() -> dict[str, np.ndarray]:
            dx64, dw64 = _host(start), np.empty(d)
            reference.rms_norm_backward(_host(d_out), _host(x), _host(w), _host(rstd), dx64, dw64, False, Arena())
            return {"dx": dx64, "dw": dw64}

        leaves = [x.clone().requires_grad_(), w.clone().requires_grad_()]
        y = self.functions["rms_norm"](*leaves)
        return Case(
            _bytes(d_out, x, w, rstd, dx, dx, dw),
            lambda: self.ops.rms_norm_backward(*arrays, False, self.arena),
            self.naive("rms_norm_backward", n, d_out, x, w, rstd, dx, dw, n, d),
            lambda: torch.autograd.grad(y, leaves, d_out, retain_graph=True),
            {"dx": dx, "dw": dw},
            expected,
        )

    def rope(self, n: int) -> Case:
        heads, others, head_dim = self._heads()
        length = min(n, 1024)
        qkv = self.random(n, (heads + others) * head_dim)
        start, array = qkv.clone(), Array.from_dlpack(qkv)
        frequencies = 10_000.0 ** (-np.arange(head_dim // 2) / (head_dim // 2))
        tables = self.ops.rope_tables(frequencies, range(length), None)
        cos, sin = (torch.tensor(self.ops.to_host(t), device="cuda")[:, None].repeat(1, 1, 2) for t in tables)
        turned = qkv[:, : heads * head_dim].view(-1, length, heads, head_dim)

        def expected() -> dict[str, np.ndarray]:
            x64 = np.asfortranarray(_host(start))
            tables64 = reference.rope_tables(frequencies, range(length), np.float64)
            reference.rope(x64, tables64, head_dim, heads, Arena())
            return {"qkv": x64}

        row, items = qkv.shape[1], turned.numel() // 2
        return Case(
            2 * _bytes(turned),
            lambda: self.ops.rope(array, tables, head_dim, heads, self.arena),
            self.naive("rope", items, qkv, np.float32(10_000), length, head_dim // 2, heads, row, items),
            lambda: self.functions["rope"](turned, cos, sin),
            {"qkv": qkv},
            expected,
        )

    def swiglu(self, n: int) -> Case:
        f = self.shape.intermediate_size
        gate_up, out = self.random(n, 2 * f), self.empty(n, f)
        a_gate_up, a_out = _arrays(gate_up, out)

        def expected() -> dict[str, np.ndarray]:
            out64 = np.asfortranarray(np.empty((n, f)))
            reference.swiglu(np.asfortranarray(_host(gate_up)), out64, Arena())
            return {"out": out64}

        return Case(
            _bytes(gate_up, out),
            lambda: self.ops.swiglu(a_gate_up, a_out, self.arena),
            self.naive("swiglu", out.numel(), gate_up, out, f, out.numel()),
            lambda: self.functions["swiglu"](gate_up),
            {"out": out},
            expected,
        )

    def swiglu_backward(self, n: int) -> Case:
        f = self.shape.intermediate_size
        d_out, gate_up, d_gate_up = self.random(n, f), self.random(n, 2 * f), self.empty(n, 2 * f)
        a_out, a_gate_up, a_d = _arrays(d_out, gate_up, d_gate_up)

        def expected() -> dict[str, np.ndarray]:
            x64, d64 = np.asfortranarray(_host(gate_up)), np.asfortranarray(np.empty((n, 2 * f)))
            out64 = np.asfortranarray(np.empty((n, f)))
            reference.swiglu(x64, out64, Arena())
            reference.swiglu_backward(np.asfortranarray(_host(d_out)), x64, out64, d64, Arena())
            return {"d_gate_up": d64}

        leaf = gate_up.clone().requires_grad_()
        y = self.functions["swiglu"](leaf)
        return Case(
            _bytes(d_out, gate_up, d_gate_up),
            lambda: self.ops.swiglu_backward(a_out, a_gate_up, a_out, a_d, self.arena),
            self.naive("swiglu_backward", d_out.numel(), d_out, gate_up, d_gate_up, f, d_out.numel()),
            lambda: torch.autograd.grad(y, leaf, d_out, retain_graph=True),
            {"d_gate_up": d_gate_up},
            expected,
        )

    def cross_entropy(self, n: int) -> Case:
        """Forward and backward, of at most 2,048 tokens."""
        n, vocabulary = min(n, 2048), self._vocabulary()
        logits, losses = self.random(n, vocabulary), self.empty(n, dtype=torch.float32)
        start = logits.clone()
        targets = torch.randint(0, vocabulary, (n,), device="cuda")
        narrow, count = targets.int(), torch.tensor([float(n)], device="cuda")
        a_logits, a_targets, a_count, a_losses = _arrays(logits, narrow, count, losses)

        def expected() -> dict[str, np.ndarray]:
            z, losses64 = _host(start), np.empty(n)
            reference.cross_entropy_with_gradient(z, narrow.cpu().numpy(), _host(count), losses64, Arena())
            return {"logits": z, "losses": losses64}

        def both() -> None:
            leaf = start.detach().requires_grad_()
            self.functions["cross_entropy"](leaf, targets).backward()

        return Case(
            2 * _bytes(logits),
            lambda: self.ops.cross_entropy_with_gradient(a_logits, a_targets, a_count, a_losses, self.arena),
            self.naive("cross_entropy", n, logits, narrow, count, losses, vocabulary, block=1024),
            both,
            {"logits": logits, "losses": losses},
            expected,
        )

    def embedding(self, n: int) -> Case:
        table, tokens = self.random(self._vocabulary(), self.shape.hidden_size), self._tokens(n)
        out = self.empty(n, self.shape.hidden_size)
        a_tokens, a_table, a_out = _arrays(tokens, table, out)
        return Case(
            2 * _bytes(out),
            lambda: self.ops.embedding(a_tokens, a_table, a_out),
            None,
            lambda: self.functions["embedding"](tokens, table),
            {"out": out},
            lambda: {"out": _host(table)[tokens.cpu().numpy()]},
        )

    def embedding_backward(self, n: int) -> Case:
        """Added to an fp32 table, as a tied head's gradient is; torch writes a table of the dtype."""
        d, vocabulary = self.shape.hidden_size, self._vocabulary()
        d_out, tokens = self.random(n, d), self._tokens(n)
        d_table = torch.zeros(vocabulary, d, dtype=torch.float32, device="cuda")
        a_out, a_tokens, a_table = _arrays(d_out, tokens, d_table)

        def expected() -> dict[str, np.ndarray]:
            d64 = np.empty((vocabulary, d))
            reference.embedding_backward(_host(d_out), tokens.cpu().numpy(), d64, False, Arena())
            return {"d_table": d64}

        leaf = self.random(vocabulary, d).requires_grad_()
        y = self.functions["embedding"](tokens, leaf)
        touched = len(torch.unique(tokens)) * d * 4
        return Case(
            _bytes(d_out) + 2 * touched,
            lambda: self.ops.embedding_backward(a_out, a_tokens, a_table, True, self.arena),
            self.naive("embedding_backward", d_out.numel(), d_out, tokens, d_table, d, d_out.numel()),
            lambda: torch.autograd.grad(y, leaf, d_out, retain_graph=True),
            {"d_table": d_table},
            expected,
        )

    def adamw(self, n: int) -> Case:
        """The update alone, of n x hidden elements: fp32 state and gradients, a 16-bit copy of the weights."""
        size = n * self.shape.hidden_size
        make = Parameters({"w": (n, self.shape.hidden_size)}, "float32", None, self.ops.zeros)
        copy, gradients = make.like("bfloat16"), make.like()
        start, g = self.random(size, dtype=torch.float32), self.random(size, dtype=torch.float32)
        torch.cuda.synchronize()
        make.flat.copy_from(Array.from_dlpack(start), self.ops.stream)
        gradients.flat.copy_from(Array.from_dlpack(g), self.ops.stream)
        optimizer = CudaAdamW(self.ops, make, copy, Schedule("constant", 1e-3, 0, 10, 1))
        optimizer.queue_norm(gradients)
        w, m, v = start.clone(), torch.zeros_like(start), torch.zeros_like(start)
        w16 = torch.empty(size, dtype=torch.bfloat16, device="cuda")
        parameter = torch.nn.Parameter(start.clone())
        parameter.grad = g
        theirs = torch.optim.AdamW([parameter], lr=1e-3, weight_decay=0.1, fused=True)
        scalars = [np.float32(x) for x in (1e-3, 1e-3 / 0.1, 1 / np.sqrt(0.05), 0.1, 0.9, 0.95, 1e-8)]
        out = torch.from_dlpack(make.flat)

        def expected() -> dict[str, np.ndarray]:
            w64, g64 = _host(start), _host(g)
            return {"w": w64 * (1 - 1e-4) - 1e-3 * g64 / (np.abs(g64) + 1e-8)}

        naive = self.naive("adamw", size, w, g, m, v, w16, *scalars, size) if self.dtype == torch.bfloat16 else None
        return Case(
            30 * size,
            lambda: optimizer.queue_update(gradients),
            naive,
            theirs.step,
            {"w": out},
            expected,
        )

    def linear(self, n: int) -> Case:
        """The MLP's first product, by cuBLASLt's first choice: its limit is arithmetic."""
        d, f = self.shape.hidden_size, 2 * self.shape.intermediate_size
        x, w, out = self.random(n, d), self.random(f, d), self.empty(n, f)
        arrays = _arrays(x, w, out)
        return Case(
            _bytes(x, w, out),
            lambda: self.ops.linear(*arrays),
            None,
            lambda: torch.mm(x, w.T, out=out),
            {"out": out},
            lambda: {"out": _host(x) @ _host(w).T},
            2.0 * n * d * f,
        )

    def attention(self, n: int, backward: bool = False, by_cudnn: bool = False) -> Case:
        """Causal, of samples as long as the preset's; without a naive version, whose scores would not fit."""
        both, kv_heads, d = self._heads()
        heads, length = both - kv_heads, min(n, self.seq_len)
        qkv, d_out = self.random(n, (both + kv_heads) * d), self.random(n, heads * d)
        out, d_qkv = self.empty(*d_out.shape), self.empty(*qkv.shape)
        lse = self.empty(n // length, heads, length, dtype=torch.float32)
        a_qkv, a_d_out, a_out, a_d_qkv, a_lse = _arrays(qkv, d_out, out, d_qkv, lse)

        def run(backward: bool) -> None:
            self.ops.cudnn = self.cudnn if by_cudnn else None
            if backward:
                self.ops.attention_backward(a_d_out, a_qkv, a_out, a_lse, heads, kv_heads, a_d_qkv, self.arena)
            else:
                self.ops.attention(a_qkv, heads, kv_heads, a_out, a_lse, self.arena)

        def expected() -> dict[str, np.ndarray]:
            x, dy = (np.asfortranarray(_host(a)) for a in (qkv, d_out))
            y, dx, lse64 = np.empty_like(dy), np.empty_like(x), np.empty(lse.shape)
            reference.attention(x, heads, kv_heads, y, lse64, Arena())
            reference.attention_backward(dy, x, y, lse64, heads, kv_heads, dx, Arena())
            return {"d_qkv": dx} if backward else {"out": y, "lse": lse64}

        if backward:
            torch.cuda.synchronize()
            run(False)
            torch.cuda.synchronize()
        parts = qkv.view(-1, length, both + kv_heads, d).transpose(1, 2).split([heads, kv_heads, kv_heads], 1)
        leaves = [part.detach().requires_grad_(backward) for part in parts]
        theirs = functools.partial(F.scaled_dot_product_attention, *leaves, is_causal=True, enable_gqa=True)
        y, dy = theirs() if backward else None, d_out.view(-1, length, heads, d).transpose(1, 2)
        return Case(
            _bytes(qkv, d_out, out, d_qkv, lse) if backward else _bytes(qkv, out, lse),
            lambda: run(backward),
            None,
            (lambda: torch.autograd.grad(y, leaves, dy, retain_graph=True)) if backward else theirs,
            {"d_qkv": d_qkv} if backward else {"out": out, "lse": lse},
            expected,
            2.0 * n * length * heads * d * (2.5 if backward else 1),
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
        return (self._vocabulary() * torch.rand(n, device="cuda") ** 4).int()

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
            run()
            torch.cuda.synchronize()
            expected = case.expected()
            errors[version] = max(
                float(np.linalg.norm(_host(got).ravel() - expected[key].ravel()) / np.linalg.norm(expected[key]))
                / UNIT[got.dtype]
                for key, got in case.outputs.items()
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


def _arrays(*tensors: torch.Tensor) -> list[Array]:
    return [Array.from_dlpack(tensor) for tensor in tensors]


def _host(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().double().cpu().numpy()


def _bytes(*tensors: torch.Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def copy_speed(zoo: Zoo) -> float:
    """Bytes a second, read and written, of a large copy."""
    source = torch.randn(1 << 29, device="cuda")
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
