"""The flight recorder: always records the last operations of a rank, and dumps them after a failure.

A call writes one entry of a ring of 1,024: a description of the operation, never its arrays.  Entries are formatted at
the dump.  Dumps are JSON with the keys of PyTorch's flight recorder (version 2:
torch/csrc/distributed/c10d/FlightRecorder.hpp), one file per rank.  ``python -m kos.comm.recorder`` reads them.

Launches are traced on request of the environment.  KOS_NVTX=1: a range of NVTX around the launch of every operation,
for Nsight Systems.  KOS_RECORDER_TIMING=1: entries have ``duration_ms`` for operations on a GPU, by events around them.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import weakref
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from importlib import import_module
from pathlib import Path
from time import time_ns
from types import CodeType, FrameType
from typing import Any, NamedTuple

from kos.comm.operation import ANY
from kos.cuda import driver
from kos.cuda.streams import Event, capture_of
from kos.environment import KOS_NVTX, KOS_RECORDER_DIR, KOS_RECORDER_TIMING
from kos.errors import BackendUnavailable, InvalidArgument, KosError, install, is_on
from kos.files import replace_file
from kos.memory import Buffer

log = logging.getLogger(__name__)

VERSION = "2.10"  # of PyTorch's format
SLOTS = 1024  # a power of two
"""Operations kept per rank."""

LAST_SLOT = SLOTS - 1
CODE, INSTRUCTION, SEQUENCE, COMPLETED, ERROR = 2, 3, 4, -2, -1  # indices of an _Entry


class _Entry(NamedTuple):
    """The fields of a slot, in order; the last two change when the operation ends."""

    # A Group and an Operation; all starts of a Prepared have the same tuple.  If the core has made the call from one of
    # another size, the tuple also has the shapes of its input and output, and the counts of a v-form.
    description: tuple[Any, ...]
    created: int  # nanoseconds since 1970
    code: CodeType  # with ``instruction``: the call site
    instruction: int
    sequence: int
    completed: int | None  # nanoseconds since 1970; 0: in progress
    error: str | None


class Group:
    """One communicator as the recorder knows it; ``ranks`` are its ranks in the world."""

    def __init__(self, recorder: Recorder, name: str, ranks: list[int], rank: int, backend: str) -> None:
        self.recorder, self.name, self.ranks, self.rank, self.backend = recorder, name, ranks, rank, backend
        self.number = recorder.add(self)


class Recorder:
    """The last operations of one rank, over a communicator and its splits.

    Its methods raise nothing, except ``dump``: InvalidArgument if the file cannot be written.  ``reason`` is a text in
    a dump.
    """

    def __init__(self, rank: int, size: int, job: str = "") -> None:
        self.rank, self.size, self.job = rank, size, job
        self.slots: list[list[Any]] = [[None] * len(_Entry._fields) for _ in range(SLOTS)]
        self.counter = array("Q", [0])  # recorded operations; the core counts too
        # With KOS_RECORDER_TIMING, by the id of a slot: when its operation was recorded, and what returns its duration.
        self.durations: dict[int, tuple[int, Callable[[], float | None]]] = {}
        self._groups: weakref.WeakValueDictionary[int, Group] = weakref.WeakValueDictionary()
        self._numbers = itertools.count()
        self._open: set[int] = set()
        self._directory = KOS_RECORDER_DIR.get()
        self._failed = False
        recorders.add(self)

    @property
    def count(self) -> int:
        """The number of recorded operations."""
        return self.counter[0]

    def add(self, group: Group) -> int:
        """Add a group, held weakly; returns its number on this rank."""
        number = next(self._numbers)
        self._groups[number] = group
        self._open.add(number)
        return number

    def close(self, group: Group, reason: str = "closed") -> None:
        """Close a group; after the last one, signals no longer dump this recorder."""
        self.try_dump(reason)
        self._open.discard(group.number)
        if not self._open:
            recorders.discard(self)

    def entries(self) -> list[dict[str, Any]]:
        """The operations, oldest first, with the keys of PyTorch's entries and four more.

        These are ``reduce_op``, ``root``, ``tag`` and ``error``.  ``send_recv`` becomes two entries.  With
        KOS_RECORDER_TIMING=1 operations that a GPU has completed have ``duration_ms``.
        """
        numbers = range(max(0, self.count - SLOTS), self.count)
        copied = [(n, tuple(slot), self._duration(slot)) for n in numbers for slot in [self.slots[n & LAST_SLOT]]]
        described = ((_describe(number, _Entry(*slot)), timed) for number, slot, timed in copied if slot[0])
        return [entry | timed for entries, timed in described for entry in entries]

    def _duration(self, slot: list[Any]) -> dict[str, float]:
        created, duration = self.durations.get(id(slot), (None, None))
        milliseconds = duration() if duration is not None and created == slot[1] else None
        return {} if milliseconds is None else {"duration_ms": milliseconds}

    def to_dict(self, reason: str = "") -> dict[str, Any]:
        """The contents of a dump; ``reason`` is why it is written."""
        entries = self.entries()
        groups = [group for _, group in sorted(self._groups.items())]
        return {
            "version": VERSION,
            "rank": self.rank,
            "world_size": self.size,
            "job": self.job,
            "host": os.uname().nodename,
            "pid": os.getpid(),
            "reason": reason,
            "time_dumped_ns": time_ns(),
            "pg_config": {g.name: {"name": g.name, "desc": g.backend, "ranks": str(g.ranks)} for g in groups},
            "pg_status": {str(g.number): _status(g, entries) for g in groups},
            "entries": entries,
        }

    def set_call_site(self, since: int, frame: FrameType) -> None:
        """Set the call site of all operations recorded since ``count`` was ``since`` to the line of ``frame``."""
        code, instruction = frame.f_code, frame.f_lasti
        for number in range(since, self.counter[0]):
            slot = self.slots[number & LAST_SLOT]
            slot[CODE], slot[INSTRUCTION] = code, instruction

    def last_call(self) -> str:
        """The last operation and its call site, such as ``world: all_reduce #2 at train.py:6``; "" for none."""
        if not self.count:
            return ""
        entry = _Entry(*self.slots[self.count - 1 & LAST_SLOT])
        group, o = entry.description[:2]
        return f"{group.name}: {o.name} #{entry.sequence} at {call_site(entry.code, entry.instruction)}"

    def dump(self, path: str | Path | None = None, reason: str = "requested") -> Path:
        """Write the record as JSON to ``path``, atomically; returns the file.

        The default is ``<job>/rank_<rank>.json`` in the folder of KOS_RECORDER_DIR, else ``rank_<rank>.json``
        in the working folder.  Raises InvalidArgument, which names the file, if it cannot be written.
        """
        folder = Path(self._directory, self.job) if self._directory else Path()
        path = Path(path or folder / f"rank_{self.rank}.json")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, json.dumps(self.to_dict(reason)).encode())
        except OSError as error:
            raise InvalidArgument(f"{path}: expected a file to write, got {error.strerror}") from error
        return path

    def try_dump(self, reason: str, *, always: bool = False) -> None:
        """Dump if KOS_RECORDER_DIR names a folder, or ``always``; errors are logged."""
        if self._directory or always:
            try:
                self.dump(reason=reason)
            except InvalidArgument as error:
                log.warning("rank %d: the flight record could not be written: %s", self.rank, error)

    def fail(self, error: Exception) -> None:
        """Dump at the first failure of a rank, ``error``."""
        if not self._failed:
            self._failed = True
            self.try_dump(f"{type(error).__name__}: {error}")


