"""The training loop: one optimizer step after another, evaluated, logged and saved.

Data flows one way: config -> data -> model -> gradients over the ranks -> optimizer. The batch of a step
is a pure function of (seed, step) and everything else that a step depends on is in the checkpoint, so a
resumed run continues bit for bit.
"""

from __future__ import annotations

import dataclasses
import fcntl
import logging
import math
import os
import shlex
import sys
import time
from functools import cached_property, partial
from pathlib import Path
from typing import IO, Any

import numpy as np

from kos.comm.communicator import Communicator
from kos.errors import CheckpointError, ConfigError, TrainingError
from kos.train import checkpoint, huggingface
from kos.train.config import TrainConfig
from kos.train.console import make_console
from kos.train.data import load_data
from kos.train.failures import same_on_all, together
from kos.train.folders import run_folder
from kos.train.machine import limit_threads, provenance
from kos.train.metrics import MetricsLog
from kos.train.model import Llama, LlamaConfig
from kos.train.ops import numpy as numpy_ops
from kos.train.optimizer import AdamW, Schedule, clip_coefficient, global_norm
from kos.train.parallel.data import DataParallel, deal
from kos.train.parameters import Parameters
from kos.train.sample import sample_text

_log = logging.getLogger(__name__)

EXACT = ("seed", "batch_size", "micro_batch_size", "seq_len", "deterministic")
"""Settings that a resumed run must keep to go on bit for bit."""


