"""The settings of a run, each declared once.

This is the only list of the trainer's options: the command-line flags (``kos.train.config.flags``) and the keys of a
``--config`` file are made from it.  Wrong values end as ``ConfigError``, one line that names the flag or the file's
key, what was expected and what was got.
"""

from __future__ import annotations

import re
from datetime import date
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import ValidationInfo, field_validator, model_validator

from kos.errors import SettingError
from kos.train.config import KINDS, RECORD_FIELDS, GroupSection, OptimizerName, by_source, weighted
from kos.train.model import Section, option
from kos.train.model.shape import ModelShape


def no_validation(config: Any) -> str:
    return "--eval-batches 0" * (not config.eval_batches)


def no_sample(config: Any) -> str:
    return "--sample-tokens 0" * (config.sample_tokens == 0)


class Fields(Section, use_attribute_docstrings=True):
    """All settings of a run. The text of a field is that of its flag."""

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
    fields: tuple[str, ...] = option((), "none", changes="data", metavar="NAME=FIELD",
        several=True)  # fmt: skip
    """Fields of records that have other names in the data, such as prompt=question,response=answer or
    messages=dialog; repeat the flag, or separate pairs by commas. The first names are prompt, completion (or response),
    messages, conversations, instruction, input, output, system, tools and text."""
    template_date: str | None = option(None, "today", changes="data", metavar="YYYY-MM-DD")
    """The date that chat templates with strftime_now write."""
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
    rslora: bool = option(False, changes="state")
    """Multiply what an adapter adds by --lora-alpha / sqrt(rank) (rank-stabilized LoRA)."""
    lora_targets: tuple[str, ...] = option((), "all matrices of layers", changes="state", several=True)
    """Matrices that have adapters, such as q_proj,v_proj; repeat the flag, or separate names by commas. Or a regular
    expression that matches whole names, such as '.*self_attn.(q|v)_proj'."""
    lora_layers: tuple[int, ...] = option((), "all layers", changes="state", several=True)
    """Layers that have adapters, counted from 0, such as 0,1; repeat the flag, or separate numbers by commas."""
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

        resolve(given, 2**63, 1)  # raises if no model can have this shape
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

    @field_validator("tracker", "lora_targets", "lora_layers", "fields", mode="before")
    @classmethod
    def _names(cls, given: Any, about: ValidationInfo) -> tuple[Any, ...]:
        words, found = map(str, given if isinstance(given, list | tuple) else [given]), list[Any]()
        for word in words:
            found += [word] if re.search(r"[^\w\s,.=-]", word) else [name.strip() for name in word.split(",")]
        if about.field_name == "lora_layers":
            found = [int(name) if name.isdecimal() else name for name in found]
        return tuple(dict.fromkeys(found))

    @field_validator("lora_targets")
    @classmethod
    def _one_pattern(cls, given: tuple[str, ...]) -> tuple[str, ...]:
        patterns = [each for each in given if re.fullmatch(r"[\w.]+", each) is None]
        try:
            wrong = "" if not patterns else " and ".join(given) if len(given) > 1 else re.compile(patterns[0]) and ""
        except re.error as error:
            wrong = f"{patterns[0]} ({error})"
        if wrong:
            raise SettingError("lora_targets", "names of matrices, or one regular expression", wrong)
        return given

    @field_validator("fields")
    @classmethod
    def _renamed(cls, given: tuple[str, ...]) -> tuple[str, ...]:
        ours = [each.partition("=")[0] for each in given]
        for each, name in zip(given, ours, strict=True):
            if name not in RECORD_FIELDS or not each.partition("=")[2] or ours.count(name) > 1:
                raise SettingError("fields", f"NAME=FIELD with names of {', '.join(RECORD_FIELDS)}, each once", each)
        return given

    @field_validator("template_date")
    @classmethod
    def _date(cls, given: str | None) -> str | None:
        try:
            date.fromisoformat(given or "2000-01-01")
        except ValueError as error:
            raise SettingError("template_date", f"a date ({error})", given) from None
        return given

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
    def _check(self) -> Self:
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
        if self.fields and self.text_field is not None:
            raise SettingError("fields", "none", ",".join(self.fields), "text_field")
        self._check_best()
        of_lora = ("lora_alpha", "rslora", "lora_targets", "lora_layers")
        if self.lora is None and (given := [name for name in of_lora if getattr(self, name)]):
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

    @property
    def eval_sources(self) -> dict[str, str]:
        """The paths of ``eval_data`` by their names."""
        return dict((each.partition("=")[::2]) for each in self.eval_data)

    @property
    def best_metric(self) -> str | None:
        """The metric of ``keep_best`` and ``patience``; None without both."""
        return self.keep_best or ("val_loss" if self.patience else None)
