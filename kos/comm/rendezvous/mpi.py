"""Ranks that are processes of an MPI job."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import struct
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import numpy as np

from kos.comm import timeouts
from kos.comm.failures import Ledger, from_record, to_record
from kos.comm.rendezvous import mpi_job
from kos.comm.rendezvous.base import Rendezvous
from kos.comm.rendezvous.notices import MPINotices, Notices
from kos.errors import BackendUnavailable, KosError, RankLost, RendezvousError

T = TypeVar("T")
_REPORT_SECONDS = 2.0  # limit for MPI's report of a rank that has ended
_LATE_SECONDS = 0.5  # the same within an exchange
_CHECK_SECONDS = 0.01  # between two checks for lost ranks
TAGS = 1 << 27
"""Number of MPI tags in use: the lower half is for messages of backends, the upper half for groups."""
TAGS_OF_GROUP = 3


class SharedComm:
    """An MPI communicator that several groups share, and the tags by which their messages differ.

    Groups that are split within one host create no communicator.  If a rank dies while others create one, Open MPI
    5.0.11 may crash in them, whatever the function: it revokes the new communicator, which has no collectives yet.
    """

    def __init__(self, comm: Any) -> None:
        self.comm = comm
        MPI = mpi_job.load_mpi()
        self.tag = min(TAGS, MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) + 1) // 2  # the first tag of groups
        self._groups = itertools.count()
        self.open: WeakValueDictionary[int, MPIGroup] = WeakValueDictionary()  # the groups by tag
        self.numbers = itertools.count()  # of messages of backends
        self.unreceived: set[int] = set()  # numbers in use: MPI gives a receive the first message with its number
        self.lock = threading.Lock()  # of the next two, tags and reports: each group may be used by a separate thread
        self.users, self.orderly = 0, True  # groups that are open; whether all closed groups closed in order

    def new_tag(self) -> int:
        """The first of ``TAGS_OF_GROUP`` tags for a new group, chosen by this rank for all of its ranks.

        No other rank returns them, and this rank returns them again only after thousands of groups, and not while it
        has an open group with them.  So threads may make groups at the same time.
        """
        size, rank = self.comm.size, self.comm.rank
        count = self.tag // (TAGS_OF_GROUP * size) - 1
        with self.lock:
            for number in itertools.islice(self._groups, count):
                tag = self.tag + TAGS_OF_GROUP * ((1 + number % count) * size + rank)
                if tag not in self.open:
                    return tag
        raise RendezvousError(f"split: expected less than {count} open groups, got {len(self.open)}")


class MPIGroup(Rendezvous):
    """A group of some ranks of a shared communicator.

    ``ranks`` are its ranks in that communicator, and ``rank`` is this process's rank in the group.  An exchange uses
    ``tag``, a shrink ``tag + 1``, and the report of a failed exchange ``tag + 2``.
    """

    _is_job = False
    _parent: tuple[MPIGroup, int, list[int]] | None = None
    """The group from which this one was split, the number of its exchanges up to then, and this one's ranks in the
    communicator of that group; None once all ranks of this one have reached an exchange.
    """

    def __init__(
        self, shared: SharedComm, ranks: Sequence[int], rank: int, timeout: float, ledger: Ledger | None, tag: int = 0
    ) -> None:
        self._MPI = mpi_job.load_mpi()
        self.shared, self.ranks, self._tag = shared, list(ranks), tag or shared.tag
        self.rank, self.size, self.timeout, self._ledger = rank, len(self.ranks), timeout, ledger
        with shared.lock:
            shared.users += 1
            shared.open[self._tag] = self
        self._own: Any = None  # a communicator of exactly these ranks, made on first use
        self._notice_comm: tuple[Any, WeakValueDictionary[str, MPINotices]] | None = None  # shared with splits
        self._reports: dict[int, tuple[Any, bytearray]] = {}  # by rank: the request and data of its report

    @property
    def mpi_comm(self) -> Any:
        if self._is_all:
            return self.shared.comm
        if self._own is None:
            comm = self.shared.comm
            create = partial(comm.Create_group, comm.Get_group().Incl(self.ranks), self._tag)
            self._own = self._wait("split", partial(mpi_job.in_thread, create, self.timeout))[0]
        return self._own

    @property
    def _is_all(self) -> bool:
        """Whether the group has all ranks of the shared communicator."""
        return self.ranks == list(range(self.shared.comm.size))

    def failed(self) -> list[int]:
        """The ranks of the group that MPI reports as failed."""
        failed = mpi_job.failed_ranks(self.shared.comm)
        return [rank for rank, each in enumerate(self.ranks) if each in failed]

    def _exchange(self, message: bytes) -> list[bytes]:
        """Bruck's all-gather (IEEE TPDS 8, 1997): each rank sends and receives ⌈log2(size)⌉ messages."""
        parts, distance = [message], 1  # the messages of this rank and of those after it
        while distance < self.size:
            count = min(distance, self.size - distance)
            lengths = struct.Struct(f"!{count}I")
            data = lengths.pack(*map(len, parts[:count])) + b"".join(parts[:count])
            to, source = (self.rank - distance) % self.size, (self.rank + distance) % self.size
            try:
                answer = self._wait("allgather", partial(self._transfer, data, to, source))
            except KosError as error:
                self._report(error)
                raise
            ends = list(itertools.accumulate(lengths.unpack_from(answer), initial=lengths.size))
            parts += [bytes(answer[start:end]) for start, end in itertools.pairwise(ends)]
            distance *= 2
        self._parent = None
        return [parts[(rank - self.rank) % self.size] for rank in range(self.size)]

    def _transfer(self, data: bytes, to: int, source: int) -> bytearray | None:
        """Send to one rank and receive from another; None at the timeout."""
        MPI, comm, tag, status = self._MPI, self.shared.comm, self._tag, self._MPI.Status()
        deadline, check_at, backoff = time.monotonic() + self.timeout, 0.0, mpi_job.Backoff()
        ended_at, look = None, self.look_for_stopped()  # when a rank was first seen to have ended
        sent = comm.Isend([data, MPI.BYTE], self.ranks[to], tag)
        incoming, received = None, bytearray()
        try:
            while (now := time.monotonic()) < deadline:
                check, reports = now > check_at, dict[int, KosError]()
                if check:
                    check_at = now + _CHECK_SECONDS
                    reports = self._reported((to, source))  # before the messages, which a rank sends before its report
                if incoming is None and (probed := comm.Improbe(self.ranks[source], tag, status)) is not None:
                    received = bytearray(status.Get_count(MPI.BYTE))
                    incoming = probed.Irecv([received, MPI.BYTE])
                missing = [] if sent.Test() else [to]
                missing += [] if incoming is not None and incoming.Test() else [source]
                if not missing:
                    return received
                for rank in missing:
                    if rank in reports:
                        raise self.ledger.lost(rank, "", None, reports[rank]) from reports[rank]
                if check:
                    self._check(source)
                    ended = self._ended(range(self.size))
                    ended_at = (ended_at or now) if ended else None
                    if ended_at is not None and now - ended_at > _LATE_SECONDS:  # MPI has not notified this rank
                        raise self.ledger.lost(ended[0], "its process ended", "rendezvous")
                    if look is not None:
                        look()
                backoff.pause()
        finally:
            mpi_job.keep_unfinished(sent)
            if incoming is not None:
                mpi_job.keep_unfinished(incoming)
        return None

    def _report(self, failure: KosError) -> None:
        """A failure that another rank reported is sent on unchanged."""
        cause = failure.__cause__ if isinstance(failure.__cause__, KosError) else failure
        data = json.dumps([self._exchanges, to_record(cause)]).encode()
        for rank in (each for each in self.ranks if each != self.ranks[self.rank]):
            with contextlib.suppress(self._MPI.Exception):  # the rank may be lost
                mpi_job.keep_unfinished(self.shared.comm.Isend([data, self._MPI.BYTE], rank, self._tag + 2))

    def _reported(self, ranks: Iterable[int]) -> dict[int, KosError]:
        """The failures of those ``ranks`` that will not join the current exchange.

        Such a rank has failed in an exchange of this group, or of the split by which this group was made: then it does
        not know this group, and the rank that was lost may belong to another one.
        """
        found = {}
        for group, last, names in filter(None, ((self, self._exchanges, self.ranks), self._parent)):
            for rank in ranks:
                number, record = group._report_of(names[rank])
                if record and number <= last:
                    found[rank] = from_record(record)
        return found

    def _report_of(self, rank: int) -> tuple[int, list[Any]]:
        """The failed exchange of a rank of the shared communicator, and its failure as a record; (0, []) if none."""
        status = self._MPI.Status()
        with self.shared.lock:  # groups that were split from this one probe too, on other threads
            probed = None if rank in self._reports else self.shared.comm.Improbe(rank, self._tag + 2, status)
            if probed is not None:
                data = bytearray(status.Get_count(self._MPI.BYTE))
                self._reports[rank] = probed.Irecv([data, self._MPI.BYTE]), data
            request, data = self._reports.get(rank, (None, bytearray()))
            if request is None or not request.Test():
                return 0, []
        number, record = json.loads(data)
        return number, record

    def _check(self, awaited: int) -> None:
        """Raise RankLost if a rank of the group has failed, or if the awaited rank shrinks the group."""
        failed = self.failed()
        shrinks = not failed and self.shared.comm.Iprobe(self.ranks[awaited], self._tag + 1)
        if failed:
            raise self.ledger.lost(failed[0], "its process failed", "rendezvous")
        if shrinks:
            rank = next(iter(self.ledger.suspects()), awaited)
            raise self.ledger.lost(rank, "it shrinks the group", "rendezvous")

    def _ended(self, ranks: Iterable[int]) -> list[int]:
        """Those ``ranks`` of this host whose processes have ended, with or without a report by MPI."""
        board, world = self.ledger.board, self.ledger.world
        return [rank for rank in ranks if board.ended(world[rank])]

    def split(self, color: int | None, key: int = 0) -> Rendezvous | None:
        ranks = self._alike(color, key)
        if self.local_size < self.size:
            return self._split_comm(color, key, ranks)
        tag = int(self.allgather(str(self.shared.new_tag()).encode() if self.rank == 0 else b"")[0])
        if not ranks:
            return None
        child = self._child(ranks, tag)
        child._parent = self, self._exchanges, child.ranks
        return child

    def _split_comm(self, color: int | None, key: int, ranks: list[int]) -> Rendezvous | None:
        """Split a group of several hosts.  Each part has its own communicator, for its backend's collectives."""
        color = self._MPI.UNDEFINED if color is None else color
        try:
            self._exchanges += 1  # it counts as an exchange, so that a rank reports its failure
            call, timeout = partial(self.mpi_comm.Split, color, key), self.timeout
            # On a thread, because MPI_Comm_split has no timeout.
            part = self._wait("split", partial(mpi_job.in_thread, call, timeout, self._look_for_reports))[0]
        except BaseException as error:
            self._cut_short(error)
            raise
        if not ranks:
            return None
        child = self._child_with_comm(part, ranks)
        child._parent = self, self._exchanges, [self.ranks[each] for each in ranks]
        return child

    def _look_for_reports(self) -> None:
        """Raise the failure of a rank that does not join the current exchange."""
        for rank, failure in self._reported(each for each in range(self.size) if each != self.rank).items():
            raise self.ledger.lost(rank, "", None, failure) from failure

    def _child(self, ranks: list[int], tag: int) -> MPIGroup:
        """The group of these ranks, which shares this group's communicator and uses ``tag``."""
        rank, mine = ranks.index(self.rank), [self.ranks[each] for each in ranks]
        child = MPIGroup(self.shared, mine, rank, self.timeout, self.ledger.of(ranks, rank), tag)
        child._notice_comm, near = self._notice_comm, self._neighbours
        child._near = {new: near[old] for new, old in enumerate(ranks)}
        return child

    def _child_with_comm(self, part: Any, ranks: list[int]) -> MPIGroup:
        """The group of these ranks, which has the communicator ``part``."""
        child = MPIGroup(SharedComm(part), range(part.size), part.rank, self.timeout, self.ledger.of(ranks, part.rank))
        child._notice_comm = self._notice_comm
        return child

    def open_notices(self, ranks: Collection[int], any_thread: bool = True) -> Notices | None:
        allowed = not any_thread or self._MPI.Query_thread() == self._MPI.THREAD_MULTIPLE
        names = self.allgather(os.urandom(8) if allowed else b"")
        if b"" in names:
            return None
        if self._notice_comm is None:
            comm, request = self.mpi_comm.Idup()
            self._wait("duplicate", partial(mpi_job.wait_request, request, self.timeout))
            comm.Set_errhandler(self._MPI.ERRORS_RETURN)
            self._notice_comm = comm, WeakValueDictionary()
        comm, readers = self._notice_comm
        others = self._MPI.Group.Translate_ranks(self.mpi_comm.Get_group(), list(ranks), comm.Get_group())
        notices = MPINotices(self._MPI, comm, readers, names[0].hex(), others)
        self.barrier()  # another group's reader drops a notice for a group without one
        return notices

    def check_shrink(self) -> None:
        if not mpi_job.fault_tolerant():
            raise BackendUnavailable("shrink: expected a fault-tolerant job: mpirun --with-ft ulfm")

    def shrink(self) -> Rendezvous:
        """The group of the live ranks that have called ``shrink``.

        Open MPI 5.0.11 may report a rank that exits with a nonzero code to some ranks only, or to none.  Then
        MPI_Comm_shrink would spin without a timeout.  So the survivors first exchange messages twice: the first time a
        rank may find that another one is lost, and the second time all ranks learn of it.

        A split group has no communicator for MPI_Comm_shrink, which agrees on the members: see ``_agree_on_members``.
        """
        self.check_shrink()
        began = time.monotonic()
        tag = self.shared.new_tag()
        arrived = self._exchange_with_survivors([rank for rank in range(self.size) if rank != self.rank], [tag], began)
        tags = self._exchange_with_survivors(arrived, [tag], began)
        if not self._is_all:
            known = {self.rank: [tag], **tags}
            members = self._agree_on_members(set(known), began)
            return self._child(members, known[min(members)][0])
        part = mpi_job.shrink(self.shared.comm, self.timeout)
        if part is None:
            missing = timeouts.survivors(self.timeout)
            raise RendezvousError(f"shrink: {missing}{mpi_job.last_loss()}")
        members = self._MPI.Group.Translate_ranks(part.Get_group(), range(part.size), self.shared.comm.Get_group())
        return self._child_with_comm(part, list(members))

    def _agree_on_members(self, members: set[int], began: float) -> list[int]:
        """The same members on all survivors; ``members`` are the ranks whose messages this rank has.

        The messages of a rank that died may have reached only some survivors, so a rank that one survivor lacks is not
        a member.  A rank that dies later is a member, and the new group names it.

        Survivors exchange their members until no further rank is lost.  A rank that receives from the same ranks as
        before knows what every survivor knew.  Its last message, which also has the number ``size``, decides for the
        others (early-stopping consensus: Dolev, Reischuk and Strong, JACM 37, 1990).
        """
        heard, decided = members - {self.rank}, False
        while not decided:
            lists = self._exchange_with_survivors(heard, sorted(members), began)
            decided = lists.keys() == heard or any(self.size in each for each in lists.values())
            members, heard = members.intersection(*lists.values()), set(lists)
        self._send_to_survivors(heard, [-1, *sorted(members), self.size])
        return sorted(members)

    def _send_to_survivors(self, ranks: Collection[int], numbers: Sequence[int]) -> None:
        for rank in ranks:
            with contextlib.suppress(self._MPI.Exception):  # the rank is known to be lost
                sent = self.shared.comm.Isend(np.array(numbers), self.ranks[rank], self._tag + 1)
                mpi_job.keep_unfinished(sent)

    def _exchange_with_survivors(
        self, ranks: Collection[int], numbers: Sequence[int], began: float
    ) -> dict[int, list[int]]:
        """Exchange 1 to ``size + 1`` numbers with each of ``ranks``.  Returns those of each rank that is not lost.

        ``began`` is when the shrink began, on ``time.monotonic``.  A message begins with -1, or with the rank that did
        not answer the sender.  In the latter case RankLost is raised.
        """
        comm, tag = self.shared.comm, self._tag + 1
        awaited: dict[int, tuple[Any, np.ndarray]] = {}
        self._send_to_survivors(ranks, [-1, *numbers])
        for rank in ranks:
            with contextlib.suppress(self._MPI.Exception):
                received = np.full(2 + self.size, -1)
                awaited[rank] = comm.Irecv(received, self.ranks[rank], tag), received
        backoff, unreported_at, arrived = mpi_job.Backoff(), None, dict[int, list[int]]()
        with self.waiting():
            while awaited:
                failed, now = self.failed(), time.monotonic()
                for rank, (request, received) in list(awaited.items()):
                    if not mpi_job.is_over(request) and rank not in failed:
                        continue
                    del awaited[rank]
                    mpi_job.keep_unfinished(request)
                    if received[1] >= 0:  # else the rank is lost
                        arrived[rank] = [int(each) for each in received[1:] if each >= 0]
                        if received[0] >= 0:
                            raise self._unreported(int(received[0]))
                unreported = self._ended(awaited)
                unreported_at = (unreported_at or now) if unreported else None
                if unreported_at is not None and now - unreported_at > _REPORT_SECONDS:
                    self._send_to_survivors(ranks, [unreported[0], *numbers])
                    raise self._unreported(unreported[0])
                if awaited and now - began > self.timeout:
                    raise self.absent(sorted(awaited), "shrink")
                backoff.pause()
        return arrived

    def _unreported(self, rank: int) -> KosError:
        why = "its process exited with an error code, which Open MPI does not report to the others"
        return self.ledger.lost(rank, why, "shrink", None, 0.0)

    def _free(self, orderly: bool, code: int | None) -> None:
        shared = self.shared
        if not orderly and self.failure is None and not self._MPI.Is_finalized():
            self._exchanges += 1  # the first that this rank does not join
            self._report(self.ledger.end("it aborted the group", self.ledger.closing()))
        with shared.lock:
            shared.users -= 1
            shared.open.pop(self._tag, None)
            shared.orderly &= orderly  # MPI_Comm_free is collective: only if no rank is lost
            unused = shared.comm if shared.users == 0 else None
        if not self._MPI.Is_finalized() and shared.orderly:
            for comm in self._own, unused:
                if comm is not None:
                    comm.Free()
        if self._is_job and code is not None:
            mpi_job.abort_code = code or 1

    def _wait(self, what: str, wait: Callable[[], T | None]) -> T:
        return wait_for_all(self, what, self.failed, wait)


