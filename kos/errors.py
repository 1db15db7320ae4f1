"""The classes of all errors that kos raises on purpose.

``sentence`` writes their texts.  ``kos.comm.failures`` decides which ranks a failure names.  All errors are subclasses
of ``KosError``.  An error that corresponds to a builtin one also inherits from it (``ValueError``, ``TimeoutError``).
"""

from __future__ import annotations

import functools
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import groupby
from pathlib import Path
from types import CodeType, TracebackType
from typing import Any, ParamSpec, Self, TypeVar

from kos.commands import near, pip_install
from kos.environment import KOS_DEBUG, Variable

P = ParamSpec("P")
T = TypeVar("T")
_PACKAGE, _PYTHON = Path(__file__).resolve().parent, Path(os.__file__).parent
_reporting = False  # whether ``report_without_own_frames`` has set its hooks


class KosError(RuntimeError):
    """Base of every error that kos raises on purpose.

    A failure of a communicator also has attributes for programs.  An attribute that is not known is None.
    """

    on_every_rank = False
    """Whether every rank of the job is known to raise this same error, so that one of them may speak for all."""
    ranks: tuple[int, ...] = ()
    """The ranks that failed first, as ranks of the world, where the error is about other ranks and they are known."""
    unasked: tuple[int, ...] = ()
    """Ranks of the world that may have failed too.  This rank could not ask them, because the hub did not answer."""
    orderly = False
    """Whether the error is that a rank has closed its communicator, and not that it failed."""
    call: str | None = None
    """The call that failed, such as "world: all_reduce #3 of float32[4] by SUM"."""
    expected: Any = None
    got: Any = None
    """What differs.  Between two ranks, these are the calls or messages of both."""
    cause: KosError | None = None
    """The failure of another rank that made this call fail; None on ranks that only received a report of it."""
    settings: tuple[str, ...] = ()
    """The keys of a command's settings, of which other values can prevent the error."""

    def __init__(
        self, text: object = None, *, ranks: Iterable[int] = (), call: object = None, expected: str | None = None,
        got: str | None = None, cause: KosError | None = None,
    ) -> None:  # fmt: skip
        """The default of ``text`` is ``expected …, got …``.  The call is put before it."""
        differ = "" if expected is None else f"expected {expected}, got {got}"
        super().__init__(sentence(call, differ if text is None else f"{text}"))
        self.ranks, self.expected, self.got, self.cause = tuple(ranks), expected, got, cause
        self.call = None if call is None else f"{call}"

    def copy(self, text: object = None, call: object = None, cause: KosError | None = None) -> Self:
        """A copy without the traceback, whose frames hold arrays.  The arguments replace its text, call and cause."""
        new = type(self)(f"{self}" if text is None else text, ranks=self.ranks, call=call)
        new.expected, new.got, new.cause = self.expected, self.got, cause or self.cause
        new.call, new.orderly = new.call or self.call, self.orderly and cause is None
        new.unasked = self.unasked
        return new

    def about(self, *settings: str) -> Self:
        """This error, with the keys of its settings."""
        self.settings = tuple(dict.fromkeys(settings))
        return self


def sentence(call: object, text: str, why: str = "") -> str:
    """The text of an error of ``call``: the call, ``why`` and ``text``.

    If ``text`` begins with the same call or communicator, the result names it once.
    """
    if call is None or text.startswith(f"{call}: "):
        return text
    group, named, _ = f"{call}".partition(": ")
    return f"{call}: {why}{text.removeprefix(group + named) if named else text}"


class InvalidArgument(KosError, ValueError):
    """An argument was refused before anything was sent."""


class BackendUnavailable(KosError):
    """A backend asked for by name cannot run here; the message says why."""


class RendezvousError(KosError):
    """The ranks could not find each other, or disagree about who they are."""


class CollectiveError(KosError):
    """A collective failed after its arguments were accepted."""


class CollectiveMismatch(CollectiveError):
    """Two ranks made calls that do not belong together; names both ranks and what differs."""


class CollectiveTimeout(CollectiveError, TimeoutError):
    """An operation was not completed in time; names it and the late ranks."""


class RankLost(CollectiveError):
    """Another rank exited, was killed, or aborted while this one was waiting for it."""


class TransferError(KosError):
    """Weights could not be handed over; names the publisher or the subscriber that failed, and what it held."""


class TransferTimeout(TransferError, TimeoutError):
    """A publisher or subscriber did not answer in time; names it, and what it held."""


class ConfigError(KosError, ValueError):
    """A configuration value, file or flag was refused."""


