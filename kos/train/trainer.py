"""A run: where it begins, what its steps give, and how it ends. ``kos.train.step`` has the loop.

The batch of a step is a pure function of (seed, step). The checkpoint has everything else that a step depends on, so a
resumed run continues bit for bit.
"""

from __future__ import annotations

import contextlib
import math
import signal
from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path
from typing import Any, Self, Unpack

import kos
from kos.comm.communicator import Communicator
from kos.errors import (
    CheckpointError,
    CollectiveError,
    CompileError,
    ConfigError,
    CudaError,
    DataError,
    InvalidArgument,
    KosError,
    OutOfMemory,
    RendezvousError,
    SettingError,
    TrainingError,
    TransferError,
)
from kos.train import checkpoint, report
from kos.train.checkpoint import Extra, adapter
from kos.train.checkpoint.huggingface import TensorFiles, weight_files
from kos.train.checkpoint.saving import Saving
from kos.train.config.options import TrainConfig
from kos.train.data.batches import Dataset
from kos.train.device import Device, check_replicas
from kos.train.device.choose import choose_device, layout_of, make_device
from kos.train.elastic import PATHS, Elastic
from kos.train.folder import check_folder, check_shared, describe, open_output, remove_address, run_folder
from kos.train.machine import limit_threads
from kos.train.model.llama import LlamaConfig
from kos.train.ops import Batch, CudaLoss
from kos.train.parallel.failures import (
    STOP,
    Stop,
    Stopped,
    alone,
    on_every_rank,
    raised_on_every_rank,
    same_on_all,
    stop_together,
    together,
)
from kos.train.parallel.mesh import Mesh
from kos.train.program import Program, check
from kos.train.publish import RunPublisher, check_address, open_publisher
from kos.train.source import (
    check_source,
    find_source,
    join_run,
    load_state_of_batches,
    load_weights,
    read_data,
    state_of_batches,
)
from kos.train.step import StepResult, train
from kos.train.tools import MetricsLog
from kos.train.tools.console import Console, by_source, is_evaluated
from kos.train.tools.profile import Profiler, TimedCommunicator, profile_steps
from kos.train.trained import TrainedModel, copy_of

LEAVES = "this rank leaves after"

