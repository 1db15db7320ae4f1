"""Communicator: a group of ranks, from ``kos.init`` to ``close``."""

from __future__ import annotations

import itertools
import json
import math
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, Literal, NoReturn, overload

import numpy as np

from kos.comm import watchdog
from kos.comm.arguments import check_bool, check_int, check_rank, check_ranks, check_shape, check_timeout, number_in
from kos.comm.backend import SHRINKS, UNMADE, Backend, Probe
from kos.comm.collectives import Operations
from kos.comm.failures import again
from kos.comm.gpu.nccl_options import NCCLOptions, check_nccl
from kos.comm.operation import Call, Operation, Options
from kos.comm.persistent import Batch, Persistent
from kos.comm.recorder import Group, Recorder
from kos.comm.rendezvous.base import Rendezvous
from kos.comm.tracing import trace
from kos.comm.work import ProgressThread, Work, forked_from
from kos.errors import CollectiveError, Interrupted, InvalidArgument, KosError, OutOfMemory, RendezvousError
from kos.memory import Array, as_buffer
from kos.memory.array import Shape, as_dtype


class Communicator(Operations):
    """A group of ranks and the backend that connects them.

    All ranks of the group call the same collectives in the same order.  Arrays are C-contiguous, of any dtype of
    ``kos.dtypes`` and any shape, zero elements included: NumPy arrays, ``kos.memory.Array``, and arrays with DLPack or
    ``__cuda_array_interface__``.  Operations work in place unless ``out`` is given, and return the array that holds
    the result.

    Arrays on a GPU: a backend for GPUs queues an operation and returns.  The operation is ordered with the other work
    on ``stream``: a raw handle, or a stream of ``kos.cuda``, torch or CuPy.  The default is the array's own stream
    (``Array.stream``, torch's or CuPy's current one), else the legacy default stream.  With ``async_op=True`` the
    operation runs on a stream of the communicator, and ``Work.wait()`` makes ``stream`` wait for it.  The host waits in
    ``Work.wait(timeout)``, ``Work.synchronize()``, ``synchronize()``, ``barrier()`` without a stream, and ``close()``.
    Backends for host memory refuse GPU arrays.

    Common keywords: ``async_op=True`` returns a Work at once, whose ``wait()`` returns the result of the call.
    ``timeout`` in seconds replaces the communicator's own.  ``deterministic=True`` adds in rank order, so that results
    are bit-identical from run to run and between backends.  ``algorithm`` names a schedule of ``kos.comm.schedules``
    ("auto" lets the backend choose).  Sums are always bit-identical on all ranks.  16-bit and 8-bit floats accumulate
    in fp32 and round once (except in NCCL's own sums).

    Raises InvalidArgument for wrong arguments, before anything is sent; CollectiveMismatch if ranks made different
    calls; CollectiveTimeout; RankLost.  After a collective has failed the ranks are out of step, and further calls
    raise CollectiveError.
    """

    def __init__(
        self, backend: Backend, rendezvous: Rendezvous, probes: Mapping[str, Probe], timeout: float,
        group: Group | None = None,
    ) -> None:  # fmt: skip
        self.backend, self.backend_name = backend, backend.name
        self.device, self._cache = backend.device, backend.cache
        self.rendezvous = rendezvous
        self.probes = probes
        self._defaults, self._overlapped = Options(timeout), Options(timeout, overlap=True)
        self._collectives, self._messages, self._splits = itertools.count(), itertools.count(), itertools.count()
        self.rank, self.size, self._of_group = rendezvous.rank, rendezvous.size, rendezvous.ledger.of_group
        self.local_rank, self.local_size = rendezvous.local_rank, rendezvous.local_size
        self._batch: Batch | None = None
        self._persistents: weakref.WeakSet[Persistent[Any]] = weakref.WeakSet()
        self._groups: weakref.WeakSet[Communicator] = weakref.WeakSet()  # split from this one
        self._closed, self._why_closed = False, " is closed"
        self._progress: ProgressThread | None = None
        ranks = list(range(self.size))
        self._group = group or Group(
            Recorder(self.rank, self.size, rendezvous.job), "world", ranks, self.rank, backend.name
        )
        self.recorder = self._group.recorder  # shared with the communicators split from this one
        self.name = self._group.name
        trace(backend, self.recorder)
        _communicators.add(self)

    def __repr__(self) -> str:
        return f"<Communicator {self.name}: rank {self.rank} of {self.size} on {self.backend_name}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{self!r} cannot be copied or pickled: each process makes its own by kos.init")

    @property
    def world_ranks(self) -> list[int]:
        """The world rank of each rank; the world is the communicator that ``kos.init`` returned."""
        return list(self._group.ranks)

    @property
    def timeout(self) -> float:
        """The default timeout of every wait, in seconds.

        It may be set, to the same value on all ranks; groups split from this one afterwards inherit it.
        """
        assert self._defaults.timeout is not None
        return self._defaults.timeout

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        seconds = self.rendezvous.timeout = self.backend.timeout = check_timeout(seconds)
        self._defaults, self._overlapped = Options(seconds), Options(seconds, overlap=True)
        self._cache.clear()

    def all_gather_bytes(self, data: bytes, *, timeout: float | None = None) -> list[bytes]:
        """All ranks' ``data``, of any lengths, in rank order.  Collective; for small control data.

        ``timeout`` in seconds replaces the communicator's own.  Raises InvalidArgument in a batch and for other types
        than bytes, bytearray and memoryview; CollectiveMismatch, CollectiveTimeout, RankLost.

            names = comm.all_gather_bytes(socket.gethostname().encode())
        """
        parts = self._bytes("all_gather_bytes", "all_gather_v", data, None, timeout)
        assert parts is not None
        return parts

    def gather_bytes(self, data: bytes, root: int = 0, *, timeout: float | None = None) -> list[bytes] | None:
        """All ranks' ``data``, of any lengths, in rank order on rank ``root``; None elsewhere.

        Takes the ``timeout`` and raises the errors of ``all_gather_bytes``.

            names = comm.gather_bytes(socket.gethostname().encode())
        """
        return self._bytes("gather_bytes", "gather_v", data, check_rank("root", root, self.size), timeout)

    def broadcast_bytes(self, data: bytes | None, root: int = 0, *, timeout: float | None = None) -> bytes:
        """The ``data`` of rank ``root``, of any length, on every rank.  The other ranks pass None.

        Takes the ``timeout`` and raises the errors of ``all_gather_bytes``.

            settings = json.loads(comm.broadcast_bytes(file.read_bytes() if comm.rank == 0 else None))
        """
        sends = self._is_root("data", data, root := check_rank("root", root, self.size))
        parts = self._bytes("broadcast_bytes", "broadcast", data if sends else b"", root, timeout)
        assert parts is not None
        return parts[root]

    def _bytes(
        self, name: str, operation: str, data: Any, root: int | None, timeout: float | None
    ) -> list[bytes] | None:
        """The bytes of every rank; None on a rank that gets none.  Lengths travel first."""
        if self._batch is not None:
            raise InvalidArgument(f"{name}: expected a call outside of a batch, got one inside")
        if not isinstance(data, bytes | bytearray | memoryview):
            raise InvalidArgument(f"data: expected bytes, got {type(data).__name__}")
        data = bytes(data)
        purpose = name if root is None else f"{name} with root {root}{self._of_group}"
        if not self.backend.carries_host:
            with self._exchange(purpose, timeout):
                parts = self.rendezvous.allgather(data)
            return None if operation == "gather_v" and self.rank != root else parts
        counts = [row[0] for row in self._all_gather_numbers([len(data)], purpose, timeout, 5)]
        gets = operation != "gather_v" or self.rank == root
        out = np.empty(sum(counts) if gets else 0, np.uint8)
        send, recv = as_buffer(np.frombuffer(data, np.uint8), "data", False), as_buffer(out, "data", True)
        if operation == "broadcast":
            send = send if self.rank == root else recv
        options = replace(self._options(operation, None, False, timeout), purpose=name)
        recv_counts = None if operation == "broadcast" else counts
        call = Operation(
            operation, self.rank, options, send, recv if gets else None, root=root, recv_counts=recv_counts
        )
        self._submit(call, 4)
        ends = itertools.accumulate(counts)
        return [out[end - count : end].tobytes() for count, end in zip(counts, ends, strict=True)] if gets else None

    def _all_gather_numbers(
        self, numbers: Sequence[int], purpose: str, timeout: float | None, depth: int
    ) -> list[list[int]]:
        if not self.backend.carries_host:
            with self._exchange(purpose, timeout):
                return [json.loads(row) for row in self.rendezvous.allgather(json.dumps(numbers).encode())]
        mine, everyone = np.array(numbers, np.int64), np.empty((self.size, len(numbers)), np.int64)
        send, recv = as_buffer(mine, "counts", False), as_buffer(everyone, "counts", True)
        options = replace(self._options("all_gather", None, False, timeout), purpose=purpose)
        self._submit(Operation("all_gather", self.rank, options, send, recv), depth)
        rows: list[list[int]] = everyone.tolist()
        return rows

    def batch(self, *, async_op: bool = False) -> Batch:
        """Check the operations called in ``with comm.batch() as batch:`` at once and launch them together.

        They start when the block ends, which waits for them unless ``async_op``; if the block raises, none starts.  An
        operation may not use memory that another one writes: InvalidArgument is raised when the block ends.

            with comm.batch():
                comm.send(mine, dst=right)
                comm.recv(theirs, src=left)
        """
        return Batch(self, check_bool("async_op", async_op))

    # Groups.

    @overload
    def split(self, color: Literal["host"], key: int = ..., *, nccl: NCCLOptions | None = ...) -> Communicator: ...
    @overload
    def split(self, color: int | None, key: int = ..., *, nccl: NCCLOptions | None = ...) -> Communicator | None: ...
    def split(
        self, color: int | Literal["host"] | None, key: int = 0, *, nccl: NCCLOptions | None = None
    ) -> Communicator | None:
        """The communicator of the ranks that passed the same ``color``, ranked by (key, rank).

        Collective.  ``color`` is from 0 to 2,147,483,647, ``key`` any C int.  A rank with color None participates and
        gets None.  On all ranks ``color`` may be "host": a communicator for each host.  ``nccl`` are options of NCCL
        for the new communicators, the same on all ranks; others are inherited.  Waits for the operations in flight.
        Raises InvalidArgument, CollectiveMismatch, CollectiveTimeout, RankLost.

            pair = comm.split(comm.rank // 2)
        """
        largest = (1 << 31) - 1  # a C int, for MPI
        key = number_in("key", key, -largest - 1, largest)
        if isinstance(color, str) and color == "host":
            host = self.node[0]
            return self._split(host, key, f"host{host}", "each host", nccl)
        color = None if color is None else number_in("color", color, 0, largest, ' or None or "host"')
        return self._split(color, key, str(color), nccl=nccl)

    def group(self, ranks: Sequence[int], *, nccl: NCCLOptions | None = None) -> Communicator | None:
        """The communicator of these ranks, in this order; other ranks get None.

        Collective: all ranks of this communicator call it, with the same ``ranks`` and ``nccl``, as in ``split``.
        Raises InvalidArgument unless ``ranks`` are different ranks of this communicator, and the errors of ``split``.

            evens = comm.group(range(0, comm.size, 2))
        """
        members = check_ranks("ranks", ranks, self.size)
        color, key = (0, members.index(self.rank)) if self.rank in members else (None, 0)
        return self._split(color, key, "group", f"group {members}", nccl)

    def grid(self, shape: Sequence[int], *, nccl: NCCLOptions | None = None) -> tuple[Communicator, ...]:
        """A communicator for each axis of a grid of all ranks, whose last axis varies fastest.

        ``shape`` are the sizes of the axes, with a product of ``size``.  The communicator of axis ``a`` holds the ranks
        whose coordinates differ from this rank's along ``a`` alone; its ``rank`` is this rank's coordinate.
        Collective, with the same ``shape`` and ``nccl`` on all ranks, as in ``split``.  Raises InvalidArgument if the
        product is not ``size``, and the errors of ``split``.

            column, row = comm.grid((2, 4))            # column.size == 2, row.size == 4
        """
        sizes = check_shape(shape)
        if math.prod(sizes) != self.size:
            raise InvalidArgument(f"shape: expected a product of {self.size}, the number of ranks, got {sizes}")
        place, axes = np.unravel_index(self.rank, sizes), []
        for axis in range(len(sizes)):
            first = np.ravel_multi_index([0 if a == axis else at for a, at in enumerate(place)], sizes)
            group = self._split(int(first), self.rank, f"axis{axis}-{first}", f"grid {sizes}", nccl)
            assert group is not None
            axes.append(group)
        return tuple(axes)

    @property
    def node(self) -> list[int]:
        """The ranks of this communicator on this rank's host, ascending."""
        return self.rendezvous.local_ranks

    def duplicate(self) -> Communicator:
        """Another communicator over the same ranks, whose operations never match this one's.  Collective.

        A library uses a duplicate for its own operations.  Raises CollectiveMismatch, CollectiveTimeout, RankLost.

            mine = comm.duplicate()
        """
        duplicate = self._split(0, self.rank, "duplicate", call="duplicate")
        assert duplicate is not None
        return duplicate

    def _split(
        self, color: int | None, key: int, label: str, purpose: str = "", nccl: NCCLOptions | None = None,
        call: str = "split",
    ) -> Communicator | None:  # fmt: skip
        """``purpose``, which errors name after the call, must be equal on all ranks, as the options of NCCL must."""
        options = self._nccl_options(nccl)
        if nccl is not None:
            purpose = ", ".join(filter(None, (purpose, f"nccl {options}")))
        self._check_open()
        self.synchronize()
        operation = Operation(call, self.rank, replace(self._defaults, purpose=purpose))
        self._agree(operation, f"{call} for {purpose}" if purpose else call, 4)
        name = f"{self.name}.{next(self._splits)}"  # the same on all ranks
        with self._exchange(call):
            rendezvous = self.rendezvous.split(color, key)
            if rendezvous is not None:
                rendezvous.nccl = options
            group = self._descendant(f"{name}:{label}", rendezvous, color, key)
            if group is not None:
                self._groups.add(group)
            return group

    def _nccl_options(self, given: NCCLOptions | None) -> dict[str, Any]:
        """Those of this communicator, replaced by those given."""
        options = check_nccl(given)
        if options and "nccl" not in self.backend_name.split("+"):
            raise InvalidArgument(f"nccl: expected None without the backend nccl, got {options} on {self.backend_name}")
        return {**self.rendezvous.nccl, **options}

    def _agree(self, control: Operation, call: str, depth: int) -> None:
        """Compare a control-plane call, made ``depth`` frames up, with the other ranks' calls."""
        if self.backend.carries_host:
            numbered = Call(control, self.name, of_group=self._of_group)
            self.backend.prepare(numbered)
            try:
                numbered.sequence = next(self._collectives)
                self._group.note(numbered, depth)
                work = self.backend.start(numbered)
            except BaseException as error:
                self._fail_if_interrupted(error, numbered)
                raise
            if work is not None:
                work.wait()
        else:
            with self._exchange(call):
                self.rendezvous.barrier()

    def shrink(self) -> Communicator:
        """The communicator of the surviving ranks, in their order, after some were lost; all survivors call it.

        This communicator and the groups split from it are aborted.  Ranks that still wait in one of their operations
        raise RankLost.  Split the result to have the groups again.  MPI requires
        ``mpirun --with-ft ulfm``.  Raises BackendUnavailable where the loss of a rank ends the group, RendezvousError
        if a survivor does not call it within the timeout.  On tcp an unreachable rank counts as lost: if a network
        partitions, both groups continue.

            try:
                comm.all_reduce(x)
            except RankLost:
                comm = comm.shrink()
        """
        self._check_open()
        self.rendezvous.check_shrink()
        with self.rendezvous.ledger.board.held():
            reason = str(self.backend.broken or SHRINKS)
            self._signal_end(reason)
            self._abort_groups(reason)
            self._end(reason)
            with self._exchange("shrink"):
                rendezvous = self.rendezvous.shrink()
                rendezvous.nccl = self.rendezvous.nccl
                # The name has no number: a split in which a rank was lost has advanced the count on some ranks only.
                group = self._descendant(f"{self.name}:shrunk", rendezvous, 0, rendezvous.rank)
                assert group is not None
                return group

    @contextmanager
    def _exchange(self, call: str, timeout: float | None = None) -> Iterator[None]:
        """A context whose rendezvous exchanges belong to ``call``; their errors break this communicator."""
        rendezvous = self.rendezvous
        usual = rendezvous.call, rendezvous.timeout
        rendezvous.call, rendezvous.timeout = call, usual[1] if timeout is None else check_timeout(timeout)
        rendezvous.usual = usual[1]
        try:
            with self.backend.engine.paused():
                yield
        except (CollectiveError, RendezvousError) as error:
            rendezvous.ledger.board.post_failure(error)
            text = f"{self.name}: {error}"
            if rendezvous.failure is not None and self.backend.broken is None:
                self.backend.broken = again(error, text)
            raise again(error, text) from error  # not by a name, which would hold this frame
        finally:
            rendezvous.call, rendezvous.timeout = usual
            rendezvous.usual = None

    def _descendant(
        self, name: str, rendezvous: Rendezvous | None, color: int | None, key: int
    ) -> Communicator | None:
        """The communicator of the group of ``rendezvous``; an error frees what was made of it.  Called on every rank.

        Returns None if ``rendezvous`` is None.
        """
        if rendezvous is None:
            self.backend.split(None, color, key)
            return None
        with ExitStack() as undo:
            undo.callback(rendezvous.abort, None)
            with rendezvous.reporting():
                backend = self.backend.split(rendezvous, color, key)
            assert backend is not None
            undo.callback(backend.abort, UNMADE)
            group = Group(self.recorder, name, rendezvous.ledger.world, rendezvous.rank, backend.name)
            made = Communicator(backend, rendezvous, self.probes, self.timeout, group)
            undo.pop_all()
        return made

    def synchronize(
        self, timeout: float | None = None, stream: Any = None, *, until: Callable[[], bool] | None = None
    ) -> None:
        """Wait on the host for all operations of this communicator, at most ``timeout`` seconds for each.

        Raises the error of a failed operation, unless it was raised before; raises the first failure of the
        communicator each time.  Failures on a GPU are raised here, in the waits of a Work, and in the next call.
        ``stream``: wait for all work on that stream instead, including replays of captured graphs.  ``until``: wait
        until that function, such as an event's ``done``, returns True.

            comm.all_reduce(x, async_op=True)
            comm.synchronize()
        """
        limit = self.timeout if timeout is None else check_timeout(timeout)
        handle = None if stream is None else self._handle(stream)
        self.backend.raise_failure("synchronize")
        if until is not None:
            if self.device is None or not callable(until):
                raise InvalidArgument(f"until: expected None, or a function where GPUs are used, got {until!r}")
            return self.backend.synchronize(limit, handle, until)
        for work in self.backend.engine.works_of(self.backend):
            work.wait(timeout)
        self.backend.synchronize(limit, handle)
        for persistent in self._persistents:
            persistent._work = None

    def allocate(self, shape: Shape, dtype: Any) -> Any:
        """An uninitialised array in the memory that the backend moves fastest.  Collective; ranks pass the same size.

        ``shape`` is in elements of ``dtype``: of NumPy, of torch, or a name such as "bfloat16".
        With nccl it lies in a symmetric window on this rank's GPU.  With host memory it is an ndarray, in memory that
        the ranks share if they are on one host.  ``views`` gives the parts of the other ranks.  Raises InvalidArgument
        for a wrong shape or dtype; CollectiveMismatch if the ranks pass different ones; OutOfMemory, CollectiveTimeout,
        RankLost.

            gradients = comm.allocate((1024, 1024), "bfloat16")
        """
        self._check_open()
        shape, kind = check_shape(shape), as_dtype(dtype)
        call = f"allocate of {kind.name}{list(shape)}"
        self._agree(Operation("barrier", self.rank, replace(self._defaults, purpose=call)), call, 3)
        if self.device is not None:
            return self.backend.allocate(shape, kind.numpy)
        with self._exchange(call):
            try:
                return self.backend.allocate(shape, kind.numpy)
            except MemoryError as error:
                raise OutOfMemory(f"{call}: {error}") from error

    def views(self, x: Any) -> list[Any]:
        """Every rank's memory at the place of ``x``, an array of ``allocate`` or ``register``, or a part of one.

        Element r of the list has the shape and dtype of ``x`` and lies in the memory of rank r.  To write it is a put,
        to read it a get.  Nothing is sent, and no other rank takes part: a ``barrier`` between the writes of one rank
        and the accesses of another orders them, on a GPU ``barrier(stream=)``.  The views are ndarrays, or
        ``kos.memory.Array`` on the stream of ``x``, also if ``x`` is of another library, such as a tensor of torch.  On
        a GPU they are invalid after ``close``.

        Raises InvalidArgument for other arrays, BackendUnavailable on ``nccl`` and between hosts.

            x = comm.allocate(4, np.float32)
            comm.views(x)[(comm.rank + 1) % comm.size][:] = comm.rank
            comm.barrier()                               # x holds the number of the rank before
        """
        self._check_open()
        return self.backend.views(as_buffer(x, "x", writable=False))

    def register(self, x: Any) -> Array:
        """Let the backend move the memory of ``x`` where it lies, as that of ``allocate``.  Collective.

        ``x`` is an array on this rank's GPU that the program has allocated, of the same number of bytes on all ranks.
        Returns a ``kos.memory.Array`` of that memory: the registration lasts as long as that array does, and until the
        last captured graph that uses it is destroyed; the array keeps ``x`` alive.  Calls on either are as fast.
        nccl requires memory of ncclMemAlloc or cuMemCreate, peer memory of cudaMalloc.  Waits for the operations in
        flight.  Raises InvalidArgument, on all ranks, for other memory, such as expandable segments of torch, and on
        backends for host memory; PeerMemoryError where CUDA's IPC cannot map it.

            buffer = comm.register(gradients)
        """
        self._check_open()
        buffer = as_buffer(x, "x", True)
        if self.device is not None:
            if buffer.device != self.device:
                raise InvalidArgument(f"x: expected memory of cuda:{self.device}, got memory of {buffer.place}")
            self.synchronize()
            self._cache.clear()
            call = f"register of {buffer.nbytes} bytes"
            self._agree(Operation("barrier", self.rank, replace(self._defaults, purpose=call)), call, 3)
        return self.backend.register(buffer)

    def on_failure(self, callback: Callable[[KosError], None]) -> None:
        """Call ``callback(error)`` once when this communicator has failed, at once if it has failed already.

        The watchdog's thread calls it within half a second, whatever the program does meanwhile.  On GPUs the
        operations in flight have been aborted by then, and their results are undefined.  In host memory the next call
        or wait ends them.  A rank is lost when its process ends, unless it has closed the communicator before.  On
        ``mpi`` the loss of a rank of another host is reported only after the next call.  ``callback`` must return
        soon, and of this communicator it may use only ``abort``.  Raises InvalidArgument if ``callback`` is not
        callable.

            comm.on_failure(lambda error: print(f"lost: {error.ranks}"))
        """
        if not callable(callback):
            raise InvalidArgument(f"callback: expected a function of the error, got {callback!r}")
        watchdog.on_failure(self.backend, callback)

    def explain(self) -> str:
        """A table of the backends, with the reason where one is unusable, and a table of routes by operation.

        Describes this rank.  Not collective; raises nothing.

            print(comm.explain())
        """
        rows: list[tuple[str, ...]] = [("backend", "usable", "why")]
        for name, probe in self.probes.items():
            chosen = "in use" if name in self.backend_name.split("+") else "yes" if probe.usable else "no"
            rows.append((name, chosen, probe.reason))
        return "\n".join([*_columns([*rows, *self.backend.details()]), *_columns(self.backend.routes())])

    def close(self) -> None:
        """Wait for the operations in flight and free all resources.  Collective; a second call does nothing.

        Raises the error of an operation in flight.  A communicator that has failed is aborted instead.

            with kos.init() as comm:                     # closes it, or aborts it after an exception
                comm.barrier()
        """
        if self._closed:
            return
        if self.backend.broken is not None:
            self._end(str(self.backend.broken))  # ranks out of step cannot close together
            self.rendezvous.abort(None)
            return
        self.recorder.close(self._group)
        self._cache.clear()
        self.synchronize()
        self._closed, self.rendezvous.call = True, "close"
        self._end_thread()
        try:
            with self.backend.engine.paused():
                self.backend.close()
        finally:
            self.rendezvous.close()

    def abort(self, code: int = 1, reason: str = "it aborted the communicator") -> None:
        """End the operations in flight without waiting for other ranks, and close the communicator.

        The groups split from it are aborted, too.  Ranks that wait for this one raise RankLost with the ``reason``, or
        end when this process exits, with ``code`` as the job's exit status (mpi).  Raises InvalidArgument for a
        ``code`` that is no whole number; a second call does nothing.

            comm.abort(reason="the data of this rank are damaged")
        """
        code = check_int("code", code)
        if not self._closed:
            self._signal_end(str(reason))
            self._abort_groups(str(reason))
            self._end(str(reason))
            self.rendezvous.abort(code)

    def _end(self, reason: str) -> None:
        self._closed = True
        self._cache.clear()
        self._end_thread()
        engine = self.backend.engine
        with engine.paused():
            self.backend.abort(reason)  # first: this notifies the other ranks of the reason
            for work in engine.works_of(self.backend):
                work.cancel(CollectiveError(f"{work.call}: the communicator was aborted"))
        self.recorder.close(self._group, f"aborted: {reason}")

    def _signal_end(self, reason: str) -> None:
        """Begin to end this communicator and what was split from it: on a GPU each end waits for all of them."""
        if not self._closed:
            self.backend.signal_end(reason)
        for group in list(self._groups):
            group._signal_end(reason)

    def _abort_groups(self, reason: str) -> None:
        """Abort what was split from this communicator: ranks wait there for this one."""
        for group in list(self._groups):
            group._abort_groups(reason)
            if not group._closed:
                group._end(reason)
                group.rendezvous.abort(None)

    def _end_thread(self) -> None:
        thread, self._progress = self._progress, None
        if thread is not None:
            thread.close()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, kind: object, value: BaseException | None, trace: object) -> None:
        if value is None or (isinstance(value, SystemExit) and not value.code):
            self.close()
        else:
            code = value.code if isinstance(value, SystemExit) else 1
            self.abort(code if isinstance(code, int) else 1, f"{type(value).__name__}: {value}")

    # Launching operations.

    @property
    def _deferred(self) -> bool:
        return self._batch is not None

    def _submit(self, o: Operation, depth: int = 3) -> Any:
        call = Call(o, self.name, of_group=self._of_group)
        self.backend.prepare(call)
        if self._batch is not None:
            return self._batch.add(call)
        if self._closed:
            self._check_open()
        # ``Persistent.start`` and ``CallCache.repeat`` repeat these lines: a function call would take 6% of their time.
        try:
            call.sequence = next(self._collectives if call.collective else self._messages)
            self._group.note(call, depth)  # frames up to the caller of the operation
            work = self.backend.start(call)
        except BaseException as error:
            self._fail_if_interrupted(error, call)
            raise
        options, recv = o.options, o.recv
        if work is not None and options.overlap:
            return work
        result = work.wait() if work is not None else recv.result if recv is not None else None
        if options is self._defaults and (work is None or self.device is None):
            self._cache.add(call)
        return result

    def _launch_all(self, calls: list[Call], overlap: bool) -> list[Work[Any]]:
        """Launch the checked calls of a batch; returns the Work of each."""
        self._check_open()
        try:
            for call in self.backend.in_order(calls):  # in the order of their start: ranks compare sequence numbers
                call.sequence = next(self._collectives if call.collective else self._messages)
                self._group.note(call, 3)
            return self.backend.start_all(calls, overlap) if calls else []
        except BaseException as error:
            self._fail_if_interrupted(error, *calls)
            raise

    def _fail_if_interrupted(self, error: BaseException, *calls: Call) -> None:
        """Break the communicator on all ranks if Ctrl-C or SystemExit interrupted the launch of ``calls``.

        A call that has a number may not have started.  The error is that of the first call.  On GPUs nothing is done:
        the other ranks raise at their timeout.
        """
        interrupted = isinstance(error, KeyboardInterrupt | SystemExit) and self.device is None
        if not interrupted or self.backend.broken is not None:
            return
        call = next((call for call in calls if call.collective), calls[0])
        launched = sum(each.collective for each in calls) or len(calls)
        call.sequence = max(next(self._collectives if call.collective else self._messages) - launched, 0)
        with self.backend.engine.lock:
            self.backend.failed(call, Interrupted(f"{call}: interrupted by {type(error).__name__}"))

    def _check_open(self) -> None:
        if self._closed:
            raise CollectiveError(f"{self!r}{self._why_closed}")


def _columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


_communicators: weakref.WeakSet[Communicator] = weakref.WeakSet()


def _forked() -> None:
    """A forked process is not a rank: it reports nothing on behalf of the rank, and ends none of its operations."""
    for comm in _communicators:
        comm.backend.engine.disown()
        if not comm._closed:
            comm._closed, comm._why_closed = True, f": {forked_from(comm.rank)}"


os.register_at_fork(after_in_child=_forked)
