"""Where a step's time goes: ``--profile N`` writes a table of operations, and a trace for Perfetto.

Every operation of the model and every kernel of the optimizer is timed, on a GPU by a pair of events, which a captured
step holds too. Of a collective beside other work, what is timed is the wait for it. Bytes and flops follow from shapes;
the limit is the longer of what they take at the speed of a large copy and of the hardware's arithmetic (of a large
product, where that is not known). Nsight Systems shows single kernels.
"""

from __future__ import annotations

import json
import math
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kos.cuda import device_info, streams
from kos.cuda.driver import call, cu
from kos.cuda.streams import is_captured
from kos.train.engine.machine import peak_flops
from kos.train.ops import Ops

WARM_UP = 3  # steps: in the first, kernels are loaded and the step is captured
COPIED = 128 << 20  # bytes, more than a cache holds
ROWS_ON_HOST, ROWS = 1024, 4096  # of the square matrices of a large product
LANES = COMPUTE, COMMUNICATION = "compute", "communication"
UNTIMED = {"make_arena", "zeros", "step", "statistics_dtype", "indices", "empty_columns", "to_host", "rope_tables"}
TIMED = {name for name in vars(Ops) if not name.startswith("_")} - UNTIMED | {"launch"}
IN_PLACE = {"cross_entropy": 0, "rms_norm_backward": 4, "layer_norm_backward": 4}
"""Which argument an operation reads and writes."""
COLLECTIVES = {"all_reduce", "reduce_scatter", "all_gather", "all_to_all", "send", "recv", "send_recv"}


class Span(NamedTuple):
    """An operation or a collective, from mark to mark; in a report in microseconds."""

    name: str
    lane: str
    begin: Any
    end: Any
    nbytes: int = 0
    flops: float = 0.0


class Marks:
    """A clock: events of a GPU's stream, or nanoseconds of the host."""

    def __init__(self, stream: Any = None) -> None:
        self.stream = None if stream is None else streams.handle(stream)

    def captured(self) -> bool:
        """Whether marks are being captured in a graph, which records them again at each replay."""
        return self.stream is not None and is_captured(self.stream)

    def mark(self) -> Any:
        if self.stream is None:
            return time.perf_counter_ns()
        event, flags = call(cu.cuEventCreate, 0), cu.CUevent_record_flags.CU_EVENT_RECORD_EXTERNAL
        call(cu.cuEventRecordWithFlags, event, self.stream, flags if self.captured() else 0)
        return event

    def microseconds(self, begin: Any, end: Any) -> float:
        """Between two marks; waits until the second is passed."""
        if self.stream is None:
            return float(end - begin) / 1e3
        call(cu.cuEventSynchronize, end)
        return 1e3 * float(call(cu.cuEventElapsedTime, begin, end))

    def fastest(self, function: Callable[..., Any], *arguments: Any) -> float:
        """The seconds of the fastest of five calls."""
        marks = [self.mark()]
        for _ in range(5):
            function(*arguments)
            marks.append(self.mark())
        return min(map(self.microseconds, marks, marks[1:])) / 1e6


class TimedCommunicator:
    """A communicator whose operations, and those of what is split from it, ``profiler`` times once it has begun."""

    def __init__(self, comm: Any, profiler: Profiler) -> None:
        self._comm, self._profiler = comm, profiler

    def split(self, *arguments: Any, **options: Any) -> Any:
        comm = self._comm.split(*arguments, **options)
        return comm and TimedCommunicator(comm, self._profiler)

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._comm, name)
        if name not in COLLECTIVES:
            return function

        def run(*arguments: Any, **options: Any) -> Any:
            nbytes = max(getattr(x, "nbytes", 0) for x in arguments)
            if options.get("async_op"):
                return TimedWork(name, nbytes, function(*arguments, **options), self._profiler)
            return self._profiler.note(name, COMMUNICATION, lambda: function(*arguments, **options), nbytes)

        return run


class TimedWork(NamedTuple):
    """A ``Work`` of a ``TimedCommunicator``."""

    name: str
    nbytes: int
    work: Any
    profiler: Profiler

    def wait(self) -> Any:
        return self.profiler.note(self.name, COMMUNICATION, self.work.wait, self.nbytes)


class TimedOps:
    """A dialect whose operations are wrapped by ``timed(name, operation)``."""

    def __init__(self, ops: Any, timed: Callable[[str, Callable[..., Any]], Callable[..., Any]]) -> None:
        self._ops, self._timed = ops, timed

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._ops, name)
        setattr(self, name, self._timed(name, function) if name in TIMED else function)  # not asked for again
        return getattr(self, name)


