"""What this machine can do, and why not: python -m kos.doctor [--measure] [--plot FILE] [--json]

Start it as the job will be started (mpirun -n N, torchrun, srun), or alone.  Exit status: 0 where training
across these ranks will work, 1 where it will not, 2 for arguments that are wrong or cannot be followed.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import kos
from kos.comm.gpu.backend import device_of
from kos.comm.rendezvous.base import Rendezvous
from kos.comm.rendezvous.choose import default_rendezvous, launched_rank
from kos.comm.rendezvous.mpi_job import under_mpirun
from kos.cuda import visible_devices
from kos.doctor import ranks
from kos.doctor.checks import BAD, CHECK_SECONDS, NO, Check, facts, local_checks
from kos.doctor.report import Report, draw
from kos.errors import BackendUnavailable, KosError, in_words
from kos.files import check_picture, printing

GRACE = 2.0
"""Seconds for what has a limit of its own to say why it did not end, before the alarm says that it did not."""
NOTICE = 10.0
"""Seconds after which a stage is said to be under way still."""


class Doctor:
    """One examination, by this rank."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.report = Report()
        self.rank = launched_rank()
        self.timers: list[threading.Timer] = []
        self.waits_for: Callable[[], str] = str  # what more there is to say of a stage that does not end

    def begin(self, stage: str, seconds: float) -> None:
        """Go on to the next stage; that it does not end would be the finding.

        A library may wait for ever, and may do so without letting Python run: the second alarm needs none.
        """
        self.rest()
        self.stage, self.limit = stage, seconds
        self.timers = [threading.Timer(NOTICE, self.notice), threading.Timer(seconds + GRACE, self.give_up)]
        for timer in self.timers:
            timer.daemon = True
            timer.start()
        faulthandler.dump_traceback_later(seconds + 2 * GRACE, exit=True)

    def rest(self) -> None:
        """No alarm any more."""
        for timer in self.timers:
            timer.cancel()
        faulthandler.cancel_dump_traceback_later()

    def examine(self) -> int:
        """All of it; returns the exit status.  What stops the examination is the last finding."""
        self.begin("the checks of this process", 4 * CHECK_SECONDS)
        mine = local_checks()
        self.report.add([mine], self.rank)
        try:
            self.begin("finding the other ranks", self.options.timeout)
            if under_mpirun():
                self.waits_for = ranks.roll_call(self.rank)
                ranks.start_mpi()
                self.waits_for = str
            self.together(default_rendezvous(self.options.timeout), mine)
        except Exception as error:
            self.fail(in_words(error))
        self.rest()
        return self.show()

    def together(self, rendezvous: Rendezvous, mine: list[Check]) -> None:
        """What takes all ranks."""
        report, size, limit = self.report, rendezvous.size, self.options.timeout
        self.rank, report.size, report.checks = rendezvous.rank, size, {}
        self.add(rendezvous, mine)
        report.facts = [json.loads(data) for data in rendezvous.allgather(json.dumps(facts()).encode())]
        report.add([list(ranks.compare(report.facts))] * size)
        self.begin("moving bytes between GPUs", limit * (size if self.options.measure else 1))
        self.gpus(rendezvous)
        self.begin("making a communicator", limit)
        with kos.init(rendezvous=rendezvous, timeout=limit) as comm:
            report.backends = comm.explain()
            self.begin("all_reduce", limit)
            self.add(rendezvous, [ranks.trial(comm)])
            if self.options.measure and size > 1 and not report.bad:
                self.begin("measuring messages", limit * size)
                report.matrices.append(ranks.measure_host(comm))
            self.begin("ending", limit)

    def add(self, rendezvous: Rendezvous, mine: list[Check]) -> None:
        """Report what every rank found."""
        everybody = rendezvous.allgather(json.dumps([asdict(check) for check in mine]).encode())
        self.report.add([[Check(**check) for check in json.loads(data)] for data in everybody])

    def gpus(self, rendezvous: Rendezvous) -> None:
        """Move bytes between the GPUs of each host."""
        hosts = [each["host_id"] for each in self.report.facts]
        limit, measure = self.options.timeout, self.options.measure
        try:
            device: int | None = device_of(rendezvous).index  # asked on all ranks: it is collective
        except BackendUnavailable:
            device = None
        color = None if device is None else hosts.index(hosts[rendezvous.rank])
        part = rendezvous.split(color, rendezvous.rank)
        check = matrix = None
        if rendezvous.size == 1 and len(visible_devices()) > 1:
            check, matrix = ranks.gpus_of_this_process(limit, measure)
        elif part is not None and device is not None and part.size > 1:
            check, matrix = ranks.gpu_memory(part, device, measure)
        if part is not None:
            part.close()
        self.add(rendezvous, [check] if check else [])
        if matrix is not None:
            self.report.matrices.append(matrix)

    def show(self) -> int:
        """Print the report, on rank 0, and draw it if asked to; returns the exit status."""
        report, status, problem = self.report, int(bool(self.report.bad)), ""
        if self.rank != 0:
            return status
        if self.options.measure and not report.matrices and not status:
            problem = "nothing to measure: expected two ranks or more, or two GPUs, got one"
            report.add([[Check("--measure", NO, problem)]])
        with printing():
            print(json.dumps(report.to_json(), indent=1) if self.options.json else report.to_text())
        if self.options.plot is None:
            return status
        try:
            if report.matrices:
                draw(report.matrices[0], self.options.plot)
        except (OSError, ValueError) as error:
            problem = in_words(error)
        return complain(problem) if problem else status

    def fail(self, what: str) -> None:
        """The stage that has been reached went wrong; rank 0 may never hear of it."""
        self.report.add([[Check(self.stage, BAD, what)]], self.rank)
        if self.rank != 0:
            print(f"kos: error: rank {self.rank}: {self.stage}: {what}", file=sys.stderr, flush=True)

    def notice(self) -> None:
        """A stage takes long."""
        said = f"{self.stage}: no end yet after {NOTICE:g} s of {self.limit:g}{self.waits_for()}"
        print(f"kos: rank {self.rank}: {said}", file=sys.stderr, flush=True)

    def give_up(self) -> None:
        """What did not end is the finding."""
        self.fail(f"no end within {self.limit:g} s{self.waits_for()}")
        self.show()
        if self.rank:
            time.sleep(GRACE / 2)  # mpirun ends the others with the first one: rank 0 has the report
        os._exit(1)


def complain(problem: str) -> int:
    """There is no picture; returns the exit status."""
    print(f"kos: error: --plot: {problem}", file=sys.stderr)
    return 2


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m kos.doctor", description=(__doc__ or "").partition("\n")[2])
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.add_argument("--measure", action="store_true", help="bandwidth and latency between every two ranks")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the bandwidths (.png, .svg); measures them")
    parser.add_argument("--timeout", type=float, default=30.0, metavar="SECONDS", help="of any wait for others (30)")
    options = parser.parse_args(arguments)
    if not 1 <= options.timeout <= 1e5:
        parser.error(f"--timeout: expected 1 to 100000 seconds, got {options.timeout:g}")
    options.measure |= options.plot is not None
    try:
        if options.plot is not None:
            check_picture(options.plot)  # on every rank: mpirun may hang where one alone exits this early
    except KosError as error:
        return complain(str(error))
    return Doctor(options).examine()


if __name__ == "__main__":
    sys.exit(main())
