"""The documentation site: its navigation, links that leave docs/, and text that comes from the code."""

import importlib.util
import logging
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from kos.__main__ import COMMANDS
from tests.forked import as_program

ROOT = Path(__file__).resolve().parent.parent


def hook(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"hook_{name}", ROOT / "docs" / "hooks" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_patterns_stand_for_the_pages_that_have_no_name():
    pages = ["index.md", "guides/a.md", "guides/b.md", "guides/c.md"]
    nav = [{"Home": "index.md"}, {"Guides": [{"First": ["guides/b.md"]}, "guides/*.md"]}, {"No": "no/*.md"}]
    assert hook("navigation").expand(nav, pages) == [
        {"Home": "index.md"},
        {"Guides": [{"First": ["guides/b.md"]}, "guides/a.md", "guides/c.md"]},
    ]


@pytest.mark.parametrize("url", ["", "https://example.org/kos"])
def test_links_that_leave_docs(url, monkeypatch, caplog):
    pytest.importorskip("mkdocs")
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

    monkeypatch.setenv("KOS_REPOSITORY_URL", url)
    config = MkDocsConfig()
    config["docs_dir"], config["site_dir"] = str(ROOT / "docs"), str(ROOT / "build" / "docs")
    config["plugins"], config["use_directory_urls"] = SimpleNamespace(_current_plugin="links"), False
    page = SimpleNamespace(
        file=SimpleNamespace(src_uri="guides/a.md", abs_src_path=str(ROOT / "docs" / "guides" / "a.md"))
    )
    files, text = Files([]), "[a](../../README.md#kos), [b](../index.md), `[c](../../x.py)`\n```\n[d](../../x)\n```\n"
    result = hook("links").on_page_markdown(text + "[e](../../none.py)\n", page, config, files)
    there = f"{url}/blob/main/README.md#kos" if url else "../repository/README.md.txt"
    assert result == text.replace("../../README.md#kos", there) + "[e](../../none.py)\n"
    assert [file.src_uri for file in files] == ([] if url else ["repository/README.md.txt"])
    assert "guides/a.md: expected a file of the repository, got a link to ../../none.py" in caplog.text


def test_examples_in_docstrings_are_python():
    pytest.importorskip("griffe")
    text = "Add.\n\n    comm.all_reduce(x)\n\n    y = x\n\nMore.\n\n- a list\n    of two lines"
    expected = "Add.\n\n```python\ncomm.all_reduce(x)\n\ny = x\n```\n\nMore.\n\n- a list\n    of two lines"
    assert hook("docstrings").fenced(text) == expected


def test_a_folder_shows_what_is_not_hidden(tmp_path):
    pytest.importorskip("mkdocs")
    for name in (".secret", "a.py", "b.py"):
        (tmp_path / name).touch()
    assert [path.name for path in hook("links").tracked(tmp_path)] == ["a.py", "b.py"]
    assert [path.name for path in hook("links").tracked(ROOT / "docs" / "hooks")] == sorted(
        path.name for path in (ROOT / "docs" / "hooks").glob("*.py")
    )


@pytest.fixture
def forked(monkeypatch, tmp_path):
    """Forked processes make the parsers of commands, because they start faster."""
    monkeypatch.setattr(sys, "executable", as_program(tmp_path / "python"))


@pytest.mark.usefixtures("forked")
def test_names_of_the_reference_become_their_docstrings(caplog):
    reference, page = hook("reference"), SimpleNamespace(file=SimpleNamespace(src_uri="reference/api.md"))
    text = "- `kos.Work.done`\n- `kos.comm.Batch`\n\n- `kos.init` is not alone in its line\n"
    shown = "\n::: kos.Work.done\n\n\n::: kos.comm.Batch\n    options:\n      members: [wait, works]\n\n"
    assert reference.on_page_markdown(text, page) == f"{shown}\n- `kos.init` is not alone in its line\n"
    assert not caplog.records
    stale = "<!-- commands -->\n\n## kos trian\n\n<!-- end -->\n"
    assert "## kos train\n" in reference.on_page_markdown(stale, page) and "kos trian" not in reference.renewed(stale)
    [record] = caplog.records
    expected = "reference/api.md: expected what the code says: python -m docs.hooks.reference"
    assert (record.levelno, record.getMessage()) == (logging.WARNING, expected)


def test_options_are_of_names_that_are_shown():
    shown = set(hook("reference").NAME.findall((ROOT / "docs" / "reference" / "api.md").read_text()))
    assert len(shown) > 100 and hook("reference").OPTIONS.keys() <= shown


def test_the_code_of_the_home_page_does_not_scroll_sideways():
    """The site's column shows 80 characters in a window of 1,280 to 1,440 pixels, and 57 in one of 500."""
    text = (ROOT / "docs" / "index.md").read_text()
    lines = [line for block in re.findall(r"^```\w+\n(.*?)^```$", text, re.M | re.S) for line in block.splitlines()]
    assert lines and [line for line in lines if len(line) > 57] == []


def test_the_page_of_variables_is_up_to_date():
    page, reference = (ROOT / "docs" / "reference" / "environment.md").read_text(), hook("reference")
    assert reference.renewed(page) == page, "python -m docs.hooks.reference"
    assert reference.renewed(page.replace("| `KOS_JOIN` |", "| `KOS_JION` |")) == page


@pytest.mark.usefixtures("forked")
def test_the_page_of_commands_is_up_to_date():
    """In a clone it has a heading for each command, to which the site adds the arguments."""
    page = (ROOT / "docs" / "reference" / "commands.md").read_text()
    reference = hook("reference")
    assert reference.renewed(page) == page, "python -m docs.hooks.reference"
    shown = reference.on_page_markdown(page, SimpleNamespace(file=SimpleNamespace(src_uri="reference/commands.md")))
    assert shown.count("\n## kos ") == page.count("\n## kos ") == len(COMMANDS)
    assert "| `--data NAME or PATH[:WEIGHT]` |" in shown and "| `--data" not in page
