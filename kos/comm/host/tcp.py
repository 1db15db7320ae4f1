"""The tcp transport: host memory over sockets, for jobs that no MPI started.

Between hosts a rank sends a description of its call to the others when it finds another call, or has waited for long.
"""

from __future__ import annotations

import json
import math
import select
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np

from kos.comm.contract import Backend, Probe, Request
from kos.comm.control.base import ControlPlane
from kos.comm.control.hub import is_cut_off
from kos.comm.failures import WHY_CLOSED
from kos.comm.host.tcp_messages import CALL, CLOSED_HERE, NO_CALL, REASON_LENGTH, Link, Peer, TCPMessage
from kos.comm.matching import Envelope, envelope
from kos.comm.operation import COLLECTIVE_TAGS
from kos.comm.prepared import described
from kos.comm.waits import wait
from kos.comm.work import Engine, Work
from kos.errors import KosError, to_record

Array = np.ndarray[Any, Any]

RECENT = 1024
"""Complete collectives whose descriptions a rank keeps."""
_DESCRIBE_SECONDS = 0.05  # seconds of waiting in a collective before a rank describes its call
_SLEEP_SECONDS = 0.05  # the longest poll: another thread may consume the awaited event, or end the operation
_CLOSE_SECONDS = 0.2  # limit for sending queued messages before connections are closed


class Poller:
    """All connections of this rank, over a communicator and its splits; a wait polls all of them."""

    def __init__(self) -> None:
        self.epoll, self._events = select.epoll(), 0
        self._ready: list[tuple[int, int]] = []  # what the last ``pause`` has found, which may be handled since
        # Weak: connections end with their communicator, and epoll removes closed sockets.
        self._links: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    def add(self, link: Any) -> None:
        """Poll the connection ``link.sock``: of a Link, or the Channel of a group."""
        self._links[link.sock.fileno()] = link
        self.epoll.register(link.sock, select.EPOLLIN)

    def want_write(self, link: Link, wanted: bool) -> None:
        self.epoll.modify(link.sock, select.EPOLLIN | (select.EPOLLOUT if wanted else 0))

    def remove(self, link: Any) -> None:
        del self._links[link.sock.fileno()]
        self.epoll.unregister(link.sock)

    def progress(self) -> None:
        """Read and write without waiting."""
        ready, self._ready = self._ready or self.epoll.poll(0), []
        for descriptor, _ in ready:
            self._events += 1
            if (link := self._links.get(descriptor)) is not None:
                link.progress(self)

    def mark(self) -> int:
        """See ``Backend.waiter``."""
        return self._events

    def pause(self, mark: int, seconds: float | None) -> None:
        """See ``Backend.waiter``.

        It returns at once if an event since ``mark`` was handled, as this may have completed a message after its
        operation was polled.  An event that was not handled keeps its socket ready.
        """
        if mark == self._events:
            self._ready = self.epoll.poll(_SLEEP_SECONDS if seconds is None else min(seconds, _SLEEP_SECONDS))


