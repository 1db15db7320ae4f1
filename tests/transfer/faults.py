"""Random faults of publishers and subscribers, each a process of its own.

``python -m tests.transfer.faults --faults 200 --seed 1`` runs a campaign, and prints what was wrong.  One publisher of
1 to 3 ranks publishes all the time, and subscribers update all the time.  After each fault the driver waits until every
subscriber that lives has a version that was published after it.  Wrong are: an ``update`` or ``publish`` that takes
longer than its limit (hung); a version that is not whole (torn); an error that does not name what has failed; and a
side that does not go on.  With ``--gpus N`` the arrays of each process are on one of N GPUs, in turn.
"""

import argparse
import json
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import kos
from kos.errors import KosError
from kos.memory import Array
from kos.transfer import Placement, Publisher, Subscriber
from tests.campaign import HUNG, MARGIN, RIGHT, START_SECONDS, campaign, environment, until
from tests.comm.tcp_ranks import free_port
from tests.forked import Forked, fork_server
from tests.transfer.publishing import set_version, torn

SHAPES = {"a.weight": (256, 1024), "b.weight": (6, 6), "norm": (7,), "scale": ()}
KINDS = (
    "publisher rank killed", "publisher rank stopped", "publisher restarted", "publisher with other ranks",
    "subscriber killed", "subscriber stopped", "subscriber joins", "wrong secret",
)  # fmt: skip
UPDATE_SECONDS, COMM_SECONDS, RECOVER_SECONDS = 3.0, 5.0, 60.0
LATE = r"expected an answer before the deadline|expected [\d,]+ bytes before the deadline, got .*, and none in the last"
"""What an update says of a publisher that was stopped before it answered, or while it sent a version."""


def write(path: Path, **facts: Any) -> None:
    """Add a line to the report of a process."""
    with path.open("a") as file:
        file.write(json.dumps(facts) + "\n")


# --- the processes --------------------------------------------------------------------------------------


def on_gpu(arrays: dict[str, tuple[np.ndarray, Placement]], device: int | None) -> dict[str, tuple[Any, Placement]]:
    """The same arrays on a GPU; None: themselves."""
    return {n: (x if device is None else Array.from_numpy(x, device), p) for n, (x, p) in arrays.items()}


