"""``TrainConfig``: the settings of a run in one typed, frozen object, and what follows from them.

Modules of models and optimizers are imported where they are used, because the command line needs only the settings.
"""

from __future__ import annotations

import fnmatch
import logging
import math
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from kos.errors import CheckpointError, ConfigError, SettingError
from kos.train.config import HOLD_OUT, OPTIMIZERS, by_source, flag_of, flatten, not_of, preset_values, suggestion
from kos.train.config.fields import Fields
from kos.train.model import one_line, option_of
from kos.train.model.shape import ModelShape

if TYPE_CHECKING:
    from kos.memory.sharded import Sharded
    from kos.train.model.llama import LlamaConfig, Local
    from kos.train.ops.numpy_optimizer import LearningRate
    from kos.train.optim import Group, UpdateRule

DETERMINISTIC_MICRO_BATCHES = 8
"""``--deterministic`` splits the batch into at least this many micro-batches: any of 1, 2, 4, 8 ranks fit."""

MICRO_BATCH_TOKENS = 2048
"""Most tokens in a micro-batch whose size was not given: its activations stay in a core's caches (4 to 8% faster than
16,384 tokens on the tiny preset), and their memory is bounded."""

CUDA_MICRO_BATCH_TOKENS = 32_768
"""The same on a GPU, whose matrix products gain nothing from more rows."""

REMOVED_KEYS: dict[str, tuple[Any, str]] = {
    "encoding": ("utf-8", "files in UTF-8, as iconv writes them"),
}
"""Keys that files of kos 0.3 may have: the default of each, and what is expected in place of any other value."""

Layer = tuple[str, Mapping[str, Any]]
"""Where settings come from, and the settings.  Later layers override earlier ones."""

FINE_TUNING_LR = 2e-5
"""The peak learning rate with ``--init-from``.  Source: Stanford Alpaca (tatsu-lab/stanford_alpaca)."""

ADAPTERS_LR = 2e-4
"""This rate with ``--lora``.  Source: QLoRA (Dettmers et al. 2023, arXiv:2305.14314), for models of up to 13b."""

FINE_TUNING_SEQ_LEN = 1024
"""The largest default of ``--seq-len`` with ``--init-from``. A model's context may be 131,072 tokens, for which few
machines have enough memory. The default is the same on all machines, so that results are, too."""

FINE_TUNING_WARMUP = 0.03
"""The warm-up as a fraction of the steps with ``--init-from``.  Source: Stanford Alpaca (tatsu-lab/stanford_alpaca)."""

FINE_TUNING_EPOCHS = 3
"""The number of epochs with ``--init-from``.  Source: TRL (``SFTConfig.num_train_epochs``)."""


_log = logging.getLogger(__name__)


