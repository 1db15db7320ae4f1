"""Attention forward and backward on one GPU: our kernels beside torch's flash and cuDNN backends, and their errors.

    python -m benchmarks.attention [--shapes B,T,H,K,d ...] [--families hopper mma cudnn] [--tiles "STAGES=3" ...]

Times are medians of replays of a CUDA graph, in one process, operands random.  TFLOP/s count the causal half:
4 B H T^2 d / 2 forward, 2.5 times that backward (what recomputation costs is not counted as work).
Whether results are right is the affair of tests/train/test_attention_cuda.py and of benchmarks.kernels.
"""

from __future__ import annotations

import argparse
import gc
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

try:
    import torch
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel
except ImportError:
    raise SystemExit("kos: error: benchmarks.attention: expected PyTorch (pip install torch), got none") from None

from benchmarks.collectives import report
from kos import cuda
from kos.cuda import streams
from kos.cuda.driver import call, cu
from kos.memory.arena import Arena
from kos.memory.array import Array
from kos.train.ops import attention as ops
from kos.train.ops.cudnn import CudnnAttention

SHAPES = [
    (1, 8192, 32, 8, 128),  # 8b
    (2, 4096, 32, 8, 128),
    (2, 4096, 32, 8, 64),  # 1b
    (32, 1024, 12, 12, 64),  # 124m
    (4, 1024, 12, 12, 64),
]
BACKENDS = {"torch flash": SDPBackend.FLASH_ATTENTION, "torch cuDNN": SDPBackend.CUDNN_ATTENTION}


def flops(shape: tuple[int, ...]) -> float:
    samples, length, heads, _, d = shape
    return 4 * samples * heads * length**2 * d / 2


def device_arena() -> Arena:
    return Arena(
        allocate=lambda nbytes: Array.empty(max(nbytes, 1), "uint8", 0),
        view=lambda slab, offset, shape, dtype: Array(slab.pointer + offset, shape, dtype, 0, owner=slab),
    )


class Operands:
    """One set of random operands, as torch tensors and as our arrays over the same memory."""

    def __init__(self, shape: tuple[int, ...], seed: int) -> None:
        samples, length, heads, kv_heads, d = self.shape = shape
        generator = torch.Generator("cuda").manual_seed(seed)
        tokens, width = samples * length, (heads + 2 * kv_heads) * d
        self.qkv = torch.randn(tokens, width, generator=generator, device="cuda").bfloat16()
        self.d_out = torch.randn(tokens, heads * d, generator=generator, device="cuda").bfloat16()
        self.out, self.d_qkv = torch.full_like(self.d_out, torch.nan), torch.full_like(self.qkv, torch.nan)
        self.log_sum_exp = torch.empty(samples, heads, length, device="cuda")
        self.arrays = {name: Array.from_dlpack(getattr(self, name)) for name in ("qkv", "d_out", "out", "d_qkv")}
        self.arrays["log_sum_exp"] = Array.from_dlpack(self.log_sum_exp)

    def ours(self, stream: Any, arena: Arena, **options: Any) -> tuple[Callable[[], None], Callable[[], None]]:
        a, (_, _, heads, kv_heads, _) = self.arrays, self.shape
        forward = (a["qkv"], heads, kv_heads, a["out"], a["log_sum_exp"])
        backward = (a["d_out"], a["qkv"], a["out"], a["log_sum_exp"], heads, kv_heads, a["d_qkv"], arena)
        if options["family"] == "cudnn":
            cudnn = CudnnAttention(0, stream)
            return lambda: cudnn.forward(*forward, arena), lambda: cudnn.backward(*backward)
        return (
            lambda: ops.attention(*forward, stream, **options),
            lambda: ops.attention_backward(*backward, stream, **options),
        )

    def torchs(self) -> tuple[Any, Any, Any, Any]:
        samples, length, heads, kv_heads, d = self.shape
        x = self.qkv.view(samples, length, heads + 2 * kv_heads, d).transpose(1, 2)
        parts = [part.detach().requires_grad_() for part in x.split([heads, kv_heads, kv_heads], 1)]
        return *parts, self.d_out.view(samples, length, heads, d).transpose(1, 2)


def attend(q: Any, k: Any, v: Any) -> Any:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


