"""Docstrings as the site shows them: indented examples are Python."""

from __future__ import annotations

import re
from textwrap import dedent
from typing import Any

from griffe import Extension, Object

EXAMPLE = re.compile(r"(?<=\n\n)(?P<code>(?: {4}[^\n]+\n?|\n(?= {4}))+)")


class Docstrings(Extension):
    """Changes what mkdocstrings shows, not what ``help`` prints."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(text: str) -> str:
    """The text with its indented blocks as fences of Python."""
    return EXAMPLE.sub(lambda match: f"```python\n{dedent(match['code']).rstrip()}\n```\n", text)
