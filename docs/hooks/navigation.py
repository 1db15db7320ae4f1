"""The navigation of the site: patterns in ``nav`` of mkdocs.yml stand for all pages that it does not name."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

log = logging.getLogger("mkdocs.hooks.navigation")


def on_config(config: Any) -> Any:
    """Replace the patterns of ``nav`` by pages, and warn of pages that are in no section."""
    docs = Path(config["docs_dir"])
    pages = sorted(path.relative_to(docs).as_posix() for path in docs.rglob("*.md"))
    config["nav"] = expand(config["nav"], pages)
    listed = set(values(config["nav"]))
    for page in pages:
        if page not in listed:
            log.warning("%s: expected this page in a section of nav in mkdocs.yml", page)
    return config


def expand(nav: list[Any], pages: list[str]) -> list[Any]:
    """``nav`` with a list of pages in the place of each pattern, which stands for those that ``nav`` does not name."""
    named = {value for value in values(nav) if "*" not in value}
    return _expanded(nav, [page for page in pages if page not in named])


def _expanded(nav: list[Any], free: list[str]) -> list[Any]:
    result: list[Any] = []
    for entry in nav:
        title, value = next(iter(entry.items())) if isinstance(entry, dict) else (None, entry)
        if isinstance(value, list):
            found: Any = _expanded(value, free)
        elif "*" in value:
            found = [page for page in free if fnmatch(page, value)]
        else:
            found = value
        if found and title is not None:
            result.append({title: found})
        elif found:
            result.extend(found if isinstance(found, list) else [found])
    return result


def values(nav: list[Any]) -> Iterator[str]:
    """The names and patterns of ``nav``, in order."""
    for entry in nav:
        value = next(iter(entry.values())) if isinstance(entry, dict) else entry
        if isinstance(value, list):
            yield from values(value)
        else:
            yield value
