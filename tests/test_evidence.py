"""Every test runs in ``.ci/run``, or on GPUs if it needs one; and the tests that pages name as evidence exist."""

import ast
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.run import WITH_GPUS

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
NAMED = re.compile(r"(?<![\w.])((?:tests/)?(?:\w+/)*)(test_\w+)(\.py)?\b(?![*…])")
OF_A_PAGE = re.compile(r"def (test_\w+)|(test_\w+)\.py -->|examples/(test_\w+)\.py")
"""Tests that a page has its readers write, or shows as an example."""
FILES = {path.stem: path for path in sorted((ROOT / "tests").rglob("test_*.py"))}
SKIPPING = {"importorskip", "find_spec", "needs", "Package"}
"""Functions whose arguments are packages, without which tests are skipped."""
BROUGHT = {"griffe": "mkdocstrings", "PIL": "matplotlib", "cuda": "torch"}
"""Packages that another one brings."""


def named() -> Iterator[tuple[str, str]]:
    """Each page, and each test or file of tests that it names."""
    for page in PAGES:
        text = page.read_text()
        own = {name for found in OF_A_PAGE.findall(text) for name in found if name}
        for _, name, _ in NAMED.findall(text):
            if name not in own:
                yield page.relative_to(ROOT).as_posix(), name


def on_gpus(node: ast.AST) -> bool:
    """Whether a definition is marked as a test that needs a GPU."""
    return any(re.search(r"\bgpu\b", ast.unparse(each)) for each in getattr(node, "decorator_list", ()))


@cache
def packages(path: Path) -> set[str]:
    """Those that the tests of a file need, except its tests on GPUs."""
    found, left = set[str](), list[ast.AST]([ast.parse(path.read_text())])
    while left:
        node = left.pop()
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in SKIPPING:
            texts = [each.value for each in node.args if isinstance(each, ast.Constant)]
            found |= {str(text).partition(".")[0] for text in texts}
        if not on_gpus(node):
            left += ast.iter_child_nodes(node)
    return found


def installed() -> set[str]:
    """What ``.ci/run`` installs: kos with the extras of CI, and the packages that the script names."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    makefile, script = (ROOT / "Makefile").read_text(), (ROOT / ".ci" / "run").read_text()
    sets = dict(re.findall(r"^EXTRAS_(\w+) := (.*)$", makefile, re.M))
    extras = sets["ci"]
    while "$(" in extras:
        extras = re.sub(r"\$\(EXTRAS_(\w+)\)", lambda found: sets.get(found[1], "train,plot,mpi"), extras)
    wanted = [*project["dependencies"]]
    for extra in extras.split(","):
        wanted += project["optional-dependencies"][extra]
    for line in re.findall(r"pip install (.*?)\s*&?$", script.replace("\\\n", " "), re.M):
        wanted += [word for word in line.split() if not word.startswith("-")]
    return {canonicalize_name(Requirement(each).name) for each in wanted}


def test_named_tests_exist():
    written = {name for path in FILES.values() for name in re.findall(r"def (test_\w+)", path.read_text())}
    missing = [f"{page}: {name}" for page, name in named() if name not in FILES and name not in written]
    assert not missing, f"expected tests that exist, got {missing}"


def test_every_test_runs():
    """Without the packages that a test needs, it would be skipped, and say nothing."""
    there, lacking = installed(), dict[str, set[str]]()
    for name, path in FILES.items():
        if path.relative_to(ROOT).as_posix() not in WITH_GPUS:
            needed = {BROUGHT.get(each, each) for each in packages(path)} - {"kos", "numpy", "tests"}
            if absent := {each for each in needed if canonicalize_name(each) not in there}:
                lacking[name] = absent
    assert not lacking, f"expected .ci/run to install what tests need, got none of {lacking}"


def test_packages_are_found():
    assert packages(FILES["test_lora_peft"]) == {"peft"}
    assert {"numpy", "tokenizers", "torch", "transformers", "ray"} <= installed() and len([*named()]) > 60
