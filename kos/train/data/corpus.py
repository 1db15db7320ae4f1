"""Finds the data that ``--data`` and ``--val-data`` name, and splits it into training and validation."""

from __future__ import annotations

import glob
import logging
import os
import re
import sysconfig
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from kos.errors import ConfigError, DataError, plural
from kos.train.config import HOLD_OUT
from kos.train.data import VOCAB_SIZES, is_tokenized, mask_of, open_tokens
from kos.train.data.documents import (
    OPENERS,
    TEXT,
    Document,
    Lines,
    Records,
    check_kind,
    is_converted,
    kind_of,
    open_documents,
)
from kos.train.data.tokenizers import SAVED

_log = logging.getLogger(__name__)

MUCH_HELD_OUT = 0.2
"""If a larger share of the tokens is held out, the log shows the share."""

SPLIT_WORDS = {"train": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}
"""Words in the name of a file or of its folder, and the split that the file belongs to."""

NOTED = re.compile(r"(?<![a-z])(dev|eval|held[-_]?out)(?![a-z])")
"""In names of files that a user may expect to be held out, but which are trained on."""

SHOWN = 3  # files that the log names, at most

Show = Callable[[str, float], object]
"""Called now and then, with what is being done and the share that is done."""


class File(NamedTuple):
    """One file: its name for the log, the split that its name says, and its text, its records or its tokens."""

    name: str
    split: str
    path: Path | None
    content: Any

    @property
    def size(self) -> int:
        """In bytes; without a path, the length of the content."""
        return self.path.stat().st_size if self.path else len(self.content)

    @property
    def key(self) -> str:
        """Equal for two paths of one file."""
        return os.path.realpath(self.path) if self.path else self.name


class Splits(NamedTuple):
    """The data for training and for validation: texts and records, or arrays of tokens, which stay in their files.

    ``held_out`` describes the validation data for the log, and ``trained_on`` the files of the training data.
    ``chosen`` is true if kos has held out whole files, although no file is named for validation.
    """

    train: Sequence[Any]
    val: Sequence[Any]
    held_out: str
    trained_on: str
    chosen: bool = False

    def describe(self, train: int, val: int) -> str:
        """``held_out``, and the share of the tokens if it may be larger than a user expects."""
        if not self.chosen or val <= MUCH_HELD_OUT * (train + val):
            return self.held_out
        how = "--val-data, or a file with val in its name, replaces it"
        return f"{self.held_out}, which is {val / (train + val):.0%} of the tokens ({how})"


@dataclass(frozen=True)
class _Source:
    """The data that ``--data`` or ``--val-data`` names."""

    name: str
    paths: Sequence[Path]  # empty for data without files of its own
    read: Callable[[], list[File]]
    vocab_size: int | None = None
    below: Sequence[str] = ()
    tokenized: Path | None = None


@dataclass(frozen=True)
class Corpus:
    """The data of a run."""

    name: str
    files: Sequence[Path]  # of --data; empty for data without files of its own
    read: Callable[[], Splits]
    vocab_size: int | None = None  # of tokens; None: text
    val_files: Sequence[Path] = ()  # of --val-data
    below: Sequence[str] = ()  # the paths of files below --data, which tell their splits
    tokenized: Path | None = None  # the folder of ``kos tokenize`` that --data names
    flags: Sequence[tuple[str, str]] = (("--data", ""), ("--data", ""))  # those that name ``train`` and ``val``
    lines: Sequence[Lines] = (TEXT,)  # how the files of each source are read
    hold_out: float = HOLD_OUT

    @cached_property
    def splits(self) -> Splits:
        """Training and validation data, read when they are first asked for.  Raises DataError as ``read_corpus``."""
        return self.read()

    @property
    def other_val(self) -> bool:
        """Whether the validation data is that of ``--val-data``."""
        return self.flags[0] != self.flags[1]

    @property
    def split_by(self) -> list[Any]:
        """What the splits depend on besides the files.  With the defaults it is what earlier versions had in a key.

        Several sources have a mark, since earlier versions split them together.
        """
        several = len(self.lines) - self.other_val > 1
        return [self.other_val, *[self.hold_out] * (self.hold_out != HOLD_OUT), *["by source"] * several]

    train = property(lambda self: self.splits.train)
    val = property(lambda self: self.splits.val)


