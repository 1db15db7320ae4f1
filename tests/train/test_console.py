"""A progress bar where a person looks on, plain lines where not, and one rank speaks for all."""

import contextlib
import io
import itertools
import os
import re
import subprocess
import sys
import termios
from types import SimpleNamespace

import pytest
import rich.console

from benchmarks.train import ROW_KEYS
from kos.errors import ConfigError
from kos.train.checkpoint import resume
from kos.train.model.llama import FlopsPerToken
from kos.train.tools import console
from kos.train.tools.console import Bar, Console, describe, wrapped
from kos.train.trainer import Trainer
from tests.launcher import MPIRUN, needs_mpirun, run_program
from tests.train.commands import ENVIRONMENT
from tests.train.runs import _config

ROW = {"loss": 2.5, "grad_norm": 0.25, "lr": 1e-3, "tokens_per_second": 1234.0}

SPEAKER = """
from kos.launcher import launched_rank
from kos.train.tools.console import Console
rank = launched_rank()
console = Console(rank, 9)
console.say(f"hello [of] rank {rank}")
row = {"loss": 2.5, "grad_norm": 0.25, "lr": 1e-3, "tokens_per_second": 1234.0}
for step in range(5, 10):
    more = {"val_loss": 3.75} if step == 7 else {}
    console.step({"step": step, **row, **more}, log=step % 2 == 0)
console.close()
console.say(f"bye of rank {rank}")
"""
VALUES = "  ".join(describe(ROW))
EVALUATED = "  ".join(describe(ROW | {"val_loss": 3.75}))
PLAIN = f"""hello [of] rank 0
step 6/9  {VALUES}
step 7/9  {EVALUATED}
step 8/9  {VALUES}
bye of rank 0
"""
BAR = re.compile(r"training.*?(\d+)/9")
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@pytest.fixture
def terminal():
    """Makes a terminal of that width of ``sys.stdout``."""
    try:
        ends = os.openpty()  # of which the size alone counts
    except OSError as error:
        pytest.skip(f"needs terminals (/dev/pts): {error}")
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:  # undone before ``capsys``
        for end in ends:
            stack.callback(os.close, end)

        def make(columns):
            termios.tcsetwinsize(ends[1], (30, columns))
            (made := io.StringIO()).isatty, made.fileno = lambda: True, lambda: ends[1]
            stack.enter_context(contextlib.redirect_stdout(made))
            patch.setenv("TERM", "xterm")
            return made

        yield make


@pytest.fixture
def ticking(monkeypatch):
    """The clock of the console goes on by so many seconds whenever it is read."""

    def use(seconds):
        clock = itertools.count(0, seconds)
        monkeypatch.setattr(console, "time", SimpleNamespace(monotonic=lambda: next(clock), perf_counter=lambda: 0.0))

    return use


def _check_bar(said: str, columns: int = 100) -> None:
    assert "\x1b[" in said
    plain = ESCAPE.sub("", said)
    counts = [int(count) for count in BAR.findall(plain)]
    assert counts == sorted(counts) and counts[0] > 4 and counts[-1] == 9, said
    lines = [line.strip() for line in re.split(r"[\r\n]+", plain)]
    assert lines.count("hello [of] rank 0") == lines.count("bye of rank 0") == 1
    at = lines.index(wrapped(["step 7:", *describe(ROW | {"val_loss": 3.75})], columns)[0])
    assert "  ".join(lines[at:]).startswith(f"step 7:  {EVALUATED}")
    assert sum(line.startswith("step") for line in lines) == 1
    end = lines.index("bye of rank 0")
    last = max(index for index, line in enumerate(lines[:end]) if line.startswith("training"))
    assert VALUES in "  ".join(lines[last:end]), "the newest logged values are beside or below the bar"
    assert (VALUES in lines[last]) == (columns >= 80)
    assert lines.index("hello [of] rank 0") < last
    assert "rank 1" not in plain


@pytest.mark.parametrize("columns", [100, 80, 60, 40, 30])
def test_a_terminal_gets_a_bar(columns, terminal):
    made = terminal(columns)
    exec(SPEAKER, {})
    _check_bar(made.getvalue(), columns)


def test_a_terminal_of_unknown_size_gets_lines(terminal):
    """That of ``expect`` and of some containers: 0 x 0."""
    made = terminal(0)
    exec(SPEAKER, {})
    assert made.getvalue() == PLAIN


def test_a_pipe_gets_lines(capfd):
    exec(SPEAKER, {})
    assert capfd.readouterr() == (PLAIN, "")


