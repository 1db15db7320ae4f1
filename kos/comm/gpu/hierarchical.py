"""HierarchicalBackend: NCCL between hosts with several GPUs each, whose large collectives go in phases.

Within a host ``peer`` carries them (``node``), between hosts NCCL does, on *rails* (``rail``): rank i of each host with
rank i of the others.  An all_reduce is a reduce-scatter within each host, an all_reduce of the shards on the rails and
an all-gather within each host.  So 2(h-1)/h of the data leave a host of h, where a ring of all n ranks sends 2(n-1)/n.
16-bit floats are added in fp32 within a host, and rounded once for each host.

The phases of a call follow each other on one stream.  They are not pipelined: a kernel of ``peer`` and one of NCCL side
by side would each wait for other GPUs, on which the other one may hold the multiprocessors.

``deterministic=True`` stays on NCCL's exchange of all ranks (``ordered_sum``): rank order, (x0 + x1) + x2, is the order
of no sum of hosts' sums, x01 + x23.  Compressed calls stay there too, and so does what no tuning table, measured or
predicted by ``links``, finds faster in phases.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from kos.comm import watchdog
from kos.comm.backend import Backend
from kos.comm.control.base import Rendezvous
from kos.comm.gpu.backend import DeviceBackend
from kos.comm.gpu.compressed import CompressedOperation
from kos.comm.gpu.links import table_between
from kos.comm.gpu.memory import NONE, Piece
from kos.comm.gpu.nccl import NCCLBackend
from kos.comm.gpu.order import Order
from kos.comm.gpu.ordered_sum import OrderedReduction
from kos.comm.gpu.peer.backend import PeerBackend
from kos.comm.gpu.peer.launches import pick
from kos.comm.gpu.routes import Route, nothing
from kos.comm.operation import AUTO, Operation, Options
from kos.comm.reduction import ReduceOp, resolve
from kos.comm.tuning import Table
from kos.comm.work import Work
from kos.cuda.kernels import Address
from kos.errors import BackendUnavailable, KosError
from kos.memory import Buffer
from kos.memory.symmetric import on_all
from kos.memory.windows import Run, in_windows

NAME = "hierarchical"
CARRIED = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all")
SEND, RECV, SCRATCH = range(3)
Place = tuple[int, int]
"""An array of the call (``SEND``, ``RECV``) or scratch memory, and elements after its first."""


def uneven(rendezvous: Rendezvous) -> str:
    """Why the ranks' hosts cannot work in phases, the same text on all ranks; "" if they can.  Collective."""
    local = [json.loads(each) for each in rendezvous.allgather(json.dumps(rendezvous.local_ranks).encode())]
    size, hosts = len(local[0]), sorted({tuple(ranks) for ranks in local})
    if len(hosts) == 1:
        return "the ranks are on one host"
    if size == 1 or any(ranks != tuple(range(i * size, (i + 1) * size)) for i, ranks in enumerate(hosts)):
        got = "; ".join(str(list(ranks)) for ranks in hosts[:4]) + "; ..." * (len(hosts) > 4)
        return f"expected hosts with the same number of ranks in a row, two or more, got {got}"
    return ""


