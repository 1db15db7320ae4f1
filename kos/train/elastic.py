"""``--elastic``: a run of data-parallel ranks goes on when some of them are lost, leave or join.

Between two steps, all ranks hold the same weights. So after a loss, the ranks only have to decide whether the step that
was interrupted counts:

1. The last exchange of a step, before its update, has the epoch and the step of every rank (``Step.run``). A rank makes
   the update only if all entries are equal. So if one rank has made the update, all ranks had their reduced gradients.
2. No rank begins the next step before that. So the reduced gradients and the norm, which an update reads, stay in
   memory until all ranks have passed that exchange.
3. The remaining ranks agree on the last step that any of them has applied. A rank that is behind applies the update
   from the gradients that it stored. If no rank has applied the interrupted step, all discard it and compute it again.
4. With ZeRO-1, the next rank holds each part of the state too (``DataParallel.twice``), and makes the same updates.
5. Weights and state are copied to host memory, and everything that depends on the ranks is made again, as at the start
   of a run. Then each rank loads its part, from its own host memory or from a rank that has it.

If a rank is lost during these steps, they begin again. The copies in host memory are kept until all ranks have loaded
their parts. From then on, a rank that does not know of the change learns of it by the epoch of the others.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np

from kos.comm.communicator import Communicator
from kos.errors import (
    BackendUnavailable,
    CheckpointError,
    CollectiveError,
    CollectiveMismatch,
    ConfigError,
    KosError,
    RendezvousError,
    plural,
    ranks_in_words,
)
from kos.memory.array import as_dtype
from kos.train.checkpoint.state import FLOAT32, ShardedState
from kos.train.config import flag_of, flatten
from kos.train.device import Device
from kos.train.folder import publish_address, take_output
from kos.train.layers.lora import is_adapter
from kos.train.machine import limit_threads
from kos.train.ops.parameters import OwnedSlices, Parameters
from kos.train.parallel.failures import Left, gather_json, on_every_rank
from kos.train.parallel.mesh import Mesh
from kos.train.step import WRITING, StepResult
from kos.train.tools import METRICS, read_metrics
from kos.train.tools.console import Console

JOIN_SECONDS = 30.0
"""How long the ranks wait for newcomers that have called."""

TRIES = 3
"""How often ``shrink`` may fail before this rank aborts: the first failure may only name a stopped rank.
Failures because another rank grows do not count: each rank that learns of a loss late may cause one."""


class _Changed(CollectiveError):
    """All ranks are between two steps; ``leaving`` are the ranks that leave, ``joining`` is the number of newcomers."""

    def __init__(self, message: str = "", leaving: Collection[int] = (), joining: int = 0) -> None:
        super().__init__(message)
        self.leaving, self.joining = {*leaving}, joining


class Elastic:
    """The device of ``run``, whatever ranks there are: what the loop of ``train`` drives. Collective."""

    steps_in_flight = 0

    def __init__(self, run: Any) -> None:
        self.run, self._began = run, run.steps_done if run.epoch >= 0 else 1 << 62
        """The last step that this rank has begun: all that belongs to those before it is over."""
        self._last: tuple[int, StepResult] | None = None  # the last step that is over, and its result
        self._kept: Kept | None = None  # until all ranks have loaded it

    def train(self) -> bool:
        """As ``Trainer.train``. CheckpointError if a part of the state is lost, CollectiveError if too few are left."""
        change: KosError | None = _Changed() if self.run.epoch < 0 else None
        while True:
            if change is not None:
                self._change(change)
            try:
                return self.run.train(self)
            except (CollectiveError, RendezvousError) as error:  # the latter of exchanges of a group of GPUs alone
                if not _is_loss(error):
                    raise
                change = error

    def start_step(self, step: int, wish: int) -> None:
        if self._last is not None and step == self._last[0]:
            return  # it was applied before the ranks changed
        self._began = step
        if self.run.comm.size < self.run.config.least_ranks:
            self._end()
        comm, device, saving = self.run.comm, self.run.device, self.run.saving
        if self._last is not None and ((last := self._last[1]).leaving or last.joining):
            self._last = self._last[0], last._replace(leaving=(), joining=0)
            if saving is None or saving.step < step:  # else all have just begun to write, and report it next
                self._leave_or_join(last, step)
        device.newcomers = comm.newcomers() if comm.size < self.run.config.most_ranks(comm.size) else 0
        if saving is not None and not saving.done:
            device.newcomers = WRITING
        device.start_step(step, wish)

    def _leave_or_join(self, last: StepResult, step: int) -> NoReturn:
        comm = self.run.comm
        self.run.finish_save()  # which is complete
        if comm.rank in last.leaving:
            comm.abort(Left.code, "it left the run, as asked")
            raise Left(f"left the run after step {step}, as asked")
        leaving = [comm.world_ranks[rank] for rank in last.leaving]
        raise _Changed("ranks leave or join", leaving, 0 if leaving else last.joining)

    def finish_step(self, step: int) -> StepResult:
        if self._last is None or step != self._last[0]:
            self._last = step, self.run.device.finish_step(step)
        return self._last[1]

    def _change(self, change: KosError) -> None:
        """Go on with the ranks that are there, and with newcomers; again, if some are lost meanwhile."""
        run, since, planned = self.run, time.perf_counter(), change if isinstance(change, _Changed) else _Changed()
        grows = planned.joining
        size, gone, joins, tries = run.comm.size, set[int](), run.epoch < 0, TRIES
        late, newcomers = size + TRIES, set[int]()
        run.drop_save()
        while True:
            try:
                before = run.comm
                if grows:
                    run.comm, grows = before.grow(grows, timeout=min(JOIN_SECONDS, before.timeout)), 0
                    newcomers = {*run.comm.world_ranks[size:]}
                elif not joins:
                    run.comm = before.shrink()
                    gone |= {*before.world_ranks} - {*run.comm.world_ranks} - newcomers
                joins, tries = False, TRIES
                self._regroup()
                break
            except (CollectiveError, RendezvousError, BackendUnavailable) as error:
                if grows and isinstance(error, RendezvousError | BackendUnavailable):
                    return run.console.say(f"no rank joined: {error}")  # and the group is as it was
                shrinks = isinstance(error, CollectiveMismatch) and run.comm is before  # some knew of a loss first
                late, tries = late - shrinks, tries - (not shrinks)
                if not (shrinks or _is_loss(error)) or not tries or not late:
                    raise
                grows = 0
        self._report(size, gone & planned.leaving, gone - planned.leaving, time.perf_counter() - since)

    def _end(self) -> NoReturn:
        """Save, and raise CollectiveError: too few ranks are left. All that belongs to the last step is over."""
        self.run.save()
        self.run.finish_save()
        least, got = plural(self.run.config.least_ranks, "rank"), self.run.comm.size
        raise on_every_rank(CollectiveError(f"expected at least {least} (--elastic), got {got}"))

    def _report(self, before: int, left: set[int], lost: set[int], seconds: float) -> None:
        """Say how the ranks have changed."""
        now, pairs = self.run.comm.size, ((left, "left"), (lost, "lost"))
        what = [f"{ranks_in_words([*ranks])} {how}" for ranks, how in pairs if ranks]
        if joined := now - (before - len(left | lost)):
            what.append(f"{plural(joined, 'rank')} joined")
        if what:  # else newcomers were refused
            then = f"after step {self.run.steps_done}: {plural(now, 'rank')} now, {seconds:.2f} s later"
            self.run.console.say(f"{' and '.join(what)} {then}")

    def _regroup(self) -> None:
        """Agree on the last step, and move to the ranks of ``run.comm``."""
        run, comm, kept = self.run, self.run.comm, self._kept
        epochs = gather_json(comm, run.epoch)
        if max(epochs) > run.epoch >= 0:
            self._commit()
            kept = None
        every = gather_json(comm, self._facts(newcomers=min(epochs) < 0))
        if all(each["rank"] is None for each in every):
            raise on_every_rank(CollectiveError("expected a rank that has the state of the run, got newcomers alone"))
        if every[0]["logged_epoch"] > max(epochs):  # these ranks were stopped meanwhile
            text = f"expected the run in epoch {max(epochs)}, got {every[0]['logged_epoch']}"
            raise on_every_rank(CollectiveError(f"{text}: other ranks have continued the run without these ranks"))
        applied = max(each["applied"] for each in every)
        if min(epochs) < 0:
            self._check_newcomers(every[0]["run"])
        if run.epoch < 0:
            take_facts(run, every[0]["run"])
            updates = max(each["updates"] for each in every)
            run.epoch, kept = max(epochs), Kept(Layout(*every[0]["layout"]), None, applied, updates, {})
        elif kept is None:
            if run.device.applied < applied:
                run.device.apply()
            kept = Kept.of(run.device)
        self._kept, present = kept, [each["rank"] for each in every]
        unfinished = min(each["began"] for each in every) < applied
        if unfinished:  # what belongs to the last step, such as a validation
            number, last = next(each["last"] for each in every if each["last"] and each["last"][0] == applied - 1)
            self._last = number, StepResult(*last)._replace(leaving=(), joining=0)
        run.steps_done = applied - unfinished
        run.saved_step = max(each["saved"] for each in every)
        run.untrained = next((each["untrained"] for each in every if each["untrained"]), {})
        kept.check(present)
        move_to(run, comm, run.epoch + 1)
        kept.load(run.device, comm, present)
        if run.base is not None:
            run.device.state.read_base(run.base_weights())
        gather_json(comm, None)
        self._commit()

    def _check_newcomers(self, facts: dict[str, Any]) -> None:
        """Raise ConfigError on newcomers that differ from the run.  All ranks report them; the others start again."""
        run, comm = self.run, self.run.comm
        problems = gather_json(comm, misfit(run, facts) if run.epoch < 0 else "")
        if problems[comm.rank]:
            comm.abort(reason="its settings or data are not those of the run")
            raise ConfigError(problems[comm.rank])
        if refused := [*filter(None, problems)]:
            if run.epoch >= 0:
                run.console.say("\n".join(f"a newcomer was refused: {each}" for each in refused))
            raise _Changed("newcomers were refused")

    def _facts(self, newcomers: bool) -> dict[str, Any]:
        """What this rank knows, of JSON's types."""
        run, kept = self.run, self._kept
        if run.epoch < 0:
            none = {"applied": 0, "updates": 0, "last": None, "saved": -1, "untrained": None}
            return {"rank": None, "began": self._began, **none}
        rank, done, updates = (
            (run.mesh.world.rank, run.device.applied, run.device.step.optimizer.updates) if kept is None
            else (kept.rank, kept.step, kept.updates)
        )  # fmt: skip
        if done == self._began + 1 and (self._last is None or self._last[0] != self._began):
            self._last = self._began, run.device.result_of(self._began)
        facts: dict[str, Any] = {"rank": rank, "applied": done, "updates": updates, "began": self._began}
        facts["last"] = self._last
        facts["logged_epoch"] = logged_epoch(run) if run.comm.rank == 0 else 0
        if newcomers and rank is not None:
            facts |= {"run": facts_of(run), "layout": layout_of(run.device) if kept is None else kept.layout}
        return facts | {"saved": run.saved_step, "untrained": run.untrained}

    def _commit(self) -> None:
        """All ranks have loaded what was kept, which is no more needed."""
        self.run.epoch, self._kept = self.run.epoch + 1, None


