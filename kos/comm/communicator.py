"""Communicator: what users hold.  Checks the arguments of a call, makes it an Operation, gets Work for it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import numpy as np

from kos.comm.arguments import (
    check_tag,
    expect_alike,
    expect_place,
    in_and_out,
    refuse_overlap,
    whole_number,
)
from kos.comm.backend import Backend, Probe
from kos.comm.backends.auto import AutoBackend
from kos.comm.backends.device import DeviceBackend
from kos.comm.batch import Batch, Persistent
from kos.comm.operation import Operation
from kos.comm.recorder import Group, Recorder, failed
from kos.comm.reduction import PremulSum, ReduceOp, resolve
from kos.comm.rendezvous import Rendezvous, check_timeout
from kos.comm.schedules import algorithms
from kos.comm.work import Work
from kos.cuda import streams
from kos.errors import CollectiveError, InvalidArgument
from kos.memory import Buffer, as_buffer
from kos.memory.array import Array, Shape

Op = ReduceOp | PremulSum


class Communicator:
    """A group of ranks and one way to reach them.

    Every collective is called by all ranks of the group, in the same order.  Arrays are C-contiguous, of any
    dtype of ``kos.dtypes``, any shape, zero elements included: NumPy's, ``kos.memory.Array``, and whatever
    offers DLPack or ``__cuda_array_interface__``.  Operations work in place unless ``out`` is given, and return
    the array that holds the result.

    Arrays on a GPU: a backend for GPUs queues an operation and returns.  It is ordered with the other work on
    ``stream``, which is that of the array (``Array.stream``, CuPy's current one) unless it is given, and the
    legacy default stream where the array has none; a raw handle, ``kos.cuda`` streams, torch's and CuPy's will
    do.  With ``async_op=True`` it runs on a stream of the communicator's own, and ``Work.wait()`` makes
    ``stream`` wait for it.  The host waits where it is asked to: ``Work.wait(timeout)``, ``Work.synchronize()``,
    ``synchronize()``, ``barrier()`` without a stream, ``close()``.  Backends for host memory carry GPU arrays
    through pinned memory, and wait.

    Keywords that all operations share: ``async_op=True`` returns a Work at once instead of waiting;
    ``timeout`` in seconds replaces the communicator's own.  Where contributions are added, results are
    bit-identical on all ranks, 16-bit and 8-bit floats accumulate in fp32 and round once (not in NCCL's own sums);
    ``deterministic=True`` adds in rank order, so that results are bit-identical from run to run and between
    backends; ``algorithm`` names a schedule of ``kos.comm.schedules`` ("auto" lets the backend choose).

    Raises InvalidArgument for arguments that are refused before anything is sent; CollectiveMismatch where
    ranks made calls that do not belong together; CollectiveTimeout; RankLost.  After a collective has failed
    the ranks are out of step, and further calls raise CollectiveError.
    """

    def __init__(
        self,
        backend: Backend,
        rendezvous: Rendezvous,
        probes: Mapping[str, Probe],
        timeout: float,
        group: Group | None = None,
    ) -> None:
        self.backend = backend
        self.rendezvous = rendezvous
        self.probes = probes
        self.timeout = timeout
        self.rank, self.size = rendezvous.rank, rendezvous.size
        self.local_rank, self.local_size = rendezvous.local_rank, rendezvous.local_size
        self._collectives = 0
        self._messages = 0
        self._batch: Batch | None = None
        self._closed = False
        self._group = group or Group.world(self.rank, self.size, backend.name)
        self._recorder = self._group.recorder

    def __repr__(self) -> str:
        return f"<Communicator rank {self.rank} of {self.size} on {self.backend_name}>"

    @property
    def backend_name(self) -> str:
        """Name of the backend in use."""
        return self.backend.name

    @property
    def device(self) -> int | None:
        """The GPU whose memory the backend moves, by its number in this process; None for host memory."""
        return getattr(self.backend, "device", None)

    @property
    def recorder(self) -> Recorder:
        """The last operations of this rank, on this communicator and those split from it."""
        return self._recorder

    # Collectives that reduce.

    def all_reduce(
        self,
        x: Any,
        op: Op = ReduceOp.SUM,
        *,
        out: Any = None,
        algorithm: str = "auto",
        deterministic: bool = False,
        async_op: bool = False,
        timeout: float | None = None,
        stream: Any = None,
    ) -> Any:
        """Reduce ``x`` over all ranks; every rank gets the result in ``x``, or in ``out`` of x's shape."""
        return self._go(self._all_reduce(x, op, out, algorithm, deterministic, timeout, stream), async_op)

    def all_reduce_init(
        self,
        x: Any,
        op: Op = ReduceOp.SUM,
        *,
        out: Any = None,
        algorithm: str = "auto",
        deterministic: bool = False,
        timeout: float | None = None,
        stream: Any = None,
    ) -> Persistent:
        """A persistent ``all_reduce`` (MPI 4: MPI_Allreduce_init): checked now, started many times."""
        return Persistent(self, self._all_reduce(x, op, out, algorithm, deterministic, timeout, stream))

    def reduce(
        self,
        x: Any,
        root: int = 0,
        op: Op = ReduceOp.SUM,
        *,
        out: Any = None,
        deterministic: bool = False,
        async_op: bool = False,
        timeout: float | None = None,
        stream: Any = None,
    ) -> Any:
        """Reduce ``x`` over all ranks to ``root``, into its ``x`` or ``out``; others keep their ``x``."""
        root = self._rank("root", root)
        o = self._operation("reduce", timeout, root=root, deterministic=deterministic)
        if self.rank == root:
            o.send, o.recv = in_and_out(x, out, stream)
        else:
            o.send = as_buffer(x, "x", writable=False, stream=stream)
        o.reduction = resolve(op, o.send.dtype, self.size)
        return self._go(o, async_op)

    def reduce_scatter(
        self,
        x: Any,
        out: Any = None,
        op: Op = ReduceOp.SUM,
        *,
        algorithm: str = "auto",
        deterministic: bool = False,
        async_op: bool = False,
        timeout: float | None = None,
        stream: Any = None,
    ) -> Any:
        """Reduce ``x`` over all ranks; rank r gets the r-th of ``size`` equal parts of the result.

        ``out`` has ``x.size / size`` elements.  Without it an array is made, of shape
        ``(x.shape[0] / size, *x.shape[1:])`` if ``x`` divides so, else 1-D.
        """
        send = as_buffer(x, "x", writable=False, stream=stream)
        if send.count % self.size:
            raise InvalidArgument(f"x: expected a multiple of {self.size} elements, got {send.count}")
        shape: tuple[int, ...] = (send.count // self.size,)
        if send.shape and send.shape[0] % self.size == 0:
            shape = (send.shape[0] // self.size, *send.shape[1:])
        recv = self._output(out, send, shape, stream)
        refuse_overlap(send, recv, self.rank)
        o = self._operation(
            "reduce_scatter", timeout, send=send, recv=recv, algorithm=algorithm, deterministic=deterministic
        )
        o.reduction = resolve(op, send.dtype, self.size)
        return self._go(o, async_op)

    def reduce_scatter_v(
        self,
        x: Any,
        counts: Sequence[int],
        out: Any = None,
        op: Op = ReduceOp.SUM,
        *,
        async_op: bool = False,
        timeout: float | None = None,
        stream: Any = None,
    ) -> Any:
        """``reduce_scatter`` with ``counts[r]`` elements for rank r; always in rank order.

        ``counts`` is the same on all ranks and sums to ``x.size``; ``out`` has ``counts[rank]`` elements.
        """
        send = as_buffer(x, "x", writable=False, stream=stream)
        counts = self._counts("counts", counts, send)
        recv = self._output(out, send, (counts[self.rank],), stream)
        refuse_overlap(send, recv)
        o = self._operation("reduce_scatter_v", timeout, send=send, recv=recv, send_counts=counts)
        o.reduction = resolve(op, send.dtype, self.size)
        return self._go(o, async_op)

    # Collectives that move.

    def broadcast(
        self,
        x: Any,
        root: int = 0,
        *,
        out: Any = None,
        async_op: bool = False,
        timeout: float | None = None,
        stream: Any = None,
    ) -> Any:
        """Every rank gets root's ``x``, in ``x`` or in ``out`` of its shape."""
        root = self._rank("root", root)
        if out is None and self.rank == root:
            send = recv = as_buffer(x, "x", writable=False, stream=stream)
        else:
            send, recv = in_and_out(x, out, stream)
        return self._go(self._operation("broadcast", timeout, send=send, recv=recv, root=root), async_op)

    def all_gather(
        self,
        x: Any,
        out: Any = None,
        *,
        algorithm: str = "auto",
        async_op: bool = False,
        timeout: float | None = None,
        stream: Any = None,
    ) -> Any:
        """Every rank gets all ranks' ``x``, in rank order.

        ``out`` has ``size * x.size`` elements; without it an array of shape ``(size, *x.shape)`` is made.
        ``x`` may be its own part of ``out``.
        """
        send = as_buffer(x, "x", writable=False, stream=stream)
        recv = self._output(out, send, (self.size, *send.shape), stream)
        refuse_overlap(send, recv, self.rank)
        o = self._operation("all_gather", timeout, send=send, recv=recv, algorithm=algorithm)
        return self._go(o, async_op)

    def all_gather_v(
        self,
        x: Any,
        counts: Sequence[int],
        out: Any = None,
        *,
        async_op: bool = False,
        timeout: float | None = None,
        stream: Any = None,
    ) -> Any:
        """``all_gather`` of ``counts[r]`` elements from rank r into ``out``, 1-D if it is made here.

        ``counts`` is the same on all ranks, ``counts[rank]`` is ``x.size``.
        """
        send = as_buffer(x, "x", writable=False, stream=stream)
        counts = self._counts("counts", counts, None)
        if counts[self.rank] != send.count:
            expected = f"counts[{self.rank}] = {counts[self.rank]}"
            raise InvalidArgument(f"x: expected {expected} elements, got {send.count}")
        recv = self._output(out, send, (sum(counts),), stream)
        refuse_overlap(send, recv)
        o = self._operation("all_gather_v", timeout, send=send, recv=recv, recv_counts=counts)
        return self._go(o, async_op)

    def all_gather_bytes(self, data: bytes, *, timeout: float | None = None) -> list[bytes]:
        """All ranks' ``data``, of any lengths, in rank order: for small things that steer a program."""
        if self._batch is not None:
            raise InvalidArgument("all_gather_bytes: expected a call outside of a batch, got one inside")
        if self.device is not None:
            return self.rendezvous.allgather(data)  # bytes of the host
        x = np.frombuffer(bytes(data), np.uint8)
        counts = self.all_gather(np.array(x.size, np.int64), timeout=timeout).tolist()
        joined = self.all_gather_v(x, counts, timeout=timeout)
        ends = np.cumsum(counts)
        return [joined[end - n : end].tobytes() for end, n in zip(ends, counts, strict=True)]

    def all_to_all(
        self,
        x: Any,
        out: Any = None,
        *,
        async_op: bool = False,
        timeout: float | None = None,
        stream: Any = None,
    ) -> Any:
        """Part j of rank i's ``x`` becomes part i of rank j's ``out`` of x's shape; parts are equal."""
        send = as_buffer(x, "x", writable=False, stream=stream)
        if send.count % self.size:
            raise InvalidArgument(f"x: expected a multiple of {self.size} elements, got {send.count}")
        recv = self._output(out, send, send.shape, stream)
        refuse_overlap(send, recv)
        return self._go(self._operation("all_to_all", timeout, send=send, recv=recv), async_op)

    def all_to_all_v(
        self,
        x: Any,
        send_counts: Sequence[int],
        recv_counts: Sequence[int],
        out: Any = None,
        *,
        async_op: bool = False,
        timeout: float | None = None,
        stream: Any = None,
    ) -> Any:
        """``all_to_all`` with ``send_counts[j]`` elements for rank j and ``recv_counts[i]`` from rank i."""
        send = as_buffer(x, "x", writable=False, stream=stream)
        send_counts = self._counts("send_counts", send_counts, send)
        recv_counts = self._counts("recv_counts", recv_counts, None)
        if send_counts[self.rank] != recv_counts[self.rank]:
            raise InvalidArgument(
                f"recv_counts: expected send_counts[{self.rank}] = {send_counts[self.rank]} from this rank "
                f"itself, got {recv_counts[self.rank]}"
            )
        recv = self._output(out, send, (sum(recv_counts),), stream)
        refuse_overlap(send, recv)
        o = self._operation(
            "all_to_all_v", timeout, send=send, recv=recv, send_counts=send_counts, recv_counts=recv_counts
        )
        return self._go(o, async_op)

    def gather(
        self,
        x: Any,
        root: int = 0,
        out: Any = None,
        *,
        async_op: bool = False,
        timeout: float | None = None,
        stream: Any = None,
    ) -> Any:
        """``root`` gets all ranks' ``x`` in rank order: ``out`` as in ``all_gather``; others get None."""
        root = self._rank("root", root)
        send = as_buffer(x, "x", writable=False, stream=stream)
        o = self._operation("gather", timeout, send=send, root=root)
        if self.rank == root:
            o.recv = self._output(out, send, (self.size, *send.shape), stream)
            refuse_overlap(send, o.recv, self.rank)
        elif out is not None:
            raise InvalidArgument(f"out: expected None on rank {self.rank}, which is not root {root}")
        return self._go(o, async_op)

    def scatter(
        self,
        x: Any,
        out: Any,
        root: int = 0,
        *,
        async_op: bool = False,
        timeout: float | None = None,
        stream: Any = None,
    ) -> Any:
        """Rank r gets in ``out`` the r-th of ``size`` equal parts of root's ``x``; others give no ``x``."""
        root = self._rank("root", root)
        recv = as_buffer(out, "out", writable=True, stream=stream)
        o = self._operation("scatter", timeout, recv=recv, root=root)
        if self.rank == root:
            o.send = as_buffer(x, "x", writable=False, stream=stream)
            expect_alike("out", recv, o.send)
            if o.send.count != self.size * recv.count:
                raise InvalidArgument(f"x: expected {self.size * recv.count} elements, got {o.send.count}")
            refuse_overlap(o.send, recv, self.rank)
        elif x is not None:
            raise InvalidArgument(f"x: expected None on rank {self.rank}, which is not root {root}")
        return self._go(o, async_op)

    def barrier(
        self, *, async_op: bool = False, timeout: float | None = None, stream: Any = None
    ) -> Any:
        """Return once every rank has called it.

        With a ``stream`` of a GPU nothing waits but that stream: what is queued on it from now on comes after
        what every rank has queued on its own so far.
        """
        o = self._operation("barrier", timeout)
        if stream is not None:
            o.stream = streams.handle(stream)
        elif self.device is not None and self._batch is None and not async_op:
            return self._go(o, True).synchronize()
        return self._go(o, async_op)

    # Messages.

    def send(
        self,
        x: Any,
        dst: int,
        tag: int = 0,
        *,
        async_op: bool = False,
        timeout: float | None = None,
        stream: Any = None,
    ) -> Any:
        """Send ``x`` to rank ``dst``; it may be changed once the call (or its Work) is done."""
        o = self._operation("send", timeout, dst=self._peer("dst", dst), tag=check_tag("tag", tag))
        o.send = as_buffer(x, "x", writable=False, stream=stream)
        return self._go(o, async_op)

    def recv(
        self,
        x: Any,
        src: int,
        tag: int = 0,
        *,
        async_op: bool = False,
        timeout: float | None = None,
        stream: Any = None,
    ) -> Any:
        """Receive into ``x`` what rank ``src`` sent with ``tag``: the same dtype and number of elements."""
        o = self._operation("recv", timeout, src=self._peer("src", src), recv_tag=check_tag("tag", tag))
        o.recv = as_buffer(x, "x", writable=True, stream=stream)
        return self._go(o, async_op)

    def send_recv(
        self,
        x: Any,
        out: Any,
        dst: int,
        src: int,
        tag: int = 0,
        *,
        async_op: bool = False,
        timeout: float | None = None,
        stream: Any = None,
    ) -> Any:
        """Send ``x`` to ``dst`` while receiving ``out`` from ``src`` (MPI_Sendrecv)."""
        tag = check_tag("tag", tag)
        o = self._operation("send_recv", timeout, tag=tag, recv_tag=tag)
        o.dst, o.src = self._peer("dst", dst), self._peer("src", src)
        o.send = as_buffer(x, "x", writable=False, stream=stream)
        o.recv = as_buffer(out, "out", writable=True, stream=stream)
        expect_place("out", o.recv, o.send)
        refuse_overlap(o.send, o.recv)
        return self._go(o, async_op)

    def batch(self, *, async_op: bool = False) -> Batch:
        """Operations called in ``with comm.batch() as batch:`` are checked at once and launched together.

        They start when the block ends, and are waited for unless ``async_op``; if it raises, none starts.
        """
        return Batch(self, async_op)

    # Groups.

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """The communicator of the ranks that gave the same ``color``, ranked by (key, rank).

        Collective.  A rank with color None takes part and gets None.
        """
        self._check_open()
        color = None if color is None else whole_number("color", color)
        if color is not None and not 0 <= color < 1 << 31:  # a C int, for MPI
            raise InvalidArgument(f"color: expected a number from 0 to {(1 << 31) - 1} or None, got {color}")
        key = whole_number("key", key)
        if not -(1 << 31) <= key < 1 << 31:
            raise InvalidArgument(f"key: expected a number from {-(1 << 31)} to {(1 << 31) - 1}, got {key}")
        self._drain()
        name = self._group.next_split()
        rendezvous = self.rendezvous.split(color, key)
        backend = self.backend.split(rendezvous, color, key)
        if rendezvous is None or backend is None:
            return None
        mine = str(self._group.ranks[self.rank]).encode()
        ranks = [int(rank) for rank in rendezvous.allgather(mine)]
        group = Group(self._recorder, f"{name}:{color}", ranks, rendezvous.rank, backend.name)
        return Communicator(backend, rendezvous, self.probes, self.timeout, group)

    def duplicate(self) -> Communicator:
        """Another communicator over the same ranks, whose operations never meet this one's.  Collective."""
        duplicate = self.split(0, self.rank)
        assert duplicate is not None
        return duplicate

    def shrink(self) -> Communicator:
        """The communicator of the ranks that are left when some are gone, in their order; all of them call it.

        This communicator is given up: ranks that still wait in one of its operations raise RankLost from it.
        With mpi it takes ``mpirun --with-ft ulfm``.  Raises BackendUnavailable where the loss of a rank ends
        the group, RendezvousError when a rank that is not gone does not come within the timeout.
        """
        self._check_open()
        self.rendezvous.check_shrink()
        name, mine = self._group.next_split(), str(self._group.ranks[self.rank]).encode()
        self._give_up(self.backend.broken or "it shrinks the communicator")
        rendezvous = self.rendezvous.shrink()
        backend = self.backend.split(rendezvous, 0, rendezvous.rank)
        assert backend is not None
        ranks = [int(rank) for rank in rendezvous.allgather(mine)]
        group = Group(self._recorder, f"{name}:shrunk", ranks, rendezvous.rank, backend.name)
        return Communicator(backend, rendezvous, self.probes, self.timeout, group)

    def synchronize(self, timeout: float | None = None, stream: Any = None) -> None:
        """Wait on the host for all operations of this communicator, at most ``timeout`` seconds.

        This is where failures of operations on a GPU are learned of, besides the waits of a Work and the next
        call.  ``stream``: wait for everything on that stream instead, replays of captured graphs included.
        """
        timeout = self.timeout if timeout is None else check_timeout(timeout)
        for work in self.backend.engine.outstanding():
            if self.backend.owns(work):
                work.wait(timeout)
        self.backend.synchronize(timeout, None if stream is None else streams.handle(stream))

    def allocate(self, shape: Shape, dtype: Any) -> Any:
        """An uninitialised array in the memory that the backend moves best.  Collective, with one size.

        With nccl that is a symmetric window on this rank's GPU, with host memory a plain ndarray.
        """
        self._check_open()
        return self.backend.allocate(shape, dtype)

    def explain(self) -> str:
        """The table of backends: which can carry this group, and why not the others."""
        rows = [("backend", "usable", "why")]
        for name, probe in self.probes.items():
            chosen = "in use" if name in self.backend_name.split("+") else "yes" if probe.usable else "no"
            rows.append((name, chosen, probe.reason))
        host: Any = getattr(self.backend, "host", self.backend)
        if (shared := getattr(host, "shared_memory", None)) is not None:
            rows.append(("shared memory", "in use" if host.shares_memory else "no", shared))
        widths = [max(len(row[i]) for row in rows) for i in range(2)]
        return "\n".join(f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c}" for a, b, c in rows)

    def close(self) -> None:
        """Wait for what is in flight and give the communicator back.  Collective; once is enough."""
        if self._closed:
            return
        if self.backend.broken is not None:
            self._give_up(self.backend.broken)  # ranks out of step cannot close together
            return
        self._recorder.close(self._group)
        self._drain()
        self._closed = True
        self.backend.close()
        self.rendezvous.close()

    def abort(self, code: int = 1, reason: str = "it aborted the communicator") -> None:
        """Give up on what is in flight without waiting for anybody; the communicator is closed after it.

        Other ranks that wait for this one raise RankLost (mock), or are ended when this process exits, with
        ``code`` as the job's exit status (mpi).
        """
        if not self._closed:
            self._give_up(reason)
            self.rendezvous.abandon(code)

    def _give_up(self, reason: str) -> None:
        self._closed = True
        self.backend.abort(reason)  # first: what the others hear is the reason
        for work in self.backend.engine.outstanding():
            if self.backend.owns(work):
                work.cancel(CollectiveError(f"{work.operation}: the communicator was aborted"))
        self._recorder.close(self._group, f"given up: {reason}")

    def __enter__(self) -> Communicator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if value is None or (isinstance(value, SystemExit) and not value.code):
            self.close()
        else:
            code = value.code if isinstance(value, SystemExit) else 1
            self.abort(code if isinstance(code, int) else 1, f"{type(value).__name__}: {value}")

    # Making and launching operations.

    def _all_reduce(
        self, x: Any, op: Op, out: Any, algorithm: str, deterministic: bool, timeout: float | None, stream: Any
    ) -> Operation:
        send, recv = in_and_out(x, out, stream)
        reduction = resolve(op, send.dtype, self.size)
        timeout = self.timeout if timeout is None else check_timeout(timeout)
        o = Operation(
            "all_reduce", self.rank, send, recv, reduction,
            algorithm=algorithm, deterministic=deterministic, timeout=timeout,
        )  # fmt: skip
        if algorithm != "auto":
            self._check_algorithm(o)
        return o

    def _operation(self, name: str, timeout: float | None, **fields: Any) -> Operation:
        timeout = self.timeout if timeout is None else check_timeout(timeout)
        o = Operation(name, self.rank, timeout=timeout, **fields)
        if o.algorithm != "auto":
            self._check_algorithm(o)
        return o

    @staticmethod
    def _check_algorithm(o: Operation) -> None:
        allowed = algorithms(o.name, ordered=True if o.deterministic else None)
        if o.algorithm not in allowed:
            why = " that add in rank order (deterministic=True)" if o.deterministic else ""
            raise InvalidArgument(
                f"algorithm: expected 'auto' or one of {', '.join(allowed)}{why} for {o.name}, "
                f"got {o.algorithm!r}"
            )

    def _go(self, operation: Operation, async_op: bool) -> Any:
        self.backend.prepare(operation)
        if self._batch is not None:
            self._batch.operations.append(operation)
            return operation.recv.array if operation.recv is not None else None
        operation.overlap = async_op
        work = self._launch(operation)
        return work if async_op else work.wait()

    def _launch(self, operation: Operation, depth: int = 4) -> Work:
        """Launch a checked operation, whose caller is ``depth`` frames above ``Recorder.record``."""
        self._check_open()
        self._stamp(operation)
        self._recorder.record(self._group, operation, depth)
        try:
            return self.backend.start(operation)
        except Exception as error:
            failed(operation, error)
            raise

    def _launch_all(self, operations: list[Operation], overlap: bool, works: list[Work]) -> None:
        """Launch the checked operations of a batch, and add to ``works`` what is in flight."""
        self._check_open()
        for operation in operations:
            operation.overlap = overlap
        if not isinstance(self.backend, DeviceBackend | AutoBackend):
            for operation in operations:
                works.append(self._launch(operation))
            return
        for operation in operations:
            self._stamp(operation)
            self._recorder.record(self._group, operation, 3)
        if operations:
            works.extend(self.backend.start_all(operations))

    def _stamp(self, operation: Operation) -> None:
        # Stamped at the launch, not when it was checked: a call that is refused does not count.
        if operation.collective:
            operation.sequence = self._collectives
            self._collectives += 1
        else:
            operation.sequence = self._messages
            self._messages += 1

    def _drain(self) -> None:
        for work in self.backend.engine.outstanding():
            if self.backend.owns(work):
                work.wait()
        self.backend.synchronize(self.timeout)

    def _check_open(self) -> None:
        if self._closed:
            raise CollectiveError(f"{self!r} is closed")

    # Checking arguments.

    def _rank(self, what: str, rank: Any) -> int:
        rank = whole_number(what, rank)
        if not 0 <= rank < self.size:
            raise InvalidArgument(f"{what}: expected a rank from 0 to {self.size - 1}, got {rank}")
        return rank

    def _peer(self, what: str, rank: Any) -> int:
        rank = self._rank(what, rank)
        if rank == self.rank:
            raise InvalidArgument(f"{what}: expected another rank, got this rank, {rank}")
        return rank

    def _counts(self, what: str, counts: Sequence[int], total: Buffer | None) -> list[int]:
        counts = [whole_number(what, count) for count in counts]
        if len(counts) != self.size or min(counts) < 0:
            raise InvalidArgument(f"{what}: expected {self.size} numbers from 0 on, got {counts}")
        if total is not None and sum(counts) != total.count:
            raise InvalidArgument(
                f"{what}: expected a sum of {total.count}, the elements of x, got {sum(counts)}"
            )
        return counts

    def _output(self, out: Any, send: Buffer, shape: tuple[int, ...], stream: Any) -> Buffer:
        """``out`` checked against what ``send`` needs, or a new array of ``shape`` in the same memory."""
        if out is None:
            return as_buffer(_empty(shape, send, stream), "out", writable=True, stream=stream)
        recv = as_buffer(out, "out", writable=True, stream=stream)
        expect_alike("out", recv, send)
        count = math.prod(shape)
        if recv.count != count:
            raise InvalidArgument(f"out: expected {count} elements (shape {shape}), got shape {recv.shape}")
        return recv


def _empty(shape: tuple[int, ...], like: Buffer, stream: Any) -> Any:
    """An array on the host, or on the GPU of ``like`` in the order of the same stream."""
    if like.device is None:
        return np.empty(shape, like.dtype.numpy)
    if stream is None:
        stream = like.array.stream if isinstance(like.array, Array) else like.stream
    return Array.empty(shape, like.dtype, like.device, stream=stream)