class Trainer:
    """A training run on the ranks of ``comm``, by default those of ``kos.init``. Its methods are collective.

    ``python -m kos.train`` and ``kos.train.fit`` call ``run``, which trains to the end. A program may instead call
    ``step``, ``evaluate`` and ``save`` itself, and then ``close``, or use the trainer in a ``with`` statement.

    Args:
        config: the settings, as ``TrainConfig.from_preset`` makes them.
        comm: the communicator, which the caller closes.  Default: that of ``kos.init``, closed by ``close``.
        stop: requests to stop, for ``run``.
        program: ``batches``, ``loss`` and others, by name: see ``kos.train.Program``.

    Raises:
        ConfigError: a setting is invalid, or differs between ranks.
        InvalidArgument: an argument of another type.
    """

    comm: Communicator
    mesh: Mesh
    device: Device
    data: Dataset
    model_config: LlamaConfig
    console: Console
    out: Path
    source: str | None
    """The folder of the weights from which the run began."""
    resumes: bool
    """Whether ``source`` is a checkpoint, and not only weights."""
    name: str
    """That no other run on ``out`` has."""
    updates: int
    """The steps until ``start`` that were not skipped."""

    def __init__(
        self, config: TrainConfig, comm: Communicator | None = None, stop: Stop | None = None,
        **program: Unpack[Program],
    ) -> None:  # fmt: skip
        self.own = check(config, **program)
        """The batches of the program; those of ``data`` unless ``custom_batches``."""
        self.config, self.options = config, config.to_json()
        """``options``: the settings as they were given."""
        self.loss, self.val_batches = program.get("loss"), program.get("val_batches")
        self.custom_batches = program.get("batches") is not None
        self.callbacks, self.watched = [*program.get("callbacks", ())], False  # whether any rank has some
        self.verbose, self.ended = program.get("verbose", True), False
        self.stop: Stop = stop or Stop()
        self.publisher: RunPublisher | None = None  # with --publish
        self.found: checkpoint.Checkpoint | None = None  # that the run resumes, with its settings and files
        self.start = self.steps_done = self.saved_step = 0
        """Steps that are done at the start, now, and in the last checkpoint (-1: none)."""
        self.trains = True  # whether there are steps to train
        self.metrics: MetricsLog | None = None  # on rank 0
        self.extra: Extra = {}
        self.base: dict[str, str] | None = None
        """With ``--lora``, the path of the model that is adapted, and the SHA-256 of its weights."""
        self.skipped: set[int] = set()  # steps left out, of those of this run
        self.without_targets = 0  # steps of this run in which the loss counted nothing
        self.last_finite: int | None = None  # the last step whose gradients were finite
        self.row: dict[str, Any] | None = None  # the last that was written
        self.epoch = 0
        """How often the ranks have changed (``--elastic``); -1: this rank has not joined them."""
        self.untrained: dict[str, float] = {}  # validation losses before training
        self.best: tuple[int, float] | None = None  # step and value of --keep-best; None: not known yet
        self.improved = False
        self.saving: Saving | None = None
        self.held = contextlib.ExitStack()
        """What the end of the run closes."""
        self.held.callback(lambda: self.drop_save())
        try:
            if config.join is not None:
                self.console, self.epoch = Console(self.verbose - 1, config.steps), -1
                self.stop.announce(lambda text: self.console.warn(text))
                join_run(self)
                self.held.push(self._close_groups)
                self.held.callback(lambda: self.console.close())
                return
            if comm is None:
                comm = self.held.enter_context(kos.init(config.backend, timeout=config.timeout))
            self._begin(config, comm)
        except BaseException as error:
            self.held.__exit__(type(error), error, error.__traceback__)
            raise

    def _begin(self, config: TrainConfig, comm: Communicator) -> None:
        """Everything up to the first step."""
        self.comm, self.profiler = comm, Profiler()
        given = {name: value for name, value in self.options.items() if name not in PATHS}
        self.watched = any(same_on_all(comm, given | self.custom, len(self.callbacks)))
        world: Any = TimedCommunicator(comm, self.profiler) if config.profile else comm
        with raised_on_every_rank():
            layout = layout_of(config, comm.size)
            if self.loss is not None and layout.tp > 1:
                why = "1 with a loss of one's own, which needs logits of the whole vocabulary"
                raise SettingError("--tp", why, layout.tp)
        self.mesh, kind = Mesh(world, layout), choose_device(config.device, comm)
        with raised_on_every_rank():
            self.config = config = config.for_world(layout.dp, kind)
            if isinstance(self.loss, CudaLoss) and kind == "cpu":
                raise ConfigError("loss: expected a function on the CPU, got a CudaLoss")
            if kind == "cuda" and self.loss is not None and not isinstance(self.loss, CudaLoss):
                self.config = config = config.model_copy(update={"graph": False})
            config.check_ranks(comm.size)
        limit_threads(comm, 1 if config.deterministic else None)
        self.console = Console(comm.rank if self.verbose else -1, config.steps)
        self.stop.announce(lambda text: self.console.warn(text))
        if config.elastic is not None:
            self.stop.leaves, self.stop.plan = True, f"{LEAVES} the first step, or the run stops before it (Ctrl-C)"
        check_address(comm, config)
        self.out = Path(alone(comm, lambda: str(run_folder(config))))
        together(comm, lambda: check_folder(self.out, comm.rank))
        try:
            about = alone(comm, lambda: find_source(self))
            self.source, self.start, self.saved_step, self.resumes, settings, self.updates = about
            self.config = config = config.with_data_settings(settings)
            self.base = alone(comm, lambda: adapter.find_base(config.lora, config.init_from))
            self.data = read_data(self)
            self.config = config = config.model_copy(update={"fit": "whole" if self.data.packing else config.fit})
            if config.epochs is not None:
                self.options["steps"] = self.console.steps = steps = self.data.steps_of(config.epochs)
                self.config = config = config.model_copy(update={"steps": steps})
            self.trains = self.start < config.steps and not config.profile
            same_on_all(comm, {"data": self.data_in_words})
            with raised_on_every_rank():
                self.model_config = config.model_config_for(self.data.tokenizer.vocab_size)
            alone(comm, lambda: check_source(self))
            load_state_of_batches(self)
            self.make_device()
            self.held.push(self._close_groups)
            self.held.callback(self.console.close)
            report.announce(self)
            load_weights(self)
            self.steps_done = self.start
            self.publisher = open_publisher(self)
            together(comm, lambda: open_output(self) if comm.rank == 0 else None)
            self.name = check_shared(self.out, comm)
        except BaseException:
            self.console.close()
            if config.out is None and comm.rank == 0:
                with contextlib.suppress(OSError):
                    self.out.rmdir()  # of runs/, if nothing is in there
            raise

    def _close_groups(self, failed: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        """After a failure the abort of the world ends them: ranks out of step cannot close them together."""
        broken = failed is not None and not issubclass(failed, Stopped)
        if self.epoch >= 0 and self.comm.rank == 0:  # before others notice: they may write it again
            remove_address(self)
        if self.epoch and broken:
            self.comm.abort(reason=f"{type(error).__name__}: {error}".removesuffix(": "))
        if hasattr(self, "device"):  # else it could not be made again
            self.device.close(broken)
        if not broken:
            self.mesh.close()
            if self.epoch:  # others have been closed by whoever made them
                self.comm.close()

    @property
    def checkpoints(self) -> Path:
        return self.out / "checkpoints"

    @property
    def data_in_words(self) -> str:
        packed = "".join(f", packed {each.digest[:12]}" for part in self.data.parts if (each := part.packing))
        others = "".join(f", {name} {each.fingerprint[:12]}" for name, each in self.data.others.items())
        loss = ", with a loss of its own" * (self.loss is not None)
        return f"{self.data.name} ({self.data.fingerprint[:12]}{packed}{others}){loss}"

    @property
    def exhausted(self) -> bool:
        """Whether no validation of the last ``--patience`` was the best."""
        patience = self.config.patience * self.config.eval_every
        return bool(patience) and self.best is not None and self.steps_done - self.best[0] >= patience

    @cached_property
    def description(self) -> dict[str, Any]:
        return describe(self)

    @property
    def validates(self) -> bool:
        """Whether there are batches to validate on."""
        return self.val_batches is not None or bool(self.data.evaluated)

    @property
    def custom(self) -> dict[str, Any]:
        """What the program brings, the same on all ranks."""
        own = {"batches": self.custom_batches, "rows": self.own.rows, "loss": self.loss is not None}
        return own | {"val_batches": self.val_batches is not None}

    @property
    def of_program(self) -> bool:
        """Whether the command alone could not continue the run: the program brings its batches or its loss."""
        return self.custom_batches or self.loss is not None

    def make_device(self) -> None:
        """Make the device for the ranks of ``mesh``. Collective."""
        self.own.use(self.mesh, self.model_config.vocab_size)
        self.device = make_device(
            self.config, self.model_config, self.data, self.mesh, self.console.progress,
            source=self.own if self.custom_batches else self.data, watched=self.watched, loss=self.loss,
            stop_request=lambda: self.stop.stop_request,
        )  # fmt: skip

    def base_weights(self) -> TensorFiles:
        """The weights of the base of adapters."""
        assert self.base is not None
        return weight_files(Path(self.base["path"]), self.model_config.base.parameter_shapes())

    def run(self, failing: Callable[[KosError], None] = lambda error: None) -> None:
        """Train from ``start`` to ``steps``, or until a rank is asked to stop; then save, sample and say where.

        Raises ``Stopped`` if that is before the first step is over: there is nothing to save.  After a failure,
        ``failing`` is called with the error before the run closes anything.
        """
        config = self.config
        with self.held:
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
                self.call("on_end")
                self.console.close()
                samples = self.steps_done == self.config.steps and self.config.sample_tokens and not stopped
                report.conclude(self, report.sample_of(self) if samples else "")
            except CompileError:
                raise
            except (
                CudaError, CollectiveError, CheckpointError, DataError, OutOfMemory, RendezvousError, TransferError
            ) as error:  # fmt: skip
                failing(failure := report.interrupted(self, error))
                raise failure from error

    def train(self, device: Device | Elastic) -> bool:
        """Train on the device from the current step; returns whether a stop was requested."""
        if self.steps_done == self.start:
            if self.steps_done == 0 and self.validates and not self.untrained:
                self._validate_untrained()
            stop_together(self.comm, self.stop)
        self.stop.plan = f"stopping after this step, then saving to {self.checkpoints}"
        if self.stop.leaves:
            self.stop.plan = f"{LEAVES} this step; if the run stops, it saves to {self.checkpoints}"
        if self.comm.rank == 0:
            self.stop.advice = report.resuming(self)
        self.console.close()
        stopped = train(device, self.config, self)
        self.finish_save()
        return stopped

    def _validate_untrained(self) -> None:
        with self.stop.at_once() if self.comm.size == 1 else contextlib.nullcontext():  # several ranks: one may wait
            self.untrained = self.evaluate()
        loss, *_ = self.untrained.values()
        own = [f"{loss:.4f}"] * ("val_loss" in self.untrained)
        self.console.say(f"validation loss before training: {'; '.join([*own, *by_source(self.untrained)])}")
        if not math.isfinite(loss):
            whose = self.config.init_from or "this model before its first step"
            text = f"expected a finite validation loss before training, got {loss} with the weights of {whose}"
            raise on_every_rank(TrainingError(text))

    # --- what the loop reports -------------------------------------------------------------------------

    def measure(self, result: StepResult) -> dict[str, Any]:
        return report.measure(self, result)

    def validate(self) -> dict[str, float]:
        losses = self.evaluate()
        loss, *_ = losses.values()
        if not math.isfinite(loss):
            raise report.not_finite(self, self.steps_done, "validation loss", loss)
        if (metric := self.config.best_metric) is not None:
            if self.best is None:
                step, value = alone(self.comm, lambda: checkpoint.best_of(self.checkpoints, metric, self.start))
                self.best = step, math.inf if value is None else value
            if losses[metric] < self.best[1]:
                self.best, self.improved = (self.steps_done, losses[metric]), True
        return losses

    def after_step(self, row: dict[str, Any]) -> bool:
        """Compare and publish the weights, and call the callbacks; returns whether one of them, on any rank, stops.
        """
        if self.config.check_replicas and self.steps_done % self.config.check_replicas == 0:
            check_replicas(self.device, self.steps_done)
        turn = self.steps_done % self.config.publish_every == 0 or self.steps_done == self.config.steps
        if self.publisher is not None and turn:
            self.publisher.publish(self.steps_done)
        self.call("on_step", row)
        if is_evaluated(row):
            self.call("on_evaluate", row)
        return self.watched and any(self.comm.all_gather_bytes(b"!" * (self.stop.stop_request == STOP)))

    def save(self) -> Path:
        """Save a checkpoint of this step, unless there is one, after the previous one is complete.

        Returns its folder.  With ``save_async`` the files are written meanwhile, until the next ``save`` or ``close``.
        """
        self.finish_save()
        folder = self.checkpoints / f"step-{self.steps_done}"
        if self.steps_done == self.saved_step:
            return folder
        if self.steps_done == self.config.steps:
            self.stop.plan = f"saving the last step to {self.checkpoints}, then ending"
        self.saving = checkpoint.save(
            self.checkpoints, self.device.state, step=self.steps_done, tokenizer=self.data.tokenizer,
            config=self.description | state_of_batches(self),
            keep=self.config.keep, before=max(self.start, self.saved_step), run=f"{self.name}-{self.epoch}",
            extra=self.extra, show=None if self.config.save_async else self.console.progress,
            best={str(self.config.best_metric): self.best[1]} if self.improved and self.best else None,
        )  # fmt: skip
        self.improved = False
        if not self.config.save_async:
            self.finish_save()
        return folder

    def log(self, row: dict[str, Any], last: bool) -> None:
        """Print and write the metrics of a step."""
        if self.row is not None and self.row["step"] == row["step"]:
            return  # before the ranks changed
        self.row = row
        self.console.step(row, log=self.steps_done % self.config.log_every == 0 or last)
        if self.metrics is not None:
            self.metrics.write(row)

    def finish_save(self) -> None:
        """Wait for the checkpoint that is being written; the error of one rank is raised on all. Collective."""
        if self.saving is not None:
            self.saving.finish()
            self.saved_step, self.saving = self.saving.step, None
            self.call("on_save", self.checkpoints / f"step-{self.saved_step}")

    def call(self, event: str, *arguments: Any) -> None:
        """Call a method of this rank's callbacks."""
        for each in self.callbacks:
            getattr(each, event)(self, *arguments)

    def drop_save(self) -> None:
        """End the checkpoint that is being written; it is either complete or absent."""
        if self.saving is not None:
            self.saving.cancel()
        self.saving = None

    # --- the parts that a program calls ------------------------------------------------------------------

    def step(self, batch: Batch | None = None) -> dict[str, Any]:
        """Make one optimizer step with ``batch``, or with the next batch of the trainer.  Calls ``on_step``.

        Returns the row of ``metrics.jsonl``: the mean ``loss`` over the targets, ``grad_norm``, ``lr``, and so on.
        It does not handle signals, so only the program can stop it.

        Raises:
            DataError: the batch has another shape, or there is none; on all ranks if on one of them.
            TrainingError: the loss or the norm is not finite.
        """
        source = self.own if batch is not None or self.custom_batches else self.data
        self.own.given = batch
        if source is not self.device.source:
            self.device.use(source)
        self.device.start_step(self.steps_done, 0)
        row = self.measure(self.device.finish_step(self.steps_done))
        self.steps_done += 1
        self.log(row, last=False)
        self.after_step(row)
        return row

    def evaluate(self, batches: Iterable[Batch] | None = None) -> dict[str, float]:
        """The mean loss over the targets of ``batches``, by default of the validation batches: ``{"val_loss": …}``.

        ``batches`` are of any number of sequences, the same on all ranks; with ``rows="own"``, each rank of dp has
        its own.  With several ``--data`` there is a ``val_loss/SOURCE`` of each.  Without held out data, there
        is no ``val_loss``.

        Raises:
            InvalidArgument: there are no batches.
            DataError: a batch of another shape, or none with a target that counts; on all ranks if on one of them.
        """
        if batches is None and self.val_batches is None:
            if not self.validates:
                raise InvalidArgument("evaluate: expected batches, as the trainer has none for validation, got none")
            return self.device.evaluate()
        given = self.own.checked(batches if batches is not None else self.val_batches or ())
        return {"val_loss": self.device.loss_of(given, self.own.rows)}

    @property
    def model(self) -> TrainedModel:
        """A copy of the model with its present weights, on the CPU in float32: its ``logits``, ``loss``, ``generate``.

        Raises InvalidArgument if a rank has only a part of the model (tp, pp).
        """
        return copy_of(self)

    def request_stop(self) -> None:
        """Let ``run`` end on all ranks: after this step if a callback calls it, else after the next one."""
        self.stop.requested, self.stop.number = True, signal.SIGINT

    def close(self) -> None:
        """Complete the checkpoint that is being written, and free what the trainer holds."""
        self.__exit__(None, None, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: Any) -> None:
        if failure[0] is None:
            with self.held:
                self.finish_save()
        else:
            self.held.__exit__(*failure)
