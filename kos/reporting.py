"""The errors with which the ranks of a command end: one line each, printed once for all ranks that have it."""

from __future__ import annotations

import argparse
import contextlib
import functools
import logging
import os
import sys
import time
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

from kos.errors import BackendUnavailable, ConfigError, DataError, InvalidArgument, KosError, RankLost, in_words

_log = logging.getLogger(__name__)

RANK_0_SECONDS = 10.0
"""How long the other ranks wait for rank 0 to print an error that all have; its exit ends them."""

TURN_SECONDS = 0.3
"""How much later than the rank before a rank prints an error that others may have too: that exit ends it first."""

LOST_SECONDS = 3.0
"""How long a rank that lost another waits before it prints that: under mpirun the other's exit ends it first.
It does not wait if the process of the other rank ended without a report."""


class ArgumentParser(argparse.ArgumentParser):
    """Warns of an option of one value that is given twice: the last one counts, and a user may expect both to count."""

    def __init__(self, *given: Any, **settings: Any) -> None:
        super().__init__(*given, **settings)
        self.given = dict[str, Any]()
        """The values of the options that this parser has read."""
        for action in (None, "store"):
            self.register("action", action, _Last)

    def parse_known_args(self, *given: Any, **settings: Any) -> Any:
        self.given.clear()
        return super().parse_known_args(*given, **settings)


class _Last(argparse.Action):
    """Stores the last value of an argument."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        if option_string and self.dest in parser.given and (earlier := parser.given[self.dest]) != values:
            _warn(f"{option_string} is given twice: {values} counts, not {earlier}")
        parser.given[self.dest] = values
        setattr(namespace, self.dest, values)


@functools.cache
def _warn(message: str) -> None:
    """Warn once, also if a command reads its arguments several times."""
    _log.warning(message)


class Parser(ArgumentParser):
    """Raises ConfigError for arguments that it refuses."""

    def error(self, message: str) -> NoReturn:
        if message.endswith("expected one argument"):
            message += ", got none"
        message = message.replace("ignored explicit argument", "expected no value, got")
        raise ConfigError(message.removeprefix("argument "))


def exit_status(error: Exception) -> int:
    """The exit status of a command that ends with ``error`` before it has begun its work, or at any time.

    2 if the user must change something first: arguments, an input that does not exist, a backend or place that cannot
    be used.  1 for a failure of the work itself.
    """
    return 2 if isinstance(error, (ConfigError, InvalidArgument, DataError, BackendUnavailable)) else 1


def end_process(code: int) -> None:
    """End the process without ``sys.exit``: MPI_Finalize would wait for ranks that do not call it."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(code)


def aligned(rows: Sequence[Sequence[str]], left: int = 0) -> list[str]:
    """The lines of a table.  The first ``left`` columns are aligned at the left, and the others at the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    align = [str.ljust if number < left else str.rjust for number in range(len(widths))]
    lines = [[put(cell, width) for put, cell, width in zip(align, row, widths, strict=True)] for row in rows]
    return ["  ".join(line).rstrip() for line in lines]


def end_command(error: Exception, rank: int = 0, ranks: int = 1, inputs: bool = True, debug: bool = False) -> int:
    """Report the ``error`` with which a command ends, and return its exit status.  With several ranks, end the process.

    ``inputs``: whether the inputs of the command exist.  If they do not, the status is 2, as for a wrong argument.
    """
    report(error, rank, debug=debug, alone=ranks == 1)
    status = exit_status(error) if inputs else 2
    if ranks > 1:
        end_process(status)
    return status


def report(error: Exception, rank: int, note: str = "", debug: bool = False, alone: bool = False) -> None:
    """Print the error and its note on one line; the process then ends with an exit code that is not 0.

    mpirun ends the other ranks as soon as one process exits with an error. So a rank that only saw another rank fail
    lets that rank print first. If several ranks have the same error, the lowest of them prints it, once. ``debug``:
    print the traceback before it. ``alone``: this is the only process of the job, so its rank is not named.
    """
    shared = isinstance(error, KosError) and error.on_every_rank
    likely = isinstance(error, ConfigError)  # but a file may be missing on one machine
    if (shared or likely) and rank != 0:
        time.sleep(RANK_0_SECONDS)
    if shared and rank != 0:
        return
    if isinstance(error, RankLost) and "its process" not in str(error):
        time.sleep(LOST_SECONDS)
    if not shared:
        time.sleep(min(rank, 8) * TURN_SECONDS)
    if debug:
        traceback.print_exception(error)
    where = "" if alone or shared or (likely and rank == 0) else f"rank {rank}: "
    with contextlib.suppress(OSError, ValueError):
        print(f"kos: error: {where}{in_words(error)}{note}", file=sys.stderr, flush=True)
