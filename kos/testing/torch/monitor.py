"""What a rank knows of its own calls, and how it reports that it waits, has failed, or has returned."""

from __future__ import annotations

import itertools
import json
import os
import re
import select
import signal
import socket
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from kos.errors import CollectiveError, CollectiveMismatch
from kos.interop.torch import works
from kos.interop.torch.launch import _TORCH, _in_library
from kos.testing.faults import FaultPlan

LOOK_SECONDS = 0.04  # between two looks at what the rank waits for
KEPT = 20_000
"""Calls of a rank that are kept for its report."""
_API = {"distributed_c10d.py", "c10d_logger.py"}
_HELPERS = "kos-", "kos ", "QueueFeederThread"  # threads that never make a call of torch.distributed


class Mistake(CollectiveError):
    """A mistake of the program that this run has survived, but that other runs or backends would not."""


@dataclass(frozen=True)
class Job:
    """What every rank of one ``spawn`` runs.  ``hosts`` are the names of the pretended hosts, by rank."""

    fn: Callable[..., Any] | list[Any]
    size: int
    timeout: float
    backend: str
    init: bool
    hosts: Sequence[str | None]
    plan: FaultPlan
    env: Mapping[str, str]
    deadlock: bool
    messages: bool
    tensors: bool
    strict: bool
    store: int
    """The descriptor of a file in memory, by which the ranks find each other."""


@dataclass(slots=True)
class Call:
    """One call of torch.distributed.  Calls that match each other have the same ``key`` and ``number``.

    For collectives ``key`` is the group.  For messages it is the group, send or recv, the sender and the receiver (as
    ranks of the world; -1: any), and the tag.  For a new group it has the ranks.
    """

    kind: str  # collective, send, recv or group
    key: str
    number: int
    what: str
    group: str
    ranks: list[int]
    line: str
    direct: bool  # whether the program has called torch.distributed itself, and no other part of torch
    sequence: int = -1  # of kos
    waited: bool = True
    complete: bool = False

    def __str__(self) -> str:
        return f"{self.what} at {self.line}"


def program_line(frame: FrameType | None, inner: list[str] | None = None) -> str:
    """``file:line`` of the innermost frame outside kos, torch and Python's library, or of the outermost one.

    The files of torch in between are added to ``inner``.
    """
    while frame is not None and frame.f_back is not None and _in_library(frame.f_code.co_filename):
        if inner is not None and frame.f_code.co_filename.startswith(_TORCH):
            inner.append(Path(frame.f_code.co_filename).name)
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else "?"


