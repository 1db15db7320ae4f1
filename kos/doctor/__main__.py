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
            rendezvous = default_rendezvous(self.options.timeout / 4)
            self.together(rendezvous, mine)
        except Exception as error:
            what = str(error) if isinstance(error, KosError) else f"{type(error).__name__}: {error}"
            self.report.add([[Check(self.stage, BAD, f"rank {self.rank}: {what}")]], self.rank)

    def together(self, rendezvous: Rendezvous, mine: list[Check]) -> None:
        report, size = self.report, rendezvous.size
        self.rank, report.size, report.checks = rendezvous.rank, size, []
        self.add(rendezvous, mine)
        report.facts = [json.loads(data) for data in rendezvous.allgather(json.dumps(facts()).encode())]
        report.add([list(ranks.compare(report.facts))] * size)
        if size > 1:
            self.stage = "reading each other's memory"
            self.add(rendezvous, [ranks.cross_memory(rendezvous, report.facts)])
        self.stage = "moving bytes between GPUs"
        self.gpus(rendezvous)
        self.stage = "making a communicator"
        with kos.init(rendezvous=rendezvous, timeout=self.options.timeout / 4) as comm:
            report.backends = comm.explain()
            self.stage = "all_reduce"
            self.add(rendezvous, list(ranks.trial(comm)))
            if self.options.measure and size > 1 and not report.bad:
                self.stage = "measuring messages"
                report.matrices.append(ranks.measure_host(comm))
            self.stage = "ending"

    def add(self, rendezvous: Rendezvous, mine: list[Check]) -> None:
        everybody = rendezvous.allgather(ranks.to_json(mine))
        self.report.add([[Check(**check) for check in json.loads(data)] for data in everybody])

    def gpus(self, rendezvous: Rendezvous) -> None:
        report, measure = self.report, self.options.measure
        alone = rendezvous.size == 1
        host = sorted({each["host_id"] for each in report.facts}).index(report.facts[rendezvous.rank]["host_id"])
        try:
            device: int | None = device_of(rendezvous).index  # asked on all ranks: it is collective
        except BackendUnavailable:
            device = None
        part = rendezvous.split(None if device is None else host, rendezvous.rank)
        found: list[Check] = []
        matrix = None
        if alone and len(visible_devices()) > 1:
            check, matrix = ranks.gpus_of_this_process(self.options.timeout / 4, measure)
            found.append(check)
        elif part is not None and device is not None and not alone:
            check, matrix = ranks.gpu_memory(part, device, measure and part.size > 1)
            found.append(check)
        if part is not None:
            part.close()
        self.add(rendezvous, found)
        if matrix is not None:
            report.matrices.append(matrix)

    def show(self) -> int:
        """Print the report, on rank 0; returns the exit status."""
        if self.rank == 0:
            self.picture()
            text = json.dumps(self.report.to_json(), indent=1) if self.options.json else self.report.to_text()
            print(text, flush=True)
        return int(bool(self.report.bad))

    def picture(self) -> None:
        if self.options.plot is None:
            return
        if not self.report.matrices:
            self.report.add([[Check("--plot", NO, "nothing was measured: it takes two ranks, or two GPUs")]])
            return
        try:
            draw(self.report.matrices[0], self.options.plot)
        except (KosError, OSError, ValueError) as error:
            self.report.add([[Check("--plot", NO, str(error))]])

    def give_up(self) -> None:
        """What did not end is the finding."""
        limit = self.options.timeout
        self.report.add([[Check(self.stage, BAD, f"rank {self.rank}: no end within {limit:g} s")]], self.rank)
        self.show()
        os._exit(1)


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    lines = (__doc__ or "").splitlines()
    parser = argparse.ArgumentParser(prog="python -m kos.doctor", description=" ".join(lines[2:]))
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
