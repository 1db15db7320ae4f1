"""DistributedDataParallel of PyTorch, with its gradients summed by kos: on GPUs if each rank has one, else on CPUs.

torchrun --nproc-per-node 2 examples/ddp.py
"""

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import kos.interop.torch  # noqa: F401 -- makes "kos" a backend of torch.distributed

STEPS, BATCH, WIDTH = 5, 32, 64


def main():
    if "LOCAL_RANK" not in os.environ:
        raise SystemExit("LOCAL_RANK: expected a number, got none; "
                         "start with torchrun --nproc-per-node 2 examples/ddp.py")
    local_rank = int(os.environ["LOCAL_RANK"])
    on_gpu = torch.cuda.device_count() > local_rank
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("kos")
    torch.manual_seed(0)  # the same weights on all ranks; DDP would send those of rank 0
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, WIDTH))
    model = DistributedDataParallel(model.to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(1 + dist.get_rank())  # each rank has its own
    for step in range(STEPS):
        x = torch.randn(BATCH, WIDTH, generator=data).to(device)
        loss = (model(x) - x.sin()).square().mean()
        loss.backward()  # DDP reduces a bucket of gradients as soon as it is complete
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if dist.get_rank() == 0:
            print(f"step {step}: loss {mean.item() / dist.get_world_size():.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
