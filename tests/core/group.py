"""One rank of the compiled core for tests: numbers its calls, polls them until a deadline, and finds dead ranks.

It stands for ``kos.comm.host.shared``, without its texts of errors.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, NoReturn

import numpy as np

from kos import _core
from kos.comm.host.shared.segment import ARRIVED, CLOSED, PID, STARTED, read_memory, started
from kos.comm.host.shared.transport import DIRECT_BYTES, cpu_vendor
from kos.dtypes import DTYPES

OPERATIONS = (
    "barrier", "broadcast", "reduce", "all_reduce", "all_gather", "gather", "scatter", "all_to_all", "reduce_scatter",
    "scan", "exscan", "send", "recv", "send_recv",
)  # fmt: skip
"""In the order of ``core.h``."""
OPS = ("sum", "prod", "min", "max", "avg", "band", "bor", "bxor")
"""Reduce operations, in the order of ``core.h``."""
CODES = ("MISMATCH", "REPORTED", "FORKED", "CLOSED", "COUNTS", "MESSAGE", "REFUSED_MESSAGE")
MESSAGES = ("send", "recv", "send_recv")
CHECK_SECONDS = 0.01
_TEXT_BYTES = 256  # of a rank's failure, after the memory of the core
_DTYPES = list(DTYPES)
_REDUCING = frozenset({"reduce", "all_reduce", "reduce_scatter", "scan", "exscan"})
_ROOTED = frozenset({"broadcast", "reduce", "gather", "scatter"})


def segment_bytes(size: int) -> int:
    """Bytes of the memory that ``size`` ranks share, which must be zero at first."""
    return int(_core.native.layout(size)[-1]) + _TEXT_BYTES * size


class CoreError(Exception):
    """``kind``: a code of ``core.h``, LOST, LATE or TOLD; found by rank ``by``.  ``counts``: of COUNTS."""

    def __init__(self, kind: str, rank: int, word: int, by: int, counts: Sequence[int] = ()) -> None:
        super().__init__(f"{kind} of rank {rank}, {word}, by rank {by}")
        self.kind, self.rank, self.word, self.by, self.counts = kind, rank, word, by, tuple(counts)


class CoreGroup:
    """The calls of one rank on ``memory``, a writable buffer of ``segment_bytes(size)`` that all ranks share."""

    def __init__(
        self, memory: Any, rank: int, size: int, timeout: float = 30.0, spin: float = 0.0, native: Any = _core.native
    ) -> None:
        self.rank, self.size, self.timeout, self.native = rank, size, timeout, native
        lines, *_, self._texts = native.layout(size)
        self.core = native.Group(memory, rank, size, self)
        self.core.spin_ns = int(spin * 1e9)
        self.memory = memory
        self._bytes = memoryview(memory)
        self.words = self._bytes.cast("Q")
        self.lines = [(lines + native.LINE * r) // 8 for r in range(size)]
        self._known: dict[tuple[str, int], Call] = {}
        self._pid = os.getpid()
        self.words[self.lines[rank] + STARTED] = started(self._pid)
        self.words[self.lines[rank] + PID] = self._pid

    @property
    def begun(self) -> int:
        """The collectives that this rank has begun: the number of the next."""
        return self.words[self.lines[self.rank] + ARRIVED] if self._bytes.nbytes else 0

    def connect(self) -> bool:
        """Agree whether every rank can read the memory of every other one; calls prepared before it use slots."""
        token = np.frombuffer(os.urandom(16), np.uint64)
        places = np.zeros((self.size, 3), np.uint64)
        mine = np.array([token.ctypes.data, *token], np.uint64)
        self.prepare("all_gather", "uint64", 3).run(mine, places)
        pids = [self.words[line + PID] for line in self.lines]
        reads = [
            read_memory(pid, int(place[0]), 16) == place[1:].tobytes()
            for pid, place in zip(pids, places, strict=True)
        ]
        able = np.array([all(reads)], np.uint8)
        self.prepare("all_reduce", "uint8", 1, op="min").run(able)
        self.core.direct = int(able[0]) * DIRECT_BYTES[cpu_vendor()]
        return bool(able[0])

    def prepare(
        self, operation: str, dtype: str = "uint8", count: int = 0, *, op: str = "sum", root: int = 0,
        send_counts: Sequence[int] | None = None, recv_counts: Sequence[int] | None = None, varies: bool = False,
        dst: int = 0, src: int = 0, tag: int = 0, recv_tag: int | None = None,
    ) -> Call:  # fmt: skip
        """A call of ``operation``.  ``count`` is in elements: of what one rank gives to another, else of the array.

        In the v-forms (``varies``) it is what this rank alone sends or receives, where that is not in ``send_counts``
        or ``recv_counts``, by rank.
        """
        name = operation + "_v" * varies
        call: dict[str, Any] = {"operation": name, "dtype": dtype}
        if operation in _REDUCING:
            call["op"] = op
        if operation in _ROOTED:
            call["root"] = root
        if not varies:
            call["count"] = count
        elif operation in ("all_gather", "reduce_scatter"):
            call["counts"] = list(send_counts or recv_counts or ())
        exact = json.dumps(call, sort_keys=True).encode()
        fingerprint = int.from_bytes(blake2b(exact, digest_size=7).digest(), "little") or 1
        counts = [None if each is None else np.array(each, np.uint64).tobytes() for each in (send_counts, recv_counts)]
        prepared = self.core.prepare(
            OPERATIONS.index(operation), _DTYPES.index(dtype), OPS.index(op), root, count, varies, *counts, dst, src,
            tag, tag if recv_tag is None else recv_tag, fingerprint,
        )  # fmt: skip
        if prepared is None:
            raise ValueError(f"{name}: expected ranks, counts, tags and an operation of {dtype}, got {call}")
        return Call(self, prepared, operation not in MESSAGES)

    def all_reduce(self, x: Any) -> Any:
        """Sum an array in place, and return it."""
        self._sum_of(x).run(x)
        return x

    def start(self, x: Any) -> Started:
        """Begin to sum an array in place."""
        return self._sum_of(x).start(x)

    def _sum_of(self, x: Any) -> Call:
        key = x.dtype.name, x.size
        if key not in self._known:
            self._known[key] = self.prepare("all_reduce", *key)
        return self._known[key]

    def report(self, error: CoreError, sequence: int) -> NoReturn:
        """Fail that call and later ones on all ranks; raise the first failure of the group.

        The failure word names the rank that reported, which writes its text once.
        """
        if not self.core.failure():
            text = json.dumps([error.kind, error.rank, error.word, error.by, error.counts]).encode()
            at = self._texts + _TEXT_BYTES * self.rank
            if not self._bytes[at]:
                self._bytes[at : at + _TEXT_BYTES] = text.ljust(_TEXT_BYTES)
            self.core.fail(sequence)
        raise self._reported(self.core.failure())

    def fail(self, sequence: int) -> None:
        """Fail that call and later ones on all ranks by TOLD."""
        try:
            self.report(CoreError("TOLD", self.rank, sequence, self.rank), sequence)
        except CoreError:
            pass

    def failed(self, code: int, rank: int, word: int, *counts: int) -> NoReturn:
        """Raise what the core has found: it calls this."""
        kind = next((name for name in CODES if getattr(self.native, name) == code), str(code))
        if kind == "REPORTED":
            raise self._reported(word)
        error = CoreError(kind, rank, word, self.rank, counts if kind == "COUNTS" else ())
        if kind in ("MISMATCH", "COUNTS"):
            self.report(error, word)
        raise error

    def _reported(self, word: int) -> CoreError:
        at = self._texts + _TEXT_BYTES * (word >> 44 & 0xFF)
        return CoreError(*json.loads(bytes(self._bytes[at : at + _TEXT_BYTES])))

    def has_ended(self, rank: int) -> bool:
        line = self.lines[rank]
        pid = self.words[line + PID]
        return bool(self.words[line + CLOSED] or (pid and started(pid) != self.words[line + STARTED]))

    def close(self) -> None:
        if self._bytes.nbytes:
            self.core.close()
            if os.getpid() == self._pid:  # not in a forked child
                self.words[self.lines[self.rank] + CLOSED] = 1
            self.words.release()
            self._bytes.release()
            self._bytes = self.words = self.memory = memoryview(b"")


class Call:
    """A call of one signature, for any arrays; ``run(x)`` and ``start(x)`` work in place."""

    def __init__(self, group: CoreGroup, prepared: Any, numbered: bool) -> None:
        self.group, self.prepared, self.numbered = group, prepared, numbered

    def start(self, *arrays: Any, waits: bool = False, sequence: int | None = None) -> Started:
        """``sequence``: of a message, the collective that it belongs to."""
        if self.numbered:
            sequence = self.group.begun
        elif sequence is None:
            sequence = self.group.native.WORD_SEQUENCE
        both = arrays * 2 if len(arrays) == 1 else arrays or (None, None)
        return Started(self, sequence, self.group.core.start(self.prepared, sequence, waits, *both))

    def run(self, *arrays: Any) -> None:
        started = self.start(*arrays, waits=True)
        try:
            started.wait()
        finally:
            started.cancel()


class Started:
    """A call in flight: ``left`` is what the core has left to do, None if it is complete."""

    def __init__(self, call: Call, sequence: int, left: Any) -> None:
        self.call, self.sequence, self.left = call, sequence, left
        self.next_check = (began := time.monotonic()) + CHECK_SECONDS
        self.deadline = began + call.group.timeout

    def done(self) -> bool:
        """Whether it is complete.  Raises CoreError, also at the deadline and for ranks that have ended."""
        if self.left is None or self.left.done():
            return True
        if (now := time.monotonic()) > min(self.next_check, self.deadline):
            self.next_check = now + CHECK_SECONDS
            self._check(now > self.deadline)
        return False

    def _check(self, late: bool) -> None:
        group = self.call.group
        for rank in filter(self.left.missing, range(group.size)):
            # Checked again after its end was seen: its last store may have come just before.
            if late or (group.has_ended(rank) and not self.left.done() and self.left.missing(rank)):
                error = CoreError("LATE" if late else "LOST", rank, self.sequence, group.rank)
                if self.call.numbered:
                    group.report(error, self.sequence)
                self.left.cancel()
                raise error

    def wait(self) -> None:
        while not self.done():
            time.sleep(0)

    def missing(self, rank: int) -> int:
        return 0 if self.left is None else int(self.left.missing(rank))

    def cancel(self) -> None:
        if self.left is not None:
            self.left.cancel()