class TCPTransport(Backend):
    """A group whose ranks found each other over TCP, and the descriptions of its collectives by tag.

    ``poller`` polls the connections of this rank in all groups.  ``links`` has those of the group that was split, by
    rank of the world, which this one then shares.
    """

    name = "tcp"
    processes = True
    finds_any_tag = True

    def __init__(
        self, rendezvous: ControlPlane, engine: Engine, poller: Poller | None = None,
        links: Mapping[int, Link] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        super().__init__(rendezvous, engine)
        self.poller = poller or Poller()
        self.mismatched = False  # another rank's call differs from this one's; one of the two will report it
        self.calls: dict[int, tuple[int, bytes]] = {}  # this rank's calls by tag: fingerprint and description
        self._complete: deque[int] = deque()  # the tags of those that are complete
        self._described: dict[int, dict[int, tuple[int, bytes]]] = {}  # later calls of other ranks, by tag and rank
        self._group: Any = None  # as the flight recorder knows it
        self._rendezvous, self._links = rendezvous, links
        self.group = 0  # the number of this group in frames
        self.peers: dict[int, Peer] = {}  # empty if all ranks share memory

    @classmethod
    def probe(cls, rendezvous: ControlPlane) -> Probe:
        if rendezvous.connect is None:
            how = "start with torchrun, srun, or RANK, WORLD_SIZE, …"
            return Probe(False, f"the ranks did not connect over TCP ({how})")
        return Probe(True, "sockets between the ranks")

    def open(self, backend: Any) -> None:
        connect, channel = self._rendezvous.connect, self._rendezvous.channel
        if backend.one_host or connect is None or channel is None:
            return
        world, links, self._links = self.failures.world, self._links, {}
        if links:
            self.group = self._rendezvous.number
        else:
            links = {world[rank]: Link(connection.sock, self.poller) for rank, connection in connect().items()}
        self.peers = {rank: Peer(rank, self, links[world[rank]]) for rank in range(self.size) if rank != self.rank}
        self.poller.add(channel)
        self.failures.add_reporter(channel)
        self._rendezvous.barrier()  # all ranks are connected and know the number of the group, or none goes on

    def waiter(self) -> Any:
        return self.poller

    def successor(self, rendezvous: ControlPlane) -> Callable[[ControlPlane, Engine], Backend]:
        links = {self.failures.world[rank]: peer.link for rank, peer in self.peers.items()}
        is_split = rendezvous.epoch == self._rendezvous.epoch
        return partial(TCPTransport, poller=self.poller, links=links if is_split else {})

    def tag(self, sequence: int) -> int:
        return COLLECTIVE_TAGS + sequence  # needs no wrap-around, unlike MPI's tags

    def isend(self, array: Array, peer: int, tag: int) -> Request:
        end = self.peers[peer]
        if end.gone is not None or self.failures.earliest is not None or self.failures.left:
            end.check(tag)
        message = TCPMessage(end, tag, array)
        end.link.send(message)
        return message

    def irecv(self, array: Array, peer: int, tag: int) -> Request:
        message = TCPMessage(self.peers[peer], tag, array)
        message.peer.receive(message)
        return message

    def cancel(self, cancelled: Callable[[Any], bool]) -> None:
        for peer in self.peers.values():
            peer.cancel(cancelled)

    def awaited(self, tag: int) -> list[int]:
        awaited = (rank for rank, peer in self.peers.items() if peer.receives(tag) or peer.sends(tag))
        cut_off = [rank for rank, peer in self.peers.items() if peer.gone is None and is_cut_off(peer.link.sock)]
        lost = [rank for rank, peer in self.peers.items() if peer.is_lost]  # others may wait for them
        return self.failures.on_hosts_of(cut_off) if cut_off else lost or sorted(awaited)

    def in_flight(self, rank: int, tag: int, receives: bool) -> bool:
        return self.peers[rank].receives(tag) if receives else self.peers[rank].sends(tag)

    def arrived(self, ranks: Sequence[int], tag: int) -> Envelope | None:
        self.poller.progress()
        for rank in ranks:
            if (first := self.peers[rank].arrived(tag)) is not None:
                return envelope(rank, *first)
        return None

    def end_of(self, rank: int) -> KosError | None:
        try:
            self.peers[rank].check(0)
        except KosError as error:
            return error
        return None

    # Whether calls match.

    def agree(self, work: Work[Any], local: Callable[[], bool] | None) -> Callable[[], bool] | None:
        """Does not wait for other ranks.  A message or description of another call raises when it arrives."""
        tag, describe_at, waits = COLLECTIVE_TAGS + work.sequence, time.monotonic() + _DESCRIBE_SECONDS, False
        prepared, failures = work.prepared, self.failures
        self._group = prepared.description[0]
        self.calls[tag] = prepared.fingerprint, prepared.text
        for rank, call in self._described.pop(tag, {}).items() if self._described else ():
            self.compare(tag, rank, *call)

        def all_arrived() -> bool:
            nonlocal describe_at, waits
            if time.monotonic() > describe_at:
                describe_at = math.inf
                for rank in self.peers:
                    self.describe(rank, tag)
            if failures.earliest is not None:
                failures.raise_reported(work.sequence)
            if local is None:
                return True
            arrived = local()
            if waits or not arrived:
                self.poller.progress()  # a rank that waits for its own host also receives reports of other hosts
            waits = True
            return arrived

        return all_arrived

    def complete(self, work: Work[Any]) -> None:
        if self.failures.earliest is not None:  # the others may not have completed it
            self.failures.raise_reported(work.sequence)
        self._complete.append(COLLECTIVE_TAGS + work.sequence)
        if len(self._complete) > RECENT:
            del self.calls[self._complete.popleft()]

    def describe(self, rank: int, tag: int) -> None:
        """Send that rank the description of this rank's collective of that tag."""
        mark, text = self.calls.get(tag, NO_CALL)
        self.peers[rank].send_control(CALL, tag, text, mark)

    def compare(self, tag: int, rank: int, mark: int, text: bytes = b"") -> None:
        """Make all ranks raise if that rank's call differs from this rank's call of the same tag.

        Without ``text`` this rank sends its own description, and the other rank reports the mismatch.
        """
        mine, mine_text = self.calls.get(tag, NO_CALL)
        if mine == mark:
            return
        self.mismatched = self.mismatched or bool(mine)
        if mine and not text:
            self.describe(rank, tag)
        elif mine:
            sequence = tag - COLLECTIVE_TAGS
            calls = (self.rank, *described(mine_text, sequence)), (rank, *described(text, sequence))
            self.fail(tag, self.failures.mismatch(self._group.name if self._group else "", *calls))
        elif len(self._described) < RECENT:
            others = self._described.setdefault(tag, {})
            if text or rank not in others:
                others[rank] = mark, text

    # Failures.

    def fail(self, tag: int, failure: KosError) -> None:
        """Make all ranks raise the same error in that collective and later ones."""
        self.failures.record(tag - COLLECTIVE_TAGS, failure)
        if (channel := self._rendezvous.channel) is not None:
            channel.report_failure(failure, tag - COLLECTIVE_TAGS)

    def find_failure(self) -> KosError | None:
        """The first known failure of the group, or the loss of a rank that has not closed its communicator."""
        if self.engine.lock.acquire(blocking=False):  # else the program reads
            try:
                self.poller.progress()
            finally:
                self.engine.lock.release()
        if (failure := self.failures.earliest) is not None:
            return failure[1].copy()
        ended = (peer for peer in self.peers.values() if peer.gone not in (None, WHY_CLOSED, CLOSED_HERE))
        return None if (lost := next(ended, None)) is None else lost.loss()

    def report_end(self, sequence: int, reason: str, cause: KosError | None) -> None:
        self._disconnect(reason, cause)

    def abort(self, reason: str) -> str:
        return str(self.failures.first or reason) if self.peers else reason

    def close(self, begun: int) -> None:
        with self.engine.lock:
            self.poller.progress()  # reads the descriptions of ranks that wait in another call
        self._disconnect(WHY_CLOSED, self.failures.closing())
        if self.mismatched and self.failures.earliest is not None:  # of a call that was complete on this rank
            raise self.failures.earliest[1].copy()

    def _disconnect(self, why: str, cause: KosError | None) -> None:
        """Report why, and close all connections."""
        with self.engine.lock:  # the watchdog, or a thread that uses a group of this communicator, may read from these
            self._linger(lambda: not self.mismatched or self.failures.earliest is not None)
            data = json.dumps([why[:REASON_LENGTH], cause and to_record(cause, REASON_LENGTH)]).encode()
            for rank, peer in self.peers.items():
                if self._complete and why == WHY_CLOSED:  # a rank that waits in another call reports both
                    self.describe(rank, self._complete[-1])
                peer.send_close(data)
            self._linger(lambda: not any(peer.busy for peer in self.peers.values()))
            self.poller.progress()  # if data is unread, Linux closes by a reset, and discards what is not sent yet
            for peer in self.peers.values():
                peer.close()

    def _linger(self, over: Callable[[], bool]) -> None:
        def poll() -> bool:
            if over():
                return True
            self.poller.progress()
            return False

        wait(poll, time.monotonic() + _CLOSE_SECONDS)
