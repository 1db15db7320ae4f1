"""A run: its folder, where it begins, its checkpoints and metrics, and how it ends. ``kos.train.train`` has the loop.

The batch of a step is a pure function of (seed, step). The checkpoint has everything else that a step depends on, so a
resumed run continues bit for bit.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import shutil
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

from kos.comm.communicator import Communicator
from kos.errors import (
    CheckpointError,
    CollectiveError,
    CompileError,
    ConfigError,
    CudaError,
    DataError,
    KosError,
    OutOfMemory,
    RendezvousError,
    TrainingError,
    plural,
)
from kos.files import replace_file
from kos.train.checkpoint import checkpoint, compatibility, huggingface
from kos.train.checkpoint.extra_files import Extra, dropout, extra_names, read_extra, read_tokenizer_settings
from kos.train.checkpoint.residuals import Residuals, saved_residuals, warn_of_residuals
from kos.train.checkpoint.saving import Saving, write_json
from kos.train.checkpoint.write_plan import state_shapes
from kos.train.config.options import TrainConfig
from kos.train.data.batches import Dataset, load_data
from kos.train.data.tokenizers import HuggingFaceTokenizer
from kos.train.device.choose import choose_device, layout_of, make_device
from kos.train.device.machine import limit_threads, provenance
from kos.train.elastic import Elastic
from kos.train.model.generate import sample_text
from kos.train.parallel.failures import alone, raised_on_every_rank, same_on_all, stop_together, together
from kos.train.parallel.mesh import Mesh
from kos.train.parallel.stopping import Stop, Stopped
from kos.train.tools import commands, trackers
from kos.train.tools.console import Console, duration
from kos.train.tools.folders import check_folder, check_shared, check_unlocked, lock_folder, run_folder, unwritable
from kos.train.tools.metrics import METRICS, MetricsLog, read_metrics
from kos.train.tools.profile import Profiler, TimedCommunicator, profile_steps
from kos.train.train import Runner, StepResult, train

PATHS = {"out", "resume", "init_from", "data", "val_data", "tokenizer", "join"}
"""Settings that may differ between ranks."""

ADDRESS = "address"
"""The file in the folder of an elastic run with the address for ``--join``."""

LEAVES = "this rank leaves after"

MOST_NOT_FINITE = 20
"""Steps in a row without a finite gradient that end a run: none of them has changed the weights, none after would."""


class Trainer:
    """A training run of ``config`` on the ranks of ``comm``. Everything up to the first step is in here."""

    def __init__(self, config: TrainConfig, comm: Communicator, stop: Stop | None = None) -> None:
        self.prepare(config, stop)
        self.comm = comm
        same_on_all(comm, {name: value for name, value in self._asked.items() if name not in PATHS})
        world: Any = TimedCommunicator(comm, self.profiler) if config.profile else comm
        with raised_on_every_rank():
            layout = layout_of(config, comm.size)
        self.mesh, kind = Mesh(world, layout), choose_device(config.device, comm)
        with raised_on_every_rank():
            self.config = config = config.for_world(layout.dp, kind)
            config.check_ranks(comm.size)
        limit_threads(comm, 1 if config.deterministic else None)
        self.console = Console(comm.rank, config.steps)
        self.stop.announce(lambda text: self.console.warn(text))
        if config.elastic is not None:
            self.stop.leaves, self.stop.plan = True, f"{LEAVES} the first step, or the run stops before it (Ctrl-C)"
        self.out = Path(alone(comm, lambda: str(run_folder(config))))
        together(comm, lambda: check_folder(self.out, comm.rank))
        try:
            self.source, self.start, self.saved_step, self._resumes = alone(comm, self._find_source)
            self.data = self._load_data()
            if config.epochs is not None:
                self._asked["steps"] = self.console.steps = steps = config.epochs * self.data.steps_per_epoch
                self.config = config = config.model_copy(update={"steps": steps})
            self._trains = self.start < config.steps and not config.profile
            same_on_all(comm, {"data": self.data_in_words})
            with raised_on_every_rank():
                self.model_config = config.model_config_for(self.data.tokenizer.vocab_size)
            alone(comm, self._check_source)
            self.device = make_device(config, self.model_config, self.data, self.mesh, self.console.progress)
            self.device.check_stop(lambda: self.stop.wish)
            self._held.push(self._close_groups)
            self._held.callback(self.console.close)
            self._announce()
            self._load()
            self.step = self.start
            self.metrics: MetricsLog | None = together(comm, self._open_output)
            self.name = check_shared(self.out, comm)
        except BaseException:
            self.console.close()
            if config.out is None and comm.rank == 0:
                with contextlib.suppress(OSError):
                    self.out.rmdir()  # of runs/, if nothing is in there
            raise

    def prepare(self, config: TrainConfig, stop: Stop | None) -> None:
        """What a run has before it knows its ranks."""
        self.config = config
        self.stop: Stop = stop or Stop()
        self._asked: dict[str, Any] = config.to_json()
        self.profiler: Profiler = Profiler()
        self.metrics = None  # on rank 0, as what follows
        self._extra: Extra = {}
        self._found: checkpoint.Checkpoint | None = None
        self.skipped: set[int] = set()  # steps left out, of those of this run
        self.last_finite: int | None = None  # the last step whose gradients were finite
        self.row: dict[str, Any] | None = None  # the last that was written
        self.epoch = 0
        """How often the ranks have changed (``--elastic``); -1: this rank has not joined them."""
        self.untrained: float | None = None  # validation loss before training
        self.saving: Saving | None = None
        self._held: contextlib.ExitStack = contextlib.ExitStack()  # what the end of the run closes
        self._held.callback(self._cancel_save)

    @property
    def checkpoints(self) -> Path:
        return self.out / "checkpoints"

    @property
    def data_in_words(self) -> str:
        return f"{self.data.name} ({self.data.fingerprint[:12]})"

    def _load_data(self) -> Dataset:
        """Read the data.  One rank of each machine prepares it, and the others read the result."""
        first = self.comm.local_rank == 0
        initialized = self._resumes and self.config.init_from is not None
        weights = self.source if initialized else None  # the checkpoint: the folder of ``init_from`` may be gone

        @self.stop.at_once()
        def load() -> Dataset:
            return load_data(self.config, self.console.progress, weights)

        try:
            data = together(self.comm, lambda: load() if first else None)
        finally:
            self.console.close()
        return together(self.comm, lambda: data or load())

    def _find_source(self) -> tuple[str | None, int, int, bool]:
        """Where a checkpoint or a Hugging Face folder to begin from is, its step, this if it is ours, and which.

        What can be refused before there are data is refused here.
        """
        config = self.config
        check_unlocked(self.out)
        trackers.check(config.tracker)
        if config.resume == "auto":
            self._found = checkpoint.latest(self.checkpoints, show=self.console.progress)
            if self._found is None:
                self.console.say(f"no checkpoint in {self.checkpoints}: starting a new run")
        elif config.resume is not None:
            try:
                self._found = checkpoint.find(Path(config.resume), show=self.console.progress)
            except CheckpointError as error:
                raise CheckpointError(f"--resume: {error}") from error
        if self._found is None:
            self._check_free(start=0, saved_step=-1)
            if config.init_from is not None:
                huggingface.check_weights(Path(config.init_from))
            return config.init_from, 0, -1, False
        path, step, _ = self._found
        saved_step = step if path.parent.resolve() == self.checkpoints.resolve() else -1
        self._check_free(step, saved_step)
        compatibility.check_optimizer(self._found, config)
        theirs = huggingface.read_config(path)
        compatibility.check_model(path, theirs, config.model.resolve(theirs.vocab_size, config.seq_len))
        return str(path), step, saved_step, True

    def _check_free(self, start: int, saved_step: int) -> None:
        """ConfigError if ``out`` holds another run than the one that continues from ``start``."""
        left = ["checkpoints"] * bool(checkpoint.steps_in(self.checkpoints))
        left += ["metrics"] * bool(start and read_metrics(self.out / METRICS))
        if left and saved_step < 0:
            expected = "expected an empty folder, or --resume auto to continue from the checkpoints in it"
            raise ConfigError(f"--out {self.out}: {expected}, got the {left[0]} of another run")

    def _load(self) -> None:
        """Give the device its weights: of the ``source`` each rank reads its part; or all draw them together."""

        @self.stop.at_once()
        def begin() -> None:
            if self.source is None:
                return self.device.draw_weights()
            path, model = Path(self.source), self.model_config
            shapes, kept = model.parameter_shapes(), self.config.state_of(model)
            if not path.is_dir():
                got = f"got none on rank {self.comm.rank}"
                raise CheckpointError(f"{path}: expected a folder that all ranks see, {got}")
            state = checkpoint.state_files(path, shapes, kept) if self._resumes else None
            residual = self._residuals(path) if self._resumes else None
            self.device.read(huggingface.weight_files(path, shapes), state, self.start, residual)

        together(self.comm, begin)
        self.console.close()

    def _residuals(self, path: Path) -> Residuals | None:
        """What this rank gets of the residuals in a checkpoint."""
        replicas, shapes = self.mesh.replicas, self.model_config.parameter_shapes()
        return saved_residuals(path, shapes, self.config, replicas.rank, replicas.size)

    def _check_source(self) -> None:
        """Check that the weights fit the run, and read the files that checkpoints keep."""
        self._read_extra()
        if self.source is None:
            return
        source = Path(self.source)
        compatibility.check_tokenizer(source, self.data.tokenizer)
        if self._found is not None:
            compatibility.warn_of_changes(self._found, self.config, self.description)
        compatibility.check_model(source, huggingface.read_config(source), self.model_config)
        if self._found is not None:
            warn_of_residuals(source, self._residuals(source), self.config, self.mesh.replicas.size)

    def _read_extra(self) -> None:
        """The files that checkpoints keep of the source and of the tokenizer."""
        if self.data.tokenizer.kind == HuggingFaceTokenizer.kind and self.config.tokenizer != "auto":
            self._extra = read_tokenizer_settings(self.config.tokenizer)
        if self.source is not None:
            self._extra = {**self._extra, **read_extra(Path(self.source))}

    def facts(self) -> dict[str, Any]:
        """What a newcomer is told of the run (``kos.train.joining``), of JSON's types."""
        return {
            "settings": self._asked, "chosen": self.config.to_json(), "out": str(self.out), "source": self.source,
            "data": self.data_in_words, "name": self.name, "row": self.row,
            "start": self.start, "skipped": sorted(self.skipped), "last_finite": self.last_finite,
            "description": self.description,
        }  # fmt: skip

    def misfit(self, facts: dict[str, Any]) -> str:
        """On a newcomer, why its settings or data differ from the run's ``facts``, or ""."""
        raise NotImplementedError

    def take(self, facts: dict[str, Any]) -> None:
        """On a newcomer, use the settings in ``facts``."""
        raise NotImplementedError

    def logged_epoch(self) -> int:
        """The epoch of the last step in metrics.jsonl if this run has trained it, else 0."""
        rows = read_metrics(self.out / METRICS, last=1 << 16)
        return int(rows[-1].get("epoch", 0)) if rows and rows[-1]["step"] > self.start else 0

    def move_to(self, comm: Communicator, epoch: int) -> None:
        """Make again what depends on the ranks, which are those of ``comm`` now; weights come later. Collective."""
        if hasattr(self, "device"):  # else a rank was lost while it was made
            self.device.close(failed=True)
            del self.device
            if self.config.device == "cuda":  # whose memory is too small for two
                gc.collect()
        self.config = self.config.for_world(comm.size, self.config.device)
        self.mesh = Mesh(comm)
        limit_threads(comm, 1 if self.config.deterministic else None)
        if comm.rank == 0:
            self._publish_address()
            if self.metrics is None:
                self._take_output()
        self.device = make_device(self.config, self.model_config, self.data, self.mesh, self.console.progress)
        self.device.epoch = epoch
        self.device.check_stop(lambda: self.stop.wish)

    def _open_output(self) -> MetricsLog | None:
        if self.comm.rank != 0:
            return None
        config = self.config
        try:
            self._check_free(self.start, self.saved_step)  # a run may have ended here since ``_find_source``
            self.out.mkdir(parents=True, exist_ok=True)
            lock_folder(self.out, self._held)
            checkpoint.remove_unfinished(self.checkpoints)
            shapes = self.model_config.parameter_shapes()
            files = [*shapes.values(), *state_shapes(config.state_of(self.model_config), shapes).values()]
            if self.device.step.parallel.residual is not None:
                files += [*shapes.values()] * self.mesh.replicas.size
            needed = sum(4 * math.prod(shape) for shape in files)
            if self._trains and (free := shutil.disk_usage(self.out).free) < needed:
                self.console.say(f"the first checkpoint does not fit: {self.out} has {free:,} bytes free of {needed:,}")
            if self._trains or not (self.out / "config.json").exists():
                write_json(self.out / "config.json", self.description)
            if config.profile:
                return None
            if config.elastic is not None:
                self._publish_address()
            metrics = MetricsLog(self.out / METRICS, self.start)
            self._held.callback(metrics.close)
            self._trackers = trackers.start(config.tracker, self.out, self.start, self.description)
            self._held.push(self._close_trackers)
            return metrics
        except OSError as error:
            raise unwritable(self.out, error) from error

    def _take_output(self) -> None:
        """Write metrics and checkpoints instead of the rank that was the first; its last row may be missing."""
        self.console = Console(0, self.config.steps)
        with contextlib.suppress(ConfigError):  # it may be stopped, and hold the lock
            lock_folder(self.out, self._held, self.name)
        row, self.row = self.row, None
        done = self.start if row is None else row["step"] - 1
        self.metrics = MetricsLog(self.out / METRICS, done)
        self._held.callback(self.metrics.close)
        self._trackers = trackers.start(self.config.tracker, self.out, done, self.description)
        self._held.push(self._close_trackers)
        self._read_extra()
        if row is not None:
            self.log(row, last=True)

    def _publish_address(self) -> None:
        """Write where others can join this run to the file ``ADDRESS``, which is there as long as the run."""
        if self.comm.address:
            replace_file(self.out / ADDRESS, self.comm.address.encode())

    def drop_save(self) -> None:
        """End the checkpoint that is being written; it is either complete or absent."""
        self._cancel_save()
        self.saving = None

    def _close_groups(self, failed: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        """After a failure the abort of the world ends them: ranks out of step cannot close them together."""
        broken = failed is not None and not issubclass(failed, Stopped)
        if self.epoch >= 0 and self.comm.rank == 0:  # before others notice: they may write it again
            with contextlib.suppress(OSError):
                if (self.out / ADDRESS).read_bytes() == self.comm.address.encode():  # else it is that of others
                    (self.out / ADDRESS).unlink()
        if self.epoch and broken:
            self.comm.abort(reason=f"{type(error).__name__}: {error}")
        if hasattr(self, "device"):  # else it could not be made again
            self.device.close(broken)
        if not broken:
            self.mesh.close()
            if self.epoch:  # others have been closed by whoever made them
                self.comm.close()

    def _close_trackers(self, failed: type[BaseException] | None, *_: object) -> None:
        """A run that failed waits for no tracker: its error comes first."""
        self.stop.plan = "waiting for the trackers, all steps are saved"
        trackers.close(self._trackers, wait=failed is None)

    @cached_property
    def description(self) -> dict[str, Any]:
        """The settings as given, the derived values and the machine of the run, for config.json and checkpoints."""
        derived = {name: value for name, value in self.config.to_json().items() if value != self._asked[name]}
        config = {**self._asked, "out": str(self.out)}
        about = {"cwd": os.getcwd(), "data_fingerprint": self.data.fingerprint, **provenance(self.comm)}
        return {"config": config, "derived": derived, **about}

    def run(self, failing: Callable[[KosError], None] = lambda error: None) -> None:
        """Train from ``start`` to ``steps``, or until a rank is asked to stop; then save, sample and say where.

        Raises ``Stopped`` if that is before the first step is over: there is nothing to save.  After a failure,
        ``failing`` is called with the error before the run closes anything.
        """
        config = self.config
        with self._held:
            try:
                if self.start:
                    over = self.start >= config.steps and not config.profile
                    length = f"--steps is {config.steps}" if config.epochs is None else f"--epochs is {config.epochs}"
                    done = f" (nothing to do: {length}; for more steps, set it higher)" * over
                    self.console.say(f"resuming after step {self.start}, from {self.source}{done}")
                if config.profile:
                    return self.console.say(
                        profile_steps(self.profiler, self.device, self.start, config.profile, self.out)
                    )
                stopped = self.train(self.device) if config.elastic is None else Elastic(self).train()
                self.console.close()
                self._conclude(stopped)
            except CompileError:
                raise
            except (CudaError, CollectiveError, CheckpointError, DataError, OutOfMemory, RendezvousError) as error:
                failing(failure := self._interrupted(error))
                raise failure from error

    def train(self, device: Runner) -> bool:
        """Train on the device from the current step; returns whether a stop was requested."""
        if self.step == self.start:
            if self.step == 0 and self.config.eval_batches and self.untrained is None:
                self._validate_untrained()
            stop_together(self.comm, self.stop)
        self.stop.plan = f"stopping after this step, then saving to {self.checkpoints}"
        if self.stop.leaves:
            self.stop.plan = f"{LEAVES} this step; if the run stops, it saves to {self.checkpoints}"
        if self.comm.rank == 0:
            self.stop.advice = f"; resume with: {commands.resume(self.out, self.comm.size)}"
        self.console.close()
        stopped = train(device, self.config, self)
        self.finish_save()
        return stopped

    def _validate_untrained(self) -> None:
        with self.stop.at_once() if self.comm.size == 1 else contextlib.nullcontext():  # several ranks: one may wait
            self.untrained = loss = self.device.evaluate()
        self.console.say(f"validation loss before training: {loss:.4f}")
        if not math.isfinite(loss):
            whose = self.config.init_from or "this model before its first step"
            raise self._for_all(
                f"expected a finite validation loss before training, got {loss} with the weights of {whose}"
            )

    # --- what the loop reports -------------------------------------------------------------------------

    def measure(self, result: StepResult) -> dict[str, Any]:
        config, device, step = self.config, self.device, self.step
        for name, value in (("loss", result.loss), ("gradient norm", result.norm)):
            if not math.isfinite(value) and not config.skip_outliers:
                tensor = device.not_finite(step)
                forward = ", but what the forward breaks is in all" if name == "loss" and config.dtype != "fp8" else ""
                where = f" (first in {tensor}{forward})" if tensor else ""
                raise self._not_finite(step + 1, name, value, where)
        tokens = self.data.tokens_in(step + 1)
        rate = (tokens - self.data.tokens_in(step)) / result.seconds
        row: dict[str, Any] = {
            "step": step + 1,
            "loss": result.loss,
            "grad_norm": result.norm,
            "lr": result.lr,
            "tokens": tokens,
            "tokens_per_second": rate,
            "step_seconds": result.seconds,
        }
        if config.skip_outliers and not result.norm <= config.skip_outliers:
            row["skipped"] = True
            self.skipped.add(step)
        if math.isfinite(result.norm) or self.last_finite is None:
            self.last_finite = step if math.isfinite(result.norm) else step - 1
        if step - self.last_finite == MOST_NOT_FINITE:
            raise self._not_finite(step + 1, f"gradient norm in one of {MOST_NOT_FINITE} steps", result.norm)
        row |= device.measures(rate)
        if step == 0 and self.untrained is not None:
            row["val_loss_before"] = self.untrained
        if config.elastic is not None:
            row |= {"ranks": result.ranks, "epoch": result.epoch}
        return row

    def validate(self) -> float:
        loss = self.device.evaluate()
        if not math.isfinite(loss):
            raise self._not_finite(self.step, "validation loss", loss)
        return loss

    def log(self, row: dict[str, Any], last: bool) -> None:
        if self.row is not None and self.row["step"] == row["step"]:
            return  # before the ranks changed
        self.row = row
        self.console.step(row, log=self.step % self.config.log_every == 0 or last)
        if self.metrics is not None:
            self.metrics.write(row)
            for tracker in self._trackers:
                tracker.log(row)

    def save(self) -> None:
        """Save this step after the previous checkpoint is complete. ``--save-async``: files are written meanwhile."""
        self.finish_save()
        if self.step == self.saved_step:
            return
        if self.step == self.config.steps:
            self.stop.plan = f"saving the last step to {self.checkpoints}, then ending"
        self.saving = checkpoint.save(
            self.checkpoints, self.device.state, step=self.step, tokenizer=self.data.tokenizer, config=self.description,
            keep=self.config.keep, before=max(self.start, self.saved_step), run=f"{self.name}-{self.epoch}",
            extra=self._extra, show=None if self.config.save_async else self.console.progress,
        )  # fmt: skip
        if not self.config.save_async:
            self.finish_save()

    # --- errors and the end ------------------------------------------------------------------------------

    def _interrupted(self, error: KosError) -> KosError:
        """The error of a GPU, of other ranks or of files, with the step and the last checkpoint."""
        where = f" on {self.device.place}" if isinstance(error, CudaError) else ""
        left = "there is no checkpoint yet"
        if self.saved_step > 0:
            left = f"the last checkpoint, of step {self.saved_step}, is good"
            ranks = self.comm.world_ranks  # of those that survive another one, the lowest gives the advice
            lowest = not error.ranks or ranks[self.comm.rank] == min(set(ranks) - set(error.ranks), default=-1)
            if lowest and not self.stop.advised:
                left += f"; resume with: {commands.resume(self.out, self.comm.size)}"
        elif self.start > 0:
            left = f"there is no checkpoint yet except the one from which the run started, {self.source}"
        left = "" if left in str(error) else f"; {left}"  # the error of another rank may end with it
        failure = type(error)(f"after step {self.step}{where}: {error}{left}")
        failure.on_every_rank = error.on_every_rank
        return failure

    def _not_finite(self, step: int, name: str, value: float, where: str = "") -> TrainingError:
        self.finish_save()
        saved = "the checkpoints before it are of finite weights, " if max(self.start, self.saved_step) > 0 else ""
        skip = ", --skip-outliers X leaves out such steps and those of a gradient norm over X"
        return self._for_all(
            f"step {step}: expected a finite {name}, got {value}{where}; {saved}a lower --lr or --grad-clip "
            f"may help{'' if self.config.skip_outliers else skip}"
        )

    @staticmethod
    def _for_all(message: str) -> TrainingError:
        error = TrainingError(message)
        error.on_every_rank = True
        return error

    def finish_save(self) -> None:
        """Wait for the checkpoint that is being written; the error of one rank is raised on all. Collective."""
        if self.saving is not None:
            self.saving.finish()
            self.saved_step, self.saving = self.saving.step, None

    def _cancel_save(self) -> None:
        if self.saving is not None:
            self.saving.cancel()

    def _announce(self) -> None:
        config, model, parallel = self.config, self.model_config, self.device.step.parallel
        layers, epochs = plural(model.num_hidden_layers, "layer"), ""
        if config.epochs is not None:
            epochs = f", {plural(config.epochs, 'epoch')} of {plural(self.data.steps_per_epoch, 'step')}"
        self.console.say(
            f"kos: {model.num_parameters():,} parameters ({layers} x {model.hidden_size}), "
            f"{self.data.describe()}, {self.mesh.layout.describe()}"
            f"{', ZeRO-1' * parallel.sharded}{', held twice' * parallel.twice}"
            f"{f', gradients sent as {parallel.compress}' * (parallel.residual is not None)}, "
            f"{config.batch_size} x {config.seq_len} tokens a step{epochs}"
        )
        if config.elastic is not None:
            ranks, joins = config.elastic.replace(":", " to "), f"--join {self.out / ADDRESS} or {self.comm.address}"
            self.console.say(f"--elastic: {ranks} ranks; others join with the flags of this run and {joins}")
        elif self._asked["elastic"] is not None:
            self.console.say("--elastic is for dp: in this layout a lost rank ends the run at the last checkpoint")
        self.console.say("; ".join(filter(None, (self.data.trained_on, self.data.held_out))))
        if self.data.note:
            self.console.say(self.data.note)
        self.console.say(self.device.describe())
        self._report_settings()
        if self._trains and (trial := self.device.trial()) is not None:
            step, validation = trial
            every, steps = config.eval_every or config.steps, config.steps - self.start
            validations = (self.start == 0) + -(-config.steps // every) - self.start // every
            about = f"{plural(steps, 'step')} of {duration(step)}"
            if config.eval_batches:
                about += f", {plural(validations, 'validation')} of {duration(validation)} (--eval-batches 0: none)"
            whole = steps * step + validations * validation
            self.console.say(f"about {duration(whole)} in all: {about}")

    def _report_settings(self) -> None:
        """Report defaults that the user may not expect: those of --init-from, and a warm-up longer than the run."""
        config, steps, say = self.config, self.config.learning_rate().warmup_steps, self.console.say
        if self.start == 0 and config.init_from is not None:
            rates = f"learning rate {config.lr:g} after a warm-up of {plural(steps, 'step')}"
            context = f"{config.seq_len:,} of at most {self.model_config.max_position_embeddings:,} tokens a sequence"
            say(f"from the weights in {self.source}: {rates}, {context} (--lr, --warmup-steps, --seq-len)")
            if names := extra_names(self._extra):
                say(f"checkpoints also keep these files of {self.source}: {', '.join(names)}")
            if left_out := dropout(self._extra):
                say(f"training is without the dropout of {self.source}: {', '.join(left_out)}")
        if self._trains and steps > config.steps:
            reached = f"{config.learning_rate()(config.steps - 1):.2e} of {config.lr:.2e}"
            say(f"the warm-up of {steps} steps is longer than the run: the learning rate reaches {reached}")

    def _conclude(self, stopped: bool) -> None:
        text, config, step = "", self.config, self.step
        self.stop.plan, self.stop.advice = "ending the sample, all steps are saved", ""
        if step == config.steps and config.sample_tokens and not stopped:
            next_logits, model = self.device.sampler(), self.mesh.model_parallel

            def stopped_by_any() -> bool:
                return any(model.comm.all_gather_bytes(b"!" * self.stop.asked)) if model.size > 1 else self.stop.asked

            if next_logits is not None and (model.size > 1 or self.comm.rank == 0):
                text = sample_text(
                    next_logits, self.model_config.max_position_embeddings, self.data.tokenizer, config.prompt,
                    config.sample_tokens, seed=config.seed, temperature=config.temperature, top_k=config.top_k,
                    stopped=stopped_by_any,
                )  # fmt: skip
        say, out = self.console.say, self.out
        if self.skipped:
            done = plural(step - self.start, "step")
            say(f"{len(self.skipped)} of {done} left out (--skip-outliers {self.config.skip_outliers:g})")
        if early := step < self.config.steps:
            say(f"stopped on request after step {step}; resume with: {commands.resume(out, self.comm.size)}")
        elif text:
            say(f"--- a sample ---\n{text}\n----------------")
        say(f"checkpoint: {self.checkpoints / f'step-{step}'}")
        say(f"metrics:    {out / METRICS}")
        if plot := commands.plot(out):
            say(f"plot:       {plot}")
        if not early:
            say(f"more text:  {commands.sample(out, self.config)}")
            if step > self.start:  # else config.json is that of another run, perhaps of another layout
                say(f"more steps: {commands.more_steps(out, self.comm.size, self.config)}")
