"""The tuning table of this machine: ``mpirun -n N kos bench --write-table``, with a rank for each GPU.

Times ``peer`` and ``nccl`` for every operation and size, in graphs and as eager calls, and every
kernel of peer's all-reduce.  Writes the table that ``auto`` then uses for this number of ranks on this machine.  Ranks
on several hosts time phases (``hierarchical``) and ``nccl`` instead, for this number of hosts.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from statistics import median
from typing import Any

from kos.bench.report import provenance
from kos.comm import Communicator, init
from kos.comm.gpu.hierarchical import CARRIED, HierarchicalBackend
from kos.comm.gpu.peer.backend import PeerBackend
from kos.comm.gpu.routes import PHASES
from kos.comm.tuning import KernelConfig, Launches, Route, Table, key, machine, parse, pick, user_path
from kos.cuda import capture, create_stream, driver, set_device, streams
from kos.errors import InvalidArgument
from kos.files import check_writable, replace_file
from kos.memory.array import Array, as_dtype

KB, MB, GB = 1 << 10, 1 << 20, 1 << 30
SMALLEST, LARGEST = KB, 4 * GB
"""Of the sizes that may be measured."""
OTHERS = ("reduce_scatter", "all_gather", "all_to_all", "broadcast", "reduce", "gather", "scatter", "send_recv")
_TIE, _NOISE = 1.02, 0.05
"""A route is replaced if it is slower by more than the factor ``_TIE``, since smaller differences are noise; or if the
other route is faster by more than ``_NOISE`` microseconds and 0.5%, and also fastest at the next size."""
_CHOICE = 1.1
"""A choice between an eager and a graph route takes a tenth of the time of a small call."""
_EAGER_UP_TO = 4 * MB
"""Bytes of the largest eager calls that are measured: larger ones take as long as in a graph."""

Times = dict[int, dict[str, float]]
"""Microseconds by number of bytes and name."""


def candidates(nbytes: int, symmetric: bool) -> Iterator[KernelConfig]:
    """The launches worth trying for an all-reduce of that size."""
    if nbytes <= 512 * KB:
        yield from (KernelConfig("one_shot", threads=threads) for threads in (64, 128, 256))
    if 16 * KB <= nbytes <= 4 * MB:
        yield from (KernelConfig("two_shot", threads=threads) for threads in (64, 128, 256))
        yield from (KernelConfig("two_shot", blocks, threads=threads) for blocks, threads in ((32, 512), (128, 256)))
    if symmetric and 128 * KB <= nbytes <= 16 * MB:
        yield from (KernelConfig("direct", blocks) for blocks in (16, 32, 64))
    if nbytes >= 256 * KB:
        yield from (KernelConfig("push", blocks) for blocks in (32, 64, 128))
    if symmetric and 4 * MB <= nbytes <= 64 * MB:
        yield from (KernelConfig("specialized", tile=tile) for tile in (32 * KB, 64 * KB))
    if symmetric and nbytes >= 16 * MB:
        yield from (KernelConfig("copies", pieces=pieces) for pieces in (1, 2))


def best_of(times: Times) -> list[tuple[int | None, str]]:
    """(largest number of bytes, name of the fastest), from the times at some sizes."""
    rows: list[tuple[int | None, str]] = []
    former, smaller = "", 0
    sizes = sorted(times)
    for size, larger in zip_longest(sizes, sizes[1:]):
        here, next_ = times[size], times.get(larger, {})
        fastest = min(here, key=lambda name: here[name])
        lead = here.get(former, math.inf) - here[fastest]
        next_too = fastest == min(next_, key=lambda name: next_[name], default=None)
        ahead = next_too and lead > max(_NOISE, here[fastest] / 200)
        if former and (ahead or here[fastest] * (_TIE - 1) < lead):
            rows.append((crossing(times, smaller, size, former, fastest), former))
            former = fastest
        former, smaller = former or fastest, size
    return [*rows, (None, former)]


def crossing(times: Times, a: int, b: int, before: str, after: str) -> int:
    """Bytes between sizes ``a`` and ``b`` where two time curves cross; the geometric mean if that is not known."""
    lead = math.log(times[a].get(after, math.nan) / times[a][before])  # of the faster route at a
    lag = math.log(times[b].get(before, math.nan) / times[b][after])
    part = max(lead, 0.0) / (max(lead, 0.0) + max(lag, 0.0)) if lead + lag > 0 else 0.5
    return round(a * (b / a) ** part)


def outliers(times: Times) -> list[int]:
    """The sizes whose fastest route differs from the one that both neighbouring sizes share: perhaps by chance."""
    fastest = [(nbytes, min(us, key=lambda name: us[name])) for nbytes, us in sorted(times.items())]
    return [at for (_, a), (at, b), (_, c) in zip(fastest, fastest[1:], fastest[2:], strict=False) if a == c != b]


class Tuner:
    """One rank: both backends over the same ranks, buffers, a stream, and the measurements."""

    first = "peer"

    def __init__(
        self, peer: Communicator, nccl: Communicator, largest: int, others: Mapping[str, Communicator] | None = None
    ) -> None:
        """``others`` are backends of other packages, by name."""
        self.peer, self.largest = peer, largest
        self._timed = {self.first: peer, "nccl": nccl, **(others or {})}
        self.rank, self.size = peer.rank, peer.size
        self.sizes = [SMALLEST << i for i in range((largest // SMALLEST).bit_length())]
        self.device = peer.device or 0
        set_device(self.device)
        self.stream = create_stream(self.device)
        nccl.barrier(stream=self.stream)  # NCCL connects now, and not while ``peer`` is measured
        self.ordinary = [Array.zeros(largest, "uint8", self.device) for _ in range(2)]
        self.symmetric = [peer.allocate(largest, "uint8") for _ in range(2)]
        for buffer in self.symmetric:
            buffer.fill_bytes(0)
        driver.synchronize(self.device)
        self.measured: list[dict[str, Any]] = []

    def buffers(self, dtype: str, symmetric: bool) -> list[Array]:
        """Input and output, with the largest number of elements that fits."""
        count = self.largest // as_dtype(dtype).itemsize
        both = self.symmetric if symmetric else self.ordinary
        return [Array(each.pointer, (count,), dtype, self.device, owner=each) for each in both]

    def bind(self, comm: Communicator, operation: str, nbytes: int, dtype: str, symmetric: bool) -> Callable[[], Any]:
        """A function that launches the operation; ``nbytes`` are the bytes by which ``auto`` routes it."""
        x, y = self.buffers(dtype, symmetric)
        rank, size, n = self.rank, self.size, nbytes // x.dtype.itemsize
        part, whole, root = n // size, n // size * size, rank == 0
        arguments: dict[str, dict[str, Any]] = {
            "all_reduce": {"x": x[:n], "out": y[:n]},
            "reduce_scatter": {"x": x[:whole], "out": y[:part]},
            "all_gather": {"x": x[:n], "out": y[: n * size]},
            "all_to_all": {"x": x[:whole], "out": y[:whole]},
            "broadcast": {"x": x[:n]},
            "reduce": {"x": x[:n], "out": y[:n] if root else None},
            "gather": {"x": x[:n], "out": y[: n * size] if root else None},
            "scatter": {"x": x[: n * size] if root else None, "out": y[:n]},
            "send_recv": {"x": x[:n], "out": y[:n], "dst": (rank + 1) % size, "src": (rank - 1) % size},
        }
        return partial(getattr(comm, operation), **arguments[operation], stream=self.stream)

    def time(self, start: Callable[[], Any], nbytes: int, graph: bool) -> float:
        """Microseconds per call, of several in a row: the median, on the slowest rank."""
        depth = 50 if nbytes <= MB else 10 if nbytes <= 16 * MB else 3 if nbytes <= 256 * MB else 1
        start()  # warm-up: connects ranks, loads kernels
        streams.synchronize(self.stream, self.device)
        repeats = 6 if nbytes <= 16 * MB else 4
        seconds = [each / depth for each in (self._in_graph if graph else self._eager)(start, depth, repeats)]
        everybody = self.peer.rendezvous.allgather(json.dumps(1e6 * median(seconds[1:])).encode())
        return max(map(json.loads, everybody))

    def _in_graph(self, start: Callable[[], Any], depth: int, repeats: int) -> Iterator[float]:
        with capture(self.stream) as graph:
            for _ in range(depth):
                start()
        for _ in range(repeats):
            self.peer.rendezvous.barrier()
            yield 1e-3 * streams.milliseconds(lambda: graph.replay(self.stream), self.stream)
        graph.close()

    def _eager(self, start: Callable[[], Any], depth: int, repeats: int) -> Iterator[float]:
        for _ in range(repeats):
            self.peer.rendezvous.barrier()
            began = time.perf_counter()
            for _ in range(depth):
                start()
            streams.synchronize(self.stream, self.device)
            yield time.perf_counter() - began

    def launches(self, symmetric: bool) -> tuple[tuple[int | None, KernelConfig], ...]:
        """The fastest kernels of peer's all-reduce (bf16, in graphs)."""
        times, named = Times(), {}
        for nbytes in self.sizes:
            times[nbytes] = {}
            for launch in candidates(nbytes, symmetric):
                alone = ((None, launch),)
                self._peer.use(Launches(alone, alone))
                start = self.bind(self.peer, "all_reduce", nbytes, "bfloat16", symmetric)
                named[repr(launch)] = launch
                times[nbytes][repr(launch)] = self.time(start, nbytes, graph=True)
            self._record(f"launches of {'symmetric' if symmetric else 'ordinary'}", nbytes, times[nbytes])
        return tuple((limit, named[name]) for limit, name in best_of(times))

    def _record(self, what: str, nbytes: int, times: Mapping[str, float]) -> None:
        us = {name: round(value, 2) for name, value in times.items()}
        self.measured.append({"route": what, "bytes": nbytes, **us})

    @property
    def _peer(self) -> PeerBackend:
        route = self.peer.backend.routes[0]
        assert isinstance(route, PeerBackend)
        return route

    def route(self, operation: str, wide: bool, symmetric: bool, graph: bool, larger: Times) -> tuple[Route, Times]:
        """The faster backend by size, and the times.  ``larger``: the times of sizes that are not measured again."""
        whole = operation in ("all_gather", "gather", "scatter")
        most = self.largest // (self.size if whole else 1)

        def measured(nbytes: int) -> dict[str, float]:
            return {
                name: self.time(
                    self.bind(comm, operation, nbytes, "float32" if wide else "bfloat16", symmetric), nbytes, graph
                )
                for name, comm in self._timed.items()
            }

        times = {n: larger[n] if n in larger else measured(n) for n in self.sizes if n <= most}
        for nbytes in (each for each in outliers(times) if each not in larger):
            again = measured(nbytes)
            times[nbytes] = {name: min(us, again[name]) for name, us in times[nbytes].items()}
        for nbytes, us in times.items():
            if nbytes not in larger:
                self._record(key(operation, wide, symmetric, graph), nbytes, us)
        return tuple(best_of(times)), times

    def table(self, say: Callable[[str], None]) -> Table:
        """Measure the whole table."""
        launches = Launches(symmetric=self.launches(True), ordinary=self.launches(False))
        say(f"peer's all_reduce: {len(launches.symmetric)} and {len(launches.ordinary)} kinds of launches")
        self._peer.use(launches)
        both = (False, True)
        calls = [("all_reduce", *options) for options in itertools.product(both, both)]
        direct = ("all_gather", "all_to_all")  # they have kernels of their own for symmetric buffers
        calls += [(name, False, False) for name in OTHERS] + [(name, False, True) for name in direct]
        routes = {}
        for operation, wide, symmetric in calls:
            larger: Times = {}
            for graph in (True, False):
                name = key(operation, wide, symmetric, graph)
                routes[name], times = self.route(operation, wide, symmetric, graph, larger)
                larger = {nbytes: us for nbytes, us in times.items() if nbytes > _EAGER_UP_TO}
                say(f"{name}: " + ", ".join(f"{backend} to {limit}" for limit, backend in routes[name]))
        gpu, link = machine(self.device)
        return Table(gpu, link, self.size, "measured now", launches, simplified(routes, self.measured))


