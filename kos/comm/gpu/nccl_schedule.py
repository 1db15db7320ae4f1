"""Schedules over NCCL: its send and receive carry the messages of a round, kernels of ours add what came.

One stream holds all of a rank's steps, round by round: a group of sends and receives, then what is local.  Long
messages are cut into chunks, which follow one another through the rounds where the algorithm is a pipeline.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from kos.comm.gpu.ordered_sum import KERNELS, THREADS, blocks, kernel_types, up
from kos.comm.operation import Operation
from kos.comm.reduction import ReduceOp
from kos.comm.schedules import build, runnable
from kos.comm.schedules.execute import place_scratch
from kos.comm.schedules.schedule import IN_PLACE, Schedule
from kos.cuda import Kernel, driver, load_kernel
from kos.cuda.driver import call, cu
from kos.cuda.graphs import relaxed_capture
from kos.cuda.streams import as_stream
from kos.dtypes import DTYPES

_CHUNK_BYTES, _MOST_CHUNKS = 4 << 20, 16
Message = tuple[int, int, int]
"""Rank, address, bytes."""


class Messenger(Protocol):
    """The backend that carries the messages of a schedule."""

    rank: int
    size: int
    device: int

    def scratch(self, nbytes: int, stream: int) -> int: ...

    def messages(self, sends: Sequence[Message], recvs: Sequence[Message], stream: int) -> None: ...


class _Place(NamedTuple):
    """A piece of memory: an address or, in scratch memory, bytes from its beginning."""

    in_scratch: bool
    start: int
    nbytes: int = 0

    def at(self, scratch: int) -> int:
        return self.start + scratch if self.in_scratch else self.start


class _Round(NamedTuple):
    sends: list[tuple[int, _Place]]  # rank, what
    recvs: list[tuple[int, _Place]]
    local: list[tuple[bool, _Place, _Place]]  # whether it adds, target, source; in order


class ScheduledCollective:
    """The launch of one collective by the schedule that it names.

    Floats of 16 and 8 bits travel as fp32 where they are added, and are rounded once, as on every backend.
    """

    def __init__(self, backend: Messenger, o: Operation) -> None:
        send, recv, reduction = o.send, o.recv, o.reduction
        buffer = send or recv
        assert buffer is not None
        self._backend, self._scratch, per = backend, 0, 1
        own = travels = buffer.dtype.name
        self._widen: Kernel | None = None
        self._finish: Kernel | None = None
        if reduction is not None:
            own, op, per = kernel_types(reduction, backend.device)
            travels = own if reduction.carrier == reduction.dtype.numpy else DTYPES[own].accumulate.name
            self._factor, op = reduction.factor, "SUM" if op == "PREMUL_SUM" else op
            self._combine = self._load("combine", travels, travels, op)
            if travels != own or reduction.op is ReduceOp.PREMUL_SUM:
                self._widen = self._load("scale", own, travels, op)
            if travels != own or reduction.op is ReduceOp.AVG:
                self._finish = self._load("finish", travels, own, op)
        # Complex numbers are cut between elements, and added by their two parts.
        self._part, self._per, self._itemsize = DTYPES[travels].itemsize, per, per * DTYPES[travels].itemsize
        self._x, self._x_count = (send.pointer, send.count) if send else (0, 0)
        self._out, self._out_count = (recv.pointer, recv.count) if recv else (0, 0)

        # Where the schedule's spaces lie: in the arrays themselves as far as possible.
        out = self._out if travels == own else 0
        self._loaded: _Place | None = None  # what x is brought to first
        if o.name in IN_PLACE:
            spaces = {"data": self._home(out, buffer.count)}
            if o.name != "broadcast" or backend.rank == o.root:
                self._loaded = spaces["data"]
        else:
            overlap = o.name == "reduce_scatter" and 0 <= out - self._x < self._x_count * self._itemsize
            spaces = {"output": self._home(out, self._out_count)}
            if self._widen is not None or overlap:
                self._loaded = spaces["input"] = self._home(0, self._x_count)
            else:
                spaces["input"] = _Place(False, self._x)
        self._result = spaces.get("data") or spaces["output"]

        elements = {"data": buffer.count, "input": self._x_count, "output": self._out_count}
        schedule = build(o.name, o.options.algorithm, backend.size, root=o.root or 0)
        unit = next(elements[space] // schedule.units[space] for space in schedule.spaces(backend.rank))
        chunks = max(1, min(_MOST_CHUNKS, unit * self._itemsize // _CHUNK_BYTES))
        schedule = runnable(o.name, o.options.algorithm, backend.size, chunks, o.root or 0)
        self._rounds = self._compile(schedule, spaces, unit)

    def _load(self, kernel: str, dtype: str, result: str, op: str) -> Kernel:
        backend = self._backend
        with relaxed_capture():
            return load_kernel(KERNELS, kernel, backend.device, DTYPE=dtype, RESULT=result, OP=op, RANKS=backend.size)

    def _home(self, pointer: int, count: int) -> _Place:
        """A space of ``count`` elements at ``pointer``, or without one in scratch memory."""
        return _Place(False, pointer) if pointer else _Place(True, self._reserve(count * self._itemsize))

    def _reserve(self, nbytes: int) -> int:
        start, self._scratch = self._scratch, self._scratch + up(nbytes)
        return start

    def _compile(self, schedule: Schedule, spaces: dict[str, _Place], unit: int) -> list[_Round]:
        """This rank's steps as messages and kernels; ``unit`` is the schedule's unit in elements."""
        rank, size = self._backend.rank, self._itemsize
        placed, scratch = place_scratch(schedule, [s for steps in schedule.rounds for s in steps[rank]], unit)
        aside = self._reserve(scratch * size)

        def place(space: str, chunk: int, span: int) -> _Place:
            start = schedule.start(chunk, unit)
            nbytes = (schedule.start(chunk + span, unit) - start) * size
            if space == "scratch":
                return _Place(True, aside + placed[chunk] * size, nbytes)
            home = spaces[space]
            return _Place(home.in_scratch, home.start + start * size, nbytes)

        rounds, staging, deepest = [], self._scratch, self._scratch
        for steps in schedule.rounds:
            this, self._scratch = _Round([], [], []), staging
            for kind, space, chunk, span, peer, source_space, source_chunk in steps[rank]:
                target = place(space, chunk, span)
                if not target.nbytes:
                    continue
                if kind == "send":
                    this.sends.append((peer, target))
                elif kind == "recv":
                    this.recvs.append((peer, target))
                elif kind == "recv_reduce":
                    came = _Place(True, self._reserve(target.nbytes), target.nbytes)
                    this.recvs.append((peer, came))
                    this.local.append((True, target, came))
                else:
                    this.local.append((kind == "reduce", target, place(source_space, source_chunk, span)))
            deepest = max(deepest, self._scratch)
            if any(this):
                rounds.append(this)
        self._scratch = deepest
        return rounds

    def __call__(self, stream: int) -> None:
        backend = self._backend
        scratch = backend.scratch(self._scratch, stream) if self._scratch else 0
        with driver.on_device(backend.device):
            queue = as_stream(stream)
            if self._loaded is not None and self._x_count:
                first, count = self._loaded.at(scratch), self._x_count * self._per
                if self._widen is not None:
                    self._widen(queue, blocks(count), THREADS, self._x, first, count, np.float64(self._factor))
                elif first != self._x:
                    call(cu.cuMemcpyAsync, first, self._x, count * self._part, stream)
            for sends, recvs, local in self._rounds:
                if sends or recvs:
                    backend.messages(
                        [(peer, piece.at(scratch), piece.nbytes) for peer, piece in sends],
                        [(peer, piece.at(scratch), piece.nbytes) for peer, piece in recvs],
                        stream,
                    )
                for adds, target, source in local:
                    ends, count = (target.at(scratch), source.at(scratch)), target.nbytes // self._part
                    if adds:
                        self._combine(queue, blocks(count), THREADS, *ends, count)
                    elif ends[0] != ends[1]:
                        call(cu.cuMemcpyAsync, *ends, target.nbytes, stream)
            if self._finish is not None and self._out_count:
                result, count = self._result.at(scratch), self._out_count * self._per
                self._finish(queue, blocks(count), THREADS, result, self._out, count)
