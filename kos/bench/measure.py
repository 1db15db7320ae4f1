"""Runs batches of calls of all implementations in turns, measures their times and checks their results."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Any

import numpy as np

from kos.bench.implementations import Call
from kos.bench.memory import Space
from kos.comm import Communicator

Times = list[float]

_LEAD_US = 200.0
"""How long an untimed graph runs before a timed one, whose launch takes tens of microseconds."""


class Job:
    """The ranks: what brings them together between batches, apart from what is measured."""

    def __init__(self, comm: Communicator) -> None:
        self.comm, self.rank, self.size = comm, comm.rank, comm.size
        self.is_mock = comm.backend_name == "mock"  # rendezvous.threads is also set for one process
        self._mpi: Any = None
        if comm.rendezvous.mpi_comm is not None:
            self._mpi = comm.rendezvous.mpi_comm.Dup()

    def barrier(self) -> None:
        if self._mpi is not None:
            self._mpi.Barrier()
        else:
            self.comm.barrier()

    def gather(self, values: Sequence[float]) -> Any:
        """All ranks' ``values``, (size, len(values)) in float64."""
        mine = np.array(values, np.float64)
        return self.comm.all_gather(mine).reshape(self.size, -1)

    def cpu_ns(self) -> int:
        """CPU time of this rank so far."""
        return time.thread_time_ns() if self.is_mock else time.process_time_ns()

    def close(self) -> None:
        if self._mpi is not None:
            self._mpi.Free()


class HostTimer:
    """Times calls that return when their result is there."""

    MODES = ("eager", "single_shot")

    def __init__(self, job: Job) -> None:
        self._job = job

    def eager(self, calls: Sequence[Call], lead: Call, operations: int = 0) -> tuple[Times, float]:
        """Mean time of back-to-back ``calls``, and the CPU time of each, in us.

        ``operations``: how many operations they are together, if not one each.
        """
        cpu_ns, now, count = self._job.cpu_ns, time.perf_counter_ns, operations or len(calls)
        self._job.barrier()
        cpu, began = cpu_ns(), now()
        for call in calls:
            call()
        ended, cpu = now(), cpu_ns() - cpu
        return [(ended - began) / count / 1e3], cpu / count / 1e3

    def single_shot(self, calls: Sequence[Call], lead: Call) -> tuple[Times, float]:
        """The time of each call, begun after a barrier."""
        cpu_ns, now, barrier = self._job.cpu_ns, time.perf_counter_ns, self._job.barrier
        times, cpu = [], 0
        for call in calls:
            barrier()
            cpu -= cpu_ns()
            began = now()
            call()
            times.append((now() - began) / 1e3)
            cpu += cpu_ns()
        return times, cpu / len(calls) / 1e3

    def settle(self) -> None:
        """What was written to the slots is there."""


class DeviceTimer:
    """Times calls that queue work on ``stream``.  ``lead`` is queued before the timed calls: it aligns the GPUs.

    An untimed graph of the same call precedes the timed graph.  While it runs, the launch of the timed graph completes.
    """

    MODES = ("graph", "eager", "single_shot")

    def __init__(self, job: Job, stream: Any) -> None:
        from kos.cuda.driver import call, cu

        self._job, self._stream, self._call, self._cu = job, stream, call, cu
        self._handle = int(stream.handle)
        self._begun, self._ended = (call(cu.cuEventCreate, 0) for _ in range(2))

    def settle(self) -> None:
        self._call(self._cu.cuStreamSynchronize, self._handle)

    def capture(self, calls: Sequence[Call]) -> tuple[Call, int]:
        """A function that replays the ``calls``, and how many SMs the largest of their kernels can take."""
        from kos.cuda import capture, device_info
        from kos.cuda.graphs import kernel_blocks

        with capture(self._stream, keep=calls) as graph:
            for call in calls:
                call()
            sms = min(kernel_blocks(self._stream), device_info(graph.device).multiprocessors)
        return lambda: graph.replay(self._stream), sms

    def lead(self, calls: Sequence[Call]) -> Call:
        """A function that replays the ``calls``, as often as the launch of another graph takes.  Collective."""
        replay, _ = self.capture(calls)
        for _ in range(2):  # the first is slower
            self._job.barrier()
            began = time.perf_counter_ns()
            replay()
            self.settle()
        slowest = float(self._job.gather([(time.perf_counter_ns() - began) / 1e3]).max())
        return self.capture([*calls] * ceil(_LEAD_US / slowest))[0] if slowest < _LEAD_US else replay

    def graph(self, replay: Call, calls: int, lead: Call) -> tuple[Times, float]:
        return self._timed([replay], calls, lead)

    def eager(self, calls: Sequence[Call], lead: Call) -> tuple[Times, float]:
        return self._timed(calls, len(calls), lead)

    def _timed(self, calls: Sequence[Call], operations: int, lead: Call) -> tuple[Times, float]:
        call, cu, now = self._call, self._cu, time.perf_counter_ns
        self._job.barrier()
        lead()
        call(cu.cuEventRecord, self._begun, self._handle)
        began = now()
        for one in calls:
            one()
        cpu = now() - began
        call(cu.cuEventRecord, self._ended, self._handle)
        self.settle()
        milliseconds = float(call(cu.cuEventElapsedTime, self._begun, self._ended))
        return [1e3 * milliseconds / operations], cpu / operations / 1e3

    def single_shot(self, calls: Sequence[Call], lead: Call) -> tuple[Times, float]:
        """From each call to the moment the host has seen it done."""
        now, barrier = time.perf_counter_ns, self._job.barrier
        times, cpu = [], 0
        for one in calls:
            barrier()
            began = now()
            one()
            cpu += now() - began
            self.settle()
            times.append((now() - began) / 1e3)
        return times, cpu / len(calls) / 1e3


