"""Calls on GPUs that the compiled core makes: what it must know of a call (``kos/_core/module_launch.c``).

The core can repeat a call that Python has made, under two conditions.  The call has queued only launches on the stream
of its arrays, and nothing on which these launches depend has changed.  For example, the last call must have had the
same stream and route (``Streams.current``, ``route``).  Code that ends this state, such as the watchdog, sets
``current`` to ``Streams.NONE``.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

from kos._core import native
from kos.comm.work import Work
from kos.cuda import driver
from kos.cuda.kernels import Address, Launch
from kos.cuda.streams import LEGACY, is_captured
from kos.memory import windows
from kos.memory.array import Array
from kos.memory.libraries import may_close, may_die

_MOST_LAUNCHES = 1024
"""The most launches of a cached call.  Each takes some 200 bytes."""
_MOST_STREAMS = 16
"""The most streams that cached calls keep alive."""


def tell_windows() -> None:
    """Tell the core where windows are, on which its calls depend too."""
    memories = list(windows.memories.values())
    native.windows(b"".join(struct.pack("=QQ", each.pointer, each.nbytes) for each in memories))


if native is not None:
    windows.changed = tell_windows


class EagerCalls:
    """Describes the calls of a communicator, whose backend is ``backend``, to ``core``, the core's Group."""

    def __init__(self, core: Any, shared: Any, backend: Any) -> None:
        self.core, self._shared, self._backend = core, shared, backend
        self._streams = set[int]()  # ids of the stream owners that cached calls hold

    def core_reads_arrays(self) -> bool:
        """Whether the fields of an ``Array`` lie where the core expects them."""
        return bool(native.arrays(Array(1 << 40, (2, 3), "float32", 5, owner=self, stream=self.core, readonly=True)))

    def describe(
        self, work: Work[Any], x: int, out: int, overlap: tuple[int, int, int], streams: Sequence[Any]
    ) -> tuple[Any, int, int, Any] | None:
        """The packed launches of calls like ``work``, the arguments ``x`` and ``out`` that they read, and the guards.

        ``overlap``: as in ``objects.h``.  ``streams`` has the owner of the stream of each argument.  There are no
        launches if the core cannot make them.  Returns None if no later call can be like this one.
        """
        prepared = work.prepared
        if work.stream > LEGACY and is_captured(work.stream):  # graphs may have other routes
            return None
        self._limit_streams([work.stream_owner, *streams])
        starts = prepared.backend is self._backend and prepared.blocking
        starts = starts and (x < 0 or bool(work.send)) and (out < 0 or bool(work.recv))
        call, guards = self._with_launches(work, overlap) if starts else (None, None)
        return call, x, out, guards

    def _limit_streams(self, owners: list[Any]) -> None:
        """Clear the cache before its calls hold too many streams: a program may create one per call."""
        new = {id(each) for each in owners if each is not None and may_die(each)} - self._streams
        if len(self._streams | new) > _MOST_STREAMS:
            self._streams.clear()
            self.core.forget()
        self._streams |= new

    def _with_launches(self, work: Work[Any], overlap: tuple[int, int, int]) -> tuple[Any, Any]:
        """The launches of calls like ``work``, packed for the core, and their guards.

        Both are None if the core cannot make the launches, or if nothing keeps the stream alive.
        """
        prepared, stream, owner = work.prepared, work.stream, work.stream_owner
        o, route = prepared.operation, prepared.route
        if o.options.purpose or work.convert is not None or (type(owner) is int and stream > LEGACY):
            return None, None
        plan, room = prepared.plan, route.room(prepared.plan)
        no_copy = work.send == work.recv and not plan.waits  # of an array to itself
        launches = [] if no_copy else None if room is None else plan.launches(stream)
        if launches is None or room is None or len(launches) > _MOST_LAUNCHES:
            return None, None
        if any(len(each.arguments) > native.MOST_WORDS for each in launches):
            return None, None
        handle = owner.__cuda_stream__() if owner is not None and may_close(owner) else None
        needs_context = any(stream <= each.context_up_to for each in launches)
        context = int(driver.primary_context(prepared.backend.device)) if needs_context else 0
        in_graph_alike = prepared.capture_invariant and not plan.memories and len(launches) == 1
        asks = launches and stream > LEGACY and not in_graph_alike
        captured = driver.address("cuStreamIsCapturing") if asks else 0
        current = driver.address("cuCtxGetCurrent") if context else 0
        numbers = len(launches), prepared.fingerprint, stream, route.failed_word, *room, context, current, captured
        distance, *nbytes = overlap
        packed = struct.pack("=13Q", *numbers, *nbytes, distance) + b"".join(map(pack, launches))
        route = prepared.backend.ordered_route(prepared)
        guards = self._shared.streams, owner, route, handle, launches, prepared.backend, self._shared
        return bytearray(native.PLAN_AT) + packed, guards

    def launch_failed(self, work: Work[Any], launch: Launch, status: int) -> None:
        """Raise the error of a launch that the core could not make."""
        work.backend._raise(work, launch.error(status))


def pack(launch: Launch) -> bytes:
    """A ``kos_launch`` of ``core.h``."""
    arguments = launch.arguments
    words = [0 if type(x) is Address else int(x) for x in arguments]
    words += [0] * (8 - len(words))  # the core always passes 8 words to a function
    patches = [n for i, x in enumerate(arguments) if type(x) is Address for n in (i, x.number, x.offset)]
    header = struct.pack("=5Q", launch.function, launch.kernel, len(words), len(patches) // 3, launch.closes)
    return header + launch.config + struct.pack(f"={len(words)}Q{len(patches)}q", *words, *patches)
