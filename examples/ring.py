"""An all-reduce written by hand as a ring of messages, compared with the library's own.

Each rank sends to the rank after it and receives from the one before.  First every block of the array goes once round
the ring and is added up on its way; then every finished block goes round again.  Each rank sends 2 (n - 1) / n of the
array's bytes, which is the least possible.  Patarasuk, Yuan, "Bandwidth optimal all-reduce algorithms" (2009).

mpirun -n 3 python examples/ring.py
"""

import numpy as np

import kos


def ring_all_reduce(comm, x):
    """Add up ``x``, whose length is a multiple of the number of ranks, over all ranks, in place."""
    n, rank = comm.size, comm.rank
    after, before = (rank + 1) % n, (rank - 1) % n
    blocks = x.reshape(n, -1)
    received = np.empty_like(blocks[0])
    for step in range(n - 1):  # reduce-scatter: rank r ends with block r + 1 complete
        comm.send_recv(blocks[(rank - step) % n], received, dst=after, src=before)
        blocks[(rank - step - 1) % n] += received
    for step in range(n - 1):  # all-gather of the complete blocks
        comm.send_recv(blocks[(rank + 1 - step) % n], received, dst=after, src=before)
        blocks[(rank - step) % n] = received


def main():
    with kos.init() as comm:
        x = np.arange(12 * comm.size, dtype=np.float32) * (comm.rank + 1)
        expected = comm.all_reduce(x.copy())
        if comm.size > 1:
            ring_all_reduce(comm, x)
        assert (x == expected).all()
        if comm.rank == 0:
            print(f"{comm.size} ranks agree on a sum of {x.sum():,.0f}", flush=True)


if __name__ == "__main__":
    main()
