"""What types the calls of a communicator have: nothing runs here, mypy reads it (``files`` in pyproject.toml)."""

from __future__ import annotations

from typing import Any, assert_type

import numpy as np

import kos
from kos.comm import Persistent
from kos.comm.operation import Operation
from kos.memory.array import Array

Host = np.ndarray[Any, np.dtype[np.float32]]


def calls(comm: kos.Communicator, x: Host, g: Array, operation: Operation) -> None:
    assert_type(comm.all_reduce(x), Host)
    assert_type(comm.all_reduce(g, kos.ReduceOp.MAX, stream=7), Array)
    assert_type(comm.all_reduce(x, async_op=True), kos.Work[Host])
    assert_type(comm.all_reduce(x, async_op=True, deterministic=True).wait(), Host)
    assert_type(comm.reduce(x, root=1), Host | None)
    assert_type(comm.all_gather(g), Array)
    assert_type(comm.barrier(), None)
    assert_type(comm.barrier(async_op=True), kos.Work[None])
    assert_type(comm.send(x, 1), None)
    assert_type(comm.recv(x, 1, async_op=True), kos.Work[Host])
    assert_type(comm.all_reduce_init(x), Persistent[Host])
    assert_type(comm.all_reduce_init(x).start().wait(), Host)
    operation.name = "broadcast"  # type: ignore[misc]  # it is frozen
    comm.all_reduce(x, deterministc=True)  # type: ignore[call-overload]
    comm.broadcast(x, deterministic=True)  # type: ignore[call-overload]