Timer = HostTimer | DeviceTimer


@dataclass
class Samples:
    """What the batches of one row gave: ``times`` are the slowest rank's, ``sms`` what a kernel in a graph can take."""

    times: Times = field(default_factory=list)
    cpu: Times = field(default_factory=list)
    wrong: int = 0
    iterations: int = 0
    sms: int | None = None

    @property
    def time_us(self) -> float:
        return float(np.median(self.times))

    @property
    def p99_us(self) -> float:
        return float(np.percentile(self.times, 99))

    @property
    def cpu_us(self) -> float:
        return float(np.median(self.cpu))


class Run:
    """One implementation on the slots of one case; the last slot is the lead's.

    ``repeats``: the calls of a batch use each slot so often.  ``loop``: one function that makes all calls of a batch.
    """

    def __init__(
        self, name: Any, space: Space, calls: Sequence[Call], repeats: int = 1, loop: Call | None = None
    ) -> None:
        self.name, self._space, self.repeats, self.loop = name, space, repeats, loop
        self._calls, self._lead = calls[:-1], calls[-1]
        self._replay: Call | None = None
        self._replay_lead: Call = self._lead
        self._iteration = 0
        self.sms: int | None = None

    def offers(self, mode: str) -> bool:
        """Whether it can be measured in that mode."""
        return mode == "eager" or bool(self._calls)

    def batch(self, job: Job, timer: Timer, mode: str) -> tuple[Times, float, int]:
        """Write all slots, time their calls, check all slots: times and CPU time in us, wrong elements."""
        first, slots = self._iteration, range(len(self._calls) if self.loop is None else len(self._space.slots) - 1)
        self._iteration += len(slots)
        for slot in slots:
            self._space.fill(slot, first + slot)
        timer.settle()
        if mode == "graph":
            assert isinstance(timer, DeviceTimer)
            if self._replay is None:
                self._lead()  # what an implementation does on its first call is none of a graph's business
                timer.settle()
                self._replay, self.sms = timer.capture(self._calls)
                self._replay_lead = timer.lead([self._lead] * len(slots))
            times, cpu = timer.graph(self._replay, len(slots), self._replay_lead)
        elif self.loop is not None and mode == "eager":
            assert isinstance(timer, HostTimer)
            times, cpu = timer.eager([self.loop], self._lead, len(slots) * self.repeats)
        else:
            timed: Callable[[Sequence[Call], Call], tuple[Times, float]] = getattr(timer, mode)
            times, cpu = timed([*self._calls] * self.repeats, self._lead)
        for slot in slots:
            self._space.check(slot, first + slot)
        return times, cpu, self._space.wrong()

    def free(self) -> None:
        """Free the captured graphs."""
        self._replay, self._replay_lead, self.sms = None, self._lead, None


def measure(
    job: Job, timer: Timer, runs: Sequence[Run], mode: str, iterations: int, slots: int, warmup: int = 1
) -> list[Samples]:
    """At least ``iterations`` timed calls of each run, in five batches or more, in turns, after ``warmup`` untimed.

    The order of the turns changes from round to round: what one run leaves in the caches helps or hinders the next.
    """
    samples = [Samples() for _ in runs]
    orders = np.random.default_rng(0)
    untimed = -(-warmup // slots)  # batches
    for index in range(untimed + max(5, -(-iterations // slots))):
        for turn in orders.permutation(len(runs)):
            run, sample = runs[turn], samples[turn]
            times, cpu, wrong = run.batch(job, timer, mode)
            ranks = job.gather([cpu, wrong, *times])
            sample.wrong += int(ranks[:, 1].sum())  # of the warm-up too
            if index >= untimed:
                sample.iterations += slots * run.repeats
                sample.cpu.append(float(ranks[:, 0].mean()))
                sample.times += ranks[:, 2:].max(axis=0).tolist()
    for run, sample in zip(runs, samples, strict=True):
        sample.sms = run.sms
        run.free()
    return samples