recorders: weakref.WeakSet[Recorder] = weakref.WeakSet()
"""The open recorders of this process; a signal dumps them."""


def call_site(code: CodeType, instruction: int) -> str:
    """``file:line`` of a call that was recorded so."""
    frame = _frame(code, instruction)
    return f"{frame['filename']}:{frame['line']}"


def _describe(number: int, e: _Entry) -> Iterator[dict[str, Any]]:
    group, o, *shapes = e.description
    is_p2p = not o.collective
    sent, received = shapes[:2] or (o.send and o.send.shape, o.recv and o.recv.shape)
    entry: dict[str, Any] = {
        "record_id": number,
        "pg_id": group.number,
        "process_group": [group.name, group.backend],
        "collective_seq_id": 0 if is_p2p else e.sequence,
        "p2p_seq_id": e.sequence if is_p2p else 0,
        "op_id": number,
        "profiling_name": f"{group.backend}:{o.name}",
        "time_created_ns": e.created,
        **_sizes("input", o.send, sent),
        **_sizes("output", o.recv, received),
        "state": "failed" if e.error else {None: "scheduled", 0: "started"}.get(e.completed, "completed"),
        "time_discovered_started_ns": None if e.completed is None else e.created,
        "time_discovered_completed_ns": e.completed or None,
        "retired": bool(e.completed),
        "timeout_ms": None if o.options.timeout is None else round(o.options.timeout * 1000),
        "is_p2p": is_p2p,
        "frames": [_frame(e.code, e.instruction)],
        "reduce_op": o.reduction.op.name if o.reduction else None,
        "root": o.root,
        "error": e.error,
    }
    if not is_p2p:
        yield entry
    dst, src, tag, recv_tag = o.message
    if dst is not None:
        sent = f"{group.backend}:send {group.rank}->{dst}"
        yield entry | _sizes("output", None) | {"profiling_name": sent, "tag": tag}
    if src is not None:
        kind = "probe" if o.name == "probe" else "recv"
        received = f"{group.backend}:{kind} {group.rank}<-{'any' if src == ANY else src}"
        yield entry | _sizes("input", None) | {"profiling_name": received, "tag": recv_tag}


