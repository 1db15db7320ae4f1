"""``comm.register``: the program's own memory as a window of NCCL or as peer memory, without a GPU."""

import sys
from typing import Any

import numpy as np
import pytest

import kos
from kos.comm.gpu import nccl_binding
from kos.errors import BackendUnavailable, InvalidArgument
from kos.memory.array import Array
from kos.testing import spawn
from tests.comm.fake_gpu import Memory, captures
from tests.comm.fake_nccl import FakeRanks
from tests.comm.fake_peer import communicator as peer_communicator
from tests.comm.gpu_ranks import engine_of
from tests.comm.ranks import on_each_rank
from tests.comm.test_array_libraries import Plain, Torch

TWICE = kos.PremulSum(2.0)  # in a group of one, NCCL runs only operations with a factor


@pytest.fixture
def windows(fake):
    """``windows(name)``: the addresses with which NCCL was asked to ``register``, ``deregister`` or ``free``."""
    fake.cu.cuMemRetainAllocationHandle = lambda address: (0, None)
    return lambda name: [address for what, address in fake.windows if what == name]


def own_array(count: int = 1024, offset: int = 0) -> Array:
    """Memory of the program, as aligned as NCCL wants it."""
    memory = Memory(4 * count + 8192)
    start = memory.pointer + -memory.pointer % nccl_binding.WINDOW_ALIGNMENT
    return Array(start + offset, (count,), np.float32, 0, owner=memory)


def test_registered_as_long_as_its_array_lives(windows):
    def body(gpu):
        comm, x = gpu.comm, own_array()
        address = x.pointer
        buffer = comm.register(x)
        assert (buffer.pointer, buffer.shape, buffer.dtype) == (address, x.shape, x.dtype)
        x.fill_bytes(0)
        comm.all_reduce(buffer)  # on either
        comm.all_reduce(x)  # and the last operation keeps its own array alone
        with pytest.raises(InvalidArgument, match=r"register: x of rank 0: .* not registered yet, got some that is"):
            comm.register(x[5:])
        assert address not in windows("deregister")
        del buffer
        again = comm.register(other := own_array())  # frees the first, as the next allocate would
        assert windows("deregister").count(address) == 1 and address not in windows("free")
        comm.register(x)  # dropped at once: the end frees it
        del again, other

    FakeRanks(2).run(body)
    assert sorted(windows("register")) == sorted(windows("deregister")) and not windows("free")


@on_each_rank(FakeRanks(1).run)
def test_a_graph_keeps_the_registration_and_the_memory(gpu, /, windows):
    comm, x = gpu.comm, own_array()
    x.stream, memory, address = 5, x.owner, x.pointer
    buffer = comm.register(x)
    buffer.stream = 5
    comm.all_reduce(buffer, TWICE)
    with captures() as graph:
        comm.all_reduce(buffer, TWICE)
    comm.broadcast(Array.zeros(3, np.int8, 0), 0)  # or the last operation keeps its array
    del buffer, x
    comm.register(own_array())
    assert windows("deregister") == []
    references = sys.getrefcount(memory)
    graph.destroy()
    comm.register(own_array())
    assert address in windows("deregister") and sys.getrefcount(memory) < references


@on_each_rank(FakeRanks(1).run)
def test_memory_that_two_communicators_have_registered(gpu, /, windows):
    """The end of one registration does not affect the other, which a graph keeps."""
    comm, x = gpu.comm, own_array()
    other = comm.duplicate()
    mine, theirs = comm.register(x), other.register(x)
    theirs.stream = mine.stream = 5
    other.all_reduce(theirs, TWICE)
    comm.all_reduce(mine, TWICE)
    del mine
    comm.broadcast(Array.zeros(3, np.int8, 0), 0)
    comm.register(own_array())
    assert windows("deregister") == [x.pointer]
    with captures():
        other.all_reduce(theirs, TWICE)
    other.broadcast(Array.zeros(3, np.int8, 0), 0)
    del theirs
    other.register(own_array())
    assert windows("deregister").count(x.pointer) == 1
    other.abort()


