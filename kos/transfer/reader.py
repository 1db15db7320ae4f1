"""How a subscriber reads a version from the ranks of a publisher.

On the same host, the subscriber maps the publisher's memory, and copies from it.  It maps GPU memory only for its
arrays on GPUs.  In all other cases, it requests boxes over several TCP connections to each rank.  Data that TCP moves
from or to a GPU passes through pinned memory.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import numpy as np

from kos.comm.control.wire import Connection, drive, fill
from kos.cuda import streams
from kos.dtypes import DType
from kos.errors import CudaError, KosError, OutOfMemory, PeerMemoryError, TransferError, TransferTimeout
from kos.memory import ipc
from kos.memory.array import Array as GpuArray
from kos.transfer import exchange
from kos.transfer.buffers import Buffers, GpuMemory
from kos.transfer.exchange import Address, Restarted, Stale
from kos.transfer.gpu import Copier, Launch, follow, launches, whole
from kos.transfer.placement import Arrays, Flat
from kos.transfer.plan import Copy, Layout, Offers, Plan
from kos.transfer.scales import Quantized

CHUNK = 8 << 20  # bytes of a request
_MOST_BOXES = 64  # of a request
_MOST_THREADS = 16


class Group(NamedTuple):
    """The properties that copies must have in common to be read together."""

    rank: int
    """The publisher rank."""
    device: int | None
    """The GPU of the subscriber's arrays; None: the host."""
    on_gpu: bool
    """Whether the publisher's arrays are on a GPU."""


class Catalogue:
    """What a publisher offers, and where its ranks are."""

    def __init__(self, answer: Mapping[str, Any]) -> None:
        self.incarnation, self.name, self.buffers = answer["incarnation"], answer["name"], answer["buffers"]
        self.ranks = [Address(*each)._replace(gpus=tuple(each[-1])) for each in answer["ranks"]]
        self.offers = Offers([(exchange.layout_from_json(layout), ranks) for layout, ranks in answer["groups"]])


