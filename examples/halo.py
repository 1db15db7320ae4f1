"""Heat that spreads in a plate: a grid of ranks, each with a block of the plate, exchanges halos on open boundaries.

No rank asks whether it lies at the edge of the plate: its neighbour there is ``kos.NOBODY``, to whom a message does
nothing.  The sum of the heat shows that nothing is lost.

mpirun -n 4 python examples/halo.py
"""

import numpy as np

import kos


def exchange(comm, grid, block):
    """Fill the outermost rows and columns of ``block`` with those of the neighbours; at the edge they stay."""
    for axis in range(2):
        lines = np.moveaxis(block, axis, 0)
        for by, mine, halo in ((1, -2, 0), (-1, 1, -1)):
            source, destination = grid.shift(axis, by)
            received = lines[halo].copy()
            comm.send_recv(lines[mine].copy(), received, dst=destination, src=source)
            lines[halo] = received


def main(steps=100, side=16):
    with kos.init() as comm:
        grid = comm.grid((2, -1) if comm.size % 2 == 0 else (1, -1))
        block = np.zeros((side + 2, side + 2))
        block[1:-1, 1:-1] = comm.rank == 0
        for _ in range(steps):
            block[[0, -1]], block[:, [0, -1]] = block[[1, -2]], block[:, [1, -2]]  # no heat leaves the plate
            exchange(comm, grid, block)
            flow = block[:-2, 1:-1] + block[2:, 1:-1] + block[1:-1, :-2] + block[1:-1, 2:] - 4 * block[1:-1, 1:-1]
            block[1:-1, 1:-1] += flow / 8
        heat = comm.all_gather(np.array([block[1:-1, 1:-1].sum()])).ravel()
        print(f"rank {comm.rank} at {grid.coordinates}: {heat[comm.rank]:.2f} of {heat.sum():.2f}", flush=True)


if __name__ == "__main__":
    main()
