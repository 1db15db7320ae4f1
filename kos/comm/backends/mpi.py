"""The mpi backend: host memory by mpi4py's upper-case calls.

Every call is non-blocking and polled, so that every wait can time out and all operations in flight progress
together.  MPI reduces what it has types for; what only moves travels as bytes, so any dtype does.  Where its
reductions would differ from other backends' or between ranks, schedules run: MPI_MAX of a NaN, for one,
depends on the order of its arguments.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from kos.comm import mpi_job
from kos.comm.backend import Probe, Request
from kos.comm.backends.host import HostBackend
from kos.comm.operation import COLLECTIVE_TAGS, Operation
from kos.comm.reduction import ReduceOp
from kos.comm.rendezvous import Rendezvous
from kos.comm.work import Engine, Idle, Steps
from kos.dtypes import DType, dtype_of
from kos.errors import CollectiveError, CollectiveMismatch, CollectiveTimeout, KosError

Array = np.ndarray[Any, Any]

# Above it our ring, whose additions overlap its messages, beats MPI_Iallreduce: 2 ranks on one host, Open MPI
# 5.0.11, November 2026: 256 KB 43 against 58 us, 4 MB 0.37 against 0.64 ms, 64 MB 18 against 90 ms (best of 40).
_NATIVE_BYTES = 128 * 1024

_MPI_OP = {
    ReduceOp.SUM: "SUM",
    ReduceOp.AVG: "SUM",
    ReduceOp.PREMUL_SUM: "SUM",
    ReduceOp.PROD: "PROD",
    ReduceOp.MIN: "MIN",
    ReduceOp.MAX: "MAX",
    ReduceOp.BAND: "BAND",
    ReduceOp.BOR: "BOR",
    ReduceOp.BXOR: "BXOR",
}


class MPIBackend(HostBackend):
    """Carries a group whose ranks are processes of an MPI communicator."""

    name = "mpi"

    def __init__(self, rendezvous: Rendezvous, engine: Engine | None = None) -> None:
        super().__init__(rendezvous, engine)
        self._MPI = mpi_job.load_mpi()
        # A communicator of our own: our tags and our order of collectives never meet anybody else's.
        self._comm, request = rendezvous.mpi_comm.Idup()
        if not mpi_job.wait_request(request, rendezvous.timeout):
            raise CollectiveTimeout(f"mpi: the ranks did not come together within {rendezvous.timeout:g} s")
        self._comm.Set_errhandler(self._MPI.ERRORS_RETURN)
        self._messages = _Messages(self._MPI, self._comm)
        self.transport = self._messages
        self._requests: dict[int, Any] = {}  # native requests in flight, by sequence number

    @classmethod
    def probe(cls, rendezvous: Rendezvous) -> Probe:
        if rendezvous.mpi_comm is None:
            return Probe(False, "the ranks are not processes of an MPI job (start with mpirun)")
        MPI = mpi_job.load_mpi()
        if MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) < 2 * COLLECTIVE_TAGS:
            return Probe(False, f"the MPI library has fewer than {2 * COLLECTIVE_TAGS} tags")
        return Probe(True, MPI.Get_library_version().split(",")[0].strip())

    def idle(self) -> Idle:
        return _CrowdedPoll() if self.crowded else _Poll()

    def close(self) -> None:
        super().close()
        if not self._MPI.Is_finalized():
            self._comm.Free()

    def abort(self, reason: str) -> None:
        super().abort(reason)
        if mpi_job.fault_tolerant() and not self._MPI.Is_finalized():
            self._comm.Revoke()  # ranks of other hosts hear it by this
        for request in self._requests.values():
            mpi_job.keep_unfinished(request)
        self._requests.clear()
        self._messages.forget(None)

    def native(self, operation: Operation, spaces: Mapping[str, Array], collective: str) -> Steps | None:
        if operation.deterministic or operation.algorithm != "auto":
            return None
        request = self._native_request(operation, spaces, collective)
        return None if request is None else self._poll_native(operation, request)

    def _native_request(self, o: Operation, spaces: Mapping[str, Array], collective: str) -> Any:
        """Post the MPI call; None where MPI has none for this dtype and reduce operation."""
        MPI, comm = self._MPI, self._comm
        if collective == "barrier":
            return comm.Ibarrier()
        if collective == "broadcast":
            return comm.Ibcast(_as_bytes(spaces["data"], MPI), o.root)
        if collective == "all_gather":
            return comm.Iallgather(_as_bytes(spaces["input"], MPI), _as_bytes(spaces["output"], MPI))
        if collective == "all_to_all":
            return comm.Ialltoall(_as_bytes(spaces["input"], MPI), _as_bytes(spaces["output"], MPI))
        if o.reduction is None:
            return None
        carrier = dtype_of(o.reduction.carrier)
        if not _same_everywhere(carrier, o.reduction.op):
            return None
        mpi_type, op = getattr(MPI, carrier.mpi), getattr(MPI, _MPI_OP[o.reduction.op])
        if collective == "all_reduce":
            if spaces["data"].nbytes > _NATIVE_BYTES:
                return None
            return comm.Iallreduce(MPI.IN_PLACE, [spaces["data"], mpi_type], op)
        if collective == "reduce":
            data = [spaces["data"], mpi_type]
            if self.rank == o.root:
                return comm.Ireduce(MPI.IN_PLACE, data, op, o.root)
            return comm.Ireduce(data, None, op, o.root)
        if collective == "reduce_scatter":
            return comm.Ireduce_scatter_block([spaces["input"], mpi_type], [spaces["output"], mpi_type], op)
        return None

    def _poll_native(self, o: Operation, request: Any) -> Steps:
        self._requests[o.sequence] = request
        while not request.Test():
            yield
        del self._requests[o.sequence]

    def awaited(self, operation: Operation) -> list[int]:
        return self._messages.awaited(self._tag(operation))

    def failed(self, operation: Operation, error: Exception) -> KosError:
        if operation.collective:
            request = self._requests.pop(operation.sequence, None)
            if request is not None:
                mpi_job.keep_unfinished(request)
            self._messages.forget(self._tag(operation))
        MPI = self._MPI
        if isinstance(error, MPI.Exception):
            named: KosError = CollectiveError(f"{operation}: MPI: {error.Get_error_string()}")
            if error.Get_error_class() == MPI.ERR_TRUNCATE:
                named = CollectiveMismatch(str(named))
            elif error.Get_error_class() in (MPI.ERR_PROC_FAILED, MPI.ERR_REVOKED):
                named = self.lost(operation, error)
            named.__cause__ = error
            error = named
        return super().failed(operation, error)


def _same_everywhere(dtype: DType, op: ReduceOp) -> bool:
    """Whether MPI's own reduction gives what every other backend gives, and the same bits on all ranks."""
    if not dtype.mpi:
        return False
    if op in (ReduceOp.MIN, ReduceOp.MAX):
        return not dtype.is_float
    # Open MPI's vector code adds 8-bit and 16-bit integers with saturation; elsewhere they wrap.
    return dtype.itemsize >= 4 or op in (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)


