"""A backend of a package outside of kos: messages between ranks that are threads of one process.

It moves host memory by copies in queues, and the memory of GPUs by copies on the device.  The receiver copies, after
the sender's event; the sender's stream goes on after the receiver's event.
"""

from __future__ import annotations

import os
import threading
import uuid
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np

from kos.comm.contract import Backend, Message, Probe
from kos.comm.transport import wrong_message
from kos.comm.waits import Backoff
from kos.cuda import driver
from kos.cuda.streams import Event
from kos.errors import BackendUnavailable, CollectiveMismatch, KosError, RankLost


class Entries(dict[Any, Any]):
    """A dictionary whose missing entries are made, once: ``defaultdict`` may make one for each of two threads.

    Memory for the new entry may start a collection of garbage, which lets another thread run.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make

    def __missing__(self, key: Any) -> Any:
        return self.setdefault(key, self.make())


class Group:
    """What the ranks of one group share, each entry written by one rank."""

    known: ClassVar[dict[str, Group]] = {}

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.boxes: dict[Any, deque[Any]] = Entries(deque)  # messages, by sender, receiver and tag
        self.calls: dict[int, dict[int, Any]] = Entries(dict)  # by sequence number and rank
        self.failure: KosError | None = None
        self.gone: dict[int, KosError] = {}

    def check(self, *ranks: int) -> None:
        """Raise the failure of the group, or that one of those ranks is gone."""
        gone = [self.gone[rank] for rank in ranks if rank in self.gone]  # read first: a rank that failed goes later
        for error in (self.failure, *gone):
            if error is not None:
                raise type(error)(str(error))


class Sent:
    def __init__(self, tag: int) -> None:
        self.tag = tag

    def done(self) -> bool:
        return True  # the queue holds a copy


class Receive:
    def __init__(self, relay: Relay, array: Any, peer: int, tag: int) -> None:
        self.relay, self.array, self.peer, self.tag, self.complete = relay, array, peer, tag, False

    def done(self) -> bool:
        if not self.complete:
            self.relay.take(self)
        return self.complete


class Copy:
    """A message in GPU memory, which its receiver has copied once it has set ``copied``."""

    def __init__(self, address: int, nbytes: int, ready: Event) -> None:
        self.address, self.nbytes, self.ready = address, nbytes, ready
        self.copied: Event | None = None


class Relay(Backend):
    name = "relay"
    on_gpu = True

    @classmethod
    def probe(cls, rendezvous: Any) -> Probe:
        return Probe(True, "queues and copies of one process")

    def __init__(self, rendezvous: Any, engine: Any, device: int | None = None) -> None:
        super().__init__(rendezvous, engine, device)
        mine = f"{os.getpid()} {uuid.uuid4().hex}"
        everyone = [each.decode().split() for each in rendezvous.allgather(mine.encode())]
        if len({pid for pid, _ in everyone}) > 1:
            raise BackendUnavailable("relay: expected ranks that are threads of one process")
        self.rendezvous, self.key = rendezvous, everyone[0][1]
        self.group = Group.known.setdefault(self.key, Group())
        self.posted: defaultdict[Any, deque[Receive]] = defaultdict(deque)

    # Host memory.

    def waiter(self) -> Backoff:
        return Backoff(crowded=True)  # the ranks are threads: one that waits lets the others run

    def isend(self, array: Any, peer: int, tag: int) -> Sent:
        self.group.boxes[self.rank, peer, tag].append(array.copy())
        return Sent(tag)

    def irecv(self, array: Any, peer: int, tag: int) -> Receive:
        receive = Receive(self, array, peer, tag)
        self.posted[peer, tag].append(receive)
        return receive

    def take(self, receive: Receive) -> None:
        mine = self.posted[receive.peer, receive.tag]
        if mine[0] is not receive:
            return
        box = self.group.boxes[receive.peer, self.rank, receive.tag]
        if not box:
            return self.group.check(receive.peer)
        message, array = box.popleft(), receive.array
        mine.popleft()
        if (message.nbytes, message.dtype) != (array.nbytes, array.dtype):
            expected = array.nbytes, array.dtype
            got = message.nbytes, message.dtype
            raise wrong_message(self.failures, self.rank, expected, receive.peer, got)
        array.view(np.uint8)[:] = message.view(np.uint8)
        receive.complete = True

    def cancel(self, cancelled: Callable[[Any], bool]) -> None:
        for key, queue in self.posted.items():
            self.posted[key] = deque(receive for receive in queue if not cancelled(receive))

    def agree(self, work: Any, local: Any) -> Callable[[], bool]:
        calls, mine = self.group.calls[work.sequence], (work.text, work.fingerprint())
        calls[self.rank] = mine

        def all_arrived() -> bool:
            for rank, theirs in calls.copy().items():
                if theirs[1] != mine[1]:
                    raise self.failures.mismatch(work.group, (self.rank, *mine), (rank, *theirs))
            late = self.absent(work)
            if late:
                self.group.check(*late)
            return not late

        return all_arrived

    def absent(self, work: Any) -> list[int]:
        return [rank for rank in range(self.size) if rank not in self.group.calls[work.sequence]]

    # GPU memory.

    def _event(self, stream: int) -> Event:
        assert self.device is not None
        event = Event(self.device)
        event.record(stream)
        return event

    def exchange(self, sends: Sequence[Message], recvs: Sequence[Message], stream: int) -> None:
        boxes, ready = self.group.boxes, self._event(stream)
        copies = [Copy(address, nbytes, ready) for _, address, nbytes in sends]
        for (peer, *_), copy in zip(sends, copies, strict=True):
            boxes[self.rank, peer].append(copy)
        for peer, address, nbytes in recvs:
            box = boxes[peer, self.rank]
            self._wait(lambda box=box: bool(box), peer)  # type: ignore[misc]
            copy = box.popleft()
            if copy.nbytes != nbytes:
                raise CollectiveMismatch(f"expected {nbytes} bytes from rank {peer}, got {copy.nbytes}")
            copy.ready.hold(stream)
            if nbytes:
                driver.call(driver.cu.cuMemcpyAsync, address, copy.address, nbytes, stream)  # from any GPU
            copy.copied = self._event(stream)
        for (peer, *_), copy in zip(sends, copies, strict=True):
            self._wait(lambda copy=copy: copy.copied is not None, peer)  # type: ignore[misc]
            assert copy.copied is not None
            copy.copied.hold(stream)

    def _wait(self, over: Callable[[], bool], peer: int) -> None:
        def look() -> bool:
            if over():
                return True
            self.group.check(peer)
            return False

        self.wait_until(look)

    # Failures and the end.

    def find_failure(self) -> KosError | None:
        return self.group.failure

    def report_failure(self, failure: KosError, sequence: int) -> None:
        with self.group.lock:
            self.group.failure = self.group.failure or failure

    def abort(self, reason: str) -> str:
        gone = RankLost(f"rank {self.rank} is gone: {reason}")
        self.group.gone.setdefault(self.rank, gone)
        return reason

    def close(self, begun: int) -> None:
        self.rendezvous.barrier()
        self.abort("it closed its communicator")
        Group.known.pop(self.key, None)
