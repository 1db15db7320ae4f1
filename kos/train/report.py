"""What a run reports: what it is, at its start; the metrics of its steps; at its end, where its results are and what to
type, or its error.

Commands are to be run in the folder where the run was started.
"""

from __future__ import annotations

import importlib.util
import math
import os
import shlex
import sys
from pathlib import Path
from typing import Any

from kos.comm.control import mpi_job
from kos.commands import mpirun, near, python, several_programs
from kos.errors import CudaError, KosError, TrainingError, plural
from kos.launcher import under_mpirun
from kos.train.checkpoint import BEST, adapter, dropout, extra_names
from kos.train.config import flag_of
from kos.train.config.flags import without_effect
from kos.train.config.options import TrainConfig
from kos.train.data.chat import read_chat_template
from kos.train.data.mixture import describe_passes
from kos.train.elastic import logged_epoch
from kos.train.folder import ADDRESS
from kos.train.generate import Sampling, continue_texts, prompt_ids
from kos.train.ops.fp8 import MULTIPLE
from kos.train.parallel.failures import on_every_rank
from kos.train.step import StepResult
from kos.train.tools import METRICS
from kos.train.tools.show import first_line

MANY_PASSES = 20
"""A fine-tuning run with more passes over its data warns.  Usual are 1 to 10 epochs; more may be intended."""

MUCH_WITHOUT_BEGINNING = 0.1
"""The share of counted tokens without the beginning of their document above which a run warns."""

NO_TARGETS = "the loss counts no token of the batch, so the weights stay as they are"


MOST_NOT_FINITE = 20
"""Steps in a row without a finite gradient that end a run: none of them has changed the weights, none after would."""


def announce(run: Any) -> None:
    """The model, the data, the ranks and the device. Collective."""
    config, model, parallel, say = run.config, run.model_config, run.device.step.parallel, run.console.say
    layers, epochs = plural(model.num_hidden_layers, "layer"), ""
    if config.epochs is not None:
        mixture = run.data.mixture
        what = plural(run.data.steps_per_epoch, "step") if mixture is None else next(iter(mixture.parts))
        epochs = f", {plural(config.epochs, 'epoch')} of {what}"
    say(
        f"kos: {model.num_parameters():,} parameters ({layers} x {model.hidden_size}), "
        f"{run.data.describe()}, {run.mesh.layout.describe()}"
        f"{', ZeRO-1' * parallel.sharded}{', held twice' * parallel.mirrored_shards}"
        f"{f', gradients sent as {parallel.compress}' * (parallel.residual is not None)}"
        f"{f' between {parallel.replicas.size // parallel.exact} hosts' * (parallel.exact > 1)}, "
        f"{config.batch_size} x {config.seq_len} tokens a step{epochs}"
    )
    _announce_frozen(run)
    if config.elastic is not None:
        ranks, joins = config.elastic.replace(":", " to "), f"--join {run.out / ADDRESS} or {run.comm.address}"
        say(f"--elastic: {ranks} ranks; others join with the flags of this run and {joins}")
        if run.comm.size > 1 and mpirun_ends_all():
            remedy = "with Open MPI 5, use mpirun --with-ft ulfm"
            run.console.warn(f"kos: --elastic: this mpirun ends all ranks when one is lost; {remedy}")
    elif run.options["elastic"] is not None:
        say("--elastic is for dp: in this layout a lost rank ends the run at the last checkpoint")
    if config.compress != "none" and parallel.residual is None:
        say(f"--compress {config.compress}: no two ranks have the same weights, so no gradients are sent")
    if config.grad_dtype != (given := run.options["grad_dtype"]):
        why = f"a rank adds up {len(run.device.micro_batches)} micro-batches of a step, which {given} would round"
        say(f"--grad-dtype {given}: gradients are {config.grad_dtype}, since {why}")
    if lines := "; ".join(filter(None, (run.data.trained_on, run.data.held_out))):
        say(lines)
    if run.loss is not None:
        no_graph = run.options["graph"] != run.config.graph
        say(f"the loss is that of the program{', so there is no CUDA graph' * no_graph}")
    if run.data.mixture is not None and run.comm.rank == 0:
        say(run.data.mixture.describe(config.steps, config.batch_size))
    if run.comm.rank == 0 and not run.custom_batches:
        if fit := run.data.describe_fit():
            say(fit)
        for part in run.data.parts:
            if (lack := part.without_beginning) > MUCH_WITHOUT_BEGINNING:
                how = "raise --seq-len" + ", or leave long ones out (--long-documents skip)" * bool(part.packing)
                what = f"{lack:.0%} of the counted tokens lack the beginning of their {part.what}"
                run.console.warn(f"kos: --data {part.name}: {what}: {how}")
        say(first_line(run.data, run.start))
    if run.data.note:
        say(run.data.note)
    say(run.device.describe())
    _report_settings(run)


