"""Cached calls: an eager call repeated on the same arrays skips the checks of its arguments.

The cache key is the input array, or the output of a rank without input.  A call is a hit if operation, reduce op, root
or ranks of the message, output and streams are those of the cached call.  The first call on an array only marks it: an
array that is used once, such as a view, is not cached.  A hit reads little memory and takes a third of the time of a
full call.

In host memory the calls on ndarrays of at most ``SMALL_BYTES`` are cached.  An ndarray may change its shape, and has
the same address only as long as there is a view of it.  So the cache holds these arrays, and compares their shapes,
dtypes and flags.
"""

from __future__ import annotations

import weakref
from typing import Any

from numpy import ndarray

from kos.comm.operation import Call
from kos.comm.reduction import ReduceOp
from kos.cuda.streams import capture_of
from kos.memory.array import Array

SMALL_BYTES, MOST_HELD = 256 << 10, 64
"""The largest ndarray whose calls are cached, and the most of them."""
HOST_CACHED = frozenset({"all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast"})
CACHED = HOST_CACHED | {"reduce", "gather", "scatter", "send_recv"}
"""The operations whose calls are cached, in host memory and on GPUs."""


class _Entry:
    """A cached call, with weak references to its arrays, and the arguments that a hit must match."""

    __slots__ = ("array", "call", "captured", "name", "op", "out", "ranks", "stream")

    def __init__(self, call: Call, array: weakref.ref[Array], out: Any) -> None:
        o = call.operation
        self.call, self.name, self.array, self.out, self.stream = call, call.name, array, out, call.queue
        self.op, self.ranks = o.reduction and o.reduction.op, o.root if o.collective else o.message[:3]
        route: Any = call.route
        self.captured = None if route.fixed else capture_of(call.stream) != 0
        """Whether a graph captured the call, if its route depends on that."""


class _HostEntry:
    """A cached call on ndarrays."""

    __slots__ = ("call", "changing", "dtype", "name", "out", "out_shape", "parameter", "shape", "x")

    def __init__(self, call: Call, parameter: Any, x: ndarray[Any, Any], out: ndarray[Any, Any] | None) -> None:
        self.call, self.name, self.parameter, self.x, self.out = call, call.name, parameter, x, out
        self.shape, self.dtype, self.changing = x.shape, x.dtype, x if out is None else out
        self.out_shape = self.changing.shape


class CallCache:
    """The cached calls of one communicator: one for each live input array."""

    __slots__ = ("_entries", "_host")

    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}
        self._host: dict[int, _HostEntry | None] = {}  # None: an array that was used once

    def launch(self, comm: Any, name: str, x: Array, out: Any, op: Any = None, ranks: Any = None) -> bool:
        """Launch the cached call with these arguments; False on a cache miss.

        ``ranks``: the root, or destination, source and tag of a message; numbers of type int.
        """
        entry = self._entries.get(id(x))
        if (
            entry is None or entry.name is not name or entry.op is not op or entry.ranks != ranks
            or entry.stream is not (stream := x.stream) or comm._batch is not None or getattr(x.owner, "closed", False)
        ):  # fmt: skip
            return False
        if out is None or out is x:
            if entry.out is not None or x.readonly:
                return False
        elif (
            entry.out is None or entry.out() is not out or out.stream is not stream or out.readonly
            or getattr(out.owner, "closed", False)
        ):  # fmt: skip
            return False
        if comm._closed:
            comm._check_open()
        call = entry.call
        if entry.captured is not None and entry.captured != (capture_of(call.stream) != 0):
            return False
        call.sequence = next(comm._collectives if call.collective else comm._messages)
        comm._group.note(call, 3)
        comm.backend.start(call)
        return True

    def repeat(self, comm: Any, name: str, x: Any, out: Any, parameter: Any) -> bool:
        """The same for ndarrays: run the cached call to its end."""
        entry = self._host.get(id(x))
        if (
            entry is None or entry.x is not x or entry.name is not name or entry.parameter is not parameter
            or entry.out is not out or x.dtype is not entry.dtype or x.shape != entry.shape or comm._batch is not None
            or not entry.changing.flags.carray  # contiguous and writeable
        ):  # fmt: skip
            return False
        if out is not None and not (
            x.flags.c_contiguous and out.dtype is entry.dtype and out.shape == entry.out_shape
        ):  # fmt: skip
            return False
        if comm._closed:
            comm._check_open()
        call = entry.call
        call.sequence = next(comm._collectives)
        comm._group.note(call, 3)
        work = comm.backend.start(call)
        if work is not None:
            work.wait()
        return True

    def add_host(self, call: Call) -> None:
        """Cache a call that is complete if its arrays and arguments allow it."""
        o, host = call.operation, self._host
        send, recv, reduction = o.send, o.recv, o.reduction
        if o.name not in HOST_CACHED or send is None or recv is None or max(send.nbytes, recv.nbytes) > SMALL_BYTES:
            return
        x, out = send.array, recv.array
        if not type(x) is type(out) is ndarray:
            return
        key = id(x)
        if key not in host:
            if len(host) == MOST_HELD:
                host.clear()
            host[key] = None
        else:
            parameter = o.root if reduction is None else reduction.op
            if parameter is not ReduceOp.PREMUL_SUM:
                host[key] = _HostEntry(call, parameter, x, None if out is x else out)

    def add(self, call: Call) -> None:
        """Cache a launched call if its arrays and arguments allow it."""
        o = call.operation
        if o.name not in CACHED:
            return
        ends, reduction = [end for end in (o.send, o.recv) if end is not None], o.reduction
        x, out = ends[0].array, ends[-1].array
        if not type(x) is type(out) is Array:
            return
        if not x.used:
            x.used = True
        elif self._entries.pop(id(x), None) is None:  # two different calls that alternate on one array are not cached
            if reduction is not None and reduction.op is ReduceOp.PREMUL_SUM:  # its factor may change
                return
            key, entries = id(x), self._entries
            array = weakref.ref(x, lambda _: entries.pop(key, None))
            entries[key] = _Entry(call, array, None if out is x else weakref.ref(out))
            ends[0].array = ends[-1].array = None

    def clear(self) -> None:
        """Remove all cached calls."""
        self._entries.clear()
        self._host.clear()