def cost(name: str, arguments: tuple[Any, ...]) -> tuple[int, float]:
    """Bytes that must move, each array once and one changed in place twice, and flops of matrix products.

    Of an embedding: the rows of all tokens, or the whole table if that is less.
    """
    arrays = [x for x in arguments if hasattr(type(x), "nbytes")]
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
    elif name == "swiglu_backward":
        nbytes -= int(arguments[2].nbytes)  # what the forward wrote can be worked out from its input
    elif name.startswith("linear"):  # of a gradient, the second array has the columns that the first has not
        flops = 2.0 * arrays[0].size * arrays[1].shape[name != "linear"]
    elif name.startswith("attention_to"):  # every query to every key
        backward = name == "attention_to_backward"
        out, log_sum_exp = arguments[3:5] if backward else arguments[6:8]
        queries, keys = (len(range(part.start, part.stop)) for part in arguments[7 if backward else 4 :][:2])
        flops = 4.0 * out.size * queries * keys / log_sum_exp.shape[-1] * (2.5 if backward else 1.0)
    elif name.startswith("attention"):  # causal: half of T x T; the backward makes five products of the forward's two
        backward = name == "attention_backward"
        out, log_sum_exp = arguments[2:4] if backward else arguments[3:5]
        flops = 2.0 * out.size * log_sum_exp.shape[-1] * (2.5 if backward else 1.0)
    elif name in ("squares", "exact_squares", "largest"):  # this rank's share of the grid's chunks
        from kos.train.ops.cuda.adamw import CHUNK

        nbytes = min(CHUNK * arguments[2], arrays[0].size) * arrays[0].dtype.itemsize
    elif name == "adamw":  # of gradients and the copy, this rank's share
        weights, gradients, first, second, copy = arrays[:5]
        nbytes = 2 * (weights.nbytes + first.nbytes + second.nbytes) + weights.size * gradients.dtype.itemsize
        nbytes += weights.size * copy.dtype.itemsize if copy is not weights else 0
    return nbytes, flops


