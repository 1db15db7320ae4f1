"""The process between a test and its ranks: it forks them, finds deadlocks, and leaves none behind.

It is forked from the process that calls ``spawn``.  So the ranks have the function, whatever it is, and torch, which
that process has imported; and they are forked from a process with one thread.  It ends all of them and what they have
started when the deadline has passed, and when the process that calls ``spawn`` ends or is interrupted.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import selectors
import signal
import socket
import time
import traceback
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

from kos.testing.torch.findings import ENDED, describe_deadlock, leftovers, stuck
from kos.testing.torch.monitor import Job
from kos.testing.torch.rank import run_rank

GRACE_SECONDS, DEADLOCK_SECONDS = 5.0, 1.0
"""For ranks to raise the errors of their waits, after the run has failed."""
_SUBREAPER = 36  # of prctl(2)
_PLACE_SECONDS = 0.5  # for ranks to say where they are


class Rank:
    """What the supervisor knows of a rank, and its connection."""

    def __init__(self, number: int) -> None:
        self.number, self._data = number, b""
        self.socket, self.theirs = socket.socketpair()
        self.status, self.why, self.place, self.state = "run", "", "", dict[str, Any]()
        self.pid = 0

    def command(self, kind: str) -> None:
        with suppress(OSError):  # it has ended
            self.socket.sendall(kind.encode() + b"\n")

    def receive(self) -> list[Any]:
        """The messages that have arrived."""
        with suppress(BlockingIOError, ConnectionError):
            while data := self.socket.recv(1 << 20, socket.MSG_DONTWAIT):
                self._data += data
        *lines, self._data = self._data.split(b"\n")
        return [json.loads(line) for line in lines]


class Supervisor:
    """The state of one run."""

    def __init__(self, job: Job, parent: socket.socket, outputs: list[int], results: list[int]) -> None:
        self.job, self._errors, self._verdict = job, list[Any](), dict[str, Any]()
        self._end = time.monotonic() + job.timeout
        self._selector = selectors.DefaultSelector()
        self._selector.register(parent, selectors.EVENT_READ)
        self.ranks = [Rank(rank) for rank in range(job.size)]
        gc.freeze()  # so that ranks copy fewer pages
        for rank, output, result in zip(self.ranks, outputs, results, strict=True):
            if not (pid := os.fork()):
                try:
                    parent.close()
                    run_rank(job, rank.number, rank.theirs, output, result)
                finally:
                    os._exit(1)
            rank.theirs.close()
            rank.pid = pid
            self._selector.register(rank.socket, selectors.EVENT_READ, rank)
            self._selector.register(os.pidfd_open(pid), selectors.EVENT_READ, rank)

    def run(self) -> dict[str, Any]:
        """Watch the ranks until all have ended; the report for the process that called ``spawn``."""
        while (late := self._not_over()) and time.monotonic() < self._end:
            self._step(self._end)
        if late and not self._verdict and not self._errors:
            self._ask_places(late)
            self._fail("timeout", [rank.number for rank in late])
        fine = not self._verdict and not self._errors and all(rank.status == "returned" for rank in self.ranks)
        if fine and (found := leftovers(self.job, [rank.state for rank in self.ranks])):
            self._verdict = {"kind": "mistake", "text": found}
        for rank in self.ranks:
            rank.command("finish")
        end = time.monotonic() + GRACE_SECONDS
        while time.monotonic() < end and any(rank.status in ("returned", "failed") and rank.pid for rank in self.ranks):
            self._step(end)
        kept = "pending", "modules", *(("mismatch", "calls") if self._errors else ())
        ranks = [[rank.status, {name: rank.state.get(name, ()) for name in kept}] for rank in self.ranks]
        return {"verdict": self._verdict, "errors": self._errors, "ranks": ranks}

    def _not_over(self) -> list[Rank]:
        return [rank for rank in self.ranks if rank.status not in ENDED]

    def _fail(self, kind: str, ranks: list[int], text: str = "") -> None:
        """Fail the run: the ranks have a moment to raise the errors of their waits."""
        if not self._verdict:
            places = {rank.number: rank.place for rank in self.ranks if rank.place}
            self._verdict = {"kind": kind, "ranks": ranks, "text": text, "places": places}
            for rank in self.ranks if kind != "lost" else ():  # of which kos tells the others
                rank.command("abort")
        seconds = DEADLOCK_SECONDS if kind == "deadlock" else GRACE_SECONDS
        self._end = min(self._end, time.monotonic() + seconds)

    def _ask_places(self, late: list[Rank]) -> None:
        """Ask ranks for the line at which they are."""
        for rank in late:
            rank.command("place")
        end = time.monotonic() + _PLACE_SECONDS
        while time.monotonic() < end and not all(rank.place for rank in late):
            self._step(end)

    def _step(self, end: float) -> None:
        """Wait for what happens next, and process it."""
        for key, _ in self._selector.select(max(0.0, end - time.monotonic())):
            if key.data is None:  # the process that called ``spawn`` has ended, or wants no more
                raise ConnectionError
            rank: Rank = key.data
            for message in rank.receive():
                self._hear(rank, *message)
            if key.fileobj is not rank.socket:  # its process has ended
                self._selector.unregister(key.fileobj)
                self._selector.unregister(rank.socket)
                self._ended(rank, os.waitstatus_to_exitcode(os.waitpid(rank.pid, 0)[1]))

    def _ended(self, rank: Rank, code: int) -> None:
        rank.pid = 0
        if rank.status not in ENDED:
            how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            rank.status, rank.why = "dead", f"it {how}"
            self._fail("lost", [rank.number], rank.why)

    def _hear(self, rank: Rank, kind: str, what: Any) -> None:
        """A rank reports what it does."""
        if kind == "place":
            rank.place = what
        elif rank.status not in ENDED:  # else its thread reports a wait that is over
            rank.status = kind
            if kind in ("crash", "stall"):
                rank.why = what
            elif kind != "run":
                rank.state = what
            if kind == "failed":
                self._errors.append([rank.number, what["error"]])
                self._end = min(self._end, time.monotonic() + GRACE_SECONDS)
            if self.job.deadlock and not self._verdict and not self._errors:
                known = {rank.number: (rank.status, rank.state, rank.why) for rank in self.ranks}
                if found := stuck(known):
                    self._fail("deadlock", sorted(found), describe_deadlock(known, found))


def supervise(job: Job, parent: socket.socket, outputs: list[int], results: list[int]) -> None:
    """Run ``job`` in this process, which was forked for it; send the report to ``parent``, and end the process."""
    report = b""
    try:
        os.setsid()  # Ctrl-C reaches only the process that called ``spawn``, which then ends this one
        ctypes.CDLL(None).prctl(_SUBREAPER, 1)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())  # which the caller has blocked
        warnings.simplefilter("ignore")
        report = json.dumps(Supervisor(job, parent, outputs, results).run()).encode()
    except ConnectionError:
        pass
    except BaseException:
        report = json.dumps({"failure": traceback.format_exc()}).encode()
    finally:
        kill_descendants()
        with suppress(OSError):
            parent.sendall(report)
        os._exit(0)


def kill_descendants() -> None:
    """Kill all processes that this one or its descendants have started; orphans of them become its own children."""
    while children := Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        for child in map(int, children):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
