"""Failures in the compiled core: mismatched, late, dead and forked ranks raise on every rank and name it."""

import contextlib
import os
import subprocess
import sys
import threading
import time
import weakref
from functools import partial
from typing import Any

import numpy as np
import pytest

from kos._core import native
from kos.comm.prepared import TEXT_BYTES, TEXTS
from tests.comm.tcp_ranks import run_threads
from tests.core.core_ranks import groups, needs_core, on_processes, said_by_a_child
from tests.core.group import CoreError, CoreGroup

pytestmark = needs_core


def forks(_: CoreGroup) -> str:
    """The error of a forked child with a collective and messages in flight; its parent continues to work."""
    with groups(2) as (a, b):
        assert run_threads(a.connect, b.connect) == [True, True]
        x, y, long, got = np.ones(3), np.ones(3), np.arange(500_000, dtype=np.uint8), np.zeros(500_000, np.uint8)

        def send(tag: int = 0) -> Any:
            return a.prepare("send", "uint8", long.size, dst=1, tag=tag).start(long)

        def recv(tag: int = 0) -> Any:
            return b.prepare("recv", "uint8", got.size, src=0, tag=tag).start(got)

        work, sent, late = a.start(x), send(), recv(8)

        def beside() -> None:
            b.all_reduce(y)
            works = [work, sent, recv(), late, send(8)]
            while works:
                works = [each for each in works if not each.done()]
            assert (x == 2).all() and (y == 2).all() and (got == long).all()
            assert run_threads(lambda: a.all_reduce(x), lambda: b.all_reduce(y)) == [x, y] and x[0] == 4

        calls = [work.wait, work.done, lambda: a.all_reduce(np.ones(3)), lambda: b.start(np.ones(3))]
        return said_by_a_child(a, [*calls, sent.wait, late.done, send, recv], beside)


def forks_beside_a_wait(_: CoreGroup) -> int:
    """The status of a forked child that closes a group in which a thread of its parent waits."""
    with groups(2) as (a, b):
        waiter = threading.Thread(target=a.all_reduce, args=(np.ones(3),))
        waiter.start()
        while not a.core.parks:
            time.sleep(0.001)
        if not (child := os.fork()):
            with contextlib.suppress(RuntimeError):
                a.close()
                os._exit(0)
            os._exit(1)
        status = os.waitpid(child, 0)[1]
        b.all_reduce(np.ones(3))
        waiter.join()
        return status


def test_a_forked_process_closes_a_group_in_which_a_thread_of_its_parent_waits(tmp_path):
    assert on_processes(1, forks_beside_a_wait, tmp_path) == [0]


def test_a_forked_process_is_refused_and_its_parent_goes_on(tmp_path):
    assert on_processes(1, forks, tmp_path) == ["FORKED"]


def test_a_thread_that_waits_in_a_start_ends_when_others_close_the_group():
    """Two threads close at once: neither returns, after which the memory may be freed, before the wait has ended."""
    for attempt in range(60):
        with groups(2) as (a, _):
            nbytes, name = ((0, "barrier"), (5, "recv"), (500_000, "send"))[attempt % 3]
            call, array = a.prepare(name, "uint8", nbytes, dst=1, src=1), [np.zeros(nbytes, np.uint8)] * bool(nbytes)
            results = run_threads(partial(call.run, *array), *[partial(close_beside, a)] * 2)
            assert results[0].kind == "CLOSED" and results[1:] == [None, None]


def test_a_closed_group_releases_its_arrays_and_no_longer_uses_its_memory():
    with groups(2) as (a, _):
        x, core = np.ones(4), a.core
        work, alive = a.start(x), weakref.ref(x)
        del x
        a.close()
        assert alive() is None
        for call in (work.wait, lambda: core.publish(0, 1)):
            with pytest.raises(CoreError, match="^CLOSED of rank 0"):
                call()
        core.fail(0)
        assert core.failure() == 0


def close_beside(group: CoreGroup) -> None:
    while not group.core.parks:
        time.sleep(0)
    time.sleep(0.003)  # after its first millisecond the wait sleeps
    group.core.close()


def fail_beside(group: CoreGroup, other: CoreGroup) -> None:
    while not group.core.parks + other.core.parks:
        time.sleep(0)
    group.fail(0)


@pytest.mark.parametrize("call", ["barrier", "recv", "send"])
@pytest.mark.parametrize("by", [0, 1])
def test_a_failure_ends_a_start_that_waits(call, by):
    """Not only a later poll: a start that other load makes longer than its 10 ms is tried again."""
    for _ in range(50):
        with groups(2) as made:
            prepared = made[0].prepare(call, "uint8", 500_000 if call != "barrier" else 0, dst=1, src=1)
            array = [] if call == "barrier" else [np.zeros(500_000, np.uint8)]

            failing = partial(fail_beside, made[by], made[1 - by])
            result, _ = run_threads(partial(prepared.start, *array, waits=True), failing)
            if isinstance(result, CoreError):
                assert (result.kind, result.by) == ("TOLD", by)
                return
            with pytest.raises(CoreError, match=f"^TOLD of rank {by}"):
                result.wait()
    raise AssertionError("no start has raised the failure")


def use_the_core_in_destructors() -> None:
    """A Work ends while the core advances all; its array's destructor ends and frees the one before it in the list."""
    with groups(2) as (a, b):

        def recv(tag: int, x: Any) -> Any:
            return a.prepare("recv", "float64", 2, src=1, tag=tag).start(x)

        def send(tag: int) -> None:
            b.prepare("send", "float64", 2, dst=0, tag=tag).start(np.full(2, float(tag)))

        def ended(tag: int) -> None:
            send(tag + 1)
            last.done()
            ends.append(tag)

        ends, y = list[int](), [np.zeros(2) for _ in range(3)]
        last = recv(9, y[0])
        for tag in (1, 3, 5):
            x = np.zeros(2)
            weakref.finalize(x, ended, tag).atexit = False
            recv(tag, x)  # nobody but the core has it
            del x
            recv(tag + 1, np.zeros(2))
        theirs, mine = b.start(y[1]), a.start(y[2])
        for tag in (1, 3, 5):
            send(tag)
        while not last.done():
            if sorted(ends) == [1, 3, 5]:
                send(9)
        assert theirs.done() and mine.done() and y[0].tolist() == [9.0, 9.0]


def test_the_destructor_of_an_array_may_use_the_core():
    program = "from tests.core.test_core_failures import use_the_core_in_destructors as f; f()"
    env = os.environ | {"PYTHONMALLOC": "debug"}  # which overwrites what is freed
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and not done.stderr, done.stderr


def close_in_a_destructor(group: CoreGroup) -> None:
    group.core.close()
    with pytest.raises(CoreError, match="^CLOSED"):
        group.start(np.zeros(2))


def test_the_destructor_of_an_array_may_close_the_group():
    with groups(2) as (a, b):
        x, errors = np.zeros(2), list[Any]()
        weakref.finalize(x, lambda: errors.append(run_threads(partial(close_in_a_destructor, a)))).atexit = False
        work, last = a.start(x), a.start(np.zeros(3))
        del x
        for call in (b.start(np.zeros(2)), b.start(np.zeros(3))):
            call.done()
        assert work.done() and errors == [[None]] and a.core.failure() == 0
        with contextlib.suppress(CoreError):  # it may have completed before
            last.done()


def test_descriptions_have_the_place_that_the_core_leaves_them():
    """Ranks that compare calls without the core need these numbers too."""
    assert (TEXTS, TEXT_BYTES) == (native.TEXTS, native.TEXT_BYTES)
