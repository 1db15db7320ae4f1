"""Ranks as threads, for tests: ``spawn`` runs a function on some ranks; ``kos.testing.plugin`` is for pytest."""

from __future__ import annotations

import inspect
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar

from kos.comm import Communicator, init, timeouts
from kos.comm.arguments import check_bool, check_timeout, number_in
from kos.comm.call_guards import program_line
from kos.comm.control.threads import ThreadControlPlane, ThreadGroup, ThreadWorld, rank_thread
from kos.errors import CollectiveError, CollectiveTimeout, InvalidArgument
from kos.testing.faults import Crashed, Fault, FaultPlan
from kos.testing.watch import Deadlock, Watch

__all__ = ["Deadlock", "Fault", "spawn"]

ERROR_SECONDS = 2.0  # for ranks to raise the errors of their waits
_SHOWN = 8  # ranks in a message

T = TypeVar("T")


def spawn(
    fn: Callable[[Communicator], T],
    world_size: int,
    timeout: float = 60.0,
    *,
    hosts: Sequence[int] = (),
    faults: Sequence[Fault] = (),
    buffer_bytes: float = 0,
    check_deadlock: bool = True,
    check_messages: bool = True,
    check_arrays: bool = True,
    strict: bool = True,
) -> list[T]:
    """Run ``fn(comm)`` on ``world_size`` ranks that are threads of this process; their results by rank.

    ``fn`` and what it calls use that communicator: ``kos.init()`` raises InvalidArgument in the thread of a rank.

    If a rank raises, the others raise RankLost from their waits, or the error that made the first rank fail.  The first
    error is raised here with a note that names the rank.  After ``timeout`` seconds every wait raises a
    CollectiveTimeout that names the missing ranks.  If no rank waits then, ``spawn`` raises it and names the ranks that
    still run (threads cannot be killed).

    ``hosts=[2, 2]`` are ranks of pretended hosts: ranks 0 and 1 are on one and ranks 2 and 3 on another, as by
    ``KOS_HOST``.  ``comm.local_ranks``, local ranks and ``comm.split("host")`` follow, and ``comm.views`` is refused.

    ``faults`` is a plan of failures (see ``Fault``).  A rank that crashes or stalls for good has the result None.

    Programs that would fail elsewhere fail here too.  Each check can be switched off:

    - ``buffer_bytes``: a larger message is complete when it is received, so two ranks that both send first deadlock.
      The default is that of the strictest backend: on ``nccl`` the first message between two ranks waits for any size.
      ``mpi`` and ``tcp`` buffer messages of up to 64 KiB between ranks of a host; ``float("inf")`` buffers every one.
    - ``check_deadlock``: when every rank waits and none can continue, all raise ``Deadlock`` at once.  It names the
      rank and the operation that each rank waits for.  Ranks that compute, sleep, or wait with their own timeout can
      continue, and so can a program with threads that started after ``spawn``.
    - ``check_arrays``: an array of an operation with ``async_op=True`` that is written before the operation is
      complete makes it raise CollectiveError.  It compares checksums: reads, and writes of equal values, are not seen.
    - ``check_messages``: CollectiveError for messages that were never received, if no rank raised.  It sees those of at
      most ``buffer_bytes``: the sender of a larger one still waits, and raises Deadlock, or RankLost if the receiver
      has returned.  A plan with another fault than ``delay`` switches it off.
    - ``strict``: CollectiveError if a rank never waited for a Work, with the line that launched it.  A rank waits by
      ``wait``, a ``done`` that returns True, ``synchronize``, or ``close`` of its communicator.  A plan with another
      fault than ``delay`` switches this check off.

    Raises InvalidArgument without ranks, for ``hosts`` that do not add up, and if a fault never happened.

        assert spawn(lambda comm: comm.rank, 3) == [0, 1, 2]
    """
    _check_function(fn)
    world_size, timeout = number_in("world_size", world_size, 1, 1 << 16), check_timeout(timeout)
    names = _host_names(hosts, world_size)
    _check_buffer_bytes(buffer_bytes)
    deadlock, arrays = check_bool("check_deadlock", check_deadlock), check_bool("check_arrays", check_arrays)
    messages, strict = check_bool("check_messages", check_messages), check_bool("strict", strict)
    plan = FaultPlan(faults or (), world_size)
    watch = Watch(world_size, plan, buffer_bytes, deadlock, arrays, strict)
    group = ThreadGroup(world_size, ThreadWorld(world_size, watch))
    results: list[Any] = [None] * world_size
    comms: dict[int, Communicator] = {}
    errors: list[tuple[int, BaseException]] = []  # the first is raised
    unwaited: list[str] = []

    def run(rank: int) -> None:
        why = "its function returned"
        try:
            place = ThreadControlPlane(group, rank, timeout, names[rank])
            comm = init("mock", rendezvous=place, timeout=timeout)
            comms[rank] = comm
            with ExitStack() as stack:
                stack.enter_context(comm)
                try:
                    results[rank] = fn(comm)
                    unwaited.extend(watch.unwaited(rank))
                except Crashed as crash:
                    stack.pop_all()  # it closes and notifies nothing
                    why = str(crash)
                except BaseException as error:
                    errors.append((rank, error))  # before the others fail because of it
                    raise
        except BaseException as error:
            # Only for groups that the rank has neither aborted nor closed.
            why = f"{type(error).__name__}: {error}".removesuffix(": ")
            errors.append((rank, error))  # of init or close; an error of ``fn`` is in the list already
        finally:
            group.world.end(rank, why)

    threads = [rank_thread(run, rank) for rank in range(world_size)]
    late = _run(threads, watch, timeout, group, comms)
    if late is not None and not errors:
        raise late
    if errors:
        rank, error = errors[0]
        error.add_note(f"raised on rank {rank} of {world_size}")
        raise error
    _check_end(watch, unwaited, messages)
    return results


