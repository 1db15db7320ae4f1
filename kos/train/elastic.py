"""``--elastic``: a run of data-parallel ranks goes on when some of them are lost, leave or join.

Between two steps all ranks hold the same weights. What is to be decided after a loss is only whether the step under way
counts:

1. The last exchange of a step, before its update, has the epoch and the step of every rank (``Step.run``). A rank makes
   the update only if all entries are alike. So if one rank has made it, all ranks had their sums.
2. The next step is not begun before: what an update reads (sums and norm) stays until all have passed that exchange.
3. The ranks that are left agree on the last step that any of them has applied. Who is behind applies it from its own
   sums. If none has applied the step under way, all discard it, and compute it again.
4. With ZeRO-1 the next rank holds each part of the state too (``DataParallel.twice``), with the same updates.
5. Weights and state go to host memory, and everything that depends on the ranks is made again, as at the start of a
   run. Then each rank takes what it now holds, from its own host memory or from a rank that has it.

The loss of a rank meanwhile begins this again. What is in host memory is kept until all ranks have loaded; from then on
a rank that has not heard of it is told so by the others' epoch.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from kos.comm.communicator import Communicator
from kos.errors import CheckpointError, CollectiveError, CollectiveMismatch, Interrupted, plural, ranks_in_words
from kos.memory.array import as_dtype
from kos.train.checkpoint.state import FLOAT32, ShardedState
from kos.train.config.options import TrainConfig
from kos.train.device.base import Device
from kos.train.model.parameters import OwnedSlices, Parameters
from kos.train.parallel.mesh import Mesh
from kos.train.parallel.stopping import Left
from kos.train.tools.console import Console
from kos.train.train import Run, Runner, StepResult


class _Changed(CollectiveError):
    """All ranks are at the boundary of a step, and the group changes."""


class Moving(Run, Protocol):
    """A run whose ranks may change: ``kos.train.run.Trainer``."""

    comm: Communicator
    config: TrainConfig
    mesh: Mesh
    device: Device
    console: Console
    epoch: int
    saved_step: int
    untrained: float | None

    def train(self, device: Runner) -> bool:
        """Train from the current step; returns whether a stop was requested."""

    def drop_save(self) -> None:
        """End the checkpoint that is being written."""

    def finish_save(self) -> None:
        """Wait for the checkpoint that is being written."""

    def move_to(self, comm: Communicator, epoch: int) -> None:
        """Make again what depends on the ranks, which are those of ``comm`` now."""


class Elastic(Runner):
    """The device of ``run``, whatever ranks there are: what the loop of ``train`` drives. Collective."""

    lag = 0

    def __init__(self, run: Moving) -> None:
        self.run, self._began = run, run.step
        """The last step that this rank has begun: all that belongs to those before it is over."""
        self._last: tuple[int, StepResult] | None = None  # the last step that is over, and its result
        self._kept: Kept | None = None  # until all ranks have loaded it

    def train(self) -> bool:
        """As ``Trainer.train``. CheckpointError if a part of the state is lost, CollectiveError if too few are left."""
        while True:
            try:
                return self.run.train(self)
            except CollectiveError as error:
                if not _is_loss(error):
                    raise
                self._recover("left" if isinstance(error, _Changed) else "lost")

    def start_step(self, step: int, wish: int) -> None:
        if self._last is not None and step == self._last[0]:
            return  # it was applied before the ranks changed
        self._began = step
        if self._last is not None and (leaving := self._last[1].leaving):
            self._last = self._last[0], self._last[1]._replace(leaving=())
            if self.run.comm.rank in leaving:
                self.run.comm.abort(Left.code, "it left the run, as asked")
                raise Left(f"left the run after step {step}, as asked")
            raise _Changed("some ranks leave")
        self.run.device.start_step(step, wish)

    def finish_step(self, step: int) -> StepResult:
        if self._last is None or step != self._last[0]:
            self._last = step, self.run.device.finish_step(step)
        return self._last[1]

    def _recover(self, how: str) -> None:
        """Go on with the ranks that are there, as often as some are lost meanwhile."""
        run, since, before = self.run, time.perf_counter(), self.run.comm.world_ranks
        run.drop_save()
        while True:
            try:
                run.comm = run.comm.shrink()
                self._regroup()
                break
            except CollectiveError as error:
                if not _is_loss(error):
                    raise
        gone = ranks_in_words(sorted({*before} - {*run.comm.world_ranks}))
        seconds, left = time.perf_counter() - since, plural(run.comm.size, "rank")
        run.console.say(f"{gone} {how} after step {run.step}: {left} now, {seconds:.2f} s later")
        if run.comm.size < run.config.least_ranks:
            run.save()
            run.finish_save()
            least = plural(run.config.least_ranks, "rank")
            failure = CollectiveError(f"expected at least {least} (--elastic), got {left}")
            failure.on_every_rank = True
            raise failure

    def _regroup(self) -> None:
        """Agree on the last step, and move to the ranks of ``run.comm``."""
        run, comm = self.run, self.run.comm
        if max(_exchange(comm, run.epoch)) > run.epoch:
            self._commit()
        kept = self._kept
        rank, done = (run.mesh.world.rank, run.device.applied) if kept is None else (kept.rank, kept.step)
        if done == self._began + 1 and (self._last is None or self._last[0] != self._began):
            self._last = self._began, run.device.result_of(self._began)
        every = _exchange(comm, {
            "rank": rank, "applied": done, "began": self._began, "last": self._last, "saved": run.saved_step,
            "untrained": run.untrained,
        })  # fmt: skip
        applied = max(each["applied"] for each in every)
        if kept is None:
            if done < applied:
                run.device.apply()
            self._kept = kept = Kept(run.device)
        unfinished = min(each["began"] for each in every) < applied
        if unfinished:  # what belongs to the last step, such as a validation
            number, last = next(each["last"] for each in every if each["last"] and each["last"][0] == applied - 1)
            self._last = number, StepResult(*last)._replace(leaving=())
        run.step = applied - unfinished
        present = [each["rank"] for each in every]
        kept.check(present)
        run.saved_step = max(each["saved"] for each in every)
        run.untrained = next((each["untrained"] for each in every if each["untrained"] is not None), None)
        run.move_to(comm, run.epoch + 1)
        kept.load(run.device, comm, present)
        _exchange(comm, None)
        self._commit()

    def _commit(self) -> None:
        """All ranks have loaded what was kept."""
        self.run.epoch, self._kept = self.run.epoch + 1, None


def _exchange(comm: Communicator, mine: Any) -> list[Any]:
    """Every rank's JSON."""
    return [json.loads(each) for each in comm.all_gather_bytes(json.dumps(mine).encode())]


