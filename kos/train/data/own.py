"""Batches that the calling program passes to the trainer, instead of those of ``--data``.

The ranks check each batch together. If a batch is invalid on one rank, or differs between ranks that must have the
same batch, all ranks raise an error.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from kos.errors import ConfigError, DataError, InvalidArgument, KosError, SettingError
from kos.train.config import flag_of
from kos.train.config.options import TrainConfig
from kos.train.data import Tokens
from kos.train.data.batches import LEFT_OUT, Dataset, counted
from kos.train.data.tokenizers import NumberTokenizer, Tokenizer, has_tokenizer, make_tokenizer
from kos.train.ops import Batch
from kos.train.parallel.failures import answers_of_all, on_every_rank
from kos.train.parallel.mesh import Axis, Mesh

Rows = Literal["all", "own"]
"""Whether ``batches`` gives each rank the whole batch, the same on all ranks, or only the rank's own rows of it."""


class EndOfBatches(DataError):
    """Raised on all ranks if a rank has no batch for the next step."""


class OwnBatches:
    """Reads the iterable ``batches``, or the batch in ``given``.  A step that is repeated gets the same batch again."""

    ahead = False
    """The batch of the next step may depend on the weights."""

    mesh: Mesh
    """The mesh of the device that currently reads the batches."""

    vocab_size: int

    fields: tuple[str, ...] = ()
    """The fields of ``Batch`` that the first batch had.  All later batches must have the same."""

    def __init__(self, batches: Iterable[Batch], rows: Rows, config: TrainConfig) -> None:
        if rows not in ("all", "own"):
            raise InvalidArgument(f"rows: expected 'all' or 'own', got {rows!r}")
        if not isinstance(batches, Iterable):
            raise InvalidArgument(f"batches: expected an iterable of Batch, got {type(batches).__name__}")
        self.rows, self._batches, self._config = rows, batches, config
        self.given: Any = None
        self._iterator: Iterator[Any] | None = None
        self._step, self._taken, self._batch, self._count = -1, -1, Batch(None), 0
        self._has_state = all(hasattr(batches, name) for name in ("state_dict", "load_state_dict"))
        self._of_steps = isinstance(batches, tuple) and not batches
        """Whether the program passes a batch to each step.  After a resume, it must itself pass the next one."""

    def use(self, mesh: Mesh, vocab_size: int) -> None:
        """Read for the ranks of ``mesh`` from now on.  They compare the batch of an unfinished step again."""
        self.mesh, self.vocab_size, self._step = mesh, vocab_size, -1

    def check(self, config: TrainConfig) -> None:
        """Raise ConfigError for settings that apply only to ``--data``, or that need a state of the batches."""
        for name in ("data", "val_data", "epochs", "fit"):
            if (got := getattr(config, name)) != (default := TrainConfig.model_fields[name].default):
                steps = " (set steps instead)" * (name == "epochs")  # epochs are a default with init_from
                raise SettingError(flag_of(name), f"{default or 'none'} with batches of one's own{steps}", got)
        for name in ("resume", "elastic"):
            has_state = self._has_state or (self._of_steps and name == "resume")
            if getattr(config, name) is not None and not has_state:
                expected = "batches with state_dict and load_state_dict"
                raise SettingError(flag_of(name), expected, type(self._batches).__name__)
        if config.elastic is not None and self.rows == "own":
            raise SettingError("--elastic", "rows='all': the rows of a lost rank would be lost", "rows='own'")

    def state(self) -> Any:
        """The state of this rank's batches, in types of JSON; None if they have no state."""
        try:
            return json.loads(json.dumps(self._batches.state_dict())) if self._has_state else None  # type: ignore[attr-defined]
        except (TypeError, ValueError) as error:
            raise DataError(f"state_dict of the batches: expected values that JSON has, got {error}") from error

    def load_state(self, saved: Any, rank: int, ranks: int) -> None:
        """Restore ``saved``: ``rows``, and the states of the data-parallel ranks.  This is ``rank`` of ``ranks``."""
        if self._of_steps:
            return
        rows, states = saved or ("none", [])
        if rows != self.rows or (rows == "own" and len(states) != ranks):
            expected = f"a checkpoint of batches with rows={self.rows!r} on {ranks} ranks of dp"
            raise SettingError("--resume", expected, f"rows={rows!r} on {len(states)}")
        self._batches.load_state_dict(states[rank if rows == "own" else 0])  # type: ignore[attr-defined]

    def micro_batches(self, step: int, rows_of_each: Sequence[range], dp: Axis) -> tuple[list[Batch], float]:
        """See ``Batches``.  Raises as ``read`` does."""
        self.read(step)
        first = 0 if self.rows == "all" else rows_of_each[0].start
        own = [self._batch.rows(slice(rows.start - first, rows.stop - first)) for rows in rows_of_each]
        return own, (self._count or math.inf) * len(rows_of_each[0]) / self._config.batch_size

    def read(self, step: int) -> tuple[str, ...]:
        """Read the batch of ``step``, together with the other ranks.  Returns ``fields``.

        Raises EndOfBatches if a rank has no batch.  Raises DataError if a batch has an unexpected shape, value or
        field, or differs between ranks that must have the same batch.  If one rank raises, all ranks do.
        """
        if step == self._step and self.given is None:
            return self.fields
        rows = self._config.batch_size // (1 if self.rows == "all" else self.mesh.dp.size)

        def take() -> str:
            given, self.given = self.given, None
            if given is None and step == self._taken:  # ranks were lost since it was read
                return _about([self._batch])
            if given is None:
                self._iterator = self._iterator or iter(self._batches)
                given = next(self._iterator, None)
            if given is None:
                return "none"
            batch = self._checked(given, rows)
            present = tuple(name for name, field in batch._asdict().items() if field is not None)
            if self.fields not in ((), present):
                raise DataError(f"batch: expected {self.fields}, the fields of the first batch, got {present}")
            self.fields, self._batch, self._taken = present, batch, step
            return _about([batch])

        self._step = -1
        try:
            answers = self._agreed(f"batch of step {step + 1}", take)
        except DataError:
            self._taken = -1  # the program may pass another batch
            raise
        if "none" in answers and not self.fields:
            raise on_every_rank(DataError("batches: expected at least one, got none"))
        if "none" in answers:
            raise on_every_rank(EndOfBatches(f"batch of step {step + 1}: expected one more, got none"))
        self._step, self._count = step, _total(answers)
        return self.fields

    def checked(self, batches: Iterable[Batch]) -> list[Batch]:
        """Checked copies of validation batches of any size.  DataError as ``read``, or if no target counts."""
        found = list[Batch]()

        def take() -> str:
            found.extend(self._checked(each) for each in batches)
            return _about(found)

        if not _total(self._agreed("validation batches", take)):
            raise on_every_rank(DataError("validation batches: expected a target that the loss counts, got none"))
        return found

    def _agreed(self, what: str, take: Callable[[], str]) -> list[str]:
        """The answer of ``take`` for each index of dp, or one for all ranks with ``rows="all"``.

        Raises DataError if ranks that must have the same answer differ.  An OSError or MemoryError of the program's
        batches is raised as it is on its rank, and as a KosError with its text on the others.
        """
        own, first = list[OSError | MemoryError](), dict[int, int]()

        def kept() -> str:
            try:
                return take()
            except (OSError, MemoryError) as error:
                if not isinstance(error, KosError):
                    own.append(error)
                raise

        try:
            every = answers_of_all(self.mesh.world, kept)
        except KosError as error:
            if own:
                raise own[0] from error
            raise
        for rank, answer in enumerate(every):
            other = first.setdefault(self.rows == "own" and self.mesh.layout.coordinates(rank)["dp"], rank)
            if answer != every[other]:
                one, two = ("none" if each == "none" else "batches" for each in (every[other], answer))
                got = f"{one} on rank {other} and {'other ' * (one == two)}{two} on rank {rank}"
                text = f"{what}: expected the same on both (rows={self.rows!r}), got {got}"
                raise on_every_rank(DataError(text))
        return [every[rank] for rank in first.values()]

    def _checked(self, given: Any, rows: int | None = None) -> Batch:
        """A copy of a batch of ``rows`` sequences (None: any number), with fields of the dtypes of ``Batch``."""
        if not isinstance(given, Batch) or given.tokens is None or given.targets is None:
            raise DataError(f"batch: expected a kos.train.Batch with tokens and targets, got {given!r:.80}")
        fields = {name: np.asarray(field) for name, field in given._asdict().items() if field is not None}
        shape, most = (len(fields["tokens"]) if rows is None else rows, self._config.seq_len), self.vocab_size - 1
        for name, field in fields.items():
            kinds, words, dtype = ("iu", "integers", np.int32) if name != "weights" else ("fiu", "numbers", np.float32)
            if field.shape != shape or field.dtype.kind not in kinds:
                raise DataError(f"{name} of a batch: expected {words} {shape}, got {field.dtype} {field.shape}")
            least = LEFT_OUT if name == "targets" else 0
            if name in ("tokens", "targets") and field.size and not least <= field.min() <= field.max() <= most:
                got = f"{field.min()} to {field.max()}"
                raise DataError(f"{name} of a batch: expected {least} to {most}, got {got}")
            fields[name] = np.array(field, dtype, order="C")  # the program may overwrite its array
        batch = Batch(**fields)
        batch.check()
        return batch