def torch_with(expandable: bool, x: Array) -> Any:
    torch, segments = Torch(), [
        {"address": 0, "total_size": 10, "is_expandable": not expandable},
        {"address": x.pointer - 512, "total_size": 4096, "is_expandable": expandable},
    ]  # fmt: skip
    torch.Tensor, torch.cuda.memory_snapshot = Plain, lambda: segments
    return torch


@pytest.mark.parametrize("expandable", [True, False])
@on_each_rank(FakeRanks(1).run)
def test_expandable_segments_of_torch_are_refused_by_name(gpu, /, windows, monkeypatch, expandable):
    comm, x = gpu.comm, own_array()
    tensor = Plain(x)
    monkeypatch.setitem(sys.modules, "torch", torch_with(expandable, x))
    if expandable:
        with pytest.raises(InvalidArgument, match="rank 0: expected .* stays mapped, got a tensor in an expandable"):
            comm.register(tensor)
    else:
        assert comm.register(tensor).pointer == x.pointer


def test_memory_that_nccl_does_not_take_is_refused_on_all_ranks(fake, windows):
    def body(gpu):
        comm = gpu.comm
        bad = comm.rank == 1
        cases = {
            "expected an address that is a multiple of 4096, got 0x": own_array(offset=16 if bad else 0),
            "expected at least one element": own_array(0),
            "expected memory of ncclMemAlloc or cuMemCreate, got memory of cudaMalloc": own_array(),
        }
        for message, x in cases.items():
            if "ncclMemAlloc" in message:
                comm.rendezvous.barrier()
                fake.cu.cuMemRetainAllocationHandle = lambda address: (int(address not in good), None)
                if not bad:
                    good.append(x.pointer)
                comm.rendezvous.barrier()
            rank = 0 if "element" in message else 1
            with pytest.raises(InvalidArgument, match=f"^register: x of rank {rank}: {message}"):
                comm.register(x)
        with pytest.raises(InvalidArgument, match="x: expected memory of cuda:0, got memory of the host"):
            comm.register(np.ones(3))
        assert comm.register(own_array_in(good)).size == 1024

    def own_array_in(good):
        x = own_array()
        good.append(x.pointer)
        return x

    good = []
    FakeRanks(2).run(body)
    assert len(windows("register")) == 2


@on_each_rank(FakeRanks(1).run)
def test_a_machine_without_windows(gpu, /, fake, windows):
    fake.comm_window_register = lambda *arguments: 0
    with pytest.raises(BackendUnavailable, match="register: NCCL 2.28.9 has no windows on this machine"):
        gpu.comm.register(own_array())


@pytest.mark.parametrize("status", [0, 1])
def test_memory_of_the_driver_is_known_by_its_handle(fake, status):
    released = []
    fake.cu.cuMemRetainAllocationHandle = lambda address: (status, "handle")
    fake.cu.cuMemRelease = lambda handle: released.append(handle) or (0,)
    assert nccl_binding.is_virtual(4096) == (status == 0) == (released == ["handle"])


@on_each_rank(spawn, 2)
def test_a_backend_for_host_memory_has_nothing_to_register(comm, /):
    with pytest.raises(InvalidArgument, match="register: expected a backend for GPUs, got mock, which"):
        comm.register(np.ones(3))


# Peer memory.


def test_the_kernels_of_peer_reach_it_where_it_lies(peers):
    """``is_symmetric`` decides this.  The kernels themselves are those for memory of ``allocate``."""

    def body(rendezvous):
        comm = peer_communicator(rendezvous)
        engine, memory = engine_of(comm), Memory(4096 + 16)
        x = Array(memory.pointer, (1024,), np.float32, 0, owner=memory)
        assert not engine.is_symmetric(x.pointer, x.nbytes)
        buffer = comm.register(x)
        assert engine.is_symmetric(x.pointer, x.nbytes) and engine.is_symmetric(buffer.pointer, 16)
        with pytest.raises(InvalidArgument, match="expected an address that is a multiple of 16, got 0x"):
            comm.register(Array(memory.pointer + 4100, (2,), np.float32, 0, owner=memory))
        del buffer
        comm.allocate(4, np.float32)
        assert not engine.is_symmetric(x.pointer, x.nbytes)
        comm.close()

    spawn(lambda comm: body(comm.rendezvous.split(0, comm.rank)), 2, timeout=60)
