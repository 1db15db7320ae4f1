"""Measure the tuning table of this machine: mpirun -n N python -m kos.comm.tune [--largest 1G] [--out FILE]

One rank to a GPU.  Times ``peer`` and ``nccl`` for every operation and size, in graphs and launched one by one, and
every kernel of peer's all-reduce; writes the table that ``auto`` uses from then on with so many ranks here.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from kos.comm import Communicator, init, nccl_binding
from kos.comm.backends.peer import PeerBackend
from kos.comm.launches import Launch, Launches
from kos.comm.tuning import Key, Route, Table, machine, parse, pick, user_path
from kos.cuda import capture, create_stream, driver, set_device, streams
from kos.cuda.driver import call, cu
from kos.errors import InvalidArgument, KosError
from kos.memory.array import Array, as_dtype

KB, MB, GB = 1 << 10, 1 << 20, 1 << 30
SMALLEST = KB
OTHERS = ("reduce_scatter", "all_gather", "all_to_all", "broadcast", "reduce", "gather", "scatter", "send_recv")
_TIE = 1.02
"""What is no more than so much slower stays: a route that jumps from size to size is noise."""
_UNITS = {"K": KB, "M": MB, "G": GB}

Times = dict[int, dict[str, float]]
"""By bytes: microseconds by name."""


def candidates(nbytes: int, symmetric: bool) -> Iterator[Launch]:
    """What is worth trying for an all-reduce of that size."""
    if nbytes <= 512 * KB:
        yield from (Launch("one_shot", threads=threads) for threads in (64, 128, 256))
    if 16 * KB <= nbytes <= 4 * MB:
        yield from (Launch("two_shot", threads=threads) for threads in (64, 128, 256))
        yield from (Launch("two_shot", blocks, threads=threads) for blocks, threads in ((32, 512), (128, 256)))
    if symmetric and 128 * KB <= nbytes <= 16 * MB:
        yield from (Launch("direct", blocks) for blocks in (16, 32, 64))
    if nbytes >= 256 * KB:
        yield from (Launch("push", blocks) for blocks in (32, 64, 128))
    if symmetric and nbytes >= 16 * MB:
        yield from (Launch("copies", pieces=pieces) for pieces in (1, 2))


def crossing(a: int, b: int, before: float | None, after: float | None) -> int:
    """Bytes between ``a`` and ``b`` where two lines of time meet, from how many times slower the other one is at
    ``a`` and at ``b``; half way, as sizes go, if that is not known."""
    if before is None or after is None or before * after <= 1:
        before = after = 2.0
    part = math.log(max(before, 1.0)) / math.log(max(before, 1.0) * max(after, 1.0))
    return round(a * (b / a) ** part)


def best_of(times: Times) -> list[tuple[int | None, str]]:
    """(bytes up to which, name of the fastest), from the times at some sizes."""
    sizes = sorted(times)
    chosen: list[str] = []
    for size in sizes:
        fastest = min(times[size], key=lambda name: times[size][name])
        former = chosen[-1] if chosen else fastest
        stays = times[size].get(former, math.inf) <= _TIE * times[size][fastest]
        chosen.append(former if stays else fastest)
    rows: list[tuple[int | None, str]] = []
    for (a, here), (b, there) in zip(
        zip(sizes, chosen, strict=True), zip(sizes[1:], chosen[1:], strict=False), strict=False
    ):
        if here != there:
            before, after = (times[at].get(other, math.nan) / times[at].get(own, math.nan)
                             for at, own, other in ((a, here, there), (b, there, here)))  # fmt: skip
            known = not (math.isnan(before) or math.isnan(after))
            rows.append((crossing(a, b, before if known else None, after if known else None), here))
    return [*rows, (None, chosen[-1])]


class Tuner:
    """One rank: both backends over the same ranks, buffers, a stream, and what was measured."""

    def __init__(self, peer: Communicator, nccl: Communicator, largest: int) -> None:
        self.peer, self.nccl, self.largest = peer, nccl, largest
        self.rank, self.size = peer.rank, peer.size
        self.sizes = [SMALLEST << i for i in range((largest // SMALLEST).bit_length())]
        self.device = peer.device or 0
        set_device(self.device)
        self.stream = create_stream(self.device)
        self.ordinary = [Array.zeros(largest, "uint8", self.device) for _ in range(2)]
        self.symmetric = [peer.allocate(largest, "uint8") for _ in range(2)]
        for buffer in self.symmetric:
            buffer.fill_bytes(0)
        driver.synchronize(self.device)
        self.measured: list[dict[str, Any]] = []

    def buffers(self, dtype: str, symmetric: bool) -> list[Array]:
        """Input and output, of as many elements as there is room for."""
        count = self.largest // as_dtype(dtype).itemsize
        both = self.symmetric if symmetric else self.ordinary
        return [Array(each.pointer, (count,), as_dtype(dtype), self.device, owner=each) for each in both]

    def bind(self, comm: Communicator, operation: str, nbytes: int, dtype: str, symmetric: bool) -> Callable[[], Any]:
        """A function that launches the operation once more, by whose bytes ``auto`` will route it."""
        x, y = self.buffers(dtype, symmetric)
        n, size, at = nbytes // x.dtype.itemsize, self.size, {"stream": self.stream}
        first = self.rank == 0
        match operation:
            case "all_reduce":
                work = comm.all_reduce_init(x[:n], out=y[:n], **at)
            case "reduce_scatter":
                work = comm.reduce_scatter_init(x[: n // size * size], y[: n // size], **at)
            case "all_gather":
                work = comm.all_gather_init(x[:n], y[: n * size], **at)
            case "all_to_all":
                work = comm.all_to_all_init(x[: n // size * size], y[: n // size * size], **at)
            case "broadcast":
                work = comm.broadcast_init(x[:n], 0, **at)
            case "reduce":
                work = comm.reduce_init(x[:n], 0, out=y[:n] if first else None, **at)
            case "gather":
                work = comm.gather_init(x[:n], 0, y[: n * size] if first else None, **at)
            case "scatter":
                work = comm.scatter_init(x[: n * size] if first else None, y[:n], 0, **at)
            case _:
                after, before = (self.rank + 1) % size, (self.rank - 1) % size
                work = comm.send_recv_init(x[:n], y[:n], after, before, **at)
        return work.start

    def time(self, start: Callable[[], Any], nbytes: int, graph: bool) -> float:
        """Microseconds of one of several in a row: the median, on the slowest rank."""
        depth = 50 if nbytes <= MB else 10 if nbytes <= 16 * MB else 3 if nbytes <= 256 * MB else 1
        start()  # what happens once: connections, kernels
        streams.synchronize(self.stream, self.device)
        turns = 6 if nbytes <= 16 * MB else 4
        times = self._in_graph(start, depth, turns) if graph else self._eager(start, depth, turns)
        everybody = self.peer.rendezvous.allgather(json.dumps(median(times[1:])).encode())
        return max(map(json.loads, everybody))

    def _in_graph(self, start: Callable[[], Any], depth: int, turns: int) -> list[float]:
        with capture(self.stream) as graph:
            for _ in range(depth):
                start()
        begin, end = (call(cu.cuEventCreate, 0) for _ in range(2))
        handle, times = streams.handle(self.stream), []
        for _ in range(turns):
            self.peer.rendezvous.barrier()
            call(cu.cuEventRecord, begin, handle)
            graph.replay(self.stream)
            call(cu.cuEventRecord, end, handle)
            streams.synchronize(self.stream, self.device)
            times.append(1e3 * float(call(cu.cuEventElapsedTime, begin, end)) / depth)
        graph.close()
        for event in (begin, end):
            call(cu.cuEventDestroy, event)
        return times

    def _eager(self, start: Callable[[], Any], depth: int, turns: int) -> list[float]:
        times = []
        for _ in range(turns):
            self.peer.rendezvous.barrier()
            began = time.perf_counter()
            for _ in range(depth):
                start()
            streams.synchronize(self.stream, self.device)
            times.append(1e6 * (time.perf_counter() - began) / depth)
        return times

    def launches(self, symmetric: bool) -> tuple[tuple[float, Launch], ...]:
        """The fastest kernels of peer's all-reduce (bf16, in graphs)."""
        backend, times, named = self._peer, Times(), {}
        for nbytes in self.sizes:
            times[nbytes] = {}
            for launch in candidates(nbytes, symmetric):
                alone = ((math.inf, launch),)
                backend.use(Launches(alone, alone))
                start = self.bind(self.peer, "all_reduce", nbytes, "bfloat16", symmetric)
                named[repr(launch)] = launch
                times[nbytes][repr(launch)] = self.time(start, nbytes, graph=True)
        return tuple((math.inf if limit is None else limit, named[name]) for limit, name in best_of(times))

    @property
    def _peer(self) -> PeerBackend:
        assert isinstance(self.peer.backend, PeerBackend)
        return self.peer.backend

    def route(self, key: Key) -> Route:
        """Which backend is faster, by size."""
        operation, wide, symmetric, graph = key
        times: Times = {}
        whole = operation in ("all_gather", "gather", "scatter")
        for nbytes in self.sizes:
            if nbytes * (self.size if whole else 1) > self.largest:
                break
            times[nbytes] = {}
            for name, comm in (("peer", self.peer), ("nccl", self.nccl)):
                start = self.bind(comm, operation, nbytes, "float32" if wide else "bfloat16", symmetric)
                times[nbytes][name] = self.time(start, nbytes, graph)
            us = {name: round(value, 2) for name, value in times[nbytes].items()}
            self.measured.append({"operation": operation, "wide": wide, "symmetric": symmetric, "graph": graph,
                                  "bytes": nbytes, **us})  # fmt: skip
        return tuple(best_of(times))

    def table(self, say: Callable[[str], None]) -> Table:
        gpu, link = machine(self.device)
        found = {}
        for symmetric in (True, False):
            found[symmetric] = self.launches(symmetric)
            kind = "symmetric" if symmetric else "ordinary"
            say(f"peer's all_reduce, {kind} buffers: {len(found[symmetric])} kinds of launches")
        launches = Launches(symmetric=found[True], ordinary=found[False])
        self._peer.use(launches)
        keys: list[Key] = [
            ("all_reduce", wide, symmetric, graph)
            for wide in (False, True) for symmetric in (True, False) for graph in (True, False)
        ]  # fmt: skip
        keys += [(operation, False, False, graph) for operation in OTHERS for graph in (True, False)]
        routes = {}
        for key in keys:
            routes[key] = self.route(key)
            say(f"{' '.join(map(str, key))}: " + ", ".join(f"{name} to {limit}" for limit, name in routes[key]))
        return Table(gpu, link, self.size, "measured now", launches, simplified(routes, self.measured))


