"""One optimizer step: the same program on CPUs, where it runs at once, and on GPUs, where it is queued and captured."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from kos.train.checkpoint.huggingface import TensorFiles
from kos.train.checkpoint.state import ShardedState
from kos.train.config.options import TrainConfig
from kos.train.engine import head_start
from kos.train.model.llama import Llama, Weights
from kos.train.model.parameters import Parameters
from kos.train.model.shapes import Local
from kos.train.ops import Array
from kos.train.parallel.data import DataParallel
from kos.train.parallel.mesh import Mesh


class StepProgram:
    """What a step works on, set by the engine, and the order in which it does."""

    mesh: Mesh
    model: Llama
    weights: Any  # what passes read, by name
    gradients: Parameters
    parallel: DataParallel
    optimizer: Any  # weights, exp_avg and exp_avg_sq, as Parameters or this rank's Shard
    config: TrainConfig
    state: ShardedState
    accumulation_steps: int  # micro-batches of this rank
    _drawn: np.ndarray | None = None  # this rank's share of the initial weights
    lookups = False  # whether the embedding's lookups are gathered instead of its gradient

    count: Array
    """(1,): what sums over a micro-batch's targets are divided by, ``Dataset.targets_per_micro_batch``."""

    known: Array
    """(1 + accumulation_steps,), float64: whether this rank was asked to stop, and its losses."""

    known_of_all: Array
    """The same of every rank of the world."""

    def micro_batch(self, index: int) -> tuple[Array, Array]:
        """Tokens and targets (B, T)."""
        raise NotImplementedError

    def queue_norm(self) -> None:
        raise NotImplementedError

    def queue_update(self) -> None:
        raise NotImplementedError

    def queue_step(self) -> None:
        self.queue_gradients()
        if self.mesh.world.size > 1:
            self.mesh.world.all_gather(self.known, self.known_of_all)
        self.queue_norm()
        self.queue_update()

    def queue_gradients(self) -> None:
        """Forward and backward of every micro-batch of this rank, and the sums over all that hold the same weights."""
        model, parallel, steps = self.model, self.parallel, self.accumulation_steps
        weights = parallel.gather(self.weights) if parallel.sharded else self.weights
        for index in range(steps):
            tokens, targets = self.micro_batch(index)
            last = index + 1 == steps
            with model.ops.step(model.arena):
                model.queue_loss_and_gradients(
                    weights, tokens, targets, self.gradients, self.known[1 + index : 2 + index],
                    accumulate=parallel.accumulates(index),
                    on_gradient=parallel.gradient_ready if last else None,
                    lookups=partial(parallel.gather_lookups, model.arena) if last and self.lookups else None,
                    count=self.count,
                )  # fmt: skip
            parallel.finish_round(index, steps)

    # --- state -----------------------------------------------------------------------------------------

    def make_state(self, parts: Sequence[Local]) -> ShardedState:
        """Of a rank with these runs of layers, once the other attributes are there."""
        model, ops = self.model, self.model.ops
        return ShardedState(self.mesh, model.config, parts, self.optimizer, self.parallel, ops, model.arena)

    def read(self, weights: TensorFiles, moments: TensorFiles | None, step: int) -> None:
        self.state.read(weights, moments, step)

    def draw_weights(self) -> None:
        model, seed, rank = self.model.config, self.config.seed, self.mesh.world.rank
        self._drawn = head_start.weights(model, seed, self.mesh.layout, rank, len(self.state.parts)).result()

    def share_weights(self) -> None:
        if self._drawn is not None:
            self.state.scatter(self._drawn, self.spare_memory())
            self.model.ops.zero(self.gradients.flat)
        self._drawn = None
        head_start.weights.cache_clear()

    def spare_memory(self) -> Array:
        """The gradients' memory, as fp32."""
        return self.gradients.flat

    def whole_weights(self) -> Weights:
        """The weights that passes read; with ZeRO-1 each rank's are gathered first."""
        if self.parallel.sharded:
            self.parallel.gather(self.weights).wait()
            self.mesh.world.synchronize()  # what waits for a GPU next knows no timeout
        return self.weights
