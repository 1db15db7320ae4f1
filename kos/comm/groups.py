"""Groups of a communicator's ranks (split, grid, duplicate, shrink after a loss), and small exchanges among them."""

from __future__ import annotations

import itertools
import json
import time
import weakref
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from sys import intern
from typing import Any, Literal, Self, overload

import numpy as np

from kos.comm.arguments import (
    NCCLOptions,
    check_nccl,
    check_rank,
    check_ranks,
    check_timeout,
    number_in,
)
from kos.comm.call_guards import interruptible
from kos.comm.collectives import Operations
from kos.comm.contract import CHANGES, UNMADE, Probe
from kos.comm.control.base import ControlPlane
from kos.comm.control.grow import CONFIRM_SECONDS, attempt_seconds
from kos.comm.control.store import KeyValueStore
from kos.comm.create import communicator, versions
from kos.comm.grid import Grid, grid_sizes
from kos.comm.operation import Operation
from kos.comm.recorder import Group, Recorder
from kos.errors import CollectiveError, InvalidArgument, KosError, OutOfMemory, RankLost, RendezvousError
from kos.memory import as_buffer

FRAME_BYTES, _LENGTH_BYTES = 128, 8
"""Sizes in the first exchange of ``all_gather_bytes`` and the like: bytes per rank, and the bytes of its length."""


