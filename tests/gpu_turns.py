"""Turns on the GPUs: most tests of the workers of pytest-xdist share them, and some need them alone."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def turn(folder: Path, alone: bool) -> Iterator[None]:
    """Wait until no test runs that is ``alone``, or no test at all.  The workers' tests call this with one ``folder``.

    Turns begin in the order of the calls, so a test that is alone does not wait until all others have run.
    """
    with open(folder / "next", "a") as queue, open(folder / "gpus", "a") as gpus:
        fcntl.flock(queue, fcntl.LOCK_EX)
        fcntl.flock(gpus, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(queue, fcntl.LOCK_UN)
        try:
            yield
        finally:
            fcntl.flock(gpus, fcntl.LOCK_UN)  # a process that the test has forked may still have the file open
