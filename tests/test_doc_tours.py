"""The tours of docs/how-it-works quote lines of the code: each is in a file that its row names."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("a-failure", "a-layer", "an-all-reduce")
TABLE = re.compile(r"^\| [^|\n]*\| line \| file in `([\w/]+)` \|\n\|[-|]+\|\n((?:\|.*\n)+)", re.M)
"""A table whose second column quotes lines.  The heading of its third names their folder."""


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


def test_quotes_are_found():
    assert len(quotes()) > 40 and all(files for *_, files in quotes())


@pytest.mark.parametrize(("folder", "code", "files"), quotes())
def test_a_quoted_line_is_in_its_file(folder, code, files):
    texts = [" ".join((ROOT / folder / each).read_text().split()) for each in files]
    assert any(all(part in text for part in code.split("…")) for text in texts), f"{code}: not in {files}"
