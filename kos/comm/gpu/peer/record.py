"""The record through which the host and the kernels of ``peer`` communicate: 64-bit words of host memory."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from kos.comm import timeouts
from kos.comm.failures import EndedEarly, FailureLog, PendingRanks
from kos.comm.waits import wait
from kos.errors import CollectiveMismatch
from kos.memory.pool import pinned_empty

# In the order of ``Record`` in kernels/channel.cuh.
ABORT, TIMEOUT, FAILED, CAUSE, PEER, CHANNEL, WANTED, SEEN, PHASE, LIMIT, WAITS = range(11)
_ABORTED, _PEER_ENDED, _UNEQUAL = 2, 3, 4  # causes; 1 is a timeout

_WAITS_SECONDS = 1.0
"""A kernel that has not shown its wait for so long is taken not to wait."""


class KernelRecord:
    """What the host passes to the kernels of one communicator, and what a kernel that ended early was waiting for."""

    def __init__(self, failures: FailureLog, device: int) -> None:
        self._failures = failures
        self.words = pinned_empty(16, np.uint64, device)
        self.words[:] = 0
        self.failure = self.words[FAILED:].data  # read at every call, faster than an array
        self._seen_waits, self._waits_until = 0, 0.0

    @property
    def address(self) -> int:
        return int(self.words.__array_interface__["data"][0])

    @property
    def abort_address(self) -> int:
        """Address of the flag by which the host aborts kernels: then not 0."""
        return self.address + ABORT * self.words.itemsize

    @property
    def failed_address(self) -> int:
        """Of a word that is not 0 once a kernel has ended early."""
        return self.address + FAILED * self.words.itemsize

    @property
    def timeout(self) -> float:
        """Seconds that a kernel waits for another rank."""
        return float(self.words[TIMEOUT]) / 1e9

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        self.words[TIMEOUT] = nanoseconds(seconds)

    @property
    def has_failed(self) -> bool:
        """Whether a kernel has ended early, which makes the engine unusable.  Reads host memory only."""
        return bool(self.failure[0])

    def abort(self) -> None:
        """End every kernel that waits, now or later, within a moment.  Its result is undefined."""
        self.words[ABORT] = 1

    @property
    def aborted(self) -> bool:
        return bool(self.words[ABORT])

    def check(self, what: str, arrived: Sequence[int] = (), beside: str = "") -> None:
        """Raise for a kernel that ended early, naming the ranks that delay it; ``what`` names the operation.

        ``arrived`` are ranks that are known to have begun it; ``beside`` names other communicators of the GPU.  Raises
        EndedEarly, with the rank it waited for, where the cause is another failure.
        """
        if not self.has_failed:
            return
        peer, cause, failures = int(self.words[PEER]), int(self.words[CAUSE]), self._failures
        world, name = failures.world[peer], failures.names([peer], False)
        if cause == _ABORTED:
            raise EndedEarly(f"aborted while it waited for {name}", ranks=[world], call=what)
        if cause == _UNEQUAL:
            wanted, seen = (_piece(int(self.words[word])) for word in (WANTED, SEEN))
            both = sorted((world, failures.world[failures.rank]))
            raise CollectiveMismatch(call=what, expected=f"{wanted} from {name}", got=seen, ranks=both)
        if cause == _PEER_ENDED:
            raise EndedEarly(f"the kernel of {name} ended early", ranks=[world], call=what)
        limit = float(self.words[LIMIT]) / 1e9
        absent = f"{timeouts.late(name, timeouts.GO_ON, limit)} ({self._where()}{beside})"
        raise failures.timeout_error(PendingRanks([peer], absent, arrived), what)

    def waits_for(self) -> list[int]:
        """The rank that a kernel waits for, or waited for within the last second."""
        word, now = int(self.words[WAITS]), time.monotonic()
        if word != self._seen_waits:
            self._seen_waits, self._waits_until = word, now + _WAITS_SECONDS
        return [word % 16] if now < self._waits_until else []

    def last_wait(self, seconds: float) -> str:
        """What a kernel that is being aborted waited for; searches for at most that long."""
        if not wait(lambda: self.has_failed, time.monotonic() + seconds):
            return "no kernel of this GPU was waiting"
        return f"the GPU waited for {self._failures.names([int(self.words[PEER])], False)} ({self._where()})"

    def _where(self) -> str:
        channel, phase, wanted, seen = (int(self.words[word]) for word in (CHANNEL, PHASE, WANTED, SEEN))
        return f"channel {channel}, phase {phase}: expected flag {wanted}, got {seen}"


def nanoseconds(seconds: float) -> int:
    """The limit of a kernel's wait in nanoseconds.  A kernel cannot wait without a limit, so an infinite one is cut."""
    return int(min(seconds, 1e9) * 1e9)


def _piece(word: int) -> str:
    return f"{word % (1 << 31)} bytes of a {'message' if word >> 31 else 'collective'}"
