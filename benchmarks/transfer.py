"""Weights from a publisher to a subscriber on this host, and what loopback sockets carry in the same run.

    python -m benchmarks.transfer --out benchmarks/results/transfer-cpu.json

One publisher process and one subscriber process exchange one large tensor and many small ones.  A separate program
gives the limit.  It has a process that sends the same number of bytes over the same number of TCP connections, and a
process that receives them into memory that it has touched before.  Updates and the program are measured in turn.  Two
ratios are reported: the ratio of the best rounds, and the median of the ratios of all rounds.  On an idle machine, the
benchmark takes less than a minute.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import kos
from kos.transfer import Placement, Publisher, Subscriber

ROOT = Path(__file__).resolve().parent.parent
SMALL = 200  # tensors of 64 KiB
STREAMS = 4


def shapes(megabytes: int) -> dict[str, tuple[int, ...]]:
    return {"large": (megabytes, 1 << 18), **{f"small.{index}": (1 << 14,) for index in range(SMALL)}}


def publish(megabytes: int) -> None:
    """A publisher process: prints its address, then publishes a version for each line of its input."""
    arrays = {n: (np.ones(shape, np.float32), Placement.whole(shape)) for n, shape in shapes(megabytes).items()}
    with Publisher(None, arrays) as publisher:
        print(publisher.address, flush=True)
        for version, _ in enumerate(sys.stdin, 1):
            began = time.perf_counter()
            publisher.publish(version)
            print(time.perf_counter() - began, flush=True)


def send(nbytes: int, streams: int) -> None:
    """The sender of the limit: prints its port, then sends ``nbytes`` over ``streams`` connections, again and again."""
    memory = memoryview(np.ones(nbytes, np.uint8).data)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        sockets = [listener.accept()[0] for _ in range(streams)]
        each = nbytes // streams
        for _ in sys.stdin:
            parts = [memory[index * each : (index + 1) * each] for index in range(streams)]
            in_threads([lambda s=s, p=p: s.sendall(p) for s, p in zip(sockets, parts, strict=True)])


def in_threads(work: list[Callable[[], Any]]) -> None:
    threads = [threading.Thread(target=each, daemon=True) for each in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def receive(sock: socket.socket, memory: memoryview) -> None:
    while memory:
        memory = memory[sock.recv_into(memory) :]


class Other:
    """Another process of this program."""

    def __init__(self, *command: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.transfer", *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True, cwd=ROOT,
        )  # fmt: skip
        self.first = self.line()

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


class Limit:
    """What loopback sockets carry."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes, self.other = nbytes, Other("--send", str(nbytes))
        self.memory = np.ones(nbytes, np.uint8)
        self.sockets = [socket.create_connection(("127.0.0.1", int(self.other.first))) for _ in range(STREAMS)]

    def seconds(self) -> float:
        each, view = self.nbytes // STREAMS, memoryview(self.memory.data)
        parts = [view[index * each : (index + 1) * each] for index in range(STREAMS)]
        began = time.perf_counter()
        self.other.go()
        in_threads([lambda s=s, p=p: receive(s, p) for s, p in zip(self.sockets, parts, strict=True)])
        return time.perf_counter() - began


def measure(megabytes: int, rounds: int) -> dict[str, Any]:
    wanted = shapes(megabytes)
    arrays = {n: (np.zeros(shape, np.float32), Placement.whole(shape)) for n, shape in wanted.items()}
    nbytes = sum(array.nbytes for array, _ in arrays.values())
    publisher, limit = Other("--publish", str(megabytes)), Limit(nbytes - nbytes % STREAMS)
    cases: dict[str, dict[str, Any]] = {
        "tcp, unstaged": {"transport": "tcp", "staged": False}, "tcp, staged": {"transport": "tcp"},
        "mapped, unstaged": {"transport": "shared", "staged": False}, "mapped, staged": {"transport": "shared"},
    }  # fmt: skip
    seconds: dict[str, list[float]] = {"sockets": [], "copy": [], "publish": [], **{name: [] for name in cases}}
    try:
        subscribers = {n: Subscriber(publisher.first, arrays, streams=STREAMS, **more) for n, more in cases.items()}
        copies = [np.ones(nbytes // 4, np.float32) for _ in range(2)]
        for _ in range(rounds + 1):  # the first warms up
            publisher.go()
            seconds["publish"].append(float(publisher.line()))
            for name, subscriber in subscribers.items():
                seconds[name].append(subscriber.update(120).seconds)
                if name.startswith("tcp, un"):
                    seconds["sockets"].append(limit.seconds())
            began = time.perf_counter()
            np.copyto(*copies)
            seconds["copy"].append(time.perf_counter() - began)
        last, unchanged = subscribers["tcp, staged"], list[float]()
        for _ in range(500):
            began = time.perf_counter()
            assert not last.update(10).changed
            unchanged.append(1e3 * (time.perf_counter() - began))
        assert all((array == 1).all() for array, _ in arrays.values())
    finally:
        publisher.close()
        limit.other.close()
    best = {name: nbytes / 1e9 / min(each[1:]) for name, each in seconds.items()}
    tcp = [name for name in cases if name.startswith("tcp")]
    pairs = {name: [*zip(seconds["sockets"][1:], seconds[name][1:], strict=True)] for name in tcp}
    of_sockets = {name: statistics.median(limit / took for limit, took in each) for name, each in pairs.items()}
    return {
        "bytes": nbytes, "streams": STREAMS, "rounds": rounds,
        "GB/s, best": {name: round(rate, 3) for name, rate in best.items()},
        "GB/s, median": {n: round(nbytes / 1e9 / statistics.median(each[1:]), 3) for n, each in seconds.items()},
        "of sockets, best of each": {name: round(best[name] / best["sockets"], 3) for name in tcp},
        "of sockets, median of the rounds": {name: round(share, 3) for name, share in of_sockets.items()},
        "unchanged, ms": {
            "median": round(statistics.median(unchanged), 3), "p99": round(sorted(unchanged)[int(0.99 * 500)], 3)
        },
    }  # fmt: skip


def provenance() -> dict[str, Any]:
    cpu = next((line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()
                if line.startswith("model name")), platform.machine())  # fmt: skip
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    return {
        "cpu": cpu, "cores": len(os.sched_getaffinity(0)), "load": os.getloadavg()[0], "kernel": platform.release(),
        "python": platform.python_version(), "numpy": np.__version__, "kos": kos.__version__,
        "commit": commit.strip(), "date": time.strftime("%Y-%m-%d"),
        "command": " ".join(["python -m benchmarks.transfer", *sys.argv[1:]]),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.transfer", description=__doc__)
    parser.add_argument("--megabytes", type=int, default=512, help="size of the large tensor")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--publish", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--send", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.publish:
        return publish(args.publish)
    if args.send:
        return send(args.send, STREAMS)
    found = {**provenance(), **measure(args.megabytes, args.rounds)}
    text = json.dumps(found, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")
    return None


if __name__ == "__main__":
    main()
