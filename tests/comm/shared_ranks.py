"""Ranks that are threads of this process and share a segment as processes do, on a backend of nothing else."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import kos
from kos.comm.backend import Probe
from kos.comm.backends.host import HostBackend
from kos.comm.communicator import Communicator
from kos.comm.rendezvous import Rendezvous, ThreadGroup, ThreadRendezvous

TIMEOUT = 30.0  # seconds


class SharedOnly(HostBackend):
    """Has no transport: what does not go through shared memory fails."""

    name = "shared-only"

    @classmethod
    def probe(cls, rendezvous: Rendezvous) -> Probe:
        return Probe(True, "a test")


def run(fn: Callable[[kos.Communicator], Any], size: int, close: bool = True) -> list[Any]:
    """What ``fn(comm)`` returned on each rank; the failure of the lowest rank that failed is raised."""
    group = ThreadGroup(size)
    results: list[Any] = [None] * size
    failures: dict[int, BaseException] = {}

    def body(rank: int) -> None:
        try:
            rendezvous = ThreadRendezvous(group, rank, TIMEOUT)
            comm = Communicator(SharedOnly(rendezvous), rendezvous, {}, TIMEOUT)
            results[rank] = fn(comm)
            if close:
                comm.close()
        except BaseException as error:
            failures[rank] = error

    threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(3 * TIMEOUT)
        assert not thread.is_alive(), "a rank hangs"
    if failures:
        raise failures[min(failures)]
    return results
