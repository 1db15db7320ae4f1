"""Peer memory between processes, which may share a GPU: ranks are killed or stopped in each operation."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import kos
from kos import cuda
from kos.errors import CollectiveTimeout, RankLost
from kos.memory.array import Array
from kos.testing.conformance import model
from kos.testing.conformance.model import Step
from tests.comm.tcp_ranks import environment, free_port

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.gpu

OPERATIONS = [
    "all_reduce", "large all_reduce", "reduce", "reduce_scatter", "broadcast", "all_gather", "all_to_all",
    "gather", "scatter", "barrier", "send_recv",
]  # fmt: skip
DEADLINE = 3.0  # seconds
PATIENCE = 30.0  # with what happens once: eight contexts on a GPU, kernels that are compiled


def call(comm: kos.Communicator, name: str, x: Array, y: Array) -> None:
    """One operation that nobody can end without the last rank."""
    part = x.size // comm.size
    counts = dict.fromkeys(("all_reduce", "all_gather", "gather"), part)
    counts |= dict.fromkeys(("reduce_scatter", "all_to_all", "scatter"), part * comm.size)
    step = Step(name.split()[-1], root=-1, other=name == "scatter")
    out = {"scatter": y[:part], "send_recv": y}.get(name)
    model.call(comm, step, x[: counts.get(name, x.size)], out)


def until_it_fails(comm: kos.Communicator, name: str, x: Array, y: Array) -> None:
    for _ in range(50):
        call(comm, name, x, y)
    comm.synchronize(DEADLINE)


def survivor(how: str, size: int) -> None:
    """One rank of many; in each operation the last one goes, and the others go on without it."""
    device = int(os.environ["RANK"]) % len(cuda.visible_devices())
    cuda.set_device(device)
    comm = kos.init("peer", timeout=PATIENCE, device=device)
    x, y = (Array.zeros(3_000_000, np.float32, device) for _ in range(2))
    first = int(os.environ["KOS_TEST_FIRST"])
    for name in OPERATIONS[first : first + size - 2]:
        comm.timeout = PATIENCE
        for _ in range(2):
            call(comm, name, x, y)
        comm.synchronize()
        comm.timeout = DEADLINE
        pids = [int(pid) for pid in comm.all_gather_bytes(str(os.getpid()).encode())]
        if comm.rank == comm.size - 1:
            call(comm, name, x, y)  # what was queued goes on while this rank goes
            os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGSTOP)
        begun = time.monotonic()
        with pytest.raises((CollectiveTimeout, RankLost)) as raised:
            until_it_fails(comm, name, x, y)
        spent = time.monotonic() - begun
        message = str(raised.value)
        print(f"{how} {name} of {comm.size}: {spent:.1f} s: {message}", flush=True)
        assert name.split()[-1] in message and "#" in message
        last = comm.size - 1 if name != "send_recv" else r"\d"  # its own neighbour, who waits for the next one
        assert re.search(rf"rank {last}\b|\[{last}\]|ended early", message)
        assert spent < 3 * DEADLINE, f"{spent:.1f} s"
        if comm.rank == 0:
            os.kill(pids[-1], signal.SIGKILL)  # a stopped rank is not gone
        comm.rendezvous.timeout = PATIENCE
        comm = comm.shrink()
        ones = Array.from_numpy(np.ones(1000, np.float32), device)
        assert (comm.all_reduce(ones).numpy() == comm.size).all()
    comm.close()


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def run(code: str, size: int, seconds: float, **more: str) -> list[int | None]:
    """Exit codes of the ranks; None for those that did not end, or stand still when those before them have ended."""
    port, trace = free_port(), f"import faulthandler; faulthandler.dump_traceback_later({seconds - 5})"
    children = [
        subprocess.Popen(
            [sys.executable, "-c", f"{trace}; from tests.comm.test_peer_processes import *; {code}"],
            cwd=ROOT,
            env={**os.environ, **environment(rank, size, port, **more)},
        )
        for rank in range(size)
    ]
    deadline, codes = time.monotonic() + seconds, []
    try:
        for child in children:
            try:
                codes.append(child.wait(max(deadline - time.monotonic(), 1.0) if not is_stopped(child.pid) else 0))
            except subprocess.TimeoutExpired:
                codes.append(None)
    finally:
        for child in children:
            child.kill()
            child.wait()
    return codes


@pytest.mark.parametrize("how", ["killed", "stopped"])
@pytest.mark.parametrize("first", range(0, len(OPERATIONS), 6))
def test_survivors_go_on(how, first):
    """A rank gets SIGKILL or SIGSTOP in the middle of each operation, until two ranks are left."""
    lost = len(OPERATIONS[first : first + 6])
    codes = run(f"survivor({how!r}, 8)", 8, 80.0, KOS_TEST_FIRST=str(first))
    assert codes == [0] * (8 - lost) + [-signal.SIGKILL] * lost
