"""Programs that train with DDP, FSDP, DTensor and pipelines of torch, and return the losses of a few steps."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

import kos.interop.torch


def _model(device: str) -> torch.nn.Sequential:
    torch.manual_seed(0)
    parts = [torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 32), torch.nn.GELU(), torch.nn.Linear(32, 4)]
    return torch.nn.Sequential(*parts).to(device)


def _batches(rank: int, steps: int, device: str) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(7 + rank)
    for _ in range(steps):
        x, y = torch.randn(8, 16, generator=generator), torch.randn(8, 4, generator=generator)
        yield x.to(device), y.to(device)


def train(model: torch.nn.Module, device: str, rank: int | None = None, steps: int = 4) -> list[float]:
    """The losses of a few steps on the batches of ``rank``, None: this one."""
    # Without foreach, torch's default on GPUs, which does not accept tensors together with DTensors.
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False), []
    for x, y in _batches(dist.get_rank() if rank is None else rank, steps, device):
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def device_of_rank(kind: str) -> str:
    if kind == "cpu":
        return kind
    torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    return f"cuda:{torch.cuda.current_device()}"


def ddp(kind: str = "cpu", **options: Any) -> list[float]:
    """DistributedDataParallel, with several buckets."""
    device = device_of_rank(kind)
    ids = None if kind == "cpu" else [torch.cuda.current_device()]
    wrapped = torch.nn.parallel.DistributedDataParallel(_model(device), ids, bucket_cap_mb=0.003, **options)
    return train(wrapped, device)


def compressed(name: str, kind: str = "cpu", steps: int = 100) -> list[float]:
    """DistributedDataParallel whose gradients are compressed; ``name`` may be "none"."""
    device = device_of_rank(kind)
    ids = None if kind == "cpu" else [torch.cuda.current_device()]
    wrapped = torch.nn.parallel.DistributedDataParallel(_model(device), ids, bucket_cap_mb=0.003)
    registered = None if name == "none" else kos.interop.torch.compress(wrapped, name)
    losses = train(wrapped, device, steps=steps)
    for parameter in wrapped.parameters():
        everywhere = [torch.empty_like(parameter) for _ in range(dist.get_world_size())]
        dist.all_gather(everywhere, parameter.detach())
        assert all(torch.equal(each, parameter) for each in everywhere), "ranks differ"
    if registered is not None:
        kept = {index: each.clone() for index, each in registered.state_dict().items()}
        assert len(kept) == len([*wrapped.parameters()]) and all(each.abs().max() > 0 for each in kept.values())
        registered.close()
        _resumed(wrapped.module, kept, name, device)
    return losses


def _resumed(model: torch.nn.Module, kept: dict[str, torch.Tensor], name: str, device: str) -> None:
    """A new DDP of the model, as after a restart: without gradients it sends the residuals that were kept."""
    wrapped = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.003)
    registered = kos.interop.torch.compress(wrapped, name)
    registered.load_state_dict({number: each.cpu() for number, each in kept.items()})
    sent = [torch.zeros_like(each) for each in wrapped.parameters()]
    for _ in range(3):  # buckets are made anew after the first
        (wrapped(torch.zeros(2, 16, device=device)) * 0).sum().backward()
        for total, parameter in zip(sent, wrapped.parameters(), strict=True):
            assert parameter.grad is not None
            total += parameter.grad
            parameter.grad = None
    left = registered.state_dict()
    for number, total in enumerate(sent):
        gone = kept[str(number)] - left[str(number)].to(kept[str(number)])
        dist.all_reduce(gone)
        error = (total.flatten() - gone / dist.get_world_size()).abs().max()
        assert error <= 0.2 * max(each.abs().max() for each in kept.values()), (number, error)
        assert total.abs().max() > 0
    registered.close()


def ddp_join(kind: str = "cpu") -> list[list[float]]:
    """DistributedDataParallel with fewer batches on rank 0, and with parameters that rank 0 does not use."""
    device, rank = device_of_rank(kind), dist.get_rank()
    found = []
    for divide_by_all, unused in ((False, False), (True, False), (True, True)):
        model = torch.nn.ModuleList([torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False)]).to(device)
        for layer in model:
            torch.nn.init.constant_(layer.weight, 0.5)
        model.forward = lambda x, model=model, both=rank or not unused: model[0](model[1](x) if both else x)
        wrapped = torch.nn.parallel.DistributedDataParallel(model, find_unused_parameters=unused)
        gradients = []
        with wrapped.join(divide_by_initial_world_size=divide_by_all):
            for _ in range(3 + 2 * rank):
                wrapped(torch.full((2, 4), rank + 1.0, device=device)).sum().backward()
                gradients.append(sum(x.grad.double().sum().item() for x in model.parameters() if x.grad is not None))
                wrapped.zero_grad()
        found.append(gradients)
    return found


def fsdp1(kind: str = "cpu") -> list[float]:
    """The first FullyShardedDataParallel."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    device = device_of_rank(kind)
    return train(FullyShardedDataParallel(_model(device), device_id=torch.device(device)), device)


