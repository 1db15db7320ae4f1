"""Calls on GPUs that the compiled core makes: what it must know of a call (``kos/_core/module_launch.c``).

The core makes a call as Python has made it before, if that was one launch on the stream of its arrays, and nothing has
changed that the launch depended on.  These are the *guards*.
"""

from __future__ import annotations

import struct
import sys
from threading import get_ident
from typing import Any

import numpy as np

from kos._core import native
from kos.comm.contract import Guard
from kos.comm.gpu.routes import is_copy
from kos.comm.prepared import Prepared
from kos.comm.reduction import ReduceOp
from kos.comm.work import Work
from kos.cuda import driver
from kos.cuda.streams import LEGACY, PER_THREAD, is_captured
from kos.memory import windows
from kos.memory.array import Array
from kos.memory.libraries import library_of, may_close, may_die
from kos.memory.windows import InWindows, Run

_APART = (1 << 64) - 1
_MOST_STREAMS = 16
"""Streams that cached calls keep alive at most."""


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
        """How the core makes calls like the last one of this thread; False if it never will.

        ``asked`` is the name of the operation, which got these arguments, or the Persistent that was started.

        None if this call says nothing of others.

        What it queues, the Prepared, what the recorder has of the call, the Work that stands for all of them, whether
        it returns no Work, and which arguments are input, output and result, -1 for none.  Then the objects by whose
        identity calls are compared, which must live on, and the guards.  Last two objects that keep the last Work: the
        backend and what is shared.  For a Persistent, the result has the Works that its starts return in turn, and
        addresses instead of objects.
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
        (plan, guards), backend = planned, prepared.backend
        guards = [*self._guards(lasting), *guards]
        known = plan, prepared, prepared.description, works, not persistent
        return *known, *used, objects, guards, backend, self._shared

    def _limit_streams(self, owners: list[Any]) -> None:
        """Clear the cache before its calls hold too many streams: a program may create one per call."""
        new = {id(each) for each in owners if each is not None and may_die(each)} - self._streams
        if len(self._streams | new) > _MOST_STREAMS:
            self._streams.clear()
            self._core.forget()
        self._streams |= new

    def _plan(self, work: Work[Any]) -> tuple[bytearray, list[Guard]] | None:
        """The launch of a call, packed as the core reads it, and the guards of its route.

        None if the call queues more than one launch, or if its stream is not kept alive.
        """
        prepared, stream = work.prepared, work.stream
        backend, o = prepared.backend, prepared.operation
        if o.options.purpose or work.convert is not None or (type(work.queue) is int and stream > LEGACY):
            return None
        route, copies = prepared.route, backend.size == 1 and is_copy(prepared.run)
        launch, guards = (_packed_copy(work), []) if copies else route.launch_words(_bare(prepared)) or (None, [])
        queues = launch is not None and any(launch[:8])  # calls a function
        if launch is None or int.from_bytes(launch[16:24], "little") > native.MOST_WORDS:
            return None
        sizes = [0 if end is None else end.count * end.dtype.itemsize for end in (o.send, o.recv)]
        overlap = work.send and work.recv and -sizes[0] < work.send - work.recv < sizes[1]
        distance = (work.send - work.recv) % (1 << 64) if overlap else _APART
        needs_context = queues and (copies or (stream <= PER_THREAD and route.failed_word))  # NCCL finds its GPU
        context = int(driver.primary_context(backend.device)) if needs_context else 0
        asks = queues and stream > LEGACY and (isinstance(prepared.run, InWindows) or not prepared.fixed)
        captured = driver.address("cuStreamIsCapturing") if asks else 0
        current = driver.address("cuCtxGetCurrent") if context else 0
        numbers = prepared.fingerprint, stream, route.failed_word, context, current, captured, *sizes, distance
        return bytearray(native.PLAN_AT) + struct.pack("=9Q", *numbers) + launch, guards

    def _guards(self, work: Work[Any]) -> list[Guard]:
        shared, guards = self._shared, list[Guard]()
        if work.queue is not None and may_close(work.queue):  # first: another thread may run meanwhile
            guards.append((work.queue, "__cuda_stream__", work.queue.__cuda_stream__()))
        guards += [(shared.failures, "first", None), (shared.streams, "current", work.queue)]
        if work.prepared.collective:
            guards.append((self._comm, "_active", None))
        return guards + self._backend.guards(work)

    def launch_failed(self, work: Work[Any], status: int) -> None:
        """Raise the error of a launch that the core could not make."""
        prepared, backend = work.prepared, work.backend
        if is_copy(prepared.run):
            backend._raise(work, driver.error_of("cuMemcpyDtoDAsync", driver.cu.CUresult(status)))
        backend._raise(work, prepared.route.launch_error(_bare(prepared), status))


def _bare(prepared: Prepared) -> Run:
    return prepared.run.launch if isinstance(prepared.run, InWindows) else prepared.run


def _packed_copy(work: Work[Any]) -> bytes:
    """The copy of a group of one as a ``kos_launch``; addresses and stream are patched in."""
    o = work.prepared.operation
    nbytes = o.recv.nbytes if o.send and o.recv and work.send != work.recv else 0
    function = driver.address("cuMemcpyDtoDAsync_v2") if nbytes else 0
    header, words = (function, 0, 8, 3, *[0] * 7), (0, 0, nbytes, *[0] * 5)
    patches = 0, 1, 0, 1, 0, 0, 3, 2, 0  # destination: second address; source: first; stream
    return struct.pack(f"={len(header) + len(words) + len(patches)}Q", *header, *words, *patches)


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
