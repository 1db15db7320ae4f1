"""The mpi backend: host memory by mpi4py's upper-case calls.

Every call is non-blocking and polled, so that every wait can time out and all operations in flight progress
together.  MPI reduces the dtypes that it has types for.  Data movement uses bytes and supports every dtype.  Schedules
run where MPI's reduction would differ from other backends or between ranks: MPI_MAX of a NaN depends on the order of
its arguments.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from kos.comm.backend import SHRINKS, Backend, Probe
from kos.comm.control import mpi_job
from kos.comm.control.base import Rendezvous
from kos.comm.control.mpi import TAGS, raise_death, wait_for_all
from kos.comm.failures import WHY_CLOSED
from kos.comm.host.backend import HostBackend, at_exit
from kos.comm.host.fingerprints import Fingerprints
from kos.comm.host.mpi_messages import LARGEST, UNSENT, Messages, as_bytes
from kos.comm.host.tcp import TCPBackend
from kos.comm.operation import AUTO, Operation
from kos.comm.reduction import ReduceOp, Reduction, resolve
from kos.comm.work import Engine, Steps, Work
from kos.dtypes import DTYPES, DType, dtype_of
from kos.errors import BackendUnavailable, CollectiveError, CollectiveMismatch, KosError, RankLost

Array = np.ndarray[Any, Any]
log = logging.getLogger(__name__)

# Above this size kos's ring, whose additions overlap its messages, beats MPI_Iallreduce.  2 ranks on one host, Open MPI
# 5.0.11, November 2026: 256 KB 43 against 58 us, 4 MB 0.37 against 0.64 ms, 64 MB 18 against 90 ms (best of 40).
_NATIVE_BYTES = 128 * 1024

_NAMING_SECONDS = 1.0  # seconds of waiting for the name of a rank that MPI reports as lost

_cancelled: list[Array] = []
"""The numbers of failed comparisons.  Open MPI 5.0.11 writes to such memory even after the request is over: the next
comparison, in a new array at the same address, got other ranks' numbers of the failed one (4 ranks on 2 cores)."""

_SUMS = (ReduceOp.AVG, ReduceOp.PREMUL_SUM)  # kos scales before or after; other operations have the same name in MPI


