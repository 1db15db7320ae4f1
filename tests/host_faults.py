"""The fault campaign of hosts: one of two hosts is killed, stopped, cut off or slow while ranks run random collectives.

usage: python -m tests.faults hosts --trials N [--faults KIND ...] [--seed S] [--timeout T] [--out FILE]

The hosts are network namespaces (benchmarks/two_hosts.py: root, Linux) of two ranks each, which a cable joins.  The
ranks run one random program over ``tcp``, until all ranks of one host are killed or stopped, the cable is taken down
(``cut``), or it is slowed to 4 Mbit/s (``slow``).  In half of the cuts one rank is in no call for a second.

A trial is right if every rank that lives ends in time with an error that names ranks of the other host only, and that
host; after a cut that is the case on both hosts.  On a slow cable the ranks must complete the program.  A summary has
the seconds from the fault to the errors, and how many errors named all ranks of the host.
"""

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import kos
from benchmarks.two_hosts import ADDRESSES, CABLE, HOSTS, Hosts, Impossible, two_hosts
from kos.errors import KosError
from tests import faults
from tests.campaign import HUNG, MARGIN, RIGHT, START_SECONDS, Arguments, campaign, described, environment, until, write
from tests.comm.tcp_ranks import free_port

KINDS = ("kill", "stop", "cut", "slow")
SIZE = 4
SLOW_SECONDS = 60.0  # the timeout of calls over a slow cable
SLOW = ["rate", "4mbit", "burst", "32kb", "latency", "400ms"]


def host_of(rank: int, seed: int) -> int:
    """By halves, or in turn."""
    return rank // 2 if seed % 2 else rank % 2


def run_rank(seed: int, kind: str, timeout: float, folder_name: str) -> None:
    """The process of one rank: leaves what it met in its folder."""
    folder, rng = Path(folder_name), np.random.default_rng([seed, 21])
    program = faults._program(rng, SIZE, 15 if kind == "slow" else 300)
    idle = int(rng.integers(2 * SIZE)) if kind == "cut" else -1
    trial = faults.Trial(seed, "tcp", SIZE, "none", -1, len(program), None, False, timeout, program)
    report: dict[str, Any] = {}
    rank, fault = int(os.environ["RANK"]), folder / "fault"

    class Idle(faults.Rank):
        def check(self) -> None:
            super().check()
            if fault.exists() and self.me == idle:
                time.sleep(1.0)

    try:
        with kos.init("tcp", timeout=START_SECONDS) as world:
            part = Idle(trial, world)
            part.warm_up()
            world.timeout = timeout
            (folder / f"{rank}.pid").write_text(str(os.getpid()))
            try:
                while kind == "slow" and not fault.exists():
                    time.sleep(0.01)
                for _ in range(1 if kind == "slow" else 1000):
                    part.run()
                    part = Idle(trial, world)
            except KosError as error:
                report = described(error, part.step) | {"at": time.monotonic()}
    except KosError as error:
        report = report or described(error, "start or end") | {"at": time.monotonic()}
    write(folder / f"{rank}.json", report)


