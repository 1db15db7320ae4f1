"""Weights from a publisher on a GPU to a subscriber on the same GPU or on another, and the copy limit in the same run.

    python -m benchmarks.transfer_gpu --layers 32 --out benchmarks/results/transfer-gpu.json

Both are processes, with the bfloat16 tensors of LLaMA 3 8B (or fewer layers).  The limit is one copy of as many bytes,
from the memory of the publisher that the subscriber has mapped, to the same place.  Limit and update are measured in
turn, and the median is reported.  On two GPUs, torch's NCCL broadcasts of the same tensors are measured too.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.transfer import ROOT
from kos import cuda
from kos.cuda import driver
from kos.cuda.driver import call, cu
from kos.memory import Array, ipc
from kos.transfer import Placement, Publisher, Subscriber

HIDDEN, KV, INNER, VOCABULARY = 4096, 1024, 14336, 128256


def shapes(layers: int) -> dict[str, tuple[int, ...]]:
    """The tensors of LLaMA 3 8B with so many layers."""
    layer = {
        "q": (HIDDEN, HIDDEN), "k": (KV, HIDDEN), "v": (KV, HIDDEN), "o": (HIDDEN, HIDDEN), "gate": (INNER, HIDDEN),
        "up": (INNER, HIDDEN), "down": (HIDDEN, INNER), "norm": (HIDDEN,), "norm2": (HIDDEN,),
    }  # fmt: skip
    found = {f"{index}.{name}": shape for index in range(layers) for name, shape in layer.items()}
    return {"embedding": (VOCABULARY, HIDDEN), **found, "norm": (HIDDEN,), "head": (VOCABULARY, HIDDEN)}


def allocate(layers: int, device: int) -> tuple[Array, dict[str, tuple[Array, Placement]]]:
    """One piece of memory, and the tensors in it."""
    wanted, at = shapes(layers), 0
    sizes = {name: Placement.whole(shape).count for name, shape in wanted.items()}
    flat, arrays = Array.empty((sum(sizes.values()),), "bfloat16", device), {}
    for name, shape in wanted.items():
        arrays[name] = flat[at : at + sizes[name]].reshape(shape), Placement.whole(shape)
        at += sizes[name]
    return flat, arrays


def publish(layers: int, device: int, memory: Any) -> None:
    """The publisher: prints its address, then publishes for each line of its input, and prints the seconds."""
    flat, arrays = allocate(layers, device)
    with Publisher(None, arrays, memory=memory, patience=0.0, buffers=2) as publisher:
        print(publisher.address, flush=True)
        version = 0
        for line in sys.stdin:
            if line == "multiply\n":
                print(multiply(device), flush=True)
                continue
            version += 1
            flat.fill_bytes(version % 100)
            cuda.synchronize(device)
            began = time.perf_counter()
            publisher.publish(version)
            print(time.perf_counter() - began, flush=True)


def multiply(device: int) -> float:
    """Seconds of a product of matrices, as a trainer makes them all the time; the median of many."""
    try:
        import torch
    except ImportError:
        return 0.0
    x = torch.ones(8192, 8192, dtype=torch.bfloat16, device=f"cuda:{device}")
    seconds = []
    for _ in range(500):
        began = time.perf_counter()
        x @ x
        torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


class Other:
    def __init__(self, *command: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.transfer_gpu", *command], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True, cwd=ROOT,
        )  # fmt: skip
        self.first = self.line()

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def go(self, what: str = "") -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{what}\n")
        self.process.stdin.flush()
        return self.line()

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


def timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def measure(layers: int, rounds: int, source: int, target: int, memory: str, cases: list[tuple[Any, bool]]) -> Any:
    """Rates in GB/s of updates of a subscriber on ``target``, for each transport and whether it is staged."""
    other = Other("--publish", memory, "--layers", str(layers), "--device", str(source))
    flat, arrays = allocate(layers, target)
    found: dict[str, Any] = {"publisher": source, "subscriber": target, "memory": memory, "bytes": flat.nbytes}
    seconds: dict[str, list[float]] = {"publish": []}
    try:
        for transport, staged in cases:
            name = f"{transport}, {'staged' if staged else 'unstaged'}"
            seconds[name], seconds[f"limit of {name}"], version, mapped = [], [], len(seconds["publish"]), None
            with Subscriber(other.first, arrays, transport=transport, staged=staged) as subscriber:
                for turn in range(rounds + 2):
                    seconds["publish"].append(float(other.go()))
                    version += 1
                    took = timed(lambda: subscriber.update(300))
                    check(arrays, version % 100)
                    if mapped is None and (gpus := subscriber.catalogue().ranks[0].gpus):
                        mapped = ipc.attach(ipc.IpcHandle.from_bytes(gpus[0].encode()), target)
                    limit = timed(partial(copy, flat, mapped.pointer)) if mapped else 0.0
                    if turn > 1:  # each buffer was read once
                        seconds[name].append(took)
                        seconds[f"limit of {name}"].append(limit)
                unchanged = [1e3 * timed(lambda: subscriber.update(10)) for _ in range(200)]
                found["unchanged, ms"] = round(statistics.median(unchanged), 3)
            if mapped:
                mapped.close()
    finally:
        other.close()
    rates = {n: flat.nbytes / 1e9 / statistics.median(each) for n, each in seconds.items() if each and min(each)}
    found["GB/s"] = {name: round(rate, 1) for name, rate in rates.items()}
    for name in [n for n in rates if f"limit of {n}" in rates]:
        found[f"{name}, of the limit"] = round(rates[name] / rates[f"limit of {name}"], 3)
    return found


def slower(layers: int, source: int, target: int) -> dict[str, float]:
    """Milliseconds of products on the publisher's GPU, alone and while a subscriber reads all the time."""
    other, (_, arrays) = Other("--publish", "device", "--layers", str(layers), "--device", str(source)), allocate(
        layers, target)  # fmt: skip
    reads, ends = 0, threading.Event()

    def read() -> None:
        nonlocal reads
        while not ends.is_set():
            with Subscriber(other.first, arrays, transport="shared", staged=False) as subscriber:
                subscriber.update(60)
            reads += 1

    try:
        other.go()
        other.go("multiply")
        alone, thread = float(other.go("multiply")), threading.Thread(target=read, daemon=True)
        thread.start()
        read_too = float(other.go("multiply"))
        ends.set()
        thread.join(60)
        seconds = {"alone": alone, "while it is read": read_too, "alone again": float(other.go("multiply"))}
    finally:
        other.close()
    return {**{f"ms {name}": round(1e3 * each, 4) for name, each in seconds.items()}, "reads": reads}


def copy(flat: Array, source: int) -> None:
    with driver.on_device(flat.device):
        call(cu.cuMemcpyAsync, flat.pointer, source, flat.nbytes, 1)
        call(cu.cuStreamSynchronize, 1)


def check(arrays: dict[str, tuple[Array, Placement]], value: int) -> None:
    for name, (array, _) in arrays.items():
        for row in (array[:1], array[-1:]):
            assert (row.numpy().view("u1") == value).all(), f"{name}: not {value}"


def broadcasts(layers: int, rounds: int) -> dict[str, Any] | None:
    """GB/s of torch's broadcasts of each tensor from GPU 0 to GPU 1, over a group of both processes."""
    env = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29777", "NCCL_NVLS_ENABLE": "0"}
    command = [sys.executable, "-m", "benchmarks.transfer_gpu", "--layers", str(layers), "--rounds", str(rounds)]
    ranks = [
        subprocess.Popen([*command, "--broadcast", str(rank)], stdout=subprocess.PIPE, text=True, env=env, cwd=ROOT)
        for rank in range(2)
    ]  # fmt: skip
    try:
        texts = [each.communicate(timeout=300)[0] for each in ranks]
    finally:
        for each in ranks:
            each.kill()
    return json.loads(texts[1]) if texts[1] else None


def broadcast(rank: int, layers: int, rounds: int) -> None:
    try:
        import torch
        import torch.distributed as dist
    except ImportError:
        return
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=2)
    tensors = [torch.ones(shape, dtype=torch.bfloat16, device="cuda") for shape in shapes(layers).values()]
    nbytes = sum(each.nbytes for each in tensors)

    def run() -> None:
        for each in tensors:
            dist.broadcast(each, 0)
        torch.cuda.synchronize()

    run()
    seconds = [timed(run) for _ in range(rounds)]
    dist.destroy_process_group()
    print(json.dumps({"torch": torch.__version__, "GB/s": round(nbytes / 1e9 / statistics.median(seconds), 1)}))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.transfer_gpu", description=__doc__)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--publish", choices=["device", "host"], help=argparse.SUPPRESS)
    parser.add_argument("--device", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--broadcast", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.publish:
        return publish(args.layers, args.device, args.publish)
    if args.broadcast is not None:
        return broadcast(args.broadcast, args.layers, args.rounds)
    shared, few, two = [("shared", False), ("shared", True)], min(args.layers, 2), len(cuda.visible_devices()) > 1
    work: list[Callable[[], Any]] = [lambda: measure(args.layers, args.rounds, 0, 0, "device", shared)]
    if two:
        work.append(lambda: measure(args.layers, args.rounds, 0, 1, "device", shared))
        work.append(lambda: {"a product of matrices": slower(args.layers, 0, 1)})
        work.append(lambda: {"torch's broadcasts": broadcasts(args.layers, args.rounds)})
    work.append(lambda: measure(few, 3, 0, int(two), "device", [("tcp", False)]))
    work.append(lambda: measure(few, 3, 0, 0, "host", [("shared", False)]))
    found: dict[str, Any] = {
        "gpus": [each.name for each in cuda.visible_devices()], "date": time.strftime("%Y-%m-%d"),
        "command": " ".join(["python -m benchmarks.transfer_gpu", *sys.argv[1:]]), "rows": [],
    }  # fmt: skip
    for each in work:
        found["rows"].append(each())
        print(json.dumps(found["rows"][-1], indent=1), flush=True)
        if args.out:
            args.out.write_text(json.dumps(found, indent=1) + "\n")
    return None


if __name__ == "__main__":
    main()