def _is_loss(error: KosError) -> bool:
    """Whether the ranks that are left can go on: none of them has failed or disagreed."""
    return not error.on_every_rank and not isinstance(error, CollectiveMismatch | BackendUnavailable)


class Layout(NamedTuple):
    """How state lay on ranks: their number, and with ZeRO-1 the parts [start, stop, rank that updates it]."""

    size: int
    shards: Sequence[tuple[int, int, int]] | None


def layout_of(device: Device) -> Layout:
    parallel, size, shards = device.step.parallel, device.mesh.world.size, None
    if parallel.sharded:
        each = [(parallel.part(bucket, rank), rank) for bucket in parallel.buckets for rank in range(size)]
        shards = [(part.start, part.stop, rank) for part, rank in each]
    return Layout(size, shards)


class Kept:
    """The weights and the optimizer's state that a rank held, in host memory, after ``step`` steps and ``updates``.

    ``rank`` is its rank in ``layout``; None: a newcomer, which has nothing. ``values`` are, by name, where each piece
    begins, and the piece.
    """

    def __init__(
        self, layout: Layout, rank: int | None, step: int, updates: int,
        values: Mapping[str, Sequence[tuple[int, np.ndarray]]],
    ) -> None:  # fmt: skip
        self.layout, self.rank, self.step, self.updates, self._values = layout, rank, step, updates, values

    @classmethod
    def of(cls, device: Device) -> Kept:
        """What a device holds."""
        state, parallel = device.state, device.step.parallel
        values = {
            name: [
                (start, state.ops.to_host(held.flat[at : at + stop - start]).astype(np.float32, copy=False))
                for part in (_frozen_parts(state) if held is state.frozen else parallel.parts())
                for start, stop, at in ShardedState.held(held, part)
            ]
            for name, held in _arrays(device).items()
        }  # fmt: skip
        return cls(layout_of(device), device.mesh.world.rank, device.applied, device.step.optimizer.updates, values)

    def check(self, present: Sequence[int | None]) -> None:
        """CheckpointError if both ranks that hold a part of the state (``twice``) are lost."""
        for rank in range(self.layout.size) if self.layout.shards else ():
            if not {rank, (rank + 1) % self.layout.size} & {*present}:
                both = ranks_in_words([rank, (rank + 1) % self.layout.size])
                text = f"expected one of {both}, which hold a part of the state, got neither"
                raise on_every_rank(CheckpointError(text))

    def load(self, device: Device, comm: Communicator, present: Sequence[int | None]) -> None:
        """Fill another device's weights and state; ``present`` are the ranks of ``comm`` as they were here."""
        state, parallel, optimizer = device.state, device.step.parallel, device.step.optimizer
        largest = max(bucket.stop - bucket.start for bucket in parallel.buckets)
        with state.ops.step(state.arena):
            staging = state.arena.take((largest,), FLOAT32)
            for name, held in _arrays(device).items():
                shards, parts = self.layout.shards, [part for part, _ in held.parts()]
                if held is state.frozen:
                    shards, parts = None, _frozen_parts(state)
                elif parallel.sharded:
                    parts = [_whole(held)]
                for piece, holders in self._pieces(parts, shards, _whole(held).stop, largest):
                    values = self._value(name, piece)
                    if not holders.issuperset(present):
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
        optimizer.continue_after(self.step, self.updates)
        device.loaded()

    def _pieces(
        self, parts: Sequence[slice], shards: Sequence[tuple[int, int, int]] | None, end: int, largest: int
    ) -> Iterator[tuple[slice, set[int]]]:
        """Pieces of at most ``largest`` elements, each with the ranks that held it.  The same on all ranks.

        Either every rank held all ``parts``, or two ranks held each of the ``shards``. Elements from ``end`` on are not
        in any piece.
        """
        size = self.layout.size
        whole = [(part, {*range(size)}) for part in parts]
        if shards is not None:
            whole = [(slice(start, stop), {rank, (rank + 1) % size}) for start, stop, rank in shards]
        for part, ranks in whole:
            stop = min(part.stop, end)
            for start in range(part.start, stop, largest):
                yield slice(start, min(start + largest, stop)), ranks

    def _value(self, name: str, piece: slice) -> Any:
        """What this rank has of a piece; None if it has nothing."""
        for start, values in self._values.get(name, ()):
            if start <= piece.start < start + len(values):
                return values[piece.start - start : piece.stop - start]
        return None


