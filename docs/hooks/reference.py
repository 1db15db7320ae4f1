"""The text in docs/reference that comes from the code; ``python -m docs.hooks.reference`` updates it.

In a clone, a page has a line for each name: ``- `kos.init`: first sentence of its docstring``.  The site shows the
whole docstring instead.  ``<!-- members: [wait]; filters: [] -->`` at the end of a line has options of mkdocstrings.
The commands are between ``<!-- commands -->`` and ``<!-- end -->``: the site adds their arguments.
"""

from __future__ import annotations

import logging
import re
from functools import cache
from pathlib import Path
from typing import Any

from docs.hooks.commands import outline, sections  # python -m mkdocs puts the repository on the path

log = logging.getLogger("mkdocs.hooks.reference")

ROOT = Path(__file__).resolve().parents[2]
NAME = re.compile(r"^- `(?P<name>kos[\w.]*)`:(?P<about>.*?)(?: <!-- (?P<options>.*) -->)?$", re.M)
COMMANDS = re.compile(r"(?<=^<!-- commands -->\n\n).*?(?=\n<!-- end -->$)", re.M | re.S)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Put a directive of mkdocstrings for each name, and the arguments of commands; warn if the page is outdated."""
    if not page.file.src_uri.startswith("reference/"):
        return markdown
    if renewed(markdown) != markdown:
        log.warning("%s: expected the text of the code: python -m docs.hooks.reference", page.file.src_uri)
    return COMMANDS.sub(lambda _: sections(), NAME.sub(directive, markdown))


def directive(line: re.Match[str]) -> str:
    """The directive that mkdocstrings replaces by the docstring."""
    options = (line["options"] or "").split("; ") if line["options"] else []
    return "\n".join([f"\n::: {line['name']}", *["    options:"] * bool(options), *(f"      {o}" for o in options), ""])


def renewed(text: str) -> str:
    """The page with the current docstrings and commands."""

    def line(old: re.Match[str]) -> str:
        options = f" <!-- {old['options']} -->" if old["options"] else ""
        return f"- `{old['name']}`: {summary(old['name'])}{options}"

    return COMMANDS.sub(lambda _: outline(), NAME.sub(line, text))


@cache
def package() -> Any:
    """The package kos as griffe reads it, without imports."""
    import griffe

    extensions = griffe.load_extensions(str(ROOT / "docs" / "hooks" / "docstrings.py"))
    return griffe.load("kos", search_paths=[str(ROOT)], extensions=extensions, resolve_aliases=True)


def summary(name: str) -> str:
    """The first sentence of a docstring; KeyError for an unknown name."""
    found = package()[name.removeprefix("kos.")]
    text = " ".join(found.docstring.value.partition("\n\n")[0].split()) if found.docstring else ""
    return re.split(r"(?<=\.) +(?=[A-Z`*])", text)[0].replace("``", "`")


if __name__ == "__main__":
    for path in sorted((ROOT / "docs" / "reference").glob("*.md")):
        path.write_text(renewed(path.read_text()))