def ddp_hooks() -> list[list[float]]:
    """DistributedDataParallel with the communication hooks that chain futures."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    found = []
    for hook in (default_hooks.fp16_compress_hook, default_hooks.allreduce_hook):
        wrapped = torch.nn.parallel.DistributedDataParallel(_model("cpu"), bucket_cap_mb=0.003)
        wrapped.register_comm_hook(None, hook)
        found.append(train(wrapped, "cpu"))
    wrapped = torch.nn.parallel.DistributedDataParallel(_model("cpu"))
    state = powerSGD_hook.PowerSGDState(dist.group.WORLD, matrix_approximation_rank=2, start_powerSGD_iter=2)
    wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return [*found, train(wrapped, "cpu")]


def fsdp(kind: str = "cpu") -> list[float]:
    """FSDP2: each layer sharded over all ranks."""
    from torch.distributed.fsdp import fully_shard

    device, size = device_of_rank(kind), dist.get_world_size()
    mesh, model = dist.device_mesh.init_device_mesh(kind, (size,)), _model(device)
    for layer in model:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mesh=mesh)
    return train(fully_shard(model, mesh=mesh), device)


def tensor_parallel(kind: str = "cpu") -> list[float]:
    """DTensor: a layer split by columns, the next by rows."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    device, size = device_of_rank(kind), dist.get_world_size()
    mesh = dist.device_mesh.init_device_mesh(kind, (size,))
    model = parallelize_module(_model(device), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return train(model, device, rank=0)


def checkpoint(folder: str) -> list[list[float]]:
    """A sharded model is saved by torch.distributed.checkpoint, and continues in another."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
    from torch.distributed.fsdp import fully_shard

    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    first, second = fully_shard(_model("cpu"), mesh=mesh), fully_shard(_model("cpu"), mesh=mesh)
    train(first, "cpu")
    dcp.save(get_model_state_dict(first), checkpoint_id=folder)
    state = get_model_state_dict(second)
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(second, state)
    return [train(first, "cpu"), train(second, "cpu")]


def pipeline() -> list[float]:
    """torch.distributed.pipelining: two stages, 1F1B over four micro-batches; the losses of the last stage."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank, model = dist.get_rank(), _model("cpu")
    part = model[:2] if rank == 0 else model[2:]
    stage = PipelineStage(part, rank, dist.get_world_size(), torch.device("cpu"))
    schedule = Schedule1F1B(stage, 4, loss_fn=torch.nn.functional.mse_loss)
    optimizer, found = torch.optim.AdamW(part.parameters(), lr=1e-2), []
    for x, y in _batches(0, 3, "cpu"):
        losses: list[torch.Tensor] = []
        schedule.step(*([x] if rank == 0 else []), target=y if rank else None, losses=losses)
        optimizer.step()
        optimizer.zero_grad()
        found += [loss.item() for loss in losses]
    return found