def _arrays(device: Device) -> dict[str, Parameters | OwnedSlices]:
    """The state of the optimizer by name, the weights that it trains (``weights``), and all others (``frozen``)."""
    optimizer = device.step.optimizer
    return {"weights": optimizer.weights, "frozen": device.step.frozen, **optimizer.state}


def _frozen_parts(state: ShardedState) -> list[slice]:
    """The parts of the frozen weights that ranks receive from each other.

    With adapters, these are only the frozen adapters, because each rank reads the base model from its files.
    """
    if state.model.lora is None:
        return [_whole(state.frozen)]
    return [span for name, span in state.frozen.spans.items() if is_adapter(name)]


def _whole(held: Parameters | OwnedSlices) -> slice:
    """All tensors of its layout; what is beyond depends on the number of ranks."""
    return slice(0, max((span.stop for span in held.spans.values()), default=0))


# --- what a newcomer must have and takes, and what is made again for other ranks -----------------------

PATHS = {"out", "resume", "init_from", "data", "val_data", "tokenizer", "join"}
"""Settings that may differ between ranks."""

CHOSEN = {"micro_batch_size", "device", "dtype", "grad_dtype", "elastic", "steps", "fit", "hold_out"}
"""Settings that the run has chosen, and a newcomer takes."""

NO_NUMBERS = {
    "preset", "backend", "sample_tokens", "prompt", "temperature", "top_k", "save_every", "keep", "save_async",
    "log_every", "tracker", "recompute", "graph", "check_replicas", "debug", "timeout",
}  # fmt: skip
"""Settings that do not affect results: a newcomer takes them from the run too."""


