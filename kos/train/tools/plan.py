"""``--plan --ranks N``: the layouts that N ranks can train in, with memory, bytes sent and predicted step time.

Nothing here knows a model or a parallelism. The step program (``kos.train.engine.step``) runs with operations that
compute nothing and communicators that send nothing; a clock adds up what each would take.

- Memory is that of the engine's own plan.
- An operation takes the longer of its flops and its bytes (``kos.train.tools.profile.cost``), at measured rates;
  attention takes their sum.
- A collective takes a latency and the bytes that a ring sends (2 (n - 1) / n of an all-reduce, half of it of an
  all-gather or a reduce-scatter) over the bandwidth between neighbours. What is asynchronous goes on beside the
  operations on a GPU; on a CPU it does not.
- A pipeline takes the time of its schedule (``timeline.simulate``) with the times of each stage's passes, and what a
  rank does besides: ZeRO-1's gathers and the sums of gradients, as far as nothing hides them, norm and update.

Of more than a few micro-batches a few run, and one in the middle stands for the others.
"""

from __future__ import annotations

import itertools
import math
import os
import re
import shlex
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from kos.comm.communicator import Communicator
from kos.errors import ConfigError, KosError, in_words
from kos.files import printing
from kos.memory.array import Array
from kos.train.config.flags import parse_plan
from kos.train.config.options import CUDA_MICRO_BATCH_TOKENS, MICRO_BATCH_TOKENS, TrainConfig, flag_of
from kos.train.engine import cpu, cuda
from kos.train.engine.choose import layout_of
from kos.train.engine.head_start import DRIVER
from kos.train.engine.machine import PEAK_FLOPS
from kos.train.engine.memory_plan import GIB, MemoryPlan, Sizing
from kos.train.engine.step import StepProgram
from kos.train.model.llama_config import LlamaConfig
from kos.train.model.parameters import Parameters
from kos.train.model.shapes import Local
from kos.train.ops import numpy as numpy_ops
from kos.train.ops.optimizer import BLOCK
from kos.train.parallel.data import DataParallel
from kos.train.parallel.mesh import Layout, Mesh
from kos.train.parallel.pipeline import Pipeline
from kos.train.parallel.schedules import Action, Schedule, build
from kos.train.parallel.schedules.timeline import simulate
from kos.train.tools.profile import COPIED, ROWS_ON_HOST, TIMED, cost

AXES = ("gradients", "tp", "pp", "cp")  # of a rank's bytes; the gradients' is dp and cp together


class Rates(NamedTuple):
    """What a rank's hardware does a second. ``attention``: flops of the forward and of the backward."""

    name: str
    linear: float  # flops
    attention: tuple[float, float]
    memory: float  # bytes
    operation: float  # seconds that each takes at least
    wire: float  # bytes, to a neighbour
    latency: float  # seconds of a collective
    overlap: bool  # whether collectives go on beside operations


class Gpu(NamedTuple):
    """Of NVIDIA's data sheets: bytes a second of memory and, one way, of NVLink; GiB of memory that are free."""

    memory: float
    link: float
    free: float
    family: str  # of attention kernels


GPUS = {
    "H200": Gpu(4.8e12, 450e9, 139.2, "hopper"),
    "H100": Gpu(3.35e12, 450e9, 78.6, "hopper"),
    "A100": Gpu(2.04e12, 300e9, 78.6, "mma"),
}

# Shares of a GPU's data sheet, all measured on H200 and taken for the others.
LINEAR = 0.71  # of its bf16 peak: benchmarks/results/profile-{8b-h200-8,1b-h200-1,124m-h200-1}.txt, rows linear
ATTENTION = {64: (0.42, 0.36), 128: (0.58, 0.42)}  # by head size, of the same: the same files, attention
COPY = 0.85  # of its memory: the same files, "limits"
WIRE = 0.73  # of NVLink: benchmarks/results/collectives-h200-4.json, all_reduce; tuning-h200-4.json, all_gather
OPERATION, LATENCY = 1.5e-6, 10e-6  # seconds: train-h200-1.json, 124m; tuning-h200-4.json, 1 KiB to 1 MiB