class HostTrial:
    """The random choices of a seed, and what became of them."""

    def __init__(self, seed: int, kind: str, timeout: float) -> None:
        self.seed, self.kind, self.timeout = seed, kind, SLOW_SECONDS if kind == "slow" else timeout
        rng = np.random.default_rng([seed, 22])
        self.victim, self.delay = int(rng.integers(2)), float(rng.random() * 0.5)
        self.on = [[rank for rank in range(SIZE) if host_of(rank, seed) == host] for host in range(2)]
        self.seconds: list[float] = []
        self.whole: list[bool] = []
        self.text = ""

    def __str__(self) -> str:
        return f"seed {self.seed}: host {'ab'[self.victim]} of ranks {self.on[self.victim]}: {self.kind}"

    def start(self, hosts: Hosts, folder: Path) -> list[subprocess.Popen[bytes]]:
        env = environment(MASTER_ADDR=ADDRESSES[0], MASTER_PORT=str(free_port()), WORLD_SIZE=str(SIZE))
        arguments = json.dumps([self.seed, self.kind, self.timeout, str(folder)])
        command = [sys.executable, "-m", "tests.faults", "hosts", "--as-rank", arguments]
        with (folder / "log").open("ab") as log:
            return [
                subprocess.Popen(
                    hosts.on(host_of(rank, self.seed), *command), env=env | {"RANK": str(rank)}, cwd=faults.ROOT,
                    stdout=log, stderr=log, start_new_session=True,
                )
                for rank in range(SIZE)
            ]  # fmt: skip

    def run(self, hosts: Hosts) -> tuple[str, str]:
        """Run it; the verdict, and the story."""
        with tempfile.TemporaryDirectory(prefix="kos-host-faults-", ignore_cleanup_errors=True) as name:
            folder = Path(name)
            processes = self.start(hosts, folder)
            try:
                if not until(lambda: all((folder / f"{r}.pid").exists() for r in range(SIZE)), START_SECONDS):
                    return "not started", (folder / "log").read_text()[-1500:]
                time.sleep(self.delay)
                began = time.monotonic()
                self.fail(folder)
                (folder / "fault").touch()
                alive = list(range(SIZE)) if self.kind in ("cut", "slow") else self.on[1 - self.victim]
                margin = SLOW_SECONDS if self.kind == "slow" else MARGIN
                ended = until(lambda: all(processes[r].poll() is not None for r in alive), self.timeout + margin)
            finally:
                self.mend()
                for process in processes:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
            if not ended:
                left = [rank for rank in alive if not (folder / f"{rank}.json").exists()]
                return HUNG, f"no report of ranks {left}: {(folder / 'log').read_text()[-1500:]}"
            return self.verdict(folder, alive, began)

    def fail(self, folder: Path) -> None:
        if self.kind == "cut":
            subprocess.run(["ip", "-n", HOSTS[self.victim], "link", "set", CABLE, "down"], check=True, timeout=20)
        elif self.kind == "slow":
            for host in HOSTS:
                limit = ["tc", "qdisc", "replace", "dev", CABLE, "root", "tbf", *SLOW]
                subprocess.run(["ip", "netns", "exec", host, *limit], check=True, timeout=20)
        else:
            for rank in self.on[self.victim]:
                pid = int((folder / f"{rank}.pid").read_text())
                os.kill(pid, signal.SIGKILL if self.kind == "kill" else signal.SIGSTOP)

    def mend(self) -> None:
        for host in HOSTS:
            subprocess.run(["ip", "-n", host, "link", "set", CABLE, "up"], check=True, timeout=20)
            quick = ["ip", "netns", "exec", host, "tc", "qdisc", "delete", "dev", CABLE, "root"]
            subprocess.run(quick, capture_output=True, timeout=20)

    def verdict(self, folder: Path, alive: list[int], began: float) -> tuple[str, str]:
        for rank in alive:
            report = json.loads((folder / f"{rank}.json").read_text())
            where = f"rank {rank}: {report}"
            if self.kind == "slow":
                if report:
                    return "failed on a slow cable", where
                continue
            if not report:
                return "no error", where
            other = 1 - host_of(rank, self.seed)
            if not report["ranks"] or not set(report["ranks"]) <= set(self.on[other]):
                return "wrong culprit", where
            if f"host {HOSTS[other]}" not in report["text"] or f"host {HOSTS[1 - other]}" in report["text"]:
                return "host not named", where
            self.seconds.append(report["at"] - began)
            self.whole.append(sorted(report["ranks"]) == self.on[other])
            self.text = f"rank {rank}: {report['kind']}: {report['text']}"
        return RIGHT, ""


def facts(trials: list[HostTrial]) -> dict[str, Any]:
    """The seconds from the fault to the errors, and how many errors named all ranks of the host."""
    seconds, whole = ([x for trial in trials for x in of(trial)] for of in (lambda t: t.seconds, lambda t: t.whole))
    found = {"least": min(seconds), "median": statistics.median(seconds), "most": max(seconds)} if seconds else {}
    return {
        "errors": len(whole), "all ranks named": sum(whole), "example": trials[-1].text,
        "seconds": {name: round(value, 3) for name, value in found.items()},
    }  # fmt: skip


def run(trials: list[HostTrial], out: Path | None) -> int:
    """Run the campaign, and return the number of failed trials."""
    head = {"hosts": 2, "ranks": SIZE, "timeout": trials[0].timeout, "first seed": trials[0].seed}
    with tempfile.TemporaryDirectory() as folder, two_hosts(Path(folder)) as hosts:
        return campaign(head, trials, lambda trial: trial.run(hosts), out=out, facts=facts)


def main(arguments: list[str]) -> int:
    parser = Arguments("hosts", "Kill, stop and cut off hosts.")
    parser.add_argument("--faults", nargs="+", default=KINDS, choices=KINDS, help="in turn")
    parser.set_defaults(trials=8, timeout=3.0)
    options = parser.parse_args(arguments)
    if options.as_rank:
        run_rank(*json.loads(options.as_rank))
        return 0
    kinds = options.faults
    trials = [HostTrial(options.seed + i, kinds[i % len(kinds)], options.timeout) for i in range(options.trials)]
    try:
        return int(run(trials, options.out) > 0)
    except Impossible as why:
        parser.refuse(str(why))
    return 2
