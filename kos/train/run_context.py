"""A run as its parts know it: settings, ranks, data, device, how far it is; its folder, and what rank 0 writes there.

The folder is ``--out``, or a folder under ``runs/`` that no other run uses. The run locks it until its end. Besides
checkpoints it has settings, metrics, what trackers write, and the address to join.
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
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TextIO

from kos.comm.communicator import Communicator
from kos.errors import ConfigError, InvalidArgument, SettingError
from kos.files import replace_file
from kos.train import checkpoint
from kos.train.checkpoint import BESIDE_TOKENIZER, Extra, read_extra, read_tokenizer_settings, with_tokenizer
from kos.train.checkpoint.adapter import shapes_of, tokenizer_folder
from kos.train.checkpoint.huggingface import TensorFiles, weight_files
from kos.train.checkpoint.saving import Saving, write_json
from kos.train.checkpoint.state import state_shapes
from kos.train.config import flag_of
from kos.train.config.options import TrainConfig
from kos.train.data.batch import Batch
from kos.train.data.batches import Dataset
from kos.train.data.own import OwnBatches, Rows
from kos.train.data.tokenizers import HuggingFaceTokenizer, NumberTokenizer
from kos.train.device import Device
from kos.train.device.choose import make_device
from kos.train.machine import provenance
from kos.train.model.llama import LlamaConfig
from kos.train.ops import CudaLoss, Loss
from kos.train.ops.fixed_order import ORDER
from kos.train.parallel.failures import Stop, alone, together
from kos.train.parallel.mesh import Mesh
from kos.train.program import Callback
from kos.train.tools import trackers
from kos.train.tools.console import Console
from kos.train.tools.metrics import METRICS, MetricsLog, read_metrics

ADDRESS = "address"
"""The file in the folder of an elastic run with the address for ``--join``."""

RUNS = Path("runs")
LOCK = ".lock"
SEEN_SECONDS = 5.0
"""How long a rank waits for a file that rank 0 has written: a network file system may show it late."""


class RunContext:
    """The state of a run of ``config``. ``Trainer`` (``run.py``) begins one, and ``Newcomer`` joins one.

    ``held`` is what the end of the run closes. ``asked`` are the settings as they were given.
    """

    comm: Communicator
    mesh: Mesh
    device: Device
    data: Dataset
    model_config: LlamaConfig
    console: Console
    out: Path
    source: str | None
    """The folder of the weights from which the run began."""
    found: checkpoint.Checkpoint | None
    """The checkpoint that the run resumes, with its settings and files."""
    resumes: bool
    """Whether ``source`` is a checkpoint, and not only weights."""
    name: str
    """That no other run on ``out`` has."""
    start: int
    steps_done: int
    saved_step: int
    """Steps that are done at the start, now, and in the last checkpoint (-1: none)."""
    updates: int
    """The steps until ``start`` that were not skipped."""
    trains: bool
    """Whether there are steps to train."""

    own: OwnBatches
    """The batches of the program; those of ``data`` unless ``brings_batches``."""

    def __init__(
        self, config: TrainConfig, stop: Stop | None = None, *, batches: Iterable[Batch] | None = None,
        rows: Rows = "all", val_batches: Iterable[Batch] | None = None, loss: Loss | None = None,
        callbacks: Sequence[Callback] = (), verbose: bool = True,
    ) -> None:  # fmt: skip
        listed = isinstance(callbacks, Collection) and all(isinstance(each, Callback) for each in callbacks)
        again = isinstance(val_batches, Iterable) and not isinstance(val_batches, Iterator)
        for name, right, expected, got in (
            ("config", isinstance(config, TrainConfig), "a kos.train.TrainConfig", config),
            ("loss", loss is None or isinstance(loss, CudaLoss) or callable(loss), "a function or a CudaLoss", loss),
            ("val_batches", again or val_batches is None, "a list, or what else can be iterated again", val_batches),
            ("callbacks", listed, "a list of objects of kos.train.Callback", callbacks),
        ):
            if not right:
                raise InvalidArgument(f"{name}: expected {expected}, got {got!r:.80}")
        self.config, self.asked, self.loss, self.val_batches = config, config.to_json(), loss, val_batches
        self.brings_batches = batches is not None
        self.own = OwnBatches(() if batches is None else batches, rows, config)
        self.callbacks, self.watched = callbacks, False  # whether any rank has some
        self.verbose, self.ended = verbose, False
        if self.brings_batches:
            self.own.check(config)
        if self.brings_batches or val_batches is not None:
            metrics = ["none", *["val_loss"] * (val_batches is not None)]
            if config.eval_data:
                raise SettingError("--eval-data", "none with batches of one's own", config.eval_data[0])
            if (config.best_metric or "none") not in metrics:
                flag, expected = flag_of("keep_best" if config.keep_best else "patience"), " or ".join(metrics)
                raise SettingError(flag, f"{expected} with batches of one's own", config.best_metric)
        self.stop: Stop = stop or Stop()
        self.metrics: MetricsLog | None = None  # on rank 0
        self.extra: Extra = {}
        self.base: dict[str, str] | None = None
        """With ``--lora``, the path of the model that is adapted, and the SHA-256 of its weights."""
        self.skipped: set[int] = set()  # steps left out, of those of this run
        self.without_targets = 0  # steps of this run in which the loss counted nothing
        self.last_finite: int | None = None  # the last step whose gradients were finite
        self.row: dict[str, Any] | None = None  # the last that was written
        self.epoch = 0
        """How often the ranks have changed (``--elastic``); -1: this rank has not joined them."""
        self.untrained: dict[str, float] = {}  # validation losses before training
        self.best: tuple[int, float] | None = None  # step and value of --keep-best; None: not known yet
        self.improved = False
        self.saving: Saving | None = None
        self.held: contextlib.ExitStack = contextlib.ExitStack()
        self.held.callback(lambda: self.drop_save())

    @property
    def checkpoints(self) -> Path:
        return self.out / "checkpoints"

    @property
    def data_in_words(self) -> str:
        packed = "".join(f", packed {each.digest[:12]}" for part in self.data.parts if (each := part.packing))
        others = "".join(f", {name} {each.fingerprint[:12]}" for name, each in self.data.others.items())
        loss = ", with a loss of its own" * (self.loss is not None)
        return f"{self.data.name} ({self.data.fingerprint[:12]}{packed}{others}){loss}"

    @property
    def exhausted(self) -> bool:
        """Whether no validation of the last ``--patience`` was the best."""
        patience = self.config.patience * self.config.eval_every
        return bool(patience) and self.best is not None and self.steps_done - self.best[0] >= patience

    @cached_property
    def description(self) -> dict[str, Any]:
        """The settings as given, the derived values and the machine of the run, for config.json and checkpoints."""
        derived = {name: value for name, value in self.config.to_json().items() if value != self.asked[name]}
        config = {**self.asked, "out": str(self.out)}
        exact = self.mesh.exact(self.config.device) if self.config.compress != "none" else 1
        about = {"cwd": os.getcwd(), "data_fingerprint": self.data.fingerprint, "local_replicas": exact}
        about |= {"order_of_sums": ORDER} if self.config.deterministic else {}
        packings = [each.packing for each in self.data.parts]
        about |= {"packing": [each and each.order for each in packings]} if self.data.packed else {}
        about |= {"own_loss": True} if self.loss is not None else {}
        about |= self.config.describe_groups(self.model_config)
        about |= {"base": self.base} if self.base else {}
        return {"config": config, "derived": derived, **about, **provenance(self.comm)}

    @property
    def validates(self) -> bool:
        """Whether there are batches to validate on."""
        return self.val_batches is not None or bool(self.data.evaluated)

    @property
    def brings(self) -> dict[str, Any]:
        """What the program brings, the same on all ranks."""
        own = {"batches": self.brings_batches, "rows": self.own.rows, "loss": self.loss is not None}
        return own | {"val_batches": self.val_batches is not None}

    @property
    def of_program(self) -> bool:
        """Whether the command alone could not continue the run: the program brings its batches or its loss."""
        return self.brings_batches or self.loss is not None

    def make_device(self) -> None:
        """Make the device for the ranks of ``mesh``. Collective."""
        self.own.use(self.mesh, self.model_config.vocab_size)
        self.device = make_device(
            self.config, self.model_config, self.data, self.mesh, self.console.progress,
            source=self.own if self.brings_batches else self.data, watched=self.watched, loss=self.loss,
            stop_request=lambda: self.stop.wish,
        )  # fmt: skip

    def base_weights(self) -> TensorFiles:
        """The weights of the base of adapters."""
        assert self.base is not None
        return weight_files(Path(self.base["path"]), self.model_config.base.parameter_shapes())

    def log(self, row: dict[str, Any], last: bool) -> None:
        """Print and write the metrics of a step."""
        if self.row is not None and self.row["step"] == row["step"]:
            return  # before the ranks changed
        self.row = row
        self.console.step(row, log=self.steps_done % self.config.log_every == 0 or last)
        if self.metrics is not None:
            self.metrics.write(row)

    def finish_save(self) -> None:
        """Wait for the checkpoint that is being written; the error of one rank is raised on all. Collective."""
        if self.saving is not None:
            self.saving.finish()
            self.saved_step, self.saving = self.saving.step, None
            self.call("on_save", self.checkpoints / f"step-{self.saved_step}")

    def call(self, event: str, *arguments: Any) -> None:
        """Call a method of this rank's callbacks."""
        for each in self.callbacks:
            getattr(each, event)(self, *arguments)

    def drop_save(self) -> None:
        """End the checkpoint that is being written; it is either complete or absent."""
        if self.saving is not None:
            self.saving.cancel()
        self.saving = None


