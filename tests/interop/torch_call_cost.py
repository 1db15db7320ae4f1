"""The CPU time of a call through torch.distributed, without a GPU.

    python -m tests.interop.torch_call_cost gpu                    # the calls of this tree
    python -m tests.interop.torch_call_cost gpu --old TREE         # TREE and this tree by turns
    python -m tests.interop.torch_call_cost gpu --profile NAME     # where the time of one call goes

Two ranks.  With ``gpu``, tensors, streams, events and NCCL are stand-ins that take less time than the real ones, so the
figures are the cost of Python.  They are the microseconds of the calling thread, and the elapsed microseconds of a call
with cold caches, as DDP makes it.  With ``host``, kos and gloo reduce host tensors by turns.  The figures are the CPU
microseconds of the process on rank 0, and elapsed microseconds with warm and with cold caches.
"""

import argparse
import cProfile
import gc
import itertools
import json
import os
import pstats
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import kos.interop.torch
from kos.memory.array import Array
from tests.comm.fake_nccl import Group, no_gpu
from tests.interop.torch_on_host import connect_gpu, tensors_of_a_gpu

TURNS, CALLS, COLD_CALLS, ROUNDS = 9, 200, 20, 3
LIMIT = timedelta(seconds=60)
Calls = dict[str, Callable[[], Any]]
Clock = Callable[[], int]


def cost(run: Callable[[], Any], *clocks: Clock) -> list[float]:
    """Microseconds of each clock for one call."""
    gc.collect()
    gc.disable()
    began = [clock() for clock in clocks]
    for _ in range(CALLS):
        run()
    took = [(clock() - start) / CALLS / 1e3 for clock, start in zip(clocks, began, strict=True)]
    gc.enable()
    return took


def cold_cost(run: Callable[[], Any], memory: bytearray, objects: list[str]) -> float:
    """Elapsed microseconds of one call after 8 MB of other data: the median."""
    took = []
    for _ in range(COLD_CALLS):
        memory.count(1)
        sum(map(len, objects))
        began = time.perf_counter_ns()
        run()
        took.append((time.perf_counter_ns() - began) / 1e3)
    return statistics.median(took)


def by_turns(calls: Calls, *clocks: Clock) -> dict[str, list[float]]:
    """The median of each clock for each call, and that with cold caches."""
    times: dict[str, list[list[float]]] = {name: [] for name in calls}
    others = bytearray(6 << 20), [str(number) for number in range(1 << 15)]  # 2 MB
    for turn in range(-1, TURNS):
        for name, call in calls.items():
            took = [*cost(call, *clocks), cold_cost(call, *others)]
            if turn >= 0:
                times[name].append(took)
    medians = {name: map(statistics.median, zip(*each, strict=True)) for name, each in times.items()}
    return {name: [round(each, 2) for each in row] for name, row in medians.items()}


def gpu_calls(group: Any, comm: kos.Communicator) -> Calls:
    x, parts, sizes = torch.zeros(2048), torch.zeros(4096), itertools.cycle(range(1, 2048))
    y = torch.zeros(2049)  # for the other stream: the core does not compare streams of host tensors
    array, options = Array(x.data_ptr(), (2048,), "float32", 0), dist.AllreduceOptions()
    options.asyncOp = True

    def waited(call: Callable[..., Any], *args: Any) -> Callable[[], Any]:
        return lambda: call(*args, group=group, async_op=True).wait()

    return {
        "all_reduce": partial(dist.all_reduce, x, group=group),
        "all_reduce async": waited(dist.all_reduce, y),
        "all_reduce async + get_future": lambda: group.allreduce([y], options).get_future(),
        "all_gather_into_tensor async": waited(dist.all_gather_into_tensor, parts, x),
        "reduce_scatter_tensor async": waited(dist.reduce_scatter_tensor, x, parts),
        "broadcast": partial(dist.broadcast, x, 0, group=group),
        "all_reduce of another size each time": lambda: dist.all_reduce(x[: next(sizes)], group=group),
        "all_reduce of kos on its own array": lambda: comm.all_reduce(array),
    }


