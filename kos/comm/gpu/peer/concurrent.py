"""Which kernels of several communicators run concurrently on one GPU.

A kernel of ``peer`` waits for the same kernel on other GPUs, and occupies its multiprocessors meanwhile.  The threads
of two ranks may launch the kernels of two communicators in different orders.  Both kernels complete if all of their
blocks are resident at once.  So communicators run concurrently, without an order, while their blocks fit.  They fit if
there are at most multiprocessors x the least ``blocks_per_sm`` of them: a multiprocessor with fewer blocks has room for
another one of any kernel.  A launch that does not fit begins a new phase, whose kernels follow all kernels of the phase
before.

Each rank decides this by itself.  This is safe, because kernels that wait for nothing on their own GPU cannot be part
of a cycle of waits.  Each capture of a graph has its own phases, because captured and uncaptured work cannot wait for
each other.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

from kos.comm.gpu.order import Streams
from kos.cuda.driver import relaxed_capture
from kos.cuda.streams import capture_of
from kos.errors import KosError

_CAPTURES = 16
"""Captures whose phases are kept; a program may capture any number of graphs."""


class Occupancy(NamedTuple):
    """The blocks of a launch, all resident at once, and how many such blocks a multiprocessor can hold."""

    blocks: int
    blocks_per_sm: int

    def merged(self, other: Occupancy) -> Occupancy:
        """The occupancy of a communicator that launches both, one after another."""
        return Occupancy(max(self.blocks, other.blocks), min(self.blocks_per_sm, other.blocks_per_sm))


NO_OCCUPANCY = Occupancy(0, 1 << 30)
"""The occupancy of a launch that has no kernels.  The occupancy of every other launch is larger."""


class _Member(NamedTuple):
    backend: weakref.ref[Any]
    stream: int  # of its last launch
    occupancy: Occupancy


_Phase = dict[Streams, _Member]
"""Communicators whose kernels run concurrently."""


class ConcurrentKernels:
    """The communicators of this process on one GPU, and the order of their kernels."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # reentrant: the garbage collector may close a backend meanwhile
        self._backends: weakref.WeakSet[Any] = weakref.WeakSet()
        self._phases: dict[int, _Phase] = {}  # by capture; 0: uncaptured
        self._before: dict[int, list[tuple[Streams, int]]] = {}  # the streams that each member of those follows
        self._launching: set[Streams] = set()  # of those between ``order`` and ``launched``

    def add(self, backend: Any) -> None:
        """Add a new communicator, and load the kernels that all of them need from now on."""
        with self._lock:
            self._backends.add(backend)
            changed = self._update_exclusive()
        for each in changed:
            try:
                each.load_copy_kernels()
            except KosError:  # of another communicator, whose next call raises it
                if each is backend:
                    raise

    def remove(self, backend: Any) -> None:
        """Remove a communicator whose work has completed."""
        with self._lock:
            self._backends.discard(backend)
            self._launching.discard(backend.streams)
            for capture, phase in self._phases.items():
                phase.pop(backend.streams, None)
                self._before[capture] = [each for each in self._before[capture] if each[0] is not backend.streams]
            self._update_exclusive()

    def _update_exclusive(self) -> list[Any]:
        """Set on each communicator whether it is the only one.  Returns those for which this has changed."""
        backends = list(self._backends)
        return [each for each in backends if each.set_exclusive(len(backends) == 1)]

    def order(self, backend: Any, stream: int, occupancy: Occupancy, multiprocessors: int) -> tuple[Occupancy, bool]:
        """Order the next launch of ``backend`` on ``stream``, which it holds; call ``launched`` after the launch.

        Returns an occupancy and a flag.  If the flag is True, later launches on this stream up to that occupancy need
        no further call.  If a phase ends while another thread makes such a launch, the launch belongs to neither phase.
        """
        capture, streams = capture_of(stream), backend.streams
        with self._lock:
            phase = self._phase(capture)
            mine = phase.get(streams)
            total = occupancy if mine is None else mine.occupancy.merged(occupancy)
            if mine is None or total != mine.occupancy:
                if not _fits(phase, streams, total, multiprocessors) and not capture:
                    self._remove_idle(phase, streams)
                if not _fits(phase, streams, total, multiprocessors):
                    phase, mine, total = self._next(capture), None, occupancy
                if mine is None:
                    for others, before in self._before[capture]:
                        if others is not streams:
                            others.follow(stream, before, capture)
            phase[streams] = _Member(weakref.ref(backend), stream, total)
            self._launching.add(streams)
        return total, not capture and streams.is_kept(stream)

    def launched(self, backend: Any) -> None:
        """The launch of ``backend`` is queued on its stream, which is idle only when it has completed."""
        with self._lock:
            self._launching.discard(backend.streams)

    def _remove_idle(self, phase: _Phase, streams: Streams) -> None:
        """Remove the other members whose work has completed."""
        for holder, each in list(phase.items()):
            if holder is not streams and holder not in self._launching:
                _invalidate((each,))
                if _is_complete(holder, each.stream):
                    del phase[holder]

    def _phase(self, capture: int) -> _Phase:
        """The phase of a capture, perhaps its first: members of phase 0 may have launched into the capture."""
        if (phase := self._phases.get(capture)) is not None:
            return phase
        phase = {}
        for streams, each in self._phases[0].items() if capture and 0 in self._phases else ():
            if each.stream in streams.owners and streams.is_kept(each.stream) and capture_of(each.stream) == capture:
                phase[streams] = each
        for ended in sorted(number for number in self._phases if number)[: 1 - _CAPTURES]:
            del self._phases[ended], self._before[ended]
        self._phases[capture], self._before[capture] = phase, []
        return phase

    def _next(self, capture: int) -> _Phase:
        """A new phase, which follows the current one."""
        former, phase = self._phases[capture], _Phase()
        self._phases[capture] = phase
        self._before[capture] = [(streams, each.stream) for streams, each in former.items()]
        _invalidate(former.values())
        return phase

    def record(self, backend: Any, stream: int) -> None:
        """Record a launch on ``stream`` by the only communicator of the GPU."""
        with self._lock:
            self._phase(0)[backend.streams] = _Member(weakref.ref(backend), stream, Occupancy(0, 1))

    def is_idle(self, backend: Any = None) -> bool:
        """Whether the uncaptured work of ``backend``, or of all communicators, has completed.

        For one communicator, work on a stream that is being captured does not count: it cannot be queried.
        """
        with self._lock:
            members = self._phases.get(0, {}).items()
            placed = [*((streams, each.stream) for streams, each in members), *self._before.get(0, ())]
        if backend is None:
            return all(_is_complete(streams, stream) for streams, stream in placed)
        return all(_is_complete(streams, stream, True) for streams, stream in placed if streams is backend.streams)

    def others(self, backend: Any) -> list[Any]:
        """The other communicators of the current phase and of the phase before it."""
        with self._lock:
            known = {*self._phases.get(0, ()), *(streams for streams, _ in self._before.get(0, ()))}
            return [each for each in self._backends if each is not backend and each.streams in known]


def _fits(phase: _Phase, streams: Streams, wanted: Occupancy, multiprocessors: int) -> bool:
    """Whether the blocks of a communicator with this occupancy and of the other members are resident at once."""
    others = [each.occupancy for holder, each in phase.items() if holder is not streams]
    per_sm = min(each.blocks_per_sm for each in (*others, wanted))
    return not others or sum(each.blocks for each in (*others, wanted)) <= multiprocessors * per_sm


def _is_complete(streams: Streams, stream: int, captured: bool = False) -> bool:
    """Whether uncaptured work on a stream has completed; ``captured`` if the stream is being captured."""
    with relaxed_capture():
        owner = streams.owners.get(stream, streams)
        if owner is streams:  # the host has waited for it
            return True
        if type(owner) is not int and capture_of(stream):  # else the stream may be gone, but an event is known
            return captured
        return streams.over(stream, owner)


def _invalidate(members: Iterable[_Member]) -> None:
    """Make the next launch of each member call ``order``."""
    for each in members:
        if (backend := each.backend()) is not None:
            backend.invalidate_order()
