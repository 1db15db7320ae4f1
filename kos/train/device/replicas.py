"""``--check-replicas``: ranks that hold copies of the same weights or optimizer state compare hashes of them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from kos.errors import TrainingError
from kos.train.device import Device
from kos.train.parallel.failures import gather_json, on_every_rank


def check_replicas(device: Device, step: int) -> None:
    """Compare the trained weights and the optimizer's state between ranks that hold the same elements. Collective.

    Raises TrainingError on all ranks if their bits differ. It names the first tensor, and two ranks that differ.
    """
    if device.comm.size == 1:
        return
    mine = {name: hashlib.blake2b(values.data, digest_size=16).hexdigest() for name, values in _held(device)}
    seen = dict[str, tuple[int, str]]()
    for rank, theirs in enumerate(gather_json(device.comm, mine)):
        for name, digest in theirs.items():
            first, expected = seen.setdefault(name, (rank, digest))
            if digest != expected:
                text = f"step {step}: --check-replicas: expected the same bits on all ranks that hold {name}"
                raise on_every_rank(TrainingError(f"{text}, got different bits on rank {rank} than on rank {first}"))


def _held(device: Device) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """The bytes that this rank holds, with their names.  Ranks with a copy of the same elements use the same name."""
    step, placements = device.step, device.state.placements
    optimizer, to_host, weights = step.optimizer, step.models[0].ops.to_host, device.whole_weights()
    of_tensor = dict[str, str]()
    for name in step.gradients:
        place = placements[name]
        shard = f" (part {device.mesh.tp.rank // place.copies} of {place.shards})" if place.shards > 1 else ""
        of_tensor[name] = name + shard
        yield of_tensor[name], to_host(weights[name]).reshape(-1).view(np.uint8)
    others = {"master weights": optimizer.weights} if optimizer.weights is not step.weights else {}
    for kind, held in (others | optimizer.state).items():
        for name, span in held.spans.items():
            for start, stop, at in device.state.held(held, span):
                part = f"{kind} of {of_tensor[name]}, elements {start - span.start} to {stop - span.start}"
                yield part, to_host(held.flat[at : at + stop - start]).view(np.uint8)
