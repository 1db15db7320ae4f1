"""The engine of GPUs: a whole optimizer step queued on one stream, captured once and replayed as a CUDA graph.

Weights are fp32 (the master copy) and, where passes compute in bf16, rounded to it by the optimizer; with
``--master-weights none`` they are bf16 alone, rounded at random.  Gradients add up in fp32, and with ``--grad-dtype
bfloat16`` the one micro-batch's are rounded where they are written and summed over ranks.  Micro-batches, gradient
collectives (on the communicator's stream, beside the backward), norm, clipping, learning rate and AdamW are all of
the graph; the host adds the next batch and fetches losses and norm when they are there, a step late, so that the
device never waits for it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kos.comm.rendezvous.base import host_id
from kos.cuda import driver
from kos.cuda.devices import device_info
from kos.cuda.driver import call, cu
from kos.cuda.graphs import Graph, capture
from kos.cuda.streams import Event
from kos.dtypes import DTYPES
from kos.memory.array import Array
from kos.memory.pool import pinned_empty, pool_of
from kos.train.checkpoint.huggingface import TensorFiles
from kos.train.checkpoint.shards import Shards
from kos.train.config.options import TrainConfig
from kos.train.data.batches import Dataset
from kos.train.engine import head_start
from kos.train.engine.feed import Feed
from kos.train.engine.machine import free_memory, peak_flops
from kos.train.engine.memory_plan import MemoryPlan, plan_memory
from kos.train.engine.protocol import Show, StepResult
from kos.train.engine.step import StepProgram
from kos.train.model.gpt2 import make_model
from kos.train.model.llama_config import LlamaConfig
from kos.train.model.parameters import Parameters, Shard
from kos.train.model.shapes import Local
from kos.train.ops.cuda import cublaslt, cudnn
from kos.train.ops.cuda.adamw import CHUNK, STATE, CudaAdamW
from kos.train.ops.cuda.dialect import FLOAT32, CudaOps
from kos.train.parallel import schedules
from kos.train.parallel.context import ContextParallel
from kos.train.parallel.data import DataParallel, deal, waiting_subtrees
from kos.train.parallel.failures import together
from kos.train.parallel.mesh import Mesh
from kos.train.parallel.pipeline import Pipeline
from kos.train.parallel.schedules import Schedule
from kos.train.parallel.tensor import TensorParallel

BUCKET_BYTES = 64 << 20  # at least
BUCKETS = 32  # about, at most: each waits, on all ranks, until a kernel ends and its own find multiprocessors
ALIGNED = 128  # elements: other ranks reach into buckets vector by vector
HEAD_ROWS = 8192  # tokens whose logits are in memory at once
DRAWN = 250_000  # elements of the weights drawn for the search; no power of two, or rows were each other's copies
_LOOK_EVERY = 2e-4  # seconds between two looks at whether a step is over


class Buckets(NamedTuple):
    """How the gradients of a rank lie in memory, and how they are summed over ranks."""

    multiple: int  # elements
    nbytes: int  # of a bucket
    staging: int  # bytes to which copy engines bring what is added
    lookups: bool  # whether the embedding's lookups are gathered instead of its gradient

    @classmethod
    def of(
        cls, config: TrainConfig, model: LlamaConfig, parts: Sequence[Local], mesh: Mesh, rounds: int, reaches: bool
    ) -> Buckets:
        """Of a rank of ``mesh``; ``reaches``: the ranks of a machine reach into one another's memory."""
        ranks, nbytes = mesh.gradients.size, BUCKET_BYTES
        if not config.deterministic:  # nothing overlaps then, and sums in rank order may need a bucket of each rank
            itemsize = DTYPES[config.grad_dtype].itemsize
            nbytes = max(BUCKET_BYTES, itemsize * model.num_parameters(*parts) // BUCKETS)
        multiple = ranks * (CHUNK if config.zero == 1 else ALIGNED) if ranks > 1 else 1
        staging = nbytes if reaches and ranks > 1 and not config.deterministic else 0
        lookups = ranks == mesh.layout.ranks > 1 and gathers_lookups(config, model, ranks, rounds)
        return cls(multiple, nbytes, staging, lookups)

    def plan(
        self, config: TrainConfig, model: LlamaConfig, parts: Sequence[Local], ops: CudaOps, mesh: Mesh,
        schedule: Schedule, sharing: int = 1, free: int | None = None,
    ) -> MemoryPlan:  # fmt: skip
        """The memory of a rank of ``mesh``, a silent one, one of ``sharing`` on its GPU."""
        bucket = max(self.nbytes // DTYPES[config.grad_dtype].itemsize, self.multiple)
        return plan_memory(
            config, model, parts, ops, mesh=mesh, schedule=schedule, head_rows=HEAD_ROWS, multiple=self.multiple,
            rounds=(rounds := schedule.micro_batches), sharing=sharing, lookups=self.lookups, staging=self.staging,
            waiting=waiting_subtrees(mesh.dp.rank, rounds) if config.deterministic else 0, bucket=bucket, free=free,
        )  # fmt: skip


class CudaEngine(StepProgram):
    """One GPU of this rank; with ``--zero 1`` it holds its share of master weights and moments only."""

    lag = 1

    def __init__(self, config: TrainConfig, model: LlamaConfig, data: Dataset, mesh: Mesh, show: Show) -> None:
        comm, group = mesh.world, mesh.gradients
        self.config, self.data, self.mesh, self.comm, self.group, self.show = config, data, mesh, comm, group, show
        device = comm.device or 0
        driver.set_device(device)
        self.place = f"cuda:{device} ({device_info(device).name})"
        ops = CudaOps(device)
        assert config.micro_batch_size is not None  # for_world has chosen it
        rounds = deal(config.batch_size, config.micro_batch_size, mesh.dp.rank, mesh.dp.size)
        self.accumulation_steps, self._micro_batches = len(rounds), mesh.dp.size * len(rounds)
        schedule = schedules.build(config.pp_schedule, mesh.pp.size, len(rounds), config.pp_chunks)
        self.pipeline = Pipeline(mesh.pp, schedule)
        parts = self.locals(model)
        if config.resume is None and config.init_from is None:  # beside what follows, if not begun already
            head_start.weights(model, config.seed, mesh.layout, comm.rank, self.stages())
        self.sharded = config.zero == 1 and group.size > 1
        uuids = comm.all_gather_bytes(device_info(ops.device).uuid.encode())
        self._reaches = group.size > 1 and "peer" in group.comm.backend_name
        silent = Mesh.silent(mesh.layout, comm.rank)
        buckets = Buckets.of(config, model, parts, silent, len(rounds), self._reaches)
        multiple, self.lookups = buckets.multiple, buckets.lookups

        shards = Shards(model, mesh.layout, self.stages())

        def plan() -> MemoryPlan:
            saved = {"tensors to be saved": shards.host_bytes(comm.rank, config.save_async)}
            MemoryPlan(saved, 0, free_memory() // comm.local_size, f"the host of rank {comm.rank}", {}).check()
            sharing = uuids.count(uuids[comm.rank])
            return buckets.plan(config, model, parts, ops, silent, schedule, sharing).check()

        heads = (parts[0].heads, parts[0].kv_heads, model.head_dim)
        shape = cudnn.Shape(config.micro_batch_size, config.seq_len // mesh.cp.size, *heads, config.dtype)
        asked: str = config.attention
        if config.deterministic or mesh.cp.size > 1:  # not by time; another rank's keys are for our own kernels
            asked = config.attention.replace("auto", "flash")
        self.attention = cudnn.choose(asked, shape, ops, comm, plan)
        self.chosen = {"attention": self.attention.partition(" (")[0]}
        pool_of(ops.device).trim()  # what was measured
        self.plan = together(comm, plan)
        self.ops = ops
        if not config.deterministic:
            ops.algorithms.update(self._search(model, len(rounds)))
        shapes, groups = model.parameter_shapes(*parts), model.fused_groups(*parts)
        self.gradients = Parameters(shapes, config.grad_dtype, groups, self._zeros, multiple)
        self.gradients.zeros = ops.zeros  # nobody reaches into what else is like them
        self.build_models(model, ops, DTYPES[config.dtype], head_rows=HEAD_ROWS, recompute=config.recompute)
        for arena, size in ((self.model.arena, self.plan.scratch), *((x.arena, self.plan.slot) for x in self._free)):
            arena.reserve(size)
            arena.fix()
        if mesh.pp.size > 1:
            micro, evaluated = config.micro_batch_size, [len(batch()[0]) for batch in data.val_batches()[:1]]
            sizes = {micro, *(min(micro, rows) for rows in evaluated), *(rows % micro for rows in evaluated)} - {0}
            for rows in sorted(sizes):
                own = self.tensor.rows(rows * config.seq_len // mesh.cp.size)
                self.pipeline.connect(self._rooms[True][0].array[:own])
        self.parallel = DataParallel(
            group, self.gradients, ops, in_order=(mesh.dp, len(rounds)) if config.deterministic else None,
            bucket_bytes=buckets.nbytes, least_bytes=buckets.nbytes // 4, sharded=self.sharded,
            lookups=model.embedding if self.lookups else None, tied=model.tie_word_embeddings,
        )  # fmt: skip
        dtype = config.master_dtype
        master = Shard(self.gradients, self.parallel.parts(), dtype) if self.sharded else self.gradients.like(dtype)
        copy = None
        if self.sharded:
            copy = Parameters(shapes, config.dtype, groups, self._zeros, multiple)
        elif config.dtype != dtype:
            copy = self.gradients.like(config.dtype)
        self.weights: Any = master if copy is None else copy  # what passes read
        self.optimizer = CudaAdamW(
            ops, master, copy, config.make_schedule(), betas=(config.beta1, config.beta2), eps=config.eps,
            weight_decay=config.weight_decay, grad_clip=config.grad_clip, skip_outliers=config.skip_outliers,
            seed=config.seed, counted=self.counted() if mesh.model.size > 1 else None,
        )  # fmt: skip
        self.state = self.make_state(model)
        self.feed = Feed(data, rounds, self.context, ops)
        self.count = self.feed.count
        # What a rank knows after a step: whether it was asked to stop, and its losses.
        self.known = ops.zeros(1 + len(rounds), np.float64)
        self.known_of_all = self.known if comm.size == 1 else ops.zeros((comm.size, 1 + len(rounds)), np.float64)
        self._graph: Graph | None = None
        self._late = [_Late(self.known_of_all, self.optimizer.state) for _ in range(self.lag + 2)]
        self._newest: _Late | None = None  # of the steps under way

    def _zeros(self, size: int, dtype: Any) -> Array:
        """Memory that the ranks of a machine reach into, where they can: collectives beside a pass leave it all SMs."""
        if not self._reaches:
            return self.ops.zeros(size, dtype)
        memory = self.group.comm.allocate(size, dtype)
        array = Array(memory.pointer, memory.shape, memory.dtype, memory.device, owner=memory, stream=self.ops.stream)
        self.ops.zero(array)
        return array

    def _search(self, model: LlamaConfig, rounds: int) -> dict[str, str]:
        """The fastest algorithms found for the matrix products: by one rank of a machine, for all and for later.

        Its passes, of two layers for all, are over before the optimizer's state takes the memory that they need; where
        this very code has made them before, with these shapes, all is found already.  They compute with numbers like
        those of a first step: the power that a product draws, and with it its time, depends on them.  What they do not
        meet takes cuBLASLt's first suggestion: nothing is timed later, on any rank.
        """
        ops, config = self.ops, self.config
        model = dataclasses.replace(model, num_hidden_layers=min(2, model.num_hidden_layers))
        silent = Mesh.silent(self.mesh.layout, self.comm.rank)
        tp, cp = silent.tp, silent.cp
        local = model.local(tp.rank, tp.size)

        def passes() -> dict[str, str]:
            sizes = {rows.stop - rows.start for _, rows, _ in self._validation(self.data.val_batches()[:1])}
            chosen = config.micro_batch_size, config.seq_len, config.dtype, config.grad_dtype, config.recompute
            code = [path for path in Path(__file__).parents[1].rglob("*") if path.suffix in (".py", ".cu", ".cuh")]
            about = hashlib.blake2b(
                repr((model, chosen, tp.size, cp.size, self.attention, rounds > 1, sorted(sizes))).encode()
            )
            for path in sorted(code):
                about.update(path.read_bytes())
            stored = cublaslt.stored_algorithms(ops.device)
            found = dict(stored.known)
            if about.hexdigest() in found:
                return found
            trying = CudaOps(ops.device, ops.stream, algorithms=found, search=True)
            trying.cudnn = ops.cudnn
            trial = make_model(
                model, trying, head_rows=HEAD_ROWS, recompute=config.recompute, local=local,
                tensor=TensorParallel(trying, tp, local.vocabulary.start), context=ContextParallel(trying, cp),
            )  # fmt: skip
            trial.arena.reserve(self.plan.arena)
            weights = Parameters(model.parameter_shapes(local), config.dtype, model.fused_groups(local), trying.zeros)
            gradients, loss = weights.like(config.grad_dtype), trying.zeros(1, np.float64)
            random = np.random.default_rng(0)
            _draw_quickly(weights, random, trying)
            shape = config.micro_batch_size or 1, config.seq_len // cp.size
            tokens = random.integers(model.vocab_size, size=shape).astype(np.int32)
            for accumulate in {False, rounds > 1}:
                with trying.step(trial.arena):
                    trial.queue_loss_and_gradients(weights, tokens, tokens, gradients, loss, accumulate=accumulate)
            for size in sizes:
                trial.loss(weights, tokens[:size], tokens[:size])
            stored.keep({**found, about.hexdigest(): "all were searched"})
            return found

        places = self.comm.all_gather_bytes(f"{host_id()} {device_info(ops.device).name}".encode())
        first = places.index(places[self.comm.rank])  # of the ranks with such a GPU on this machine
        found = together(self.comm, lambda: passes() if first == self.comm.rank else {})
        pool_of(ops.device).trim()  # pieces of other sizes than those that follow
        tables = self.comm.all_gather_bytes(json.dumps(found).encode())
        return dict(json.loads(tables[first]))

    def describe(self) -> str:
        about = device_info(self.ops.device)
        how = "one CUDA graph a step" if self.config.graph else "no graph"
        how += f", attention by {self.attention}"
        return f"on {about.name}, {self.config.dtype}, {how}; memory of each rank:\n{self.plan}"

    def trial(self) -> None:
        return None

    def measures(self, tokens_per_second: float) -> dict[str, float]:
        free, total = call(cu.cuMemGetInfo)
        each = tokens_per_second / self.comm.size
        columns = {"tokens_per_second_per_gpu": each, "memory_bytes": int(total - free)}
        peak = peak_flops(device_info(self.ops.device).name) if self.config.dtype == "bfloat16" else None
        if peak:
            flops = self.model.config.flops_per_token(self.config.seq_len)
            columns |= {f"mfu_{name}": each * per_token / peak for name, per_token in flops._asdict().items()}
        return columns

    # --- state ---------------------------------------------------------------------------------------

    def read(self, weights: TensorFiles, moments: TensorFiles | None, step: int) -> None:
        super().read(weights, moments, step)
        self.optimizer.refresh_copy()

    def draw_weights(self) -> None:
        model, mesh = self.model.config, self.mesh
        self.drawn = head_start.weights(model, self.config.seed, mesh.layout, mesh.world.rank, self.stages()).result()

    def share_weights(self) -> None:
        super().share_weights()
        head_start.weights.cache_clear()
        self.optimizer.refresh_copy()

    def spare_memory(self) -> Array:
        flat = self.gradients.flat
        shape = (flat.nbytes // FLOAT32.itemsize,)
        return Array(flat.pointer, shape, FLOAT32, flat.device, owner=flat, stream=flat.stream)

    # --- steps ---------------------------------------------------------------------------------------

    def start_step(self, step: int, stop: bool) -> None:
        stream, late = self.ops.stream, self._late[step % len(self._late)]
        driver.set_device(self.ops.device)
        late.begin(stream, self._newest)
        late.asked[0] = stop
        self.feed.take(step)
        self.known[:1].copy_from(late.asked, stream)
        if self.config.graph:
            self._graph = self._graph or self._capture()
            self._graph.replay(stream)
        else:
            self.queue_step()
        late.fetch(self.known_of_all, self.optimizer.state, stream)
        self._newest = late
        if step + 1 < self.config.steps:
            self.feed.fetch(step + 1)

    def _capture(self) -> Graph:
        """The step as a graph, after a rehearsal without effect has loaded all kernels and met all ranks."""
        count = self.optimizer.step_count
        self.optimizer.halt()
        self.queue_step()
        self.optimizer.step_count = count
        with capture(self.ops.stream) as graph:
            self.queue_step()
        return graph

    def micro_batch(self, index: int) -> tuple[Array, Array]:
        return self.feed.batch[index][0], self.feed.batch[index][1]

    def queue_norm(self) -> None:
        of_parts = self.group.comm.all_reduce if self.sharded else None
        of_model = self.mesh.model.comm.all_reduce if self.mesh.model.size > 1 else None
        self.optimizer.queue_norm(self.gradients, of_parts, of_model)

    def queue_update(self) -> None:
        self.optimizer.queue_update(self.gradients, 1 / self._micro_batches)

    def finish_step(self, step: int) -> StepResult:
        late = self._late[step % len(self._late)]

        def over() -> bool:
            done = late.there.done()
            if not done:
                time.sleep(_LOOK_EVERY)
            return done

        if self.comm.size > 1:  # raises what stopped the collectives of a graph, whose step is over but of no use
            self.synchronize(until=over)
        while not over():
            pass
        if self._newest is late:
            self._newest = None
        answers = late.answers.reshape(self.comm.size, -1)
        losses = answers[self.reporters(), 1:]
        after = dict(zip(STATE, map(float, late.state), strict=True))
        loss = float(losses.sum()) / self._micro_batches
        if math.isfinite(loss):
            loss = math.fsum(losses.flat) / self._micro_batches
        return StepResult(loss, after["norm"], after["lr"], late.seconds(), bool(answers[:, 0].any()))

    def not_finite(self, step: int) -> str | None:
        self.feed.take(step)  # nothing has changed since, but the gradients are those of a later step
        self.queue_gradients()
        self.queue_norm()
        return self.first_of_all(self.optimizer.not_finite())

    # --- between steps -------------------------------------------------------------------------------

    def make_array(self, shape: tuple[int, ...], dtype: Any) -> Array:
        return self.ops.zeros(shape, dtype)

    def sampling_ops(self) -> CudaOps:
        return CudaOps(self.ops.device, self.ops.stream)  # each length is met once: not worth a search

    def close(self) -> None:
        self._graph = None  # NCCL ends no communicator of which a graph holds calls
        self.pipeline.close()


def gathers_lookups(config: TrainConfig, model: LlamaConfig, ranks: int, rounds: int) -> bool:
    """Whether the rows that all ranks look up in a step are fewer bytes on the wire than the embedding's gradient.

    That is the last gradient of a backward, and no computation is left to hide its sum.
    """
    if config.deterministic or config.micro_batch_size is None:
        return False
    gathered = ranks * config.micro_batch_size * config.seq_len * DTYPES[config.dtype].itemsize
    summed = (2 - config.zero) * DTYPES[config.grad_dtype].itemsize * model.vocab_size  # an all-reduce moves it twice
    return gathered < summed and (model.tie_word_embeddings or rounds == 1)


def _draw_quickly(weights: Parameters, random: np.random.Generator, ops: CudaOps) -> None:
    """Norms at 1, biases at 0, the rest normal of deviation 0.02: ``DRAWN`` numbers over and over."""
    flat, there = weights.flat, min(DRAWN, weights.flat.size)
    drawn = 0.02 * random.standard_normal(there, np.float32)
    flat[:there].copy_from(drawn.astype(flat.dtype.numpy), ops.stream)
    while there < flat.size:
        more = min(there, flat.size - there)
        ops.copy(flat[:more], flat[there : there + more])
        there += more
    for name, span in weights.spans.items():
        if len(weights.shapes[name]) == 1:
            constant = np.full(span.stop - span.start, not name.endswith(".bias"), flat.dtype.numpy)
            flat[span].copy_from(constant, ops.stream)


class _Late:
    """What the host sends and gets of a step, in pinned memory, while the device goes on to the next."""

    def __init__(self, answers: Array, state: Array) -> None:
        device = answers.device
        self.asked, self.answers, self.state = (
            pinned_empty(shape, np.float64, device) for shape in (1, answers.shape, state.shape)
        )
        self.there, self._began = Event(device, timed=True), Event(device, timed=True)
        self._since = self._began

    def begin(self, stream: object, before: _Late | None) -> None:
        """Queue the mark that a step is timed from: where one before it is under way, that one's end."""
        self._since = self._began if before is None else before.there
        if before is None:
            self._began.record(stream)

    def seconds(self) -> float:
        """The device's, not those in which the host learns of it: that may be late."""
        return self.there.seconds_since(self._since)

    def fetch(self, answers: Array, state: Array, stream: object) -> None:
        """Queue the copies."""
        answers.copy_to(self.answers, stream)
        state.copy_to(self.state, stream)
        self.there.record(stream)
