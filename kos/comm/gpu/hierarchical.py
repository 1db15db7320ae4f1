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
from typing import Any

from kos.comm import watchdog
from kos.comm.control.base import Rendezvous
from kos.comm.gpu.backend import DeviceBackend
from kos.comm.gpu.links import table_between
from kos.comm.gpu.nccl import NCCLBackend
from kos.comm.gpu.order import Order
from kos.comm.gpu.peer.backend import PeerBackend
from kos.comm.gpu.peer.launches import pick
from kos.comm.gpu.routes import Route, nothing
from kos.comm.group_backend import UNMADE, GroupBackend
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
Place = tuple[int, int, int]
"""An array of the call (``SEND``, ``RECV``) or scratch memory, elements after its first, and their number."""


class Phases:
    """The launch of one operation: launches of ``node`` and ``rail``, on its arrays and scratch memory.

    Of L ranks on each of h hosts, rank l of host k is rank k * L + l.
    """

    def __init__(self, backend: Any, o: Operation) -> None:
        assert o.recv is not None
        self._backend, self._o, self._like = backend, o, o.send or o.recv
        self._node, self._rail, self._hosts = backend.node, backend.rail, backend.rail.size
        self._sent, self._received = self._like.count, o.recv.count
        self._scratch = 0  # elements
        self._launches: list[tuple[Run, int, int, int, int]] = []  # each with array and bytes of what it reads, writes
        self.lasting = True
        getattr(self, f"_{o.name}")()

    def __call__(self, stream: int, send: int = 0, recv: int = 0) -> None:
        backend = self._backend
        backend.follow_others((stream,))
        self._node._last = self._rail._last = backend._last
        starts = send, recv, backend.scratch(self._scratch * self._like.dtype.itemsize, stream)
        for run, source, offset, target, place in self._launches:
            run(stream, starts[source] + offset, starts[target] + place)
        backend.streams.mark(stream)

    def _all_reduce(self) -> None:
        whole = self._sent
        shard, counts = self._shard(whole)
        self._add(self._node, "reduce_scatter", (SEND, 0, whole), shard, counts)
        self._add(self._rail, "all_reduce", shard, shard)
        self._add(self._node, "all_gather", shard, (RECV, 0, whole), counts)

    def _reduce_scatter(self) -> None:
        """Within each host the shards of every host's ranks, then on the rails those of this one."""
        part, of_host = self._received, self._received * self._node.size
        self._scratch = self._hosts * part
        for host in range(self._hosts):
            self._add(self._node, "reduce_scatter", (SEND, host * of_host, of_host), (SCRATCH, host * part, part))
        self._add(self._rail, "reduce_scatter", (SCRATCH, 0, self._scratch), (RECV, 0, part))

    def _all_gather(self) -> None:
        """On the rails, then within each host the ranks of one host after another."""
        part, of_host = self._sent, self._sent * self._node.size
        self._scratch = self._hosts * part
        self._add(self._rail, "all_gather", (SEND, 0, part), (SCRATCH, 0, self._scratch))
        for host in range(self._hosts):
            self._add(self._node, "all_gather", (SCRATCH, host * part, part), (RECV, host * of_host, of_host))

    def _broadcast(self) -> None:
        """The root's host scatters it, each rail broadcasts a part, each host gathers it."""
        whole = self._received
        shard, counts = self._shard(whole)
        host, root = divmod(self._o.root or 0, self._node.size)
        if self._rail.rank == host:
            source = (SEND, 0, whole) if self._node.rank == root else None
            self._add(self._node, "scatter", source, shard, counts, root)
        self._add(self._rail, "broadcast", shard, shard, root=host)
        self._add(self._node, "all_gather", shard, (RECV, 0, whole), counts)

    def _all_to_all(self) -> None:
        """Within each host to the rank of the target's rail, then on the rails in one message for each host."""
        part, self._scratch = self._sent // self._hosts, self._sent
        for host in range(self._hosts):
            self._add(self._node, "all_to_all", (SEND, host * part, part), (SCRATCH, host * part, part))
        self._add(self._rail, "all_to_all", (SCRATCH, 0, self._sent), (RECV, 0, self._sent))

    def _shard(self, count: int) -> tuple[Place, list[int] | None]:
        """Scratch memory for this rank's shard of what its host shares, and the size of each if they differ."""
        size, counts = self._node.size, None
        part, unit = count // size, max(16 // self._like.dtype.itemsize, 1)
        if count % size:
            most = -(-count // (size * unit)) * unit
            counts = [max(0, min(most, count - i * most)) for i in range(size)]
            part = counts[self._node.rank]
        self._scratch = part
        return (SCRATCH, 0, part), counts

    def _add(
        self, part: Any, name: str, send: Place | None, recv: Place, counts: list[int] | None = None,
        root: int | None = None,
    ) -> None:  # fmt: skip
        """Add the launch of an operation of ``part``; ``counts`` are the sizes of its ranks' shards."""
        if part is self._rail and not recv[2]:
            return
        source = None if send is None else self._buffer(0, *send)
        target = source if send == recv else self._buffer(1, *recv)
        reduction = self._o.reduction if "reduce" in name else None
        if reduction is not None:  # on the rails the contributions have their factor already
            scaled = part is self._rail and reduction.op is ReduceOp.PREMUL_SUM
            reduction = replace(resolve(ReduceOp.SUM, reduction.dtype, 1) if scaled else reduction, size=part.size)
        sizes: dict[str, Any] = {"recv_counts" if name == "all_gather" else "send_counts": counts}
        name += "_v" if counts else ""
        options = Options(timeout=self._o.options.timeout)
        queue, _, lasting = part.resolve(Operation(name, part.rank, options, source, target, reduction, root, **sizes))
        self.lasting &= lasting
        itemsize, (array, start, _) = self._like.dtype.itemsize, send or recv
        self._launches.append((queue, array, start * itemsize, recv[0], recv[1] * itemsize))

    def _buffer(self, number: int, array: int, start: int, count: int) -> Buffer:
        """Those elements, as array ``number`` of a launch."""
        like = (self._o.send, self._o.recv, None)[array]
        aligned = (0 if like is None else like.pointer % 16) + start * self._like.dtype.itemsize
        pointer: Any = Address(number, 0, aligned % 16)
        return replace(self._like, count=count, shape=(count,), pointer=pointer)


class HierarchicalBackend(NCCLBackend):
    """NCCL, and phases over ``node`` and ``rail`` where the hosts have ranks alike and a table finds phases faster.

    Creation is collective.  The backends of the phases share its state: what fails in one of them ends all of them.
    """

    node: PeerBackend | None = None
    rail: NCCLBackend | None = None
    alone = (*NCCLBackend.alone, Phases)
    inner: Sequence[DeviceBackend] = ()
    _groups: Sequence[Rendezvous] = ()

    def __init__(
        self, rendezvous: Rendezvous, device: int | None = None, comm: Any = None, host: GroupBackend | None = None
    ) -> None:
        super().__init__(rendezvous, device, comm, host)
        self._between = Order()
        try:
            self._divide(rendezvous, host)
        except BackendUnavailable as error:  # on all ranks
            self.hierarchy = str(error)
            """Between which hosts calls go in phases, or why none does."""

    def _divide(self, rendezvous: Rendezvous, host: GroupBackend | None) -> None:
        """Make ``node`` and ``rail``; raises BackendUnavailable, on all ranks, if any host is not fit for it."""
        hosts = hosts_of(rendezvous)
        mine, place = divmod(self.rank, len(hosts[0]))
        self._local = hosts[mine]
        with ExitStack() as undo:
            groups: list[Any] = [rendezvous.split(mine, place), rendezvous.split(place, mine)]
            made: list[DeviceBackend] = []

            def make(kind: type[DeviceBackend], group: Rendezvous) -> None:
                made.append(kind(group, self.device, host=host))
                undo.callback(made[-1].abort, UNMADE)

            for group in groups:
                undo.callback(group.abort, None)
                group.nccl = rendezvous.nccl
            try:
                on_all(rendezvous, "map the memory of its host's ranks", lambda: make(PeerBackend, groups[0]))
            except KosError as error:
                if rendezvous.failures.over is not None:
                    raise
                raise BackendUnavailable(str(error)) from error
            make(NCCLBackend, groups[1])
            self.table = table_between(rendezvous, self.device, len(hosts))
            undo.pop_all()
        for part in made:
            watchdog.remove(part)
            part.shared.close()
            part.shared, part.failures = self.shared, self.failures
        self._groups, self.inner, self._failure = groups, made, made[0]._failure
        self.set_timeout(self.timeout)
        self.node, self.rail = made  # type: ignore[assignment]
        self.hierarchy = f"{len(hosts)} hosts of {len(self._local)} ranks"

    # Which calls go in phases.

    def carries(self, o: Operation) -> bool:
        """Whether phases can carry it with the results that kos promises; the same on all ranks."""
        options, buffer = o.options, o.send or o.recv
        if self.node is None or o.name not in CARRIED or buffer is None or options.algorithm not in (AUTO, NAME):
            return False
        rounds_twice = o.reduction is not None and buffer.dtype.name.startswith("float8")
        return not (options.deterministic or options.compress or rounds_twice)

    def is_faster(self, name: str, nbytes: int) -> bool:
        """Whether the table finds phases faster; ``nbytes`` of each rank's input."""
        return self.table is not None and pick(self.table.route(name, False, False, True), nbytes) == NAME

    def use(self, table: Table) -> None:
        """Choose by this table from now on.  Collective, with the same."""
        self.table = table
        self.store.clear()

    def resolve(self, o: Operation) -> Route:
        buffer = o.send or o.recv
        chosen = o.options.algorithm == NAME or (buffer is not None and self.is_faster(o.name, buffer.nbytes))
        if buffer is None or not chosen or not self.carries(o):
            return super().resolve(o)
        if not buffer.count:
            return nothing, NAME, True
        phases = Phases(self, o)
        ends = [end.pointer for end in (o.send, o.recv) if end is not None]
        return in_windows(phases, ends), NAME, phases.lasting

    def route_of(self, name: str, nbytes: int, symmetric: bool = False, graph: bool = False) -> str:
        return NAME if name in CARRIED and self.is_faster(name, nbytes) else self.name

    def details(self) -> list[tuple[str, str, str]]:
        return [*super().details(), (NAME, "no" if self.node is None else "in use", self.hierarchy)]

    # How they are queued.

    def queue(self, works: Sequence[Work[Any]], stream: int | None) -> None:
        """Behind what is queued on other streams: kernels of NCCL and of ``peer`` wait for other ranks, and do not fit
        side by side."""
        streams = {work.stream if stream is None else stream for work in works} if self.node is not None else ()
        if streams:
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
            self.node.inspect(o, self._local)
            self.rail.inspect(o)

    def kernel_waits(self) -> list[int]:
        return [] if self.node is None else [self._local[rank] for rank in self.node.kernel_waits()]

    def signal_abort(self) -> None:
        super().signal_abort()
        for part in self.inner:
            part.signal_abort()

    def abort(self, reason: str) -> None:
        super().abort(reason)
        for part in self.inner:
            part.abort(reason)
        for group in self._groups:
            group.abort(None)

    def close(self) -> None:
        self.unwatch()
        with ExitStack() as rest:  # runs all steps even if one fails
            for group in self._groups:
                rest.callback(group.close)
            rest.callback(super().close)
            for part in self.inner:
                rest.callback(part.close)


def hosts_of(rendezvous: Rendezvous) -> list[list[int]]:
    """The ranks of each host; raises BackendUnavailable, on all ranks, if phases cannot run on them.  Collective."""
    local = [json.loads(each) for each in rendezvous.allgather(json.dumps(rendezvous.local_ranks).encode())]
    size, hosts = len(local[0]), sorted(ranks for rank, ranks in enumerate(local) if rank == ranks[0])
    if len(hosts) == 1:
        raise BackendUnavailable("the ranks are on one host")
    if size == 1 or any(ranks != list(range(i * size, (i + 1) * size)) for i, ranks in enumerate(hosts)):
        got = "; ".join(map(str, hosts[:4])) + "; ..." * (len(hosts) > 4)
        raise BackendUnavailable(f"expected hosts with the same number of ranks in a row, two or more, got {got}")
    return hosts
