"""Weights of a publisher (``kos.transfer``) for the parameters of a torch module, of this process or one rank of tp.

    subscriber = bind("trainer:29600", model)
    subscriber.update(timeout=30)                  # between two requests: the parameters change in place

This module does not import torch.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

from kos.errors import InvalidArgument
from kos.transfer import Subscriber, placements, read_catalogue
from kos.transfer.names import only_adapters
from kos.transfer.placement import Current, Placement


def bind(
    address: str, module: Any, *, rules: str = "huggingface", rank: int = 0, ranks: int = 1, timeout: float = 30.0,
    **options: Any,
) -> Subscriber:  # fmt: skip
    """A subscriber to the publisher at ``address`` whose arrays are the parameters of ``module``.

    Buffers of the module are not copied.  A tensor of the publisher that the module lacks is not read.  ``rules`` name
    the module's parameters (``kos.transfer.placements``); it is rank ``rank`` of ``ranks`` of tensor parallelism.
    Waits at most ``timeout`` seconds for the publisher.  ``options`` are those of ``Subscriber``.  ``update`` raises
    InvalidArgument if a parameter has other memory than now, as after ``parameter.data = ...``: then bind again.

    A module of peft may have one adapter, whose name the publisher's tensors lack.  If the publisher has only adapters,
    as a run with ``--lora`` does, the other parameters of that module keep their values.

    Raises InvalidArgument if the publisher has no such tensor, a shape differs, or another argument is wrong;
    TransferError, TransferTimeout.
    """
    if not hasattr(module, "named_parameters"):
        raise InvalidArgument(f"module: expected a torch.nn.Module, got {type(module).__name__}")
    placements({}, {}, rules, rank, ranks)  # checks these arguments before it waits for the publisher
    tensors = read_catalogue(address, timeout).offers.shapes
    names = {name: name for name, _ in module.named_parameters()} | (adapters := _adapters(module))
    if adapters and only_adapters(tensors):
        names = adapters
    shapes = {tensor: tuple(module.get_parameter(name).shape) for name, tensor in names.items()}
    found = placements(shapes, tensors, rules, rank, ranks)
    rows = {name: placed.shape[:1] for name, placed in found.items() if isinstance(placed, Placement)}  # unpadded
    arrays = {
        name: (Current(partial(_parameter, module, name, *rows.get(tensor, ()))), found[tensor])
        for name, tensor in names.items()
    }
    return Subscriber(address, arrays, **options)


def _adapters(module: Any) -> dict[str, str]:
    """The parameters of an adapter of peft, and their names in peft's files, which lack the name of the adapter."""
    parts = [re.fullmatch(r"((?:.*\.)?lora_[AB])\.([^.]+)\.weight", name) for name, _ in module.named_parameters()]
    found = {each[0]: f"{each[1]}.weight" for each in parts if each}
    if len(several := sorted({each[2] for each in parts if each})) > 1:
        raise InvalidArgument(f"module: expected one adapter, got {', '.join(several)}")
    return found


def _parameter(module: Any, name: str, rows: int | None = None) -> Any:
    found = module.get_parameter(name).detach()
    return found if rows is None else found[:rows]