def run_publisher(address: str, report: str, first: int, device: int | None) -> int:
    """A publisher rank: versions from ``first`` on, until a rank is asked to end by SIGTERM."""
    ends = []
    signal.signal(signal.SIGTERM, lambda *_: ends.append(1))
    path, version, began = Path(report), first, time.monotonic()
    try:
        with kos.init("tcp", timeout=START_SECONDS) as comm:
            comm.timeout = COMM_SECONDS
            wholes = {name: Placement.whole(shape) for name, shape in SHAPES.items()}
            r, n = comm.rank, comm.size
            placed = {k: p.flat(p.count * r // n, p.count * (r + 1) // n) for k, p in wholes.items()}
            arrays = {name: (np.zeros(each.shape, np.float32), each) for name, each in placed.items()}
            held = on_gpu(arrays, device)
            with Publisher(comm, held, address, patience=0.02, checksums=True) as publisher:
                while not any(comm.all_gather_bytes(b"e" * bool(ends))):
                    set_version(arrays, version, SHAPES)
                    for name in arrays if device is not None else ():
                        held[name][0].copy_from(arrays[name][0])
                    began = time.monotonic()
                    publisher.publish(version)
                    write(path, version=version, seconds=time.monotonic() - began)
                    version += 1
                    time.sleep(0.01)
    except KosError as error:
        write(path, error=str(error), ranks=list(error.ranks), seconds=time.monotonic() - began)
        return 3
    return 0


def run_subscriber(address: str, report: str, seed: int, transport: str, device: int | None) -> int:
    """Update all the time; every version must be whole."""
    path, choose = Path(report), random.Random(seed)
    halves = {"a.weight": Placement.shard(SHAPES["a.weight"], seed % 2, 0, 2), "norm": Placement.whole((7,))}
    arrays = {name: (np.zeros(placed.shape, np.float32), placed) for name, placed in halves.items()}
    held = on_gpu(arrays, device)
    subscriber = Subscriber(address, held, transport=transport, staged=seed % 3 > 0)
    while True:
        began = time.monotonic()
        try:
            update = subscriber.update(UPDATE_SECONDS, verify=choose.random() < 0.3)
        except KosError as error:
            write(path, error=str(error), ranks=list(error.ranks), seconds=time.monotonic() - began)
            time.sleep(0.05)
            continue
        seconds, mixed = time.monotonic() - began, torn(held, update.version, SHAPES)
        write(path, version=update.version, torn=mixed, seconds=seconds, restarted=update.restarted)
        time.sleep(0.005)


# --- the driver -----------------------------------------------------------------------------------------


class Process:
    """A process and the lines of its report that were not read yet."""

    def __init__(self, started: Forked, path: Path) -> None:
        self.started, self.path, self.pid, self._at = started, path, started.pid, 0
        self.newest = -1
        self.errors: list[dict[str, Any]] = []
        self.wrong: list[str] = []

    def read(self) -> None:
        with suppress(FileNotFoundError), self.path.open() as file:
            file.seek(self._at)
            for line in iter(file.readline, ""):
                if not line.endswith("\n"):
                    break
                self._at += len(line.encode())
                facts = json.loads(line)
                self.newest = facts.get("version", self.newest)
                self.errors += [facts] if "error" in facts else []
                if facts.get("torn"):
                    self.wrong.append(f"torn: {facts}")
                if facts["seconds"] > max(UPDATE_SECONDS, COMM_SECONDS) + MARGIN:
                    self.wrong.append(f"hung: {facts}")

    def signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)


@dataclass(frozen=True)
class Fault:
    """One of the faults of a campaign."""

    kind: str
    number: int
    seed: int


class World:
    """A publisher and its subscribers."""

    def __init__(self, folder: Path, seed: int, gpus: int) -> None:
        self.folder, self.random, self.count, self.gpus = folder, random.Random(seed), 0, gpus
        self.hung = False
        self.address, self.publisher, self.subscribers = f"127.0.0.1:{free_port()}", list[Process](), list[Process]()
        self.start_publisher(2)
        for _ in range(2):
            self.join()

    def start(self, call: str, arguments: list[Any], **env: str) -> Process:
        self.count += 1
        path = self.folder / f"{self.count}.jsonl"
        arguments = [arguments[0], str(path), *arguments[1:], self.count % self.gpus if self.gpus else None]
        log, whole = self.folder / "log", environment(**env)
        return Process(fork_server().start(f"tests.transfer.faults:{call}", arguments, whole, log), path)

    def start_publisher(self, ranks: int) -> None:
        port, first = str(free_port()), max([0, *(each.newest for each in self.publisher)]) + 1
        env = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        self.publisher = [
            self.start("run_publisher", [self.address, first], **env, RANK=str(rank)) for rank in range(ranks)
        ]

    def join(self) -> Process:
        transport = self.random.choice(["auto", "tcp"])
        self.subscribers.append(self.start("run_subscriber", [self.address, self.random.randrange(1000), transport]))
        return self.subscribers[-1]

    def read(self) -> None:
        for each in (*self.publisher, *self.subscribers):
            each.read()

    def wait(self, what: str, holds: Callable[[], bool]) -> None:
        if not until(lambda: self.read() or holds(), RECOVER_SECONDS):
            raise AssertionError(f"hung: no end of the wait until {what}\n{self.story()}")

    def all_go_on(self) -> None:
        """Every rank publishes, and every subscriber gets versions that are newer than now."""
        self.read()
        now = max(each.newest for each in (*self.publisher, *self.subscribers))
        self.wait("all ranks publish", lambda: all(each.newest > now for each in self.publisher))
        self.wait("all subscribers have new versions", lambda: all(each.newest > now for each in self.subscribers))

    def story(self) -> str:
        log = self.folder / "log"
        lines = [f"{each.path.name}: newest {each.newest}, {each.errors[-2:]}" for each in
                 (*self.publisher, *self.subscribers)]  # fmt: skip
        return "\n".join([*lines, log.read_text(errors="replace")[-3000:] if log.exists() else ""])

    def close(self) -> None:
        for each in (*self.publisher, *self.subscribers):
            each.signal(signal.SIGKILL)
            each.started.wait(RECOVER_SECONDS)

    # --- faults -----------------------------------------------------------------------------------------

    def run(self, fault: Fault) -> tuple[str, str]:
        """The verdict of a fault, and the story.  After one that hangs, the others are not tried."""
        try:
            wrong = ["one before it has hung"] if self.hung else self.fault(fault.kind)
        except AssertionError as error:
            self.hung, wrong = True, [str(error)]
        return HUNG if self.hung else "wrong" if wrong else RIGHT, "\n".join(wrong)

    def fault(self, kind: str) -> list[str]:
        """Cause a fault, and wait until all goes on; what was wrong."""
        for each in (*self.publisher, *self.subscribers):
            each.errors.clear()
        wrong = [*getattr(self, kind.replace(" ", "_"))()]
        self.all_go_on()
        named = re.compile(rf"publisher( rank \d+ \(pid| \w+)? at .*|publisher \w+ at {self.address}|publisher rank \d")
        for each in self.subscribers:
            wrong += [f"not named: {error['error']}" for error in each.errors if not named.search(error["error"])]
        for each in (*self.publisher, *self.subscribers):
            wrong += each.wrong
            each.wrong.clear()
        return wrong

    def publisher_rank_killed(self) -> Iterator[str]:
        victim = self.random.randrange(len(self.publisher))
        self.publisher[victim].signal(signal.SIGKILL)
        yield from self.survivors(victim)
        self.start_publisher(self.random.randint(1, 3))

    def survivors(self, victim: int) -> Iterator[str]:
        """They end, and name the victim."""
        for rank, each in enumerate(self.publisher):
            each.started.wait(RECOVER_SECONDS)
            self.read()
            if rank != victim and [error["ranks"] for error in each.errors] != [[victim]]:
                yield f"culprit {victim} not named by publisher rank {rank}: {each.errors}"

    def publisher_rank_stopped(self) -> Iterator[str]:
        victim = self.random.randrange(len(self.publisher))
        before = {each: len(each.errors) for each in self.subscribers}
        self.publisher[victim].signal(signal.SIGSTOP)
        if victim == 0:  # all subscribers ask it
            self.wait("the stopped rank is missed", lambda: all(len(e.errors) > before[e] for e in self.subscribers))
            for each in self.subscribers:
                if not re.search(LATE, each.errors[-1]["error"]):
                    yield f"a stopped publisher is not said to be late: {each.errors[-1]}"
        others = [each for rank, each in enumerate(self.publisher) if rank != victim]
        self.wait("other ranks end", lambda: all(each.started.poll() is not None for each in others))
        self.publisher[victim].signal(signal.SIGKILL)
        self.publisher[victim].signal(signal.SIGCONT)
        yield from self.survivors(victim)
        self.start_publisher(self.random.randint(1, 3))

    def publisher_restarted(self, ranks: int = 0) -> Iterator[str]:
        ranks = ranks or len(self.publisher)
        for each in self.publisher:
            each.signal(signal.SIGTERM)
        for each in self.publisher:
            each.started.wait(RECOVER_SECONDS)
        self.read()
        yield from (f"an end fails: {each.errors}" for each in self.publisher if each.errors)
        self.start_publisher(ranks)

    def publisher_with_other_ranks(self) -> Iterator[str]:
        return self.publisher_restarted(self.random.choice([n for n in (1, 2, 3) if n != len(self.publisher)]))

    def subscriber_killed(self) -> Iterator[str]:
        victim = self.subscribers.pop(self.random.randrange(len(self.subscribers)))
        victim.signal(signal.SIGKILL)
        victim.started.wait(RECOVER_SECONDS)
        yield from self.publisher_unharmed()
        self.join()

    def publisher_unharmed(self) -> Iterator[str]:
        now = self.publisher[0].newest
        self.wait("the publisher goes on", lambda: self.publisher[0].newest > now + 2)
        yield from (f"the publisher was harmed: {each.errors}" for each in self.publisher if each.errors)

    def subscriber_stopped(self) -> Iterator[str]:
        """It is stopped in an update or between two; its lease ends, and it goes on with a newer version."""
        victim = self.random.choice(self.subscribers)
        victim.signal(signal.SIGSTOP)
        yield from self.publisher_unharmed()
        victim.signal(signal.SIGCONT)

    def subscriber_joins(self) -> Iterator[str]:
        self.join()
        yield from self.publisher_unharmed()
        if len(self.subscribers) > 3:
            first = self.subscribers.pop(0)
            first.signal(signal.SIGKILL)
            first.started.wait(RECOVER_SECONDS)

    def wrong_secret(self) -> Iterator[str]:
        stranger = self.start("run_subscriber", [self.address, 1, "tcp"], KOS_SECRET="another")
        def answered() -> bool:
            stranger.read()
            return bool(stranger.errors) or stranger.newest >= 0

        self.wait("the stranger has an answer", answered)
        if stranger.newest >= 0 or "expected the same secret (KOS_SECRET)" not in stranger.errors[0]["error"]:
            yield f"a stranger is answered: {stranger.newest} {stranger.errors}"
        elif self.address not in stranger.errors[0]["error"]:
            yield f"not named: {stranger.errors[0]}"
        stranger.signal(signal.SIGKILL)
        stranger.started.wait(RECOVER_SECONDS)
        yield from self.publisher_unharmed()


def run(faults: int, seed: int, out: Path | None = None, gpus: int = 0) -> int:
    """Run the faults, each kind about equally often; the number of wrong ones."""
    kinds = [KINDS[index % len(KINDS)] for index in range(faults)]
    random.Random(seed).shuffle(kinds)
    with tempfile.TemporaryDirectory(prefix="kos-transfer-") as name:
        world = World(Path(name), seed, gpus)
        try:
            world.all_go_on()
            found = [Fault(kind, number, seed) for number, kind in enumerate(kinds)]
            return campaign({"seed": seed, "gpus": gpus}, found, world.run, out=out)
        finally:
            world.close()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.transfer.faults")
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--gpus", type=int, default=0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    return int(run(args.faults, args.seed, args.out, args.gpus) > 0)


if __name__ == "__main__":
    sys.exit(main())
