"""Memory shared by the ranks of one host: compares their calls, detects dead ranks, and runs operations."""

from kos.comm.host.shared.calls import ABORTED, FingerprintRing
from kos.comm.host.shared.segment import Segment, SharedArrays, open_segment
from kos.comm.host.shared.transport import SharedMemoryTransport, await_transports

__all__ = [
    "ABORTED", "FingerprintRing", "Segment", "SharedArrays", "SharedMemoryTransport", "await_transports",
    "open_segment",
]  # fmt: skip