def _about(batches: Sequence[Batch]) -> str:
    """A digest of the contents of ``batches``, and the number of targets that the loss counts."""
    digest = hashlib.blake2b(digest_size=8)
    for name, field in ((name, field) for batch in batches for name, field in batch._asdict().items()):
        digest.update(b"" if field is None else f"{name} {len(field)} ".encode() + field.tobytes())
    return f"{digest.hexdigest()} {sum(map(counted, batches))}"


def _total(answers: Iterable[str]) -> int:
    return sum(int(answer.split()[1]) for answer in answers)


def own_data(config: TrainConfig, weights: str | None = None) -> Dataset:
    """The dataset of a run whose program passes the batches.  ``weights`` is as for ``load_data``.

    Raises ConfigError if the run has neither a tokenizer nor a vocabulary, and DataError if the tokenizer cannot encode
    the prompt.
    """
    spec, none, name = config.tokenizer, Tokens([np.zeros(0, np.uint16)]), "batches of the program"
    if spec == "auto" and (folder := weights or config.init_from) and has_tokenizer(Path(folder)):
        spec = folder
    if spec == "auto" and config.model.vocab_size is None:
        expected = "bytes, a tokenizer.json, or auto with --vocab-size"
        raise ConfigError(f"--tokenizer: expected {expected}, got {spec}").about("tokenizer", "vocab_size")
    tokenizer: Tokenizer = NumberTokenizer(config.model.vocab_size or 0) if spec == "auto" else make_tokenizer(spec)
    tokenizer.encode(config.prompt)  # DataError before the run, not after it
    return Dataset(
        name=name, train=none, val=none, tokenizer=tokenizer, seed=config.seed, batch_size=config.batch_size,
        seq_len=config.seq_len, eval_batches=0, fingerprint=name, trains=False,
    )  # fmt: skip
