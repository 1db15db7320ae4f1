"""Calls of the compiled core: how they wait, what threads and signals do meanwhile, and what a closed group frees."""

import gc
import sys
import threading
import time
import weakref

import numpy as np
import pytest

from tests.core.core_ranks import groups, needs_core, on_threads, run_threads
from tests.core.group import CoreError

pytestmark = needs_core


def test_a_wait_lasts_while_the_call_makes_progress():
    """The other rank takes a stage each millisecond.  The core returns after 10 ms without a stage, not in all."""
    stages = 40
    with groups(2) as made:
        x, y = (np.ones(stages * (128 << 10), np.uint8) for _ in range(2))
        mine, theirs = (each.prepare("broadcast", "uint8", x.size) for each in made)

        def slow():
            work = theirs.start(y)
            while not work.done():
                time.sleep(1e-3)

        def completes_in_one_wait():
            thread = threading.Thread(target=slow)
            thread.start()
            work = mine.start(x, waits=True)
            complete = work.left is None
            work.wait()
            thread.join()
            return complete

        assert any(completes_in_one_wait() for _ in range(20)), "on a busy machine a millisecond may take 10"


def test_with_other_works_outstanding_a_start_neither_spins_nor_blocks():
    """Python advances them, and here the other rank too."""
    with groups(2, spin=100.0) as (a, b):
        for first in (a.start(np.ones(1)), a.prepare("recv", "uint8", 3, src=1).start(np.ones(3, np.uint8))):
            x = np.ones(4)
            began = time.monotonic()
            work = a.prepare("all_reduce", "float64", 4).start(x, waits=True)
            assert work.left is not None and time.monotonic() - began < 50 and a.core.parks == 0
            if first.sequence == 0:
                theirs = b.start(np.ones(1))
            else:
                theirs = b.prepare("send", "uint8", 3, dst=0).start(np.ones(3, np.uint8))
            theirs_too = b.start(np.ones(4))
            while not (first.done() and work.done() and theirs.done() and theirs_too.done()):
                pass
            assert (x == 2).all()


def test_a_start_that_waits_returns_a_work_after_ten_milliseconds():
    with groups(2) as (a, b):
        for call, theirs in (
            (a.prepare("barrier").start, b.prepare("barrier").start),
            (lambda **o: a.prepare("recv", "uint8", src=1).start(b"", **o), b.prepare("send", "uint8").start),
        ):
            began = time.monotonic()
            work = call(waits=True)
            assert 0.0099 < time.monotonic() - began < 20 and not work.done()
            theirs()
            assert work.done()


def test_a_spin_ends_where_each_look_takes_longer_than_it_lasts():
    """As on a busy machine, where a rank that yields its core has it back much later; else it would never end."""
    with groups(2, spin=1e-9) as (a, _):
        assert a.core.spin_ns == 1
        assert not a.prepare("barrier").start(waits=True).done()


def ticks_of_another_thread(spin: float) -> tuple[list[float], list[float]]:
    """When another thread ran during a call that waits: while the call spun, and after that."""
    ticks, stop = list[float](), threading.Event()

    def tick() -> None:
        while not stop.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0.001)

    interval = sys.getswitchinterval()
    thread = threading.Thread(target=tick)
    with groups(2, spin=spin) as (a, _):
        thread.start()
        try:
            sys.setswitchinterval(10)  # this thread alone lets the other one run
            start = time.perf_counter()
            a.prepare("all_reduce", "float64", 1).start(np.ones(1), waits=True)
            end = time.perf_counter()
        finally:
            sys.setswitchinterval(interval)
            stop.set()
            thread.join()
    spinning = [t for t in ticks if start < t < start + spin * 0.99]
    return spinning, [t for t in ticks if start + spin < t < end]


def test_the_gil_is_held_for_the_first_microseconds_and_then_released():
    """The wait without the GIL lasts ten milliseconds: on a busy machine the other thread may get no core in that time,
    so the call is repeated.  If the GIL were never released, the other thread could not run in any of the calls."""
    for _ in range(200):
        spinning, waiting = ticks_of_another_thread(spin=0.05)
        assert not spinning
        if waiting:
            return
    raise AssertionError("the other thread never ran while the call waited")


def test_calls_of_several_threads_of_a_rank():
    """Both ranks' threads are ordered by a lock, as their calls must be; waits overlap."""

    def body(group):
        order, sums = threading.Lock(), list[float]()

        def call():
            for _ in range(200):
                x = np.ones(5)
                with order:
                    work = group.start(x)
                work.wait()
                sums.append(float(x[0]))

        run_threads(call, call)
        return sums

    assert on_threads(2, body) == [[2.0] * 400] * 2


def test_a_closed_group_releases_arrays_and_memory():
    with groups(2) as (a, _):
        x = np.ones(4)
        work, alive = a.start(x), weakref.ref(x)
        del x
        assert alive() is not None
        a.close()
        assert alive() is None
        for call in (work.wait, work.done, lambda: a.all_reduce(np.ones(4)), lambda: a.start(np.ones(4))):
            with pytest.raises(CoreError, match="^CLOSED"):
                call()
        a.close()


def test_a_group_that_nobody_has_is_collected_with_its_calls():
    with groups(1) as made:
        memory = weakref.ref(made[0].memory)
        made[0].all_reduce(np.ones(3))  # the group keeps its Prepared
        made.clear()
        gc.collect()
        assert memory() is None