class TunerBetweenHosts(Tuner):
    """As ``Tuner``; ``peer`` is a communicator of ``auto``, whose calls go in phases."""

    first = PHASES

    def table(self, say: Callable[[str], None]) -> Table:
        backend = self.peer.backend
        part = next(route for route in backend.routes if isinstance(route, HierarchicalBackend))
        if part.table is None:
            raise InvalidArgument(f"--write-table: {part.reason}")
        names = {operation: key(operation, False, False, True) for operation in CARRIED}
        backend.use(replace(part.table, routes=dict.fromkeys(names.values(), ((None, PHASES),))))
        routes = {}
        for operation, name in names.items():
            routes[name], _ = self.route(operation, False, False, True, {})
            say(f"{name}: " + ", ".join(f"{backend} to {limit}" for limit, backend in routes[name]))
        return replace(part.table, source="measured now", routes=routes)


def simplified(routes: Mapping[str, Route], measured: Sequence[Mapping[str, Any]]) -> dict[str, Route]:
    """Remove an eager route if the graph route is as fast: choosing between two routes costs time."""
    result = dict(routes)
    for name, route in routes.items():
        eager = name.replace(" graph", " eager")
        rows = [m for m in measured if m["route"] == eager]
        if eager != name and all(m[pick(route, m["bytes"])] <= _CHOICE * min(_times(m)) for m in rows):
            result.pop(eager, None)
    return result


