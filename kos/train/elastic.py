"""``--elastic``: a run of data-parallel ranks goes on when some of them are lost, leave or join.

Between two steps, all ranks hold the same weights. So after a loss, the ranks only have to decide whether the step that
was interrupted counts:

1. The last exchange of a step, before its update, has the epoch and the step of every rank (``Step.run``). A rank makes
   the update only if all entries are equal. So if one rank has made the update, all ranks had their reduced gradients.
2. No rank begins the next step before that. So the reduced gradients and the norm, which an update reads, stay in
   memory until all ranks have passed that exchange.
3. The remaining ranks agree on the last step that any of them has applied. A rank that is behind applies the update
   from the gradients that it stored. If no rank has applied the interrupted step, all discard it and compute it again.
4. With ZeRO-1, the next rank holds each part of the state too (``Buckets.mirrored_shards``), and makes the same
   updates.
5. Weights and state are copied to host memory, and everything that depends on the ranks is made again, as at the start
   of a run. Then each rank loads its part, from its own host memory or from a rank that has it.

If a rank is lost during these steps, they begin again. The copies in host memory are kept until all ranks have loaded
their parts. From then on, a rank that does not know of the change learns of it by the epoch of the others.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any, NoReturn

from kos.comm.communicator import Communicator
from kos.errors import (
    BackendUnavailable,
    CollectiveError,
    CollectiveMismatch,
    ConfigError,
    KosError,
    RendezvousError,
    plural,
    ranks_in_words,
)
from kos.train.checkpoint.state import HostState
from kos.train.config import flag_of, flatten
from kos.train.folder import publish_address, take_output
from kos.train.machine import limit_threads
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
        self._kept: HostState | None = None  # until all ranks have loaded it

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

    def start_step(self, step: int, stop_request: int) -> None:
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
        device.start_step(step, stop_request)

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
                self._regroup(gone)
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

    def _regroup(self, gone: Collection[int]) -> None:
        """Agree on the last step, and move to the ranks of ``run.comm``. Errors name those that are ``gone``."""
        run, comm, kept = self.run, self.run.comm, self._kept
        epochs = gather_json(comm, run.epoch)
        if max(epochs) > run.epoch >= 0:
            self._commit()
            kept = None
        every = gather_json(comm, self._facts(newcomers=min(epochs) < 0))
        if not any(each["holds"] for each in every):
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
            run.epoch, kept = max(epochs), HostState(applied, updates, {})
        elif kept is None:
            if run.device.applied < applied:
                run.device.apply()
            kept = run.device.state.to_host(run.device.applied)
        self._kept = kept
        unfinished = min(each["began"] for each in every) < applied
        if unfinished:  # what belongs to the last step, such as a validation
            number, last = next(each["last"] for each in every if each["last"] and each["last"][0] == applied - 1)
            self._last = number, StepResult(*last)._replace(leaving=(), joining=0)
        run.steps_done = applied - unfinished
        run.saved_step = max(each["saved"] for each in every)
        run.untrained = next((each["untrained"] for each in every if each["untrained"]), {})
        move_to(run, comm, run.epoch + 1)
        run.device.state.load(kept, comm, [each["holds"] for each in every], gone)
        run.device.loaded()
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
            return {"holds": {}, "began": self._began, **none}
        if kept is None:
            done, updates, holds = run.device.applied, run.device.step.optimizer.updates, run.device.state.holds
        else:
            done, updates, holds = kept.step, kept.updates, kept.holds
        if done == self._began + 1 and (self._last is None or self._last[0] != self._began):
            self._last = self._began, run.device.result_of(self._began)
        facts: dict[str, Any] = {"holds": holds, "applied": done, "updates": updates, "began": self._began}
        facts["last"] = self._last
        facts["logged_epoch"] = logged_epoch(run) if run.comm.rank == 0 else 0
        if newcomers and holds:
            facts["run"] = facts_of(run)
        return facts | {"saved": run.saved_step, "untrained": run.untrained}

    def _commit(self) -> None:
        """All ranks have loaded what was kept, which is no more needed."""
        self.run.epoch, self._kept = self.run.epoch + 1, None


def _is_loss(error: KosError) -> bool:
    """Whether the ranks that are left can go on: none of them has failed or disagreed."""
    return not error.on_every_rank and not isinstance(error, CollectiveMismatch | BackendUnavailable)


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
        "settings": run.options, "chosen": run.config.to_json(), "out": str(run.out), "source": run.source,
        "resumes": run.resumes, "data": run.data_in_words, "packed": run.data.packed, "name": run.name, "row": run.row,
        "start": run.start, "skipped": sorted(run.skipped), "last_finite": run.last_finite,
        "description": run.description, "batches": run.own.state(), "custom": run.custom, "watched": run.watched,
    }  # fmt: skip


def misfit(newcomer: Any, facts: dict[str, Any]) -> str:
    """Why a newcomer's settings or data differ from the run's ``facts``, or ""."""
    mine, theirs = flatten("", newcomer.options), flatten("", facts["settings"])
    if newcomer.data.packed != facts["packed"]:  # such as that of a run that is older than --fit
        expected, got = ("whole" if packed else "cut" for packed in (facts["packed"], newcomer.data.packed))
        return f"--fit: expected {expected}, which the run has, got {got}; add --fit {expected}"
    if (mine_held := newcomer.config.held_out) != (held := facts["chosen"]["hold_out"]):
        return f"--hold-out: expected {held:g}, which the run has, got {mine_held:g}; add --hold-out {held:g}"
    for name, given in newcomer.custom.items():
        if given != facts["custom"][name]:
            return f"{name}: expected {facts['custom'][name]}, as on the ranks of the run, got {given}"
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
    newcomer.options, chosen = facts["settings"], facts["chosen"]
    chosen["tracker"] = tuple(chosen["tracker"])  # JSON has only lists
    newcomer.config = newcomer.config.model_copy(update={name: chosen[name] for name in CHOSEN | NO_NUMBERS})
    newcomer.out, newcomer.skipped = Path(facts["out"]), set(facts["skipped"])
    for name in ("source", "resumes", "name", "row", "start", "last_finite", "description", "watched"):
        setattr(newcomer, name, facts[name])
    if newcomer.custom_batches:
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