# Shares on a CPU of what it measures itself, a large product and a copy: ``--profile`` of tiny on one core of an EPYC.
HOST_LINEAR, HOST_ATTENTION, HOST_MEMORY, HOST_OPERATION = 0.75, 0.17, 0.15, 5e-6
HOST_WIRE, HOST_LATENCY = 0.5, 30e-6  # collectives-epyc-2.json: all_reduce beside its limit; and at 64 KiB


def gpu_rates(name: str, head_dim: int) -> Rates:
    """Of the first GPU of ``GPUS`` whose name is part of ``name``. ConfigError for others."""
    known = next((part for part in GPUS if part in name), None)
    if known is None:
        raise ConfigError(f"--gpu: expected one of {', '.join(GPUS)}, got {name!r}")
    gpu, peak = GPUS[known], PEAK_FLOPS[known]
    forward, backward = ATTENTION[128 if head_dim >= 128 else 64]
    return Rates(
        known, LINEAR * peak, (forward * peak, backward * peak), COPY * gpu.memory, OPERATION, WIRE * gpu.link, LATENCY,
        True,
    )  # fmt: skip


def cpu_rates(ranks: int) -> Rates:
    """Of each of ``ranks`` ranks on this machine, whose cores they share; measured now."""
    cores = len(os.sched_getaffinity(0))
    flops, memory = (rate / ranks for rate in _measure(ranks, cores))
    memory *= min(cores, ranks)  # a copy is made by one core
    attention = (HOST_ATTENTION * flops,) * 2
    wire, name = HOST_WIRE * memory, f"the CPU, {cores} core{'s' * (cores > 1)}"
    return Rates(name, HOST_LINEAR * flops, attention, HOST_MEMORY * memory, HOST_OPERATION, wire, HOST_LATENCY, False)


def _measure(ranks: int, cores: int) -> tuple[float, float]:
    """Flops a second of all cores and bytes a second of one, at best of five."""

    def fastest(function: Callable[..., object], *arguments: object) -> float:
        times = [time.perf_counter()]
        for _ in range(5):
            function(*arguments)
            times.append(time.perf_counter())
        return min(after - before for before, after in itertools.pairwise(times))

    a, b, c = (np.zeros((ROWS_ON_HOST, ROWS_ON_HOST), np.float32) for _ in range(3))
    source, target = (np.ones(COPIED, np.uint8) for _ in range(2))
    return 2.0 * ROWS_ON_HOST**3 / fastest(numpy_ops.linear, a, b, c), 2 * COPIED / fastest(numpy_ops.copy, source, target)


class Clock:
    """The time of one rank, and the bytes that it has sent on each axis: ``spent``, with the time as "seconds"."""

    def __init__(self, rates: Rates) -> None:
        self.rates, self.spent = rates, defaultdict[str, float](float)
        self.message = 0.0  # seconds of the longest between two stages

    def operate(self, name: str, nbytes: int, flops: float) -> None:
        rates = self.rates
        moving = nbytes / rates.memory
        if name.startswith("attention"):
            seconds = moving + flops / rates.attention["backward" in name]
        else:
            seconds = max(moving, flops / rates.linear)
        self.spent["seconds"] += rates.operation + seconds

    def wait(self, until: float) -> None:
        self.spent["seconds"] = max(self.spent["seconds"], until)


class Link:
    """In place of a communicator of one axis: counts what its rank sends, and how long that takes."""

    def __init__(self, clock: Clock, axis: str, rank: int, size: int) -> None:
        self.clock, self.axis, self.rank, self.size, self._free = clock, axis, rank, size, 0.0

    def split(self, color: int | None, key: int | None = None) -> Link:
        return self

    def all_reduce(self, x: Array, *, deterministic: bool = False, async_op: bool = False) -> Arrival:
        return self._collective(2 * x.nbytes * (self.size - 1) / self.size, async_op)

    def reduce_scatter(self, x: Array, out: Array, *, async_op: bool = False) -> Arrival:
        return self._collective(x.nbytes * (self.size - 1) / self.size, async_op)

    def all_gather(self, x: Array, out: Array, *, async_op: bool = False) -> Arrival:
        return self._collective(x.nbytes * (self.size - 1), async_op)

    def send_recv(self, x: Array, out: Array, to: int, source: int, *, async_op: bool = False) -> Arrival:
        return self._collective(x.nbytes, async_op)

    def send(self, x: Array, to: int, *, async_op: bool = False) -> Arrival:
        """Between stages: ``timeline.simulate`` has its time."""
        clock = self.clock
        clock.spent[self.axis] += x.nbytes
        clock.message = max(clock.message, clock.rates.latency + x.nbytes / clock.rates.wire)
        return Arrival(clock, 0.0)

    def recv(self, x: Array, source: int, *, async_op: bool = False) -> Arrival:
        return Arrival(self.clock, 0.0)

    def _collective(self, nbytes: float, async_op: bool) -> Arrival:
        clock, rates = self.clock, self.clock.rates
        clock.spent[self.axis] += nbytes
        self._free = max(self._free, clock.spent["seconds"]) + rates.latency + nbytes / rates.wire
        arrival = Arrival(clock, self._free)
        if not async_op or not rates.overlap:
            arrival.wait()
        return arrival


