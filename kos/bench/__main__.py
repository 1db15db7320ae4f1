"""The command: ``mpirun -n RANKS python -m kos.bench [arguments]``; without mpirun, on the mock."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import kos
from kos import _core
from kos.bench import report
from kos.bench.cases import BARRIER, IN_PLACE, Case, Data
from kos.bench.implementations import GPU_BACKENDS, OURS, Implementation, Ours, OursInWindows, not_measurable
from kos.bench.limits import DeviceLimits, copy_run, host_flag_us
from kos.bench.loop import CLoop
from kos.bench.measure import DeviceTimer, HostTimer, Job, Run, Timer, measure
from kos.bench.memory import DeviceMemory, HostMemory, Memory, Space
from kos.bench.options import parse
from kos.bench.plot import plot
from kos.bench.ratios import lines as ratios
from kos.bench.summary import busy, summary
from kos.bench.tables import check_output, write_table
from kos.comm import Communicator
from kos.comm.control.bootstrap import default_rendezvous
from kos.cuda import unavailable
from kos.dtypes import DTYPES
from kos.errors import BackendUnavailable, ConfigError, InvalidArgument, KosError
from kos.files import check_picture, check_writable
from kos.launcher import launched_rank
from kos.reporting import exit_status
from kos.reporting import report as report_error
from kos.testing import spawn

STARTED_BY = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "WORLD_SIZE")
RING_BYTES = {False: 128 << 20, True: 8 << 30}
"""The most that the slots of a batch take, for host memory and for GPUs."""
MOST_SLOTS = {False: 16, True: 100}
ROTATED_BYTES, BATCH_BYTES, BATCHES = 64 << 20, 16 << 20, 31
"""With ``--arrays``: the most bytes of all arrays together, the most bytes of a batch of calls, the most batches."""
TIMED_BYTES = 512 << 20
"""Larger messages are timed fewer times, until their bytes add up to this."""


class Benchmark:
    """The run of one rank."""

    def __init__(self, control: Communicator, options: argparse.Namespace) -> None:
        self.options, self.job = options, Job(control)
        self.cases = all_cases(options, control.size)
        self.skipped: dict[str, str] = {}
        self.stream: Any = None
        self.device: int | None = None
        self.memory: Memory = HostMemory()
        self.timer: Timer = HostTimer(self.job)
        self.limits: DeviceLimits | None = None
        self.figures: dict[str, float] = {}
        if options.device == "gpu":
            self._use_gpu(control)
        else:
            self.figures["flag_round_trip_us"] = host_flag_us(self.job)
        self.implementations = list(self._implementations(control))
        if not self.implementations:
            reasons = "; ".join(f"{name}: {why}" for name, why in self.skipped.items()) or "no backend for it chosen"
            raise InvalidArgument(f"nothing to measure on a {options.device}: {reasons}")

    def _use_gpu(self, control: Communicator) -> None:
        from kos.comm.gpu.devices import device_of
        from kos.cuda import create_stream, set_device

        self.device = device_of(control.rendezvous).index
        set_device(self.device)
        self.stream = create_stream(self.device)
        self.memory = DeviceMemory(self.device, self.stream)
        self.timer = DeviceTimer(self.job, self.stream)
        self.limits = DeviceLimits(self.job, self.device, self.stream)
        self.figures = self.limits.figures()

    def _wanted(self, name: str) -> bool:
        return name in self.options.backend if self.options.backend else name != "tcp"

    def _implementations(self, control: Communicator) -> Iterator[Implementation]:
        """Everything that was asked for and can run; why the rest cannot is kept."""
        gpu, asked = self.device is not None, self.options.backend or ()
        if self.job.is_mock:
            if self._wanted("mock"):
                yield from self._of(control, "mock")
            self.skipped |= dict.fromkeys(set(asked) - {"mock"}, "needs mpirun")
            return
        self.skipped |= not_measurable(asked, gpu, unavailable())
        for name in [name for name in OURS if (name in GPU_BACKENDS) == gpu and self._wanted(name)]:
            if name == "mpi" and control.backend_name != "mpi":
                self.skipped[name] = "the ranks are not processes of an MPI job (start with mpirun)"
                continue
            try:
                comm = kos.init(OURS[name], device=self.device, rendezvous=default_rendezvous(120.0))
            except KosError as error:
                self.skipped[name] = str(error).removeprefix(f"{name}: ")
                continue
            yield from self._of(comm, name)
        yield from self._gpu_peers(control) if gpu else self._host_peers(control)

    def _of(self, comm: Communicator, name: str) -> Iterator[Implementation]:
        for algorithm in self.options.algorithm:
            yield Ours(comm, name, algorithm)
            if self.stream is not None and algorithm != "deterministic":
                yield OursInWindows(comm, name, self.stream, algorithm)
        if "auto" in self.options.algorithm and self.options.arrays:
            yield Ours(comm, name, call="async")

    def _host_peers(self, control: Communicator) -> Iterator[Implementation]:
        from kos.bench.peers import OpenMPI, Torch, torch_world

        if self._wanted("mpi-native") and control.rendezvous.mpi_comm is not None:
            yield OpenMPI()
        if self.options.arrays and control.rendezvous.mpi_comm is not None:
            if self._wanted("mpi-again"):
                yield OpenMPI(again=True)
            if self._wanted("mpi-c"):
                try:
                    yield CLoop(control)
                except KosError as error:
                    self.skipped["mpi-c"] = str(error)
        if self._wanted("gloo"):
            try:
                yield Torch("gloo", torch_world(control).group.WORLD)
            except ImportError as error:
                self.skipped["gloo"] = str(error)

    def _gpu_peers(self, control: Communicator) -> Iterator[Implementation]:
        from kos.bench import peers_gpu
        from kos.bench.peers import torch_world

        assert self.device is not None
        for name, raw in (("nccl", peers_gpu.RawNCCL), ("nccl-window", peers_gpu.NCCLWindows)):
            if self._wanted(name):
                try:
                    yield raw(control, self.device, self.stream)
                except KosError as error:
                    self.skipped[name] = str(error)
        if not any(self._wanted(name) for name in ("torch-nccl", "torch-symm")):
            return
        try:
            group = peers_gpu.torch_gpu_group(torch_world(control), self.device, self.stream)
        except ImportError as error:
            self.skipped["torch-nccl"] = self.skipped["torch-symm"] = str(error)
            return
        if self._wanted("torch-nccl"):
            yield peers_gpu.torch_nccl(group)
        if self._wanted("torch-symm") and self.job.size > 1:
            for algorithm in ("one_shot", "two_shot"):
                try:
                    yield peers_gpu.TorchSymmetric(group, algorithm, self.stream)
                except ImportError as error:
                    self.skipped["torch-symm"] = str(error)

    def rows(self) -> Iterator[list[report.Row]]:
        """The rows of one operation and size at a time."""
        modes = [mode for mode in self.timer.MODES if mode in (self.options.mode or self.timer.MODES)]
        for cases in self.cases:
            rotations = self.options.arrays or [0]
            yield [row for case in cases for arrays in rotations for row in self._measured(case, arrays, modes)]

    def _measured(self, case: Case, arrays: int, modes: list[str]) -> list[report.Row]:
        if not arrays:
            return self._measure(case, modes)
        return [row for mode in modes for row in self._rotate(case, arrays, mode)]

    def _rotate(self, case: Case, arrays: int, mode: str) -> list[report.Row]:
        """The rows of batches that use some arrays again and again; single calls on the first of ``--arrays`` alone."""
        if mode != "eager" and arrays != self.options.arrays[0]:
            return []
        slots = max(1, min(arrays, ROTATED_BYTES // (sum(case.largest) * case.dtype.itemsize)))
        calls = min(self.options.iterations // (1 if mode == "eager" else 4), BATCH_BYTES // case.nbytes)
        runs = [run for run in self._runs(case, slots, max(1, calls // slots)) if run.offers(mode)]
        batches = min(BATCHES, self.options.iterations)
        samples = measure(self.job, self.timer, runs, mode, batches * slots, slots, self.options.warmup)
        return [
            report.make_row(case, run.name, mode, sample, 0.0, arrays)
            for run, sample in zip(runs, samples, strict=True)
        ]

    def _measure(self, case: Case, modes: list[str]) -> list[report.Row]:
        gpu = self.device is not None
        both = sum(case.largest) * case.dtype.itemsize
        slots = max(2, min(MOST_SLOTS[gpu], RING_BYTES[gpu] // both))
        iterations = min(self.options.iterations, max(10, TIMED_BYTES // case.nbytes))
        runs = self._runs(case, min(slots, iterations))
        rows = []
        for mode in modes:
            samples = measure(self.job, self.timer, runs, mode, iterations, min(slots, iterations), self.options.warmup)
            copies = [s for run, s in zip(runs, samples, strict=True) if run.name == "copy"]
            limit = self.limits.limit_us(case) if self.limits is not None else 0.0
            if copies:
                limit = copies[0].time_us + self.figures["flag_round_trip_us"]
            rows += [
                report.make_row(case, run.name, mode, sample, limit, 0)
                for run, sample in zip(runs, samples, strict=True)
                if run.name != "copy"
            ]
        del runs
        for implementation in self.implementations:
            implementation.release()
        return rows

    def _runs(self, case: Case, slots: int, repeats: int = 0) -> list[Run]:
        """``repeats``: the calls of a batch use each slot so often; 0: each has its own."""
        data = Data(case, self.job.rank, self.options.seed)
        spaces: dict[str, Space] = {}
        runs = []
        for implementation in self.implementations:
            if not implementation.offers(case):
                continue
            space = spaces.get(implementation.space)
            if space is None:
                allocate = implementation.allocate() or self.memory.empty
                space = spaces[implementation.space] = Space(case, data, self.memory, allocate, slots)
            loop = implementation.loop(case, space.slots[:-1], slots * repeats) if repeats else None
            calls = [implementation.bind(case, slot.send, slot.recv) for slot in space.slots]
            bound = [call for call in calls if call is not None] or ([] if loop is None else [loop])
            if bound:
                runs.append(Run(implementation, space, bound, repeats or 1, loop))
        if self.limits is None and not repeats:
            runs.append(copy_run(case, self.job.rank, slots))
        return runs

    def close(self) -> None:
        for implementation in reversed(self.implementations):
            implementation.close()
        self.job.close()


def refuse(control: Communicator, problem: str) -> NoReturn:
    """End all ranks; one of them prints the reason."""
    if control.rank == 0:
        print(f"kos: error: {problem}", file=sys.stderr, flush=True)
    raise SystemExit(2)


def work(control: Communicator, options: argparse.Namespace) -> report.Row | None:
    """All rows, printed as they come and written at the end; the JSON object on rank 0."""
    try:
        benchmark = Benchmark(control, options)
    except InvalidArgument as error:  # alike on every rank
        refuse(control, str(error))
    rows: list[report.Row] = []
    op = ""
    for found in benchmark.rows():
        rows += found
        if control.rank == 0 and found:
            if found[0]["op"] != op:
                op = found[0]["op"]
                print(report.heading(op, control.size), flush=True)
            print("\n".join(report.table(found)), flush=True)
    if not rows:
        refuse(control, "nothing was measured: expected a backend that has one of these operations, got none")
    measured = {row["backend"] for row in rows}
    for each in benchmark.implementations:
        if each.backend not in measured:
            benchmark.skipped[each.backend] = "it has none of these operations in this type and place"
    result = None
    if control.rank == 0:
        wrong = sum(row["wrong"] for row in rows)
        print(f"# {wrong} wrong elements in {sum(row['iterations'] for row in rows)} timed calls, all checked")
        for name, why in benchmark.skipped.items():
            print(f"# {name} left out: {why}")
        if _core.unavailable:
            print(f"# {_core.unavailable}; ranks of one host share no memory")
        result = report.document(rows, benchmark.device, benchmark.figures, benchmark.skipped, control.size)
        if options.json:
            options.json.write_text(report.to_json(result))
        print("\n".join([*(ratios(rows) if options.arrays else summary(rows)), *busy(rows)]))
        print(draw(result, options), flush=True)
    benchmark.close()
    return result


def draw(result: report.Row, options: argparse.Namespace) -> str:
    """Draw the picture unless ``--no-plot``.  Returns a line that names its file, or says why there is none."""
    if not options.plot and options.no_plot:
        return "# no picture (--no-plot)"
    path = options.plot or picture_name(result, options.json)
    try:
        check_picture(path)
    except KosError as error:
        return f"# no picture: {error}"
    plot(result, path)
    return f"# picture: {path}"


def picture_name(result: report.Row, json: Path | None) -> Path:
    """The file of the picture: beside that of the rows, or in the current folder, named after what was measured."""
    if json is not None:
        return json.with_suffix(".png")
    ops = list(dict.fromkeys(row["op"] for row in result["rows"]))
    ranks = max(row["ranks"] for row in result["rows"])
    return Path(f"bench-{ops[0] if len(ops) == 1 else 'collectives'}-{ranks}.png")


def all_cases(options: argparse.Namespace, ranks: int) -> list[list[Case]]:
    """The cases to measure, by operation and size.  Raises InvalidArgument for one that cannot be measured."""

    def places(op: str) -> list[bool]:
        if options.arrays:  # called again on the same arrays; Open MPI has no other broadcast
            return [op == "broadcast"]
        return [each for each in options.place if not each or op in IN_PLACE]

    least = ranks * DTYPES[options.dtype].itemsize if options.arrays else 0  # one element for each rank
    return [
        [Case.of(op, max(nbytes, least), options.dtype, options.op, ranks, in_place) for in_place in places(op)]
        for op in options.collective
        for nbytes in (options.sizes[:1] if op == BARRIER else options.sizes)
    ]


def check(options: argparse.Namespace, started: bool) -> None:
    """Choose the device if none is given; refuse what this machine cannot measure or write."""
    no_gpu = unavailable()
    if options.device is None:
        options.device = "gpu" if started and no_gpu is None else "host"
    if options.device == "gpu" and (no_gpu or not started):
        raise BackendUnavailable(f"--device gpu: {no_gpu or 'expected mpirun to start a process for each GPU'}")
    modes = (DeviceTimer if options.device == "gpu" else HostTimer).MODES
    if options.arrays and (options.device == "gpu" or options.algorithm != ["auto"]):
        raise InvalidArgument("--arrays: expected host memory and no --algorithm")
    for mode in options.mode or ():
        if mode not in modes:
            known = ", ".join(modes)
            raise InvalidArgument(f"--mode: expected some of {known} on a {options.device}, got {mode!r}")
    if options.plot:
        check_picture(options.plot)
    if options.json:
        check_writable(options.json)


def tune(options: argparse.Namespace, rank: int) -> int:
    """Measure and write the tuning table; returns the exit status."""
    try:
        return write_table(options.json, options.max_bytes or 1 << 30, options.others)
    except KosError as error:
        if rank == 0 or not isinstance(error, BackendUnavailable):  # all ranks raise BackendUnavailable
            print(f"kos: error: {error}", file=sys.stderr)
        return exit_status(error)


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    rank, started = launched_rank(), any(name in os.environ for name in STARTED_BY)
    arguments = sys.argv[1:] if arguments is None else arguments
    if rank != 0 and {"-h", "--help"} & {*arguments}:
        return 0
    try:  # by each rank for itself: none is connected yet
        options = parse(arguments)
        if options.write_table:
            check_output(options.json)
        else:
            check(options, started)
    except KosError as error:
        report_error(ConfigError(str(error)), rank)
        return 2
    if options.write_table:
        return tune(options, rank)
    if started:
        control = kos.init("mpi" if default_rendezvous(120.0).mpi_comm is not None else "tcp")
        results = [work(control, options)]
        control.close()
    else:
        results = spawn(lambda comm: work(comm, options), options.ranks, timeout=3600)
    wrong = [row["wrong"] for result in results if result is not None for row in result["rows"]]
    return 1 if any(wrong) else 0


if __name__ == "__main__":
    raise SystemExit(main())
