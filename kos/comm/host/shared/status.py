"""The PeerStatus of the processes of one host, in the shared memory of the world: waits, failures, ends.

The calls of one group, and its first failure, are in ``calls.py``.  ``kos.comm.failures`` reads both.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from zlib import crc32

from kos.comm import watchdog
from kos.comm.control.identity import process
from kos.comm.host.shared.segment import (
    CALL_BYTES,
    CALLED,
    FAILED,
    FAILED_AT,
    FAILURE_BYTES,
    PID,
    QUEUED,
    STARTED,
    WAITS,
    Segment,
)
from kos.comm.peer_status import PeerStatus
from kos.errors import KosError, from_record, ignored, to_record

_Memory = tuple["memoryview[int]", memoryview, int | None, dict[int, int]]
"""Control words, bytes, the line of this rank, and the lines of all ranks of the host by world rank."""
_BITS, _NAMED = 16, 4
"""A flag holds at most ``_NAMED`` awaited ranks, of ``_BITS`` bits each."""
_SOMEBODY = 1 << _BITS * _NAMED - 1
"""The flag of a rank that waits for unknown ranks."""


class SharedStatus(PeerStatus):
    """A PeerStatus in the segment of the world, which stays mapped while any group uses it."""

    def __init__(self, segment: Segment, world: Sequence[int], status: PeerStatus | None = None) -> None:
        """``status`` is the PeerStatus that this one replaces."""
        super().__init__()
        if status is not None:
            self._plane, self.hosts = status._plane, status.hosts
        ranks = [world[rank] for rank in segment.ranks]
        self._my_text = segment.failure_of(segment.rank)
        self._texts = {rank: segment.failure_of(local) for local, rank in enumerate(ranks)}
        self._my_call, self._calls = segment.call_of(segment.rank), {r: segment.call_of(i) for i, r in enumerate(ranks)}
        self._read_call: Callable[[], str] | None = None
        self._posted = ""
        lines = {rank: segment.line(local) for local, rank in enumerate(ranks)}
        # One attribute, which each method reads once: the hub and the watchdog may read while the program frees it.
        self._memory: _Memory = segment.words, segment.bytes, segment.line(segment.rank), lines

    def free(self) -> None:
        self._memory = memoryview(b""), memoryview(b""), None, {}

    def post_failure(self, error: KosError) -> None:
        before = self.last
        super().post_failure(error)
        words, data, mine, _ = self._memory
        if self.last is not before and mine is not None:
            record = fitting(to_record(error))
            with self._lock:  # the watchdog posts too
                words[mine + FAILED] = 0
                data[self._my_text : self._my_text + len(record)] = record
                words[mine + FAILED_AT] = int(time.monotonic() * 1e6)  # of a clock that the processes of a host share
                words[mine + FAILED] = _summary(record)

    def clear_failure(self) -> None:
        super().clear_failure()
        self._post(FAILED, 0)

    def post_wait(self, ranks: Iterable[int] | None) -> None:
        super().post_wait(ranks)
        wait = self.waits.get(self._rank)
        self._post(WAITS, 0 if wait is None else _flag(wait) or _SOMEBODY)

    def post_queued(self, key: Any, ranks: Sequence[int]) -> None:
        super().post_queued(key, ranks)
        self._post(QUEUED, _flag(dict.fromkeys(rank for each in list(self.queued.values()) for rank in each)))

    def _post(self, place: int, flag: int) -> None:
        words, _, mine, _ = self._memory
        if mine is not None:
            words[mine + place] = flag

    def publish_last_call(self, last_call: Callable[[], str]) -> None:
        """As in the base class.  The watchdog's thread copies the text into the segment, so calls cost nothing."""
        self._read_call = last_call
        watchdog.add(self)

    def watch(self) -> None:
        """Publish the last call if it has changed."""
        words, data, mine, _ = self._memory
        if mine is None or self._read_call is None or (text := self._read_call()) == self._posted:
            return
        self._posted = text
        record = text.encode(errors="replace")[-CALL_BYTES:]
        words[mine + CALLED] = 0
        data[self._my_call : self._my_call + len(record)] = record
        words[mine + CALLED] = _summary(record)

    def last_call(self, rank: int) -> str:
        words, data, _, lines = self._memory
        line = lines.get(rank)
        record = None if line is None else _read(data, self._calls[rank], words[line + CALLED])
        return "" if record is None else record.decode(errors="replace")

    def failure(self, rank: int) -> tuple[KosError, float] | None:
        words, data, _, lines = self._memory
        line = lines.get(rank)
        if line is None:
            return super().failure(rank)
        record = _read(data, self._texts[rank], words[line + FAILED])
        if record is None:
            return None
        return from_record(json.loads(record)), time.monotonic() - words[line + FAILED_AT] / 1e6

    def failed_within(self, rank: int, seconds: float) -> bool:
        words, _, _, lines = self._memory
        line = lines.get(rank)
        if line is None:
            return super().failed_within(rank, seconds)
        at = words[line + FAILED_AT]
        return at != 0 and time.monotonic() - at / 1e6 < seconds

    def awaited(self, rank: int) -> tuple[int, ...] | None:
        words, _, _, lines = self._memory
        line = lines.get(rank)
        if line is None:
            return super().awaited(rank)
        if not (flag := words[line + WAITS] or words[line + QUEUED]):
            return None
        if _state(words, line) in "TtZX":
            return None
        if flag == _SOMEBODY:
            return ()
        named = (flag >> _BITS * place & (1 << _BITS) - 1 for place in range(_NAMED))
        return tuple(each - 1 for each in named if each)

    def sees(self, rank: int) -> bool:
        return rank in self._memory[3]

    def runs(self, rank: int) -> bool:
        state = self._state_of(rank)
        return state is not None and state not in "TtZX"

    def halted(self, rank: int) -> bool:
        state = self._state_of(rank)
        return super().ended(rank) if state is None else state in "TtZX"

    def ended(self, rank: int) -> bool:
        state = self._state_of(rank)
        return super().ended(rank) if state is None else state in "ZX"

    def _state_of(self, rank: int) -> str | None:
        words, _, _, lines = self._memory
        line = lines.get(rank)
        return None if line is None else _state(words, line)