class Target:
    """The arrays of a subscriber rank, and how they are read.

    ``connect`` (host, port, deadline) opens a connection to a publisher rank.
    """

    def __init__(
        self, connect: Callable[[str, int, float], Connection], streams: int, transport: str, staged: bool,
        arrays: Arrays, flat: dict[str, Flat], layout: Layout, quantized: Mapping[str, Quantized],
    ) -> None:  # fmt: skip
        self._connect, self._streams, self._transport, self.staged = connect, streams, transport, staged
        self._arrays, self._flat, self.layout, self._quantized = arrays, flat, layout, quantized
        self.into: dict[str, Any] = {
            name: _staging(flat[name], dtype) if staged or name in quantized else flat[name]
            for name, (dtype, *_) in layout.items()
        }
        self._data: dict[tuple[Group, int], Connection] = {}  # by group and number of the stream
        self._mapped: dict[tuple[int, int | None], Buffers] = {}  # by rank, and by the GPU that maps its GPU memory
        self._plan: Plan | None = None
        self._groups: dict[Group, list[Copy]] = {}
        self._prepared: dict[tuple[Group, int], list[Launch]] = {}  # by group and index of the buffer
        self._own = {x.device: Copier(x.device) for x in flat.values() if isinstance(x, GpuArray)}
        self._copiers: dict[int, list[Copier]] = {device: [] for device in self._own}  # for readers, not in use
        self._late: list[tuple[Copier, list[Any]]] = []  # those with queued copies, and the memory of these
        self._failed = False  # whether a reader has failed, so that the others end

    def read(self, plan: Plan, known: Catalogue, serial: int, deadline: float, verify: bool) -> int:
        """Read all boxes of a version; returns the bytes read.  Raises Stale, TransferError."""
        if plan is not self._plan:
            self._plan, self._groups = plan, {}
            for copy in plan.copies(0):
                array = self._flat[copy.array]
                device = array.device if isinstance(array, GpuArray) else None
                self._groups.setdefault(Group(copy.source.rank, device, copy.source.gpu > 0), []).append(copy)
        self._wait(deadline)  # for a commit that was late
        while self._late:
            self._late[-1][0].deadline = deadline
            self._late[-1][0].wait()
            self._late.pop()
        follow(self._arrays, self._flat, self._own, True)
        if not self.staged:
            self._wait(deadline)
        work: list[Callable[[], int]] = []
        for group, copies in self._groups.items():
            mapped = None if verify else self._map(known, group)
            if mapped is not None and group.on_gpu:
                work.append(Reader(self, serial, known, group, mapped, 0, [copies], (), deadline, verify).run)
                continue
            chunks = (chunk for copy in copies for chunk in _chunks(copy, self._itemsize(copy)))
            requests = [*_requests([*chunks])]
            names = sorted({copy.source.array for copy in copies}) if verify else []
            for stream in range(streams := min(self._streams, len(requests))):
                parts = requests[stream::streams], names[stream::streams]
                work.append(Reader(self, serial, known, group, mapped, stream, *parts, deadline, verify).run)
        self._failed = False
        try:
            if self._own and len(work) == 1:  # a single reader needs no thread
                nbytes, work = work[0](), []
            else:
                nbytes = 0
            with ThreadPoolExecutor(min(_MOST_THREADS, len(work) or 1), "kos-subscriber") as pool:
                try:
                    nbytes += sum(each.result() for each in as_completed([pool.submit(each) for each in work]))
                except BaseException:
                    self._failed = True
                    for connection in list(self._data.values()):
                        with suppress(OSError):
                            connection.sock.shutdown(socket.SHUT_RDWR)  # so that the other readers end now
                    raise
            self._wait(deadline)  # so that staging memory can be copied to the arrays
            return nbytes
        except BaseException as error:
            self.close(isinstance(error, Stale))
            raise

    def _wait(self, deadline: float) -> None:
        """Wait for the queued copies, and for the work that the program queued on the arrays before them."""
        for copier in self._own.values():
            copier.deadline = deadline
            copier.wait()

    def commit(self, deadline: float) -> None:
        """Copy or quantize staging memory to the arrays.  Raises TransferTimeout."""
        for name, staging in self.into.items():
            if name in self._quantized:
                self._quantized[name].write(staging, self._own)
            elif not self.staged:
                continue
            elif isinstance(array := self._flat[name], GpuArray):
                self._own[array.device].copy(whole(array), whole(staging))
            else:
                np.copyto(array, staging)
        self._wait(deadline)

    def close(self, keep_mapped: bool = False) -> None:
        """Close the connections, and unmap the publisher's memory."""
        for connection in self._data.values():
            connection.close()
        self._data.clear()
        if not keep_mapped:
            self._prepared.clear()
            for memory in self._mapped.values():
                memory.close()
            self._mapped.clear()

    def _itemsize(self, copy: Copy) -> int:
        return max(copy.source.dtype.itemsize, self.layout[copy.array].dtype.itemsize)

    def _map(self, known: Catalogue, group: Group) -> Buffers | None:
        """The memory of a publisher rank, mapped.  None if it cannot be mapped, or with ``transport="tcp"``."""
        where, device = known.ranks[group.rank], group.device
        key = group.rank, device if group.on_gpu else None

        def on_gpu(gpu: int, nbytes: int) -> GpuMemory:
            handle = ipc.IpcHandle.from_bytes(where.gpus[gpu - 1].encode())
            if device is None:
                got = "GPU memory, which is not mapped for an array on the host"
                raise PeerMemoryError(f"expected host memory, got {got}")
            if handle.nbytes != nbytes:
                raise PeerMemoryError(f"expected {nbytes} bytes of GPU memory, got a handle of {handle.nbytes} bytes")
            return ipc.attach(handle, device)

        if key not in self._mapped and self._transport != "tcp":
            try:
                if where.place != exchange.place():
                    raise PeerMemoryError(f"it is on another host, or in other namespaces: {where.place}")
                layout = next(layout for layout, ranks in known.offers.groups if group.rank in ranks)
                path, on = f"/proc/{where.pid}/fd/{where.file}", on_gpu if group.on_gpu else None
                self._mapped[key] = Buffers(layout, known.buffers, known.incarnation, group.rank, path, on)
            except (KosError, OSError) as error:
                if self._transport == "shared":
                    expected = "expected memory that this process can map"
                    raise TransferError(f"{where.name(group.rank)}: {expected}, got: {error}") from error
        return self._mapped.get(key)

    def prepared(self, group: Group, memory: Buffers, serial: int) -> list[Launch]:
        """The launches that copy a group from GPU to GPU.  They are cached for each buffer."""
        key = group, serial % memory.count
        if key not in self._prepared:
            assert group.device is not None
            found = self._prepared[key] = list[Launch]()
            for copy in self._groups[group]:
                source = copy.source.part.view(memory.array(copy.source.array, serial), copy.start, copy.size)
                found += launches(self.view(copy), source, group.device)
        return self._prepared[key]

    def view(self, copy: Copy) -> Any:
        """The destination of a copy: an ndarray, or a Box on a GPU."""
        return copy.part.view(self.into[copy.array], copy.start, copy.size)

    @contextmanager
    def copier(self, device: int | None, deadline: float) -> Iterator[Copier | None]:
        """A context with a copier for a reader; None if the arrays are on the host."""
        if device is None:
            yield None
            return
        try:
            copier = self._copiers[device].pop()
        except IndexError:
            copier = Copier(device)
        copier.deadline = deadline
        try:
            yield copier
        except BaseException:
            if not copier.idle:  # the memory of its copies must not be unmapped, or be written by others, meanwhile
                self._late.append((copier, [gpu for each in self._mapped.values() for gpu in each.gpus]))
            raise
        self._copiers[device].append(copier)

    def data(self, where: Address, group: Group, stream: int, deadline: float) -> Connection:
        """The connection of a reader."""
        held = self._data.get((group, stream))
        if held is None or held.drain():  # the publisher closes idle connections
            if held is not None:
                held.close()
            held = self._data[group, stream] = self._connect(where.host, where.port, deadline)
        if self._failed:  # perhaps while this one connected
            raise ConnectionError("another reader has failed")
        return held


