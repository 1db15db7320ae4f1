"""The settings of a run that starts from the weights of a Hugging Face folder (``init_from``): shape and defaults."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kos.errors import CheckpointError, ConfigError
from kos.train.config import flag_of, flatten
from kos.train.model import option_of
from kos.train.model.shape import ModelShape

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
