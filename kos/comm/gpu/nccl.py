"""The nccl backend: GPU memory by NCCL, through its raw binding on addresses that are resolved beforehand.

What only moves travels as bytes, so any dtype does.  NCCL adds where that gives what every other backend gives:
float32 and float64, integers, complex numbers by parts.  It adds 16-bit floats too, fast, but rounds to 16 bits
at each rank on the way; ``deterministic=True`` adds them in fp32 and in rank order.  That and all that NCCL
lacks (8-bit floats, int16, bit operations, minima that keep NaN) is done by a kernel of ours between two
exchanges (``nccl_ordered``).  ``algorithm`` runs a schedule over NCCL's send and receive (``nccl_schedule``).
Results are bit-identical on all ranks in each case.

The ranks join NCCL's communicator on a thread, which takes seconds: the first call that needs it waits for that,
within the timeout, and raises what went wrong.
"""

from __future__ import annotations

import json
import logging
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from math import prod
from typing import Any

from kos.comm import watchdog
from kos.comm.backend import Backend, Probe
from kos.comm.gpu import nccl_binding as binding
from kos.comm.gpu.backend import DeviceBackend, Launch, Scratch, device_of, is_captured
from kos.comm.gpu.nccl_binding import AVG, BYTE, CODE_OF, MAX, MIN, PROD, SUM
from kos.comm.gpu.nccl_schedule import Message, ScheduledCollective
from kos.comm.gpu.ordered_sum import OrderedReduction, Piece, kernel_types
from kos.comm.operation import AUTO, Call, Operation, Route
from kos.comm.reduction import ReduceOp, Reduction
from kos.comm.rendezvous.base import Rendezvous
from kos.cuda import driver
from kos.cuda.graphs import relaxed_capture
from kos.dtypes import DTYPES, DType
from kos.errors import BackendUnavailable, CollectiveTimeout, CudaError, KosError
from kos.memory.array import Array, Shape, as_dtype
from kos.memory.windows import InWindows, Window, WindowMemory, in_windows

log = logging.getLogger(__name__)

_Kind = tuple[str, int, str]

_ABORT_SECONDS = 20.0
_SCRATCH_BYTES = 1 << 20  # the least that is allocated

_OPS = {
    ReduceOp.SUM: SUM, ReduceOp.PROD: PROD, ReduceOp.AVG: AVG, ReduceOp.PREMUL_SUM: -1,
    ReduceOp.MIN: MIN, ReduceOp.MAX: MAX,
}  # fmt: skip
_NARROW = (DTYPES["float16"], DTYPES["bfloat16"])
_BYTES = {ReduceOp.MIN: MIN, ReduceOp.BAND: MIN, ReduceOp.MAX: MAX, ReduceOp.BOR: MAX}


