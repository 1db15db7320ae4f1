"""An option that takes one value is refused if it is given twice, by every command."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

import kos
from kos.errors import ConfigError
from kos.reporting import ArgumentParser, Parser

COMMANDS = {
    "kos.train.sample": "run --tokens 1 --tokens 2",
    "kos.train.chat": "run --system a --system b",
    "kos.train.tokenize": "source out --loss-on all --loss-on all",
    "kos.train.export": "run out --dtype float32 --dtype bfloat16",
    "kos.train.tools.plot": "run -o a.png --out b.png",
    "kos.comm.schedules.__main__": "--ranks 4 --ranks=8",
    "kos.comm.recorder.__main__": "dump --trace a --trace b",
    "kos.testing.conformance.__main__": "--ranks 2 --ranks 3",
    "kos.doctor.__main__": "--timeout 1 --timeout 2",
    "kos.tune.measure": "--out a --out b",
    "kos.bench.__main__": "--sizes 1K --sizes 2K",
    "kos.train.evaluate": "run --data stdlib --fit cut --fit whole",
}


@pytest.mark.parametrize("module", COMMANDS)
def test_a_command_refuses_it(module: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    if module.startswith("kos.train"):
        pytest.importorskip("pydantic", reason="needs the extra 'train'")
    ended = []
    monkeypatch.setattr("os._exit", ended.append)
    try:
        status = importlib.import_module(module).main(COMMANDS[module].split())
    except SystemExit as end:
        status = end.code
    assert 2 in (status, *ended)
    assert re.search(r"(--[a-z-]+): expected one value, got \S+ and \S+$", capsys.readouterr().err.strip())


def test_a_parser_may_be_used_again_and_options_of_several_values_are_repeated() -> None:
    parser = Parser()
    parser.add_argument("--one", type=int)
    parser.add_argument("--several", action="append")
    parser.add_argument("--on", action="store_true")
    for _ in range(2):
        found = parser.parse_args(["--one", "1", "--several", "a", "--several", "b", "--on", "--on"])
        assert (found.one, found.several, found.on) == (1, ["a", "b"], True)
    with pytest.raises(ConfigError, match=r"^--one: expected one value, got 1 and 1$"):
        parser.parse_args(["--one=1", "--one", "1"])
    assert isinstance(parser, ArgumentParser)


def test_every_command_has_such_a_parser() -> None:
    folder = Path(kos.__path__[0])
    others = [path for path in folder.rglob("*.py") if re.search(r"argparse\.ArgumentParser\(\w", path.read_text())]
    assert others == []
