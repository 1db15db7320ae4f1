"""Plans of collectives over the slots of a segment: the data that a rank puts, reduces and gets.

Contributions are added in rank order, so the bits are the same on all ranks, and equal those of
``deterministic=True`` on every backend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from kos.comm.host.shared.segment import DEPTH, PUT, TURNS, Segment
from kos.comm.operation import AUTO, Operation
from kos.comm.reduction import Quiet, ReduceOp, Reduction

Array = np.ndarray[Any, Any]
Step = Callable[[int, int, int], None]  # slot, first element, end
Pairs = list[tuple[Array, Array]]

ONE_SHOT_BYTES = 64 * 1024
"""The largest all_reduce in which every rank reads and reduces all contributions, which saves one wait.

For two ranks it is twice as large.
"""
WHOLE_BYTES = 512 * 1024
"""The largest stage that other ranks read whole: more would not stay in a core's second-level cache."""
MOST_PARTS = 64
"""Cached partitions of a stage."""
ALIGN = 64
"""Bytes of a cache line; ranks write to separate lines."""
MARKED_BYTES = 8 * 1024
"""The least data that its reader marks (``_moves``)."""


class Plan(NamedTuple):
    """One rank's steps of one operation; None for a step that it does not take."""

    elements: int  # equal on all ranks
    per_stage: int
    sources: Sequence[int]  # the ranks whose slots this rank reads
    put: Step | None = None
    get: Step | None = None
    flags: Sequence[int] = ()  # those that count the puts of ``sources``
    reads_all: bool = False  # whether ``sources`` are all other ranks
    readers: Sequence[int] = ()  # flags that count the gets of the ranks that read this rank's memory
    own: Step | None = None  # copies this rank's own data, while other ranks read it
    one_copy: bool = False  # whether the data goes in one copy; waits then poll longer


class Sum(NamedTuple):
    """One rank's all_reduce of several parts, or reduce, in which ranks other than the root have no ``out``."""

    x: Array
    out: Array | None
    reduction: Reduction


class Parts(NamedTuple):
    """Views of one slot, and slices of the elements, for one stage of an all_reduce.

    ``result`` is None for a one-shot stage, in which every rank reduces all elements.
    """

    own: slice  # the elements that this rank reduces
    put: list[tuple[Array, slice]]  # where this rank puts its contributions to other ranks
    contributions: list[Array]  # the contributions to ``own``, by rank
    result: Array | None  # where this rank stores the reduced ``own``
    get: list[tuple[Array, slice]]  # where it reads the results of other ranks


