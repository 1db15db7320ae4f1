"""Finds the data that ``--data`` and ``--val-data`` name, and splits it into training and validation."""

from __future__ import annotations

import glob
import logging
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from kos.errors import ConfigError, DataError, plural
from kos.train.data import download
from kos.train.data.documents import TEXT, Document, Lines, check_kind, is_converted, is_jsonl, read_documents
from kos.train.data.stdlib import TRAIN, VAL, read_stdlib
from kos.train.data.token_files import VOCAB_SIZES, is_token_file, mask_of, open_tokens
from kos.train.data.tokenizers import SAVED

_log = logging.getLogger(__name__)

HELD_OUT = 10
"""One part in this many is held out for validation: of a file, or of the files of a folder."""

SPLIT_WORDS = {"train": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}
"""Words in the name of a file or of its folder, and the split that the file belongs to."""

NOTED = re.compile(r"(?<![a-z])(dev|eval|held[-_]?out)(?![a-z])")
"""In names of files that a user may expect to be held out, but which are trained on."""

SHOWN = 3  # files that the log names, at most

Show = Callable[[str, float], object]
"""Called now and then, with what is being done and the share that is done."""


class File(NamedTuple):
    """One file: its name for the log, the split that its name says, and its documents or its array of tokens."""

    name: str
    split: str
    path: Path | None
    content: Sequence[Any]

    @property
    def key(self) -> str:
        """Equal for two paths of one file."""
        return os.path.realpath(self.path) if self.path else self.name


class Splits(NamedTuple):
    """The data for training and for validation: documents, or arrays of tokens that are read from their files.

    ``held_out`` describes the validation data for the log, and ``trained_on`` the files of the training data.
    """

    train: Sequence[Any]
    val: Sequence[Any]
    held_out: str
    trained_on: str


@dataclass(frozen=True)
class _Source:
    """The data that ``--data`` or ``--val-data`` names."""

    name: str
    paths: Sequence[Path]  # empty for data without files of its own
    read: Callable[[], list[File]]
    vocab_size: int | None = None
    below: Sequence[str] = ()


@dataclass(frozen=True)
class Corpus:
    """The data of a run."""

    name: str
    files: Sequence[Path]  # of --data; empty for data without files of its own
    read: Callable[[], Splits]
    vocab_size: int | None = None  # of tokens; None: text
    val_files: Sequence[Path] = ()  # of --val-data
    below: Sequence[str] = ()  # the paths of files below --data, which tell their splits
    whole: bool = False  # whether it is all to validate on; ``train`` has it then

    @cached_property
    def splits(self) -> Splits:
        """Training and validation data, read when they are first asked for.  Raises DataError as ``read_corpus``."""
        return self.read()

    train = property(lambda self: self.splits.train)
    val = property(lambda self: self.splits.val)


def read_corpus(
    data: str, show: Show = lambda what, share: None, *, val_data: str | None = None, lines: Lines = TEXT
) -> Corpus:
    """The corpus that ``--data`` names.  Its validation data is what ``--val-data`` names, or a part that is held out.

    Both are ``stdlib``, ``tinyshakespeare``, or a path: a file of text, JSON Lines or tokens, or a folder or glob
    pattern of such files.  ``split`` has the rules of what is held out.

    ConfigError: missing.  DataError: unreadable, empty or binary; JSON Lines without texts; text validated on tokens.
    """
    with errors_with("--data", data):
        source = _find(data, show, lines)
    if val_data is None:
        other = None
    else:
        with errors_with("--val-data", val_data):
            other = _find(val_data, show, lines)
        if other.vocab_size != source.vocab_size:
            kinds = [
                "text" if each.vocab_size is None else f"tokens below {each.vocab_size}" for each in (source, other)
            ]
            wrong = f"expected {kinds[0]} as --data {data}, got {kinds[1]}"
            raise DataError(f"--val-data {val_data}: {wrong}").about("val_data", "data")

    def read() -> Splits:
        with errors_with("--data", data):
            files = source.read()
            if other is None:
                return split(data, files)
        with errors_with("--val-data", str(val_data)):
            val_files = other.read()
        return split(data, files, val_files, f"{val_data} (--val-data)")

    return Corpus(source.name, source.paths, read, source.vocab_size, other.paths if other else (), source.below)