def _sizes(which: str, buffer: Buffer | None, shape: tuple[int, ...] | None = None) -> dict[str, Any]:
    if buffer is None or shape is None:
        return {f"{which}_sizes": [], f"{which}_dtypes": []}
    return {f"{which}_sizes": [list(shape)], f"{which}_dtypes": [buffer.dtype.name]}


def _frame(code: CodeType, instruction: int) -> dict[str, Any]:
    lines = (line for first, end, line in code.co_lines() if first <= instruction < end and line is not None)
    return {"name": code.co_qualname, "filename": code.co_filename, "line": next(lines, code.co_firstlineno)}


def _status(group: Group, entries: list[dict[str, Any]]) -> dict[str, int]:
    """The last recorded collectives of a group, by sequence number; -1 for none."""
    mine = [e for e in entries if e["pg_id"] == group.number and not e["is_p2p"]]
    reached = {"enqueued": ("scheduled", "started", "completed", "failed"), "started": ("started", "completed"),
               "completed": ("completed",)}  # fmt: skip
    return {f"last_{what}_collective": max((e["collective_seq_id"] for e in mine if e["state"] in states), default=-1)
            for what, states in reached.items()}  # fmt: skip


Tracer = Callable[[Sequence[Any], bool, bool], AbstractContextManager[Any]]
"""A ``with`` block around the launch of Works; whether they are a batch, and whether with ``async_op``.

``Operations._start_work`` and ``Communicator._start_all`` launch within it, if there is one.
"""


def tracing(recorder: Recorder, on_gpu: bool) -> Tracer | None:
    """The tracer of the launches of a communicator that the environment requests; None if it requests none.

    Raises BackendUnavailable for KOS_NVTX without the package nvtx, and InvalidArgument for values other than 0 and 1.
    """
    ranges, timed = _nvtx() if is_on(KOS_NVTX) else None, is_on(KOS_RECORDER_TIMING) and on_gpu
    if ranges is None and not timed:
        return None

    @contextmanager
    def trace(works: Sequence[Any], batch: bool, overlap: bool) -> Iterator[None]:
        with ExitStack() as stack:
            if ranges is not None:
                text = f"batch of {len(works)}" if batch else f"{works[0].name}{works[0].arguments}"
                stack.enter_context(ranges.annotate(f"{works[0].group}: {text}", domain="kos"))
            if timed:
                stack.enter_context(_timed(recorder, works, overlap))
            yield

    return trace


def _nvtx() -> Any:
    """The package nvtx."""
    try:
        return import_module("nvtx")
    except ImportError as error:
        raise BackendUnavailable(f"KOS_NVTX: expected the package nvtx ({install('nvtx')}), got: {error}") from error


@contextmanager
def _timed(recorder: Recorder, launched: Sequence[Any], overlap: bool) -> Iterator[None]:
    """Record events around the operations on a GPU; the calls of a batch have the batch's duration."""
    works = [work for work in launched if work.backend.device is not None]
    streams = {work.stream for work in works}
    if not works or any(map(capture_of, streams)):  # a captured operation runs when the graph is replayed
        yield
        return
    part = works[0].backend
    stream = part.side if overlap else works[0].stream
    with driver.on_device(part.device):
        begin, end = Event(part.device, timed=True), Event(part.device, timed=True)
        for waited in streams if overlap else ():  # what an overlapped operation waits for does not count
            begin.order(waited, stream)
        begin.record(stream)
        yield
        end.record(stream)

    def milliseconds() -> float | None:
        with suppress(KosError), driver.on_device(part.device):
            return 1e3 * end.seconds_since(begin) if end.done() else None
        return None  # the GPU has failed

    for each in works:
        if each.record is not None and (overlap or each.stream == stream):
            recorder.durations[id(each.record)] = each.record[1], milliseconds
