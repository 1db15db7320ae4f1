"""What the engines of CPUs and GPUs have in common beside the step: models, validation, text, state."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from kos.train.checkpoint.state import ShardedState, Tensors
from kos.train.config.options import TrainConfig
from kos.train.data.batches import LEFT_OUT, Dataset
from kos.train.engine.stage import make_stage
from kos.train.model.gpt2 import make_model
from kos.train.model.initial import InitialWeights
from kos.train.model.llama import LOOKUPS, Slot, Weights
from kos.train.model.llama_config import LlamaConfig
from kos.train.model.parameters import Parameters
from kos.train.ops import Array, Ops
from kos.train.parallel import schedules
from kos.train.parallel.data import TreeSum, make_buckets, shard_batch
from kos.train.parallel.mesh import Mesh
from kos.train.parallel.pipeline import Pipeline
from kos.train.parallel.schedules import Action, forward_only
from kos.train.parallel.tensor import TensorParallel
from kos.train.train import Buffer, Step

Show = Callable[[str, float], None]
"""Called between the parts of what takes long, with what it is and the share that is done."""


class Engine(Step):
    """A model in training: its weights and moments live where the engine computes. All calls are collective.

    An engine sets what is declared here and in ``Step``, then calls ``build_models``. ``parts`` are the parts of the
    model that this rank holds, a stage each. ``micro_batches`` are its rows of the batch.
    """

    optimizer: Any  # weights, exp_avg and exp_avg_sq, as Parameters or this rank's Shard
    state: ShardedState

    place: str
    """The device, for errors."""

    asked: Callable[[], bool] = staticmethod(lambda: False)
    """Whether this rank was asked to stop: looked at again at the end of a step that takes long."""

    def __init__(self, config: TrainConfig, model: LlamaConfig, data: Dataset, mesh: Mesh, show: Show) -> None:
        self.config, self.data, self.mesh, self.show = config, data, mesh, show
        assert config.micro_batch_size is not None  # for_world has chosen it
        self.micro_batches = shard_batch(config.batch_size, config.micro_batch_size, mesh.dp.rank, mesh.dp.size)
        self.accumulation_steps = len(self.micro_batches)
        schedule = schedules.build(config.pp_schedule, mesh.pp.size, self.accumulation_steps, config.pp_chunks)
        self.pipeline = Pipeline(mesh.pp, schedule)
        self.parts = model.parts(mesh.tp.rank, mesh.tp.size, mesh.pp.rank, schedule.stages_of_ranks)

    @property
    def micro_batches_of_all(self) -> int:
        """Micro-batches of a step, of all ranks."""
        return self.mesh.dp.size * self.accumulation_steps

    def describe(self) -> str:
        """Lines for the log: where it computes, and with how much memory."""
        raise NotImplementedError

    def trial(self) -> tuple[float, float] | None:
        """Seconds of a step and of a validation, tried before there are weights. None: not tried."""
        raise NotImplementedError

    def measures(self, tokens_per_second: float) -> dict[str, float]:
        """More metrics: per GPU, model flops utilisation by both conventions, memory in bytes."""
        raise NotImplementedError

    def not_finite(self, step: int) -> str | None:
        """The first tensor whose gradient was not finite in this step, which no later step followed."""
        raise NotImplementedError

    def make_array(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Memory that lasts."""
        raise NotImplementedError

    def sampling_ops(self) -> Ops:
        """Those that take a pass of any length."""
        raise NotImplementedError

    def close(self) -> None:
        """Free what would keep the communicator from ending; waits for nothing."""
        raise NotImplementedError

    def build_models(self, model: LlamaConfig, ops: Ops, dtype: Any, **options: Any) -> None:
        """``models``: this rank's stages, a model each; ``dtype`` is that of activations."""
        mesh, arena = self.mesh, ops.make_arena()
        self.models = [make_stage(self.config, model, ops, part, mesh, arena=arena, **options) for part in self.parts]
        self.model = self.models[0]
        self.tensor, self.context = self.model.tensor, self.model.context
        first, last = (any(getattr(m.local, end) for m in self.models) for end in ("first", "last"))
        for each in self.models:
            each.holds_first, each.holds_last = first, last
        self.tied_apart = model.tie_word_embeddings and first != last
        self.replicated = {name for name, shape in self.gradients.shapes.items() if len(shape) == 1}
        assert self.config.micro_batch_size is not None
        tokens = self.config.micro_batch_size * self.config.seq_len // mesh.cp.size
        self._shape = self.tensor.rows(tokens), model.hidden_size
        self._dtype = dtype
        self._free = [Slot(ops.make_arena()) for _ in range(self.pipeline.schedule.slots[mesh.pp.rank])]
        # One that is received into, one that is computed with, one that is sent from; each way.
        sizes = {True: 3, False: 3} if mesh.pp.size > 1 else {True: 0, False: 1}
        self._buffers = {
            forward: [Buffer(self.make_array(self._shape, dtype)) for _ in range(size)]
            for forward, size in sizes.items()
        }

    def sum_lookups_apart(self) -> None:
        """With ``--deterministic``: a tied embedding's lookups get a sum of their own, as on two ends of a pipeline."""
        model, like = self.model.config, self.gradients
        if self.parallel.tree is None or not model.tie_word_embeddings or not any(part.first for part in self.parts):
            return
        lookups = Parameters({LOOKUPS: like[model.embedding].shape}, like.flat.dtype, None, like.zeros, like.multiple)
        longest = max(bucket.stop - bucket.start for bucket in self.parallel.buckets)
        buckets = make_buckets(lookups.flat.size, like.multiple, longest, longest)
        self.lookup_sum = TreeSum(self.mesh.dp, self.accumulation_steps, lookups, buckets, self.model.ops)

    # --- all ranks ---------------------------------------------------------------------------------------

    def counted(self) -> set[str]:
        """The tensors that count in the norm of the gradient on this rank: each on one of those that hold it whole."""
        twice = {self.model.config.embedding} if self.tied_apart and self.models[-1].local.last else set()
        return set(self.gradients) - (self.replicated if self.mesh.tp.rank > 0 else set()) - twice

    def reporters(self) -> list[int]:
        """The ranks whose losses add up to all."""
        return self.mesh.reporters(self.pipeline.schedule.place(self.pipeline.schedule.stages - 1).rank)

    def synchronize(self, until: Callable[[], bool] | None = None) -> None:
        """Wait for what all communicators have queued, or ``until`` that is true; raises what stopped any of it.

        A GPU goes on without the data that a failed one has not brought.
        """
        for comm in (*self.mesh.communicators(), *self.pipeline.communicators()):
            comm.synchronize(until=until)

    def first_of_all(self, name: str | None) -> str | None:
        """The first tensor that any rank names, in the order in which a backward goes through the model."""
        said = {each.decode() for each in self.mesh.world.all_gather_bytes((name or "").encode())} - {""}
        return min(said, key=[*self.model.config.parameter_shapes()].index, default=None)

    # --- validation --------------------------------------------------------------------------------------

    def evaluate(self) -> float:
        """The mean loss over the validation windows."""
        weights, batches, dp = self.whole_weights(), self.data.val_batches(), self.mesh.dp
        sums = np.zeros(-(-len(batches) // dp.size))
        pieces = list(self._validation(batches))
        self._in_flight = {}
        if pieces:
            schedule = forward_only(self.pipeline.schedule, len(pieces))
            for action, received in self._with_inputs(schedule.actions[self.mesh.pp.rank]):
                index, rows, count = pieces[action.micro_batch]
                self.show("validation", action.micro_batch / len(pieces))
                tokens, targets = (self.context.take(x[rows]) for x in batches[index]())
                sums[index // dp.size] += self._evaluate(action, weights, received, tokens, targets, count)
            for buffer in self._buffers[True]:
                buffer.free()
        self.synchronize()
        said = self.mesh.world.all_gather_bytes(sums.tobytes())
        return math.fsum(np.frombuffer(b"".join(said[rank] for rank in self.reporters()))) / len(batches)

    def _validation(self, batches: Sequence[Callable[[], Any]]) -> Iterator[tuple[int, slice, int]]:
        """This rank's pieces, of a micro-batch at most: of which batch, which rows, how many targets that has."""
        most = self.config.micro_batch_size or 1
        for index in range(self.mesh.dp.rank, len(batches), self.mesh.dp.size):
            _, targets = batches[index]()
            count = max(1, int(np.count_nonzero(targets != LEFT_OUT)))
            yield from ((index, slice(at, at + most), count) for at in range(0, len(targets), most))

    def _evaluate(
        self, action: Action, weights: Weights, received: Buffer | None, tokens: Any, targets: Any, count: int
    ) -> float:
        """A stage of a piece; on the last stage the sum of this rank's losses over ``count``."""
        model, ops, rows = self.models[action.chunk], self.model.ops, self.tensor.rows(tokens.size)
        came = received.array if received is not None else None
        if (from_own := self._in_flight.pop((action.micro_batch, action.chunk - 1), None)) is not None:
            came = from_own.out_nD
            from_own.clear()
            self._free.append(from_own)
        with ops.step(model.arena):
            x_nD = model.evaluate_stage(weights, tokens, came[:rows] if came is not None else None)
            if model.local.last:
                loss = model.arena.take((1,), np.dtype(np.float64))
                of_all = model.arena.take((1,), ops.statistics_dtype(x_nD.dtype))
                ops.copy(np.full_like(ops.to_host(of_all), count), of_all)
                model.evaluate_loss(weights, x_nD, targets, loss, of_all)
                return float(ops.to_host(loss)[0])
            if self.pipeline.own_destination(action) is not None:
                slot = self._free.pop() if self._free else Slot(ops.make_arena())
                self._in_flight[action.micro_batch, action.chunk] = slot
                slot.out_nD = slot.arena.take(self._shape, self._dtype)
                ops.copy(x_nD, slot.out_nD[:rows])
                return 0.0
            buffer = received or self._buffer(True)
            if received is None:
                ops.copy(x_nD, buffer.array[:rows])
            buffer.sent = self.pipeline.send(action, buffer.array[:rows])
            return 0.0

    # --- text --------------------------------------------------------------------------------------------

    def sampler(self) -> Callable[[np.ndarray], np.ndarray] | None:
        """What gives the logits (V,) of the token after (1, T); None on ranks that take no part."""
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
                        self.pipeline.receive(action, x_nD).wait()
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

    def make_state(self, model: LlamaConfig) -> ShardedState:
        """Once all that is declared is there, and the models."""
        stages, ops, arena = self.pipeline.schedule.stages_of_ranks, self.model.ops, self.model.arena
        return ShardedState(self.mesh, model, stages, self.optimizer, self.parallel, ops, arena)

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
