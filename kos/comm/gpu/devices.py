"""The GPU of a rank, and a model of its links.

The model predicts from which size on collectives between hosts are faster in phases (``hierarchical``).  A call takes
the bytes that leave a host at the rate of its network, those of the phases within a host at the rate of a GPU's links,
and a fixed time for each further launch.  NCCL's ring of all ranks uses the links within hosts meanwhile.
``kos bench --write-table`` measures instead.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from kos.comm.control.base import ControlPlane
from kos.comm.tuning import DEFAULT, Route, Table, key, machine, of_rank_0, read, user_path
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


def device_of(rendezvous: ControlPlane) -> DeviceInfo:
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


log = logging.getLogger(__name__)

NETWORK = 3e9
"""Bytes per second out of a host where the system tells none: of NCCL's sockets on the loopback of one machine."""
NVLINK, PCIE = 25e9, 20e9
"""Bytes per second, in one direction, of each NVLink, and of a GPU without."""
LAUNCH = 10e-6
"""Seconds of a launch of few bytes, with its wait for other ranks."""

SYSTEM = Path("/sys/class")


def network_rate(system: Path = SYSTEM) -> float:
    """Bytes per second out of this host: of all active InfiniBand ports, else of its fastest network device."""
    rates = [0.0]
    for port in system.glob("infiniband/*/ports/*"):
        with suppress(OSError, ValueError, IndexError):
            if "ACTIVE" in (port / "state").read_text():
                rates.append(float((port / "rate").read_text().split()[0]) * 1e9 / 8)
    if any(rates):
        return sum(rates)
    for device in system.glob("net/*"):
        with suppress(OSError, ValueError):
            if (device / "operstate").read_text().strip() == "up":
                rates.append(float((device / "speed").read_text()) * 1e6 / 8)
    return max(rates) or NETWORK


def predicted(hosts: int, local: int, network: float, links: float) -> dict[str, Route]:
    """The routes by size, of each rank's input, between ``hosts`` of ``local`` ranks.

    broadcast and all_to_all send as many bytes between hosts either way, and stay with NCCL.
    """
    ranks = hosts * local
    of_all = {  # bytes for each byte of input: out of a host by a ring and in phases, within a host; and launches more
        "all_reduce": (2 * (ranks - 1) / ranks, 2 * (hosts - 1) / hosts, 2 * (local - 1) / local, 2),
        "reduce_scatter": ((ranks - 1) / ranks, (hosts - 1) / hosts, (local - 1) / local, hosts),
        "all_gather": (ranks - 1, ranks - local, hosts * (local - 1), hosts),
    }
    routes: dict[str, Route] = {}
    for name, (ring, phases, within, launches) in of_all.items():
        gain = (ring - phases) / network - within / links
        limit = max(round(launches * LAUNCH / gain), 1) if gain > 0 else None
        routes[key(name, False, False, True)] = ((limit, "nccl"), (None, "hierarchical"))[: 1 + (gain > 0)]
    return routes


def table_between(rendezvous: ControlPlane, device: int, hosts: int) -> Table:
    """The table of rank 0 for these hosts, measured by the user or predicted.  Collective."""

    def choose() -> Table:
        gpu, link = machine(device)
        path = user_path(gpu, rendezvous.size, hosts)
        try:
            return read(path, gpu, link, rendezvous.size, hosts)
        except (FileNotFoundError, InvalidArgument) as error:
            if isinstance(error, InvalidArgument):
                log.warning("the tuning table %s is not used: %s", path, error)
            network = NETWORK if rendezvous.pretended_host else network_rate()
            links = NVLINK * int(link.split()[0]) if link[0].isdigit() else PCIE
            source = f"predicted: {network / 1e9:.3g} GB/s out of a host, {links / 1e9:.3g} GB/s of each GPU within it"
            routes = predicted(hosts, rendezvous.size // hosts, network, links)
            return Table(gpu, link, rendezvous.size, source, DEFAULT, routes, hosts)

    return of_rank_0(rendezvous, choose)
