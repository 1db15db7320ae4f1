"""Random defects, one at a time, and whether the tests see them.

    python -m tests.random_mutations --record [pytest arguments]
    python -m tests.random_mutations --count 100 [--seed N] [--inside kos/comm] [--without FILE] [pytest arguments]
    python -m tests.random_mutations --again FILE [pytest arguments]

The first command notes which functions of kos each test calls, in build/called.json.  The second changes one
expression of a random function in a forked copy of this process, and runs tests that call it, the quickest first.
``--without`` names a file of tests, one a line, as pytest names them without parameters.  Defects are then drawn from
the functions that they call, and a defect that only they see is told apart.  So it shows what is lost if they go.
``--again`` plants the defects that such a command has printed into a file, to see whether later tests find them.
Functions that only other processes call are not met.
"""

import argparse
import ast
import contextlib
import gc
import json
import os
import random
import re
import select
import signal
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

from tests.run import REPORTS, ROOT

CALLED = REPORTS.parent / "called.json"
SECONDS = 60.0  # of the tests of one defect
MOST_TESTS, MOST_OF_REST = 10, 30

COMPARED: dict[type[ast.cmpop], str] = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.Is: "is not",
    ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
COMPUTED: dict[type[ast.operator], str] = {
    ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.FloorDiv: "*", ast.Div: "*", ast.Mod: "+"
}  # fmt: skip


def function_of(test: str) -> str:
    """The test without its parameters."""
    return test.partition("[")[0]


