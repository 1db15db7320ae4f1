"""The options of NCCL that ``kos.init`` and ``split`` accept, by the names of ncclConfig_t in snake case."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict

from kos.comm.arguments import check_bool, number_in
from kos.errors import InvalidArgument


class NCCLOptions(TypedDict, total=False):
    """Settings of an NCCL communicator; see ncclConfig_t in NCCL's documentation.  The same on all ranks."""

    min_ctas: int
    """Least number of thread blocks of a kernel, from 1."""
    max_ctas: int
    """Largest number of thread blocks of a kernel, from 1; fewer leave more of the GPU to other kernels."""
    cga_cluster_size: int
    """Thread blocks of a cluster, from 0 to 8."""
    cta_policy: int
    """0: default; 1: efficiency; 2: no thread blocks where copy engines can move the data; 3: 1 and 2."""
    nvls_ctas: int
    """Thread blocks of kernels that use NVLink SHARP, from 1."""
    n_channels_per_net_peer: int
    """Network channels between two ranks, from 1; NCCL rounds up to a power of two."""
    traffic_class: int
    """Traffic class of the network, from 0."""
    net_name: str
    """Network plugin, such as "IB" or "Socket"."""
    collnet_enable: bool
    """Use of SHARP in InfiniBand switches."""
    nvlink_centric_sched: bool
    """Scheduling that favours NVLink."""
    split_share: bool
    """Whether groups split from this one share its resources."""


_RANGES = {
    "min_ctas": (1, 64), "max_ctas": (1, 64), "cga_cluster_size": (0, 8), "cta_policy": (0, 3), "nvls_ctas": (1, 64),
    "n_channels_per_net_peer": (1, 64), "traffic_class": (0, (1 << 31) - 1),
}  # fmt: skip


def check_nccl(given: Any) -> dict[str, Any]:
    """The options, checked by name and type, in the order of their names; none for None."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise InvalidArgument(f"nccl: expected a dict of options, got {type(given).__name__}")
    known = NCCLOptions.__annotations__
    checked: dict[str, Any] = {}
    for name in sorted(given, key=str):
        value, what = given[name], f"nccl: {name}"
        if name not in known:
            raise InvalidArgument(f"nccl: expected options among {', '.join(known)}, got {name!r}")
        if name in _RANGES:
            checked[name] = number_in(what, value, *_RANGES[name])
        elif name != "net_name":
            checked[name] = check_bool(what, value)
        elif isinstance(value, str) and value:
            checked[name] = value
        else:
            raise InvalidArgument(f"{what}: expected the name of a network, got {value!r}")
    least, most = checked.get("min_ctas", 1), checked.get("max_ctas", 64)
    if least > most:
        raise InvalidArgument(f"nccl: expected min_ctas of at most max_ctas, got {least} and {most}")
    return checked
