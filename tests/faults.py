"""The fault campaign: random programs of collectives in which a random rank is killed or stopped.

usage: python -m tests.faults --trials N [--backend tcp|mpi|nccl|peer|auto] [--seed S] [--timeout T] [--jobs J]
                              [--ranks R] [--hosts H] [--out FILE]
       python -m tests.faults grow --trials N [--seed S] [--timeout T] [--jobs J] [--out FILE]

The second form is in ``grow_faults.py``: memberships change at random.

Each trial starts 2 to 4 ranks as processes: under mpirun for mpi, else by environment.  They run one program of
collectives, messages, splits and duplicates, chosen by the trial's seed.  One rank sends itself SIGKILL or SIGSTOP
before or within a random call.  The trial is right if every survivor ends in time with an error that names that rank,
and that rank alone, as a rank of the world, and if no result was wrong.  Each wrong trial gets a line with its seed,
which ``--trials 1 --seed S`` repeats.

With ``--hosts H``, rank r pretends to be on host r modulo H (``KOS_HOST``).  Between hosts a stopped rank is found only
by the timeout.

On GPUs, rank r of the trial with seed S takes GPU (r + S) modulo their number, so trials side by side share GPUs.  Each
trial takes some seconds to start CUDA: ``--jobs 10`` runs ten at a time.  On two GPUs use ``--jobs 3`` for nccl: with
more, NCCL takes longer than the timeout to connect.  Programs without a fault come first.
They compile the kernels, and show that a failure later is the fault's.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import kos
from kos import cuda
from kos.cuda import driver
from kos.errors import KosError, install
from kos.testing.conformance.model import Step
from tests import campaign, grow_faults
from tests.campaign import HUNG, MARGIN, RIGHT, START_SECONDS, environment
from tests.comm.tcp_ranks import free_port
from tests.forked import Forked, fork_server, remove_session
from tests.launcher import MPIRUN, open_mpi

ROOT = Path(__file__).resolve().parent.parent
COLLECTIVES = ("all_reduce", "broadcast", "all_gather", "all_to_all", "reduce_scatter", "gather", "barrier", "bytes")
COUNTS = (1, 7, 1000, 20_000, 300_000)
LATE = "is gone|did not (?:arrive|come|connect|receive|answer)|sent nothing|gave no answer|went no further"
RANKS = r"ranks? (\[[\d, ]*\]|\d+)"
WAITED = "still waiting for|did not reach|waited .* for"
CULPRITS = re.compile(rf"{RANKS}(?: of world| of \d)?\)? (?:{LATE})|(?:{WAITED}) (?:host[^(]* \()?{RANKS}")
GPU_BACKENDS = ("nccl", "peer", "auto")


@dataclass(frozen=True)
class Trial:
    """What one seed stands for: the same in every process."""

    seed: int
    backend: str
    size: int
    kind: str  # kill, stop, none
    victim: int  # -1: none
    step: int  # the call before which, or within which, it happens
    delay: float | None  # seconds after the call began; None: before it
    fault_tolerant: bool  # of mpi: under ULFM, if it is Open MPI 5
    timeout: float
    program: list[tuple[Any, ...]]

    @classmethod
    def of(cls, seed: int, backend: str, timeout: float, largest: int = 4) -> Trial:
        """That of a seed; one below 0 stands for a program without a fault, on -seed ranks."""
        if seed < 0:
            program = _program(np.random.default_rng([-seed, 20]), -seed, 60)
            return cls(seed, backend, -seed, "none", -1, len(program), None, False, START_SECONDS, program)
        rng = np.random.default_rng([seed, 20])
        size, kind = int(rng.integers(2, 1 + largest)), str(rng.choice(["kill", "stop"]))
        program = _program(rng, size)
        step, victim = int(rng.integers(len(program) - 1)), int(rng.integers(size))
        delay = None
        if rng.random() < 0.75:
            delay = float(rng.random() * (0.06 if program[step][0] in ("split", "duplicate") else 0.004))
        ulfm = kind == "kill" and bool(rng.random() < 0.9)
        return cls(seed, backend, size, kind, victim, step, delay, ulfm, timeout, program)

    def __str__(self) -> str:
        when = "before" if self.delay is None else f"{1000 * self.delay:.1f} ms into"
        if self.kind == "none":
            return f"{self.size} ranks without a fault"
        call = self.program[self.step][0]
        how = {"kill": "killed", "stop": "stopped"}[self.kind] + (" under ULFM" if self.fault_tolerant else "")
        on = f"rank {self.victim} of {self.size} {how if self.backend == 'mpi' else how.split()[0]}"
        return f"seed {self.seed}: {on} {when} call {self.step} ({call})"


def _program(rng: Any, size: int, steps_at_most: int = 0) -> list[tuple[Any, ...]]:
    """Steps of all ranks: a name, the communicator's number, and what the step takes."""
    groups: dict[int, list[int]] = {0: list(range(size))}  # by number: members as ranks of the world
    made, steps = 1, list[tuple[Any, ...]]()
    for _ in range(steps_at_most or int(rng.integers(8, 16))):
        group = int(rng.choice(list(groups)))
        members, dice = groups[group], rng.random()
        if dice < 0.2 and len(groups) < 6:
            colors = [int(rng.integers(0, 2)) if rng.random() < 0.9 else None for _ in members]
            keys = [int(rng.integers(0, 3)) for _ in members]
            numbers = dict[int, int]()
            for color in sorted({c for c in colors if c is not None}):
                order = sorted((keys[r], r) for r in range(len(members)) if colors[r] == color)
                groups[made] = [members[r] for _, r in order]
                numbers[color] = made
                made += 1
            steps.append(("split", group, colors, keys, numbers))
        elif dice < 0.3 and len(groups) < 6:
            steps.append(("duplicate", group, made))
            groups[made], made = list(members), made + 1
        elif dice < 0.35 and group:
            steps.append(("close", group))
            del groups[group]
        elif dice < 0.55 and len(members) > 1:
            a, b = (int(r) for r in rng.choice(len(members), 2, replace=False))
            steps.append(("message", group, a, b, int(rng.choice(COUNTS))))
        elif dice < 0.65:
            steps.append(("ring", group, int(rng.choice(COUNTS))))
        elif dice < 0.75:
            other = int(rng.choice(list(groups)))
            steps.append(("both", group, other, int(rng.choice(COUNTS))))
        else:
            algorithm = "ring" if rng.random() < 0.3 else "auto"
            root = int(rng.integers(len(members)))
            steps.append((str(rng.choice(COLLECTIVES)), group, int(rng.choice(COUNTS)), root, algorithm))
    return [*steps, ("barrier", 0, 1, 0, "auto")]


