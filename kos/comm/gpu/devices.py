"""The GPU of a rank."""

from __future__ import annotations

from kos.comm.control.base import Rendezvous
from kos.cuda import driver
from kos.cuda.devices import DeviceInfo, assign_devices, visible_devices
from kos.errors import BackendUnavailable

FLOAT8 = (8, 9)
"""The compute capability that converts 8-bit floats."""


def device_of(rendezvous: Rendezvous) -> DeviceInfo:
    """The GPU of this rank: the one that it was given, else by its place among the ranks of the machine.

    Pretended hosts share the GPUs of their machine: ranks of two hosts have one in common only if ranks of one would.

    Ranks bound to a NUMA node take GPUs of that node first.  Raises BackendUnavailable without one.  Collective
    on first use.
    """
    place, nodes = rendezvous.place_on_machine
    driver.require()
    devices = visible_devices()
    wanted = rendezvous.device
    if wanted is None:
        wanted = assign_devices(nodes, [device.numa_node for device in devices])[place]
    if not 0 <= wanted < len(devices):
        raise BackendUnavailable(f"device: expected one of 0..{len(devices) - 1}, got {wanted}")
    return devices[wanted]
