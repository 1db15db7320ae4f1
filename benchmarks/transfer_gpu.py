"""Weights from publishers on GPUs to subscribers on GPUs: updates, the copy limit, and torch's NCCL, in one call.

    python -m benchmarks.transfer_gpu --out benchmarks/results/transfer-gpu.json

Each rank is a process (``benchmarks.transfer_ranks``) that holds bfloat16 tensors of LLaMA 3 8B, or of fewer of its
layers.  A part of the benchmark measures one pattern of publishers and subscribers.  Its limit is the time of plain
copies: the subscriber copies as many bytes from the mapped memory of each publisher, all at once.  Updates and limit
are measured alternately.  A rate is the bytes of a subscriber rank, divided by the median time of the slowest rank.
After the first update, the arrays are compared with what was published: one layer element by element.

A part runs only if there are enough GPUs for it.  It has its own processes and deadline, and its results are written as
soon as it ends.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

from benchmarks.transfer_ranks import MODELS
from kos import cuda
from kos.bench.report import provenance
from kos.commands import program

ROOT = Path(__file__).resolve().parent.parent
COMMAND, RANKS = [sys.executable, "-m"], "benchmarks.transfer_ranks"
STEP_SECONDS, STEP_ROUNDS = 0.6, 8


class Pattern(NamedTuple):
    """The layouts of both sides, as ``transfer_ranks.placements`` has them, and the GPU of each rank."""

    publish: str
    publishers: Sequence[int]
    subscribe: str
    subscribers: Sequence[int]


ONE = Pattern("whole", [0], "whole", [0])
TWO = Pattern("whole", [0], "whole", [1])
SHARED = Pattern("tp", [0, 1], "tp", [0, 1])
REPLICAS = Pattern("tp", [0, 1], "whole", [2, 3])
ZERO = Pattern("zero", [0, 1], "tp", [2, 3])


class Processes:
    """The processes of a part of the benchmark.  They are killed at its deadline, or at its end.

    ``command`` starts a process; the module and its arguments follow.
    """

    def __init__(self, seconds: float, command: Sequence[str]) -> None:
        self._command = command
        self._started, self._limit = list[subprocess.Popen[str]](), threading.Timer(seconds, self._kill)
        self._limit.daemon = True
        self._limit.start()

    def start(self, module: str, specs: Sequence[dict[str, Any]]) -> Ranks:
        """A process for each rank, with the variables by which the ranks find each other."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = str(free.getsockname()[1])
        env = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "NCCL_NVLS_ENABLE": "0",
               "WORLD_SIZE": str(len(specs))}  # fmt: skip
        pipe = subprocess.PIPE
        found = [
            subprocess.Popen([*self._command, module, json.dumps({**spec, "rank": rank, "ranks": len(specs)})],
                             cwd=ROOT, env={**env, "RANK": str(rank)}, stdin=pipe, stdout=pipe, text=True)
            for rank, spec in enumerate(specs)
        ]  # fmt: skip
        self._started += found
        return Ranks(module, found)

    def _kill(self) -> None:
        for each in self._started:
            each.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._limit.cancel()
        self._kill()
        for each in self._started:
            with contextlib.suppress(OSError):  # a pipe to a process that has ended
                each.communicate()


class Ranks:
    """The processes of one side."""

    def __init__(self, name: str, processes: Sequence[subprocess.Popen[str]]) -> None:
        self._name, self._processes = name, processes

    def post(self, method: str, *arguments: Any) -> None:
        for each in self._processes:
            assert each.stdin is not None
            each.stdin.write(json.dumps([method, *arguments]) + "\n")
            each.stdin.flush()

    def answers(self) -> list[Any]:
        found = []
        for rank, each in enumerate(self._processes):
            assert each.stdout is not None
            line = each.stdout.readline()
            if not line:
                raise RuntimeError(f"{self._name}, rank {rank}: expected an answer, got its end")
            found.append(json.loads(line))
        return found

    def ask(self, method: str, *arguments: Any) -> list[Any]:
        """The results of all ranks, which call the method at the same time."""
        self.post(method, *arguments)
        return self.answers()


class Size(NamedTuple):
    """What is measured, and how its processes are started."""

    model: str
    layers: int
    rounds: int
    unchanged: int = 200
    """Updates without a newer version."""
    command: Sequence[str] = COMMAND