def facts_of(run: Any) -> dict[str, Any]:
    """What a newcomer is told of the run, of JSON's types."""
    return {
        "settings": run.asked, "chosen": run.config.to_json(), "out": str(run.out), "source": run.source,
        "resumes": run.resumes, "data": run.data_in_words, "packed": run.data.packed, "name": run.name, "row": run.row,
        "start": run.start, "skipped": sorted(run.skipped), "last_finite": run.last_finite,
        "description": run.description, "batches": run.own.state(), "brings": run.brings, "watched": run.watched,
    }  # fmt: skip


def misfit(newcomer: Any, facts: dict[str, Any]) -> str:
    """Why a newcomer's settings or data differ from the run's ``facts``, or ""."""
    mine, theirs = flatten("", newcomer.asked), flatten("", facts["settings"])
    if newcomer.data.packed != facts["packed"]:  # such as that of a run that is older than --fit
        expected, got = ("whole" if packed else "cut" for packed in (facts["packed"], newcomer.data.packed))
        return f"--fit: expected {expected}, which the run has, got {got}; add --fit {expected}"
    if (mine_held := newcomer.config.held_out) != (held := facts["chosen"]["hold_out"]):
        return f"--hold-out: expected {held:g}, which the run has, got {mine_held:g}; add --hold-out {held:g}"
    for name, given in newcomer.brings.items():
        if given != facts["brings"][name]:
            return f"{name}: expected {facts['brings'][name]}, as on the ranks of the run, got {given}"
    mine["data in words"], theirs["data in words"] = newcomer.data_in_words, facts["data"]
    expected = facts["description"].get("base", {}).get("sha256", "")
    if (base := newcomer.base) and expected and expected != base["sha256"]:
        return f"--init-from: expected the base that the run adapts ({expected[:12]}), got another, {base['path']}"
    for name in mine:
        if name not in PATHS | CHOSEN | NO_NUMBERS and mine[name] != theirs.get(name):
            flag = flag_of(name.partition(" ")[0])
            return f"{flag}: expected {theirs.get(name)}, which the run has, got {mine[name]}"
    return ""