class HierarchicalBackend(NCCLBackend):
    """NCCL, and phases over ``node`` and ``rail`` where the hosts have ranks alike and a table finds phases faster.

    Creation is collective.  The backends of the phases share its state: what fails in one of them ends all of them.
    """

    node: PeerBackend | None = None
    rail: NCCLBackend | None = None
    parts_of_phases: Sequence[DeviceBackend] = ()
    _groups: Sequence[Rendezvous] = ()

    def __init__(
        self, rendezvous: Rendezvous, device: int | None = None, comm: Any = None, host: Backend | None = None
    ) -> None:
        super().__init__(rendezvous, device, comm, host)
        self._between = Order()
        self.hierarchy = uneven(rendezvous)
        """Between which hosts calls go in phases, or why none does."""
        if self.hierarchy:
            return
        try:
            self._divide(rendezvous, host)
        except BackendUnavailable as error:
            self.hierarchy = str(error)

    def _divide(self, rendezvous: Rendezvous, host: Backend | None) -> None:
        """Make ``node`` and ``rail``; raises BackendUnavailable on all ranks if memory of one host cannot be mapped."""
        here = rendezvous.local_ranks
        self.hosts, self.local = self.size // len(here), here
        mine, place = divmod(self.rank, len(here))
        groups = [rendezvous.split(mine, place), rendezvous.split(place, mine)]
        self._groups = [group for group in groups if group is not None]
        within, across = self._groups
        within.nccl = across.nccl = rendezvous.nccl
        made: list[DeviceBackend] = []
        with ExitStack() as undo:
            for group in self._groups:
                undo.callback(group.abort, None)

            def make() -> None:
                made.append(PeerBackend(within, self.device, host))
                undo.callback(made[0].abort, "another host has none")

            try:
                on_all(rendezvous, "map the memory of its host's ranks", make)
            except KosError as error:
                if rendezvous.failures.over is not None:
                    raise
                raise BackendUnavailable(str(error)) from error
            made.append(NCCLBackend(across, self.device, None, host))
            undo.callback(made[1].abort, "its communicator could not be made")
            self.table = table_between(rendezvous, self.device, self.hosts)
            undo.pop_all()
        for part in made:
            watchdog.remove(part)
            part.shared.close()
            part.shared, part.failures, part.timeout = self.shared, self.failures, self.timeout
        self._failure = made[0]._failure
        self.node, self.rail = made  # type: ignore[assignment]
        self.parts_of_phases = made
        self.hierarchy = f"{self.hosts} hosts of {len(here)} ranks"

    @property
    def timeout(self) -> float:
        """The timeout of all phases, in seconds."""
        return self._seconds

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        self._seconds = seconds
        for part in self.parts_of_phases:
            part.timeout = seconds

    # Which calls go in phases.

    def carries(self, o: Operation) -> bool:
        """Whether phases can carry it with the results that kos promises; the same on all ranks."""
        options, buffer = o.options, o.send or o.recv
        if self.node is None or o.name not in CARRIED or buffer is None or options.algorithm not in (AUTO, NAME):
            return False
        rounds_twice = o.reduction is not None and buffer.dtype.name.startswith("float8")
        return not (options.deterministic or options.compress or rounds_twice)

    def is_faster(self, name: str, nbytes: int, wide: bool) -> bool:
        """Whether the table finds phases faster; ``nbytes`` of each rank's input."""
        return self.table is not None and pick(self.table.route(name, wide, False, True), nbytes) == NAME

    def use(self, table: Table) -> None:
        """Choose by this table from now on.  Collective, with the same."""
        self.table = table
        self.store.clear()

    def resolve(self, o: Operation) -> Route:
        buffer = o.send or o.recv
        if buffer is None or not self.carries(o):
            return super().resolve(o)
        if o.options.algorithm != NAME and not self.is_faster(o.name, buffer.nbytes, buffer.dtype.itemsize > 2):
            return super().resolve(o)
        if not buffer.count:
            return Route(nothing, NAME)
        phases = Phases(self, o)
        ends = [end.pointer for end in (o.send, o.recv) if end is not None]
        return Route(in_windows(phases, ends), ", ".join((NAME, *phases.kernels)), phases.lasting)

    def route_of(self, name: str, nbytes: int, symmetric: bool = False, graph: bool = False) -> str:
        phases = self.node is not None and name in CARRIED and self.is_faster(name, nbytes, True)
        return NAME if phases else self.name

    def details(self) -> list[tuple[str, str, str]]:
        return [*super().details(), (NAME, "no" if self.node is None else "in use", self.hierarchy)]

    # How they are queued.

    def ones_alone(self) -> tuple[type, ...]:
        return OrderedReduction, CompressedOperation, Phases

    def queue(self, works: Sequence[Work[Any]], stream: int | None) -> None:
        """Behind what is queued on other streams: kernels of NCCL and of ``peer`` wait for other ranks, and do not fit
        side by side."""
        if self.node is None:
            return super().queue(works, stream)
        streams = {work.stream if stream is None else stream for work in works}
        self.follow_others(streams)
        super().queue(works, stream)
        for each in streams:
            self.streams.mark(each)

    def follow_others(self, streams: Collection[int]) -> None:
        """Order what is queued next on ``streams`` behind what was queued last."""
        self._between.enter(frozenset(streams), streams, self.streams)

    # Failures, and the end.

    def inspect(self, o: Work[Any]) -> None:
        super().inspect(o)
        if self.node is not None and self.rail is not None:
            self.node.inspect(o, self.local)
            self.rail.inspect(o)

    def kernel_waits(self) -> list[int]:
        return [] if self.node is None else [self.local[rank] for rank in self.node.kernel_waits()]

    def signal_abort(self) -> None:
        super().signal_abort()
        for part in self.parts_of_phases:
            part.signal_abort()

    def abort_device(self) -> None:
        super().abort_device()
        for part in self.parts_of_phases:
            part.abort_device()

    def abort(self, reason: str) -> None:
        super().abort(reason)
        for part in self.parts_of_phases:
            part.abort(reason)
        for group in self._groups:
            group.abort(None)

    def close(self) -> None:
        self.unwatch()
        with ExitStack() as rest:  # runs all steps even if one fails
            for group in self._groups:
                rest.callback(group.close)
            rest.callback(super().close)
            for part in self.parts_of_phases:
                rest.callback(part.close)


