"""What a run says to a person: a progress bar on a terminal, otherwise a plain line a step; rank 0 only."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from typing import Any, TextIO

from kos.comm.rendezvous import mpi_job

SILENCE = 10.0  # seconds without a line, after which a part of what takes long is worth one

# How each value of a row is shown, in this order.
_SHOWN = {
    "loss": "loss {loss:.4f}",
    "val_loss": "val_loss {val_loss:.4f}",
    "grad_norm": "grad_norm {grad_norm:.3f}",
    "skipped": "skipped",
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
        self._steps = steps
        self.start = 0  # the step that the bar counts from
        self._spoke = time.monotonic()  # when a line was last printed
        self._first: tuple[int, float] | None = None  # the first step and when it was over
        terminal = None if self._silent else _terminal()
        self._bar = None if terminal is None else _bar(terminal, steps)

    def say(self, text: str) -> None:
        """A line (or several) that stays."""
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        elif not self._silent:
            self._spoke = time.monotonic()
            try:
                print(text, flush=True)
            except OSError:  # nobody reads any more (`| head`), or a full disk: the run goes on in silence
                self._silent = True
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is still in its buffer

    def step(self, row: Mapping[str, Any], *, log: bool) -> None:
        """One row of metrics; ``log`` says whether it is this step's turn to be printed."""
        evaluated, now = "val_loss" in row, time.perf_counter()
        first, began = self._first = self._first or (row["step"], now)
        if self._bar is None:
            if log or evaluated:
                seconds = (self._steps - row["step"]) * (now - began) / max(1, row["step"] - first)
                left = f"  {duration(seconds)} left" if seconds > SILENCE else ""
                self.say(f"step {row['step']:>{len(str(self._steps))}}/{self._steps}  {describe(row)}{left}")
            return
        self._show(self._bar)
        if evaluated:
            self.say(f"step {row['step']}: {describe(row)}")
        beside = describe({key: value for key, value in row.items() if key != "val_loss"}) if log else None
        self._bar.update(self._bar.task_ids[0], completed=row["step"], description=beside)

    def progress(self, what: str, share: float) -> None:
        """How far something is that takes long: beside the bar, or a line now and then."""
        text = f"{what}: {share:.0%}"
        if self._bar is not None:
            self._show(self._bar)
            self._bar.update(self._bar.task_ids[0], description=text)
        elif time.monotonic() - self._spoke > SILENCE:
            self.say(text)

    def _show(self, bar: Any) -> None:
        if not bar.task_ids:
            bar.add_task("", total=self._steps, completed=self.start)
        if bar.finished or not bar.live.is_started:
            bar.start()

    def close(self) -> None:
        """No more steps."""
        if self._bar is not None:
            self._bar.stop()


def _bar(terminal: TextIO, steps: int) -> Any:
    """None where the terminal does not say how wide it is: a bar of no width would show nothing."""
    width = os.get_terminal_size(terminal.fileno()).columns
    if not width:
        return None
    from rich.console import Console as Terminal
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.table import Column

    room = width - len(f"training {steps}/{steps} ---- 0:00:00 ")  # where it is small, the values are cut
    return Progress(
        TextColumn("training {task.completed}/{task.total}"),
        BarColumn(bar_width=None),
        TimeRemainingColumn(),
        TextColumn("{task.description}", table_column=Column(no_wrap=True, max_width=max(1, room))),
        console=Terminal(file=terminal, force_terminal=True, width=width),
        refresh_per_second=5,
    )


def _terminal() -> TextIO | None:
    """The terminal that the user looks at, if that is where this run's output goes.

    Under mpirun a rank's standard output is a pseudo-terminal whose lines mpirun passes on, whole lines only:
    no bar can be drawn there. The bar goes where mpirun's own output goes, if that is a terminal.
    """
    if not mpi_job.under_mpirun():
        return sys.stdout if sys.stdout.isatty() else None
    try:
        target = os.readlink(f"/proc/{os.getppid()}/fd/1")
        if not target.startswith(("/dev/pts/", "/dev/tty")):
            return None
        return open(os.open(target, os.O_WRONLY | os.O_NOCTTY), "w", encoding="utf-8", errors="replace")
    except OSError:
        return None


def duration(seconds: float) -> str:
    """As a person says it."""
    for size, unit in ((86_400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.2g} {unit}"
    return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"


def describe(row: Mapping[str, Any]) -> str:
    """A row of metrics in one line."""
    values = {**row, "gib": row.get("memory_bytes", 0) / 2**30}
    alone = row.get("tokens_per_second_per_gpu") == row["tokens_per_second"]
    shown = (key for key in _SHOWN if key in row and not (alone and key.endswith("gpu")))
    return "  ".join(_SHOWN[key].format_map(values) for key in shown)