class Groups(Operations):
    """Makes communicators of the ranks of this one, compares such calls between ranks, and exchanges bytes."""

    name: str
    backend_name: str
    _suffix: str
    rendezvous: ControlPlane
    probes: Mapping[str, Probe]
    recorder: Recorder
    timeout: Any
    device: int | None
    _parts: Sequence[Any]
    _requested = "auto", False
    """The backend that the program asked for, and whether with a progress thread."""
    _changing = False  # ended by a change of the membership, which is not complete
    _splits: itertools.count[int]
    _groups: weakref.WeakSet[Any]
    """Those split from this one."""

    @abstractmethod
    def _signal_end(self, reason: str) -> None: ...

    @abstractmethod
    def _abort_groups(self, reason: str) -> None: ...

    @abstractmethod
    def _end(self, reason: str) -> None: ...

    @overload
    def split(self, color: Literal["host"], key: int = ..., *, nccl: NCCLOptions | None = ...) -> Self: ...
    @overload
    def split(self, color: int | None, key: int = ..., *, nccl: NCCLOptions | None = ...) -> Self | None: ...
    @interruptible
    def split(
        self, color: int | Literal["host"] | None, key: int = 0, *, nccl: NCCLOptions | None = None
    ) -> Self | None:
        """The communicator of the ranks that passed the same ``color``, ranked by (key, rank).

        Collective.  ``color`` is from 0 to 2,147,483,647, ``key`` any C int.  A rank with color None participates and
        gets None.  On all ranks ``color`` may be "host": a communicator for each host.  ``nccl`` are options of NCCL
        for the new communicators, the same on all ranks; others are inherited.  Waits for the collectives in flight,
        and not for messages.  Raises InvalidArgument, CollectiveMismatch, CollectiveTimeout, RankLost.

            pair = comm.split(comm.rank // 2)
        """
        largest = (1 << 31) - 1  # a C int, for MPI
        key = number_in("key", key, -largest - 1, largest)
        if isinstance(color, str) and color == "host":
            host = self.local_ranks[0]
            return self._split(host, key, f"host{host}", "each host", nccl)
        color = None if color is None else number_in("color", color, 0, largest, ' or None or "host"')
        return self._split(color, key, str(color), nccl=nccl)

    @interruptible
    def group(self, ranks: Sequence[int], *, nccl: NCCLOptions | None = None) -> Self | None:
        """The communicator of these ranks, in this order; other ranks get None.

        Collective: all ranks of this communicator call it, with the same ``ranks`` and ``nccl``, as in ``split``.
        Raises InvalidArgument unless ``ranks`` are different ranks of this communicator, and the errors of ``split``.

            evens = comm.group(range(0, comm.size, 2))
        """
        members = check_ranks("ranks", ranks, self.size)
        color, key = (0, members.index(self.rank)) if self.rank in members else (None, 0)
        return self._split(color, key, "group", f"ranks {members}", nccl, call="group")

    @interruptible
    def grid(self, shape: Sequence[int], *, nccl: NCCLOptions | None = None) -> Grid[Self]:
        """A communicator for each axis of a grid of all ranks, whose last axis varies fastest.

        ``shape`` are the sizes of the axes, with a product of ``size``.  One of them may be -1: it is inferred, as in
        NumPy's reshape.  The communicator of axis ``a`` holds the ranks whose coordinates differ from this rank's along
        ``a`` alone; its ``rank`` is this rank's coordinate.  ``shift`` of the result returns neighbours.
        Collective, with the same ``shape`` and ``nccl`` on all ranks, as in ``split``.  Raises InvalidArgument if the
        product is not ``size``, and the errors of ``split``.

            column, row = comm.grid((2, -1))           # of 8 ranks: column.size == 2, row.size == 4
        """
        sizes = grid_sizes(shape, self.size)
        place, axes = np.unravel_index(self.rank, sizes), []
        for axis in range(len(sizes)):
            first = np.ravel_multi_index([0 if a == axis else at for a, at in enumerate(place)], sizes)
            group = self._split(int(first), self.rank, f"axis{axis}-{first}", f"shape {sizes}", nccl, call="grid")
            assert group is not None
            axes.append(group)
        grid = Grid(axes)
        grid.shape, grid.coordinates = sizes, tuple(map(int, place))
        return grid

    @property
    def store(self) -> KeyValueStore:
        """The key-value store of this communicator, for control data."""
        return KeyValueStore(self)

    @property
    def local_ranks(self) -> list[int]:
        """The ranks of this communicator on this rank's host, ascending."""
        return self.rendezvous.local_ranks

    @interruptible
    def duplicate(self) -> Self:
        """Another communicator over the same ranks, whose operations never match this one's.  Collective.

        A library uses a duplicate for its own operations.  Raises CollectiveMismatch, CollectiveTimeout, RankLost.

            mine = comm.duplicate()
        """
        duplicate = self._split(0, self.rank, "duplicate", call="duplicate")
        assert duplicate is not None
        return duplicate

    def _split(
        self, color: int | None, key: int, label: str, purpose: str = "", nccl: NCCLOptions | None = None,
        call: str = "split",
    ) -> Self | None:  # fmt: skip
        """``purpose``, which errors name after the call, must be equal on all ranks, as the options of NCCL must."""
        options = self._nccl_options(nccl)
        if nccl is not None:
            purpose = ", ".join(filter(None, (purpose, f"nccl {options}")))
        self._check_open()
        messages = self._settle(call)
        timed = self._defaults._replace(purpose=purpose)
        operation = Operation(call, self.rank, timed)
        self._agree(operation, f"{call} for {purpose}" if purpose else call)
        name = f"{self.name}.{next(self._splits)}"  # the same on all ranks
        with self._exchange(call):
            if self.device is not None:
                self.backend.messages_queued = any(self.rendezvous.allgather(b"+" if messages else b""))
            rendezvous = self.rendezvous.split(color, key)
            if rendezvous is not None:
                rendezvous.nccl = options
            group = self._descendant(f"{name}:{label}", rendezvous, color, key)
            if group is not None:
                self._groups.add(group)
            return group

    def _nccl_options(self, given: NCCLOptions | None) -> dict[str, Any]:
        """Those of this communicator, replaced by those given."""
        options = check_nccl(given)
        if options and "nccl" not in self.backend_name.split("+"):
            raise InvalidArgument(f"nccl: expected None without the backend nccl, got {options} on {self.backend_name}")
        return {**self.rendezvous.nccl, **options}

    def _settle(self, call: str) -> bool:
        """Wait for the collectives in flight before ``call``, but not for messages: these may match later ones.

        Returns whether messages may still be queued on the GPU.
        """
        self.rendezvous.failures.refuse(call)
        for work in self.backend.engine.works_of(self._parts):
            if work.collective and not getattr(work.steps, "gi_running", False):
                work.wait()
        return self.device is not None and bool(self.backend.settle(self.timeout))

    def _agree(self, control: Operation, call: str) -> None:
        """Check that the other ranks make the same control-plane call."""
        if self.host is not None:
            self._start(control)
        else:
            with self._exchange(call):
                self.rendezvous.barrier()

    def shrink(self, *, timeout: float | None = None) -> Self:
        """The communicator of the surviving ranks, in their order, after some were lost; all survivors call it.

        This communicator and the groups split from it are aborted.  Ranks that still wait in one of their operations
        raise RankLost.  To have the groups again, split the result.  The launcher must let survivors live (mpirun:
        ``--with-ft ulfm``).  Ranks of MPI continue over tcp.  A rank that is stopped is left out too if it does not
        call within the timeout, or within half of it if the failure names this rank.  When it wakes up, its next call
        raises.  ``timeout`` is in seconds, and is counted from the first survivor's call.  None is the communicator's
        own.

        Raises BackendUnavailable under mpirun on hosts that do not reach each other by TCP.  Raises RendezvousError if
        another survivor does not call it within the timeout; the program may then call it again.  Raises RankLost on a
        rank that the others have left out.  A rank that cannot be reached counts as lost, so if a network splits in
        two, both parts continue.

            try:
                comm.all_reduce(x)
            except RankLost:
                comm = comm.shrink()
        """
        return self._change("shrink", 0, timeout)

    def grow(self, n: int, *, timeout: float | None = None) -> Self:
        """The communicator of all ranks of this one, in their order, and of ``n`` newcomers after them.

        Collective.  The newcomers call ``kos.join`` with ``address``, before or after.  The result is a world of its
        own: errors name ranks by their numbers in it.  This communicator and the groups split from it are aborted when
        the new one is complete.  On GPUs, arrays of ``allocate`` are then invalid.  Ranks of MPI continue over tcp.
        ``timeout`` is in seconds; None is the communicator's own.

        Raises InvalidArgument for an ``n`` below 1; RankLost if a rank is lost; RendezvousError at the timeout, which
        says how many newcomers came; BackendUnavailable as in ``shrink``, or if the newcomers cannot use the backend.
        After an error, this communicator is as it was.

            comm = comm.grow(2, timeout=600)
        """
        n = number_in("n", n, 1, 1 << 20)
        self._check_open()
        self._settle("grow")
        return self._change(f"grow {n}", n, timeout)

    def replace(self, n: int | None = None, *, timeout: float | None = None) -> Self:
        """``shrink`` and ``grow`` in one agreement: the surviving ranks, in their order, and newcomers after them.

        All survivors call it, and ``n`` newcomers call ``kos.join``.  By default, ``n`` is the number of lost ranks.
        This communicator and the groups split from it are aborted first, as in ``shrink``.  ``timeout`` and the result
        are as in ``grow``.

        Raises InvalidArgument for an ``n`` below 0, and the errors of ``shrink`` and ``grow``.  After RendezvousError,
        the program may call ``shrink`` or ``replace`` again.

            try:
                comm.all_reduce(x)
            except RankLost:
                comm = comm.replace(timeout=60)
        """
        n = None if n is None else number_in("n", n, 0, 1 << 20)
        return self._change("replace" if n is None else f"replace {n}", n, timeout)

    @property
    def address(self) -> str:
        """Where newcomers call with ``kos.join``: the first ranks, as "host:port", with commas.  Not collective.

        If it is a loopback address, newcomers must be on this host.  It changes with the membership, unless rank 0
        stays.  It is "" if ranks cannot join, which is so under mpirun on hosts that do not reach each other by TCP.

            print(comm.address)
        """
        return self.rendezvous.address

    def newcomers(self) -> int:
        """How many newcomers wait at this rank for ``grow`` or ``replace``.  Not collective; does not wait.

        Newcomers connect to one of the first 8 ranks.  A newcomer is counted after three calls of this method, which
        its handshake needs.  Raises CollectiveError if the communicator is closed.

            joining = comm.broadcast(np.array(comm.newcomers()), 0)
        """
        self._check_open()
        return self.rendezvous.newcomers()

    def _change(self, call: str, newcomers: int | None, timeout: float | None) -> Self:
        """The communicator of another membership.  All but ``grow`` end this one first: ranks may wait in it."""
        if not self._changing:
            self._check_open()
        self.rendezvous.check_change(call)
        grows, reason = call.startswith("grow"), str(self.rendezvous.failures.first or CHANGES)
        limit = self.rendezvous.timeout if timeout is None else check_timeout(timeout)
        begins, repeats = time.monotonic(), False
        if not grows:
            self._change_ends(reason)
        with self._exchange(call, limit):
            while True:
                rendezvous = self.rendezvous.change(call, newcomers, grows, self._terms(), begins if repeats else None)
                left = begins + limit - time.monotonic()
                rendezvous.nccl = self.rendezvous.nccl
                rendezvous.timeout = max(left, min(limit, CONFIRM_SECONDS)) if newcomers == 0 else attempt_seconds(left)
                try:
                    group = self._successor(call, rendezvous)
                    break
                except KosError as error:  # again, with the surviving ranks
                    repeats = self.rendezvous.lose_newcomers(error.ranks) or (
                        isinstance(error, RankLost) and time.monotonic() <= begins + limit
                    )
                    error.ranks = error.ranks if call == "shrink" else ()  # ranks of a group that was not made
                    if not repeats:
                        raise
        if grows:
            self._change_ends(reason)
        self.rendezvous.close()
        self.rendezvous.failures.status.release()
        self._changing = False
        return group

    def _change_ends(self, reason: str) -> None:
        """End this communicator, except for its rendezvous and what it knows of the processes of the host."""
        if not self._changing:
            self.rendezvous.failures.status.hold()
            self._signal_end(reason)
            self._abort_groups(reason)
            self._end(reason)
            self._changing = True

    def _successor(self, call: str, rendezvous: ControlPlane) -> Self:
        if call == "shrink":
            # The name has no number: a split in which a rank was lost has advanced the count on some ranks only.
            group = self._descendant(f"{self.name}:shrunk", rendezvous, 0, rendezvous.rank)
            assert group is not None
            rendezvous.name_hosts()  # of which lost ranks are no part any more
            group.timeout = self.timeout
            return group
        backend, progress_thread = self._terms()["backend"], self._requested[1]
        made: Self = communicator(
            type(self), backend, rendezvous, self.timeout, self.device, progress_thread, agreed=True
        )
        return made

    def _terms(self) -> dict[str, Any]:
        """The properties of this communicator that are sent to newcomers, of JSON's types."""
        backend = "tcp" if self._requested[0] == "mpi" else self._requested[0]
        return {
            "kos": versions()["kos"], "backend": backend, "timeout": self.timeout, "GPU": self.device is not None,
            "nccl": dict(self.rendezvous.nccl),
        }  # fmt: skip

    @interruptible
    def all_gather_bytes(self, data: bytes, *, timeout: float | None = None) -> list[bytes]:
        """All ranks' ``data``, of any lengths, in rank order.  Collective; for small control data.

        ``timeout`` in seconds replaces the communicator's own.  Raises InvalidArgument in a batch and for other types
        than bytes, bytearray and memoryview; CollectiveMismatch, CollectiveTimeout, RankLost.

            names = comm.all_gather_bytes(socket.gethostname().encode())
        """
        parts = self._bytes("all_gather_bytes", "all_gather_v", data, None, timeout)
        assert parts is not None
        return parts

    @interruptible
    def gather_bytes(self, data: bytes, root: int = 0, *, timeout: float | None = None) -> list[bytes] | None:
        """All ranks' ``data``, of any lengths, in rank order on rank ``root``; None elsewhere.

        Takes the ``timeout`` and raises the errors of ``all_gather_bytes``.

            names = comm.gather_bytes(socket.gethostname().encode())
        """
        return self._bytes("gather_bytes", "gather_v", data, check_rank("root", root, self.size), timeout)

    @interruptible
    def broadcast_bytes(self, data: bytes | None, root: int = 0, *, timeout: float | None = None) -> bytes:
        """The ``data`` of rank ``root``, of any length, on every rank.  The other ranks pass None.

        Takes the ``timeout`` and raises the errors of ``all_gather_bytes``.  If another rank passes data, all raise
        InvalidArgument.

            settings = json.loads(comm.broadcast_bytes(file.read_bytes() if comm.rank == 0 else None))
        """
        parts = self._bytes("broadcast_bytes", "broadcast", data, check_rank("root", root, self.size), timeout)
        assert parts is not None
        return parts[root]

    def _bytes(
        self, name: str, operation: str, data: Any, root: int | None, timeout: float | None
    ) -> list[bytes] | None:
        """The bytes of every rank; None on a rank that gets none."""
        try:
            return self._exchange_bytes(name, operation, data, root, timeout)
        except (MemoryError, OverflowError) as error:
            raise self._lacks_memory(name, error) from error

    def _exchange_bytes(
        self, name: str, operation: str, data: Any, root: int | None, timeout: float | None
    ) -> list[bytes] | None:
        """Like ``_bytes``.  Lengths and the first bytes of all ranks travel first, then all bytes if one has more."""
        self._refuse_batch(name)
        sends = operation != "broadcast" or self.rank == root
        if sends and not isinstance(data, bytes | bytearray | memoryview):
            raise InvalidArgument(f"data: expected bytes, a bytearray or a memoryview, got {type(data).__name__}")
        refused, data = not sends and data is not None, bytes(data) if sends else b""
        purpose = name if root is None else intern(f"{name} with root {root}{self._suffix}")
        gets = operation != "gather_v" or self.rank == root
        if self.host is not None:
            everyone = np.empty(self.size * FRAME_BYTES, np.uint8)
            length = (-1 if refused else len(data)).to_bytes(_LENGTH_BYTES, "little", signed=True)
            frame = (length + data[: FRAME_BYTES - _LENGTH_BYTES]).ljust(FRAME_BYTES, b"\0")
            raw = self._all_gather_frames(frame, everyone, purpose, timeout).tobytes()
            starts = range(_LENGTH_BYTES, len(raw), FRAME_BYTES)
            counts = [int.from_bytes(raw[at - _LENGTH_BYTES : at], "little", signed=True) for at in starts]
            if -1 not in counts and max(counts) <= FRAME_BYTES - _LENGTH_BYTES:
                return [raw[at : at + count] for at, count in zip(starts, counts, strict=True)] if gets else None
        else:
            with self._exchange(purpose, timeout):
                parts = self.rendezvous.allgather(b"" if refused else b"+" + data)
            counts = [len(part) - 1 for part in parts]
        if -1 in counts:
            raise InvalidArgument(f"data: expected None on rank {counts.index(-1)}, which is not root {root}, got data")
        if self.host is None:
            return [part[1:] for part in parts] if gets else None
        out = np.empty(sum(counts) if gets else 0, np.uint8)
        send, recv = as_buffer(np.frombuffer(data, np.uint8), "data", False), as_buffer(out, "data", True)
        if operation == "broadcast":
            send = send if self.rank == root else recv
        options = self._options(operation, False, timeout)._replace(purpose=name)
        recv_counts = None if operation == "broadcast" else tuple(counts)
        self._start(Operation(
            operation, self.rank, options, send, recv if gets else None, root=root, recv_counts=recv_counts
        ))  # fmt: skip
        ends = itertools.accumulate(counts)
        return [out[end - count : end].tobytes() for count, end in zip(counts, ends, strict=True)] if gets else None

    def _all_gather_numbers(self, numbers: Sequence[int], purpose: str, timeout: float | None) -> list[list[int]]:
        if self.host is None:
            with self._exchange(purpose, timeout):
                return [json.loads(row) for row in self.rendezvous.allgather(json.dumps(numbers).encode())]
        mine, everyone = np.array(numbers, np.int64), np.empty((self.size, len(numbers)), np.int64)
        send, recv = as_buffer(mine, "counts", False), as_buffer(everyone, "counts", True)
        options = self._options("all_gather", False, timeout)._replace(purpose=purpose)
        self._start(Operation("all_gather", self.rank, options, send, recv))
        rows: list[list[int]] = everyone.tolist()
        return rows

    @contextmanager
    def _exchange(self, call: str, timeout: float | None = None) -> Iterator[None]:
        """A context whose rendezvous exchanges belong to ``call``; their errors break this communicator."""
        rendezvous = self.rendezvous
        usual = rendezvous.call, rendezvous.timeout
        rendezvous.call, rendezvous.timeout = call, usual[1] if timeout is None else check_timeout(timeout)
        try:
            with self.backend.engine.paused(), rendezvous.reporting_memory():
                yield
        except (CollectiveError, OutOfMemory, RendezvousError) as error:
            rendezvous.failures.status.post_failure(error)
            text = f"{self.name}: {error}"
            if rendezvous.failures.over is not None and rendezvous.failures.first is None:
                rendezvous.failures.first = error.copy(text)
            raise error.copy(text) from error  # not from a variable, which would hold this frame
        finally:
            rendezvous.call, rendezvous.timeout = usual

    def _descendant(self, name: str, rendezvous: ControlPlane | None, color: int | None, key: int) -> Self | None:
        """The communicator of the group of ``rendezvous``; an error frees what was made of it.  Called on every rank.

        Returns None if ``rendezvous`` is None.
        """
        if rendezvous is None:
            if self.device is not None:
                self.backend.split(None, color, key, None)
            return None
        with ExitStack() as undo:
            undo.callback(rendezvous.abort, None)
            with rendezvous.reporting():
                backend = host = None if self.host is None else self.host.split(rendezvous)
                if host is not None:
                    undo.callback(host.abort, UNMADE)
                if self.device is not None:
                    backend = self.backend.split(rendezvous, color, key, host)
                    undo.callback(backend.abort, UNMADE)
                group = Group(self.recorder, name, rendezvous.failures.world, rendezvous.rank, self.backend_name)
                kind: Any = type(self)
                made: Self = kind(backend, rendezvous, self.probes, self.timeout, group, host)
                made._requested = self._requested
                undo.pop_all()
        return made
