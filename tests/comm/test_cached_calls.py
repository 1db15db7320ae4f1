"""Random calls on a communicator and on a twin that caches nothing, and the cache hits that are expected.

Both give the same results and raise the same errors, whatever has changed since the last such call: arrays and their
properties, arguments and how they are passed, options, streams, the timeout, a batch, or the operations in flight.
"""

from __future__ import annotations

import inspect
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import kos
from kos import ReduceOp
from kos.comm.operation import CORE_OPERATIONS, OPERATIONS, Operation
from kos.errors import CollectiveMismatch, InvalidArgument
from kos.memory.array import Array
from kos.testing import spawn
from kos.testing.conformance import model
from kos.testing.conformance.model import EXCHANGING, GATHERING, IN_PLACE, MOVING, REDUCING, ROOTED, SCATTERING, Step
from kos.testing.conformance.values import assert_bits
from tests.comm import shared_ranks
from tests.comm.gpu_eager import hits
from tests.comm.gpu_ranks import Prepared
from tests.comm.ranks import on_each_rank
from tests.comm.tcp_ranks import TCPRanks
from tests.fake_cuda import Stream

TIMES = 4  # in a row that each call is made
POOL, EVENTS = 16, 50
NAMES = (*REDUCING, *MOVING, "barrier")
Cached = Callable[[Step], bool]
DTYPES = (np.float32, np.int32, np.int16, np.float64, ml_dtypes.bfloat16)
OPS = (ReduceOp.SUM, ReduceOp.SUM, ReduceOp.MAX, ReduceOp.PREMUL_SUM)
STREAMS = (None, Stream(40), Stream(41))
OPTIONS: tuple[dict[str, Any], ...] = ({}, {}, {}, {"timeout": 20.0}, {"async_op": True})
ON_HOST, ON_GPU = ("strided", "misaligned"), ("x is freed", "out is freed")
FLAWS = {
    "overlap": ("all_reduce", "scan", "all_gather", "reduce_scatter"),
    "overlap of shards": ("all_gather_v", "reduce_scatter_v"),
    "shape": ("all_reduce", "scan"),
    "read-only": ("all_reduce", "scan", "all_gather"),
    "read-only in place": ("all_reduce", "scan"),
    "root": ROOTED,
    "counts": ("all_gather_v", "reduce_scatter_v"),
    **dict.fromkeys((*ON_HOST, *ON_GPU), ("all_reduce", "all_gather", "reduce_scatter")),
}
"""What may be wrong with a call on all ranks, and of which operations."""


def numbers(counts: list[int]) -> list[Any]:
    """Counts that are numbers of NumPy: the core knows no such call."""
    return [np.int64(each) for each in counts]


COUNTS = (list, list, tuple, numbers, np.array)


@dataclass(frozen=True)
class Call:
    """A call of the random program; ``flaw`` is what is wrong with it."""

    step: Step
    twice: bool  # one array is passed as input and as output
    matrix: bool  # arrays have two dimensions
    keywords: bool
    counts: Callable[[list[int]], Any]
    options: tuple[tuple[str, Any], ...]
    stream: int  # of the arrays, one of STREAMS
    odd: bool = False  # arrays begin 8 bytes after an aligned address
    flaw: str = ""

    def with_counts(self) -> Call:
        """This call, to which counts are passed if it has any: in a batch they must be."""
        return replace(self, step=replace(self.step, sized=True))


