"""A dry run: the step of a rank on arrays without memory, which computes and sends nothing.

From it follow the memory of a rank, before any is allocated (``plan_memory``), and, with a ``Clock``, the duration of a
step and the bytes that a rank sends on each axis (``kos.train.tools.plan``):

- An operation takes the longer of its flops and its bytes (``kos.train.device.costs``), at the hardware's rates;
  attention takes their sum.
- A collective takes a latency and the time of the bytes that a ring sends: 2 (n - 1) / n of an all-reduce, half of that
  of an all-gather or a reduce-scatter. Asynchronous collectives overlap with the operations on a GPU, not on a CPU.
  Between hosts (``Network``) it takes the time of the bytes that leave a host (``Link``).
- Messages between stages take no time here: ``schedules.simulate`` has it, and the waiting for other ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, cast

import numpy as np

from kos.comm import compression
from kos.comm.communicator import Communicator
from kos.cuda.driver import call, cu
from kos.dtypes import DTYPES
from kos.errors import ConfigError, SettingError
from kos.memory.arena import ALIGNMENT, Arena
from kos.memory.array import Array
from kos.train.checkpoint.state import WritePlan
from kos.train.config.options import TrainConfig
from kos.train.device.costs import GPUS, ONE_HOST, Clock, Link, Network, Rates, TimedOps, cost, update_bytes
from kos.train.layers.attention import Attention
from kos.train.layers.lora import A, is_adapter
from kos.train.machine import free_memory
from kos.train.model.llama import LlamaConfig, Local
from kos.train.model.model import Model
from kos.train.ops import Attend, Batch
from kos.train.ops import numpy as numpy_ops
from kos.train.ops.cuda import CudaOps, cublaslt
from kos.train.ops.cuda.attention import MOST_HEAD_DIM, kernel_set, unsupported
from kos.train.ops.numpy_attention import view_of_keys_and_values
from kos.train.ops.parameters import OwnedSlices, Parameters
from kos.train.ops.protocol import Ops
from kos.train.optim import CHUNK, MatrixRule, UpdateRule, elements, state_of
from kos.train.parallel.data import Buckets, run_of, waiting_subtrees
from kos.train.parallel.gradients import Weights
from kos.train.parallel.mesh import DENSE, Axis, Layout, Mesh
from kos.train.parallel.pipeline import Buffer, Pipeline
from kos.train.parallel.schedules import Action, Schedule
from kos.train.step import Step


class DryOps:
    """Operations that do nothing, on arrays without memory: what they are given from the arena is counted."""

    overlap_rows, one_scale, matrix_batch = None, False, 0

    def make_arena(self) -> Arena:
        return Arena(0, lambda nbytes: None, lambda slab, offset, shape, dtype: self.zeros(shape, dtype))

    def zeros(self, shape: Any, dtype: Any) -> np.ndarray:
        return np.broadcast_to(np.zeros((), dtype), shape)

    def rope_tables(
        self, frequencies: Sequence[float], positions: Sequence[int], dtype: Any, length: float = 1.0
    ) -> Any:
        return (self.zeros((len(positions), len(frequencies)), dtype),) * 2

    step, statistics_dtype = staticmethod(numpy_ops.step), staticmethod(numpy_ops.statistics_dtype)
    indices, empty_columns = staticmethod(numpy_ops.indices), staticmethod(numpy_ops.empty_columns)
    to_host, columns_of = staticmethod(numpy_ops.to_host), staticmethod(numpy_ops.columns_of)

    def keys_and_values(self, attend: Attend, arena: Arena) -> Any:
        return view_of_keys_and_values(attend.qkv, *attend.shape)


def _nothing(*operands: Any, **options: Any) -> None:
    """An operation that computes nothing."""


for _name in {name for name in vars(Ops) if not name.startswith("_")} - {*vars(DryOps)}:
    setattr(DryOps, _name, staticmethod(_nothing))


class DryCudaOps(CudaOps):
    """Operations that do nothing, on arrays without memory: what they take from the arena is counted.

    ``ops`` are those of a GPU, or the ``Gpu`` of one that this machine need not have.
    """

    def __init__(self, ops: Any) -> None:
        self.device, self.stream, self.attention_kernels = ops.device, ops.stream, ops.attention_kernels
        self.multiprocessors, self.shared_memory = ops.multiprocessors, ops.shared_memory
        self.one_scale, self.hopper, self.sequential = ops.one_scale, ops.hopper, ops.sequential

    matmul = launch = copy = zero = staticmethod(_nothing)
    make_arena: Any = DryOps.make_arena

    def fuses_swiglu(self, d_out: Any, weight: Any, gate_up: Array, arena: Arena) -> bool:
        return False  # what is not fused takes more memory

    def to_host(self, array: Array) -> np.ndarray:
        return np.zeros(array.shape, array.dtype.numpy)

    @contextmanager
    def step(self, arena: Arena) -> Iterator[None]:
        yield
        arena.release(0)

    def zeros(self, shape: Any, dtype: Any) -> Array:
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        return Array(ALIGNMENT, shape, dtype, self.device)

    def rope_tables(self, frequencies: Any, positions: Any, dtype: Any, length: float = 1.0) -> tuple[Array, Array]:
        return (self.zeros((len(positions), len(frequencies)), np.float32),) * 2


BUCKET_BYTES = 64 << 20  # at least
HOST_BUCKET_BYTES = 4 << 20  # on CPUs
BUCKETS = 32  # about, at most: each waits, on all ranks, until a kernel ends and its own find multiprocessors
ALIGNED = 128  # elements: other ranks reach into buckets vector by vector
HEAD_ROWS = 8192  # tokens whose logits are in memory at once
ENCODED = 5  # times the bytes of a compressed bucket: what is sent, received and added
GIB = 1 << 30
RESERVE = 768 << 20  # bytes: kernels, graphs and what NCCL takes when ranks first meet
AXES = {"gradients": "replicas", "tp": "tp", "pp": "pp", "cp": "cp"}
"""What a rank sends, and the axis of ``Mesh`` over which it sends it."""


class Job(NamedTuple):
    """The job to plan: the settings of all ranks, after all automatic choices."""

    config: TrainConfig
    model: LlamaConfig
    layout: Layout
    schedule: Schedule
    rates: Rates
    network: Network = ONE_HOST

    @property
    def exact(self) -> int:
        """See ``Mesh.exact``."""
        local = self.network.local(self.layout, *DENSE)
        return local if local < self.layout.replicas else 1

    def parts(self, stage_rank: int) -> tuple[Local, ...]:
        """The stages of a rank of the pipeline. ConfigError where the model does not divide."""
        return self.model.parts(0, self.layout.tp, stage_rank, self.schedule.stages_of_ranks)

    def kind(self, stage_rank: int) -> Any:
        """Equal for ranks of the pipeline that take the same time, and the same memory for as many micro-batches."""
        place = stage_rank % self.network.local(self.layout, "pp")  # within a host
        return place * (self.network.hosts > 1), *((len(x.layers), x.first, x.last) for x in self.parts(stage_rank))

    def memory(self, stage_rank: int) -> MemoryPlan:
        """The device's plan for a rank of the pipeline."""
        mesh = Mesh.dry(self.layout, self.layout.rank({"pp": stage_rank}), self.exact)
        if self.config.device == "cpu":
            ranks = self.layout.ranks
            return plan_memory(self.config, self.model, DryOps(), mesh, self.schedule, sharing=ranks)
        gpu = GPUS[self.rates.name]
        return plan_memory(self.config, self.model, gpu, mesh, self.schedule, free=gpu.free)