class SettingError(ConfigError):
    """A setting has a value that it cannot have.

    ``key`` is the setting as the text names it: ``hidden_size``, ``--seq-len`` or ``--tp 2``. ``because_of`` is the
    setting that demands another value, and ``also`` are others that can be changed instead. ``hint`` says what would
    do.
    """

    def __init__(
        self, key: str, expected: str, got: object, because_of: str = "", hint: str = "", also: Sequence[str] = ()
    ) -> None:
        reason, ending = because_of and f" ({because_of})", hint and f"; {hint}"
        super().__init__(f"{key}: expected {expected}{reason}, got {got}{ending}")
        self.key, self.expected, self.got, self.because_of, self.hint = key, expected, got, because_of, hint
        self.about(*(each.partition(" ")[0].lstrip("-").replace("-", "_") for each in (key, *also)))


class DataError(KosError, ValueError):
    """Training data is missing, unreadable, too short or of the wrong format."""


class CheckpointError(KosError):
    """A checkpoint cannot be written, or is incomplete, damaged or of another model."""


class TrainingError(KosError):
    """Training cannot continue: a loss or a gradient is not finite, or ranks that hold the same weights differ."""


class OutOfMemory(KosError, MemoryError):
    """A device or a planned area has too little memory; names the bytes asked for and free."""


class CudaError(KosError):
    """A call of the CUDA driver failed; names the call, the error's code and its description."""


class CompileError(CudaError):
    """A kernel was refused by the compiler; first line: file, line and message, then the whole log."""


class PeerMemoryError(CudaError):
    """Memory of another rank cannot be mapped here; the message gives the cause."""


_SENT = {
    kind.__name__: kind for kind in (CollectiveMismatch, CollectiveTimeout, OutOfMemory, RankLost, RendezvousError)
}


def to_record(error: KosError, length: int | None = None) -> list[Any]:
    """A failure in the form in which ranks send it to each other, with at most ``length`` characters of each text."""
    parts = ((each and each[:length]) for each in (error.call, error.expected, error.got))
    return [type(error).__name__, str(error)[:length], list(error.ranks), *parts, list(error.unasked)]


def from_record(record: Sequence[Any]) -> KosError:
    """The failure of another rank; an unknown class becomes CollectiveError."""
    kind, text, ranks, *parts = record
    error = _SENT.get(kind, CollectiveError)(text, ranks=ranks)
    if parts:
        error.call, error.expected, error.got, unasked = parts
        error.unasked = tuple(unasked)
    return error


def in_words(error: BaseException) -> str:
    """An error on one line, without its type where kos raised it on purpose."""
    words = " ".join(str(error).split())
    if isinstance(error, MemoryError) and not words:  # Python's own has no text
        words = "out of host memory"
    return words if isinstance(error, KosError) and words else f"{type(error).__name__}: {words}".removesuffix(": ")


@contextmanager
def raised_as(kind: type[KosError], expected: str, *errors: type[Exception]) -> Iterator[None]:
    """A context that raises ``kind`` in place of ``errors`` (default: OSError), as ``EXPECTED, got ERROR``."""
    caught = errors or (OSError,)
    try:
        yield
    except caught as error:
        raise kind(f"{expected}, got {error}") from error


def by_handler(error: BaseException | None) -> bool:
    """Whether a signal handler raised ``error``.

    This is so for KeyboardInterrupt, and if the traceback has the code of a handler that is installed.  It is also so
    if a local variable of a frame in the traceback is the frame before it: a handler gets the interrupted frame as an
    argument.
    """
    if isinstance(error, KeyboardInterrupt):
        return True
    trace = None if error is None else error.__traceback__
    if trace is None or (trace.tb_next is None and trace.tb_frame.f_code.co_filename.startswith(f"{_PACKAGE}{os.sep}")):
        return False  # raised where it was caught, as by a socket that would block
    installed = {_code_of(signal.getsignal(number)) for number in signal.valid_signals()} - {None}
    while trace is not None:
        frame, trace = trace.tb_frame, trace.tb_next
        if frame.f_code in installed:
            return True
        if (before := frame.f_back) is None or Path(frame.f_code.co_filename).is_relative_to(_PACKAGE):
            continue
        for given in frame.f_locals.values():  # a handler has the signal number and the frame, or both in a tuple
            if given is before or (type(given) is tuple and any(each is before for each in given)):
                return True
    return False


