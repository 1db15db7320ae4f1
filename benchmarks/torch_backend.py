"""torch.distributed over kos against ProcessGroupNCCL, on the same GPUs in the same run.

    python -m benchmarks.torch_backend --ranks 4 --json results.json

For each operation and size: the CPU's time of a call (the loop that queues them), and the time of a call end to end,
eager, with ``async_op`` and in a CUDA graph.  Then a step of DDP on a small model with many buckets, and of FSDP2
on the preset 1b.  The two groups take turns, and each figure is the median of the turns.
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
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.multiprocessing.spawn import spawn

import kos.interop.torch
from benchmarks.torch_llama import TorchLlama
from kos.commands import program
from kos.train.config.options import TrainConfig
from kos.train.config.presets import PRESETS

FEW = (8 << 10, 128 << 10, 1 << 20, 16 << 20)  # bytes
SIZES = {
    "all_reduce": (8 << 10, 64 << 10, 128 << 10, 1 << 20, 16 << 20, 128 << 20),
    "all_gather_into_tensor": FEW, "reduce_scatter_tensor": FEW, "all_to_all_single": FEW, "broadcast": FEW,
}  # fmt: skip
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


def measure(groups: dict[str, Any], name: str, nbytes: int) -> dict[str, Any]:
    """Times of one operation on each group; ``nbytes`` of its larger array."""
    x, ranks = torch.zeros(nbytes // 4, device="cuda"), dist.get_world_size()
    part = x[: x.numel() // ranks].clone()
    arguments = {
        "all_reduce": (x,), "broadcast": (x, 0), "all_gather_into_tensor": (x, part),
        "reduce_scatter_tensor": (part, x), "all_to_all_single": (x.clone(), x),
    }[name]  # fmt: skip
    call = getattr(dist, name)
    calls = CALLS if nbytes <= 1 << 20 else 20
    runs: dict[str, Callable[[], Any]] = {}
    for of, group in groups.items():
        for asynchronous in (False, True):

            def eager(group: Any = group, asynchronous: bool = asynchronous) -> None:
                for _ in range(calls):
                    work = call(*arguments, group=group, async_op=asynchronous)
                    if work is not None:
                        work.wait()

            runs[f"{of} {'async' if asynchronous else 'eager'}"] = eager
            eager()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            runs[f"{of} eager"]()
        runs[f"{of} graph"] = graph.replay
    times: dict[str, list[tuple[float, float]]] = {of: [] for of in runs}
    for _ in range(TURNS):
        for of, run in runs.items():
            times[of].append(timed(run, calls))
    row: dict[str, Any] = {"bytes": nbytes}
    for of, each in times.items():
        cpu, whole = (statistics.median(column) for column in zip(*each, strict=True))
        row[of] = {"cpu_us": round(cpu, 2), "us": round(whole, 2)}
    return row


def ddp(groups: dict[str, Any]) -> dict[str, float]:
    """Milliseconds of a step of DDP: 24 layers of 256 features, 4 sequences of 128, buckets of 0.1 MB."""
    steps = dict[str, Callable[[], None]]()
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
        steps[name] = run
    return by_turns(steps, 5, TURNS)


def fsdp(groups: dict[str, Any]) -> dict[str, float]:
    """Milliseconds of a step of FSDP2: the preset 1b, two sequences of 4,096 a rank, bf16 with fp32 masters."""
    shape = TrainConfig(**PRESETS["1b"].values).model_config_for(0)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    steps = dict[str, Callable[[], None]]()
    for name, group in groups.items():
        mesh = DeviceMesh.from_group(group, "cuda")
        torch.manual_seed(0)
        with torch.device("cuda"):
            model = TorchLlama(shape)
        for layer in [*model.blocks, model]:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        model.make_tables(4096, torch.device("cuda"))
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        tokens = torch.randint(0, shape.vocab_size, (2, 4096), device="cuda")

        def run(model: Any = model, optimizer: Any = optimizer, tokens: Any = tokens) -> None:
            for _ in range(3):
                model(tokens, tokens).backward()
                optimizer.step()
                optimizer.zero_grad()

        run()
        steps[name] = run
    return by_turns(steps, 3, 5)


def by_turns(steps: dict[str, Callable[[], None]], each: int, turns: int) -> dict[str, float]:
    """Milliseconds of a step, of which a run makes ``each``."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(turns):
        for name, run in steps.items():
            times[name].append(timed(run, each)[1] / 1e3)
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
    rows: dict[str, list[dict[str, Any]]] = {}
    for name, sizes in SIZES.items():
        rows[name] = []
        for nbytes in sizes:
            rows[name].append(measure(groups, name, nbytes))
            if rank == 0:
                print(name, json.dumps(rows[name][-1]), flush=True)
    small, large = ddp(groups), fsdp(groups)
    if rank == 0:
        print("ms a step: DDP", json.dumps(small), "FSDP2", json.dumps(large), flush=True)
        host = {"gpu": torch.cuda.get_device_name(), "ranks": ranks, "torch": torch.__version__}
        host |= {"nccl": ".".join(map(str, torch.cuda.nccl.version())), "date": time.strftime("%Y-%m-%d")}
        found = {**host, **rows, "ddp_ms": small, "fsdp_ms": large}
        Path(output).write_text(json.dumps(found, indent=1) + "\n")
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
        spawn(rank_main, (arguments.ranks, str(store), arguments.json), arguments.ranks)
    finally:
        store.unlink(missing_ok=True)


assert kos.interop.torch.Options is not None  # imported for its registration

if __name__ == "__main__":
    main()
