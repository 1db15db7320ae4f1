"""Write kos/comm/collectives.pyi, the types of the operations, from collectives.py (``python tests/stubs.py``).

An operation has three overloads, by ``async_op``: without it the result, with True a Work, else either of them; and
three more if it receives from any rank.  So programs are checked against more than a method with one signature could
say, and collectives.py has one for each.

Names in the types must come from a ``from … import`` or an assignment at the top of collectives.py.  The stub copies
those of them that it uses, and no ``import …``.
"""

import ast
import textwrap
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from kos.comm.operation import OPERATIONS

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "kos" / "comm" / "collectives.py"
TARGET = SOURCE.with_suffix(".pyi")
RESULTS = {name: row.result for name, row in OPERATIONS.items() if row.result}
"""What each operation returns; T is the type of ``out``, or of ``x`` where ``out`` may be left out."""
FROM_ANY = {"recv": "tuple[T, int]", "recv_bytes": "tuple[bytes, int]"}
"""What it returns with ``src=None``."""
HEADER = '''"""The types of collectives.py, from which tests/stubs.py writes this file."""'''
IMPORTS = """
from typing import Literal, TypeVar, overload
from kos.comm.work import Work
T = TypeVar("T")
"""
"""What only the stub needs."""
WIDTH = 120


def generate(source: str) -> str:
    """The text of the stub for the text of collectives.py."""
    tree = ast.parse(source)
    operations = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Operations")
    members = "\n".join(line for node in operations.body for line in _member(node))
    stub = f"class Operations:\n{textwrap.indent(members, '    ')}\n"
    used = _names(ast.parse(stub))
    nodes = [*ast.parse(IMPORTS).body, *tree.body]
    aliases = [node for node in nodes if isinstance(node, ast.Assign) and _names(*node.targets) & used]
    used |= _names(*aliases)
    imported = defaultdict[str, set[str]](set)
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module:
            imported[node.module] |= {alias.name for alias in node.names} & used
    lines = [f"from {module} import {', '.join(sorted(names))}" for module, names in sorted(imported.items()) if names]
    ours = [line for line in lines if line.startswith("from kos.")]
    imports = "\n".join([*(line for line in lines if line not in ours), "", *ours])
    return "\n\n".join([HEADER, imports, "\n".join(map(ast.unparse, aliases)), stub])


def _names(*nodes: ast.AST) -> set[str]:
    return {each.id for node in nodes for each in ast.walk(node) if isinstance(each, ast.Name)}


def _member(node: ast.stmt) -> Iterator[str]:
    """The text of a member of the class: three overloads of an operation, one signature of any other method."""
    match node:
        case ast.AnnAssign():
            yield ast.unparse(node)
        case ast.FunctionDef(name=name) if name in RESULTS:
            for src, plain in _results(name):
                work = f"Work[{plain}]"
                yield f"@overload\n{_operation(name, node, 'Literal[False] = ...', plain, src)}"
                yield f"@overload\n{_operation(name, node, 'Literal[True]', work, src)}"
                yield f"@overload\n{_operation(name, node, 'bool', f'{work} | {plain}', src)}"
        case ast.FunctionDef(name="probe"):
            for wait, result in (("Literal[True] = ...", "Envelope"), ("bool", "Envelope | None")):
                yield f"@overload\n{_signature('probe', {**_parameters(node), 'wait': wait}, result)}"
        case ast.FunctionDef(name=name, returns=ast.expr() as returns) if name != "__getattr__":  # it only raises
            decorators = map(ast.unparse, node.decorator_list)
            yield from (f"@{decorator}" for decorator in decorators if not decorator.startswith("_"))
            yield _signature(name, _parameters(node), ast.unparse(returns))


def _results(name: str) -> list[tuple[str, str]]:
    """What an operation returns, by the type of ``src``; "": any that it takes."""
    if name not in FROM_ANY:
        return [("", RESULTS[name])]
    return [("int", RESULTS[name]), ("None = ...", FROM_ANY[name])]


def _operation(name: str, node: ast.FunctionDef, async_op: str, result: str, src: str = "") -> str:
    """The signature of an operation with these types of ``async_op`` and ``src``."""
    parameters = _parameters(node)
    if src:
        parameters["src"] = src
    if "T" in result:
        holder = "x" if parameters.get("out", "").endswith("...") or "out" not in parameters else "out"
        parameters[holder] = "T | None" if name == "broadcast" else "T"
        if holder == "x" and "out" in parameters:
            parameters["out"] = "T | None = ..."
    parameters["async_op"] = async_op
    return _signature(name, parameters, result)


def _parameters(node: ast.FunctionDef) -> dict[str, str]:
    """The parameters of a method with their types; "*" comes before the keywords."""
    given = node.args
    optional = {arg.arg for arg in given.args[len(given.args) - len(given.defaults) :]}
    optional |= {arg.arg for arg, default in zip(given.kwonlyargs, given.kw_defaults, strict=True) if default}
    stars = [ast.arg("*")] if given.kwonlyargs else []
    return {
        arg.arg: (ast.unparse(arg.annotation) if arg.annotation else "") + " = ..." * (arg.arg in optional)
        for arg in [*given.args, *stars, *given.kwonlyargs]
    }


def _signature(name: str, parameters: dict[str, str], result: str) -> str:
    texts = [f"{parameter}: {kind}" if kind else parameter for parameter, kind in parameters.items()]
    line = f"def {name}({', '.join(texts)}) -> {result}: ..."
    if len(line) <= WIDTH - 4:  # of the indentation
        return line
    unbroken = ", ".join(text.replace(" ", "\0") for text in texts)
    rows = textwrap.fill(unbroken, WIDTH - 8, break_on_hyphens=False).replace("\0", " ")
    return f"def {name}(\n{textwrap.indent(rows, '    ')}\n) -> {result}: ..."


if __name__ == "__main__":
    TARGET.write_text(generate(SOURCE.read_text()))