def _announce_frozen(run: Any) -> None:
    """How much is trained, if it is not all, and what becomes of a pipeline's passes for gradients of weights."""
    config, model, say = run.config, run.model_config, run.console.say
    shapes = model.parameter_shapes()
    trained = sum(math.prod(shapes[name]) for group in config.trained_groups(model) for name in group.names)
    if (whole := model.num_parameters()) == trained:
        return
    adapters, lora = "", model.lora
    if lora is not None and run.base is not None:
        scale = f"{lora.alpha:g}{' (rslora)' * lora.rslora}"
        where = f" in layers {', '.join(map(str, lora.layers))}" * bool(lora.layers)
        adapters = f": adapters of rank {lora.rank}, alpha {scale}, of {', '.join(lora.targets)}{where}; the base is "
        adapters += f"{run.base['path']} ({run.base['sha256'][:12]})"
    say(f"{trained:,} of {whole:,} parameters are trained ({trained / whole:.2%}){adapters}")
    if config.pp > 1 and config.pp_schedule == "zero-bubble-v":
        before = "; gradients of adapters are computed in the passes before" * (lora is not None)
        say(f"--pp-schedule zero-bubble-v: passes for gradients of weights (W) leave out frozen matrices{before}")


def _report_settings(run: Any) -> None:
    """Report defaults that the user may not expect: those of --init-from, and a warm-up longer than the run."""
    config, steps, say = run.config, run.config.learning_rate().warmup_steps, run.console.say
    ignored = run.data.unused_settings
    if config.eval_batches and not (run.validates or run.custom_batches):
        ignored["eval_batches"] = "--hold-out 0"
    if useless := without_effect(config, run.options, ignored):
        say(f"without effect: {', '.join(useless)}")
    if run.start == 0 and config.init_from is not None:
        length = plural(config.steps, "step") if config.epochs is None else plural(config.epochs, "epoch")
        if config.epochs is None and not run.custom_batches and run.data.mixture is None:  # a mixture has more
            length += f" ({describe_passes(run.data.sequences_in(run.data.train), config.steps * config.batch_size)})"
        rates = f"{length}, learning rate {config.lr:g} after a warm-up of {plural(steps, 'step')}"
        context = f"{config.seq_len:,} of at most {run.model_config.max_position_embeddings:,} tokens a sequence"
        say(f"from the weights in {run.source}: {rates}, {context} (--epochs, --lr, --warmup-steps, --seq-len)")
        if config.epochs is None and not run.custom_batches and (passes := run.data.passes(config.steps)) > MANY_PASSES:
            what = f"with --steps {config.steps}, sequences are seen up to {passes:,.0f} times"
            run.console.warn(f"kos: {what}: a model that is fine-tuned may memorize them (--epochs)")
        if names := extra_names(run.extra):
            say(f"checkpoints also keep these files of {run.source}: {', '.join(names)}")
        if left_out := dropout(run.extra):
            say(f"training is without the dropout of {run.source}: {', '.join(left_out)}")
    if run.trains and steps > config.steps:
        reached = f"{config.learning_rate()(config.steps - 1):.2e} of {config.lr:.2e}"
        say(f"the warm-up of {steps} steps is longer than the run: the learning rate reaches {reached}")


def conclude(run: Any, text: str) -> None:
    """Where checkpoint and metrics are, the ``text`` sampled at the end, and what to type next."""
    say, out, config, step = run.console.say, run.out, run.config, run.steps_done
    if run.skipped:
        done = plural(step - run.start, "step")
        say(f"{len(run.skipped)} of {done} left out (--skip-outliers {config.skip_outliers:g})")
    if run.without_targets:
        say(f"{run.without_targets} of {plural(step - run.start, 'step')}: {NO_TARGETS}")
    if early := step < config.steps:
        why = "the batches ended" if run.ended else "stopped on request"
        if run.exhausted:
            without = plural(config.patience, "validation")
            why = f"{config.best_metric} has not fallen in {without} (--patience): stopped"
        say(f"{why} after step {step}{resuming(run)}")
    elif text:
        say(f"--- a sample ---\n{text}\n----------------")
    say(f"checkpoint: {run.checkpoints / f'step-{step}'}")
    if run.best is not None:
        say(f"best:       {run.checkpoints / BEST} ({config.best_metric} {run.best[1]:.4f} at step {run.best[0]})")
    say(f"metrics:    {out / METRICS}")
    if command := plot(out):
        say(f"plot:       {command}")
    if not early:
        say(f"chat:       {sample(out, config, 'chat')}" if _chats(run) else f"more text:  {sample(out, config)}")
        if step > run.start and not run.of_program:  # else config.json may be that of another run, of another layout
            say(f"more steps: {more_steps(out, run.comm.size, config)}")


