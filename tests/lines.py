"""Count the lines of code of each folder, and compare them with their bounds (``python tests/lines.py``).

The bounds are the present sizes, rounded up a little. ``test_tools.py`` fails if one is exceeded. A change that needs
more raises the bound, so that its review sees the growth. A change that removes much lowers it. The bound of the tests
follows from the size of kos: a line of code that is added to kos allows 1.2 lines of tests.

A line counts that is neither blank, nor comment, nor docstring; a string that is a statement is a docstring.
"""

import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = (
    "comm", "cuda", "memory", "doctor", "testing", "transfer", "interop", "train", "bench", "_core", "kos",
    "tests",
)  # fmt: skip
"""The folders in ``kos``; ``kos`` are the files right in it, ``tests`` the tests."""
LANGUAGES = {".py": "Python", ".pyi": "stubs", ".c": "C", ".h": "C", ".cu": "CUDA", ".cuh": "CUDA"}
LIBRARY = ("comm", "cuda", "memory", "doctor", "testing")
MOST_IN_FUNCTION, MOST_IN_FILE = 60, 500
TESTS, KOS = 42_000, 42_561
"""Lines of Python that the tests were given when kos had ``KOS`` lines of code, in all languages (1d323cb8)."""

_C = re.compile(r'"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|//[^\n]*|/\*.*?\*/', re.DOTALL)


@dataclass(frozen=True)
class File:
    """What is counted of one file."""

    folder: str
    path: str
    language: str
    code: int
    total: int
    classes: int = 0
    functions: tuple[tuple[str, int], ...] = ()
    """The name and the lines of code of each function."""


@dataclass(frozen=True)
class Bound:
    """What may not be exceeded.  ``found``: the functions or files that exceed it."""

    what: str
    most: int
    value: int
    found: tuple[str, ...] = ()


def code_lines(text: str, nodes: Iterable[ast.AST]) -> set[int]:
    """The numbers of the lines of code of a Python file; ``nodes`` are those of its syntax tree."""
    docstrings, strings = set[int](), set[int]()
    for node in nodes:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docstrings.update(_span(node))
        elif isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str)):
            strings.update(_span(node))  # whose lines may be blank, or look like a comment
    lines = enumerate(map(str.strip, text.split("\n")), 1)
    code = {number for number, line in lines if line and not line.startswith("#")}
    return (code | strings) - docstrings


def _span(node: ast.stmt | ast.expr) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def c_code_lines(text: str) -> int:
    """The number of lines of code of a C or CUDA file."""

    def without_comment(match: re.Match[str]) -> str:
        return match[0] if match[0][0] in "\"'" else "\n" * match[0].count("\n")

    return sum(bool(line.strip()) for line in _C.sub(without_comment, text).splitlines())


def count(folder: str, path: str, text: str) -> File:
    """Count a file; the end of ``path`` tells the language."""
    language, total = LANGUAGES[Path(path).suffix], len(text.splitlines())
    if language in ("C", "CUDA"):
        return File(folder, path, language, c_code_lines(text), total)
    nodes = list(ast.walk(ast.parse(text)))
    code = code_lines(text, nodes)
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    sizes = tuple((function.name, len(code.intersection(_span(function)))) for function in functions)
    return File(folder, path, language, len(code), total, sum(isinstance(node, ast.ClassDef) for node in nodes), sizes)


def files(root: Path = ROOT) -> Iterator[File]:
    """Every file of kos and of its tests."""
    for top in ("kos", "tests"):
        for path in sorted((root / top).rglob("*")):
            if path.suffix in LANGUAGES:
                inner = path.relative_to(root / top).parts
                folder = "tests" if top == "tests" else inner[0] if inner[1:] else "kos"
                yield count(folder, str(path.relative_to(root)), path.read_text())


def large_functions(counted: list[File]) -> list[str]:
    """The functions of kos with more lines of code than ``MOST_IN_FUNCTION``."""
    return [
        f"{file.path}: {name}: {lines}"
        for file in counted if file.folder != "tests"
        for name, lines in file.functions if lines > MOST_IN_FUNCTION
    ]  # fmt: skip


def large_files(counted: list[File], *folders: str) -> list[str]:
    """The files in ``folders`` with more lines, of whatever kind, than ``MOST_IN_FILE``; collectives.py may have."""
    return [
        f"{file.path}: {file.total}" for file in counted
        if file.folder in folders and file.total > MOST_IN_FILE and file.path != "kos/comm/collectives.py"
    ]  # fmt: skip


def bounds(counted: list[File]) -> list[Bound]:
    """The bounds, and the present sizes."""

    def lines(language: str, *folders: str) -> int:
        return sum(file.code for file in counted if file.folder in folders and file.language == language)

    functions, of_train = tuple(large_functions(counted)), tuple(large_files(counted, "train"))
    long = tuple(large_files(counted, *LIBRARY, "_core"))
    for_tests = TESTS + int(1.2 * (sum(file.code for file in counted if file.folder != "tests") - KOS))
    return [
        Bound(f"Python in {', '.join(LIBRARY)}", 20_820, lines("Python", *LIBRARY)),
        Bound("C in _core", 4_116, lines("C", "_core")),
        Bound("Python in interop", 1_406, lines("Python", "interop")),
        Bound("Python in transfer", 1_988, lines("Python", "transfer")),
        Bound("Python in train", 16_848, lines("Python", "train")),
        Bound("Python in tests", for_tests, lines("Python", "tests")),
        Bound("CUDA in comm and train", 5_658, lines("CUDA", "comm", "train")),
        Bound("classes in comm", 124, sum(file.classes for file in counted if file.folder == "comm")),
        Bound(f"functions of over {MOST_IN_FUNCTION} lines", 0, len(functions), found=functions),
        Bound(f"files of over {MOST_IN_FILE} lines in the library and _core", 0, len(long), found=long),
        Bound(f"files of over {MOST_IN_FILE} lines in train", 0, len(of_train), found=of_train),
    ]


def main(counted: list[File]) -> None:
    columns = list(dict.fromkeys(LANGUAGES.values()))
    sums = Counter[tuple[str, str]]()
    for file in counted:
        sums[file.folder, file.language] += file.code
    print(f"{'lines of code':<16}" + "".join(f"{language:>8}" for language in columns))
    for folder in FOLDERS:
        print(f"{folder:<16}" + "".join(f"{sums[folder, language]:>8,}" for language in columns))
    print(f"\n{'':<64}{'is':>8}{'at most':>9}")
    found = bounds(counted)
    for bound in found:
        print(f"{bound.what:<64}{bound.value:>8,}{bound.most:>9,}{'' if bound.value <= bound.most else '  exceeded'}")
    print("", *(each for bound in found for each in bound.found), sep="\n")


if __name__ == "__main__":
    main(list(files()))
