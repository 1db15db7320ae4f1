"""How a subscriber reads a version from the ranks of a publisher.

On the same host, the subscriber maps the publisher's memory, and copies from it.  It maps GPU memory only for its
arrays on GPUs.  In all other cases, it requests boxes over several TCP connections to each rank.  Data that TCP moves
from or to a GPU passes through pinned memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import cached_property, partial
from itertools import chain
from typing import Any

import numpy as np

from kos.comm.control.wire import Connection
from kos.cuda.devices import device_info
from kos.dtypes import DType
from kos.errors import KosError, PeerMemoryError, TransferError
from kos.memory import ipc
from kos.memory.array import Array as GpuArray
from kos.transfer import exchange
from kos.transfer.buffers import Buffers, GpuMemory
from kos.transfer.exchange import Catalogue, Stale
from kos.transfer.gpu import Copier, Copiers, Launch
from kos.transfer.local_arrays import LocalArrays
from kos.transfer.placement import Arrays
from kos.transfer.plan import Copy, Plan
from kos.transfer.scales import quantized

CHUNK = 8 << 20  # bytes of a request
_MOST_BOXES = 64  # of a request
_MOST_THREADS = 16
_QUIET_SECONDS = 0.5  # a connection that has received no byte for this time has stalled


class Target:
    """The arrays of a subscriber rank, and the sources from which they are read.

    ``connect`` (host, port, deadline) opens a connection to a publisher rank.
    """

    def __init__(
        self, arrays: Arrays, connect: Callable[[str, int, float], Connection], streams: int, transport: str,
        staged: bool,
    ) -> None:  # fmt: skip
        self.connect, self.streams, self.transport, self.staged = connect, streams, transport, staged
        self._held = LocalArrays(arrays, True)
        self.flat, self.layout = self._held.flat, self._held.layout
        self._quantized = quantized(arrays, self.flat, self.layout)
        wanted = {n: dtype for n, (dtype, *_) in self.layout.items() if staged or n in self._quantized}
        self._staging = self._held.staging(wanted)
        self._into = self.flat | self._staging
        # each thread has copiers of its own
        self._sources, self._workers = dict[tuple[int, int, int | None], Source](), list[Copiers]()
        self.failed = False  # set by ``interrupt``, also when a thread fails: all threads then stop reading

    def near(self, known: Catalogue) -> list[set[int]]:
        """Two sets of publisher ranks: those that have memory on a GPU of these arrays, and those on this host."""
        mine, here = {device_info(device).uuid for device in self._held.copiers}, exchange.place()
        local = {rank: where.gpus for rank, where in enumerate(known.ranks) if where.place == here}
        handles = [(rank, ipc.IpcHandle.from_bytes(each.encode())) for rank, gpus in local.items() for each in gpus]
        return [{rank for rank, handle in handles if handle.uuid in mine}, {*local}]

    def read(self, plan: Plan, known: Catalogue, serial: int, deadline: float, verify: bool) -> int:
        """Read all boxes of a version; returns the bytes read.  Raises Stale, TransferError."""
        for copiers in (self._held.copiers, *self._workers):  # an earlier update that timed out may still copy
            copiers.wait(deadline)
        self._held.follow()
        if not self.staged:
            self._held.copiers.wait(deadline)
        try:
            if not self._sources:
                self._find_sources(plan, known)
            work = [part for each in self._sources.values() for part in each.parts(serial, deadline, verify)]
            nbytes = self._in_threads(work)
            self._held.copiers.wait(deadline)  # before staging memory is copied to the arrays
            return nbytes
        except Stale:
            for source in self._sources.values():
                source.disconnect()
            raise
        except BaseException:
            self.close()
            raise
        finally:
            self.failed = False  # not before: it may be set already

    def _find_sources(self, plan: Plan, known: Catalogue) -> None:
        for copy in plan.copies(0):
            array = self.flat[copy.array]
            key = copy.source.rank, copy.source.gpu, array.device if isinstance(array, GpuArray) else None
            if key not in self._sources:
                self._sources[key] = Source(self, known, *key)
            self._sources[key].copies.append(copy)

    def _in_threads(self, work: Sequence[Callable[[Copiers], int]]) -> int:
        threads = min(_MOST_THREADS, len(work))
        self._workers += [Copiers() for _ in range(len(self._workers), threads)]

        def run(first: int) -> int:
            return sum(part(self._workers[first]) for part in work[first::threads])

        if threads < 2:
            return sum(map(run, range(threads)))
        with ThreadPoolExecutor(threads, "kos-subscriber") as pool:
            try:
                return sum(each.result() for each in as_completed([pool.submit(run, n) for n in range(threads)]))
            except BaseException:
                self.interrupt()
                raise

    def interrupt(self) -> None:
        """Make all threads stop reading now."""
        self.failed = True
        exchange.shut_down(each for source in [*self._sources.values()] for each in [*source.connections.values()])

    def commit(self, deadline: float) -> None:
        """Copy or quantize staging memory to the arrays.  Raises TransferTimeout."""
        for name, matrix in self._quantized.items():
            matrix.write(self._staging[name], self._held.copiers)
        pairs = [(self.flat[n], x) for n, x in self._staging.items() if n not in self._quantized]
        self._held.copy(0, pairs, deadline)
        self._held.copiers.wait(deadline)

    def close(self) -> None:
        """Close the connections, and unmap the publisher's memory."""
        for source in self._sources.values():
            source.close()
        self._sources.clear()

    def view(self, copy: Copy) -> Any:
        """The destination of a copy: an ndarray, or a Box on a GPU."""
        return copy.part.view(self._into[copy.array], copy.start, copy.size)


