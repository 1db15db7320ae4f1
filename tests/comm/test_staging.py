"""Arrays on a GPU over backends for host memory, without a GPU: in which order operations begin."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import kos
from kos.comm.host import staging
from kos.memory.array import Array
from kos.testing import spawn
from tests.comm.fake_nccl import no_gpu
from tests.comm.shared_ranks import run

NOT_READY = 600
SIZE = 3


class Copies(threading.local):
    """Those of this rank, whose events are numbered; each is over after so many looks."""

    def __init__(self) -> None:
        self.looks: list[int] = []  # how many each still takes
        self.takes = 0


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[Copies]:
    copies = Copies()

    def create(flags: int) -> tuple[int, int]:
        copies.looks.append(copies.takes)
        return 0, len(copies.looks) - 1

    def query(event: int) -> tuple[int]:
        copies.looks[event] -= 1
        return (NOT_READY if copies.looks[event] >= 0 else 0,)

    with no_gpu(monkeypatch):
        cu = dict(vars(staging.driver.cu), cuEventCreate=create, cuEventQuery=query)
        monkeypatch.setattr(staging, "cu", SimpleNamespace(**cu))
        monkeypatch.setattr(staging, "pinned_empty", lambda count, dtype, device: np.empty(count, dtype))
        yield copies


def gpu(value: float, count: int = 1000) -> Array:
    return Array.from_numpy(np.full(count, value, np.float32), 0)


def test_collectives_begin_in_the_order_of_their_calls(copies: Copies) -> None:
    """However long copies take, here and elsewhere."""

    def body(comm: kos.Communicator) -> None:
        for turn in range(20):
            copies.takes = comm.rank * turn
            x, y, z, host = gpu(1), gpu(2, 500), gpu(3), np.full(700, 4.0)
            works = [comm.all_reduce(x, async_op=True)]
            copies.takes = 3 - comm.rank
            works.append(comm.all_reduce(y, async_op=True))
            works.append(comm.all_reduce(host, async_op=True))
            works.append(comm.broadcast(z, async_op=True))
            for work in works:
                work.wait()
            assert (x.numpy() == SIZE).all() and (y.numpy() == 2 * SIZE).all()
            assert (host == 4 * SIZE).all() and (z.numpy() == 3).all()

    run(body, SIZE)


def test_messages_go_in_the_order_of_their_calls(copies: Copies) -> None:
    def body(comm: kos.Communicator) -> None:
        right, left = (comm.rank + 1) % SIZE, (comm.rank - 1) % SIZE
        copies.takes = 5
        sends: list[Any] = [comm.send(gpu(1), right, async_op=True)]
        copies.takes = 0
        sends += [comm.send(x, right, async_op=True) for x in (gpu(2), np.full(1000, 3, np.float32))]
        for value in (1, 2, 3):
            x = np.zeros(1000, np.float32)
            assert (comm.recv(x, left) == value).all()
        for work in sends:
            work.wait()

    spawn(body, SIZE)


def test_what_is_given_up_keeps_nobody(copies: Copies) -> None:
    def body(comm: kos.Communicator) -> None:
        copies.takes = 1 << 60
        work = comm.send(gpu(1), 0, async_op=True) if comm.rank else None
        if work is not None:
            with pytest.raises(kos.errors.CollectiveTimeout):
                work.wait(0.05)
        copies.takes = 1
        with pytest.raises(kos.errors.CollectiveTimeout, match="send #0"):  # on both: it ended the communicator
            comm.all_reduce(gpu(1))

    spawn(body, 2)
