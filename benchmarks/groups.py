"""How long a change of the membership takes: python -m benchmarks.groups [--hosts 2] [--json FILE]

Ranks on this machine run collectives over tcp (shared memory, or sockets with ``--hosts``), or on GPUs with ``--backend
nccl`` or ``peer``.  In each round one of them kills itself, rank 0 in every other pair of rounds, while a newcomer
waits.  Seconds, the slowest rank of each round:

- detect: from the kill to the error on the survivors
- shrink: the call, and a first all_reduce of the survivors
- grow: the call, and a first all_reduce, with the newcomer
- replace: shrink and grow in one call, and a first all_reduce; in rounds of their own
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import kos
from kos.bench.report import provenance, to_json
from kos.commands import program
from kos.cuda.devices import visible_devices
from kos.errors import RankLost
from kos.files import check_writable
from kos.memory import Array

SECONDS = 60.0  # limit for each wait
PARTS = ("detect", "shrink", "grow", "replace")


def add(comm: kos.Communicator) -> None:
    """Run an all_reduce of 1,000 numbers, and wait for it."""
    comm.all_reduce(np.ones(1000) if comm.device is None else Array.zeros(1000, "float32", comm.device))
    comm.synchronize()


def timed(call: Any) -> tuple[kos.Communicator, float]:
    """The communicator that ``call()`` returns, and the seconds until it has added for the first time."""
    began = time.monotonic()
    comm = call()
    add(comm)
    return comm, time.monotonic() - began


def largest(comm: kos.Communicator, number: int) -> int:
    return max(int(each) for each in comm.all_gather_bytes(str(number).encode()))


def run_rank(rounds: int, folder: Path, joins: bool, backend: str) -> None:
    """One rank: plays the rounds that are left, and prints what it measured."""
    comm = kos.join(timeout=SECONDS) if joins else kos.init(backend, timeout=SECONDS)
    add(comm)
    number = 0
    while (number := largest(comm, number)) < rounds:
        while not largest(comm, comm.newcomers()):
            time.sleep(0.001)
        try:
            comm.barrier()
            if comm.rank == (comm.size - 1) * (number // 2 % 2):
                (folder / str(number)).write_text(repr(time.monotonic()))
                os.kill(os.getpid(), signal.SIGKILL)
            while True:
                add(comm)
        except RankLost:
            found = {"detect": time.monotonic() - float((folder / str(number)).read_text())}
        if number % 2:
            comm, found["replace"] = timed(comm.replace)
        else:
            comm, found["shrink"] = timed(comm.shrink)
            grown = comm
            comm, found["grow"] = timed(lambda grown=grown: grown.grow(1))
        print(json.dumps({"round": number, **found}), flush=True)
        number += 1
    comm.close()


def measure(ranks: int, rounds: int, hosts: int, backend: str) -> dict[str, list[float]]:
    """Start the ranks, and a newcomer for each round; the seconds of each part, the slowest rank of each round."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="kos-groups-") as name:
        env = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
        env |= {"KOS_JOIN": f"{name}/address", "OPENBLAS_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "benchmarks.groups", "--rounds", str(rounds), "--backend", backend]
        command += ["--as-rank", name]

        def start(number: int, more: dict[str, str], *options: str) -> subprocess.Popen[str]:
            host = {"KOS_HOST": f"host {number % hosts}"} if hosts > 1 else {}
            return subprocess.Popen([*command, *options], env=env | host | more, stdout=subprocess.PIPE, text=True)

        processes = [start(rank, {"RANK": str(rank)}) for rank in range(ranks)]
        for number in range(rounds):
            processes.append(start(number, {}, "--joins"))
            while not (Path(name) / str(number)).exists():  # it waits until the round begins
                if all(process.poll() is not None for process in processes):
                    raise SystemExit("groups: the ranks ended early")
                time.sleep(0.01)
        rows = [json.loads(line) for process in processes for line in process.communicate()[0].splitlines()]
    parts = {part: [[row[part] for row in rows if row["round"] == number and part in row] for number in range(rounds)]
             for part in PARTS}  # fmt: skip
    return {part: [max(each) for each in found if each] for part, found in parts.items()}


def main() -> None:
    parser = argparse.ArgumentParser(prog=program("benchmarks.groups"), description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--hosts", type=int, default=1, help="that the ranks pretend to be on")
    parser.add_argument("--backend", choices=("tcp", "nccl", "peer"), default="tcp")
    parser.add_argument("--json", type=Path, help="where to write the seconds")
    parser.add_argument("--as-rank", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--joins", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_rank is not None:
        return run_rank(options.rounds, options.as_rank, options.joins, options.backend)
    if options.json is not None:
        check_writable(options.json)
    seconds = measure(options.ranks, options.rounds, options.hosts, options.backend)
    print(f"{options.ranks} ranks on {options.hosts} hosts, {options.backend}, seconds: median, largest")
    for part, found in seconds.items():
        print(f"{part:8} {median(found):6.3f} {max(found):6.3f}")
    if options.json is not None:
        shape = {"backend": options.backend, "ranks": options.ranks, "hosts": options.hosts, "rounds": options.rounds}
        gpu, gpus = (None, 1) if options.backend == "tcp" else (0, len(visible_devices()))
        rows = [{"what": part, "seconds": [round(each, 4) for each in found]} for part, found in seconds.items()]
        options.json.write_text(to_json(provenance("benchmarks.groups", gpu, gpus) | shape | {"rows": rows}))


if __name__ == "__main__":
    main()