def start(processes: Processes, size: Size, pattern: Pattern, memory: str) -> tuple[Ranks, Ranks, int]:
    """Publishers, subscribers, and the bytes of the arrays of a subscriber."""
    common = {"model": size.model, "layers": size.layers, "memory": memory}
    offers = {**common, "side": "publisher", "layout": pattern.publish}
    publishers = processes.start(RANKS, [{**offers, "device": device} for device in pattern.publishers])
    wants = {**common, "side": "subscriber", "layout": pattern.subscribe, "address": publishers.answers()[0]}
    subscribers = processes.start(RANKS, [{**wants, "device": device} for device in pattern.subscribers])
    return publishers, subscribers, max(subscribers.answers())


def measure(
    size: Size, pattern: Pattern, seconds: float, *, memory: str = "device", transport: str = "shared",
    cases: Sequence[bool] = (False, True),
) -> dict[str, Any]:  # fmt: skip
    """The rates of updates and of the limit, in GB/s.  ``cases`` says whether updates are staged."""
    taken: dict[str, list[float]] = {"publish": []}
    with Processes(seconds, size.command) as processes:
        publishers, subscribers, nbytes = start(processes, size, pattern, memory)
        found: dict[str, Any] = {"pattern": pattern._asdict(), "memory": memory, "bytes of a subscriber": nbytes}
        version = 0
        for staged in cases:
            name = f"{transport}, {'staged' if staged else 'unstaged'}"
            taken[name], taken[f"limit of {name}"] = updates, limits = list[float](), list[float]()
            subscribers.ask("open", transport, staged)
            for turn in range(size.rounds + 2):
                version += 1
                published = max(publishers.ask("publish", version))
                updated = max(ended - began for began, ended in subscribers.ask("update", version))
                limit = max(subscribers.ask("limit")) if memory == "device" and transport == "shared" else 0.0
                if turn > 1:  # each buffer was read once
                    taken["publish"].append(published)
                    updates.append(updated)
                    limits.append(limit)
            found[f"{name}, unchanged, ms"] = round(1e3 * max(subscribers.ask("unchanged", size.unchanged)), 3)
    medians = {name: statistics.median(each) for name, each in taken.items() if each and min(each)}
    found["ms"] = {name: round(1e3 * each, 3) for name, each in medians.items()}
    found["GB/s"] = {name: round(nbytes / 1e9 / each, 1) for name, each in medians.items() if name != "publish"}
    for name in [name for name in medians if f"limit of {name}" in medians]:
        found[f"{name}, of the limit"] = round(medians[f"limit of {name}"] / medians[name], 3)
    return found


def steps(size: Size, pattern: Pattern, seconds: float) -> dict[str, Any]:
    """The times of training steps of a publisher, alone and while a subscriber reads; others do not count."""
    alone, beside = list[float](), list[float]()
    with Processes(seconds, size.command) as processes:
        publishers, subscribers, nbytes = start(processes, size, pattern, "device")
        subscribers.ask("open", "shared", False)
        warm = publishers.ask("steps", 2.0)[0]
        for version in range(1, STEP_ROUNDS + 1) if warm else ():
            publishers.ask("publish", version)
            publishers.post("steps", STEP_SECONDS)
            time.sleep(STEP_SECONDS / 3)
            (reads_from, reads_until), *_ = subscribers.ask("update", version)
            for began, ended in publishers.answers()[0]:
                if reads_from <= began and ended <= reads_until:
                    beside.append(ended - began)
                elif ended <= reads_from or reads_until <= began:
                    alone.append(ended - began)
    found: dict[str, Any] = {"pattern": pattern._asdict(), "bytes of a subscriber": nbytes}
    if not beside:
        return {**found, "steps while it is read": 0}
    both = statistics.median(alone), statistics.median(beside)
    return {
        **found, "ms alone": round(1e3 * both[0], 3), "ms while it is read": round(1e3 * both[1], 3),
        "ratio": round(both[1] / both[0], 4), "steps while it is read": len(beside),
    }  # fmt: skip


