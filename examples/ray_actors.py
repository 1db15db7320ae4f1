"""kos between Ray actors: through ray.util.collective, and with a separate communicator.

python examples/ray_actors.py
"""

import numpy as np
import ray
from ray.util import collective

import kos
import kos.interop.ray

RANKS = 2


@ray.remote
class Worker:
    def __init__(self, rank):
        self.rank = rank

    def by_ray(self):
        x = np.full(3, self.rank + 1, np.float32)
        collective.allreduce(x, "workers")
        return x.tolist()

    def by_kos(self):
        rendezvous = kos.interop.ray.rendezvous("more workers", self.rank, RANKS)
        with kos.init(rendezvous=rendezvous, process_hooks=False) as comm:
            return comm.backend_name, comm.all_gather(np.array([self.rank])).ravel().tolist()


def main():
    kos.interop.ray.register()  # on the driver, and by the hook in every worker
    ray.init(include_dashboard=False, runtime_env={"worker_process_setup_hook": "kos.interop.ray.register"})
    workers = [Worker.options(num_cpus=0).remote(rank) for rank in range(RANKS)]
    collective.create_collective_group(workers, RANKS, list(range(RANKS)), backend="kos", group_name="workers")
    print("by ray.util.collective:", ray.get([worker.by_ray.remote() for worker in workers]))
    print("by kos:", ray.get([worker.by_kos.remote() for worker in workers]))


if __name__ == "__main__":
    main()
