"""The page of the command lines, from the parsers: ``<!-- commands -->`` in a page is replaced by all of them.

As a program, ``commands.py NAME …`` prints the section of one command: each runs in a process of its own.
"""

from __future__ import annotations

import argparse
import ast
import os
import pkgutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
MARK = "<!-- commands -->"
BENCH = """## kos bench

`kos bench NAME` runs a benchmark of a clone of kos; without a name it runs `collectives`.

"""
SECONDS = 120  # for a command to make its parser


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace the mark by the sections of all commands."""
    if MARK not in markdown:
        return markdown
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        sections = dict(zip(map(tuple, commands()), pool.map(section_of, commands()), strict=True))
    first = next((words for words in sections if words[0] == "bench"), None)
    texts = (f"{BENCH if words == first else ''}{text}" for words, text in sections.items())
    return markdown.replace(MARK, "\n".join(texts))


def commands() -> list[list[str]]:
    """The words of every command after ``kos``."""
    from kos.__main__ import COMMANDS

    names = [[name] for name in COMMANDS if name != "bench"]
    modules = sorted(pkgutil.iter_modules([str(ROOT / "benchmarks")]), key=lambda module: module.name)
    return names + [["bench", module.name] for module in modules if "__main__" in _text(module)]


def _text(module: pkgutil.ModuleInfo) -> str:
    """The text of a benchmark's program."""
    folder = ROOT / "benchmarks" / module.name
    path = folder / "__main__.py" if module.ispkg else folder.with_suffix(".py")
    return path.read_text() if path.exists() else ""


def section_of(words: list[str]) -> str:
    """The section of one command, made by a process of its own."""
    done = subprocess.run(
        [sys.executable, __file__, *words], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=SECONDS,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"kos {' '.join(words)}: expected a parser, got:\n{done.stderr}")
    return done.stdout


class _Found(BaseException):
    """The parser that a command has made."""


def show(words: list[str]) -> str:
    """The section of a command; its program runs in this process until it has made its parser."""
    from kos.__main__ import COMMANDS, main

    def found(parser: argparse.ArgumentParser, *_: Any, **__: Any) -> None:
        raise _Found(parser)

    with mock.patch.object(argparse.ArgumentParser, "parse_known_args", found):
        try:
            main(words)
        except _Found as reached:
            return section(words, reached.args[0], COMMANDS[words[0]][1])
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] in ("kos", "benchmarks"):
                raise
            return f"{heading(words)}\n{summary(words)}\n\nIts help needs the package `{error.name}`.\n"
    raise RuntimeError(f"kos {' '.join(words)}: it made no parser")


def heading(words: list[str]) -> str:
    """The title of a command's section."""
    return f"{'#' * (len(words) + 1)} kos {' '.join(words)}\n"


def summary(words: list[str]) -> str:
    """The first paragraph of a benchmark's program, which is not imported."""
    module = next(each for each in pkgutil.iter_modules([str(ROOT / "benchmarks")]) if each.name == words[1])
    return (ast.get_docstring(ast.parse(_text(module))) or "").partition("\n\n")[0]


def section(words: list[str], parser: argparse.ArgumentParser, about: str) -> str:
    """The usage, the description and a table for each group of arguments."""
    for action in parser._actions:
        if action.choices is not None and action.metavar is None:
            action.metavar = action.dest.upper()  # the table lists the choices
    formatter = parser._get_formatter()
    raw = issubclass(parser.formatter_class, argparse.RawDescriptionHelpFormatter)
    lines = [heading(words)]
    if words[0] != "bench":
        lines.append(f"{about[0].upper()}{about[1:].partition(':')[0]}.\n")
    lines.append(f"```text\n{parser.format_usage().rstrip()}\n```\n")
    if parser.description:
        lines.append(block(parser.description) if raw else f"{parser.description.strip()}\n")
    for group in parser._action_groups:
        rows = [row(action, formatter) for action in group._group_actions if action.dest != "help"]
        if rows:
            title = str(group.title)
            lines += [f"**{title[0].upper()}{title[1:]}**\n", "| argument | |", "|---|---|", *rows, ""]
    if parser.epilog:
        lines.append(block(parser.epilog))
    return "\n".join(lines)


def block(text: str) -> str:
    """A text with its own line breaks."""
    return f"```text\n{text.strip()}\n```\n"


def row(action: argparse.Action, formatter: argparse.HelpFormatter) -> str:
    """A row of the table: the names of an argument with its value, and its help."""
    choices = ", ".join(map(str, action.choices or ()))
    value = formatter._format_args(action, action.dest.upper()) if action.nargs != 0 else ""
    names = [f"{name} {value}".strip() for name in action.option_strings] or [value]
    about = formatter._expand_help(action) if action.help else ""
    about += f"{'; one' if about else 'one'} of {choices}" if choices else ""
    about = " ".join(about.split()).replace("<", "&lt;").replace("|", "\\|")
    return f"| {', '.join(f'`{name}`' for name in names)} | {about} |"


if __name__ == "__main__":
    os.environ |= {"COLUMNS": "100", "NO_COLOR": "1"}
    sys.stdout.write(show(sys.argv[1:]))
