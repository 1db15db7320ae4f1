"""The fault campaign of memberships: kills, stops and joins at random while ranks run random collectives.

usage: python -m tests.faults grow --trials N [--backend tcp|peer] [--seed S] [--timeout T] [--jobs J] [--out FILE]

A trial starts 2 to 4 ranks as processes.  They play rounds of collectives with known results.  After a failure the
survivors call ``shrink``, or ``replace`` and then ``shrink``; when newcomers wait they call ``grow``.  The trial's seed
chooses what happens: ranks are killed (rank 0, two at once, a second one during the recovery), stopped and continued,
and newcomers join, or die or are stopped while they join.  In half of the trials the ranks pretend to be on two hosts.

The trial is right if all live ranks end in time with one membership, which is that of the live processes in their
order, if no result was wrong, and if a rank that was stopped ends with an error that says so, or is still a member.

On ``peer``, ranks share the GPUs, and all are on one host.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import kos
from kos import _core
from kos.errors import KosError
from kos.testing.conformance.model import Step
from tests import campaign
from tests.campaign import HUNG, RIGHT, START_SECONDS, Arguments, environment, until
from tests.comm.tcp_ranks import free_port
from tests.forked import Forked, fork_server

SETTLE_SECONDS = 40.0  # in which the live ranks agree after an event; a stopped one takes some timeouts
ATTEMPTS = 8  # of a rank to continue after one failure
KINDS = (
    "kill", "kill 0", "kill two", "kill in recovery", "kill leaders", "stop", "stop in recovery", "join", "join, kill",
    "join, die", "join, stop",
)  # fmt: skip


@dataclass(frozen=True)
class Trial:
    """What one seed stands for: the same in every process."""

    seed: int
    size: int
    replaces: bool  # after a failure: replace, else shrink
    hosts: int
    timeout: float
    backend: str
    events: list[tuple[str, float]]  # kinds, and a moment within 1 s

    @classmethod
    def of(cls, seed: int, timeout: float, backend: str = "tcp") -> Trial:
        rng = np.random.default_rng([seed, 43])
        kinds = [str(rng.choice(KINDS)) for _ in range(int(rng.integers(1, 4)))]
        events = [(kind, float(rng.random())) for kind in kinds]
        size, replaces, hosts = int(rng.integers(2, 5)), bool(rng.random() < 0.5), int(rng.integers(1, 3))
        return cls(seed, size, replaces, hosts if backend == "tcp" else 1, timeout, backend, events)

    @property
    def kind(self) -> str:
        return "replace" if self.replaces else "shrink"

    def __str__(self) -> str:
        kinds = ", ".join(kind for kind, _ in self.events)
        return f"seed {self.seed}: {self.size} ranks on {self.hosts} hosts, {self.kind}: {kinds}"


# A rank.


class Out(Exception):
    """This rank was left out by the others."""


def run_rank(seed: int, timeout: float, backend: str, folder_name: str, joins: bool) -> int:
    """The process of one rank: leaves what it met in its folder."""
    faulthandler.register(signal.SIGUSR2)
    trial, folder, report = Trial.of(seed, timeout, backend), Path(folder_name), dict[str, Any]()
    code = 1
    try:
        comm = kos.join(timeout=START_SECONDS) if joins else kos.init(backend, timeout=START_SECONDS)
        comm.timeout = timeout
        report["members"] = _play(trial, comm, folder)
        code = 0
    except Out as error:
        report |= {"out": str(error)}
    except (KosError, AssertionError) as error:
        report |= {"error": f"{type(error).__name__}: {error}"}
    campaign.write(folder / f"end-{os.getpid()}.json", report)
    return code


def _play(trial: Trial, comm: kos.Communicator, folder: Path) -> list[int]:
    """Rounds of collectives until the trial is over; the processes of the last membership."""
    me, fresh, members, number = str(os.getpid()).encode(), True, list[int](), 0
    while True:
        try:
            if fresh:
                before, members = members, [int(each) for each in comm.all_gather_bytes(me)]
                kept = [pid for pid in before if pid in members]
                assert members[: len(kept)] == kept, f"the order of members has changed: {before}, {members}"
                shared = _core.native is not None and len(comm.local_ranks) > 1
                assert comm.device is not None or comm.backend.shares_memory == shared, "ranks of a host share memory"
                number, fresh = int(_table(comm, number).max()), False
                campaign.write(folder / f"at-{os.getpid()}.json", {"members": members, "round": number})
            table = _table(comm, number, (folder / "end").exists(), comm.newcomers())
            assert (table[:, 0] == number).all(), f"rounds differ: {table[:, 0]}"
            if table[:, 1].any():
                comm.barrier()
                comm.close()
                return members
            if joining := int(table[:, 2].max()):
                comm, fresh = comm.grow(joining), True
            else:
                _round(comm, np.random.default_rng([trial.seed, number]), number)
                number += 1
        except KosError as error:
            _check_out(comm, error)
            if comm.failure is not None or not str(error).startswith("world: grow"):
                comm, fresh = _recover(trial, comm), True


def _table(comm: kos.Communicator, *numbers: int) -> Any:
    """The numbers of each rank, as a row."""
    return np.array([json.loads(each) for each in comm.all_gather_bytes(json.dumps([*map(int, numbers)]).encode())])


def _recover(trial: Trial, comm: kos.Communicator) -> kos.Communicator:
    for attempt in range(ATTEMPTS):
        try:
            return comm.replace() if trial.replaces and not attempt else comm.shrink()
        except KosError as error:
            _check_out(comm, error)
            print(f"{os.getpid()}: attempt {attempt}: {type(error).__name__}: {error}", flush=True)
            last = error
    raise last


def _check_out(comm: kos.Communicator, error: KosError) -> None:
    if "was left out" in str(error) and error.ranks == (comm.world_ranks[comm.rank],):
        raise Out(str(error))


def _round(comm: kos.Communicator, rng: Any, number: int) -> None:
    """A random collective, with its result compared."""
    count = int(rng.choice([1, 7, 1000, 50_000]))
    calls = {
        "all_reduce": "all_reduce", "broadcast": "broadcast", "all_gather": "all_gather", "split": "all_reduce",
        "ring": "send_recv" if comm.size > 1 else "barrier", "async": "all_reduce", "barrier": "barrier",
    }  # fmt: skip
    name = str(rng.choice([*calls]))
    step = Step(calls[name], count, root=number % comm.size)
    if name == "split":
        with comm.group(range(comm.size)) as part:
            got, expected = campaign.call(part, step, number % 8)
            part.synchronize()
    else:
        got, expected = campaign.call(comm, step, number % 8, **{"async_op": True} if name == "async" else {})
        got = got.wait() if name == "async" else got
    comm.synchronize()
    assert campaign.is_right(got, expected), f"wrong result of {name} in round {number}"


# The trial.


@dataclass
class Ranks:
    """The processes of a trial, and what happens to them."""

    trial: Trial
    folder: Path
    env: dict[str, str]
    live: dict[int, Forked] = field(default_factory=dict)
    stopped: dict[int, Forked] = field(default_factory=dict)
    dead: list[Forked] = field(default_factory=list)

    def start(self, rank: int | None = None) -> int:
        number = len(self.live) + len(self.stopped) + len(self.dead)
        env = self.env | ({} if rank is None else {"RANK": str(rank)})
        env |= {"KOS_HOST": f"h{number % self.trial.hosts}"} if self.trial.backend == "tcp" else {}
        trial = self.trial
        arguments = [trial.seed, trial.timeout, trial.backend, str(self.folder), rank is None]
        process = fork_server().start("tests.grow_faults:run_rank", arguments, env, self.folder / "log")
        self.live[process.pid] = process
        return process.pid

    def kill(self, pid: int) -> None:
        process = self.live.pop(pid)
        self.dead.append(process)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    def stop(self, pid: int) -> None:
        self.stopped[pid] = self.live.pop(pid)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)

    def at(self) -> dict[int, list[int]]:
        """By live process, the members of its group."""
        found = {}
        for pid in self.live:
            with contextlib.suppress(OSError):
                found[pid] = json.loads((self.folder / f"at-{pid}.json").read_text())["members"]
        return found

    def settle(self, seconds: float) -> str:
        """Wait until the live processes agree that they are the members; else what is wrong."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            at = self.at()
            memberships = {tuple(members) for members in at.values()}
            if len(at) == len(self.live) and len(memberships) == 1 and {*memberships.pop()} == {*self.live}:
                return ""
            if ended := [pid for pid, process in self.live.items() if process.poll() is not None]:
                time.sleep(0.2)
                return f"processes {ended} ended early: {[self.report(pid) for pid in ended]}"
            time.sleep(0.005)
        return f"no agreement within {seconds:g} s: live {sorted(self.live)}, {self.at()}"

    def report(self, pid: int) -> dict[str, Any]:
        path = self.folder / f"end-{pid}.json"
        return dict(json.loads(path.read_text())) if path.exists() else {}

    def members(self) -> list[int]:
        return next(iter(self.at().values()))

    def lose(self, lost: int, moment: float) -> None:
        """Newcomers for those that are lost, where ranks are replaced."""
        if self.trial.replaces:
            time.sleep(moment / 4)
            for _ in range(lost):
                self.start()

    def happen(self, kind: str, moment: float) -> None:
        rng, members = np.random.default_rng(int(moment * 1e9)), self.members()
        some = [int(each) for each in rng.permutation(members)]
        time.sleep(moment / 10)
        if kind.startswith("join"):
            pid = self.start()
            if kind == "join, die":
                time.sleep(moment)
                self.kill(pid)
            elif kind == "join, stop":  # the next one joins
                time.sleep(moment / 2)
                self.stop(pid)
                self.start()
            elif kind == "join, kill" and len(members) > 1:
                time.sleep(moment)
                self.kill(some[0])
                self.lose(1, 0.0)
            return
        first = members[: 1 + (kind == "kill leaders")] if kind in ("kill 0", "kill leaders") else some[:2]
        first = first[: max(1, len(members) - 1)]
        if len(members) == 1:
            return
        if kind.startswith("stop"):
            first = some[:1] if kind == "stop" or len(members) < 3 else first
            if len(first) == 2:
                self.kill(first[1])
                time.sleep(moment / 8)
            self.stop(first[0])
        elif kind == "kill two":
            for pid in first:
                self.kill(pid)
        else:
            for index, pid in enumerate(first if kind in ("kill in recovery", "kill leaders") else first[:1]):
                time.sleep(index * moment / 8)
                self.kill(pid)
        self.lose(len(first), moment)

    def continue_stopped(self) -> str:
        """Continue the stopped ranks, which end, as they are out, or join if they had not.  What is wrong."""
        for pid, process in list(self.stopped.items()):
            os.kill(pid, signal.SIGCONT)
            until(lambda pid=pid, process=process: process.poll() is not None or pid in self.members(), SETTLE_SECONDS)
            if process.poll() is None and pid in self.members():
                self.live[pid] = self.stopped.pop(pid)
                continue
            if process.poll() is None:
                os.kill(pid, signal.SIGUSR2)
                return f"the stopped rank {pid} does not end"
            if not self.report(pid).keys() & {"out", "error"}:
                return f"the stopped rank {pid} met no error: {self.report(pid)}"
            self.dead.append(self.stopped.pop(pid))
        return ""

    def finish(self) -> str:
        (self.folder / "end").touch()
        for pid, process in self.live.items():
            try:
                code = process.wait(SETTLE_SECONDS)
            except Exception:
                return f"process {pid} does not end"
            report = self.report(pid)
            if code or sorted(report.get("members", [])) != sorted(self.live):
                return f"process {pid} ended with {code}: {report}, live {sorted(self.live)}"
        return ""

    def stacks(self) -> None:
        for pid in [*self.live, *self.stopped]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
                os.kill(pid, signal.SIGUSR2)
        time.sleep(0.5)