def simplified(routes: Mapping[Key, Route], measured: Sequence[Mapping[str, Any]]) -> dict[Key, Route]:
    """One route for calls in graphs and others, where that costs neither more than a tie: looking costs time too."""
    kept = dict(routes)
    for key, route in routes.items():
        operation, wide, symmetric, graph = key
        other = operation, wide, symmetric, not graph
        rows = [m for m in measured if (m["operation"], m["wide"], m["symmetric"], m["graph"]) == other]
        if graph and all(m[pick(route, m["bytes"])] <= _TIE * min(m["peer"], m["nccl"]) for m in rows):
            kept.pop(other, None)
    return kept


def write(path: Path, data: Mapping[str, Any]) -> None:
    """The whole file or none; it must be readable as a table."""
    parse(data, str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=path.name, delete=False) as file:
        file.write(_by_lines(data) + "\n")
    os.chmod(file.name, 0o644)
    os.replace(file.name, path)


def _by_lines(data: Mapping[str, Any]) -> str:
    """JSON with a line for each route and measurement."""
    lines = ["{"]
    for key, value in data.items():
        end = "" if key == list(data)[-1] else ","
        if isinstance(value, dict) and key != "provenance":
            rows = [f"  {json.dumps(name)}: {json.dumps(each)}" for name, each in value.items()]
            lines += [f' "{key}": {{', ",\n".join(rows), f" }}{end}"]
        elif isinstance(value, list):
            lines += [f' "{key}": [', ",\n".join("  " + json.dumps(each) for each in value), f" ]{end}"]
        else:
            lines.append(f" {json.dumps(key)}: {json.dumps(value)}{end}")
    return "\n".join([*lines, "}"])