def profiled(calls: Calls, name: str | None, rank: int) -> None:
    if name is not None:
        profiler = cProfile.Profile()
        cost(calls[name], time.perf_counter_ns)
        profiler.runcall(lambda: [calls[name]() for _ in range(5000)])
        if rank == 0:
            pstats.Stats(profiler).sort_stats("tottime").print_stats(30)


def on_gpu(rank: int, profile: str | None) -> dict[str, list[float]]:
    with pytest.MonkeyPatch.context() as patch, no_gpu(patch) as fake, tensors_of_a_gpu(patch) as cuda:
        for name in ("all_reduce", "all_gather", "reduce_scatter", "broadcast"):
            patch.setattr(fake, name, lambda *arguments: None)
        patch.setattr(cuda, "log", Nothing())
        group: Any = dist.new_group([0, 1], backend="kos", timeout=LIMIT)
        with connect_gpu(group, Group(1)) as comm:
            calls = gpu_calls(group, comm)
            profiled(calls, profile, rank)
            return by_turns(calls, time.thread_time_ns)


class Nothing:
    """A log that holds nothing."""

    def append(self, entry: Any) -> None:
        pass


def on_host(rank: int, profile: str | None) -> dict[str, list[float]]:
    calls: Calls = {}
    groups = {name: dist.new_group([0, 1], backend=name, timeout=LIMIT) for name in ("kos", "gloo")}
    for nbytes in (8, 1 << 10, 8 << 10, 64 << 10):
        x = torch.zeros(nbytes // 4)
        calls |= {f"{name} {nbytes} B": partial(dist.all_reduce, x, group=group) for name, group in groups.items()}
    profiled(calls, profile, rank)
    return by_turns(calls, time.process_time_ns, time.perf_counter_ns)


def measure(kind: str, profile: str | None) -> dict[str, list[float]]:
    """The times of rank 0; the other rank is a fork of this process."""
    with tempfile.TemporaryDirectory() as folder:
        child = os.fork()
        rank = int(child == 0)
        dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2, timeout=LIMIT)
        found = {"gpu": on_gpu, "host": on_host}[kind](rank, profile)
        dist.barrier()
        if rank:
            os._exit(0)
        os.waitpid(child, 0)
        return found


def compare(kind: str, old: Path) -> None:
    """The times of the package kos in ``old`` and in this tree, by turns; the tests are this tree's."""
    here, rows = Path(__file__).resolve().parents[2], dict[str, dict[str, list[list[float]]]]()
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(ROUNDS):
            for name, tree in (("old", old), ("new", here)):
                package = Path(folder, name)
                package.mkdir(exist_ok=True)
                if not (package / "kos").exists():
                    (package / "kos").symlink_to(tree.resolve() / "kos")
                env = os.environ | {"PYTHONPATH": f"{package}:{here}", "PYTHONWARNINGS": "ignore"}
                command = [sys.executable, "-P", "-m", "tests.interop.torch_call_cost", kind]
                done = subprocess.run(command, env=env, text=True, stdout=subprocess.PIPE, timeout=300, check=True)
                for call, times in json.loads(done.stdout).items():
                    rows.setdefault(call, {}).setdefault(name, []).append(times)
    for call, trees in rows.items():
        before, after = ([statistics.median(each) for each in zip(*trees[name], strict=True)] for name in trees)
        print(f"{call:38}", *(f"{a:9.2f} -> {b:7.2f}" for a, b in zip(before, after, strict=True)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("gpu", "host"))
    parser.add_argument("--old", type=Path, metavar="TREE", help="a folder that holds another package kos")
    parser.add_argument("--profile", metavar="NAME", help="print the functions of that call")
    arguments = parser.parse_args()
    if arguments.old is not None:
        compare(arguments.kind, arguments.old)
    else:
        print(json.dumps(measure(arguments.kind, arguments.profile), indent=1), flush=True)
        os._exit(0)  # a thread of gloo may still wait for the other rank


if __name__ == "__main__":
    main()
