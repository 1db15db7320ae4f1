"""Compressed gradients for torch's DistributedDataParallel, with error feedback, by a communication hook."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

import kos
from kos.comm.compression import CARRIED, check_compress, shards
from kos.errors import InvalidArgument

Tensor: TypeAlias = torch.Tensor


class Compression:
    """What ``compress`` has registered: the communicator, and what each parameter's gradient has lost so far."""

    def __init__(self, comm: kos.Communicator, compress: str, parameters: Sequence[Tensor]) -> None:
        self.comm, self._compress = comm, compress
        self._numbers = {id(each): number for number, each in enumerate(parameters)}
        self._side = torch.cuda.Stream(parameters[0].device) if parameters[0].is_cuda else None
        self._buckets: dict[int, tuple[list[int], Tensor]] = {}  # the parameters in a bucket, and its residual
        self._residuals: dict[int, Tensor] = {}  # of each parameter: a part of a bucket's

    def close(self) -> None:
        """Close the communicator.  Collective; afterwards the model must not run backward again."""
        self.comm.close()

    def state_dict(self) -> dict[str, Tensor]:
        """The residuals of this rank, by the number of the parameter among those with a gradient, for a checkpoint.

        They are views: copy them before the next step.
        """
        return {str(number): residual for number, residual in self._residuals.items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Go on with the residuals of ``state_dict``, also of another process, in whichever buckets DDP has."""
        self._residuals = {int(number): residual.flatten() for number, residual in state.items()}
        self._buckets = {}

    def average(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """The average of a bucket over all ranks: what DDP asks its hook for."""
        x = bucket.buffer()
        residual = self._residual(bucket, x)
        if self._side is None:
            self._reduce(x, residual, None)
            done: torch.futures.Future[Tensor] = torch.futures.Future()
            done.set_result(x)
            return done
        self._side.wait_stream(torch.cuda.current_stream(x.device))
        with torch.cuda.stream(self._side):
            self._reduce(x, residual, self._side)
            x.record_stream(self._side)
            done = torch.futures.Future(devices=[x.device])
            done.set_result(x)
        return done

    def _reduce(self, x: Tensor, residual: Tensor, stream: Any) -> None:
        exact = self.comm.exact_group_size(x.device.index if x.is_cuda else None)
        counts, place = shards(x.numel(), exact), self.comm.rank % exact
        own = residual[sum(counts[:place]) :][: counts[place]]
        self.comm.all_reduce(x, kos.ReduceOp.AVG, compress=self._compress, residual=own, stream=stream)

    def _residual(self, bucket: Any, x: Tensor) -> Tensor:
        """That of a bucket, of those of its parameters, which DDP distributes anew after the first step."""
        parameters = bucket.parameters()
        numbers = [self._numbers[id(each)] for each in parameters]
        known, residual = self._buckets.get(bucket.index(), ([], x))
        if known != numbers or residual.numel() != x.numel():
            residual, start = torch.zeros_like(x), 0
            for number, each in zip(numbers, parameters, strict=True):
                part = residual[start : start + each.numel()]
                if (kept := self._residuals.get(number)) is not None and kept.numel() == part.numel():
                    part.copy_(kept)
                self._residuals[number], start = part, start + each.numel()
            self._buckets[bucket.index()] = numbers, residual
        return residual


def compress(model: Any, compress: str) -> Compression:
    """Let DDP average the gradients of ``model`` compressed to "fp8", "int8" or "int4", with error feedback.

    ``model`` is a DistributedDataParallel, over a process group of kos or of any other backend.  A communicator of kos
    among its ranks moves the gradients; all other communication is as before.  On a GPU, the hook overlaps the backward
    pass; on a CPU, the backward pass waits for it.  In the first step after ``load_state_dict``, DDP has other buckets:
    unless each parameter has a multiple of 64 elements, the bits of that step differ from those of an uninterrupted
    run.  Collective.  Raises InvalidArgument for another model, format, or dtype of parameters.

        model = DistributedDataParallel(model)
        compression = kos.interop.torch.compress(model, "int8")
        ...
        compression.close()
    """
    name = check_compress(compress)
    if not name:
        raise InvalidArgument("compress: expected 'fp8', 'int8' or 'int4', got None")
    if not isinstance(model, torch.nn.parallel.DistributedDataParallel):
        raise InvalidArgument(f"model: expected a DistributedDataParallel, got {type(model).__name__}")
    parameters = [each for each in model.parameters() if each.requires_grad]
    dtypes = {str(each.dtype).removeprefix("torch.") for each in parameters}
    if not dtypes <= set(CARRIED):
        raise InvalidArgument(f"model: expected parameters of {', '.join(CARRIED)}, got {', '.join(sorted(dtypes))}")
    device = parameters[0].device
    backend = "auto" if device.type == "cuda" else "tcp"
    comm = kos.init(backend, rendezvous=model.process_group, device=device.index, process_hooks=False)
    registered = Compression(comm, name, parameters)
    try:
        model.register_comm_hook(registered, lambda state, bucket: state.average(bucket))  # torch rejects annotations
    except BaseException:  # such as a second hook of a model
        comm.close()
        raise
    return registered