# --- the folder ---------------------------------------------------------------------------------------


def check_free(run: RunContext, start: int, saved_step: int) -> None:
    """ConfigError if the folder holds another run than the one that continues from ``start``."""
    left = ["checkpoints"] * bool(checkpoint.steps_in(run.checkpoints))
    left += ["metrics"] * bool(start and read_metrics(run.out / METRICS))
    if left and saved_step < 0:
        expected = "an empty folder, or --resume auto to continue from the checkpoints in it"
        raise SettingError(f"--out {run.out}", expected, f"the {left[0]} of another run", also=["resume"])


def open_output(run: RunContext) -> None:
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


def take_output(run: RunContext) -> None:
    """Write metrics and checkpoints instead of the rank that was the first; its last row may be missing."""
    run.console = Console(0 if run.verbose else -1, run.config.steps)
    with contextlib.suppress(ConfigError):  # it may be stopped, and hold the lock
        lock_folder(run.out, run.held, run.name)
    row, run.row = run.row, None
    _open_metrics(run, run.start if row is None else row["step"] - 1)
    read_kept_files(run)
    if row is not None:
        run.log(row, last=True)


def _open_metrics(run: RunContext, after: int) -> None:
    """Write rows, after those up to step ``after``."""
    run.metrics = MetricsLog(run.out / METRICS, after)
    run.held.callback(run.metrics.close)
    started = trackers.start(run.config.tracker, run.out, after, run.description)

    def close(failed: type[BaseException] | None, *_: object) -> None:
        """A run that failed waits for no tracker: its error comes first."""
        run.stop.plan = "waiting for the trackers, all steps are saved"
        trackers.close(started, wait=failed is None)

    run.held.push(close)


def read_kept_files(run: RunContext) -> None:
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


def publish_address(run: RunContext) -> None:
    """Write where others can join this run to the file ``ADDRESS``, which is there as long as the run."""
    if run.comm.address:
        replace_file(run.out / ADDRESS, run.comm.address.encode())


def remove_address(run: RunContext) -> None:
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
