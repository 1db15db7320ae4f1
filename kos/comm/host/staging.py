"""Staging: how a backend for host memory carries arrays on a GPU, through pinned memory.

Down, the operation there, up again; device addresses never reach MPI or a socket.  Copies are queued on the
stream of the arrays and polled, so that other operations go on meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from kos.comm.operation import Operation
from kos.comm.work import Engine, Steps
from kos.cuda import driver
from kos.cuda.driver import call, cu
from kos.memory import Buffer
from kos.memory.pool import pinned_empty

_LEAST = 4096  # bytes


class Staging:
    """Pinned memory that is used again: page-locking costs a millisecond for every few megabytes."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._free: dict[tuple[int, int], list[np.ndarray[Any, Any]]] = {}
        self.line: list[object] = []  # operations that have not begun, the first first

    def carry(self, o: Operation, run: Callable[[Operation], Steps]) -> Steps:
        """Take the steps of ``o``, whose arrays are on a GPU; ``run`` carries its copy on host memory."""
        taken: list[tuple[tuple[int, int], np.ndarray[Any, Any]]] = []
        send = self._host_of(o.send, taken)
        recv = send if o.recv is o.send else self._host_of(o.recv, taken)
        copy = self._copy(o.send, send, down=True) if o.send is not None and send is not None else ()
        yield from self.in_turn(copy, lambda: run(replace(o, send=send, recv=recv)))
        if o.recv is not None and recv is not None:
            yield from self._copy(o.recv, recv, down=False)
        for key, memory in taken:  # not after an error: something may still write to it
            self._free.setdefault(key, []).append(memory)

    def in_turn(self, before: Iterable[None], run: Callable[[], Steps]) -> Steps:
        """``before``, then ``run()``, which begins after what was started earlier: on all ranks in one order."""
        turn = object()
        self.line.append(turn)
        try:
            yield from before
            while self.line[0] is not turn:
                yield
        finally:
            self.line.remove(turn)
        yield from run()

    def _host_of(
        self, buffer: Buffer | None, taken: list[tuple[tuple[int, int], np.ndarray[Any, Any]]]
    ) -> Buffer | None:
        """As many elements in pinned memory; sizes are powers of two, so that few kinds are kept."""
        if buffer is None or buffer.device is None:
            return buffer
        room = max(_LEAST, 1 << (buffer.nbytes - 1).bit_length())
        key = buffer.device, room
        free = self._free.get(key)
        memory = free.pop() if free else pinned_empty(room, np.uint8, buffer.device)
        taken.append((key, memory))
        flat = memory[: buffer.nbytes].view(buffer.dtype.numpy)
        return Buffer(flat.reshape(buffer.shape), flat, buffer.dtype, buffer.count, buffer.shape)

    def _copy(self, gpu: Buffer, host: Buffer, *, down: bool) -> Steps:
        """Queue the copy and wait until it is done."""
        if gpu.nbytes == 0 or gpu.device is None:
            return
        ends = (host.address, gpu.pointer) if down else (gpu.pointer, host.address)
        with driver.on_device(gpu.device):
            event = call(cu.cuEventCreate, cu.CUevent_flags.CU_EVENT_DISABLE_TIMING)
        self._engine.copies += 1
        try:
            with driver.on_device(gpu.device):
                call(cu.cuMemcpyAsync, *ends, gpu.nbytes, gpu.stream)
                call(cu.cuEventRecord, event, gpu.stream)
            while True:
                (status,) = cu.cuEventQuery(event)
                if status != cu.CUresult.CUDA_ERROR_NOT_READY:
                    break
                yield
            if status:
                raise driver.error_of("cuEventQuery", status)
        finally:
            self._engine.copies -= 1
            call(cu.cuEventDestroy, event)