class Phases:
    """The launch of one operation: launches of ``node`` and ``rail``, on its arrays and scratch memory."""

    def __init__(self, backend: HierarchicalBackend, o: Operation) -> None:
        assert backend.node is not None and backend.rail is not None
        self._backend, self._o, self._node, self._rail = backend, o, backend.node, backend.rail
        self._itemsize = (o.send or o.recv).dtype.itemsize  # type: ignore[union-attr]
        self._scratch = 0
        self._launches: list[tuple[Run, int, int, int, int]] = []  # each with array and bytes of what it reads, writes
        self.kernels: list[str] = []
        self.lasting = True
        getattr(self, f"_{o.name}")()

    def __call__(self, stream: int, send: int = 0, recv: int = 0) -> None:
        backend = self._backend
        backend.follow_others((stream,))
        self._node._last = self._rail._last = backend._last
        starts = send, recv, backend.scratch(self._scratch, stream) if self._scratch else 0
        for run, source, offset, target, place in self._launches:
            run(stream, starts[source] + offset, starts[target] + place)
        backend.streams.mark(stream)

    # The operations.  L ranks on each of h hosts: rank l of host k is rank k * L + l.

    def _all_reduce(self) -> None:
        count = self._count(SEND)
        counts, mine, v = self._shares(count)
        self._keep(mine)
        self._add(self._node, f"reduce_scatter{v}", (SEND, 0), count, (SCRATCH, 0), mine, send_counts=counts)
        if mine:
            self._add(self._rail, "all_reduce", (SCRATCH, 0), mine, (SCRATCH, 0), mine)
        self._add(self._node, f"all_gather{v}", (SCRATCH, 0), mine, (RECV, 0), count, recv_counts=counts)

    def _reduce_scatter(self) -> None:
        """Within each host the shards of every host's ranks, then on the rails those of this one."""
        part, size, hosts = self._count(RECV), self._node.size, self._backend.hosts
        self._keep(hosts * part)
        for host in range(hosts):
            self._add(
                self._node, "reduce_scatter", (SEND, host * size * part), size * part, (SCRATCH, host * part), part
            )
        self._add(self._rail, "reduce_scatter", (SCRATCH, 0), hosts * part, (RECV, 0), part)

    def _all_gather(self) -> None:
        """On the rails straight to where it belongs, then within each host the ranks of one host after another."""
        part, size, rail, me = self._count(SEND), self._node.size, self._rail, self._backend.rank
        stride, nbytes = size * part, part * self._itemsize
        others = [host for host in range(rail.size) if host != rail.rank]
        sends, recvs = [NONE] * rail.size, [NONE] * rail.size
        for host in others:
            at = (host * stride + self._node.rank * part) * self._itemsize
            sends[host], recvs[host] = (self._address(0, SEND, 0), nbytes), (self._address(1, RECV, 0) + at, nbytes)
        self._exchange(sends, recvs)
        self._add(self._node, "all_gather", (SEND, 0), part, (RECV, rail.rank * stride), stride)
        for host in others:
            start = host * stride
            self._add(self._node, "all_gather", (RECV, start + me % size * part), part, (RECV, start), stride)

    def _broadcast(self) -> None:
        """The root's host scatters it, each rail broadcasts a part, each host gathers it."""
        count, size = self._count(RECV), self._node.size
        counts, mine, v = self._shares(count)
        host, root = divmod(self._o.root or 0, size)
        self._keep(mine)
        if self._rail.rank == host:
            source = (SEND, 0) if self._node.rank == root else None
            self._add(self._node, f"scatter{v}", source, count, (SCRATCH, 0), mine, root=root, send_counts=counts)
        if mine:
            self._add(self._rail, "broadcast", (SCRATCH, 0), mine, (SCRATCH, 0), mine, root=host)
        self._add(self._node, f"all_gather{v}", (SCRATCH, 0), mine, (RECV, 0), count, recv_counts=counts)

    def _all_to_all(self) -> None:
        """Within each host to the rank of the target's rail, then on the rails in one message for each host."""
        count, hosts = self._count(SEND), self._backend.hosts
        part = count // hosts
        self._keep(count)
        for host in range(hosts):
            self._add(self._node, "all_to_all", (SEND, host * part), part, (SCRATCH, host * part), part)
        self._add(self._rail, "all_to_all", (SCRATCH, 0), count, (RECV, 0), count)

    # What they are made of.

    def _count(self, array: int) -> int:
        buffer = self._o.send if array == SEND else self._o.recv
        assert buffer is not None
        return buffer.count

    def _shares(self, count: int) -> tuple[list[int], int, str]:
        """The elements of each rank of a host, of this one, and the end of the name of operations on such parts."""
        size = self._node.size
        unit = max(16 // self._itemsize, 1)
        part = count // size if count % size == 0 else -(-count // (size * unit)) * unit
        counts = [max(0, min(part, count - i * part)) for i in range(size)]
        return counts, counts[self._node.rank], "" if count % size == 0 else "_v"

    def _keep(self, count: int) -> None:
        self._scratch = max(count, 1) * self._itemsize

    def _address(self, number: int, array: int, start: int) -> Address:
        """The address of argument ``number`` of a launch that gets this place."""
        buffer = (self._o.send, self._o.recv, None)[array]
        aligned = 0 if buffer is None else buffer.pointer % 16
        return Address(number, 0, (aligned + start * self._itemsize) % 16)

    def _buffer(self, number: int, place: Place, count: int) -> Buffer:
        like = self._o.send or self._o.recv
        assert like is not None
        return replace(like, count=count, shape=(count,), pointer=self._address(number, *place))  # type: ignore[arg-type]

    def _add(
        self, part: Any, name: str, send: Place | None, sent: int, recv: Place, got: int, *,
        root: int | None = None, send_counts: Sequence[int] | None = None, recv_counts: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        """Add the launch of an operation of ``part``, of so many elements at each place."""
        if not name.endswith("_v"):
            send_counts = recv_counts = None
        reduction = self._o.reduction
        if reduction is not None and part is self._node:
            reduction = replace(reduction, size=part.size)
        elif reduction is not None:  # the contributions have their factor already
            op = ReduceOp.SUM if reduction.op is ReduceOp.PREMUL_SUM else reduction.op
            reduction = resolve(op, reduction.dtype, part.size)
        source = None if send is None else self._buffer(0, send, sent)
        target = source if (send, sent) == (recv, got) else self._buffer(1, recv, got)
        if name.startswith(("all_gather", "scatter", "broadcast", "all_to_all")):
            reduction = None
        o = Operation(
            name, part.rank, Options(timeout=self._o.options.timeout), source, target, reduction, root,
            send_counts=send_counts, recv_counts=recv_counts,
        )  # fmt: skip
        self._append(part.resolve(o), send or recv, recv)

    def _exchange(self, sends: Sequence[Piece], recvs: Sequence[Piece]) -> None:
        """Add an exchange of pieces of the caller's arrays on the rails."""
        run = partial(self._rail.exchange, sends, recvs)
        self._append(self._rail.connecting(self._o, run, NAME), (SEND, 0), (RECV, 0))

    def _append(self, route: Route, send: Place, recv: Place) -> None:
        self.lasting &= route.lasting
        if route.kernel is not None:
            self.kernels.append(route.kernel)
        (source, start), (target, place) = send, recv
        self._launches.append((route.queue, source, start * self._itemsize, target, place * self._itemsize))
