"""A group of ranks connected by TCP: its exchanges and notices through the hub, its splits and its changes."""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, Self

from kos.comm import timeouts
from kos.comm.control.base import ControlPlane, Location
from kos.comm.control.grow import GRACE_SECONDS, TCPChange, publish, to_text
from kos.comm.control.hub import (
    CLOSE,
    CLOSE_SECONDS,
    CONNECTION_CLOSED,
    DATA,
    DIED,
    FAILURES,
    LOST,
    PACKED,
    Hub,
    abort_message,
    look_beside_hub,
    pair,
    reporting,
    send,
    silent_ranks,
    stop,
)
from kos.comm.control.identity import hold, load_secret
from kos.comm.control.network import Network, connect_all, is_loopback, unreached
from kos.comm.control.newcomers import Address, Newcomers, place_name, send_message
from kos.comm.control.notices import Channel, Inbox
from kos.comm.control.threads import ThreadGroup
from kos.comm.control.wire import JOIN, Acceptor, Connection, HandshakeError, copied, drive
from kos.comm.failures import PendingRanks
from kos.comm.peer_status import PeerStatus
from kos.environment import KOS_HOST
from kos.errors import BackendUnavailable, KosError, RendezvousError, by_handler, from_record
from kos.files import allow_files, lack_of_files, lacks_files


