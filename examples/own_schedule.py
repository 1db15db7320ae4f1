"""An algorithm of your own for all_reduce: verified, simulated on GPUs that this machine need not have, then run.

Neighbours share a host, so each odd rank first adds to the even rank before it.  The even ranks send to rank 0, which
sends the sum back; the odd ranks get it last.  "A schedule of your own" in docs/how-it-works/schedules.md explains
``Moves``.

mpirun -n 4 python examples/own_schedule.py
"""

import numpy as np

import kos
from kos.comm.schedules import ScheduleError, build
from kos.comm.schedules.registry import algorithm
from kos.comm.schedules.schedule import Moves
from kos.comm.schedules.simulate import simulate, topology
from kos.comm.schedules.verify import verify


@algorithm("all_reduce", "pairs")
def pairs(n, c):
    odd, others = np.arange(1, n, 2), np.arange(2, n, 2)
    yield [Moves(odd, odd - 1, 0, count=c, reduce=True)]
    for rank in others:
        yield [Moves(rank, 0, 0, count=c, reduce=True)]
    yield [Moves(0, others, 0, count=c)]
    yield [Moves(odd - 1, odd, 0, count=c)]


@algorithm("all_reduce", "hasty")
def hasty(n, c):
    """Wrong: the odd ranks never get the sum."""
    yield from list(pairs(n, c))[:-1]


def main():
    for ranks in range(1, 33):
        verify(build("all_reduce", "pairs", ranks))
    try:
        verify(build("all_reduce", "hasty", 4))
    except ScheduleError as error:
        refused = str(error)
    with kos.init() as comm:
        x = comm.all_reduce(np.full(5, comm.rank + 1.0), algorithm="pairs")
        assert (x == comm.size * (comm.size + 1) / 2).all()
        if comm.rank == 0:
            print("refused:", refused)
            for name in ("pairs", "ring", "halving_doubling"):
                schedule = build("all_reduce", name, 16)
                times = (1e6 * simulate(schedule, topology("h200-cluster"), nbytes) for nbytes in (1 << 10, 1 << 24))
                print("{}: 1 KB in {:.0f} us, 16 MB in {:.0f} us on 16 GPUs, predicted".format(name, *times))


if __name__ == "__main__":
    main()
