"""The folder of a run, and what rank 0 writes there.

The folder is ``--out``, or a folder under ``runs/`` that no other run uses. The run locks it until its end. Besides
checkpoints it has settings, metrics, what trackers write, and the address to join.  ``run`` is a ``Trainer``.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import math
import os
import secrets
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any, TextIO

from kos.comm.communicator import Communicator
from kos.errors import ConfigError, SettingError
from kos.files import replace_file
from kos.train import checkpoint
from kos.train.checkpoint import BESIDE_TOKENIZER, read_extra, read_tokenizer_settings, with_tokenizer
from kos.train.checkpoint.adapter import shapes_of, tokenizer_folder
from kos.train.checkpoint.saving import write_json
from kos.train.checkpoint.state import state_shapes
from kos.train.config.options import TrainConfig
from kos.train.data.tokenizers import HuggingFaceTokenizer, NumberTokenizer
from kos.train.machine import provenance
from kos.train.parallel.failures import alone, together
from kos.train.parallel.fixed_order import ORDER
from kos.train.tools import METRICS, MetricsLog, read_metrics, trackers
from kos.train.tools.console import Console

ADDRESS = "address"
"""The file in the folder of an elastic run with the address for ``--join``."""

RUNS = Path("runs")
LOCK = ".lock"
SEEN_SECONDS = 5.0
"""How long a rank waits for a file that rank 0 has written: a network file system may show it late."""


def check_free(run: Any, start: int, saved_step: int) -> None:
    """ConfigError if the folder holds another run than the one that continues from ``start``."""
    left = ["checkpoints"] * bool(checkpoint.steps_in(run.checkpoints))
    left += ["metrics"] * bool(start and read_metrics(run.out / METRICS))
    if left and saved_step < 0:
        expected = "an empty folder, or --resume auto to continue from the checkpoints in it"
        raise SettingError(f"--out {run.out}", expected, f"the {left[0]} of another run", also=["resume"])


def open_output(run: Any) -> None:
    """Take the folder for a run that begins. On rank 0."""
    config, out = run.config, run.out
    try:
        check_free(run, run.start, run.saved_step)  # a run may have ended here since the first check
        out.mkdir(parents=True, exist_ok=True)
        lock_folder(out, run.held)
        checkpoint.remove_unfinished(run.checkpoints)
        shapes = run.model_config.parameter_shapes() if run.base is None else shapes_of(run.model_config)
        files = [*shapes.values(), *state_shapes(config.state_of(run.model_config), shapes).values()]
        if run.device.step.parallel.residual is not None:
            files += [*shapes.values()] * run.mesh.replicas.size
        needed = sum(4 * math.prod(shape) for shape in files)
        if run.trains and (free := shutil.disk_usage(out).free) < needed:
            run.console.say(f"the first checkpoint does not fit: {out} has {free:,} bytes free of {needed:,}")
        if run.trains or not (out / "config.json").exists():
            write_json(out / "config.json", run.description)
        if config.profile:
            return
        for number, part in enumerate(run.data.parts, 1):
            if part.packing:
                part.packing.write(out if run.data.mixture is None else out / f"source-{number}")
        if config.elastic is not None:
            publish_address(run)
        _open_metrics(run, run.start)
    except OSError as error:
        raise unwritable(out, error) from error


def take_output(run: Any) -> None:
    """Write metrics and checkpoints instead of the rank that was the first; its last row may be missing."""
    run.console = Console(0 if run.verbose else -1, run.config.steps)
    with contextlib.suppress(ConfigError):  # it may be stopped, and hold the lock
        lock_folder(run.out, run.held, run.name)
    row, run.row = run.row, None
    _open_metrics(run, run.start if row is None else row["step"] - 1)
    read_kept_files(run)
    if row is not None:
        run.log(row, last=True)


def _open_metrics(run: Any, after: int) -> None:
    """Write rows, after those up to step ``after``."""
    run.metrics = MetricsLog(run.out / METRICS, after)
    run.held.callback(run.metrics.close)
    started = trackers.start(run.config.tracker, run.out, after, run.description)

    def close(failed: type[BaseException] | None, *_: object) -> None:
        """A run that failed waits for no tracker: its error comes first."""
        run.stop.plan = "waiting for the trackers, all steps are saved"
        trackers.close(started, wait=failed is None)

    run.held.push(close)


def read_kept_files(run: Any) -> None:
    """Read the files that checkpoints keep of the source and of the tokenizer."""
    named = run.data.tokenizer.kind == HuggingFaceTokenizer.kind and run.config.tokenizer != "auto"
    run.extra = beside = read_tokenizer_settings(run.config.tokenizer) if named else {}
    if run.source is not None:
        theirs = read_extra(Path(run.source))  # a checkpoint already has the tokenizer's files
        run.extra = {**beside, **theirs} if run.resumes else with_tokenizer(theirs, beside)
        home, by_base = str(tokenizer_folder(run.source)), run.config.tokenizer == "auto"
        if by_base and home != run.source and run.data.tokenizer.kind != NumberTokenizer.kind:  # adapters without one
            others = {name: content for name, content in run.extra.items() if name not in BESIDE_TOKENIZER}
            run.extra = {**others, **read_tokenizer_settings(home)}


def publish_address(run: Any) -> None:
    """Write where others can join this run to the file ``ADDRESS``, which is there as long as the run."""
    if run.comm.address:
        replace_file(run.out / ADDRESS, run.comm.address.encode())


def remove_address(run: Any) -> None:
    """Remove what ``publish_address`` has written, unless others have written theirs."""
    with contextlib.suppress(OSError):
        if (run.out / ADDRESS).read_bytes() == run.comm.address.encode():
            (run.out / ADDRESS).unlink()


def run_folder(config: TrainConfig) -> Path:
    """``config.out``, or the first free of ``runs/PRESET``, ``runs/PRESET-2``, …, which is then made.

    With ``--resume auto`` it is the last one that has checkpoints. Call it on one rank.
    """
    if config.out is not None:
        return config.out
    first = RUNS / config.preset
    folders = itertools.chain([first], (RUNS / f"{config.preset}-{number}" for number in itertools.count(2)))
    try:
        if config.resume == "auto":
            taken = list(itertools.takewhile(Path.exists, folders)) or [first]
            return next((folder for folder in reversed(taken) if (folder / "checkpoints").is_dir()), taken[-1])
        while True:
            folder = next(folders)
            with contextlib.suppress(FileExistsError):
                folder.mkdir(parents=True)
                return folder
    except OSError as error:
        raise unwritable(RUNS, error) from error


def unwritable(out: Path, got: object) -> ConfigError:
    return SettingError(f"--out {out}", "a folder that can be written", got)


def check_folder(out: Path, rank: int) -> None:
    """ConfigError if ``rank`` cannot write to ``out`` and ``out/checkpoints``, or create them. Leaves no files there.

    It tries to write: for root, on a network file system or in /proc, ``os.access`` may be wrong.
    """
    places = out / "checkpoints", out, *out.absolute().parents
    present = (folder for folder in places if os.path.lexists(folder))
    for folder in itertools.islice(present, 1 + os.path.lexists(places[0])):
        try:
            with tempfile.TemporaryFile(dir=folder):
                continue
        except OSError as error:
            refused = f"no new file in {folder} ({error.strerror})"
            got = refused if folder.is_dir() else f"{folder}, which is not a folder"
            where = f" on rank {rank}" if rank else ""
            raise unwritable(out, f"{got}{where}") from error


def lock_folder(out: Path, held: contextlib.ExitStack, name: str = "") -> None:
    """Lock ``out`` until ``held`` closes, and write the name of this run to the lock file, by default a random one.

    Raises ConfigError if another run holds the lock.
    """
    lock = held.enter_context((out / LOCK).open("a"))
    _take(lock, out)
    lock.truncate(0)
    lock.write(name or secrets.token_hex(8))
    lock.flush()


def check_unlocked(out: Path) -> None:
    """ConfigError if another run holds the lock of ``out``, without taking it."""
    with contextlib.suppress(OSError), (out / LOCK).open("r+") as lock:
        _take(lock, out)


def _take(lock: TextIO, out: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        busy = f"--out {out}: expected a free folder, got one that a run is writing to"
        raise ConfigError(busy).about("out") from error


def check_shared(out: Path, comm: Communicator) -> str:
    """The run's name in the lock file. Raises ConfigError on all ranks if one of them sees another folder, or none."""
    name = alone(comm, (out / LOCK).read_text)

    def check() -> None:
        limit, got = time.monotonic() + SEEN_SECONDS, ""
        while got != name:
            try:
                got = (out / LOCK).read_text()
            except OSError as error:
                got = str(error)
            time.sleep(0.01)
            if got != name and time.monotonic() > limit:
                expected = "expected a folder that all ranks share: each writes its part of a checkpoint"
                raise ConfigError(f"--out {out}: {expected}; on rank {comm.rank} got {got or 'another'}").about("out")

    together(comm, check)
    return name


def describe(run: Any) -> dict[str, Any]:
    """The settings as given, the derived values and the machine of the run, for config.json and checkpoints."""
    derived = {name: value for name, value in run.config.to_json().items() if value != run.options[name]}
    config = {**run.options, "out": str(run.out)}
    exact = run.mesh.exact(run.config.device) if run.config.compress != "none" else 1
    about = {"cwd": os.getcwd(), "data_fingerprint": run.data.fingerprint, "local_replicas": exact}
    about |= {"order_of_sums": ORDER} if run.config.deterministic else {}
    packings = [each.packing for each in run.data.parts]
    about |= {"packing": [each and each.order for each in packings]} if run.data.packed else {}
    about |= {"own_loss": True} if run.loss is not None else {}
    about |= run.config.describe_groups(run.model_config)
    about |= {"base": run.base} if run.base else {}
    return {"config": config, "derived": derived, **about, **provenance(run.comm)}
