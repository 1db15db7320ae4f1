"""Legacy CUDA IPC: memory of one process mapped into another process of the same machine.

Only plain device memory (``cuMemAlloc``: DeviceMemory here) can be exported.  A handle is a small record that any
rendezvous can carry.  It holds the origin of the memory, so that a failure can name its cause.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import socket
import sys
from dataclasses import astuple, dataclass
from pathlib import Path
from weakref import WeakValueDictionary

from kos.cuda import driver
from kos.cuda.devices import device_info, visible_devices
from kos.cuda.driver import call, cu
from kos.environment import KOS_HOST
from kos.errors import CudaError, InvalidArgument, OutOfMemory, PeerMemoryError

_HANDLE_BYTES = 64
_owners: WeakValueDictionary[int, DeviceMemory] = WeakValueDictionary()  # by the address of the memory


class DeviceMemory:
    """Plain device memory, zero-initialised: the kind that other processes can map."""

    def __init__(self, nbytes: int, device: int) -> None:
        self.nbytes = nbytes
        self.device = device
        self.pointer = 0
        if nbytes <= 0:
            raise InvalidArgument(f"device memory: expected a size above 0 bytes, got {nbytes}")
        with driver.on_device(device):
            status, pointer = cu.cuMemAlloc(nbytes)
            if status == cu.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
                free, total = call(cu.cuMemGetInfo)
                raise OutOfMemory(
                    f"out of memory on cuda:{device} ({device_info(device).name}): asked for {nbytes:,} bytes to share "
                    f"with other ranks, {free:,} of {total:,} free"
                )
            if status:
                raise driver.error_of("cuMemAlloc", status)
            self.pointer = int(pointer)
            _owners[self.pointer] = self
            call(cu.cuMemsetD8, self.pointer, 0, nbytes)
            call(cu.cuCtxSynchronize)

    def close(self) -> None:
        pointer, self.pointer = self.pointer, 0
        if pointer and not sys.is_finalizing():
            with driver.on_device(self.device):
                call(cu.cuMemFree, pointer)

    def __del__(self) -> None:
        if sys is not None:  # else the interpreter is ending, and has cleared the names of this module
            self.close()


@dataclass(frozen=True)
class Origin:
    """The host and the namespaces of a process, which decide whether it can share memory."""

    boot: str  # identity of this boot of the kernel, which distinguishes machines with the same name, and of the host
    host: str
    pid_namespace: str
    ipc_namespace: str
    pid: int

    @staticmethod
    def here() -> Origin:
        return _origin(os.getpid(), pretended_host())

    def obstacle(self) -> str | None:
        """Why this process may be unable to map memory of that one, or None if no obstacle is known."""
        own = Origin.here()
        if self.boot != own.boot:
            return f"it is on another host ({self.host}; this is {own.host})"
        if self.pid_namespace != own.pid_namespace:
            return "it is in another pid namespace (containers: share one, as with --pid=host)"
        if self.ipc_namespace != own.ipc_namespace:
            return "it is in another ipc namespace (containers: share one, as with --ipc=host)"
        return None


def pretended_host() -> str:
    """The name in ``KOS_HOST`` of the host on which this process pretends to be; "" for none."""
    return KOS_HOST.get()


@functools.lru_cache(maxsize=1)
def _origin(pid: int, pretended: str) -> Origin:
    host = socket.gethostname()
    return Origin(f"{boot_id() or host} {pretended}", pretended or host, namespace("pid"), namespace("ipc"), pid)


def boot_id() -> str:
    """An identity of this boot of the kernel, and so of this machine; "" on a system that has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def namespace(kind: str) -> str:
    """An identity of this process's namespace of a ``kind`` ("pid", "ipc", "net"); "" on a system that has none."""
    try:
        return os.readlink(f"/proc/self/ns/{kind}")
    except OSError:
        return ""


@dataclass(frozen=True)
class IpcHandle:
    """A handle by which other processes of the machine map memory of this one; ``to_bytes`` to send it."""

    handle: bytes  # cudaIpcMemHandle_t of the allocation
    uuid: str  # of the GPU
    offset: int  # bytes from the start of the allocation
    nbytes: int
    pointer: int  # in the exporting process
    origin: Origin

    def to_bytes(self) -> bytes:
        record = self.handle.hex(), self.uuid, self.offset, self.nbytes, self.pointer, *astuple(self.origin)
        return json.dumps(record).encode()

    @staticmethod
    def from_bytes(data: bytes) -> IpcHandle:
        """The handle that ``to_bytes`` wrote; InvalidArgument for anything else."""
        try:
            handle, uuid, offset, nbytes, pointer, *origin = json.loads(data)
            raw = bytes.fromhex(handle)
            if len(raw) != _HANDLE_BYTES:  # all of them are read
                raise ValueError(f"a handle of {len(raw)} bytes")
            return IpcHandle(raw, uuid, offset, nbytes, pointer, Origin(*origin))
        except (TypeError, ValueError) as error:
            raise InvalidArgument(f"IPC handle: expected one of to_bytes, got {len(data)} bytes: {error}") from error


