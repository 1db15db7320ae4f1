"""Docstrings as the site shows them: indented examples are Python, and persistent forms are functions."""

from __future__ import annotations

import re
from textwrap import dedent
from typing import Any

from griffe import Attribute, Class, Docstring, Extension, Function, Object, Parameters

EXAMPLE = re.compile(r"(?<=\n\n)(?P<code>(?: {4}[^\n]+\n?|\n(?= {4}))+)")
PERSISTENT = re.compile(r"_persistent\((\w+)\)")


class Docstrings(Extension):
    """Changes what mkdocstrings shows, not what ``help`` prints."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)

    def on_class_members(self, *, cls: Class, **_: Any) -> None:
        """Show ``name_init = _persistent(name)`` with the parameters of ``name`` except ``async_op``."""
        for name, member in list(cls.members.items()):
            match = PERSISTENT.fullmatch(str(member.value)) if isinstance(member, Attribute) else None
            source = cls.members.get(match[1]) if match else None
            if isinstance(source, Function):
                given = [parameter for parameter in source.parameters if parameter.name != "async_op"]
                form = Function(name, lineno=member.lineno, parameters=Parameters(*given), returns="Persistent")
                text = f"A persistent ``{source.name}``."
                form.docstring = Docstring(text, parent=form)
                cls.set_member(name, form)


def fenced(text: str) -> str:
    """The text with its indented blocks as fences of Python."""
    return EXAMPLE.sub(lambda match: f"```python\n{dedent(match['code']).rstrip()}\n```\n", text)
