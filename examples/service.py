"""A service of asyncio: rank 0 has a receive in flight for each of 100 clients, and one thread of the process.

The clients are on the other ranks.  A client has a tag of its own, sends a number, and gets its square.

mpirun -n 3 python examples/service.py
"""

import asyncio

import numpy as np

import kos

CLIENTS, REQUESTS = 100, 3


async def serve(comm, client):
    """Answer all requests of a client, while the others are served too."""
    rank, x = 1 + client % (comm.size - 1), np.empty(1)
    for _ in range(REQUESTS):
        await comm.recv(x, rank, tag=client, async_op=True)
        await comm.send(x * x, rank, tag=client, async_op=True)


async def ask(comm, client):
    answers = np.arange(client, client + REQUESTS, dtype=float)
    for x in np.split(answers, REQUESTS):
        await comm.send(x, 0, tag=client, async_op=True)
        await comm.recv(x, 0, tag=client, async_op=True)
    return answers


async def main(comm):
    mine = [client for client in range(CLIENTS) if comm.rank in (0, 1 + client % (comm.size - 1))]
    found = await asyncio.gather(*((ask if comm.rank else serve)(comm, client) for client in mine))
    assert comm.rank == 0 or np.array_equal(found, np.add.outer(mine, range(REQUESTS)) ** 2)
    print(f"rank {comm.rank}: {len(mine)} clients have their answers", flush=True)


if __name__ == "__main__":
    with kos.init() as comm:
        asyncio.run(main(comm))
