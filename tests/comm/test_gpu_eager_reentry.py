"""What Python runs within a call on a GPU that the compiled core makes; the driver, NCCL and memory are stand-ins."""

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import kos
from kos.comm.communicator import Communicator
from kos.comm.recorder import SLOTS
from tests.comm.gpu_eager import by, call_during_start, known, on_gpu
from tests.comm.ranks import on_each_rank
from tests.comm.shared_ranks import needs_core
from tests.fake_cuda import Stream

pytestmark = [needs_core, pytest.mark.usefixtures("no_looks")]


class Asked(Stream):
    """One that runs a function when it is next asked for its handle."""

    at_ask: Callable[[], Any] | None = None

    def __cuda_stream__(self) -> tuple[int, int]:
        at_ask, self.at_ask = self.at_ask, None
        if at_ask is not None:
            at_ask()
        handle: tuple[int, int] = super().__cuda_stream__()
        return handle


@on_each_rank("gpu_run")
def test_a_stream_that_is_asked_may_have_the_call_forgotten(comm, /):
    stream = Asked(40)
    x = on_gpu(np.ones(4, np.float32), stream)
    known(comm, x)
    stream.at_ask = lambda: setattr(comm, "timeout", 19.0)
    with by(comm, 0):
        comm.all_reduce(x)
    assert stream.at_ask is None


@on_each_rank("gpu_run")
def test_a_call_within_the_record_of_another_is_the_next_one(comm, /):
    """An entry of the recorder is overwritten, and what it has kept ends."""
    x, y, z = (on_gpu(np.zeros(n, np.float32)) for n in (4, 4, 8))
    known(comm, x)
    known(comm, z)
    said = list[str]()
    code = compile("call(y)", "a line", "exec")
    exec(code, {"call": comm.all_reduce, "y": y})

    def at_end(_):
        try:
            comm.all_reduce(z)
            said.append("made")
        except Exception as error:
            said.append(str(error))

    watcher = weakref.ref(code, at_end)
    del code
    for _ in range(SLOTS - 1):
        comm.all_reduce(x)
    assert watcher() is not None
    comm.all_reduce(x)
    assert watcher() is None and said == ["made"]
    last = [entry["collective_seq_id"] for entry in comm.recorder.entries()[-3:]]
    assert last == sorted(last) and len({*last}) == 3


@on_each_rank("gpu_run")
def test_a_call_within_the_first_one_of_a_signature_is_not_taken_for_it(comm, /):
    """As of a profile function, through the method of the class, on the same array."""
    x = on_gpu(np.ones(4, np.int32))
    known(comm, on_gpu(np.ones(8, np.int32)), op=kos.ReduceOp.MAX)

    call_during_start(comm, x, "call", lambda: Communicator.all_reduce(comm, x, kos.ReduceOp.MAX))
    for count in range(3):
        assert x.numpy().tolist() == [2 * 2**count] * 4
        comm.all_reduce(x)
