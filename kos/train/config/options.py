"""The settings of a run: one typed, frozen configuration.

``TrainConfig`` is the only list of the trainer's options: the command-line flags (``kos.train.config.flags``)
and the keys of a ``--config`` file are made from its fields.  Wrong values end as ``ConfigError``, one
line that names the flag or the file's key, what was expected and what was got.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError, field_validator, model_validator

from kos.errors import ConfigError
from kos.train.config.model_section import ModelSection, one_line, option
from kos.train.config.presets import PRESETS
from kos.train.model.llama_config import LlamaConfig, Section
from kos.train.ops.learning_rate import LearningRate
from kos.train.tools.trackers import PACKAGES

DETERMINISTIC_MICRO_BATCHES = 8
"""``--deterministic`` splits the batch into at least this many micro-batches: any of 1, 2, 4, 8 ranks fit."""

MICRO_BATCH_TOKENS = 2048
"""Most tokens in a micro-batch whose size was not given: its activations stay in a core's caches (4 to 8% faster than
16,384 tokens on the tiny preset), and their memory is bounded."""

CUDA_MICRO_BATCH_TOKENS = 32_768
"""The same on a GPU, whose matrix products gain nothing from more rows."""

ON_CPU: dict[str, tuple[Any, ...]] = {
    "dtype": ("auto", "float32"), "master_weights": ("float32",), "grad_dtype": ("float32",),
    "graph": (True,),
}  # fmt: skip
"""Options that mean something on GPUs only, and what they may be on a CPU."""

LLAMAS = ("num_key_value_heads", "head_dim", "tie_word_embeddings", "rope_theta", "rope_scaling")
"""Keys that a preset gives to a LLaMA; ``--model-type gpt2`` leaves them to GPT-2."""


class TrainConfig(Section):
    """All settings of a run.  Build one with ``parse`` or ``from_preset``."""

    # fmt: off
    preset: str = option(f"Start from the settings of a preset: {', '.join(PRESETS)}", "tiny")
    init_from: str | None = option(
        "Start from the shape and weights of a Hugging Face folder", None, "the preset's shape, random weights")

    data: str = option(
        "Train on stdlib (the sources of Python's standard library), tinyshakespeare, or the PATH of a text file, "
        "a folder of text files, or llm.c token files", "stdlib", min_length=1)
    tokenizer: str = option(
        "Split text into bytes, chars, or the tokens of a Hugging Face tokenizer.json at PATH; auto takes that of "
        "--init-from, else bytes, and bare numbers for token files", "auto", min_length=1)
    seq_len: int = option("Tokens in a sequence", ge=1)
    batch_size: int = option("Sequences in a step, over all ranks", ge=1, le=1_000_000)

    device: Literal["auto", "cpu", "cuda"] = option(
        "Compute on cpu or cuda; auto takes cuda if every rank has its own GPU", "auto")
    dp: int | None = option("Data-parallel ranks", None, "ranks / (tp × pp × cp)", ge=1)
    tp: int = option("Tensor-parallel ranks, which split each layer", 1, ge=1)
    pp: int = option("Pipeline-parallel ranks, which split the list of layers", 1, ge=1)
    cp: int = option("Context-parallel ranks, which split each sequence", 1, ge=1)
    zero: int = option(
        "Split the optimizer's state over the data-parallel ranks (ZeRO-1): 1, or 0", 0, ge=0, le=1)
    backend: Literal["auto", "mpi", "tcp", "nccl", "peer", "mock"] = option(
        "Carry collectives by mpi, tcp, nccl, peer or mock (one process); auto takes the fastest that works", "auto")

    steps: int = option("Optimizer steps of the whole run", ge=1, lt=2**63)
    out: Path | None = option(
        "Folder of metrics and checkpoints", None,
        "the first free of runs/PRESET, runs/PRESET-2, …; with --resume auto the last one used", strict=False)
    resume: str | None = option(
        "Resume from the checkpoint in DIR; auto takes the newest complete one of the run", None, "start a new run",
        min_length=1)

    lr: float = option("Peak learning rate", gt=0)
    min_lr: float | None = option("Learning rate at the end", None, "--lr / 10", ge=0)
    schedule: Literal["cosine", "wsd", "constant"] = option(
        "Learning rate after the warm-up: cosine, wsd (stable, then a decay) or constant", "cosine")
    warmup_steps: int = option("Steps of linear warm-up", 0, ge=0, lt=2**63)
    decay_fraction: float = option("Part of --steps over which wsd decays", 0.2, ge=0, le=1)
    weight_decay: float = option("Decoupled weight decay of matrices", 0.1, ge=0)
    beta1: float = option("AdamW's beta1", 0.9, ge=0, lt=1)
    beta2: float = option("AdamW's beta2", 0.95, ge=0, lt=1)
    eps: float = option("AdamW's epsilon", 1e-8, gt=0)
    grad_clip: float = option("Largest global gradient norm; 0 turns clipping off", 1.0, ge=0)
    skip_outliers: float = option(
        "Skip steps whose gradient norm is above X or not finite; 0 ends the run if the norm is not finite", 0.0,
        ge=0)

    eval_every: int = option("Steps between validations; 0 validates before and after training only", 100, ge=0)
    eval_batches: int = option(
        "Batches of a validation, of up to --batch-size sequences; 0 turns it off", 8, ge=0)
    sample_tokens: int = option("Tokens of text generated at the end; 0 generates none", 200, ge=0)
    prompt: str = option("Text that the sample continues", "", "none")
    temperature: float = option("Temperature of the sample; 0 takes the likeliest token", 0.8, ge=0)
    top_k: int = option("Sample among the N likeliest tokens; 0 takes all", 40, ge=0)

    dtype: Literal["auto", "float32", "bfloat16"] = option(
        "Compute in float32 or bfloat16; auto takes bfloat16 on GPUs", "auto")
    master_weights: Literal["float32", "none"] = option(
        "Weights that AdamW updates on GPUs: float32, or none for bfloat16 weights with stochastic rounding", "float32")
    grad_dtype: Literal["float32", "bfloat16"] = option(
        "Gradients on GPUs, in memory and between ranks: float32, or bfloat16 for half the bytes (several "
        "micro-batches of a rank still add up in float32)", "float32")
    deterministic: bool = option(
        "Give the same bits for any number of ranks, and on CPUs in any layout; slower", False)
    seed: int = option("Seed of initial weights, batches and samples", 1337, ge=0, lt=2**63)

    save_every: int = option("Steps between checkpoints; 0 saves at the end only", 200, ge=0)
    keep: int = option("How many of the newest checkpoints to keep", 2, ge=1)
    save_async: bool = option(
        "Continue training while a checkpoint is written; takes host memory for the rank's shard", False)

    log_every: int = option("Steps between printed lines", 1, ge=1)
    tracker: tuple[str, ...] = option(
        f"Also send metrics to {', '.join(PACKAGES)}; repeat the flag, or separate names by commas", (),
        "metrics.jsonl only")

    micro_batch_size: int | None = option(
        "Sequences that a rank computes at once", None, "up to 2,048 tokens, on GPUs 32,768", ge=1)
    recompute: Literal["none", "norms", "block"] = option(
        "Save memory by computing again in the backward: none, norms (and SwiGLU) or block (whole layers)", "none")
    pp_schedule: Literal["gpipe", "1f1b", "interleaved", "zero-bubble", "zero-bubble-v"] = option(
        "Order of a pipeline's forwards and backwards: gpipe, 1f1b, interleaved, zero-bubble or zero-bubble-v", "1f1b")
    pp_chunks: int | None = option("Stages of a rank with --pp-schedule interleaved", None, "2", ge=1)
    graph: bool = option("Replay each step as one CUDA graph, on GPUs", True)
    profile: int = option(
        "Only time N steps after 3 others, then print a table and write a Perfetto trace to --out; 0 trains", 0, ge=0)

    debug: bool = option("Show tracebacks of errors", False)
    timeout: float = option("Seconds that a rank waits for the others before it reports them", 300.0, gt=0)

    model: ModelSection
    # fmt: on

    @field_validator("tracker", mode="before")
    @classmethod
    def _names(cls, given: Any) -> tuple[str, ...]:
        words = [given] if isinstance(given, str) else given if isinstance(given, list | tuple) else [repr(given)]
        names = [name.strip() for word in words for name in str(word).split(",")]
        if unknown := [name for name in names if name not in PACKAGES]:
            raise ValueError(f"tracker: expected {', '.join(PACKAGES)}, got {unknown[0]!r}")
        return tuple(dict.fromkeys(names))

    @model_validator(mode="after")
    def _check(self) -> TrainConfig:
        if self.min_lr is not None and self.min_lr > self.lr and self.schedule != "constant":
            raise ValueError(f"expected min_lr ≤ lr, got {self.min_lr:g} and {self.lr:g}")
        if self.micro_batch_size is not None and self.batch_size % self.micro_batch_size:
            raise ValueError(
                f"expected batch_size divisible by micro_batch_size, got {self.batch_size} and {self.micro_batch_size}"
            )
        longest = self.model.max_position_embeddings
        if longest is not None and self.seq_len > longest:
            raise ValueError(f"expected seq_len ≤ max_position_embeddings, got {self.seq_len} and {longest}")
        return self

    @classmethod
    def from_preset(cls, preset: str = "tiny", **changes: Any) -> TrainConfig:
        """A preset with some values changed; ``model={...}`` changes only the keys it names."""
        return build([("preset", preset_values(preset)), ("argument", {"preset": preset, **changes})])

    def to_json(self) -> dict[str, Any]:
        """Plain values for a JSON file: every field."""
        return self.model_dump(mode="json")

    def for_world(self, size: int, device: str = "cpu") -> TrainConfig:
        """This configuration as ``size`` data-parallel ranks run it on ``device``: its dtypes and micro-batch size.

        Each step, a rank takes ``batch_size / (micro_batch_size * size)`` micro-batches.  A size that was
        not given becomes the largest divisor that fits: of ``batch_size / size``, and of at most
        ``MICRO_BATCH_TOKENS`` tokens.  With ``deterministic`` it depends on the batch alone: the largest
        divisor of ``batch_size`` that leaves ``DETERMINISTIC_MICRO_BATCHES`` micro-batches.  A pipeline has two
        micro-batches a stage at least, and an interleaved one a multiple of its ranks, where the batch allows it.

        ConfigError: the batch cannot be split evenly; an option that the device does not have.
        """
        dtype, most = self.dtype, CUDA_MICRO_BATCH_TOKENS
        if device == "cpu":
            most = MICRO_BATCH_TOKENS
            for name, allowed in ON_CPU.items():
                if (got := getattr(self, name)) is False:
                    raise ConfigError(f"--no-{name}: expected a GPU, got the CPU")
                if got not in allowed:
                    raise ConfigError(f"{flag_of(name)}: expected {allowed[-1]} on the CPU, got {got}")
        if dtype == "auto":
            dtype = "float32" if device == "cpu" else "bfloat16"
        for name in ("master_weights", "grad_dtype"):
            if (got := getattr(self, name)) != "float32" and dtype != "bfloat16":
                raise ConfigError(f"{flag_of(name)}: expected float32 with --dtype {dtype}, got {got}")
        if self.grad_dtype != "float32" and self.deterministic:
            raise ConfigError(f"--grad-dtype: expected float32 with --deterministic, got {self.grad_dtype}")
        batch, micro = self.batch_size, self.micro_batch_size
        ranks = "ranks" if self.tp * self.pp * self.cp == 1 else "data-parallel ranks"
        if micro is None:
            if batch % size:
                raise ConfigError(f"--batch-size: expected a multiple of {size} ({ranks}), got {batch}")
            whole = batch if self.deterministic else batch // size
            parts = DETERMINISTIC_MICRO_BATCHES if self.deterministic else 1 if self.pp == 1 else 2 * self.pp
            limit = min(whole // parts, most // self.seq_len)
            in_groups = self.pp_schedule == "interleaved" and whole % self.pp == 0 and not self.deterministic
            micro = _largest_divisor(whole // self.pp if in_groups else whole, limit)
        if batch % (micro * size):
            raise ConfigError(
                f"--batch-size: expected a multiple of {micro * size} (--micro-batch-size {micro} × {size} {ranks}), "
                f"got {batch}"
            )
        if self.pp_schedule == "interleaved" and (steps := batch // (micro * size)) % self.pp:
            raise ConfigError(
                f"--pp-schedule interleaved: expected the micro-batches of each data-parallel rank to be a multiple of "
                f"{self.pp} (--pp), got {steps} (--batch-size {batch}, --micro-batch-size {micro})"
            )
        grad_dtype = self.grad_dtype if batch == micro * size else "float32"
        chosen = {"micro_batch_size": micro, "device": device, "dtype": dtype, "grad_dtype": grad_dtype}
        return self.model_copy(update=chosen)

    @property
    def master_dtype(self) -> str:
        """Of the weights that AdamW updates."""
        return self.dtype if self.master_weights == "none" else self.master_weights

    def learning_rate(self) -> LearningRate:
        """The schedule that gives the learning rate of each step."""
        decay = round(self.decay_fraction * self.steps)
        last = self.lr / 10 if self.min_lr is None else self.min_lr
        return LearningRate(self.schedule, self.lr, last, self.steps, self.warmup_steps, decay)

    def model_config_for(self, vocab_size: int) -> LlamaConfig:
        """The model's shape; ``vocab_size`` is the tokenizer's, the least that the model may have."""
        if self.model.vocab_size is not None and self.model.vocab_size < vocab_size:
            where = "--vocab-size" if self.init_from is None else f"{Path(self.init_from, 'config.json')}: vocab_size"
            raise ConfigError(f"{where}: expected at least the tokenizer's {vocab_size}, got {self.model.vocab_size}")
        return self.model.resolve(vocab_size, self.seq_len)


KEYS = {
    **{name: field for name, field in TrainConfig.model_fields.items() if name != "model"},
    **{f"model.{name}": field for name, field in ModelSection.model_fields.items()},
}
"""Every key of a configuration; those of the nested section as ``model.hidden_size``."""

_FIELD = re.compile(rf"\b({'|'.join(key.rpartition('.')[2] for key in KEYS)})\b")


def _largest_divisor(number: int, limit: int) -> int:
    return next((d for d in range(limit, 1, -1) if number % d == 0), 1)


def preset_values(preset: Any) -> dict[str, Any]:
    """The values of a preset.  Raises ConfigError with the list of presets if no preset has that name."""
    if not isinstance(preset, str) or preset not in PRESETS:
        raise ConfigError(f"--preset: expected one of {', '.join(PRESETS)}, got {preset!r}")
    return PRESETS[preset].values


def flag_of(key: str) -> str:
    """``model.hidden_size`` -> ``--hidden-size``."""
    return "--" + key.rpartition(".")[2].replace("_", "-")


def closest(word: str, known: Sequence[str]) -> str:
    """`` (closest: X)``, or nothing."""
    near = get_close_matches(word, known, n=1)
    return f" (closest: {near[0]})" if near else ""


def build(layers: Sequence[tuple[str, Mapping[str, Any]]]) -> TrainConfig:
    """Merge layers (where they come from, nested values), later ones over earlier ones, and validate.

    ConfigError: an unknown key or a refused value; names the layer that set it.
    """
    merged: dict[str, Any] = {}
    label: dict[str, str] = {}
    origin: dict[str, str] = {}  # of a key in the midst of a sentence
    for source, values in layers:
        for key, value in flatten(source, values).items():
            merged[key] = value
            label[key] = flag_of(key) if source == "flags" else f"{source}: {key}"
            plain = source in ("flags", "argument") or source.startswith("preset")
            origin[key.rpartition(".")[2]] = "" if plain else f" of {source}"
    if merged.get("model.model_type") == "gpt2":
        for key in (f"model.{name}" for name in LLAMAS):
            if label.get(key, "").startswith("preset"):
                del merged[key]
    nested: dict[str, Any] = {"model": {}}
    for key, value in merged.items():
        section, _, name = key.rpartition(".")
        (nested[section] if section else nested)[name] = value
    try:
        return TrainConfig.model_validate(nested)
    except ValidationError as error:
        line = one_line(error, label)
        if error.errors()[0]["type"] == "value_error":
            line = _FIELD.sub(lambda name: flag_of(name[0]) + origin.get(name[0], ""), line)
        raise ConfigError(line) from None


def flatten(source: str, values: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if key == "model":
            if not isinstance(value, Mapping):
                raise ConfigError(f"{source}: model: expected a table of keys, got {value!r}")
            flat |= {f"model.{name}": item for name, item in value.items()}
        else:
            flat[key] = value
    for key in flat:
        if key not in KEYS:
            near = closest(key, list(KEYS))
            raise ConfigError(f"{source}: expected a known key{near}, got {key!r}")
    return flat
