"""Links from a page to files of the repository that are outside docs/.

With ``[project.urls] Repository`` in pyproject.toml, or KOS_REPOSITORY_URL, they lead there.  Without either, the site
has a copy of each file as text, and a list of files in the place of a folder.  Images are always copied.
"""

from __future__ import annotations

import html
import logging
import os
import re
import shutil
import subprocess
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from docs.hooks.fences import CODE  # python -m mkdocs puts the repository on the path

log = logging.getLogger("mkdocs.hooks.links")

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"(\]\(\s*)([^)\s]+)|^(\[[^\]\n]+\]:\s*)(\S+)|(<(?:a|img)\b[^>]*?\b(?:href|src)=\")([^\"]+)", re.M)
PICTURES = (".svg", ".png", ".jpg", ".jpeg", ".gif", ".webp")
COPIES = "repository"
"""The folder of the site that holds copies."""


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Replace the links of the page that leave docs/."""
    source, docs = Path(page.file.abs_src_path), Path(config["docs_dir"])

    def replaced(match: re.Match[str]) -> str:
        before, target = next((match[i], match[i + 1]) for i in (1, 3, 5) if match[i] is not None)
        path, hash_, anchor = target.partition("#")
        there = (source.parent / path).resolve()
        if "://" in target or target.startswith("mailto:") or not path or there.is_relative_to(docs):
            return match[0]
        if not there.is_relative_to(ROOT) or not there.exists():
            log.warning("%s: expected a file of the repository, got a link to %s", page.file.src_uri, target)
            return match[0]
        name = there.relative_to(ROOT).as_posix()
        if repository() and there.suffix not in PICTURES:
            kind = "tree" if there.is_dir() else "blob"
            return f"{before}{repository()}/{kind}/main/{name}{hash_}{anchor}"
        return before + os.path.relpath(copy(there, config, files), Path(page.file.src_uri).parent)

    pieces, end = [], 0
    for code in CODE.finditer(markdown):
        pieces += [LINK.sub(replaced, markdown[end : code.start()]), code[0]]
        end = code.end()
    return "".join([*pieces, LINK.sub(replaced, markdown[end:])])


@cache
def repository() -> str:
    """The address of the repository; empty where none is known."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return os.environ.get("KOS_REPOSITORY_URL", project.get("urls", {}).get("Repository", "")).rstrip("/")


def tracked(folder: Path) -> list[Path]:
    """The files of a folder that git has; without git, all that are not hidden."""
    names = set[str]()
    if shutil.which("git"):
        command = ["git", "ls-files", "-z", "--", "."]
        names = set(subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60).stdout.split("\0"))
    files = sorted(each for each in folder.iterdir() if each.is_file() and each.name[0] != ".")
    return [each for each in files if each.name in names] or files


def copy(path: Path, config: Any, files: Files) -> str:
    """The address in the site of a copy of the file, or of a list of the folder's files."""
    name = f"{COPIES}/{path.relative_to(ROOT).as_posix()}"
    if path.is_dir():
        name += "/index.html"
        entries = [] if files.get_file_from_path(name) else tracked(path)
        items = [(each.name, Path(copy(each, config, files)).name) for each in entries]
        rows = "\n".join(f'<li><a href="{html.escape(to)}">{html.escape(label)}</a></li>' for label, to in items)
        content: str | bytes = f"<!doctype html><title>{html.escape(path.name)}</title>\n<ul>\n{rows}\n</ul>\n"
    else:
        name += "" if path.suffix in PICTURES else ".txt"
        content = path.read_bytes()
    if files.get_file_from_path(name) is None:
        files.append(File.generated(config, name, content=content))
    return name
