"""Publishers whose ranks are threads of the test's process, with known contents."""

import os
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from kos.comm import Communicator
from kos.dtypes import DTYPES
from kos.memory import Array as GpuArray
from kos.testing import spawn
from kos.transfer import Array, Offers, Placement, Plan, Publisher, read_catalogue, subscriber

SHAPES = {"a.weight": (12, 8), "b.weight": (6, 6), "norm": (7,), "scale": ()}
SECONDS = 60.0


def contents(version: int, shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> dict[str, np.ndarray]:
    """The tensors of a version, which float32 holds exactly; each element differs in versions less than 1000 apart."""
    made = {}
    for index, (name, shape) in enumerate(shapes.items()):
        size = int(np.prod(shape))
        made[name] = (np.arange(size, dtype=np.float32) + 1000 * index + 10_000 * (version % 1000)).reshape(shape)
    return made


def held(placement: Placement, tensors: Mapping[str, np.ndarray]) -> np.ndarray:
    """The flattened array of ``placement``."""
    flat = np.zeros(placement.count, next(iter(tensors.values())).dtype)
    for part in placement.parts:
        index = tuple(map(slice, part.start, (a + n for a, n in zip(part.start, part.size, strict=True))))
        part.view(flat, part.start, part.size)[...] = tensors[part.tensor][index]
    return flat


def arrays_of(layout: Mapping[str, Placement], dtype: Any = np.float32) -> dict[str, tuple[np.ndarray, Placement]]:
    """Arrays of zeros in these placements."""
    return {name: (np.zeros(placed.shape, dtype), placed) for name, placed in layout.items()}


def set_version(
    arrays: Mapping[str, tuple[np.ndarray, Placement]], version: int, shapes: Mapping[str, tuple[int, ...]] = SHAPES
) -> None:
    for name, (array, placement) in arrays.items():
        array.reshape(-1)[...] = held(placement.named(name), contents(version, shapes))


def torn(
    arrays: Mapping[str, tuple[Any, Placement]], version: int, shapes: Mapping[str, tuple[int, ...]] = SHAPES
) -> list[str]:
    """The arrays that differ from ``version``, rounded to their dtypes."""
    right, found = contents(version, shapes), list[str]()
    for name, (array, placement) in arrays.items():
        array = array.numpy() if isinstance(array, GpuArray) else array
        if (array.reshape(-1) != held(placement.named(name), right).astype(array.dtype)).any():
            found.append(name)
    return found


def expect_version(arrays: Mapping[str, tuple[Any, Placement]], version: int) -> None:
    assert torn(arrays, version) == []


class Ranks:
    """The publisher of some ranks."""

    def __init__(self) -> None:
        self.publishers: dict[int, Publisher] = {}
        self.arrays: dict[int, dict[str, tuple[np.ndarray, Placement]]] = {}
        self.orders: list[queue.Queue[Any]] = []
        self.answers: queue.Queue[Any] = queue.Queue()

    @property
    def address(self) -> str:
        return self.publishers[0].address

    def publish(self, version: int, fill: bool = True) -> list[Any]:
        """Publish on all ranks: each rank's result or exception."""
        return self.on_all(lambda rank: (
            set_version(self.arrays[rank], version) if fill else None, self.publishers[rank].publish(version)
        )[1])  # fmt: skip

    def on_all(self, work: Callable[[int], Any]) -> list[Any]:
        for each in self.orders:
            each.put(work)
        found = dict(self.answers.get(timeout=SECONDS) for _ in self.orders)
        return [found[rank] for rank in range(len(self.orders))]

    def run(self, comm: Communicator | None, rank: int, orders: queue.Queue[Any]) -> None:
        while (work := orders.get(timeout=SECONDS)) is not None:
            try:
                self.answers.put((rank, work(rank)))
            except Exception as error:
                self.answers.put((rank, error))


@contextmanager
def publishing(layouts: list[Mapping[str, Placement]], **options: Any) -> Iterator[Ranks]:
    """A publisher with a rank for each of ``layouts``."""
    ranks, errors = Ranks(), list[BaseException]()
    ranks.orders = [queue.Queue() for _ in layouts]
    ready = threading.Barrier(len(layouts) + 1, timeout=SECONDS)

    def rank(comm: Communicator) -> None:
        arrays = ranks.arrays[comm.rank] = arrays_of(layouts[comm.rank])
        with Publisher(comm, arrays, **options) as publisher:
            ranks.publishers[comm.rank] = publisher
            ready.wait()
            ranks.run(comm, comm.rank, ranks.orders[comm.rank])

    def run() -> None:
        try:
            spawn(rank, len(layouts), timeout=2 * SECONDS)
        except BaseException as error:
            errors.append(error)
            ready.abort()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        ready.wait()
        yield ranks
    finally:
        for each in ranks.orders:
            each.put(None)
        thread.join(SECONDS)
        assert not thread.is_alive()
    assert not errors, errors


@contextmanager
def before_reads(act: Callable[[], object], rank: int = 0) -> Iterator[None]:
    """Call ``act`` each time that this rank of a subscriber has a lease and not yet the first byte."""

    def slow(offers: Offers, wants: Any, first: int, near: Any) -> Plan:
        if first == rank:
            act()
        return Plan(offers, wants, first, near)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subscriber, "Plan", slow)
        yield


def corrupt(address: str, rank: int, right: np.ndarray) -> None:
    """Change one byte of ``right`` in the memory of a publisher rank of this process, as a stray write would."""
    where = read_catalogue(address).ranks[rank]
    memory = os.pread(where.file, os.fstat(where.file).st_size, 0)
    at = memory.rindex(right.tobytes())
    os.pwrite(where.file, bytes([memory[at] ^ 1]), at)


def planned_bytes(
    layouts: list[Mapping[str, Placement]], wants: Mapping[str, Placement], dtype: Any = np.float32, rank: int = 0
) -> int:
    """The bytes that a subscriber with these placements reads."""
    def described(layout: Mapping[str, Placement], of: Any) -> dict[str, Array]:
        return {name: Array(DTYPES[np.dtype(of).name], placed.named(name)) for name, placed in layout.items()}

    offers = Offers.of([described(layout, np.float32) for layout in layouts])
    return sum(Plan(offers, [described(wants, dtype)], rank).traffic().values())
