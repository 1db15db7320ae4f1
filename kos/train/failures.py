"""What fails on one rank must fail on all: the same error everywhere, said once, nobody left waiting."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import TypeVar

import kos.errors
from kos.comm.communicator import Communicator
from kos.errors import ConfigError, KosError
from kos.train.stopping import Stop, Stopped

PATIENCE = 3600.0
"""Seconds that ranks wait for one that reads, writes or computes alone: a large checkpoint takes minutes.
That it died is seen at once all the same."""

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
    said = "" if failure is None else f"{type(failure).__name__}\n{failure}"
    answers = comm.all_gather_bytes(said.encode(), timeout=max(PATIENCE, comm.timeout))
    first = next((rank for rank, answer in enumerate(answers) if answer), None)
    if first is None:
        return result
    if first != comm.rank or failure is None:
        name, _, message = answers[first].decode().partition("\n")
        failure = {"Stopped": Stopped}.get(name, getattr(kos.errors, name, KosError))(message)
    failure.on_every_rank = True
    raise failure


def stop_together(comm: Communicator, stop: Stop) -> None:
    """Raise ``Stopped`` on all ranks if any was asked to stop.  Takes some 50 µs."""
    if any(comm.all_gather_bytes(b"!" * stop.asked)):
        raise Stopped("asked to stop")


def same_on_all(comm: Communicator, facts: Mapping[str, object]) -> None:
    """ConfigError on every rank, naming two of them and what differs, unless all hold the same ``facts``."""
    mine = json.dumps(dict(facts), sort_keys=True, default=str)
    everyone = [json.loads(answer) for answer in comm.all_gather_bytes(mine.encode())]
    for rank, theirs in enumerate(everyone):
        for name, value in everyone[0].items():
            if theirs.get(name) != value:
                got = f"{value} on rank 0 and {theirs.get(name)} on rank {rank}"
                raise ConfigError(f"{name}: expected the same on all ranks, got {got}")
