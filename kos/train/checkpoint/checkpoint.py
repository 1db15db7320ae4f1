"""Checkpoints that are either whole or not there.

``step-N/`` holds ``model.safetensors``, ``config.json`` and the tokenizer (all loadable by transformers; kos reads the
tokenizer in ``kos_tokenizer.json``), ``optimizer.safetensors`` (both Adam moments) and ``manifest.json`` (step, run
configuration, the size and SHA-256 of every file). It is written under a temporary name, every file and folder is
fsynced, and one rename makes it appear; a kill at any moment
leaves the checkpoints before it as they were.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import reprlib
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kos.errors import CheckpointError
from kos.files import replace_file, sync
from kos.train.checkpoint import huggingface
from kos.train.data.tokenizers import SAVED, Tokenizer
from kos.train.model.llama_config import LlamaConfig
from kos.train.ops.optimizer import AdamW

FORMAT = 1
MANIFEST = "manifest.json"
OPTIMIZER = "optimizer.safetensors"
FILES = {"model.safetensors", OPTIMIZER, "config.json", SAVED}
_NAME = re.compile(r"(?:replaced-)?step-(\d+)")
_log = logging.getLogger(__name__)


class Checkpoint(NamedTuple):
    """A checkpoint on disk whose files are those that its manifest lists, and the run's configuration then."""

    path: Path
    step: int
    config: Mapping[str, Any]

    def load_optimizer(self, optimizer: AdamW) -> None:
        """Fill both moments and the step count."""
        path = self.path / OPTIMIZER
        huggingface.fill(_moments(optimizer), huggingface.read_tensors([path]), path)
        optimizer.step_count = self.step


def save(
    folder: Path, *, step: int, optimizer: AdamW, model: LlamaConfig, tokenizer: Tokenizer,
    config: Mapping[str, Any], keep: int, before: int,
) -> Path:  # fmt: skip
    """Write ``folder/step-N``; once it is there, delete all but the newest ``keep`` up to it.

    Those later than ``before``, the step that the run saved or went on from last, are deleted too: the run went back
    behind them, or they are damaged.
    """
    final, replaced, temporary = (folder / name for name in (f"step-{step}", f"replaced-step-{step}", ".saving"))
    for name, tensor in optimizer.weights.items():
        if not np.isfinite(tensor).all():
            raise CheckpointError(f"{final}: expected finite weights, got others in {name}; nothing is saved")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        sync(folder.parent)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        _write_tensors(temporary / "model.safetensors", huggingface.tensors_of(optimizer.weights))
        _write_tensors(temporary / OPTIMIZER, _moments(optimizer))
        settings = {"bos_token_id": tokenizer.bos, "eos_token_id": tokenizer.eos}
        write_json(temporary / "config.json", huggingface.to_huggingface(model) | settings)
        for name, content in tokenizer.files().items():
            write_json(temporary / name, content)
        files = {path.name: _fingerprint(path) for path in sorted(temporary.iterdir())}
        write_json(temporary / MANIFEST, {"format": FORMAT, "step": step, "config": config, "files": files})
        if final.exists():  # out of the way, where ``latest`` finds it should we be killed before the next line
            shutil.rmtree(replaced, ignore_errors=True)
            final.rename(replaced)
        temporary.rename(final)
        sync(folder)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(f"{final}: expected to write a checkpoint, got {error}") from error
    limit = min(step - 1, before)
    others = [(number, path) for number, path in steps_in(folder) if path != final]
    earlier = [path for number, path in others if number <= limit]
    later = [path for number, path in others if number > limit]
    for path in later + earlier[: max(0, len(earlier) + 1 - keep)]:
        shutil.rmtree(path, ignore_errors=True)
    return final


