"""The side that wants the weights: it pulls the newest version into its own arrays.

``update`` asks rank 0 of the publisher for the newest version and a lease on it, and reads its boxes from the ranks
that hold them: from mapped memory on the same host, else over several TCP connections.  All of it goes to staging
memory first.  It is copied to the arrays when the version was read whole, on all ranks of the subscriber.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from typing import Any, Literal, NamedTuple, Self

import numpy as np

from kos.comm.arguments import check_int, check_timeout
from kos.comm.communicator import Communicator
from kos.comm.control.wire import Connection, drive, fill
from kos.dtypes import BY_NUMPY, DType
from kos.errors import InvalidArgument, KosError, TransferError, TransferTimeout, in_words
from kos.transfer.buffers import Buffers
from kos.transfer.exchange import (
    GRACE,
    PURPOSE,
    Address,
    Box,
    Restarted,
    Stale,
    answered,
    as_bytes,
    checksum,
    flat_arrays,
    late,
    layout_from_json,
    network,
    parse,
    place,
    receive,
    send,
)
from kos.transfer.placement import Arrays
from kos.transfer.plan import Copy, Layout, Offers, Plan

Way = Literal["auto", "shared", "tcp"]
CHUNK = 8 << 20  # bytes of a request
_MOST_BOXES = 64  # of a request
_MOST_THREADS = 16
_AGAIN_SECONDS = 0.05  # between two tries to reach a publisher that has not come yet
_LINGER = 5.0  # seconds that a lease outlives the deadline of the reader


class Update(NamedTuple):
    """The result of ``Subscriber.update``."""

    version: int
    """The version that the arrays hold now."""
    changed: bool
    """Whether it is another one than before."""
    restarted: bool
    """Whether the publisher is another one than before: its incarnation has changed."""
    seconds: float
    nbytes: int
    """Bytes that this rank has read."""


class Version(NamedTuple):
    """A version of a publisher, and the lease that pins it."""

    incarnation: str
    serial: int
    number: int
    lease: int


class Catalogue:
    """What a publisher offers, and where its ranks are."""

    def __init__(self, answer: Mapping[str, Any]) -> None:
        self.incarnation: str = answer["incarnation"]
        self.name, self.count, self.checksums = answer["name"], int(answer["buffers"]), bool(answer["checksums"])
        self.ranks = [Address(*each) for each in answer["ranks"]]
        self.groups: list[tuple[Layout, list[int]]] = [
            (layout_from_json(layout), ranks) for layout, ranks in answer["groups"]
        ]
        self.offers = Offers(self.groups)

    def layout(self, rank: int) -> Layout:
        return next(layout for layout, ranks in self.groups if rank in ranks)


def read_catalogue(address: str, timeout: float = 30.0) -> Catalogue:
    """What the publisher at ``address`` offers, such as the shapes of its tensors: ``offers.shapes``.

    Waits at most ``timeout`` seconds for a publisher to come.  Raises TransferError, TransferTimeout.
    """
    subscriber = Subscriber(address, None)
    try:
        return subscriber.catalogue(timeout)
    finally:
        subscriber.close()


class Subscriber:
    """Pulls versions of a publisher's tensors into ``arrays``.

    Args:
        address: "HOST:PORT" of the publisher's rank 0.  It may come later than the subscriber.
        arrays: arrays in host memory (NumPy, torch, ...), and which tensors' elements each gets.
        comm: the communicator of several ranks that subscribe together; None: one process.  ``update`` is then
            collective, and all ranks get the same version or none.
        streams: TCP connections to each publisher rank.
        way: "shared" maps the publisher's memory, on the same host; "tcp" does not; "auto" takes what works.
        staged: read into staging memory, as large as the arrays, so that the arrays never hold a part of a version.
            Without it an update takes one copy less, and a failed one leaves the arrays undefined until the next.

    Raises InvalidArgument, such as for memory of a GPU.
    """

    def __init__(
        self, address: str, arrays: Arrays | None, *, comm: Communicator | None = None, streams: int = 4,
        way: Way = "auto", staged: bool = True,
    ) -> None:  # fmt: skip
        self.address, self._comm, self._way = address, comm, way
        self._rank, self._size = (0, 1) if comm is None else (comm.rank, comm.size)
        self._host, self._port = parse(address)
        self._network, self._streams = network(self._host), check_int("streams", streams)
        if self._streams < 1 or way not in ("auto", "shared", "tcp"):
            raise InvalidArgument(f"streams, way: expected at least 1 and auto, shared or tcp, got {streams}, {way!r}")
        self._flat, self._layout = ({}, {}) if arrays is None else flat_arrays(arrays, True)
        self._into = {name: np.empty_like(flat) if staged else flat for name, flat in self._flat.items()}
        self._lead: Connection | None = None
        self._data: dict[tuple[int, int], Connection] = {}
        self._mapped: dict[int, Buffers | None] = {}
        self._known: Catalogue | None = None
        self._plan: Plan | None = None
        self._held: Version | None = None
        self._ends = False
        """Whether a reader has failed, so that the others end."""

    # --- what a program calls ---------------------------------------------------------------------------

    @property
    def version(self) -> int | None:
        """The version that the arrays hold; None before the first, and after an update without staging failed."""
        return None if self._held is None else self._held.number

    def update(self, timeout: float = 30.0, *, verify: bool = False) -> Update:
        """Pull the newest version.  Collective if there is a communicator.

        Waits at most ``timeout`` seconds in all, for the publisher to come, for its first version, and for the bytes.
        If the publisher uses the buffer of the version again, the update begins again with the newest one.
        ``verify`` compares checksums of all bytes with the publisher's, and where it was made with ``checksums``,
        these with the checksums at ``publish``.

        Raises TransferError, which names the publisher's rank and what it holds, if it has ended or its bytes are
        wrong; TransferTimeout if it does not answer in time.  The arrays then hold the version from before, unless
        ``staged`` is False.  A later ``update`` connects again.
        """
        began, limit = time.monotonic(), check_timeout(timeout)
        deadline, before = began + limit, self._held
        while True:
            wanted = self._shared(deadline, lambda: self._newest(deadline))
            if before is not None and wanted[:2] == before[:2]:
                return Update(wanted.number, False, False, time.monotonic() - began, 0)
            try:
                nbytes = self._pull_together(wanted, deadline, verify)
            except Stale:
                continue  # rank 0 ends it at the deadline, for all ranks
            restarted = before is not None and before.incarnation != wanted.incarnation
            return Update(wanted.number, True, restarted, time.monotonic() - began, nbytes)

    def catalogue(self, timeout: float = 30.0) -> Catalogue:
        """What the publisher offers."""
        deadline = time.monotonic() + check_timeout(timeout)
        while True:
            try:
                answer = self._ask("catalogue", deadline, incarnation="")
                break
            except TransferTimeout:
                raise
            except TransferError as error:  # it may still come
                if not isinstance(error.__cause__, OSError):
                    raise
                if time.monotonic() + _AGAIN_SECONDS > deadline:
                    raise late(f"{self._name()}, which never came: {error.__cause__}", 0, error) from error
                time.sleep(_AGAIN_SECONDS)
        self._use(Catalogue(answer))
        assert self._known is not None
        return self._known

    def plan(self, timeout: float = 30.0) -> Plan:
        """Which bytes this rank reads from which publisher rank."""
        self.catalogue(timeout)
        return self._planned()

    def close(self) -> None:
        """Close the connections, and unmap the publisher's memory."""
        self._drop_data()
        self._drop_lead()
        for each in self._mapped.values():
            if each is not None:
                each.close()
        self._mapped.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- the exchange with rank 0 of the publisher ----------------------------------------------------------

    def _name(self) -> str:
        known, held = self._known, self._held
        what = f"publisher at {self.address}" if known is None else f"publisher {known.name} at {self.address}"
        return what if held is None else f"{what}, which had version {held.number}"

    def _ask(self, what: str, deadline: float, incarnation: str | None = None, **more: Any) -> dict[str, Any]:
        """An answer of the publisher's rank 0.  Raises Restarted, Stale, TransferError."""
        if incarnation is None:
            incarnation = "" if self._known is None else self._known.incarnation
        try:
            if self._lead is None:
                self._lead = self._call(self._host, self._port, deadline)
            send(self._lead, {"ask": what, **more}, incarnation, deadline)
            answer = receive(self._lead, deadline)
        except (OSError, KosError) as error:
            self._drop_lead()
            raise late(self._name(), deadline, error) from error
        except BaseException:  # an interrupt: the answer would be taken for that of the next request
            self._drop_lead()
            raise
        return answered(answer, incarnation)

    def _call(self, host: str, port: int, deadline: float) -> Connection:
        return self._network.call(host, port, PURPOSE, self._rank, self._size, deadline)

    def _newest(self, deadline: float) -> Version:
        """The newest version, and a lease unless it is held here already."""
        again = self._lead is not None
        while True:
            if time.monotonic() >= deadline:
                raise TransferTimeout(f"{self._name()}: expected a version that stays until it is read, got none")
            known, held = self._known or self.catalogue(_left(deadline)), self._held
            have = held.serial if held is not None and held.incarnation == known.incarnation else None
            left = deadline - time.monotonic()
            try:
                answer = self._ask("newest", deadline, have=have, wait=left - 0.1, seconds=left + _LINGER)
            except (Restarted, Stale):
                self._known = None
                continue
            except TransferTimeout:
                raise
            except TransferError:
                if not again:  # else the publisher may have been restarted since
                    raise
                again = False
                continue
            if answer["serial"] is not None:
                return Version(known.incarnation, answer["serial"], answer["version"], answer.get("lease", 0))
            if deadline - time.monotonic() < 0.2:
                raise TransferTimeout(f"{self._name()}: expected a version, got none before the deadline")

    def _use(self, catalogue: Catalogue) -> None:
        """Read from this publisher from now on."""
        if self._known is None or self._known.incarnation != catalogue.incarnation or self._plan is None:
            self._drop_data()
            for each in self._mapped.values():
                if each is not None:
                    each.close()
            self._mapped.clear()
            self._plan = None
        self._known = catalogue

    def _planned(self) -> Plan:
        assert self._known is not None
        if self._plan is None:
            self._plan = Plan(self._known.offers, [self._layout], self._rank)
            self._plan.check()
        return self._plan

    # --- several ranks that subscribe together --------------------------------------------------------------

    def _shared(self, deadline: float, find: Callable[[], Version]) -> Version:
        """The version that rank 0 has found; its error is raised on all ranks."""
        if self._comm is None or self._size == 1:
            return find()
        found, error = None, None
        if self._rank == 0:
            try:
                found = find()
            except KosError as problem:
                error = problem
        mine = json.dumps([found, None if error is None else [in_words(error), isinstance(error, TimeoutError)]])
        answer = json.loads(self._comm.broadcast_bytes(
            mine.encode() if self._rank == 0 else None, timeout=max(deadline - time.monotonic(), 0) + GRACE
        ))  # fmt: skip
        if error is not None:
            raise error
        if answer[1] is not None:
            text, timed_out = answer[1]
            raise (TransferTimeout if timed_out else TransferError)(f"subscriber rank 0: {text}")
        return Version(*answer[0])

    def _pull_together(self, wanted: Version, deadline: float, verify: bool) -> int:
        """Read a version, and copy it to the arrays if all ranks have it.  Raises Stale on all ranks if on one."""
        error: BaseException | None = None
        nbytes = 0
        in_place = any(self._into[name] is flat for name, flat in self._flat.items())
        self._held = None if in_place else self._held
        try:
            nbytes = self._pull(wanted, deadline, verify)
        except (KosError, Stale) as problem:
            error = problem
        finally:
            self._release(wanted, isinstance(error, TransferError))
        if self._comm is not None and self._size > 1:
            mine = "" if error is None else "stale" if isinstance(error, Stale) else in_words(error)
            left = max(deadline - time.monotonic(), 0) + GRACE
            found = [each.decode() for each in self._comm.all_gather_bytes(mine.encode(), timeout=left)]
            for rank, text in enumerate(found):
                if text not in ("", "stale") and (error is None or isinstance(error, Stale)):
                    error = TransferError(f"subscriber rank {rank}: {text}")
            if error is None and any(found):
                error = Stale()
        if error is not None:
            raise error
        self._held = None
        for name, flat in self._flat.items() if not in_place else ():
            np.copyto(flat, self._into[name])
        self._held = wanted
        return nbytes

    def _release(self, wanted: Version, failed: bool) -> None:
        """End the lease: by its connection, where the publisher has failed and may not answer."""
        if failed:
            self._drop_lead()
        elif self._rank == 0 and wanted.lease and self._lead is not None:
            with suppress(KosError, Stale, Restarted):
                self._ask("release", time.monotonic() + GRACE, wanted.incarnation, lease=wanted.lease)

    def _drop_lead(self) -> None:
        lead, self._lead = self._lead, None
        if lead is not None:
            lead.close()

    # --- reading ------------------------------------------------------------------------------------------

    def _pull(self, wanted: Version, deadline: float, verify: bool) -> int:
        """Read all boxes of a version.  Raises Stale, TransferError."""
        if self._known is None or self._known.incarnation != wanted.incarnation:
            self._known = None
            if self.catalogue(_left(deadline)).incarnation != wanted.incarnation:
                raise Stale
        known = self._known
        assert known is not None
        by_rank: dict[int, list[Copy]] = {}
        for copy in self._planned().copies(0):
            itemsize = max(copy.source.dtype.itemsize, self._layout[copy.array].dtype.itemsize)
            for each in _chunks(copy, itemsize):
                by_rank.setdefault(copy.source.rank, []).append(each)
        work: list[Callable[[], int]] = []
        for rank, copies in by_rank.items():
            requests, _ = [*_requests(copies)], self._map(rank)
            for stream in range(streams := min(self._streams, len(requests))):
                mine = requests[stream::streams]
                work.append(_Reader(self, known, wanted, rank, stream, mine, deadline, verify).run)
        self._ends = False
        try:
            with ThreadPoolExecutor(min(_MOST_THREADS, max(1, len(work))), "kos-subscriber") as pool:
                futures = [pool.submit(each) for each in work]
                try:
                    return sum(each.result() for each in as_completed(futures))
                except BaseException:
                    self._ends = True
                    pool.shutdown(wait=False, cancel_futures=True)
                    self._shut_data()  # so that the other readers end now
                    raise
        except BaseException:
            self._drop_data()
            raise

    def _map(self, rank: int) -> Buffers | None:
        """The mapped memory of a publisher rank, if that works."""
        known = self._known
        assert known is not None
        if rank not in self._mapped:
            where, found = known.ranks[rank], None
            if self._way != "tcp" and where.place == place():
                path = f"/proc/{where.pid}/fd/{where.file}"
                with suppress(KosError, OSError):
                    found = Buffers(known.layout(rank), known.count, known.incarnation, rank, path)
            if found is None and self._way == "shared":
                raise TransferError(f"{where.name(rank)}: expected memory that this process can map, got none")
            self._mapped[rank] = found
        return self._mapped[rank]

    def _shut_data(self) -> None:
        for each in list(self._data.values()):
            with suppress(OSError):
                each.sock.shutdown(socket.SHUT_RDWR)

    def _drop_data(self) -> None:
        for each in self._data.values():
            each.close()
        self._data.clear()


