"""AutoBackend: the backend of ``auto`` for ranks with GPUs.  One backend carries host arrays.  ``peer``, ``nccl`` or a
backend of another package, whichever was measured to be faster for such a call (``kos.comm.tuning``), carries arrays on
a GPU.

All ranks take the same route: they share one table, and route by arguments that are equal on all ranks.  The backends
compare their calls in one place, overlap on one stream, and fail together.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from kos.comm.control.base import Rendezvous
from kos.comm.gpu.backend import DeviceBackend
from kos.comm.gpu.eager import Guard
from kos.comm.gpu.order import Order
from kos.comm.gpu.routes import is_copy
from kos.comm.group_backend import UNMADE, GroupBackend
from kos.comm.operation import AUTO, Operation
from kos.comm.prepared import Prepared
from kos.comm.tuning import Table, merged
from kos.comm.work import Steps, Work
from kos.cuda import driver
from kos.cuda.streams import is_captured
from kos.dtypes import DTYPES, DType
from kos.errors import InvalidArgument, PeerMemoryError
from kos.memory import Array, Buffer
from kos.memory.windows import InWindows

_UNEVEN = frozenset({"all_to_all_v", "gather_v", "scatter_v", "send", "recv", "send_recv"})
"""Operations whose sizes differ between ranks: they all take the route of ``_UNEVEN_BYTES``."""
_UNEVEN_BYTES = 1 << 20
_BY_OUTPUT = frozenset({"scatter", "all_gather_v"})
"""Operations whose outputs, not inputs, have the same size on all ranks."""

Choice = DeviceBackend | dict[tuple[bool, bool], DeviceBackend]
"""A backend, or backends by (both buffers symmetric, within a graph)."""


class AutoBackend(GroupBackend):
    """One backend for host memory and one or several for GPUs, over the same ranks."""

    __slots__ = ("_last_part", "_last_stream")  # the core reads them

    def __init__(self, rendezvous: Rendezvous, host: GroupBackend, gpus: Sequence[DeviceBackend]) -> None:
        # nccl ends first: peer waits for the whole GPU, after its kernels have ended (``signal_abort``).
        self.host, self.gpus = host, tuple(sorted(gpus, key=lambda gpu: gpu.name))
        super().__init__(rendezvous, host.engine)
        self.inner = (host, *self.gpus)
        self.name = "+".join(dict.fromkeys(part.name for part in (*self.gpus, host)))
        self.device: int = self.gpus[0].device
        self.table: Table | None = next((gpu.table for gpu in self.gpus if gpu.table is not None), None)
        self._only = self.gpus[0] if len(self.gpus) == 1 else None
        self._by_name = {gpu.name: gpu for gpu in self.gpus}
        kernels = (self._by_name[name] for name in ("peer", "nccl") if name in self._by_name)
        self._ordered = next(kernels, self.gpus[0])  # the one that adds in rank order, ``peer`` in its kernels
        self._choices: dict[tuple[str, DType], tuple[list[int], list[Choice]]] = {}
        for gpu in self.gpus:
            gpu.store = self.store
            gpu.join(self.gpus)
        self._order = Order()
        # The backend that queued last, and the stream on which it may queue again without being ordered; -1 for none.
        self._last_part, self._last_stream = self.gpus[0], -1

    def choose_backend(self, o: Operation) -> tuple[GroupBackend, bool]:
        """The backend of this operation, and whether it is the same inside and outside a graph.

        A barrier runs on the GPUs if a stream is to wait.
        """
        buffer = o.send or o.recv
        if buffer is None:
            return self._ordered if o.options.on_stream else self.host, True
        if buffer.device is None:
            return self.host, True
        if self._only is not None:
            return self._only, True
        if o.options.deterministic or o.options.compress or o.options.algorithm != AUTO:
            return self._ordered, True
        if o.options.overlap and self._ordered.overlapped(o):
            return self._ordered, True
        limits, choices = self._choices.get((o.name, buffer.dtype)) or self._load_routes(o.name, buffer.dtype)
        if o.name in _BY_OUTPUT and o.recv is not None:
            buffer = o.recv
        choice = choices[bisect_left(limits, buffer.count)]
        if not isinstance(choice, dict):
            return choice, True
        if o.name in _UNEVEN:
            return choice[False, False], True
        symmetric = self._ordered.is_symmetric(o)
        eager, graph = choice[symmetric, False], choice[symmetric, True]
        return eager if eager is graph or not is_captured(buffer.stream) else graph, eager is graph

    def _load_routes(self, operation: str, dtype: DType) -> tuple[list[int], list[Choice]]:
        """Size limits in elements, and the choice up to each; one more choice for all larger sizes."""
        assert self.table is not None
        limits, routes = merged(self.table, operation, dtype.itemsize > 2)
        choices: list[Choice] = []
        for route in routes:
            # A table may name a backend that cannot be used here.
            parts = {kind: self._by_name.get(name, self._ordered) for kind, name in route.items()}
            alike = len(set(parts.values())) == 1
            choices.append(next(iter(parts.values())) if alike else parts)
        if operation in _UNEVEN:
            limits, choices = [], [choices[bisect_left(limits, _UNEVEN_BYTES)]]
        self._choices[operation, dtype] = [limit // dtype.itemsize for limit in limits], choices
        return self._choices[operation, dtype]

    def details(self) -> list[tuple[str, str, str]]:
        return list(dict.fromkeys(row for part in (self.host, *self.gpus) for row in part.details()))

    def idle(self) -> Any:
        return self.host.idle()

    def prepare(self, o: Operation) -> Prepared:
        part, fixed = self.choose_backend(o)
        prepared = part.prepare(o)
        if part is self.host:
            prepared.launch = partial(self._launch_on_host, prepared.launch)  # that of the core, or of the transport
            self.gpus[0].shared.compare_host_calls(prepared)
        else:
            prepared.fixed = fixed = fixed and prepared.fixed
            if self.size > 1 or not is_copy(prepared.route):  # a copy waits for no rank: no order needed
                prepared.launch = self._launch_on_gpu
            eager = not fixed and not is_captured((o.send or o.recv).stream)  # type: ignore[union-attr]
            if eager and type(prepared.route) is InWindows:  # it is found outside of graphs alone, and need not look
                prepared.route = prepared.route.launch
        return prepared

    def _launch_on_host(self, launch: Callable[[Work[Any]], Steps | None], work: Work[Any]) -> Steps | None:
        self.gpus[0].shared.announce_on_host(work)
        self.gpus[0].confirm(work)  # the later of two ranks that differ finds it
        return launch(work)

    def _launch_on_gpu(self, work: Work[Any]) -> None:
        part = work.prepared.backend
        if self._only is None:
            stream = work.stream if work.prepared.waits else part.side
            if part is not self._last_part or stream != self._last_stream:
                self._order_backends(part, (work,), not work.prepared.waits)
        part.launch(work)

    def _order_backends(self, part: DeviceBackend, works: Sequence[Work[Any]], overlap: bool) -> None:
        """Order the calls of the two GPU backends, one after the other.

        Kernels of both may need a whole GPU and wait for other ranks: without an order, GPUs might start different
        kernels.  Each backend orders its own calls.
        """
        keepers = {part.side: part._side} if overlap else {work.stream: work.queue for work in works}
        with driver.on_device(self.device):
            for stream, keeper in keepers.items():
                part.streams.hold(stream, keeper)
            again = self._order.enter(part, keepers, part.streams)
        self._last_part, self._last_stream = part, next(iter(keepers)) if again and len(keepers) == 1 else -1

    def eager(self, comm: Any) -> Any:
        return self.gpus[0].shared.eager_calls(comm, self)

    def guards(self, work: Work[Any]) -> list[Guard]:
        """What is equal while a call like ``work`` needs no new order."""
        part = work.prepared.backend
        ordered = self._only is None and (self.size > 1 or not is_copy(work.prepared.route))
        several = [(self, "_last_part", part), (self, "_last_stream", work.stream)] if ordered else []
        return [*several, *part.guards(work)]

    def in_order(self, works: Sequence[Work[Any]]) -> list[Work[Any]]:
        """Grouped by backend."""
        parts: list[Any] = [*self.gpus, self.host]
        return sorted(works, key=lambda work: parts.index(work.backend))

    def start_all(self, works: Sequence[Work[Any]], overlap: bool) -> None:
        self.failures.refuse(works[0].name)
        for part, several in itertools.groupby(works, lambda work: work.backend):
            mine = list(several)
            if part is self.host:
                self.gpus[0].confirm(mine[0])
            elif self._only is None:
                self._order_backends(part, mine, overlap)
            part.start_all(mine, overlap)

    def synchronize(
        self, timeout: float | None = None, stream: int | None = None, until: Callable[[], bool] | None = None
    ) -> None:
        last, copied = self._last_part, self.gpus[0].shared.last if self.size == 1 else None
        last = last if copied is None else copied.backend  # first, so that its timeout names its own call
        for gpu in sorted(self.gpus, key=lambda gpu: gpu is not last) if until is None else (last,):
            gpu.synchronize(timeout, stream, until)

    def allocate(self, shape: Any, dtype: Any) -> Any:
        return self._ordered.allocate(shape, dtype)

    def views(self, x: Buffer) -> list[Any]:
        return self._ordered.views(x)

    def feed_back(self, x: Buffer, residual: Buffer, compress: str) -> None:
        (self.host if x.device is None else self._ordered).feed_back(x, residual, compress)

    def register(self, buffer: Buffer) -> Array:
        """By the backend of ``allocate``, else by the other one: all ranks accept or refuse alike."""
        refusals = []
        for gpu in sorted(self.gpus, key=lambda gpu: gpu is not self._ordered):
            try:
                return gpu.register(buffer)
            except (InvalidArgument, PeerMemoryError) as error:
                refusals.append(f"{gpu.name}: {error}")
        raise InvalidArgument("; ".join(refusals))

    def split(self, rendezvous: Rendezvous | None, color: int | None = None, key: int = 0) -> GroupBackend | None:
        host, parts = self.host.split(rendezvous, color, key), list[DeviceBackend]()
        with ExitStack() as undo:
            if host is not None:
                undo.callback(host.abort, UNMADE)
            for gpu in self.gpus:
                part = gpu.split(rendezvous, color, key, host)
                if part is not None:
                    undo.callback(part.abort, UNMADE)
                    parts.append(part)
            made = None if rendezvous is None or host is None else AutoBackend(rendezvous, host, parts)
            undo.pop_all()
        return made

    def close(self) -> None:
        with ExitStack() as parts:  # closes each even if another fails; the host last, which reports the end
            for part in (self.host, *reversed(self.gpus)):
                parts.callback(part.close)

    def abort(self, reason: str) -> None:
        self.signal_end(reason)
        for part in (self.host, *self.gpus):  # the host first: it reports to the other ranks at once
            part.abort(reason)

    def signal_end(self, reason: str) -> None:
        """Report the end to the other ranks, and let waiting kernels end, before the backends end."""
        for gpu in self.gpus:
            gpu.unwatch()
        if self.gpus[0].streams.keepers:
            self.gpus[0].shared.post_end(reason)
        for gpu in self.gpus:
            gpu.signal_abort()

    def route_of(self, name: str, nbytes: int, symmetric: bool = False, graph: bool = False) -> str:
        part = self._only
        if part is None:
            limits, choices = self._choices.get((name, DTYPES["float32"])) or self._load_routes(name, DTYPES["float32"])
            choice = choices[bisect_left(limits, nbytes // 4)]
            part = choice[symmetric, graph] if isinstance(choice, dict) else choice
        return part.route_of(name, nbytes, symmetric, graph)

    def routes(self, place: str = "") -> list[tuple[str, ...]]:
        return super().routes(" on GPUs") + self.host.routes(" on hosts")
