"""GPUs: a whole optimizer step queued on one stream, captured once and replayed as a CUDA graph.

Weights are fp32 (the master copy) and, where passes compute in bf16, rounded to it by the optimizer; with
``--master-weights none`` they are bf16 alone, rounded at random.  Gradients add up in fp32, and with ``--grad-dtype
bfloat16`` the one micro-batch's are rounded where they are written and summed over ranks.  Micro-batches, gradient
collectives (on the communicator's stream, beside the backward), norm, clipping, learning rate and AdamW are all of
the graph; the host adds the next batch and fetches losses and norm when they are there, a step late, so that the
device never waits for it.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kos.comm.communicator import Communicator
from kos.comm.control.base import machine_id
from kos.comm.gpu.devices import FLOAT8
from kos.cuda import driver
from kos.cuda.devices import device_info
from kos.cuda.driver import call, cu
from kos.cuda.graphs import Graph, capture
from kos.cuda.streams import Event, create_stream
from kos.errors import CollectiveError, SettingError
from kos.memory.array import Array
from kos.memory.pool import pinned_empty, pool_of
from kos.memory.sharded import Sharded
from kos.train.checkpoint.state import WritePlan
from kos.train.data.batches import Batches
from kos.train.device import Device, Piece
from kos.train.device.dry_run import HEAD_ROWS, MemoryPlan, plan_buckets, plan_memory, slow_attention
from kos.train.machine import free_memory, peak_flops
from kos.train.model.llama import LlamaConfig
from kos.train.model.model import InFlight, Result, check_fp8, make_stage, split_of
from kos.train.ops import Batch, Loss
from kos.train.ops.cuda import CudaOps, cublaslt, fp8
from kos.train.ops.fp8 import fp8_weights, linear_names, weight_store
from kos.train.ops.numpy_optimizer import SCALARS
from kos.train.ops.parameters import Parameters
from kos.train.parallel.context import ContextParallel
from kos.train.parallel.failures import gather_json, together
from kos.train.parallel.gradients import Gradients, Weights
from kos.train.parallel.mesh import Axis, Mesh
from kos.train.parallel.schedules import Action
from kos.train.step import STATUS_FIELDS, Step, StepResult


class _Staging(NamedTuple):
    """A batch and its count in pinned memory, their copies on the device, and when each may be written again."""

    batch: Batch  # of views of ``host``
    host: np.ndarray
    device: Array
    host_count: np.ndarray
    device_count: Array
    copied: Event
    taken: Event


class BatchPrefetcher:
    """This rank's rows of a step: the fields of ``batch`` are (micro_batches, B, T), where it reads them.

    ``count`` (1,) is the divisor of a micro-batch's sums (``Batches.micro_batches``).
    """

    def __init__(
        self, data: Batches, fields: Sequence[str], seq_len: int, micro_batches: Sequence[range], dp: Axis,
        context: ContextParallel, ops: CudaOps, count: Array,
    ) -> None:  # fmt: skip
        self._data, self._micro_batches, self._dp, self._context, self._ops = data, micro_batches, dp, context, ops
        pieces = context.pieces  # as samples of their own
        rows, columns = len(micro_batches[0]) * pieces, seq_len // (context.size * pieces)
        shape = len(fields), len(micro_batches), rows, columns  # in one piece, for one copy
        self._rows, self.count = ops.zeros(shape, np.int32), count
        self.batch = Batch.of_memory(self._rows, fields)
        self._stream, device = create_stream(ops.device), ops.device
        self._staging = [
            _Staging(
                Batch.of_memory(host, fields), host, ops.zeros(shape, np.int32),
                pinned_empty(1, np.float32, device), ops.zeros(1, np.float32), Event(device), Event(device),
            )
            for host in (pinned_empty(shape, np.int32, device) for _ in range(2))
        ]
        for staging in self._staging:
            staging.taken.record(ops.stream)  # the zeros are there before they are written over
        self._fetched: set[int] = set()

    def fetch(self, step: int) -> None:
        """Read the rows of ``step`` and start to copy them; does not wait for the current step."""
        staging = self._staging[step % 2]
        staging.copied.synchronize()  # of the step before the last
        micro_batches, staging.host_count[0] = self._data.micro_batches(step, self._micro_batches, self._dp)
        for index, whole in enumerate(micro_batches):
            for field, out in zip(self._context.take(whole), staging.batch, strict=True):
                if out is not field:  # both absent
                    out[index] = field
        staging.taken.hold(self._stream)
        staging.device.copy_from(staging.host, self._stream)
        staging.device_count.copy_from(staging.host_count, self._stream)
        staging.copied.record(self._stream)
        self._fetched.add(step)

    def count_of(self, step: int) -> float:
        """``count`` of a step that was fetched, on the host; the next but one takes its place."""
        return float(self._staging[step % 2].host_count[0])

    def micro_batch(self, index: int) -> Batch:
        """A micro-batch of ``batch``."""
        return self.batch.map(lambda field: field[index])

    def take(self, step: int) -> None:
        """Queue the rows of ``step`` into ``batch``, and ``count``."""
        if step not in self._fetched:
            self.fetch(step)
        staging = self._staging[step % 2]
        staging.copied.hold(self._ops.stream)
        self._rows.copy_from(staging.device, self._ops.stream)
        self.count.copy_from(staging.device_count, self._ops.stream)
        staging.taken.record(self._ops.stream)
        self._fetched.discard(step)


DRAWN = 250_000  # elements of the weights drawn for the search; no power of two, or rows were each other's copies
_LOOK_EVERY = 2e-4  # seconds between two looks at whether a step is over


class CudaDevice(Device):
    """The GPU of this rank; with ``--zero 1`` it holds only its shard of master weights and state."""

    most_in_flight = 1
    """With ``--elastic`` there are none (``Elastic``)."""

    feed: BatchPrefetcher | None
    """Made for the first batch of its source."""

    _graph: Graph | None

    def make_step(self, model: LlamaConfig, loss: Loss | None, stop_request: Callable[[], int] | None) -> Step:
        config, mesh, comm, schedule = self.config, self.mesh, self.comm, self.pipeline.schedule
        device, replicas = comm.device or 0, mesh.dense.replicas
        driver.set_device(device)
        self.place = f"cuda:{device} ({device_info(device).name})"
        if config.dtype == "fp8":
            together(comm, lambda: fp8.check_gpu(device_info(device)))
            together(comm, lambda: check_fp8(config, model, mesh, self.parts))
        split = split_of(config, model, mesh)
        multiple = math.gcd(*map(math.prod, model.parameter_shapes().values())) if config.deterministic else None
        self.ops = ops = CudaOps(device, multiple=multiple, sequential=split is not None and split.features > 1)
        uuids = comm.all_gather_bytes(device_info(ops.device).uuid.encode())
        self._reaches = _reaches(replicas)
        dry = Mesh.dry(mesh.layout, comm.rank, mesh.exact("cuda"))
        buckets = plan_buckets(config, model, self.parts, dry, self._reaches)
        shards = WritePlan(model, mesh.layout, schedule.stages_of_ranks, config.state_of(model), config.compress)

        def plan() -> MemoryPlan:
            about = device_info(device)
            if config.compress == "fp8" and replicas.size > 1 and about.compute_capability < FLOAT8:
                raise SettingError("--compress", f"int8 or int4 on {about.name}, which has no fp8", "fp8")
            saved = {"tensors to be saved": shards.host_bytes(comm.rank, config.save_async)}
            MemoryPlan(saved, 0, free_memory() // comm.local_size, f"the host of rank {comm.rank}").check()
            sharing = uuids.count(uuids[comm.rank])
            return plan_memory(config, model, ops, dry, schedule, self._reaches, sharing).check()

        self.plan, self.reachable_bytes = together(comm, plan), 0  # bytes of memory that other ranks reach into
        if not config.deterministic:
            ops.algorithms.update(self._search(model, len(self.micro_batches)))
        flags = None
        if config.elastic is not None and comm.size > 1:
            flags = Array.from_numpy(np.array(comm.abort_flags, np.uint64), ops.device, stream=ops.stream)
        step = Step(
            config, model, self.parts, mesh, self.pipeline, ops, buckets, self.micro_batch, zeros=self._zeros,
            head_rows=HEAD_ROWS, loss=loss, abort_flags=flags,
        )  # fmt: skip
        self._fix_arenas(step)
        self._pending = [_PendingResult(step.reports, step.optimizer.scalars) for _ in range(self.most_in_flight + 2)]
        self._newest: _PendingResult | None = None  # of the steps under way
        self._forward_sizes = set[int]()  # in tokens, for which the kernels of forwards alone are loaded
        return step

    def _fix_arenas(self, step: Step) -> None:
        """Give scratch memory and micro-batches in flight what was planned, and connect the stages."""
        config, mesh, (model, *_), tp = self.config, self.mesh, step.models, self.mesh.tp
        slots = [(flight.arena, self.plan.slot) for flight in step.stages.free]
        for arena, size in ((model.arena, self.plan.scratch), *slots):
            arena.reserve(size, partial(self._reachable, tp.comm) if _reaches(tp) else None)
            arena.fix()
        if mesh.pp.size > 1:
            for rows in sorted({len(self.micro_batches[0]), *self.evaluated_at_once()}):
                self.pipeline.connect(model.tensor.rows(rows * config.seq_len // mesh.cp.size))

    def _zeros(self, size: int, dtype: Any) -> Array:
        """Memory that the ranks of a machine reach into, where they can: collectives beside a pass leave it all SMs."""
        if not self._reaches:
            return self.ops.zeros(size, dtype)
        array = self._reachable(self.mesh.dense.replicas.comm, size, dtype)
        self.ops.zero(array)
        return array

    def _reachable(self, comm: Communicator, size: int, dtype: Any = np.uint8) -> Array:
        """An uninitialised array, at the same place on each rank, where the collectives of ``comm`` are fastest."""
        memory = comm.allocate(size, dtype)
        self.reachable_bytes += memory.nbytes
        return Array(memory.pointer, memory.shape, memory.dtype, memory.device, owner=memory, stream=self.ops.stream)

    def _search(self, model: LlamaConfig, accumulation_steps: int) -> dict[str, str]:
        """The fastest algorithms for the matrix products: found by one rank of a machine, for all ranks and later runs.

        Its passes, of two layers for all, are over before the optimizer's state takes the memory that they need; where
        this very code has made them before, with these shapes, all is found already.  They compute with numbers like
        those of a first step: the power that a product draws, and with it its time, depends on them.  What they do not
        meet takes cuBLASLt's first suggestion: nothing is timed later, on any rank.
        """
        ops, config = self.ops, self.config
        model = model.first_layers(2)
        dry = Mesh.dry(self.mesh.layout, self.comm.rank)
        tp, cp = dry.tp, dry.cp
        local = model.local(tp.rank, tp.size)

        def passes() -> dict[str, str]:
            sizes = self.evaluated_at_once()
            dtypes = config.dtype, config.fp8_head, config.grad_dtype
            chosen = config.micro_batch_size, config.seq_len, dtypes, config.recompute
            code = [path for path in Path(__file__).parents[1].rglob("*") if path.suffix in (".py", ".cu", ".cuh")]
            about = hashlib.blake2b(
                repr((model, chosen, tp.size, cp.size, accumulation_steps > 1, sorted(sizes))).encode()
            )
            for path in sorted(code):
                about.update(path.read_bytes())
            stored = cublaslt.stored_algorithms(ops.device)
            found = dict(stored.known)
            if about.hexdigest() in found:
                return found
            trying = CudaOps(ops.device, ops.stream, algorithms=found, search=True)
            stage = make_stage(config, model, trying, local, dry, head_rows=HEAD_ROWS, recompute=config.recompute)
            stage.arena.reserve(self.plan.arena)
            places, groups = model.placements(local), model.fused_groups(local)
            shapes = {name: at.local for name, at in places.items()}
            drawn = Parameters(shapes, config.compute_dtype, groups, trying.zeros)
            gradients, loss = drawn.like(config.grad_dtype), trying.zeros(1, np.float64)
            random = np.random.default_rng(0)
            _draw_quickly(drawn, random, trying, places)
            names = linear_names([stage], config.fp8_head) if config.dtype == "fp8" else []
            store = weight_store(names, shapes, groups, trying)
            weights = fp8_weights(drawn, store, trying, stage.arena)
            shape = config.micro_batch_size or 1, config.seq_len // cp.size
            tokens = random.integers(model.vocab_size, size=shape).astype(np.int32)
            batch = Batch(tokens, tokens)
            for accumulate in {False, accumulation_steps > 1}:
                with trying.step(stage.arena):
                    out_nD = stage.forward(weights, flight := InFlight(stage.arena), batch)
                    dx_nD = stage.arena.take(out_nD.shape, out_nD.dtype)
                    into = Gradients(gradients, accumulate, lambda name: None)
                    stage.backward(weights, flight, into, dx_nD, loss=loss)
            for size in sizes:
                stage.loss(weights, Batch(tokens[:size], tokens[:size]))
            stored.keep({**found, about.hexdigest(): "all were searched"})
            return {name: stored.known[name] for name in found}

        places = self.comm.all_gather_bytes(f"{machine_id()} {device_info(ops.device).name}".encode())
        first = places.index(places[self.comm.rank])  # of the ranks with such a GPU on this machine
        found = together(self.comm, lambda: passes() if first == self.comm.rank else {})
        pool_of(ops.device).trim()  # pieces of other sizes than those that follow
        return dict(gather_json(self.comm, found)[first])

    def describe(self) -> str:
        about = device_info(self.ops.device)
        how = "one CUDA graph a step" if self.config.graph else "no graph"
        slow = slow_attention(self.step.models[0].config, self.ops, self.config.compute_dtype)
        how += f"; attention is slow: {slow}" if slow else ""
        return f"on {about.name}, {self.config.dtype}, {how}; memory of each rank:\n{self.plan}"

    def measures(self, tokens_per_second: float) -> dict[str, float]:
        free, total = call(cu.cuMemGetInfo)
        each = tokens_per_second / self.comm.size
        columns = {"tokens_per_second_per_gpu": each, "memory_bytes": int(total - free)}
        peak = peak_flops(device_info(self.ops.device).name) if self.config.dtype == "bfloat16" else None
        if peak:
            flops = self.step.models[0].config.flops_per_token(self.config.seq_len)
            columns |= {f"mfu_{name}": each * per_token / peak for name, per_token in flops._asdict().items()}
        return columns

    # --- steps ---------------------------------------------------------------------------------------

    def loaded(self) -> None:
        self.step.optimizer.refresh_copy()

    def apply(self) -> None:
        self.step.optimizer.resume()
        super().apply()

    def start_step(self, step: int, stop_request: int) -> None:
        stream, result, program = self.ops.stream, self._pending[step % len(self._pending)], self.step
        driver.set_device(self.ops.device)
        result.begin(stream, self._newest)
        result.inputs[:] = stop_request, self.epoch, step + 1, self.newcomers
        first, feed = self.feed is None, self.feed or self._make_feed(step)
        feed.take(step)
        result.count = feed.count_of(step)
        if self.config.graph:
            self._graph = self._graph or self._capture()
        elif first and self.mesh.pp.size > 1:
            self._load_kernels()
        program.report[:STATUS_FIELDS].copy_from(result.inputs, stream)
        if self._graph is not None:
            self._graph.replay(stream)
        else:
            program.run()
        result.fetch(program.reports, program.optimizer.scalars, stream)
        self._newest = result
        if step + 1 < self.config.steps and self.source.ahead:
            feed.fetch(step + 1)

    def use(self, source: Batches) -> None:
        super().use(source)
        self.feed = self._graph = None

    def _make_feed(self, step: int) -> BatchPrefetcher:
        """Memory for the batches of ``source``, which the step reads from then on."""
        context, source, dp = self.step.models[0].context, self.source, self.mesh.dp
        about = source, source.read(step), self.config.seq_len, self.micro_batches, dp, context
        self.feed = feed = BatchPrefetcher(*about, self.ops, self.step.count)
        return feed

    def micro_batch(self, index: int) -> Batch:
        assert self.feed is not None
        return self.feed.micro_batch(index)

    def _load_kernels(self) -> None:
        """Run a step that changes nothing, which loads all kernels and connects all ranks.

        The reports of this run name no step, so that they never count as the report of one. A rank may still have such
        a report in its memory when a later collective is aborted.
        """
        self.step.optimizer.halt()
        self.ops.zero(self.step.report)
        with self.step.parallel.dry_run(), self.pipeline.dry_run():
            self.step.run()
        self.step.optimizer.resume()

    def _capture(self) -> Graph:
        """Load all kernels, then capture the step as a CUDA graph."""
        self._load_kernels()
        with capture(self.ops.stream) as graph:
            self.step.run()
        return graph

    def forwards(
        self, weights: Weights, pieces: Sequence[Piece], result: Result
    ) -> Iterator[tuple[Action, Batch, Any]]:
        """In a pipeline, kernels for sizes that are new are loaded first, by a run that sends no messages."""
        new = {piece.tokens: piece for piece in pieces if piece.tokens not in self._forward_sizes}
        if new and self.mesh.pp.size > 1:
            with self.pipeline.dry_run():
                deque(super().forwards(weights, [*new.values()], result), maxlen=0)
            self._forward_sizes |= {*new}
        yield from super().forwards(weights, pieces, result)

    def finish_step(self, step: int) -> StepResult:
        result = self._pending[step % len(self._pending)]

        def over() -> bool:
            done = result.there.done()
            if not done:
                time.sleep(_LOOK_EVERY)
            return done

        if self.comm.size > 1:  # raises what stopped the collectives of a graph, whose step is over but of no use
            self.synchronize(until=over)
        while not over():
            pass
        return self.result_of(step)

    def result_of(self, step: int) -> StepResult:
        result = self._pending[step % len(self._pending)]
        result.there.synchronize()
        if self._newest is result:
            self._newest = None
        after = dict(zip(SCALARS, map(float, result.scalars), strict=True))
        if after["halted"] and math.isfinite(after["norm"]):
            raise CollectiveError(f"step {step + 1}: expected the same epoch and step of every rank, got others")
        return self.result(result.answers, after["norm"], after["lr"], result.seconds(), result.count)

    def gradient_not_finite(self, step: int) -> str | None:
        assert self.feed is not None  # there was a step
        self.feed.take(step)  # nothing has changed since, but the gradients are those of a later step
        self.step.passes()
        self.step.norm()
        return self.first_of_all(self.step.optimizer.not_finite())

    # --- between steps -------------------------------------------------------------------------------

    def close(self, failed: bool = False) -> None:
        self._graph = None  # NCCL ends no communicator of which a graph holds calls
        super().close(failed)


def _reaches(axis: Axis) -> bool:
    """Whether the ranks of an axis access each other's memory."""
    return axis.size > 1 and "peer" in axis.comm.backend_name


