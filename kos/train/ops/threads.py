"""Matrix products on several threads: each computes parts of the output, and sleeps between products.

BLAS itself has one thread. OpenBLAS's own threads split a product in equal parts, wait for the slowest, and call the
scheduler in a loop while they wait. If other programs use the processors, that takes longer than one thread would.
Here, the caller takes parts as well, and waits only for parts that another thread has begun.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
LEAST_FLOPS = 1 << 24  # of a product that is worth waking a thread
LEAST_PART, ALIGNED = 128, 64  # rows or columns


class Job:
    """The parts of a product. ``done`` has an entry for each that another thread than the caller's has computed."""

    def __init__(self, compute: Callable[[slice], object], parts: list[slice]) -> None:
        self.compute, self.parts, self.claims = compute, parts, itertools.count()
        self.done = SimpleQueue[BaseException | None]()

    def claim(self) -> slice | None:
        index = next(self.claims)  # atomic
        return self.parts[index] if index < len(self.parts) else None


class Threads:
    """The threads of a process, ``count`` with the caller's."""

    def __init__(self) -> None:
        self.count, self._started, self._lock = 1, 1, threading.Lock()
        self._calls, self._job = list[SimpleQueue[None]](), Job(print, [])
        os.register_at_fork(after_in_child=self.__forked)

    def __forked(self) -> None:
        """A child has none of the threads."""
        self._calls, self._lock = [], threading.Lock()

    def _serve(self, calls: SimpleQueue[None]) -> None:
        with np.errstate(all="ignore"):
            while True:
                calls.get()
                job = self._job
                while (part := job.claim()) is not None:
                    try:
                        job.compute(part)
                        job.done.put(None)
                    except BaseException as error:
                        job.done.put(error)
                del job

    def run(self, compute: Callable[[slice], object], parts: list[slice]) -> bool:
        """Compute all parts; False if another thread has the threads."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            while len(self._calls) < self.count - 1:
                self._calls.append(SimpleQueue())
                threading.Thread(target=self._serve, args=(self._calls[-1],), daemon=True, name="kos product").start()
            self._job = job = Job(compute, parts)
            for calls in self._calls[: self.count - 1]:
                if calls.empty():  # else it has not begun the last product yet, and takes this one
                    calls.put(None)
            others = len(parts)
            while (part := job.claim()) is not None:
                compute(part)
                others -= 1
            for _ in range(others):
                if (error := job.done.get()) is not None:
                    raise error
        finally:
            self._job = Job(print, [])
            self._lock.release()
        return True


THREADS = Threads()


def matmul(a: Array, b: Array, out: Array) -> None:
    """out (M, N) = a (M, K) b (K, N); without M, of vectors."""
    *rows_of_a, depth = a.shape
    rows, columns = rows_of_a[0] if rows_of_a else 0, b.shape[-1]
    if THREADS.count > 1 and 2 * rows * depth * columns >= LEAST_FLOPS:
        size = max(rows, columns)
        if (parts := parts_of(size, THREADS.count)) and THREADS.run(
            (lambda part: np.matmul(a[part], b, out=out[part])) if size == rows
            else (lambda part: np.matmul(a, b[:, part], out=out[:, part])), parts,
        ):  # fmt: skip
            return
    np.matmul(a, b, out=out)


def parts_of(size: int, threads: int) -> list[slice]:
    """Two for each thread, or fewer of at least ``LEAST_PART``; none if there would be one."""
    count = min(2 * threads, size // LEAST_PART)
    step = -(-size // max(count, 1) // ALIGNED) * ALIGNED
    return [slice(at, min(at + step, size)) for at in range(0, size, step)] if count > 1 else []
