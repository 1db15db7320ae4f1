"""Docstrings as the site shows them: indented examples are Python, and persistent forms have their own text."""

from __future__ import annotations

import re
from textwrap import dedent
from typing import Any

from griffe import Attribute, Docstring, Extension, Object

EXAMPLE = re.compile(r"(?<=\n\n)(?P<code>(?: {4}[^\n]+\n?|\n(?= {4}))+)")
PERSISTENT = re.compile(r"_persistent\((\w+)\)")


class Docstrings(Extension):
    """Changes what mkdocstrings shows, not what ``help`` prints."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)
        if isinstance(obj, Attribute) and (match := PERSISTENT.fullmatch(str(obj.value))):
            text = f"A persistent ``{match[1]}``, with its arguments except ``async_op``; ``start()`` launches it."
            obj.value = None
            obj.docstring = Docstring(text, parent=obj)


def fenced(text: str) -> str:
    """The text with its indented blocks as fences of Python."""
    return EXAMPLE.sub(lambda match: f"```python\n{dedent(match['code']).rstrip()}\n```\n", text)