def _draw_quickly(
    weights: Parameters, random: np.random.Generator, ops: CudaOps, placements: Mapping[str, Sharded]
) -> None:
    """Vectors at ``Sharded.initial``, the rest normal of deviation 0.02: ``DRAWN`` numbers over and over."""
    flat, there = weights.flat, min(DRAWN, weights.flat.size)
    drawn = 0.02 * random.standard_normal(there, np.float32)
    flat[:there].copy_from(drawn.astype(flat.dtype.numpy), ops.stream)
    while there < flat.size:
        more = min(there, flat.size - there)
        ops.copy(flat[:more], flat[there : there + more])
        there += more
    for name, span in weights.spans.items():
        if len(weights.shapes[name]) == 1:
            constant = np.full(span.stop - span.start, placements[name].initial, flat.dtype.numpy)
            flat[span].copy_from(constant, ops.stream)


class _PendingResult:
    """The host's inputs and results of a step, in pinned memory, while the device runs the next step."""

    def __init__(self, answers: Array, scalars: Array) -> None:
        device = answers.device
        self.inputs, self.answers, self.scalars = (
            pinned_empty(shape, np.float64, device) for shape in (STATUS_FIELDS, answers.shape, scalars.shape)
        )
        self.there, self._began = Event(device, timed=True), Event(device, timed=True)
        self._since, self.count = self._began, 0.0

    def begin(self, stream: object, before: _PendingResult | None) -> None:
        """Queue the mark that a step is timed from: where one before it is under way, that one's end."""
        self._since = self._began if before is None else before.there
        if before is None:
            self._began.record(stream)

    def seconds(self) -> float:
        """The seconds of a step on the device; the host may learn of its end late."""
        return self.there.seconds_since(self._since)

    def fetch(self, answers: Array, scalars: Array, stream: object) -> None:
        """Queue the copies."""
        answers.copy_to(self.answers, stream)
        scalars.copy_to(self.scalars, stream)
        self.there.record(stream)