class Plans:
    """Makes the plans of one rank, from the user's input to the user's output."""

    def __init__(self, segment: Segment) -> None:
        self._data, self.block = segment.data, segment.layout.block
        self.rank, self.size = segment.rank, segment.size
        self.peers = [rank for rank in range(self.size) if rank != self.rank]
        # At most a stage, also of 8-bit floats, which are staged in four times as many bytes.
        most = 2 * ONE_SHOT_BYTES if self.size == 2 else min(ONE_SHOT_BYTES, 3 * ONE_SHOT_BYTES // (self.size - 1))
        self.one_shot_bytes = min(most, self.block // 4)
        self._puts = [segment.layout.line(rank) + PUT for rank in range(self.size)]
        self._slots: dict[np.dtype[Any], list[list[Array]]] = {}
        self._parts: dict[Any, list[Parts]] = {}
        self._scratch = np.empty(0, np.uint8)
        self._quietly = Quiet().run  # one thread at a time uses the slots

    def make(self, o: Operation) -> Plan | Sum | None:
        """The plan of ``o``, or None if it is not supported here."""
        make: Callable[[Operation], Plan | Sum] | None = getattr(self, f"_{o.name}", None)
        if make is None or o.options.algorithm != AUTO:
            return None
        plan = make(o)
        if isinstance(plan, Plan):
            flags = [self._puts[rank] for rank in plan.sources] if plan.elements else []
            plan = plan._replace(flags=flags, reads_all=len(flags) == len(self.peers))
        return plan

    def typed(self, dtype: np.dtype[Any]) -> list[list[Array]]:
        """The slots as arrays of ``dtype``, by rank and by stage % TURNS."""
        slots = self._slots.get(dtype)
        if slots is None:
            typed = self._data.view(dtype).reshape(self.size, DEPTH, self.block // dtype.itemsize)
            turns = [(turn // DEPTH, turn % DEPTH) for turn in range(TURNS)]
            slots = [[typed[(r + shift) % self.size][slot] for shift, slot in turns] for r in range(self.size)]
            self._slots[dtype] = slots
        return slots

    def sum(self, reduction: Reduction, contributions: list[Array], result: Array) -> None:
        """Reduce contributions, in rank order, and finish; ``result`` may be the memory of one of them."""
        combine, total, last = reduction.combine, contributions[0], contributions[-1]
        if len(contributions) == 1:
            return reduction.finish(total, result)
        same = reduction.carrier is reduction.dtype.numpy
        if same and len(contributions) == 2:
            combine(total, last, result)
            reduction.finish(result, result)
            return
        if self._scratch.size < self.block:
            self._scratch = np.empty(self.block, np.uint8)
        scratch = self._scratch[: total.nbytes].view(reduction.carrier)
        for contribution in contributions[1:-1]:
            combine(total, contribution, scratch)
            total = scratch
        reduced = result if same else scratch
        combine(total, last, reduced)
        reduction.finish(reduced, result)

    def parts(self, reduction: Reduction, length: int) -> list[Parts]:
        """The partition of an all_reduce stage of ``length`` elements, by slot."""
        key = reduction.carrier, reduction.dtype, reduction.is_plain, length
        parts = self._parts.get(key)
        if parts is None:
            if len(self._parts) == MOST_PARTS:
                self._parts.clear()
            slots = self.typed(reduction.carrier)
            parts = [self._divide(reduction, length, *slot) for slot in zip(*slots, strict=True)]
            self._parts[key] = parts
        return parts

    def _divide(self, reduction: Reduction, length: int, *slots: Array) -> Parts:
        mine = slots[self.rank]
        if length * reduction.dtype.itemsize <= self.one_shot_bytes:
            everything = slice(0, length)
            return Parts(everything, [(mine[:length], everything)], [s[:length] for s in slots], None, [])
        line = ALIGN // reduction.dtype.itemsize
        step = -(-length // (self.size * line)) * line
        parts = [slice(min(r * step, length), min((r + 1) * step, length)) for r in range(self.size)]
        own = parts[self.rank]
        others = [part for part in (slice(0, own.start), slice(own.stop, length)) if part.stop > part.start]
        put = [(mine[part], part) for part in (others if reduction.is_plain else [slice(0, length)])]
        # Over the next rank's contribution: this core has just read these lines, and no other rank reads them.
        results = [
            slots[(r + 1) % self.size][part].view(reduction.dtype.numpy)[: part.stop - part.start]
            for r, part in enumerate(parts)
        ]
        get = [(result, parts[r]) for r, result in enumerate(results) if r != self.rank and result.size]
        return Parts(own, put, [s[own] for s in slots], results[self.rank], get)

    # The operations.

    def _all_reduce(self, o: Operation) -> Plan | Sum:
        """all_reduce, and reduce; in one shot every rank that has ``out`` reduces all contributions."""
        assert o.send is not None and o.reduction is not None
        if o.name == "reduce" and self.size == 2:
            return self._scan(o)
        x, out, reduction = o.send.flat, o.recv.flat if o.recv is not None else None, o.reduction
        if x.size * reduction.dtype.itemsize > self.one_shot_bytes:
            return Sum(x, out, reduction)
        plain, slots = reduction.is_plain, self.parts(reduction, x.size)
        mine = [parts.put[0][0] for parts in slots]

        def contributions(slot: int, a: int, b: int) -> list[Array]:
            each = slots[slot].contributions
            return [x if plain and r == self.rank else part for r, part in enumerate(each)]

        def stage(slot: int, a: int, b: int) -> None:
            reduction.stage(x, mine[slot])

        put = self._moves(x.size, x.size, lambda slot, a, b: [(mine[slot], x)]) if plain else stage
        get = None if out is None else self._adds(reduction, x.size, x.size, contributions, out)
        return Plan(x.size, x.size or 1, self.peers if get else (), put=put, get=get)

    _reduce = _all_reduce

    def _adds(
        self, reduction: Reduction, count: int, per_stage: int, contributions: Callable[[int, int, int], list[Array]],
        out: Array, marks: bool = False,
    ) -> Step:  # fmt: skip
        """Reduces the ``contributions`` of a stage; those of an only stage are found once.  ``marks``: ``_moves``."""
        quietly, ufunc = self._quietly, reduction.ufunc

        def add(slot: int, a: int, b: int) -> None:
            each = contributions(slot, a, b)
            self.sum(reduction, each, out[a:b])
            for lines in self._lines(each) if marks else ():
                lines[...] = 0

        if count > per_stage:
            return add
        every = [contributions(slot, 0, count) for slot in range(TURNS)]
        marked = [self._lines(each) if marks else [] for each in every]
        if len(every[0]) != 2 or reduction.carrier is not reduction.dtype.numpy or reduction.op is ReduceOp.AVG:
            ufunc = None

        def add_all(slot: int, a: int, b: int) -> None:
            if ufunc is None:
                self.sum(reduction, every[slot], out)
            else:
                first, second = every[slot]
                quietly(ufunc, first, second, out=out)
            for lines in marked[slot]:
                lines[...] = 0

        return add_all

    def _reduce_scatter(self, o: Operation) -> Plan:
        assert o.send is not None and o.recv is not None and o.reduction is not None
        out, reduction, rank = o.recv.flat, o.reduction, self.rank
        x, count, slots = o.send.flat.reshape(self.size, -1), out.size, self.typed(reduction.carrier)
        per_stage, plain = self._per_part(reduction.carrier.itemsize), reduction.is_plain

        def parts(slot: int, a: int, b: int) -> Pairs:
            mine = slots[rank][slot]
            peers = self.peers if plain else range(self.size)
            return [(mine[self._place(rank, r) * per_stage :][: b - a], x[r, a:b]) for r in peers]

        def stage(slot: int, a: int, b: int) -> None:
            for staged, part in parts(slot, a, b):
                reduction.stage(part, staged)

        def contributions(slot: int, a: int, b: int) -> list[Array]:
            each = [slots[r][slot][self._place(r, rank) * per_stage :][: b - a] for r in range(self.size)]
            return [*each[:rank], x[rank, a:b], *each[rank + 1 :]] if plain else each

        put = self._moves(count, per_stage, parts) if plain else stage
        return Plan(count, per_stage, self.peers, put, self._adds(reduction, count, per_stage, contributions, out))

    def _scan(self, o: Operation) -> Plan:
        """scan, exscan, in which rank 0 has no ``recv``, and reduce of two ranks: some ranks' inputs, in rank order."""
        assert o.send is not None and o.reduction is not None
        x, out, reduction = o.send.flat, o.recv.flat if o.recv is not None else None, o.reduction
        rank, count, plain = self.rank, x.size, o.reduction.is_plain
        lone = plain and self.size == 2  # else a rank reads its own slot too
        if o.name == "reduce":
            inputs, puts = range(self.size if out is not None else 0), out is None
        else:
            inputs, puts = range(rank + (o.name == "scan")), rank < self.size - 1
        slots, per_stage = self.typed(reduction.carrier), min(self.block, WHOLE_BYTES) // reduction.carrier.itemsize

        def stage(slot: int, a: int, b: int) -> None:
            reduction.stage(x[a:b], slots[rank][slot][: b - a])

        def contributions(slot: int, a: int, b: int) -> list[Array]:
            return [x[a:b] if plain and r == rank else slots[r][slot][: b - a] for r in inputs]

        put: Step | None = stage if puts or not plain else None
        get: Step | None = None
        if plain and puts:
            put = self._moves(count, per_stage, lambda slot, a, b: [(slots[rank][slot][: b - a], x[a:b])])
        if out is not None and plain and len(inputs) == 1:
            get = self._moves(count, per_stage, lambda slot, a, b: [(out[a:b], contributions(slot, a, b)[0])], lone)
        elif out is not None:
            get = self._adds(reduction, count, per_stage, contributions, out, lone)
        return Plan(count, per_stage, [r for r in inputs if r != rank], put=put, get=get)

    _exscan = _scan

    def _broadcast(self, o: Operation) -> Plan:
        assert o.send is not None and o.recv is not None and o.root is not None
        x, out, root = o.send.flat, o.recv.flat, o.root
        slots, per_stage = self.typed(x.dtype)[root], min(self.block, WHOLE_BYTES) // x.itemsize
        if self.rank != root:
            get = self._moves(x.size, per_stage, lambda slot, a, b: [(out[a:b], slots[slot][: b - a])], self.size == 2)
            return Plan(x.size, per_stage, (root,), get=get)
        put = self._moves(x.size, per_stage, lambda slot, a, b: [(slots[slot][: b - a], x[a:b])])
        own = None if x is out else self._moves(x.size, per_stage, lambda slot, a, b: [(out[a:b], x[a:b])])
        return Plan(x.size, per_stage, (), put=put, get=own)

    def _all_gather(self, o: Operation) -> Plan:
        """all_gather, and gather, where only the root has ``recv``."""
        assert o.send is not None
        x, rank, slots = o.send.flat, self.rank, self.typed(o.send.flat.dtype)
        per_stage = min(self.block, WHOLE_BYTES) // x.itemsize
        put = self._moves(x.size, per_stage, lambda slot, a, b: [(slots[rank][slot][: b - a], x[a:b])])
        if o.recv is None:
            return Plan(x.size, per_stage, (), put=put)
        out = o.recv.flat.reshape(self.size, -1)
        in_place = np.may_share_memory(x, out[rank])

        def get(slot: int, a: int, b: int) -> Pairs:
            theirs = [(out[r, a:b], slots[r][slot][: b - a]) for r in self.peers]
            return theirs if in_place else [(out[rank, a:b], x[a:b]), *theirs]

        rooted = o.root is not None
        get_all = self._moves(x.size, per_stage, get, rooted)
        return Plan(x.size, per_stage, self.peers, put=None if rooted else put, get=get_all)

    _gather = _all_gather

    def _all_to_all(self, o: Operation) -> Plan:
        """all_to_all, and scatter, where only the root has ``send``."""
        assert o.recv is not None
        out, rank, slots = o.recv.flat, self.rank, self.typed(o.recv.flat.dtype)
        sources = range(self.size) if o.root is None else (o.root,)
        count = out.size // len(sources)
        x = o.send.flat.reshape(self.size, -1) if o.send is not None else None
        per_stage = self._per_part(out.itemsize)

        def put(slot: int, a: int, b: int) -> Pairs:
            assert x is not None
            mine = slots[rank][slot]
            return [(mine[(at := self._place(rank, r) * per_stage) : at + b - a], x[r, a:b]) for r in self.peers]

        def get(slot: int, a: int, b: int) -> Pairs:
            ats = [self._place(r, rank) * per_stage for r in sources]
            parts = [
                slots[r][slot][at : at + b - a] if x is None or r != rank else x[rank, a:b]
                for r, at in zip(sources, ats, strict=True)
            ]
            return [(out[i * count + a : i * count + b], part) for i, part in enumerate(parts)]

        return Plan(
            count, per_stage, [r for r in sources if r != rank],
            put=None if x is None else self._moves(count, per_stage, put),
            get=self._moves(count, per_stage, get, o.root is not None),
        )  # fmt: skip

    _scatter = _all_to_all

    def _moves(self, count: int, per_stage: int, pairs: Callable[[int, int, int], Pairs], marks: bool = False) -> Step:
        """Copies the second array of each of the ``pairs`` of a stage to the first.

        Each slot's pairs of an only stage are made once, as bytes, which a memoryview copies in half of NumPy's time.
        ``marks``: then writes to each line that it has read in a slot, where no other rank reads.  Its sender always
        fills the same slots, and writes lines that this core has written in a third of the time.
        """
        if count > per_stage:

            def move(slot: int, a: int, b: int) -> None:
                for to, source in pairs(slot, a, b):
                    to[...] = source
                    for lines in self._lines([source]) if marks else ():
                        lines[...] = 0

            return move
        views: list[list[tuple[memoryview, memoryview]]] = [[] for _ in range(TURNS)]
        marked: list[list[Array]] = [[] for _ in range(TURNS)]

        def move_all(slot: int, a: int, b: int) -> None:
            if not views[slot]:
                each = pairs(slot, a, b)
                views[slot] = [(to.view(np.uint8).data, source.view(np.uint8).data) for to, source in each]
                if marks:
                    marked[slot] = self._lines(source for _, source in each)
            for to, source in views[slot]:
                to[:] = source
            for lines in marked[slot]:
                lines[...] = 0

        return move_all

    def _lines(self, arrays: Iterable[Array]) -> list[Array]:
        """One byte of each cache line of the arrays that are long and lie in a slot."""
        return [
            x.view(np.uint8)[::ALIGN] for x in arrays
            if x.nbytes >= MARKED_BYTES and np.may_share_memory(x, self._data)
        ]  # fmt: skip

    def _barrier(self, o: Operation) -> Plan:
        return Plan(0, 1, ())

    _split = _duplicate = _barrier

    def _place(self, sender: int, receiver: int) -> int:
        """Which part of the sender's slot holds the data for that receiver: in turn, both write the same memory."""
        return (receiver - sender) % self.size

    def _per_part(self, itemsize: int) -> int:
        """Elements of each rank's part of a slot, of whole cache lines where they fit."""
        part = self.block // self.size
        return max(part // ALIGN * ALIGN, itemsize) // itemsize
