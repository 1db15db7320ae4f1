"""The mpi backend: host memory by mpi4py's upper-case calls.

Every call is non-blocking and polled, so that every wait can time out and all operations in flight progress
together.  MPI reduces what it has types for; what only moves travels as bytes, so any dtype does.  Where its
reductions would differ from other backends' or between ranks, schedules run: MPI_MAX of a NaN, for one,
depends on the order of its arguments.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from kos.comm import mpi_job
from kos.comm.backend import Probe, drop, take, wrong_length
from kos.comm.backends.host import HostBackend
from kos.comm.operation import COLLECTIVE_TAGS, Operation
from kos.comm.reduction import ReduceOp
from kos.comm.rendezvous import Rendezvous
from kos.comm.schedules.execute import Request
from kos.comm.work import Engine, Steps
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
        self._messages.forget(lambda message: True)

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
            tag = self._tag(operation)
            self._messages.forget(lambda message: message.tag == tag)
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
    """The transport: bytes; knows what is in flight, to name and to forget it.

    A receive meets a message that has come (MPI_Improbe) before MPI gets its memory: where they differ in
    length, Open MPI 5.0.11 writes past the end of what it was given (within a host, from 4 KiB on).  So a
    receive that is given up before never was MPI's.
    """

    def __init__(self, MPI: Any, comm: Any) -> None:
        self._MPI, self._comm, self._status = MPI, comm, MPI.Status()
        self.flying: set[_Message] = set()
        self._posted: dict[tuple[int, int], deque[_Message]] = {}  # receives that nothing has met, by peer and tag

    def isend(self, array: Array, peer: int, tag: int) -> Request:
        message = _Message(self, array, peer, tag)
        message.fly(self._comm.Isend(_as_bytes(array, self._MPI), peer, tag))
        return message

    def irecv(self, array: Array, peer: int, tag: int) -> Request:
        message = _Message(self, array, peer, tag)
        self._posted.setdefault((peer, tag), deque()).append(message)
        return message

    def match(self, message: _Message) -> None:
        """Give a receive to MPI if what it is for has come."""
        key = message.peer, message.tag
        posted = self._posted.get(key)
        if posted is None or posted[0] is not message or (came := self._comm.Improbe(*key, self._status)) is None:
            return
        take(self._posted, key)
        array, nbytes = message.array, self._status.Get_count()
        if nbytes == array.nbytes:
            message.fly(came.Irecv(_as_bytes(array, self._MPI)))
        else:
            mpi_job.keep_unfinished(came.Irecv([np.empty(nbytes, np.uint8), self._MPI.BYTE]))
            message.error = wrong_length(self._comm.rank, array.nbytes, message.peer, nbytes, array.dtype)

    def awaited(self, tag: int) -> list[int]:
        """Peers of the messages in flight with that tag."""
        flying = {message.peer for message in self.flying if message.tag == tag}
        return sorted(flying | {peer for peer, posted in self._posted if posted == tag})

    def forget(self, given_up: Callable[[_Message], bool]) -> None:
        """Nobody waits for these messages any more; MPI keeps the memory that it has."""
        drop(self._posted, given_up)
        for message in [message for message in self.flying if given_up(message)]:
            mpi_job.keep_unfinished(message.request)
            self.flying.discard(message)


class _Message:
    __slots__ = ("_transport", "array", "complete", "error", "peer", "request", "tag")

    def __init__(self, transport: _Messages, array: Array, peer: int, tag: int) -> None:
        self._transport, self.array, self.peer, self.tag = transport, array, peer, tag
        self.request: Any = None  # while MPI has it
        self.complete = False
        self.error: CollectiveMismatch | None = None

    def fly(self, request: Any) -> None:
        self.request = request
        self._transport.flying.add(self)

    def done(self) -> bool:
        if self.request is None and not self.complete:
            self._transport.match(self)
        if self.error is not None:
            raise self.error
        if self.request is None:
            return self.complete
        try:
            self.complete = self.request.Test()
        except Exception:
            self._transport.flying.discard(self)  # MPI has ended and freed it
            raise
        if self.complete:
            self.request = None
            self._transport.flying.discard(self)
        return self.complete

    def forget(self) -> None:
        self._transport.forget(lambda message: message is self)
