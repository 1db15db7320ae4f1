"""Matrix products in 8 bits beside bfloat16, of the linear layers of a model: ``python -m benchmarks.fp8 --json FILE``.

Three tables, of the shapes of ``--preset`` with ``--tokens`` tokens, on one GPU:

- *products*: the three products of every linear layer with operands that are there. TFLOP/s in bfloat16; with one scale
  a tensor, sums accurate or fast; with a scale a row; with scales of 1 x 128 beside 128 x 128 (what ``--dtype fp8``
  runs); with scales of 1 x 128 beside 1 x 128. What cuBLASLt does not have is left out, with its reason.
- *casts*: quantizing a tensor in both orders of memory, in microseconds and GB/s: inputs, and SwiGLU's output and
  gradient, which are computed there.
- *layers*: the three products of a linear layer as training runs them, casts included. The weights' cast is apart, for
  it is made once a step. The last row is the sum.

All kinds of a row take turns: each runs for ``--settle`` milliseconds, in which the GPU finds its clock under the power
limit, then for ``--measure`` milliseconds that count; the figure is the median of ``--repeats`` turns. cuBLASLt's
algorithms are searched as training does. A preset takes about three minutes.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from kos import cuda
from kos.bench import report
from kos.commands import program
from kos.cuda import streams
from kos.errors import KosError
from kos.files import check_writable, replace_file
from kos.memory.array import Array
from kos.train.config import PRESETS
from kos.train.ops import SCALE_BLOCK as BLOCK
from kos.train.ops.cuda import CudaOps
from kos.train.ops.fp8 import GRADIENT, INPUT, WEIGHTS, Fp8Ops, Quantized, Role

KINDS = ("bf16", "tensor", "tensor fast", "rows", "1x128 128x128", "1x128 1x128")
PRODUCTS = ("forward", "input gradient", "weight gradient")
DRAWN = 1_000_003  # numbers; not a divisor of rows, or these were each other's copies
Figures = dict[str, float | None]
"""By kind; None: cuBLASLt does not have it."""
Timer = Callable[[Callable[[], Any], Any], float]
"""Milliseconds of what a function queues on a stream."""


def layers_of(preset: str) -> dict[str, tuple[int, int]]:
    """The matrices of a layer of a preset, (out, in)."""
    of = PRESETS[preset].values["model"]
    hidden, inner = of["hidden_size"], of["intermediate_size"]
    head = of.get("head_dim") or hidden // of["num_attention_heads"]
    heads, kv_heads = (of[name] * head for name in ("num_attention_heads", "num_key_value_heads"))
    return {
        "qkv": (heads + 2 * kv_heads, hidden), "o": (hidden, heads), "gate_up": (2 * inner, hidden),
        "down": (hidden, inner),
    }  # fmt: skip


def product_sizes(out: int, columns: int, tokens: int) -> dict[str, tuple[int, int, int]]:
    """(M, N, K) of each product of a layer (out, columns)."""
    return dict(zip(PRODUCTS, ((tokens, out, columns), (tokens, columns, out), (out, columns, tokens)), strict=True))


class Bench:
    """The operations, and how they are timed."""

    def __init__(
        self, options: argparse.Namespace, make_ops: Callable[..., Any] = CudaOps, timer: Timer = streams.milliseconds
    ) -> None:
        self.options, self._timer = options, timer
        self.ops = make_ops(0, search=True)
        self.arena = self.ops.make_arena()
        self.fp8 = Fp8Ops(self.ops, self.arena, alone=True)
        self.rng, self.reasons = np.random.default_rng(0), dict[str, str]()

    def normal(self, *shape: int) -> Array:
        """Normal numbers of bfloat16, the first ones repeated: the power that a product draws depends on them."""
        flat = self.ops.zeros(math.prod(shape), "bfloat16")
        there = min(DRAWN, flat.size)
        drawn = self.rng.standard_normal(there, np.float32)
        flat[:there].copy_from(drawn.astype(flat.dtype.numpy), self.ops.stream)
        while there < flat.size:
            more = min(there, flat.size - there)
            self.ops.copy(flat[:more], flat[there : there + more])
            there += more
        return flat.reshape(shape)

    def quantized(self, x: Array, role: Role) -> Any:
        (rows, columns) = x.shape
        made = Quantized.empty((rows, columns), role, self.ops, self.ops.zeros, self.ops.zeros)
        self.ops.quantize(x, made.rows, made.columns, self.arena)
        return made

    def milliseconds(self, run: Callable[[], Any], at_least: float, once: float) -> float:
        """Of one of as many runs as take ``at_least`` milliseconds, if one takes ``once``."""
        times = max(1, math.ceil(at_least / once))
        return self._timer(lambda: [run() for _ in range(times)], self.ops.stream) / times

    def turns(self, runs: dict[str, Callable[[], Any]]) -> Figures:
        """The milliseconds of each."""
        found: dict[str, list[float]] = {}
        once: dict[str, float] = {}
        for kind, run in runs.items():
            try:
                run()  # the search, too
                once[kind] = max(1e-3, self._timer(run, self.ops.stream))
                found[kind] = []
            except KosError as error:
                self.reasons.setdefault(kind, str(error))
        for _ in range(self.options.repeats):
            for kind, timed in found.items():
                self.milliseconds(runs[kind], self.options.settle, once[kind])
                timed.append(self.milliseconds(runs[kind], self.options.measure, once[kind]))
        return {kind: statistics.median(found[kind]) if kind in found else None for kind in runs}

    def product(self, m: int, n: int, k: int, gradient: bool, wide: bool) -> Figures:
        """TFLOP/s of out (m, n) = a (m, k) b (n, k)^T by kind; a is a gradient, or out of float32."""
        a, b, out = self.normal(m, k), self.normal(n, k), self.ops.zeros((m, n), "float32" if wide else "bfloat16")
        a8, b8 = self.quantized(a, GRADIENT if gradient else INPUT), self.quantized(b, WEIGHTS)
        along = k // BLOCK
        ones = {shape: self.ops.zeros(shape, np.float32) for shape in (
            (1,), (m,), (n,), (along, m), (along, n), (n // BLOCK, -(-along // 4) * 4))}  # fmt: skip
        for scale in ones.values():
            scale.copy_from(np.ones(scale.shape, np.float32), self.ops.stream)

        def scaled(of_a: Array, of_b: Array, fast: bool = False) -> Callable[[], Any]:
            matmul = self.ops.matmul
            operands = a8.rows.values, b8.rows.values, out
            return lambda: matmul(*operands, transpose_b=True, scales=(of_a, of_b), fast=fast)

        blocks = ones[n // BLOCK, -(-along // 4) * 4]
        runs = dict(zip(KINDS, (
            lambda: self.ops.matmul(a, b, out, transpose_b=True), scaled(ones[1,], ones[1,]),
            scaled(ones[1,], ones[1,], fast=True), scaled(ones[m,], ones[n,]), scaled(ones[along, m], blocks),
            scaled(ones[along, m], ones[along, n]),
        ), strict=True))  # fmt: skip
        times = self.turns(runs)
        return {kind: ms and 2e-9 * m * n * k / ms for kind, ms in times.items()}

    def casts(self, rows: int, columns: int) -> Iterator[tuple[str, Figures]]:
        """Of an input, and of SwiGLU in front of and behind it; in both orders: microseconds, and GB/s."""
        x, gate_up = self.normal(rows, columns), self.normal(rows, 2 * columns)
        made, of_gradient = self.quantized(x, INPUT), self.quantized(gate_up, GRADIENT)
        copies, both = (made.rows, made.columns, self.arena), (of_gradient.rows, of_gradient.columns)
        runs = {  # with the bytes of a number of x that are read, and written
            "input": (lambda: self.ops.quantize(x, *copies), 2 + 2),
            "swiglu": (lambda: self.ops.quantize_swiglu(gate_up, *copies), 4 + 2),
            "swiglu gradient": (lambda: self.ops.quantize_swiglu_backward(x, gate_up, *both, self.arena), 6 + 4),
        }
        for name, ms in self.turns({name: run for name, (run, _) in runs.items()}).items():
            assert ms is not None
            yield name, {"us": 1e3 * ms, "gb_per_second": 1e-6 * runs[name][1] * rows * columns / ms}

    def layer(self, out: int, columns: int) -> Figures:
        """Milliseconds of a layer's three products as training runs them, in bfloat16 and in fp8, and of its cast."""
        tokens, ops, arena = self.options.tokens, self.ops, self.arena
        x, d_out, weight = self.normal(tokens, columns), self.normal(tokens, out), self.normal(out, columns)
        y, dx = ops.zeros((tokens, out), "bfloat16"), ops.zeros((tokens, columns), "bfloat16")
        d_weight, weight8 = ops.zeros((out, columns), "float32"), self.quantized(weight, WEIGHTS)

        def in_bf16() -> None:
            ops.linear(x, weight, y)
            ops.linear_input_gradient(d_out, weight, dx)
            ops.linear_weight_gradient(d_out, x, d_weight, False, arena)

        def in_fp8() -> None:
            with arena.scope():
                saved = self.fp8.empty_transposed((tokens, columns), arena)
                assert saved is not None
                self.fp8.linear(saved.of(x), weight8, y)
                d = self.fp8.gradient(d_out, arena)
                self.fp8.linear_input_gradient(d, weight8, dx)
                self.fp8.linear_weight_gradient(d, saved, d_weight, False, arena)

        def cast() -> None:
            ops.quantize(weight, weight8.rows, weight8.columns, arena)

        return self.turns({"bf16": in_bf16, "fp8": in_fp8, "weight cast": cast})

    def rows(self) -> Iterator[dict[str, Any]]:
        """All tables, row by row."""
        tokens = self.options.tokens
        for name, (out, columns) in layers_of(self.options.preset).items():
            for what, (m, n, k) in product_sizes(out, columns, tokens).items():
                figures = self.product(m, n, k, what != "forward", what == "weight gradient")
                yield {"table": "products", "name": f"{name} {what}", "shape": [m, n, k], **figures}
        widths = sorted({size for shape in layers_of(self.options.preset).values() for size in shape})
        for width in widths:
            for what, figures in self.casts(tokens, width):
                yield {"table": "casts", "name": f"{what} {tokens} x {width}", "shape": [tokens, width], **figures}
        total: dict[str, float] = dict.fromkeys(("bf16", "fp8", "weight cast"), 0.0)
        for name, (out, columns) in layers_of(self.options.preset).items():
            figures = self.layer(out, columns)
            for kind, ms in figures.items():
                total[kind] += ms or math.nan
            yield {"table": "layers", "name": name, "shape": [out, columns], **figures}
        yield {
            "table": "layers", "name": "all", "shape": None, **total,
            "fp8_over_bf16": total["bf16"] / total["fp8"],
            "with_weight_cast": total["bf16"] / (total["fp8"] + total["weight cast"]),
        }  # fmt: skip


