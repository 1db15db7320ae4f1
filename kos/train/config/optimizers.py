"""The values of ``--optimizer``: their update rules, and the parameter groups of a run with them.

``config`` is a ``TrainConfig`` (``kos.train.config.options``), which imports this module.  The
command line needs only the names of optimizers, so update rules are imported when they are used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from kos.train.model.llama import LlamaConfig, Local
    from kos.train.optim import Group, UpdateRule
    from kos.train.optim.adamw import AdamW


def matrices_decayed(config: Any, model: LlamaConfig, parts: Sequence[Local]) -> list[Group]:
    """One rule for all weights."""
    from kos.train.optim import decay_matrices

    return decay_matrices({name: at.local for name, at in config.trained(model, parts).items()}, config.weight_decay)


def hidden_matrices_by_muon(config: Any, model: LlamaConfig, parts: Sequence[Local]) -> list[Group]:
    """Muon's are the matrices of layers."""
    from kos.train.optim import Group
    from kos.train.optim.muon import Muon

    placements = config.trained(model, parts)
    matrices = {name: at for name, at in placements.items() if len(at.shape) == 2}
    hidden = {name: at for name, at in matrices.items() if name not in (*model.tables, model.head)}
    rule = Muon(hidden, model.stacked, config.momentum)
    return [
        Group(hidden, config.weight_decay, (config.muon_lr or config.lr) / config.lr, rule),
        Group(matrices.keys() - hidden, config.weight_decay), Group(placements.keys() - matrices),
    ]  # fmt: skip


def adamw(config: Any) -> AdamW:
    from kos.train.optim.adamw import AdamW

    return AdamW((config.beta1, config.beta2), config.eps)


class Chosen(NamedTuple):
    """What a value of ``--optimizer`` stands for."""

    rule: Callable[[Any], UpdateRule]
    groups: Callable[[Any, LlamaConfig, Sequence[Local]], list[Group]]
    options: tuple[str, ...]
    """Those of its rules."""


OptimizerName = Literal["adamw", "muon"]
OF_ADAMW, OF_MUON = ("beta1", "beta2", "eps"), ("momentum", "muon_lr")
OPTIMIZERS: dict[OptimizerName, Chosen] = {
    "adamw": Chosen(adamw, matrices_decayed, OF_ADAMW),
    "muon": Chosen(adamw, hidden_matrices_by_muon, OF_ADAMW + OF_MUON),
}


def not_of(optimizer: Any) -> set[str]:
    """The options that only other optimizers have."""
    of_all = {name for each in OPTIMIZERS.values() for name in each.options}
    known = isinstance(optimizer, str) and optimizer in OPTIMIZERS
    return of_all.difference(OPTIMIZERS[optimizer].options if known else of_all)
