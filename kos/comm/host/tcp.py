"""The tcp backend: host memory over sockets, for jobs that no MPI started.

Operations that do not use shared memory run as schedules over ``tcp_messages``.  Between hosts a rank sends a
description of its call to the others when it finds another call, or has waited for long.
"""

from __future__ import annotations

import json
import math
import select
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from kos.comm.backend import Probe
from kos.comm.failures import again
from kos.comm.host.backend import HostBackend, at_exit
from kos.comm.host.fingerprints import Fingerprints, described
from kos.comm.host.tcp_messages import ABORT, CALL, CLOSE, FAILED, REASON_LENGTH, Peer, to_bytes
from kos.comm.operation import COLLECTIVE_TAGS, Call
from kos.comm.rendezvous.base import Rendezvous
from kos.comm.schedules.execute import Request
from kos.comm.work import Engine, Idle
from kos.errors import KosError

Array = np.ndarray[Any, Any]

_RECENT = 1024  # collectives whose descriptions a rank keeps
_DESCRIBE_SECONDS = 0.05  # seconds of waiting in a collective before a rank describes its call
_SLEEP_SECONDS = 0.05  # the longest poll: another thread may have consumed the awaited event
_CLOSE_SECONDS = 0.2  # limit for sending queued messages before connections are closed


class TCPBackend(HostBackend):
    """Serves a group whose ranks found each other over TCP."""

    name = "tcp"

    def __init__(self, rendezvous: Rendezvous, engine: Engine | None = None, poller: Poller | None = None) -> None:
        self._poller = poller or Poller()
        mesh = Mesh(rendezvous, self._poller)
        super().__init__(rendezvous, engine)
        self._mesh = self.transport = mesh
        self._fingerprints = self._calls or Fingerprints()
        at_exit(self)

    @classmethod
    def probe(cls, rendezvous: Rendezvous) -> Probe:
        if rendezvous.connect is None:
            how = "start with torchrun, srun, or RANK, WORLD_SIZE, …"
            return Probe(False, f"the ranks did not connect over TCP ({how})")
        return Probe(True, "sockets between the ranks")

    def idle(self) -> Idle:
        return super().idle() if self.shares_memory else self._poller

    def split(self, rendezvous: Rendezvous | None, color: int | None = None, key: int = 0) -> TCPBackend | None:
        return None if rendezvous is None else TCPBackend(rendezvous, self.engine, self._poller)

    def close(self) -> None:
        super().close()
        self._poller.progress()  # reads the descriptions of ranks that wait in another call
        self._mesh.close(CLOSE, "it closed its communicator", self.ledger.closing())
        if self._mesh.mismatched and self.ledger.failure is not None:  # of a call that was complete on this rank
            raise again(self.ledger.failure[1])

    def report_end(self, reason: str) -> None:
        super().report_end(reason)
        self._mesh.close(CLOSE, reason, self.cause())

    def abort(self, reason: str) -> None:
        self._mesh.close(ABORT, str(self.broken or reason), self.cause())
        super().abort(reason)

    def _tag(self, call: Call) -> int:
        return COLLECTIVE_TAGS + call.sequence  # needs no wrap-around, unlike MPI's tags

    def agree(self, call: Call) -> Callable[[], bool] | None:
        """Between hosts ranks do not wait to agree: messages and descriptions of another call raise."""
        local_poll, mesh = super().agree(call), self._mesh
        if self.one_host:
            return local_poll
        tag, describe_at = self._tag(call), time.monotonic() + _DESCRIBE_SECONDS
        mesh.begin(call, tag, self._fingerprints)

        def all_arrived() -> bool:
            nonlocal describe_at
            if time.monotonic() > describe_at:
                describe_at = math.inf
                for rank in mesh.peers:
                    mesh.describe(rank, tag)
            if mesh.ledger.failure is not None:
                mesh.ledger.check(call.sequence)
            return local_poll is None or local_poll()

        return all_arrived

    def awaited(self, call: Call) -> list[int]:
        tag = self._tag(call)
        return sorted(rank for rank, peer in self._mesh.peers.items() if peer.awaits(tag))

    def in_flight(self, rank: int, tag: int, receives: bool) -> bool:
        return self._mesh.peers[rank].in_flight(tag, receives)

    def report_failure(self, failure: KosError, sequence: int) -> None:
        self._mesh.fail(COLLECTIVE_TAGS + sequence, failure)