def _check_function(fn: Any) -> None:
    if not callable(fn):
        raise InvalidArgument(f"fn: expected a function of a communicator, got {fn!r}")
    if inspect.iscoroutinefunction(fn) or inspect.isgeneratorfunction(fn):  # a call of it runs nothing
        raise InvalidArgument(f"fn: expected a function without async and yield, got {fn!r}")


def _check_buffer_bytes(buffer_bytes: Any) -> None:
    if not isinstance(buffer_bytes, int | float) or not buffer_bytes >= 0:
        raise InvalidArgument(f"buffer_bytes: expected a number of bytes from 0 on, got {buffer_bytes!r}")


def _host_names(hosts: Any, world_size: int) -> list[str | None]:
    """The name of each rank's pretended host, None for the machine's own."""
    counts = [number_in("hosts", n, 1, world_size) for n in hosts] if isinstance(hosts, Sequence) else [0]
    if counts and sum(counts) != world_size:
        raise InvalidArgument(f"hosts: expected numbers of ranks that add up to {world_size}, got {hosts!r}")
    return [f"host {host}" for host, count in enumerate(counts) for _ in range(count)] or [None] * world_size


def _run(
    threads: Sequence[threading.Thread], watch: Watch, timeout: float, group: ThreadGroup,
    comms: dict[int, Communicator],
) -> CollectiveTimeout | None:  # fmt: skip
    """Run the threads of all ranks for at most ``timeout`` seconds; the error of those that still run then."""
    watch.threads, watch.deadline = [*threads], time.monotonic() + timeout
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, watch.deadline - time.monotonic()))
    running = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
    waiting = [rank for rank in running if rank in comms and comms[rank].backend.engine.expire(timeout)]
    for rank in waiting:
        threads[rank].join(ERROR_SECONDS)
    running = [rank for rank in running if threads[rank].is_alive()]
    message = f"spawn: {timeouts.running(running, len(threads), timeout)}"
    message += "".join(f"; rank {rank} {_place(threads[rank])}" for rank in running[:_SHOWN])
    for rank in running:
        group.world.end(rank, message)  # ends every wait for it, in groups split from this one too
    return CollectiveTimeout(message, ranks=running) if running else None


def _check_end(watch: Watch, unwaited: list[str], messages: bool) -> None:
    """Raise for faults that did not happen, and for Works and messages that are left over."""
    plan = watch.plan
    if plan.pending:
        raise InvalidArgument(
            f"faults: expected all to happen, got none of {sorted(plan.pending, key=str)} in "
            f"{plan.operations} operations of the ranks (or nothing was sent in those)"
        )
    if plan.harmless and unwaited:
        raise CollectiveError(f"spawn: {'; '.join(sorted(unwaited)[:_SHOWN])}")
    if messages and plan.harmless and (unreceived := watch.unreceived()):
        raise CollectiveError(f"spawn: messages that no rank received: {'; '.join(unreceived[:8])}")


def _place(thread: threading.Thread) -> str:
    """``is at file:line``: the innermost line of a running thread outside kos and Python's library."""
    line = program_line(sys._current_frames().get(thread.ident or 0))
    return "is ending" if line is None else f"is at {line}"