class Rank:
    """One rank's part of a trial."""

    def __init__(self, trial: Trial, world: kos.Communicator) -> None:
        self.trial, self.me, self.device = trial, world.rank, world.device
        self.groups: dict[int, kos.Communicator] = {0: world}
        self.tag = 3 if self.device is None else 0  # messages between GPUs have no tags
        self.step, self.unchecked = "", list[tuple[kos.Communicator, Any, Any, str]]()

    def warm_up(self) -> None:
        """Connect: what a first call takes is none of the time that a failure may take."""
        world = self.groups[0]
        world.all_reduce(campaign.on_device(world, np.ones(1000, np.float32)))
        world.synchronize()
        world.barrier()

    def run(self) -> None:
        trial = self.trial
        for index, step in enumerate(trial.program):
            if index == trial.step and self.me == trial.victim:
                last = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[trial.kind]
                if trial.delay is None:
                    os.kill(os.getpid(), last)
                else:
                    threading.Timer(trial.delay, os.kill, (os.getpid(), last)).start()
            final = index == len(trial.program) - 1
            if final and self.me == trial.victim:
                time.sleep(60)  # for the signal: nobody gets through the last barrier
            name, group, *rest = step
            if group in self.groups or (name == "both" and rest[0] in self.groups):
                self.step = f"call {index} ({name} of group {group})"
                getattr(self, name, lambda *a, n=name: self.collective(n, *a))(group, *rest)
            if self.device is None or final or index % 2 or name in ("split", "duplicate", "close"):
                self.check()

    def expect(self, comm: kos.Communicator, got: Any, expected: Any) -> None:
        """Compared by the next ``check``: calls on a GPU return before they have run."""
        self.unchecked.append((comm, got, expected, self.step))

    def check(self) -> None:
        for comm, got, expected, step in self.unchecked:
            if self.device is not None:
                comm.synchronize()  # raises what failed: the results of a call that did are undefined
            if not campaign.is_right(got, expected):
                raise AssertionError(f"wrong result of {step}")
        self.unchecked.clear()

    def collective(self, name: str, group: int, count: int, root: int, algorithm: str) -> None:
        comm = self.groups[group]
        n = comm.size
        named = ("all_reduce", "all_gather") if self.device is None else ("all_reduce",)  # of peer, on a GPU
        options: Any = {"algorithm": algorithm} if name in named and self.trial.backend != "nccl" else {}
        if name == "bytes":
            assert comm.all_gather_bytes(b"x" * comm.rank) == [b"x" * each for each in range(n)], self.step
            return
        self.expect(comm, *campaign.call(comm, Step(name, count, root=root), **options))

    def split(self, group: int, colors: list[int | None], keys: list[int], numbers: dict[int, int]) -> None:
        comm = self.groups[group]
        color = colors[comm.rank]
        part = comm.split(color, keys[comm.rank])
        if part is not None and color is not None:
            self.groups[numbers[color]] = part

    def duplicate(self, group: int, number: int) -> None:
        self.groups[number] = self.groups[group].duplicate()

    def close(self, group: int) -> None:
        self.check()
        self.groups.pop(group).close()

    def message(self, group: int, a: int, b: int, count: int) -> None:
        comm, ramp = self.groups[group], np.arange(count, dtype=np.float32)
        if comm.rank == a:
            comm.send(campaign.on_device(comm, ramp), b, self.tag)
        elif comm.rank == b:
            x = campaign.on_device(comm, np.zeros(count, np.float32))
            comm.recv(x, a, self.tag)
            self.expect(comm, x, ramp)

    def ring(self, group: int, count: int) -> None:
        comm = self.groups[group]
        if comm.size > 1:
            self.expect(comm, *campaign.call(comm, Step("send_recv", count)))

    def both(self, group: int, other: int, count: int) -> None:
        """Two collectives in flight, of one communicator or of two."""
        works = []
        for comm in (self.groups.get(group), self.groups.get(other)):
            if comm is not None:
                works.append((comm, *campaign.call(comm, Step("all_reduce", count), async_op=True)))
        for comm, work, expected in works:
            self.expect(comm, work.wait(), expected)