class NCCLBackend(DeviceBackend):
    """Carries a group whose ranks have a GPU each."""

    name = "nccl"
    marks = 16

    def __init__(
        self, rendezvous: Rendezvous, device: int | None = None, comm: Any = None, host: Backend | None = None
    ) -> None:
        super().__init__(rendezvous, device, host)
        self._rendezvous = rendezvous
        self._nccl = binding.library()
        self._made = comm
        self._joining = self._join(rendezvous) if comm is None else None
        self._revoked: Any = None  # the communicator after a failure
        self._outlives = _outlives_ranks(rendezvous)
        self._met: set[_Kind] = set()  # kinds of calls that have connected to the others
        self._met_together: set[tuple[int, frozenset[_Kind]]] = set()  # which batches have: how many, and what
        self._scratch: dict[int, list[Scratch]] = {}  # by stream; the last of each is in use
        self._held: set[int] = set()  # addresses of those that graphs may hold
        self._last_scratch = 0  # the stream that took it
        self._token = Scratch(4, self.device)
        self._windows: dict[int, WindowMemory] = {}  # by the number of the ``allocate`` that made each
        self._allocated = 0  # calls of ``allocate``
        self._dropped: list[int] = []  # windows whose arrays are gone; what is queued, or a graph, may use them still
        self._launchers: dict[str, Callable[[Operation], Launch]] = {
            "all_reduce": self._prepare_all_reduce,
            "reduce": self._prepare_reduce,
            "reduce_scatter": self._prepare_reduce_scatter,
            "reduce_scatter_v": self._prepare_ordered,
            "broadcast": self._prepare_broadcast,
            "all_gather": self._prepare_all_gather,
            "all_gather_v": self._prepare_all_gather_v,
            "all_to_all": self._prepare_all_to_all,
            "all_to_all_v": self._prepare_all_to_all_v,
            "gather": self._prepare_gather,
            "scatter": self._prepare_scatter,
            "barrier": self._prepare_barrier,
            "send": self._prepare_message,
            "recv": self._prepare_message,
            "send_recv": self._prepare_message,
        }
        watchdog.add(self)

    @classmethod
    def probe(cls, rendezvous: Rendezvous) -> Probe:
        try:
            device = device_of(rendezvous)
            about = f"NCCL {binding.version()} on {device.name}"
        except BackendUnavailable as error:
            return Probe(False, str(error).removeprefix("CUDA: "))
        except KosError as error:
            return Probe(False, str(error))
        if rendezvous.threads is not None and rendezvous.size > 1:
            return Probe(False, "the ranks are threads of one process, which share its GPU")
        return Probe(True, about, claim=f"GPU {device.uuid}")

    def _join(self, rendezvous: Rendezvous) -> Callable[[float | None], Any]:
        """Begin to make a communicator of all ranks: NCCL takes seconds, and may not be used so soon, or at all."""
        identities = rendezvous.allgather(binding.unique_id() if self.rank == 0 else b"")
        return self.begin(lambda: binding.join(self.size, identities[0], self.rank, "kos"), "nccl: init")

    @property
    def _comm(self) -> Any:
        """NCCL's communicator, once all ranks have joined it; None after it was ended."""
        joining = self._joining
        if joining is not None:
            comm = self._named(lambda: joining(self.timeout))
            if self._joining is joining:  # else it was ended meanwhile
                self._comm = comm
        return self._made

    @_comm.setter
    def _comm(self, comm: Any) -> None:
        self._made, self._joining = comm, None

    def _bounded(self, function: Callable[[], Any], what: str = "nccl: init") -> Any:
        return self._named(lambda: self.bounded(function, self.timeout, what), what)

    def _named(self, function: Callable[[], Any], what: str = "nccl: init") -> Any:
        try:
            return function()
        except Exception as error:
            named = binding.error_of(error, what)
            if named is None:
                raise
            raise named from error

    def split(
        self, rendezvous: Rendezvous | None, color: int | None = None, key: int = 0, host: Backend | None = None
    ) -> NCCLBackend | None:
        if self._comm is None:  # aborted: the ranks that are left meet anew
            return None if rendezvous is None else NCCLBackend(rendezvous, self.device, None, host)
        comm = self._bounded(lambda: binding.split(self._comm, color, key, "kos"))
        return None if rendezvous is None else NCCLBackend(rendezvous, self.device, comm, host)

    def revoke(self, reason: str) -> None:
        super().abort(reason)

    def shrink(self, rendezvous: Rendezvous, host: Backend | None = None) -> NCCLBackend:
        """By NCCL's own shrink where every rank that is left holds a revoked communicator; else they meet anew."""
        revoked, self._revoked, comm = self._revoked, None, None
        mine = json.dumps([self.rank, revoked is not None])
        left = [json.loads(theirs) for theirs in rendezvous.allgather(mine.encode())]
        excluded = sorted(set(range(self.size)) - {rank for rank, _ in left})
        if excluded and all(able for _, able in left):
            try:
                comm = self._bounded(lambda: binding.shrink(revoked, excluded, "kos"))
            except KosError as error:
                log.warning("rank %d: NCCL did not shrink the group, which meets anew: %s", self.rank, error)
        agreed = b"" not in rendezvous.allgather(b"" if comm is None else b"1")
        if revoked is not None:
            self._end(binding.abort, revoked)
        if comm is not None and not agreed:
            self._end(binding.abort, comm)
        return type(self)(rendezvous, self.device, comm if agreed else None, host)

    def close(self) -> None:
        self.unwatch()
        try:
            comm = self._comm
        except KosError as error:  # no call has needed it
            log.warning("rank %d: %s", self.rank, error)
            comm = None
        with ExitStack() as rest:  # whatever fails of it, the rest is done
            rest.callback(super().close)
            rest.callback(self._free)
            rest.callback(lambda: self._free_windows(self._unused()))
            if comm is not None:
                rest.callback(self._bounded, lambda: binding.destroy(comm), "nccl: close")
            rest.callback(setattr, self, "_comm", None)
            self._free_windows(self._unused())

    def halt(self) -> None:
        """Where ranks can be lost and the others go on, NCCL only revokes: ``shrink`` builds upon that."""
        comm, self._comm = self._made, None
        if comm is None:
            return
        if self._outlives and binding.has("revoke") and self._end(binding.revoke, comm):
            self._revoked = comm
        else:
            self._end(binding.abort, comm)

    def abort(self, reason: str) -> None:
        self.revoke(reason)
        revoked, self._revoked = self._revoked, None
        if revoked is not None:
            self._end(binding.abort, revoked)

    def _end(self, function: Callable[[Any], None], comm: Any) -> bool:
        """Whether ``function`` has ended what ``comm`` has in flight."""
        try:
            self.bounded(lambda: function(comm), _ABORT_SECONDS, f"nccl: {function.__name__}")
        except CollectiveTimeout:
            log.error("rank %d: NCCL did not end its work within %g s", self.rank, _ABORT_SECONDS)
        except Exception as error:
            if not isinstance(self.broken, CudaError):  # of which this follows
                log.warning("rank %d: %s of NCCL: %s", self.rank, function.__name__, error)
        else:
            return True
        return False

    def _free(self) -> None:
        for pieces in self._scratch.values():
            for memory in pieces:
                memory.close()
        self._scratch.clear()
        self._token.close()

    def async_error(self) -> str | None:
        return binding.async_error(self._made) if self._made is not None else None

    def failed(self, call: Call, error: Exception) -> KosError:
        return super().failed(call, binding.error_of(error, str(call)) or error)

    # Memory that NCCL reaches best.

    def allocate(self, shape: Shape, dtype: Any) -> Array:
        """An array in a symmetric window: memory that all ranks map, for NCCL's fastest kernels.  Collective.

        First frees the windows that no rank has arrays of or graphs on, after what is queued.
        """
        shape, dtype = (shape,) if isinstance(shape, int) else tuple(shape), as_dtype(dtype)
        number, self._allocated = self._allocated, self._allocated + 1
        nbytes, comm = max(prod(shape) * dtype.itemsize, 1), self._comm
        unused = [json.loads(theirs) for theirs in self._rendezvous.allgather(json.dumps(self._unused()).encode())]
        if freed := set(unused[0]).intersection(*unused[1:]):
            self.synchronize()
            self._free_windows(freed)
        with driver.on_device(self.device):
            pointer = self._named(lambda: binding.allocate(nbytes), f"nccl: allocate {nbytes:,} bytes")
        window = self._bounded(lambda: binding.register(comm, pointer, nbytes), "nccl: window")
        self._windows[number] = WindowMemory(pointer, nbytes, window)
        return Array(pointer, shape, dtype, self.device, owner=Window(self, pointer, number))

    def release(self, pointer: int, window: int) -> None:
        """The last array of a window is gone: behind a call that has not run, or while a graph is captured."""
        self._dropped.append(window)
        if self._made is None:  # that was ended, with all that it had in flight
            self._free_windows(self._unused())

    def _unused(self) -> list[int]:
        """Windows that have neither arrays nor graphs on this rank."""
        return [number for number in list(self._dropped) if not self._windows[number].in_graphs()]

    def _free_windows(self, numbers: Iterable[int]) -> None:
        """In the order of ``allocate``: NCCL expects one layout of windows on all ranks."""
        self._known.clear()
        with driver.on_device(self.device), relaxed_capture():
            for number in sorted(numbers):
                self._dropped.remove(number)
                memory = self._windows.pop(number)
                memory.forget()
                try:
                    if self._made is not None:
                        self._named(partial(binding.deregister, self._made, memory.handle), "nccl: window")
                finally:
                    binding.free(memory.pointer)

    def scratch(self, nbytes: int, stream: int) -> int:
        """Address of memory that operations on ``stream`` use one after another.

        Outgrown pieces stay until ``trim``.  They double, so they add up to no more than the last.
        """
        pieces = self._scratch.setdefault(stream, [])
        if not pieces or pieces[-1].nbytes < nbytes:
            size = max(nbytes, _SCRATCH_BYTES, 2 * pieces[-1].nbytes if pieces else 0)
            pieces.append(Scratch(size, self.device))
        if is_captured(stream):
            self._held.add(pieces[-1].pointer)
        self._last_scratch = stream
        return pieces[-1].pointer

    def trim(self) -> None:
        """Free scratch memory, but what graphs may hold and what the next operation on the same stream takes."""
        for stream, pieces in list(self._scratch.items()):
            kept = [piece for piece in pieces if piece.pointer in self._held]
            if stream == self._last_scratch and pieces[-1] not in kept:
                kept.append(pieces[-1])
            for piece in pieces:
                if piece not in kept:
                    piece.close()
            if kept:
                self._scratch[stream] = kept
            else:
                del self._scratch[stream]

    # How operations are carried: each function returns the launch of one operation.

    def resolve(self, o: Operation, route: Route) -> bool:
        named = o.options.algorithm != AUTO
        launch = ScheduledCollective(self, o) if named else self._launchers[o.name](o)
        buffer, message = o.send or o.recv, o.message
        # NCCL connects ranks when a kind of call first needs it: by size, for that decides how it goes, and by peer.
        how = f"{type(launch).__name__} {o.options.algorithm} {o.root} {message.dst} {message.src}"
        launch = in_windows(launch, [end.pointer for end in (o.send, o.recv) if end is not None])
        kind = o.name, buffer.nbytes.bit_length() if buffer else 0, how
        connected = kind in self._met
        route.launch = launch if connected else _First(self, o, route, launch, kind)
        return connected

    def queue(self, calls: Sequence[Call], stream: int | None) -> None:
        """What NCCL does alone goes as one group; what our kernels take part in follows, one by one."""
        if len(calls) == 1:
            super().queue(calls, stream)
            return
        alone = [c for c in calls if isinstance(_innermost(c.route), OrderedReduction | ScheduledCollective)]
        together = [c for c in calls if c not in alone]

        def launch() -> None:
            self._nccl.group_start()
            try:
                for c in together:
                    _bare(c.route)(c.stream if stream is None else stream)
            finally:
                self._nccl.group_end()

        if len(together) > 1:
            launches = (c.route.launch for c in together if c.route is not None)
            kinds = frozenset(launch.kind for launch in launches if isinstance(launch, _First))
            if kinds and (len(together), kinds) not in self._met_together:
                self.bounded(launch, together[0].operation.options.timeout, str(together[0]))
                self._met_together.add((len(together), kinds))
            else:
                launch()
        else:
            alone = list(calls)
        super().queue(alone, stream)

    def _native(self, o: Operation) -> tuple[int, int, int] | None:
        """NCCL's dtype, NCCL's op (-1: made at the call) and elements per element; None for our own kernel."""
        assert o.reduction is not None and o.send is not None
        key = o.reduction.op, o.reduction.dtype
        if key not in _NATIVE:
            _NATIVE[key] = _native(*key)
        native = _NATIVE[key]
        if o.options.deterministic and o.reduction.dtype.kind in ("float", "complex"):
            native = None
        return native

    def _prepare_ordered(self, o: Operation) -> Launch:
        assert o.reduction is not None and o.send is not None
        kernel_types(o.reduction, self.device)  # refused here, before anything is sent
        return OrderedReduction(self, o) if o.send.count else _nothing

    def _reducing(self, o: Operation, function: Callable[..., None], recv: int, count: int, *root: int) -> Launch:
        native = self._native(o)
        if native is None:
            return self._prepare_ordered(o)
        assert o.send is not None and o.reduction is not None
        if count == 0:
            return _nothing
        code, op, per = native
        if op < 0:
            return partial(self._premultiplied, function, o.send.pointer, recv, count * per, o.reduction, root)
        return partial(function, o.send.pointer, recv, count * per, code, op, *root, self._comm)

    def _premultiplied(
        self, function: Callable[..., None], send: int, recv: int, count: int, reduction: Reduction,
        root: tuple[int, ...], stream: int,
    ) -> None:  # fmt: skip
        dtype = _part_of(reduction.dtype)
        op = binding.premultiplied_sum(self._comm, reduction.factor, dtype)
        try:
            function(send, recv, count, CODE_OF[dtype], op, *root, self._comm, stream)
        finally:
            self._nccl.red_op_destroy(op, self._comm)

    def _prepare_all_reduce(self, o: Operation) -> Launch:
        assert o.send is not None and o.recv is not None
        return self._reducing(o, self._nccl.all_reduce, o.recv.pointer, o.send.count)

    def _prepare_reduce(self, o: Operation) -> Launch:
        assert o.send is not None and o.root is not None
        recv = o.recv.pointer if o.recv is not None else 0
        return self._reducing(o, self._nccl.reduce, recv, o.send.count, o.root)

    def _prepare_reduce_scatter(self, o: Operation) -> Launch:
        assert o.recv is not None
        return self._reducing(o, self._nccl.reduce_scatter, o.recv.pointer, o.recv.count)

    def _prepare_broadcast(self, o: Operation) -> Launch:
        assert o.send is not None and o.recv is not None
        if o.recv.count == 0:
            return _nothing
        ends = o.send.pointer, o.recv.pointer, o.recv.nbytes
        return partial(self._nccl.broadcast, *ends, BYTE, o.root, self._comm)

    def _prepare_all_gather(self, o: Operation) -> Launch:
        assert o.send is not None and o.recv is not None
        if o.send.count == 0:
            return _nothing
        return partial(self._nccl.all_gather, o.send.pointer, o.recv.pointer, o.send.nbytes, BYTE, self._comm)

    def _prepare_all_to_all(self, o: Operation) -> Launch:
        assert o.send is not None and o.recv is not None
        if o.send.count == 0:
            return _nothing
        part = o.send.nbytes // self.size
        return partial(self._nccl.allto_all, o.send.pointer, o.recv.pointer, part, BYTE, self._comm)

    def _prepare_gather(self, o: Operation) -> Launch:
        assert o.send is not None
        if o.send.count == 0:
            return _nothing
        recv = o.recv.pointer if o.recv is not None else 0
        return partial(self._nccl.gather, o.send.pointer, recv, o.send.nbytes, BYTE, o.root, self._comm)

    def _prepare_scatter(self, o: Operation) -> Launch:
        assert o.recv is not None
        if o.recv.count == 0:
            return _nothing
        send = o.send.pointer if o.send is not None else 0
        return partial(self._nccl.scatter, send, o.recv.pointer, o.recv.nbytes, BYTE, o.root, self._comm)

    def _prepare_barrier(self, o: Operation) -> Launch:
        token = self._token.pointer
        return partial(self._nccl.all_reduce, token, token, 1, CODE_OF[DTYPES["int32"]], SUM, self._comm)

    def _prepare_all_gather_v(self, o: Operation) -> Launch:
        assert o.send is not None and o.recv is not None and o.recv_counts is not None
        mine = o.send.pointer, o.send.nbytes
        pieces = cut(o.recv.pointer, o.recv_counts, o.recv.dtype.itemsize)
        return partial(self.exchange, [mine] * self.size, pieces)

    def _prepare_all_to_all_v(self, o: Operation) -> Launch:
        assert o.send is not None and o.recv is not None
        assert o.send_counts is not None and o.recv_counts is not None
        itemsize = o.send.dtype.itemsize
        sends = cut(o.send.pointer, o.send_counts, itemsize)
        return partial(self.exchange, sends, cut(o.recv.pointer, o.recv_counts, itemsize))

    def _prepare_message(self, o: Operation) -> Launch:
        sends: list[Piece] = [(0, 0)] * self.size
        recvs, message = list(sends), o.message
        if message.dst is not None and o.send is not None:
            sends[message.dst] = o.send.pointer, o.send.nbytes
        if message.src is not None and o.recv is not None:
            recvs[message.src] = o.recv.pointer, o.recv.nbytes
        return partial(self.exchange, sends, recvs)

    def exchange(self, sends: Sequence[Piece], recvs: Sequence[Piece], stream: int) -> None:
        """Send piece j to rank j while receiving piece j from it, this rank's own included; none where empty."""
        self.messages(
            [(j, *piece) for j, piece in enumerate(sends)], [(j, *piece) for j, piece in enumerate(recvs)], stream
        )

    def messages(self, sends: Sequence[Message], recvs: Sequence[Message], stream: int) -> None:
        """Send and receive at the same time; messages between two ranks arrive in order, empty ones do not travel."""
        nccl, comm = self._nccl, self._comm
        nccl.group_start()
        try:
            for peer, pointer, nbytes in sends:
                if nbytes:
                    nccl.send(pointer, nbytes, BYTE, peer, comm, stream)
            for peer, pointer, nbytes in recvs:
                if nbytes:
                    nccl.recv(pointer, nbytes, BYTE, peer, comm, stream)
        finally:
            nccl.group_end()

    def share(self, pointer: int, nbytes: int, stream: int) -> None:
        """All-gather in place: this rank's ``nbytes`` lie at its place in the memory at ``pointer``."""
        self._nccl.all_gather(pointer + self.rank * nbytes, pointer, nbytes, BYTE, self._comm, stream)

    def collect(self, send: int, recv: int, nbytes: int, stream: int) -> None:
        """All-gather of ``nbytes`` from each rank."""
        self._nccl.all_gather(send, recv, nbytes, BYTE, self._comm, stream)


