"""The side that has the weights.

Each publisher rank copies its arrays into a buffer of its own (``buffers.py``), and has threads that send parts of it
to subscribers.  Rank 0 also knows which version is visible, and which subscribers read it (``VersionLeases``).
``publish`` is the only method that waits for other ranks, and it waits for subscribers at most ``patience`` seconds.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from typing import Any, Literal

import numpy as np

from kos.comm.arguments import check_bool, check_int
from kos.comm.communicator import Communicator
from kos.comm.control.network import bound
from kos.comm.control.place import own_address
from kos.comm.control.wire import Acceptor, Connection
from kos.dtypes import DTYPES
from kos.errors import CollectiveMismatch, InvalidArgument, KosError, RendezvousError, TransferError, in_words
from kos.memory import ipc
from kos.memory.array import Array
from kos.transfer import exchange
from kos.transfer.arguments import check_arrays, check_at_least, check_comm, check_name, check_one_of, check_patience
from kos.transfer.buffers import Buffers
from kos.transfer.exchange import GRACE, Address, Stale
from kos.transfer.gpu import Copiers
from kos.transfer.local_arrays import LocalArrays
from kos.transfer.one_caller import OneCaller
from kos.transfer.placement import Arrays, Placement, box
from kos.transfer.plan import whole_shapes

IDLE_SECONDS = 3600.0
"""A connection is closed if the subscriber sends nothing for this time.  The subscriber then connects again."""
SEND_SECONDS = 60.0
"""The longest that a subscriber may take to receive the answer to one request."""
LONGEST_LEASE = 600.0
_ADMIT_SECONDS = 0.2
_COPY_SECONDS = 120.0  # the longest that ``publish`` waits for GPUs, if there is no communicator
_CLOSE_SECONDS = 5.0  # the thread that accepts ends within _ADMIT_SECONDS, unless the machine is very busy
_log = logging.getLogger(__name__)


class VersionLeases:
    """The visible version, and the version that each subscriber reads; on rank 0 of a publisher."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.newest: tuple[int, int] | None = None
        """The serial and the number of the visible version."""
        self._leases: dict[Connection, tuple[int, float]] = {}  # -> serial, deadline

    def lease(self, holder: Connection, have: int | None, wait: float, seconds: float) -> tuple[int | None, int]:
        """The serial and the number of the newest version; (None, 0) if there is none.

        ``holder`` gets a lease on it for ``seconds``, unless it already has the version (``have``).  Waits at most
        ``wait`` seconds for the first version.
        """
        with self._changed:
            self._changed.wait_for(lambda: self.newest is not None, wait)
            if self.newest is None:
                return None, 0
            if self.newest[0] != have:
                self._leases[holder] = self.newest[0], time.monotonic() + min(seconds, LONGEST_LEASE)
            return self.newest

    def release(self, holder: Connection) -> None:
        with self._changed:
            self._leases.pop(holder, None)
            self._changed.notify_all()

    def reclaim(self, serial: int, patience: float, hide: bool) -> int:
        """Wait at most ``patience`` seconds for the readers of ``serial``; returns how many still read it.

        ``hide``: this version is visible now, and is no longer visible from now on.
        """
        limit = time.monotonic() + patience
        with self._changed:
            self.newest = None if hide else self.newest
            while True:
                now = time.monotonic()
                readers = [until for of, until in self._leases.values() if of == serial and until > now]
                if not readers or limit <= now:
                    self._leases = {holder: lease for holder, lease in self._leases.items() if lease[0] != serial}
                    return len(readers)
                self._changed.wait(min(limit, *readers) - now)

    def show(self, newest: tuple[int, int] | None) -> None:
        with self._changed:
            self.newest = newest
            self._changed.notify_all()


