"""The tours of docs/how-it-works quote lines of the code, and docs/architecture.md functions: each is in its file."""

import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("a-failure", "a-layer", "an-all-reduce")
TABLE = re.compile(r"^\| [^|\n]*\| line \| file in `([\w/]+)` \|\n\|[-|]+\|\n((?:\|.*\n)+)", re.M)
"""A table whose second column quotes lines.  The heading of its third names their folder."""


STEP = re.compile(r"((?:`\w+`(?:, )?)+) → `([\w/]+\.\w+)`")
"""Functions or classes, and their file in kos: `` `make_key`, `cache_find` → `_core/module_cache.c` ``."""


def quotes() -> list[tuple[str, str, tuple[str, ...]]]:
    """The folder, the quoted code and the files of each row."""
    found = []
    for page in PAGES:
        for folder, rows in TABLE.findall((ROOT / "docs" / "how-it-works" / f"{page}.md").read_text()):
            for row in rows.splitlines():
                _, code, files = row.strip("| ").split(" | ")
                named = tuple(re.findall(r"`([\w./]+\.\w+)`", files))
                found += [(folder, each, named) for each in re.findall(r"`([^`]+)`", code)]
    return found


def test_quoted_lines_are_in_their_files():
    texts = cache(lambda path: " ".join(path.read_text().split()))
    found = quotes()
    assert len(found) > 40 and all(files for *_, files in found)
    for folder, code, files in found:
        places = [texts(ROOT / folder / each) for each in files]
        assert any(all(part in text for part in code.split("…")) for text in places), f"{code}: not in {files}"


def test_the_functions_of_the_architecture_are_in_their_files():
    steps = STEP.findall((ROOT / "docs" / "architecture.md").read_text())
    found = [(name, file) for names, file in steps for name in re.findall(r"`(\w+)`", names)]
    assert len(found) > 50
    for name, file in found:
        defined = rf"^ *(?:def|class) {name}\b" if file.endswith(".py") else rf"^\w.*\b{name}\("
        assert re.search(defined, (ROOT / "kos" / file).read_text(), re.M), f"{name}: not defined in {file}"
