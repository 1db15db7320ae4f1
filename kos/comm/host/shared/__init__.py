"""Memory that the ranks of one host share: what they call, whether they live, and collectives through it."""

from kos.comm.host.shared.board import SharedBoard
from kos.comm.host.shared.calls import LEFT, Calls
from kos.comm.host.shared.collectives import SharedCollectives
from kos.comm.host.shared.segment import Segment, open_segment

__all__ = ["LEFT", "Calls", "Segment", "SharedBoard", "SharedCollectives", "open_segment"]
