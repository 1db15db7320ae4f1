"""Changes of the membership of a group: ``shrink``, ``grow`` and ``replace`` all use the protocol in this file.

A *view* is what a rank knows of the membership: the epoch, and the address at which each member listens.

1. The lowest live rank leads.  The other members connect to its listener, and send their call and their view.  The
   newest view counts, and a member that is not in it is out.
2. The leader waits for all live members.  It admits newcomers until the requested number has come.
3. The leader sends the new view on these connections.  From then on, they belong to the hub of the new group.
4. All ranks exchange their places through that hub.  A rank that receives the answer knows that every rank has the new
   view.  If the exchange fails, the members begin again, from the new view.  A rank that received the answer may find
   later that a rank is lost.  It then begins again too, so all continue with the same members.

If the leader dies, its connections end, and the next live rank leads.  A stopped rank is left out after the timeout, or
after half of it if the failure names this rank.  When a stopped rank wakes up, the others have a newer view or do not
answer.  So it never continues alone.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from kos.comm import timeouts
from kos.comm.control.newcomers import Address, Newcomer, place_name, send_message
from kos.comm.control.wire import (
    JOIN,
    Connection,
    HandshakeError,
    authenticate,
    connect,
    drive,
    epoch_of,
    receive_greeting,
)
from kos.environment import KOS_JOIN
from kos.errors import CollectiveError, CollectiveMismatch, KosError, RankLost, RendezvousError, from_record, to_record
from kos.files import lacks_files, replace_file

log = logging.getLogger(__name__)
CALL_SECONDS = 2.0  # limit for a live host to answer
GRACE_SECONDS = 2.0  # added to the timeout, so that the leader can report missing ranks
CONFIRM_SECONDS = 5.0  # limit for the exchange that confirms a view; all ranks have just answered
_LEAST_SECONDS = 1.0  # limit for an attempt that begins at the end of the timeout
POLL_SECONDS = 0.05
_BEAT_SECONDS = 0.5  # between two heartbeats of a leader
_SHOWN = 8  # addresses that ``address`` offers to newcomers


class Change:
    """One change of the membership of ``group``, on one of its ranks.

    ``call`` is the program's call, which must be the same on all members.  ``newcomers`` is the number of ranks that
    join; None means as many as were lost.  With ``whole``, no member may be lost.  ``terms`` is sent to newcomers.
    ``began`` is the time at which an earlier attempt of the same call began, if there was one.

    A call has one deadline: its rank's start of the call plus the timeout.  The leader uses the earliest deadline of
    all members that have called.  It waits for members that the failure blames for half of the time only, and leaves
    the other half to the rest of the protocol.
    """

    def __init__(
        self, group: Any, call: str, newcomers: int | None, whole: bool, terms: Mapping[str, Any], began: float | None
    ) -> None:
        self.group, self.call, self.newcomers, self.whole, self.terms = group, call, newcomers, whole, dict(terms)
        self.me = group.members[group.rank]
        self.epoch: int
        self.members: list[Address]
        self.epoch, self.members = group.newer or (group.epoch, group.members)
        self.came: dict[Address, Connection] = {}  # members that have called this leader
        self._refused_before = len(group.joining.refused)
        self._probes: dict[Address, socket.socket] = {}
        self._hub: socket.socket | None = None  # on the new rank 0: the listener of the new hub
        failures = group.failures.first, group.failures.status.last
        blamed = {rank for failure in failures if failure is not None for rank in (*failure.ranks, *failure.unasked)}
        self.blamed = group.silent | self._addresses(blamed)
        stopped = {each for each in self.blamed if self._stopped(each)}
        self.left_out = stopped | group.gone_newcomers
        self.began = time.monotonic() if began is None else began
        self.deadline = self.until = self.began + group.timeout
        self.over = False  # whether the time for newcomers, ``until``, is over
        if began is not None:
            self._extend()

    def run(self) -> Any:
        """Make the change.  Returns the new group, whose ranks have exchanged their places."""
        group = self.group
        while True:
            try:
                leader = self._leader()
                rank, plan, connections = self._lead() if leader is None else self._follow(*leader)
            except RendezvousError as error:
                group.silent |= self._addresses(error.ranks)
                raise
            except ConnectionError:  # the leader has ended, or is not ready
                time.sleep(POLL_SECONDS / 2)
                if time.monotonic() > self.deadline:
                    raise self._late([each for each in self.members if each != self.me]) from None
                continue
            finally:
                self._forget_probes()
            self.epoch, self.members = group.newer = plan["epoch"], _addresses(plan["members"])
            try:
                return group.successor(plan, rank, connections, self._hub)
            except (CollectiveError, RendezvousError) as error:
                if group.lose_newcomers(error.ranks):
                    self.left_out |= group.gone_newcomers
                    self._extend()
                elif time.monotonic() > self.deadline:
                    raise

    def _extend(self) -> None:
        """Give the members time to call again, for another attempt or to learn that the time is over."""
        now = time.monotonic()
        self.over = now > self.until
        self.deadline = max(self.deadline, now + GRACE_SECONDS)

    def _leader(self) -> tuple[Address, socket.socket] | None:
        """The lowest live rank and a connection to it; None if it is this rank."""
        for address in self.members:
            if address == self.me:
                return None
            skipped = address in self.left_out | self.group.silent
            if not skipped and (sock := self._reach(address)) is not None:
                return address, sock
        raise self._out(self.epoch)

    def _reach(self, address: Address) -> socket.socket | None:
        """A connection to a member; None if it cannot be reached.  A lack of files here says nothing of the member."""
        try:
            return connect(*address, time.monotonic() + CALL_SECONDS)
        except OSError as error:
            if lacks_files(error):
                raise self.group.unable(error) from error
            return None

    # On members that do not lead.

    def _follow(self, leader: Address, sock: socket.socket) -> tuple[int, dict[str, Any], dict[int, Connection]]:
        group, answer = self.group, dict[str, Any]()
        hello = {
            "family": group.family, "call": self.call, "view": [self.epoch, self.members], "me": self.me,
            "left out": sorted(self.left_out),
        }  # fmt: skip
        blamed = not self.whole and (leader in self.blamed or self._stopped(leader))
        until = (time.monotonic() + self.deadline) / 2 if blamed else self.deadline
        try:
            greeting = drive(receive_greeting(sock), sock, until)
            key = group.network.key(b"change")
            connection = drive(authenticate(sock, greeting, key, group.rank, group.size, None), sock, until)
            connection.post(json.dumps({**hello, "seconds": self.deadline - time.monotonic()}).encode())
            drive(connection.flush(), sock, until)
            while "plan" not in answer:
                until = max(self.deadline, time.monotonic()) + GRACE_SECONDS  # for the report of the leader
                answer = json.loads(drive(connection.receive(), sock, until))
                if "out" in answer:
                    raise self._out(answer["out"])
                if "error" in answer:
                    raise from_record(answer["error"])
                if "leads" in answer:
                    self._follow_again(as_address(answer["leads"]))
        except HandshakeError as error:  # the listener still waits for data connections
            sock.close()
            raise ConnectionError from error
        except TimeoutError as error:
            sock.close()
            if blamed or (not self.whole and self._stopped(leader)):
                self.left_out.add(leader)
                group.silent.add(leader)
                raise ConnectionError from error
            raise self._late([leader]) from None
        except BaseException:
            sock.close()
            raise
        return answer["rank"], answer["plan"], {0: connection}

    # On the leader.

    def _lead(self) -> tuple[int, dict[str, Any], dict[int, Connection]]:
        group = self.group
        publish(group)
        beat = 0.0
        try:
            while (missing := self._missing()) or not self._complete():
                now = time.monotonic()
                if now > beat:  # a heartbeat: the others wait as long as this rank leads
                    self._post({})
                    beat = now + _BEAT_SECONDS
                known = missing and not self.whole and self.blamed.issuperset(missing)
                if now <= (min(self.began + group.timeout / 2, self.deadline) if known else self.deadline):
                    self._admit()
                elif missing:
                    self._leave_out(missing)
                else:
                    raise self._too_few()
            self._hub = group.listen() if self.came or self._wanted() else None  # an error goes to all members
            return self._send_plan(group.joining.take(self._wanted()))
        except ConnectionError:
            self._close_all()
            raise
        except BaseException as error:
            by = f"on {group.failures.names([group.rank], False)} by {type(error).__name__}"
            failure = error if isinstance(error, KosError) else RendezvousError(f"{self.call} was interrupted {by}")
            self._post({"error": to_record(failure)})
            self._close_all()
            raise

    def _missing(self) -> list[Address]:
        """The live members that have not called this leader."""
        for address in [each for each, connection in self.came.items() if connection.drain()]:
            self.came.pop(address).close()
        others = [each for each in self.members if each != self.me and each not in self.came]
        missing = [each for each in others if each not in self.left_out and self._lives(each)]
        gone = {*others}.difference(missing).intersection(self.group.members)
        if self.whole and gone and not missing:  # raised now, so that all live members get this error
            rank = min(map(self.group.members.index, gone))
            raise self.group.failures.lost(rank, "its process ended", self.call)
        return missing

    def _wanted(self) -> int:
        """The number of newcomers that join."""
        if self.newcomers is not None:
            return self.newcomers
        return sum(each not in self.came and each != self.me for each in self.group.members)

    def _lives(self, address: Address) -> bool:
        """Whether the member still listens.  A connection to it ends when its process ends."""
        greeting, sock = b"", self._probes.get(address)
        try:
            if sock is not None and not (greeting := sock.recv(64)):
                raise ConnectionError
        except BlockingIOError:
            return True
        except OSError:
            self._probes.pop(address).close()
            sock = None
        if greeting and (epoch := epoch_of(greeting)) > self.epoch:
            raise self._out(epoch)
        if greeting and self.members.index(address) < self.members.index(self.me):
            self._give_way(address)
        if sock is None:
            if (sock := self._reach(address)) is None:
                return False
            self._probes[address] = sock
        return True

    def _give_way(self, leader: Address) -> NoReturn:
        """Follow a lower rank: it did not call before, but is alive now, and so it leads."""
        self._post({"leads": leader})
        self._follow_again(leader)

    def _follow_again(self, leader: Address) -> NoReturn:
        self.group.silent.discard(leader)
        self.left_out.discard(leader)
        raise ConnectionError

    def _forget_probes(self) -> None:
        while self._probes:
            self._probes.popitem()[1].close()

    def _admit(self) -> None:
        """Admit callers for ``POLL_SECONDS``."""
        group = self.group
        for rank, connection, hello in group.callers(POLL_SECONDS):
            if rank == JOIN:
                group.joining.add(connection, hello, None)
            elif hello["family"] != group.family:
                connection.close()
            else:
                self._admit_member(connection, hello)

    def _complete(self) -> bool:
        """Whether enough newcomers have come and are ready.  Refuses newcomers that do not fit."""
        joining = self.group.joining
        if self._wanted():
            self.group.load_join_secret()  # all members have called by now, so all get its error
        if self.over and self._wanted():
            raise self._too_few()
        for newcomer in joining:
            if problem := misfit(newcomer.hello, self.terms):
                joining.refuse(newcomer, problem)
        return bool(joining.ready(self._wanted()))

    def _admit_member(self, connection: Connection, hello: Mapping[str, Any]) -> None:
        epoch, members = hello["view"]
        address = as_address(hello["me"])
        if epoch > self.epoch:
            self.epoch, self.members = self.group.newer = epoch, _addresses(members)
        if self.me not in self.members:
            raise self._out(self.epoch)
        if address not in self.members:
            send_message(connection, {"out": self.epoch})
            return connection.close()
        if hello["call"] != self.call:
            me, other = (self._names([each]) for each in (self.me, address))
            text, got = f"{me} called {self.call} but {other} called {hello['call']}", hello["call"]
            error = CollectiveMismatch(text, ranks=self._ranks(self.me, address), expected=self.call, got=got)
            send_message(connection, {"error": to_record(error)})
            raise error
        self.came[address] = connection
        self.deadline = min(self.deadline, time.monotonic() + hello["seconds"])
        self.until = min(self.until, self.deadline)
        self.left_out.discard(address)
        self.left_out |= {each for each in _addresses(hello["left out"]) if each not in (self.me, *self.came)}

    def _leave_out(self, missing: Sequence[Address]) -> None:
        """Leave out the missing ranks if each is stopped or blamed for the failure; raise if another one is missing."""
        if self.whole or (others := [each for each in missing if each not in self.blamed and not self._stopped(each)]):
            raise self._late(missing if self.whole else others)
        self.left_out.update(missing)

    def _send_plan(self, joining: Sequence[Newcomer]) -> tuple[int, Any, Any]:
        """Send the new view to all ranks.  They accept no other view from this leader."""
        group = self.group
        survivors = [each for each in self.members if each == self.me or each in self.came]
        members = [*survivors, *(as_address(each.hello["me"]) for each in joining)]
        connections = dict(enumerate([each.connection for each in joining], len(survivors)))
        plan = {"epoch": self.epoch + 1, "members": members, "family": group.family, "call": self.call}
        limit = attempt_seconds(self.until - time.monotonic()) if joining else group.timeout
        plan |= {"timeout": group.timeout, "confirm": min(CONFIRM_SECONDS, limit)}
        for rank, connection in connections.items():
            secret = connection.mask(group.network.secret, sent=True).hex()
            send_message(connection, {"plan": plan, "rank": rank, "terms": self.terms, "secret": secret})
        for rank, address in enumerate(survivors):
            if address != self.me:
                connections[rank] = self.came.pop(address)
                send_message(connections[rank], {"plan": plan, "rank": rank})
        return survivors.index(self.me), plan, connections

    def _close_all(self) -> None:
        while self.came:
            self.came.popitem()[1].close()

    def _post(self, message: Mapping[str, Any]) -> None:
        for connection in self.came.values():
            send_message(connection, message)

    def _addresses(self, world: Collection[int]) -> set[Address]:
        """The addresses of these world ranks."""
        ranks = zip(self.group.failures.world, self.group.members, strict=True)
        return {each for rank, each in ranks if rank in world}

    def _stopped(self, address: Address) -> bool:
        """Whether a member of this host is known to be stopped by a signal or a debugger."""
        group, status = self.group, self.group.failures.status
        if address not in group.members:
            return False
        rank = group.failures.world[group.members.index(address)]
        return status.halted(rank) and not status.ended(rank)

    # Errors.

    def _names(self, addresses: Sequence[Address], several: bool = False) -> str:
        """The names of members in errors.  A newcomer of a failed attempt has no rank, so its address is given."""
        members = self.group.members
        ranks = [members.index(each) for each in addresses if each in members]
        names = [self.group.failures.names(ranks, several)] if ranks else []
        names += [f"the newcomer at {place_name(*each)}" for each in addresses if each not in members]
        return " and ".join(names)

    def _ranks(self, *addresses: Address) -> list[int]:
        """The world ranks of these members.  A newcomer of a failed attempt has none."""
        members, world = self.group.members, self.group.failures.world
        return [world[members.index(each)] for each in addresses if each in members]

    def _late(self, missing: Sequence[Address]) -> KosError:
        text = timeouts.late(f"{self.call.partition(' ')[0]}: {self._names(missing, True)}", within=self.group.timeout)
        return RendezvousError(text, ranks=self._ranks(*missing))

    def _too_few(self) -> KosError:
        group = self.group
        rejected = [] if group.joining.door is None else group.joining.door.rejected
        others = (f"another secret: {caller}" for caller in rejected)
        refused, came = [*group.joining.refused[self._refused_before :], *others], len([*group.joining])
        return RendezvousError(timeouts.too_few(self.call, came, self._wanted(), group.address, group.timeout, refused))

    def _out(self, epoch: int) -> KosError:
        group = self.group
        me = group.failures.names([group.rank], False)
        text = timeouts.left_out(self.call, me)
        return RankLost(f"{text} (epoch {epoch})", ranks=[group.failures.world[group.rank]])


def attempt_seconds(left: float) -> float:
    """The time limit of an attempt with newcomers.  It leaves time for another attempt, if ``left`` seconds remain."""
    return max(left / 2, min(left, CONFIRM_SECONDS), _LEAST_SECONDS)


def misfit(hello: Mapping[str, Any], terms: Mapping[str, Any]) -> str:
    """The reason why a newcomer cannot be admitted; "" if it can."""
    for what, kind in (("kos", "version {} of kos"), ("backend", "backend {}")):
        theirs, ours = hello.get(what), terms.get(what)
        if theirs is not None and theirs != ours:
            return f"expected {kind.format(ours)}, as the group has, got {kind.format(theirs)}"
    if terms.get("GPU") and not hello.get("GPU"):
        return f"expected a GPU, as backend {terms['backend']} of the group uses them, got none"
    if not terms.get("GPU") and hello.get("device") is not None:
        return f"expected no device, as backend {terms['backend']} of the group uses no GPU, got {hello['device']}"
    return ""


def publish(group: Any) -> None:
    """Write the address of the group to the file that KOS_JOIN names, if it names one."""
    if os.sep in (path := KOS_JOIN.get()):
        try:
            replace_file(Path(path), group.address.encode())
        except OSError as error:
            log.warning("KOS_JOIN: %s: expected a file to write, got: %s", path, error)


def to_text(members: Sequence[Address]) -> str:
    """The address for newcomers: those of the first members."""
    return ",".join(place_name(host, port) for host, port in members[:_SHOWN])


def as_address(pair: Sequence[Any]) -> Address:
    host, port = pair
    return str(host), int(port)


def _addresses(pairs: Sequence[Sequence[Any]]) -> list[Address]:
    return [as_address(pair) for pair in pairs]
