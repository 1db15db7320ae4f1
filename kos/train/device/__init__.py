"""What the devices have in common besides the step: validation, text, state."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np

from kos.errors import TrainingError
from kos.train.checkpoint.adapter import Joined
from kos.train.checkpoint.state import ShardedState, Tensors
from kos.train.config.options import TrainConfig
from kos.train.data.batches import LEFT_OUT, Batches, Dataset, counted, sum_over
from kos.train.data.corpus import Show
from kos.train.data.own import Rows
from kos.train.generate import Decoder
from kos.train.layers.attention import Cache
from kos.train.layers.lora import is_adapter
from kos.train.model.initial import InitialWeights
from kos.train.model.llama import LlamaConfig, Local
from kos.train.model.model import Model, Result, check_blocks, check_groups, split_of
from kos.train.ops import Batch, Loss
from kos.train.ops.fp8 import first_of
from kos.train.parallel import schedules
from kos.train.parallel.data import shard_batch
from kos.train.parallel.failures import LEAVE, STOP, gather_json, on_every_rank, raised_on_every_rank
from kos.train.parallel.gradients import Weights
from kos.train.parallel.mesh import Axis, Mesh
from kos.train.parallel.pipeline import Pipeline
from kos.train.parallel.schedules import Action, forward_only
from kos.train.step import STATUS_FIELDS, WRITING, Stages, Step, StepResult


class Piece(NamedTuple):
    """A micro-batch of ``tokens`` tokens without a backward: the function that makes it, and the numbers of its losses.
    """

    numbers: Sequence[int]
    tokens: int
    make: Callable[[], Batch]


class Device:
    """What runs the steps of a model in training: it allocates, feeds and times them. All calls are collective.

    It has a ``step``, with weights and optimizer state on the device that computes. ``parts`` are the parts of the
    model that this rank holds, a stage each. ``micro_batches`` are its rows of the batch.

    The batches of steps come from ``source``, by default ``data``. ``watched``: the weights of a step are looked at
    before the next begins. ``loss`` and ``stop_request`` are as for ``Step``.
    """

    place: str
    """The device, for errors."""

    most_in_flight = 0
    """How many steps may be started before the first of them is finished, so that the device never waits."""

    epoch = 0
    """How often the ranks of the run have changed."""

    newcomers = 0
    """How many wait at this rank, or ``WRITING``."""

    def __init__(
        self, config: TrainConfig, model: LlamaConfig, data: Dataset, mesh: Mesh, show: Show,
        source: Batches | None = None, watched: bool = False, loss: Loss | None = None,
        stop_request: Callable[[], int] | None = None,
    ) -> None:  # fmt: skip
        self.config, self.data, self.mesh, self.comm, self.show = config, data, mesh, mesh.world, show
        self.watched = watched
        assert config.micro_batch_size is not None  # for_world has chosen it
        self.micro_batches = shard_batch(config.batch_size, config.micro_batch_size, mesh.dp.rank, mesh.dp.size)
        with raised_on_every_rank():
            split_of(config, model, mesh)  # raises where it does not fit the ranks
            check_blocks(config, model, mesh.layout)
            check_groups(config, model)
            schedule = schedules.build(config.pp_schedule, mesh.pp.size, len(self.micro_batches))
            self.parts = model.parts(mesh.tp.rank, mesh.tp.size, mesh.pp.rank, schedule.stages_of_ranks)
        self.pipeline = Pipeline(mesh.pp, schedule)
        self.use(source or data)
        self.step = self.make_step(model, loss, stop_request)

    def make_step(self, model: LlamaConfig, loss: Loss | None, stop_request: Callable[[], int] | None) -> Step:
        """Plan the memory of this rank, and allocate it. ConfigError if there is too little."""
        raise NotImplementedError

    def start_step(self, step: int, stop_request: int) -> None:
        """Begin the step (counted from 0). ``stop_request``: what was requested on this rank, as of ``Stop``."""
        raise NotImplementedError

    def finish_step(self, step: int) -> StepResult:
        """Wait for a step that was begun, the oldest first."""
        raise NotImplementedError

    def use(self, source: Batches) -> None:
        """Take the batches of steps from ``source``."""
        self.source = source
        self.steps_in_flight = self.most_in_flight if source.ahead and not self.watched else 0

    @property
    def applied(self) -> int:
        """The number of steps that this rank has completed, including skipped ones."""
        return int(self.step.optimizer.step_count)

    def apply(self) -> None:
        """Make the update that another rank has made, from this rank's sums and norm."""
        self.step.apply()

    def result_of(self, step: int) -> StepResult:
        """That of a step whose update is over, without a collective."""
        raise NotImplementedError

    def loaded(self) -> None:
        """To be called when weights and state have been filled."""

    def describe(self) -> str:
        """Lines for the log: the device, and the memory in use."""
        raise NotImplementedError

    def measures(self, tokens_per_second: float) -> dict[str, float]:
        """More metrics of a GPU: model flops utilisation by both conventions, memory in bytes."""
        return {}

    def not_finite(self, step: int) -> str | None:
        """In words, the first tensor that was not finite in this step, which no later step followed."""
        watched = [model.fp8 for model in self.step.models if model.fp8]
        for each in watched:
            each.watch(True)
        tensor, found = self.gradient_not_finite(step), [each.first for each in watched]
        for each in watched:
            each.watch(False)
        if watched:
            model, every = self.step.models[0].config, self.mesh.world.all_gather_bytes("\n".join(found).encode())
            names = "\n".join(map(bytes.decode, every)).split("\n")
            if first := first_of(names, model.layers(range(model.num_hidden_layers)), model.head):
                return first
        return tensor and f"the gradient of {tensor}"

    def gradient_not_finite(self, step: int) -> str | None:
        """The first tensor whose gradient was not finite in this step; in fp8 its passes are computed again."""
        raise NotImplementedError

    def close(self, failed: bool = False) -> None:
        """Close the pipeline's communicators. After a failure (``failed``) the abort of the world ends them."""
        if not failed:
            self.pipeline.close()

    # --- all ranks ---------------------------------------------------------------------------------------

    def reporters(self) -> list[int]:
        """The world ranks whose losses add up to the whole: ranks of the last stage that are first on the axis tp."""
        layout, schedule = self.mesh.layout, self.pipeline.schedule
        pp = schedule.place(schedule.stages - 1).rank
        return [layout.rank({"pp": pp, "dp": dp, "cp": cp}) for dp in range(layout.dp) for cp in range(layout.cp)]

    def result(self, reports: np.ndarray, norm: float, lr: float, seconds: float, count: float) -> StepResult:
        """The result of a step, computed on the host from the ``reports`` of all ranks and ``Step.count``."""
        losses, requests = reports[self.reporters(), STATUS_FIELDS:], reports[:, 0]
        total = math.fsum(losses.flat) if np.isfinite(losses).all() else float(losses.sum())
        loss, ranks = total / self.step.micro_batches, self.comm.size
        leaves: list[int] = np.flatnonzero(requests == LEAVE).tolist()
        stop = bool((requests == STOP).any()) or ranks - len(leaves) < self.config.least_ranks
        leaving, stay = list[int](), stop or (reports[:, STATUS_FIELDS - 1] == WRITING).any()
        for rank in leaves if not stay else ():  # not both that hold the same part of the state: one leaves later
            if not self.step.parallel.mirrored_shards or not {(rank - 1) % ranks, (rank + 1) % ranks} & {*leaving}:
                leaving.append(rank)
        joining = 0 if stay else min(int(reports[:, STATUS_FIELDS - 1].max()), self.config.most_ranks(ranks) - ranks)
        counted = not math.isinf(count)
        return StepResult(loss, norm, lr, seconds, stop, tuple(leaving), joining, ranks, self.epoch, counted)

    def synchronize(self, until: Callable[[], bool] | None = None) -> None:
        """Wait for all queued work of all communicators, or until ``until()`` is true; raises the error of any of it.

        After a failed collective the GPU continues without its data.
        """
        for comm in (*self.mesh.communicators(), *self.pipeline.communicators()):
            comm.synchronize(until=until)

    def first_of_all(self, name: str | None) -> str | None:
        """The first tensor that any rank names, in the order in which a backward goes through the model."""
        named = {each.decode() for each in self.mesh.world.all_gather_bytes((name or "").encode())} - {""}
        return min(named, key=[*self.step.models[0].config.parameter_shapes()].index, default=None)

    # --- validation --------------------------------------------------------------------------------------

    def evaluate(self) -> dict[str, float]:
        """``val_loss``, and ``val_loss/NAME`` of the sources of a mixture and of ``--eval-data``.

        That of a mixture is the mean of its sources' by their weights, of those that have validation data.
        """
        mixture, weights = self.data.mixture, self.step.as_read(self.whole_weights())
        losses = {name: self._loss(data, weights) for name, data in self.data.evaluated.items()}
        if mixture is None or "val_loss" in losses or not self.data.validated:
            return losses
        shares = dict(zip(mixture.parts, mixture.weights, strict=True))
        terms = [(shares[name], losses[f"val_loss/{name}"]) for name in shares if f"val_loss/{name}" in losses]
        share, loss = (sum(each) for each in zip(*((share, share * loss) for share, loss in terms), strict=True))
        return {"val_loss": float(loss / share), **losses}

    def _loss(self, data: Dataset, weights: Weights) -> float:
        """The mean loss over all targets of the validation windows that are not left out."""
        starts, dp, masked = data.val_starts(), self.mesh.dp, self.data.masks_targets or data.masks_targets
        most, count = len(self.micro_batches[0]), float(starts.shape[1] * self.data.seq_len)
        windows = (
            (index, starts[index, at : at + most])
            for index in range(dp.rank, len(starts), dp.size) for at in range(0, starts.shape[1], most)
        )  # fmt: skip
        pieces = [
            Piece([index // dp.size], len(each) * data.seq_len, partial(data.windows, data.val, each))
            for index, each in windows
        ]
        total, targets = self.losses(weights, pieces, partial(Model.loss_of, count=count))
        loss = math.fsum(itertools.chain(*total)) / len(starts)
        return loss * count * len(starts) / sum_over(dp, int(targets)) if masked else loss

    def loss_of(self, batches: Sequence[Batch], rows: Rows) -> float:
        """The mean loss over all targets of ``batches`` that are not left out; ``rows`` as for ``OwnBatches``.

        Every pass has as many sequences as a micro-batch; the last ones of a batch are filled up.
        """
        most, dp = len(self.micro_batches[0]), self.mesh.dp
        mine = batches if rows == "own" else batches[dp.rank :: dp.size]
        starts = ((batch, at) for batch in mine for at in range(0, len(batch.tokens), most))
        pieces = [batch.rows(slice(at, at + most)) for batch, at in starts]
        targets, weights = sum_over(dp, sum(map(counted, pieces))), self.step.as_read(self.whole_weights())
        result = partial(Model.loss_of, count=float(max(1, targets)))
        filled = [Piece([0], most * self.config.seq_len, partial(_filled, piece, most)) for piece in pieces]
        return math.fsum(itertools.chain(*self.losses(weights, filled, result)[0]))

    def losses(
        self, weights: Weights, pieces: Sequence[Piece], result: Result, of_batch: Callable[[Batch], Any] = counted
    ) -> tuple[list[np.ndarray], Any]:
        """The losses of this rank's ``pieces``: ``result`` of each is added to the sums of its numbers.

        Returns the sums of each rank of ``reporters``, and the sum of ``of_batch`` over this rank's batches.
        """
        sums, seen = np.zeros(1 + max((max(piece.numbers) for piece in pieces), default=0)), 0
        for action, batch, losses in self.forwards(weights, pieces, result):
            if action.chunk == 0:
                seen += of_batch(batch)
            if losses is not None:
                sums[pieces[action.micro_batch].numbers] += losses
        return self.reported(sums), seen

    def reported(self, values: np.ndarray) -> list[np.ndarray]:
        """The ``values``, float64, of all ranks of ``reporters``.  Waits until all queued work is complete."""
        self.synchronize()
        gathered = self.mesh.world.all_gather_bytes(values.tobytes())
        return [np.frombuffer(gathered[rank]) for rank in self.reporters()]

    def forwards(
        self, weights: Weights, pieces: Sequence[Piece], result: Result
    ) -> Iterator[tuple[Action, Batch, Any]]:
        """Run the forward of this rank's ``pieces``, without a backward.

        Yields each of this rank's actions, its whole batch, and on the last stage the ``result`` of its output, on
        others None.  Collective over the ranks that hold one model, which all have the same pieces.
        """
        first, stages = self.step.models[0], self.step.stages
        if not pieces:
            return
        schedule = forward_only(self.pipeline.schedule, len(pieces))
        rows = [first.tensor.rows(piece.tokens // first.context.size) for piece in pieces]
        for action, received in self.pipeline.inputs(schedule.actions[self.mesh.pp.rank], rows):
            self.show("validation", action.micro_batch / len(pieces))
            batch = pieces[action.micro_batch].make()
            yield action, batch, stages.forward(action, weights, received, first.context.take(batch), result)
        stages.clear()

    def evaluated_at_once(self) -> set[int]:
        """The numbers of sequences that a pass of validation has, a micro-batch at most."""
        shapes, most = [data.val_starts().shape for data in self.data.evaluated.values()], len(self.micro_batches[0])
        return {size for batches, rows in shapes if batches for size in (min(most, rows), rows % most)} - {0}

    # --- text --------------------------------------------------------------------------------------------

    def decoder(self, sequences: int, capacity: int) -> Decoder | None:
        """A decoder of the model; None on ranks that take no part."""
        weights, mesh, step = self.whole_weights(), self.mesh, self.step
        if mesh.dp.rank or mesh.cp.rank:  # one of the ranks that hold the same weights is enough
            return None
        model, in_8_bits, stages = step.models[0].config, bool(step.quantized), None
        if mesh.pp.size > 1 or in_8_bits:
            ranks = mesh.model_parallel
            stages = RunStages(self.parts, self.pipeline, ranks, model.hidden_size, step.dtype, in_8_bits)
        return Decoder(model, step.ops, weights, sequences, capacity, mesh.tp, stages)

    # --- state -----------------------------------------------------------------------------------------

    @cached_property
    def state(self) -> ShardedState:
        """The weights and the optimizer's state of this rank, to be read and saved."""
        step, model, stages = self.step, self.step.models[0], self.pipeline.schedule.stages_of_ranks
        about = self.mesh, model.config, stages, step.optimizer, step.parallel, model.ops, model.arena
        return ShardedState(*about, step.frozen, step.quantized.values())

    def read(
        self, weights: Tensors, state: Tensors | None = None, step: int = 0, residual: Tensors | None = None,
        updates: int = 0,
    ) -> None:  # fmt: skip
        """Fill this rank's weights, optimizer state and residual, after ``step`` steps; does not wait for other ranks.

        ``updates`` of these steps were not skipped.
        """
        what = "preparing the weights" if state is None else "loading the checkpoint"
        self.state.read(weights, state, step, partial(self.show, what), residual, updates)
        self.loaded()

    def draw_weights(self, base: Tensors | None = None) -> None:
        """Draw this rank's initial weights, or the adapters of those of ``base``; waits for no other rank."""
        share = (os.cpu_count() or 1) // self.mesh.world.local_size
        threads = max(1, min(share, len(os.sched_getaffinity(0))))
        names = [name for name in self.state.names if base is None or is_adapter(name)]
        drawn = InitialWeights(self.step.models[0].config, self.config.seed, names, threads)
        with contextlib.closing(drawn):
            self.read(drawn if base is None else Joined(base, drawn))

    def whole_weights(self) -> Weights:
        """The weights that passes read; with ZeRO-1 each rank's are gathered first."""
        weights, parallel = self.step.weights, self.step.parallel
        if parallel.sharded:
            for _ in parallel.gather(weights).values():
                pass  # each read waits
            parallel.synchronize()  # what waits for a GPU next knows no timeout
        return self.step.with_frozen(weights)


class RunStages(NamedTuple):
    """The stages that the ranks of one model hold in training: the ``parts`` of this rank, and how they are joined."""

    parts: Sequence[Local]
    pipeline: Pipeline
    ranks: Axis
    """Those that hold the model together."""
    hidden_size: int
    dtype: Any
    in_8_bits: bool
    """Whether linear layers have weights in 8 bits."""

    def join(self, models: Sequence[Model]) -> Stages:
        """The stages with these models, for ``logits``."""
        return Stages(models, self.pipeline)

    def logits(self, stages: Stages, weights: Weights, tokens: Any, cache: Cache, rows: slice) -> np.ndarray:
        """The logits of ``rows`` after a forward through all stages, on every rank."""
        found, batch = None, Batch(tokens)
        for chunk, model in enumerate(stages.models):
            action, shape = Action("F", 0, chunk), (tokens.size, self.hidden_size)
            received = self.pipeline.receive(action, partial(model.arena.take, shape, self.dtype))
            result = partial(Model.logits_of, rows=rows)
            found = stages.forward(action, weights, received, batch, result, cache)
        stages.clear()
        mine = b"" if found is None else np.asarray(found, np.float32).tobytes()
        every = self.ranks.comm.all_gather_bytes(mine) if self.ranks.size > 1 else [mine]
        return np.frombuffer(next(filter(None, every)), np.float32).reshape(rows.stop - rows.start, -1)


def _filled(batch: Batch, rows: int) -> Batch:
    """``batch`` with so many rows; in those that are added, the loss leaves out all targets."""
    more = ((0, rows - len(batch.tokens)), (0, 0))
    filled = batch.map(lambda field: np.pad(field, more))
    return filled._replace(targets=np.pad(batch.targets, more, constant_values=LEFT_OUT))


# --- --check-replicas: ranks that hold copies of weights or optimizer state compare hashes of them -----------


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
        split = placements[name].along("tp")
        shard = f" (part {split.part} of {split.parts})" if split and split.parts > 1 else ""
        of_tensor[name] = name + shard
        yield of_tensor[name], to_host(weights[name]).reshape(-1).view(np.uint8)
    others = {"master weights": optimizer.weights} if optimizer.weights is not step.weights else {}
    for kind, held in (others | optimizer.state).items():
        for name, span in held.spans.items():
            for start, stop, at in held.held(span):
                part = f"{kind} of {of_tensor[name]}, elements {start - span.start} to {stop - span.start}"
                yield part, to_host(held.flat[at : at + stop - start]).view(np.uint8)