def export(pointer: int, nbytes: int, device: int) -> IpcHandle:
    """The handle of device memory. Raises PeerMemoryError for memory that cannot be exported."""
    with driver.on_device(device):
        kind = cu.CUpointer_attribute
        try:
            base, size = call(cu.cuMemGetAddressRange, pointer)
        except CudaError as error:
            raise PeerMemoryError(f"IPC: expected memory of cuda:{device}, got 0x{pointer:x}: {error}") from error
        if not call(cu.cuPointerGetAttribute, kind.CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, pointer):
            pooled = int(call(cu.cuPointerGetAttribute, kind.CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE, pointer) or 0)
            source = "a stream-ordered pool" if pooled else "virtual memory management or a managed allocation"
            raise PeerMemoryError(
                f"IPC: expected memory of cuMemAlloc (SymmetricMemory, DeviceMemory), got 0x{pointer:x} from {source}"
            )
        offset = pointer - int(base)
        if offset + nbytes > size:
            raise PeerMemoryError(f"IPC: expected at most {size - offset} bytes from 0x{pointer:x}, got {nbytes}")
        handle = call(cu.cuIpcGetMemHandle, base)
    raw = ctypes.string_at(handle.getPtr(), _HANDLE_BYTES)
    return IpcHandle(raw, device_info(device).uuid, offset, nbytes, pointer, Origin.here())


class Mapping:
    """Memory of another process, mapped for ``device`` at ``pointer``; unmapped when closed or collected.

    The driver counts the mappings of a handle.  No lock is held: the garbage collector may close one mapping while
    another is made.
    """

    def __init__(self, handle: IpcHandle, device: int) -> None:
        self.device, self._base = device, 0
        if handle.origin == Origin.here():
            raise PeerMemoryError("IPC: a process cannot open its own handle: use the pointer itself")
        self._base = _open(handle, device)
        self.pointer = self._base + handle.offset
        self.nbytes = handle.nbytes

    def close(self) -> None:
        base, self._base = self._base, 0
        if base and not sys.is_finalizing():
            with driver.on_device(self.device):
                call(cu.cuIpcCloseMemHandle, base)

    def __del__(self) -> None:
        if sys is not None:  # else the interpreter is ending, and has cleared the names of this module
            self.close()


class OwnMemory:
    """Memory of this process, such as that of a rank on another thread, with the interface of ``Mapping``."""

    def __init__(self, handle: IpcHandle, device: int) -> None:
        self.pointer, self.nbytes, self.device = handle.pointer, handle.nbytes, device
        self._owner = _owners.get(handle.pointer - handle.offset)
        owner = driver.device_of(handle.pointer)
        if owner != device:
            _enable_peer_access(device, owner)

    def close(self) -> None:
        """Do nothing: the owner frees the memory."""


def attach(handle: IpcHandle, device: int) -> Mapping | OwnMemory:
    """Make memory of this or another process of the machine accessible to ``device``.  Raises PeerMemoryError."""
    return (OwnMemory if handle.origin == Origin.here() else Mapping)(handle, device)


def _enable_peer_access(device: int, peer: int) -> None:
    with driver.on_device(device):
        (status,) = cu.cuCtxEnablePeerAccess(driver.primary_context(peer), 0)
    if status and status != cu.CUresult.CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED:
        error = driver.error_of("cuCtxEnablePeerAccess", status)
        raise PeerMemoryError(f"cuda:{device} has no peer access to cuda:{peer}: {error}")


def _open(handle: IpcHandle, device: int) -> int:
    if handle.origin.boot != Origin.here().boot:
        raise PeerMemoryError(f"IPC: cannot map memory of process {handle.origin.pid}: {handle.origin.obstacle()}")
    raw = cu.CUipcMemHandle()
    ctypes.memmove(raw.getPtr(), handle.handle, _HANDLE_BYTES)
    with driver.on_device(device):
        flags = cu.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        status, pointer = cu.cuIpcOpenMemHandle(raw, flags)
    if status:
        raise PeerMemoryError(
            f"IPC: cuda:{device} cannot map memory of process {handle.origin.pid}: "
            f"{handle.origin.obstacle() or _device_obstacle(handle.uuid, device)} "
            f"({driver.error_of('cuIpcOpenMemHandle', status)})"
        )
    return int(pointer)


def _device_obstacle(uuid: str, device: int) -> str:
    owners = [info.index for info in visible_devices() if info.uuid == uuid]
    if not owners:
        return "its GPU is not visible here (CUDA_VISIBLE_DEVICES), or it has freed the memory"
    kind = cu.CUdevice_P2PAttribute.CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED
    if owners[0] != device and not call(cu.cuDeviceGetP2PAttribute, kind, device, owners[0]):
        return f"cuda:{device} has no peer access to cuda:{owners[0]}"
    return "it has ended or freed the memory, or the platform does not allow IPC"