class TrainConfig(Fields):
    """All settings of a run, and what follows from them.  Build one with ``parse`` or ``from_preset``."""

    def check_losses(self, losses: Collection[str]) -> None:
        """ConfigError if ``keep_best`` or ``patience`` needs a validation loss that is none of ``losses``."""
        if self.best_metric is not None and self.best_metric not in losses:
            flag = flag_of("keep_best" if self.keep_best else "patience")
            expected = f"above 0, or --val-data, for {self.best_metric}"
            raise SettingError("--hold-out", expected, f"{self.held_out:g}", flag, also=["val_data"])

    @classmethod
    def from_preset(cls, preset: str = "tiny", **changes: Any) -> TrainConfig:
        """A preset with some values changed; ``model={...}`` changes only the keys it names.

        With ``init_from``, the model has the shape of that folder, and the defaults are those of the command.  Raises
        ConfigError for an unknown key or preset, a value of the wrong type or out of range, or another shape.
        """
        if changes.get("epochs") is not None and changes.keys() >= TrainConfig.model_fields.keys() - {"preset"}:
            del changes["steps"]  # those of its epochs, in what ``to_json`` gives
        return configure(preset, with_model([("argument", {"preset": preset, **changes})]))

    def to_json(self) -> dict[str, Any]:
        """Plain values for a JSON file: every field."""
        return self.model_dump(mode="json")

    def check_sources(self, names: Iterable[str]) -> None:
        """ConfigError if ``text_field`` names a source that is none of ``names``."""
        known = [*dict.fromkeys(names)]
        if unknown := by_source(self.text_field).keys() - {"", *known}:
            raise SettingError("--text-field", f"SOURCE=VALUE of {' or '.join(known)}", min(unknown))

    def of_sources(self, *names: str | None) -> dict[str, Any]:
        """``text_field``, without the values of other sources than ``names``."""
        each = {name: value for name, value in by_source(self.text_field).items() if name in ("", *names)}
        return {"text_field": tuple(f"{name}={value}" if name else value for name, value in each.items())}

    @property
    def held_out(self) -> float:
        """The fraction of the data that is held out for validation."""
        return (HOLD_OUT if self.eval_batches else 0.0) if self.hold_out is None else self.hold_out

    def with_data_settings(self, theirs: Mapping[str, Any] | None) -> TrainConfig:
        """This configuration, where ``theirs``, the settings of a resumed run, replace settings that are None."""
        known = {"hold_out": self.held_out, **(theirs or {})}
        return self.model_copy(update={name: value for name, value in known.items() if getattr(self, name) is None})

    @property
    def least_ranks(self) -> int:
        """Fewer of them end an elastic run."""
        return int((self.elastic or "1").partition(":")[0])

    def most_ranks(self, size: int) -> int:
        """How many may take part in a run that began, or begins, with ``size`` of them."""
        return int((self.elastic or "").partition(":")[2] or size)

    def check_ranks(self, size: int) -> None:
        """ConfigError unless an elastic run may begin with so many ranks."""
        least, most = self.least_ranks, self.most_ranks(max(size, self.least_ranks))
        if self.elastic is not None and not least <= size <= most:
            raise SettingError("--elastic", f"{least} to {most} ranks", size)

    def for_world(self, size: int, device: str = "cpu") -> TrainConfig:
        """This configuration as ``size`` data-parallel ranks run it on ``device``: its dtypes and micro-batch size.

        Each step, a rank takes ``batch_size / (micro_batch_size * size)`` micro-batches.  A size that was
        not given becomes the largest divisor that fits: of ``batch_size / size``, and of at most
        ``MICRO_BATCH_TOKENS`` tokens.  With ``deterministic`` it depends on the batch alone: the largest
        divisor of ``batch_size`` that leaves ``DETERMINISTIC_MICRO_BATCHES`` micro-batches.  A pipeline has two
        micro-batches a stage at least, where the batch allows it.
        With ``elastic`` it leaves one for each of the most ranks, which need not divide them evenly.

        ConfigError: the batch cannot be split evenly; an option that the device does not have.
        """
        on_cpu = device == "cpu"
        dtype = self.dtype if self.dtype != "auto" else "float32" if on_cpu else "bfloat16"
        if on_cpu and not self.graph:
            raise SettingError("--no-graph", "a GPU", "the CPU").about("graph")
        if on_cpu and dtype == "bfloat16":
            raise SettingError("--dtype", "float32 or fp8 on the CPU", dtype)
        for name in ("master_weights", "grad_dtype"):
            if (got := getattr(self, name)) != "float32" and (on_cpu or dtype == "float32"):
                where = " on the CPU" * (dtype == "fp8")
                raise SettingError(flag_of(name), f"float32 with --dtype {dtype}{where}", got, also=["dtype"])
        if self.grad_dtype != "float32" and self.deterministic:
            expected = "float32 with --deterministic"
            raise SettingError("--grad-dtype", expected, self.grad_dtype, also=["deterministic"])
        if self.compress != "none" and (self.deterministic or (self.optimizer == "muon" and self.zero)):
            others = ["--deterministic"] if self.deterministic else ["--optimizer muon", "--zero 1"]
            raise SettingError("--compress", f"none with {' and '.join(others)}", self.compress, also=others)
        if self.fp8_head and (dtype != "fp8" or self.lora is not None):
            no_lora = "no --lora, which freezes the head", f"--lora {self.lora}"
            expected, got = ("--dtype fp8", dtype) if dtype != "fp8" else no_lora
            raise SettingError("--fp8-head", expected, got, also=["dtype", "lora"])
        batch, micro = self.batch_size, self.micro_batch_size
        ranks = "ranks" if self.tp * self.pp * self.cp == 1 else "data-parallel ranks"
        most, even = self.most_ranks(size), self.elastic is None or ranks != "ranks"
        if micro is None:
            whole = batch if self.deterministic or not even else batch // size
            parts = DETERMINISTIC_MICRO_BATCHES if self.deterministic else 1 if self.pp == 1 else 2 * self.pp
            parts = parts if even else max(parts, most)
            limit = min(whole // parts, (MICRO_BATCH_TOKENS if on_cpu else CUDA_MICRO_BATCH_TOKENS) // self.seq_len)
            whole = 1 if even and batch % size else whole
            micro = next((n for n in range(limit, 1, -1) if whole % n == 0), 1)
        if not even and (batch % micro or batch // micro < most):
            expected = f"a multiple of --micro-batch-size {micro} with at least {most} micro-batches (--elastic)"
            raise SettingError("--batch-size", expected, batch, also=["micro_batch_size", "elastic"])
        if even and batch % (micro * size):
            why = f"--micro-batch-size {micro} × {size} {ranks}" if micro > 1 else ranks
            raise SettingError("--batch-size", f"a multiple of {micro * size}", batch, why, also=["micro_batch_size"])
        grad_dtype = self.grad_dtype if batch == micro * size else "float32"
        chosen = {"micro_batch_size": micro, "device": device, "dtype": dtype, "grad_dtype": grad_dtype}
        chosen |= {"elastic": None if even else f"{self.least_ranks}:{most}"}
        return self.model_copy(update=chosen)

    @property
    def compute_dtype(self) -> str:
        """Of activations, and of the weights that passes read: what fp8 leaves is bfloat16, on CPUs float32."""
        if self.dtype != "fp8":
            return self.dtype
        return "float32" if self.device == "cpu" else "bfloat16"

    @property
    def master_dtype(self) -> str:
        """Of the weights that the optimizer updates."""
        return self.compute_dtype if self.master_weights == "none" else self.master_weights

    def learning_rate(self) -> LearningRate:
        """The schedule that gives the learning rate of each step."""
        from kos.train.ops.numpy_optimizer import LearningRate

        decay = round(self.decay_fraction * self.steps)
        last = self.lr / 10 if self.min_lr is None else self.min_lr
        warmup = math.ceil(FINE_TUNING_WARMUP * self.steps) if self.warmup_steps is None else self.warmup_steps
        if self.schedule == "linear":  # which decays from the end of the warm-up on
            return LearningRate("wsd", self.lr, last, self.steps, warmup, max(0, self.steps - warmup))
        return LearningRate(self.schedule, self.lr, last, self.steps, warmup, decay)

    def update_rule(self) -> UpdateRule:
        """What the optimizer does with a weight that no group has a rule for."""
        return OPTIMIZERS[self.optimizer].rule(self)

    def is_frozen(self, name: str) -> bool:
        """Whether a tensor is not trained."""
        from kos.train.layers.lora import is_adapter

        return (self.lora is not None and not is_adapter(name)) or any(matching([name], x) for x in self.freeze)

    def trained(self, model: LlamaConfig, parts: Sequence[Local]) -> dict[str, Sharded]:
        """The tensors that are trained, and where a rank's parts of them lie."""
        return {name: at for name, at in model.placements(*parts).items() if not self.is_frozen(name)}

    def all_groups(self, model: LlamaConfig, *parts: Local) -> list[Group]:
        """The parameter groups of a rank's parts of ``model``, or of the whole."""
        from kos.train.optim import Group

        groups = OPTIMIZERS[self.optimizer].groups(self, model, parts)
        groups = [part for each in groups for part in self._split(each)] if self.groups else groups
        frozen = [name for name in model.parameter_shapes(*parts) if self.is_frozen(name)]
        return [*groups, Group(frozen, frozen=True)] if frozen or self.lora or self.freeze else groups

    def _split(self, group: Group) -> Iterator[Group]:
        """A group in parts with the settings of the first of ``[[groups]]`` that a tensor matches, and the rest."""
        left = list(group.names)
        for each in self.groups if not group.frozen else ():
            names = matching(left, each.pattern)
            left = [name for name in left if name not in names]
            scale = group.lr_scale if each.lr is None else each.lr / self.lr
            decay = group.decay if each.weight_decay is None else each.weight_decay
            yield group._replace(names=names, lr_scale=scale, decay=decay)
        yield group._replace(names=left)

    def trained_groups(self, model: LlamaConfig, *parts: Local) -> list[Group]:
        """Those of ``all_groups`` that are trained."""
        return [group for group in self.all_groups(model, *parts) if not group.frozen]

    def describe_groups(self, model: LlamaConfig) -> dict[str, Any]:
        """For config.json and checkpoints: which tensors are frozen, if any. These have no axes of reduction."""
        from kos.train.optim import frozen_in
        from kos.train.parallel.mesh import DENSE

        frozen = frozen_in(self.all_groups(model))
        groups = [([*DENSE], model.parameter_shapes().keys() - frozen), ([], frozen)]
        return {"groups": [{"axes": axes, "tensors": sorted(of)} for axes, of in groups]} if frozen else {}

    def state_of(self, model: LlamaConfig) -> dict[str, set[str]]:
        """What the optimizer keeps of the whole ``model``, by name, and of which tensors."""
        from kos.train.optim import state_of

        spans = dict.fromkeys(model.parameter_shapes(), slice(0, 0))
        kept = state_of(self.update_rule(), self.trained_groups(model), spans, [])
        return {name: each.names for name, each in kept.items()}

    def model_config_for(self, vocab_size: int) -> LlamaConfig:
        """The model's shape; ``vocab_size`` is the tokenizer's, the least that the model may have."""
        from kos.train.model.families import resolve

        if self.model.vocab_size is not None and self.model.vocab_size < vocab_size:
            where = "--vocab-size" if self.init_from is None else f"{Path(self.init_from, 'config.json')}: vocab_size"
            expected = f"at least the tokenizer's {vocab_size}"
            raise SettingError(where, expected, self.model.vocab_size).about("vocab_size", "tokenizer")
        model = resolve(self.model, vocab_size, self.seq_len)
        if self.lora is not None:
            alpha = self.lora_alpha or 2.0 * self.lora
            model = model.adapted(self.lora, alpha, self.lora_targets, self.rslora, self.lora_layers)
        names = model.parameter_shapes()
        for where, patterns in ("--freeze", self.freeze), ("groups", [each.pattern for each in self.groups]):
            if unknown := [pattern for pattern in patterns if not matching(names, pattern)]:
                raise SettingError(where, f"a pattern that matches a tensor, such as {next(iter(names))}", unknown[0])
        return model


def matching(names: Iterable[str], pattern: str) -> list[str]:
    """The names that match: * stands for any characters, ? for one, [ab] for one of these."""
    return [name for name in names if fnmatch.fnmatchcase(name, pattern)]


KEYS = {
    **{name: field for name, field in TrainConfig.model_fields.items() if name != "model"},
    **{f"model.{name}": field for name, field in ModelShape.model_fields.items()},
}
"""Every key of a configuration; those of the nested section as ``model.hidden_size``."""


def with_model(layers: Sequence[Layer]) -> list[Layer]:
    """``layers`` and, if they have ``init_from``, another layer above them: the shape of the model in that folder.

    Raises ConfigError as ``model_of``.
    """
    merged = {key: value for _, values in layers for key, value in values.items()}
    folder, resumes = merged.get("init_from"), "model" in merged and merged.get("resume") is not None
    if not isinstance(folder, str) or (resumes and not os.path.exists(folder)):  # the run's config.json has the model
        return [*layers]
    return [*layers, model_of(Path(folder), layers)]


def defaults(layers: Sequence[Layer]) -> list[Layer]:
    """If ``layers`` have ``init_from``, a layer of defaults that replaces those of the preset for random weights."""
    merged = {key: value for source, values in layers for key, value in flatten(source, values).items()}
    if merged.get("init_from") is None:
        return []
    context, steps, epochs = (merged.get(name) for name in ("model.max_position_embeddings", "steps", "epochs"))
    values: dict[str, Any] = {"lr": FINE_TUNING_LR if merged.get("lora") is None else ADAPTERS_LR}
    if steps is None and epochs is None:
        values["epochs"] = epochs = FINE_TUNING_EPOCHS
    if epochs is not None:  # the number of steps is known once the data is read
        values["warmup_steps"] = None
    elif isinstance(steps, int):  # else refused by ``build``
        values["warmup_steps"] = math.ceil(FINE_TUNING_WARMUP * steps)
    if isinstance(context, int):
        values["seq_len"] = min(context, FINE_TUNING_SEQ_LEN)
    return [("preset of fine-tuning", values)]


def model_of(folder: Path, layers: Sequence[Layer]) -> Layer:
    """The model of a Hugging Face folder as a layer above ``layers``, which may leave its shape open.

    Raises ConfigError if a layer sets a shape that differs from that of the model in the folder. A layer may set the
    scale of the initial weights, and for a LLaMA the length of the context.
    """
    from kos.train.model import peft
    from kos.train.model.huggingface import read_config

    run = folder / "checkpoints"
    if os.path.isdir(run):  # else read_config says why not
        raise ConfigError(f"--init-from: expected a folder of weights, such as {run / 'step-N'}, got the run {folder}")
    adapters = dict[str, Any]()
    try:
        if peft.is_folder(folder):
            peft.model_of(folder)  # checks the targets
            lora, folder = peft.read(folder, trains=True)
            adapters = dict(zip(("lora", "lora_alpha", "lora_targets", "rslora", "lora_layers"), lora, strict=True))
        model = read_config(folder)
    except CheckpointError as error:
        raise ConfigError(f"--init-from: {error}") from None
    shape: dict[str, Any] = dict(model)
    del shape["lora"]
    shape["rope_scaling"] = model.rope_scaling and model.rope_scaling.model_dump()
    given = {key: (source, got) for source, values in layers for key, got in flatten(source, values).items()}
    for key, (source, got) in given.items():
        if got is not None and key in adapters and (tuple(got) if isinstance(got, list) else got) != adapters[key]:
            where = flag_of(key) if source == "flags" else f"{source}: {key}"
            raise ConfigError(f"{where}: expected {adapters[key]}, as in the adapters of --init-from, got {got}")
        name = key.removeprefix("model.")
        if name not in shape or got is None:
            continue
        expected, got = shape[name], tuple(got) if isinstance(got, list) else got  # JSON has no tuples
        if name in model.may_differ:
            del shape[name]
        elif ({**expected, **got} if isinstance(expected, dict) and isinstance(got, Mapping) else got) != expected:
            where = flag_of(key) if source == "flags" else f"{source}: {key}"
            unset = option_of(ModelShape.model_fields[name]).unset
            wanted = unset or "none" if expected is None else expected
            raise ConfigError(f"{where}: expected {wanted}, which the model in {folder} has, got {got}")
    return str(folder / "config.json"), {"model": shape, **adapters}


def configure(preset: Any, layers: Sequence[Layer]) -> TrainConfig:
    """The configuration of ``layers`` above a preset.  Raises as ``build``.

    If ``layers`` have ``init_from``, they also have the shape of its model (``with_model``).
    """
    first = (f"preset {preset}", preset_values(preset))
    return build([first, *defaults(layers), *layers])


def build(layers: Sequence[Layer]) -> TrainConfig:
    """Merge layers (where they come from, nested values), later ones over earlier ones, and validate.

    ConfigError: an unknown key or a refused value, steps and epochs in one layer, an option of another optimizer; names
    the layer that set it.
    """
    from kos.train.model.families import FAMILIES

    merged: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for source, values in layers:
        flat = flatten(source, values)
        if flat.get("steps") is not None:
            if flat.get("epochs") is not None:
                where = "--epochs" if source == "flags" else f"{source}: epochs"
                raise ConfigError(f"{where}: expected either epochs or steps, got {flat['epochs']} and {flat['steps']}")
            flat["epochs"] = None
        elif flat.get("epochs", 0) is None:  # not set: the default with ``init_from`` stays
            del flat["epochs"]
        merged |= flat
        sources |= dict.fromkeys(flat, source)

    labels = {key: flag_of(key) for key in KEYS}
    labels |= {key: f"{at}: {key}" for key, at in sources.items() if at != "flags" and not at.startswith("preset")}
    optimizer = merged.get("optimizer", KEYS["optimizer"].default)
    for key in sorted(not_of(optimizer) & merged.keys()):
        if sources[key].startswith("preset") or (sources[key] != "flags" and merged[key] == KEYS[key].default):
            continue
        if sources.get("optimizer") != "flags" or sources[key] == "flags":
            raise ConfigError(f"{labels[key]}: expected none with --optimizer {optimizer}, got {merged[key]}")
        _log.warning("%s: %s is ignored: --optimizer %s does not take it", labels[key], merged.pop(key), optimizer)
    for name in getattr(FAMILIES.get(str(merged.get("model.model_type"))), "fixed", ()):
        if sources.get(key := f"model.{name}", "").startswith("preset"):
            del merged[key]
    for key, (default, expected) in REMOVED_KEYS.items():
        if (value := merged.pop(key, default)) != default:
            raise SettingError(labels[key], expected, value)
    nested: dict[str, Any] = {"model": {}}
    for key, value in merged.items():
        section, _, name = key.rpartition(".")
        (nested["model"] if section else nested)[name] = value
    try:
        return TrainConfig.model_validate(nested)
    except ValidationError as error:
        raise ConfigError(one_line(error, labels, suggestion)) from None