def show(row: dict[str, Any]) -> str:
    """A row as a line."""
    figures = (f"{key} {'-' if value is None else f'{value:,.3g}'}" for key, value in row.items()
               if key not in ("table", "name", "shape"))  # fmt: skip
    return f"{row['table']:<10}{row['name']:<32}{'  '.join(figures)}"


def measure(bench: Bench, header: dict[str, Any]) -> None:
    """Print all tables, and write them to ``--json`` after each row: what is there counts."""
    options, rows = bench.options, []
    for row in bench.rows():
        rows.append(row)
        print(show(row), flush=True)
        if options.json:
            settings = {"preset": options.preset, "tokens": options.tokens, "reasons": bench.reasons}
            replace_file(options.json, report.to_json({**header, **settings, "rows": rows}).encode())
    for kind, reason in bench.reasons.items():
        print(f"{kind} left out: {reason}")


def read_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        program("benchmarks.fp8"), description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", default="8b", choices=PRESETS)
    parser.add_argument("--tokens", type=int, default=8192, help="a multiple of 128 [8192]")
    parser.add_argument("--repeats", type=int, default=3, help="turns of each kind [3]")
    parser.add_argument("--settle", type=float, default=60.0, help="milliseconds before those that count [60]")
    parser.add_argument("--measure", type=float, default=60.0, help="milliseconds that count [60]")
    parser.add_argument("--json", type=Path, help="where to write the rows")
    return parser.parse_args(arguments)


def main() -> int:
    options = read_arguments()
    if why := cuda.unavailable():
        raise SystemExit(f"kos: error: benchmarks.fp8: expected a GPU, got none: {why}")
    try:
        if options.json:
            check_writable(options.json)
        measure(Bench(options), report.provenance("benchmarks.fp8", 0, 1))
    except KosError as error:
        print(f"kos: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
