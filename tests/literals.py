"""The texts that a program can print: its string literals without its docstrings."""

import ast
from functools import cache
from pathlib import Path

VALUE = "…"
"""Stands for each value of an f-string."""


@cache
def literals(folder: Path) -> str:
    """The literals of all modules of a folder, one a line."""
    return "\n".join(text for path in sorted(folder.rglob("*.py")) for text in texts_of(path))


def texts_of(path: Path) -> list[str]:
    """The literals of one module, f-strings with their values as VALUE."""
    found, bare = list[str](), set[ast.expr]()
    for node in ast.walk(ast.parse(path.read_text())):  # a statement before its expression
        if isinstance(node, ast.Expr):
            bare.add(node.value)
        elif isinstance(node, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else VALUE for part in node.values)
            found.append("".join(map(str, parts)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in bare:
            found.append(node.value)
    return found
