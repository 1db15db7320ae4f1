"""What the engines of CPUs and GPUs have in common besides the step: models, validation, text, state."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np

from kos.train.checkpoint.state import ShardedState, Tensors
from kos.train.config.options import TrainConfig
from kos.train.data.batches import LEFT_OUT, Dataset
from kos.train.data.corpus import Show
from kos.train.engine.stage import make_stage, split_of
from kos.train.model.gpt2 import make_model
from kos.train.model.initial import InitialWeights
from kos.train.model.llama import LOOKUPS, Slot, Weights
from kos.train.model.llama_config import LlamaConfig
from kos.train.model.parameters import Parameters
from kos.train.ops import Ops
from kos.train.parallel import schedules
from kos.train.parallel.data import DataParallel, make_buckets, shard_batch
from kos.train.parallel.failures import raised_on_every_rank
from kos.train.parallel.gradients import GradientSums
from kos.train.parallel.mesh import Mesh
from kos.train.parallel.pipeline import Buffer, Pipeline
from kos.train.parallel.schedules import Action, forward_only
from kos.train.parallel.tensor import TensorParallel
from kos.train.parallel.tree_sum import TreeSum
from kos.train.train import Step, StepResult


class Buckets(NamedTuple):
    """How the gradients of a rank lie in memory, and how they are summed over ranks."""

    multiple: int  # elements
    nbytes: int  # of a bucket
    least: int  # bytes of the last buckets
    staging: int = 0  # bytes into which copy engines write the terms of a sum


class Engine(Step):
    """A model in training, with weights and moments on the device that computes. All calls are collective.

    An engine sets the attributes declared here and in ``Step``, with ``build``. ``parts`` are the parts of the model
    that this rank holds, a stage each. ``micro_batches`` are its rows of the batch.
    """

    optimizer: Any  # weights, exp_avg and exp_avg_sq, as Parameters or this rank's Shard

    place: str
    """The device, for errors."""

    asked: Callable[[], bool] = staticmethod(lambda: False)
    """Whether this rank was asked to stop: looked at again at the end of a step that takes long."""

    def __init__(self, config: TrainConfig, model: LlamaConfig, data: Dataset, mesh: Mesh, show: Show) -> None:
        self.config, self.data, self.mesh, self.comm, self.show = config, data, mesh, mesh.world, show
        assert config.micro_batch_size is not None  # for_world has chosen it
        self.micro_batches = shard_batch(config.batch_size, config.micro_batch_size, mesh.dp.rank, mesh.dp.size)
        self.accumulation_steps = len(self.micro_batches)
        with raised_on_every_rank():
            split_of(config, model, mesh)  # raises where it does not fit the ranks
            schedule = schedules.build(config.pp_schedule, mesh.pp.size, self.accumulation_steps, config.pp_chunks)
            self.parts = model.parts(mesh.tp.rank, mesh.tp.size, mesh.pp.rank, schedule.stages_of_ranks)
        self.pipeline = Pipeline(mesh.pp, schedule)

    @property
    def micro_batches_of_all(self) -> int:
        """Micro-batches of a step, of all ranks."""
        return self.mesh.dp.size * self.accumulation_steps

    def describe(self) -> str:
        """Lines for the log: the device, and the memory in use."""
        raise NotImplementedError

    def trial(self) -> tuple[float, float] | None:
        """Seconds of a step and of a validation, tried before there are weights. None: not tried."""
        return None

    def measures(self, tokens_per_second: float) -> dict[str, float]:
        """More metrics of a GPU: model flops utilisation by both conventions, memory in bytes."""
        return {}

    def not_finite(self, step: int) -> str | None:
        """The first tensor whose gradient was not finite in this step, which no later step followed."""
        raise NotImplementedError

    def sampling_ops(self) -> Ops:
        """The stages that accept a pass of any length."""
        raise NotImplementedError

    def close(self, failed: bool = False) -> None:
        """Close the pipeline's communicators. After a failure (``failed``) the abort of the world ends them."""
        if not failed:
            self.pipeline.close()

    @property
    def sharded(self) -> bool:
        """Whether each rank holds a part of the optimizer's state (ZeRO-1)."""
        return self.config.zero == 1 and self.mesh.gradients.size > 1

    def build(
        self, model: LlamaConfig, ops: Ops, gradients: Parameters, dtype: Any, buckets: Buckets,
        head_rows: int | None = None,
    ) -> None:  # fmt: skip
        """Make ``models`` (this rank's stages, a model each), their message buffers, slots and sums of ``gradients``.

        ``dtype`` is the dtype of activations. ``head_rows``: tokens whose logits are in memory at once.
        """
        config, mesh, schedule = self.config, self.mesh, self.pipeline.schedule
        options: dict[str, Any] = {"arena": ops.make_arena(), "recompute": config.recompute, "head_rows": head_rows}
        self.models = [make_stage(config, model, ops, part, mesh, **options) for part in self.parts]
        self.model = self.models[0]
        self.tensor, self.context = self.model.tensor, self.model.context
        first, last = (any(getattr(part, end) for part in self.parts) for end in ("first", "last"))
        for each in self.models:
            each.holds_first, each.holds_last = first, last
        assert config.micro_batch_size is not None
        tokens = config.micro_batch_size * config.seq_len // mesh.cp.size
        self._shape, self._dtype = (self.tensor.rows(tokens), model.hidden_size), dtype
        self.slots = [Slot(ops.make_arena()) for _ in range(schedule.slots[mesh.pp.rank])]
        self.pipeline.make_buffers(lambda: ops.zeros(self._shape, dtype))

        self.gradients, steps, lookups = gradients, self.accumulation_steps, None
        self.parallel = DataParallel(
            mesh.gradients, gradients, ops, in_order=(mesh.dp, steps) if config.deterministic else None,
            bucket_bytes=buckets.nbytes, least_bytes=buckets.least, sharded=self.sharded,
        )  # fmt: skip
        if config.deterministic and model.tie_word_embeddings and first:  # as on two ends of a pipeline
            table, multiple = {LOOKUPS: gradients[model.embedding].shape}, gradients.multiple
            apart = Parameters(table, gradients.flat.dtype, None, gradients.zeros, multiple)
            longest = max(bucket.stop - bucket.start for bucket in self.parallel.buckets)
            lookups = TreeSum(mesh.dp, steps, apart, make_buckets(apart.flat.size, multiple, longest, longest), ops)
        tied_apart = model.tie_word_embeddings and first != last
        self.sums = GradientSums(self.model, self.parallel, self.pipeline, steps, tied_apart, lookups)

    # --- all ranks ---------------------------------------------------------------------------------------

    def counted(self) -> set[str]:
        """The tensors that count in the norm of the gradient on this rank: each on one of those that hold it whole."""
        twice = {self.model.config.embedding} if self.sums.tied_apart and self.models[-1].local.last else set()
        return set(self.gradients) - (self.sums.replicated if self.mesh.tp.rank > 0 else set()) - twice

    def reporters(self) -> list[int]:
        """The world ranks whose losses add up to the whole: ranks of the last stage that are first on the axis tp."""
        layout, schedule = self.mesh.layout, self.pipeline.schedule
        pp = schedule.place(schedule.stages - 1).rank
        return [layout.rank({"pp": pp, "dp": dp, "cp": cp}) for dp in range(layout.dp) for cp in range(layout.cp)]

    def result(self, reports: np.ndarray, norm: float, lr: float, seconds: float) -> StepResult:
        """The result of a step, computed on the host from the ``reports`` of all ranks."""
        losses = reports[self.reporters(), 1:]
        total = math.fsum(losses.flat) if np.isfinite(losses).all() else float(losses.sum())
        return StepResult(total / self.micro_batches_of_all, norm, lr, seconds, bool(reports[:, 0].any()))

    def synchronize(self, until: Callable[[], bool] | None = None) -> None:
        """Wait for all queued work of all communicators, or until ``until()`` is true; raises the error of any of it.

        After a failed collective the GPU continues without its data.
        """
        for comm in (*self.mesh.communicators(), *self.pipeline.communicators()):
            comm.synchronize(until=until)

    def first_of_all(self, name: str | None) -> str | None:
        """The first tensor that any rank names, in the order in which a backward goes through the model."""
        named = {each.decode() for each in self.mesh.world.all_gather_bytes((name or "").encode())} - {""}
        return min(named, key=[*self.model.config.parameter_shapes()].index, default=None)

    # --- validation --------------------------------------------------------------------------------------

    def evaluate(self) -> float:
        """The mean loss over the validation windows."""
        weights, starts, dp = self.whole_weights(), self.data.val_starts(), self.mesh.dp
        most = len(self.micro_batches[0])
        sums, counts = np.zeros(-(-len(starts) // dp.size)), dict[int, int]()
        pieces = [
            (index, starts[index, at : at + most])
            for index in range(dp.rank, len(starts), dp.size) for at in range(0, starts.shape[1], most)
        ]  # fmt: skip
        self._in_flight = {}
        if pieces:
            schedule = forward_only(self.pipeline.schedule, len(pieces))
            rows = [self.tensor.rows(len(windows) * self.data.seq_len // self.context.size) for _, windows in pieces]
            for action, received in self.pipeline.inputs(schedule.actions[self.mesh.pp.rank], rows):
                index, windows = pieces[action.micro_batch]
                self.show("validation", action.micro_batch / len(pieces))
                if index not in counts:
                    _, of_batch = self.data.windows(self.data.val, starts[index])
                    counts = {index: max(1, int(np.count_nonzero(of_batch != LEFT_OUT)))}
                tokens, targets = map(self.context.take, self.data.windows(self.data.val, windows))
                sums[index // dp.size] += self._evaluate(action, weights, received, tokens, targets, counts[index])
            self.pipeline.free_buffers()
        self.synchronize()
        gathered = self.mesh.world.all_gather_bytes(sums.tobytes())
        return math.fsum(np.frombuffer(b"".join(gathered[rank] for rank in self.reporters()))) / len(starts)

    def evaluated_at_once(self) -> set[int]:
        """The numbers of sequences that a pass of validation has, a micro-batch at most."""
        (batches, rows), most = self.data.val_starts().shape, len(self.micro_batches[0])
        return {min(most, rows), rows % most} - {0} if batches else set()

    def _evaluate(
        self, action: Action, weights: Weights, received: Buffer | None, tokens: Any, targets: Any, count: int
    ) -> float:
        """A stage of a piece; on the last stage the sum of this rank's losses over ``count``."""
        model, ops, rows = self.models[action.chunk], self.model.ops, self.tensor.rows(tokens.size)
        came = received.array if received is not None else None
        if (from_own := self._in_flight.pop((action.micro_batch, action.chunk - 1), None)) is not None:
            came = from_own.out_nD
            from_own.clear()
            self.slots.append(from_own)
        with ops.step(model.arena):
            x_nD = model.evaluate_stage(weights, tokens, came[:rows] if came is not None else None)
            if model.local.last:
                loss = model.arena.take((1,), np.dtype(np.float64))
                of_all = model.arena.take((1,), ops.statistics_dtype(x_nD.dtype))
                ops.copy(np.full_like(ops.to_host(of_all), count), of_all)
                model.evaluate_loss(weights, x_nD, targets, loss, of_all)
                return float(ops.to_host(loss)[0])
            if self.pipeline.own_destination(action) is not None:
                slot = self.slots.pop() if self.slots else Slot(ops.make_arena())
                self._in_flight[action.micro_batch, action.chunk] = slot
                slot.out_nD = slot.arena.take(self._shape, self._dtype)
                ops.copy(x_nD, slot.out_nD[:rows])
                return 0.0
            buffer = received or self.pipeline.buffer(forward=True)
            if received is None:
                ops.copy(x_nD, buffer.array[:rows])
            buffer.sent = self.pipeline.send(action, buffer.array[:rows])
            return 0.0

    # --- text --------------------------------------------------------------------------------------------

    def sampler(self) -> Callable[[np.ndarray], np.ndarray] | None:
        """The function that computes the logits (V,) of the token after (1, T); None on ranks that take no part."""
        weights, mesh, ops = self.whole_weights(), self.mesh, self.sampling_ops()
        if mesh.dp.rank or mesh.cp.rank:  # one of the ranks that hold the same weights is enough
            return None
        models = [make_model(each.config, ops, local=each.local, tensor=TensorParallel(
            ops, mesh.tp, each.local.vocabulary.start)) for each in self.models]  # fmt: skip

        def next_logits(tokens: np.ndarray) -> np.ndarray:
            length, mine, from_own = tokens.shape[1], b"", None
            tokens = np.pad(tokens, ((0, 0), (0, -length % mesh.tp.size)))  # what comes later changes nothing
            shape = models[0].tensor.rows(tokens.size), models[0].config.hidden_size
            for chunk, model in enumerate(models):
                action = Action("F", 0, chunk)
                with ops.step(model.arena):
                    x_nD = None if model.local.first else model.arena.take(shape, self._dtype)
                    if from_own is not None:
                        ops.copy(from_own, x_nD)
                    elif x_nD is not None:
                        self.pipeline.receive(action, x_nD)
                    x_nD = model.evaluate_stage(weights, tokens, x_nD)
                    if model.local.last:
                        mine = model.logits_of(weights, x_nD, length - 1).tobytes()
                    if (sent := self.pipeline.send(action, x_nD)) is not None:
                        sent.wait()
                    from_own = ops.to_host(x_nD) if self.pipeline.own_destination(action) is not None else None
            parts = mesh.model.comm.all_gather_bytes(mine) if mesh.model.size > 1 else [mine]
            return np.frombuffer(b"".join(parts), ops.to_host(models[0].arena.take((1,), self._dtype)).dtype)

        return next_logits

    # --- state -----------------------------------------------------------------------------------------

    @cached_property
    def state(self) -> ShardedState:
        """The weights and moments of this rank, to be read and saved."""
        model, stages = self.model, self.pipeline.schedule.stages_of_ranks
        return ShardedState(self.mesh, model.config, stages, self.optimizer, self.parallel, model.ops, model.arena)

    def read(self, weights: Tensors, moments: Tensors | None = None, step: int = 0) -> None:
        """Fill this rank's weights and moments, those of ``step``; waits for no other rank."""
        what = "preparing the weights" if moments is None else "loading the checkpoint"
        self.state.read(weights, moments, step, partial(self.show, what))

    def draw_weights(self) -> None:
        """Draw this rank's initial weights; waits for no other rank."""
        share = (os.cpu_count() or 1) // self.mesh.world.local_size
        threads = max(1, min(share, len(os.sched_getaffinity(0))))
        drawn = InitialWeights(self.model.config, self.config.seed, self.state.placements, threads)
        with contextlib.closing(drawn):
            self.read(drawn)

    def whole_weights(self) -> Weights:
        """The weights that passes read; with ZeRO-1 each rank's are gathered first."""
        if self.parallel.sharded:
            self.parallel.gather(self.weights).wait()
            self.parallel.axis.comm.synchronize()  # what waits for a GPU next knows no timeout
        return self.weights
