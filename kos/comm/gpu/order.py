"""The streams of a communicator's callers: the object that keeps each alive, and the order between their work.

A caller may destroy a stream as soon as the call returns.  So the object that keeps the stream alive is held while kos
may query it.  If no such object is known, an event is recorded within the call and replaces the stream.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import product
from typing import Any

from kos.cuda import driver, streams
from kos.cuda.driver import relaxed_capture
from kos.cuda.streams import LEGACY, Event, capture_of, is_idle
from kos.errors import InvalidArgument

_MANY = 16
"""Streams above which idle ones are removed: a program may create one for each call."""


class Streams:
    """Streams with work that the host has not waited for, by handle."""

    __slots__ = ("__dict__", "__weakref__", "current", "route")  # the core reads these two

    NONE = object()
    """The value of ``current`` if there is none."""

    def __init__(self, device: int) -> None:
        self.current: Any = self.NONE
        """The owner of the stream of the last call.  The next call on it need not hold it again, nor order it for
        ``route``."""
        self.route: Any = None
        """The route of the last call on that stream (``Order``); None if it needed no order."""
        self.owners: dict[int, Any] = {}
        """The object that keeps a stream alive: None for the legacy default stream, the handle if none is known."""
        self.device = device
        self._ends: dict[tuple[int, int], Event] = {}  # the end of the last work, by capture (0: none) and stream
        self._spare: list[Event] = []
        self._event = Event(device)

    def hold(self, stream: int, owner: Any, beside: Collection[int] = ()) -> None:
        """Hold ``owner`` before work is queued on ``stream``.

        The same batch queues work on the streams ``beside``, so these are kept even if they are still idle.
        """
        self.current = self.NONE
        if stream not in self.owners:
            if len(self.owners) >= _MANY:
                self._remove_idle(beside)
        elif type(owner) is int and self.is_kept(stream):
            if not self._waited_if_closed(stream, self.owners[stream]):
                return  # keep the object: the handle is its own, and work without an event may be queued on the stream
        elif not self.is_kept(stream) and owner is not self.owners[stream] and not capture_of(stream):
            end = self._ends.get((0, stream))
            if end is not None:  # perhaps another stream had this handle
                end.hold(stream)
        self.owners[stream] = owner

    def is_kept(self, stream: int) -> bool:
        """Whether ``stream`` may be queried after the call."""
        return stream <= LEGACY or type(self.owners.get(stream, 0)) is not int

    def mark(self, stream: int) -> None:
        """Record the end of the work on ``stream``, if the stream is not kept."""
        if not self.is_kept(stream):
            place = capture_of(stream), stream
            end = self._ends.get(place)
            if end is None:
                end = self._ends[place] = self._spare.pop() if self._spare else Event(self.device)
            end.record(stream)

    def over(self, stream: int, owner: Any) -> bool:
        """Whether all work queued on ``stream`` has run."""
        if stream > LEGACY and type(owner) is int:
            end = self._ends.get((0, stream))
            return end is None or end.done()
        return self._waited_if_closed(stream, owner) or is_idle(stream)

    def follow(self, stream: int, before: int, capture: int) -> None:
        """Make ``stream`` wait for the work queued on ``before``, both in ``capture``."""
        if before not in self.owners:  # the host has waited for it
            return
        if (end := self._ends.get((capture, before))) is not None:
            end.hold(stream)  # even if the handles are equal: ``stream`` may be a new stream with this handle
        if self.must_follow(stream, before, capture):
            self._event.order(before, stream)

    def must_follow(self, stream: int, before: int, capture: int) -> bool:
        """Whether work on ``stream`` must wait for the stream ``before``.  Raises InvalidArgument if it cannot."""
        if before == stream or before not in self.owners or not self.is_kept(before):
            return False
        if self._waited_if_closed(before, self.owners[before]):
            return False
        if capture_of(before) != capture:
            raise InvalidArgument(
                "stream: this call must follow one whose stream is being captured now; "
                "call synchronize() before the capture, or make this call after it"
            )
        return True

    def _waited_if_closed(self, stream: int, owner: Any) -> bool:
        """Whether the owner of ``stream`` has closed it; if so, waits on the host, since closing does not."""
        closed = hasattr(owner, "__cuda_stream__") and streams.handle(owner) != stream
        if closed:
            driver.synchronize(self.device)
        return closed

    def _remove_idle(self, beside: Collection[int]) -> None:
        with relaxed_capture():
            for stream, owner in list(self.owners.items()):
                captured = self.is_kept(stream) and capture_of(stream)
                if stream not in beside and not captured and self.over(stream, owner):
                    self.forget(stream)

    def forget(self, stream: int) -> None:
        """Remove ``stream``, after the host has waited for its work."""
        self.current = self.NONE
        self.owners.pop(stream, None)
        for place in [place for place in self._ends if place[1] == stream]:
            self._spare.append(self._ends.pop(place))


_Turn = tuple[Collection[int], Collection[int], dict[Any, Collection[int]]]


class Order:
    """Orders the work of several routes (routes, which take turns) on any of the ``streams``.

    Captured work and uncaptured work cannot wait for each other.  So each capture has an order of its own, and
    uncaptured work follows the last uncaptured work, regardless of captures in between.
    """

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        # For each capture, the last route and its turn.  A turn has three parts: the streams of the route, the streams
        # that each of them follows, and the streams of the last work of each serial route.  A route that is not serial
        # may use several streams in its turn.
        self._last: dict[int, tuple[Any, _Turn]] = {}
        self.route: Any = None
        """The last route.  It may queue more work on ``stream`` without another call of ``enter``."""
        self.stream = -1  # no stream
        self._turn = 0

    def enter(self, route: Any, mine: Collection[int], serial: bool) -> None:
        """Order the next work of ``route``, on the streams ``mine``, behind the last work of other routes.

        The work of a ``serial`` route is also ordered behind its own last work, even if other routes have queued work
        since, and even if it was on other streams.
        """
        held, self.stream, self.route = self._streams, -1, route
        self._turn = turn = self._turn + 1
        captures: dict[int, list[int]] = {}
        for stream in mine:
            captures.setdefault(capture_of(stream), []).append(stream)
        for capture, here in captures.items():
            together, followed, own = self._turn_of(route, capture, serial)
            new = [stream for stream in here if stream not in together]
            for stream, before in product(new, followed):
                held.follow(stream, before, capture)
            if capture and capture not in self._last:
                self._follow_started_capture(here, capture)
            if turn != self._turn:  # a finalizer has made a call meanwhile: this one follows it
                return self.enter(route, mine, serial)
            here = [*together, *new]
            self._last[capture] = route, (here, followed, {**own, route: here} if serial else own)
        for ended in sorted(each for each in self._last if each)[:-_MANY]:
            del self._last[ended]
        if captures.keys() == {0} and len(mine) == 1 and all(map(held.is_kept, mine)):
            self.stream = next(iter(mine))

    def _turn_of(self, route: Any, capture: int, serial: bool) -> _Turn:
        """The turn of ``route``: its streams, those that its other streams must follow, and those of serial routes."""
        held = self._streams
        former, (last, followed, own) = self._last.get(capture, (route, ((), (), {})))
        if serial or former is not route or not all(map(held.is_kept, last)):
            return (), dict.fromkeys((*last, *(own.get(route, ()) if serial else ()))), own
        return [stream for stream in last if stream in held.owners], followed, own

    def check(self, route: Any, stream: int, capture: int, serial: bool) -> None:
        """Raise InvalidArgument if ``enter`` would: work on ``stream`` would follow a stream that is being captured."""
        together, followed, _ = self._turn_of(route, capture, serial)
        for before in followed if stream not in together else ():
            self._streams.must_follow(stream, before, capture)

    def _follow_started_capture(self, here: Collection[int], capture: int) -> None:
        """Follow work queued without a new ``enter`` on a stream that is being captured now."""
        if 0 not in self._last:
            return
        held, (_, (last, _, _)) = self._streams, self._last[0]
        for stream, before in product(here, last):
            kept = before in held.owners and held.is_kept(before)
            if kept and before != stream and capture_of(before) == capture:
                held.follow(stream, before, capture)
