"""A run: where it begins, what its steps give, and how it ends. ``kos.train.step`` has the loop.

The batch of a step is a pure function of (seed, step). The checkpoint has everything else that a step depends on, so a
resumed run continues bit for bit.
"""

from __future__ import annotations

import contextlib
import math
import signal
from collections.abc import Callable, Iterable
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
    plural,
)
from kos.train import checkpoint, report
from kos.train.checkpoint import adapter
from kos.train.config.options import TrainConfig
from kos.train.data.batch import Batch
from kos.train.data.batches import Dataset, load_data
from kos.train.data.own import own_data
from kos.train.device import Device
from kos.train.device.choose import choose_device, layout_of
from kos.train.device.replicas import check_replicas
from kos.train.elastic import PATHS, Elastic, logged_epoch
from kos.train.generate import sample_text
from kos.train.machine import limit_threads
from kos.train.model.parameters import Parameters
from kos.train.ops import CudaLoss
from kos.train.ops.fp8 import MULTIPLE
from kos.train.parallel.failures import (
    STOP,
    Stop,
    Stopped,
    alone,
    gather_json,
    on_every_rank,
    raised_on_every_rank,
    same_on_all,
    stop_together,
    together,
)
from kos.train.parallel.mesh import Mesh
from kos.train.program import Program
from kos.train.publish import RunPublisher, check_address, open_publisher
from kos.train.report import NO_TARGETS, announce, conclude
from kos.train.run_context import (
    ADDRESS,
    RunContext,
    check_folder,
    check_shared,
    open_output,
    remove_address,
    run_folder,
)
from kos.train.source import check_source, find_source, load_weights
from kos.train.step import StepResult, train
from kos.train.tools.console import Console, by_source, is_evaluated
from kos.train.tools.metrics import METRICS
from kos.train.tools.profile import Profiler, TimedCommunicator, profile_steps
from kos.train.trained import TrainedModel

LEAVES = "this rank leaves after"

MOST_NOT_FINITE = 20
"""Steps in a row without a finite gradient that end a run: none of them has changed the weights, none after would."""


