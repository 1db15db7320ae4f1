"""Weights of a publisher (``kos.transfer``) for the parameters of a torch module, of this process or one rank of tp.

    subscriber = bind("trainer:29600", model)
    subscriber.update(timeout=30)                  # between two requests: the parameters change in place

This module does not import torch.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from kos.transfer import Subscriber, placements, read_catalogue
from kos.transfer.placement import Current, Placement


def bind(
    address: str, module: Any, *, rules: str = "huggingface", rank: int = 0, ranks: int = 1, timeout: float = 30.0,
    **options: Any,
) -> Subscriber:  # fmt: skip
    """A subscriber to the publisher at ``address`` whose arrays are the parameters of ``module``.

    A tensor of the publisher that the module lacks is not read.  ``rules`` name the module's parameters
    (``kos.transfer.placements``); it is rank ``rank`` of ``ranks`` of tensor parallelism.  Waits at most ``timeout``
    seconds for the publisher.  ``options`` are those of ``Subscriber``.  ``update`` raises InvalidArgument if a
    parameter has other memory than now, as after ``parameter.data = ...``: then bind again.

    Raises InvalidArgument if the publisher has no such tensor or a shape differs; TransferError, TransferTimeout.
    """
    shapes = {name: tuple(each.shape) for name, each in module.named_parameters()}
    found = placements(shapes, read_catalogue(address, timeout).offers.shapes, rules, rank, ranks)
    rows = {name: placed.shape[:1] for name, placed in found.items() if isinstance(placed, Placement)}  # unpadded
    arrays = {name: (Current(partial(_parameter, module, name, *rows.get(name, ()))), found[name]) for name in shapes}
    return Subscriber(address, arrays, **options)


def _parameter(module: Any, name: str, rows: int | None = None) -> Any:
    found = module.get_parameter(name).detach()
    return found if rows is None else found[:rows]
