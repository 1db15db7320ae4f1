"""Turns on the GPUs: most tests of the workers of pytest-xdist share them, and some need them alone."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def turn(folder: Path, alone: bool) -> Iterator[None]:
    """Wait until no test that is ``alone`` runs; with ``alone``, until no other test runs.

    ``folder`` is that of the workers of one run.  While a test waits, all later ones wait behind it.
    """
    # These locks are of a process.  They end with it, and the processes that it forks do not have them.
    with open(folder / "next", "a+") as queue, open(folder / "gpus", "a+") as gpus:
        fcntl.lockf(queue, fcntl.LOCK_EX)
        fcntl.lockf(gpus, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.lockf(queue, fcntl.LOCK_UN)
        yield
