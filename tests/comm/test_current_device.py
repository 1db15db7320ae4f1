"""Calls on a GPU that is not the current device of the thread, without a GPU.

The legacy default stream belongs to the current device. A stand-in for the driver tracks which device is current. It
fails the test if that stream is used, or an event is created, while the device of the communicator is not current.
"""

from __future__ import annotations

import gc
import sys
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import kos
from kos.comm.control.threads import ThreadControlPlane, ThreadGroup
from kos.cuda import streams
from kos.dtypes import DTYPES
from kos.memory.array import Array
from kos.memory.dlpack import CUDA, export_capsule
from tests.comm.fake_gpu import Memory
from tests.comm.fake_nccl import WAIT, Comm, Group, no_gpu, of_nccl
from tests.fake_cuda import GPU, Contexts

DEVICE = 1  # of the communicator; the thread's own is 0


class ChecksDevice(Contexts):
    """The legacy stream and events may be used only where the communicator's device is current."""

    def check(self, *arguments: Any) -> None:
        assert not {0, streams.LEGACY} & set(arguments) or self.stack[-1] == DEVICE, "the legacy stream of another GPU"

    def leave(self) -> None:
        """As XLA does: its ``ScopedActivateContext`` leaves the device of an array current."""
        self.stack[-1] = DEVICE

    def make_event(self, flags: int) -> tuple[int, Any]:
        assert self.stack[-1] == DEVICE, "an event of another GPU"
        return 0, object()


@pytest.fixture
def comm(monkeypatch):
    contexts = ChecksDevice()
    Immutable.contexts = contexts
    with no_gpu(monkeypatch, (GPU(), GPU())) as fake:
        cu, fake.driver.device = fake.cu, DEVICE
        for name in ("cuEventRecord", "cuStreamQuery", "cuStreamWaitEvent"):
            call = getattr(cu, name)
            place = {"cuEventRecord": 1}.get(name, 0)
            setattr(cu, name, lambda *given, call=call, place=place: contexts.check(given[place]) or call(*given))
        cu.cuEventCreate = contexts.make_event
        contexts.install(cu)
        rendezvous = ThreadControlPlane(ThreadGroup(1), 0, WAIT)
        comm = kos.Communicator(of_nccl(rendezvous, Comm(Group(1), 0), device=DEVICE), rendezvous, {}, WAIT)
        yield comm
        assert contexts.stack == [0]  # kos has left the thread's current device as it was
        comm.close()
        assert contexts.stack == [0]


class Other:
    """An array of a library that names neither its device nor its stream."""

    __module__ = "numba"

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (4,), "typestr": "<f4", "data": (self._memory.pointer, False), "version": 3}


class Immutable(Other):
    """An array of a library that does not name its stream; kos holds it by an event until the GPU has read it."""

    __module__ = "jax"
    contexts: ChecksDevice

    def __dlpack_device__(self) -> tuple[int, int]:
        return CUDA, DEVICE

    def __dlpack__(self, *, stream: Any, max_version: Any = None) -> Any:
        self.contexts.check(stream)  # the library makes that stream wait for its work
        self.contexts.leave()
        dtype = DTYPES["float32"]
        return export_capsule(self._memory.pointer, (4,), dtype, DEVICE, self, readonly=False, versioned=True)


def array(stream: Any = None) -> Array:
    memory = Memory(16)
    return Array(memory.pointer, (4,), np.float32, DEVICE, owner=memory, stream=stream)


@pytest.mark.parametrize("kind", [Immutable, Other])
def test_an_array_without_a_stream(comm, kind):
    memory = Memory(16)
    for _ in range(3):
        comm.all_reduce(kind(memory), out=array())
        comm.all_reduce(kind(memory), out=array(), async_op=True).wait()
    with comm.batch():
        comm.all_reduce(kind(memory), out=array())
        comm.all_reduce(array())
    comm.synchronize()


def test_a_new_array_of_jax(comm, monkeypatch):
    """JAX changes the current device when it shares memory; a call of kos does not."""

    def from_dlpack(array):
        Immutable.contexts.leave()
        return array

    monkeypatch.setitem(sys.modules, "jax", SimpleNamespace(dlpack=SimpleNamespace(from_dlpack=from_dlpack)))
    assert isinstance(comm.all_gather(Immutable(Memory(16))), Array)
    assert Immutable.contexts.stack == [0]
    work = comm.all_gather(Immutable(Memory(16)), async_op=True)
    assert isinstance(work.wait(), Array)
    assert Immutable.contexts.stack == [0]


def test_many_streams(comm):
    comm.all_reduce(array())
    for stream in range(100, 140):
        comm.all_reduce(array(stream))
        comm.all_reduce(array())
    comm.synchronize()


def test_a_new_array_keeps_the_stream_of_an_array_that_is_gone(comm):
    """Its memory is freed in the order of that stream, whose handle ``__cuda_array_interface__`` gives."""

    class Stream:
        pass

    class OnStream(Other):
        def __init__(self, memory):
            super().__init__(memory)
            self.stream = Stream()

        @property
        def __cuda_array_interface__(self):
            return super().__cuda_array_interface__ | {"stream": 77}

    class WithoutObject(OnStream):
        stream = property(lambda self: 77, lambda self, stream: None)

    x, y = OnStream(Memory(16)), WithoutObject(Memory(16))
    stream, exporter = weakref.ref(x.stream), weakref.ref(y)
    of_x, of_y = comm.all_gather(x), comm.all_gather(y)
    comm.synchronize()
    del x, y
    gc.collect()
    assert streams.handle(of_x.stream) == streams.handle(of_y.stream) == 77
    assert stream() is not None and exporter() is not None
    del of_x, of_y
    comm.all_reduce(array())  # on another stream: the last one is cached
    gc.collect()
    assert stream() is None and exporter() is None