def read_corpus(
    data: str | Sequence[str],
    show: Show = lambda what, share: None,
    *,
    val_data: str | None = None,
    lines: Lines = TEXT,
    val_flag: str = "--val-data",
    hold_out: float = HOLD_OUT,
) -> Corpus:
    """The corpus that ``--data`` names.  Its validation data is what ``--val-data`` names, or a part that is held out.

    Both are ``stdlib`` or a path: a file of text, records or tokens, or a folder or glob pattern
    of such files.  Several names of ``data`` are read as one; without a name there is only validation data.  ``split``
    describes which data is held out; ``hold_out`` is the fraction.  Each of several names is split separately, unless a
    file is named for validation.  ``val_flag`` names ``val_data``.

    ConfigError: missing.  DataError: unreadable, empty or binary; text validated on tokens.
    """
    names = [data] if isinstance(data, str) else [*data]
    named = [*(("--data", name) for name in names), *[(val_flag, val_data or "")] * (val_data is not None)]
    sources = list[_Source]()
    for flag, name in named:
        with errors_with(flag, name):
            sources.append(_find(name, show, lines))
    first = sources[0]
    for (flag, name), each in zip(named, sources, strict=True):
        if each.tokenized and len(named) > 1:
            expected = "text, or a folder of kos tokenize as the only --data, without --val-data"
            raise ConfigError(f"{flag}: expected {expected}, got {name}").about("val_data", "data")
        if each.vocab_size != first.vocab_size:
            kinds = ["text" if one.vocab_size is None else f"tokens below {one.vocab_size}" for one in (first, each)]
            wrong = f"expected {kinds[0]} as --data {names[0]}, got {kinds[1]}"
            raise DataError(f"{flag} {name}: {wrong}").about("val_data", "data")

    def read() -> Splits:
        contents = list[list[File]]()
        for (flag, name), each in zip(named, sources, strict=True):
            with errors_with(flag, name):
                contents.append(each.read())
        if len(names) > 1:
            contents = [[each._replace(split=each.split or split_of(each.name)) for each in of] for of in contents]
        files = [*chain(*contents[: len(names)])]
        by_source = len(names) > 1 and not val_data and not _validation_files(files)
        parts, val_files = list[Splits](), contents[-1] if val_data else None
        for (flag, name), of in zip(named, contents if by_source else [files], strict=False):
            with errors_with(flag, name):  # it counts documents
                parts.append(split(name, of, val_files, f"{val_data} ({val_flag})", hold_out))
        train, val, held_out, trained_on, chosen = zip(*parts, strict=True)
        texts = " and ".join(held_out), " and ".join(trained_on)
        return Splits([*chain(*train)], [*chain(*val)], *texts, any(chosen))

    of_data = sources[: len(names)]
    return Corpus(
        first.name, [*chain(*(each.paths for each in of_data))], read, first.vocab_size,
        sources[-1].paths if val_data is not None else (), [*chain(*(each.below for each in of_data))],
        first.tokenized, (named[0], named[-1 if val_data is not None else 0]), [lines.of(name) for _, name in named],
        hold_out,
    )  # fmt: skip


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
    path, lines = Path(data), lines.of(data)
    if path.is_dir() and is_tokenized(path):
        return _Source(data, [each for each in sorted(path.iterdir()) if each.is_file()], list, tokenized=path)
    if path.is_dir():
        return _of_files(path.name or data, _visible_files(path), path, show, lines)
    if path.is_file():
        if kind_of(path, lines.token_dtype) == "tokens":
            return _of_files(path.name, [path], None, show, lines)
        check_kind(path)
        return _Source(path.name, [path], lambda: [File(path.name, "", path, open_documents(path, lines))])
    if path.exists():
        raise DataError(f"--data: expected a regular file or a folder, got {data!r} (a device, pipe or socket)")
    if matches := [Path(match) for match in sorted(glob.glob(data, recursive=True))] if glob.has_magic(data) else []:
        home = Path(os.path.commonpath([match.parent for match in matches]))
        return _of_files(data, [match for match in matches if match.is_file()], home, show, lines)
    raise ConfigError(f"--data: expected stdlib, or the path of a file or folder, got {data!r} (no such file)")