def defects(text: str, function: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """Each expression or statement of a function that may be changed, and what comes in its place."""

    def source(node: ast.AST) -> str:
        return f"({ast.get_source_segment(text, node)})"

    for node in ast.walk(function):
        match node:
            case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in COMPARED:
                yield node, f"({source(left)} {COMPARED[type(op)]} {source(right)})"
            case ast.BoolOp(op=op, values=values):
                yield node, "(" + (" or " if isinstance(op, ast.And) else " and ").join(map(source, values)) + ")"
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                yield node, f"bool{source(operand)}"
            case ast.BinOp(left=left, op=op, right=right) if type(op) in COMPUTED:
                yield node, f"({source(left)} {COMPUTED[type(op)]} {source(right)})"
            case ast.Constant(value=bool() as value):
                yield node, str(not value)
            case ast.Constant(value=int() as value):
                yield node, str(value + 1)
            case ast.Return(value=ast.expr()):
                yield node, "return None"
            case ast.Expr(value=ast.Call()):
                yield node, "pass"
            case ast.If(test=test) | ast.IfExp(test=test):
                yield test, "True"
                yield test, "False"


PRINTED = re.compile(r"^(?:seen[\w ]*|MISSED|LOST): (\S+?):(\d+): (.*?) -> (.*?)  (\S.*)?$", re.M)
"""A printed defect: file, line, the old text, the new text, and the test that fails."""


def first_lines(text: str, node: ast.AST, new: str) -> tuple[str, str]:
    return (ast.get_source_segment(text, node) or "").partition("\n")[0], new.partition("\n")[0]


def find(text: str, line: int, changed: tuple[str, str]) -> tuple[int, ast.AST, str] | None:
    """The first line of the function that has this defect in this line, what is changed there, and into what."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    for function in [node for node in ast.walk(ast.parse(text)) if isinstance(node, kinds)][::-1]:
        for node, new in (each for part in function.body for each in defects(text, part)):
            if getattr(node, "lineno", 0) == line and first_lines(text, node, new) == changed:
                return min([function.lineno, *(each.lineno for each in function.decorator_list)]), node, new
    return None


def replaced(text: str, node: Any, new: str) -> str:
    lines = text.splitlines(keepends=True)
    first, last = lines[node.lineno - 1].encode(), lines[node.end_lineno - 1].encode()
    middle = first[: node.col_offset].decode() + new + last[node.end_col_offset :].decode()
    return "".join([*lines[: node.lineno - 1], middle, *lines[node.end_lineno :]])


def codes(code: CodeType) -> Iterator[CodeType]:
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield inner
            yield from codes(inner)


def plant(path: Path, text: str, changed: str) -> bool:
    """Give every function of that file the code that it has in the changed text; whether one has changed."""
    pairs = zip(codes(compile(text, str(path), "exec")), codes(compile(changed, str(path), "exec")), strict=False)
    new = {(old.co_qualname, old.co_firstlineno): code for old, code in pairs if old != code}
    planted = 0
    for function in gc.get_objects():
        if isinstance(function, FunctionType) and function.__code__.co_filename == str(path):
            code = new.get((function.__code__.co_qualname, function.__code__.co_firstlineno))
            if code is not None:
                with contextlib.suppress(ValueError):  # another number of free variables
                    function.__code__ = code
                    planted += 1
    return planted > 0


class Recording:
    """A plugin that notes the functions of kos that each test calls, by file and first line, and its seconds."""

    def __init__(self) -> None:
        self.called: dict[str, Any] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        met = set[CodeType]()

        def note(frame: FrameType, event: str, _: Any) -> None:
            met.add(frame.f_code)

        began = time.monotonic()
        threading.setprofile(note)
        sys.setprofile(note)
        try:
            return (yield)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
            files = defaultdict(list)
            for code in tuple(met):  # other threads may still add to it
                if code.co_filename.startswith(f"{ROOT}/kos/"):
                    files[str(Path(code.co_filename).relative_to(ROOT))].append(code.co_firstlineno)
            self.called[item.nodeid] = [time.monotonic() - began, files]

    def pytest_unconfigure(self) -> None:
        CALLED.write_text(json.dumps(self.called))


class Mutating:
    """A plugin that runs, in place of the tests, some of them on each of many defects."""

    def __init__(self, seed: int, count: int, inside: str, without: set[str], again: str = "") -> None:
        self.random, self.count, self.inside, self.without = random.Random(seed), count, inside, without
        self.again = PRINTED.findall(again)
        self.called = json.loads(CALLED.read_text())
        self.found = Counter[str]()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = {item.nodeid: item for item in session.items}
        tests = defaultdict(list)
        for test, (_, files) in self.called.items():
            for file, lines in files.items() if test in items else ():
                for line in lines if file.startswith(self.inside) else ():
                    tests[file, line].append(test)
        if self.without:
            called = {place for place, found in tests.items() if not self.without.isdisjoint(map(function_of, found))}
            tests = defaultdict(list, {place: tests[place] for place in called})
        gc.unfreeze()  # functions that the collector does not pass over can be found
        for file, line, old, new, test in self.again:
            self.found[self.plant_again(file, int(line), (old, new), test, tests, items)] += 1
        while not self.again and sum(self.found.values()) < self.count:
            file, line = self.random.choice(sorted(tests))
            if became := self.defect(file, line, [items[test] for test in tests[file, line]]):
                self.found[became] += 1
        print(f"\n{dict(self.found)} of {len(self.again) or self.count} defects")
        return True

    def plant_again(self, file: str, line: int, changed: tuple[str, str], by: str, tests: Any, items: Any) -> str:
        """Plant a defect that was printed before.  The test that has failed runs first."""
        path = ROOT / file
        text = path.read_text() if path.exists() else ""
        if not (found := find(text, line, changed)):
            print(f"not there: {file}:{line}: {changed[0]} -> {changed[1]}", flush=True)
            return "not there"
        first, node, new = found
        chosen: dict[str, str] = {}
        for test in sorted(tests[file, first], key=lambda test: self.called[test][0]):
            chosen.setdefault(function_of(test), test)
        ordered = sorted(chosen, key=lambda function: function != function_of(by))
        most = MOST_TESTS + MOST_OF_REST
        test = failing([items[chosen[each]] for each in ordered[:most]], path, text, replaced(text, node, new))
        became = ("seen again" if by else "seen") if test else ("LOST" if by else "MISSED")
        print(f"{became}: {file}:{line}: {changed[0]} -> {changed[1]}  {test}", flush=True)
        return became

    def defect(self, file: str, line: int, items: list[pytest.Item]) -> str:
        path, kinds = ROOT / file, (ast.FunctionDef, ast.AsyncFunctionDef)
        text = path.read_text()
        functions = [each for each in ast.walk(ast.parse(text)) if isinstance(each, kinds)]
        known = [each for each in functions if min([each.lineno, *(d.lineno for d in each.decorator_list)]) == line]
        ways = [each for function in known for part in function.body for each in defects(text, part)]
        if not ways:
            return ""
        node, new = self.random.choice(ways)
        assert isinstance(node, ast.expr | ast.stmt)
        items.sort(key=lambda item: self.called[item.nodeid][0])
        parts: dict[str, list[pytest.Item]] = {"kept": [], "without": []}
        for item in items:
            part = parts["without" if function_of(item.nodeid) in self.without else "kept"]
            if function_of(item.nodeid) not in map(function_of, (each.nodeid for each in part)):
                part.append(item)
        changed, kept, became = replaced(text, node, new), parts["kept"], "seen"
        test = failing(kept[:MOST_TESTS], path, text, changed)
        test = test or failing(kept[MOST_TESTS : MOST_TESTS + MOST_OF_REST], path, text, changed)
        if not test:
            test = failing(parts["without"][:MOST_OF_REST], path, text, changed)
            became = "seen by them alone" if test else "MISSED"
        old, short = first_lines(text, node, new)
        print(f"{became}: {file}:{node.lineno}: {old} -> {short}  {test}", flush=True)
        return became


def failing(items: list[pytest.Item], path: Path, text: str, changed: str) -> str:
    """The first of these tests that fails, hangs or ends a process in which the text of that file is changed."""
    if not items:
        return ""
    reading, writing = os.pipe()
    if not (child := os.fork()):
        os.setsid()
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, 1), os.dup2(nothing, 2)
        if not plant(path, text, changed):
            os._exit(0)
        for item, after in zip(items, [*items[1:], None], strict=True):
            os.write(writing, f"{item.nodeid}\n".encode())
            if any(report.failed for report in runtestprotocol(item, log=False, nextitem=after)):
                os._exit(1)
        os._exit(0)
    os.close(writing)
    begun, until = b"", time.monotonic() + SECONDS
    while select.select([reading], [], [], max(0, until - time.monotonic()))[0]:
        if not (more := os.read(reading, 1 << 16)):
            break
        begun += more
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    os.close(reading)
    _, status = os.waitpid(child, 0)
    return begun.decode().splitlines()[-1] if status and begun else ""


def main() -> int:
    parser = argparse.ArgumentParser(description="Plant random defects and see whether the tests fail.")
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(3)))
    parser.add_argument("--inside", default="kos/")
    parser.add_argument("--without", type=Path)
    parser.add_argument("--again", type=Path)
    asked, arguments = parser.parse_known_args()
    options = ["-q", "-s", "-p", "no:xdist", "-p", "no:cacheprovider", "-m", "not mpi and not slow", *arguments]
    if asked.record:
        CALLED.parent.mkdir(parents=True, exist_ok=True)
        return int(pytest.main(options, [Recording()]))
    again = asked.again.read_text() if asked.again else ""
    print(f"seed {asked.seed}" * (not again))
    without = set(asked.without.read_text().split()) if asked.without else set[str]()
    return int(pytest.main(options, [Mutating(asked.seed, asked.count, asked.inside, without, again)]))


if __name__ == "__main__":
    sys.exit(main())