class Reader:
    """Reads some requests from one publisher rank, in a thread of its own."""

    def __init__(
        self, target: Target, serial: int, known: Catalogue, group: Group, mapped: Buffers | None, stream: int,
        requests: Sequence[Sequence[Copy]], compared: Sequence[str], deadline: float, verify: bool,
    ) -> None:  # fmt: skip
        """``compared``: the publisher's arrays that it compares with their checksums afterwards."""
        self._target, self._serial, self._group, self._mapped, self._stream = target, serial, group, mapped, stream
        self._where, self._incarnation = known.ranks[group.rank], known.incarnation
        self._name = f"{known.name}: {self._where.name(group.rank)}"
        self._requests, self._compared, self._deadline, self._verify = requests, compared, deadline, verify
        self._copier: Copier | None = None

    def run(self) -> int:
        try:
            with self._target.copier(self._group.device, self._deadline) as self._copier:
                return self._read_tcp() if self._mapped is None else self._read_mapped(self._mapped)
        except Restarted:
            raise Stale from None
        except (CudaError, OutOfMemory, TransferTimeout):  # of the GPU of this process, not of the publisher
            raise
        except (OSError, ValueError, KosError) as error:
            tensors = sorted({copy.tensor for request in self._requests for copy in request})
            more = f" and {len(tensors) - 1} more" * (len(tensors) > 1)
            what = f"{self._name}, from which {tensors[0]}{more} should come"
            failure = exchange.late(what, self._deadline, error)
            failure.ranks = (self._group.rank,)
            raise failure from error

    def _read_mapped(self, memory: Buffers) -> int:
        serial, copies = self._serial, [copy for request in self._requests for copy in request]
        if not memory.holds(serial):
            raise Stale
        if self._group.on_gpu:
            assert self._copier is not None
            self._copier.queue(self._target.prepared(self._group, memory, serial))
            self._copier.wait()
        else:
            for copy in copies:
                if time.monotonic() > self._deadline:
                    raise TimeoutError
                source = copy.source.part.view(memory.array(copy.source.array, serial), copy.start, copy.size)
                self._put(copy, source)
        if not memory.holds(serial):
            raise Stale
        return sum(copy.elements * copy.source.dtype.itemsize for copy in copies)

    def _put(self, copy: Copy, source: np.ndarray[Any, Any]) -> None:
        """Copy a host array to the destination of ``copy``."""
        if self._copier is None:
            np.copyto(self._target.view(copy), source, casting="unsafe")
        else:
            self._copier.put(self._target.view(copy), source)

    def _read_tcp(self) -> int:
        nbytes, scratch = 0, np.empty(CHUNK, np.uint8) if self._copier is None else self._copier.scratch(CHUNK)
        connection = self._target.data(self._where, self._group, self._stream, self._deadline)
        self._post(connection, self._requests[0])
        for index, request in enumerate(self._requests):
            answer = self._answer(connection)
            if index + 1 < len(self._requests):  # before the bytes of this one are received
                self._post(connection, self._requests[index + 1])
            for copy in request:
                nbytes += self._take(connection, copy, scratch)
            self._answer(connection)  # the publisher still had the version after it sent the bytes, or Stale
            if self._verify and (got := exchange.checksum(map(self._on_host, request))) != answer["sum"]:
                names = ", ".join(sorted({copy.tensor for copy in request}))
                raise TransferError(f"{names}: expected checksum {answer['sum']:08x}, got {got:08x}")
        if self._compared:
            message = {"ask": "compare", "serial": self._serial, "arrays": self._compared}
            exchange.send(connection, message, self._incarnation, self._deadline)
            self._answer(connection)
        return nbytes

    def _take(self, connection: Connection, copy: Copy, scratch: np.ndarray[Any, Any]) -> int:
        """Receive one box."""
        view, dtype = self._target.view(copy), self._dtype(copy)
        direct = self._copier is None and dtype.numpy == view.dtype and view.flags.c_contiguous
        memory = exchange.as_bytes(view if direct else scratch[: copy.elements * dtype.itemsize])
        drive(fill(connection.sock, lambda: memory), connection.sock, self._deadline)
        if not direct:
            self._put(copy, scratch[: len(memory)].view(dtype.numpy).reshape(copy.size))
        return len(memory)

    def _on_host(self, copy: Copy) -> np.ndarray[Any, Any]:
        view: Any = self._target.view(copy)
        return view if self._copier is None else self._copier.get([(view, view.dtype)])[0]

    def _dtype(self, copy: Copy) -> DType:
        """The dtype in which a box is sent: the smaller one of both sides; with checksums, the subscriber's."""
        mine = self._target.layout[copy.array].dtype
        return mine if self._verify or mine.itemsize < copy.source.dtype.itemsize else copy.source.dtype

    def _post(self, connection: Connection, request: Sequence[Copy]) -> None:
        boxes = [
            (copy.source.array, self._dtype(copy).name, copy.source.part.at(copy.start), copy.size,
             copy.source.part.strides) for copy in request
        ]  # fmt: skip
        message = {"ask": "read", "serial": self._serial, "boxes": boxes, "verify": self._verify}
        exchange.send(connection, message, self._incarnation, self._deadline)

    def _answer(self, connection: Connection) -> dict[str, Any]:
        return exchange.answered(exchange.receive(connection, self._deadline), self._incarnation)


def _staging(flat: Flat, dtype: DType) -> Flat:
    if isinstance(flat, np.ndarray):
        return np.empty(flat.size, dtype.numpy)
    made = GpuArray.empty(flat.shape, dtype, flat.device, label="staging memory of kos.transfer")
    streams.synchronize(None, flat.device)  # from now on, every stream may use the memory
    return made


def _chunks(copy: Copy, itemsize: int) -> Iterator[Copy]:
    """A copy in pieces of at most ``CHUNK`` bytes, split along its first axes."""
    nbytes = copy.elements * itemsize
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


def _requests(copies: Sequence[Copy]) -> Iterator[list[Copy]]:
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
