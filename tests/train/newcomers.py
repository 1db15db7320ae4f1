"""Newcomers to elastic runs, on threads of their own."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kos.train import elastic
from kos.train.trainer import Trainer
from tests.train.elastic_runs import config_of

Newcomers = list[tuple[threading.Thread, list[BaseException]]]
"""The thread of each, and its error."""


def started(make: Callable[[], Trainer]) -> tuple[threading.Thread, list[BaseException]]:
    """A newcomer that runs on a thread of its own."""
    errors = list[BaseException]()

    def run() -> None:
        try:
            newcomer = make()
            try:
                newcomer.run()
            finally:
                place: Any = newcomer.comm.rendezvous
                place.threads.world.end(place.rank, "its function returned")  # as ``spawn`` does for its ranks
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, errors


def invited(
    before_call: Callable[..., None], make: Callable[[str], Trainer], *, count: int = 1, at: int = 2, ranks: int = 0,
    admit: Callable[[elastic.Elastic], None] = lambda run: None,
) -> Newcomers:  # fmt: skip
    """``make`` makes newcomers with the address of the run, before step ``at`` or as soon as it has ``ranks`` ranks.

    The ranks wait for their calls. ``admit`` is called on each rank before it lets them join.
    """
    threads: Newcomers = []

    def start_step(self: elastic.Elastic, step: int, stop_request: int) -> None:
        comm = self.run.comm
        if comm.rank == 0 and not threads and (comm.size == ranks if ranks else step == at):
            threads.extend([started(lambda: make(comm.address)) for _ in range(count)])
            while comm.newcomers() < count and all(thread.is_alive() for thread, _ in threads):
                time.sleep(0.01)  # they read the data first
        if self._last is not None and self._last[1].joining:
            admit(self)

    before_call(elastic.Elastic, "start_step", start_step)
    return threads


def invite(
    before_call: Callable[..., None], text: Path, out: Path, *, count: int = 1, at: int = 2, ranks: int = 0,
    admit: Callable[[elastic.Elastic], None] = lambda run: None, address: str = "", **changes: Any,
) -> Newcomers:  # fmt: skip
    """The same of newcomers with the settings of ``config_of``; ``address``: another than that of the run."""

    def make(of_run: str) -> Trainer:
        return Trainer(config_of(text, out, elastic="1", join=address or of_run, **changes))

    return invited(before_call, make, count=count, at=at, ranks=ranks, admit=admit)


def ended(threads: Newcomers) -> list[list[BaseException]]:
    """The errors of newcomers, whose threads must end."""
    for thread, _ in threads:
        thread.join(30)
        assert not thread.is_alive()
    return [errors for _, errors in threads]
