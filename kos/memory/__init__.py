"""Memory: what any array becomes (Buffer), and arrays on a GPU (Array)."""

from kos.memory.array import Array
from kos.memory.buffer import Buffer, as_buffer

__all__ = ["Array", "Buffer", "as_buffer"]
