"""kos together with plain MPI calls in one mpi4py program, and instead of ``comm.Allreduce``.

kos takes the program's communicator, makes its own duplicate of it and sets no hook of the process: the program starts
and ends MPI.  Messages of MPI and operations of kos may be in flight at once; they never match each other.

mpirun -n 2 python examples/mpi_program.py
"""

import ml_dtypes
import mpi4py.MPI as MPI
import numpy as np

import kos

world = MPI.COMM_WORLD
comm = kos.init(rendezvous=world)

# comm.Allreduce(MPI.IN_PLACE, x)  becomes  comm.all_reduce(x)
x, y = (np.arange(1000, dtype=np.float64) * (world.rank + 1) for _ in range(2))
world.Allreduce(MPI.IN_PLACE, x)
comm.all_reduce(y)
assert np.allclose(x, y, rtol=1e-15)

# world.Allreduce(x, total, op=MPI.MAX)  becomes  comm.all_reduce(x, kos.ReduceOp.MAX, out=total)
total = np.empty_like(x)
comm.all_reduce(x, kos.ReduceOp.MAX, out=total)

# What MPI does not have: bfloat16, added in float32 and rounded once; the same bits whatever the algorithm.
halves = np.full(3, world.rank + 0.5, ml_dtypes.bfloat16)
comm.all_reduce(halves, deterministic=True)

# Messages of MPI in flight around an operation of kos.
right, left = (world.rank + 1) % world.size, (world.rank - 1) % world.size
got = np.empty(1, np.int64)
requests = [world.Isend(np.array([world.rank]), right), world.Irecv(got, left)]
comm.all_reduce(y)
MPI.Request.Waitall(requests)
assert got[0] == left

# A group made by MPI: its ranks, in its order.
pairs = world.Split(world.rank // 2, world.rank)
with kos.init(rendezvous=pairs) as group:
    ranks = group.all_gather(np.array([world.rank])).ravel().tolist()
print(f"rank {world.rank}: group of world ranks {ranks}, sum of halves {halves[0]}", flush=True)
comm.close()
