"""Every Python block of the README and of docs/ runs, and prints what the page says.

A comment before a block says how: ``<!-- on 4 ranks -->`` with ``comm`` on so many mock ranks,
``<!-- script: mpirun -n 2 -->`` under mpirun, ``<!-- pytest -->`` as a test file, ``<!-- with torch -->`` where that is
installed, ``<!-- not run: why -->``.
A block without one is a script of one rank.  ``<!-- prints -->`` after the block and a ```text block after that
hold its output.

``<!-- file: NAME -->``: the block is a file, which commands of the page use.  ``<!-- run -->`` before a ```console
block: its lines ``$ COMMAND`` run in the order of the page, in one temporary folder, where `python`, `kos`, `pytest`
and `mpirun` are found; the lines after a command are its output.  ``<!-- run, exit 1 -->`` names an exit status.

In output, `…` stands for any part of a line, and a line `…` for any lines.  ``<!-- prints, in any order -->`` and
``<!-- run, in any order -->`` compare lines that ranks print in any order.
"""

import contextlib
import importlib.util
import inspect
import io
import os
import pkgutil
import pydoc
import re
import shlex
import subprocess
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kos
import kos.testing
from kos import _core
from kos.comm.recorder import Recorder
from kos.memory import Array
from kos.testing import spawn
from tests.comm.test_jobs import environment
from tests.forked import as_program, fork_server, python
from tests.launcher import MPIRUN, open_mpi, run_program

ROOT = Path(__file__).resolve().parent.parent
COMMUNICATOR = ("collectives", "gpus", "hosts", "failures", "determinism", "testing-your-code", "backends")
GUIDES = "\n".join((ROOT / "docs" / "guides" / f"{name}.md").read_text() for name in COMMUNICATOR)
"""The guides to the communicator."""
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(
    r"(?:^<!-- (?P<how>[^\n]*) -->\n)?^```python\n(?P<code>.*?)^```$"
    r"(?:\s+^<!-- prints(?P<unordered>, in any order)? -->\n^```text\n(?P<printed>.*?)^```$)?",
    re.M | re.S,
)
COMMANDS = re.compile(
    r"^<!-- file: (?P<name>\S+) -->\n^```\w+\n(?P<code>.*?)^```$"
    r"|^<!-- run(?P<unordered>, in any order)?(?:, exit (?P<status>\d+))? -->\n"
    r"^```console\n(?P<text>.*?)^```$",
    re.M | re.S,
)
HOW = re.compile(
    r"on (?P<ranks>\d+) ranks|script: mpirun -n (?P<mpi>\d+)|(?P<pytest>pytest)|with (?P<needs>\w+)"
    r"|not run: (?P<why>.+)"
)
LIMIT = 200  # seconds
TOGETHER: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}


def blocks() -> list[pytest.ParameterSet]:
    found = []
    for page in PAGES:
        text = page.read_text()
        for match in BLOCK.finditer(text):
            line = text.count("\n", 0, match.start("code")) + 1
            name = f"{page.relative_to(ROOT)}:{line}"
            if not (match["how"] or "").startswith("file: "):
                found.append(pytest.param(match, name, line, id=name))
    return found


def run(*command: str, cwd: Path, env: dict[str, str] | None = None, status: int = 0) -> str:
    done = run_program(*command, cwd=cwd, env=env or environment(), capture_output=False, **TOGETHER)
    assert done.returncode == status, f"{shlex.join(command)}: {done.returncode}\n{done.stdout}"
    return str(done.stdout)


@pytest.mark.parametrize(("block", "name", "line"), blocks())
def test_block(block, name, line, tmp_path):
    how, code = block["how"], block["code"]
    way = HOW.fullmatch(how) if how else None
    assert way or not how, f"{name}: expected a comment that says how to run it, got {how!r}"
    padded = "\n" * (line - 1) + code  # so that errors name the page's own line
    if way and way["why"]:
        pytest.skip(way["why"])
    if way and way["needs"] and importlib.util.find_spec(way["needs"]) is None:
        pytest.skip(f"needs {way['needs']}")
    if way and way["ranks"]:
        compiled = compile(padded, name, "exec")
        with contextlib.redirect_stdout(io.StringIO()) as stdout:
            spawn(lambda comm: exec(compiled, {"comm": comm, "kos": kos, "np": np}), int(way["ranks"]), timeout=LIMIT)
        text = stdout.getvalue()
    elif way and way["pytest"]:
        (tmp_path / "conftest.py").write_text('pytest_plugins = ["kos.testing.plugin"]\n')
        (tmp_path / "test_example.py").write_text(code)
        text = run(*python(), "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir=.", ".", cwd=tmp_path)
    elif way and way["mpi"]:
        if not MPIRUN:
            pytest.skip("mpirun was not found beside Python or in PATH")
        script = tmp_path / "script.py"
        script.write_text(padded)
        text = run(MPIRUN, "-n", way["mpi"], *python(), str(script), cwd=tmp_path)
    else:
        output = tmp_path / "output"
        process = fork_server().start("tests.forked:run_program", [padded, name], environment(), output, tmp_path)
        try:
            assert process.wait(LIMIT) == 0, output.read_text()
        finally:
            process.kill()
        text = output.read_text()
    if block["printed"] is not None:
        assert prints(block["printed"], text, bool(block["unordered"])), f"{name}: printed\n{text}"


