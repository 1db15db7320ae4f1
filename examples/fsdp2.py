"""FSDP2 of PyTorch over kos: each rank holds a part of the weights, gathered layer by layer when they are needed.

torchrun --nproc-per-node 2 examples/fsdp2.py
"""

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import kos.interop.torch  # noqa: F401 -- makes "kos" a backend of torch.distributed

STEPS, BATCH, WIDTH, LAYERS = 5, 32, 64, 3


def main():
    if "LOCAL_RANK" not in os.environ:
        raise SystemExit("LOCAL_RANK: expected a number, got none; "
                         "start with torchrun --nproc-per-node 2 examples/fsdp2.py")
    local_rank = int(os.environ["LOCAL_RANK"])
    kind = "cuda" if torch.cuda.device_count() > local_rank else "cpu"
    if kind == "cuda":
        torch.cuda.set_device(local_rank)
    dist.init_process_group("kos")
    mesh = init_device_mesh(kind, (dist.get_world_size(),))
    torch.manual_seed(0)
    layers = [torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh()) for _ in range(LAYERS)]
    model = torch.nn.Sequential(*layers).to(kind)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = torch.Generator().manual_seed(1 + dist.get_rank())
    for step in range(STEPS):
        x = torch.randn(BATCH, WIDTH, generator=data).to(kind)
        loss = (model(x) - x.sin()).square().mean()
        loss.backward()  # all-gathers weights, reduce-scatters gradients
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if dist.get_rank() == 0:
            print(f"step {step}: loss {mean.item() / dist.get_world_size():.6f}", flush=True)
    held, whole = (sum(p.numel() for p in parts) for parts in (
        [p.to_local() for p in model.parameters()], model.parameters()
    ))
    print(f"rank {dist.get_rank()} holds {held:,} of {whole:,} weights", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
