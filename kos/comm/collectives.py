"""The operations of a communicator: each checks its arguments and makes them an Operation.

Every call goes one way: arguments → buffers → ``Operation`` → ``_go``.  ``Communicator._go`` launches the operation, or
keeps it for a batch.  ``_Builder._go`` returns it, for the persistent form.
"""

from __future__ import annotations

import functools
import inspect
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

from kos.comm.arguments import (
    check_algorithm,
    check_counts,
    check_peer,
    check_rank,
    check_tag,
    check_timeout,
    expect_alike,
    expect_place,
    in_and_out,
    output,
    part_of,
    refuse_overlap,
    truth,
)
from kos.comm.operation import AUTO, Message, Operation, Options
from kos.comm.persistent import Persistent
from kos.comm.reduction import PremulSum, ReduceOp, resolve
from kos.cuda import streams
from kos.errors import InvalidArgument
from kos.memory import Buffer, as_buffer
from kos.memory.array import Array

Op = ReduceOp | PremulSum
T = TypeVar("T")
Comm = TypeVar("Comm")
P = ParamSpec("P")


def _persistent(call: Callable[Concatenate[Comm, P], T]) -> Callable[Concatenate[Comm, P], Persistent[T]]:
    """The persistent form of an operation: its checks are made now, its launch at every ``start``."""

    @functools.wraps(call)
    def init(comm: Any, *args: P.args, **options: P.kwargs) -> Persistent[T]:
        comm._check_open()
        operation: Any = call(_Builder(comm), *args, **options)  # type: ignore[arg-type]
        return Persistent(comm, operation)

    name = call.__name__
    init.__name__, init.__qualname__ = f"{name}_init", f"{call.__qualname__}_init"
    init.__doc__ = f"A persistent ``{name}``: checked now, and launched by each ``start()`` of what is returned."
    signature = inspect.signature(call)
    kept = [parameter for parameter in signature.parameters.values() if parameter.name != "async_op"]
    init.__signature__ = signature.replace(parameters=kept, return_annotation=Persistent)  # type: ignore[attr-defined]
    return init