class Arrival(NamedTuple):
    """A Work that ends at a time of the clock."""

    clock: Clock
    end: float

    def wait(self) -> None:
        self.clock.wait(self.end)


class _Clocked:
    """Operations that do nothing but take time."""

    def __init__(self, ops: Any, clock: Clock) -> None:
        self._ops, self._clock = ops, clock

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._ops, name)
        if name in TIMED:
            quiet = function

            def function(*arguments: Any) -> Any:
                self._clock.operate(name, *cost(name, arguments))
                return quiet(*arguments)

        setattr(self, name, function)
        return function


class _AbsentGpu(Sizing):
    """As ``Sizing``, for a GPU that need not be there."""

    def __init__(self, name: str) -> None:
        self.gpu = GPUS[name]
        self.device, self.stream, self.cudnn = 0, None, None
        self.multiprocessors, self.shared_memory = 132, 227 << 10

    def family(self, dtype: str, head_dim: int) -> str:
        return self.gpu.family if head_dim in ATTENTION else "simple"


class Job(NamedTuple):
    """What is planned: one candidate's settings, as all of its ranks have them."""

    config: TrainConfig
    model: LlamaConfig
    layout: Layout
    schedule: Schedule
    rates: Rates

    def parts(self, stage_rank: int) -> list[Local]:
        """A pipeline rank's stages. ConfigError where the model does not divide."""
        layout, schedule = self.layout, self.schedule
        stages = (schedule.stage(stage_rank, chunk) for chunk in range(schedule.chunks))
        return [self.model.local(0, layout.tp, stage, schedule.stages) for stage in stages]

    def memory(self, stage_rank: int) -> MemoryPlan:
        """As the engine plans it."""
        mesh = Mesh.silent(self.layout, self.layout.rank({"pp": stage_rank}))
        config, parts = self.config, self.parts(stage_rank)
        if config.device == "cuda":
            ops = _AbsentGpu(self.rates.name)
            buckets = cuda.Buckets.of(config, self.model, parts, mesh, self.schedule.micro_batches, reaches=True)
            free = int(ops.gpu.free * GIB)
            return buckets.plan(config, self.model, parts, ops, mesh, self.schedule, free=free)
        shards = mesh.gradients.size if config.zero else 1
        ranks = self.layout.ranks
        return cpu.plan_memory(config, self.model, parts, mesh, self.schedule, ranks, mesh.gradients.rank == 0, shards)


