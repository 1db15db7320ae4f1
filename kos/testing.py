"""Ranks as threads, for tests: ours and users'."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from kos.comm import Communicator, init
from kos.comm.rendezvous import ThreadGroup, ThreadRendezvous
from kos.errors import CollectiveTimeout, RankLost

T = TypeVar("T")

_NOTHING: Any = object()


def spawn(fn: Callable[[Communicator], T], world_size: int, timeout: float = 60.0) -> list[T]:
    """Run ``fn(comm)`` on ``world_size`` ranks that are threads of this process; their results by rank.

    If a rank raises, the others raise RankLost from whatever they wait in, and the first error is raised here
    with a note that names the rank.  Raises CollectiveTimeout, naming the ranks, if some are still running
    after ``timeout`` seconds (their threads cannot be killed, but every wait in them is woken and fails).
    """
    group = ThreadGroup(world_size)
    results: list[T] = [_NOTHING] * world_size
    errors: list[tuple[int, BaseException]] = []

    def run(rank: int) -> None:
        why = "its function returned"
        try:
            with init("mock", rendezvous=ThreadRendezvous(group, rank, timeout), timeout=timeout) as comm:
                try:
                    results[rank] = fn(comm)
                except BaseException as error:
                    errors.append((rank, error))  # before the others hear of it
                    raise
        except BaseException as error:
            why = f"{type(error).__name__}: {error}"
            if not any(rank == known for known, _ in errors):
                errors.append((rank, error))
        finally:
            group.world.depart(rank, why)

    threads = [
        threading.Thread(target=run, args=(rank,), name=f"rank {rank}", daemon=True)
        for rank in range(world_size)
    ]
    deadline = time.monotonic() + timeout
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    running = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
    if running and not errors:
        message = f"spawn: ranks {running} of {world_size} are still running after {timeout:g} s"
        group.fail(RankLost, message)
        raise CollectiveTimeout(message)
    if errors:
        rank, error = errors[0]
        error.add_note(f"raised on rank {rank} of {world_size}")
        raise error
    return results
