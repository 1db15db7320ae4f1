"""Where a step's time goes: ``--profile N`` writes a table of operations, and a trace for Perfetto.

Every operation of the model and every kernel of the optimizer is timed, on a GPU by a pair of events, which a captured
step holds too. Of a collective beside other work, what is timed is the wait for it. Bytes and flops follow from shapes
(``kos.train.device.costs``). Nsight Systems shows single kernels.
"""

from __future__ import annotations

import functools
import json
import math
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from kos.comm.compression import FORMATS
from kos.cuda import streams
from kos.cuda.driver import call, cu
from kos.cuda.streams import is_captured
from kos.train.device.costs import TimedOps, cost
from kos.train.parallel.failures import gather_json

OPTIMIZER = "optimizer"
"""Begins the names of its operations."""

WARM_UP = 3  # steps: in the first, kernels are loaded and the step is captured
LANES = COMPUTE, COMMUNICATION = "compute", "communication"
COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "send", "recv", "send_recv")
LANE_OF = dict.fromkeys(COLLECTIVES, COMMUNICATION)
"""The operations of a communicator that are timed."""


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


class TimedCommunicator:
    """A communicator whose operations, and those of what is split from it, ``profiler`` times once it has begun."""

    def __init__(self, comm: Any, profiler: Profiler) -> None:
        self._comm, self._profiler = comm, profiler

    def split(self, *arguments: Any, **options: Any) -> Any:
        comm = self._comm.split(*arguments, **options)
        return comm and TimedCommunicator(comm, self._profiler)

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._comm, name)
        if name not in LANE_OF:
            return function

        def run(*arguments: Any, **options: Any) -> Any:
            nbytes = max(getattr(x, "nbytes", 0) for x in arguments)
            if form := options.get("compress"):
                nbytes = FORMATS[form].nbytes(max(x.size for x in arguments))
            note = functools.partial(self._profiler.note, name, LANE_OF[name], nbytes=nbytes)
            if not options.get("async_op"):
                return note(lambda: function(*arguments, **options))
            work = function(*arguments, **options)
            return SimpleNamespace(wait=lambda: note(work.wait))

        return run


class Profiler:
    """Times the operations of a device, from ``begin`` on, and its collectives by a ``TimedCommunicator``."""

    def __init__(self) -> None:
        self.spans, self.marks, self.began, self.graph = list[Span](), Marks(), False, False

    def begin(self, device: Any) -> None:
        on_host, step, optimizer = device.config.device == "cpu", device.step, device.step.optimizer
        ops = step.models[0].ops
        self.graph, self.marks = device.config.graph and not on_host, Marks(None if on_host else ops.stream)
        timed = TimedOps(ops, self.timed)
        for model in step.models:
            model.ops = timed
        optimizer.ops = TimedOps(ops, functools.partial(self.timed, prefix=f"{OPTIMIZER}, "))
        self.began = True

    def timed(self, name: str, function: Callable[..., Any], prefix: str = "") -> Callable[..., Any]:
        """``function``, noting its time; its cost is that of its arguments."""

        def run(*arguments: Any, **options: Any) -> Any:
            label = str(arguments[1]) if name == "launch" else name
            moved = cost(label, arguments)
            shape: tuple[int, ...] = ()  # of a product
            if name == "scaled_product":
                shape = *arguments[0].values.shape, len(arguments[1].values)
            elif name.startswith("linear"):
                shape = *arguments[0].shape, arguments[1].shape[1]
                shape = shape if name != "linear" else (shape[0], *arguments[1].shape)
            label += f" {' x '.join(map(str, shape))}" * bool(shape)
            return self.note(prefix + label, COMPUTE, lambda: function(*arguments, **options), *moved)

        return run

    def note(self, label: str, lane: str, function: Callable[[], Any], nbytes: int = 0, flops: float = 0.0) -> Any:
        """Return ``function()`` and record its time. For a captured step, its dry run is not recorded."""
        if not self.began or (self.graph and not self.marks.captured()):
            return function()
        begin, result = self.marks.mark(), function()
        if result is not False:  # False: the dialect has no kernel for this operation, so nothing ran
            self.spans.append(Span(label, lane, begin, self.marks.mark(), nbytes, flops))
        return result

    def run(self, device: Any, first: int, count: int) -> tuple[list[float], list[Span]]:
        """The microseconds of ``count`` steps from ``first`` on, after ``WARM_UP`` more, and what happened in them."""
        self.begin(device)
        lasted, report, clock = [], list[Span](), self.marks.microseconds
        for step in range(first, first + WARM_UP + count):
            if step == first + WARM_UP:
                device.mesh.world.all_gather_bytes(b"")  # ranks begin together
                origin = self.marks.mark()
            if not self.graph:
                self.spans.clear()
            began = self.marks.mark()
            device.start_step(step, False)
            ended = self.marks.mark()
            device.finish_step(step)
            if step < first + WARM_UP:
                continue
            lasted.append(clock(began, ended))
            report += [s._replace(begin=clock(origin, s.begin), end=clock(origin, s.end)) for s in self.spans]
        return lasted, report


def table(lasted: list[float], spans: list[Span]) -> str:
    """Means of steps that ``lasted`` so many microseconds, the longest operation first."""
    rows: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        rows[span.name + ", collective" * (span.lane == COMMUNICATION)].append(span)
    steps, whole, found = len(lasted), sum(lasted), list[tuple[float, str]]()
    for label, each in rows.items():
        us, nbytes, flops = covered(each), sum(s.nbytes for s in each), sum(s.flops for s in each)
        rates = f"{nbytes / us / 1e3:>9.1f}" if nbytes and us else f"{'-':>9}"
        rates += f"{flops / us / 1e6:>9.3f}" if flops and us else f"{'-':>9}"
        line = f"{label:<44}{len(each) / steps:>7.0f}{us / steps / 1e3:>10.3f}{us / whole:>9.1%}{rates}"
        found.append((us, line))
    lines = [line for _, line in sorted(found, key=lambda row: -row[0])]
    outside = 1 - covered([span for span in spans if span.lane == COMPUTE]) / whole
    head = f"{'operation':<44}{'calls':>7}{'ms':>10}{'of step':>9}{'GB/s':>9}{'TFLOP/s':>9}"
    foot = f"{'a step':<51}{whole / steps / 1e3:>10.3f}, {outside:.1%} of it outside of operations"
    return "\n".join([head, *lines, foot])


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


def profile_steps(profiler: Profiler, device: Any, first: int, count: int, out: Path) -> str:
    """Time ``count`` steps, a few after ``first``; this rank's table.  Collective; the weights are trained.

    Rank 0 leaves its table and the trace of all ranks in ``out``: ``profile.txt`` and ``profile.json``.
    """
    lasted, spans = profiler.run(device, first, count)
    shown, comm = table(lasted, spans), device.mesh.world
    ranks = gather_json(comm, [span._asdict() for span in spans])
    if comm.rank == 0:
        (out / "profile.txt").write_text(shown + "\n")
        (out / "profile.json").write_text(json.dumps(to_trace(ranks)))
    return shown
