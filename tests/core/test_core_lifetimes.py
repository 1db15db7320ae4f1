"""What groups and communicators leave behind, and processes whose number another one has got."""

import gc
import mmap
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import pytest

import kos
from kos import _core
from kos.comm.control.place import env_rendezvous
from kos.comm.host.shared.segment import PID, STARTED
from kos.errors import KosError
from tests.comm.tcp_ranks import environment, free_port
from tests.core.core_ranks import groups, needs_core
from tests.core.group import CoreError, CoreGroup, segment_bytes

pytestmark = needs_core

ROUNDS = 500


def resident() -> int:
    """Bytes of this process in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def check_growth(make: Callable[[], Any], types: list[type]) -> None:
    """``ROUNDS`` calls of ``make`` leave no descriptor, no references to types and no memory."""

    def used() -> tuple[int, list[int]]:
        gc.collect()
        return len(os.listdir("/proc/self/fd")), [sys.getrefcount(each) for each in types]

    for _ in range(50):
        make()
    (files, references), memory = used(), resident()
    for _ in range(ROUNDS):
        make()
    now_files, now_references = used()
    assert now_files == files
    for kind, before, now in zip(types, references, now_references, strict=True):
        assert abs(now - before) < ROUNDS // 10, kind  # a few are those of frames and of the last round
    assert resident() - memory < 8 << 20  # 16 KiB each


def test_groups_leave_nothing():
    memory = mmap.mmap(-1, segment_bytes(2))
    x = np.ones(3)

    def make():
        one, other = (CoreGroup(memory, rank, 2) for rank in range(2))
        call = one.prepare("all_reduce", "float64", 3)
        left = call.start(x).left
        call.prepared = None
        one.prepare("send", "float64", 3, dst=1).run(x)
        for rank, buffer in ((2, memory), (0, bytearray(64))):
            with pytest.raises(ValueError, match="expected the memory"):
                _core.native.Group(buffer, rank, 2, one)
        with pytest.raises(BufferError if sys.version_info >= (3, 15) else (BufferError, TypeError)):
            _core.native.Group(b"", 0, 2, one)
        for each in (one, other):
            each.close()
        with pytest.raises(CoreError):
            left.done()
        memory[:64] = bytes(64)
        return type(left)

    check_growth(make, [_core.native.Group, make()])


def test_communicators_leave_nothing():
    """That were split, used, closed or aborted; and calls that were refused."""
    rendezvous = env_rendezvous(30.0, environment(0, 1, free_port()))
    with kos.init("tcp", rendezvous=rendezvous, timeout=30.0) as comm:
        x, rounds = np.ones(3), iter(range(10**6))

        def make():
            part = comm.split(0) if next(rounds) % 2 else comm.duplicate()
            for _ in range(3):
                part.all_reduce(x)
                part.all_reduce(x, async_op=True).wait()
                with pytest.raises(KosError):
                    part.all_reduce(x[::2], out=x)
            part.close() if next(rounds) % 3 else part.abort()
            with pytest.raises(KosError):
                part.all_reduce(x)

        native, operation = _core.native, type(comm.all_reduce.__self__)
        check_growth(make, [native.Group, native.State, operation, type(comm.all_reduce(x, async_op=True))])


@contextmanager
def another_process() -> Iterator[int]:
    """A process with the memory that this one has now."""
    if not (child := os.fork()):
        signal.pause()
        os._exit(0)
    try:
        yield child
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@contextmanager
def taken_over(number: int, rank: int = 1) -> Iterator[list[CoreGroup]]:
    """The groups of two ranks, the process of one of which has ended since; another one has its ``number``."""
    with groups(2) as made:
        for each in made:
            each.core.direct = 1
        line = made[0].lines[rank]
        made[0].words[line + PID], made[0].words[line + STARTED] = number, 1
        yield made


def test_a_message_is_not_read_from_a_process_that_has_got_the_number_of_its_sender():
    x, out = np.full(100_000, 1.0), np.zeros(100_000)
    with another_process() as number, taken_over(number) as (one, other):
        x[:] = 2  # not in that process
        works = [other.prepare("send", "float64", x.size, dst=0).start(x)]
        works.append(one.prepare("recv", "float64", x.size, src=1).start(out))
        while works:  # the core alone: nobody looks for ranks that have ended
            works = [work for work in works if work.left is not None and not work.left.done()]
        assert (out == 2).all()


def test_a_collective_does_not_read_from_a_process_that_has_got_the_number_of_a_rank():
    x, out = np.full(200_000, 1.0), np.zeros(200_000)
    with another_process() as number, taken_over(number) as (one, other):
        works = [each.prepare("all_to_all", "float64", x.size // 2) for each in (one, other)]
        mine, theirs = (call.start(x, to) for call, to in zip(works, (out, np.zeros(x.size)), strict=True))

        def finish():
            while not mine.done():
                with suppress(CoreError):
                    theirs.done()

        with pytest.raises(CoreError, match="LOST of rank 1"):
            finish()
        assert (out[x.size // 2 :] == 0).all()
