"""Cached calls: an eager call repeated on the same arrays skips the checks of its arguments.

The cache key is the input array, or the output on a rank without input; a barrier has none.  A call is a hit if its
operation, reduce op, root or message, counts, output and streams equal those of the cached call.  The first call on an
array only marks it, so an array that is used once, such as a view, is not cached.  A hit takes a third of the time of a
full call.

On GPUs the route or the memory of a call may depend on whether a graph captures it.  A hit then equals the cached call
in that too.  Only then is the driver queried, once for both.

The cache holds weak references to arrays on GPUs.  An ndarray may change its shape, and keeps its address only while a
view of it exists.  So the cache holds ndarrays, at most ``HELD_BYTES`` in all, and compares shapes, dtypes and flags.
"""

from __future__ import annotations

import weakref
from dataclasses import replace
from types import NoneType
from typing import Any

from numpy import ndarray

from kos.comm.operation import Call
from kos.comm.reduction import ReduceOp
from kos.cuda.streams import is_captured
from kos.memory.array import Array
from kos.memory.windows import InWindows

LARGEST_BYTES, HELD_BYTES, MOST_HELD = 16 << 20, 128 << 20, 64
"""The largest ndarray whose calls are cached; the bytes of inputs and outputs in the cache, and the calls, at most."""


class _Entry:
    """A cached call, and the arguments that a hit must match."""

    __slots__ = ("call", "name", "op", "ranks")

    def __init__(self, call: Call) -> None:
        o = call.operation
        self.call, self.name = call, call.name
        self.op = o.reduction and o.reduction.op
        self.ranks: Any = o.root if o.collective else o.message
        if o.send_counts is not None or o.recv_counts is not None:
            self.ranks = o.root, o.send_counts, o.recv_counts

    def matches(self, x: Any, out: Any) -> bool:
        """Whether a call on these arrays is the cached one; ``x`` is the key, and ``out`` None in place."""
        return True


class _DeviceEntry(_Entry):
    """A cached call on arrays on a GPU, with weak references to them."""

    __slots__ = ("array", "captured", "out", "stream")

    def __init__(self, call: Call, array: weakref.ref[Array], out: weakref.ref[Array] | None) -> None:
        super().__init__(call)
        self.array, self.stream = array, call.queue
        self.out: Any = out
        route: Any = call.route
        in_windows = type(route.launch) is InWindows
        self.captured = None if route.fixed and not in_windows else is_captured(call.stream)
        """Whether a graph captured the call, if its route or its launch depends on that."""
        if in_windows and not self.captured:  # no hit is captured: its launch need not query that
            call.route = replace(route, launch=route.launch.launch)

    def matches(self, x: Any, out: Any) -> bool:
        stream = x.stream
        if self.stream is not stream or getattr(x.owner, "closed", False):
            return False
        if out is None or out is x:
            if self.out is not None or x.readonly:
                return False
        elif (
            self.out is None or self.out() is not out or out.stream is not stream or out.readonly
            or getattr(out.owner, "closed", False)
        ):  # fmt: skip
            return False
        return self.captured is None or self.captured is is_captured(self.call.stream)


class _HostEntry(_Entry):
    """A cached call on ndarrays."""

    __slots__ = ("dtype", "out", "out_shape", "reads", "shape", "x")

    def __init__(self, call: Call, x: ndarray[Any, Any], out: ndarray[Any, Any] | None) -> None:
        super().__init__(call)
        self.x, self.shape, self.dtype, self.out_shape = x, x.shape, x.dtype, None if out is None else out.shape
        self.out: Any = out
        self.reads = call.operation.recv is None and self.name != "exscan"  # which refuses the same on every rank

    def matches(self, x: Any, out: Any) -> bool:
        if x.dtype is not self.dtype or x.shape != self.shape:
            return False
        if out is None or out is x:
            flags = x.flags
            return self.out is None and (flags.c_contiguous if self.reads else flags.carray)
        return (
            self.out is out and x.flags.c_contiguous and out.dtype is self.dtype and out.shape == self.out_shape
            and out.flags.carray  # contiguous and writeable
        )  # fmt: skip


class CallCache:
    """The cached calls of one communicator: one for each live input array."""

    __slots__ = ("_entries", "_held", "_seen", "windows")

    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}
        self._held = 0  # bytes of the ndarrays added since the cache was empty
        self.windows = 0  # how often the windows of the communicator may have changed
        self._seen: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()  # arrays that were used

    def repeat(self, comm: Any, name: str, x: Any, out: Any = None, op: Any = None, ranks: Any = None) -> bool:
        """Run the cached call with these arguments, or queue it on its stream; False on a cache miss.

        ``ranks``: the root; or root, send counts and receive counts, as tuples; or destination, source and tags of a
        message.
        """
        entry = self._entries.get(id(x))
        if (
            entry is None or entry.name is not name or entry.op is not op or entry.ranks != ranks
            or comm._batch is not None or not entry.matches(x, out)
        ):  # fmt: skip
            return False
        if comm._closed:
            comm._check_open()
        call = entry.call
        try:
            call.sequence = next(comm._collectives if call.collective else comm._messages)
            comm._group.note(call, 3)
            work = comm.backend.start(call)
        except BaseException as error:
            comm._fail_if_interrupted(error, call)
            raise
        if work is not None:
            try:
                work.wait()
            except BaseException:  # Ctrl-C, say: it may still be in flight, and a Call is in flight once
                self._entries.pop(id(x), None)
                raise
        return True

    def add(self, call: Call) -> None:
        """Cache a launched call, which is complete in host memory, if its arrays and arguments allow it."""
        o = call.operation
        if o.reduction is not None and o.reduction.op is ReduceOp.PREMUL_SUM:
            return  # the factor may change
        ends = [end for end in (o.send, o.recv) if end is not None]
        x: Any = ends[0].array if ends else None
        out: Any = ends[-1].array if ends else None
        key, entries = id(x), self._entries
        new: _Entry | None = None
        if type(x) is not type(out) or type(x) not in (Array, ndarray, NoneType):
            return
        if x is not None and self._seen.get(key) is not x:
            self._seen[key] = x
        elif entries.pop(key, None) is not None:
            return  # two different calls that alternate on one array are not cached
        elif type(x) is Array:
            array = weakref.ref(x, lambda _: entries.pop(key, None))
            new = _DeviceEntry(call, array, None if out is x else weakref.ref(out))
            ends[0].array = ends[-1].array = None
        elif x is None:
            new = _Entry(call)
        elif max(x.nbytes, out.nbytes) <= LARGEST_BYTES:
            nbytes = x.nbytes if out is x else x.nbytes + out.nbytes
            if len(entries) >= MOST_HELD or self._held + nbytes > HELD_BYTES:
                self.clear()
            self._held += nbytes
            new = _HostEntry(call, x, None if out is x else out)
        if new is not None:
            entries[key] = new

    def clear(self) -> None:
        """Remove all cached calls."""
        self._entries.clear()
        self._held = 0