class Trainer(RunContext):
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

    publisher: RunPublisher | None = None
    """With ``--publish``."""

    def __init__(
        self, config: TrainConfig, comm: Communicator | None = None, stop: Stop | None = None,
        **program: Unpack[Program],
    ) -> None:  # fmt: skip
        super().__init__(config, stop, **program)
        try:
            if comm is None:
                comm = self.held.enter_context(kos.init(config.backend, timeout=config.timeout))
            self._begin(config, comm)
        except BaseException as error:
            self.held.__exit__(type(error), error, error.__traceback__)
            raise

    def _begin(self, config: TrainConfig, comm: Communicator) -> None:
        """Everything up to the first step."""
        self.comm, self.profiler = comm, Profiler()
        self.found = None
        asked = {name: value for name, value in self.asked.items() if name not in PATHS}
        self.watched = any(same_on_all(comm, asked | self.brings, len(self.callbacks)))
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
            self.data = self._load_data()
            self.config = config = config.model_copy(update={"fit": "whole" if self.data.packing else config.fit})
            if config.epochs is not None:
                self.asked["steps"] = self.console.steps = steps = self.data.steps_of(config.epochs)
                self.config = config = config.model_copy(update={"steps": steps})
            self.trains = self.start < config.steps and not config.profile
            same_on_all(comm, {"data": self.data_in_words})
            with raised_on_every_rank():
                self.model_config = config.model_config_for(self.data.tokenizer.vocab_size)
            alone(comm, lambda: check_source(self))
            self._load_state_of_batches()
            self.make_device()
            self.held.push(self._close_groups)
            self.held.callback(self.console.close)
            announce(self)
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

    def _load_data(self) -> Dataset:
        """Read the data.  One rank of each machine prepares it, and the others read the result."""
        # Of a resumed run the checkpoint's: the folder of ``init_from`` may be gone.
        initialized = self.resumes and (self.brings_batches or self.config.init_from is not None)
        weights = self.source if initialized else adapter.tokenizer_folder(self.config.init_from)
        if self.brings_batches:
            return together(self.comm, lambda: own_data(self.config, weights))
        first = self.comm.local_rank == 0
        runs = [Path(str(self.source)).parent.parent] if self.resumes else []  # with the plan that it began with

        @self.stop.at_once()
        def load() -> Dataset:
            return load_data(self.config, self.console.progress, weights, runs)

        try:
            data = together(self.comm, lambda: load() if first else None)
        finally:
            self.console.close()
        return together(self.comm, lambda: data or load())

    def _state_of_batches(self) -> dict[str, Any]:
        """What a checkpoint keeps of the program's batches: ``OwnBatches.rows``, and a state for each rank of dp."""
        if not self.brings_batches or (mine := self.own.state()) is None:
            return {}
        every, layout = gather_json(self.comm, mine), self.mesh.layout
        return {"batches": [self.own.rows, [every[layout.rank({"dp": dp})] for dp in range(layout.dp)]]}

    def _load_state_of_batches(self) -> None:
        """Continue with the batches after those of the checkpoint."""
        if self.brings_batches and self.resumes:
            saved = alone(self.comm, lambda: self.found and self.found.config.get("batches"))
            together(self.comm, lambda: self.own.load_state(saved, self.mesh.dp.rank, self.mesh.dp.size))

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
                conclude(self, self._sample() if samples else "")
            except CompileError:
                raise
            except (
                CudaError, CollectiveError, CheckpointError, DataError, OutOfMemory, RendezvousError, TransferError
            ) as error:  # fmt: skip
                failing(failure := self._interrupted(error))
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
        config, device, step = self.config, self.device, self.steps_done
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
        if self.data.mixture is not None:
            of_sources = self.data.mixture.tokens((step + 1) * config.batch_size)
            row |= {f"tokens/{name}": count for name, count in of_sources.items()}
        if config.skip_outliers and not result.norm <= config.skip_outliers:
            row["skipped"] = True
            self.skipped.add(step)
        if not result.counted:
            row["no_targets"] = True
            self.without_targets += 1
            if self.without_targets == 1:
                seen = plural(step + 1 - self.start, "step")
                self.console.warn(f"kos: step {step + 1}: {NO_TARGETS} (1 of {seen} so far; no_targets in {METRICS})")
        if math.isfinite(result.norm) or self.last_finite is None:
            self.last_finite = step if math.isfinite(result.norm) else step - 1
        if step - self.last_finite == MOST_NOT_FINITE:
            raise self._not_finite(step + 1, f"gradient norm in one of {MOST_NOT_FINITE} steps", result.norm)
        row |= device.measures(rate)
        if step == 0:
            row |= {key.replace("val_loss", "val_loss_before", 1): loss for key, loss in self.untrained.items()}
        if config.elastic is not None:
            row |= {"ranks": result.ranks, "epoch": result.epoch}
        return row

    def validate(self) -> dict[str, float]:
        losses = self.evaluate()
        loss, *_ = losses.values()
        if not math.isfinite(loss):
            raise self._not_finite(self.steps_done, "validation loss", loss)
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
        return self.watched and any(self.comm.all_gather_bytes(b"!" * (self.stop.wish == STOP)))

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
            config=self.description | self._state_of_batches(),
            keep=self.config.keep, before=max(self.start, self.saved_step), run=f"{self.name}-{self.epoch}",
            extra=self.extra, show=None if self.config.save_async else self.console.progress,
            best={str(self.config.best_metric): self.best[1]} if self.improved and self.best else None,
        )  # fmt: skip
        self.improved = False
        if not self.config.save_async:
            self.finish_save()
        return folder

    # --- the parts that a program calls ------------------------------------------------------------------

    def step(self, batch: Batch | None = None) -> dict[str, Any]:
        """Make one optimizer step with ``batch``, or with the next batch of the trainer.  Calls ``on_step``.

        Returns the row of ``metrics.jsonl``: the mean ``loss`` over the targets, ``grad_norm``, ``lr``, and so on.
        It does not handle signals, so only the program can stop it.

        Raises:
            DataError: the batch has another shape, or there is none; on all ranks if on one of them.
            TrainingError: the loss or the norm is not finite.
        """
        source = self.own if batch is not None or self.brings_batches else self.data
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
        if self.mesh.model_parallel.size > 1:
            got = self.mesh.layout.describe()
            raise InvalidArgument(f"model: expected ranks that hold the whole model, got {got}; save it and load that")
        whole, to_host, config = self.device.whole_weights(), self.device.step.models[0].ops.to_host, self.model_config
        copy = Parameters(config.parameter_shapes(), groups=config.fused_groups())
        in_8 = {name for each in self.device.step.quantized.values() for name in each.members}
        base: Any = self.base_weights() if in_8 else None  # as they are before they are quantized
        for name, weight in copy.items():
            weight[...] = base.read(name) if name in in_8 else to_host(whole[name])
        tokenizer = self.data.tokenizer
        return TrainedModel(config, copy, tokenizer, ends=[] if tokenizer.eos is None else [tokenizer.eos])

    def request_stop(self) -> None:
        """Let ``run`` end on all ranks: after this step if a callback calls it, else after the next one."""
        self.stop.asked, self.stop.number = True, signal.SIGINT

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

    # --- errors and the end ------------------------------------------------------------------------------

    def _interrupted(self, error: KosError) -> KosError:
        """The error of a GPU, of other ranks or of files, with the step and the last checkpoint."""
        known = isinstance(error, CudaError) and hasattr(self, "device")  # else it could not be made again
        where = f" on {self.device.place}" if known else ""
        left, address = "there is no checkpoint yet", self.out / ADDRESS
        if self.config.elastic is not None and logged_epoch(self) > self.epoch:  # others continued, and perhaps saved
            left = f"join the run again with --join {address}" if address.is_file() else "others have ended the run"
        elif self.saved_step > 0:
            left = f"the last checkpoint, of step {self.saved_step}, is good"
            ranks, lost = self.comm.world_ranks, {*error.ranks, *error.unasked}
            lowest = not lost or ranks[self.comm.rank] == min(set(ranks) - lost, default=-1)  # it gives the advice
            if lowest and not self.stop.advised:
                left += report.resuming(self)
        elif self.start > 0:
            left = f"there is no checkpoint yet except the one from which the run started, {self.source}"
        left = "" if left in str(error) else f"; {left}"  # the error of another rank may end with it
        failure = type(error)(f"after step {self.steps_done}{where}: {error}{left}")
        vars(failure).update(vars(error))  # such as ``ranks``
        return failure

    def _not_finite(self, step: int, name: str, value: float, where: str = "") -> TrainingError:
        self.finish_save()
        saved = "the checkpoints before it are of finite weights, " if max(self.start, self.saved_step) > 0 else ""
        skip = ", --skip-outliers X leaves out such steps and those of a gradient norm over X"
        helps = f"{saved}a lower --lr or --grad-clip may help{'' if self.config.skip_outliers else skip}"
        return on_every_rank(TrainingError(f"step {step}: expected a finite {name}, got {value}{where}; {helps}"))

    def _sample(self) -> str:
        """Text from the trained model; "" on ranks that do not get it."""
        self.stop.plan, self.stop.advice = "ending the sample, all steps are saved", ""
        config, next_logits, model = self.config, self.device.sampler(), self.mesh.model_parallel

        def stopped_by_any() -> bool:
            return any(model.comm.all_gather_bytes(b"!" * self.stop.asked)) if model.size > 1 else self.stop.asked

        if next_logits is None or (model.size == 1 and self.comm.rank > 0):
            return ""
        context = self.model_config.max_position_embeddings
        if self.device.step.quantized and context > MULTIPLE:
            context -= context % MULTIPLE  # sequences are padded to it
        return sample_text(
            next_logits, context, self.data.tokenizer, config.prompt or self.data.question(context // 2),
            config.sample_tokens, seed=config.seed, temperature=config.temperature, top_k=config.top_k,
            stopped=stopped_by_any,
        )  # fmt: skip
