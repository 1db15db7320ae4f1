"""The stack allocator: what does not fit into its slab is freed with its scope."""

import weakref
from contextlib import suppress

import numpy as np

from kos.memory.arena import Arena


def test_overflow_is_freed_with_its_scope():
    """Also where an exception ends it."""
    live = weakref.WeakSet()

    class Slab:
        def __init__(self, nbytes):
            live.add(self)

    arena = Arena(256, Slab, lambda *described: None)
    arena.take((64,), np.uint8)
    for _ in range(3):
        with suppress(RuntimeError), arena.scope():
            arena.take((64,), np.uint8)
            arena.take((64,), np.uint8)
            assert len(live) == 3
            raise RuntimeError
    assert len(live) == 1