class _First:
    """The first launch of its kind: NCCL may have to connect to the other ranks, and waits for them."""

    __slots__ = ("_backend", "_route", "_timeout", "kind", "launch")

    def __init__(self, backend: NCCLBackend, o: Operation, route: Route, launch: Launch, kind: _Kind) -> None:
        # Weakly: the route has this, and neither shall wait for the collector.
        self._backend, self._route, self.launch, self.kind = backend, weakref.ref(route), launch, kind
        self._timeout = o.options.timeout

    def __call__(self, stream: int) -> None:
        backend, launch, route = self._backend, self.launch, self._route()
        if self.kind not in backend._met:
            backend.bounded(lambda: launch(stream), self._timeout, "nccl")
            backend._met.add(self.kind)
        else:
            launch(stream)
        if route is not None:
            route.launch = launch  # without this detour from now on


def cut(pointer: int, counts: Sequence[int], itemsize: int) -> list[Piece]:
    """Pieces of so many elements, one after another."""
    pieces = []
    for count in counts:
        pieces.append((pointer, count * itemsize))
        pointer += count * itemsize
    return pieces


_NATIVE: dict[tuple[ReduceOp, DType], tuple[int, int, int] | None] = {}


def _native(op: ReduceOp, dtype: DType) -> tuple[int, int, int] | None:
    if dtype.kind == "complex":
        return None if op is ReduceOp.PROD else (CODE_OF[_part_of(dtype)], _OPS[op], 2)
    if dtype.kind == "bool":
        return (BYTE, _BYTES[op], 1) if op in _BYTES else None
    if dtype not in CODE_OF or op not in _OPS:
        return None
    if dtype.is_float and op in (ReduceOp.MIN, ReduceOp.MAX):
        return None  # NCCL's lose a NaN
    if dtype in _NARROW and op is ReduceOp.PREMUL_SUM:
        return None  # NCCL's factor would be rounded to 16 bits
    return CODE_OF[dtype], _OPS[op], 1


def _part_of(dtype: DType) -> DType:
    """The type of a complex number's two parts; any other type itself."""
    return DTYPES[f"float{4 * dtype.itemsize}"] if dtype.kind == "complex" else dtype


def _outlives_ranks(rendezvous: Rendezvous) -> bool:
    try:
        rendezvous.check_shrink()
    except BackendUnavailable:
        return False
    return rendezvous.size > 1


def _bare(route: Any) -> Any:
    launch = route.launch
    return launch.launch if isinstance(launch, _First) else launch


def _innermost(route: Any) -> Any:
    launch = _bare(route)
    return launch.launch if isinstance(launch, InWindows) else launch


def _nothing(stream: int) -> None:
    """The launch of an operation without elements."""
