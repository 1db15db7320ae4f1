"""What a call through torch.distributed costs the CPU, without a GPU: python -m tests.interop.torch_call_cost

Two ranks.  On "cuda" the tensors, streams, events and NCCL are stand-ins, which take less time than the real ones: the
figures are what kos and Python add.  On "cpu" kos and gloo move the data, by turns.  Microseconds of the CPU for each
call: of the calling thread on "cuda", of the process on "cpu".  Each is the median of the turns of rank 0.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import os
import pstats
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import kos.interop.torch  # noqa: F401 -- registers the backend
from tests.comm.fake_nccl import Comm, Group, no_gpu
from tests.interop.torch_on_host import connect_gpu, tensors_of_a_gpu

TURNS = 15
Calls = dict[str, Callable[[], Any]]


def on_gpu(group: Any) -> Calls:
    """Calls on stand-ins for tensors of a GPU."""
    x, parts = torch.zeros(2048), torch.zeros(4096)

    def waited(call: Callable[..., Any]) -> Callable[[], Any]:
        return lambda: call(group=group, async_op=True).wait()

    from functools import partial

    calls: Calls = {
        "all_reduce": lambda: dist.all_reduce(x, group=group),
        "all_reduce async": waited(partial(dist.all_reduce, x)),
        "all_gather_into_tensor async": waited(partial(dist.all_gather_into_tensor, parts, x)),
        "reduce_scatter_tensor async": waited(partial(dist.reduce_scatter_tensor, x, parts)),
        "broadcast": lambda: dist.broadcast(x, 0, group=group),
    }
    array = kos.memory.Array(x.data_ptr(), (2048,), "float32", 0)
    calls["kos: all_reduce, cached"] = lambda: group._gpu.all_reduce(array)

    def fresh() -> None:
        dist.all_reduce(x[: next(sizes)], group=group)

    import itertools

    sizes = itertools.cycle(range(1, 2048))
    calls["all_reduce, another size each time"] = fresh
    return calls


def cost(run: Callable[[], Any], calls: int, clock: Callable[[], int]) -> float:
    gc.collect()
    gc.disable()
    began = clock()
    for _ in range(calls):
        run()
    took = clock() - began
    gc.enable()
    return took / calls / 1e3


def gpu_rank(rank: int, profile: str | None) -> dict[str, float]:
    with pytest.MonkeyPatch.context() as patch, no_gpu(patch) as fake:
        nothing = lambda *arguments: None  # noqa: E731
        for name in ("all_reduce", "all_gather", "reduce_scatter", "broadcast"):
            setattr(fake, name, nothing)
        group = dist.new_group([0, 1], backend="kos", timeout=timedelta(seconds=60))
        patch.setattr(kos.comm.watchdog, "add", nothing)
        with tensors_of_a_gpu(patch):
            backend: Any = group
            connect_gpu(backend, lambda rendezvous: Comm(Group(1), rendezvous.rank))
            calls = on_gpu(backend)
            for call in calls.values():
                cost(call, 300, time.thread_time_ns)
            if profile:
                if rank == 0:
                    profiler = cProfile.Profile()
                    profiler.enable()
                for _ in range(5000):
                    calls[profile]()
                if rank == 0:
                    profiler.disable()
                    pstats.Stats(profiler).sort_stats("tottime").print_stats(40)
            times: dict[str, list[float]] = {name: [] for name in calls}
            for _ in range(TURNS):
                for name, call in calls.items():
                    times[name].append(cost(call, 500, time.thread_time_ns))
            for comm in (backend._gpu,):
                comm.backend.shared.confirm()
            return {name: round(statistics.median(each), 2) for name, each in times.items()}


def cpu_rank(rank: int, profile: str | None) -> dict[str, float]:
    groups = {name: dist.new_group([0, 1], backend=name, timeout=timedelta(seconds=60)) for name in ("kos", "gloo")}
    times: dict[str, list[float]] = {}
    for nbytes in (8, 1 << 10, 8 << 10, 64 << 10):
        x = torch.zeros(nbytes // 4)
        runs: Calls = {}
        for name, group in groups.items():
            runs[f"{name} {nbytes}"] = lambda group=group, x=x: dist.all_reduce(x, group=group)  # type: ignore[misc]
        for name, run in runs.items():
            cost(run, 100, time.process_time_ns)
        for _ in range(TURNS):
            for name, run in runs.items():
                wall = time.perf_counter_ns()
                times.setdefault(name, []).append(cost(run, 300, time.process_time_ns))
                times.setdefault(f"{name} wall", []).append((time.perf_counter_ns() - wall) / 300e3)
    if profile:
        x = torch.zeros(256)
        if rank == 0:
            profiler = cProfile.Profile()
            profiler.enable()
        for _ in range(2000):
            dist.all_reduce(x, group=groups["kos"])
        if rank == 0:
            profiler.disable()
            pstats.Stats(profiler).sort_stats("tottime").print_stats(40)
    return {name: round(statistics.median(each), 2) for name, each in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("cuda", "cpu"))
    parser.add_argument("--profile", metavar="CALL", help="print where the time of that call goes")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        child = os.fork()
        rank = int(child == 0)
        dist.init_process_group(
            "gloo", f"file://{folder}/store", rank=rank, world_size=2, timeout=timedelta(seconds=60)
        )
        found = (gpu_rank if arguments.kind == "cuda" else cpu_rank)(rank, arguments.profile)
        if rank == 0:
            print(json.dumps(found, indent=1), flush=True)
        dist.barrier()
        if rank:
            os._exit(0)
        os.waitpid(child, 0)
    sys.stdout.flush()
    os._exit(0)


assert Path

if __name__ == "__main__":
    main()
