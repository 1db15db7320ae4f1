"""IPC handles: real bytes between processes, users counted, and a cause in every error."""

import ctypes
import dataclasses
import gc
import re
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from cuda_ranks import PipeExchange, run_processes

from kos import cuda
from kos.cuda.driver import call, cu
from kos.errors import CudaError, InvalidArgument, OutOfMemory, PeerMemoryError
from kos.memory import ipc
from kos.memory.array import Array
from kos.memory.ipc import DeviceMemory, IpcHandle, Mapping, Origin
from tests.fake_cuda import installed

HERE = Origin.here()


def test_records_survive_the_wire():
    handle = IpcHandle(bytes(range(64)), "ab", 2**40, 2**41, 2**47, HERE)
    assert IpcHandle.from_bytes(handle.to_bytes()) == handle
    assert HERE.pid > 0 and HERE.boot and HERE.obstacle() is None


@pytest.mark.parametrize(
    "data",
    [
        b"abc",
        bytes(104),
        b"\xff",
        b"[]",
        b'["zz", "", 0, 0, 0, "", "", "", "", 0]',
        b'["00", "", 0, 0, 0, "", "", "", "", 0]',
        b"3",
    ],
)
def test_other_bytes_are_no_handle(data):
    with pytest.raises(InvalidArgument, match=f"IPC handle: expected one of to_bytes, got {len(data)} bytes"):
        IpcHandle.from_bytes(data)


@pytest.mark.parametrize(
    ("field", "value", "cause"),
    [
        ("boot", "elsewhere", r"on another host \(.*; this is .*\)"),
        ("pid_namespace", "pid:[1]", "another pid namespace .*--pid=host"),
        ("ipc_namespace", "ipc:[1]", "another ipc namespace .*--ipc=host"),
    ],
)
def test_obstacles(field, value, cause):
    assert re.search(cause, dataclasses.replace(HERE, **{field: value}).obstacle() or "")


def test_a_pretended_host(monkeypatch):
    monkeypatch.setenv("KOS_HOST", "a")
    there = IpcHandle(bytes(64), "", 0, 1, 0, Origin.here())
    monkeypatch.setenv("KOS_HOST", "b")
    with pytest.raises(PeerMemoryError, match=r"it is on another host \(a; this is b\)"):
        Mapping(IpcHandle.from_bytes(there.to_bytes()), 0)


def test_refused_before_the_driver_is_asked():
    with pytest.raises(PeerMemoryError, match="on another host"):
        Mapping(IpcHandle(bytes(64), "", 0, 1, 0, dataclasses.replace(HERE, boot="x")), 0)
    with pytest.raises(PeerMemoryError, match="cannot open its own handle"):
        Mapping(IpcHandle(bytes(64), "", 0, 1, 0, HERE), 0)


def test_a_mapping_that_is_collected_while_another_is_made(monkeypatch):
    """The collector runs where it will: a lock around both would never be had."""
    closed = []
    bases = iter((4096, 8192))

    def open_(raw, flags):
        gc.collect()
        return 0, next(bases)

    fake = SimpleNamespace(
        CUipcMemHandle=lambda: SimpleNamespace(getPtr=lambda: ctypes.addressof(room)),
        CUipcMem_flags=SimpleNamespace(CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS=1),
        cuIpcOpenMemHandle=open_,
        cuIpcCloseMemHandle=lambda base: (closed.append(base),),
    )
    room = ctypes.create_string_buffer(64)
    one, two = (IpcHandle(bytes([k]) * 64, "", 100, 1, 0, dataclasses.replace(HERE, pid=HERE.pid + k)) for k in (1, 2))

    def body():
        dropped = [Mapping(one, 0)]
        dropped.append(dropped)
        del dropped
        second = Mapping(two, 0)
        assert closed == [4096] and second.pointer == 8292
        second.close()
        second.close()

    with installed(monkeypatch, fake):
        thread = threading.Thread(target=body, daemon=True)
        thread.start()
        thread.join(10)
    assert not thread.is_alive() and closed == [4096, 8192]


def read(pointer: int, nbytes: int, device: int) -> bytes:
    data = bytearray(nbytes)
    with cuda.on_device(device):
        call(cu.cuMemcpyDtoH, data, pointer, nbytes)
    return bytes(data)


def write(pointer: int, data: bytes, device: int) -> None:
    with cuda.on_device(device):
        call(cu.cuMemcpyHtoD, pointer, data, len(data))
        call(cu.cuCtxSynchronize)


def exporter_and_importer(exchange: PipeExchange) -> None:
    """Rank 0 exports two parts of one allocation, rank 1 maps both, writes, and unmaps one by one."""
    if exchange.rank == 0:
        memory = DeviceMemory(1 << 20, 0)
        write(memory.pointer + 1000, b"from rank 0", 0)
        handles = [ipc.export(memory.pointer + offset, 500, 0).to_bytes() for offset in (1000, 2000)]
        exchange.allgather(handles[0])
        exchange.allgather(handles[1])
        exchange.barrier()
        assert read(memory.pointer + 2000, 11, 0) == b"from rank 1"
        exchange.barrier()
        memory.close()
        exchange.barrier()
        return
    first = Mapping(IpcHandle.from_bytes(exchange.allgather(b"")[0]), 0)
    handle = IpcHandle.from_bytes(exchange.allgather(b"")[0])
    second = Mapping(handle, 0)
    assert second.pointer == first.pointer + 1000  # mapped once
    assert read(first.pointer, 11, 0) == b"from rank 0"
    first.close()
    first.close()
    write(second.pointer, b"from rank 1", 0)
    exchange.barrier()
    second.close()
    with cuda.on_device(0), pytest.raises(CudaError, match="cuMemGetAddressRange"):
        call(cu.cuMemGetAddressRange, second.pointer)
    exchange.barrier()
    exchange.barrier()
    with pytest.raises(PeerMemoryError, match="it has ended or freed the memory"):
        Mapping(handle, 0)
    other_gpu = dataclasses.replace(handle, uuid="01" * 16)
    with pytest.raises(PeerMemoryError, match="its GPU is not visible here"):
        Mapping(other_gpu, 0)
    namespace = dataclasses.replace(handle, origin=dataclasses.replace(handle.origin, pid_namespace="pid:[1]"))
    with pytest.raises(PeerMemoryError, match="another pid namespace"):
        Mapping(namespace, 0)


@pytest.mark.gpu
def test_between_processes():
    run_processes(exporter_and_importer, 2)


@pytest.mark.gpu
def test_exports_that_are_refused(device):
    memory = DeviceMemory(4096, device)
    assert read(memory.pointer, 4096, device) == bytes(4096)
    with pytest.raises(PeerMemoryError, match=r"expected at most \d+ bytes"):
        ipc.export(memory.pointer, 1 << 40, device)
    memory.close()
    with pytest.raises(PeerMemoryError, match="expected memory of cuda:0"):
        ipc.export(1 << 20, 16, device)
    pooled = Array.zeros(1000, np.float32, device)
    with pytest.raises(PeerMemoryError, match=r"expected memory of cuMemAlloc .* from a stream-ordered pool"):
        ipc.export(pooled.pointer, pooled.nbytes, device)
    host = ctypes.create_string_buffer(100)
    with pytest.raises(PeerMemoryError, match="expected memory of cuda:0"):
        ipc.export(ctypes.addressof(host), 100, device)
    with pytest.raises(InvalidArgument, match="above 0 bytes, got 0"):
        DeviceMemory(0, device)
    with pytest.raises(OutOfMemory, match=r"asked for [\d,]+ bytes to share"):
        DeviceMemory(1 << 50, device)
