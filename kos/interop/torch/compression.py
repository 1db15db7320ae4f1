"""Compressed gradients for torch's DistributedDataParallel, with error feedback, by a communication hook."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch

import kos
from kos.comm.compression import CARRIED, check_compress
from kos.errors import InvalidArgument

Tensor: TypeAlias = torch.Tensor


class Compression:
    """What ``compress`` has registered: the communicator, and what each bucket of gradients has lost so far."""

    def __init__(self, comm: kos.Communicator, compress: str, device: torch.device) -> None:
        self.comm, self._compress = comm, compress
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._residuals: dict[int, tuple[list[int], Tensor]] = {}

    def close(self) -> None:
        """Close the communicator.  Collective; afterwards the model must not run backward again."""
        self.comm.close()

    def state_dict(self) -> dict[str, Tensor]:
        """The residuals of this rank by bucket, for a checkpoint.  They are views: copy them before the next step."""
        return {str(index): residual for index, (_, residual) in self._residuals.items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Go on with the residuals of ``state_dict``: a bucket of as many elements takes them at its next sum."""
        self._residuals = {int(index): ([], residual.clone()) for index, residual in state.items()}

    def average(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """The average of a bucket over all ranks: what DDP asks its hook for."""
        x = bucket.buffer()
        residual = self._residual(bucket.index(), [id(each) for each in bucket.parameters()], x)
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
        self.comm.feed_back(x, residual, self._compress, stream=stream)
        self.comm.all_reduce(x, kos.ReduceOp.AVG, compress=self._compress, stream=stream)

    def _residual(self, index: int, parameters: list[int], x: Tensor) -> Tensor:
        """That of a bucket; zeros where DDP has put other parameters into it, as it does after the first step."""
        known, residual = self._residuals.get(index, ([0], x))
        if known not in ([], parameters) or residual.numel() != x.numel():
            residual = torch.zeros_like(x)
        self._residuals[index] = parameters, residual
        return residual


def compress(model: Any, compress: str) -> Compression:
    """Let DDP average the gradients of ``model`` compressed to "fp8", "int8" or "int4", with error feedback.

    ``model`` is a DistributedDataParallel, over a process group of kos or of any other backend.  A communicator of kos
    among its ranks carries the gradients, all else goes as before.  On a GPU the hook overlaps the backward pass; on a
    CPU backward waits for it.  Collective.  Raises InvalidArgument for another model, format, or dtype of parameters.

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
    dtypes = {str(each.dtype).removeprefix("torch.") for each in model.parameters() if each.requires_grad}
    if not dtypes <= set(CARRIED):
        raise InvalidArgument(f"model: expected parameters of {', '.join(CARRIED)}, got {', '.join(sorted(dtypes))}")
    device = next(model.parameters()).device
    backend = "auto" if device.type == "cuda" else "tcp"
    comm = kos.init(backend, rendezvous=model.process_group, device=device.index, process_hooks=False)
    registered = Compression(comm, name, device)
    model.register_comm_hook(registered, lambda state, bucket: state.average(bucket))  # torch rejects other annotations
    return registered
