"""The fault campaign: random programs of collectives in which a random rank is killed or stopped.

usage: python -m tests.faults --trials N [--backend tcp|mpi|nccl|peer|auto] [--seed S] [--timeout T] [--jobs J]

Each trial starts 2 to 4 ranks as processes.  They run one program of collectives, messages, splits and
duplicates, chosen by the trial's seed.  One rank sends itself SIGKILL or SIGSTOP before or within a random
call.  The trial is right if every survivor ends in time with an error that names that rank, and that rank
alone, as a rank of the world, and if no result was wrong.  Each wrong trial gets a line with its seed, which
``--trials 1 --seed S`` repeats.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import kos
from kos.errors import KosError

ROOT = Path(__file__).resolve().parent.parent
MARGIN = 15.0  # seconds beyond the timeout in which every survivor ends; a busy machine takes some
LAUNCHERS = ("OMPI_", "PMIX_", "PMI_", "MPI_LOCALNRANKS", "RANK", "WORLD_SIZE", "MASTER_", "SLURM_")
COLLECTIVES = ("all_reduce", "broadcast", "all_gather", "all_to_all", "reduce_scatter", "gather", "barrier", "bytes")
COUNTS = (1, 7, 1000, 20_000, 300_000)
LATE = "is gone|did not (?:arrive|come|connect|receive|answer)|sent nothing|gave no answer|went no further"
RANKS = r"ranks? (\[[\d, ]*\]|\d+)"
WAITED = "still waiting for|did not reach|waited .* for"
CULPRITS = re.compile(rf"{RANKS}(?: of world| of \d)? (?:{LATE})|(?:{WAITED}) {RANKS}")
GPU_BACKENDS = ("nccl", "peer", "auto")


@dataclass(frozen=True)
class Trial:
    """What one seed stands for: the same in every process."""

    seed: int
    backend: str
    size: int
    kind: str  # kill, stop
    victim: int
    step: int  # the call before which, or within which, it happens
    delay: float | None  # seconds after the call began; None: before it
    fault_tolerant: bool  # of mpi: under ULFM
    timeout: float
    program: list[tuple[Any, ...]]

    @classmethod
    def of(cls, seed: int, backend: str, timeout: float) -> Trial:
        rng = np.random.default_rng([seed, 20])
        size, kind = int(rng.integers(2, 5)), str(rng.choice(["kill", "stop"]))
        program = _program(rng, size)
        step, victim = int(rng.integers(len(program) - 1)), int(rng.integers(size))
        delay = None
        if rng.random() < 0.75:
            delay = float(rng.random() * (0.06 if program[step][0] in ("split", "duplicate") else 0.004))
        ulfm = kind == "kill" and bool(rng.random() < 0.9)
        return cls(seed, backend, size, kind, victim, step, delay, ulfm, timeout, program)

    def __str__(self) -> str:
        when = "before" if self.delay is None else f"{1000 * self.delay:.1f} ms into"
        call = self.program[self.step][0]
        how = {"kill": "killed", "stop": "stopped"}[self.kind] + (" under ULFM" if self.fault_tolerant else "")
        on = f"rank {self.victim} of {self.size} {how if self.backend == 'mpi' else how.split()[0]}"
        return f"seed {self.seed}: {on} {when} call {self.step} ({call})"


def _program(rng: Any, size: int) -> list[tuple[Any, ...]]:
    """Steps of all ranks: a name, the communicator's number, and what the step takes."""
    groups: dict[int, list[int]] = {0: list(range(size))}  # by number: members as ranks of the world
    made, steps = 1, list[tuple[Any, ...]]()
    for _ in range(int(rng.integers(8, 16))):
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
        self.trial, self.me = trial, world.rank
        self.groups: dict[int, kos.Communicator] = {0: world}
        self.gpu = trial.backend in GPU_BACKENDS

    def run(self) -> None:
        trial = self.trial
        for index, step in enumerate(trial.program):
            if index == trial.step and self.me == trial.victim:
                last = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[trial.kind]
                if trial.delay is None:
                    os.kill(os.getpid(), last)
                else:
                    threading.Timer(trial.delay, os.kill, (os.getpid(), last)).start()
            if index == len(trial.program) - 1 and self.me == trial.victim:
                time.sleep(60)  # for the signal: nobody gets through the last barrier
            name, group, *rest = step
            if group in self.groups or (name == "both" and rest[0] in self.groups):
                self.step = f"call {index} ({name} of group {group})"
                getattr(self, name, lambda *a, n=name: self.collective(n, *a))(group, *rest)

    def array(self, value: Any) -> Any:
        """``value`` where the backend wants it."""
        if not self.gpu:
            return value
        from kos.memory import Array

        return Array.from_numpy(value)

    def numpy(self, x: Any) -> Any:
        return x if isinstance(x, np.ndarray) else x.to_numpy()

    def expect(self, got: Any, expected: Any) -> None:
        if not np.array_equal(self.numpy(got).reshape(-1), np.asarray(expected).reshape(-1)):
            raise AssertionError(f"wrong result of {self.step}")

    def collective(self, name: str, group: int, count: int, root: int, algorithm: str) -> None:
        comm = self.groups[group]
        n, r = comm.size, comm.rank
        ramp = np.arange(count, dtype=np.float32) % 64
        options: Any = {"algorithm": algorithm} if name in ("all_reduce", "all_gather") else {}
        if name == "barrier":
            comm.barrier()
        elif name == "bytes":
            assert comm.all_gather_bytes(b"x" * r) == [b"x" * each for each in range(n)], self.step
        elif name == "all_reduce":
            self.expect(comm.all_reduce(self.array(ramp + r), **options), n * ramp + n * (n - 1) / 2)
        elif name == "broadcast":
            self.expect(comm.broadcast(self.array(ramp + r), root), ramp + root)
        elif name == "all_gather":
            self.expect(comm.all_gather(self.array(ramp + r), **options), [ramp + each for each in range(n)])
        elif name == "all_to_all":
            x = self.array(np.repeat(np.arange(n, dtype=np.float32), count) + n * r)
            self.expect(comm.all_to_all(x), np.repeat(np.arange(n) * n + r, count))
        elif name == "reduce_scatter":
            self.expect(comm.reduce_scatter(self.array(np.tile(ramp + r, n))), n * ramp + n * (n - 1) / 2)
        elif name == "gather":
            got = comm.gather(self.array(ramp + r), root)
            if r == root:
                self.expect(got, [ramp + each for each in range(n)])

    def split(self, group: int, colors: list[int | None], keys: list[int], numbers: dict[int, int]) -> None:
        comm = self.groups[group]
        color = colors[comm.rank]
        part = comm.split(color, keys[comm.rank])
        if part is not None and color is not None:
            self.groups[numbers[color]] = part

    def duplicate(self, group: int, number: int) -> None:
        self.groups[number] = self.groups[group].duplicate()

    def close(self, group: int) -> None:
        self.groups.pop(group).close()

    def message(self, group: int, a: int, b: int, count: int) -> None:
        comm, ramp = self.groups[group], np.arange(count, dtype=np.float32)
        if comm.rank == a:
            comm.send(self.array(ramp), b, 3)
        elif comm.rank == b:
            x = self.array(np.zeros(count, np.float32))
            comm.recv(x, a, 3)
            self.expect(x, ramp)

    def ring(self, group: int, count: int) -> None:
        comm, ramp = self.groups[group], np.arange(count, dtype=np.float32)
        if comm.size == 1:
            return
        left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
        x = self.array(np.zeros(count, np.float32))
        comm.send_recv(self.array(ramp + comm.rank), x, right, left)
        self.expect(x, ramp + left)

    def both(self, group: int, other: int, count: int) -> None:
        """Two collectives in flight, of one communicator or of two."""
        ramp, works = np.arange(count, dtype=np.float32) % 64, []
        for comm in (self.groups.get(group), self.groups.get(other)):
            if comm is not None:
                works.append((comm.all_reduce(self.array(ramp + comm.rank), async_op=True), comm.size))
        for work, n in works:
            self.expect(work.wait(), n * ramp + n * (n - 1) / 2)


