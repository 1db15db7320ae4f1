"""Calls on GPUs that the compiled core makes: what it must know of a call (``kos/_core/module_launch.c``).

The core can repeat a call that Python has made, under two conditions.  The call has queued only launches on the stream
of its arrays, and nothing on which these launches depend has changed.  For example, the last call must have had the
same stream and route (``Streams.current``, ``party``).  Code that ends this state, such as the watchdog, sets
``current`` to ``Streams.NONE``.
"""

from __future__ import annotations

import struct
import sys
from threading import get_ident
from typing import Any

import numpy as np

from kos._core import native
from kos.comm.gpu.routes import is_copy
from kos.comm.reduction import ReduceOp
from kos.comm.work import Work
from kos.cuda import driver
from kos.cuda.kernels import RECV, SEND, Address, Launch, copy_launch
from kos.cuda.streams import LEGACY, is_captured
from kos.memory import windows
from kos.memory.array import Array
from kos.memory.libraries import library_of, may_close, may_die
from kos.memory.windows import InWindows

_APART = (1 << 64) - 1
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
    """What the core's Group asks about the calls of ``comm``, whose backend is ``backend``."""

    def __init__(self, comm: Any, shared: Any, backend: Any) -> None:
        self._comm, self._shared, self._backend = comm, shared, backend
        self.asked = 0  # the thread whose next call is kept for ``remember``, or 0
        self.last: tuple[int, Work[Any], Any, Any] | None = None  # that thread, the call, what it reads and writes
        self._core: Any = None
        self._streams = set[int]()  # ids of the stream owners that cached calls hold

    def bind(self, core: Any) -> Any:
        """``core``, which makes calls of the communicator; None if it makes another one's, or cannot read arrays."""
        comm, failures, example = self._comm, self._shared.failures, np.zeros((2, 3))
        array = Array(1 << 40, (2, 3), "float32", 5, owner=self, stream=core, readonly=True)
        bound = native.arrays(array) and core.bind(
            example, example.ctypes.data, comm, failures, self, failures.status, self._backend.engine.active,
            comm.recorder.counter, comm.recorder.slots, comm._collectives, comm._messages,
        )  # fmt: skip
        self._core = core if bound else None
        return self._core

    def note_last(self, work: Work[Any]) -> None:
        """``work`` is launched, which may be the call that the core waits for."""
        if self.asked == get_ident():
            self.asked, self.last = 0, (self.asked, work, work.held, work.array)
        elif self.last is not None and self.last[0] == get_ident():
            self.last = None  # one is within the other, as of a finalizer: unknown which the core waits for

    def remember(
        self, asked: Any, positional: tuple[Any, ...], keywords: dict[str, Any], result: Any
    ) -> tuple[Any, ...] | bool | None:
        """How the core makes calls like the last one of this thread.

        ``asked`` is the name of the operation, which got these arguments, or the Persistent that was started.

        None if this call cannot serve as a template for later ones.  False if no call of this kind can.

        Returns the packed launches, the Prepared, its description for the recorder, a Work that stands for all such
        calls, and whether a call returns no Work.  The indices of the arguments that are input, output and result
        follow (-1: none).  Then come the objects by whose identity calls are compared, which must be kept alive, and
        those of ``_plan``.  The last two objects, the backend and the shared state, hold the last Work.  For a
        Persistent, the result has the Works that its starts return in turn, and addresses instead of objects.
        """
        thread, self.asked, last, self.last = self.asked, 0, self.last, None
        if thread or last is None or last[0] != get_ident():
            return None
        work, prepared = last[1], last[1].prepared
        persistent = not isinstance(asked, str)
        known = prepared.lasting and (result is work if persistent else prepared.name == asked)
        if not known or (work.stream > LEGACY and is_captured(work.stream)):  # graphs may have other routes
            return None
        arguments, stream = (*positional, *keywords.values()), keywords.get("stream")
        streams = (id(stream),) if stream is not None and not library_of(stream) else ()  # torch's are new each time
        if any(not (_is_fixed(x) or id(x) in streams) for x in arguments):
            return None  # the next call may have another object
        if not persistent and asked.endswith("_v") and sum(map(_is_counts, arguments)) != 1 + (asked == "all_to_all_v"):
            return None  # each call tells the ranks its sizes
        if not prepared.waits:
            return False
        ends = [each if address else None for each, address in zip(last[2:], (work.send, work.recv), strict=True)]
        ignores_out = asked == "exscan" and not work.recv  # rank 0 has no result, whatever its ``out``
        others = (x for x in arguments if _address(x) is not None)
        if not ignores_out and any(not any(x is each for each in ends) for x in others):
            return False
        used, planned = [_place(x, arguments) for x in (*ends, result)], self._plan(work)
        if planned is None or (None in used and not persistent):
            return False
        if not persistent:  # whose owner keeps its stream
            self._limit_streams([work.queue, stream, *(x.stream for x in arguments if type(x) is Array)])
        lasting = prepared.work(prepared)
        lasting.stream, lasting.queue = work.stream, work.queue
        objects, works = (*map(_identity, arguments), *keywords), lasting
        if persistent:
            works = work.unstarted_copy(), work.unstarted_copy()
            objects, used = (work.send, work.recv, None), [0, 1, -1]
        plan, order = planned
        known = plan, prepared, prepared.description, works, not persistent
        return *known, *used, objects, order, prepared.backend, self._shared

    def _limit_streams(self, owners: list[Any]) -> None:
        """Clear the cache before its calls hold too many streams: a program may create one per call."""
        new = {id(each) for each in owners if each is not None and may_die(each)} - self._streams
        if len(self._streams | new) > _MOST_STREAMS:
            self._streams.clear()
            self._core.forget()
        self._streams |= new

    def _plan(self, work: Work[Any]) -> tuple[bytearray, tuple[Any, ...]] | None:
        """The launches of a call, packed for the core, and the objects that the core compares or keeps.

        The objects are the Streams, the owner of the stream and the party that the Streams must have, the handle of the
        stream (None if its owner cannot close it), and the launches.  None if the core cannot make the call, or if the
        stream is not kept alive.
        """
        prepared, stream, owner = work.prepared, work.stream, work.queue
        o, route = prepared.operation, prepared.route
        if o.options.purpose or work.convert is not None or (type(owner) is int and stream > LEGACY):
            return None
        launches = _launches(work)
        if launches is None or len(launches) > _MOST_LAUNCHES:
            return None
        if any(len(each.arguments) > native.MOST_WORDS for each in launches):
            return None
        handle = owner.__cuda_stream__() if owner is not None and may_close(owner) else None
        sizes = [0 if end is None else end.count * end.dtype.itemsize for end in (o.send, o.recv)]
        overlap = work.send and work.recv and -sizes[0] < work.send - work.recv < sizes[1]
        distance = (work.send - work.recv) % (1 << 64) if overlap else _APART
        needs_context = any(stream <= each.context_up_to for each in launches)
        context = int(driver.primary_context(prepared.backend.device)) if needs_context else 0
        in_graph_alike = prepared.fixed and not isinstance(prepared.run, InWindows) and len(launches) == 1
        asks = launches and stream > LEGACY and not in_graph_alike
        captured = driver.address("cuStreamIsCapturing") if asks else 0
        current = driver.address("cuCtxGetCurrent") if context else 0
        room = launches[0].room if launches else (0, 0, 0)
        numbers = len(launches), prepared.fingerprint, stream, route.failed_word, *room, context, current, captured
        plan = struct.pack("=13Q", *numbers, *sizes, distance) + b"".join(map(pack, launches))
        order = self._shared.streams, owner, prepared.backend.party(prepared), handle, launches
        return bytearray(native.PLAN_AT) + plan, order

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


