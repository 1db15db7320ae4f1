"""Where a step's time goes: ``--profile N`` leaves a table of operations and kernels, and a trace for Perfetto.

Every operation of the model, every kernel of the optimizer and every collective is timed: on a GPU by a pair of
events on its own stream, which a captured step holds too, so that the steps are those of a training run.  Where an
operation queues several kernels, an event between them tells their times apart: a quarter more events.  Bytes and
flops follow from shapes; the limit is the longer of what they take at the speed of a large copy and of the
hardware's arithmetic (of a large product, where that is not known).
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kos.comm.communicator import Communicator
from kos.comm.gpu.backend import DeviceBackend, is_captured
from kos.cuda import device_info, streams
from kos.cuda.driver import call, cu
from kos.dtypes import DTYPES
from kos.train.engine.machine import peak_flops
from kos.train.ops import Ops

WARM_UP = 3  # steps: in the first, kernels are loaded and the step is captured
COPIED = 128 << 20  # bytes, more than a cache holds
ROWS_ON_HOST, ROWS = 1024, 4096  # of the square matrices of a large product
COMPUTE, COMMUNICATION = 0, 1  # lanes of a rank
UNTIMED = {"make_arena", "step", "statistics_dtype", "indices", "empty_columns", "to_host", "rope_tables"}
TIMED = {name for name in vars(Ops) if not name.startswith("_")} - UNTIMED | {"launch"}
IN_PLACE = {"cross_entropy": 0, "cross_entropy_with_gradient": 0,
            "rms_norm_backward": 4, "layer_norm_backward": 4}  # fmt: skip
"""Which argument an operation reads and writes."""


class Span(NamedTuple):
    """An operation, or one of several kernels ``of`` it, from mark to mark; in a report in microseconds."""

    name: str
    lane: int
    begin: Any
    end: Any
    nbytes: int = 0
    flops: float = 0.0
    of: str = ""


class Marks:
    """A clock: events of a GPU's streams, or nanoseconds since 1970, as the flight recorder has them."""

    def __init__(self, stream: Any) -> None:
        self.stream = None if stream is None else streams.handle(stream)

    def mark(self, stream: int | None = None) -> Any:
        """When the stream comes to here; in a graph being captured, at each replay."""
        if self.stream is None:
            return time.time_ns()
        event, stream = call(cu.cuEventCreate, 0), stream or self.stream
        external = cu.CUevent_record_flags.CU_EVENT_RECORD_EXTERNAL if is_captured(stream) else 0
        call(cu.cuEventRecordWithFlags, event, stream, external)
        return event

    def microseconds(self, begin: Any, end: Any) -> float:
        """Between two marks; waits until the second is passed."""
        if self.stream is None:
            return float(end - begin) / 1e3
        call(cu.cuEventSynchronize, end)
        return 1e3 * float(call(cu.cuEventElapsedTime, begin, end))


def cost(name: str, arguments: tuple[Any, ...], different: Callable[[int], int] = int) -> tuple[int, float]:
    """Bytes that must move, each array once and one changed in place twice, and flops of matrix products.

    Of so many tokens so many are ``different``: each touches its row of the embedding once.
    """
    arrays = [x for x in arguments if hasattr(type(x), "nbytes")]
    nbytes, flops = sum(int(x.nbytes) for x in arrays), 0.0
    if name in IN_PLACE:
        nbytes += int(arguments[IN_PLACE[name]].nbytes)
    elif name.startswith("embedding"):
        backward = name == "embedding_backward"
        tokens, table = arrays[backward : backward + 2]
        rows = different(int(tokens.size)) * table.shape[1] * table.dtype.itemsize
        if not backward or arguments[3]:  # a gradient that starts anew is written whole
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
    elif name == "squares":  # of the grid's chunks, this rank's share
        from kos.train.ops.cuda.adamw import CHUNK

        nbytes = min(CHUNK * arguments[2], arrays[0].size) * arrays[0].dtype.itemsize
    elif name == "adamw":  # of gradients and the copy, this rank's share
        weights, gradients, first, second, copy = arrays[:5]
        nbytes = 2 * (weights.nbytes + first.nbytes + second.nbytes) + weights.size * gradients.dtype.itemsize
        nbytes += weights.size * copy.dtype.itemsize if copy is not weights else 0
    return nbytes, flops


