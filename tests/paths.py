"""Print the files of kos that an all_reduce passes, in order (``python tests/paths.py``).

Each backend is shown twice: a miss is the first call of its signature, a hit a later one, on another array.  On
NVIDIA GPUs, which stand-ins replace here, the call is followed until its kernel is queued.

A file is passed each time that another file of kos calls a function of it.  It is passed again if it was passed before:
a reader of the call comes back to it.  Of several calls the one with the fewest files is shown: in the others a rank
waits for the other one.
"""

import json
import sys
from collections.abc import Callable, Iterable
from inspect import CO_ASYNC_GENERATOR, CO_COROUTINE, CO_GENERATOR
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

import kos
from kos.comm.control.thread_rendezvous import ThreadRendezvous
from kos.comm.gpu.backend import GPUBackend
from kos.comm.gpu.nccl import NCCLBackend
from kos.comm.gpu.peer.backend import PeerBackend
from kos.comm.host.host_backend import HostBackend
from kos.comm.host.threads import ThreadTransport
from kos.cuda.kernels import BoundKernel
from kos.memory import Array
from kos.testing import spawn
from tests.comm import fake_driver
from tests.comm.fake_nccl import WAIT, Comm, Group
from tests.comm.fake_peer import no_gpus
from tests.comm.host_kernel import HostKernel
from tests.comm.ranks import on_threads
from tests.comm.tcp_ranks import run_processes
from tests.launcher import MPIRUN, OUTSIDE, run_program

ROOT = Path(__file__).resolve().parent.parent
KOS, TESTS = f"{ROOT / 'kos'}/", f"{ROOT / 'tests'}/"
DRIVER = f"{KOS}cuda/driver.py"
"""The file that calls the driver, where a call of kos ends."""
TRIES = 24
"""Calls of each kind; in one of them this rank is the last that comes."""

Trace = list[tuple[str, str]]
"""For each call of a function of kos, the file of its caller ("" outside of kos) and its own."""
Path_ = list[str]
"""The files that a call passes, in order."""