def _times(row: Mapping[str, Any]) -> list[float]:
    return [us for name, us in row.items() if name not in ("route", "bytes")]


def write(path: Path, data: Mapping[str, Any]) -> None:
    """Write the file atomically, after checking that it is a valid table."""
    parse(data, str(path))
    replace_file(path, json.dumps(data, indent=1).encode())


def check_output(out: Path | None) -> None:
    """Raise InvalidArgument, before the measurement, if the table could not be written to ``out``."""
    if out is None:
        out = user_path("gpu", 2)
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidArgument(f"{out.parent}: expected a folder to write to (or --json), got: {error}") from error
    check_writable(out)


def write_table(out: Path | None, largest: int, others: Sequence[str]) -> int:
    """Measure the table, and write it to ``out`` or to the user's cache; returns the exit status of the command.

    ``others`` are backends of other packages, which are measured too.
    """
    with ExitStack() as stack:
        nccl = stack.enter_context(init("nccl"))
        peer = stack.enter_context(init("peer" if nccl.local_size == nccl.size else "auto"))
        more = {name: stack.enter_context(init(name)) for name in others}
        if peer.size == 1:
            raise InvalidArgument("--write-table: expected two ranks or more, got 1: start it by mpirun")
        tuner = (Tuner if peer.local_size == peer.size else TunerBetweenHosts)(peer, nccl, largest, more)
        table = tuner.table(partial(print, flush=True) if peer.rank == 0 else lambda text: None)
    if peer.rank == 0:
        path = out or user_path(table.gpu, table.ranks, table.hosts)
        about = provenance("kos.bench", peer.device, table.ranks)
        data = {**table.to_json(), "provenance": about, "measured": tuner.measured}
        try:
            write(path, data)
        except OSError as error:
            print(json.dumps(data))
            print(f"kos: error: {path} was not written ({error}): the table is printed above", file=sys.stderr)
            return 1
        print(f"written: {path}")
    return 0
