"""The smallest program: every rank holds the sum.  mpirun -n 2 python examples/all_reduce.py"""

import numpy as np

import kos

with kos.init() as comm:
    x = np.full(4, comm.rank + 1, np.float32)
    comm.all_reduce(x)
    print(f"rank {comm.rank} of {comm.size} on {comm.backend_name}: {x}", flush=True)
