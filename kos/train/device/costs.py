"""What operations and collectives cost by their shapes, how fast hardware is, and a clock that they advance.

Costs are bytes that must move, and flops of matrix products. Rates of GPUs are measurements in ``rates.toml``, those of
this machine's CPU two measurements made now.
"""

from __future__ import annotations

import math
import os
import re
import timeit
import tomllib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kos.comm.compression import FORMATS
from kos.comm.reduction import ReduceOp
from kos.errors import ConfigError, SettingError
from kos.train.machine import DRIVER, PEAK_FLOPS
from kos.train.ops import NEWTON_SCHULZ, Array, Attend, Normalize, Scaled, attended_pairs
from kos.train.ops import numpy as numpy_ops
from kos.train.ops.protocol import Ops
from kos.train.parallel.mesh import Layout

UNTIMED = {"make_arena", "zeros", "step", "statistics_dtype", "indices", "empty_columns", "to_host", "rope_tables",
           "columns_of", "fuses_swiglu", "bits_of_parts"}  # fmt: skip
TIMED = {name for name in vars(Ops) if not name.startswith("_")} - UNTIMED | {"launch", "update"}
IN_PLACE = {"cross_entropy": 0, "normalize_backward": 4}
"""Which argument an operation reads and writes."""


class TimedOps:
    """A dialect whose operations are wrapped by ``timed(name, operation)``."""

    def __init__(self, ops: Any, timed: Callable[[str, Callable[..., Any]], Callable[..., Any]]) -> None:
        self._ops, self._timed = ops, timed

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._ops, name)
        setattr(self, name, self._timed(name, function) if name in TIMED else function)  # not asked for again
        return getattr(self, name)


def update_bytes(weights: int, gradients: int, state: int, copy: int = 0) -> int:
    """What an update moves, by the bytes of its arrays: weights and state are read and written, a copy is written."""
    return 2 * (weights + state) + gradients + copy


def _arrays(argument: Any) -> tuple[Any, ...]:
    """The arrays of a record, but for the mask of attention; or what else an argument is."""
    if isinstance(argument, Scaled | Normalize):
        return argument
    if not isinstance(argument, Attend):
        return (argument,)
    return argument.qkv, argument.out, argument.log_sum_exp, argument.kv


