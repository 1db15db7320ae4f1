"""The stack allocator: addresses, growth, planning, and any backing memory."""

import weakref

import numpy as np
import pytest

from kos.errors import InvalidArgument, OutOfMemory
from kos.memory.arena import ALIGNMENT, Arena


def address(array):
    return array.ctypes.data


def one_pass(arena):
    """A pass with nested scopes; the arrays' values must survive each other."""
    with arena.scope():
        a = arena.take((3, 5), np.float64)
        a[:] = 1
        with arena.scope():
            b = arena.take((1000,), np.float32)
            b[:] = 2
        c = arena.take((7,), np.int8)
        c[:] = 3
        assert (a == 1).all() and (c == 3).all()
        found = [address(x) for x in (a, b, c)]
        assert not any(at % ALIGNMENT for at in found)
        return found


def test_after_one_pass_the_slab_holds_the_next_at_the_same_addresses():
    arena = Arena()
    one_pass(arena)
    assert arena.capacity == arena.peak > 0
    second = one_pass(arena)
    assert one_pass(arena) == second
    assert all(second[0] <= at < second[0] + arena.capacity for at in second)


def test_overflow_is_freed_with_its_scope():
    live = weakref.WeakSet()

    class Slab:
        def __init__(self, nbytes):
            live.add(self)

    arena = Arena(256, Slab, lambda *described: None)
    arena.take((64,), np.uint8)
    for _ in range(3):
        with arena.scope():
            arena.take((64,), np.uint8)
            arena.take((64,), np.uint8)
            assert len(live) == 3
    assert len(live) == 1


def test_a_fixed_arena_does_not_grow():
    arena = Arena(512)
    with arena.scope():
        arena.take((1,), np.uint8)
        with pytest.raises(InvalidArgument, match="expected an empty arena to fix, got 256 bytes"):
            arena.fix()
    arena.fix()
    arena.take((16,), np.float32)
    with pytest.raises(OutOfMemory, match="expected at most 512 bytes in use, got 768"):
        arena.take((65,), np.float32)
    assert arena.in_use == ALIGNMENT


def test_reserve_makes_room_at_once():
    arena = Arena(0)
    arena.reserve(1000)
    assert arena.capacity == 1000
    arena.reserve(10)
    assert arena.capacity == 1000
    with arena.scope():
        arena.take((1,), np.uint8)
        with pytest.raises(InvalidArgument, match="expected an empty arena that is not fixed, got 256 bytes"):
            arena.reserve(2000)


def test_an_exception_gives_the_scope_back():
    arena = Arena(0)

    def fail():
        with arena.scope():
            arena.take((100,), np.float32)
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        fail()
    assert arena.in_use == 0
