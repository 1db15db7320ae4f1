"""Each mutation of ``tests.mutations`` finds the text that it changes."""

from __future__ import annotations

import ast

import pytest

from tests.mutations import MUTATIONS, Mutation
from tests.random_mutations import defects, replaced
from tests.run import ROOT


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: f"{mutation.file}: {mutation.old}")
def test_the_text_is_there(mutation: Mutation) -> None:
    assert mutation.old in (ROOT / mutation.file).read_text()


def test_random_defects_are_other_programs() -> None:
    text = "def f(é, x):\n    if not x < 2 and é:\n        g(x + 1)\n    return True\n"
    changed = {ast.unparse(ast.parse(replaced(text, node, new))) for node, new in defects(text, ast.parse(text))}
    found = {line.strip() for each in changed for line in each.splitlines()}
    assert found == {
        "def f(é, x):", "if not x < 2 and é:", "if not x <= 2 and é:", "if not x < 3 and é:", "if bool(x < 2) and é:",
        "if not x < 2 or é:", "if True:", "if False:", "g(x + 1)", "g(x - 1)", "g(x + 2)", "pass", "return True",
        "return False", "return None",
    }  # fmt: skip
