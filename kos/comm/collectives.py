"""The operations of a communicator: each checks its arguments and makes an Operation of them.

Every call takes the same steps: arguments → buffers → ``Operation`` → ``_submit``.  ``Communicator._submit`` launches
the operation, or adds it to a batch.  ``_Builder._submit`` returns it, for the persistent form.
"""

from __future__ import annotations

import functools
import inspect
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, Generic, Literal, ParamSpec, Required, TypedDict, TypeVar, Unpack, overload

import numpy as np

from kos.comm.arguments import (
    check_algorithm,
    check_bool,
    check_counts,
    check_peer,
    check_rank,
    check_tag,
    check_timeout,
    check_totals,
    expect_alike,
    expect_place,
    in_and_out,
    output,
    refuse_overlap,
    shard_shape,
)
from kos.comm.cached import CallCache
from kos.comm.operation import AUTO, Message, Operation, Options
from kos.comm.persistent import Persistent
from kos.comm.reduction import PremulSum, ReduceOp, resolve
from kos.comm.work import Work
from kos.cuda import streams
from kos.errors import InvalidArgument
from kos.memory import Buffer, as_buffer

Op = ReduceOp | PremulSum
T = TypeVar("T")
Bool = TypeVar("Bool")
_True = Literal[True]


class _Options(TypedDict, total=False):
    """The keywords of every operation; the overloads differ in ``async_op``."""

    stream: Any
    timeout: float | None


class _Plain(_Options, total=False):
    async_op: Literal[False]


class _PlainAsync(_Options, Generic[Bool], total=False):
    """``Bool`` is the type of ``async_op``: a literal True, or a bool that is known only at run time."""

    async_op: Required[Bool]


class _Moving(_Plain, total=False):
    algorithm: str


class _MovingAsync(_PlainAsync[Bool], Generic[Bool], total=False):
    algorithm: str


class _Reducing(_Moving, total=False):
    deterministic: bool


class _ReducingAsync(_MovingAsync[Bool], Generic[Bool], total=False):
    deterministic: bool


Comm = TypeVar("Comm")
P = ParamSpec("P")


_KEYWORDS = {
    "stream": "a stream of kos.cuda, torch or CuPy, or a raw handle; the call is ordered with the work on it.",
    "async_op": "True returns a Work at once, whose wait() returns the result of the call.",
    "timeout": "in seconds; None: the communicator's own.",
    "algorithm": 'the name of a schedule of kos.comm.schedules; "auto" lets the backend choose.',
    "deterministic": "True adds in rank order: the same bits from run to run and on every backend.",
}
"""What ``help`` says of the keywords that operations share."""
_ERRORS = """Raises InvalidArgument for wrong arguments, before anything is sent; CollectiveMismatch if the ranks made
different calls; CollectiveTimeout; RankLost; CollectiveError if the communicator failed before or is closed."""


def _document(call: Callable[..., Any]) -> str:
    """Add the shared keywords and the errors to the docstring of an operation, and return it."""
    keywords = [f"``{name}``: {_KEYWORDS[name]}" for name in inspect.signature(call).parameters if name in _KEYWORDS]
    call.__doc__ = "\n".join([inspect.getdoc(call) or "", "", *keywords, "", _ERRORS])
    return call.__doc__


def _persistent(call: Callable[Concatenate[Comm, P], T]) -> Callable[Concatenate[Comm, P], Persistent[T]]:
    """The persistent form of an operation: checked once, launched by each ``start``.  Completes both docstrings."""

    @functools.wraps(call)
    def init(comm: Any, *args: P.args, **options: P.kwargs) -> Persistent[T]:
        comm._check_open()
        operation: Any = call(_Builder(comm), *args, **options)  # type: ignore[arg-type]
        return Persistent(comm, operation)

    name = call.__name__
    init.__name__, init.__qualname__ = f"{name}_init", f"{call.__qualname__}_init"
    summary = f"A persistent ``{name}``: checked now, launched by each ``start()`` of the returned Persistent."
    arguments = f"Its arguments are those of ``{name}`` without ``async_op``:"
    init.__doc__ = "\n\n".join((summary, arguments, _document(call)))
    signature = inspect.signature(call)
    kept = [parameter for parameter in signature.parameters.values() if parameter.name != "async_op"]
    init.__signature__ = signature.replace(parameters=kept, return_annotation=Persistent)  # type: ignore[attr-defined]
    return init


