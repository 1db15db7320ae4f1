"""Memory that the ranks of one host share: what they call, whether they live, and collectives through it."""

from kos.comm.shared.calls import Calls
from kos.comm.shared.collectives import SharedCollectives
from kos.comm.shared.segment import Segment, open_segment

__all__ = ["Calls", "Segment", "SharedCollectives", "open_segment"]
