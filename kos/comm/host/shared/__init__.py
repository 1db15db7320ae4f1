"""Memory shared by the ranks of one host: compares their calls, detects dead ranks, and runs collectives."""

from kos.comm.host.shared.arrays import SharedArrays
from kos.comm.host.shared.calls import ABORTED, Calls
from kos.comm.host.shared.collectives import SharedCollectives
from kos.comm.host.shared.hosts import between_hosts
from kos.comm.host.shared.messages import SharedMessages
from kos.comm.host.shared.segment import Segment, open_segment

__all__ = [
    "ABORTED", "Calls", "Segment", "SharedArrays", "SharedCollectives", "SharedMessages", "between_hosts",
    "open_segment",
]  # fmt: skip
