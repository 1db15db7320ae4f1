"""torch.distributed over kos against ProcessGroupNCCL, on the same GPUs in the same run.

    python -m benchmarks.torch_backend --ranks 4 --json results.json

For each operation and size: the CPU's time of a call (the loop that queues them), and the time of a call end to end,
eager, with ``async_op`` and in a CUDA graph.  Then a step of DDP on a small model with many buckets, of FSDP2 on the
preset 1b, of tensor parallel on MLPs, and of DDP and FSDP2 on eight layers of 1,024 features, which the CPU
limits.  The groups take turns, and each figure is the median of the turns.  ``ratio`` is the median of kos / nccl over
the turns, and ``interval`` a confidence interval of that median, of at least 95%.  FSDP2 of 1b is measured with
``Options(gpu="nccl")`` too: ``fsdp_by_nccl_ms``.
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
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.multiprocessing.spawn import spawn

import kos.interop.torch
from benchmarks.torch_llama import TorchLlama
from kos.bench.report import provenance, to_json
from kos.commands import program
from kos.train.config import PRESETS
from kos.train.config.options import TrainConfig

FEW = (8 << 10, 128 << 10, 1 << 20, 16 << 20)  # bytes
SIZES = {
    "all_reduce": (8 << 10, 64 << 10, 128 << 10, 1 << 20, 16 << 20, 128 << 20),
    "all_gather_into_tensor": FEW, "reduce_scatter_tensor": FEW, "all_to_all_single": FEW, "broadcast": FEW,
}  # fmt: skip
TURNS, CALLS = 9, 200
STEP_TURNS = 31  # a step depends on the CPU, which other processes disturb


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


Steps = dict[str, Any]
"""Milliseconds of a step over "kos" and "nccl", the ``ratio`` kos / nccl and its ``interval``."""


def ddp(groups: dict[str, Any]) -> dict[str, Steps]:
    """DDP: 24 layers of 256 features, 4 sequences of 128, buckets of 0.1 MB."""
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
    return by_turns(steps, 5)


def wide_layers(groups: dict[str, Any], shard: bool) -> dict[str, Steps]:
    """DDP, or with ``shard`` FSDP2 of each layer: 8 transformer layers of 1,024 features, 4 sequences of 128."""
    steps = dict[str, Callable[[], None]]()
    for name, group in groups.items():
        torch.manual_seed(0)
        layers = [torch.nn.TransformerEncoderLayer(1024, 16, 4096, 0.0, batch_first=True) for _ in range(8)]
        model: Any = torch.nn.Sequential(*layers).cuda()
        if shard:
            mesh = DeviceMesh.from_group(group, "cuda")
            for layer in [*model, model]:
                fully_shard(layer, mesh=mesh)
        else:
            model = torch.nn.parallel.DistributedDataParallel(model, [torch.cuda.current_device()], process_group=group)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        x = torch.randn(4, 128, 1024, device="cuda")

        def run(model: Any = model, optimizer: Any = optimizer, x: Any = x) -> None:
            for _ in range(4):
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()

        run()
        steps[name] = run
    return by_turns(steps, 4)


def fsdp(groups: dict[str, Any]) -> dict[str, Steps]:
    """FSDP2: the preset 1b, two sequences of 4,096 a rank, bf16 with fp32 masters."""
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
            for _ in range(2):
                model(tokens, tokens).backward()
                optimizer.step()
                optimizer.zero_grad()

        run()
        steps[name] = run
    return by_turns(steps, 2)


def mlps(mesh: DeviceMesh, features: int) -> torch.nn.Module:
    """8 MLPs, each sharded as tensor parallel does: an all_reduce of its output, and one of its input's gradient."""
    torch.manual_seed(0)
    linear, inner = torch.nn.Linear, 4 * features
    layers = [torch.nn.Sequential(linear(features, inner), torch.nn.GELU(), linear(inner, features)) for _ in range(8)]
    model = torch.nn.Sequential(*layers).to(mesh.device_type, torch.bfloat16)
    for layer in model:
        parallelize_module(layer, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return model


def tensor_parallel(groups: dict[str, Any]) -> dict[str, Steps]:
    """A forward and backward of 8 MLPs of 2,048 features, on 4,096 tokens in bfloat16."""
    steps = dict[str, Callable[[], None]]()
    for name, group in groups.items():
        model = mlps(DeviceMesh.from_group(group, "cuda"), 2048)
        x = torch.randn(4096, 2048, device="cuda", dtype=torch.bfloat16, requires_grad=True)

        def run(model: Any = model, x: Any = x) -> None:
            for _ in range(5):
                model(x).square().mean().backward()

        run()
        steps[name] = run
    return by_turns(steps, 5)


def by_turns(steps: dict[str, Callable[[], None]], each: int) -> dict[str, Steps]:
    """Time runs of ``each`` steps in turns; every second turn reverses the order of the groups.

    Returns the steps of each group but "nccl", by name.
    """
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(STEP_TURNS):
        for name, run in list(steps.items())[:: -1 if turn % 2 else 1]:
            times[name].append(timed(run, each)[1] / 1e3)
    theirs, found = times.pop("nccl"), dict[str, Steps]()
    for name, ours in times.items():
        ratios = sorted(mine / other for mine, other in zip(ours, theirs, strict=True))
        found[name] = {
            "nccl": round(statistics.median(theirs), 3), "kos": round(statistics.median(ours), 3),
            # Order statistics: the tenth of 31 values and the tenth from the end enclose the median with a
            # probability of 0.97.
            "ratio": round(statistics.median(ratios), 4), "interval": [round(ratios[9], 4), round(ratios[-10], 4)],
        }  # fmt: skip
    return found


def rank_main(rank: int, ranks: int, store: str, output: str) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl", f"file://{store}", rank=rank, world_size=ranks, timeout=timedelta(seconds=60),
        device_id=torch.device("cuda", rank),
    )  # fmt: skip
    everyone = list(range(ranks))
    ours = dist.new_group(everyone, backend="kos", timeout=timedelta(seconds=60))
    groups = {"nccl": dist.group.WORLD, "kos": ours}
    by_nccl = dist.new_group(
        everyone, backend="kos", timeout=timedelta(seconds=60), pg_options=kos.interop.torch.Options(gpu="nccl")
    )
    found: dict[str, Any] = {}
    for name, sizes in SIZES.items():
        found[name] = []
        for nbytes in sizes:
            found[name].append(measure(groups, name, nbytes))
            if rank == 0:
                print(name, json.dumps(found[name][-1]), flush=True)
    every = {
        "ddp": ddp(groups), "fsdp": fsdp({**groups, "by_nccl": by_nccl}), "tp": tensor_parallel(groups),
        "ddp_wide": wide_layers(groups, False), "fsdp_wide": wide_layers(groups, True),
    }  # fmt: skip
    steps = {f"{name}_ms": found["kos"] for name, found in every.items()}
    steps["fsdp_by_nccl_ms"] = every["fsdp"]["by_nccl"]
    if rank == 0:
        print("ms a step:", json.dumps(steps), flush=True)
        unit = "microseconds of a call in a loop; cpu_us: until it is queued; *_ms: milliseconds a step"
        found = {**provenance("benchmarks.torch_backend", rank, ranks), "unit": unit, "ranks": ranks, **found, **steps}
        Path(output).write_text(to_json({**found, "rows": []}))
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
