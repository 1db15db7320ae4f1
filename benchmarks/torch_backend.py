"""torch.distributed over kos against ProcessGroupNCCL, on the same GPUs in the same run.

    python -m benchmarks.torch_backend --ranks 4 --json results.json

For each size: the CPU's time of a call (the loop that queues them), the time of a call end to end, eager and in a CUDA
graph, and then the steps per second of DDP on a small model with many buckets.  The two groups take turns, and each
figure is the median of the turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

import kos.interop.torch
from kos.commands import program

SIZES = (8 << 10, 64 << 10, 128 << 10, 1 << 20, 16 << 20, 128 << 20)  # bytes
TURNS, CALLS = 7, 200


def timed(run: Callable[[], Any], calls: int) -> tuple[float, float]:
    """Microseconds of the CPU, and end to end, for each of ``calls`` calls that one ``run()`` makes."""
    torch.cuda.synchronize()
    dist.barrier()
    began = time.perf_counter()
    run()
    queued = time.perf_counter() - began
    torch.cuda.synchronize()
    return queued / calls * 1e6, (time.perf_counter() - began) / calls * 1e6


def all_reduce(groups: dict[str, Any], nbytes: int) -> dict[str, Any]:
    """Times of one size on each group."""
    x = torch.zeros(nbytes // 4, device="cuda")
    calls = CALLS if nbytes <= 1 << 20 else 20
    runs: dict[str, Callable[[], Any]] = {}
    for name, group in groups.items():
        for asynchronous in (False, True):

            def eager(group: Any = group, asynchronous: bool = asynchronous) -> None:
                for _ in range(calls):
                    work = dist.all_reduce(x, group=group, async_op=asynchronous)
                    if work is not None:
                        work.wait()

            runs[f"{name} {'async' if asynchronous else 'eager'}"] = eager
            eager()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            runs[f"{name} eager"]()
        runs[f"{name} graph"] = graph.replay
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for _ in range(TURNS):
        for name, run in runs.items():
            times[name].append(timed(run, calls))
    row: dict[str, Any] = {"bytes": nbytes}
    for name, each in times.items():
        cpu, whole = (statistics.median(column) for column in zip(*each, strict=True))
        row[name] = {"cpu_us": round(cpu, 2), "us": round(whole, 2)}
    return row


def ddp(groups: dict[str, Any]) -> dict[str, float]:
    """Milliseconds of a step of DDP: 24 layers of 256 features, 4 sequences of 128, buckets of 0.1 MB."""
    steps, times = {}, dict[str, list[float]]()
    for name, group in groups.items():
        torch.manual_seed(0)
        layers = [torch.nn.TransformerEncoderLayer(256, 4, 1024, 0.0, batch_first=True) for _ in range(24)]
        model = torch.nn.parallel.DistributedDataParallel(
            torch.nn.Sequential(*layers).cuda(), [torch.cuda.current_device()], process_group=group, bucket_cap_mb=0.1
        )
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        x = torch.randn(4, 128, 256, device="cuda")

        def run(model: Any = model, optimizer: Any = optimizer, x: Any = x) -> None:
            for _ in range(5):
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()

        run()
        steps[name], times[name] = run, []
    for _ in range(TURNS):
        for name, run in steps.items():
            times[name].append(timed(run, 5)[1] / 1e3)
    return {name: round(statistics.median(each), 3) for name, each in times.items()}


def rank_main(rank: int, ranks: int, store: str, output: str) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl", f"file://{store}", rank=rank, world_size=ranks, timeout=timedelta(seconds=60),
        device_id=torch.device("cuda", rank),
    )  # fmt: skip
    everyone = list(range(ranks))
    ours = dist.new_group(everyone, backend="kos", timeout=timedelta(seconds=60))
    groups = {"nccl": dist.group.WORLD, "kos": ours}
    rows = []
    for nbytes in SIZES:
        rows.append(all_reduce(groups, nbytes))
        if rank == 0:
            print(json.dumps(rows[-1]), flush=True)
    step = ddp(groups)
    if rank == 0:
        print("DDP, ms a step:", json.dumps(step), flush=True)
        host = {"gpu": torch.cuda.get_device_name(), "ranks": ranks, "torch": torch.__version__}
        host |= {"nccl": ".".join(map(str, torch.cuda.nccl.version())), "date": time.strftime("%Y-%m-%d")}
        Path(output).write_text(json.dumps({**host, "all_reduce": rows, "ddp_ms": step}, indent=1) + "\n")
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(
        program("benchmarks.torch_backend"), description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count())
    parser.add_argument("--json", default="torch_backend.json")
    arguments = parser.parse_args()
    store = Path(arguments.json).resolve().with_suffix(".store")
    store.unlink(missing_ok=True)
    try:
        multiprocessing.spawn(rank_main, (arguments.ranks, str(store), arguments.json), arguments.ranks)
    finally:
        store.unlink(missing_ok=True)


assert kos.interop.torch.Options  # imported for its registration

if __name__ == "__main__":
    main()