def time_ours(run: Callable[[], None], stream: Any, copies: int = 4, replays: int = 12) -> float:
    """Milliseconds of one run."""
    run()
    gc.collect()  # memory that is freed during a capture would end it
    with cuda.capture(stream) as graph:
        for _ in range(copies):
            run()
    events = [call(cu.cuEventCreate, 0) for _ in range(replays + 1)]
    handle = streams.handle(stream)
    graph.replay(stream)
    for i, event in enumerate(events):
        if i:
            graph.replay(stream)
        call(cu.cuEventRecord, event, handle)
    call(cu.cuEventSynchronize, events[-1])
    times = [call(cu.cuEventElapsedTime, a, b) for a, b in pairwise(events)]
    return statistics.median(times) / copies


def time_torch(run: Callable[[], Any], copies: int = 4, replays: int = 12) -> float:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(copies):
            run()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
    graph.replay()
    for i, event in enumerate(events):
        if i:
            graph.replay()
        event.record()
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) for a, b in pairwise(events)]
    return statistics.median(times) / copies


def measure_torch(operands: Operands) -> dict[str, float]:
    """The backward by difference: torch's captures want the forward beside it."""
    q, k, v, d_out = operands.torchs()
    forward = time_torch(lambda: attend(q, k, v))
    both = time_torch(lambda: torch.autograd.grad(attend(q, k, v), (q, k, v), d_out))
    return {"forward_ms": forward, "backward_ms": both - forward}


@contextmanager
def reported(row: dict[str, Any]) -> Iterator[None]:
    """A backend that refuses a shape is a row with the reason."""
    try:
        yield
    except RuntimeError as error:
        row["error"] = str(error).splitlines()[0][:200]


def measure(shape: tuple[int, ...], variants: list[str], stream: Any, peers: bool) -> Iterator[dict[str, Any]]:
    """A row for each implementation, as soon as it is measured."""
    operands, arena = Operands(shape, seed=1), device_arena()
    torch.cuda.synchronize()
    for variant in variants:
        family, *macros = variant.split()
        tiles = {name: int(value) for name, value in (word.split("=") for word in macros)}
        options = {"family": family, "tiles": tiles} if tiles else {"family": family}
        row: dict[str, Any] = {"shape": shape, "implementation": f"kos {variant}"}
        with reported(row):
            forward, backward = operands.ours(stream, arena, **options)
            row["forward_ms"] = time_ours(forward, stream)
            row["backward_ms"] = time_ours(backward, stream)
        yield with_rates(row)
    for name, backend in BACKENDS.items() if peers else ():
        row = {"shape": shape, "implementation": name}
        with reported(row), sdpa_kernel(backend):
            row |= measure_torch(operands)
        yield with_rates(row)


def with_rates(row: dict[str, Any]) -> dict[str, Any]:
    for way, factor in (("forward", 1), ("backward", 2.5)):
        if f"{way}_ms" in row:
            row[f"{way}_tflops"] = factor * flops(row["shape"]) / row[f"{way}_ms"] / 1e9
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", type=lambda text: tuple(map(int, text.split(","))), default=SHAPES)
    parser.add_argument("--families", nargs="+", default=["hopper", "mma"], help="of ours; cudnn: through its frontend")
    parser.add_argument("--tiles", nargs="*", default=[], help="more variants of the first family, as macros")
    parser.add_argument("--no-peers", action="store_true", help="leave torch out")
    parser.add_argument("--json", help="write all rows to this file")
    arguments = parser.parse_args()
    if why := cuda.unavailable():
        raise SystemExit(f"kos: error: benchmarks.attention: expected a GPU, got none: {why}")
    cuda.set_device(0)
    torch.cuda.init()
    stream = cuda.create_stream(0)
    variants = arguments.families + [f"{arguments.families[0]} {tiles}" for tiles in arguments.tiles]
    rows: list[dict[str, Any]] = []
    for shape in arguments.shapes:
        for row in measure(shape, variants, stream, not arguments.no_peers):
            rows.append(row)
            numbers = [f"{way} {row[way + '_ms']:8.3f} ms {row[way + '_tflops']:6.1f} TFLOP/s"
                       for way in ("forward", "backward") if way + "_ms" in row]  # fmt: skip
            print(f"{row['shape']!s:24} {row['implementation']:34}", *numbers, row.get("error", ""), flush=True)
    if arguments.json:
        result = {**report.provenance("benchmarks.attention", 0, 1), "rows": rows}
        Path(arguments.json).write_text(report.to_json(result))


if __name__ == "__main__":
    main()