def _of_files(name: str, paths: Sequence[Path], home: Path | None, show: Show, lines: Lines) -> _Source:
    """The source of several files, or of one token file.  The path of a file below ``home`` tells its split."""

    def below(path: Path) -> str:
        return path.name if home is None else str(path.relative_to(home))

    def file(path: Path, content: Any) -> File:
        return File(below(path), "" if home is None else split_of(below(path)), path, content)

    def read_texts() -> list[File]:
        files = []
        for number, path in enumerate(texts):
            show("reading the data", number / len(texts))
            try:
                if not path.stat().st_size:
                    raise DataError(f"--data {path}: expected documents, got an empty file")
                files.append(file(path, open_documents(path, lines)))
            except DataError as error:
                if path.suffix.lower() in OPENERS and path.stat().st_size:  # it may be damaged
                    raise
                _log.warning("skipped: %s", error)
        if not files:
            raise DataError(
                f"--data {home}: expected a folder with text files, got {len(paths)} files, none of them text"
            )
        return files

    may_be = [path for path in paths if path.suffix in ("", ".bin", ".npy")] if home else paths
    tokens = [path for path in may_be if kind_of(path, lines.token_dtype) == "tokens"]
    masks = [mask for path in tokens if (mask := mask_of(path)).is_file()]
    texts = sorted({*paths} - {*tokens, *masks})
    if tokens:
        if texts:
            _log.warning("skipped, since there are token files: %s", _names([str(path) for path in texts]))
        files = [file(path, open_tokens(path, lines.token_dtype)) for path in tokens]
        sizes = [each.content.tokens.itemsize for each in files]
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


def split(
    data: str, files: Sequence[File], val_files: Sequence[File] | None = None, val_name: str = "",
    hold_out: float = HOLD_OUT,
) -> Splits:  # fmt: skip
    """Split files into training data and validation data.

    Held out are the files named for validation, or else those named for test.  If there are none, every tenth file
    whose name does not say ``train`` is held out, at least one.  If there is no such file, or only a single file, the
    last tenth of each file is held out.  ``hold_out`` is this fraction, here a tenth; with 0, nothing is held
    out.  With ``val_files``, those are held out instead: the ones named for validation or test, or else all.  A file
    named for validation or test is never trained on.
    """
    held, text, chosen, part = _validation_files(files), "", False, Fraction(str(hold_out))
    if val_files is not None:
        held, text = _validation_files(val_files) or [*val_files], val_name
    elif not held and len(files) > 1 and part:
        numbered = [each for each in files if each.split == ""]
        held = [each for n, each in enumerate(numbered) if int((n + 1) * part) > int(n * part)] or numbered[-1:]
        text, chosen = f" (of {len(files)} files)" * bool(held), bool(held)
    apart = {each.key for each in held}
    train = [each for each in files if each.split not in ("val", "test") and each.key not in apart]
    if files and not train:
        got = f"only files that are held out: {_names([each.name for each in files])}"
        raise DataError(f"--data {data}: expected files to train on, got {got}")
    kept = apart | {each.key for each in train}
    left = [each.name for each in files if each.key not in kept]
    if held:
        parts = [each.content for each in train], [each.content for each in held]
        text = text if val_files is not None else _names([each.name for each in held]) + text
    elif part:
        cuts = [_cut(each.content, part) for each in train]
        parts = [before for before, _ in cuts], [after for _, after in cuts if after is not None]
        share = "tenth" if part == Fraction(1, 10) else f"{float(100 * part):g}%"
        text = f"the last {share} of {_names([each.name for each in train])}"
    else:
        parts, text = ([each.content for each in train], []), "nothing (--hold-out)"
    text += f"; left out: {_names(left)}" * bool(left)
    return Splits(parts[0], parts[1], text, _trained_on([each.name for each in train]), chosen)


