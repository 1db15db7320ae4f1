"""Launches the operations of one call of torch on a communicator of kos."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import kos
from kos.interop.torch.tensors import Arrays


class Recording(Arrays):
    """One launch: ``launch(name, ...)`` calls that operation of the communicator."""

    def __init__(self, comm: kos.Communicator, options: dict[str, Any]) -> None:
        super().__init__()
        self._comm, self._options, self.works = comm, options, list[Any]()

    def __call__(self, name: str, *args: Any) -> None:
        self.works.append(getattr(self._comm, name)(*args, **self._options))


def run(
    call: Callable[[Recording], None], comm: kos.Communicator, options: dict[str, Any], asynchronous: bool, batch: bool
) -> Recording:
    """Run ``call``, whose operations a ``batch`` launches together."""
    if not batch:
        launch = Recording(comm, {**options, "async_op": True} if asynchronous else options)
        call(launch)
        return launch
    launch = Recording(comm, options)
    with comm.batch(async_op=asynchronous) as operations:
        call(launch)
    launch.works = operations.works
    return launch