def _is_loss(error: CollectiveError) -> bool:
    """Whether the ranks that are left can go on: none of them has failed or disagreed."""
    return not error.on_every_rank and not isinstance(error, CollectiveMismatch | Interrupted)


class Kept:
    """The weights and the optimizer's state that a rank of ``device`` holds, in host memory, after ``step`` steps."""

    def __init__(self, device: Device) -> None:
        state, replicas = device.state, device.mesh.replicas
        parallel, self.rank, self.size, self.step = device.step.parallel, replicas.rank, replicas.size, device.applied
        self._shards: list[tuple[slice, int]] | None = None  # and who updates each
        mine = [slice(0, parallel.gradients.flat.size)]
        if parallel.sharded:
            each = [(bucket, rank) for bucket in parallel.buckets for rank in range(self.size)]
            self._shards, mine = [(parallel.part(bucket, rank), rank) for bucket, rank in each], parallel.parts()
        self._values = {
            name: [
                (start, state.ops.to_host(held.flat[at : at + stop - start]).astype(np.float32, copy=False))
                for part in mine for start, stop, at in ShardedState.held(held, part)
            ]
            for name, held in _arrays(device).items()
        }  # fmt: skip

    def check(self, present: Sequence[int]) -> None:
        """CheckpointError if both ranks that hold a part of the state (``twice``) are lost."""
        for rank in range(self.size) if self._shards else ():
            if not {rank, (rank + 1) % self.size} & {*present}:
                expected = f"one of {ranks_in_words([rank, (rank + 1) % self.size])}, which hold a part of the state"
                failure = CheckpointError(f"expected {expected}, got neither")
                failure.on_every_rank = True
                raise failure

    def load(self, device: Device, comm: Communicator, present: Sequence[int]) -> None:
        """Fill another device's weights and state; ``present`` are the ranks of ``comm`` as they were here."""
        state, parallel, optimizer = device.state, device.step.parallel, device.step.optimizer
        largest = max(bucket.stop - bucket.start for bucket in parallel.buckets)
        with state.ops.step(state.arena):
            staging = state.arena.take((largest,), FLOAT32)
            for name, held in _arrays(device).items():
                for piece, holders in self._pieces(held, largest):
                    values = self._value(name, piece)
                    if not {*present} <= holders:
                        root = next(new for new, old in enumerate(present) if old in holders)
                        part = staging[: piece.stop - piece.start]
                        if comm.rank == root:
                            state.ops.copy(values, part)
                        comm.broadcast(part, root)
                        comm.synchronize()
                        values = part
                    for start, stop, at in ShardedState.held(held, piece):
                        mine, out = values[start - piece.start : stop - piece.start], held.flat[at : at + stop - start]
                        if isinstance(mine, np.ndarray):
                            mine = mine.astype(as_dtype(out.dtype).numpy, copy=False)
                        state.ops.copy(mine, out)
        optimizer.step_count = self.step
        device.loaded()

    def _pieces(self, held: Parameters | OwnedSlices, largest: int) -> Iterator[tuple[slice, set[int]]]:
        """What was held, in pieces of at most so many elements, and by which ranks. It ends where ``held`` does."""
        end = max(span.stop for span in held.spans.values())  # what is beyond depends on the number of ranks
        whole = [(part, {*range(self.size)}) for part, _ in held.parts()]
        if self._shards is not None:
            whole = [(part, {rank, (rank + 1) % self.size}) for part, rank in self._shards]
        for part, ranks in whole:
            stop = min(part.stop, end)
            for start in range(part.start, stop, largest):
                yield slice(start, min(start + largest, stop)), ranks

    def _value(self, name: str, piece: slice) -> Any:
        """What this rank has of a piece; None if it has nothing."""
        for start, values in self._values[name]:
            if start <= piece.start < start + len(values):
                return values[piece.start - start : piece.stop - start]
        return None


def _arrays(device: Device) -> dict[str, Parameters | OwnedSlices]:
    """What the optimizer holds, by name; the weights are ``weights``."""
    optimizer = device.step.optimizer
    return {"weights": optimizer.weights, **optimizer.state}
