"""What fails on one rank must fail on all: the same error everywhere, said once, nobody left waiting."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import kos.errors
from kos.comm.communicator import Communicator
from kos.errors import KosError

T = TypeVar("T")


def together(comm: Communicator, action: Callable[[], T]) -> T:
    """Run ``action`` on every rank that calls this; where it fails on any, raise on all.

    The error is the lowest failing rank's, of the same class, with ``on_every_rank`` set.
    """
    failure: KosError | None = None
    try:
        result = action()
    except KosError as error:
        failure = error
    except (OSError, MemoryError) as error:
        failure = KosError(f"{type(error).__name__}: {error}")
        failure.__cause__ = error
    answers = comm.all_gather_bytes(b"" if failure is None else f"{type(failure).__name__}\n{failure}".encode())
    for rank, answer in enumerate(answers):
        if not answer:
            continue
        name, _, message = answer.decode().partition("\n")
        if rank != comm.rank or failure is None:
            failure = getattr(kos.errors, name, KosError)(message)
        failure.on_every_rank = True
        raise failure
    return result
