"""The operations of a communicator: each checks its arguments and makes an Operation of them.

Calls with the same cache key run in the same way, whatever memory their arrays use.  The core computes the key
(``make_key`` of ``module_cache.c``).  The first call with a key is checked and prepared: arguments → buffers →
``Operation`` → ``Backend.prepare`` → ``Prepared`` (``_prepare``).  The core starts later calls with this key without
checks.  Without the core, every call is checked.

``collectives.pyi`` has the overloads of each operation.  ``python tests/stubs.py`` writes it.
"""

from __future__ import annotations

import functools
import inspect
import math
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from threading import get_ident
from typing import Any

import numpy as np
from numpy import ndarray  # faster than np.ndarray, as numpy has a __getattr__

from kos._core import native
from kos.comm import compression
from kos.comm.arguments import (
    check_algorithm,
    check_bool,
    check_counts,
    check_offset,
    check_offsets,
    check_peer,
    check_rank,
    check_recv_tag,
    check_tag,
    check_timeout,
    check_totals,
    expect_alike,
    expect_place,
    in_and_out,
    output,
    output_offset,
    refuse_overlap,
    shard_shape,
    size_and_place,
)
from kos.comm.call_guards import check_one_thread, interruptible
from kos.comm.compression import check_compress, shards
from kos.comm.matching import Envelope
from kos.comm.operation import (
    ANY,
    AUTO,
    CORE_OPERATIONS,
    NO_MESSAGE,
    NOBODY,
    POINT_TO_POINT,
    Message,
    Operation,
    Options,
)
from kos.comm.prepared import APART, BY_CAPTURE, MOST_STORED, Prepared, Store, nothing, resized, without_memory
from kos.comm.reduction import PremulSum, ReduceOp, resolve
from kos.comm.work import Work, record_start
from kos.cuda import streams
from kos.errors import BackendUnavailable, InvalidArgument, KosError, by_handler
from kos.memory import Array, Buffer, as_buffer, windows
from kos.memory.buffer import handle_and_owner
from kos.memory.libraries import library_of

Op = ReduceOp | PremulSum

_KEYWORDS = {
    "stream": "a stream of kos.cuda, torch or CuPy, or a raw handle; the call is ordered with the work on it.",
    "async_op": "True returns a Work at once, whose wait() returns the result of the call.",
    "timeout": "in seconds; None: the communicator's own.",
    "algorithm": 'the name of a schedule of kos.comm.schedules; "auto" lets the backend choose.',
    "deterministic": "True adds in rank order: the same bits from run to run and on every backend.",
    "compress": 'None, or the format in which floats travel: "fp8", "int8" or "int4" (``kos.comm.compression``).',
    "residual": """error feedback for ``compress``, or None.  Pass an array of zeros to the first call.  ``residual``
holds the rounding errors of earlier calls.  Each call adds them to the data that this rank compresses, and then stores
its own rounding errors, so that nothing is lost over many calls (Seide et al. 2014; Karimireddy et al. 2019).  An
all_reduce also rounds the sum, and this error is not fed back.  The shards of a reduce_scatter should be whole blocks
of 64 elements.  The call overwrites ``x``; if the result goes elsewhere, ``x`` is undefined afterwards.
``residual`` has the dtype of ``x``, and at least one element for each element that this rank compresses.  ``x.size``
elements are always enough.  With l = ``exact_group_size``, ``x.size / l`` are enough; for an all_reduce, round this up
to whole blocks.  ``residual`` stays 0 where there are infinities or NaN.  A group of one rank does not change it.""",
}
"""What ``help`` says of the keywords that operations share."""
_ERRORS = """Raises InvalidArgument for wrong arguments, before anything is sent; CollectiveMismatch if the ranks made
different calls; CollectiveTimeout; RankLost; CollectiveError if the communicator failed before or is closed."""


def _document(call: Callable[..., Any]) -> None:
    """Add the shared keywords and the errors to the docstring of an operation."""
    keywords = [f"``{name}``: {_KEYWORDS[name]}" for name in inspect.signature(call).parameters if name in _KEYWORDS]
    call.__doc__ = "\n".join([inspect.getdoc(call) or "", "", *keywords, "", _ERRORS])


def _operation(check: Callable[..., Any]) -> Callable[..., Any]:
    """An operation of the communicator.  ``check`` checks the arguments of a call, and returns its Work to start.

    Where the core makes the calls of a communicator, it calls ``_start_uncached`` instead.
    """
    name = check.__name__

    @functools.wraps(check)
    def operation(comm: Any, *args: Any, **options: Any) -> Any:
        try:
            return comm._start_uncached(check, args, options, False)[0]
        except BaseException as error:
            comm._interrupted(name, error)
            raise

    _document(operation)
    return operation