class DryStep(StepProgram):
    """One step of one rank of a job in which nothing is computed and nothing sent: what it takes, by ``clock``."""

    def __init__(self, job: Job, stage_rank: int) -> None:
        config, model, layout = job.config, job.model, job.layout
        self.config, self.clock = config, Clock(job.rates)
        rank = layout.rank({"pp": stage_rank})
        self.mesh = mesh = Mesh(cast(Communicator, Link(self.clock, "world", rank, layout.ranks)), layout)
        for name in (*AXES, "dp", "model"):
            axis = getattr(mesh, name)
            setattr(mesh, name, axis._replace(group=axis.group and Link(self.clock, name, axis.rank, axis.size)))
        self.pipeline, self.accumulation_steps = Pipeline(mesh.pp, job.schedule), job.schedule.micro_batches
        parts, group, on_gpu = self.locals(model), mesh.gradients, config.device == "cuda"
        sharded = config.zero == 1 and group.size > 1
        sums: dict[str, Any] = {"sharded": sharded, "deterministic": config.deterministic}
        options: dict[str, Any] = {"recompute": config.recompute}
        multiple = BLOCK * group.size if sharded else 1
        if on_gpu:
            buckets = cuda.Buckets.of(config, model, parts, mesh, self.accumulation_steps, reaches=True)
            self.lookups, multiple, options["head_rows"] = buckets.lookups, buckets.multiple, cuda.HEAD_ROWS
            sums |= {"bucket_bytes": buckets.nbytes, "least_bytes": buckets.nbytes // 4}
            sums |= {"lookups": model.embedding if self.lookups else None, "tied": model.tie_word_embeddings}
        self.zeros = _AbsentGpu(job.rates.name) if on_gpu else cpu.Sizing()
        ops = cast(Any, _Clocked(self.zeros, self.clock))
        shapes, groups = model.parameter_shapes(*parts), model.fused_groups(*parts)
        self.gradients = Parameters(shapes, config.grad_dtype, groups, self.zeros.zeros, multiple)
        self.weights = self.gradients.like(config.dtype)
        self.build_models(model, ops, self.zeros.dtype(config.dtype), **options)
        self.parallel = DataParallel(group, self.gradients, ops, **sums)
        tokens = config.micro_batch_size or 1, config.seq_len // layout.cp
        self._tokens, self.count = self.zeros.zeros(tokens, np.int32), self.zeros.zeros((1,), np.float32)
        self.known = self.zeros.zeros((1 + self.accumulation_steps,), np.float64)
        self.known_of_all = self.known
        self.actions: dict[Action, dict[str, float]] = {}  # what each has taken
        self.queue_step()

    def make_array(self, shape: tuple[int, ...], dtype: Any) -> Any:
        return self.zeros.zeros(shape, dtype)

    def micro_batch(self, index: int) -> tuple[Any, Any]:
        return self._tokens, self._tokens

    def _with_inputs(self, actions: Sequence[Action]) -> Iterator[Any]:
        for action, received in super()._with_inputs(actions):
            before = dict(self.clock.spent)
            yield action, received
            spent = {key: value - before.get(key, 0.0) for key, value in self.clock.spent.items()}
            self.actions[action] = defaultdict(float, spent)

    def queue_norm(self) -> None:
        self.clock.operate("squares", self.gradients.flat.nbytes, 0.0)

    def queue_update(self) -> None:
        whole, config = self.gradients.flat, self.config
        held = sum(part.stop - part.start for part in self.parallel.parts()) if self.parallel.sharded else whole.size
        master, moment = (self.zeros.zeros(held, dtype) for dtype in (config.master_dtype, "float32"))
        alone = config.dtype == config.master_dtype and not self.parallel.sharded
        copy = master if alone else self.zeros.zeros(held, config.dtype)
        self.clock.operate("adamw", *cost("adamw", (master, whole, moment, moment, copy)))


class Prediction(NamedTuple):
    """A step of a job: of the rank that takes most of each, the memory and the bytes sent by axis; seconds."""

    job: Job
    memory: MemoryPlan
    sent: dict[str, float]
    seconds: float

    @property
    def fits(self) -> bool:
        return self.memory.total <= self.memory.free

    @property
    def tokens_per_second(self) -> float:
        return self.job.config.batch_size * self.job.config.seq_len / self.seconds


def predict(job: Job, memory: MemoryPlan) -> Prediction:
    """The dry steps of every pipeline rank, put together."""
    layout, whole = job.layout, job.schedule
    few = min(whole.micro_batches, layout.pp * -(-3 // layout.pp))
    short = job._replace(schedule=build(job.config.pp_schedule, layout.pp, few, job.config.pp_chunks))
    middle, chunks = max(0, min(1, few - 2)), range(whole.chunks)
    steps: dict[tuple[Any, ...], DryStep] = {}
    costs = {kind: [0.0] * whole.stages for kind in "FIW"}
    besides, message, sent = 0.0, 0.0, dict.fromkeys(AXES, 0.0)
    for rank in range(layout.pp):
        alike = tuple((len(part.layers), part.first, part.last) for part in short.parts(rank))
        step = steps[alike] = steps.get(alike) or DryStep(short, rank)
        typical: dict[str, float] = defaultdict(float)
        for chunk in chunks:
            for kind in "FBIW":
                spent = step.actions.get(Action(kind, middle, chunk), {})
                costs["I" if kind == "B" else kind][whole.stage(rank, chunk)] += spent.get("seconds", 0.0)
                for key, value in spent.items():
                    typical[key] += value
        besides = max(besides, step.clock.spent["seconds"] - few * typical["seconds"])
        message = max(message, step.clock.message)
        for axis in AXES:
            bytes_sent = step.clock.spent[axis] + (whole.micro_batches - few) * typical[axis]
            sent[axis] = max(sent[axis], bytes_sent)
    return Prediction(job, memory, sent, simulate(whole, costs, message).makespan + besides)


def candidates(
    config: TrainConfig, given: set[str], model: LlamaConfig, layout: Layout, rates: Rates
) -> Iterator[list[Job]]:
    """Jobs of a layout, in groups of which the first that fits is the fastest: they recompute more and more.

    What was ``given`` stays. The last group is the only one if nothing else is allowed; ConfigError: none is.
    """
    each = max(1, config.batch_size // layout.dp)
    most = max(config.seq_len, MICRO_BATCH_TOKENS if config.device == "cpu" else CUDA_MICRO_BATCH_TOKENS)
    sizes: list[int | None] = [n for n in range(1, each + 1) if each % n == 0 and n * config.seq_len <= most]
    options: dict[str, list[Any]] = {
        "micro_batch_size": [None] if config.deterministic else sizes,
        "zero": [0, 1] if layout.dp * layout.cp > 1 else [0],
        "pp_schedule": ["1f1b", "interleaved", "zero-bubble", "zero-bubble-v"] if layout.pp > 1 else ["1f1b"],
        "recompute": ["none", "norms", "block"],
    }
    options |= {name: [getattr(config, name)] for name in options if name in given}
    reason: ConfigError | None = None
    found = False
    for size, zero, schedule in itertools.product(*(options[name] for name in [*options][:3])):
        jobs = []
        for recompute in options["recompute"]:
            changes = {"micro_batch_size": size, "zero": zero, "pp_schedule": schedule, "recompute": recompute}
            changes |= {"pp": layout.pp}  # which for_world asks for
            try:
                full = config.model_copy(update=changes).for_world(layout.dp, config.device)
                rounds = full.batch_size // (full.micro_batch_size or 1) // layout.dp
                chosen = build(schedule, layout.pp, rounds, full.pp_chunks)
                job = Job(full, model, layout, chosen, rates)
                for rank in range(layout.pp):
                    job.parts(rank)
                jobs.append(job)
            except ConfigError as error:
                reason = reason or error
                break
        if jobs:
            found = True
            yield jobs
    if not found:
        raise reason or ConfigError("expected settings that can be combined, got none")


def best(config: TrainConfig, given: set[str], model: LlamaConfig, layout: Layout, rates: Rates) -> Prediction:
    """The fastest job of a layout that fits; if none does, the one that takes the least memory."""
    found: list[Prediction] = []
    over: tuple[MemoryPlan, Job] | None = None
    for jobs in candidates(config, given, model, layout, rates):
        for job in jobs:
            plans = [job.memory(rank) for rank in range(layout.pp)]
            memory = max(plans, key=lambda plan: plan.total - plan.free)
            if memory.total <= memory.free:
                found.append(predict(job, memory))
                break
            if over is None or memory.total < over[0].total:
                over = memory, job
    if found:
        return min(found, key=lambda each: each.seconds)
    assert over is not None
    return predict(over[1], over[0])


def layouts(ranks: int) -> Iterator[dict[str, int]]:
    """Every dp, tp, pp and cp whose product is ``ranks``."""
    divisors = [n for n in range(1, ranks + 1) if ranks % n == 0]
    for tp, pp, cp in itertools.product(divisors, repeat=3):
        if ranks % (tp * pp * cp) == 0:
            yield {"dp": ranks // (tp * pp * cp), "tp": tp, "pp": pp, "cp": cp}


def plan(
    config: TrainConfig, given: set[str], ranks: int, rates: Rates, model: LlamaConfig
) -> tuple[list[Prediction], list[tuple[dict[str, int], str]]]:
    """The legal layouts, the fastest that fits first, and the others with the reason."""
    legal, refused = [], []
    for sizes in layouts(ranks):
        if any(sizes[axis] != getattr(config, axis) for axis in given & sizes.keys()):
            continue
        try:
            layout = layout_of(config.model_copy(update=sizes), ranks)
            legal.append(best(config, given, model, layout, rates))
        except ConfigError as error:
            refused.append((sizes, str(error)))
    return sorted(legal, key=lambda each: (not each.fits, each.seconds)), refused


def table(predictions: Sequence[Prediction]) -> str:
    head = ["dp", "tp", "pp", "cp", "zero", "recompute", "micro-batch", "schedule", "GiB", *AXES, "ms", "tokens/s"]
    rows = [head]
    for each in predictions:
        config, layout, memory = each.job.config, each.job.layout, each.memory
        settings = (config.zero, config.recompute, config.micro_batch_size, config.pp_schedule if layout.pp > 1 else "-")
        gigabytes = (f"{each.sent[axis] / 1e9:.3g}" if each.sent[axis] else "-" for axis in AXES)
        gib = f"{memory.total / GIB:.2f}" + "!" * (not each.fits)
        speed = f"{1e3 * each.seconds:.4g}", f"{each.tokens_per_second:,.0f}"
        rows.append([*map(str, (layout.dp, layout.tp, layout.pp, layout.cp, *settings)), gib, *gigabytes, *speed])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def main(argv: Sequence[str]) -> int:
    """Run the command; returns the exit status."""
    try:
        config, given, ranks, gpu, words = parse_plan(argv)
        if config.model.vocab_size is None and config.tokenizer not in ("auto", "bytes"):
            raise ConfigError(f"--plan: expected --vocab-size, got a tokenizer to be read: {config.tokenizer}")
        model = config.model_config_for(config.model.vocab_size or 256)
        if config.device == "cpu":
            rates = cpu_rates(ranks)
        else:
            config = config.model_copy(update={"device": "cuda"})
            if config.dtype == "float32":
                raise ConfigError("--dtype: expected bfloat16 with --plan on GPUs, whose rates are known, got float32")
            rates = gpu_rates(gpu or gpu_here() or "H200", model.head_dim)
        legal, refused = plan(config, given, ranks, rates, model)
        if not legal:
            raise ConfigError(f"--plan: expected a layout of {ranks} ranks, got none: {refused[0][1]}")
    except KosError as error:
        print(f"kos: error: {in_words(error)}", file=sys.stderr)
        return 2
    with printing():
        print(f"{ranks} rank{'s' * (ranks > 1)} on {rates.name}, {model.num_parameters():,} parameters, "
              f"{config.batch_size} x {config.seq_len} tokens a step; memory and GB sent are of the rank with most")  # fmt: skip
        print(table(legal))
        free = legal[0].memory.free / GIB
        if over := sum(not each.fits for each in legal):
            print(f"!: {over} of {len(legal)} layouts take more than the {free:.2f} GiB that are free")
        if legal[0].fits:
            print(f"proposal: {command(legal[0], words)}")
        for sizes, reason in refused:
            print(f"refused: {' '.join(f'{axis} {size}' for axis, size in sizes.items())}: {reason}")
    return 0 if legal[0].fits else 1


def command(proposal: Prediction, words: Sequence[str]) -> str:
    """The run that was proposed, with the settings that ``words`` name."""
    layout, config = proposal.job.layout, proposal.job.config
    chosen = {axis: getattr(layout, axis) for axis in ("dp", "tp", "pp", "cp") if getattr(layout, axis) > 1}
    chosen |= {"micro_batch_size": config.micro_batch_size, "zero": config.zero, "recompute": config.recompute}
    chosen |= {"pp_schedule": config.pp_schedule} if layout.pp > 1 else {}
    flags = [word for name, value in chosen.items() for word in (flag_of(name), str(value))]
    return shlex.join(["mpirun", "-n", str(layout.ranks), "python", "-m", "kos.train", *words, *flags])


def gpu_here() -> str | None:
    """The name of this machine's first GPU; CUDA is not started."""
    for path in sorted(DRIVER.glob("gpus/*/information")):
        if name := re.search(r"^Model:\s*(.+)$", path.read_text(), re.MULTILINE):
            return name[1]
    return None
