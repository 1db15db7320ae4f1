"""torch's Store over that of a communicator of kos."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

import kos

_Store: Any = dist.__dict__["Store"]  # which has no types


class Store(_Store):
    """A Store for ``init_process_group(store=…)``, whose values are in ``comm.store`` (see ``kos.comm.KeyValueStore``).

    ``prefix`` begins all its keys.  Its waits end after ``timeout``, which is that of ``comm`` at first, and raise what
    ``comm.store`` raises; a lost rank ends them at once.  The communicator must stay open while the Store is used.

        dist.init_process_group("gloo", store=Store(comm), rank=comm.rank, world_size=comm.size)
    """

    def __init__(self, comm: kos.Communicator, prefix: str = "torch/") -> None:
        super().__init__()
        self._store, self._prefix, self._seconds = comm.store, prefix, comm.timeout

    def set(self, key: str, value: str | bytes) -> None:
        self._store.set(self._prefix + key, value)

    def get(self, key: str) -> bytes:
        return self._store.get(self._prefix + key, self._seconds)

    def add(self, key: str, amount: int) -> int:
        return self._store.add(self._prefix + key, amount)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        seconds = self._seconds if timeout is None else timeout.total_seconds()
        self._store.wait([self._prefix + key for key in keys], seconds)

    def check(self, keys: Sequence[str]) -> bool:
        return all(self._prefix + key in self._store for key in keys)

    def delete_key(self, key: str) -> bool:
        return self._store.delete(self._prefix + key)

    def num_keys(self) -> int:
        return len(self._store)

    deleteKey, getNumKeys = delete_key, num_keys  # what C++ calls

    def set_timeout(self, timeout: timedelta) -> None:
        self._seconds = timeout.total_seconds()

    @property
    def timeout(self) -> Any:
        return timedelta(seconds=self._seconds)
