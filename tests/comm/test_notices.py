"""An MPI communicator that groups and threads share: notices over it, and who frees it.  Stand-ins take its place."""

from __future__ import annotations

import json
import threading
from types import SimpleNamespace
from typing import Any
from weakref import WeakValueDictionary

from kos.comm.rendezvous.mpi import MPIGroup, SharedComm
from kos.comm.rendezvous.notices import MPINotices

WAIT = 20.0  # seconds


class Message:
    """One that was matched: whoever receives it has it."""

    def __init__(self, data: bytes, wait: threading.Event | None) -> None:
        self.data, self.wait = data, wait

    def Recv(self, buffer: list[Any]) -> None:
        if self.wait is not None:
            assert self.wait.wait(WAIT)
        buffer[0][:] = self.data


class Arrived:
    """The communicator, of messages to group "b" that have arrived; the first takes long to receive."""

    def __init__(self) -> None:
        self.first, self.probed = threading.Event(), threading.Event()
        data = [json.dumps(["b", [number]]).encode() for number in range(3)]
        self.messages = [Message(each, None if number else self.first) for number, each in enumerate(data)]

    def Improbe(self, status: Any) -> Message | None:
        if not self.messages:
            return None
        message = self.messages.pop(0)
        status.count = len(message.data)
        self.probed.set()
        return message


def test_notices_of_a_rank_keep_their_order_where_threads_read_for_two_groups() -> None:
    class Status:
        def Get_count(self) -> int:
            return int(self.count)

    MPI = SimpleNamespace(Status=Status, Exception=OSError, Is_finalized=lambda: False, BYTE=None)
    comm, readers = Arrived(), WeakValueDictionary[str, MPINotices]()
    a, b = (MPINotices(MPI, comm, readers, name, [1]) for name in "ab")
    got: list[Any] = []
    threads = [threading.Thread(target=a.receive), threading.Thread(target=lambda: got.extend(b.receive()))]
    threads[0].start()
    assert comm.probed.wait(WAIT)
    threads[1].start()
    threads[1].join(0.2)  # long enough to read the others, if it may
    comm.first.set()
    for thread in threads:
        thread.join(WAIT)
    assert [*got, *b.receive()] == [[0], [1], [2]]


def test_two_threads_close_the_last_two_groups() -> None:
    """One of them frees the communicator that the groups share."""
    freed, both = [], threading.Barrier(2)
    shared: Any = SharedComm.__new__(SharedComm)
    shared.comm = SimpleNamespace(Free=lambda: freed.append(threading.get_ident()))
    shared.lock, shared.users, shared.orderly, shared.open = threading.Lock(), 2, True, {}
    groups = [MPIGroup.__new__(MPIGroup) for _ in range(2)]
    for tag, group in enumerate(groups):
        group.shared, group._own, group._tag = shared, None, tag
        group._MPI = SimpleNamespace(Is_finalized=lambda: both.wait(WAIT) < 0)  # once both have left
    threads = [threading.Thread(target=group._free, args=(True, None)) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(freed) == 1
