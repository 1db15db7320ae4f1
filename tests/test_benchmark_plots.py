"""The pictures and tables of README.md and docs/benchmarks are those of the recorded results."""

import re

import pytest

from benchmarks.plots import __main__ as command
from benchmarks.plots import results, tables
from benchmarks.plots.pictures import PICTURES
from benchmarks.plots.results import RESULTS, ROOT

README = ROOT / "README.md"
LARGEST = 100_000  # bytes of a picture
CODE = re.compile(r"^```.*?^```$", re.M | re.S)
LINK = re.compile(r"\]\(([^)#\s]+)(#[^)]*)?\)")
FIGURE = re.compile(r"\d[\d.,]*(?:[x%]|\s?(?:[µmn]s|seconds|tokens/s|[KMG]B/s|TFLOP/s|times)\b)")


@pytest.fixture
def drawing():
    matplotlib = pytest.importorskip("matplotlib")
    pytest.importorskip("PIL")
    from benchmarks.plots import style

    with matplotlib.rc_context(style.SETTINGS):
        yield


@pytest.mark.parametrize("page", tables.PAGES, ids=lambda page: page.name)
def test_a_page_is_that_of_the_files(page):
    """Its tables have the figures of their files, and the files and pictures to which it links are there."""
    text = page.read_text()
    assert tables.renewed(text, page) == text, "it differs from benchmarks/results: python -m benchmarks.plots"
    links = [link for link, _ in LINK.findall(text) if "benchmarks/results" in link or "images/" in link]
    assert not [link for link in links if not (page.parent / link).exists()]


def test_every_table_stands_in_a_page():
    named = [found["name"] for page in tables.PAGES for found in tables.MARKED.finditer(page.read_text())]
    assert sorted(named) == sorted(tables.TABLES)


def test_a_changed_figure_is_seen(tmp_path):
    text = README.read_text()
    figure = tables.readme().splitlines()[2].split(" | ")[1]
    changed = text.replace(f"| {figure} |", "| 0.01 |")
    assert changed != text and tables.renewed(changed, README) == text
    with pytest.raises(LookupError, match="expected a table of readme, .*, got 'no-such'"):
        tables.renewed("<!-- table no-such -->\n<!-- end -->\n", tmp_path / "page.md")


def test_readme_is_short_and_quotes_what_was_recorded():
    """It has figures in its table and in quoted output only, so that none goes unchecked."""
    text = README.read_text()
    assert not FIGURE.findall(LINK.sub("]", tables.MARKED.sub("", CODE.sub("", text))))
    assert FIGURE.findall("28.4 µs, 1.2x, 3,000 tokens/s, 4 times") == ["28.4 µs", "1.2x", "3,000 tokens/s", "4 times"]
    [quoted] = [code for code in CODE.findall(text) if "val_loss" in code]
    lines, output = quoted.splitlines()[1:-1], results.load("train-tiny-epyc-2")["output"]
    assert len(lines) == 10 and set(lines) <= set(output) and len(text.splitlines()) <= 130


def test_every_file_of_results_is_used():
    """A page, a tuning table or a test names it: what nothing needs goes."""
    places = [*tables.PAGES, *(ROOT / "docs").rglob("*.md"), *(ROOT / "kos").rglob("*.json")]
    places += [ROOT / "kos" / "train" / "device" / "rates.toml"]
    said = "".join(place.read_text() for place in places)
    assert not [path.name for path in RESULTS.iterdir() if path.name not in said]


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_are_those_of_the_files(name, drawing):
    from PIL import Image

    from benchmarks.plots import style

    path = command.IMAGES / f"{name}.png"
    assert path.stat().st_size < LARGEST
    with Image.open(path) as picture:
        assert picture.width == 7 * style.DPI
        shown = picture.text[style.DIGEST]
    assert style.digest(PICTURES[name]()) == shown, f"{path.name} differs from its results: python -m benchmarks.plots"
    pages = "".join(page.read_text() for page in tables.PAGES)
    assert f"images/{name}.png" in pages
