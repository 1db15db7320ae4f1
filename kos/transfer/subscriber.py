"""The side that wants the weights: it pulls the newest version into its own arrays.

``update`` asks rank 0 of the publisher for the newest version and a lease on it, and reads its boxes from the ranks
that hold them (``reader.py``).  The data goes to staging memory first.  It is copied to the arrays once all ranks of
the subscriber have read the whole version.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Literal, NamedTuple

from kos.comm.arguments import check_bool, check_timeout
from kos.comm.communicator import Communicator
from kos.comm.control.wire import Connection
from kos.errors import InvalidArgument, TransferError, TransferTimeout
from kos.transfer import exchange
from kos.transfer.arguments import check_arrays, check_at_least, check_comm, check_one_of
from kos.transfer.exchange import GRACE, Catalogue, Stale
from kos.transfer.one_caller import OneCaller
from kos.transfer.placement import Arrays, Placement
from kos.transfer.plan import Plan
from kos.transfer.reader import Target
from kos.transfer.scales import BlockScales

_AGAIN_SECONDS = 0.05  # between two tries to reach a publisher that has not come yet
_LINGER = 5.0  # seconds that a lease outlives the deadline of the reader


class Update(NamedTuple):
    """The result of ``Subscriber.update``."""

    version: int
    """The version that the arrays hold now."""
    changed: bool
    """Whether it was read.  It is not read if all ranks already held it."""
    restarted: bool
    """Whether the publisher was restarted since the update before: its incarnation has changed."""
    seconds: float
    nbytes: int
    """Bytes that this rank has read."""


class Version(NamedTuple):
    """A version of a publisher."""

    incarnation: str
    serial: int
    number: int


def read_catalogue(address: str, timeout: float = 30.0) -> Catalogue:
    """What the publisher at ``address`` offers, such as the shapes of its tensors: ``offers.shapes``.

    Waits at most ``timeout`` seconds until a publisher answers.  Raises TransferError, also for an unknown host, and
    TransferTimeout.
    """
    with Subscriber(address, None) as subscriber:
        return subscriber.catalogue(timeout)


class Subscriber(OneCaller):
    """Pulls versions of a publisher's tensors into ``arrays``.

    Args:
        address: "HOST:PORT" of the publisher's rank 0.  The publisher may start later than the subscriber.
        arrays: arrays on the host or on GPUs (NumPy, torch, CuPy, kos), and the tensors or parts of tensors that each
            of them gets.  A float8_e4m3fn matrix is quantized in blocks if there is an array for its scales
            (``BlockScales``).
        comm: the communicator of several ranks that subscribe together; None: one process.  With a communicator,
            ``update`` is collective, and all ranks get the same version or none.  All other calls, including this
            constructor, are not collective.
        streams: TCP connections to each publisher rank.
        transport: "shared" maps the publisher's memory, on the same host; "tcp" does not map it; "auto" maps it where
            possible, and uses TCP otherwise.  GPU memory is not mapped for arrays on the host.
        staged: read into staging memory, which is as large as the arrays, so that the arrays never hold a part of a
            version.  Without staging memory, an update makes one copy less, but a failed update leaves the arrays
            undefined until the next one.

    Raises InvalidArgument; TransferError if the secret (``KOS_SECRET``) cannot be used; OutOfMemory.
    """

    def __init__(
        self, address: str, arrays: Arrays | None, *, comm: Communicator | None = None, streams: int = 4,
        transport: Literal["auto", "shared", "tcp"] = "auto", staged: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(f"subscriber to {address}")
        check_comm(comm)
        self.address, self._comm = address, comm
        self._rank = 0 if comm is None else comm.rank
        if arrays is not None and not check_arrays(arrays, Placement, BlockScales):
            raise InvalidArgument("arrays: expected at least one, got none")
        streams, staged = check_at_least("streams", streams, 1), check_bool("staged", staged)
        check_one_of("transport", transport, "auto", "shared", "tcp")
        self._host, self._port = exchange.parse(address)
        if not self._port:
            raise InvalidArgument("address: expected the port of the publisher, from 1 to 65535, got 0")
        self._network = exchange.network(self._host)
        self._target = Target(arrays or {}, self._connect, streams, transport, staged)
        self._lead: Connection | None = None
        self._known: Catalogue | None = None
        self._plan: Plan | None = None
        self._held: Version | None = None
        self._incarnation = ""  # of the last version that the arrays held

    @property
    def version(self) -> int | None:
        """The version that the arrays hold; None before the first, and after an update that left them undefined."""
        return None if self._held is None else self._held.number

    def update(self, timeout: float = 30.0, *, verify: bool = False) -> Update:
        """Pull the newest version.  Collective if there is a communicator.

        Waits at most ``timeout`` seconds in all, until the publisher answers, has a version, and has sent its bytes.
        With a communicator, the last quarter of this time, but at most 2 s, is reserved for the exchange of the ranks'
        results.  The last step, the copy from staging memory to the arrays, may end up to 2 s after ``timeout``.
        If the publisher uses the buffer of the version again, the update begins again with the newest version.
        With ``verify``, the update reads over TCP, and compares checksums of all bytes with those of the publisher.  If
        the publisher was made with ``checksums``, it also compares its arrays with their checksums at ``publish``.

        Raises TransferError if a publisher rank has ended or its bytes are wrong; the error names this rank and the
        tensors that it holds.  Raises TransferTimeout if a publisher rank or a GPU of this process is late.  The arrays
        then hold the previous version, unless ``staged`` is False or the copy from staging memory was late.  A later
        ``update`` connects again.

        Raises InvalidArgument for a wrong timeout, for a tensor that the publisher lacks or has in another shape, and
        for an array whose memory has been replaced or whose stream is being captured.  The other ranks then raise
        TransferError.  Also raises TransferError after ``close``, if another thread closes this Subscriber meanwhile,
        if another thread is in a call, and in a forked process.

        If a rank of the communicator is late, the others raise TransferTimeout; if it is lost, TransferError.  The
        error names this rank, and ``error.cause`` is the failure of the communicator.  To continue, call
        ``comm.shrink()``, close this Subscriber, and make one on the new communicator.  If ``error.cause`` is None, the
        communicator is intact.
        """
        with self._calling("update"):
            return self._update(time.monotonic(), timeout, verify)

    def _update(self, began: float, timeout: float, verify: bool) -> Update:
        wrong = None
        try:
            timeout, verify = check_timeout(timeout), check_bool("verify", verify)
        except InvalidArgument as error:  # raised below, for the other ranks wait for an answer of this one
            timeout, wrong = 30.0, error
        deadline, why = began + timeout, ""
        answer_by = deadline if self._comm is None else deadline - min(GRACE, timeout / 4)

        def newest() -> list[Any]:
            if wrong is not None:
                raise wrong
            self._check_open()
            return [self._held, self._newest(answer_by, why)]

        while True:
            try:
                found = self._together(newest, deadline)
            except TransferError:  # also on other ranks than 0: the publisher has ended
                self._free()
                raise
            wanted = Version(*found[0][1])  # of rank 0, which has the lease
            if all(held is not None and Version(*held)[:2] == wanted[:2] for held, _ in found):
                return Update(wanted.number, False, False, time.monotonic() - began, 0)
            with suppress(Stale):  # rank 0 ends the loop at the deadline, for all ranks
                nbytes = self._pull_together(wanted, answer_by, deadline, verify)
                restarted = self._incarnation not in ("", wanted.incarnation)
                self._incarnation = wanted.incarnation
                return Update(wanted.number, True, restarted, time.monotonic() - began, nbytes)
            why = "each version was replaced before it had been read completely"

    def catalogue(self, timeout: float = 30.0) -> Catalogue:
        """What the publisher offers now.

        Before the first contact, waits at most ``timeout`` seconds for the publisher, and then raises TransferTimeout.
        Afterwards, raises TransferError at once if the publisher has ended, as ``update`` does.
        """
        with self._calling("catalogue"):
            return self._catalogue(time.monotonic() + check_timeout(timeout))

    def _catalogue(self, deadline: float) -> Catalogue:
        while True:
            self._check_open()
            try:
                found = Catalogue(self._ask("catalogue", deadline, incarnation=""))
                break
            except TransferError as error:  # the publisher may not have started yet
                cause = error.__cause__
                if self._known is not None or isinstance(cause, socket.gaierror) or not isinstance(cause, OSError):
                    raise
                if time.monotonic() + _AGAIN_SECONDS > deadline:
                    never = f"{self._name()}, which never answered ({cause})"
                    raise TransferTimeout(f"{never}: {exchange.NO_ANSWER}") from error
                time.sleep(_AGAIN_SECONDS)
        if self._known is None or self._known.incarnation != found.incarnation:
            self._target.close()
            self._known, self._plan = found, None
        return self._known

    def plan(self, timeout: float = 30.0) -> Plan:
        """Which bytes this rank reads from which rank of the publisher that runs now.

        Waits, and raises errors, as ``catalogue`` does.  Raises InvalidArgument for the same tensors as ``update``.
        """
        with self._calling("plan"):
            return self._plan_for(self._catalogue(time.monotonic() + check_timeout(timeout)))

    def _plan_for(self, known: Catalogue) -> Plan:
        if self._plan is None:
            self._plan = Plan(known.offers, [self._target.layout], self._rank, self._target.near(known))
        return self._plan

    def close(self) -> None:
        """Close the connections, and unmap the publisher's memory.  Not collective.

        A call that another thread is in raises TransferError, and that thread unmaps the memory.  In a forked process,
        ``close`` does nothing.
        """
        super().close()

    def _interrupt(self) -> None:
        self._target.interrupt()
        exchange.shut_down(filter(None, [self._lead]))

    def _free(self) -> None:
        """Close the connections, and unmap the publisher's memory.  While it is open, the next call connects again."""
        self._target.close()
        lead, self._lead = self._lead, None
        if lead is not None:
            lead.close()

    # --- the exchange with rank 0 of the publisher ----------------------------------------------------------

    def _name(self) -> str:
        name = "publisher" if self._known is None else f"publisher {self._known.name}"
        return f"{name} at {self.address}" + ("" if self._held is None else f", which had version {self.version}")

    def _ask(self, what: str, deadline: float, incarnation: str, **more: Any) -> dict[str, Any]:
        """An answer of the publisher's rank 0.  Raises Stale, TransferError."""
        try:
            with exchange.naming(self._name, deadline):
                if self._lead is not None and self._lead.drain():  # the publisher may have been restarted meanwhile
                    self._free()
                if self._lead is None:
                    self._lead = self._connect(self._host, self._port, deadline)
                self._check_open()  # perhaps another thread closed this subscriber while it connected
                exchange.send(self._lead, {"ask": what, **more}, incarnation, deadline)
                answer = exchange.receive(self._lead, deadline)
        except BaseException:  # a late answer to this request must not be read as the answer to the next one
            self._free()  # also unmaps: GPU memory of a killed publisher is not freed while it is mapped
            raise
        return exchange.answered(answer, incarnation)

    def _connect(self, host: str, port: int, deadline: float) -> Connection:
        """A new connection to a publisher rank."""
        return self._network.call(host, port, exchange.PURPOSE, self._rank, 1, deadline)

    def _newest(self, deadline: float, why: str) -> Version | None:
        """The newest version; None on ranks other than 0.  Takes a lease, unless the arrays hold this version already.

        ``why`` says why this update has no version yet; it is empty at first.  Raises TransferError, TransferTimeout.
        """
        if self._rank:
            return None
        while not why or deadline - time.monotonic() > _AGAIN_SECONDS:
            known, held = self._known or self._catalogue(deadline), self._held
            have = held.serial if held is not None and held.incarnation == known.incarnation else None
            left = max(deadline - time.monotonic(), 0.0)
            wants = {"have": have, "wait": left - min(left / 4, 0.5), "seconds": left + _LINGER}
            try:
                answer = self._ask("newest", deadline, known.incarnation, **wants)
            except Stale:
                self._known = None
                continue
            except TransferTimeout:
                if not why:
                    raise
                break
            if answer["serial"] is not None:
                return Version(known.incarnation, answer["serial"], answer["version"])
            why = "it has published nothing yet" + ", or is writing its only buffer now" * (known.buffers == 1)
        raise TransferTimeout(f"{self._name()}: expected a version before the deadline, got none: {why}")

    def _release(self) -> None:
        """End the lease.  This does not wait for an answer."""
        if self._lead is not None:
            try:
                exchange.send(self._lead, {"ask": "release"}, "", time.monotonic())
            except OSError:  # to close the connection ends the lease too
                self._free()

    # --- several ranks that subscribe together --------------------------------------------------------------

    def _together(self, work: Callable[[], Any], deadline: float, version: str = "") -> list[Any]:
        """The results of ``work`` on all ranks."""
        return exchange.together(
            self._comm, "subscriber rank", work, deadline, lambda: f"update from {self._name()}{version}"
        )

    def _pull_together(self, wanted: Version, answer_by: float, deadline: float, verify: bool) -> int:
        """Read a version, and copy it to the arrays if all ranks have read it.  If one rank is Stale, all raise it.

        A rank reads until ``answer_by``, and waits for the other ranks until the deadline.
        """
        self._held = self._held if self._target.staged else None

        def pull() -> int:
            known = self._known
            if known is None or known.incarnation != wanted.incarnation:
                known = self._catalogue(answer_by)
                if known.incarnation != wanted.incarnation:
                    raise Stale
            plan = self._plan_for(known)
            self._check_open()
            nbytes = self._target.read(plan, known, wanted.serial, answer_by, verify)
            self._check_open()
            return nbytes

        try:
            read = self._together(pull, deadline, f" to version {wanted.number}")
        finally:
            self._release()
        self._held = None
        self._target.commit(deadline + GRACE)
        self._held = wanted
        return int(read[self._rank])