def _summary(record: bytes) -> int:
    """The flag of a record: its length and checksum.  Python orders no stores, so a reader may see the flag first."""
    return crc32(record) << 32 | len(record)


def _read(data: memoryview, at: int, flag: int) -> bytes | None:
    """The record with that flag; None if there is none, or if not all of it can be seen yet."""
    record = bytes(data[at : at + (flag & 0xFFFFFFFF)])
    return record if record and _summary(record) == flag else None


def _state(words: memoryview[int], line: int) -> str:
    """The state of a rank's process, "?" if it is unknown: also while the rank has not yet written its number."""
    if not (pid := words[line + PID]):
        return "?"
    with ignored(OSError):
        state, began = process(pid)
        return state if began == words[line + STARTED] else "X"
    return "?"  # the state of the process is unknown


def _flag(ranks: Iterable[int]) -> int:
    named = [rank for rank in ranks if rank + 1 < 1 << _BITS][:_NAMED]  # others cannot be shown
    return sum((rank + 1) << _BITS * place for place, rank in enumerate(named))


def fitting(record: list[Any]) -> bytes:
    """A record of ``to_record`` as bytes, at most FAILURE_BYTES: the beginning of its text, and its first ranks."""
    if len(data := json.dumps(record).encode()) <= FAILURE_BYTES:
        return data
    kind, text, ranks = record[:3]
    while len(data := json.dumps([kind, text, ranks]).encode()) > FAILURE_BYTES:
        if len(json.dumps(text)) > len(json.dumps(ranks)):  # a character may take six bytes
            text = text[: len(text) * 3 // 4]
        else:
            ranks = ranks[: len(ranks) * 3 // 4]
    return data
