"""Discovery: the GPUs of this machine, their NVLinks, and the assignment of GPUs to ranks.

The driver lists the GPUs that CUDA_VISIBLE_DEVICES and MIG make visible.  NUMA nodes come from sysfs, NVLinks from
NVML.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kos.cuda import driver
from kos.cuda.driver import call, cu
from kos.errors import BackendUnavailable

SYSFS = Path("/sys")


@dataclass(frozen=True)
class DeviceInfo:
    """One visible GPU, or one MIG instance of it."""

    index: int
    """CUDA's ordinal in this process."""
    name: str
    """The name of the product."""
    uuid: str
    """Identifies the device in every process."""
    compute_capability: tuple[int, int]
    """(major, minor)."""
    memory: int
    """Size of the memory in bytes."""
    multiprocessors: int
    """Number of streaming multiprocessors."""
    pci_address: str
    """domain:bus:device.function."""
    numa_node: int | None
    """The nearest NUMA node; None if there is one node, or it is unknown."""
    mig: bool
    """Whether it is a MIG instance."""

    @property
    def arch(self) -> str:
        """NVRTC's architecture, such as "sm_90a"."""
        return arch_of(self.compute_capability)


def arch_of(compute_capability: tuple[int, int]) -> str:
    """NVRTC's architecture: with the chip's own instructions ("sm_90a") from Hopper on."""
    major, minor = compute_capability
    return f"sm_{major}{minor}" + ("a" if major >= 9 else "")


@functools.cache
def visible_devices() -> tuple[DeviceInfo, ...]:
    """Every visible GPU by its ordinal; none if CUDA cannot be used (``driver.unavailable`` gives the reason)."""
    if driver.unavailable() is not None:
        return ()
    return tuple(_inspect(index) for index in range(call(cu.cuDeviceGetCount)))


def _inspect(index: int) -> DeviceInfo:
    from cuda.core import Device

    device = Device(index)
    # cuda.core would start the CUDA runtime to get the address, and reports only the memory of the current GPU.
    address = call(cu.cuDeviceGetPCIBusId, 32, index).split(b"\0")[0].decode().lower()[-12:]  # as in sysfs
    return DeviceInfo(
        index=index,
        name=device.name,
        uuid=device.uuid.replace("-", ""),
        compute_capability=(device.compute_capability.major, device.compute_capability.minor),
        memory=int(call(cu.cuDeviceTotalMem, index)),
        multiprocessors=device.properties.multiprocessor_count,
        pci_address=address,
        numa_node=_numa_node(SYSFS / "bus/pci/devices" / address),
        mig=" MIG " in device.name,
    )


def device_info(index: int) -> DeviceInfo:
    """The GPU with this ordinal. Raises BackendUnavailable if there is none."""
    driver.require()
    if not 0 <= index < len(visible_devices()):
        raise BackendUnavailable(f"CUDA: expected a device in 0..{len(visible_devices()) - 1}, got {index}")
    return visible_devices()[index]


@functools.cache
def nvlinks(index: int) -> int | None:
    """The number of active NVLinks of this device at the first call; None if NVML does not report it."""
    if driver.unavailable() is not None:
        return None
    from cuda.core import Device, system

    try:
        return sum(link.state for link in Device(index).to_system_device().get_nvlinks())
    except (system.NvmlError, RuntimeError):
        return None


def assign_devices(rank_nodes: Sequence[int | None], device_nodes: Sequence[int | None]) -> list[int]:
    """The device of each rank of one machine, from the NUMA nodes of ranks and devices.

    Ranks choose in order: the first free device on their own node, else the first free one.  More ranks
    than devices share them evenly.  Every rank computes the same assignment from the same two lists.
    """
    if not device_nodes:
        raise BackendUnavailable(f"CUDA: expected a device for {len(rank_nodes)} ranks, got none")
    chosen: list[int] = []
    free: list[int] = []
    for node in rank_nodes:
        free = free or list(range(len(device_nodes)))
        near = [device for device in free if node is not None and device_nodes[device] == node]
        device = (near or free)[0]
        free.remove(device)
        chosen.append(device)
    return chosen


def process_numa_node() -> int | None:
    """The NUMA node that this process is bound to; None if its CPUs span several or it is unknown."""
    if not hasattr(os, "sched_getaffinity"):
        return None
    allowed = os.sched_getaffinity(0)
    for path in sorted((SYSFS / "devices/system/node").glob("node[0-9]*")):
        if allowed <= _cpu_list(path / "cpulist"):
            return int(path.name.removeprefix("node"))
    return None


def read(path: Path) -> str:
    """The text of a small file, without the newline; "" where it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _numa_node(device: Path) -> int | None:
    text = read(device / "numa_node")
    return int(text) if text and int(text) >= 0 else None  # -1: a single node, or unknown


def _cpu_list(path: Path) -> set[int]:
    """The CPUs of a sysfs list such as "0-3,8"."""
    cpus: set[int] = set()
    for part in filter(None, read(path).split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus
