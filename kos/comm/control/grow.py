"""Changes of the membership of a group: ``shrink``, ``grow`` and ``replace`` all use the rules in this file.

Ranks that are threads apply the rules to memory that they share (``threads.py``).  Others use this protocol:

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
from types import MappingProxyType
from typing import Any, NoReturn

from kos.comm import timeouts
from kos.comm.control.newcomers import (
    CALL_SECONDS,
    POLL_SECONDS,
    Address,
    Newcomer,
    as_address,
    place_name,
    send_message,
)
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
from kos.comm.failures import FailureLog
from kos.environment import KOS_JOIN
from kos.errors import CollectiveError, CollectiveMismatch, KosError, RankLost, RendezvousError, from_record, to_record
from kos.files import lacks_files, replace_file

log = logging.getLogger(__name__)
GRACE_SECONDS = 2.0  # added to the timeout, so that the leader can report missing ranks
CONFIRM_SECONDS = 5.0  # limit for the exchange that confirms a view; all ranks have just answered
_LEAST_SECONDS = 1.0  # limit for an attempt that begins at the end of the timeout
_BEAT_SECONDS = 0.5  # between two heartbeats of a leader
_SHOWN = 8  # addresses that ``address`` offers to newcomers


class MembershipChange:
    """The rules of one change of the membership of a group, on one of its ranks.  All kinds of groups share them.

    ``members`` are the ranks of the group of ``failures``, as the control plane names them.  ``call`` is the program's
    call, which must be the same on all members.  ``newcomers`` is the number of ranks that join; None means as many as
    were lost.  With ``whole``, no member may be lost.  ``terms`` is sent to newcomers.  ``began`` is the time at which
    an earlier attempt of the same call began, if there was one.

    A call has one deadline: its rank's start of the call plus the timeout.  The lowest rank leads.  It uses the
    earliest deadline of all members that have called.  It waits for members that the failure blames for half of the
    time only, and leaves the other half to the rest of the protocol.
    """

    def __init__(
        self, failures: FailureLog, members: Sequence[Any], timeout: float, call: str, newcomers: int | None,
        whole: bool, terms: Mapping[str, Any], began: float | None,
    ) -> None:  # fmt: skip
        self.failures, self.of_group, self.timeout, self.call = failures, members, timeout, call
        self.newcomers, self.whole, self.terms = newcomers, whole, dict(terms)
        known = failures.first, failures.status.last
        blamed = {rank for failure in known if failure is not None for rank in (*failure.ranks, *failure.unasked)}
        self.blamed: set[Any] = self.named(blamed)
        self.left_out = set[Any]()
        self.began = time.monotonic() if began is None else began
        self.deadline = self.until = self.began + timeout
        self.over = False  # whether the time for newcomers, ``until``, is over
        if began is not None:
            self.extend()

    def extend(self) -> None:
        """Give the members time to call again, for another attempt or to learn that the time is over."""
        now = time.monotonic()
        self.over = now > self.until
        self.deadline = max(self.deadline, now + GRACE_SECONDS)

    def waits_until(self, missing: Collection[Any]) -> float:
        """Until when the leader waits for the ``missing`` members, or for newcomers if no member is missing."""
        blamed = bool(missing) and not self.whole and self.blamed.issuperset(missing)
        return min(self.began + self.timeout / 2, self.deadline) if blamed else self.deadline

    def wanted(self, present: Collection[Any]) -> int:
        """The number of newcomers that join the members that are ``present``."""
        return len({*self.of_group}.difference(present)) if self.newcomers is None else self.newcomers

    def check_lost(self, lost: Collection[Any], ends: Mapping[int, str] = MappingProxyType({})) -> None:
        """Raise if members are ``lost``, and none may be: once all others have called, so that all get this error.

        ``ends`` has the reasons of world ranks, as far as they are known.
        """
        if self.whole and lost:
            rank, name = min(map(self.of_group.index, lost)), self.call.partition(" ")[0]
            raise self.failures.lost(rank, ends.get(self.failures.world[rank], "its process ended"), name)

    def check_call(self, me: Any, other: Any, theirs: str) -> None:
        """Raise if the member ``other`` made another call than ``me``."""
        if theirs != self.call:
            text = f"{self.names([me])} called {self.call} but {self.names([other])} called {theirs}"
            raise CollectiveMismatch(text, ranks=self.ranks(me, other), expected=self.call, got=theirs)

    def leave_out(self, missing: Sequence[Any]) -> None:
        """Leave out the missing members if the failure blames each of them; raise if another one is missing."""
        if self.whole or (others := [each for each in missing if each not in self.blamed]):
            raise self.late(missing if self.whole else others)
        self.left_out.update(missing)

    def named(self, world: Collection[int]) -> set[Any]:
        """The members of these world ranks."""
        return {each for rank, each in zip(self.failures.world, self.of_group, strict=True) if rank in world}

    def names(self, members: Sequence[Any], several: bool = False) -> str:
        """The names of members in errors.  A newcomer of a failed attempt has no rank, so its address is given."""
        ranks = [self.of_group.index(each) for each in members if each in self.of_group]
        names = [self.failures.names(ranks, several)] if ranks else []
        names += [f"the newcomer at {place_name(*each)}" for each in members if each not in self.of_group]
        return " and ".join(names)

    def ranks(self, *members: Any) -> list[int]:
        """The world ranks of these members.  A newcomer of a failed attempt has none."""
        return self.failures.in_world(self.of_group.index(each) for each in members if each in self.of_group)

    def late(self, missing: Sequence[Any]) -> KosError:
        text = timeouts.late(f"{self.call.partition(' ')[0]}: {self.names(missing, True)}", within=self.timeout)
        return RendezvousError(text, ranks=self.ranks(*missing))

    def too_few(self, came: int, wanted: int, address: str, refused: Sequence[str] = ()) -> KosError:
        return RendezvousError(timeouts.too_few(self.call, came, wanted, address, self.timeout, refused))

    def out(self, me: Any, epoch: str = "") -> KosError:
        return RankLost(f"{timeouts.left_out(self.call, self.names([me]))}{epoch}", ranks=self.ranks(me))


class TCPChange(MembershipChange):
    """A change of the membership of ``group``, whose ranks are connected by TCP.  Members are named by address."""

    def __init__(
        self, group: Any, call: str, newcomers: int | None, whole: bool, terms: Mapping[str, Any], began: float | None
    ) -> None:
        super().__init__(group.failures, group.members, group.timeout, call, newcomers, whole, terms, began)
        self.group, self.me = group, group.members[group.rank]
        self.epoch: int
        self.members: list[Address]
        self.epoch, self.members = group.newer or (group.epoch, group.members)
        self.came: dict[Address, Connection] = {}  # members that have called this leader
        self._refused_before = len(group.joining.refused)
        self._probes: dict[Address, socket.socket] = {}
        self._hub: socket.socket | None = None  # on the new rank 0: the listener of the new hub
        self.blamed |= group.silent
        self.left_out = {each for each in self.blamed if self._stopped(each)} | group.gone_newcomers

    def run(self) -> Any:
        """Make the change.  Returns the new group, whose ranks have exchanged their places."""
        group = self.group
        while True:
            try:
                leader = self._leader()
                rank, plan, connections = self._lead() if leader is None else self._follow(*leader)
            except RendezvousError as error:
                group.silent |= self.named(error.ranks)
                raise
            except ConnectionError:  # the leader has ended, or is not ready
                time.sleep(POLL_SECONDS / 2)
                if time.monotonic() > self.deadline:
                    raise self.late([each for each in self.members if each != self.me]) from None
                continue
            finally:
                self._forget_probes()
            self.epoch, self.members = group.newer = plan["epoch"], _addresses(plan["members"])
            try:
                return group.successor(plan, rank, connections, self._hub)
            except (CollectiveError, RendezvousError) as error:
                if group.lose_newcomers(error.ranks):
                    self.left_out |= group.gone_newcomers
                    self.extend()
                elif time.monotonic() > self.deadline:
                    raise

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
            raise self.late([leader]) from None
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
                if now <= self.waits_until(missing):
                    self._admit()
                elif missing:
                    self.blamed.update(filter(self._stopped, missing))
                    self.leave_out(missing)
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
        if not missing:
            self.check_lost(gone)
        return missing

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
        try:
            self.check_call(self.me, address, hello["call"])
        except CollectiveMismatch as error:
            send_message(connection, {"error": to_record(error)})
            raise
        self.came[address] = connection
        self.deadline = min(self.deadline, time.monotonic() + hello["seconds"])
        self.until = min(self.until, self.deadline)
        self.left_out.discard(address)
        self.left_out |= {each for each in _addresses(hello["left out"]) if each not in (self.me, *self.came)}

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

    def _stopped(self, address: Address) -> bool:
        """Whether a member of this host is known to be stopped by a signal or a debugger."""
        group, status = self.group, self.group.failures.status
        if address not in group.members:
            return False
        rank = group.failures.world[group.members.index(address)]
        return status.halted(rank) and not status.ended(rank)

    def _wanted(self) -> int:
        return self.wanted({*self.came, self.me})

    def _too_few(self) -> KosError:
        group = self.group
        rejected = [] if group.joining.door is None else group.joining.door.rejected
        others = (f"another secret: {caller}" for caller in rejected)
        refused, came = [*group.joining.refused[self._refused_before :], *others], len([*group.joining])
        return self.too_few(came, self._wanted(), group.address, refused)

    def _out(self, epoch: int) -> KosError:
        return self.out(self.me, f" (epoch {epoch})")


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


def _addresses(pairs: Sequence[Sequence[Any]]) -> list[Address]:
    return [as_address(pair) for pair in pairs]
