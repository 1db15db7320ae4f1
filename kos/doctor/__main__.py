"""Reports what this machine and job can use, and why something is unavailable: python -m kos.doctor [--json]

Start it as the job will be started (mpirun -n N, torchrun, srun), or alone.  Exit status: 0 if these ranks can
communicate, 1 if they cannot, 2 for wrong arguments.  The last line, and will_train of --json, say
whether they can train too.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import sys
import threading
import time
from dataclasses import asdict

import kos
from kos.comm.control.base import ControlPlane
from kos.comm.control.bootstrap import default_rendezvous
from kos.comm.gpu.devices import device_of
from kos.commands import program
from kos.cuda import visible_devices
from kos.doctor import ranks
from kos.doctor.checks import BAD, CHECK_SECONDS, Check, facts, local_checks
from kos.doctor.report import Report
from kos.errors import BackendUnavailable, ConfigError, in_words
from kos.files import printing
from kos.launcher import launched_rank
from kos.reporting import Parser, report

GRACE = 2.0
"""Seconds between the limit of a stage and its alarm: a wait within the stage raises its own error first."""


class Doctor:
    """One examination, by this rank."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.report = Report()
        self.rank = launched_rank()
        self.alarm: threading.Timer | None = None

    def begin(self, stage: str, seconds: float) -> None:
        """Begin the next stage, which must end within ``seconds``.

        A library may wait forever, and may hold Python's lock while it waits: the second alarm needs no lock.
        """
        self.rest()
        self.stage, self.limit = stage, seconds
        self.alarm = threading.Timer(seconds + GRACE, self.abort)
        self.alarm.daemon = True
        self.alarm.start()
        if sys.stderr is not None:  # None if it was closed
            faulthandler.dump_traceback_later(seconds + 2 * GRACE, exit=True)

    def rest(self) -> None:
        """Cancel the alarms."""
        if self.alarm is not None:
            self.alarm.cancel()
        faulthandler.cancel_dump_traceback_later()

    def examine(self) -> int:
        """Run all stages; returns the exit status.  An error that ends the examination is the last finding."""
        self.begin("the checks of this process", 4 * CHECK_SECONDS)
        mine = local_checks()
        self.report.add([mine], self.rank)
        try:
            self.begin("finding the other ranks", self.options.timeout)
            self.together(default_rendezvous(self.options.timeout, watched=False), mine)  # the alarm ends it
        except Exception as error:
            self.fail(in_words(error))
        self.rest()
        return self.show()

    def together(self, rendezvous: ControlPlane, mine: list[Check]) -> None:
        """The stages that all ranks run together."""
        report, limit = self.report, self.options.timeout
        self.rank, report.size, report.checks = rendezvous.rank, rendezvous.size, {}
        self.add(rendezvous, mine)
        report.facts = [json.loads(data) for data in rendezvous.allgather(json.dumps(facts()).encode())]
        report.add([list(ranks.compare(report.facts))] * report.size)
        self.begin("moving bytes between GPUs", limit)
        self.gpus(rendezvous)
        self.begin("making a communicator", limit)
        with kos.init(rendezvous=rendezvous, timeout=limit) as comm:
            report.backends = comm.explain()
            self.begin("all_reduce", limit)
            self.add(rendezvous, [ranks.trial(comm)])
            self.begin("ending", limit)

    def add(self, rendezvous: ControlPlane, mine: list[Check]) -> None:
        """Add the findings of every rank to the report."""
        everybody = rendezvous.allgather(json.dumps([asdict(check) for check in mine]).encode())
        self.report.add([[Check(**check) for check in json.loads(data)] for data in everybody])

    def gpus(self, rendezvous: ControlPlane) -> None:
        """Move bytes between the GPUs of each host."""
        hosts = [each["host_id"] for each in self.report.facts]
        try:
            device: int | None = device_of(rendezvous).index  # collective
        except BackendUnavailable:
            device = None
        color = None if device is None else hosts.index(hosts[rendezvous.rank])
        part = rendezvous.split(color, rendezvous.rank)
        found: list[Check] = []
        if rendezvous.size == 1 and len(visible_devices()) > 1:
            found = [ranks.gpus_of_this_process(self.options.timeout)]
        elif part is not None and device is not None and part.size > 1:
            found = [ranks.gpu_memory(part, device)]
        if part is not None:
            part.close()
        self.add(rendezvous, found)

    def show(self) -> int:
        """Print the report on rank 0; returns the exit status."""
        if self.rank == 0:
            with printing():
                print(json.dumps(self.report.to_json(), indent=1) if self.options.json else self.report.to_text())
        return int(bool(self.report.bad))

    def fail(self, why: str) -> None:
        """Record that the current stage failed; rank 0 may never receive this report."""
        self.report.add([[Check(self.stage, BAD, why)]], self.rank)
        if self.rank != 0:
            print(f"kos: error: rank {self.rank}: {self.stage}: {why}", file=sys.stderr, flush=True)

    def abort(self) -> None:
        """End the process: a stage that does not end is a finding."""
        self.fail(f"no end within {self.limit:g} s")
        self.show()
        if self.rank:
            time.sleep(GRACE / 2)  # mpirun ends all ranks with the first one, and rank 0 prints the report
        os._exit(1)


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    parser = Parser(prog=program("kos.doctor"), description=(__doc__ or "").partition("\n")[2])
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    about = "the longest wait for other ranks (default: 30)"
    parser.add_argument("--timeout", type=float, default=30.0, metavar="SECONDS", help=about)
    try:
        options = parser.parse_args(arguments)
        if not 1 <= options.timeout <= 1e5:
            parser.error(f"--timeout: expected 1 to 100000 seconds, got {options.timeout:g}")
    except ConfigError as error:
        report(error, launched_rank())
        return 2
    return Doctor(options).examine()


if __name__ == "__main__":
    sys.exit(main())
