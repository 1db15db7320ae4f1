"""The training loop: one optimizer step after another, evaluated, logged and saved.

What computes the steps, on CPUs or GPUs, is an engine (``kos.train.engine.choose``). The batch of a step is a pure
function of (seed, step) and everything else that a step depends on is in the checkpoint, so a resumed run
continues bit for bit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import logging
import math
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
    TrainingError,
)
from kos.train.checkpoint import checkpoint, huggingface
from kos.train.config.options import TrainConfig
from kos.train.data.batches import Dataset, load_data
from kos.train.data.tokenizers import NumberTokenizer, has_tokenizer, make_tokenizer
from kos.train.engine.choose import choose_device, choose_layout, make_engine
from kos.train.engine.machine import limit_threads, provenance
from kos.train.model.generate import sample_text
from kos.train.model.llama_config import LlamaConfig
from kos.train.ops.optimizer import AdamW
from kos.train.parallel.failures import alone, same_on_all, stop_together, together
from kos.train.parallel.mesh import Mesh
from kos.train.parallel.stopping import Stop
from kos.train.tools import commands
from kos.train.tools.console import Console, duration
from kos.train.tools.folders import run_folder
from kos.train.tools.metrics import MetricsLog, read_metrics
from kos.train.tools.profile import profile_steps

_log = logging.getLogger(__name__)

EXACT = (
    *("seed", "batch_size", "micro_batch_size", "seq_len", "deterministic"),
    *("device", "dtype", "master_weights", "grad_dtype", "attention"),
)
"""Settings that a resumed run must keep to go on bit for bit."""


ASTRAY = 20
"""Steps in a row without a finite gradient that end a run: none of them has moved the weights, none after would."""


class Trainer:
    """A training run of ``config`` on the ranks of ``comm``. Everything up to the first step is in here."""

    def __init__(self, config: TrainConfig, comm: Communicator, stop: Stop | None = None) -> None:
        self.comm, self.stop, self._asked = comm, stop or Stop(), config.to_json()
        self.mesh = Mesh(comm, choose_layout(config, comm))
        self.config = config = config.for_world(self.mesh.dp.size, choose_device(config.device, comm))
        limit_threads(comm, 1 if config.deterministic else None)
        self.console = Console(comm.rank, config.steps)
        self.data = self._load_data()
        same_on_all(comm, self._facts())
        self.out = Path(alone(comm, lambda: str(run_folder(config))))
        self.checkpoints = self.out / "checkpoints"
        self.skipped = 0  # steps left out, of those of this run
        self._astray = 0  # of them the last in a row whose gradients were not finite
        self._held = contextlib.ExitStack()  # what the end of the run closes
        self._held.callback(self.mesh.close)
        try:
            self._found: checkpoint.Checkpoint | None = None  # on rank 0
            self.source, self.start, self.saved_step = alone(comm, self._find_source)
            self.model_config = config.model_config_for(self.data.tokenizer.vocab_size)
            self.engine = make_engine(config, self.model_config, self.data, self.mesh, self.console.progress)
            self.engine.asked = lambda: self.stop.asked
            self._held.callback(self.engine.close)
            self._held.callback(self.console.close)
            self._announce()
            self._load()
            self.console.start = self.start
            self.metrics = together(comm, self._open_output)
        except BaseException:
            if config.out is None and comm.rank == 0:
                with contextlib.suppress(OSError):
                    self.out.rmdir()  # of runs/, if nothing is in there
            raise

    def _load_data(self) -> Dataset:
        """Prepared by one rank of each machine; the others find what it kept."""
        first = self.comm.local_rank == 0

        @self.stop.at_once()
        def load() -> Dataset:
            return load_data(self.config, self.console.progress)

        try:
            data = together(self.comm, lambda: load() if first else None)
        finally:
            self.console.close()
        return together(self.comm, lambda: data or load())

    def _facts(self) -> dict[str, object]:
        """What must be the same on all ranks; paths may differ."""
        local = {"out", "resume", "init_from", "data", "tokenizer"}
        facts = {name: value for name, value in self.config.to_json().items() if name not in local}
        return {**facts, "data": f"{self.data.name} ({self.data.fingerprint[:12]})"}

    def _find_source(self) -> tuple[str | None, int, int]:
        """Of a checkpoint or a Hugging Face folder to begin from: where it is, its step, and this if it is our own."""
        if self.config.resume == "auto":
            self._found = checkpoint.latest(self.checkpoints)
        elif self.config.resume is not None:
            self._found = checkpoint.find(Path(self.config.resume))
        if self._found is None:
            return self.config.init_from, 0, -1
        path, step, _ = self._found
        return str(path), step, step if path.parent.resolve() == self.checkpoints.resolve() else -1

    def _load(self) -> None:
        """Give the engine its weights: the ``source``'s, which rank 0 reads for all, or drawn."""
        state = self.engine.new_state() if self.source is not None and self.comm.rank == 0 else None

        @self.stop.at_once()
        def begin() -> None:
            if self.source is None:
                self.engine.draw_weights()
            elif state is not None:
                self._fill(state, Path(self.source))

        together(self.comm, begin)
        self.engine.load(state)

    def _fill(self, state: AdamW, source: Path) -> None:
        if has_tokenizer(source) and self.data.tokenizer.kind != NumberTokenizer.kind:
            self._compare_tokenizers(source)
        if self._found is not None:
            self._compare_runs(self._found)
        _check_same_model(source, huggingface.read_config(source), self.model_config)
        if self._found is not None:
            self._found.load_optimizer(state)
        huggingface.read_weights(source, state.weights)

    def _compare_tokenizers(self, source: Path) -> None:
        """Refuse weights of another tokenizer: token numbers would mean other text."""
        ours, theirs = self.data.tokenizer, make_tokenizer(str(source))
        if not ours.is_like(theirs):
            other = f"{theirs.name} (see --tokenizer)"
            got = other if theirs.name != ours.name else "another of that name (--tokenizer, --data)"
            raise CheckpointError(f"{source}: expected the tokenizer of this run, {ours.name}, got {got}")

    def _compare_runs(self, found: checkpoint.Checkpoint) -> None:
        """Say what breaks the promise to go on bit for bit."""
        before, now = found.config, self.description
        asked = {"grad_dtype": "float32", **before.get("config", {})}
        theirs, ours = asked | before.get("derived", {}), now["config"] | now["derived"]
        other_ranks = before.get("ranks") != now["ranks"]
        if other_ranks:  # from which these follow where they were not asked for
            same = (name for name in ("micro_batch_size", "grad_dtype") if asked.get(name) == self._asked[name])
            ours |= {name: theirs.get(name) for name in same}
        if theirs.get("attention") in ("auto", "cudnn"):  # what that came to was not noted once, nor is it on CPUs
            ours["attention"] = self._asked["attention"]
        changed = [name for name in EXACT if theirs.get(name) != ours[name]]
        changed += ["data"] * (before.get("data_fingerprint") != now["data_fingerprint"])
        if ours["device"] == "cuda" and set(before.get("gpus") or now["gpus"]) != set(now["gpus"]):
            changed.append("GPU")
        if self.comm.size > 1 and not other_ranks and not self.config.deterministic:  # what may add in another order
            changed += ["zero"] * (theirs.get("zero", ours["zero"]) != ours["zero"])
            changed += ["backend"] * (before.get("backend", now["backend"]) != now["backend"])
        of_schedule = ("lr", "min_lr", "schedule", "steps", "warmup_steps", "decay_fraction")
        was = self.config.model_copy(update={name: theirs[name] for name in of_schedule if name in theirs})
        old, new = (each.make_schedule()(found.step) for each in (was, self.config))
        if found.step < self.config.steps and new > 1.1 * old:
            even = f": --schedule constant --lr {old:g} --warmup-steps 0 keeps it even" if old else ""
            _log.warning("the learning rate rises from %.2e to %.2e at step %d%s", old, new, found.step + 1, even)
        if changed:
            _log.warning("resuming with another %s: not the run that it would have been", ", ".join(changed))
        elif other_ranks and not self.config.deterministic:
            _log.warning("resuming with another number of ranks: not bit for bit the run that it would have been")

    def _open_output(self) -> MetricsLog | None:
        if self.comm.rank != 0:
            return None
        try:
            left = ["checkpoints"] * bool(checkpoint.steps_in(self.checkpoints))
            left += ["metrics"] * bool(self.start and read_metrics(self.out / "metrics.jsonl"))
            if left and self.saved_step < 0:
                expected = "expected an empty folder, or --resume auto to go on from the checkpoints in it"
                raise ConfigError(f"--out {self.out}: {expected}, got the {left[0]} of another run")
            self.out.mkdir(parents=True, exist_ok=True)
            lock = open(self.out / ".lock", "w")  # noqa: SIM115 (held while the run writes here)
            self._held.callback(lock.close)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            guest = self.config.profile or self.start >= self.config.steps  # which trains nothing there
            if not (guest and (self.out / "config.json").exists()):
                checkpoint.write_json(self.out / "config.json", self.description)
        except BlockingIOError as error:
            raise ConfigError(f"--out {self.out}: expected a free folder, got one that a run is writing to") from error
        except OSError as error:
            raise ConfigError(f"--out {self.out}: expected a folder that can be written, got {error}") from error
        if self.config.profile:
            return None
        metrics = MetricsLog(self.out / "metrics.jsonl", self.start)
        self._held.callback(metrics.close)
        return metrics

    @cached_property
    def description(self) -> dict[str, Any]:
        """What was asked, what followed from it and where it ran, for config.json and the checkpoints."""
        used = self.config.to_json() | self.engine.chosen
        derived = {name: value for name, value in used.items() if value != self._asked[name]}
        config = {**self._asked, "out": str(self.out)}
        about = {"data_fingerprint": self.data.fingerprint, **provenance(self.comm)}
        return {"config": config, "derived": derived, **about}

    def run(self) -> None:
        """Train from ``start`` to ``steps``, or until a rank is asked to stop; then save, sample and say where.

        Raises ``Stopped`` where that is before the first step is over: there is nothing to save.
        """
        config, step = self.config, self.start
        try:
            if self.start:
                over = self.start >= config.steps and not config.profile
                done = " (nothing to do: more --steps go on from there)" * over
                self.console.say(f"resuming after step {self.start}, from {self.source}{done}")
            if config.profile:
                return self.console.say(profile_steps(self.engine, self.comm, self.start, config.profile, self.out))
            untrained = self.engine.evaluate() if self.start == 0 and config.eval_batches else None
            if untrained is not None:
                self.console.say(f"validation loss before training: {untrained:.4f}")
                if not math.isfinite(untrained):
                    raise self._for_all(
                        f"expected a finite validation loss before training, got {untrained}: it is the weights' of "
                        f"{config.init_from or 'this model before its first step'}"
                    )
            stop_together(self.comm, self.stop)
            started, stopped = step, False
            while step < started or (step < config.steps and not stopped):
                while not stopped and started < min(step + 1 + self.engine.lag, self._next_pause(step)):
                    self.engine.start_step(started, self.stop.asked)
                    started += 1
                row, stop = self._finish_step(step)
                if step == 0 and untrained is not None:
                    row["val_loss_before"] = untrained
                step, stopped = step + 1, stopped or stop
                last = step == config.steps or (stopped and step == started)
                if config.eval_batches and (_every(config.eval_every, step) or step == config.steps):
                    row["val_loss"] = self.engine.evaluate()
                    if not math.isfinite(row["val_loss"]):
                        raise self._not_finite(step, "validation loss", row["val_loss"])
                self.console.step(row, log=step % config.log_every == 0 or last)
                if self.metrics is not None:
                    self.metrics.write(row)
                if not last and _every(config.save_every, step):
                    self._save(step)
            self._save(step)
            self.console.close()
            self._conclude(step, stopped)
        except CompileError:
            raise
        except (CudaError, CollectiveError, CheckpointError, DataError, OutOfMemory) as error:
            raise self._interrupted(error, step) from error
        finally:
            self._held.close()

    def _interrupted(self, error: KosError, step: int) -> KosError:
        """The error of a GPU, of other ranks or of files, with how far this run came and what is left of it."""
        where = f" on {self.engine.place}" if isinstance(error, CudaError) else ""
        left = "there is no checkpoint yet"
        if self.saved_step > 0:
            go_on = commands.resume(self.out, self.comm.size)
            left = f"the last checkpoint, of step {self.saved_step}, is good, go on by: {go_on}"
        elif self.start > 0:
            left = f"there is no checkpoint yet but the one that it began from, {self.source}"
        failure = type(error)(f"after step {step}{where}: {error}; {left}")
        failure.on_every_rank = error.on_every_rank
        return failure

    def _next_pause(self, step: int) -> int:
        """The next step after which the weights are looked at: none is started before that is done."""
        every = (self.config.eval_every, self.config.save_every)
        return min([self.config.steps, *((step // n + 1) * n for n in every if n)])

    def _finish_step(self, step: int) -> tuple[dict[str, Any], bool]:
        """Wait for an optimizer step; its row of metrics, and whether any rank was asked to stop."""
        config, engine = self.config, self.engine
        result = engine.finish_step(step)
        for name, value in (("loss", result.loss), ("gradient norm", result.norm)):
            if not math.isfinite(value) and not config.skip_outliers:
                tensor = engine.not_finite(step)
                forward = ", but what the forward breaks is in all" if name == "loss" else ""
                where = f" (first in the gradient of {tensor}{forward})" if tensor else ""
                raise self._not_finite(step + 1, name, value, where)
        tokens = config.batch_size * config.seq_len
        row: dict[str, Any] = {
            "step": step + 1,
            "loss": result.loss,
            "grad_norm": result.norm,
            "lr": result.lr,
            "tokens": (step + 1) * tokens,
            "tokens_per_second": tokens / result.seconds,
            "step_seconds": result.seconds,
        }
        if config.skip_outliers and not result.norm <= config.skip_outliers:
            row["skipped"] = True
            self.skipped += 1
        self._astray = 0 if math.isfinite(result.norm) else self._astray + 1
        if self._astray == ASTRAY:
            raise self._not_finite(step + 1, f"gradient norm in one of {ASTRAY} steps", result.norm)
        return row | engine.measures(row["tokens_per_second"]), result.stop

    def _not_finite(self, step: int, name: str, value: float, where: str = "") -> TrainingError:
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

    def _save(self, step: int) -> None:
        """Collective, like all that asks the engine."""
        if step == self.saved_step:
            return
        state = self.engine.state()

        def write() -> None:
            assert state is not None  # on rank 0
            checkpoint.save(
                self.checkpoints, step=step, optimizer=state, model=self.model_config, config=self.description,
                tokenizer=self.data.tokenizer, keep=self.config.keep,
                before=max(self.start, self.saved_step),
            )  # fmt: skip

        alone(self.comm, write)
        self.saved_step = step

    def _announce(self) -> None:
        config, model = self.config, self.model_config
        self.console.say(
            f"kos: {model.num_parameters():,} parameters ({model.num_hidden_layers} layers x {model.hidden_size}), "
            f"{self.data.describe()}, {self.comm.size} rank{'s' * (self.comm.size > 1)}, "
            f"{config.batch_size} x {config.seq_len} tokens a step"
        )
        self.console.say(self.engine.describe())
        if (trial := self.engine.trial()) is not None and self.start < config.steps:
            step, validation = trial
            every, steps = config.eval_every or config.steps, config.steps - self.start
            validations = (self.start == 0) + -(-config.steps // every) - self.start // every
            about = f"{steps} steps of {duration(step)}"
            if config.eval_batches:
                about += f", {validations} validations of {duration(validation)} (--eval-batches 0: none)"
            whole = steps * step + validations * validation
            self.console.say(f"about {duration(whole)} in all: {about}")

    def _conclude(self, step: int, stopped: bool) -> None:
        text, config = "", self.config
        if step == config.steps and config.sample_tokens and not stopped:
            next_logits, model = self.engine.sampler(), self.mesh.model

            def cut() -> bool:
                return any(model.comm.all_gather_bytes(b"!" * self.stop.asked)) if model.size > 1 else self.stop.asked

            if next_logits is not None and (model.size > 1 or self.comm.rank == 0):
                text = sample_text(
                    next_logits, self.model_config.max_position_embeddings, self.data.tokenizer, config.prompt,
                    config.sample_tokens, seed=config.seed, temperature=config.temperature, top_k=config.top_k, cut=cut,
                )  # fmt: skip
        say, out = self.console.say, self.out
        if self.skipped:
            say(f"{self.skipped} of {step - self.start} steps left out (--skip-outliers {self.config.skip_outliers:g})")
        if early := step < self.config.steps:
            say(f"stopped on request after step {step}; go on by: {commands.resume(out, self.comm.size)}")
        elif text:
            say(f"--- a sample ---\n{text}\n----------------")
        say(f"checkpoint: {self.checkpoints / f'step-{step}'}")
        say(f"metrics:    {out / 'metrics.jsonl'}")
        if not early:
            say(f"more text:  {commands.sample(out, self.config)}")
            say(f"more steps: {commands.more_steps(out, self.comm.size, self.config)}")


def _every(steps: int, step: int) -> bool:
    return steps > 0 and step % steps == 0


def _check_same_model(path: Path, theirs: LlamaConfig, ours: LlamaConfig) -> None:
    """CheckpointError naming the fields in which the two shapes differ; context and initial weights may."""
    free = {"max_position_embeddings", "initializer_range"}
    ours_values, theirs_values = ({"model_type": x.model_type, **dataclasses.asdict(x)} for x in (ours, theirs))
    differ = [name for name, value in ours_values.items() if name not in free and theirs_values[name] != value]
    if differ:
        expected = ", ".join(f"{name} {ours_values[name]}" for name in differ)
        got = ", ".join(str(theirs_values[name]) for name in differ)
        raise CheckpointError(f"{path}: expected the model of this run, {expected}, got {got}")
