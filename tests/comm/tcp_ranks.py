"""Ranks that are threads of the test, and find each other over loopback by environment variables.

Each has its own sockets.
"""

import os
import random
import socket
import subprocess
import tempfile
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import kos
from kos.comm.control.group import TCPControlPlane
from kos.comm.control.hub import Hub
from kos.comm.control.place import env_rendezvous
from kos.errors import RendezvousError
from tests.comm import ranks
from tests.forked import PATHS, Forked, fork_server

TIMEOUT = 40.0  # seconds; a busy machine takes many
SECRET = "of the tests"
ROOT = Path(__file__).resolve().parents[2]
LAUNCHERS_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK", "MPI_LOCALNRANKS")


_GIVEN = deque[int](maxlen=200)
"""The last ports that a test got: it may use them only later."""


def free_port() -> int:
    """A port of this host that nobody uses.

    It is none that the system gives to a connection or a listener of its own choice: another test could get it first.
    Tests that run at the same time, in workers of pytest-xdist, have ports of their own.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    worker += int(os.environ.get("PYTEST_XDIST_TESTRUNUID", "0")[:4], 16)  # two runs, too
    while True:
        port = 20_000 + worker % 16 * 560 + random.SystemRandom().randrange(559)  # the next one is this worker's too
        with socket.socket() as sock, suppress(OSError):
            sock.bind(("127.0.0.1", port))
            if port not in _GIVEN:
                _GIVEN.append(port)
                return port


def environment(rank: int, size: int, port: int, **more: str) -> dict[str, str]:
    """What a launcher would tell a rank."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "KOS_SECRET": SECRET,
        "KOS_HOST": ranks.host_of(rank),
        **more,
    }


def run_threads(*bodies: Callable[[], Any], limit: float = 2 * TIMEOUT) -> list[Any]:
    """What each body returned or raised; all run at the same time, for at most ``limit`` seconds."""
    results: list[Any] = [None] * len(bodies)

    def run(index: int) -> None:
        try:
            results[index] = bodies[index]()
        except BaseException as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(limit)
        assert not thread.is_alive(), "a rank hangs"
    return results


def run_ranks(
    size: int, fn: Callable[[TCPControlPlane], Any], timeout: float = TIMEOUT, limit: float = 2 * TIMEOUT, **more: str
) -> list[Any]:
    """What ``fn(rendezvous)`` returned on each rank; a failure of any of them is raised."""
    port = free_port()

    def body(rank: int) -> Any:
        rendezvous = env_rendezvous(timeout, environment(rank, size, port, **more))
        try:
            return fn(rendezvous)
        finally:
            rendezvous.close()

    results = run_threads(*[lambda rank=rank: body(rank) for rank in range(size)], limit=limit)
    for rank, result in enumerate(results):
        if isinstance(result, BaseException):
            text = "".join(traceback.format_exception(result))
            raise AssertionError(f"rank {rank} of {size} failed:\n{text}") from result
    return results


def errors_of(timeout: float, *environments: dict[str, str]) -> list[str]:
    """What each rank says that cannot join; empty for those that do."""

    def body(environ: dict[str, str]) -> str:
        try:
            env_rendezvous(timeout, environ).close()
        except RendezvousError as error:
            return str(error)
        return ""

    results = run_threads(*[lambda e=e: body(e) for e in environments])
    for result in results:
        if isinstance(result, BaseException):
            raise result
        assert "\n" not in result
    return results


def come_first(monkeypatch: pytest.MonkeyPatch, come: Callable[[], bool]) -> None:
    """For hubs time passes only while ``come`` is true: their timeouts count once that is so, however late it is."""
    last = clock = time.monotonic()
    passes = False

    def monotonic() -> float:
        nonlocal last, clock, passes
        now = time.monotonic()
        if not isinstance(threading.current_thread(), Hub):
            return now
        clock += (now - last) * passes
        last, passes = now, come()
        return clock

    monkeypatch.setattr("kos.comm.control.hub.time", SimpleNamespace(monotonic=monotonic, sleep=time.sleep))


class TCPRanks:
    """``run(fn)`` runs ``fn(comm)`` on every rank of a group that the tcp backend carries."""

    def __init__(self, size: int) -> None:
        self.size = size

    def run(self, fn: Callable[[kos.Communicator], Any]) -> list[Any]:
        def body(rendezvous: TCPControlPlane) -> Any:
            with kos.init("tcp", rendezvous=rendezvous, timeout=TIMEOUT) as comm:
                return fn(comm)

        return run_ranks(self.size, body)


@contextmanager
def both_ranks() -> Iterator[list[kos.Communicator]]:
    """The communicators of a group of two, for one thread that makes the calls of both."""
    port = free_port()

    def make(rank: int) -> kos.Communicator:
        return kos.init("tcp", rendezvous=env_rendezvous(TIMEOUT, environment(rank, 2, port)), timeout=TIMEOUT)

    made = run_threads(*[lambda rank=rank: make(rank) for rank in range(2)])
    try:
        yield made
    finally:
        run_threads(*[each.abort for each in made])


def start(command: list[str], rank: int, size: int, port: int, **more: str) -> subprocess.Popen[str]:
    """One rank as a process, started as from a shell."""
    env = {name: value for name, value in os.environ.items() if name not in LAUNCHERS_VARIABLES}
    env |= environment(rank, size, port, PYTHONPATH=PATHS, OPENBLAS_NUM_THREADS="1", **more)
    return subprocess.Popen(command, env=env, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def finish(processes: list[subprocess.Popen[str]]) -> list[tuple[int, str]]:
    """Exit code and output of each process; none outlives the call."""
    deadline, results = time.monotonic() + 100, []  # less than what pytest gives a test
    try:
        for process in processes:
            output, _ = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
            results.append((process.returncode, output))
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return results


def run_processes(code: str, size: int, **more: str) -> list[tuple[int, str]]:
    """Exit code and output of each rank of a Python program that is ``code``."""
    port, deadline, ranks = free_port(), time.monotonic() + 100, list[Forked]()  # less than what pytest gives a test
    env = {name: value for name, value in os.environ.items() if name not in LAUNCHERS_VARIABLES}
    with tempfile.TemporaryDirectory(prefix="kos-ranks-") as folder:
        outputs = [Path(folder) / str(rank) for rank in range(size)]
        try:
            for rank, output in enumerate(outputs):
                own = environment(rank, size, port, PYTHONPATH=PATHS, OPENBLAS_NUM_THREADS="1", **more)
                ranks.append(fork_server().start("tests.forked:run_program", [code], env | own, output))
            codes = [rank.wait(max(0.1, deadline - time.monotonic())) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        return [(code, output.read_text()) for code, output in zip(codes, outputs, strict=True)]
