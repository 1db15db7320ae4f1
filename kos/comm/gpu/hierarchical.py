"""HierarchicalBackend: large collectives between hosts with several GPUs each, in phases.

Within a host ``peer`` carries them (``node``), between hosts NCCL does, on *rails* (``rail``): rank i of each host with
rank i of the others.  An all_reduce is a reduce-scatter within each host, an all_reduce of the shards on the rails and
an all-gather within each host.  So 2(h-1)/h of the data leave a host of h, where a ring of all n ranks sends 2(n-1)/n.
16-bit floats are added in fp32 within a host, and rounded once for each host.

The phases of a call follow each other on one stream.  They are not pipelined: a kernel of ``peer`` and one of NCCL side
by side would each wait for other GPUs, on which the other one may hold the multiprocessors.

It is a route beside ``nccl``, which carries all other calls.  ``deterministic=True`` stays on NCCL's exchange between
all ranks (``composed``).  It adds in rank order, ((x0 + x1) + x2) + x3, and phases would add the sums of hosts,
(x0 + x1) + (x2 + x3).  So do calls for which neither a measured tuning table nor the prediction of ``links`` finds
phases faster.

A compressed all_reduce or reduce_scatter always runs in phases.  They compress only on the rails (see
``compression``).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from kos.comm.compression import IN_PHASES, shards
from kos.comm.contract import UNMADE, Backend, Probe
from kos.comm.control.base import ControlPlane
from kos.comm.gpu.composed import bind_feed_back
from kos.comm.gpu.devices import table_between
from kos.comm.gpu.nccl import NCCLBackend
from kos.comm.gpu.peer.backend import PeerBackend
from kos.comm.gpu.routes import PHASES
from kos.comm.operation import Operation, Options
from kos.comm.reduction import ReduceOp, resolve
from kos.comm.work import Engine, Work
from kos.cuda.kernels import Address, Plan
from kos.errors import BackendUnavailable, KosError
from kos.memory import Buffer
from kos.memory.symmetric import on_all

CARRIED = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all")
SEND, RECV, SCRATCH = range(3)
Place = tuple[int, int, int]
"""An array of the call (``SEND``, ``RECV``) or scratch memory, elements after its first, and their number."""


class Phases:
    """The step that runs one operation: plans of ``node`` and ``rail``, on its arrays and scratch memory.

    Of L ranks on each of h hosts, rank l of host k is rank k * L + l.
    """

    def __init__(self, backend: Any, node: Backend, rail: Backend, o: Operation) -> None:
        assert o.recv is not None
        self._backend, self._o, self._like = backend, o, o.send or o.recv
        self._node, self._rail, self._hosts = node, rail, rail.size
        self._sent, self._received = self._like.count, o.recv.count
        self._scratch = 0  # elements
        self._plans: list[tuple[Backend, Plan, int, int, int, int]] = []  # array and offset read, those written
        self.cacheable = True
        getattr(self, f"_{o.name}")()

    def __call__(self, stream: int, send: int = 0, recv: int = 0) -> None:
        nbytes = self._scratch * self._like.dtype.itemsize  # a part of its own: the phases have scratch memory too
        starts = send, recv, self._backend.scratch(nbytes, stream, PHASES)
        for part, plan, source, offset, target, place in self._plans:
            part.start(plan, stream, starts[source] + offset, starts[target] + place)

    def _all_reduce(self) -> None:
        whole = self._sent
        shard, counts = self._shard(whole)
        self._add(self._node, "reduce_scatter", (SEND, 0, whole), shard, counts)
        self._feed_back(shard)
        self._add(self._rail, "all_reduce", shard, shard)
        self._add(self._node, "all_gather", shard, (RECV, 0, whole), counts)

    def _reduce_scatter(self) -> None:
        """Within each host, a reduce-scatter for the ranks of each host.  Then, on the rails, another one."""
        part, of_host = self._received, self._received * self._node.size
        self._scratch = self._hosts * part
        for host in range(self._hosts):
            self._add(self._node, "reduce_scatter", (SEND, host * of_host, of_host), (SCRATCH, host * part, part))
        self._feed_back((SCRATCH, 0, self._scratch))
        self._add(self._rail, "reduce_scatter", (SCRATCH, 0, self._scratch), (RECV, 0, part))

    def _all_gather(self) -> None:
        """On the rails first.  Then, within each host, an all-gather of the ranks of one host after another."""
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
        """Within each host, data goes to the rank on the target's rail; on the rails, each host gets one message."""
        part, self._scratch = self._sent // self._hosts, self._sent
        for host in range(self._hosts):
            self._add(self._node, "all_to_all", (SEND, host * part, part), (SCRATCH, host * part, part))
        self._add(self._rail, "all_to_all", (SCRATCH, 0, self._sent), (RECV, 0, self._sent))

    def _shard(self, count: int) -> tuple[Place, list[int] | None]:
        """Scratch memory for this rank's shard of what its host shares, and the size of each if they differ."""
        size, counts = self._node.size, None
        part, unit = count // size, max(16 // self._like.dtype.itemsize, 1)
        if self._o.options.compress:
            counts = shards(count, size)
        elif count % size:
            most = -(-count // (size * unit)) * unit
            counts = [max(0, min(most, count - i * most)) for i in range(size)]
        if counts is not None:
            part = counts[self._node.rank]
            counts = counts if min(counts) < part or part < max(counts) else None
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
        form = self._o.options.compress if reduction is not None and part is self._rail else ""
        options = Options(timeout=self._o.options.timeout, compress=form)
        plan = part.resolve(Operation(name, part.rank, options, source, target, reduction, root, **sizes))
        self.cacheable &= plan.cacheable
        itemsize, (array, start, _) = self._like.dtype.itemsize, send or recv
        self._plans.append((part, plan, array, start * itemsize, recv[0], recv[1] * itemsize))

    def _feed_back(self, place: Place) -> None:
        """Add the launch of error feedback, if the call has a residual."""
        if self._o.residual is not None:
            compress, at = self._o.options.compress, place[1] * self._like.dtype.itemsize
            plan = bind_feed_back(self._rail, self._buffer(0, *place), self._o.residual, compress)
            self._plans.append((self._rail, plan, place[0], at, place[0], at))

    def _buffer(self, number: int, array: int, start: int, count: int) -> Buffer:
        """Those elements, as array ``number`` of a launch."""
        like = (self._o.send, self._o.recv, None)[array]
        aligned = (0 if like is None else like.pointer % 16) + start * self._like.dtype.itemsize
        pointer: Any = Address(number, 0, aligned % 16)
        return replace(self._like, count=count, shape=(count,), pointer=pointer)


class HierarchicalBackend(Backend):
    """Phases over ``node`` and ``rail`` between hosts with the same number of ranks.

    Creation is collective.  If the hosts do not allow phases, this backend carries no operation, and ``details`` shows
    the reason.
    """

    name = PHASES
    on_host, on_gpu, sets_device = False, True, True
    by_capture = NCCLBackend.by_capture  # of the rails
    node: PeerBackend | None = None
    rail: NCCLBackend | None = None

    @classmethod
    def probe(cls, rendezvous: ControlPlane) -> Probe:
        return Probe(rendezvous.local_size < rendezvous.size, "phases between hosts")

    def __init__(self, rendezvous: ControlPlane, engine: Engine, device: int | None = None) -> None:
        super().__init__(rendezvous, engine, device)
        self._parts: tuple[Backend, ...] = ()
        self._groups: tuple[ControlPlane, ...] = ()
        try:
            self._divide(rendezvous)
        except BackendUnavailable as error:  # on all ranks
            self.reason = str(error)  # the hosts of the phases, or why there are none

    def _divide(self, rendezvous: ControlPlane) -> None:
        """Make ``node`` and ``rail``.  Raises BackendUnavailable on all ranks if a host cannot take part in phases."""
        hosts = hosts_of(rendezvous)
        mine, place = divmod(self.rank, len(hosts[0]))
        self._local = hosts[mine]
        with ExitStack() as undo:
            of_node, of_rail = rendezvous.split(mine, place), rendezvous.split(place, mine)
            assert of_node is not None and of_rail is not None
            for group in (of_node, of_rail):
                undo.callback(group.abort, None)
                group.nccl = rendezvous.nccl

            made: list[PeerBackend] = []

            def make_node() -> None:
                made.append(PeerBackend(of_node, self.engine, self.device))
                undo.callback(made[0].abort, UNMADE)

            try:
                on_all(rendezvous, "map the memory of its host's ranks", make_node)
            except KosError as error:
                if rendezvous.failures.over is not None:
                    raise
                raise BackendUnavailable(str(error)) from error
            rail = NCCLBackend(of_rail, self.engine, self.device)
            undo.callback(rail.abort, UNMADE)
            assert self.device is not None
            self.table = table_between(rendezvous, self.device, len(hosts))
            undo.pop_all()
        self.node, self.rail, node = made[0], rail, made[0]
        self._groups, self._parts = (of_node, of_rail), (node, rail)
        for part in self._parts:
            part.failures = self.failures
        self.exact_group_size = node.size
        self.serial, self.failed, self.failed_word = True, node.failed, node.failed_word
        self.reason = f"{len(hosts)} hosts of {len(self._local)} ranks"

    def open(self, backend: Any) -> None:
        for part in self._parts:
            part.backend = backend
            part.open(backend)
        self.set_timeout(backend.timeout)

    def connect(self) -> None:
        for part in self._parts:
            part.connect()

    def set_timeout(self, seconds: float) -> None:
        for part in self._parts:
            part.set_timeout(seconds)

    # Which calls go in phases.

    def carries(self, o: Operation) -> bool:
        """Whether phases can carry it with the results that kos promises; the same on all ranks."""
        options, buffer = o.options, o.send or o.recv
        if self.node is None or o.name not in CARRIED or buffer is None:
            return False
        rounds_twice = o.reduction is not None and buffer.dtype.name.startswith("float8")
        if options.compress:
            return o.name in IN_PHASES and not options.deterministic
        return not (options.deterministic or rounds_twice)

    def resolve(self, o: Operation) -> Plan:
        buffer = o.send or o.recv
        assert buffer is not None and self.node is not None and self.rail is not None
        if not buffer.count:
            return Plan((), PHASES)
        phases = Phases(self.backend, self.node, self.rail, o)
        return Plan((phases,), PHASES, cacheable=phases.cacheable)

    def entered(self, stream: int) -> None:
        for part in self._parts:
            part.entered(stream)

    def details(self) -> list[tuple[str, str, str]]:
        return [(PHASES, "no" if self.node is None else "in use", self.reason)]

    # Failures, and the end.

    def inspect(self, work: Work[Any]) -> None:
        if self.node is not None and self.rail is not None:
            self.node.inspect(work, self._local)
            self.rail.inspect(work)

    @property
    def abort_flags(self) -> list[int]:
        return [flag for part in self._parts for flag in part.abort_flags]

    def end_waits(self) -> str:
        """Only a kernel of ``node`` reports what it waits for.  A kernel of NCCL may be running instead."""
        return self.node.end_waits() if self.node is not None and self.node.kernel_waits() else ""

    def kernel_waits(self) -> list[int]:
        return [] if self.node is None else [self._local[rank] for rank in self.node.kernel_waits()]

    def split(self, rendezvous: ControlPlane | None, color: int | None, key: int) -> Callable[..., Backend] | None:
        return None if rendezvous is None or rendezvous.local_size == rendezvous.size else HierarchicalBackend

    def abort(self, reason: str) -> str:
        for part in self._parts:
            part.abort(reason)
        return reason

    def drained(self, final: bool) -> None:
        for part in self._parts:
            part.drained(final)
        for group in self._groups if final else ():
            group.abort(None)

    def close(self, begun: int) -> None:
        with ExitStack() as rest:  # runs all steps even if one fails
            for group in self._groups:
                rest.callback(group.close)
            for part in self._parts:
                rest.callback(part.close, begun)


def hosts_of(rendezvous: ControlPlane) -> list[list[int]]:
    """The ranks of each host; raises BackendUnavailable, on all ranks, if phases cannot run on them.  Collective."""
    local = [json.loads(each) for each in rendezvous.allgather(json.dumps(rendezvous.local_ranks).encode())]
    size, hosts = len(local[0]), sorted(ranks for rank, ranks in enumerate(local) if rank == ranks[0])
    if len(hosts) == 1:
        raise BackendUnavailable("the ranks are on one host")
    if size == 1 or any(ranks != list(range(i * size, (i + 1) * size)) for i, ranks in enumerate(hosts)):
        got = "; ".join(map(str, hosts[:4])) + "; ..." * (len(hosts) > 4)
        raise BackendUnavailable(f"expected hosts with the same number of ranks in a row, two or more, got {got}")
    return hosts