def read_held_out(data: str, show: Show, lines: Lines, flag: str) -> Corpus:
    """The corpus of all that ``flag`` names to validate on, as ``--val-data`` does.  Raises as ``read_corpus``."""
    with errors_with(flag, data):
        source = _find(data, show, lines)

    def read() -> Splits:
        with errors_with(flag, data):
            files = source.read()
        held = _validation_files(files) or files
        return Splits([*chain(*(each.content for each in held))], [], "", _names([each.name for each in held]))

    return Corpus(source.name, source.paths, read, source.vocab_size, (), source.below, whole=True)


@contextmanager
def errors_with(flag: str, data: str) -> Iterator[None]:
    """A context whose errors are ConfigErrors and DataErrors that begin with the flag."""
    key = flag.removeprefix("--").replace("-", "_")
    try:
        yield
    except OSError as error:
        got = f"{error.filename or data}: {error.strerror}"
        raise DataError(f"{flag} {data}: expected readable files, got {got}").about(key) from None
    except (ConfigError, DataError) as error:
        kind = DataError if isinstance(error, DataError) else ConfigError
        raise kind(re.sub(r"^--data\b", flag, str(error))).about(*error.settings or [key]) from None


def _find(data: str, show: Show, lines: Lines) -> _Source:
    if data == "stdlib":
        return _Source(data, [], _stdlib)
    if data == download.NAME:
        return _Source(data, [], lambda: [File(data, "", None, read_documents(download.tinyshakespeare()))])
    path = Path(data)
    if path.is_dir():
        return _of_files(path.name or data, _visible_files(path), path, show, lines)
    if path.is_file():
        if is_token_file(path):
            return _of_files(path.name, [path], None, show, lines)
        check_kind(path)
        return _Source(path.name, [path], lambda: [File(path.name, "", path, read_documents(path, lines))])
    if path.exists():
        raise DataError(f"--data: expected a regular file or a folder, got {data!r} (a device, pipe or socket)")
    if matches := [Path(match) for match in sorted(glob.glob(data, recursive=True))] if glob.has_magic(data) else []:
        home = Path(os.path.commonpath([match.parent for match in matches]))
        return _of_files(data, [match for match in matches if match.is_file()], home, show, lines)
    names = f"stdlib, {download.NAME}, or the path of a file or folder"
    raise ConfigError(f"--data: expected {names}, got {data!r} (no such file)")


def _of_files(name: str, paths: Sequence[Path], home: Path | None, show: Show, lines: Lines) -> _Source:
    """The source of several files, or of one token file.  The path of a file below ``home`` tells its split."""

    def below(path: Path) -> str:
        return path.name if home is None else str(path.relative_to(home))

    def file(path: Path, content: Sequence[Any]) -> File:
        return File(below(path), "" if home is None else split_of(below(path)), path, content)

    def read_texts() -> list[File]:
        files = []
        for number, path in enumerate(texts):
            show("reading the data", number / len(texts))
            try:
                files.append(file(path, read_documents(path, lines)))
            except DataError as error:
                if is_jsonl(path):
                    raise
                _log.warning("skipped: %s", error)
        if not files:
            raise DataError(
                f"--data {home}: expected a folder with text files, got {len(paths)} files, none of them text"
            )
        return files

    tokens = [path for path in paths if path.suffix in (".bin", "") and is_token_file(path)] if home else paths
    masks = [mask for path in tokens if (mask := mask_of(path)).is_file()]
    texts = sorted({*paths} - {*tokens, *masks})
    if tokens:
        if texts:
            _log.warning("skipped, since there are token files: %s", _names([str(path) for path in texts]))
        files = [file(path, [open_tokens(path)]) for path in tokens]
        sizes = [each.content[0].itemsize for each in files]
        if other := next((path for path, size in zip(tokens, sizes, strict=True) if size != sizes[0]), None):
            raise DataError(f"--data {other}: expected the token format of {tokens[0].name}, got another")
        names = [] if home is None else [*map(below, tokens)]
        return _Source(name, [*tokens, *masks], lambda: files, VOCAB_SIZES[sizes[0]], names)
    if converted := [path for path in texts if is_converted(path)]:
        _log.warning("skipped, since their converted files are there: %s", _names([str(path) for path in converted]))
        texts = sorted({*texts} - {*converted})
    for path in texts:
        check_kind(path)
    return _Source(name, texts, read_texts, below=[*map(below, texts)])


def split_of(name: str) -> str:
    """``val``, ``test`` or ``train`` if a word of a file's path is one of SPLIT_WORDS, else the empty string."""
    splits = {SPLIT_WORDS.get(word) for word in re.findall("[a-z]+", name.lower())}
    return next((split for split in ("val", "test", "train") if split in splits), "")


