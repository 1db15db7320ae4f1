"""A user's program under mypy's strict checks: nothing runs here, mypy reads it (``files`` in pyproject.toml)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, assert_type

import numpy as np

import kos
from kos.comm import Batch
from kos.comm.operation import Operation
from kos.errors import KosError, RankLost
from kos.interop import jax, ray
from kos.interop.flashinfer import CommBackend
from kos.memory.array import Array
from kos.testing import Fault, spawn

Host = np.ndarray[Any, np.dtype[np.float32]]


def calls(comm: kos.Communicator, x: Host, g: Array, operation: Operation) -> None:
    assert_type(comm.all_reduce(x), Host)
    assert_type(comm.all_reduce(g, kos.ReduceOp.MAX, stream=7), Array)
    assert_type(comm.all_reduce(x, kos.PremulSum(0.5), out=x.copy(), timeout=2), Host)
    assert_type(comm.all_reduce(x, async_op=True), kos.Work[Host])
    assert_type(comm.all_reduce(x, async_op=True, deterministic=True).wait(), Host)
    assert_type(comm.reduce(x, root=1), Host | None)
    assert_type(comm.reduce_scatter(x, op=kos.ReduceOp.PRODUCT), Host)
    assert_type(comm.broadcast(x, root=comm.size - 1), Host)
    assert_type(comm.all_gather(g), Array)
    assert_type(comm.all_gather_v(x, [1, 2]), Host)
    assert_type(comm.all_to_all_v(x, [1, 2], (2, 1)), Host)
    assert_type(comm.gather(x), Host | None)
    assert_type(comm.scatter(None, x), Host)
    assert_type(comm.broadcast(x if comm.rank == 0 else None, out=x), Host)
    assert_type(comm.barrier(), None)
    assert_type(comm.barrier(async_op=True), kos.Work[None])
    assert_type(comm.send(x, 1), None)
    assert_type(comm.recv(x, 1, async_op=True), kos.Work[Host])
    assert_type(comm.send_recv(x, g, dst=1, src=1), Array)
    assert_type(comm.all_gather_bytes(b"text"), list[bytes])
    operation.name = "broadcast"  # type: ignore[misc]  # it is frozen
    comm.all_reduce(x, deterministc=True)  # type: ignore[call-overload]
    comm.broadcast(x, deterministic=True)  # type: ignore[call-overload]
    comm.all_reduce_init(x)  # type: ignore[attr-defined]


def overlaps(comm: kos.Communicator, x: Host, later: bool) -> None:
    """Calls whose ``async_op`` is known only at run time."""
    assert_type(comm.all_reduce(x, deterministic=True, async_op=later), Host | kos.Work[Host])
    assert_type(comm.reduce(x, async_op=later), Host | kos.Work[Host | None] | None)
    assert_type(comm.exscan(x, async_op=later), Host | kos.Work[Host | None] | None)
    assert_type(comm.broadcast(x, algorithm="tree", async_op=later), Host | kos.Work[Host])
    assert_type(comm.all_to_all_v(x, [1, 2], async_op=later), Host | kos.Work[Host])
    assert_type(comm.gather_v(x, async_op=later), Host | kos.Work[Host | None] | None)
    assert_type(comm.scatter(x, x, async_op=later), Host | kos.Work[Host])
    assert_type(comm.barrier(async_op=later), kos.Work[None] | None)
    assert_type(comm.send(x, 1, async_op=later), kos.Work[None] | None)
    assert_type(comm.recv(x, 1, async_op=later), Host | kos.Work[Host])
    assert_type(comm.send_recv(x, x, 1, 1, async_op=later, timeout=2.0), Host | kos.Work[Host])


def groups(comm: kos.Communicator) -> Sequence[kos.Communicator]:
    assert_type(comm.split(comm.rank % 2, key=-1), kos.Communicator | None)
    assert_type(comm.split(None), kos.Communicator | None)
    assert_type(comm.split("host"), kos.Communicator)
    assert_type(comm.group(range(2), nccl={"max_ctas": 4}), kos.Communicator | None)
    assert_type(comm.duplicate(), kos.Communicator)
    assert_type(comm.shrink(timeout=9.0), kos.Communicator)
    assert_type(comm.grow(1, timeout=5.0), kos.Communicator)
    assert_type(comm.replace(), kos.Communicator)
    assert_type(kos.join(comm.address), kos.Communicator)
    assert_type(comm.newcomers(), int)
    assert_type(comm.local_ranks, list[int])
    assert_type(comm.rank + comm.size + comm.local_rank + comm.local_size, int)
    comm.split("rack")  # type: ignore[call-overload]
    return comm.grid((2, 2))


def program(x: Host) -> float:
    with kos.init(
        "auto", timeout=30, rendezvous={"rank": 0, "size": 1, "address": "h:1"}, nccl={"min_ctas": 1}
    ) as comm:
        comm.on_failure(lambda error: print(error.ranks))
        assert_type(comm.register(x), Array)
        with comm.batch(async_op=True) as batch:
            assert_type(batch, Batch)
            comm.all_reduce(x)
        batch.wait()
        try:
            comm.synchronize(1.0)
        except RankLost as error:
            assert_type(error.ranks, tuple[int, ...])
        except KosError:
            comm.abort(reason="as a test")
    kos.init(nccl={"max_cta": 8})  # type: ignore[arg-type]
    kos.init(nccl={"max_ctas": "8"})  # type: ignore[arg-type]
    kos.init(backend=7)  # type: ignore[arg-type]
    return float(x.sum())


def of_other_libraries(comm: kos.Communicator, x: Host) -> None:
    jax.all_reduce(comm, {"a": x}, kos.PremulSum(0.5))
    CommBackend(comm).allgather(1)
    assert_type(kos.init(rendezvous=ray.rendezvous("group", 0, 1)), kos.Communicator)


def in_tests() -> list[float | None]:
    def body(comm: kos.Communicator) -> float:
        return float(comm.all_reduce(np.ones(1))[0])

    return spawn(body, 2, faults=[Fault("delay", rank=1, operation=0)])