class Publisher(OneCaller):
    """Offers the arrays of the ranks of ``comm`` to subscribers, which pull them.  Collective.

    Args:
        comm: the communicator; None: one process alone.
        arrays: the arrays of this rank, on the host or on GPUs, and what each holds.  ``publish`` copies them.
        address: "HOST:PORT" at which subscribers reach rank 0.  HOST is an address of its host, or with ``KOS_BIND``
            another address that is routed to it.  With port 0, a free port is chosen; see ``self.address``.
        name: the name of the publisher in errors.
        buffers: how many versions are in memory at once.  Each takes as much memory as the arrays.  With 2, the last
            version can be read while the next one is written.  With 1, no version is visible while one is written.
        memory: where the copies of arrays on a GPU are: "device", on that GPU, or "host", in pinned host memory.
        patience: how many seconds ``publish`` waits for subscribers that still read the buffer that it uses next.
            This must be less than the timeout of ``comm``, because the other ranks wait for rank 0 meanwhile.
        checksums: compute a checksum (CRC-32) of each array at ``publish``, on one core, for ``update(verify=True)``.

    A rank raises InvalidArgument if its arguments are wrong; TransferError if it cannot listen (rank 0: at
    ``address``) or cannot use its secret (``KOS_SECRET``); and OutOfMemory.  The other ranks then raise a TransferError
    that names this rank.  All ranks raise InvalidArgument if none has an array, or if they differ in the shape or the
    dtype of a tensor, and CollectiveMismatch if they differ in ``address``, ``name``, ``buffers`` or ``checksums``.
    """

    def __init__(
        self, comm: Communicator | None, arrays: Arrays, address: str = "127.0.0.1:0", *, name: str = "trainer",
        buffers: int = 2, memory: Literal["device", "host"] = "device", patience: float = 1.0, checksums: bool = False,
    ) -> None:  # fmt: skip
        check_comm(comm)
        self.name, self.rank, self._comm = name, 0 if comm is None else comm.rank, comm
        super().__init__(f"publisher {name}")
        self._serial = 0
        self._sums: dict[int, dict[str, int]] = {}
        self._connections, self._versions = set[Connection](), VersionLeases()

        def start() -> list[Any]:
            check_name("name", name)
            self._checksums, self._patience = check_bool("checksums", checksums), check_patience(patience, comm)
            settings = {"name": name, "buffers": check_at_least("buffers", buffers, 1), "checksums": self._checksums}
            check_one_of("memory", memory, "device", "host")
            self._held = LocalArrays(check_arrays(arrays, Placement), False)
            self._allocate(buffers, memory)
            place, layout = exchange.parse(address), json.dumps(exchange.layout_to_json(self._layout))
            return [{"address": address, **settings}, self._listen(*place), layout]

        try:
            facts = self._together(start)
            groups = _agreed([settings for settings, *_ in facts], [layout for *_, layout in facts])
        except BaseException:
            for each in ("_acceptor", "_buffers"):  # this rank may have made them before another one failed
                if hasattr(self, each):
                    getattr(self, each).close()
            raise
        ranks = [Address(*where) for _, where, _ in facts]
        self.address = f"{exchange.parse(address)[0]}:{ranks[0].port}"
        """The address for subscribers."""
        self.incarnation = ranks[0].token
        self._catalogue = {"name": name, "buffers": buffers, "ranks": ranks, "groups": groups}
        self._thread = threading.Thread(target=self._accept, name="kos-publisher", daemon=True)
        self._thread.start()

    def _allocate(self, buffers: int, memory: str) -> None:
        """Allocate the buffers, on the GPUs of the arrays or on the host."""
        self._layout, devices = self._held.layout, [*self._held.copiers]
        if memory == "host":
            self._layout = {name: each._replace(gpu=0) for name, each in self._layout.items()}
        used = sorted({each.gpu for each in self._layout.values()} - {0})
        self._buffers = Buffers(
            self._layout, buffers, secrets.token_hex(16), used,
            lambda gpu, nbytes: ipc.DeviceMemory(nbytes, devices[gpu - 1]),
        )  # fmt: skip
        if devices and not used:
            self._buffers.pin(devices[0])

    def _listen(self, host: str, port: int) -> Address:
        net = exchange.network(host)
        own = host if self.rank == 0 or net.loopback else bound() or own_address(host)
        try:
            listener = net.listen() if self.rank else exchange.listen(host, port)
        except (OSError, RendezvousError) as error:
            expected = f"expected rank {self.rank} to listen at {f'{host}:{port}' if self.rank == 0 else 'a free port'}"
            raise TransferError(f"address: {expected}, got: {error}") from error
        self._acceptor = Acceptor(listener, net.key(exchange.PURPOSE))
        nbytes = sum(each.nbytes for each in self._held.flat.values())
        memories = self._buffers.gpus.values()
        gpus = [ipc.export(each.pointer, each.nbytes, each.device).to_bytes().decode() for each in memories]
        where = exchange.place(), os.getpid(), self._buffers.file, self._buffers.token
        return Address(own, listener.getsockname()[1], *where, nbytes, gpus)

    def _together(self, work: Callable[[], Any]) -> list[Any]:
        return exchange.together(self._comm, "Publisher: rank", work)

    def publish(self, version: int) -> int:
        """Copy the arrays, and make them visible as ``version``.  Collective.

        Returns how many subscribers still read the version whose buffer was used again.  These subscribers discard what
        they have read, and read the newest version instead.  The arrays may change after the call.  On a GPU, the copy
        is ordered behind the work that is queued on the current stream of the array's library, and ``publish`` waits
        for the copy.  An error on one rank is raised on all ranks, and then the version is not visible.

        Raises InvalidArgument if the version is not a whole number, or while that stream is captured;
        CollectiveMismatch for different versions; TransferTimeout if a GPU has not made its copies within half of the
        timeout of ``comm`` (120 s without one); TransferError after ``close``, in a forked process, and while another
        thread is in ``publish``; RankLost if another rank has ended, and CollectiveTimeout if one is late.
        """
        with self._calling("publish"):
            return self._publish(version)

    def _publish(self, version: int) -> int:
        serial, buffers, shown = self._serial + 1, self._buffers.count, self._versions.newest

        def begin() -> list[int]:
            self._check_open()
            self._held.follow()
            number = check_int("version", version)
            return [number, serial, self._versions.reclaim(serial - buffers, self._patience, buffers == 1)]

        try:
            first, *others = self._together(begin)
            if wrong := [rank for rank, each in enumerate(others, 1) if each[:2] != first[:2]]:
                expected, got = f"version {first[0]} on all ranks", f"{others[wrong[0] - 1][0]} on rank {wrong[0]}"
                raise CollectiveMismatch(f"publish: expected {expected}, got {got}", ranks=wrong[:1])
        except BaseException:
            self._versions.show(shown)  # no buffer was written
            raise
        self._together(lambda: self._write(serial))
        self._serial = serial
        self._versions.show((serial, first[0]))
        return int(first[2])

    def _write(self, serial: int) -> None:
        self._buffers.write(serial, lambda: self._copy(serial))
        self._sums.pop(serial - self._buffers.count, None)  # not earlier: its readers may still compare
        if self._checksums:
            copiers = self._held.copiers
            self._sums[serial] = {name: self._checksum(name, serial, copiers) for name in self._layout}

    def _copy(self, serial: int) -> None:
        limit = time.monotonic() + (_COPY_SECONDS if self._comm is None else self._comm.timeout / 2)
        pairs = [(self._buffers.array(name, serial), source) for name, source in self._held.flat.items()]
        self._held.copy(serial % self._buffers.count, pairs)
        self._held.copiers.wait(limit)

    def _checksum(self, name: str, serial: int, copiers: Copiers) -> int:
        array = self._buffers.array(name, serial)
        if isinstance(array, Array):
            return exchange.checksum(copiers.of(array.device, time.monotonic() + SEND_SECONDS).pieces(array))
        return exchange.checksum([array])

    # --- the threads that answer subscribers ------------------------------------------------------------

    def _accept(self) -> None:
        refused = 0
        while not self._closed:
            caller = None
            try:
                caller = self._acceptor.admit(_ADMIT_SECONDS)
                for who in self._acceptor.rejected[refused:]:
                    expected = "expected the secret of this publisher (KOS_SECRET), got another"
                    _log.warning("publisher %s: rank %d refused subscriber %s: %s", self.name, self.rank, who, expected)
                refused = len(self._acceptor.rejected)
                if caller:
                    threading.Thread(
                        target=self._serve, args=caller[2:], name="kos-publisher-connection", daemon=True
                    ).start()
            except (OSError, RuntimeError) as error:  # no file descriptor, or no thread, is left
                if caller:
                    caller[2].close()
                if not self._closed:
                    _log.warning("publisher %s: rank %d: %s", self.name, self.rank, error)
                    time.sleep(_ADMIT_SECONDS)
        self._acceptor.close()

    def _serve(self, connection: Connection) -> None:
        """Answer the requests of one connection until it ends."""
        with closing(connection):
            self._connections.add(connection)
            copiers = Copiers()  # their pinned memory holds the bytes that are sent
            try:
                while not self._closed:
                    request = exchange.receive(connection, time.monotonic() + IDLE_SECONDS)
                    self._answer(connection, request, copiers)
            except (OSError, KosError, ValueError, LookupError, TypeError) as error:
                _log.debug("publisher %s: rank %d: a subscriber's connection ended: %s", self.name, self.rank, error)
            finally:
                self._versions.release(connection)
                self._connections.discard(connection)

    def _answer(self, connection: Connection, request: dict[str, Any], copiers: Copiers) -> None:
        deadline, memory = time.monotonic() + SEND_SECONDS, list[np.ndarray[Any, Any]]()
        answer: dict[str, Any] = {}
        try:
            exchange.answered(request, self.incarnation)
            if request["ask"] == "catalogue":
                answer = self._catalogue
            elif request["ask"] == "newest":
                wait, have = min(float(request["wait"]), GRACE), request["have"]
                serial, version = self._versions.lease(connection, have, wait, float(request["seconds"]))
                answer = {"serial": serial, "version": version}
            elif request["ask"] == "release":
                self._versions.release(connection)
                return  # nobody waits for an answer
            else:
                memory = self._read(request, copiers)
                answer = {"sum": exchange.checksum(memory)} if request["verify"] else {}
        except Stale:
            answer, memory = {"stale": True}, []
        except KosError as error:
            answer, memory = {"error": in_words(error)}, []
        exchange.send(connection, answer, self.incarnation, deadline)
        for each in memory:
            connection.sock.settimeout(max(deadline - time.monotonic(), 0.001))
            connection.sock.sendall(exchange.as_bytes(each))
        connection.sock.setblocking(False)
        if request["ask"] == "read":  # whether the bytes before it are those of the version
            exchange.send(connection, {"stale": not self._buffers.holds(request["serial"])}, self.incarnation, deadline)

    def _read(self, request: dict[str, Any], copiers: Copiers) -> list[np.ndarray[Any, Any]]:
        """The requested boxes in the requested dtypes.  All are from arrays on the host, or all are from one GPU."""
        serial, boxes = int(request["serial"]), request["boxes"]
        if not self._buffers.holds(serial):
            raise Stale
        for name in request.get("compare", ()) if self._checksums else ():
            self._compare(serial, name, copiers)
        arrays = [self._buffers.array(name, serial) for name, *_ in boxes]  # they keep memory alive after ``close``
        views = [
            (box(array, int(offset), tuple(size), tuple(strides)), DTYPES[dtype])
            for array, (_, dtype, offset, size, strides) in zip(arrays, boxes, strict=True)
        ]
        if isinstance(arrays[0], Array):
            return copiers.of(arrays[0].device, time.monotonic() + SEND_SECONDS).get(views)
        return [np.ascontiguousarray(view, dtype.numpy) for view, dtype in views]

    def _compare(self, serial: int, name: str, copiers: Copiers) -> None:
        """Compare an array with its checksum at ``publish``.  Raises Stale, TransferError."""
        same = self._checksum(name, serial, copiers) == self._sums.get(serial, {}).get(name)
        if not self._buffers.holds(serial):
            raise Stale
        if not same:
            raise TransferError(f"rank {self.rank}: {name}: the published bytes have changed since")

    def close(self) -> None:
        """Stop answering, and free the memory.  Not collective; waits for no other process.

        A subscriber that reads meanwhile raises TransferError.  The kernel frees host memory when the last subscriber
        has unmapped it.  GPU memory is freed now, unless subscribers in this process map it.  CUDA does not define what
        other processes then read from it; their ``update`` detects the end of the publisher and raises.
        After a ``publish`` that timed out, ``close`` waits at most 5 s for the copies that are still queued.
        If another thread is in ``publish``, that thread frees the memory when ``publish`` ends.  In a forked process,
        ``close`` does nothing.
        """
        super().close()

    def _interrupt(self) -> None:
        exchange.shut_down(self._connections.copy())  # the thread of each then ends, and closes it
        self._thread.join(_CLOSE_SECONDS)  # then its port is free

    def _free(self) -> None:
        with suppress(KosError):
            self._held.copiers.wait(time.monotonic() + _CLOSE_SECONDS)
        self._buffers.close()


def _agreed(settings: Sequence[dict[str, Any]], layouts: Sequence[str]) -> list[tuple[dict[str, Any], list[int]]]:
    """Check that all ranks agree.  Returns pairs of a layout and the ranks that have it.

    ``settings`` and ``layouts`` have an item for each rank; the layouts are in JSON.  Raises CollectiveMismatch if
    settings differ, and InvalidArgument if ranks differ in a tensor, or all layouts are empty.
    """
    for rank, mine in enumerate(settings):
        for what, value in mine.items():
            if value != (first := settings[0][what]):
                expected = f"{what}={first!r} on all ranks, as on rank 0"
                raise CollectiveMismatch(f"Publisher: expected {expected}, got {value!r} on rank {rank}", ranks=[rank])
    if set(layouts) == {"{}"}:
        raise InvalidArgument("arrays: expected at least one on some rank, got none")
    alike = dict[str, list[int]]()
    for rank, layout in enumerate(layouts):
        alike.setdefault(layout, []).append(rank)
    groups = [(json.loads(layout), ranks) for layout, ranks in alike.items()]
    whole_shapes([(exchange.layout_from_json(layout), ranks) for layout, ranks in groups])
    return groups