class Operations:
    """Every operation, and its persistent form."""

    rank: int
    size: int
    device: int | None
    """The GPU whose memory the backend moves, by its number in this process; None for host memory."""
    _defaults: Options
    """The options of a call that names none."""

    @abstractmethod
    def _go(self, o: Operation) -> Any:
        """Take the operation."""

    @abstractmethod
    def _repeat(self, name: str, x: Array, out: Any, parameter: Any) -> bool:
        """Launch the cached call of these arguments; False if there is none."""

    @property
    def _deferred(self) -> bool:
        """Whether ``_go`` launches nothing now: in a batch, and for the persistent form."""
        return True

    def _options(
        self, name: str, stream: Any, async_op: bool, timeout: float | None, algorithm: str = AUTO,
        deterministic: bool = False,
    ) -> Options:  # fmt: skip
        if stream is timeout is None and async_op is deterministic is False and algorithm is AUTO:
            return self._defaults
        seconds = self._defaults.timeout if timeout is None else check_timeout(timeout)
        ordered, overlap = truth("deterministic", deterministic), truth("async_op", async_op)
        if overlap and self._deferred:
            raise InvalidArgument("async_op: expected False in a batch and for a persistent operation, got True")
        return Options(seconds, check_algorithm(algorithm, name, ordered), ordered, overlap, stream)

    # Collectives that reduce.

    def all_reduce(self, x: Any, op: Op = ReduceOp.SUM, *, out: Any = None, stream: Any = None,
                   async_op: bool = False, timeout: float | None = None, algorithm: str = AUTO,
                   deterministic: bool = False) -> Any:
        """Reduce ``x`` over all ranks; every rank gets the result in ``x``, or in ``out`` of x's shape."""
        if (
            type(x) is Array and stream is timeout is None and async_op is deterministic is False
            and algorithm is AUTO and self._repeat("all_reduce", x, out, op)
        ):
            return x if out is None else out
        options = self._options("all_reduce", stream, async_op, timeout, algorithm, deterministic)
        send, recv = in_and_out(x, out, stream)
        reduction = resolve(op, send.dtype, self.size)
        return self._go(Operation("all_reduce", self.rank, send, recv, reduction, options=options))

    def reduce(self, x: Any, root: int = 0, op: Op = ReduceOp.SUM, *, out: Any = None, stream: Any = None,
               async_op: bool = False, timeout: float | None = None, algorithm: str = AUTO,
               deterministic: bool = False) -> Any:
        """Reduce ``x`` over all ranks to ``root``, into its ``x`` or ``out``; others keep their ``x``."""
        options = self._options("reduce", stream, async_op, timeout, algorithm, deterministic)
        recv: Buffer | None = None
        if self.rank == (root := check_rank("root", root, self.size)):
            send, recv = in_and_out(x, out, stream)
        else:
            send = _input(x, stream)
        reduction = resolve(op, send.dtype, self.size)
        return self._go(Operation("reduce", self.rank, send, recv, reduction, root, options=options))

    def reduce_scatter(self, x: Any, out: Any = None, op: Op = ReduceOp.SUM, *, stream: Any = None,
                       async_op: bool = False, timeout: float | None = None, algorithm: str = AUTO,
                       deterministic: bool = False) -> Any:
        """Reduce ``x`` over all ranks; rank r gets the r-th of ``size`` equal parts of the result.

        ``out`` has ``x.size / size`` elements.  Without it an array is made, of shape
        ``(x.shape[0] / size, *x.shape[1:])`` if ``x`` divides so, else 1-D.
        """
        if (
            type(x) is Array and out is not None and stream is timeout is None
            and async_op is deterministic is False and algorithm is AUTO
            and self._repeat("reduce_scatter", x, out, op)
        ):
            return out
        options = self._options("reduce_scatter", stream, async_op, timeout, algorithm, deterministic)
        send = _input(x, stream)
        recv = output(out, send, part_of(send, self.size), stream, self.rank)
        reduction = resolve(op, send.dtype, self.size)
        return self._go(Operation("reduce_scatter", self.rank, send, recv, reduction, options=options))

    def reduce_scatter_v(self, x: Any, counts: Sequence[int], out: Any = None, op: Op = ReduceOp.SUM, *,
                         stream: Any = None, async_op: bool = False, timeout: float | None = None) -> Any:
        """``reduce_scatter`` with ``counts[r]`` elements for rank r; always in rank order.

        ``counts`` is the same on all ranks and sums to ``x.size``; ``out`` has ``counts[rank]`` elements.
        """
        options = self._options("reduce_scatter_v", stream, async_op, timeout)
        send = _input(x, stream)
        counts = check_counts("counts", counts, self.size, send)
        recv = output(out, send, (counts[self.rank],), stream)
        reduction = resolve(op, send.dtype, self.size)
        return self._go(Operation(
            "reduce_scatter_v", self.rank, send, recv, reduction, send_counts=counts, options=options
        ))

    # Collectives that move.

    def broadcast(self, x: Any, root: int = 0, *, out: Any = None, stream: Any = None, async_op: bool = False,
                  timeout: float | None = None, algorithm: str = AUTO) -> Any:
        """Every rank gets root's ``x``, in ``x`` or in ``out`` of its shape."""
        if (
            type(x) is Array and stream is timeout is None and async_op is False and algorithm is AUTO
            and self._repeat("broadcast", x, out, root)
        ):
            return x if out is None else out
        options = self._options("broadcast", stream, async_op, timeout, algorithm)
        root = check_rank("root", root, self.size)
        if out is None and self.rank == root:
            send = recv = _input(x, stream)
        else:
            send, recv = in_and_out(x, out, stream)
        return self._go(Operation("broadcast", self.rank, send, recv, root=root, options=options))

    def all_gather(self, x: Any, out: Any = None, *, stream: Any = None, async_op: bool = False,
                   timeout: float | None = None, algorithm: str = AUTO) -> Any:
        """Every rank gets all ranks' ``x``, in rank order.

        ``out`` has ``size * x.size`` elements; without it an array of shape ``(size, *x.shape)`` is made.
        ``x`` may be its own part of ``out``.
        """
        if (
            type(x) is Array and out is not None and stream is timeout is None and async_op is False
            and algorithm is AUTO and self._repeat("all_gather", x, out, None)
        ):
            return out
        options = self._options("all_gather", stream, async_op, timeout, algorithm)
        send = _input(x, stream)
        recv = output(out, send, (self.size, *send.shape), stream, self.rank)
        return self._go(Operation("all_gather", self.rank, send, recv, options=options))

    def all_gather_v(self, x: Any, counts: Sequence[int], out: Any = None, *, stream: Any = None,
                     async_op: bool = False, timeout: float | None = None) -> Any:
        """``all_gather`` of ``counts[r]`` elements from rank r into ``out``, 1-D if it is made here.

        ``counts`` is the same on all ranks, ``counts[rank]`` is ``x.size``.
        """
        options = self._options("all_gather_v", stream, async_op, timeout)
        send = _input(x, stream)
        counts = check_counts("counts", counts, self.size)
        if counts[self.rank] != send.count:
            expected = f"counts[{self.rank}] = {counts[self.rank]}"
            raise InvalidArgument(f"x: expected {expected} elements, got {send.count}")
        recv = output(out, send, (sum(counts),), stream)
        return self._go(Operation("all_gather_v", self.rank, send, recv, recv_counts=counts, options=options))

    def all_to_all(self, x: Any, out: Any = None, *, stream: Any = None, async_op: bool = False,
                   timeout: float | None = None, algorithm: str = AUTO) -> Any:
        """Part j of rank i's ``x`` becomes part i of rank j's ``out`` of x's shape; parts are equal."""
        options = self._options("all_to_all", stream, async_op, timeout, algorithm)
        send = _input(x, stream)
        part_of(send, self.size)
        recv = output(out, send, send.shape, stream)
        return self._go(Operation("all_to_all", self.rank, send, recv, options=options))

    def all_to_all_v(self, x: Any, send_counts: Sequence[int], recv_counts: Sequence[int], out: Any = None, *,
                     stream: Any = None, async_op: bool = False, timeout: float | None = None) -> Any:
        """``all_to_all`` with ``send_counts[j]`` elements for rank j and ``recv_counts[i]`` from rank i."""
        options = self._options("all_to_all_v", stream, async_op, timeout)
        send = _input(x, stream)
        send_counts = check_counts("send_counts", send_counts, self.size, send)
        recv_counts = check_counts("recv_counts", recv_counts, self.size)
        mine = send_counts[self.rank]
        if mine != recv_counts[self.rank]:
            expected = f"send_counts[{self.rank}] = {mine} from this rank itself"
            raise InvalidArgument(f"recv_counts: expected {expected}, got {recv_counts[self.rank]}")
        recv = output(out, send, (sum(recv_counts),), stream)
        return self._go(Operation(
            "all_to_all_v", self.rank, send, recv, send_counts=send_counts, recv_counts=recv_counts, options=options
        ))

    def gather(self, x: Any, root: int = 0, out: Any = None, *, stream: Any = None, async_op: bool = False,
               timeout: float | None = None, algorithm: str = AUTO) -> Any:
        """``root`` gets all ranks' ``x`` in rank order: ``out`` as in ``all_gather``; others get None."""
        options = self._options("gather", stream, async_op, timeout, algorithm)
        send, recv, root = _input(x, stream), None, check_rank("root", root, self.size)
        if self.rank == root:
            recv = output(out, send, (self.size, *send.shape), stream, self.rank)
        elif out is not None:
            raise InvalidArgument(f"out: expected None on rank {self.rank}, which is not root {root}")
        return self._go(Operation("gather", self.rank, send, recv, root=root, options=options))

    def scatter(self, x: Any, out: Any, root: int = 0, *, stream: Any = None, async_op: bool = False,
                timeout: float | None = None, algorithm: str = AUTO) -> Any:
        """Rank r gets in ``out`` the r-th of ``size`` equal parts of root's ``x``; others give no ``x``."""
        options = self._options("scatter", stream, async_op, timeout, algorithm)
        send, recv = None, as_buffer(out, "out", writable=True, stream=stream)
        if self.rank == (root := check_rank("root", root, self.size)):
            send = _input(x, stream)
            expect_alike("out", recv, send)
            if send.count != self.size * recv.count:
                raise InvalidArgument(f"x: expected {self.size * recv.count} elements, got {send.count}")
            refuse_overlap(send, recv, self.rank)
        elif x is not None:
            raise InvalidArgument(f"x: expected None on rank {self.rank}, which is not root {root}")
        return self._go(Operation("scatter", self.rank, send, recv, root=root, options=options))

    def barrier(self, *, stream: Any = None, async_op: bool = False, timeout: float | None = None) -> Any:
        """Return once every rank has called it.

        With a ``stream`` of a GPU nothing waits but that stream: what is queued on it from now on comes after
        what every rank has queued on its own so far.
        """
        if stream is not None:
            self._handle(stream)
        on_host = self.device is not None and stream is None and async_op is False and not self._deferred
        options = self._options("barrier", stream, on_host or async_op, timeout)
        done = self._go(Operation("barrier", self.rank, options=options))
        return done.synchronize() if on_host else done

    def _handle(self, stream: Any) -> int:
        """The handle of a stream that is named without an array."""
        if self.device is None:
            raise InvalidArgument(f"stream: expected None, for no GPU is used here, got {stream!r}")
        return streams.handle(stream)

    # Messages.

    def send(self, x: Any, dst: int, tag: int = 0, *, stream: Any = None, async_op: bool = False,
             timeout: float | None = None) -> Any:
        """Send ``x`` to rank ``dst``; it may be changed once the call (or its Work) is done, or has failed.

        In host memory a message may be complete before it is received.  One that is not in time ends the communicator.
        """
        options = self._options("send", stream, async_op, timeout)
        message = Message(dst=check_peer("dst", dst, self.rank, self.size), tag=check_tag(tag))
        return self._go(Operation("send", self.rank, _input(x, stream), message=message, options=options))

    def recv(self, x: Any, src: int, tag: int = 0, *, stream: Any = None, async_op: bool = False,
             timeout: float | None = None) -> Any:
        """Receive into ``x`` what rank ``src`` sent with ``tag``: the same dtype and number of elements."""
        options = self._options("recv", stream, async_op, timeout)
        message = Message(src=check_peer("src", src, self.rank, self.size), recv_tag=check_tag(tag))
        recv = as_buffer(x, "x", writable=True, stream=stream)
        return self._go(Operation("recv", self.rank, recv=recv, message=message, options=options))

    def send_recv(self, x: Any, out: Any, dst: int, src: int, tag: int = 0, *, stream: Any = None,
                  async_op: bool = False, timeout: float | None = None) -> Any:
        """Send ``x`` to ``dst`` while receiving ``out`` from ``src`` (MPI_Sendrecv)."""
        options = self._options("send_recv", stream, async_op, timeout)
        dst, src = (check_peer(what, rank, self.rank, self.size) for what, rank in (("dst", dst), ("src", src)))
        send, recv = _input(x, stream), as_buffer(out, "out", writable=True, stream=stream)
        expect_place("out", recv, send)
        refuse_overlap(send, recv)
        message = Message(dst, src, check_tag(tag), tag)
        return self._go(Operation("send_recv", self.rank, send, recv, message=message, options=options))

    # Persistent forms, named as MPI 4 names them.

    all_reduce_init = _persistent(all_reduce)
    reduce_init = _persistent(reduce)
    reduce_scatter_init = _persistent(reduce_scatter)
    reduce_scatter_v_init = _persistent(reduce_scatter_v)
    broadcast_init = _persistent(broadcast)
    all_gather_init = _persistent(all_gather)
    all_gather_v_init = _persistent(all_gather_v)
    all_to_all_init = _persistent(all_to_all)
    all_to_all_v_init = _persistent(all_to_all_v)
    gather_init = _persistent(gather)
    scatter_init = _persistent(scatter)
    barrier_init = _persistent(barrier)
    send_init = _persistent(send)
    recv_init = _persistent(recv)
    send_recv_init = _persistent(send_recv)


class _Builder(Operations):
    """Makes the operation of a call and launches nothing."""

    def __init__(self, comm: Operations) -> None:
        self.rank, self.size, self.device, self._defaults = comm.rank, comm.size, comm.device, comm._defaults

    def _go(self, o: Operation) -> Operation:
        return o

    def _repeat(self, name: str, x: Array, out: Any, parameter: Any) -> bool:
        return False


def _input(x: Any, stream: Any) -> Buffer:
    return as_buffer(x, "x", writable=False, stream=stream)