def _code_of(handler: Any) -> CodeType | None:
    """The code of a handler; None if it is not Python's."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    function = getattr(handler, "__func__", handler)
    return getattr(function, "__code__", None) or getattr(type(handler).__call__, "__code__", None)


class ignored(suppress):
    """Like ``suppress``, but exceptions that a signal handler raises are not suppressed."""

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
        return bool(super().__exit__(kind, error, trace)) and not by_handler(error)


def plural(number: int, what: str) -> str:
    """``1 rank``, ``2 ranks``."""
    return f"{number} {what}{'s' * (number != 1)}"


def ranks_in_words(ranks: Sequence[int]) -> str:
    """``rank 3``, ``ranks 0-2, 5``."""
    runs = [[rank for _, rank in run] for _, run in groupby(enumerate(sorted(ranks)), lambda pair: pair[1] - pair[0])]
    words = [f"{run[0]}-{run[-1]}" if run[1:] else str(run[0]) for run in runs]
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(words)}"


def describe(error: BaseException) -> tuple[str, str]:
    """An uncaught error for its user: one line that ends in the place, and the frames as text.

    Frames within kos are left out of the errors that kos raises on purpose and of those that the program raised
    itself.  KOS_DEBUG=1 shows the whole traceback.
    """
    kept = traceback.TracebackException.from_exception(error)
    line = " ".join("".join(kept.format_exception_only()).split()).removeprefix("kos.errors.")
    mine = [frame for frame in kept.stack if not _in_kos(frame)]
    if places := [frame for frame in mine if not Path(frame.filename).is_relative_to(_PYTHON)]:
        line += f" ({Path(places[-1].filename).name}:{places[-1].lineno})"
    within = bool(kept.stack) and _in_kos(kept.stack[-1])  # a defect of kos, unless it raised on purpose
    chained = kept.__cause__ or (kept.__context__ and not kept.__suppress_context__)
    if debugging() or (not isinstance(error, KosError) and (chained or within)):
        return line, "".join(kept.format())
    return line, "".join(traceback.StackSummary.from_list(mine).format())


def without_own_frames(call: Callable[P, T]) -> Callable[P, T]:
    """``call``, whose errors have no frames of the calls within it, nor have their causes.

    For calls before a hook of kos is set.  KOS_DEBUG=1 leaves the frames in.
    """

    @functools.wraps(call)
    def short(*args: P.args, **options: P.kwargs) -> T:
        try:
            return call(*args, **options)
        except KosError as error:
            _remove_own_frames(error)
            raise error

    return short


def report_without_own_frames() -> None:
    """Have uncaught errors of kos, in any thread, reported without the frames within kos.  Idempotent.

    The hooks that were set before report them.  KOS_DEBUG=1 leaves the frames in.
    """
    global _reporting
    if _reporting:
        return
    _reporting, previous, previous_thread = True, sys.excepthook, threading.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        _remove_own_frames(error)
        previous(kind, error, error.__traceback__)

    def thread_hook(args: threading.ExceptHookArgs) -> None:
        if args.exc_value is not None:
            _remove_own_frames(args.exc_value)
            args = threading.ExceptHookArgs((*args[:2], args.exc_value.__traceback__, args[3]))
        previous_thread(args)

    sys.excepthook, threading.excepthook = hook, thread_hook


def _remove_own_frames(error: BaseException) -> None:
    """Remove the frames within kos from an error that kos raised on purpose, and from its causes.

    An error of the program, which called kos while it handled that one, keeps its frames.
    """
    each: BaseException | None = error if isinstance(error, KosError) and not debugging() else None
    while each is not None and (trace := each.__traceback__) is not None:
        if each is not error and not Path(trace.tb_frame.f_code.co_filename).is_relative_to(_PACKAGE):
            break
        each.__traceback__, each = _without_own_frames(trace), each.__cause__ or each.__context__


def _without_own_frames(trace: TracebackType | None) -> TracebackType | None:
    """A traceback without the frames within kos, nor those of Python's own modules that kos called."""
    kept, within = list[TracebackType](), False
    while trace is not None:
        file = Path(trace.tb_frame.f_code.co_filename)
        within = file.is_relative_to(_PACKAGE) or (within and file.is_relative_to(_PYTHON))
        kept += [] if within else [trace]
        trace = trace.tb_next
    for each in reversed(kept):
        trace = TracebackType(trace, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return trace


def debugging() -> bool:
    """Whether KOS_DEBUG requests full tracebacks."""
    return KOS_DEBUG.get() not in ("", "0")


def is_on(switch: Variable) -> bool:
    """Whether a variable of the environment switches something on; its default if it is unset or empty.

    Raises InvalidArgument for a value other than 0 and 1.
    """
    value = switch.get() or switch.default
    if value not in ("0", "1"):
        raise InvalidArgument(f"{switch}: expected 0 or 1 in the environment, got {value!r}")
    return value == "1"


def _in_kos(frame: traceback.FrameSummary) -> bool:
    return Path(frame.filename).is_relative_to(_PACKAGE)


def install(extras: str, package: Path = _PACKAGE) -> str:
    """The command that installs kos with these extras, from a clone, because kos is on no package index.

    If kos was installed from a wheel, the command adds the extras to it. Without extras, the command installs kos from
    a clone. ``package``: the folder of the running kos.
    """
    clone, wanted = package.parent, f"[{extras}]" if extras else ""
    if (clone / "pyproject.toml").exists():
        return pip_install("-e", f"{near(clone)}{wanted}")
    if extras and any(clone.glob("kos-*.dist-info")):  # pip takes the extras of the installed wheel, from no index
        return pip_install(f"kos{wanted}")
    return f"in a clone of kos: {pip_install('-e', f'.{wanted}', here=False)}"