def run_rank(trial: Trial, folder: Path) -> int:
    """The process of one rank: leaves what it met in ``folder``."""
    report: dict[str, Any] = {"began": time.time()}
    code, rank = 1, -1
    try:
        with kos.init(trial.backend, timeout=trial.timeout) as world:
            rank, part = world.rank, Rank(trial, world)
            if rank == trial.victim:
                (folder / "victim").write_text(str(os.getpid()))
            try:
                part.run()
                code = 0
            except (KosError, AssertionError) as error:
                report |= {"kind": type(error).__name__, "text": str(error), "step": part.step}
                report |= {"ranks": list(getattr(error, "ranks", ())), "ended": time.time()}
                _write(folder / f"{rank}.json", report)
                raise
    except KosError as error:
        if "kind" not in report:
            report |= {"kind": type(error).__name__, "text": str(error), "step": "close"}
            report |= {"ranks": list(getattr(error, "ranks", ()))}
    except AssertionError:
        pass
    report["ended"] = time.time()
    _write(folder / f"{rank}.json", report)
    return code


def _write(path: Path, report: dict[str, Any]) -> None:
    path.with_suffix(".tmp").write_text(json.dumps(report))
    path.with_suffix(".tmp").rename(path)


def verdict(trial: Trial, folder: Path, ended: bool, log: str) -> str:
    """Why the trial is wrong; empty if it is right."""
    if not ended:
        left = [r for r in range(trial.size) if r != trial.victim and not (folder / f"{r}.json").exists()]
        return f"no end within {trial.timeout + MARGIN:g} s: ranks {left} hang"
    for rank in range(trial.size):
        if rank == trial.victim:
            continue
        path = folder / f"{rank}.json"
        if not path.exists():
            if trial.backend == "mpi" and trial.kind == "kill" and not trial.fault_tolerant:
                continue  # mpirun ends the others, which may say nothing
            return f"rank {rank} left no report: {log[-300:]}"
        report = json.loads(path.read_text())
        if "kind" not in report:
            return f"rank {rank} met no error"
        if report["kind"] == "AssertionError":
            return f"rank {rank}: {report['text']}"
        found = CULPRITS.search(report["text"])
        named = json.loads(found[1] or found[2]) if found else None
        named = [named] if isinstance(named, int) else named
        if named != [trial.victim] or (report["ranks"] and report["ranks"] != [trial.victim]):
            return f"rank {rank}, {report['step']}, names {named} {report['ranks']}: {report['kind']}: {report['text']}"
    return ""


