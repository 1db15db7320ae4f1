"""Training on a page: the loop over steps, and what a rank does in one step.

``train`` is the loop: a step, its metrics, a validation, a checkpoint.

``Step`` is one optimizer step, the same program in every layout: the actions of this rank in its pipeline's schedule,
with one rank F0 B0 F1 B1 …; then losses, norm and update. CPUs run it at once (``device/cpu.py``), GPUs queue it, to be
captured as a CUDA graph (``device/cuda.py``).

The path of a gradient: ``_backward`` runs the model's backward (``model/model.py``), which reports each complete
gradient. ``parallel/gradients.py`` then sums it over the ranks of tp if each has a term of it, and passes it to
``parallel/data.py``. That fills a bucket and calls ``comm.all_reduce``, which overlaps the rest of the backward.
Norm and update follow after all sums.
"""

from __future__ import annotations

import itertools
import math
from collections import ChainMap
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from kos.comm.reduction import ReduceOp
from kos.dtypes import DTYPES
from kos.train.config.options import TrainConfig
from kos.train.data.own import EndOfBatches
from kos.train.layers.attention import Cache
from kos.train.model.llama import LlamaConfig, Local
from kos.train.model.model import InFlight, Model, Result, make_stage
from kos.train.ops import Array, Batch, Loss
from kos.train.ops.fp8 import fp8_weights, linear_names, weight_store
from kos.train.ops.parameters import OwnedSlices, Parameters
from kos.train.optim import Optimizer
from kos.train.parallel.data import Buckets, DataParallel
from kos.train.parallel.gradients import GradientSums, Weights
from kos.train.parallel.mesh import Mesh
from kos.train.parallel.pipeline import Buffer, Pipeline
from kos.train.parallel.schedules import Action


class StepResult(NamedTuple):
    """The results of a step, the same on every rank except ``seconds``."""

    loss: float
    norm: float  # of the gradient, before clipping
    lr: float
    seconds: float
    stop: bool  # whether all stop, since a rank was asked to
    leaving: tuple[int, ...] = ()  # the ranks that were asked to leave, if others go on
    joining: int = 0  # newcomers
    ranks: int = 1  # that took part
    epoch: int = 0  # how often they had changed
    counted: bool = True  # whether the loss counts a target of the batch; otherwise there was no update


STATUS_FIELDS = 4
"""What a rank reports of a step besides its losses: whether it was asked to stop, the epoch of the group, the step, and
how many newcomers wait at it."""

WRITING = -1
"""In place of their number: it writes a checkpoint, until when no rank joins or leaves."""


def train(device: Any, config: TrainConfig, run: Any) -> bool:
    """Train from step ``run.steps_done`` to ``config.steps``, or until a stop is requested: returns whether one was.

    ``run`` is a ``Trainer``; ``device`` is a ``Device`` or, with ``--elastic``, an ``Elastic``.
    The device may start ``steps_in_flight`` steps before the first of them is finished. It does not start a step before
    the weights of the step before are evaluated, saved and published.
    """
    started, stopped = run.steps_done, False
    while run.steps_done < started or (run.steps_done < config.steps and not stopped):
        ahead = run.steps_done + 1 + device.steps_in_flight
        while not stopped and started < min(ahead, _next_pause(config, run.steps_done)):
            try:
                device.start_step(started, run.stop.stop_request)
                started += 1
            except EndOfBatches:
                stopped = run.ended = True
        if run.steps_done == started:
            break
        result = device.finish_step(run.steps_done)
        row = run.measure(result)
        run.steps_done, stopped = run.steps_done + 1, stopped or result.stop
        if run.validates and (_every(config.eval_every, run.steps_done) or run.steps_done == config.steps):
            row |= run.validate()
            stopped = stopped or run.exhausted
        last = run.steps_done == config.steps or (stopped and run.steps_done == started)
        run.log(row, last)
        stopped = run.after_step(row) or stopped
        if not last and (_every(config.save_every, run.steps_done) or run.improved):
            run.save()
    run.save()
    return stopped


def _every(steps: int, step: int) -> bool:
    return steps > 0 and step % steps == 0