def sample_of(run: Any) -> str:
    """Text from the trained model; "" on ranks that do not get it.  A text that outgrows the context gives no warning.
    """
    run.stop.plan, run.stop.advice = "ending the sample, all steps are saved", ""
    config, model, tokenizer = run.config, run.mesh.model_parallel, run.data.tokenizer
    context = run.model_config.max_position_embeddings
    if run.device.step.quantized and context > MULTIPLE:
        context -= context % MULTIPLE  # sequences are padded to it
    prompt = config.prompt or run.data.question(context // 2)
    ids = prompt_ids(tokenizer, prompt) if isinstance(prompt, str) else [*prompt]
    decoder = run.device.decoder(1, min(context, len(ids) + config.sample_tokens + 1))
    if decoder is None or (model.size == 1 and run.comm.rank > 0):
        return ""

    def stopped_by_any() -> bool:
        return any(model.comm.all_gather_bytes(b"!" * run.stop.requested)) if model.size > 1 else run.stop.requested

    how = Sampling(seed=config.seed, temperature=config.temperature, top_k=config.top_k)
    ends = [] if tokenizer.eos is None else [tokenizer.eos]
    pieces = continue_texts(
        decoder, context, tokenizer, [ids], config.sample_tokens, how, ends=ends,
        stopped=stopped_by_any, warns=False, tp=model,
    )  # fmt: skip
    return (prompt if isinstance(prompt, str) else tokenizer.decode(ids)) + "".join(piece for _, piece in pieces)


def resume(out: Path, ranks: int, *flags: str) -> str:
    """The command that continues from the newest checkpoint in ``out``, whose ``config.json`` has the settings.

    It is the command of each rank if mpirun has not started the ranks, or has started them as several programs.
    """
    words = [python(), "-m", "kos.train", "--config", str(out / "config.json"), "--resume", "auto", *flags]
    if _by_mpirun() and not several_programs():
        words = [*mpirun(ranks), *words]
    elif ranks > 1:
        return f"start the {ranks} ranks as before, with: {shlex.join(words)}"
    return shlex.join(words)


def resuming(run: Any) -> str:
    """How to resume the run, to be added to a line."""
    if run.of_program:
        return "; resume with resume='auto' in the program's TrainConfig"
    return f"; resume with: {resume(run.out, run.comm.size)}"


def mpirun_ends_all() -> bool:
    """Whether mpirun has started this rank, and ends all ranks when one is lost."""
    return _by_mpirun() and not mpi_job.fault_tolerant() and "--enable-recovery" not in mpirun(1)


def _by_mpirun() -> bool:
    by_srun = "SLURM_PROCID" in os.environ and "OMPI_COMM_WORLD_SIZE" not in os.environ
    return under_mpirun() and not by_srun


def more_steps(out: Path, ranks: int, config: TrainConfig) -> str:
    """The command for as many steps again. If the learning rate has decayed, it stays that of the last step. A warm-up
    continues."""
    rate, flags = config.learning_rate(), ["--steps", str(2 * config.steps)]
    if config.epochs is not None:
        flags = ["--epochs", str(2 * config.epochs)]
    if 0 < (last := rate(config.steps - 1)) < config.lr and config.steps >= rate.warmup_steps:
        flags += ["--schedule", "constant", "--lr", f"{last:g}", "--warmup-steps", "0"]
    return resume(out, ranks, *flags)


def _chats(run: Any) -> bool:
    """Whether the run trains on chats, and ``kos chat`` finds their template in its checkpoint."""
    if not any(part.what == "chat" for part in run.data.parts):
        return False
    folder = str(run.checkpoints / f"step-{run.steps_done}")
    return read_chat_template(adapter.tokenizer_folder(folder) or folder) is not None


def sample(out: Path, config: TrainConfig, command: str = "sample") -> str:
    """The command that samples text from the run in ``out``, or chats, with the settings of this run."""
    names = ("temperature", "top_k") if command == "chat" else ("prompt", "temperature", "top_k")
    asked = {name: getattr(config, name) for name in names}  # whose defaults are the same
    given = [(name, value) for name, value in asked.items() if value != TrainConfig.model_fields[name].default]
    flags = [f"{flag_of(name)}={value}" for name, value in given]  # the value may begin with a dash
    return shlex.join([*_kos_command(), command, str(out), *flags])


def plot(out: Path) -> str | None:
    """The command that plots the metrics of the run in ``out``; None without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        return None
    return shlex.join([*_kos_command(), "plot", str(out)])


def _kos_command() -> list[str]:
    """The command ``kos``: its script beside this Python, or the module if no script is installed."""
    script = Path(sys.executable).with_name("kos")
    return [near(script)] if sys.executable and script.exists() else [python(), "-m", "kos"]


# --- metrics and errors --------------------------------------------------------------------------------


def measure(run: Any, result: StepResult) -> dict[str, Any]:
    """The metrics of a step.  TrainingError if its loss or norm is not finite."""
    config, device, step = run.config, run.device, run.steps_done
    for name, value in (("loss", result.loss), ("gradient norm", result.norm)):
        if not math.isfinite(value) and not config.skip_outliers:
            tensor = device.not_finite(step)
            forward = ", but what the forward breaks is in all" if name == "loss" and config.dtype != "fp8" else ""
            where = f" (first in {tensor}{forward})" if tensor else ""
            raise not_finite(run, step + 1, name, value, where)
    tokens = run.data.tokens_in(step + 1)
    rate = (tokens - run.data.tokens_in(step)) / result.seconds
    row: dict[str, Any] = {
        "step": step + 1,
        "loss": result.loss,
        "grad_norm": result.norm,
        "lr": result.lr,
        "tokens": tokens,
        "tokens_per_second": rate,
        "step_seconds": result.seconds,
    }
    if run.data.mixture is not None:
        of_sources = run.data.mixture.tokens((step + 1) * config.batch_size)
        row |= {f"tokens/{name}": count for name, count in of_sources.items()}
    if config.skip_outliers and not result.norm <= config.skip_outliers:
        row["skipped"] = True
        run.skipped.add(step)
    if not result.counted:
        row["no_targets"] = True
        run.without_targets += 1
        if run.without_targets == 1:
            seen = plural(step + 1 - run.start, "step")
            run.console.warn(f"kos: step {step + 1}: {NO_TARGETS} (1 of {seen} so far; no_targets in {METRICS})")
    if math.isfinite(result.norm) or run.last_finite is None:
        run.last_finite = step if math.isfinite(result.norm) else step - 1
    if step - run.last_finite == MOST_NOT_FINITE:
        raise not_finite(run, step + 1, f"gradient norm in one of {MOST_NOT_FINITE} steps", result.norm)
    row |= device.measures(rate)
    if step == 0:
        row |= {key.replace("val_loss", "val_loss_before", 1): loss for key, loss in run.untrained.items()}
    if config.elastic is not None:
        row |= {"ranks": result.ranks, "epoch": result.epoch}
    return row


def interrupted(run: Any, error: KosError) -> KosError:
    """The error of a GPU, of other ranks or of files, with the step and the last checkpoint."""
    if run.epoch < 0:  # nothing is known yet of the run that it joins
        failure = type(error)(f"while joining the run at {run.config.join}: {error}")
        vars(failure).update(vars(error))  # such as ``ranks``
        return failure
    known = isinstance(error, CudaError) and hasattr(run, "device")  # else it could not be made again
    where = f" on {run.device.place}" if known else ""
    left, address = "there is no checkpoint yet", run.out / ADDRESS
    if run.config.elastic is not None and logged_epoch(run) > run.epoch:  # others continued, and perhaps saved
        left = f"join the run again with --join {address}" if address.is_file() else "others have ended the run"
    elif run.saved_step > 0:
        left = f"the last checkpoint, of step {run.saved_step}, is good"
        ranks, lost = run.comm.world_ranks, {*error.ranks, *error.unasked}
        lowest = not lost or ranks[run.comm.rank] == min(set(ranks) - lost, default=-1)  # it gives the advice
        if lowest and not run.stop.advised:
            left += resuming(run)
    elif run.start > 0:
        left = f"there is no checkpoint yet except the one from which the run started, {run.source}"
    left = "" if left in str(error) else f"; {left}"  # the error of another rank may end with it
    failure = type(error)(f"after step {run.steps_done}{where}: {error}{left}")
    vars(failure).update(vars(error))  # such as ``ranks``
    return failure


def not_finite(run: Any, step: int, name: str, value: float, where: str = "") -> TrainingError:
    """The error of a loss or norm that is not finite."""
    run.finish_save()
    saved = "the checkpoints before it are of finite weights, " if max(run.start, run.saved_step) > 0 else ""
    skip = ", --skip-outliers X leaves out such steps and those of a gradient norm over X"
    helps = f"{saved}a lower --lr or --grad-clip may help{'' if run.config.skip_outliers else skip}"
    return on_every_rank(TrainingError(f"step {step}: expected a finite {name}, got {value}{where}; {helps}"))