class Profiler:
    """Watches an engine's model, optimizer and communicator from here on."""

    def __init__(self, engine: Any, comm: Communicator) -> None:
        self.engine, self.comm, self.spans = engine, comm, list[Span]()
        self.kernels: list[Span] | None = None  # of the operation under way
        self.on_host = not hasattr(engine, "ops")
        self.ops = engine.model.ops if self.on_host else engine.ops
        self.marks = Marks(None if self.on_host else self.ops.stream)
        self.different = functools.cache(self._different)
        self.bandwidth, self.arithmetic = self._limits()
        watched = _Watched(self)
        for part in (*engine.models, *(model.tensor for model in engine.models), engine.context):
            part.ops = watched
        if self.on_host:
            engine.start_step = self._alone(engine.start_step)
            engine.optimizer.step = self.timed("optimizer", engine.optimizer.step, (engine.weights.flat,) * 7)
        else:
            engine.optimizer.ops = watched
            self._watch_kernels(self.ops)
            engine.queue_step = self._alone(engine.queue_step)
        for part in getattr(comm.backend, "gpus", (comm.backend,)):
            if isinstance(part, DeviceBackend):
                self._watch(part)

    def timed(self, name: str, function: Callable[..., Any], known: tuple[Any, ...] | None = None) -> Any:
        """``function``, noting its time; its cost is that of ``known`` or of its arguments."""

        def run(*arguments: Any, **options: Any) -> Any:
            begin, self.kernels = self.marks.mark(), []
            result = function(*arguments, **options)
            end, kernels, self.kernels = self.marks.mark(), self.kernels, None
            label = str(arguments[1]) if name == "launch" else name
            moved = cost(label, arguments if known is None else known, self.different)
            if name.startswith("linear"):
                (rows, inner), matrix = arguments[0].shape, arguments[1].shape
                shape = (rows, *matrix) if name == "linear" else (rows, inner, matrix[1])
                label += f" {' x '.join(map(str, shape))}"
            self.spans.append(Span(label, COMPUTE, begin, end, *moved))
            if len(kernels) > 1:
                marks = itertools.pairwise([begin, *(each.begin for each in kernels[1:]), end])
                self.spans += [k._replace(begin=b, end=e, of=label) for k, (b, e) in zip(kernels, marks, strict=True)]
            return result

        return run

    def _watch_kernels(self, ops: Any) -> None:
        """Each but the first of an operation marks where it begins, and so where the one before it ends."""

        def watch(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
            def run(*arguments: Any, **options: Any) -> Any:
                if self.kernels is not None:
                    begin = self.marks.mark() if self.kernels else None
                    label, nbytes = (name, int(arguments[0].nbytes)) if name == "zero" else (str(arguments[1]), 0)
                    self.kernels.append(Span(label, COMPUTE, begin, None, nbytes))
                return function(*arguments, **options)

            return run

        for name in ("launch", "zero"):
            setattr(ops, name, watch(name, getattr(ops, name)))

    def _different(self, tokens: int) -> int:
        """How many of so many tokens are different, in the data of a step like those that are profiled."""
        data = self.engine.data
        return len(np.unique(data.rows(0, range(tokens // data.seq_len))[0]))

    def _alone(self, function: Callable[..., None]) -> Callable[..., None]:
        """A step without what was noted before: another step, or its rehearsal."""

        def run(*arguments: Any) -> None:
            self.spans.clear()
            function(*arguments)

        return run

    def _watch(self, part: Any) -> None:
        """On the caller's stream an operation goes by ``start``, on the communicator's own by ``queue``."""
        noted = False  # whether what is queued now is noted already

        def note(function: Callable[[], Any], calls: Any, stream: int) -> Any:
            nonlocal noted
            if noted:
                return function()
            noted = True
            begin = self.marks.mark(stream)
            try:
                result = function()
            finally:
                noted = False
            ends = [(call.operation.send, call.operation.recv) for call in calls]
            nbytes = sum(max(buffer.nbytes for buffer in pair if buffer is not None) for pair in ends)
            self.spans.append(Span(calls[0].name, COMMUNICATION, begin, self.marks.mark(stream), nbytes))
            return result

        start, queue = part.start, part.queue

        def watched_start(call: Any) -> Any:
            if call.operation.options.overlap:
                return start(call)
            return note(lambda: start(call), [call], call.stream)

        def watched_queue(calls: Any, stream: int | None) -> Any:
            return note(lambda: queue(calls, stream), calls, calls[0].stream if stream is None else stream)

        part.start, part.queue = watched_start, watched_queue

    def _limits(self) -> tuple[float, float]:
        """Bytes and flops a second that this device reaches, or could."""
        zeros = np.zeros if self.on_host else self.ops.zeros

        def fastest(function: Callable[..., Any], *arguments: Any) -> float:
            """Seconds."""
            marks = [self.marks.mark()]
            for _ in range(5):
                function(*arguments)
                marks.append(self.marks.mark())
            return min(map(self.marks.microseconds, marks, marks[1:])) / 1e6

        source, target = (zeros(COPIED, np.uint8) for _ in range(2))
        self.ops.copy(target, source)  # memory that was never written to may not be there
        bandwidth = 2 * COPIED / fastest(self.ops.copy, source, target)
        known = None if self.on_host else peak_flops(device_info(self.ops.device).name)
        if known and self.engine.config.dtype == "bfloat16":
            return bandwidth, known
        rows = ROWS_ON_HOST if self.on_host else ROWS
        a, b, c = (zeros((rows, rows), self.engine.weights.flat.dtype) for _ in range(3))
        return bandwidth, 2.0 * rows**3 / fastest(self.ops.linear, a, b, c)

    def run(self, first: int, count: int) -> tuple[list[float], list[Span]]:
        """The microseconds of ``count`` steps from ``first`` on, after ``WARM_UP`` more, and what happened in them."""
        lasted, report, clock = [], list[Span](), self.marks.microseconds
        for step in range(first, first + WARM_UP + count):
            if step == first + WARM_UP:
                self.comm.all_gather_bytes(b"")  # ranks begin together
                origin = self.marks.mark()
            began = self.marks.mark()
            self.engine.start_step(step, False)
            ended = self.marks.mark()
            self.engine.finish_step(step)
            if step < first + WARM_UP:
                continue
            lasted.append(clock(began, ended))
            spans = self.spans + (self._recorded(began) if self.on_host else [])
            report += [s._replace(begin=clock(origin, s.begin), end=clock(origin, s.end)) for s in spans]
        return lasted, report

    def _recorded(self, since: int) -> list[Span]:
        """The host's collectives, which the flight recorder has timed."""
        spans = []
        for e in self.comm.recorder.entries():
            begin, end = e["time_created_ns"], e["time_discovered_completed_ns"]
            if begin >= since and end:
                nbytes = sum(map(math.prod, e["input_sizes"])) * DTYPES[e["input_dtypes"][0]].itemsize
                spans.append(Span(e["profiling_name"].partition(":")[2], COMMUNICATION, begin, end, nbytes))
        return spans

    def table(self, lasted: list[float], spans: list[Span]) -> str:
        """Means of a step, the longest operation first; below it, in order, the kernels of one that has several."""
        rows: dict[tuple[int, str, str], list[Span]] = defaultdict(list)
        for span in spans:
            rows[span.lane, span.of or span.name, span.of and span.name].append(span)
        times = {key: covered(each) for key, each in rows.items()}
        steps, whole = len(lasted), sum(lasted)
        lines = [f"{'operation':<44}{'calls':>7}{'ms':>10}{'of step':>9}{'GB/s':>9}{'TFLOP/s':>9}{'of limit':>9}"]
        for lane, name, kernel in sorted(rows, key=lambda row: (-times[row[0], row[1], ""], row[:2])):
            each, us = rows[lane, name, kernel], times[lane, name, kernel]
            nbytes, flops = sum(s.nbytes for s in each), sum(s.flops for s in each)
            limit = 1e6 * max(nbytes / self.bandwidth, flops / self.arithmetic) if lane == COMPUTE else 0.0
            per_us = 1 / us if us else 0.0
            figures = (nbytes * per_us / 1e3, ".1f"), (flops * per_us / 1e6, ".3f"), (limit * per_us, ".0%")
            shown = "".join(f"{x:>9{form}}" if x else f"{'-':>9}" for x, form in figures)
            label = f"  {kernel}" if kernel else name + ", collective" * lane
            lines.append(f"{label:<44}{len(each) / steps:>7.0f}{us / steps / 1e3:>10.3f}{us / whole:>9.1%}{shown}")
        busy = covered([span for span in spans if span.lane == COMPUTE])
        lines.append(f"{'a step':<51}{whole / steps / 1e3:>10.3f}, {1 - busy / whole:.1%} of it outside of operations")
        lines.append("over 100%: what mostly reads is faster than a copy, as is what finds its arrays in a cache")
        return "\n".join([*lines, f"limits: {self.bandwidth / 1e9:,.0f} GB/s, {self.arithmetic / 1e12:,.3f} TFLOP/s"])


class _Watched:
    """A dialect whose operations are timed."""

    def __init__(self, profiler: Profiler) -> None:
        self._ops, self._timed = profiler.ops, profiler.timed

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._ops, name)
        return self._timed(name, function) if name in TIMED else function


def covered(spans: list[Span]) -> float:
    """Microseconds in which any of them was under way: collectives overlap one another."""
    total, end = 0.0, -math.inf
    for span in sorted(spans, key=lambda span: span.begin):
        total += max(0.0, span.end - max(span.begin, end))
        end = max(end, span.end)
    return total


def to_trace(ranks: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Spans in the Trace Event Format: a process for each rank, a thread for each lane, kernels within operations.

    Times are multiples of 1/8: whole nanoseconds, so that no kernel ends after its operation.
    """
    events: list[dict[str, Any]] = []
    for rank, spans in enumerate(ranks):
        events.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
        for lane, name in enumerate(("compute", "communication")):
            events.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": lane, "args": {"name": name}})
        for s in spans:
            begin, end = (round(8 * s[at]) / 8 for at in ("begin", "end"))
            place = {"pid": rank, "tid": s["lane"], "ts": begin, "dur": end - begin}
            figures = {"bytes": s["nbytes"], "flops": s["flops"]}
            events.append({"ph": "X", "name": s["name"], **place, "args": figures})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def profile_steps(engine: Any, comm: Communicator, first: int, count: int, out: Path) -> str:
    """Time ``count`` steps, a few after ``first``; this rank's table.  Collective; the weights are trained.

    Rank 0 leaves its table and the trace of all ranks in ``out``: ``profile.txt`` and ``profile.json``.
    """
    profiler = Profiler(engine, comm)
    lasted, spans = profiler.run(first, count)
    table = profiler.table(lasted, spans)
    ranks = comm.all_gather_bytes(json.dumps([span._asdict() for span in spans]).encode())
    if comm.rank == 0:
        (out / "profile.txt").write_text(table + "\n")
        (out / "profile.json").write_text(json.dumps(to_trace([json.loads(spans) for spans in ranks])))
    return table
