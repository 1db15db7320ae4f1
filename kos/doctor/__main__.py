"""What this machine can do, and why not: python -m kos.doctor [--measure] [--plot FILE] [--json]

Start it as the job will be started (mpirun -n N, torchrun, srun), or alone.  Exit status: 0 where training
across these ranks will work, 1 where it will not, 2 for wrong arguments.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import sys
import threading
from dataclasses import asdict
from pathlib import Path

import kos
from kos.comm.backends.device import device_of
from kos.comm.mpi_job import launched_rank
from kos.comm.rendezvous import Rendezvous, default_rendezvous
from kos.cuda import visible_devices
from kos.doctor import ranks
from kos.doctor.checks import BAD, NO, Check, facts, local_checks
from kos.doctor.report import Report, draw
from kos.errors import BackendUnavailable, KosError


class Doctor:
    """One examination, by this rank."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.report = Report()
        self.rank = launched_rank()
        self.stage = "the checks of this process"

    def examine(self) -> None:
        """Fill the report; what stops the examination is the last thing in it."""
        mine = local_checks()
        self.report.add([mine], self.rank)
        self.stage = "finding the other ranks"
        try:
            self.together(default_rendezvous(self.options.timeout / 4), mine)
        except Exception as error:
            what = str(error) if isinstance(error, KosError) else f"{type(error).__name__}: {error}"
            self.fail(f"rank {self.rank}: {what}")

    def together(self, rendezvous: Rendezvous, mine: list[Check]) -> None:
        """What takes all ranks."""
        report, size = self.report, rendezvous.size
        self.rank, report.size, report.checks = rendezvous.rank, size, {}
        self.add(rendezvous, mine)
        report.facts = [json.loads(data) for data in rendezvous.allgather(json.dumps(facts()).encode())]
        report.add([list(ranks.compare(report.facts))] * size)
        self.stage = "moving bytes between GPUs"
        self.gpus(rendezvous)
        self.stage = "making a communicator"
        with kos.init(rendezvous=rendezvous, timeout=self.options.timeout / 4) as comm:
            report.backends = comm.explain()
            self.stage = "all_reduce"
            self.add(rendezvous, [ranks.trial(comm)])
            if self.options.measure and size > 1 and not report.bad:
                self.stage = "measuring messages"
                report.matrices.append(ranks.measure_host(comm))
            self.stage = "ending"

    def add(self, rendezvous: Rendezvous, mine: list[Check]) -> None:
        """Report what every rank found."""
        everybody = rendezvous.allgather(json.dumps([asdict(check) for check in mine]).encode())
        self.report.add([[Check(**check) for check in json.loads(data)] for data in everybody])

    def gpus(self, rendezvous: Rendezvous) -> None:
        """Move bytes between the GPUs of each host."""
        hosts = [each["host_id"] for each in self.report.facts]
        limit, measure = self.options.timeout / 4, self.options.measure
        try:
            device: int | None = device_of(rendezvous).index  # asked on all ranks: it is collective
        except BackendUnavailable:
            device = None
        color = None if device is None else hosts.index(hosts[rendezvous.rank])
        part = rendezvous.split(color, rendezvous.rank)
        check = matrix = None
        if rendezvous.size == 1 and len(visible_devices()) > 1:
            check, matrix = ranks.gpus_of_this_process(limit, measure)
        elif part is not None and device is not None and rendezvous.size > 1:
            check, matrix = ranks.gpu_memory(part, device, measure and part.size > 1)
        if part is not None:
            part.close()
        self.add(rendezvous, [check] if check else [])
        if matrix is not None:
            self.report.matrices.append(matrix)

    def show(self) -> int:
        """Print the report, on rank 0, and draw it if asked to; returns the exit status."""
        if self.rank == 0:
            if self.options.plot is not None:
                try:
                    if not self.report.matrices:
                        raise BackendUnavailable("nothing was measured: it takes two ranks, or two GPUs")
                    draw(self.report.matrices[0], self.options.plot)
                except (KosError, OSError, ValueError) as error:
                    self.report.add([[Check("--plot", NO, str(error))]])
            text = json.dumps(self.report.to_json(), indent=1) if self.options.json else self.report.to_text()
            print(text, flush=True)
        return int(bool(self.report.bad))

    def fail(self, what: str) -> None:
        """The stage that has been reached went wrong."""
        self.report.add([[Check(self.stage, BAD, what)]], self.rank)

    def give_up(self) -> None:
        """What did not end is the finding."""
        self.fail(f"rank {self.rank}: no end within {self.options.timeout:g} s")
        self.show()
        os._exit(1)


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m kos.doctor", description=(__doc__ or "").partition("\n")[2])
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.add_argument("--measure", action="store_true", help="bandwidth and latency between every two ranks")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the bandwidths (.png, .svg); measures them")
    parser.add_argument("--timeout", type=float, default=120.0, metavar="SECONDS", help="for all of it (120)")
    options = parser.parse_args(arguments)
    if not 1 <= options.timeout <= 1e5:
        parser.error(f"--timeout: expected 1 to 100000 seconds, got {options.timeout:g}")
    options.measure |= options.plot is not None
    doctor = Doctor(options)
    # A library may wait for ever, and may do so without letting Python run: the second alarm needs none.
    timer = threading.Timer(options.timeout, doctor.give_up)
    timer.daemon = True
    timer.start()
    faulthandler.dump_traceback_later(options.timeout + 5, exit=True)
    doctor.examine()
    timer.cancel()
    return doctor.show()


if __name__ == "__main__":
    sys.exit(main())