class Operations:
    """Every operation."""

    rank: int
    size: int
    device: int | None
    """The index in this process of the GPU whose memory the backend moves; None for host memory."""
    backend: Any
    host: Any
    _group: Any
    """The communicator as the flight recorder knows it."""
    _batch: Any
    """The open batch, which gets the calls, or None."""
    _store: Store
    _eager_calls: Any = None
    """What describes calls on a GPU to the core (``EagerCalls``); None without the core or a GPU."""
    _collectives: Any
    """The numbers of the next collectives."""
    _messages: Any
    """The numbers of the next messages."""
    _active: Any
    _tracing: Any
    recorder: Any
    _defaults: Options
    """The options of a call without keywords."""
    _closed = False

    def __getattr__(self, name: str) -> Any:
        if name == "node":  # the old name, until the next release
            warnings.warn("Communicator.node is now Communicator.local_ranks", FutureWarning, stacklevel=2)
            return self.local_ranks
        text = f"{type(self).__name__!r} object has no attribute {name!r}"
        if (operation := name.removesuffix("_init")) in CORE_OPERATIONS:
            text = f"{name}: expected a call, as kos has no persistent operations: {operation}() on arrays like those "
            text += "of an earlier call is as fast as the start of one (docs/differences.md)"
        raise AttributeError(text, name=name, obj=self)

    def _check_open(self) -> None:
        """Raise CollectiveError if this communicator is closed."""

    def _lacks_memory(self, name: str, error: Exception) -> KosError:
        """The error of a call for which this rank lacks memory.  A collective fails on all ranks: they wait for it."""
        failures = self.backend.failures
        own = failures.as_own(error, f"{self._group.name}: {name}")
        if failures.first is None and name not in POINT_TO_POINT:
            failures.report(None, own, self.backend.begun)
        lack: KosError = own.copy()
        return lack

    def _cached_work(self, prepared: Prepared, x: Any, out: Any, array: Any, stream: Any) -> Work[Any] | None:
        """The Work of a call that need not be checked, because its key is known.  None if it must be checked after all.

        The call reads ``x``, writes ``out`` and returns ``array``.  ``x`` and ``out`` are None if the caller did not
        pass such an array.  If ``out`` is None and this rank has a result, the result is a new array.  Only calls on
        GPUs use ``stream``.
        """
        o = prepared.operation
        if not prepared.backend.on_gpu:
            if out is None and prepared.has_output:
                out = array = np.empty(o.recv.shape, o.recv.dtype.numpy)  # type: ignore[union-attr]
            send = x if x is None or (type(x) is ndarray and x.ndim == 1) else _flat(x)
            recv = out if out is None or (type(out) is ndarray and out.ndim == 1) else _flat(out)
            if o.send is o.recv:
                send = recv = recv if send is None else send
            work: Work[Any] = prepared.work(prepared, send, recv, array)
            return work
        handle, owner = handle_and_owner(stream)
        if not prepared.capture_invariant and streams.is_captured(handle):
            return None
        start, end = (0 if each is None else _pointer(each) for each in (x, out))
        if o.send is o.recv:
            start = end = start or end
        work = prepared.work(prepared, start, end, array)
        work.stream, work.stream_owner, work.held = handle, owner, x
        return work

    def _start_cached(self, prepared: Prepared, stream: Any, x: Any, out: Any) -> Any:
        """Start a call whose key the core knows, but which the core cannot start.

        The arguments are those of ``_cached_work``.  Returns NotImplemented if the call must be checked.
        """
        try:
            work = self._cached_work(prepared, x, out, out, stream)
        except (MemoryError, OverflowError) as error:
            raise self._lacks_memory(prepared.name, error) from error
        return NotImplemented if work is None else self._start_work(work)

    def _resize(self, work: Work[Any], known: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Prepare the call of ``work``, which the core has begun by the Prepared of a call of another size.

        ``known`` is what the core has recorded of it.  Returns the description of the call for the recorder; None
        without memory for it.
        """
        group, operation, *shapes = known
        try:
            prepared = self._prepare_anew(resized(operation, *shapes))
        except MemoryError:  # the core runs the call without it; the texts of its errors name the other size
            return None
        work.prepared = prepared
        prepared.description = group, prepared.operation
        if work.record[0] is known:  # type: ignore[index]  # else a later call has overwritten it
            work.record[0] = prepared.description  # type: ignore[index]
        return prepared.description

    def _start_uncached(
        self, check: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any], has_key: bool
    ) -> tuple[Any, tuple[Any, ...] | None]:
        """Check a call, and start it.

        Returns the result of the call, and what the core must know to start later calls with the same key.  This is
        None if the call has no key, or if a later call with the same key might have to run differently.
        """
        try:
            work = check(self, *args, **options)
        except (MemoryError, OverflowError) as error:
            raise self._lacks_memory(check.__name__, error) from error
        if work is None:
            return None, None
        has_key = has_key and (self._batch is None or self.device is None)
        send, recv, core_call = work.held, work.array if work.prepared.has_output else None, None
        if is_early := has_key and self.device is None:
            core_call = self._core_call(work, send, recv, (*args, *options.values()), options)
        result = self._start_work(work)
        if has_key and not is_early:  # a call on a GPU is described as it was queued
            core_call = self._core_call(work, send, recv, (*args, *options.values()), options)
        return result, core_call

    def _start_work(self, work: Work[Any], begun: bool = False) -> Any:
        """Number ``work``, record its call site, and launch it.

        If the core has ``begun`` the call, it has its number and record already, and the engine has the Work; this
        method completes it.  Returns the result, or the Work itself with ``async_op``.
        """
        prepared = work.prepared
        collective, backend = prepared.collective, prepared.backend
        if not begun:
            if self._batch is not None:
                return self._batch.add(work)
            if self._closed:
                self._check_open()
            if prepared.launch is nothing:  # it gets no number and no record
                backend.failures.refuse(prepared.name)
                return work.result if prepared.blocking else work
            if collective and self._active is not None:
                check_one_thread(self, work)
        if collective:
            self._active = get_ident(), work
        try:
            if begun:
                known = work.record[0]  # type: ignore[index]  # before other threads may overwrite the record
                steps = backend.resume(work)
                if steps is not None and known is not prepared.description and known[1] is prepared.operation:
                    self._resize(work, known)
            else:
                if backend.on_gpu:
                    backend.check_start((work,))
                record_start(self, work)
                if backend.failures.first is not None:
                    work.refuse()
                if self._tracing is None:
                    steps = prepared.launch(work)
                else:
                    with self._tracing((work,), False, not prepared.blocking):
                        steps = prepared.launch(work)
            if steps is not None:
                backend.engine.begin(work, steps)
            if not prepared.blocking:
                return work
            if work.steps is not None or work._error is not None:
                return work.wait()
            work.reported = True
            array, work.array, work.held = work.array, None, None  # a backend keeps its last Work
            return array if work.convert is None else work.convert(array)
        finally:
            if collective:
                self._active = None

    def _core_call(
        self, work: Work[Any], send: Any, recv: Any, arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[Any, ...] | None:
        """``_describe``, or None after an error, which does not concern the call itself."""
        try:
            return self._describe(work, send, recv, arguments, options)
        except Exception as error:
            if by_handler(error):
                raise
            return None

    def _describe(
        self, work: Work[Any], send: Any, recv: Any, arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[Any, ...] | None:
        """What the core must know of calls like ``work`` (``objects.h`` lists it), or None as in ``_start_uncached``.

        ``send`` and ``recv`` are the arrays that the call reads and writes, as the caller passed them; None where this
        rank has none.
        """
        prepared, objects = work.prepared, _objects(arguments, options.get("stream"))
        if objects is None or work.convert is not None or not prepared.cacheable or not _is_repeatable(work):
            return None
        o, x, out, unused = prepared.operation, -1, -1, []
        for number, each in enumerate(arguments):
            if each is None:
                continue
            if each is send and x < 0:
                x = number
            if each is recv and out < 0:
                out = number
            if each is not send and each is not recv and hasattr(each, "shape"):
                unused.append(each)
        is_new = out < 0 and type(send) is type(recv) is ndarray
        if (x < 0 and send is not None) or (out < 0 and recv is not None and not is_new):
            return None
        if unused and ((prepared.has_output and o.name != "scatter") or any(map(_may_be_number, unused))):
            return None  # it may depend on the values of a further array
        if o.name.endswith("_v"):
            counts = sum(type(each) in (list, tuple) for each in arguments)
            if unused or counts != 1 + (o.name == "all_to_all_v"):
                return None  # the ranks exchange sizes first
        start, end = 0 if send is None else _pointer(send), 0 if recv is None else _pointer(recv)
        sent = 0 if o.send is None else o.send.count * o.send.dtype.itemsize
        received = 0 if o.recv is None else o.recv.count * o.recv.dtype.itemsize
        apart = not sent or not received or start + sent <= end or end + received <= start
        overlap = APART if apart else (start - end) % (1 << 64), sent, received
        if self._eager_calls is not None:
            streams = [options.get("stream"), *[each.stream for each in arguments if type(each) is Array]]
            how = self._eager_calls.describe(work, x, out, overlap, streams)
        else:
            starts = prepared.in_core and (prepared.blocking or prepared.backend.engine.thread is None)
            starts = starts and (out >= 0 or not prepared.has_output)
            starts = starts and (sent > 0 or o.send is None) and (received > 0 or o.recv is None)
            call, puts, gets = prepared.plan if starts else (None, True, True)
            how = call, x if puts else -1, out if gets else -1, None
        if how is None:
            return None
        call, reads, writes, guards = how
        example: Work[Any] = prepared.work(prepared)
        example.stream, example.stream_owner = work.stream, work.stream_owner
        kept = (*objects, *options)  # which the core compares by identity
        about = prepared, prepared.description, example, work.stream_owner, prepared.blocking
        return call, *about, reads, writes, x, out, *overlap, kept, guards

    def _prepare_anew(self, o: Operation) -> Prepared:
        """Have the backend for the memory of ``o`` prepare it; a barrier runs on the GPUs if a stream waits for it."""
        if NOBODY in o.message[:2]:
            complete = Prepared(without_memory(o), self.backend, nothing)
            complete.work = Work
            return complete
        first, host = o.send or o.recv, self.host
        on_gpu = o.options.on_stream if first is None else first.device is not None
        if host is None or host is self.backend or on_gpu:
            prepared: Prepared = self.backend.prepare(o)
            return prepared
        prepared = self.backend.compare_host_calls(host.prepare(o))
        return prepared

    def _prepare(self, o: Operation, op: Any = None, stream: Any = None) -> Work[Any]:
        """A checked call: by the Prepared of its signature, or by a new one.

        ``stream``: that of a call without arrays.  ``op``: as the caller passed it.
        """
        send, recv, first = o.send, o.recv, o.send or o.recv
        handle, owner = (0, None) if first is None else (first.stream, first.stream_owner)
        if stream is not None:
            handle, owner = handle_and_owner(stream)
        signature = _signature(o, op)
        prepared: Prepared | None = self._store.get(signature)
        if prepared is BY_CAPTURE:
            prepared = self._store.get((signature, streams.is_captured(handle)))
        if prepared is None:
            if self._closed:  # its backend has no memory to publish a description in
                self._check_open()
            if o.options.compress:
                compression.check(o)
            prepared = self._prepare_anew(o)
            prepared.description = self._group, prepared.operation
            if prepared.cacheable and not o.options.purpose:
                if len(self._store) >= MOST_STORED:
                    del self._store[next(iter(self._store))]
                if not prepared.capture_invariant:
                    self._store[signature] = BY_CAPTURE
                    signature = signature, streams.is_captured(handle)
                self._store[signature] = prepared
        on_host = first is None or first.device is None
        if on_host:
            work: Work[Any] = prepared.work(prepared, send and send.flat, recv and recv.flat)
        else:
            work = prepared.work(prepared, 0 if send is None else send.pointer, 0 if recv is None else recv.pointer)
        work.stream, work.stream_owner, work.held = handle, owner, send and send.array
        if recv is not None:
            work.array, work.convert = recv.array, recv.convert
        if o.residual is not None:
            work.residual = o.residual.flat if on_host else o.residual.array
        return work

    def _start(self, operation: Operation) -> Any:
        """Prepare and start a checked call.  Returns what ``_start_work`` returns."""
        return self._start_work(self._prepare(operation))

    def _all_gather_numbers(self, numbers: Sequence[int], purpose: str, timeout: float | None) -> list[list[int]]:
        """All ranks' ``numbers``, as many on each, for the call ``purpose``."""
        raise NotImplementedError

    def _options(
        self, name: str, async_op: bool, timeout: float | None, algorithm: str = AUTO, deterministic: bool = False,
        on_stream: bool = False, compress: Any = None,
    ) -> Options:  # fmt: skip
        if timeout is compress is None and async_op is deterministic is on_stream is False and algorithm is AUTO:
            return self._defaults
        seconds = self._defaults.timeout if timeout is None else check_timeout(timeout)
        ordered, overlap = check_bool("deterministic", deterministic), check_bool("async_op", async_op)
        if overlap and self._batch is not None:
            raise InvalidArgument("async_op: expected False in a batch, got True")
        form = check_compress(compress)
        if form and algorithm != AUTO:
            raise InvalidArgument(f"algorithm: expected {AUTO!r} with compress, got {algorithm!r}")
        return Options(seconds, check_algorithm(algorithm, name, ordered), ordered, overlap, on_stream, "", form)

    # Reductions.

    @_operation
    def all_reduce(self, x: Any, op: Op = ReduceOp.SUM, *, out: Any = None, stream: Any = None,
                   async_op: bool = False, timeout: float | None = None, algorithm: str = AUTO,
                   deterministic: bool = False, compress: str | None = None, residual: Any = None) -> Any:
        """Reduce ``x`` over all ranks; every rank gets the result.

        ``x`` has the same dtype and number of elements on all ranks.  ``op`` must be valid for the dtype.  The
        result replaces ``x``, or is written to ``out``, which has the shape and dtype of ``x``.  ``out`` is ``x``, or
        does not overlap it.  Returns the array that holds the result.

            comm.all_reduce(gradients, ReduceOp.AVG)
        """
        options = self._options("all_reduce", async_op, timeout, algorithm, deterministic, compress=compress)
        send, recv = in_and_out(x, out, stream)
        o = Operation("all_reduce", self.rank, options, send, recv, resolve(op, send.dtype, self.size))
        return self._prepare(o if residual is None else self._with_feedback(o, residual, stream), op)

    @_operation
    def reduce(self, x: Any, root: int = 0, op: Op = ReduceOp.SUM, *, out: Any = None, stream: Any = None,
               async_op: bool = False, timeout: float | None = None, algorithm: str = AUTO,
               deterministic: bool = False) -> Any:
        """Reduce ``x`` over all ranks; rank ``root`` gets the result.

        It works as ``all_reduce`` by ``op``, but the ranks other than ``root`` keep their ``x``, ignore ``out``, and
        get None.

            total = comm.reduce(losses, root=0)          # on rank 0: losses itself
        """
        options = self._options("reduce", async_op, timeout, algorithm, deterministic)
        root = check_rank("root", root, self.size)
        return self._prepare(self._reduction("reduce", x, out, op, options, stream, self.rank == root, root), op)

    @_operation
    def reduce_scatter(self, x: Any, out: Any = None, op: Op = ReduceOp.SUM, *, stream: Any = None,
                       async_op: bool = False, timeout: float | None = None, algorithm: str = AUTO,
                       deterministic: bool = False, compress: str | None = None, residual: Any = None) -> Any:
        """Reduce ``x`` over all ranks by ``op``; rank r gets the r-th of ``size`` equal shards of the result.

        ``x.size`` is a multiple of ``size``.  ``out`` has ``x.size / size`` elements; it does not overlap ``x``, or is
        exactly this rank's shard of it.  Without ``out`` a new array has the shape ``(x.shape[0] / size,
        *x.shape[1:])`` if that divides, else it is 1-D.  Returns the array that holds the shard.

            shard = comm.reduce_scatter(gradients)
        """
        options = self._options("reduce_scatter", async_op, timeout, algorithm, deterministic, compress=compress)
        send = _input(x, stream)
        shape = shard_shape(send, self.size)
        recv = output(out, send, shape, stream, self.rank * (send.count // self.size))
        o = Operation("reduce_scatter", self.rank, options, send, recv, resolve(op, send.dtype, self.size))
        return self._prepare(o if residual is None else self._with_feedback(o, residual, stream), op)

    @_operation
    def reduce_scatter_v(self, x: Any, counts: Sequence[int] | None = None, out: Any = None, op: Op = ReduceOp.SUM, *,
                         stream: Any = None, async_op: bool = False, timeout: float | None = None,
                         compress: str | None = None) -> Any:
        """``reduce_scatter`` by ``op`` with shards of different sizes: ``counts[r]`` elements for rank r.

        ``counts`` is the same on all ranks and sums to ``x.size``.  ``out`` has ``counts[rank]`` elements.  It does not
        overlap ``x``, or is exactly this rank's shard of it.  Terms are always added in rank order.  Returns ``out``,
        or a new 1-D array, whatever the shape of ``x``.  With ``counts=None`` on all ranks, all ranks pass ``out``, and
        first exchange its sizes (see ``all_gather_v``).

            mine = comm.reduce_scatter_v(gradients, [3, 5])
        """
        options = self._options("reduce_scatter_v", async_op, timeout, compress=compress)
        send = _input(x, stream)
        reduction = resolve(op, send.dtype, self.size)
        if counts is None:
            if out is None:
                raise InvalidArgument("counts: expected numbers without out, got None")
            size, place = size_and_place(out, send, stream)
            counts = self._counts_of_all("reduce_scatter_v", "x", options, send, (size, send.count, place))
        counts = check_counts("counts", counts, self.size, send)
        recv = output(out, send, (counts[self.rank],), stream, sum(counts[: self.rank]))
        return self._prepare(
            Operation("reduce_scatter_v", self.rank, options, send, recv, reduction, send_counts=counts), op
        )

    @_operation
    def scan(self, x: Any, op: Op = ReduceOp.SUM, *, out: Any = None, stream: Any = None, async_op: bool = False,
             timeout: float | None = None, algorithm: str = AUTO) -> Any:
        """Reduce ``x`` over the ranks 0 to r; rank r gets the result (MPI_Scan).

        The arguments are those of ``all_reduce``: without ``out``, the result replaces ``x``.  Terms are always added
        in rank order.  ``op`` may not be AVG.

            ends = comm.scan(np.array([len(tokens)]))            # of each rank's part of a whole
        """
        options = self._options("scan", async_op, timeout, algorithm)
        return self._prepare(self._reduction("scan", x, out, op, options, stream), op)

    @_operation
    def exscan(self, x: Any, op: Op = ReduceOp.SUM, *, out: Any = None, stream: Any = None, async_op: bool = False,
               timeout: float | None = None, algorithm: str = AUTO) -> Any:
        """Reduce ``x`` over the ranks 0 to r - 1; rank r gets the result (MPI_Exscan).

        It works as ``scan`` by ``op``, but rank 0 has no result: its ``x`` and ``out`` do not change, and it gets None.

            start = comm.exscan(np.array([len(tokens)]))         # of this rank's part of a whole
        """
        options = self._options("exscan", async_op, timeout, algorithm)
        return self._prepare(self._reduction("exscan", x, out, op, options, stream, self.rank > 0), op)

    def _reduction(
        self, name: str, x: Any, out: Any, op: Op, options: Options, stream: Any, gets: bool = True,
        root: int | None = None,
    ) -> Operation:  # fmt: skip
        """A reduction whose result is written on the ranks that receive one (``gets``)."""
        if name != "reduce" and op is ReduceOp.AVG:
            names = ", ".join(each.name for each in ReduceOp if each is not op)
            raise InvalidArgument(f"op: expected one of {names} for {name}, got AVG")
        if name == "exscan" and not gets:
            in_and_out(x, out, stream)  # so that a wrong out is an error on every rank
        send, recv = in_and_out(x, out, stream) if gets else (_input(x, stream), None)
        return Operation(name, self.rank, options, send, recv, resolve(op, send.dtype, self.size), root)

    def exact_group_size(self, device: int | None = None) -> int:
        """How many ranks add exactly before a compressed all_reduce or reduce_scatter compresses.

        On several hosts, this is the number of ranks of each host, under one of two conditions.  In host memory, all
        hosts must have the same number of ranks, numbered host by host.  On GPUs, collectives between hosts must be
        able to run in phases (docs/guides/hosts.md).  Otherwise it is 1: every rank compresses the data that it sends.
        ``device`` is the GPU of the arrays, or None for host memory.  The method is not collective, and returns the
        same number on all ranks.  Raises CollectiveError if the communicator is closed.

            residual = np.zeros(x.size // comm.exact_group_size(), x.dtype)
            shard = comm.reduce_scatter(x, compress="int8", residual=residual)
        """
        self._check_open()
        backend = self.host if device is None else self.backend
        return 1 if backend is None else int(backend.exact_group_size())

    def _with_feedback(self, o: Operation, residual: Any, stream: Any) -> Operation:
        """The compressed reduction ``o`` with error feedback."""
        x, options = o.send, o.options
        assert x is not None
        if not options.compress:
            raise InvalidArgument(f"residual: expected None without compress, got {type(residual).__name__}")
        kept = as_buffer(residual, "residual", True, stream)
        if kept.dtype is not x.dtype:
            raise InvalidArgument(f"residual: expected dtype {x.dtype}, as x has, got {kept.dtype}")
        if kept.device != x.device:
            raise InvalidArgument(f"residual: expected memory of {x.place}, as x has, got memory of {kept.place}")
        if any(map(kept.overlaps, {x, o.recv or x})):
            raise InvalidArgument("residual: expected memory of its own, got an array that overlaps x or out")
        if kept.stream != x.stream:
            raise InvalidArgument("residual: expected an array of the stream of x, got one of another: pass stream=")
        exact = 1 if options.deterministic else self.exact_group_size(x.device)
        count = x.count // exact if o.name == "reduce_scatter" else shards(x.count, exact)[self.rank % exact]
        if kept.count < count:
            what = f"at least {count} elements, as many as this rank compresses"
            raise InvalidArgument(f"residual: expected {what}, got {kept.count}")
        as_buffer(x.array, "x", True, stream)  # it is overwritten
        flat = kept.flat if kept.flat is None else kept.flat[:count]
        return replace(o, residual=replace(kept, flat=flat, count=count, shape=(count,)))

    # Data movement.

    @_operation
    def broadcast(self, x: Any, root: int = 0, *, out: Any = None, stream: Any = None, async_op: bool = False,
                  timeout: float | None = None, algorithm: str = AUTO) -> Any:
        """Send the ``x`` of rank ``root`` to every rank.

        ``x`` has the same dtype and number of elements on all ranks.  The data replaces ``x``, or is written to
        ``out``, which has the shape of ``x``.  With ``out``, ``x`` may be None on ranks other than ``root``.  Only the
        root's ``x`` may be read-only.  Returns the array that holds the data.

            comm.broadcast(weights, root=0)
        """
        options = self._options("broadcast", async_op, timeout, algorithm)
        root = check_rank("root", root, self.size)
        if out is None and self.rank == root:
            send = recv = _input(x, stream)
        elif x is None and out is not None and self.rank != root:
            send = recv = as_buffer(out, "out", writable=True, stream=stream)
        else:
            send, recv = in_and_out(x, out, stream)
        return self._prepare(Operation("broadcast", self.rank, options, send, recv, root=root))

    @_operation
    def all_gather(self, x: Any, out: Any = None, *, stream: Any = None, async_op: bool = False,
                   timeout: float | None = None, algorithm: str = AUTO, compress: str | None = None) -> Any:
        """Gather all ranks' ``x``, in rank order, on every rank.

        ``x`` has the same dtype and number of elements on all ranks.  ``out`` has ``size * x.size`` elements; it does
        not overlap ``x``, or ``x`` is exactly this rank's shard of it.  Without ``out`` a new array has the shape
        ``(size, *x.shape)`` and the kind of memory of ``x``.  Returns the array that holds the result.

            rows = comm.all_gather(mine)                 # rows[r] is the x of rank r
        """
        options = self._options("all_gather", async_op, timeout, algorithm, compress=compress)
        send = _input(x, stream)
        recv = output(out, send, (self.size, *send.shape), stream, self.rank * send.count)
        return self._prepare(Operation("all_gather", self.rank, options, send, recv))

    @_operation
    def all_gather_v(self, x: Any, counts: Sequence[int] | None = None, out: Any = None, *, stream: Any = None,
                     async_op: bool = False, timeout: float | None = None, compress: str | None = None) -> Any:
        """``all_gather`` of different sizes: ``counts[r]`` elements from rank r.

        ``counts`` is the same on all ranks, and ``counts[rank]`` is ``x.size``.  ``out`` has ``sum(counts)`` elements;
        it does not overlap ``x``, or ``x`` is exactly this rank's shard of it.  Returns ``out``, or a new 1-D array,
        whatever the shape of ``x``.

        With ``counts=None`` on all ranks, the ranks first exchange the sizes through host memory, and the host waits
        for them, also with ``async_op=True``.  In host memory, the exchange is an operation with a number of its own.
        If a size is wrong, or arrays overlap in another way, every rank raises InvalidArgument, which names that rank.
        In a batch and in a CUDA graph, ``counts`` must be given.

            tokens = comm.all_gather_v(mine, [3, 5])
        """
        options = self._options("all_gather_v", async_op, timeout, compress=compress)
        send = _input(x, stream)
        counts = self._gather_counts("all_gather_v", counts, send, out, options, stream)
        recv = output(out, send, (sum(counts),), stream, sum(counts[: self.rank]))
        return self._prepare(Operation("all_gather_v", self.rank, options, send, recv, recv_counts=counts))

    @_operation
    def all_to_all(self, x: Any, out: Any = None, *, stream: Any = None, async_op: bool = False,
                   timeout: float | None = None, algorithm: str = AUTO, compress: str | None = None) -> Any:
        """Send shard j of rank i's ``x`` to shard i of rank j's ``out``.

        ``x`` has the same dtype and number of elements on all ranks, a multiple of ``size``; its shards are equal.
        ``out`` has x's size and does not overlap it.  Returns ``out``, or a new array of x's shape.

            columns = comm.all_to_all(rows)
        """
        options = self._options("all_to_all", async_op, timeout, algorithm, compress=compress)
        send = _input(x, stream)
        shard_shape(send, self.size)
        recv = output(out, send, send.shape, stream)
        return self._prepare(Operation("all_to_all", self.rank, options, send, recv))

    @_operation
    def all_to_all_v(self, x: Any, send_counts: Sequence[int], recv_counts: Sequence[int] | None = None,
                     out: Any = None, *, stream: Any = None, async_op: bool = False,
                     timeout: float | None = None, compress: str | None = None) -> Any:
        """``all_to_all`` of different sizes: ``send_counts[j]`` elements for rank j, ``recv_counts[i]`` from rank i.

        Each rank passes its own counts: ``recv_counts[i]`` equals ``send_counts[rank]`` of rank i.  ``send_counts`` sum
        to ``x.size``, and ``recv_counts`` to the size of ``out``, which does not overlap ``x``.  Returns ``out``, or a
        new 1-D array, whatever the shape of ``x``.  Raises CollectiveMismatch if the counts of two ranks disagree.
        With ``recv_counts=None`` on all ranks, the ranks exchange the counts first (see ``all_gather_v``).
        ``send_counts`` may not be None.  With ``compress`` on GPUs, counts that disagree within one block of 64
        elements are not found.

            routed = comm.all_to_all_v(tokens, to_each, from_each)
        """
        options = self._options("all_to_all_v", async_op, timeout, compress=compress)
        send = _input(x, stream)
        send_counts = check_counts("send_counts", send_counts, self.size, send)
        if recv_counts is None:
            size, place = size_and_place(out, send, stream)
            check_offset(place, None)
            mine = *send_counts, size
            *to_each, sizes = self._numbers_of_all("all_to_all_v", "recv_counts", options, send, mine)
            recv_counts = to_each[self.rank]
            check_totals("out", sizes, [sum(counts) for counts in to_each])
        recv_counts = check_counts("recv_counts", recv_counts, self.size)
        own = send_counts[self.rank]
        if own != recv_counts[self.rank]:
            expected = f"send_counts[{self.rank}] = {own} from this rank itself"
            raise InvalidArgument(f"recv_counts: expected {expected}, got {recv_counts[self.rank]}")
        recv = output(out, send, (sum(recv_counts),), stream)
        work = self._prepare(Operation(
            "all_to_all_v", self.rank, options, send, recv, send_counts=send_counts, recv_counts=recv_counts
        ))
        return work

    @_operation
    def gather(self, x: Any, root: int = 0, out: Any = None, *, stream: Any = None, async_op: bool = False,
               timeout: float | None = None, algorithm: str = AUTO) -> Any:
        """Gather all ranks' ``x``, in rank order, on rank ``root``.

        It works as ``all_gather``, but only ``root`` may pass ``out``.  Returns the array on ``root``, and None on
        other ranks.

            rows = comm.gather(mine, root=0)
        """
        options = self._options("gather", async_op, timeout, algorithm)
        send, recv, root = _input(x, stream), None, check_rank("root", root, self.size)
        if self._is_root("out", out, root):
            recv = output(out, send, (self.size, *send.shape), stream, self.rank * send.count)
        return self._prepare(Operation("gather", self.rank, options, send, recv, root=root))

    @_operation
    def gather_v(self, x: Any, counts: Sequence[int] | None = None, root: int = 0, out: Any = None, *,
                 stream: Any = None, async_op: bool = False, timeout: float | None = None) -> Any:
        """``gather`` of different sizes: ``counts[r]`` elements from rank r.

        ``x`` and ``counts`` are as in ``all_gather_v``, but only ``root`` may pass ``out``.  On ``root``, returns
        ``out``, or a new 1-D array of ``sum(counts)`` elements, whatever the shape of ``x``.  On other ranks, returns
        None.

            tokens = comm.gather_v(mine, [3, 5], root=0)
        """
        options = self._options("gather_v", async_op, timeout)
        send, recv, root = _input(x, stream), None, check_rank("root", root, self.size)
        gets = self._is_root("out", out, root)
        counts = self._gather_counts("gather_v", counts, send, out, options, stream)
        if gets:
            recv = output(out, send, (sum(counts),), stream, sum(counts[: self.rank]))
        return self._prepare(Operation("gather_v", self.rank, options, send, recv, root=root, recv_counts=counts))

    @_operation
    def scatter(self, x: Any, out: Any, root: int = 0, *, stream: Any = None, async_op: bool = False,
                timeout: float | None = None, algorithm: str = AUTO) -> Any:
        """Send the r-th of ``size`` equal shards of the root's ``x`` to the ``out`` of rank r.

        ``x`` has ``size * out.size`` elements of out's dtype on ``root``.  On other ranks it is None, or an array like
        the root's, which is not used.  ``out`` does not overlap the root's ``x``, or is exactly the root's shard of it.
        Returns ``out``.

            comm.scatter(rows if comm.rank == 0 else None, row)
        """
        options = self._options("scatter", async_op, timeout, algorithm)
        recv, root = as_buffer(out, "out", writable=True, stream=stream), check_rank("root", root, self.size)
        send = self._of_root(self._whole(x, recv, root, stream), root, self.size * recv.count)
        if send is not None:
            refuse_overlap(send, recv, self.rank * recv.count)
        return self._prepare(Operation("scatter", self.rank, options, send, recv, root=root))

    @_operation
    def scatter_v(self, x: Any, counts: Sequence[int] | None, out: Any, root: int = 0, *, stream: Any = None,
                  async_op: bool = False, timeout: float | None = None) -> Any:
        """``scatter`` with shards of different sizes: ``counts[r]`` elements for rank r.

        ``counts`` is the same on all ranks.  On ``root``, ``x`` has ``sum(counts)`` elements of out's dtype.  ``out``
        has ``counts[rank]`` elements.  What ``x`` is on other ranks, and where ``out`` may lie: see ``scatter``.
        Returns ``out``.
        With ``counts=None`` on all ranks, the ranks first exchange the sizes of ``out`` (see ``all_gather_v``).

            comm.scatter_v(tokens if comm.rank == 0 else None, [3, 5], mine)
        """
        options = self._options("scatter_v", async_op, timeout)
        recv, root = as_buffer(out, "out", writable=True, stream=stream), check_rank("root", root, self.size)
        send = self._whole(x, recv, root, stream)
        if counts is None:
            size, place = (-1, -1) if send is None else (send.count, output_offset(send, recv))
            mine = recv.count, size, place if self.rank == root else -1
            counts = self._counts_of_all("scatter_v", "x", options, recv, mine)
        counts = check_counts("counts", counts, self.size)
        send = self._of_root(send, root, sum(counts))
        if counts[self.rank] != recv.count:
            expected = f"counts[{self.rank}] = {counts[self.rank]}"
            raise InvalidArgument(f"out: expected {expected} elements, got {recv.count}")
        if send is not None:
            refuse_overlap(send, recv, sum(counts[: self.rank]))
        return self._prepare(Operation("scatter_v", self.rank, options, send, recv, root=root, send_counts=counts))

    def _whole(self, x: Any, recv: Buffer, root: int, stream: Any) -> Buffer | None:
        """The ``x`` of a scatter to ``recv``, checked; None if a rank that is not ``root`` passes none."""
        if x is None and self.rank != root:
            return None
        send = _input(x, stream)
        expect_alike(recv, send)
        return send

    def _of_root(self, send: Buffer | None, root: int, count: int) -> Buffer | None:
        """The ``x`` of a scatter, of ``count`` elements, on ``root``; None on other ranks."""
        if send is not None and send.count != count:
            elsewhere = f"None on rank {self.rank}, which is not root {root}, or " * (self.rank != root)
            raise InvalidArgument(f"x: expected {elsewhere}{count} elements, got {send.count}")
        return send if self.rank == root else None

    def _is_root(self, what: str, given: Any, root: int) -> bool:
        """Whether this rank is ``root``.  Raises InvalidArgument if another rank passes the argument ``what``."""
        if self.rank != root and given is not None:
            raise InvalidArgument(f"{what}: expected None on rank {self.rank}, which is not root {root}")
        return self.rank == root

    def _gather_counts(
        self, name: str, counts: Sequence[int] | None, send: Buffer, out: Any, options: Options, stream: Any
    ) -> tuple[int, ...]:
        """The counts of an all_gather_v or a gather_v, checked."""
        if counts is None:
            mine = send.count, *size_and_place(out, send, stream)
            counts = self._counts_of_all(name, "out", options, send, mine)
        counts = check_counts("counts", counts, self.size)
        if counts[self.rank] != send.count:
            expected = f"counts[{self.rank}] = {counts[self.rank]}"
            raise InvalidArgument(f"x: expected {expected} elements, got {send.count}")
        return counts

    def _counts_of_all(
        self, name: str, whole: str, options: Options, buffer: Buffer, mine: tuple[int, int, int]
    ) -> tuple[int, ...]:
        """The counts of all ranks, for a call without ``counts``; all ranks raise if an array of one does not fit.

        ``mine`` has this rank's count, the elements of ``whole`` (-1: it has none), and what ``output_offset`` returns.
        """
        counts, totals, places = self._numbers_of_all(name, "counts", options, buffer, mine)
        check_totals(whole, totals, [sum(counts)] * self.size)
        check_offsets(places, counts)
        return counts

    def _numbers_of_all(
        self, name: str, what: str, options: Options, buffer: Buffer, mine: Sequence[int]
    ) -> list[tuple[int, ...]]:
        """The numbers of every rank, for a call without ``what``.  The host waits for them."""
        if self._batch is not None:
            raise InvalidArgument(f"{what}: expected numbers in a batch, got None")
        if buffer.device is not None and streams.capture_of(buffer.stream):
            raise InvalidArgument(f"{what}: expected numbers while a CUDA graph is captured, got None")
        rows = self._all_gather_numbers(mine, f"{name} with {what}=None", options.timeout)
        return list(zip(*rows, strict=True))

    @_operation
    def barrier(self, *, stream: Any = None, async_op: bool = False, timeout: float | None = None) -> Any:
        """Return once every rank has called it.

        With a GPU ``stream`` the host does not wait: work queued on that stream from now on runs after the work that
        every rank has queued on its own stream so far.

            comm.barrier()
        """
        if stream is not None:
            self._handle(stream)
        on_host = self.device is not None and stream is None and async_op is False and self._batch is None
        options = self._options("barrier", on_host or async_op, timeout, AUTO, False, stream is not None)
        work = self._prepare(Operation("barrier", self.rank, options), None, stream)
        return self._start_work(work).synchronize() if on_host else work

    def _handle(self, stream: Any) -> int:
        """The handle of a stream that is passed without an array."""
        if self.device is None:
            raise InvalidArgument(f"stream: expected None, as no GPU is used here, got {stream!r}")
        return streams.handle(stream)

    # Messages.

    @_operation
    def send(self, x: Any, dst: int, tag: int = 0, *, stream: Any = None, async_op: bool = False,
             timeout: float | None = None) -> Any:
        """Send ``x`` to rank ``dst``, another rank, which calls ``recv`` with the same ``tag``.

        The program may change ``x`` once the call (or its Work) is done, or has failed.  Messages between two ranks
        with the same tag arrive in order.  ``tag`` is from 0 to 1,048,575, and 0 on a GPU.  In host memory, the call
        may return before the message is received.  A message that is not received within the timeout breaks the
        communicator.

        A message to ``kos.NOBODY`` is not sent.

            comm.send(activations, dst=comm.rank + 1)
        """
        options = self._options("send", async_op, timeout)
        message = Message(dst=check_peer("dst", dst, self.rank, self.size), tag=check_tag(tag))
        return self._prepare(Operation("send", self.rank, options, _input(x, stream), message=message))

    @_operation
    def recv(self, x: Any, src: int | None = None, tag: int = 0, *, stream: Any = None, async_op: bool = False,
             timeout: float | None = None) -> Any:
        """Receive a message of rank ``src``, another rank, with ``tag`` into ``x``; returns ``x``.

        ``x`` must have the dtype and number of elements of the array that was sent; otherwise both ranks raise
        CollectiveMismatch.  With ``src=None``, receives the next message with ``tag`` from any rank, and returns ``(x,
        src)`` with the rank that sent it.  With ``tag=kos.ANY``, receives the next message of any tag, and returns
        ``(x, src, tag)``.  Receives that could take the same message match in the order in which they were called.
        Only backends for host memory receive from any rank or of any tag; others raise BackendUnavailable.  A receive
        from any rank raises RankLost when a rank is lost, or when all others have closed the communicator.  With
        ``src=kos.NOBODY``, returns ``x`` as it is.

            comm.recv(activations, src=comm.rank - 1)
            gradients, worker = comm.recv(gradients)
            task, worker, kind = comm.recv(task, tag=kos.ANY)
        """
        options = self._options("recv", async_op, timeout)
        message = Message(src=self._source("recv", src, tag), recv_tag=check_recv_tag(tag))
        recv = as_buffer(x, "x", writable=True, stream=stream)
        work = self._prepare(Operation("recv", self.rank, options, recv=recv, message=message))
        if src is NOBODY and tag is ANY:
            work.array = work.array, NOBODY, ANY
        return work

    @_operation
    def send_recv(self, x: Any, out: Any, dst: int, src: int, tag: int = 0, *, stream: Any = None,
                  async_op: bool = False, timeout: float | None = None) -> Any:
        """Send ``x`` to rank ``dst`` while receiving ``out`` from rank ``src`` (MPI_Sendrecv); returns ``out``.

        The two messages have the same ``tag`` and match those of ``send`` and ``recv``; ``out`` does not overlap ``x``.
        ``dst`` and ``src`` are other ranks: a message to oneself raises InvalidArgument, also in a group of one rank.
        With ``kos.NOBODY`` on one side, only the other message is sent; ``out`` does not change if ``src`` is NOBODY.

            comm.send_recv(mine, theirs, dst=(comm.rank + 1) % comm.size, src=(comm.rank - 1) % comm.size)
        """
        options = self._options("send_recv", async_op, timeout)
        dst, src = (check_peer(what, rank, self.rank, self.size) for what, rank in (("dst", dst), ("src", src)))
        send, recv = _input(x, stream), as_buffer(out, "out", writable=True, stream=stream)
        expect_place(recv, send)
        refuse_overlap(send, recv)
        message = Message(dst, src, check_tag(tag), tag)
        if (dst is not NOBODY and src is not NOBODY) or dst is src:
            return self._prepare(Operation("send_recv", self.rank, options, send, recv, message=message))
        if dst is NOBODY:
            message = Message(src=src, recv_tag=tag)
            return self._prepare(Operation("recv", self.rank, options, recv=recv, message=message))
        work = self._prepare(Operation("send", self.rank, options, send, message=Message(dst, tag=tag)))
        work.array = recv.array
        return work

    @_operation
    def send_bytes(self, data: bytes | bytearray | memoryview, dst: int, tag: int = 0, *, async_op: bool = False,
                   timeout: float | None = None) -> Any:
        """Send ``data``, bytes of any length, to rank ``dst``, another rank, which calls ``recv_bytes``.

        This is a ``send`` of an array of uint8 with ``tag``, with the same order and the same limits.  ``data`` is
        bytes, a bytearray or a memoryview.  Raises BackendUnavailable on backends for GPUs.

            comm.send_bytes(json.dumps(results).encode(), dst=0)
        """
        self._check_envelopes("send_bytes")
        if not isinstance(data, bytes | bytearray | memoryview):
            raise InvalidArgument(f"data: expected bytes, a bytearray or a memoryview, got {type(data).__name__}")
        contiguous = data if not isinstance(data, memoryview) or data.c_contiguous else bytes(data)
        x, options = np.frombuffer(contiguous, np.uint8), self._options("send", async_op, timeout)
        message = Message(dst=check_peer("dst", dst, self.rank, self.size), tag=check_tag(tag))
        if self.backend.shared is None and self._batch is None:  # one Prepared for messages of any length
            work = self._prepare(Operation("send", self.rank, options, message=message))
            work.send = x
        else:
            send = as_buffer(x, "data", writable=False)
            work = self._prepare(Operation("send", self.rank, options, send, message=message))
        work.held = data
        return work

    @_operation
    def recv_bytes(self, src: int | None = None, tag: int = 0, *, async_op: bool = False,
                   timeout: float | None = None) -> Any:
        """Receive a message of ``send_bytes`` with ``tag``, of any length, from rank ``src``; returns the bytes.

        With ``src=None``, receives from any rank, and returns ``(data, src)``.  With ``tag=kos.ANY``, receives a
        message of any tag, and returns ``(data, src, tag)``.  With ``src=kos.NOBODY``, returns b"".
        It works as ``recv``, and raises the same errors: CollectiveMismatch if the message is an array of another dtype
        than uint8.  It may not be in a batch.

            data, src = comm.recv_bytes()
        """
        options = self._options("recv_bytes", async_op, timeout)
        self._refuse_batch("recv_bytes")
        work = self._prepare(self._awaited("recv_bytes", options, src, tag))
        if src is NOBODY:
            work.array = b"" if tag is not ANY else (b"", NOBODY, ANY)
        return work

    @interruptible
    def probe(self, src: int | None = None, tag: int = 0, *, wait: bool = True,
              timeout: float | None = None) -> Envelope | None:
        """Wait for a message from rank ``src`` (None: any rank) with ``tag`` or ``kos.ANY``, without receiving it.

        Returns its envelope: ``src``, ``dtype``, ``size`` in elements, ``tag``, and ``nbytes``.  The next receive from
        that rank with that tag gets the message.  Receives that were called before and still wait come first.  With
        ``wait=False``, returns None at once if no message has arrived.  Raises as ``recv``, also with
        ``wait=False``: RankLost once ``src`` has ended, or with ``src=None`` once a rank is lost or all have closed the
        communicator.  It may not be in a batch.

            envelope = comm.probe()
            x = comm.recv(np.empty(envelope.size, envelope.dtype), envelope.src)
        """
        if src is NOBODY:
            raise InvalidArgument("src: expected another rank or None for probe, got kos.NOBODY")
        operation = self._awaited("probe", self._options("probe", False, timeout), src, tag)
        self._refuse_batch("probe")
        if check_bool("wait", wait):
            found: Envelope = self._start(operation)
            return found
        self._check_open()
        self.backend.failures.refuse("probe")
        arrived: Envelope | None = self.backend.poll_message(operation.message.src, operation.message.recv_tag)
        return arrived

    @_operation
    def _all_gather_frames(self, frame: bytes, out: Any, purpose: str, timeout: float | None = None) -> Any:
        """Gather the ``frame`` of each rank, which are equally long, in ``out``, for the call ``purpose``."""
        options = self._options("all_gather", False, timeout)._replace(purpose=purpose)
        send, recv = as_buffer(np.frombuffer(frame, np.uint8), "data", False), as_buffer(out, "data", True)
        work = self._prepare(Operation("all_gather", self.rank, options, send, recv))
        work.held = frame
        return work

    def _awaited(self, name: str, options: Options, src: Any, tag: Any) -> Operation:
        """A call that waits for the envelope of a message."""
        self._check_envelopes(name)
        message = Message(src=self._source(name, src, tag), recv_tag=check_recv_tag(tag))
        return Operation(name, self.rank, options, message=message)

    def _source(self, name: str, src: Any, tag: Any) -> int:
        """The source of a message: another rank, or ANY."""
        if tag is ANY and not self.backend.finds_any_tag:
            raise BackendUnavailable(f"{name} of any tag: expected a backend that can, got {self.backend_name}")
        if src is not None:
            return check_peer("src", src, self.rank, self.size)
        self._check_envelopes(f"{name} from any rank")
        if self.size == 1:
            raise InvalidArgument(f"src: expected another rank, got None in a group of one, for {name}")
        return ANY

    def _check_envelopes(self, what: str) -> None:
        if not self.backend.has_envelopes:
            raise BackendUnavailable(f"{what}: expected a backend for host memory, got {self.backend_name}")

    def _refuse_batch(self, name: str) -> None:
        if self._batch is not None:
            raise InvalidArgument(f"{name}: expected a call outside of a batch, got one inside")

    _document(probe)


def _signature(o: Operation, op: Any) -> tuple[Any, ...]:
    """Everything that a call depends on except its memory, by which its Prepared is found."""
    send, recv, first = o.send, o.recv, o.send or o.recv
    ranks: Any = o.message if o.message is not NO_MESSAGE else o.root
    if o.send_counts is not None or o.recv_counts is not None:
        ranks = o.root, o.send_counts, o.recv_counts
    signature: tuple[Any, ...] = o.name, op, ranks, o.options
    if o.residual is not None:
        signature = *signature, o.residual.pointer, "residual"
    if first is None:
        return signature
    signature += _array_key(first) if send is not None else (None, *_array_key(first))
    if send is None or recv is None or recv is send:
        return signature
    if send.stream != recv.stream:
        raise InvalidArgument("out: expected an array of the stream of x, got one of another: pass stream=")
    return *signature, *_array_key(recv), send.address - recv.address if recv.overlaps(send) else None


def _array_key(x: Buffer) -> tuple[Any, ...]:
    """The properties of an array that a call depends on."""
    if x.device is None:
        return x.flat.dtype, x.shape, x.flat.flags.num & _FLAGS
    return x.dtype, x.shape, x.readonly, x.device, windows.place(x.pointer) if windows.memories else x.pointer & 15


_FLAGS = 0x501
"""Flags of an ndarray: C-contiguous, aligned and writeable."""
_COMPARED = frozenset({int, bool, float, str, type(None), ReduceOp})
if native is not None:
    native.factors(PremulSum)
_MOST_DIMENSIONS = 4
"""The dimensions of the arrays that the core reads."""


def _flat(x: Any) -> np.ndarray[Any, Any]:
    """An array in host memory as a 1-D array.  It must be contiguous, or bytes."""
    if type(x) is bytes:
        return np.frombuffer(x, np.uint8)
    return x.reshape(-1) if type(x) is np.ndarray else as_buffer(x, "x", writable=False).flat


def _pointer(x: Any) -> int:
    """The address of an array that the core can read, or of bytes."""
    if type(x) is bytes:
        x = np.frombuffer(x, np.uint8)
    if type(x) is np.ndarray:
        return int(x.__array_interface__["data"][0])
    return x.pointer if type(x) is Array else int(x.data_ptr())


def _is_repeatable(work: Work[Any]) -> bool:
    """Whether later calls of the same key run as ``work``, inside and outside of a graph."""
    prepared = work.prepared
    waits_on_host = prepared.backend.on_gpu and prepared.blocking and not prepared.operation.options.on_stream
    return not (prepared.name == "barrier" and waits_on_host) and (
        prepared.capture_invariant or not streams.is_captured(work.stream)
    )


def _may_be_number(x: Any) -> bool:
    """Whether a program may pass this array as a rank or a tag.  It may pass a torch tensor of one element."""
    return x.shape == () or (type(x) is not np.ndarray and hasattr(type(x), "__index__") and math.prod(x.shape) == 1)


def _objects(arguments: Sequence[Any], stream: Any) -> list[Any] | None:
    """The objects in the key of a call, which the core compares by identity; None if it cannot compare an argument.

    It compares numbers, their lists and factors by value, and arrays by their properties.
    """
    if stream is not None and library_of(stream):  # torch makes a new object for a stream each time
        return None
    objects = list[Any]()
    for each in arguments:
        kind = type(each)
        if kind is bytes:
            continue
        if kind is ndarray or (kind not in _COMPARED and _is_readable(each)):
            if len(each.shape) > _MOST_DIMENSIONS:
                return None
            objects += (each.dtype, each.stream) if kind is Array else (each.dtype if kind is ndarray else kind,)
        elif kind is list or kind is tuple:
            if set(map(type, each)) - {int}:
                return None
        elif kind in _COMPARED or each is stream or kind is PremulSum:
            objects.append(each)
        else:
            return None
    return objects


def _is_readable(x: Any) -> bool:
    """Whether the core can read this array.  It reads arrays of NumPy and kos, and tensors of one type of torch."""
    if type(x) is Array:
        return True
    if library_of(x) != "torch" or type(x) is not sys.modules["torch"].Tensor:
        return False
    return hasattr(type(x), "__dlpack_c_exchange_api__") and bool(native.tensors(type(x)))


def _input(x: Any, stream: Any) -> Buffer:
    return as_buffer(x, "x", writable=False, stream=stream)