def verify(path: Path, without: str | None = None) -> Checkpoint:
    """The checkpoint at ``path``, size and checksum of every file but ``without`` compared with the manifest."""
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        if manifest["format"] != FORMAT:
            raise CheckpointError(f"{path}: expected checkpoint format {FORMAT}, got {manifest['format']!r}")
        if missing := FILES - set(manifest["files"]):
            raise CheckpointError(f"{path / MANIFEST}: expected the files {sorted(FILES)}, got no {min(missing)}")
        step, config = manifest["step"], manifest["config"]
        tables = [config, *(config.get(part, {}) for part in ("config", "derived"))] if isinstance(config, dict) else []
        names = config.get("gpus", []) if tables else []
        sound = isinstance(names, list) and all(isinstance(name, str) for name in names)
        if type(step) is not int or not tables or not all(isinstance(table, dict) for table in tables) or not sound:
            got = f"{step!r} and {reprlib.repr(config)}"
            raise CheckpointError(f"{path / MANIFEST}: expected an integer step and a config, got {got}")
        named = _NAME.fullmatch(path.name)
        if named and int(named[1]) != step:
            raise CheckpointError(f"{path}: expected the checkpoint of step {named[1]}, got step {step}")
        for name, expected in manifest["files"].items():
            if name == without:
                continue
            found = _fingerprint(path / Path(name).name)
            for key in ("bytes", "sha256"):
                if found[key] != expected[key]:
                    raise CheckpointError(f"{path / name}: expected {key} {expected[key]}, got {found[key]}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path}: expected a whole checkpoint, got {type(error).__name__}: {error}") from error
    return Checkpoint(path, step, config)


def latest(folder: Path, without: str | None = None) -> Checkpoint | None:
    """The newest whole checkpoint under ``folder``, damaged ones passed over with a warning; None if there is none.

    CheckpointError where there are some and all are damaged.
    """
    named = steps_in(folder)
    for _, path in reversed(named):
        try:
            return verify(path, without)
        except CheckpointError as error:
            _log.warning("passing over a damaged checkpoint: %s", error)
    if named:
        raise CheckpointError(
            f"{folder}: expected a whole checkpoint to go on from, got {len(named)} damaged ones; "
            "remove them to start over"
        )
    return None


def find(path: Path, without: str | None = None) -> Checkpoint:
    """The checkpoint that a user means: a ``step-N`` folder, or the newest whole one of a run's folder.

    A file named by ``without`` is not looked at.
    """
    expected = f"{path}: expected a checkpoint or a run with one under checkpoints/"
    try:
        is_one = (path / MANIFEST).exists() or _NAME.fullmatch(path.name)
    except OSError as error:
        raise CheckpointError(f"{expected}, got {error}") from error
    found = verify(path, without) if is_one else latest(path / "checkpoints", without)
    if found is None:
        raise CheckpointError(f"{expected}, got none")
    return found


def steps_in(folder: Path) -> list[tuple[int, Path]]:
    """(step, path) of what is named like a checkpoint; of one step, what was to be replaced comes first."""
    try:
        paths = list(folder.iterdir()) if folder.is_dir() else []
    except OSError as error:
        raise CheckpointError(f"{folder}: expected a folder that can be read, got {error}") from error
    matches = ((_NAME.fullmatch(path.name), path) for path in paths)
    return sorted((int(match[1]), path) for match, path in matches if match)


def _moments(optimizer: AdamW) -> dict[str, np.ndarray]:
    moments = {"exp_avg": optimizer.exp_avg, "exp_avg_sq": optimizer.exp_avg_sq}
    return {f"{prefix}.{name}": view for prefix, of in moments.items() for name, view in of.items()}


def _write_tensors(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    path.touch()
    mode = path.stat().st_mode  # as the umask wants it: the library leaves the file to its owner alone
    try:
        save_file(dict(tensors), path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(str(error)) from error
    path.chmod(mode)
    sync(path)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    replace_file(path, json.dumps(value, indent=2).encode() + b"\n")


def _fingerprint(path: Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        return {"bytes": os.fstat(file.fileno()).st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