def run_rank(seed: int, backend: str, timeout: float, largest: int, folder_name: str, hosts: int = 0) -> int:
    """The process of one rank: leaves what it met in its folder."""
    if hosts:
        launched = int(os.environ["OMPI_COMM_WORLD_RANK" if backend == "mpi" else "RANK"])
        os.environ["KOS_HOST"] = f"host {launched % hosts}"
    trial, folder = Trial.of(seed, backend, timeout, largest), Path(folder_name)
    report: dict[str, Any] = {}
    code, rank, device = 1, -1, None
    faulthandler.register(signal.SIGUSR2)
    if backend in GPU_BACKENDS:
        device = (int(os.environ["RANK"]) + seed) % len(cuda.visible_devices())
    try:
        with kos.init(backend, timeout=START_SECONDS, device=device) as world:
            rank, part = world.rank, Rank(trial, world)
            if device is not None:  # connected, with memory and kernels at hand, before time is short
                part.warm_up()
            world.timeout = timeout
            if rank == trial.victim or trial.victim < 0 == rank:
                (folder / "started").write_text(str(os.getpid()))
            try:
                part.run()
                code = 0
            except (KosError, AssertionError) as error:
                report |= campaign.described(error, part.step)
                campaign.write(folder / f"{rank}.json", report)
                raise
    except KosError as error:
        report = report or campaign.described(error, "close")
    except AssertionError:
        pass
    if rank < 0:
        print(f"a rank did not start: {report['text']}", flush=True)  # to the log of the trial
        return code
    campaign.write(folder / f"{rank}.json", report)
    return code


