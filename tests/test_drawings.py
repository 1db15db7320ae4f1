"""The drawn pictures of docs: each file is what ``python -m docs.drawings`` draws today."""

import re
import xml.etree.ElementTree as ET

import pytest

from docs.drawings import IMAGES, pictures

COMMITTED = {file.stem: file.read_text() for file in IMAGES.glob("*")}
SVG = "{http://www.w3.org/2000/svg}"
PAGES = sorted((IMAGES.parents[1] / "how-it-works").glob("*.md"))


def test_the_committed_pictures_are_those_drawn_today():
    drawn = pictures()
    assert COMMITTED.keys() == drawn.keys(), "run python -m docs.drawings, and remove what it no longer draws"
    stale = [name for name, svg in drawn.items() if COMMITTED[name] != svg]
    assert not stale, f"{stale}: run python -m docs.drawings"


def test_every_picture_is_on_a_page_and_every_page_has_a_picture():
    everywhere = IMAGES.parents[1].rglob("*.md")
    shown = {page: set(re.findall(r"images/how-it-works/([\w-]+)\.svg", page.read_text())) for page in everywhere}
    assert set().union(*shown.values()) == COMMITTED.keys()
    assert all(shown[page] for page in PAGES), shown


def test_the_index_lists_every_page():
    index = (IMAGES.parents[1] / "how-it-works" / "index.md").read_text()
    missing = [page.name for page in PAGES if page.name != "index.md" and f"]({page.name})" not in index]
    assert not missing


@pytest.mark.parametrize("name", sorted(COMMITTED))
def test_words_stay_inside_and_apart(name):
    """A letter is taken to be 0.56 of its size wide, as in DejaVu Sans, the widest of the fonts that are named."""
    root = ET.fromstring(COMMITTED[name])
    width, height = (float(root.get(side, "0")) for side in ("width", "height"))
    spans = []
    for text in root.iter(f"{SVG}text"):
        words, size = text.text or "", float(text.get("font-size", "0"))
        x, y, long = float(text.get("x", "0")), float(text.get("y", "0")), 0.56 * size * len(words)
        left = x - {"start": 0.0, "middle": long / 2, "end": long}[text.get("text-anchor", "")]
        assert left >= 0 and left + long <= width and size >= 11 and 0 < y < height, words
        spans.append((y, left, left + long, words))
    for y, left, right, words in spans:
        over = [other for at, a, b, other in spans if abs(at - y) < 8 and a < right - 1 and left < b - 1]
        assert over == [words], over