class Arrays:
    """The arrays of a call on one rank; it gets ``source`` and ``target``: ``x`` and ``out``, or parts of them."""

    def __init__(self, comm: kos.Communicator, call: Call) -> None:
        self.comm, self.call, self.on_gpu, step = comm, call, comm.device is not None, call.step
        n, me = comm.size, comm.rank
        counts = model.uneven(step, n) if step.name.endswith("_v") else [step.count] * n
        self.start = 0 if step.name in IN_PLACE else sum(counts[:me])  # of this rank's shard
        self.count, self.has_shard = counts[me], False
        shift = 1 + step.root % max(1, n - 1)  # of a message to another rank
        self.peers = (me + shift) % n, (me - shift) % n, 0 if self.on_gpu else step.root
        xs = model.contributions(0, step, n)
        expected = model.result(step, xs, me)
        self.x, self.out = self.new(xs[me]), None if expected is None else self.new(expected)
        if call.matrix:
            self.x, self.out = (each if each is None else each.reshape(1, -1) for each in (self.x, self.out))
        self.source, self.target = self.x, self.out
        if step.in_place:
            self._share_memory(step)
        if call.flaw:
            self._spoil(call.flaw)

    def new(self, values: np.ndarray) -> Any:
        """An array like those of the call."""
        skipped = 8 // values.itemsize if self.call.odd else 0
        whole = np.concatenate([np.zeros(skipped, values.dtype), values])
        return (Array.from_numpy(whole, 0, stream=STREAMS[self.call.stream]) if self.on_gpu else whole)[skipped:]

    def _share_memory(self, step: Step) -> None:
        shard, is_root = slice(self.start, self.start + self.count), self.comm.rank == step.root % self.comm.size
        if step.name in IN_PLACE:
            self.target = self.source if self.call.twice else None
        elif step.name in GATHERING and (is_root or step.name.startswith("all")):
            self.source, self.has_shard = self.out[shard], True
        elif step.name in SCATTERING and (is_root or step.name.startswith("reduce")):
            self.target, self.has_shard = self.x[shard], True

    def _spoil(self, flaw: str) -> None:
        x, out = self.x, self.out
        if flaw.startswith("overlap"):  # by a multiple of 16 bytes, or at another shard's place
            start, total = self.start + (1 if "shards" in flaw else 16 // x.dtype.itemsize), max(x.size, out.size)
            larger = self.new(np.zeros(total + 16, self.call.step.dtype))
            whole, part = larger[:total], larger[start : start + self.count]
            self.source, self.target = (whole, part) if self.call.step.name in SCATTERING else (part, whole)
        elif flaw == "shape":
            self.target = out.reshape(-1, 1)
        elif flaw.startswith("read-only"):
            self.target = x if "in place" in flaw else out
            if self.on_gpu:
                self.target.readonly = True
            else:
                self.target.flags.writeable = False
        elif flaw == "strided":
            self.source = np.zeros(2 * x.size, x.dtype)[::2]
        elif flaw == "misaligned":
            self.source = np.frombuffer(bytearray(x.nbytes + 1), x.dtype, x.size, 1)
        elif flaw.endswith("freed"):
            (x if flaw.startswith("x") else out).owner.close()

    def fill(self, values: np.ndarray) -> None:
        """Write the input, and over what the call writes."""
        if self.call.flaw:
            return
        for array, held in ((self.out, np.full(self.count, 99)), (self.x, values), (self.source, values)):
            if array is not None:
                held = np.resize(held, array.shape).astype(self.call.step.dtype)
                _ = array.copy_from(held) if self.on_gpu else np.copyto(array, held)

    @property
    def is_empty(self) -> bool:
        return any(each is not None and each.size == 0 for each in (self.source, self.target))

    def read(self, array: Any) -> np.ndarray:
        return array.numpy() if self.on_gpu else np.array(array)

    def make(self) -> Any:
        """Make the call."""
        call = self.call
        step = replace(call.step, in_place=self.target is None)
        given, options = model.arguments(self.comm, step, self.source, None if step.made else self.target)
        given = [call.counts([n + (call.flaw == "counts") for n in x]) if type(x) is list else x for x in given]
        options |= dict(call.options)
        if step.name == "send_recv":
            given[2:] = self.peers
        if call.keywords or call.flaw == "root":
            names = list(inspect.signature(getattr(kos.Communicator, step.name)).parameters)[1:]
            given, options = [], dict(zip(names, given, strict=False)) | options
        if call.flaw == "root":
            options["root"] = self.comm.size
        return getattr(self.comm, step.name)(*given, **options)

    def outcome(self, make: Callable[[], Any]) -> tuple[Any, ...]:
        """Which array a call returned, and what all hold after it; or the error that it raised."""
        try:
            got = make()
            got = got.wait() if hasattr(got, "wait") else got
        except InvalidArgument as error:
            return "raised", re.sub("0x[0-9a-f]+", "", str(error))
        returned = {id(self.source): "x", id(self.target): "out", id(None): "none"}.get(id(got), "made")
        arrays = [each for each in (self.x, self.out, got if returned == "made" else None) if each is not None]
        return returned, *map(self.read, arrays)


class Program:
    """A random program on a communicator and on its twin."""

    def __init__(
        self, comm: kos.Communicator, seed: int, names: Sequence[str], cached: Cached = lambda step: False,
        dtypes: Sequence[Any] = DTYPES,
    ) -> None:  # fmt: skip
        """``names`` are the operations; ``cached`` says which calls the core makes once it knows them."""
        self.comm, self.twin, self.names, self.cached, self.dtypes = comm, comm.duplicate(), names, cached, dtypes
        for name in CORE_OPERATIONS:
            self.twin.__dict__.pop(name, None)  # the method of the class
        self.on_gpu, self.prepared = comm.device is not None, Prepared(comm)
        self.random, self.number = np.random.default_rng(seed), 0
        self.known: dict[Call, bool] = {}  # by key, whether the first such call had a shard within the other array
        self.made = set[Call]()
        self.stream: int | None = 0  # of the last call, if that is known
        self.kept: dict[Call, tuple[Arrays, Arrays]] = {}
        self.pool = [self.draw() for _ in range(POOL)]

    def choose(self, what: Any) -> Any:
        """One of these, the same on all ranks."""
        return what[int(self.random.integers(len(what)))]

    def draw(self) -> Call:
        name, some, seldom = self.choose(self.names), (False, True), (False, False, True)
        if name == "barrier":
            return Call(Step(name), False, False, False, list, (), 0)
        of_counts, alike = name.endswith("_v"), name in IN_PLACE
        in_place = self.choose(some) and name not in (*EXCHANGING, "send_recv")
        made = self.choose(seldom) and name in (*GATHERING, *EXCHANGING) and not in_place
        dtype, op, root = self.choose(self.dtypes), self.choose(OPS), self.choose(range(3))
        if np.dtype(dtype).kind == "i" and op is ReduceOp.PREMUL_SUM:
            op = ReduceOp.MIN
        step = Step(
            name, self.choose((5, 6) if of_counts else (1, 12, 400)), dtype, op if name in REDUCING else ReduceOp.SUM,
            root if name in (*ROOTED, "send_recv") else 0, in_place=in_place, made=made, values="whole",
            sized=not of_counts or not self.choose(seldom),
        )  # fmt: skip
        return Call(
            step, twice=in_place and alike and self.choose(some), matrix=alike and self.choose(some),
            keywords=self.choose(seldom), counts=self.choose(COUNTS) if of_counts else list,
            options=tuple(self.choose(OPTIONS).items()), stream=self.choose((0, 0, 1, 2)) if self.on_gpu else 0,
            odd=self.on_gpu and self.choose(seldom),
        )  # fmt: skip

    def run(self) -> None:
        events = [self.call] * 6 + [self.resized] * 2 + [self.wrong_call, self.set_timeout, self.batch]
        if "send_recv" in self.names and not self.on_gpu:
            events.append(self.beside_a_receive)
        for _ in range(EVENTS):
            self.choose(events)(self.choose(self.pool))
        assert hits(self.twin) == 0 and self.comm.all_reduce.__doc__ == self.twin.all_reduce.__doc__
        self.twin.close()

    def may_hit(self, arrays: Arrays) -> bool:
        """Whether the core makes calls like this one once it knows one."""
        call, step = arrays.call, arrays.call.step
        fixed = step.sized and call.counts in (list, tuple)
        plain = not step.made or arrays.out is None
        on_side = "async_op" not in dict(call.options) if self.on_gpu else not (arrays.has_shard or arrays.is_empty)
        return fixed and plain and on_side

    def pair(self, call: Call, fresh: bool = True) -> tuple[Arrays, Arrays]:
        """The arrays of the communicator and of its twin: new ones, or those of the last such call."""
        if fresh or call not in self.kept:
            self.kept[call] = Arrays(self.comm, call), Arrays(self.twin, call)
        return self.kept[call]

    def fill(self, pair: tuple[Arrays, Arrays]) -> np.ndarray | None:
        """Write the same new values to both; returns the result that a call on them has, if it has one."""
        self.number, step = self.number + 1, pair[0].call.step
        xs = model.contributions(self.number, step, self.comm.size)
        for arrays in pair:
            arrays.fill(xs[self.comm.rank])
        if step.name == "send_recv":
            return xs[pair[0].peers[1]]
        return model.result(step, xs, self.comm.rank)

    def check(self, pair: tuple[Arrays, Arrays], expected: np.ndarray | None, mine: Any, twins: Any) -> None:
        """Both outcomes are the same, and have the ``expected`` result."""
        what = str(pair[0].call)
        assert mine[0] == twins[0] and len(mine) == len(twins), (what, mine, twins)
        if mine[0] == "raised":
            assert mine == twins, what
            return
        for a, b in zip(mine[1:], twins[1:], strict=True):
            assert_bits(a.reshape(-1), b.reshape(-1), what)
        if expected is not None:
            target = pair[0].target if pair[0].target is not None else pair[0].source
            result = mine[-1] if mine[0] == "made" else pair[0].read(target)
            assert_bits(result.reshape(-1), expected, what)

    def call(self, call: Call) -> None:
        """Make it TIMES in a row, on the same arrays or others."""
        fresh, before = self.choose((False, True)), hits(self.comm)
        self.twin.backend.store.clear()
        self.prepared.clear()
        for _ in range(TIMES):
            pair = self.pair(call, fresh)
            expected = self.fill(pair)
            mine, twins = (each.outcome(each.make) for each in pair)
            self.check(pair, expected, mine, twins)
        least, most = self.expected_hits(pair[0])
        assert least <= hits(self.comm) - before <= most, (call, least, hits(self.comm) - before, most)
        if call in self.made and call.step.sized and call.step.op is not ReduceOp.PREMUL_SUM:
            assert not self.prepared, call
        self.check_record()
        self.made.add(call)
        self.note(pair[0])
        self.stream = None if call.options else call.stream

    def note(self, arrays: Arrays) -> None:
        """The core knows the call now."""
        self.known.setdefault(self.key(arrays), arrays.has_shard)

    def key(self, arrays: Arrays) -> Call:
        """The same for calls that the core takes for one another: this rank passes the same, and counts by value."""
        call, step = arrays.call, arrays.call.step
        in_place, made = arrays.target is None and step.name in IN_PLACE, step.made and arrays.out is not None
        counts, twice = list if call.counts is tuple else call.counts, arrays.target is arrays.source
        return replace(call, step=replace(step, in_place=in_place, made=made), counts=counts, twice=twice)

    def expected_hits(self, arrays: Arrays) -> tuple[int, int]:
        """The least and the most of TIMES such calls that the core makes."""
        call, known = arrays.call, self.known.get(self.key(arrays))
        if not self.may_hit(arrays):
            return 0, 0
        scaled = call.step.op is ReduceOp.PREMUL_SUM and call.step.name in REDUCING
        if not self.cached(call.step) or scaled or (self.on_gpu and arrays.is_empty):
            return 0, TIMES
        if not self.on_gpu:
            return TIMES - (known is None), TIMES  # the first one too, if a call of another size is known
        if known is None:
            return 1, TIMES - 1
        if known != arrays.has_shard:  # the core keeps one of the two, which differ in where their arrays lie
            return 0, TIMES
        moved = self.stream != call.stream  # Python makes a stream follow another one; and every 64th call
        return TIMES - 1 - moved, TIMES - (moved and self.stream is not None)

    def resized(self, call: Call) -> None:
        """A call that differs from one of the pool in its sizes only."""
        self.call(replace(call, step=replace(call.step, count=int(self.random.integers(1, 700)))))

    def check_record(self) -> None:
        """The recorder has of the last call what it has of the twin's."""
        last = {entry["process_group"][0]: entry for entry in self.comm.recorder.entries()}
        mine, twins = (last[comm.name] for comm in (self.comm, self.twin))
        for name in ("profiling_name", "reduce_op", "root", "timeout_ms", "state", "input_sizes", "frames"):
            assert mine[name] == twins[name], name
        if mine["state"] == "completed":
            assert mine["time_created_ns"] <= mine["time_discovered_completed_ns"]

    def wrong_call(self, call: Call) -> None:
        """Calls like one that is known, but for something that is wrong with them: nothing is sent."""
        step = replace(call.step, in_place=False, made=False, sized=True)
        flaws = [flaw for flaw, names in FLAWS.items() if step.name in names]
        flaws = [flaw for flaw in flaws if flaw not in (ON_HOST if self.on_gpu else ON_GPU)]
        flaws = [flaw for flaw in flaws if flaw != "overlap of shards" or (step.count == 5 and self.comm.size > 1)]
        if not flaws or step.count == 1:
            return
        call = replace(call, step=step)
        self.call(call)
        before = hits(self.comm)
        for flaw in flaws:
            pair = self.pair(replace(call, flaw=flaw))
            mine, twins = (each.outcome(each.make) for each in pair)
            self.check(pair, None, mine, twins)
            assert mine[0] == "raised" and hits(self.comm) == before, pair[0].call

    def set_timeout(self, call: Call) -> None:
        self.comm.timeout = self.twin.timeout = self.choose((31.0, 32.0, 33.0))
        self.known.clear()
        self.made.clear()

    def batch(self, call: Call) -> None:
        """Python makes its calls."""
        calls = call, self.choose(self.pool)
        before, pairs = hits(self.comm), [self.pair(replace(each, options=()).with_counts()) for each in calls]
        expected = [self.fill(pair) for pair in pairs]
        got: list[list[Any]] = [[], []]
        for which, comm in enumerate((self.comm, self.twin)):
            with comm.batch():
                got[which] = [pair[which].make() for pair in pairs]
        for at, pair in enumerate(pairs):
            mine, twins = (pair[which].outcome(lambda which=which, at=at: got[which][at]) for which in range(2))
            self.check(pair, expected[at], mine, twins)
            if not self.on_gpu:
                self.note(pair[0])
        assert hits(self.comm) == before
        self.stream = None

    def beside_a_receive(self, call: Call) -> None:
        """Python makes a call while another one is in flight, which its wait may have to advance."""
        comm = self.comm
        received = comm.recv(np.zeros(1), (comm.rank - 1) % comm.size, tag=7, async_op=True)
        before, pair = hits(comm), self.pair(call)
        expected = self.fill(pair)
        self.check(pair, expected, *(each.outcome(each.make) for each in pair))
        assert hits(comm) == before, call
        self.note(pair[0])
        comm.rendezvous.barrier()
        comm.send(np.ones(1), (comm.rank + 1) % comm.size, tag=7)
        received.wait()


def by_nccl(step: Step) -> bool:
    """Whether a call is certainly one launch of NCCL."""
    if step.name in ("all_reduce", "reduce", "reduce_scatter"):
        return step.op is ReduceOp.SUM or np.dtype(step.dtype).kind == "i"
    return step.name in ("broadcast", "all_gather", "gather", "scatter")


SIZES = pytest.mark.parametrize(("size", "seed"), [(1, 0), (2, 1), (3, 2)])


def by_core(step: Step) -> bool:
    """Whether the core runs the operation of ``step``."""
    return OPERATIONS[step.name].core is not None


def names_of(size: int) -> list[str]:
    """The operations of so many ranks."""
    return [name for name in NAMES if size > 1 or name != "send_recv"]


@SIZES
def test_on_threads(size, seed):
    spawn(lambda comm: Program(comm, seed, names_of(size)).run(), size)


NEW_SIZES = 12


def last_entry(comm: kos.Communicator) -> dict[str, Any]:
    return [entry for entry in comm.recorder.entries() if entry["process_group"][0] == comm.name][-1]


@shared_ranks.needs_core
@pytest.mark.parametrize(("size", "dtype"), [(2, np.float32), (3, np.int16)])
def test_calls_of_new_sizes_are_made_by_the_core(size, dtype):
    TCPRanks(size).run(lambda comm: make_calls_of_new_sizes(comm, dtype))


def make_calls_of_new_sizes(comm: kos.Communicator, dtype: Any) -> None:
    """Of each operation of the core, only the first call is made in Python: later ones have other sizes and counts."""
    random, me = np.random.default_rng(5), comm.rank
    for name in names_of(comm.size):
        for number in range(NEW_SIZES if name not in ("barrier", "all_to_all_v") else 0):
            n = int(random.integers(1, 200))
            counts = random.integers(1, 9, comm.size).tolist() if name.endswith("_v") else None
            step = Step(name, n, dtype, values="whole", counts=counts)
            call = Call(step, False, name in IN_PLACE and n % 2 == 0, False, list, (), 0)
            arrays, before, xs = Arrays(comm, call), hits(comm), model.contributions(number, step, comm.size)
            arrays.fill(xs[me])
            arrays.make()
            assert hits(comm) - before == (number > 0 and by_core(step)), (number, step)
            expected = xs[arrays.peers[1]] if name == "send_recv" else model.result(step, xs, me)
            if expected is not None:
                assert_bits(np.array(arrays.out).reshape(-1), expected, str(call))
            if name != "send_recv":  # of which the last entry is the receive
                sent = [] if name.startswith("scatter") and me else [list(arrays.source.shape)]
                assert last_entry(comm)["input_sizes"] == sent, step
    for number in range(NEW_SIZES):
        counts = random.integers(1, 9, (comm.size, comm.size))
        pieces = [
            [np.full(count, 10 * row + column, dtype) for column, count in enumerate(of)]
            for row, of in enumerate(counts)
        ]
        out, before = np.zeros(counts[:, me].sum(), dtype), hits(comm)
        comm.all_to_all_v(np.concatenate(pieces[me]), counts[me].tolist(), counts[:, me].tolist(), out)
        assert hits(comm) - before == (number > 0)
        assert_bits(out, np.concatenate([row[me] for row in pieces]), str(counts))


@shared_ranks.needs_core
@pytest.mark.parametrize("async_op", [False, True])
@on_each_rank(TCPRanks(2).run)
def test_a_call_of_a_new_size_goes_on_without_memory_for_its_texts(comm, /, async_op, monkeypatch):
    """Python describes such a call after the core has begun it."""

    def call(n: int) -> np.ndarray:
        x = np.full(n, comm.rank + 1)
        work = comm.all_reduce(x, async_op=async_op)
        return work.wait() if async_op else work

    def lacks(operation: Operation) -> Any:
        raise MemoryError

    call(3)
    if comm.rank == 0:
        monkeypatch.setattr(comm.backend, "prepare", lacks)
        works = [call(n) for n in (4, 5)]
        monkeypatch.undo()
    else:
        time.sleep(0.1)  # rank 0 most likely waits
        works = [call(n) for n in (4, 5)]
    assert [each.tolist() for each in works] == [[3] * 4, [3] * 5]
    assert call(5).tolist() == [3] * 5 and call(4).tolist() == [3] * 4


@shared_ranks.needs_core
@pytest.mark.parametrize("counts", [False, True])
@on_each_rank(TCPRanks(3).run)
def test_calls_of_new_sizes_that_differ_between_ranks(comm, /, counts):
    """The error has the shapes and the counts of two ranks."""

    def call(group: kos.Communicator, rows: int, each: list[int]) -> None:
        x = np.zeros(each[comm.rank] if counts else (rows, 2))
        if counts:
            group.all_gather_v(x, each, np.zeros(sum(each)))
        else:
            group.all_reduce(x)

    for known in (0, 1, 5):
        group = comm.duplicate()
        for rows in range(1, 1 + known):
            call(group, rows, [rows, 1, 2])
        odd = comm.rank == 1
        with pytest.raises(CollectiveMismatch) as caught:
            call(group, 7 + odd, [4, 4 + odd, 4])
        one = r"(\[4, [45], 4\]|of digest \w+)"
        what = f"counts {one} against {one}" if counts else "count 1[46] against 1[46]"
        assert re.search(what, str(caught.value)), caught.value
        assert sorted(caught.value.ranks)[0] in (0, 1) and 1 in caught.value.ranks
        group.abort()


@shared_ranks.needs_core
@on_each_rank(TCPRanks(2).run)
def test_a_full_cache_keeps_what_is_used(comm, /):
    """A call that is made again and again stays, however many others there are."""
    x = np.zeros(3)
    comm.all_reduce(x)
    for n in range(5000):
        comm.all_reduce(np.zeros(4 + n, np.uint8))
        if n % 500 == 0:
            before = hits(comm)
            comm.all_reduce(x)
            assert hits(comm) == before + 1


@shared_ranks.needs_core
@SIZES
def test_on_tcp(size, seed):
    TCPRanks(size).run(lambda comm: Program(comm, seed, names_of(size), lambda step: size > 1 and by_core(step)).run())


@shared_ranks.needs_core
@pytest.mark.usefixtures("no_looks")
@pytest.mark.parametrize("seed", range(2))
@on_each_rank("gpu_run")
def test_on_gpus(comm, /, seed):
    if comm.backend_name == "peer":
        Program(comm, seed, NAMES, lambda step: step.name != "barrier", [np.int32]).run()
    else:
        Program(comm, seed, NAMES, by_nccl, [each for each in DTYPES if each is not np.int16]).run()


@shared_ranks.needs_core
@pytest.mark.usefixtures("no_looks")
@pytest.mark.parametrize("seed", range(2))
def test_on_one_gpu(gpu_alone, seed):
    gpu_alone(lambda comm, fake: Program(comm, seed, names_of(1), lambda step: step.name != "barrier").run())


@on_each_rank(spawn, 3)
def test_each_field_of_an_operation_is_in_its_signature(comm, /):
    """A call that differs from an earlier one in a single field, on some rank, is prepared anew."""
    done, prepare, me, call = list[Operation](), comm.backend.prepare, comm.rank, comm.all_reduce
    comm.backend.prepare = lambda o: done.append(o) or prepare(o)
    x, y, fixed = np.zeros(4, "f4"), np.zeros(4, "f4"), np.frombuffer(bytes(16), "f4")
    for number, each in enumerate((
        partial(call, x), partial(comm.scan, x), partial(call, x, ReduceOp.MAX), partial(call, x, deterministic=True),
        partial(call, x, out=y), partial(call, fixed, out=y), *(partial(comm.reduce, x, root) for root in (0, 1)),
        *(partial(comm.send_recv, x, y, (me + step) % 3, (me - step) % 3) for step in (1, 2)),
        *(partial(comm.reduce_scatter_v, x, counts) for counts in ([1, 1, 2], [1, 2, 1])),
        *(partial(comm.all_gather_v, x[: counts[me]], counts) for counts in ([1, 1, 2], [1, 2, 1])),
        *(partial(call, x, compress="int8", residual=residual) for residual in (None, y)),
    ), 1):  # fmt: skip
        each()
        assert len(done) == number, done[-1]
    assert all(len({str(getattr(o, each.name)) for o in done}) > 1 for each in fields(Operation) if each.name != "rank")
