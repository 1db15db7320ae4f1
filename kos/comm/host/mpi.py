"""The mpi backend: host memory by mpi4py's upper-case calls.

Every call is non-blocking and polled, so that every wait can time out and all operations in flight progress
together.  MPI reduces the dtypes that it has types for.  Data movement uses bytes and supports every dtype.  Schedules
run where MPI's reduction would differ from other backends or between ranks: MPI_MAX of a NaN depends on the order of
its arguments.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from kos.comm.backend import SHRINKS, Probe
from kos.comm.failures import WHY_CLOSED
from kos.comm.host.backend import HostBackend, at_exit
from kos.comm.host.fingerprints import Fingerprints
from kos.comm.host.mpi_messages import LARGEST, UNSENT, Messages, as_bytes
from kos.comm.operation import AUTO, Call, Operation
from kos.comm.reduction import ReduceOp, Reduction, resolve
from kos.comm.rendezvous import mpi_job
from kos.comm.rendezvous.base import Rendezvous
from kos.comm.rendezvous.mpi import TAGS, SharedComm, wait_for_all
from kos.comm.work import Engine, Steps
from kos.dtypes import DTYPES, DType, dtype_of
from kos.errors import BackendUnavailable, CollectiveError, CollectiveMismatch, KosError, RankLost

Array = np.ndarray[Any, Any]

# Above this size kos's ring, whose additions overlap its messages, beats MPI_Iallreduce.  2 ranks on one host, Open MPI
# 5.0.11, November 2026: 256 KB 43 against 58 us, 4 MB 0.37 against 0.64 ms, 64 MB 18 against 90 ms (best of 40).
_NATIVE_BYTES = 128 * 1024

_NAMING_SECONDS = 1.0  # seconds of waiting for the name of a rank that MPI reports as lost

_SUMS = (ReduceOp.AVG, ReduceOp.PREMUL_SUM)  # kos scales before or after; other operations have the same name in MPI


class MPIBackend(HostBackend):
    """Serves a group whose ranks are processes of an MPI communicator."""

    name = "mpi"

    def __init__(self, rendezvous: Rendezvous, engine: Engine | None = None) -> None:
        super().__init__(rendezvous, engine)
        self._MPI = mpi_job.load_mpi()
        group: Any = rendezvous
        self._failed_ranks: Callable[[], list[int]] = group.failed
        self._compared = self._agreed = 0  # collectives that are compared, and those known to be alike
        self._comms: list[Any] = []  # private communicators: for native collectives, and for the comparison of calls
        notices = None
        if not self.one_host:
            self._comms += [self._dup(rendezvous), self._dup(rendezvous)]
            notices = rendezvous.open_notices([r for r in range(self.size) if r != self.rank], any_thread=False)
            rendezvous.barrier()  # Open MPI 5.0.11 crashes if a communicator is revoked while a rank still creates it
        shared, ranks = (group.shared, group.ranks) if self.one_host else (SharedComm(self._comms[0]), range(self.size))
        self._messages = Messages(self._MPI, shared, ranks, self._calls, notices, self.ledger)
        self.carry(self._messages)
        self._fingerprints = self._calls or Fingerprints()
        self._requests: dict[int, Any] = {}  # native requests in flight, by sequence number
        at_exit(self)

    @classmethod
    def probe(cls, rendezvous: Rendezvous) -> Probe:
        if rendezvous.mpi_comm is None:
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
        wait = partial(mpi_job.wait_request, request, rendezvous.timeout)
        wait_for_all(rendezvous, "duplicate", self._failed_ranks, wait)
        comm.Set_errhandler(self._MPI.ERRORS_RETURN)
        return comm

    def close(self) -> None:
        super().close()
        if not self._MPI.Is_finalized():
            cause = self.ledger.closing()
            self._messages.send_end(self._begun, WHY_CLOSED, cause)
            for comm in self._comms if cause is None else ():  # Open MPI gives late messages to the next communicator
                comm.Free()

    def report_end(self, reason: str) -> None:
        super().report_end(reason)
        with contextlib.suppress(self._MPI.Exception):  # the communicator may be revoked
            if self.ledger.failure is not None:  # perhaps only this rank has received it
                self._messages.send_failure(*self.ledger.failure)
            self._messages.send_end(self.stops_at(), reason, self.cause())

    def abort(self, reason: str) -> None:
        super().abort((UNSENT if self._messages.sending() else "") + reason)
        if mpi_job.fault_tolerant() and not self._MPI.Is_finalized():
            for comm in self._comms:
                comm.Revoke()  # ends the waits of ranks on other hosts

    def agree(self, call: Call) -> Callable[[], bool] | None:
        """Between hosts, an MPI_Iallreduce compares the fingerprints, and ends when all ranks have arrived."""
        local_poll = super().agree(call)
        if self.one_host:
            return local_poll
        number, self._compared = self._compared, self._compared + 1
        MPI, messages, prints = self._MPI, self._messages, self._fingerprints
        mark, agreed, described = prints.mark(call), False, False
        text = prints.texts[mark]
        ends = np.array([mark, ~mark], np.int64)  # reduced to the maximum and the complement of the minimum
        request = self._comms[-1].Iallreduce(MPI.IN_PLACE, [ends, MPI.INT64_T], MPI.MAX)
        self._requests[call.sequence] = request

        def all_arrived() -> bool:
            nonlocal agreed, described
            if local_poll is not None:
                local_poll()
            if time.monotonic() >= messages.next_check:
                messages.receive_notices()
            self.ledger.check(call.sequence, call)
            if agreed or not request.Test():
                return agreed
            if ends[0] == ~ends[1]:
                if self._agreed == number:  # in the order of the calls, as MPI's collectives follow
                    agreed, self._agreed = True, number + 1
                    del self._requests[call.sequence]
                return agreed
            if not described:
                described = True
                messages.send_notice("call", call.sequence, text.decode())
            messages.compare(call, text)
            return False

        return all_arrived

    def native(self, call: Call, spaces: Mapping[str, Array], collective: str) -> Steps | None:
        if collective == "barrier":
            return (None for _ in ())  # ``agree`` was the barrier
        if not self._comms:
            return None
        operation = call.operation
        if operation.options.deterministic or operation.options.algorithm != AUTO:
            return None
        if not _is_native(collective, operation.reduction, max(x.nbytes for x in spaces.values())):
            return None
        return self._poll_native(call, self._native_request(operation, spaces, collective))

    def route_of(self, name: str, nbytes: int, symmetric: bool = False, graph: bool = False) -> str:
        reduction = resolve(ReduceOp.SUM, DTYPES["float32"], self.size) if "reduce" in name else None
        if self._shared is None and _is_native(name, reduction, nbytes * (self.size if name == "all_gather" else 1)):
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

    def _poll_native(self, call: Call, request: Any) -> Steps:
        self._requests[call.sequence] = request
        while not request.Test():
            yield
        del self._requests[call.sequence]

    def gone(self) -> Iterator[tuple[int, str]]:
        """The ranks known to be lost, and why: by shared memory, ULFM, and notices that may follow the error."""
        if self._calls is not None:
            yield from self._calls.gone()
        deadline, late = time.monotonic() + _NAMING_SECONDS, False
        while not late:
            late = time.monotonic() > deadline
            yield from ((rank, "its process failed") for rank in self._failed_ranks())
            self._messages.receive_notices()  # a rank that shrinks is not the lost one: wait for another name
            ends = self.ledger.ends.items()
            yield from ((rank, why) for rank, (_, why, _) in ends if late or why != SHRINKS)
            time.sleep(0.001)

    def failed(self, call: Call, error: Exception) -> KosError:
        MPI = self._MPI
        if call.collective and (request := self._requests.pop(call.sequence, None)) is not None:
            mpi_job.keep_unfinished(request)
        if isinstance(error, MPI.Exception):
            named: KosError = CollectiveError(f"{call}: MPI: {error.Get_error_string()}")
            if error.Get_error_class() == MPI.ERR_TRUNCATE:
                named = CollectiveMismatch(str(named))
            elif error.Get_error_class() in (MPI.ERR_PROC_FAILED, MPI.ERR_REVOKED) or (
                mpi_job.fault_tolerant() and any(self.gone())  # amid a collective Open MPI returns ERR_OTHER
            ):
                rank, why = next(self.gone(), (None, ""))
                if rank is None and (suspects := self.ledger.suspects()):
                    rank, why = suspects[0], "its process ended"
                named = RankLost(f"{call}: {error}")
                if rank is not None:
                    named = self.ledger.lost(rank, why, call)
            named.__cause__ = error
            error = named
        if isinstance(error, RankLost):
            mpi_job.record_loss(str(error))
        return super().failed(call, error)

    def report_failure(self, failure: KosError, sequence: int) -> None:
        self.ledger.record(sequence, failure)
        with contextlib.suppress(self._MPI.Exception):
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