class Poller:
    """All connections of this rank, over a communicator and its splits; a wait polls all of them."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        # Weak: connections end with their communicator, and epoll removes closed sockets.
        self._peers: weakref.WeakValueDictionary[int, Peer] = weakref.WeakValueDictionary()

    def add(self, peer: Peer) -> None:
        self._peers[peer.sock.fileno()] = peer
        self._epoll.register(peer.sock, select.EPOLLIN)

    def want_write(self, peer: Peer, wanted: bool) -> None:
        self._epoll.modify(peer.sock, select.EPOLLIN | (select.EPOLLOUT if wanted else 0))

    def remove(self, peer: Peer) -> None:
        del self._peers[peer.sock.fileno()]
        self._epoll.unregister(peer.sock)

    def progress(self) -> None:
        """Read and write without waiting."""
        for descriptor, _ in self._epoll.poll(0):
            if (peer := self._peers.get(descriptor)) is not None:
                peer.progress()

    def mark(self) -> int:
        return 0

    def pause(self, mark: int = 0, seconds: float | None = None) -> None:
        # Level-triggered: sockets stay ready until they are read, so no event since ``mark`` is missed.
        self._epoll.poll(_SLEEP_SECONDS if seconds is None else min(seconds, _SLEEP_SECONDS))


class Mesh:
    """The transport: the connections of one group, and the descriptions of its collectives by tag."""

    def __init__(self, rendezvous: Rendezvous, poller: Poller) -> None:
        self.rank, self.poller, self.ledger = rendezvous.rank, poller, rendezvous.ledger
        self.lost: Peer | None = None  # the first rank lost without CLOSE
        self.mismatched = False  # another rank's call differs from this one's; one of the two will report it
        self._calls: dict[int, tuple[int, bytes]] = {}  # this rank's calls by tag: fingerprint and description
        self._described: dict[int, dict[int, tuple[int, bytes]]] = {}  # later calls of other ranks, by tag and rank
        self._group = ""
        assert rendezvous.connect is not None
        self.peers = {rank: Peer(rank, self, connection.sock) for rank, connection in rendezvous.connect().items()}
        for peer in self.peers.values():
            poller.add(peer)

    def isend(self, array: Array, peer: int, tag: int) -> Request:
        return self.peers[peer].send(array, tag)

    def irecv(self, array: Array, peer: int, tag: int) -> Request:
        return self.peers[peer].receive(array, tag)

    def cancel(self, cancelled: Callable[[Any], bool]) -> None:
        for peer in self.peers.values():
            peer.cancel(cancelled)

    def begin(self, o: Call, tag: int, fingerprints: Fingerprints) -> None:
        """Compare ``o`` with the other ranks' collectives of that tag."""
        mark, self._group = fingerprints.mark(o), o.group
        self._calls[tag] = mark, fingerprints.texts[mark]
        self._calls.pop(tag - _RECENT, None)
        for rank, call in self._described.pop(tag, {}).items():
            self.compare(tag, rank, *call)

    def called(self, tag: int) -> tuple[int, bytes]:
        """Fingerprint and description of this rank's collective of that tag."""
        return self._calls.get(tag, (0, b""))

    def describe(self, rank: int, tag: int) -> None:
        """Send that rank the description of this rank's collective of that tag."""
        mark, text = self.called(tag)
        self.peers[rank].send_control(CALL, tag, text, mark)

    def compare(self, tag: int, rank: int, mark: int, text: bytes = b"") -> None:
        """Make all ranks raise if that rank's call differs from this rank's call of the same tag.

        Without ``text`` this rank sends its own description, and the other rank reports the mismatch.
        """
        mine, mine_text = self.called(tag)
        if mine == mark:
            return
        self.mismatched = self.mismatched or bool(mine)
        if mine and not text:
            self.describe(rank, tag)
        elif mine:
            sequence = tag - COLLECTIVE_TAGS
            calls = (self.rank, *described(mine_text, sequence)), (rank, *described(text, sequence))
            self.fail(tag, self.ledger.mismatch(self._group, *calls))
        elif len(self._described) < _RECENT:
            others = self._described.setdefault(tag, {})
            if text or rank not in others:
                others[rank] = mark, text

    def fail(self, tag: int, failure: KosError) -> None:
        """Make all ranks raise the same error in that collective and later ones."""
        self.ledger.record(tag - COLLECTIVE_TAGS, failure)
        data = to_bytes(failure)
        for peer in self.peers.values():
            peer.send_control(FAILED, tag, data)

    def close(self, kind: int, why: str, cause: KosError | None) -> None:
        """Report why, and close all connections."""
        self._linger(lambda: self.mismatched and self.ledger.failure is None)
        if (failure := self.ledger.failure) is not None:  # perhaps only this rank has received it
            self.fail(COLLECTIVE_TAGS + failure[0], failure[1])
        data = json.dumps([why[:REASON_LENGTH], None if cause is None else json.loads(to_bytes(cause))]).encode()
        for peer in self.peers.values():
            peer.send_control(kind, 0, data)
        self._linger(lambda: any(peer.busy for peer in self.peers.values()))
        for peer in self.peers.values():
            peer.close()

    def _linger(self, needed: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _CLOSE_SECONDS
        while needed() and time.monotonic() < deadline:
            self.poller.pause(seconds=0.001)
            self.poller.progress()
