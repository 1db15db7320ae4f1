"""docs/reference/environment.md lists every environment variable that kos reads, and no other."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reference" / "environment.md"
OF_TESTS = "Of the tests and benchmarks"
PREFIXES = r"(KOS|OMPI|PMIX?|MPI_LOCAL|SLURM|TORCHELASTIC|MASTER|XDG)_?[A-Za-z0-9_]+|RANK|WORLD_SIZE|LOCAL_RANK"
"""Names that nothing but a variable has: also those that a table of the source holds are found."""
BUILT = {"WANDB_PROJECT", "TRACKIO_PROJECT"}
"""Names that the sources put together."""


def listed(only: str = "") -> dict[str, str]:
    """The section of each variable of the page's tables; ``only``: of one section."""
    found, section = dict[str, str](), ""
    for line in PAGE.read_text().splitlines():
        if line.startswith("## "):
            section = line.removeprefix("## ")
        elif line.startswith("| `") and (not only or only == section):
            for name in re.findall(r"`([A-Z][A-Za-z0-9_]+)`", line.split("|")[1]):
                assert name not in found, f"{name} is listed twice"
                found[name] = section
    return found


def read_by(tree: ast.AST) -> Iterator[str]:
    """The names of variables that a module reads, or may read."""
    for node in ast.walk(tree):
        text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
        if re.fullmatch(PREFIXES, text) and not text.endswith("_"):  # else it is the start of several names
            yield text
        of: ast.expr | None = None
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            of, key = node.func.value, node.args[0]
        elif isinstance(node, ast.Subscript):
            of, key = node.value, node.slice
        elif isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In | ast.NotIn):
            of, key = node.comparators[0], node.left
        named = of is not None and ast.unparse(of) in ("environ", "os.environ")
        if named and isinstance(key, ast.Constant) and isinstance(key.value, str):
            yield key.value


def python_files(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def test_every_variable_that_kos_reads_is_on_the_page() -> None:
    documented = listed()
    for path in python_files("kos"):
        missing = {*read_by(ast.parse(path.read_text()))} - documented.keys()
        assert not missing, f"{path.relative_to(ROOT)} reads {missing}: expected on {PAGE.relative_to(ROOT)}"
    for path in (ROOT / "kos" / "_core").glob("*.[ch]"):
        assert "getenv" not in path.read_text(), "the core reads none"


def test_every_variable_of_kos_that_a_page_names_is_on_the_page() -> None:
    pages = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").iterdir(), ROOT / "README.md", ROOT / "Makefile"]
    for path in pages:
        if path.is_file() and path.parent.name != "releases":  # which say what is gone
            missing = {*re.findall(r"\bKOS_[A-Z_]*[A-Z]\b", path.read_text())} - listed().keys()
            assert not missing, f"{path.relative_to(ROOT)} names {missing}, which the page lacks"


def test_every_variable_on_the_page_is_read() -> None:
    """By kos, or by the tests and benchmarks."""
    constants = re.compile(r"[\"']([A-Z][A-Za-z0-9_]+)[\"']")
    sections = listed()
    of_kos = {name for path in python_files("kos") for name in constants.findall(path.read_text())} | BUILT
    assert sections.keys() - listed(OF_TESTS).keys() <= of_kos, sections.keys() - listed(OF_TESTS).keys() - of_kos
    files = [path for path in python_files("tests", "benchmarks", "docs/hooks") if path != Path(__file__)]
    elsewhere = {name for path in files for name in constants.findall(path.read_text())}
    assert listed(OF_TESTS).keys() <= elsewhere


def test_every_variable_of_the_tests_is_on_the_page() -> None:
    """Those of kos's own name that a test, a benchmark or a hook of the site reads."""
    reads = re.compile(r"environ(?:\.get\(|\[)\"(KOS_[A-Z_]+)\"")
    files = python_files("tests", "benchmarks", "docs/hooks")
    names = {name for path in files for name in reads.findall(path.read_text())}
    names -= {"KOS_TEST_FIRST"}  # a test sets it for its own ranks
    assert names <= listed().keys(), names - listed().keys()
