"""The console output of a run: a progress bar on a terminal, otherwise one plain line per step; rank 0 only."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TextIO

from kos.launcher import under_mpirun

SILENCE = 10.0  # seconds without a line, after which progress is printed
LEAST_BAR = 6  # columns; a narrower bar shows nothing
ECHO = len("^C")  # columns left free: the terminal's echo of Ctrl-C would wrap to a line that nothing erases

# How each value of a row is shown, in this order.
_SHOWN = {
    "loss": "loss {loss:.4f}",
    "val_loss": "val_loss {val_loss:.4f}",
    "grad_norm": "grad_norm {grad_norm:.3f}",
    "skipped": "skipped",
    "no_targets": "no targets",
    "lr": "lr {lr:.2e}",
    "tokens_per_second": "{tokens_per_second:,.0f} tokens/s",
    "tokens_per_second_per_gpu": "{tokens_per_second_per_gpu:,.0f} a GPU",
    "mfu_causal": "MFU {mfu_causal:.1%}/{mfu_noncausal:.1%}",
    "memory_bytes": "{gib:.1f} GiB",
}


class Console:
    """Rank 0's: a bar that stays at the bottom of a terminal, all else above it; or lines.  Other ranks are silent."""

    def __init__(self, rank: int, steps: int) -> None:
        self._silent = rank != 0 or sys.stdout is None
        self.steps = steps
        self._spoke = time.monotonic()  # when a line was last printed, or a step shown
        self._values: list[str] = []  # of the step that was logged last
        self._first: tuple[int, float] | None = None  # the first step and when it was over
        self._task, self._done = "", 0.0  # the last task of ``progress``, and its largest share
        terminal = None if self._silent else _terminal()
        self._bar = None if terminal is None or not columns(terminal) else Bar(terminal)

    def say(self, text: str) -> None:
        """A line (or several) that stays."""
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        elif not self._silent:
            self._spoke = time.monotonic()
            try:
                print(text, flush=True)
            except OSError:  # the reader has gone (`| head`), or the disk is full: the run continues without output
                self._silent = True
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is still in its buffer

    def warn(self, text: str) -> None:
        """A line for the user at the terminal, even if the output goes to a file. Any thread may call this."""
        if self._bar is not None:
            self.say(text)
            self._bar.console.show_cursor(True)  # a second signal ends the process as it is
        elif not self._silent:
            with contextlib.suppress(OSError):
                os.write(2, f"{text}\n".encode())

    def step(self, row: Mapping[str, Any], *, log: bool) -> None:
        """One row of metrics; ``log`` says whether it is this step's turn to be printed."""
        step, evaluated, now = row["step"], is_evaluated(row), time.perf_counter()
        self._task = ""
        first, began = self._first = self._first or (step, now)
        seconds = (self.steps - step) * (now - began) / max(1, step - first)
        left = [f"{duration(seconds)} left"] * (seconds > SILENCE)
        if self._bar is None:
            if log or evaluated:
                self.say("  ".join([f"step {step:>{len(str(self.steps))}}/{self.steps}", *describe(row), *left]))
            return
        if evaluated:
            self.say("\n".join(wrapped([f"step {step}:", *describe(row)], self._bar.console.width)))
        if log:
            shown = {key: value for key, value in row.items() if not key.startswith("val_loss")}
            self._values = [*describe(shown), *left]
        self._spoke = time.monotonic()
        self._bar.update(f"training {step}/{self.steps}", step / self.steps, self._values)

    def progress(self, what: str, share: float) -> None:
        """The progress of a long task: a second bar, or an occasional line. Within a task it never decreases."""
        if what == self._task and share <= self._done:  # the passes of a pipeline come in any order
            return
        self._task, self._done = what, share
        text = f"{what}: {share:.0%}"
        if self._bar is not None and self._first is None:
            self._bar.update(text, share)
        elif self._bar is not None:
            if time.monotonic() - self._spoke > 1:
                self._bar.update(fields=[*self._values, text])
        elif time.monotonic() - self._spoke > SILENCE:
            is_step = re.fullmatch(r"step \d+", what)
            self.say(f"{what}/{self.steps}: {share:.0%} of this step" if is_step else text)

    def close(self) -> None:
        """End a task: the bar of the steps stays, another bar is removed."""
        self._task = ""
        if self._bar is not None:
            self._bar.stop(None if self._first is None else self._values)


