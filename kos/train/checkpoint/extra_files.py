"""The other files in the folder of ``--init-from``, which are copied into each checkpoint.

Examples are ``generation_config.json``, ``chat_template.jinja``, ``special_tokens_map.json`` and a license. Keys of
``config.json`` and ``tokenizer_config.json`` that kos does not write are kept too, and those of the
``tokenizer_config.json`` of ``--tokenizer``, with its ``chat_template.jinja``.  Folders, hidden files, weights,
optimizer states, files of more than ``LARGEST`` bytes, and the largest files beyond ``LARGEST_IN_ALL`` bytes in all are
not copied.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

from kos.errors import CheckpointError
from kos.train.data.tokenizers import SAVED, NumberTokenizer, Tokenizer

LARGEST, LARGEST_IN_ALL = 64 << 20, 256 << 20

MANIFEST = "manifest.json"
CONFIG, TOKENIZER, TOKENIZER_CONFIG = "config.json", "tokenizer.json", "tokenizer_config.json"
REPLACED = (CONFIG, TOKENIZER, TOKENIZER_CONFIG, SAVED, MANIFEST)
"""Files that kos writes in every checkpoint."""

BESIDE_TOKENIZER = (TOKENIZER_CONFIG, "chat_template.jinja")

DROPOUT = ("attention_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop")

_WEIGHTS = (
    ".index.json", ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".ggml", ".h5", ".msgpack", ".npz", ".onnx",
    ".tflite", ".ot",
)  # fmt: skip

Extra = Mapping[str, bytes]
"""The content of each file by name, including those of ``REPLACED``."""


def read_extra(folder: Path) -> dict[str, bytes]:
    """The files of a folder of weights that checkpoints keep. CheckpointError if one cannot be read."""

    def is_kept(path: Path) -> bool:
        if path.name.startswith((".", "optimizer")) or path.name.endswith(_WEIGHTS) or path.name == MANIFEST:
            return False
        return path.is_file() and path.stat().st_size <= LARGEST

    try:
        found = sorted((path.stat().st_size, path) for path in folder.iterdir() if is_kept(path))
        sums = accumulate(size for size, _ in found)
        chosen = [path for (_, path), total in zip(found, sums, strict=True) if total <= LARGEST_IN_ALL]
        return {path.name: path.read_bytes() for path in sorted(chosen)}
    except OSError as error:
        raise CheckpointError(f"{folder}: expected files that can be read, got {error}") from error


def read_tokenizer_settings(tokenizer: str) -> dict[str, bytes]:
    """The settings and the chat template beside the ``tokenizer.json`` that ``--tokenizer`` names, if there are any."""
    folder = Path(tokenizer) if Path(tokenizer).is_dir() else Path(tokenizer).parent
    try:
        return {name: (folder / name).read_bytes() for name in BESIDE_TOKENIZER if (folder / name).is_file()}
    except OSError as error:
        raise CheckpointError(f"{folder}: expected files that can be read, got {error}") from error


def extra_names(extra: Extra) -> list[str]:
    """The names of the files that a checkpoint has only because ``--init-from`` had them."""
    return [name for name in extra if name not in REPLACED]


def dropout(extra: Extra) -> list[str]:
    """The rates of dropout in the folder's ``config.json`` that are not 0.  kos trains without dropout."""
    settings = _settings(extra, CONFIG)
    return [f"{name} {settings[name]}" for name in DROPOUT if settings.get(name)]


def merge_extra(written: Mapping[str, Any], extra: Extra, tokenizer: Tokenizer) -> dict[str, Any]:
    """``written``, the JSON files of a checkpoint by name, together with ``extra``.

    If the folder has a tokenizer, the run uses it, so the folder's special tokens replace those of ``written``.
    """
    files = dict(written) | {name: extra[name] for name in extra_names(extra)}
    had_tokenizer, theirs = TOKENIZER in extra or SAVED in extra, _settings(extra, CONFIG)
    same_ids = had_tokenizer or tokenizer.kind == NumberTokenizer.kind
    theirs.pop("quantization_config", None)  # the weights are float32 now
    special = {key: theirs[key] for key in ("bos_token_id", "eos_token_id") if theirs.get(key) is not None}
    none = {} if CONFIG in extra else {"pad_token_id": None}  # else transformers takes its default, maybe >= vocab_size
    files[CONFIG] = none | theirs | written[CONFIG] | (special if same_ids else {})
    if tokenizer.kind == NumberTokenizer.kind and TOKENIZER in extra:  # else they could not be decoded
        files |= {name: extra[name] for name in (TOKENIZER, TOKENIZER_CONFIG) if name in extra}
    else:
        ours, theirs = written[TOKENIZER_CONFIG], _settings(extra, TOKENIZER_CONFIG)
        files[TOKENIZER_CONFIG] = ours | theirs if had_tokenizer else theirs | ours
    return files


def _settings(extra: Extra, name: str) -> dict[str, Any]:
    """The object in a JSON file; empty if there is none."""
    try:
        settings = json.loads(extra.get(name, b"{}"))
    except (ValueError, RecursionError):
        return {}
    return settings if isinstance(settings, dict) else {}