def verdict(trial: Trial, folder: Path, ended: bool, log: str) -> tuple[str, str]:
    """Right, hung or what is wrong; and the story."""
    if not ended:
        left = [r for r in range(trial.size) if r != trial.victim and not (folder / f"{r}.json").exists()]
        late = f"no end within {trial.timeout + MARGIN:g} s: no report of ranks {left}"
        return HUNG, f"{late}\n{log[-4000:]}"
    for rank in range(trial.size):
        if rank == trial.victim:
            continue
        path = folder / f"{rank}.json"
        if not path.exists():
            if trial.backend == "mpi" and trial.kind == "kill" and not trial.fault_tolerant:
                continue  # mpirun ends the others, which may say nothing
            return "no report", f"rank {rank} left no report: {log[-4000:]}"
        report = json.loads(path.read_text())
        if trial.kind == "none":
            if report:
                return "failed without a fault", f"rank {rank}: {report}"
            continue
        if "kind" not in report:
            return "no error", f"rank {rank} met no error"
        where = f"rank {rank}, {report['step']}"
        if report["kind"] == "AssertionError":
            return "wrong result", f"{where}: {report['text']}"
        found = CULPRITS.search(report["text"])
        named = json.loads(found[1] or found[2]) if found else None
        named = [named] if isinstance(named, int) else named
        if named != [trial.victim] or (report["ranks"] and report["ranks"] != [trial.victim]):
            return "wrong culprit", f"{where}, names {named} {report['ranks']}: {report['kind']}: {report['text']}"
    return RIGHT, ""


Process = Forked | subprocess.Popen[bytes]


def start(trial: Trial, largest: int, folder: Path, hosts: int) -> Sequence[Process]:
    """The processes of a trial, whose output goes to ``folder``: its ranks in their order, or one mpirun."""
    env = environment()
    arguments = [trial.seed, trial.backend, trial.timeout, largest, str(folder), hosts]
    if trial.backend != "mpi":
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(trial.size)}
        begin = fork_server().start
        return [
            begin("tests.faults:run_rank", arguments, {**env, "RANK": str(rank)}, folder / "log")
            for rank in range(trial.size)
        ]
    env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMPI_MCA_btl": "^ofi"}
    env |= {"PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe", "OMPI_MCA_rmaps_base_oversubscribe": "1"}
    options = ["--with-ft", "ulfm"] if trial.fault_tolerant else []
    command = [MPIRUN, *options, "-n", str(trial.size), sys.executable, "-m", "tests.faults", "--as-rank"]
    command.append(json.dumps(arguments))
    with (folder / "log").open("ab") as log:
        return [subprocess.Popen(command, env=env, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)]


def lacking(backend: str) -> str:
    """What the trials need and this machine lacks, with the command that installs it; empty if nothing is missing."""
    if backend == "mpi" and not MPIRUN:
        return f"mpirun was not found beside Python or in PATH: {install('mpi')}"
    try:
        if backend in GPU_BACKENDS:
            driver.require()
    except KosError as error:
        return str(error)
    gpus = len(cuda.visible_devices()) if backend in GPU_BACKENDS else 2
    needed = 1 if backend == "peer" else 2
    return "" if gpus >= needed else f"{backend} needs {needed} GPUs, {gpus} are visible"


