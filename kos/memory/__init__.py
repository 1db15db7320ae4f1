"""Memory: what any array becomes (Buffer)."""

from kos.memory.buffer import Buffer, as_buffer

__all__ = ["Buffer", "as_buffer"]