def split(data: str, files: Sequence[File], val_files: Sequence[File] | None = None, val_name: str = "") -> Splits:
    """Split files into training data and validation data.

    Held out are the files named for validation, or else those named for test.  If there are none, every tenth file
    whose name does not say ``train`` is held out, at least one.  If there is no such file, or only a single file, the
    last tenth of each file is held out.  With ``val_files``, those are held out instead: the ones named for validation
    or test, or else all.  A file named for validation or test is never trained on.
    """
    held, text = _validation_files(files), ""
    if val_files is not None:
        held, text = _validation_files(val_files) or [*val_files], val_name
    elif not held and len(files) > 1:
        numbered = [each for each in files if each.split == ""]
        held, text = numbered[HELD_OUT - 1 :: HELD_OUT] or numbered[-1:], f" (of {len(files)} files)"
    apart = {each.key for each in held}
    train = [each for each in files if each.split not in ("val", "test") and each.key not in apart]
    if not train:
        got = f"only files that are held out: {_names([each.name for each in files])}"
        raise DataError(f"--data {data}: expected files to train on, got {got}")
    kept = apart | {each.key for each in train}
    left = [each.name for each in files if each.key not in kept]
    if held:
        parts = [each.content for each in train], [each.content for each in held]
        text = text if val_files is not None else _names([each.name for each in held]) + text
    else:
        cuts = [_cut(each) for each in train]
        parts = [before for before, _ in cuts], [after for _, after in cuts]
        text = f"the last tenth of {_names([each.name for each in train])}"
    text += f"; left out: {_names(left)}" * bool(left)
    return Splits([*chain(*parts[0])], [*chain(*parts[1])], text, _trained_on([each.name for each in train]))


def _trained_on(names: Sequence[str]) -> str:
    noted = _names([name for name in names if NOTED.search(name.lower())])
    note = f" (also on {noted}: only val, valid, validation or test in a name holds a file out)" * bool(noted)
    return f"{plural(len(names), 'file')}: {_names(names)}{note}"


def _validation_files(files: Sequence[File]) -> list[File]:
    """The files named for validation, or else those named for test."""
    val, test = ([each for each in files if each.split == name] for name in ("val", "test"))
    return val or test


def _cut(file: File) -> tuple[Sequence[Any], Sequence[Any]]:
    """The first nine tenths and the rest, as in nanoGPT's prepare.py: of documents, of a single one, or of tokens.

    Of a document in parts nothing is held out.
    """
    whole = file.content if len(file.content) > 1 else file.content[0]
    if isinstance(whole, Document):
        return file.content, []
    at = int(len(whole) * (1 - 1 / HELD_OUT))
    return (whole[:at], whole[at:]) if whole is file.content else ([whole[:at]], [whole[at:]])


def _names(names: Sequence[str]) -> str:
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")


def _stdlib() -> list[File]:
    texts = zip(("train", "val"), (TRAIN, VAL), read_stdlib(), strict=True)
    return [
        File(f"{name}.py", split, None, [text])
        for split, names, each in texts
        for name, text in zip(names, each, strict=True)
    ]


def _visible_files(folder: Path) -> list[Path]:
    def fail(error: OSError) -> None:
        raise error

    found, skipped = [], []
    for where, folders, files in os.walk(folder, onerror=fail):
        folders[:] = [name for name in folders if not name.startswith(".")]
        ours = [name for name in folders if _is_run(Path(where, name)) or _is_checkpoint(Path(where, name))]
        if where == str(folder) and _is_run(folder):
            ours += ["checkpoints", "config.json", "metrics.jsonl", "packing.npy"]
            ours += [name for name in folders if re.fullmatch(r"source-\d+", name)]
        skipped += [path for name in ours if (path := Path(where, name)).exists()]
        folders[:] = [name for name in folders if name not in ours]
        found += [Path(where, name) for name in files if not name.startswith(".") and name not in ours]
    if skipped:
        _log.warning("skipped, as parts of runs or checkpoints: %s", ", ".join(map(str, sorted(skipped))))
    return sorted(path for path in found if path.is_file())


def _is_run(folder: Path) -> bool:
    has_config = (folder / "config.json").is_file()
    return has_config and ((folder / "checkpoints").is_dir() or (folder / "metrics.jsonl").is_file())


def _is_checkpoint(folder: Path) -> bool:
    return (folder / "manifest.json").is_file() and (folder / SAVED).is_file()
