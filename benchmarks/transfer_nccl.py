"""Transfers of the same weights by NCCL in torch, between trainers and servers in one process group.

``python -m benchmarks.transfer_nccl JSON`` starts one rank.  It prints the seconds that each of these methods takes:

    shards  Each trainer in turn broadcasts its parts of the tensors to the group.  The servers do not assemble them.
    usual   The trainers gather each tensor, and rank 0 broadcasts it to the group.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from benchmarks.transfer_ranks import tensors


class Weights:
    """A rank's memory for the tensors of a model.  Trainers hold shards, and every rank whole tensors."""

    def __init__(self, model: str, layers: int, trainers: int, device: torch.device) -> None:
        self.rank, self.trainers, self.group = dist.get_rank(), trainers, dist.new_group([*range(trainers)])
        self.whole, self.parts = list[torch.Tensor](), list[tuple[int, list[torch.Tensor]]]()
        for shape, axis in tensors(model, layers).values():
            whole = torch.zeros(shape, dtype=torch.bfloat16, device=device)
            parts = [*whole.view(trainers, -1)] if axis is not None else [whole.view(-1)]
            self.whole.append(whole)
            self.parts.append((axis or 0, parts))

    def fill(self) -> None:
        """The elements of each trainer's parts are its rank + 1; everything else is 0."""
        for _, parts in self.parts:
            for owner, part in enumerate(parts):
                part.fill_((owner + 1) * (self.rank == owner))

    def shards(self) -> None:
        for _, parts in self.parts:
            for owner, part in enumerate(parts):
                dist.broadcast(part, owner)

    def usual(self) -> None:
        for whole, (axis, parts) in zip(self.whole, self.parts, strict=True):
            found = whole
            if self.rank < self.trainers and len(parts) > 1:
                gathered = torch.empty(whole.numel(), dtype=whole.dtype, device=whole.device)
                dist.all_gather_into_tensor(gathered, parts[self.rank], group=self.group)
                found = gathered.view(whole.shape)
                if axis:
                    shape = [len(parts), *whole.shape]
                    shape[1 + axis] //= len(parts)
                    found = gathered.view(shape).movedim(0, axis).reshape(whole.shape)
            dist.broadcast(found, 0)

    def check(self) -> None:
        """On a server: the first and the last element of each tensor are those of the first and the last trainer."""
        if self.rank >= self.trainers:
            for whole, (_, parts) in zip(self.whole, self.parts, strict=True):
                ends = whole.view(-1)[:: max(1, whole.numel() - 1)].tolist()
                assert ends == [1.0, float(len(parts))], f"expected 1 and {len(parts)}, got {ends}"


def main() -> None:
    spec = json.loads(sys.argv[1])
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", spec["rank"]) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpu else "gloo", rank=spec["rank"], world_size=spec["ranks"])
    weights = Weights(spec["model"], spec["layers"], spec["trainers"], device)
    finish = torch.cuda.synchronize if gpu else lambda: None
    nbytes, found = sum(2 * math.prod(each.shape) for each in weights.whole), dict[str, float]()
    ways: dict[str, Callable[[], None]] = {"shards": weights.shards}
    if spec["trainers"] > 1:
        ways["usual"] = weights.usual
    for name, way in ways.items():
        weights.fill()
        way()
        finish()
        weights.check()
        seconds = []
        for _ in range(spec["rounds"]):
            dist.barrier()
            finish()
            began = time.perf_counter()
            way()
            finish()
            seconds.append(time.perf_counter() - began)
        found[name] = statistics.median(seconds)
    print(json.dumps({"torch": torch.__version__, "bytes": nbytes, "seconds": found}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
