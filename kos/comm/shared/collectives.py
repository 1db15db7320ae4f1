"""Collectives of the ranks of one host through their segment, in stages of a slot each.

A stage has up to three steps, and every rank a word that counts each of them.  PUT: it has copied what
others need to its slot.  REDUCED: it has reduced its own part of all ranks' slots to the result slot.  GOT:
it has copied what it wants, and reads nothing more of this stage.  A slot is filled again when every rank
has got what it wanted of the stage DEPTH before.  So data crosses the memory bus once each way and all
else stays in the caches (Jain et al., "Framework for Scalable Intra-Node Collective Operations using Shared
Memory", SC 2018).

Contributions are added in rank order, each element by one rank: the bits are the same on all ranks, and
those of ``deterministic=True`` on every backend.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kos.comm.operation import Operation
from kos.comm.reduction import Reduction
from kos.comm.shared.calls import Calls, Wait
from kos.comm.shared.segment import BLOCK, DEPTH, GOT, PUT, REDUCED
from kos.comm.work import Steps

Array = np.ndarray[Any, Any]
Came = Callable[[], bool]
Step = Callable[[int, int, int], None]  # slot, first element, end

ONE_SHOT_BYTES = 8 * 1024
"""Up to so many bytes every rank reduces everything itself: one wait less."""
_ALIGN = 64
"""Bytes: ranks write to cache lines of their own."""


class SharedCollectives:
    """Carries whole operations, from the user's input to the user's output."""

    def __init__(self, calls: Calls, spins: int) -> None:
        segment = calls.segment
        self._calls, self._words, self._data = calls, segment.words, segment.data
        self.rank, self.size = segment.rank, segment.size
        self._lines = [segment.layout.line(rank) for rank in range(self.size)]
        self._mine = self._lines[self.rank]
        self._peers = [rank for rank in range(self.size) if rank != self.rank]
        self._spins = spins
        self._slots: dict[np.dtype[Any], list[list[Array]]] = {}
        self._scratch = np.empty(0, np.uint8)
        self._issued = self._served = 0  # operations that asked for the slots, that are done with them
        self._stage = 0

    def start(self, o: Operation, came: Came) -> Steps | None:
        """The steps of ``o``; None if it is not carried here.  ``came`` polls whether every rank has begun it."""
        carry = _CARRIERS.get(o.name)
        if carry is None or o.algorithm != "auto":
            return None
        return self._in_turn(o, came, carry)

    def behind(self) -> list[int]:
        """The ranks that have done less than this one of the operation that has the slots."""
        words, lines = self._words, self._lines
        mine = [words[self._mine + word] for word in (PUT, REDUCED, GOT)]
        return [
            self._calls.segment.ranks[rank]
            for rank in self._peers
            if any(words[lines[rank] + word] < done for word, done in zip((PUT, REDUCED, GOT), mine, strict=True))
        ]

    def _in_turn(self, o: Operation, came: Came, carry: Carrier) -> Steps:
        """Operations use the slots one after another, in the order of their launch, equal on all ranks."""
        turn, self._issued = self._issued, self._issued + 1
        while self._served != turn:
            came()
            yield
        yield from carry(self, o, came)
        self._served += 1

    def _run(
        self,
        o: Operation,
        came: Came,
        count: int,
        per_stage: int,
        *,
        put: Step | None = None,
        reduce: Step | None = None,
        get: Step | None = None,
        sources: Sequence[int],
    ) -> Steps:
        """Go through ``count`` elements; ``sources`` are the ranks whose slots this rank reads."""
        words, mine, first = self._words, self._mine, self._stage
        wait = Wait(self._calls, o)
        stages = -(-count // per_stage)
        self._stage += stages
        filled = 0 if put is not None else stages
        for i in range(max(stages, 1)):
            stage = first + i
            while put is not None and filled < min(stages, i + DEPTH):
                free = first + filled + 1 - DEPTH
                if filled == i:
                    yield from self._until(GOT, free, self._peers, wait)
                elif any(words[self._lines[rank] + GOT] < free for rank in self._peers):
                    break  # no need to wait for it yet
                put((first + filled) % DEPTH, filled * per_stage, min((filled + 1) * per_stage, count))
                filled += 1
                words[mine + PUT] = first + filled
            if i == 0:
                # One's own slot may be filled before, the others' are read once all calls agree.
                spins = self._spins
                while not came():
                    spins -= 1
                    if spins < 0:
                        yield
                if not count:
                    return
            slot, start, end = stage % DEPTH, i * per_stage, min((i + 1) * per_stage, count)
            yield from self._until(PUT, stage + 1, sources, wait)
            if reduce is not None:
                reduce(slot, start, end)
                words[mine + REDUCED] = stage + 1
                yield from self._until(REDUCED, stage + 1, self._peers, wait)
            if get is not None:
                get(slot, start, end)
            words[mine + GOT] = stage + 1

    def _until(self, word: int, value: int, ranks: Sequence[int], wait: Wait) -> Steps:
        """Wait until that word of those ranks has reached ``value``."""
        words, lines = self._words, self._lines
        for rank in ranks:
            at, spins = lines[rank] + word, self._spins
            while words[at] < value:
                spins -= 1
                if spins < 0:
                    wait.look(rank)
                    yield

    def _typed(self, dtype: np.dtype[Any]) -> list[list[Array]]:
        """The slots as arrays of ``dtype``: by rank, the result slots last, and by stage % DEPTH."""
        slots = self._slots.get(dtype)
        if slots is None:
            typed = self._data.view(dtype).reshape(self.size + 1, DEPTH, BLOCK // dtype.itemsize)
            slots = self._slots[dtype] = [list(slots) for slots in typed]
        return slots

    def _accumulator(self, reduction: Reduction, result: Array) -> Array:
        """Where the carrier values of ``result`` are added up: there, if it has their type."""
        if result.dtype == reduction.carrier:
            return result
        if self._scratch.size < BLOCK:
            self._scratch = np.empty(BLOCK, np.uint8)
        return self._scratch.view(reduction.carrier)[: result.size]

    def _sum(self, reduction: Reduction, contributions: list[Array], result: Array) -> None:
        """Reduce contributions, in rank order, and finish the reduction, into ``result``."""
        total = self._accumulator(reduction, result)
        reduction.combine(contributions[0], contributions[1], total)
        for contribution in contributions[2:]:
            reduction.combine(total, contribution)
        reduction.finish(total, result)

    # The operations.

    def _all_reduce(self, o: Operation, came: Came) -> Steps:
        assert o.send is not None and o.reduction is not None
        x, reduction, rank = o.send.flat, o.reduction, self.rank
        out = (o.recv or o.send).flat if o.root is None or o.root == self._calls.segment.ranks[rank] else None
        itemsize, plain = reduction.carrier.itemsize, reduction.is_plain
        slots, results = self._typed(reduction.carrier), self._typed(reduction.dtype.numpy)[self.size]

        def put_all(slot: int, a: int, b: int) -> None:
            reduction.stage(x[a:b], slots[rank][slot][: b - a])

        def get_all(slot: int, a: int, b: int) -> None:
            if out is not None:
                self._sum(reduction, [slots[r][slot][: b - a] for r in range(self.size)], out[a:b])

        if x.size * itemsize <= ONE_SHOT_BYTES:
            yield from self._run(
                o, came, x.size, BLOCK // itemsize, put=put_all, get=get_all, sources=self._peers
            )
            return

        def part(length: int) -> tuple[int, int]:
            step = -(-length * itemsize // (self.size * _ALIGN)) * _ALIGN // itemsize
            return min(rank * step, length), min((rank + 1) * step, length)

        def put(slot: int, a: int, b: int) -> None:
            if not plain:
                put_all(slot, a, b)
                return
            mine, (first, end) = slots[rank][slot], part(b - a)
            mine[:first] = x[a : a + first]
            mine[end : b - a] = x[a + end : b]

        def reduce(slot: int, a: int, b: int) -> None:
            first, end = part(b - a)
            contributions = [slots[r][slot][first:end] for r in range(self.size)]
            if plain:
                contributions[rank] = x[a + first : a + end]
            self._sum(reduction, contributions, results[slot][first:end])

        def get(slot: int, a: int, b: int) -> None:
            if out is not None:
                out[a:b] = results[slot][: b - a]

        yield from self._run(
            o, came, x.size, BLOCK // itemsize, put=put, reduce=reduce, get=get, sources=self._peers
        )

    def _reduce_scatter(self, o: Operation, came: Came) -> Steps:
        assert o.send is not None and o.recv is not None and o.reduction is not None
        x, out, reduction, rank = o.send.flat, o.recv.flat, o.reduction, self.rank
        count, slots = out.size, self._typed(reduction.carrier)
        per_stage = _per_part(self.size, reduction.carrier.itemsize)
        plain = reduction.is_plain and not np.may_share_memory(x, out)

        def put(slot: int, a: int, b: int) -> None:
            for r in self._peers if plain else range(self.size):
                at = r * per_stage
                reduction.stage(x[r * count + a : r * count + b], slots[rank][slot][at : at + b - a])

        def get(slot: int, a: int, b: int) -> None:
            at = rank * per_stage
            contributions = [slots[r][slot][at : at + b - a] for r in range(self.size)]
            if plain:
                contributions[rank] = x[rank * count + a : rank * count + b]
            self._sum(reduction, contributions, out[a:b])

        yield from self._run(o, came, count, per_stage, put=put, get=get, sources=self._peers)

    def _broadcast(self, o: Operation, came: Came) -> Steps:
        assert o.send is not None and o.recv is not None
        x, out, root = o.send.flat, o.recv.flat, self._root(o)
        slots = self._typed(x.dtype)[root]

        def put(slot: int, a: int, b: int) -> None:
            slots[slot][: b - a] = x[a:b]
            if x is not out:
                out[a:b] = x[a:b]

        def get(slot: int, a: int, b: int) -> None:
            out[a:b] = slots[slot][: b - a]

        per_stage = BLOCK // x.itemsize
        if self.rank == root:
            yield from self._run(o, came, x.size, per_stage, put=put, sources=())
        else:
            yield from self._run(o, came, x.size, per_stage, get=get, sources=(root,))

    def _all_gather(self, o: Operation, came: Came) -> Steps:
        """all_gather, and gather where ``recv`` is the root's alone."""
        assert o.send is not None
        x, rank, slots = o.send.flat, self.rank, self._typed(o.send.flat.dtype)
        out = o.recv.flat.reshape(self.size, -1) if o.recv is not None else None

        def put(slot: int, a: int, b: int) -> None:
            slots[rank][slot][: b - a] = x[a:b]

        def get(slot: int, a: int, b: int) -> None:
            assert out is not None
            out[rank, a:b] = x[a:b]
            for r in self._peers:
                out[r, a:b] = slots[r][slot][: b - a]

        per_stage = BLOCK // x.itemsize
        if out is None:
            yield from self._run(o, came, x.size, per_stage, put=put, sources=())
        else:
            yield from self._run(o, came, x.size, per_stage, put=put, get=get, sources=self._peers)

    def _all_to_all(self, o: Operation, came: Came) -> Steps:
        """all_to_all, and scatter where ``send`` is the root's alone."""
        assert o.recv is not None
        out, rank, slots = o.recv.flat, self.rank, self._typed(o.recv.flat.dtype)
        sources = range(self.size) if o.root is None else (self._root(o),)
        count = out.size // len(sources)
        x = o.send.flat.reshape(self.size, -1) if o.send is not None else None
        per_stage = _per_part(self.size, out.itemsize)

        def put(slot: int, a: int, b: int) -> None:
            assert x is not None
            for r in self._peers:
                slots[rank][slot][r * per_stage : r * per_stage + b - a] = x[r, a:b]

        def get(slot: int, a: int, b: int) -> None:
            at = rank * per_stage
            for i, r in enumerate(sources):
                theirs = slots[r][slot][at : at + b - a] if x is None or r != rank else x[rank, a:b]
                out[i * count + a : i * count + b] = theirs

        peers = [r for r in sources if r != rank]
        yield from self._run(
            o, came, count, per_stage, put=put if x is not None else None, get=get, sources=peers
        )

    def _barrier(self, o: Operation, came: Came) -> Steps:
        yield from self._run(o, came, 0, 1, sources=())

    def _root(self, o: Operation) -> int:
        assert o.root is not None
        return self._calls.segment.ranks.index(o.root)


def _per_part(size: int, itemsize: int) -> int:
    """Elements of each of ``size`` parts of a slot, of whole cache lines where they fit."""
    part = BLOCK // size
    return max(part // _ALIGN * _ALIGN, itemsize) // itemsize


Carrier = Callable[[SharedCollectives, Operation, Came], Steps]

_CARRIERS: dict[str, Carrier] = {
    "all_reduce": SharedCollectives._all_reduce,
    "reduce": SharedCollectives._all_reduce,
    "reduce_scatter": SharedCollectives._reduce_scatter,
    "broadcast": SharedCollectives._broadcast,
    "all_gather": SharedCollectives._all_gather,
    "gather": SharedCollectives._all_gather,
    "all_to_all": SharedCollectives._all_to_all,
    "scatter": SharedCollectives._all_to_all,
    "barrier": SharedCollectives._barrier,
}
