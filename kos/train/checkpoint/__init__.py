"""Checkpoints that are either complete or absent.

The folder ``step-N/`` holds:

- the weights (``model.safetensors``, or one file per writing rank and an index), ``config.json`` and the tokenizer.
  transformers loads all of these.  kos itself reads the tokenizer from ``kos_tokenizer.json``.
  A run with ``--lora`` has its adapters instead (``kos.train.checkpoint.adapter``), which peft loads.
- the optimizer state (``optimizer*.safetensors``), and with ``--compress`` the residuals (``residual*.safetensors``),
- ``manifest.json``: the step, the number of updates, the layout, the configuration of the run, and the size and SHA-256
  of every file.

Tensors are whole in the files, whatever the layout. A checkpoint is written under a temporary name, every file and
folder is fsynced, and one rename makes it visible. So a rank may be killed at any moment without damage to earlier
checkpoints.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import re
import reprlib
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from kos.errors import CheckpointError, raised_as
from kos.files import replace_file, sync
from kos.train.checkpoint import adapter, huggingface
from kos.train.checkpoint.saving import WEIGHTS, Files, Saving, write_json, write_tensors
from kos.train.checkpoint.state import RESIDUAL, ShardedState, State, state_shapes
from kos.train.data.corpus import Show
from kos.train.data.tokenizers import SAVED, NumberTokenizer, Tokenizer
from kos.train.model import peft
from kos.train.model.huggingface import is_unreadable, to_huggingface, whole
from kos.train.ops.parameters import Shape
from kos.train.parallel.failures import alone

FORMAT = 2
FORMATS = (1, FORMAT)
"""The formats that can be read.  In format 1, one rank wrote all files."""
OPTIMIZER = "optimizer"
FILES = ("config.json", SAVED, WEIGHTS, OPTIMIZER)
"""A checkpoint must have a file whose name begins with each of these, or with one of several."""
LARGEST, LARGEST_IN_ALL = 64 << 20, 256 << 20

MANIFEST, BEST = "manifest.json", "best"
CONFIG, TOKENIZER, TOKENIZER_CONFIG = "config.json", "tokenizer.json", "tokenizer_config.json"
REPLACED = (CONFIG, TOKENIZER, TOKENIZER_CONFIG, SAVED, MANIFEST, peft.CONFIG)
"""Files that kos writes in every checkpoint."""

TEMPLATE = "chat_template.jinja"
BESIDE_TOKENIZER = (TOKENIZER_CONFIG, TEMPLATE)

DROPOUT = ("attention_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop")

_WEIGHTS = (
    ".index.json", ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".ggml", ".h5", ".msgpack", ".npz", ".onnx",
    ".tflite", ".ot",
)  # fmt: skip

Extra = Mapping[str, bytes]
"""The content of each file by name, including those of ``REPLACED``."""

TEMPORARY = ".saving-"
_NAME = re.compile(r"(?:replaced-)?step-(\d+)")
_log = logging.getLogger(__name__)


class Checkpoint(NamedTuple):
    """A verified checkpoint on disk, with the configuration of the run that wrote it."""

    path: Path
    step: int
    config: Mapping[str, Any]
    updates: int | None
    """The steps that were not skipped; None in a checkpoint of kos 0.3 or earlier."""


def state_files(path: Path, shapes: Mapping[str, Shape], state: State) -> huggingface.TensorFiles:
    """The optimizer state in a checkpoint of a model of these shapes.  Tensors have names such as ``exp_avg.NAME``."""
    with whole(path):
        files = json.loads((path / MANIFEST).read_text(encoding="utf-8"))["files"]
    files = (name for name in files if name.startswith(OPTIMIZER))
    return huggingface.TensorFiles(path, files, state_shapes(state, shapes))


def save(
    folder: Path, state: ShardedState, *, step: int, tokenizer: Tokenizer, config: Mapping[str, Any], keep: int,
    before: int, run: str = "", extra: Extra = MappingProxyType({}), show: Show | None = lambda what, share: None,
    best: Mapping[str, float] | None = None,
) -> Saving:  # fmt: skip
    """Copy the state, and begin to write it to ``folder/step-N``. ``Saving.finish`` waits until it is written.

    Collective. By default, nearly everything is written before this function returns, and ``show`` receives its
    progress. With ``show=None`` the function only copies the rank's part of the state to host memory.

    Once the checkpoint exists, older ones are deleted until ``keep`` remain, this one included. Checkpoints of steps
    after ``before`` are deleted too; ``before`` is the step that the run last saved or resumed from. Such checkpoints
    are damaged, or the run has gone back to an earlier step. ``run`` is a name that no other run in this folder has.
    ``extra`` are the files that ``read_extra`` returned.

    ``best`` is the metric that is lower than in any checkpoint before, with its value.  The symbolic link ``BEST`` then
    names this checkpoint, which is kept besides the ``keep`` newest ones until another one is the best.
    """
    world, temporary = state.mesh.world, folder / f"{TEMPORARY}{run}"
    alone(world, lambda: _begin(folder, temporary))

    def publish(files: Files) -> None:
        """Complete ``temporary``, in which all ranks have written ``files``, and rename it to ``folder/step-N``."""
        tokens = {"bos_token_id": tokenizer.bos, "eos_token_id": tokenizer.eos}
        written: dict[str, Any] = {"config.json": to_huggingface(state.model) | tokens}
        if state.model.lora is not None:
            written[peft.CONFIG] = peft.to_peft(state.model, config["base"]["path"])
            files = _one_file(temporary, files)
        elif len(state.plan.ranks) > 1:
            written[huggingface.INDEX] = state.plan.index()
        written = merge_extra(written | tokenizer.files(), extra, tokenizer)
        for name, content in written.items():
            write = replace_file if isinstance(content, bytes) else write_json
            write(temporary / name, content)
        files = files | {name: huggingface.fingerprint(temporary / name) for name in written}
        layout = dataclasses.asdict(state.mesh.layout) | {"zero": int(state.parallel.sharded)}
        counts = {"step": step, "updates": updates}
        manifest = {"format": FORMAT, **counts, "layout": layout, "config": config, "files": files}
        write_json(temporary / MANIFEST, manifest | ({"best": best} if best else {}))
        _rename(temporary, final)
        if best:
            _link(final)
        _remove_others(final, keep, min(step - 1, before))

    final, contents = folder / f"step-{step}", state.plan.contents(world.rank)
    updates = state.optimizer.updates
    saving = Saving(final, temporary, step, contents, world, publish, ahead=0 if show is None else 1)
    whole, done = 4 * sum(math.prod(shape) for file in contents.values() for shape in file.values()), 0
    try:
        for tensor in state.gather():
            if show is not None:
                show("saving a checkpoint", done / whole)
            done += tensor.nbytes
            saving.put(tensor)
        saving.put(None)
    except BaseException:
        saving.cancel()
        raise
    return saving


def _one_file(folder: Path, files: Files) -> Files:
    """Join the files of adapters of all ranks to one, as peft has it; returns all files."""
    parts = sorted(name for name in files if name.startswith("adapter_model") and name != adapter.WEIGHTS)
    tensors = {name: each for part in parts for name, each in huggingface.stored_tensors(folder / part).items()}
    if parts:
        shapes = {name: each.shape for name, each in tensors.items()}
        files[adapter.WEIGHTS] = write_tensors(folder / adapter.WEIGHTS, shapes, (x.read() for x in tensors.values()))
    for part in parts:
        (folder / part).unlink()
    return {name: each for name, each in files.items() if name not in parts}


def _begin(folder: Path, temporary: Path) -> None:
    """Make the folder to which the ranks write, and remove folders that earlier runs did not finish."""
    with raised_as(CheckpointError, f"{folder}: expected to write a checkpoint"):
        folder.mkdir(parents=True, exist_ok=True)
        sync(folder.parent)
        remove_unfinished(folder)
        temporary.mkdir()


def remove_unfinished(folder: Path) -> None:
    """Remove unfinished checkpoints of runs that were killed; no run may be writing there."""
    for left in folder.glob(f"{TEMPORARY}*"):
        if left.is_symlink():  # of the best checkpoint
            left.unlink()
        else:
            shutil.rmtree(left, ignore_errors=True)


def _rename(temporary: Path, final: Path) -> None:
    """Give the checkpoint its final name.

    An existing one is renamed first: ``latest`` finds it if the process is killed between the two renames.
    """
    if final.exists():
        replaced = final.with_name(f"replaced-{final.name}")
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)
    temporary.rename(final)
    sync(final.parent)


def _link(final: Path) -> None:
    """Make ``final`` the best checkpoint."""
    link = final.with_name(f"{TEMPORARY}{BEST}")
    link.unlink(missing_ok=True)
    link.symlink_to(final.name)
    link.replace(final.with_name(BEST))
    sync(final.parent)


def best_of(folder: Path, metric: str, most: int) -> tuple[int, float | None]:
    """The step, up to ``most``, of the best checkpoint under ``folder``, and its value of ``metric``.  (0, None): none.

    A damaged one counts as none.
    """
    with suppress(OSError, ValueError, KeyError, TypeError):
        manifest = json.loads((folder / BEST / MANIFEST).read_text(encoding="utf-8"))
        if manifest["step"] <= most:
            return int(manifest["step"]), float(manifest["best"][metric])
    return 0, None


def _remove_others(final: Path, keep: int, limit: int) -> None:
    """Delete checkpoints after step ``limit``, then the oldest ones until ``keep`` remain, ``final`` included.

    The best of the earlier ones remains too.
    """
    best = (final.parent / BEST).resolve().name
    others = [(number, path) for number, path in steps_in(final.parent) if path != final]
    earlier = [path for number, path in others if number <= limit and path.name != best]
    later = [path for number, path in others if number > limit]
    for path in later + earlier[: max(0, len(earlier) + 1 - keep)]:
        leaving = path.with_name(f"{TEMPORARY}{path.name}")  # a kill during the deletion would leave it damaged
        with suppress(OSError):
            path.rename(leaving)
        shutil.rmtree(leaving, ignore_errors=True)
    if not (final.parent / BEST).exists():
        (final.parent / BEST).unlink(missing_ok=True)


def verify(path: Path, weights_only: bool = False, show: Show = lambda what, share: None) -> Checkpoint:
    """Check the size and checksum of every file against the manifest, and return the checkpoint at ``path``.

    Files are read in parallel.  With ``weights_only``, the files that only a resumed run needs are not checked.
    """
    with whole(path):
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        if manifest["format"] not in FORMATS:
            raise CheckpointError(f"{path}: expected checkpoint format {FORMAT}, got {manifest['format']!r}")
        for start in FILES:
            if not any(file.startswith(start) for file in manifest["files"]):
                every = ", ".join(each if isinstance(each, str) else " or ".join(each) for each in FILES)
                raise CheckpointError(f"{path / MANIFEST}: expected the files {every}, got no {start}")
        step, config, files = manifest["step"], manifest["config"], manifest["files"]
        updates = manifest.get("updates")
        tables = [config, *(config.get(part, {}) for part in ("config", "derived"))] if isinstance(config, dict) else []
        names = config.get("gpus", []) if tables else []
        sound = isinstance(names, list) and all(isinstance(name, str) for name in names)
        if type(step) is not int or not tables or not all(isinstance(table, dict) for table in tables) or not sound:
            got = f"{step!r} and {reprlib.repr(config)}"
            raise CheckpointError(f"{path / MANIFEST}: expected an integer step and a config, got {got}")
        if updates is not None and (type(updates) is not int or not 0 <= updates <= step):
            raise CheckpointError(f"{path / MANIFEST}: expected from 0 to {step} updates, got {updates!r}")
        named = _NAME.fullmatch(path.name)
        if named and int(named[1]) != step:
            raise CheckpointError(f"{path}: expected the checkpoint of step {named[1]}, got step {step}")
        others = peft.CONFIG, *[OPTIMIZER, RESIDUAL] * weights_only  # the first may be edited: a base that moved
        _compare(path, files, [name for name in files if not name.startswith(others)], show)
    return Checkpoint(path, step, config, updates)


def compare_weights(path: Path, show: Show = lambda what, share: None) -> None:
    """Compare the files of weights in ``path`` with its manifest, if it has one.  The other files may be edited."""
    with whole(path):
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8")) if (path / MANIFEST).exists() else {}
        files = manifest.get("files") if isinstance(manifest, dict) else None
        if isinstance(files, dict) and all(isinstance(each, dict) for each in files.values()):  # else not of kos
            _compare(path, files, [name for name in files if name.startswith(WEIGHTS)], show)


def _compare(path: Path, files: Files, wanted: Sequence[str], show: Show) -> None:
    """Raise CheckpointError if the size or SHA-256 of a file in ``wanted`` is not that of ``files``."""
    with ThreadPoolExecutor() as pool:
        fingerprints = pool.map(huggingface.fingerprint, (path / Path(name).name for name in wanted))
        for number, (name, found) in enumerate(zip(wanted, fingerprints, strict=True), 1):
            show("checking the checkpoint", number / len(wanted))
            for key in ("bytes", "sha256"):
                if found[key] != (expected := files[name][key]):
                    raise CheckpointError(f"{path / name}: expected {key} {expected}, got {found[key]}")


def latest(folder: Path, weights_only: bool = False, show: Show = lambda what, share: None) -> Checkpoint | None:
    """The newest complete checkpoint under ``folder``, or None if there is no checkpoint.

    Damaged checkpoints are skipped with a warning.  Raises CheckpointError if all of them are damaged, or if a file
    cannot be read.
    """
    named = steps_in(folder)
    for _, path in reversed(named):
        try:
            return verify(path, weights_only, show)
        except CheckpointError as error:
            if is_unreadable(error.__cause__):
                raise
            _log.warning("passing over a damaged checkpoint: %s", error)
    if named:
        how = "" if weights_only else "; remove them to start over"
        raise CheckpointError(f"{folder}: expected a complete checkpoint, got {len(named)} damaged{how}")
    return None


def find(path: Path, weights_only: bool = False, show: Show = lambda what, share: None) -> Checkpoint:
    """The checkpoint at ``path``: a ``step-N`` folder, or the newest complete checkpoint in the folder of a run."""
    expected = f"{path}: expected a checkpoint or a run with one under checkpoints/"
    with raised_as(CheckpointError, expected):
        is_there = path.exists()
        is_one = (path / MANIFEST).exists() or _NAME.fullmatch(path.name)
    if not is_there:
        raise CheckpointError(f"{expected}, got no such folder")
    found = verify(path, weights_only, show) if is_one else latest(path / "checkpoints", weights_only, show)
    if found is None:
        raise CheckpointError(f"{expected}, got none")
    return found


def find_weights(folder: Path) -> Path:
    """The folder of weights that ``folder`` stands for: of Hugging Face, a checkpoint, or the newest one of a run."""
    if (folder / MANIFEST).exists() or not any(folder.glob("*.safetensors")):
        return find(folder, weights_only=True).path
    return folder


def steps_in(folder: Path) -> list[tuple[int, Path]]:
    """(step, path) of each folder with the name of a checkpoint, sorted.  Of one step, the replaced folder is first."""
    with raised_as(CheckpointError, f"{folder}: expected a folder that can be read"):
        paths = list(folder.iterdir()) if folder.is_dir() else []
    matches = ((_NAME.fullmatch(path.name), path) for path in paths)
    return sorted((int(match[1]), path) for match, path in matches if match)


def read_extra(folder: Path, max_bytes: int = LARGEST, max_total_bytes: int = LARGEST_IN_ALL) -> dict[str, bytes]:
    """The other files in the folder of ``--init-from``, which are copied into each checkpoint.

    Examples are ``generation_config.json``, ``chat_template.jinja``, ``special_tokens_map.json`` and a license. Keys of
    ``config.json`` and ``tokenizer_config.json`` that kos does not write are also kept.

    Folders, hidden files, weights, optimizer states, and files of more than ``max_bytes`` bytes are not copied.  If
    the other files together exceed ``max_total_bytes`` bytes, the largest of them are not copied either.  Raises
    CheckpointError if a file cannot be read.
    """

    def is_kept(path: Path) -> bool:
        if path.name.startswith((".", "optimizer")) or path.name.endswith(_WEIGHTS) or path.name == MANIFEST:
            return False
        return path.is_file() and path.stat().st_size <= max_bytes

    with raised_as(CheckpointError, f"{folder}: expected files that can be read"):
        found = sorted((path.stat().st_size, path) for path in folder.iterdir() if is_kept(path))
        sums = accumulate(size for size, _ in found)
        chosen = [path for (_, path), total in zip(found, sums, strict=True) if total <= max_total_bytes]
        return {path.name: path.read_bytes() for path in sorted(chosen)}


def read_tokenizer_settings(tokenizer: str) -> dict[str, bytes]:
    """The settings and the chat template in the folder of ``tokenizer``, a value of ``--tokenizer``, if it has any."""
    folder = Path(tokenizer) if Path(tokenizer).is_dir() else Path(tokenizer).parent
    with raised_as(CheckpointError, f"{folder}: expected files that can be read"):
        return {name: (folder / name).read_bytes() for name in BESIDE_TOKENIZER if (folder / name).is_file()}


def with_tokenizer(extra: Extra, beside: Extra) -> dict[str, bytes]:
    """The files of ``--init-from`` (``extra``), joined with those ``beside`` the tokenizer that ``--tokenizer`` names.

    The settings and the chat template beside the tokenizer take precedence.  Those that it lacks come from ``extra``.
    """
    theirs, ours = _settings(extra, TOKENIZER_CONFIG), _settings(beside, TOKENIZER_CONFIG)
    files = dict(extra)
    if TEMPLATE in beside or "chat_template" in ours:
        files.pop(TEMPLATE, None)  # this file would take precedence over a template in the settings
        theirs.pop("chat_template", None)
    if theirs or ours:
        files[TOKENIZER_CONFIG] = json.dumps(theirs | ours).encode()
    return files | {name: content for name, content in beside.items() if name != TOKENIZER_CONFIG}


def extra_names(extra: Extra) -> list[str]:
    """The names of the files that a checkpoint has only because ``--init-from`` had them."""
    return [name for name in extra if name not in REPLACED]


def dropout(extra: Extra) -> list[str]:
    """The rates of dropout in the folder's ``config.json`` that are not 0.  kos trains without dropout."""
    settings = _settings(extra, CONFIG)
    return [f"{name} {settings[name]}" for name in DROPOUT if settings.get(name)]


def merge_extra(written: Mapping[str, Any], extra: Extra, tokenizer: Tokenizer) -> dict[str, Any]:
    """Merge ``extra`` into ``written``, the JSON files of a checkpoint by name.

    If the folder of ``--init-from`` has a tokenizer, the run uses it.  The special tokens of this folder then replace
    those in ``written``.
    """
    files = dict(written) | {name: extra[name] for name in extra_names(extra)}
    had_tokenizer, theirs = TOKENIZER in extra or SAVED in extra, _settings(extra, CONFIG)
    same_ids = had_tokenizer or tokenizer.kind == NumberTokenizer.kind
    theirs.pop("quantization_config", None)  # the weights are float32 now
    special = {key: theirs[key] for key in ("bos_token_id", "eos_token_id") if theirs.get(key) is not None}
    ours = dict(written[CONFIG])
    if ours.get("pad_token_id") is None and "pad_token_id" in theirs:
        ours["pad_token_id"] = theirs["pad_token_id"]
    files[CONFIG] = theirs | ours | (special if same_ids else {})
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