class Monitor:
    """The calls of one rank, and the thread that reports them."""

    def __init__(self, job: Job, rank: int, channel: socket.socket) -> None:
        self.job, self.rank, self._channel, self._sending = job, rank, channel, threading.Lock()
        self.over = threading.Event()  # the supervisor needs nothing more
        self.calls: deque[Call] = deque(maxlen=KEPT)
        self.counts, self._lines, self._operations = Counter[str](), Counter[str](), Counter[str | None]()
        self.groups: list[Any] = []
        self._pending = [fault for fault in job.plan.faults if fault.rank == rank]
        self._mismatch: list[Any] | None = None
        self._waits: dict[int, tuple[Any, list[list[Call]], float, str]] = {}
        self._tokens, self._until = itertools.count(), time.monotonic() + job.timeout
        self._looked: Any = None
        self._modules = set(sys.modules)
        threading.Thread(target=self._watch, name="kos-testing", daemon=True).start()

    def send(self, kind: str, what: Any = None) -> None:
        with self._sending:
            self._channel.sendall(json.dumps([kind, what]).encode() + b"\n")

    # Calls.

    def called(self, kind: str, what: str, group: str, ranks: list[int], peer: int = -1, tag: int = 0) -> Call:
        """Record a call that this rank makes; ``peer`` is the other rank of a message, in the world."""
        ends = f"{self.rank} {peer}" if kind == "send" else f"{peer} {self.rank}"
        key = {"collective": group, "group": f"new {ranks}"}.get(kind, f"{group} {kind} {ends} {tag}")
        inner = list[str]()
        line = program_line(sys._getframe(1), inner)
        call = Call(kind, key, self.counts[key], what, group, ranks, line, set(inner) <= _API)
        self.counts[key] += 1
        self._lines[call.line] += 1
        self.calls.append(call)
        return call

    def inject(self, name: str) -> bool:
        """Make the faults of this operation happen; whether its message is to be dropped."""
        numbers = {each: self._operations[each] for each in (None, name)}
        self._operations.update(numbers.keys())
        due = [fault for fault in self._pending if numbers.get(fault.call) == fault.operation]
        for fault in [each for each in due if each.kind != "drop" or name == "send"]:
            self._pending.remove(fault)
            if fault.kind == "drop":
                return True
            if fault.kind == "delay":
                time.sleep(fault.seconds or 0.02)
            elif fault.kind == "error":
                raise CollectiveError(f"{name}: failed, as the test's plan says", ranks=[self.rank])
            else:
                sys.stdout.flush()
                self.send(fault.kind, f"{fault.kind} before {name}, as the test's plan says")
                os.kill(os.getpid(), signal.SIGKILL if fault.kind == "crash" else signal.SIGSTOP)
        return False

    def mismatched(self, group: str, error: CollectiveMismatch) -> None:
        """Note which call of the group differs between ranks."""
        found = re.search(r"called (\w+) #(\d+)", str(error)) or re.search(r"(\w+) #(\d+)", str(error))
        kind, number = (found[1], int(found[2])) if found else ("", -1)
        last = next((each for each in reversed(self.calls) if each.kind == kind), None)
        self._mismatch = self._mismatch or [group, number, last and [last.key.replace(" recv ", " send "), last.number]]

    # Waits.

    @contextmanager
    def waiting(self, calls: Sequence[Call], seconds: float) -> Iterator[None]:
        """A wait of this thread for all of ``calls``, for at most ``seconds``."""
        thread = threading.get_ident()
        if not calls or thread in self._waits:  # the outer wait ends only after this one
            yield
            return
        line = program_line(sys._getframe(2))
        self._waits[thread] = next(self._tokens), [list(calls)], time.monotonic() + seconds, line
        try:
            yield
        finally:
            del self._waits[thread]

    def _blocked(self) -> Any:
        """The wait of this rank, if all its threads wait in calls of torch.distributed; None if one may go on.

        torch's C++ waits for futures too, as in DDP.  Then no thread of the process has run since the last look, and
        the main thread is inside torch.
        """
        waits, main = dict(self._waits), threading.main_thread().ident or 0
        others = [thread for thread in threading.enumerate() if not thread.name.startswith(_HELPERS)]
        if any(thread.ident not in waits and thread.ident != main for thread in others):
            return None
        if main in waits:
            return waits[main] if waits[main][2] > self._until - 0.5 else None  # else it ends by its own timeout
        pending = [work._call for work in list(works._futures._pending) if hasattr(work, "_call")]
        frame = sys._current_frames().get(main)
        if not pending or frame is None or not _in_library(frame.f_code.co_filename):
            return None
        before, self._looked = self._looked, _switches()
        if self._looked is None or before != self._looked:
            return None
        return "futures", [[each] for each in pending], 0.0, program_line(frame)

    def _watch(self) -> None:
        """Report waits, and obey the supervisor."""
        seen, reported = None, False
        while True:
            arrived = select.select([self._channel], [], [], LOOK_SECONDS)[0]
            for command in (self._channel.recv(4096) or os._exit(1)).split() if arrived else ():
                if command == b"finish":
                    self.over.set()
                elif command == b"place":
                    self.send("place", program_line(sys._current_frames().get(threading.main_thread().ident or 0)))
                else:
                    self._abort()
            counts, wait = dict(self.counts), self._blocked()
            token = wait and (wait[0], [[id(call) for call in each] for each in wait[1]])
            if wait is not None and token == seen and not reported and counts == self.counts:
                at = [[asdict(call) for call in each] for each in wait[1]]
                self.send("wait", self._state() | {"wait": at, "at": wait[3]})
                reported = True
            elif reported and token != seen:
                self.send("run")
                reported = False
            seen = token

    # Ends.

    def _state(self, kept: int = 1) -> dict[str, Any]:
        calls = [asdict(call) for call in list(self.calls)[-kept:]]
        state = {"counts": dict(self.counts), "lines": dict(self._lines), "mismatch": self._mismatch, "calls": calls}
        modules = [name for name in sys.modules.keys() - self._modules if name.startswith("torch.")]
        return state | {"pending": [str(fault) for fault in self._pending], "modules": sorted(modules)}

    def returned(self) -> None:
        """Report that the function of this rank has returned."""
        self.send("returned", self._state(KEPT))

    def failed(self, error: dict[str, Any]) -> None:
        """Report an error, then abort, so that the ranks that wait for this one raise too."""
        self.send("failed", self._state(500) | {"error": error})
        self._abort()

    def _abort(self) -> None:
        for group in list(self.groups):
            with suppress(Exception):
                group.abort()


def _switches() -> list[Any] | None:
    """How often each thread but those of kos has slept; None if one of them runs."""
    ours = {str(thread.native_id) for thread in threading.enumerate() if thread.name.startswith(_HELPERS)}
    tasks = [task for task in sorted(Path("/proc/self/task").iterdir()) if task.name not in ours]
    found = [(task.name, (task / "status").read_text()) for task in tasks]
    if not all("State:\tS" in text for _, text in found):
        return None
    return [(name, re.findall(r"ctxt_switches:\t(\d+)", text)) for name, text in found]
