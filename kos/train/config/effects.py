"""Which flags have no effect, because of other settings or of the data."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from kos.train.config import flag_of
from kos.train.config.options import KEYS, TrainConfig


def without_effect(
    config: TrainConfig, asked: Mapping[str, Any], ignored: Mapping[str, str] = MappingProxyType({})
) -> list[str]:
    """The flags that were given but have no effect because of another setting or the data, each with the reason.

    ``ignored`` has the settings that do not apply to the data.
    """
    no_sample = config.sample_tokens == 0
    reasons = {
        "min_lr": "--schedule constant" * (config.schedule == "constant"),
        "decay_fraction": f"--schedule {config.schedule}" * (config.schedule != "wsd"),
        **dict.fromkeys(("val_data", "eval_data"), "--eval-batches 0" * (not config.eval_batches)),
        "long_documents": "--fit cut" * (config.fit != "whole" and isinstance(config.data, str)),
        **dict.fromkeys(("prompt", "temperature", "top_k"), "--sample-tokens 0" * no_sample),
        "pp_schedule": "--pp 1" * (config.pp == 1),
        "hold_out": "--val-data" * (config.val_data is not None),
        **ignored,
    }
    given = [name for name in reasons if asked[name] not in (KEYS[name].default, [])]
    return [f"{flag_of(name)} ({reasons[name]})" for name in given if reasons[name]]
