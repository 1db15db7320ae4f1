"""Write a folder for Hugging Face from a checkpoint, in bfloat16 or float32: ``python -m kos.train.export RUN OUT``.

RUN is a run's folder (its newest complete checkpoint is taken) or a checkpoint's. One process, no MPI. OUT gets the
weights, config.json, the tokenizer, and the files that the run has kept of the folder of --init-from. Of a run with
--lora these are the adapters, as peft loads them, or with --merge the whole model with the adapters added. --merge also
takes a folder of adapters that peft or this command has written.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kos.commands import program
from kos.errors import CheckpointError, ConfigError, KosError
from kos.files import printing, sync
from kos.reporting import ArgumentParser, end_command
from kos.train import missing


def export(source: Path, out: Path, dtype: str, merge: bool = False) -> int:
    """Write ``out``, a new or empty folder, from the run or checkpoint ``source``; the number of its parameters.

    ``out`` appears whole or not at all. A weight is rounded to the nearest number of ``dtype``, to even ones if two are
    as near, as torch does. Takes the memory of one tensor. ``merge``: write the sum of base and adapters.
    """
    from kos.train import checkpoint
    from kos.train.model import peft

    of_peft = peft.is_folder(source) and not (source / checkpoint.MANIFEST).exists()
    if of_peft and not merge:
        how = "--merge adds them to their base"
        raise ConfigError(f"{source}: expected a run or a checkpoint, got a folder of adapters; {how}")
    found, out = source if of_peft else checkpoint.find(source, weights_only=True).path, out.resolve()
    if merge and not peft.is_folder(found):
        raise ConfigError(f"--merge: expected a run or a folder with adapters (--lora), got {found}")
    temporary = out.with_name(f"{checkpoint.TEMPORARY}{out.name}")
    try:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            got = f"one with {min(out.iterdir()).name}" if out.is_dir() else "a file"
            raise CheckpointError(f"{out}: expected a new or an empty folder, got {got}")
        out.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        parameters = _write(found, temporary, dtype, merge)
        sync(temporary)
        temporary.replace(out)
        sync(out.parent)
    except OSError as error:
        raise CheckpointError(f"{out}: expected to write a folder, got {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return parameters


def _write(found: Path, folder: Path, dtype: str, merge: bool) -> int:
    """Write the weights of the checkpoint ``found`` to the same names, and all other files but the optimizer's.

    ``merge``: write the weights of its base, to the names of the base's files, with its adapters added.
    """
    from kos.train.checkpoint import CONFIG, adapter, huggingface, saving
    from kos.train.model import peft
    from kos.train.model.huggingface import whole

    path = found / CONFIG if (found / CONFIG).exists() else peft.base_of(found) / CONFIG  # peft writes none
    with whole(path, "a Hugging Face config.json"):
        settings = dict(json.loads(path.read_text(encoding="utf-8")))
    saving.write_json(folder / CONFIG, settings | dict.fromkeys(("dtype", "torch_dtype"), dtype))
    if peft.is_folder(found) and not merge:
        shapes = adapter.shapes_of(model := peft.model_of(found))
        weights: Any = adapter.files_of(found, model)
    else:
        model, weights = adapter.whole_model(found)
        shapes = model.parameter_shapes()
    by_file = weights.by_file()
    for name, held in by_file.items():
        saving.write_weights(folder / name, {each: shapes[each] for each in held}, weights.read, dtype)
    parameters, size = sum(map(math.prod, shapes.values())), saving.SAVED_DTYPES[dtype][1].itemsize
    if len(by_file) > 1:
        weight_map = {each: name for name, held in by_file.items() for each in held}
        index = {"metadata": {"total_size": size * parameters}, "weight_map": weight_map}
        saving.write_json(folder / huggingface.INDEX, index)
    left_out = {CONFIG, huggingface.INDEX} | ({peft.CONFIG} if merge else set())
    for name, of in _other_files(found).items():
        if name not in left_out and not name.endswith(".safetensors"):
            shutil.copyfile(of / name, folder / name)
            sync(folder / name)
    return parameters


def _other_files(found: Path) -> dict[str, Path]:
    """The names of the files beside the weights, each with its folder: of a folder of peft, or of its base."""
    from kos.train.checkpoint import MANIFEST, adapter, read_extra
    from kos.train.model import peft
    from kos.train.trained import GENERATION

    if (found / MANIFEST).exists():
        return dict.fromkeys(json.loads((found / MANIFEST).read_text(encoding="utf-8"))["files"], found)
    home, base = Path(adapter.tokenizer_folder(str(found)) or found), peft.base_of(found)
    return dict.fromkeys([GENERATION] * (base / GENERATION).is_file(), base) | dict.fromkeys(read_extra(home), home)


def main(argv: Sequence[str] | None = None) -> int:
    parser = ArgumentParser(prog=program("kos.train.export"), description=(__doc__ or "").partition("\n")[0])
    about = "the folder of a run or of a checkpoint; with --merge, also one of adapters"
    parser.add_argument("run", type=Path, metavar="RUN", help=about)
    parser.add_argument("out", type=Path, metavar="OUT", help="the folder to write: a new or an empty one")
    about = "write the whole model of a run with --lora or of a folder of adapters: the base, with the adapters added"
    parser.add_argument("--merge", action="store_true", help=about)
    about = "the dtype of the weights (default: bfloat16)"
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help=about)
    arguments = parser.parse_args(argv)
    try:
        parameters = export(arguments.run, arguments.out, arguments.dtype, arguments.merge)
    except (KosError, ImportError) as error:
        return end_command(missing(error) if isinstance(error, ImportError) else error, inputs=arguments.run.exists())
    with printing():
        print(f"{arguments.out}: {parameters:,} parameters in {arguments.dtype}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
