"""Every Python block of the README and of docs/ runs.

A comment before a block says how: ``<!-- on 4 ranks -->`` with ``comm`` on so many mock ranks,
``<!-- script: mpirun -n 2 -->`` under mpirun, ``<!-- pytest -->`` as a test file, ``<!-- not run: why -->``.
A block without one is a script of one rank.
"""

from __future__ import annotations

import inspect
import pkgutil
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kos
import kos.testing
from kos.comm.recorder import Recorder
from kos.memory import Array
from kos.testing import spawn
from tests.comm.test_jobs import environment
from tests.forked import fork_server
from tests.launcher import MPIRUN, run_program

ROOT = Path(__file__).resolve().parent.parent
COMMUNICATOR = ("collectives", "gpus", "hosts", "failures", "determinism", "testing-your-code", "backends")
GUIDES = "\n".join((ROOT / "docs" / "guides" / f"{name}.md").read_text() for name in COMMUNICATOR)
"""The guides to the communicator."""
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"(?:^<!-- (?P<how>[^\n]*) -->\n)?^```python\n(?P<code>.*?)^```$", re.M | re.S)
HOW = re.compile(
    r"on (?P<ranks>\d+) ranks|script: mpirun -n (?P<mpi>\d+)|(?P<pytest>pytest)|not run: (?P<why>.+)"
)
LIMIT = 200  # seconds


def blocks() -> list[pytest.ParameterSet]:
    found = []
    for page in PAGES:
        text = page.read_text()
        for match in BLOCK.finditer(text):
            line = text.count("\n", 0, match.start("code")) + 1
            name = f"{page.relative_to(ROOT)}:{line}"
            found.append(pytest.param(match["how"], match["code"], name, line, id=name))
    return found


def run(*command: str, cwd: Path) -> None:
    done = run_program(*command, cwd=cwd, env=environment())
    assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize(("how", "code", "name", "line"), blocks())
def test_block(how: str | None, code: str, name: str, line: int, tmp_path: Path) -> None:
    way = HOW.fullmatch(how) if how else None
    assert way or not how, f"{name}: expected a comment that says how to run it, got {how!r}"
    padded = "\n" * (line - 1) + code  # so that errors name the page's own line
    if way and way["why"]:
        pytest.skip(way["why"])
    elif way and way["ranks"]:
        compiled = compile(padded, name, "exec")
        spawn(
            lambda comm: exec(compiled, {"comm": comm, "kos": kos, "np": np}),
            int(way["ranks"]),
            timeout=LIMIT,
        )
    elif way and way["pytest"]:
        (tmp_path / "conftest.py").write_text('pytest_plugins = ["kos.testing.plugin"]\n')
        (tmp_path / "test_example.py").write_text(code)
        run(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir=.", ".", cwd=tmp_path)
    elif way and way["mpi"]:
        if not MPIRUN:
            pytest.skip("mpirun was not found beside Python or in PATH")
        script = tmp_path / "script.py"
        script.write_text(padded)
        run(MPIRUN, "-n", way["mpi"], sys.executable, str(script), cwd=tmp_path)
    else:
        output = tmp_path / "output"
        process = fork_server().start("tests.forked:run_program", [padded, name], environment(), output, tmp_path)
        try:
            assert process.wait(LIMIT) == 0, output.read_text()
        finally:
            process.kill()


def public(thing: Any) -> Iterator[tuple[str, Any]]:
    """The public functions, methods and properties of a class, inherited or not, or of a module's ``__all__``."""
    names = dir(thing) if isinstance(thing, type) else getattr(thing, "__all__", None) or list(vars(thing))
    names = [name for name in names if not name.startswith("_")]
    for name in names:
        value = getattr(thing, name)
        if callable(value) or isinstance(value, property):
            yield name, value


def test_the_guides_name_every_method_of_the_communicator() -> None:
    missing = [name for name, _ in public(kos.Communicator) if not re.search(rf"\b{name}\b", GUIDES)]
    assert not missing, f"docs/guides do not mention {missing}"


def test_what_the_guides_name_can_be_imported() -> None:
    names = sorted(set(re.findall(r"(?<![/\w.])kos(?:\.[A-Za-z_]\w*)+", GUIDES)))
    missing = [name for name in names if not resolves(name)]
    assert len(names) > 10 and not missing, missing
    for module, listed in re.findall(r"from (kos[\w.]*) import ([\w, ]+)", GUIDES):
        for name in listed.split(","):
            assert resolves(f"{module}.{name.strip()}"), (module, name)


def resolves(name: str) -> bool:
    try:
        return pkgutil.resolve_name(name) is not None
    except (ImportError, AttributeError):
        return False


@pytest.mark.parametrize(
    "thing",
    [kos, kos.comm, kos.testing, kos.Communicator, kos.Work, kos.comm.Batch, kos.comm.Persistent, Recorder],
    ids=lambda thing: thing.__name__,
)
def test_what_is_public_is_documented(thing: Any) -> None:
    bare = [name for name, value in public(thing) if not value.__doc__]
    assert not bare, f"{thing.__name__}: expected docstrings, {bare} have none"


@pytest.mark.parametrize(
    "thing", [kos, kos.testing, kos.Communicator, kos.Work, kos.comm.Batch, kos.comm.Persistent, Recorder, Array],
    ids=lambda thing: thing.__name__,
)
def test_help_names_every_argument_and_the_errors(thing: Any) -> None:
    """In a function's own text, in its class's, or in that of a function that its text names (``as ``split````)."""
    lacking = []
    for name, value in public(thing):
        if not inspect.isroutine(value):
            continue
        own = value.__doc__ or ""
        named = [getattr(thing, other, None) for other in re.findall(r"``(\w+)``", own)]
        texts = [own, *(each.__doc__ or "" for each in (thing, *named) if callable(each))]
        if not any(re.search(r"\b[Rr]aises?\b", text) for text in texts):
            lacking.append(f"{name}: errors")
        for argument in inspect.signature(value).parameters:
            if argument not in ("self", "comm") and not any(re.search(rf"\b{argument}\b", text) for text in texts):
                lacking.append(f"{name}: {argument}")
    assert not lacking, f"{thing.__name__}: {lacking}"


def test_blocks_are_found() -> None:
    assert {"README.md", "docs/guides/collectives.md"} <= {str(block.id).partition(":")[0] for block in blocks()}
