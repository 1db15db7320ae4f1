"""Tests use no private names of kos, ``_x``: those that still do are listed by file, and the numbers only go down.

``python -m tests.test_private_names`` writes the list, ``tests/private_names.txt``, anew.  Seams that stay are no
private names: ``kos._core`` and what its header defines, ``Transport``, the layout of segments, the ABI of kernels.
"""

import ast
import functools
import re
from collections.abc import Iterator

from tests.run import ROOT

LISTED = ROOT / "tests" / "private_names.txt"
SEAMS = {"_core"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in SEAMS | {"_"}


def defined(tree: ast.AST) -> set[str]:
    """The private names that a file defines: of functions, classes, variables and attributes."""
    names = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
    return {name for name in names if is_private(name)}


@functools.cache
def of_kos() -> set[str]:
    return set().union(*(defined(ast.parse(path.read_text())) for path in (ROOT / "kos").rglob("*.py")))


def used(text: str) -> Iterator[tuple[int, str]]:
    """The lines of a test that use a private name of kos, and the name: imported, as an attribute, or as text."""
    tree = ast.parse(text)
    own = {
        node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)
    } | {
        node.attr for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and of_self(node)
    }  # fmt: skip
    of_others = of_kos() - own
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "kos":
            yield from ((node.lineno, each.name) for each in node.names if is_private(each.name))
        elif isinstance(node, ast.Attribute) and not of_self(node) and node.attr in of_others:
            yield node.lineno, node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            name = node.value.rpartition(".")[2]
            if name in of_kos() and (node.value.startswith("kos.") or name == node.value):  # as monkeypatch takes it
                yield node.lineno, name


def of_self(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def counts() -> dict[str, int]:
    """The number of uses in each file of the tests that has some."""
    texts = {str(path.relative_to(ROOT)): path.read_text() for path in (ROOT / "tests").rglob("*.py")}
    candidates = {path: text for path, text in texts.items() if not of_kos().isdisjoint(re.findall(r"\b_\w+", text))}
    found = {path: len(list(used(text))) for path, text in candidates.items()}
    return {path: count for path, count in sorted(found.items()) if count}


def test_private_names_of_kos_become_fewer():
    listed = {path: int(count) for count, path in (line.split() for line in LISTED.read_text().splitlines())}
    found = counts()
    more = {path: count for path, count in found.items() if count > listed.get(path, 0)}
    named = {path: list(used((ROOT / path).read_text())) for path in more}
    assert not more, f"expected no more private names of kos than {LISTED.name} lists, got {named}"
    assert found == listed, "there are fewer by now: run python -m tests.test_private_names"


if __name__ == "__main__":
    LISTED.write_text("".join(f"{count} {path}\n" for path, count in counts().items()))