@needs_mpirun
def test_mpirun_to_a_file_gets_lines(tmp_path):
    """Though each rank's own standard output is a pseudo-terminal of mpirun's."""
    command = [MPIRUN, "-n", "2", sys.executable, "-c", SPEAKER]
    with open(tmp_path / "said", "w+") as file:
        done = run_program(*command, env=ENVIRONMENT, capture_output=False, stdout=file, stderr=subprocess.PIPE)
        assert done.returncode == 0, done.stderr
        file.seek(0)
        assert file.read().replace("\r\n", "\n") == PLAIN


HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"


def test_a_start_that_is_refused_leaves_the_cursor_and_no_bar(text, tmp_path, terminal, monkeypatch):
    def refuse(*given, show):
        show("loading the checkpoint", 0.5)
        raise ConfigError("no")

    monkeypatch.setattr(resume, "latest", refuse)
    made = terminal(100)
    with pytest.raises(ConfigError, match="^no"):
        Trainer(_config(text, tmp_path, resume="auto", backend="mock"))
    said = made.getvalue()
    assert said.count(HIDE) == said.count(SHOW) == 1 and said.endswith("\x1b[2K"), "the bar's line is erased"


def test_both_mfus_by_the_names_of_results_and_the_memory_in_gib():
    columns = {f"mfu_{name}": share for name, share in zip(FlopsPerToken._fields, (0.486, 0.52), strict=True)}
    assert describe(FULL | columns)[-2:] == ["MFU 48.6%/52.0%", "140.0 GiB"] and columns.keys() < set(ROW_KEYS)


FULL = ROW | {
    "val_loss": 2.25, "skipped": True, "tokens_per_second": 12_345_678.0, "tokens_per_second_per_gpu": 1_543_209.75,
    "mfu_causal": 0.486, "mfu_noncausal": 0.52, "memory_bytes": 140 << 30,
}  # fmt: skip


@pytest.mark.parametrize("width", [20, 40, 60, 100, 200])
@pytest.mark.parametrize("headline", ["training 19999/20000", "tokenizing the data: 45%", "loading the checkpoint: 5%"])
def test_no_field_is_cut_on_a_narrow_terminal(width, headline):
    bar, fields, shown = Bar(io.StringIO(), width), describe(FULL), io.StringIO()
    bar.update(headline, 0.45, fields)
    rich.console.Console(file=shown, width=width, force_terminal=False).print(bar)
    bar.stop(None)
    lines = shown.getvalue().splitlines()
    echo = console.ECHO if width >= 40 else 0  # room for the ^C that a terminal echoes
    assert all(len(line) <= width - echo for line in lines) and "…" not in shown.getvalue()
    assert width < len(headline) or lines[0].startswith(headline)
    assert all(any(field in line for line in lines) for field in fields), "a field is on one line, whole"
    assert (len(lines) == 1) == (width == 200)
    assert ("━" in lines[0]) == (width >= 40), "there is a bar where there is room for one"


def test_the_terminal_has_its_cursor_after_a_warning(terminal):
    """A second Ctrl-C then ends the process without another word."""
    made, lines = terminal(80), Console(0, 9)
    lines.step({"step": 1, **ROW}, log=True)
    lines.warn("kos: stopping after this step")
    lines.step({"step": 2, **ROW}, log=True)
    said = made.getvalue()
    lines.close()
    assert said.count(HIDE) == said.count(SHOW) == 1, "the bar is still there"


@pytest.mark.parametrize("bar", [False, True])
def test_progress_of_a_task_never_decreases(ticking, before_call, capsys, terminal, bar):
    """The passes of a pipeline come in any order.  A task that starts again after a step or another task is shown."""
    shown = []
    ticking(11)
    if bar:
        before_call(Bar, "update", lambda bar, headline="", *given, **fields: shown.append(headline))
        terminal(80)
    lines = Console(0, 9)
    for share in (0.25, 0.5, 0.125, 0.75):
        lines.progress("step 1", share)
    lines.progress("validation", 0.5)
    lines.close()
    lines.progress("validation", 0.5)
    lines.close()
    shown += capsys.readouterr().out.splitlines()
    one = "step 1: {}%" if bar else "step 1/9: {}% of this step"
    assert shown == [*(one.format(share) for share in (25, 50, 75)), "validation: 50%", "validation: 50%"]


def test_the_other_ranks_say_nothing(capfd):
    silent = Console(1, 9)
    silent.say("hello")
    silent.warn("hello")
    silent.step({"step": 1, **ROW, "val_loss": 1.0}, log=True)
    silent.close()
    assert capfd.readouterr() == ("", "")