class Profiler:
    """Times the operations of an engine, from ``begin`` on, and its collectives by a ``TimedCommunicator``."""

    def __init__(self) -> None:
        self.spans, self.marks, self.began, self.graph = list[Span](), Marks(), False, False

    def begin(self, engine: Any) -> None:
        self.engine, self.comm = engine, engine.mesh.world
        self.on_host = engine.config.device == "cpu"
        self.graph = engine.config.graph and not self.on_host
        self.ops = engine.model.ops
        self.marks = Marks(None if self.on_host else self.ops.stream)
        self.bandwidth, self.arithmetic = self._limits()
        timed = TimedOps(self.ops, self.timed)
        for part in (*engine.models, *(model.tensor for model in engine.models), engine.context):
            part.ops = timed
        if self.on_host:
            engine.queue_update = self.timed("optimizer", engine.queue_update, (engine.weights.flat,) * 7)
        else:
            engine.optimizer.ops = timed
        self.began = True

    def timed(self, name: str, function: Callable[..., Any], known: tuple[Any, ...] | None = None) -> Any:
        """``function``, noting its time; its cost is that of ``known`` or of its arguments."""

        def run(*arguments: Any, **options: Any) -> Any:
            label = str(arguments[1]) if name == "launch" else name
            moved = cost(label, arguments if known is None else known)
            if name.startswith("linear"):
                (rows, inner), matrix = arguments[0].shape, arguments[1].shape
                shape = (rows, *matrix) if name == "linear" else (rows, inner, matrix[1])
                label += f" {' x '.join(map(str, shape))}"
            return self.note(label, COMPUTE, lambda: function(*arguments, **options), *moved)

        return run

    def note(self, label: str, lane: str, function: Callable[[], Any], nbytes: int = 0, flops: float = 0.0) -> Any:
        """Return ``function()`` and record its time. For a captured step, the rehearsal is not recorded."""
        if not self.began or (self.graph and not self.marks.captured()):
            return function()
        begin = self.marks.mark()
        result = function()
        self.spans.append(Span(label, lane, begin, self.marks.mark(), nbytes, flops))
        return result

    def _limits(self) -> tuple[float, float]:
        """The bytes and flops per second that this device reaches, or could reach."""
        source, target = (self.ops.zeros(COPIED, np.uint8) for _ in range(2))
        self.ops.copy(target, source)  # memory that was never written to may not be there
        bandwidth = 2 * COPIED / self.marks.fastest(self.ops.copy, source, target)
        known = None if self.on_host else peak_flops(device_info(self.ops.device).name)
        if known and self.engine.config.dtype == "bfloat16":
            return bandwidth, known
        rows = ROWS_ON_HOST if self.on_host else ROWS
        a, b, c = (self.ops.zeros((rows, rows), self.engine.weights.flat.dtype) for _ in range(3))
        return bandwidth, 2.0 * rows**3 / self.marks.fastest(self.ops.linear, a, b, c)

    def run(self, first: int, count: int) -> tuple[list[float], list[Span]]:
        """The microseconds of ``count`` steps from ``first`` on, after ``WARM_UP`` more, and what happened in them."""
        lasted, report, clock = [], list[Span](), self.marks.microseconds
        for step in range(first, first + WARM_UP + count):
            if step == first + WARM_UP:
                self.comm.all_gather_bytes(b"")  # ranks begin together
                origin = self.marks.mark()
            if not self.graph:
                self.spans.clear()
            began = self.marks.mark()
            self.engine.start_step(step, False)
            ended = self.marks.mark()
            self.engine.finish_step(step)
            if step < first + WARM_UP:
                continue
            lasted.append(clock(began, ended))
            report += [s._replace(begin=clock(origin, s.begin), end=clock(origin, s.end)) for s in self.spans]
        return lasted, report

    def table(self, lasted: list[float], spans: list[Span]) -> str:
        """Means of a step, the longest operation first."""
        rows: dict[tuple[str, str], list[Span]] = defaultdict(list)
        for span in spans:
            rows[span.name, span.lane].append(span)
        times = {key: covered(each) for key, each in rows.items()}
        steps, whole = len(lasted), sum(lasted)
        lines = [f"{'operation':<44}{'calls':>7}{'ms':>10}{'of step':>9}{'GB/s':>9}{'TFLOP/s':>9}{'of limit':>9}"]
        for name, lane in sorted(rows, key=lambda row: -times[row]):
            each, us = rows[name, lane], times[name, lane]
            nbytes, flops = sum(s.nbytes for s in each), sum(s.flops for s in each)
            limit = 1e6 * max(nbytes / self.bandwidth, flops / self.arithmetic) if lane == COMPUTE else 0.0
            per_us = 1 / us if us else 0.0
            figures = (nbytes * per_us / 1e3, ".1f"), (flops * per_us / 1e6, ".3f"), (limit * per_us, ".0%")
            shown = "".join(f"{x:>9{form}}" if x else f"{'-':>9}" for x, form in figures)
            label = name + ", collective" * (lane == COMMUNICATION)
            lines.append(f"{label:<44}{len(each) / steps:>7.0f}{us / steps / 1e3:>10.3f}{us / whole:>9.1%}{shown}")
        busy = covered([span for span in spans if span.lane == COMPUTE])
        lines.append(f"{'a step':<51}{whole / steps / 1e3:>10.3f}, {1 - busy / whole:.1%} of it outside of operations")
        lines.append("over 100%: what mostly reads is faster than a copy, as is what finds its arrays in a cache")
        return "\n".join([*lines, f"limits: {self.bandwidth / 1e9:,.0f} GB/s, {self.arithmetic / 1e12:,.3f} TFLOP/s"])


def covered(spans: list[Span]) -> float:
    """Microseconds in which at least one of them was in progress: collectives overlap one another."""
    total, end = 0.0, -math.inf
    for span in sorted(spans, key=lambda span: span.begin):
        total += max(0.0, span.end - max(span.begin, end))
        end = max(end, span.end)
    return total


def to_trace(ranks: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Spans in the Trace Event Format: a process for each rank, a thread for each lane."""
    events: list[dict[str, Any]] = []
    for rank, spans in enumerate(ranks):
        events.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
        for number, lane in enumerate(LANES):
            events.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": number, "args": {"name": lane}})
        for s in spans:
            place = {"pid": rank, "tid": LANES.index(s["lane"]), "ts": s["begin"], "dur": s["end"] - s["begin"]}
            figures = {"bytes": s["nbytes"], "flops": s["flops"]}
            events.append({"ph": "X", "name": s["name"], **place, "args": figures})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def profile_steps(profiler: Profiler, engine: Any, first: int, count: int, out: Path) -> str:
    """Time ``count`` steps, a few after ``first``; this rank's table.  Collective; the weights are trained.

    Rank 0 leaves its table and the trace of all ranks in ``out``: ``profile.txt`` and ``profile.json``.
    """
    profiler.begin(engine)
    comm = engine.mesh.world
    lasted, spans = profiler.run(first, count)
    table = profiler.table(lasted, spans)
    ranks = comm.all_gather_bytes(json.dumps([span._asdict() for span in spans]).encode())
    if comm.rank == 0:
        (out / "profile.txt").write_text(table + "\n")
        (out / "profile.json").write_text(json.dumps(to_trace([json.loads(spans) for spans in ranks])))
    return table