def _trained_on(names: Sequence[str]) -> str:
    noted = _names([name for name in names if NOTED.search(name.lower())])
    note = f" (also on {noted}: only val, valid, validation or test in a name holds a file out)" * bool(noted)
    return f"{plural(len(names), 'file')}: {_names(names)}{note}"


def _validation_files(files: Sequence[File]) -> list[File]:
    """The files named for validation, or else those named for test."""
    val, test = ([each for each in files if each.split == name] for name in ("val", "test"))
    return val or test


def _cut(content: Any, part: Fraction) -> tuple[Any, Any]:
    """The beginning and the last ``part``, as in nanoGPT's prepare.py: of records, of a single text, or of tokens.

    Nothing is held out if there is only one record and its documents have parts.
    """
    if (size := len(content)) == 1 and isinstance(content, Records):
        (text, *_) = content
        if isinstance(text, Document):
            return content, None
        content, size = text, len(text)
    at = int(size * (1 - part))
    return content[:at], content[at:]


def _names(names: Sequence[str]) -> str:
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")


def _stdlib() -> list[File]:
    texts = zip(("train", "val"), (TRAIN, VAL), read_stdlib(), strict=True)
    return [
        File(f"{name}.py", split, None, text)
        for split, names, each in texts
        for name, text in zip(names, each, strict=True)
    ]


def _visible_files(folder: Path) -> list[Path]:
    def fail(error: OSError) -> None:
        raise error

    found, skipped = [], []
    for where, folders, files in os.walk(folder, onerror=fail):
        folders[:] = [name for name in folders if not name.startswith(".")]
        kinds = (_is_run, _is_checkpoint, is_tokenized)
        ours = [name for name in folders if any(is_kind(Path(where, name)) for is_kind in kinds)]
        if where == str(folder) and _is_run(folder):
            ours += ["checkpoints", "config.json", "metrics.jsonl", "packing.npy"]
            ours += [name for name in folders if re.fullmatch(r"source-\d+", name)]
        skipped += [path for name in ours if (path := Path(where, name)).exists()]
        folders[:] = [name for name in folders if name not in ours]
        found += [Path(where, name) for name in files if not name.startswith(".") and name not in ours]
    if skipped:
        paths = ", ".join(map(str, sorted(skipped)))
        _log.warning("skipped, as parts of runs, checkpoints or tokenized data: %s", paths)
    return sorted(path for path in found if path.is_file())


def _is_run(folder: Path) -> bool:
    has_config = (folder / "config.json").is_file()
    return has_config and ((folder / "checkpoints").is_dir() or (folder / "metrics.jsonl").is_file())


def _is_checkpoint(folder: Path) -> bool:
    return (folder / "manifest.json").is_file() and (folder / SAVED).is_file()


_FILES = tomllib.loads(Path(__file__).with_name("stdlib.toml").read_text("utf-8"))
TRAIN, VAL = tuple(_FILES["train"]), tuple(_FILES["val"])


def read_stdlib(root: Path | None = None) -> tuple[list[str], list[str]]:
    """The training and the held-out files, as text, in a fixed order.  DataError if this Python lacks them."""
    root = root or Path(sysconfig.get_paths()["stdlib"])
    try:
        train, val = ([(root / f"{name}.py").read_text("utf-8") for name in names] for names in (TRAIN, VAL))
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"--data stdlib: expected this Python to ship its sources, got {error}; give --data PATH"
        ) from None
    return train, val
