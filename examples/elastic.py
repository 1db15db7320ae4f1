"""Training that loses a rank and continues: the survivors shrink the group, agree on a step, and repeat it.

Every rank holds the weights, so no checkpoint has to be read; a rank that died is not replaced.  KILL=rank:step ends
that rank there, as a failing host would.

for r in 0 1 2; do
    RANK=$r WORLD_SIZE=3 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 KILL=1:4 python examples/elastic.py &
done; wait
"""

import os

import numpy as np

import kos
from kos.errors import CollectiveTimeout, RankLost

STEPS, RATE = 10, 0.5
DOOMED, AT = (int(number) for number in os.environ.get("KILL", "-1:-1").split(":"))


def gradient(weights, step, rank):
    """Towards (1, 2, 3), with noise that differs between steps and ranks."""
    return weights - [1, 2, 3] + np.random.default_rng((step, rank)).normal(scale=0.01, size=3)


def train(comm):
    me, step, weights = comm.rank, 0, np.zeros(3)
    while step < STEPS:
        if (me, step) == (DOOMED, AT):
            os._exit(9)
        try:
            mean = comm.all_reduce(gradient(weights, step, me), kos.ReduceOp.AVG)
        except (RankLost, CollectiveTimeout) as error:
            comm = comm.shrink()
            steps = comm.all_gather(np.array([step])).ravel()  # some ranks may have completed the sum
            step, furthest = int(steps.max()), int(steps.argmax())
            comm.broadcast(weights, furthest)
            print(f"rank {me} continues at step {step} with {comm.size} ranks: {error}", flush=True)
            continue
        weights -= RATE * mean
        step += 1
    print(f"rank {me}: {np.round(weights, 1)} after {step} steps on {comm.size} ranks", flush=True)
    comm.close()


if __name__ == "__main__":
    train(kos.init(timeout=20))