def prints(expected: str, printed: str, unordered: bool = False) -> bool:
    """Whether a program printed what a page shows; ``unordered``: the lines in any order."""
    wanted = [line.rstrip() for line in expected.splitlines()]
    lines = [line.rstrip() for line in printed.splitlines()]
    patterns = {line: ".*".join(map(re.escape, line.split("…"))) for line in wanted}
    if not unordered:
        parts = (r"(?:.*\n)*" if line == "…" else patterns[line] + r"\n" for line in wanted)
        return re.fullmatch("".join(parts), "".join(f"{line}\n" for line in lines)) is not None
    for each in (line for line in wanted if line != "…"):
        found = next((line for line in lines if re.fullmatch(patterns[each], line)), None)
        if found is None:
            return False
        lines.remove(found)
    return "…" in wanted or not lines


@pytest.mark.parametrize(
    "page", [page for page in PAGES if COMMANDS.search(page.read_text())], ids=lambda page: str(page.relative_to(ROOT))
)
def test_commands(page, tmp_path):
    programs, folder = tmp_path / "bin", tmp_path / "folder"
    programs.mkdir()
    folder.mkdir()
    for program, arguments in {"python": (), "kos": ("-m", "kos"), "pytest": ("-m", "pytest")}.items():
        as_program(programs / program, *arguments)
    env = environment() | {"PATH": f"{programs}:{Path(MPIRUN).parent}:{os.environ['PATH']}", "COLUMNS": "80"}
    text, ran = page.read_text(), ""
    for match in COMMANDS.finditer(text):
        if match["name"]:
            (folder / match["name"]).write_text(match["code"])
            continue
        line = text.count("\n", 0, match.start("text")) + 1
        for session in re.split(r"^\$ ", match["text"], flags=re.M)[1:]:
            command, _, expected = session.partition("\n")
            if "mpirun" in command and not MPIRUN:
                pytest.skip("mpirun was not found beside Python or in PATH")
            if "--with-ft" in command and open_mpi() < 5:
                pytest.skip("mpirun has no option --with-ft: it is not of Open MPI 5")
            if page.name == "04-failures.md" and _core.unavailable:
                pytest.skip(f"shows what errors name with shared memory: {_core.unavailable}")
            shell, status = ("bash", "-o", "pipefail", "-c"), int(match["status"] or 0)
            printed = run(*shell, command, cwd=folder, env=env, status=status)
            where = f"{page.relative_to(ROOT)}:{line}: {command}"
            assert prints(expected, printed, bool(match["unordered"])), f"{where}: printed\n{printed}"
            ran += command
    assert ran, f"{page.relative_to(ROOT)}: no command uses its files"


def test_each_comment_is_before_a_block():
    """A comment that is misspelt, or not directly before its block, would compare nothing."""
    for page in PAGES:
        text = page.read_text()
        comments = re.findall(r"^<!-- (?:file|run|prints)\b.*", text, re.M)
        found = [match[0] for match in COMMANDS.finditer(text)]
        found += [match[0] for match in BLOCK.finditer(text) if match["printed"] is not None]
        assert len(comments) == len(found), f"{page}: of {comments} only {len(found)} are before a block"


def public(thing: Any) -> Iterator[tuple[str, Any]]:
    """The public functions, methods and properties of a class, inherited or not, or of a module's ``__all__``."""
    names = dir(thing) if isinstance(thing, type) else getattr(thing, "__all__", None) or list(vars(thing))
    names = [name for name in names if not name.startswith("_")]
    for name in names:
        value = getattr(thing, name)
        if callable(value) or isinstance(value, property):
            yield name, value


def test_the_guides_name_every_method_of_the_communicator():
    missing = [name for name, _ in public(kos.Communicator) if not re.search(rf"\b{name}\b", GUIDES)]
    assert not missing, f"docs/guides do not mention {missing}"


def test_what_the_guides_name_can_be_imported():
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


PUBLIC = [kos, kos.testing, kos.Communicator, kos.Work, kos.comm.Batch, Recorder]
NAME = "{0.__name__}".format


@pytest.mark.parametrize("thing", [*PUBLIC, Array], ids=NAME)
def test_help_names_every_argument_and_the_errors(thing):
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


@pytest.mark.parametrize("thing", [kos.Communicator, kos.Work], ids=NAME)
def test_help_lists_what_the_reference_lists(thing):
    reference = (ROOT / "docs" / "reference" / "api.md").read_text()
    _, _, shown = pydoc.render_doc(thing, renderer=pydoc.plaintext).partition("Methods defined here")
    listed = set(re.findall(r"^ \|  (?:\w+ = )?([a-z]\w*)(?:\(|$| = )", shown, re.M))
    assert listed <= set(re.findall(rf"`kos\.(?:comm\.)?{thing.__name__}\.(\w+)`", reference)) and listed


def test_help_of_a_method_or_function_is_complete():
    """Its docstring names every argument and the errors, and has an example that compiles."""
    methods, lacking = [pair for pair in public(kos.Communicator) if inspect.isroutine(pair[1])], []
    functions = [(call.__name__, call) for call in (kos.init, kos.join, kos.register_backend, spawn)]
    for name, value in methods + functions:
        text = inspect.getdoc(value) or ""
        code = re.findall(r"(?<=\n\n)(?: {4}.+(?:\n|$))+", text)
        try:
            example = bool(code) and compile(textwrap.dedent(code[-1]), name, "exec")
        except SyntaxError:
            example = None
        words = [word for word in inspect.signature(value).parameters if word not in ("self", "comm")]
        lacking += [f"{name}: {word}" for word in words if not re.search(rf"``(?:\w+, )*{word}\b", text)]
        lacking += [f"{name}: {what}" for what, has in (("errors", "aises" in text), ("example", example)) if not has]
    assert not lacking, lacking


def test_blocks_are_found():
    assert {"README.md", "docs/guides/collectives.md"} <= {str(block.id).partition(":")[0] for block in blocks()}
