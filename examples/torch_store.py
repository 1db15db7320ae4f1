"""A job of torch whose Store is that of kos: no port of its own, and a lost rank ends its waits at once.

mpirun -n 2 python examples/torch_store.py
"""

import torch
import torch.distributed as dist

import kos
from kos.interop.torch import Store

if __name__ == "__main__":
    with kos.init() as comm:
        dist.init_process_group("gloo", store=Store(comm), rank=comm.rank, world_size=comm.size)
        x = torch.full((4,), comm.rank + 1.0)
        dist.all_reduce(x)
        assert x.tolist() == [comm.size * (comm.size + 1) / 2] * 4
        dist.destroy_process_group()
        comm.barrier()
        print(f"rank {comm.rank}: gloo met through a store of {len(comm.store)} keys", flush=True)