def nccl(size: Size, trainers: int, ranks: int, seconds: float) -> dict[str, Any]:
    """GB/s of torch's NCCL for the same weights (``benchmarks.transfer_nccl``); the first ranks are the trainers."""
    spec = {"model": size.model, "layers": size.layers, "rounds": size.rounds, "trainers": trainers}
    with Processes(seconds, size.command) as processes:
        found = processes.start("benchmarks.transfer_nccl", [spec] * ranks).answers()
    nbytes, slowest = found[0]["bytes"], {
        way: max(each["seconds"][way] for each in found[trainers:]) for way in found[0]["seconds"]
    }
    rates = {way: round(nbytes / 1e9 / each, 1) for way, each in slowest.items()}
    return {
        "torch": found[0]["torch"], "trainers": trainers, "servers": ranks - trainers, "bytes of a server": nbytes,
        "ms": {way: round(1e3 * each, 3) for way, each in slowest.items()}, "GB/s": rates,
    }  # fmt: skip


def parts(size: Size, gpus: int) -> dict[str, Callable[[float], dict[str, Any]]]:
    """The parts that can run on so many GPUs, the most important first.  A part is called with its limit in seconds."""
    half, few = size._replace(layers=max(1, size.layers // 2)), size._replace(layers=min(2, size.layers), rounds=3)
    found: dict[str, Callable[[float], dict[str, Any]]] = {}
    if gpus >= 4:
        found["tp 2 to dp 2"] = partial(measure, size, REPLICAS)
        found["tp 2 to dp 2, torch's NCCL"] = partial(nccl, size, 2, 4)
        found["ZeRO-1 of dp 2 to tp 2"] = partial(measure, size, ZERO)
    if gpus >= 2:
        found["two GPUs"] = partial(measure, size, TWO)
        found["two GPUs, torch's NCCL"] = partial(nccl, size, 1, 2)
        found["two publishers and two subscribers share two GPUs"] = partial(measure, size, SHARED)
        found["training steps while a version is read"] = partial(steps, size, TWO)
    found["one GPU"] = partial(measure, half, ONE)
    across = TWO if gpus >= 2 else ONE
    found["over TCP"] = partial(measure, few, across, transport="tcp", cases=(False,))
    found["the publisher's memory on the host"] = partial(measure, few, ONE, memory="host", cases=(False,))
    return found


def ratios(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The times of each NCCL method, divided by those of updates without staging memory."""
    took = {row["part"]: row["ms"] for row in rows if "ms" in row}
    return {
        f"{name}: {way} / update": round(seconds / took[name]["shared, unstaged"], 3)
        for name in took for way, seconds in took.get(f"{name}, torch's NCCL", {}).items()
    }  # fmt: skip


def main(words: list[str] | None = None, command: Sequence[str] = COMMAND) -> int:
    parser = argparse.ArgumentParser(prog=program("benchmarks.transfer_gpu"), description=__doc__)
    parser.add_argument("--model", choices=MODELS, default="8b")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--gpus", type=int, help="use so many; default: all")
    parser.add_argument("--only", nargs="*", default=[""], help="the parts whose names begin so")
    parser.add_argument("--seconds", type=float, default=90.0, help="the longest that a part may take")
    parser.add_argument("--minutes", type=float, default=6.0, help="the longest that all parts may take")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(words)
    gpus, ends = len(cuda.visible_devices()) if args.gpus is None else args.gpus, time.monotonic() + 60 * args.minutes
    device = 0 if cuda.visible_devices() else None
    found: dict[str, Any] = {**provenance("benchmarks.transfer_gpu", device, gpus), "rows": []}
    for name, part in parts(Size(args.model, args.layers, args.rounds, command=command), gpus).items():
        if not name.startswith(tuple(args.only)):
            continue
        began = time.monotonic()
        row: dict[str, Any] = {"part": name}
        try:
            row |= part(max(0.001, min(args.seconds, ends - began)))
        except Exception as error:  # also of a process that was killed at the deadline
            row["error"] = f"{type(error).__name__}: {error}"
        row["seconds"] = round(time.monotonic() - began, 1)
        found["rows"].append(row)
        found["ratios"] = ratios(found["rows"])
        print(json.dumps(row), flush=True)
        if args.out:
            args.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found["ratios"]))
    return any("error" in row for row in found["rows"])


if __name__ == "__main__":
    sys.exit(main())
