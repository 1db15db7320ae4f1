"""Ranks for tests of peer memory: processes that swap bytes through pipes.  Also where the tests' kernels are."""

import multiprocessing
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

TIMEOUT = 60.0
KERNELS = Path(__file__).with_name("kernels")


class PipeExchange:
    """One rank's end of a pipe to the parent, which hands every rank what all ranks sent."""

    def __init__(self, rank: int, size: int, pipe: Connection) -> None:
        self.rank, self.size, self._pipe = rank, size, pipe

    def allgather(self, data: bytes) -> list[bytes]:
        self._pipe.send_bytes(data)
        if not self._pipe.poll(TIMEOUT):
            raise TimeoutError(f"rank {self.rank}: no answer in {TIMEOUT} s")
        return [self._pipe.recv_bytes() for _ in range(self.size)]

    def barrier(self) -> None:
        self.allgather(b"")


def _child(function: Callable[..., Any], rank: int, size: int, pipe: Connection, *arguments: Any) -> None:
    try:
        function(PipeExchange(rank, size, pipe), *arguments)
    except BaseException:
        traceback.print_exc()
        raise SystemExit(1) from None


def run_processes(
    function: Callable[..., Any], size: int, *arguments: Any, killed: dict[int, int] | None = None
) -> None:
    """``function(exchange, *arguments)`` in ``size`` processes; raises unless all end with status 0.

    ``killed`` gives the exit codes expected of ranks that do not live: the others' exchanges go on without
    them, with empty bytes in their place.
    """
    killed = killed or {}
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for rank in range(size):
        ours, theirs = context.Pipe()
        process = context.Process(target=_child, args=(function, rank, size, theirs, *arguments), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    alive = dict(enumerate(pipes))
    try:
        while alive:
            round_: list[bytes] = [b""] * size
            waiting = dict(alive)
            while waiting:
                ready = wait(list(waiting.values()), TIMEOUT)
                assert ready, f"ranks {sorted(waiting)} sent nothing in {TIMEOUT} s"
                for rank, pipe in list(waiting.items()):
                    if pipe in ready:
                        del waiting[rank]
                        try:
                            round_[rank] = pipe.recv_bytes()
                        except EOFError:
                            del alive[rank]
            for pipe in alive.values():
                for data in round_:
                    pipe.send_bytes(data)
        for rank, process in enumerate(processes):
            process.join(TIMEOUT)
            assert process.exitcode == killed.get(rank, 0), f"rank {rank} ended with {process.exitcode}"
    finally:
        for process in processes:
            process.kill()
            process.join(TIMEOUT)