class Operations:
    """Every operation, and its persistent form."""

    rank: int
    size: int
    device: int | None
    """The index in this process of the GPU whose memory the backend moves; None for host memory."""
    _cache: CallCache
    _defaults: Options
    """The options of a call without keywords."""
    _overlapped: Options
    """The options of a call with ``async_op=True`` alone."""

    @abstractmethod
    def _submit(self, o: Operation) -> Any:
        """Launch the operation, or keep it for later."""

    def _all_gather_numbers(
        self, numbers: Sequence[int], purpose: str, timeout: float | None, depth: int
    ) -> list[list[int]]:
        """All ranks' ``numbers``, as many on each, for the call ``purpose``, made ``depth`` frames up."""
        raise NotImplementedError

    @property
    def _deferred(self) -> bool:
        """Whether ``_submit`` launches nothing yet: in a batch, and for the persistent form."""
        return True

    def _options(
        self, name: str, stream: Any, async_op: bool, timeout: float | None, algorithm: str = AUTO,
        deterministic: bool = False,
    ) -> Options:  # fmt: skip
        if stream is timeout is None and deterministic is False and algorithm is AUTO:
            if async_op is False:
                return self._defaults
            if async_op is True and not self._deferred:
                return self._overlapped
        seconds = self._defaults.timeout if timeout is None else check_timeout(timeout)
        ordered, overlap = check_bool("deterministic", deterministic), check_bool("async_op", async_op)
        if overlap and self._deferred:
            raise InvalidArgument("async_op: expected False in a batch and for a persistent operation, got True")
        return Options(seconds, check_algorithm(algorithm, name, ordered), ordered, overlap, stream)

    # Reductions.

    @overload
    def all_reduce(self, x: T, op: Op = ..., *, out: T | None = ..., **options: Unpack[_Reducing]) -> T: ...
    @overload
    def all_reduce(self, x: T, op: Op = ..., *, out: T | None = ...,
                   **options: Unpack[_ReducingAsync[_True]]) -> Work[T]: ...
    @overload
    def all_reduce(self, x: T, op: Op = ..., *, out: T | None = ...,
                   **options: Unpack[_ReducingAsync[bool]]) -> T | Work[T]: ...
    def all_reduce(self, x: Any, op: Op = ReduceOp.SUM, *, out: Any = None, stream: Any = None,
                   async_op: bool = False, timeout: float | None = None, algorithm: str = AUTO,
                   deterministic: bool = False) -> Any:
        """Reduce ``x`` over all ranks; every rank gets the result.

        ``x`` has the same dtype and number of elements on all ranks.  ``op`` must be valid for the dtype.  The
        result replaces ``x``, or goes to ``out`` of x's shape and dtype.  ``out`` is ``x`` or does not overlap it.
        Returns the array with the result.

            comm.all_reduce(gradients, ReduceOp.AVG)
        """
        plain = stream is timeout is None and async_op is deterministic is False and algorithm is AUTO
        if plain and self._cache.repeat(self, "all_reduce", x, out, op):
            return x if out is None else out
        options = self._defaults
        if not plain:
            options = self._options("all_reduce", stream, async_op, timeout, algorithm, deterministic)
        send, recv = in_and_out(x, out, stream)
        reduction = resolve(op, send.dtype, self.size)
        return self._submit(Operation("all_reduce", self.rank, options, send, recv, reduction))

    @overload
    def reduce(self, x: T, root: int = ..., op: Op = ..., *, out: T | None = ...,
               **options: Unpack[_Reducing]) -> T | None: ...
    @overload
    def reduce(self, x: T, root: int = ..., op: Op = ..., *, out: T | None = ...,
               **options: Unpack[_ReducingAsync[_True]]) -> Work[T | None]: ...
    @overload
    def reduce(self, x: T, root: int = ..., op: Op = ..., *, out: T | None = ...,
               **options: Unpack[_ReducingAsync[bool]]) -> T | Work[T | None] | None: ...
    def reduce(self, x: Any, root: int = 0, op: Op = ReduceOp.SUM, *, out: Any = None, stream: Any = None,
               async_op: bool = False, timeout: float | None = None, algorithm: str = AUTO,
               deterministic: bool = False) -> Any:
        """Reduce ``x`` over all ranks; rank ``root`` gets the result.

        As ``all_reduce`` by ``op``, but the ranks other than ``root`` keep their ``x``, ignore ``out``, and get None.

            total = comm.reduce(losses, root=0)          # on rank 0: losses itself
        """
        plain = stream is timeout is None and async_op is deterministic is False and algorithm is AUTO
        if plain and type(root) is int:
            own = out if self.rank == root else None
            if self._cache.repeat(self, "reduce", x, own, op, root):
                return None if self.rank != root else x if out is None else out
        options = self._options("reduce", stream, async_op, timeout, algorithm, deterministic)
        root = check_rank("root", root, self.size)
        return self._submit(self._reduction("reduce", x, out, op, options, self.rank == root, root))

    @overload
    def reduce_scatter(self, x: T, out: T | None = ..., op: Op = ..., **options: Unpack[_Reducing]) -> T: ...
    @overload
    def reduce_scatter(self, x: T, out: T | None = ..., op: Op = ...,
                       **options: Unpack[_ReducingAsync[_True]]) -> Work[T]: ...
    @overload
    def reduce_scatter(self, x: T, out: T | None = ..., op: Op = ...,
                       **options: Unpack[_ReducingAsync[bool]]) -> T | Work[T]: ...
    def reduce_scatter(self, x: Any, out: Any = None, op: Op = ReduceOp.SUM, *, stream: Any = None,
                       async_op: bool = False, timeout: float | None = None, algorithm: str = AUTO,
                       deterministic: bool = False) -> Any:
        """Reduce ``x`` over all ranks by ``op``; rank r gets the r-th of ``size`` equal shards of the result.

        ``x.size`` is a multiple of ``size``.  ``out`` has ``x.size / size`` elements; it does not overlap ``x``, or is
        exactly this rank's shard of it.  Without ``out`` a new array has the shape ``(x.shape[0] / size,
        *x.shape[1:])`` if that divides, else it is 1-D.  Returns the array that holds the shard.

            shard = comm.reduce_scatter(gradients)
        """
        plain = stream is timeout is None and async_op is deterministic is False and algorithm is AUTO
        if plain and out is not None and self._cache.repeat(self, "reduce_scatter", x, out, op):
            return out
        options = self._defaults
        if not plain:
            options = self._options("reduce_scatter", stream, async_op, timeout, algorithm, deterministic)
        send = _input(x, stream)
        recv = output(out, send, shard_shape(send, self.size), stream, self.rank)
        reduction = resolve(op, send.dtype, self.size)
        return self._submit(Operation("reduce_scatter", self.rank, options, send, recv, reduction))

    @overload
    def reduce_scatter_v(self, x: T, counts: Sequence[int] | None = ..., out: T | None = ..., op: Op = ...,
                         **options: Unpack[_Plain]) -> T: ...
    @overload
    def reduce_scatter_v(self, x: T, counts: Sequence[int] | None = ..., out: T | None = ..., op: Op = ...,
                         **options: Unpack[_PlainAsync[_True]]) -> Work[T]: ...
    @overload
    def reduce_scatter_v(self, x: T, counts: Sequence[int] | None = ..., out: T | None = ..., op: Op = ...,
                         **options: Unpack[_PlainAsync[bool]]) -> T | Work[T]: ...
    def reduce_scatter_v(self, x: Any, counts: Sequence[int] | None = None, out: Any = None, op: Op = ReduceOp.SUM, *,
                         stream: Any = None, async_op: bool = False, timeout: float | None = None) -> Any:
        """``reduce_scatter`` by ``op`` with shards of different sizes: ``counts[r]`` elements for rank r.

        ``counts`` is the same on all ranks and sums to ``x.size``; ``out`` has ``counts[rank]`` elements and does not
        overlap ``x``.  Contributions are always added in rank order.  Returns ``out``, or a new 1-D array, whatever
        the shape of ``x``.  ``counts=None`` on all ranks, which pass ``out``: the sizes of ``out`` travel first (see
        ``all_gather_v``).

            mine = comm.reduce_scatter_v(gradients, [3, 5])
        """
        plain = stream is timeout is None and async_op is False and out is not None
        if plain and self._cache.repeat(self, "reduce_scatter_v", x, out, op, (None, _key(counts), None)):
            return out
        options = self._options("reduce_scatter_v", stream, async_op, timeout)
        send = _input(x, stream)
        reduction = resolve(op, send.dtype, self.size)
        if counts is None:
            if out is None:
                raise InvalidArgument("counts: expected numbers without out, got None")
            size = output(out, send, None, stream).count
            counts, totals = self._counts_of_all("reduce_scatter_v", "counts", options, send, (size, send.count))
            check_totals("x", totals, [sum(counts)] * self.size)
        counts = check_counts("counts", counts, self.size, send)
        recv = output(out, send, (counts[self.rank],), stream)
        return self._submit(Operation(
            "reduce_scatter_v", self.rank, options, send, recv, reduction, send_counts=counts
        ))

    @overload
    def scan(self, x: T, op: Op = ..., *, out: T | None = ..., **options: Unpack[_Moving]) -> T: ...
    @overload
    def scan(self, x: T, op: Op = ..., *, out: T | None = ..., **options: Unpack[_MovingAsync[_True]]) -> Work[T]: ...
    @overload
    def scan(self, x: T, op: Op = ..., *, out: T | None = ...,
             **options: Unpack[_MovingAsync[bool]]) -> T | Work[T]: ...
    def scan(self, x: Any, op: Op = ReduceOp.SUM, *, out: Any = None, stream: Any = None, async_op: bool = False,
             timeout: float | None = None, algorithm: str = AUTO) -> Any:
        """Reduce ``x`` over the ranks 0 to r; rank r gets the result (MPI_Scan).

        As ``all_reduce``, in place without ``out``.  Contributions are always added in rank order.  ``op`` may not be
        AVG.

            ends = comm.scan(np.array([len(tokens)]))            # of each rank's part of a whole
        """
        plain = stream is timeout is None and async_op is False and algorithm is AUTO
        if plain and self._cache.repeat(self, "scan", x, out, op):
            return x if out is None else out
        options = self._options("scan", stream, async_op, timeout, algorithm)
        return self._submit(self._reduction("scan", x, out, op, options))

    @overload
    def exscan(self, x: T, op: Op = ..., *, out: T | None = ..., **options: Unpack[_Moving]) -> T | None: ...
    @overload
    def exscan(self, x: T, op: Op = ..., *, out: T | None = ...,
               **options: Unpack[_MovingAsync[_True]]) -> Work[T | None]: ...
    @overload
    def exscan(self, x: T, op: Op = ..., *, out: T | None = ...,
               **options: Unpack[_MovingAsync[bool]]) -> T | Work[T | None] | None: ...
    def exscan(self, x: Any, op: Op = ReduceOp.SUM, *, out: Any = None, stream: Any = None, async_op: bool = False,
               timeout: float | None = None, algorithm: str = AUTO) -> Any:
        """Reduce ``x`` over the ranks 0 to r - 1; rank r gets the result (MPI_Exscan).

        As ``scan`` by ``op``, but rank 0 has no result: its ``x`` and ``out`` do not change, and it gets None.

            start = comm.exscan(np.array([len(tokens)]))         # of this rank's part of a whole
        """
        plain = stream is timeout is None and async_op is False and algorithm is AUTO
        if plain and self.rank == 0 and out is not None and out is not x:
            in_and_out(x, out, None)  # checked at every call, since the cached call of rank 0 has no out
        if plain and self._cache.repeat(self, "exscan", x, out if self.rank else None, op):
            return None if self.rank == 0 else x if out is None else out
        options = self._options("exscan", stream, async_op, timeout, algorithm)
        return self._submit(self._reduction("exscan", x, out, op, options, self.rank > 0))

    def _reduction(
        self, name: str, x: Any, out: Any, op: Op, options: Options, gets: bool = True, root: int | None = None
    ) -> Operation:
        """A reduction whose result is written on the ranks that receive one (``gets``)."""
        if name != "reduce" and op is ReduceOp.AVG:
            names = ", ".join(each.name for each in ReduceOp if each is not op)
            raise InvalidArgument(f"op: expected one of {names} for {name}, got AVG")
        if name == "exscan" and not gets:
            in_and_out(x, out, options.stream)  # so that a wrong out is an error on every rank
        send, recv = in_and_out(x, out, options.stream) if gets else (_input(x, options.stream), None)
        return Operation(name, self.rank, options, send, recv, resolve(op, send.dtype, self.size), root)

    # Data movement.

    @overload
    def broadcast(self, x: T, root: int = ..., *, out: T | None = ..., **options: Unpack[_Moving]) -> T: ...
    @overload
    def broadcast(self, x: T, root: int = ..., *, out: T | None = ...,
                  **options: Unpack[_MovingAsync[_True]]) -> Work[T]: ...
    @overload
    def broadcast(self, x: T, root: int = ..., *, out: T | None = ...,
                  **options: Unpack[_MovingAsync[bool]]) -> T | Work[T]: ...
    def broadcast(self, x: Any, root: int = 0, *, out: Any = None, stream: Any = None, async_op: bool = False,
                  timeout: float | None = None, algorithm: str = AUTO) -> Any:
        """Send the ``x`` of rank ``root`` to every rank.

        ``x`` has the same dtype and number of elements on all ranks; the data replaces it, or goes to ``out`` of x's
        shape.  Returns the array that holds the data.  Only the root's ``x`` may be read-only.

            comm.broadcast(weights, root=0)
        """
        plain = stream is timeout is None and async_op is False and algorithm is AUTO
        if plain and type(root) is int and self._cache.repeat(self, "broadcast", x, out, None, root):
            return x if out is None else out
        options = self._defaults if plain else self._options("broadcast", stream, async_op, timeout, algorithm)
        root = check_rank("root", root, self.size)
        if out is None and self.rank == root:
            send = recv = _input(x, stream)
        else:
            send, recv = in_and_out(x, out, stream)
        return self._submit(Operation("broadcast", self.rank, options, send, recv, root=root))

    @overload
    def all_gather(self, x: T, out: T | None = ..., **options: Unpack[_Moving]) -> T: ...
    @overload
    def all_gather(self, x: T, out: T | None = ..., **options: Unpack[_MovingAsync[_True]]) -> Work[T]: ...
    @overload
    def all_gather(self, x: T, out: T | None = ..., **options: Unpack[_MovingAsync[bool]]) -> T | Work[T]: ...
    def all_gather(self, x: Any, out: Any = None, *, stream: Any = None, async_op: bool = False,
                   timeout: float | None = None, algorithm: str = AUTO) -> Any:
        """Gather all ranks' ``x``, in rank order, on every rank.

        ``x`` has the same dtype and number of elements on all ranks.  ``out`` has ``size * x.size`` elements; it does
        not overlap ``x``, or ``x`` is exactly this rank's shard of it.  Without ``out`` a new array has the shape
        ``(size, *x.shape)`` and the kind of memory of ``x``.  Returns the array that holds the result.

            rows = comm.all_gather(mine)                 # rows[r] is the x of rank r
        """
        plain = stream is timeout is None and async_op is False and algorithm is AUTO
        if plain and out is not None and self._cache.repeat(self, "all_gather", x, out):
            return out
        options = self._defaults if plain else self._options("all_gather", stream, async_op, timeout, algorithm)
        send = _input(x, stream)
        recv = output(out, send, (self.size, *send.shape), stream, self.rank)
        return self._submit(Operation("all_gather", self.rank, options, send, recv))

    @overload
    def all_gather_v(self, x: T, counts: Sequence[int] | None = ..., out: T | None = ...,
                     **options: Unpack[_Plain]) -> T: ...
    @overload
    def all_gather_v(self, x: T, counts: Sequence[int] | None = ..., out: T | None = ...,
                     **options: Unpack[_PlainAsync[_True]]) -> Work[T]: ...
    @overload
    def all_gather_v(self, x: T, counts: Sequence[int] | None = ..., out: T | None = ...,
                     **options: Unpack[_PlainAsync[bool]]) -> T | Work[T]: ...
    def all_gather_v(self, x: Any, counts: Sequence[int] | None = None, out: Any = None, *, stream: Any = None,
                     async_op: bool = False, timeout: float | None = None) -> Any:
        """``all_gather`` of different sizes: ``counts[r]`` elements from rank r.

        ``counts`` is the same on all ranks, and ``counts[rank]`` is ``x.size``.  ``out`` has ``sum(counts)`` elements
        and does not overlap ``x``.  Returns ``out``, or a new 1-D array, whatever the shape of ``x``.

        ``counts=None`` on all ranks: the sizes travel first, by host memory, and the host waits for them, also with
        ``async_op=True``.  In host memory that is an operation with a number of its own.  If a size is wrong, every
        rank raises InvalidArgument that names its rank.  In a batch, for a persistent operation and in a CUDA graph
        ``counts`` must be given.

            tokens = comm.all_gather_v(mine, [3, 5])
        """
        plain = stream is timeout is None and async_op is False and out is not None
        if plain and self._cache.repeat(self, "all_gather_v", x, out, None, (None, None, _key(counts))):
            return out
        options = self._options("all_gather_v", stream, async_op, timeout)
        send = _input(x, stream)
        counts = self._gather_counts("all_gather_v", counts, send, out, options)
        recv = output(out, send, (sum(counts),), stream)
        return self._submit(Operation("all_gather_v", self.rank, options, send, recv, recv_counts=counts))

    @overload
    def all_to_all(self, x: T, out: T | None = ..., **options: Unpack[_Moving]) -> T: ...
    @overload
    def all_to_all(self, x: T, out: T | None = ..., **options: Unpack[_MovingAsync[_True]]) -> Work[T]: ...
    @overload
    def all_to_all(self, x: T, out: T | None = ..., **options: Unpack[_MovingAsync[bool]]) -> T | Work[T]: ...
    def all_to_all(self, x: Any, out: Any = None, *, stream: Any = None, async_op: bool = False,
                   timeout: float | None = None, algorithm: str = AUTO) -> Any:
        """Send shard j of rank i's ``x`` to shard i of rank j's ``out``.

        ``x`` has the same dtype and number of elements on all ranks, a multiple of ``size``; its shards are equal.
        ``out`` has x's size and does not overlap it.  Returns ``out``, or a new array of x's shape.

            columns = comm.all_to_all(rows)
        """
        plain = stream is timeout is None and async_op is False and algorithm is AUTO
        if plain and out is not None and self._cache.repeat(self, "all_to_all", x, out):
            return out
        options = self._defaults if plain else self._options("all_to_all", stream, async_op, timeout, algorithm)
        send = _input(x, stream)
        shard_shape(send, self.size)
        recv = output(out, send, send.shape, stream)
        return self._submit(Operation("all_to_all", self.rank, options, send, recv))

    @overload
    def all_to_all_v(self, x: T, send_counts: Sequence[int], recv_counts: Sequence[int] | None = ...,
                     out: T | None = ..., **options: Unpack[_Plain]) -> T: ...
    @overload
    def all_to_all_v(self, x: T, send_counts: Sequence[int], recv_counts: Sequence[int] | None = ...,
                     out: T | None = ..., **options: Unpack[_PlainAsync[_True]]) -> Work[T]: ...
    @overload
    def all_to_all_v(self, x: T, send_counts: Sequence[int], recv_counts: Sequence[int] | None = ...,
                     out: T | None = ..., **options: Unpack[_PlainAsync[bool]]) -> T | Work[T]: ...
    def all_to_all_v(self, x: Any, send_counts: Sequence[int], recv_counts: Sequence[int] | None = None,
                     out: Any = None, *, stream: Any = None, async_op: bool = False,
                     timeout: float | None = None) -> Any:
        """``all_to_all`` of different sizes: ``send_counts[j]`` elements for rank j, ``recv_counts[i]`` from rank i.

        Counts are this rank's own: ``recv_counts[i]`` equals ``send_counts[rank]`` of rank i.  They sum to
        ``x.size`` and to the size of ``out``, which does not overlap ``x``.  Returns ``out``, or a new 1-D array,
        whatever the shape of ``x``.  Raises CollectiveMismatch if the counts of two ranks disagree.
        ``recv_counts=None`` on all ranks: the counts travel first (see ``all_gather_v``).  ``send_counts`` may not be
        None.

            routed = comm.all_to_all_v(tokens, to_each, from_each)
        """
        plain = stream is timeout is None and async_op is False and out is not None
        counts = None, _key(send_counts), _key(recv_counts)
        if plain and self._cache.repeat(self, "all_to_all_v", x, out, None, counts):
            return out
        options = self._options("all_to_all_v", stream, async_op, timeout)
        send = _input(x, stream)
        send_counts = check_counts("send_counts", send_counts, self.size, send)
        if recv_counts is None:
            size = -1 if out is None else output(out, send, None, stream).count
            *to_each, sizes = self._counts_of_all("all_to_all_v", "recv_counts", options, send, (*send_counts, size))
            recv_counts = to_each[self.rank]
            check_totals("out", sizes, [sum(counts) for counts in to_each])
        recv_counts = check_counts("recv_counts", recv_counts, self.size)
        mine = send_counts[self.rank]
        if mine != recv_counts[self.rank]:
            expected = f"send_counts[{self.rank}] = {mine} from this rank itself"
            raise InvalidArgument(f"recv_counts: expected {expected}, got {recv_counts[self.rank]}")
        recv = output(out, send, (sum(recv_counts),), stream)
        return self._submit(Operation(
            "all_to_all_v", self.rank, options, send, recv, send_counts=send_counts, recv_counts=recv_counts
        ))

    @overload
    def gather(self, x: T, root: int = ..., out: T | None = ..., **options: Unpack[_Moving]) -> T | None: ...
    @overload
    def gather(self, x: T, root: int = ..., out: T | None = ...,
               **options: Unpack[_MovingAsync[_True]]) -> Work[T | None]: ...
    @overload
    def gather(self, x: T, root: int = ..., out: T | None = ...,
               **options: Unpack[_MovingAsync[bool]]) -> T | Work[T | None] | None: ...
    def gather(self, x: Any, root: int = 0, out: Any = None, *, stream: Any = None, async_op: bool = False,
               timeout: float | None = None, algorithm: str = AUTO) -> Any:
        """Gather all ranks' ``x``, in rank order, on rank ``root``.

        As ``all_gather``, but only ``root`` may pass ``out``.  Returns the array on ``root``, None elsewhere.

            rows = comm.gather(mine, root=0)
        """
        plain = stream is timeout is None and async_op is False and algorithm is AUTO and type(root) is int
        known = plain and (out is not None) is (self.rank == root)
        if known and self._cache.repeat(self, "gather", x, out, None, root):
            return out
        options = self._options("gather", stream, async_op, timeout, algorithm)
        send, recv, root = _input(x, stream), None, check_rank("root", root, self.size)
        if self._is_root("out", out, root):
            recv = output(out, send, (self.size, *send.shape), stream, self.rank)
        return self._submit(Operation("gather", self.rank, options, send, recv, root=root))

    @overload
    def gather_v(self, x: T, counts: Sequence[int] | None = ..., root: int = ..., out: T | None = ...,
                 **options: Unpack[_Plain]) -> T | None: ...
    @overload
    def gather_v(self, x: T, counts: Sequence[int] | None = ..., root: int = ..., out: T | None = ...,
                 **options: Unpack[_PlainAsync[_True]]) -> Work[T | None]: ...
    @overload
    def gather_v(self, x: T, counts: Sequence[int] | None = ..., root: int = ..., out: T | None = ...,
                 **options: Unpack[_PlainAsync[bool]]) -> T | Work[T | None] | None: ...
    def gather_v(self, x: Any, counts: Sequence[int] | None = None, root: int = 0, out: Any = None, *,
                 stream: Any = None, async_op: bool = False, timeout: float | None = None) -> Any:
        """``gather`` of different sizes: ``counts[r]`` elements from rank r.

        ``x`` and ``counts`` are as in ``all_gather_v``, but only ``root`` may pass ``out``.
        Returns ``out``, or a new 1-D array of ``sum(counts)`` elements whatever the shape of ``x``, on ``root``; None
        elsewhere.

            tokens = comm.gather_v(mine, [3, 5], root=0)
        """
        plain = stream is timeout is None and async_op is False and type(root) is int
        known = plain and (out is not None) is (self.rank == root)
        if known and self._cache.repeat(self, "gather_v", x, out, None, (root, None, _key(counts))):
            return out
        options = self._options("gather_v", stream, async_op, timeout)
        send, recv, root = _input(x, stream), None, check_rank("root", root, self.size)
        gets = self._is_root("out", out, root)
        counts = self._gather_counts("gather_v", counts, send, out, options)
        if gets:
            recv = output(out, send, (sum(counts),), stream)
        return self._submit(Operation("gather_v", self.rank, options, send, recv, root=root, recv_counts=counts))

    @overload
    def scatter(self, x: Any, out: T, root: int = ..., **options: Unpack[_Moving]) -> T: ...
    @overload
    def scatter(self, x: Any, out: T, root: int = ..., **options: Unpack[_MovingAsync[_True]]) -> Work[T]: ...
    @overload
    def scatter(self, x: Any, out: T, root: int = ..., **options: Unpack[_MovingAsync[bool]]) -> T | Work[T]: ...
    def scatter(self, x: Any, out: Any, root: int = 0, *, stream: Any = None, async_op: bool = False,
                timeout: float | None = None, algorithm: str = AUTO) -> Any:
        """Send the r-th of ``size`` equal shards of the root's ``x`` to the ``out`` of rank r.

        ``x`` has ``size * out.size`` elements of out's dtype on ``root``, and is None elsewhere.  ``out`` does not
        overlap ``x``, or is exactly this rank's shard of it.  Returns ``out``.

            comm.scatter(rows if comm.rank == 0 else None, row)
        """
        plain = stream is timeout is None and async_op is False and algorithm is AUTO and type(root) is int
        key, other = (out, None) if x is None else (x, out)
        if plain and x is not out and self._cache.repeat(self, "scatter", key, other, None, root):
            return out
        options = self._options("scatter", stream, async_op, timeout, algorithm)
        send, recv = None, as_buffer(out, "out", writable=True, stream=stream)
        if self._is_root("x", x, root := check_rank("root", root, self.size)):
            send = _input(x, stream)
            expect_alike(recv, send)
            if send.count != self.size * recv.count:
                raise InvalidArgument(f"x: expected {self.size * recv.count} elements, got {send.count}")
            refuse_overlap(send, recv, self.rank)
        return self._submit(Operation("scatter", self.rank, options, send, recv, root=root))

    @overload
    def scatter_v(self, x: Any, counts: Sequence[int] | None, out: T, root: int = ...,
                  **options: Unpack[_Plain]) -> T: ...
    @overload
    def scatter_v(self, x: Any, counts: Sequence[int] | None, out: T, root: int = ...,
                  **options: Unpack[_PlainAsync[_True]]) -> Work[T]: ...
    @overload
    def scatter_v(self, x: Any, counts: Sequence[int] | None, out: T, root: int = ...,
                  **options: Unpack[_PlainAsync[bool]]) -> T | Work[T]: ...
    def scatter_v(self, x: Any, counts: Sequence[int] | None, out: Any, root: int = 0, *, stream: Any = None,
                  async_op: bool = False, timeout: float | None = None) -> Any:
        """``scatter`` with shards of different sizes: ``counts[r]`` elements for rank r.

        ``counts`` is the same on all ranks.  ``x`` has ``sum(counts)`` elements of out's dtype on ``root``, and is None
        elsewhere.  ``out`` has ``counts[rank]`` elements and does not overlap ``x``.  Returns ``out``.
        ``counts=None`` on all ranks: the sizes of ``out`` travel first (see ``all_gather_v``).

            comm.scatter_v(tokens if comm.rank == 0 else None, [3, 5], mine)
        """
        plain = stream is timeout is None and async_op is False and type(root) is int
        key, other = (out, None) if x is None else (x, out)
        ranks = root, _key(counts), None
        if plain and x is not out and self._cache.repeat(self, "scatter_v", key, other, None, ranks):
            return out
        options = self._options("scatter_v", stream, async_op, timeout)
        send, recv = None, as_buffer(out, "out", writable=True, stream=stream)
        if self._is_root("x", x, root := check_rank("root", root, self.size)):
            send = _input(x, stream)
            expect_alike(recv, send)
            refuse_overlap(send, recv)
        if counts is None:
            mine = recv.count, -1 if send is None else send.count
            counts, totals = self._counts_of_all("scatter_v", "counts", options, recv, mine)
            check_totals("x", totals, [sum(counts)] * self.size)
        counts = check_counts("counts", counts, self.size, send)
        if counts[self.rank] != recv.count:
            expected = f"counts[{self.rank}] = {counts[self.rank]}"
            raise InvalidArgument(f"out: expected {expected} elements, got {recv.count}")
        return self._submit(Operation("scatter_v", self.rank, options, send, recv, root=root, send_counts=counts))

    def _is_root(self, what: str, given: Any, root: int) -> bool:
        """Whether this rank is ``root``.  Raises InvalidArgument if another rank passes the argument ``what``."""
        if self.rank != root and given is not None:
            raise InvalidArgument(f"{what}: expected None on rank {self.rank}, which is not root {root}")
        return self.rank == root

    def _gather_counts(
        self, name: str, counts: Sequence[int] | None, send: Buffer, out: Any, options: Options
    ) -> tuple[int, ...]:
        """The counts of an all_gather_v or a gather_v, checked."""
        if counts is None:
            size = -1 if out is None else output(out, send, None, options.stream).count
            counts, sizes = self._counts_of_all(name, "counts", options, send, (send.count, size), 6)
            check_totals("out", sizes, [sum(counts)] * self.size)
        counts = check_counts("counts", counts, self.size)
        if counts[self.rank] != send.count:
            expected = f"counts[{self.rank}] = {counts[self.rank]}"
            raise InvalidArgument(f"x: expected {expected} elements, got {send.count}")
        return counts

    def _counts_of_all(
        self, name: str, what: str, options: Options, buffer: Buffer, mine: Sequence[int], depth: int = 5
    ) -> list[tuple[int, ...]]:
        """The numbers of every rank, for a call without ``what`` made ``depth`` frames up.  The host waits for them."""
        if self._deferred:
            raise InvalidArgument(f"{what}: expected numbers in a batch and for a persistent operation, got None")
        if buffer.device is not None and streams.capture_of(buffer.stream):
            raise InvalidArgument(f"{what}: expected numbers while a CUDA graph is captured, got None")
        rows = self._all_gather_numbers(mine, f"{name} with {what}=None", options.timeout, depth)
        return list(zip(*rows, strict=True))

    @overload
    def barrier(self, *, stream: Any = ..., async_op: Literal[False] = ..., timeout: float | None = ...) -> None: ...
    @overload
    def barrier(self, *, stream: Any = ..., async_op: Literal[True], timeout: float | None = ...) -> Work[None]: ...
    @overload
    def barrier(self, *, stream: Any = ..., async_op: bool, timeout: float | None = ...) -> Work[None] | None: ...
    def barrier(self, *, stream: Any = None, async_op: bool = False, timeout: float | None = None) -> Any:
        """Return once every rank has called it.

        With a GPU ``stream`` the host does not wait: work queued on that stream from now on runs after the work that
        every rank has queued on its own stream so far.

            comm.barrier()
        """
        if stream is None and self.device is None and timeout is None and async_op is False:
            if self._cache.repeat(self, "barrier", None):
                return None
            return self._submit(Operation("barrier", self.rank, self._defaults))
        if stream is not None:
            self._handle(stream)
        on_host = self.device is not None and stream is None and async_op is False and not self._deferred
        options = self._options("barrier", stream, on_host or async_op, timeout)
        done = self._submit(Operation("barrier", self.rank, options))
        return done.synchronize() if on_host else done

    def _handle(self, stream: Any) -> int:
        """The handle of a stream that is passed without an array."""
        if self.device is None:
            raise InvalidArgument(f"stream: expected None, as no GPU is used here, got {stream!r}")
        return streams.handle(stream)

    # Messages.

    @overload
    def send(self, x: Any, dst: int, tag: int = ..., **options: Unpack[_Plain]) -> None: ...
    @overload
    def send(self, x: Any, dst: int, tag: int = ..., **options: Unpack[_PlainAsync[_True]]) -> Work[None]: ...
    @overload
    def send(self, x: Any, dst: int, tag: int = ..., **options: Unpack[_PlainAsync[bool]]) -> Work[None] | None: ...
    def send(self, x: Any, dst: int, tag: int = 0, *, stream: Any = None, async_op: bool = False,
             timeout: float | None = None) -> Any:
        """Send ``x`` to rank ``dst``, another rank, which calls ``recv`` with the same ``tag``.

        ``x`` may be changed once the call (or its Work) is done, or has failed.  Messages between two ranks with one
        tag arrive in order; ``tag`` is from 0 to 1,048,575, and 0 on a GPU.  In host memory a message may be complete
        before it is received.  A message that is not received within the timeout breaks the communicator.

            comm.send(activations, dst=comm.rank + 1)
        """
        plain = stream is timeout is None and async_op is False and type(dst) is type(tag) is int
        if plain and self._cache.repeat(self, "send", x, None, None, (dst, None, tag, 0)):
            return None
        options = self._options("send", stream, async_op, timeout)
        message = Message(dst=check_peer("dst", dst, self.rank, self.size), tag=check_tag(tag))
        return self._submit(Operation("send", self.rank, options, _input(x, stream), message=message))

    @overload
    def recv(self, x: T, src: int, tag: int = ..., **options: Unpack[_Plain]) -> T: ...
    @overload
    def recv(self, x: T, src: int, tag: int = ..., **options: Unpack[_PlainAsync[_True]]) -> Work[T]: ...
    @overload
    def recv(self, x: T, src: int, tag: int = ..., **options: Unpack[_PlainAsync[bool]]) -> T | Work[T]: ...
    def recv(self, x: Any, src: int, tag: int = 0, *, stream: Any = None, async_op: bool = False,
             timeout: float | None = None) -> Any:
        """Receive a message of rank ``src``, another rank, with ``tag`` into ``x``; returns ``x``.

        Dtype and number of elements equal those of the sent array; otherwise both ranks raise CollectiveMismatch.

            comm.recv(activations, src=comm.rank - 1)
        """
        plain = stream is timeout is None and async_op is False and type(src) is type(tag) is int
        if plain and self._cache.repeat(self, "recv", x, None, None, (None, src, 0, tag)):
            return x
        options = self._options("recv", stream, async_op, timeout)
        message = Message(src=check_peer("src", src, self.rank, self.size), recv_tag=check_tag(tag))
        recv = as_buffer(x, "x", writable=True, stream=stream)
        return self._submit(Operation("recv", self.rank, options, recv=recv, message=message))

    @overload
    def send_recv(self, x: Any, out: T, dst: int, src: int, tag: int = ..., **options: Unpack[_Plain]) -> T: ...
    @overload
    def send_recv(self, x: Any, out: T, dst: int, src: int, tag: int = ...,
                  **options: Unpack[_PlainAsync[_True]]) -> Work[T]: ...
    @overload
    def send_recv(self, x: Any, out: T, dst: int, src: int, tag: int = ...,
                  **options: Unpack[_PlainAsync[bool]]) -> T | Work[T]: ...
    def send_recv(self, x: Any, out: Any, dst: int, src: int, tag: int = 0, *, stream: Any = None,
                  async_op: bool = False, timeout: float | None = None) -> Any:
        """Send ``x`` to rank ``dst`` while receiving ``out`` from rank ``src`` (MPI_Sendrecv); returns ``out``.

        The two messages have the same ``tag`` and match those of ``send`` and ``recv``; ``out`` does not overlap ``x``.
        ``dst`` and ``src`` are other ranks: a message to oneself raises InvalidArgument, also in a group of one rank.

            comm.send_recv(mine, theirs, dst=(comm.rank + 1) % comm.size, src=(comm.rank - 1) % comm.size)
        """
        plain = stream is timeout is None and async_op is False and type(dst) is type(src) is type(tag) is int
        if plain and self._cache.repeat(self, "send_recv", x, out, None, (dst, src, tag, tag)):
            return out
        options = self._options("send_recv", stream, async_op, timeout)
        dst, src = (check_peer(what, rank, self.rank, self.size) for what, rank in (("dst", dst), ("src", src)))
        send, recv = _input(x, stream), as_buffer(out, "out", writable=True, stream=stream)
        expect_place(recv, send)
        refuse_overlap(send, recv)
        message = Message(dst, src, check_tag(tag), tag)
        return self._submit(Operation("send_recv", self.rank, options, send, recv, message=message))

    # Persistent forms, named as MPI 4 names them.

    all_reduce_init = _persistent(all_reduce)
    reduce_init = _persistent(reduce)
    reduce_scatter_init = _persistent(reduce_scatter)
    reduce_scatter_v_init = _persistent(reduce_scatter_v)
    scan_init = _persistent(scan)
    exscan_init = _persistent(exscan)
    broadcast_init = _persistent(broadcast)
    all_gather_init = _persistent(all_gather)
    all_gather_v_init = _persistent(all_gather_v)
    all_to_all_init = _persistent(all_to_all)
    all_to_all_v_init = _persistent(all_to_all_v)
    gather_init = _persistent(gather)
    gather_v_init = _persistent(gather_v)
    scatter_init = _persistent(scatter)
    scatter_v_init = _persistent(scatter_v)
    barrier_init = _persistent(barrier)
    send_init = _persistent(send)
    recv_init = _persistent(recv)
    send_recv_init = _persistent(send_recv)


class _Builder(Operations):
    """Returns the Operation of a call without launching it."""

    def __init__(self, comm: Operations) -> None:
        self.rank, self.size, self.device, self._defaults = comm.rank, comm.size, comm.device, comm._defaults
        self._cache = CallCache()

    def _submit(self, o: Operation) -> Operation:
        return o


_INTEGERS = {int, np.int64}


def _key(counts: Sequence[int] | None) -> tuple[int, ...] | None:
    """Counts as a part of a cache key, or None, which no cached call has, if they are no list or tuple of integers.

    2.0 and True equal integers, but an uncached call refuses them.
    """
    if type(counts) is list or type(counts) is tuple:  # isinstance takes twice as long
        return tuple(counts) if _INTEGERS.issuperset(map(type, counts)) else None
    return None


def _input(x: Any, stream: Any) -> Buffer:
    return as_buffer(x, "x", writable=False, stream=stream)