class Bar:
    """A headline with a bar, and fields: on the same line where all fit, else on lines below. No field is cut."""

    def __init__(self, terminal: TextIO, width: int = 0) -> None:
        """``width``: columns; 0: as many as ``terminal`` has, also when that changes."""
        from rich.console import Console as Terminal
        from rich.live import Live

        self._terminal, self._width = terminal, width
        self._headline, self._share, self._fields = "", 0.0, list[str]()
        self.console = Terminal(file=terminal, force_terminal=True, width=width or columns(terminal))
        self._live = Live(self, console=self.console, refresh_per_second=5)

    def update(self, headline: str | None = None, share: float = 0.0, fields: list[str] | None = None) -> None:
        """Show another headline with its share, other fields, or both."""
        if headline is not None:
            self._headline, self._share = headline, share
        self._fields = self._fields if fields is None else fields
        self.console.width = self._width or columns(self._terminal) or self.console.width
        if not self._live.is_started:
            self._live.start()

    def stop(self, fields: list[str] | None) -> None:
        """Leave these fields and the headline; None: remove all."""
        self._fields, self._live.transient = fields or [], fields is None
        self._live.stop()

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        width = max(1, options.max_width - ECHO)
        whole, room = "  ".join(self._fields), width - len(self._headline) - 1
        beside = whole and room - len(whole) - 1 >= LEAST_BAR
        bar = ProgressBar(total=1, completed=self._share, width=room - (len(whole) + 1 if beside else 0))
        line = Table.grid(padding=(0, 1))
        line.add_row(Text(self._headline), *[bar] * (room >= LEAST_BAR), *[Text(whole)] * bool(beside))
        yield line
        yield from map(Text, [] if beside else wrapped(self._fields, width))


def wrapped(fields: Iterable[str], width: int) -> list[str]:
    """Lines of whole fields, of ``width`` columns where no field is longer."""
    lines: list[str] = []
    for field in fields:
        if lines and len(lines[-1]) + 2 + len(field) <= width:
            lines[-1] += f"  {field}"
        else:
            lines.append(field)
    return lines


def _terminal() -> TextIO | None:
    """The terminal that the user looks at, if that is where this run's output goes.

    Under mpirun a rank's standard output is a pseudo-terminal whose lines mpirun passes on, whole lines only:
    no bar can be drawn there. The bar goes where mpirun's own output goes, if that is a terminal.
    """
    if not under_mpirun():
        return sys.stdout if sys.stdout.isatty() else None
    try:
        target = os.readlink(f"/proc/{os.getppid()}/fd/1")
        if not target.startswith(("/dev/pts/", "/dev/tty")):
            return None
        return open(os.open(target, os.O_WRONLY | os.O_NOCTTY), "w", encoding="utf-8", errors="replace")
    except OSError:
        return None


def columns(terminal: TextIO) -> int:
    """The width of a terminal; 0 if it is unknown."""
    with contextlib.suppress(OSError):  # it is gone
        return os.get_terminal_size(terminal.fileno()).columns
    return 0


def duration(seconds: float) -> str:
    """A duration in words."""
    for size, unit in ((86_400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.2g} {unit}"
    return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"


def describe(row: Mapping[str, Any]) -> list[str]:
    """The values of a row of metrics, each with its name or unit."""
    values = {**row, "gib": row.get("memory_bytes", 0) / 2**30}
    alone = row.get("tokens_per_second_per_gpu") == row["tokens_per_second"]
    shown = (key for key in _SHOWN if key in row and not (alone and key.endswith("gpu")))
    return [*(_SHOWN[key].format_map(values) for key in shown), *by_source(row)]


def is_evaluated(row: Mapping[str, Any]) -> bool:
    """Whether a row has validation losses of its step."""
    return "val_loss" in row or bool(by_source(row))


def by_source(row: Mapping[str, Any]) -> list[str]:
    """The validation losses of the sources of a mixture."""
    return [f"{key} {loss:.4f}" for key, loss in row.items() if key.startswith("val_loss/")]
