"""The pages lead to each other: links and their anchors exist, and every page is in the site's navigation."""

import re
from collections import Counter
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

from docs.hooks.fences import CODE
from tests.lines import LANGUAGES

ROOT = Path(__file__).resolve().parent.parent
DOCS = sorted((ROOT / "docs").rglob("*.md"))
OUTSIDE = (
    "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "examples/README.md", "benchmarks/notebook.md"
)  # fmt: skip
PAGES = [*(ROOT / each for each in OUTSIDE), *DOCS]
LINK = re.compile(r"\]\(\s*([^)\s]+)|^\[[^\]\n]+\]:\s*(\S+)|<(?:a|img)\b[^>]*?\b(?:href|src)=\"([^\"]+)", re.M)
HEADING = re.compile(r"^#{1,6} +(.+?)[ #]*$", re.M)


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def links(text: str) -> list[str]:
    """The targets within the repository."""
    found = [next(filter(None, match)) for match in LINK.findall(CODE.sub("`code`", text))]
    return [target for target in found if not re.match(r"[a-z]+:", target)]


def anchors(page: Path) -> set[str]:
    """The anchors of a page, as GitHub and the site make them, and those that only the site has."""
    text = re.sub(r"^(```|~~~).*?^\1", "", page.read_text(), flags=re.M | re.S)
    made = set(re.findall(r"^- `(kos[\w.]*)`$", text, re.M)) | set(re.findall(r"<a (?:id|name)=\"([^\"]+)\"", text))
    slugs = Counter(slug(heading) for heading in HEADING.findall(text))
    return made | {each for each, times in slugs.items() if times == 1}  # GitHub and the site number others differently


def slug(heading: str) -> str:
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    return re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")


def test_targets_of_links_exist():
    wrong, known = list[str](), cache(anchors)
    for page in PAGES:
        for target in links(page.read_text()):
            path, _, anchor = target.partition("#")
            there = (page.parent / path).resolve() if path else page
            if not there.exists() or (anchor and there.suffix == ".md" and anchor not in known(there)):
                wrong.append(f"{name(page)}: {target}")
    assert not wrong, f"expected targets that exist, got {wrong}"


def test_every_page_is_in_the_navigation():
    nav = re.search(r"^nav:\n((?: +.*\n)+)", (ROOT / "mkdocs.yml").read_text(), re.M)
    listed = re.findall(r"(?:- |: )(\S+\.md)$", nav[1], re.M)
    pages = [page.relative_to(ROOT / "docs").as_posix() for page in DOCS]
    missing = [page for page in pages if not any(fnmatch(page, each) for each in listed)]
    assert len(listed) > 10 and not missing, f"mkdocs.yml: expected these pages in nav: {missing}"
    assert len(listed) == len(set(listed)), f"mkdocs.yml: expected each page once in nav, got {Counter(listed)}"


def test_the_page_of_files_names_every_file():
    text, named = (ROOT / "docs" / "files.md").read_text(), set()
    for folder, rows in re.findall(r"^## (kos\S*)\n(.*?)(?=^## |\Z)", text, re.M | re.S):
        named |= {f"{folder}/{file}" for file in re.findall(r"`([^`|]+)`(?=[^|\n]* \| [^\n|]+ \|$)", rows, re.M)}
    paths = (path for path in (ROOT / "kos").rglob("*.*") if path.suffix in LANGUAGES and path.stat().st_size)
    assert named == {name(path) for path in paths}
