"""Training on a page: the loop over steps, and what a rank does in one step.

``train`` is the loop: a step, its metrics, a validation, a checkpoint.

``Step`` is one optimizer step, the same program in every layout: the actions of this rank in its pipeline's schedule,
with one rank F0 B0 F1 B1 …; then losses, norm and update. CPUs run it at once (``engine/cpu.py``), GPUs queue it, to be
captured as a CUDA graph (``engine/cuda.py``).

The path of a gradient: ``_backward`` runs the model's backward (``model/llama.py``), which reports each complete
gradient. ``parallel/gradients.py`` then sums it over the ranks of tp if each has a term of it, and passes it to
``parallel/data.py``. That fills a bucket and calls ``comm.all_reduce``, which overlaps the rest of the backward.
``queue_norm`` and ``queue_update`` follow after all sums.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from kos.train.config.options import TrainConfig
from kos.train.model.llama import Llama, Slot, Weights
from kos.train.ops import Array
from kos.train.parallel.data import DataParallel
from kos.train.parallel.gradients import GradientSums
from kos.train.parallel.mesh import Mesh
from kos.train.parallel.pipeline import Buffer, Pipeline
from kos.train.parallel.schedules import Action
from kos.train.parallel.stopping import Stop


class StepResult(NamedTuple):
    """The results of a step, the same on every rank except ``seconds``."""

    loss: float
    norm: float  # of the gradient, before clipping
    lr: float
    seconds: float
    stop: bool  # whether any rank was asked to stop


class Run(Protocol):
    """What the loop reports to: metrics, console and checkpoints (``kos.train.run``). Collective."""

    step: int
    """How many steps are done."""

    stop: Stop

    def measure(self, result: StepResult) -> dict[str, Any]:
        """The metrics of the step. TrainingError if its loss or norm is not finite."""

    def validate(self) -> float:
        """The validation loss. TrainingError if it is not finite."""

    def log(self, row: dict[str, Any], last: bool) -> None:
        """Print and write the metrics of a step."""

    def save(self) -> None:
        """Save a checkpoint."""


def train(engine: Step, config: TrainConfig, run: Run) -> bool:
    """Train from step ``run.step`` to ``config.steps``, or until a stop is requested: returns whether one was.

    The engine may start ``lag`` steps before the first of them is finished. It does not start a step before the weights
    of the step before are evaluated and saved.
    """
    started, stopped = run.step, False
    while run.step < started or (run.step < config.steps and not stopped):
        while not stopped and started < min(run.step + 1 + engine.lag, _next_pause(config, run.step)):
            engine.start_step(started, run.stop.asked)
            started += 1
        result = engine.finish_step(run.step)
        row = run.measure(result)
        run.step, stopped = run.step + 1, stopped or result.stop
        last = run.step == config.steps or (stopped and run.step == started)
        if config.eval_batches and (_every(config.eval_every, run.step) or run.step == config.steps):
            row["val_loss"] = run.validate()
        run.log(row, last)
        if not last and _every(config.save_every, run.step):
            run.save()
    run.save()
    return stopped


def _every(steps: int, step: int) -> bool:
    return steps > 0 and step % steps == 0


def _next_pause(config: TrainConfig, step: int) -> int:
    """The next step after which the weights are evaluated or saved."""
    return min([config.steps, *((step // n + 1) * n for n in (config.eval_every, config.save_every) if n)])


class Step:
    """One optimizer step of this rank. The engine sets what is declared here. All methods are collective."""

    lag: int
    """How many steps may be started before the first of them is finished, so that the device never waits."""

    config: TrainConfig
    mesh: Mesh
    pipeline: Pipeline
    models: list[Llama]
    """This rank's stages of the pipeline, a model each."""

    weights: Any  # what passes read, by name
    parallel: DataParallel
    sums: GradientSums
    slots: list[Slot]  # the free ones, which no micro-batch uses

    count: Array
    """(1,): the divisor of sums over a micro-batch's targets, ``Dataset.targets_per_micro_batch``."""

    report: Array
    """(1 + micro-batches,), float64: whether this rank was asked to stop, and its losses."""

    reports: Array
    """The same of every rank of the world."""

    def start_step(self, step: int, stop: bool) -> None:
        """Begin the step (counted from 0). ``stop``: a stop was requested on this rank."""
        raise NotImplementedError

    def finish_step(self, step: int) -> StepResult:
        """Wait for a step that was begun, the oldest first."""
        raise NotImplementedError

    def micro_batch(self, index: int) -> tuple[Array, Array]:
        """This rank's tokens and targets (B, T)."""
        raise NotImplementedError

    def queue_norm(self) -> None:
        """The norm of the gradient of all ranks."""
        raise NotImplementedError

    def queue_update(self) -> None:
        """Clipping, learning rate and AdamW; no update if the norm is not finite."""
        raise NotImplementedError

    def queue_step(self) -> None:
        """The whole step."""
        self.queue_gradients()
        if self.mesh.world.size > 1:
            self.mesh.world.all_gather(self.report, self.reports)
        self.queue_norm()
        self.queue_update()

    def queue_gradients(self) -> None:
        """Forward and backward of every micro-batch of this rank, and the sums over all that hold the same weights."""
        weights = self.parallel.gather(self.weights) if self.parallel.sharded else self.weights
        self._in_flight: dict[tuple[int, int], Slot] = {}  # by micro-batch and chunk
        for action, received in self.pipeline.inputs():
            self.run(action, weights, received)
        self.sums.finish()
        self.pipeline.free_buffers()

    def run(self, action: Action, weights: Weights, received: Buffer | None) -> None:
        """One action of the schedule; ``received`` is its input, if that comes from another rank."""
        if action.kind == "F":
            self._forward(action, weights, received)
        elif action.kind != "W":
            self._backward(action, weights, received)
        else:
            self._weight_gradients(action)

    def _forward(self, action: Action, weights: Weights, received: Buffer | None) -> None:
        """A stage's forward; its input is received, or is the output of the previous chunk on this rank."""
        model, slot = self.models[action.chunk], self.slots.pop()
        tokens, _ = self.micro_batch(action.micro_batch)
        x_nD = None
        if not model.local.first:
            before = self._in_flight.get((action.micro_batch, action.chunk - 1))
            source: Array = received.array if received is not None else before and before.out_nD
            x_nD = slot.arena.take(source.shape, source.dtype)
            model.ops.copy(source, x_nD)
        with model.ops.step(model.arena):
            out_nD = model.queue_forward(weights, slot, tokens, x_nD)
        slot.sent = self.pipeline.send(action, out_nD)
        self._in_flight[action.micro_batch, action.chunk] = slot

    def _backward(self, action: Action, weights: Weights, received: Buffer | None) -> None:
        """A stage's backward (B), or only the part that the previous stage waits for (I)."""
        model, slot = self.models[action.chunk], self._in_flight[action.micro_batch, action.chunk]
        if slot.sent is not None:
            slot.sent.wait()
        buffer = received or self.pipeline.buffer(forward=False)
        if slot.d_out_nD is not None:
            model.ops.copy(slot.d_out_nD, buffer.array)
        into = self.sums.of(action.micro_batch, slot.deferred if action.kind == "I" else None)
        with model.ops.step(model.arena):
            if model.local.last:
                _, targets = self.micro_batch(action.micro_batch)
                loss = self.report[1 + action.micro_batch : 2 + action.micro_batch]
                model.queue_backward(weights, slot, into, buffer.array, targets=targets, loss=loss, count=self.count)
            else:
                model.queue_backward(weights, slot, into, buffer.array)
        buffer.sent = self.pipeline.send(action, buffer.array)
        if (chunk := self.pipeline.own_destination(action)) is not None:
            before = self._in_flight[action.micro_batch, chunk]
            before.d_out_nD = before.arena.take(buffer.array.shape, buffer.array.dtype)
            model.ops.copy(buffer.array, before.d_out_nD)
        if action.kind == "B":
            self._clear(action)

    def _weight_gradients(self, action: Action) -> None:
        """The rest of a backward (W)."""
        model, slot = self.models[action.chunk], self._in_flight[action.micro_batch, action.chunk]
        with model.ops.step(model.arena):
            model.queue_weight_gradients(self.sums.of(action.micro_batch, slot.deferred))
        self._clear(action)

    def _clear(self, action: Action) -> None:
        """End a micro-batch's backward through a stage: another micro-batch may use its memory."""
        slot = self._in_flight.pop((action.micro_batch, action.chunk))
        slot.clear()
        self.slots.append(slot)