def _as_bytes(array: Array, MPI: Any) -> list[Any]:
    return [array.view(np.uint8), MPI.BYTE]


class _Messages:
    """The transport: Isend and Irecv of bytes; knows what is in flight, to name and to forget it."""

    def __init__(self, MPI: Any, comm: Any) -> None:
        self._MPI, self._comm = MPI, comm
        self._flying: set[_Message] = set()

    def isend(self, array: Array, peer: int, tag: int) -> Request:
        request = self._comm.Isend(_as_bytes(array, self._MPI), peer, tag)
        return self._fly(_Message(self._flying, request, peer, tag))

    def irecv(self, array: Array, peer: int, tag: int) -> Request:
        request = self._comm.Irecv(_as_bytes(array, self._MPI), peer, tag)
        return self._fly(_Message(self._flying, request, peer, tag, array.nbytes, self._MPI.Status()))

    def _fly(self, message: _Message) -> _Message:
        self._flying.add(message)
        return message

    def awaited(self, tag: int) -> list[int]:
        """Peers of the messages in flight with that tag."""
        return sorted({message.peer for message in self._flying if message.tag == tag})

    def forget(self, tag: int | None) -> None:
        """Nobody waits any more for messages with that tag (None: any); MPI keeps their memory."""
        for message in [m for m in self._flying if tag is None or m.tag == tag]:
            message.forget()


class _Message:
    __slots__ = ("_flying", "_status", "expected", "peer", "request", "tag")

    def __init__(
        self,
        flying: set[_Message],
        request: Any,
        peer: int,
        tag: int,
        expected: int | None = None,
        status: Any = None,
    ) -> None:
        self._flying, self.request, self.peer, self.tag = flying, request, peer, tag
        self.expected, self._status = expected, status  # bytes, for a receive

    def done(self) -> bool:
        if self.request is None:
            return True
        try:
            if not self.request.Test(self._status):
                return False
        except Exception:
            self._flying.discard(self)  # MPI has ended and freed it
            raise
        self.request = None
        self._flying.discard(self)
        if self.expected is not None and (got := self._status.Get_count()) != self.expected:
            raise CollectiveMismatch(
                f"expected {self.expected} bytes from rank {self.peer} with tag {self.tag}, got {got}"
            )
        return True

    def forget(self) -> None:
        if self in self._flying:
            if self.expected is not None:
                self.request.Cancel()
            mpi_job.keep_unfinished(self.request)
            self._flying.discard(self)


class _Poll(mpi_job.Backoff):
    """MPI tells nobody that a message came: waiting is polling."""

    __slots__ = ()

    def mark(self) -> int:
        return 0

    def pause(self, mark: int = 0, seconds: float | None = None) -> None:
        super().pause()


class _CrowdedPoll(_Poll):
    """More ranks than cores: to spin is to keep the one that is waited for from running."""

    __slots__ = ()
    SPINS = 0