class TimedMesh(Mesh):
    """The mesh of a rank whose axes are links."""

    def __init__(self, clock: Clock, job: Job, rank: int) -> None:
        self._clock, self._network, self._of_a_host = clock, job.network, job.layout.ranks // job.network.hosts
        super().__init__(cast(Communicator, Link(clock, "world", rank, job.layout.ranks)), job.layout)
        for name, of_mesh in AXES.items():
            axes = DENSE if name == "gradients" else (name,)
            setattr(self, of_mesh, self._link(name, getattr(self, of_mesh), job.network.local(job.layout, *axes)))

    def _link(self, name: str, axis: Axis, local: int = 0) -> Axis:
        """An axis of which ``local`` ranks are on each host; 0: all."""
        local = local or axis.size
        link = Link(self._clock, name, axis.rank, axis.size, axis.size // local, self._of_a_host // local)
        return axis._replace(group=axis.group and cast(Communicator, link))

    def copies(self, count: int) -> Axis:
        return self._link("tp", super().copies(count))


class DryRun(Step):
    """The step of a rank on arrays without memory.  ``mesh`` and ``dry``, which makes the arrays, move and compute
    nothing.

    With a ``clock``, which the links of ``mesh`` share, operations advance it. Gradients are then summed in the buckets
    of a run, which affect its time but not its memory. ``actions``: what each action of the schedule has spent.
    """

    def __init__(
        self, config: TrainConfig, model: LlamaConfig, mesh: Mesh, schedule: Schedule, dry: Any,
        clock: Clock | None = None,
    ) -> None:  # fmt: skip
        self.dry, self.clock, self.actions = dry, clock, dict[Action, dict[str, float]]()
        self.parts = parts = model.parts(mesh.tp.rank, mesh.tp.size, mesh.pp.rank, schedule.stages_of_ranks)
        buckets = plan_buckets(config, model, parts, mesh, reaches=True)
        exact = buckets.unsplittable or (config.dtype == "fp8" and buckets.sharded)  # memory depends on buckets
        if not (clock or exact):  # a model that fits on no machine would have too many buckets to list
            buckets = buckets._replace(nbytes=1 << 62, least=1 << 62)
        ops, pipeline = dry if clock is None else TimedOps(dry, clock.timed), Pipeline(mesh.pp, schedule)
        head_rows = HEAD_ROWS if config.device == "cuda" else None
        self._batch = Batch(None)
        super().__init__(
            config, model, parts, mesh, pipeline, ops, buckets, lambda index: self._batch, head_rows=head_rows
        )
        pieces = self.models[0].context.pieces
        shape = (config.micro_batch_size or 1) * pieces, config.seq_len // (mesh.cp.size * pieces)
        self.tokens = dry.zeros(shape, np.int32)
        starts = self.tokens if config.documents == "pack" else None
        self._batch = Batch(self.tokens, self.tokens, document_starts=starts)
        self.held = self.parallel.parts()
        """The parts of the layout whose state this rank keeps."""
        groups = config.trained_groups(model, *parts)
        self.state = state_of(config.update_rule(), groups, self.gradients.spans, self.held)

    def _make_optimizer(self, model: LlamaConfig, parts: Sequence[Local]) -> tuple[Parameters, Any]:
        """``run`` asks this object for the update."""
        return self.gradients.like(self.dtype), self

    @classmethod
    def timed(cls, job: Job, stage_rank: int) -> DryRun:
        """A whole step of a rank of the pipeline, whose ``clock`` is at its end."""
        clock = Clock(job.rates, job.network)
        has_windows = any(map(job.model.window, range(job.model.num_hidden_layers)))
        cp_rank = job.layout.cp - 1 if has_windows else 0  # in a window, no rank attends to more pairs than the last
        mesh = TimedMesh(clock, job, job.layout.rank({"pp": stage_rank, "cp": cp_rank}))
        dry = DryOps() if job.config.device == "cpu" else DryCudaOps(GPUS[job.rates.name])
        step = cls(job.config, job.model, mesh, job.schedule, dry, clock)
        step.run()
        return step

    # --- memory --------------------------------------------------------------------------------------------

    def state_bytes(self) -> tuple[str, int]:
        """The optimizer's state in words, and its bytes on this rank."""
        about = " and ".join(dict.fromkeys(kept.rule.about for kept in self.state.values()))
        return about, sum(DTYPES[kept.dtype].itemsize * elements(kept.slices) for kept in self.state.values())

    def matrices(self) -> Iterator[tuple[MatrixRule, OwnedSlices, int]]:
        """The rules of matrices, what of their state is held here, and the most elements in a batch of them."""
        most = 0 if self.config.deterministic else self.dry.matrix_batch
        for dtype, _, slices, rule in self.state.values():
            if isinstance(rule, MatrixRule):
                yield rule, OwnedSlices(self.gradients, slices, dtype), most

    def peaks(self) -> tuple[int, int]:
        """The most bytes that passes take from the scratch arena, and a micro-batch from its own."""
        arena = self.models[0].arena
        actions = [action for action in self.pipeline.actions if action.micro_batch == 0]
        weights = self.as_read(self.with_frozen(self.weights))
        for each in self.quantized.values():  # as ShardedState reads it
            with self.dry.step(arena):
                whole = arena.take(each.shape, self.frozen.flat.dtype)
                self.dry.quantize(whole, each.rows, each.columns, arena)
        for action, received in self.pipeline.inputs(actions):
            self.act(action, weights, received)
        message = Buffer(self.dry.zeros(*self.message))
        for action in [action for action in actions if action.kind == "F"]:
            self.stages.forward(action, weights, message, self._batch, partial(Model.loss_of, count=1.0))
        from_host = 6 * self.tokens.nbytes + ALIGNMENT * 6  # fields of validation, copied from the host
        itemsize = DTYPES[self.config.compute_dtype].itemsize
        of_matrices = (rule.scratch_bytes(held, itemsize, most) for rule, held, most in self.matrices())
        return max(arena.peak + from_host, *of_matrices, 0), max(flight.arena.peak for flight in self.stages.free)

    # --- time ----------------------------------------------------------------------------------------------

    def act(self, action: Action, weights: Weights, received: Buffer | None) -> None:
        if self.clock is None:
            return super().act(action, weights, received)
        before = self.clock.spent.copy()
        with self.clock.logged(str(action)):
            super().act(action, weights, received)
        self.actions[action] = {key: spent - before[key] for key, spent in self.clock.spent.items()}

    def norm(self) -> None:
        assert self.clock is not None
        with self.clock.logged("norm"):
            self.clock.operate("squares", self.gradients.flat.nbytes, 0.0)

    def check_in_step(self, gradients: Parameters, report: Array, reports: Array) -> None:
        """Takes no time worth counting."""

    def update(self, gradients: Parameters, micro_batches: int, targets: Array) -> None:
        config, clock, rule = self.config, self.clock, self.config.update_rule()
        assert clock is not None

        def moved(rule: UpdateRule, count: int) -> None:
            """The passes over so many weights and what is kept of them."""
            same = config.compute_dtype == config.master_dtype and not self.parallel.sharded
            master, copy = DTYPES[config.master_dtype].itemsize, 0 if same else DTYPES[config.compute_dtype].itemsize
            of_each = update_bytes(master, gradients.flat.dtype.itemsize, rule.state_bytes(), copy)
            clock.operate("update", count * of_each, 0.0)

        own = [kept for kept in self.state.values() if not isinstance(kept.rule, MatrixRule)]
        with clock.logged("update"):
            moved(rule, elements(own[0].slices if own else self.held))
            for each, held, most in self.matrices():
                moved(each, held.flat.size)
                for batch in each.batches(held, most):
                    x = self.dry.zeros((len(batch), *batch[0].shape), config.compute_dtype)
                    if batch[0].part != batch[0].shape:
                        mine = self.dry.zeros((len(batch), *batch[0].part), config.compute_dtype)
                        self.mesh.tp.comm.all_gather(mine, x)
                    clock.operate("orthogonalize", *cost("orthogonalize", (x,)))


class MemoryPlan(NamedTuple):
    """Bytes by what they are for, and how many are free; ``arena`` of them are for activations.

    ``savings`` are the options that take less and are not used yet.
    ``scratch`` and ``slot`` are the bytes of the arenas: that of what is computed and that of a micro-batch in flight.
    """

    uses: dict[str, int]
    arena: int
    free: int
    device: str
    savings: Sequence[str] = ()
    scratch: int = 0
    slot: int = 0

    @property
    def total(self) -> int:
        return sum(self.uses.values())

    @property
    def fits(self) -> bool:
        return self.total <= self.free

    def check(self) -> MemoryPlan:
        """This plan; ConfigError, with the options that can help, if it does not fit."""
        if self.fits:
            return self
        uses = sorted(self.uses.items(), key=lambda use: -use[1])
        raise ConfigError(
            f"memory: expected at most {self.free / GIB:.2f} GiB, the memory free on {self.device}, "
            f"got {self.total / GIB:.2f} GiB ({'; '.join(f'{name} {size / GIB:.2f}' for name, size in uses)}); "
            f"to reduce it, use {' or '.join([*self.savings, 'a smaller model'])}"
        )

    def __str__(self) -> str:
        rows = [f"  {name:<42}{size / GIB:>9.2f} GiB" for name, size in self.uses.items()]
        rows.append(f"  {'total':<42}{self.total / GIB:>9.2f} GiB of {self.free / GIB:.2f} free on {self.device}")
        return "\n".join(rows)


def plan_buckets(
    config: TrainConfig, model: LlamaConfig, parts: Sequence[Local], mesh: Mesh, reaches: bool
) -> Buckets:
    """The buckets of a rank with ``parts``; ``reaches``: ranks of a machine access each other's memory."""
    reduction, groups, nbytes = mesh.dense, config.trained_groups(model), BUCKET_BYTES
    regions, places = [{name for group in groups for name in group.names}], model.placements(*parts)
    ends = (any(part.first for part in parts), any(part.last for part in parts))
    tied_across_stages = model.tie_word_embeddings and ends[0] != ends[1]
    if tied_across_stages and model.embedding in regions[0]:
        regions = [regions[0] - {model.embedding}, {model.embedding}]
    # Tensors that every rank of tp holds whole come last, so that one call sums their gradients (``GradientSums``).
    order = sorted(places, key=lambda name: mesh.tp.size > 1 and places[name].along("tp") is None)
    shapes = {name: places[name].local for names in regions for name in order if name in names}
    lies = shapes, {name: each for name, each in model.fused_groups(*parts).items() if each[0] in shapes}, regions
    ranks = reduction.replicas.size
    sharded = config.zero == 1 and ranks > 1
    unsplittable = frozenset(name for group in groups if group.rule for name in group.names)
    mirrored = sharded and config.elastic is not None and reduction.batch.size == ranks and reduction.others.size == 1
    if config.device == "cpu":
        blocks = 1 if config.compress == "none" else compression.BLOCK * mesh.exact("cpu")
        multiple = CHUNK * ranks if sharded else math.lcm(reduction.batch.size, blocks)
        return Buckets(multiple, HOST_BUCKET_BYTES, HOST_BUCKET_BYTES, sharded, unsplittable, mirrored, *lies)
    itemsize = DTYPES[config.grad_dtype].itemsize
    if not config.deterministic:  # else no bucket overlaps, and sums in rank order may need one of each rank
        whole, layout = model.placements(), mesh.layout  # so that all stages of a pipeline have buckets of equal size
        trained = sum(math.prod(whole[name].shape) for names in regions for name in names)
        nbytes = max(BUCKET_BYTES, itemsize * trained // (layout.pp * layout.tp) // BUCKETS)
    multiple = ranks * (CHUNK if config.zero == 1 else ALIGNED) if ranks > 1 else 1
    staging = nbytes if reaches and ranks > 1 and not config.deterministic else 0
    if ranks > 1 and config.compress != "none":
        staging = ENCODED * compression.FORMATS[config.compress].nbytes(nbytes // itemsize)
        staging += 2 * nbytes * (mesh.exact("cuda") > 1)  # terms of exact sums, and with ZeRO-1 their results
    return Buckets(multiple, nbytes, nbytes // 4, sharded, unsplittable, mirrored, *lies, staging)


def plan_memory(
    config: TrainConfig, model: LlamaConfig, ops: Any, mesh: Mesh, schedule: Schedule, reaches: bool = True,
    sharing: int = 1, free: int | None = None,
) -> MemoryPlan:  # fmt: skip
    """The plan of one rank of ``mesh``, which sends nothing. On CPUs, what is small is left out.

    ``ops`` are those of a GPU or its ``Gpu``, or those of a CPU that do nothing.  ``reaches`` as in ``plan_buckets``.
    ``free``: bytes that so many ranks are ``sharing``, by default those that are free now.  ConfigError: the kernels of
    attention do not take heads of this size.
    """
    on_cpu = config.device == "cpu"
    if model.head_dim > (most := MOST_HEAD_DIM["simple"]) and not on_cpu:
        raise SettingError("--head-dim", f"at most {most} on GPUs", model.head_dim)
    run = DryRun(config, model, mesh, schedule, ops if on_cpu else DryCudaOps(ops))
    buckets, residual = plan_buckets(config, model, run.parts, mesh, reaches), run.parallel.residual
    ranks, count, slots = mesh.dense.replicas.size, run.gradients.flat.size, len(run.stages.free)
    waiting = waiting_subtrees(run_of(run.micro_batches, mesh.dp.rank, mesh.dp.size)) if config.deterministic else 0
    lookups = 0 if run.sums.lookups is None else run.sums.lookups.gradients.flat.size
    mirrored = buckets.mirrored_shards
    share = f", {1 + mirrored}/{ranks} (ZeRO-1{', held twice' * mirrored})" * buckets.sharded
    dtype, master, (about, state) = config.compute_dtype, config.master_dtype, run.state_bytes()
    has_copy = not on_cpu and (buckets.sharded or dtype != master)
    weights, held = f"{'master ' * has_copy}weights, {master}", count if on_cpu else elements(run.held)
    scratch, slot = run.peaks()
    arena, logits = scratch + slots * slot, 0
    if on_cpu:
        files = WritePlan(model, mesh.layout, schedule.stages_of_ranks, config.state_of(model), config.compress)
        others = {"tensors to be saved": files.host_bytes(mesh.world.rank, config.save_async)}
    else:
        scratch, arena, logits, others = _of_gpu(run, mesh, buckets, scratch, slot)
    in_flight = f", {slots} micro-batches in flight" * (slots > 1)
    uses = {
        f"weights, {dtype}": count * DTYPES[dtype].itemsize * has_copy,
        f"frozen weights, {dtype}": sum(x.size for x in run.frozen.values()) * DTYPES[dtype].itemsize,
        f"{weights}{'' if on_cpu else share}": DTYPES[master].itemsize * held,
        "weights of layers, fp8, and transposed": sum(each.nbytes for each in (run.store | run.quantized).values()),
        f"{about}, {', '.join(dict.fromkeys(kept.dtype for kept in run.state.values()))}{share}": state,
        f"gradients, {config.grad_dtype}": DTYPES[config.grad_dtype].itemsize * (count + lookups) * (1 + waiting),
        f"residual of gradients sent as {config.compress}": 0 if residual is None else residual.flat.nbytes,
        f"activations, recompute {config.recompute}{in_flight}": arena - logits,
        "versions for servers": _published(run, ranks) * DTYPES[dtype if has_copy else master].itemsize,
        **others,
    }
    # If the backward is split in two halves, recomputed activations stay in memory between them.
    splits = any(action.kind == "W" for action in chain(*schedule.actions))
    micro, place = config.micro_batch_size or 1, "this machine" if on_cpu else f"cuda:{ops.device}"
    savings = {
        f"fewer ranks on {place}": sharing > 1,
        f"a --micro-batch-size below {micro}": micro > 1,
        f"a --seq-len below {config.seq_len}": micro == 1,
        "--recompute norms or block": config.recompute == "none" and not splits,
        "--recompute block": config.recompute == "norms" and not splits,
        "--pp-schedule 1f1b": splits,
        "--zero 1": not config.zero and ranks > 1,
        "--grad-dtype bfloat16": dtype != config.grad_dtype and schedule.micro_batches == 1
        and not config.deterministic,
        "--master-weights none": dtype != master,
        "--compress none": residual is not None,
    }  # fmt: skip
    if free is None:
        free = free_memory() if on_cpu else call(cu.cuMemGetInfo)[0]
    where, uses = place + f" for each of {sharing} ranks" * (sharing > 1), {use: n for use, n in uses.items() if n}
    return MemoryPlan(uses, arena, free // sharing, where, [*filter(savings.get, savings)], scratch, slot)


def _published(run: DryRun, ranks: int) -> int:
    """With ``--publish``, this rank's elements in both versions.  ``ranks`` divide what all of them hold."""
    if run.config.publish is None:
        return 0
    merged, every = run.config.publish_merged, {*run.gradients, *run.frozen}
    published = (x for name, x in run.frozen.items() if run.config.lora is None or is_adapter(name) != merged)
    frozen = sum(x.size for x in published) // ranks
    if merged:
        adapted = (x.size for name, x in run.frozen.items() if name.removesuffix("weight") + A in every)
        return 2 * frozen + sum(adapted) // ranks  # the merged weights, and both versions
    return 2 * (frozen + run.gradients.flat.size // ranks)


def _of_gpu(
    run: DryRun, mesh: Mesh, buckets: Buckets, scratch: int, slot: int
) -> tuple[int, int, int, dict[str, int]]:
    """Of a GPU: the bytes of the scratch arena, of all arenas, of the logits in them, and of what is in none."""
    config, model, tokens = run.config, run.models[0].config, run.tokens.size
    itemsize, rows = DTYPES[config.compute_dtype].itemsize, min(HEAD_ROWS, tokens)
    bucket = max(buckets.nbytes // DTYPES[config.grad_dtype].itemsize, buckets.multiple)  # of the state, to be saved
    if buckets.unsplittable:
        bucket = max(bucket, *(each.stop - each.start for each in run.parallel.buckets))
    saving = (4 * min(bucket, run.gradients.flat.size) + ALIGNMENT) * (2 if mesh.tp.size > 1 else 1)
    scratch, between = max(scratch, saving), tokens // mesh.tp.size * model.hidden_size * itemsize
    logits = rows * len(run.parts[0].vocabulary) * itemsize * any(part.last for part in run.parts)
    fields = 2 + (config.documents == "pack")  # of a batch, on the host and twice here
    batch, micro_batches = 3 * 4 * fields * tokens, run.pipeline.schedule.micro_batches
    return scratch, scratch + len(run.stages.free) * slot + between * (1 if mesh.pp.size == 1 else 6), logits, {
        f"logits of {rows} tokens": logits,
        "tokens, cuBLASLt's workspace": batch * micro_batches + cublaslt.WORKSPACE,
        "kernels, graph, communication": RESERVE + buckets.staging,
    }  # fmt: skip


def slow_attention(model: LlamaConfig, gpu: Any, dtype: str) -> str | None:
    """Why attention of ``model`` runs on the slow kernels, although ``gpu`` has faster ones.

    None if it does not, or if the GPU has no faster kernels.  ``gpu`` is the argument of ``DryCudaOps``.
    """
    attention = model.layers([0])[0][0]
    assert isinstance(attention, Attention)
    x = DryCudaOps(gpu).zeros((1, attention.column.rows), dtype)
    attend = attention.attend((attention.heads, attention.kv_heads), x, x, x)
    if gpu.attention_kernels == "simple" or kernel_set(attend, gpu.attention_kernels) != "simple":
        return None
    return f"the fast kernels expect {unsupported('mma', attend)}"