class Source:
    """The copies that a subscriber reads from one memory of a publisher rank.

    This memory is the rank's host memory (``gpu`` 0), or the memory of one of its GPUs.  The copies go to the
    subscriber's arrays on ``device`` (None: the host).
    """

    def __init__(self, target: Target, known: Catalogue, rank: int, gpu: int, device: int | None) -> None:
        self._target, self._rank, self._gpu, self._device = target, rank, gpu, device
        self._where, self._incarnation = known.ranks[rank], known.incarnation
        self._name = f"{known.name}: {self._where.name(rank)}"
        self.copies = list[Copy]()
        self.connections = dict[int, Connection]()  # by the number of the stream
        self._launches = dict[int, list[Launch]]()  # copies from GPU to GPU, by the index of the buffer
        self._received, self._received_at = dict[int, int](), 0.0  # bytes of this read, by stream; time of the last
        self._memory = None if target.transport == "tcp" else self._map(known)

    def _map(self, known: Catalogue) -> Buffers | None:
        """Map the publisher's memory.  If it cannot be mapped, returns None; raises TransferError with "shared"."""
        try:
            if self._where.place != exchange.place():
                raise PeerMemoryError("it is on another host, or in other namespaces of processes or of the network")
            if self._gpu and self._device is None:
                got = "GPU memory, which is not mapped for an array on the host"
                raise PeerMemoryError(f"expected host memory, got {got}")
            layout = next(layout for layout, ranks in known.offers.groups if self._rank in ranks)
            path, gpus = f"/proc/{self._where.pid}/fd/{self._where.file}", {self._gpu} - {0}
            return Buffers(layout, known.buffers, self._where.token, gpus, self._attach, path)
        except (KosError, OSError) as error:
            if self._target.transport == "shared":
                expected = "expected memory that this process can map"
                raise TransferError(f"{self._where.name(self._rank)}: {expected}, got: {error}") from error
            return None

    def _attach(self, gpu: int, nbytes: int) -> GpuMemory:
        handle = ipc.IpcHandle.from_bytes(self._where.gpus[gpu - 1].encode())
        if handle.nbytes != nbytes:
            raise PeerMemoryError(f"expected {nbytes} bytes of GPU memory, got a handle of {handle.nbytes} bytes")
        assert self._device is not None
        return ipc.attach(handle, self._device)

    @cached_property
    def _requests(self) -> list[list[Copy]]:
        chunks = (_chunks(copy, self._target.layout[copy.array].dtype.itemsize) for copy in self.copies)
        return [*_requests(chain.from_iterable(chunks))]

    def parts(self, serial: int, deadline: float, verify: bool) -> Iterator[Callable[[Copiers], int]]:
        """Functions that each read a part of the copies, given the copiers of their thread.

        With checksums (``verify``), everything is read over TCP.
        """
        self._serial, self._deadline, self._verify = serial, deadline, verify
        self._received.clear()
        mapped = None if verify else self._memory
        requests = [self.copies] if mapped is not None and self._gpu else self._requests
        names = sorted({copy.source.array for copy in self.copies}) if verify else []
        for stream in range(count := min(self._target.streams, len(requests))):
            yield partial(self._part, mapped, stream, requests[stream::count], names[stream::count])

    def _part(
        self, mapped: Buffers | None, stream: int, requests: Sequence[Sequence[Copy]], names: Sequence[str],
        copiers: Copiers,
    ) -> int:  # fmt: skip
        """Read the copies of ``requests``.  The publisher compares the arrays ``names`` with their checksums."""
        copies = [copy for request in requests for copy in request]

        def name() -> str:
            tensors = sorted({copy.tensor for copy in copies})
            more = f" and {len(tensors) - 1} more" * (len(tensors) > 1)
            return f"{self._name}, from which {tensors[0]}{more} should come"

        with exchange.naming(name, self._deadline, [self._rank], self._missing):
            copier = None if self._device is None else copiers.of(self._device, self._deadline)
            if mapped is None:
                return self._receive(stream, requests, names, copier)
            return self._copy(mapped, stream, copies, copier)

    def _count(self, stream: int, nbytes: int) -> None:
        self._received[stream], self._received_at = self._received.get(stream, 0) + nbytes, time.monotonic()

    def _missing(self) -> str:
        """The text of the error at the deadline: how many bytes were expected and received."""
        if not (got := sum(self._received.values())):
            return exchange.NO_ANSWER
        nbytes = sum(copy.elements * self._sent(copy).itemsize for copy in self.copies)
        quiet, more = time.monotonic() - self._received_at, "and more were arriving: give update a longer timeout"
        ending = more if quiet < _QUIET_SECONDS else f"and none in the last {quiet:.1f} s"
        return f"expected {nbytes:,} bytes before the deadline, got {got:,}, {ending}"

    def _copy(self, memory: Buffers, stream: int, copies: Sequence[Copy], copier: Copier | None) -> int:
        """Copy from mapped memory."""
        if not memory.holds(self._serial):
            raise Stale
        if copier is not None and self._gpu:
            copier.uses = memory.gpus
            boxes = ((self._target.view(copy), self._source(copy, memory)) for copy in copies)
            copier.copy_all(boxes, self._launches, self._serial % memory.count)
        else:
            for copy in copies:
                self._check_time()
                self._put(copy, self._source(copy, memory), copier)
                self._count(stream, copy.elements * copy.source.dtype.itemsize)
        nbytes = sum(copy.elements * copy.source.dtype.itemsize for copy in copies)  # computed while the GPU copies
        if copier is not None:
            copier.wait()
        if not memory.holds(self._serial):
            raise Stale
        return nbytes

    def _check_time(self) -> None:
        """Raise an error after the deadline, and after another reader has failed."""
        if time.monotonic() > self._deadline:
            raise TimeoutError
        if self._target.failed:
            raise ConnectionError("another thread has ended this read")

    def _source(self, copy: Copy, memory: Buffers) -> Any:
        """The box of a copy in mapped memory: an ndarray, or a Box on a GPU."""
        return copy.source.part.view(memory.array(copy.source.array, self._serial), copy.start, copy.size)

    def _put(self, copy: Copy, source: np.ndarray[Any, Any], copier: Copier | None) -> None:
        """Copy a host array to the destination of ``copy``."""
        if copier is None:
            np.copyto(self._target.view(copy), source, casting="unsafe")
        else:
            copier.put(self._target.view(copy), source)

    def _receive(
        self, stream: int, requests: Sequence[Sequence[Copy]], names: Sequence[str], copier: Copier | None
    ) -> int:
        """Read over TCP."""
        nbytes, scratch = 0, np.empty(CHUNK, np.uint8) if copier is None else copier.scratch(CHUNK)
        connection = self._connection(stream)

        def answer() -> dict[str, Any]:
            return exchange.answered(exchange.receive(connection, self._deadline), self._incarnation)

        def post(index: int) -> None:
            boxes = [
                (copy.source.array, self._dtype(copy).name, copy.source.part.at(copy.start), copy.size,
                 copy.source.part.strides) for copy in requests[index]
            ]  # fmt: skip
            message = {"ask": "read", "serial": self._serial, "boxes": boxes, "verify": self._verify}
            if names and index + 1 == len(requests):
                message["compare"] = names
            exchange.send(connection, message, self._incarnation, self._deadline)

        post(0)
        for index, request in enumerate(requests):
            self._check_time()  # a socket that always has bytes is never waited for
            found = answer()
            if index + 1 < len(requests):  # send it before the bytes of this request are received
                post(index + 1)
            for copy in request:
                view, dtype = self._target.view(copy), self._dtype(copy)
                direct = copier is None and dtype.numpy == view.dtype and view.flags.c_contiguous
                memory = exchange.as_bytes(view if direct else scratch[: copy.elements * dtype.itemsize])
                exchange.receive_into(memory, connection, self._deadline, partial(self._count, stream))
                if not direct:
                    self._put(copy, scratch[: len(memory)].view(dtype.numpy).reshape(copy.size), copier)
                nbytes += len(memory)
            answer()  # raises Stale unless the publisher still had the version after it had sent the bytes
            if self._verify:
                self._check(request, found["sum"], copier)
        return nbytes

    def _check(self, request: Sequence[Copy], expected: int, copier: Copier | None) -> None:
        """TransferError unless the bytes in the arrays have the publisher's checksum."""
        views: list[Any] = [self._target.view(copy) for copy in request]
        if copier is not None:
            views = copier.get([(view, view.dtype) for view in views])
        if (got := exchange.checksum(views)) != expected:
            names = ", ".join(sorted({copy.tensor for copy in request}))
            raise TransferError(f"{names}: expected checksum {expected:08x}, got {got:08x}")

    def _sent(self, copy: Copy) -> DType:
        """The dtype of the bytes that are read: over TCP, ``_dtype``; from mapped memory, the publisher's dtype."""
        return self._dtype(copy) if self._memory is None or self._verify else copy.source.dtype

    def _dtype(self, copy: Copy) -> DType:
        """The dtype in which a box is sent: the smaller one of both sides; with checksums, the subscriber's."""
        mine = self._target.layout[copy.array].dtype
        return mine if self._verify or mine.itemsize < copy.source.dtype.itemsize else copy.source.dtype

    def _connection(self, stream: int) -> Connection:
        held = self.connections.get(stream)
        if held is None or held.drain():  # the publisher closes idle connections
            if held is not None:
                held.close()
            held = self.connections[stream] = self._target.connect(self._where.host, self._where.port, self._deadline)
        return held

    def disconnect(self) -> None:
        for connection in self.connections.values():
            connection.close()
        self.connections.clear()

    def close(self) -> None:
        """Close the connections, and unmap the publisher's memory."""
        self.disconnect()
        if self._memory is not None:
            self._memory.close()


