"""Faults for tests: what a network and its hosts can do to the mock backend's messages and ranks, by a plan.

While there is a plan, every message travels as a packet with a number and a checksum (CRC-32), as on a
network: packets that come late, twice or in another order are put right, a packet that is lost leaves its
receiver waiting, and one that was changed on the way fails the operation on all ranks.
"""

from __future__ import annotations

import threading
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from kos.comm.arguments import whole_number
from kos.comm.host.mock import SENT
from kos.comm.operation import Call
from kos.comm.rendezvous.threads import ThreadGroup
from kos.comm.schedules.execute import Request, Transport
from kos.errors import CollectiveError, InvalidArgument, KosError

Array = np.ndarray[Any, Any]

KINDS = ("delay", "drop", "duplicate", "corrupt", "reorder", "stall", "crash")
_SHORT = 0.02  # seconds


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong with operation ``operation`` (from 0) of rank ``rank``.

    Operations are those that the rank starts, on whichever communicator: collectives and messages, in their
    order.  ``kind`` is one of

    - ``delay``: what it sends in that operation arrives ``seconds`` later (0.02 unless given);
    - ``reorder``: each message arrives after the next one, or ``seconds`` later if none follows;
    - ``duplicate``: each message arrives twice;
    - ``drop``: no message arrives: the ranks that wait for one raise CollectiveTimeout;
    - ``corrupt``: a byte of each message changes on the way: all ranks of the group raise CollectiveError;
    - ``stall``: the rank stops before that operation for ``seconds``, or for good: it is gone once all others
      are, and the others raise CollectiveTimeout that names it;
    - ``crash``: the rank is gone before that operation, without a word: the others raise RankLost.

    Delays, other orders and duplicates change no result.  Raises InvalidArgument for a plan that makes no
    sense.
    """

    kind: str
    rank: int
    operation: int = 0
    seconds: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InvalidArgument(f"fault: expected one of {', '.join(KINDS)}, got {self.kind!r}")
        if whole_number("fault: rank", self.rank) < 0 or whole_number("fault: operation", self.operation) < 0:
            raise InvalidArgument(f"fault: expected rank and operation from 0 on, got {self}")
        timed = self.kind in ("delay", "reorder", "stall")
        timed = timed and isinstance(self.seconds, int | float) and self.seconds > 0
        if self.seconds is not None and not timed:
            raise InvalidArgument(f"fault: expected positive seconds of a delay, reorder or stall, got {self}")


class Crashed(BaseException):
    """Ends the thread of a rank that a plan made crash or stall; not an Exception, so that no test keeps it."""


class FaultPlan:
    """The faults of one ``spawn``, and which of them happened."""

    def __init__(self, faults: Iterable[Fault], size: int) -> None:
        self._faults = list(faults) if isinstance(faults, Iterable) else [faults]
        for fault in self._faults:
            if not isinstance(fault, Fault):
                raise InvalidArgument(f"faults: expected a list of Fault, got {faults!r}")
            if fault.rank >= size:
                raise InvalidArgument(f"faults: expected ranks below {size}, got {fault}")
        self.pending = set(self._faults)
        self.operations = [0] * size  # that each rank started
        self.stalled = 0

    def transport(self, group: ThreadGroup, rank: int, inner: Transport) -> FaultyTransport:
        """What carries the messages of a rank of ``group`` while this plan holds."""
        return FaultyTransport(self, group, rank, inner)

    def next_operation(self, rank: int) -> list[Fault]:
        """What goes wrong with the operation that ``rank`` is about to start."""
        number = self.operations[rank]
        self.operations[rank] += 1
        return [fault for fault in self._faults if (fault.rank, fault.operation) == (rank, number)]


class _Packet(NamedTuple):
    number: int  # among those of its pair and tag
    checksum: int
    data: Array


class FaultyTransport:
    """The transport of one rank of a group while a plan holds."""

    def __init__(self, plan: FaultPlan, group: ThreadGroup, rank: int, inner: Transport) -> None:
        self._plan, self._group, self._rank, self._inner = plan, group, rank, inner
        self._faults: dict[int, list[Fault]] = {}  # by tag
        self._said: dict[int, str] = {}  # the operations, by tag
        self._sent: Counter[tuple[int, int]] = Counter()  # by destination and tag
        self._arrived: Counter[tuple[int, int]] = Counter()
        self._early: dict[tuple[int, int], dict[int, _Packet]] = defaultdict(dict)
        self._held: list[threading.Timer] = []

    def start(self, call: Call, tag: int) -> None:
        """The rank is about to start ``call``, whose messages have ``tag``."""
        self._faults[tag], self._said[tag] = [], str(call)
        for fault in self._plan.next_operation(self._group.members[self._rank]):
            if fault.kind not in ("stall", "crash"):
                self._faults[tag].append(fault)
                continue
            self._plan.pending.discard(fault)
            if fault.kind == "crash":
                raise Crashed(f"it crashed before {call.name}")
            self._stall(fault, call)

    def _stall(self, fault: Fault, call: Call) -> None:
        world, plan = self._group.world, self._plan
        me = world.wakeup[self._group.members[self._rank]]
        with world.lock:
            if fault.seconds is not None:
                me.wait_for(lambda: False, fault.seconds)
                return
            plan.stalled += 1
            world.notify(list(range(len(world.wakeup))))
            me.wait_for(lambda: len(world.departed) + plan.stalled >= len(world.wakeup))
        raise Crashed(f"it stalled before {call.name}")

    def irecv(self, array: Array, peer: int, tag: int) -> Request:
        return self._inner.irecv(array, peer, tag)

    def forget(self, given_up: Callable[[Any], bool]) -> None:
        self._inner.forget(given_up)

    def isend(self, array: Array, peer: int, tag: int) -> Request:
        key = peer, tag
        with self._group.world.lock:
            self._group.raise_failure()
            faults = {fault.kind: fault for fault in self._faults.get(tag, ())}
            self._plan.pending.difference_update(self._faults.get(tag, ()))
            packet = _Packet(self._sent[key], _checksum(array), array.copy())
            self._sent[key] += 1
            if "corrupt" in faults:
                packet = _changed(packet)
            self._held = [timer for timer in self._held if timer.is_alive()]
            overtaken = [timer for timer in self._held if timer.name == "reorder"]
            late = faults.get("delay") or (None if overtaken else faults.get("reorder"))
            for _ in range(0 if "drop" in faults else 2 if "duplicate" in faults else 1):
                if late is None:
                    self._arrive(packet, key)
                else:
                    timer = threading.Timer(late.seconds or _SHORT, self._arrive, (packet, key))
                    timer.name, timer.daemon = late.kind, True
                    self._held.append(timer)
                    timer.start()
            for timer in overtaken:
                timer.cancel()
                timer.function(*timer.args)
        return SENT

    def close(self) -> None:
        """Return once everything has arrived."""
        for timer in list(self._held):
            timer.join()

    def _arrive(self, packet: _Packet, key: tuple[int, int]) -> None:
        """At the receiver: into the order in which it was sent, once."""
        with self._group.world.lock, suppress(KosError):  # where the group has failed meanwhile, nobody waits for it
            if packet.number >= self._arrived[key]:
                self._early[key][packet.number] = packet
            while (ready := self._early[key].pop(self._arrived[key], None)) is not None:
                self._arrived[key] += 1
                peer, tag = key
                if _checksum(ready.data) != ready.checksum:
                    changed = CollectiveError(
                        f"{self._said[tag]}: rank {peer}: a message from rank {self._rank} was changed on its way: "
                        f"expected checksum {ready.checksum:08x}, got {_checksum(ready.data):08x}"
                    )
                    return self._group.fail(changed)
                self._inner.isend(ready.data, peer, tag)


def _checksum(array: Array) -> int:
    return zlib.crc32(array.view(np.uint8).data)


def _changed(packet: _Packet) -> _Packet:
    """The packet with its middle byte changed; an empty one has only its checksum to lose."""
    data = packet.data.view(np.uint8)
    if data.size == 0:
        return packet._replace(checksum=packet.checksum ^ 1)
    data[data.size // 2] ^= 0x10
    return packet
