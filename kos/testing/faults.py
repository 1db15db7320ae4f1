"""Faults for tests: a plan of failures of the operations of ranks that are threads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from threading import TIMEOUT_MAX
from typing import Any

from kos.comm.arguments import check_int
from kos.comm.control.threads import ThreadWorld
from kos.comm.work import Work
from kos.errors import CollectiveError, InvalidArgument

KINDS = ("delay", "drop", "error", "stall", "crash")


@dataclass(frozen=True, slots=True)
class Fault:
    """A failure of operation ``operation`` (from 0) of rank ``rank``.

    Operations are all collectives and messages that the rank starts, on any communicator, in order.  ``call`` counts
    only those of one name: ``Fault("drop", 0, 2, call="send")`` drops the third send.  ``kind`` is one of

    - ``delay``: the rank begins that operation ``seconds`` later (default 0.02), which changes no result;
    - ``drop``: the messages that it sends in that operation are lost: ranks that wait for one raise Deadlock, or
      RankLost if the sender has returned;
    - ``error``: the operation raises CollectiveError before it begins, also on the other ranks that take part;
      its ``ranks`` has this rank;
    - ``stall``: the rank stops forever before that operation: ranks that wait for it raise Deadlock;
    - ``crash``: the rank ends without a report before that operation: the others raise RankLost.

    Where the waits have a shorter timeout than ``spawn``, CollectiveTimeout comes instead of Deadlock, its base.

    Raises InvalidArgument for an invalid plan.
    """

    kind: str
    rank: int
    operation: int = 0
    seconds: float | None = None
    call: str | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InvalidArgument(f"fault: expected one of {', '.join(KINDS)}, got {self.kind!r}")
        if check_int("fault: rank", self.rank) < 0 or check_int("fault: operation", self.operation) < 0:
            raise InvalidArgument(f"fault: expected rank and operation from 0 on, got {self}")
        timed = self.kind == "delay" and isinstance(self.seconds, int | float) and 0 < self.seconds <= TIMEOUT_MAX
        if self.call is not None and not isinstance(self.call, str):
            raise InvalidArgument(f"fault: expected the name of an operation as call, got {self.call!r}")
        if self.seconds is not None and not timed:
            raise InvalidArgument(f"fault: expected positive seconds of a delay, got {self}")


class Crashed(BaseException):
    """Ends the thread of a rank that crashes or stalls; not an Exception, so that tests do not catch it."""


class FaultPlan:
    """The faults of one ``spawn``, and those that have not happened yet."""

    def __init__(self, faults: Iterable[Fault], size: int) -> None:
        self.faults = list(faults) if isinstance(faults, Iterable) else [faults]
        for fault in self.faults:
            if not isinstance(fault, Fault):
                raise InvalidArgument(f"faults: expected a list of Fault, got {faults!r}")
            if fault.rank >= size:
                raise InvalidArgument(f"faults: expected ranks below {size}, got {fault}")
        self.pending = set(self.faults)
        self.harmless = all(fault.kind == "delay" for fault in self.faults)  # no rank ends and no message is lost
        self.keeps_messages = all(fault.kind != "drop" for fault in self.faults)
        self.operations = [0] * size  # started by each rank
        self._calls: Counter[tuple[int, str]] = Counter()  # started by each rank, by name
        self.stalled: set[int] = set()
        self.lost: dict[tuple[int, str], None] = {}  # rank and operation of the messages that were dropped, in order

    def inject(self, world: ThreadWorld, rank: int, work: Work[Any]) -> Callable[[], None] | None:
        """Apply the faults of the next operation of world rank ``rank``.

        If its messages are dropped, returns a function to call for each of them.
        """
        numbers = {None: self.operations[rank], work.name: self._calls[rank, work.name]}
        self.operations[rank] += 1
        self._calls[rank, work.name] += 1
        lost = None
        for fault in self.faults:
            if fault.rank != rank or numbers.get(fault.call) != fault.operation:
                continue
            if fault.kind == "drop":
                lost = partial(self._lose, fault, work)
                continue
            self.pending.discard(fault)
            if fault.kind == "delay":
                with world.lock:
                    world.wakeup[rank].wait_for(lambda: False, fault.seconds or 0.02)
            elif fault.kind == "error":
                raise CollectiveError(f"rank {rank} failed, as the test's plan says", ranks=[rank], call=work)
            elif fault.kind == "stall":
                self._stall(world, rank, work)
            else:
                raise Crashed(f"it crashed before {work.name}")
        return lost

    def _lose(self, fault: Fault, work: Work[Any]) -> None:
        """Record that a message of ``work`` was dropped."""
        self.pending.discard(fault)
        self.lost[fault.rank, f"{work.name} #{work.sequence}"] = None

    def culprits(self) -> tuple[int, ...]:
        """The ranks that have stalled or lost messages."""
        return tuple(sorted({*self.stalled, *(rank for rank, _ in self.lost)}))

    def _stall(self, world: ThreadWorld, rank: int, work: Work[Any]) -> None:
        """Wait until all other ranks have ended or stalled too."""
        with world.lock:
            self.stalled.add(rank)
            world.notify(list(range(len(world.wakeup))))
            while len(world.ends) + len(self.stalled) < len(world.wakeup):
                world.wait(rank, None, lambda: [(f"stalled before {work.name}, as the test's plan says", [])])
        raise Crashed(f"it stalled before {work.name}")