class _Reader:
    """Reads some requests from one publisher rank, in a thread of its own."""

    def __init__(
        self, subscriber: Subscriber, known: Catalogue, wanted: Version, rank: int, stream: int,
        requests: Sequence[Sequence[Copy]], deadline: float, verify: bool,
    ) -> None:  # fmt: skip
        self._of, self._known, self._wanted, self._rank, self._stream = subscriber, known, wanted, rank, stream
        self._requests, self._deadline, self._verify = requests, deadline, verify
        self._mapped, self._where = subscriber._mapped[rank], known.ranks[rank]

    def run(self) -> int:
        try:
            if self._mapped is not None:
                return self._read_mapped(self._mapped)
            return self._read_tcp()
        except (OSError, ValueError, KosError) as error:
            tensors = sorted({copy.tensor for request in self._requests for copy in request})
            what = f"{self._known.name}: {self._where.name(self._rank)}, from which {tensors[0]}"
            what += f" and {len(tensors) - 1} more tensors are read" if len(tensors) > 1 else " is read"
            if isinstance(error, KosError) and not isinstance(error, TimeoutError):
                raise TransferError(f"{what}: {in_words(error)}", ranks=[self._rank]) from error
            failure = late(what, self._deadline, error)
            failure.ranks = (self._rank,)
            raise failure from error
        except Restarted:
            raise Stale from None

    def _view(self, copy: Copy) -> np.ndarray[Any, Any]:
        return copy.part.view(self._of._into[copy.array], copy.start, copy.size)

    def _read_mapped(self, memory: Buffers) -> int:
        serial, nbytes = self._wanted.serial, 0
        if not memory.holds(serial):
            raise Stale
        for request in self._requests:
            if time.monotonic() > self._deadline:
                raise TimeoutError
            for copy in request:
                source = copy.source.part.view(memory.array(copy.source.array, serial), copy.start, copy.size)
                np.copyto(self._view(copy), source, casting="unsafe")
                nbytes += source.nbytes
            if self._verify:
                self._compare(request, self._exchange(request, "check")["sum"])
                self._complete()
        if not memory.holds(serial):
            raise Stale
        return nbytes

    def _read_tcp(self) -> int:
        nbytes, scratch = 0, np.empty(CHUNK, np.uint8)
        for index, request in enumerate(self._requests):
            if index == 0:
                self._post(request, "read")
            answer = answered(receive(self._connection(), self._deadline), self._wanted.incarnation)
            if index + 1 < len(self._requests):  # while the bytes of this one come
                self._post(self._requests[index + 1], "read")
            for copy in request:
                nbytes += self._take(copy, scratch)
            self._complete()
            if self._verify:
                self._compare(request, answer["sum"])
        return nbytes

    def _take(self, copy: Copy, scratch: np.ndarray[Any, Any]) -> int:
        """Receive one box."""
        view, dtype, connection = self._view(copy), self._dtype(copy), self._connection()
        count = copy.count * dtype.itemsize
        if dtype.numpy == view.dtype and view.flags.c_contiguous:
            memory = as_bytes(view)
            drive(fill(connection.sock, lambda: memory), connection.sock, self._deadline)
        else:
            memory = scratch[:count].data
            drive(fill(connection.sock, lambda: memory), connection.sock, self._deadline)
            np.copyto(view, scratch[:count].view(dtype.numpy).reshape(view.shape), casting="unsafe")
        return count

    def _dtype(self, copy: Copy) -> DType:
        """Of the bytes that travel."""
        mine = BY_NUMPY[self._of._into[copy.array].dtype]
        return mine if self._verify or mine.itemsize < copy.source.dtype.itemsize else copy.source.dtype

    def _connection(self) -> Connection:
        key = self._rank, self._stream
        if self._of._ends:
            raise ConnectionError("another reader has failed")
        if key not in self._of._data:
            self._of._data[key] = self._of._call(self._where.host, self._where.port, self._deadline)
        return self._of._data[key]

    def _post(self, request: Sequence[Copy], ask: str) -> None:
        boxes: list[Any] = []
        for copy in request:
            where = copy.source
            at: Box = where.array, where.part.at(copy.start), copy.size, where.part.strides
            boxes.append([at[0], self._dtype(copy).name, *at[1:]])
        message = {"ask": ask, "serial": self._wanted.serial, "boxes": boxes, "verify": self._verify}
        send(self._connection(), message, self._wanted.incarnation, self._deadline)

    def _exchange(self, request: Sequence[Copy], ask: str) -> dict[str, Any]:
        self._post(request, ask)
        return answered(receive(self._connection(), self._deadline), self._wanted.incarnation)

    def _complete(self) -> None:
        """The publisher still had the version after it sent the bytes, or Stale."""
        answered(receive(self._connection(), self._deadline), self._wanted.incarnation)

    def _compare(self, request: Sequence[Copy], expected: int) -> None:
        got = checksum(map(self._view, request))
        if got != expected:
            names = ", ".join(sorted({copy.tensor for copy in request}))
            raise TransferError(f"{names}: expected checksum {expected:08x}, got {got:08x}")


