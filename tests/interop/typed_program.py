# mypy: disallow-untyped-defs, disallow-incomplete-defs, disallow-untyped-calls, disallow-any-generics
# mypy: disallow-subclassing-any, warn-return-any, extra-checks, strict-equality, warn-unused-ignores
"""A user's program under the flags of ``mypy --strict``: mypy reads it, nothing runs here (see pyproject.toml)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

import kos
from kos.errors import InvalidArgument, KosError, RankLost
from kos.interop.flashinfer import CommBackend
from kos.interop.jax import all_reduce
from kos.interop.ray import rendezvous
from kos.testing import Fault, spawn


def mean(comm: kos.Communicator, x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    total = comm.all_reduce(x, kos.ReduceOp.AVG, deterministic=True)
    work = comm.all_reduce(x, async_op=True)
    same: npt.NDArray[np.float32] = work.wait()
    rows = comm.all_gather(x)
    part = comm.reduce_scatter(x, op=kos.ReduceOp.MAX)
    plan = comm.all_reduce_init(x)
    plan.start().wait()
    names: list[bytes] = comm.all_gather_bytes(b"name")
    group = comm.split(comm.rank % 2)
    if group is not None:
        group.barrier()
        group.close()
    with comm.batch() as batch:
        comm.send_recv(x, same, 0, 0)
    batch.wait()
    everywhere = all_reduce(comm, {"a": x}, kos.PremulSum(0.5))
    print(everywhere, rows.shape, part.dtype, names, comm.timeout, comm.explain())
    return total


def main() -> None:
    try:
        with kos.init("auto", timeout=30.0) as comm:
            mean(comm, np.ones(3, np.float32))
            CommBackend(comm).allgather(1)
    except (RankLost, InvalidArgument, KosError) as error:
        print(error.ranks)
    spawn(lambda comm: mean(comm, np.ones(3, np.float32)), 2, faults=[Fault("crash", rank=1)])
    kos.init(rendezvous=rendezvous("group", 0, 1))


if __name__ == "__main__":
    main()
