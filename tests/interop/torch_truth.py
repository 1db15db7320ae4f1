"""Programs of torch on ranks of kos.testing.torch, beside torchrun and gloo: ``python -m tests.interop.torch_truth``.

Writes tests/interop/torch_truth.json: for each program, whether it gives the same bits on ranks of ``spawn`` as on
processes of torchrun over kos, and as over gloo, and that ``spawn`` finds no mistake in it.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import kos.interop.torch  # noqa: F401 -- registers the backend
from kos.testing.torch import spawn
from tests.interop import torch_compiled_programs as compiled
from tests.interop import torch_model_programs as models
from tests.interop import torch_programs

RESULT = Path(__file__).with_suffix(".json")


def fsdp2(reshard: bool) -> list[float]:
    """FSDP2 with or without the parameters freed after the forward pass."""
    torch.manual_seed(0)
    parts = [torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 32), torch.nn.GELU(), torch.nn.Linear(32, 4)]
    model = torch.nn.Sequential(*parts)
    for layer in model:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, reshard_after_forward=reshard)
    return models.train(fully_shard(model, reshard_after_forward=reshard), "cpu")


def dtensor() -> list[Any]:
    """Redistributions between shards, partial sums and copies; a matmul of shards."""
    size = dist.get_world_size()
    mesh = dist.device_mesh.init_device_mesh("cpu", (size,))
    whole = torch.arange(4.0 * size * size).reshape(2 * size, 2 * size)
    rows = distribute_tensor(whole, mesh, [Shard(0)])
    columns = rows.redistribute(placements=[Shard(1)])
    summed = DTensor.from_local(whole * (dist.get_rank() + 1), mesh, [Partial()]).redistribute(placements=[Replicate()])
    return [columns.to_local().tolist(), summed.to_local().tolist(), (rows @ columns).full_tensor().tolist()]


def objects() -> list[Any]:
    """Collectives of objects."""
    rank, size = dist.get_rank(), dist.get_world_size()
    everyone, sent, mine = [None] * size, [{"from": rank}, "text"], [None]
    dist.all_gather_object(everyone, {"rank": rank, "list": list(range(rank))})
    dist.broadcast_object_list(sent, src=size - 1)
    dist.scatter_object_list(mine, [(r, str(r)) for r in range(size)], src=0)
    gathered = [None] * size if rank == 1 else None
    dist.gather_object(rank, gathered, dst=1)
    return [everyone, sent, mine, gathered]


def functionals() -> list[Any]:
    """Functional collectives."""
    group, size, x = dist.group.WORLD, dist.get_world_size(), torch.arange(16.0) + dist.get_rank()
    found = [functional.all_reduce(x, "sum", group), functional.all_gather_tensor(x, 0, group)]
    found += [functional.reduce_scatter_tensor(x, "avg", 0, group), functional.broadcast(x, size - 1, group)]
    return [each.tolist() for each in [*found, functional.all_to_all_single(x, None, None, group)]]


def checkpoint() -> list[Any]:
    """torch.distributed.checkpoint of FSDP2."""
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    return models.checkpoint(folder[0])


def compiling(name: str) -> Callable[[], Any]:
    return lambda: getattr(compiled, name)("cpu", "aot_eager")


PROGRAMS: dict[str, tuple[int, Callable[[], Any]]] = {
    "DDP": (8, models.ddp),
    "DDP, with hooks": (2, models.ddp_hooks),
    "Join": (2, models.ddp_join),
    "FSDP 1": (8, models.fsdp1),
    "FSDP2": (8, lambda: fsdp2(True)),
    "FSDP2, reshard_after_forward=False": (8, lambda: fsdp2(False)),
    "DTensor": (8, dtensor),
    "tensor parallel": (8, models.tensor_parallel),
    "pipelining, 1F1B": (2, models.pipeline),
    "functional collectives": (8, functionals),
    "torch.distributed.checkpoint": (8, checkpoint),
    "collectives of objects": (8, objects),
    "collectives of torch.distributed": (2, torch_programs.collectives),
    "messages": (2, torch_programs.messages),
    "messages from any rank": (2, torch_programs.any_source),
    "compiled: DDP": (2, compiling("ddp_inside")),
    "compiled: the model in DDP": (2, compiling("ddp_outside")),
    "compiled: FSDP2": (2, compiling("fsdp_inside")),
    "compiled: blocks of FSDP2": (2, compiling("fsdp_outside")),
    "compiled: tensor parallel": (2, compiling("tensor_parallel")),
    "compiled: gradients of functional collectives": (2, compiling("gradients_of_functional")),
}
"""By name: the number of ranks, and the function."""


def bits(call: Callable[[], Any]) -> str:
    """The result of a program on every rank, exactly, as a text; the same on every rank."""
    value = call()
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, value)
    return json.dumps(every)


def under_torchrun(size: int) -> dict[str, str]:
    """The results of the programs of that size over kos, by torchrun."""
    with tempfile.TemporaryDirectory() as folder:
        run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
        command = [*run, "-m", "tests.interop.torch_truth", f"{folder}/found"]
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=550)
        return json.loads(Path(folder, "found").read_text())


def main() -> None:
    if len(sys.argv) > 1:  # a rank of torchrun
        dist.init_process_group("kos")
        found = {name: bits(call) for name, (size, call) in PROGRAMS.items() if size == dist.get_world_size()}
        if dist.get_rank() == 0:
            Path(sys.argv[1]).write_text(json.dumps(found))
        dist.destroy_process_group()
        return
    launched = {name: text for size in (2, 8) for name, text in under_torchrun(size).items()}
    rows = {}
    for name, (size, call) in PROGRAMS.items():
        ours = spawn(lambda call=call: bits(call), size, 300)[0]
        gloo = spawn(lambda call=call: bits(call), size, 300, backend="gloo")[0]
        rows[name] = {"ranks": size, "as torchrun over kos": ours == launched[name], "as gloo": ours == gloo}
        print(name, rows[name], flush=True)
    RESULT.write_text(json.dumps({"torch": torch.__version__, "programs": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
