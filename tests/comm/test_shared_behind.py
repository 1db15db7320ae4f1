"""At a timeout in the middle of a collective: the ranks that are waited for, not those that had nothing to do."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import kos
from kos.comm.host.shared.segment import BLOCK_BYTES
from kos.errors import CollectiveTimeout
from tests.comm.shared_ranks import TIMEOUT, run

COUNT = 6 * BLOCK_BYTES  # bytes: more stages than there are slots
CALLS: dict[str, tuple[int, Callable[[kos.Communicator, Any], Any]]] = {  # and a rank that waits for rank 1 itself
    "broadcast": (0, lambda c, o: c.broadcast(x(), 0, **o)),
    "gather": (2, lambda c, o: c.gather(x(), 2, **o)),
    "scatter": (0, lambda c, o: c.scatter(x(3) if c.rank == 0 else None, x(), **o)),
    "all_reduce": (0, lambda c, o: c.all_reduce(x(), kos.ReduceOp.MAX, **o)),
    "all_gather": (2, lambda c, o: c.all_gather(x(), **o)),
}


def x(parts: int = 1) -> np.ndarray:
    return np.zeros(parts * COUNT, np.uint8)


@pytest.mark.parametrize(("name", "direct"), [*((name, False) for name in CALLS), ("all_gather", True)])
def test_only_those_that_are_waited_for_are_named(name: str, direct: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for limit in ("DIRECT_BYTES", "NEAR_BYTES", "CROWDED_BYTES"):
        monkeypatch.setattr(f"kos.comm.host.shared.direct.{limit}", 0 if direct else 1 << 40)
    begun, over = threading.Event(), threading.Event()
    impatient, call = CALLS[name]

    def body(comm: kos.Communicator) -> str:
        comm.barrier()
        if comm.rank == 1:  # takes its first steps and no more
            call(comm, {"async_op": True})
            begun.set()
            over.wait(20)
            comm.abort()
            return ""
        assert begun.wait(20)
        work, until = call(comm, {"async_op": True}), time.monotonic() + 20
        while comm.rank == impatient and comm.backend._shared.behind() != [1]:
            assert time.monotonic() < until and not work.done()
        with pytest.raises(CollectiveTimeout) as caught:
            work.wait(0.3 if comm.rank == impatient else TIMEOUT)
        over.set()
        comm.abort()
        return str(caught.value)

    first, _, last = run(body, 3)
    assert first.endswith("not complete after 0.3 s; every rank arrived, ranks [1] went no further")
    assert last == first, "all hear of the first failure"
