"""The settings of a run: one typed, frozen configuration.

``TrainConfig`` is the only list of the trainer's options: the command-line flags (``kos.train.config.flags``)
and the keys of a ``--config`` file are made from its fields.  Wrong values end as ``ConfigError``, one
line that names the flag or the file's key, what was expected and what was got.

The command line needs only the fields.  Modules of models and optimizers are therefore imported where they are used.
"""

from __future__ import annotations

import fnmatch
import logging
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import ValidationError, ValidationInfo, field_validator, model_validator

from kos.errors import ConfigError, SettingError
from kos.train.config import (
    HOLD_OUT,
    KINDS,
    GroupSection,
    by_source,
    flag_of,
    flatten,
    preset_values,
    suggestion,
    weighted,
)
from kos.train.config.fine_tuning import FINE_TUNING_WARMUP, Layer, defaults, with_model
from kos.train.config.optimizers import OPTIMIZERS, OptimizerName, not_of
from kos.train.model import Section, one_line, option
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

_log = logging.getLogger(__name__)


def no_validation(config: Any) -> str:
    return "--eval-batches 0" * (not config.eval_batches)


def no_sample(config: Any) -> str:
    return "--sample-tokens 0" * (config.sample_tokens == 0)


class TrainConfig(Section, use_attribute_docstrings=True):
    """All settings of a run.  Build one with ``parse`` or ``from_preset``. The text of a field is that of its flag."""

    preset: str = option("tiny", changes="nothing", title="Model")
    """Start from the settings of a preset: tiny, 124m, gpt2-124m, 1b or 8b."""
    init_from: str | None = option(
        None, "the preset's shape, random weights", changes="nothing", metavar="DIR", path=True
    )
    """Start from the shape and weights of a Hugging Face folder."""

    data: str | tuple[str, ...] = option("stdlib", changes="data", description="Train on stdlib (the sources of "
        f"Python's standard library) or the PATH of a file or folder: {KINDS}. To mix several, repeat the flag with "
        "PATH:WEIGHT; weights are shares of the tokens.",
        title="Data", metavar="NAME|PATH[:WEIGHT]", several=True, path=True)  # fmt: skip
    val_data: str | None = option(
        None, "a part that is held out of --data", changes="data", min_length=1, metavar="NAME|PATH", path=True,
        idle=no_validation,
    )  # fmt: skip
    """Validate on other data: the same NAMEs and PATHs as --data."""
    hold_out: float | None = option(
        None, "0.1, or 0 with --eval-batches 0", changes="data", ge=0, lt=1,
        idle=lambda c: "--val-data" * (c.val_data is not None),
    )  # fmt: skip
    """Fraction of --data that is held out for validation: the end of a file, or some files of a folder. It has no
    effect if the names of files say what is held out."""
    eval_data: tuple[str, ...] = option(
        (), "none", changes="nothing", metavar="NAME=PATH", several=True, idle=no_validation
    )
    """Also validate on the data at PATH, whose loss is val_loss/NAME; repeat the flag for several."""
    text_field: str | tuple[str, ...] | None = option(
        None, "text", changes="data", min_length=1, metavar="[SOURCE=]NAME", several=True
    )
    """Field or column that holds the text, or the messages of a chat; SOURCE=NAME is that of one source. Repeat the
    flag for several sources."""
    token_dtype: Literal["uint8", "uint16", "uint32", "int32", "int64"] | None = option(
        None, "llm.c's header", changes="data"
    )
    """Type of the numbers in .bin files without a header, such as uint16 for those of nanoGPT."""
    loss_on: Literal["completion", "all"] = option("completion", changes="data")
    """Tokens that the loss counts: completion (completions of prompts, turns of an assistant, and what the masks of
    token files select) or all."""
    split_turns: bool = option(False, changes="data")
    """Make a document of each answer of a chat, together with the messages before it. Use it for templates that drop
    the thinking of earlier turns."""
    allow_lost_content: bool = option(False, changes="nothing")
    """Accept chats whose template leaves out content of a message, such as the thinking of an answer."""
    tokenizer: str = option("auto", changes="data", min_length=1, metavar="NAME|PATH", path=True)
    """Split text into bytes, or the tokens of a Hugging Face tokenizer.json at PATH. auto takes the tokenizer of
    --init-from, else bytes; for token files it takes plain numbers."""
    split_special_tokens: bool = option(True, changes="data")
    """Read special tokens that are spelled out in the data, such as <|endoftext|>, as text."""
    documents: Literal["pack", "cross"] = option("pack")
    """Keep attention within each document of a sequence (pack), or let it cross documents (cross)."""
    fit: Literal["whole", "cut"] | None = option(
        None, "whole for chats and for prompts with completions, cut for text", same=lambda value: value or "cut"
    )
    """Pack whole documents into sequences (whole), or cut the data into sequences wherever they end (cut)."""
    long_documents: Literal["cut", "skip"] = option(
        "cut", idle=lambda c: "--fit cut" * (c.fit != "whole" and isinstance(c.data, str))
    )
    """With --fit whole, cut documents that are longer than a sequence into pieces (cut), or leave them out (skip)."""
    seq_len: int = option(ge=1)
    """Tokens in a sequence; with --init-from the model's context, up to 1024."""
    batch_size: int = option(ge=1, le=1_000_000)
    """Sequences in a step, over all ranks."""

    device: Literal["auto", "cpu", "cuda"] = option("auto", title="Ranks and layout")
    """Compute on cpu or cuda; auto takes cuda if every rank has its own GPU."""
    dp: int | None = option(None, "ranks / (tp × pp × cp)", changes="layout", ge=1)
    """Data-parallel ranks."""
    tp: int = option(1, changes="layout", ge=1)
    """Tensor-parallel ranks, which split each layer."""
    pp: int = option(1, changes="layout", ge=1)
    """Pipeline-parallel ranks, which split the list of layers."""
    cp: int = option(1, changes="layout", ge=1)
    """Context-parallel ranks, which split each sequence."""
    zero: int = option(0, changes="order", ge=0)
    """Split the optimizer's state over the data-parallel ranks (ZeRO-1): 1, or 0."""
    backend: Literal["auto", "mpi", "tcp", "nccl", "peer", "mock"] = option("auto", changes="order")
    """Run collectives over mpi, tcp, nccl, peer or mock (one process); auto takes the fastest that works."""

    elastic: str | None = option(
        None, "a lost rank ends the run", changes="order", metavar="MIN[:MAX]", same=lambda value: value is None
    )
    """Go on without ranks that are lost or leave, and with ranks that --join, as long as there are at least MIN (1) and
    at most MAX ranks (as many as at the start). Works with data parallelism only."""
    join: str | None = option(None, "start a run", changes="nothing", min_length=1, metavar="ADDRESS|FILE")
    """Join the elastic run at HOST:PORT, or at the address in FILE (the run writes OUT/address). Pass the flags of the
    run too."""

    steps: int = option(changes="rate", ge=1, lt=2**63, title="Length and output")
    """Optimizer steps of the whole run, on sequences drawn at random."""
    epochs: int | None = option(None, "none", changes="rate", ge=1)
    """Instead of --steps: train N times on each sequence of the data, every time in another random order; in a mixture,
    on each sequence of the first source. It is 3 with --init-from and without --steps."""
    out: Path | None = option(
        None, "the first free of runs/PRESET, runs/PRESET-2, …; with --resume auto the last one used",
        changes="nothing", strict=False,
    )  # fmt: skip
    """Folder of metrics and checkpoints."""
    resume: str | None = option(None, "start a new run", changes="nothing", min_length=1, metavar="DIR|auto")
    """Resume from the checkpoint in DIR; auto takes the newest complete one of the run."""

    optimizer: OptimizerName = option("adamw", changes="state", title="Optimizer")
    """Update all weights by adamw; or, with muon, the matrices of layers by Muon and all other weights by AdamW."""
    lr: float = option(changes="rate", gt=0)
    """Peak learning rate; 2e-5 with --init-from."""
    muon_lr: float | None = option(None, "--lr", gt=0)
    """Peak learning rate of Muon's matrices, on the same schedule."""
    momentum: float = option(0.95, ge=0, lt=1)
    """Muon's momentum (Nesterov's)."""
    min_lr: float | None = option(
        None, "--lr / 10", changes="rate", ge=0, idle=lambda c: "--schedule constant" * (c.schedule == "constant")
    )
    """Learning rate to which the schedule decays. It would be reached in the step after the last one."""
    schedule: Literal["cosine", "linear", "wsd", "constant"] = option("cosine", changes="rate")
    """Learning rate after the warm-up: cosine, linear, wsd (stable, then a linear decay) or constant."""
    warmup_steps: int | None = option(0, "3% of the steps", changes="rate", ge=0, lt=2**63)
    """Steps of linear warm-up; 3% of the steps with --init-from."""
    decay_fraction: float = option(
        0.2, changes="rate", ge=0, le=1, idle=lambda c: f"--schedule {c.schedule}" * (c.schedule != "wsd")
    )
    """Part of --steps over which wsd decays."""
    weight_decay: float = option(0.1, ge=0)
    """Decoupled weight decay of matrices."""
    beta1: float = option(0.9, ge=0, lt=1)
    """AdamW's beta1."""
    beta2: float = option(0.95, ge=0, lt=1)
    """AdamW's beta2."""
    eps: float = option(1e-8, gt=0)
    """AdamW's epsilon."""
    grad_clip: float = option(1.0, ge=0)
    """Largest global gradient norm; 0 turns clipping off."""
    skip_outliers: float = option(0.0, ge=0)
    """Skip steps whose gradient norm is above X or not finite; 0 ends the run if the norm is not finite."""

    lora: int | None = option(None, "train all weights", changes="state", ge=1, title="Adapters and frozen weights")
    """Train adapters of rank N (LoRA) of the layers' matrices, and freeze the model of --init-from."""
    lora_alpha: float | None = option(None, "2 × --lora", changes="state", gt=0)
    """What an adapter adds is multiplied by X / rank."""
    lora_targets: tuple[str, ...] = option((), "all matrices of layers", changes="state", several=True)
    """Matrices that have adapters, such as q_proj,v_proj; repeat the flag, or separate names by commas."""
    freeze: tuple[str, ...] = option((), "none", changes="state", metavar="PATTERN", several=True)
    """Do not train tensors whose names match PATTERN, such as 'model.layers.[01].*'; repeat the flag for several."""
    groups: tuple[GroupSection, ...] = ()

    eval_every: int = option(100, changes="nothing", ge=0, title="Validation and sample")
    """Steps between validations; 0 validates before and after training only."""
    eval_batches: int = option(8, changes="nothing", ge=0)
    """Batches of a validation, of up to --batch-size sequences; 0 turns it off."""
    patience: int = option(0, changes="nothing", ge=0)
    """Stop after N validations in a row in which the metric of --keep-best (val_loss) has not fallen; 0 never does."""
    sample_tokens: int = option(200, changes="nothing", ge=0)
    """Tokens of text generated at the end; 0 generates none."""
    prompt: str = option(
        "", "none; for chats, one of them up to its first answer", changes="nothing", metavar="TEXT", idle=no_sample
    )
    """Text that the sample continues."""
    temperature: float = option(0.8, changes="nothing", ge=0, idle=no_sample)
    """Temperature of the sample; 0 takes the most likely token."""
    top_k: int = option(40, changes="nothing", ge=0, idle=no_sample)
    """Sample among the N most likely tokens; 0 samples among all."""

    dtype: Literal["auto", "float32", "bfloat16", "fp8"] = option("auto", title="Precision")
    """Compute in float32, bfloat16 or fp8 (matmuls of layers in 8 bits, all else in bfloat16); auto takes bfloat16 on
    GPUs, and float32 on CPUs. CPUs emulate fp8."""
    fp8_head: bool = option(False)
    """With --dtype fp8, compute the matmuls of the output head in 8 bits too. The effect on losses was not measured."""
    master_weights: Literal["float32", "none"] = option("float32")
    """Weights that the optimizer updates on GPUs: float32, or none for bfloat16 weights with stochastic rounding."""
    grad_dtype: Literal["float32", "bfloat16"] = option("float32")
    """Gradients on GPUs, in memory and between ranks: float32, or bfloat16 for half the bytes. If a rank has several
    micro-batches, gradients are float32, because sums in bfloat16 would lose digits; the run then says so."""
    compress: Literal["none", "fp8", "int8", "int4"] = option("none")
    """Send gradients to other ranks as fp8, int8 or int4, with error feedback, or without compression (none). On
    several hosts, ranks first add gradients exactly within each host, and compress only what leaves a host."""
    deterministic: bool = option(False)
    """Give the same bits for any number of ranks, in any layout. Steps take longer. On GPUs, --tp needs
    --deterministic-parts too."""
    deterministic_parts: int | None = option(None, "on GPUs 1, on CPUs the most that the model allows", ge=1, le=8)
    """With --deterministic, add each sum over features in N parts: 1, 2, 4 or 8, a multiple of --tp. Runs with the same
    N have the same bits. On GPUs, steps take longer with a larger N."""
    seed: int = option(1337, ge=0, lt=2**63)
    """Seed of initial weights, batches and samples."""

    save_every: int = option(200, changes="nothing", ge=0, title="Checkpoints")
    """Steps between checkpoints; 0 saves at the end only."""
    keep: int = option(2, changes="nothing", ge=1)
    """How many of the newest checkpoints to keep."""
    keep_best: str | None = option(
        None, "none, or val_loss with --patience", changes="nothing", min_length=1, metavar="METRIC"
    )
    """Also keep the checkpoint with the lowest val_loss or val_loss/NAME, as checkpoints/best. It is saved right after
    the validation that finds it."""
    save_async: bool = option(False, changes="nothing")
    """Continue training while a checkpoint is written. This takes host memory for a copy of the rank's shard."""

    publish: str | None = option(None, "none", changes="nothing", min_length=1, metavar="HOST:PORT")
    """Publish the weights at HOST:PORT for servers, which pull them with kos.transfer. This takes memory for two more
    copies of the rank's shard of the weights; on GPUs, the copies have the dtype in which the model computes."""
    publish_every: int = option(1, changes="nothing", ge=1)
    """Steps between published versions. The initial weights and those after --steps are published too."""
    publish_merged: bool = option(False, changes="nothing")
    """With --lora, publish all weights, with the adapters added, under the names of the base. This takes memory for
    three more copies of the rank's shard of the adapted weights, and two of the others. Otherwise, only the adapters
    are published."""

    log_every: int = option(1, changes="nothing", ge=1, title="Logging")
    """Steps between printed lines."""
    tracker: tuple[Literal["tensorboard", "wandb"], ...] = option(
        (), "metrics.jsonl only", changes="nothing", several=True
    )
    """Also send metrics to tensorboard or wandb; repeat the flag, or separate names by commas."""

    micro_batch_size: int | None = option(None, "up to 2,048 tokens, on GPUs 32,768", ge=1, title="Performance")
    """Sequences that a rank computes at once."""
    recompute: Literal["none", "norms", "block"] = option("none", changes="nothing")
    """What the backward computes again to save memory: nothing (none), norms and SwiGLU (norms), or whole layers
    (block)."""
    pp_schedule: Literal["1f1b", "zero-bubble-v"] = option(
        "1f1b", changes="order", idle=lambda c: "--pp 1" * (c.pp == 1)
    )
    """Order of a pipeline's forwards and backwards: 1f1b or zero-bubble-v."""
    graph: bool = option(True, changes="nothing")
    """Replay each step as one CUDA graph, on GPUs."""
    profile: int = option(0, changes="nothing", ge=0)
    """Run 3 steps, time the next N, print a table, write a Perfetto trace to --out, and end; 0 trains."""

    show_data: int = option(0, changes="nothing", ge=0, title="Debugging")
    """Only print the first N sequences (of each source) as text, with «» around what the loss counts; 0 trains."""
    check_replicas: int = option(0, changes="nothing", ge=0)
    """Every N steps, compare the copies of weights and optimizer state that several ranks hold, and end the run if any
    bits differ; 0 does not compare."""
    debug: bool = option(False, changes="nothing")
    """Show tracebacks of errors."""
    timeout: float = option(300.0, changes="nothing", gt=0)
    """Seconds that a rank waits for the others before it reports them."""

    model: ModelShape

    @field_validator("model")
    @classmethod
    def _shape(cls, given: ModelShape) -> ModelShape:
        from kos.train.model.families import resolve

        resolve(given, 2**63, 1)  # refuses a shape that cannot be
        return given

    @field_validator("data", mode="before")
    @classmethod
    def _sources(cls, given: Any) -> Any:
        names = tuple(given) if isinstance(given, list | tuple) else (given,)
        if wrong := [name for name in names if not (isinstance(name, str) and name)] or [given] * (not names):
            raise SettingError("data", "names or paths of at least 1 character", repr(wrong[0]))
        return names if len(names) > 1 and weighted(names) else names[0]

    @field_validator("eval_data", mode="before")
    @classmethod
    def _named(cls, given: Any) -> tuple[str, ...]:
        several = tuple(given) if isinstance(given, list | tuple) else (given,)
        names = [str(each).partition("=")[0] for each in several]
        for each, name in zip(several, names, strict=True):
            if not (isinstance(each, str) and re.fullmatch(r"[^=/\s]+=.+", each, re.DOTALL)) or names.count(name) > 1:
                raise SettingError("eval_data", "NAME=PATH, each NAME once", repr(each))
        return several

    @field_validator("freeze", "groups", mode="before")
    @classmethod
    def _several(cls, given: Any) -> Any:
        return tuple(given) if isinstance(given, list) else (given,) if isinstance(given, str) else given

    @field_validator("tracker", "lora_targets", mode="before")
    @classmethod
    def _names(cls, given: Any) -> tuple[str, ...]:
        words = given if isinstance(given, list | tuple) else [given]
        return tuple(dict.fromkeys(name.strip() for word in words for name in str(word).split(",")))

    @field_validator("text_field", mode="before")
    @classmethod
    def _by_source(cls, given: Any, about: ValidationInfo) -> Any:
        values = given if isinstance(given, list | tuple) else [given]
        if empty := [each for each in values if isinstance(each, str) and not all(each.rsplit("=", 1))]:
            expected = "a value or SOURCE=VALUE, neither of them empty"
            raise SettingError(str(about.field_name), expected, repr(empty[0]))
        if all(isinstance(each, str) for each in values) and len(by_source(values)) < len(values):
            raise SettingError(str(about.field_name), "one value, or SOURCE=VALUE once a source", " and ".join(values))
        return (tuple(given) if len(given) > 1 else given[0]) if isinstance(given, list | tuple) and given else given

    @model_validator(mode="after")
    def _check(self) -> TrainConfig:
        if self.min_lr is not None and self.min_lr > self.lr and self.schedule != "constant":
            raise SettingError("min_lr", f"at most {self.lr:g}", f"{self.min_lr:g}", "lr")
        if self.zero > 1:
            raise SettingError("zero", "1 (the optimizer's state) or 0; --tp and --pp split weights too", self.zero)
        if self.elastic is not None:
            match = re.fullmatch(r"([1-9]\d*)(?::([1-9]\d*))?", self.elastic)
            if match is None or int(match[1]) > int(match[2] or match[1]):
                raise SettingError("elastic", "MIN or MIN:MAX ranks, such as 2:4", self.elastic)
            if self.compress != "none":
                raise SettingError("compress", "none", self.compress, "elastic")
            if self.optimizer == "muon" and self.zero:
                raise SettingError("zero", "0 with muon", self.zero, "elastic")
            if self.publish is not None:
                raise SettingError("publish", "none", self.publish, "elastic")
        self._check_best()
        if self.lora is None and (given := [x for x in ("lora_alpha", "lora_targets") if getattr(self, x)]):
            raise SettingError(given[0], "none without adapters (--lora)", getattr(self, given[0]), "lora")
        if self.publish_every != 1 and self.publish is None:
            raise SettingError("publish_every", "1 without --publish", self.publish_every)
        none = [flag for flag, given in (("--lora", self.lora), ("--publish", self.publish)) if given is None]
        if self.publish_merged and none:
            raise SettingError("publish_merged", f"false without {' and '.join(none)}", True)
        if self.lora is not None and self.optimizer != "adamw":
            raise SettingError("optimizer", "adamw with adapters (--lora)", self.optimizer, "lora")
        longest = self.model.max_position_embeddings
        if longest is not None and self.seq_len > longest:
            raise SettingError("seq_len", f"at most {longest}", self.seq_len, "max_position_embeddings")
        return self

    def _check_best(self) -> None:
        sources = {} if isinstance(self.data, str) else weighted(self.data)
        if both := sources.keys() & self.eval_sources:
            raise SettingError("eval_data", "another NAME than a source of --data", min(both))
        named = [*(sources if self.val_data is None else ()), *self.eval_sources]
        metrics = ["val_loss", *(f"val_loss/{name}" for name in named)]
        if self.best_metric is None:
            return
        if self.best_metric not in metrics:
            raise SettingError("keep_best", f"one of {', '.join(metrics)}", self.keep_best)
        flag = "patience" if self.patience else "keep_best"
        for name in ["eval_batches", *["eval_every"] * bool(self.patience)]:
            if not getattr(self, name):
                raise SettingError(name, "at least 1", 0, flag)
        if self.elastic is not None:
            raise SettingError(flag, "none", self.patience or self.keep_best, "elastic")

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
    def eval_sources(self) -> dict[str, str]:
        """The paths of ``eval_data`` by their names."""
        return dict((each.partition("=")[::2]) for each in self.eval_data)

    @property
    def best_metric(self) -> str | None:
        """The metric of ``keep_best`` and ``patience``; None without both."""
        return self.keep_best or ("val_loss" if self.patience else None)

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
            model = model.adapted(self.lora, self.lora_alpha or 2.0 * self.lora, self.lora_targets)
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