def take_facts(newcomer: Any, facts: dict[str, Any]) -> None:
    """Use the settings in ``facts``."""
    newcomer.asked, chosen = facts["settings"], facts["chosen"]
    chosen["tracker"] = tuple(chosen["tracker"])  # JSON has only lists
    newcomer.config = newcomer.config.model_copy(update={name: chosen[name] for name in CHOSEN | NO_NUMBERS})
    newcomer.out, newcomer.skipped = Path(facts["out"]), set(facts["skipped"])
    for name in ("source", "resumes", "name", "row", "start", "last_finite", "description", "watched"):
        setattr(newcomer, name, facts[name])
    if newcomer.brings_batches:
        newcomer.own.load_state(["all", [facts["batches"]]], 0, 1)
    newcomer.console = Console(newcomer.comm.rank if newcomer.verbose else -1, newcomer.config.steps)


def move_to(run: Any, comm: Communicator, epoch: int) -> None:
    """Make again what depends on the ranks, which are those of ``comm`` now; weights come later. Collective."""
    if hasattr(run, "device"):  # else a rank was lost while it was made
        run.device.close(failed=True)
        del run.device
        if run.config.device == "cuda":  # whose memory is too small for two
            gc.collect()
    before, run.config = run.config, run.config.for_world(comm.size, run.config.device)
    if run.config.grad_dtype != before.grad_dtype:
        run.console.say(f"gradients are {run.config.grad_dtype} from now on: ranks add up several micro-batches")
    run.mesh = Mesh(comm)
    limit_threads(comm, 1 if run.config.deterministic else None)
    if comm.rank == 0:
        publish_address(run)
        if run.metrics is None:
            take_output(run)
    run.make_device()
    run.device.epoch = epoch


def logged_epoch(run: Any) -> int:
    """The epoch of the last step in metrics.jsonl if this run has trained it, else 0."""
    rows = read_metrics(run.out / METRICS, last=1 << 16)
    return int(rows[-1].get("epoch", 0)) if rows and rows[-1]["step"] > run.start else 0