def _launches(work: Work[Any]) -> list[Launch] | None:
    """The launches of calls like ``work``; None if the core cannot make them."""
    prepared = work.prepared
    run = prepared.run.launch if isinstance(prepared.run, InWindows) else prepared.run
    if prepared.backend.size > 1 or not is_copy(run):
        launches: list[Launch] | None = prepared.route.launches(run, work.stream)
        return launches
    o = prepared.operation
    nbytes = o.recv.nbytes if o.send and o.recv and work.send != work.recv else 0
    return [copy_launch(RECV, SEND, nbytes)] if nbytes else []


def _place(x: Any, arguments: tuple[Any, ...]) -> int | None:
    """The index of the first argument that is ``x``, -1 if ``x`` is None; None if there is none."""
    return -1 if x is None else next((i for i, each in enumerate(arguments) if each is x), None)


def _address(x: Any) -> int | None:
    """Where an array is that the core can read; None for anything else."""
    if type(x) is Array:
        return x.pointer
    if library_of(x) != "torch" or type(x) is not sys.modules["torch"].Tensor:  # the core takes tensors of one type
        return None
    return int(x.data_ptr()) if hasattr(x, "__dlpack_c_exchange_api__") and native.tensors(type(x)) else None


def _identity(x: Any) -> Any:
    """What the core compares of an argument by its identity: not integers and counts."""
    return (x.dtype, x.stream) if type(x) is Array else x if _address(x) is None else type(x)


def _is_fixed(x: Any) -> bool:
    """Whether the core can compare an argument: by identity or value, or an array by what it is."""
    if _address(x):
        return len(x.shape) <= 4
    return x is None or type(x) in (int, bool, str, ReduceOp) or _is_counts(x)


def _is_counts(x: Any) -> bool:
    return type(x) in (list, tuple) and all(type(each) is int for each in x)