def provenance() -> dict[str, Any]:
    from cuda.core import system

    return {
        "date": datetime.now(UTC).date().isoformat(),
        "driver": ".".join(map(str, system.get_kernel_mode_driver_version())),
        "NCCL": nccl_binding.version(),
        "CUDA": ".".join(map(str, system.get_user_mode_driver_version())),
        "commit": os.environ.get("KOS_COMMIT", ""),
        "command": " ".join(["python -m kos.comm.tune", *sys.argv[1:]]),
    }


def _bytes(text: str) -> int:
    unit = _UNITS.get(text[-1:].upper(), 1)
    digits = text[:-1] if unit > 1 else text
    if not digits.isdecimal() or not SMALLEST <= int(digits) * unit <= 4 * GB:
        raise argparse.ArgumentTypeError(f"expected a size from 1K to 4G, got {text!r}")
    return int(digits) * unit


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    lines = (__doc__ or "").splitlines()
    parser = argparse.ArgumentParser(prog="python -m kos.comm.tune", description=" ".join(lines[2:]))
    parser.add_argument("--largest", type=_bytes, default=GB, metavar="SIZE", help="measure up to this size (1G)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where to write it (default: the user's cache)")
    options = parser.parse_args(arguments)
    try:
        with init("peer") as peer, init("nccl") as nccl:
            if peer.size == 1:
                raise InvalidArgument("tune: expected two ranks or more, got 1: start it by mpirun")
            tuner = Tuner(peer, nccl, options.largest)
            table = tuner.table(partial(print, flush=True) if peer.rank == 0 else lambda text: None)
            if peer.rank == 0:
                path = options.out or user_path(table.gpu, table.ranks)
                write(path, {**table.to_json(), "provenance": provenance(), "measured": tuner.measured})
                print(f"written: {path}")
    except KosError as error:
        print(f"kos: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