def run_trial(trial: Trial) -> tuple[str, str]:
    """The verdict, and the story."""
    with tempfile.TemporaryDirectory(prefix="kos-grow-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        env = environment(
            KOS_JOIN=f"{folder}/address", WORLD_SIZE=str(trial.size), MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(free_port()),
        )  # fmt: skip
        ranks = Ranks(trial, folder, env)
        try:
            for rank in range(trial.size):
                ranks.start(rank)
            for problem in _story(ranks):
                if problem:
                    ranks.stacks()
                    log = (folder / "log").read_text(errors="replace")[-8000:]
                    verdict = HUNG if "does not end" in problem or "no agreement" in problem else "wrong"
                    return verdict, f"{problem}\n{log}"
            return RIGHT, ""
        finally:
            for process in [*ranks.live.values(), *ranks.stopped.values(), *ranks.dead]:
                process.kill()


def _story(ranks: Ranks) -> Iterator[str]:
    yield ranks.settle(START_SECONDS)
    for kind, moment in ranks.trial.events:
        ranks.happen(kind, moment)
        yield ranks.settle(SETTLE_SECONDS)
        yield ranks.continue_stopped()
        yield ranks.settle(SETTLE_SECONDS)
    yield ranks.finish()


def main(arguments: Sequence[str]) -> int:
    parser = Arguments("grow", "Change memberships at random.")
    parser.add_argument("--backend", choices=("tcp", "peer"), default="tcp")
    parser.add_argument("--jobs", type=int, default=1, help="trials side by side")
    options = parser.parse_args(arguments)
    backend, timeout = options.backend, options.timeout or (3.0 if options.backend == "tcp" else 5.0)
    trials = [Trial.of(options.seed + index, timeout, backend) for index in range(options.trials)]
    events = Counter(kind for trial in trials for kind, _ in trial.events)
    head = {"backend": backend, "seed": options.seed, "timeout": timeout, "events": dict(sorted(events.items()))}
    return int(campaign.campaign(head, trials, run_trial, jobs=options.jobs, out=options.out) > 0)