def start(trial: Trial, folder: Path, port: int) -> list[subprocess.Popen[bytes]]:
    """The processes of a trial; their last words go to ``folder``."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHERS)}
    env |= {"PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1", "KOS_SECRET": "of the tests"}
    command = [sys.executable, "-m", "tests.faults", "--as-rank", str(folder)]
    command += ["--seed", str(trial.seed), "--backend", trial.backend, "--timeout", str(trial.timeout)]
    log = (folder / "log").open("ab")
    if trial.backend == "tcp":
        ranks = [{"RANK": str(r), "WORLD_SIZE": str(trial.size)} for r in range(trial.size)]
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        return [_spawn(command, {**env, **where, **rank}, log) for rank in ranks]
    env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMPI_MCA_btl": "^ofi"}
    env |= {"PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe", "OMPI_MCA_rmaps_base_oversubscribe": "1"}
    mpirun = shutil.which(os.environ.get("MPIRUN") or "mpirun", path=f"{Path(sys.executable).parent}:{env['PATH']}")
    assert mpirun is not None, "mpirun was not found beside Python or in PATH"
    options = ["--with-ft", "ulfm"] if trial.fault_tolerant else []
    whole = [mpirun, *options, "-n", str(trial.size), *command]
    return [_spawn(whole, env, log)]


def _spawn(command: list[str], env: dict[str, str], log: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, env=env, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)


def run_trial(trial: Trial) -> str:
    """Run it; why it is wrong, or nothing."""
    for _ in range(3):
        with tempfile.TemporaryDirectory(prefix="kos-faults-") as name:
            folder = Path(name)
            processes = start(trial, folder, free_port())
            try:
                ended = _await(trial, folder, processes)
            finally:
                for process in processes:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
                with contextlib.suppress(OSError, ValueError):  # which mpirun gave a group of its own
                    os.kill(int((folder / "victim").read_text()), signal.SIGKILL)
            log = (folder / "log").read_text(errors="replace")
            if (folder / "victim").exists():
                return verdict(trial, folder, ended, log)
    return f"the ranks did not start: {log[-500:]}"


def _await(trial: Trial, folder: Path, processes: list[subprocess.Popen[bytes]]) -> bool:
    """Whether all survivors ended in time."""
    deadline = time.monotonic() + 60  # to start
    started = False
    while time.monotonic() < deadline:
        if not started and (folder / "victim").exists():
            started, deadline = True, time.monotonic() + trial.timeout + MARGIN
        if trial.backend == "tcp":
            over = all(p.poll() is not None for r, p in enumerate(processes) if r != trial.victim)
        else:
            over = processes[0].poll() is not None or all(
                (folder / f"{r}.json").exists() for r in range(trial.size) if r != trial.victim
            )
        if over:
            return True
        time.sleep(0.01)
    return False


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def campaign(trials: int, backend: str, seed: int, timeout: float, jobs: int) -> int:
    """Run the trials, print what was wrong and the counts; the number of wrong ones."""
    began, wrong, kinds = time.monotonic(), 0, Counter[str]()
    chosen = [Trial.of(seed + index, backend, timeout) for index in range(trials)]
    print(f"seed {seed}: {trials} trials on {backend}, timeout {timeout:g} s, {jobs} at a time", flush=True)
    with ThreadPoolExecutor(jobs) as pool:
        for trial, problem in zip(chosen, pool.map(run_trial, chosen), strict=True):
            kinds[f"{trial.kind} {'right' if not problem else 'wrong'}"] += 1
            if problem:
                wrong += 1
                print(f"WRONG {trial}\n      {problem}", flush=True)
    counts = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    print(f"{trials - wrong} of {trials} right ({counts}) in {time.monotonic() - began:.0f} s")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description="Kill and stop ranks at random.")
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--backend", default="tcp", choices=("tcp", "mpi", *GPU_BACKENDS))
    parser.add_argument("--seed", type=int, default=None, help="of the first trial; the next ones follow it")
    parser.add_argument("--timeout", type=float, default=3.0, help="of the ranks, in seconds")
    parser.add_argument("--jobs", type=int, default=2, help="trials side by side")
    parser.add_argument("--as-rank", metavar="FOLDER", help=argparse.SUPPRESS)
    options = parser.parse_args()
    seed = int(np.random.SeedSequence().generate_state(1)[0]) if options.seed is None else options.seed
    if options.as_rank:
        return run_rank(Trial.of(seed, options.backend, options.timeout), Path(options.as_rank))
    return int(campaign(options.trials, options.backend, seed, options.timeout, options.jobs) > 0)


if __name__ == "__main__":
    sys.exit(main())