class Trainer:
    """A training run of ``config`` on the ranks of ``comm``. Everything up to the first step is in here."""

    def __init__(self, config: TrainConfig, comm: Communicator) -> None:
        self.comm = comm
        self.config = config = config.for_world(comm.size)
        limit_threads(comm, 1 if config.deterministic else None)
        self.data = together(comm, lambda: load_data(config))
        same_on_all(comm, self._facts())
        folder = together(comm, lambda: run_folder(config) if comm.rank == 0 else Path())
        self.out = Path(os.fsdecode(comm.all_gather_bytes(os.fsencode(folder))[0]))
        self.checkpoints = self.out / "checkpoints"
        found = together(comm, self._find_checkpoint)
        model_config = config.model_config_for(self.data.tokenizer.vocab_size)
        self.model = Llama(model_config, numpy_ops)
        shapes, groups = model_config.parameter_shapes(), model_config.fused_groups()
        self.weights = Parameters(shapes, groups=groups)
        self.gradients = self.weights.like()
        self.optimizer = AdamW(
            self.weights, betas=(config.beta1, config.beta2), eps=config.eps, weight_decay=config.weight_decay
        )
        self.schedule = Schedule(
            config.schedule, config.lr, config.min_lr, config.steps, config.warmup_steps, config.decay_steps
        )
        self.parallel = DataParallel(comm, self.gradients, deterministic=config.deterministic)
        assert config.micro_batch_size is not None  # for_world has chosen it
        self.rounds = deal(config.batch_size, config.micro_batch_size, comm.rank, comm.size)
        self.start = together(comm, lambda: self._fill_weights(found))
        self.start = int(comm.all_gather(np.array(self.start))[0])
        self.optimizer.step_count = self.start
        for state in (self.weights, self.optimizer.exp_avg, self.optimizer.exp_avg_sq):
            comm.broadcast(state.flat, 0)
        self.saved_step = self.start if found is not None and found.path.parent == self.checkpoints else -1
        self._lock: IO[str] | None = None
        self.metrics = together(comm, self._open_output)
        self.console = make_console(comm.rank, config.steps, self.start)
        self._has_saved = False
        self._stop_asked = False

    def _facts(self) -> dict[str, object]:
        """What must be the same on all ranks; paths may differ."""
        local = {"out", "resume", "init_from", "data", "tokenizer"}
        facts = {name: value for name, value in self.config.to_json().items() if name not in local}
        return {**facts, "data": f"{self.data.name} ({self.data.fingerprint[:12]})"}

    def _find_checkpoint(self) -> checkpoint.Checkpoint | None:
        """On rank 0, whose weights the others get: the checkpoint to go on from."""
        if self.config.resume is None or self.comm.rank != 0:
            return None
        if self.config.resume == "auto":
            return checkpoint.newest(self.checkpoints)
        return checkpoint.find(Path(self.config.resume))

    def _fill_weights(self, found: checkpoint.Checkpoint | None) -> int:
        """On rank 0, from a checkpoint, a Hugging Face folder or the seed; the step that they are of."""
        if self.comm.rank != 0:
            return 0
        if found is not None:
            _check_same_model(found.path, found.model_config(), self.model.config)
            self._compare_runs(found)
            found.load_weights(self.weights)
            found.load_optimizer(self.optimizer)
            return found.step
        if self.config.init_from is not None:
            source = Path(self.config.init_from)
            _check_same_model(source, huggingface.read_config(source), self.model.config)
            huggingface.read_weights(source, self.weights)
        else:
            self.model.config.init_weights(self.weights, self.config.seed)
        return 0

    def _compare_runs(self, found: checkpoint.Checkpoint) -> None:
        """Another tokenizer is refused; what else would break the promise to go on bit for bit is said."""
        if found.tokenizer() != self.data.tokenizer.to_json():
            ours = self.data.tokenizer.name
            raise CheckpointError(f"{found.path}: expected the tokenizer of this run, {ours}, got another")
        before, now = found.config, self.description
        changed = [name for name in EXACT if before.get("config", {}).get(name) != now["config"][name]]
        changed += ["data"] * (before.get("data_fingerprint") != now["data_fingerprint"])
        if changed:
            _log.warning("resuming with another %s: not the run that it would have been", ", ".join(changed))

    def _open_output(self) -> MetricsLog | None:
        if self.comm.rank != 0:
            return None
        try:
            if self.config.resume is None and checkpoint.latest(self.checkpoints) is not None:
                raise ConfigError(
                    f"--out {self.out}: expected a folder without checkpoints, or --resume auto to go on from "
                    "them, or another --out"
                )
            self.out.mkdir(parents=True, exist_ok=True)
            self._lock = open(self.out / ".lock", "w")  # noqa: SIM115 (held while the run writes here)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            checkpoint.write_json(self.out / "config.json", self.description)
        except BlockingIOError as error:
            raise ConfigError(f"--out {self.out}: expected a free folder, got one that a run is writing to") from error
        except OSError as error:
            raise ConfigError(f"--out {self.out}: expected a folder that can be written, got {error}") from error
        return MetricsLog(self.out / "metrics.jsonl", self.start)

    @cached_property
    def description(self) -> dict[str, Any]:
        """The resolved configuration and where it ran, for config.json and the checkpoints."""
        config = {**self.config.to_json(), "out": str(self.out)}
        return {"config": config, "data_fingerprint": self.data.fingerprint, **provenance(self.comm)}

    def run(self) -> None:
        """Train from ``start`` to ``steps``, or until a rank is asked to stop; then save, sample and say where."""
        config, comm = self.config, self.comm
        try:
            self._announce()
            if self.start == 0:
                self.console.say(f"validation loss before training: {self.evaluate():.4f}")
            step, stopped = self.start, False
            while step < config.steps and not stopped:
                row, stopped = self._step(step)
                step += 1
                last = stopped or step == config.steps
                if (config.eval_every and step % config.eval_every == 0) or step == config.steps:
                    row["val_loss"] = self.evaluate()
                self._record(row, log=step % config.log_every == 0 or last)
                if not last and config.save_every and step % config.save_every == 0:
                    together(comm, partial(self._save, step))
            together(comm, partial(self._save, step))
            self.console.close()
            self._conclude(step, stopped)
        finally:
            self.console.close()
            if self.metrics is not None:
                self.metrics.close()
            if self._lock is not None:
                self._lock.close()

    def _step(self, step: int) -> tuple[dict[str, Any], bool]:
        """One optimizer step; its row of metrics, and whether any rank was asked to stop."""
        config = self.config
        began = time.perf_counter()
        losses = [self._round(step, index) for index in range(len(self.rounds))]
        answers = self.comm.all_gather(np.array([self._stop_asked, *losses], np.float64))
        micro_batches = answers[:, 1:].size
        loss = math.fsum(answers[:, 1:].flat) / micro_batches
        norm = global_norm(self.gradients.flat) / micro_batches
        for name, value in (("loss", loss), ("gradient norm", norm)):
            if not math.isfinite(value):
                error = TrainingError(
                    f"step {step + 1}: expected a finite {name}, got {value}; the checkpoints before it are good, "
                    "a lower --lr or --grad-clip may help"
                )
                error.on_every_rank = True
                raise error
        lr = self.schedule(step)
        self.optimizer.step(self.gradients, lr, clip_coefficient(norm, config.grad_clip) / micro_batches)
        seconds = time.perf_counter() - began
        tokens_per_step = config.batch_size * config.seq_len
        row = {
            "step": step + 1,
            "loss": loss,
            "grad_norm": norm,
            "lr": lr,
            "tokens": (step + 1) * tokens_per_step,
            "tokens_per_second": tokens_per_step / seconds,
            "step_seconds": seconds,
        }
        return row, bool(answers[:, 0].any())

    def _round(self, step: int, index: int) -> float:
        """Forward and backward of this rank's micro-batch of round ``index``; its mean loss."""
        last = index + 1 == len(self.rounds)
        tokens, targets = self.data.rows(step, self.rounds[index])
        loss = self.model.loss_and_gradients(
            self.weights,
            tokens,
            targets,
            self.gradients,
            accumulate=self.parallel.accumulates(index),
            on_gradient=self.parallel.gradient_ready if last else None,
        )
        self.parallel.finish_round(index, len(self.rounds))
        return loss

    def evaluate(self) -> float:
        """The mean loss over the validation windows, the same on every rank and for any number of ranks."""
        batches = self.data.val_batches()
        mine = np.full(-(-len(batches) // self.comm.size), np.nan)
        for slot, index in enumerate(range(self.comm.rank, len(batches), self.comm.size)):
            mine[slot] = self.model.loss(self.weights, *batches[index])
        everyone = self.comm.all_gather(mine).T.ravel()[: len(batches)]
        return math.fsum(everyone) / len(batches)

    def _record(self, row: dict[str, Any], *, log: bool) -> None:
        self.console.step(row, log=log)
        if self.metrics is not None:
            self.metrics.write(row)

    def _save(self, step: int) -> None:
        if self.comm.rank != 0 or step == self.saved_step:
            return
        checkpoint.save(
            self.checkpoints,
            step=step,
            weights=self.weights,
            optimizer=self.optimizer,
            model=self.model.config,
            tokenizer=self.data.tokenizer.to_json(),
            config=self.description,
            keep=self.config.keep,
            went_on_from=None if self._has_saved else self.start,
        )
        self.saved_step, self._has_saved = step, True

    def _announce(self) -> None:
        config, model = self.config, self.model.config
        self.console.say(
            f"kos: {model.num_parameters():,} parameters ({model.num_hidden_layers} layers x {model.hidden_size}), "
            f"{self.data.describe()}, {self.comm.size} rank{'s' * (self.comm.size > 1)}, "
            f"{config.batch_size} x {config.seq_len} tokens a step"
        )
        if self.start:
            done = " (nothing to do: more --steps go on from there)" * (self.start >= config.steps)
            self.console.say(f"resuming after step {self.start}{done}")

    def _conclude(self, step: int, stopped: bool) -> None:
        if self.comm.rank != 0:
            return
        say, out, shown = self.console.say, self.out, shlex.quote(str(self.out))
        if stopped:
            say(f"stopped on request after step {step}; go on with the same settings and --out {shown} --resume auto")
        elif self.config.sample_tokens:
            text = sample_text(
                self.model,
                self.weights,
                self.data.tokenizer,
                self.config.prompt,
                self.config.sample_tokens,
                seed=self.config.seed,
                temperature=self.config.temperature,
                top_k=self.config.top_k,
            )
            say(f"--- a sample ---\n{text}\n----------------")
        say(f"checkpoint: {self.checkpoints / f'step-{step}'}")
        say(f"metrics:    {out / 'metrics.jsonl'}")
        if not stopped:
            say(f"more text:  {_python()} -m kos.train.sample {shown}")
            say(f"more steps: the same settings and --out {shown} --resume auto --steps {2 * step}")

    def ask_stop(self) -> None:
        """Save and end after the step that is under way, on all ranks; safe to call in a signal handler."""
        self._stop_asked = True


def _check_same_model(path: Path, theirs: LlamaConfig, ours: LlamaConfig) -> None:
    """CheckpointError naming the fields in which the two shapes differ; context and initial weights may."""
    free = {"max_position_embeddings", "initializer_range"}
    ours_values, theirs_values = dataclasses.asdict(ours), dataclasses.asdict(theirs)
    differ = [name for name, value in ours_values.items() if name not in free and theirs_values[name] != value]
    if differ:
        expected = ", ".join(f"{name} {ours_values[name]}" for name in differ)
        got = ", ".join(str(theirs_values[name]) for name in differ)
        raise CheckpointError(f"{path}: expected the model of this run, {expected}, got {got}")


def _python() -> str:
    """This interpreter as a user would type it here."""
    near = os.path.relpath(sys.executable)
    return sys.executable if near.startswith("..") else near
