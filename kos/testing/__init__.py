"""Ranks as threads, for tests: ``spawn`` runs a function on some ranks; ``kos.testing.plugin`` is for pytest."""

from __future__ import annotations

import inspect
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import kos
from kos.comm import Communicator, init, timeouts
from kos.comm.arguments import check_bool, check_timeout, number_in
from kos.comm.failures import blaming
from kos.comm.rendezvous.threads import RankThread, ThreadGroup, ThreadRendezvous, ThreadWorld
from kos.errors import CollectiveError, CollectiveTimeout, InvalidArgument
from kos.testing.faults import Crashed, Fault, FaultPlan
from kos.testing.watch import Deadlock, Watch

__all__ = ["Deadlock", "Fault", "spawn"]

ERROR_SECONDS = 2.0  # for ranks to raise the errors of their waits
_SHOWN = 8  # ranks in a message
_KOS, _PYTHON = str(Path(kos.__file__).parent), sysconfig.get_path("stdlib")

T = TypeVar("T")


def spawn(
    fn: Callable[[Communicator], T],
    world_size: int,
    timeout: float = 60.0,
    *,
    faults: Sequence[Fault] = (),
    buffer_bytes: float = 0,
    check_deadlock: bool = True,
    check_messages: bool = True,
    check_arrays: bool = True,
) -> list[T]:
    """Run ``fn(comm)`` on ``world_size`` ranks that are threads of this process; their results by rank.

    ``fn`` and what it calls use that communicator: ``kos.init()`` raises InvalidArgument in the thread of a rank.

    If a rank raises, the others raise RankLost from their waits, and the first error is raised here with a note that
    names the rank.  After ``timeout`` seconds every wait raises a CollectiveTimeout that names the missing ranks.
    If no rank waits then, ``spawn`` raises it and names the ranks that still run (threads cannot be killed).

    ``faults`` is a plan of failures (see ``Fault``).  A rank that crashes or stalls for good has the result None.

    Programs that would fail elsewhere fail here too.  Each check can be switched off:

    - ``buffer_bytes``: a larger message is complete when it is received, so two ranks that both send first deadlock.
      The default is that of the strictest backend: on ``nccl`` the first message between two ranks waits for any size.
      ``mpi`` and ``tcp`` buffer messages of up to 128 KiB between ranks of a host; ``float("inf")`` buffers every one.
    - ``check_deadlock``: when every rank waits and none can continue, all raise ``Deadlock`` at once.  It names the
      rank and the operation that each rank waits for.  Ranks that compute, sleep, or wait with their own timeout can
      continue, and so can a program with threads that started after ``spawn``.
    - ``check_arrays``: an array of an operation with ``async_op=True`` that is written before the operation is
      complete makes it raise CollectiveError.  It compares checksums: reads, and writes of equal values, are not seen.
    - ``check_messages``: CollectiveError for messages that were never received, if no rank raised.  It sees those of at
      most ``buffer_bytes``: the sender of a larger one still waits, and raises Deadlock, or RankLost if the receiver
      has returned.  A plan with another fault than ``delay`` switches it off.

    Raises InvalidArgument without ranks, and if a fault never happened.

        assert spawn(lambda comm: comm.rank, 3) == [0, 1, 2]
    """
    if not callable(fn):
        raise InvalidArgument(f"fn: expected a function of a communicator, got {fn!r}")
    if inspect.iscoroutinefunction(fn) or inspect.isgeneratorfunction(fn):  # a call of it runs nothing
        raise InvalidArgument(f"fn: expected a function without async and yield, got {fn!r}")
    world_size, timeout = number_in("world_size", world_size, 1, 1 << 16), check_timeout(timeout)
    if not isinstance(buffer_bytes, int | float) or not buffer_bytes >= 0:
        raise InvalidArgument(f"buffer_bytes: expected a number of bytes from 0 on, got {buffer_bytes!r}")
    deadlock, arrays = check_bool("check_deadlock", check_deadlock), check_bool("check_arrays", check_arrays)
    messages = check_bool("check_messages", check_messages)
    plan = FaultPlan(faults or (), world_size)
    watch = Watch(world_size, plan, buffer_bytes, deadlock, arrays)
    group = ThreadGroup(world_size, ThreadWorld(world_size, watch))
    results: list[Any] = [None] * world_size
    comms: dict[int, Communicator] = {}
    errors: list[tuple[int, BaseException]] = []  # the first is raised

    def run(rank: int) -> None:
        why = "its function returned"
        try:
            comm = init("mock", rendezvous=ThreadRendezvous(group, rank, timeout), timeout=timeout)
            comms[rank] = comm
            with ExitStack() as stack:
                stack.enter_context(comm)
                try:
                    results[rank] = fn(comm)
                except Crashed as crash:
                    stack.pop_all()  # it closes and notifies nothing
                    why = str(crash)
                except BaseException as error:
                    errors.append((rank, error))  # before the others fail because of it
                    raise
        except BaseException as error:
            why = f"{type(error).__name__}: {error}"
            errors.append((rank, error))
        finally:
            group.world.end(rank, why)

    threads = [RankThread(target=run, args=(rank,), daemon=True) for rank in range(world_size)]
    watch.threads, watch.deadline = [*threads], time.monotonic() + timeout
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, watch.deadline - time.monotonic()))
    running = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
    waiting = [rank for rank in running if rank in comms and comms[rank].backend.engine.expire(timeout)]
    with group.world.lock:
        group.world.notify(waiting)  # their own deadlines may be later
    for rank in waiting:
        threads[rank].join(ERROR_SECONDS)
    running = [rank for rank in running if threads[rank].is_alive()]
    message = f"spawn: {timeouts.running(running, world_size, timeout)}"
    message += "".join(f"; rank {rank} {_place(threads[rank])}" for rank in running[:_SHOWN])
    for rank in running:
        group.world.end(rank, message)  # ends every wait for it, in groups split from this one too
    if running and not errors:
        raise blaming(CollectiveTimeout(message), running)
    if errors:
        rank, error = errors[0]
        error.add_note(f"raised on rank {rank} of {world_size}")
        raise error
    if plan.pending:
        raise InvalidArgument(
            f"faults: expected all to happen, got none of {sorted(plan.pending, key=str)} in "
            f"{plan.operations} operations of the ranks (or nothing was sent in those)"
        )
    if messages and plan.harmless and (unreceived := watch.unreceived()):
        raise CollectiveError(f"spawn: messages that no rank received: {'; '.join(unreceived[:8])}")
    return results


def _place(thread: threading.Thread) -> str:
    """``is at file:line``: the innermost line of a running thread outside kos and Python's library."""
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None and _in_library(frame.f_code.co_filename):
        frame = frame.f_back
    return "is ending" if frame is None else f"is at {frame.f_code.co_filename}:{frame.f_lineno}"


def _in_library(file: str) -> bool:
    return file.startswith(_KOS) or (file.startswith(_PYTHON) and "site-packages" not in file)