def cost(name: str, arguments: tuple[Any, ...]) -> tuple[int, float]:
    """Bytes that must move, each array once and one changed in place twice, and flops of matrix products.

    Of an embedding: the rows of all tokens, or the whole table if that is less.
    """
    flat = [each for x in arguments for each in _arrays(x)]
    arrays = [x for x in flat if hasattr(type(x), "nbytes")]
    nbytes, flops = sum(int(x.nbytes) for x in arrays), 0.0
    if name in IN_PLACE:
        nbytes += int(arguments[IN_PLACE[name]].nbytes)
    elif name.startswith("embedding"):
        backward = name == "embedding_backward"
        tokens, table = arrays[backward : backward + 2]
        rows = min(int(tokens.size), len(table)) * table.shape[1] * table.dtype.itemsize
        if not backward or arguments[3]:  # a gradient that is not accumulated is written whole
            nbytes += (2 * rows if backward else rows) - int(table.nbytes)
    elif name.startswith("rope"):  # of each row the first heads, in place
        x, _, head_dim, heads = arguments[:4]
        nbytes = 2 * len(x) * heads * head_dim * x.dtype.itemsize
    elif name == "swiglu_backward" and arguments[2] is not None:
        nbytes -= int(arguments[2].nbytes)  # what the forward wrote can be worked out from its input
    elif name.startswith("linear"):  # of a gradient, the second array has the columns that the first has not
        flops = 2.0 * arrays[0].size * arrays[1].shape[name != "linear"]
    elif name == "product_of_parts":
        flops = 2.0 * arrays[0].size * arrays[2].shape[1]
    elif name == "low_rank":
        nbytes += int(arguments[2].nbytes) if arguments[5] else 0
        flops = 2.0 * arrays[0].size * arrays[2].shape[1]
    elif name == "scaled_product":
        flops = 2.0 * arrays[0].size * len(arrays[2])
    elif name == "quantize_rms_norm":  # rows are read twice
        nbytes += int(arrays[0].nbytes)
    elif name in ("attention", "attention_backward"):  # backward: five products, not two
        attend, backward = arguments[0], name.endswith("backward")
        pairs = attend.mask.pairs if attend.mask else None
        if pairs is None and attend.kv is not None:  # every query to every key
            pairs = math.prod(part.stop - part.start for part in (attend.queries, attend.keys))
        elif pairs is None:
            pairs = attended_pairs(attend.length)
        flops = 4.0 * attend.out.size * pairs / attend.length * (2.5 if backward else 1.0)
    elif name in ("squares", "reproducible_squares", "largest"):  # this rank's share of the grid's chunks
        from kos.train.optim import CHUNK

        nbytes = min(CHUNK * arguments[2], arrays[0].size) * arrays[0].dtype.itemsize
    elif name == "orthogonalize":  # in a step three products, of operands of two shapes
        x = arrays[0]
        least, most = sorted(x.shape[-2:])
        nbytes = len(NEWTON_SCHULZ) * (5 * nbytes + 4 * nbytes * least // most)
        flops = len(NEWTON_SCHULZ) * 2.0 * x.size * least * (2 + least / most)
    elif name == "update":  # of all but the state, the share of this rank and rule
        weights, gradients, state, copy = arguments[1:5]
        share = (state[0] if state else weights).size
        of_each = update_bytes(
            weights.dtype.itemsize, gradients.dtype.itemsize, sum(x.dtype.itemsize for x in state),
            copy.dtype.itemsize if copy is not weights else 0,
        )  # fmt: skip
        nbytes = share * of_each
    return nbytes, flops


COPIED = 128 << 20  # bytes, more than a cache holds
ROWS = 1024  # of the square matrices of a large product


class Rates(NamedTuple):
    """Rates of the hardware of one rank."""

    name: str
    linear: float  # flops a second of matrix products
    attention: tuple[float, float]  # of its forward and its backward
    memory: float  # bytes a second
    operation: float  # seconds that each takes at least
    wire: float  # bytes a second to another rank
    latency: float  # seconds of a collective, at least
    overlap: bool  # whether collectives overlap with operations
    fp8: float = 0.0  # flops a second of products in 8 bits; 0: it has none


class Gpu(NamedTuple):
    """From a data sheet: bytes per second of memory and, in one direction, of NVLink; also the bytes of free memory."""

    memory: float
    link: float
    free: int
    attention_kernels: str  # the fastest set that it runs, of KERNEL_SETS

    multiprocessors: int = 132  # these of a Hopper, for ``DryCudaOps``
    shared_memory: int = 227 << 10
    one_scale: bool = False
    hopper: bool = True
    sequential: bool = False
    device: int = 0
    stream: Any = None


_TABLES = tomllib.loads(Path(__file__).with_name("rates.toml").read_text("utf-8"))
GPUS = {name: Gpu(**sheet) for name, sheet in _TABLES["gpus"].items()}
GPU, HOST = _TABLES["gpu"], _TABLES["host"]
"""Fractions of the hardware's rates, and seconds."""


def gpu_rates(name: str, head_dim: int) -> Rates:
    """Rates of the first of ``GPUS`` whose name is part of ``name``. ConfigError if there is none."""
    known = next((part for part in GPUS if part in name), None)
    if known is None:
        raise ConfigError(f"--gpu: expected one of {', '.join(GPUS)}, got {name!r}")
    gpu, peak = GPUS[known], PEAK_FLOPS[known]
    sizes = sorted(map(int, GPU["attention"]))
    size = next((each for each in sizes if each >= head_dim), sizes[-1])  # others take as long as the next larger
    forward, backward = (rate * min(1.0, head_dim / size) for rate in GPU["attention"][str(size)])
    fp8 = GPU["fp8"] * peak if gpu.attention_kernels == "hopper" else 0.0
    return Rates(
        known, GPU["linear"] * peak, (forward * peak, backward * peak), GPU["memory"] * gpu.memory,
        GPU["operation"], GPU["wire"] * gpu.link, GPU["latency"], True, fp8,
    )  # fmt: skip


def cpu_rates(ranks: int) -> Rates:
    """Rates of each of ``ranks`` ranks that share the cores of this machine. Takes a second."""
    a, b, c = (np.zeros((ROWS, ROWS), np.float32) for _ in range(3))
    source, target = (np.ones(COPIED, np.uint8) for _ in range(2))
    cores = len(os.sched_getaffinity(0))
    flops = 2.0 * ROWS**3 / _fastest(lambda: numpy_ops.linear(a, b, c)) / ranks
    copied = 2 * COPIED / _fastest(lambda: numpy_ops.copy(source, target)) * min(1.0, cores / ranks)  # by one core
    name = f"the CPU, {cores} core{'s' * (cores > 1)}"
    return Rates(
        name, HOST["linear"] * flops, (HOST["attention"] * flops,) * 2, HOST["memory"] * copied,
        HOST["operation"], HOST["wire"] * copied / 2, HOST["latency"], False, HOST["linear"] * flops,
    )  # fmt: skip


def _fastest(function: Callable[[], None]) -> float:
    """The seconds of the fastest of five calls."""
    return min(timeit.repeat(function, number=1, repeat=5))


def gpu_here() -> str | None:
    """The name of this machine's first GPU, without starting CUDA."""
    for path in sorted(DRIVER.glob("gpus/*/information")):
        if name := re.search(r"^Model:\s*(.+)$", path.read_text(), re.MULTILINE):
            return name[1]
    return None


class Network(NamedTuple):
    """The hosts of a job, with as many ranks each, and the bytes per second that leave each."""

    hosts: int
    rate: float
    phases: bool = True
    """Whether exact collectives go in phases where that is faster than a ring of all ranks."""

    def local(self, layout: Layout, *axes: str) -> int:
        """How many ranks of a group along these axes each host has. ConfigError if hosts differ."""
        groups = defaultdict[tuple[int, ...], Counter[int]](Counter)
        for rank in range(layout.ranks):
            place = layout.coordinates(rank).items()
            groups[tuple(at for axis, at in place if axis not in axes)][rank * self.hosts // layout.ranks] += 1
        counts = [[*group.values()] for group in groups.values()]
        for each in counts:
            if {*each} != {counts[0][0]}:
                expected = f"as many ranks of {' and '.join(axes)} on every host"
                raise SettingError(f"--hosts {self.hosts}", expected, each)
        return counts[0][0]


ONE_HOST = Network(1, 0.0)


class Clock:
    """``spent``: the seconds of one rank, by axis the bytes that it has sent, and those that have left its host.

    ``log``: actions, collectives (by axis), norm and update, each with its start and end in seconds.
    """

    def __init__(self, rates: Rates, network: Network = ONE_HOST) -> None:
        self.rates, self.network, self.spent = rates, network, defaultdict[str, float](float)
        self.message = 0.0  # seconds of the longest between two stages
        self.log: list[tuple[str, float, float]] = []

    def operate(self, name: str, nbytes: int, flops: float) -> None:
        rates, moving = self.rates, nbytes / self.rates.memory
        if name.startswith("attention"):
            seconds = moving + flops / rates.attention["backward" in name]
        else:
            seconds = max(moving, flops / (rates.fp8 if name == "scaled_product" else rates.linear))
        self.spent["seconds"] += rates.operation + seconds

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """An operation that takes time."""

        def run(*arguments: Any) -> Any:
            self.operate(name, *cost(name, arguments))
            return function(*arguments)

        return run

    def wait(self, until: float) -> None:
        self.spent["seconds"] = max(self.spent["seconds"], until)

    @contextmanager
    def logged(self, what: str) -> Iterator[None]:
        """Note the start and the end of what the context does."""
        start = self.spent["seconds"]
        yield
        self.log.append((what, start, self.spent["seconds"]))


class Arrival(NamedTuple):
    """A Work that ends at a time of the clock."""

    clock: Clock
    end: float

    def wait(self) -> None:
        self.clock.wait(self.end)


class Link:
    """Stands in for the communicator of an axis: counts what its rank sends, and how long that takes.

    Its ranks are on so many ``hosts``.  ``beside``: the groups of this axis on each, which send at the same time.
    """

    def __init__(self, clock: Clock, axis: str, rank: int, size: int, hosts: int = 1, beside: int = 1) -> None:
        self.clock, self.axis, self.rank, self.size, self._free = clock, axis, rank, size, 0.0
        self._hosts, self._beside = hosts, beside

    device = None

    def exact_group_size(self, device: int | None = None) -> int:
        return self.size // self._hosts if self._hosts > 1 else 1

    def split(self, color: int | None, key: int | None = None) -> Link:
        return self

    def all_reduce(
        self, x: Array, op: ReduceOp = ReduceOp.SUM, *, async_op: bool = False, compress: str | None = None,
        residual: Array | None = None, deterministic: bool = False,
    ) -> Arrival:  # fmt: skip
        return self._reduce(2, x, async_op, compress, residual)

    def reduce_scatter(
        self, x: Array, out: Array, *, async_op: bool = False, compress: str | None = None,
        residual: Array | None = None,
    ) -> Arrival:  # fmt: skip
        return self._reduce(1, x, async_op, compress, residual)

    def _reduce(self, passes: int, x: Array, async_op: bool, compress: str | None, residual: Array | None) -> Arrival:
        if residual is not None:
            self.clock.operate("feed_back", 4 * residual.nbytes, 0.0)
        if compress is None:
            return self._collective(passes, x.nbytes, async_op)
        whole, hosts, wire = FORMATS[compress].nbytes(x.size), self._hosts, self.clock.rates.wire
        if hosts == 1:
            return self._collective(passes, whole, async_op)
        local = self.size // hosts
        within, between = passes * x.nbytes * (local - 1) / local, passes * whole * (hosts - 1) / hosts
        out = self._beside * between
        return self._queue(within + between / local, out / self.clock.network.rate + within / wire, out, async_op)

    def all_gather(self, x: Array, out: Array, *, async_op: bool = False) -> Arrival:
        return self._collective(1, x.nbytes * self.size, async_op)

    def reduce(self, x: Array, root: int, *, async_op: bool = False) -> Arrival:
        return self._collective(1, x.nbytes, async_op)

    broadcast = reduce

    def send_recv(self, x: Array, out: Array, to: int, source: int, *, async_op: bool = False) -> Arrival:
        return self._queue(x.nbytes, *self._message(x, self._hosts > 1), async_op)

    def send(self, x: Array, to: int, *, async_op: bool = False) -> Arrival:
        clock, local = self.clock, self.size // self._hosts
        seconds, out = self._message(x, to // local != self.rank // local)
        clock.spent[self.axis] += x.nbytes
        clock.spent["hosts"] += out
        clock.message = max(clock.message, clock.rates.latency + seconds)
        return Arrival(clock, 0.0)

    def recv(self, x: Array, source: int, *, async_op: bool = False) -> Arrival:
        return Arrival(self.clock, 0.0)

    def _message(self, x: Array, leaves: bool) -> tuple[float, float]:
        """Seconds of a message that one rank of each group sends out of its host, and bytes that leave it."""
        out = x.nbytes * self._beside * leaves
        return max(x.nbytes / self.clock.rates.wire, out / self.clock.network.rate if leaves else 0.0), out

    def _collective(self, passes: int, whole: int, async_op: bool) -> Arrival:
        """One that sends ``whole``, the bytes of all, so many times: each rank the part of the others."""
        sent, wire = passes * whole * (self.size - 1) / self.size, self.clock.rates.wire
        hosts, network, local = self._hosts, self.clock.network, self.size // self._hosts
        if hosts == 1:
            return self._queue(sent, sent / wire, 0.0, async_op)
        least = self._beside * whole * (hosts - 1) / hosts
        ring = self._beside * whole * (self.size - 1) / self.size
        ways = [(passes * ring, 0.0)]
        if network.phases:
            ways.append((passes * least, passes * whole * (local - 1) / local / wire))
        seconds, out = min((out / network.rate + within, out) for out, within in ways)
        return self._queue(sent, seconds, out, async_op)

    def _queue(self, sent: float, seconds: float, out: float, async_op: bool) -> Arrival:
        clock, rates = self.clock, self.clock.rates
        clock.spent[self.axis] += sent
        if out:
            clock.spent["hosts"] += out
        start = max(self._free, clock.spent["seconds"])
        self._free = start + rates.latency + seconds
        clock.log.append((self.axis, start, self._free))
        arrival = Arrival(clock, self._free)
        if not async_op or not rates.overlap:
            arrival.wait()
        return arrival