def _next_pause(config: TrainConfig, step: int) -> int:
    """The next step after which the weights are evaluated, compared, saved or published."""
    publish_every = 0 if config.publish is None else config.publish_every
    pauses = config.eval_every, config.save_every, publish_every, config.check_replicas
    return min([config.steps, *((step // n + 1) * n for n in pauses if n)])


class Stages:
    """Runs the forwards of this rank's stages, for training, validation and sampling.

    ``models`` are the stages, which all use the same operations.  ``free`` has the ``InFlight`` objects that no
    micro-batch uses.
    """

    def __init__(self, models: Sequence[Model], pipeline: Pipeline, free: Sequence[InFlight] = ()) -> None:
        self.models, self.pipeline, self.free = models, pipeline, [*free]
        self.in_flight: dict[tuple[int, int], InFlight] = {}  # by micro-batch and chunk

    def forward(
        self, action: Action, weights: Weights, received: Buffer | None, batch: Batch, result: Result | None = None,
        cache: Cache | None = None,
    ) -> Any:  # fmt: skip
        """The forward of a stage.  Its input is received, or is the output of the previous chunk on this rank.

        Without ``result``, the micro-batch is in flight until its backward.  With ``result``, there is no backward, and
        the forward saves nothing.  The last stage then returns ``result``; any other stage returns None.
        """
        model, micro_batch, chunk = self.models[action.chunk], action.micro_batch, action.chunk
        flight, x_nD = self.free.pop(0) if self.free else InFlight(model.ops.make_arena()), None
        flight.clear()
        before = self.in_flight.get((micro_batch, chunk - 1))
        if not model.local.first:
            source: Any = received.array if received is not None else before and before.out_nD
            source = source[: model.tensor.rows(batch.tokens.size)]
            x_nD = flight.arena.take(source.shape, source.dtype)
            model.ops.copy(source, x_nD)
        with model.ops.step(model.arena):
            out_nD = model.forward(weights, flight, batch, x_nD, result is None, cache)
            value = result(model, weights, flight) if result is not None and model.local.last else None
        flight.sent = self.pipeline.send(action, out_nD)
        if result is None or self.pipeline.own_destination(action) is not None:
            self.in_flight[micro_batch, chunk] = flight
        else:
            self.free.append(flight)  # to be cleared once it is sent
        if result is not None and before is not None:
            self.end(micro_batch, chunk - 1)
        return value

    def end(self, micro_batch: int, chunk: int) -> None:
        """End the pass of a micro-batch through a stage, so that another micro-batch may use its memory."""
        self.free.append(flight := self.in_flight.pop((micro_batch, chunk)))
        flight.clear()

    def clear(self) -> None:
        """Wait until the outputs of all finished micro-batches are sent."""
        for flight in self.free:
            flight.clear()


class Step:
    """One optimizer step of this rank, which holds ``parts`` of ``model``, a stage of the pipeline each. Collective.

    It adds up ``gradients``, and computes with activations of ``dtype``. Passes read ``weights``, by name.

    - ``micro_batch``: this rank's rows and columns of a micro-batch, (B, T).
    - ``zeros``: memory for gradients, and for weights that are gathered; default: that of ``ops``.
    - ``dtypes``: of passes, of the weights that the optimizer updates, and of gradients; default: those of ``config``.
    - ``head_rows``: tokens whose logits are in memory at once.
    - ``loss``: that of the program, instead of the cross-entropy.
    - ``stop_request``: what was requested on this rank (``Stop.stop_request``), if a step takes long; asked at its end.
    - ``abort_flags``: where the collectives of this rank note that they were aborted; its sums are then undefined.
    """

    def __init__(
        self, config: TrainConfig, model: LlamaConfig, parts: Sequence[Local], mesh: Mesh, pipeline: Pipeline,
        ops: Any, buckets: Buckets, micro_batch: Callable[[int], Batch], *,
        zeros: Callable[[int, Any], Any] | None = None, dtypes: tuple[Any, Any, Any] | None = None,
        head_rows: int | None = None, loss: Loss | None = None,
        stop_request: Callable[[], int] | None = None, abort_flags: Array | None = None,
    ) -> None:  # fmt: skip
        assert config.micro_batch_size is not None
        self.config, self.mesh, self.pipeline, self.ops, self.buckets = config, mesh, pipeline, ops, buckets
        self.micro_batch, self.stop_request, self.abort_flags = micro_batch, stop_request, abort_flags
        self.zeros, as_dtype = zeros or ops.zeros, np.dtype if config.device == "cpu" else DTYPES.__getitem__
        names = config.compute_dtype, config.master_dtype, config.grad_dtype
        self.dtype: Any
        self.master_dtype: Any
        self.dtype, self.master_dtype, grad_dtype = dtypes or map(as_dtype, names)
        self.gradients = gradients = buckets.zeros(grad_dtype, self.zeros)
        gradients.zeros = ops.zeros  # arrays made like these need not be visible to other ranks
        arena = ops.make_arena()
        options: dict[str, Any] = {"arena": arena, "recompute": config.recompute, "head_rows": head_rows, "loss": loss}
        self.models = [make_stage(config, model, ops, part, mesh, **options) for part in parts]
        first, last = (any(getattr(part, end) for part in parts) for end in ("first", "last"))
        for each in self.models:
            each.holds_first, each.holds_last = first, last
        rows = self.models[0].tensor.rows(config.micro_batch_size * config.seq_len // mesh.cp.size)
        self.message = (rows, model.hidden_size), self.dtype
        """The shape and dtype of what stages send."""
        slots = [InFlight(ops.make_arena()) for _ in range(pipeline.schedule.slots[mesh.pp.rank])]
        self.stages = Stages(self.models, pipeline, slots)
        self.pipeline.make_buffers(lambda: ops.zeros(*self.message))
        self.micro_batches = config.batch_size // config.micro_batch_size  # of all ranks
        self.parallel = DataParallel(
            mesh.dense, gradients, buckets, ops, in_order=self.micro_batches if config.deterministic else None,
            compress=config.compress, exact=mesh.exact(config.device),
        )  # fmt: skip
        self._hold_frozen(model, parts)
        self.sums = GradientSums(self.models[0], self.parallel, pipeline)
        self.weights, self.optimizer = self._make_optimizer(model, parts)
        self.count = ops.zeros((1,), ops.statistics_dtype(self.dtype))
        """(1,): the divisor of sums over a micro-batch's targets, ``Dataset.micro_batches``."""
        self.report = ops.zeros((STATUS_FIELDS + -(-self.micro_batches // mesh.dp.size),), np.float64)
        """As ``STATUS_FIELDS`` says, then this rank's losses; ``reports``: the same of every rank of the world."""
        self.reports = self.report.reshape(1, -1)
        if mesh.world.size > 1:
            self.reports = ops.zeros((mesh.world.size, *self.report.shape), np.float64)

    def _hold_frozen(self, model: LlamaConfig, parts: Sequence[Local]) -> None:
        """Memory for weights in 8 bits, and for those that are not trained."""
        config, ops = self.config, self.ops
        shapes, stacks = model.parameter_shapes(*parts), model.fused_groups(*parts)
        in_8_bits = linear_names(self.models, config.fp8_head) if config.dtype == "fp8" else ()
        store = weight_store(in_8_bits, shapes, stacks, ops)
        alone = config.lora is not None and not config.publish_merged
        self.store, self.quantized = ({}, store) if alone else (store, {})
        """The weights of linear layers in 8 bits. ``store`` is memory for weights that each step quantizes.
        ``quantized`` has the base of adapters, which is held only in 8 bits unless it is published merged."""
        others = {*self.gradients}.union(*(each.members for each in self.quantized.values()))
        frozen = {name: shape for name, shape in shapes.items() if name not in others}
        stacks = {name: each for name, each in stacks.items() if each[0] in frozen}
        self.frozen = Parameters(frozen, self.dtype, stacks, ops.zeros)
        """The other weights that are not trained."""

    def _make_optimizer(self, model: LlamaConfig, parts: Sequence[Local]) -> tuple[Parameters, Any]:
        """What passes read, and the optimizer. With ZeRO-1 on a GPU, it has only this rank's master weights."""
        config, gradients, sharded = self.config, self.gradients, self.buckets.sharded and self.config.device != "cpu"
        held, copy = self.parallel.parts(), None
        master: Any = gradients.like(self.master_dtype) if not sharded else None
        if sharded:
            master = OwnedSlices(gradients, held, self.master_dtype)
            copy = self.buckets.zeros(self.dtype, self.zeros)
        elif self.dtype != self.master_dtype:
            copy = gradients.like(self.dtype)
        sizes = {name: math.prod(shape) for name, shape in model.parameter_shapes().items()}
        optimizer = Optimizer(
            config.update_rule(), master, config.learning_rate(), ops=self.ops, copy=copy,
            groups=config.trained_groups(model, *parts), parts=held, normed=self.parallel.normed(),
            grad_clip=config.grad_clip, skip_outliers=config.skip_outliers, seed=config.seed,
            normed_tensors=self.sums.normed,
            places=dict(zip(sizes, itertools.accumulate(sizes.values(), initial=0), strict=False)),
            exact=sum(sizes.values()) if config.deterministic else 0, tp=self.mesh.tp, arena=self.models[0].arena,
        )  # fmt: skip
        return copy or master, optimizer

    def run(self) -> None:
        """The whole step. All ranks report in its last exchange. With ``--elastic`` the update needs that of all."""
        self.passes()
        self.norm()
        if self.stop_request is not None:
            self.report[0] = self.report[0] or self.stop_request()
        if self.mesh.world.size > 1:
            if self.abort_flags is not None:
                self.optimizer.invalidate_if_aborted(self.gradients, self.abort_flags, self.report)
            self.mesh.world.all_gather(self.report, self.reports)
            if self.config.elastic is not None:
                self.optimizer.check_in_step(self.gradients, self.report, self.reports)
        self.apply()

    def apply(self) -> None:
        """The update of the step, from the sums and the norm that this rank has of it."""
        self.optimizer.update(self.gradients, self.micro_batches, self.count)

    def as_read(self, weights: Weights) -> Weights:
        """What passes read of ``weights`` until they change."""
        model = self.models[0]
        return fp8_weights(weights, self.store, model.ops, model.arena) if self.store else weights

    def gather(self) -> Weights:
        """What passes of this step read; with ZeRO-1, once it is gathered."""
        weights = self.parallel.gather(self.weights) if self.parallel.sharded else self.weights
        return self.as_read(self.with_frozen(weights))

    def with_frozen(self, weights: Weights) -> Weights:
        """The weights of all tensors: ``weights``, which are trained, and the frozen ones."""
        frozen: list[Any] = [held for held in (self.frozen, self.quantized) if held]
        return ChainMap[str, Any](weights, *frozen) if frozen else weights  # type: ignore[arg-type]

    def norm(self) -> None:
        """The norm of the gradient of all ranks."""
        world, parallel = self.mesh.world, self.parallel
        sum_shards = parallel.sum_shards if parallel.sharded else None
        largest = (lambda x: world.all_reduce(x, ReduceOp.MAX)) if world.size > 1 else None
        self.optimizer.norm(self.gradients, sum_shards, parallel.others, largest)

    def passes(self) -> None:
        """Forward and backward of every micro-batch of this rank, and the sums over all that hold the same weights."""
        weights = self.gather()
        for action, received in self.pipeline.inputs():
            self.act(action, weights, received)
        self.sums.finish()
        self.pipeline.free_buffers()

    def act(self, action: Action, weights: Weights, received: Buffer | None) -> None:
        """One action of the schedule; ``received`` is its input, if that comes from another rank."""
        if action.kind == "F":
            self.stages.forward(action, weights, received, self.micro_batch(action.micro_batch))
        elif action.kind != "W":
            self._backward(action, weights, received)
        else:
            self._weight_gradients(action)
        if action.kind in "BW":
            self.stages.end(action.micro_batch, action.chunk)

    def _backward(self, action: Action, weights: Weights, received: Buffer | None) -> None:
        """A stage's backward (B), or only the part that the previous stage waits for (I)."""
        model, flight = self.models[action.chunk], self.stages.in_flight[action.micro_batch, action.chunk]
        buffer = received or self.pipeline.buffer(forward=False)
        if flight.d_out_nD is not None:
            model.ops.copy(flight.d_out_nD, buffer.array)
        into, deferred = self.sums.of(action.micro_batch), action.kind == "I"
        with model.ops.step(model.arena):
            if model.local.last:
                loss = self.report[STATUS_FIELDS + action.micro_batch :][:1]
                model.backward(weights, flight, into, buffer.array, loss=loss, count=self.count, deferred=deferred)
            else:
                model.backward(weights, flight, into, buffer.array, deferred=deferred)
        buffer.sent = self.pipeline.send(action, buffer.array)
        if (chunk := self.pipeline.own_destination(action)) is not None:
            before = self.stages.in_flight[action.micro_batch, chunk]
            before.d_out_nD = before.arena.take(buffer.array.shape, buffer.array.dtype)
            model.ops.copy(buffer.array, before.d_out_nD)

    def _weight_gradients(self, action: Action) -> None:
        """The rest of a backward (W)."""
        model, flight = self.models[action.chunk], self.stages.in_flight[action.micro_batch, action.chunk]
        with model.ops.step(model.arena):
            model.weight_gradients(flight, self.sums.of(action.micro_batch))
