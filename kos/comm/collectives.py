"""The operations of a communicator: each checks its arguments and makes them an Operation.

Every call goes one way: arguments → buffers → ``Operation`` → ``_go``, which sets the options and launches it
(or, in a batch and for the ``_init`` form, keeps it).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kos.comm.arguments import (
    check_counts,
    check_peer,
    check_rank,
    check_tag,
    expect_alike,
    expect_place,
    in_and_out,
    output,
    part_of,
    refuse_overlap,
)
from kos.comm.operation import AUTO, Operation
from kos.comm.persistent import Batch, persistent
from kos.comm.reduction import PremulSum, ReduceOp, resolve
from kos.cuda import streams
from kos.errors import InvalidArgument
from kos.memory import Buffer, as_buffer

Op = ReduceOp | PremulSum


class Operations:
    """Every operation, and its persistent form."""

    rank: int
    size: int
    device: int | None
    """The GPU whose memory the backend moves, by its number in this process; None for host memory."""
    _batch: Batch | None
    _go: Callable[..., Any]
    """Launches an operation with the options of its caller, or keeps it for a batch."""
    _repeat: Callable[..., bool]
    """Launches the operation of the same call made before, where nothing about it has changed; else returns False."""

    # Collectives that reduce.

    def all_reduce(self, x: Any, op: Op = ReduceOp.SUM, *, out: Any = None, stream: Any = None,
                   async_op: bool = False, timeout: float | None = None, algorithm: str = "auto",
                   deterministic: bool = False) -> Any:
        """Reduce ``x`` over all ranks; every rank gets the result in ``x``, or in ``out`` of x's shape."""
        if (
            stream is timeout is None and async_op is deterministic is False and algorithm is AUTO
            and self._repeat("all_reduce", x, out, op)
        ):
            return x if out is None else out
        send, recv = in_and_out(x, out, stream)
        o = Operation("all_reduce", self.rank, send, recv, resolve(op, send.dtype, self.size))
        return self._go(o, async_op, timeout, algorithm, deterministic)

    def reduce(self, x: Any, root: int = 0, op: Op = ReduceOp.SUM, *, out: Any = None, stream: Any = None,
               async_op: bool = False, timeout: float | None = None, algorithm: str = "auto",
               deterministic: bool = False) -> Any:
        """Reduce ``x`` over all ranks to ``root``, into its ``x`` or ``out``; others keep their ``x``."""
        recv: Buffer | None = None
        if self.rank == (root := check_rank("root", root, self.size)):
            send, recv = in_and_out(x, out, stream)
        else:
            send = _input(x, stream)
        o = Operation("reduce", self.rank, send, recv, resolve(op, send.dtype, self.size), root)
        return self._go(o, async_op, timeout, algorithm, deterministic)

    def reduce_scatter(self, x: Any, out: Any = None, op: Op = ReduceOp.SUM, *, stream: Any = None,
                       async_op: bool = False, timeout: float | None = None, algorithm: str = "auto",
                       deterministic: bool = False) -> Any:
        """Reduce ``x`` over all ranks; rank r gets the r-th of ``size`` equal parts of the result.

        ``out`` has ``x.size / size`` elements.  Without it an array is made, of shape
        ``(x.shape[0] / size, *x.shape[1:])`` if ``x`` divides so, else 1-D.
        """
        if (
            out is not None and stream is timeout is None and async_op is deterministic is False and algorithm is AUTO
            and self._repeat("reduce_scatter", x, out, op)
        ):
            return out
        send = _input(x, stream)
        recv = output(out, send, part_of(send, self.size), stream, self.rank)
        o = Operation("reduce_scatter", self.rank, send, recv, resolve(op, send.dtype, self.size))
        return self._go(o, async_op, timeout, algorithm, deterministic)

    def reduce_scatter_v(self, x: Any, counts: Sequence[int], out: Any = None, op: Op = ReduceOp.SUM, *,
                         stream: Any = None, async_op: bool = False, timeout: float | None = None) -> Any:
        """``reduce_scatter`` with ``counts[r]`` elements for rank r; always in rank order.

        ``counts`` is the same on all ranks and sums to ``x.size``; ``out`` has ``counts[rank]`` elements.
        """
        send = _input(x, stream)
        counts = check_counts("counts", counts, self.size, send)
        recv = output(out, send, (counts[self.rank],), stream)
        reduction = resolve(op, send.dtype, self.size)
        o = Operation("reduce_scatter_v", self.rank, send, recv, reduction, send_counts=counts)
        return self._go(o, async_op, timeout)

    # Collectives that move.

    def broadcast(self, x: Any, root: int = 0, *, out: Any = None, stream: Any = None, async_op: bool = False,
                  timeout: float | None = None, algorithm: str = "auto") -> Any:
        """Every rank gets root's ``x``, in ``x`` or in ``out`` of its shape."""
        if (
            stream is timeout is None and async_op is False and algorithm is AUTO
            and self._repeat("broadcast", x, out, root)
        ):
            return x if out is None else out
        root = check_rank("root", root, self.size)
        if out is None and self.rank == root:
            send = recv = _input(x, stream)
        else:
            send, recv = in_and_out(x, out, stream)
        return self._go(Operation("broadcast", self.rank, send, recv, root=root), async_op, timeout, algorithm)

    def all_gather(self, x: Any, out: Any = None, *, stream: Any = None, async_op: bool = False,
                   timeout: float | None = None, algorithm: str = "auto") -> Any:
        """Every rank gets all ranks' ``x``, in rank order.

        ``out`` has ``size * x.size`` elements; without it an array of shape ``(size, *x.shape)`` is made.
        ``x`` may be its own part of ``out``.
        """
        if (
            out is not None and stream is timeout is None and async_op is False and algorithm is AUTO
            and self._repeat("all_gather", x, out, None)
        ):
            return out
        send = _input(x, stream)
        recv = output(out, send, (self.size, *send.shape), stream, self.rank)
        return self._go(Operation("all_gather", self.rank, send, recv), async_op, timeout, algorithm)

    def all_gather_v(self, x: Any, counts: Sequence[int], out: Any = None, *, stream: Any = None,
                     async_op: bool = False, timeout: float | None = None) -> Any:
        """``all_gather`` of ``counts[r]`` elements from rank r into ``out``, 1-D if it is made here.

        ``counts`` is the same on all ranks, ``counts[rank]`` is ``x.size``.
        """
        send = _input(x, stream)
        counts = check_counts("counts", counts, self.size)
        if counts[self.rank] != send.count:
            expected = f"counts[{self.rank}] = {counts[self.rank]}"
            raise InvalidArgument(f"x: expected {expected} elements, got {send.count}")
        recv = output(out, send, (sum(counts),), stream)
        return self._go(Operation("all_gather_v", self.rank, send, recv, recv_counts=counts), async_op, timeout)

    def all_to_all(self, x: Any, out: Any = None, *, stream: Any = None, async_op: bool = False,
                   timeout: float | None = None, algorithm: str = "auto") -> Any:
        """Part j of rank i's ``x`` becomes part i of rank j's ``out`` of x's shape; parts are equal."""
        send = _input(x, stream)
        part_of(send, self.size)
        recv = output(out, send, send.shape, stream)
        return self._go(Operation("all_to_all", self.rank, send, recv), async_op, timeout, algorithm)

    def all_to_all_v(self, x: Any, send_counts: Sequence[int], recv_counts: Sequence[int], out: Any = None, *,
                     stream: Any = None, async_op: bool = False, timeout: float | None = None) -> Any:
        """``all_to_all`` with ``send_counts[j]`` elements for rank j and ``recv_counts[i]`` from rank i."""
        send = _input(x, stream)
        send_counts = check_counts("send_counts", send_counts, self.size, send)
        recv_counts = check_counts("recv_counts", recv_counts, self.size)
        mine = send_counts[self.rank]
        if mine != recv_counts[self.rank]:
            expected = f"send_counts[{self.rank}] = {mine} from this rank itself"
            raise InvalidArgument(f"recv_counts: expected {expected}, got {recv_counts[self.rank]}")
        recv = output(out, send, (sum(recv_counts),), stream)
        o = Operation("all_to_all_v", self.rank, send, recv, send_counts=send_counts, recv_counts=recv_counts)
        return self._go(o, async_op, timeout)

    def gather(self, x: Any, root: int = 0, out: Any = None, *, stream: Any = None, async_op: bool = False,
               timeout: float | None = None, algorithm: str = "auto") -> Any:
        """``root`` gets all ranks' ``x`` in rank order: ``out`` as in ``all_gather``; others get None."""
        o = Operation("gather", self.rank, _input(x, stream), root=check_rank("root", root, self.size))
        if self.rank == root:
            assert o.send is not None
            o.recv = output(out, o.send, (self.size, *o.send.shape), stream, self.rank)
        elif out is not None:
            raise InvalidArgument(f"out: expected None on rank {self.rank}, which is not root {root}")
        return self._go(o, async_op, timeout, algorithm)

    def scatter(self, x: Any, out: Any, root: int = 0, *, stream: Any = None, async_op: bool = False,
                timeout: float | None = None, algorithm: str = "auto") -> Any:
        """Rank r gets in ``out`` the r-th of ``size`` equal parts of root's ``x``; others give no ``x``."""
        recv = as_buffer(out, "out", writable=True, stream=stream)
        o = Operation("scatter", self.rank, recv=recv, root=check_rank("root", root, self.size))
        if self.rank == root:
            o.send = _input(x, stream)
            expect_alike("out", recv, o.send)
            if o.send.count != self.size * recv.count:
                raise InvalidArgument(f"x: expected {self.size * recv.count} elements, got {o.send.count}")
            refuse_overlap(o.send, recv, self.rank)
        elif x is not None:
            raise InvalidArgument(f"x: expected None on rank {self.rank}, which is not root {root}")
        return self._go(o, async_op, timeout, algorithm)

    def barrier(self, *, stream: Any = None, async_op: bool = False, timeout: float | None = None) -> Any:
        """Return once every rank has called it.

        With a ``stream`` of a GPU nothing waits but that stream: what is queued on it from now on comes after
        what every rank has queued on its own so far.
        """
        o = Operation("barrier", self.rank)
        if stream is not None:
            o.stream, o.queue = self._stream(stream), streams.keeper(stream)
        elif self.device is not None and self._batch is None and not async_op:
            return self._go(o, True, timeout).synchronize()
        return self._go(o, async_op, timeout)

    def _stream(self, stream: Any) -> int:
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
        dst, tag = check_peer("dst", dst, self.rank, self.size), check_tag(tag)
        return self._go(Operation("send", self.rank, _input(x, stream), dst=dst, tag=tag), async_op, timeout)

    def recv(self, x: Any, src: int, tag: int = 0, *, stream: Any = None, async_op: bool = False,
             timeout: float | None = None) -> Any:
        """Receive into ``x`` what rank ``src`` sent with ``tag``: the same dtype and number of elements."""
        src, tag = check_peer("src", src, self.rank, self.size), check_tag(tag)
        recv = as_buffer(x, "x", writable=True, stream=stream)
        return self._go(Operation("recv", self.rank, recv=recv, src=src, recv_tag=tag), async_op, timeout)

    def send_recv(self, x: Any, out: Any, dst: int, src: int, tag: int = 0, *, stream: Any = None,
                  async_op: bool = False, timeout: float | None = None) -> Any:
        """Send ``x`` to ``dst`` while receiving ``out`` from ``src`` (MPI_Sendrecv)."""
        dst, src = (check_peer(what, rank, self.rank, self.size) for what, rank in (("dst", dst), ("src", src)))
        send, recv = _input(x, stream), as_buffer(out, "out", writable=True, stream=stream)
        expect_place("out", recv, send)
        refuse_overlap(send, recv)
        tag = check_tag(tag)
        o = Operation("send_recv", self.rank, send, recv, dst=dst, src=src, tag=tag, recv_tag=tag)
        return self._go(o, async_op, timeout)

    # Persistent forms, named as MPI 4 names them.

    all_reduce_init = persistent(all_reduce)
    reduce_init = persistent(reduce)
    reduce_scatter_init = persistent(reduce_scatter)
    reduce_scatter_v_init = persistent(reduce_scatter_v)
    broadcast_init = persistent(broadcast)
    all_gather_init = persistent(all_gather)
    all_gather_v_init = persistent(all_gather_v)
    all_to_all_init = persistent(all_to_all)
    all_to_all_v_init = persistent(all_to_all_v)
    gather_init = persistent(gather)
    scatter_init = persistent(scatter)
    barrier_init = persistent(barrier)
    send_init = persistent(send)
    recv_init = persistent(recv)
    send_recv_init = persistent(send_recv)


def _input(x: Any, stream: Any) -> Buffer:
    return as_buffer(x, "x", writable=False, stream=stream)
