"""Comments and docstrings name files that exist."""

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("kos", "tests", "benchmarks", "examples", "docs/drawings", "docs/hooks")
NAMED = re.compile(r"(?<![\w./\-<{*$])(?:[\w\-]+/)*[\w\-]+\.(?:py|pyi|cu|cuh|c|h|md)\b(?![\w(/])")
IN_C = re.compile(r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"", re.DOTALL)
"""Comments; strings too, so that a comment's start within one is none."""
NAME_IN = re.compile(rf"({NAMED.pattern}), (\w*_\w+)\b")
"""A file, and what to look for in it: ``comm/schedules/basic.py, ring_all_reduce``."""
ELSEWHERE = {
    "Python.h", "dlpack.h", "fake.py", "math.h", "nccl.h", "sysexits.h", "x.cuh",
    "core/lib/io/record_writer.h", "dev/data/data_common.py", "doc/PERFORMANCE.md", "doc/log_format.md",
    "flashinfer/comm/abstractions.py", "karpathy/llm.c", "llm.c", "prepare.py", "shakespeare_char/prepare.py",
    "src/device/prims_ll.h", "src/encoder.py", "src/transformers/utils/chat_template_utils.py",
}  # fmt: skip
"""Files of other projects, which the comment names, and of tests; llm.c is a project."""


def comments(path: Path) -> Iterator[str]:
    """The comments and docstrings of a source file."""
    text = path.read_text()
    if path.suffix not in (".py", ".pyi"):
        yield from (found for found in IN_C.findall(text) if found[0] == "/")
        return
    starts = True
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT or (token.type == tokenize.STRING and starts):  # a docstring starts its line
            yield token.string
        if token.type not in (tokenize.NL, tokenize.COMMENT):
            starts = token.type in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)


def sources() -> list[Path]:
    kinds = (".py", ".pyi", ".cu", ".cuh", ".c", ".h")
    found = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*")) if path.suffix in kinds]
    return [path for path in found if path.is_file() and "__pycache__" not in path.parts]

def wrong(path: Path, known: dict[str, Path]) -> list[str]:
    """What the comments of a file name that does not exist.

    ``known``: the files of the clone, by every end of their paths.
    """

    def absent(text: str) -> Iterator[str]:
        for name in NAMED.findall(text):
            stands_for_any = name.rpartition("/")[2].partition(".")[0].isupper()  # NAME.cu
            if name not in known and name not in ELSEWHERE and not stands_for_any:
                yield name
        for name, what in NAME_IN.findall(text):
            if name in known and not re.search(rf"\b{what}\b", known[name].read_text()):
                yield f"{what} in {name}"

    if not [*absent(path.read_text())]:  # nor in a comment, which takes longer to find
        return []
    return [name for comment in comments(path) for name in absent(comment)]


def test_the_files_that_comments_name_exist():
    """And what does not exist is found: here, of this file and of one in C, that no file is known."""
    for path, named in ((Path(__file__), "schedules/basic.py"), (ROOT / "kos" / "_core" / "core.h", "kos/dtypes.py")):
        assert named in " ".join(wrong(path, {}))
    known = dict[str, Path]()
    for top in (*FOLDERS, "docs"):
        for path in (ROOT / top).rglob("*.*"):
            parts = path.relative_to(ROOT).parts
            known |= {"/".join(parts[start:]): path for start in range(len(parts))}
    known |= {path.name: path for path in ROOT.iterdir()}
    found = {str(path.relative_to(ROOT)): wrong(path, known) for path in sources()}
    assert len(found) > 500 and not {path: names for path, names in found.items() if names}
