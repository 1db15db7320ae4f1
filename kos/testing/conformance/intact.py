"""Errors that leave a communicator intact: wrong arguments, and messages that are missing or cancelled."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np

from kos.comm import Communicator, ReduceOp
from kos.errors import CollectiveError, CollectiveTimeout, InvalidArgument
from kos.testing.conformance.values import raises

SHORT = 0.5  # seconds, for calls that must time out
GRACE = 20.0  # seconds that a message may take on a busy machine


def refused(comm: Communicator) -> None:
    """Wrong arguments raise before anything is sent, so that no rank waits and the communicator is intact."""
    x, n = np.ones((4 * comm.size, 4)), comm.size
    wrong: dict[str, Callable[[], Any]] = {
        "x: expected a C-contiguous array": lambda: comm.all_reduce(x[:, ::2]),
        "x: expected one of the dtypes": lambda: comm.all_reduce(np.array(["text"])),
        "root: expected a rank from 0": lambda: comm.broadcast(x, root=n),
        "out: expected dtype float64, got float32": lambda: comm.all_reduce(x, out=x.astype(np.float32)),
        "out: expected": lambda: comm.all_gather(x, np.empty(3)),
        "counts: expected": lambda: comm.all_gather_v(x, [1] * (n + 1)),
        "memory that does not overlap": lambda: comm.all_to_all(x[:n], x[1 : n + 1]),
        "algorithm: expected 'auto'": lambda: comm.all_reduce(x, algorithm="none of them"),
        "timeout: expected a positive number": lambda: comm.all_reduce(x, timeout=0),
        "expected": lambda: comm.all_reduce(np.ones(3, np.int32), ReduceOp.AVG),
        "dst: expected": lambda: comm.send(x, comm.rank),
    }
    for text, call in wrong.items():
        with raises(InvalidArgument, text):
            call()
    comm.barrier()
    assert (comm.all_reduce(np.ones(3)) == n).all()


def refused_sizes(comm: Communicator) -> None:
    """Where sizes travel, one that is wrong on one rank raises on every rank, and the communicator is intact."""
    n, last = comm.size, comm.size - 1
    odd, total = comm.rank == last, n * (n + 1) // 2
    x: Any = np.ones(comm.rank + 1)
    whole: Any = np.ones(total)
    wrong: dict[str, Callable[[], Any]] = {
        f"out: expected {total} elements on rank {last}, got {total + 1}": lambda: comm.all_gather_v(
            x, out=np.empty(total + odd)),
        f"out: expected {total} elements on rank {last}, got {total + 2}": lambda: comm.gather_v(
            x, root=last, out=np.empty(total + 2) if odd else None),
        f"out: expected {n} elements on rank {last}, got {n + 1}": lambda: comm.all_to_all_v(
            np.ones(n), [1] * n, out=np.empty(n + odd)),
        f"x: expected {total} elements on rank {last}, got {total + 1}": lambda: comm.scatter_v(
            np.ones(total + 1) if odd else None, None, x.copy(), last),
        f"x: expected {total} elements on rank {last}, got {total + 2}": lambda: comm.reduce_scatter_v(
            np.ones(total + 2 * odd), out=np.empty(comm.rank + 1)),
        f"out: expected memory that does not overlap x, .* on rank {last}": lambda: comm.all_gather_v(
            whole[: x.size] if odd else x, out=whole),
    }  # fmt: skip
    for text, call in wrong.items():
        with raises(InvalidArgument, text):
            call()
    with raises(InvalidArgument, "counts: expected numbers in a batch"), comm.batch():
        comm.all_gather_v(x)
    with raises(InvalidArgument, "recv_counts: expected numbers in a batch, got None"), comm.batch():
        comm.all_to_all_v(np.ones(n), [1] * n)
    assert (comm.all_gather_v(x) == np.ones(total)).all()


def messages(comm: Communicator) -> None:
    """A message that is missing breaks nothing."""
    x, expired, (left, right) = np.zeros(3), np.zeros(3), ((comm.rank + step) % comm.size for step in (-1, 1))
    with raises(CollectiveTimeout, f"rank {left}"):
        comm.recv(expired, left, tag=9, timeout=0.1)
    comm.barrier()
    comm.send_recv(np.ones(3), x, right, left, tag=9, timeout=GRACE)
    assert (x == 1).all() and not expired.any(), "a receive that timed out took a later message"


def cancelled(comm: Communicator) -> None:
    """Data written to an array after its send timed out is not received: the receiver gets the message, or raises.

    The receiver calls after the timeout, or calls before it and stops during the message, as a rank that computes.
    """
    for begun in (False, True):
        pair = comm.split(0 if comm.rank < 2 else None)
        x, y = np.ones(1 << 21), np.zeros(1 << 21)
        send = pair.send(x, 1, async_op=True) if pair is not None and comm.rank == 0 else None
        receive = pair.recv(y, 0, async_op=True) if pair is not None and begun and comm.rank == 1 else None
        for _ in range(2):
            comm.barrier()  # moves the messages of others too
        if send is not None:
            with suppress(CollectiveTimeout):  # some backends copy what they send
                send.wait(SHORT)
            x[:] = 2
        comm.rendezvous.allgather(b"")  # moves no message
        if pair is not None and comm.rank == 1:
            with suppress(CollectiveError):
                (receive or pair.recv(y, 0, async_op=True)).wait(SHORT)
                assert (y == 1).all(), "what was written after the send timed out was received"
        if pair is not None:
            pair.abort()  # on rank 0 at once: what a connection has begun to send is sent
        comm.barrier()
