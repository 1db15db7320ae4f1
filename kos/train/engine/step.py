"""One optimizer step: the same program on CPUs, where it runs at once, and on GPUs, where it is queued and captured."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from kos.train.model.llama import Llama, Weights
from kos.train.model.parameters import Parameters, Shard
from kos.train.ops import Array
from kos.train.ops.optimizer import AdamW
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
    accumulation_steps: int  # micro-batches of this rank
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

    def new_state(self) -> AdamW:
        """Weights and moments of zeros in host memory."""
        return AdamW(Parameters(self.gradients.shapes, groups=self.gradients.groups))

    def load(self, state: AdamW | None) -> None:
        """Take over rank 0's ``state``, which the other ranks have not."""
        world, ops = self.mesh.world, self.model.ops
        step = int(world.all_gather_bytes(str(state.step_count if state else 0).encode())[0])
        for target, source in self._states(state)[: 3 if step else 1]:  # moments begin as zeros, here already
            for bucket, whole, mine, held in self._staged(target):
                if source is not None:
                    ops.zero(whole)  # the last may reach beyond the weights
                    ops.copy(source[bucket], whole[: source[bucket].size])
                if world.size > 1:
                    world.broadcast(whole, 0)
                ops.copy(mine, held)
        self.optimizer.step_count = step

    def state(self) -> AdamW | None:
        """Weights and moments in host memory; on rank 0."""
        world, ops = self.mesh.world, self.model.ops
        state = self.new_state() if world.rank == 0 else None
        for source, target in self._states(state):
            for bucket, whole, mine, held in self._staged(source):
                ops.copy(held, mine)
                if isinstance(source, Shard):
                    self.parallel.axis.comm.all_gather(mine, whole)
                    world.synchronize()
                if target is not None:
                    ops.copy(whole[: target[bucket].size], target[bucket])
        if state is not None:
            state.step_count = self.optimizer.step_count
        return state

    def _states(self, host: AdamW | None) -> list[tuple[Parameters | Shard, np.ndarray | None]]:
        """Weights and moments, each here and as rank 0 has it on the host."""
        held = (self.optimizer.weights, self.optimizer.exp_avg, self.optimizer.exp_avg_sq)
        if host is None:
            return [(part, None) for part in held]
        return list(zip(held, (host.weights.flat, host.exp_avg.flat, host.exp_avg_sq.flat), strict=True))

    def _staged(self, held: Parameters | Shard) -> Iterator[tuple[slice, Array, Array, Array]]:
        """Bucket by bucket: where it is, fp32 memory for it, this rank's part of that, and ``held``'s memory of it."""
        buckets, arena = self.parallel.buckets, self.model.arena
        parts = held.parts() if isinstance(held, Shard) else [(bucket, bucket) for bucket in buckets]
        with self.model.ops.step(arena):  # idle between steps
            room = arena.take((max(b.stop - b.start for b in buckets),), np.dtype(np.float32))
            for bucket, (part, local) in zip(buckets, parts, strict=True):
                whole = room[: bucket.stop - bucket.start]
                yield bucket, whole, whole[part.start - bucket.start : part.stop - bucket.start], held.flat[local]

    def whole_weights(self) -> Weights:
        """The weights that passes read; with ZeRO-1 each rank's are gathered first."""
        if self.parallel.sharded:
            self.parallel.gather(self.weights).wait()
            self.mesh.world.synchronize()  # what waits for a GPU next knows no timeout
        return self.weights
