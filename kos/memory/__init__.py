"""Memory: Buffer, the description of any array, and Array, an array on a GPU."""

from kos.memory.array import Array
from kos.memory.buffer import Buffer, as_buffer

__all__ = ["Array", "Buffer", "as_buffer"]
