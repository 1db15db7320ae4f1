"""Promises on GPU memory: arrays go to the GPU before a call and come back after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from kos.comm import Communicator
from kos.comm.batch import Batch
from kos.comm.work import Work
from kos.memory.array import Array
from kos.testing.conformance.model import MOVING, REDUCING

OPERATIONS = {*REDUCING, *MOVING, "send", "recv"}


class OnGPU:
    """A communicator whose operations take and give ndarrays and run on copies of them on the GPU.

    Two views of the same ndarray become two views of the same copy. So a call that is in place on the host is in place
    on the GPU too.
    """

    def __init__(self, comm: Communicator) -> None:
        assert comm.device is not None
        self.comm, self.device = comm, comm.device
        self._batched: list[Callable[[], None]] | None = None
        """In a batch, what copies the results of its calls back."""

    @property
    def timeout(self) -> float:
        return self.comm.timeout

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        self.comm.timeout = seconds

    def exact_group_size(self) -> int:
        return self.comm.exact_group_size(self.device)

    def duplicate(self) -> OnGPU:
        return OnGPU(self.comm.duplicate())

    def split(self, color: int | None, key: int = 0) -> OnGPU | None:
        part = self.comm.split(color, key)
        return None if part is None else OnGPU(part)

    @contextmanager
    def batch(self, **options: Any) -> Iterator[Batch]:
        """A batch of the communicator that waits, whose results come back when the block ends.

        Its calls must pass ``out``, because a result that a call allocates cannot be copied before the batch has run.
        """
        self._batched = batched = list[Callable[[], None]]()
        try:
            with self.comm.batch(**options) as batch:
                yield batch
        finally:
            self._batched = None
        for copy_back in batched:
            copy_back()

    def __enter__(self) -> OnGPU:
        return self

    def __exit__(self, *failed: Any) -> None:
        self.comm.__exit__(*failed)

    def __getattr__(self, name: str) -> Any:
        if name not in OPERATIONS:
            return getattr(self.comm, name)
        return lambda *arguments, **options: self._call(name, arguments, options)

    def _call(self, name: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if name != "all_reduce" or "peer" not in self.comm.backend_name:
            options.pop("algorithm", None)  # peer alone has some, of its own
        copies: dict[int, tuple[np.ndarray, Array]] = {}
        pairs: list[tuple[np.ndarray, Array]] = []

        def there(x: Any) -> Any:
            if not isinstance(x, np.ndarray):
                return x
            whole = x
            while isinstance(whole.base, np.ndarray) and whole.base.dtype == x.dtype:
                whole = whole.base
            if id(whole) not in copies:
                copies[id(whole)] = whole, Array.from_numpy(whole.reshape(-1), self.device)
            start = (address(x) - address(whole)) // x.itemsize
            view = copies[id(whole)][1][start : start + x.size].reshape(x.shape)
            pairs.append((x, view))
            return view

        counts = {"all_to_all_v": (1, 2)}.get(name, (1,) if name.endswith("_v") else ())
        given = [x if index in counts else there(x) for index, x in enumerate(arguments)]
        result = getattr(self.comm, name)(*given, **{key: there(x) for key, x in options.items()})

        def copy_back() -> None:
            for whole, copy in copies.values():
                if whole.flags.writeable:
                    whole.reshape(-1)[...] = copy.numpy()

        def here(result: Any) -> Any:
            """The ndarray that belongs to a result."""
            same = next((x for x, view in pairs if result is view), None)
            return same if same is not None else result.numpy() if isinstance(result, Array) else result

        def finish() -> Any:
            copy_back()
            return here(result.wait())

        if self._batched is None:
            copy_back()
            return InFlight(result, finish) if isinstance(result, Work) else here(result)
        self._batched.append(copy_back)
        found = here(result)
        assert any(found is x for x, _ in pairs) or found is None, f"{name} in a batch on GPUs: expected out="
        return found


class InFlight:
    """A Work whose results come back when it has started, as far as they are there, and again in ``wait``."""

    def __init__(self, work: Work[Any], result: Callable[[], Any]) -> None:
        self._work, self._result = work, result

    def wait(self, *arguments: Any, **options: Any) -> Any:
        self._work.wait(*arguments, **options)
        return self._result()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def address(x: np.ndarray) -> int:
    return x.__array_interface__["data"][0]
