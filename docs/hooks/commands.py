"""The arguments of the commands, from their parsers, as Markdown.

As a program, ``commands.py NAME`` prints the section of one command: each runs in a process of its own.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 120  # for a command to make its parser


@cache
def sections() -> str:
    """The sections of all commands."""
    from kos.__main__ import COMMANDS

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return "\n".join(pool.map(section_of, COMMANDS))


def outline() -> str:
    """The heading of each command, and what it does: without its arguments, as pages have it in a clone."""
    from kos.__main__ import COMMANDS

    return "\n".join(f"## kos {name}\n\n{sentence(about)}\n" for name, (_, about) in COMMANDS.items())


def sentence(about: str) -> str:
    return f"{about[0].upper()}{about[1:].partition(':')[0]}."


def section_of(name: str) -> str:
    """The section of one command, made by a process of its own."""
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, __file__, name], cwd=ROOT, env={**os.environ, "PYTHONPATH": paths},
        capture_output=True, text=True, timeout=SECONDS,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"kos {name}: expected a parser, got:\n{done.stderr}")
    return done.stdout


class _Found(BaseException):
    """The parser that a command has made."""


def show(name: str) -> str:
    """The section of a command; its program runs in this process until it has made its parser."""
    from kos.__main__ import COMMANDS, main

    def found(parser: argparse.ArgumentParser, *_: Any, **__: Any) -> None:
        raise _Found(parser)

    with mock.patch.object(argparse.ArgumentParser, "parse_known_args", found):
        try:
            main([name])
        except _Found as reached:
            return section(name, reached.args[0], COMMANDS[name][1])
    raise RuntimeError(f"kos {name}: it made no parser")


def section(name: str, parser: argparse.ArgumentParser, about: str) -> str:
    """The description and a table for each group of arguments."""
    for action in parser._actions:
        if action.choices is not None and action.metavar is None:
            action.metavar = action.dest.upper()  # the table lists the choices
    formatter = parser._get_formatter()
    begin, description = sentence(about), (parser.description or "").strip()
    lines = [f"## kos {name}\n", *([] if description.startswith(begin) else [f"{begin}\n"])]
    if description:
        lines.append(f"{description}\n")
    for group in parser._action_groups:
        rows = [row(action, formatter) for action in group._group_actions if action.dest != "help"]
        if rows:
            title = str(group.title)
            lines += [f"**{title[0].upper()}{title[1:]}**\n", "| argument | |", "|---|---|", *rows, ""]
    if parser.epilog:
        lines.append(f"```text\n{parser.epilog.strip()}\n```\n")
    return "\n".join(lines)


def row(action: argparse.Action, formatter: argparse.HelpFormatter) -> str:
    """A row of the table: the names of an argument with its value, and its help."""
    choices = ", ".join(map(str, action.choices or ()))
    value = formatter._format_args(action, action.dest.upper()) if action.nargs != 0 else ""
    value = value.replace("|", " or ")  # a bar ends a cell, in code too
    names = [f"{name} {value}".strip() for name in action.option_strings] or [value]
    about = formatter._expand_help(action) if action.help else ""
    about += f"{'; one' if about else 'one'} of {choices}" if choices else ""
    about = " ".join(about.split()).replace("<", "&lt;").replace("|", "\\|")
    return f"| {', '.join(f'`{name}`' for name in names)} | {about} |"


if __name__ == "__main__":
    os.environ |= {"COLUMNS": "100", "NO_COLOR": "1"}
    sys.stdout.write(show(sys.argv[1]))
