"""The GPU of a rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kos.comm.control.base import Rendezvous
from kos.cuda import driver
from kos.cuda.devices import DeviceInfo, assign_devices, device_info, visible_devices
from kos.dtypes import DType
from kos.errors import BackendUnavailable, InvalidArgument

FLOAT8 = (8, 9)
"""The compute capability that converts 8-bit floats."""


def check_float8(what: str, kind: DType | str, device: int) -> None:
    """Raise InvalidArgument if the GPU has no instructions for 8-bit floats of that ``kind``.

    ``what`` begins the text.
    """
    if (info := device_info(device)).compute_capability < FLOAT8:
        raise InvalidArgument(f"{what}: expected a GPU of compute capability 8.9 for {kind}, got {info.name}")


def device_of(rendezvous: Rendezvous) -> DeviceInfo:
    """The GPU of this rank: the one that it was given, else by its place among the ranks of the machine.

    Where other ranks were given GPUs, as the members of a group have them when newcomers join, it is one that the
    fewest have.  Pretended hosts share the GPUs of their machine: ranks of two hosts have one in common only if ranks
    of one would.

    Ranks bound to a NUMA node take GPUs of that node first.  Raises BackendUnavailable without one.  Collective
    on first use.
    """
    place, ranks = rendezvous.place_on_machine, rendezvous.on_machine
    driver.require()
    devices = visible_devices()
    wanted = rendezvous.device
    if wanted is None:
        usual = assign_devices([node for _, node in ranks], [device.numa_node for device in devices])
        given = [rendezvous.requested_gpus[rank] for rank, _ in ranks] if any(rendezvous.requested_gpus) else []
        wanted = _least_used(given, usual, [device.uuid for device in devices])[place] if given else usual[place]
    if not 0 <= wanted < len(devices):
        raise BackendUnavailable(f"device: expected one of 0..{len(devices) - 1}, got {wanted}")
    return devices[wanted]


def _least_used(given: Sequence[str], usual: Sequence[int], devices: Sequence[str]) -> list[int]:
    """The device index of each rank: a device with the fewest ranks, if possible the rank's ``usual`` one.

    ``given`` are UUIDs, "" of a rank that was given none: these choose in order.  A rank that was given one keeps the
    usual index here, as it does not ask.
    """
    users, chosen = Counter(uuid for uuid in given if uuid), list(usual)
    for place, uuid in enumerate(given):
        if not uuid:
            chosen[place] = min(range(len(devices)), key=lambda index: (users[devices[index]], index != usual[place]))
            users[devices[chosen[place]]] += 1
    return chosen