class MPIRendezvous(MPIGroup):
    """Ranks are the processes of an MPI communicator (default: COMM_WORLD).

    ``process_hooks`` is as in ``kos.init``.
    """

    def __init__(self, comm: Any = None, timeout: float = 120.0, process_hooks: bool = True) -> None:
        MPI = mpi_job.load_mpi(process_hooks)
        mpi_job.check_running(MPI)
        if process_hooks:
            mpi_job.guard_job()
        self._is_job = comm is None
        parent = MPI.COMM_WORLD if comm is None else comm
        super().__init__(SharedComm(parent), range(parent.size), parent.rank, timeout, None)
        begun = None  # the request of an earlier attempt that timed out: MPI matches calls by their order
        if self._is_job:
            begun, mpi_job.starting = mpi_job.starting, None
        shared, request = begun or parent.Idup()
        try:
            self._wait("start", partial(mpi_job.wait_request, request, timeout))
        except RendezvousError:
            if self._is_job:
                mpi_job.starting = shared, request
            raise
        shared.Set_errhandler(MPI.ERRORS_RETURN)
        self.shared.comm = shared


def wait_for_all(rendezvous: Rendezvous, what: str, failed: Callable[[], list[int]], wait: Callable[[], T | None]) -> T:
    """The result of ``wait()``, which is false at the timeout.  ``failed()`` lists the ranks that MPI reports failed.

    Raises an error that names the rank that failed first, or the missing ranks.
    """
    ledger, rank, size = rendezvous.ledger, rendezvous.rank, rendezvous.size
    with rendezvous.waiting():
        try:
            if outcome := wait():
                return outcome
        except mpi_job.load_mpi().Exception as error:
            gone = failed() or ledger.suspects()
            why = f"{what}: MPI: {error.Get_error_string()}"
            if not gone:
                raise RankLost(f"rendezvous: {why}") from error
            raise ledger.lost(gone[0], why, "rendezvous") from error
        others = [each for each in range(size) if each != rank]
        named = ledger.names(others, False) if size == 2 else f"all other {size - 1} ranks"
        waited = timeouts.waited(ledger.names([rank], False), rendezvous.timeout, named)
        raise ledger.overdue(others, f"rendezvous: {what}", None, waited, RendezvousError)