def run_trial(trial: Trial, largest: int, hosts: int = 0) -> tuple[str, str]:
    """Run it; the verdict."""
    for _ in range(3):
        with tempfile.TemporaryDirectory(prefix="kos-faults-", ignore_cleanup_errors=True) as name:
            folder = Path(name)
            processes = start(trial, largest, folder, hosts)
            try:
                ended = _await(trial, folder, processes)
                if not ended:
                    others = [each for rank, each in enumerate(processes) if rank != trial.victim]
                    for process in processes if trial.backend == "mpi" else others:
                        if process.poll() is None:  # a rank writes its stacks to the log; mpirun forwards the signal
                            os.kill(process.pid, signal.SIGUSR2)
                    time.sleep(0.5)
            finally:
                for process in processes:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
                    remove_session(process.pid)
                with contextlib.suppress(OSError, ValueError):  # which mpirun gave a group of its own
                    os.kill(int((folder / "started").read_text()), signal.SIGKILL)
            log = (folder / "log").read_text(errors="replace")
            if (folder / "started").exists():
                return verdict(trial, folder, ended, log)
    return "not started", f"the ranks did not start: {log[-1500:]}"


def _await(trial: Trial, folder: Path, processes: Sequence[Process]) -> bool:
    """Whether all survivors ended in time."""
    deadline = time.monotonic() + 2 * START_SECONDS
    started = False
    while time.monotonic() < deadline:
        if not started and (folder / "started").exists():
            compiling = 2 * START_SECONDS if trial.kind == "none" else 0.0
            started, deadline = True, time.monotonic() + trial.timeout + MARGIN + compiling
        if trial.backend == "mpi":
            over = processes[0].poll() is not None or all(
                (folder / f"{r}.json").exists() for r in range(trial.size) if r != trial.victim
            )
        else:
            over = all(p.poll() is not None for r, p in enumerate(processes) if r != trial.victim)
        if over:
            return True
        time.sleep(0.01)
    return False


def run(
    trials: int, backend: str, seed: int, timeout: float, jobs: int, largest: int = 4, out: Path | None = None,
    hosts: int = 0,
) -> int:  # fmt: skip
    """Run the campaign, and return the number of failed trials."""
    chosen = [Trial.of(seed + index, backend, timeout, largest) for index in range(trials)]
    if backend == "mpi" and open_mpi() < 5:
        chosen = [replace(trial, fault_tolerant=False) for trial in chosen]
    faultless = [Trial.of(-size, backend, timeout) for size in range(2, 1 + largest) if backend in GPU_BACKENDS]
    head = {"backend": backend, "seed": seed, "timeout": timeout, "ranks": f"2 to {largest}", "hosts": hosts or 1}
    each = partial(run_trial, largest=largest, hosts=hosts)
    return campaign.campaign(head, chosen, each, jobs=jobs, out=out, first=faultless)


def main() -> int:
    if sys.argv[1:2] == ["grow"]:
        return grow_faults.main(sys.argv[2:])
    parser = campaign.Arguments("", "Kill and stop ranks at random.")
    parser.add_argument("--backend", default="tcp", choices=("tcp", "mpi", *GPU_BACKENDS))
    parser.add_argument("--jobs", type=int, default=2, help="trials side by side")
    parser.add_argument("--ranks", type=int, default=None, help="of a trial, at most (4; with nccl one to a GPU)")
    parser.add_argument("--hosts", type=int, default=0, help="that the ranks pretend to be on (one)")
    options = parser.parse_args()
    if options.as_rank:
        return run_rank(*json.loads(options.as_rank))
    if lacks := lacking(options.backend):
        parser.refuse(lacks)
    timeout = options.timeout or (5.0 if options.backend in GPU_BACKENDS else 3.0)
    largest = options.ranks or (min(4, len(cuda.visible_devices())) if options.backend in ("nccl", "auto") else 4)
    wrong = run(
        options.trials, options.backend, options.seed, timeout, options.jobs, largest, options.out, options.hosts
    )
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
