"""Check a backend: python -m kos.testing.conformance --backend NAME [--ranks N] [--full] [--only TEXT] [--list]

Runs on the ranks of the job under mpirun, torchrun or srun, else on N threads of this process, connected over
loopback.  Prints each check as it starts, and the cause of each failure.  Exit status: 0 if all promises hold, 1 if one
does not, 2 for wrong arguments.
"""

from __future__ import annotations

import argparse
import logging
import os
import secrets
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TextIO

import kos
from kos.comm.arguments import check_timeout
from kos.errors import KosError
from kos.files import printing
from kos.launcher import launched_place, under_mpirun
from kos.reporting import ArgumentParser
from kos.testing import spawn
from kos.testing.conformance import cases, log, run


class _OutputHandler(logging.StreamHandler[TextIO]):
    def handleError(self, record: logging.LogRecord) -> None:
        """Ignore errors: a reader that closes the pipe early, such as ``head``, is no error."""


def on_threads(options: argparse.Namespace) -> dict[str, str]:
    """The failures, on ranks that are threads."""
    if options.backend == "mock":

        def body(comm: kos.Communicator) -> dict[str, str]:
            comm.timeout = options.timeout
            return run(comm, options.full, options.seed, options.only, options.gpu)

        return spawn(body, options.ranks, 3600)[0]
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    job = {"size": options.ranks, "address": f"127.0.0.1:{port}", "secret": secrets.token_hex(16)}

    def rank(number: int) -> dict[str, str]:
        with kos.init(options.backend, rendezvous={**job, "rank": number}, timeout=options.timeout) as world:
            return run(world, options.full, options.seed, options.only, options.gpu)

    with ThreadPoolExecutor(options.ranks) as pool:
        return next(iter(list(pool.map(rank, range(options.ranks)))))


def main(arguments: list[str] | None = None) -> int:
    about = (__doc__ or "").partition("\n")[0]
    parser = ArgumentParser("python -m kos.testing.conformance", description=about)
    parser.add_argument("--backend", default="auto", metavar="NAME")
    parser.add_argument("--ranks", type=int, default=3, metavar="N", help="number of threads without a launcher")
    parser.add_argument("--full", action="store_true", help="every dtype, size and schedule: minutes")
    parser.add_argument("--gpu", action="store_true", help="arrays on the GPUs of the ranks")
    parser.add_argument("--only", default="", metavar="TEXT", help="only promises whose names contain TEXT")
    parser.add_argument("--list", action="store_true", help="print the names of the promises and check none")
    parser.add_argument("--timeout", type=float, default=60.0, metavar="SECONDS", help="limit of a wait; default: 60")
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(3)), metavar="N")
    parser.add_argument("--verbose", action="store_true", help="whole tracebacks")
    options = parser.parse_args(arguments)
    for name, least in (("ranks", 1), ("seed", 0)):
        if (got := getattr(options, name)) < least:
            parser.error(f"--{name}: expected a number from {least} on, got {got}")
    try:
        check_timeout(options.timeout)
    except KosError as error:
        parser.error(f"--{error}")
    if options.list:
        with printing():
            print(*(each for each in cases(options.full, gpu=options.gpu) if options.only in each.name), sep="\n")
        return 0
    rank, began = launched_place()[0], time.monotonic()
    shown = _OutputHandler(sys.stdout)
    log.addHandler(shown)
    log.setLevel(logging.INFO)
    try:
        if under_mpirun() or launched_place()[1] > 1:
            with kos.init(options.backend, timeout=options.timeout) as world:
                options.seed = int(world.all_gather_bytes(str(options.seed).encode())[0])
                rank, broken = world.rank, run(world, options.full, options.seed, options.only, options.gpu)
        else:
            broken = on_threads(options)
    except KosError as error:
        print(f"kos: error: {error}", file=sys.stderr)
        return 2
    finally:
        log.removeHandler(shown)
    if rank == 0:
        with printing():
            for name, text in broken.items():
                print(f"BROKEN {name}\n{text}" if options.verbose else f"BROKEN {name}")
            print(f"{len(broken)} promises broken, seed {options.seed}, {time.monotonic() - began:.1f} s")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
