"""Memory shared by the ranks of one host: compares their calls, detects dead ranks, and runs operations."""

from kos.comm.host.shared.calls import ABORTED, CallRing
from kos.comm.host.shared.node import Node, await_nodes
from kos.comm.host.shared.segment import Segment, SharedArrays, open_segment

__all__ = ["ABORTED", "CallRing", "Node", "Segment", "SharedArrays", "await_nodes", "open_segment"]