def _chunks(copy: Copy, itemsize: int) -> Iterator[Copy]:
    """A copy in pieces of at most ``CHUNK`` bytes on both sides, split along its first axes."""
    nbytes = copy.elements * max(itemsize, copy.source.dtype.itemsize)
    axis = next((axis for axis, count in enumerate(copy.size) if count > 1), None)
    if nbytes <= CHUNK or axis is None:
        yield copy
        return
    step = max(1, copy.size[axis] * CHUNK // nbytes)
    for first in range(0, copy.size[axis], step):
        count = min(step, copy.size[axis] - first)
        start = (*copy.start[:axis], copy.start[axis] + first, *copy.start[axis + 1 :])
        size = (*copy.size[:axis], count, *copy.size[axis + 1 :])
        yield from _chunks(copy._replace(start=start, size=size), itemsize)


def _requests(copies: Iterable[Copy]) -> Iterator[list[Copy]]:
    """Lists of copies for one request each: at most ``CHUNK`` bytes and ``_MOST_BOXES`` boxes."""
    found, nbytes = list[Copy](), 0
    for copy in copies:
        size = copy.elements * copy.source.dtype.itemsize
        if found and (nbytes + size > CHUNK or len(found) == _MOST_BOXES):
            yield found
            found, nbytes = [], 0
        found.append(copy)
        nbytes += size
    if found:
        yield found