class TCPControlPlane(ControlPlane):
    """A group whose ranks are connected to a hub on rank 0.  ``network`` says how ranks reach each other."""

    is_job = False  # whether it has all ranks of a job, which may call before rank 0 listens

    def __init__(self, rank: int, size: int, timeout: float, network: Network, local_rank: int | None) -> None:
        self.rank, self.size, self.timeout, self.network = rank, size, timeout, network
        self._given_local_rank, self._purpose, self.found_by = local_rank, b"", ""
        self.connection: Connection | None = None  # to the hub, while the group is open
        self._listener: socket.socket | None = None  # for connections of other ranks, and for shrink
        self._place: list[Any] = []  # where it listens, and this rank runs
        self._addresses: list[tuple[str, int]] = []  # of the listeners of all ranks
        self._hub: Hub | None = None  # on rank 0
        self.family = ""  # the same in all epochs of the group
        self.join_secret = b""  # newcomers must know it; empty: see ``load_secret``
        self.joining = Newcomers()
        self.silent = set[Address]()  # the members that did not call in an earlier change
        self.gone_newcomers = set[Address]()  # newcomers that were lost in an earlier change
        self.newer: tuple[int, list[Address]] | None = None  # a later epoch that this rank knows, and its members
        self.inbox, self._sending = Inbox(), threading.RLock()
        self.channel: Channel = Channel(self)
        self._receiving = threading.Lock()
        if size == 1:
            self.threads = ThreadGroup(1)
        else:
            allow_files()

    @property
    def epoch(self) -> int:
        return self.network.epoch

    @property
    def number(self) -> int:
        return int(self.family[:16], 16)

    def _exchange(self, message: bytes) -> list[bytes]:
        answer = self._request(DATA + message)
        parts, start = [], 4 * self.size
        for length in struct.unpack_from(f"!{self.size}I", answer):
            parts.append(answer[start : start + length])
            start += length
        return parts

    def _report(self, failure: KosError) -> None:
        self.post(abort_message("its exchange was interrupted", failure))

    def post(self, message: bytes) -> None:
        """Send a message to the hub, from any thread."""
        with self._sending:
            if (connection := self.connection) is not None:  # another thread may close the group
                self._whole(lambda: send(connection, message))

    def _whole(self, step: Callable[[], None]) -> None:
        """Use the connection to the hub.  If a signal's handler ends that half-way, the group is aborted."""
        try:
            step()
        except BaseException as error:
            if by_handler(error):
                self.failures.cut_short()
            raise

    def deaths(self) -> dict[int, str]:
        if (connection := self.connection) is not None:
            self._whole(lambda: self.inbox.poll(connection))
        return self.inbox.deaths.copy()  # another thread may read from the hub

    def send_notice(self, kind: str, what: Any, timeout: float = 0.0) -> list[int]:
        connection = self.connection
        sent = connection is None or self.channel.send("status", kind, what, wait=timeout > 0, timeout=timeout)
        if connection is None or sent or self.rank == 0:
            return []  # on rank 0, the hub is a thread of this process: it is busy, but no rank is silent
        return self.failures.in_world(silent_ranks(self.failures, connection.sock))

    def receive_notices(self, status: PeerStatus) -> None:
        world = self.failures.world
        with self._receiving:  # the inbox's lock is held while another thread waits in an exchange
            for rank, kind, what in self.channel.receive("status"):
                status.handle_notice(world[rank], kind, what)
            status.ends.update({world[rank]: why for rank, why in self.inbox.deaths.copy().items()})

    def split(self, color: int | None, key: int = 0) -> TCPControlPlane | None:
        ranks = self._alike(color, key)
        child = self._unjoined(ranks) if ranks else None
        several, nothing = child is not None and child.size > 1, bytes
        try:
            with self.reporting(KosError):
                hubs = self.together(child.open_hub if child is not None and several and child.rank == 0 else nothing)
                if child is not None and self.mpi is not None:
                    child.mpi = self.mpi.of(ranks)
                hub = json.loads(hubs[ranks[0]]) if several else ()
                self.together(partial(child.join_hub, *hub) if child is not None and several else nothing)
        except BaseException as error:
            if child is not None:
                if child.connection is not None:  # a rank that had the answer may wait there
                    child._cut_short(error)
                child._free(True, None)
            raise
        if child is not None and several:
            with child._closing():
                child._exchange_places()
        return None if child is None else hold(child, self)

    def connect(self) -> dict[int, Connection]:
        if self._listener is None:
            return {}
        purpose = self.allgather(os.urandom(16))[0]
        with self.waiting(), self._opening():
            return connect_all(self, self._addresses, self._listener, purpose)

    def look_for_failure(self) -> None:
        """Raise the failure of another rank if the hub reports one."""
        if self.deaths() or self.inbox.failure is not None:
            self.barrier()

    # Changes of the membership.

    def check_change(self, call: str) -> None:
        if self.connection is None if self.size > 1 else self.failures.over is not None:
            raise BackendUnavailable(f"{call}: expected a group that is open, got one that was closed")

    def change(
        self, call: str, newcomers: int | None = 0, whole: bool = False,
        terms: Mapping[str, Any] = MappingProxyType({}), began: float | None = None,
    ) -> TCPControlPlane:  # fmt: skip
        with self.waiting(), self._opening():
            return TCPChange(self, call, newcomers, whole, terms, began).run()

    def lose_newcomers(self, ranks: Sequence[int]) -> bool:
        members = [] if self.newer is None else self.newer[1]
        lost = {members[rank] for rank in ranks if rank < len(members)}.difference(self.members)
        self.gone_newcomers |= lost
        return 0 < len(lost) == len(ranks)

    @property
    def members(self) -> list[Address]:
        """The address at which each rank listens.  It is the same on all ranks."""
        if not self._addresses:  # a group of one
            self.network.secret = self.network.secret or os.urandom(32)
            self._listener = self.network.listen()
            self._addresses = [(self.network.host, self._listener.getsockname()[1])]
        return [(host or self.network.name or self.network.hub, port) for host, port in self._addresses]

    @property
    def address(self) -> str:
        return to_text(self.members)

    def newcomers(self) -> int:
        self.load_join_secret()
        for rank, connection, hello in self.callers(0.0):
            if rank == JOIN:
                self.joining.add(connection, hello, self.members[0] if self.rank else None)
            else:
                if tuple(hello["me"]) not in self.members:
                    send_message(connection, {"out": self.epoch})
                connection.close()  # a member calls again
        return self.joining.count(self.failures.names([0], False), self.members[0])

    def load_join_secret(self) -> None:
        """Load the secret that newcomers must know.  Raises RendezvousError if this process has none."""
        self.join_secret = self.join_secret or load_secret(os.environ)

    def callers(self, seconds: float) -> Iterator[tuple[int, Connection, dict[str, Any]]]:
        """Yields newcomers, with the rank JOIN, and members that call within ``seconds`` to change the membership.

        Without the secret of newcomers, only members can take part. A shrink needs no others.
        """
        members, door = self.members, self.joining.door
        if door is None:
            assert self._listener is not None and members
            key = self.network.key(b"change")
            door = self.joining.door = Acceptor(copied(self._listener), key, self.epoch, hello=True)
        if not door.join:
            with suppress(RendezvousError):
                self.load_join_secret()
                door.join = replace(self.network, secret=self.join_secret).key(b"join")
        while (caller := door.admit(seconds)) is not None:
            rank, hello, connection = caller
            yield rank, connection, hello
            seconds = 0.0

    def successor(
        self, plan: Mapping[str, Any], rank: int, connections: Mapping[int, Connection], hub: socket.socket | None
    ) -> TCPControlPlane:
        """The group of the members of ``plan``.  On its rank 0, ``hub`` is the listener of its hub."""
        members, mine = plan["members"], self.members
        network = replace(self.network, epoch=plan["epoch"], host=mine[self.rank][0])
        child = TCPControlPlane(rank, len(members), self.timeout, network, self._given_local_rank)
        child.family, child.join_secret, child.host = self.family, self.join_secret, self.host
        if plan["call"] == "shrink" and all(tuple(each) in mine for each in members):
            child._failures = self.failures.of([mine.index(tuple(each)) for each in members], rank)
        assert self._listener is not None
        child.enter(plan, self._listener, connections, hub)
        return hold(child, self)

    def enter(
        self, plan: Mapping[str, Any], listener: socket.socket, connections: Mapping[int, Connection],
        hub: socket.socket | None = None,
    ) -> None:  # fmt: skip
        """Begin the group of ``plan``.  ``connections`` lead from rank 0 to all others, or from another rank to it."""
        self.call, self._listener = plan["call"], copied(listener)
        self._addresses = [(host, port) for host, port in plan["members"]]
        for connection in connections.values():
            connection.epoch = self.epoch
        usual, self.timeout = self.timeout, plan["confirm"]
        try:
            if self.rank > 0:
                self.connection = connections[0]
            elif hub is not None:
                self._serve(hub, b"", "", True, connections)
            self._known_locations, self.timeout = self._locations, usual
        except BaseException as error:
            self.abort(None)
            if hub is not None and self._hub is None:
                hub.close()
            for connection in connections.values() if self._hub is None else ():
                connection.close()
            if isinstance(error, OSError) and lacks_files(error):
                raise self.unable(error) from error
            raise
        self.failures.status.connect(self)
        if self.rank == 0:
            publish(self)

    @classmethod
    def joined(cls, secret: bytes, connection: Connection, answer: Mapping[str, Any], listener: socket.socket) -> Self:
        """The group that a newcomer, which knows ``secret``, joins by the ``answer`` of its leader."""
        plan, rank = answer["plan"], answer["rank"]
        host, known = plan["members"][rank][0], connection.mask(bytes.fromhex(answer["secret"]), sent=False)
        network = Network(known, host, host, is_loopback(host), plan["epoch"], host)
        group = cls(rank, len(plan["members"]), plan["timeout"], network, None)
        group.family, group.join_secret, group.host = plan["family"], secret, KOS_HOST.get()
        group.enter(plan, listener, {0: connection})  # which copies the listener
        return group

    def listen(self) -> socket.socket:
        """A listener for the hub of another group."""
        try:
            return self.network.listen()
        except (OSError, RendezvousError) as error:
            raise self.unable(error) from error

    def _unjoined(self, ranks: list[int]) -> TCPControlPlane:
        """The group of these ranks, before this rank joins it."""
        rank = ranks.index(self.rank)
        child = TCPControlPlane(rank, len(ranks), self.timeout, self.network, self._given_local_rank)
        child._failures, child.host = self.failures.of(ranks, rank), self.host
        return child

    def unable(self, error: Exception) -> KosError:
        """The error of this rank, which cannot open its connections."""
        why = lack_of_files(error) if isinstance(error, OSError) and lacks_files(error) else error
        me = self.failures.world[self.rank]
        return RendezvousError(f"rendezvous: rank {me} cannot open its connections: {why}", ranks=[me])

    @contextmanager
    def _opening(self) -> Iterator[None]:
        """A context in which this rank opens connections: an OSError becomes that of ``unable``."""
        try:
            yield
        except OSError as error:
            if isinstance(error, KosError):  # as a CollectiveTimeout is both
                raise
            raise self.unable(error) from error

    @contextmanager
    def _closing(self) -> Iterator[None]:
        """A context whose exceptions close this group, and are raised on the other ranks."""
        try:
            yield
        except BaseException as error:
            if self.connection is not None:
                if self.failures.over is None:  # else the others know
                    self._cut_short(error)
                self.close()
            raise

    def open_hub(self) -> bytes:
        """Run the hub of this group, which no rank has joined yet, with all files that it needs.

        Returns the arguments of ``join_hub``, as JSON.
        """
        listener, purpose = self.listen(), os.urandom(16).hex()
        port = listener.getsockname()[1]
        where = place_name(self.network.host or self.network.hub, port) if self.network.loopback else f"port {port}"
        try:
            with self._opening():
                self._serve(listener, self.network.key(purpose.encode()), where, True)
        except BaseException:
            listener.close()
            raise
        return json.dumps([self.network.host, [port], purpose]).encode()

    def join_hub(self, host: str, ports: Sequence[int], purpose: str) -> bytes:
        """Connect to the hub, unless this rank runs it, and listen for other ranks."""
        self._purpose, self.family = purpose.encode(errors="surrogateescape"), purpose
        with self._opening():
            if self._hub is None:
                with self.waiting():
                    self.connection = self._call_hub(host, ports, self._purpose)
            self._listener = self.network.listen()
            self._place = [self.network.host, self._listener.getsockname()[1], *self._own_location()]
        return b""

    def join(self, ports: Sequence[int], purpose: bytes, listener: socket.socket | None) -> None:
        """Join the group of a job; with ``listener``, this rank runs the hub."""
        with self._closing():
            if listener is not None:
                port = listener.getsockname()[1]
                where = place_name(self.network.hub, port)
                if not self.network.loopback:
                    where = f"port {port}, which others find by {self.found_by or 'the address they know'}"
                with self._opening():  # at several ports, other jobs call
                    self._serve(listener, self.network.key(purpose), where, len(ports) == 1)
            self.join_hub("", ports, purpose.decode(errors="surrogateescape"))
            self._exchange_places()

    def _exchange_places(self) -> None:
        """Exchange the addresses at which the ranks listen, and where they run."""
        everyone = [json.loads(each) for each in self.allgather(json.dumps(self._place).encode())]
        self._addresses = [(host, port) for host, port, *_ in everyone]
        self._known_locations = [Location(*place) for _, _, *place in everyone]

    def _serve(
        self, listener: socket.socket, key: bytes, where: str, warns: bool,
        connected: Mapping[int, Connection] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        """Run the hub, to which the other ranks are ``connected``, or connect at ``listener``."""
        connection, hubs_end = pair(self.epoch)
        known = self.failures.of(range(self.size), 0)  # without reporters, which hold communicators
        try:
            hub = Hub(hubs_end, listener, key, known, self.timeout, where, warns, self.epoch, connected)
            hub.start()
        except BaseException:
            connection.close()
            hubs_end.close()
            raise
        # At the end of the process, the hub still sends the last answers if the group was not closed.
        self._stop_hub = weakref.finalize(self, stop, connection, hub, os.getpid())
        self.connection, self._hub = connection, hub

    def _call_hub(self, host: str, ports: Sequence[int], purpose: bytes) -> Connection:
        """Call at each port until the hub of this group answers."""
        deadline, greeting_seconds, pause = time.monotonic() + self.timeout, 1.0, 0.02
        while True:
            for port in ports:
                try:
                    found = self.network.call(host, port, purpose, self.rank, self.size, deadline, greeting_seconds)
                except (OSError, HandshakeError) as error:
                    if lacks_files(error):
                        raise
                    problem = f"{place_name(host or self.network.hub, port)}: {error}"
                    if isinstance(error, ConnectionRefusedError) and not self.is_job:  # it listened before
                        raise unreached(self.failures, 0, error) from error
                    if isinstance(error, HandshakeError) and len(ports) == 1:
                        raise RendezvousError(f"rendezvous: rank {self.rank}: {problem}") from error
                    continue
                if self.is_job and not self.network.loopback and not self.network.host:
                    mine = found.sock.getsockname()[0].removeprefix("::ffff:")  # of an IPv4 address at an IPv6 socket
                    self.network.host = "" if is_loopback(mine) else mine
                return found
            if time.monotonic() >= deadline:
                me, hub = (self.failures.names([rank], False) for rank in (self.rank, 0))
                silent = timeouts.unreached(me, hub, self.timeout, problem)
                raise self.failures.timeout_error(PendingRanks([0], silent), "rendezvous", None, RendezvousError)
            time.sleep(pause)
            greeting_seconds, pause = 2 * greeting_seconds, min(2 * pause, 0.5)

    @property
    def mpi_comm(self) -> Any:
        return None if self.mpi is None else self.mpi.comm(self, self._purpose)

    def _free(self, orderly: bool, code: int | None) -> None:
        if self.mpi is not None:
            self.mpi.free(orderly, code)
        connection, self.connection, self.inbox.closed = self.connection, None, True
        if self._listener is not None:
            self._listener.close()
        self.joining.close()
        if connection is None:
            return
        last = None if orderly else self.failures.closing()
        why = "it closed the group" if code is None else "it aborted the group"
        with self._sending:
            send(connection, CLOSE if code is None and last is None else abort_message(why, last))
        connection.close()
        if self._hub is None:
            return
        if orderly or not self._addresses:  # ranks that join late still get the reason of the abort
            self._stop_hub()
        else:
            self._stop_hub.detach()
            reporting.add(self._hub)
            self._hub.reported.wait(CLOSE_SECONDS)

    def _request(self, message: bytes) -> bytes:
        """The hub's answer to the messages of all ranks."""
        connection, deadline = self.connection, time.monotonic() + self.timeout + GRACE_SECONDS
        if connection is None:
            raise self._closed_by_another_thread()
        if self._hub is not None:
            self._hub.timeout = self.timeout  # the program may have changed it
        look = self.look_while_hub_answers(time.monotonic() + self.timeout)
        with self.waiting(), self.inbox.lock:
            try:
                # The hub may have reported a failure before it closed.
                with suppress(ConnectionError), self._sending:
                    connection.post(message)
                    drive(connection.flush(), connection.sock, deadline)
                self.inbox.exchanging = True
                try:
                    answer = drive(self.inbox.answer(connection), connection.sock, deadline, look)
                finally:
                    self.inbox.exchanging = False
            except TimeoutError as error:
                silent = silent_ranks(self.failures, connection.sock)
                raise self.absent(silent, "rendezvous", timeouts.REPLY, several=False) from error
            except (OSError, ValueError) as error:
                if self.connection is None or isinstance(error, ValueError):  # it has no descriptor any more
                    raise self._closed_by_another_thread() from error
                look_beside_hub(self.failures, self.members if self._addresses else ())
                raise self.failures.lost(0, CONNECTION_CLOSED, "rendezvous") from error
            kind, answer = answer[:1], answer[1:]
            if kind in FAILURES:
                raise self._failure_of(kind, *json.loads(answer))
            return zlib.decompress(answer) if kind == PACKED else answer

    def _closed_by_another_thread(self) -> KosError:
        return RendezvousError(f"rendezvous: {self.call}: another thread of rank {self.rank} has closed the group")

    def _failure_of(self, kind: bytes, ranks: list[int], why: str, cause: list[Any] | None) -> KosError:
        """The failure that the hub reports."""
        if kind in (LOST, DIED):
            return self.failures.lost(ranks[0], why, "rendezvous", None if cause is None else from_record(cause))
        if not ranks:
            return RendezvousError(why)
        names = (named := self.failures.names(ranks)) + f" of {self.size}" * named.endswith("]")
        pending = PendingRanks(ranks, f"{names} {why}", absent=True)
        return self.failures.timeout_error(pending, "rendezvous", None, RendezvousError)

    @property
    def local_rank(self) -> int:
        local_rank = super().local_rank  # called on every rank, because it is collective
        return local_rank if self._given_local_rank is None or self.pretended_host else self._given_local_rank

    @property
    def place_on_machine(self) -> int:
        return super().place_on_machine if self._given_local_rank is None else self._given_local_rank