def _left(deadline: float) -> float:
    return max(deadline - time.monotonic(), 0.001)


def _chunks(copy: Copy, itemsize: int) -> Iterator[Copy]:
    """A copy in pieces of at most ``CHUNK`` bytes, split along its first axes."""
    nbytes = copy.count * itemsize
    axis = next((axis for axis, count in enumerate(copy.size) if count > 1), None)
    if nbytes <= CHUNK or axis is None:
        yield copy
        return
    step = max(1, copy.size[axis] * CHUNK // nbytes)
    for first in range(0, copy.size[axis], step):
        count = min(step, copy.size[axis] - first)
        start = (*copy.start[:axis], copy.start[axis] + first, *copy.start[axis + 1 :])
        yield from _chunks(copy._replace(start=start, size=(*copy.size[:axis], count, *copy.size[axis + 1 :])), itemsize)


def _requests(copies: Sequence[Copy]) -> Iterator[list[Copy]]:
    """Copies that are asked for at once: at most ``CHUNK`` bytes and ``_MOST_BOXES`` boxes."""
    found, nbytes = list[Copy](), 0
    for copy in copies:
        size = copy.count * copy.source.dtype.itemsize
        if found and (nbytes + size > CHUNK or len(found) == _MOST_BOXES):
            yield found
            found, nbytes = [], 0
        found.append(copy)
        nbytes += size
    if found:
        yield found


