"""Checks before a run resumes or takes weights: errors, warnings about other results, and the residuals.

A residual is the compression error of gradients so far (``--compress``).  Each replica has its own.  A replica is one
of the ranks of dp and cp, which hold the same weights.  The files ``residual-*.safetensors`` hold whole tensors; those
of the first replica are named ``residual.0.NAME``.  Only the sum over the replicas matters, so a run with another
number of replicas splits the sum among them.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kos.commands import near
from kos.errors import CheckpointError, ConfigError
from kos.train.checkpoint import MANIFEST, Checkpoint, adapter, latest
from kos.train.checkpoint import find as find_checkpoint
from kos.train.checkpoint.huggingface import TensorFiles
from kos.train.checkpoint.state import RESIDUAL, residual_shapes
from kos.train.config import flatten, of_0_2, weighted
from kos.train.config.options import KEYS, TrainConfig
from kos.train.data.packing import FILE
from kos.train.data.tokenizers import NumberTokenizer, Tokenizer, has_tokenizer, make_tokenizer
from kos.train.model import Changes, option_of, peft
from kos.train.model.families import FAMILIES
from kos.train.model.huggingface import whole
from kos.train.model.llama import LlamaConfig
from kos.train.ops.numpy_optimizer import LearningRate
from kos.train.ops.parameters import Shape
from kos.train.optim import frozen_in
from kos.train.parallel.fixed_order import ORDER
from kos.train.parallel.mesh import AXES, DENSE

_log = logging.getLogger(__name__)


def find(config: TrainConfig, checkpoints: Path, show: Callable[[str, float], object]) -> Checkpoint | None:
    """The checkpoint that ``--resume`` names, with ``auto`` the newest in ``checkpoints``.  None if there is none."""
    found = None
    if config.resume == "auto":
        found = latest(checkpoints, show=show)
    elif config.resume is not None:
        try:
            found = find_checkpoint(Path(config.resume), show=show)
        except CheckpointError as error:
            kind = CheckpointError if os.path.exists(config.resume) else ConfigError
            raise kind(f"--resume: {error}").about("resume") from error
    if found is not None and (version := of_0_2(found.config)):
        how = f"a new run with --init-from {found.path} takes its weights"
        raise CheckpointError(f"{found.path}: expected a run of kos 0.3 or later, got one of {version}; {how}")
    return found


def data_settings(about: Mapping[str, Any]) -> dict[str, Any]:
    """The settings by which a run reads its data, from its description in config.json or in a checkpoint."""
    theirs = about.get("config", {}) | about.get("derived", {})
    return {name: theirs[name] for name in ("fit", "hold_out", "template_date") if name in theirs}


class Residuals:
    """The residual of replica ``rank`` of ``ranks``, computed from those of ``saved`` replicas in a checkpoint.

    Each host has ``local`` neighbouring replicas.  They share the residuals of ``local`` saved replicas: each of them
    reads the sum over these, for the part of the tensors that it keeps.  Gradients are sums over the micro-batches of a
    step.  A run with ``scale`` times as many micro-batches therefore needs residuals that are ``scale`` times as large.
    """

    def __init__(self, files: TensorFiles, saved: int, rank: int, ranks: int, scale: float, local: int = 1) -> None:
        self._files, self.saved, self._scale = files, saved, np.float32(scale)
        self._own = [each for each in range(saved) if each % ranks // local == rank // local]

    def read(self, name: str, index: tuple[slice, ...] = ()) -> np.ndarray:
        """A tensor of the residual, or a slice of it: the sum over the saved replicas that this one takes over."""
        terms = [self._files.read(f"{RESIDUAL}.{replica}.{name}", index) for replica in self._own or [0]]
        total = terms[0] * (self._scale if self._own else 0)
        for term in terms[1:]:
            total += term * self._scale
        return np.asarray(total)


def saved_residuals(
    path: Path, shapes: Mapping[str, Shape], config: TrainConfig, rank: int, ranks: int, local: int
) -> Residuals | None:
    """The residuals in a checkpoint of a model of these shapes, for a run of ``config``; None if it has none."""
    with whole(path):
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        files = [name for name in manifest["files"] if name.startswith(RESIDUAL)]
        if not files:
            return None
        saved = math.prod(manifest["layout"][axis] for axis in DENSE)
        theirs = manifest["config"]["config"] | manifest["config"]["derived"]
        batch, micro = theirs["batch_size"], theirs["micro_batch_size"]
        assert config.micro_batch_size is not None
        scale = config.batch_size * micro / (batch * config.micro_batch_size)
    named = {name: shape for replica in range(saved) for name, shape in residual_shapes(replica, shapes).items()}
    return Residuals(TensorFiles(path, files, named), saved, rank, ranks, scale, local)


def warn_of_residuals(path: Path, found: Residuals | None, config: TrainConfig, ranks: int) -> None:
    """Log a warning unless each of the ``ranks`` replicas gets its own residual from the checkpoint at ``path``."""
    saved, keeps = 0 if found is None else found.saved, config.compress != "none" and ranks > 1
    if saved and not keeps:
        why = "--compress is none" if config.compress == "none" else "one rank sends no gradients"
        _log.warning("%s: what compressed gradients of %d ranks have lost is left out: %s", path, saved, why)
    elif keeps and not saved:
        _log.warning("%s: expected residuals of compressed gradients, got none: they begin as zeros", path)
    elif keeps and saved != ranks:
        _log.warning("%s: the residuals of %d ranks are shared out over %d; their sum stays", path, saved, ranks)


def warn_of_updates(found: Checkpoint) -> int:
    """The number of updates to assume for a checkpoint that does not store it: all steps, as its run counted.

    Logs a warning if steps may have been skipped.
    """
    if found.config.get("config", {}).get("skip_outliers"):
        steps = "steps that were skipped count as updates in the bias correction of AdamW, as they did in kos 0.3"
        _log.warning("%s: expected the number of updates, got none (kos 0.3): %s", found.path, steps)
    return found.step


def check_model(path: Path, theirs: LlamaConfig, ours: LlamaConfig) -> None:
    """Raise CheckpointError if the shapes differ in fields that must be equal; the error names these fields.

    ``path`` is where the weights of the shape ``theirs`` are, and ``ours`` is the shape of the run.
    """
    ours_values, theirs_values = map(dict, (ours, theirs))
    fixed = [name for name in ours_values if name not in ours.may_differ]
    if differ := [name for name in fixed if theirs_values[name] != ours_values[name]]:
        expected = ", ".join(f"{name} {'none' if (x := ours_values[name]) is None else x}" for name in differ)
        got = ", ".join(str(theirs_values[name]) for name in differ)
        begun = path.parent.parent / "config.json"  # where a run keeps what it was begun with
        way_out = f"; to resume it as it was begun: --config {near(begun)}" if begun.is_file() else ""
        raise CheckpointError(f"{path}: expected the model of this run, {expected}, got {got}{way_out}")


def check_tokenizer(source: Path, ours: Tokenizer) -> None:
    """Raise CheckpointError if the weights have another tokenizer: token numbers would mean other text."""
    if not has_tokenizer(source) or ours.kind == NumberTokenizer.kind:
        return
    theirs = make_tokenizer(str(source))
    if not ours.is_like(theirs):
        other = f"{theirs.name} (see --tokenizer)"
        got = other if theirs.name != ours.name else "another of that name (--tokenizer, --data)"
        expected = f"expected the tokenizer of this run, {ours.name}"
        raise CheckpointError(f"{source}: {expected}, got {got}").about("tokenizer", "data")


def check_optimizer(found: Checkpoint, config: TrainConfig) -> None:
    """Raise CheckpointError if the state in a checkpoint is that of another optimizer."""
    if (theirs := found.config.get("config", {}).get("optimizer", "adamw")) != config.optimizer:
        raise CheckpointError(
            f"{found.path}: expected the state of --optimizer {config.optimizer}, got that of {theirs}; "
            f"a new run with --init-from {found.path} takes its weights alone"
        ).about("optimizer")


def check_frozen(found: Checkpoint, config: TrainConfig, model: LlamaConfig) -> None:
    """Raise CheckpointError if a checkpoint lacks the state of a tensor, because other tensors were frozen then."""
    with whole(found.path):
        saved, ours = found.config.get("groups", []), frozen_in(config.all_groups(model))
        theirs = {name for group in saved if not group["axes"] for name in group["tensors"]}
    if theirs != ours:
        expected, got = ("frozen" if min(theirs ^ ours) in each else "trained" for each in (ours, theirs))
        raise CheckpointError(
            f"{found.path}: expected a run in which {min(theirs ^ ours)} is {expected}, got one in which it is {got}; "
            f"a new run with --init-from {found.path} takes its weights alone"
        )


def check_adapters(found: Checkpoint, config: TrainConfig, model: LlamaConfig, base: Mapping[str, str] | None) -> None:
    """Raise CheckpointError if a checkpoint has other adapters than ``model``, none where it has some, or another base.
    """
    theirs = peft.read(found.path, has_base=False).lora if peft.is_folder(found.path) else None
    ours = model.lora and model.lora._replace(targets=tuple(sorted(model.lora.targets)))
    if theirs != ours:
        expected, got = (
            "all weights" if each is None
            else f"--lora {each.rank} --lora-alpha {each.alpha:g} --lora-targets {','.join(each.targets)}"
            f"{' --rslora' * each.rslora}{f' --lora-layers {str(each.layers)[1:-1]}' * bool(each.layers)}"
            for each in (ours, theirs)
        )  # fmt: skip
        raise CheckpointError(f"{found.path}: expected a run that trains {expected}, got one with {got}").about("lora")
    if base is not None:
        adapter.check_base(found.path, found.config, base["sha256"], base["path"])


def check_data(found: Checkpoint, config: TrainConfig, fingerprint: str) -> None:
    """Raise CheckpointError if a run resumes in the midst of the order of other data, which it has not trained on yet.

    That is with ``--epochs``, or a mixture of other sources.  The weights of a mixture may change.
    """
    theirs, named = found.config.get("data_fingerprint", fingerprint), found.config.get("config", {}).get("data")
    mixed = not isinstance(config.data, str) and [*weighted(config.data)] != [*weighted(named or ())]
    if theirs == fingerprint or (config.epochs is None and not mixed):
        return
    raise CheckpointError(
        f"--data {config.data}: expected the data of the run that is resumed, {named} ({theirs[:12]}), got "
        f"others ({fingerprint[:12]}), of which {found.step} steps would count as done; "
        f"a new run with --init-from {found.path} begins them with these weights"
    ).about("data", "epochs")


def check_packing(found: Checkpoint, config: TrainConfig, now: Mapping[str, Any]) -> None:
    """Raise CheckpointError if a run resumes in the midst of the order of sequences that are packed by another plan.

    That is with ``--epochs``, or in a mixture; else log a warning.  ``now`` describes this run. If its data or settings
    differ, ``warn_of_changes`` says so.
    """
    same = "fit", "seed", "seq_len", "long_documents"
    theirs = found.config.get("config", {}) | found.config.get("derived", {})
    changed = [name for name in same if (theirs.get(name) or "cut") != (getattr(config, name) or "cut")]
    if changed or found.config.get("data_fingerprint") != now["data_fingerprint"]:
        return
    if found.config.get("packing") == now.get("packing"):
        return
    text = f"expected the plan that packs the sequences of its run ({found.path.parent.parent / FILE}), got another"
    if config.epochs is None and isinstance(config.data, str):
        _log.warning("%s: %s: results will differ from those of an uninterrupted run", found.path, text)
        return
    raise CheckpointError(
        f"{found.path}: {text}, of which {found.step} steps would count as done; resume it in its run's folder, or "
        f"begin a new run with --init-from {found.path}"
    ).about("resume")


def check_order(found: Checkpoint, config: TrainConfig) -> None:
    """Raise CheckpointError if a deterministic run on CPUs began with another order of sums."""
    theirs = found.config.get("config", {}) | found.config.get("derived", {})
    if not (config.deterministic and theirs.get("deterministic")) or {config.device, theirs.get("device")} != {"cpu"}:
        return
    if (order := found.config.get("order_of_sums", 1)) != ORDER:
        raise CheckpointError(
            f"{found.path}: --deterministic: expected a run whose sums on CPUs have order {ORDER}, that of this "
            f"version of kos, got order {order}: results would differ from those of an uninterrupted run; "
            "resume it with the version that began it, or without --deterministic"
        ).about("deterministic")


def warn_of_changes(found: Checkpoint, config: TrainConfig, now: Mapping[str, Any]) -> None:
    """Log warnings about settings that change the results of a run resumed from ``found``.

    ``now`` describes this run, and ``found.config`` describes the run that wrote the checkpoint.  A learning rate that
    jumps gives a warning too, since this is seldom intended.
    """
    before, other_layout = found.config, _layout_in(found.config) != _layout_in(now)
    theirs, ours = _settings(before, now), _settings(now, now)
    if other_layout:  # their defaults depend on the layout
        options = before.get("config", {}), now["config"]
        same = (name for name in ("micro_batch_size", "grad_dtype") if options[0].get(name) == options[1][name])
        ours |= {name: theirs[name] for name in same}

    def other(what: Changes) -> list[str]:
        """The names of the options that have other values now, of those whose ``changes`` is ``what``."""
        names = [key for key, field in KEYS.items() if option_of(field).changes == what and key in ours]
        return [key.rpartition(".")[2] for key in names if theirs[key] != ours[key]]

    was = config.model_copy(update={key: theirs[key] for key in KEYS if option_of(KEYS[key]).changes == "rate"})
    rates = was.learning_rate(), config.learning_rate()
    changed = other("bits") + (other("rate") if _differ(*rates, found.step) else [])
    other_order = (theirs.get("epochs") is None) != (config.epochs is None)
    changed += ["order of sequences (--epochs)"] * (other_order and isinstance(config.data, str))
    other_hosts = not other_layout and before.get("local_replicas", 1) != now["local_replicas"]
    changed += ["number of ranks per host"] * other_hosts
    changed += ["loss"] * (before.get("own_loss", False) != now.get("own_loss", False))
    changed += ["data"] * (before.get("data_fingerprint") != now["data_fingerprint"])
    if ours["device"] == "cuda" and set(before.get("gpus") or now["gpus"]) != set(now["gpus"]):
        changed.append("GPU")
    if now["ranks"] > 1 and not other_layout and not config.deterministic:
        changed += other("order")
    new, end = rates[1](found.step), min(found.step, was.steps - 1)
    old = min((rates[0](step) for step in (found.step, end)), key=lambda rate: abs(rate - new))  # or of its last step
    if found.step < config.steps and max(old, new) > 1.1 * min(old, new):
        jumps = f"{'rises' if new > old else 'falls'} from {old:.2e} to {new:.2e} at step {found.step + 1}"
        even = f": --schedule constant --lr {old:g} --warmup-steps 0 keeps it even" if old else ""
        _log.warning("the learning rate %s%s", jumps, even)
    if changed:
        what, differ = ", ".join(changed), "its results will differ from those of an uninterrupted run"
        _log.warning("resuming with another %s: %s", what, differ)
    elif other_layout and not config.deterministic:
        differ = "its results will equal those of an uninterrupted run up to rounding, not bit for bit"
        if config.compress != "none":
            differ = "its results will differ from those of an uninterrupted run"
        _log.warning("resuming in another layout: %s", differ)


def _settings(about: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of the run that ``about`` describes, by the names of ``KEYS``.

    Of the model, only settings that may differ between a run and its checkpoint.
    """
    given = flatten("", about.get("config", {}) | about.get("derived", {}))
    given["backend"] = about.get("backend", now["backend"])  # the one that was chosen
    may_differ = {f"model.{name}" for name in FAMILIES[now["config"]["model"]["model_type"]].may_differ}
    names = [key for key in KEYS if not key.startswith("model.") or key in may_differ]
    defaults = {key: [*x] if isinstance(x := KEYS[key].get_default(), tuple) else x for key in names}  # as in JSON
    values = {key: given.get(key, defaults[key]) for key in names}
    return {key: option_of(KEYS[key]).same(value) for key, value in values.items()}


def _differ(old: LearningRate, new: LearningRate, step: int) -> bool:
    """Whether two schedules differ from ``step`` on.  Compares about a thousand of these steps, and the last."""
    left = range(step, min(old.steps, new.steps))
    return any(old(at) != new(at) for at in (*left[:: max(1, len(left) // 1000)], *left[-1:]))


def _layout_in(description: Mapping[str, Any]) -> list[Any]:
    """Ranks, tp, pp and cp of a run."""
    options = description.get("config", {})
    return [description.get("ranks"), *(options.get(axis, 1) for axis in AXES if axis != "dp")]