class MPIBackend(HostBackend):
    """Serves a group whose ranks are processes of an MPI communicator."""

    name = "mpi"

    def __init__(self, rendezvous: Rendezvous, engine: Engine | None = None) -> None:
        super().__init__(rendezvous, engine)
        self._MPI = mpi_job.load_mpi()
        self._compared = self._agreed = 0  # collectives that are compared, and those known to be alike
        self._comms: list[Any] = []  # private communicators: for native collectives, and for the comparison of calls
        comm = channel = None
        if not self.one_host:
            self._comms += [comm := self._dup(rendezvous), self._dup(rendezvous)]
            channel = rendezvous.open_channel()
        self._messages = Messages(self._MPI, comm, self._calls, channel, self.ledger)
        if self._node is None:
            self.transport = self._messages
        self.fingerprints = self.fingerprints or Fingerprints()
        self._requests: dict[int, Any] = {}  # native requests in flight, by sequence number
        self._ends: dict[int, Array] = {}  # the numbers that are compared in them
        at_exit(self)

    @classmethod
    def probe(cls, rendezvous: Rendezvous) -> Probe:
        if rendezvous.mpi is None:
            return Probe(False, "the ranks are not processes of an MPI job (start with mpirun)")
        MPI = mpi_job.load_mpi()
        if MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) < TAGS:
            return Probe(False, f"the MPI library has fewer than {TAGS} tags")
        alone = "" if mpi_job.under_mpirun() else "; a group of one, as it was not started by mpirun"
        return Probe(True, MPI.Get_library_version().split(",")[0].strip() + alone)

    def check_threads(self) -> None:
        if (level := self._MPI.Query_thread()) < self._MPI.THREAD_MULTIPLE:
            got = {getattr(self._MPI, f"THREAD_{name}"): name for name in ("SINGLE", "FUNNELED", "SERIALIZED")}[level]
            raise BackendUnavailable(f"mpi: progress_thread: expected MPI_THREAD_MULTIPLE, got MPI_THREAD_{got}")

    def _dup(self, rendezvous: Rendezvous) -> Any:
        comm, request = rendezvous.mpi_comm.Idup()
        wait = partial(mpi_job.wait_request, request, rendezvous.timeout, partial(raise_death, rendezvous))
        wait_for_all(rendezvous, "duplicate", wait)
        comm.Set_errhandler(self._MPI.ERRORS_RETURN)
        return comm

    def split(self, rendezvous: Rendezvous | None, color: int | None = None, key: int = 0) -> Backend | None:
        """After a loss MPI is not used: the survivors go on over TCP."""
        if rendezvous is not None and rendezvous.mpi is None:
            return TCPBackend(rendezvous, self.engine)
        return super().split(rendezvous, color, key)

    def close(self) -> None:
        super().close()
        if not self._MPI.Is_finalized():
            cause = self.ledger.closing()
            self._messages.send_end(self._begun, WHY_CLOSED, cause, soon=cause is not None)
            for comm in self._comms if cause is None and self.broken is None else ():
                mpi_job.free_after_all(comm)

    def report_end(self, reason: str) -> None:
        super().report_end(reason)
        self._messages.send_end(self.stops_at(), reason, self.cause())

    def abort(self, reason: str) -> None:
        super().abort((UNSENT if self._messages.sending() else "") + reason)

    def agree(self, work: Work[Any]) -> Callable[[], bool] | None:
        """Between hosts, an MPI_Iallreduce compares the fingerprints, and ends when all ranks have arrived."""
        local_poll = super().agree(work)
        if self.one_host:
            return local_poll
        number, self._compared = self._compared, self._compared + 1
        MPI, messages, agreed, described = self._MPI, self._messages, False, False
        mark, text = work.prepared.fingerprint, work.prepared.text
        ends = np.array([mark, ~mark], np.int64)  # reduced to the maximum and the complement of the minimum
        request = self._comms[-1].Iallreduce(MPI.IN_PLACE, [ends, MPI.INT64_T], MPI.MAX)
        self._requests[work.sequence], self._ends[work.sequence] = request, ends

        def all_arrived() -> bool:
            nonlocal agreed, described
            if local_poll is not None:
                local_poll()
            if time.monotonic() >= messages.next_check:
                messages.receive_notices()
            self.ledger.check(work.sequence, work)
            if agreed or not request.Test():
                return agreed
            if ends[0] == ~ends[1]:
                if self._agreed == number:  # in the order of the calls, as MPI's collectives follow
                    agreed, self._agreed = True, number + 1
                    del self._requests[work.sequence], self._ends[work.sequence]
                return agreed
            if not described:
                described = True
                messages.send_notice("call", work.sequence, text.decode())
            messages.compare(work, text)
            return False

        return all_arrived

    def native(self, work: Work[Any], spaces: Mapping[str, Array], collective: str) -> Steps | None:
        if collective == "barrier":
            return (None for _ in ())  # ``agree`` was the barrier
        if not self._comms:
            return None
        operation = work.operation
        if operation.options.deterministic or operation.options.algorithm != AUTO:
            return None
        if not _is_native(collective, operation.reduction, max(x.nbytes for x in spaces.values())):
            return None
        return self._poll_native(work, self._native_request(operation, spaces, collective))

    def route_of(self, name: str, nbytes: int, symmetric: bool = False, graph: bool = False) -> str:
        reduction = resolve(ReduceOp.SUM, DTYPES["float32"], self.size) if "reduce" in name else None
        if self._node is None and _is_native(name, reduction, nbytes * (self.size if name == "all_gather" else 1)):
            return "mpi native"
        return super().route_of(name, nbytes)

    def _native_request(self, o: Operation, spaces: Mapping[str, Array], collective: str) -> Any:
        """Post the MPI call."""
        MPI, comm = self._MPI, self._comms[0]
        if collective == "broadcast":
            return comm.Ibcast(as_bytes(spaces["data"], MPI), o.root)
        if collective == "all_gather":
            return comm.Iallgather(as_bytes(spaces["input"], MPI), as_bytes(spaces["output"], MPI))
        if collective == "all_to_all":
            return comm.Ialltoall(as_bytes(spaces["input"], MPI), as_bytes(spaces["output"], MPI))
        assert o.reduction is not None
        mpi_type = getattr(MPI, dtype_of(o.reduction.carrier).mpi)
        op = MPI.SUM if o.reduction.op in _SUMS else getattr(MPI, o.reduction.op.name)
        if collective == "all_reduce":
            return comm.Iallreduce(MPI.IN_PLACE, [spaces["data"], mpi_type], op)
        if collective == "reduce":
            data = [spaces["data"], mpi_type]
            return comm.Ireduce(*((MPI.IN_PLACE, data) if self.rank == o.root else (data, None)), op, o.root)
        return comm.Ireduce_scatter_block([spaces["input"], mpi_type], [spaces["output"], mpi_type], op)

    def _poll_native(self, work: Work[Any], request: Any) -> Steps:
        self._requests[work.sequence] = request
        try:
            while not request.Test():
                yield
        except GeneratorExit:
            log.warning("%s: MPI may still use the arrays of this call, so they are kept", work)
            raise
        del self._requests[work.sequence]

    def find_failure(self) -> KosError | None:
        if (known := super().find_failure()) is not None:
            return known
        gone = self._messages.deaths().items()
        return next((self.ledger.lost(rank, why, None, None, 0.0) for rank, why in gone), None)

    def gone(self) -> Iterator[tuple[int, str]]:
        """The ranks known to be lost, and why: by shared memory, and by notices that may follow the error."""
        if self._calls is not None:
            yield from self._calls.gone()
        deadline, late = time.monotonic() + _NAMING_SECONDS, False
        while not late:
            late = time.monotonic() > deadline
            self._messages.receive_notices()  # a rank that shrinks is not the lost one: wait for another name
            ends = self.ledger.ends.items()
            yield from ((rank, why) for rank, (_, why, _) in ends if late or why != SHRINKS)
            time.sleep(0.001)

    def failed(self, work: Work[Any], error: Exception) -> KosError:
        MPI = self._MPI
        if work.collective and (request := self._requests.pop(work.sequence, None)) is not None:
            mpi_job.keep_unfinished(request)
            if (ends := self._ends.pop(work.sequence, None)) is not None:
                _cancelled.append(ends)
        if isinstance(error, MPI.Exception):
            named: KosError = CollectiveError(f"{work}: MPI: {error.Get_error_string()}")
            if error.Get_error_class() == MPI.ERR_TRUNCATE:
                named = CollectiveMismatch(str(named))
            elif (lost := next(self.gone(), None)) is not None:  # of which MPI may not say what its error is
                named = self.ledger.lost(*lost, work)
            named.__cause__ = error
            error = named
        if isinstance(error, RankLost) and any(map(self.ledger.board.ended, error.ranks)):
            mpi_job.record_loss()
        return super().failed(work, error)

    def report_failure(self, failure: KosError, sequence: int) -> None:
        self.ledger.record(sequence, failure)
        self._messages.send_failure(sequence, failure)


def _is_native(collective: str, reduction: Reduction | None, nbytes: int) -> bool:
    """Whether MPI supports this dtype and reduce operation and is not slower than kos's schedule."""
    if nbytes > (_NATIVE_BYTES if collective == "all_reduce" else LARGEST):
        return False
    if collective in ("scan", "exscan"):
        return False  # MPI does not promise an order
    if reduction is None:
        return collective in ("broadcast", "all_gather", "all_to_all")
    return _same_everywhere(dtype_of(reduction.carrier), reduction.op)


def _same_everywhere(dtype: DType, op: ReduceOp) -> bool:
    """Whether MPI's own reduction equals that of every other backend, with the same bits on all ranks."""
    if not dtype.mpi:
        return False
    if op in (ReduceOp.MIN, ReduceOp.MAX):
        return not dtype.is_float
    # Open MPI's vector code adds 8-bit and 16-bit integers with saturation; elsewhere they wrap.
    return dtype.itemsize >= 4 or op in (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)