def trace(call: Callable[[], Any]) -> Trace:
    """The calls of functions of kos in this thread while ``call`` runs, but not those by stand-ins, or of DRIVER."""
    calls: Trace = []
    outside = sys._getframe()

    def profile(frame: FrameType, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        if event != "call" or not file.startswith(KOS) or file == DRIVER or _resumes(frame):
            return
        stack, caller = [], frame.f_back
        while caller is not None and caller is not outside:
            stack.append(caller.f_code.co_filename)
            caller = caller.f_back
        if not any(file.startswith(TESTS) for file in stack[:-1]):  # the last is that of ``call``
            calling = next((file for file in stack if file.startswith(KOS)), "")
            calls.append((calling.removeprefix(KOS), frame.f_code.co_filename.removeprefix(KOS)))

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return calls


def _resumes(frame: FrameType) -> bool:
    """Whether a generator goes on, rather than begins: the argument of RESUME is 0 where it begins."""
    code = frame.f_code
    if not code.co_flags & (CO_GENERATOR | CO_COROUTINE | CO_ASYNC_GENERATOR):
        return False
    return code.co_code[frame.f_lasti + 1] & 3 != 0


def path(calls: Trace) -> Path_:
    """The files that a call passes, in order: those that another file calls."""
    entered = [callee for caller, callee in calls if callee != caller]
    return [file for file, _ in groupby(entered)]


def files(passed: Path_) -> Path_:
    """Each file once, in the order of the first time."""
    return list(dict.fromkeys(passed))


def returns(passed: Path_) -> Path_:
    """The files that are passed again, once for each time."""
    return [file for number, file in enumerate(passed) if file in passed[:number]]


def shortest(paths: Iterable[Path_]) -> Path_:
    """The one with the fewest files, and of those the shortest."""
    return min(paths, key=lambda passed: (len(files(passed)), len(passed)))


# What is traced.


def of_all_reduce(comm: kos.Communicator) -> dict[str, Path_]:
    """The paths of a miss and of a hit, of this rank; every rank calls it."""

    def ones(count: int) -> Any:
        x = np.ones(count, np.float32)
        return x if comm.device is None else Array.from_numpy(x, comm.device)

    comm.all_reduce(ones(1))  # imports what is imported late
    paths: dict[str, list[Path_]] = {"miss": [], "hit": []}
    for count in range(2, 2 + TRIES):
        x = ones(count)
        for kind in ("miss", "hit"):
            paths[kind].append(path(trace(lambda x=x: comm.all_reduce(x))))
            x = ones(count)
    return {kind: shortest(each) for kind, each in paths.items()}


def on_mock() -> dict[str, Path_]:
    return _of_ranks(spawn(of_all_reduce, 2))


def on_tcp() -> dict[str, Path_]:
    (code, output), _ = run_processes("from tests.paths import as_rank; as_rank('tcp')", 2)
    assert code == 0, output
    return _of_ranks(json.loads(output))


def on_mpi() -> dict[str, Path_]:
    command = [MPIRUN, "-n", "2", sys.executable, __file__, "--as-rank", "mpi"]
    done = run_program(*command, env=OUTSIDE, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return _of_ranks(json.loads(done.stdout))


def as_rank(backend: str) -> None:
    """A rank of ``on_tcp`` or ``on_mpi``; the first one prints the paths of all."""
    with kos.init(backend) as comm:
        mine = json.dumps(of_all_reduce(comm)).encode()
        everyone = comm.gather_bytes(mine)
        if everyone is not None:
            print(json.dumps([json.loads(each) for each in everyone]))


def on_gpus(*names: str) -> dict[str, Path_]:
    """With these backends, by ``auto`` if there are two."""
    results, group = [], Group(2)

    def rank(rendezvous: ThreadRendezvous) -> None:
        host = HostBackend(rendezvous, ThreadTransport)
        made: dict[str, Callable[[], Any]] = {
            "nccl": lambda: NCCLBackend(rendezvous, host.engine, 0, Comm(group, rendezvous.rank)),
            "peer": lambda: PeerBackend(rendezvous, host.engine, 0),
        }
        backend = GPUBackend(rendezvous, [made[name]() for name in names], host if names[1:] else None)
        with kos.Communicator(backend, rendezvous, {}, WAIT) as comm:
            results.append(of_all_reduce(comm))

    with pytest.MonkeyPatch.context() as patch, no_gpus(patch, 2) as fake:
        fake.load_kernel = NoKernel
        on_threads(2, rank, WAIT, group.barrier.abort)
    return _of_ranks(results)


class NoKernel(HostKernel):
    """A kernel that computes nothing."""

    def __init__(self, *_: Any, **defines: Any) -> None:
        self._function = fake_driver.number(self)

    def bind(self, blocks: int, threads: int, *arguments: Any, **_: Any) -> BoundKernel:
        return NoLaunch(self, fake_driver.Config(blocks, threads), arguments)

    def run(self, config: Any, parameters: int) -> None: ...


class NoLaunch(BoundKernel):
    def __call__(self, stream: Any, *arrays: int) -> None: ...


def _of_ranks(ranks: list[dict[str, Path_]]) -> dict[str, Path_]:
    return {kind: shortest(paths[kind] for paths in ranks) for kind in ranks[0]}


TRACED: dict[str, Callable[[], dict[str, Path_]]] = {
    "mock": on_mock,
    "tcp": on_tcp,
    "mpi": on_mpi,
    "nccl": lambda: on_gpus("nccl"),
    "peer": lambda: on_gpus("peer"),
    "nccl+peer": lambda: on_gpus("nccl", "peer"),
}


def main() -> None:
    for backend, traced in TRACED.items():
        if backend == "mpi" and not MPIRUN:
            continue
        for kind, passed in traced().items():
            back = returns(passed)
            print(f"\n{backend}, {kind}: {len(files(passed))} files, {len(back)} returns to {len(set(back))} of them")
            for number, file in enumerate(passed):
                print(f"  {file}" + "  (again)" * (file in passed[:number]))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--as-rank"]:
        as_rank(sys.argv[2])
    else:
        main()
