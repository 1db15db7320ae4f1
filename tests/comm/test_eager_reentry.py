"""What Python runs within a call that the core makes may make calls, set timeouts and forget what the core knows.

Such are finalizers, which a collection of garbage or the end of an object runs.  Both ranks are in one thread: rank 1
begins its calls first.
"""

import gc
import sys
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import kos
from kos.comm.communicator import Communicator
from kos.comm.recorder import SLOTS
from kos.errors import CollectiveTimeout, InvalidArgument
from tests.comm.gpu_eager import call_during_start, hits
from tests.comm.shared_ranks import needs_core
from tests.comm.tcp_ranks import both_ranks
from tests.core.reentering import Cycle

pytestmark = needs_core


@pytest.fixture
def pair():
    with both_ranks() as made:
        gc.collect()
        gc.freeze()  # collections are then quick
        yield made


def begin(other: Any, *arrays: Any, **options: Any) -> Callable[[], None]:
    """Rank 1 begins an all_reduce of each array; returns what waits for them."""
    works = [type(other).all_reduce(other, each, async_op=True, **options) for each in arrays]

    def finish() -> None:
        while works:
            works[:] = [work for work in works if not work.done()]

    return finish


def make_known(pair: list[Any], *shapes: Any, **options: Any) -> None:
    for shape in shapes:
        for _ in range(3):
            finish = begin(pair[1], np.ones(shape), **options)
            pair[0].all_reduce(np.ones(shape), **options)
            finish()


def collect_within(call: Callable[..., Any], x: Any, at_end: Callable[[], Any]) -> None:
    """Make a call in which garbage is collected, whose finalizer runs ``at_end``."""
    threshold = gc.get_threshold()
    gc.collect()
    gc.disable()
    try:
        Cycle(at_end)
        gc.set_threshold(1)
        gc.enable()
        call(x)
    finally:
        gc.set_threshold(*threshold)
        gc.enable()


def call_from_code_that_ends(comm: Any, x: Any, at_end: Callable[[], Any]) -> weakref.ref[Any]:
    """Make a call from a line of code that only the recorder keeps; ``at_end`` runs once it does not."""
    code = compile("call(x)", "a line", "exec")
    exec(code, {"call": comm.all_reduce, "x": x})
    return weakref.ref(code, lambda _: at_end())


def fill_recorder(pair: list[Any], shape: Any, count: int = SLOTS - 1) -> None:
    for _ in range(count):
        finish = begin(pair[1], np.ones(shape))
        pair[0].all_reduce(np.ones(shape))
        finish()


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="garbage is collected between two instructions")
def test_a_finalizer_sets_the_timeout_and_makes_a_call_of_the_same_operation(pair):
    """That frees what the core knows of the call that it is about to make."""
    one, other = pair
    make_known(pair, 3, 5)
    for _ in range(20):
        x, y = np.full(3, 2.0), np.full(3, 5.0)
        within, theirs = ([np.ones(5) for _ in range(4)] for _ in range(2))
        finish = begin(other, *theirs, y)

        def again(within=within):
            one.timeout = one.timeout
            for each in within:
                one.all_reduce(each)

        collect_within(one.all_reduce, x, again)
        finish()
        assert x.tolist() == y.tolist() == [7.0] * 3
        assert all((each == 2).all() for each in within + theirs)


def test_a_call_within_the_record_of_another_is_the_next_one(pair):
    """An entry of the recorder is overwritten, and what it has kept ends."""
    one, other = pair
    make_known(pair, 3, 5)
    within, outer, x, y = np.ones(5), np.ones(3), np.ones(3), np.ones(3)
    finish = begin(other, x)
    kept = call_from_code_that_ends(one, y, lambda: (setattr(one, "timeout", one.timeout), one.all_reduce(within)))
    finish()
    fill_recorder(pair, 3)
    assert kept() is not None
    before, theirs = hits(one), [np.full(3, 2.0), np.full(5, 3.0)]
    finish = begin(other, *theirs)
    one.all_reduce(outer)
    finish()
    assert kept() is None and hits(one) == before + 1
    assert outer.tolist() == theirs[0].tolist() == [3.0] * 3
    assert within.tolist() == theirs[1].tolist() == [4.0] * 5


def test_the_end_of_the_last_work_finds_the_new_one(pair):
    """A Persistent keeps its last Work, whose end may start it again: it is not waited for yet."""
    one, other = pair
    x, said = np.ones(3), list[str]()
    persistent = one.all_reduce_init(x)

    def again():
        try:
            persistent.start()
        except InvalidArgument as error:
            said.append(str(error))

    first = persistent.start()
    assert not first.done()  # so it has steps in Python, and the core does not use it again
    finish = begin(other, np.ones(3), np.ones(3))
    first.wait()
    watcher = weakref.ref(first, lambda _: again())
    del first
    second = persistent.start()
    second.wait()
    finish()
    assert watcher() is None and len(said) == 1 and "previous start" in said[0]


def test_a_start_with_wrong_arguments_hides_nothing(pair):
    one, other = pair
    x = np.zeros(3)
    persistent = one.all_reduce_init(x)
    for count in range(6):
        if count == 4:
            with pytest.raises(TypeError):
                persistent.start(1)
        finish, before = begin(other, np.ones(3)), hits(one)
        persistent.start().wait()
        finish()
        assert hits(one) == before + (count > 0)
    assert x.tolist() == [6.0] * 3


def test_a_timeout_that_is_set_within_a_first_call_counts(pair):
    """The call that was made before it is not the one to repeat."""
    one, other = pair
    x = np.ones(3)

    def act():
        one.timeout = 0.2
        with pytest.raises(TypeError):
            one.all_reduce(*range(9))  # forgets the calls that are known, and is not to be repeated

    finish = begin(other, np.ones(3))
    call_during_start(one, x, "return", act)
    finish()
    with pytest.raises(CollectiveTimeout, match="not complete after 0.2 s"):
        one.all_reduce(x)


def test_an_array_that_changes_within_a_first_call_is_not_known(pair):
    """The core keeps the dtype that it then has, and not the one that it would compare."""
    one, other = pair
    dtype = np.dtype(np.float64, metadata={"of": "this test"})  # an object of its own
    x, y = np.ones(3, dtype), np.ones(3, dtype)

    finish = begin(other, np.ones(3), np.ones(3))
    call_during_start(one, x, "return", lambda: setattr(x, "dtype", np.dtype(np.float64)))
    before = hits(one)
    one.all_reduce(y)
    finish()
    assert hits(one) == before and x.tolist() == y.tolist() == [2.0] * 3


def test_a_call_within_the_first_one_of_a_signature_is_not_taken_for_it(pair):
    """As of a trace function, through the method of the class, on the same array."""
    one, other = pair
    x, theirs = np.full(3, 2.0), [np.full(3, 5.0), np.full(3, 5.0)]
    finish = begin(other, theirs[0], op=kos.ReduceOp.MAX), begin(other, theirs[1])

    call_during_start(one, x, "call", lambda: Communicator.all_reduce(one, x, kos.ReduceOp.MAX))
    for each in finish:
        each()
    assert x.tolist() == theirs[1].tolist() == [10.0] * 3
    for _ in range(3):
        x[:], theirs[0][:] = 2, 5
        last = begin(other, theirs[0])
        one.all_reduce(x)
        last()
        assert x.tolist() == theirs[0].tolist() == [7.0] * 3
