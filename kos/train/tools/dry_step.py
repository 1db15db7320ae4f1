"""A step without computation and communication: predicts its duration, and the bytes a rank sends on each axis.

The step (``kos.train.train``) runs with operations and communicators that only advance a clock:

- An operation takes the longer of its flops and its bytes (``kos.train.tools.costs``), at the hardware's rates;
  attention takes their sum.
- A collective takes a latency and the time of the bytes that a ring sends: 2 (n - 1) / n of an all-reduce, half of that
  of an all-gather or a reduce-scatter. Asynchronous collectives overlap with the operations on a GPU, not on a CPU.
  Between hosts (``Network``) it takes the time of the bytes that leave a host (``Link``).
- Messages between stages take no time here: ``schedules.simulate`` has it, and the waiting for other ranks.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple, cast

from kos.comm.communicator import Communicator
from kos.comm.compression import FORMATS
from kos.comm.reduction import ReduceOp
from kos.dtypes import DTYPES
from kos.errors import SettingError
from kos.train.config.options import TrainConfig
from kos.train.device import cpu
from kos.train.device.memory_plan import DryCudaOps, DryRun, MemoryPlan, plan_memory
from kos.train.layers import Weights
from kos.train.model.llama import LlamaConfig, Local
from kos.train.model.parameters import Parameters
from kos.train.ops import Array
from kos.train.optim import MatrixRule, UpdateRule, elements
from kos.train.parallel.mesh import Axis, Layout, Mesh
from kos.train.parallel.pipeline import Buffer
from kos.train.parallel.schedules import Action, Schedule
from kos.train.tools.costs import GPUS, Rates, TimedOps, cost, update_bytes

AXES = {"gradients": "replicas", "tp": "tp", "pp": "pp", "cp": "cp"}
"""What a rank sends, and the axis of ``Mesh`` over which it sends it."""


class Network(NamedTuple):
    """The hosts of a job, with as many ranks each, and the bytes per second that leave each."""

    hosts: int
    rate: float
    phases: bool = True
    """Whether exact collectives go in phases where that is faster than a ring of all ranks."""

    def local(self, layout: Layout, *axes: str) -> int:
        """How many ranks of a group along these axes each host has. ConfigError if hosts differ."""
        groups = defaultdict[tuple[int, ...], Counter[int]](Counter)
        for rank in range(layout.ranks):
            place = layout.coordinates(rank).items()
            groups[tuple(at for axis, at in place if axis not in axes)][rank * self.hosts // layout.ranks] += 1
        counts = [[*group.values()] for group in groups.values()]
        for each in counts:
            if {*each} != {counts[0][0]}:
                expected = f"as many ranks of {' and '.join(axes)} on every host"
                raise SettingError(f"--hosts {self.hosts}", expected, each)
        return counts[0][0]


ONE_HOST = Network(1, 0.0)


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
        local = self.network.local(self.layout, "dp", "cp")
        return local if local < self.layout.dp * self.layout.cp else 1

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
            return plan_memory(self.config, self.model, cpu.DryOps(), mesh, self.schedule, sharing=ranks)
        gpu = GPUS[self.rates.name]
        return plan_memory(self.config, self.model, gpu, mesh, self.schedule, free=gpu.free)


class Clock:
    """``spent``: the seconds of one rank, by axis the bytes that it has sent, and those that have left its host.

    ``log``: actions, collectives (by axis), norm and update, each with its start and end in seconds.
    """

    def __init__(self, rates: Rates, network: Network = ONE_HOST) -> None:
        self.rates, self.network, self.spent = rates, network, defaultdict[str, float](float)
        self.message = 0.0  # seconds of the longest between two stages
        self.log: list[tuple[str, float, float]] = []

    def operate(self, name: str, nbytes: int, flops: float) -> None:
        rates, moving = self.rates, nbytes / self.rates.memory
        if name.startswith("attention"):
            seconds = moving + flops / rates.attention["backward" in name]
        else:
            seconds = max(moving, flops / (rates.fp8 if name == "scaled_product" else rates.linear))
        self.spent["seconds"] += rates.operation + seconds

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """An operation that takes time."""

        def run(*arguments: Any) -> Any:
            self.operate(name, *cost(name, arguments))
            return function(*arguments)

        return run

    def wait(self, until: float) -> None:
        self.spent["seconds"] = max(self.spent["seconds"], until)


class Arrival(NamedTuple):
    """A Work that ends at a time of the clock."""

    clock: Clock
    end: float

    def wait(self) -> None:
        self.clock.wait(self.end)


class Link:
    """Stands in for the communicator of an axis: counts what its rank sends, and how long that takes.

    Its ranks are on so many ``hosts``.  ``beside``: the groups of this axis on each, which send at the same time.
    """

    def __init__(self, clock: Clock, axis: str, rank: int, size: int, hosts: int = 1, beside: int = 1) -> None:
        self.clock, self.axis, self.rank, self.size, self._free = clock, axis, rank, size, 0.0
        self._hosts, self._beside = hosts, beside

    device = None

    def exact_group_size(self, device: int | None = None) -> int:
        return self.size // self._hosts if self._hosts > 1 else 1

    def split(self, color: int | None, key: int | None = None) -> Link:
        return self

    def all_reduce(
        self, x: Array, op: ReduceOp = ReduceOp.SUM, *, async_op: bool = False, compress: str | None = None,
        residual: Array | None = None, deterministic: bool = False,
    ) -> Arrival:  # fmt: skip
        return self._reduce(2, x, async_op, compress, residual)

    def reduce_scatter(
        self, x: Array, out: Array, *, async_op: bool = False, compress: str | None = None,
        residual: Array | None = None,
    ) -> Arrival:  # fmt: skip
        return self._reduce(1, x, async_op, compress, residual)

    def _reduce(self, passes: int, x: Array, async_op: bool, compress: str | None, residual: Array | None) -> Arrival:
        if residual is not None:
            self.clock.operate("feed_back", 4 * residual.nbytes, 0.0)
        if compress is None:
            return self._collective(passes, x.nbytes, async_op)
        whole, hosts, wire = FORMATS[compress].nbytes(x.size), self._hosts, self.clock.rates.wire
        if hosts == 1:
            return self._collective(passes, whole, async_op)
        local = self.size // hosts
        within, between = passes * x.nbytes * (local - 1) / local, passes * whole * (hosts - 1) / hosts
        out = self._beside * between
        return self._queue(within + between / local, out / self.clock.network.rate + within / wire, out, async_op)

    def all_gather(self, x: Array, out: Array, *, async_op: bool = False) -> Arrival:
        return self._collective(1, x.nbytes * self.size, async_op)

    def reduce(self, x: Array, root: int, *, async_op: bool = False) -> Arrival:
        return self._collective(1, x.nbytes, async_op)

    broadcast = reduce

    def send_recv(self, x: Array, out: Array, to: int, source: int, *, async_op: bool = False) -> Arrival:
        return self._queue(x.nbytes, *self._message(x, self._hosts > 1), async_op)

    def send(self, x: Array, to: int, *, async_op: bool = False) -> Arrival:
        clock, local = self.clock, self.size // self._hosts
        seconds, out = self._message(x, to // local != self.rank // local)
        clock.spent[self.axis] += x.nbytes
        clock.spent["hosts"] += out
        clock.message = max(clock.message, clock.rates.latency + seconds)
        return Arrival(clock, 0.0)

    def recv(self, x: Array, source: int, *, async_op: bool = False) -> Arrival:
        return Arrival(self.clock, 0.0)

    def _message(self, x: Array, leaves: bool) -> tuple[float, float]:
        """Seconds of a message that one rank of each group sends out of its host, and bytes that leave it."""
        out = x.nbytes * self._beside * leaves
        return max(x.nbytes / self.clock.rates.wire, out / self.clock.network.rate if leaves else 0.0), out

    def _collective(self, passes: int, whole: int, async_op: bool) -> Arrival:
        """One that sends ``whole``, the bytes of all, so many times: each rank the part of the others."""
        sent, wire = passes * whole * (self.size - 1) / self.size, self.clock.rates.wire
        hosts, network, local = self._hosts, self.clock.network, self.size // self._hosts
        if hosts == 1:
            return self._queue(sent, sent / wire, 0.0, async_op)
        least = self._beside * whole * (hosts - 1) / hosts
        ring = self._beside * whole * (self.size - 1) / self.size
        ways = [(passes * ring, 0.0)]
        if network.phases:
            ways.append((passes * least, passes * whole * (local - 1) / local / wire))
        seconds, out = min((out / network.rate + within, out) for out, within in ways)
        return self._queue(sent, seconds, out, async_op)

    def _queue(self, sent: float, seconds: float, out: float, async_op: bool) -> Arrival:
        clock, rates = self.clock, self.clock.rates
        clock.spent[self.axis] += sent
        if out:
            clock.spent["hosts"] += out
        start = max(self._free, clock.spent["seconds"])
        self._free = start + rates.latency + seconds
        clock.log.append((self.axis, start, self._free))
        arrival = Arrival(clock, self._free)
        if not async_op or not rates.overlap:
            arrival.wait()
        return arrival


class TimedMesh(Mesh):
    """The mesh of a rank whose axes are links."""

    def __init__(self, clock: Clock, job: Job, rank: int) -> None:
        self._clock, self._network, self._of_a_host = clock, job.network, job.layout.ranks // job.network.hosts
        super().__init__(cast(Communicator, Link(clock, "world", rank, job.layout.ranks)), job.layout)
        for name, of_mesh in AXES.items():
            axes = ("dp", "cp") if name == "gradients" else (name,)
            setattr(self, of_mesh, self._link(name, getattr(self, of_mesh), job.network.local(job.layout, *axes)))

    def _link(self, name: str, axis: Axis, local: int = 0) -> Axis:
        """An axis of which ``local`` ranks are on each host; 0: all."""
        local = local or axis.size
        link = Link(self._clock, name, axis.rank, axis.size, axis.size // local, self._of_a_host // local)
        return axis._replace(group=axis.group and cast(Communicator, link))

    def copies(self, count: int) -> Axis:
        return self._link("tp", super().copies(count))


class TimedDryRun(DryRun):
    """A rank's part of one step of a job: ``clock`` at its end, and the time of each of its ``actions``."""

    def __init__(self, job: Job, stage_rank: int) -> None:
        self.clock, self.actions = Clock(job.rates, job.network), dict[Action, dict[str, float]]()
        has_windows = any(map(job.model.window, range(job.model.num_hidden_layers)))
        cp_rank = job.layout.cp - 1 if has_windows else 0  # in a window, no rank attends to more pairs than the last
        rank = job.layout.rank({"pp": stage_rank, "cp": cp_rank})
        mesh = TimedMesh(self.clock, job, rank)
        dry = cpu.DryOps() if job.config.device == "cpu" else DryCudaOps(GPUS[job.rates.name])
        ops = TimedOps(dry, self.clock.timed)
        super().__init__(job.config, job.model, mesh, job.schedule, dry, ops, bucketed=True)
        self.optimizer = self  # of which ``run`` asks for the update
        self.run()

    def act(self, action: Action, weights: Weights, received: Buffer | None) -> None:
        before = self.clock.spent.copy()
        super().act(action, weights, received)
        self.actions[action] = {key: spent - before[key] for key, spent in self.clock.spent.items()}
        self._log(str(action), before["seconds"])

    def _log(self, what: str, start: float) -> None:
        self.clock.log.append((what, start, self.clock.spent["seconds"]))

    def norm(self) -> None:
        start = self.clock.spent["seconds"]
        self.clock.operate("squares", self.gradients.flat.nbytes, 0.0)
        self._log("norm", start)

    def agree(self, gradients: Parameters, report: Array, reports: Array) -> None:
        """Takes no time worth counting."""

    def update(self, gradients: Parameters, micro_batches: int, targets: Array) -> None:
        config, clock, rule, start = self.config, self.clock, self.config.update_rule(), self.clock.spent["seconds"]

        def moved(rule: UpdateRule, count: int) -> None:
            """The passes over so many weights and what is kept of them."""
            same = config.compute_dtype == config.master_dtype and not self.parallel.sharded
            master, copy = DTYPES[config.master_dtype].itemsize, 0 if same else DTYPES[config.compute_dtype].itemsize
            of_each = update_bytes(master, gradients.flat.dtype.itemsize, rule.state_bytes(), copy)
            clock.operate("update", count * of_each, 0.0)

        own = [kept for kept in self.state.values() if not isinstance(kept.rule, MatrixRule)]
        moved(rule, elements(own[0].slices if own else self.held))
        for each, held, most in self.matrices():
            moved(each, held.flat.size)
            for batch in each.batches(held, most):
                x = self.dry.zeros((len(batch), *batch[0].shape), config.compute_dtype)
                if batch[0].part != batch[0].shape:
                    self.mesh.tp.comm.all_gather(self.dry.zeros((len(batch), *batch[0].part), config.compute_dtype), x)
                clock.operate("orthogonalize", *cost("orthogonalize", (x,)))
        self._log("update", start)
